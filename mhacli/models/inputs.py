"""A forward pass of a model: its inputs from tokens, and its errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from mhacli.errors import MhaError, UsageError
from mhacli.models.device_map import device_of
from mhacli.settings import PaddingSide
from mhacli.text.tokens import TokenSequence

_FROM_PYTHON = "mhacli.inspecting inspects any model while you call it from Python"


@dataclass(frozen=True)
class ModelInputs:
    """The texts of a pass and the keywords for the model. In an encoder-decoder, the encoder reads `context` and the decoder
    `sequences`."""

    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    side: PaddingSide
    keywords: dict[str, Tensor]

    def beginning(self, n: int) -> dict[str, Tensor]:
        """The keywords of the first `n` columns."""
        return {name: tensor[:, :n] for name, tensor in self.keywords.items()}


def make_inputs(
    model: Any,
    sequences: Sequence[TokenSequence],
    context: Sequence[TokenSequence] | None,
    side: PaddingSide,
    pad_id: int,
) -> ModelInputs:
    """The inputs of one pass. Raises `UsageError` for a model that does not read text."""
    family, accepted = model.config.model_type, inspect.signature(model.forward).parameters
    if "input_ids" not in accepted or model.main_input_name != "input_ids":
        raise UsageError(f"the model reads {model.main_input_name}, not text (family {family})", hint=_FROM_PYTHON)
    if _compares_pictures(model):
        raise UsageError(f"the model needs pixel_values besides text (family {family})", hint=_FROM_PYTHON)
    is_pair = bool(model.config.is_encoder_decoder)
    if context is not None and not is_pair:
        raise UsageError(
            f"--context does not work with {family}, which has no encoder",
            hint="put it into the text, or give the second text of a pair by --pair",
        )
    device = device_of(model)
    if not is_pair:
        sequences = _as_read_by(model, sequences)
        keywords = _family("", sequences, side, pad_id, device)
        is_shifted = side == "left" and "attention_mask" in keywords and "position_ids" in accepted
        if is_shifted:  # tables of positions begin where the text does, as they do when the model generates
            places = (keywords["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
            keywords["position_ids"] = places + _first_position(model)
        return ModelInputs(tuple(sequences), None, side, keywords)
    encoder = _as_read_by(model.get_encoder(), context or ())
    keywords = _family("", encoder, "right", pad_id, device) | _family("decoder_", sequences, "right", pad_id, device)
    return ModelInputs(tuple(sequences), encoder, "right", keywords)


def n_vocabulary_of(config: Any) -> int:
    """The number of token ids of a model. Raises `UsageError` for a model without a vocabulary."""
    n = int(getattr(config.get_text_config(decoder=True), "vocab_size", 0) or 0)
    if not n:
        message = f"the model has no vocabulary: it reads images or sound, not text (family {config.model_type})"
        raise UsageError(message, hint=_FROM_PYTHON)
    return n


def _compares_pictures(model: Any) -> bool:
    """Whether a model compares texts with images: it has a scale of their similarity, unlike models that only read images."""
    return hasattr(model, "vision_model") and hasattr(model, "logit_scale")


def _first_position(model: Any) -> int:
    """The index of a text's first position, after the row for padding if the table has one."""
    tables = (getattr(module, "position_embeddings", None) for module in model.modules())
    rows = (getattr(table, "padding_idx", None) for table in tables)
    return next((row + 1 for row in rows if row is not None), 0)


def _as_read_by(model: Any, sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
    """The texts, without token types if the model takes none."""
    takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
    return tuple(text if takes_types else replace(text, token_type_ids=()) for text in sequences)


def _family(
    prefix: str, sequences: Sequence[TokenSequence], side: PaddingSide, pad_id: int, device: torch.device
) -> dict[str, Tensor]:
    """The ids, a mask if there is padding, for without one a model takes its fastest path, and the token types of pairs."""
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
    if any(sequence.token_type_ids for sequence in sequences):
        types = [filled(sequence.token_type_ids, 0) for sequence in sequences]
        keywords["token_type_ids"] = torch.tensor(types, device=device)
    return keywords


def are_identical(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two outputs are bit for bit equal, NaN being equal to NaN."""
    pairs = [(one[name], other.get(name)) for name in one if isinstance(one[name], Tensor)]
    return bool(pairs) and all(
        isinstance(b, Tensor) and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in pairs
    )


# ------------------------------------------------------------------------------------------------------------- the pass


T = TypeVar("T")
_NO_MEMORY = ("allocate memory", "out of memory")


def outputs_of(model: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The outputs of one pass of a model without a KV cache. Raises `MhaError` as `run_model` does."""
    without = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return dict(run_model(model, lambda: model(**keywords, **without)))


def run_model(model: Any, run: Callable[[], T]) -> T:
    """The result of `run`, which calls the model. Raises `MhaError` for an exception in the pass, such as that of inconsistent
    sizes in the config, with its message and the innermost module that raised it."""
    raised: list[nn.Module] = []

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        if output is None and sys.exception() is not None:
            raised.append(module)

    handle = register_module_forward_hook(leave, always_call=True)
    try:
        return run()
    except (MhaError, MemoryError):
        raise
    except Exception as fault:
        if any(word in str(fault) for word in _NO_MEMORY):
            raise
        raise _refused(model, fault, raised) from fault
    finally:
        handle.remove()


def _refused(model: Any, fault: Exception, raised: Sequence[nn.Module]) -> MhaError:
    names = {id(module): name for name, module in model.named_modules() if name}
    inner = next((module for module in raised if id(module) in names), None)
    kind = type(model).__name__
    part = kind if inner is None else f"{names[id(inner)]} ({type(inner).__name__}) of {kind}"
    said = next((line for line in str(fault).splitlines() if line.strip()), "no message")
    return MhaError(
        f"the forward pass of the model raised {type(fault).__name__} in {part}: {said:.300}",
        hint="sizes in its config.json may contradict each other, or it needs an input other than text",
        code="model-failed",
        path=getattr(model, "name_or_path", None) or None,
    )
