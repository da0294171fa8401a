"""The result of `mha diff` as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mhacli.commands.diff.words import summary_of
from mhacli.io.data import plain
from mhacli.record.shown import Shown

if TYPE_CHECKING:
    from mhacli.commands.diff.comparison import Comparison
    from mhacli.commands.diff.sites import LayerDifference
    from mhacli.record.record import Record
    from mhacli.render.base.options import Screen, ViewOptions

SCHEMA = "mha.diff/1"


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
        verdict: Literal["agree", "differ", "nothing"] = self["verdict"]
        return verdict

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        return str(self["summary"])

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
            label = layer["layer"]
            for site in layer["sites"]:
                fields = {name: site[name] for name in site if name not in ("heads", "told")}
                yield {"layer": label, **fields}
            for head in layer["heads"]:
                for row in head["statistics"]:
                    about = {"layer": label, "head": head["head"], "statistic": row["name"]}
                    yield {**about, "a": row["a"], "b": row["b"]}


def model_diff(comparison: Comparison, names: tuple[str, str]) -> Diff:
    """The document of a comparison of two models, which are named."""
    fields = plain(vars(comparison))
    d = Diff(schema=SCHEMA, kind="models", command=[], a=names[0], b=names[1], **fields)
    departures = (place for place in d["places"] if place["beyond"] and not place["healed"])
    d["first"] = next(departures, None)
    d["verdict"] = "differ" if d["first"] or d["ids"] else "agree"
    d["summary"] = summary_of(d)
    return d
