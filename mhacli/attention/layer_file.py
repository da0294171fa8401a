"""A layer's weights to bytes and back, with the probe that notices a transposed matrix.

The probe is what the layer answers to a fixed input: a transposed square matrix has the right shape, but not the right
answer. The format is described in `mhacli.attention.weights_file`.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.attention.layer import MultiHeadAttention
from mhacli.attention.weights_file import EMBEDDING, FORMAT, POSITION_EMBEDDING, RUN_CHOICES, Probe, saved_metadata
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.io.safetensors import METADATA_KEY, TensorFile
from mhacli.settings import Config

PROBE_TOLERANCE = 1e-6
"""Largest difference from a stored probe, relative to its largest number: its rounding to 9 digits, with room."""

_PROBED = {"embed": EMBEDDING, "embed_positions": POSITION_EMBEDDING, "out": "o_proj.weight"}
"""The weight of each output of the probe, if it has another name."""
_POSITION_STREAM = 1 << 62
"""Added to the seed for the table of learned positions."""


class LayerWeights(NamedTuple):
    """An embedding, the attention that reads it, and the table of learned positions where there is one."""

    embedding: Float[Tensor, "vocabulary d_input"]
    attention: MultiHeadAttention
    position_table: Float[Tensor, "place d_input"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every weight by its name on disk."""
        tables = {EMBEDDING: self.embedding}
        tables |= {} if self.position_table is None else {POSITION_EMBEDDING: self.position_table}
        return tables | {name: p.detach() for name, p in self.attention.state_dict().items()}

    def to(self, device: torch.device) -> LayerWeights:
        """The same on a device."""
        table = None if self.position_table is None else self.position_table.to(device)
        return LayerWeights(self.embedding.to(device), self.attention.to(device), table)


def new_layer(config: Config, n_tokens: int) -> LayerWeights:
    """The layer that a resolved config describes, with random weights from its seed, on the CPU.

    The embedding is drawn last, so that other words leave everything else alone; learned positions have a stream of their
    own, so that other positions do.
    """
    generator, dtype = torch.Generator().manual_seed(config.seed), getattr(torch, config.dtype)
    attention = new_attention(config, generator)
    normal = partial(torch.randn, dtype=torch.float64)  # as `torch.nn.Embedding` begins, rounded once
    width, table = config.d_input or config.d_model, None
    if config.positions == "learned":
        own_stream = torch.Generator().manual_seed((config.seed + _POSITION_STREAM) % 2**64)
        table = normal(config.max_positions, width, generator=own_stream).to(dtype)
    return LayerWeights(normal(n_tokens, width, generator=generator).to(dtype), attention, table)


def new_attention(config: Config, generator: torch.Generator | None = None) -> MultiHeadAttention:
    """The attention that a resolved config describes, with random weights, in its dtype, on the CPU, not in training."""
    attention = MultiHeadAttention(
        config.d_model, config.n_heads, n_kv_heads=config.n_kv_heads, d_head=config.d_head, d_v=config.d_v,
        d_input=config.d_input, bias=config.bias, out_proj=config.out_proj, positions=config.layer_positions,
        rope_theta=config.rope_theta, scale=config.scale, softcap=config.softcap, dropout=config.dropout,
        init=config.init, generator=generator,
    )  # fmt: skip
    return attention.to(getattr(torch, config.dtype)).train(config.train)


def to_bytes(layer: LayerWeights, config: Config, vocabulary: tuple[str, ...]) -> bytes:
    """The file's content: the same layer gives the same bytes. Raises `MhaError` for weights that are not finite."""
    from safetensors.torch import save

    tensors = layer.tensors()
    require_finite(tensors, "the weights")
    choices = {name: value for name, value in asdict(config).items() if name not in RUN_CHOICES}
    metadata = {
        "format": FORMAT,
        "config": choices,
        "vocabulary": vocabulary,
        "tokenizer": config.tokenizer,
        "probe": probe(layer, config),
    }
    header = json.dumps(metadata, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={METADATA_KEY: header})


def from_file(file: TensorFile, config: Config, *, allow_nonfinite: bool) -> LayerWeights:
    """The layer in a checked file, in the dtype of its config.

    Raises `MhaError` for numbers that are not finite, and, with exit code 3, when the stored probe says that the weights
    are not what was saved.
    """
    from safetensors.torch import load

    tensors, saved = load(file.data), saved_metadata(file.path, file.metadata)
    if not allow_nonfinite:
        require_finite(tensors, file.path)
    embedding, table = tensors.pop(EMBEDDING), tensors.pop(POSITION_EMBEDDING, None)
    attention = new_attention(config, torch.Generator()).double()  # holds every saved dtype exactly
    attention.load_state_dict(tensors)
    if saved is not None and not allow_nonfinite:
        found = probe(LayerWeights(embedding, attention, table), saved.config.resolved())
        for name, a in found.items():
            b, weight = saved.probe.get(name, ()), _PROBED.get(name, f"{name}_proj.weight")
            differences = [abs(x - y) for x, y in zip(a, b, strict=True)] if len(a) == len(b) else [math.inf]
            if max(differences, default=0.0) > PROBE_TOLERANCE * max([1e-30, *map(abs, b)]):
                raise MhaError(
                    f"{file.path}: {weight} does not give the stored probe outputs: they differ by {max(differences):.3g}",
                    hint="the weights were changed after saving; a transposed square matrix causes this",
                    code="probe-mismatch",
                    exit_code=EXIT_CHECK,
                    path=file.path,
                )
    dtype = getattr(torch, config.dtype)
    table = table.to(dtype) if table is not None and config.positions == "learned" else None
    return LayerWeights(embedding.to(dtype), attention.to(dtype), table)


def require_finite(tensors: dict[str, Tensor], subject: str) -> None:
    """Raises `MhaError` with the count and the first place of NaN or Inf in the first tensor that has any."""
    for name, tensor in tensors.items():
        bad = ~tensor.isfinite()
        if bad.any():
            raise MhaError(
                f"{subject}: {name} has {int(bad.sum())} NaN or Inf, the first at {bad.nonzero()[0].tolist()}",
                hint="--allow-nonfinite continues anyway",
                code="not-finite",
            )


@torch.no_grad()
def probe(layer: LayerWeights, config: Config) -> Probe:
    """The layer's answers to the probe input, in float64 on the CPU: three rows of the embedding plus fixed waves.

    `config` is the one that the weights are saved with: a run may look at them with another scale, or other positions.

    One row of each projection and of the output, and a blend of all rows of each embedding, are enough to notice any
    exchange of rows or columns.
    """
    embedding = layer.embedding.detach().double().cpu()
    rows = embedding[[0, len(embedding) // 2, -1]] if len(embedding) else 0.0
    waves = torch.sin(1.0 + torch.arange(3 * embedding.shape[1], dtype=torch.float64)).view(3, -1)
    seen: dict[str, Tensor] = {}
    attention = copy.deepcopy(layer.attention).double().cpu().eval()
    attention.scale, attention.softcap = config.scale, config.softcap
    attention.positions, attention.rope_theta = config.layer_positions, config.rope_theta
    attention((rows + waves)[None], tap=lambda site, tensor, **_: seen.update({site: tensor}))
    table = torch.empty(0) if layer.position_table is None else _blend(layer.position_table.detach().double().cpu())
    answers = {"embed": _blend(embedding), "embed_positions": table}
    answers |= {n: seen[f"{n}_proj"][0, 1] for n in "qkv"} | {"out": seen["out"][0, 2]}
    return {name: tuple(float(f"{x:.9g}") for x in row.tolist()) for name, row in answers.items()}


def _blend(table: Float[Tensor, "rows width"]) -> Float[Tensor, " width"]:
    return torch.sin(1.0 + torch.arange(len(table), dtype=torch.float64)) @ table
