"""What the viewer reads from the terminal: keys and the mouse, whatever else comes between them."""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Callable
from functools import partial

from textual.drivers import linux_driver


def _forgiving_decoder(encoding: str) -> Callable[[], IncrementalDecoder]:
    """A decoder that makes a replacement character of each byte that the encoding does not have."""
    return partial(getincrementaldecoder(encoding), errors="replace")


class ForgivingDriver(linux_driver.LinuxDriver):
    """Textual's driver, that passes over bytes that are no UTF-8 and sequences that are no keys.

    A paste in Latin-1, or noise on a serial line, would end its thread, and the app with it.
    """

    def run_input_thread(self) -> None:
        """Reads until the app ends, and goes on behind what cannot be understood."""
        linux_driver.getincrementaldecoder = _forgiving_decoder  # type: ignore[assignment, attr-defined]
        while not self.exit_event.is_set():
            try:
                super().run_input_thread()
            except (ValueError, OverflowError):  # of the numbers in a sequence
                continue
