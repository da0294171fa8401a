"""The study of effects: many removals in a pass, each in a row of its own, some a second time by
other means, and the record.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.core import dtype_name
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.data import finite
from mhacli.io.long_work import Progress, no_progress
from mhacli.layer.run import Setup, record_run
from mhacli.models.capture import Call, captured
from mhacli.models.layer_names import dtype_of
from mhacli.models.load import ModelTokenizer
from mhacli.models.run import TIMES_SHAKEN, CheckpointRun, prepare_checkpoint, shaken_parts
from mhacli.record.checks import TOLERANCES, SelfCheck
from mhacli.record.effect import EFFECT_NUMBERS, Effect, EffectSummary, Screening
from mhacli.record.exports import EffectTable
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.text.tokens import Texts
from mhacli.usercode.door import NO_ANSWER

from .foreign import config_value, copied, crop, has_padding, is_eager
from .metric import (
    GivenMetric,
    Outcomes,
    RowOutputs,
    Target,
    changes,
    measured_position,
    read,
    values,
)
from .parts import Parts, find_parts, repeated
from .plan import Item, RemovalPlan
from .removal import stand_in, without
from .second_method import removed_otherwise
from .settings import EffectSettings

MIN_ROWS = 2
"""The rows of the smallest batch: one removal and an untouched row."""
TOKENS_AT_ONCE = 4096
"""The largest number of tokens in a batch, all rows together."""
PACKED_TOKENS = 512
"""The largest number of tokens in a sequence that holds many rows; attention computes all pairs of
them."""
_MAX_LOGITS = 1 << 24
"""The largest number of logits of a pass with such a sequence: in float64 they take 128 MiB, a few
times."""
_N_PERTURBED_PASSES = 2
"""The number of passes that measure rounding."""
_MAX_ROUNDING = 0.5
"""The fraction of the largest change by a removal above which rounding hides it, so that rounding
is no excuse for errors."""


def study_of(run: CheckpointRun, settings: EffectSettings, record: Record) -> EffectStudy:
    """The study of one text of a checkpoint with its head, whose layers a run has inspected."""
    loaded, inputs = run.loaded, run.inputs.keywords
    return EffectStudy(loaded.model, inputs, settings, run.request, record, loaded.tokenizer, run)


@torch.no_grad()
def checkpoint_study(request: Run, settings: EffectSettings) -> tuple[EffectStudy, tuple[str, ...]]:
    """The study of a checkpoint that is loaded and whose layers are inspected here, and notes for
    the user.
    """
    run, notes = prepare_checkpoint(request, "predict")
    run.request = replace(request, model=replace(request.model, layers=None), keep=())
    record = run.run()
    run.request = request
    return study_of(run, settings, record), notes


@torch.no_grad()
def layer_study(
    run: Run, texts: Texts, settings: EffectSettings
) -> tuple[EffectStudy, tuple[str, ...]]:
    """The study of a layer whose run is recorded here, as a model of one layer, and notes for the
    user. Raises `UsageError` for a layer with dropout, whose runs differ.
    """
    if run.config.train and run.config.dropout:
        raise UsageError("mha effect measures a layer without dropout", hint="leave out --train")
    setup = Setup(run, texts)
    record, _ = record_run(setup)
    x, context = setup.inputs()
    model: Any = nn.Module()
    model.add_module("attention" if context is None else "cross_attention", setup.layer.attention)
    model.out_proj = nn.Identity()  # its input is z in a layer without a projection
    keywords = {"allowed": setup.allowed, "bias": setup.bias, "places": setup.queries.places}

    def forward(query: Tensor, key: Tensor | None) -> Any:
        return model.out_proj(setup.layer.attention(query, key, **keywords)[0])

    model.forward = forward
    return EffectStudy(model.eval(), {"query": x, "key": context}, settings, run, record), run.notes


def effects_of_heads(record: Record) -> list[Effect | None]:
    """What the removal of each head of a record changes; None where it was not measured, as of a
    second call for its heads.
    """
    kinds = {(layer.layer, layer.name): layer.kind for layer in record.layers if layer.call == 1}
    effects: dict[Any, Effect] = {
        (effect.kind, effect.layer, effect.head): effect for effect in record.effects
    }
    return [
        effects.get((kinds.get((head.layer, head.attention)), head.layer, head.head))
        for head in record.heads
    ]


def verified(record: Record, code: str = "self-check") -> Record:
    """A record of effects. Raises `MhaError` if the second computation of removals disagrees."""
    if record.effect is not None and not record.effect.verified.ok:
        raise MhaError(
            "a second computation of the removals disagrees with the first",
            code=code,
            exit_code=EXIT_CHECK,
        )
    return record


class _Result(NamedTuple):
    """The changes by parts that were removed together, and the output without them. Edges may have
    been masked already, or have left a query without any key.
    """

    changes: Mapping[str, float]
    vector: Tensor
    was_masked: bool
    is_emptied: bool


class _AddedChange(NamedTuple):
    """Zeros that were added to the z of a call, for the gradient."""

    call: Call
    z: Tensor
    change: Tensor


@dataclass
class EffectStudy:
    """The removals from one text that settings ask for, and the record of their effects, which
    `run` computes.

    `record` is that of the inspected pass, with all layers; `request` chooses layers and heads
    among them. `inspected` is the run of a checkpoint, which foresees memory. Each item of `plan`
    is a set of parts that are removed together.

    Each pass has a row for each of several items, and a last row without removals. The rows are
    whole texts in a batch; or, if nothing before position `start` changes and the model can
    continue from its cache of keys and values, they are tokens of one sequence, which see those
    before `start` and themselves. A model without batches has a pass for each item.
    """

    model: Any
    inputs: Mapping[str, Any]
    settings: EffectSettings
    request: Run
    record: Record
    tokenizer: ModelTokenizer | None = None
    inspected: CheckpointRun | None = None
    metric: GivenMetric | None = None
    untouched: RowOutputs = field(init=False)
    """The output of a plain pass without capture."""
    target: Target | None = field(init=False)
    parts: Parts = field(init=False)
    plan: Sequence[Item] = field(init=False)
    start: int = field(init=False)
    estimates: dict[int, float] = field(init=False, default_factory=dict)
    results: dict[int, _Result] = field(init=False, default_factory=dict)
    n_passes: int = field(init=False, default=0)
    _noise: dict[str, float] = field(init=False, default_factory=dict)
    _errors: list[float] = field(init=False, default_factory=list)

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress) -> Record:
        """The record of the inspected pass with the effects, of which some are verified. Raises
        `MhaError` for heads and tokens that do not exist, for an attention that removals cannot
        reach, and for removals that do not fit in memory.
        """
        self._prepare()
        if self.inspected is not None and not self.start:  # otherwise a batch is a single short row
            self.inspected.require_room(max(MIN_ROWS, self.most_rows))
        report_progress("the untouched pass", 0.0)
        items: Sequence[int] = range(len(self.plan))
        if self.settings.screen is not None:
            self._estimate()
            items = sorted(_largest_and_others(self.estimates, 2 * self.settings.screen))
        for batch in self._batches(items):
            self._run_batch(batch)
            n_done, n = len(self.results), max(len(self.results), len(items))
            report_progress(f"removal {n_done} of {n}", n_done / n)
        summary = self._summary(self._verified())
        check = self.record.self_check.and_holds(summary.verified.ok)
        table = EffectTable(self._effect(item) for item in sorted(self.results))
        return replace(self.record, self_check=check, effects=table, effect=summary)

    # ------------------------------------------------------------------------------ the preparation

    def _prepare(self) -> None:
        """Finds what is measured and removed, and where passes begin. Each step needs the results
        of those before it.
        """
        self.untouched = self._read()
        self.target = self._outcomes.target()
        self.parts = self._find_parts()
        attentions = self.parts.attentions
        plan = RemovalPlan(self.settings, self.request, self.record, attentions, self.position)
        self.plan = plan.items()
        self.start = self._first_position()

    @cached_property
    def position(self) -> int:
        """The measured position of the text; of a pair, of that of the decoder."""
        return measured_position(self.settings, self.record.sequences[0].tokens)

    @property
    def _outcomes(self) -> Outcomes:
        """What the model chooses from."""
        tokens = self.record.sequences[0].tokens
        return Outcomes(self.model, self.settings, self.untouched, tokens, self.tokenizer)

    def _find_parts(self) -> Parts:
        """The parts of the model. Their output has keys and values if later passes may begin behind
        them.
        """
        settings = self.settings
        begins_later = settings.at is not None or settings.edges or settings.cut is not None
        is_of_ids = self.inputs.keys() == {"input_ids"}
        has_cache = is_of_ids and self.has_batches and config_value(self.model, "use_cache")
        keywords = {"use_cache": True} if begins_later and has_cache else {}
        parts = find_parts(self.model, lambda: self._read(**keywords))
        if not parts.attentions:
            raise MhaError(
                "no attention gives head outputs that could be replaced",
                hint="its z is not seen where a model computes attention in a way of its own",
                code="no-attention",
            )
        return parts

    def _first_position(self) -> int:
        """The position at which passes begin, 0 if rows cannot continue from the keys and values
        before it.
        """
        cache = self.parts.output.cache
        first_changes = (min(part.queries, default=0) for item in self.plan for part in item)
        start = min(self.position, *first_changes)
        if cache is None or not start or (self.position + 1 - start) * MIN_ROWS > PACKED_TOKENS:
            return 0
        try:
            crop(cache, self.inputs["input_ids"].shape[1] - start)
            outputs = self._read_packed(start, MIN_ROWS)
        except NO_ANSWER:  # it needs other positions, or cannot be cut
            return 0
        if len(outputs.vector) != MIN_ROWS:
            return 0
        is_same = _difference(outputs, self.untouched) <= self._usual_tolerance
        return start if is_same else 0

    # ----------------------------------------------------------------------------------- the passes

    @cached_property
    def has_batches(self) -> bool:
        """Whether a pass can have several rows. A classifier of texts without an id for padding
        takes one.
        """
        if self.untouched.measured in ("class", "score") and not has_padding(self.model):
            return False
        return self.metric is None and (hasattr(self.model, "config") or not self.record.layers)

    @cached_property
    def most_rows(self) -> int:
        """The largest number of rows of a pass."""
        if self.start:
            width = self.position + 1 - self.start
            scores = self.untouched.scores
            n_logits = 1 if scores is None else scores.shape[1]
            return min(PACKED_TOKENS // width, _MAX_LOGITS // n_logits)
        lengths = [
            value.shape[1]
            for value in self.inputs.values()
            if isinstance(value, Tensor) and value.ndim > 1
        ]
        return max(1, TOKENS_AT_ONCE // max([1, *lengths]))

    def _read(self, **keywords: Any) -> RowOutputs:
        """The output of a pass over the text."""
        return read(self.model, {**self.inputs, **keywords}, [self.position], self.metric)

    def _read_packed(self, start: int, n_rows: int) -> RowOutputs:
        """The output of one sequence in which the tokens from `start` to the position stand
        `n_rows` times.
        """
        ids = self.inputs["input_ids"][:, start : self.position + 1]
        width = ids.shape[1]
        is_causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        of_rows = torch.block_diag(*[is_causal] * n_rows)
        hidden = ~torch.nn.functional.pad(of_rows, (start, 0), value=True)
        dtype = dtype_of(self.model)
        mask = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
        positions = torch.arange(start, self.position + 1, device=ids.device)
        inputs = {
            "input_ids": ids.repeat(1, n_rows),
            "position_ids": positions.repeat(n_rows)[None],
            "attention_mask": mask[None, None],
            "past_key_values": copied(self.parts.output.cache),
        }
        return read(self.model, inputs, range(width - 1, n_rows * width, width))

    def _batches(self, items: Sequence[int]) -> Iterator[list[int]]:
        """The items of each pass, which all begin at the same layer."""
        n_items = 1
        if self.has_batches:
            n_items = max(1, self.most_rows - (2 if self.start else 1))
        groups = groupby(items, key=lambda item: None if self.start else self.plan[item][0].layer)
        for _, alike in groups:
            while batch := list(islice(alike, n_items)):
                yield batch

    def _run_batch(self, items: Sequence[int]) -> None:
        """The changes by some items, from the last row of the same pass, or from the plain pass of
        a model without batches. The first row of a sequence of rows loses nothing, too.
        """
        is_packed = self.start > 0
        rows = dict(enumerate(items, start=1 if is_packed else 0))
        outputs, visible, emptied = self._pass_without(rows)
        last = outputs.row(-1) if self.has_batches else self.untouched
        moved = changes(outputs, last, self.target)
        for name, noise in changes(last, self.untouched, self.target).items():
            largest = float(noise.abs() + (moved[name][0].abs() if is_packed else 0))
            self._noise[name] = max(self._noise.get(name, 0.0), largest)
        # rows without removals must be right too
        self._errors.append(_difference(last, self.untouched))
        self.n_passes += 1
        for row, item in rows.items():
            of_row = {name: change[row].item() for name, change in moved.items()}
            if item in self.estimates:
                of_row["first_order"] = self.estimates[item]
            vector = outputs.vector[row]
            self.results[item] = _Result(of_row, vector, row not in visible, row in emptied)

    def _pass_without(self, rows: Mapping[int, int]) -> tuple[RowOutputs, set[int], set[int]]:
        """The output of a pass whose rows lose these items of the plan, the rows that lose anything
        that was visible, and those with a query that has no key left.
        """
        is_packed = self.start > 0
        n_rows = max(rows) + (2 if self.has_batches else 1)
        width = self.position + 1 - self.start if is_packed else 0
        removals = {row: self.plan[item] for row, item in rows.items()}
        layers = {removal.layer for item in removals.values() for removal in item}
        visible: set[int] = set()
        emptied: set[int] = set()

        def remove(call: Call) -> Tensor | None:
            of_text = self.parts.z_of(call)
            if call.place not in layers or of_text is None:
                return None
            removed = without(call, removals, start=self.start, width=width, of_text=of_text)
            visible.update(removed.visible)
            emptied.update(removed.emptied)
            return removed.z

        if is_packed:
            with captured(self.model, remove, heads="apart"):
                return self._read_packed(self.start, n_rows), visible, emptied
        inputs = {name: repeated(value, n_rows) for name, value in self.inputs.items()}
        removing = captured(self.model, remove, batch=n_rows, heads="apart")
        with removing, self.parts.skipped(layers, n_rows):
            outputs = read(self.model, inputs, [self.position], self.metric, n_rows=n_rows)
        return outputs, visible, emptied

    def _estimate(self) -> None:
        """Estimates the change by removing each head to first order, by the gradient of the measure
        by the z of each attention. Source: Nanda 2023, Attribution Patching.
        """
        added: list[_AddedChange] = []

        def add(call: Call) -> Tensor | None:
            z = self.parts.z_of(call)
            if z is None or call.z is None:
                return None
            change = torch.zeros_like(z, requires_grad=True)
            added.append(_AddedChange(call, z, change))
            return call.z + change

        with torch.enable_grad(), captured(self.model, add, heads="apart"):
            measure = values(self._read(), self.target)["logit"][0]
            changes_of_z = [each.change for each in added]
            gradients = torch.autograd.grad(measure, changes_of_z, allow_unused=True)
        for item, (removal,) in enumerate(self.plan):
            for (call, of_call, _), gradient in zip(added, gradients, strict=True):
                local = removal.within(call)
                if local is not None and gradient is not None:
                    (head,) = local.heads
                    z = of_call[0, head].double()
                    moved = (stand_in(z, removal.replace) - z) * gradient[0, head].double()
                    change = float(moved[removal.places].sum())
                    self.estimates[item] = self.estimates.get(item, 0.0) + change

    # ----------------------------------------------------------------------------- the verification

    def _verified(self) -> SelfCheck:
        """The check of the items with the largest changes, and of as many others: each is repeated
        with a second method. The tolerance is known before.
        """
        tolerance = self._tolerance()
        sizes = {
            item: result.changes[self._measure]
            for item, result in self.results.items()
            if not result.is_emptied
        }
        errors: list[float] = []
        for item in _largest_and_others(sizes, self.settings.verify):
            second_method = removed_otherwise(self.plan[item], self.parts)
            if second_method is not None:
                with ExitStack() as stack:
                    for context in second_method:
                        stack.enter_context(context)
                    vector = self._read().vector[0]
                errors.append(_largest(vector - self.results[item].vector))
        is_same = torch.equal(self.parts.output.vector, self.untouched.vector)
        worst = max([*self._errors, *errors])
        return SelfCheck.of(worst, tolerance, holds=is_same, n=len(errors), identical=is_same)

    def _tolerance(self) -> float:
        """The permitted difference of outputs: that of two runs in the dtype, or, if it is more,
        what rounding does to this model, as long as it hides no change by the removals.
        """
        dtype = dtype_name(dtype_of(self.model))
        if not self.settings.verify or dtype == "float64":  # models compute only some parts in it
            return self._usual_tolerance
        rounding = 0.0
        for seed in range(_N_PERTURBED_PASSES):
            with shaken_parts(self.model, seed):
                difference = _difference(self._read(), self.untouched)
            rounding = max(rounding, TIMES_SHAKEN[dtype] * difference)
        before = self.untouched.vector[0]
        largest = max(_largest(result.vector - before) for result in self.results.values())
        is_excuse = rounding <= largest * _MAX_ROUNDING
        return max(rounding, self._usual_tolerance) if is_excuse else self._usual_tolerance

    @property
    def _usual_tolerance(self) -> float:
        """The permitted difference of outputs in any model. Edges need a new softmax, which models
        without fused kernels compute in float32, whatever their dtype.
        """
        tolerance = TOLERANCES[dtype_name(dtype_of(self.model))].runs
        has_edges = self.settings.edges or self.settings.cut is not None
        if has_edges and is_eager(self.model):
            tolerance = max(tolerance, TOLERANCES["float32"].runs)
        return _largest(self.untouched.vector) * tolerance

    # ----------------------------------------------------------------------------------- the record

    @property
    def _measure(self) -> Literal["d_logit", "d_output"]:
        """The change by which removals are ranked."""
        return "d_output" if self.target is None else "d_logit"

    def _floor(self, name: str) -> float:
        """The noise floor of a change: twice the largest of a row without removals, and at least
        one rounding step.
        """
        scores = self.untouched.scores
        scale = 1.0 if name == "d_output" or scores is None else _largest(scores)
        return max(2 * self._noise.get(name, 0.0), torch.finfo(dtype_of(self.model)).eps * scale)

    def _change(self, item: int, name: str) -> float | None:
        """A change by a removal, 0 if it is noise, or its estimate; None if it was not measured."""
        value = self.results[item].changes.get(name)
        if value is None or name == "rank":
            return value
        floor = self._floor(self._measure if name == "first_order" else name)
        return value if abs(value) > floor else 0.0

    def _effect(self, item: int) -> Effect:
        """The effect of an item."""
        removals = self.plan[item]
        kind = self._kind_of(removals)
        first = removals[0]
        numbers: dict[str, Any] = {name: self._change(item, name) for name in EFFECT_NUMBERS}
        kinds = tuple(removal.layer[0] for removal in removals)
        is_single = len(removals) == 1
        return Effect(
            layer=first.layer[1] if is_single else None,
            kind=first.layer[0],
            head=first.heads[0] if is_single and first.heads else None,
            query=first.queries[0] if kind == "edge" else None,
            key=first.keys[0] if kind == "edge" else None,
            removed=kind,
            replace=first.replacement,
            at=first.at,
            heads=tuple((r.layer[1], r.heads[0]) for r in removals) if kind == "heads" else (),
            spans=self.settings.cut or (),
            layers=tuple(r.layer[1] for r in removals) if kind == "spans" else (),
            masked=self.results[item].was_masked,
            kinds=kinds if len(set(kinds)) > 1 else (),
            **numbers,
        )

    def _kind_of(self, removals: Item) -> Literal["head", "heads", "edge", "spans"]:
        """What an item removes."""
        if self.settings.cut is not None:
            return "spans"
        if len(removals) > 1:
            return "heads"
        return "edge" if removals[0].keys else "head"

    def _summary(self, check: SelfCheck) -> EffectSummary:
        """What was measured, with the check of the effects."""
        outcome = None if self.target is None else self.target.outcome
        versus = None if self.target is None else self.target.versus
        numbers: dict[str, Any] = dict.fromkeys(("logit", "logprob", "rank"))
        for name, value in values(self.untouched, self.target).items():
            numbers[name] = value[0].item()
        n_largest = self.settings.screen
        return EffectSummary(
            metric=self._measure,
            position=self.position,
            target=None if outcome is None else self._outcomes.name(outcome),
            target_id=outcome,
            versus=None if versus is None else self._outcomes.name(versus),
            versus_id=versus,
            **numbers,
            floor=self._floor(self._measure),
            n_passes=self.n_passes,
            verified=check,
            screening=None if n_largest is None else self._screening(n_largest),
            measured=self.untouched.measured,
        )

    def _screening(self, n: int) -> Screening:
        """The rank correlation of the sizes of estimates and computed effects, None if either are
        all equal.
        """
        names = "first_order", self._measure
        rows = [[abs(self._change(item, name) or 0.0) for item in self.results] for name in names]
        sizes = torch.tensor(rows, dtype=torch.float64)
        ranks = torch.sign(sizes[:, :, None] - sizes[:, None]).sum(dim=2)
        correlation = finite(round(float(torch.corrcoef(ranks)[0, 1]), 12))
        n_largest = min(n, len(self.estimates))
        return Screening(len(self.estimates), n_largest, len(self.results) - n_largest, correlation)


def _largest(x: Tensor) -> float:
    """The largest size of a number."""
    return float(x.abs().max())


def _difference(one: RowOutputs, other: RowOutputs) -> float:
    """The largest difference of two outputs."""
    return _largest(one.vector - other.vector)


def _largest_and_others(sizes: Mapping[int, float], n: int) -> list[int]:
    """`n` items: half of them with the largest sizes, the others at random."""
    ranked = sorted(sizes, key=lambda item: -abs(sizes[item]))
    n_top = min(len(ranked), -(-n // 2))
    n_others = min(len(ranked) - n_top, n - n_top)
    return ranked[:n_top] + random.Random(0).sample(ranked[n_top:], n_others)
