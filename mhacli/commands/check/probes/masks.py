"""Probes of mask arguments: whether a mask hides exactly the intended keys, and the meaning of True."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from mhacli.commands.check.probes.context import (
    NOT_FINITE_ANYWAY,
    MaskTrial,
    ProbeContext,
    ProbeReply,
    bad_numbers,
    first_line,
    relative,
    reply,
)
from mhacli.commands.check.result import ProbeResult
from mhacli.usercode.types import AttentionOutput, Inputs, MaskForm

_FORMS, _FORMS_WHEN_SLOW, _SLOW_S = 12, 2, 0.05


class MaskUse(NamedTuple):
    """A mask form, and whether it hides padding, which is the same for all queries."""

    form: MaskForm
    is_padding: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which the hidden keys may vary."""
        return tuple(axis for axis in self.form.axes if not (self.is_padding and axis == "query"))


def working_mask(context: ProbeContext) -> MaskUse | None:
    """A working form, of the mask if possible, else of the padding."""
    if context.facts.mask is not None:
        return MaskUse(context.facts.mask, False)
    return None if context.facts.padding is None else MaskUse(context.facts.padding, True)


def mask_argument(context: ProbeContext) -> ProbeReply:
    """Whether a mask in each form removes the influence of hidden keys and keeps that of visible ones."""
    forms = context.subject.mask_forms
    if not forms:
        return reply("mask", "it takes no mask that could be tried")
    trials = _trials(context, [MaskUse(form, False) for form in forms])
    return _argument(context, "mask", trials)


def padding_argument(context: ProbeContext) -> ProbeReply:
    """Whether padding in each form removes the influence of padded tokens."""
    forms = context.subject.padding_forms
    if not forms:
        return reply("padding", "it takes no padding that could be tried")
    trials = _trials(context, [MaskUse(form, True) for form in forms])
    is_last = all(trial.form.kind == "lengths" and not trial.changes for trial in trials)
    if trials and is_last and context.facts.visible == "causal":
        return reply("padding", "after the last token causality hides it already")
    return _argument(context, "padding", trials)


def _trials(context: ProbeContext, forms: Sequence[MaskUse]) -> tuple[MaskTrial, ...]:
    """The results for each form that runs, up to the first that works."""
    is_slow = context.facts.call_s > _SLOW_S
    trials = []
    for form in forms[: _FORMS_WHEN_SLOW if is_slow else _FORMS]:
        try:
            trials.append(_trial(context, form))
            if trials[-1].works and context.request.mask_means in (None, form.form.true_means):
                break
        except Exception:  # a form that fails for some masks does not count
            if len(forms) == 1:
                raise
    return tuple(trials)


def _argument(context: ProbeContext, name: str, trials: tuple[MaskTrial, ...]) -> ProbeReply:
    """The reply for a mask argument, from its trials."""
    facts: dict[str, object] = {"masks": trials} if name == "mask" else {}
    if not trials:
        return ProbeReply(ProbeResult(name, "every form that it takes raises for some mask"), facts)
    working = [trial.form for trial in trials if trial.works]
    parameters = ", ".join(dict.fromkeys(trial.form.parameter for trial in trials))
    change = max((trial.changes for trial in trials if math.isfinite(trial.changes)), default=0.0)
    if working:
        means = context.request.mask_means
        best = next((form for form in working if form.true_means == means), working[0])
        facts[name] = best
        has_other_meaning = best.kind in ("bool", "01", "whole") and means not in (None, best.true_means)
        message = f"{parameters}: {form_text(best)}; what it hides changes nothing"
        if has_other_meaning:
            message = f"{parameters}: True means {best.true_means}, not {means}"
        return ProbeReply(ProbeResult(name, message, 0.0, not has_other_meaning), facts)
    if all(trial.changes == 0 for trial in trials):
        return ProbeReply(ProbeResult(name, f"{parameters} changes nothing", 0.0, False), facts)
    least = min(trials, key=lambda trial: (trial.nonfinite > 0, trial.leaked))
    message = (
        f"{parameters} changes the output by {change:.0%}, but {least.leaked:.0%} of what it hides still changes it"
    )
    if least.nonfinite:
        message = f"{parameters} makes {least.nonfinite} numbers of the output NaN or infinite"
    return ProbeReply(ProbeResult(name, message, least.leaked, False), facts)


def form_text(form: MaskForm) -> str:
    """A form as text: `bool [query, key], True = keep`."""
    kinds = {"bool": "bool", "01": "0 and 1", "whole": "whole 0 and 1", "additive": "0 and −∞", "lengths": "lengths"}
    text = f"{kinds[form.kind]} [{', '.join(form.axes)}]"
    marker = "True" if form.kind == "bool" else "1"
    return text if form.kind in ("additive", "lengths") else f"{text}, {marker} = {form.true_means}"


# ---------------------------------------------------------------------------------------------------------------- trials


def hidden_cells(context: ProbeContext, use: MaskUse, length: int) -> Bool[Tensor, "batch query key"]:
    """The hidden cells for a mask of this form. Every query keeps a visible key; neighbouring queries and sequences hide
    different keys if the form has axes for them. Key 0 is never hidden; lengths hide the last keys."""
    batch = context.subject.sizes.batch
    b, i, j = (torch.arange(n) for n in (batch, length, length))
    if use.form.kind == "lengths":
        return (j[None, None, :] >= length - 1 - b[:, None, None] % 3).expand(batch, length, length)
    offset = torch.zeros(batch, length, 1, dtype=torch.long)
    offset = (
        offset + (b[:, None, None] if "batch" in use.axes else 0) + (i[None, :, None] if "query" in use.axes else 0)
    )
    return (j[None, None, :] % 3 == 1 + offset % 2) & (j > 0)


def _trial(context: ProbeContext, use: MaskUse) -> MaskTrial:
    """Four or five calls: without a mask, with the mask, and with some keys replaced."""
    inputs = context.square()
    length = inputs.queries.shape[-2]
    hidden = hidden_cells(context, use, length)
    masked = with_mask(context, inputs, use, ~hidden)
    bare = context.call(inputs).out
    base = call_with_mask(context, masked, use).out
    n_hidden = n_leaked = n_visible = n_seen = 0
    for keys in _groups(use, length):
        after = call_with_mask(context, context.replaced(masked, keys), use).out
        moved = context.moved_queries(base, after).cpu()
        counted = torch.ones_like(moved)
        if inputs.keys is None:
            counted[:, keys] = False  # moved by their own queries
        if _hides_tokens(context, use):
            counted &= ~hidden[:, 0]
        hidden_in_group = hidden[:, :, keys]
        must_stay = hidden_in_group.all(2) & counted
        must_move = (~hidden_in_group & _visible_without_mask(context, length)[None, :, keys]).any(2) & counted
        n_hidden, n_leaked = n_hidden + int(must_stay.sum()), n_leaked + int((must_stay & moved).sum())
        n_visible, n_seen = n_visible + int(must_move.sum()), n_seen + int((must_move & moved).sum())
    n_bad = max(0, bad_numbers(base) - bad_numbers(bare))
    rows = _counted_rows(context, use, hidden, bare)
    change = relative(bare[rows], base[rows])
    return MaskTrial(use.form, change if change > context.tolerance else 0.0, n_leaked / max(1, n_hidden),
                   n_seen / max(1, n_visible), n_bad)  # fmt: skip


def _groups(use: MaskUse, length: int) -> list[list[int]]:
    if use.form.kind == "lengths":
        return [[length - 1], [0]]
    return [list(range(first, length, 3)) for first in (1, 2)]


def _visible_without_mask(context: ProbeContext, length: int) -> Bool[Tensor, "query key"]:
    """The cells visible without a mask, as far as known."""
    influence = context.facts.influence
    return (
        influence
        if influence is not None and len(influence) == length
        else torch.ones(length, length, dtype=torch.bool)
    )


def _hides_tokens(context: ProbeContext, use: MaskUse) -> bool:
    """Whether hidden keys are padded tokens, whose own outputs are undefined."""
    return "query" not in use.axes and not context.subject.is_function


def _counted_rows(context: ProbeContext, use: MaskUse, hidden: Tensor, out: Tensor) -> Tensor:
    """The outputs of real tokens, as a mask."""
    rows = torch.ones(out.shape, dtype=torch.bool)
    if _hides_tokens(context, use):
        rows &= ~hidden[:, 0, :, None]
    return rows.to(out.device)


def with_mask(context: ProbeContext, inputs: Inputs, use: MaskUse, allowed: Bool[Tensor, "batch query key"]) -> Inputs:
    """The inputs with a mask of this form."""
    if use.is_padding:
        return inputs._replace(real=allowed[:, 0].to(context.subject.device))
    if "batch" not in use.axes:
        allowed = allowed[:1]
    return inputs._replace(allowed=allowed[:, None].to(context.subject.device))


def call_with_mask(
    context: ProbeContext, inputs: Inputs, use: MaskUse, allowed: Bool[Tensor, "batch query key"] | None = None
) -> AttentionOutput:
    """One call with the inputs' mask or padding, or with `allowed`."""
    inputs = inputs if allowed is None else with_mask(context, inputs, use, allowed)
    return context.call(inputs, padding=use.form) if use.is_padding else context.call(inputs, mask=use.form)


# ------------------------------------------------------------------------------------------------------------ working masks


def open_mask(context: ProbeContext) -> ProbeReply:
    """Whether a mask that hides nothing changes nothing."""
    name, use, facts = "open mask", working_mask(context), context.facts
    if use is None:
        return reply(name, _why_not_run(context))
    inputs = context.square()
    length = inputs.queries.shape[-2]
    allowed = torch.ones(context.subject.sizes.batch, length, length, dtype=torch.bool)
    change = relative(context.call(inputs).out, call_with_mask(context, inputs, use, allowed).out)
    is_same = change <= max(context.tolerance, 1e-6)
    message = f"a {'padding' if use.is_padding else 'mask'} that hides nothing changes nothing"
    if not is_same:
        message = f"a mask that hides nothing changes the output by {change:.2g} of its size"
    replaces = facts.visible not in (None, "full") or context.subject.causal_by is not None
    return reply(name, message + (": it replaces the mask of its own" if replaces and not is_same else ""), change,
                is_same or (None if replaces else False))  # fmt: skip


def _why_not_run(context: ProbeContext) -> str:
    takes_any = context.subject.mask_forms or context.subject.padding_forms
    return "not run: no mask that it takes hides anything" if takes_any else "not run: it takes no mask"


def empty_row(context: ProbeContext) -> ProbeReply:
    """The output of a query without visible keys, and whether it affects other queries."""
    name, use = "query without a key", working_mask(context)
    if use is None or "query" not in use.axes:
        return reply(name, _why_not_run(context))
    inputs = context.square()
    length = inputs.queries.shape[-2]
    allowed = torch.ones(context.subject.sizes.batch, length, length, dtype=torch.bool)
    open_out = call_with_mask(context, inputs, use, allowed).out
    empty_query = length // 2
    allowed[:, empty_query] = False
    out = call_with_mask(context, inputs, use, allowed).out
    others = [other for other in range(length) if other != empty_query]
    spreads = bad_numbers(out[..., others, :]) > bad_numbers(open_out[..., others, :])
    kind = _kind_of(context, inputs, use, out[..., empty_query, :], empty_query)
    result = {"zeros": "gives zeros", "mean": "gives the mean of all values", "nan": "gives NaN",
            "constant": "gives a constant: no value reaches it", "other": "gives another value"}[kind]  # fmt: skip
    message = f"a query that may see no key {result}" + (", and other queries are NaN too" if spreads else "")
    n_bad = bad_numbers(out)
    return reply(name, message, n_bad, False if spreads else None, empty_row=kind)


def _kind_of(context: ProbeContext, inputs: Inputs, use: MaskUse, out: Tensor, empty_query: int) -> str:
    """The kind of output for a query without visible keys."""
    if bad_numbers(out):
        return "nan"
    if not out.any():
        return "zeros"
    length = inputs.queries.shape[-2]
    allowed = torch.ones(context.subject.sizes.batch, length, length, dtype=torch.bool)
    allowed[:, empty_query] = False
    fresh = context.square()
    if inputs.keys is not None:
        fresh = fresh._replace(queries=inputs.queries)
    other_out = call_with_mask(context, fresh, use, allowed).out[..., empty_query, :]
    if relative(out, other_out) <= context.tolerance:
        return "constant"
    own_keys = torch.eye(length, dtype=torch.bool).expand(len(allowed), length, length)
    single_keys = call_with_mask(context, inputs, use, own_keys).out
    return "mean" if relative(single_keys.mean(-2), out) < max(1e-4, 100 * context.tolerance) else "other"


def padding_of_nan(context: ProbeContext) -> ProbeReply:
    """Whether NaN in padding reaches the output. 0 · NaN is NaN, so most attentions let it through."""
    name, form = "padding of NaN", context.facts.padding
    if form is None:
        return reply(name, "not run: it takes no padding")
    use = MaskUse(form, True)
    inputs = context.square()
    length = inputs.queries.shape[-2]
    hidden = hidden_cells(context, use, length)
    masked, padded = with_mask(context, inputs, use, ~hidden), [length - 1] if form.kind == "lengths" else [1]
    real = ~hidden[:, 0, :] if inputs.keys is None else torch.ones(hidden.shape[0], length, dtype=torch.bool)
    is_padded = hidden[:, 0, padded].all(1)
    real &= is_padded[:, None]
    base = call_with_mask(context, masked, use).out
    n_moved = {}
    for content in (99.0, float("nan")):
        after = call_with_mask(context, context.replaced(masked, padded, by=content), use).out
        n_moved[content == 99.0] = int((context.moved_queries(base, after).cpu() & real).sum())
    n_real = int(real.sum())
    message = f"99 in a padded token changes {n_moved[True]} of {n_real} outputs, NaN changes {n_moved[False]}"
    message += " (0 · NaN is NaN: keep NaN out of padding)" if n_moved[False] and not n_moved[True] else ""
    return reply(name, message, n_moved[False], True if not n_moved[False] else None if not n_moved[True] else False)


def large_scores(context: ProbeContext) -> ProbeReply:
    """Whether scores × 1000, from inputs × √1000, stay finite, and hidden keys stay hidden."""
    name, factor = "scores × 1000", 1000**0.5
    inputs = context.square(factor=factor)
    output = context.call(inputs)
    n_bad = bad_numbers(output.out) + (0 if output.pattern is None else bad_numbers(output.pattern))
    if n_bad and context.facts.nonfinite_queries:
        return reply(name, NOT_FINITE_ANYWAY, n_bad)
    if n_bad:
        message = f"{n_bad} numbers are NaN or infinite at scores × 1000: the softmax overflows"
        return reply(name, message, n_bad, False)
    try:
        n_leaks = _leaks(context, inputs, output.out, factor)
    except Exception as fault:
        return reply(name, f"finite; with a mask it raises {first_line(fault)}", 0)
    if n_leaks:
        message = f"finite, but {n_leaks} outputs depend on what is hidden: the large number in the mask is too small"
        return reply(name, message, n_leaks, False)
    hides_keys = context.facts.mask or context.facts.padding or context.facts.visible == "causal"
    message = "finite, and what is hidden stays hidden" if hides_keys else "finite"
    return reply(name, message, 0, True)


def _leaks(context: ProbeContext, inputs: Inputs, bare: Tensor, factor: float) -> int:
    """The number of outputs that hidden keys influence, through a working mask and through causality."""
    length, n_leaks = inputs.queries.shape[-2], 0
    if context.facts.visible == "causal":
        for _ in range(2):
            moved = context.moved_queries(bare, context.call(context.replaced(inputs, [length - 1], factor=factor)).out)
            n_leaks += int(moved[:, : length - 1].sum())
    use = working_mask(context)
    if use is None or use.form.kind == "additive":
        return n_leaks  # an additive mask of mha contains −∞ itself
    hidden = hidden_cells(context, use, length)
    masked = with_mask(context, inputs, use, ~hidden)
    base = call_with_mask(context, masked, use).out
    for keys in _groups(use, length):
        after = call_with_mask(context, context.replaced(masked, keys, factor=factor), use).out
        must_stay = hidden[:, :, keys].all(2)
        if inputs.keys is None:
            must_stay[:, keys] = False
        n_leaks += int((context.moved_queries(base, after).cpu() & must_stay).sum())
    return n_leaks
