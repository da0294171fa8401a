"""The places of a model in the order of execution: its embedding, the parts of each block, its
final norm and its logits.

A pass shows which modules run within which, where attentions are computed, and what all of them
give. What a module is for follows from the order in which it runs; names are read only for the
roles of projections.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, assert_never

import torch
from msgspec.structs import replace as changed
from torch import Tensor, nn

from mhacli.models.capture import Call, captured
from mhacli.models.layer_names import LayerNumbers, is_numbered
from mhacli.models.run import first_tensor
from mhacli.usercode.projections import is_norm, read_name

from .result import MAPPED, Layer, Located, Part, Stack

Forward = Callable[[], Any]
"""Calls a model; the same inputs each time."""


OF_CALLS = ("q", "k", "v", "q_norm", "k_norm", "q_rotated", "k_rotated", "scores", "pattern", "z")
"""The sites of an attention that are not the output of a module."""
_NORM = re.compile(r"norm|rms|^ln|ln$|^n\d*$", re.IGNORECASE)
_ELEMENT = re.compile(r"(?<![^.])\d+(?=\.)")
"""The number of an element of a list around a module."""
_OUTSIDE = Layer(None, None)
_N_QUARTERS = 4
"""The parts of CodeGen's fused projection. Source: transformers' `modeling_codegen.py`,
`mp_num`."""


class ModelPlace(Located, frozen=True):
    """Where a model computes something, by the module `name`; `number` counts the earlier places of
    the same kind.
    """

    name: str
    number: int = 0

    @classmethod
    def of(cls, layer: Layer, part: Part, site: str, name: str) -> ModelPlace:
        """The first place of its kind."""
        return cls(layer.number, layer.stack, part, site, name)

    @classmethod
    def mapped(cls, name: str) -> ModelPlace:
        """That of a module of which no more is known than the name by which it was asked for."""
        return cls.of(_OUTSIDE, "mlp", f"{MAPPED}{name}", name)

    @property
    def key(self) -> ModelPlace:
        """What it has in common with the place of another model: all but the name of a module."""
        return changed(self, name="")

    @property
    def is_mapped(self) -> bool:
        """Whether it is that of a module which was asked for by its name."""
        return self.site.startswith(MAPPED)


class Event(NamedTuple):
    """Something that is computed in a pass: what a module reads or gives, by its `name` and how
    often it ran before; or a `site` of an attention, by its number and the module of the site.
    """

    kind: Literal["in", "out", "call"]
    name: str
    number: int
    site: str = ""


Receive = Callable[[Event, Tensor | Call], None]
"""Receives what is computed: a tensor, or the attention for its scores."""


@dataclass(eq=False)
class _Span:
    """A run of a module; its number is −1 for an element of a list that is never called itself,
    such as a list of two. `items` are what ran within it, in order: modules, and the numbers of
    captured attentions. `units` are the outputs of modules within it that no attention has used,
    until it ends.
    """

    name: str
    run: int
    module: nn.Module
    items: list[_Span | int] = field(default_factory=list)
    units: dict[_Span, Tensor] = field(default_factory=dict)

    def within(self) -> Iterator[_Span | int]:
        """Everything that ran within it."""
        for item in self.items:
            yield item
            if isinstance(item, _Span):
                yield from item.within()

    @property
    def inner(self) -> list[_Span]:
        """The modules that ran within it."""
        return [item for item in self.within() if isinstance(item, _Span)]

    @property
    def calls(self) -> list[int]:
        """The attentions within it."""
        return [item for item in self.within() if isinstance(item, int)]

    @property
    def is_norm(self) -> bool:
        """Whether it normalises, and does nothing else."""
        if self.calls or any(parameter.ndim > 1 for parameter in self.module.parameters()):
            return False
        words = (self.name.rpartition(".")[2], type(self.module).__name__)
        return is_norm(self.module) or (self.has_weights and any(map(_NORM.search, words)))

    @property
    def has_weights(self) -> bool:
        """Whether its module has weights."""
        return bool([*self.module.parameters()])


# ------------------------------------------------------------------------------------------- a pass


@torch.no_grad()
def observe(model: nn.Module, forward: Forward, receive: Receive) -> Pass:
    """Runs a model in evaluation, and gives what it computes to `receive`, in the order of
    execution: what modules give and elements of lists read, and attentions.
    """
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    running = [_Span("", 0, nn.Module())]
    n_runs = Counter[str]()
    calls = list[Call]()

    def begin(name: str, run: int, tensor: Tensor | None) -> None:
        """Begins a run within the one that is running; elements of lists tell what they read."""
        running.append(_Span(name, run, modules[name]))
        running[-2].items.append(running[-1])
        if is_numbered(name) and tensor is not None:
            receive(Event("in", name, run), tensor)

    def end() -> None:
        """Ends the last run, whose units no attention behind it can use."""
        running.pop().units.clear()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a module: begins its run, and before that those of elements of lists around it,
        which are never called themselves; others of these end.
        """
        name = names[id(module)]
        tensor = first_tensor((args, kwargs))
        while running[-1].run < 0 and not name.startswith(f"{running[-1].name}."):
            end()
        n_around = len(running[-1].name)
        for number in _ELEMENT.finditer(name):
            if number.end() > n_around:
                begin(name[: number.end()], -1, tensor)
        begin(name, n_runs[name], tensor)
        n_runs[name] += 1

    def leave(module: nn.Module, _inputs: Any, output: Any) -> None:
        """Behind a module: ends its run, keeps its output as a unit for the attention that follows,
        and tells it.
        """
        while running[-1].run < 0:
            end()
        span = running[-1]
        end()
        tensor = first_tensor(output)
        if tensor is None:
            return
        if span.has_weights and not span.calls and not (is_numbered(span.name) and span.items):
            running[-1].units[span] = tensor
        receive(Event("out", span.name, span.run), tensor)

    def take(call: Call) -> None:
        """Tells the sites of an attention, which uses up the units in the nearest run that has
        some.
        """
        units = next((span.units for span in reversed(running) if span.units), {})
        running[-1].items.append(len(calls))
        for site, name, value in _of_call(call, units):
            receive(Event("call", name, len(calls), site), value)
        units.clear()
        calls.append(call.holding({}))

    with ExitStack() as hooks, captured(model, take) as watch:
        for module in modules.values():
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            hooks.callback(setattr, module, "training", module.training)
        model.eval()
        forward()
    return Pass(running[0], calls, tuple(watch.silent), LayerNumbers(model))


# ----------------------------------------------------------------------------- what modules are for


@dataclass(frozen=True, eq=False)
class _Item:
    """What runs in a block or outside of all, in order: a `call` of an attention, by its number,
    one that is `silent`, a norm, a `unit` of weights, a table of embeddings, or a block; with the
    module around it that computes the attention, if any.
    """

    kind: Literal["call", "silent", "norm", "unit", "table", "block"]
    span: _Span
    owner: _Span | None = None
    number: int = -1


_PartOf = _Item | Literal["mlp"] | None
"""The part of a block of which something is: an attention, or the MLP. Norms and tables have
none."""


class _LayerItems(NamedTuple):
    """What runs in a block, in order, the part of which each item is, and the layer."""

    items: Sequence[_Item]
    parts: Sequence[_PartOf]
    layer: Layer


class Pass:
    """A pass of a model: its modules and attentions as they ran, these without tensors, the
    `silent` modules that hide their attention, and the places that follow from all that, once they
    are found.
    """

    def __init__(
        self, ran: _Span, calls: Sequence[Call], silent: tuple[str, ...], numbers: LayerNumbers
    ) -> None:
        self.root = next(
            (item for item in ran.items if isinstance(item, _Span) and item.name == ""), ran
        )
        self.all_calls = calls
        self.silent = silent
        self.known = dict[Event | int, ModelPlace]()
        self._n_places = Counter[ModelPlace]()
        self._n_layers = Counter[Stack | None]()
        self.blocks = self._blocks(numbers)

    def place_of(self, event: Event) -> ModelPlace | None:
        """The place of what is computed, None if it has none."""
        place = self.known.get(event.number if event.site else event)
        if place is None or not event.site:
            return place
        return changed(place, site=event.site, name=event.name)

    def find_places(self, mapped: Mapping[str, ModelPlace | None]) -> None:
        """Finds all places; `mapped` modules have a place that is given, or one of their own."""
        self._find()
        for name, place in mapped.items():
            event = Event("out", name, 0)
            if place is None:
                self.known.setdefault(event, ModelPlace.mapped(name))
            else:
                known = self.known.items()
                self.known = {at: other for at, other in known if other.key != place.key}
                self.known[event] = changed(place, name=name)

    def _find(self) -> None:
        """Finds the places that the order of execution shows: up to the last block the embedding,
        the blocks and the norms of their stacks, and behind it the final norms and the logits.
        Without blocks the model is one, which gives logits.
        """
        items = self._flat(self.root, None)
        of_blocks = [at for at, item in enumerate(items) if item.kind == "block"]
        if not of_blocks:
            self._put_block(self.root, Layer(None, 0))
            self._put(self.root, _OUTSIDE, "logits", "logits")
            return
        above = ""  # the modules around the last list of blocks
        outside = _OUTSIDE
        for item in items[: of_blocks[-1] + 1]:
            span = item.span
            if item.kind == "block":
                layer = self._layer_of(span)
                outside = Layer(layer.stack, None)
                if layer.number == 0:  # the first of a stack reads the embedding
                    event = Event("in", span.name, span.run)
                    self._add(event, ModelPlace.of(outside, "embedding", "embedding", span.name))
                self._n_layers[layer.stack] += 1
                self._put_block(span, layer)
                above = span.name.rpartition(".")[0].rpartition(".")[0]
            elif item.kind == "table" and not self._n_layers:
                self._put(span, _OUTSIDE, "embedding", "lookup")
            elif item.kind == "norm" and self._n_layers and span.name.startswith(above):
                self._put(span, outside, "norm", "norm")
        head = [item.span for item in items[of_blocks[-1] + 1 :] if item.kind in ("norm", "unit")]
        n_norms = next((n for n, span in enumerate(head) if not span.is_norm), len(head))
        for span in head[:n_norms]:
            self._put(span, outside, "norm", "norm")
        for span in head[n_norms:-1]:
            self._put(span, _OUTSIDE, "logits", "norm" if span.is_norm else "head")
        name = head[-1].name if head[n_norms:] else ""
        of_logits = ModelPlace.of(_OUTSIDE, "logits", "logits", name)
        self._add(Event("out", self.root.name, self.root.run), of_logits)

    def _put(self, span: _Span, layer: Layer, part: Part, site: str) -> None:
        """Adds the place of what a module gives."""
        if span.run >= 0:
            self._add(
                Event("out", span.name, span.run), ModelPlace.of(layer, part, site, span.name)
            )

    def _add(self, event: Event | int, place: ModelPlace) -> None:
        """Adds the place of an event, or of an attention by its number. It is given as the first of
        its kind, under whose key all of the kind are counted, and gets the number of those before.
        """
        self.known[event] = changed(place, number=self._n_places[place.key])
        self._n_places[place.key] += 1

    def _layer_of_call(self, call: _Item, layer: Layer) -> Layer:
        """The layer of a block, in the stack of one of its attentions."""
        kind = self.all_calls[call.number].kind
        return layer._replace(stack=None if kind == "self" else kind)

    def _attends(self, span: _Span) -> bool:
        """Whether an attention ran within a span."""
        return bool(span.calls) or any(inner.name in self.silent for inner in span.inner)

    def _blocks(self, numbers: LayerNumbers) -> set[str]:
        """The names of the blocks: elements of the lists that number the layers of the attentions;
        without any attention, elements of the list with most modules.
        """
        spans = self.root.inner
        lists = {
            numbers.place(span.name).of_list
            for span in spans
            if span.name in self.silent or any(isinstance(item, int) for item in span.items)
        }
        elements = dict.fromkeys(span.name for span in spans if is_numbered(span.name))
        if not any(map(self._attends, spans)):
            n_modules = Counter(name.rpartition(".")[0] for name in elements)
            lists = {name for name, _ in n_modules.most_common(1)}
        return {name for name in elements if name.rpartition(".")[0] in lists}

    def _flat(self, span: _Span, owner: _Span | None) -> list[_Item]:
        """What runs within a span, at the level of norms and of units without one."""
        items = list[_Item]()
        for item in span.items:
            if isinstance(item, int):
                items.append(_Item("call", span, owner, item))
                continue
            if item.name in self.blocks:
                items.append(_Item("block", item))
            elif item.name in self.silent and not item.calls:
                items.append(_Item("silent", item, item))
            elif item.is_norm:
                items.append(_Item("norm", item, owner))
            elif any(each.name in self.blocks for each in item.inner):
                items += self._flat(item, None)
            elif self._attends(item):
                items += self._flat(item, owner or item)
            elif any(each.is_norm for each in item.inner):
                items += self._flat(item, owner)
            elif item.has_weights:
                is_table = isinstance(item.module, nn.Embedding)
                items.append(_Item("table" if is_table else "unit", item, owner))
        return items

    # -------------------------------------------------------------------------------------- a block

    def _layer_of(self, span: _Span) -> Layer:
        """The next layer of the stack of a block, by the attentions around its list."""
        above = span.name.rpartition(".")[0]
        kinds = {call.kind for call in self.all_calls if call.name.startswith(above)}
        stack: Stack | None = None
        if "encoder" in kinds:
            stack = "encoder"
        elif kinds & {"decoder", "cross"}:
            stack = "decoder"
        return Layer(stack, self._n_layers[stack])

    def _put_block(self, span: _Span, layer: Layer) -> None:
        """Adds the places of a block."""
        items = self._flat(self._content(span), None)
        block = _LayerItems(items, _parts_of(items), layer)
        for at, item in enumerate(items):
            match item.kind:
                case "norm":
                    self._put_norm(block, at)
                case "silent":
                    self._put(item.span, layer, "attention", "output")
                case "call":
                    self._put_call(block, at)
                case "unit" | "table" | "block":
                    pass  # a unit is the output of an attention, or the last one that of the MLP
                case _:
                    assert_never(item.kind)
        of_mlp = [item.span for item, part in zip(items, block.parts, strict=True) if part == "mlp"]
        if of_mlp:
            self._put(of_mlp[-1], layer, "mlp", "output")
        if span is not self.root:
            self._put(span, layer, "mlp", "residual")

    def _put_call(self, block: _LayerItems, at: int) -> None:
        """Adds the scores of an attention and its output: that of the projection after it, or of
        the module that computes it.
        """
        call = block.items[at]
        layer = self._layer_of_call(call, block.layer)
        name = self.all_calls[call.number].name
        self._add(call.number, ModelPlace.of(layer, "attention", "scores", name))
        later = zip(block.items[at + 1 :], block.parts[at + 1 :], strict=True)
        output = next((item.span for item, part in later if part is call), call.owner)
        if output is not None:
            self._put(output, layer, "attention", "output")

    def _put_norm(self, block: _LayerItems, at: int) -> None:
        """Adds a norm, with the part that it precedes or follows."""
        norm = _norm_site(block, at)
        if norm is None:
            return
        part, site = norm
        layer = block.layer
        if isinstance(part, _Item) and part.kind == "call":
            layer = self._layer_of_call(part, layer)
        self._put(block.items[at].span, layer, "mlp" if part == "mlp" else "attention", site)

    def _content(self, span: _Span) -> _Span:
        """The innermost module that contains all attentions of a span, and all its weights: a block
        may be a wrapper around another one, as of checkpointing, whose parts are those to place. An
        attention alone is a part of its block, also where nothing else stands beside it.
        """
        parts = [item for item in span.items if isinstance(item, int) or item.has_weights]
        only = parts[0] if len(parts) == 1 else None
        if not isinstance(only, _Span) or not self._attends(only) or only.name in self.silent:
            return span
        return self._content(only)


def _parts_of(items: Sequence[_Item]) -> list[_PartOf]:
    """The part of each item of a block: the units before an attention, in the same module, are of
    it, and the first one after it, or all in the module that computes it alone. The others are of
    the MLP.
    """
    parts = list[_PartOf]()
    with_output = set[_Item]()
    for at, item in enumerate(items):
        if item.kind != "unit":
            parts.append(item if item.kind in ("call", "silent") else None)
            continue
        before, after = (
            [other for other in side if other.kind == "call" and other.owner is item.owner]
            for side in (items[:at], items[at:])
        )
        part: _PartOf = "mlp"
        if after:
            part = after[0]
        elif before and (item.owner is not None or before[-1] not in with_output):
            part = before[-1]
            with_output.add(before[-1])
        parts.append(part)
    return parts


class _NormSite(NamedTuple):
    """The part that a norm precedes or follows, and its site there."""

    part: _PartOf
    site: str


def _norm_site(block: _LayerItems, at: int) -> _NormSite | None:
    """The part that a norm precedes or follows, and its site there: in a block that begins with a
    norm, the last norm between two parts precedes the second; in others norms follow. None for a
    norm of queries or keys, which is found as a projection, and for one without any part.
    """
    items, parts, _ = block
    name = items[at].span.name
    others = [n for n, item in enumerate(items) if item.kind != "norm"]
    before = max((n for n in others if n < at), default=None)
    after = min((n for n in others if n > at), default=None)
    if before is None:
        if after is None:
            return None
        is_of_mlp = "mlp" in name.rpartition(".")[2] and "mlp" in parts
        return _NormSite("mlp" if is_of_mlp else parts[after], "norm")
    if after is not None and parts[before] == parts[after]:
        is_of_projection = read_name(name)[0] in ("q", "k")
        return None if is_of_projection else _NormSite(parts[after], "inner_norm")
    begins_with_norm = next(item.kind == "norm" for item in items if item.kind != "table")
    if after is None or not begins_with_norm or items[at + 1].kind == "norm":
        return _NormSite(parts[before], "output_norm")
    return _NormSite(parts[after], "norm")


# --------------------------------------------------------------------------------- what is computed


def _of_call(call: Call, units: Mapping[_Span, Tensor]) -> Iterator[tuple[str, str, Tensor | Call]]:
    """The sites of an attention in the order of execution, with the names of their modules: q, k
    and v as projected, the norms of queries and keys, q and k as they enter the scores, the scores
    with the pattern, and z. `units` gave their outputs before it.
    """
    found = _projections(call, units)
    if call.v is not None:
        found.setdefault("v", (call.name, call.v))
    for site in OF_CALLS[:5]:
        if site in found:
            yield site, *found[site]
    if call.q is not None and call.k is not None:
        yield "q_rotated", call.name, call.q
        yield "k_rotated", call.name, call.k
    if call.unreadable is None:
        yield "scores", call.name, call
    if call.z is not None:
        yield "z", call.name, call.z


def _projections(call: Call, units: Mapping[_Span, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """The queries, keys and values as projected, and the normed ones, `[batch, head, position,
    width]`, with their modules, as far as names and widths tell them. Fused projections are cut so
    that the values are those of the attention.
    """
    projections = dict[str, tuple[str, Tensor]]()
    if call.v is None:
        return projections
    batch, n_heads = call.shape[:2]
    letters_of = {
        unit: read_name(unit.name)[0] for unit in units if not isinstance(unit.module, nn.Embedding)
    }
    n_plain = sum(letters != "o" and not unit.is_norm for unit, letters in letters_of.items())
    for unit, letters in letters_of.items():
        tensor, name = units[unit], unit.name
        site = f"{letters}_norm" if unit.is_norm else letters
        if site in projections or tensor.ndim < 2 or tensor.numel() % batch:
            continue
        by_head = _by_head(call, letters, tensor)
        may_be_fused = len(letters) == 3 or (n_plain == 1 and letters != "o")
        if by_head is not None:
            projections[site] = name, by_head
        elif may_be_fused and not unit.is_norm:
            rows = tensor.reshape(batch, -1, tensor.shape[-1])
            parts = _cut(rows, n_heads, call.v)
            projections |= {letter: (name, part) for letter, part in parts.items()}
    return projections


def _by_head(call: Call, letters: str, tensor: Tensor) -> Tensor | None:
    """A projection of queries, keys or values with a separate axis for heads; None for another one,
    and if its width is not one of heads.
    """
    if letters not in ("q", "k", "v") or call.v is None:
        return None
    like = {"q": call.q, "k": call.k, "v": call.v}[letters]
    width = tensor.shape[-1]
    d_head = (call.v if like is None else like).shape[-1]
    if tensor.ndim == 4:
        has_heads = like is not None and tensor.shape[1] == like.shape[1] and width == d_head
        return tensor if has_heads else tensor.transpose(1, 2)
    n = call.shape[1] if letters == "q" else width // d_head
    if not n or width % n:
        return None
    return tensor.reshape(call.shape[0], -1, n, width // n).transpose(1, 2)


def _cut(rows: Tensor, n_heads: int, v: Tensor) -> dict[str, Tensor]:
    """The parts of a fused projection: all queries, keys and values one after the other, or those
    of each group of heads together, or as in CodeGen the queries, values and keys of each quarter
    of the heads; empty where none gives the values.
    """
    d = v.shape[-1]
    n_kv = (rows.shape[-1] // d - n_heads) // 2
    if n_kv < 1 or n_heads % n_kv or v.shape[1] % n_kv:
        return {}
    if rows.shape[-1] != (n_heads + 2 * n_kv) * d:
        return {}
    parts = rows.split([n_heads * d, n_kv * d, n_kv * d], dim=-1)
    whole = [part.unflatten(-1, (-1, d)) for part in parts]
    groups = rows.unflatten(-1, (n_kv, -1, d))
    by_group = [groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]]
    layouts = [whole, by_group]
    if n_kv == n_heads and n_heads % _N_QUARTERS == 0:
        q, values, k = rows.unflatten(-1, (_N_QUARTERS, 3, -1, d)).unbind(dim=3)
        layouts.append([q.flatten(2, 3), k.flatten(2, 3), values.flatten(2, 3)])
    for layout in layouts:
        q, k, values = (part.transpose(1, 2) for part in layout)
        if torch.equal(values.repeat_interleave(v.shape[1] // n_kv, dim=1), v):
            return {"q": q, "k": k, "v": values}
    return {}
