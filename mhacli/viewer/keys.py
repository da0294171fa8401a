"""The keys of all screens, as the help lists them. They stand in keys.toml."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from textual.binding import Binding, BindingType


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the help, as keys.toml says."""

    actions: dict[str, str]
    keys: str | None = None
    tip: str = ""
    short: str = ""


def _bindings(lines: Sequence[_Keys]) -> Iterator[BindingType]:
    """The keys of lines of the help with their actions."""
    for line in lines:
        (names, action), *others = line.actions.items()
        is_shown = bool(line.tip)
        yield Binding(names, action, line.short, is_shown, key_display=line.keys, tooltip=line.tip)
        yield from (Binding(names, action, show=False) for names, action in others)


_TEXT = Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")
_LINES = msgspec.convert(tomllib.loads(_TEXT), dict[str, list[_Keys]])
_ENDS = [*_bindings(_LINES.pop("ends"))]
KEYS = {name: [*_bindings(lines)] for name, lines in _LINES.items()}
"""The keys by screen."""
for _name in ("everywhere", "a text to read"):
    KEYS[_name] = _ENDS + KEYS[_name]
