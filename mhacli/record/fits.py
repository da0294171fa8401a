"""Whether the parts of a record from a file fit together, so that all who read it can rely on that;
and the axes of its arrays.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from mhacli.errors import bad_file
from mhacli.io.data import under
from mhacli.record.sites import SITES, Dims
from mhacli.settings import MAX_LENGTH

from .exports import MEAN_OF_HEADS
from .heads import FOR_ALL_HEADS, Corner, HeadStatistics
from .record import LayerView, Record, layer_prefix

Axes = tuple[str, ...]
_OF_QUERIES = ("batch", "head", "query")
_OF_KEYS = ("batch", "head", "key")
_OF_STEPS = ("batch", "head", "step")
_OF_SPANS = ("batch", "head", "span", "spans")
_OF_BLOCKS = ("batch", "head", "query block", "key block")
OF_MASK: Mapping[str, Axes] = {
    "visible": _OF_QUERIES,
    "uniform_map": _OF_BLOCKS,
    "uniform_received": _OF_KEYS,
    "uniform_profile": _OF_STEPS,
    "uniform_span_mass": _OF_SPANS,
    "allowed": ("batch", "head", "query", "key"),
}
"""The arrays of a record that follow from its mask, with their axes."""
OF_STATISTICS: Mapping[str, Axes] = {
    "max_score": _OF_QUERIES,
    "lse": _OF_QUERIES,
    "corner": ("batch", "head", "corner query", "corner key"),
    "top_shares": ("batch", "head", "asked query", "rank"),
    "map": _OF_BLOCKS,
    "received": _OF_KEYS,
    "profile": _OF_STEPS,
    "span_mass": _OF_SPANS,
    "sink": _OF_QUERIES,
    "distance": _OF_QUERIES,
    "participation": _OF_QUERIES,
    "entropy": _OF_QUERIES,
}
"""The arrays that are statistics, with their axes: of scores the first two, of patterns the
others."""
_PLACES = {"strongest_key": _OF_QUERIES, "top_keys": OF_STATISTICS["top_shares"]}
_KINDS = {"allowed": "B", "visible": "I", "ids": "I"} | dict.fromkeys(_PLACES, "I")
"""The first letters of dtypes in files. Other arrays are of real numbers."""
_MEASURED = "map uniform_map received uniform_received profile uniform_profile visible sink entropy"
_TOGETHER = {
    **dict.fromkeys(("scores", "qk", "dropped"), "allowed"),
    **dict.fromkeys(("map", "received", "profile", "visible"), _MEASURED),
    "pattern": "allowed strongest_key",
    "span_mass": "uniform_span_mass",
    "top_keys": "top_shares",
    "corner": "visible",
}
"""The arrays that must be there with an array."""
_EQUAL = {
    "context": "sequences",
    "sequences.*.ids": "sequences.*.tokens",
    "sequences.*.offsets": "sequences.*.tokens",
    "context.*.ids": "context.*.tokens",
    "context.*.offsets": "context.*.tokens",
    "spans.*.tokens": "sequences",
    "trace.*.axes": "trace.*.shape",
    "trace.*.cache.tokens": "sequences",
    "cell.k": "cell.q",
    "cell.v": "cell.z",
    "cell.scores_row": "cell.pattern_row",
}
"""Lists that are as long as others."""
_EQUAL_IF_ANY = {
    **{
        f"{family}.*.{name}": f"{family}.*.tokens"
        for family in ("sequences", "context")
        for name in ("documents", "pieces", "token_type_ids")
    },
    "effects.*.kinds": "effects.*.heads",
    "corpus.heads": "heads",  # the example of a scan has none yet
}
"""Lists that are empty or as long as others."""
_SOME = range(1, MAX_LENGTH)
_Parts = Iterator[tuple[str, Any, Container[Any]]]
"""Lengths and indices of a record with their places, and what fits the rest of the record."""


def require_fit(record: Record, tensors: Mapping[str, Any], path: str) -> None:
    """Raises `MhaError` with the first part of a record that contradicts the others. `tensors`
    describe its arrays, of which none is read.
    """
    for parts in (_lengths, _layers, _steps):
        for place, found, fitting in parts(record, tensors):
            if found not in fitting:
                raise bad_file(
                    path, f"{path}: {place} is {found}, which contradicts the rest of the record"
                )


def axes_of(name: str, dims: Dims) -> Axes:
    """The axes of an array of a record by its name; none for one that is not known."""
    known = {**OF_MASK, **OF_STATISTICS, **_PLACES}.get(name)
    return known or (SITES[name].axes_for(dims) if name in SITES else ())


# -------------------------------------------------------------------------------------------- parts


def _lengths(record: Record, _: Mapping[str, Any]) -> _Parts:
    """The lists of a record, of which texts and tokens must be some."""
    yield "the number of sequences", len(record.sequences), _SOME
    for name, other in {**_EQUAL, **_EQUAL_IF_ANY}.items():
        lengths = {at: len(each) for at, each in _values(record, other.split("."))}
        empty = [0] if name in _EQUAL_IF_ANY else []
        for at, each in _values(record, name.split(".")):
            place = name.replace(".*", "[{}]").format(*at)
            yield f"the length of {place}", len(each), [lengths[at[: other.count("*")]], *empty]
    for text in (*record.sequences, *record.keys):
        yield "the number of tokens of sequences or context", len(text.tokens), _SOME
        for begin, end in text.offsets:
            yield "an end in offsets of sequences or context", end, range(begin, len(text.text) + 1)
    for layer in record.layers:
        for size in layer.positions or ():
            yield "a number in positions of layers", size or 1, range(1, 1 << 24)


def _values(value: Any, path: Sequence[str], at: tuple[int, ...] = ()) -> Iterator[Any]:
    """The values at a place in a record, where * stands for every index, after these indices."""
    if value is not None and path:
        name, *rest = path
        if name != "*":
            yield from _values(getattr(value, name), rest, at)
        else:
            for i, each in enumerate(value):
                yield from _values(each, rest, (*at, i))
    elif value is not None:
        yield at, value


def _layers(record: Record, tensors: Mapping[str, Any]) -> _Parts:
    """The arrays and heads of its attentions."""
    for i, view in enumerate(record.attentions):
        prefix = layer_prefix(i) if record.layers else ""
        yield f"{prefix}survey.block", view.inspected.survey.block, _SOME
        yield from _arrays(view, prefix, under(tensors, prefix))
        numbers = [head.head for head in view.record.heads]
        yield f"the number of heads of {prefix} with equal numbers", len(numbers), [len({*numbers})]
        for head in view.record.heads:
            yield from _of_head(f"heads ({prefix}{head.head})", view, head)
    n_found = sum(len(view.record.heads) for view in record.attentions)
    yield "the number of heads of all layers", n_found, [len(record.heads)]


def _arrays(view: LayerView, prefix: str, tensors: Mapping[str, Any]) -> _Parts:
    record, survey, dims = view.record, view.inspected.survey, view.record.dims
    corner = survey.kept.corner or Corner(0, 0, 0, 0)
    sizes = {
        "head": len(record.heads) if record.survey else record.config.n_heads,
        "step": len(survey.steps),
        **dict.fromkeys(("span", "spans"), len(record.spans)),
        "query block": -(-dims.q_len // survey.block),
        "key block": -(-dims.k_len // survey.block),
        "corner query": corner.n_queries,
        "corner key": corner.n_keys,
        "asked query": len(survey.kept.queries),
        "rank": min(survey.kept.top, dims.k_len),
    }
    for name, tensor in tensors.items():
        axes = axes_of(name, dims)
        shape = [sizes[axis] if axis in sizes else dims.size(axis) for axis in axes]
        for other in _TOGETHER.get(name, "").split():
            is_there = "there" if other in tensors else "missing"
            yield f"the array {prefix}{other}", is_there, ["there"]
        if axes:
            shapes = [(*shape,)]
            if name in FOR_ALL_HEADS:
                shapes.append((shape[0], 1, *shape[2:]))
            yield f"the shape of {prefix}{name}", tensor.shape, shapes
            kinds = [f"{_KINDS.get(name, 'F')}{tensor.dtype[1:]}"]
            yield f"the dtype of {prefix}{name}", tensor.dtype, kinds


def _of_head(place: str, view: LayerView, head: HeadStatistics) -> _Parts:
    yield f"a number of {place}", head.head, range(MEAN_OF_HEADS, view.inspected.n_heads)
    for means in filter(None, (head, head.uniform)):
        n = len(view.inspected.survey.patterns)
        yield f"the number of patterns of {place}", len(means.patterns), [0, n]
    yield from _cells(place, view, (*head.sinks, *head.largest))


def _cells(place: str, view: LayerView, cells: Iterable[Any]) -> _Parts:
    """Indices of sequences, queries and keys."""
    queries, keys = view.record.sequences, view.record.keys
    for cell in cells:
        sequence = getattr(cell, "sequence", 0)
        yield f"the sequence of a cell of {place}", sequence, range(len(queries))
        for name, texts in (("query", queries), ("key", keys)):
            at = getattr(cell, name, None) or 0
            yield f"a {name} of {place}", at, range(len(texts[sequence].ids))


def _steps(record: Record, _: Mapping[str, Any]) -> _Parts:
    """What a trace, a cell and removals say of the texts."""
    for i, step in enumerate(record.trace):
        yield f"the least of trace[{i}].shape", min(step.shape, default=0), range(MAX_LENGTH)
        if step.values is not None and step.values.numbers is not None:
            n = prod(step.shape)
            yield f"the length of trace[{i}].values.numbers", len(step.values.numbers), [n]
    if record.cell is not None:
        yield from _cells("cell", record.attentions[0], [record.cell])
    views = {(view.inspected.kind, view.inspected.layer): view for view in record.attentions}
    for i, effect in enumerate(record.effects):
        heads = effect.heads or [(effect.layer or 0, 0)]
        for kind, (layer, _head) in zip(
            effect.kinds or [effect.kind] * len(heads), heads, strict=True
        ):
            yield f"a layer of effects[{i}]", (kind, layer), views
            yield from _cells(f"effects[{i}]", views[kind, layer], [effect])
    if record.effect is not None:
        yield "effect.position", record.effect.position, range(len(record.sequences[0].ids))
