"""The result of `mha diff` as data; and of two models the first place that parts, with its cause in
words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mhacli.io.data import plain
from mhacli.record.shown import Shown
from mhacli.text.numbers import shown

if TYPE_CHECKING:
    from mhacli.commands.diff.compare import LayerDifference
    from mhacli.commands.diff.comparison import Comparison
    from mhacli.record.record import Record
    from mhacli.render.base.options import Screen, ViewOptions

SCHEMA = "mha.diff/1"
Row = Mapping[str, Any]
"""A place in the document, compared or not."""
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
    ("attention", "q_rotated"): "rotation or scale of the queries",
    ("attention", "k_rotated"): "rotation or scale of the keys",
    ("attention", "scores"): "scale, softcap or bias of the scores",
    ("attention", "pattern"): "mask or sink",
    ("attention", "z"): "kernel or the choice of values",
    ("attention", "output"): "output projection",
    ("attention", "output_norm"): "norm after attention",
    ("mlp", "norm"): "norm before the MLP or the residual sum after attention",
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
_NAMES = {
    "q_rotated": "q as rotated",
    "k_rotated": "k as rotated",
    "output_norm": "norm of the output",
}


class Diff(dict[str, Any], Shown):
    """The document that `mha diff --json` prints, which also shows itself as the command does. Of
    two `records` it has structs in place of JSON objects, and `layers` are the layers that both
    have.
    """

    records: tuple[Record, Record] | None = None
    layers: Sequence[LayerDifference] = ()

    def __repr__(self) -> str:
        """The result in a sentence."""
        return f"<Diff: {self.summary}>"

    @property
    def verdict(self) -> Literal["agree", "differ", "nothing"]:
        """Whether the two are equal up to rounding in everything that both have; `nothing` if that
        is nothing.
        """
        return self["verdict"]  # type: ignore[no-any-return]

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        return self["summary"]  # type: ignore[no-any-return]

    def view(self, screen: Screen, options: ViewOptions | None = None) -> Any:
        """What `mha diff` prints on a screen."""
        from mhacli.commands.diff.view import diff_view

        return diff_view(self, screen, options)

    def to_dict(self, command: Sequence[str] = ()) -> dict[str, Any]:
        """The document, of this `command`."""
        return plain({**self, "command": [*command]})  # type: ignore[no-any-return]

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of `--csv`, under the names of the document: a place; or a site of a layer, or a
        statistic of a head.
        """
        document = self.to_dict()
        for place in document.get("places", ()):
            yield {name: value for name, value in place.items() if name != "heads"}
        for layer in document.get("layers", ()):
            for site in layer["sites"]:
                yield {"layer": layer["layer"]} | {
                    name: site[name] for name in site if name not in ("heads", "told")
                }
            for head in layer["heads"]:
                for row in head["statistics"]:
                    of_head = {
                        "layer": layer["layer"],
                        "head": head["head"],
                        "statistic": row["name"],
                    }
                    yield of_head | {"a": row["a"], "b": row["b"]}


def model_diff(found: Comparison, names: tuple[str, str]) -> Diff:
    """The document of a comparison of two models, which are named."""
    d = Diff(schema=SCHEMA, kind="models", command=[], a=names[0], b=names[1], **plain(vars(found)))
    d["first"] = next(
        (place for place in d["places"] if place["beyond"] and not place["healed"]), None
    )
    d["verdict"] = "differ" if d["first"] or d["ids"] else "agree"
    d["summary"] = _summary(d)
    return d


def _summary(d: Diff) -> str:
    """The result in a sentence: where the two first differ, how far, and what may be its cause."""
    first, places = d["first"], d["places"]
    if d["ids"] is not None:
        x, y = d["ids"]
        at = next(
            (n for n, pair in enumerate(zip(x, y, strict=False)) if pair[0] != pair[1]),
            min(len(x), len(y)),
        )
        ends = [str(ids[at]) if at < len(ids) else "no token" for ids in (x, y)]
        words = (
            f"the two tokenizers give other ids: {len(x)} tokens and {len(y)}, the first difference"
            f" is token {at}"
        )
        return (
            f"{words}, {ends[0]} in A and {ends[1]} in B; nothing else is compared (--ids gives"
            " both the same)"
        )
    unhealed = (place for place in places if not place["healed"])
    place = first or max(unhealed, key=lambda place: place["relative"] / place["rounding"])
    relative = math.inf if place["relative"] is None else place["relative"]
    size = (
        f"{where(place)}: relative {shown(relative, 'number')}, rounding"
        f" {shown(place['rounding'], 'number')}"
    )
    if first is not None:
        return f"they first differ in {size}; {_narrowed(d, first)}"
    size = f"the nearest to it is {size}" if relative else "they are the same, bit for bit"
    return f"no difference beyond rounding in {len(places)} places; {size}"


def where(place: Row) -> str:
    """A place in words: `layer 2, attention, head 1 (z)`. What a model without a head gives is its
    output.
    """
    part, site = place["part"], _NAMES.get(place["site"], place["site"])
    words = [] if place["layer"] is None else [f"layer {place['layer']}"]
    words.append("output" if part == "logits" and not place["name_a"] else part)
    if place["stack"]:
        words[0] = f"{place['stack']} {words[0]}"
    if heads := place.get("heads"):
        kind = "kv head" if place["site"].startswith(("k", "v")) else "head"
        some = f"{kind}{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"
        words.append(f"all {kind}s" if len(heads) == place["n_heads"] > 1 else some)
    return ", ".join(words) + (f" ({site})" if site != part else "")


def _narrowed(d: Diff, first: Row) -> str:
    """What is equal before the first place, and what therefore differs: its cause, or what could
    not be compared before it.
    """
    places, part, of_first = d["places"], first["part"], (first["layer"], first["stack"])
    if first is places[0] and part != "embedding":
        return "nothing before it could be compared"
    lacking = {
        (place["layer"], place["stack"]) for place in d["unmatched"] if place["layer"] is not None
    }
    lacking -= {(place["layer"], place["stack"]) for place in places}
    if lacking and part in ("norm", "logits"):
        n = len(lacking)
        return f"before it, {n} layer{'s' * (n > 1)} could not be compared; the others are equal"
    of_layer, unmatched = (
        {
            (each["part"], each["site"]): each
            for each in rows
            if (each["layer"], each["stack"]) == of_first
        }
        for rows in (places, d["unmatched"])
    )
    equal = {key for key, place in of_layer.items() if not place["beyond"]}
    order, last = [*CAUSES], (part, first["site"])
    before, causes = (
        order[: order.index(last)] if last in order else [],
        [CAUSES.get(last, first["site"])],
    )
    if last == ("attention", "output") and {*of_layer, *unmatched}.isdisjoint(
        {(part, "scores"), (part, "z")}
    ):
        causes.insert(0, "inside of attention, of which nothing was captured,")
    for key in reversed(before):
        if key in equal:
            break
        if key in unmatched and key[0] != part and key != ("norm", "norm"):
            causes.insert(0, f"{key[0]}, of which not all could be compared,")
            break
        if key in unmatched:
            place = unmatched[key]
            norm = f"norm before it, {place['name_a'] or place['name_b']} ({place['why']}),"
            causes.insert(0, norm if key[1] == "norm" else CAUSES[key])
    names = [
        _NAMES.get(site, site)
        for of, site in before
        if of == part == "attention" and (of, site) in equal
    ]
    names = [name for name in names if name != "norm"] or names
    what = (
        f"{', '.join(names)} {'are' if len(names) > 1 else 'is'}"
        if names
        else "what is before it is"
    )
    return (
        f"{'' if part == 'embedding' else f'{what} equal, so '}the {' or the '.join(causes)}"
        " differs"
    )
