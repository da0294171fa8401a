"""Probes of dropout: it must rest in eval mode, and leave the mean as it is in training."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping

from torch import nn

from mhacli.adapters.usercode.arguments import role_of
from mhacli.adapters.usercode.asker import cast
from mhacli.adapters.usercode.user_attention import Built, Inputs, UserAttention
from mhacli.compute.check.probes.context import Context, Told, relative, told

P = 0.5
"""The dropout of the copies that are asked: large enough to show in one call."""
FEWEST_CALLS, MOST_CALLS = 40, 200
_PATIENCE_S, _SIGMAS = 1.0, 5.0


def dropout_in_eval(context: Context) -> Told:
    """Built anew with dropout 0.5 and the same weights: in eval mode the same input must still give the same output."""
    name = "dropout in eval"
    if context.subject.built.module is None:
        return told(name, "a function has no eval mode")
    if context.facts.keeps_state:
        return told(name, "not asked: it keeps state")
    twin, names = with_dropout(context)
    if twin is None:
        return told(name, "it has no dropout that could be raised")
    inputs = context.square()
    if context.facts.is_random:
        return _of_random(context, name, inputs)
    one, two = (context.ask(inputs, of=twin, seed=seed).out for seed in (1, 2))
    change, by = relative(one, two), ", ".join(names)
    facts = {"dropout_p": P, "dropout_names": names}
    if change > context.tolerance:
        message = f"with {by} = {P} the same input gives other outputs in eval mode: dropout does not rest"
        return told(name, message, change, False, is_random_with_dropout=True, **facts)
    return told(name, f"with {by} = {P} it rests in eval mode", change, True, is_random_with_dropout=False, **facts)


def _of_random(context: Context, name: str, inputs: Inputs) -> Told:
    """Of what is random already: whether it still is with dropout 0."""
    twin, names = with_dropout(context, 0.0)
    change, rest = (
        relative(*(context.ask(inputs, of=one, seed=seed).out for seed in (1, 2))) for one in (context.subject, twin)
    )
    by = ", ".join(names)
    if rest > context.tolerance:
        return told(name, f"with {by} = 0 it is random too", rest, is_random_with_dropout=False, dropout_names=names)
    message = f"with {by} = 0 it is not random in eval mode, otherwise it is: dropout does not rest"
    return told(name, message, change, False, is_random_with_dropout=True, dropout_names=names)


def dropout_in_training(context: Context) -> Told:
    """The mean output of many calls in training, against the output in eval mode, with dropout 0.5.

    In each output column the output is what dropout leaves alone, such as a bias, and what it scales. Hence the slope of the
    output in training over the output in eval, within columns, does not depend on the first; every call gives one, so that
    their spread tells how sure their mean is.
    """
    name = "dropout in training"
    if context.subject.built.module is None:
        return told(name, "a function has no training mode")
    if context.facts.keeps_state or context.facts.is_random:
        return told(name, "not asked: its output in eval mode is not always the same")
    twin, names = with_dropout(context)
    if twin is None:
        return told(name, "it has no dropout that could be raised")
    inputs = context.square()
    still = context.ask(inputs, of=twin).out.double()
    centred = still - still.mean((0, 1), keepdim=True)
    size = float((centred * centred).sum())
    if not math.isfinite(size) or size == 0:
        return told(name, "its output does not vary, so that it cannot be compared")
    slopes = []
    n_calls = round(_PATIENCE_S / max(1e-6, context.facts.call_s))
    for seed in range(min(MOST_CALLS, max(FEWEST_CALLS, n_calls))):
        out = context.ask(inputs, of=twin, training=True, seed=seed).out.double()
        slopes.append(float((centred * (out - still)).sum()) / size)
    if not all(math.isfinite(slope) for slope in slopes):
        return told(name, "its output in training is not finite")
    if max(map(abs, slopes)) <= context.tolerance:
        return told(name, f"{', '.join(names)} changes nothing in training", 1.0)
    return _of_slopes(name, names, slopes)


def _of_slopes(name: str, names: tuple[str, ...], slopes: list[float]) -> Told:
    """The verdict: 1 or 1 − p, by five standard errors, where these are small enough to tell the two apart."""
    slope = 1 + statistics.fmean(slopes)
    error = statistics.stdev(slopes) / math.sqrt(len(slopes))
    message = f"with {', '.join(names)} = {P} the mean output in training is {slope:.2f} ± {error:.2f} of that in eval"
    margin = _SIGMAS * error
    is_rescaled = None
    if 2 * margin < P:
        is_rescaled = True if abs(slope - 1) <= margin else False if abs(slope - (1 - P)) <= margin else None
    if is_rescaled is False:
        message += ": what is kept is not divided by 1 − p"
    return told(name, message, slope, is_rescaled, dropout_slope=slope, dropout_slope_error=error,
                is_rescaled=is_rescaled, dropout_p=P, dropout_names=names)  # fmt: skip


def with_dropout(context: Context, p: float = P) -> tuple[UserAttention | None, tuple[str, ...]]:
    """A copy with the same weights and dropout `p`, and by what names it was raised; None where it has no dropout."""
    built = context.subject.built
    names = tuple(name for name, value in built.arguments.items() if _is_dropout(name, value))
    twin = _rebuilt(built, {name: p for name in names}) if names else None
    if twin is not None:
        return context.subject.of(twin, context.subject.dtype), names
    raised, parts = _raised(built.module, p)
    return (None, ()) if raised is None else (context.subject.of(raised, context.subject.dtype), parts)


def _is_dropout(name: str, value: object) -> bool:
    """Whether an argument, of a configuration too, is a rate of dropout."""
    is_rate = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    return is_rate and role_of(name.rpartition(".")[2]) == "dropout"


def _rebuilt(built: Built, changes: Mapping[str, object]) -> nn.Module | None:
    """Built anew with the weights of the first; None where that does not work."""
    assert built.module is not None, "asked of modules only"
    first = next(built.module.parameters(), None)
    try:
        module = built.rebuild(changes).module
        if module is None:
            return None
        module.load_state_dict(built.module.state_dict())
        return module if first is None else cast(module, first.dtype, first.device)
    except Exception:  # whatever its author's constructor raises
        return None


def _raised(module: nn.Module | None, p: float) -> tuple[nn.Module | None, tuple[str, ...]]:
    """A copy whose dropout modules, and numbers named dropout, are set to `p`; None where it has none."""
    try:
        twin = copy.deepcopy(module)
    except Exception:  # whatever its author's __deepcopy__ raises
        return None, ()
    names = []
    for path, part in () if twin is None else twin.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = p
            names.append(path or type(part).__name__)
        else:
            own = [name for name, value in vars(part).items() if _is_dropout(name, value)]
            for name in own:
                setattr(part, name, p)
                names.append(f"{path}.{name}" if path else name)
    return (twin, tuple(names)) if names else (None, ())
