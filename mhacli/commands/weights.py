"""`mha weights`: lists the contents of a checkpoint or a weights file by its headers, without
torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from os.path import getsize
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhacli.cli.console import note, show_activity
from mhacli.cli.output import Output, print_report
from mhacli.cli.parameters import command, offers
from mhacli.io.safetensors import TensorInfo
from mhacli.models.folder import Checkpoint, read_weights, size_of
from mhacli.numbers import Unit, shown
from mhacli.record.weights_file import EMBEDDING, saved_metadata
from mhacli.settings import OUTPUT, Config, setting
from mhacli.text.escape import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.render.base.options import Screen

SCHEMA = "mha.weights-info/1"
_PATH = "A folder with config.json and safetensors, or a .safetensors file."
_FUSED = "c_attn|query_key_value|qkv_proj|Wqkv|in_proj"
_PROJECTIONS = {
    "q": f"{_FUSED}|q_proj|query|query_proj|q_lin|q",
    "k": f"{_FUSED}|k_proj|key|key_proj|k_lin|k",
    "v": f"{_FUSED}|v_proj|value|value_proj|v_lin|v",
    "o": "o_proj|out_proj|out_lin|c_proj|dense|Wo|o",
}
"""The usual names of an attention's projections, those of fused ones included."""
_SIZES = ("n_layers", "n_heads", "n_kv_heads", "d_head", "d_v", "d_model")
_CACHED = ("self", "decoder", "text")
"""The stacks that can have a KV cache."""
_BUFFERS = ("masked_bias", "rotary_emb.inv_freq", "position_ids", "token_type_ids")
_MASKS = ("attn.bias", "attention.bias")
"""Masks that older files store beside the weights. A mask is named like a bias, but has more than
one axis."""
_GENERATES = re.compile(r"(For(CausalLM|ConditionalGeneration)|LMHeadModel)\b")
"""The classes in `architectures` of a config whose models write text token by token, with a KV
cache."""


def contents_of(checkpoint: Checkpoint, *, with_tensors: bool) -> dict[str, Any]:
    """The document of schema `mha.weights-info/1`, by headers and config. `kind` is `checkpoint`,
    or `layer` for a weights file of mha, whose `layout` is `mha`. Raises `MhaError` for a saved
    record and for damaged metadata of mha.
    """
    saved = saved_metadata(checkpoint.path, checkpoint.metadata)
    config = checkpoint.config
    if saved is not None:
        config = _config_of_layer(saved.config.resolved(), checkpoint.tensors.get(EMBEDDING))
    tensors = tuple(checkpoint.tensors.values())
    dtypes = sorted({tensor.dtype for tensor in tensors})
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "path": checkpoint.path,
        "kind": "layer" if saved else "checkpoint",
        "family": config.get("model_type") or None,
        "layout": "mha" if saved else None,
        **_totals(tensors),
        "dtypes": [
            {"dtype": name, **_totals([each for each in tensors if each.dtype == name])}
            for name in dtypes
        ],
        "files": [
            {"name": name, "n_bytes": getsize(path)} for name, path in checkpoint.files.items()
        ],
        "attentions": [*_attentions(config, tensors)],
        "vocabulary": size_of(config, "vocabulary"),
        "positions": size_of(config, "positions"),
        "notes": [*checkpoint.notes],
    }
    if not config:
        document["notes"].append("no config.json is beside the file, so its heads are not known")
    if with_tensors:
        listed = ("name", "dtype", "shape", "n_bytes")
        document["tensors"] = [
            {name: getattr(tensor, name) for name in listed} for tensor in tensors
        ]
    return document


def _config_of_layer(layer: Config, embedding: TensorInfo | None) -> dict[str, Any]:
    """The config of one layer, with its sizes under names that checkpoints have too."""
    n_tokens = None
    if embedding is not None and embedding.shape:
        n_tokens = embedding.shape[0]
    return asdict(layer) | {
        "n_layers": 1,
        "vocab_size": n_tokens,
        "n_positions": layer.max_positions if layer.positions == "learned" else None,
        "is_decoder": True,
    }


def _totals(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    """The numbers of tensors, of parameters as in `torch.nn.Module.parameters`, and of bytes.

    Masks, positions and rotary angles, which follow from the config, are buffers and no parameters;
    so are integers.
    """
    n_parameters = 0
    for tensor in tensors:
        buffers = _BUFFERS + _MASKS if len(tensor.shape) > 1 else _BUFFERS
        if not tensor.name.endswith(buffers) and not tensor.dtype.startswith(("I", "U", "BOOL")):
            n_parameters += prod(tensor.shape)
    n_bytes = sum(tensor.n_bytes for tensor in tensors)
    return {"n_tensors": len(tensors), "n_parameters": n_parameters, "n_bytes": n_bytes}


def _attentions(
    config: Mapping[str, Any], tensors: Sequence[TensorInfo]
) -> Iterator[dict[str, Any]]:
    """The attention of each stack that the config describes; None is a size that is not known.
    `biases` are the letters (of q, k, v and o) of the projections with a bias, `cache_bytes` the
    bytes of one token in the KV cache of all layers, in the dtype of the key projection. The size
    of the cache is known if all layers have keys and values: others, such as those of linear
    attention, keep another state.
    """

    def named(letter: str, part: str) -> list[TensorInfo]:
        name = re.compile(rf"(?:.*(?i:att).*\.)?(?:{_PROJECTIONS[letter]})[._]{part}")
        return [
            tensor for tensor in tensors if name.fullmatch(tensor.name) and 0 not in tensor.shape
        ]

    stacks = _stacks(config)
    keys = named("k", "weight")
    biases = "".join(letter for letter in _PROJECTIONS if named(letter, "bias"))
    is_decoder = config.get("is_decoder") is True
    generates = is_decoder or _GENERATES.search(str(config.get("architectures"))) is not None
    n_attentions = sum(size_of(config, "n_layers", stack) or 0 for stack in stacks)
    has_cache = generates and 0 < len(keys) == n_attentions
    for stack in stacks:
        sizes = {name: size_of(config, name, stack) for name in _SIZES}
        n_layers, _, n_kv_heads, d_head, d_v, _ = sizes.values()
        cache = None
        if has_cache and stack in _CACHED and n_layers and n_kv_heads and d_head and d_v:
            cache = n_layers * n_kv_heads * (d_head + d_v) * keys[0].n_bytes // prod(keys[0].shape)
        if sizes["n_heads"] is not None:
            yield {"stack": stack, **sizes, "biases": biases, "cache_bytes": cache}


def _stacks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The stacks of layers of a model."""
    if config.get("is_encoder_decoder") is True:
        return ("encoder", "decoder", "cross")
    if all(isinstance(config.get(f"{stack}_config"), Mapping) for stack in ("text", "vision")):
        return ("text", "vision")
    return ("self",)


# -------------------------------------------------------------------------------------- the command


@command("mha weights MiniLM", "mha weights layer.safetensors --tensors")
def weights(
    *,
    words: tuple[str, ...] = setting((), "", _PATH, argument=True, metavar="PATH", many=True),
    tensors: bool = setting(False, OUTPUT, "List every tensor."),
    output: Annotated[Output, offers("json")],
) -> None:
    """Prints the contents of a checkpoint. The word `info` may stand before its path."""
    path, *more = words[words[:1] == ("info",) :] or ("",)
    if more or not path:
        raise typer.BadParameter(f"mha weights takes one path, got {shlex.join(words) or 'none'}")
    with show_activity("reading headers"):
        contents = contents_of(read_weights(path), with_tensors=tensors)
    print_report(output, view=lambda screen: contents_view(contents, screen), json=lambda: contents)
    for text in contents["notes"]:
        note(text)


def contents_view(contents: Mapping[str, Any], screen: Screen) -> RenderableType:
    """A headline, a line per attention, dtypes, files, and the tensors of a document with
    tensors.
    """
    from rich.console import Group
    from rich.text import Text

    from mhacli.render.base.doc import Table, fields
    from mhacli.render.base.format import count_of, escaped, flowing
    from mhacli.render.base.terminal import table

    is_layer = contents["kind"] == "layer"
    parts = [
        "a layer of mha" if is_layer else f"family {contents['family'] or 'unknown'}",
        count_of(contents["n_parameters"], "parameter"),
        count_of(contents["n_tensors"], "tensor"),
        shown(contents["n_bytes"], "bytes"),
        count_of(len(contents["files"]), "file"),
    ]
    parts += [
        f"{name} {contents[name]:,}"
        for name in ("vocabulary", "positions")
        if contents[name] is not None
    ]
    body: list[RenderableType] = [flowing(map(visible, parts), screen.width)]
    for part, units in _COLUMNS.items():
        rows = [{name: _cell(row[name]) for name in units} for row in contents.get(part, ())]
        if rows:
            body += [Text(), *table(Table(columns=fields(units), rows=rows), screen.width)]
    return Group(escaped(contents["path"], "bold"), *body)


_COLUMNS: Mapping[str, Mapping[str, Unit]] = {
    "attentions": {
        "stack": "word",
        "n_layers": "integer",
        "n_heads": "integer",
        "n_kv_heads": "integer",
        "d_head": "integer",
        "d_model": "integer",
        "biases": "id",
        "cache_bytes": "bytes",
    },
    "dtypes": {
        "dtype": "word",
        "n_tensors": "integer",
        "n_parameters": "integer",
        "n_bytes": "bytes",
    },
    "files": {"name": "word", "n_bytes": "bytes"},
    "tensors": {"name": "word", "dtype": "word", "shape": "word", "n_bytes": "bytes"},
}
"""The fields in the tables of the parts of a document, and their units."""


def _cell(value: Any) -> Any:
    """What the cell of a field shows."""
    if isinstance(value, tuple):
        return " × ".join(map(str, value)) or "scalar"
    return (visible(value) or "none") if isinstance(value, str) else value
