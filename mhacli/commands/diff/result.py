"""The differences of two models as data: the document of `mha diff`, with the first place that parts and its cause in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from mhacli.io.data import plain
from mhacli.record.exports import Shown

if TYPE_CHECKING:
    from mhacli.models.compare import Comparison, Difference

SCHEMA, PLACES = "mha.diff/1", "mha.places/1"
"""The schemas of the document, and of a file of what a model computes."""


class Side(msgspec.Struct, frozen=True):
    """A model that is named: a checkpoint, code that builds it, or a file of what it computed; and how to load it."""

    word: str
    kind: Literal["checkpoint", "code", "places"]
    dtype: str | None = None
    attn: str | None = None
    device: str = "auto"
    revision: str | None = None
    arg: tuple[str, ...] = ()
    example: str | None = None


class DiffRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Two models, or one to be saved, and what they read."""

    a: Side
    b: Side | None = None
    texts: tuple[str, ...] = ()
    ids: tuple[int, ...] | None = None
    tokenizer: str | None = None
    max_tokens: int | None = None
    map: tuple[str, ...] = ()
    save: str | None = None
    force: bool = False
    one_at_a_time: bool = False
    command: tuple[str, ...] = ()


CAUSES: Mapping[tuple[str, str], str] = {
    ("embedding", "lookup"): "table of embeddings or what is looked up in it (ids, positions)",
    ("embedding", "embedding"): "sum, scale or norm of the embeddings",
    ("attention", "norm"): "norm before attention (weights, epsilon or kind)",
    ("attention", "q"): "projection of the queries (weights or layout)",
    ("attention", "k"): "projection of the keys (weights or layout)",
    ("attention", "v"): "projection of the values (weights or layout)",
    ("attention", "inner_norm"): "norm inside of attention or what it reads",
    ("attention", "q_norm"): "norm of the queries",
    ("attention", "k_norm"): "norm of the keys",
    ("attention", "q_rotated"): "rotation or scale of the queries (base, positions or layout)",
    ("attention", "k_rotated"): "rotation or scale of the keys (base, positions or layout)",
    ("attention", "scores"): "scale, softcap or bias of the scores",
    ("attention", "pattern"): "mask or sink",
    ("attention", "z"): "kernel or the choice of values",
    ("attention", "output"): "output projection",
    ("attention", "output_norm"): "norm after attention",
    ("mlp", "norm"): "norm before the MLP or the residual sum after attention",
    ("mlp", "router"): "router",
    ("mlp", "experts"): "choice of experts",
    ("mlp", "inner_norm"): "norm inside of the MLP or what it reads",
    ("mlp", "output"): "MLP (weights or activation)",
    ("mlp", "output_norm"): "norm after the MLP",
    ("mlp", "residual"): "residual sum",
    ("norm", "norm"): "final norm",
    ("logits", "head"): "head",
    ("logits", "norm"): "norm in the head",
    ("logits", "logits"): "head, or what is done after the last norm",
}
"""What differs where two models part, by part and site in the order of execution."""
_ATTENTION = tuple(site for part, site in CAUSES if part == "attention")
SITE_NAMES = {"q_rotated": "q as rotated", "k_rotated": "k as rotated", "output_norm": "norm of the output"}


class ModelDiff(dict[str, Any], Shown):
    """The document that `mha diff --json` prints for two models, which also shows itself as the command does."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The result in a sentence."""
        return f"<ModelDiff: {self['summary']}>"

    def view(self, screen: Any, *, everything: bool = False) -> Any:
        """What `mha diff` prints on a screen, with all places on request."""
        from mhacli.commands.diff.model_view import model_diff_view

        return model_diff_view(self, screen, everything=everything)

    def to_dict(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """The document, of this `command`."""
        return {**self, "command": [*command]}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `--csv`: a place that was compared."""
        return [{name: value for name, value in place.items() if name != "heads"} for place in self["places"]]


def model_diff(found: Comparison, names: tuple[str, str]) -> ModelDiff:
    """The document of a comparison of two models, which are named."""
    first = found.first
    return _document(names, _summary(found), first=None if first is None else _first(first), **vars(found))


def other_ids(a: dict[str, Any], b: dict[str, Any], wanted: DiffRequest) -> ModelDiff:
    """The document of two models whose tokenizers give other ids, which are not run."""
    assert wanted.b is not None
    x, y = (next(iter(ids.values()))[0] for ids in (a, b))
    at = next((n for n, pair in enumerate(zip(x, y, strict=False)) if pair[0] != pair[1]), min(len(x), len(y)))
    ends = [str(row[at]) if at < len(row) else "no token" for row in (x, y)]
    words = f"the two tokenizers give other ids: {len(x)} tokens and {len(y)}, the first difference is token {at}"
    words += f", {ends[0]} in A and {ends[1]} in B; nothing else is compared (--ids gives both the same)"
    return _document((wanted.a.word, wanted.b.word), words, ids=[x, y])


def _document(names: tuple[str, str], summary: str, *, ids: list[Any] | None = None, **more: Any) -> ModelDiff:
    lists: dict[str, list[Any]] = {name: [] for name in ("dtypes", "places", "unmatched", "notes")}
    fields = {"first": None, **lists, "times_rounding": None, "ids": ids}
    document = {"schema": SCHEMA, "kind": "models", "command": [], "summary": summary, "a": names[0], "b": names[1]}
    is_other = more.get("first") is not None or ids is not None
    return ModelDiff(plain(document | {"verdict": "differ" if is_other else "agree"} | fields | more))


def _first(first: Difference) -> dict[str, Any]:
    names = ("layer", "stack", "part", "site", "head", "name_a", "name_b", "relative", "rounding")
    return {name: getattr(first, name) for name in names}


def _summary(found: Comparison) -> str:
    """The result in a sentence: where the two part, how far, and what may be its cause."""
    first, places = found.first, found.places
    if first is None:
        worst = max(places, key=lambda place: 0.0 if place.healed else place.relative / place.rounding)
        size = "they are the same, bit for bit"
        if worst.relative:
            size = f"the largest difference is {worst.relative:.2g}, in {where(worst)}, rounding {worst.rounding:.2g}"
        return f"no difference beyond rounding in {len(places)} places; {size}"
    words = f"the two part in {where(first)}: relative {first.relative:.2g}, rounding {first.rounding:.2g}"
    return "; ".join([words, *_narrowed(found, first)])


def part_name(part: str, module: str | None) -> str:
    """A part in words. What a model without a head gives is its output."""
    return "output" if part == "logits" and not module else part


def where(place: Difference) -> str:
    """A place in words: `layer 2, attention, head 1 (z)`."""
    stack, part = f"{place.stack} " if place.stack else "", part_name(place.part, place.name_a)
    words = [] if place.layer is None else [f"{stack}layer {place.layer}"]
    words.append(part if words or not stack else f"{stack}{part}")
    if place.head is not None and place.heads:
        kind = "kv head" if place.site.startswith(("k", "v")) else "head"
        heads = ", ".join(map(str, place.heads))
        is_all = len(place.heads) == place.n_heads > 1
        words.append(f"all {kind}s" if is_all else f"{kind}{'s' * (len(place.heads) > 1)} {heads}")
    site = SITE_NAMES.get(place.site, place.site)
    return ", ".join(words) + (f" ({site})" if site != place.part else "")


def _narrowed(found: Comparison, first: Difference) -> Iterator[str]:
    """What is equal before the first place, and what therefore differs: its cause, and what before it could not be compared."""
    if first is found.places[0] and first.part != "embedding":
        yield "nothing before it could be compared"
        return
    alone = {(place.stack, place.layer) for place in found.unmatched if place.layer is not None}
    alone -= {(place.stack, place.layer) for place in found.places}
    if alone and first.part in ("norm", "logits"):
        yield f"before it, {len(alone)} layer{'s' * (len(alone) > 1)} could not be compared; the others are equal"
        return
    of_layer = [place for place in found.places if (place.layer, place.stack) == (first.layer, first.stack)]
    missing = [place for place in found.unmatched if (place.layer, place.stack) == (first.layer, first.stack)]
    of_part = [place for place in of_layer if place.part == first.part]
    lacked = [place for place in missing if place.part == first.part]
    causes, equal = [CAUSES.get((first.part, first.site), first.site)], "what is before it is equal, so "
    if first.part == "attention" and first.site in _ATTENTION:
        before = _ATTENTION[: _ATTENTION.index(first.site)]
        same = {place.site for place in of_part if not place.beyond}
        known = [site for site in before if site in same]
        after_known = before[before.index(known[-1]) + 1 :] if known else ()
        sites = {place.site for place in lacked}
        causes = [*(CAUSES["attention", site] for site in after_known if site in sites), *causes]
        names = [SITE_NAMES.get(site, site) for site in known if site != "norm" or known == ["norm"]]
        equal = f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} equal, so " if known else equal
        if first.site == "output" and not {"scores", "z"} & (sites | {place.site for place in of_part}):
            causes = ["inside of attention, of which nothing was captured,", *causes]
    elif (
        first.part == "mlp"
        and all(place.part == "mlp" for place in of_layer)
        and len(of_part) < len(of_layer + missing)
    ):
        causes = ["attention, which could not be compared,", *causes]
    norms = [place for place in lacked if place.site == "norm" and first.site in ("q", "k", "v", "output")]
    causes = [*(f"norm before it, {place.name_a or place.name_b} ({place.why})," for place in norms[:1]), *causes]
    yield f"{'' if first.part == 'embedding' else equal}the {' or the '.join(causes)} differs"
