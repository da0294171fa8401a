"""Tiny models of the families whose attention is watched, with random numbers in every parameter, and what they must give.

Widths, heads and layers are small; biases, norms and learned sinks are random too, so that leaving one out is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mhacli.adapters.hf.calls import Call, ScoredCall
from mhacli.adapters.hf.capture import captured
from mhacli.adapters.hf.captured_pattern import KnownMasks, as_attention, full_matrices
from mhacli.adapters.hf.inputs import ModelInputs, make_inputs
from mhacli.adapters.hf.load import Loaded
from mhacli.checkpoints.folder import Checkpoint
from mhacli.spec.tokens import TokenSequence

VOCABULARY, N_LAYERS, N_HEADS, WINDOW = 99, 3, 4, 5
Q_LEN, K_LEN, IMAGE, SOUND = 11, 13, 17, 19
"""Tokens of the texts, of what an encoder reads, patches of an image with its class, and frames of a sound."""

BASE = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PLAIN = {"hidden_size": 48, "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "intermediate_size": 64}
GROUPED = {**BASE, **PLAIN, "num_key_value_heads": 2}
GPT = {**BASE, "n_embd": 48, "n_layer": N_LAYERS, "n_head": N_HEADS, "n_positions": 64}
FALCON = {**BASE, "hidden_size": 48, "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS}
HALVES = {**BASE, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": N_HEADS,
          "decoder_attention_heads": N_HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
          "decoder_start_token_id": 1}  # fmt: skip
PICTURE = {**PLAIN, "image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class Family:
    """A family's `model_type`, its config, and what must be found: the path that it runs, and what its queries see.

    `windows` are those of its layers, None for none. `note` is what the document tells of it.
    """

    kind: str
    choices: Mapping[str, Any]
    level: str
    implementation: str
    kernel: str
    n_kv_heads: int = N_HEADS
    causal: bool = True
    windows: tuple[int | None, ...] = (None,) * N_LAYERS
    note: str = ""


def _sdpa(kind: str, choices: Mapping[str, Any], **more: Any) -> Family:
    """A family that asks the registry for `sdpa`, which is torch's flash kernel on a CPU."""
    return Family(kind, choices, "registry", "sdpa", "flash", **more)


def _eager(kind: str, choices: Mapping[str, Any], **more: Any) -> Family:
    return Family(kind, choices, "module", "eager", "eager", **more)


def _written(kind: str, choices: Mapping[str, Any], **more: Any) -> Family:
    return Family(kind, choices, "softmax", "eager", "softmax", **more)


ALTERNATING = (WINDOW, None, WINDOW)
FAMILIES: dict[str, Family] = {
    "gpt2": _sdpa("gpt2", GPT),
    "llama": _sdpa("llama", GROUPED, n_kv_heads=2),
    "mistral": _sdpa("mistral", {**GROUPED, "sliding_window": WINDOW, "head_dim": 12}, n_kv_heads=2,
                     windows=(WINDOW,) * N_LAYERS),
    "qwen2": _sdpa("qwen2", GROUPED, n_kv_heads=2),
    "qwen3": _sdpa("qwen3", {**GROUPED, "head_dim": 16}, n_kv_heads=2, note="norms of q and k"),
    "gemma2": _eager("gemma2", {**GROUPED, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
                                "attn_logit_softcapping": 2.0}, n_kv_heads=2, windows=ALTERNATING),
    "gemma3_text": _sdpa("gemma3_text", {**GROUPED, "head_dim": 16, "sliding_window": WINDOW,
                                         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
                         n_kv_heads=2, windows=ALTERNATING),
    "phi3": _sdpa("phi3", GROUPED, n_kv_heads=2),
    "gpt_neox": _sdpa("gpt_neox", {**BASE, **PLAIN}, note="rotation of a quarter of each head"),
    "olmo2": _sdpa("olmo2", GROUPED, n_kv_heads=2),
    "mixtral": _sdpa("mixtral", {**GROUPED, "num_local_experts": 4, "head_dim": 12}, n_kv_heads=2),
    "gpt_oss": _eager("gpt_oss", {**GROUPED, "num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW},
                      n_kv_heads=2, windows=ALTERNATING),
    "granite_swa": _eager("granite_swa", {**GROUPED, "sliding_window": WINDOW, "attention_multiplier": 0.25,
                                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
                          n_kv_heads=2, windows=ALTERNATING,
                          note="transformers' `eager` prints the weights before the sink takes its part"),
    "inkling2_text": _eager("inkling2_text", {**GROUPED, "head_dim": 16, "swa_num_attention_heads": N_HEADS,
                                              "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 8,
                                              "sliding_window_size": WINDOW, "n_routed_experts": 4,
                                              "num_experts_per_tok": 2, "unpadded_vocab_size": VOCABULARY,
                                              "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
                            n_kv_heads=2, windows=ALTERNATING, note="a sink's score for each query"),
    "falcon": Family("falcon", FALCON, "sdpa", "sdpa", "math", n_kv_heads=1),
    "falcon-groups": Family("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, "sdpa", "sdpa",
                            "flash", note="kv heads are copied for their groups"),
    "falcon-alibi": Family("falcon", {**FALCON, "alibi": True, "multi_query": False}, "sdpa", "sdpa", "flash",
                           note="ALiBi within the mask, which transformers' `eager` adds twice"),
    "bloom": _written("bloom", {**BASE, "hidden_size": 48, "n_layer": N_LAYERS, "n_head": N_HEADS},
                      note="ALiBi within the scores"),
    "gptj": _written("gptj", {**GPT, "rotary_dim": 8}),
    "mpt": _written("mpt", {**BASE, "d_model": 48, "n_layers": N_LAYERS, "n_heads": N_HEADS, "max_seq_len": 64},
                    note="ALiBi within the scores"),
    "opt": _sdpa("opt", {**BASE, "hidden_size": 48, "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS,
                         "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 48},
                 note="queries are scaled beforehand"),
    "bert": _sdpa("bert", {**BASE, **PLAIN}, causal=False),
    "roberta": _sdpa("roberta", {**BASE, **PLAIN, "pad_token_id": 1, "bos_token_id": 0}, causal=False),
    "distilbert": _sdpa("distilbert", {**BASE, "dim": 48, "n_layers": N_LAYERS, "n_heads": N_HEADS, "hidden_dim": 64},
                        causal=False),
    "modernbert": _sdpa("modernbert", {**BASE, **PLAIN, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
                        causal=False, windows=(None, 4, 4), note="windows to both sides"),
    "deberta-v2": _written("deberta-v2", {**BASE, **PLAIN, "relative_attention": True,
                                          "pos_att_type": ["p2c", "c2p"]}, causal=False,
                           note="scores of relative positions"),
    "t5": _sdpa("t5", {**BASE, "d_model": 48, "d_kv": 12, "num_layers": 2, "num_heads": N_HEADS, "d_ff": 64,
                       "decoder_start_token_id": 0}, note="scores are not scaled"),
    "bart": _sdpa("bart", {**HALVES, "max_position_embeddings": 64}),
    "whisper": _sdpa("whisper", {**HALVES, "max_source_positions": SOUND, "max_target_positions": 40,
                                 "num_mel_bins": 8, "begin_suppress_tokens": None}, note="reads sound"),
    "vit": _sdpa("vit", PICTURE, causal=False, note="reads images"),
    "clip": _sdpa("clip", {"text_config": {**PLAIN, **BASE}, "vision_config": PICTURE}, note="reads images and text"),
}  # fmt: skip
PAIRS = ("t5", "bart", "whisper")
OF_TEXT = tuple(name for name in FAMILIES if name not in ("whisper", "vit", "clip"))


@functools.cache
def tiny(name: str) -> Any:
    """The model of a family in evaluation, the same in every process, with the implementation that it chooses itself."""
    family = FAMILIES[name]
    return made(family.kind, family.choices)


def made(kind: str, choices: Mapping[str, Any], *, automatic: str = "AutoModel", seed: int = 0, **asked: Any) -> Any:
    """A model of a config, with random numbers in every parameter, which nothing trains."""
    import transformers

    transformers.logging.set_verbosity_error()
    automatically = getattr(transformers, automatic)
    model = automatically.from_config(transformers.AutoConfig.for_model(kind, **choices), **asked).eval()
    randomise(model, seed)
    return model.requires_grad_(False)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Gives every parameter random numbers of a size at which attention has something to choose: no bias is 0, no norm 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim <= 1:
            is_norm = name.endswith("weight") or "norm" in name
            noise = noise * 0.3 + (1.0 if is_norm else 0.0)
        elif "embed" not in name.lower() and ".wte" not in name and ".wpe" not in name:
            noise = noise * (1.5 if ".attn" in name or "att" in name.lower() else 1.0) * parameter.shape[-1] ** -0.5
        parameter.copy_(noise)


def ids_of(n_texts: int, n: int, seed: int = 1) -> Tensor:
    """Random ids, none of them special, some more than once."""
    return torch.randint(3, 40, (n_texts, n), generator=torch.Generator().manual_seed(seed))


def keywords_of(name: str) -> dict[str, Tensor]:
    """What a model of the family takes: two texts of one length, without padding."""
    generator = torch.Generator().manual_seed(2)
    ids = ids_of(2, Q_LEN)
    picture = torch.randn(2, 3, 32, 32, generator=generator)
    special = {
        "vit": {"pixel_values": picture},
        "clip": {"input_ids": ids, "pixel_values": picture},
        "whisper": {"input_features": torch.randn(2, 8, 2 * SOUND, generator=generator), "decoder_input_ids": ids},
        "t5": {"input_ids": ids_of(2, K_LEN, seed=3), "decoder_input_ids": ids},
        "bart": {"input_ids": ids_of(2, K_LEN, seed=3), "decoder_input_ids": ids},
    }
    return special.get(name, {"input_ids": ids})


class Watched(NamedTuple):
    """One attention as it was seen, and what was made of it."""

    call: Call
    matrices: dict[str, Tensor]


def tensors_in(outputs: Any) -> list[Tensor]:
    """All tensors of an output, those of its parts among them."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    return [tensor for part in outputs for tensor in tensors_in(part)] if isinstance(outputs, (tuple, list)) else []


@torch.no_grad()
def run_plain(model: Any, keywords: Mapping[str, Any], **more: Any) -> Any:
    """The outputs of a pass that nobody watches, without a cache."""
    is_cached = hasattr(model.config, "use_cache")
    return model(**keywords, **({"use_cache": False} if is_cached else {}), **more)


def calls_of(model: Any, keywords: Mapping[str, Any], batch: int) -> tuple[list[Call], list[Tensor]]:
    """Every attention of a pass in the order of execution, and the outputs of that pass."""
    calls: list[Call] = []
    with captured(model, calls.append, batch=batch):
        outputs = run_plain(model, keywords)
    return calls, tensors_in(outputs)


def matrices_of(call: Call, real: Tensor | None = None) -> dict[str, Tensor]:
    """The matrices of a call; `real` are the queries that are tokens."""
    rows = call.q if isinstance(call, ScoredCall) else call.scores  # type: ignore[attr-defined]
    real = torch.ones(rows.shape[0], rows.shape[2], dtype=torch.bool) if real is None else real
    return full_matrices(as_attention(call, real, KnownMasks()))


def product(pattern: np.ndarray, v: np.ndarray) -> np.ndarray:
    """z in float64: query head h reads the values of kv head h // group."""
    group = pattern.shape[1] // v.shape[1]
    heads = [pattern[:, h].astype(np.float64) @ v[:, h // group].astype(np.float64) for h in range(pattern.shape[1])]
    return np.stack(heads, axis=1)


def eager_patterns(name: str, keywords: Mapping[str, Any]) -> list[Tensor]:
    """The attentions that the family returns itself, in the order of execution: by a twin that was made for `eager`."""
    family = FAMILIES[name]
    twin = made(family.kind, family.choices, attn_implementation="eager")
    outputs = run_plain(twin, keywords, output_attentions=True)
    if "encoder_attentions" in outputs:
        both = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
        return [*outputs.encoder_attentions, *(pattern for pair in both for pattern in pair)]
    if "vision_model_output" in outputs:
        return [*outputs.vision_model_output.attentions, *outputs.text_model_output.attentions]
    return list(outputs.attentions)


def sights_of(name: str) -> list[tuple[str, int | None]]:
    """What the queries of each attention of a family see, `causal` or `all`, and within which window."""
    family = FAMILIES[name]
    if name in PAIRS:
        return [("all", None)] * 2 + [("causal", None), ("all", None)] * 2
    if name == "clip":
        return [("all", None)] * N_LAYERS + [("causal", None)] * N_LAYERS
    return [("causal" if family.causal else "all", window) for window in family.windows]


def visible(sees: str, window: int | None, n_queries: int, n_keys: int) -> np.ndarray:
    """Which keys a query sees, cell by cell: a window counts the query itself where only earlier keys are seen."""
    allowed = np.ones((n_queries, n_keys), dtype=bool)
    for i, j in np.ndindex(n_queries, n_keys):
        if sees == "causal":
            allowed[i, j] = j <= i and (window is None or i - j < window)
        elif window is not None:
            allowed[i, j] = abs(i - j) <= window
    return allowed


# ---------------------------------------------------------------------------------------------------- for the study


def sequence_of(ids: Sequence[int]) -> TokenSequence:
    """Tokens that are the names of their ids."""
    tokens = tuple(f"t{i}" for i in ids)
    return TokenSequence(" ".join(tokens), tokens, tuple(ids), tuple((0, 0) for _ in tokens))


def sequences_of(ids: Tensor) -> tuple[TokenSequence, ...]:
    return tuple(sequence_of(row) for row in ids.tolist())


def loaded_of(model: Any, source: str = "./tiny") -> Loaded:
    """A model as if it came from a folder."""
    return Loaded(model, Checkpoint(source, {}, {}, ()), source, None)


def inputs_of(name: str) -> ModelInputs:
    """The inputs of the study: those of `keywords_of`, with rows that stand for patches and frames where there is no text."""
    keywords = keywords_of(name)
    if name == "vit":
        return ModelInputs(sequences_of(ids_of(2, IMAGE)), None, "right", keywords)
    decoder = sequences_of(keywords.get("decoder_input_ids", keywords.get("input_ids")))  # type: ignore[arg-type]
    if name == "whisper":
        return ModelInputs(decoder, sequences_of(ids_of(2, SOUND)), "right", keywords)
    context = sequences_of(keywords["input_ids"]) if name in PAIRS else None
    return make_inputs(tiny(name), decoder, context, "right", 0)
