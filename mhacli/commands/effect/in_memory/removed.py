"""`mhacli.removed`: removes heads and single attention weights from a model in memory while its user runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast, get_args

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
    request = _Request(tuple(map(head_place, heads)), tuple(map(_edge, edges)), replace)
    request.require_possible()
    with _opened(model) as shared:
        shared.requests.append(request)
        try:
            yield
        finally:
            shared.requests.remove(request)
    request.require_done(type(model).__name__, shared.layers)


class _Place(NamedTuple):
    """A head, or an edge of it; with `head` None, all heads."""

    kind: AttentionKind | None
    layer: int
    head: int | None
    query: int | None = None
    key: int | None = None

    def is_in(self, call: Call) -> bool:
        """Whether it is part of an attention. Without a kind, this is the only attention of the layer, or the decoder's
        self-attention."""
        return self.layer == call.layer and call.kind in ((self.kind,) if self.kind else ("self", "decoder"))


@dataclass(eq=False)
class _Request:
    """The removals that one context requests, and those that took place."""

    heads: tuple[_Place, ...]
    edges: tuple[_Place, ...]
    replace: Replacement
    n_passes: int = 0
    done: set[_Place] = field(default_factory=set)

    def require_possible(self) -> None:
        """Raises `UsageError` for removals that are empty or contradictory."""
        if not self.heads + self.edges:
            raise noted(UsageError(f"{_NAME} is given nothing to remove", hint="heads=[(5, 1)] is head 1 of layer 5"))
        if self.replace not in REPLACEMENTS:
            raise noted(UsageError(f"replace {self.replace!r} is not known", hint=", ".join(REPLACEMENTS)))
        if not self.heads and self.replace != "zero":
            raise noted(UsageError("replace applies to heads only: an edge is masked", hint="leave replace out"))

    def require_done(self, name: str, layers: Sequence[LayerKey]) -> None:
        """Raises `MhaError` for heads and edges that were not removed."""
        if not self.n_passes:
            raise noted(
                MhaError(
                    f"{name} was not called within {_NAME}, so nothing was removed",
                    hint="call this object inside the with block; copies and wrappers are different objects",
                    code="not-called",
                )
            )
        left = next((place for place in (*self.heads, *self.edges) if place not in self.done), None)
        if left is not None:
            known = ", ".join(f"{kind}.{n}" if left.kind else str(n) for kind, n in layers)
            what = (
                f"layer {left.layer}"
                if left.key is None
                else f"query {left.query} and key {left.key} of layer {left.layer}"
            )
            hint = f"layers with attention: {known}" if known else None
            raise noted(
                MhaError(
                    f"{what} did not occur in the calls of {name}: not all was removed", hint=hint, code="not-removed"
                )
            )


_OPEN: dict[tuple[int, int], _Removing] = {}
"""The current removals, by the ids of model and thread."""


@contextmanager
def _opened(model: nn.Module) -> Iterator[_Removing]:
    """The removals from a model in this thread, shared by all contexts that are open at the same time, whichever ends first."""
    place = id(model), threading.get_ident()
    removing = _OPEN.get(place)
    if removing is None:
        _require_alone(model, place[1])
        removing = _Removing(model)
        removing.opened.enter_context(followed(model, removing, by=_NAME, edits=True))
        _OPEN[place] = removing
    removing.n_contexts += 1
    try:
        yield removing
    finally:
        removing.n_contexts -= 1
        if not removing.n_contexts:
            del _OPEN[place]
            removing.opened.close()


def _require_alone(model: nn.Module, own_thread: int) -> None:
    """Raises `MhaError` if another model with modules of this one is open in this thread."""
    modules = set(model.modules())
    for (_, thread), other in _OPEN.items():
        if thread == own_thread and modules & set(other.model.modules()):
            raise noted(
                MhaError(
                    f"{type(model).__name__} and {type(other.model).__name__} share modules, and {_NAME} is open for both",
                    hint=f"give {_NAME} the same model each time",
                    code="shared",
                )
            )


class _Removing:
    """Removes, in the attentions of a model, the heads and edges of all open contexts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.opened, self.n_contexts = ExitStack(), 0
        self.requests: list[_Request] = []
        self.layers: list[LayerKey] = []
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
        raise noted(
            MhaError(
                f"{name} was called by itself within {_NAME}, outside of a call of the model",
                hint=f"give {_NAME} the module that is called",
                code="not-called",
            )
        )

    def take(self, call: Call) -> Tensor | None:
        """`z` after the removals in this attention."""
        if call.part != 0:
            return None
        key: LayerKey = (call.kind, call.layer)
        self.layers += [] if key in self.layers else [key]
        heads, rows = dict[int, _Request](), dict[tuple[int, int], set[int]]()
        for request in self.requests:
            here = [place for place in (*request.heads, *request.edges) if place.is_in(call)]
            for place in here:
                self._require_possible(place, call)
                if place.query is None or place.key is None:
                    heads |= dict.fromkeys(self._heads(place, call), request)
                    request.done.add(place)
                elif self._runs(place.query, place.key, call):
                    request.done.add(place)
                    for head in self._heads(place, call):
                        rows.setdefault((head, place.query), set()).add(place.key)
        if not (heads or rows) or call.z is None:
            return None
        edges = [
            Removal(key, (head,), (query,), tuple(sorted(of)), "renormalise") for (head, query), of in rows.items()
        ]
        with torch.autocast(call.device.type, enabled=False):
            z = Remover([edges] * call.shape[0], {}, start=self._pass.n_past)(call) if edges else None
            z = call.z.clone() if z is None else z
            for head, request in heads.items():  # last: an edge of a whole head is gone with it
                of_head = call.z[:, head]
                z[:, head] = self._mean(call, of_head).to(z.dtype) if request.replace == "mean" else 0.0
        return z

    def _mean(self, call: Call, z: Tensor) -> Tensor:
        """The mean over the positions of each sequence. Raises `MhaError` if the call does not have all of them, or if it does
        not show which are padding."""
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
            return z.mean(dim=1, keepdim=True)
        real = torch.tensor(read.real, dtype=z.dtype, device=z.device)[..., None]
        if real.shape[:2] != z.shape[:2]:
            raise _refused(
                f"{call.name} has other positions than input_ids, and which are padding is not known",
                "leave padding out",
            )
        return (z * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)

    def _heads(self, place: _Place, call: Call) -> set[int]:
        return set(range(call.shape[1])) if place.head is None else {place.head}

    def _runs(self, query: int, key: int, call: Call) -> bool:
        """Whether this call computes an edge: it has the query, and its keys reach the key."""
        first, n_queries, n_keys = self._pass.n_past, *call.shape[2:]
        last_key = n_keys if call.kind == "cross" else max(n_keys, first + n_queries)
        return first <= query < first + n_queries and key < last_key

    def _require_possible(self, place: _Place, call: Call) -> None:
        if place.head is not None and place.head >= call.shape[1]:
            raise noted(UsageError(f"layer {place.layer}: " + out_of_range("head", place.head, call.shape[1])))
        is_dropped = place.key is not None and any("dropout" in word for word in call.unknown)
        if call.z is None or is_dropped:
            why = "drops weights by chance" if is_dropped else "gives no head outputs that could be replaced"
            hint = "model.eval() turns dropout off" if is_dropped else None
            raise noted(MhaError(f"{call.name} {why}: nothing can be removed", hint=hint, code="no-attention"))


def _refused(message: str, hint: str) -> MhaError:
    return noted(MhaError(message, hint=hint, code="not-removed"))


# ---------------------------------------------------------------------------------------------------- what is asked for


def head_place(given: Any) -> _Place:
    """The head that a user named. Raises `UsageError` with the form."""
    kind, numbers = _kind(given)
    if len(numbers) != 2 or not all(map(_is_index, numbers)):
        raise noted(UsageError(f"heads: {given!r} is not (layer, head)", hint='(5, 1), or ("cross", 5, 1)'))
    return _Place(kind, *numbers)


def _edge(given: tuple[Any, ...]) -> _Place:
    kind, numbers = _kind(given)
    is_right = len(numbers) == 4 and all(_is_index(n) or (n is None and i == 1) for i, n in enumerate(numbers))
    if not is_right:
        raise noted(
            UsageError(
                f"edges: {given!r} is not (layer, head, query, key)",
                hint="(5, 1, 8, 2), or (5, None, 8, 2) of all heads",
            )
        )
    return _Place(kind, *numbers)


def _kind(given: Any) -> tuple[AttentionKind | None, tuple[Any, ...]]:
    if not isinstance(given, (tuple, list)):
        return None, ()
    if given and given[0] in get_args(AttentionKind):
        return cast("AttentionKind", given[0]), tuple(given[1:])
    return None, tuple(given)


def _is_index(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
