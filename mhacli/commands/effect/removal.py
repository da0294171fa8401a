"""Removes heads and edges from an attention, in two ways. While a model computes it, z before the
output projection is replaced. The second method, which checks the first, changes the input of the
output projection or a mask that the model reads: it does not use the capture with which the effects
are computed, so an error there shows as a difference.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mhacli.attention import masks
from mhacli.attention.core import per_query_head
from mhacli.models.capture import Call, captured
from mhacli.models.layer_names import LayerKey, is_numbered
from mhacli.models.layers import as_attention
from mhacli.record.effect import Replacement


@dataclass(frozen=True, eq=False)
class Removal:
    """A removal in the attention `layer`, from the named `heads`, or from all for ().

    Without `keys`, whole heads are removed: their output becomes zero, or its mean over the text,
    at the positions `queries`, or at all for (). With `keys`, the weights of these heads from
    `queries` to `keys` are removed, and the rest of each row is scaled to keep its sum.
    """

    layer: LayerKey
    heads: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    replace: Replacement = "zero"


Placed = tuple[int, int, Removal]
"""The row of a removal, its sequence in a call, and the removal with the numbers that queries and
keys have in the call."""


def without(
    call: Call,
    rows: Mapping[int, Sequence[Removal]],
    *,
    start: int = 0,
    width: int = 0,
    of_text: Float[Tensor, "batch head query d_v"] | None = None,
    real: Bool[Tensor, "batch query"] | None = None,
) -> tuple[Tensor, set[int], set[int]]:
    """z after the removals from some rows in this layer, the rows that lose anything that was
    visible, and those with a query that has no key left, whose head output is zeros.

    A row is a sequence of the call; with a `width` it is as many tokens of a single sequence, in
    which rows stand one behind the other. The tokens of a row begin at position `start`: the keys
    before come from a cache. A mean is that of `of_text`, the outputs for a whole text, or else of
    the call itself, where `real` marks the positions that are not padding.
    """
    assert call.z is not None
    here = {
        row: [each for each in of_row if each.layer == (call.kind, call.layer)]
        for row, of_row in rows.items()
    }
    placed = _placed(call, here, start, width)
    z, edges, emptied = call.z.clone(), defaultdict[int, list[Placed]](list), set[int]()
    for each in placed:
        for query in each[2].queries if each[2].keys else ():
            edges[query].append(each)
    seen = {row for row, removals in here.items() if not all(removal.keys for removal in removals)}
    for query, some in edges.items():
        was_visible, is_empty = _cut_edges(z, call, query, some)
        seen.update(row for row, sequence, _ in some if was_visible[sequence].any())
        emptied.update(row for row, sequence, _ in some if is_empty[sequence].any())
    for row, sequence, removal in placed:  # after the edges, which bring no head back
        for head in () if removal.keys else removal.heads or range(z.shape[1]):
            of_head = call.z[sequence, head] if of_text is None else of_text[0, head]
            value = stand_in(of_head, removal.replace, None if real is None else real[row])
            z[sequence, head, [*removal.queries] or slice(None)] = value
    return z, seen, emptied


def _placed(
    call: Call, rows: Mapping[int, Sequence[Removal]], start: int, width: int
) -> list[Placed]:
    """The removals at positions of the call: nothing is measured after these."""
    n_queries, n_keys = call.shape[2:]
    # a cache with a window lacks earlier keys; one of fixed size has unfilled places for later ones
    first_key = 0 if call.kind == "cross" else max(0, start + n_queries - n_keys)
    running, placed = range(start, start + (width or n_queries)), list[Placed]()
    for row, removals in rows.items():
        shift = row * width
        for removal in removals:
            queries = tuple(query - start + shift for query in removal.queries if query in running)
            keys = tuple(key - first_key + (shift if key >= start else 0) for key in removal.keys)
            moved = replace(removal, queries=queries, keys=keys)
            if queries or not removal.queries:
                placed.append((row, 0 if width else row, moved))
    return placed


def stand_in(
    z: Float[Tensor, "query d_v"],
    replacement: Replacement,
    real: Bool[Tensor, " query"] | None = None,
) -> Float[Tensor, "1 d_v"]:
    """What replaces the output of a head at every position: zeros, or its mean over the positions
    that are `real`.
    """
    if replacement == "mean":
        return (z if real is None else z[real]).mean(dim=0, keepdim=True)
    return torch.zeros_like(z[:1])


def _cut_edges(z: Tensor, call: Call, query: int, edges: Sequence[Placed]) -> tuple[Tensor, Tensor]:
    """Removes edges of one query from the z of several sequences: its weights are computed again
    without the scores of their keys. Whether a removed weight was visible, and whether no key is
    left, of each sequence and head.
    """
    assert call.v is not None
    _, n_heads, _, n_keys = call.shape
    attention = as_attention(call.cropped(slice(query, query + 1), slice(None)))
    scores, sinks = attention.matrices()["scores"], attention.sink_logits
    is_cut = torch.zeros(scores.shape, dtype=torch.bool, device=z.device)
    for _, sequence, removal in edges:
        columns = [key for key in removal.keys if 0 <= key < n_keys]
        is_cut[sequence, :, 0][np.ix_(removal.heads or range(n_heads), columns)] = True
    was_visible = (is_cut & scores.isfinite()).any(
        dim=-1, keepdim=True
    )  # else z stays as it is, bit for bit
    left = scores.masked_fill(is_cut, -torch.inf)
    lse = left.logsumexp(dim=-1, keepdim=True)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks[..., None].to(lse.dtype))
    weights = (left - lse).exp().nan_to_num(nan=0.0)
    v = per_query_head(call.v.to(weights.dtype), n_heads)
    z[:, :, query] = (
        torch.where(was_visible, weights @ v, z[:, :, query, None]).squeeze(2).to(z.dtype)
    )
    return was_visible, was_visible & (weights.sum(dim=-1, keepdim=True) == 0)


# ----------------------------------------------------------------------------- the parts of a model

_MASKS = ("attention_mask", "mask", "allowed", "attn_mask")
"""The names of the mask parameter in attention modules. `allowed` is that of a layer of mha, a
predicate; `attn_mask` is that of torch's own attention, which is True for hidden cells."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module, without and with names."""
Edit = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]


@dataclass
class Parts:
    """The parts of a model.

    Of each attention: its module, its output projection, the outputs z of its heads, in `later`
    those of other calls for these heads, the visible cells if no mask shows them, and the number of
    `blocks` that finished `before` it. These are in the order in which they ran, with their outputs
    for one text; a model that runs a block twice has none before its attentions. `output` is that
    of the pass.
    """

    later: dict[tuple[LayerKey, int], Float[Tensor, "batch head query d_v"]] = field(
        default_factory=dict
    )
    modules: dict[LayerKey, nn.Module] = field(default_factory=dict)
    projections: dict[LayerKey, nn.Module] = field(default_factory=dict)
    z: dict[LayerKey, Float[Tensor, "batch head query d_v"]] = field(default_factory=dict)
    visible: dict[LayerKey, Bool[Tensor, "query key"]] = field(default_factory=dict)
    before: dict[LayerKey, int] = field(default_factory=dict)
    blocks: list[tuple[nn.Module, Any]] = field(default_factory=list)
    output: Any = None

    def z_of(self, call: Call) -> Tensor | None:
        """The outputs of the heads in the text, None if they were not captured."""
        key: LayerKey = (call.kind, call.layer)
        return self.later.get((key, call.part)) if call.part else self.z.get(key)

    @contextmanager
    def skipped(self, layers: set[LayerKey], n_rows: int) -> Iterator[None]:
        """A context in which the blocks before these layers do not run and return `n_rows` copies
        of their outputs.
        """
        n = min((self.before.get(layer, 0) for layer in layers), default=0)
        with ExitStack() as stack:
            for block, output in self.blocks[:n]:
                forward = lambda *_, output=output, **__: repeated(output, n_rows)  # noqa: E731
                stack.enter_context(patch.object(block, "forward", forward))
            yield


def joins(call: Call, heads: list[Call]) -> bool:
    """Whether a call computes the same heads as `heads`, the calls of its module before it, to
    which it is added then. It has the keys or the values of one of them in differential attention,
    and in attention by chunks of queries, not in groups of heads.
    """
    if call.part == 0:
        heads.clear()
    pairs = [pair for other in heads for pair in ((call.k, other.k), (call.v, other.v))]
    is_same = call.part == 0 or any(
        x is not None and y is not None and torch.equal(x, y) for x, y in pairs
    )
    heads += [call] * is_same
    return is_same


@contextmanager
def finding(model: nn.Module, parts: Parts) -> Iterator[None]:
    """A context in which a pass fills `parts`. Every z is replaced by itself. An output projection
    is the first module without parts whose input equals z bit for bit.
    """
    modules = dict(model.named_modules())
    numbered = [name for name in modules if is_numbered(name)]
    blocks = [
        name for name in numbered if not any(name.startswith(f"{other}.") for other in numbered)
    ]
    heads = list[Call]()

    def take(call: Call) -> Tensor | None:
        key = (call.kind, call.layer)
        parts.before.setdefault(key, len(parts.blocks))
        is_same = joins(call, heads)
        if call.part == 0 and call.z is not None:
            parts.modules[key], parts.z[key] = modules.get(call.name, model), call.z.clone()
            every = torch.ones(call.shape[2:], dtype=torch.bool, device=call.z.device)
            parts.visible[key] = every.tril() if call.causal else every
        elif is_same and call.z is not None and key in parts.z:
            parts.later[key, call.part] = call.z.clone()
        return None if call.z is None else call.z.clone()

    def find_projection(module: nn.Module, args: tuple[Any, ...]) -> None:
        key = next(reversed(parts.z), None)  # of the attention before
        if key is None or key in parts.projections or not (args and isinstance(args[0], Tensor)):
            return
        z = parts.z[key].transpose(1, 2)
        if args[0].numel() == z.numel() and torch.equal(args[0].reshape(z.shape), z):
            parts.projections[key] = module

    with ExitStack() as stack:
        for name, module in modules.items():
            if name in blocks:
                keep = module.register_forward_hook(
                    lambda block, _, output: parts.blocks.append((block, output))
                )
                stack.callback(keep.remove)
            if not any(module.children()):
                stack.callback(module.register_forward_pre_hook(find_projection).remove)
        stack.enter_context(captured(model, take, batch=1))
        yield
    if len({id(block) for block, _ in parts.blocks}) < len(parts.blocks):
        parts.before = dict.fromkeys(parts.before, 0)


def repeated(output: Any, n_rows: int) -> Any:
    """Tensors of one row, in tuples of any depth, repeated for several rows."""
    if isinstance(output, Tensor):
        is_of_row = output.ndim > 1 and output.shape[0] == 1
        return output.repeat(n_rows, *[1] * (output.ndim - 1)) if is_of_row else output
    if isinstance(output, (tuple, list)):
        return type(output)(repeated(part, n_rows) for part in output)
    return output


# -------------------------------------------------------------------------------- the second method


@contextmanager
def removed_otherwise(removals: Sequence[Removal], parts: Parts) -> Iterator[bool]:
    """A context in which the model runs with the removals; yields False if one of them has no
    second method.
    """
    with ExitStack() as stack:
        yield all([_remove(removal, parts, stack) for removal in removals])


def _remove(removal: Removal, parts: Parts, stack: ExitStack) -> bool:
    """Removes something until the stack is closed. False if there is no method for it."""
    layer, z = removal.layer, parts.z[removal.layer]
    module: Any = parts.modules[layer]
    if removal.keys:
        parameters = inspect.signature(module.forward).parameters
        name = next((name for name in _MASKS if name in parameters), None)
        if name is not None:
            _edit(stack, parts.modules, layer, partial(_masked, removal, parts, name))
        return name is not None
    if layer in parts.projections:

        def replaced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            """The input of the projection in which the part of the heads is replaced, at some
            positions or at all.
            """
            x = args[0].clone()
            by_head = x.unflatten(-1, (z.shape[1], z.shape[3]))
            for head in removal.heads:
                by_head[..., [*removal.queries] or slice(None), head, :] = stand_in(
                    z[0, head], removal.replace
                )
            return (x, *args[1:]), kwargs

        _edit(stack, parts.projections, layer, replaced)
        return True
    is_of_torch = isinstance(module, nn.MultiheadAttention)
    if not is_of_torch or removal.replace != "zero" or removal.queries:
        return False
    weight = (
        module.out_proj.weight.data
    )  # torch reads the weights of its projection without running it
    stack.callback(weight.copy_, weight.clone())
    weight.unflatten(1, (z.shape[1], -1))[:, removal.heads] = 0
    return True


def _edit(
    stack: ExitStack, modules: Mapping[LayerKey, nn.Module], layer: LayerKey, edited: Edit
) -> None:
    """Edits the arguments of a layer's module until the stack is closed. Layers may share it, and
    then it runs once for each.
    """
    sharing = [key for key, module in modules.items() if module is modules[layer]]
    runs = count()

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        return (
            edited(args, kwargs)
            if len(sharing) == 1 or next(runs) == sharing.index(layer)
            else None
        )

    stack.callback(modules[layer].register_forward_pre_hook(hook, with_kwargs=True).remove)


def _masked(
    removal: Removal, parts: Parts, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """The arguments of an attention module with a mask that forbids the edges."""
    z, hidden = parts.z[removal.layer], ~parts.visible[removal.layer]
    is_cut = torch.zeros(1, z.shape[1], *hidden.shape, dtype=torch.bool, device=z.device)
    is_cut[0][np.ix_(removal.heads or range(z.shape[1]), removal.queries, removal.keys)] = True
    given = inspect.signature(parts.modules[removal.layer].forward).bind(*args, **kwargs)
    mask = given.arguments.get(name)
    if name == "allowed":
        rest = masks.from_tensor(~is_cut)
        mask = rest if mask is None else masks.both(mask, rest)
    elif name == "attn_mask":
        fill = mask is None or mask.dtype == torch.bool or -torch.inf
        mask = is_cut[0] if mask is None else mask.masked_fill(is_cut[0], fill)
    else:
        if mask is None:
            mask = torch.zeros_like(hidden, dtype=z.dtype).masked_fill(
                hidden, torch.finfo(z.dtype).min
            )
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)).expand(
            1, z.shape[1], -1, -1
        )
        mask = mask.masked_fill(is_cut, _forbidding(mask, removal))
    given.arguments[name] = mask
    return given.args, given.kwargs


def _forbidding(mask: Tensor, removal: Removal) -> float | bool:
    """The value of a mask that forbids a cell. Most masks are added to scores; others are 1 for
    visible keys, or 1 for hidden ones. Which one is seen on the diagonal, where keys are visible;
    with keys of another text, 1 is assumed to mean visible.
    """
    if bool(((mask != 0) & (mask != 1)).any()):
        return torch.finfo(mask.dtype).min
    is_shown = removal.layer[0] == "cross" or bool(mask[0, 0, -1, -1])
    if mask.dtype == torch.bool:
        return not is_shown
    return 0.0 if is_shown and bool(mask.any()) else torch.finfo(mask.dtype).min
