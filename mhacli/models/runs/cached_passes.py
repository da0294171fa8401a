"""Joins the attentions of a text that grows pass by pass with a cache: the queries of all passes, the keys of all tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.io.files import format_size
from mhacli.models.calls import FORBIDDING, Call
from mhacli.models.layer_names import LayerKey

_REORDERED = (
    "attention whose cache does not hold the keys that went into it: beam search reorders them, some caches round them"
)


class _Rows(NamedTuple):
    """The part of one pass in an attention: a copy of its call with only the keys and values of its new tokens, and the
    columns of the joined matrix that its queries read."""

    call: Call
    columns: slice

    @property
    def n_bytes(self) -> int:
        """The size of the copy."""
        return sum(own.numel() * own.element_size() for own in self.call.tensors.values())


@dataclass
class CachedPasses:
    """The parts of each attention, copied pass by pass, within `limit_bytes` in all. The first `n_prefix` keys were in the cache
    before. `unfit` has the reasons for dropped attentions."""

    limit_bytes: int
    n_prefix: int = 0
    unfit: dict[LayerKey, str] = field(default_factory=dict)
    _rows: dict[tuple[str, int], list[_Rows]] = field(default_factory=dict)
    _n_bytes: int = 0

    def __post_init__(self) -> None:
        """Counts the keys of the cache."""
        self.n_tokens = self.n_prefix

    def add(self, call: Call, n_past: int) -> None:
        """Adds a pass of an attention after `n_past` cached tokens."""
        place, name = (call.kind, call.layer), (call.title, call.layer)
        if call.kind != "cross":
            self.n_tokens = n_past + call.shape[2]
        if place in self.unfit:
            return
        before = self._rows.setdefault(name, [])
        if call.kind != "cross":
            call = _without_unfilled(call, n_past + call.shape[2])
        reason = _misfit(call, before, n_past, self.n_prefix)
        if reason is None:
            before.append(_copied(call, n_past, is_first=not before))
            self._n_bytes += before[-1].n_bytes
            if self._n_bytes > self.limit_bytes:
                reason = f"attention whose queries and keys take more than the limit of {format_size(self.limit_bytes)}"
        if reason is not None:
            self._n_bytes -= sum(own.n_bytes for own in self._rows.pop(name))
            self.unfit[place] = reason

    def whole(self) -> Iterator[Call]:
        """Yields each attention over the whole text, freeing its parts."""
        while self._rows:
            yield _joined(self._rows.pop(next(iter(self._rows))))


def _without_unfilled(call: Call, n_tokens: int) -> Call:
    """The call without masked keys in unfilled places of a cache of fixed length."""
    if call.shape[3] > n_tokens and _is_masked_from(call, n_tokens):
        return call.cropped(slice(None), slice(n_tokens))
    return call


def _is_masked_from(call: Call, key: int) -> bool:
    """Whether all keys from `key` on are masked for all queries."""
    if call.pattern is not None:
        return not call.pattern[..., key:].any()
    if call.causal:
        return key >= call.shape[2]
    if not isinstance(call.mask, Tensor) or call.mask.shape[-1] != call.shape[3]:
        return False
    cells = call.mask[..., key:]
    return not (cells if cells.dtype == torch.bool else cells > FORBIDDING).any()


def _misfit(call: Call, before: Sequence[_Rows], n_past: int, n_prefix: int) -> str | None:
    """The reason why a pass cannot be joined to the earlier ones, None if it can."""
    q_len, k_len = call.shape[2:]
    if not isinstance(call.mask, Tensor | None):
        return f"attention whose mask is of type {type(call.mask).__name__}, not a tensor"
    if call.kind == "cross":
        return None if not before or before[0].columns.stop == k_len else _REORDERED
    if k_len > n_past + q_len:
        return "attention over more keys than there are tokens, and no mask hides the others"
    if n_prefix + sum(own.call.shape[2] for own in before) != n_past:
        return "attention with a cache that mha did not see being filled: by a call without use_cache=True"
    if n_prefix and not before and k_len < n_past + q_len:
        return "attention with a window, whose cache has lost the first keys"
    known, cached = (_keys(before[-1].call) if before else None), _keys(call)
    if known is None or cached is None or k_len == q_len:
        return None
    return None if torch.equal(known[:, :, -1], cached[:, :, -q_len - 1]) else _REORDERED


def _keys(call: Call) -> Tensor | None:
    return call.v if call.k is None else call.k


def _copied(call: Call, n_past: int, *, is_first: bool) -> _Rows:
    """The copied part of a pass. The first has all keys; later ones add none to cross-attention."""
    q_len, k_len = call.shape[2:]
    end = k_len if call.kind == "cross" else n_past + q_len
    new = slice(None) if is_first else slice(0) if call.kind == "cross" else slice(-q_len, None)
    named: dict[str, Any] = call.tensors
    named |= {name: own[:, :, new] for name, own in named.items() if name in ("k", "v")}
    return _Rows(replace(call, **{name: own.clone() for name, own in named.items()}), slice(end - k_len, end))


def _joined(rows: Sequence[_Rows]) -> Call:
    """One attention over all tokens."""
    first = rows[0].call
    if len(rows) == 1:
        return first
    joined: dict[str, Any] = {name: _cat(rows, name) for name in ("q", "k", "v", "z") if _has(rows, name)}
    if first.pattern is not None:
        fills = {"scores": -torch.inf, "pattern": 0.0}
        joined |= {name: _stacked(_all(rows, name), rows, fills[name]) for name in fills}
        return replace(first, **joined)
    if first.sinks is not None and first.sinks.ndim == 3:
        joined["sinks"] = _cat(rows, "sinks")
    if _has(rows, "bias"):
        joined["bias"] = _stacked(_all(rows, "bias"), rows, 0.0)
    joined["mask"] = _stacked([_mask_of(own) for own in rows], rows, -torch.inf)
    return replace(first, **joined | {"causal": False})


def _has(rows: Sequence[_Rows], name: str) -> bool:
    """Whether every pass of an attention has the tensor `name`."""
    return all(getattr(own.call, name, None) is not None for own in rows)


def _cat(rows: Sequence[_Rows], name: str) -> Tensor:
    return torch.cat(_all(rows, name), dim=2)


def _all(rows: Sequence[_Rows], name: str) -> list[Tensor]:
    return [getattr(own.call, name) for own in rows]


def _stacked(blocks: Sequence[Tensor], rows: Sequence[_Rows], fill: float) -> Tensor:
    """The cells of all passes in one matrix, `fill` where a pass has none."""
    batch, heads = (max(block.shape[axis] for block in blocks) for axis in (0, 1))
    n_queries, n_keys = sum(own.call.shape[2] for own in rows), rows[-1].columns.stop
    whole, begin = blocks[0].new_full((batch, heads, n_queries, n_keys), fill), 0
    for block, own in zip(blocks, rows, strict=True):
        whole[:, :, begin : begin + own.call.shape[2], own.columns] = block
        begin += own.call.shape[2]
    return whole


def _mask_of(rows: _Rows) -> Tensor:
    """The mask of a pass as numbers added to its scores, −∞ at masked cells."""
    call, n_keys = rows.call, rows.columns.stop - rows.columns.start
    added = torch.zeros(1, 1, call.shape[2], n_keys, device=call.device)
    if call.causal:
        added = added.masked_fill(torch.ones_like(added, dtype=torch.bool).triu(1), -torch.inf)
    if call.mask is None:
        return added
    mask = call.mask.reshape((1,) * (4 - call.mask.ndim) + tuple(call.mask.shape))
    return torch.where(mask, added, -torch.inf) if mask.dtype == torch.bool else added + mask
