"""Calls a user's attention with inputs of mha, and measures which input moves the output."""

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

from mhacli.commands.check.result import CheckRequest, ProbeResult
from mhacli.usercode.call.user_attention import UserAttention, call_attention
from mhacli.usercode.inputs import InputDrawer, copy_or_none, map_rows
from mhacli.usercode.types import AttentionOutput, Inputs, MaskForm

NOT_FINITE_ANYWAY = "NaN or infinite numbers, as with ordinary input"
"""The message of a probe that cannot attribute NaN or infinity to its own input."""

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
"""Which keys influence an output: all; up to its own position; before it; one more; from its own position on; with fewer
queries than keys, up to its own index, or all except as many as follow it; its own only; or another pattern."""


class MaskTrial(NamedTuple):
    """The effect of a mask form. `changes` is the largest change of the output relative to its size; `leaked` the fraction of
    hidden keys that still influence the output, `seen` the fraction of visible keys that do; `nonfinite` counts new NaN and
    infinite numbers."""

    form: MaskForm
    changes: float
    leaked: float
    seen: float
    nonfinite: int

    @property
    def works(self) -> bool:
        """Whether exactly the hidden keys lose their influence."""
        return self.leaked == 0 and self.seen > 0.5 and not self.nonfinite


@dataclass(frozen=True)
class ProbeFacts:
    """The measurements of the probes, None or empty where nothing was measured.

    `is_random`: the output varies in eval mode, and seeding torch repeats it. `keeps_state`: earlier calls change the output.
    `is_random_with_dropout`: random in eval mode when built with dropout, through the arguments `dropout_names`. `influence`
    `[query, key]`: whether the token at key influences the output at query, for self-attention (for a function, with equal
    numbers of keys and queries); on the diagonal through its value, not its query. `visible` classifies it, `visible_cross` the
    same for a context. `largest_future` is the largest relative change of an output by a later token. `is_causal_by_mask`: not
    causal by itself, but with a causal mask. `mask` and `padding` are the first working forms, `masks` the trials. `empty_row`
    is the output of a query without visible keys. `is_rescaled`: whether dropout divides by 1 − p, None if undecided;
    `dropout_slope_error` is the standard error. `call_s` is the duration of a call. `nonfinite_queries` have NaN or infinite
    outputs for ordinary inputs.
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
    """The result of a probe, and the `ProbeFacts` fields that it measured."""

    probe: ProbeResult
    facts: dict[str, object]


def reply(name: str, message: str, value: float | None = None, ok: bool | None = None, **facts: object) -> ProbeReply:
    """The reply of a probe; a value that is not finite is dropped."""
    finite_value = None if value is None or not math.isfinite(value) else float(value)
    return ProbeReply(ProbeResult(name, message, finite_value, ok), facts)


_MOVES = {torch.float64: 1e-9, torch.float32: 1e-5}
_MOVES_16 = 2e-2
_TIMED_S = 0.15


class ProbeContext:
    """A user's attention, with the facts that the probes have measured so far.

    Every call starts with the same state of torch's generator, so that random outputs repeat. A subject that keeps state gets a
    fresh copy for each call. `stage` is called before every call.
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
        """Restarts the random inputs, so that each probe gets the same ones."""
        self._drawer.restart()

    @property
    def tolerance(self) -> float:
        """The relative change from which an output counts as moved."""
        return _MOVES.get(self.subject.dtype, _MOVES_16)

    @property
    def has_keys(self) -> bool:
        """Whether keys can differ from the queries."""
        return self.subject.is_function or self.subject.takes_context

    @property
    def name(self) -> str:
        """A name for messages."""
        return "the function" if self.subject.is_function else "the module"

    def call(
        self,
        inputs: Inputs,
        *,
        mask: MaskForm | None = None,
        padding: MaskForm | None = None,
        training: bool = False,
        subject: UserAttention | None = None,
        seed: int | None = 0,
    ) -> AttentionOutput:
        """One call, with torch's generator seeded by `seed` and restored afterwards. None: not seeded."""
        callee = subject or self.subject
        if subject is None and self.facts.keeps_state and self._pristine is not None:
            callee = self.subject.of(copy.deepcopy(self._pristine), self.subject.dtype)
        self.stage()
        return call_attention(callee, inputs, mask=mask, padding=padding, training=training, seed=seed)

    def fresh(self) -> nn.Module | None:
        """A copy of the module in its initial state, None without a module."""
        return None if self._pristine is None else copy.deepcopy(self._pristine)

    def timed(self, inputs: Inputs) -> float:
        """The duration of a call in seconds: the shortest of up to five."""
        durations: list[float] = []
        while len(durations) < 5 and sum(durations) < _TIMED_S:
            begun = time.perf_counter()
            self.call(inputs)
            durations.append(time.perf_counter() - begun)
        return min(durations)

    def square(self, length: int | None = None, *, batch: int | None = None, factor: float = 1.0) -> Inputs:
        """Self-attention inputs; for a function, equally many keys as queries."""
        return _times(self._drawer.inputs(with_context=False, q_len=length, batch=batch), factor)

    def oblong(self, k_len: int | None = None, *, factor: float = 1.0) -> Inputs:
        """Inputs with separate keys of another number."""
        return _times(self._drawer.inputs(with_context=True, k_len=k_len), factor)

    def replaced(
        self, inputs: Inputs, positions: Sequence[int], *, by: float | None = None, factor: float = 1.0
    ) -> Inputs:
        """The inputs with some keys and values replaced by new random numbers, or by a constant."""
        return self._drawer.replaced(inputs, positions, by=by, factor=factor)

    def moves(self, before: Tensor, after: Tensor) -> bool:
        """Whether the output changed."""
        return relative(before, after) > self.tolerance

    def moved_queries(self, before: Tensor, after: Tensor) -> Bool[Tensor, "batch query"]:
        """Which queries of which sequences changed."""
        change = changes(before, after) / size_of(before)
        return change.movedim(-2, 1).flatten(2).amax(2) > self.tolerance


def _times(inputs: Inputs, factor: float) -> Inputs:
    return map_rows(inputs, lambda rows: rows * factor)


def changes(before: Tensor, after: Tensor) -> Tensor:
    """|after − before| in float64; ∞ where only one is NaN or infinite, or for different shapes."""
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
    """The largest change relative to the size of `before`; ∞ if NaN appeared or disappeared."""
    differences = changes(before, after)
    return float(differences.max()) / size_of(before) if differences.numel() else 0.0


def bad_numbers(tensor: Tensor) -> int:
    """The number of NaN and infinite elements."""
    return int((~torch.isfinite(tensor)).sum())


def first_line(fault: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(fault).split())[:200]
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


ProbeFunction = Callable[[ProbeContext], ProbeReply]
