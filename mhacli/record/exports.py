"""What results become outside of mha: pages, tables of other libraries, and attention patterns with
their tokens. Libraries are imported on use.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from mhacli.errors import MhaError, UsageError, library
from mhacli.io.data import Array
from mhacli.text.tokens import TokenSequence

from .effect import Effect
from .heads import Averages, HeadStatistics, removal_columns
from .shown import renderer

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow
    import xarray

    from .record import LayerView


@dataclass(frozen=True)
class Page:
    """An interactive page. `html` is the whole document, which notebooks show in a frame."""

    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        """The page in a frame without access to the notebook."""
        from html import escape

        style = "width:100%;height:720px;border:1px solid #8884;border-radius:8px"
        return (
            f'<iframe sandbox="allow-scripts" style="{style}"'
            f' srcdoc="{escape(self.html)}"></iframe>'
        )


# ------------------------------------------------------------------------------------------- tables

Columns = dict[str, tuple[type, Sequence[Any] | Array]]
"""Columns by name: the type of the values, and the values, None for a missing one."""
_TYPES = {
    int: ("Int64", "int64"),
    float: ("float64", "float64"),
    str: ("str", "string"),
    bool: ("bool", "bool_"),
}
"""The types of columns in pandas and pyarrow; polars takes those of Python."""


class Table:
    """A result that converts to a table."""

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        return renderer().html_of(self)

    def columns(self) -> Columns:
        """The columns by name."""
        raise NotImplementedError

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each row."""
        return dicts_of(self.columns())

    def to_polars(self) -> polars.DataFrame:
        """A polars DataFrame; null for a missing value. Raises `MhaError` if polars is missing."""
        columns, new = self.columns(), library("polars", "to_polars").DataFrame
        kinds = {name: kind for name, (kind, _) in columns.items()}
        frame: polars.DataFrame = new(
            {name: values for name, (_, values) in columns.items()}, kinds
        )
        return frame

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas DataFrame; NA or NaN for a missing value. Raises `MhaError` if pandas is
        missing.
        """
        pandas, columns = library("pandas", "to_pandas"), self.columns().items()
        series = {
            name: pandas.Series(values, dtype=_TYPES[kind][0]) for name, (kind, values) in columns
        }
        return pandas.DataFrame(series)

    def to_arrow(self) -> pyarrow.Table:
        """An Arrow table; null for a missing value. Raises `MhaError` if pyarrow is missing."""
        return arrow_of(self.columns())


def dicts_of(columns: Columns) -> list[dict[str, Any]]:
    """A dict for each row."""
    lists = (
        values if isinstance(values, Sequence) else values.tolist()
        for _, values in columns.values()
    )
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def arrow_of(columns: Columns) -> pyarrow.Table:
    """An Arrow table; null for a missing value."""
    pyarrow = library("pyarrow", "an Arrow table")
    return pyarrow.table(
        {
            name: pyarrow.array(values, getattr(pyarrow, _TYPES[kind][1])())
            for name, (kind, values) in columns.items()
        }
    )


class EffectTable(tuple[Effect, ...], Table):
    """The effects of removals: a tuple, and a table with a row per removal.

    Columns are named like the JSON fields. Heads, spans and layers
    that were removed together are JSON lists.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """The number of removals, and how to make a table."""
        removals = "removal" if len(self) == 1 else "removals"
        return f"<EffectTable: {len(self)} {removals}; to_polars() and others make a table>"

    def columns(self) -> Columns:
        """The columns by name."""
        return columns_of(self, Effect, Effect.__struct_fields__)


class HeadTable(tuple[HeadStatistics, ...], Table):
    """Head statistics by layer: a tuple, and a table with a row per head.

    Columns are named like the JSON fields: `layer`, `attention` (the module of a checkpoint),
    `head`, `kind` (the type), then the statistics of `mha explain`. `entropy` is in nats;
    `distance`, `window_50` … and `offset` are in tokens; `effective_keys` and `participation` count
    keys; `max_score` is a score before softmax; the others are attention weights or fractions from
    0 to 1. `pattern_1` … are the user's conditions. If they were requested, `d_logit`, `d_output`
    and `floor` say what the removal of the head changes, and `control_kind` … are its statistics on
    random tokens.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """The number of heads, and how to make a table."""
        n_layers = len({(head.layer, head.attention) for head in self})
        layers = "1 layer" if n_layers == 1 else f"{n_layers} layers"
        return f"<HeadTable: {len(self)} heads, {layers}; to_polars() and others make a table>"

    def columns(self, *, has_uniform: bool = False) -> Columns:
        """The columns by name; with those of uniform attention, `uniform_entropy` …, on request."""
        means = [f.name for f in fields(Averages) if f.name != "patterns"]
        statistics = ["kind", "certainty", "max_score", *means]
        columns = _statistics(self, ["layer", "attention", "head", *statistics])
        if has_uniform:
            columns |= _statistics([head.uniform or Averages() for head in self], means, "uniform_")
        columns |= columns_of(self, HeadStatistics, [row.field for row in removal_columns(self)])
        controls = [head.control for head in self if head.control is not None]
        return columns | (_statistics(controls, statistics, "control_") if controls else {})


def _statistics(rows: Sequence[Averages], names: Sequence[str], prefix: str = "") -> Columns:
    """Statistics and conditions as columns."""
    columns = {
        prefix + name: column for name, column in columns_of(rows, HeadStatistics, names).items()
    }
    for index in range(max((len(row.patterns) for row in rows), default=0)):
        columns[f"{prefix}pattern_{index + 1}"] = (
            float,
            [row.patterns[index] if row.patterns else None for row in rows],
        )
    return columns


def columns_of(rows: Sequence[Any], row_type: type, names: Sequence[str]) -> Columns:
    """Fields of rows as columns: optional numbers with the type of their values, words and lists as
    text, which is JSON of lists. A row may be None, and then has no values.
    """
    columns, hints = Columns(), get_type_hints(row_type)
    for name in names:
        numbers = {int, float, bool} & {hints[name], *get_args(hints[name])}
        kind = numbers.pop() if numbers and get_origin(hints[name]) is not tuple else str
        cells = (getattr(row, name, None) for row in rows)
        columns[name] = (
            kind,
            [json.dumps(cell) if isinstance(cell, tuple) else cell for cell in cells],
        )
    return columns


# ------------------------------------------------------------------------------- attention patterns


MEAN_OF_HEADS = -1
"""The number that stands for the mean of all heads."""


@dataclass(frozen=True, eq=False, repr=False)
class Pattern(Table):
    """Attention weights of one text, without padding, with the visible cells. `numpy.asarray` gives
    the weights.

    `dims` names the axes: `query key` for a head, `head query key` for a layer, `layer head query
    key` for all layers. `layers` and `heads` are their numbers, −1 for the mean of heads, `batch`
    is the text's number, and `queries` and `keys` are the texts of the axes. As a table it has a
    row per cell: `layer`, `sequence`, `head`, `query` and `key` (positions), `query_token`,
    `key_token`, `allowed`, and `pattern`, the attention weight from 0 to 1.
    """

    values: Array
    allowed: Array
    dims: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    batch: int
    queries: TokenSequence
    keys: TokenSequence

    @property
    def layer(self) -> int | None:
        """The layer's number; None for several layers."""
        return self.layers[0] if "layer" not in self.dims else None

    @property
    def head(self) -> int | None:
        """The head's number; None for several heads."""
        return self.heads[0] if "head" not in self.dims else None

    def mean_of_heads(self) -> Pattern:
        """The mean of all heads, whose number is −1. A cell is visible if it is in any head."""
        import numpy as np

        axis = self.dims.index("head")
        allowed: Array = np.logical_or.reduce(self.allowed, axis=axis)
        return replace(
            self,
            values=self.values.mean(axis=axis),
            allowed=allowed,
            dims=tuple(name for name in self.dims if name != "head"),
            heads=(MEAN_OF_HEADS,),
        )

    def of_words(self) -> Pattern:
        """The weights between words: summed over the tokens of a key, and averaged over those of a
        query that see a key, so that sums of rows stay. A pair is visible if one of its tokens is.
        """
        import numpy as np

        q_starts, k_starts = ([word[0] for word in t.words] for t in (self.queries, self.keys))
        sees = self.allowed.any(axis=-1)
        n_queries = np.maximum(1, np.add.reduceat(sees.astype(float), q_starts, axis=-1))
        of_keys = np.add.reduceat(np.where(self.allowed, self.values, 0.0), k_starts, axis=-1)
        allowed = np.logical_or.reduceat(self.allowed, k_starts, axis=-1)
        return replace(
            self,
            values=np.add.reduceat(of_keys, q_starts, axis=-2) / n_queries[..., None],
            allowed=np.logical_or.reduceat(allowed, q_starts, axis=-2),
            queries=self.queries.of_words,
            keys=self.keys.of_words,
        )

    @property
    def query_tokens(self) -> tuple[str, ...]:
        """The tokens of the rows."""
        return self.queries.tokens

    @property
    def key_tokens(self) -> tuple[str, ...]:
        """The tokens of the columns."""
        return self.keys.tokens

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The attention weights as a numpy array."""
        import numpy as np

        return np.array(self.values, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        """The layer and head, and the axes."""
        sizes = " ".join(
            f"{name}={size}" for name, size in zip(self.dims, self.values.shape, strict=True)
        )
        numbers = [
            f"{name}={n}"
            for name, n in (("layer", self.layer), ("head", self.head))
            if n is not None
        ]
        return f"<Pattern {' '.join([*numbers, f'batch={self.batch}'])}: {sizes}>"

    def columns(self) -> Columns:
        """The columns, by name, of a table with a row per cell."""
        import numpy as np

        shape = (len(self.layers), len(self.heads), *self.values.shape[-2:])
        layer, head, query, key = (index.ravel() for index in np.indices(shape))
        return {
            "layer": (int, np.array(self.layers)[layer]),
            "sequence": (int, np.full(layer.shape, self.batch)),
            "head": (int, np.array(self.heads)[head]),
            "query": (int, query),
            "query_token": (str, np.array(self.query_tokens, dtype=object)[query].tolist()),
            "key": (int, key),
            "key_token": (str, np.array(self.key_tokens, dtype=object)[key].tolist()),
            "allowed": (bool, self.allowed.ravel()),
            "pattern": (float, self.values.ravel()),
        }

    def to_xarray(self) -> xarray.DataArray:
        """An xarray DataArray with the axes `dims`. Coordinates of `query` and `key` are tokens,
        the others numbers.

        Select by position with `isel`, since a repeated token names several positions. Raises
        `MhaError` if xarray is missing.
        """
        coordinates_of = {
            "layer": self.layers,
            "head": self.heads,
            "query": self.query_tokens,
            "key": self.key_tokens,
        }
        coordinates = {name: list(coordinates_of[name]) for name in self.dims}
        new = library("xarray", "to_xarray").DataArray
        array: xarray.DataArray = new(self.values, coordinates, self.dims, name="pattern")
        return array


def pattern_of_layer(view: LayerView, *, head: int | None, batch: int) -> Pattern:
    """The pattern of all heads of a layer, or of one of them, without padding. Raises `MhaError` if
    the pattern was not kept or the head does not exist.
    """
    layer, record, arrays = view.inspected.layer, view.record, view.record.arrays
    heads = [each.head for each in record.heads]
    if "pattern" not in arrays:
        hint = 'keep=["pattern"] keeps it, with a larger keep_limit= where it is large'
        raise MhaError(
            f"the pattern of layer {layer} is not in the record", hint=hint, code="not-kept"
        )
    if head not in (None, *heads):
        listed = ", ".join(map(str, heads))
        raise UsageError(
            f"head {head} is not in layer {layer} of the record, which has the heads {listed}"
        )
    rows, columns = record.inside(batch)
    values = arrays["pattern"][batch, :, rows, columns]
    allowed = arrays["allowed"][batch, :, rows, columns].repeat(
        len(values) // arrays["allowed"].shape[1], axis=0
    )
    axes, texts = ("head", "query", "key"), (record.sequences[batch], record.keys[batch])
    whole = Pattern(values, allowed, axes, (layer,), tuple(heads), batch, *texts)
    if head is None:
        return whole
    place = heads.index(head)
    part = {"values": values[place], "allowed": allowed[place]}
    return replace(whole, **part, dims=axes[1:], heads=(head,))


def stacked(patterns: Sequence[Pattern]) -> Pattern:
    """The patterns of several layers as one. Raises `UsageError` if their heads or tokens
    differ.
    """
    import numpy as np

    first = patterns[0]
    for other in patterns:
        if other.values.shape != first.values.shape or other.heads != first.heads:
            shapes = f"{first.values.shape} and {other.values.shape}"
            both = f"layers {first.layers[0]} and {other.layers[0]}"
            raise UsageError(
                f"{both} do not fit into one array: {shapes}", hint="choose with layer= or kind="
            )
    values, allowed = (
        np.stack([getattr(pattern, name) for pattern in patterns]) for name in ("values", "allowed")
    )
    layers = tuple(pattern.layers[0] for pattern in patterns)
    return replace(
        first, values=values, allowed=allowed, dims=("layer", *first.dims), layers=layers
    )
