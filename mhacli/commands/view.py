"""`mha view`: a record, a text or a checkpoint in the interactive viewer."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated

from mhacli.cli.console import colour_system, is_interactive, wants_colour
from mhacli.cli.output import SAVED, Output, print_result, require_output
from mhacli.cli.parameters import are_literal, command, layer_or_model, offers
from mhacli.errors import MhaError, UsageError, library, out_of_range
from mhacli.io.memory import gc_paused
from mhacli.record.storage import is_scan, load_late
from mhacli.render.base.options import Scale, ViewOptions
from mhacli.settings import VIEW, Computation, Reading, like, setting

_HEAD = "Open this head first. (default: the overview of all)"
_MAX_NUMBER = 1_000_000


def _record_path(typed: Sequence[str]) -> str | None:
    """The path of a record or of the folder of a scan; None if the words are texts, as all are
    after `--`.
    """
    if are_literal() or not any(map(_is_record, typed)):
        return None
    if len(typed) > 1:
        raise UsageError(
            "mha view opens one record, and nothing else with it; -- stands before texts"
        )
    return typed[0]


def _is_record(word: str) -> bool:
    """Whether a word names a record, by its name or header, or the folder of a scan."""
    if os.path.isfile(word) and not word.endswith(".safetensors"):
        with suppress(OSError), open(word, "rb") as file:
            return b"mha.record/" in file.read(4096)
    return word.endswith(".safetensors") or is_scan(word)


@command(
    'mha view "the cat sat on the mat"',
    "mha view cat.safetensors",
    'mha view "the cat sat on the mat" --model MiniLM',
    modes=lambda given: (
        "record" if _record_path(given.get("typed", ())) is not None else layer_or_model(given)
    ),
)
def view(
    what: Computation,
    reading: Reading,
    output: Annotated[Output, offers(*SAVED)],
    *,
    head: int | None = setting(None, VIEW, _HEAD, low=0, high=_MAX_NUMBER, common=True),
    sequence: int = setting(
        0, VIEW, "Open this sequence first.", low=0, high=_MAX_NUMBER, common=True
    ),
    map_scale: Scale | None = like(ViewOptions, "map_scale", VIEW),
    hide_sinks: bool = like(ViewOptions, "hide_sinks", VIEW, common=True, needs=()),
) -> None:
    """Opens the viewer with a saved record, or with the record of a computation as in `run`."""
    has_keys = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
    if not (has_keys and is_interactive()):  # textual draws on stderr
        message = (
            "mha view needs a terminal: stdin, stdout or stderr is redirected, or TERM is dumb"
        )
        raise MhaError(message, hint="mha show RECORD prints a record", code="no-terminal")
    library("textual", "mha view")
    layers, path = what.model.layers, _record_path(what.typed)
    run = None
    notes: tuple[str, ...] = ()
    options = ViewOptions(
        heads=None if head is None else (head,), sequences=(sequence,), layers=layers
    )
    if path is not None:
        with gc_paused():
            record = load_late(path)
    else:
        from mhacli.cli.source import make_run, require_in_config

        from .run import inspected

        require_output(options, output)
        require_in_config(what.model, "--head", options.heads)
        run, texts = make_run(what, reading=reading, keep=output.keep, keep_limit=output.keep_limit)
        record, notes = inspected(run, texts, options)
    with gc_paused():
        from mhacli.viewer.app import run_viewer
        from mhacli.viewer.session import Session

    if sequence >= len(record.sequences):
        raise UsageError(out_of_range("--sequence", sequence, len(record.sequences)))
    has_shades = wants_colour(output.color, sys.stdout) and colour_system() != "STANDARD"
    session = Session(
        record, colour=has_shades, scale=map_scale, hides_sinks=hide_sinks, sequence=sequence
    )
    session.choose(head, layers)
    show = partial(run_viewer, session, is_open=head is not None)
    if path is not None:
        show()
    else:
        print_result(record, notes, options=options, output=output, run=run, view=show)
