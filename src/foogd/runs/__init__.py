"""Run folders: training that survives a kill, what is written, and what is read again."""

from .federation import make_federation as make_federation
