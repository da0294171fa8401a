"""Heads as pictures: one head with its tokens and numbers, or many on one scale, a row per
layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mhacli.errors import MhaError, UsageError
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
from mhacli.render.figures.grids import grids, legend
from mhacli.render.figures.svg import document
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
from mhacli.text.numbers import shown

_SIZES = ((1, 720.0, 512), (16, 168.0, 128), (160, 84.0, 64), (1 << 30, 48.0, 32))
"""By number of heads: the size of each map, and its most cells per side."""
_NAMED = 75
"""The most rows and columns with the names of tokens; more have positions."""
_WIDEST = 80
"""The most characters of a text that are shown."""
_KEEP = "--keep pattern keeps them, --keep-limit makes room"


def heads_figure(
    record: Record, options: ViewOptions, kind: str, metadata: Mapping[str, object]
) -> str:
    """The picture of the chosen heads on one scale. Raises `UsageError` for a picture of one `head`
    if several are chosen, and `MhaError` if the record has none of their patterns.
    """
    heads = drawable_heads(record, options)
    if not heads or (options.words and any("pattern" not in head.record.arrays for head in heads)):
        what = "words" if options.words else "heads"
        raise MhaError(
            f"the {what} cannot be drawn: the record does not have their patterns", hint=_KEEP
        )
    if kind == "head" and len(heads) > 1:
        hint = (
            "try --layer 0 --head 0"
            if record.model is not None and options.layers is None
            else "try --head 0"
        )
        raise UsageError(f"--figure head draws one head, and {len(heads)} are chosen", hint=hint)
    sequences = chosen(options.sequences, len(record.sequences), 1, False, "sequence").shown
    if options.sequences is not None and len(sequences) > 1:
        raise UsageError(
            f"a picture shows one sequence, and --sequence names {', '.join(map(str, sequences))}"
        )
    side, most = next(sizes[1:] for sizes in _SIZES if len(heads) <= sizes[0])
    whole = [_map(head, sequences[0], options, most) for head in heads]
    maps = [each.without_sinks() for each in whole] if options.hide_sinks else whole
    scale, top = scale_of(options, heads), largest_of_maps(maps)
    of_heads = []
    for head, cells in zip(heads, maps, strict=True):
        of = grid_of(cells, "", scale=scale, top=top, digits=options.precision)
        of_heads.append(_with_words(of, head, cells, is_single=len(heads) == 1))
    types = " · ".join(text.plain for text in types_of([head.statistics for head in heads]))
    if len(heads) == 1:
        types = f"{KIND_SIGNS[heads[0].statistics.kind][0]} {_of_statistics(heads[0].statistics)}"
    block = max(cells.block for cells in maps)
    sequence = f"sequence {sequences[0]}" if len(record.sequences) > 1 else ""
    parts = [heads[0].label, sequence]
    if len(heads) > 1:
        parts = [names_of([*_layers(heads)]), count_of(len(heads), "head"), sequence]
    kv_head = kv_head_of(heads[0].record, heads[0].statistics.head) if len(heads) == 1 else ""
    return document(
        " · ".join(filter(None, parts)) + kv_head,
        [grids([*_rows(heads, of_heads, side)], side), legend(of_heads, "attention weight")],
        metadata,
        about=[*_texts(heads, sequences[0], options), types],
        caption=[
            cell_meaning(block, of_queries=maps[0].rows is not None),
            *_notes(record, heads, whole, options),
        ],
    )


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


def _with_words(of: Grid, head: DrawableHead, cells: HeadMap, *, is_single: bool) -> Grid:
    """The grid of a head with its axes and tooltip, and positions where there are too many names.
    One of several has its number and the sign of its type as its title.
    """
    statistics = head.statistics
    rows, columns = (
        (
            names
            if len(names) <= _NAMED
            else [str(cells.places(axis, cell).start) for cell in range(len(names))]
        )
        for axis, names in ((QUERY, of.rows), (KEY, of.columns))
    )
    title = "" if is_single else f"head {statistics.head} {KIND_SIGNS[statistics.kind][0]}"
    meaning = f"{head.label} · {_of_statistics(statistics)}"
    return replace(
        of, title=title, rows=rows, columns=columns, corner="query ↓ key →", meaning=meaning
    )


def _layers(heads: Sequence[DrawableHead]) -> dict[InspectedLayer, None]:
    """The layers of heads in order."""
    return {head.layer: None for head in heads if head.layer is not None}


def _rows(
    heads: Sequence[DrawableHead], of_heads: Sequence[Grid], side: float
) -> Iterator[tuple[str, Sequence[Grid]]]:
    """A row per layer, or for a single layer rows as wide as the picture of one head."""
    layers: dict[str, list[Grid]] = {}
    for head, of in zip(heads, of_heads, strict=True):
        name = (
            "" if head.layer is None else head.layer.label + ("" if head.layer.verified else " !")
        )
        layers.setdefault(name, []).append(of)
    if len(layers) > 1:
        yield from layers.items()
        return
    across = int(_SIZES[0][1] // side)
    for start in range(0, len(of_heads), across):
        yield "", of_heads[start : start + across]


# ----------------------------------------------------------------------------------------- in words


def _texts(heads: Sequence[DrawableHead], sequence: int, options: ViewOptions) -> Iterator[str]:
    """A line for each text that is read: `5 tokens: “the cat …”`."""
    for text in dict.fromkeys(
        of[sequence] for head in heads for of in (head.record.sequences, head.record.keys)
    ):
        n_tokens = (
            count_of(len(text.words), "word")
            if options.words
            else count_of(len(text.tokens), "token")
        )
        words = visible(" ".join(text.text.split()))
        yield fitted(f"{n_tokens}: “{words}”", _WIDEST) if words else n_tokens


def _of_statistics(statistics: HeadStatistics) -> str:
    """The type and the entropy of a head."""
    name, entropy = type_text(statistics), statistics.entropy
    return name if entropy is None else f"{name} · entropy {shown(entropy, 'nats')} nats"


def _notes(
    record: Record, heads: Sequence[DrawableHead], whole: Sequence[HeadMap], options: ViewOptions
) -> Iterator[str]:
    """What was merged, hidden, left out or not verified."""
    if record.corpus is not None:
        of = count_of(record.corpus.n_documents, "document")
        yield (
            f"patterns of one document, {visible(record.corpus.example_named)}; types and"
            f" statistics are means over {of}"
        )
    if options.words:
        yield WORDS_CAPTION
    if options.hide_sinks:
        most = max(cells.sink_mass + (cells.learned_mass or 0.0) for cells in whole)
        taken = (
            f"sinks are taken out, at most {shown(most, 'weight', options.precision)} of a head's"
            " attention"
        )
        yield (
            f"{taken}; the rest of each row is renormalised"
            if most
            else "no sink, so nothing is taken out"
        )
    for layer in _layers(heads):
        if not layer.verified:
            yield f"! {layer.label}: NOT verified: {visible('; '.join(layer.unverified))}"
    yield from missing_notes(record, options)
