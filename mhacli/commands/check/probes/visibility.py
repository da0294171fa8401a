"""Probes of influence: of chance and earlier calls, of other sequences, of other tokens and their order, of other heads."""

from __future__ import annotations

import inspect
import io
import re
import tokenize
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from mhacli.commands.check.probes.context import (
    ProbeContext,
    ProbeReply,
    Visible,
    bad_numbers,
    changes,
    first_line,
    relative,
    reply,
    size_of,
)
from mhacli.usercode.inputs import map_rows
from mhacli.usercode.types import Built, Inputs, MaskForm

_SMALL_SCALE = 0.1
"""The scale of inputs with small scores and nearly equal weights, so that every visible key has an influence."""


def determinism(context: ProbeContext) -> ProbeReply:
    """Whether the same input gives the same output in eval mode, at once and after another input."""
    name, inputs, other = "determinism", context.square(), context.square()
    first = context.call(inputs, seed=None).out
    try:
        second = context.call(inputs, seed=None).out
        context.call(other, seed=None)
        third = context.call(inputs, seed=None).out
    except Exception as fault:  # a later call fails
        message = f"the first call works, a later one with the same input raises {first_line(fault)}"
        return reply(name, message, None, False, keeps_state=True, is_random=False)
    change = max(relative(first, second), relative(first, third))
    if change <= context.tolerance:
        message = "the same input gives the same output, also after another one"
        return reply(name, message, change, True, is_random=False, keeps_state=False)
    first_seeded, second_seeded = (context.call(inputs).out for _ in range(2))
    if not context.moves(first_seeded, second_seeded):
        message = (
            "the same input gives another output in eval mode, but the same one after torch.manual_seed: it is random"
        )
        return reply(name, message, change, False, is_random=True, keeps_state=False)
    message = "the same input gives another output after other calls, with the same seed too: it keeps state"
    return reply(name, message, change, False, is_random=False, keeps_state=True)


def finite_outputs(context: ProbeContext) -> ProbeReply:
    """Whether ordinary inputs give finite outputs."""
    out = context.call(context.square()).out
    bad = (~torch.isfinite(out)).movedim(-2, 0).flatten(1).any(1).nonzero().flatten().tolist()
    message = "every number of the output is finite"
    if bad:
        noun = "query" if len(bad) == 1 else "queries"
        message = (
            f"{bad_numbers(out)} numbers of the output are NaN or infinite, those of {noun} {', '.join(map(str, bad))}"
        )
    return reply("finite", message, bad_numbers(out), not bad, nonfinite_queries=tuple(bad))


def batch_independence(context: ProbeContext) -> ProbeReply:
    """Whether replacing one sequence leaves the others unchanged."""
    name, inputs = "batch independence", context.square()
    if inputs.queries.shape[0] < 2:
        return reply(name, "it takes one sequence at a time")
    base = context.call(inputs).out
    fresh = context.square()
    changed = _first_replaced(inputs, fresh, 0)
    moved = context.moved_queries(base, context.call(changed).out)[1:]
    n_moved, n_all = int(moved.any(1).sum()), len(moved)
    message = f"another first sequence changes {n_moved} of the {n_all} others"
    return reply(name, message, n_moved, not n_moved)


def _first_replaced(inputs: Inputs, fresh: Inputs, axis: int) -> Inputs:
    """The inputs with the first sequence (axis 0) or the first head (axis 1) replaced."""

    def replace_first(rows: Tensor | None, replacement: Tensor | None) -> Tensor | None:
        if rows is None or replacement is None:
            return None
        return torch.cat([replacement.narrow(axis, 0, 1), rows.narrow(axis, 1, rows.shape[axis] - 1)], axis)

    return Inputs(*(replace_first(rows, replacement) for rows, replacement in zip(inputs[:3], fresh[:3], strict=True)))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ visible keys


def visible_keys(context: ProbeContext) -> ProbeReply:
    """Which tokens influence which outputs in self-attention, by replacing each token in turn."""
    influenced, largest = influence(context, context.square)
    name = pattern_of(influenced)
    facts = {"influence": influenced, "visible": name, "largest_future": largest}
    return reply("visible keys", _VISIBLE_TEXT[name], float(influenced.float().mean()), None, **facts)


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
    """Which keys of a context influence which outputs, by replacing each key in turn."""
    name, sizes = "q_len ≠ k_len", context.subject.sizes
    if not context.has_keys or sizes.k_len == sizes.q_len:
        return reply(name, f"{context.name} attends to its own rows alone")
    influenced, _ = influence(context, context.oblong)
    kind = pattern_of(influenced)
    message = f"{sizes.q_len} queries, {sizes.k_len} keys: {_VISIBLE_TEXT[kind]}"
    return reply(name, message, float(influenced.float().mean()), None, visible_cross=kind)


def influence(context: ProbeContext, make_inputs: Any, mask: MaskForm | None = None, allowed: Tensor | None = None) -> tuple[
    Bool[Tensor, "query key"], float
]:  # fmt: skip
    """Which key influences which query, and the largest relative change by a later token.

    Measured with random inputs, and with equal tokens for the diagonal: a token among equal ones cannot change its output
    through its query.
    """
    random, small = make_inputs(), make_inputs(factor=_SMALL_SCALE)
    equal_tokens = map_rows(small, lambda rows: rows[..., :1, :].expand_as(rows).clone())
    q_len = random.queries.shape[-2]
    k_len = q_len if random.keys is None else random.keys.shape[-2]
    influenced, largest = torch.zeros(q_len, k_len, dtype=torch.bool), 0.0
    for base, factor in ((random, 1.0), (equal_tokens, _SMALL_SCALE)):
        base_inputs = base._replace(allowed=allowed)
        before = context.call(base_inputs, mask=mask).out
        for key in range(k_len):
            after = context.call(context.replaced(base_inputs, [key], factor=factor), mask=mask).out
            moved = context.moved_queries(before, after).any(0)
            if base is random and base.keys is None:
                moved[key] = False  # the token may act through its query only
            influenced[:, key] |= moved.cpu()
            if base is random:
                change = changes(before, after).movedim(-2, 0).flatten(1).amax(1) / size_of(before)
                largest = max(largest, float(change[:key].max()) if key else 0.0)
    return influenced, largest


def pattern_of(influenced: Bool[Tensor, "query key"]) -> Visible:
    """The kind of visibility. A first or last query without any visible key counts as either way."""
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
    """The number of later tokens that influence earlier outputs."""
    name, influenced = "causality", context.facts.influence
    if influenced is None:
        return reply(name, "which tokens are seen is not known")
    visible, length = context.facts.visible, len(influenced)
    if visible == "without itself":
        message = "no later token changes an earlier output, except the first, which sees none"
        return reply(name, message, 0, True if context.expects_causal else None)
    n_later, n_pairs = int(influenced.triu(1).sum()), length * (length - 1) // 2
    message = f"in {n_later} of {n_pairs} pairs the later token changes the earlier output"
    message += f", by up to {context.facts.largest_future or 0.0:.0%}" if n_later else ""
    if visible in ("plus the next", "transposed"):
        return reply(name, f"{message}: {_VISIBLE_TEXT[visible]}", n_later, False)
    if not context.expects_causal:
        return reply(name, message, n_later)
    by_mask = _is_causal_by_mask(context) if n_later else None
    if by_mask:
        return reply(name, f"{message}; with a causal mask given, none does", n_later, None, is_causal_by_mask=True)
    return reply(name, message, n_later, not n_later, is_causal_by_mask=by_mask)


def _is_causal_by_mask(context: ProbeContext) -> bool | None:
    """Whether a causal mask makes it causal; None without a working mask."""
    form = context.facts.mask
    if form is None or "query" not in form.axes:
        return None
    length = context.subject.sizes.q_len
    triangle = torch.ones(length, length, dtype=torch.bool, device=context.subject.device).tril()
    influenced, _ = influence(context, context.square, form, triangle[None, None])
    return not bool(influenced.triu(1).any())


def self_visibility(context: ProbeContext) -> ProbeReply:
    """The number of tokens that do not see themselves."""
    name, influenced = "self-visibility", context.facts.influence
    if influenced is None:
        return reply(name, "which tokens are seen is not known")
    n_blind = int((~influenced.diagonal()).sum())
    message = f"{n_blind} of {len(influenced)} tokens do not see themselves"
    if not n_blind:
        return reply(name, message, 0, True)
    documented = re.search(
        r"strict|exclud|without itself|not itself|not to itself", context.subject.built.documentation, re.I
    )
    is_off_by_one = context.facts.visible == "without itself" and not documented
    return reply(name, message, n_blind, False if is_off_by_one else None)


# ------------------------------------------------------------------------------------------------------------------- order


def keys_permuted(context: ProbeContext) -> ProbeReply:
    """Whether the order of keys and values matters; it must not without positions."""
    name, facts = "keys permuted", context.facts
    if not context.has_keys:
        return reply(name, "it attends to its own rows alone")
    if facts.visible_cross not in (None, "full") or facts.visible not in (None, "full"):
        return reply(name, "not run: not every query sees every key")
    inputs = context.oblong() if context.subject.takes_context else context.square()
    assert inputs.keys is not None, "rows of their own"
    order = _order(inputs.keys.shape[-2])
    values = None if inputs.values is None else inputs.values[..., order, :]
    change = relative(
        context.call(inputs).out,
        context.call(inputs._replace(keys=inputs.keys[..., order, :], values=values)).out,
    )
    return _order_reply(context, name, change, "keys in another order give the same output")


def tokens_permuted(context: ProbeContext) -> ProbeReply:
    """Whether permuted tokens give outputs in the same permuted order."""
    name = "tokens permuted"
    if context.subject.is_function:
        return reply(name, "the same question as for keys")
    if context.facts.visible not in (None, "full"):
        return reply(name, "not run: not every token sees every token")
    inputs = context.square()
    order = _order(inputs.queries.shape[-2])
    before = context.call(inputs).out
    after = context.call(inputs._replace(queries=inputs.queries[..., order, :])).out
    return _order_reply(
        context, name, relative(before[..., order, :], after), "tokens in another order give the same outputs"
    )


def _order(length: int) -> list[int]:
    """A permutation of all positions, without fixed points if there are two or more."""
    return [*range(1, length), 0] if length < 4 else [*range(2, length), 1, 0]


def _order_reply(context: ProbeContext, name: str, change: float, message: str) -> ProbeReply:
    if change <= max(context.tolerance, 1e-6):
        return reply(name, message, change, True)
    if context.facts.is_random:
        return reply(name, "random outputs cannot be compared in another order", change)
    has_positions = mentions_positions(context.subject.built)
    if has_positions is not False:
        why = "its names mention positions" if has_positions else "it is not known whether it uses positions"
        return reply(name, f"the order of keys matters: {why}", change)
    message = "the order of keys matters, although nothing in its code mentions positions"
    return reply(name, message, change, False)


_POSITIONAL = {
    "rope", "rotary", "alibi", "position", "positions", "positional", "pos", "relative", "rel", "xpos", "sinusoid",
    "sinusoidal", "freq", "freqs", "cos", "sin", "distance", "distances", "slopes", "bucket", "buckets", "order",
}  # fmt: skip


def mentions_positions(built: Built) -> bool | None:
    """Whether names in its source or parameters mention positions; None without a source."""
    names = [built.name, *built.arguments]
    if built.module is not None:
        names += [name for name, _ in (*built.module.named_parameters(), *built.module.named_buffers())]
        names += [type(part).__name__ for part in built.module.modules()]
    words = set().union(*map(_words_of, names))
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
    separated = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return {word for word in re.split(r"[^a-z]+", separated.lower()) if word}


# ------------------------------------------------------------------------------------------------------------------- heads


def heads(context: ProbeContext) -> ProbeReply:
    """For a function, whether replacing one head leaves the others unchanged; for a module, the number of heads in its
    pattern."""
    name, subject = "heads", context.subject
    if not subject.is_function:
        pattern = context.call(context.square()).pattern
        if pattern is None:
            return reply(name, "no pattern is returned, so heads cannot be counted")
        n_heads = pattern.shape[1]
        return reply(name, f"the returned pattern has {n_heads} head{'s' * (n_heads != 1)}", n_heads)
    if subject.n_heads < 2:
        return reply(name, "the function knows no heads")
    inputs, fresh = context.square(), context.square()
    before = context.call(inputs).out
    changed = _first_replaced(inputs, fresh, 1)
    change = changes(before, context.call(changed).out) / size_of(before)
    if change.ndim != 4 or change.shape[1] != subject.n_heads:
        return reply(name, "the output has no axis of heads")
    n_moved = int((change[:, 1:].amax((0, 2, 3)) > context.tolerance).sum())
    message = f"another first head changes {n_moved} of the {subject.n_heads - 1} others"
    return reply(name, message, n_moved, not n_moved)
