"""Plans a conversion before its first tensor: which tensors, which config, which vocabulary."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mhacli.attention.weights_file import DTYPES
from mhacli.checkpoints.families import Family, Layout, family_of, layout_named, layout_of
from mhacli.checkpoints.tensor_names import (
    FoundLayer,
    chosen_stack,
    find_layer,
    find_table,
    require_shapes,
    sizes_from_shapes,
)
from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io import memory
from mhacli.io.files import format_size
from mhacli.io.safetensors import shown_name
from mhacli.models.folder import Checkpoint, StoredTensor
from mhacli.models.sizes import ProjectionSizes, head_counts, part_of, sizes_of
from mhacli.settings import Config

_WIDTH = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True)
class ConversionRequest:
    """The choices of the command line. `sizes` are the given ones of `n_heads`, `n_kv_heads` and `d_head`."""

    layer: int = 0
    stack: str | None = None
    layout: str | None = None
    prefix: str | None = None
    sizes: Mapping[str, int] | None = None
    with_embedding: bool = True


@dataclass(frozen=True)
class Conversion:
    """A complete plan: every tensor exists, and every shape agrees with the config.

    The first `n_tokens` rows of `embedding` are taken, and the rows of `table` from `table_skip` on. Both are None if
    the checkpoint has no fitting one.
    """

    checkpoint: Checkpoint
    layout: Layout
    stack: str
    layer: int
    found: FoundLayer
    sizes: ProjectionSizes
    config: Config
    embedding: StoredTensor | None
    n_tokens: int
    table: StoredTensor | None
    table_skip: int
    vocabulary: tuple[str, ...]
    notes: tuple[str, ...]


def plan_conversion(checkpoint: Checkpoint, request: ConversionRequest) -> Conversion:
    """The plan for converting one layer to a weights file of mha. Raises `MhaError` for an unsuitable checkpoint."""
    layout = (
        layout_named(request.layout) if request.layout is not None else layout_of(checkpoint.config, checkpoint.path)
    )
    stack = chosen_stack(checkpoint, layout, request.stack)
    n_layers = head_counts(checkpoint.config, stack).n_layers
    if n_layers is not None and request.layer >= n_layers:
        raise UsageError(out_of_range("--layer", request.layer, n_layers))
    found_layer = find_layer(checkpoint, layout, request.layer, stack=stack, prefix=request.prefix)
    sizes_given = request.sizes or {}
    if checkpoint.config:
        sizes = sizes_of(checkpoint.config, stack, sizes_given)
    else:
        sizes = sizes_from_shapes(found_layer, layout, sizes_given)
    require_shapes(found_layer, layout, sizes, checkpoint.path)
    fields, notes = choices_of(checkpoint.config, stack, request.layer, sizes)
    tables = _tables(checkpoint, stack, sizes) if request.with_embedding else _Tables()
    fields, more = _with_table(fields, tables)
    words = _words(checkpoint, tables.embedding) if tables.embedding is not None else _Words()
    config = Config(
        d_model=sizes.d_model, n_heads=sizes.n_heads, n_kv_heads=sizes.n_kv_heads, d_head=sizes.d_head, d_v=sizes.d_v,
        d_input=sizes.d_input, bias=any(name in found_layer.tensors for name in (*layout.qkv_bias, layout.out_bias) if name),
        dtype=_dtype(found_layer, tables), tokenizer=words.tokenizer, **fields,
    ).resolved()  # fmt: skip
    plan = Conversion(
        checkpoint, layout, stack, request.layer, found_layer, sizes, config, tables.embedding, words.n_tokens,
        tables.table if config.positions == "learned" else None, tables.skip, words.vocabulary,
        (*found_layer.notes, *notes, *tables.notes, *more, *words.notes, *_before(request.layer, tables)),
    )  # fmt: skip
    _require_memory(plan)
    return plan


@dataclass(frozen=True)
class _Tables:
    """The embedding and the learned positions of a stack, if they are as wide as its input."""

    embedding: StoredTensor | None = None
    table: StoredTensor | None = None
    skip: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Words:
    vocabulary: tuple[str, ...] = ()
    tokenizer: str = "word"
    n_tokens: int = 0
    notes: tuple[str, ...] = ()


def _tables(checkpoint: Checkpoint, stack: str, sizes: ProjectionSizes) -> _Tables:
    family = family_of(checkpoint.config)
    if family is None:
        return _Tables(notes=("no embedding is converted: the model_type is unknown",))
    table_of: dict[str, StoredTensor | None] = {}
    notes = []
    for kind, suffixes in (("embedding", family.embedding), ("table", family.table)):
        name = find_table(checkpoint.tensors.keys(), suffixes, stack)
        tensor = None if name is None else checkpoint.tensors[name]
        if tensor is not None and (len(tensor.shape) < 2 or tensor.shape[-1] != sizes.d_input):
            notes.append(
                f"{shown_name(tensor.name)} {list(tensor.shape)} is left out: the layer reads rows of {sizes.d_input}, and "
                "the model widens these first"
            )
            tensor = None
        table_of[kind] = tensor
    if table_of["embedding"] is None and not notes:
        notes.append(f"there is no embedding of words for the stack {stack}: the layer can be run with --random")
    return _Tables(table_of["embedding"], table_of["table"], family.table_skip, tuple(notes))


def _with_table(fields: dict[str, Any], tables: _Tables) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config fields with the length of the table of learned positions, or with `positions` none without a table."""
    if fields.get("positions") != "learned":
        return fields, ()
    rows = 0 if tables.table is None else tables.table.shape[-2] - tables.skip
    if rows < 1:
        return fields | {"positions": "none"}, ("positions are none: the table of learned positions is not converted",)
    return fields | {"max_positions": rows}, ()


def _words(checkpoint: Checkpoint, embedding: StoredTensor) -> _Words:
    """The vocabulary of the checkpoint's tokenizer, and the number of embedding rows that have a token."""
    rows = embedding.shape[0]
    if checkpoint.tokenizer is None:
        note = "there is no tokenizer.json: name the words of the embedding with --vocab FILE"
        return _Words(n_tokens=rows, notes=(note,))
    from mhacli.text.tokenizers import FileTokenizer

    try:
        vocabulary = FileTokenizer(checkpoint.tokenizer).vocabulary.tokens
    except MhaError as fault:
        if fault.code != "missing-extra":
            raise
        return _Words(n_tokens=rows, notes=(f"there is no vocabulary: {fault.message}",))
    path = os.path.abspath(checkpoint.tokenizer)
    if len(vocabulary) > rows:
        note = f"the vocabulary is left out: tokenizer.json has {len(vocabulary)} tokens, the embedding {rows} rows"
        return _Words(n_tokens=rows, notes=(note,))
    spare = rows - len(vocabulary)
    notes = (f"{spare} rows of the embedding have no token and are left out",) if spare else ()
    return _Words(vocabulary, path, len(vocabulary), notes)


def _before(layer: int, tables: _Tables) -> tuple[str, ...]:
    """A note on the model's computation between the embedding and this layer, which the file does not hold."""
    if tables.embedding is None:
        return ()
    layers = "" if layer == 0 else ", 1 layer" if layer == 1 else f", {layer} layers"
    return (
        f"a run feeds embedded tokens to the layer: what the model does before it (norms, scaling{layers}) is not in the "
        "file",
    )


def _dtype(layer: FoundLayer, tables: _Tables) -> Any:
    """The narrowest dtype of mha that holds all tensors exactly."""
    every = [*layer.tensors.values(), *(each for each in (tables.embedding, tables.table) if each is not None)]
    for tensor in every:
        if tensor.dtype not in DTYPES:
            raise MhaError(
                f"tensor {shown_name(tensor.name)} has dtype {tensor.dtype}, which is not one of {', '.join(DTYPES)}",
                hint="dequantise the weights first",
                code="bad-file",
                path=tensor.file,
            )
    dtypes = {DTYPES[tensor.dtype] for tensor in every}
    return "float32" if dtypes == {"bfloat16", "float16"} else max(dtypes, key=_WIDTH.__getitem__)


def _require_memory(plan: Conversion) -> None:
    """Raises `MhaError` unless the tensors, their float64 copies for the check, and the file's content fit into memory."""
    every = [*plan.found.tensors.values(), *(each for each in (plan.embedding, plan.table) if each is not None)]
    stored = sum(tensor.n_bytes for tensor in every)
    needed = 3 * stored + 16 * sum(tensor.n_bytes // (_WIDTH[DTYPES[tensor.dtype]] // 8) for tensor in every)
    available = memory.available_bytes()
    if not memory.fits(needed, available):
        raise MhaError(
            f"out of memory; {format_size(needed)} needed for the conversion, {format_size(available)} available",
            hint=None if plan.embedding is None else "--no-embedding leaves out word and position embeddings",
            code="out-of-memory",
        )


def projection_sizes(config: Config) -> ProjectionSizes:
    """The sizes of a layer of mha with a resolved config."""
    if not config.out_proj:
        raise MhaError(
            "a layer without an output projection cannot be converted: every layout has one", code="bad-file"
        )
    return ProjectionSizes(
        config.n_heads, config.n_kv_heads or config.n_heads, config.d_head or 0, config.d_v or 0, config.d_model,
        config.d_input or config.d_model,
    )  # fmt: skip


def home_prefix(layout: Layout, stack: str | None, layer: int) -> str:
    """The prefix of a layer in the original files of a layout. Raises `UsageError` for a stack that the layout lacks."""
    if stack is not None and stack not in layout.stacks:
        raise UsageError(f"--stack {stack} is not in layout {layout.name}, which has {', '.join(layout.stacks)}")
    place = layout.stacks[stack or next(iter(layout.stacks))]
    return place.home + place.stems[-1 if not place.stems[-1] else 0].format(layer=layer)


# ------------------------------------------------------------------------------------------------- attention by config


class Choices(NamedTuple):
    """Fields of `Config` by name, and notes on what they leave out."""

    fields: dict[str, Any]
    notes: tuple[str, ...]


def choices_of(config: Mapping[str, Any], stack: str, layer: int, sizes: ProjectionSizes) -> Choices:
    """Positions, causality, window, scale and softcap of one layer, from the config of a checkpoint."""
    family = family_of(config)
    if family is None:
        return Choices(
            {"positions": "none"}, ("positions and mask are not known: set them in the run (--positions, --causal)",)
        )
    part = part_of(config, stack if stack in ("text", "vision") else None)
    if stack == "cross":
        fields, notes = _scale(part, family, layer, sizes)
        return Choices({"positions": "none"} | fields, notes)
    fields, notes = _positions(part, family, layer, sizes)
    kind = _layer_type(part, layer)
    causal = (stack in family.causal or bool(part.get("is_decoder"))) and not part.get("use_bidirectional_attention")
    fields |= {"causal": True} if causal else {}
    window = _window(part, kind)
    if window is not None:
        fields["window"] = (window, 0 if causal else window)
    scale, more = _scale(part, family, layer, sizes)
    return Choices(fields | scale, notes + more)


def _scale(
    config: Mapping[str, Any], family: Family, layer: int, sizes: ProjectionSizes
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Scale and softcap, as far as they differ from the defaults."""
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
        terms = config.get("pos_att_type")
        kinds = terms if isinstance(terms, (str, list)) else []
        scale = (sizes.d_head * (1 + sum(kind in kinds for kind in ("c2p", "p2c")))) ** -0.5
    if scale != sizes.d_head**-0.5:
        fields["scale"] = scale
    softcap = _number(config.get("attn_logit_softcapping"))
    if softcap is not None and softcap > 0:
        fields["softcap"] = softcap
    clip = config.get("clip_qkv") or (mpt or {}).get("clip_qkv")
    return fields, ((f"clip_qkv {clip} is not part of the layer: it bounds queries, keys and values",) if clip else ())


def _positions(
    config: Mapping[str, Any], family: Family, layer: int, sizes: ProjectionSizes
) -> tuple[dict[str, Any], tuple[str, ...]]:
    if family.positions in ("rope", "rope-interleaved") and not config.get("alibi"):
        return _rotary(config, family, layer, sizes)
    if family.positions == "relative":
        return {"positions": "none"}, ("positions are none: learned scores of distances are not part of the layer",)
    mpt = config.get("attn_config")
    if family.layout == "mpt" and isinstance(mpt, Mapping):
        uneven = sizes.n_heads & (sizes.n_heads - 1)
        if not mpt.get("alibi", True):
            return {"positions": "none"}, ("positions are none: learned positions of MPT are not converted",)
        if uneven or mpt.get("alibi_bias_max", 8) != 8:
            return {"positions": "none"}, ("positions are none: MPT orders the slopes of ALiBi differently",)
    if config.get("alibi") and family.positions != "alibi":
        return {"positions": "none"}, ("positions are none: Falcon scales ALiBi by 1/√d_head, in bfloat16",)
    return {"positions": family.positions}, ()


def _rotary(
    config: Mapping[str, Any], family: Family, layer: int, sizes: ProjectionSizes
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Rotary positions if they rotate all columns; otherwise `positions` none and a note."""
    angles, kind = config.get("rope_parameters"), _layer_type(config, layer)
    angles = angles if isinstance(angles, Mapping) else {}
    of_layer_type = angles.get(kind)
    angles = of_layer_type if isinstance(of_layer_type, Mapping) else angles
    n_rotated = _rotated_columns(config, angles, sizes.d_head)
    if n_rotated != sizes.d_head:
        note = f"positions are none: the model rotates {n_rotated} of {sizes.d_head} columns, and a layer of mha all of them"
        return {"positions": "none"}, (note,)
    local = kind == "sliding_attention"
    names = (("rope_local_base_freq",) if local and "rope_local_base_freq" in config else ()) + (
        ("local_rope_theta" if local else "global_rope_theta"), "rope_theta", "rotary_emb_base",
    )  # fmt: skip
    thetas = [_number(angles.get("rope_theta")), *(_number(config.get(name)) for name in names)]
    theta = next((number for number in thetas if number is not None and number > 0), 10_000.0)
    scaling = config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    kinds = [source.get(name) for source in (angles, scaling) for name in ("rope_type", "type")]
    changed = next((str(kind) for kind in kinds if kind not in (None, "default")), None)
    notes = (
        (f"rope_type {changed:.40} is not part of the layer: its angles are those of rope_theta alone",)
        if changed
        else ()
    )
    return {"positions": family.positions, "rope_theta": theta}, notes


def _rotated_columns(config: Mapping[str, Any], angles: Mapping[str, Any], d_head: int) -> int:
    rotary_dim = config.get("rotary_dim")
    if isinstance(rotary_dim, int) and not isinstance(rotary_dim, bool):
        return rotary_dim
    fractions = (angles.get("partial_rotary_factor"), config.get("partial_rotary_factor"), config.get("rotary_pct"))
    fraction = next((number for number in map(_number, fractions) if number is not None), 1.0)
    return int(d_head * fraction)


def _layer_type(config: Mapping[str, Any], layer: int) -> str:
    """`sliding_attention` or `full_attention`, by the family's rule if the config does not list its layers."""
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
    """How many keys to its left a query sees, besides its own; None for all."""
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
