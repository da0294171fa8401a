"""HTML for a notebook's output: no script, no network, and a size limit.

GitHub removes `<style>`, ids and scripts from notebooks. So cells have inline colours and a sign that is readable
without colour; the style sheet is optional. Source: github.com/jupyter/nbviewer/issues/450.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType

from mhacli.render.page.elements import Html, joined, preformatted, tag, text
from mhacli.text.numbers import shown

LIMIT_BYTES = 200_000
"""The largest output. A notebook stores every output."""
COLUMNS = 100
"""The width of a terminal view in a notebook."""
_STYLE = """
.mha-repr { color-scheme: light dark; background: #fff; color: #17202b; padding: 10px 14px; border: 1px solid #d5dbe3;
border-radius: 8px; font: 13px/1.45 system-ui, sans-serif; }
.mha-repr .dim { color: #566273; } .mha-repr .ok { color: #1d6b3a; } .mha-repr .sink { color: #a8127d; }
.mha-repr .warning { color: #8a5a00; } .mha-repr .failed { color: #b3261e; font-weight: 600; }
.mha-repr .bold { font-weight: 600; } .mha-repr .name { color: #0d6270; }
@media (prefers-color-scheme: dark) {
.mha-repr { background: #161d25; color: #e4e9ef; border-color: #2b3642; }
.mha-repr .dim { color: #9ba8b7; } .mha-repr .ok { color: #7fd09b; } .mha-repr .sink { color: #ff86d6; }
.mha-repr .warning { color: #e8b85c; } .mha-repr .failed { color: #ff8a80; } .mha-repr .name { color: #6cc5d1; }
}
.mha-repr.mha-repr.mha-repr p { margin: 0 0 4px; } .mha-repr > div { overflow-x: auto; }
.mha-repr.mha-repr.mha-repr pre { margin: 8px 0; padding: 0; background: none; color: inherit;
font: 12px/1.35 ui-monospace, Menlo, Consolas, monospace; }
.mha-repr.mha-repr.mha-repr table { border-collapse: collapse; margin: 8px 0; font-size: 12px; color: inherit; background: none; }
.mha-repr.mha-repr.mha-repr tr:nth-child(n) { background: none; color: inherit; }
.mha-repr table th, .mha-repr table td { padding: 1px 6px; text-align: right; font-weight: 400; border: 0; white-space: nowrap; }
.mha-repr table .word { text-align: left; } .mha-repr caption { text-align: left; caption-side: top; color: inherit; }
"""


def fragment(parts: Iterable[tuple[str, Html]], *, elsewhere: str = "") -> str:
    """The parts, each with its name, in one element. Parts above the limit are left out and listed; `elsewhere` says
    how to see them."""
    included, left_out = [tag("style", Html(_STYLE.strip()))], []
    n_bytes = len(_STYLE.encode()) + _FRAME
    for name, part in parts:
        n_bytes += (size := len(part.encode()))
        if n_bytes > LIMIT_BYTES:
            left_out.append(name)
            n_bytes -= size
        else:
            included.append(part)
    if left_out:
        message = f"left out, to stay below {shown(LIMIT_BYTES, 'bytes')}: {', '.join(left_out)}"
        included.append(tag("p", text(f"{message}; {elsewhere}" if elsewhere else message), class_="dim"))
    return tag("div", joined(included), class_="mha-repr")


_FRAME = 500
"""Bytes for the element and for the list of omitted parts."""


def terminal_part(views: Iterable[RenderableType]) -> Html:
    """A terminal view, unchanged."""
    return joined(preformatted(view, COLUMNS) for view in views)
