"""What is known of a user's attention before it is compared: what probes measure, its random
weights, and test inputs, each of which shows one property, with the outputs for them.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mhacli.attention.core import dtype_name
from mhacli.attention.stages import Inputs, require
from mhacli.attention.taps import largest_difference
from mhacli.record.checks import TOLERANCES
from mhacli.usercode.accepted import random_inputs
from mhacli.usercode.axes import ROW_AXES
from mhacli.usercode.build import as_float64, cast, cast_copy, is_of_torch
from mhacli.usercode.copies import copied, deep_copy
from mhacli.usercode.door import NO_ANSWER, Unreadable, call_user
from mhacli.usercode.graph import KERNEL, Operation, RecordedCall, recorded
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.masks import MaskForm
from mhacli.usercode.projections import read_name
from mhacli.usercode.roles import called_function, role_of
from mhacli.usercode.user_attention import Changed, InputDrawer, UserAttention

from .result import CheckRequest, ProbeResult

RAISED_DROPOUT = 0.5
"""The dropout of copies, large enough to show in one call."""
_N_COPIES = 200
"""Copies of the input whose outputs in training mode are averaged."""
_SIGMAS = 5.0
"""Standard errors within which the slope of an output must be that of one of two readings."""
_SMALL_SCALE = 0.1
"""The scale of inputs with small scores and nearly equal weights, so that every visible key has an
influence."""
_CAUSAL = ("causal", "autoregressive", "masked", "unidirectional")
_DENIALS = (
    "non",
    "not",
    "anti",
    "or",
    "bi",
    "un",
    "optionally",
    "optional",
    "possibly",
    "no",
    "without",
)
"""Words in the name of a class that say that it is causal, and those that deny it."""


@dataclass
class ProbedAttention:
    """All that is known before the comparison: the subject without dropout and with random weights,
    its module in float64 for the reference, the weights that a function is called with, and the
    request. If it keeps state, each call uses a fresh copy.

    `evidence` has that of each mistake that needs no reference, by its code. `influence`: whether
    another token at key changes the output at query, on the diagonal through its value, not its
    query; None where nothing was measured.
    """

    subject: UserAttention
    request: CheckRequest
    module: nn.Module | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)
    influence: Bool[Tensor, "query key"] | None = None

    @property
    def expects_causal(self) -> bool:
        """Whether no token is meant to see a later one: by the option, an argument, or its name.
        For cross-attention only an argument counts, because the context has its own positions.
        """
        subject = self.subject
        request = self.request
        if request.sees is not None and not request.causal:
            return False
        switches = subject.parameters("causal")
        is_off = any(not subject.others.get(each.name, each.default) for each in switches)
        if subject.causal_by is not None or subject.mode == "cross":
            return subject.causal_by is not None
        name = getattr(subject.built.thing, "__name__", type(subject.built.thing).__name__)
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
        is_named = not words.isdisjoint(_CAUSAL) and words.isdisjoint(_DENIALS)
        return request.causal or (is_named and not is_off)

    @property
    def visible(self) -> str:
        """Which tokens influence an output, a name of `_KINDS`; empty where nothing was
        measured.
        """
        if (seen := self.influence) is None:
            return ""
        # the first or the last query may see no key, and then sees all
        ones = torch.ones_like(seen)
        inner = slice(1, -1)
        kinds = (
            name
            for name, (shape, _) in _KINDS.items()
            if torch.equal(seen[inner], shape(ones)[inner])
        )
        return next(kinds, "other")

    @property
    def probes(self) -> tuple[ProbeResult, ...]:
        """What was measured without the reference."""
        if self.influence is None:
            return ()
        words = _KINDS[self.visible][1]
        return (ProbeResult("visible keys", words, self.influence.double().mean().item()),)


def with_dropout(subject: UserAttention, p: float) -> UserAttention | None:
    """A copy with this dropout in its modules and numeric attributes; None if it cannot be copied,
    or has none.
    """
    module = subject.module
    has_dropout = False
    twin = copied(module)
    for part in twin.modules() if twin is not None and twin is not module else ():
        for name, value in vars(part).items():
            if type(value) in (int, float) and 0 <= value < 1 and role_of(name) == "dropout":
                has_dropout = True
                vars(part)[name] = p
    if twin is None or not has_dropout:
        return None
    return replace(subject.with_call(twin), is_without_dropout=False)


def within_block(subject: UserAttention) -> UserAttention:
    """The attention in a block with a feed-forward part, of which the output is what its output
    projection gives; any other as it is.
    """
    # so that the subject keeps nothing of the calls, such as the rows of a cache
    alone = subject.with_call(copied(subject.built.call))
    module = alone.module
    with suppress(*NO_ANSWER):
        call = recorded(alone, random_inputs(alone), 0)
        behind = dict[str, Tensor]()
        for operation in filter(attrgetter("projects"), call.behind):
            for name in operation.weights():
                behind[name.rpartition(".")[0]] = operation.output
        if module is not None and len(call.attentions) == 1 and len(behind) > 2:
            part, out = next(iter(behind.items()))
            parent = module.get_submodule(part.rpartition(".")[0])
            axes = ROW_AXES if subject.has_own_queries and out.ndim == 3 else subject.output[1]
            if parent is module or is_of_torch(parent):
                inner = replace(subject, is_inside=True, part=part, output=("[1]", axes))
                inner.with_call(alone.built.call)(random_inputs(inner))
                return inner
    return subject


def probe(subject: UserAttention, request: CheckRequest) -> ProbedAttention:
    """What is measured without the reference, in eval mode; then with random weights and biases,
    because initial ones hide mistakes, for example with zero biases.
    """
    called = subject.with_call(
        copied(subject.built.call)
    )  # so that the subject keeps nothing of the calls
    probed = ProbedAttention(called, request)
    seed = request.seed
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        called(subject.drawer(seed).inputs(with_context=False), seed=0)
        for measure in (repeat_calls, replace_tokens, average_training):
            with suppress(*NO_ANSWER):
                measure(probed, subject.drawer(seed))
        with suppress(*NO_ANSWER):
            subject = replace(subject, inner=dtype_inside(called, subject.drawer(seed)))
    if "dropout-in-eval" in probed.evidence:
        subject = replace(with_dropout(subject, 0.0) or subject, is_without_dropout=True)
    if (module := subject.module) is None:
        stored = {**getattr(subject.built.call, "__dict__", {}), **subject.others}
        tensors = {name: each for name, each in stored.items() if isinstance(each, Tensor)}
        floats = {
            name: as_float64(each) for name, each in tensors.items() if each.is_floating_point()
        }
        return replace(probed, subject=subject, tensors=floats)
    module = cast(randomised(module, request.seed), subject.dtype)
    subject = replace(
        subject.with_call(module), is_copied="state-kept-between-calls" in probed.evidence
    )
    return replace(probed, subject=subject, module=cast_copy(module, torch.float64, "cpu"))


_MOVED = 1e-5
"""How far inputs move, relative to their size."""
_ROUGH = 4.0
"""How many times further outputs of code move that rounds to 16 bits inside."""
_TEXTS = 16
"""Texts in which enough numbers jump."""


def dtype_inside(subject: UserAttention, drawer: InputDrawer) -> torch.dtype | None:
    """The dtype of 16 bits in which code computes on wider inputs, None for none.

    Where inputs move by a relative δ, numbers that are rounded to steps ε jump with a probability
    of δ / ε, by ε: outputs move by √(δ ε) instead of δ.
    """
    if subject.computed.itemsize == 2 or subject.ids is not None:
        return None
    inputs = drawer.inputs(with_context=False, batch=_TEXTS)
    before = subject(inputs, seed=0).double()

    def times(distance: float) -> float:
        def moved(rows: Tensor) -> Tensor:
            step = torch.randn(rows.shape, generator=drawer.generator, dtype=rows.dtype)
            return rows + distance * step

        after = subject(inputs.map(moved), seed=0).double()
        return float((after - before).norm() / (distance * before.norm()))

    least = times(_MOVED)
    # what is only sensitive moves as far for each step
    if not _ROUGH < least < _ROUGH**4 or least < 2 * times(100 * _MOVED):
        return None
    eps = {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
    return min(eps, key=lambda dtype: abs(math.log(least**2 * _MOVED / eps[dtype])))


def differing(before: Tensor, after: Tensor) -> Bool[Tensor, "..."]:
    """Which numbers of an output differ by more than rounding, relative to the largest; all of them
    if it has another shape.
    """
    a = as_float64(before)
    b = as_float64(after)
    if a.shape != b.shape:
        return torch.ones_like(a, dtype=torch.bool)
    size = a.abs().nan_to_num(nan=0.0, posinf=0.0).max().item() or 1.0
    rounding = TOLERANCES[dtype_name(before.dtype)].runs
    return ~torch.isclose(b, a, rtol=0.0, atol=rounding * size, equal_nan=True)


def repeat_calls(probed: ProbedAttention, drawer: InputDrawer) -> None:
    """Adds the evidence that the same input gives another output in eval mode, at once or after
    another input, with more dropout if there is any. Where code keeps state, what is probed from
    then on is a copy for each call.
    """
    inputs, other = (drawer.inputs(with_context=False) for _ in range(2))
    subject = probed.subject
    twin = with_dropout(probed.subject, RAISED_DROPOUT) or probed.subject
    unused = replace(subject.with_call(copied(subject.built.call)), is_copied=True)
    first = twin(inputs)
    try:
        second = twin(inputs)
        twin(other)
        third = twin(inputs)
        if not (differing(first, second) | differing(first, third)).any():
            return
        if not differing(twin(inputs, seed=0), twin(inputs, seed=0)).any():
            again = "in eval mode, but the same one after torch.manual_seed: it is random"
            probed.evidence["dropout-in-eval"] = f"the same input gives another output {again}"
            return
        how = (
            "the same input gives another output after other calls, with the same seed too: it"
            " keeps state"
        )
    except NO_ANSWER as failure:  # a later call fails
        unused(other)  # raises where this input fails in a first call too
        how = f"the first call works, a later one with the same input raises {failure!s:.200}"
    probed.evidence["state-kept-between-calls"] = how
    probed.subject = unused


# ------------------------------------------------------------------------------------- visible keys


_KINDS: Mapping[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "full": (torch.ones_like, "every token sees every token"),
    "causal": (torch.tril, "every token sees itself and those before it"),
    "without itself": (
        lambda ones: ones.tril(-1),
        "every token sees those before it, but not itself",
    ),
    "plus the next": (
        lambda ones: ones.tril(1),
        "every token sees itself, those before it, and the next one",
    ),
    "transposed": (torch.triu, "every token sees itself and those after it, none before"),
    "later": (
        lambda ones: ones.triu(1),
        "every token sees those after it, neither itself nor those before",
    ),
    "itself only": (lambda ones: ones.tril().triu(), "every token sees itself alone"),
    "other": (lambda ones: ~ones, "what a token sees is neither everything nor a triangle"),
}
"""Which tokens influence an output, as a matrix made from one that is True everywhere, and in
words; at last any other."""


def replace_tokens(probed: ProbedAttention, drawer: InputDrawer) -> None:
    """Which tokens influence which outputs in self-attention, by replacing each token in turn.

    A token among equal ones cannot change its output through its query, so equal tokens show the
    diagonal.
    """
    random, small = (drawer.inputs(with_context=False) for _ in range(2))
    small = small.map(lambda rows: _SMALL_SCALE * rows[..., :1, :].expand_as(rows))
    by_random = _by_token(probed, random, drawer)
    by_equal = _by_token(probed, small, drawer, factor=_SMALL_SCALE)
    if random.keys is None:
        by_random.fill_diagonal_(False)  # the token may act through its query only
    probed.influence = by_random | by_equal


def influence_in(probed: ProbedAttention, length: int) -> Tensor | None:
    """Which tokens influence which outputs of self-attention over a longer text, `[query, key]`;
    None where it cannot be measured.
    """
    sizes = probed.subject.sizes
    sizes = sizes._replace(batch=1, q_len=length, k_len=length, n_heads=min(sizes.n_heads, 1))
    longer = replace(probed, subject=replace(probed.subject, sizes=sizes), influence=None)
    with suppress(*NO_ANSWER):
        replace_tokens(longer, longer.subject.drawer(probed.request.seed))
    return longer.influence


def _by_token(
    probed: ProbedAttention, base: Inputs, drawer: InputDrawer, *, factor: float = 1.0
) -> Tensor:
    """Whether another token at key changes each output, `[query, key]`."""
    before = probed.subject(base, seed=0)
    n_keys = base.queries.shape[-2]
    if before.shape[-2] != n_keys:
        raise Unreadable(f"texts of {n_keys} tokens have {before.shape[-2]} outputs")
    replaced = [drawer.replaced(base, key, factor=factor) for key in range(n_keys)]
    changes = [differing(before, probed.subject(inputs, seed=0)) for inputs in replaced]
    return torch.stack([each.movedim(-2, 0).flatten(1).any(1) for each in changes], 1)


# ------------------------------------------------------------------------------------------ dropout


def average_training(probed: ProbedAttention, drawer: InputDrawer) -> None:
    """Whether the mean output in training mode with dropout 0.5, over many copies of the input, is
    that in eval mode times 1 − p.

    Each output column contains a part without dropout, such as a bias, and a part that dropout
    scales. The slope of the training output over the eval output, within columns, is independent of
    the former. Every copy gives a slope, and their spread gives the standard error. It decides
    between the slopes 1 and 1 − p, if five standard errors separate them.
    """
    twin = with_dropout(probed.subject, RAISED_DROPOUT)
    if twin is None or probed.evidence:
        return
    inputs = drawer.inputs(with_context=False)
    eval_out = twin(inputs, seed=0).double()
    copies = inputs.map(lambda rows: rows.repeat(_N_COPIES, *[1] * (rows.ndim - 1)))
    training_out = twin(copies, training=True, seed=0).double()
    if training_out.shape != (_N_COPIES * len(eval_out), *eval_out.shape[1:]):
        raise Unreadable("in training mode outputs have other shapes")
    out = training_out.unflatten(0, (_N_COPIES, -1))
    centred = eval_out - eval_out.mean((0, 1), keepdim=True)
    slopes = 1 + (centred * (out - eval_out)).flatten(1).sum(dim=1) / centred.square().sum()
    slope = slopes.mean().item()
    error = slopes.std().item() / _N_COPIES**0.5
    if (
        2 * _SIGMAS * error < RAISED_DROPOUT
        and abs(slope - (1 - RAISED_DROPOUT)) <= _SIGMAS * error
    ):
        mean = (
            f"with dropout {RAISED_DROPOUT} the mean output in training is {slope:.2f} ±"
            f" {error:.2f} of that in eval"
        )
        probed.evidence["dropout-not-rescaled"] = f"{mean}: what is kept is not divided by 1 − p"


# ------------------------------------------------------------------------------------------- inputs


TOLERANCE = TOLERANCES["float32"].runs
"""Relative to the largest number of the output: rounding of float32, which many modules compute
with inside."""
LARGE_TOLERANCE = 1e-2
LARGE = 1000.0
"""Inputs times this make scores a million times as large; a number that stands for −∞ must be lower
still."""
LARGE_SCORES = "scores × 1,000,000"
"""A case of such inputs, as reports name it."""


@dataclass(frozen=True, eq=False)
class InputCase:
    """One input, rounded to the subject's dtype, and its output `[batch, query, d_out]`, both in
    float64. `form` is the form of the mask or of the padding, and `rounding` the tolerance relative
    to the largest number of the output.
    """

    name: str
    inputs: Inputs
    output: Tensor
    form: MaskForm | None = None
    rounding: float = TOLERANCE

    @cached_property
    def tolerance(self) -> float:
        """The largest difference that counts as rounding."""
        finite = self.output[self.output.isfinite()]
        return max(finite.abs().max().item() if finite.numel() else 1.0, 1e-30) * self.rounding


def counted_rows(inputs: Inputs, out: Tensor, keep: Tensor | None = None) -> Bool[Tensor, "..."]:
    """The rows of an output that count, `[batch, query]`, or with heads for a function: padded
    queries, and those that may `keep` no key, have no right output. Raises `NotPossible` if the
    cells to keep are of another shape.
    """
    counted = torch.ones(out.shape[:-1], dtype=torch.bool)
    real = inputs.real
    if real is not None and real.shape == (len(out), out.shape[-2]):
        counted &= real if out.ndim == 3 else real[:, None]
    if keep is not None:
        has_key = keep.any(dim=-1)  # [batch, head, query]
        has_key = has_key.all(dim=1) if out.ndim == 3 else has_key
        require(all(n in (1, of) for n, of in zip(has_key.shape, counted.shape, strict=True)))
        counted &= has_key
    return counted


def make_case(
    name: str,
    subject: UserAttention,
    inputs: Inputs,
    form: MaskForm | None = None,
    *,
    rounding: float | None = None,
) -> InputCase:
    """The case with the subject's output, which counts as rounded in the dtype in which the subject
    computes, or by `rounding`. Raises `UserRaised`, and `Unreadable` without one."""
    output = as_float64(subject(inputs, mask=form))
    if rounding is None:
        name_of_dtype = dtype_name(subject.computed)
        rounding = TOLERANCES[name_of_dtype].runs if subject.computed.itemsize == 2 else TOLERANCE
    return InputCase(
        name, inputs.map(lambda rows: as_float64(rows.to(subject.dtype))), output, form, rounding
    )


def recorded_case(subject: UserAttention, case: InputCase) -> RecordedCall:
    """The recorded call of a case, without operations if it cannot be recorded."""
    with suppress(*NO_ANSWER):
        return recorded(subject, case.inputs, 0, case.form)
    return RecordedCall(case.output, case.inputs)


def arguments_without_effect(subject: UserAttention) -> tuple[str, ...]:
    """A sentence about each argument that is never read."""
    name = getattr(called_function(subject.built.call), "__name__", subject.built.name)
    return tuple(
        f"{name}() never reads {it}: no value of it changes the output" for it in subject.unread
    )


def arguments_changed(subject: UserAttention, seed: int) -> tuple[str, ...]:
    """A sentence about the arguments that a call changes in place."""
    passed = dict[str, tuple[Tensor, Tensor]]()

    def kept(arguments: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: each for name, each in arguments.items() if isinstance(each, Tensor)}
        passed.update({name: (each, each.clone()) for name, each in tensors.items()})
        return arguments

    with suppress(OutOfTime, *NO_ANSWER):  # what is known stays
        subject.with_call(Changed(copied(subject.built.call), kept))(
            subject.drawer(seed).inputs(with_context=subject.takes_context), seed=0
        )
    names = [name for name, (after, before) in passed.items() if not torch.equal(after, before)]
    return (f"it changes {', '.join(names)} of its caller in place",) if names else ()


def unmasked_inputs(subject: UserAttention, seed: int) -> dict[str, Inputs]:
    """Inputs without masks by name: self-attention, and separate inputs for each argument."""
    drawer = subject.drawer(seed)
    inputs = dict[str, Inputs]()
    if not subject.has_own_queries:
        inputs["self-attention"] = drawer.inputs(with_context=False)
    if subject.takes_context or subject.n_rows > 1:
        name = (
            "fewer queries than keys" if subject.takes_context else "other rows for each argument"
        )
        inputs[name] = drawer.inputs(with_context=True)
    return inputs


def masked_cases(
    subject: UserAttention, seed: int, forms: Sequence[MaskForm], *, batch: int | None = None
) -> Iterator[InputCase]:
    """One case for each form of a mask, or of padding, that fits these sizes."""
    drawer = subject.drawer(seed)
    inputs = drawer.inputs(with_context=subject.takes_context, batch=batch)
    allowed = drawer.allowed(inputs)
    holes = drawer.real(inputs, on_the_right=False)
    right = drawer.real(inputs)
    for form in forms:
        masked = inputs._replace(allowed=form.repeated(allowed))
        if form.is_padding:
            masked = inputs._replace(real=right if form.kind == "lengths" else holes)
        with suppress(*NO_ANSWER):  # the form does not fit these sizes
            yield make_case(
                f"{form.parameter} [{', '.join(form.axes)}], {form.as_passed}",
                subject,
                masked,
                form,
            )


def is_same_unmasked(subject: UserAttention, case: InputCase) -> bool:
    """Whether the output is that of a case if its mask, or its padding, hides nothing."""
    allowed, real = (
        None if each is None else torch.ones_like(each)
        for each in (case.inputs.allowed, case.inputs.real)
    )
    out = subject(case.inputs._replace(allowed=allowed, real=real), mask=case.form)
    return torch.equal(as_float64(out), case.output)


def large_case(subject: UserAttention, case: InputCase) -> InputCase:
    """Another case with scores a million times as large."""
    inputs = case.inputs
    large = inputs._replace(
        queries=inputs.queries * LARGE, keys=None if inputs.keys is None else inputs.keys * LARGE
    )
    if large.allowed is not None:  # one visible key for each query, so that its score may be low
        q_len, k_len = large.allowed.shape[-2:]
        large = large._replace(
            allowed=torch.eye(k_len, dtype=torch.bool)[torch.arange(q_len) % k_len][None, None]
        )
    return make_case(LARGE_SCORES, subject, large, case.form, rounding=LARGE_TOLERANCE)


# ----------------------------------------------------------------------------------- random weights


def unparametrized(module: nn.Module) -> nn.Module:
    """A copy whose weights are parameters, also those that torch computes from others, as with a
    weight norm.
    """
    copied_module = deep_copy(module)
    for part in copied_module.modules():
        kind = type(part)
        names = [*getattr(part, "parametrizations", ())]
        if names:  # their property is one of the class, which the original has too
            part.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
        for name in names:
            call_user(parametrize.remove_parametrizations, part, name)
        for key, hook in [
            *part._forward_pre_hooks.items()
        ]:  # the older weight norm and spectral norm
            if isinstance(hook, WeightNorm | SpectralNorm):
                call_user(hook.remove, part)
                del part._forward_pre_hooks[key]
    return copied_module


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """A copy with random weights, scaled for queries and keys of unit size, and non-zero biases."""
    copied_module = unparametrized(module)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in copied_module.parameters():
        is_set = parameter.numel() == 1 and bool(
            parameter != 0
        )  # a gate of 0 would hide all that is behind it
        if not parameter.is_floating_point() or is_set:
            continue
        numbers = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if bool((parameter.detach() == 1).all()):  # an untrained gain of a norm, or a temperature
            numbers = (1 + numbers * 0.2).abs()
        else:
            numbers *= 0.5 if parameter.ndim < 2 else 1.2 * max(parameter.shape) ** -0.5
        parameter.data.copy_(numbers)
    return copied_module


# ----------------------------------------------------------------- measured to locate a mistake


def operations_that_differ(probed: ProbedAttention, code: str) -> list[Operation]:
    """The operations on lines of user code that compute something else in a second call with the
    same input: with another seed, in training mode, or only because it is the second. None are
    known if time is over.
    """
    subject = replace(probed.subject, is_without_dropout=False)
    twin = with_dropout(subject, RAISED_DROPOUT) or subject.with_call(copied(subject.built.call))
    seed = int(code == "dropout-in-eval")
    training = code == "dropout-not-rescaled"
    with suppress(OutOfTime, *NO_ANSWER):
        inputs = twin.drawer(probed.request.seed).inputs(with_context=False)
        first = recorded(twin, inputs, 0)
        second = recorded(twin, inputs, seed, training=training)
        return [
            one
            for one, other in zip(first.operations, second.operations, strict=False)
            if one.at.line is not None
            and one.output.numel()
            and not one.name.startswith("empty")  # where anything stands
            and largest_difference(one.output, other.output) > 0
        ]
    return []


def is_dropout(differing: Sequence[Operation]) -> bool:
    """Whether some of the operations that differ drop at random: by their name, in torch's fused
    function, whose inputs do not differ, or by giving no more than two numbers.
    """
    return any(
        "dropout" in each.name
        or (each.name == KERNEL and not {*each.sources}.intersection(differing))
        or len(each.output.unique()) <= 2
        for each in differing
    )


def parameters_without_effect(probed: ProbedAttention, *, n_axes: int) -> list[str]:
    """The projections of a module with random weights, or of one axis the gains of queries and
    keys, that change no output. Biases do not count, because a key bias never changes one.
    """
    module = copied(probed.subject.module)
    if module is None:
        return []
    subject = replace(probed.subject.with_call(module), is_inside=False)
    drawer = subject.drawer(probed.request.seed)
    inputs = [
        drawer.inputs(with_context=with_context) for with_context in {False, subject.takes_context}
    ]
    after = [subject(each, seed=0) for each in inputs]
    unused = list[str]()
    for name, parameter in module.named_parameters():
        letters, number = read_name(name)
        is_meant = letters in ("q", "k") if n_axes == 1 else letters and number is None
        if min(parameter.ndim, 2) != n_axes or not is_meant or "bias" in name:
            continue
        before = after
        parameter.data.mul_(-1.5).add_(0.1)
        after = [subject(each, seed=0) for each in inputs]
        if all(map(torch.equal, before, after)):
            unused.append(name.removesuffix(".weight"))
    return unused
