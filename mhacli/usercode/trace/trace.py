"""Traces a user's attention: every tensor with named axes and its source line."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.devices import environment
from mhacli.attention.taps import step_of, summarise
from mhacli.errors import UsageError
from mhacli.io.data import decode
from mhacli.record.checks import SelfCheck
from mhacli.record.record import Record, Step, TensorSummary, UserModule, WeightShape
from mhacli.record.tables import HeadTable
from mhacli.settings import Config
from mhacli.text.tokens import TokenSequence
from mhacli.usercode.call.find_call import find_user_attention
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.inputs import copied
from mhacli.usercode.operations import address_of, watch
from mhacli.usercode.process import Stage
from mhacli.usercode.projections import parts_of
from mhacli.usercode.target import TargetRequest
from mhacli.usercode.trace.axes import (
    MeasuredRun,
    TraceSizes,
    axes_of,
    distinguish_lengths,
    expected_of,
    first_sizes,
    known_words,
    name_of,
    other_heads,
    other_lengths,
    other_widths,
    sizes_of,
)
from mhacli.usercode.trace.dataflow import (
    Dataflow,
    Roles,
    flops_of,
    flow_of,
    formula_of,
    meaning_of,
    remark_of,
    roles_of,
)
from mhacli.usercode.types import AttentionOutput, Built, Inputs, MaskForm, Operation
from mhacli.usercode.user_module import arguments_of, load_user_attention

_MAX_BUILDS = 6
_TOLERANCE = 1e-4
"""Relative to the largest output. A recorded `nn.MultiheadAttention` takes its slow path, which sums in another order."""


@dataclass(frozen=True)
class WalkRequest:
    """The request of `mha trace TARGET`: the target, whether to summarise values, and the command line."""

    of: TargetRequest
    values: bool = False
    command: tuple[str, ...] = ()


def trace_request(request: Mapping[str, Any], stage: Stage) -> bytes:
    """The record of a trace, without arrays, as JSON. Raises `MhaError` if the target cannot be imported, built or called."""
    decoded = decode(WalkRequest, request, "request")
    record = trace_subject(load_user_attention(decoded.of, stage), decoded, stage)
    return json.dumps(record.document(), allow_nan=False).encode()


class WatchedCall(NamedTuple):
    """One recorded call: its sizes, inputs and output, and its operations with their sites and locations."""

    call_sizes: TraceSizes
    output: AttentionOutput
    flow: Dataflow
    roles: Roles
    sites: Mapping[int, str]
    locations: tuple[object, ...]
    inputs: tuple[tuple[str, Tensor], ...]

    def measured(self) -> MeasuredRun:
        """The sizes of this call, and the shape at each location."""
        shapes: dict[object, tuple[int, ...]] = {}
        counts: dict[object, int] = {}
        for index, location in enumerate(self.locations):
            shapes.setdefault(location, tuple(self.flow.operations[index].output.shape))
            counts[location] = counts.get(location, 0) + 1
        shapes |= {("given", name): tuple(tensor.shape) for name, tensor in self.inputs}
        return MeasuredRun(sizes_of(self.flow, self.roles, self.call_sizes.sizes), shapes, counts)


def trace_subject(subject: UserAttention, request: WalkRequest, stage: Stage) -> Record:
    """The record of one call of a user's attention, with a trace step for each operation.

    Further calls with other lengths and, after a rebuild, other widths distinguish axes of the same size; failures among these
    are ignored. Raises what the first call raises.
    """
    target, stage_text = request.of, f"calling {request.of.target}"
    sizes = first_sizes(subject, causal=target.causal)
    copies = [subject.of(copied(subject.built.call), subject.dtype) for _ in range(2)]
    stage(stage_text)
    first = _watched_call(subject, sizes, target.seed)
    calls = [first, *_further_calls(copies[0], sizes, target, stage)]
    runs = [call.measured() for call in calls]
    axes = {index: axes_of(location, first.sites[index], runs) for index, location in enumerate(first.locations)}
    if "key" not in known_words(runs):
        axes = distinguish_lengths(first.flow, first.roles, axes)
    inputs = tuple((name, tensor, _input_axes(name, runs)) for name, tensor in first.inputs)
    traced = TracedCall(first, axes, inputs, _repeated(runs))
    stage(stage_text)
    return replace(
        _record(subject, target, first, runs, request.command),
        trace=steps_of(traced, values=request.values),
        self_check=_check(first.output.out, _unrecorded_output(copies[1], sizes, target.seed)),
    )


# ---------------------------------------------------------------------------------------------------------------- calls


def _unrecorded_output(subject: UserAttention, call_sizes: TraceSizes, seed: int) -> Tensor:
    inputs = call_sizes.inputs(seed, subject.dtype, subject.device)
    return subject(inputs, mask=call_sizes.mask, seed=seed).out


def _watched_call(subject: UserAttention, call_sizes: TraceSizes, seed: int) -> WatchedCall:
    """One recorded call with random inputs. Raises what the call raises."""
    inputs = call_sizes.inputs(seed, subject.dtype, subject.device)
    return watched(subject, inputs, seed, mask=call_sizes.mask)._replace(call_sizes=call_sizes)


def watched(
    subject: UserAttention, inputs: Inputs, seed: int, *, mask: MaskForm | None = None, padding: MaskForm | None = None
) -> WatchedCall:
    """One recorded call with inputs in the subject's dtype. Raises what the call raises."""
    keys = inputs.queries if inputs.keys is None else inputs.keys
    call_sizes = TraceSizes(
        inputs.queries.shape[0], inputs.queries.shape[-2], keys.shape[-2], inputs.queries.shape[-1], keys.shape[-1],
        subject.n_heads if subject.is_function else None, inputs.keys is not None, mask or padding,
    )  # fmt: skip

    call = partial(subject, inputs, mask=mask, padding=padding, seed=seed)
    output, operations = watch(call, _files(subject.built))
    named_inputs = _named_inputs(inputs, is_function=subject.is_function)
    names, parameters = _names(subject, operations, named_inputs, call_sizes)
    flow = flow_of(operations, names, parameters)
    roles = roles_of(flow)
    sites = _sites(flow, roles)
    locations = tuple(
        (operation.file, operation.line, operation.name, sites[index], operation.output.ndim)
        for index, operation in enumerate(flow.operations)
    )
    is_masked = "mask" in names.values()
    masks = [t for operation in flow.operations for t in operation.inputs if is_masked and names.get(id(t)) == "mask"][
        :1
    ]
    return WatchedCall(
        call_sizes, output, flow, roles, sites, locations, (*named_inputs, *(("mask", mask) for mask in masks))
    )


def _files(built: Built) -> list[str]:
    """The user's source file; none for a target in torch."""
    is_torch = built.file is not None and built.file.startswith(str(Path(torch.__file__).parent))
    return [] if built.file is None or is_torch else [built.file]


def _named_inputs(inputs: Inputs, *, is_function: bool) -> tuple[tuple[str, Tensor], ...]:
    names = ("q", "k", "v") if is_function else ("x", "context", "values")
    tensors = (inputs.queries, inputs.keys, inputs.values)
    return tuple((name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor is not None)


def _input_axes(name: str, runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """The axes of an input. For self-attention, the axes of the mask and of keys are named `key` where that applies."""
    axes = axes_of(("given", name), name, runs)
    if "key" in known_words(runs) or name in ("x", "q"):
        return axes
    return (*("key" if name != "mask" and axis == "query" else axis for axis in axes[:-1]),
            "key" if axes[-1:] == ("query",) else axes[-1])  # fmt: skip


def _further_calls(
    subject: UserAttention, call_sizes: TraceSizes, request: TargetRequest, stage: Stage
) -> Iterator[WatchedCall]:
    """Calls with other lengths, heads and widths, as far as they work."""
    stage(f"calling {request.target}")
    with suppress(Exception):
        yield _watched_call(subject, other_lengths(call_sizes), request.seed)
    if subject.is_function:
        with suppress(Exception):
            yield _watched_call(subject, other_heads(other_lengths(call_sizes)), request.seed)
        return
    for changes in islice(other_widths(subject.built), _MAX_BUILDS):
        stage(f"building {request.target}")
        with suppress(Exception):
            built = subject.built.rebuild(changes)
            stage(f"finding out how to call {request.target} with other widths")
            other = find_user_attention(built, request)
            yield _watched_call(other, first_sizes(other, causal=request.causal), request.seed)
            return


# ---------------------------------------------------------------------------------------------------------------- names


def _names(
    subject: UserAttention,
    operations: Sequence[Operation],
    inputs: Sequence[tuple[str, Tensor]],
    call_sizes: TraceSizes,
) -> tuple[dict[int, str], frozenset[int]]:
    """The names of tensors from outside, by id, and the ids of parameters and buffers."""
    produced = {id(operation.output) for operation in operations}
    held = _held_tensors(subject)
    names: dict[int, str] = {}
    parameters = set()
    for operation in operations:
        for tensor in operation.inputs:
            if id(tensor) in produced or id(tensor) in names:
                continue
            name = held.get(address_of(tensor))
            if name is not None:
                names[id(tensor)] = name
                parameters.add(id(tensor))
                continue
            name = _input_name(tensor, inputs, call_sizes)
            if name is not None:
                names[id(tensor)] = name
    return names, frozenset(parameters)


def _held_tensors(subject: UserAttention) -> dict[int, str]:
    """The names of the module's parameters, buffers and other tensors, by memory address."""
    module, call = subject.built.module, subject.built.call
    attributes = vars(call) if hasattr(call, "__dict__") else {}
    names = {address_of(value): name for name, value in attributes.items() if isinstance(value, Tensor)}
    if module is not None:
        named = (*module.named_buffers(), *module.named_parameters())
        names |= {address_of(tensor): name for name, tensor in named}
    return {address: name for address, name in names.items() if address}


def _input_name(tensor: Tensor, inputs: Sequence[tuple[str, Tensor]], call_sizes: TraceSizes) -> str | None:
    """The name of the input that a tensor is, or a copy or batch-second layout of it; or `mask`."""
    for name, rows in inputs:
        if address_of(rows) == address_of(tensor):
            return name
    for name, rows in inputs:
        if _is_copy(tensor, rows):
            return name
    has_mask_shape = tensor.ndim > 1 and tuple(tensor.shape[-2:]) == (call_sizes.q_len, call_sizes.k_len)
    return "mask" if has_mask_shape and call_sizes.mask is not None else None


def _is_copy(tensor: Tensor, rows: Tensor) -> bool:
    """Whether a tensor equals an input, in its own layout or with the batch second."""
    if tensor.dtype != rows.dtype or tensor.ndim != rows.ndim or rows.ndim < 2:
        return False
    return any(tensor.shape == other.shape and torch.equal(tensor, other) for other in (rows, rows.transpose(0, 1)))


def _sites(flow: Dataflow, roles: Roles) -> dict[int, str]:
    """The name of each operation: its site, else the variable that its line assigns, else torch's name."""
    sites = dict(roles.sites)
    taken = set(sites.values()) | {"x", "q", "k", "v"}
    for index, operation in enumerate(flow.operations):
        if index in sites:
            continue
        after = flow.operations[index + 1] if index + 1 < len(flow.operations) else None
        is_last = after is None or (after.file, after.line) != (operation.file, operation.line)
        is_part = "output" in operation.arguments
        variable = variable_of(operation) if is_last or is_part else None
        sites[index] = variable if variable is not None and variable not in taken else operation.name
    return sites


def _repeated(runs: Sequence[MeasuredRun]) -> dict[object, str]:
    """The axis over which each repeated location loops, if its count shows it."""
    words = known_words(runs)
    axes = {}
    for location, count in runs[0].counts.items():
        matching_runs = [run for run in runs if location in run.counts]
        if count > 1 and len(matching_runs) > 1:
            name = name_of([run.counts[location] for run in matching_runs], matching_runs, words)
            axes[location] = "" if name in ("part", "width", "single") else name
    return axes


# --------------------------------------------------------------------------------------------------------------- record


def _record(
    subject: UserAttention,
    request: TargetRequest,
    call: WatchedCall,
    runs: Sequence[MeasuredRun],
    command: tuple[str, ...],
) -> Record:
    """The record without trace steps."""
    call_sizes, built = call.call_sizes, subject.built
    keys = _tokens("c", call_sizes.k_len) if call_sizes.takes_context else None
    queries = _tokens("x", call_sizes.q_len)
    words = known_words(runs)
    sizes = tuple((word, size) for word, size in runs[0].sizes.items() if word in words)
    out = call.output.out
    return Record(
        command=command,
        config=_config(subject, request, call, runs[0].sizes),
        sequences=(queries,) * call_sizes.batch,
        context=None if keys is None else (keys,) * call_sizes.batch,
        vocabulary=queries.tokens if keys is None else keys.tokens,
        trace=(),
        heads=HeadTable(),
        timings={},
        self_check=SelfCheck(error=None, tolerance=0.0, ok=False),
        environment=environment(subject.device, request.device),
        module=UserModule(
            target=request.target,
            arguments=arguments_of(built),
            called=subject.described,
            sizes=sizes,
            n_runs=len(runs),
            result=tuple(out.shape),
            expected=expected_of(call_sizes, out),
        ),
    )


def _tokens(letter: str, n: int) -> TokenSequence:
    """Placeholder tokens, named by position."""
    tokens = tuple(f"{letter}{position}" for position in range(n))
    begins = [sum(len(token) + 1 for token in tokens[:position]) for position in range(n)]
    offsets = tuple((begin, begin + len(token)) for begin, token in zip(begins, tokens, strict=True))
    return TokenSequence(" ".join(tokens), tokens, tuple(range(n)), offsets)


def _config(subject: UserAttention, request: TargetRequest, call: WatchedCall, sizes: Mapping[str, int]) -> Config:
    """A config with the known facts: sizes, biases, output projection. Unknown heads count as one; positions are none."""
    call_sizes, n_heads, d_head = call.call_sizes, sizes.get("head", 1), sizes.get("d_head")
    d_model = sizes.get("d_model", n_heads * (d_head or call_sizes.d_in))
    dtype = str(subject.dtype).removeprefix("torch.")
    parts = parts_of(subject.built.module, {})
    common: dict[str, Any] = {
        "bias": any(part.bias is not None for part in parts),
        "out_proj": "out" in call.sites.values(),
        "d_model": d_model,
        "positions": "none",
        "causal": request.causal,
        "dtype": dtype if dtype in ("float64", "float32", "float16", "bfloat16") else "float32",
        "device": request.device,
        "seed": request.seed,
        "random": (call_sizes.batch, call_sizes.q_len),
    }
    try:
        config = Config(
            n_heads=n_heads,
            n_kv_heads=sizes.get("kv_head", n_heads),
            d_head=d_head,
            d_v=sizes.get("d_v", d_head),
            **common,
        )
        return config.resolved()
    except UsageError:
        return Config(n_heads=1, d_head=d_model, **common).resolved()


def _check(recorded: Tensor, unrecorded: Tensor) -> SelfCheck:
    """Whether recording left the output unchanged."""
    if recorded.shape != unrecorded.shape:
        return SelfCheck(error=None, tolerance=_TOLERANCE, ok=False)
    tolerance = _TOLERANCE * max(1.0, float(unrecorded.abs().nan_to_num().amax())) if unrecorded.numel() else _TOLERANCE
    both = torch.isfinite(recorded) & torch.isfinite(unrecorded)
    has_same_nonfinite = bool((torch.isfinite(recorded) == torch.isfinite(unrecorded)).all())
    error = float((recorded - unrecorded)[both].abs().amax()) if bool(both.any()) else 0.0
    return SelfCheck.of(error if has_same_nonfinite else float("nan"), tolerance)


# ---------------------------------------------------------------------------------------------------------------- steps


_INPUT_MEANINGS: Mapping[str, str] = {
    "x": "the input: a row of random numbers for each token",
    "context": "other rows, from which keys and values are made",
    "q": "queries, split into heads, as the function is given them",
    "k": "keys, split into heads",
    "v": "values, split into heads",
    "mask": "which keys each query may see",
}
_MAX_STEPS = 400


class TracedCall(NamedTuple):
    """A recorded call with the axes of its tensors, its inputs with their axes, and the loops of repeated locations."""

    call: WatchedCall
    axes: Mapping[int, tuple[str, ...]]
    inputs: Sequence[tuple[str, Tensor, tuple[str, ...]]]
    repeated: Mapping[object, str]


def steps_of(traced: TracedCall, *, values: bool) -> tuple[Step, ...]:
    """A step for each input, then for each location in order of first execution."""
    operations_by_place: dict[object, list[int]] = {}
    for index, location in enumerate(traced.call.locations):
        operations_by_place.setdefault(location, []).append(index)
    steps = [_input_step(name, tensor, axes, values=values) for name, tensor, axes in traced.inputs]
    steps += [_step(traced, location, indices, values=values) for location, indices in operations_by_place.items()]
    return tuple(steps[:_MAX_STEPS])


def _input_step(name: str, tensor: Tensor, axes: tuple[str, ...], *, values: bool) -> Step:
    formula = "True where a query may see a key" if name == "mask" else "N(0, 1) from the seed"
    numbers = _values(tensor) if values else None
    return step_of(
        name, tensor, axes=axes, formula=f"{name} = {formula}", meaning=_INPUT_MEANINGS[name], flops=0, values=numbers
    )


def _step(traced: TracedCall, location: object, indices: Sequence[int], *, values: bool) -> Step:
    flow, index = traced.call.flow, indices[0]
    operation, site, axes = flow.operations[index], traced.call.sites[index], traced.axes[index]
    output = operation.output
    view_of = _view_of(traced, index)
    is_attention = any(repeated_index.softmax == index and (repeated_index.qk is not None or repeated_index.z is not None)
                       for repeated_index in traced.call.roles.attentions)  # fmt: skip
    producer = flow.made_by[index][0] if flow.made_by[index] else None
    before = () if producer is None else traced.axes[producer]
    remark = remark_of(operation, before, axes, is_attention=is_attention)
    step = step_of(
        site,
        output,
        axes=axes,
        formula=f"{site} = {formula_of(flow, index, traced.call.sites, traced.axes)}",
        meaning="" if remark else meaning_of(site, axes),
        is_view=view_of is not None,
        flops=sum(flops_of(flow, repeated_index) for repeated_index in indices),
        view_of=view_of,
        parameters=tuple(dict.fromkeys(p for repeated_index in indices for p in _parameters(flow, repeated_index))),
        values=_values(output) if values else None,
        operation=operation.name,
        file=operation.file,
        line=operation.line,
        source=operation.source,
        remark=remark,
        repeats=len(indices),
        repeats_of=traced.repeated.get(location, ""),
    )
    n_numbers = sum(flow.operations[repeated_index].output.numel() for repeated_index in indices)
    return replace(step, bytes=n_numbers * output.element_size())


def _view_of(traced: TracedCall, index: int) -> str | None:
    """The name of the first input that shares memory with the output, or of the tensor that is written in place."""
    operation = traced.call.flow.operations[index]
    if operation.name == "setitem" or operation.name.endswith("_"):
        return traced.call.flow.name_of(index, 0, traced.call.sites)
    address = address_of(operation.output)
    for input_idx, tensor in enumerate(operation.inputs):
        if address and address_of(tensor) == address:
            return traced.call.flow.name_of(index, input_idx, traced.call.sites)
    return None


def _parameters(flow: Dataflow, index: int) -> list[WeightShape]:
    """The weights that an operation reads, directly or through views."""
    operation: Operation = flow.operations[index]
    if not flow.live[index]:
        return []
    weights: list[WeightShape] = []
    for input_idx, tensor in enumerate(operation.inputs):
        producer = flow.made_by[index][input_idx]
        if id(tensor) in flow.parameters and _is_weight(tensor):
            weights.append(WeightShape(flow.names[id(tensor)], tuple(tensor.shape)))
        while producer is not None and not flow.live[producer]:
            first = flow.operations[producer].inputs[:1]
            if first and id(first[0]) in flow.parameters and _is_weight(first[0]):
                weights.append(WeightShape(flow.names[id(first[0])], tuple(tensor.shape)))
            producer = flow.made_by[producer][0] if flow.made_by[producer] else None
    return weights


def _is_weight(tensor: Tensor) -> bool:
    """Whether the tensor is learned, unlike a buffer."""
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _values(tensor: Tensor) -> TensorSummary:
    return summarise(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


# --------------------------------------------------------------------------------------------------------------- source


def variable_of(operation: Operation) -> str | None:
    """The variable that the line assigns, if it assigns one; for a tuple, the variable for this output."""
    if operation.file is None or operation.line is None:
        return None
    targets = _targets(operation.file).get(operation.line, ())
    output = operation.arguments.get("output")
    if isinstance(output, int) and output < len(targets):
        return targets[output]
    return targets[0] if len(targets) == 1 and output is None else None


@lru_cache(maxsize=64)
def _targets(file: str) -> Mapping[int, tuple[str, ...]]:
    """The variables assigned at each line of a file."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return {}
    names_by_line: dict[int, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            target = node.target
        else:
            continue
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        names = tuple(ast.unparse(part) for part in parts if isinstance(part, (ast.Name, ast.Attribute)))
        if len(names) == len(parts):
            names_by_line |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), names)
    return names_by_line
