"""Heads as pictures: one head with its tokens and numbers, or many on one scale, a row per layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mhacli.errors import MhaError, UsageError
from mhacli.record.heads import HeadStatistics, words_of_type
from mhacli.record.record import Record
from mhacli.render.base.cells import scale_words
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.doc import Grid
from mhacli.render.base.format import count_of, fitted, type_text
from mhacli.render.base.options import Scale, ViewOptions, chosen
from mhacli.render.base.selection import first_produced, names_of, rows_in
from mhacli.render.checkpoint.patterns import merge_words, words_with
from mhacli.render.figures.grids import grids, legend
from mhacli.render.figures.svg import Sheet
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, missing_notes, scale_of
from mhacli.render.heads.grids import grid_of
from mhacli.render.heads.head_map import HeadMap, head_map, kv_head_of, largest_of_maps
from mhacli.text.escape import visible
from mhacli.text.numbers import shown

_SIZES = ((1, 720.0, 512), (16, 168.0, 128), (160, 84.0, 64), (1 << 30, 48.0, 32))
"""By number of heads: the size of each map, and its most cells per side."""
_ACROSS, _MANY, _ACROSS_MANY = 4, 12, 8
"""The heads of one layer in a row, and in a row of more than so many."""
_NAMED = 75
"""The most rows and columns with the names of tokens; more have positions."""
_WIDEST = 80
"""The most characters of a text that are shown."""
_KEEP = "--keep pattern keeps them, --keep-limit makes room"


@dataclass(frozen=True)
class _Picture:
    """A head to draw: its `whole` map, and the map `shown`, without sinks if they are hidden."""

    head: DrawableHead
    label: str
    whole: HeadMap
    shown: HeadMap


def heads_figure(record: Record, options: ViewOptions, kind: str) -> Sheet:
    """The picture of the chosen heads on one scale. Raises `UsageError` for a picture of one `head` if several are chosen, and
    `MhaError` if the record has none of their patterns."""
    heads = drawable_heads(record, options)
    if not heads or (options.words and any("pattern" not in head.record.arrays for head in heads)):
        what = "words" if options.words else "heads"
        raise MhaError(f"the {what} cannot be drawn: the record does not have their patterns", hint=_KEEP)
    if kind == "head" and len(heads) > 1:
        hint = "try --layer 0 --head 0" if record.model is not None and options.layers is None else "try --head 0"
        raise UsageError(f"--figure head draws one head, and {len(heads)} are chosen", hint=hint)
    sequences = chosen(options.sequences, len(record.sequences), 1, False, "sequence").shown
    if options.sequences is not None and len(sequences) > 1:
        raise UsageError(f"a picture shows one sequence, and --sequence names {', '.join(map(str, sequences))}")
    side, most = next(sizes[1:] for sizes in _SIZES if len(heads) <= sizes[0])
    pictures = [_picture(head, sequences[0], options, most) for head in heads]
    top, scale = largest_of_maps(picture.shown for picture in pictures), scale_of(options, heads)
    of_heads = [_grid(picture, options, scale, top=top, is_single=len(heads) == 1) for picture in pictures]
    return Sheet(
        title=_title(pictures),
        about=[*_texts(pictures, options), *_types([head.statistics for head in heads if head.statistics is not None])],
        body=[grids([*_rows(pictures, of_heads)], side), legend(of_heads, "attention weight")],
        caption=[*_notes(record, pictures, options)],
        scale=scale_words(of_heads),
        drawn=[picture.label for picture in pictures],
    )


# --------------------------------------------------------------------------------------------------------- what is drawn


def _picture(head: DrawableHead, sequence: int, options: ViewOptions, most: int) -> _Picture:
    """A head with its map in at most `most` cells per side. Raises `UsageError` for rows of a head stored in blocks."""
    label = f"{head.label} · sequence {sequence}" if len(head.record.sequences) > 1 else head.label
    rows, text = None, head.record.sequences[sequence]
    if options.rows is not None:
        generated = None if head.record.model is None else head.record.model.generated
        produced = None if head.layer is None else first_produced(head.layer.kind, generated, sequence)
        rows = rows_in(options.rows, text, produced)
        if not rows:
            raise UsageError(f"--from names no query of {head.label}")
    if options.words:
        head = replace(head, record=merge_words(head.record), statistics=_sinks_in_words(head))
        rows = None if rows is None else words_with(text, rows)
    finest = head_map(head, sequence)
    if rows is None:
        whole = finest.fitting(most, most)
    elif finest.block == 1:
        whole = finest.of_rows(rows, -(-finest.weights.shape[1] // most))
    else:
        of_blocks = f"{finest.block} × {finest.block} tokens a cell"
        raise UsageError(f"--from needs whole patterns, and the record has a map of {of_blocks}", hint=_KEEP)
    return _Picture(head, label, whole, whole.without_sinks() if options.hide_sinks else whole)


def _sinks_in_words(head: DrawableHead) -> HeadStatistics | None:
    """The statistics with the words that contain a sink in place of the sinks."""
    if head.statistics is None:
        return None
    sinks = []
    for sink in head.statistics.sink_keys:
        words = head.record.keys[sink.sequence].words
        sinks += [replace(sink, key=place) for place, word in enumerate(words) if sink.key in word]
    return replace(head.statistics, sinks=tuple(sinks))


def _grid(picture: _Picture, options: ViewOptions, scale: Scale, *, top: float, is_single: bool) -> Grid:
    """The map of a head. One of several has its number and the sign of its type as its title."""
    shown, statistics = picture.shown, picture.head.statistics
    sign = "" if statistics is None else KIND_SIGNS[statistics.kind][0]
    title = "" if is_single else f"head {picture.head.head} {sign}"
    of = grid_of(shown, title, scale=scale, top=top, digits=options.precision)
    if len(of.rows) > _NAMED:
        of = replace(of, rows=[str(shown.query_places(row)[0]) for row in range(len(of.rows))])
    if len(of.columns) > _NAMED:
        of = replace(of, columns=[str(shown.key_places(key)[0]) for key in range(len(of.columns))])
    if shown.taken is not None and shown.block == 1:
        is_sink = np.isin(range(len(of.columns)), shown.sinks)
        of = replace(of, taken=picture.whole.is_open & is_sink)
    meaning = picture.label if statistics is None else f"{picture.label} · {_of_statistics(statistics)}"
    return replace(of, corner="query ↓ key →", meaning=meaning)


def _rows(pictures: Sequence[_Picture], of_heads: Sequence[Grid]) -> Iterator[tuple[str, Sequence[Grid]]]:
    """A row per layer, or several rows for a single layer."""
    layers: dict[str, list[Grid]] = {}
    for picture, of in zip(pictures, of_heads, strict=True):
        layer = picture.head.layer
        name = "" if layer is None else layer.label + ("" if layer.verified else " !")
        layers.setdefault(name, []).append(of)
    if len(layers) > 1:
        yield from layers.items()
        return
    across = _ACROSS if len(of_heads) <= _MANY else _ACROSS_MANY
    for start in range(0, len(of_heads), across):
        yield "", of_heads[start : start + across]


# -------------------------------------------------------------------------------------------------------------- in words


def _title(pictures: Sequence[_Picture]) -> str:
    """The name of a single head, or the layers and the number of heads."""
    heads = [picture.head for picture in pictures]
    if len(heads) == 1:
        return pictures[0].label + kv_head_of(heads[0].record, heads[0].head)
    layers = [*dict.fromkeys(head.layer for head in heads if head.layer is not None)]
    _, _, sequence = pictures[0].label.partition(" · sequence ")
    parts = [names_of(layers), count_of(len(heads), "head"), f"sequence {sequence}" if sequence else ""]
    return " · ".join(filter(None, parts))


def _texts(pictures: Sequence[_Picture], options: ViewOptions) -> Iterator[str]:
    """A line for each text that is read: `5 tokens: “the cat …”`."""
    read = [text for picture in pictures for text in (picture.shown.queries, picture.shown.keys)]
    for text in (text for place, text in enumerate(read) if text not in read[:place]):
        n_tokens = count_of(len(text.tokens), "word" if options.words else "token")
        words = visible(" ".join(text.text.split()))
        yield fitted(f"{n_tokens}: “{words}”", _WIDEST) if words else n_tokens


def _types(found: Sequence[HeadStatistics]) -> Iterator[str]:
    """The types of heads with their signs, and the number of heads of each."""
    if len(found) == 1:
        yield f"{KIND_SIGNS[found[0].kind][0]} {_of_statistics(found[0])}"
    elif found:
        kinds = [statistics.kind for statistics in found]
        signs = ((sign, kind) for kind, (sign, _) in KIND_SIGNS.items() if kind in kinds)
        yield " · ".join(f"{sign} {words_of_type(kind).name} {kinds.count(kind)}" for sign, kind in signs)


def _of_statistics(statistics: HeadStatistics) -> str:
    """The type and the entropy of a head."""
    name, entropy = type_text(statistics), statistics.entropy
    return name if entropy is None else f"{name} · entropy {shown(entropy, 'short')} nats"


def _notes(record: Record, pictures: Sequence[_Picture], options: ViewOptions) -> Iterator[str]:
    """What a cell is, and what was pooled, hidden, left out or not verified."""
    block, rows = max(picture.shown.block for picture in pictures), pictures[0].shown.rows
    queries = "a query (row) gives" if block == 1 or rows is not None else f"{block} queries (a row) give on average"
    keys = "a key (column)" if block == 1 else f"{block} keys (a column) together"
    yield f"each cell: the attention weight that {queries} to {keys}"
    if record.corpus is not None:
        of = count_of(record.corpus.n_documents, "document")
        yield f"patterns of one document, {visible(record.corpus.example_named)}; types and statistics are means over {of}"
    if options.words:
        yield "words: weights are summed over the tokens of a key, averaged over those of a query; statistics are of tokens"
    if options.hide_sinks:
        most = max(cells.sink_mass + (cells.learned_mass or 0.0) for cells in (picture.whole for picture in pictures))
        taken = f"sinks are taken out, at most {shown(most, 'weight', options.precision)} of a head's attention"
        yield f"{taken}; the rest of each row is renormalised" if most else "no sink, so nothing is taken out"
    for layer in dict.fromkeys(picture.head.layer for picture in pictures):
        if layer is not None and not layer.verified:
            yield f"! {layer.label}: NOT verified: {visible('; '.join(layer.unverified))}"
    yield from missing_notes(record, options)
