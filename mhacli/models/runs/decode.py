"""Decodes a text with a checkpoint and its own cache, token by token, and compares each step with a full pass."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.attention.taps import largest_difference, timing, to_array
from mhacli.errors import MhaError, UsageError
from mhacli.io.files import format_size
from mhacli.layer.decode import decode_step, largest_of, spans_of, weight_bytes
from mhacli.models.calls import Call, as_attention
from mhacli.models.capture import captured
from mhacli.models.inputs import outputs_of, run_model
from mhacli.models.runs.run import CheckpointRun
from mhacli.record.checks import TOLERANCES, SelfCheck
from mhacli.record.record import DecodeSummary, InspectedLayer, Record, Step, layer_prefix


@torch.no_grad()
def decode_checkpoint(run: CheckpointRun, prompt_len: int) -> Record:
    """The record of one layer, the first requested, with one trace entry per step and the pattern of the steps.

    The steps are a prefill of `prompt_len` tokens, if any, then one token at a time, with the model's own cache. The self-check
    compares the steps' outputs after the last layer with those of one pass over the whole text.
    Raises `UsageError` for texts of different lengths, and `MhaError` for a model that does not decode.
    """
    n = _length(run, prompt_len)
    kind, number = (run.wanted.model.layers or ((None, 0),))[0]
    kind = kind or ("decoder" if run.loaded.config.is_encoder_decoder else "self")
    run.wanted = replace(run.wanted, model=replace(run.wanted.model, layers=((kind, number),)), keep=("pattern",))
    run.run()
    record = run.record()
    _require_decodable(record, n, run.wanted.keep_limit)
    assert record.model is not None
    began, model, layer, n_layers = perf_counter(), run.loaded.model, record.layers[0], record.model.n_layers
    full = _last(outputs_of(model, run.inputs.keywords))
    pattern = torch.zeros(len(run.inputs.sequences), layer.n_heads, n, n)
    steps, cache = _decoded(run, layer, prompt_len, full, pattern)
    # the tolerance grows with the layers, because each rounds again
    tolerance = TOLERANCES[run.loaded.dtype].output * max(1, n_layers) * full.abs().amax().item()
    of_head = n_layers * (layer.d_head + layer.d_v) * next(model.parameters()).element_size()
    token, weights, seconds = layer.n_kv_heads * of_head, weight_bytes(model), perf_counter() - began
    return replace(
        record,
        arrays=dict(record.arrays) | {f"{layer_prefix(0)}pattern": to_array(pattern)},
        trace=tuple(steps),
        self_check=SelfCheck.of(largest_of(steps), tolerance),
        timings=dict(record.timings) | {"decoding": timing(seconds, [seconds])},
        decoding=DecodeSummary(
            cache, prompt_len, weights, token, layer.n_heads * of_head, crossing_len=weights / max(1, token)
        ),
    )


def _length(run: CheckpointRun, prompt_len: int) -> int:
    """The number of tokens of every text. Raises `UsageError` for texts that cannot be decoded step by step."""
    n = len(run.inputs.sequences[0].ids)
    if any(len(text.ids) != n for text in run.inputs.sequences):
        raise UsageError("mha decode --model needs texts of one length", hint="decode each text in a run of its own")
    if not 0 <= prompt_len <= n:
        raise UsageError(f"--prompt-len {prompt_len} is out of range: the text has {n} tokens")
    if run.wanted.keep is not None:
        raise UsageError(
            "--keep does not work with mha decode --model, which keeps the pattern", hint="leave out --keep"
        )
    return n


def _require_decodable(record: Record, n: int, keep_limit: int) -> None:
    """Raises `MhaError` if the pattern was too large to keep, or if queries see later tokens."""
    layer = record.layers[0]
    if record.not_kept:
        raise MhaError(
            f"the pattern of {n} × {n} tokens takes more than --keep-limit, {format_size(keep_limit)}",
            hint=f"--max-tokens {n // 2} takes a shorter text, a larger --keep-limit makes room",
            code="too-large",
        )
    if layer.kind == "self" and record.model is not None and not layer.mask.startswith("causal"):
        raise MhaError(
            f"{record.model.path} is an encoder: its tokens see later ones, so it has no cache",
            hint=f"mha run TEXT --model {shlex.quote(record.model.path)} shows its attention",
            code="not-causal",
        )
    if layer.kind not in ("self", "decoder") or not layer.mask.startswith("causal"):
        raise MhaError(
            f"mha decode needs attention that sees no later token, but {layer.name} sees {layer.mask}",
            code="not-causal",
        )


def _decoded(
    run: CheckpointRun,
    layer: InspectedLayer,
    prompt_len: int,
    full: Tensor,
    pattern: Float[Tensor, "batch head query key"],
) -> tuple[list[Step], str]:
    """The steps, each compared with its rows of the `full` output, and the class of the model's cache. Writes the `pattern`."""
    model, given, texts = run.loaded.model, run.inputs.keywords, run.inputs.sequences
    name, batch, steps, taken = "input_ids", len(texts), list[Step](), list[Call]()
    others: dict[str, Any] = {"use_cache": True, "past_key_values": None}
    if "decoder_input_ids" in given:
        name, mask = "decoder_input_ids", given.get("attention_mask")
        others["encoder_outputs"] = model.get_encoder()(input_ids=given["input_ids"], attention_mask=mask)
        others |= {} if mask is None else {"attention_mask": mask}

    def take(call: Call) -> None:
        if (call.layer, call.kind, call.title) == (layer.layer, layer.kind, layer.name):
            taken[:] = [call]

    for number, (start, end) in enumerate(spans_of(prompt_len, pattern.shape[2])):
        began, keywords = perf_counter(), {name: given[name][:, start:end], **others}
        with captured(model, take, batch=batch):
            outputs = run_model(model, partial(model, **keywords))
        seconds, out, call, n_new = perf_counter() - began, _last(outputs), taken[0], end - start
        others["past_key_values"] = outputs.get("past_key_values")
        if others["past_key_values"] is None:
            message = f"mha decode needs a model with a KV cache, which {type(model).__name__} does not return"
            raise MhaError(message, code="no-cache")
        real = torch.ones(batch, n_new, dtype=torch.bool, device=run.loaded.device)
        rows = as_attention(call, real).matrices()["pattern"].float().cpu()
        pattern[:, :, start:end, end - rows.shape[3] : end] = rows  # a cache with a window has dropped earlier keys
        k_len = end if call.k is None else call.k.shape[2]
        token = batch * layer.n_kv_heads * (layer.d_head + layer.d_v) * out.element_size()
        steps.append(
            decode_step(
                number,
                (start, end),
                out,
                prompt_len=prompt_len,
                tokens=[text.tokens[start:end] for text in texts],
                n_keys=k_len,
                shapes=[
                    (batch, layer.n_heads, n_new, layer.d_head),
                    (batch, layer.n_kv_heads, n_new, layer.d_head),
                    (batch, layer.n_kv_heads, n_new, layer.d_v),
                ],
                token_bytes=token,
                moved_bytes=(k_len + n_new) * token,
                cache_bytes=k_len * token,
                difference=largest_difference(out, full[:, start:end]),
                axes=("batch", "query", "d_model"),
                formula=f"out = all layers of the model, {layer.label} meeting {k_len} keys",
                flops=2 * batch * layer.n_heads * n_new * k_len * (layer.d_head + layer.d_v),
                time_s=seconds,
            )
        )
    return steps, type(others["past_key_values"]).__name__


def _last(outputs: Mapping[str, Any]) -> Tensor:
    """The output of the last layer; in an encoder-decoder, of the decoder."""
    hidden = outputs.get("last_hidden_state")
    if isinstance(hidden, Tensor):
        return hidden
    return next(tensor for tensor in outputs.values() if isinstance(tensor, Tensor))
