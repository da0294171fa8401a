"""Runs of a text only what removals can change and the measured position reads: the keys and values of the tokens before come
from the model's own cache, and behind the last attention the other tokens do not run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from mhacli.commands.effect.metric import Reading, read_position
from mhacli.commands.effect.parts import Entries, blocks_seen, run_at
from mhacli.errors import MhaError
from mhacli.models.inputs import run_model

_GROWING = {"DynamicLayer", "DynamicSlidingWindowLayer"}
"""The cache layers of transformers that only hold keys and values and append new ones."""


@dataclass(frozen=True)
class Segment:
    """The tokens from `start` to the measured one or the end. `past` has the keys and values of earlier tokens.

    `position` counts from `start`. `alone` are modules that run only at this position. `seconds` is the measured time of one row
    for a segment that begins with a cache.
    """

    keywords: Mapping[str, Tensor]
    position: int
    entries: Entries
    start: int = 0
    past: Any = None
    alone: Sequence[nn.Module] = ()
    seconds: float = 0.0

    @property
    def n_tokens(self) -> int:
        """The number of tokens of each row; in a pair, of the longer text."""
        return max(tensor.shape[1] for tensor in self.keywords.values())

    def read(self, model: nn.Module, n_rows: int = 1) -> Reading:
        """The output of one pass over `n_rows` copies."""
        cached = {} if self.past is None else {"past_key_values": self.past}
        rows = {name: tensor.repeat(n_rows, 1) for name, tensor in self.keywords.items()}
        with run_at(self.alone, self.position):
            return read_position(model, rows | cached, self.position)


def one_token_behind(model: Any, whole: Segment) -> tuple[Segment, Reading] | None:
    """The same text, with the modules after all attentions running only at the measured position, and its output without
    removals. None if there are no such modules, or if they need other positions."""
    segment = replace(whole, alone=whole.entries.behind_attention)
    try:
        return (segment, segment.read(model)) if segment.alone else None
    except MhaError:
        return None


def later_segment(model: Any, whole: Segment, start: int) -> tuple[Segment, Reading] | None:
    """The segment of a text from `start` to the measured position, and its output without removals.

    None if the model has no cache, or one that holds other things than keys and values of each token.
    """
    if start == 0 or set(whole.keywords) != {"input_ids"} or not getattr(model.config, "use_cache", False):
        return None
    ids = whole.keywords["input_ids"]
    try:
        past = run_model(model, lambda: model.base_model(input_ids=ids[:, :start], use_cache=True)).get(
            "past_key_values"
        )
        if not {type(layer).__name__ for layer in getattr(past, "layers", ())} <= _GROWING or past is None:
            return None
        past.update = partial(_joined, past.layers)
        entries = Entries(before=whole.entries.before)
        segment = Segment(
            {"input_ids": ids[:, start : whole.position + 1]}, whole.position - start, entries, start, past
        )
        began = perf_counter()
        with blocks_seen(model, entries):
            reading = segment.read(model)
            reading.hidden.cpu()  # a GPU has finished the pass only now
        return replace(segment, seconds=perf_counter() - began), reading
    except MhaError:  # the model cannot continue from its own cache
        return None


def _joined(layers: Any, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The cached keys and values followed by those of new tokens, in every row. The cache of one row is not changed."""
    cached = copy.copy(layers[layer])
    cached.keys, cached.values = (kept.expand(len(keys), -1, -1, -1) for kept in (cached.keys, cached.values))
    joined: tuple[Tensor, Tensor] = cached.update(keys, values, *args, **kwargs)
    return joined
