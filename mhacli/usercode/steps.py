"""Attention that is called step by step behind a cache."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.stages import Inputs

from .axes import MadeForSizes, leaves
from .copies import copied
from .door import Unreadable, call_user, on_behalf, ours
from .masks import MaskForm
from .roles import call_role, called_function, signature_of
from .user_attention import NO_CONTEXT, UserAttention
from .usual_calls import made_place


class GrowingCache:
    """A cache that keeps keys and values `[batch, head, length, d]` and appends new ones.

    It has the methods of the caches in `transformers`. Source: Hugging Face transformers,
    cache_utils.DynamicCache.
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    @ours()
    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """All keys and values, the new ones last: the first two tensors among the arguments."""
        values = [*args, *kwargs.values()]
        new = [value for value in values if isinstance(value, Tensor) and value.ndim >= 3][:2]
        if self.kept:
            pairs = zip(self.kept, new, strict=False)
            new = [on_behalf(torch.cat, pair, dim=-2) for pair in pairs]
        self.kept = new
        return tuple(new)

    @ours()
    def get_seq_length(self, *_: Any) -> int:
        """The number of cached tokens; none is ever dropped."""
        return self.kept[0].shape[-2] if self.kept else 0

    append = insert_kv = store = update
    get_usable_length = get_seq_length


@dataclass(frozen=True)
class StepConvention:
    """A convention for calling attention step by step: its call is given the arguments for switches
    and positions.

    `caches` are the arguments for the cache with their defaults, empty for a module that keeps its
    own. `make` creates a cache, which all steps are given; None: each step is given what the last
    one returned. `mask` is the form of the causal mask of a step. `names` are all arguments that
    are passed for steps.
    """

    attention: UserAttention
    caches: Mapping[str, Any]
    make: Callable[[], Any] | None
    mask: MaskForm | None
    names: tuple[str, ...]

    def __call__(
        self, rows: Tensor, ends: Sequence[int], *, within: AbstractContextManager[Any] = NO_CONTEXT
    ) -> Tensor:
        """The outputs for rows `[batch, length, d_in]`, read in steps that end at `ends`, within a
        context. Raises `UserRaised`, and `Unreadable` if it returns no cache.
        """
        attention = self.attention
        if not self.caches:
            attention = attention.with_call(copied(attention.built.call))
        cache = self.caches
        if self.make is not None:
            cache = dict.fromkeys(self.caches, call_user(self.make))
        outs = []
        for start, end in pairwise((0, *ends)):
            inputs = causal_inputs(rows, start, end, self.mask)
            result = attention.result(
                inputs, mask=self.mask, given=cache, start=start, within=within
            )
            outs.append(attention.read(result, attention.sizes_of(inputs)))
            if self.caches and self.make is None:
                cache = _caches_in(
                    result, [*self.caches], dict(leaves(result)).get(attention.output[0])
                )
        if len({(out.shape[0], *out.shape[2:]) for out in outs}) > 1:
            shapes = ", ".join(str(list(out.shape)) for out in outs)
            raise Unreadable(f"steps give outputs of other shapes: {shapes}")
        return torch.cat(outs, dim=1).to("cpu", torch.float64)


def causal_inputs(rows: Tensor, start: int, end: int, mask: MaskForm | None) -> Inputs:
    """The inputs of a step, with its rows of the causal mask if it takes one."""
    allowed = torch.ones(1, 1, end - start, end, dtype=torch.bool).tril(start)
    return Inputs(rows[:, start:end], allowed=None if mask is None else allowed)


def step_conventions(
    attention: UserAttention, mask: MaskForm | None = None
) -> Iterator[StepConvention]:
    """The conventions by which attention may be called step by step, the likeliest first; none
    without any sign of a cache. Models of token ids make their caches and count their positions.
    """
    call = attention.built.call
    others = attention.others
    is_model = attention.ids is not None
    fixed = {
        name for name, value in others.items() if not isinstance(value, bool | MadeForSizes | None)
    }
    free = [p for p in signature_of(call) if p.name not in fixed]
    roles = ("offset",) if is_model else ("offset", "positions")
    caches = {p.name: p.default for p in free if p.role == "cache"}
    places = {p.name: p.role for p in free if p.role in roles}
    switches = [p.name for p in free if p.role == "caching"]
    names = (*caches, *places, *switches)
    if attention.is_function or attention.example is not None or not names:
        return
    made = dict[str, Any]()
    for name, role in places.items():
        is_batched = role == "offset" or "ids" in name
        made[name] = made_place(role, "batched" if is_batched else "plain")
    made |= {**others, **dict.fromkeys(switches, True)}
    attention = replace(attention, others=made)
    makes = list[Callable[[], Any] | None]([None])
    if caches and not is_model:
        makes += _cache_classes(call)
    for make, form in product(makes, _masks_of_steps(attention, mask)):
        yield StepConvention(attention, caches, make, form, names)


def _masks_of_steps(attention: UserAttention, mask: MaskForm | None) -> Sequence[MaskForm | None]:
    """The forms of the causal mask of a step: that of a whole call, those of another kind, which a
    step may take alone, and none.
    """
    if mask is None:
        return [None]
    others = [
        form
        for form in attention.mask_forms
        if form.parameter == mask.parameter and form.kind != mask.kind
    ]
    return [mask, *others, None]


def _cache_classes(call: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    """The classes of a cache that the caller creates: those of the file with a name that tells or
    an annotation, then ours.
    """
    function = inspect.unwrap(called_function(call))
    annotations = " ".join(map(str, getattr(function, "__annotations__", {}).values()))
    for name, thing in getattr(function, "__globals__", {}).items():
        is_own = inspect.isclass(thing) and thing.__module__ == function.__module__
        if is_own and ("cache" in name.lower() or re.search(rf"\b{name}\b", annotations)):
            yield thing
    yield GrowingCache


def _caches_in(result: Any, names: Sequence[str], out: Tensor | None) -> dict[str, Any]:
    """What a call returned for the next one to begin with, by argument. Raises `Unreadable` if
    there is none.
    """
    is_row = isinstance(result, tuple | list)
    cache = _last_cache(result, out) if is_row else _named_cache(result, names[0])
    if cache is None:
        raise Unreadable("the call returns no cache")
    # one part, a tuple with a part for each argument, or the last parts of the result
    parts: Sequence[Any] = ()
    if len(names) == 1:
        parts = [cache]
    elif isinstance(cache, tuple | list):
        parts = cache
    elif is_row:
        parts = result[-len(names) :]
    if len(parts) != len(names):
        raise Unreadable(f"the call returns {len(parts)} parts of a cache, not {len(names)}")
    return dict(zip(names, parts, strict=True))


def _last_cache(result: Sequence[Any], out: Tensor | None) -> Any:
    """What stands last in a result beside the outputs and a loss: a single tensor only if there is
    nothing else.
    """
    parts = [part for part in reversed(result) if part is not None and part is not out]
    others = [part for part in parts if not isinstance(part, Tensor)]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.ndim > 0]
    return next(iter([*others, *tensors]), None)


def _named_cache(result: Any, name: str) -> Any:
    """What has the name of an argument in a result, or else that of a cache."""
    named = result if isinstance(result, Mapping) else getattr(result, "__dict__", {})
    caches = [part for key, part in named.items() if call_role(str(key)) == "cache"]
    return next((part for part in (named.get(name), *caches) if part is not None), None)
