"""Traces a user's attention: every tensor with named axes and its source line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.devices import environment
from mhacli.errors import UsageError
from mhacli.io.data import decode
from mhacli.record.checks import SelfCheck
from mhacli.record.record import Record, UserModule
from mhacli.record.tables import HeadTable
from mhacli.settings import Config
from mhacli.text.tokens import places
from mhacli.usercode.arguments import role_of
from mhacli.usercode.call.user_attention import CallMasks, UserAttention, drawer_of
from mhacli.usercode.inputs import copied, lengths_of
from mhacli.usercode.process import Stage
from mhacli.usercode.projections import parts_of
from mhacli.usercode.target import TargetRequest
from mhacli.usercode.trace.graph import KERNEL, Graph, recorded
from mhacli.usercode.trace.steps import steps_of
from mhacli.usercode.types import Inputs, MaskForm
from mhacli.usercode.user_module import arguments_of, load_user_attention

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


def trace_subject(subject: UserAttention, request: WalkRequest, stage: Stage) -> Record:
    """The record of one call of a user's attention, with a trace step for each operation. Raises what the call raises."""
    target, plain = request.of, subject.of(copied(subject.built.call), subject.dtype)
    inputs, mask = _first_inputs(subject, target)
    stage(f"calling {target.target}")
    graph = recorded(subject, inputs, target.seed, CallMasks(mask))
    unrecorded = plain(inputs, mask=mask, seed=target.seed).out
    sizes = _sizes(graph, subject, inputs)
    queries, keys = places(sizes["query"]), places(sizes["key"])
    has_context = not subject.is_function and inputs.keys is not None
    return Record(
        command=request.command,
        config=_config(subject, target, graph, sizes),
        sequences=(queries,) * sizes["batch"],
        context=(keys,) * sizes["batch"] if has_context else None,
        vocabulary=keys.tokens if has_context else queries.tokens,
        trace=steps_of(graph, sizes, values=request.values),
        heads=HeadTable(),
        timings={},
        self_check=_check(graph.out, unrecorded),
        environment=environment(subject.device, target.device),
        module=UserModule(
            target=target.target,
            arguments=arguments_of(subject.built),
            called=subject.described,
            sizes=tuple((word, size) for word, size in sizes.items() if word != "key" or size != sizes["query"]),
            n_runs=1,
            result=tuple(graph.out.shape),
            expected=(*inputs.queries.shape[:-1], *graph.out.shape[-1:]),
        ),
    )


def _first_inputs(subject: UserAttention, request: TargetRequest) -> tuple[Inputs, MaskForm | None]:
    """Random inputs, with a separate context if the subject takes one. If it must be causal, there is none, and a mask makes it
    causal unless an argument does."""
    inputs = drawer_of(subject, request.seed).inputs(with_context=subject.takes_context and not request.causal)
    if not request.causal or subject.causal_by is not None or not subject.mask_forms:
        return inputs, None
    _, n_queries, n_keys = lengths_of(inputs)
    allowed = torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool, device=subject.device).tril()
    return inputs._replace(allowed=allowed), subject.mask_forms[0]


def _sizes(graph: Graph, subject: UserAttention, inputs: Inputs) -> dict[str, int]:
    """The size of each axis word: those of the inputs, and the head counts and widths that the run and the arguments show."""
    batch, n_queries, n_keys = lengths_of(inputs)
    sizes = {"batch": batch, "query": n_queries, "key": n_keys}
    width, keys = inputs.queries.shape[-1], inputs.keys
    if subject.is_function:
        sizes |= {"head": inputs.queries.shape[1], "d_head": width}
    else:
        sizes |= {"d_model": width}
        sizes |= {} if keys is None or keys.shape[-1] == width else {"d_context": keys.shape[-1]}
    known = next((attention for attention in graph.attentions if "z" in attention), None)
    if known is None:
        return sizes
    z = graph.operations[known["z"]]
    d_head = d_v = z.output.shape[-1]
    if z.name == KERNEL:
        d_head = z.inputs[0].shape[-1]
    elif "qk" in known:
        d_head = graph.operations[known["qk"]].inputs[-2].shape[-1]
    site, rows = ("qk", batch * n_queries * n_keys) if "qk" in known else ("z", batch * n_queries * d_v)
    outputs = [graph.operations[attention[site]] for attention in graph.attentions if site in attention]
    n_numbers = sum(operation.output.numel() for operation in outputs if operation.at == outputs[0].at)
    sizes.setdefault("d_head", d_head)
    sizes.setdefault("head", max(1, n_numbers // max(1, rows)))
    arguments = {role_of(name.rpartition(".")[2]): value for name, value in subject.built.arguments.items()}
    n_kv_heads = arguments.get("n_kv_heads")
    if isinstance(n_kv_heads, int) and n_kv_heads != sizes["head"]:
        sizes["kv_head"] = n_kv_heads
    if d_v != sizes["d_head"]:
        sizes["d_v"] = d_v
    return sizes


def _config(subject: UserAttention, request: TargetRequest, graph: Graph, sizes: Mapping[str, int]) -> Config:
    """A config with the known facts: sizes, biases, output projection. Unknown heads count as one; positions are none."""
    n_heads, d_head = sizes.get("head", 1), sizes.get("d_head")
    d_model = sizes.get("d_model", n_heads * (d_head or 1))
    dtype = str(subject.dtype).removeprefix("torch.")
    common: dict[str, Any] = {
        "bias": any(part.bias is not None for part in parts_of(subject.built.module, {})),
        "out_proj": "out" in graph.sites.values(),
        "d_model": d_model,
        "positions": "none",
        "causal": request.causal,
        "dtype": dtype if dtype in ("float64", "float32", "float16", "bfloat16") else "float32",
        "device": request.device,
        "seed": request.seed,
        "random": (sizes["batch"], sizes["query"]),
    }
    n_kv_heads, d_v = sizes.get("kv_head", n_heads), sizes.get("d_v", d_head)
    try:
        return Config(n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, d_v=d_v, **common).resolved()
    except UsageError:
        return Config(n_heads=1, d_head=d_model, **common).resolved()


def _check(out: Tensor, unrecorded: Tensor) -> SelfCheck:
    """Whether recording left the output unchanged."""
    if out.shape != unrecorded.shape or not out.numel():
        return SelfCheck(error=None, tolerance=_TOLERANCE, ok=False)
    largest = float(unrecorded.abs().nan_to_num().amax())
    error = float((out - unrecorded).abs().nan_to_num().amax())
    are_finite = torch.equal(out.isfinite(), unrecorded.isfinite())
    return SelfCheck.of(error, _TOLERANCE * max(1.0, largest), holds=are_finite)
