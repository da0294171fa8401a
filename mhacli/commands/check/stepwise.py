"""Calls a user's attention step by step with its cache, compares with one call, and explains differences."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

import torch
from torch import Tensor

from mhacli.attention.mistakes import BY_CODE, MistakeVariant
from mhacli.attention.mistakes.caching import (
    CACHE_LAYOUTS,
    TOP_LEFT_CHUNKS,
    UNMASKED,
    DecodingStep,
    ProjectedText,
    projected_text,
    right_layout,
    step_output,
)
from mhacli.attention.mistakes.stages import SourceHints
from mhacli.commands.check.candidates import counts_of
from mhacli.commands.check.diagnose import Diagnosis
from mhacli.commands.check.findings import finding_of
from mhacli.commands.check.hypotheses import stages_with
from mhacli.commands.check.inputs import TOLERANCE, Examined, max_error
from mhacli.commands.check.probes import Probed
from mhacli.commands.check.result import Finding, ProbeResult
from mhacli.usercode.call.signature import signature_of
from mhacli.usercode.call.user_attention import UserAttention, drawer_of
from mhacli.usercode.inputs import float64_copy
from mhacli.usercode.operations import watch
from mhacli.usercode.process import SourceLine, Stage
from mhacli.usercode.stepwise import (
    CacheSizes,
    StepConvention,
    StepResults,
    cache_grows,
    cache_is_kept,
    step_conventions,
)
from mhacli.usercode.target import Choice
from mhacli.usercode.types import Inputs, MaskForm, Operation
from mhacli.usercode.user_module import limited

_MOST_TRIED, _ROOM, _FEWEST = 160, 4, 4
"""The most conventions to try, the free room of a cache beyond the text, and the shortest text."""
_SLOW_S = 0.05


@dataclass(frozen=True)
class Stepwise:
    """The result: findings, choices, the cache probe, the `names` of the arguments passed, and notes for callers that are no
    mistakes."""

    findings: tuple[Finding, ...] = ()
    choices: tuple[Choice, ...] = ()
    probes: tuple[ProbeResult, ...] = ()
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _SteppedText:
    """A text to call in steps. `full` caches the outputs of single calls by length."""

    caller: UserAttention
    rows: Tensor
    mask: MaskForm | None
    full: dict[int, Tensor] = field(default_factory=dict)

    def whole(self, end: int) -> Tensor:
        """The output of a fresh copy for the first tokens in one call."""
        if end not in self.full:
            call = self.caller.built.call
            fresh = self.caller.of(
                copy.deepcopy(call) if self.caller.built.module is not None else call, self.caller.dtype
            )
            allowed = None if self.mask is None else torch.ones(end, end, dtype=torch.bool).tril()[None, None]
            output = fresh(Inputs(self.rows[:, :end], allowed=allowed), mask=self.mask)
            self.full[end] = output.out.detach().to("cpu", torch.float64)
        return self.full[end]

    def outcome(self, stepped: StepResults, ends: Sequence[int]) -> StepwiseRun:
        """The outputs of the steps beside those of single calls."""
        starts = (0, *ends[:-1])
        expected = tuple(self.whole(end)[:, start:end] for start, end in zip(starts, ends, strict=True))
        largest = max(float(out.abs().nan_to_num().max()) for out in expected)
        return StepwiseRun(tuple(ends), stepped.outs, expected, max(largest, 1e-30) * TOLERANCE)


def examine_stepwise(examined: Examined, probed: Probed, diagnosis: Diagnosis, seed: int, stage: Stage) -> Stepwise:
    """Runs a prefill with single steps, token by token, and chunks, with each convention until one matches a single call. Empty
    if the subject takes no cache, or if no convention works."""
    caller = replace(examined.subject, is_forgetful=False)
    if caller.mode == "cross" or probed.facts.is_random or caller.sizes.q_len < _FEWEST:
        return Stepwise()
    caller = _in_unused_module(caller, stage)
    rows = drawer_of(caller, seed).rows(caller.sizes.q_len).to(caller.dtype)
    mask = _causal_form(probed)
    text = _SteppedText(caller, rows, mask)
    failing: list[tuple[StepConvention, list[StepwiseRun]]] = []
    slow = probed.facts.call_s > _SLOW_S
    for convention in islice(
        step_conventions(caller, _sizes_of(caller, diagnosis), mask), _MOST_TRIED // (8 if slow else 1)
    ):
        outcomes = _runs_of(convention, text)
        if outcomes and all(outcome.is_right for outcome in outcomes):
            return _matching(convention, outcomes)
        if outcomes:
            failing.append((convention, outcomes))
            if _is_final(failing):
                break
    if not failing:
        return Stepwise()
    return _failing(*failing[0], text, diagnosis, probed)


def _in_unused_module(caller: UserAttention, stage: Stage) -> UserAttention:
    """The subject with its weights in a new module, so that no cache holds earlier calls; the subject itself if it cannot be
    rebuilt."""
    module = caller.built.module
    if module is None:
        return caller
    try:
        built = limited(caller.built.rebuild({}), stage)
        assert built.module is not None
        weights = dict(module.named_parameters())
        for name, parameter in built.module.named_parameters():
            parameter.data = weights[name].detach().clone()
        module_on_device = built.module.to(caller.device)
        call = float64_copy(module_on_device) if caller.dtype == torch.float64 else module_on_device
        return caller.of(call, caller.dtype)
    except Exception:  # the second build may raise anything
        return caller


def _is_final(failing: list[tuple[StepConvention, list[StepwiseRun]]]) -> bool:
    """Whether further conventions cannot help: the whole rotation table and a position were passed, or enough were tried."""
    first = failing[0][0]
    return (first.is_table_whole and bool(first.position_arguments)) or len(failing) >= 6


def _causal_form(probed: Probed) -> MaskForm | None:
    """A working query-by-key mask form, unless the subject is causal by itself."""
    form = probed.facts.mask
    if probed.facts.visible != "full" or form is None or not {"query", "key"} <= set(form.axes):
        return None
    return form


def _sizes_of(caller: UserAttention, diagnosis: Diagnosis) -> CacheSizes:
    """The sizes of the cache, from the diagnosed layer or the constructor's arguments."""
    layer = None if diagnosis.candidate is None else diagnosis.candidate.layer
    batch, length = caller.sizes.batch, caller.sizes.q_len + _ROOM
    if layer is None or layer.weights is None:
        n_heads = next(iter(counts_of(caller.built, caller.built.module, "n_heads")), 1)
        width = max(1, caller.sizes.d_in // n_heads)
        return CacheSizes(batch, length, n_heads, width, width, caller.dtype, caller.device)
    d_v = layer.weights.v.weight.shape[0] // layer.n_kv_heads
    return CacheSizes(batch, length, layer.n_kv_heads, layer.d_head or d_v, d_v, caller.dtype, caller.device)


# -------------------------------------------------------------------------------------------------------------------- runs


def _runs_of(convention: StepConvention, text: _SteppedText) -> list[StepwiseRun]:
    """The runs of a prefill with single steps, of single tokens, and of chunks if accepted; empty if the convention fails."""
    length = text.rows.shape[1]
    prefill = (length - 2, length - 1, length)
    try:
        stepped = convention(text.rows, prefill)
        if not _remembers(convention, stepped, text, prefill):
            return []
        outcomes = [text.outcome(stepped, prefill)]
    except Exception:  # the convention does not fit
        return []
    for ends in (tuple(range(1, length + 1)), *_chunks(length)):
        try:
            outcomes.append(text.outcome(convention(text.rows, ends), ends))
        except Exception:  # not every attention accepts chunks, or a first step of one token
            continue
    return outcomes


def _chunks(length: int) -> tuple[tuple[int, ...], ...]:
    return ((length - 3, length - 1, length), (2, length))


def _remembers(convention: StepConvention, stepped: StepResults, text: _SteppedText, ends: Sequence[int]) -> bool:
    """Whether there is a cache: the first step stores something, and later steps grow it or depend on it. With a context, the
    cache may hold only its keys; then later steps must depend on the first."""
    by_itself = not convention.passing.names
    if not cache_is_kept(stepped, by_itself=by_itself):
        return False
    has_context = any(True for _ in signature_of(convention.caller.built.call).of_role("context", "kv", "key", "value"))
    if not has_context and (by_itself or not convention.passing.paths or cache_grows(stepped)):
        return True
    changed = text.rows.clone()
    changed[:, : ends[0]] = changed[:, : ends[0]].flip(-1) + 0.5
    changed_run = convention(changed, ends)
    return any(
        max_error(first, second) > 1e-9 for first, second in zip(stepped.outs[1:], changed_run.outs[1:], strict=True)
    )


# ------------------------------------------------------------------------------------------------------------------ verdicts


def _matching(convention: StepConvention, outcomes: Sequence[StepwiseRun]) -> Stepwise:
    error, has_chunks = max(max(outcome.errors) for outcome in outcomes), any(map(is_chunked, outcomes))
    kinds = "token by token, after a prefill" + (", in chunks" if has_chunks else "")
    message = f"{kinds}: the same as in one call ({convention.text})"
    probe = ProbeResult("cache", message, error, True)
    notes = () if has_chunks else (f"not examined: {_LATER_CHUNK}, which raises an error",)
    return Stepwise(probes=(probe,), names=convention.names, notes=notes)


def _failing(
    convention: StepConvention, outcomes: list[StepwiseRun], text: _SteppedText, diagnosis: Diagnosis, probed: Probed
) -> Stepwise:
    failing = [outcome for outcome in outcomes if not outcome.is_right]
    error = max(max(outcome.errors) for outcome in failing)
    is_causal = text.mask is not None or bool(probed.facts.visible == "causal")
    explainer = Explainer(convention, text.rows, diagnosis, is_causal)
    mistakes = explainer.explained(outcomes)
    fails_only_in_chunks = all(is_chunked(outcome) for outcome in failing)
    if fails_only_in_chunks and (not mistakes or _leaves_chunks_to_caller(mistakes[0][1], explainer, failing[0])):
        return _single_steps_only(convention, error, _CHUNK_PROBLEMS[mistakes[0][1].description if mistakes else ""])
    probe = ProbeResult("cache", f"steps give other outputs than one call ({convention.text})", error, False)
    codes: list[tuple[str, MistakeVariant | None]] = [*mistakes] or [(explainer.likeliest(failing), None)]
    findings = tuple(explainer.finding(code, variant, failing, mistakes) for code, variant in codes)
    return Stepwise(findings, (), (probe,), convention.names)


def _leaves_chunks_to_caller(variant: MistakeVariant, explainer: Explainer, outcome: StepwiseRun) -> bool:
    """Whether chunks are unmasked, or masked by torch's `is_causal`, which is meant for a first call."""
    return variant is UNMASKED or (variant is TOP_LEFT_CHUNKS and explainer.is_fused(outcome))


_LATER_CHUNK = "a later step of several tokens with the cache"


_CHUNK_PROBLEMS = {
    "": "gives another output than one call",
    UNMASKED.description: "is not causal",
    TOP_LEFT_CHUNKS.description: "is masked as if it came first",
}


def _single_steps_only(convention: StepConvention, error: float, problem: str) -> Stepwise:
    """The result for a subject that is right except for later chunks, which it does not mask."""
    message = "with a cache it takes one token at a time"
    note = f"{_LATER_CHUNK} {problem}: give one token at a time"
    probe = ProbeResult(
        "cache",
        f"token by token, after a prefill: the same as in one call ({convention.text}); later chunks differ",
        error,
    )
    return Stepwise((), (Choice("single-steps", message),), (probe,), convention.names, (note,))


# ----------------------------------------------------------------------------------------------------------- explanations


@dataclass(frozen=True)
class StepwiseRun:
    """The outputs of steps that end at `ends`, the expected outputs from single calls, and the tolerance."""

    ends: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    expected: tuple[Tensor, ...]
    tolerance: float

    @property
    def errors(self) -> tuple[float, ...]:
        """The largest difference of each step."""
        return tuple(
            max_error(output, expected_output)
            for output, expected_output in zip(self.outputs, self.expected, strict=True)
        )

    @property
    def is_right(self) -> bool:
        """Whether every step matches a single call."""
        return max(self.errors) <= self.tolerance

    def steps(self, *, is_causal: bool) -> list[DecodingStep]:
        """The steps in the form of the cache catalogue."""
        starts = (0, *self.ends[:-1])
        return [DecodingStep(starts[: n + 1], end, is_causal) for n, end in enumerate(self.ends)]


def is_chunked(outcome: StepwiseRun) -> bool:
    """Whether a step after the first has several tokens."""
    return any(end - start > 1 for start, end in zip(outcome.ends, outcome.ends[1:], strict=False))


@dataclass
class Explainer:
    """Finds the cache layout, positions and masks that reproduce the outputs of the steps."""

    convention: StepConvention
    rows: Tensor
    diagnosis: Diagnosis
    is_causal: bool
    errors: dict[str, float] = field(default_factory=dict)

    def explained(self, outcomes: Sequence[StepwiseRun]) -> list[tuple[str, MistakeVariant]]:
        """The smallest set of mistakes that reproduces every output; empty if there is none. If single steps fail and chunks
        match nothing or are only unmasked, single steps alone are explained."""
        candidate = self.diagnosis.candidate
        if candidate is None or candidate.layer.weights is None or candidate.layer.bias is not None:
            return []
        with torch.no_grad():
            try:
                text = projected_text(
                    candidate.layer, stages_with(self.diagnosis.mistakes), self.rows.to("cpu", torch.float64)
                )
            except Exception:  # the mistake depends on positions
                return []
            return self._fewest(text, outcomes)

    def _fewest(self, text: ProjectedText, outcomes: Sequence[StepwiseRun]) -> list[tuple[str, MistakeVariant]]:
        single = [outcome for outcome in outcomes if not is_chunked(outcome)]
        mistakes = self._matching_mistakes(text, outcomes)
        has_unmasked_chunks = len(mistakes) > 1 and UNMASKED in [variant for _, variant in mistakes]
        if (not mistakes or has_unmasked_chunks) and any(not outcome.is_right for outcome in single):
            return self._matching_mistakes(text, single) or mistakes
        return mistakes

    def _matching_mistakes(
        self, text: ProjectedText, outcomes: Sequence[StepwiseRun]
    ) -> list[tuple[str, MistakeVariant]]:
        n_keys = self._n_keys(outcomes[0])
        pool = [
            (code, variant) for code, variants in CACHE_LAYOUTS.items() for variant in variants
            if BY_CODE[code].applies(SourceHints(), text.layer)
        ]  # fmt: skip
        matching = [[first] for first in pool if self._matches(text, [first], outcomes, n_keys)]
        if matching:
            return self._chosen_by_n_keys(matching, n_keys)
        pairs = ([first, second] for first, second in product(pool, pool) if first[0] < second[0])
        return next((mistakes for mistakes in pairs if self._matches(text, mistakes, outcomes, n_keys)), [])

    def _matches(
        self,
        text: ProjectedText,
        mistakes: Sequence[tuple[str, MistakeVariant]],
        outcomes: Sequence[StepwiseRun],
        n_keys: int | None,
    ) -> bool:
        """Whether these mistakes reproduce the output of every step."""
        order = list(CACHE_LAYOUTS)
        worst = 0.0
        for outcome in sorted(outcomes, key=lambda item: item.is_right):
            for step, output in zip(outcome.steps(is_causal=self.is_causal), outcome.outputs, strict=True):
                layout = right_layout(step)
                try:
                    for _, variant in sorted(mistakes, key=lambda item: order.index(item[0])):
                        layout = variant.replacement(replace(step, n_keys=n_keys), layout)
                    error = max_error(step_output(text, step, layout), output)
                except (ValueError, IndexError, RuntimeError):  # the layout does not fit these steps
                    return False
                worst = max(worst, error)
                if error > outcome.tolerance:
                    return False
        self.errors["+".join(variant.description for _, variant in mistakes)] = worst
        return True

    def _chosen_by_n_keys(
        self, matching: list[list[tuple[str, MistakeVariant]]], n_keys: int | None
    ) -> list[tuple[str, MistakeVariant]]:
        """Chooses between sets with the same numbers by the number of keys in the scores: a mask keeps all keys, unread rows
        reduce them."""
        end = self.rows.shape[1]
        is_short = n_keys is not None and n_keys < end
        expected = "cache-order" if is_short else "cache-mask"
        codes = {mistakes[0][0] for mistakes in matching}
        if {"cache-order", "cache-mask"} <= codes and n_keys is not None:
            return next(mistakes for mistakes in matching if mistakes[0][0] == expected)
        return matching[0]

    def _operations(self, outcome: StepwiseRun) -> tuple[Operation, ...]:
        try:
            return watch(lambda: self.convention(self.rows, outcome.ends), self.convention.caller.built.files)[1]
        except Exception:  # the call cannot be recorded
            return ()

    def _n_keys(self, outcome: StepwiseRun) -> int | None:
        """The number of keys in the scores of the last step."""
        sizes = []
        for operation in self._operations(outcome):
            if operation.name == "scaled_dot_product_attention" and len(operation.inputs) > 1:
                sizes.append(operation.inputs[1].shape[-2])
            elif operation.name == "softmax" and operation.output.ndim >= 2:
                sizes.append(operation.output.shape[-1])
        return sizes[-1] if sizes else None

    def is_fused(self, outcome: StepwiseRun) -> bool:
        """Whether torch's `scaled_dot_product_attention` makes the causal mask."""
        return any(
            operation.name == "scaled_dot_product_attention" and operation.arguments.get("is_causal") is True
            for operation in self._operations(outcome)
        )

    def likeliest(self, failing: Sequence[StepwiseRun]) -> str:
        """The likeliest code if no layout matches: by the number of keys, and by whether the code uses positions."""
        single = next((outcome for outcome in failing if not is_chunked(outcome)), failing[0])
        n_keys = self._n_keys(single)
        if n_keys is not None and n_keys < self.rows.shape[1]:
            return "cache-order"
        operations = self._operations(single)
        position_pattern = re.compile(BY_CODE["cache-position"].in_source)
        candidate = self.diagnosis.candidate
        is_rotated = candidate is None or candidate.layer.pairing is not None or candidate.layer.weights is None
        uses_positions = is_rotated and any(
            position_pattern.search(operation.source)
            for operation in operations
            if operation.name not in ("view", "reshape")
        )
        return "cache-position" if uses_positions else "cache-order"

    def finding(
        self,
        code: str,
        variant: MistakeVariant | None,
        failing: Sequence[StepwiseRun],
        mistakes: Sequence[tuple[str, MistakeVariant]],
    ) -> Finding:
        """The finding with its evidence and the smallest example."""
        mistake, first = BY_CODE[code], min(failing, key=lambda outcome: (len(outcome.ends), outcome.ends))
        number, error_at_step = next(
            (n, error_at_step) for n, error_at_step in enumerate(first.errors) if error_at_step > first.tolerance
        )
        start = (0, *first.ends)[number]
        n_tokens = first.ends[number] - start
        evidence = f"after {start} tokens a step of {n_tokens} is {error_at_step:.3g} off ({self.convention.text}), "
        evidence += f"in an output whose largest number is {float(first.expected[number].abs().max()):.3g}"
        line = self._line(code, first)
        error = None if variant is None else self.errors["+".join(other.description for _, other in mistakes)]
        if variant is not None:
            match = f"largest difference {error:.2g}, tolerance {first.tolerance:.2g}"
            evidence = f"matches exactly if {variant.description}: {match}\n{evidence}"
        others = tuple(other for other, _ in mistakes if other != code)
        tolerance = None if variant is None else first.tolerance
        finding = finding_of(mistake, evidence, line)
        proof = {"proven": error is not None, "error": error, "tolerance": tolerance, "together_with": others}
        return replace(finding, **proof)  # type: ignore[arg-type]

    def _line(self, code: str, outcome: StepwiseRun) -> SourceLine:
        """The line of the mistake: its positions, the cache update, or its mask."""
        mistake = BY_CODE[code]
        lines = [operation for operation in self._operations(outcome) if operation.line is not None]
        for name in mistake.operations:
            for operation in lines:
                if operation.name == name and re.search(mistake.in_source, operation.source):
                    return operation.at
        return SourceLine(self.convention.caller.built.file)
