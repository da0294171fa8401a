"""The sites of two records beside each other: which hold the same numbers, and how far the others are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.render.base.format import count_of, number_text
from mhacli.render.base.options import Screen
from mhacli.render.base.tables import plain_table, title_rule
from mhacli.render.diff.words import layers_text, place_text, site_name, views
from mhacli.results.diff.result import Differences, LayerDifference, SiteDifference
from mhacli.results.record.record import Record
from mhacli.text.escape import visible

_STYLES = {"identical": "green", "within": "green", "beyond": "bold red", "shape": "bold red", "skipped": "dim"}
_WORDS = {"identical": "same bits", "within": "within", "beyond": "DIFFERS", "shape": "OTHER SHAPE", "skipped": "–"}
_WIDE = 100


def sites_view(
    found: Differences, a: Record, b: Record, screen: Screen, *, everything: bool = False
) -> Iterator[RenderableType]:
    """Of several layers a line each, and the sites of the first that departs; of one its sites. With `everything` all of all."""
    is_single = len(found.layers) == 1
    if not is_single:
        table = [_layers_table(found)] if found.layers else []
        yield Group(title_rule("layer by layer"), *table, *_layers_alone(found))
    first = next((layer for layer in found.layers if any(site.departs for site in layer.sites)), None)
    shown = [layer for layer in found.layers if everything or is_single or layer is first]
    for layer in shown:
        yield _layer(layer, a, b, screen, everything=everything)


def _layers_table(found: Differences) -> Table:
    table = plain_table(
        ("layer", False), ("sites", True), ("same bits", True), ("within", True), ("differ", True), ("largest, relative", True),
        ("first to differ", False),
    )  # fmt: skip
    for layer in found.layers:
        counted = [site for site in layer.sites if site.status != "skipped"]
        same = sum(site.is_same_bits for site in counted)
        departs = [site for site in counted if site.departs]
        largest = max((site.relative or 0.0 for site in counted), default=0.0)
        first = Text(site_name(departs[0].site) if departs else "–", style="bold red" if departs else "dim")
        table.add_row(
            Text(visible(layer.label)),
            *(Text(str(n)) for n in (len(counted), same, sum(site.status == "within" for site in counted))),
            Text(str(len(departs)), style="bold red" if departs else ""),
            Text(number_text(largest)),
            first,
        )
    return table


def _layers_alone(found: Differences) -> Iterator[RenderableType]:
    for name, labels in (("A", found.only_a), ("B", found.only_b)):
        if labels:
            yield Text(f"only in {name}: {visible(layers_text(labels))}", style="dim")
    if not found.layers:
        yield Text("no layer is in both: nothing is compared", style="yellow")


def _layer(layer: LayerDifference, a: Record, b: Record, screen: Screen, *, everything: bool) -> RenderableType:
    known = [site for site in layer.sites if not _is_told_with_tokens(site, a, b)]
    quiet = [site for site in known if _is_quiet(site)] if not everything else []
    listed = [site for site in known if site not in quiet]
    title = title_rule(f"{layer.label + ' · ' if layer.label else ''}site by site, in the order of execution")
    parts: list[RenderableType] = [title]
    if listed:
        parts.append(_sites_table(listed, layer, a, b, screen))
    if quiet:
        names = ", ".join(site_name(site.site) for site in quiet)
        parts.append(Text(f"the same shape, numbers not in the records: {names}", style="dim"))
    for name, sites in (("A", layer.only_a), ("B", layer.only_b)):
        if sites:
            parts.append(Text(f"only in {name}: {', '.join(map(site_name, sites))}", style="dim"))
    return Group(*parts)


def _is_told_with_tokens(site: SiteDifference, a: Record, b: Record) -> bool:
    """Whether it is the step of the numbers of tokens, which every record of ours holds: they are compared with the tokens."""
    return site.site == "ids" and site.status == "identical" and a.module is None and b.module is None


def _is_quiet(site: SiteDifference) -> bool:
    """Whether there is nothing to say of a step but that it has the same shape."""
    return site.seen == "shape" and site.status == "identical" and not site.told


def _sites_table(
    sites: Sequence[SiteDifference], layer: LayerDifference, a: Record, b: Record, screen: Screen
) -> Table:
    is_wide = screen.width >= _WIDE
    wide = (("numbers", True), ("others", True)) if is_wide else ()
    table = plain_table(("site", False), *wide, ("largest", True), ("relative", True), ("", False))
    table.add_column("where", overflow="fold", ratio=1)
    own = views(layer, a, b)
    for site in sites:
        name = site_name(site.site)
        counts = (f"{site.n_cells:,}", f"{site.n_different:,}") if site.n_cells else ("", "")
        table.add_row(
            Text(name, style="bold" if site.departs else ""),
            *(Text(count) for count in counts if is_wide),
            Text(_largest(site)),
            Text("" if site.relative is None else number_text(site.relative)),
            Text(_status(site), style=_STYLES[site.status]),
            Text(_remark(site, own), style="" if site.departs else "dim"),
        )
    return table


def _largest(site: SiteDifference) -> str:
    return "" if site.largest is None else number_text(site.largest)


def _status(site: SiteDifference) -> str:
    if site.status == "identical" and not site.is_same_bits:
        return "same shape" if site.seen == "shape" else "same"
    return _WORDS[site.status]


def _remark(site: SiteDifference, own: tuple[Record, Record]) -> str:
    """Where the largest difference is, or why nothing was compared; and what a trace says differently."""
    parts = []
    if site.n_only_a or site.n_only_b:
        parts.append(f"{count_of(site.n_only_a, 'cell')} allowed only in A, {site.n_only_b} only in B")
    elif site.n_nonfinite:
        parts.append(f"{count_of(site.n_nonfinite, 'number')} finite in one alone")
    elif site.largest is None and site.n_different:
        parts.append(f"{site.n_different} of {site.n_cells} are others")
    if site.at is not None and site.status != "skipped":
        parts.append(place_text(site.at, *own))
    n_held = math.prod(site.shape_a or ())
    if "query block" in site.axes and 0 < site.n_cells < n_held:
        parts.append(f"{site.n_cells:,} of {n_held:,} cells compared: blocks of the same tokens in the same places")
    parts += [site.why] if site.why else []
    parts += [f"{one.name}: {visible(one.a)} against {visible(one.b)}" for one in site.told]
    return "; ".join(parts)
