"""Flower's ServerApp."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..core.errors import InputError
from .server import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run; bad input ends it with one sentence."""
    try:
        serve(grid, context.run_config)
    except InputError as error:
        logging.getLogger("flwr").error("foogd: %s", error)
        raise
