"""Runs a model with removals: many rows in a batch, each without other heads or edges, and some a second time by other means."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from mhacli.commands.effect.metric import Changes, GivenMetric, Reading, Target, changes, compared, read
from mhacli.commands.effect.parts import Parts, blocks_seen, finding, repeated
from mhacli.commands.effect.removal import Removal, Remover, stand_in
from mhacli.commands.effect.verify import removed_otherwise
from mhacli.compute.checkpoint.memory import CheckpointFacts
from mhacli.errors import MhaError
from mhacli.io.progress import Progress, no_progress
from mhacli.models.capture import captured
from mhacli.models.inputs import run_model
from mhacli.models.layer_names import LayerKey
from mhacli.models.rounding import TIMES_SHAKEN, dtype_of, shaken_parts
from mhacli.record.checks import TOLERANCES, SelfCheck

TOKENS_AT_ONCE = 4096
"""The largest number of tokens in a batch, all rows together."""
_N_UNTOUCHED = 2
"""The number of rows of a batch without a removal."""
_SEED = 0
_N_SHAKEN = 2
"""The number of passes that measure rounding."""
_PART_OF_CHANGE = 0.5
"""The fraction of the largest change by a removal above which rounding hides it, so that rounding is no excuse for errors."""
_PASSES_OF_GRADIENT = 3
"""The approximate time of a forward and a backward pass, in forward passes."""
_GROWING = {"DynamicLayer", "DynamicSlidingWindowLayer"}
"""The cache layers of transformers that only hold keys and values and append new ones."""


@dataclass
class EffectRun:
    """Removals from one text: each item of `plan` is a set of parts that are removed together. `run` computes `results`, the
    changes by each item at `position`, or of what `metric` gives. `masked` are items whose edges were masked already."""

    model: Any
    inputs: Mapping[str, Any]
    plan: Sequence[tuple[Removal, ...]]
    position: int
    target: Target | None = None
    n_verified: int = 4
    n_screened: int | None = None
    metric: GivenMetric | None = None
    has_batches: bool = True
    results: dict[int, Changes] = field(default_factory=dict)
    masked: set[int] = field(default_factory=set)
    estimates: dict[int, float] = field(default_factory=dict)
    n_batches: int = 0
    verified: SelfCheck = SelfCheck.of(0.0, 0.0, n=0, identical=True)  # noqa: RUF009 - frozen
    most_rows: int = TOKENS_AT_ONCE
    _pass_seconds: float = float("inf")
    _floors: list[Changes] = field(default_factory=list)
    _vectors: dict[int, Tensor] = field(default_factory=dict)
    _emptied: set[int] = field(default_factory=set)
    _departed: float = 0.0

    # -------------------------------------------------------------------------------------------------------- the passes

    @cached_property
    @torch.no_grad()
    def untouched(self) -> Reading:
        """The output of a plain pass without capture."""
        return self._timed_read()

    @cached_property
    @torch.no_grad()
    def _found(self) -> tuple[Parts, Reading]:
        """The parts of the model, found in one pass in which every z was replaced by itself, and its output."""
        parts = Parts()
        with finding(self.model, parts, self.position):
            reading = self._timed_read()
        if not parts.z:
            raise MhaError(
                "an attention gives no head outputs that could be replaced",
                hint="its z is not seen where a model computes attention in a way of its own",
                code="no-attention",
            )
        return parts, reading

    @cached_property
    @torch.no_grad()
    def parts(self) -> Parts:
        """The parts that run of the smallest segment of the text that reproduces the plain pass."""
        for shorten in (self._behind_cache, self._one_behind):
            try:
                found = shorten(self._found[0])
            except MhaError:  # the model cannot continue from its own cache, or needs other positions
                continue
            if found is not None and self._is_rounding(found[1]):
                return found[0]
        return self._found[0]

    def _behind_cache(self, whole: Parts) -> tuple[Parts, Reading] | None:
        """A segment that begins where the first removal does, and its output without removals. None if the model has no cache,
        or one that holds other things than keys and values of each token."""
        start = self._first_changed
        can_cache = set(self.inputs) == {"input_ids"} and getattr(
            getattr(self.model, "config", None), "use_cache", False
        )
        if start == 0 or not can_cache or not self.has_batches:
            return None
        begin = self.inputs["input_ids"][:, :start]
        past = run_model(self.model, lambda: self.model.base_model(input_ids=begin, use_cache=True)).get(
            "past_key_values"
        )
        if past is None or not {type(layer).__name__ for layer in past.layers} <= _GROWING:
            return None
        segment = replace(whole, start=start, past=past, blocks=[], outputs=[])
        with blocks_seen(self.model, segment):
            return segment, self._read(segment)

    @property
    def _first_changed(self) -> int:
        """The first position at which a removal changes anything that the measured position may read."""
        return min([removal.first for item in self.plan for removal in item] + [self.position])

    def _one_behind(self, whole: Parts) -> tuple[Parts, Reading] | None:
        """The whole text, with the modules after all attentions running only at the measured position."""
        segment = replace(whole, alone=whole.behind)
        return (segment, self._read(segment)) if segment.alone and self.has_batches else None

    def _read(self, parts: Parts | None = None, n_rows: int = 1, n_skipped: int = 0) -> Reading:
        """The output of one pass over `n_rows` copies of the text, or of the segment that `parts` run."""
        if parts is None:
            return read(self.model, self.inputs, self.position, self.metric)
        inputs, position = self.inputs, self.position - parts.start
        if parts.past is not None:
            inputs = {"input_ids": inputs["input_ids"][:, parts.start : self.position + 1]}
        rows = repeated(inputs, n_rows)
        if parts.past is not None:
            rows["past_key_values"] = _rows_of_cache(parts.past, n_rows)
        with parts.entered(n_skipped, n_rows, position):
            return read(self.model, rows, position, self.metric, n_rows=n_rows)

    def _timed_read(self) -> Reading:
        """The output of a pass over the whole text. The fastest pass is taken as its time, because other load only slows."""
        began = perf_counter()
        reading = self._read()
        reading.vector.cpu()  # on a GPU the pass is over only then
        self._pass_seconds = min(self._pass_seconds, perf_counter() - began)
        return reading

    # ------------------------------------------------------------------------------------------------------ the removals

    @property
    def measure(self) -> Literal["d_logit", "d_output"]:
        """The change by which removals are ranked."""
        return "d_output" if self.target is None else "d_logit"

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress) -> None:
        """Computes all removals and verifies some. Raises `MhaError` for an attention that removals cannot reach."""
        report_progress(0.0, "the untouched pass")
        items = range(len(self.plan)) if self.n_screened is None else self._screened(self.n_screened)
        for batch in self._batches(items):
            self._run_batch(batch)
            report_progress(min(1.0, len(self.results) / len(items)), "removing")
        self._verify()

    def foresee(self, facts: CheckpointFacts | None, available: int) -> tuple[int, float, int]:
        """Sets the number of rows of a batch; the number of removals, the predicted seconds, and the largest memory in addition
        to the weights. Raises `MhaError` if not even one row fits in memory."""
        most, n_tokens = rows_at_once(self.inputs), _n_tokens(self.inputs)
        if facts is not None:
            facts.rows_that_fit(most, available, n_run=n_tokens - self._first_changed)  # at best
            _ = self.untouched
            most = facts.rows_that_fit(most, available, n_run=n_tokens - self.parts.start)
        self.most_rows = most
        n_removals = len(self.plan) if self.n_screened is None else min(2 * self.n_screened, len(self.plan))
        batches = [*self._batches(range(n_removals))]
        n_run, n_blocks, passes = n_tokens - self.parts.start, max(1, len(self.parts.blocks)), 0.0
        for batch in batches:
            part = 1 - self.parts.n_skipped(self._layers_of(batch)) / n_blocks
            passes += (len(batch) + _N_UNTOUCHED) * part * n_run / n_tokens
        passes += min(self.n_verified, n_removals) + _N_SHAKEN + _PASSES_OF_GRADIENT * (self.n_screened is not None)
        rows = max(map(len, batches), default=0) + _N_UNTOUCHED
        return n_removals, passes * self._pass_seconds, 0 if facts is None else facts.removal_bytes(rows, n_run)

    def _layers_of(self, items: Sequence[int]) -> set[LayerKey]:
        return {removal.layer for item in items for removal in self.plan[item]}

    def _batches(self, items: Sequence[int]) -> Iterator[list[int]]:
        """The batches of items: those that begin at the same layer. With few tokens, reading the weights costs more than
        computing a layer again, so items of several layers share a batch."""
        n_items = max(1, min(self.most_rows, rows_at_once(self.inputs)) - _N_UNTOUCHED) if self.has_batches else 1
        for _, alike in groupby(items, key=lambda item: self.parts.start > 0 or self.plan[item][0].layer):
            while batch := list(islice(alike, n_items)):
                yield batch

    def _run_batch(self, items: Sequence[int]) -> None:
        """The changes by some items: in a batch that begins and ends with a row without removals, or by one item in a pass of a
        model without batches."""
        rows = [self.plan[item] for item in items]
        first_row = int(self.has_batches)
        if self.has_batches:
            rows = [(), *rows, ()]
        remover = Remover(rows, self.parts.z, start=self.parts.start)
        with captured(self.model, remover, batch=len(rows)):
            reading = self._read(self.parts, len(rows), self.parts.n_skipped(self._layers_of(items)))
        if remover.n_removed != sum(map(len, rows)):
            raise MhaError("an attention was not computed, and nothing could be removed", code="no-attention")
        first = reading.row(0) if self.has_batches else self.untouched
        all_rows = changes(reading, first, self.target)
        if self.has_batches:
            self._floors += [_row_of(all_rows, -1), _row_of(changes(first, self.untouched, self.target), 0)]
            self._departed = max(self._departed, _apart(first, self.untouched))
        self.n_batches += 1
        for row, item in enumerate(items, first_row):
            if row in remover.emptied:
                self._emptied.add(item)
            if self.plan[item][0].keys is not None and row not in remover.seen:
                self.masked.add(item)
            self._vectors[item] = reading.vector[row]
            self.results[item] = _row_of(all_rows, row)

    # ----------------------------------------------------------------------------------------------------- the estimates

    def _screened(self, n: int) -> list[int]:
        """The removals to compute: `n` with the largest first-order estimates, and `n` others."""
        gradients = self._z_gradients()
        for item, removals in enumerate(self.plan):
            if all(removal.layer in gradients for removal in removals):
                self.estimates[item] = sum(self._first_order(removal, gradients) for removal in removals)
        return sorted(_largest_and_others(self.estimates, 2 * n))

    def _z_gradients(self) -> dict[LayerKey, Tensor]:
        """The gradient of the measure by the z of each attention. Source: Nanda 2023, Attribution Patching."""
        assert self.target is not None, "a screening needs scores"
        added = dict[LayerKey, Tensor]()

        def take(call: Any) -> Tensor | None:
            if call.part or call.z is None:
                return None
            change = added[call.kind, call.layer] = torch.zeros_like(call.z, requires_grad=True)
            return call.z + change  # type: ignore[no-any-return]

        with torch.enable_grad(), captured(self.model, take, batch=1):
            reading = self._read()
            assert reading.scores is not None
            measure = compared(reading.scores, self.target)[0]
            gradients = torch.autograd.grad(measure, [*added.values()], allow_unused=True)
        return {key: gradient[0] for key, gradient in zip(added, gradients, strict=True) if gradient is not None}

    def _first_order(self, removal: Removal, gradients: Mapping[LayerKey, Tensor]) -> float:
        """The estimated change of the measure by removing heads."""
        z, gradient = self.parts.z[removal.layer][0].double(), gradients[removal.layer].double()
        places = slice(None) if removal.at is None else slice(removal.at, removal.at + 1)
        return sum(
            float(((stand_in(z[head], removal.replace) - z[head])[places] * gradient[head, places]).sum())
            for head in removal.heads
        )

    # -------------------------------------------------------------------------------------------------- the verification

    def floor(self, name: str) -> float:
        """The noise floor of a change: twice the largest of a row without removals, and at least one rounding step."""
        spread = max((abs(float(each[name])) for each in self._floors if name in each), default=0.0)
        scores = self.untouched.scores
        scale = 1.0 if name == "d_output" or scores is None else float(scores.abs().max())
        return max(2 * spread, torch.finfo(dtype_of(self.model)).eps * scale)

    def size(self, item: int) -> float:
        """The size of the change by which removals are ranked, 0 if it is noise."""
        change = float(self.results[item][self.measure])
        return change if abs(change) > self.floor(self.measure) else 0.0

    def _verify(self) -> None:
        """Repeats the items with the largest changes, and as many others, one by one with a second method. The tolerance is
        known before."""
        errors, tolerance = [self._departed], self._tolerance()  # rows without removals must be right too
        is_same = torch.equal(self._found[1].vector, self.untouched.vector)
        sizes = {item: float(self.results[item][self.measure]) for item in self.results if item not in self._emptied}
        for item in _largest_and_others(sizes, self.n_verified):
            with removed_otherwise(self.model, self.plan[item], self._found[0]) as is_done:
                if is_done:
                    errors.append(float((self._read().vector[0] - self._vectors[item]).abs().max()))
        n = len(errors) - 1
        self.verified = SelfCheck.of(max(errors), tolerance, holds=is_same, n=n, identical=is_same)

    def _tolerance(self) -> float:
        """The permitted difference of outputs: that of two runs in the dtype, or, if it is more, what rounding does to this
        model, as long as it hides no change by the removals."""
        usual = self._usual_tolerance
        if not self.n_verified:
            return usual
        largest = max(float((vector - self.untouched.vector[0]).abs().max()) for vector in self._vectors.values())
        return self._moved_by_rounding if usual < self._moved_by_rounding <= largest * _PART_OF_CHANGE else usual

    def _is_rounding(self, reading: Reading) -> bool:
        """Whether rounding explains how an output differs from that of the plain pass."""
        difference = _apart(reading, self.untouched)
        return difference <= self._usual_tolerance or difference <= self._moved_by_rounding

    @cached_property
    @torch.no_grad()
    def _moved_by_rounding(self) -> float:
        """The difference of outputs that rounding makes in this model, added up over its layers. 0 in float64, in which models
        compute only some parts."""
        dtype = str(dtype_of(self.model)).removeprefix("torch.")
        moved = [0.0]
        for seed in range(_N_SHAKEN if dtype != "float64" else 0):
            with shaken_parts(self.model, seed):
                moved.append(_apart(self._read(), self.untouched))
        return TIMES_SHAKEN[dtype] * max(moved)

    @cached_property
    def _usual_tolerance(self) -> float:
        """The permitted difference of outputs in any model. Edges need a new softmax, which models without fused kernels
        compute in float32, whatever their dtype."""
        has_edges = any(removal.keys is not None for item in self.plan for removal in item)
        is_single = has_edges and getattr(getattr(self.model, "config", None), "_attn_implementation", None) == "eager"
        names = [str(dtype_of(self.model)).removeprefix("torch."), *["float32"] * is_single]
        return float(self.untouched.vector.abs().max()) * max(TOLERANCES[name].runs for name in names)


def rows_at_once(inputs: Mapping[str, Any]) -> int:
    """The largest number of rows in a batch, not considering memory."""
    return max(1, TOKENS_AT_ONCE // max(1, _n_tokens(inputs)))


def _n_tokens(inputs: Mapping[str, Any]) -> int:
    """The number of tokens of a row; in a pair, of the longer text."""
    return max((value.shape[1] for value in inputs.values() if isinstance(value, Tensor) and value.ndim > 1), default=1)


def _rows_of_cache(past: Any, n_rows: int) -> Any:
    """A cache with `n_rows` times the keys and values of another, which is not changed: rows are copied as a pass appends."""
    cache = copy.copy(past)
    cache.layers = [copy.copy(layer) for layer in past.layers]
    for layer in cache.layers:
        layer.keys, layer.values = (kept.expand(n_rows, -1, -1, -1) for kept in (layer.keys, layer.values))
    return cache


def _apart(one: Reading, other: Reading) -> float:
    """The largest difference of two outputs."""
    return float((one.vector - other.vector).abs().max())


def _largest_and_others(sizes: Mapping[int, float], n: int) -> list[int]:
    """`n` items: half of them with the largest sizes, the others at random."""
    ranked = sorted(sizes, key=lambda item: -abs(sizes[item]))
    n_top = min(len(ranked), -(-n // 2))
    rest = random.Random(_SEED).sample(ranked[n_top:], min(len(ranked) - n_top, n - n_top))
    return [*ranked[:n_top], *rest]


def _row_of(rows: Changes, row: int) -> Changes:
    """The changes of one row."""
    return {name: change[row] for name, change in rows.items()}
