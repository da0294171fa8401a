"""The trace of one attention of a checkpoint: every tensor that its modules compute, in order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.scores import Attention, ScoredAttention
from mhacli.attention.taps import step_of, summarise
from mhacli.errors import MhaError, UsageError
from mhacli.io.data import finite
from mhacli.models.calls import Call
from mhacli.models.layer_names import LayerNumbers, is_attention, rope_theta_of
from mhacli.models.runs.run import CheckpointRun
from mhacli.record.record import Cell, InspectedLayer, Record, ScorePart, Step, WeightShape
from mhacli.record.tables import HeadTable
from mhacli.run import CellIndex, require_inside
from mhacli.text.tokens import AttentionKind

_BUILDING = ("eager", "math", "softmax")
"""The kernels that compute matrices of queries × keys; others never do."""
_SILENT = ("Dropout", "Identity")
"""Modules that change nothing in evaluation."""


class TracedTensor(NamedTuple):
    """A tensor and how it was computed, by a `module` if there is one."""

    name: str
    tensor: Tensor
    formula: str
    meaning: str
    module: nn.Module | None = None
    built: bool = True


@dataclass
class _Collected:
    """The tensors of the traced attention before and after its call; `is_done` after its last module."""

    before: list[TracedTensor] = field(default_factory=list)
    after: list[TracedTensor] = field(default_factory=list)
    call: Call | None = None
    attention: Attention | None = None
    is_done: bool = False


def walk_checkpoint(run: CheckpointRun, *, values: bool = False, place: CellIndex | None = None) -> Record:
    """The record of a pass with the trace of one attention, the first requested; with `values`, the numbers of each tensor; with
    `place`, the computation of this cell. Raises `MhaError` if there is no such layer."""
    kind, layer = (run.wanted.model.layers or ((None, 0),))[0]
    run.wanted = replace(run.wanted, model=replace(run.wanted.model, layers=((kind, layer),)))
    seen = _Collected()
    with _watched(run, kind, seen):
        run.run()
    if seen.call is None or seen.attention is None:
        raise MhaError(f"layer {layer} has no attention to trace", code="no-layer")
    record = run.record()
    name = record.layers[0].name
    record = replace(
        record,
        layers=record.layers[:1],
        heads=HeadTable(head for head in record.heads if head.attention == name),
        arrays={array: tensor for array, tensor in record.arrays.items() if array.startswith("layers.0.")},
    )
    words = _AxisSizes.of(record.layers[0], seen.attention, record.config.d_model)
    assert record.model is not None
    derivations = _Derivations.of(seen.before, record.model.positions, rope_theta_of(run.loaded.config, layer))
    made = (*seen.before, *_inside(seen.call, seen.attention, record.layers[0], derivations), *seen.after)
    steps = tuple(_step(one, words, _view_of(one, made), values=values) for one in made)
    cell = None if place is None else follow_call(seen.call, seen.attention, place, record)
    timings = {
        name: timing for name, timing in record.timings.items() if name != "total"
    }  # the total includes other work
    return replace(record, trace=steps, cell=cell, timings=timings)


def _roots_of(run: CheckpointRun, kind: AttentionKind | None) -> list[nn.Module]:
    """The outermost attention modules of a kind, which include the output projection."""
    numbers = LayerNumbers(run.loaded.model)
    parts = {name: module for name, module in run.loaded.model.named_modules() if name and is_attention(name, module)}
    names = [  # a norm has no parts, and a list never runs
        name for name, module in parts.items()
        if list(module.children()) and not isinstance(module, nn.ModuleList)
        and kind in (None, numbers.kind_of(name))
    ]  # fmt: skip
    return [parts[name] for name in names if not any(name.startswith(f"{other}.") for other in names)]


@contextmanager
def _watched(run: CheckpointRun, kind: AttentionKind | None, seen: _Collected) -> Iterator[None]:
    """A context that collects the tensors of each attention, until that of the traced one is complete."""

    def enter(module: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> None:
        given = [t for t in (*inputs, *keywords.values()) if isinstance(t, Tensor) and t.ndim == 3]
        if seen.call is None and given:
            seen.before[:] = [TracedTensor("x", given[0], "what the layers before made", "a row of numbers per token")]

    def leave(*_: Any) -> None:
        seen.is_done = seen.call is not None

    def take(call: Call, attention: Attention) -> None:
        if seen.call is None:
            seen.call, seen.attention = call, attention

    handles: list[Any] = []
    for top in _roots_of(run, kind):
        handles += [top.register_forward_pre_hook(enter, with_kwargs=True), top.register_forward_hook(leave)]
        for name, module in top.named_modules():
            if not list(module.children()) and type(module).__name__ not in _SILENT and name:
                handles.append(module.register_forward_hook(_listener(name, seen)))
    run.on_layer = take
    try:
        yield
    finally:
        run.on_layer = None
        for handle in handles:
            handle.remove()


def _listener(name: str, seen: _Collected) -> Any:
    def hear(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not seen.is_done:
            one = TracedTensor(name, output, _formula(name, module), type(module).__name__, module)
            (seen.before if seen.call is None else seen.after).append(one)

    return hear


def _formula(name: str, module: nn.Module) -> str:
    """The formula of a module's output, for the kinds of modules in attention."""
    kind, short = type(module).__name__, name.rpartition(".")[2]
    added = " + b" if getattr(module, "bias", None) is not None else ""
    if kind == "Conv1D":
        return f"{short} = x W{added}, W [d_in, d_out]"
    if isinstance(module, nn.Linear) or kind.endswith("Linear"):
        return f"{short} = x Wᵀ{added}"
    if "RMSNorm" in kind or kind == "T5LayerNorm":
        return f"{short} = x / √(mean x² + ε) · {'(1 + g)' if kind.startswith('Gemma') else 'g'}"
    if isinstance(module, nn.LayerNorm):
        return f"{short} = (x − mean) / √(var + ε) · g{added}"
    return f"{short} = {kind}(x)"


# ------------------------------------------------------------------------------------------------------- the attention itself


def _inside(
    call: Call, attention: Attention, layer: InspectedLayer, derivations: _Derivations
) -> Iterator[TracedTensor]:
    """The inputs of the attention and the matrices that follow from them; those that the kernel does not compute are computed
    here."""
    made, is_built = attention.matrices(), layer.kernel in _BUILDING
    if call.q is not None:
        (q, k, v), shared = call.qkv, layer.n_heads // layer.n_kv_heads
        yield TracedTensor(
            "q",
            q,
            f"q = {derivations.of_queries}",
            "the queries of each head, as attention reads them",
        )
        said = f"; each is read by {shared} query heads in a row" if shared > 1 else ""
        yield TracedTensor("k", k, f"k = {derivations.of_keys}", f"what each token is found by{said}")
        yield TracedTensor("v", v, "v = its projection, split into heads", f"what each token contributes{said}")
        met = "the dot product of every query with every key: how well they match"
        yield TracedTensor("qk", made["qk"], "qk = q kᵀ", met, built=is_built)
        if call.mask is not None:
            is_bool = call.mask.dtype == torch.bool
            yield TracedTensor("mask", call.mask, "True = may attend" if is_bool else "added to the scores", layer.mask)
        if call.sinks is not None:
            whose = "head" if call.sinks.ndim == 1 else "query"
            yield TracedTensor(
                "sinks", call.sinks, f"a score per {whose}", "takes part in the softmax and gives nothing"
            )
    seen = f"what a query sees: {layer.mask}"
    yield TracedTensor("scores", made["scores"], _scores_formula(attention), seen, built=is_built)
    sinks = " and the sink" if layer.sinks else ""
    softmax = f"pattern = softmax(scores) over the keys{sinks}"
    yield TracedTensor("pattern", made["pattern"], softmax, _pattern_meaning(layer), built=is_built)
    if call.z is not None:
        seen = f"what the model's own code made of it ({layer.captured_by}, {layer.kernel})"
        yield TracedTensor("z", call.z, "z = pattern v", seen)


class _Derivations(NamedTuple):
    """The formulas of queries and keys after their projections."""

    of_queries: str
    of_keys: str

    @staticmethod
    def of(made: Sequence[TracedTensor], positions: str, theta: float) -> _Derivations:
        """The formulas that follow from the modules and the position encoding."""
        names = [one.name.rpartition(".")[2] for one in made]
        turned = f", rotated by its position (RoPE, base {theta:g})" if positions.startswith("rope") else ""

        def way(short: str) -> str:
            normed = ", normed" if any(name.startswith(short) and "norm" in name for name in names) else ""
            return f"its projection{normed}, split into heads{turned}"

        return _Derivations(way("q"), way("k"))


def _scores_formula(attention: Attention) -> str:
    if not isinstance(attention, ScoredAttention):
        return "scores as softmax reads them"
    scaled, c = f"{attention.scale:.6g} · qk", attention.softcap
    capped = scaled if c is None else f"{c:g} · tanh({scaled} / {c:g})"
    return f"scores = {capped}{'' if attention.bias is None else ' + position bias'}; −∞ where masked"


def _pattern_meaning(layer: InspectedLayer) -> str:
    if layer.sinks:
        return "the attention weights: they sum to less than 1, because the sink logit takes the rest"
    return "the attention weights: each query's row sums to 1 over its keys"


# ------------------------------------------------------------------------------------------------------------- the steps


@dataclass(frozen=True)
class _AxisSizes:
    """The sizes of a layer, by which axes are named."""

    batch: int
    q_len: int
    k_len: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_v: int
    d_model: int

    @staticmethod
    def of(layer: InspectedLayer, attention: Attention, d_model: int) -> _AxisSizes:
        """The sizes of a captured layer."""
        batch, _, q_len, k_len = attention.shape
        return _AxisSizes(batch, q_len, k_len, layer.n_heads, layer.n_kv_heads, layer.d_head, layer.d_v, d_model)

    def axes(self, name: str, shape: tuple[int, ...], *, of_module: bool) -> tuple[str, ...]:
        """The axes of a tensor by its name and shape. With `of_module`, the name is that of a module, which may equal that of
        a site."""
        known = {
            "q": "batch head query d_head", "k": "batch kv_head key d_head", "v": "batch kv_head key d_v",
            "qk": "batch head query key", "scores": "batch head query key", "pattern": "batch head query key",
            "z": "batch head query d_v", "mask": "batch head query key",
            "sinks": "head" if len(shape) == 1 else "batch head query",
        }.get(name)  # fmt: skip
        if known is not None and not of_module:
            return tuple(known.split())
        short = name.rpartition(".")[2]
        is_of_keys = short.startswith(("k", "v")) and self.k_len in shape[1:3]
        length, n = ("key", self.k_len) if is_of_keys else ("query", self.q_len)
        words = {0: "batch", len(shape) - 1: self._width(short, shape[-1])} if shape[0] == self.batch else {}
        fitting = {self.n_kv_heads: "kv_head", self.n_heads: "head", self.k_len: "key", n: length}
        for place, size in enumerate(shape):
            words.setdefault(place, fitting.get(size, "rows" if place == 0 else "width"))
        return tuple(words[place] for place in range(len(shape)))

    def _width(self, name: str, size: int) -> str:
        """The word for the last axis: by the name of a projection, otherwise d_model if the size matches."""
        own = {
            "q": ("head·d_head", self.n_heads * self.d_head),
            "k": ("kv_head·d_head", self.n_kv_heads * self.d_head),
            "v": ("kv_head·d_v", self.n_kv_heads * self.d_v),
        }
        word, width = own.get(name[:1], ("", 0))
        if size == width:
            return word
        if size == sum(width for _, width in own.values()) and self.d_head == self.d_v:
            return "(head+2·kv_head)·d_head"
        names = {self.d_head: "d_head", self.n_heads * self.d_v: "head·d_v", self.d_model: "d_model"}
        return names.get(size, "width")


def _view_of(made: TracedTensor, others: Sequence[TracedTensor]) -> str | None:
    """The first tensor whose memory this one shares, None if there is none. All tensors must be alive."""
    storage = made.tensor.untyped_storage().data_ptr()
    first = next(other for other in others if other.tensor.untyped_storage().data_ptr() == storage)
    return None if first is made else first.name


def _step(made: TracedTensor, words: _AxisSizes, view_of: str | None, *, values: bool) -> Step:
    """The trace entry of a tensor."""
    tensor = made.tensor
    weights = [] if made.module is None else list(made.module.named_parameters())
    return step_of(
        made.name,
        tensor,
        axes=words.axes(made.name, tuple(tensor.shape), of_module=made.module is not None),
        formula=made.formula,
        meaning=made.meaning,
        is_view=view_of is not None,
        flops=_flops(made, words),
        view_of=view_of,
        built=made.built,
        parameters=tuple(WeightShape(f"{made.name}.{name}", tuple(p.shape)) for name, p in weights),
        values=summarise(tensor) if values else None,
    )


def _flops(made: TracedTensor, words: _AxisSizes) -> int:
    """The operations, counted as in the trace of a layer of mha: 2 per weight and row, 1 for other numbers."""
    cells = words.batch * words.n_heads * words.q_len * words.k_len
    own = {"qk": 2 * cells * words.d_head, "scores": cells, "pattern": 5 * cells, "z": 2 * cells * words.d_v}
    if made.module is None:
        is_rotated = "RoPE" in made.formula  # two products and a sum for each number
        return own.get(made.name, 3 * made.tensor.numel() if is_rotated else 0)
    weights = [p for p in made.module.parameters() if p.ndim == 2]
    if weights:
        rows, n_biases = made.tensor.numel() // made.tensor.shape[-1], len(list(made.module.parameters())) - 1
        return 2 * rows * prod(weights[0].shape) + n_biases * made.tensor.numel()
    return made.tensor.numel()


# -------------------------------------------------------------------------------------------------------------- the cell


def follow_call(call: Call, attention: Attention, place: CellIndex, record: Record) -> Cell:
    """The computation of one cell of a captured attention. Raises `UsageError` for a cell outside, and if queries and keys
    were not captured."""
    if call.q is None:
        raise UsageError("--cell needs the layer's queries and keys, and only its softmax could be captured")
    view = record.of_layer(0)
    (q, k, v), z = call.qkv, call.z
    assert z is not None
    require_inside(place, q.shape[1], view.sequences, view.keys)
    b, h, query, key = place
    i, j = view.first_query(b) + query, view.first_key(b) + key
    group = q.shape[1] // k.shape[1]
    made, first, n_keys = attention.matrices(), view.first_key(b), len(view.keys[b].ids)
    own = slice(first, first + n_keys)
    scores, shares = made["scores"][b, h, i], made["pattern"][b, h, i]
    allowed = bool(made["allowed"][b, min(h, made["allowed"].shape[1] - 1), i, j])
    return Cell(
        sequence=b, head=h, query=query, key=key,
        q=_numbers(q[b, h, i]), k=_numbers(k[b, h // group, j]), v=_numbers(v[b, h // group, j]),
        qk=finite(made["qk"][b, h, i, j].item()), scale=call.scale, softcap=call.softcap, allowed=allowed,
        score=finite(scores[j].item()), scores_row=_numbers(scores[own]), pattern_row=_numbers(shares[own]),
        share=finite(shares[j].item()), z=_numbers(z[b, h, i]), parts=_parts(attention, place, i, j),
    )  # fmt: skip


def _parts(attention: Attention, place: CellIndex, i: int, j: int) -> tuple[ScorePart, ...]:
    """The terms added to the score besides the product."""
    if not isinstance(attention, ScoredAttention) or attention.bias is None:
        return ()
    sequence, head, *_ = place
    added = attention.bias(sequence, range(head, head + 1), torch.tensor([i]), torch.tensor([j])).item()
    return (ScorePart("position bias", "position", finite(added), added=True),)


def _numbers(row: Tensor) -> tuple[float | None, ...]:
    return tuple(finite(x) for x in row.double().tolist())
