"""Two places where something may stand between training and the mean: noise on updates, secure aggregation.

Both are the identity today. Whoever changes one changes the other to fit, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Config
from ..types import Missing, ServerState, Update


def before_sending(update: Update, received: ServerState, config: Config) -> Update:
    """On the node: what leaves it instead of its update."""
    return update


def before_joining(
    updates: Iterator[Update | Missing], sent: ServerState, config: Config
) -> Iterator[Update | Missing]:
    """On the server: what is checked and joined instead of the updates that arrived."""
    return updates
