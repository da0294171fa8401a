"""Attention patterns from a record: of one head, one layer or all layers, with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mhacli.errors import MhaError, UsageError
from mhacli.record.arrays import Array
from mhacli.record.display import html_of
from mhacli.record.tables import Columns, Table, require_library
from mhacli.text.tokens import TokenSequence

if TYPE_CHECKING:
    import xarray

    from mhacli.record.record import Record


@dataclass(frozen=True, eq=False, repr=False)
class Pattern(Table):
    """Attention weights of one text, without padding, with the visible cells. `numpy.asarray` gives the weights.

    `dims` names the axes: `query key` for a head, `head query key` for a layer, `layer head query key` for all layers.
    `layers` and `heads` are their numbers, `batch` is the text's number, and `queries` and `keys` are the texts of the
    axes. As a table it has a row per cell: `layer`, `sequence`, `head`, `query` and `key` (positions), `query_token`,
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
        sizes = " ".join(f"{name}={size}" for name, size in zip(self.dims, self.values.shape, strict=True))
        numbers = [f"{name}={n}" for name, n in (("layer", self.layer), ("head", self.head)) if n is not None]
        return f"<Pattern {' '.join([*numbers, f'batch={self.batch}'])}: {sizes}>"

    def _repr_html_(self) -> str:
        """The HTML for a notebook."""
        return html_of(self)

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
        """An xarray DataArray with the axes `dims`. Coordinates of `query` and `key` are tokens, the others numbers.

        Select by position with `isel`, since a repeated token names several positions. Raises `MhaError` if xarray is
        missing.
        """
        require_library("xarray", "to_xarray")
        import xarray

        coordinates_of = {"layer": self.layers, "head": self.heads, "query": self.query_tokens, "key": self.key_tokens}
        coordinates = {name: list(coordinates_of[name]) for name in self.dims}
        return xarray.DataArray(self.values, coordinates, self.dims, name="pattern")


def pattern_of_layer(view: Record, layer: int, *, head: int | None, batch: int) -> Pattern:
    """The pattern of all heads of a layer, or of one of them, without padding.

    `view` is the record of the layer. Raises `MhaError` if the pattern was not kept or the head does not exist.
    """
    arrays, texts = view.arrays, (view.sequences[batch], view.keys[batch])
    heads = range(view.config.n_heads) if view.survey is None else [each.head for each in view.heads]
    if "pattern" not in arrays:
        hint = 'mha run keeps it, with --keep pattern --keep-limit SIZE where it is large; Python has keep=("pattern",)'
        raise MhaError(f"the pattern of layer {layer} is not in the record", hint=hint, code="not-kept")
    if head is not None and head not in heads:
        listed = ", ".join(map(str, heads))
        raise UsageError(f"head {head} is not in layer {layer} of the record, which has the heads {listed}")
    begins = view.first_query(batch), view.first_key(batch)
    rows, columns = (slice(i, i + len(text.tokens)) for i, text in zip(begins, texts, strict=True))
    values = arrays["pattern"][batch, :, rows, columns]
    allowed = arrays["allowed"][batch, :, rows, columns].repeat(len(values) // arrays["allowed"].shape[1], axis=0)
    if head is None:
        return Pattern(values, allowed, ("head", "query", "key"), (layer,), tuple(heads), batch, *texts)
    place = heads.index(head)
    return Pattern(values[place], allowed[place], ("query", "key"), (layer,), (head,), batch, *texts)


def stacked(patterns: Sequence[Pattern]) -> Pattern:
    """The patterns of several layers as one. Raises `UsageError` if their heads or tokens differ."""
    import numpy as np

    first = patterns[0]
    for other in patterns:
        if other.values.shape != first.values.shape or other.heads != first.heads:
            shapes = f"{first.values.shape} and {other.values.shape}"
            both = f"layers {first.layers[0]} and {other.layers[0]}"
            raise UsageError(f"{both} do not fit into one array: {shapes}", hint="choose with layer= or kind=")
    values, allowed = (np.stack([getattr(pattern, name) for pattern in patterns]) for name in ("values", "allowed"))
    layers = tuple(pattern.layers[0] for pattern in patterns)
    return Pattern(values, allowed, ("layer", *first.dims), layers, first.heads, first.batch, first.queries, first.keys)
