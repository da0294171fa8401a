"""The steps of a recorded call: each tensor with named axes, its formula, its cost and a remark on a likely error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from mhacli.attention.taps import step_of, summarise
from mhacli.record.record import Step, TensorSummary, WeightShape
from mhacli.sites import SITES
from mhacli.usercode.operations import address_of
from mhacli.usercode.trace.graph import KERNEL, SOFTMAXES, Graph, is_transpose
from mhacli.usercode.types import Operation

_MAX_STEPS = 400


def steps_of(graph: Graph, sizes: Mapping[str, int], *, values: bool) -> tuple[Step, ...]:
    """A step for each input, then for each line and torch function in order of first execution. `sizes` are the sizes of the axis
    words."""
    names = _names_by_size(sizes)
    steps = []
    for name, tensor in graph.given.items():
        drawn = "True where a query may see a key" if name == "mask" else "N(0, 1) from the seed"
        step = step_of(
            name,
            tensor,
            axes=_axes_of(tensor, names, name),
            formula=f"{name} = {drawn}",
            meaning=_meaning(name, ()),
            flops=0,
            values=_summary(tensor) if values else None,
        )
        steps.append(step)
    axes = _axes(graph, names)
    groups: dict[object, list[int]] = {}
    for index, operation in enumerate(graph.operations):
        place = (operation.file, operation.line, operation.name, graph.sites[index], operation.output.ndim)
        groups.setdefault(place, []).append(index)
    for indices in groups.values():
        is_loop = len(indices) > 1 and len(indices) == sizes.get("head")
        step = _step(graph, indices, axes, values=values)
        steps.append(replace(step, repeats_of="head" if is_loop else ""))
    return tuple(steps[:_MAX_STEPS])


def _step(graph: Graph, indices: Sequence[int], axes: Sequence[tuple[str, ...]], *, values: bool) -> Step:
    """The step of operations at one line, with the tensor of the first and the costs of all."""
    index = indices[0]
    operation, site = graph.operations[index], graph.sites[index]
    view_of = _view_of(graph, index)
    remark = _remark(graph, index, axes)
    weights = [weight for n in indices for weight in graph.weights(n).items()]
    step = step_of(
        site,
        operation.output,
        axes=axes[index],
        formula=f"{site} = {_formula(graph, index, axes[index])}",
        meaning="" if remark else _meaning(site, axes[index]),
        is_view=view_of is not None,
        flops=sum(_flops(graph.operations[n]) for n in indices),
        view_of=view_of,
        parameters=tuple(dict.fromkeys(WeightShape(name, tuple(tensor.shape)) for name, tensor in weights)),
        values=_summary(operation.output) if values else None,
        operation=operation.name,
        file=operation.file,
        line=operation.line,
        source=operation.source,
        remark=remark,
        repeats=len(indices),
    )
    n_numbers = sum(graph.operations[n].output.numel() for n in indices)
    return replace(step, bytes=n_numbers * operation.output.element_size())


def _summary(tensor: Tensor) -> TensorSummary:
    return summarise(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


def _view_of(graph: Graph, index: int) -> str | None:
    """The name of the first input that shares memory with the output, or of the tensor that is written in place."""
    operation = graph.operations[index]
    is_in_place = operation.name == "setitem" or operation.name.endswith("_")
    address = address_of(operation.output)
    shared = [
        n for n, tensor in enumerate(operation.inputs) if is_in_place or (address and address_of(tensor) == address)
    ]
    return graph.name_of(index, shared[0]) if shared else None


# ------------------------------------------------------------------------------------------------------------------ axes


_WORDS = ("batch", "head", "kv_head", "query", "key", "d_head", "d_v", "d_model", "d_context")
_PRODUCTS = (
    "head·d_head", "head·d_v", "kv_head·d_head", "kv_head·d_v", "batch·head", "batch·kv_head", "batch·query", "batch·key",
    "2·d_model", "3·d_model", "4·d_model", "2·d_head", "2·head·d_head", "3·head·d_head", "2·kv_head·d_head",
    "batch·head·query", "batch·head·key",
)  # fmt: skip
"""Merged axes, the usual ones first."""
_OF_KEYS = ("k", "v", "kᵀ", "k_proj", "v_proj", "kv")
_OF_PAIRS = ("qk", "scores", "pattern")


def _names_by_size(sizes: Mapping[str, int]) -> Mapping[int, list[str]]:
    """The names that an axis of each size may have, the simplest first."""
    names: dict[int, list[str]] = {}
    for name in (*_WORDS, *_PRODUCTS):
        factors = [int(word) if word.isdigit() else sizes.get(word, 0) for word in name.split("·")]
        names.setdefault(prod(factors), []).append(name)
    names.setdefault(sizes.get("d_head", 0) // 2, []).append("d_head/2")
    names.setdefault(sizes["key"] + 1, []).append("key+1")
    return {size: named for size, named in names.items() if size}


def _axes_of(tensor: Tensor, names: Mapping[int, list[str]], site: str) -> tuple[str, ...]:
    """The axes of the tensor of a site. A name occurs once. Of names with one size, keys have no query, scores have no width, and
    the last axis of another tensor is a width."""
    axes: list[str] = []
    group = site.partition(".")[0]
    for size in tensor.shape:
        possible = [name for name in names.get(size, ()) if name not in axes]
        if group in _OF_KEYS and "key" in possible:
            possible = ["key"]
        widths = [name for name in possible if name.startswith("d_")]
        if group in _OF_PAIRS:
            possible = [name for name in possible if name not in widths]
        elif widths and len(axes) == tensor.ndim - 1:
            possible = widths
        unknown = "single" if size == 1 else "part" if size <= 3 else "width"
        axes.append(possible[0] if possible else unknown)
    return tuple(axes)


def _axes(graph: Graph, names: Mapping[int, list[str]]) -> list[tuple[str, ...]]:
    """The axes of each operation's output. In self-attention, the operations tell queries from keys."""
    axes: list[tuple[str, ...]] = []
    has_keys_first: list[bool] = []
    other = {"query": "key", "key": "query"}
    lengths = {"query", "key"}
    has_equal_lengths = any(lengths <= {*named} for named in names.values())
    for index, operation in enumerate(graph.operations):
        named = _axes_of(operation.output, names, graph.sites[index])
        are_first = any(has_keys_first[source] for source in graph.sources[index] if source is not None)
        is_swapped = index in graph.swapped or are_first != is_transpose(operation)
        has_keys_first.append(has_equal_lengths and lengths <= {*named} and is_swapped)
        axes.append(tuple(other.get(axis, axis) for axis in named) if has_keys_first[index] else named)
    return axes


# --------------------------------------------------------------------------------------------------------------- formula


_SIGNS: Mapping[str, str] = {
    "add": "+", "sub": "−", "mul": "·", "div": "/", "pow": "^", "eq": "==", "ne": "≠", "lt": "<", "le": "≤", "gt": ">",
    "ge": "≥", "logical_and": "and", "logical_or": "or",
}  # fmt: skip


def _formula(graph: Graph, index: int, axes: Sequence[str]) -> str:
    """The operation as a formula of named inputs."""
    operation, bare = graph.operations[index], graph.operations[index].name.rstrip("_")
    names = [graph.name_of(index, n) for n in range(len(operation.inputs))]
    arguments = {
        name: _text(value)
        for name, value in operation.arguments.items()
        if value is not None and name not in ("output", "dtype")
    }
    if bare == "linear":
        return f"{names[0]} Wᵀ" + (" + b" if len(names) > 2 else "")
    if bare in ("matmul", "bmm", "mm"):
        return " ".join(names)
    if operation.name in SOFTMAXES:
        return f"{bare}({names[0]}) over {_softmax_axis(operation, axes)}"
    if "output" in operation.arguments:
        return f"part {int(operation.arguments['output']) + 1} of {', '.join(names[:3])}, by {bare}"
    if bare in _SIGNS:
        left = arguments.pop("input", None)
        return f" {_SIGNS[bare]} ".join([*([] if left is None else [left]), *names, *arguments.values()])
    more = [] if len(names) <= 3 else [f"… {len(names) - 3} more"]
    given = [text if name.isdigit() else f"{name}={text}" for name, text in arguments.items()]
    return f"{bare}({', '.join([*names[:3], *more, *given])})"


def _text(value: object) -> str:
    """An argument as a reader writes it."""
    if isinstance(value, float):
        return {float("inf"): "∞", float("-inf"): "−∞"}.get(value, f"{value:.6g}".replace("-", "−"))
    if isinstance(value, slice):
        return ":".join("" if end is None else str(end) for end in (value.start, value.stop))
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return "…" if value is Ellipsis else str(value)[:40]


def _meaning(site: str, axes: Sequence[str]) -> str:
    """The purpose of a site in one sentence, as of mha's own layer; empty for an unknown site."""
    is_of_one_head = site.endswith("_proj") and axes[-1:] == ("d_head",)
    site = site.replace("_proj", "_per_head") if is_of_one_head else site
    explanation = SITES[site].words.explanation if site in SITES else ""
    return re.split("[<{]", explanation)[0].rstrip(" :,")


# --------------------------------------------------------------------------------------------------------------- remarks


def _remark(graph: Graph, index: int, axes: Sequence[tuple[str, ...]]) -> str:
    """A remark on a likely error: a softmax over another axis than the keys, or a view that mixes axes."""
    operation, named = graph.operations[index], axes[index]
    if operation.name in SOFTMAXES and graph.sites[index].startswith("pattern"):
        axis = _softmax_axis(operation, named)
        remark = f"the softmax runs over {axis}, not over key: the weights of a query do not sum to 1"
        return "" if "key" in re.split("[·+]", axis) else remark
    source = graph.sources[index][0] if operation.name in ("view", "reshape", "flatten", "unflatten") else None
    words = None if source is None else _exchanged(axes[source], named)
    text = f"a {operation.name} keeps the numbers in their order, and cannot exchange"
    return "" if words is None else f"{text} {' and '.join(words)}: they are mixed"


def _softmax_axis(operation: Operation, axes: Sequence[str]) -> str:
    """The axis of a softmax."""
    dim = operation.arguments.get("dim")
    if dim is None:  # torch's legacy default
        dim = 0 if operation.output.ndim in (0, 1, 3) else 1
    return axes[dim] if isinstance(dim, int) and -len(axes) <= dim < len(axes) else str(dim)


def _exchanged(before: Sequence[str], after: Sequence[str]) -> tuple[str, str] | None:
    """Two words that a view would have to exchange in memory, None if it is valid. The order within a merged axis is unknown."""
    old, new = _words_up_to_each_axis(before), _words_up_to_each_axis(after)
    if set(old) != {0} and old[max(old)] != new.get(max(old)):
        return None  # the words are not the same
    for count in sorted(set(old) & set(new)):
        if old[count] != new[count]:
            return min(old[count] - new[count]), min(new[count] - old[count])
    return None


def _words_up_to_each_axis(axes: Sequence[str]) -> dict[int, frozenset[str]]:
    """The words of the first axes, by their number. Axes of size 1, and that of q, k and v, have none."""
    words: list[str] = []
    found = {0: frozenset[str]()}
    for axis in axes:
        parts = axis.replace("d_model", "head·d_head").split("·")
        words += [part for part in parts if not part.isdigit() and part not in ("single", "part")]
        found[len(words)] = frozenset(words)
    return found


# ----------------------------------------------------------------------------------------------------------------- costs


_PER_NUMBER: Mapping[str, int] = {
    "softmax": 5, "log_softmax": 5, "add": 1, "sub": 1, "mul": 1, "div": 1, "exp": 1, "tanh": 1, "neg": 1, "pow": 1,
    "sqrt": 1, "rsqrt": 1, "sigmoid": 1, "cos": 1, "sin": 1, "relu": 1, "gelu": 1, "dropout": 2,
}  # fmt: skip
"""Floating-point operations for each element of the result, counted as for mha's own layer."""


def _flops(operation: Operation) -> int:
    """Floating-point operations, 2 for a multiply-add, 1 otherwise; 0 if unknown."""
    n_out, name = operation.output.numel(), operation.name.rstrip("_")
    equation = str(operation.arguments.get("equation", "")).replace(" ", "")
    if name == "einsum" and "->" in equation:
        operands, _, result = equation.partition("->")
        letters = operands.partition(",")[0]
        sizes = [operation.inputs[0].shape[n - len(letters)] for n, x in enumerate(letters) if x not in f"{result}."]
        return 2 * n_out * prod(sizes)
    if name in ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm"):
        width = operation.inputs[1 if name in ("addmm", "baddbmm") else 0].shape[-1]
        return n_out * (2 * width + (len(operation.inputs) > 2))
    if name == KERNEL:
        queries, keys, values = operation.inputs[:3]
        n_cells = queries.numel() // max(1, queries.shape[-1]) * keys.shape[-2]
        return n_cells * (2 * queries.shape[-1] + 6 + 2 * values.shape[-1])
    return _PER_NUMBER.get(name, 0) * n_out
