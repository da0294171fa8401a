"""`mha heads`: exact statistics of every head for a long text, without storing its attention matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from mhacli.cli.console import flush, loading_torch, note, progress, show_activity
from mhacli.cli.help import examples
from mhacli.cli.output import (
    COLOUR,
    DRAWING,
    DRAWN,
    Output,
    print_record,
    print_result,
    require_output,
    require_sections,
    save_files,
)
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.cli.values import span
from mhacli.errors import UsageError, out_of_range
from mhacli.io.files import format_size
from mhacli.io.interrupts import more_time
from mhacli.io.memory import uncollected
from mhacli.record.heads import Corner, Kept
from mhacli.record.record import kinds_of
from mhacli.render.base.format import seconds_text
from mhacli.render.base.options import ViewOptions, require_choices
from mhacli.settings import HEADS, OUTPUT, Computation, LayerChoices, Reading, Statistics, index_list, setting

if TYPE_CHECKING:
    from mhacli.compute.checkpoint.run import CheckpointRun
    from mhacli.compute.heads import HeadsRun
    from mhacli.record.record import Record
    from mhacli.run import Run

_ANNOUNCED_S, _PRINTING_S, _ANNOUNCED_TOKENS = 10.0, 3.0, 8192
_HEAD = "Show only these heads, such as 0,2 or 0-3. (default: all)"
_SEQUENCES = "Show only these sequences, such as 0,2. (default: the first four)"
_QUERY = "List the strongest keys of these queries in every head, such as 1000 or 0,5-7."
_ROWS, _KEYS = "Print the matrix rows of queries A to B−1.", "Print the matrix columns of keys C to D−1."


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The heads to inspect, and the queries and keys to print."""

    # fmt: off
    head: tuple[int, ...] | None = setting(None, "View", _HEAD, parse=index_list, metavar="LIST", common=True)
    query: tuple[int, ...] | None = setting(None, HEADS, _QUERY, parse=index_list, metavar="LIST", common=True)
    top: int = setting(10, HEADS, "Keys per query, with --query.", "--top --top-k", low=1, high=1000, metavar="K")
    rows: str | None = setting(None, HEADS, _ROWS, metavar="A:B")
    keys: str | None = setting(None, HEADS, _KEYS, metavar="C:D")
    # fmt: on

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads in ascending order."""
        return None if self.head is None else tuple(sorted(set(self.head)))

    def kept(self, q_len: int, k_len: int, *, z: bool, suffix: str = "") -> Kept:
        """The queries, keys and matrix block to keep. Raises `UsageError`, with `suffix`, for those that do not exist."""
        queries = self.query or ()
        _require_below(queries, q_len, "--query", suffix)
        block = None
        if self.rows is not None or self.keys is not None:
            rows, keys = span(self.rows, q_len, f"rows{suffix}"), span(self.keys, k_len, f"keys{suffix}")
            block = Corner(rows.start, len(rows), keys.start, len(keys))
        return Kept(queries, self.top if queries else 0, block, z)


@dataclass(frozen=True, kw_only=True)
class HeadsOutput(Output):
    """The output of head statistics."""

    keep_z: bool = setting(False, OUTPUT, "Save the head outputs (z) too.")


@examples(
    "mha heads --file poem.txt --heads 8 --map 0-3",
    "mha heads --file poem.txt --model MiniLM",
    "mha heads --random 1,4096 --causal --sort entropy",
)
@command(layer_or_model)
def heads(
    what: Computation,
    cells: Cells,
    statistics: Statistics,
    options: Annotated[
        ViewOptions,
        offers("precision", "everything", "tokens", "brief", "maps", "sort", *DRAWING, sequences=_SEQUENCES),
    ],
    reading: Reading,
    output: Annotated[
        HeadsOutput, offers("json", "save", "force", "keep_z", *DRAWN, *COLOUR, csv="Print CSV: a line per head.")
    ],
) -> None:
    """Computes the statistics of a layer of mha or of a checkpoint and prints the overview."""
    from mhacli.cli.source import make_run

    require_sections(options)
    require_output(options, output)
    options = replace(options, layers=what.model.layers)
    keep = () if what.model.path is not None else None
    run = make_run(what, reading=reading, statistics=replace(statistics, heads=cells.heads), keep=keep)
    if run.model.path is not None:
        record, notes = _of_checkpoint(run, cells, output, options)
    else:
        record, notes = _of_layer(run, cells, output, options, what.given)
    save_files(record, output)
    print_result(record, notes, options=options, output=output)
    if output.on_terminal and not options.brief:
        from mhacli.cli.next_steps import after_heads

        after_heads(record, options, output)


def _of_layer(
    run: Run, cells: Cells, output: HeadsOutput, options: ViewOptions, given: Any
) -> tuple[Record, Sequence[str]]:
    from mhacli.attention.memory import predict_heads_memory
    from mhacli.cli.source import require_heads
    from mhacli.run import require_no_dropout

    require_no_dropout(run.config)
    require_heads(cells.heads, run, given)
    facts = run.facts
    run = replace(run, kept=cells.kept(facts.q_len, facts.k_len, z=output.keep_z))
    _require_same_columns(run.kept, is_shifted=bool(facts.padded) and run.config.padding == "left")
    _require_drawable(options, cells.heads, run.config.n_heads)
    require_choices(run.config.n_heads, len(run.encoded.sequences), options)
    if run.config.device in ("auto", "cpu"):
        predict_heads_memory(facts, run)
    with loading_torch():
        from mhacli.compute.heads import prepare_heads
    with show_activity("projecting"):
        prepared = prepare_heads(run)
    _announce(prepared)
    _run_with_progress(prepared, len(prepared.heads), "heads", options, output)
    return prepared.record(), run.notes


def _of_checkpoint(run: Run, cells: Cells, output: HeadsOutput, options: ViewOptions) -> tuple[Record, Sequence[str]]:
    from mhacli.cli.source import require_configured_heads

    require_configured_heads(cells.heads, run)
    require_configured_heads(options.maps, run, "map")
    with loading_torch():
        from mhacli.compute.checkpoint.prepare import prepare_checkpoint
    with show_activity("loading the checkpoint"), uncollected():
        prepared, notes = prepare_checkpoint(run)
    longest = max(len(text.ids) for text in (*prepared.inputs.sequences, *(prepared.inputs.context or ())))
    kept = _kept_in_kinds(cells, prepared, run.model.layers, output.keep_z)
    prepared.wanted = replace(prepared.wanted, kept=kept)
    if longest * prepared.n_layers > _ANNOUNCED_TOKENS:
        size = format_size(prepared.peak_bytes)
        note(f"{longest:,} tokens, {prepared.n_layers} layers: about {size} in addition to the weights")
    _run_with_progress(prepared, prepared.n_layers, "layers", options, output)
    return prepared.record(), notes


# ---------------------------------------------------------------------------------------------------------- rules


def _require_below(indices: Sequence[int], count: int, name: str, suffix: str = "") -> None:
    for index in indices:
        if index >= count:
            raise UsageError(out_of_range(name, index, count) + suffix)


def _require_drawable(options: ViewOptions, chosen: Sequence[int] | None, n_heads: int) -> None:
    """Raises `UsageError` for a map of a head that is not inspected."""
    _require_below(options.maps, n_heads, "--map")
    for head in options.maps:
        if chosen is not None and head not in chosen:
            raise UsageError(
                f"--map {head}: head {head} is not among the heads chosen with --head", hint=f"add {head} to --head"
            )


def _require_same_columns(kept: Kept, *, is_shifted: bool) -> None:
    """Raises `UsageError` for chosen positions if the texts begin in different columns."""
    if (kept.queries or kept.corner) and is_shifted:
        raise UsageError(
            "--query, --rows and --keys need texts of one length where padding is on the left",
            hint="with --padding right all texts begin in the same column",
        )


_ONE_KIND = "--layer encoder.N, decoder.N or cross.N chooses one kind"


def _kept_in_kinds(cells: Cells, run: CheckpointRun, layers: LayerChoices, keep_z: bool) -> Kept:
    """The queries, keys and matrix block to keep in layers that may read different texts. Raises `UsageError`, with the kind of
    layer, for positions that a text does not have."""
    is_pair = run.inputs.context is not None
    kept_by_kind: dict[Kept, str] = {}
    for kind in kinds_of(layers, is_pair=is_pair):
        axes = run.axes(kind)
        try:
            kept = cells.kept(axes.q_len, axes.k_len, z=keep_z, suffix=f" of {kind} layers" if is_pair else "")
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


# ------------------------------------------------------------------------------------------------------- progress


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
    from mhacli.attention.memory import BASE_BYTES

    prediction = run.predict()
    if prediction.seconds > _ANNOUNCED_S:
        note(
            f"{run.scores.shape[3]:,} tokens, {len(run.heads)} heads: at most about {seconds_text(prediction.seconds)} and "
            f"{format_size(max(0, prediction.peak_bytes - BASE_BYTES))} in addition to torch's own memory; "
            f"full attention matrices would take {format_size(prediction.full_bytes)}"
        )
