"""From tokens to what a model takes: ids, masks for padding, and the places of tokens that padding would shift."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mhacli.errors import UsageError
from mhacli.spec.config import Side
from mhacli.spec.tokens import TokenSequence


@dataclass(frozen=True)
class ModelInputs:
    """The texts of a pass and the keywords for the model. In a model of two halves `context` is what the encoder reads, and
    the `sequences` are the decoder's."""

    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    side: Side
    keywords: dict[str, Tensor]

    def beginning(self, n: int) -> dict[str, Tensor]:
        """The keywords of the first `n` columns."""
        return {name: tensor[:, :n] for name, tensor in self.keywords.items()}


def make_inputs(
    model: Any, sequences: Sequence[TokenSequence], context: Sequence[TokenSequence] | None, side: Side, pad_id: int
) -> ModelInputs:
    """The inputs of one pass. Raises `UsageError` for a model that does not read text."""
    family, accepted = model.config.model_type, inspect.signature(model.forward).parameters
    if "input_ids" not in accepted or model.main_input_name != "input_ids":
        raise UsageError(
            f"model must read text, got one of the family {family}, which reads {model.main_input_name}",
            hint="mhacli.adapters.hf.capture watches any model from Python",
        )
    if _compares_pictures(model):
        raise UsageError(
            f"model must read text alone, got one of the family {family}, which needs pixel_values beside it",
            hint="mhacli.adapters.hf.capture watches any model from Python",
        )
    is_pair = bool(model.config.is_encoder_decoder)
    if context is not None and not is_pair:
        raise UsageError(f"context must be left out with {family}, which has no encoder", hint="put it into the text")
    device = model.device
    if not is_pair:
        keywords = _family("", sequences, side, pad_id, device)
        is_shifted = side == "left" and "attention_mask" in keywords and "position_ids" in accepted
        if is_shifted:  # tables of positions begin where the text does, as they do when the model generates
            places = (keywords["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
            keywords["position_ids"] = places + _first_position(model)
        return ModelInputs(tuple(sequences), None, side, keywords)
    encoder = tuple(context or ())
    keywords = _family("", encoder, "right", pad_id, device) | _family("decoder_", sequences, "right", pad_id, device)
    return ModelInputs(tuple(sequences), encoder, "right", keywords)


def n_vocabulary_of(config: Any) -> int:
    """How many ids a model has rows for. Raises `UsageError` for one that reads no tokens of a vocabulary."""
    n = int(getattr(config.get_text_config(decoder=True), "vocab_size", 0) or 0)
    if not n:
        raise UsageError(
            f"model must read text, got one of the family {config.model_type}, which has no vocabulary",
            hint="mhacli.adapters.hf.capture watches any model from Python",
        )
    return n


def _compares_pictures(model: Any) -> bool:
    """Whether a model compares texts with pictures, by its scale of their likeness; one that only may see pictures has none."""
    return hasattr(model, "vision_model") and hasattr(model, "logit_scale")


def _first_position(model: Any) -> int:
    """The number of a text's first position: where the table has a row for padding, the one behind it."""
    tables = (getattr(module, "position_embeddings", None) for module in model.modules())
    rows = (getattr(table, "padding_idx", None) for table in tables)
    return next((row + 1 for row in rows if row is not None), 0)


def _family(
    prefix: str, sequences: Sequence[TokenSequence], side: Side, pad_id: int, device: torch.device
) -> dict[str, Tensor]:
    """Ids, and the mask for padding where there is any: without one a model takes its quickest path."""
    longest = max(len(sequence.ids) for sequence in sequences)

    def filled(row: Sequence[int], fill: int) -> list[int]:
        more = [fill] * (longest - len(row))
        return [*row, *more] if side == "right" else [*more, *row]

    ids = [filled(sequence.ids, pad_id) for sequence in sequences]
    real = [filled([1] * len(sequence.ids), 0) for sequence in sequences]
    keywords = {f"{prefix}input_ids": torch.tensor(ids, device=device)}
    if any(len(sequence.ids) < longest for sequence in sequences):
        mask = "decoder_attention_mask" if prefix else "attention_mask"
        keywords[mask] = torch.tensor(real, device=device)
    return keywords


def are_identical(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two outputs hold the same bits, NaN being like NaN."""
    pairs = [(one[name], other.get(name)) for name in one if isinstance(one[name], Tensor)]
    return bool(pairs) and all(
        isinstance(b, Tensor) and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in pairs
    )
