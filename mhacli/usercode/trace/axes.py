"""Names the axes of a user's tensors by comparing their sizes with those of the inputs.

One size may have several meanings. Further runs with other sizes distinguish them. An axis gets the name that fits every run:
an axis word, or a product of axis words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.usercode.arguments import role_of
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.inputs import InputDrawer
from mhacli.usercode.trace.dataflow import KERNEL, AttentionOperations, Dataflow, Roles, axis_order, einsum_letters
from mhacli.usercode.types import Built, Inputs, InputSizes, MaskForm, Operation

# ----------------------------------------------------------------------------------------------------- sizes of the inputs


_WIDTHS = (6, 10, 14, 4, 12, 16)
"""Head widths for a rebuild, even for rotary positions."""
_COUNTS = (5, 3, 7, 4, 2)
_OF_WIDTH = ("d_model", "d_out")


@dataclass(frozen=True)
class TraceSizes:
    """The sizes and the mask of one call, with the number of heads for a function."""

    batch: int
    q_len: int
    k_len: int
    d_in: int
    d_context: int
    n_heads: int | None = None
    takes_context: bool = False
    mask: MaskForm | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes by axis word."""
        lengths = {"batch": self.batch, "query": self.q_len, "key": self.k_len}
        if self.n_heads is not None:
            return {**lengths, "head": self.n_heads, "d_head": self.d_in}
        return {**lengths, "d_model": self.d_in, **({"d_context": self.d_context} if self.takes_context else {})}

    def inputs(self, seed: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        """Random inputs of these sizes, the same for the same seed."""
        is_function = self.n_heads is not None
        sizes = InputSizes(self.batch, self.q_len, self.k_len, self.d_in, self.d_context)
        drawer = InputDrawer(
            sizes, seed=seed, n_heads=self.n_heads, sample_dtype=torch.float32, dtype=dtype, device=device
        )
        has_keys = self.takes_context or is_function
        inputs = drawer.inputs(with_context=True) if has_keys else Inputs(drawer.rows(self.q_len))
        if self.mask is not None:
            positions = torch.arange(max(self.q_len, self.k_len), device=device)
            allowed = (positions[: self.k_len] <= positions[: self.q_len, None])[None, None]
            return inputs._replace(allowed=allowed)
        return inputs


def first_sizes(subject: UserAttention, *, causal: bool) -> TraceSizes:
    """The sizes of the first call, with a separate context if the subject takes one. With `causal`, a mask makes it causal
    unless an argument does; there are then as many keys as queries."""
    sizes = subject.sizes
    mask = subject.mask_forms[0] if causal and subject.causal_by is None and subject.mask_forms else None
    takes_context = subject.takes_context and not causal
    k_len = sizes.k_len if takes_context else sizes.q_len
    n_heads = subject.n_heads if subject.is_function else None
    return TraceSizes(sizes.batch, sizes.q_len, k_len, sizes.d_in, sizes.d_context, n_heads, takes_context, mask)


def other_lengths(call_sizes: TraceSizes) -> TraceSizes:
    """Another batch size and shorter lengths, because a module may have a maximal length."""
    q_len = max(2, call_sizes.q_len - 2)
    k_len = max(2, call_sizes.k_len - 3) if call_sizes.takes_context else q_len
    return replace(
        call_sizes, batch=call_sizes.batch + 2, q_len=q_len, k_len=k_len + (k_len == q_len and call_sizes.takes_context)
    )


def other_heads(call_sizes: TraceSizes) -> TraceSizes:
    """For a function, more and wider heads; a function without heads keeps one."""
    n_heads = call_sizes.n_heads or 1
    return replace(
        call_sizes,
        n_heads=n_heads if n_heads == 1 else n_heads + 2,
        d_in=call_sizes.d_in + 2,
        d_context=call_sizes.d_context + 2,
    )


def other_widths(built: Built) -> Iterator[Mapping[str, Any]]:
    """Constructor arguments for other heads and widths, the likeliest to work first; empty if no argument is a size."""
    roles = _roles(built)
    if not roles:
        return
    old = {role: value for role, (_, value) in roles.items()}
    old_heads, old_kv_heads = old.get("n_heads", 1), old.get("n_kv_heads")
    old_width = old.get("d_head") or old.get("d_model", 0) // max(1, old_heads)
    for width in _WIDTHS:
        for count in _COUNTS:
            group = (
                1 if old_kv_heads in (None, old_heads) else 2 if width == 6 else 3
            )  # differs from half the head width
            n_heads = count * group if "n_heads" in old else 1
            if width in (old_width, n_heads) or (n_heads == old_heads and "n_heads" in old):
                continue
            new = {"n_heads": n_heads, "n_kv_heads": count, "d_head": width}
            new["d_v"] = width if old.get("d_v") == old.get("d_head") else width + 1
            for role in _OF_WIDTH:
                new[role] = n_heads * width + (0 if old.get(role) == old_heads * old_width else width)
            yield _changes(built, new)


def _roles(built: Built) -> dict[str, tuple[str, int]]:
    """The first size argument of each role, with its value."""
    roles: dict[str, tuple[str, int]] = {}
    for name, value in _counts(built):
        role = role_of(name.rpartition(".")[2], frozenset(built.arguments))
        if role is not None:
            roles.setdefault(role, (name, value))
    return {
        role: argument
        for role, argument in roles.items()
        if role in ("n_heads", "n_kv_heads", "d_head", "d_v", *_OF_WIDTH)
    }


def _counts(built: Built) -> Iterator[tuple[str, int]]:
    for name, value in built.arguments.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _changes(built: Built, new: Mapping[str, int]) -> Mapping[str, Any]:
    names = frozenset(built.arguments)
    changes = {}
    for name, _ in _counts(built):
        role = role_of(name.rpartition(".")[2], names)
        if role is not None and role in new:
            changes[name] = new[role]
    return changes


def expected_of(call_sizes: TraceSizes, out: Tensor) -> tuple[int, ...]:
    """The expected output shape: a vector for each query, of any width."""
    width = out.shape[-1] if out.ndim else 1
    heads = () if call_sizes.n_heads is None else (call_sizes.n_heads,)
    expected = (call_sizes.batch, *heads, call_sizes.q_len, width)
    is_lost = prod(out.shape) % max(1, prod(expected[:-1]))
    return (*expected[:-1], call_sizes.d_in) if is_lost or out.ndim != len(expected) else expected


# ------------------------------------------------------------------------------------------------------------------ axes


WORDS = ("batch", "head", "kv_head", "query", "key", "d_head", "d_v", "d_model", "d_context")
_TWINS = (("kv_head", "head"), ("d_v", "d_head"), ("key", "query"), ("d_context", "d_model"))
"""Words that mean the same as another word if their sizes never differ."""
_CONCATENATED = ("q_proj", "k_proj", "v_proj", "qkv", "kv", "qk_proj", "concat", "q", "k", "v")
"""Sites whose last axis is concatenated heads, even if it has the size of d_model."""
_FUSED = "(head+2·kv_head)·d_head"
WordSizes = Mapping[str, int]
"""The size of each axis word in a run."""


class MeasuredRun(NamedTuple):
    """A run: the size of each axis word, and the shape and the number of operations at each location."""

    sizes: WordSizes
    shapes: Mapping[object, tuple[int, ...]]
    counts: Mapping[object, int]


def sizes_of(flow: Dataflow, roles: Roles, call_sizes: WordSizes) -> WordSizes:
    """The sizes of the inputs, and the head counts and widths that the run shows."""
    sizes = dict(call_sizes)
    if not roles.attentions:
        return sizes
    first = roles.attentions[0]
    d_head = _contracted(flow, first)
    n_scores = _count_scores(flow, roles)
    plane = call_sizes["batch"] * call_sizes["query"] * call_sizes["key"]
    if d_head:
        sizes.setdefault("d_head", d_head)
    if n_scores and not n_scores % plane:
        sizes.setdefault("head", n_scores // plane)
    sizes.setdefault("d_v", _width_of_values(flow, first) or sizes.get("d_head", 0))
    sizes.setdefault("kv_head", _kv_heads(flow, roles, sizes))
    return {word: size for word, size in sizes.items() if size}


def _contracted(flow: Dataflow, attention: AttentionOperations) -> int | None:
    """The width of the dot products."""
    if attention.qk is None:
        return None
    operation = flow.operations[attention.qk]
    if operation.name == "einsum":
        letters = einsum_letters(operation.arguments.get("equation", ""), [t.ndim for t in operation.inputs])
        if letters is None or len(letters) != 3:
            return None
        sizes = dict(zip(letters[0], operation.inputs[0].shape, strict=True))
        return prod(sizes[x] for x in letters[0] if x in letters[1] and x not in letters[2])
    input_idx = 1 if operation.name == "baddbmm" else 0
    return int(operation.inputs[input_idx].shape[-1])


def _count_scores(flow: Dataflow, roles: Roles) -> int:
    """The number of scores at the line of the first softmax."""
    first = flow.operations[roles.attentions[0].softmax]
    total = 0
    for attention in roles.attentions:
        operation = flow.operations[attention.softmax]
        if (operation.file, operation.line, operation.name) != (first.file, first.line, first.name):
            continue
        if operation.name == KERNEL:
            queries, keys = operation.inputs[:2]
            total += queries.numel() // max(1, queries.shape[-1]) * keys.shape[-2]
        else:
            total += operation.output.numel()
    return total


def _width_of_values(flow: Dataflow, attention: AttentionOperations) -> int | None:
    if attention.z is None or flow.operations[attention.z].name == "einsum":
        return None
    operation = flow.operations[attention.z]
    return int(operation.inputs[2 if operation.name == KERNEL else -1].shape[-1])


def _kv_heads(flow: Dataflow, roles: Roles, sizes: WordSizes) -> int:
    """The number of kv heads, from the size of the key projection if possible."""
    n_heads, d_head = sizes.get("head", 0), sizes.get("d_head", 0)
    projections = [(index, site) for index, site in roles.sites.items() if site in ("k_proj", "kv", "qkv")]
    if not projections or not d_head:
        return n_heads
    site = projections[0][1]
    line = flow.operations[projections[0][0]].line
    projected = [flow.operations[index] for index, other in projections if other == site]
    n_numbers = sum(operation.output.numel() for operation in projected if operation.line == line)
    n_vectors = n_numbers / (sizes["batch"] * sizes["key"] * d_head)
    count = {"k_proj": n_vectors, "kv": n_vectors / 2, "qkv": (n_vectors - n_heads) / 2}[site]
    return int(count) if count >= 1 and count == int(count) and not n_heads % int(count) else n_heads


# -------------------------------------------------------------------------------------------------------------- naming


def known_words(runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """The axis words with distinct sizes in these runs."""
    words = [word for word in WORDS if all(word in run.sizes for run in runs)]
    for twin, word in _TWINS:
        if twin in words and word in words and all(run.sizes[twin] == run.sizes[word] for run in runs):
            words.remove(twin)
    return tuple(words)


def axes_of(location: object, site: str, runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """The axis names of the tensor at a location, from all runs with as many axes there."""
    shape = runs[0].shapes[location]
    matching_runs = [run for run in runs if len(run.shapes.get(location, ())) == len(shape)]
    words = known_words(runs)
    axes = [
        name_of([run.shapes[location][axis] for run in matching_runs], matching_runs, words)
        for axis in range(len(shape))
    ]
    has_heads = site.partition(".")[0] in _CONCATENATED or site.startswith("z.")
    if has_heads and axes and {"head", "d_head"} <= set(words):
        axes[-1] = _as_heads(axes[-1], site, runs, words)
    return tuple(axes)


def _as_heads(axis: str, site: str, runs: Sequence[MeasuredRun], words: Sequence[str]) -> str:
    """The axis as concatenated heads, if that has the size of d_model."""
    heads = "kv_head" if site.startswith(("k", "v")) and "kv_head" in words else "head"
    width = "d_v" if site.startswith(("v", "z", "concat")) and "d_v" in words else "d_head"
    if not all(run.sizes["d_model"] == run.sizes[heads] * run.sizes[width] for run in runs if "d_model" in run.sizes):
        return axis
    named = {"d_model": f"{heads}·{width}"} | {f"{n}·d_model": f"{n}·{heads}·{width}" for n in (2, 3)}
    return named.get(axis, axis)


def name_of(sizes: Sequence[int], runs: Sequence[MeasuredRun], words: Sequence[str]) -> str:
    """The simplest name with these sizes in these runs, or the two simplest if both fit."""
    for candidates in _candidates(words):
        matching = [
            name for name in candidates
            if all(_value(name, run.sizes) == size for size, run in zip(sizes, runs, strict=True))
        ]  # fmt: skip
        if matching:
            return "|".join(matching[:2])
        if set(sizes) == {1}:
            return "single"
    return "part" if len(runs) > 1 and len(set(sizes)) == 1 else "width"


def _value(name: str, sizes: WordSizes) -> float:
    """The size of an axis name."""
    if name == _FUSED:
        return float((sizes["head"] + 2 * sizes["kv_head"]) * sizes["d_head"])
    name, _, divisor = name.partition("/")
    name, _, addend = name.partition("+")
    size = prod(int(word) if word.isdigit() else sizes[word] for word in name.split("·"))
    return size / (int(divisor) if divisor.isdigit() else sizes[divisor] if divisor else 1) + int(addend or 0)


def _candidates(words: Sequence[str]) -> Iterator[list[str]]:
    """The possible axis names in groups, the simplest first."""
    pairs = list(combinations(words, 2))
    usual_products = ["·".join(pair) for pair in pairs if _is_usual(pair)]
    widths = [word for word in words if word.startswith("d_")]
    has_groups = "kv_head" in words and {"head", "d_head"} <= set(words)
    yield list(words)
    yield usual_products
    yield [f"{n}·{width}" for n in (2, 3) for width in widths]
    yield ["head/kv_head", _FUSED] if has_groups else []
    yield [f"{n}·{name}" for n in (2, 3) for name in usual_products if "d_" in name]
    yield [f"{width}/2" for width in widths]
    yield [f"{n}·{width}" for n in (4,) for width in widths] + [f"{w}+1" for w in words if w in ("key", "query")]
    yield ["·".join(pair) for pair in pairs]
    yield ["·".join(words_of_product) for words_of_product in combinations(words, 3)]


def _is_usual(pair: tuple[str, str]) -> bool:
    """Whether two words are often merged into one axis."""
    return pair in (
        ("head", "d_head"), ("head", "d_v"), ("kv_head", "d_head"), ("kv_head", "d_v"), ("batch", "head"),
        ("batch", "kv_head"), ("batch", "query"), ("batch", "key"),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- equal lengths


def distinguish_lengths(
    flow: Dataflow, roles: Roles, axes: Mapping[int, tuple[str, ...]]
) -> dict[int, tuple[str, ...]]:
    """The axes of each operation in self-attention, where only the operations tell queries from keys."""
    products = {attention.qk: attention.is_swapped for attention in roles.attentions if attention.qk is not None}
    distinguished: dict[int, tuple[str, ...]] = {}
    for index in range(len(flow.operations)):
        named = axes[index]
        n_lengths = named.count("query")
        if n_lengths == 1 and "key" not in named and _is_of_keys(roles.sites.get(index, "")):
            distinguished[index] = tuple("key" if axis == "query" else axis for axis in named)
        elif n_lengths == 2:
            order = _order(flow, index, products, distinguished)
            rest = iter(order)
            distinguished[index] = tuple(next(rest) if axis == "query" else axis for axis in named)
        else:
            distinguished[index] = named
    return distinguished


def _is_of_keys(site: str) -> bool:
    return site.partition(".")[0] in ("k", "v", "kᵀ", "k_proj", "v_proj", "kv")


def _order(
    flow: Dataflow, index: int, products: Mapping[int, bool], distinguished: Mapping[int, tuple[str, ...]]
) -> tuple[str, ...]:
    """The order of two axes of the same length."""
    operation = flow.operations[index]
    if index in products:
        is_transposed = products[index] != _puts_second_first(operation.arguments.get("equation"), operation)
        return ("key", "query") if is_transposed else ("query", "key")
    for source in flow.made_by[index]:
        lengths = (
            tuple(axis for axis in distinguished.get(source, ()) if axis in ("query", "key"))
            if source is not None
            else ()
        )
        if len(lengths) == 2 and source is not None:
            return lengths[::-1] if _swaps_lengths(operation, distinguished[source]) else lengths
    return ("query", "key")


def _puts_second_first(equation: object, operation: Operation) -> bool:
    """Whether an einsum puts the length of its second operand before that of its first."""
    letters = einsum_letters(equation, [tensor.ndim for tensor in operation.inputs])
    if letters is None or len(letters) != 3:
        return False
    operands = [next((n for n, term in enumerate(letters[:2]) if x in term and x not in letters[1 - n]), None)
           for x in letters[2]]  # fmt: skip
    order = [n for n in operands if n is not None]
    return order[:2] == [1, 0]


def _swaps_lengths(operation: Operation, before: Sequence[str]) -> bool:
    lengths = [axis for axis, name in enumerate(before) if name in ("query", "key")]
    return operation.name in ("transpose", "permute") and [n for n in axis_order(operation) if n in lengths] != lengths
