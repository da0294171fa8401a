"""`mha scan`: the statistics of every head over a corpus, in a folder from which an interrupted scan resumes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import flush, loading_torch, note
from mhacli.cli.help import examples
from mhacli.cli.output import COLOUR, Output, print_record, require_self_check
from mhacli.cli.parameters import command, offers
from mhacli.cli.source import local_checkpoint, record_command, require_layers
from mhacli.commands.scan.progress import progress_on_stderr
from mhacli.errors import UsageError
from mhacli.io.interrupts import Terminated, graceful_interrupt
from mhacli.render.base.format import count_of
from mhacli.render.base.options import ViewOptions
from mhacli.settings import (
    CHECKPOINT,
    DEFAULT_MAX_BYTES,
    DEVICE,
    DEVICES,
    HEADS,
    MAX_LENGTH,
    MAX_THREADS,
    MAX_TOKENS,
    NUMBER_FORMAT,
    OUTPUT,
    THREADS,
    TOKENIZER,
    Dtype,
    ModelSettings,
    Statistics,
    index_list,
    parse_bytes,
    setting,
)

if TYPE_CHECKING:
    from mhacli.commands.scan.engines.ranks import Share
    from mhacli.commands.scan.engines.single import Engine
    from mhacli.commands.scan.request import ScanRequest
    from mhacli.commands.scan.run import ScanStudy
    from mhacli.record.record import Record

_CORPUS, _WORKERS = "Corpus", "Workers"
_SOURCES = "Text files, JSON lines, Parquet files or globs; - reads stdin."
_FIELD = "Read JSON lines, and take the text from this field; a.b is b in a. (default: text)"
_COLUMN = "Read Parquet files, and take the text from this column (needs pyarrow). (default: text)"
_MAX_TOKENS = (
    "Use only the first N tokens of each sequence. (default: all; sequences too long for the model are left out)"
)
_SPANS = "Report the attention between parts of the documents that have them: name=/REGEX/; repeatable."
_EFFECT = "Also remove each head in turn, and report what changes at the first [MASK], else the last token."
_N_WORKERS = (
    "Number of workers, each with the model in its memory (needs the extra scan). "
    "(default: this process alone; with --ray, as many as there is room for)"
)
_RAY = (
    "Compute on the Ray cluster at this address; auto: the cluster that this machine belongs to; local: a new one here."
)
_OUT = "Folder of the result. An interrupted scan resumes from it."
_MIXED = "Allow results from different kinds of devices in one folder; the result records this."
_CPUS = "CPUs that Ray reserves for each worker. (default: as many as --threads)"


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files of the corpus, and how they are divided into documents."""

    # fmt: off
    sources: tuple[str, ...] = setting((), _CORPUS, _SOURCES, metavar="CORPUS...", argument=True, many=True)
    field: str | None = setting(None, _CORPUS, _FIELD, metavar="NAME", common=True)
    column: str | None = setting(None, _CORPUS, _COLUMN, metavar="NAME", common=True)
    lines: bool = setting(False, _CORPUS, "Treat each line of a file as a sequence.", common=True)
    max_docs: int | None = setting(None, _CORPUS, "Use only the first N documents.", low=1, high=10**12, common=True)
    max_tokens: int | None = setting(None, _CORPUS, _MAX_TOKENS, MAX_TOKENS, low=1, high=MAX_LENGTH, common=True)
    pack: bool = setting(False, _CORPUS, "", hidden=True)
    max_bytes: int = setting(
        DEFAULT_MAX_BYTES, _CORPUS, "Leave out larger documents.", parse=parse_bytes, metavar="SIZE", default="64.0 MiB"
    )
    strict: bool = setting(False, _CORPUS, "Stop at a bad document instead of leaving it out.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """What is reported of each document."""

    # fmt: off
    tokenizer: str | None = setting(None, CHECKPOINT, TOKENIZER, default="the checkpoint's own")
    head: tuple[int, ...] | None = setting(
        None, "View", "Show only these heads, such as 0,2 or 0-3.", parse=index_list, metavar="LIST", default="all", common=True
    )
    span: tuple[str, ...] = setting((), HEADS, _SPANS, metavar="SPAN", many=True)
    effect: bool = setting(False, HEADS, _EFFECT, common=True)
    allow_nonfinite: bool = setting(False, CHECKPOINT, "Continue even if numbers are NaN or Inf.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers that the documents are distributed to, on which the result does not depend; device, dtype and threads."""

    # fmt: off
    device: str | None = setting(None, DEVICE, DEVICES, default="auto", words=("auto", "cpu", "cuda", "mps"))
    dtype: Dtype | None = setting(None, DEVICE, NUMBER_FORMAT, default="that of the checkpoint")
    threads: int = setting(1, DEVICE, THREADS, low=1, high=MAX_THREADS, default="1; another number changes the rounding")
    workers: int | None = setting(None, _WORKERS, _N_WORKERS, low=1, high=100_000, common=True)
    ray: str | None = setting(None, _WORKERS, _RAY, metavar="ADDRESS")
    cpus_per_worker: int | None = setting(None, _WORKERS, _CPUS, low=1, high=100_000)
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ScanOutput(Output):
    """The folder of the result, and the format and colour of the report."""

    out: str | None = setting(None, OUTPUT, _OUT, metavar="DIR", common=True)
    mixed: bool = setting(False, OUTPUT, _MIXED)


@examples(
    "mha scan --model MiniLM poem.txt --lines --out heads.mha",
    "mha scan --model MiniLM 'texts/*.jsonl' --max-tokens 512 --out heads.mha",
    "mha show heads.mha",
)
@command()
def scan(
    corpus: Corpus,
    model: ModelSettings,
    inspected: Inspected,
    statistics: Statistics,
    workers: Workers,
    options: Annotated[ViewOptions, offers("everything")],
    output: Annotated[ScanOutput, offers("out", "mixed", "json", *COLOUR)],
) -> None:
    """Scans a corpus into a folder and prints the overview of the heads."""
    if workers.device is not None and model.device_map is not None:
        raise UsageError("--device and --device-map exclude each other", hint="leave --device out")
    heads = None if inspected.head is None else tuple(sorted(set(inspected.head)))
    model = replace(
        model,
        device=workers.device or "auto",
        dtype=workers.dtype,
        threads=workers.threads,
        tokenizer=inspected.tokenizer,
    )
    request = _request(corpus, model, replace(statistics, heads=heads), inspected, output)
    with loading_torch():
        from mhacli.commands.scan.engines.ranks import on_own_gpu
        from mhacli.commands.scan.run import ScanStudy

        study = ScanStudy(on_own_gpu(request), *_engine_and_share(workers))
    record = _run_with_progress(study, as_json=output.json)
    if record is None:
        note(f"the other ranks have not finished their units of {request.out}; the last one writes the summary")
        return
    print_record(record, replace(options, view="none"), output)
    flush()
    _note_result(record, request.out)
    require_self_check(record)


def _request(
    corpus: Corpus, model: ModelSettings, statistics: Statistics, inspected: Inspected, output: ScanOutput
) -> ScanRequest:
    """The request for every document. Raises `UsageError` for options that fit no document."""
    from mhacli.commands.scan.request import ScanRequest
    from mhacli.run import Run
    from mhacli.text.corpus import CorpusFormat
    from mhacli.text.spans import require_expressions

    if corpus.pack:
        raise UsageError("--pack is gone: each document is a text of its own; --max-tokens N takes its first N tokens")
    _require(model.path, "--model", "a checkpoint, such as --model MiniLM")
    _require(output.out, "--out", "a folder for the result, such as --out heads.mha")
    _require(corpus.sources, "a corpus", "text files, JSON lines, Parquet files or -")
    tables = [source for source in corpus.sources if source.lower().endswith((".csv", ".tsv"))]
    if tables and not (corpus.lines or corpus.field or corpus.column):
        note(f"{tables[0]} is read as one text with its commas; --lines takes its lines, and JSON lines have --field")
    checkpoint = local_checkpoint(model)
    if checkpoint is not None:
        require_layers(model, checkpoint)
    require_expressions(inspected.span)
    run = Run(
        model=model,
        spans=inspected.span,
        statistics=statistics,
        max_tokens=corpus.max_tokens,
        keep=(),
        allow_nonfinite=inspected.allow_nonfinite,
    )
    return ScanRequest(
        run,
        sources=corpus.sources,
        form=CorpusFormat(corpus.field, corpus.column, corpus.lines, corpus.max_docs, corpus.max_bytes),
        out=output.out or "",
        effect=inspected.effect,
        rows="parquet" if find_spec("pyarrow") is not None else "jsonl",
        strict=corpus.strict,
        mixed=output.mixed,
        command=_command(),
    )


def _require(value: object, name: str, example: str) -> None:
    if not value:
        raise UsageError(f"mha scan needs {name}: {example}", hint="mha scan --help shows examples")


_WITHOUT_EFFECT = (
    "--out", "--workers", "--ray", "--cpus-per-worker", "--device", "--device-map", "--reducer", "--color", "--colour", "--width",
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


def _engine_and_share(workers: Workers) -> tuple[Engine, Share]:
    """What distributes the units to workers, and the units of this process. Raises `UsageError` for options without effect."""
    from mhacli.commands.scan.engines.ranks import Share, share_here
    from mhacli.commands.scan.engines.ray import RayEngine
    from mhacli.commands.scan.engines.single import SingleEngine

    share = share_here()
    if workers.ray is None and workers.workers is None:
        if workers.cpus_per_worker is not None:
            raise UsageError("--cpus-per-worker has no effect without --workers or --ray")
        return SingleEngine(), share or Share()
    if share is not None:
        raise UsageError(
            f"{'--ray' if workers.ray is not None else '--workers'} does not work in a rank (RANK and WORLD_SIZE are set)",
            hint="one process with --ray uses all nodes of a Ray cluster",
        )
    n_cpus = workers.cpus_per_worker or workers.threads
    return RayEngine(workers.ray or "local", workers.workers, n_cpus, note), Share()


def _run_with_progress(study: ScanStudy, *, as_json: bool) -> Record | None:
    """The record of the study, None if other ranks are not finished. After Ctrl-C the documents in progress are finished, then
    `KeyboardInterrupt` is raised; a second Ctrl-C and SIGTERM are raised at once."""
    stopping = "finishing the documents in progress; press Ctrl-C again to stop at once"
    try:
        with progress_on_stderr(as_json=as_json) as report, graceful_interrupt(lambda: note(stopping)) as is_stopped:
            study.report_progress, study.note, study.is_stopped = report, note, is_stopped
            record = study.run()
        if record is None and is_stopped():
            raise KeyboardInterrupt
    except (KeyboardInterrupt, Terminated):
        done = study.progress
        total = "" if done.of_documents is None else f" of {done.of_documents:,}"
        note(f"interrupted: {done.n_documents:,}{total} documents are done; the same command resumes the scan")
        raise
    return record


def _note_result(record: Record, out: str) -> None:
    """Prints the number of bad documents and the folder of the result."""
    corpus = record.corpus
    assert corpus is not None, "a scan has a corpus"
    if corpus.n_bad:
        first, bad = corpus.bad[0], count_of(corpus.n_bad, "bad document", grouped=True)
        note(f"{bad} left out, the first is {first.named}: {first.reason}")
    note(f"saved {out}; mha show {shlex.quote(out)} shows it again")
