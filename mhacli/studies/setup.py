"""A run made ready: device, weights, ids, mask, so that the same computation can be run again and observed each time."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from jaxtyping import Float, Int
from torch import Tensor

import mhacli
from mhacli import memory
from mhacli.attention import masks, weights
from mhacli.attention.blocks import embed_tokens, new_embedding
from mhacli.attention.core import Allowed, Tap, no_tap
from mhacli.attention.routes import ROUTES
from mhacli.attention.weights import Layer
from mhacli.config import Config
from mhacli.errors import MhaError
from mhacli.layerfile import LayerFile
from mhacli.plan import facts_of
from mhacli.record import Environment, TokenSequence
from mhacli.text.encode import Encoded
from mhacli.trace import Facts


@dataclass(frozen=True)
class Setup:
    """Everything that a run needs, on its device. `config.device` is the device that was chosen."""

    config: Config
    encoded: Encoded
    facts: Facts
    layer: Layer
    ids: Int[Tensor, "batch query"]
    context_ids: Int[Tensor, "batch key"] | None
    allowed: Allowed
    environment: Environment
    weights: str | None

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.ids.device

    def run(self, tap: Tap = no_tap, route: str = "separate") -> Float[Tensor, "batch query d_out"]:
        """One forward pass by a route of `ROUTES`. The same numbers every time: dropout starts from the seed."""
        self.layer.attention.generator = torch.Generator(self.device).manual_seed(self.config.seed)
        x = embed_tokens(self.ids, self.layer.embedding, positions=self.config.positions, tap=tap)
        context = None
        if self.context_ids is not None:
            context = embed_tokens(self.context_ids, self.layer.embedding, positions=self.config.positions)
            tap("context", context)
        return ROUTES[route](self.layer.attention, x, context, self.allowed, tap)


def make_setup(
    encoded: Encoded, config: Config, *, source: LayerFile | None = None, allow_nonfinite: bool = False
) -> Setup:
    """A run made ready from a resolved config: with the weights of `source`, or new ones from the seed.

    Raises `MhaError` when the device is missing or the weights do not fit the vocabulary.
    """
    device = choose_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    layer = (
        _new_layer(encoded, config) if source is None else weights.from_file(source, allow_nonfinite=allow_nonfinite)
    )
    _require_vocabulary(encoded, layer, source)
    layer = Layer(layer.embedding.to(device), layer.attention.to(device))
    ids = _padded_ids(encoded.sequences, device)
    return Setup(
        config=replace(config, device=str(device)),
        encoded=encoded,
        facts=facts_of(encoded, config),
        layer=layer,
        ids=ids,
        context_ids=None if encoded.context is None else _padded_ids(encoded.context, device),
        allowed=_mask(encoded, config, device),
        environment=_environment(device, config.device),
        weights=None if source is None else source.path,
    )


def choose_device(name: str) -> torch.device:
    """The device that a config's name means; `auto` takes CUDA, then MPS, then the CPU.

    Raises `MhaError` that says whether torch or the machine lacks the device.
    """
    if name == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    kind, _, index = name.partition(":")
    if kind == "cuda":
        _require_cuda(name, int(index or 0))
    if kind == "mps" and not torch.backends.mps.is_available():
        built = "this machine has no such device" if torch.backends.mps.is_built() else "this build of torch has no MPS"
        raise MhaError(
            f"device mps must be present, got none: {built}", hint="--device cpu works everywhere", code="no-device"
        )
    return torch.device(name)


def free_bytes(device_name: str) -> int:
    """What a run on the device may still allocate: the device's own memory where it has its own."""
    device = choose_device(device_name)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available_bytes()


def _require_cuda(name: str, index: int) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        why = f"this build of torch ({torch.__version__}) has no CUDA"
    elif not torch.cuda.is_available():
        why = "this machine has no CUDA device that torch can use"
    elif index >= torch.cuda.device_count():
        why = f"this machine has {torch.cuda.device_count()}, numbered from 0"
    else:
        return
    raise MhaError(
        f"device {name} must be present, got none: {why}", hint="--device cpu works everywhere", code="no-device"
    )


def _new_layer(encoded: Encoded, config: Config) -> Layer:
    generator = torch.Generator().manual_seed(config.seed)
    attention = weights.new_attention(config, generator)  # first, so that other words leave the projections alone
    embedding = new_embedding(len(encoded.vocabulary.tokens), config.d_model, generator)
    return Layer(embedding.to(getattr(torch, config.dtype)), attention)


def _require_vocabulary(encoded: Encoded, layer: Layer, source: LayerFile | None) -> None:
    have, need = layer.embedding.shape[0], len(encoded.vocabulary.tokens)
    if source is not None and have != need:
        raise MhaError(
            f"the vocabulary must have as many entries as embed.weight of {source.path} has rows, {have}, got {need}",
            hint="--vocab FILE gives the vocabulary that the weights were made with",
            code="bad-file",
            path=source.path,
        )


def _padded_ids(sequences: Sequence[TokenSequence], device: torch.device) -> Int[Tensor, "batch length"]:
    """Ids with −1 after the end of each shorter sequence."""
    longest = max(len(sequence.ids) for sequence in sequences)
    rows = [[*sequence.ids, *[-1] * (longest - len(sequence.ids))] for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _mask(encoded: Encoded, config: Config, device: torch.device) -> Allowed:
    """Only real keys, only for real queries, and what the config forbids."""

    def lengths(sequences: Sequence[TokenSequence]) -> Tensor:
        return torch.tensor([len(sequence.ids) for sequence in sequences], device=device)

    rules = [
        masks.padding(lengths(encoded.context or encoded.sequences)),
        masks.padding(lengths(encoded.sequences), of="query"),
    ]
    rules += [masks.causal()] if config.causal else []
    rules += [masks.window(*config.window)] if config.window is not None else []
    return masks.both(*rules)


def _environment(device: torch.device, asked: str) -> Environment:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return Environment(
        mha=mhacli.__version__,
        torch=torch.__version__,
        numpy=numpy.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=str(device),
        device_name=name,
        device_asked=asked,
        threads=torch.get_num_threads(),
    )
