"""How kinds of heads are shown."""

from __future__ import annotations

from collections.abc import Mapping

from mhacli.results.record.heads import Kind

KIND_SIGNS: Mapping[Kind, tuple[str, str]] = {
    "previous-token": ("◀", "cyan"),
    "sink": ("┃", "magenta"),
    "diagonal": ("╲", "blue"),
    "duplicate-token": ("≡", "yellow"),
    "induction": ("↻", "green"),
    "local": ("▪", "bright_blue"),
    "positional": ("⇠", "bright_cyan"),
    "uniform": ("░", "white"),
    "mixed": ("∗", "white"),
}
"""A sign and a colour for each kind of head."""
