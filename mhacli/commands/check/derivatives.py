"""Gradients without a reference: the derivative of a sum of outputs along a random direction of a
tensor, from further calls, against what the backward pass gives.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.usercode.build import as_float64
from mhacli.usercode.door import call_user

_STEPS, _FINER = (1e-3, 1e-4), (1e-6, 1e-7)
"""How far calls move a tensor, relative to the usual size of its numbers: the first gives the
derivative, and the second shows how far it may be off. Behind the kinks of a ReLU finer ones are
closer, and behind numbers in 32 bits coarser ones."""
_LEAST_SIZE = 0.02
"""The least size that counts as usual: tensors of zeros move too."""
_MISFIT = 1e-3
"""How far both may differ, relative to the gradient."""
_APART = 1e-2
"""How far the derivatives by two small steps may differ, relative to the gradient."""
Gradients = Mapping[str, Tensor]
"""Gradients in float64 by the names of their tensors, without those that the output does not
reach."""


class Derivative(NamedTuple):
    """The derivative along a direction of a tensor: what the backward pass gives, None without a
    gradient, what further calls give, how far both may differ, and how far the calls may be off.
    """

    tensor: str
    by_backward: float | None
    by_calls: float
    limit: float
    noise: float

    @property
    def error(self) -> float:
        """Their difference."""
        return abs(self.by_calls - (self.by_backward or 0.0))

    @property
    def is_cut(self) -> bool:
        """Whether the output depends on the tensor, and no gradient says so."""
        return not self.by_backward and self.error > self.limit

    @property
    def differs(self) -> bool:
        """Whether the gradient is another one than that of the calls. Where these move nothing, as
        behind a rounding that lets gradients pass, it may be meant.
        """
        moves = abs(self.by_calls) > self.noise
        return moves and bool(self.by_backward) and self.error > self.limit

    @property
    def words(self) -> str:
        """Both, in a line."""
        return (
            f"the derivative along a direction of {self.tensor[1:].strip()} is {self.by_calls:.4g}"
            f" by further calls and {self.by_backward or 0.0:.4g} by the backward pass"
        )


def gradients_of(out: Tensor, wanted: Mapping[str, Tensor], cotangent: Tensor) -> Gradients:
    """The gradients of those tensors that the output depends on."""
    # of a sum, because torch imports sympy for a cotangent, which takes 0.3 s
    total = (out * cotangent.to(out)).sum()
    # the graph from parameters to projections serves every call
    found = torch.autograd.grad(total, [*wanted.values()], retain_graph=True, allow_unused=True)
    return {
        name: as_float64(each) for name, each in zip(wanted, found, strict=True) if each is not None
    }


def derivatives(
    run: Callable[[], Tensor],
    within: Callable[[], AbstractContextManager[Any]],
    wanted: Mapping[str, Tensor],
    seed: int,
) -> list[Derivative]:
    """The derivatives of what a call gives along a random direction of each tensor, none if it
    gives no gradients. The backward pass runs within a context. Raises `UserRaised` where the call
    or its backward pass does.
    """
    out = run()
    generator = torch.Generator().manual_seed(seed)
    if not out.requires_grad:
        return []
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    with within():
        gradients = call_user(gradients_of, out, wanted, cotangent)

    def moved(tensor: Tensor, by: Tensor) -> float:
        """What a call gives along the cotangent where a tensor has moved. It is put back."""
        kept = tensor.detach().clone()
        try:
            with torch.no_grad():
                tensor += by
            return (as_float64(run()) * cotangent).sum().item()
        finally:
            with torch.no_grad():
                tensor.copy_(kept)

    def measured(name: str, along: Tensor, steps: tuple[float, float]) -> Derivative:
        """The derivative along a direction, by calls and by the backward pass. The second step is
        the smaller one: how far both are apart is the noise.
        """
        tensor = wanted[name]
        gradient = gradients.get(name)
        by_calls, closer = (
            (moved(tensor, step * along) - moved(tensor, -step * along)) / (2 * step)
            for step in steps
        )
        by_backward = None if gradient is None else (gradient * along).sum().item()
        slope = 0.0 if gradient is None else gradient.norm().item() * _size_of(tensor)
        noise = abs(closer - by_calls)
        size = abs(by_calls) + slope
        # what jumps, as a selection or a rounding does, has no derivative
        limit = math.inf if noise > _APART * size else _MISFIT * size + 2 * noise
        return Derivative(name, by_backward, by_calls, limit, noise)

    found = []
    for name, tensor in wanted.items():
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        along = _size_of(tensor) * drawn
        each = measured(name, along, _STEPS)
        if each.error > each.limit:
            each = min(each, measured(name, along, _FINER), key=attrgetter("noise"))
        found.append(each)
    return found


def _size_of(tensor: Tensor) -> float:
    """The usual size of its numbers."""
    return max(as_float64(tensor).square().mean().sqrt().item(), _LEAST_SIZE)
