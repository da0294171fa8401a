"""What a terminal is told, character by character: colours and attributes, read from the escape codes themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import StringIO

from rich.console import Console, RenderableType

_CODES = re.compile(r"\x1b\[([0-9;]*)m|([^\x1b])", re.DOTALL)
_ATTRIBUTES = {1: "bold", 2: "faint", 3: "italic", 4: "underlined", 7: "reverse", 21: "underlined"}


@dataclass(frozen=True)
class Look:
    """Foreground and background as the numbers of their codes, and attributes."""

    fore: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    attributes: frozenset[str] = frozenset()


def printed(view: RenderableType, width: int, system: str = "truecolor") -> str:
    """What a terminal with so many colours is sent."""
    paper = StringIO()
    Console(file=paper, width=width, color_system=system, force_terminal=True, legacy_windows=False).print(view)  # type: ignore[arg-type]
    return paper.getvalue()


def characters(text: str) -> Iterator[tuple[str, Look]]:
    """The characters of a text with how each looks. Source of the codes: ECMA-48, section 8.3.117."""
    look = Look()
    for codes, character in _CODES.findall(text):
        if character:
            yield character, look
        else:
            look = _after(look, [int(code or 0) for code in codes.split(";")])


def _after(look: Look, codes: list[int]) -> Look:
    while codes:
        code = codes.pop(0)
        if code in (38, 48):
            size = {2: 4, 5: 2}[codes[0]]
            colour, codes = (code, *codes[:size]), codes[size:]
            look = replace(look, fore=colour) if code == 38 else replace(look, back=colour)
        elif 30 <= code <= 37 or 90 <= code <= 97:
            look = replace(look, fore=(code,))
        elif 40 <= code <= 47 or 100 <= code <= 107:
            look = replace(look, back=(code,))
        elif code in (39, 49):
            look = replace(look, fore=()) if code == 39 else replace(look, back=())
        elif code in _ATTRIBUTES:
            look = replace(look, attributes=look.attributes | {_ATTRIBUTES[code]})
        else:
            assert code == 0, f"the code {code} is not known here"
            look = Look()
    return look
