"""`mha heads`: exact statistics of every head for a long text, without storing its attention
matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.console import progress
from mhacli.cli.output import DRAWING, OF_RECORDS, Output, print_result, require_output
from mhacli.cli.parameters import command, layer_or_model, offers
from mhacli.errors import UsageError, out_of_range
from mhacli.record.heads import Corner, Kept
from mhacli.record.record import kinds_of
from mhacli.render.base.options import ViewOptions
from mhacli.settings import (
    HEADS,
    OUTPUT,
    TOP,
    Computation,
    Reading,
    Statistics,
    head_list,
    query_list,
    setting,
)
from mhacli.text.spans import part_of

if TYPE_CHECKING:
    from mhacli.models.run import CheckpointRun

_HEAD = "Compute only these heads, such as 0,2 or 0-3. (default: all)"
_SEQUENCES = "Show only these sequences, such as 0,2. (default: the first four)"
_QUERY = "List the strongest keys of these queries in every head, such as 1000, 0,5-7 or last."
_EFFECT = (
    "Add what the removal of each head changes, as mha effect measures it, in one table of all"
    " heads."
)
_CONTROL = (
    "Add the type and the statistics of each head on random tokens, where only positions and"
    " special tokens can make a type."
)
_ROWS = "Print the matrix rows of queries A to B−1."
_KEYS = "Print the matrix columns of keys C to D−1."


def _span(word: str | None, count: int, name: str) -> range:
    """The positions that `part_of` reads; all of them for None. Raises `UsageError` for none."""
    positions = part_of(":" if word is None else word.replace(" ", ""), count)
    if not positions:
        raise UsageError(
            f"{name} {str(word)[:40]!r} is not A:B within 0:{count}, such as 100:140, from A to B−1"
        )
    return positions


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The heads to inspect, and the queries and keys to print."""

    head: tuple[int, ...] | None = setting(
        None, "View", _HEAD, parse=head_list, metavar="LIST", common=True
    )
    query: tuple[int, ...] | None = setting(
        None, HEADS, _QUERY, parse=query_list, metavar="LIST", common=True
    )
    top: int = setting(
        10,
        HEADS,
        "Keys per query, with --query.",
        TOP,
        low=1,
        high=1000,
        metavar="K",
        needs=("query",),
    )
    rows: str | None = setting(None, HEADS, _ROWS, metavar="A:B")
    keys: str | None = setting(None, HEADS, _KEYS, metavar="C:D")

    def kept(self, q_len: int, k_len: int, *, z: bool, is_shifted: bool) -> Kept:
        """The queries, keys and matrix block to keep. Raises `UsageError` for positions that do not
        exist, and for any position if the texts begin in different columns (`is_shifted`).
        """
        queries = tuple(range(q_len)[query] if query < 0 else query for query in self.query or ())
        block = None
        if queries and max(queries) >= q_len:
            raise UsageError(out_of_range("--query", max(queries), q_len))
        if self.rows is not None or self.keys is not None:
            rows, keys = _span(self.rows, q_len, "--rows"), _span(self.keys, k_len, "--keys")
            block = Corner(rows.start, len(rows), keys.start, len(keys))
        if is_shifted and (queries or block):
            raise UsageError(
                "--query, --rows and --keys need texts of one length, or --padding right"
            )
        return Kept(queries, self.top if queries else 0, block, z)


@command(
    "mha heads --file poem.txt --heads 8 --map 0-3",
    "mha heads --file poem.txt --model MiniLM",
    "mha heads --random 1,4096 --causal --sort entropy",
    modes=layer_or_model,
)
def heads(
    what: Computation,
    cells: Cells,
    statistics: Statistics,
    options: Annotated[
        ViewOptions,
        offers(
            "precision",
            "everything",
            "tokens",
            "verbose",
            "brief",
            "maps",
            "sort",
            *DRAWING,
            sequences=_SEQUENCES,
        ),
    ],
    reading: Reading,
    output: Annotated[
        Output, offers(*OF_RECORDS, "save", "force", csv="Print CSV: a line per head.")
    ],
    *,
    keep_z: bool = setting(False, OUTPUT, "Save the head outputs (z) too."),
    effect: bool = setting(
        False, HEADS, _EFFECT, common=True, modes=("model",), excludes=("generate",)
    ),
    control: bool = setting(False, HEADS, _CONTROL, modes=("model",), excludes=("generate",)),
) -> None:
    """Computes the statistics of a layer of mha or of a checkpoint and prints the overview."""
    from mhacli.cli.source import make_run, recorded, require_heads, require_in_config, start

    require_output(options, output, has_effects=effect)
    options = replace(options, layers=what.model.layers)
    heads = None if cells.head is None else tuple(sorted(set(cells.head)))
    require_in_config(what.model, "--head", heads)
    require_in_config(what.model, "--map", options.maps)
    keep = () if what.model.path is not None else None
    run, texts = make_run(
        what, reading=reading, statistics=replace(statistics, heads=heads), keep=keep
    )
    require_heads(heads, run)
    require_heads(options.maps, run, "--map")
    if run.model.path is None:
        if run.config.train:
            raise UsageError(
                "--train does not work with mha heads, which has no patterns that dropout acts on"
            )
        for head in {*options.maps}.difference(heads or options.maps):
            raise UsageError(f"--map {head}: head {head} is not among the heads chosen with --head")
        is_shifted = run.dims.padded and run.config.padding == "left"
        run = replace(
            run, kept=cells.kept(run.dims.q_len, run.dims.k_len, z=keep_z, is_shifted=is_shifted)
        )
    prepared, notes = start(run, options, head="predict" if effect else None, has_matrices=False)
    with progress() as report_progress:
        if prepared is None:
            from mhacli.layer.run import inspect_heads

            record = inspect_heads(run, texts, report_progress)
        else:
            from .effect.in_memory import head_table

            prepared.request = replace(prepared.request, kept=_kept(prepared, cells, keep_z=keep_z))
            record = head_table(
                prepared, effect=effect, control=control, report_progress=report_progress
            )
    print_result(recorded(record), notes, options=options, output=output)


def _kept(prepared: CheckpointRun, cells: Cells, *, keep_z: bool) -> Kept:
    """The queries and keys that are kept in every layer of a checkpoint. Layers of several kinds
    read different texts: then they are positions of the shortest.
    """
    kinds = kinds_of(prepared.request.model.layers, is_pair=prepared.inputs.context is not None)
    axes = [prepared.axes(kind) for kind in kinds]
    is_shifted = any(
        a.queries.side == "left" and len({len(ids) for ids in (*a.queries.ids, *a.keys.ids)}) > 1
        for a in axes
    )
    q_len = min((a.queries.length for a in axes), default=0)
    k_len = min((a.keys.length for a in axes), default=0)
    return cells.kept(q_len, k_len, z=keep_z, is_shifted=is_shifted)
