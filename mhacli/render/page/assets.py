"""The script and the style of a page, each in one piece, and the policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files


def script() -> str:
    """All scripts in the order of their names, in a scope of their own."""
    return f'(() => {{\n"use strict";\n{_joined(".js")}}})();\n'


def style() -> str:
    """All styles in the order of their names."""
    return _joined(".css")


def policy(script: str, style: str) -> str:
    """What a browser may do with the page: run this script, use this style, and ask nobody for anything."""
    allowed = f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _joined(suffix: str) -> str:
    folder = files("mhacli.render.page").joinpath("assets")
    found = sorted((file for file in folder.iterdir() if file.name.endswith(suffix)), key=lambda file: file.name)
    return "".join(_compact(file.read_text(encoding="utf-8")) for file in found)


def _compact(source: str) -> str:
    """The source without indentation, blank lines, and comments that have lines of their own: they are for who reads the file."""
    without = re.sub(r"^[ \t]*(?://[^\n]*|/\*.*?\*/[ \t]*)$", "", source, flags=re.MULTILINE | re.DOTALL)
    return "".join(f"{line.strip()}\n" for line in without.splitlines() if line.strip())


def _hash(content: str) -> str:
    """Source: Content Security Policy Level 3, section 6.7.3.3: the digest of the element's text as UTF-8."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
