"""One way of calling somebody's attention, and asking in that way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.call.extras import Recipe, Setting, made
from mhacli.adapters.usercode.call.mask_forms import nothing_hidden, written
from mhacli.adapters.usercode.call.results import (
    HEAD_AXES,
    ROW_AXES,
    Axes,
    Place,
    Sides,
    arranged,
    at,
    leaves,
    output_of,
    pattern_of,
    told,
)
from mhacli.adapters.usercode.user_attention import Answer, Inputs, MaskForm

Part = Literal["queries", "keys", "values"]


class Slot(NamedTuple):
    """A parameter for rows: which rows it takes, and whether it may be left out where the keys are the queries' own rows."""

    parameter: str
    part: Part
    required: bool = True
    by_place: bool = False


class Written(NamedTuple):
    """What a call's masks are to say, in the forms in which they are to be written."""

    mask: MaskForm | None = None
    padding: MaskForm | None = None


NOWHERE = Place((), ())
"""Where the output of a way is that nobody has tried yet."""


@dataclass(frozen=True)
class Way:
    """How somebody's attention is called, and what of its result is what.

    `axes` are those of the rows as it wants them, without "batch" where it takes one sequence at a time; `output` tells where the
    output is and its axes, `pattern` the same of the pattern. `idle` are masks that are required, in the form that is given when
    no mask is asked for (None: None). `spread` names masks of keys that must be written for each query, by parameter and axes.
    `causal_yields`: the switch `causal_by` is left out of calls with a mask, for it does not bear one.
    """

    slots: tuple[Slot, ...]
    axes: Axes
    is_function: bool
    extras: tuple[Recipe, ...] = ()
    idle: tuple[tuple[str, MaskForm | None], ...] = ()
    output: Place = NOWHERE
    pattern: Place | None = None
    spread: frozenset[tuple[str, Axes]] = frozenset()
    causal_by: str | None = None
    causal_yields: bool = False
    n_heads: int = 1
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def canonical(self) -> Axes:
        """Our own order of axes for what this takes."""
        return HEAD_AXES if self.is_function else ROW_AXES

    @property
    def batched(self) -> bool:
        """Whether it takes all sequences at once."""
        return "batch" in self.axes


class Asked(NamedTuple):
    """What came back of a call, before anybody looked for the output in it: a result for each sequence where it takes one at a
    time, else one; with the sizes that each call had."""

    results: tuple[Any, ...]
    sides: Sides


@contextmanager
def quietly(call: Callable[..., Any], training: bool) -> Iterator[None]:
    """A call's surroundings: no gradients, no warnings, and the module in `eval` or `train` as asked, and back after it."""
    module = call if isinstance(call, nn.Module) else None
    states = [(part, part.training) for part in module.modules()] if module is not None else []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            if module is not None:
                module.train(training)
            yield
        finally:
            for part, state in states:
                part.training = state


def raw(
    call: Callable[..., Any],
    way: Way,
    inputs: Inputs,
    setting: Setting,
    forms: Written = Written(),  # noqa: B008
) -> Asked:
    """What the call returns. `setting.sides` is not read: the sizes are those of the inputs. Raises what the call raises."""
    sides = sides_of(inputs, way)
    if way.batched:
        return Asked((_once(call, way, inputs, setting._replace(sides=sides), forms),), sides)
    single = sides._replace(batch=1)
    parts = [_sequence(inputs, number) for number in range(sides.batch)]
    return Asked(tuple(_once(call, way, part, setting._replace(sides=single), forms) for part in parts), single)


def sides_of(inputs: Inputs, way: Way) -> Sides:
    """The sizes of one call."""
    keys = inputs.queries if inputs.keys is None else inputs.keys
    n_heads = inputs.queries.shape[1] if way.is_function else way.n_heads
    return Sides(inputs.queries.shape[0], n_heads, inputs.queries.shape[-2], keys.shape[-2])


def _sequence(inputs: Inputs, number: int) -> Inputs:
    def one(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[number : number + 1] if tensor.shape[0] > 1 else tensor

    return Inputs(inputs.queries[number : number + 1], *(one(tensor) for tensor in inputs[1:]))


def _once(call: Callable[..., Any], way: Way, inputs: Inputs, setting: Setting, forms: Written) -> Any:
    places, names = _arguments(way, inputs, setting, forms)
    with quietly(call, setting.training):
        return call(*places, **names)


def _arguments(way: Way, inputs: Inputs, setting: Setting, forms: Written) -> tuple[list[Any], dict[str, Any]]:
    places: list[Any] = []
    names: dict[str, Any] = dict(way.fixed)
    masks = _masks(way, inputs, setting, forms)
    for slot in way.slots:
        rows = _rows(inputs, slot)
        if rows is None:
            continue
        theirs = arranged(rows.to(setting.device, setting.dtype), way.canonical, way.axes).contiguous().clone()
        if slot.by_place:
            places.append(theirs)
        else:
            names[slot.parameter] = theirs
    asks = any(name not in dict(way.idle) for name in masks) or inputs.allowed is not None or inputs.real is not None
    for recipe in way.extras:
        if not (asks and way.causal_yields and recipe.parameter == way.causal_by):
            names[recipe.parameter] = made(recipe, setting)
    return places, names | masks


def _rows(inputs: Inputs, slot: Slot) -> Tensor | None:
    """The rows of a slot; None where the call makes them itself, from the queries."""
    if slot.part == "queries":
        return inputs.queries
    own = inputs.keys if slot.part == "keys" or inputs.values is None else inputs.values
    if own is None and slot.required:
        return inputs.queries
    return own


def _masks(way: Way, inputs: Inputs, setting: Setting, forms: Written) -> dict[str, Any]:
    """The masks of a call by name, each written anew."""
    masks: dict[str, Any] = {}
    sides, device, dtype = setting.sides, setting.device, setting.dtype
    for name, form in way.idle:
        masks[name] = None if form is None else nothing_hidden(form, sides, device, dtype)
    mask, padding = forms.mask, forms.padding
    allowed = None if inputs.allowed is None else inputs.allowed.to(device)
    real = None if inputs.real is None else inputs.real.to(device)
    if allowed is not None and mask is None:
        raise ValueError("inputs.allowed must come with the form of a mask, got none")
    if real is not None and padding is None:
        raise ValueError("inputs.real must come with the form of a padding mask, got none")
    both = allowed is not None and real is not None
    if both and mask is not None and padding is not None and mask.parameter == padding.parameter:
        return masks | {mask.parameter: written(mask, allowed, real, sides, dtype)}
    if allowed is not None and mask is not None:
        masks[mask.parameter] = written(mask, allowed, None, sides, dtype)
    if real is not None and padding is not None:
        everywhere = None
        if (padding.parameter, padding.axes) in way.spread:
            everywhere = torch.ones(1, 1, sides.q_len, sides.k_len, dtype=torch.bool, device=device)
        masks[padding.parameter] = written(padding, everywhere, real, sides, dtype)
    return masks


def answer_of(asked: Asked, way: Way) -> Answer:
    """The output and the pattern of what came back, in our order of axes, as copies."""
    outs, patterns = [], []
    for result in asked.results:
        tensor = at(result, way.output.path)
        if tensor is None:
            tensor = next((leaf for _, leaf in leaves(result) if leaf.ndim == len(way.output.axes)), None)
        if tensor is None:
            where = told(way.output.path) or "its top"
            raise ValueError(f"the result must hold the output at {where}, got {type(result).__name__}")
        outs.append(output_of(tensor.detach(), way.output.axes, way.canonical, asked.sides.head))
        pattern = None if way.pattern is None else at(result, way.pattern.path)
        if pattern is not None and way.pattern is not None and pattern.ndim == len(way.pattern.axes):
            patterns.append(pattern_of(pattern.detach(), way.pattern.axes, asked.sides.batch))
    whole = torch.cat(patterns) if len(patterns) == len(outs) else None
    return Answer(torch.cat(outs).contiguous().clone(), None if whole is None else whole.contiguous().clone())
