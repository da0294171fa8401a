"""Runs a model with removals: many rows in a pass, each without other heads or edges, and some a second time by other means."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from typing import Any, Literal

import torch
from torch import Tensor

from mhacli.commands.effect.metric import GivenMetric, Reading, Target, changes, read, values
from mhacli.commands.effect.parts import Parts, finding, removed_otherwise, repeated
from mhacli.commands.effect.removal import Removal, stand_in, without
from mhacli.commands.effect.settings import EffectSettings
from mhacli.errors import MhaError
from mhacli.io.progress import Progress, no_progress
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.layer_names import LayerKey
from mhacli.models.rounding import TIMES_SHAKEN, dtype_of, shaken_parts
from mhacli.record.checks import TOLERANCES, SelfCheck

LEAST_ROWS = 2
"""The rows of the smallest batch: one removal and an untouched row."""
TOKENS_AT_ONCE = 4096
"""The largest number of tokens in a batch, all rows together."""
PACKED_TOKENS = 512
"""The largest number of tokens in a sequence that holds many rows; attention computes all pairs of them."""
_MOST_LOGITS = 1 << 24
"""The largest number of logits of a pass with such a sequence: in float64 they take 128 MiB, a few times."""
_N_SHAKEN = 2
"""The number of passes that measure rounding."""
_PART_OF_CHANGE = 0.5
"""The fraction of the largest change by a removal above which rounding hides it, so that rounding is no excuse for errors."""
_GROWING = {"DynamicLayer", "DynamicSlidingWindowLayer"}
"""The cache layers of transformers that only hold keys and values and append new ones."""


@dataclass
class EffectRun:
    """Removals from one text: each item of `plan` is a set of parts that are removed together. `compute` makes `results`, the
    changes by each item at `position`, or of what `metric` gives. `masked` are items whose edges were masked already.

    Each pass has a row for each of several items, and a last row without removals. The rows are whole texts in a batch; or, if
    nothing before position `start` changes and the model can continue from its cache of keys and values, they are tokens of one
    sequence, which see those before `start` and themselves. A model without batches has a pass for each item.
    """

    model: Any
    inputs: Mapping[str, Any]
    settings: EffectSettings
    position: int = -1
    metric: GivenMetric | None = None
    has_batches: bool = True
    plan: Sequence[tuple[Removal, ...]] = ()
    target: Target | None = None
    results: dict[int, dict[str, float]] = field(default_factory=dict)
    masked: set[int] = field(default_factory=set)
    estimates: dict[int, float] = field(default_factory=dict)
    n_batches: int = 0
    verified: SelfCheck = SelfCheck.of(0.0, 0.0, n=0, identical=True)  # noqa: RUF009 - frozen
    _floors: dict[str, float] = field(default_factory=dict)
    _errors: list[float] = field(default_factory=list)
    _vectors: dict[int, Tensor] = field(default_factory=dict)
    _emptied: set[int] = field(default_factory=set)

    # -------------------------------------------------------------------------------------------------------- the passes

    @cached_property
    def untouched(self) -> Reading:
        """The output of a plain pass without capture."""
        return self._read()

    @cached_property
    def parts(self) -> Parts:
        """The parts of the model, found in one pass in which every z was replaced by itself. Its output has keys and values if
        later passes may begin behind them."""
        parts, asked, config = Parts(), self.settings, getattr(self.model, "config", None)
        begins_later = asked.at is not None or asked.edges or asked.cut is not None
        can_cache = self.has_batches and set(self.inputs) == {"input_ids"} and getattr(config, "use_cache", False)
        with finding(self.model, parts):
            parts.reading = self._read(use_cache=True) if can_cache and begins_later else self._read()
        if not parts.z:
            hint = "its z is not seen where a model computes attention in a way of its own"
            raise MhaError("no attention gives head outputs that could be replaced", hint=hint, code="no-attention")
        return parts

    @cached_property
    def start(self) -> int:
        """The position at which passes begin, 0 if rows cannot continue from the keys and values before it."""
        cache, changed = self.parts.reading.cache, [removal.queries for item in self.plan for removal in item]
        start = min(min(queries, default=0) for queries in (*changed, (self.position,)))
        kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
        if not start or (self.position + 1 - start) * LEAST_ROWS > PACKED_TOKENS or not kinds or not kinds <= _GROWING:
            return 0
        try:
            cache.crop(start - _n_tokens(self.inputs))
            reading = self._read_packed(start, LEAST_ROWS)
        except (MhaError, RuntimeError):  # a model that needs other positions, or a window that is full
            return 0
        is_same = len(reading.vector) == LEAST_ROWS and _apart(reading, self.untouched) <= self._usual_tolerance
        return start if is_same else 0

    @property
    def _width(self) -> int:
        """The number of tokens of a row."""
        return self.position + 1 - self.start if self.start else _n_tokens(self.inputs)

    @property
    def _rows_at_once(self) -> int:
        """The largest number of rows in a pass."""
        scores = self.untouched.scores
        n_logits = 1 if scores is None else scores.shape[1]
        return min(PACKED_TOKENS // self._width, _MOST_LOGITS // n_logits) if self.start else rows_at_once(self.inputs)

    def _read(self, **more: Any) -> Reading:
        """The output of a pass over the text."""
        return read(self.model, {**self.inputs, **more}, [self.position], self.metric)

    def _read_packed(self, start: int, n_rows: int) -> Reading:
        """The output of one sequence in which the tokens from `start` to the position stand `n_rows` times."""
        ids = self.inputs["input_ids"][:, start : self.position + 1]
        width = ids.shape[1]
        own = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        seen = torch.nn.functional.pad(torch.block_diag(*[own] * n_rows), (start, 0), value=True)
        dtype, cache = dtype_of(self.model), copy.copy(self.parts.reading.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        inputs = {
            "input_ids": ids.repeat(1, n_rows),
            "position_ids": torch.arange(start, self.position + 1, device=ids.device).repeat(n_rows)[None],
            "attention_mask": torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None],
            "past_key_values": cache,
        }
        return read(self.model, inputs, range(width - 1, n_rows * width, width))

    # ------------------------------------------------------------------------------------------------------ the removals

    @property
    def measure(self) -> Literal["d_logit", "d_output"]:
        """The change by which removals are ranked."""
        return "d_output" if self.target is None else "d_logit"

    def _batches(self, items: Sequence[int]) -> Iterator[list[int]]:
        """The items of each pass; in a batch, all begin at the same layer."""
        n_items = self._rows_at_once - 1 - (self.start > 0)
        for _, alike in groupby(items, key=lambda item: self.start > 0 or self.plan[item][0].layer):
            while batch := list(islice(alike, max(1, n_items) if self.has_batches else 1)):
                yield batch

    @torch.no_grad()
    def compute(self, report_progress: Progress = no_progress) -> None:
        """Computes all removals and verifies some. Raises `MhaError` for an attention that removals cannot reach."""
        report_progress(0.0, "the untouched pass")
        items: Sequence[int] = range(len(self.plan))
        if self.settings.screen is not None:
            self._estimate()
            items = sorted(_largest_and_others(self.estimates, 2 * self.settings.screen))
        for batch in self._batches(items):
            self._run_batch(batch)
            report_progress(min(1.0, len(self.results) / len(items)), "removing")
        self._verify()

    def _run_batch(self, items: Sequence[int]) -> None:
        """The changes by some items, from the last row of the same pass, or from the plain pass of a model without batches."""
        layers = {removal.layer for item in items for removal in self.plan[item]}
        seen, is_packed = set[int](), self.start > 0
        rows, n_rows = dict(enumerate(items, is_packed)), len(items) + is_packed + self.has_batches

        def take(call: Call) -> Tensor | None:
            key = (call.kind, call.layer)
            if key not in layers or call.part or call.z is None:
                return None
            here, width = {row: self.plan[item] for row, item in rows.items()}, self._width if is_packed else 0
            z, visible, emptied = without(call, here, start=self.start, width=width, of_text=self.parts.z.get(key))
            seen.update(visible)
            self._emptied.update(rows[row] for row in emptied)
            return z

        with captured(self.model, take, batch=1 if is_packed else n_rows):
            if is_packed:
                reading = self._read_packed(self.start, n_rows)
            else:
                with self.parts.skipped(layers, n_rows):
                    inputs = {name: repeated(value, n_rows) for name, value in self.inputs.items()}
                    reading = read(self.model, inputs, [self.position], self.metric, n_rows=n_rows)
        last = reading.row(-1) if self.has_batches else self.untouched
        found = changes(reading, last, self.target)
        for name, moved in changes(last, self.untouched, self.target).items():
            noise = moved.abs() + (found[name][0].abs() if is_packed else 0)
            self._floors[name] = max(self._floors.get(name, 0.0), float(noise))
        self._errors.append(_apart(last, self.untouched))  # rows without removals must be right too
        self.n_batches += 1
        self.masked.update(item for row, item in rows.items() if row not in seen)
        for row, item in rows.items():
            self._vectors[item] = reading.vector[row]
            self.results[item] = {name: change[row].item() for name, change in found.items()}

    def _estimate(self) -> None:
        """Estimates the change by removing each head to first order, by the gradient of the measure by the z of each attention.
        Source: Nanda 2023, Attribution Patching."""
        added = dict[LayerKey, Tensor]()

        def take(call: Call) -> Tensor | None:
            if call.part or call.z is None:
                return None
            change = added[call.kind, call.layer] = torch.zeros_like(call.z, requires_grad=True)
            return call.z + change

        with torch.enable_grad(), captured(self.model, take, batch=1):
            measure = values(self._read(), self.target)["logit"][0]
            found = torch.autograd.grad(measure, [*added.values()], allow_unused=True)
        gradients = dict(zip(added, found, strict=True))
        for item, (removal,) in enumerate(self.plan):
            gradient, (head,) = gradients.get(removal.layer), removal.heads
            if gradient is not None:
                z, places = self.parts.z[removal.layer][0, head].double(), [*removal.queries] or slice(None)
                moved = (stand_in(z, removal.replace) - z) * gradient[0, head].double()
                self.estimates[item] = float(moved[places].sum())

    # -------------------------------------------------------------------------------------------------- the verification

    def floor(self, name: str) -> float:
        """The noise floor of a change: twice the largest of a row without removals, and at least one rounding step."""
        scores = self.untouched.scores
        scale = 1.0 if name == "d_output" or scores is None else float(scores.abs().max())
        return max(2 * self._floors.get(name, 0.0), torch.finfo(dtype_of(self.model)).eps * scale)

    def change(self, item: int, name: str) -> float | None:
        """A change by a removal, 0 if it is noise, or its estimate; None if it was not measured."""
        is_estimate = name == "first_order"
        value = self.estimates.get(item) if is_estimate else self.results[item].get(name)
        if value is None or name == "rank":
            return value
        return value if abs(value) > self.floor(self.measure if is_estimate else name) else 0.0

    def _verify(self) -> None:
        """Repeats the items with the largest changes, and as many others, one by one with a second method.

        The tolerance is known before. It is that of two runs in the dtype, or, if it is more, what rounding does to this model,
        as long as it hides no change by the removals."""
        tolerance, n_before = self._usual_tolerance, len(self._errors)
        if self.settings.verify:
            moved, plain = self._moved_by_rounding(), self.untouched.vector[0]
            largest = max(float((vector - plain).abs().max()) for vector in self._vectors.values())
            tolerance = moved if tolerance < moved <= largest * _PART_OF_CHANGE else tolerance
        is_same = torch.equal(self.parts.reading.vector, self.untouched.vector)
        sizes = {item: found[self.measure] for item, found in self.results.items() if item not in self._emptied}
        for item in _largest_and_others(sizes, self.settings.verify):
            with removed_otherwise(self.plan[item], self.parts) as is_done:
                if is_done:
                    self._errors.append(float((self._read().vector[0] - self._vectors[item]).abs().max()))
        n = len(self._errors) - n_before
        self.verified = SelfCheck.of(max(self._errors), tolerance, holds=is_same, n=n, identical=is_same)

    def _moved_by_rounding(self) -> float:
        """The difference of outputs that rounding makes in this model, added up over its layers. 0 in float64, in which models
        compute only some parts."""
        dtype, moved = str(dtype_of(self.model)).removeprefix("torch."), 0.0
        for seed in range(_N_SHAKEN if dtype != "float64" else 0):
            with shaken_parts(self.model, seed):
                moved = max(moved, _apart(self._read(), self.untouched))
        return TIMES_SHAKEN[dtype] * moved

    @property
    def _usual_tolerance(self) -> float:
        """The permitted difference of outputs in any model. Edges need a new softmax, which models without fused kernels
        compute in float32, whatever their dtype."""
        has_edges = self.settings.edges or self.settings.cut is not None
        is_single = has_edges and getattr(getattr(self.model, "config", None), "_attn_implementation", None) == "eager"
        names = [str(dtype_of(self.model)).removeprefix("torch."), *["float32"] * is_single]
        return float(self.untouched.vector.abs().max()) * max(TOLERANCES[name].runs for name in names)


def rows_at_once(inputs: Mapping[str, Any]) -> int:
    """The largest number of rows in a batch, not considering memory."""
    return max(1, TOKENS_AT_ONCE // max(1, _n_tokens(inputs)))


def _n_tokens(inputs: Mapping[str, Any]) -> int:
    """The number of tokens of a row; in a pair, of the longer text."""
    return max((value.shape[1] for value in inputs.values() if isinstance(value, Tensor) and value.ndim > 1), default=1)


def _apart(one: Reading, other: Reading) -> float:
    """The largest difference of two outputs."""
    return float((one.vector - other.vector).abs().max())


def _largest_and_others(sizes: Mapping[int, float], n: int) -> list[int]:
    """`n` items: half of them with the largest sizes, the others at random."""
    ranked = sorted(sizes, key=lambda item: -abs(sizes[item]))
    n_top = min(len(ranked), -(-n // 2))
    return ranked[:n_top] + random.Random(0).sample(ranked[n_top:], min(len(ranked) - n_top, n - n_top))
