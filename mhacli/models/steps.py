"""One attention of a checkpoint, step by step: every tensor that its modules compute, or each token
that it decodes.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from mhacli.attention.axes import Axes
from mhacli.attention.scores import Attention, ScoredAttention
from mhacli.attention.taps import memory_of, owner_of, step_of, summarise, timing, to_array
from mhacli.errors import MhaError, UsageError
from mhacli.io.data import finite
from mhacli.layer.steps import cell_of, decode_step, decoding_of, largest_of, spans_of
from mhacli.numbers import shown
from mhacli.record.checks import TOLERANCES, SelfCheck
from mhacli.record.exports import HeadTable
from mhacli.record.record import (
    Cell,
    InspectedLayer,
    Record,
    ScorePart,
    Step,
    WeightShape,
    layer_prefix,
)
from mhacli.record.sites import SITES, Dims, token_bytes
from mhacli.run import CellIndex, Run, require_inside
from mhacli.settings import AttentionKind, LayerChoice
from mhacli.usercode.door import ours

from . import foreign
from .capture import Call, captured
from .layer_names import LayerNumbers, is_attention, rope_theta_of
from .masking import as_attention
from .run import CheckpointRun, first_tensor, outputs_of, run_model

_BUILDING = ("eager", "math", "softmax")
"""The kernels that compute matrices of queries × keys; others never do."""
_SILENT = ("Dropout", "Identity")
"""Modules that change nothing in evaluation."""


class ModuleOutput(NamedTuple):
    """The output of a module by its name in an attention; or what enters the attention, `x`,
    without a module.
    """

    name: str
    module: nn.Module | None
    tensor: Tensor


class _Captured(NamedTuple):
    """A captured attention, and how many modules had given outputs before it."""

    call: Call
    attention: Attention
    n_before: int


def walk_checkpoint(
    run: CheckpointRun, *, values: bool = False, place: CellIndex | None = None
) -> Record:
    """The record of a pass with the trace of one attention, the first requested; with `values`, the
    numbers of each tensor; with `place`, the computation of this cell. Raises `MhaError` if there
    is no such layer.
    """
    kind, number = _first_choice(run.request)
    run.request = _with_layer(run.request, (kind, number))
    outputs = list[ModuleOutput]()
    taken = list[_Captured]()

    def take(call: Call, attention: Attention) -> None:
        if not taken:
            taken.append(_Captured(call, attention, len(outputs)))

    run.on_layer = take
    reading: AbstractContextManager[Any] = nullcontext()
    if run.has_shapes_alone:
        reading = foreign.affirming()
    with reading, _listening(run.model, kind, outputs, taken):
        record = run.run()
    call, attention, n_before = taken[0]
    layer = record.layers[0]
    has_rotation = record.config.positions.startswith("rope")
    if call.q is not None:  # a layer without a rotation has views of what its modules computed
        projected = {memory_of(each.tensor) for each in outputs[:n_before]}
        has_rotation = has_rotation and memory_of(call.q) not in projected
    theta = rope_theta_of(run.loaded.config, number) if has_rotation else None
    sizes = dict(zip(("batch", "head", "query", "key"), attention.shape, strict=True))
    sizes |= {
        "kv_head": layer.n_kv_heads,
        "d_head": layer.d_head,
        "d_v": layer.d_v,
        "d_model": record.config.d_model,
    }
    steps = [(each.tensor, _step_of_module(each, sizes)) for each in outputs]
    steps[n_before:n_before] = _inside(call, attention, layer, record.of_layer(0).dims, theta)
    owners = dict[int, str]()
    trace = list[Step]()
    for tensor, step in steps:  # each is a view of the first whose memory it shares
        owner = owner_of(tensor, step.site, owners)
        summary = summarise(tensor) if values else None
        trace.append(
            replace(step, layout="view" if owner else "copy", view_of=owner, values=summary)
        )
    return replace(
        record,
        layers=(layer,),
        heads=HeadTable(head for head in record.heads if head.attention == layer.name),
        arrays={
            name: array for name, array in record.arrays.items() if name.startswith("layers.0.")
        },
        trace=tuple(trace),
        cell=None if place is None else follow_call(call, attention, place, run.axes(layer.kind)),
        timings={
            name: timing for name, timing in record.timings.items() if name != "total"
        },  # it includes other work
    )


def _first_choice(request: Run) -> LayerChoice:
    """The first requested layer."""
    return (request.model.layers or ((None, 0),))[0]


def _with_layer(request: Run, layer: LayerChoice) -> Run:
    """The request for one layer alone."""
    return replace(request, model=replace(request.model, layers=(layer,)))


@contextmanager
def _listening(
    model: nn.Module,
    kind: AttentionKind | None,
    outputs: list[ModuleOutput],
    taken: Sequence[_Captured],
) -> Iterator[None]:
    """A context in which `outputs` collects what enters an attention of this kind and its modules
    compute, of each anew, until that of the `taken` one is complete. The outermost modules count,
    which include the output projection.
    """
    numbers = LayerNumbers(model)
    roots = dict[str, nn.Module]()
    names = dict[nn.Module, str]()
    for name, root in model.named_modules():
        if not name or not is_attention(name, root) or kind not in (None, numbers.kind_of(name)):
            continue
        # a norm has no parts, a list never runs
        runs_parts = any(root.children()) and not isinstance(root, nn.ModuleList)
        if not runs_parts or any(name.startswith(f"{other}.") for other in roots):
            continue
        roots[name] = root
        for part_name, part in root.named_modules():
            if not any(part.children()) and type(part).__name__ not in _SILENT:
                names[part] = part_name
    attentions = set(roots.values())

    @ours()
    def leave(module: nn.Module, given: Any, output: Any) -> None:
        if module in names and isinstance(output, Tensor):
            if given and not outputs:
                outputs.append(ModuleOutput("x", None, given[0]))
            outputs.append(ModuleOutput(names[module], module, output))
        if module in attentions and taken:
            hooks.close()
        elif module in attentions:
            outputs.clear()

    with ExitStack() as hooks:
        hooks.callback(register_module_forward_hook(leave).remove)
        yield


# -------------------------------------------------------------------------------------- the modules


def _step_of_module(output: ModuleOutput, sizes: Mapping[str, int]) -> Step:
    """The step of a module's output, or of what enters the attention. Operations are counted as in
    the trace of a layer of mha: 2 per weight and row, 1 for other numbers.
    """
    name, module, tensor = output
    axes = _axes(name, tuple(tensor.shape), sizes)
    if module is None:
        formula, meaning = "the input of the attention", "a row of numbers per token"
        return step_of(name, tensor, axes=axes, formula=formula, meaning=meaning, flops=0)
    named, kind = dict(module.named_parameters()), type(module).__name__
    matrix = next((p for p in named.values() if p.ndim == 2), None)
    flops = tensor.numel()
    if matrix is not None:
        n_rows = tensor.numel() // tensor.shape[-1]
        flops = 2 * n_rows * matrix.numel() + (len(named) - 1) * tensor.numel()
    product = f"{kind}(x)"
    added = " + b" if "bias" in named else ""
    if kind == "Conv1D":
        product = f"x W{added}, W [d_in, d_out]"
    elif isinstance(module, nn.Linear):
        product = f"x Wᵀ{added}"
    weights = tuple(
        WeightShape(f"{name}.{parameter}", tuple(p.shape)) for parameter, p in named.items()
    )
    formula = f"{name.rpartition('.')[2]} = {product}"
    return step_of(
        name, tensor, axes=axes, flops=flops, parameters=weights, formula=formula, meaning=kind
    )


def _axes(name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a module's output, by the module's name and the sizes of axes."""
    short = name.rpartition(".")[2]
    length = "key" if short.startswith(("k", "v")) and sizes["key"] in shape[1:3] else "query"
    fitting = {sizes[axis]: axis for axis in ("kv_head", "head", "key", length)}
    axes = [fitting.get(size, "width") for size in shape]
    if shape[0] == sizes["batch"]:
        all_heads = {"q": "head d_head", "k": "kv_head d_head", "v": "kv_head d_v"}.get(
            short[:1], "d_model"
        )
        # q, k and v by one projection
        known = {**sizes, "(head+2·kv_head)": sizes["head"] + 2 * sizes["kv_head"]}
        words = (all_heads, "(head+2·kv_head) d_head", "d_model", "head d_v", "d_head")
        fits = [word for word in words if prod(known[axis] for axis in word.split()) == shape[-1]]
        axes[0], axes[-1] = "batch", "·".join(fits[0].split()) if fits else "width"
    elif shape[0] not in fitting:
        axes[0] = "rows"
    return tuple(axes)


# ----------------------------------------------------------------------------- the attention itself


def _inside(
    call: Call, attention: Attention, layer: InspectedLayer, dims: Dims, theta: float | None
) -> Iterator[tuple[Tensor, Step]]:
    """The inputs of the attention and the matrices that follow from them, with their steps, which
    have the words of `SITES` unless the model does otherwise. Matrices that the kernel does not
    compute are computed here. `theta` is the base of a rotation.
    """
    matrices = attention.matrices()
    tensors = dict[str, Tensor]()
    others = defaultdict[str, dict[str, Any]](dict)
    # positions are in q and k, or in the bias of the call
    plain = replace(dims.config, positions="none", score_bias=None)
    if call.q is not None:
        tensors |= dict(zip("qkv", call.qkv, strict=True)) | {"qk": matrices["qk"]}
        for name, tensor in zip("qkv", call.qkv, strict=True):
            others[name]["formula"] = f"{name} = split into heads"
            if theta is not None and name != "v":  # two products and a sum for each number
                others[name]["formula"] += f", rotated by its position (RoPE, base {theta:g})"
                others[name]["flops"] = 3 * tensor.numel()
        if call.mask is not None:
            is_rule = call.mask.dtype == torch.bool
            tensors["mask"] = call.mask
            others["mask"] = {
                "axes": SITES["qk"].axes_for(dims),
                "formula": "True = may attend" if is_rule else "added to the scores",
                "meaning": layer.mask,
                "flops": 0,
            }
        if call.sinks is not None:
            axes = ("head",) if call.sinks.ndim == 1 else ("batch", "head", "query")
            tensors["sinks"] = call.sinks
            others["sinks"] = {
                "axes": axes,
                "formula": f"a score per {axes[-1]}",
                "meaning": "takes part in the softmax and gives nothing",
                "flops": 0,
            }
            others["pattern"] = {
                "formula": "pattern = softmax(scores and the sink) over keys",
                "meaning": (
                    "the attention weights: a row sums to less than 1, the sink logit takes the"
                    " rest"
                ),
            }
    others["scores"]["meaning"] = f"what a query sees: {layer.mask}"
    if not isinstance(attention, ScoredAttention):
        others["scores"]["formula"] = "scores as softmax reads them"
    elif attention.bias is not None:
        plain = replace(plain, score_bias="position bias")
    tensors |= {"scores": matrices["scores"], "pattern": matrices["pattern"]}
    if call.z is not None:
        tensors["z"] = call.z
    others["z"]["meaning"] = (
        f"what the model's own code made of it ({layer.captured_by}, {layer.kernel})"
    )
    for name, tensor in tensors.items():
        usual = SITES[name].described(replace(dims, config=plain)) if name in SITES else {}
        is_built = name not in matrices or layer.kernel in _BUILDING
        yield tensor, step_of(name, tensor, built=is_built, **usual | others[name])


def follow_call(call: Call, attention: Attention, place: CellIndex, axes: Axes) -> Cell:
    """The computation of one cell of a captured attention. Raises `UsageError` for a cell outside,
    and if queries and keys were not captured.
    """
    if call.q is None:
        raise UsageError(
            "--cell needs the layer's queries and keys, and only its softmax could be captured"
        )
    parts = tuple[ScorePart, ...]()
    require_inside(place, call.shape[1], axes.queries.ids, axes.keys.ids)
    if isinstance(attention, ScoredAttention) and attention.bias is not None:
        sequence, head, *_ = place
        row, column = (torch.tensor([index]) for index in axes.cell(place))
        added = attention.bias(sequence, range(head, head + 1), row, column).item()
        parts = (ScorePart("position bias", "position", finite(added), added=True),)
    tensors = call.tensors | attention.matrices()
    tensors["weights"] = tensors["pattern"]
    return cell_of(axes, place, tensors, scale=call.scale, softcap=call.softcap, parts=parts)


# ----------------------------------------------------------------------------------------- decoding


@torch.no_grad()
def decode_checkpoint(run: CheckpointRun, prompt_len: int) -> Record:
    """The record of one layer, the first requested, with one trace entry per step and the pattern
    of the steps.

    The steps are a prefill of `prompt_len` tokens, if any, then one token at a time, with the
    model's own cache. The self-check compares the steps' outputs after the last layer with those of
    one pass over the whole text. Raises `UsageError` for texts of different lengths, and `MhaError`
    for a model that does not decode.
    """
    record = _recorded(run, prompt_len)
    assert record.model is not None
    began = perf_counter()
    model, layer, config = run.model, record.layers[0], record.of_layer(0).config
    full: Any = first_tensor(outputs_of(model, run.inputs.keywords))
    out: Any
    pattern = torch.zeros(full.shape[0], layer.n_heads, full.shape[1], full.shape[1])
    steps, cache = list[Step](), ""
    for (start, end), call, outputs, seconds in _decoded(
        run, layer, spans_of(prompt_len, full.shape[1])
    ):
        out, cache = first_tensor(outputs), type(outputs["past_key_values"]).__name__
        matrices = as_attention(call).matrices()
        rows = matrices["pattern"].float().cpu()
        # a cache with a window has dropped earlier keys
        pattern[:, :, start:end, end - rows.shape[3] : end] = rows
        step = decode_step(
            config,
            (start, end),
            (out, full),
            cache="preallocated",
            scores=matrices["scores"],
            cache_bytes=rows.shape[3] * len(out) * token_bytes(config),
            prompt_len=prompt_len,
            tokens=tuple(text.tokens[start:end] for text in run.inputs.sequences),
            site=f"step {len(steps)}",
            formula=f"out = all layers of the model, {layer.label} meeting {rows.shape[3]} keys",
            flops=2 * rows.numel() * (layer.d_head + layer.d_v),
            time_s=seconds,
        )
        steps.append(step)
    # the tolerance grows with the layers, because each rounds again
    n_layers, seconds = max(1, record.model.n_layers), perf_counter() - began
    tolerance = TOLERANCES[run.loaded.dtype].output * n_layers * full.abs().amax().item()
    return replace(
        record,
        arrays=dict(record.arrays) | {f"{layer_prefix(0)}pattern": to_array(pattern)},
        trace=tuple(steps),
        self_check=SelfCheck.of(largest_of(steps), tolerance),
        timings=dict(record.timings) | {"decoding": timing(seconds, [seconds])},
        decoding=decoding_of(
            _weight_bytes(model, record.model.max_positions),
            config,
            cache,
            prompt_len,
            batch=len(full),
            n_layers=n_layers,
        ),
    )


def _weight_bytes(model: Any, n_positions: int | None) -> int:
    """The bytes of weights that a step reads: one row of a table of positions; the table of tokens,
    which stands for the output projection of its size; and of two stacks the decoder alone.
    """
    stack = model.get_decoder() if model.config.is_encoder_decoder else model
    of_tokens = model.get_input_embeddings().weight
    n_read = {weight: weight.nbytes for weight in stack.parameters()}
    for table in stack.modules():
        is_other = isinstance(table, nn.Embedding) and table.weight is not of_tokens
        if is_other and n_positions and len(table.weight) >= n_positions:
            n_read[table.weight] = table.weight[0].nbytes
    return sum(n_read.values())


def _recorded(run: CheckpointRun, prompt_len: int) -> Record:
    """The record of the requested layer in one pass over the whole text, whose queries see no later
    token.
    """
    n = len(run.inputs.sequences[0].ids)
    if any(len(text.ids) != n for text in run.inputs.sequences):
        raise UsageError(
            "mha decode --model needs texts of one length",
            hint="decode each text in a run of its own",
        )
    if not 0 <= prompt_len <= n:
        raise UsageError(f"--prompt-len {prompt_len} is out of range: the text has {n} tokens")
    kind, number = _first_choice(run.request)
    kind = kind or ("decoder" if run.loaded.config.is_encoder_decoder else "self")
    keep = tuple(dict.fromkeys(("pattern", *(run.request.keep or ()))))
    run.request = replace(_with_layer(run.request, (kind, number)), keep=keep)
    record = run.run()
    if record.not_kept:
        raise MhaError(
            f"the pattern of {n} × {n} tokens takes more than --keep-limit,"
            f" {shown(run.request.keep_limit, 'bytes')}",
            hint=f"--max-tokens {n // 2} takes a shorter text, a larger --keep-limit makes room",
            code="too-large",
        )
    layer, source = record.layers[0], run.loaded.source
    if kind not in ("self", "decoder") or not layer.mask.startswith("causal"):
        raise MhaError(
            (
                f"mha decode needs attention that sees no later token, but {layer.name} sees"
                f" {layer.mask}"
            ),
            hint=f"mha run TEXT --model {shlex.quote(source)} shows its attention",
            code="not-causal",
        )
    return record


class _DecodedStep(NamedTuple):
    """A step of decoding: its first position and the one after its last, the attention of the
    layer, the outputs of the model, and the time.
    """

    span: tuple[int, int]
    call: Call
    outputs: Mapping[str, Any]
    seconds: float


def _decoded(
    run: CheckpointRun, layer: InspectedLayer, spans: Sequence[tuple[int, int]]
) -> Iterator[_DecodedStep]:
    """The steps. An encoder runs once. Raises `MhaError` for a model without a cache."""
    model, inputs = run.model, run.inputs.keywords
    name, others = "input_ids", dict[str, Any]()
    if "decoder_input_ids" in inputs:
        name = "decoder_input_ids"
        others = {key: mask for key, mask in inputs.items() if key == "attention_mask"}
        encoded = model.get_encoder()(input_ids=inputs["input_ids"], **others)
        others["encoder_outputs"] = encoded
    taken = list[Call]()

    def take(call: Call) -> None:
        if (call.layer, call.kind, call.title) == (layer.layer, layer.kind, layer.name):
            taken[:] = [call]

    cache = None
    for start, end in spans:
        began = perf_counter()
        new = {name: inputs[name][:, start:end], "past_key_values": cache}
        with captured(model, take, batch=len(run.inputs.sequences), heads="joined"):
            outputs = run_model(model, partial(model, **new, **others, use_cache=True))
        seconds, cache = perf_counter() - began, outputs.get("past_key_values")
        if cache is None:
            raise MhaError(
                (
                    f"mha decode needs a model with a KV cache, which {type(model).__name__}"
                    " does not return"
                ),
                code="no-cache",
            )
        yield _DecodedStep((start, end), taken[0], outputs, seconds)
