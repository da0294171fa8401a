"""Asking a user's attention with rows of our own making, again and again, and measuring what moved its answer."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from mhacli.adapters.usercode.asker import InputDrawer, copy_or_none, map_rows
from mhacli.adapters.usercode.call.user_attention import UserAttention, ask
from mhacli.adapters.usercode.types import AttentionOutput, Inputs, MaskForm
from mhacli.requests.user_code import CheckRequest
from mhacli.results.check import ProbeResult

NOT_FINITE_ANYWAY = "NaN or infinite numbers, as with ordinary input"
"""What a probe says where it cannot tell whether the numbers are due to its own input."""

Visible = Literal[
    "full",
    "causal",
    "without itself",
    "plus the next",
    "transposed",
    "top-left",
    "bottom-right",
    "itself only",
    "other",
]
"""Which keys move an output: all; those up to its own place; those before it; one more; those from its own place on; of fewer
queries than keys those up to its own number, or all but as many as come after it; its own alone; or something else."""


class MaskTrial(NamedTuple):
    """What a way to write a mask does, read one way. `changes` is the largest change that it makes to the output, relative to
    the output's size; `leaked` the share of what it hides that moves an output all the same, `seen` the share of what it leaves
    visible that moves one; `nonfinite` counts numbers of the output that it turned into NaN or infinity."""

    form: MaskForm
    changes: float
    leaked: float
    seen: float
    nonfinite: int

    @property
    def works(self) -> bool:
        """Whether it hides what it is to hide, and nothing but that."""
        return self.leaked == 0 and self.seen > 0.5 and not self.nonfinite


@dataclass(frozen=True)
class ProbeFacts:
    """What the probes measured, for a diagnosis. None, or nothing, is what was not measured.

    `is_random`: the same input gives another output in eval mode, and the same again after torch is seeded anew;
    `keeps_state`: it gives another one because of earlier calls. `is_random_with_dropout`: random in eval mode when it is built
    with dropout, by the arguments `dropout_names`. `influence` `[query, key]`: whether the token at key, of the output's own rows
    (of a function, of as many keys as queries), moves the output at query; on the diagonal: by its value, not by its query.
    `visible` names it, `visible_cross` the same for keys of their own, of another number; `largest_future` is the largest
    relative move of an output by a later token. `is_causal_by_mask`: not by itself, but with a causal mask in its mask argument.
    `mask` and `padding` are the first forms of masks and padding that work, `masks` the trials of masks. `empty_row`: what a
    query without any allowed key answers. `is_rescaled`: whether what dropout keeps is divided by 1 − p, None where the numbers
    allow no verdict, by the error of a slope, `dropout_slope_error`. `call_s` is what a call takes, `nonfinite_queries` are those
    whose output has NaN or infinity, of ordinary rows.
    """

    call_s: float = 0.0
    nonfinite_queries: tuple[int, ...] = ()
    is_random: bool | None = None
    keeps_state: bool | None = None
    is_random_with_dropout: bool | None = None
    dropout_names: tuple[str, ...] = ()
    influence: Bool[Tensor, "query key"] | None = None
    visible: Visible | None = None
    visible_cross: Visible | None = None
    largest_future: float | None = None
    is_causal_by_mask: bool | None = None
    masks: tuple[MaskTrial, ...] = ()
    mask: MaskForm | None = None
    padding: MaskForm | None = None
    empty_row: Literal["zeros", "mean", "nan", "constant", "other"] | None = None
    dropout_slope_error: float | None = None
    is_rescaled: bool | None = None


class ProbeReply(NamedTuple):
    """The answer of a probe, and the fields of `ProbeFacts` that it measured."""

    probe: ProbeResult
    facts: dict[str, object]


def probe_answer(
    name: str, message: str, value: float | None = None, ok: bool | None = None, **facts: object
) -> ProbeReply:
    """A probe's answer; a value that is no finite number is left out."""
    known = None if value is None or not math.isfinite(value) else float(value)
    return ProbeReply(ProbeResult(name, message, known, ok), facts)


_MOVES = {torch.float64: 1e-9, torch.float32: 1e-5}
_MOVES_16 = 2e-2
_TIMED_S = 0.15


class ProbeContext:
    """A user's attention, and what the probes so far have measured of it: `facts`, which their driver keeps up to date.

    Every call begins with the same state of torch's global generator, so that what is random answers alike when it is asked
    alike; what keeps state is asked as a fresh copy each time. `stage` is called before every call.
    """

    def __init__(self, subject: UserAttention, request: CheckRequest, *, expects_causal: bool) -> None:
        self.subject, self.request, self.expects_causal = subject, request, expects_causal
        self.facts = ProbeFacts()
        self.stage: Callable[[], None] = lambda: None
        self._pristine = copy_or_none(subject.built.module)
        self._drawer = InputDrawer(
            subject.sizes,
            seed=request.of.seed % 2**63,
            n_heads=subject.n_heads if subject.is_function else None,
            dtype=subject.dtype,
            device=subject.device,
        )

    def begin(self) -> None:
        """Starts the drawing of rows anew: each probe begins with the same ones."""
        self._drawer.restart()

    @property
    def tolerance(self) -> float:
        """The relative change from which on an output moved."""
        return _MOVES.get(self.subject.dtype, _MOVES_16)

    @property
    def has_keys(self) -> bool:
        """Whether keys can be given apart from queries."""
        return self.subject.is_function or self.subject.takes_context

    @property
    def name(self) -> str:
        """What to call it in a message."""
        return "the function" if self.subject.is_function else "the module"

    def ask(
        self,
        inputs: Inputs,
        *,
        mask: MaskForm | None = None,
        padding: MaskForm | None = None,
        training: bool = False,
        of: UserAttention | None = None,
        seed: int | None = 0,
    ) -> AttentionOutput:
        """One call; torch's global generator is seeded with `seed` before it, and afterwards as it was. None: not seeded."""
        asked = of or self.subject
        if of is None and self.facts.keeps_state and self._pristine is not None:
            asked = self.subject.of(copy.deepcopy(self._pristine), self.subject.dtype)
        self.stage()
        return ask(asked, inputs, mask=mask, padding=padding, training=training, seed=seed)

    def fresh(self) -> nn.Module | None:
        """A copy of the module as it was before it was asked anything, None where there is none."""
        return None if self._pristine is None else copy.deepcopy(self._pristine)

    def timed(self, inputs: Inputs) -> float:
        """How many seconds a call takes: the shortest of five, fewer where they take long."""
        found: list[float] = []
        while len(found) < 5 and sum(found) < _TIMED_S:
            begun = time.perf_counter()
            self.ask(inputs)
            found.append(time.perf_counter() - begun)
        return min(found)

    def square(self, length: int | None = None, *, batch: int | None = None, factor: float = 1.0) -> Inputs:
        """As many keys as queries: the queries' own rows, of a function q, k and v."""
        return _times(self._drawer.inputs(with_context=False, q_len=length, batch=batch), factor)

    def oblong(self, k_len: int | None = None, *, factor: float = 1.0) -> Inputs:
        """Keys of their own, of another number than the queries."""
        return _times(self._drawer.inputs(with_context=True, k_len=k_len), factor)

    def replaced(
        self, inputs: Inputs, places: Sequence[int], *, by: float | None = None, factor: float = 1.0
    ) -> Inputs:
        """With the rows of some keys, and their values, drawn anew, or all of one number; of own rows the queries' too."""
        return self._drawer.replaced(inputs, places, by=by, factor=factor)

    def moves(self, before: Tensor, after: Tensor) -> bool:
        """Whether an output moved."""
        return relative(before, after) > self.tolerance

    def moved_queries(self, before: Tensor, after: Tensor) -> Bool[Tensor, "batch query"]:
        """Which queries of which sequences answer something else."""
        change = changes(before, after) / size_of(before)
        return change.movedim(-2, 1).flatten(2).amax(2) > self.tolerance


def _times(inputs: Inputs, factor: float) -> Inputs:
    return map_rows(inputs, lambda rows: rows * factor)


def changes(before: Tensor, after: Tensor) -> Tensor:
    """|after − before| in float64; ∞ where one of them alone is NaN or infinite, or where their shapes differ."""
    if before.shape != after.shape:
        return torch.full(before.shape or (1,), math.inf, dtype=torch.float64)
    a, b = (tensor.detach().to("cpu", torch.float64) for tensor in (before, after))
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (b - a).abs().nan_to_num(nan=math.inf))


def size_of(tensor: Tensor) -> float:
    """The largest finite magnitude, 1 where there is none."""
    finite = tensor.detach().to("cpu", torch.float64).abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.max()) or 1.0 if finite.numel() else 1.0


def relative(before: Tensor, after: Tensor) -> float:
    """The largest change relative to the size of what was before; ∞ where NaN came or went."""
    found = changes(before, after)
    return float(found.max()) / size_of(before) if found.numel() else 0.0


def bad_numbers(tensor: Tensor) -> int:
    """How many numbers are NaN or infinite."""
    return int((~torch.isfinite(tensor)).sum())


def first_line(fault: BaseException) -> str:
    """What an exception says, in one line."""
    said = " ".join(str(fault).split())[:200]
    return f"{type(fault).__name__}: {said}" if said else type(fault).__name__


Question = Callable[[ProbeContext], ProbeReply]
