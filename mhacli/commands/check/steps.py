"""What a user's attention gives for a text that it reads step by step behind a cache."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from mhacli.attention.stages import Inputs
from mhacli.attention.taps import largest_difference
from mhacli.usercode.build import as_float64, cast_copy
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.graph import RecordedCall, Watcher
from mhacli.usercode.masks import MaskForm
from mhacli.usercode.steps import StepConvention, causal_inputs, step_conventions
from mhacli.usercode.user_attention import UserAttention

from .probes import InputCase, ProbedAttention

_FEWEST = 4
"""The shortest text that is read in steps."""


@dataclass(frozen=True, eq=False)
class Steps:
    """The cases of a text in steps by one convention, and its outputs `whole`, in one call."""

    convention: StepConvention
    cases: list[InputCase]
    whole: Tensor

    @cached_property
    def differing(self) -> list[InputCase]:
        """The cases that give other outputs than one call."""
        return [
            case
            for case in self.cases
            if largest_difference(case.output, self.whole) > case.tolerance
        ]

    @property
    def largest(self) -> float:
        """The largest difference from the outputs of one call."""
        return max(largest_difference(case.output, self.whole) for case in self.cases)

    def recorded(self) -> RecordedCall:
        """The call of the first case that differs, without operations if it cannot be recorded."""
        case = self.differing[0]
        watcher = Watcher(self.convention.attention.built.file)
        with suppress(*NO_ANSWER):
            self.convention(case.inputs.queries, case.inputs.ends, within=watcher)
        return RecordedCall(case.output, case.inputs, operations=watcher.operations)


def read_in_steps(probed: ProbedAttention, form: MaskForm | None) -> Steps | None:
    """A text read after a prefill, token by token, and in longer steps, by the first convention
    that gives what one call gives, else by the first that gives anything. `form` is the mask of
    queries and keys that it obeys. None if it takes no cache, if no convention works, or if tokens
    see later ones.
    """
    attention = probed.subject
    mask = None
    if probed.module is not None:  # which no call has left anything in
        attention = attention.with_call(cast_copy(probed.module, attention.dtype, attention.device))
    if probed.visible == "full" and form is not None and {"query", "key"} <= set(form.axes):
        mask = form
    length = attention.sizes.q_len
    influence = probed.influence
    is_causal = mask is not None or (influence is not None and not bool(influence.triu(1).any()))
    conventions = [*step_conventions(attention, mask)] if is_causal and length >= _FEWEST else []
    if attention.mode == "cross" or "dropout-in-eval" in probed.evidence or not conventions:
        return None
    rows = attention.drawer(probed.request.seed).rows(length).to(attention.dtype)
    whole = _in_one_call(attention, rows, mask)
    first = None
    for convention in conventions:
        steps = Steps(convention, list(_cases(convention, rows)), whole)
        if steps.cases and not steps.differing:
            return steps
        if steps.cases and first is None:
            first = steps
    return first


def steps_of(convention: StepConvention, length: int, ends: tuple[int, ...], seed: int) -> Steps:
    """A text of random tokens that is read in steps that end at `ends`. Raises `UserRaised` or
    `Unreadable`.
    """
    attention = convention.attention
    rows = attention.drawer(seed).rows(length).to(attention.dtype)
    case = InputCase("", Inputs(as_float64(rows), ends=ends), convention(rows, ends))
    return Steps(convention, [case], _in_one_call(attention, rows, convention.mask))


def _in_one_call(attention: UserAttention, rows: Tensor, mask: MaskForm | None) -> Tensor:
    """The outputs of a whole text."""
    inputs = causal_inputs(rows, 0, rows.shape[1], mask)
    return as_float64(replace(attention, is_copied=True)(inputs, mask=mask))


def _cases(convention: StepConvention, rows: Tensor) -> Iterator[InputCase]:
    """The cases of a prefill with single steps, of single tokens, and of longer steps where they
    are accepted; none if the first raises, or if what is read later does not depend on what was
    read first.
    """
    length = rows.shape[1]
    text = as_float64(rows)
    start = length - 2
    changed = torch.cat([rows[:, :start].flip(-1) + 0.5, rows[:, start:]], dim=1)
    single = tuple(range(1, length + 1))
    longer = ((length - 3, length - 1, length), (2, length))
    for ends in ((start, length - 1, length), single, *longer):
        # not every attention accepts longer steps, or a first step of one token
        with suppress(*NO_ANSWER):
            out = convention(rows, ends)
            if ends[0] == start:
                other = convention(changed, ends)
                if largest_difference(out[:, start:], other[:, start:]) <= 1e-9:
                    return
            sizes = [end - start for start, end in pairwise((0, *ends))]
            name = f"steps of {' + '.join(map(str, sizes))} tokens"
            yield InputCase(name, Inputs(text, ends=ends), out)


def is_chunked(case: InputCase) -> bool:
    """Whether a step after the first has several tokens."""
    return any(end - start > 1 for start, end in pairwise(case.inputs.ends))
