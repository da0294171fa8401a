"""What somebody's module does around its attention, found by asking it with projections of zero."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.asker import cast
from mhacli.adapters.usercode.projections import is_norm
from mhacli.adapters.usercode.user_attention import UserAttention
from mhacli.compute.check.diagnosis.candidates import Candidate
from mhacli.compute.check.inputs import TOLERANCE, Scene, ask


def with_its_surroundings(
    found: Sequence[Candidate], subject: UserAttention, module: nn.Module | None, scene: Scene
) -> Sequence[Candidate]:
    """The candidates that add the input and norm the output as the module does, whatever mistake it makes before; all of them
    where none does.

    With projections of zero the heads and what is made of them are zero, so that only a residual and a norm are left.
    """
    if module is None:
        return found
    try:
        silent = subject.of(cast(silenced(module), subject.dtype, subject.device), subject.dtype)
        with torch.no_grad():
            answer = ask(silent, scene.inputs, scene.form, scene.padding)
        fitting = [one for one in found if _answers(one, scene, answer)]
    except Exception:  # a module that divides by what is zero now, or a norm that wants something else
        return found
    return fitting or found


def silenced(module: nn.Module) -> nn.Module:
    """A copy whose parameters are zero, except for those of norms and single numbers."""
    made = copy.deepcopy(module)
    kept = {id(own) for child in made.modules() if is_norm(child) for own in child.parameters()}
    for parameter in made.parameters():
        if id(parameter) not in kept and parameter.numel() > 1:
            parameter.data.zero_()
    return made


def _answers(candidate: Candidate, scene: Scene, answer: Tensor) -> bool:
    """Whether a candidate whose heads are zero answers this."""
    silent = torch.zeros_like(answer)
    expected = silent if candidate.layer.after is None else candidate.layer.after(silent, scene.rows.queries)
    return expected.shape == answer.shape and torch.allclose(expected, answer, rtol=TOLERANCE, atol=TOLERANCE)
