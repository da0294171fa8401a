"""Tensor names and layouts of attention weights by model family. Data only, no tensors.

Shapes never identify a layout: `[3·d, d]` can hold queries, keys and values one after the other, or head after head,
and a wrong guess draws a plausible pattern. Source: the modeling files of transformers 5.23, and the sources of torch
2.13, Keras 3 and Flax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from mhacli.errors import MhaError, UsageError
from mhacli.models.sizes import ProjectionSizes

Order = Literal["separate", "stack", "per-head", "per-group", "four-blocks", "kernels"]
"""The order of rows in a fused matrix: q, k, v one after the other; `[head, (q, k, v), d_head]`; for each kv head its
queries, then its key and value; or four blocks, each q, v, k. `kernels` are `[d_model, head, d_head]`."""
KvHeads = Literal["any", "same", "one"]


@dataclass(frozen=True)
class TensorPrefix:
    """The prefix of a layer's tensors. Files of mha are written with `home`; for reading, any prefix may precede one of
    `stems`."""

    home: str
    stems: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The names and order of one attention's tensors on disk.

    `qkv` names one fused tensor or three, and so does `qkv_bias` (empty for a family without biases); the prefix of a
    stack precedes the names. `transposed` matrices are `[d_in, d_out]`. `kv_heads` says whether kv heads may be fewer
    than query heads.
    """

    name: str
    order: Order
    qkv: tuple[str, ...]
    out: str
    qkv_bias: tuple[str, ...]
    out_bias: str
    stacks: Mapping[str, TensorPrefix]
    transposed: bool = False
    kv_heads: KvHeads = "any"


@dataclass(frozen=True)
class Family:
    """The properties of a `model_type`: its layout, its tables, and special features of its attention.

    `causal` are its causal stacks; `table_skip` is the number of rows before position 0 in the table of learned
    positions.
    """

    layout: str
    positions: Literal["learned", "rope", "rope-interleaved", "alibi", "relative", "none"]
    causal: tuple[str, ...] = ()
    embedding: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    table_skip: int = 0
    without_scale: bool = False


def _layer(home: str, *stems: str) -> TensorPrefix:
    return TensorPrefix(home, stems)


def _linears(name: str, names: str, place: Mapping[str, TensorPrefix], *, biases: str = "qkvo") -> Layout:
    """A layout of four separate matrices. `biases` are the projections that may have one."""
    q, k, v, o = names.split()
    bias = [f"{part}.bias" if letter in biases else "" for letter, part in zip("qkvo", (q, k, v, o), strict=True)]
    weights = (f"{q}.weight", f"{k}.weight", f"{v}.weight")
    return Layout(name, "separate", weights, f"{o}.weight", tuple(bias[:3]), bias[3], place)


def _fused(name: str, order: Order, names: str, place: Mapping[str, TensorPrefix], **how: Any) -> Layout:
    """A layout with one matrix for queries, keys and values, and one for the output."""
    qkv, o = names.split()
    return Layout(name, order, (f"{qkv}.weight",), f"{o}.weight", (f"{qkv}.bias",), f"{o}.bias", place, **how)


_GPT = {"self": _layer("transformer.", "h.{layer}.attn.")}
_BERT = {
    "self": _layer("", "encoder.layer.{layer}.attention."),
    "cross": _layer("", "encoder.layer.{layer}.crossattention."),
}
_LLAMA = {"self": _layer("model.", "layers.{layer}.self_attn.")}
_BLOOM = {"self": _layer("transformer.", "h.{layer}.self_attention.")}
_HALVES = {
    "encoder": _layer("model.", "encoder.layers.{layer}.self_attn."),
    "decoder": _layer("model.", "decoder.layers.{layer}.self_attn."),
    "cross": _layer("model.", "decoder.layers.{layer}.encoder_attn."),
}
_T5 = {
    "encoder": _layer("", "encoder.block.{layer}.layer.0.SelfAttention."),
    "decoder": _layer("", "decoder.block.{layer}.layer.0.SelfAttention."),
    "cross": _layer("", "decoder.block.{layer}.layer.1.EncDecAttention."),
}
_CLIP = {
    "text": _layer("", "text_model.encoder.layers.{layer}.self_attn."),
    "vision": _layer("", "vision_model.encoder.layers.{layer}.self_attn."),
}
_ALONE = {"self": _layer("", "encoder.layers.{layer}.self_attn.")}
_TORCH = {"self": _layer("", "self_attn.", ""), "cross": _layer("", "multihead_attn.")}
_ANY = {"self": _layer("", "")}
_LINEARS = "q_proj k_proj v_proj out_proj"
_KERNELS = ("query/kernel", "key/kernel", "value/kernel")
_KERNEL_BIASES = ("query/bias", "key/bias", "value/bias")

_EVERY = (
    _fused("gpt2", "stack", "c_attn c_proj", _GPT, transposed=True, kv_heads="same"),
    _fused("gpt_bigcode", "stack", "c_attn c_proj", _GPT, kv_heads="one"),
    _fused("gpt_bigcode-per-head", "per-head", "c_attn c_proj", _GPT, kv_heads="same"),
    _linears("bert", "self.query self.key self.value output.dense", _BERT),
    _linears("distilbert", "q_lin k_lin v_lin out_lin", {"self": _layer("", "transformer.layer.{layer}.attention.")}),
    _linears(
        "albert", "query key value dense",
        {"self": _layer("", "encoder.albert_layer_groups.0.albert_layers.0.attention.")},
    ),
    _fused("modernbert", "stack", "Wqkv Wo", {"self": _layer("model.", "layers.{layer}.attn.")}, kv_heads="same"),
    _linears("deberta-v2", "self.query_proj self.key_proj self.value_proj output.dense", _BERT),
    _linears("llama", "q_proj k_proj v_proj o_proj", _LLAMA),
    _linears("qwen2", "q_proj k_proj v_proj o_proj", _LLAMA, biases="qkv"),
    _fused("phi3", "stack", "qkv_proj o_proj", _LLAMA),
    _linears("phi", "q_proj k_proj v_proj dense", _LLAMA),
    _fused(
        "gpt_neox", "per-head", "query_key_value dense",
        {"self": _layer("gpt_neox.", "layers.{layer}.attention.")}, kv_heads="same",
    ),
    _fused("bloom", "per-head", "query_key_value dense", _BLOOM, kv_heads="same"),
    _fused("falcon-multi-query", "stack", "query_key_value dense", _BLOOM, kv_heads="one"),
    _fused("falcon-new-decoder", "per-group", "query_key_value dense", _BLOOM),
    _fused("falcon-per-head", "per-head", "query_key_value dense", _BLOOM, kv_heads="same"),
    _fused("mpt", "stack", "Wqkv out_proj", {"self": _layer("transformer.", "blocks.{layer}.attn.")}),
    _fused("codegen", "four-blocks", "qkv_proj out_proj", _GPT, kv_heads="same"),
    _linears("opt", _LINEARS, {"self": _layer("model.", "decoder.layers.{layer}.self_attn.")}),
    _linears("gptj", _LINEARS, _GPT, biases=""),
    _linears("gpt_neo", _LINEARS, {"self": _layer("transformer.", "h.{layer}.attn.attention.")}, biases="o"),
    _linears("t5", "q k v o", _T5, biases=""),
    _linears("bart", _LINEARS, _HALVES),
    _linears("whisper", _LINEARS, _HALVES, biases="qvo"),
    _linears(
        "vit", "attention.query attention.key attention.value output.dense",
        {"self": _layer("", "encoder.layer.{layer}.attention.")},
    ),
    _linears("clip", _LINEARS, _CLIP),
    _linears("clip-tower", _LINEARS, _ALONE),
    Layout("torch", "stack", ("in_proj_weight",), "out_proj.weight", ("in_proj_bias",), "out_proj.bias", _TORCH,
           kv_heads="same"),
    Layout("torch-separate", "separate", ("q_proj_weight", "k_proj_weight", "v_proj_weight"), "out_proj.weight",
           ("in_proj_bias",), "out_proj.bias", _TORCH, kv_heads="same"),
    Layout("keras", "kernels", _KERNELS, "attention_output/kernel", _KERNEL_BIASES, "attention_output/bias", _ANY),
    Layout("flax", "kernels", _KERNELS, "out/kernel", _KERNEL_BIASES, "out/bias", _ANY),
)  # fmt: skip
LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in _EVERY}
"""Every layout by its name in `--layout` and `--to`."""

_WTE, _WPE, _WORDS, _TOKENS = ("wte.weight",), ("wpe.weight",), ("word_embeddings.weight",), ("embed_tokens.weight",)
_BERT_TABLE = ("embeddings.position_embeddings.weight",)
_SHARED = ("shared.weight", "{tower}.embed_tokens.weight")
_HALVES_TABLE = ("{tower}.embed_positions.weight",)
_CLIP_TOKENS, _CLIP_TABLE = "embeddings.token_embedding.weight", "embeddings.position_embedding.weight"
_ROTARY = Family("llama", "rope", ("self",), _TOKENS)
_BART = Family("bart", "learned", ("decoder",), _SHARED, _HALVES_TABLE, 2)

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family("gpt2", "learned", ("self",), _WTE, _WPE),
    "gpt_bigcode": Family("gpt_bigcode", "learned", ("self",), _WTE, _WPE),
    "bert": Family("bert", "learned", (), _WORDS, _BERT_TABLE),
    "electra": Family("bert", "learned", (), _WORDS, _BERT_TABLE),
    **{
        name: Family("bert", "learned", (), _WORDS, _BERT_TABLE, 2)
        for name in ("roberta", "xlm-roberta", "camembert")
    },
    "distilbert": Family("distilbert", "learned", (), _WORDS, _BERT_TABLE),
    "albert": Family("albert", "learned", (), _WORDS, _BERT_TABLE),
    "modernbert": Family("modernbert", "rope", (), ("tok_embeddings.weight",)),
    "deberta-v2": Family("deberta-v2", "relative", (), _WORDS, _BERT_TABLE),
    **{
        name: _ROTARY
        for name in (
            "llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_oss",
            "olmo", "olmo2", "olmo3", "olmoe", "granite",
        )
    },
    "qwen2": Family("qwen2", "rope", ("self",), _TOKENS),
    "qwen2_moe": Family("qwen2", "rope", ("self",), _TOKENS),
    "phi3": Family("phi3", "rope", ("self",), _TOKENS),
    "phi": Family("phi", "rope", ("self",), _TOKENS),
    "gpt_neox": Family("gpt_neox", "rope", ("self",), ("embed_in.weight",)),
    "bloom": Family("bloom", "alibi", ("self",), _WORDS),
    "falcon": Family("falcon-multi-query", "rope", ("self",), _WORDS),
    "mpt": Family("mpt", "alibi", ("self",), _WTE),
    "codegen": Family("codegen", "rope-interleaved", ("self",), _WTE),
    "opt": Family("opt", "learned", ("self",), _TOKENS, ("decoder.embed_positions.weight",), 2),
    "gptj": Family("gptj", "rope-interleaved", ("self",), _WTE),
    "gpt_neo": Family("gpt_neo", "learned", ("self",), _WTE, _WPE, without_scale=True),
    **{
        name: Family("t5", "relative", ("decoder",), _SHARED, without_scale=True)
        for name in ("t5", "mt5", "umt5")
    },
    "bart": _BART,
    "mbart": _BART,
    "marian": Family("bart", "learned", ("decoder",), _SHARED, _HALVES_TABLE),
    "whisper": Family("whisper", "learned", ("decoder",), ("{tower}.embed_tokens.weight",), _HALVES_TABLE),
    "vit": Family("vit", "learned", (), (), ("embeddings.position_embeddings",)),
    "clip": Family("clip", "learned", ("text",), ("{tower}." + _CLIP_TOKENS,), ("{tower}." + _CLIP_TABLE,)),
    "clip_text_model": Family("clip-tower", "learned", ("self",), (_CLIP_TOKENS,), (_CLIP_TABLE,)),
    "clip_vision_model": Family("clip-tower", "learned", (), (), (_CLIP_TABLE,)),
}  # fmt: skip
"""Every supported `model_type`."""

TOWERS: Mapping[str, str] = {
    "encoder": "encoder", "decoder": "decoder", "cross": "decoder", "text": "text_model", "vision": "vision_model",
}  # fmt: skip
"""The part of tensor names that identifies a tower."""

_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "longcat_flash", "glm4_moe_lite"),
        "keys and values of multi-head latent attention (kv_a_proj_with_mqa, kv_b_proj) have no matrix of their own",
    ),
    "xlnet": "its attention adds learned scores of relative places (r, r_w_bias, r_r_bias) to every dot product",
}


def layout_named(name: str) -> Layout:
    """The layout with this name. Raises `UsageError` that lists the names."""
    if name not in LAYOUTS:
        near = get_close_matches(name, LAYOUTS, n=3)
        did_you_mean = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(f"there is no layout {name!r}", hint=f"{did_you_mean}the layouts are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def family_of(config: Mapping[str, Any]) -> Family | None:
    """The family of a config's `model_type`, or of its language model's; None if unknown."""
    nested = config.get("text_config")
    kinds = [config.get("model_type"), nested.get("model_type") if isinstance(nested, Mapping) else None]
    return next((FAMILIES[kind] for kind in kinds if isinstance(kind, str) and kind in FAMILIES), None)


def layout_of(config: Mapping[str, Any], path: str) -> Layout:
    """The layout that follows from a config's `model_type` and flags.

    Raises `MhaError` for an unknown family, and for attention that is not built from query, key and value matrices.
    """
    kind = config.get("model_type")
    family = family_of(config)
    if isinstance(kind, str) and kind in _REFUSED:
        raise MhaError(
            f"{path}: model_type {kind} is not supported: {_REFUSED[kind]}",
            code="unsupported",
            path=path,
        )
    if kind == "albert" and config.get("num_hidden_groups", 1) != 1:
        raise MhaError(
            f"{path}: num_hidden_groups is {config['num_hidden_groups']!r:.80}; only 1 is supported",
            code="unsupported",
            path=path,
        )
    if family is None:
        fault = "the config has no model_type" if kind is None else f"model_type {kind!r:.80} is not known"
        raise MhaError(
            f"{path}: {fault}; known: {', '.join(FAMILIES)}",
            hint=f"--layout NAME names the layout of the tensors: {', '.join(LAYOUTS)}",
            code="unsupported",
            path=path,
        )
    return LAYOUTS[_by_flags(config, family.layout)]


def _by_flags(config: Mapping[str, Any], name: str) -> str:
    """The layout of families in which flags of the config decide the order of rows under the same tensor names."""
    if name == "gpt_bigcode" and not config.get("multi_query", True):
        return "gpt_bigcode-per-head"
    if name == "falcon-multi-query" and config.get("new_decoder_architecture"):
        return "falcon-new-decoder"
    if name == "falcon-multi-query" and not config.get("multi_query", True):
        return "falcon-per-head"
    return name


# ------------------------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class Shapes:
    """The shapes of a layout's tensors by name: required weights and optional biases."""

    weights: Mapping[str, tuple[int, ...]]
    biases: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def expected_shapes(layout: Layout, sizes: ProjectionSizes) -> Shapes:
    """The shapes of an attention's tensors, by their names after the prefix."""
    heads = ((sizes.n_heads, sizes.d_head), (sizes.n_kv_heads, sizes.d_head), (sizes.n_kv_heads, sizes.d_v))
    rows = [n * width for n, width in heads]
    d_in, d_out, z = sizes.d_input, sizes.d_model, (sizes.n_heads, sizes.d_v)
    if layout.order == "kernels":
        weights: dict[str, tuple[int, ...]] = {name: (d_in, *cut) for name, cut in zip(layout.qkv, heads, strict=True)}
        biases: dict[str, tuple[int, ...]] = dict(zip(layout.qkv_bias, heads, strict=True))
        return Shapes(weights | {layout.out: (*z, d_out)}, biases | {layout.out_bias: (d_out,)})
    matrices = [sum(rows)] if len(layout.qkv) == 1 else rows
    weights = {name: _matrix(n, d_in, layout) for name, n in zip(layout.qkv, matrices, strict=True)}
    vectors = [sum(rows)] if len(layout.qkv_bias) == 1 else rows
    biases = {name: (n,) for name, n in zip(layout.qkv_bias, vectors, strict=True)}
    weights[layout.out] = _matrix(d_out, z[0] * z[1], layout)
    biases[layout.out_bias] = (d_out,)
    return Shapes(weights, {name: shape for name, shape in biases.items() if name})


def _matrix(d_out: int, d_in: int, layout: Layout) -> tuple[int, int]:
    return (d_in, d_out) if layout.transposed else (d_out, d_in)


def require_fitting_heads(layout: Layout, sizes: ProjectionSizes) -> None:
    """Raises `MhaError` for head counts that a layout cannot hold. Otherwise a wrong split would give a plausible
    pattern."""
    n, kv = sizes.n_heads, sizes.n_kv_heads
    fault = None
    if kv < 1 or n % kv:
        fault = f"needs a multiple of its {kv} kv heads, not {n} heads"
    elif layout.kv_heads == "same" and n != kv:
        fault = f"has as many kv heads as heads, not {kv} for {n}"
    elif layout.kv_heads == "one" and kv != 1:
        fault = f"has one kv head, not {kv}"
    elif len(layout.qkv) == 1 and layout.order != "stack" and sizes.d_v != sizes.d_head:
        fault = f"has values as wide as keys, not d_v {sizes.d_v} for d_head {sizes.d_head}"
    elif layout.order == "four-blocks" and n % 4:
        fault = f"needs a multiple of 4 heads, not {n}"
    if fault is not None:
        raise MhaError(f"layout {layout.name} {fault}", code="bad-file")
