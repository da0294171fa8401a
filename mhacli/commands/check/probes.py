"""The probes of `mha check`: questions about a user's attention that need no knowledge of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from mhacli.commands.check.result import ProbeResult
from mhacli.usercode.build import copied
from mhacli.usercode.process import exception_text
from mhacli.usercode.roles import role_of
from mhacli.usercode.user_attention import InputDrawer, Inputs, UserAttention

P = 0.5
"""The dropout of copies, large enough to show in one call."""
COPIES, _SIGMAS = 200, 5.0
_SMALL_SCALE = 0.1
"""The scale of inputs with small scores and nearly equal weights, so that every visible key has an influence."""
_MOVES = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The relative change from which an output counts as moved, by dtype."""
_MOVES_16 = 2e-2


@dataclass
class Probed:
    """What the probes found in a subject, None or False where nothing was measured, and their results in `probes`. A subject that
    keeps state computes each call on a fresh copy.

    `is_random`: in eval mode the output varies, and seeding torch repeats it. `keeps_state`: earlier calls change the output.
    `is_rescaled`: whether dropout divides by 1 − p. `changes` `[query, key]`: the largest relative change of the output at query
    by another token at key, on the diagonal through its value, not its query.
    """

    subject: UserAttention
    probes: list[ProbeResult] = field(default_factory=list)
    is_random: bool = False
    keeps_state: bool = False
    is_rescaled: bool | None = None
    changes: Tensor | None = None

    def moves(self, change: Tensor | float) -> Bool[Tensor, "..."]:
        """Whether a relative change is one."""
        return torch.as_tensor(change) > _MOVES.get(self.subject.dtype, _MOVES_16)

    @property
    def influence(self) -> Bool[Tensor, "query key"] | None:
        """Whether the token at key influences the output at query."""
        return None if self.changes is None else self.moves(self.changes)

    @property
    def visible(self) -> str:
        """Which tokens influence an output, a name of `_KINDS`; empty where nothing was measured."""
        if (seen := self.influence) is None:
            return ""
        ones, inner = (
            torch.ones_like(seen),
            slice(1, -1),
        )  # the first or the last query may see no key, and then sees all
        kinds = (name for name, (shape, _) in _KINDS.items() if torch.equal(seen[inner], shape(ones)[inner]))
        return next(kinds, "other")

    @cached_property
    def twin(self) -> tuple[UserAttention, str]:
        """A copy with the same weights and dropout 0.5, and words for it; without dropout to raise the same, and no words."""
        module = self.subject.built.module
        twin, names = (None, ()) if module is None else with_dropout(module, P)
        if twin is None or not names:
            return self.subject, ""
        return self.subject.of(twin, self.subject.dtype), f"with {', '.join(names)} = {P} "


def probe(subject: UserAttention, seed: int, stage: Callable[[str], None]) -> Probed:
    """What all probes find, in eval mode; later ones use what earlier ones found. `stage` is called before each, which restarts
    the time limit."""
    called = subject.of(copied(subject.built.call), subject.dtype)  # so that the subject keeps nothing of the calls
    probed = Probed(called)
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        stage(f"calling {subject.built.name}")
        called(subject.drawer(seed).inputs(with_context=False), seed=0)
        for name, run in _PROBES.items():
            stage(f"probing {subject.built.name} ({name})")
            try:
                message, value, ok = run(probed, subject.drawer(seed))
            except Exception as fault:  # user code may raise anything
                message, value, ok = f"could not run: the code raises {exception_text(fault):.200}", None, None
            value = value if value is not None and math.isfinite(value) else None
            probed.probes.append(ProbeResult(name, message, value, ok))
    return probed


Answer = tuple[str, float | None, bool | None]
"""The message of a probe, the number that it measured, and whether it passes."""


def _changes(before: Tensor, after: Tensor) -> Tensor:
    """|after − before| in float64, relative to the size of `before`; ∞ where only one is NaN or infinite."""
    a, b = (tensor.detach().to("cpu", torch.float64) for tensor in (before, after))
    same = (a == b) | (a.isnan() & b.isnan())
    size = float(a.abs().nan_to_num(nan=0.0, posinf=0.0).max()) or 1.0
    return torch.where(same, 0.0, (b - a).abs().nan_to_num(nan=math.inf)) / size


def determinism(probed: Probed, drawer: InputDrawer) -> Answer:
    """Whether the same input gives the same output in eval mode, at once and after another input, with more dropout if there is
    any."""
    inputs, other = (drawer.inputs(with_context=False) for _ in range(2))
    subject, (twin, words) = probed.subject, probed.twin
    unused = replace(subject.of(copied(subject.built.call), subject.dtype), is_forgetful=True)
    first = twin(inputs)
    try:
        second, _, third = twin(inputs), twin(other), twin(inputs)
    except Exception as fault:  # a later call fails
        probed.keeps_state, probed.subject = True, unused
        return f"the first call works, a later one with the same input raises {exception_text(fault):.200}", None, False
    change = float(torch.stack([_changes(first, out) for out in (second, third)]).max())
    if not probed.moves(change):
        return f"{words}the same input always gives the same output", change, True
    if not probed.moves(_changes(twin(inputs, seed=0), twin(inputs, seed=0))).any():
        probed.is_random = True
        again = "in eval mode, but the same one after torch.manual_seed: it is random"
        return f"{words}the same input gives another output {again}", change, False
    probed.keeps_state, probed.subject = True, unused
    again = "after other calls, with the same seed too: it keeps state"
    return f"the same input gives another output {again}", change, False


# ------------------------------------------------------------------------------------------------------------ visible keys


_KINDS: Mapping[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "full": (torch.ones_like, "every token sees every token"),
    "causal": (torch.tril, "every token sees itself and those before it"),
    "without itself": (lambda ones: ones.tril(-1), "every token sees those before it, but not itself"),
    "plus the next": (lambda ones: ones.tril(1), "every token sees itself, those before it, and the next one"),
    "transposed": (torch.triu, "every token sees itself and those after it, none before"),
    "later": (lambda ones: ones.triu(1), "every token sees those after it, neither itself nor those before"),
    "itself only": (lambda ones: ones.tril().triu(), "every token sees itself alone"),
    "other": (lambda ones: ~ones, "what a token sees is neither everything nor a triangle"),
}
"""Which tokens influence an output, as a matrix made from one that is True everywhere, and in words; at last any other."""


def visible_keys(probed: Probed, drawer: InputDrawer) -> Answer:
    """Which tokens influence which outputs in self-attention, by replacing each token in turn.

    A token among equal ones cannot change its output through its query, so equal tokens show the diagonal.
    """
    random, small = (drawer.inputs(with_context=False) for _ in range(2))
    small = small.map(lambda rows: _SMALL_SCALE * rows[..., :1, :].expand_as(rows))
    by_random, by_equal = _by_token(probed, random, drawer), _by_token(probed, small, drawer, factor=_SMALL_SCALE)
    if random.keys is None:
        by_random.fill_diagonal_(0.0)  # the token may act through its query only
    probed.changes = by_random.maximum(by_equal)
    ok = False if probed.visible in ("plus the next", "transposed", "later") else None
    return _KINDS[probed.visible][1], float(probed.moves(probed.changes).float().mean()), ok


def _by_token(probed: Probed, base: Inputs, drawer: InputDrawer, *, factor: float = 1.0) -> Tensor:
    """The largest relative change of each output `[query, key]` by another token at key."""
    before = probed.subject(base, seed=0)
    changed = [drawer.replaced(base, key, factor=factor) for key in range(base.queries.shape[-2])]
    changes = [_changes(before, probed.subject(inputs, seed=0)) for inputs in changed]
    return torch.stack([each.movedim(-2, 0).flatten(1).amax(1) for each in changes], 1)


# ---------------------------------------------------------------------------------------------------------------- dropout


def dropout_in_training(probed: Probed, drawer: InputDrawer) -> Answer:
    """The mean output in training mode with dropout 0.5, over many copies of the input, compared with the output in eval mode.

    Each output column contains a part without dropout, such as a bias, and a part that dropout scales. The slope of the
    training output over the eval output, within columns, is independent of the former. Every copy gives a slope, and their
    spread gives the standard error. It decides between the slopes 1 and 1 − p, if five standard errors separate them.
    """
    twin, words = probed.twin
    if not words:
        return "it has no dropout that could be raised", None, None
    if probed.is_random or probed.keeps_state:
        return "not run: the same input does not always give the same output", None, None
    inputs = drawer.inputs(with_context=False)
    eval_out = twin(inputs, seed=0).double()
    copies = inputs.map(lambda rows: rows.repeat(COPIES, *[1] * (rows.ndim - 1)))
    out = twin(copies, training=True, seed=0).double().unflatten(0, (COPIES, -1))
    centred = eval_out - eval_out.mean((0, 1), keepdim=True)
    slopes = 1 + (centred * (out - eval_out)).flatten(1).sum(dim=1) / centred.square().sum()
    if not slopes.isfinite().all():
        return "left out: its output does not vary or is not finite", None, None
    if not probed.moves((slopes - 1).abs()).any():
        return f"{words}training changes nothing", 1.0, None
    slope, error = slopes.mean().item(), slopes.std().item() / COPIES**0.5
    message = f"{words}the mean output in training is {slope:.2f} ± {error:.2f} of that in eval"
    margin = _SIGMAS * error
    if 2 * margin < P and abs(slope - 1) <= margin:
        probed.is_rescaled = True
    elif 2 * margin < P and abs(slope - (1 - P)) <= margin:
        probed.is_rescaled = False
        message += ": what is kept is not divided by 1 − p"
    return message, slope, probed.is_rescaled


def with_dropout(module: nn.Module, p: float) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy with dropout modules and numeric dropout attributes set to `p`, and their names; the module itself if it cannot be
    copied, or has none."""
    twin, names = copied(module), list[str]()
    for path, part in twin.named_modules() if twin is not module else ():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = p
            names.append(path or type(part).__name__)
            continue
        numbers = {name: value for name, value in vars(part).items() if type(value) in (int, float)}
        for name in [name for name, value in numbers.items() if 0 <= value < 1 and role_of(name) == "dropout"]:
            setattr(part, name, p)
            names.append(f"{path}.{name}" if path else name)
    return twin, tuple(names)


_PROBES: Mapping[str, Callable[[Probed, InputDrawer], Answer]] = {
    "determinism": determinism,
    "visible keys": visible_keys,
    "dropout in training": dropout_in_training,
}
"""The probes in order of execution."""
