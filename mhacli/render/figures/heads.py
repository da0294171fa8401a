"""Heads as pictures: one head with its tokens and numbers, or many on one scale, a row per
layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from mhacli.errors import MhaError, UsageError
from mhacli.numbers import shown
from mhacli.record.heads import HeadStatistics
from mhacli.record.record import InspectedLayer, Record
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.doc import Grid
from mhacli.render.base.format import count_of, fitted, type_text
from mhacli.render.base.options import ViewOptions, chosen
from mhacli.render.base.selection import (
    DrawableHead,
    drawable_heads,
    missing_notes,
    names_of,
    scale_of,
)
from mhacli.render.checkpoint.patterns import WORDS_CAPTION, queries_of, words_map
from mhacli.render.heads.head_map import (
    KEY,
    QUERY,
    HeadMap,
    cell_meaning,
    grid_of,
    head_map,
    kv_head_of,
    largest_of_maps,
)
from mhacli.render.heads.table import types_of
from mhacli.text.escape import visible

from .grids import ROOMY, GridRow, grids, legend
from .svg import document


class _Size(NamedTuple):
    """For at most so many heads the side of each map, and its most cells per side."""

    n_heads: float
    side: float
    n_cells: int


_SIZES = (
    _Size(1, 720.0, 512),
    _Size(16, 168.0, 128),
    _Size(160, 84.0, 64),
    _Size(inf, 48.0, 32),
)
_WIDEST = 80
"""The most characters of a text that are shown."""
_KEEP = "--keep pattern keeps them, --keep-limit makes room"


def heads_figure(
    record: Record, options: ViewOptions, metadata: Mapping[str, object], *, is_of_one: bool = False
) -> str:
    """The picture of the chosen heads on one scale. Raises `UsageError` for a picture of one head
    if several are chosen, and `MhaError` if the record has none of their patterns.
    """
    heads = drawable_heads(record, options)
    _require_patterns(heads, options)
    if is_of_one and len(heads) > 1:
        has_layers = record.model is not None and options.layers is None
        hint = "try --layer 0 --head 0" if has_layers else "try --head 0"
        raise UsageError(f"--figure head draws one head, and {len(heads)} are chosen", hint=hint)
    sequence = _sequence(record, options)
    size = next(size for size in _SIZES if len(heads) <= size.n_heads)
    whole = [_map(head, sequence, options, size.n_cells) for head in heads]
    maps = [cells.without_sinks() for cells in whole] if options.hide_sinks else whole
    scale = scale_of(options, heads)
    top = largest_of_maps(maps)
    panels = []
    for head, cells in zip(heads, maps, strict=True):
        g = grid_of(cells, "", scale=scale, top=top, digits=options.precision)
        panels.append(_with_words(g, head, cells, size.side, is_single=len(heads) == 1))
    block = max(cells.block for cells in maps)
    return document(
        _title(record, heads, sequence),
        [grids(_rows(heads, panels, size.side), size.side), legend(panels, "attention weight")],
        metadata,
        about=[*_texts(heads, sequence, options), _types(heads)],
        caption=[
            cell_meaning(block, of_queries=maps[0].rows is not None),
            *_notes(record, heads, whole, options),
        ],
    )


def _require_patterns(heads: Sequence[DrawableHead], options: ViewOptions) -> None:
    """Raises `MhaError` without heads, and for words of heads whose patterns were not kept."""
    has_patterns = all(head.layer.has_pattern for head in heads)
    if not heads or (options.words and not has_patterns):
        what = "words" if options.words else "heads"
        raise MhaError(
            f"the {what} cannot be drawn: the record does not have their patterns", hint=_KEEP
        )


def _sequence(record: Record, options: ViewOptions) -> int:
    """The chosen sequence, or the first. Raises `UsageError` if several are chosen."""
    sequences = chosen(options.sequences, len(record.sequences), 1, False, "sequence").shown
    if options.sequences is not None and len(sequences) > 1:
        raise UsageError(
            f"a picture shows one sequence, and --sequence names {', '.join(map(str, sequences))}"
        )
    return sequences[0]


def _title(record: Record, heads: Sequence[DrawableHead], sequence: int) -> str:
    """The head, or the layers and the number of heads; and the sequence if there are several."""
    parts = [names_of([*_layers(heads)]), count_of(len(heads), "head")]
    kv_head = ""
    if len(heads) == 1:
        parts = [heads[0].label]
        kv_head = kv_head_of(heads[0])
    if len(record.sequences) > 1:
        parts.append(f"sequence {sequence}")
    return " · ".join(filter(None, parts)) + kv_head


def _types(heads: Sequence[DrawableHead]) -> str:
    """The types of the heads, of a single one with its statistics."""
    statistics = [head.statistics for head in heads]
    if len(heads) > 1:
        return " · ".join(text.plain for text in types_of(statistics))
    return f"{KIND_SIGNS[statistics[0].kind].sign} {_of_statistics(statistics[0])}"


def _map(head: DrawableHead, sequence: int, options: ViewOptions, most: int) -> HeadMap:
    """A head in at most `most` cells per side. Raises `UsageError` for rows of a head stored in
    blocks.
    """
    rows, _ = queries_of(head, sequence, options)
    if rows == ():
        raise UsageError(f"--from names no query of {head.label}")
    finest = words_map(head, sequence) if options.words else head_map(head, sequence)
    if rows is None:
        return finest.fitting(most, most)
    if finest.block > 1:
        of_blocks = f"{finest.block} × {finest.block} tokens a cell"
        raise UsageError(
            f"--from needs whole patterns, and the record has a map of {of_blocks}", hint=_KEEP
        )
    return finest.of_rows(rows, -(-finest.weights.shape[1] // most))


def _with_words(
    g: Grid, head: DrawableHead, cells: HeadMap, side: float, *, is_single: bool
) -> Grid:
    """The grid of a head with its axes and tooltip, and positions where names have no room. One of
    several has its number and the sign of its type as its title.
    """
    statistics = head.statistics
    is_roomy = side // max(g.values.shape) >= ROOMY

    def names(axis: int, tokens: Sequence[str]) -> Sequence[str]:
        if is_roomy or (axis == QUERY and cells.rows is not None):
            return tokens
        return [str(cells.places(axis, cell).start) for cell in range(len(tokens))]

    return replace(
        g,
        title="" if is_single else f"head {statistics.head} {KIND_SIGNS[statistics.kind].sign}",
        rows=names(QUERY, g.rows),
        columns=names(KEY, g.columns),
        corner="query ↓ key →",
        meaning=f"{head.label} · {_of_statistics(statistics)}",
    )


def _layers(heads: Sequence[DrawableHead]) -> dict[InspectedLayer, None]:
    """The layers of heads in order, except one that stands alone."""
    return {head.layer.inspected: None for head in heads if head.layer.label}


def _rows(heads: Sequence[DrawableHead], panels: Sequence[Grid], side: float) -> list[GridRow]:
    """A row per layer, or for a single layer rows as wide as the picture of one head."""
    layers: dict[str, list[Grid]] = {}
    for head, g in zip(heads, panels, strict=True):
        name = head.layer.label + ("" if head.layer.inspected.verified else " !")
        layers.setdefault(name, []).append(g)
    if len(layers) > 1:
        return [GridRow(name, row) for name, row in layers.items()]
    n = int(_SIZES[0].side // side)
    return [GridRow("", panels[start : start + n]) for start in range(0, len(panels), n)]


# ----------------------------------------------------------------------------------------- in words


def _texts(heads: Sequence[DrawableHead], sequence: int, options: ViewOptions) -> Iterator[str]:
    """A line for each text that is read: `5 tokens: “the cat …”`."""
    for text in dict.fromkeys(
        texts[sequence] for head in heads for texts in (head.record.sequences, head.record.keys)
    ):
        size = count_of(len(text.tokens), "token")
        if options.words:
            size = count_of(len(text.words), "word")
        words = visible(" ".join(text.text.split()))
        yield fitted(f"{size}: “{words}”", _WIDEST) if words else size


def _of_statistics(statistics: HeadStatistics) -> str:
    """The type and the entropy of a head."""
    name, entropy = type_text(statistics), statistics.entropy
    return name if entropy is None else f"{name} · entropy {shown(entropy, 'nats')} nats"


def _notes(
    record: Record, heads: Sequence[DrawableHead], whole: Sequence[HeadMap], options: ViewOptions
) -> Iterator[str]:
    """What was not learned, merged, hidden, left out or not verified."""
    if record.words_of_random:
        yield record.words_of_random
    if record.scan is not None:
        yield (
            f"patterns of one document, {visible(record.scan.example_named)}; types and"
            f" statistics are means over {count_of(record.scan.n_documents, 'document')}"
        )
    if options.words:
        yield WORDS_CAPTION
    if options.hide_sinks:
        most = max(cells.sink_mass + (cells.learned_mass or 0.0) for cells in whole)
        if most:
            yield (
                f"sinks are taken out, at most {shown(most, 'weight', options.precision)} of a"
                " head's attention; the rest of each row is renormalised"
            )
        else:
            yield "no sink, so nothing is taken out"
    for layer in _layers(heads):
        if not layer.verified:
            yield f"! {layer.label}: NOT verified: {visible('; '.join(layer.unverified))}"
    yield from missing_notes(record, options)
