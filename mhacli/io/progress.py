"""How long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""Takes the finished part of the work, which grows from 0 to 1, and what is done next."""


def no_progress(part: float, doing: str) -> None:
    """Reports to nobody."""
