"""Checks a weights file before any tensor is made: its config, its vocabulary, and the shapes of
its tensors.

Format `mha.weights/1`: safetensors with Hugging Face names and one metadata key with `{format,
config, vocabulary, tokenizer, probe}`. For a file without this metadata, the shapes and the options
must give the config.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import Struct
from msgspec.structs import replace as replace_struct

from mhacli.errors import UsageError, bad_file, first_names
from mhacli.io.data import decode, with_earlier_config
from mhacli.io.safetensors import DTYPES, TensorFile, TensorInfo, read_tensor_file, shown_name
from mhacli.record.sites import Dims
from mhacli.settings import ITEM_BYTES, Config, as_option

FORMAT = "mha.weights/1"
EMBEDDING = "embed.weight"
POSITION_EMBEDDING = "embed_positions.weight"
"""The table of learned positions. A run with other positions ignores it."""

RUN_CHOICES = (
    "train",
    "device",
    "threads",
    "seed",
    "init",
    "random",
    "distribution",
    "documents",
    "padding",
    "score_bias",
)
"""Options that belong to a run and not to its weights. They are not saved."""
_SHAPE_CHOICES = {
    "d_model",
    "n_heads",
    "n_kv_heads",
    "d_head",
    "d_v",
    "d_input",
    "bias",
    "out_proj",
    "max_positions",
}


_OF_TORCH = re.compile(r"(.*\.|)(?:in_proj_weight|q_proj_weight)", re.DOTALL)
"""The matrix by which the weights of a `torch.nn.MultiheadAttention` are known."""
Probe = dict[str, tuple[float, ...]]
"""The layer's outputs for a fixed input by name (`embed`, `q`, `k`, `v`, `out`, `embed_positions`),
one row each, in float64 rounded to 9 digits."""


class Metadata(Struct, frozen=True):
    """The header entry of mha."""

    format: str
    config: Config
    vocabulary: tuple[str, ...]
    tokenizer: str
    probe: Probe


def read_layer_file(
    path: str, given: Mapping[str, Any]
) -> tuple[TensorFile, Config, tuple[str, ...]]:
    """The checked file, its config with the options that were `given` (by field name), and its
    vocabulary. Needs no torch.

    Raises `MhaError` for a damaged file or unfitting tensors (all listed), and `UsageError` for an
    option that contradicts the file, or that the file needs.
    """
    file = _with_own_names(read_tensor_file(path))
    saved = saved_metadata(file.path, file.metadata)
    for name in sorted(file.tensors):
        _require_floats(file, name)
    config = _config_from_shapes(file, given) if saved is None else saved.config
    for name in sorted(_SHAPE_CHOICES & given.keys()):
        if given[name] != getattr(config, name):
            has = f"has {name} {getattr(config, name)}"
            raise UsageError(
                f"leave out {as_option(name, given[name])}, which contradicts {path}: it {has}"
            )
    config = replace(config, **given).resolved()
    shapes = {name: info.shape for name, info in file.tensors.items()}
    expected = expected_shapes(config, shapes[EMBEDDING][0] if shapes.get(EMBEDDING) else 0)
    if not has_embedding(file):
        del expected[EMBEDDING]
    if POSITION_EMBEDDING in shapes:  # of any number of positions where they are not used
        expected.setdefault(
            POSITION_EMBEDDING, (*shapes[POSITION_EMBEDDING][:1], config.d_input or config.d_model)
        )
    faults = [
        f"{name} {list(shape)} is {list(shapes[name]) if name in shapes else 'missing'}"
        for name, shape in expected.items()
        if shapes.get(name) != shape
    ]
    faults += [
        f"{shown_name(name)} is not expected" for name in sorted(shapes.keys() - expected.keys())
    ]
    if faults:
        raise bad_file(
            path, f"{path} does not have the tensors of its layer: {first_names(faults, 20)}"
        )
    return file, config, () if saved is None else saved.vocabulary


def _with_own_names(file: TensorFile) -> TensorFile:
    """The tensors of one `torch.nn.MultiheadAttention` in a file under the names of mha, with q, k
    and v apart; any other file as it is. A common prefix may stand before their names.

    Source: `in_proj_weight` holds the rows of q, k and v in this order,
    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html.
    """
    prefixes = [found[1] for name in file.tensors if (found := _OF_TORCH.fullmatch(name))]
    if file.metadata is not None or len(prefixes) != 1:
        return file
    own = list[TensorInfo]()
    for name, info in file.tensors.items():
        short = name.removeprefix(prefixes[0])
        kind = short.removeprefix("in_proj_")
        if short in ("in_proj_weight", "in_proj_bias") and info.shape and info.shape[0] % 3 == 0:
            shape, n_bytes = (info.shape[0] // 3, *info.shape[1:]), info.n_bytes // 3
            for i, letter in enumerate("qkv"):
                start = info.start + i * n_bytes
                own.append(TensorInfo(f"{letter}_proj.{kind}", info.dtype, shape, start, n_bytes))
        else:
            short = re.sub(r"^out_proj\.", "o_proj.", short)
            own.append(
                replace_struct(info, name=re.sub(r"^(.)_proj_weight$", r"\1_proj.weight", short))
            )
    # the numbers stay where they are: only the header is written anew
    first = min(info.start for info in own)
    entries = {
        info.name: {
            "dtype": info.dtype,
            "shape": info.shape,
            "data_offsets": (info.start - first, info.start - first + info.n_bytes),
        }
        for info in own
    }
    header = json.dumps(entries).encode()
    data = len(header).to_bytes(8, "little") + header + file.data[first:]
    return replace(file, tensors={info.name: info for info in own}, n_bytes=len(data), data=data)


def has_embedding(file: TensorFile) -> bool:
    """Whether a file has the vectors of tokens: that of a module of torch has none."""
    return EMBEDDING in file.tensors or file.metadata is not None


def expected_shapes(config: Config, n_tokens: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors by name."""
    size = Dims(config, batch=0, q_len=0, k_len=0).size
    d_input = size("d_input")
    widths = {"q": "head·d_head", "k": "kv_head·d_head", "v": "kv_head·d_v"}
    matrices = {letter: (size(width), d_input) for letter, width in widths.items()}
    if config.out_proj:
        matrices["o"] = (config.d_model, size("head·d_v"))
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (n_tokens, d_input)}
    if config.positions == "learned":
        shapes[POSITION_EMBEDDING] = (config.max_positions, d_input)
    shapes |= {f"{letter}_proj.weight": shape for letter, shape in matrices.items()}
    return shapes | (
        {f"{letter}_proj.bias": shape[:1] for letter, shape in matrices.items()}
        if config.bias
        else {}
    )


def saved_metadata(path: str, metadata: Any) -> Metadata | None:
    """What mha saved about the layer in a file; None if it saved nothing. Raises `MhaError` for a
    file of another format.
    """
    if metadata is None:
        return None
    kind = metadata.get("format", metadata.get("schema")) if isinstance(metadata, dict) else None
    if kind != FORMAT:
        raise bad_file(
            path,
            f"{path} is not a weights file of format {FORMAT}: its format is {kind!r:.80}",
            hint="mha show draws a record" if kind == "mha.record/1" else None,
        )
    return decode(Metadata, with_earlier_config(metadata), path)


def _config_from_shapes(file: TensorFile, given: Mapping[str, Any]) -> Config:
    """The config of a file without metadata. Raises `MhaError` if it lacks a matrix that every
    layer has.
    """
    shapes = {name: info.shape for name, info in file.tensors.items()}
    needed = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    missing = [name for name in needed if len(shapes.get(name, ())) != 2]
    if missing:
        raise bad_file(
            file.path,
            f"{file.path} lacks the matrices {', '.join(missing)}: it has {_listed(file)}",
            hint=(
                "--weights takes the tensors of one layer, as --save-weights writes them or as"
                " torch.nn.MultiheadAttention has them: in_proj_weight [3·width, width],"
                " out_proj.weight [width, width]; --model takes a whole checkpoint"
            ),
        )
    (q_width, d_input), (k_width, _), (v_width, _) = (shapes[name] for name in needed)
    if "n_heads" not in given:
        divisors = ", ".join(str(n) for n in range(1, q_width + 1) if q_width % n == 0)
        raise UsageError(
            f"add --heads N, which {file.path} does not give: its {q_width} query rows are those of"
            f" {divisors} heads"
        )
    d_head = given.get("d_head", max(1, q_width // max(1, given["n_heads"])))
    n_kv_heads = given.get("n_kv_heads", max(1, k_width // d_head))
    positions, w_o = shapes.get(POSITION_EMBEDDING), shapes.get("o_proj.weight")
    return Config(
        d_model=w_o[0] if w_o else d_input,
        d_input=d_input,
        n_heads=given["n_heads"],
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_v=max(1, v_width // max(1, n_kv_heads)),
        bias="q_proj.bias" in shapes,
        out_proj=bool(w_o),
        positions="learned" if positions else "sinusoidal",
        max_positions=positions[0] if positions else Config.max_positions,
        dtype=DTYPES[file.tensors["q_proj.weight"].dtype],  # type: ignore[arg-type]
    )


def _require_floats(file: TensorFile, name: str) -> None:
    dtype = file.tensors[name].dtype
    if DTYPES.get(dtype) not in ITEM_BYTES:
        known = ", ".join(word for word, own in DTYPES.items() if own in ITEM_BYTES)
        message = f"tensor {shown_name(name)} has dtype {dtype}, which is not one of {known}"
        raise bad_file(file.path, f"{file.path}: {message}")


def _listed(file: TensorFile) -> str:
    return first_names(map(shown_name, sorted(file.tensors))) or "no tensor"


# --------------------------------------------------------------------------------------- score bias


def read_bias_file(where: str, dims: Dims) -> tuple[TensorFile, str]:
    """The file and the name of the bias at `FILE` or `FILE:TENSOR`. Without a name it is the file's
    only tensor, or `bias`.

    It must broadcast to `[batch, head, query, key]`. Raises `MhaError` with the rule and the shape.
    """
    path, colon, name = where.rpartition(":")
    if not (colon and path) or os.path.lexists(where):  # a file has the whole name
        path, name = where, ""
    file = read_tensor_file(path)
    name = name or (next(iter(file.tensors)) if len(file.tensors) == 1 else "bias")
    if name not in file.tensors:
        raise bad_file(
            file.path, f"{path} has no tensor {shown_name(name)}: it has {_listed(file)}"
        )
    _require_floats(file, name)
    shape = file.tensors[name].shape
    whole = (dims.batch, dims.config.n_heads, dims.q_len, dims.k_len)
    sizes = zip(reversed(shape), reversed(whole), strict=False)
    if len(shape) > 4 or any(size not in (1, full) for size, full in sizes):
        message = f"tensor {shown_name(name)} of shape {list(shape)} does not broadcast"
        raise bad_file(file.path, f"{path}: {message} to [batch, head, query, key] = {list(whole)}")
    return file, name
