"""The walkthrough of a user's attention: every tensor that it makes, its axes named from its sizes, beside its line."""

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

from mhacli.adapters.usercode.call.find_call import find_user_attention
from mhacli.adapters.usercode.call.user_attention import UserAttention, ask, fresh_copy
from mhacli.adapters.usercode.operations import address_of, watch
from mhacli.adapters.usercode.process import Stage
from mhacli.adapters.usercode.projections import parts_of
from mhacli.adapters.usercode.types import AttentionOutput, Built, Inputs, MaskForm, Operation
from mhacli.compute.base.devices import environment
from mhacli.compute.base.taps import step_of, summarise
from mhacli.compute.base.user_module import arguments_of, load_user_attention
from mhacli.compute.user_trace.axes import (
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
from mhacli.compute.user_trace.dataflow import (
    Dataflow,
    Roles,
    flops_of,
    flow_of,
    formula_of,
    meaning_of,
    remark_of,
    roles_of,
)
from mhacli.errors import UsageError
from mhacli.io.json_schema import decode
from mhacli.requests.user_code import TargetRequest
from mhacli.results.record.record import Record, SelfCheck, Step, TensorSummary, UserModule, WeightShape
from mhacli.results.record.tables import HeadTable
from mhacli.spec.config import Config
from mhacli.spec.tokens import TokenSequence

_MAX_BUILDS = 6
_TOLERANCE = 1e-4
"""Of the largest output: a watched `nn.MultiheadAttention` takes its slow path, whose sums are in another order."""


@dataclass(frozen=True)
class WalkRequest:
    """What `mha trace TARGET` asks: which attention, whether the numbers of each tensor are told, and the command itself."""

    of: TargetRequest
    values: bool = False
    command: tuple[str, ...] = ()


def walk_request(request: Mapping[str, Any], stage: Stage) -> bytes:
    """The record of a walk, without arrays, as JSON. Raises `MhaError` for what cannot be imported, built or called."""
    decoded = decode(WalkRequest, request, "request")
    record = walk_subject(load_user_attention(decoded.of, stage), decoded, stage)
    return json.dumps(record.document(), allow_nan=False).encode()


class WatchedCall(NamedTuple):
    """One call that was watched: what it was asked with, what it gave, and its operations with their sites and places."""

    call_sizes: TraceSizes
    answer: AttentionOutput
    flow: Dataflow
    roles: Roles
    sites: Mapping[int, str]
    places: tuple[object, ...]
    inputs: tuple[tuple[str, Tensor], ...]

    def measured(self) -> MeasuredRun:
        """The sizes of this pass, and the shape at each place."""
        shapes: dict[object, tuple[int, ...]] = {}
        counts: dict[object, int] = {}
        for index, place in enumerate(self.places):
            shapes.setdefault(place, tuple(self.flow.operations[index].output.shape))
            counts[place] = counts.get(place, 0) + 1
        shapes |= {("given", name): tuple(tensor.shape) for name, tensor in self.inputs}
        return MeasuredRun(sizes_of(self.flow, self.roles, self.call_sizes.sizes), shapes, counts)


def walk_subject(subject: UserAttention, request: WalkRequest, stage: Stage) -> Record:
    """The record of one call of a user's attention, with an entry of the trace for each operation that made something.

    It is called again with other lengths and, where it can be rebuilt, other widths, to tell axes apart; what then fails is done
    without. Raises what the first call raises.
    """
    target, calling = request.of, f"calling {request.of.target}"
    sizes = first_sizes(subject, causal=target.causal)
    fresh = fresh_copy(subject), fresh_copy(subject)
    stage(calling)
    first = _watched_call(subject, sizes, target.seed)
    passes = [first, *_others(fresh[0], sizes, target, stage)]
    runs = [one.measured() for one in passes]
    axes = {index: axes_of(place, first.sites[index], runs) for index, place in enumerate(first.places)}
    if "key" not in known_words(runs):
        axes = distinguish_lengths(first.flow, first.roles, axes)
    given = tuple((name, tensor, _given_axes(name, runs)) for name, tensor in first.inputs)
    walked = TracedCall(first, axes, given, _repeated(runs))
    stage(calling)
    return replace(
        _record(subject, target, first, runs, request.command),
        trace=steps_of(walked, values=request.values),
        self_check=_check(first.answer.out, _unwatched(fresh[1], sizes, target.seed)),
    )


# ------------------------------------------------------------------------------------------------------------ the calls


def _unwatched(subject: UserAttention, call_sizes: TraceSizes, seed: int) -> Tensor:
    """What it gives without being watched."""
    inputs = call_sizes.inputs(seed, subject.dtype, subject.device)
    return ask(subject, inputs, mask=call_sizes.mask, seed=seed).out


def _watched_call(subject: UserAttention, call_sizes: TraceSizes, seed: int) -> WatchedCall:
    """One call with random rows, watched. Raises what it raises."""
    inputs = call_sizes.inputs(seed, subject.dtype, subject.device)
    return watched(subject, inputs, seed, mask=call_sizes.mask)._replace(call_sizes=call_sizes)


def watched(
    subject: UserAttention, inputs: Inputs, seed: int, *, mask: MaskForm | None = None, padding: MaskForm | None = None
) -> WatchedCall:
    """One call with these rows, which are in the subject's dtype, watched. Raises what it raises."""
    keys = inputs.queries if inputs.keys is None else inputs.keys
    call_sizes = TraceSizes(
        inputs.queries.shape[0], inputs.queries.shape[-2], keys.shape[-2], inputs.queries.shape[-1], keys.shape[-1],
        subject.n_heads if subject.is_function else None, inputs.keys is not None, mask or padding,
    )  # fmt: skip

    call = partial(ask, subject, inputs, mask=mask, padding=padding, seed=seed)
    answer, operations = watch(call, _files(subject.built))
    given = _given(inputs, is_function=subject.is_function)
    names, parameters = _names(subject, operations, given, call_sizes)
    flow = flow_of(operations, names, parameters)
    roles = roles_of(flow)
    sites = _sites(flow, roles)
    places = tuple(
        (one.file, one.line, one.name, sites[index], one.output.ndim) for index, one in enumerate(flow.operations)
    )
    is_masked = "mask" in names.values()
    masks = [t for one in flow.operations for t in one.inputs if is_masked and names.get(id(t)) == "mask"][:1]
    return WatchedCall(call_sizes, answer, flow, roles, sites, places, (*given, *(("mask", mask) for mask in masks)))


def _files(built: Built) -> list[str]:
    """Where its author's code stands; torch's own is nobody's to change."""
    is_torch = built.file is not None and built.file.startswith(str(Path(torch.__file__).parent))
    return [] if built.file is None or is_torch else [built.file]


def _given(inputs: Inputs, *, is_function: bool) -> tuple[tuple[str, Tensor], ...]:
    names = ("q", "k", "v") if is_function else ("x", "context", "values")
    tensors = (inputs.queries, inputs.keys, inputs.values)
    return tuple((name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor is not None)


def _given_axes(name: str, runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """The axes of what was given; of a mask, and of keys that are as many as queries, those of the keys too."""
    axes = axes_of(("given", name), name, runs)
    if "key" in known_words(runs) or name in ("x", "q"):
        return axes
    return (*("key" if name != "mask" and axis == "query" else axis for axis in axes[:-1]),
            "key" if axes[-1:] == ("query",) else axes[-1])  # fmt: skip


def _others(
    subject: UserAttention, call_sizes: TraceSizes, request: TargetRequest, stage: Stage
) -> Iterator[WatchedCall]:
    """Calls with other lengths, and with other heads and widths; without those that it does not take."""
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


# ------------------------------------------------------------------------------------------------------------ the names


def _names(
    subject: UserAttention, operations: Sequence[Operation], given: Sequence[tuple[str, Tensor]], call_sizes: TraceSizes
) -> tuple[dict[int, str], frozenset[int]]:
    """The names of tensors that no operation made, by identity, and which of them are parameters or buffers."""
    made = {id(operation.output) for operation in operations}
    owned = _owned(subject)
    names: dict[int, str] = {}
    parameters = set()
    for operation in operations:
        for tensor in operation.inputs:
            if id(tensor) in made or id(tensor) in names:
                continue
            name = owned.get(address_of(tensor))
            if name is not None:
                names[id(tensor)] = name
                parameters.add(id(tensor))
                continue
            name = _name_of_given(tensor, given, call_sizes)
            if name is not None:
                names[id(tensor)] = name
    return names, frozenset(parameters)


def _owned(subject: UserAttention) -> dict[int, str]:
    """The module's parameters, buffers, and other tensors that it holds, by the address of their memory."""
    module, call = subject.built.module, subject.built.call
    held = vars(call) if hasattr(call, "__dict__") else {}
    found = {address_of(value): name for name, value in held.items() if isinstance(value, Tensor)}
    if module is not None:
        named = (*module.named_buffers(), *module.named_parameters())
        found |= {address_of(tensor): name for name, tensor in named}
    return {address: name for address, name in found.items() if address}


def _name_of_given(tensor: Tensor, given: Sequence[tuple[str, Tensor]], call_sizes: TraceSizes) -> str | None:
    """Which of the rows that were given a tensor is, also where the call wanted them turned; or that it is the mask."""
    for name, rows in given:
        if address_of(rows) == address_of(tensor):
            return name
    for name, rows in given:
        if _is_copy(tensor, rows):
            return name
    is_plane = tensor.ndim > 1 and tuple(tensor.shape[-2:]) == (call_sizes.q_len, call_sizes.k_len)
    return "mask" if is_plane and call_sizes.mask is not None else None


def _is_copy(tensor: Tensor, rows: Tensor) -> bool:
    """Whether a tensor holds the same rows, as they are or with the batch second."""
    if tensor.dtype != rows.dtype or tensor.ndim != rows.ndim or rows.ndim < 2:
        return False
    return any(tensor.shape == other.shape and torch.equal(tensor, other) for other in (rows, rows.transpose(0, 1)))


def _sites(flow: Dataflow, roles: Roles) -> dict[int, str]:
    """What each operation is called: its site in attention, else the variable that its line gives, else torch's name."""
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
    """What each place that was passed several times was repeated for, where its count says so."""
    words = known_words(runs)
    found = {}
    for place, count in runs[0].counts.items():
        seen = [run for run in runs if place in run.counts]
        if count > 1 and len(seen) > 1:
            name = name_of([run.counts[place] for run in seen], seen, words)
            found[place] = "" if name in ("part", "width", "single") else name
    return found


# ------------------------------------------------------------------------------------------------------------ the record


def _record(
    subject: UserAttention,
    request: TargetRequest,
    one: WatchedCall,
    runs: Sequence[MeasuredRun],
    command: tuple[str, ...],
) -> Record:
    """The record without its steps."""
    call_sizes, built = one.call_sizes, subject.built
    keys = _tokens("c", call_sizes.k_len) if call_sizes.takes_context else None
    queries = _tokens("x", call_sizes.q_len)
    words = known_words(runs)
    sizes = tuple((word, size) for word, size in runs[0].sizes.items() if word in words)
    out = one.answer.out
    return Record(
        command=command,
        config=_config(subject, request, one, runs[0].sizes),
        sequences=(queries,) * call_sizes.batch,
        context=None if keys is None else (keys,) * call_sizes.batch,
        vocabulary=queries.tokens if keys is None else keys.tokens,
        trace=(),
        heads=HeadTable(),
        timings={},
        self_check=SelfCheck(None, 0.0, False),
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
    """Made-up tokens, named by their places."""
    tokens = tuple(f"{letter}{place}" for place in range(n))
    begins = [sum(len(token) + 1 for token in tokens[:place]) for place in range(n)]
    offsets = tuple((begin, begin + len(token)) for begin, token in zip(begins, tokens, strict=True))
    return TokenSequence(" ".join(tokens), tokens, tuple(range(n)), offsets)


def _config(subject: UserAttention, request: TargetRequest, one: WatchedCall, sizes: Mapping[str, int]) -> Config:
    """What is known of it as a config of ours: sizes, biases, whether there is an output projection; of heads that are not known
    one, and of positions, which no config leaves open, none."""
    call_sizes, n_heads, d_head = one.call_sizes, sizes.get("head", 1), sizes.get("d_head")
    d_model = sizes.get("d_model", n_heads * (d_head or call_sizes.d_in))
    dtype = str(subject.dtype).removeprefix("torch.")
    parts = parts_of(subject.built.module, {})
    common: dict[str, Any] = {
        "bias": any(part.bias is not None for part in parts),
        "out_proj": "out" in one.sites.values(),
        "d_model": d_model,
        "positions": "none",
        "causal": request.causal,
        "dtype": dtype if dtype in ("float64", "float32", "float16", "bfloat16") else "float32",
        "device": request.device,
        "seed": request.seed,
        "random": (call_sizes.batch, call_sizes.q_len),
    }
    try:
        known = Config(
            n_heads=n_heads,
            n_kv_heads=sizes.get("kv_head", n_heads),
            d_head=d_head,
            d_v=sizes.get("d_v", d_head),
            **common,
        )
        return known.resolved()
    except UsageError:
        return Config(n_heads=1, d_head=d_model, **common).resolved()


def _check(watched: Tensor, unwatched: Tensor) -> SelfCheck:
    """Whether watching left the result as it is without."""
    if watched.shape != unwatched.shape:
        return SelfCheck(None, _TOLERANCE, False)
    tolerance = _TOLERANCE * max(1.0, float(unwatched.abs().nan_to_num().amax())) if unwatched.numel() else _TOLERANCE
    both = torch.isfinite(watched) & torch.isfinite(unwatched)
    is_same_otherwise = bool((torch.isfinite(watched) == torch.isfinite(unwatched)).all())
    error = float((watched - unwatched)[both].abs().amax()) if bool(both.any()) else 0.0
    return SelfCheck(error, tolerance, error <= tolerance) if is_same_otherwise else SelfCheck(None, tolerance, False)


# ------------------------------------------------------------------------------------------------------------- the steps


_GIVEN: Mapping[str, str] = {
    "x": "the input: a row of random numbers for each token",
    "context": "other rows, from which keys and values are made",
    "q": "queries, split into heads, as the function is given them",
    "k": "keys, split into heads",
    "v": "values, split into heads",
    "mask": "which keys each query may see",
}
_MAX_STEPS = 400


class TracedCall(NamedTuple):
    """What a walk is told from: the watched call, the axes of its operations' results, the tensors that were given, with their
    axes, and what each place that was passed several times was repeated for."""

    call: WatchedCall
    axes: Mapping[int, tuple[str, ...]]
    given: Sequence[tuple[str, Tensor, tuple[str, ...]]]
    repeated: Mapping[object, str]


def steps_of(walked: TracedCall, *, values: bool) -> tuple[Step, ...]:
    """The tensors that were given, then a step for each place, in the order in which they were first passed."""
    of_place: dict[object, list[int]] = {}
    for index, place in enumerate(walked.call.places):
        of_place.setdefault(place, []).append(index)
    steps = [_given_step(name, tensor, axes, values=values) for name, tensor, axes in walked.given]
    steps += [_step(walked, place, indices, values=values) for place, indices in of_place.items()]
    return tuple(steps[:_MAX_STEPS])


def _given_step(name: str, tensor: Tensor, axes: tuple[str, ...], *, values: bool) -> Step:
    made = "True where a query may see a key" if name == "mask" else "N(0, 1) from the seed"
    numbers = _values(tensor) if values else None
    return step_of(name, tensor, axes=axes, formula=f"{name} = {made}", meaning=_GIVEN[name], flops=0, values=numbers)


def _step(walked: TracedCall, place: object, indices: Sequence[int], *, values: bool) -> Step:
    flow, index = walked.call.flow, indices[0]
    operation, site, axes = flow.operations[index], walked.call.sites[index], walked.axes[index]
    output = operation.output
    view_of = _view_of(walked, index)
    is_attention = any(one.softmax == index and (one.qk is not None or one.z is not None)
                       for one in walked.call.roles.attentions)  # fmt: skip
    made_by = flow.made_by[index][0] if flow.made_by[index] else None
    before = () if made_by is None else walked.axes[made_by]
    remark = remark_of(operation, before, axes, is_attention=is_attention)
    step = step_of(
        site,
        output,
        axes=axes,
        formula=f"{site} = {formula_of(flow, index, walked.call.sites, walked.axes)}",
        meaning="" if remark else meaning_of(site, axes),
        is_view=view_of is not None,
        flops=sum(flops_of(flow, one) for one in indices),
        view_of=view_of,
        parameters=tuple(dict.fromkeys(p for one in indices for p in _parameters(flow, one))),
        values=_values(output) if values else None,
        operation=operation.name,
        file=operation.file,
        line=operation.line,
        source=operation.source,
        remark=remark,
        repeats=len(indices),
        repeats_of=walked.repeated.get(place, ""),
    )
    n_numbers = sum(flow.operations[one].output.numel() for one in indices)
    return replace(step, bytes=n_numbers * output.element_size())


def _view_of(walked: TracedCall, index: int) -> str | None:
    """The first input whose memory an operation's result lies in; what is written into, for what is done in place."""
    operation = walked.call.flow.operations[index]
    if operation.name == "setitem" or operation.name.endswith("_"):
        return walked.call.flow.name_of(index, 0, walked.call.sites)
    address = address_of(operation.output)
    for place, tensor in enumerate(operation.inputs):
        if address and address_of(tensor) == address:
            return walked.call.flow.name_of(index, place, walked.call.sites)
    return None


def _parameters(flow: Dataflow, index: int) -> list[WeightShape]:
    """The weights that an operation reads, also where they were turned or cut before."""
    operation: Operation = flow.operations[index]
    if not flow.live[index]:
        return []
    found: list[WeightShape] = []
    for place, tensor in enumerate(operation.inputs):
        made = flow.made_by[index][place]
        if id(tensor) in flow.parameters and _is_weight(tensor):
            found.append(WeightShape(flow.names[id(tensor)], tuple(tensor.shape)))
        while made is not None and not flow.live[made]:
            first = flow.operations[made].inputs[:1]
            if first and id(first[0]) in flow.parameters and _is_weight(first[0]):
                found.append(WeightShape(flow.names[id(first[0])], tuple(tensor.shape)))
            made = flow.made_by[made][0] if flow.made_by[made] else None
    return found


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is learned, which a buffer, such as a triangle of ones, is not."""
    return isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _values(tensor: Tensor) -> TensorSummary:
    return summarise(torch.view_as_real(tensor) if tensor.is_complex() else tensor)


# ---------------------------------------------------------------------------------------------------------- the source


def variable_of(operation: Operation) -> str | None:
    """The variable on the left of the line that asked for it, where it is one alone; of several, that of its part."""
    if operation.file is None or operation.line is None:
        return None
    targets = _targets(operation.file).get(operation.line, ())
    part = operation.arguments.get("output")
    if isinstance(part, int) and part < len(targets):
        return targets[part]
    return targets[0] if len(targets) == 1 and part is None else None


@lru_cache(maxsize=64)
def _targets(file: str) -> Mapping[int, tuple[str, ...]]:
    """For each line of a file, the names that the assignment there gives."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[int, tuple[str, ...]] = {}
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
            found |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), names)
    return found
