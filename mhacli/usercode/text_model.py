"""A callable that takes token ids or vectors as a function of texts, read at once or in steps
behind a cache.
"""

from __future__ import annotations

import copy
import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mhacli.attention.stages import Inputs
from mhacli.errors import MhaError
from mhacli.settings import PaddingSide
from mhacli.usercode.build import Built, copied, seeded
from mhacli.usercode.door import NO_ANSWER, Unreadable, call_user, on_behalf, ours
from mhacli.usercode.find_call import (
    accepted_forms,
    attention_of_example,
    hides,
    in_call,
    plain_call,
    tables_of,
    usual_arguments,
    with_independent_rows,
    with_output,
)
from mhacli.usercode.roles import MASKS, CallParameter, call_role, called_function, signature_of
from mhacli.usercode.target import TargetRequest
from mhacli.usercode.user_attention import (
    NO_CONTEXT,
    OF_IDS,
    OF_TEXTS,
    ROW_AXES,
    CallSizes,
    MaskForm,
    UserAttention,
    forms_of,
    leaves,
    mask_of,
    output_in,
    watching,
)

_BATCH, _LEAST, _EXAMPLE_LENGTH = 3, 6, 7
_OF_TOKENS = (ROW_AXES, OF_IDS, ("batch", "row", "part", "width"))
PartCalls = dict[tuple[str, int], tuple[Tensor | None, Tensor | None]]
"""The input and the output of each call of each part of a model, in the order in which they end."""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A callable as a function of texts: of vectors `[token, width]`, or of token ids `[token, 1]`.

    Of token ids, `n_ids` is the number; 0 for vectors. `has_source`: it is an encoder with a
    decoder, whose ids these are. `masks` say which tokens are real, several if it is unknown what
    True means in them; `hides_padding`: they are surely meant for it. `positions` takes the numbers
    of positions, of which the first is `first_position`. `cached` reads texts in steps, None if it
    takes no cache.
    """

    attention: UserAttention
    n_ids: int = 0
    pad: int = 0
    has_source: bool = False
    masks: tuple[MaskForm, ...] = ()
    hides_padding: bool = True
    positions: str | None = None
    first_position: int = 0
    cached: StepConvention | None = None

    @property
    def mask(self) -> MaskForm | None:
        """The likeliest of the masks."""
        return next(iter(self.masks), None)

    def draw(self, seed: int, length: int) -> Tensor:
        """A random text of ordinary tokens."""
        text = self.attention.drawer(seed).rows(length, batch=1)[0]
        return text if self.n_ids else text.to(self.attention.device, self.attention.dtype)

    def run(
        self,
        texts: Sequence[Tensor],
        *,
        mask: MaskForm | None = None,
        side: PaddingSide = "right",
        note: tuple[int, PartCalls] | None = None,
        **how: Any,
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The outputs `[token, width]` of each text in one pass, in which shorter ones are padded
        on a side, and what a model that returns nothing for each token gives for the whole text,
        but for logits of one token. `note` receives what the parts of the model compute for one of
        the texts.
        """
        rows, real = self.padded(texts, side)
        given: dict[str, Any] = {}
        if side == "left" and mask is not None and self.positions is not None:
            given[self.positions] = (real.cumsum(dim=1) - 1).clamp(min=0) + self.first_position
        row, noted = note or (0, {})

        def keep(name: str, _part: nn.Module, inputs: Any, output: Any) -> None:
            numbers = tree_map_only(
                Tensor, lambda ids: ids if ids.is_floating_point() else ids.double(), inputs
            )
            tensors = [self._of_tokens(each, real.shape) for each in (numbers, output)]
            read, made = (
                None if each is None else each[row][real[row].to(each.device)].detach().clone()
                for each in tensors
            )
            noted[name, sum(1 for earlier, _ in noted if earlier == name)] = read, made

        inputs = Inputs(rows, real=None if mask is None else real)
        with NO_CONTEXT if note is None else watching(self.attention.built.module, keep):
            result = self.attention.result(inputs, mask=mask, given=given, **how)
        out, wholes = (
            self.attention.read(result, self.attention.sizes_of(inputs)),
            [None] * len(texts),
        )
        if self.attention.is_inside:  # which returns nothing for each token
            floats = [tensor for _, tensor in leaves(result[0]) if tensor.is_floating_point()]
            numbers = [
                tensor[:, None]
                for tensor in floats
                if tensor.ndim == 1 and len(self.attention.slots) == 1
            ]
            found = [*(tensor for tensor in floats if tensor.ndim == 2), *numbers]
            of_texts = (
                each for each in found if len(each) == len(texts) and each.shape[1] != self.n_ids
            )
            wholes = next((list(each.detach().cpu()) for each in of_texts), wholes)
        if out.shape[:2] != (len(texts), 1 if self.attention.is_pooled else real.shape[1]):
            message = (
                f"texts {list(real.shape)} give {list(out.shape)}, which is not one row for each of"
                " their tokens"
            )
            raise Unreadable(message)
        wide = out.to("cpu", torch.promote_types(out.dtype, torch.float32))
        outputs = list(wide)
        if not self.attention.is_pooled:
            outputs = [
                row[:n] if side == "right" else row[-n:]
                for row, n in zip(wide, map(len, texts), strict=True)
            ]
        return list(zip(outputs, wholes, strict=True))

    def _of_tokens(self, result: Any, shape: Sequence[int]) -> Tensor | None:
        """What holds something for each token of a batch of this shape, `[text, token, …]`."""
        is_first = self.attention.axes[0] == "batch"
        batch, length = shape if is_first else shape[::-1]
        found = output_in(result, _OF_TOKENS, CallSizes(batch, length, 0))
        output = None if found is None else dict(leaves(result))[found[0]]
        return output if is_first or output is None else output.transpose(0, 1)

    def padded(self, texts: Sequence[Tensor], side: PaddingSide) -> tuple[Tensor, Tensor]:
        """The texts as a batch, and which of its tokens are real."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
        real = pad([torch.ones(len(text), dtype=torch.bool) for text in texts])
        return pad(list(texts), padding_value=self.pad), real.to(texts[0].device)


def text_model_of_vectors(attention: UserAttention) -> TextModel | None:
    """An attention over vectors as a function of texts; None for a function of heads."""
    if attention.is_function:
        return None
    masks = _likeliest(attention.padding_forms)
    # beside a memory, one mask alone leaves padding in the other rows
    hides_padding = (
        attention.n_rows == 1 and bool(masks) and call_role(masks[0].parameter) == "padding"
    )
    return TextModel(attention=attention, masks=masks, hides_padding=hides_padding)


def _likeliest(forms: Iterable[MaskForm]) -> tuple[MaskForm, ...]:
    """The first form that hides a token, or else the first of each meaning of True."""
    others = dict[str, MaskForm]()
    for form in forms:
        if form.hides:
            return (form,)
        others.setdefault(form.true_means, form)
    return tuple(others.values())


# ---------------------------------------------------------------------------------------- token ids


_DECODER = ("decoder_input_ids", "tgt", "trg", "target_ids", "tgt_ids", "tgt_seq", "trg_seq")
_OF_DECODER = ("tgt_mask", "trg_mask")
_OF_SOURCE = (29, 3)
"""The lengths of what an encoder reads beside a decoder, the first that works."""
_FEWEST_IDS, _MOST_IDS = 2, 1 << 18
_OPEN_MASKS = (MaskForm("", ("batch", "key"), "whole"), MaskForm("", ("batch", "key"), "bool"))
_CAUSAL_MASKS = [
    form._replace(axes=axes)
    for axes in (("query", "key"), ("batch", "query", "key"))
    for form in (
        MaskForm("", (), "bool", "hide"),
        MaskForm("", (), "bool"),
        MaskForm("", (), "additive"),
    )
]
_NO_SIZES = {"n_heads": 1, "d_head": 1, "d_model": 1}


def text_model_of_ids(
    built: Built, request: TargetRequest, *, means: str | None = None, has_table: bool = True
) -> TextModel | None:
    """A callable that takes token ids as a function of texts, of an encoder with a decoder the
    decoder's; None if it takes none, or needs more than a mask. Unless it `has_table`, an embedding
    that reads them, larger ids show how many it knows. `means`: what True in a mask means, if that
    is stated.
    """
    template, named_parts = (
        plain_call(built, request),
        [] if built.module is None else [*built.module.named_modules()],
    )
    tables = tables_of(built)
    parameters = [p for p in signature_of(built.call) if p.name not in template.others]
    if (
        not has_table and not tables and template.device.type == "cpu"
    ):  # elsewhere a wrong id ends the process
        tables = [_FEWEST_IDS]
    if not tables or not parameters:
        return None
    ids, *others = parameters
    decoder = next((p.name for p in others if p.name in _DECODER), None)
    named = {p.role: p.name for p in reversed(others)}
    attention = replace(
        template,
        sizes=CallSizes(_BATCH, _LEAST, _LEAST),
        slots=(CallParameter(decoder or ids.name, "x", True, decoder is None),),
        axes=OF_IDS,
        ids=torch.arange(min(tables), device=template.device),
        others={**{p.name: False for p in others if p.role == "caching"}, **template.others},
        is_copied=False,
    )
    has_mask = any(
        p.required and p.role in MASKS for p in others
    )  # which shows where the tokens stand
    plain = (replace(attention, axes=axes) for axes in (OF_IDS, ("row", "batch"))[: 1 + has_mask])
    starts = _beside_source(attention, ids.name) if decoder else plain
    found = next(filter(None, (_first_of_ids(start, others) for start in starts)), None)
    table = None if found is None else _table_of(found)
    if found is None or (table is None and has_table):
        return None
    n_ids, padding_id = (
        (_n_ids(found), None) if table is None else (table.num_embeddings, table.padding_idx)
    )
    attention = with_independent_rows(found)
    masks, given = _likeliest(_forms_of_padding(attention, decoder, means)), dict(attention.others)
    given |= {
        mask.parameter: partial(mask_of, mask, causal=False)
        for mask in masks[:1]
        if mask.parameter in given
    }
    pads = [getattr(getattr(built.module, "config", None), "pad_token_id", None), padding_id]
    place_tables = (part for name, part in named_parts if name.endswith("position_embeddings"))
    padding_rows = (getattr(table, "padding_idx", None) for table in place_tables)
    ordinary = torch.tensor([i for i in range(n_ids) if i not in pads], device=template.device)
    attention = replace(attention, ids=ordinary, others=given)
    return TextModel(
        attention=attention,
        n_ids=n_ids,
        pad=next((i for i in pads if isinstance(i, int) and 0 <= i < n_ids), 0),
        has_source=decoder is not None,
        masks=masks,
        positions=named.get("positions") if decoder is None else None,
        first_position=next((row + 1 for row in padding_rows if row is not None), 0),
        cached=next(
            (each for each in step_conventions(attention) if each.caches or "offset" in named), None
        ),
    )


def _beside_source(attention: UserAttention, name: str) -> Iterator[UserAttention]:
    """The decoder beside random tokens for the encoder, its argument `name`, with the batch first
    and second.
    """
    assert attention.ids is not None
    for n, axes in product(_OF_SOURCE, (OF_IDS, ("row", "batch"))):
        source = torch.randint(
            len(attention.ids), (n, 1), generator=torch.Generator().manual_seed(n)
        )
        read = {
            name: partial(_in_batch, (source if axes != OF_IDS else source.mT).to(attention.device))
        }
        yield replace(attention, axes=axes, others={**attention.others, **read})


def _first_of_ids(
    attention: UserAttention, others: Sequence[CallParameter]
) -> UserAttention | None:
    """The first call that gives an output of each token: as an example shows it, or with the ids
    for its targets too where that helps, else with what its output layer reads; else the first that
    gives one of each text. A mask that it needs is causal, of several meanings of it the first that
    hides the last token, or of padding that nothing has.
    """
    if attention.example is not None:
        try:
            attention, others = (
                attention_of_example(attention, _EXAMPLE_LENGTH * attention.is_resizable),
                (),
            )
        except MhaError:  # it gives no ids
            return None
    usual = usual_arguments([p for p in others if p.required], _NO_SIZES, 0, causal=False)
    targets = [
        CallParameter(p.name, "x", True)
        for p in others
        if p.name in ("targets", "target", "labels", "y")
    ]
    first = None
    for masks in _required_masks(others):
        template = replace(attention, others={**usual, **attention.others, **masks})
        candidates = [
            template,
            *(replace(template, slots=(*template.slots, target)) for target in targets),
        ]
        candidates += [replace(candidate, is_inside=True) for candidate in candidates]
        of_texts = replace(template, output=("", OF_TEXTS))
        for candidate in (
            *candidates,
            replace(template, is_inside=True, has_target=True),
            of_texts,
        ):
            with suppress(*NO_ANSWER):
                found = with_output(candidate)
                if found.is_resizable:  # a number of classes may be that of the tokens
                    with_output(
                        replace(
                            found, sizes=found.sizes._replace(q_len=_LEAST - 1, k_len=_LEAST - 1)
                        )
                    )
                first = first or found
                if hides(found, None):
                    return found
                break
    return first


def _required_masks(others: Sequence[CallParameter]) -> Iterator[dict[str, Any]]:
    """What is given for the masks that a call needs: a causal mask alone, then also masks that hide
    no padding where a name says that they are of padding, then such masks alone.
    """
    needed = tuple(p for p in others if (p.required and p.role in MASKS) or p.name in _OF_DECODER)
    named = tuple(p for p in needed if _is_of_padding(p))
    causal = sorted(
        (p.name for p in needed if p not in named), key=lambda name: name not in _OF_DECODER
    )
    for of_padding in dict.fromkeys([(), named, needed]):
        forms = _CAUSAL_MASKS if causal and of_padding in ((), named) else [None]
        for padding, form in product(_OPEN_MASKS if of_padding else _OPEN_MASKS[:1], forms):
            masks = dict[str, Any].fromkeys(p.name for p in needed)
            for p in of_padding:
                masks[p.name] = partial(
                    mask_of, forms_of(p)[0] if p.role == "lengths" else padding, causal=False
                )
            if form is not None:
                masks[causal[0]] = partial(mask_of, form, causal=True)
            yield masks


def _is_of_padding(parameter: CallParameter) -> bool:
    return parameter.role in ("padding", "lengths") or parameter.name.endswith("attention_mask")


def _in_batch(source: Tensor, sizes: CallSizes) -> Tensor:
    """The same source for each text."""
    return source.expand([sizes.batch if size == 1 else size for size in source.shape])


def _table_of(attention: UserAttention) -> nn.Embedding | None:
    """The first table that reads what other ids change; None if none does."""
    read: list[tuple[nn.Embedding, Tensor]] = []

    def note(_name: str, part: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        if isinstance(part, nn.Embedding) and isinstance(
            inputs[0], Tensor
        ):  # some tables of positions take a shape
            read.append((part, inputs[0]))

    drawer = attention.drawer(0)
    with watching(attention.built.module, note):
        for _ in range(2):
            attention(drawer.inputs(with_context=False), seed=0)
    pairs = zip(read, read[len(read) // 2 :], strict=False)
    return next(
        (table for (table, ids), (_, others) in pairs if not torch.equal(ids, others)), None
    )


def _n_ids(attention: UserAttention) -> int:
    """The number of ids that a call takes, at most `_MOST_IDS`."""

    def is_too_large(i: int) -> bool:
        with suppress(*NO_ANSWER):
            attention(Inputs(torch.full((_BATCH, _LEAST, 1), i)), seed=0)
            return False
        return True

    return bisect_left(range(_MOST_IDS), True, key=is_too_large)


def _forms_of_padding(
    attention: UserAttention, decoder: str | None, means: str | None
) -> Iterator[MaskForm]:
    """The forms of masks of padding that the call takes. In transformers True keeps."""
    means = (
        "keep"
        if hasattr(getattr(attention.built.module, "config", None), "get_text_config")
        else means
    )
    for parameter in signature_of(attention.built.call, *MASKS):
        is_open = getattr(attention.others.get(parameter.name), "keywords", {}) == {"causal": False}
        if not (is_open or _is_of_padding(parameter)) or (
            decoder is not None and parameter.name[:3] != decoder[:3]
        ):
            continue
        forms = [
            form
            for form in forms_of(parameter)
            if form.is_padding and means in (None, form.true_means)
        ]
        forms.sort(key=lambda form: (form.axes != ("batch", "key"), form.kind != "whole"))
        yield from accepted_forms(attention, forms)


# ----------------------------------------------------------------------------- steps behind a cache


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
    fixed = {
        name
        for name, value in attention.others.items()
        if not isinstance(value, bool | partial | None)
    }
    free = [p for p in signature_of(attention.built.call) if p.name not in fixed]
    switches = [p.name for p in free if p.role == "caching"]
    caches = {p.name: p.default for p in free if p.role == "cache"}
    places = [
        p for p in free if p.role == "offset" or (p.role == "positions" and attention.ids is None)
    ]
    names = (*caches, *(p.name for p in places), *switches)
    if attention.is_function or attention.example is not None or not names:
        return
    made = {
        p.name: partial(in_call, p.role, int(p.role == "positions" and "ids" not in p.name))
        for p in places
    }
    attention = replace(
        attention, others={**made, **attention.others, **dict.fromkeys(switches, True)}
    )
    of_mask = [form for form in attention.mask_forms if mask and form.parameter == mask.parameter]
    # a step may take one kind of mask alone
    other_kinds = [form for form in of_mask if mask and form.kind != mask.kind]
    makes = (
        (None, *_cache_classes(attention.built.call))
        if caches and attention.ids is None
        else (None,)
    )
    for make, form in product(makes, dict.fromkeys([mask, *other_kinds, None])):
        yield StepConvention(attention, caches, make, form, names)


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
    """What a call returned for the next one to begin with, by argument: what has the name of the
    first, else what stands last beside the outputs and a loss, a single tensor only if there is
    nothing else. Raises `Unreadable` if there is none.
    """
    if isinstance(result, tuple | list):
        found = [part for part in result if part is not None and part is not out]
        found = [part for part in found if not isinstance(part, Tensor) or part.ndim > 0]
        cache = max(
            enumerate(found),
            key=lambda each: (not isinstance(each[1], Tensor), each[0]),
            default=(0, None),
        )[1]
    else:
        named = result if isinstance(result, Mapping) else getattr(result, "__dict__", {})
        found = [
            named.get(names[0]),
            *(part for key, part in named.items() if call_role(str(key)) == "cache"),
        ]
        cache = next((part for part in found if part is not None), None)
    if cache is None:
        raise Unreadable("the call returns no cache")
    # one part, a tuple with a part for each argument, or the last parts of the result
    parts: Sequence[Any] = ()
    if len(names) == 1:
        parts = [cache]
    elif isinstance(cache, tuple | list):
        parts = cache
    elif isinstance(result, tuple | list):
        parts = result[-len(names) :]
    if len(parts) != len(names):
        raise Unreadable(f"the call returns {len(parts)} parts of a cache, not {len(names)}")
    return dict(zip(names, parts, strict=True))


def with_zeros_drawn(module: nn.Module, seed: int) -> nn.Module:
    """The module, or a copy in which weights that are all zero or tiny, such as fresh output layers
    and gates, are small random numbers, or larger: what they hide would not be seen.
    """
    weights = [
        item
        for item in module.named_parameters()
        if item[1].is_floating_point() and item[1].itemsize > 1
    ]
    largest = {
        name: weight.norm(torch.inf)
        for name, weight in weights
        if weight.numel() and not name.endswith("bias")
    }
    tiny = [name for name, number in largest.items() if number < 1e-3]
    drawn = call_user(copy.deepcopy, module) if tiny else module
    with torch.no_grad(), seeded(seed, torch.device("cpu")):
        for name, weight in zip(tiny, map(drawn.get_parameter, tiny), strict=True):
            weight.mul_(0.02 / largest[name]) if largest[name] else weight.normal_(std=0.02)
    return drawn
