"""Somebody's attention made ready to be compared: imported, built, called, with weights of our own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.asker import cast
from mhacli.adapters.usercode.user_attention import Answer, Built, Inputs, MaskForm, UserAttention
from mhacli.compute.check.inputs import Draw, ask
from mhacli.compute.check.probes.catalogue import Probed


@dataclass(frozen=True)
class Examined:
    """A subject that was made ready: with weights of our own, without dropout, a fresh one for each call where it keeps state."""

    subject: UserAttention
    module: nn.Module | None
    tensors: Mapping[str, Tensor]
    keeps_state: bool = False


def with_own_weights(subject: UserAttention, probed: Probed, seed: int) -> Examined:
    """The subject with random weights and biases: those of a new module hide what a bias of zero, or a small weight, does."""
    module = _pristine(subject.built, probed)
    if module is None:
        tensors = {name: t.detach().to("cpu", torch.float64) for name, t in _tensors_of(subject).items()}
        return Examined(subject, None, tensors)
    module = cast(randomised(module, seed), subject.dtype)
    asked, forgetful = subject.of(module, subject.dtype), Anew(subject.of(module, subject.dtype), module)
    keeps_state = bool(probed.facts.keeps_state) or _remembers_masks(subject, forgetful, seed)
    plain = cast(copy.deepcopy(module), torch.float64, "cpu")
    return Examined(forgetful if keeps_state else asked, plain, {}, keeps_state)


def _pristine(built: Built, probed: Probed) -> nn.Module | None:
    """The module; where it is random, or has kept something of earlier calls, built anew, without dropout."""
    facts = probed.facts
    if built.module is None or not (facts.is_random or facts.keeps_state):
        return built.module
    try:
        return built.rebuild(dict.fromkeys(facts.dropout_names, 0.0)).module
    except Exception:  # a constructor that does not want it
        return built.module


def _remembers_masks(subject: UserAttention, forgetful: Anew, seed: int) -> bool:
    """Whether the mask of one call is still there in the next one."""
    draw = Draw(subject, seed)
    inputs = draw.inputs(other=subject.takes_context)
    for form in (*subject.padding_forms[:1], *subject.mask_forms[:1]):
        is_padding = form in subject.padding_forms
        given = (
            inputs._replace(real=draw.real(inputs)) if is_padding else inputs._replace(allowed=draw.allowed(inputs)[:1])
        )
        first = given._replace(
            allowed=None if given.allowed is None else torch.ones_like(given.allowed),
            real=None if given.real is None else torch.ones_like(given.real),
        )
        how = {"padding": form} if is_padding else {"mask": form}
        try:
            used = forgetful.inner.of(copy.deepcopy(forgetful.module), subject.dtype)
            ask(used, first, **how)
            second, alone = (_seeded(one, given, how) for one in (used, forgetful))
        except Exception:  # a form that these sizes do not fit
            continue
        if not torch.equal(second.nan_to_num(), alone.nan_to_num()):
            return True
    return False


def _seeded(subject: UserAttention, inputs: Inputs, how: Mapping[str, MaskForm]) -> Tensor:
    """An answer in which what is random is the same each time."""
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        torch.manual_seed(0)
        return ask(subject, inputs, **how)


def _tensors_of(subject: UserAttention) -> Mapping[str, Tensor]:
    """The weights of what is no module: those that a call is given, or that an instance holds."""
    given = dict(getattr(subject, "tensors", {}))
    held = getattr(subject.built.call, "__dict__", {})
    return given or {n: value for n, value in held.items() if isinstance(value, Tensor) and value.is_floating_point()}


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """A copy with normal weights, scaled so that queries and keys are of size one, and biases that are not zero."""
    made, generator = copy.deepcopy(module), torch.Generator().manual_seed(seed + 1)
    for parameter in made.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 1:
            continue
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim == 1:
            drawn = drawn * 0.5 if not _is_gain(parameter) else (1 + drawn * 0.2).abs()
        elif _is_gain(parameter):
            drawn = (1 + drawn * 0.2).abs()
        else:
            drawn = drawn * 1.2 * sorted(parameter.shape)[-1] ** -0.5
        parameter.data.copy_(drawn)
    return made


def _is_gain(parameter: Tensor) -> bool:
    """Whether it is all ones, as the gain of a norm is before training, or a temperature."""
    return bool((parameter.detach() == 1).all())


@dataclass(frozen=True)
class Anew:
    """A subject that forgets: every call asks a fresh copy."""

    inner: UserAttention
    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        """What the subject has."""
        return getattr(self.inner, name)

    def __call__(
        self,
        inputs: Inputs,
        *,
        mask: MaskForm | None = None,
        padding: MaskForm | None = None,
        training: bool = False,
    ) -> Answer:
        """Asks a copy that has not been asked before."""
        fresh = self.inner.of(copy.deepcopy(self.module), self.inner.dtype)
        return fresh(inputs, mask=mask, padding=padding, training=training)
