"""Why steps with a cache give something else than one call: the arrangement of rows, positions and masks that gives the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from mhacli.adapters.usercode.operations import watch
from mhacli.adapters.usercode.stepwise import Stepping
from mhacli.adapters.usercode.user_attention import Operation
from mhacli.adapters.usercode.watch.operations import watch
from mhacli.attention.mistakes import BY_CODE, MistakeVariant
from mhacli.attention.mistakes.caching import ARRANGEMENTS, UNMASKED, Step, Text, answered, arranged, text_of
from mhacli.attention.mistakes.stages import SourceHints
from mhacli.compute.check.diagnosis.diagnose import Diagnosis
from mhacli.compute.check.diagnosis.evidence import Line
from mhacli.compute.check.diagnosis.hypotheses import stages_with
from mhacli.results.check import Finding


@dataclass(frozen=True)
class Outcome:
    """What came of a text that was given in parts which end at `ends`: the answer of each step, what one call answers in its
    place, and how far they are apart, relative to the tolerance."""

    ends: tuple[int, ...]
    answers: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    tolerance: float

    @property
    def errors(self) -> tuple[float, ...]:
        """The largest difference of each step."""
        return tuple(gap_of(one, other) for one, other in zip(self.answers, self.wanted, strict=True))

    @property
    def is_right(self) -> bool:
        """Whether every step answers what one call does."""
        return max(self.errors) <= self.tolerance

    def steps(self, *, is_causal: bool) -> list[Step]:
        """The steps, as the arrangement of their keys needs them."""
        starts = (0, *self.ends[:-1])
        return [Step(starts[: n + 1], end, is_causal) for n, end in enumerate(self.ends)]


def is_chunked(outcome: Outcome) -> bool:
    """Whether a step behind the first one brings several tokens."""
    return any(end - start > 1 for start, end in zip(outcome.ends, outcome.ends[1:], strict=False))


def gap_of(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where shapes or NaN differ."""
    if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
        return torch.inf
    return float((one - other).abs().nan_to_num().max())


@dataclass
class Explainer:
    """Looks for the arrangement of cached rows, positions and masks that gives what the steps answered."""

    stepping: Stepping
    rows: Tensor
    diagnosis: Diagnosis
    is_causal: bool
    errors: dict[str, float] = field(default_factory=dict)

    def explained(self, outcomes: Sequence[Outcome]) -> list[tuple[str, MistakeVariant]]:
        """The mistakes that together give every answer, the fewest; nothing where none do. Where single steps are wrong they
        alone are explained if chunks are not, or are only unmasked besides."""
        candidate = self.diagnosis.candidate
        if candidate is None or candidate.layer.weights is None or candidate.layer.bias is not None:
            return []
        with torch.no_grad():
            try:
                text = text_of(candidate.layer, stages_with(self.diagnosis.made), self.rows.to("cpu", torch.float64))
            except Exception:  # a mistake that cannot be made apart from its positions
                return []
            return self._fewest(text, outcomes)

    def _fewest(self, text: Text, outcomes: Sequence[Outcome]) -> list[tuple[str, MistakeVariant]]:
        single = [outcome for outcome in outcomes if not is_chunked(outcome)]
        made = self._found(text, outcomes)
        is_more = len(made) > 1 and UNMASKED in [variant for _, variant in made]
        if (not made or is_more) and any(not outcome.is_right for outcome in single):
            return self._found(text, single) or made
        return made

    def _found(self, text: Text, outcomes: Sequence[Outcome]) -> list[tuple[str, MistakeVariant]]:
        room = self._room(outcomes[0])
        pool = [
            (code, variant) for code, variants in ARRANGEMENTS.items() for variant in variants
            if BY_CODE[code].applies(SourceHints(), text.layer)
        ]  # fmt: skip
        matching = [[one] for one in pool if self._matches(text, [one], outcomes, room)]
        if matching:
            return self._settled(matching, room)
        pairs = ([one, two] for one, two in product(pool, pool) if one[0] < two[0])
        return next((made for made in pairs if self._matches(text, made, outcomes, room)), [])

    def _matches(
        self, text: Text, made: Sequence[tuple[str, MistakeVariant]], outcomes: Sequence[Outcome], room: int | None
    ) -> bool:
        """Whether every step answers what it would with these mistakes."""
        order = list(ARRANGEMENTS)
        worst = 0.0
        for outcome in sorted(outcomes, key=lambda one: one.is_right):
            for step, answer in zip(outcome.steps(is_causal=self.is_causal), outcome.answers, strict=True):
                laid = arranged(step)
                try:
                    for _, variant in sorted(made, key=lambda one: order.index(one[0])):
                        laid = variant.replacement(replace(step, room=room), laid)
                    gap = gap_of(answered(text, step, laid), answer)
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

    def _watched(self, outcome: Outcome) -> tuple[Operation, ...]:
        file = self.stepping.caller.built.file
        try:
            _, operations = watch(lambda: self.stepping(self.rows, outcome.ends), [] if file is None else [file])
        except Exception:  # what cannot be watched has no lines
            return ()
        return operations

    def _room(self, outcome: Outcome) -> int | None:
        """How many keys the scores of the last step have."""
        sizes = []
        for operation in self._watched(outcome):
            if operation.name == "scaled_dot_product_attention" and len(operation.inputs) > 1:
                sizes.append(operation.inputs[1].shape[-2])
            elif operation.name == "softmax" and operation.output.ndim >= 2:
                sizes.append(operation.output.shape[-1])
        return sizes[-1] if sizes else None

    def is_fused(self, outcome: Outcome) -> bool:
        """Whether torch's own function makes the causal mask."""
        return any(
            operation.name == "scaled_dot_product_attention" and operation.arguments.get("is_causal") is True
            for operation in self._watched(outcome)
        )

    def likeliest(self, failing: Sequence[Outcome]) -> str:
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
        failing: Sequence[Outcome],
        made: Sequence[tuple[str, MistakeVariant]],
    ) -> Finding:
        """The mistake with its proof, and the smallest text that shows it."""
        mistake, first = BY_CODE[code], min(failing, key=lambda outcome: (len(outcome.ends), outcome.ends))
        number, gap = next((n, gap) for n, gap in enumerate(first.errors) if gap > first.tolerance)
        start = (0, *first.ends)[number]
        brought = first.ends[number] - start
        shown = f"after {start} tokens a step of {brought} is {gap:.3g} off ({self.stepping.told}), "
        shown += f"in an output whose largest number is {float(first.wanted[number].abs().max()):.3g}"
        line = self._line(code, first)
        error = None if variant is None else self.errors["+".join(other.description for _, other in made)]
        if variant is not None:
            match = f"largest difference {error:.2g}, tolerance {first.tolerance:.2g}"
            shown = f"matches exactly if {variant.description}: {match}\n{shown}"
        return Finding(
            code=code,
            message=mistake.message,
            evidence=shown,
            fix=(line.is_fused and mistake.fix_in_torch) or mistake.fix,
            effect=mistake.effect,
            proven=variant is not None,
            error=error,
            tolerance=None if variant is None else first.tolerance,
            together_with=tuple(other for other, _ in made if other != code),
            file=line.file,
            line=line.number,
            source=line.source,
        )

    def _line(self, code: str, outcome: Outcome) -> Line:
        """The line of a step that makes such a mistake: its positions, what joins the cache, or its mask."""
        mistake = BY_CODE[code]
        lines = [operation for operation in self._watched(outcome) if operation.line is not None]
        for name in mistake.operations:
            for operation in lines:
                if operation.name == name and re.search(mistake.in_source, operation.source):
                    return Line(operation.file, operation.line, operation.source)
        return Line(self.stepping.caller.built.file)
