"""Consistency checks of `mha doctor --model`: passes over one text must agree (alone, padded, batched, with a cache).

A failed check names the first attention in which the passes differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.commands.check.result import HealthCheck
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.io.progress import Progress
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.inputs import ModelInputs, make_inputs, outputs_of
from mhacli.models.load import Loaded
from mhacli.models.rounding import TIMES_SHAKEN, shaken_parts
from mhacli.record.checks import TOLERANCES
from mhacli.settings import PaddingSide
from mhacli.text.tokens import TokenSequence

MOST_STEPS = 12
"""The most tokens read one at a time through the cache."""
TOO_COARSE = 0.5
"""If rounding alone moves outputs by more than this fraction of their size, a comparison proves nothing."""
EAGER = "eager"
_REPEAT = ("repeat", "two passes of one text differ")
_BATCH = ("batch", "texts of one length differ in a batch")
_EXPLAINED_BY: Mapping[str, Sequence[tuple[str, str]]] = {
    "causality": (_REPEAT,),
    "batch": (_REPEAT,),
    "left-padding": (_REPEAT, _BATCH),
    "right-padding": (_REPEAT, _BATCH),
    "cache": (_REPEAT, ("causality", "outputs depend on later tokens")),
    "eager": (_REPEAT,),
}
"""For each check, the failures that imply its failure."""


@dataclass(frozen=True)
class Reference:
    """Each row in a pass of its own, and the effect of rounding."""

    rows: tuple[ModelText, ...]
    alone: PassOutputs
    tolerance: RoundingTolerance


class ConsistencyChecks:
    """The comparisons of a loaded checkpoint in its current dtype.

    `why_not_causal` is None if later tokens must be hidden. `side` is the padding side of its tokenizer.
    """

    def __init__(
        self, passes: Passes, rows: Sequence[ModelText], *, why_not_causal: str | None, side: PaddingSide, seed: int
    ) -> None:
        self.passes, self.why_not_causal, self.side, self.seed = passes, why_not_causal, side, seed
        self.dtype = passes.loaded.dtype
        alone = passes.alone(rows)
        shaken = []
        for n in range(2):
            with shaken_parts(passes.model, seed + n):
                shaken.append(passes.alone(rows))
        self.reference = Reference(tuple(rows), alone, tolerance_of(alone, shaken, self.dtype))

    def checks(self, report_progress: Progress) -> list[HealthCheck]:
        """The results of all checks. A check reports an error of the model's code, and is skipped if an earlier failure
        implies its own."""
        questions: dict[str, Callable[[], HealthCheck]] = {
            "repeat": self.repeat,
            "causality": self.causality,
            "batch": self.batch,
            "left-padding": self.left_padding,
            "right-padding": self.right_padding,
            "cache": self.cache,
            "eager": self.eager,
        }
        answers: dict[str, HealthCheck] = {}
        for place, (name, ask) in enumerate(questions.items()):
            report_progress(place / len(questions), name)
            reason = self._reason_to_skip(name, answers)
            answers[name] = _answer(name, ask) if reason is None else HealthCheck(name, None, reason)
        return list(answers.values())

    def _reason_to_skip(self, name: str, answers: Mapping[str, HealthCheck]) -> str | None:
        if not self.reference.alone.is_finite:
            return "the outputs are not finite, see finite: nothing to compare"
        for earlier, failure in _EXPLAINED_BY.get(name, ()):
            if earlier in answers and answers[earlier].ok is False:
                return f"{failure}, see {earlier}: nothing to compare"
        return None

    # ------------------------------------------------------------------------------------------------------- one by one

    def repeat(self) -> HealthCheck:
        """The same text twice."""
        again = self.passes.alone(self.reference.rows)
        still = self.reference.alone
        most = RoundingTolerance(
            _repeats(self.dtype), {attention.key: _repeats(self.dtype) for attention in still.attentions}
        )
        return self._judged(
            "repeat", [(again, still)], "two passes of the same text agree", "two passes of the same text differ", most
        )

    def causality(self) -> HealthCheck:
        """Replaces a later token: the outputs of earlier ones must stay the same."""
        row, n = self.reference.rows[0], len(self.reference.rows[0].tokens.ids)
        if self.why_not_causal is not None:
            return HealthCheck("causality", None, self.why_not_causal)
        if n < 2:
            return HealthCheck("causality", None, "needs a text of two tokens or more")
        pairs, alone = [], self._of_first(self.reference.alone)
        for place in sorted({1, n // 2, n - 1}):
            changed = self.passes.together([replace(row, tokens=self._exchanged(row, place))])
            pairs.append((changed.cut(0, place), alone.cut(0, place)))
        whose = "of the decoder " if self.passes.is_pair else ""
        return self._judged(
            "causality",
            pairs,
            f"changing a token {whose}changes no earlier output",
            f"changing a token {whose}changes earlier outputs",
        )

    def left_padding(self) -> HealthCheck:
        """Rows padded on the left, as for generation, against each alone."""
        if self.passes.is_pair:
            return HealthCheck("left-padding", None, "an encoder-decoder model, whose texts are padded on the right")
        answer = self._padding("left-padding", "left")
        if answer.ok is False and self.why_not_causal is not None and self.side == "right":
            message = "padding on the left changes the outputs, but the tokenizer pads on the right"
            return replace(answer, ok=None, message=message, layer=None)
        return answer

    def right_padding(self) -> HealthCheck:
        """Rows padded on the right against each alone."""
        return self._padding("right-padding", "right")

    def _padding(self, name: str, side: PaddingSide) -> HealthCheck:
        rows = self.reference.rows
        lengths = {len(row.tokens.ids) for row in rows} | {len(row.context.ids) for row in rows if row.context}
        if len(lengths) < 2:
            return HealthCheck(name, None, "needs texts of different lengths")
        padded = self.passes.together(rows, side)
        longest = max(len(row.tokens.ids) for row in rows)
        n = longest - min(len(row.tokens.ids) for row in rows)
        subject = f"with up to {n} padding tokens on the {side}, a text gives"
        return self._judged(
            name,
            [(padded, self.reference.alone)],
            f"{subject} the same outputs as alone",
            f"{subject} other outputs than alone",
        )

    def cache(self) -> HealthCheck:
        """The last tokens one at a time through the cache, against one pass over all."""
        row, n = self.reference.rows[0], len(self.reference.rows[0].tokens.ids)
        if self.why_not_causal is not None:
            return HealthCheck("cache", None, f"no use for a cache: {self.why_not_causal}")
        if n < 2:
            return HealthCheck("cache", None, "needs a text of two tokens or more")
        prompt_len = n - min(MOST_STEPS, n - 1)
        steps = self._stepwise(row, prompt_len)
        if steps is None:
            return HealthCheck("cache", None, "the model keeps no cache of keys and values")
        whole = self._of_first(self.reference.alone)
        subject = f"{prompt_len} tokens, then {n - prompt_len} one by one through the cache, give"
        changed = int((steps.rows[0].argmax(dim=-1) != whole.rows[0].argmax(dim=-1)).sum())
        wrong = (
            f"{subject} other outputs than one pass; the largest output changes its place for {changed} of {n} tokens"
        )
        return self._judged("cache", [(steps, whole)], f"{subject} the outputs of one pass", wrong)

    def batch(self) -> HealthCheck:
        """A row among others of its length against the same row alone."""
        first = self.reference.rows[0]
        ids = first.tokens.ids
        rows = [first, replace(first, tokens=numbered(ids[1:] + ids[:1])), replace(first, tokens=numbered(ids[::-1]))]
        if first.context is not None:
            read = first.context.ids
            rows[1] = replace(rows[1], context=numbered(read[::-1]))
        alone = self.passes.alone(rows)
        subject = "in a batch of 3 texts of one length, a text gives"
        return self._judged(
            "batch",
            [(self.passes.together(rows), alone)],
            f"{subject} the same outputs as alone",
            f"{subject} other outputs than alone",
        )

    def eager(self) -> HealthCheck:
        """The default implementation against eager attention."""
        name = implementation_of(self.passes.model)
        if name == EAGER:
            return HealthCheck("eager", None, "eager is what runs by default")
        rows = self.reference.rows
        together = self.passes.together(rows)
        with eager_in_place(self.passes.model) as is_eager:
            if not is_eager:
                return HealthCheck("eager", None, f"this family cannot switch from {name} to eager")
            pairs = [(self.passes.alone(rows), self.reference.alone), (self.passes.together(rows), together)]
        return self._judged(
            "eager",
            [(theirs, ours) for ours, theirs in pairs],
            f"{name}, the default, and eager agree",
            f"{name}, the default, and eager give different outputs",
        )

    # ------------------------------------------------------------------------------------------------------------ shared

    def _judged(
        self,
        name: str,
        pairs: Sequence[tuple[PassOutputs, PassOutputs]],
        agrees: str,
        differs: str,
        most: RoundingTolerance | None = None,
    ) -> HealthCheck:
        """The verdict on pairs that must agree, the largest distance, and the first attention in which they differ."""
        allowed = most or self.reference.tolerance
        values = [distance(ours.rows, theirs.rows) for ours, theirs in pairs]
        worst = max(range(len(pairs)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])
        value, ok = values[worst], all(apart <= allowed.result for apart in values)
        finite_value = finite(value)
        if ok and value > 0 and allowed.result > TOO_COARSE:
            coarse = f"rounding to {self.dtype} alone changes outputs by {allowed.result:.2g}: a fault could not be distinguished"
            return HealthCheck(name, None, coarse, finite_value, allowed.result)
        if ok:
            return HealthCheck(name, True, agrees, finite_value, allowed.result)
        layer = first_departure(*pairs[worst], allowed)
        message = differs + ("" if finite_value is not None else "; some are NaN or Inf")
        where = None if layer is None else layer.label
        if layer is not None:
            message += f"; first in {layer.label} ({layer.name})"
        return HealthCheck(name, False, message, finite_value, allowed.result, where)

    @staticmethod
    def _of_first(seen: PassOutputs) -> PassOutputs:
        return PassOutputs(
            seen.rows[:1], tuple(replace(attention, rows=attention.rows[:1]) for attention in seen.attentions)
        )

    def _exchanged(self, row: ModelText, place: int) -> Any:
        """The row's tokens with another token at one position, taken from the other texts and not padding."""
        ids = list(row.tokens.ids)
        others = {i for other in self.reference.rows for i in other.tokens.ids} - {ids[place], self.passes.pad_id}
        fallback = (ids[place] + 1) % max(2, int(self.passes.loaded.text_config.vocab_size))
        ids[place] = random.Random(self.seed + place).choice(sorted(others)) if others else fallback
        return numbered(ids)

    def _stepwise(self, row: ModelText, prompt_len: int) -> PassOutputs | None:
        """A row read through the model's cache after a prompt; None if the model returns no cache."""
        model = self.passes.model
        texts = ModelInputs((row.tokens,), None if row.context is None else (row.context,))
        keywords = dict(make_inputs(model, texts, "right", self.passes.pad_id).keywords)
        name = "decoder_input_ids" if self.passes.is_pair else "input_ids"
        ids, past, parts = keywords.pop(name), None, []
        if self.passes.is_pair:
            keywords = {"encoder_outputs": model.get_encoder()(input_ids=keywords["input_ids"])}
        n = ids.shape[1]
        for start, end in [(0, prompt_len), *((t, t + 1) for t in range(prompt_len, n))]:
            step_inputs = {name: ids[:, start:end], **keywords, "use_cache": True, "past_key_values": past}
            outputs, calls = self.passes.watched(lambda step_inputs=step_inputs: model(**step_inputs), 1)
            past = outputs.get("past_key_values")
            if past is None:
                return None
            span = [(0, end - start)]
            attentions = [seen_of(call, span) for call, kind in calls if kind != "encoder"]
            seen = tuple(attention for attention in attentions if attention is not None)
            parts.append(PassOutputs(by_row(result_of(outputs), span), seen))
        return end_to_end(parts)


def _repeats(dtype: str) -> float:
    """The tolerance between two passes over one text: below the effect of dropout, above that of a device's order of
    summation."""
    return min(50 * CEILING[dtype], 0.1)


def _answer(name: str, ask: Callable[[], HealthCheck]) -> HealthCheck:
    """The result of a check, or that the model's code raised an error."""
    try:
        return ask()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as fault:
        text = " ".join(str(fault).split())[:200]
        raised = text if isinstance(fault, MhaError) else f"the model's code raised {type(fault).__name__}: {text}"
        message = f"could not be run: {raised}"
        return HealthCheck(name, None, message, is_caution=True, advice=f"test {name} in a script of your own")


def implementation_of(model: Any) -> str:
    """The name in transformers of the model's attention implementation."""
    return str(getattr(model.config, "_attn_implementation", None) or EAGER)


@contextmanager
def eager_in_place(model: Any) -> Iterator[bool]:
    """Switches the model to `eager` attention within the context; yields whether that worked."""
    before = implementation_of(model)
    model.set_attn_implementation(EAGER)
    try:
        yield implementation_of(model) == EAGER
    finally:
        model.set_attn_implementation(before)


# --------------------------------------------------------------------------------------------------------------- passes


CEILING: Mapping[str, float] = {name: max(TOLERANCES["float32"].output, t.output) for name, t in TOLERANCES.items()}
"""The least tolerance between two ways to compute the same, relative to the size of an output. float64 has that of
float32, because models compute rotations and norms in float32 in any dtype."""

TokenOutputs = tuple[Float[Tensor, "token width"], ...]


@dataclass(frozen=True)
class ModelText:
    """A text, and the encoder's input in an encoder-decoder model."""

    tokens: TokenSequence
    context: TokenSequence | None = None


@dataclass(frozen=True)
class AttentionOutputs:
    """One attention's output for each real token, with heads side by side, row by row. `label` names the layer."""

    label: str
    name: str
    rows: TokenOutputs

    @property
    def key(self) -> tuple[str, str]:
        """The key of this attention within a pass."""
        return self.label, self.name


@dataclass(frozen=True)
class PassOutputs:
    """The outputs of a pass for each real token of each row, on the CPU: the logits, or else the last layer's output.

    `attentions` are the outputs of its attentions in the order of execution.
    """

    rows: TokenOutputs
    attentions: tuple[AttentionOutputs, ...]

    def cut(self, start: int, end: int) -> PassOutputs:
        """The outputs of tokens `start` to `end` of every row."""
        return PassOutputs(
            tuple(row[start:end] for row in self.rows),
            tuple(
                replace(attention, rows=tuple(row[start:end] for row in attention.rows))
                for attention in self.attentions
            ),
        )

    @property
    def is_finite(self) -> bool:
        """Whether all logits or outputs are finite."""
        return all(bool(row.isfinite().all()) for row in self.rows)


@dataclass(frozen=True)
class RoundingTolerance:
    """The effect of rounding on the result and on each attention."""

    result: float
    attentions: Mapping[tuple[str, str], float]


class Passes:
    """Runs rows of tokens through a loaded checkpoint. Observation changes no number."""

    def __init__(self, loaded: Loaded, pad_id: int) -> None:
        self.loaded, self.pad_id = loaded, pad_id
        self.n_passes = 0

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.loaded.model

    @property
    def is_pair(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return bool(self.loaded.config.is_encoder_decoder)

    def together(self, rows: Sequence[ModelText], side: PaddingSide = "right") -> PassOutputs:
        """All rows in one pass, padded on `side` if their lengths differ."""
        texts = [row.tokens for row in rows]
        context = tuple(row.context for row in rows if row.context is not None) or None
        inputs = make_inputs(self.model, ModelInputs(tuple(texts), context), side, self.pad_id)
        outputs, calls = self.watched(lambda: outputs_of(self.model, inputs.keywords), len(rows))
        spans = [_span(texts, text, side) for text in texts]
        read = [_span(context, text, "right") for text in context] if context else spans
        attentions = [seen_of(call, read if kind == "encoder" else spans) for call, kind in calls]
        return PassOutputs(
            by_row(result_of(outputs), spans), tuple(attention for attention in attentions if attention is not None)
        )

    def alone(self, rows: Sequence[ModelText]) -> PassOutputs:
        """Each row in a pass of its own."""
        return side_by_side([self.together([row]) for row in rows])

    def watched(self, run: Any, batch: int) -> tuple[Mapping[str, Any], list[tuple[tuple[str, Call], str]]]:
        """The outputs of `run`, and every attention call in it with its label and kind."""
        calls: list[tuple[tuple[str, Call], str]] = []

        def take(call: Call) -> None:
            label = f"layer {call.layer}" if call.kind == "self" else f"{call.kind} layer {call.layer}"
            calls.append(((label, call), call.kind))

        self.n_passes += 1
        with captured(self.model, take, batch=batch):
            outputs = run()
        return outputs, calls


def result_of(outputs: Mapping[str, Any]) -> Float[Tensor, "row token width"]:
    """The logits, or else the output of the last layer (of the decoder, if there is one)."""
    for name in ("logits", "last_hidden_state"):
        output = outputs.get(name)
        if isinstance(output, Tensor) and output.ndim == 3:
            return output
    return next(tensor for tensor in outputs.values() if isinstance(tensor, Tensor) and tensor.ndim == 3)


def _span(texts: Sequence[TokenSequence], text: TokenSequence, side: PaddingSide) -> tuple[int, int]:
    """The columns of a text's tokens in a padded batch."""
    longest, n = max(len(other.ids) for other in texts), len(text.ids)
    return (0, n) if side == "right" else (longest - n, longest)


def by_row(tensor: Float[Tensor, "row token width"], spans: Sequence[tuple[int, int]]) -> TokenOutputs:
    """The part of a tensor for each row's tokens, on the CPU."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return tuple(row[start:end].to(wide).cpu() for row, (start, end) in zip(tensor, spans, strict=True))


def seen_of(named: tuple[str, Call], spans: Sequence[tuple[int, int]]) -> AttentionOutputs | None:
    """The outputs of an attention, or None if they were not captured or do not belong to the tokens."""
    label, call = named
    if call.z is None or call.z.shape[0] != len(spans) or call.z.shape[2] < max(end for _, end in spans):
        return None
    return AttentionOutputs(label, call.title, by_row(call.z.transpose(1, 2).flatten(2), spans))


def side_by_side(passes: Sequence[PassOutputs]) -> PassOutputs:
    """The passes of different rows as one."""
    shared = zip(*(part.attentions for part in passes), strict=False)
    attentions = tuple(
        replace(same[0], rows=tuple(row for attention in same for row in attention.rows)) for same in shared
    )
    return PassOutputs(tuple(row for part in passes for row in part.rows), attentions)


def end_to_end(passes: Sequence[PassOutputs]) -> PassOutputs:
    """The passes over consecutive tokens of the same rows as one."""

    def joined(parts: Sequence[TokenOutputs]) -> TokenOutputs:
        return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

    shared = zip(*(part.attentions for part in passes), strict=False)
    attentions = tuple(replace(same[0], rows=joined([attention.rows for attention in same])) for same in shared)
    return PassOutputs(joined([part.rows for part in passes]), attentions)


# ---------------------------------------------------------------------------------------------------------------- distances


def distance(ours: TokenOutputs, theirs: TokenOutputs) -> float:
    """The largest norm of one token's difference, relative to the usual norm of `theirs`.

    Infinite if only one of two numbers is finite, NaN if neither is.

    >>> distance((torch.tensor([[3.0, 4.0]]),), (torch.tensor([[3.0, 9.0]]),)) == 5 / 90**0.5
    True
    """
    worst, n, squares = 0.0, 0, 0.0
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = mine.double(), other.double()
        if not bool((mine.isfinite() == other.isfinite()).all()):
            return math.inf
        if not bool(other.isfinite().all()):
            return math.nan
        if other.numel():
            worst = max(worst, (mine - other).norm(dim=-1).max().item())
            n, squares = n + other.shape[0], squares + other.square().sum().item()
    usual = math.sqrt(squares / n) if n else 0.0
    return 0.0 if worst == 0 else worst / usual if usual else math.inf


def tolerance_of(reference: PassOutputs, shaken: Sequence[PassOutputs], dtype: str) -> RoundingTolerance:
    """The tolerance that follows from moving every part's output by one rounding step."""

    def of(moved: Sequence[TokenOutputs], still: TokenOutputs) -> float:
        distances = [moved_by for moved_by in (distance(rows, still) for rows in moved) if math.isfinite(moved_by)]
        return max([CEILING[dtype], *(TIMES_SHAKEN[dtype] * moved_by for moved_by in distances)])

    by_key = [{attention.key: attention.rows for attention in seen.attentions} for seen in shaken]
    attentions = {
        attention.key: of([rows[attention.key] for rows in by_key if attention.key in rows], attention.rows)
        for attention in reference.attentions
    }
    return RoundingTolerance(of([outputs.rows for outputs in shaken], reference.rows), attentions)


def first_departure(ours: PassOutputs, theirs: PassOutputs, tolerance: RoundingTolerance) -> AttentionOutputs | None:
    """The first attention whose outputs differ by more than rounding explains, or None."""
    others = {attention.key: attention.rows for attention in theirs.attentions}
    for tolerance_of_attention in ours.attentions:
        if tolerance_of_attention.key in others and not distance(
            tolerance_of_attention.rows, others[tolerance_of_attention.key]
        ) <= tolerance.attentions.get(tolerance_of_attention.key, math.inf):
            return tolerance_of_attention
    return None


def numbered(ids: Sequence[int]) -> TokenSequence:
    """Tokens named by their ids."""
    tokens = tuple(f"<{i}>" for i in ids)
    return TokenSequence("", tokens, tuple(ids), tuple((0, 0) for _ in tokens))
