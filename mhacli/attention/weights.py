"""A layer's weights to bytes and back, with the probe that notices a transposed matrix.

The probe is what the layer answers to a fixed input: a transposed square matrix has the right shape, but not the right
answer. The format is described in `mhacli.layerfile`.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.attention.blocks import MultiHeadAttention
from mhacli.config import Config
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.layerfile import EMBEDDING, FORMAT, RUN_CHOICES, LayerFile, Probe
from mhacli.tensorfile import METADATA_KEY

PROBE_TOLERANCE = 1e-6
"""Largest difference from a stored probe, relative to its largest number: its rounding to 9 digits, with room."""


class Layer(NamedTuple):
    """An embedding and the attention that reads it."""

    embedding: Float[Tensor, "vocabulary d_model"]
    attention: MultiHeadAttention


def new_attention(config: Config, generator: torch.Generator | None = None) -> MultiHeadAttention:
    """The attention that a resolved config describes, with random weights, in its dtype, on the CPU, not in training."""
    attention = MultiHeadAttention(
        config.d_model, config.n_heads, n_kv_heads=config.n_kv_heads, d_head=config.d_head, d_v=config.d_v,
        bias=config.bias, out_proj=config.out_proj, scale=config.scale, softcap=config.softcap,
        dropout=config.dropout, init=config.init, generator=generator,
    )  # fmt: skip
    return attention.to(getattr(torch, config.dtype)).train(config.train)


def to_bytes(layer: Layer, config: Config, vocabulary: tuple[str, ...]) -> bytes:
    """The file's content: the same layer gives the same bytes. Raises `MhaError` for weights that are not finite."""
    from safetensors.torch import save

    tensors = _tensors(layer)
    require_finite(tensors, "the weights")
    choices = {name: value for name, value in asdict(config).items() if name not in RUN_CHOICES}
    metadata = {
        "format": FORMAT,
        "config": choices,
        "vocabulary": vocabulary,
        "tokenizer": config.tokenizer,
        "probe": asdict(probe(layer, scale=config.scale, softcap=config.softcap)),
    }
    header = json.dumps(metadata, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={METADATA_KEY: header})


def from_file(source: LayerFile, *, allow_nonfinite: bool) -> Layer:
    """The layer in a checked file, in the dtype of its config.

    Raises `MhaError` for numbers that are not finite, and, with exit code 3, when the stored probe says that the weights
    are not what was saved.
    """
    from safetensors.torch import load

    tensors = load(source.file.data)
    if not allow_nonfinite:
        require_finite(tensors, source.path)
    embedding = tensors.pop(EMBEDDING)
    attention = new_attention(source.config, torch.Generator()).double()  # holds every saved dtype exactly
    attention.load_state_dict(tensors)
    if source.metadata is not None and not allow_nonfinite:
        saved = source.metadata.config.resolved()
        found = probe(Layer(embedding, attention), scale=saved.scale, softcap=saved.softcap)
        _require_probe(found, source.metadata.probe, source.path)
    dtype = getattr(torch, source.config.dtype)
    return Layer(embedding.to(dtype), attention.to(dtype))


def require_finite(tensors: dict[str, Tensor], subject: str) -> None:
    """Raises `MhaError` with the count and the first place of NaN or Inf in the first tensor that has any."""
    for name, tensor in tensors.items():
        bad = ~tensor.isfinite()
        if bad.any():
            raise MhaError(
                f"{subject}: {name} must be finite, got {int(bad.sum())} NaN or Inf, the first at {bad.nonzero()[0].tolist()}",
                hint="--allow-nonfinite looks anyway",
                code="not-finite",
            )


@torch.no_grad()
def probe(layer: Layer, *, scale: float | None, softcap: float | None) -> Probe:
    """The layer's answers to the probe input, in float64 on the CPU: three rows of the embedding plus fixed waves.

    `scale` and `softcap` are those that the weights are saved with: a run may look at them with others.

    One row of each projection and of the output, and a blend of all rows of the embedding, are enough to notice any
    exchange of rows or columns.
    """
    embedding = layer.embedding.detach().double().cpu()
    ids = torch.tensor([0, len(embedding) // 2, len(embedding) - 1])
    waves = torch.sin(1.0 + torch.arange(3 * embedding.shape[1], dtype=torch.float64)).view(3, -1)
    seen: dict[str, Tensor] = {}
    attention = copy.deepcopy(layer.attention).double().cpu().eval()
    attention.scale, attention.softcap = scale, softcap
    attention((embedding[ids] + waves)[None], tap=lambda site, tensor, **_: seen.update({site: tensor}))
    blend = torch.sin(1.0 + torch.arange(len(embedding), dtype=torch.float64)) @ embedding
    rows = {"embed": blend, "out": seen["out"][0, 2]} | {n: seen[f"{n}_proj"][0, 1] for n in "qkv"}
    return Probe(**{name: tuple(float(f"{x:.9g}") for x in row.tolist()) for name, row in rows.items()})


def _require_probe(found: Probe, stored: Probe, path: str) -> None:
    for name in ("embed", "q", "k", "v", "out"):
        a, b = (torch.tensor(getattr(side, name), dtype=torch.float64) for side in (found, stored))
        difference = float((a - b).abs().max()) if a.shape == b.shape else float("inf")
        if difference > PROBE_TOLERANCE * max(float(b.abs().max()), 1e-30):
            weight = EMBEDDING if name == "embed" else f"{'o' if name == 'out' else name}_proj.weight"
            raise MhaError(
                f"{path}: {weight} must give the stored probe outputs, got a difference of {difference:.3g}",
                hint="the numbers were changed after saving; a transposed square matrix looks like this",
                code="probe-mismatch",
                exit_code=EXIT_CHECK,
                path=path,
            )


def _tensors(layer: Layer) -> dict[str, Tensor]:
    return {EMBEDDING: layer.embedding, **{name: p.detach() for name, p in layer.attention.state_dict().items()}}
