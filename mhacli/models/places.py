"""The places of a model in the order of execution: its embedding, the parts of each block, its
final norm and its logits.

A pass shows which modules run within which, where attentions are computed, and what all of them
give. What a module is for follows from the order in which it runs; names are read only for the
roles of projections.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from msgspec.structs import replace as changed
from torch import Tensor, nn

from mhacli.models.capture import Call, captured
from mhacli.models.layer_names import is_numbered
from mhacli.usercode.projections import is_norm, read_name

Part = Literal["embedding", "attention", "mlp", "norm", "logits"]
Stack = Literal["encoder", "decoder", "cross"]
Forward = Callable[[], Any]
"""Calls a model; the same inputs each time."""
Source = tuple[Literal["in", "out", "call"], str, int]
"""What a module reads or gives, by its name and how often it ran before; or the number of an
attention, without a name."""
OF_CALLS = ("q", "k", "v", "q_norm", "k_norm", "q_rotated", "k_rotated", "scores", "pattern", "z")
"""The sites of an attention that are not the output of a module."""
_NORM = re.compile(r"norm|rms|^ln|ln$|^n\d*$", re.IGNORECASE)
_ELEMENT = re.compile(r"(?<![^.])\d+(?=\.)")
"""The number of an element of a list around a module."""
_OF_CODEGEN = 4
"""The parts of CodeGen's fused projection. Source: transformers' `modeling_codegen.py`,
`mp_num`."""


class Place(msgspec.Struct, frozen=True):
    """Where a model computes something: a `site` in a `part` of a layer, by the module `name`. The
    embedding, the final norm and the logits have no layer. `number` counts the earlier places of
    the same kind.
    """

    layer: int | None
    stack: Stack | None
    part: Part
    site: str
    name: str
    number: int = 0

    @property
    def where(self) -> tuple[int | None, Stack | None, Part, str]:
        """The layer, the stack, the part and the site."""
        return self.layer, self.stack, self.part, self.site

    @property
    def key(self) -> tuple[Any, ...]:
        """What it has in common with the place of another model."""
        return *self.where, self.number


class Event(NamedTuple):
    """Something that is computed in a pass, by the module `name`. Of an attention there are
    several, by `site`.
    """

    source: Source
    name: str
    site: str = ""


Receive = Callable[[Event, Tensor | Call], None]
"""Receives what is computed: a tensor, or the attention for its scores."""


@dataclass(eq=False)
class _Span:
    """A run of a module; its number is −1 for an element of a list that is never called itself,
    such as a list of two. `items` are what ran within it, in order: modules, and the numbers of
    captured attentions. `output` is what it gave, until the module around it ends.
    """

    name: str
    run: int
    module: nn.Module
    items: list[_Span | int] = field(default_factory=list)
    output: Tensor | None = None

    def within(self) -> Iterator[_Span | int]:
        """Everything that ran within it."""
        for item in self.items:
            yield item
            if isinstance(item, _Span):
                yield from item.within()

    def end(self) -> None:
        """Forgets the outputs of what ran within it."""
        for item in self.items:
            if isinstance(item, _Span):
                item.output = None

    @property
    def calls(self) -> list[int]:
        """The attentions within it."""
        return [item for item in self.within() if isinstance(item, int)]

    @property
    def is_norm(self) -> bool:
        """Whether it normalises, and does nothing else."""
        is_small = (
            all(parameter.ndim < 2 for parameter in self.module.parameters()) and not self.calls
        )
        words = (self.name.rpartition(".")[2], type(self.module).__name__)
        return is_small and (
            is_norm(self.module) or (self.has_weights and any(map(_NORM.search, words)))
        )

    @property
    def has_weights(self) -> bool:
        """Whether its module has weights."""
        return any(True for _ in self.module.parameters())

    @property
    def projected(self) -> list[_Span]:
        """What ran within it since the last attention, of which the output is known."""
        after = max(
            (at + 1 for at, item in enumerate(self.items) if isinstance(item, int)), default=0
        )
        return [
            item
            for item in self.items[after:]
            if isinstance(item, _Span) and item.output is not None
        ]


# ------------------------------------------------------------------------------------------- a pass


@torch.no_grad()
def observe(model: nn.Module, forward: Forward, receive: Receive) -> Pass:
    """Runs a model in evaluation, and gives what it computes to `receive`, in the order of
    execution: what modules give and elements of lists read, and attentions.
    """
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    running, runs, calls = [_Span("", 0, nn.Module())], Counter[str](), list[Call]()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        name, tensor = names[id(module)], first_tensor((args, kwargs))
        while running[-1].run < 0 and not name.startswith(f"{running[-1].name}."):
            running.pop().end()
        around = len(running[-1].name)
        elements = [
            name[: number.end()] for number in _ELEMENT.finditer(name) if number.end() > around
        ]
        for each, run in (*((element, -1) for element in elements), (name, runs[name])):
            running.append(_Span(each, run, modules[each]))
            running[-2].items.append(running[-1])
            if is_numbered(each) and tensor is not None:
                receive(Event(("in", each, run), each), tensor)
        runs[name] += 1

    def leave(module: nn.Module, _inputs: Any, output: Any) -> None:
        while running[-1].run < 0:
            running.pop().end()
        span = running.pop()
        span.end()
        tensor = first_tensor(output)
        if tensor is None:
            return
        if span.has_weights and not span.calls and not (is_numbered(span.name) and span.items):
            span.output = tensor
        receive(Event(("out", span.name, span.run), span.name), tensor)

    def take(call: Call) -> None:
        units = next((units for span in reversed(running) if (units := span.projected)), [])
        running[-1].items.append(len(calls))
        for site, name, value in _of_call(call, units):
            receive(Event(("call", "", len(calls)), name, site), value)
        for unit in units:
            unit.output = None
        calls.append(call.holding({}))

    with ExitStack() as hooks, captured(model, take) as watch:
        for module in modules.values():
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            hooks.callback(setattr, module, "training", module.training)
        model.eval()
        forward()
    return Pass(running[0], calls, tuple(watch.silent))


# ----------------------------------------------------------------------------- what modules are for


@dataclass(eq=False)
class _Item:
    """What runs in a block or outside of all, in order: a `call` of an attention, one that is
    `silent`, a norm, a `unit` of weights, a table of embeddings, or a block; with the module around
    it that computes the attention, if any.
    """

    kind: Literal["call", "silent", "norm", "unit", "table", "block"]
    span: _Span
    owner: _Span | None
    of: object = None
    """The part of the block to which it belongs: the number of an attention, the span of a silent
    one, or "mlp"."""


class Pass:
    """A pass of a model: its modules and attentions as they ran, these without tensors, the
    `silent` modules that hide their attention, and the places that follow from all that, once they
    are found.
    """

    def __init__(self, ran: _Span, calls: Sequence[Call], silent: tuple[str, ...]) -> None:
        self.root = next(
            (item for item in ran.items if isinstance(item, _Span) and item.name == ""), ran
        )
        self.all_calls, self.silent = calls, silent
        self.known = dict[Source, Place]()
        self._taken, self._n_layers = Counter[tuple[Any, ...]](), Counter[Stack | None]()
        self.blocks = self._blocks()

    def place_of(self, event: Event) -> Place | None:
        """The place of what is computed, None if it has none."""
        place = self.known.get(event.source)
        return (
            changed(place, site=event.site, name=event.name)
            if place is not None and event.site
            else place
        )

    def find_places(self, mapped: Mapping[str, Place | None]) -> None:
        """Finds all places; `mapped` modules have a place that is given, or one of their own."""
        self._find()
        for name, place in mapped.items():
            if place is None:
                self.known.setdefault(
                    ("out", name, 0), Place(None, None, "mlp", f"mapped {name}", name)
                )
            else:
                self.known = {
                    source: other for source, other in self.known.items() if other.key != place.key
                }
                self.known["out", name, 0] = changed(place, name=name)

    def _find(self) -> None:
        items = self._flat(self.root, None)
        if not any(item.kind == "block" for item in items):
            self._block(self.root, None, 0)
            self._put(self.root, None, None, "logits", "logits")
            return
        last = max(place for place, item in enumerate(items) if item.kind == "block")
        above, stack = "", None
        for item in items[: last + 1]:
            if item.kind == "block":
                above, stack = self._next_block(item.span)
            elif item.kind == "table" and not self._n_layers:
                self._put(item.span, None, None, "embedding", "lookup")
            elif item.kind == "norm" and self._n_layers and item.span.name.startswith(above):
                self._put(item.span, None, stack, "norm", "norm")
        head = [item.span for item in items[last + 1 :] if item.kind in ("norm", "unit")]
        n_norms = next((n for n, span in enumerate(head) if not span.is_norm), len(head))
        for span in head[:n_norms]:
            self._put(span, None, stack, "norm", "norm")
        for span in head[n_norms:-1]:
            self._put(span, None, None, "logits", "norm" if span.is_norm else "head")
        of_logits = Place(None, None, "logits", "logits", head[-1].name if head[n_norms:] else "")
        self._add(("out", self.root.name, self.root.run), of_logits)

    def _put(
        self, span: _Span, layer: int | None, stack: Stack | None, part: Part, site: str
    ) -> None:
        """Adds the place of what a module gives."""
        if span.run >= 0:
            self._add(("out", span.name, span.run), Place(layer, stack, part, site, span.name))

    def _add(self, source: Source, place: Place) -> None:
        """Adds a place, with its number."""
        self.known[source] = changed(place, number=self._taken[place.key])
        self._taken[place.key] += 1

    def _stack_of(self, number: int) -> Stack | None:
        """The stack of an attention."""
        kind = self.all_calls[number].kind
        return None if kind == "self" else kind

    def _attends(self, span: _Span) -> bool:
        """Whether an attention ran within a span."""
        return bool(span.calls) or any(
            isinstance(item, _Span) and item.name in self.silent for item in span.within()
        )

    def _blocks(self) -> set[str]:
        """The names of the blocks: elements of the longest list of modules of one class whose
        elements contain attention; without any attention, elements of the list with most modules.
        """
        every = [item for item in self.root.within() if isinstance(item, _Span)]
        spans = [span for span in every if is_numbered(span.name)]
        holding = [span for span in spans if self._attends(span)]
        members: dict[tuple[str, type], set[str]] = defaultdict(set)

        def list_of(span: _Span) -> tuple[str, type]:
            return span.name.rpartition(".")[0], type(span.module)

        for span in holding or spans:
            members[list_of(span)].add(span.name)
        lists = set[str]()
        for end in every:
            above = [span for span in holding if f"{end.name}.".startswith(f"{span.name}.")]
            is_end = end.name in self.silent or any(isinstance(item, int) for item in end.items)
            if is_end and above:  # of equals the outermost
                lists.add(list_of(max(above, key=lambda span: len(members[list_of(span)])))[0])
        if not holding:
            counts = Counter(of for (of, _), names in members.items() for _ in names)
            lists = {of for of, _ in counts.most_common(1)}
        names = {span.name for span in spans if span.name.rpartition(".")[0] in lists}
        return {name for name in names if not any(name.startswith(f"{other}.") for other in names)}

    def _flat(self, span: _Span, owner: _Span | None) -> list[_Item]:
        """What runs within a span, at the level of norms and of units without one."""
        items = list[_Item]()
        for item in span.items:
            if isinstance(item, int):
                items.append(_Item("call", span, owner, of=item))
                continue
            inner = [each for each in item.within() if isinstance(each, _Span)]
            if item.name in self.blocks:
                items.append(_Item("block", item, None))
            elif item.name in self.silent and not item.calls:
                items.append(_Item("silent", item, item, of=item))
            elif item.is_norm:
                items.append(_Item("norm", item, owner))
            elif any(each.name in self.blocks for each in inner):
                items += self._flat(item, None)
            elif self._attends(item):
                items += self._flat(item, owner or item)
            elif any(each.is_norm for each in inner):
                items += self._flat(item, owner)
            elif item.has_weights:
                items.append(
                    _Item("table" if isinstance(item.module, nn.Embedding) else "unit", item, owner)
                )
        return items

    # -------------------------------------------------------------------------------------- a block

    def _next_block(self, span: _Span) -> tuple[str, Stack | None]:
        """Adds a block, and before the first of a stack the embedding, which it reads. Returns what
        the names of modules around its list begin with, and its stack.
        """
        above = span.name.rpartition(".")[0]
        kinds = {call.kind for call in self.all_calls if call.name.startswith(above)}
        stack: Stack | None = (
            "encoder" if "encoder" in kinds else "decoder" if kinds & {"decoder", "cross"} else None
        )
        layer = self._n_layers[stack]
        if not layer:
            self._add(
                ("in", span.name, span.run), Place(None, stack, "embedding", "embedding", span.name)
            )
        self._n_layers[stack] += 1
        self._block(span, stack, layer)
        return above.rpartition(".")[0], stack

    def _block(self, span: _Span, stack: Stack | None, layer: int) -> None:
        content = span
        while (
            True
        ):  # the only module with weights in a span, if it contains all attentions of the span
            parts = [item for item in content.items if isinstance(item, int) or item.has_weights]
            only = parts[0] if len(parts) == 1 else None
            if not isinstance(only, _Span) or not self._attends(only) or only.name in self.silent:
                break
            content = only
        items = self._flat(content, None)
        has_output = set[object]()
        for at, item in enumerate(
            items
        ):  # the units before an attention are of it, and the first one after it
            if item.kind != "unit":
                continue
            before, after = (
                [other.of for other in part if other.kind == "call" and other.owner is item.owner]
                for part in (items[:at], items[at:])
            )
            if after:
                item.of = after[0]
            elif before and (item.owner is not None or before[-1] not in has_output):
                item.of = before[-1]
                has_output.add(item.of)
            else:
                item.of = "mlp"
        for at, item in enumerate(items):
            if item.kind == "norm":
                self._norm(items, at, layer, stack)
            elif item.kind == "silent":
                self._put(item.span, layer, stack, "attention", "output")
            elif isinstance(item.of, int) and item.kind == "call":
                place = Place(
                    layer,
                    self._stack_of(item.of),
                    "attention",
                    "scores",
                    self.all_calls[item.of].name,
                )
                self._add(("call", "", item.of), place)
                units = (
                    unit.span for unit in items[at:] if unit.kind == "unit" and unit.of == item.of
                )
                output = next(units, item.owner)
                if output is not None:
                    self._put(output, layer, place.stack, "attention", "output")
        of_mlp = [item.span for item in items if item.kind == "unit" and item.of == "mlp"]
        if of_mlp:
            self._put(of_mlp[-1], layer, stack, "mlp", "output")
        if span is not self.root:
            self._put(span, layer, stack, "mlp", "residual")

    def _norm(self, items: Sequence[_Item], at: int, layer: int, stack: Stack | None) -> None:
        """Adds a norm, with the part that it precedes or follows: in a block that begins with a
        norm, the last norm between two parts precedes the second; in others norms follow.
        """
        item, begins = (
            items[at],
            next(each.kind == "norm" for each in items if each.kind != "table"),
        )
        before = (
            next((each for each in items[at - 1 :: -1] if each.kind != "norm"), None)
            if at
            else None
        )
        after = next((each for each in items[at + 1 :] if each.kind != "norm"), None)
        site, of = "norm", after
        if before is None and after is not None and "mlp" in item.span.name.rpartition(".")[2]:
            of = next((each for each in items if each.of == "mlp"), after)
        elif before is not None and after is not None and before.of == after.of:
            letters = read_name(item.span.name)[0]
            site = f"{letters}_norm" if letters in ("q", "k") else "inner_norm"
        elif before is not None and (after is None or not begins or items[at + 1].kind == "norm"):
            site, of = "output_norm", before
        if of is None or site in ("q_norm", "k_norm"):
            return
        is_mlp = of.of == "mlp"
        of_stack = self._stack_of(of.of) if isinstance(of.of, int) else stack
        self._put(item.span, layer, of_stack, "mlp" if is_mlp else "attention", site)


# --------------------------------------------------------------------------------- what is computed


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor of real numbers in an output, the logits if it names them."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if getattr(value, "logits", None) is not None:
        return first_tensor(value.logits)
    values = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return next((tensor for each in values if (tensor := first_tensor(each)) is not None), None)


def _of_call(call: Call, units: Sequence[_Span]) -> Iterator[tuple[str, str, Tensor | Call]]:
    """The sites of an attention in the order of execution, with the names of their modules: q, k
    and v as projected, the norms of queries and keys, q and k as they enter the scores, the scores
    with the pattern, and z. `units` ran before it.
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
    if call.unread_mask is None:
        yield "scores", call.name, call
    if call.z is not None:
        yield "z", call.name, call.z


def _projections(call: Call, units: Sequence[_Span]) -> dict[str, tuple[str, Tensor]]:
    """The queries, keys and values as projected, and the normed ones, `[batch, head, position,
    width]`, with their modules, as far as names and widths tell them. Fused projections are cut so
    that the values are those of the attention.
    """
    found = dict[str, tuple[str, Tensor]]()
    (batch, n_heads, *_), v = call.shape, call.v
    letters_of = {
        unit: read_name(unit.name)[0] for unit in units if not isinstance(unit.module, nn.Embedding)
    }
    n_plain = sum(letters != "o" and not unit.is_norm for unit, letters in letters_of.items())
    for unit, letters in letters_of.items():
        tensor, name = unit.output, unit.name
        site = f"{letters}_norm" if unit.is_norm else letters
        if (
            v is None
            or tensor is None
            or tensor.ndim < 2
            or tensor.numel() % batch
            or site in found
        ):
            continue
        like = {"q": call.q, "k": call.k, "v": v}.get(letters)
        d = v.shape[-1] if like is None else like.shape[-1]
        n = n_heads if letters == "q" else tensor.shape[-1] // d
        if tensor.ndim == 4 and letters in ("q", "k", "v"):
            is_first = (
                tensor.shape[-1] == d and like is not None and tensor.shape[1] == like.shape[1]
            )
            found[site] = name, tensor if is_first else tensor.transpose(1, 2)
        elif letters in ("q", "k", "v") and n and tensor.shape[-1] % n == 0:
            found[site] = name, tensor.reshape(batch, -1, n, tensor.shape[-1] // n).transpose(1, 2)
        elif not unit.is_norm and (len(letters) == 3 or (n_plain == 1 and letters != "o")):
            rows = tensor.reshape(batch, -1, tensor.shape[-1])
            found |= {letter: (name, part) for letter, part in _cut(rows, n_heads, v).items()}
    return found


def _cut(rows: Tensor, n_heads: int, v: Tensor) -> dict[str, Tensor]:
    """The parts of a fused projection: all queries, keys and values one after the other, or those
    of each group of heads together, or as in CodeGen the queries, values and keys of each quarter
    of the heads; empty where none gives the values.
    """
    d = v.shape[-1]
    n_kv = (rows.shape[-1] // d - n_heads) // 2
    if (
        n_kv < 1
        or rows.shape[-1] != (n_heads + 2 * n_kv) * d
        or n_heads % n_kv
        or v.shape[1] % n_kv
    ):
        return {}
    whole = [
        part.unflatten(-1, (-1, d))
        for part in rows.split([n_heads * d, n_kv * d, n_kv * d], dim=-1)
    ]
    groups = rows.unflatten(-1, (n_kv, -1, d))
    by_group = [groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]]
    layouts = [whole, by_group]
    if n_kv == n_heads and n_heads % _OF_CODEGEN == 0:
        q, values, k = rows.unflatten(-1, (_OF_CODEGEN, 3, -1, d)).unbind(dim=3)
        layouts.append([q.flatten(2, 3), k.flatten(2, 3), values.flatten(2, 3)])
    for parts in layouts:
        q, k, values = (part.transpose(1, 2) for part in parts)
        if torch.equal(values.repeat_interleave(v.shape[1] // n_kv, dim=1), v):
            return {"q": q, "k": k, "v": values}
    return {}
