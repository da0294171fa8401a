"""A callable that takes token ids or vectors as a function of texts, read at once or in steps
behind a cache.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from mhacli.attention.stages import Inputs
from mhacli.settings import PaddingSide

from .accepted import accepted_forms, with_independent_rows
from .axes import OF_IDS, ROW_AXES, CallSizes, MadeForSizes, leaves, output_in
from .build import Built
from .door import NO_ANSWER, Unreadable
from .find_call import plain_call
from .id_calls import BATCH, LENGTH, first_call_of_ids, is_of_padding
from .masks import MaskForm, as_tokenizers_mean, forms_of, made_mask
from .own_padding import OwnPadding, own_padding, stated_pads
from .roles import MASKS, CallParameter, call_role, signature_of
from .steps import StepConvention, step_conventions
from .target import TargetRequest
from .user_attention import NO_CONTEXT, NOTHING, UserAttention, watching

_OF_TOKENS = (ROW_AXES, OF_IDS, ("batch", "row", "part", "width"))
PartCalls = dict[tuple[str, int], tuple[Tensor | None, Tensor | None]]
"""The input and the output of each call of each part of a model, in the order in which they end."""
PartRows = Mapping[tuple[str, int], Tensor]
"""The first rows that calls of parts give."""
NO_ROWS: PartRows = {}


_NONE_KNOWN = OwnPadding()


class _RowsOfText(NamedTuple):
    """What a part reads or gives for a text, `[token, …]`, a view of its own tensor, and the places
    of the real tokens in it.
    """

    rows: Tensor
    places: Tensor

    def copied(self) -> Tensor:
        """A copy of those of the real tokens."""
        return self.rows[self.places].detach().clone()

    def pin(self, first: Tensor) -> None:
        """Puts other numbers in the place of the first ones. What cannot be written stays: an
        expanded tensor has no cells of its own. Then the part still differs from the other pass,
        which shows the caller that it was not pinned.
        """
        with suppress(RuntimeError):
            self.rows[self.places[: len(first)]] = first


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A callable as a function of texts: of vectors `[token, width]`, or of token ids `[token, 1]`.

    Of token ids, `n_ids` is the number; 0 for vectors. `source` takes the ids of an encoder, beside
    which these are those of a decoder; `memory` takes vectors for each text. `masks` say which
    tokens are real, several if it is unknown what True means in them; `hides_padding`: they are
    surely meant for it. Where it takes no mask, `own_padding` is what is known of the padding among
    its ids. `table` reads the ids, in which `pad` stands for padding if that `is_stated`.
    `positions` takes the numbers of positions, of which the first is `first_position`. `cached`
    reads texts in steps, None if it takes no cache.
    """

    attention: UserAttention
    n_ids: int = 0
    pad: int = 0
    is_stated: bool = False
    table: nn.Embedding | None = None
    source: str | None = None
    memory: str | None = None
    own_padding: OwnPadding = _NONE_KNOWN
    masks: tuple[MaskForm, ...] = ()
    hides_padding: bool = True
    positions: str | None = None
    first_position: int = 0
    cached: StepConvention | None = None

    @property
    def has_source(self) -> bool:
        """Whether it is an encoder with a decoder."""
        return self.source is not None

    @property
    def mask(self) -> MaskForm | None:
        """The likeliest of the masks."""
        return next(iter(self.masks), None)

    @property
    def sides(self) -> tuple[PaddingSide, ...]:
        """The sides on which texts may be padded."""
        has_lengths = self.mask is not None and self.mask.kind == "lengths"
        is_right_only = self.has_source or self.attention.end is not None or has_lengths
        return ("right",) if is_right_only else ("right", "left")

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
        note: tuple[int, PartCalls, PartRows] | None = None,
        given: Mapping[str, Any] = NOTHING,
        filled_by: Tensor | None = None,
        **how: Any,
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The outputs `[token, width]` of each text in one pass, in which shorter ones are padded
        on a side, and what a model that returns nothing for each token gives for the whole text,
        except logits of one token. `note` receives what the parts of the model compute for one of
        the texts, and has the first rows that some must give. `given` are arguments in place of the
        usual ones. The padding is `filled_by` the tokens of a text.
        """
        attention = self.attention
        rows, real = self.padded(texts, side)
        if filled_by is not None:
            rows = torch.where(real[..., None], rows, filled_by[: rows.shape[1]].to(rows))
        passed = tree_map_only(Tensor, attention.here, dict(given))
        if side == "left" and mask is not None and self.positions is not None:
            passed[self.positions] = (real.cumsum(dim=1) - 1).clamp(min=0) + self.first_position
        inputs = Inputs(rows, real=None if mask is None else real)
        with NO_CONTEXT if note is None else self.noting(*note, real):
            result = attention.result(inputs, mask=mask, given=passed, **how)
        out = attention.read(result, attention.sizes_of(inputs))
        wholes = self._of_whole_texts(result, len(texts))
        if out.shape[:2] != (len(texts), 1 if attention.is_pooled else real.shape[1]):
            raise Unreadable(
                f"texts {list(real.shape)} give {list(out.shape)}, which is not one row for each of"
                " their tokens"
            )
        outputs = list(out.to("cpu", torch.promote_types(out.dtype, torch.float32)))
        if not attention.is_pooled:
            outputs = [
                row[: len(text)] if side == "right" else row[-len(text) :]
                for row, text in zip(outputs, texts, strict=True)
            ]
        return list(zip(outputs, wholes, strict=True))

    def noting(self, row: int, noted: PartCalls, pinned: PartRows, real: Tensor) -> RemovableHandle:
        """A context, or a handle, that notes what the parts of the model read and give for the real
        tokens of a text. Of `pinned` calls the first outputs become these, before they are noted
        and before other parts read them.
        """

        def keep(name: str, _part: nn.Module, inputs: Any, output: Any) -> None:
            call = name, len([earlier for earlier, _ in noted if earlier == name])
            floats = tree_map_only(
                Tensor, lambda ids: ids if ids.is_floating_point() else ids.double(), inputs
            )
            read = self._rows_of(floats, row, real)
            given = self._rows_of(output, row, real)
            was_read = None if read is None else read.copied()
            if given is not None and call in pinned:
                given.pin(pinned[call])
            noted[call] = was_read, None if given is None else given.copied()

        return watching(self.attention.module, keep)

    def _rows_of(self, values: Any, row: int, real: Tensor) -> _RowsOfText | None:
        """The rows of a text in what a part reads or gives; None if it has nothing for each of its
        tokens.
        """
        is_first = self.attention.axes[0] == "batch"
        batch, length = real.shape if is_first else real.shape[::-1]
        found = output_in(values, _OF_TOKENS, CallSizes(batch, length, 0))
        each = None if found is None else dict(leaves(values))[found[0]]
        if each is None and is_first:
            each = _along_tokens(values, batch, length)
        if each is None:
            return None
        rows = each[row] if is_first else each[:, row]
        # all where a row is of several tokens, as of a patch
        n = len(rows)
        places = real[row].nonzero()[:, 0] if n == real.shape[1] else torch.arange(n)
        return _RowsOfText(rows, places.to(each.device))

    def _of_whole_texts(self, result: Any, n_texts: int) -> Sequence[Tensor | None]:
        """What a model that returns nothing for each token gives for each text: rows of numbers, or
        one number where it takes nothing but texts.
        """
        if self.attention.is_inside:
            floats = [tensor for _, tensor in leaves(result[0]) if tensor.is_floating_point()]
            rows = [tensor for tensor in floats if tensor.ndim == 2]
            if len(self.attention.slots) == 1:
                rows += [tensor[:, None] for tensor in floats if tensor.ndim == 1]
            for each in rows:
                if len(each) == n_texts and each.shape[1] != self.n_ids:
                    return list(each.detach().cpu())
        return [None] * n_texts

    def padded(self, texts: Sequence[Tensor], side: PaddingSide) -> tuple[Tensor, Tensor]:
        """The texts as a batch, and which of its tokens are real."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
        real = pad([torch.ones(len(text), dtype=torch.bool) for text in texts])
        return pad(list(texts), padding_value=self.pad), real.to(texts[0].device)


def _along_tokens(result: Any, batch: int, length: int) -> Tensor | None:
    """The first tensor of a result that has an axis for the tokens of a text in any place, or
    shorter ones alone, one of them for patches of several tokens, as `[text, token or patch, …]`.
    """
    floats = [each for _, each in leaves(result) if each.is_floating_point() and each.ndim > 1]
    for n_rows, tensor in product(range(length, 1, -1), floats):
        # positions alone have no axis for texts
        if length % n_rows == 0 and len(tensor) % batch == 0 and len(tensor) != length:
            texts: Tensor = tensor.unflatten(0, (batch, -1))
            axes = [axis for axis in range(1, texts.ndim) if texts.shape[axis] == n_rows]
            if axes and (n_rows == length or max(texts.shape[1:]) < length):
                rows: Tensor = texts.movedim(axes[0], 1)
                return rows
    return None


class NotedSteps:
    """A context for each of some steps, that notes what the parts of a model read and give."""

    def __init__(self, model: TextModel, ends: Sequence[int]) -> None:
        self.model = model
        self.lengths = [end - start for start, end in pairwise((0, *ends))]
        self.noted = list[PartCalls]()

    def __enter__(self) -> None:
        """Begins to note what a step computes."""
        real = torch.ones(1, self.lengths[len(self.noted)], dtype=torch.bool)
        self.noted.append({})
        self.watching = self.model.noting(0, self.noted[-1], NO_ROWS, real)

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self.watching.remove()

    def joined(self) -> PartCalls:
        """What each part reads and gives in all steps, one behind another."""

        def whole(key: tuple[str, int], n: int) -> Tensor | None:
            found = [step[key][n] for step in self.noted if key in step]
            rows = [each for each in found if each is not None]
            return torch.cat(rows) if len(rows) == len(self.noted) else None

        return {key: (whole(key, 0), whole(key, 1)) for key in self.noted[0]}


def text_model_of_vectors(attention: UserAttention) -> TextModel | None:
    """An attention over vectors as a function of texts; None for a function of heads."""
    if attention.is_function:
        return None
    masks = _likeliest(attention.padding_forms)
    # a mask that one answer for a text is given can be of nothing else
    is_named = attention.is_pooled or any(
        call_role(each.parameter) == "padding" or each.parameter == "attention_mask"
        for each in masks
    )
    # beside a memory, one mask alone leaves padding in the other rows
    hides_padding = attention.n_rows == 1 and is_named
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
_FEWEST_IDS = 2
"""The ids of a model whose table is not known, at first."""
_MOST_IDS = 1 << 18
"""More than any vocabulary has."""


def text_model_of_ids(
    built: Built,
    request: TargetRequest,
    *,
    means: str | None = None,
    has_table: bool = True,
    end: int | None = None,
) -> TextModel | None:
    """A callable that takes token ids as a function of texts, of an encoder with a decoder the
    decoder's; None if it takes none, or needs more than a mask. Unless it `has_table`, an embedding
    that reads them, larger ids show how many it knows. `means`: what True in a mask means, if that
    is stated. With an `end`, each text ends with this id, and one that makes the text of its
    decoder itself is read as any other.
    """
    template = plain_call(built, request)
    n_ids = built.n_ids
    if not has_table and template.device.type == "cpu":
        n_ids = _FEWEST_IDS  # elsewhere a wrong id ends the process
    parameters = [p for p in signature_of(built.call) if p.name not in template.others]
    if not n_ids or not parameters:
        return None
    first, *others = parameters
    decoder = next((p.name for p in others if p.name in _DECODER and end is None), None)
    off = {p.name: False for p in others if p.role == "caching"}
    attention = replace(
        template,
        sizes=CallSizes(BATCH, LENGTH, LENGTH),
        slots=(CallParameter(decoder or first.name, "x", True, decoder is None),),
        axes=OF_IDS,
        ids=torch.tensor([i for i in range(n_ids) if i != end], device=template.device),
        end=end,
        others={**off, **template.others},
        is_copied=False,
    )
    found = first_call_of_ids(attention, others, None if decoder is None else first.name)
    table = None if found is None else _table_of(found)
    if found is None or (table is None and has_table):
        return None
    return _of_found(found, table, parameters, decoder, means)


def _of_found(
    found: UserAttention,
    table: nn.Embedding | None,
    parameters: Sequence[CallParameter],
    decoder: str | None,
    means: str | None,
) -> TextModel:
    """The function of texts of a call that works, with its masks, padding, positions and cache."""
    memory = _memory_of(found)
    if memory is not None:
        decoder = None
    source = None if decoder is None else parameters[0].name
    n_ids = _n_ids(found) if table is None else table.num_embeddings
    stated = stated_pads(found.built, table)
    attention = with_independent_rows(found)
    masks = _likeliest(_forms_of_padding(attention, decoder, means))
    own = _NONE_KNOWN if masks else own_padding(attention, stated, source)
    pads = [i for i in (own.pad, *stated) if i is not None and i < n_ids]
    given = dict(attention.others)
    if masks and masks[0].parameter in given:
        given[masks[0].parameter] = made_mask(_that_works(masks[0]))
    special = (*pads, found.end)
    ordinary = torch.tensor([i for i in range(n_ids) if i not in special], device=found.device)
    attention = replace(attention, ids=ordinary, others=given)
    named = {p.role: p.name for p in reversed(parameters[1:])}
    steps = (each for each in step_conventions(attention) if each.caches or "offset" in named)
    return TextModel(
        attention=attention,
        n_ids=n_ids,
        pad=next(iter(pads), 0),
        is_stated=bool(pads),
        table=table,
        source=source,
        memory=memory,
        own_padding=own,
        masks=masks,
        positions=named.get("positions") if decoder is None else None,
        first_position=_first_position(found.built),
        cached=next(steps, None),
    )


def _memory_of(attention: UserAttention) -> str | None:
    """The argument that takes vectors for each text, as many beside a longer text."""
    length = attention.sizes.q_len + 1
    longer = attention.sizes._replace(q_len=length, k_len=length)
    masks = [p.name for p in attention.parameters(*MASKS)]
    for name, value in attention.others.items():
        if isinstance(value, MadeForSizes) and name not in masks:
            made = value.make(attention.sizes)
            is_vectors = isinstance(made, Tensor) and made.is_floating_point() and made.ndim == 3
            if is_vectors and value.make(longer).shape == made.shape:
                return name
    return None


def _that_works(form: MaskForm) -> MaskForm:
    """The form with the meaning that the code gives it: of a tokenizer's mask that it reads in the
    opposite meaning one of real tokens would hide all.
    """
    turned = form._replace(true_means="hide")
    return turned if turned.is_turned and not form.hides else form


def _table_of(attention: UserAttention) -> nn.Embedding | None:
    """The first table that reads what other ids change; None if none does."""
    read: list[tuple[nn.Embedding, Tensor]] = []

    def note(_name: str, part: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        # some tables of positions take a shape
        if isinstance(part, nn.Embedding) and isinstance(inputs[0], Tensor):
            read.append((part, inputs[0]))

    drawer = attention.drawer(0)
    with watching(attention.module, note):
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
            attention(Inputs(torch.full((*attention.sizes[:2], 1), i)), seed=0)
            return False
        return True

    return bisect_left(range(_MOST_IDS), True, key=is_too_large)


def _first_position(built: Built) -> int:
    """The number of the first position: that behind the row of padding of a table."""
    for name, part in built.parts.items():
        row = getattr(part, "padding_idx", None)
        if name.endswith("position_embeddings") and row is not None:
            return int(row) + 1
    return 0


def _forms_of_padding(
    attention: UserAttention, decoder: str | None, means: str | None
) -> Iterator[MaskForm]:
    """The forms of masks of padding that the call takes. In transformers True keeps."""
    if hasattr(getattr(attention.module, "config", None), "get_text_config"):
        means = "keep"
    for parameter in attention.parameters(*MASKS):
        given = attention.others.get(parameter.name)
        is_open = isinstance(given, MadeForSizes) and given.hides_nothing
        is_of_decoder = decoder is None or parameter.name[:3] == decoder[:3]
        is_of_text = is_of_decoder and not re.match("mem|enc|context|cross", parameter.name)
        if is_of_text and (is_open or is_of_padding(parameter)):
            forms = [form for form in forms_of(parameter) if form.is_padding]
            forms = [form for form in forms if means in (None, form.true_means)]
            forms.sort(key=lambda form: (form.axes != ("batch", "key"), form.kind != "whole"))
            accepted = accepted_forms(attention, forms)
            yield from as_tokenizers_mean(accepted, of_ids=True) if means is None else accepted
