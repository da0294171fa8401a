"""The callback by which long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""Takes the completed fraction of the work, from 0 to 1, and a description of the next step."""


def no_progress(fraction: float, step: str) -> None:
    """Discards progress."""
