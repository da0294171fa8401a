"""The change of a checkpoint's output when parts of its attention are removed: many removals in a batch, each checked.

The first and last row of every batch are without removals. Their difference is the noise floor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby, islice
from time import perf_counter
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from mhacli.attention.memory import CheckpointFacts
from mhacli.commands.effect.first_order import first_order, z_gradients
from mhacli.commands.effect.metric import Changes, Reading, Target, changes, read_position
from mhacli.commands.effect.parts import ModelParts, find_parts
from mhacli.commands.effect.prefix import Segment, later_segment, one_token_behind
from mhacli.commands.effect.proof import removed_otherwise
from mhacli.commands.effect.removal import Removal, Remover
from mhacli.errors import MhaError
from mhacli.io.progress import Progress, no_progress
from mhacli.models.capture import captured
from mhacli.models.layer_names import LayerKey
from mhacli.models.load import Loaded
from mhacli.models.rounding import TIMES_SHAKEN, shaken_parts
from mhacli.record.checks import TOLERANCES, SelfCheck

TOKENS_AT_ONCE = 4096
"""The largest number of tokens in a batch, all rows together."""
N_UNTOUCHED = 2
"""The number of rows of a batch without a removal."""
_SEED = 0
_N_SHAKEN = 2
"""The number of passes that measure rounding."""
_PART_OF_CHANGE = 0.5
"""The fraction of the effect of removals above which rounding hides them."""
_PASSES_OF_GRADIENT = 3
"""The approximate time of a forward and a backward pass, in forward passes."""
_Pass = TypeVar("_Pass", Reading, ModelParts)
_NOTHING_VERIFIED = SelfCheck.of(0.0, 0.0, n=0, identical=True)


def rows_at_once(keywords: Mapping[str, Tensor]) -> int:
    """The largest number of rows in a batch, not considering memory."""
    return TOKENS_AT_ONCE // max(tensor.shape[1] for tensor in keywords.values())


class Cost(NamedTuple):
    """The predicted cost of removals: their number, the time, and the largest memory in addition to the weights."""

    n_removals: int
    seconds: float
    peak_bytes: int


@dataclass
class EffectRun:
    """Removals from one text: each item of `plan` is a set of parts that are removed together. `run` computes `results`, the
    changes by each item at `position`. `masked` are items whose edges were masked already."""

    loaded: Loaded
    keywords: Mapping[str, Tensor]
    plan: Sequence[tuple[Removal, ...]]
    position: int
    target: Target | None = None
    n_verified: int = 4
    n_screened: int | None = None
    results: dict[int, Changes] = field(default_factory=dict)
    masked: set[int] = field(default_factory=set)
    estimates: dict[int, float] = field(default_factory=dict)
    n_batches: int = 0
    verified: SelfCheck = _NOTHING_VERIFIED
    most_rows: int = TOKENS_AT_ONCE
    _pass_seconds: float = float("inf")
    _floors: list[Changes] = field(default_factory=list)
    _hidden: dict[int, Tensor] = field(default_factory=dict)
    _emptied: set[int] = field(default_factory=set)
    _departed: float = 0.0

    @cached_property
    def untouched(self) -> Reading:
        """The output of a plain pass without capture."""
        return self._timed(lambda: read_position(self.loaded.model, self.keywords, self.position))

    @cached_property
    def parts(self) -> ModelParts:
        """The parts of the model, found in one pass. Raises `MhaError` for an attention that removals cannot reach."""
        return self._timed(lambda: find_parts(self.loaded.model, self.keywords, self.position))

    @cached_property
    @torch.no_grad()
    def segment(self) -> Segment:
        """The smallest segment of the text that reproduces the plain pass."""
        model, whole = self.loaded.model, Segment(self.keywords, self.position, self.parts.entries)
        for find in (partial(later_segment, start=self._first_changed), one_token_behind):
            found = find(model, whole)
            if found is not None and self._is_rounding(float((found[1].hidden - self.untouched.hidden).abs().max())):
                return found[0]
        return whole

    @property
    def _first_changed(self) -> int:
        """The first position at which a removal changes anything that the measured position may read."""
        return min([removal.first for item in self.plan for removal in item] + [self.position])

    @torch.no_grad()
    def _timed(self, run: Callable[[], _Pass]) -> _Pass:
        """The output of a pass over the whole text. The fastest pass is taken as its time, because other load only slows."""
        began = perf_counter()
        given = run()
        given.hidden.cpu()  # on a GPU the pass is over only then
        self._pass_seconds = min(self._pass_seconds, perf_counter() - began)
        return given

    @property
    def metric(self) -> Literal["d_logit", "d_output"]:
        """The change by which removals are ranked."""
        return "d_output" if self.target is None else "d_logit"

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress) -> None:
        """Computes all removals and verifies some. Raises `MhaError` for an attention that removals cannot reach."""
        report_progress(0.0, "the untouched pass")
        parts = self.parts
        items = range(len(self.plan)) if self.n_screened is None else self._screened(parts, self.n_screened)
        for batch in self._batches(items):
            self._run_batch(batch, parts.attention.z)
            report_progress(min(1.0, len(self.results) / len(items)), "removing")
        self._verify(parts)

    def foresee(self, facts: CheckpointFacts, available: int) -> Cost:
        """Sets the number of rows of a batch and returns the cost. Raises `MhaError` if not even one row fits in memory."""
        most = rows_at_once(self.keywords)
        facts.rows_that_fit(most, available, n_run=facts.length - self._first_changed)  # at best
        _ = self.untouched
        self.most_rows = facts.rows_that_fit(most, available, n_run=self.segment.n_tokens)
        n_removals = len(self.plan) if self.n_screened is None else min(2 * self.n_screened, len(self.plan))
        batches = [*self._batches(range(n_removals))]
        rows = [len(batch) + N_UNTOUCHED for batch in batches]
        passes = sum(n * self._part_of_pass(batch) for n, batch in zip(rows, batches, strict=True))
        passes += min(self.n_verified, n_removals) + _PASSES_OF_GRADIENT * (self.n_screened is not None)
        seconds = passes * self._pass_seconds + len(batches) * self.segment.seconds
        return Cost(n_removals, seconds, facts.removal_bytes(max(rows, default=0), self.segment.n_tokens))

    def _part_of_pass(self, batch: Sequence[int]) -> float:
        """The fraction of a full pass that each row of a batch runs: without the blocks and tokens that are not computed
        again."""
        before, n_blocks = self.segment.entries.before, len(self.parts.entries.blocks)
        skipped = min(before.get(removal.layer, 0) for item in batch for removal in self.plan[item])
        n_tokens = max(tensor.shape[1] for tensor in self.keywords.values())
        return self.segment.n_tokens / n_tokens * (1 - skipped / max(1, n_blocks))

    def size(self, item: int) -> float:
        """The size of the change by which removals are ranked, 0 if it is noise."""
        change = float(getattr(self.results[item], self.metric))
        return change if abs(change) > self.floor(self.metric) else 0.0

    def _screened(self, parts: ModelParts, n: int) -> list[int]:
        """The removals to compute: `n` with the largest estimates, and `n` others."""
        assert self.target is not None, "a screening needs a language head"
        gradients = z_gradients(self.loaded.model, parts.attention, self.keywords, self.position, self.target)
        z = parts.attention.z
        estimates = {item: first_order(removals, gradients, z) for item, removals in enumerate(self.plan)}
        self.estimates = {item: estimate for item, estimate in estimates.items() if estimate is not None}
        if not self.estimates:
            raise MhaError(
                "no output projection of an attention is found, whose gradient a first-order estimate needs",
                hint="remove the heads without estimates",
                code="no-attention",
            )
        return sorted(largest_and_others(self.estimates, 2 * n))

    def _batches(self, items: Sequence[int]) -> Iterator[list[int]]:
        """The batches of items: those that begin at the same layer. With few tokens, reading the weights costs more than
        computing a layer again, so items of several layers share a batch."""
        n_items = max(1, min(self.most_rows, rows_at_once(self.keywords)) - N_UNTOUCHED)
        for _, alike in groupby(items, key=lambda item: self.segment.start > 0 or self.plan[item][0].layer):
            while batch := list(islice(alike, n_items)):
                yield batch

    def _run_batch(self, items: Sequence[int], z: Mapping[LayerKey, Tensor]) -> None:
        segment = self.segment
        rows = [(), *(self.plan[item] for item in items), ()]
        remover = Remover(rows, z, start=segment.start)
        model, attentions = self.loaded.model, [*segment.entries.before]
        layers = {removal.layer for row in rows for removal in row}
        first_layer = next((layer for layer in attentions if layer in layers), rows[1][0].layer)
        with captured(model, remover, batch=len(rows)), segment.entries.entered(first_layer, len(rows)):
            reading = segment.read(model, len(rows))
        if remover.n_removed != sum(map(len, rows)):
            raise MhaError(
                "an attention gives no head outputs that could be replaced",
                hint="its z is not seen where a model computes attention in a way of its own",
                code="no-attention",
            )
        first = Reading(reading.hidden[:1], None if reading.logits is None else reading.logits[:1])
        all_rows = changes(reading, first, self.target)
        self._emptied |= {items[row - 1] for row in remover.emptied}
        edges = {row for row, removals in enumerate(rows) if removals and removals[0].keys is not None}
        self.masked |= {items[row - 1] for row in edges - remover.seen}
        self._floors += [
            row_of(all_rows, -1),
            row_of(changes(first, self.untouched, self.target), 0),
        ]
        self._departed = max(self._departed, float((first.hidden - self.untouched.hidden).abs().max()))
        self.n_batches += 1
        self._hidden |= {item: reading.hidden[row].to(model.dtype) for row, item in enumerate(items, 1)}
        # the results are set last, because another thread reads them if the run is interrupted
        self.results |= {item: row_of(all_rows, row) for row, item in enumerate(items, 1)}

    @property
    def floor(self) -> Floor:
        """The noise floor of each change."""
        return floor_of(self._floors, self.untouched, self.loaded.model.dtype)

    def _verify(self, parts: ModelParts) -> None:
        """Repeats the items with the largest changes, and as many others, one by one with a second method."""
        model = self.loaded.model
        errors, moved = [], [0.0]
        is_same = torch.equal(parts.hidden, self.untouched.hidden)
        for item in largest_and_others(self._sizes(), self.n_verified):
            with removed_otherwise(model, self.plan[item], parts.attention) as is_done:
                if is_done:
                    again = read_position(model, self.keywords, self.position).hidden[0]
                    errors.append(float((again - self._hidden[item]).abs().max()))
                    moved.append(float((again - self.untouched.hidden[0]).abs().max()))
        worst = max([self._departed, *errors])  # rows without removals must be right too
        tolerance = self._tolerance
        if worst > tolerance and worst <= max(moved) * _PART_OF_CHANGE:
            tolerance = max(tolerance, min(self._moved_by_rounding, max(moved) * _PART_OF_CHANGE))
        self.verified = SelfCheck.of(worst, tolerance, holds=is_same, n=len(errors), identical=is_same)

    def _is_rounding(self, difference: float) -> bool:
        """Whether rounding explains a difference between two computations."""
        return difference <= self._tolerance or difference <= self._moved_by_rounding

    @cached_property
    @torch.no_grad()
    def _moved_by_rounding(self) -> float:
        """The difference of outputs that rounding makes in this model, added up over its layers. 0 in float64, in which models
        compute only some parts."""
        model = self.loaded.model
        if model.dtype == torch.float64:
            return 0.0
        moved = []
        for seed in range(_N_SHAKEN):
            with shaken_parts(model, seed):
                shaken = read_position(model, self.keywords, self.position)
            moved.append(float((shaken.hidden - self.untouched.hidden).abs().max()))
        return TIMES_SHAKEN[self.loaded.dtype] * max(moved)

    @property
    def _tolerance(self) -> float:
        """The permitted difference of outputs in any model. Edges need a new softmax, which models without fused kernels
        compute in float32, whatever their dtype."""
        has_edges = any(removal.keys is not None for item in self.plan for removal in item)
        is_single = has_edges and getattr(self.loaded.model.config, "_attn_implementation", None) == "eager"
        runs = max(TOLERANCES[name].runs for name in (self.loaded.dtype, *["float32"] * is_single))
        return float(self.untouched.hidden.abs().max()) * runs

    def _sizes(self) -> dict[int, float]:
        """The sizes of the changes that can be verified."""
        able = (item for item in self.results if item not in self._emptied)
        return {item: float(getattr(self.results[item], self.metric)) for item in able}


Floor = Callable[[str], float]
"""Maps the name of a change to its noise floor."""


def floor_of(spreads: Sequence[Changes], untouched: Reading, dtype: torch.dtype) -> Floor:
    """Twice the largest change of a row without removals, and at least one rounding step."""

    def floor(name: str) -> float:
        spread = max(abs(float(getattr(each, name))) for each in spreads)
        scale = 1.0 if name == "d_output" or untouched.logits is None else float(untouched.logits.abs().max())
        return max(2 * spread, torch.finfo(dtype).eps * scale)

    return floor


def largest_and_others(sizes: Mapping[int, float], n: int) -> list[int]:
    """`n` items: half of them with the largest sizes, the others at random."""
    ranked = sorted(sizes, key=lambda item: -abs(sizes[item]))
    n_top = min(len(ranked), -(-n // 2))
    rest = random.Random(_SEED).sample(ranked[n_top:], min(len(ranked) - n_top, n - n_top))
    return [*ranked[:n_top], *rest]


def row_of(rows: Changes, row: int) -> Changes:
    """The changes of one row."""
    d_output, *of_tokens = rows
    return Changes(d_output[row], *(None if part is None else part[row] for part in of_tokens))
