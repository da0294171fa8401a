"""Checks a weights file before any tensor is made: its config, its vocabulary, and the shapes of its tensors.

Format `mha.weights/1`: safetensors with Hugging Face names and one metadata key with
`{format, config, vocabulary, tokenizer, probe}`. For a file without this metadata, the shapes and the options must give
the config.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mhacli.errors import MhaError, UsageError, first_names
from mhacli.io.data import decode
from mhacli.io.safetensors import TensorFile, TensorInfo, read_tensor_file, shown_name
from mhacli.settings import Config, typed, with_earlier_config
from mhacli.sites import Facts

FORMAT = "mha.weights/1"
MAX_FILE_BYTES = 64 << 30
EMBEDDING = "embed.weight"
POSITION_EMBEDDING = "embed_positions.weight"
"""The table of learned positions. A run with other positions ignores it."""
_NAMES = {EMBEDDING, POSITION_EMBEDDING} | {f"{letter}_proj.{part}" for letter in "qkvo" for part in ("weight", "bias")}
"""The tensors of a layer: two tables, four matrices, four biases."""
DTYPES: Mapping[str, str] = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
RUN_CHOICES = (
    "train", "device", "threads", "seed", "init", "random", "distribution", "documents", "padding", "score_bias",
)  # fmt: skip
"""Options that belong to a run and not to its weights. They are not saved."""
_SHAPE_CHOICES = ("d_model", "n_heads", "n_kv_heads", "d_head", "d_v", "d_input", "bias", "out_proj", "max_positions")


@dataclass(frozen=True)
class WeightsProbe:
    """The layer's outputs for a fixed input, one row each, in float64 rounded to 9 digits."""

    embed: tuple[float, ...]
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]
    out: tuple[float, ...]
    embed_positions: tuple[float, ...] = ()


@dataclass(frozen=True)
class Metadata:
    """The header entry of mha. `layer` is the number of a converted layer in its model, else None."""

    format: str
    config: Config
    vocabulary: tuple[str, ...]
    tokenizer: str
    probe: WeightsProbe
    layer: int | None = None


@dataclass(frozen=True)
class LayerFile:
    """A checked file with the config that follows from the file and the options. `metadata` is None if the file has
    none."""

    file: TensorFile
    config: Config
    metadata: Metadata | None

    @property
    def path(self) -> str:
        """The path of the file."""
        return self.file.path

    @property
    def layer(self) -> int | None:
        """The number of the layer in the model from which it was converted, if any."""
        return None if self.metadata is None else self.metadata.layer


def read_layer_file(path: str, given: Mapping[str, Any]) -> LayerFile:
    """The checked file, and its config with the options that were `given` (by field name). Needs no torch.

    Raises `MhaError` for a damaged file or unfitting tensors (all listed), and `UsageError` for an option that
    contradicts the file, or that the file needs.
    """
    file = read_tensor_file(path, MAX_FILE_BYTES)
    metadata = _metadata(file)
    _require_floats(file)
    if metadata is None:
        _require_matrices(file)
    config = _settled(file, metadata, given).resolved()
    _require_tensors(file, config)
    return LayerFile(file, config, metadata)


def expected_shapes(config: Config, n_tokens: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors by name."""
    q_width, k_width = config.n_heads * (config.d_head or 0), (config.n_kv_heads or 0) * (config.d_head or 0)
    v_width, z_width = (config.n_kv_heads or 0) * (config.d_v or 0), config.n_heads * (config.d_v or 0)
    d_input = config.d_input or config.d_model
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (n_tokens, d_input)}
    if config.positions == "learned":
        shapes[POSITION_EMBEDDING] = (config.max_positions, d_input)
    for name, width in (("q_proj", q_width), ("k_proj", k_width), ("v_proj", v_width)):
        shapes[f"{name}.weight"] = (width, d_input)
        shapes |= {f"{name}.bias": (width,)} if config.bias else {}
    if config.out_proj:
        shapes["o_proj.weight"] = (config.d_model, z_width)
        shapes |= {"o_proj.bias": (config.d_model,)} if config.bias else {}
    return shapes


def _metadata(file: TensorFile) -> Metadata | None:
    if file.metadata is None:
        return None
    kind = file.metadata.get("format", file.metadata.get("schema")) if isinstance(file.metadata, dict) else None
    if kind != FORMAT:
        raise MhaError(
            f"{file.path} is not a weights file of format {FORMAT}: its format is {kind!r:.80}",
            hint="mha show draws a record" if kind == "mha.record/1" else None,
            code="bad-file",
            path=file.path,
        )
    return decode(Metadata, with_earlier_config(file.metadata), file.path)


def _settled(file: TensorFile, metadata: Metadata | None, given: Mapping[str, Any]) -> Config:
    config = metadata.config if metadata is not None else _config_from_shapes(file, given)
    for name in _SHAPE_CHOICES:
        if name in given and given[name] != getattr(config, name):
            raise UsageError(
                f"{typed(name, given[name])} contradicts {file.path}, which has {name} {getattr(config, name)}",
                hint=f"leave out {typed(name, given[name])}",
            )
    return replace(config, **given)


def _config_from_shapes(file: TensorFile, given: Mapping[str, Any]) -> Config:
    rows = {name: file.tensors[f"{name}.weight"].shape[0] for name in ("q_proj", "k_proj", "v_proj")}
    if "n_heads" not in given:
        raise UsageError(
            f"{file.path} does not give the number of heads that its {rows['q_proj']} query rows make",
            hint="add --heads N",
        )
    n_heads = given["n_heads"]
    d_head = given.get("d_head", max(1, rows["q_proj"] // max(1, n_heads)))
    n_kv_heads = given.get("n_kv_heads", max(1, rows["k_proj"] // d_head))
    shapes = {name: info.shape for name, info in file.tensors.items()}
    d_input, table, w_o = (shapes.get(name, ()) for name in (EMBEDDING, POSITION_EMBEDDING, "o_proj.weight"))
    return Config(
        d_model=w_o[0] if w_o else d_input[1],
        d_input=d_input[1],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_v=max(1, rows["v_proj"] // max(1, n_kv_heads)),
        bias="q_proj.bias" in file.tensors,
        out_proj=bool(w_o),
        positions="learned" if table else "sinusoidal",
        max_positions=table[0] if table else Config.max_positions,
        dtype=DTYPES[file.tensors["q_proj.weight"].dtype],  # type: ignore[arg-type]
    )


def _require_matrices(file: TensorFile) -> None:
    """Raises `MhaError` if a matrix that every layer has is missing or has another number of axes."""
    names = (EMBEDDING, "q_proj.weight", "k_proj.weight", "v_proj.weight")
    missing = [name for name in names if name not in file.tensors]
    flat = [name for name in names if name in file.tensors and len(file.tensors[name].shape) != 2]
    if missing or flat:
        raise MhaError(
            f"{file.path} lacks the matrices {', '.join(missing + flat)}: it has {_listed(file.tensors)}",
            hint="--model takes a whole checkpoint, --layer one layer of it"
            if len(file.tensors) > len(_NAMES)
            else "names follow Hugging Face: embed.weight, q_proj.weight, k_proj.weight, v_proj.weight, and o_proj.weight "
            "where there is an output projection",
            code="bad-file",
            path=file.path,
        )


def _require_floats(file: TensorFile) -> None:
    for name, info in file.tensors.items():
        if name in _NAMES and info.dtype not in DTYPES:
            raise MhaError(
                f"{file.path}: tensor {shown_name(name)} has dtype {info.dtype}, which is not one of {', '.join(DTYPES)}",
                code="bad-file",
                path=file.path,
            )


def _require_tensors(file: TensorFile, config: Config) -> None:
    """Raises `MhaError` that lists all missing and unexpected tensors and all wrong shapes."""
    n_tokens = (file.tensors[EMBEDDING].shape or (0,))[0] if EMBEDDING in file.tensors else 0
    expected = expected_shapes(config, n_tokens)
    faults = [f"{name} {list(shape)} is missing" for name, shape in expected.items() if name not in file.tensors]
    unknown = file.tensors.keys() - expected.keys() - {POSITION_EMBEDDING}
    faults += [f"{shown_name(name)} is not expected" for name in sorted(unknown)[:20]]
    table, width = file.tensors.get(POSITION_EMBEDDING), config.d_input or config.d_model
    if table is not None and (len(table.shape) != 2 or table.shape[1] != width):
        faults.append(f"{POSITION_EMBEDDING} is {list(table.shape)}, not [positions, {width}]")
    faults += [
        f"{name} is {list(file.tensors[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in file.tensors and file.tensors[name].shape != shape
    ]
    if faults:
        raise MhaError(
            f"{file.path} does not have the tensors of its layer: {'; '.join(faults)}", code="bad-file", path=file.path
        )


def _listed(tensors: Mapping[str, TensorInfo]) -> str:
    return first_names(map(shown_name, sorted(tensors))) or "no tensor"


# ---------------------------------------------------------------------------------------------------------- score bias


DEFAULT_NAME = "bias"


@dataclass(frozen=True)
class BiasFile:
    """A checked file and the name of the bias in it."""

    file: TensorFile
    name: str


def read_bias_file(where: str, facts: Facts) -> BiasFile:
    """The bias at `FILE` or `FILE:TENSOR`. Without a name it is the file's only tensor, or the tensor `bias`.

    It must broadcast to `[batch, head, query, key]`. Raises `MhaError` with the rule and the shape.
    """
    path, name = _split(where)
    file = read_tensor_file(path, MAX_FILE_BYTES)
    if name is None:
        name = next(iter(file.tensors)) if len(file.tensors) == 1 else DEFAULT_NAME
    if name not in file.tensors:
        there = ", ".join(map(shown_name, sorted(file.tensors)[:8])) or "no tensor"
        raise MhaError(
            f"{path} has no tensor {shown_name(name)}: it has {there}",
            hint=f"try --score-bias {path}:{next(iter(sorted(file.tensors)), 'TENSOR')}",
            code="bad-file",
            path=path,
        )
    bias = file.tensors[name]
    if bias.dtype not in DTYPES:
        raise MhaError(
            f"{path}: tensor {shown_name(name)} has dtype {bias.dtype}, which is not one of {', '.join(DTYPES)}",
            hint="a mask as a bias is 0 where allowed and -inf where not"
            if bias.dtype == "BOOL"
            else "save it as float32",
            code="bad-file",
            path=path,
        )
    whole = (facts.batch, facts.config.n_heads, facts.q_len, facts.k_len)
    if len(bias.shape) > 4 or any(
        size not in (1, full) for size, full in zip(reversed(bias.shape), reversed(whole), strict=False)
    ):
        raise MhaError(
            f"{path}: tensor {shown_name(name)} has the shape {list(bias.shape)}, which does not broadcast to "
            f"[batch, head, query, key] = {list(whole)}",
            hint=f"the shapes {list(whole[2:])} and {list(whole[1:])} work",
            code="bad-file",
            path=path,
        )
    return BiasFile(file, name)


def _split(where: str) -> tuple[str, str | None]:
    """The path and the tensor name after the last colon, unless a file has the whole name."""
    path, colon, name = where.rpartition(":")
    return (path, name) if colon and path and not os.path.lexists(where) else (where, None)
