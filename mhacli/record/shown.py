"""Results that notebooks and rich show. They know nothing of views: what draws them registers
itself.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from mhacli.errors import screen_in_python

View = TypeVar("View", bound=Callable[..., Any])


class Renderer(Protocol):
    """What draws results."""

    def html_of(self, result: Any) -> str:
        """The HTML for a notebook: static, without a script, below 200 kB, for light and dark
        themes.
        """

    def views_of(self, result: Any, width: int, *, colour: bool) -> Iterator[Any]:
        """The parts of a terminal view, which rich prints."""

    def page_of(self, record: Any) -> str:
        """The interactive page of a record."""


_renderers: list[Callable[[], Renderer]] = []
_views: dict[type, Callable[..., Any]] = {}


def register_renderer(load: Callable[[], Renderer]) -> None:
    """Registers a function that loads what draws results, on first use."""
    _renderers.append(load)


def renderer() -> Renderer:
    """What draws results."""
    return _renderers[-1]()


def draws(kind: type) -> Callable[[View], View]:
    """Registers a function of a result of this type and a screen as what its command prints."""

    def registered(view: View) -> View:
        _views[kind] = view
        return view

    return registered


class Shown:
    """A result that notebooks show as HTML, and that rich prints as its command does."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        return renderer().html_of(self)

    in_python = staticmethod(screen_in_python)
    """The words of its view for Python."""

    def view(self, screen: Any) -> Any:
        """What its command prints on a screen."""
        return _views[type(self)](self, screen)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """The parts of its view, which adapts to the width and the colours of the console."""
        has_colour = console.color_system is not None
        yield from renderer().views_of(self, options.max_width, colour=has_colour)
