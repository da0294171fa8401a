"""`mha view`: a record, a text or a checkpoint in the interactive viewer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from mhacli.cli.console import wants_colour
from mhacli.cli.help import examples
from mhacli.cli.output import (
    COLOUR,
    SAVED,
    Output,
    note_written,
    print_notes,
    require_output,
    require_self_check,
    save_files,
)
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.cli.values import are_literal
from mhacli.errors import MhaError, UsageError, installing, out_of_range
from mhacli.io.memory import uncollected
from mhacli.io.scan_folder import is_scan
from mhacli.render.base.options import HIDE_SINKS, MAP_SCALE, Scale, ViewOptions
from mhacli.settings import VIEW, Computation, LayerChoices, Mode, Reading, setting

if TYPE_CHECKING:
    pass
from mhacli.record.record import Record

_HEAD = "Open this head first. (default: the overview of all)"
_ENDING, _HEADER_BYTES = ".safetensors", 4096


@dataclass(frozen=True, kw_only=True)
class Start:
    """The head, sequence and colours that the viewer shows first."""

    # fmt: off
    head: int | None = setting(None, VIEW, _HEAD, low=0, high=1_000_000, common=True)
    sequence: int = setting(0, VIEW, "Open this sequence first.", low=0, high=1_000_000, common=True)
    map_scale: Scale | None = setting(None, VIEW, MAP_SCALE, default="linear, log for long texts")
    hide_sinks: bool = setting(False, VIEW, HIDE_SINKS, common=True)
    # fmt: on


def _mode(values: Mapping[str, Any]) -> Mode:
    """A record that the first word names, else a checkpoint or a layer of mha."""
    return "record" if _record_path(values["typed"] or ()) is not None else layer_or_model(values)


@examples(
    'mha view "the cat sat on the mat"',
    "mha view cat.safetensors",
    'mha view "the cat sat on the mat" --model MiniLM',
)
@command(_mode)
def view(what: Computation, reading: Reading, start: Start, output: Annotated[Output, offers(*SAVED, *COLOUR)]) -> None:
    """Opens the viewer with a saved record, or with the record of a computation as in `run`."""
    _require_terminal()
    layers, path = what.model.layers, _record_path(what.source.typed)
    if path is not None:
        record = _opened(path)
        _show(record, start, layers, output)
        from mhacli.record.consistency import require_agreement

        require_agreement(record)
        return
    from mhacli.cli.source import make_run
    from mhacli.commands.run import computed, weights_of

    heads = None if start.head is None else (start.head,)
    options = ViewOptions(heads=heads, sequences=(start.sequence,), layers=layers)
    require_output(options, output)
    run = make_run(what, reading=reading, keep=output.keep, keep_limit=output.keep_limit)
    record, notes = computed(run, options, what.given)
    save_files(record, output, lambda: weights_of(run))
    _show(record, start, layers, output)
    require_self_check(record)
    print_notes(record, notes)
    note_written(output)


def _opened(path: str) -> Record:
    from mhacli.record import storage

    with uncollected():
        return storage.load_late(path)


def _show(record: Record, start: Start, layers: LayerChoices, output: Output) -> None:
    """Runs the viewer. Raises `UsageError` for a head, layer or sequence that the record does not have."""
    with uncollected():
        from mhacli.viewer.app import run_viewer
        from mhacli.viewer.head_table import head_table
        from mhacli.viewer.session import ViewerOptions

    if not 0 <= start.sequence < len(record.sequences):
        raise UsageError(out_of_range("--sequence", start.sequence, len(record.sequences)))
    place = head_table(record).place_of(start.head, layers)
    run_viewer(
        record,
        ViewerOptions(
            colour=wants_colour(output.color, sys.stdout) and _has_shades(),
            scale=start.map_scale,
            hides_sinks=start.hide_sinks,
            sequence=start.sequence,
            place=place,
            is_open=start.head is not None,
        ),
    )


def _has_shades() -> bool:
    """Whether the terminal has at least 256 colours; with 16, shades would show no more steps than signs do."""
    term, depth = os.environ.get("TERM", ""), os.environ.get("COLORTERM", "").strip().lower()
    return (
        depth in ("truecolor", "24bit") or "256color" in term or term in ("xterm-kitty", "alacritty", "foot", "wezterm")
    )


def _require_terminal() -> None:
    """Raises `MhaError` if there is no terminal to draw on and read keys from, or no textual. Textual draws on stderr."""
    streams = {"stdin": sys.stdin, "stdout": sys.stdout, "stderr": sys.stderr}
    redirected = [f"{name} is redirected" for name, stream in streams.items() if stream is None or not stream.isatty()]
    if redirected or os.environ.get("TERM", "dumb") == "dumb":
        lack = ", ".join(redirected) or "TERM is dumb"
        raise MhaError(f"mha view needs a terminal: {lack}", hint="mha show RECORD prints a record", code="no-terminal")
    if find_spec("textual") is None:
        raise MhaError(
            "mha view needs textual, which is not installed",
            hint=f"{installing('textual')} installs it",
            code="missing-extra",
        )


def _record_path(typed: Sequence[str]) -> str | None:
    """The path of a record, None if the words are texts. After `--`, all words are texts."""
    words = [] if are_literal() else typed
    records = [word for word in words if _is_record(word)]
    if records and len(words) > 1:
        raise UsageError(
            f"{records[0]} is a record, and mha view opens nothing else with it", hint="put -- before texts"
        )
    return records[0] if records else None


def _is_record(word: str) -> bool:
    """Whether a word is the path of a record, judged by its name or header, or of the folder of a scan."""
    if "\0" in word or not os.path.isfile(word):
        return word.endswith(_ENDING) or is_scan(word)
    try:
        with open(word, "rb") as file:
            return word.endswith(_ENDING) or b"mha.record/" in file.read(_HEADER_BYTES)
    except OSError:
        return word.endswith(_ENDING)
