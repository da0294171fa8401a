"""`mha scan`: the statistics of every head over a corpus, in a folder from which an interrupted
scan resumes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from mhacli.cli.console import flush, is_interactive, loading_torch, note, progress, stderr_line
from mhacli.cli.output import Output, print_record, require_output, require_self_check
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import local_checkpoint, record_command
from mhacli.errors import UsageError
from mhacli.io.long_work import Terminated, graceful_interrupt
from mhacli.render.base.options import HEADS_SHOWN, ViewOptions
from mhacli.run import Run
from mhacli.settings import (
    CHECKPOINT,
    HEADS,
    OUTPUT,
    Computation,
    Config,
    ModelSettings,
    Statistics,
    like,
    setting,
)
from mhacli.text.numbers import shown
from mhacli.text.reading import CORPUS, CorpusFormat
from mhacli.text.spans import require_expressions

if TYPE_CHECKING:
    from mhacli.commands.scan.folder import Totals

_WORKERS = "Workers"
_SOURCES = "Text files, JSON lines, Parquet, CSV or globs; - reads stdin."
_FIRST = (
    "Use only the first N tokens of each sequence. (default: all; sequences too long for the model"
    " are left out)"
)
_SPANS = (
    "Report the attention between parts of the documents that have them: name=/REGEX/; repeatable."
)
_EFFECT = (
    "Also remove each head in turn, and report what changes at the first [MASK], else the last"
    " token."
)
_DTYPE = "Number format of the computation. (default: that of the checkpoint)"
_THREADS = "Number of CPU threads. (default: 1; another number changes the rounding)"
_N_WORKERS = (
    "Number of workers, each with the model in its memory (needs the extra scan). "
    "(default: this process alone; with --ray, as many as there is room for)"
)
_RAY = (
    "Compute on the Ray cluster at this address; auto: the cluster that this machine belongs to;"
    " local: a new one here."
)
_CPUS = "CPUs that Ray reserves for each worker. (default: as many as --threads)"
_WITH_VALUE = "out|workers|ray|cpus-per-worker|device|device-map|colou?r|width|sort"
_WITHOUT_EFFECT = re.compile(rf"\0--(json|all|mixed|strict|({_WITH_VALUE})[=\0][^\0]*)(?=\0|$)")
"""Options that do not decide the numbers, among words that NUL separates."""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The corpus, what to compute of each document, the workers and the folder of the result, as
    the command line gives them.

    A document may lack spans. The workers do not change the result; each receives the pickled scan,
    and loads the model.
    """

    sources: tuple[str, ...] = setting((), CORPUS, _SOURCES, metavar="CORPUS...", argument=True)
    form: CorpusFormat
    max_tokens: int | None = like(
        Computation, "max_tokens", CORPUS, help=_FIRST, default=None, common=True
    )
    strict: bool = setting(False, CORPUS, "Stop at a bad document instead of leaving it out.")
    model: ModelSettings = ModelSettings()
    tokenizer: str | None = like(
        Config, "tokenizer", CHECKPOINT, value=None, default="the checkpoint's own", common=False
    )
    span: tuple[str, ...] = setting((), HEADS, _SPANS, metavar="SPAN")
    effect: bool = setting(False, HEADS, _EFFECT, common=True)
    allow_nonfinite: bool = like(Computation, "allow_nonfinite", CHECKPOINT)
    statistics: Statistics = Statistics()
    given: Annotated[Mapping[str, Any], Config, offers("device", dtype=_DTYPE, threads=_THREADS)]
    workers: int | None = setting(None, _WORKERS, _N_WORKERS, low=1, high=100_000, common=True)
    ray: str | None = setting(None, _WORKERS, _RAY, metavar="ADDRESS")
    cpus_per_worker: int | None = setting(
        None, _WORKERS, _CPUS, low=1, high=100_000, needs=("workers", "ray")
    )
    out: str = setting(
        "",
        OUTPUT,
        "Folder of the result. An interrupted scan resumes from it.",
        metavar="DIR",
        common=True,
    )
    mixed: bool = setting(
        False,
        OUTPUT,
        "Allow results from different kinds of devices in one folder; the result records this.",
    )
    view: Annotated[
        ViewOptions, offers("everything", "sort", heads=f"{HEADS_SHOWN} (default: all)")
    ]

    @cached_property
    def run(self) -> Run:
        """The run that `mha heads` would make for a document, without its text."""
        heads = None if self.view.heads is None else tuple(sorted(set(self.view.heads)))
        return Run(
            model=replace(self.model, tokenizer=self.tokenizer, **{"threads": 1, **self.given}),
            statistics=replace(self.statistics, heads=heads),
            spans=self.span,
            max_tokens=self.max_tokens,
            keep=(),
            allow_nonfinite=self.allow_nonfinite,
        )

    @property
    def span_names(self) -> tuple[str, ...]:
        """The names of the spans."""
        return tuple(word.partition("=")[0].strip() for word in self.span)

    @property
    def n_cpus(self) -> int:
        """The processors of a worker of Ray."""
        return self.cpus_per_worker or self.run.model.threads or 1


@command(
    "mha scan --model MiniLM poem.txt --lines --out heads.mha",
    "mha scan --model MiniLM 'texts/*.jsonl' --max-tokens 512 --out heads.mha",
    "mha show heads.mha",
)
def scan(output: Annotated[Output, offers("json")], request: Scan) -> None:
    """Scans a corpus into a folder and prints the overview of the heads.

    After Ctrl-C the documents in progress are finished; a second Ctrl-C and SIGTERM stop at once.
    """
    needed = {
        "--model MiniLM": request.model.path,
        "--out heads.mha": request.out,
        "a corpus": request.sources,
    }
    for words, value in needed.items():
        if not value:
            raise UsageError(f"mha scan needs {words}", hint="mha scan --help shows examples")
    require_output(request.view, output, has_effects=request.effect)
    local_checkpoint(request.model)
    require_expressions(request.span)
    with loading_torch():
        from mhacli.commands.scan.run import run_scan

    stopping, done = (
        "finishing the documents in progress; press Ctrl-C again to stop at once",
        Progress(),
    )
    try:
        with (
            _shown(done, as_json=output.json) as report,
            graceful_interrupt(lambda: note(stopping)) as is_stopped,
        ):
            record = run_scan(request, done, report=report, is_stopped=is_stopped)
    except (KeyboardInterrupt, Terminated):
        note(
            f"interrupted: {done.n_documents:,} documents are done; the same command resumes the"
            " scan"
        )
        raise
    if record is None or record.corpus is None:
        note(
            f"the other ranks have not finished their units of {request.out}; the last one writes"
            " the summary"
        )
        return
    print_record(record, replace(request.view, view="none", heads=None), output)
    flush()
    for bad in record.corpus.bad[:1]:
        note(f"left out {bad.named}: {bad.reason}")
    note(f"saved {request.out}; mha show {shlex.quote(request.out)} shows it again")
    require_self_check(record)


def recorded_command() -> tuple[str, ...]:
    """The command line for the record, the same however the numbers are computed and printed."""
    return tuple(_WITHOUT_EFFECT.sub("", "\0".join(record_command())).split("\0"))


# ----------------------------------------------------------------------------------------- progress


@dataclass
class Progress:
    """The number of finished documents, including bad ones, and their total `of_documents` if it is
    known.

    Earlier runs have finished `n_left_done` of them, and each worker in this run those `by_worker`,
    with `n_new_tokens` in `seconds`. The rates are those of this run; `left_s` are the remaining
    seconds, None where they cannot be estimated.
    """

    n_documents: int = 0
    n_bad: int = 0
    n_tokens: int = 0
    of_documents: int | None = None
    n_left_done: int = 0
    n_new_tokens: int = 0
    seconds: float = 0.0
    by_worker: dict[str, int] = field(default_factory=dict)
    documents_per_s: float | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None

    def add(self, unit: Totals, worker: str | None = None) -> None:
        """Counts the documents of a unit that a worker, or for None an earlier run, has
        finished.
        """
        n_documents = unit.n_documents + unit.n_bad
        self.n_documents += n_documents
        self.n_bad += unit.n_bad
        self.n_tokens += unit.n_tokens
        if worker is None:
            self.n_left_done += n_documents
            return
        self.n_new_tokens += unit.n_tokens
        self.by_worker[worker] = self.by_worker.get(worker, 0) + n_documents
        self.documents_per_s = (self.n_documents - self.n_left_done) / self.seconds
        self.tokens_per_s = self.n_new_tokens / self.seconds
        if self.of_documents is not None:
            self.left_s = (self.of_documents - self.n_documents) / self.documents_per_s

    def __str__(self) -> str:
        """`320 of 3,000 documents, 8.1 documents/s, 5 min left`."""
        total = "" if self.of_documents is None else f" of {self.of_documents:,}"
        text = f"{self.n_documents:,}{total} documents"
        text += f", {self.documents_per_s:.3g} documents/s" if self.documents_per_s else ""
        return text + (f", {shown(self.left_s, 'seconds')} left" if self.left_s else "")


@contextmanager
def _shown(done: Progress, *, as_json: bool) -> Iterator[Callable[[], None]]:
    """A callback that shows the progress: on a terminal as a bar, for programs as a line of JSON a
    second, for logs as a line a minute. Such a line also follows at the end.
    """
    every_s, shown_at = 1.0 if as_json else 60.0, monotonic()

    with progress(has_time_left=False) as draw:

        def report(*, is_last: bool = False) -> None:
            nonlocal shown_at
            draw(done.n_documents / (done.of_documents or 1), str(done))
            if (as_json or not is_interactive()) and (is_last or monotonic() - shown_at >= every_s):
                shown_at = monotonic()
                stderr_line(json.dumps({"progress": asdict(done)}) if as_json else f"mha: {done}")

        yield report
        report(is_last=True)
