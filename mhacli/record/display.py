"""Base classes for results that notebooks and terminals can show. The renderers are imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any


class Shown:
    """A result that notebooks show as HTML, and that rich prints as its command does."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        return html_of(self)

    def views(self, screen: Any) -> Iterator[Any]:
        """What its command prints on a screen."""
        raise NotImplementedError

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The parts of its view, which adapts to the width and the colours of the console."""
        yield from renderers().views_of(self, options.max_width, colour=console.color_system is not None)


def html_of(result: object) -> str:
    """A result as HTML: static, without a script, below 200 kB, for light and dark themes."""
    html: str = renderers().html_of(result)
    return html


def renderers() -> Any:
    """The module that draws results, which is imported on first use: records know nothing of views."""
    return import_module("mhacli.render.display.show")


@dataclass(frozen=True, repr=False)
class Page:
    """An interactive page. `html` is the whole document, which notebooks show in a frame."""

    html: str

    def __repr__(self) -> str:
        """The size of the page."""
        return f"<Page: {len(self.html.encode()) / 1024:.0f} KiB of HTML>"

    def _repr_html_(self) -> str:
        """The page in a frame without access to the notebook."""
        from html import escape

        style = "width:100%;height:720px;border:1px solid #8884;border-radius:8px"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.html)}"></iframe>'
