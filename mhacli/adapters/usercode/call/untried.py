"""The arguments of a call that no examination gives another value than their default."""

from __future__ import annotations

import re
from dataclasses import replace

from mhacli.adapters.usercode.call.convention import Way
from mhacli.adapters.usercode.call.extras import Recipe
from mhacli.adapters.usercode.call.search import Laboratory, Trial, close
from mhacli.adapters.usercode.call.signature import Parameter, Role, Signature
from mhacli.adapters.usercode.subject import MaskForm

_OF_SHAPE: tuple[Role, ...] = (
    "rest",
    "training",
    "pattern",
    "mean",
    "batch",
    "q_len",
    "k_len",
    "heads",
    "d_head",
    "d_model",
)
"""What says how large something is, or what is returned besides: none of it changes the output."""
_OF_RESULT = re.compile(r"(return|output|use_return|need|get|ret)_.*|return|verbose|debug|is_?debug|logger")
"""Names of switches that change what is returned, or printed, and not what is computed."""
_STILL: tuple[Role, ...] = ("offset", "cache", "other mask")
"""Arguments that a call without a past gives as if they were not there: 0 or None."""


def untried(signature: Signature, lab: Laboratory, trial: Trial, forms: tuple[MaskForm, ...]) -> tuple[str, ...]:
    """The names, in the order of the call. A switch whose other position gives the same output is not among them."""
    used = _used(trial.way, forms)
    return tuple(
        parameter.name
        for parameter in signature.parameters
        if parameter.role not in _OF_SHAPE
        and not _OF_RESULT.fullmatch(parameter.name.lower())
        and (parameter.name not in used or _is_still(parameter, trial.way))
        and not _is_idle_switch(parameter, lab, trial)
    )


def _used(way: Way, forms: tuple[MaskForm, ...]) -> set[str]:
    """What some call gives a value of its own."""
    extras = {recipe.parameter for recipe in way.extras}
    return {slot.parameter for slot in way.slots} | {form.parameter for form in forms} | extras | set(way.fixed)


def _is_still(parameter: Parameter, way: Way) -> bool:
    """Whether it is given, but as if there were nothing to give."""
    given = next((recipe for recipe in way.extras if recipe.parameter == parameter.name), None)
    if given is None:
        return False
    return parameter.role in _STILL or (given.kind == "literal" and given.value is parameter.default)


def _is_idle_switch(parameter: Parameter, lab: Laboratory, trial: Trial) -> bool:
    """Whether it is a switch that may stand either way."""
    if not isinstance(parameter.default, bool) or lab.is_slow:
        return False
    turned = Recipe(parameter.name, "literal", not parameter.default)
    others = tuple(recipe for recipe in trial.way.extras if recipe.parameter != parameter.name)
    found = lab.located(replace(trial, way=replace(trial.way, extras=(*others, turned))))
    if found is None:
        return False
    rows = lab.rows(trial)
    before, after = lab.answer(trial, rows), lab.answer(found, rows)
    return before is not None and after is not None and close(before.out, after.out)
