"""Probes of what moves which output: chance and earlier calls, other sequences, other tokens, their order, other heads."""

from __future__ import annotations

import inspect
import io
import re
import tokenize
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from mhacli.adapters.usercode.types import Built, Inputs, MaskForm
from mhacli.compute.check.probes.context import (
    ProbeContext,
    ProbeReply,
    Visible,
    bad_numbers,
    changes,
    first_line,
    probe_answer,
    relative,
    size_of,
)

_QUIET = 0.1
"""Rows of this size make small scores, hence shares that are nearly equal: every visible key shows."""


def determinism(context: ProbeContext) -> ProbeReply:
    """The same input twice, and again after another one, in eval mode."""
    name, inputs, other = "determinism", context.square(), context.square()
    first = context.ask(inputs, seed=None).out
    try:
        second = context.ask(inputs, seed=None).out
        context.ask(other, seed=None)
        third = context.ask(inputs, seed=None).out
    except Exception as fault:  # the first call went well
        message = f"the first call works, a later one with the same input raises {first_line(fault)}"
        return probe_answer(name, message, None, False, keeps_state=True, is_random=False)
    change = max(relative(first, second), relative(first, third))
    if change <= context.tolerance:
        message = "the same input gives the same output, also after another one"
        return probe_answer(name, message, change, True, is_random=False, keeps_state=False)
    one, two = (context.ask(inputs).out for _ in range(2))
    if not context.moves(one, two):
        message = (
            "the same input gives another output in eval mode, but the same one after torch.manual_seed: it is random"
        )
        return probe_answer(name, message, change, False, is_random=True, keeps_state=False)
    message = "the same input gives another output after other calls, with the same seed too: it keeps state"
    return probe_answer(name, message, change, False, is_random=False, keeps_state=True)


def finite_outputs(context: ProbeContext) -> ProbeReply:
    """Ordinary rows: no number may be NaN or infinite."""
    out = context.ask(context.square()).out
    bad = (~torch.isfinite(out)).movedim(-2, 0).flatten(1).any(1).nonzero().flatten().tolist()
    message = "every number of the output is finite"
    if bad:
        of = "query" if len(bad) == 1 else "queries"
        message = (
            f"{bad_numbers(out)} numbers of the output are NaN or infinite, those of {of} {', '.join(map(str, bad))}"
        )
    return probe_answer("finite", message, bad_numbers(out), not bad, nonfinite_queries=tuple(bad))


def batch_independence(context: ProbeContext) -> ProbeReply:
    """One sequence replaced: the others must not move."""
    name, inputs = "batch independence", context.square()
    if inputs.queries.shape[0] < 2:
        return probe_answer(name, "it takes one sequence at a time")
    base = context.ask(inputs).out
    fresh = context.square()
    changed = _first_replaced(inputs, fresh, 0)
    moved = context.moved_queries(base, context.ask(changed).out)[1:]
    n_moved, n_all = int(moved.any(1).sum()), len(moved)
    message = f"another first sequence changes {n_moved} of the {n_all} others"
    return probe_answer(name, message, n_moved, not n_moved)


def _first_replaced(inputs: Inputs, fresh: Inputs, axis: int) -> Inputs:
    """With the first sequence (axis 0), or the first head (axis 1), of other rows."""

    def first(rows: Tensor | None, by: Tensor | None) -> Tensor | None:
        if rows is None or by is None:
            return None
        return torch.cat([by.narrow(axis, 0, 1), rows.narrow(axis, 1, rows.shape[axis] - 1)], axis)

    return Inputs(*(first(rows, by) for rows, by in zip(inputs[:3], fresh[:3], strict=True)))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ visible keys


def visible_keys(context: ProbeContext) -> ProbeReply:
    """Each token replaced in turn, of as many keys as queries: which outputs move."""
    influenced, largest = influence(context, context.square)
    name = name_of(influenced)
    facts = {"influence": influenced, "visible": name, "largest_future": largest}
    return probe_answer("visible keys", _VISIBLE_TEXT[name], float(influenced.float().mean()), None, **facts)


_VISIBLE_TEXT: dict[Visible, str] = {
    "full": "every token sees every token",
    "causal": "every token sees itself and those before it",
    "without itself": "every token sees those before it, but not itself",
    "plus the next": "every token sees itself, those before it, and the next one",
    "transposed": "every token sees itself and those after it, none before",
    "top-left": "query i sees keys 0 to i",
    "bottom-right": "the last query sees all keys, each one before it one key less",
    "itself only": "every token sees itself alone",
    "other": "what a token sees is neither everything nor a triangle",
}


def visible_context(context: ProbeContext) -> ProbeReply:
    """Each key replaced in turn where their number is not that of the queries."""
    name, sizes = "q_len ≠ k_len", context.subject.sizes
    if not context.has_keys or sizes.k_len == sizes.q_len:
        return probe_answer(name, f"{context.name} attends to its own rows alone")
    influenced, _ = influence(context, context.oblong)
    kind = name_of(influenced)
    message = f"{sizes.q_len} queries, {sizes.k_len} keys: {_VISIBLE_TEXT[kind]}"
    return probe_answer(name, message, float(influenced.float().mean()), None, visible_cross=kind)


def influence(context: ProbeContext, draw: Any, mask: MaskForm | None = None, allowed: Tensor | None = None) -> tuple[
    Bool[Tensor, "query key"], float
]:  # fmt: skip
    """Which key moves which query, and the largest relative move by a later token.

    Among random rows; and among rows that are all the same, where a token cannot move its own output by its query, as all that
    it could choose from is the same: that tells what the diagonal is.
    """
    random, quiet = draw(), draw(factor=_QUIET)
    same = Inputs(*(None if rows is None else rows[..., :1, :].expand_as(rows).clone() for rows in quiet[:3]))  # type: ignore[arg-type]
    q_len = random.queries.shape[-2]
    k_len = q_len if random.keys is None else random.keys.shape[-2]
    influenced, largest = torch.zeros(q_len, k_len, dtype=torch.bool), 0.0
    for base, factor in ((random, 1.0), (same, _QUIET)):
        told_allowed = base._replace(allowed=allowed)
        before = context.ask(told_allowed, mask=mask).out
        for key in range(k_len):
            after = context.ask(context.replaced(told_allowed, [key], factor=factor), mask=mask).out
            moved = context.moved_queries(before, after).any(0)
            if base is random and base.keys is None:
                moved[key] = False  # it may have moved by its query alone
            influenced[:, key] |= moved.cpu()
            if base is random:
                change = changes(before, after).movedim(-2, 0).flatten(1).amax(1) / size_of(before)
                largest = max(largest, float(change[:key].max()) if key else 0.0)
    return influenced, largest


def name_of(influenced: Bool[Tensor, "query key"]) -> Visible:
    """What the visible keys are. A first query, or a last one, that would see no key at all may see anything."""
    q_len, k_len = influenced.shape
    ones = torch.ones_like(influenced)
    if bool(influenced.all()):
        return "full"
    square: dict[Visible, Tensor] = {"causal": ones.tril(), "plus the next": ones.tril(1), "transposed": ones.triu(),
                                     "itself only": ones.tril().triu()}  # fmt: skip
    oblong: dict[Visible, Tensor] = {"top-left": ones.tril(), "bottom-right": ones.tril(k_len - q_len)}
    for name, shape in (square if q_len == k_len else oblong).items():
        if torch.equal(influenced, shape):
            return name
    if q_len == k_len and torch.equal(influenced[1:], ones.tril(-1)[1:]):
        return "without itself"
    if q_len == k_len and torch.equal(influenced[:-1], ones.triu(1)[:-1]):
        return "transposed"
    return "other"


def causality(context: ProbeContext) -> ProbeReply:
    """How many later tokens move an earlier output."""
    name, influenced = "causality", context.facts.influence
    if influenced is None:
        return probe_answer(name, "which tokens are seen is not known")
    visible, length = context.facts.visible, len(influenced)
    if visible == "without itself":
        message = "no later token changes an earlier output, except the first, which sees none"
        return probe_answer(name, message, 0, True if context.expects_causal else None)
    n_later, n_pairs = int(influenced.triu(1).sum()), length * (length - 1) // 2
    message = f"in {n_later} of {n_pairs} pairs the later token changes the earlier output"
    message += f", by up to {context.facts.largest_future or 0.0:.0%}" if n_later else ""
    if visible in ("plus the next", "transposed"):
        return probe_answer(name, f"{message}: {_VISIBLE_TEXT[visible]}", n_later, False)
    if not context.expects_causal:
        return probe_answer(name, message, n_later)
    by_mask = _is_causal_by_mask(context) if n_later else None
    if by_mask:
        return probe_answer(
            name, f"{message}; with a causal mask given, none does", n_later, None, is_causal_by_mask=True
        )
    return probe_answer(name, message, n_later, not n_later, is_causal_by_mask=by_mask)


def _is_causal_by_mask(context: ProbeContext) -> bool | None:
    """Whether a causal mask in its argument makes it causal; None where it takes no such mask that works."""
    form = context.facts.mask
    if form is None or "query" not in form.axes:
        return None
    length = context.subject.sizes.q_len
    triangle = torch.ones(length, length, dtype=torch.bool, device=context.subject.device).tril()
    influenced, _ = influence(context, context.square, form, triangle[None, None])
    return not bool(influenced.triu(1).any())


def self_visibility(context: ProbeContext) -> ProbeReply:
    """How many tokens do not see themselves."""
    name, influenced = "self-visibility", context.facts.influence
    if influenced is None:
        return probe_answer(name, "which tokens are seen is not known")
    n_blind = int((~influenced.diagonal()).sum())
    message = f"{n_blind} of {len(influenced)} tokens do not see themselves"
    if not n_blind:
        return probe_answer(name, message, 0, True)
    documented = re.search(
        r"strict|exclud|without itself|not itself|not to itself", context.subject.built.documentation, re.I
    )
    is_off_by_one = context.facts.visible == "without itself" and not documented
    return probe_answer(name, message, n_blind, False if is_off_by_one else None)


# ------------------------------------------------------------------------------------------------------------------- order


def keys_permuted(context: ProbeContext) -> ProbeReply:
    """Keys and values in another order: a sum over keys does not mind, unless positions are part of the module."""
    name, facts = "keys permuted", context.facts
    if not context.has_keys:
        return probe_answer(name, "it attends to its own rows alone")
    if facts.visible_cross not in (None, "full") or facts.visible not in (None, "full"):
        return probe_answer(name, "not run: not every query sees every key")
    inputs = context.oblong() if context.subject.takes_context else context.square()
    assert inputs.keys is not None, "rows of their own"
    order = _order(inputs.keys.shape[-2])
    values = None if inputs.values is None else inputs.values[..., order, :]
    change = relative(
        context.ask(inputs).out,
        context.ask(inputs._replace(keys=inputs.keys[..., order, :], values=values)).out,
    )
    return _of_order(context, name, change, "keys in another order give the same output")


def tokens_permuted(context: ProbeContext) -> ProbeReply:
    """Own rows in another order: outputs come in that order."""
    name = "tokens permuted"
    if context.subject.is_function:
        return probe_answer(name, "the same question as for keys")
    if context.facts.visible not in (None, "full"):
        return probe_answer(name, "not run: not every token sees every token")
    inputs = context.square()
    order = _order(inputs.queries.shape[-2])
    before = context.ask(inputs).out
    after = context.ask(inputs._replace(queries=inputs.queries[..., order, :])).out
    return _of_order(
        context, name, relative(before[..., order, :], after), "tokens in another order give the same outputs"
    )


def _order(length: int) -> list[int]:
    """All places, none of them its own where there are two or more."""
    return [*range(1, length), 0] if length < 4 else [*range(2, length), 1, 0]


def _of_order(context: ProbeContext, name: str, change: float, message: str) -> ProbeReply:
    if change <= max(context.tolerance, 1e-6):
        return probe_answer(name, message, change, True)
    if context.facts.is_random:
        return probe_answer(name, "random outputs cannot be compared in another order", change)
    has_positions = speaks_of_positions(context.subject.built)
    if has_positions is not False:
        why = "its names mention positions" if has_positions else "it is not known whether it uses positions"
        return probe_answer(name, f"the order of keys matters: {why}", change)
    message = "the order of keys matters, although nothing in its code mentions positions"
    return probe_answer(name, message, change, False)


_POSITIONAL = {
    "rope", "rotary", "alibi", "position", "positions", "positional", "pos", "relative", "rel", "xpos", "sinusoid",
    "sinusoidal", "freq", "freqs", "cos", "sin", "distance", "distances", "slopes", "bucket", "buckets", "order",
}  # fmt: skip


def speaks_of_positions(built: Built) -> bool | None:
    """Whether a name in its source, or of its parameters, speaks of positions; None where there is no source to read."""
    named = [built.name, *built.arguments]
    if built.module is not None:
        named += [name for name, _ in (*built.module.named_parameters(), *built.module.named_buffers())]
        named += [type(part).__name__ for part in built.module.modules()]
    words = set().union(*map(_words_of, named))
    if words & _POSITIONAL:
        return True
    try:
        source = inspect.getsource(built.thing)
        tokens = list(tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return None
    return any(_words_of(token.string) & _POSITIONAL for token in tokens if token.type == tokenize.NAME)


def _words_of(name: str) -> set[str]:
    """`RotaryEmbedding.cos_cached` → rotary, embedding, cos, cached."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return {word for word in re.split(r"[^a-z]+", apart.lower()) if word}


# ------------------------------------------------------------------------------------------------------------------- heads


def heads(context: ProbeContext) -> ProbeReply:
    """Of a function: one head replaced, the others must not move. Of a module: how many heads its pattern has."""
    name, subject = "heads", context.subject
    if not subject.is_function:
        pattern = context.ask(context.square()).pattern
        if pattern is None:
            return probe_answer(name, "no pattern is returned, so heads cannot be counted")
        n_heads = pattern.shape[1]
        return probe_answer(name, f"the returned pattern has {n_heads} head{'s' * (n_heads != 1)}", n_heads)
    if subject.n_heads < 2:
        return probe_answer(name, "the function knows no heads")
    inputs, fresh = context.square(), context.square()
    before = context.ask(inputs).out
    changed = _first_replaced(inputs, fresh, 1)
    change = changes(before, context.ask(changed).out) / size_of(before)
    if change.ndim != 4 or change.shape[1] != subject.n_heads:
        return probe_answer(name, "the output has no axis of heads")
    n_moved = int((change[:, 1:].amax((0, 2, 3)) > context.tolerance).sum())
    message = f"another first head changes {n_moved} of the {subject.n_heads - 1} others"
    return probe_answer(name, message, n_moved, not n_moved)
