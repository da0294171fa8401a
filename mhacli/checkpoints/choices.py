"""What a family's config says of an attention, as far as a layer of ours can say it too: positions, mask, scale.

What it cannot say becomes a note, so that nothing is left out in silence. Source: the modeling and configuration files of
transformers 5.23, by family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mhacli.checkpoints.families import Family, family_of
from mhacli.checkpoints.head_counts import Sizes, part_of


class Choices(NamedTuple):
    """Fields of our `Config` by name, and what they leave out."""

    fields: dict[str, Any]
    notes: tuple[str, ...]


def choices_of(config: Mapping[str, Any], stack: str, layer: int, sizes: Sizes) -> Choices:
    """Positions, causality, window, scale and softcap of one layer, by the config of a checkpoint."""
    family = family_of(config)
    if family is None:
        return Choices(
            {"positions": "none"}, ("positions and mask are not known: the run decides (--positions, --causal)",)
        )
    own = part_of(config, stack if stack in ("text", "vision") else None)
    if stack == "cross":
        fields, notes = _scale(own, family, layer, sizes)
        return Choices({"positions": "none"} | fields, notes)
    fields, notes = _positions(own, family, layer, sizes)
    kind = _layer_type(own, layer)
    causal = (stack in family.causal or bool(own.get("is_decoder"))) and not own.get("use_bidirectional_attention")
    fields |= {"causal": True} if causal else {}
    window = _window(own, kind)
    if window is not None:
        fields["window"] = (window, 0 if causal else window)
    scale, more = _scale(own, family, layer, sizes)
    return Choices(fields | scale, notes + more)


def _scale(
    config: Mapping[str, Any], family: Family, layer: int, sizes: Sizes
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The factor on dot products and their softcap, where they are not the usual ones."""
    fields: dict[str, Any] = {}
    scale = sizes.d_head**-0.5
    mpt = config.get("attn_config") if isinstance(config.get("attn_config"), Mapping) else {}
    if family.without_scale or config.get("scale_attn_weights") is False:
        scale = 1.0
    for number in (_number(config.get("attention_multiplier")), _number((mpt or {}).get("softmax_scale"))):
        scale = scale if number is None else number
    scalar = _number(config.get("query_pre_attn_scalar"))
    if scalar is not None and scalar > 0:
        scale = scalar**-0.5
    if config.get("scale_attn_by_inverse_layer_idx"):
        scale /= layer + 1
    if family.layout == "deberta-v2" and config.get("relative_attention"):
        said = config.get("pos_att_type")
        kinds = said if isinstance(said, (str, list)) else []
        scale = (sizes.d_head * (1 + sum(kind in kinds for kind in ("c2p", "p2c")))) ** -0.5
    if scale != sizes.d_head**-0.5:
        fields["scale"] = scale
    softcap = _number(config.get("attn_logit_softcapping"))
    if softcap is not None and softcap > 0:
        fields["softcap"] = softcap
    clip = config.get("clip_qkv") or (mpt or {}).get("clip_qkv")
    return fields, ((f"clip_qkv {clip} is not part of the layer: it bounds queries, keys and values",) if clip else ())


def _positions(
    config: Mapping[str, Any], family: Family, layer: int, sizes: Sizes
) -> tuple[dict[str, Any], tuple[str, ...]]:
    if family.positions in ("rope", "rope-interleaved") and not config.get("alibi"):
        return _rotary(config, family, layer, sizes)
    if family.positions == "relative":
        return {"positions": "none"}, ("positions are none: learned scores of distances are not part of the layer",)
    mpt = config.get("attn_config")
    if family.layout == "mpt" and isinstance(mpt, Mapping):
        uneven = sizes.n_heads & (sizes.n_heads - 1)
        if not mpt.get("alibi", True):
            return {"positions": "none"}, ("positions are none: learned ones of MPT are not read",)
        if uneven or mpt.get("alibi_bias_max", 8) != 8:
            return {"positions": "none"}, ("positions are none: MPT orders the slopes of ALiBi in another way",)
    if config.get("alibi") and family.positions != "alibi":
        return {"positions": "none"}, ("positions are none: Falcon scales ALiBi by 1/√d_head, in bfloat16",)
    return {"positions": family.positions}, ()


def _rotary(
    config: Mapping[str, Any], family: Family, layer: int, sizes: Sizes
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Rotary positions, where they turn all columns; else none, and why."""
    angles, kind = config.get("rope_parameters"), _layer_type(config, layer)
    angles = angles if isinstance(angles, Mapping) else {}
    own = angles.get(kind)
    angles = own if isinstance(own, Mapping) else angles
    turned = _turned_columns(config, angles, sizes.d_head)
    if turned != sizes.d_head:
        said = f"positions are none: rotary ones turn {turned} of {sizes.d_head} columns, which a layer of ours cannot"
        return {"positions": "none"}, (said,)
    local = kind == "sliding_attention"
    names = (("rope_local_base_freq",) if local and "rope_local_base_freq" in config else ()) + (
        ("local_rope_theta" if local else "global_rope_theta"), "rope_theta", "rotary_emb_base",
    )  # fmt: skip
    said_theta = [_number(angles.get("rope_theta")), *(_number(config.get(name)) for name in names)]
    theta = next((number for number in said_theta if number is not None and number > 0), 10_000.0)
    scaling = config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    kinds = [source.get(name) for source in (angles, scaling) for name in ("rope_type", "type")]
    changed = next((str(one) for one in kinds if one not in (None, "default")), None)
    notes = (
        (f"rope_type {changed:.40} is not part of the layer: its angles are those of rope_theta alone",)
        if changed
        else ()
    )
    return {"positions": family.positions, "rope_theta": theta}, notes


def _turned_columns(config: Mapping[str, Any], angles: Mapping[str, Any], d_head: int) -> int:
    """How many columns of a head rotary positions turn."""
    said = config.get("rotary_dim")
    if isinstance(said, int) and not isinstance(said, bool):
        return said
    shares = (angles.get("partial_rotary_factor"), config.get("partial_rotary_factor"), config.get("rotary_pct"))
    share = next((number for number in map(_number, shares) if number is not None), 1.0)
    return int(d_head * share)


def _layer_type(config: Mapping[str, Any], layer: int) -> str:
    """`sliding_attention` or `full_attention`; by the family's rule where the config does not list its layers."""
    listed = config.get("layer_types", config.get("attention_layers"))
    if isinstance(listed, list) and layer < len(listed):
        return "sliding_attention" if listed[layer] in ("sliding_attention", "local") else "full_attention"
    family, slides = config.get("model_type"), False
    if family in ("mistral", "mixtral", "phi3"):
        slides = True
    elif family in ("gemma2", "gpt_oss"):
        slides = layer % 2 == 0
    elif family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        slides = bool(config.get("use_sliding_window")) and layer >= _whole(config.get("max_window_layers"), 0)
    elif family in ("gemma3", "gemma3_text"):
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
        slides = (layer + 1) % max(1, _whole(pattern, 6)) != 0
    elif family == "modernbert":
        slides = layer % max(1, _whole(config.get("global_attn_every_n_layers"), 3)) != 0
    elif family == "gpt_neo":
        slides = layer % 2 == 1
    return "sliding_attention" if slides else "full_attention"


def _window(config: Mapping[str, Any], kind: str) -> int | None:
    """How many keys to the left of its own a query sees; None for all."""
    if kind != "sliding_attention":
        return None
    if config.get("model_type") == "modernbert":
        return max(0, _whole(config.get("local_attention"), 128) // 2)
    width = config.get("sliding_window", config.get("window_size"))
    return max(0, _whole(width, 1) - 1) if isinstance(width, int) and not isinstance(width, bool) else None


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e30 else None
