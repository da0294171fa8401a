"""The script and the style of a page, each in one piece, and the policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from mhacli.render.base.colours import is_dark, ramp_colour

N_SHADES = 16
"""Shades of the cells of tables: the policy allows no style of an element's own, so that each has a class."""
_OF_CELLS = "30-kept.css"


def script() -> str:
    """All scripts in the order of their names, in a scope of their own."""
    return f'(() => {{\n"use strict";\n{_joined(".js")}}})();\n'


def style(*, has_cells: bool = False) -> str:
    """All styles in the order of their names; those of tables of single cells for a page that has such: a cell without a class
    is darkest, `l1` … are brighter."""
    shades = map(_shade, range(N_SHADES)) if has_cells else ()
    return "".join([_joined(".css", left_out="" if has_cells else _OF_CELLS), *shades])


def _shade(number: int) -> str:
    colour = ramp_colour(255 * number // (N_SHADES - 1))
    ink = "#fff" if is_dark(colour) else "#000"
    selector = f".l{number}" if number else "td"
    return f"#cells {selector} {{ background: #{bytes(colour).hex()}; color: {ink}; }}\n"


def policy(script: str, style: str) -> str:
    """What a browser may do with the page: run this script, use this style, and ask nobody for anything."""
    allowed = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _joined(suffix: str, left_out: str = "") -> str:
    folder = files("mhacli.render.page").joinpath("assets")
    named = (file for file in folder.iterdir() if file.name.endswith(suffix) and file.name != left_out)
    found = sorted(named, key=lambda file: file.name)
    return "".join(_compact(file.read_text(encoding="utf-8")) for file in found)


def _compact(source: str) -> str:
    """The source without indentation, blank lines, and comments that have lines of their own: they are for who reads the file."""
    without = re.sub(r"^[ \t]*(?://[^\n]*|/\*.*?\*/[ \t]*)$", "", source, flags=re.MULTILINE | re.DOTALL)
    return "".join(f"{line.strip()}\n" for line in without.splitlines() if line.strip())


def _hash(content: str) -> str:
    """Source: Content Security Policy Level 3, section 6.7.3.3: the digest of the element's text as UTF-8."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
