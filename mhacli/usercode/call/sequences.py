"""A module that takes token ids, or an attention over vectors, as a function of texts: how it is called, and which of what it
returns are the outputs of tokens."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.settings import PaddingSide
from mhacli.usercode.call.example import call_with_ids, only_length
from mhacli.usercode.call.signature import MASKS, call_role
from mhacli.usercode.call.user_attention import UserAttention, call_attention
from mhacli.usercode.inputs import seeded
from mhacli.usercode.types import Inputs

LENGTH = 256
"""The length of the texts, if the model has so many positions."""
_BATCH, _LEAST = 2, 4
_DECODER = ("decoder_input_ids", "tgt", "trg", "target_ids", "tgt_ids", "tgt_seq", "trg_seq")
_TARGETS = ("targets", "target", "labels")
_STATES = ("state", "states", "hidden", "hidden_state", "hx", "h0", "init_state", "initial_state")
"""Arguments behind the ids that hold what a recurrent model remembers."""
SWITCH = re.compile(r"(use|return|output|with)_?(cache|kvs?|key_values|pasts?|presents?|state)")
"""Switches by which a call remembers what it read."""
_OF_TOKENS = ("decoder_attention_mask", "tgt_key_padding_mask", "tgt_padding_mask", "trg_padding_mask")
Noted = dict[tuple[str, int], tuple[Tensor | None, Tensor | None]]
"""The input and the output of each call of each part of a model, in the order in which they end."""


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

    `call(x, training=…, **keywords)` is what it returns for a batch, `draw(seed, length)` a random text. `length` is the longest
    that is tried, `n_ids` is the number of ids, 0 for vectors. `masks` are the ways to say which tokens are real and which are
    padding, by name: keywords from a mask `[batch, token]`; `hides_padding`: they are surely meant for it. `positions` takes the
    numbers of positions, of which the first is `first_position`. `cache` is the argument that takes what a call remembers,
    `offset` the one that says how many tokens came before, `switches` are the keywords that make a call remember.
    """

    name: str
    call: Callable[..., Any]
    draw: Callable[[int, int], Text]
    length: int
    called: str
    module: nn.Module | None = None
    n_ids: int = 0
    masks: Mapping[str, Callable[[Tensor], Mapping[str, Any]]]
    hides_padding: bool = True
    source: str | None = None
    positions: str | None = None
    first_position: int = 0
    cache: str | None = None
    offset: str | None = None
    switches: Mapping[str, bool]
    pad: int = 0

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
        given = dict(self.masks[mask](real)) if mask else {}
        if side == "left" and mask and self.positions is not None:
            given[self.positions] = (real.cumsum(dim=1) - 1).clamp(min=0) + self.first_position
        sources = [text.source for text in texts if text.source is not None]
        if self.source is not None and sources:
            given[self.source], is_read = self.padded(sources, "right")
            given |= {} if bool(is_read.all()) else {"attention_mask": is_read.long()}
        with _noting(self.module, x, real, note):
            out = outputs_in(self.call(x, training=training, **given), x.shape)
        return self._of_each(out, x, real)

    def steps(self, text: Text, cuts: Sequence[int]) -> list[Tensor] | None:
        """The outputs of each part of a text between two cuts, read behind those before it; None if a call remembers nothing."""
        past, parts = None, []
        source = {} if text.source is None or self.source is None else {self.source: text.source[None]}
        for start, end in zip((0, *cuts), (*cuts, len(text.tokens)), strict=True):
            x, real = self.padded([text.tokens[start:end]], "right")
            given = {**self.switches, **source}
            given |= {} if self.offset is None else {self.offset: start}
            given |= {} if self.cache is None else {self.cache: past}
            result = self.call(x, training=False, **given)
            out = outputs_in(result, x.shape)
            past = None if self.cache is None else cache_in(result, self.cache, out)
            if past is None and self.cache is not None:
                return None
            parts += self._of_each(out, x, real)
        return parts

    def padded(self, rows: Sequence[Tensor], side: PaddingSide) -> tuple[Tensor, Tensor]:
        """The rows as a batch, and which of its tokens are real."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
        real = pad([torch.ones(len(row), dtype=torch.bool) for row in rows])
        return pad(list(rows), padding_value=self.pad), real.to(rows[0].device)

    def _of_each(self, out: Tensor | None, x: Tensor, real: Tensor) -> list[Tensor]:
        if out is None:
            raise ValueError(f"no output has the shape [batch, token, …] of the ids, {list(x.shape[:2])}")
        wide = out.detach().to(torch.promote_types(out.dtype, torch.float32)).cpu()
        wide = wide.flatten(2) if wide.ndim > 2 else wide[..., None]
        return [row[is_real] for row, is_real in zip(wide, real.cpu(), strict=True)]


# ------------------------------------------------------------------------------------------------------------ token ids


def sequences_of_ids(
    name: str,
    module: nn.Module,
    *,
    fixed: Mapping[str, Any],
    length: int | None,
    seed: int,
    means: str | None = None,
    example: Callable[..., Any] | None = None,
) -> Sequences | None:
    """A module that takes token ids as a function of texts, of an encoder with a decoder the decoder's; None if it has no
    embedding that reads them, or needs more than a mask. `means`: what True in a mask means, if that is stated;
    `example` is a call that works."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    parameters = inspect.signature(module.forward).parameters
    if not tables or not parameters:
        return None
    first, *others = parameters
    decoder = next((word for word in _DECODER if word in others), None)
    source = None if decoder is None else first
    switches = [other for other in others if SWITCH.fullmatch(other)]
    open_ones = [parameters[other] for other in others if other not in (*fixed, *switches, decoder)]
    roles = {other.name: call_role(other.name, other.default, other.annotation) for other in open_ones}
    of_role = {role: other for other, role in reversed(roles.items())}
    offset = of_role.get("offset")
    needed = _needed([other for other in open_ones if other.name != offset]) if example is None else []
    if len(needed) > 1 or any(roles[other] not in MASKS for other in needed):
        return None
    causal_masks = needed or [word for word in ("tgt_mask", "trg_mask") if decoder and word in roles]
    always = {**dict.fromkeys(switches, False), **fixed}
    if offset is not None:
        always[offset] = 0
    call = _CallOfIds(module, always, source, decoder, example=example)
    call, how = _masked(call, causal_masks if example is None else [], tables)
    only = None if example is None else only_length(example)
    if only is not None:
        length, how = only, ", the only length that the example gives"
    n_ids = _ids_read(call, tables, only or _LEAST)
    if n_ids is None:
        return None
    draw, pad = _drawing(module, tables, n_ids)
    cache = of_role.get("cache") or next((word for word in _STATES if word in roles), None)
    return _at_longest(
        Sequences(
            name=name,
            call=_with_outputs(call, draw(seed, only or _LEAST), [word for word in _TARGETS if word in roles]),
            draw=draw,
            length=_LEAST,
            called=f"{name.rpartition(':')[2]}({'ids' if decoder is None else decoder} [{_BATCH}, {{}}]{how})",
            module=module,
            n_ids=n_ids,
            masks=_padding_masks(roles, of_tokens=decoder is not None, means=_meaning(module, means)),
            source=source,
            positions=of_role.get("positions") if decoder is None else None,
            first_position=_first_position(module),
            cache=cache,
            offset=offset,
            switches=dict.fromkeys(switches, True),
            pad=pad,
        ),
        length,
    )


def _needed(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """The names of the arguments that a call must give."""
    return [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


def _meaning(module: nn.Module, means: str | None) -> str | None:
    """What True in a mask means: what is stated, and in transformers that a token is kept."""
    return "keep" if hasattr(getattr(module, "config", None), "get_text_config") else means


@dataclass(frozen=True)
class _CallOfIds:
    """A call of a module that takes ids: by itself, or as the tokens of a `decoder` behind a `source` of other ids. `mask` is the
    argument that is given a causal mask, made by `make`; `targets` the one that is given the ids again. `is_inside`: the result
    is what its output layer reads."""

    module: nn.Module
    fixed: Mapping[str, Any]
    source: str | None = None
    decoder: str | None = None
    mask: str | None = None
    make: Callable[[int], Tensor] = torch.zeros
    targets: str | None = None
    is_inside: bool = False
    example: Callable[..., Any] | None = None

    def __call__(self, x: Tensor, *, training: bool = False, **keywords: Any) -> Any:
        given = {**self.fixed, **keywords}
        given |= {} if self.targets is None else {self.targets: x}
        if self.mask is not None:
            given.setdefault(self.mask, self.make(x.shape[1]).to(x.device))
        with in_mode(self.module, training=training), _last_inside(self.module, x, watches=self.is_inside) as last:
            if self.example is not None:
                given = dict(keywords) | ({} if self.targets is None else {self.targets: x})
                result = call_with_ids(self.module, self.example, x, given, self.decoder)
            elif self.decoder is None or self.source is None:
                result = self.module(x, **given)
            else:
                given.setdefault(self.source, x.new_tensor([1, 0, 1]).expand(len(x), -1))
                result = self.module(**{self.decoder: x}, **given)
        return last[-1:] if self.is_inside else result


def _with_outputs(call: _CallOfIds, text: Text, targets: Sequence[str]) -> _CallOfIds:
    """The call, with targets, or what its output layer reads: the first that gives outputs of each token."""
    x = text.tokens.expand(_BATCH, -1)
    for way in (call, *(replace(call, targets=word) for word in targets)):
        with suppress(Exception), torch.no_grad(), seeded(0, x.device):  # labels may be of another kind
            if outputs_in(way(x), x.shape) is not None:
                return way
    return replace(call, is_inside=True)


def _drawing(module: nn.Module, tables: Sequence[nn.Embedding], n_ids: int) -> tuple[Callable[[int, int], Text], int]:
    """A function that draws texts of ordinary tokens, and the id of padding."""
    config = getattr(module, "config", None)
    pads = [getattr(config, "pad_token_id", None)]
    pads += [table.padding_idx for table in tables if table.num_embeddings == n_ids]
    special = {*pads, *(getattr(config, f"{of}_token_id", None) for of in ("bos", "eos", "mask"))}
    allowed = torch.tensor([i for i in range(n_ids) if i not in special] or list(range(n_ids)))
    device = next(module.parameters()).device

    def draw(seed: int, length: int) -> Text:
        generator = torch.Generator().manual_seed(seed)
        return Text(allowed[torch.randint(len(allowed), (length,), generator=generator)].to(device))

    return draw, next((i for i in pads if isinstance(i, int) and 0 <= i < n_ids), 0)


def _first_position(module: nn.Module) -> int:
    """The number of a text's first position, behind the row for padding if the table of positions has one."""
    tables = (part for name, part in module.named_modules() if name.endswith("position_embeddings"))
    rows = (getattr(table, "padding_idx", None) for table in tables)
    return next((row + 1 for row in rows if row is not None), 0)


def _padding_masks(
    roles: Mapping[str, str], *, of_tokens: bool, means: str | None
) -> Mapping[str, Callable[[Tensor], Mapping[str, Any]]]:
    """The ways to pass a mask of padding, the likeliest first."""
    names = [name for name, role in roles.items() if role == "padding" or name == "attention_mask"]
    names.sort(key=lambda name: (name != "attention_mask", name.startswith(("src", "memory"))))
    if of_tokens:
        names = [name for name in _OF_TOKENS if name in roles]
    masks: dict[str, Callable[[Tensor], Mapping[str, Any]]] = {}
    for name in names[:1]:
        is_number = name.endswith("attention_mask")
        for true_means in ("keep", "hide") if means is None else (means,):
            label = f"{name}, in which True {true_means}s" if means is None else name
            masks[label] = partial(_mask_of, name, is_number=is_number, keeps=true_means == "keep")
    return masks


def _mask_of(name: str, real: Tensor, *, is_number: bool, keeps: bool) -> Mapping[str, Tensor]:
    mask = real if keeps else ~real
    return {name: mask.long() if is_number else mask}


_CAUSAL_MASKS: Mapping[str, Callable[[int], Tensor]] = {
    "True hides": lambda n: ~torch.ones(n, n, dtype=torch.bool).tril(),
    "True keeps": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "−∞ hides": lambda n: torch.full((n, n), -torch.inf).triu(1),
}
"""The causal masks that a call which needs one is given: the last that hides the future, else the first that works."""


def _masked(call: _CallOfIds, names: Sequence[str], tables: Sequence[nn.Embedding]) -> tuple[_CallOfIds, str]:
    """The call with a causal mask for the first of some arguments, and what it is given in words."""
    how = ""
    for name in names[:1]:
        for means, make in _CAUSAL_MASKS.items():
            masked = replace(call, mask=name, make=make)
            if _hides_last(masked) or (not how and _ids_read(masked, tables)):
                call, how = masked, f", {name}=a causal mask [token, token]: {means}"
    return call, how


def _hides_last(call: _CallOfIds) -> bool:
    """Whether the outputs of a short text stay when its last token changes, which its mask hides."""
    ids = torch.zeros(2, _LEAST, dtype=torch.int64, device=next(call.module.parameters()).device)
    ids[1, -1] = 1
    try:
        with torch.no_grad(), seeded(0, ids.device):
            out = outputs_in(call(ids), ids.shape)
    except Exception:  # a mask of another form
        return False
    return out is not None and bool(out.isfinite().all()) and torch.allclose(out[0, :-1], out[1, :-1], atol=1e-5)


def _ids_read(call: _CallOfIds, tables: Sequence[nn.Embedding], length: int = _LEAST) -> int | None:
    """The number of rows of the table that reads the ids of a call; None if none does, or the call raises."""
    least = min(table.num_embeddings for table in tables)
    ids = torch.randint(least, (_BATCH, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(call.module.parameters()).device)
    found: list[int] = []

    def note(table: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].shape == ids.shape and bool((inputs[0] == ids).all()):
            found.append(table.num_embeddings)  # type: ignore[arg-type]

    handles = [table.register_forward_pre_hook(note) for table in tables]
    try:
        with torch.no_grad(), seeded(0, ids.device):
            call(ids)
    except Exception:  # the user's code may raise anything, and what it takes is not known
        return None
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


# -------------------------------------------------------------------------------------------------------------- vectors


def sequences_of_vectors(attention: UserAttention, length: int | None) -> Sequences | None:
    """An attention over vectors as a function of texts; None for a function of heads, and where no long text works."""
    if attention.is_function:
        return None

    def draw(seed: int, length: int) -> Text:
        vectors = torch.randn(length, attention.sizes.d_in, generator=torch.Generator().manual_seed(seed))
        return Text(vectors.to(attention.device, attention.dtype))

    def call(x: Tensor, *, training: bool = False, real: Tensor | None = None, form: Any = None) -> Tensor:
        return call_attention(attention, Inputs(x, real=real), padding=form, training=training).out

    def given(form: Any, real: Tensor) -> Mapping[str, Any]:
        return {"real": real, "form": form}

    masks = {
        f"{form.parameter} ({form.kind}), in which True {form.true_means}s": partial(given, form)
        for form in attention.padding_forms
    }
    return _at_longest(
        Sequences(
            name=attention.built.name,
            call=call,
            draw=draw,
            length=_LEAST,
            called=f"{attention.built.name}([{_BATCH}, {{}}, {attention.sizes.d_in}])",
            module=attention.built.module,
            masks=masks,
            hides_padding=all(call_role(form.parameter) == "padding" for form in attention.padding_forms),
            switches={},
        ),
        length,
    )


# ----------------------------------------------------------------------------------------------------------------- both


def _at_longest(sequences: Sequences, length: int | None) -> Sequences | None:
    """With the length of the longest text that works: the requested one, or half as long again and again."""
    tried = LENGTH if length is None else length
    while tried >= (_LEAST if length is None else 1):
        try:
            with torch.no_grad():
                sequences.run([sequences.draw(0, tried)] * _BATCH)
        except Exception:  # beyond the model's positions its code may raise anything
            if length is not None:
                raise
            tried //= 2
        else:
            return replace(sequences, length=tried, called=sequences.called.format(tried))
    return None


def outputs_in(result: Any, shape: Sequence[int]) -> Tensor | None:
    """The first floating tensor `[batch, token, …]` in what a call returned, the logits first."""
    if isinstance(result, Tensor):
        fits = result.is_floating_point() and result.ndim >= 2 and result.shape[:2] == tuple(shape[:2])
        return result if fits else None
    if isinstance(result, Mapping):
        parts = [result[name] for name in sorted(result, key=lambda name: name != "logits")]
    elif isinstance(result, tuple | list):
        parts = list(result)
    else:
        parts = [getattr(result, name, None) for name in ("logits", "last_hidden_state")]
    found = (outputs_in(part, shape) for part in parts if part is not None)
    return next((tensor for tensor in found if tensor is not None), None)


def cache_in(result: Any, name: str, out: Tensor | None) -> Any:
    """What a call returned for the next one to begin with: by the name of its argument, else what stands last beside the outputs
    and a loss, a single tensor only if there is nothing else."""
    if isinstance(result, tuple | list):
        is_scalar = [isinstance(part, Tensor) and part.ndim == 0 for part in result]
        others = [
            p for p, is_loss in zip(result, is_scalar, strict=True) if p is not None and p is not out and not is_loss
        ]
        return next((part for part in reversed(others) if not isinstance(part, Tensor)), others[-1] if others else None)
    named = result if isinstance(result, Mapping) else vars(result) if hasattr(result, "__dict__") else {}
    found = named.get(name)
    return found if found is not None else next((named[key] for key in named if call_role(key) == "cache"), None)


@contextmanager
def _last_inside(module: nn.Module, x: Tensor, *, watches: bool) -> Iterator[list[Tensor]]:
    """The outputs of the parts for each token, in the order in which they end, where they are watched."""
    found: list[Tensor] = []

    def note(_part: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 3 and outputs_in(output, x.shape) is not None:
            found[:] = [output]

    parts = [part for part in module.modules() if part is not module] if watches else []
    handles = [part.register_forward_hook(note) for part in parts]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _noting(module: nn.Module | None, x: Tensor, real: Tensor, note: tuple[int, Noted] | None) -> Iterator[None]:
    """Notes what the parts compute for the real tokens of one row."""
    if module is None or note is None:
        yield
        return
    row, found = note

    def of_row(tensors: Any) -> Tensor | None:
        tensor = outputs_in(tensors, x.shape)
        return None if tensor is None else tensor[row][real[row]].detach().clone()

    def hook(name: str, _part: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        count = sum(1 for key in found if key[0] == name)
        found[name, count] = (of_row((*inputs, *named.values())), of_row(output))

    named = list(module.named_modules())
    handles = [part.register_forward_hook(partial(hook, name), with_kwargs=True) for name, part in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Puts all parts in one mode, and each back in its own. Norms over the batch always are as in evaluation, for they would keep
    what they saw."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    for part, _ in modes:
        part.training = training and not isinstance(part, nn.modules.batchnorm._BatchNorm)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def with_zeros_drawn(module: nn.Module, seed: int) -> nn.Module:
    """The module, or a copy in which weights that are all zero, such as fresh output layers and gates, are small random numbers:
    what they hide would not be seen."""
    weights = ((name, weight) for name, weight in module.named_parameters() if not name.endswith("bias"))
    zero = [name for name, weight in weights if not bool(weight.any())]
    if not zero:
        return module
    drawn = copy.deepcopy(module)
    with torch.no_grad(), seeded(seed, torch.device("cpu")):
        for name in zero:
            drawn.get_parameter(name).normal_(std=0.02)
    return drawn
