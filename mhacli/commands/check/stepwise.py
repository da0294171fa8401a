"""Calls a user's attention step by step with its cache, compares with one call, and names the mistake that makes a difference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.attention.mistakes.caching import CACHE_MISTAKES, UNMASKED, CacheMistake, decoded
from mhacli.attention.mistakes.stages import stages_with
from mhacli.commands.check.behaviour import failure_of
from mhacli.commands.check.diagnose import Diagnosis
from mhacli.commands.check.findings import finding_of
from mhacli.commands.check.inputs import TOLERANCE, Examined, max_error, plain
from mhacli.commands.check.result import Finding, ProbeResult
from mhacli.usercode.build import cast_copy
from mhacli.usercode.graph import Watcher
from mhacli.usercode.process import SourceLine
from mhacli.usercode.sequences import StepConvention, causal_inputs, step_conventions

_FEWEST = 4
"""The shortest text that is read in steps."""
Runs = Mapping[tuple[int, ...], Tensor]
"""The outputs `[batch, length, d_out]` of a text that is read in steps, by where the steps end."""


class Stepwise(NamedTuple):
    """The result: findings, the probe of the cache, the `names` of the arguments passed, and notes for callers that are no
    mistakes."""

    findings: tuple[Finding, ...] = ()
    probes: tuple[ProbeResult, ...] = ()
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------ the comparison


def examine_stepwise(examined: Examined, diagnosis: Diagnosis) -> Stepwise:
    """Reads a text after a prefill, token by token, and in longer steps, in each way until one gives what one call gives. Empty
    if the subject takes no cache, if no way works, and if tokens see later ones."""
    attention, probed, form = examined.subject, examined.probed, diagnosis.mask_form
    if examined.module is not None:  # which no call has left anything in
        attention = attention.of(cast_copy(examined.module, attention.dtype, attention.device), attention.dtype)
    takes_causal = probed.visible == "full" and form is not None and {"query", "key"} <= set(form.axes)
    is_causal = takes_causal or (probed.influence is not None and not bool(probed.influence.triu(1).any()))
    length = attention.sizes.q_len
    if attention.mode == "cross" or probed.is_random or length < _FEWEST or not is_causal:
        return Stepwise()
    mask = form if takes_causal else None
    rows = attention.drawer(examined.request.of.seed).rows(length).to(attention.dtype)
    failing: Stepwise | None = None
    for convention in step_conventions(attention, mask):
        inputs = causal_inputs(rows, 0, length, mask)
        whole = plain(replace(attention, is_forgetful=True)(inputs, mask=mask))
        runs = _runs_of(convention, rows)
        largest = max((max_error(out, whole) for out in runs.values()), default=0.0)
        if runs and largest <= _tolerance(whole):
            has_chunks = any(map(_is_chunked, runs))
            kinds = "token by token, after a prefill" + (", in chunks" if has_chunks else "")
            probe = ProbeResult("cache", f"{kinds}: the same as in one call ({convention.text})", largest, True)
            notes = () if has_chunks else (f"not examined: {_LATER_CHUNK}, which raises an error",)
            return Stepwise(probes=(probe,), names=convention.names, notes=notes)
        if runs and failing is None:
            failing = _failing(convention, runs, rows, whole, diagnosis)
    return failing or Stepwise()


def _tolerance(whole: Tensor) -> float:
    """The largest difference that counts as rounding."""
    return max(float(whole.abs().nan_to_num().max()), 1e-30) * TOLERANCE


def _runs_of(convention: StepConvention, rows: Tensor) -> Runs:
    """The runs of a prefill with single steps, of single tokens, and of longer steps where they are accepted; empty if the first
    raises, or if what is read later does not depend on what was read first."""
    length = rows.shape[1]
    start = length - 2
    changed = torch.cat([rows[:, :start].flip(-1) + 0.5, rows[:, start:]], dim=1)
    runs: dict[tuple[int, ...], Tensor] = {}
    for ends in (
        (start, length - 1, length),
        tuple(range(1, length + 1)),
        (length - 3, length - 1, length),
        (2, length),
    ):
        with suppress(Exception):  # not every attention accepts longer steps, or a first step of one token
            out = convention(rows, ends)
            if not runs and max_error(out[:, start:], convention(changed, ends)[:, start:]) <= 1e-9:
                return {}
            runs[ends] = out
    return runs


def _is_chunked(ends: tuple[int, ...]) -> bool:
    """Whether a step after the first has several tokens."""
    return any(end - start > 1 for start, end in pairwise(ends))


_LATER_CHUNK = "a later step of several tokens with the cache"


def _failing(convention: StepConvention, runs: Runs, rows: Tensor, whole: Tensor, diagnosis: Diagnosis) -> Stepwise:
    """The mistake of steps that differ from one call. Where steps of one token do not, later ones of several tokens that are not
    masked, or masked as torch masks a first call, are left to the caller."""
    tolerance = _tolerance(whole)
    errors = {ends: max_error(out, whole) for ends, out in runs.items()}
    wrong, largest = next(ends for ends, error in errors.items() if error > tolerance), max(errors.values())
    takes_single_steps = _is_chunked(wrong)
    judged = {ends: out for ends, out in runs.items() if takes_single_steps or not _is_chunked(ends)}
    mistake, error = _explanation(judged, rows, diagnosis, tolerance)
    file = convention.attention.built.file
    line = SourceLine(file) if mistake is None else _line(convention, rows, wrong, mistake.code)
    if takes_single_steps and (mistake in (None, UNMASKED) or "is_causal" in line.source):
        text = f"token by token, after a prefill: the same as in one call ({convention.text}); later chunks differ"
        problem = "is masked as if it came first"
        if mistake in (None, UNMASKED):
            problem = "gives another output than one call" if mistake is None else "is not causal"
        note = f"{_LATER_CHUNK} {problem}: give one token at a time"
        return Stepwise(probes=(ProbeResult("cache", text, largest),), names=convention.names, notes=(note,))
    evidence = _evidence(convention, wrong, runs[wrong], whole)
    if mistake is None:
        message = "tokens that are read behind a cache give other outputs than in one call"
        finding = replace(failure_of("cache", message, evidence), file=file)
    else:
        match = f"largest difference {error:.2g}, tolerance {tolerance:.2g}"
        evidence = f"matches exactly if {mistake.description}: {match}\n{evidence}"
        finding = finding_of(mistake.code, evidence, line, proven=True, error=error, tolerance=tolerance)
    text = f"steps give other outputs than one call ({convention.text})"
    return Stepwise((finding,), (ProbeResult("cache", text, largest, False),), convention.names)


def _explanation(runs: Runs, rows: Tensor, diagnosis: Diagnosis, tolerance: float) -> tuple[CacheMistake | None, float]:
    """The first mistake with which the diagnosed layer gives the outputs of all runs, with the largest difference."""
    layer = None if diagnosis.candidate is None else diagnosis.candidate.layer
    if layer is None or layer.weights is None or layer.bias is not None:
        return None, 0.0
    stages, x = stages_with(diagnosis.mistakes), rows.to("cpu", torch.float64)
    for mistake in CACHE_MISTAKES:
        with torch.no_grad(), suppress(Exception):  # it does not fit the steps
            error = max(max_error(decoded(layer, stages, x, ends, mistake), out) for ends, out in runs.items())
            if error <= tolerance:
                return mistake, error
    return None, 0.0


def _evidence(convention: StepConvention, ends: tuple[int, ...], out: Tensor, whole: Tensor) -> str:
    """The first step that differs, in words."""
    for start, end in pairwise((0, *ends)):
        error = max_error(out[:, start:end], whole[:, start:end])
        if error > _tolerance(whole):
            break
    largest = float(whole[:, start:end].abs().max())
    off = f"after {start} tokens a step of {end - start} is {error:.3g} off ({convention.text})"
    return f"{off}, in an output whose largest number is {largest:.3g}"


_LINES: Mapping[str, tuple[str, str]] = {
    "cache-position": (
        "getitem arange index_select narrow embedding mul cos sin",
        r"(?i)freqs|rope|rota|\bcos|\bsin|pos|offset|angle|arange|start",
    ),
    "cache-order": (
        "cat setitem copy_ index_copy_ slice_scatter stack getitem narrow",
        r"(?i)cache|past|prev|mem|kept|state|update|\bbuf|\bkeys?\b|\bvalues?\b",
    ),
    "cache-mask": ("tril triu masked_fill masked_fill_ where scaled_dot_product_attention softmax", ""),
}
"""What finds the line of a mistake: the first of these operations whose line matches a pattern."""


def _line(convention: StepConvention, rows: Tensor, ends: tuple[int, ...], code: str) -> SourceLine:
    """The line of a mistake: the positions, the update of the cache, or the mask; only the file if it is not found."""
    names, pattern = _LINES[code]
    watcher = Watcher(convention.attention.built.file)
    with suppress(Exception), watcher:  # the call cannot be recorded
        convention(rows, ends)
    for name in names.split():
        for operation in watcher.operations:
            if operation.name == name and operation.at.line is not None and re.search(pattern, operation.at.source):
                return operation.at
    return SourceLine(convention.attention.built.file)
