"""`mha trace FILE.py:NAME`: every tensor of a user's attention with named axes, its source line,
formula, cost and a remark.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.environment import environment
from mhacli.attention.taps import step_of, summarise
from mhacli.errors import MhaError
from mhacli.io.data import decode
from mhacli.record.checks import SelfCheck
from mhacli.record.exports import HeadTable
from mhacli.record.record import Record, Step, UserModule, WeightShape
from mhacli.record.sites import SITES
from mhacli.settings import Config
from mhacli.text.tokens import places
from mhacli.usercode.build import arguments_of, load_built
from mhacli.usercode.copies import copied
from mhacli.usercode.door import first_that_works
from mhacli.usercode.find_call import find_modes
from mhacli.usercode.graph import (
    KERNEL,
    SOFTMAXES,
    Operation,
    RecordedCall,
    address_of,
    recorded,
    writes_into_input,
)
from mhacli.usercode.process import Stage
from mhacli.usercode.projections import parts_of
from mhacli.usercode.roles import stated
from mhacli.usercode.target import TargetRequest, split_target
from mhacli.usercode.text_model import text_model_of_ids
from mhacli.usercode.user_attention import UserAttention

_TOLERANCE = 1e-4
"""Relative to the largest output. A recorded `nn.MultiheadAttention` takes its slow path, which
sums in another order."""


def trace_request(request: Mapping[str, Any], stage: Stage) -> Mapping[str, Any]:
    """The document of one call of a user's attention, with a step for each operation, without
    arrays. The request has the target, whether to summarise `values`, and the command line. If it
    must be causal, there is no context, and a mask makes it causal unless an argument does. Raises
    `MhaError` if the target cannot be imported, built or called.
    """
    target = decode(TargetRequest, request["target"], "request")
    subject = _subject(target, stage)
    plain = subject.with_call(copied(subject.built.call))
    with_context = subject.takes_context and not target.causal
    inputs = subject.drawer(target.seed).inputs(with_context=with_context)
    mask = None
    if target.causal and subject.causal_by is None and subject.mask_forms:
        mask = subject.mask_forms[0]
        pairs = torch.ones(1, 1, *inputs.lengths[1:], dtype=torch.bool)
        inputs = inputs._replace(allowed=pairs.tril())
    call = recorded(subject, inputs, target.seed, mask=mask)
    unrecorded = plain(inputs, mask=mask, seed=target.seed)
    largest = float(unrecorded.abs().nan_to_num().amax())
    error = float((call.out - unrecorded).abs().nan_to_num().amax())
    are_finite = torch.equal(call.out.isfinite(), unrecorded.isfinite())
    sizes = _sizes(call, subject)
    queries, keys = places(sizes["query"]), places(sizes["key"])
    has_context = not subject.is_function and inputs.keys is not None
    record = Record(
        command=tuple(request["command"]),
        config=_config(subject, target, call, sizes),
        sequences=(queries,) * sizes["batch"],
        context=(keys,) * sizes["batch"] if has_context else None,
        vocabulary=keys.tokens if has_context else queries.tokens,
        trace=_steps(call, sizes, values=request["values"]),
        heads=HeadTable(),
        timings={},
        self_check=SelfCheck.of(error, _TOLERANCE * max(1.0, largest), holds=are_finite),
        environment=environment(subject.device, target.device),
        module=UserModule(
            target=target.target,
            arguments=arguments_of(subject.built),
            called=replace(subject, forms=() if mask is None else (mask,)).described,
            sizes=tuple(
                (word, size)
                for word, size in sizes.items()
                if word != "key" or size != sizes["query"]
            ),
            n_runs=1,
            result=tuple(call.out.shape),
            expected=(*inputs.queries.shape[:-1], *call.out.shape[-1:]),
        ),
    )
    return record.document()


def _subject(target: TargetRequest, stage: Stage) -> UserAttention:
    """The attention that a target is. Raises `MhaError` for a whole model, with what to type."""
    built = load_built(target, stage)
    try:
        return find_modes(built, target)[-1]
    except MhaError:
        if text_model_of_ids(built, target) is None:
            raise
    location, _ = split_target(target.target)
    classes = dict.fromkeys(type(part).__name__ for part in built.parts.values())

    def traced(other: str) -> str:
        request = TargetRequest(other, device=target.device)
        find_modes(load_built(request, stage), request)
        return f"; mha trace {shlex.quote(other)} traces its attention"

    inside = [f"{location}:{each}" for each in classes if "att" in each.lower()]
    hint = f"mha check {shlex.quote(target.target)} examines a whole model"
    raise built.refusal(
        f"{target.target} takes token ids: it is a whole model; mha trace follows one attention",
        hint + (first_that_works(inside, traced) or ""),
    )


def _sizes(call: RecordedCall, subject: UserAttention) -> dict[str, int]:
    """The size of each axis word: those of the inputs, and the head counts and widths that the run
    and the arguments show.
    """
    batch, n_queries, n_keys = call.inputs.lengths
    width, keys = call.inputs.queries.shape[-1], call.inputs.keys
    sizes = {"batch": batch, "query": n_queries, "key": n_keys}
    if subject.is_function:
        sizes |= {"head": call.inputs.queries.shape[1], "d_head": width}
    else:
        sizes["d_model"] = width
    if keys is not None and keys.shape[-1] != width:
        sizes["d_context"] = keys.shape[-1]
    if not call.attentions:
        return sizes
    products = [attention.get("qk", attention["z"]) for attention in call.attentions]
    d_v = call.attentions[0]["z"].output.shape[-1]
    sizes.setdefault("d_head", products[0].live_sources[0].output.shape[-1])
    n_numbers = sum(
        each.output.numel() for each in products if each.output.shape == products[0].output.shape
    )
    n_rows = batch * n_queries * (n_keys if "qk" in call.attentions[0] else d_v)
    sizes.setdefault("head", max(1, n_numbers // max(1, n_rows)))
    n_kv_heads = stated(subject.built.arguments, "n_kv_heads")
    is_fewer = isinstance(n_kv_heads, int) and 0 < n_kv_heads < sizes["head"]
    if is_fewer and sizes["head"] % n_kv_heads == 0:
        sizes["kv_head"] = n_kv_heads
    if d_v != sizes["d_head"]:
        sizes["d_v"] = d_v
    return sizes


def _config(
    subject: UserAttention, request: TargetRequest, call: RecordedCall, sizes: Mapping[str, int]
) -> Config:
    """A config with the known facts: sizes, biases, output projection. Unknown heads count as one;
    positions are none.
    """
    n_heads, d_head = sizes.get("head", 1), sizes.get("d_head")
    return Config(
        d_model=sizes.get("d_model", n_heads * (d_head or 1)),
        n_heads=n_heads,
        n_kv_heads=sizes.get("kv_head", n_heads),
        d_head=d_head,
        d_v=sizes.get("d_v", d_head),
        bias=any(part.bias is not None for part in parts_of(subject.built.module, {})),
        out_proj=any(operation.site == "out" for operation in call.operations),
        positions="none",
        causal=request.causal,
        dtype=str(subject.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        device=request.device,
        seed=request.seed,
        random=(sizes["batch"], sizes["query"]),
    ).resolved()


# -------------------------------------------------------------------------------------------- steps


def _steps(call: RecordedCall, sizes: Mapping[str, int], *, values: bool) -> tuple[Step, ...]:
    """A step for each input, then for each line and torch function in order of first execution.
    `sizes` are the sizes of the axis words. In self-attention, the operations tell queries from
    keys.
    """
    names: dict[int, list[str]] = {}
    for name in _AXES.split():
        factors = [int(word) if word.isdigit() else sizes.get(word, 0) for word in name.split("·")]
        names.setdefault(prod(factors), []).append(name)
    names.setdefault(sizes.get("d_head", 0) // 2, []).append("d_head/2")
    names.setdefault(sizes["key"] + 1, []).append("key+1")
    names.pop(0, None)
    given = [Operation("", tensor, site=name) for name, tensor in call.given.items()]
    kept: dict[Operation, None] = {}  # what an example makes and mha replaces is left out
    for operation in reversed(call.operations):
        has_reader = any(reader in kept for reader in operation.readers)
        if operation.live or operation.at.file or has_reader:
            kept[operation] = None
    axes: dict[Operation, tuple[str, ...]] = {}
    keys_first: set[Operation] = set()
    groups: dict[object, list[Operation]] = {}
    for operation in (*given, *reversed(kept)):
        axes[operation] = _axes_of(operation.output, names, operation.site)
        are_first = any(source in keys_first for source in operation.sources)
        is_swapped = operation.site == "qk" and operation.live_sources[-2].site.startswith("k")
        is_turned = is_swapped or operation.transposes()
        has_both = {"query", "key"} <= {*axes[operation]} and sizes["query"] == sizes["key"]
        if are_first != is_turned and has_both:
            keys_first.add(operation)
            other = {"query": "key", "key": "query"}
            axes[operation] = tuple(other.get(axis, axis) for axis in axes[operation])
        place = (operation.at, operation.name, operation.site, operation.output.ndim)
        groups.setdefault(place, []).append(operation)
    return tuple(
        _step(group, axes, n_heads=sizes.get("head"), values=values) for group in groups.values()
    )


def _step(
    group: Sequence[Operation],
    axes_of: Mapping[Operation, tuple[str, ...]],
    *,
    n_heads: int | None,
    values: bool,
) -> Step:
    """The step of operations at one line, with the tensor of the first and the costs of all."""
    operation = group[0]
    output, site, axes = operation.output, operation.site, axes_of[operation]
    is_in_place = writes_into_input(operation.name)
    address = address_of(output)
    shared = [
        source
        for source in operation.sources
        if is_in_place or address_of(source.output) == address != 0
    ]
    remark = _remark(operation, axes_of)
    is_of_one_head = site.endswith("_proj") and axes[-1:] == ("d_head",)
    known = SITES.get(site.replace("_proj", "_per_head") if is_of_one_head else site)
    explanation = "" if known is None else known.words.explanation
    weights = [weight for each in group for weight in each.weights().items()]
    step = step_of(
        site,
        output,
        axes=axes,
        formula=f"{site} = {_formula(operation)}",
        meaning="" if remark else re.split("[<{]", explanation)[0].rstrip(" :,"),
        is_view=bool(shared),
        flops=sum(map(_flops, group)),
        view_of=shared[0].site if shared else None,
        parameters=tuple(
            dict.fromkeys(WeightShape(name, tuple(tensor.shape)) for name, tensor in weights)
        ),
        values=(
            summarise(torch.view_as_real(output) if output.is_complex() else output)
            if values
            else None
        ),
        operation=operation.name,
        **operation.at._asdict(),
        remark=remark,
        repeats=len(group),
        repeats_of="head" if 1 < len(group) == n_heads else "",
    )
    return replace(step, bytes=sum(each.output.numel() for each in group) * output.element_size())


# --------------------------------------------------------------------------------------------- axes


_AXES = (
    "batch head kv_head query key d_head d_v d_model d_context head·d_head head·d_v "
    "kv_head·d_head kv_head·d_v batch·head batch·kv_head batch·query batch·key 2·d_model "
    "3·d_model 4·d_model 2·d_head 2·head·d_head 3·head·d_head 2·kv_head·d_head batch·head·query "
    "batch·head·key"
)
"""Axes, and merged ones, the usual ones first."""
_OF_KEYS = ("k", "v", "kᵀ", "k_proj", "v_proj", "kv")
_OF_PAIRS = ("qk", "scores", "pattern")


def _axes_of(tensor: Tensor, names: Mapping[int, list[str]], site: str) -> tuple[str, ...]:
    """The axes of the tensor of a site; `names` are those that an axis of each size may have, the
    simplest first. A name occurs once. Of names with one size, keys have no query, scores have no
    width, and the last axis of another tensor is a width.
    """
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


# ------------------------------------------------------------------------------------------ formula


def _formula(operation: Operation) -> str:
    """The operation as a call of named inputs."""
    if not operation.name:
        is_mask = operation.site == "mask"
        return "True where a query may see a key" if is_mask else "N(0, 1) from the seed"
    names = [source.site for source in operation.sources]
    if len(names) > 3:
        names[3:] = [f"… {len(names) - 3} more"]
    arguments = {
        name: _text(value) for name, value in operation.arguments.items() if value is not None
    }
    part = arguments.pop("output", None)
    if part is not None:
        return f"part {int(part) + 1} of {', '.join(names)}, by {operation.name}"
    given = [text if name.isdigit() else f"{name}={text}" for name, text in arguments.items()]
    operands = [*given, *names] if "0" in arguments else [*names, *given]
    return f"{operation.name}({', '.join(operands)})"


def _text(value: object) -> str:
    """An argument as a reader writes it."""
    if isinstance(value, float):
        return f"{value:.6g}".replace("-", "−").replace("inf", "∞")
    if isinstance(value, slice):
        return ":".join("" if end is None else str(end) for end in (value.start, value.stop))
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return "…" if value is Ellipsis else str(value)[:40]


# ------------------------------------------------------------------------------------------ remarks


def _remark(operation: Operation, axes_of: Mapping[Operation, tuple[str, ...]]) -> str:
    """A remark on a likely error: a softmax over another axis than the keys, or a view that mixes
    axes.
    """
    axes = axes_of[operation]
    if operation.name in SOFTMAXES and operation.site.startswith("pattern"):
        dim = operation.arguments.get("dim", operation.arguments.get("1"))
        axis = axes[dim] if isinstance(dim, int) and axes else str(dim)
        remark = (
            f"the softmax runs over {axis}, not over key: the weights of a query do not sum to 1"
        )
        return "" if "key" in re.split("[·+]", axis) else remark
    if operation.name not in ("view", "reshape", "flatten", "unflatten"):
        return ""
    before = _axes_of_words(axes_of.get(operation.sources[0], axes))
    after = _axes_of_words(axes)
    a, b = next((pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]), ("", ""))
    if set(before) != set(after) or not a or before[a] == before[b] or after[a] == after[b]:
        return ""  # the order within a merged axis is unknown
    return (
        f"a {operation.name} keeps the numbers in their order, and cannot exchange {a} and {b}:"
        " they are mixed"
    )


def _axes_of_words(axes: Sequence[str]) -> dict[str, int]:
    """The words of the axes in order, each with the number of its axis. Axes of size 1, and that of
    q, k and v, have none.
    """
    words = [axis.replace("d_model", "head·d_head").split("·") for axis in axes]
    pairs = [(word, n) for n, merged in enumerate(words) for word in merged]
    return {word: n for word, n in pairs if not word.isdigit() and word not in ("single", "part")}


# -------------------------------------------------------------------------------------------- costs


_OF_ONE = "add sub mul div exp tanh neg pow sqrt rsqrt sigmoid cos sin relu gelu"
_PER_NUMBER = dict.fromkeys(_OF_ONE.split(), 1) | {"softmax": 5, "log_softmax": 5, "dropout": 2}
"""Floating-point operations for each element of the result, counted as for mha's own layer."""


def _flops(operation: Operation) -> int:
    """Floating-point operations, 2 for a multiply-add, 1 otherwise; 0 if unknown."""
    n_out, name = operation.output.numel(), operation.name.rstrip("_")
    inputs = [source.output for source in operation.sources]
    letters = re.sub("[ ,]|->.*", "", str(operation.arguments.get("0", ".")))
    if name == "einsum" and "." not in letters:
        lengths = [length for tensor in inputs for length in tensor.shape]
        return 2 * prod(dict(zip(letters, lengths, strict=True)).values())
    if name in ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm"):
        width = inputs[1 if name in ("addmm", "baddbmm") else 0].shape[-1]
        has_bias = len(inputs) > 2
        return n_out * (2 * width + 1 if has_bias else 2 * width)
    if name == KERNEL:
        queries, keys, values = inputs[:3]
        n_cells = queries.numel() // max(1, queries.shape[-1]) * keys.shape[-2]
        return n_cells * (2 * queries.shape[-1] + 6 + 2 * values.shape[-1])
    return _PER_NUMBER.get(name, 0) * n_out
