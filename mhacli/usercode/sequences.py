"""A callable that takes token ids or vectors as a function of texts, and which of what it returns are the outputs of tokens."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from mhacli.settings import PaddingSide
from mhacli.usercode.build import Built, seeded
from mhacli.usercode.find_call import arguments_of_example, is_ids
from mhacli.usercode.roles import MASKS, CallParameter, call_role, signature_of, states_batch_first
from mhacli.usercode.user_attention import (
    NOTHING,
    OF_IDS,
    ROW_AXES,
    AxisNames,
    CallSizes,
    Inputs,
    MaskForm,
    UserAttention,
    leaves,
    mask_of,
    output_in,
)

LENGTH = 256
"""The length of the texts, if the model has so many positions."""
_BATCH, _LEAST, _SHOWN = 2, 4, 7
_DECODER = ("decoder_input_ids", "tgt", "trg", "target_ids", "tgt_ids", "tgt_seq", "trg_seq")
_TARGETS = ("targets", "target", "labels")
_STATES = ("state", "states", "hidden", "hidden_state", "hx", "h0", "init_state", "initial_state")
"""Arguments behind the ids that hold what a recurrent model remembers."""
SWITCH = re.compile(r"(use|return|output|with)_?(cache|kvs?|key_values|pasts?|presents?|state)")
"""Switches by which a call remembers what it read."""
_OF_TOKENS: tuple[AxisNames, ...] = (ROW_AXES, OF_IDS, ("batch", "row", "part", "width"))
_OF_DECODER = ("tgt_mask", "trg_mask")
_DECODER_MASKS = ("decoder_attention_mask", "tgt_key_padding_mask", "tgt_padding_mask", "trg_padding_mask")
_CAUSAL_MASKS = {
    "True hides": MaskForm("", ("query", "key"), "bool", "hide"),
    "True keeps": MaskForm("", ("query", "key"), "bool"),
    "−∞ hides": MaskForm("", ("query", "key"), "additive"),
}
Noted = dict[tuple[str, int], tuple[Tensor | None, Tensor | None]]
"""The input and the output of each call of each part of a model, in the order in which they end."""
_Note = Callable[[str, nn.Module, tuple[Any, ...], Any], None]


class Text(NamedTuple):
    """The ids `[token]` or vectors `[token, width]` of a text, and the ids that the encoder of an encoder-decoder reads."""

    tokens: Tensor
    source: Tensor | None = None

    def first(self, n: int) -> Text:
        """The first tokens."""
        return self._replace(tokens=self.tokens[:n])


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """A callable as a function of texts.

    `length` is the longest that is tried. Of token ids, `n_ids` is the number and `ids` are the ordinary ones; 0 and None for
    vectors. `masks` are the ways to say which tokens are real, by name; `hides_padding`: they are surely meant for it.
    `is_inside`: its output is what its output layer reads. `positions` takes the numbers of positions, of which the first is
    `first_position`. `cache` is the argument that takes what a call remembers, `offset` the one that says how many tokens came
    before, `switches` are the keywords that make a call remember.
    """

    attention: UserAttention
    called: str
    length: int = _LEAST
    n_ids: int = 0
    ids: Tensor | None = None
    masks: Mapping[str, MaskForm] = field(default_factory=dict)
    hides_padding: bool = True
    is_inside: bool = False
    positions: str | None = None
    first_position: int = 0
    cache: str | None = None
    offset: str | None = None
    switches: Mapping[str, bool] = field(default_factory=dict)
    pad: int = 0

    @property
    def module(self) -> nn.Module | None:
        """The callable, if it is a module."""
        return self.attention.built.module

    @property
    def has_source(self) -> bool:
        """Whether it is an encoder with a decoder."""
        return self.ids is not None and self.attention.n_rows > 1

    @property
    def is_pooled(self) -> bool:
        """Whether its output is of a whole text, not of each token."""
        return self.ids is None and self.attention.is_pooled

    def draw(self, seed: int, length: int) -> Text:
        """A random text of ordinary tokens."""
        generator = torch.Generator().manual_seed(seed)
        if self.ids is not None:
            return Text(self.ids[torch.randint(len(self.ids), (length,), generator=generator).to(self.ids.device)])
        vectors = torch.randn(length, self.attention.sizes.d_in, generator=generator)
        return Text(vectors.to(self.attention.device, self.attention.dtype))

    def run(
        self,
        texts: Sequence[Text],
        *,
        training: bool = False,
        mask: str = "",
        side: PaddingSide = "right",
        note: tuple[int, Noted] | None = None,
    ) -> list[Tensor]:
        """The outputs `[token, width]` of each text in one pass, in which shorter ones are padded on a side. `note` receives what
        the parts of the model compute for one of the texts."""
        x, real = self.padded([text.tokens for text in texts], side)
        given: dict[str, Any] = {}
        if side == "left" and mask and self.positions is not None:
            given[self.positions] = (real.cumsum(dim=1) - 1).clamp(min=0) + self.first_position
        sources, source = [text.source for text in texts if text.source is not None], None
        if sources and self.has_source:
            source, is_read = self.padded(sources, "right")
            if not bool(is_read.all()):
                given["attention_mask"] = is_read.long()
        row, noted = note or (0, {})

        def keep(name: str, _part: nn.Module, inputs: Any, output: Any) -> None:
            numbers = tree_map_only(Tensor, lambda ids: ids if ids.is_floating_point() else ids.double(), inputs)
            tensors = [self.outputs_in(each, real.shape) for each in (numbers, output)]
            read, made = (None if each is None else each[row][real[row]].detach().clone() for each in tensors)
            noted[name, sum(1 for earlier, _ in noted if earlier == name)] = read, made

        with nullcontext() if note is None else _watching(self.module, keep):
            _, out = self.call(x, source, training=training, real=real, mask=mask, given=given)
        return self._of_each(out, real)

    def steps(self, text: Text, cuts: Sequence[int]) -> list[Tensor] | None:
        """The outputs of each part of a text between two cuts, read behind those before it; None if a call remembers nothing."""
        past, parts = None, []
        source = None if text.source is None else text.source[None]
        for start, end in pairwise((0, *cuts, len(text.tokens))):
            x, real = self.padded([text.tokens[start:end]], "right")
            given: dict[str, Any] = dict(self.switches)
            if self.offset is not None:
                given[self.offset] = start
            if self.cache is not None:
                given[self.cache] = past
            result, out = self.call(x, source, given=given)
            if self.cache is not None:
                past = cache_in(result, self.cache, out)
                if past is None:
                    return None
            parts += self._of_each(out, real)
        return parts

    def call(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        training: bool = False,
        real: Tensor | None = None,
        mask: str = "",
        given: Mapping[str, Any] = NOTHING,
    ) -> tuple[Any, Tensor | None]:
        """What a call returns for a batch, and its output for each token, None without such outputs."""
        if self.has_source and source is None:
            source = x.new_tensor([1, 0, 1]).expand(len(x), -1)
        rows = x if self.ids is None else x[..., None]
        keys = None if source is None else source[..., None]
        inputs, padding = Inputs(rows, keys, real=real if mask else None), self.masks.get(mask)
        inside: list[Tensor] = []

        def note(_name: str, part: nn.Module, _inputs: Any, output: Any) -> None:
            is_wide = isinstance(output, Tensor) and output.ndim == 3 and part is not self.module
            found = self.outputs_in(output, x.shape) if is_wide else None
            inside.extend([] if found is None else [found])

        with _watching(self.module, note) if self.is_inside else nullcontext():
            result = self.attention.result(inputs, mask=padding, training=training, given=given)
        if self.ids is None:
            return result, self.attention.read(result, self.attention.sizes_of(inputs))
        return result, inside[-1] if inside else self.outputs_in(result, x.shape)

    def outputs_in(self, result: Any, shape: Sequence[int]) -> Tensor | None:
        """The output `[batch, token, …]` for each token of a batch of this shape."""
        batch, length = (shape[0], shape[1]) if self.attention.axes[0] == "batch" else (shape[1], shape[0])
        found = output_in(result, _OF_TOKENS, CallSizes(batch, length, 0))
        if found is None:
            return None
        output = dict(leaves(result))[found[0]]
        return output if self.attention.axes[0] == "batch" else output.transpose(0, 1)

    def padded(self, rows: Sequence[Tensor], side: PaddingSide) -> tuple[Tensor, Tensor]:
        """The rows as a batch, and which of its tokens are real."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
        real = pad([torch.ones(len(row), dtype=torch.bool) for row in rows])
        return pad(list(rows), padding_value=self.pad), real.to(rows[0].device)

    def _of_each(self, out: Tensor | None, real: Tensor) -> list[Tensor]:
        if out is None:
            raise ValueError(f"no output has the shape [batch, token, …] of the ids, {list(real.shape)}")
        wide = out.detach().to(torch.promote_types(out.dtype, torch.float32)).cpu()
        wide = wide.flatten(2) if wide.ndim > 2 else wide[..., None]
        if self.is_pooled:
            return list(wide)
        return [row[is_real] for row, is_real in zip(wide, real.cpu(), strict=True)]

    def tried(self, *texts: Text) -> list[Tensor] | None:
        """The outputs of each text in one pass; None if the call raises, or has no outputs of each token."""
        with suppress(Exception), seeded(0, self.attention.device):  # the user's code may raise anything
            return self.run(texts)
        return None

    def at_longest(self, length: int | None) -> Sequences | None:
        """The same with the length of the longest text that works: the requested one, or half as long again and again."""
        tried = LENGTH if length is None else length
        while tried >= (_LEAST if length is None else 1):
            try:
                self.run([self.draw(0, tried)] * _BATCH)
                return replace(self, length=tried, called=self.called.format(tried))
            except Exception:  # beyond the model's positions its code may raise anything
                if length is not None:
                    raise
                tried //= 2
        return None


# ------------------------------------------------------------------------------------------------------------ token ids


def sequences_of_ids(
    name: str,
    module: nn.Module,
    *,
    fixed: Mapping[str, Any],
    length: int | None,
    means: str | None = None,
    example: Callable[..., Any] | None = None,
) -> Sequences | None:
    """A module that takes token ids as a function of texts, of an encoder with a decoder the decoder's; None if it has no
    embedding that reads them, or needs more than a mask. `means`: what True in a mask means, if that is stated; `example` is a
    call that works."""
    parameters = signature_of(module)
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    if not tables or not parameters:
        return None
    ids, others = parameters[0].name, {p.name: p for p in parameters[1:] if p.name not in fixed}
    decoder = next((word for word in _DECODER if word in others), None)
    switches = [word for word in others if SWITCH.fullmatch(word)]
    named = {p.role: p.name for p in reversed(others.values()) if p.name not in (*switches, decoder)}
    offset = named.get("offset")
    needed = [p for p in others.values() if p.required and p.name not in (decoder, offset) and example is None]
    targets = [CallParameter(p.name, "x", True) for p in needed if p.name in _TARGETS]
    needed = [p for p in needed if p.name not in _TARGETS]
    if len(needed) > 1 or any(p.role not in MASKS for p in needed):
        return None
    constants = {**dict.fromkeys(switches, False), **({} if offset is None else {offset: 0}), **fixed}
    attention = _of_module(name, module, ids, decoder, constants)
    attention = replace(attention, slots=(*attention.slots, *targets))
    called = f"{name.rpartition(':')[2]}({'ids' if decoder is None else decoder} [{_BATCH}, {{}}]"
    if example is not None:
        attention = _as_shown(replace(attention, example=example))
        if not attention.is_resizable:
            length, called = attention.sizes.q_len, f"{called}, the only length that the example gives"
    found = _of_vocabulary(
        Sequences(
            attention=attention,
            called=called,
            length=attention.sizes.q_len,
            ids=torch.arange(min(tables), device=attention.device),
            masks=_padding_masks(others, module, of_tokens=decoder is not None, means=means),
            positions=named.get("positions") if decoder is None else None,
            first_position=_first_position(module),
            cache=named.get("cache") or next((word for word in _STATES if word in others), None),
            offset=offset,
            switches=dict.fromkeys(switches, True),
        ),
        [p.name for p in needed] or [word for word in _OF_DECODER if decoder and word in others and example is None],
    )
    return None if found is None else _with_independent_texts(_of_each_token(found, others)).at_longest(length)


def _of_module(
    name: str, module: nn.Module, ids: str, decoder: str | None, constants: Mapping[str, Any]
) -> UserAttention:
    """A module that takes ids `[batch, token]`, or those of an encoder besides those of its decoder."""
    weight = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    built = Built(name, type(module), module, module, lambda: built)
    slots = [CallParameter(ids, "x", True, True)]
    if decoder is not None:
        slots = [CallParameter(ids, "context", True), CallParameter(decoder, "x", True)]
    sizes = CallSizes(_BATCH, _LEAST, _LEAST)
    return UserAttention(built, sizes, weight.dtype, weight.device, tuple(slots), OF_IDS, fixed=constants)


def _as_shown(attention: UserAttention) -> UserAttention:
    """The module, called as its example does: with the first ids of it, or those of the decoder."""
    shown = {name: ids for name, ids in arguments_of_example(attention, _SHOWN).items() if is_ids(ids)}
    read = [slot.name for slot in attention.slots if slot.part == "queries"]
    name = min(shown, key=lambda name: name not in read, default=None)
    if name is None:
        return replace(attention, slots=())
    batch, n = shown[name].shape
    return replace(attention, slots=(CallParameter(name, "x", True),), fixed={}, sizes=CallSizes(batch, n, n))


def _of_vocabulary(sequences: Sequences, masks: Sequence[str]) -> Sequences | None:
    """With a causal mask for the first of some arguments, the first that hides the future, else the first that works; and with
    the ids that it reads. None if no table reads them."""
    masked = []
    for meaning, form in _CAUSAL_MASKS.items() if masks else ():
        attention = replace(sequences.attention, made={masks[0]: partial(mask_of, form, causal=True)})
        called = f"{sequences.called}, {masks[0]}=a causal mask [token, token]: {meaning}"
        masked.append(replace(sequences, attention=attention, called=called))
    masked = [way for way in masked if _n_ids_read(way)]
    sequences = next((way for way in masked if _hides_last(way)), next(iter(masked), sequences))
    n_ids, module = _n_ids_read(sequences), sequences.module
    if n_ids is None or module is None:
        return None
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding) and part.num_embeddings == n_ids]
    pads = [getattr(getattr(module, "config", None), "pad_token_id", None), *(table.padding_idx for table in tables)]
    ids = torch.tensor([i for i in range(n_ids) if i not in pads], device=sequences.attention.device)
    pad = next((i for i in pads if isinstance(i, int) and 0 <= i < n_ids), 0)
    return replace(sequences, called=f"{sequences.called})", n_ids=n_ids, ids=ids, pad=pad)


def _hides_last(sequences: Sequences) -> bool:
    """Whether the outputs of a short text stay when its last token changes, which its mask hides."""
    text = sequences.draw(0, _LEAST)
    tokens = text.tokens.clone()
    tokens[-1] = 1 - tokens[-1].clamp(max=1)
    outputs = sequences.tried(text, Text(tokens))
    if outputs is None:
        return False
    first, second = (output[:-1] for output in outputs)
    return bool(first.isfinite().all()) and torch.allclose(first, second, atol=1e-5)


def _of_each_token(sequences: Sequences, others: Mapping[str, CallParameter]) -> Sequences:
    """With the ids for its targets too, or with what the output layer reads: the first that gives outputs of each token."""
    targets = [CallParameter(word, "x", True) for word in _TARGETS if word in others and not others[word].required]
    for slots in [(), *((target,) for target in targets)]:
        attention = replace(sequences.attention, slots=(*sequences.attention.slots, *slots))
        way = replace(sequences, attention=attention)
        text = way.draw(0, way.length)
        if way.tried(text, text) is not None:
            return way
    return replace(sequences, is_inside=True)


def _with_independent_texts(found: Sequences) -> Sequences:
    """The same, or with the axis of tokens before that of texts where a text is the same alone and among others only then, as
    in torch's own layers, and the code does not state the batch first."""
    attention = found.attention
    if attention.example is not None or states_batch_first(type(found.module)):
        return found
    called = found.called.replace(f"[{_BATCH}, {{}}]", f"[{{}}, {_BATCH}]")
    for way in (found, replace(found, attention=replace(attention, axes=OF_IDS[::-1]), called=called)):
        text, other = way.draw(0, _SHOWN), way.draw(1, _SHOWN)
        among, alone = way.tried(other, text), way.tried(text)
        if among and alone and torch.allclose(among[1], alone[0], atol=1e-5 * float(alone[0].abs().max())):
            return way
    return found


def _first_position(module: nn.Module) -> int:
    """The number of a text's first position, behind the row for padding if the table of positions has one."""
    tables = (part for name, part in module.named_modules() if name.endswith("position_embeddings"))
    rows = (getattr(table, "padding_idx", None) for table in tables)
    return next((row + 1 for row in rows if row is not None), 0)


def _padding_masks(
    others: Mapping[str, CallParameter], module: nn.Module, *, of_tokens: bool, means: str | None
) -> dict[str, MaskForm]:
    """The ways to pass a mask of padding, the likeliest first. In transformers True keeps a token."""
    means = "keep" if hasattr(getattr(module, "config", None), "get_text_config") else means
    names = [p.name for p in others.values() if p.role == "padding" or p.name == "attention_mask"]
    names.sort(key=lambda name: (name != "attention_mask", name.startswith(("src", "memory"))))
    if of_tokens:
        names = [name for name in _DECODER_MASKS if name in others]
    if not names:
        return {}
    form = MaskForm(names[0], ("batch", "key"), "whole" if names[0].endswith("attention_mask") else "bool")
    if means is not None:
        return {names[0]: form._replace(true_means="keep" if means == "keep" else "hide")}
    return {
        f"{names[0]}, in which True keeps": form,
        f"{names[0]}, in which True hides": form._replace(true_means="hide"),
    }


def _n_ids_read(sequences: Sequences) -> int | None:
    """The number of rows of the first table that reads what other ids change; None if none does, or the call raises."""
    first, second = (
        torch.stack([sequences.draw(seed + row, sequences.length).tokens for row in range(_BATCH)])
        for seed in (0, _BATCH)
    )
    read: list[tuple[int, Tensor]] = []

    def note(_name: str, part: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        if isinstance(part, nn.Embedding):
            read.append((part.num_embeddings, inputs[0]))

    with suppress(Exception), seeded(0, first.device), _watching(sequences.module, note):
        sequences.call(first)
        n_first = len(read)
        sequences.call(second)
        pairs = zip(read[:n_first], read[n_first:], strict=True)
        return next((n_ids for (n_ids, ids), (_, others) in pairs if not torch.equal(ids, others)), None)
    return None  # the user's code may raise anything, and what it takes is not known


# -------------------------------------------------------------------------------------------------------------- vectors


def sequences_of_vectors(attention: UserAttention, length: int | None) -> Sequences | None:
    """An attention over vectors as a function of texts; None for a function of heads, and where no long text works."""
    if attention.is_function:
        return None
    forms = attention.padding_forms
    shape = f"{{}}, {_BATCH}" if attention.axes[0] == "row" else f"{_BATCH}, {{}}"
    sequences = Sequences(
        attention=attention,
        called=f"{attention.built.name}([{shape}, {attention.sizes.d_in}])",
        masks={f"{form.parameter} ({form.kind}), in which True {form.true_means}s": form for form in forms},
        # beside a memory, one mask alone leaves padding in the other rows
        hides_padding=attention.n_rows == 1 and all(call_role(form.parameter) == "padding" for form in forms),
    )
    return sequences.at_longest(length if attention.is_resizable else attention.sizes.q_len)


# ------------------------------------------------------------------------------------------------------------ the parts


def cache_in(result: Any, name: str, out: Tensor | None) -> Any:
    """What a call returned for the next one to begin with: by the name of its argument, else what stands last beside the outputs
    and a loss, a single tensor only if there is nothing else."""
    if isinstance(result, tuple | list):
        others = [part for part in result if part is not None and part is not out]
        others = [part for part in others if not isinstance(part, Tensor) or part.ndim > 0]
        others.sort(key=lambda part: not isinstance(part, Tensor))
        return others[-1] if others else None
    named = result if isinstance(result, Mapping) else getattr(result, "__dict__", {})
    caches = [part for key, part in named.items() if call_role(key) == "cache"]
    return next((part for part in (named.get(name), *caches) if part is not None), None)


def _watching(module: nn.Module | None, note: _Note) -> RemovableHandle:
    """Notes, as a context, the name, the inputs and the output of each part of a module, in the order in which they end."""
    names = {} if module is None else {part: name for name, part in module.named_modules()}

    def hook(part: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], output: Any) -> None:
        if part in names:
            note(names[part], part, (*inputs, *named.values()), output)

    return register_module_forward_hook(hook, with_kwargs=True)


def with_zeros_drawn(module: nn.Module, seed: int) -> nn.Module:
    """The module, or a copy in which weights that are all zero, such as fresh output layers and gates, are small random numbers:
    what they hide would not be seen."""
    zero = [name for name, weight in module.named_parameters() if not name.endswith("bias") and not weight.any()]
    drawn = copy.deepcopy(module) if zero else module
    with torch.no_grad(), seeded(seed, torch.device("cpu")):
        for name in zero:
            drawn.get_parameter(name).normal_(std=0.02)
    return drawn
