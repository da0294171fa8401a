"""`mhacli.removed`: a model in memory runs without some heads and edges, in calls of a user."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.models.capture import Call, Edit
from mhacli.models.layer_names import LayerKey, is_pair
from mhacli.models.passes import ModelPass, followed, require_open
from mhacli.record.effect import HeadReplacement
from mhacli.settings import AttentionKind

from .parts import same_heads
from .removal import Removal, as_used, without
from .settings import given_head, kind_and_numbers, require_replacement

_REMOVED = "mhacli.removed"


@contextmanager
def removed(
    model: nn.Module,
    heads: Sequence[tuple[Any, ...]] = (),
    edges: Sequence[tuple[Any, ...]] = (),
    *,
    replace: HeadReplacement = "zero",
    threads: bool = True,
) -> Iterator[None]:
    """A context in which `model` runs without some heads and edges: `with removed(model, heads=[(5,
    1)]): model(**inputs)`.

    A head is `(layer, head)`: zeros replace its output before the output projection, at all
    positions of all sequences. With `replace` mean, its mean over the positions of each sequence,
    padding excluded, replaces it. An edge is `(layer, head, query, key)`: this attention weight is
    masked, and the rest of its row is renormalised; the head None means all heads. In an
    encoder-decoder, `(layer, head)` is a head of the decoder's self-attention, and `("cross", 2,
    1)` one of another kind. Positions count the columns of the batch, cached tokens included.
    Gradients flow through the remaining model.

    Removals of nested contexts of one model add up; if two remove the same head, the inner one
    decides its replacement. Leaving the context restores the model. Calls in other threads run
    without the heads and edges too. Raises `MhaError` if not everything could be removed: for a
    model that hides its parts (compiled, scripted, DataParallel) or is called in two threads at
    once, or in another thread without `threads`; for heads that do not exist, for a mean in a call
    without all positions, and on leaving a context in which the model was not called, never
    computed the named heads or edges, or still runs.
    """
    require_open(model, _REMOVED)
    require_replacement(replace)
    if not (heads or edges):
        raise UsageError(
            f"{_REMOVED} is given nothing to remove", hint="heads=[(5, 1)] is head 1 of layer 5"
        )
    if not heads and replace != "zero":
        raise UsageError(
            "replace applies to heads only: an edge is masked", hint="leave replace out"
        )
    usual: AttentionKind = "decoder" if is_pair(model) else "self"
    removals = [
        Removal((kind or usual, layer or 0), (head,), replace=replace)
        for kind, layer, head in map(given_head, heads)
    ]
    removals += [_edge(given, usual) for given in edges]
    removing = _Removing(model, removals)
    with followed(model, removing, by=_REMOVED, edits=True, threads=threads), ExitStack() as stack:
        _require_unshared(model)
        stack.callback(_OPEN.remove, removing)
        _OPEN.append(removing)
        yield
    removing.require_done()


def _edge(given: Any, usual: AttentionKind) -> Removal:
    """The removal of an edge that a user named, of the `usual` kind if without one; the head None
    means all heads. Raises `UsageError` with the form.
    """
    kind, numbers = kind_and_numbers(given)
    match numbers:
        case (int(layer), int() | None as head, int(query), int(key)) if (
            min(layer, query, key, head or 0) >= 0
        ):
            heads = () if head is None else (head,)
            return Removal((kind or usual, layer), heads, (query,), (key,))
    raise UsageError(
        f"edges: {given!r} is not (layer, head, query, key)",
        hint="(5, 1, 8, 2), or (5, None, 8, 2) of all heads",
    )


def _require_unshared(model: nn.Module) -> None:
    """Raises `MhaError` if another model with the same modules is open."""
    for other in (removing.model for removing in _OPEN):
        if other is not model and not set(model.modules()).isdisjoint(other.modules()):
            names = f"{type(model).__name__} and {type(other).__name__}"
            raise MhaError(
                f"{names} share modules, and {_REMOVED} is open for both",
                hint=f"give {_REMOVED} the same model each time",
                code="shared",
            )


class _Removing:
    """Removes heads and edges in the attentions of a model. Of several that are open for a model,
    the outermost removes what all are to remove.
    """

    def __init__(self, model: nn.Module, removals: Sequence[Removal]) -> None:
        self.model = model
        self._removals = removals
        self._pass: ModelPass | None = None
        self.refused: MhaError | None = None
        self._done: set[Removal] = set()
        self._layers: dict[LayerKey, dict[str, None]] = {}
        self._calls: list[Call] = []

    def require_done(self) -> None:
        """Raises `MhaError` if not everything was removed."""
        name = type(self.model).__name__
        if self._pass is None and self.refused is not None:
            raise self.refused
        if self._pass is None:
            raise MhaError(
                f"{name} was not called within {_REMOVED}, so nothing was removed",
                hint=(
                    "call this object inside the with block; copies and wrappers are different"
                    " objects"
                ),
                code="not-called",
            )
        for removal in self._removals:
            if removal not in self._done:
                known = ", ".join(f"{kind}.{n}" for kind, n in self._layers) or "none"
                place = f"layer {removal.layer[1]}"
                if removal.heads:
                    place = f"head {removal.heads[0]} of {place}"
                if removal.keys:
                    place = f"query {removal.queries[0]} and key {removal.keys[0]} of {place}"
                raise MhaError(
                    f"{place} did not occur in the calls of {name}: not all was removed",
                    hint=f"layers with attention: {known}",
                    code="not-removed",
                )

    def begin(self, began: ModelPass) -> None:
        """A pass begins."""
        self._pass = began

    def end(self, *, is_whole: bool) -> None:
        """A pass is over. Raises `MhaError` if several modules have the number of a removal."""
        for removal in self._removals:
            names = self._layers.get(removal.layer, {})
            if is_whole and len(names) > 1:
                raise MhaError(
                    f"layer {removal.layer[1]} has several attentions: {', '.join(names)}",
                    hint=f"give {_REMOVED} a module that holds one of them, and call it",
                    code="not-removed",
                )

    def stray(self, name: str) -> None:
        """Handles a part of the model that was called by itself, so that the positions of its
        tokens are unknown.
        """
        raise MhaError(
            f"{name} was called by itself within {_REMOVED}, outside of a call of the model",
            hint=f"give {_REMOVED} the module that is called",
            code="not-called",
        )

    def take(self, call: Call) -> Edit | None:
        """`z` after the removals in this attention. Raises `MhaError` for a head that does not
        exist, and if nothing can be removed.
        """
        together = [removing for removing in _OPEN if removing.model is self.model]
        if self._pass is None or together[0] is not self:
            return None
        for removing in together:
            removing._layers.setdefault(call.place, {}).setdefault(call.name)
        calls = same_heads(call, self._calls)
        if calls is None:
            return None
        self._calls = calls
        n_past = self._pass.n_past
        here: list[Removal] = []
        for removing in together:
            for removal in removing._removals:
                local = removal.within(call)
                if local is not None:
                    _require_removable(local, call)
                    if _is_within(removal, call, n_past):
                        here.append(removal)
        for removing in together:
            removing._done.update(here)
        if not here:
            return None
        real = None
        if any(removal.replace == "mean" for removal in here):
            real = self._real(call, self._pass)
        rows = dict.fromkeys(range(call.shape[0]), here)
        with torch.autocast(call.device.type, enabled=False):
            z = without(call, rows, start=n_past, real=real).z
        return Edit(z, call, partial(as_used, call, z, rows, start=n_past))

    def _real(self, call: Call, model_pass: ModelPass) -> Tensor | None:
        """The positions of each sequence that are not padding; None if all are. Raises `MhaError`
        if the call does not have all of them, or if it does not show which are padding.
        """
        if model_pass.n_past and call.kind != "encoder":
            raise MhaError(
                f"{call.name} runs behind tokens in a cache: a mean over all positions is not"
                " known",
                hint="call the model with the whole text",
                code="not-removed",
            )
        read = model_pass.halves.get("encoder" if call.kind == "encoder" else "decoder")
        may_have_padding = (
            hasattr(self.model, "config") if read is None else not bool(read.real.all())
        )
        if not may_have_padding:
            return None
        if read is None or tuple(read.real.shape) != (call.shape[0], call.shape[2]):
            raise MhaError(
                f"{call.name} reads no ids at its positions, and which of them are padding is not"
                " known",
                hint="call the model with input_ids, or without padding",
                code="not-removed",
            )
        return read.real.to(call.device)


def _require_removable(removal: Removal, call: Call) -> None:
    """Raises `MhaError` for a head that an attention does not have, and if nothing can be removed
    from it.
    """
    n_heads = call.shape[1]
    if not call.is_unclear and any(head >= n_heads for head in removal.heads):
        reason = out_of_range("head", removal.heads[0], n_heads)
        raise UsageError(f"layer {call.layer}: {reason}")
    if call.z is None:
        reason = "gives no head outputs that could be replaced"
    elif call.is_unclear:
        reason = "computes some texts, or some heads, at a time"
    elif "dropout" in call.unknown and removal.keys:
        reason = "drops weights by chance"
    elif call.is_changed and removal.keys:
        reason = "changes weights after the softmax"
    else:
        return
    raise MhaError(f"{call.name} {reason}: nothing can be removed", code="no-attention")


def _is_within(removal: Removal, call: Call, n_past: int) -> bool:
    """Whether a call has the query and the key of an edge; True for whole heads."""
    if not removal.keys:
        return True
    n_queries, n_keys = call.shape[2:]
    end = n_keys if call.kind == "cross" else max(n_keys, n_past + n_queries)
    return n_past <= removal.queries[0] < n_past + n_queries and removal.keys[0] < end


_OPEN: list[_Removing] = []
"""What removes now, the outermost first, in one thread: another one waits until all are closed."""
