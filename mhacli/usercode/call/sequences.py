"""A module that takes token ids, or an attention over vectors, as a function of sequences: how it is called, and which of what it
returns are the outputs of tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.usercode.call.signature import MASKS, call_role
from mhacli.usercode.call.user_attention import UserAttention, call_attention
from mhacli.usercode.inputs import seeded
from mhacli.usercode.types import Inputs

LENGTH = 256
"""The length of the texts, if the model has so many positions."""
_BATCH, _LEAST = 2, 4
_DECODER = ("decoder_input_ids", "tgt", "trg", "target_ids", "tgt_ids", "tgt_seq", "trg_seq")
_TARGETS = ("targets", "target", "labels")


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """A callable as a function of sequences.

    `run(x, training=…, **keywords)` gives the outputs `[batch, token, width]` for ids `[batch, token]` or vectors `[batch, token,
    width]`; `draw(seed, batch, length)` makes them. `length` is the longest that is tried, `accepts` are the names of what a call
    takes besides, `n_ids` is the number of ids, 0 for vectors.
    """

    name: str
    run: Callable[..., Tensor]
    draw: Callable[[int, int, int], Tensor]
    length: int
    called: str
    module: nn.Module | None = None
    accepts: frozenset[str] = frozenset()
    n_ids: int = 0
    is_decoder: bool = False


@dataclass(frozen=True)
class _CallOfIds:
    """A call of a module that takes ids: by itself, or as the tokens of a `decoder` behind a source of other ids. `mask` is the
    argument that is given a causal mask, made by `make`."""

    module: nn.Module
    fixed: Mapping[str, Any]
    source: str
    decoder: str | None
    mask: str | None = None
    make: Callable[[int], Tensor] = torch.zeros

    def __call__(self, x: Tensor, **keywords: Any) -> Any:
        given = {**self.fixed, **keywords}
        if self.mask is not None:
            given[self.mask] = self.make(x.shape[1]).to(x.device)
        if self.decoder is None:
            return self.module(x, **given)
        source = x.new_tensor([1, 0, 1]).expand(len(x), -1)
        return self.module(**{self.source: source, self.decoder: x}, **given)


def sequences_of_ids(
    name: str, module: nn.Module, *, fixed: Mapping[str, Any], length: int | None, seed: int
) -> Sequences | None:
    """A module that takes token ids as a function of sequences, of an encoder with a decoder the decoder's; None if it has no
    embedding that reads them, or needs more than a mask."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    parameters = inspect.signature(module.forward).parameters
    if not tables or not parameters:
        return None
    accepts, first = frozenset(parameters), next(iter(parameters))
    decoder = next((word for word in _DECODER if word in accepts and word != first), None)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    needed = [parameter for parameter in needed if parameter not in (*fixed, decoder)]
    if len(needed) > 1 or any(call_role(parameter) not in MASKS for parameter in needed):
        return None
    masks = needed or [word for word in ("tgt_mask", "trg_mask") if decoder and word in accepts]
    call, how = _masked(_CallOfIds(module, fixed, first, decoder), masks[0] if masks else None, tables, seed)
    n_ids = _ids_read(call, tables, seed)
    if n_ids is None:
        return None
    special: set[int | None] = {
        part.padding_idx for part in tables if part.padding_idx is not None and part.num_embeddings == n_ids
    }
    config = getattr(module, "config", None)
    special |= {getattr(config, f"{of}_token_id", None) for of in ("pad", "bos", "eos", "mask")}
    allowed = torch.tensor([i for i in range(n_ids) if i not in special] or list(range(n_ids)))
    targets = next((word for word in _TARGETS if word in accepts and word not in fixed), None)
    device = next(module.parameters()).device

    def draw(seed: int, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return allowed[torch.randint(len(allowed), (batch, length), generator=generator)].to(device)

    def run(x: Tensor, *, training: bool = False, **keywords: Any) -> Tensor:
        with _watched(module) as last, in_mode(module, training=training):
            found = outputs_in(call(x, **keywords), x.shape)
            if found is None and targets is not None:
                with suppress(Exception):  # labels may be of another kind
                    found = outputs_in(call(x, **{targets: x}, **keywords), x.shape)
        found = last.get(tuple(x.shape)) if found is None else found
        if found is None:
            raise ValueError(f"no output has the shape [batch, token, …] of the ids, {list(x.shape)}")
        return found.detach().flatten(2) if found.ndim > 2 else found.detach()[..., None]

    longest = _longest(run, draw, length)
    if longest is None:
        return None
    whose = "ids" if decoder is None else f"{decoder}="
    return Sequences(
        name=name,
        run=run,
        draw=draw,
        length=longest,
        called=f"{name.rpartition(':')[2]}({whose} [{_BATCH}, {longest}]{how})",
        module=module,
        accepts=accepts if decoder is None else frozenset(),
        n_ids=n_ids,
        is_decoder=decoder is not None,
    )


def sequences_of_vectors(attention: UserAttention, length: int | None) -> Sequences | None:
    """An attention over vectors as a function of sequences; None for a function of heads, and where no long text works."""
    if attention.is_function:
        return None

    def draw(seed: int, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.randn(batch, length, attention.sizes.d_in, generator=generator)
        return vectors.to(attention.device, attention.dtype)

    def run(x: Tensor, *, training: bool = False) -> Tensor:
        return call_attention(attention, Inputs(x), training=training).out.flatten(2)

    longest = _longest(run, draw, length)
    if longest is None:
        return None
    called = f"{attention.built.name}([{_BATCH}, {longest}, {attention.sizes.d_in}])"
    return Sequences(
        name=attention.built.name, run=run, draw=draw, length=longest, called=called, module=attention.built.module
    )


_CAUSAL_MASKS: Mapping[str, Callable[[int], Tensor]] = {
    "True hides": lambda n: ~torch.ones(n, n, dtype=torch.bool).tril(),
    "True keeps": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "−∞ hides": lambda n: torch.full((n, n), -torch.inf).triu(1),
}
"""The causal masks that a call which needs one is given: the last that hides the future, else the first that works."""


def _masked(call: _CallOfIds, mask: str | None, tables: Sequence[nn.Embedding], seed: int) -> tuple[_CallOfIds, str]:
    """The call with a causal mask for an argument, and what it is given in words."""
    how = ""
    for means, make in _CAUSAL_MASKS.items() if mask is not None else ():
        masked = replace(call, mask=mask, make=make)
        if _hides_last(masked) or (not how and _ids_read(masked, tables, seed)):
            call, how = masked, f", {mask}=a causal mask [token, token]: {means}"
    return call, how


def _hides_last(call: _CallOfIds) -> bool:
    """Whether the outputs of a short text stay when its last token changes, which its mask hides."""
    ids = torch.zeros(2, _LEAST, dtype=torch.int64, device=next(call.module.parameters()).device)
    ids[1, -1] = 1
    try:
        with torch.no_grad(), seeded(0, ids.device), in_mode(call.module, training=False):
            out = outputs_in(call(ids), ids.shape)
    except Exception:  # a mask of another form
        return False
    return out is not None and bool(out.isfinite().all()) and torch.allclose(out[0, :-1], out[1, :-1], atol=1e-5)


def _ids_read(call: _CallOfIds, tables: Sequence[nn.Embedding], seed: int) -> int | None:
    """The number of rows of the table that reads the ids of a call; None if none does, or the call raises."""
    least = min(table.num_embeddings for table in tables)
    ids = torch.randint(least, (_BATCH, _LEAST), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(next(call.module.parameters()).device)
    found: list[int] = []

    def note(table: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].shape == ids.shape and bool((inputs[0] == ids).all()):
            found.append(table.num_embeddings)  # type: ignore[arg-type]

    handles = [table.register_forward_pre_hook(note) for table in tables]
    try:
        with torch.no_grad(), seeded(seed, ids.device):
            call(ids)
    except Exception:  # the user's code may raise anything, and what it takes is not known
        return None
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _longest(run: Callable[..., Tensor], draw: Callable[[int, int, int], Tensor], length: int | None) -> int | None:
    """The longest text that works: the requested one, or half as long again and again."""
    tried = LENGTH if length is None else length
    while tried >= _LEAST:
        try:
            with torch.no_grad():
                run(draw(0, _BATCH, tried))
        except Exception:  # beyond the model's positions its code may raise anything
            if length is not None:
                raise
            tried //= 2
        else:
            return tried
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


@contextmanager
def _watched(module: nn.Module) -> Iterator[dict[tuple[int, ...], Tensor]]:
    """The last output of a part, by batch and length: what the output layer reads where a call returns less."""
    last: dict[tuple[int, ...], Tensor] = {}

    def note(_part: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 3 and output.is_floating_point():
            last[tuple(output.shape[:2])] = output

    handles = [part.register_forward_hook(note) for part in module.modules() if part is not module]
    try:
        yield last
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Puts all parts in one mode, and each back in its own."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
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
