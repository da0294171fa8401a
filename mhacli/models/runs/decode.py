"""Decodes a text with a checkpoint and its own cache, token by token, and compares each step with a full pass."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.attention.taps import largest_difference, timing, to_array
from mhacli.errors import MhaError, UsageError
from mhacli.io.data import finite
from mhacli.io.files import format_size
from mhacli.layer.decode import decode_step, largest_of, phase_of, spans_of
from mhacli.models.calls import Call, as_attention
from mhacli.models.capture import captured
from mhacli.models.inputs import run_model
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
    n = _length(run, prompt_len)
    chosen = run.wanted.model.layers or ((None, 0),)
    kind = chosen[0][0] or ("decoder" if run.loaded.config.is_encoder_decoder else "self")
    run.wanted = replace(run.wanted, model=replace(run.wanted.model, layers=((kind, chosen[0][1]),)), keep=("pattern",))
    run.run()
    record = run.record()
    layer = record.layers[0]
    _require_decodable(record, n, run.wanted.keep_limit)
    began = perf_counter()
    assert record.model is not None
    rows = torch.zeros(len(run.inputs.sequences), layer.n_heads, n, n)
    decoder = _Decoder(run, layer, prompt_len, record.model.n_layers, rows)
    full = decoder.full()
    decoder.decode(full)
    check = decoder.check(full)
    arrays = dict(record.arrays) | {f"{layer_prefix(0)}pattern": to_array(decoder.pattern)}
    seconds = perf_counter() - began
    timings = dict(record.timings) | {"decoding": timing(seconds, [seconds])}
    return replace(
        record,
        arrays=arrays,
        trace=tuple(decoder.steps),
        self_check=check,
        timings=timings,
        decoding=decoder.summary(),
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


@dataclass
class _Decoder:
    """The steps of decoding, and the pattern of one layer."""

    run: CheckpointRun
    layer: InspectedLayer
    prompt_len: int
    n_layers: int
    pattern: Float[Tensor, "batch head query key"]
    steps: list[Step] = field(default_factory=list)
    cache: Any = None
    _call: Call | None = None
    _others: dict[str, Any] = field(default_factory=dict)

    @property
    def _ids(self) -> tuple[str, Tensor]:
        """The keyword of the token ids, and the ids."""
        name = "decoder_input_ids" if "decoder_input_ids" in self.run.inputs.keywords else "input_ids"
        return name, self.run.inputs.keywords[name]

    def full(self) -> Tensor:
        """The last layer's output of one pass over the whole text. The output of an encoder is kept for the steps."""
        name, _ = self._ids
        others = {key: tensor for key, tensor in self.run.inputs.keywords.items() if key != name}
        if name != "input_ids":
            model = self.run.loaded.model
            mask = others.get("attention_mask")
            self._others = {"encoder_outputs": model.get_encoder()(input_ids=others["input_ids"], attention_mask=mask)}
            self._others |= {} if mask is None else {"attention_mask": mask}
        model, keywords = self.run.loaded.model, self.run.inputs.keywords
        return _last(run_model(model, lambda: model(**keywords, use_cache=False)))

    def decode(self, full: Tensor) -> None:
        """Runs all steps: the prompt at once, then one token at a time."""
        for number, span in enumerate(spans_of(self.prompt_len, self.pattern.shape[2])):
            self._step(number, span, full)

    def _step(self, number: int, span: tuple[int, int], full: Tensor) -> None:
        name, ids = self._ids
        start, end = span
        keywords = {name: ids[:, start:end], **self._others, "use_cache": True, "past_key_values": self.cache}
        began = perf_counter()
        model = self.run.loaded.model
        with captured(model, self._take, batch=ids.shape[0]):
            outputs = run_model(model, lambda: model(**keywords))
        seconds = perf_counter() - began
        self.cache = outputs.get("past_key_values")
        if self.cache is None:
            raise MhaError(f"mha decode needs a model with a KV cache, which {type(model).__name__} does not return",
                           code="no-cache")  # fmt: skip
        out = _last(outputs)
        assert self._call is not None, "the layer was there in the full pass"
        self._keep_row(self._call, span)
        difference = finite(largest_difference(out, full[:, start:end]))
        self.steps.append(self._step_entry(number, span, self._call, out, seconds, difference))

    def _take(self, call: Call) -> None:
        if (call.layer, call.kind, call.title) == (self.layer.layer, self.layer.kind, self.layer.name):
            self._call = call

    def _keep_row(self, call: Call, span: tuple[int, int]) -> None:
        """Stores the rows of a step. Its keys are the last ones; a cache with a window has dropped earlier ones."""
        q_len = span[1] - span[0]
        real = torch.ones(self.pattern.shape[0], q_len, dtype=torch.bool, device=self.run.loaded.device)
        rows = as_attention(call, real).matrices()["pattern"].float().cpu()
        self.pattern[:, :, span[0] : span[1], span[1] - rows.shape[3] : span[1]] = rows

    def _step_entry(
        self, number: int, span: tuple[int, int], call: Call, out: Tensor, seconds: float, difference: float | None
    ) -> Step:
        (start, end), layer = span, self.layer
        batch, n_new = out.shape[0], end - start
        k_len = end if call.k is None else call.k.shape[2]
        token = batch * layer.n_kv_heads * (layer.d_head + layer.d_v) * out.element_size()
        new = (batch, layer.n_kv_heads, n_new)
        return decode_step(
            number,
            out,
            n_keys=k_len,
            axes=("batch", "query", "d_model"),
            formula=f"out = all layers of the model, {layer.label} meeting {k_len} keys",
            flops=2 * batch * layer.n_heads * n_new * k_len * (layer.d_head + layer.d_v),
            time_s=seconds,
            cache=CacheStep(
                phase=phase_of(number, self.prompt_len),
                start=start,
                tokens=tuple(text.tokens[start:end] for text in self.run.inputs.sequences),
                q_shape=(batch, layer.n_heads, n_new, layer.d_head),
                k_shape=(*new, layer.d_head),
                v_shape=(*new, layer.d_v),
                n_past=k_len - n_new,
                read_bytes=k_len * token,
                appended_bytes=n_new * token,
                moved_bytes=(k_len + n_new) * token,
                cache_bytes=k_len * token,
                max_abs_difference=difference,
            ),
        )

    def check(self, full: Tensor) -> SelfCheck:
        """The difference of the steps' outputs from the full pass. The tolerance grows with the layers, because each rounds
        again."""
        tolerance = TOLERANCES[self.run.loaded.dtype].output * max(1, self.n_layers) * full.abs().amax().item()
        return SelfCheck.of(largest_of(self.steps), tolerance)

    def summary(self) -> DecodeSummary:
        """The size of the model's cache over all layers."""
        model, layer = self.run.loaded.model, self.layer
        item = next(model.parameters()).element_size()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        token, full = (self.n_layers * n * (layer.d_head + layer.d_v) * item for n in (layer.n_kv_heads, layer.n_heads))
        return DecodeSummary(type(self.cache).__name__, self.prompt_len, weights, token, full, weights / max(1, token))


def _last(outputs: Mapping[str, Any]) -> Tensor:
    """The output of the last layer; in an encoder-decoder, of the decoder."""
    hidden = outputs.get("last_hidden_state")
    if isinstance(hidden, Tensor):
        return hidden
    return next(tensor for tensor in outputs.values() if isinstance(tensor, Tensor))
