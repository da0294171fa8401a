"""The probes of `mha check`: questions that need no weights, asked of somebody's attention one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from mhacli.adapters.usercode.user_attention import UserAttention
from mhacli.compute.check.probes import dropout as probing_dropout
from mhacli.compute.check.probes import limits as probing_limits
from mhacli.compute.check.probes import masks as probing_masks
from mhacli.compute.check.probes import visibility as probing_sight
from mhacli.compute.check.probes.context import Context, Facts, Question, first_line
from mhacli.requests.user_code import CheckRequest
from mhacli.results.check import Probe


class Probed(NamedTuple):
    """The answers of the probes, in the order of `PROBES`, and what was measured on the way."""

    probes: tuple[Probe, ...]
    facts: Facts


class Entry(NamedTuple):
    """A probe: its name, the question, and about how many calls it takes. Those that are `needed` are asked of slow ones too."""

    name: str
    ask: Question
    n_calls: int
    needed: bool = False


PROBES: tuple[Entry, ...] = (
    Entry("determinism", probing_sight.determinism, 5, True),
    Entry("finite", probing_sight.finite_outputs, 1, True),
    Entry("dropout in eval", probing_dropout.dropout_in_eval, 2, True),
    Entry("batch independence", probing_sight.batch_independence, 2, True),
    Entry("visible keys", probing_sight.visible_keys, 16, True),
    Entry("q_len ≠ k_len", probing_sight.visible_context, 24),
    Entry("mask", probing_masks.mask_argument, 8, True),
    Entry("open mask", probing_masks.open_mask, 2),
    Entry("padding", probing_masks.padding_argument, 8, True),
    Entry("padding of NaN", probing_masks.padding_of_nan, 3, True),
    Entry("query without a key", probing_masks.empty_row, 4),
    Entry("causality", probing_sight.causality, 0, True),
    Entry("self-visibility", probing_sight.self_visibility, 0, True),
    Entry("keys permuted", probing_sight.keys_permuted, 2),
    Entry("tokens permuted", probing_sight.tokens_permuted, 2),
    Entry("heads", probing_sight.heads, 2),
    Entry("row sums", probing_limits.row_sums, 1, True),
    Entry("forbidden cells", probing_limits.forbidden_cells, 1),
    Entry("scores × 1000", probing_masks.large_scores, 6),
    Entry("float16", probing_limits.half_float, 2),
    Entry("bfloat16", probing_limits.half_brain, 2),
    Entry("one token", probing_limits.one_token, 1, True),
    Entry("one key", probing_limits.one_key, 2),
    Entry("batch of one", probing_limits.one_sequence, 2, True),
    Entry("300 tokens", probing_limits.long_text, 1),
    Entry("parameters", probing_limits.parameter_count, 0, True),
    Entry("unused parameters", probing_limits.unused_parameters, 12),
    Entry("dropout in training", probing_dropout.dropout_in_training, probing_dropout.FEWEST_CALLS),
)
"""Later ones build on what earlier ones measured."""

_SLOW_S, _VERY_SLOW_S, _FEW = 0.05, 0.5, 3
_LONGEST_S = 1.0


def probe(
    subject: UserAttention, request: CheckRequest, stage: Callable[[str], None], *, expects_causal: bool
) -> Probed:
    """Asks every probe of an attention in eval mode. `stage` is told what is asked before every call; `expects_causal`: its
    author, or the user, says that no token sees a later one. A probe on which it raises has the exception in its message and
    decides nothing.
    """
    context = Context(subject, request, expects_causal=expects_causal)
    context.stage = _teller(stage, f"calling {subject.built.name}")
    with torch.random.fork_rng([subject.device] if subject.device.type == "cuda" else []):
        context.facts = dataclasses.replace(context.facts, call_s=context.timed(context.square()))
        return Probed(tuple(_answers(context, stage)), context.facts)


def _answers(context: Context, stage: Callable[[str], None]) -> Iterator[Probe]:
    """One answer after the other."""
    name, call_s = context.subject.built.name, context.facts.call_s
    for entry in PROBES:
        context.stage = _teller(stage, f"probing {name} ({entry.name})")
        context.stage()
        if is_too_slow(entry, call_s):
            message = f"left out: a call takes {call_s:.2g} s, and this takes {max(1, entry.n_calls)} or more"
            yield Probe(entry.name, message)
        else:
            yield _asked(entry, context)


def _teller(stage: Callable[[str], None], what: str) -> Callable[[], None]:
    """Tells that this goes on: a time limit is for one call."""
    return lambda: stage(what)


def is_too_slow(entry: Entry, call_s: float) -> bool:
    """Whether a probe is left out as a call takes so long: all of them together take about 60 calls of a slow one."""
    if call_s <= _SLOW_S:
        return not entry.needed and entry.n_calls * call_s > _LONGEST_S
    return not entry.needed if call_s <= _VERY_SLOW_S else not entry.needed or entry.n_calls > _FEW


def _asked(entry: Entry, context: Context) -> Probe:
    """One answer, after which the context knows more."""
    context.begin()
    try:
        answer = entry.ask(context)
    except Exception as fault:  # whatever somebody's attention raises
        return Probe(entry.name, f"could not be asked: it raises {first_line(fault)}")
    context.facts = dataclasses.replace(context.facts, **answer.facts)  # type: ignore[arg-type]
    return answer.probe
