"""`mha scan`: the statistics of every head over a corpus, in a folder from which an interrupted scan resumes."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from mhacli.cli.console import flush, loading_torch, note
from mhacli.cli.help import examples
from mhacli.cli.numbers import Integer
from mhacli.cli.options import (
    MAX_TOKENS,
    NUMBER_FORMAT,
    OUTPUT,
    DeviceOptions,
    Everything,
    command,
    head_list,
    number,
    offers,
    option,
    option_group,
)
from mhacli.cli.output import COLOUR, Output, print_record, require_self_check
from mhacli.cli.shared.checkpoint import ModelOptions, device_map_of, layer_list, local_checkpoint, require_layers
from mhacli.cli.shared.request import record_command
from mhacli.cli.shared.statistics import HEADS, StatisticsOptions
from mhacli.cli.values import index_list, size
from mhacli.commands.scan.progress import progress_on_stderr
from mhacli.errors import UsageError
from mhacli.io.files import format_size
from mhacli.io.interrupts import Terminated, graceful_interrupt
from mhacli.record.heads import HeadsRequest
from mhacli.render.base.format import count_of
from mhacli.render.base.options import ViewOptions
from mhacli.settings import DEFAULT_MAX_BYTES, MAX_LENGTH
from mhacli.text.conditions import parse_condition

if TYPE_CHECKING:
    from mhacli.commands.scan.engines.ranks import Share
    from mhacli.commands.scan.engines.single import Engine
    from mhacli.commands.scan.request import ScanRequest
    from mhacli.commands.scan.run import ScanStudy
    from mhacli.record.record import Record

_CORPUS, _MODEL, _WORKERS = "Corpus", "Checkpoint", "Workers"


@option_group
class CorpusOptions:
    """The files of the corpus, and how they are divided into documents."""

    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files, JSON lines, Parquet files or globs; - reads stdin.",
            metavar="CORPUS...",
            show_default=False,
        ),
    ] = None
    field: Annotated[
        str | None,
        option(
            _CORPUS,
            "Read JSON lines, and take the text from this field; a.b is b in a. (default: text)",
            metavar="NAME",
            common=True,
        ),
    ] = None
    column: Annotated[
        str | None,
        option(
            _CORPUS,
            "Read Parquet files, and take the text from this column (needs pyarrow). (default: text)",
            metavar="NAME",
            common=True,
        ),
    ] = None
    lines: Annotated[bool, option(_CORPUS, "Treat each line of a file as a sequence.", "--lines", common=True)] = False
    max_docs: Annotated[
        int | None, number(_CORPUS, Integer(1, 10**12), "Use only the first N documents.", common=True)
    ] = None
    max_tokens: Annotated[
        int | None,
        number(
            _CORPUS,
            Integer(1, MAX_LENGTH),
            "Use only the first N tokens of each sequence. (default: all; sequences too long for the model are left out)",
            *MAX_TOKENS,
            common=True,
        ),
    ] = None
    pack: Annotated[bool, option(_CORPUS, "", "--pack", hidden=True)] = False
    max_bytes: Annotated[
        int,
        option(
            _CORPUS,
            f"Leave out larger documents. (default: {format_size(DEFAULT_MAX_BYTES)})",
            parser=size("max-bytes"),
            metavar="SIZE",
            show_default=False,
        ),
    ] = DEFAULT_MAX_BYTES
    strict: Annotated[bool, option(_CORPUS, "Stop at a bad document instead of leaving it out.", "--strict")] = False


@option_group
class ScanModelOptions(ModelOptions):
    """The checkpoint, and the heads, spans and effects to report."""

    tokenizer: Annotated[
        str | None,
        option(
            _MODEL,
            "word, char, byte, or the path of a tokenizer.json (needs the extra hf). (default: the checkpoint's own)",
        ),
    ] = None
    head: Annotated[str | None, head_list("all")] = None
    span: Annotated[
        list[str] | None,
        option(
            HEADS,
            "Report the attention between parts of the documents that have them: name=/REGEX/; repeatable.",
            metavar="SPAN",
        ),
    ] = None
    effect: Annotated[
        bool,
        option(
            HEADS,
            "Also remove each head in turn, and report what changes at the first [MASK], else the last token.",
            "--effect",
            common=True,
        ),
    ] = False
    allow_nonfinite: Annotated[
        bool, option(_MODEL, "Continue even if numbers are NaN or Inf.", "--allow-nonfinite")
    ] = False


@option_group
class WorkerOptions:
    """The workers that the documents are distributed to. The result does not depend on them."""

    workers: Annotated[
        int | None,
        number(
            _WORKERS,
            Integer(1, 100_000),
            "Number of workers, each with the model in its memory (needs the extra scan). "
            "(default: this process alone; with --ray, as many as there is room for)",
            show_default=False,
            common=True,
        ),
    ] = None
    ray: Annotated[
        str | None,
        option(
            _WORKERS,
            "Compute on the Ray cluster at this address; auto: the cluster that this machine belongs to; local: a "
            "new one on this machine.",
            metavar="ADDRESS",
        ),
    ] = None
    cpus_per_worker: Annotated[
        int | None,
        number(
            _WORKERS,
            Integer(1, 100_000),
            "CPUs that Ray reserves for each worker. (default: as many as --threads)",
            show_default=False,
        ),
    ] = None


@option_group
class ScanOutput(Output):
    """The folder of the result, and the format and colour of the report."""

    out: Annotated[
        str | None,
        option(OUTPUT, "Folder of the result. An interrupted scan resumes from it.", metavar="DIR", common=True),
    ] = None
    mixed: Annotated[
        bool,
        option(
            OUTPUT, "Allow results from different kinds of devices in one folder; the result records this.", "--mixed"
        ),
    ] = False
    all: Everything = False


@examples(
    "mha scan --model MiniLM poem.txt --lines --out heads.mha",
    "mha scan --model MiniLM 'texts/*.jsonl' --max-tokens 512 --out heads.mha",
    "mha show heads.mha",
)
@command
def scan(
    corpus: CorpusOptions,
    model: ScanModelOptions,
    statistics: StatisticsOptions,
    device: Annotated[
        DeviceOptions,
        offers(
            "device",
            dtype=f"{NUMBER_FORMAT} (default: that of the checkpoint)",
            threads="Number of CPU threads. (default: 1; another number changes the rounding)",
        ),
    ],
    workers: WorkerOptions,
    output: Annotated[ScanOutput, offers("out", "mixed", "json", "all", *COLOUR)],
) -> None:
    """Scans a corpus into a folder and prints the overview of the heads."""
    request = _request(corpus, model, statistics, device, output)
    tables = [source for source in corpus.sources or () if source.lower().endswith((".csv", ".tsv"))]
    if tables and not (corpus.lines or corpus.field or corpus.column):
        note(f"{tables[0]} is read as one text with its commas; --lines takes its lines, and JSON lines have --field")
    with loading_torch():
        from mhacli.commands.scan.engines.ranks import on_own_gpu
        from mhacli.commands.scan.run import ScanStudy

        study = ScanStudy(on_own_gpu(request), *_engine_and_share(workers, n_threads=device.threads or 1))
    record = _run_with_progress(study, as_json=output.json)
    if record is None:
        note(f"the other ranks have not finished their units of {request.out}; the last one writes the summary")
        return
    print_record(record, ViewOptions(view="none", everything=output.all), output)
    flush()
    _note_result(record, request.out)
    require_self_check(record)


def _request(
    corpus: CorpusOptions,
    model: ScanModelOptions,
    statistics: StatisticsOptions,
    device: DeviceOptions,
    output: ScanOutput,
) -> ScanRequest:
    """The request for every document. Raises `UsageError` for options that fit no document."""
    from mhacli.commands.scan.request import ScanRequest
    from mhacli.requests.checkpoint import ModelRequest
    from mhacli.text.corpus import CorpusFormat
    from mhacli.text.spans import require_expressions

    if corpus.pack:
        raise UsageError("--pack is gone: each document is a text of its own; --max-tokens N takes its first N tokens")
    _require(model.model, "--model", "a checkpoint, such as --model MiniLM")
    _require(output.out, "--out", "a folder for the result, such as --out heads.mha")
    _require(corpus.sources, "a corpus", "text files, JSON lines, Parquet files or -")
    layers, heads, spans = layer_list(model.layer), index_list(model.head, "head"), tuple(model.span or ())
    checkpoint = local_checkpoint(model)
    if checkpoint is not None and layers is not None:
        require_layers(layers, checkpoint)
    require_expressions(spans)
    wanted = HeadsRequest(
        heads=None if heads is None else tuple(sorted(set(heads))),
        patterns=tuple(map(parse_condition, statistics.pattern or ())),
        sink_tokens=statistics.sink_tokens,
        sink_share=statistics.sink_share,
        allow_nonfinite=model.allow_nonfinite,
        reducer=statistics.reducer,
    )
    return ScanRequest(
        ModelRequest(
            source=model.model or "",
            checkpoint=None,
            texts=(),
            wanted=wanted,
            revision=model.revision,
            spans=spans,
            layers=layers,
            tokenizer=model.tokenizer,
            device=device.device or "auto",
            device_map=device_map_of(model.device_map, device.device),
            dtype=device.dtype,
            threads=device.threads or 1,
            max_tokens=corpus.max_tokens,
            keep=(),
        ),
        sources=tuple(corpus.sources or ()),
        form=CorpusFormat(corpus.field, corpus.column, corpus.lines, corpus.max_docs, corpus.max_bytes),
        out=output.out or "",
        effect=model.effect,
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


def _engine_and_share(options: WorkerOptions, *, n_threads: int) -> tuple[Engine, Share]:
    """What distributes the units to workers, and the units of this process. Raises `UsageError` for options without effect."""
    from mhacli.commands.scan.engines.ranks import Share, share_here
    from mhacli.commands.scan.engines.ray import RayEngine
    from mhacli.commands.scan.engines.single import SingleEngine

    share = share_here()
    if options.ray is None and options.workers is None:
        if options.cpus_per_worker is not None:
            raise UsageError("--cpus-per-worker has no effect without --workers or --ray")
        return SingleEngine(), share or Share()
    if share is not None:
        raise UsageError(
            f"{'--ray' if options.ray is not None else '--workers'} does not work in a rank (RANK and WORLD_SIZE are set)",
            hint="one process with --ray uses all nodes of a Ray cluster",
        )
    n_cpus = options.cpus_per_worker or n_threads
    return RayEngine(options.ray or "local", options.workers, n_cpus, note), Share()


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
