"""Exports of a record as tables of other libraries, which are imported on use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from mhacli.errors import missing_library
from mhacli.record.arrays import Array
from mhacli.record.effect import Effect
from mhacli.record.heads import STATISTICS, HeadStatistics, removal_columns

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow


Columns = dict[str, tuple[type, Sequence[Any] | Array]]
"""Columns by name: the type of the values, and the values, None for a missing one."""
_TYPES = {int: ("Int64", "int64"), float: ("float64", "float64"), str: ("str", "string"), bool: ("bool", "bool_")}
"""The types of columns in pandas and pyarrow; polars takes those of Python."""


class Table:
    """A result that converts to a table."""

    def columns(self) -> Columns:
        """The columns by name."""
        raise NotImplementedError

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each row."""
        return dicts_of(self.columns())

    def to_polars(self) -> polars.DataFrame:
        """A polars DataFrame; null for a missing value. Raises `MhaError` if polars is missing."""
        require_library("polars", "to_polars")
        import polars

        columns = self.columns()
        kinds = {name: kind for name, (kind, _) in columns.items()}
        return polars.DataFrame({name: values for name, (_, values) in columns.items()}, kinds)

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas DataFrame; NA or NaN for a missing value. Raises `MhaError` if pandas is missing."""
        require_library("pandas", "to_pandas")
        import pandas

        columns = self.columns().items()
        return pandas.DataFrame(
            {name: pandas.Series(values, dtype=_TYPES[kind][0]) for name, (kind, values) in columns}
        )

    def to_arrow(self) -> pyarrow.Table:
        """An Arrow table; null for a missing value. Raises `MhaError` if pyarrow is missing."""
        require_library("pyarrow", "to_arrow")
        return arrow_of(self.columns())


def dicts_of(columns: Columns) -> list[dict[str, Any]]:
    """A dict for each row."""
    lists = (values if isinstance(values, Sequence) else values.tolist() for _, values in columns.values())
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def arrow_of(columns: Columns) -> pyarrow.Table:
    """An Arrow table; null for a missing value."""
    import pyarrow

    return pyarrow.table(
        {name: pyarrow.array(values, getattr(pyarrow, _TYPES[kind][1])()) for name, (kind, values) in columns.items()}
    )


def require_library(name: str, method: str) -> None:
    """Raises `MhaError` if a library that a method needs is missing."""
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise missing_library(name, method)


class EffectTable(tuple[Effect, ...], Table):
    """The effects of removals: a tuple, and a table with a row per removal.

    Columns are named like the JSON fields. Heads, spans and layers
    that were removed together are JSON lists.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """The number of removals, and how to make a table."""
        return f"<EffectTable: {len(self)} removal{'s' * (len(self) != 1)}; to_polars() and others make a table>"

    def columns(self) -> Columns:
        """The columns by name."""
        return _columns(self, Effect, Effect.__struct_fields__)


class HeadTable(tuple[HeadStatistics, ...], Table):
    """Head statistics by layer: a tuple, and a table with a row per head.

    Columns are named like the JSON fields: `layer`, `attention` (the module of a checkpoint), `head`, `kind` (the
    type), then every statistic of `mha explain`. `entropy` is in nats; `distance`, `window_50` … and `offset` are in
    tokens; `effective_keys` and `participation` count keys; `max_score` is a score before softmax; the others are
    attention weights or fractions from 0 to 1. `pattern_1` … are the user's conditions. If they were requested, `d_logit`,
    `d_output` and `floor` say what the removal of the head changes, and `control_kind` … are its statistics on random tokens.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """The number of heads, and how to make a table."""
        n_layers = len({(head.layer, head.attention) for head in self})
        return f"<HeadTable: {len(self)} heads, {n_layers} layer{'s' * (n_layers != 1)}; to_polars() and others make a table>"

    def columns(self) -> Columns:
        """The columns by name."""
        names = ["layer", "attention", "head", "kind", *(row.field for row in STATISTICS)]
        columns = _columns(self, HeadStatistics, names)
        for index in range(max((len(head.patterns) for head in self), default=0)):
            columns[f"pattern_{index + 1}"] = float, [head.patterns[index] for head in self]
        columns |= _columns(self, HeadStatistics, [row.field for row in removal_columns(self)])
        controls = [head.control for head in self if head.control is not None]
        of_control = _columns(controls, HeadStatistics, names[names.index("kind") :]) if controls else {}
        return columns | {f"control_{name}": column for name, column in of_control.items()}


def _columns(rows: Sequence[Any], row_type: type, names: Sequence[str]) -> Columns:
    """Fields of rows as columns; lists are JSON."""
    hints = get_type_hints(row_type)
    return {name: (_kind_of(hints[name]), [_cell(getattr(row, name)) for row in rows]) for name in names}


def _kind_of(hint: Any) -> type:
    """The type of a column: that of an optional number's value, and text for words and lists."""
    numbers = {int, float, bool} & {hint, *get_args(hint)}
    return numbers.pop() if numbers and get_origin(hint) is not tuple else str


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, tuple) else value
