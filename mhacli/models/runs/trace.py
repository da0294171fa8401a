"""The trace of one attention of a checkpoint: every tensor that its modules compute, in order of execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.attention.axes import Axes
from mhacli.attention.core import per_query_head
from mhacli.attention.scores import Attention, ScoredAttention
from mhacli.attention.taps import step_of, summarise
from mhacli.errors import MhaError, UsageError
from mhacli.io.data import finite
from mhacli.layer.trace import cell_of
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

Heard = list[tuple[str, nn.Module | None, Tensor]]
"""What enters an attention, `x`, and the outputs of its modules by their names in it."""
Taken = list[tuple[Call, Attention, int]]
"""The traced attention once it is computed, with the number of outputs heard before; empty until then."""


def walk_checkpoint(run: CheckpointRun, *, values: bool = False, place: CellIndex | None = None) -> Record:
    """The record of a pass with the trace of one attention, the first requested; with `values`, the numbers of each tensor; with
    `place`, the computation of this cell. Raises `MhaError` if there is no such layer."""
    kind, number = (run.wanted.model.layers or ((None, 0),))[0]
    run.wanted = replace(run.wanted, model=replace(run.wanted.model, layers=((kind, number),)))
    heard, taken = Heard(), Taken()

    def take(call: Call, attention: Attention) -> None:
        if not taken:
            taken.append((call, attention, len(heard)))

    with _listening(run.loaded.model, kind, heard, taken):
        run.run(on_layer=take)
    if not taken:
        raise MhaError(f"layer {number} has no attention to trace", code="no-layer")
    call, attention, n_before = taken[0]
    record = run.record()
    layer, model = record.layers[0], record.model
    assert model is not None
    theta = rope_theta_of(run.loaded.config, number) if model.positions.startswith("rope") else None
    sizes = dict(zip(("batch", "head", "query", "key"), attention.shape, strict=True))
    sizes |= {"kv_head": layer.n_kv_heads, "d_head": layer.d_head, "d_v": layer.d_v, "d_model": record.config.d_model}
    steps = [(tensor, _step_of_module(name, module, tensor, sizes)) for name, module, tensor in heard]
    names = [name.rpartition(".")[2] for name, *_ in heard[:n_before]]
    steps[n_before:n_before] = _inside(call, attention, layer, names, theta)
    return replace(
        record,
        layers=(layer,),
        heads=HeadTable(head for head in record.heads if head.attention == layer.name),
        arrays={name: array for name, array in record.arrays.items() if name.startswith("layers.0.")},
        trace=tuple(_with_memory(steps, values=values)),
        cell=None if place is None else follow_call(call, attention, place, run.axes(layer.kind)),
        timings={name: timing for name, timing in record.timings.items() if name != "total"},  # it includes other work
    )


@contextmanager
def _listening(model: nn.Module, kind: AttentionKind | None, heard: Heard, taken: Taken) -> Iterator[None]:
    """A context in which `heard` collects what enters an attention of this kind and its modules compute, of each anew, until
    that of the `taken` one is complete. The outermost modules count, which include the output projection."""
    numbers, names = LayerNumbers(model), dict[nn.Module, str]()
    handles: list[Any] = []

    def enter(_: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> None:
        given = [t for t in (*inputs, *keywords.values()) if isinstance(t, Tensor) and t.ndim == 3]
        if given and not taken:
            heard[:] = [("x", None, given[0])]

    def hear(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            heard.append((names[module], module, output))

    def stop() -> None:
        for handle in handles:
            handle.remove()

    roots: list[str] = []
    for name, root in model.named_modules():
        has_parts = bool(list(root.children())) and not isinstance(
            root, nn.ModuleList
        )  # a norm has none, a list never runs
        is_outermost = name and is_attention(name, root) and not any(name.startswith(f"{other}.") for other in roots)
        if is_outermost and has_parts and kind in (None, numbers.kind_of(name)):
            roots.append(name)
            handles.append(root.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(root.register_forward_hook(lambda *_: stop() if taken else None))
            parts = {part: own for own, part in root.named_modules() if own and not list(part.children())}
            names |= {part: own for part, own in parts.items() if type(part).__name__ not in _SILENT}
    handles += [part.register_forward_hook(hear) for part in names]
    try:
        yield
    finally:
        stop()


def _with_memory(steps: list[tuple[Tensor, Step]], *, values: bool) -> Iterator[Step]:
    """The steps, each as a view of the first whose memory it shares; with `values`, with a summary of their numbers."""
    owners: dict[int, str] = {}
    for tensor, step in steps:
        address = tensor.untyped_storage().data_ptr()
        owner = owners.get(address)
        owners.setdefault(address, step.site)
        layout: Any = "copy" if owner is None else "view"
        yield replace(step, layout=layout, view_of=owner, values=summarise(tensor) if values else None)


# ------------------------------------------------------------------------------------------------------------ the modules


def _step_of_module(name: str, module: nn.Module | None, tensor: Tensor, sizes: Mapping[str, int]) -> Step:
    """The step of a module's output, or of what enters the attention. Operations are counted as in the trace of a layer of mha:
    2 per weight and row, 1 for other numbers."""
    axes = _axes(name, tuple(tensor.shape), sizes)
    if module is None:
        formula, meaning = "what the layers before made", "a row of numbers per token"
        return step_of(name, tensor, axes=axes, formula=formula, meaning=meaning, flops=0)
    named = dict(module.named_parameters())
    flops, matrix = tensor.numel(), next((p for p in named.values() if p.ndim == 2), None)
    if matrix is not None:
        flops = 2 * tensor.numel() // tensor.shape[-1] * matrix.numel() + (len(named) - 1) * tensor.numel()
    return step_of(
        name,
        tensor,
        axes=axes,
        formula=_formula(name, module),
        meaning=type(module).__name__,
        flops=flops,
        parameters=tuple(WeightShape(f"{name}.{own}", tuple(p.shape)) for own, p in named.items()),
    )


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


def _axes(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a module's output, by the module's name and the sizes of axes."""
    short = name.rpartition(".")[2]
    length = "key" if short.startswith(("k", "v")) and sizes["key"] in shape[1:3] else "query"
    fitting = {sizes[axis]: axis for axis in ("kv_head", "head", "key", length)}
    axes = [fitting.get(size, "width") for size in shape]
    if shape[0] == sizes["batch"]:
        all_heads = {"q": "head d_head", "k": "kv_head d_head", "v": "kv_head d_v"}.get(short[:1], "d_model")
        known = {**sizes, "(head+2·kv_head)": sizes["head"] + 2 * sizes["kv_head"]}  # q, k and v by one projection
        words = (all_heads, "(head+2·kv_head) d_head", "d_model", "head d_v", "d_head")
        fits = [word for word in words if prod(known[axis] for axis in word.split()) == shape[-1]]
        axes[0], axes[-1] = "batch", "·".join(fits[0].split()) if fits else "width"
    elif shape[0] not in fitting:
        axes[0] = "rows"
    return tuple(axes)


# ------------------------------------------------------------------------------------------------------- the attention itself


def _inside(
    call: Call, attention: Attention, layer: InspectedLayer, before: list[str], theta: float | None
) -> Iterator[tuple[Tensor, Step]]:
    """The inputs of the attention and the matrices that follow from them, with their steps; those that the kernel does not
    compute are computed here. `before` are the names of the modules that ran before, `theta` is the base of a rotation."""
    made, cells = attention.matrices(), prod(attention.shape)

    def step(name: str, tensor: Tensor, axes: str, flops: int, *words: str, built: bool = True) -> tuple[Tensor, Step]:
        described: dict[str, Any] = dict(zip(("formula", "meaning"), words, strict=True))
        return tensor, step_of(name, tensor, axes=tuple(axes.split()), flops=flops, built=built, **described)

    def matrix(name: str, flops: int, *words: str) -> tuple[Tensor, Step]:
        return step(name, made[name], "batch head query key", flops, *words, built=layer.kernel in _BUILDING)

    if call.q is not None:
        (q, k, v), shared = call.qkv, layer.n_heads // layer.n_kv_heads
        said = f"; each is read by {shared} query heads in a row" if shared > 1 else ""
        rotation = "" if theta is None else f", rotated by its position (RoPE, base {theta:g})"
        for name, tensor, axes, meaning in (
            ("q", q, "batch head query d_head", "the queries of each head, as attention reads them"),
            ("k", k, "batch kv_head key d_head", f"what each token is found by{said}"),
        ):
            normed = ", normed" if any(own.startswith(name) and "norm" in own for own in before) else ""
            flops = 3 * tensor.numel() if rotation else 0  # two products and a sum for each number
            yield step(
                name, tensor, axes, flops, f"{name} = its projection{normed}, split into heads{rotation}", meaning
            )
        meaning = f"what each token contributes{said}"
        yield step("v", v, "batch kv_head key d_v", 0, "v = its projection, split into heads", meaning)
        meaning = "the dot product of every query with every key: how well they match"
        yield matrix("qk", 2 * cells * layer.d_head, "qk = q kᵀ", meaning)
        if call.mask is not None:
            formula = "True = may attend" if call.mask.dtype == torch.bool else "added to the scores"
            yield step("mask", call.mask, "batch head query key", 0, formula, layer.mask)
        if call.sinks is not None:
            axes = "head" if call.sinks.ndim == 1 else "batch head query"
            formula, meaning = f"a score per {axes.split()[-1]}", "takes part in the softmax and gives nothing"
            yield step("sinks", call.sinks, axes, 0, formula, meaning)
    yield matrix("scores", cells, _scores_formula(attention), f"what a query sees: {layer.mask}")
    formula, meaning = "pattern = softmax(scores) over the keys", "each query's row sums to 1 over its keys"
    if layer.sinks:
        formula, meaning = f"{formula} and the sink", "they sum to less than 1, because the sink logit takes the rest"
    yield matrix("pattern", 5 * cells, formula, f"the attention weights: {meaning}")
    if call.z is not None:
        meaning = f"what the model's own code made of it ({layer.captured_by}, {layer.kernel})"
        yield step("z", call.z, "batch head query d_v", 2 * cells * layer.d_v, "z = pattern v", meaning)


def _scores_formula(attention: Attention) -> str:
    if not isinstance(attention, ScoredAttention):
        return "scores as softmax reads them"
    scaled, c = f"{attention.scale:.6g} · qk", attention.softcap
    capped = scaled if c is None else f"{c:g} · tanh({scaled} / {c:g})"
    return f"scores = {capped}{'' if attention.bias is None else ' + position bias'}; −∞ where masked"


def follow_call(call: Call, attention: Attention, place: CellIndex, axes: Axes) -> Cell:
    """The computation of one cell of a captured attention. Raises `UsageError` for a cell outside, and if queries and keys
    were not captured."""
    if call.q is None:
        raise UsageError("--cell needs the layer's queries and keys, and only its softmax could be captured")
    n_heads, (sequence, head, query, key), parts = call.shape[1], place, tuple[ScorePart, ...]()
    require_inside(place, n_heads, axes.queries, axes.keys)
    at = query + axes.first_query(sequence), key + axes.first_key(sequence)
    if isinstance(attention, ScoredAttention) and attention.bias is not None:
        row, column = (torch.tensor([index]) for index in at)
        added = attention.bias(sequence, range(head, head + 1), row, column).item()
        parts = (ScorePart("position bias", "position", finite(added), added=True),)
    q, k, v = (per_query_head(tensor, n_heads) for tensor in call.qkv)
    made = attention.matrices()
    assert call.z is not None
    tensors = made | {"q": q, "k": k, "v": v, "z": call.z, "shares": made["pattern"]}
    return cell_of(axes, place, at, tensors, scale=call.scale, softcap=call.softcap, parts=parts)
