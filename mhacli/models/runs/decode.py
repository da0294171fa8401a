"""Decodes a text with a checkpoint and its own cache, token by token, and compares each step with a full pass."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.taps import largest_difference, timing, to_array
from mhacli.errors import MhaError, UsageError
from mhacli.io.data import finite
from mhacli.io.files import format_size
from mhacli.layer.decode import decode_step, largest_of, phase_of, spans_of, weight_bytes
from mhacli.models.calls import Call, as_attention
from mhacli.models.capture import captured
from mhacli.models.inputs import outputs_of, run_model
from mhacli.models.runs.run import CheckpointRun
from mhacli.record.checks import TOLERANCES, SelfCheck
from mhacli.record.record import CacheStep, DecodeSummary, InspectedLayer, Record, Step, layer_prefix


@torch.no_grad()
def decode_checkpoint(run: CheckpointRun, prompt_len: int) -> Record:
    """The record of one layer, the first requested, with one trace entry per step and the pattern of the steps.

    The steps are a prefill of `prompt_len` tokens, if any, then one token at a time, with the model's own cache. The self-check
    compares the steps' outputs after the last layer with those of one pass over the whole text.
    Raises `UsageError` for texts of different lengths, and `MhaError` for a model that does not decode.
    """
    record = _recorded(run, prompt_len)
    assert record.model is not None
    began, model, layer, n_layers = perf_counter(), run.loaded.model, record.layers[0], record.model.n_layers
    full = _last(outputs_of(model, run.inputs.keywords))
    pattern = torch.zeros(full.shape[0], layer.n_heads, full.shape[1], full.shape[1])
    steps, cache = _decoded(run, layer, prompt_len, full, pattern)
    # the tolerance grows with the layers, because each rounds again
    tolerance = TOLERANCES[run.loaded.dtype].output * max(1, n_layers) * full.abs().amax().item()
    of_head = n_layers * (layer.d_head + layer.d_v) * next(model.parameters()).element_size()
    token, weights, seconds = layer.n_kv_heads * of_head, weight_bytes(model), perf_counter() - began
    crossing_len = weights / max(1, token)
    return replace(
        record,
        arrays=dict(record.arrays) | {f"{layer_prefix(0)}pattern": to_array(pattern)},
        trace=tuple(steps),
        self_check=SelfCheck.of(largest_of(steps), tolerance),
        timings=dict(record.timings) | {"decoding": timing(seconds, [seconds])},
        decoding=DecodeSummary(cache, prompt_len, weights, token, layer.n_heads * of_head, crossing_len),
    )


def _recorded(run: CheckpointRun, prompt_len: int) -> Record:
    """The record of the requested layer in one pass over the whole text, whose queries see no later token."""
    n = len(run.inputs.sequences[0].ids)
    if any(len(text.ids) != n for text in run.inputs.sequences):
        raise UsageError("mha decode --model needs texts of one length", hint="decode each text in a run of its own")
    if not 0 <= prompt_len <= n:
        raise UsageError(f"--prompt-len {prompt_len} is out of range: the text has {n} tokens")
    if run.wanted.keep is not None:
        message = "--keep does not work with mha decode --model, which keeps the pattern"
        raise UsageError(message, hint="leave out --keep")
    kind, number = (run.wanted.model.layers or ((None, 0),))[0]
    kind = kind or ("decoder" if run.loaded.config.is_encoder_decoder else "self")
    run.wanted = replace(run.wanted, model=replace(run.wanted.model, layers=((kind, number),)), keep=("pattern",))
    run.run()
    record = run.record()
    if record.not_kept:
        raise MhaError(
            f"the pattern of {n} × {n} tokens takes more than --keep-limit, {format_size(run.wanted.keep_limit)}",
            hint=f"--max-tokens {n // 2} takes a shorter text, a larger --keep-limit makes room",
            code="too-large",
        )
    layer, source = record.layers[0], run.loaded.source
    if kind not in ("self", "decoder") or not layer.mask.startswith("causal"):
        message = f"mha decode needs attention that sees no later token, but {layer.name} sees {layer.mask}"
        hint = f"mha run TEXT --model {shlex.quote(source)} shows its attention"
        raise MhaError(message, hint=hint, code="not-causal")
    return record


def _decoded(
    run: CheckpointRun, layer: InspectedLayer, prompt_len: int, full: Tensor, pattern: Tensor
) -> tuple[list[Step], str]:
    """The steps, each compared with its rows of the `full` output, and the class of the model's cache. Writes the `pattern`."""
    texts, d_both, steps, cache = run.inputs.sequences, layer.d_head + layer.d_v, list[Step](), ""
    for (start, end), call, outputs, seconds in _passes(run, layer, spans_of(prompt_len, full.shape[1])):
        out, batch, n_new = _last(outputs), full.shape[0], end - start
        cache = type(outputs["past_key_values"]).__name__
        real = torch.ones(batch, n_new, dtype=torch.bool, device=run.loaded.device)
        rows = as_attention(call, real).matrices()["pattern"].float().cpu()
        pattern[:, :, start:end, end - rows.shape[3] : end] = rows  # a cache with a window has dropped earlier keys
        k_len = end if call.k is None else call.k.shape[2]
        new, token = (batch, layer.n_kv_heads, n_new), batch * layer.n_kv_heads * d_both * out.element_size()
        entry = CacheStep(
            phase=phase_of(len(steps), prompt_len),
            start=start,
            tokens=tuple(text.tokens[start:end] for text in texts),
            q_shape=(batch, layer.n_heads, n_new, layer.d_head),
            k_shape=(*new, layer.d_head),
            v_shape=(*new, layer.d_v),
            n_past=k_len - n_new,
            read_bytes=k_len * token,
            appended_bytes=n_new * token,
            moved_bytes=(k_len + n_new) * token,
            cache_bytes=k_len * token,
            max_abs_difference=finite(largest_difference(out, full[:, start:end])),
        )
        formula = f"out = all layers of the model, {layer.label} meeting {k_len} keys"
        described = {"axes": ("batch", "query", "d_model"), "formula": formula, "time_s": seconds}
        flops = 2 * batch * layer.n_heads * n_new * k_len * d_both
        steps.append(decode_step(len(steps), out, n_keys=k_len, cache=entry, flops=flops, **described))
    return steps, cache


def _passes(
    run: CheckpointRun, layer: InspectedLayer, spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], Call, Mapping[str, Any], float]]:
    """For each step its span, the attention of the layer, the outputs of the model, and the seconds. An encoder runs once.
    Raises `MhaError` for a model without a cache."""
    model, given, taken, cache = run.loaded.model, run.inputs.keywords, list[Call](), None
    name, others = "input_ids", dict[str, Any]()
    if "decoder_input_ids" in given:
        name, masks = "decoder_input_ids", {key: mask for key, mask in given.items() if key == "attention_mask"}
        others = {"encoder_outputs": model.get_encoder()(input_ids=given["input_ids"], **masks), **masks}

    def take(call: Call) -> None:
        if (call.layer, call.kind, call.title) == (layer.layer, layer.kind, layer.name):
            taken[:] = [call]

    for start, end in spans:
        began, new = perf_counter(), {name: given[name][:, start:end], "past_key_values": cache}
        with captured(model, take, batch=len(run.inputs.sequences)):
            outputs = run_model(model, partial(model, **new, **others, use_cache=True))
        seconds, cache = perf_counter() - began, outputs.get("past_key_values")
        if cache is None:
            message = f"mha decode needs a model with a KV cache, which {type(model).__name__} does not return"
            raise MhaError(message, code="no-cache")
        yield (start, end), taken[0], outputs, seconds


def _last(outputs: Mapping[str, Any]) -> Tensor:
    """The output of the last layer; in an encoder-decoder, of the decoder."""
    hidden = outputs.get("last_hidden_state")
    if isinstance(hidden, Tensor):
        return hidden
    return next(tensor for tensor in outputs.values() if isinstance(tensor, Tensor))
