"""`mha heads`: exact statistics of every head for a long text, without storing its attention matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from mhacli.cli.console import flush, loading_torch, note, progress, show_activity
from mhacli.cli.help import examples
from mhacli.cli.numbers import Integer
from mhacli.cli.options import (
    OUTPUT,
    TOP,
    Brief,
    DeviceOptions,
    DrawingOptions,
    Everything,
    HeadsViewOptions,
    LayerOptions,
    Precision,
    SectionOptions,
    ShowTokens,
    SourceOptions,
    TextOptions,
    command,
    head_list,
    number,
    offers,
    option,
    option_group,
    sequence_list,
)
from mhacli.cli.output import (
    COLOUR,
    PICTURES,
    Output,
    print_record,
    print_result,
    save_record,
    view_options,
    with_output,
)
from mhacli.cli.shared.checkpoint import (
    ComputeRequest,
    ModelOptions,
    ModelTextOptions,
    layer_list,
    model_request,
    require_configured_heads,
    require_without_model,
)
from mhacli.cli.shared.request import record_command, require_heads
from mhacli.cli.shared.statistics import HEADS, StatisticsOptions
from mhacli.cli.values import index_list, span
from mhacli.errors import UsageError, out_of_range
from mhacli.io.files import format_size
from mhacli.io.interrupts import more_time
from mhacli.io.memory import uncollected
from mhacli.record.heads import Corner, HeadsRequest, Kept
from mhacli.record.record import LayerChoice, kinds_of
from mhacli.render.base.format import seconds_text
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.requests.layer import LayerRequest, require_no_dropout
from mhacli.requests.memory import BASE_BYTES, predict_heads_memory
from mhacli.text.conditions import parse_condition

if TYPE_CHECKING:
    from mhacli.compute.checkpoint.run import CheckpointRun
    from mhacli.compute.heads import HeadsRun
    from mhacli.record.record import Record

_ANNOUNCED_S, _PRINTING_S, _ANNOUNCED_TOKENS = 10.0, 3.0, 8192


@option_group
class HeadsOptions(StatisticsOptions):
    """The statistics to compute, and the queries and keys to print."""

    head: Annotated[str | None, head_list("all")] = None
    query: Annotated[
        str | None,
        option(
            HEADS,
            "List the strongest keys of these queries in every head, such as 1000 or 0,5-7.",
            metavar="LIST",
            common=True,
        ),
    ] = None
    top: Annotated[int, number(HEADS, Integer(1, 1000), "Keys per query, with --query.", *TOP, metavar="K")] = 10
    rows: Annotated[str | None, option(HEADS, "Print the matrix rows of queries A to B−1.", metavar="A:B")] = None
    keys: Annotated[str | None, option(HEADS, "Print the matrix columns of keys C to D−1.", metavar="C:D")] = None


@option_group
class HeadsOutput(Output):
    """The files, format and colour of the record."""

    keep_z: Annotated[bool, option(OUTPUT, "Save the head outputs (z) too.", "--keep-z")] = False


@option_group
class HeadsDrawing:
    """The sequences and tables to print."""

    sequence: Annotated[str | None, sequence_list("the first four")] = None
    precision: Precision = 2
    all: Everything = False
    tokens: ShowTokens = False
    brief: Brief = False


@examples(
    "mha heads --file poem.txt --heads 8 --map 0-3",
    "mha heads --file poem.txt --model MiniLM",
    "mha heads --random 1,4096 --causal --sort entropy",
)
@command
def heads(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    statistics: HeadsOptions,
    drawing: HeadsDrawing,
    ranking: HeadsViewOptions,
    model: ModelOptions,
    reading: ModelTextOptions,
    output: Annotated[
        HeadsOutput,
        offers("json", "save", "force", "keep_z", *PICTURES, *COLOUR, csv="Print CSV: a line per head."),
    ],
) -> None:
    """Computes the statistics of a layer of mha or of a checkpoint and prints the overview."""
    to_draw = DrawingOptions(sequence=drawing.sequence, precision=drawing.precision, all=drawing.all)
    sections = SectionOptions(tokens=drawing.tokens, brief=drawing.brief)
    options = replace(view_options(to_draw, ranking, sections), layers=layer_list(model.layer))
    options = with_output(options, output, has_maps=bool(options.maps))
    compute_request = ComputeRequest(source, text, layer, device, model, reading, output)
    if model.model is not None:
        _checkpoint_heads(compute_request, statistics, output, options)
        return
    require_without_model(**vars(model), **vars(reading))
    from mhacli.cli.shared.request import make_request, save_files

    request = make_request(source, text, layer, device, output)
    require_no_dropout(request.config)
    heads_request = _layer_heads_request(request, statistics, layer, keep_z=output.keep_z)
    _require_drawable(options, heads_request, request.config.n_heads)
    require_choices(request.config.n_heads, len(request.encoded.sequences), options)
    if request.config.device in ("auto", "cpu"):
        predict_heads_memory(request.facts, heads_request)
    with loading_torch():
        from mhacli.compute.heads import prepare_heads
    with show_activity("projecting"):
        run = prepare_heads(request, heads_request)
    _announce(run)
    _run_with_progress(run, len(run.heads), "heads", options, output)
    record = run.record()
    save_files(record, request, output)
    _print(record, request.notes, output, options)


def _print(record: Record, notes: Sequence[str], output: HeadsOutput, options: ViewOptions) -> None:
    """Prints the result, and on a terminal the commands to type next."""
    print_result(record, notes, options=options, output=output)
    if output.on_terminal and not options.brief:
        from mhacli.cli.next_steps import after_heads

        after_heads(record, options, output)


def _layer_heads_request(
    request: LayerRequest, statistics: HeadsOptions, layer: LayerOptions, *, keep_z: bool
) -> HeadsRequest:
    """The request for a layer of mha. Raises `UsageError` for heads, queries and keys that do not exist."""
    facts = request.facts
    heads = _chosen_heads(statistics)
    require_heads(heads, request, layer)
    kept = _kept(statistics, facts.q_len, facts.k_len, keep_z=keep_z)
    _require_same_columns(kept, is_shifted=bool(facts.padded) and request.config.padding == "left")
    return replace(_heads_request(statistics, layer, heads), kept=kept)


def _chosen_heads(statistics: HeadsOptions) -> tuple[int, ...] | None:
    heads = index_list(statistics.head, "head")
    return None if heads is None else tuple(sorted(set(heads)))


def _kept(statistics: HeadsOptions, q_len: int, k_len: int, *, keep_z: bool, suffix: str = "") -> Kept:
    """The queries, keys and matrix block to keep. Raises `UsageError`, with `suffix`, for those that do not exist."""
    queries = index_list(statistics.query, "query") or ()
    _require_below(queries, q_len, "--query", suffix)
    block = None
    if statistics.rows is not None or statistics.keys is not None:
        rows, keys = span(statistics.rows, q_len, f"rows{suffix}"), span(statistics.keys, k_len, f"keys{suffix}")
        block = Corner(rows.start, len(rows), keys.start, len(keys))
    return Kept(queries, statistics.top if queries else 0, block, keep_z)


def _require_same_columns(kept: Kept, *, is_shifted: bool) -> None:
    """Raises `UsageError` for chosen positions if the texts begin in different columns."""
    if (kept.queries or kept.corner) and is_shifted:
        raise UsageError(
            "--query, --rows and --keys need texts of one length where padding is on the left",
            hint="with --padding right all texts begin in the same column",
        )


def _kept_in_kinds(
    statistics: HeadsOptions, run: CheckpointRun, layers: tuple[LayerChoice, ...] | None, keep_z: bool
) -> Kept:
    """The queries, keys and matrix block to keep in layers that may read different texts. Raises `UsageError`, with the kind of
    layer, for positions that a text does not have."""
    is_pair = run.inputs.context is not None
    kept_by_kind: dict[Kept, str] = {}
    for kind in kinds_of(layers, is_pair=is_pair):
        axes = run.axes(kind)
        try:
            kept = _kept(
                statistics, axes.q_len, axes.k_len, keep_z=keep_z, suffix=f" of {kind} layers" if is_pair else ""
            )
        except UsageError as fault:
            raise UsageError(fault.message, hint=_ONE_KIND if is_pair else fault.hint) from None
        lengths = {len(text.ids) for text in (*axes.queries, *axes.keys)}
        _require_same_columns(kept, is_shifted=axes.side == "left" and len(lengths) > 1)
        kept_by_kind.setdefault(kept, kind)
    if len(kept_by_kind) > 1:
        raise UsageError(
            f"--rows and --keys need both ends, because {' and '.join(kept_by_kind.values())} layers read different texts",
            hint=_ONE_KIND,
        )
    return next(iter(kept_by_kind), Kept(z=keep_z))


_ONE_KIND = "--layer encoder.N, decoder.N or cross.N chooses one kind"


def _heads_request(statistics: HeadsOptions, layer: LayerOptions, heads: tuple[int, ...] | None) -> HeadsRequest:
    """The request without the cells to keep."""
    return HeadsRequest(
        heads=heads,
        patterns=tuple(map(parse_condition, statistics.pattern or ())),
        sink_tokens=statistics.sink_tokens,
        sink_share=statistics.sink_share,
        allow_nonfinite=layer.allow_nonfinite,
        reducer=statistics.reducer,
        command=record_command(),
    )


def _require_drawable(options: ViewOptions, heads_request: HeadsRequest, n_heads: int) -> None:
    """Raises `UsageError` for a map of a head that is not inspected."""
    _require_below(options.maps, n_heads, "--map")
    for head in options.maps:
        if heads_request.heads is not None and head not in heads_request.heads:
            raise UsageError(
                f"--map {head}: head {head} is not among the heads chosen with --head", hint=f"add {head} to --head"
            )


def _require_below(indices: Sequence[int], count: int, name: str, suffix: str = "") -> None:
    for index in indices:
        if index >= count:
            raise UsageError(out_of_range(name, index, count) + suffix)


def _run_with_progress(run: Any, count: int, unit: str, options: ViewOptions, output: HeadsOutput) -> None:
    """Computes the statistics with a progress bar. Ctrl-C prints the finished part; nothing is saved."""
    try:
        with progress() as report_progress:
            run.run(report_progress)
    except KeyboardInterrupt:
        message = f"interrupted: {run.n_finished} of {count} {unit} are finished, and nothing was saved"
        if output.format is None and run.n_finished:
            more_time(_PRINTING_S)
            record = run.record()
            print_record(record, _finished_options(options, record), output)
            flush()
        note(message)
        raise


def _finished_options(options: ViewOptions, record: Record) -> ViewOptions:
    """The view options without unfinished layers and heads."""
    heads, finished = {head.head for head in record.heads}, {(layer.kind, layer.layer) for layer in record.layers}
    layers = [(kind, n) for kind, n in options.layers or () if any(n == m and kind in (None, k) for k, m in finished)]
    return replace(
        options,
        layers=None if options.layers is None else tuple(layers),
        heads=None if options.heads is None else tuple(head for head in options.heads if head in heads),
        maps=tuple(head for head in options.maps if head in heads),
    )


def _announce(run: HeadsRun) -> None:
    """Prints the predicted time and memory of a long computation."""
    prediction = run.predict()
    if prediction.seconds > _ANNOUNCED_S:
        note(
            f"{run.scores.shape[3]:,} tokens, {len(run.heads)} heads: at most about {seconds_text(prediction.seconds)} and "
            f"{format_size(max(0, prediction.peak_bytes - BASE_BYTES))} in addition to torch's own memory; "
            f"full attention matrices would take {format_size(prediction.full_bytes)}"
        )


def _checkpoint_heads(
    compute_request: ComputeRequest, statistics: HeadsOptions, output: HeadsOutput, options: ViewOptions
) -> None:
    """Computes the statistics of the layers of a checkpoint and prints the overview."""
    heads = _chosen_heads(statistics)
    heads_request = _heads_request(statistics, compute_request.layer, heads)
    without_matrices = replace(compute_request, save=replace(compute_request.save, keep=""))
    request = model_request(without_matrices, heads_request)
    require_configured_heads(heads, request)
    require_configured_heads(options.maps, request, "map")
    with loading_torch():
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
    with show_activity("loading the checkpoint"), uncollected():
        run, notes = prepare_checkpoint(request)
    longest = max(len(text.ids) for text in (*run.inputs.sequences, *(run.inputs.context or ())))
    kept = _kept_in_kinds(statistics, run, request.layers, output.keep_z)
    run.wanted = replace(run.wanted, heads=replace(run.wanted.heads, kept=kept))
    if longest * run.n_layers > _ANNOUNCED_TOKENS:
        note(
            f"{longest:,} tokens, {run.n_layers} layers: about {format_size(run.peak_bytes)} in addition to the weights"
        )
    _run_with_progress(run, run.n_layers, "layers", options, output)
    record = run.record()
    save_record(record, compute_request.save)
    _print(record, notes, output, options)
