"""The comparisons of `mha doctor --model`: the same text in two ways that must give the same, and where they part."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from mhacli.adapters.hf.inputs import make_inputs
from mhacli.compute.doctor.inputs import numbered
from mhacli.compute.doctor.passes import (
    CEILING,
    Passes,
    Row,
    Seen,
    Tolerance,
    by_row,
    distance,
    end_to_end,
    first_departure,
    result_of,
    seen_of,
    shaken_parts,
    tolerance_of,
)
from mhacli.errors import MhaError
from mhacli.results.doctor import HealthCheck
from mhacli.spec.config import Side

MOST_STEPS = 12
"""Tokens that are read one at a time through the cache."""
TOO_COARSE = 0.5
"""Where rounding alone moves outputs by more than this share of their size, a comparison says nothing."""
EAGER = "eager"
_REPEAT = ("repeat", "two passes of one text differ")
_BATCH = ("batch", "texts of one length differ in a batch")
_IN_THE_WAY: Mapping[str, Sequence[tuple[str, str]]] = {
    "causality": (_REPEAT,),
    "batch": (_REPEAT,),
    "left-padding": (_REPEAT, _BATCH),
    "right-padding": (_REPEAT, _BATCH),
    "cache": (_REPEAT, ("causality", "outputs depend on later tokens")),
    "eager": (_REPEAT,),
}
"""For each question the failures that would make it fail too."""


@dataclass(frozen=True)
class Reference:
    """Each row in a pass of its own, and what is put down to rounding."""

    rows: tuple[Row, ...]
    alone: Seen
    tolerance: Tolerance


class Battery:
    """The comparisons of a loaded checkpoint, in the dtype that it is in. `why_not_causal` is None where later tokens must not
    be seen; `side` is that on which its tokenizer pads."""

    def __init__(
        self, passes: Passes, rows: Sequence[Row], *, why_not_causal: str | None, side: Side, seed: int
    ) -> None:
        self.passes, self.why_not_causal, self.side, self.seed = passes, why_not_causal, side, seed
        self.dtype = passes.loaded.dtype
        alone = passes.alone(rows)
        shaken = []
        for n in range(2):
            with shaken_parts(passes.model, seed + n):
                shaken.append(passes.alone(rows))
        self.reference = Reference(tuple(rows), alone, tolerance_of(alone, shaken, self.dtype))

    def checks(self, tell: Callable[[float, str], None]) -> list[HealthCheck]:
        """All of them, each on its own: one that the model's code refuses says so, and one that an earlier failure would fail
        too is not asked."""
        asked: dict[str, Callable[[], HealthCheck]] = {
            "repeat": self.repeat,
            "causality": self.causality,
            "batch": self.batch,
            "left-padding": self.left_padding,
            "right-padding": self.right_padding,
            "cache": self.cache,
            "eager": self.eager,
        }
        found: dict[str, HealthCheck] = {}
        for place, (name, ask) in enumerate(asked.items()):
            tell(place / len(asked), name)
            reason = self._in_the_way(name, found)
            found[name] = _asked(name, ask) if reason is None else HealthCheck(name, None, reason)
        return list(found.values())

    def _in_the_way(self, name: str, found: Mapping[str, HealthCheck]) -> str | None:
        """Why a question cannot be asked; None where it can."""
        if not self.reference.alone.is_finite:
            return "the outputs are not finite, see finite: nothing to compare"
        for earlier, told in _IN_THE_WAY.get(name, ()):
            if earlier in found and found[earlier].ok is False:
                return f"{told}, see {earlier}: nothing to compare"
        return None

    # ------------------------------------------------------------------------------------------------------- one by one

    def repeat(self) -> HealthCheck:
        """The same text twice."""
        again = self.passes.alone(self.reference.rows)
        still = self.reference.alone
        most = Tolerance(_repeats(self.dtype), {one.key: _repeats(self.dtype) for one in still.attentions})
        return self._judged(
            "repeat", [(again, still)], "the same text twice gives the same", "the same text gives something else", most
        )

    def causality(self) -> HealthCheck:
        """A later token is exchanged: what earlier ones got must stay."""
        row, n = self.reference.rows[0], len(self.reference.rows[0].tokens.ids)
        if self.why_not_causal is not None:
            return HealthCheck("causality", None, self.why_not_causal)
        if n < 2:
            return HealthCheck("causality", None, "takes a text of two tokens at least")
        pairs, alone = [], self._of_first(self.reference.alone)
        for place in sorted({1, n // 2, n - 1}):
            changed = self.passes.together([replace(row, tokens=self._exchanged(row, place))])
            pairs.append((changed.cut(0, place), alone.cut(0, place)))
        whose = "of the decoder " if self.passes.is_pair else ""
        return self._judged(
            "causality",
            pairs,
            f"exchanging a token {whose}moves no output before it",
            f"exchanging a token {whose}moves outputs before it",
        )

    def left_padding(self) -> HealthCheck:
        """Rows filled up on the left, as for generation, against each alone."""
        if self.passes.is_pair:
            return HealthCheck("left-padding", None, "an encoder and a decoder, whose texts are padded on the right")
        found = self._padding("left-padding", "left")
        if found.ok is False and self.why_not_causal is not None and self.side == "right":
            message = "padded on the left it gives something else, but its tokenizer pads on the right"
            return replace(found, ok=None, message=message, layer=None)
        return found

    def right_padding(self) -> HealthCheck:
        """Rows filled up on the right against each alone."""
        return self._padding("right-padding", "right")

    def _padding(self, name: str, side: Side) -> HealthCheck:
        rows = self.reference.rows
        lengths = {len(row.tokens.ids) for row in rows} | {len(row.context.ids) for row in rows if row.context}
        if len(lengths) < 2:
            return HealthCheck(name, None, "takes texts of two lengths")
        padded = self.passes.together(rows, side)
        longest = max(len(row.tokens.ids) for row in rows)
        n = longest - min(len(row.tokens.ids) for row in rows)
        said = f"padded by up to {n} tokens on the {side}, a text gives"
        return self._judged(
            name, [(padded, self.reference.alone)], f"{said} what it gives alone", f"{said} something else than alone"
        )

    def cache(self) -> HealthCheck:
        """The last tokens one at a time through the cache, against one pass over all."""
        row, n = self.reference.rows[0], len(self.reference.rows[0].tokens.ids)
        if self.why_not_causal is not None:
            return HealthCheck("cache", None, f"nothing to keep: {self.why_not_causal}")
        if n < 2:
            return HealthCheck("cache", None, "takes a text of two tokens at least")
        prompt_len = n - min(MOST_STEPS, n - 1)
        steps = self._stepwise(row, prompt_len)
        if steps is None:
            return HealthCheck("cache", None, "the model keeps no cache of keys and values")
        whole = self._of_first(self.reference.alone)
        said = f"{prompt_len} tokens, then {n - prompt_len} one by one through the cache, give"
        changed = int((steps.rows[0].argmax(dim=-1) != whole.rows[0].argmax(dim=-1)).sum())
        wrong = f"{said} other outputs than one pass; the largest number of {changed} of {n} changes place"
        return self._judged("cache", [(steps, whole)], f"{said} what one pass gives", wrong)

    def batch(self) -> HealthCheck:
        """A row among others of its length against the same row alone."""
        first = self.reference.rows[0]
        ids = first.tokens.ids
        rows = [first, replace(first, tokens=numbered(ids[1:] + ids[:1])), replace(first, tokens=numbered(ids[::-1]))]
        if first.context is not None:
            read = first.context.ids
            rows[1] = replace(rows[1], context=numbered(read[::-1]))
        alone = self.passes.alone(rows)
        said = "among 3 texts of one length, without padding, a text gives"
        return self._judged(
            "batch",
            [(self.passes.together(rows), alone)],
            f"{said} what it gives alone",
            f"{said} something else than alone",
        )

    def eager(self) -> HealthCheck:
        """The implementation that is chosen by default against the one that writes attention out."""
        name = implementation_of(self.passes.model)
        if name == EAGER:
            return HealthCheck("eager", None, "eager is what runs by default")
        rows = self.reference.rows
        together = self.passes.together(rows)
        with eager_in_place(self.passes.model) as is_eager:
            if not is_eager:
                return HealthCheck("eager", None, f"{name} cannot be exchanged in this family")
            pairs = [(self.passes.alone(rows), self.reference.alone), (self.passes.together(rows), together)]
        return self._judged(
            "eager",
            [(theirs, ours) for ours, theirs in pairs],
            f"{name}, the default, and eager agree",
            f"{name}, the default, and eager give different outputs",
        )

    # ------------------------------------------------------------------------------------------------------------ shared

    def _judged(
        self, name: str, pairs: Sequence[tuple[Seen, Seen]], agrees: str, differs: str, most: Tolerance | None = None
    ) -> HealthCheck:
        """The verdict on pairs that must be the same, the largest distance, and the first attention where they part."""
        allowed = most or self.reference.tolerance
        values = [distance(ours.rows, theirs.rows) for ours, theirs in pairs]
        worst = max(range(len(pairs)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])
        value, ok = values[worst], all(found <= allowed.result for found in values)
        known = value if math.isfinite(value) else None
        if ok and value > 0 and allowed.result > TOO_COARSE:
            coarse = f"rounding to {self.dtype} alone moves outputs by {allowed.result:.2g}: a fault could not be told from it"
            return HealthCheck(name, None, coarse, known, allowed.result)
        if ok:
            return HealthCheck(name, True, agrees, known, allowed.result)
        layer = first_departure(*pairs[worst], allowed)
        message = differs + ("" if known is not None else "; some are NaN or Inf")
        where = None if layer is None else layer.label
        if layer is not None:
            message += f"; first in {layer.label} ({layer.name})"
        return HealthCheck(name, False, message, known, allowed.result, where)

    @staticmethod
    def _of_first(seen: Seen) -> Seen:
        """The first row alone."""
        return Seen(seen.rows[:1], tuple(replace(one, rows=one.rows[:1]) for one in seen.attentions))

    def _exchanged(self, row: Row, place: int) -> Any:
        """The row's tokens with another one in a place: one of the other texts, which is no padding."""
        ids = list(row.tokens.ids)
        others = {i for other in self.reference.rows for i in other.tokens.ids} - {ids[place], self.passes.pad_id}
        fallback = (ids[place] + 1) % max(2, int(self.passes.loaded.text_config.vocab_size))
        ids[place] = random.Random(self.seed + place).choice(sorted(others)) if others else fallback
        return numbered(ids)

    def _stepwise(self, row: Row, prompt_len: int) -> Seen | None:
        """A row read through the cache that the model makes, its first tokens at once; None where it makes none."""
        model = self.passes.model
        context = None if row.context is None else [row.context]
        keywords = dict(make_inputs(model, [row.tokens], context, "right", self.passes.pad_id).keywords)
        name = "decoder_input_ids" if self.passes.is_pair else "input_ids"
        ids, past, parts = keywords.pop(name), None, []
        if self.passes.is_pair:
            keywords = {"encoder_outputs": model.get_encoder()(input_ids=keywords["input_ids"])}
        n = ids.shape[1]
        for start, end in [(0, prompt_len), *((t, t + 1) for t in range(prompt_len, n))]:
            given = {name: ids[:, start:end], **keywords, "use_cache": True, "past_key_values": past}
            outputs, calls = self.passes.watched(lambda given=given: model(**given), 1)
            past = outputs.get("past_key_values")
            if past is None:
                return None
            span = [(0, end - start)]
            seen = [seen_of(call, span) for call, kind in calls if kind != "encoder"]
            parts.append(Seen(by_row(result_of(outputs), span), tuple(one for one in seen if one is not None)))
        return end_to_end(parts)


def _repeats(dtype: str) -> float:
    """By how much two passes of one text may differ, whatever rounding does: dropout moves outputs by more, the order in which
    a device adds by less."""
    return min(50 * CEILING[dtype], 0.1)


def _asked(name: str, ask: Callable[[], HealthCheck]) -> HealthCheck:
    """The answer; a pass that the model's code refuses is none."""
    try:
        return ask()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as fault:
        said = " ".join(str(fault).split())[:200]
        raised = said if isinstance(fault, MhaError) else f"the model's code raised {type(fault).__name__}: {said}"
        message = f"could not be tried, {raised}"
        return HealthCheck(name, None, message, is_caution=True, advice=f"try what {name} asks in a script of your own")


def implementation_of(model: Any) -> str:
    """What transformers calls the attention that a model runs."""
    return str(getattr(model.config, "_attn_implementation", None) or EAGER)


@contextmanager
def eager_in_place(model: Any) -> Iterator[bool]:
    """While it is open the model computes attention by `eager`; tells whether that could be had."""
    before = implementation_of(model)
    model.set_attn_implementation(EAGER)
    try:
        yield implementation_of(model) == EAGER
    finally:
        model.set_attn_implementation(before)
