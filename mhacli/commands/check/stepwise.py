"""Calls a user's attention step by step with its cache, and compares with one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from mhacli.attention.mistakes import MISTAKES
from mhacli.attention.mistakes.stages import ReferenceInputs
from mhacli.commands.check.diagnose import Diagnosis, Trial
from mhacli.commands.check.inputs import Examined, InputCase, max_error, plain
from mhacli.commands.check.recording import Run
from mhacli.commands.check.result import Behaviour
from mhacli.io.data import finite
from mhacli.usercode.build import cast_copy
from mhacli.usercode.graph import Graph, Watcher
from mhacli.usercode.sequences import StepConvention, causal_inputs, step_conventions

_FEWEST = 4
"""The shortest text that is read in steps."""
_LATER_CHUNK = "a later step of several tokens with the cache"


def examine_stepwise(examined: Examined, diagnosis: Diagnosis) -> None:
    """Reads a text after a prefill, token by token, and in longer steps, in each way until one gives what one call gives, and
    diagnoses the first that does not. Nothing if the subject takes no cache, if no way works, and if tokens see later ones."""
    attention, probed, form = examined.subject, examined.probed, diagnosis.mask_form
    if examined.module is not None:  # which no call has left anything in
        attention = attention.of(cast_copy(examined.module, attention.dtype, attention.device), attention.dtype)
    takes_causal = probed.visible == "full" and form is not None and {"query", "key"} <= set(form.axes)
    is_causal = takes_causal or (probed.influence is not None and not bool(probed.influence.triu(1).any()))
    length, mask = attention.sizes.q_len, form if takes_causal else None
    conventions = [*step_conventions(attention, mask)] if is_causal and length >= _FEWEST else []
    if attention.mode == "cross" or probed.is_random or not conventions:
        return
    rows = attention.drawer(examined.request.of.seed).rows(length).to(attention.dtype)
    whole = plain(replace(attention, is_forgetful=True)(causal_inputs(rows, 0, length, mask), mask=mask))
    tried = []
    for convention in conventions:
        cases = list(_cases(convention, rows))
        differing = [case for case in cases if max_error(case.output, whole) > case.tolerance]
        tried += [(convention, cases, differing)] if cases else []
        if cases and not differing:
            break
    if not tried:
        return
    convention, cases, differing = min(tried, key=lambda each: bool(each[2]))
    ok, reason = _judged(convention, cases, differing, diagnosis)
    largest = max(max_error(case.output, whole) for case in cases)
    diagnosis.passed = convention.names
    diagnosis.cache = Behaviour(name="cache", ok=ok, reason=f"{reason} ({convention.text})", largest=finite(largest))


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


def _is_chunked(case: InputCase) -> bool:
    """Whether a step after the first has several tokens."""
    return any(end - start > 1 for start, end in pairwise(case.rows.ends))


def _judged(
    convention: StepConvention, cases: Sequence[InputCase], differing: Sequence[InputCase], diagnosis: Diagnosis
) -> tuple[bool | None, str]:
    """Whether steps are right, and what they give. The mistake of those that differ from one call joins the diagnosis if it is
    known. If steps of one token do not differ, later ones of several tokens that are masked as torch masks a first call, or not
    understood, are left to the caller."""
    same, has_chunks = "token by token, after a prefill", any(map(_is_chunked, cases))
    if not differing:
        diagnosis.notes += [] if has_chunks else [f"not examined: {_LATER_CHUNK}, which raises an error"]
        return True, f"{same}{', in chunks' * has_chunks}: the same as in one call"
    takes_single_steps = _is_chunked(differing[0])
    judged = [case for case in cases if takes_single_steps or not _is_chunked(case)]
    watcher = Watcher(convention.attention.built.file)
    with suppress(Exception), watcher:  # the call cannot be recorded
        convention(differing[0].inputs.queries, differing[0].rows.ends)
    run = Run(Graph(differing[0].output, {}, watcher.operations), differing[0].rows)
    is_of_torch = any("is_causal" in operation.at.source for operation in run.operations)
    pool = [] if takes_single_steps and is_of_torch else [each for each in MISTAKES if each.shown_by == "steps"]
    is_named = diagnosis.candidate is not None and diagnosis.finds(Trial(diagnosis.candidate, judged, run, pool))
    if takes_single_steps and not is_named:
        diagnosis.notes.append(f"{_LATER_CHUNK} gives another output than one call: give one token at a time")
        return None, f"{same}: the same as in one call; later chunks differ"
    return False, f"{differing[0].name} give other outputs than one call"
