"""The first call that works of a model that takes token ids."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor

from .accepted import hides, reads_others, with_output
from .axes import OF_IDS, OF_TEXTS, AxisNames, CallSizes, MadeForSizes
from .door import Unreadable, first_that_works
from .example_call import attentions_of_example
from .masks import MaskForm, forms_of, made_mask
from .roles import MASKS, ROWS, CallParameter, signature_of
from .user_attention import UserAttention
from .usual_calls import LayerSizes, usual_arguments

BATCH = 3
"""The texts of the first calls."""
LENGTH = 6
"""Their length, which is no other size."""
_EXAMPLE_LENGTH = 7
_LONGER_LENGTHS = (16, 64, 256)
_SECOND: AxisNames = ("row", "batch")
_SOURCE_LENGTHS = (29, 3)
"""The lengths of what an encoder reads beside a decoder, the first that works."""
_MEMORY = 9
"""The vectors of a memory."""
_OF_DECODER = ("tgt_mask", "trg_mask")
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


def first_call_of_ids(
    attention: UserAttention, others: Sequence[CallParameter], source: str | None
) -> UserAttention | None:
    """The first call that gives an output of each token, else of each text; None without one.
    `others` are the parameters besides the first, `source` that of an encoder beside the decoder.
    """
    has_mask = any(p.required and p.role in MASKS for p in others)
    starts = [*_starts(attention, source, is_order_shown=has_mask)]
    for length in _LONGER_LENGTHS:  # some read no shorter text, or only multiples
        longer = attention.sizes._replace(q_len=length, k_len=length)
        starts += [replace(each, sizes=longer) for each in starts[:1]]
    starts += _beside_memories(attention)
    return first_that_works(starts, partial(_from_start, others=others), attention.built.tried.note)


def _starts(
    attention: UserAttention, source: str | None, *, is_order_shown: bool
) -> Iterator[UserAttention]:
    """The batch first, and second where masks show where the tokens stand; a decoder in both orders
    beside random tokens for the encoder.
    """
    if source is None:
        yield replace(attention, axes=OF_IDS)
        if is_order_shown:
            yield replace(attention, axes=_SECOND)
        return
    assert attention.ids is not None
    for n, axes in product(_SOURCE_LENGTHS, (OF_IDS, _SECOND)):
        generator = torch.Generator().manual_seed(n)
        tokens = torch.randint(len(attention.ids), (n, 1), generator=generator)
        read = (tokens.mT if axes == OF_IDS else tokens).to(attention.device)
        made = MadeForSizes(partial(_for_each_text, read))
        yield replace(attention, axes=axes, others={**attention.others, source: made})


def _beside_memories(attention: UserAttention) -> Iterator[UserAttention]:
    """Token ids and, beside them, vectors for each text, a memory, in either order of arguments."""
    call = attention.built.call
    widths = [shape[1] for shape in attention.built.weight_shapes]
    needed = [p for p in signature_of(call, *ROWS, "unknown") if p.required]
    if attention.example is not None or len(needed) != 2:
        return
    generator = torch.Generator().manual_seed(0)
    orders = product(permutations(needed), dict.fromkeys(widths), (OF_IDS, _SECOND))
    for (ids, memory), width, axes in orders:
        vectors = torch.randn(_MEMORY, width, generator=generator).unsqueeze(axes.index("batch"))
        made = MadeForSizes(partial(_for_each_text, attention.here(vectors)))
        yield replace(
            attention,
            axes=axes,
            slots=(CallParameter(ids.name, "x", True),),
            others={**attention.others, memory.name: made},
        )


def _for_each_text(source: Tensor, sizes: CallSizes) -> Tensor:
    """The same source for each text."""
    return source.expand([sizes.batch if size == 1 else size for size in source.shape])


def _from_start(attention: UserAttention, others: Sequence[CallParameter]) -> UserAttention | None:
    """The first call that gives an output, with a causal mask, if it needs one, of the first of
    several meanings that hides the last token; else of the first that gives an output.
    """
    alike = [attention]
    if attention.example is not None:
        alike = [*attentions_of_example(attention, _EXAMPLE_LENGTH)]
        others = ()
    usual = usual_arguments(
        [p for p in others if p.required], LayerSizes(), "batched", causal=False
    )
    # where texts start, and the last one ends, if they stand one behind another
    starts = MadeForSizes(lambda call: torch.arange(call.batch + 1, dtype=torch.int32) * call.q_len)
    usual |= {p.name: starts for p in others if p.name in usual and p.role == "starts"}
    log = attention.built.tried.note
    with_outputs = list[UserAttention]()

    def read(candidate: UserAttention) -> tuple[UserAttention, bool]:
        """The call with its output, which is kept in `with_outputs` too, and whether its masks hide
        the last token. Raises where it gives none, or what is not of tokens.
        """
        found = with_output(candidate)
        if found.is_inside and not reads_others(found):
            raise Unreadable("its output layer reads one token alone")
        # a number of classes may be that of the tokens
        if found.is_resizable and found.sizes.q_len not in _LONGER_LENGTHS:
            with_output(
                replace(found, sizes=found.sizes._replace(q_len=LENGTH - 1, k_len=LENGTH - 1))
            )
        with_outputs.append(found)
        return found, hides(found, None)

    def hiding(masks: dict[str, Any]) -> UserAttention | None:
        """The first call with these masks that gives an output, None if they hide nothing in it."""
        templates = (replace(each, others={**usual, **each.others, **masks}) for each in alike)
        outputs = (output for each in templates for output in _outputs(each, others))
        found, is_hiding = first_that_works(outputs, read, log) or (None, False)
        return found if is_hiding else None

    hidden = first_that_works(_required_masks(others), hiding, log)
    return hidden or next(iter(with_outputs), None)


def _outputs(template: UserAttention, others: Sequence[CallParameter]) -> Iterator[UserAttention]:
    """Where the output of each token may be: in what is returned, with the ids for its targets too,
    else in what its output layer reads; else there is one of each text.
    """
    targets = [
        CallParameter(p.name, "x", True)
        for p in others
        if p.name in ("targets", "target", "labels", "y")
    ]
    if template.end is not None:
        yield replace(template, output=("", OF_TEXTS))
        return
    returned = [template]
    returned += [replace(template, slots=(*template.slots, target)) for target in targets]
    yield from returned
    yield from (replace(each, is_inside=True) for each in returned)
    yield replace(template, is_inside=True, has_target=True)
    yield replace(template, output=("", OF_TEXTS))


def _required_masks(others: Sequence[CallParameter]) -> Iterator[dict[str, Any]]:
    """What is given for the masks that a call needs: a causal mask alone, then also masks that hide
    no padding where a name says that they are of padding, then such masks alone.
    """
    needed = tuple(p for p in others if (p.required and p.role in MASKS) or p.name in _OF_DECODER)
    named = tuple(p for p in needed if is_of_padding(p))
    rest = [p.name for p in needed if p not in named]
    rest.sort(key=lambda name: name not in _OF_DECODER)
    for of_padding in dict.fromkeys([(), named, needed]):
        open_masks = [dict[str, Any]()]
        causal_masks = [dict[str, Any]()]
        if of_padding:
            open_masks = [
                {
                    p.name: made_mask(forms_of(p)[0] if p.role == "lengths" else form)
                    for p in of_padding
                }
                for form in _OPEN_MASKS
            ]
        if rest and of_padding in ((), named):
            causal_masks = [{rest[0]: made_mask(form, causal=True)} for form in _CAUSAL_MASKS]
        for padding, causal in product(open_masks, causal_masks):
            yield {**dict.fromkeys(p.name for p in needed), **padding, **causal}


def is_of_padding(parameter: CallParameter) -> bool:
    """Whether the name of a mask says that it is of padding."""
    return parameter.role in ("padding", "lengths") or parameter.name.endswith("attention_mask")
