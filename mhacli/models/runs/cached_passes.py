"""Joins the attentions of a text that grows pass by pass with a cache: the queries of all passes, the keys of all tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mhacli.io.files import format_size
from mhacli.models.calls import FORBIDDING, Call
from mhacli.models.layer_names import LayerKey

_REORDERED = (
    "attention whose cache does not hold the keys that went into it: beam search reorders them, some caches round them"
)
_Part = tuple[Call, slice]
"""The copied call of one pass, with only the keys and values of its new tokens, and the columns of the joined matrix that its
queries read."""


class CachedPasses:
    """The parts of each attention, copied pass by pass, within `limit_bytes` in all. The first `n_prefix` keys were in the cache
    before. `n_tokens` are in the cache now, `unfit` has the reasons for dropped attentions."""

    def __init__(self, limit_bytes: int, n_prefix: int = 0) -> None:
        self.n_tokens = n_prefix
        self.unfit: dict[LayerKey, str] = {}
        self._limit_bytes, self._n_prefix, self._n_bytes = limit_bytes, n_prefix, 0
        self._parts: dict[tuple[str, int], list[_Part]] = {}

    def add(self, call: Call, n_past: int) -> None:
        """Adds a pass of an attention after `n_past` cached tokens."""
        place, name, n_tokens = (call.kind, call.layer), (call.title, call.layer), n_past + call.shape[2]
        if call.kind != "cross":
            self.n_tokens = n_tokens
        if place in self.unfit:
            return
        if call.kind != "cross" and call.shape[3] > n_tokens and _is_masked_from(call, n_tokens):
            call = call.cropped(slice(None), slice(n_tokens))  # a cache of a fixed length has unfilled places
        parts = self._parts.setdefault(name, [])
        reason = _misfit(call, parts, n_past, self._n_prefix)
        if reason is None:
            parts.append(_copied(call, n_past, is_first=not parts))
            self._n_bytes += _size(parts[-1])
            if self._n_bytes > self._limit_bytes:
                reason = (
                    f"attention whose queries and keys take more than the limit of {format_size(self._limit_bytes)}"
                )
        if reason is not None:
            self._n_bytes -= sum(map(_size, self._parts.pop(name)))
            self.unfit[place] = reason

    def whole(self) -> Iterator[Call]:
        """Yields each attention over the whole text, freeing its parts."""
        while self._parts:
            yield _joined(self._parts.pop(next(iter(self._parts))))


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


def _misfit(call: Call, before: Sequence[_Part], n_past: int, n_prefix: int) -> str | None:
    """The reason why a pass cannot be joined to the earlier ones, None if it can."""
    q_len, k_len = call.shape[2:]
    if not isinstance(call.mask, Tensor | None):
        return f"attention whose mask is of type {type(call.mask).__name__}, not a tensor"
    if call.kind == "cross":
        return None if not before or before[0][1].stop == k_len else _REORDERED
    if k_len > n_past + q_len:
        return "attention over more keys than there are tokens, and no mask hides the others"
    if n_prefix + sum(own.shape[2] for own, _ in before) != n_past:
        return "attention with a cache that mha did not see being filled: by a call without use_cache=True"
    if n_prefix and not before and k_len < n_past + q_len:
        return "attention with a window, whose cache has lost the first keys"
    if not before or k_len == q_len:
        return None
    known, cached = (own.v if own.k is None else own.k for own in (before[-1][0], call))
    is_continued = known is None or cached is None or torch.equal(known[:, :, -1], cached[:, :, -q_len - 1])
    return None if is_continued else _REORDERED


def _copied(call: Call, n_past: int, *, is_first: bool) -> _Part:
    """The copied part of a pass. The first has all keys; later ones add none to cross-attention."""
    q_len, k_len = call.shape[2:]
    end, n_known = (k_len, k_len) if call.kind == "cross" else (n_past + q_len, k_len - q_len)
    new = slice(0 if is_first else n_known, None)
    copies: dict[str, Any] = {
        name: (own[:, :, new] if name in ("k", "v") else own).clone() for name, own in call.tensors.items()
    }
    return replace(call, **copies), slice(end - k_len, end)


def _size(part: _Part) -> int:
    return sum(own.numel() * own.element_size() for own in part[0].tensors.values())


def _joined(parts: Sequence[_Part]) -> Call:
    """One attention over all tokens."""
    calls, first = [call for call, _ in parts], parts[0][0]
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {}
    for name, own in first.tensors.items():
        tensors = [getattr(call, name) for call in calls]
        if any(tensor is None for tensor in tensors):
            continue
        if name in ("q", "k", "v", "z") or (name == "sinks" and own.ndim == 3):
            joined[name] = torch.cat(tensors, dim=2)
        elif name in ("scores", "pattern", "bias"):
            joined[name] = _stacked(tensors, parts, -torch.inf if name == "scores" else 0.0)
    if first.pattern is None:
        joined |= {"mask": _stacked([_mask_of(*part) for part in parts], parts, -torch.inf), "causal": False}
    return replace(first, **joined)


def _stacked(blocks: Sequence[Tensor], parts: Sequence[_Part], fill: float) -> Tensor:
    """The cells of all passes in one matrix, `fill` where a pass has none."""
    batch, heads = (max(block.shape[axis] for block in blocks) for axis in (0, 1))
    n_queries, n_keys = sum(call.shape[2] for call, _ in parts), parts[-1][1].stop
    whole, begin = blocks[0].new_full((batch, heads, n_queries, n_keys), fill), 0
    for block, (call, columns) in zip(blocks, parts, strict=True):
        end = begin + call.shape[2]
        whole[:, :, begin:end, columns] = block
        begin = end
    return whole


def _mask_of(call: Call, columns: slice) -> Tensor:
    """The mask of a pass as numbers added to its scores, −∞ at masked cells."""
    added = torch.zeros(1, 1, call.shape[2], columns.stop - columns.start, device=call.device)
    if call.causal:
        added = torch.full_like(added, -torch.inf).triu(1)
    if call.mask is None:
        return added
    mask = call.mask.reshape((1,) * (4 - call.mask.ndim) + tuple(call.mask.shape))
    return torch.where(mask, added, -torch.inf) if mask.dtype == torch.bool else added + mask
