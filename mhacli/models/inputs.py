"""A forward pass of a model: its inputs from tokens, its errors, and how far rounding moves what it gives: by passes in which
every part rounds otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from traceback import walk_tb
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mhacli.errors import MhaError, UsageError
from mhacli.models.layer_names import FROM_PYTHON, dtype_of, first_position_of
from mhacli.models.load import device_of
from mhacli.record.record import SpanTokens
from mhacli.settings import PaddingSide
from mhacli.text.tokens import TokenSequence

T = TypeVar("T")


@dataclass(frozen=True)
class ModelInputs:
    """The texts of a pass, and the keywords for the model. In an encoder-decoder, the encoder reads `context` and the decoder
    `sequences`. `spans` are named parts of the texts, `notes` are for the user."""

    sequences: tuple[TokenSequence, ...] = ()
    context: tuple[TokenSequence, ...] | None = None
    side: PaddingSide = "right"
    keywords: dict[str, Tensor] = field(default_factory=dict)
    spans: tuple[SpanTokens, ...] = ()
    notes: tuple[str, ...] = ()


def make_inputs(model: Any, texts: ModelInputs, side: PaddingSide, pad_id: int) -> ModelInputs:
    """The texts with the keywords of one pass. Raises `UsageError` for a model that does not read text."""
    family, accepted = model.config.model_type, inspect.signature(model.forward).parameters
    if "input_ids" not in accepted or model.main_input_name != "input_ids":
        raise UsageError(f"the model reads {model.main_input_name}, not text (family {family})", hint=FROM_PYTHON)
    if hasattr(model, "vision_model") and hasattr(model, "logit_scale"):  # it compares texts and images
        raise UsageError(f"the model needs pixel_values besides text (family {family})", hint=FROM_PYTHON)
    is_pair, device = bool(model.config.is_encoder_decoder), device_of(model)
    if texts.context is not None and not is_pair:
        raise UsageError(
            f"--context does not work with {family}, which has no encoder",
            hint="put it into the text, or give the second text of a pair by --pair",
        )
    if is_pair:
        encoder = _as_read_by(model.get_encoder(), texts.context or ())
        keywords = _padded("", encoder, "right", pad_id, device)
        keywords |= _padded("decoder_", texts.sequences, "right", pad_id, device)
        return replace(texts, context=encoder, side="right", keywords=keywords)
    sequences = _as_read_by(model, texts.sequences)
    keywords = _padded("", sequences, side, pad_id, device)
    if side == "left" and "attention_mask" in keywords and "position_ids" in accepted:
        # tables of positions begin where the text does, as they do when the model generates
        places = (keywords["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        keywords["position_ids"] = places + first_position_of(model.config)
    return replace(texts, sequences=sequences, side=side, keywords=keywords)


def _as_read_by(model: Any, sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
    """The texts, without token types if the model takes none."""
    takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
    return tuple(text if takes_types else replace(text, token_type_ids=()) for text in sequences)


def _padded(
    prefix: str, sequences: Sequence[TokenSequence], side: PaddingSide, pad_id: int, device: torch.device
) -> dict[str, Tensor]:
    """The ids, a mask if there is padding, for without one a model takes its fastest path, and the token types of pairs."""
    lengths = [len(sequence.ids) for sequence in sequences]

    def filled(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
        numbers = [torch.tensor(row, dtype=torch.long) for row in rows]
        made = nn.utils.rnn.pad_sequence(numbers, batch_first=True, padding_value=fill, padding_side=side)
        return made.to(device)

    keywords = {f"{prefix}input_ids": filled((text.ids for text in sequences), pad_id)}
    if min(lengths) < max(lengths):
        keywords["decoder_attention_mask" if prefix else "attention_mask"] = filled(([1] * n for n in lengths), 0)
    if any(text.token_type_ids for text in sequences):
        types = (text.token_type_ids or [0] * n for text, n in zip(sequences, lengths, strict=True))
        keywords["token_type_ids"] = filled(types, 0)
    return keywords


def are_identical(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two outputs are bit for bit equal, NaN being equal to NaN."""
    pairs = [(tensor, other.get(name)) for name, tensor in one.items() if isinstance(tensor, Tensor)]
    return bool(pairs) and all(
        isinstance(b, Tensor) and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
        for a, b in pairs
    )


_NO_MEMORY = ("allocate memory", "out of memory")


def outputs_of(model: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The outputs of one pass of a model without a KV cache. Raises `MhaError` as `run_model` does."""
    without = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return dict(run_model(model, lambda: model(**keywords, **without)))


def run_model(model: Any, run: Callable[[], T]) -> T:
    """The result of `run`, which calls the model. Raises `MhaError` for an exception in the pass, such as that of inconsistent
    sizes in the config, with its message and the innermost module that raised it."""
    try:
        return run()
    except (MhaError, MemoryError):
        raise
    except Exception as fault:
        if any(word in str(fault) for word in _NO_MEMORY):
            raise
        names = {id(module): name for name, module in model.named_modules() if name}
        running = [frame.f_locals.get("self") for frame, _ in walk_tb(fault.__traceback__)]
        inner = [f"{names[id(module)]} ({type(module).__name__}) of " for module in running if id(module) in names]
        text = next((line for line in str(fault).splitlines() if line.strip()), "no message")
        raise MhaError(
            f"the forward pass of the model raised {type(fault).__name__} in {''.join(inner[-1:])}{type(model).__name__}: "
            f"{text:.300}",
            hint="sizes in its config.json may contradict each other, or it needs an input other than text",
            code="model-failed",
            path=getattr(model, "name_or_path", None) or None,
        ) from fault


# ------------------------------------------------------------------------------------------------- rounding


TIMES_SHAKEN: Mapping[str, float] = {"float64": 8, "float32": 8, "float16": 3, "bfloat16": 3}
"""The tolerance as a multiple of the change of outputs when each part rounds differently. Of 26 families none exceeded
0.7 in float32 and 0.5 in 16 bits, whose parts are moved by twice their rounding; faults reach thousands."""


@contextmanager
def shaken_parts(model: Any, seed: int) -> Iterator[None]:
    """Moves every output of the model's parts by one rounding step, up or down at random, within the context.

    The results then differ by as much as with another order of summation.
    """
    generator = torch.Generator().manual_seed(seed)
    eps = max(torch.finfo(dtype_of(model)).eps, torch.finfo(torch.float32).eps)

    def shake(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        signs = torch.randint(0, 2, output.shape, generator=generator, dtype=torch.int8).to(output.device)
        step = signs.to(output.dtype).mul_(2).sub_(1).mul_(eps)  # in place: the logits of a long text are large
        return step.mul_(output).add_(output)

    handles = [module.register_forward_hook(shake) for module in model.modules() if not any(module.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
