"""The viewer without a terminal: keys and clicks in, the characters of the screen out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import textual.app
import textual.pilot
from rich.cells import cell_len
from textual._context import active_app
from textual.pilot import Pilot

from mhacli.results.record.record import Record
from mhacli.viewer.app import Viewer
from mhacli.viewer.panes.heads import HeadGrid
from mhacli.viewer.session import ViewerOptions

Act = Callable[[Viewer, Any], Awaitable[None]]


def seen(app: Viewer) -> str:
    """The characters on the screen, without blanks at the ends of lines."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(piece.text for piece in strip).rstrip() for strip in strips)


@dataclass(frozen=True)
class End:
    """The viewer as it was left, and the screen that it had then."""

    app: Viewer
    screen: Any


async def settled(*_: float) -> None:
    """Waits after a key until the app has nothing to answer, to lay out or to draw any more.

    textual's own wait takes a process that gets no time for one that has nothing to do.
    """
    app = active_app.get()
    while await Pilot(app)._wait_for_screen():
        screen = app.screen
        parts = (app, *screen.walk_children(with_self=True))
        if not (
            any(part.message_queue_size or part._next_callbacks for part in parts)
            or any(getattr(screen, f"_{what}_required") for what in ("layout", "scroll", "repaint"))
            or screen._dirty_widgets
            or screen._callbacks
            or app._resize_event
        ):
            return
        await asyncio.sleep(0.001)


textual.app.wait_for_idle = textual.pilot.wait_for_idle = settled


async def pictured(app: Viewer, pilot: Any) -> None:
    """Waits for the small pictures of the first screen, which come when the rest of it can be seen."""
    for heads in app.screen.query(HeadGrid):
        while heads.tiles_for(*heads.size) is not None and heads._thumbnail is None:
            await pilot.pause(0.01)
    await pilot.pause()


def drive(
    record: Record, *keys: str, size: tuple[int, int] = (80, 24), act: Act | None = None, **options: Any
) -> tuple[End, str]:
    """The viewer after some keys, and what it shows then."""
    app = Viewer(record, ViewerOptions(**{"colour": False, **options}))
    shown, screen = "", None

    async def run() -> None:
        nonlocal shown, screen
        async with app.run_test(size=size) as pilot:
            await pilot.press(*keys)
            await pictured(app, pilot)
            if act is not None:
                await act(app, pilot)
                await pilot.pause()
            shown, screen = seen(app), app.screen
            assert all(cell_len(line) <= size[0] for line in shown.split("\n"))

    asyncio.run(run())
    return End(app, screen), shown
