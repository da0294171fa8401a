"""Selects heads of a record and layers of a checkpoint, and names them; and the heads that can be
drawn, with their scale. Needs no numpy, so that the viewer starts quickly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from mhacli.errors import UsageError, out_of_range
from mhacli.record.exports import MEAN_OF_HEADS
from mhacli.record.heads import HeadsSummary, HeadStatistics
from mhacli.record.record import InspectedLayer, LayerView, Record, texts_of
from mhacli.settings import ALL_LAYERS, LAST_LAYER, AttentionKind, LayerChoice, LayerChoices
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence

from .format import plural
from .options import Rows, Scale, ViewOptions, sequences_to_draw

T = TypeVar("T")
K = TypeVar("K")


def places_of(record: Record, heads: Sequence[int]) -> list[int]:
    """The indices of heads on the head axis of arrays. Raises `UsageError` for a head that the
    record lacks.
    """
    heads_of_record = [head.head for head in record.heads]
    for head in heads:
        if head not in heads_of_record:
            raise UsageError(
                f"--head {head} is not in the record, which has the heads {ranges(heads_of_record)}"
            )
    return [heads_of_record.index(head) for head in heads]


def chosen_layers(record: Record, options: ViewOptions) -> tuple[LayerView, ...]:
    """The requested layers of a checkpoint, or all, in the record's order; none of a layer of mha.
    Raises `UsageError` for a layer that the record lacks.
    """
    chosen = options.layers
    if chosen is not None:
        chosen = tuple(choice for each in chosen for choice in _resolved(each, record.layers))
    for kind, number in chosen or ():
        if not any(is_among(layer, ((kind, number),)) for layer in record.layers):
            word = {ALL_LAYERS: "", LAST_LAYER: "last"}.get(number, str(number))
            name = ".".join(filter(None, (kind, word)))
            raise UsageError(
                f"--layer {name} is not in the record, which has {names_of(record.layers)}"
            )
    views = record.attentions if record.layers else ()
    return tuple(view for view in views if is_among(view.inspected, chosen))


def _resolved(choice: LayerChoice, layers: Sequence[InspectedLayer]) -> list[LayerChoice]:
    """A choice with the numbers of layers for all or the last of each kind."""
    kind, number = choice
    numbers = dict[AttentionKind, list[int]]()
    for layer in layers:
        if kind in (None, layer.kind):
            numbers.setdefault(layer.kind, []).append(layer.layer)
    if number >= 0 or not numbers:  # no layer of this kind is refused by its name
        return [choice]
    if number == LAST_LAYER:
        return [(kind, max(of_kind)) for kind, of_kind in numbers.items()]
    return [(kind, n) for kind, of_kind in numbers.items() for n in of_kind]


def is_among(layer: InspectedLayer, choices: LayerChoices) -> bool:
    """Whether a layer is among those that a user chose (None: all)."""
    return choices is None or any(
        number == layer.layer and kind in (None, layer.kind) for kind, number in choices
    )


def require_inspected_heads(layers: Sequence[LayerView], heads: Iterable[int]) -> None:
    """Raises `UsageError` for a head that none of the layers has."""
    inspected = sorted({head.head for layer in layers for head in layer.record.heads})
    for head in heads:
        if head not in inspected:
            where = names_of([layer.inspected for layer in layers])
            raise UsageError(
                f"head {head} is not in {where} of the record, with the heads {ranges(inspected)}"
            )


def chosen_heads(record: Record, options: ViewOptions) -> tuple[HeadStatistics, ...]:
    """The requested heads of the requested layers, or all. Raises `UsageError` for a layer or a
    head that the record of a checkpoint lacks; a layer of mha has no layers to choose.
    """
    layers = record.attentions
    if record.layers:
        layers = chosen_layers(record, options)
        require_inspected_heads(layers, options.heads or ())
    heads = (head for layer in layers for head in layer.record.heads)
    return tuple(head for head in heads if options.shows_head(head.head))


def survey_of(record: Record) -> HeadsSummary:
    """The summary of head statistics; of several layers, the one with the largest distances."""
    return max((each.inspected.survey for each in record.attentions), key=lambda each: each.steps)


def names_of(layers: Sequence[InspectedLayer]) -> str:
    """Layers by kind and number.

    `layers 0–2, 5`, or in an encoder-decoder model `encoder 0–2, cross 1`.
    """
    kinds = list(dict.fromkeys(layer.kind for layer in layers))
    if kinds == ["self"]:
        return f"{plural(len(layers), 'layer')} {ranges([layer.layer for layer in layers])}"
    return ", ".join(
        f"{kind} {ranges([layer.layer for layer in layers if layer.kind == kind])}"
        for kind in kinds
    )


def ranges(numbers: Iterable[int]) -> str:
    """Numbers with consecutive ones merged.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7, 8'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def by_layers(
    layers: Sequence[InspectedLayer], describe: Callable[[InspectedLayer], str]
) -> list[str]:
    """Each distinct text about layers, with its layers unless it applies to all."""
    layers_of = grouped(layers, describe)
    if len(layers_of) == 1:
        return [word for word in layers_of if word]
    return [f"{word} ({names_of(named)})" for word, named in layers_of.items() if word]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items that have each key, in the order of the first ones."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


# --------------------------------------------------------------------------------------- query rows


def require_rows(
    options: ViewOptions,
    kinds: Iterable[AttentionKind],
    sequences: tuple[TokenSequence, ...],
    context: tuple[TokenSequence, ...] | None,
) -> None:
    """Raises `UsageError` for a position, or with merged words for a number of a word, that no text
    of queries in layers of these kinds has, and for a sequence out of range.
    """
    if not isinstance(options.rows, tuple):
        return
    shown = sequences_to_draw(options, len(sequences)).shown
    texts = [texts_of(kind, sequences, context)[0][b] for kind in kinds for b in shown]
    lengths = (len(text.words if options.words else text.tokens) for text in texts)
    longest = max(lengths, default=0)
    last = max(options.rows, default=0)
    if longest and last >= longest:
        raise UsageError(out_of_range("--from", last, longest))


def require_generated(rows: Rows | None, *, is_generated: bool) -> None:
    """Raises `UsageError` for generated rows without generated tokens."""
    if rows == "generated" and not is_generated:
        raise UsageError(
            "--from generated needs tokens that the model generated", hint="add --generate N"
        )


# -------------------------------------------------------------------------- heads that can be drawn

_SHORT = 64
"""The most keys for which a uniform attention weight is visible on a linear scale."""


@dataclass(frozen=True)
class DrawableHead:
    """A head that can be drawn: the attention that has it, and its index on the head axis."""

    layer: LayerView
    place: int

    @property
    def record(self) -> Record:
        """The record of its layer."""
        return self.layer.record

    @property
    def statistics(self) -> HeadStatistics:
        """Its statistics, with its number."""
        return self.record.heads[self.place]

    @property
    def label(self) -> str:
        """`layer 3 · head 5`, or `head 5`."""
        number = self.statistics.head
        name = "mean of all heads" if number == MEAN_OF_HEADS else f"head {number}"
        return " · ".join(filter(None, (self.layer.label, name)))


def drawable_heads(record: Record, options: ViewOptions) -> tuple[DrawableHead, ...]:
    """The heads chosen by the options, or all, whose pattern or map is in the record, in the order
    of execution.

    Raises `UsageError` for a head or layer that the record lacks.
    """
    if record.model is None:
        (layer,) = record.attentions
        heads = [head.head for head in record.heads] if options.heads is None else options.heads
        places = places_of(record, heads)
        return tuple(DrawableHead(layer, place) for place in places if layer.is_drawable)
    layers = chosen_layers(record, options)
    require_inspected_heads(layers, options.heads or ())
    return tuple(
        DrawableHead(layer, place)
        for layer in layers
        for place, head in enumerate(layer.record.heads)
        if options.shows_head(head.head) and layer.is_drawable
    )


def missing_notes(record: Record, options: ViewOptions) -> Iterator[str]:
    """What pictures of a record's heads leave out."""
    if record.config.train:
        p = record.config.dropout
        yield (
            f"the pattern is drawn before dropout ({p:g}); the layer's output was computed after"
            " dropout"
        )
    if record.dims.padded:
        yield "padding gets no attention and is left out"
    if record.model is None:
        return
    without = [layer.inspected for layer in chosen_layers(record, options) if not layer.is_drawable]
    if without:
        yield (
            f"not drawn, because the record has neither pattern nor map: {names_of(without)};"
            " --keep-limit makes room"
        )
    if options.layers is None:
        for kind, layers in grouped(record.model.without, attrgetter("type")).items():
            numbers = ranges(layer.layer for layer in layers)
            yield (
                f"without an attention matrix: {plural(len(layers), 'layer')} {numbers},"
                f" {visible(kind)}"
            )


def scale_of(options: ViewOptions, heads: Sequence[DrawableHead]) -> Scale:
    """The requested scale, or the usual one for all keys of some heads."""
    return options.map_scale or usual_scale(
        keys.tokens for head in heads for keys in head.record.keys
    )


def usual_scale(texts: Iterable[Sequence[str]]) -> Scale:
    """The scale of cells over these keys: linear for short texts, and log for long ones."""
    return "linear" if all(len(keys) <= _SHORT for keys in texts) else "log"
