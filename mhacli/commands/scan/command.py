"""`mha scan`: the statistics of every head over a corpus, in a folder from which an interrupted scan resumes."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import flush, loading_torch, note
from mhacli.cli.output import COLOUR, Output, print_record, require_self_check
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import local_checkpoint, record_command
from mhacli.commands.scan.progress import progress_on_stderr
from mhacli.commands.scan.request import ScanRequest
from mhacli.errors import UsageError
from mhacli.io.interrupts import Terminated, graceful_interrupt
from mhacli.render.base.format import count_of
from mhacli.text.spans import require_expressions

if TYPE_CHECKING:
    from mhacli.commands.scan.run import ScanStudy
    from mhacli.record.record import Record


@command(
    "mha scan --model MiniLM poem.txt --lines --out heads.mha",
    "mha scan --model MiniLM 'texts/*.jsonl' --max-tokens 512 --out heads.mha",
    "mha show heads.mha",
)
def scan(
    output: Annotated[Output, offers("json", *COLOUR)],
    request: ScanRequest,
) -> None:
    """Scans a corpus into a folder and prints the overview of the heads."""
    _require_answerable(request)
    with loading_torch():
        from mhacli.commands.scan.run import ScanStudy

        study = ScanStudy(request, _command(), note)
    record = _run_with_progress(study, as_json=output.json)
    if record is None:
        note(f"the other ranks have not finished their units of {request.out}; the last one writes the summary")
        return
    print_record(record, replace(request.view, view="none", heads=None), output)
    flush()
    corpus = record.corpus
    assert corpus is not None, "a scan has a corpus"
    if corpus.n_bad:
        first, bad = corpus.bad[0], count_of(corpus.n_bad, "bad document", grouped=True)
        note(f"{bad} left out, the first is {first.named}: {first.reason}")
    note(f"saved {request.out}; mha show {shlex.quote(request.out)} shows it again")
    require_self_check(record)


def _require_answerable(request: ScanRequest) -> None:
    """Raises `UsageError` for options that fit no document, or contradict each other."""
    needed = {
        "--model": (request.model.path, "a checkpoint, such as --model MiniLM"),
        "--out": (request.out, "a folder for the result, such as --out heads.mha"),
        "a corpus": (request.sources, "text files, JSON lines, Parquet files or -"),
    }
    for name, (value, example) in needed.items():
        if not value:
            raise UsageError(f"mha scan needs {name}: {example}", hint="mha scan --help shows examples")
    local_checkpoint(request.model)
    require_expressions(request.span)


_WITHOUT_EFFECT = (
    "--out", "--workers", "--ray", "--cpus-per-worker", "--device", "--device-map", "--color", "--colour", "--width",
)  # fmt: skip
_FLAGS_WITHOUT_EFFECT = ("--json", "--all", "--mixed", "--strict")
"""Options with a value, and flags, that do not decide the numbers."""


def _command() -> tuple[str, ...]:
    """The command line for the record, the same however the numbers are computed and printed."""
    words, kept = iter(record_command()), []
    for word in words:
        name, equals, _ = word.partition("=")
        if name in _WITHOUT_EFFECT and not equals:
            next(words, None)  # its value
        elif name not in (*_WITHOUT_EFFECT, *_FLAGS_WITHOUT_EFFECT):
            kept.append(word)
    return tuple(kept)


def _run_with_progress(study: ScanStudy, *, as_json: bool) -> Record | None:
    """The record of the study, None if other ranks are not finished. After Ctrl-C the documents in progress are finished, then
    `KeyboardInterrupt` is raised; a second Ctrl-C and SIGTERM are raised at once."""
    stopping = "finishing the documents in progress; press Ctrl-C again to stop at once"
    try:
        with progress_on_stderr(as_json=as_json) as report, graceful_interrupt(lambda: note(stopping)) as is_stopped:
            record = study.run(report, is_stopped)
        if record is None and is_stopped():
            raise KeyboardInterrupt
    except (KeyboardInterrupt, Terminated):
        done = study.progress
        total = "" if done.of_documents is None else f" of {done.of_documents:,}"
        note(f"interrupted: {done.n_documents:,}{total} documents are done; the same command resumes the scan")
        raise
    return record
