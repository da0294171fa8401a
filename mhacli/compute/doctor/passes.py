"""Passes of a checkpoint to compare: what every token of every row got, after the last layer and in each attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.adapters.hf.calls import Call
from mhacli.adapters.hf.capture import captured
from mhacli.adapters.hf.forward import outputs_of
from mhacli.adapters.hf.inputs import make_inputs
from mhacli.adapters.hf.load import Loaded
from mhacli.spec.config import Side
from mhacli.spec.tokens import TokenSequence

CEILING: Mapping[str, float] = {"float64": 2e-6, "float32": 2e-6, "float16": 5e-3, "bfloat16": 2e-2}
"""What two ways of computing the same may always differ by, relative to the size of an output. Of float64 it is that of
float32, in which models compute rotations and norms whatever their dtype is."""
TIMES_SHAKEN: Mapping[str, float] = {"float64": 8, "float32": 8, "float16": 3, "bfloat16": 3}
"""How far two ways of computing the same may lie apart, in what outputs move when each part rounds otherwise. Of 26 families
none came beyond 0.7 in float32 and 0.5 in 16 bits, whose parts are shaken by twice their rounding; faults lie at thousands."""

Keywords = Mapping[str, Any]
Rows = tuple[Float[Tensor, "token width"], ...]


@dataclass(frozen=True)
class Row:
    """A text, with what the encoder reads in a model of two halves."""

    tokens: TokenSequence
    context: TokenSequence | None = None


@dataclass(frozen=True)
class SeenAttention:
    """What one attention gave each real token: the heads' results side by side, row by row. `label` says which layer it is."""

    label: str
    name: str
    rows: Rows

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others of a pass."""
        return self.label, self.name


@dataclass(frozen=True)
class Seen:
    """What a pass gave each real token of each row, on the CPU: the logits, or else the output of the last layer; and the
    same of its attentions, in the order of execution."""

    rows: Rows
    attentions: tuple[SeenAttention, ...]

    def cut(self, start: int, end: int) -> Seen:
        """Tokens `start` to `end` of every row."""
        return Seen(
            tuple(row[start:end] for row in self.rows),
            tuple(replace(one, rows=tuple(row[start:end] for row in one.rows)) for one in self.attentions),
        )

    @property
    def is_finite(self) -> bool:
        """Whether every number of the result is finite."""
        return all(bool(row.isfinite().all()) for row in self.rows)


@dataclass(frozen=True)
class Tolerance:
    """What is put down to rounding: for the result, and for each attention."""

    result: float
    attentions: Mapping[tuple[str, str], float]


class Passes:
    """A loaded checkpoint that reads rows of tokens. Every pass is watched, which changes nothing that it computes."""

    def __init__(self, loaded: Loaded, pad_id: int) -> None:
        self.loaded, self.pad_id = loaded, pad_id
        self.n_passes = 0

    @property
    def model(self) -> Any:
        """transformers' model."""
        return self.loaded.model

    @property
    def is_pair(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return bool(self.loaded.config.is_encoder_decoder)

    def together(self, rows: Sequence[Row], side: Side = "right") -> Seen:
        """All rows in one pass, padded on a side where their lengths differ."""
        texts = [row.tokens for row in rows]
        context = [row.context for row in rows if row.context is not None] or None
        inputs = make_inputs(self.model, texts, context, side, self.pad_id)
        outputs, calls = self.watched(lambda: outputs_of(self.model, inputs.keywords), len(rows))
        spans = [_span(texts, text, side) for text in texts]
        read = [_span(context, text, "right") for text in context] if context else spans
        attentions = [seen_of(call, read if kind == "encoder" else spans) for call, kind in calls]
        return Seen(by_row(result_of(outputs), spans), tuple(one for one in attentions if one is not None))

    def alone(self, rows: Sequence[Row]) -> Seen:
        """Each row in a pass of its own."""
        return side_by_side([self.together([row]) for row in rows])

    def watched(self, run: Any, batch: int) -> tuple[Mapping[str, Any], list[tuple[tuple[str, Call], str]]]:
        """The outputs of what `run` does, and every attention in it, with its label and kind."""
        calls: list[tuple[tuple[str, Call], str]] = []

        def take(call: Call) -> None:
            label = f"layer {call.layer}" if call.kind == "self" else f"{call.kind} layer {call.layer}"
            calls.append(((label, call), call.kind))

        self.n_passes += 1
        with captured(self.model, take, batch=batch):
            outputs = run()
        return outputs, calls


def result_of(outputs: Mapping[str, Any]) -> Float[Tensor, "row token width"]:
    """The logits, or else the output of the last layer: of the decoder, where there are two halves."""
    for name in ("logits", "last_hidden_state"):
        found = outputs.get(name)
        if isinstance(found, Tensor) and found.ndim == 3:
            return found
    return next(tensor for tensor in outputs.values() if isinstance(tensor, Tensor) and tensor.ndim == 3)


def _span(texts: Sequence[TokenSequence], text: TokenSequence, side: Side) -> tuple[int, int]:
    """The columns of a text's tokens among others."""
    longest, n = max(len(other.ids) for other in texts), len(text.ids)
    return (0, n) if side == "right" else (longest - n, longest)


def by_row(found: Float[Tensor, "row token width"], spans: Sequence[tuple[int, int]]) -> Rows:
    """The numbers of each row's tokens, which stand in these columns, on the CPU."""
    wide = torch.promote_types(found.dtype, torch.float32)
    return tuple(row[start:end].to(wide).cpu() for row, (start, end) in zip(found, spans, strict=True))


def seen_of(named: tuple[str, Call], spans: Sequence[tuple[int, int]]) -> SeenAttention | None:
    """None where the heads' results were not seen, or are not those of the tokens."""
    label, call = named
    if call.z is None or call.z.shape[0] != len(spans) or call.z.shape[2] < max(end for _, end in spans):
        return None
    return SeenAttention(label, call.title, by_row(call.z.transpose(1, 2).flatten(2), spans))


def side_by_side(passes: Sequence[Seen]) -> Seen:
    """Passes of different rows as one."""
    shared = zip(*(one.attentions for one in passes), strict=False)
    attentions = tuple(replace(same[0], rows=tuple(row for one in same for row in one.rows)) for same in shared)
    return Seen(tuple(row for one in passes for row in one.rows), attentions)


def end_to_end(passes: Sequence[Seen]) -> Seen:
    """Passes over neighbouring tokens of the same rows as one."""

    def joined(parts: Sequence[Rows]) -> Rows:
        return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

    shared = zip(*(one.attentions for one in passes), strict=False)
    attentions = tuple(replace(same[0], rows=joined([one.rows for one in same])) for same in shared)
    return Seen(joined([one.rows for one in passes]), attentions)


# ------------------------------------------------------------------------------------------------------------ how far apart


def distance(ours: Rows, theirs: Rows) -> float:
    """The largest difference that one token's numbers make, as a length, over the usual length of theirs. Infinite where
    only one of two numbers is finite, NaN where none is.

    >>> distance((torch.tensor([[3.0, 4.0]]),), (torch.tensor([[3.0, 9.0]]),)) == 5 / 90**0.5
    True
    """
    worst, n, squares = 0.0, 0, 0.0
    for own, other in zip(ours, theirs, strict=True):
        own, other = own.double(), other.double()
        if not bool((own.isfinite() == other.isfinite()).all()):
            return math.inf
        if not bool(other.isfinite().all()):
            return math.nan
        if other.numel():
            worst = max(worst, (own - other).norm(dim=-1).max().item())
            n, squares = n + other.shape[0], squares + other.square().sum().item()
    usual = math.sqrt(squares / n) if n else 0.0
    return 0.0 if worst == 0 else worst / usual if usual else math.inf


def tolerance_of(reference: Seen, shaken: Sequence[Seen], dtype: str) -> Tolerance:
    """From what the numbers moved when every part of the model was shaken by one step of rounding."""

    def of(moved: Sequence[Rows], still: Rows) -> float:
        known = [found for found in (distance(rows, still) for rows in moved) if math.isfinite(found)]
        return max([CEILING[dtype], *(TIMES_SHAKEN[dtype] * found for found in known)])

    by_key = [{one.key: one.rows for one in seen.attentions} for seen in shaken]
    attentions = {
        one.key: of([rows[one.key] for rows in by_key if one.key in rows], one.rows) for one in reference.attentions
    }
    return Tolerance(of([one.rows for one in shaken], reference.rows), attentions)


def first_departure(ours: Seen, theirs: Seen, tolerance: Tolerance) -> SeenAttention | None:
    """The first attention whose results are farther apart than rounding explains; None where none is."""
    others = {one.key: one.rows for one in theirs.attentions}
    for own in ours.attentions:
        if own.key in others and not distance(own.rows, others[own.key]) <= tolerance.attentions.get(own.key, math.inf):
            return own
    return None


# ------------------------------------------------------------------------------------------------------------------ shaken


@contextmanager
def shaken_parts(model: Any, seed: int) -> Iterator[None]:
    """While it is open, every number that a part of the model gives is moved by one step of its dtype, up or down at random:
    what comes out then differs by as much as another order of summing may make it differ."""
    generator = torch.Generator().manual_seed(seed)
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)

    def shake(_module: nn.Module, _given: Any, found: Any) -> Any:
        if not isinstance(found, Tensor) or not found.is_floating_point():
            return None
        signs = torch.randint(0, 2, found.shape, generator=generator, dtype=torch.int8).to(found.device)
        return found + found * ((2 * signs.to(found.dtype) - 1) * eps)

    handles = [module.register_forward_hook(shake) for module in model.modules() if not any(module.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
