"""Masks as somebody's attention wants them: the forms that are tried, how a mask is written in one, and which is likelier."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.usercode.call.docs import Meaning, documented_meaning
from mhacli.adapters.usercode.call.results import PATTERN_AXES, Axes, Sides, arranged
from mhacli.adapters.usercode.call.signature import Parameter
from mhacli.adapters.usercode.user_attention import MaskForm

Kind = Literal["bool", "01", "whole", "additive", "lengths"]
KINDS: tuple[Kind, ...] = ("bool", "01", "whole")
"""The kinds that are tried for each choice of axes; additive is accepted where 01 is, for both are numbers of the dtype."""
LENGTHS: Axes = ("batch",)
_BATCH_LAST: Axes = ("query", "key", "batch")
_LIKELY: tuple[Kind, ...] = ("lengths", "bool", "01", "whole", "additive")


class Tried(NamedTuple):
    """What an experiment told of a form: whether it was accepted, whether what it hides had no influence while the rest had
    (`hides`), and whether the output was finite."""

    form: MaskForm
    hides: bool
    finite: bool


def mask_axes(*, batched: bool, is_function: bool, n_axes: int, batch_second: bool) -> tuple[Axes, ...]:
    """The axes that are tried for a mask of queries by keys, the most telling first."""
    if not batched:
        return (("query", "key"), ("head", "query", "key"))
    if is_function and n_axes == 3:
        return (("batch", "query", "key"), ("query", "key"))
    usual: tuple[Axes, ...] = (PATTERN_AXES, ("batch", "query", "key"), ("query", "key"))
    return (*usual, _BATCH_LAST) if batch_second else usual


def padding_axes(*, batched: bool, batch_second: bool) -> tuple[Axes, ...]:
    """The axes that are tried for a mask of keys; axes that a padding mask does not need are of one."""
    if not batched:
        return (("key",), ("query", "key"))
    plain: tuple[Axes, ...] = (("batch", "key"), PATTERN_AXES, ("batch", "query", "key"))
    return (*plain, ("key", "batch"), _BATCH_LAST) if batch_second else plain


def written(form: MaskForm, allowed: Tensor | None, real: Tensor | None, sides: Sides, dtype: torch.dtype) -> Tensor:
    """A mask in that form. `allowed` bool `[batch or 1, 1, query, key]`, `real` bool `[batch, key]`, or both, True = keep.

    Axes of the form that the mask does not tell apart are of one, but batch, which is whole. Raises ValueError where the mask
    tells apart what the form has no axis for.
    """
    if form.kind == "lengths":
        return _lengths(real, sides)
    keep = torch.ones((), dtype=torch.bool)
    if allowed is not None:
        keep = allowed
    if real is not None:
        keep = keep.to(real.device) & real[:, None, None, :]
    for place, axis in enumerate(PATTERN_AXES):
        if axis not in form.axes and keep.shape[place] > 1:
            first = keep.narrow(place, 0, 1)
            if not torch.equal(first.expand_as(keep), keep):
                raise ValueError(f"a mask for {form.parameter} must be the same for each {axis}, got different ones")
            keep = first
    if "batch" in form.axes:
        keep = keep.expand(sides.batch, -1, -1, -1)[: sides.batch // form.n_shared]
    keep = arranged(keep, PATTERN_AXES, form.axes)
    return _of_kind(keep, form, dtype).contiguous().clone()


def _of_kind(keep: Tensor, form: MaskForm, dtype: torch.dtype) -> Tensor:
    if form.kind == "additive":
        return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, -torch.inf)
    true = keep if form.true_means == "keep" else ~keep
    if form.kind == "bool":
        return true
    return true.to(dtype if form.kind == "01" else torch.int64)


def _lengths(real: Tensor | None, sides: Sides) -> Tensor:
    if real is None:
        return torch.full((sides.batch,), sides.k_len)
    counts = real.sum(-1)
    if not torch.equal(real, torch.arange(real.shape[-1], device=real.device) < counts[:, None]):
        raise ValueError("lengths must tell of padding on the right, got tokens after padding")
    return counts


def nothing_hidden(form: MaskForm, sides: Sides, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The mask in that form that lets every query attend to every key."""
    everything = torch.ones(1, 1, sides.q_len, sides.k_len, dtype=torch.bool, device=device)
    if form.kind == "lengths":
        return _lengths(None, sides).to(device)
    return written(form, everything, None, sides, dtype)


def required_forms(parameter: Parameter, *, batched: bool) -> tuple[MaskForm | None, ...]:
    """What is tried for a mask that is required while nobody knows its form: nothing at all, then masks that allow everything."""
    name = parameter.name
    wide: list[tuple[Axes, Kind]] = [
        (PATTERN_AXES, "bool"), (("query", "key"), "bool"), (PATTERN_AXES, "additive"), (("batch", "query", "key"), "bool"),
        (("query", "key"), "additive"), (("batch", "key"), "bool"), (("batch", "query", "key"), "additive"),
        (("batch", "key"), "additive"), (PATTERN_AXES, "whole"), (("batch", "key"), "whole"), (("query", "key"), "whole"),
    ]  # fmt: skip
    narrow: list[tuple[Axes, Kind]] = [
        (("batch", "key"), "bool"), (("batch", "key"), "01"), (PATTERN_AXES, "bool"), (PATTERN_AXES, "additive"),
        (("batch", "query", "key"), "bool"), (("batch", "key"), "whole"), (LENGTHS, "lengths"),
    ]  # fmt: skip
    chosen = wide if parameter.role in ("mask", "bias") else narrow
    if parameter.role == "lengths":
        chosen = [(LENGTHS, "lengths"), *narrow[:2]]
    if not batched:
        chosen = [(("query", "key"), "bool"), (("query", "key"), "additive"), (("key",), "bool"), (("key",), "01")]
    kinds_of_bias = ("additive",)
    chosen = [pair for pair in chosen if parameter.role != "bias" or pair[1] in kinds_of_bias]
    return (None, *(MaskForm(name, axes, kind) for axes, kind in chosen))


def convention(parameter: str, role: str) -> Meaning:
    """What True most often stands for in a mask of that name, where nobody says it: torch's padding masks hide, others keep."""
    name = parameter.lower()
    hides = role == "padding" and "pad" in name and "non" not in name
    return "hide" if hides or "ignore" in name or "is_masked" in name or name.startswith("block") else "keep"


def ordered(tried: list[Tried], parameter: Parameter, documentation: str) -> tuple[MaskForm, ...]:
    """The accepted forms with both meanings of True, the likeliest first: what the documentation states, then what was seen to
    hide what it should, then what is the custom; and of equals the most telling axes first."""
    stated = documented_meaning(documentation, parameter.name)
    seen = {(one.form.kind, one.form.true_means) for one in tried if one.hides}
    finite = {(one.form.kind, one.form.true_means) for one in tried if one.finite}
    axes_found = list(dict.fromkeys(one.form.axes for one in tried))
    pairs = dict.fromkeys((one.form.axes, one.form.kind) for one in tried)
    stated_fails = stated is not None and not any(kind in KINDS for kind, _ in seen)
    custom = convention(parameter.name, parameter.role)

    def rank(form: MaskForm) -> tuple[object, ...]:
        written_so = (form.kind, form.true_means)
        told = form.true_means == stated if stated else written_so in seen
        return (
            form.kind not in KINDS if stated_fails else not any(kind == form.kind for kind, _ in seen),
            axes_found.index(form.axes),
            _LIKELY.index(form.kind),
            not told,
            written_so not in finite,
            form.true_means != custom,
        )

    forms = [MaskForm(parameter.name, axes, kind, means) for axes, kind in pairs for means in _meanings_of(kind)]
    return tuple(sorted(forms, key=rank))


def _meanings_of(kind: Kind) -> tuple[Meaning, ...]:
    return ("keep",) if kind in ("additive", "lengths") else ("keep", "hide")
