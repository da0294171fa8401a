"""`mha scan`: the statistics of every head over a corpus, in a folder from which an interrupted scan resumes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from mhacli.cli.console import flush, loading_torch, note
from mhacli.cli.help import examples
from mhacli.cli.numbers import Integer
from mhacli.cli.options import (
    DEVICE,
    MAX_TOKENS,
    NUMBER_FORMAT,
    OUTPUT,
    ColourOptions,
    Everything,
    command,
    device_option,
    head_list,
    number,
    option,
    option_group,
)
from mhacli.cli.shared.checkpoint import ModelOptions, device_map_of, layer_list, local_checkpoint, require_layers
from mhacli.cli.shared.output import JSON, Formats, format_options, print_record, require_self_check
from mhacli.cli.shared.statistics import HEADS, StatisticsOptions
from mhacli.cli.values import index_list, size
from mhacli.commands.scan.lines import ScanReport
from mhacli.commands.scan.workers import EngineOptions
from mhacli.errors import UsageError
from mhacli.io.files import format_size
from mhacli.io.interrupts import Terminated, graceful_interrupt
from mhacli.record.heads import SINK_SHARE, SINK_TOKENS
from mhacli.render.base.format import count_of
from mhacli.render.base.options import ViewOptions
from mhacli.settings import DEFAULT_MAX_BYTES, MAX_LENGTH, MAX_THREADS, Dtype
from mhacli.text.conditions import parse_pattern

if TYPE_CHECKING:
    from mhacli.commands.scan.request import ScanRequest
    from mhacli.commands.scan.run import ScanStudy
    from mhacli.record.record import Record
    from mhacli.text.corpus import CorpusFormat

_CORPUS, _MODEL = "Corpus", "Checkpoint"


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
        int | None,
        number(_CORPUS, Integer(1, 10**12), "Use only the first N documents.", common=True),
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
    pack: Annotated[
        bool,
        option(_CORPUS, "", "--pack", hidden=True),
    ] = False
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

    def form(self) -> CorpusFormat:
        """The format of the files. Raises `UsageError` for options that exclude each other."""
        if self.pack:
            raise UsageError(
                "--pack is gone: each document is a text of its own; --max-tokens N takes its first N tokens"
            )
        from mhacli.text.corpus import CorpusFormat

        return CorpusFormat(self.field, self.column, self.lines, self.max_docs, self.max_bytes)


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
class ScanDeviceOptions:
    """Device, dtype and threads of the computation."""

    device: Annotated[str | None, device_option(DEVICE, " (default: auto)")] = None
    dtype: Annotated[Dtype | None, option(DEVICE, f"{NUMBER_FORMAT} (default: that of the checkpoint)")] = None
    threads: Annotated[
        int,
        number(
            DEVICE,
            Integer(1, MAX_THREADS),
            "Number of CPU threads. (default: 1; another number changes the rounding)",
            show_default=False,
        ),
    ] = 1


@format_options(json=JSON)
class ScanFormats(Formats):
    """Formats of the report of a scan."""


@option_group
class ScanOutput:
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
    formats: ScanFormats
    all: Everything = False
    colour: ColourOptions


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
    device: ScanDeviceOptions,
    workers: EngineOptions,
    output: ScanOutput,
) -> None:
    """Scans a corpus into a folder and prints the overview of the heads."""
    output.formats.chosen()
    form, request = corpus.form(), _request(model, statistics, device, corpus)
    out = _required(output.out, "--out", "a folder for the result, such as --out heads.mha")
    sources = corpus.sources
    if not sources:
        raise UsageError("mha scan needs a corpus: text files, JSON lines, Parquet files or -", hint="mha scan --help")
    with loading_torch():
        from mhacli.commands.scan.engines.ranks import on_own_gpu
        from mhacli.commands.scan.run import ScanStudy

        engine, share = workers.engine(request.threads), workers.share()
    study = ScanStudy(
        on_own_gpu(request), sources, form, out, engine, command=_command(request, corpus), share=share,
        strict=corpus.strict, mixed=output.mixed,
    )  # fmt: skip
    record = _run_with_progress(study, as_json=output.formats.chosen() == "json")
    if record is None:
        note(f"the other ranks have not finished their units of {out}; the last one writes the summary")
        return
    print_record(record, ViewOptions(view="none", everything=output.all), output.formats.chosen(), output.colour)
    flush()
    _note_result(record, out)
    require_self_check(record)


def _run_with_progress(study: ScanStudy, *, as_json: bool) -> Record | None:
    """The record of the study, None if other ranks are not finished. After Ctrl-C the documents in progress are finished, then
    `KeyboardInterrupt` is raised; a second Ctrl-C and SIGTERM are raised at once."""
    try:
        with ScanReport.on_stderr(as_json=as_json) as report, graceful_interrupt(report.stopping) as is_stopped:
            study.report_progress, study.note, study.is_stopped = report.report_progress, report.note, is_stopped
            record = study.run()
        if record is None and is_stopped():
            raise KeyboardInterrupt
    except (KeyboardInterrupt, Terminated):
        progress = study.progress
        total = "" if progress.of_documents is None else f" of {progress.of_documents:,}"
        note(f"interrupted: {progress.n_documents:,}{total} documents are done; the same command resumes the scan")
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


def _request(
    model: ScanModelOptions, statistics: StatisticsOptions, device: ScanDeviceOptions, corpus: CorpusOptions
) -> ScanRequest:
    """The request for every document. Raises `UsageError` for options that fit no document."""
    from mhacli.commands.scan.request import ScanRequest
    from mhacli.text.spans import require_expressions

    source = _required(model.model, "--model", "a checkpoint, such as --model MiniLM")
    layers, heads = layer_list(model.layer), index_list(model.head, "head")
    checkpoint = local_checkpoint(model)
    if checkpoint is not None and layers is not None:
        require_layers(layers, checkpoint)
    spans = tuple(model.span or ())
    require_expressions(spans)
    return ScanRequest(
        source=source,
        revision=model.revision,
        tokenizer=model.tokenizer,
        device=device.device or "auto",
        device_map=device_map_of(model.device_map, device.device),
        dtype=device.dtype,
        threads=device.threads,
        max_tokens=corpus.max_tokens,
        layers=layers,
        heads=None if heads is None else tuple(sorted(set(heads))),
        conditions=tuple(parse_pattern(word).text for word in statistics.pattern or ()),
        spans=spans,
        sink_tokens=statistics.sink_tokens,
        sink_share=statistics.sink_share,
        allow_nonfinite=model.allow_nonfinite,
        reducer=statistics.reducer,
        effect=model.effect,
        rows="parquet" if find_spec("pyarrow") is not None else "jsonl",
    )


def _required(value: str | None, name: str, example: str) -> str:
    if not value:
        raise UsageError(f"mha scan needs {name}: {example}", hint="mha scan --help shows examples")
    return value


def _command(request: ScanRequest, corpus: CorpusOptions) -> tuple[str, ...]:
    """The command line for the record: the options that decide the numbers, without those of workers and output."""
    layers = request.layers and ",".join(str(n) if kind is None else f"{kind}.{n}" for kind, n in request.layers)
    heads = request.heads and ",".join(map(str, request.heads))
    arguments: dict[str, Sequence[object]] = {
        "--revision": [request.revision], "--tokenizer": [request.tokenizer], "--dtype": [request.dtype],
        "--field": [corpus.field], "--column": [corpus.column], "--max-docs": [corpus.max_docs],
        "--max-tokens": [request.max_tokens], "--layer": [layers], "--head": [heads],
        "--where": request.conditions, "--span": request.spans,
    }  # fmt: skip
    numbers = {
        "--max-bytes": (corpus.max_bytes, DEFAULT_MAX_BYTES), "--threads": (request.threads, 1),
        "--first-tokens": (request.sink_tokens, SINK_TOKENS), "--sink-weight": (request.sink_share, SINK_SHARE),
    }  # fmt: skip
    arguments |= {name: [value] for name, (value, usual) in numbers.items() if value != usual}
    words = [
        str(word)
        for name, values in arguments.items()
        for value in values
        if value is not None
        for word in (name, value)
    ]
    flags = {
        "--lines": corpus.lines,
        "--effect": request.effect,
        "--allow-nonfinite": request.allow_nonfinite,
    }
    words += [name for name, is_given in flags.items() if is_given]
    return ("mha", "scan", "--model", request.source, *(corpus.sources or ()), *words)
