"""The heads of a record and the layers of a checkpoint's: which are chosen, where they stand, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhacli.errors import UsageError, out_of_range
from mhacli.render.base.options import Rows, ViewOptions, drawn_sequences
from mhacli.results.record.head_statistics import HeadStatistics
from mhacli.results.record.record import Generated, Record, texts_of
from mhacli.spec.tokens import AttentionKind, TokenSequence

if TYPE_CHECKING:  # loaded where a record has them
    from mhacli.results.record.head_statistics import HeadsSummary
    from mhacli.results.record.record import InspectedLayer


@dataclass(frozen=True)
class LayerView:
    """One inspected layer of a checkpoint, and its own record."""

    inspected: InspectedLayer
    record: Record

    @property
    def has_pattern(self) -> bool:
        """Whether its matrices were kept."""
        return "pattern" in self.record.arrays

    @property
    def is_drawable(self) -> bool:
        """Whether its matrices were kept, or sums of their blocks."""
        return self.has_pattern or "map" in self.record.arrays


def places_of(record: Record, heads: Sequence[int]) -> list[int]:
    """Where heads stand on the head axis of the arrays. Raises `UsageError` for one that the record does not have."""
    known = [head.head for head in record.heads]
    for head in heads:
        if head not in known:
            raise UsageError(f"head {head} is not in the record, which has the heads {listed_numbers(known)}")
    return [known.index(head) for head in heads]


def listed_numbers(heads: Sequence[int]) -> str:
    """Heads as an error names them: `0 to 3`, or `1, 3`."""
    whole = list(heads) == list(range(heads[0], heads[-1] + 1))
    return f"{heads[0]} to {heads[-1]}" if whole and len(heads) > 2 else ", ".join(map(str, heads))


def chosen_layers(record: Record, options: ViewOptions) -> tuple[LayerView, ...]:
    """The layers that were asked for, or all, in the order of the record. Raises `UsageError` for one that it does not have."""
    wanted = [*range(len(record.layers))]
    if options.layers is not None:
        indices = set()
        for kind, number in options.layers:
            matching = [i for i in wanted if record.layers[i].layer == number and kind in (None, record.layers[i].kind)]
            if not matching:
                name = f"{kind}.{number}" if kind is not None else number
                raise UsageError(f"--layer {name} is not in the record, which has {names_of(record.layers)}")
            indices |= {*matching}
        wanted = sorted(indices)
    return tuple(LayerView(record.layers[i], record.of_layer(i)) for i in wanted)


def require_inspected_heads(layers: Sequence[LayerView], heads: Iterable[int]) -> None:
    """Raises `UsageError` for a head that none of the layers has."""
    known = sorted({head.head for layer in layers for head in layer.record.heads})
    for head in heads:
        if head not in known:
            where = names_of([layer.inspected for layer in layers])
            raise UsageError(f"head {head} is not in {where} of the record, with the heads {listed_numbers(known)}")


def chosen_heads(layers: Sequence[LayerView], options: ViewOptions) -> tuple[HeadStatistics, ...]:
    """The heads of the layers that were asked for, or all."""
    require_inspected_heads(layers, options.heads or ())
    heads = (head for layer in layers for head in layer.record.heads)
    return tuple(head for head in heads if options.heads is None or head.head in options.heads)


def survey_of(record: Record) -> HeadsSummary:
    """How heads were looked at; of several layers, that which saw the largest distances. Raises `UsageError` for none."""
    surveys = [record.survey] if record.survey is not None else [layer.survey for layer in record.layers]
    if not surveys:
        raise UsageError("the record is not one of mha heads")
    return max(surveys, key=lambda survey: survey.steps[-1])


def names_of(layers: Sequence[InspectedLayer]) -> str:
    """Layers by kind and number.

    `layers 0–2, 5`, or of a pair `encoder 0–2, cross 1`.
    """
    kinds = list(dict.fromkeys(layer.kind for layer in layers))
    if kinds == ["self"]:
        return f"layer{'s' * (len(layers) > 1)} {ranges([layer.layer for layer in layers])}"
    return ", ".join(f"{kind} {ranges([layer.layer for layer in layers if layer.kind == kind])}" for kind in kinds)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers with neighbours put together.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7, 8'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [[f"{run[0]}–{run[-1]}"] if len(run) > 2 else list(map(str, run)) for run in runs]
    return ", ".join(part for run in parts for part in run)


def by_layers(layers: Sequence[InspectedLayer], tell: Callable[[InspectedLayer], str]) -> list[str]:
    """What is said of layers, each thing once, with the layers of which it is true where it is not true of all."""
    layers_of: dict[str, list[InspectedLayer]] = {}
    for layer in layers:
        layers_of.setdefault(tell(layer), []).append(layer)
    if len(layers_of) == 1:
        return [word for word in layers_of if word]
    return [f"{word} ({_names_within(named, layers)})" for word, named in layers_of.items() if word]


def _names_within(own: Sequence[InspectedLayer], layers: Sequence[InspectedLayer]) -> str:
    """As `names_of`, but a kind of which all layers are meant goes without their numbers."""
    parts = []
    for kind in dict.fromkeys(layer.kind for layer in own):
        same = [layer for layer in own if layer.kind == kind]
        is_whole = kind != "self" and len(same) == sum(layer.kind == kind for layer in layers)
        parts.append(kind if is_whole else names_of(same))
    return ", ".join(parts)


def short_name(layer: InspectedLayer, layers: Sequence[InspectedLayer]) -> str:
    """The number of a layer, with its kind where there are several: `5`, `cross 5`; and which call, if not the first."""
    name = str(layer.layer) if len({other.kind for other in layers}) == 1 else f"{layer.kind} {layer.layer}"
    return name if layer.call == 1 else f"{name} call {layer.call}"


# ----------------------------------------------------------------------------------------------- queries that are drawn


def first_produced(kind: AttentionKind, made: Generated | None, sequence: int) -> int | None:
    """The first query of which the model made the token that follows it: the last of the prompt. An encoder has none."""
    return None if made is None or kind == "encoder" else made.prompt_lens[sequence] - 1


def rows_in(rows: Rows, text: TokenSequence, produced: int | None) -> tuple[int, ...]:
    """The places of a text that are asked for, those of them that it has; the model made the token after `produced`."""
    n = len(text.tokens)
    if rows == "last":
        return (n - 1,)
    if rows == "generated":
        return () if produced is None else tuple(range(produced, n - 1))
    return tuple(row for row in dict.fromkeys(rows) if isinstance(row, int) and 0 <= row < n)


def drawn_texts(
    kinds: Iterable[AttentionKind],
    sequences: tuple[TokenSequence, ...],
    context: tuple[TokenSequence, ...] | None,
    options: ViewOptions,
) -> Iterator[TokenSequence]:
    """The texts whose tokens are the queries of layers of these kinds, those of the sequences that are drawn. Raises `UsageError`
    for a sequence that does not exist."""
    shown = drawn_sequences(options, len(sequences)).shown
    for kind in dict.fromkeys(kinds):
        queries, _ = texts_of(kind, sequences, context)
        yield from (queries[b] for b in shown)


def require_rows(rows: Rows | None, texts: Iterable[TokenSequence]) -> None:
    """Raises `UsageError` for a place that none of the texts has."""
    longest = max((len(text.tokens) for text in texts), default=0)
    if isinstance(rows, tuple) and longest and max(rows, default=0) >= longest:
        raise UsageError(out_of_range("--from", max(rows), longest))


def require_generated(rows: Rows | None, *, is_generated: bool) -> None:
    """Raises `UsageError` for rows of generated tokens where there are none."""
    if rows == "generated" and not is_generated:
        raise UsageError("--from generated needs tokens that the model generated", hint="add --generate N")
