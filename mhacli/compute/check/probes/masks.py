"""Probes of the arguments that hide keys: does a mask hide what it says, in which meaning of True, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from mhacli.adapters.usercode.types import AttentionOutput, Inputs, MaskForm
from mhacli.compute.check.probes.context import (
    NOT_FINITE_ANYWAY,
    MaskTrial,
    ProbeContext,
    ProbeReply,
    bad_numbers,
    first_line,
    probe_answer,
    relative,
)
from mhacli.results.check import ProbeResult

_FORMS, _FORMS_WHEN_SLOW, _SLOW_S = 12, 2, 0.05


class MaskUse(NamedTuple):
    """A form of a mask, and whether it is asked to hide padding: the same keys from all queries."""

    form: MaskForm
    is_padding: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which what it hides differs."""
        return tuple(axis for axis in self.form.axes if not (self.is_padding and axis == "query"))


def working_mask(context: ProbeContext) -> MaskUse | None:
    """A form that works, of the mask where there is one, else of the padding."""
    if context.facts.mask is not None:
        return MaskUse(context.facts.mask, False)
    return None if context.facts.padding is None else MaskUse(context.facts.padding, True)


def mask_argument(context: ProbeContext) -> ProbeReply:
    """Each way to write a mask: what it hides must have no influence, what it leaves must have some."""
    forms = context.subject.mask_forms
    if not forms:
        return probe_answer("mask", "it takes no mask that could be tried")
    trials = _trials(context, [MaskUse(form, False) for form in forms])
    return _argument(context, "mask", trials)


def padding_argument(context: ProbeContext) -> ProbeReply:
    """Each way to tell padding: what padded tokens hold must not move the others."""
    forms = context.subject.padding_forms
    if not forms:
        return probe_answer("padding", "it takes no padding that could be tried")
    trials = _trials(context, [MaskUse(form, True) for form in forms])
    is_last = all(trial.form.kind == "lengths" and not trial.changes for trial in trials)
    if trials and is_last and context.facts.visible == "causal":
        return probe_answer("padding", "after the last token causality hides it already")
    return _argument(context, "padding", trials)


def _trials(context: ProbeContext, forms: Sequence[MaskUse]) -> tuple[MaskTrial, ...]:
    """What each form does, as far as it runs; those after one that works are left out."""
    is_slow = context.facts.call_s > _SLOW_S
    found = []
    for form in forms[: _FORMS_WHEN_SLOW if is_slow else _FORMS]:
        try:
            found.append(_trial(context, form))
            if found[-1].works and context.request.mask_means in (None, form.form.true_means):
                break
        except Exception:  # a form that some masks make it raise on is no form of it
            if len(forms) == 1:
                raise
    return tuple(found)


def _argument(context: ProbeContext, name: str, trials: tuple[MaskTrial, ...]) -> ProbeReply:
    """What the trials say of the argument."""
    facts: dict[str, object] = {"masks": trials} if name == "mask" else {}
    if not trials:
        return ProbeReply(ProbeResult(name, "every form that it takes raises for some mask"), facts)
    working = [trial.form for trial in trials if trial.works]
    parameters = ", ".join(dict.fromkeys(trial.form.parameter for trial in trials))
    change = max((trial.changes for trial in trials if math.isfinite(trial.changes)), default=0.0)
    if working:
        best = _preferred_form(working, context.request.mask_means)
        facts[name] = best
        is_other = best.kind in ("bool", "01", "whole") and context.request.mask_means not in (None, best.true_means)
        message = f"{parameters}: {form_text(best)}; what it hides changes nothing"
        if is_other:
            message = f"{parameters}: True means {best.true_means}, not {context.request.mask_means}"
        return ProbeReply(ProbeResult(name, message, 0.0, not is_other), facts)
    if all(trial.changes == 0 for trial in trials):
        return ProbeReply(ProbeResult(name, f"{parameters} changes nothing", 0.0, False), facts)
    least = min(trials, key=lambda trial: (trial.nonfinite > 0, trial.leaked))
    message = (
        f"{parameters} changes the output by {change:.0%}, but {least.leaked:.0%} of what it hides still changes it"
    )
    if least.nonfinite:
        message = f"{parameters} makes {least.nonfinite} numbers of the output NaN or infinite"
    return ProbeReply(ProbeResult(name, message, least.leaked, False), facts)


def _preferred_form(working: Sequence[MaskForm], means: str | None) -> MaskForm:
    """The first form that works, of the meaning that its author has where there is one."""
    return next((form for form in working if form.true_means == means), working[0])


def form_text(form: MaskForm) -> str:
    """A form in a few words: `bool [query, key], True = keep`."""
    kinds = {"bool": "bool", "01": "0 and 1", "whole": "whole 0 and 1", "additive": "0 and −∞", "lengths": "lengths"}
    said = f"{kinds[form.kind]} [{', '.join(form.axes)}]"
    one = "True" if form.kind == "bool" else "1"
    return said if form.kind in ("additive", "lengths") else f"{said}, {one} = {form.true_means}"


# ---------------------------------------------------------------------------------------------------------------- trials


def hidden_cells(context: ProbeContext, by: MaskUse, length: int) -> Bool[Tensor, "batch query key"]:
    """What a mask of this form hides, so that every query keeps a key that it sees: of other keys for neighbouring queries and
    sequences, as far as the form has axes for them. Key 0 is never hidden; of lengths it is the last ones."""
    batch = context.subject.sizes.batch
    b, i, j = (torch.arange(n) for n in (batch, length, length))
    if by.form.kind == "lengths":
        return (j[None, None, :] >= length - 1 - b[:, None, None] % 3).expand(batch, length, length)
    turn = torch.zeros(batch, length, 1, dtype=torch.long)
    turn = turn + (b[:, None, None] if "batch" in by.axes else 0) + (i[None, :, None] if "query" in by.axes else 0)
    return (j[None, None, :] % 3 == 1 + turn % 2) & (j > 0)


def _trial(context: ProbeContext, by: MaskUse) -> MaskTrial:
    """Asks four or five times: bare, masked, and masked with the contents of some keys replaced."""
    inputs = context.square()
    length = inputs.queries.shape[-2]
    hidden = hidden_cells(context, by, length)
    masked = under(context, inputs, by, ~hidden)
    bare = context.ask(inputs).out
    base = ask_under(context, masked, by).out
    n_hidden = n_leaked = n_visible = n_seen = 0
    for keys in _groups(by, length):
        after = ask_under(context, context.replaced(masked, keys), by).out
        moved = context.moved_queries(base, after).cpu()
        counted = torch.ones_like(moved)
        if inputs.keys is None:
            counted[:, keys] = False  # these moved by their own queries
        if _hides_tokens(context, by):
            counted &= ~hidden[:, 0]
        of_group = hidden[:, :, keys]
        must_not = of_group.all(2) & counted
        must = (~of_group & _bare(context, length)[None, :, keys]).any(2) & counted
        n_hidden, n_leaked = n_hidden + int(must_not.sum()), n_leaked + int((must_not & moved).sum())
        n_visible, n_seen = n_visible + int(must.sum()), n_seen + int((must & moved).sum())
    n_bad = max(0, bad_numbers(base) - bad_numbers(bare))
    rows = _counted_rows(context, by, hidden, bare)
    change = relative(bare[rows], base[rows])
    return MaskTrial(by.form, change if change > context.tolerance else 0.0, n_leaked / max(1, n_hidden),
                   n_seen / max(1, n_visible), n_bad)  # fmt: skip


def _groups(by: MaskUse, length: int) -> list[list[int]]:
    """Keys that are replaced together."""
    if by.form.kind == "lengths":
        return [[length - 1], [0]]
    return [list(range(first, length, 3)) for first in (1, 2)]


def _bare(context: ProbeContext, length: int) -> Bool[Tensor, "query key"]:
    """What it sees without a mask, as far as is known."""
    seen = context.facts.influence
    return seen if seen is not None and len(seen) == length else torch.ones(length, length, dtype=torch.bool)


def _hides_tokens(context: ProbeContext, by: MaskUse) -> bool:
    """Whether it hides tokens from all queries, their own included: what a padded one answers is then nobody's business."""
    return "query" not in by.axes and not context.subject.is_function


def _counted_rows(context: ProbeContext, by: MaskUse, hidden: Tensor, out: Tensor) -> Tensor:
    """The outputs of tokens that are no padding."""
    rows = torch.ones(out.shape, dtype=torch.bool)
    if _hides_tokens(context, by):
        rows &= ~hidden[:, 0, :, None]
    return rows.to(out.device)


def under(context: ProbeContext, inputs: Inputs, by: MaskUse, allowed: Bool[Tensor, "batch query key"]) -> Inputs:
    """The inputs with what a mask of this form is to say."""
    if by.is_padding:
        return inputs._replace(real=allowed[:, 0].to(context.subject.device))
    if "batch" not in by.axes:
        allowed = allowed[:1]
    return inputs._replace(allowed=allowed[:, None].to(context.subject.device))


def ask_under(
    context: ProbeContext, inputs: Inputs, by: MaskUse, allowed: Bool[Tensor, "batch query key"] | None = None
) -> AttentionOutput:
    """One call with the mask, or the padding, that the inputs speak of, or that is to say what is `allowed`."""
    inputs = inputs if allowed is None else under(context, inputs, by, allowed)
    return context.ask(inputs, padding=by.form) if by.is_padding else context.ask(inputs, mask=by.form)


# ------------------------------------------------------------------------------------------------------- with one that works


def open_mask(context: ProbeContext) -> ProbeReply:
    """A mask that allows everything must change nothing."""
    name, by, facts = "open mask", working_mask(context), context.facts
    if by is None:
        return probe_answer(name, _without_mask(context))
    inputs = context.square()
    length = inputs.queries.shape[-2]
    everything = torch.ones(context.subject.sizes.batch, length, length, dtype=torch.bool)
    change = relative(context.ask(inputs).out, ask_under(context, inputs, by, everything).out)
    is_same = change <= max(context.tolerance, 1e-6)
    message = f"a {'padding' if by.is_padding else 'mask'} that hides nothing changes nothing"
    if not is_same:
        message = f"a mask that hides nothing changes the output by {change:.2g} of its size"
    replaces = facts.visible not in (None, "full") or context.subject.causal_by is not None
    return probe_answer(name, message + (": it replaces the mask of its own" if replaces and not is_same else ""), change,
                is_same or (None if replaces else False))  # fmt: skip


def _without_mask(context: ProbeContext) -> str:
    """Why a question about masks is not asked."""
    takes_any = context.subject.mask_forms or context.subject.padding_forms
    return "not run: no mask that it takes hides anything" if takes_any else "not run: it takes no mask"


def empty_row(context: ProbeContext) -> ProbeReply:
    """A query that may see no key: what it answers, and whether the other queries mind."""
    name, by = "query without a key", working_mask(context)
    if by is None or "query" not in by.axes:
        return probe_answer(name, _without_mask(context))
    inputs = context.square()
    length = inputs.queries.shape[-2]
    allowed = torch.ones(context.subject.sizes.batch, length, length, dtype=torch.bool)
    open_out = ask_under(context, inputs, by, allowed).out
    lonely = length // 2
    allowed[:, lonely] = False
    found = ask_under(context, inputs, by, allowed).out
    others = [row for row in range(length) if row != lonely]
    spreads = bad_numbers(found[..., others, :]) > bad_numbers(open_out[..., others, :])
    kind = _kind_of(context, inputs, by, found[..., lonely, :], lonely)
    said = {"zeros": "gives zeros", "mean": "gives the mean of all values", "nan": "gives NaN",
            "constant": "gives a constant: no value reaches it", "other": "gives another value"}[kind]  # fmt: skip
    message = f"a query that may see no key {said}" + (", and other queries are NaN too" if spreads else "")
    n_bad = bad_numbers(found)
    return probe_answer(name, message, n_bad, False if spreads else None, empty_row=kind)


def _kind_of(context: ProbeContext, inputs: Inputs, by: MaskUse, answer: Tensor, lonely: int) -> str:
    """What stands in the row of a query that may see no key."""
    if bad_numbers(answer):
        return "nan"
    if not answer.any():
        return "zeros"
    length = inputs.queries.shape[-2]
    allowed = torch.ones(context.subject.sizes.batch, length, length, dtype=torch.bool)
    allowed[:, lonely] = False
    fresh = context.square()
    if inputs.keys is not None:
        fresh = fresh._replace(queries=inputs.queries)
    again = ask_under(context, fresh, by, allowed).out[..., lonely, :]
    if relative(answer, again) <= context.tolerance:
        return "constant"
    alone = torch.eye(length, dtype=torch.bool).expand(len(allowed), length, length)
    each = ask_under(context, inputs, by, alone).out
    return "mean" if relative(each.mean(-2), answer) < max(1e-4, 100 * context.tolerance) else "other"


def padding_of_nan(context: ProbeContext) -> ProbeReply:
    """NaN in what padding hides: 0 · NaN is NaN, so that most attentions let it through."""
    name, form = "padding of NaN", context.facts.padding
    if form is None:
        return probe_answer(name, "not run: it takes no padding")
    by = MaskUse(form, True)
    inputs = context.square()
    length = inputs.queries.shape[-2]
    hidden = hidden_cells(context, by, length)
    masked, padded = under(context, inputs, by, ~hidden), [length - 1] if form.kind == "lengths" else [1]
    real = ~hidden[:, 0, :] if inputs.keys is None else torch.ones(hidden.shape[0], length, dtype=torch.bool)
    pads_there = hidden[:, 0, padded].all(1)
    real &= pads_there[:, None]
    base = ask_under(context, masked, by).out
    n_moved = {}
    for content in (99.0, float("nan")):
        after = ask_under(context, context.replaced(masked, padded, by=content), by).out
        n_moved[content == 99.0] = int((context.moved_queries(base, after).cpu() & real).sum())
    n_real = int(real.sum())
    message = f"99 in a padded token changes {n_moved[True]} of {n_real} outputs, NaN changes {n_moved[False]}"
    message += " (0 · NaN is NaN: keep NaN out of padding)" if n_moved[False] and not n_moved[True] else ""
    return probe_answer(
        name, message, n_moved[False], True if not n_moved[False] else None if not n_moved[True] else False
    )


def large_scores(context: ProbeContext) -> ProbeReply:
    """Inputs √1000 times as large, hence scores × 1000: finite, and what is hidden stays hidden."""
    name, factor = "scores × 1000", 1000**0.5
    inputs = context.square(factor=factor)
    answer = context.ask(inputs)
    n_bad = bad_numbers(answer.out) + (0 if answer.pattern is None else bad_numbers(answer.pattern))
    if n_bad and context.facts.nonfinite_queries:
        return probe_answer(name, NOT_FINITE_ANYWAY, n_bad)
    if n_bad:
        message = f"{n_bad} numbers are NaN or infinite at scores × 1000: the softmax overflows"
        return probe_answer(name, message, n_bad, False)
    try:
        n_leaks = _leaks(context, inputs, answer.out, factor)
    except Exception as fault:
        return probe_answer(name, f"finite; with a mask it raises {first_line(fault)}", 0)
    if n_leaks:
        message = f"finite, but {n_leaks} outputs depend on what is hidden: the large number in the mask is too small"
        return probe_answer(name, message, n_leaks, False)
    hides = context.facts.mask or context.facts.padding or context.facts.visible == "causal"
    message = "finite, and what is hidden stays hidden" if hides else "finite"
    return probe_answer(name, message, 0, True)


def _leaks(context: ProbeContext, inputs: Inputs, bare: Tensor, factor: float) -> int:
    """How many outputs are moved by what is hidden from them, under a mask that works, and by causality."""
    length, n_leaks = inputs.queries.shape[-2], 0
    if context.facts.visible == "causal":
        for _ in range(2):
            moved = context.moved_queries(bare, context.ask(context.replaced(inputs, [length - 1], factor=factor)).out)
            n_leaks += int(moved[:, : length - 1].sum())
    by = working_mask(context)
    if by is None or by.form.kind == "additive":
        return n_leaks  # −∞ of ours hides whatever comes
    hidden = hidden_cells(context, by, length)
    masked = under(context, inputs, by, ~hidden)
    base = ask_under(context, masked, by).out
    for keys in _groups(by, length):
        after = ask_under(context, context.replaced(masked, keys, factor=factor), by).out
        must_not = hidden[:, :, keys].all(2)
        if inputs.keys is None:
            must_not[:, keys] = False
        n_leaks += int((context.moved_queries(base, after).cpu() & must_not).sum())
    return n_leaks
