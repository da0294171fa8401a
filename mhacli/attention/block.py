"""The compiled block of `block.c`, called through pointers, which lets other threads run
meanwhile.
"""

import ctypes
import math
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .axes import StatisticsRequest
from .masks import mask_of
from .scores import LOG2_E, BlockPlace, ScoredAttention, large, planes_of

_POINTER = ctypes.c_void_p
_WHOLE = ctypes.c_int64
_NUMBER = ctypes.c_float
IN_C = (
    *("mass", "entropy", "squares", "peak", "distance", "first", "leading", "lse"),
    *("received", "map", "profile", "duplicate", "induction"),
)
"""What C computes: the log-sum-exp to base 2, and these statistics."""


class _Head(ctypes.Structure):
    """`Head` of `block.c`."""

    _fields_ = (
        *((name, _WHOLE) for name in ("low", "high", "is_self", "map_block", "map_keys", "zero")),
        *((name, _WHOLE) for name in ("n_first", "n_leading")),
        *(
            (name, _POINTER)
            for name in ("first_keys", "leading_keys", "q_tokens", "k_tokens", "before_k", *IN_C)
        ),
        ("sink", _NUMBER),
    )


class _Block(ctypes.Structure):
    """`Block` of `block.c`."""

    _fields_ = (
        *((name, _POINTER) for name in ("scores", "hidden")),
        *((name, _WHOLE) for name in ("hidden_row", "n_rows", "n_keys", "query", "key")),
        ("limit", _NUMBER),
    )


@lru_cache
def _library() -> ctypes.CDLL | None:
    """The compiled block; None where it was not built, or for another machine or version of mha."""
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("libblock.so")))
        library.mha_reduce.argtypes = (ctypes.POINTER(_Block), ctypes.POINTER(_Head))
    except (OSError, AttributeError):
        return None
    library.mha_reduce.restype = ctypes.c_int
    return library


def c_block() -> ctypes.CDLL | None:
    """The library whose `mha_reduce(block, head)` is used; None where torch does its work, as
    `MHA_BLOCK=torch` wants.
    """
    return None if os.environ.get("MHA_BLOCK") == "torch" else _library()


class CompiledHeads:
    """Some heads of an attention in float32, to whose sums the compiled block adds. Few calls of
    torch are made for a block, since every one of them costs as much as ten rows.
    """

    def __init__(
        self,
        attention: ScoredAttention,
        request: StatisticsRequest,
        heads: range,
        sums: Mapping[str, Tensor],
    ) -> None:
        library = c_block()
        assert library is not None
        self._reduce = library.mha_reduce
        self._attention = attention
        self._heads = heads
        self._sums = sums
        self._memory = torch.empty(0)
        self._place: tuple[tuple[range, range], Tensor, _Block] | None = None
        self._request = request
        self._marked = [
            [row.nonzero().flatten() for row in marks] for marks in (request.first, request.leading)
        ]
        texts = range(attention.shape[0])
        self._of_head = [[self._described(b, head) for head in heads] for b in texts]

    def _described(self, batch: int, head: int) -> _Head:
        request = self._request
        band, sinks = mask_of(self._attention.allowed).band, self._attention.sink_logits
        sink = -math.inf
        if sinks is not None:
            sink = float(planes_of(sinks, batch, range(head, head + 1))) * LOG2_E
        first, leading = (marked[batch] for marked in self._marked)
        return _Head(
            *band,
            request.axes.is_self,
            request.block,
            self._sums["map"].shape[3],
            self._attention.shape[2] - 1,
            len(first),
            len(leading),
            first.data_ptr(),
            leading.data_ptr(),
            *(tokens[batch].data_ptr() for tokens in request.labels),
            *(self._sums[name][batch, head - self._heads.start].data_ptr() for name in IN_C),
            sink,
        )

    def weights_of(
        self,
        place: BlockPlace,
        hidden: Callable[[], Bool[Tensor, "_batch _head query key"] | None],
    ) -> Float[Tensor, "1 query key"] | None:
        """The weights of a block with one head, whose statistics are added; None where scores are
        not finite, or so large beside a sink that torch has to do it. `hidden` makes the cells that
        the mask hides.
        """
        attention = self._attention
        batch, head, queries, keys = place
        index = head.start - self._heads.start
        if self._place is None or self._place[0] != (queries, keys):  # heads use it in turn
            n_cells = len(queries) * len(keys)
            if self._memory.numel() < n_cells:
                self._memory = torch.empty(n_cells)
            scores = self._memory[:n_cells].view(1, len(queries), len(keys))
            described = _Block(
                scores.data_ptr(), None, 0, *scores.shape[1:], queries.start, keys.start
            )
            self._place = (queries, keys), scores, described
        _, scores, block = self._place
        of_head = self._of_head[batch][index]
        block.limit = large(scores.device) * LOG2_E
        if mask_of(attention.allowed).cells is not None and (cells := hidden()) is not None:
            masked = planes_of(cells, batch, head)[0]
            if masked.stride(1) != 1:
                masked = masked.contiguous()
            block.hidden, block.hidden_row = masked.data_ptr(), masked.stride(0)
        attention.scores_into(scores, *place)
        if self._reduce(block, of_head):
            return scores
        reference = attention.masked_scores_into(scores, place, hidden=hidden(), sink=None)
        if reference is None or attention.sink_logits is not None:
            return None
        self._sums["lse"][batch, index, queries.start : queries.stop] = reference[0, :, 0]
        block.limit = math.inf
        return scores if self._reduce(block, of_head) else None
