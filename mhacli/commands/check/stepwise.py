"""Calls a user's attention step by step with its cache, and compares with one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes import MISTAKES
from mhacli.attention.mistakes.stages import ReferenceInputs
from mhacli.commands.check.behaviour import failure_of
from mhacli.commands.check.diagnose import Diagnosis, Trial
from mhacli.commands.check.inputs import Examined, InputCase, max_error, plain
from mhacli.commands.check.recording import Run
from mhacli.commands.check.result import Finding, ProbeResult
from mhacli.usercode.build import cast_copy
from mhacli.usercode.graph import Graph, Watcher
from mhacli.usercode.sequences import StepConvention, causal_inputs, step_conventions

_FEWEST = 4
"""The shortest text that is read in steps."""
_LATER_CHUNK = "a later step of several tokens with the cache"


class Stepwise(NamedTuple):
    """The result: the probe of the cache, the `names` of the arguments passed, a note for callers that is no mistake, and what
    differs where no known mistake explains it."""

    probes: tuple[ProbeResult, ...] = ()
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def examine_stepwise(examined: Examined, diagnosis: Diagnosis) -> Stepwise:
    """Reads a text after a prefill, token by token, and in longer steps, in each way until one gives what one call gives, and
    diagnoses the first that does not. Empty if the subject takes no cache, if no way works, and if tokens see later ones."""
    attention, probed, form = examined.subject, examined.probed, diagnosis.mask_form
    if examined.module is not None:  # which no call has left anything in
        attention = attention.of(cast_copy(examined.module, attention.dtype, attention.device), attention.dtype)
    takes_causal = probed.visible == "full" and form is not None and {"query", "key"} <= set(form.axes)
    is_causal = takes_causal or (probed.influence is not None and not bool(probed.influence.triu(1).any()))
    length = attention.sizes.q_len
    mask = form if takes_causal else None
    conventions = [*step_conventions(attention, mask)] if is_causal and length >= _FEWEST else []
    if attention.mode == "cross" or probed.is_random or not conventions:
        return Stepwise()
    rows = attention.drawer(examined.request.of.seed).rows(length).to(attention.dtype)
    whole = plain(replace(attention, is_forgetful=True)(causal_inputs(rows, 0, length, mask), mask=mask))
    failing: tuple[StepConvention, list[InputCase]] | None = None
    for convention in conventions:
        cases = list(_cases(convention, rows))
        if cases and not any(_differs(case, whole) for case in cases):
            has_chunks = any(map(_is_chunked, cases))
            kinds = "token by token, after a prefill" + (", in chunks" if has_chunks else "")
            largest = max(max_error(case.output, whole) for case in cases)
            probe = ProbeResult("cache", f"{kinds}: the same as in one call ({convention.text})", largest, True)
            notes = () if has_chunks else (f"not examined: {_LATER_CHUNK}, which raises an error",)
            return Stepwise((probe,), convention.names, notes)
        failing = failing or ((convention, cases) if cases else None)
    return Stepwise() if failing is None else _failing(*failing, whole, diagnosis)


def _cases(convention: StepConvention, rows: Tensor) -> Iterator[InputCase]:
    """The cases of a prefill with single steps, of single tokens, and of longer steps where they are accepted; none if the first
    raises, or if what is read later does not depend on what was read first."""
    length, text = rows.shape[1], plain(rows)
    start = length - 2
    changed = torch.cat([rows[:, :start].flip(-1) + 0.5, rows[:, start:]], dim=1)
    for ends in (
        (start, length - 1, length),
        tuple(range(1, length + 1)),
        (length - 3, length - 1, length),
        (2, length),
    ):
        with suppress(Exception):  # not every attention accepts longer steps, or a first step of one token
            out = convention(rows, ends)
            is_first = ends[0] == start
            if is_first and max_error(out[:, start:], convention(changed, ends)[:, start:]) <= 1e-9:
                return
            name = f"steps of {' + '.join(str(end - start) for start, end in pairwise((0, *ends)))} tokens"
            yield InputCase(
                name, ReferenceInputs(text, text, text, ends=ends), out, causal_inputs(rows, 0, length, None)
            )


def _differs(case: InputCase, whole: Tensor) -> bool:
    """Whether steps give another output than one call."""
    return max_error(case.output, whole) > case.tolerance


def _is_chunked(case: InputCase) -> bool:
    """Whether a step after the first has several tokens."""
    return any(end - start > 1 for start, end in pairwise(case.rows.ends))


def _failing(convention: StepConvention, cases: Sequence[InputCase], whole: Tensor, diagnosis: Diagnosis) -> Stepwise:
    """Steps that differ from one call, whose mistake joins the diagnosis if one is known. Where steps of one token do not, later
    ones of several tokens that are masked as torch masks a first call, or not understood, are left to the caller."""
    largest = max(max_error(case.output, whole) for case in cases)
    wrong = next(case for case in cases if _differs(case, whole))
    takes_single_steps, file = _is_chunked(wrong), convention.attention.built.file
    judged = [case for case in cases if takes_single_steps or not _is_chunked(case)]
    watcher = Watcher(file)
    with suppress(Exception), watcher:  # the call cannot be recorded
        convention(wrong.inputs.queries, wrong.rows.ends)
    run = Run(Graph(whole, {}, watcher.operations), wrong.rows)
    pool = [mistake for mistake in MISTAKES if mistake.shown_by == "steps"]
    if takes_single_steps and any("is_causal" in operation.at.source for operation in run.operations):
        pool = []
    is_named = diagnosis.candidate is not None and diagnosis.finds(Trial(diagnosis.candidate, judged, run, pool))
    if takes_single_steps and not is_named:
        text = f"token by token, after a prefill: the same as in one call ({convention.text}); later chunks differ"
        note = f"{_LATER_CHUNK} gives another output than one call: give one token at a time"
        return Stepwise((ProbeResult("cache", text, largest),), convention.names, (note,))
    text = f"steps give other outputs than one call ({convention.text})"
    message = "tokens that are read behind a cache give other outputs than in one call"
    evidence = f"{wrong.name} give an output that is {max_error(wrong.output, whole):.3g} off ({convention.text})"
    finding = replace(failure_of("cache", message, evidence), file=file)
    probe = ProbeResult("cache", text, largest, False)
    return Stepwise((probe,), convention.names, findings=() if is_named else (finding,))
