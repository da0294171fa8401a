"""`mhacli.removed`: removes heads and single attention weights from a model in memory while its user runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mhacli.commands.effect.removal import Removal, Remover
from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.models.calls import Call
from mhacli.models.layer_names import LayerKey
from mhacli.models.passes import ModelPass, followed, noted, require_open
from mhacli.record.effect import REPLACEMENTS, Replacement
from mhacli.text.tokens import AttentionKind

_NAME = "mhacli.removed"
Place = tuple[AttentionKind | None, int, Any, int | None, int | None]
"""The kind and layer of a head, its number or None for all, and of an edge its query and key. Without a kind it is in the only
attention of the layer, or in the decoder's self-attention."""


@contextmanager
def removed(
    model: nn.Module,
    heads: Sequence[tuple[Any, ...]] = (),
    edges: Sequence[tuple[Any, ...]] = (),
    *,
    replace: Literal["zero", "mean"] = "zero",
) -> Iterator[None]:
    """A context in which `model` runs without some heads and edges: `with removed(model, heads=[(5, 1)]): model(**inputs)`.

    A head is `(layer, head)`: zeros replace its output before the output projection, at all positions of all sequences. With
    `replace` mean, its mean over the positions of each sequence, padding excluded, replaces it. An edge is
    `(layer, head, query, key)`: this attention weight is masked, and the rest of its row is renormalised; the head None means
    all heads. In an encoder-decoder, `(layer, head)` is a head of the decoder's self-attention, and `("cross", 2, 1)` one of
    another kind. Positions count the columns of the batch, cached tokens included. Gradients flow through the remaining model.

    Removals of nested contexts of one model add up; if two remove the same head, the inner one decides its replacement. Leaving
    the context restores the model. Raises `MhaError` if not everything could be removed: for a model that hides its parts
    (compiled, scripted, DataParallel) or is called in another thread, for heads that do not exist, for a mean in a call without
    all positions, and on leaving a context in which the model was not called or never computed the named heads or edges.
    """
    require_open(model, _NAME)
    request = _Request((*map(place_of, heads), *(place_of(edge, is_edge=True) for edge in edges)), replace)
    if not request.places:
        raise noted(UsageError(f"{_NAME} is given nothing to remove", hint="heads=[(5, 1)] is head 1 of layer 5"))
    if replace not in REPLACEMENTS:
        raise noted(UsageError(f"replace {replace!r} is not known", hint=", ".join(REPLACEMENTS)))
    if not heads and replace != "zero":
        raise noted(UsageError("replace applies to heads only: an edge is masked", hint="leave replace out"))
    shared = _shared(model)
    shared.requests.append(request)
    try:
        yield
    finally:
        shared.requests.remove(request)
        if not shared.requests:
            del _OPEN[id(model), threading.get_ident()]
            shared.opened.close()
    request.require_done(type(model).__name__, shared.layers)


def place_of(given: Any, *, is_edge: bool = False) -> Place:
    """The head or the edge that a user named. Raises `UsageError` with the form."""
    values: tuple[Any, ...] = tuple(given) if isinstance(given, (tuple, list)) else ()
    kind, numbers = (values[0], values[1:]) if values and values[0] in get_args(AttentionKind) else (None, values)
    are_right = [(type(n) is int and n >= 0) or (n is None and is_edge and i == 1) for i, n in enumerate(numbers)]
    if not all(are_right) or len(numbers) != (4 if is_edge else 2):
        forms = ("(layer, head, query, key)", "(5, 1, 8, 2), or (5, None, 8, 2) of all heads")
        form, example = forms if is_edge else ("(layer, head)", '(5, 1), or ("cross", 5, 1)')
        raise noted(UsageError(f"{'edges' if is_edge else 'heads'}: {given!r} is not {form}", hint=example))
    layer, head, query, key = numbers if is_edge else (*numbers, None, None)
    return kind, layer, head, query, key


@dataclass(eq=False)
class _Request:
    """The removals that one context requests, and those that took place."""

    places: tuple[Place, ...]
    replace: Replacement
    n_passes: int = 0
    done: set[Place] = field(default_factory=set)

    def require_done(self, name: str, layers: Sequence[LayerKey]) -> None:
        """Raises `MhaError` for heads and edges that were not removed."""
        if not self.n_passes:
            hint = "call this object inside the with block; copies and wrappers are different objects"
            raise _refused(f"{name} was not called within {_NAME}, so nothing was removed", hint, "not-called")
        for place in self.places:
            if place not in self.done:
                kind, layer, _, query, key = place
                known = ", ".join(f"{own}.{n}" if kind else str(n) for own, n in layers)
                what = f"layer {layer}" if key is None else f"query {query} and key {key} of layer {layer}"
                raise _refused(
                    f"{what} did not occur in the calls of {name}: not all was removed",
                    f"layers with attention: {known}" if known else None,
                )


_OPEN: dict[tuple[int, int], _Removing] = {}
"""The current removals, by the ids of model and thread."""


def _shared(model: nn.Module) -> _Removing:
    """The removals from a model in this thread, shared by all contexts that are open at the same time, whichever ends first.
    Raises `MhaError` if another model with modules of this one is open in this thread."""
    place, modules = (id(model), threading.get_ident()), set(model.modules())
    if place not in _OPEN:
        for (_, thread), other in _OPEN.items():
            if thread == place[1] and modules & set(other.model.modules()):
                names = f"{type(model).__name__} and {type(other.model).__name__}"
                hint = f"give {_NAME} the same model each time"
                raise _refused(f"{names} share modules, and {_NAME} is open for both", hint, "shared")
        removing = _Removing(model)
        removing.opened.enter_context(followed(model, removing, by=_NAME, edits=True))
        _OPEN[place] = removing
    return _OPEN[place]


class _Removing:
    """Removes, in the attentions of a model, the heads and edges of all open contexts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.opened, self.requests, self.layers = ExitStack(), list[_Request](), list[LayerKey]()
        self._pass = ModelPass(1)

    def begin(self, began: ModelPass) -> None:
        """A pass begins."""
        self._pass = began
        for request in self.requests:
            request.n_passes += 1

    def end(self, *, is_whole: bool) -> None:
        """A pass is over."""

    def stray(self, name: str) -> None:
        """Handles a part of the model that was called by itself, so that the positions of its tokens are unknown."""
        message = f"{name} was called by itself within {_NAME}, outside of a call of the model"
        raise _refused(message, f"give {_NAME} the module that is called", "not-called")

    def take(self, call: Call) -> Tensor | None:
        """`z` after the removals in this attention."""
        if call.part != 0:
            return None
        key: LayerKey = (call.kind, call.layer)
        self.layers += [] if key in self.layers else [key]
        heads, rows = dict[int, Replacement](), dict[tuple[int, int], set[int]]()
        for request in self.requests:
            for place in request.places:
                kind, layer, head, query, of_key = place
                if layer != call.layer or call.kind not in ((kind,) if kind else ("self", "decoder")):
                    continue
                self._require_possible(place, call)
                named = range(call.shape[1]) if head is None else (head,)
                if query is None or of_key is None:
                    heads |= dict.fromkeys(named, request.replace)
                elif self._runs(query, of_key, call):
                    for each in named:
                        rows.setdefault((each, query), set()).add(of_key)
                else:
                    continue
                request.done.add(place)
        removals = [Removal(key, (h,), (q,), tuple(sorted(keys)), "renormalise") for (h, q), keys in rows.items()]
        removals += [Removal(key, (head,), replace=replace) for head, replace in heads.items()]
        real = self._real(call) if "mean" in heads.values() else None
        with torch.autocast(call.device.type, enabled=False):
            return Remover([removals] * call.shape[0], {}, start=self._pass.n_past, real=real)(call)

    def _real(self, call: Call) -> Tensor | None:
        """The positions of each sequence that are not padding; None if all are. Raises `MhaError` if the call does not have all
        of them, or if it does not show which are padding."""
        read = self._pass.halves.get("encoder" if call.kind == "encoder" else "decoder")
        if self._pass.n_past and call.kind != "encoder":
            raise _refused(
                f"{call.name} runs behind {self._pass.n_past} tokens in a cache: a mean over all positions is not known",
                "call the model with the whole text",
            )
        if read is None and hasattr(self.model, "config"):
            raise _refused(
                f"{call.name} reads no ids, and which positions are padding is not known",
                "call the model with input_ids",
            )
        if read is None or not read.has_padding:
            return None
        real = torch.tensor(read.real, device=call.device)
        if real.shape != (call.shape[0], call.shape[2]):
            raise _refused(
                f"{call.name} has other positions than input_ids, and which are padding is not known",
                "leave padding out",
            )
        return real

    def _runs(self, query: int, key: int, call: Call) -> bool:
        """Whether this call computes an edge: it has the query, and its keys reach the key."""
        first, n_queries, n_keys = self._pass.n_past, *call.shape[2:]
        last_key = n_keys if call.kind == "cross" else max(n_keys, first + n_queries)
        return first <= query < first + n_queries and key < last_key

    def _require_possible(self, place: Place, call: Call) -> None:
        _, layer, head, _, key = place
        if head is not None and head >= call.shape[1]:
            raise noted(UsageError(f"layer {layer}: " + out_of_range("head", head, call.shape[1])))
        is_dropped = key is not None and any("dropout" in word for word in call.unknown)
        if call.z is None or is_dropped:
            why = "drops weights by chance" if is_dropped else "gives no head outputs that could be replaced"
            hint = "model.eval() turns dropout off" if is_dropped else None
            raise _refused(f"{call.name} {why}: nothing can be removed", hint, "no-attention")


def _refused(message: str, hint: str | None, code: str = "not-removed") -> MhaError:
    return noted(MhaError(message, hint=hint, code=code))
