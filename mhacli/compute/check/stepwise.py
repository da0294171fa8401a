"""A user's attention asked step by step, with its cache: whether that gives what one call gives, and if not, why."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

import torch
from torch import Tensor

from mhacli.adapters.usercode.asker import float64_copy
from mhacli.adapters.usercode.call.signature import signature_of
from mhacli.adapters.usercode.call.user_attention import UserAttention, drawer_of
from mhacli.adapters.usercode.operations import watch
from mhacli.adapters.usercode.process import SourceLine, Stage
from mhacli.adapters.usercode.stepwise import (
    CacheSizes,
    StepConvention,
    StepResults,
    cache_grows,
    cache_is_kept,
    step_conventions,
)
from mhacli.adapters.usercode.types import Inputs, MaskForm, Operation
from mhacli.attention.mistakes import BY_CODE, MistakeVariant
from mhacli.attention.mistakes.caching import (
    CACHE_LAYOUTS,
    TOP_LEFT_CHUNKS,
    UNMASKED,
    DecodingStep,
    ProjectedText,
    answered,
    projected_text,
    right_layout,
)
from mhacli.attention.mistakes.stages import SourceHints
from mhacli.compute.base.user_module import limited
from mhacli.compute.check.candidates import counts_of
from mhacli.compute.check.diagnose import Diagnosis
from mhacli.compute.check.findings import finding_of
from mhacli.compute.check.hypotheses import stages_with
from mhacli.compute.check.inputs import TOLERANCE, Examined, max_error
from mhacli.compute.check.probes.catalogue import Probed
from mhacli.results.check import Choice, Finding, ProbeResult

_MOST_TRIED, _ROOM, _FEWEST = 160, 4, 4
"""How many ways of stepping are tried, how many keys a cache has room for beyond the text, and how short a text can be."""
_SLOW_S = 0.05


@dataclass(frozen=True)
class Stepwise:
    """What was found: mistakes, choices, the probe that says how it went, the `names` of the arguments that were given, and what
    a caller must know of steps that are no mistake."""

    findings: tuple[Finding, ...] = ()
    choices: tuple[Choice, ...] = ()
    probes: tuple[ProbeResult, ...] = ()
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class _TextInParts:
    """One text, given in parts in the ways of one examination. `full` remembers what one call with its beginning answers."""

    caller: UserAttention
    rows: Tensor
    mask: MaskForm | None
    full: dict[int, Tensor] = field(default_factory=dict)

    def whole(self, end: int) -> Tensor:
        """What a fresh copy answers to the first tokens at once."""
        if end not in self.full:
            call = self.caller.built.call
            fresh = self.caller.of(
                copy.deepcopy(call) if self.caller.built.module is not None else call, self.caller.dtype
            )
            keep = None if self.mask is None else torch.ones(end, end, dtype=torch.bool).tril()[None, None]
            answer = fresh(Inputs(self.rows[:, :end], allowed=keep), mask=self.mask)
            self.full[end] = answer.out.detach().to("cpu", torch.float64)
        return self.full[end]

    def outcome(self, stepped: StepResults, ends: Sequence[int]) -> StepwiseRun:
        """The steps beside the rows of whole calls."""
        starts = (0, *ends[:-1])
        wanted = tuple(self.whole(end)[:, start:end] for start, end in zip(starts, ends, strict=True))
        largest = max(float(one.abs().nan_to_num().max()) for one in wanted)
        return StepwiseRun(tuple(ends), stepped.outs, wanted, max(largest, 1e-30) * TOLERANCE)


def examine_stepwise(examined: Examined, probed: Probed, diagnosis: Diagnosis, seed: int, stage: Stage) -> Stepwise:
    """Prefill and single steps, token by token, and chunks, in each way of handing a cache on that works, until one gives what
    one call gives. Nothing where it takes no cache, or none that could be given."""
    caller = replace(examined.subject, is_forgetful=False)
    if caller.mode == "cross" or probed.facts.is_random or caller.sizes.q_len < _FEWEST:
        return Stepwise()
    caller = _unused(caller, stage)
    rows = drawer_of(caller, seed).rows(caller.sizes.q_len).to(caller.dtype)
    mask = _causal_form(probed)
    asker = _TextInParts(caller, rows, mask)
    found: list[tuple[StepConvention, list[StepwiseRun]]] = []
    slow = probed.facts.call_s > _SLOW_S
    for stepping in islice(
        step_conventions(caller, _sizes_of(caller, diagnosis), mask), _MOST_TRIED // (8 if slow else 1)
    ):
        outcomes = _runs_of(stepping, asker)
        if outcomes and all(outcome.is_right for outcome in outcomes):
            return _right(stepping, outcomes)
        if outcomes:
            found.append((stepping, outcomes))
            if _is_settled(found):
                break
    if not found:
        return Stepwise()
    return _wrong(*found[0], asker, diagnosis, probed)


def _unused(caller: UserAttention, stage: Stage) -> UserAttention:
    """The same with its weights in a module that nobody has called yet: what a cache holds of earlier calls must not be read.
    Itself where it cannot be built again."""
    module = caller.built.module
    if module is None:
        return caller
    try:
        built = limited(caller.built.rebuild({}), stage)
        assert built.module is not None
        weights = dict(module.named_parameters())
        for name, parameter in built.module.named_parameters():
            parameter.data = weights[name].detach().clone()
        moved = built.module.to(caller.device)
        call = float64_copy(moved) if caller.dtype == torch.float64 else moved
        return caller.of(call, caller.dtype)
    except Exception:  # whatever its constructor raises the second time
        return caller


def _is_settled(found: list[tuple[StepConvention, list[StepwiseRun]]]) -> bool:
    """Whether other ways of calling cannot mend it: a table of rotations that is given whole, and read, beside a position."""
    first = found[0][0]
    return (first.is_table_whole and bool(first.position_arguments)) or len(found) >= 6


def _causal_form(probed: Probed) -> MaskForm | None:
    """The form of a mask of queries by keys that works, where it does not mask the future itself."""
    form = probed.facts.mask
    if probed.facts.visible != "full" or form is None or not {"query", "key"} <= set(form.axes):
        return None
    return form


def _sizes_of(caller: UserAttention, diagnosis: Diagnosis) -> CacheSizes:
    """What a cache must hold, by the layer that it was found to be, or else by what it was built with."""
    layer = None if diagnosis.candidate is None else diagnosis.candidate.layer
    batch, length = caller.sizes.batch, caller.sizes.q_len + _ROOM
    if layer is None or layer.weights is None:
        n_heads = next(iter(counts_of(caller.built, caller.built.module, "n_heads")), 1)
        width = max(1, caller.sizes.d_in // n_heads)
        return CacheSizes(batch, length, n_heads, width, width, caller.dtype, caller.device)
    d_v = layer.weights.v.weight.shape[0] // layer.n_kv_heads
    return CacheSizes(batch, length, layer.n_kv_heads, layer.d_head or d_v, d_v, caller.dtype, caller.device)


# ------------------------------------------------------------------------------------------------------------------- asking


def _runs_of(stepping: StepConvention, asker: _TextInParts) -> list[StepwiseRun]:
    """A prefill and single steps, token by token, then chunks as far as they are borne; nothing where it does not work so."""
    length = asker.rows.shape[1]
    prefill = (length - 2, length - 1, length)
    try:
        stepped = stepping(asker.rows, prefill)
        if not _remembers(stepping, stepped, asker, prefill):
            return []
        outcomes = [asker.outcome(stepped, prefill)]
    except Exception:  # whatever a call raises that is made in another way than its author does
        return []
    for ends in (tuple(range(1, length + 1)), *_chunks(length)):
        try:
            outcomes.append(asker.outcome(stepping(asker.rows, ends), ends))
        except Exception:  # steps of several tokens, or a first call of one, are borne by some only
            continue
    return outcomes


def _chunks(length: int) -> tuple[tuple[int, ...], ...]:
    return ((length - 3, length - 1, length), (2, length))


def _remembers(stepping: StepConvention, stepped: StepResults, asker: _TextInParts, ends: Sequence[int]) -> bool:
    """Whether there is a cache: the first step left one, and later ones depend on it or make it longer. Where there
    is a context, the cache may be meant for its keys alone: then later steps must depend on the first."""
    by_itself = not stepping.passing.names
    if not cache_is_kept(stepped, by_itself=by_itself):
        return False
    has_context = any(True for _ in signature_of(stepping.caller.built.call).of_role("context", "kv", "key", "value"))
    if not has_context and (by_itself or not stepping.passing.paths or cache_grows(stepped)):
        return True
    other = asker.rows.clone()
    other[:, : ends[0]] = other[:, : ends[0]].flip(-1) + 0.5
    again = stepping(other, ends)
    return any(max_error(one, two) > 1e-9 for one, two in zip(stepped.outs[1:], again.outs[1:], strict=True))


# ------------------------------------------------------------------------------------------------------------------ verdicts


def _right(stepping: StepConvention, outcomes: Sequence[StepwiseRun]) -> Stepwise:
    error, has_chunks = max(max(outcome.errors) for outcome in outcomes), any(map(is_chunked, outcomes))
    kinds = "token by token, after a prefill" + (", in chunks" if has_chunks else "")
    said = f"{kinds}: the same as in one call ({stepping.text})"
    probe = ProbeResult("cache", said, error, True)
    notes = () if has_chunks else (f"not examined: {_LATER_CHUNK}, which raises an error",)
    return Stepwise(probes=(probe,), names=stepping.names, notes=notes)


def _wrong(
    stepping: StepConvention, outcomes: list[StepwiseRun], asker: _TextInParts, diagnosis: Diagnosis, probed: Probed
) -> Stepwise:
    failing = [outcome for outcome in outcomes if not outcome.is_right]
    error = max(max(outcome.errors) for outcome in failing)
    is_causal = asker.mask is not None or bool(probed.facts.visible == "causal")
    seen = Explainer(stepping, asker.rows, diagnosis, is_causal)
    made = seen.explained(outcomes)
    is_right_alone = all(is_chunked(outcome) for outcome in failing)
    if is_right_alone and (not made or _is_left_to_the_caller(made[0][1], seen, failing[0])):
        return _of_one_token(stepping, error, _UNLIKE_ONE_CALL[made[0][1].description if made else ""])
    probe = ProbeResult("cache", f"steps give other outputs than one call ({stepping.text})", error, False)
    told: list[tuple[str, MistakeVariant | None]] = [*made] or [(seen.likeliest(failing), None)]
    findings = tuple(seen.finding(code, variant, failing, made) for code, variant in told)
    return Stepwise(findings, (), (probe,), stepping.names)


def _is_left_to_the_caller(variant: MistakeVariant, seen: Explainer, outcome: StepwiseRun) -> bool:
    """Whether steps of several tokens are not masked at all, or by torch's own causal mask, which is meant for a first call."""
    return variant is UNMASKED or (variant is TOP_LEFT_CHUNKS and seen.is_fused(outcome))


_LATER_CHUNK = "a later step of several tokens with the cache"


_UNLIKE_ONE_CALL = {
    "": "gives another output than one call",
    UNMASKED.description: "is not causal",
    TOP_LEFT_CHUNKS.description: "is masked as if it came first",
}


def _of_one_token(stepping: StepConvention, error: float, instead: str) -> Stepwise:
    """Right after a prefill and token by token, and wrong where a later step brings several tokens, which it does not mask."""
    said = "with a cache it takes one token at a time"
    note = f"{_LATER_CHUNK} {instead}: give one token at a time"
    probe = ProbeResult(
        "cache",
        f"token by token, after a prefill: the same as in one call ({stepping.text}); later chunks differ",
        error,
    )
    return Stepwise((), (Choice("single-steps", said),), (probe,), stepping.names, (note,))


# --------------------------------------------------------------------------------------- the mistake that explains steps


@dataclass(frozen=True)
class StepwiseRun:
    """What came of a text that was given in parts which end at `ends`: the answer of each step, what one call answers in its
    place, and how far they are apart, relative to the tolerance."""

    ends: tuple[int, ...]
    answers: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    tolerance: float

    @property
    def errors(self) -> tuple[float, ...]:
        """The largest difference of each step."""
        return tuple(max_error(one, other) for one, other in zip(self.answers, self.wanted, strict=True))

    @property
    def is_right(self) -> bool:
        """Whether every step answers what one call does."""
        return max(self.errors) <= self.tolerance

    def steps(self, *, is_causal: bool) -> list[DecodingStep]:
        """The steps, as the arrangement of their keys needs them."""
        starts = (0, *self.ends[:-1])
        return [DecodingStep(starts[: n + 1], end, is_causal) for n, end in enumerate(self.ends)]


def is_chunked(outcome: StepwiseRun) -> bool:
    """Whether a step behind the first one brings several tokens."""
    return any(end - start > 1 for start, end in zip(outcome.ends, outcome.ends[1:], strict=False))


@dataclass
class Explainer:
    """Looks for the arrangement of cached rows, positions and masks that gives what the steps answered."""

    stepping: StepConvention
    rows: Tensor
    diagnosis: Diagnosis
    is_causal: bool
    errors: dict[str, float] = field(default_factory=dict)

    def explained(self, outcomes: Sequence[StepwiseRun]) -> list[tuple[str, MistakeVariant]]:
        """The mistakes that together give every answer, the fewest; nothing where none do. Where single steps are wrong they
        alone are explained if chunks are not, or are only unmasked besides."""
        candidate = self.diagnosis.candidate
        if candidate is None or candidate.layer.weights is None or candidate.layer.bias is not None:
            return []
        with torch.no_grad():
            try:
                text = projected_text(
                    candidate.layer, stages_with(self.diagnosis.made), self.rows.to("cpu", torch.float64)
                )
            except Exception:  # a mistake that cannot be made apart from its positions
                return []
            return self._fewest(text, outcomes)

    def _fewest(self, text: ProjectedText, outcomes: Sequence[StepwiseRun]) -> list[tuple[str, MistakeVariant]]:
        single = [outcome for outcome in outcomes if not is_chunked(outcome)]
        made = self._matching_mistakes(text, outcomes)
        is_more = len(made) > 1 and UNMASKED in [variant for _, variant in made]
        if (not made or is_more) and any(not outcome.is_right for outcome in single):
            return self._matching_mistakes(text, single) or made
        return made

    def _matching_mistakes(
        self, text: ProjectedText, outcomes: Sequence[StepwiseRun]
    ) -> list[tuple[str, MistakeVariant]]:
        room = self._room(outcomes[0])
        pool = [
            (code, variant) for code, variants in CACHE_LAYOUTS.items() for variant in variants
            if BY_CODE[code].applies(SourceHints(), text.layer)
        ]  # fmt: skip
        matching = [[one] for one in pool if self._matches(text, [one], outcomes, room)]
        if matching:
            return self._settled(matching, room)
        pairs = ([one, two] for one, two in product(pool, pool) if one[0] < two[0])
        return next((made for made in pairs if self._matches(text, made, outcomes, room)), [])

    def _matches(
        self,
        text: ProjectedText,
        made: Sequence[tuple[str, MistakeVariant]],
        outcomes: Sequence[StepwiseRun],
        room: int | None,
    ) -> bool:
        """Whether every step answers what it would with these mistakes."""
        order = list(CACHE_LAYOUTS)
        worst = 0.0
        for outcome in sorted(outcomes, key=lambda one: one.is_right):
            for step, answer in zip(outcome.steps(is_causal=self.is_causal), outcome.answers, strict=True):
                laid = right_layout(step)
                try:
                    for _, variant in sorted(made, key=lambda one: order.index(one[0])):
                        laid = variant.replacement(replace(step, room=room), laid)
                    gap = max_error(answered(text, step, laid), answer)
                except (ValueError, IndexError, RuntimeError):  # an arrangement that cannot be made here
                    return False
                worst = max(worst, gap)
                if gap > outcome.tolerance:
                    return False
        self.errors["+".join(variant.description for _, variant in made)] = worst
        return True

    def _settled(
        self, matching: list[list[tuple[str, MistakeVariant]]], room: int | None
    ) -> list[tuple[str, MistakeVariant]]:
        """Of several that give the same numbers the one that agrees with how many keys the scores have: all of them speak for a
        mask, fewer for rows that are not read."""
        end = self.rows.shape[1]
        is_short = room is not None and room < end
        wanted = "cache-order" if is_short else "cache-mask"
        codes = {made[0][0] for made in matching}
        if {"cache-order", "cache-mask"} <= codes and room is not None:
            return next(made for made in matching if made[0][0] == wanted)
        return matching[0]

    def _watched(self, outcome: StepwiseRun) -> tuple[Operation, ...]:
        try:
            return watch(lambda: self.stepping(self.rows, outcome.ends), self.stepping.caller.built.files)[1]
        except Exception:  # what cannot be watched has no lines
            return ()

    def _room(self, outcome: StepwiseRun) -> int | None:
        """How many keys the scores of the last step have."""
        sizes = []
        for operation in self._watched(outcome):
            if operation.name == "scaled_dot_product_attention" and len(operation.inputs) > 1:
                sizes.append(operation.inputs[1].shape[-2])
            elif operation.name == "softmax" and operation.output.ndim >= 2:
                sizes.append(operation.output.shape[-1])
        return sizes[-1] if sizes else None

    def is_fused(self, outcome: StepwiseRun) -> bool:
        """Whether torch's own function makes the causal mask."""
        return any(
            operation.name == "scaled_dot_product_attention" and operation.arguments.get("is_causal") is True
            for operation in self._watched(outcome)
        )

    def likeliest(self, failing: Sequence[StepwiseRun]) -> str:
        """The code where no arrangement explains it: by what stands in the scores, and by whether the module knows positions."""
        single = next((outcome for outcome in failing if not is_chunked(outcome)), failing[0])
        room = self._room(single)
        if room is not None and room < self.rows.shape[1]:
            return "cache-order"
        operations = self._watched(single)
        placing = re.compile(BY_CODE["cache-position"].in_source)
        is_placed = any(
            placing.search(operation.source) for operation in operations if operation.name not in ("view", "reshape")
        )
        return "cache-position" if is_placed else "cache-order"

    def finding(
        self,
        code: str,
        variant: MistakeVariant | None,
        failing: Sequence[StepwiseRun],
        made: Sequence[tuple[str, MistakeVariant]],
    ) -> Finding:
        """The mistake with its proof, and the smallest text that shows it."""
        mistake, first = BY_CODE[code], min(failing, key=lambda outcome: (len(outcome.ends), outcome.ends))
        number, gap = next((n, gap) for n, gap in enumerate(first.errors) if gap > first.tolerance)
        start = (0, *first.ends)[number]
        brought = first.ends[number] - start
        shown = f"after {start} tokens a step of {brought} is {gap:.3g} off ({self.stepping.text}), "
        shown += f"in an output whose largest number is {float(first.wanted[number].abs().max()):.3g}"
        line = self._line(code, first)
        error = None if variant is None else self.errors["+".join(other.description for _, other in made)]
        if variant is not None:
            match = f"largest difference {error:.2g}, tolerance {first.tolerance:.2g}"
            shown = f"matches exactly if {variant.description}: {match}\n{shown}"
        others = tuple(other for other, _ in made if other != code)
        tolerance = None if variant is None else first.tolerance
        return finding_of(mistake, shown, line, error=error, tolerance=tolerance, together=others)

    def _line(self, code: str, outcome: StepwiseRun) -> SourceLine:
        """The line of a step that makes such a mistake: its positions, what joins the cache, or its mask."""
        mistake = BY_CODE[code]
        lines = [operation for operation in self._watched(outcome) if operation.line is not None]
        for name in mistake.operations:
            for operation in lines:
                if operation.name == name and re.search(mistake.in_source, operation.source):
                    return operation.at
        return SourceLine(self.stepping.caller.built.file)
