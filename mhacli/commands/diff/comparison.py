"""Compares what two models compute, place by place in the order of execution."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace as changed
from torch import Tensor

from mhacli.attention.core import dtype_name
from mhacli.errors import MhaError, first_names
from mhacli.io.data import finite
from mhacli.models.capture import Call

from .computed import OUTPUTS, Computed, eps_of
from .gaps import Deviation, Relative, gaps_at
from .places import OF_CALLS, ModelPlace
from .result import Difference, ModelDocument, Unmatched

TIMES_ROUNDING = 8
"""A difference counts beyond this multiple of the rounding of its place."""


def compare(a: Computed, b: Computed) -> ModelDocument:
    """The differences of `b` from `a`, with the rounding of the one with the coarser dtype, of
    equals that of `a`. Places of other shapes are unmatched. Raises `MhaError` if no place can be
    compared.
    """
    coarser = max((a, b), key=lambda side: eps_of(side.dtype))
    coarser.measure_rounding()
    known = {place.key: rounding for place, rounding in coarser.rounding.items()}
    # numbers of 64 bits are held to 32
    least = max(eps_of(coarser.dtype), eps_of(torch.float32))
    rows, unmatched = list[Difference](), list[Unmatched]()
    has_all_tokens = True
    notes = [*_notes(a, b)]
    for pair in _pairs(a, b):
        if pair.a is None or pair.b is None:
            unmatched.append(_unmatched(pair, f"only {'B' if pair.a is None else 'A'} has it"))
            continue
        x, y = a.value(pair.a), b.value(pair.b)
        gaps = {} if _only_one_has_head(pair.a, pair.b, x, y) else gaps_at(pair.a, x, y)
        if pair.a.site == "logits":
            has_all_tokens = x.shape[:-1] == y.shape[:-1]
            if gaps and x.shape != y.shape:
                sizes = f"{list(x.shape)} in A and {list(y.shape)} in B"
                notes.append(f"of the logits, {sizes}, only what both have is compared")
        if not gaps:
            why = f"shapes {list(x.shape)} and {list(y.shape)}"
            unmatched.append(_unmatched(pair, why))
        for site, gap in gaps.items():
            place = changed(pair.a, site=site)
            rows.append(_row(place, pair.b.name, gap, known.get(place.key), least))
    if not rows:
        reasons = [f"{place.part} {place.site}: {place.why}" for place in unmatched[:4]]
        words = "; ".join(reasons) or "neither has any"
        message = f"the two models have no place that could be compared: {words}"
        raise MhaError(message, code="cannot-compare")
    rows = [*_with_kinds_of_heads(rows)]
    if b.kind not in (a.kind, OUTPUTS):  # each output was said to be the same
        is_coarse = least > eps_of(torch.float32)
        rows = _with_healed(rows, is_coarse=is_coarse, has_all_tokens=has_all_tokens)
    return ModelDocument(
        places=rows,
        unmatched=unmatched,
        notes=notes,
        dtypes=[dtype_name(side.dtype) for side in (a, b)],
        times_rounding=TIMES_ROUNDING,
    )


# ------------------------------------------------------------------------------------------- places


class _Pair(NamedTuple):
    """The same place in both models, None in the one that lacks it."""

    a: ModelPlace | None
    b: ModelPlace | None


def _pairs(a: Computed, b: Computed) -> Iterator[_Pair]:
    """The places in the order of A, then those of B alone. Rotations that change nothing in any
    model that has them are left out.
    """
    of_a, of_b = ({place.key: place for place in side.entries} for side in (a, b))
    for key in of_a | of_b:
        pair = _Pair(of_a.get(key), of_b.get(key))
        sides = zip((a, b), pair, strict=True)
        if any(place is not None and not side.rotates_nothing(place) for side, place in sides):
            yield pair


def _unmatched(pair: _Pair, why: str) -> Unmatched:
    """A place that could not be compared, or that one model lacks."""
    name_a, name_b = (None if each is None else each.name for each in pair)
    place = next(filter(None, pair))
    return Unmatched(**place.where, name_a=name_a, name_b=name_b, why=why, number=place.number)


def _only_one_has_head(a: ModelPlace, b: ModelPlace, x: Tensor | Call, y: Tensor | Call) -> bool:
    """Whether one model gives logits, and the other its last hidden states."""
    is_one = a.site == "logits" and bool(a.name) != bool(b.name)
    return is_one and x.shape[-1] != y.shape[-1]


def _row(
    place: ModelPlace, name_b: str, gap: Deviation, rounding: Relative | None, least: float
) -> Difference:
    """The difference at a place, with the rounding that is known of it, or at least any."""
    whole, heads = gap.relative
    limit = least
    if rounding is not None and math.isfinite(rounding.whole):
        limit = max(rounding.whole, least)
    of_heads = [limit] * len(heads)
    if rounding is not None and len(rounding.heads) == len(heads):
        of_heads = [max(least, of_head) for of_head in rounding.heads]
    is_beyond = not whole <= TIMES_ROUNDING * limit  # also if it is NaN
    beyond = [n for n, of_head in enumerate(heads) if of_head > TIMES_ROUNDING * of_heads[n]]
    return Difference(
        **place.where,
        name_a=place.name,
        name_b=name_b,
        relative=finite(whole),
        rounding=limit,
        largest=finite(gap.largest),
        at=gap.at,
        head=heads.index(max(heads)) if heads and is_beyond else None,
        heads=tuple(beyond) if is_beyond else (),
        n_heads=len(heads),
        beyond=is_beyond,
        number=place.number,
    )


def _with_kinds_of_heads(rows: Sequence[Difference]) -> Iterator[Difference]:
    """The differences, those of kv heads marked: where there are fewer than scores or queries."""
    of_queries = [row for row in rows if row.site in ("q", "q_rotated", "scores")]
    n_query_heads = {(row.of_layer, row.part): row.n_heads for row in of_queries}
    for row in rows:
        n = n_query_heads.get((row.of_layer, row.part), 0)
        is_shared = row.site.startswith(("k", "v")) and row.n_heads < n
        yield changed(row, of_kv_heads=is_shared)


# -------------------------------------------------------------------------- what agrees again later


def _with_healed(
    rows: Sequence[Difference], *, is_coarse: bool, has_all_tokens: bool
) -> list[Difference]:
    """The differences of two classes of models, those marked after which both agree again."""
    marked = list[Difference]()
    for at, row in enumerate(rows):
        later = rows[at + 1 :]
        is_healed = (
            _heals_in_scores(row, later)
            if is_coarse
            else _heals(row, later, has_all_tokens=has_all_tokens)
        )
        marked.append(changed(row, healed=row.beyond and is_healed))
    return marked


def _heals(row: Difference, later: Sequence[Difference], *, has_all_tokens: bool) -> bool:
    """Whether all that follows from a difference passes through a later place that is the same in
    both: the output of the same part, the residual stream, or the logits of all tokens.
    """

    def is_passed(other: Difference) -> bool:
        match other.site:
            case "z" | "output":
                return row.layer is not None and _is_same_part(row, other)
            case "logits":
                return has_all_tokens
            case "residual":
                return other.stack == row.stack
            case _:
                return False

    return any(is_passed(other) for other in later if not other.beyond)


def _heals_in_scores(row: Difference, later: Sequence[Difference]) -> bool:
    """Whether a difference of queries or keys leaves their scores the same. In 16 bits rounding
    hides much of what follows later.
    """
    scores = (other for other in later if other.site == "scores" and _is_same_part(row, other))
    first = next(scores, None)
    return first is not None and row.site.startswith(("q", "k")) and not first.beyond


def _is_same_part(a: Difference, b: Difference) -> bool:
    return (a.of_layer, a.part) == (b.of_layer, b.part)


# -------------------------------------------------------------------------------------------- notes


def _notes(a: Computed, b: Computed) -> Iterator[str]:
    """Attentions that could not be seen inside, and other numbers of layers and heads."""
    yield from _unseen("A", a)
    if b.kind == OUTPUTS:
        return
    yield from _unseen("B", b)
    places = [place for place in (*a.entries, *b.entries) if place.layer is not None]
    for stack in dict.fromkeys(place.stack for place in places):
        n_a, n_b = (
            len({place.layer for place in side.entries if place.stack == stack} - {None})
            for side in (a, b)
        )
        if n_a != n_b:
            yield f"A has {n_a} {f'{stack} layers' if stack else 'layers'} and B {n_b}"
    heads_a, heads_b = _n_heads(a), _n_heads(b)
    if heads_a != heads_b:
        yield f"A has {heads_a} heads and B {heads_b}"


def _unseen(letter: str, computed: Computed) -> Iterator[str]:
    """The attentions of a model that were not captured, and the layers without any."""
    places = computed.entries
    captured = {place.of_layer for place in places if place.site in OF_CALLS}
    outputs = [place for place in places if (place.part, place.site) == ("attention", "output")]
    hidden = [place.name for place in outputs if place.of_layer not in captured]
    if hidden:
        words = "the output is compared, but no head: mha could not capture its attention"
        yield f"of {first_names(hidden, 3)} of {letter} {words}"
    with_attention = {place.of_layer for place in places if place.part == "attention"}
    layers = {place.of_layer for place in places if place.layer is not None}
    bare = sorted({str(layer.number) for layer in layers - with_attention})
    if bare:
        names = f"layers {first_names(bare, 3)} of {letter}"
        yield f"no attention was captured in {names}: all in them counts as MLP"


def _n_heads(computed: Computed) -> str:
    """The numbers of heads of the captured attentions, in words."""
    attentions = [entry.tensors for entry in computed.entries.values() if entry.call is not None]
    shapes = [(tensors.get("q") or tensors["scores"]).shape for tensors in attentions]
    return " or ".join(map(str, sorted({shape[1] for shape in shapes}))) or "no captured"
