"""The probes of `mha check`: questions about a user's attention that need no knowledge of its weights."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from mhacli.commands.check.result import ProbeResult
from mhacli.usercode.build import copied
from mhacli.usercode.roles import role_of
from mhacli.usercode.user_attention import InputDrawer, Inputs, UserAttention

Visible = Literal["full", "causal", "without itself", "plus the next", "transposed", "itself only", "other"]
"""Which tokens influence an output: all; up to its own position; before it; one more; from its own position on; its own only;
or another pattern."""


@dataclass
class Probed:
    """What the probes found in a subject, None or empty where nothing was measured, and their results in `probes`.

    `is_random`: the output varies in eval mode, and seeding torch repeats it. `keeps_state`: earlier calls change the output.
    `is_random_with_dropout`: random in eval mode with dropout of 0.5. `is_rescaled`:
    whether dropout divides by 1 − p. `influence` `[query, key]`: whether the token at key influences the output at query, on the
    diagonal through its value, not its query; `visible` classifies it, and `largest_future` is the largest relative change of an
    output by a later token.
    """

    subject: UserAttention
    drawer: InputDrawer
    pristine: nn.Module | None
    probes: list[ProbeResult] = field(default_factory=list)
    is_random: bool | None = None
    keeps_state: bool | None = None
    is_random_with_dropout: bool | None = None
    is_rescaled: bool | None = None
    influence: Bool[Tensor, "query key"] | None = None
    visible: Visible | None = None
    largest_future: float | None = None

    @property
    def tolerance(self) -> float:
        """The relative change from which an output counts as moved."""
        return _MOVES.get(self.subject.dtype, _MOVES_16)

    def inputs(self) -> Inputs:
        """Self-attention inputs; for a function, equally many keys as queries."""
        return self.drawer.inputs(with_context=False)

    def out(
        self, inputs: Inputs, *, training: bool = False, subject: UserAttention | None = None, seed: int | None = 0
    ) -> Tensor:
        """The output of one call, with torch's generator seeded by `seed` and restored afterwards. None: not seeded. A subject
        that keeps state gets a fresh copy for each call."""
        callee = subject or self.subject
        if subject is None and self.keeps_state and self.pristine is not None:
            callee = self.subject.of(copy.deepcopy(self.pristine), self.subject.dtype)
        return callee(inputs, training=training, seed=seed)


def probe(subject: UserAttention, seed: int, stage: Callable[[str], None]) -> Probed:
    """What all probes find, in eval mode; later ones use what earlier ones found. `stage` is called before each, which restarts
    the time limit."""
    probed = Probed(subject, subject.drawer(seed), copied(subject.built.module))
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        stage(f"calling {subject.built.name}")
        probed.out(probed.inputs())
        for name, run in _PROBES.items():
            stage(f"probing {subject.built.name} ({name})")
            probed.drawer.restart()
            try:
                result = run(probed)
            except Exception as fault:  # user code may raise anything
                result = ProbeResult(name, f"could not run: the code raises {_first_line(fault)}")
            probed.probes.append(result)
    return probed


def _first_line(fault: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(fault).split())[:200]
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


# ----------------------------------------------------------------------------------------------------------------- changes


_MOVES = {torch.float64: 1e-9, torch.float32: 1e-5}
_MOVES_16 = 2e-2


def _changes(before: Tensor, after: Tensor) -> Tensor:
    """|after − before| in float64; ∞ where only one is NaN or infinite, or for different shapes."""
    if before.shape != after.shape:
        return torch.full(before.shape or (1,), math.inf, dtype=torch.float64)
    a, b = (tensor.detach().to("cpu", torch.float64) for tensor in (before, after))
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (b - a).abs().nan_to_num(nan=math.inf))


def _size_of(tensor: Tensor) -> float:
    """The largest finite magnitude, 1 where there is none."""
    finite = tensor.detach().to("cpu", torch.float64).abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.max()) or 1.0 if finite.numel() else 1.0


def _relative(before: Tensor, after: Tensor) -> float:
    """The largest change relative to the size of `before`; ∞ if NaN appeared or disappeared."""
    differences = _changes(before, after)
    return float(differences.max()) / _size_of(before) if differences.numel() else 0.0


# ------------------------------------------------------------------------------------------- the same again, and alone


def determinism(probed: Probed) -> ProbeResult:
    """Whether the same input gives the same output in eval mode, at once and after another input."""
    inputs, other = probed.inputs(), probed.inputs()
    first = probed.out(inputs, seed=None)
    try:
        second = probed.out(inputs, seed=None)
        probed.out(other, seed=None)
        third = probed.out(inputs, seed=None)
    except Exception as fault:  # a later call fails
        probed.keeps_state, probed.is_random = True, False
        message = f"the first call works, a later one with the same input raises {_first_line(fault)}"
        return ProbeResult("determinism", message, ok=False)
    change = max(_relative(first, second), _relative(first, third))
    probed.is_random = probed.keeps_state = False
    if change <= probed.tolerance:
        message = "the same input gives the same output, also after another one"
    elif _relative(probed.out(inputs), probed.out(inputs)) <= probed.tolerance:
        probed.is_random = True
        message = (
            "the same input gives another output in eval mode, but the same one after torch.manual_seed: it is random"
        )
    else:
        probed.keeps_state = True
        message = "the same input gives another output after other calls, with the same seed too: it keeps state"
    return _measured("determinism", message, change, ok=change <= probed.tolerance)


def _measured(name: str, message: str, value: float, ok: bool | None = None) -> ProbeResult:
    """The result with a measured number, which is left out where it is not finite."""
    return ProbeResult(name, message, float(value) if math.isfinite(value) else None, ok)


# ------------------------------------------------------------------------------------------------------------ visible keys


_SMALL_SCALE = 0.1
"""The scale of inputs with small scores and nearly equal weights, so that every visible key has an influence."""


def visible_keys(probed: Probed) -> ProbeResult:
    """Which tokens influence which outputs in self-attention, by replacing each token in turn.

    A token among equal ones cannot change its output through its query, so equal tokens show the diagonal.
    """
    random, small = probed.inputs(), probed.inputs().map(lambda rows: rows * _SMALL_SCALE)
    equal_tokens = small.map(lambda rows: rows[..., :1, :].expand_as(rows).clone())
    by_random, probed.largest_future = _influence(probed, random)
    by_equal, _ = _influence(probed, equal_tokens, factor=_SMALL_SCALE)
    if random.keys is None:
        by_random.fill_diagonal_(False)  # the token may act through its query only
    probed.influence = by_random | by_equal
    probed.visible = _kind_of(probed.influence)
    ok = False if probed.visible in ("plus the next", "transposed") else None
    share = float(probed.influence.float().mean())
    return _measured("visible keys", _VISIBLE_TEXT[probed.visible], share, ok)


_VISIBLE_TEXT: dict[Visible, str] = {
    "full": "every token sees every token",
    "causal": "every token sees itself and those before it",
    "without itself": "every token sees those before it, but not itself",
    "plus the next": "every token sees itself, those before it, and the next one",
    "transposed": "every token sees itself and those after it, none before",
    "itself only": "every token sees itself alone",
    "other": "what a token sees is neither everything nor a triangle",
}


def _influence(probed: Probed, base: Inputs, *, factor: float = 1.0) -> tuple[Bool[Tensor, "query key"], float]:
    """Which token influences which output, and the largest relative change by a later token."""
    before = probed.out(base)
    moved, largest = [], 0.0
    for key in range(base.queries.shape[-2]):
        after = probed.out(probed.drawer.replaced(base, key, factor=factor))
        changes = _changes(before, after) / _size_of(before)
        moved.append(changes.movedim(-2, 0).flatten(1).amax(1) > probed.tolerance)
        earlier = changes[..., :key, :]
        largest = max(largest, float(earlier.max())) if earlier.numel() else largest
    return torch.stack(moved, 1), largest


def _kind_of(influenced: Bool[Tensor, "query key"]) -> Visible:
    """The kind of visibility. A first or last query without any visible key counts as either way."""
    ones = torch.ones_like(influenced)
    shapes: dict[Visible, Tensor] = {
        "full": ones,
        "causal": ones.tril(),
        "plus the next": ones.tril(1),
        "transposed": ones.triu(),
        "itself only": ones.tril().triu(),
    }
    for name, shape in shapes.items():
        if torch.equal(influenced, shape):
            return name
    if torch.equal(influenced[1:], ones.tril(-1)[1:]):
        return "without itself"
    return "transposed" if torch.equal(influenced[:-1], ones.triu(1)[:-1]) else "other"


# ---------------------------------------------------------------------------------------------------------------- dropout


P = 0.5
"""The dropout of the copies, large enough to show in one call."""
FEWEST_CALLS, MOST_CALLS = 40, 200
_PATIENCE_S, _LONGEST_S, _SIGMAS = 1.0, 8.0, 5.0


def dropout_in_eval(probed: Probed) -> ProbeResult:
    """Whether a copy with dropout 0.5 and the same weights is deterministic in eval mode; of a random subject, whether one
    with dropout 0 is."""
    name, is_random = "dropout in eval", bool(probed.is_random)
    reason, twin, names = _copy_with_dropout(probed, 0.0 if is_random else P)
    if twin is None:
        return ProbeResult(name, reason)
    inputs, names_text = probed.inputs(), ", ".join(names)
    change = _relative(*(probed.out(inputs, subject=twin, seed=seed) for seed in (1, 2)))
    varies = change > probed.tolerance
    probed.is_random_with_dropout = varies != is_random
    if is_random and varies:
        return _measured(name, f"with {names_text} = 0 it is random too", change)
    if is_random:
        return ProbeResult(
            name,
            f"with {names_text} = 0 it is not random in eval mode, otherwise it is: dropout does not rest",
            ok=False,
        )
    message = f"with {names_text} = {P} it rests in eval mode"
    if varies:
        message = f"with {names_text} = {P} the same input gives other outputs in eval mode: dropout does not rest"
    return _measured(name, message, change, ok=not varies)


def dropout_in_training(probed: Probed) -> ProbeResult:
    """The mean output of many calls in training mode with dropout 0.5, compared with the output in eval mode.

    Each output column contains a part without dropout, such as a bias, and a part that dropout scales. The slope of the
    training output over the eval output, within columns, is independent of the former. Every call gives a slope, and their
    spread gives the standard error.
    """
    name = "dropout in training"
    if probed.is_random:
        return ProbeResult(name, "not run: its output in eval mode is not always the same")
    reason, twin, names = _copy_with_dropout(probed, P)
    if twin is None:
        return ProbeResult(name, reason)
    inputs, slopes, names_text = probed.inputs(), list[float](), ", ".join(names)
    began = time.perf_counter()
    eval_out = probed.out(inputs, subject=twin).double()
    call_s = time.perf_counter() - began
    if FEWEST_CALLS * call_s > _LONGEST_S:
        return ProbeResult(name, f"left out: a call takes {call_s:.2g} s, and this takes {FEWEST_CALLS} or more")
    centred = eval_out - eval_out.mean((0, 1), keepdim=True)
    size = float((centred * centred).sum())
    if not math.isfinite(size) or size == 0:
        return ProbeResult(name, "its output does not vary, so that it cannot be compared")
    for seed in range(min(MOST_CALLS, max(FEWEST_CALLS, round(_PATIENCE_S / max(1e-6, call_s))))):
        out = probed.out(inputs, subject=twin, training=True, seed=seed).double()
        slopes.append(float((centred * (out - eval_out)).sum()) / size)
    if not all(math.isfinite(slope) for slope in slopes):
        return ProbeResult(name, "its output in training is not finite")
    if max(map(abs, slopes)) <= probed.tolerance:
        return ProbeResult(name, f"{names_text} changes nothing in training", 1.0)
    return _of_slopes(probed, slopes, names_text)


def _of_slopes(probed: Probed, slopes: list[float], names: str) -> ProbeResult:
    """Decides between the slopes 1 and 1 − p, if five standard errors separate them."""
    slope = 1 + statistics.fmean(slopes)
    error = statistics.stdev(slopes) / math.sqrt(len(slopes))
    margin = _SIGMAS * error
    message = f"with {names} = {P} the mean output in training is {slope:.2f} ± {error:.2f} of that in eval"
    if 2 * margin < P and abs(slope - 1) <= margin:
        probed.is_rescaled = True
    elif 2 * margin < P and abs(slope - (1 - P)) <= margin:
        probed.is_rescaled = False
        message += ": what is kept is not divided by 1 − p"
    return ProbeResult("dropout in training", message, slope, probed.is_rescaled)


def _copy_with_dropout(probed: Probed, p: float) -> tuple[str, UserAttention | None, tuple[str, ...]]:
    """A copy with the same weights and dropout `p`, and the names it was set through; else the reason why there is none."""
    module = probed.subject.built.module
    if module is None:
        return "a function has no modes", None, ()
    if probed.keeps_state:
        return "not run: it keeps state", None, ()
    twin, names = with_dropout(module, p)
    if not names:
        return "it has no dropout that could be raised", None, ()
    return "", probed.subject.of(twin, probed.subject.dtype), names


def with_dropout(module: nn.Module, p: float) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy with dropout modules and numeric dropout attributes set to `p`, and their names; the module itself if it cannot be
    copied, or has none."""
    twin, names = copied(module), list[str]()
    for path, part in twin.named_modules() if twin is not module else ():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = p
            names.append(path or type(part).__name__)
            continue
        for name in [name for name, value in vars(part).items() if _is_dropout(name, value)]:
            setattr(part, name, p)
            names.append(f"{path}.{name}" if path else name)
    return twin, tuple(names)


def _is_dropout(name: str, value: object) -> bool:
    is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    return is_rate and role_of(name) == "dropout"


# -------------------------------------------------------------------------------------------------------- the table

_PROBES: Mapping[str, Callable[[Probed], ProbeResult]] = {
    "determinism": determinism,
    "dropout in eval": dropout_in_eval,
    "visible keys": visible_keys,
    "dropout in training": dropout_in_training,
}
"""The probes in order of execution."""
