"""The page of a record: one HTML file with style, script and numbers, which needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor, log10

from rich.console import RenderableType

from mhacli.io.files import format_size
from mhacli.record.heads import UNTYPED
from mhacli.record.record import Record
from mhacli.render.base.cells import range_text
from mhacli.render.base.format import (
    configuration,
    count_of,
    fitted,
    number_text,
    percent_text,
    provenance,
    type_text,
)
from mhacli.render.base.options import Rows, ViewOptions, chosen
from mhacli.render.base.selection import chosen_heads, chosen_layers, names_of, ranges
from mhacli.render.checkpoint.corpus import corpus_tables
from mhacli.render.checkpoint.header import checks_view, model_header
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, is_before_dropout, scale_of
from mhacli.render.heads.view import key_name
from mhacli.render.page.effects import effects
from mhacli.render.page.elements import (
    WIDE,
    Html,
    content_policy,
    joined,
    lines_of,
    page_script,
    page_style,
    preformatted,
    sentence,
    tag,
    text,
)
from mhacli.render.page.maps import EXACT, CellEncoding
from mhacli.render.page.payload import (
    LIMIT_BYTES,
    MapRequest,
    PageMaps,
    PageView,
    exact_maps,
    fitting_maps,
    map_request,
    payload,
)
from mhacli.render.page.tables import statistics
from mhacli.render.page.trace import walkthrough
from mhacli.render.run.trace import module_header
from mhacli.text.escape import visible

_RESERVE = 6 << 10
"""Bytes for the notes on maps."""
_LEAST_ROOM = LIMIT_BYTES // 4
"""Bytes for maps even if tokens and tables alone fill the page."""
_TITLE = 80
_NO_SCRIPT = (
    "Without JavaScript this page shows no patterns: their numbers are in it, packed. What follows can be read without."
)


def page(record: Record, options: ViewOptions) -> str:
    """The whole page as text. Raises `UsageError` for a head, layer or sequence that the record lacks.

    Its size is at most `LIMIT_BYTES` if possible, unless `options.full`. The page says how that reduced precision.
    """
    heads = drawable_heads(record, options)
    sequences = chosen(options.sequences, len(record.sequences), 1, True, "sequence").shown
    begin = 0 if options.heads is not None else most_certain(heads)
    view = PageView(heads, sequences, scale_of(options, heads), options.hide_sinks, begin=begin)
    requests = [map_request(head, b, options.rows) for head in heads for b in sequences]
    title = _title(record)
    table, walk = statistics(record, options, view.heads), walkthrough(record)
    frame = _Frame(record, options, view, tuple(requests), title, table, walk)
    if options.full or not requests:
        return frame.whole(exact_maps(requests))
    maps = fitting_maps(requests, max(frame.room, _LEAST_ROOM), rows_first=options.rows is not None)
    return frame.whole(replace(maps, is_small=maps.n_bytes <= frame.room))


def most_certain(heads: Sequence[DrawableHead]) -> int:
    """The index of the head with the largest excess of its type; 0 if no head has a type."""
    named = [
        (-head.statistics.certainty, place)
        for place, head in enumerate(heads)
        if head.statistics is not None and head.statistics.certainty is not None and head.statistics.kind not in UNTYPED
    ]
    return min(named)[1] if named else 0


@dataclass(frozen=True)
class _Frame:
    """A page without its maps. Statistics and walkthrough are readable without a script."""

    record: Record
    options: ViewOptions
    view: PageView
    requests: tuple[MapRequest, ...]
    title: str
    statistics: Html
    walk: Html

    @cached_property
    def room(self) -> int:
        """The bytes left below the limit; negative if exceeded."""
        return LIMIT_BYTES - len(self.whole(exact_maps([])).encode()) - _RESERVE

    def whole(self, maps: PageMaps) -> str:
        """The page with these maps, or none."""
        view = replace(self.view, quantised=quantised_text(maps))
        requests = self.requests if maps.maps else ()
        sentences = [*notes(self.record, self.options, view, requests, maps)]
        sections = _script_sections() if view.heads else [_nothing_section(sentences.pop(0))]
        sections += [
            effects(self.record),
            _documents(self.record, self.options),
            self.statistics,
            self.walk,
        ]
        sections += [*([_notes_section(sentences)] if sentences else []), _provenance(self.record)]
        content = tag("script", payload(view, maps), type="application/json", id="record")
        script = page_script()
        style = page_style(has_effects=self.record.effect is not None)
        body = joined(
            [*_top(self.record, self.title), tag("main", joined(sections)), content, tag("script", Html(script))]
        )
        head = _head(self.title, content_policy(script, style), style)
        return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>\n'


def _head(title: str, policy: str, style: str) -> Html:
    metas = (
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="referrer" content="no-referrer">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
    )
    return joined(
        [Html("<head>"), *map(Html, metas), tag("title", text(title)), tag("style", Html(style)), Html("</head>")]
    )


def _title(record: Record) -> str:
    """The page's title: the model, the module, or the first text."""
    if record.module is not None:
        return f"shapes of {visible(record.module.target)}"
    what = "decoding" if record.decoding is not None else "attention"
    if record.config.random is not None and record.model is None:
        return f"{what} over random rows"
    model = "" if record.model is None else f" in {visible(record.model.path.rstrip('/').rpartition('/')[2])}"
    if record.corpus is not None:
        return f"{what}{model}: {count_of(record.corpus.n_documents, 'document', grouped=True)}"
    words = " ".join(record.sequences[0].text[: 8 * _TITLE].split())
    cut = fitted(visible(words), _TITLE)
    more = f" and {count_of(len(record.sequences) - 1, 'text')} more" if len(record.sequences) > 1 else ""
    return f"{what}{model}: “{cut}”{more}"


def _top(record: Record, title: str) -> list[Html]:
    """The head of the page: title, configuration, and room for controls."""
    words: RenderableType = configuration(record, WIDE.width)
    if record.module is not None:
        words = module_header(record, record.module, WIDE)
    elif record.model is not None:
        words = model_header(record, record.model, WIDE)
    origin = tag("div", *(tag("p", line) for line in lines_of(words, WIDE.width)), id="origin")
    skip = tag("a", text("to the chosen head"), href="#chosen", class_="skip", data_script="", hidden="")
    controls = tag("div", id="controls", hidden="")
    return [
        skip,
        tag("header", tag("h1", tag("bdi", text(title))), origin, controls, id="top"),
        tag("noscript", tag("p", text(_NO_SCRIPT), class_="warning")),
    ]


def _nothing_section(why: str) -> Html:
    return tag("section", tag("p", sentence(why), class_="warning"), id="nothing")


def _script_sections() -> list[Html]:
    """The sections that the script fills: small maps of all heads, the chosen head, its tokens."""
    readout = tag("p", id="readout", role="status", aria_live="polite")
    story = tag("div", id="story")
    chosen_one = [tag("h2", id="chosen-title"), tag("div", id="matrix-area"), readout, story]
    return [
        tag("section", tag("h2", text("heads")), tag("div", id="thumbnails"), id="heads", data_script="", hidden=""),
        tag("section", *chosen_one, id="chosen", data_script="", hidden=""),
        tag("section", tag("h2", text("tokens")), tag("div", id="tokens-area"), id="tokens", data_script="", hidden=""),
    ]


def _documents(record: Record, options: ViewOptions) -> Html:
    """The distributions of statistics and effects over a corpus; empty without one."""
    if record.corpus is None:
        return Html("")
    layers = chosen_layers(record, options)
    heads = chosen_heads(layers, options)
    views = corpus_tables(record, layers, heads, replace(options, everything=True), WIDE)
    shown = (preformatted(view, WIDE.width) for view in views)
    return tag("section", tag("h2", text("documents")), *shown, id="documents")


def _notes_section(sentences: Sequence[str]) -> Html:
    items = tag("ul", *(tag("li", sentence(line)) for line in sentences))
    return tag("section", tag("h2", text("how it was drawn")), items, id="notes")


def _provenance(record: Record) -> Html:
    rows = (tag("tr", tag("th", text(word), scope="row"), tag("td", text(line))) for word, line in provenance(record))
    whole = tag("table", tag("caption", text("what made this page")), tag("tbody", *rows))
    checks = [] if record.model is None else [*lines_of(checks_view(record, WIDE, in_detail=True), WIDE.width)]
    words = (tag("p", line) for line in checks)
    return tag("section", tag("h2", text("provenance")), tag("div", whole, class_="scroll"), *words, id="provenance")


# --------------------------------------------------------------------------------------------------------------- notes


_MOST_SINKS = 6
_BLOCKS = "in maps of blocks, only sinks at the first token can be recognised"
_LIMIT = format_size(LIMIT_BYTES)


def notes(
    record: Record, options: ViewOptions, view: PageView, requests: Sequence[MapRequest], maps: PageMaps
) -> Iterator[str]:
    """The notes on the pictures, one sentence each. The first says why no head is drawn, if so."""
    if requests:
        yield _cell(view.heads, maps.encoding)
        yield _exactness(view, maps)
        yield from _kept(view, maps, options.rows)
        if len(view.heads) > 1:
            yield _first_head(view)
        yield _scale(view, maps)
        yield from _sinks(view, requests, maps)
        yield from _learned(maps)
        yield from _signs(record, requests, maps)
    yield from _missing(record, options, view)


def quantised_text(maps: PageMaps) -> str | None:
    """The effect of coarse codes and blocks on attention weights in a sentence; None if the page is exact."""
    if maps.encoding == EXACT:
        return None
    factor = maps.encoding.factor
    blocks = f"merged into blocks of {factor} × {factor} cells of the record and " if factor > 1 else ""
    kept = f"so that the page stays below {_LIMIT}" if maps.is_small else "to keep the page small"
    return (
        f"attention weights are {blocks}stored in 8 bits, {kept}: a number marked ≈ is stored at most "
        f"{_rounded_up(maps.error)} off; its ± includes the rounding of the printed number. Where sinks are taken out, the error "
        "is divided by the remaining weight of its row. --full stores every cell exactly"
    )


def _rounded_up(error: float) -> str:
    """An error in two digits, rounded up."""
    step = 10.0 ** (floor(log10(error)) - 1) if error > 0 else 1.0
    return number_text(ceil(error / step) * step)


def _cell(heads: Sequence[DrawableHead], encoding: CellEncoding) -> str:
    blocks = sorted(
        {encoding.factor if "pattern" in head.record.arrays else _block(head) * encoding.factor for head in heads}
    )
    if blocks == [1]:
        return "a cell is the attention weight that a query (row) gives to a key (column)"
    sizes = " or ".join(f"{n} × {n}" for n in blocks)
    return f"a cell stands for {sizes} tokens: the attention that the queries of a row give, on average, to all keys of a column"


def _block(head: DrawableHead) -> int:
    return head.record.survey.block if head.record.survey is not None else 1


def _exactness(view: PageView, maps: PageMaps) -> str:
    words = quantised_text(maps)
    if words is None:
        rounded = ", rounded to 32-bit floats" if view.bits > 32 else ""
        return f"attention weights are as the record holds them{rounded}: {format_size(maps.n_bytes)} of maps"
    return words if maps.is_small else f"{words}. It is still above {_LIMIT}: there are too many heads or tokens"


def _kept(view: PageView, maps: PageMaps, rows: Rows | None) -> Iterator[str]:
    """What is exact beside coarse maps."""
    if maps.encoding == EXACT or all("pattern" not in head.record.arrays for head in view.heads):
        return
    parts = []
    if maps.n_keys:
        several = f"{maps.n_keys} strongest keys" if maps.n_keys > 1 else "strongest key"
        parts.append(f"the {several} of every query")
    if maps.n_rows:
        parts.append(
            "the row of the last query" if rows is None else f"the rows of chosen queries, at most {maps.n_rows} a text"
        )
    words = " and ".join(parts) or "nothing"
    left = (
        f"; {maps.n_wanted - maps.n_rows} chosen rows had no room"
        if maps.n_wanted - maps.n_rows > 0 < maps.n_rows
        else ""
    )
    yield f"also stored exactly: {words}{left}"


def _first_head(view: PageView) -> str:
    """The head that is shown first, and why."""
    head, head_type = view.heads[view.begin], view.heads[view.begin].statistics
    if head_type is None or head_type.certainty is None or not view.begin:
        return f"shown first: {head.label}"
    return f"shown first: {head.label}, the head with the largest excess over uniform attention: {type_text(head_type)}"


def _scale(view: PageView, maps: PageMaps) -> str:
    top = maps.top(hide_sinks=view.hide_sinks)
    words = range_text(view.scale, top)
    shared = " for all heads" * (len(view.heads) > 1)
    return f"initial scale: {view.scale}, {words}{shared}; its top is the largest weight of a query that sees more than one key"


def _sinks(view: PageView, requests: Sequence[MapRequest], maps: PageMaps) -> Iterator[str]:
    """Which keys count as sinks, and their weights beside uniform attention."""
    drawn = [
        (encoded_map, facts.n_queries)
        for encoded_map, facts in zip(maps.maps, maps.facts, strict=True)
        if facts.n_queries and not facts.n_missing
    ]
    if not drawn:
        return
    treatment = "initially taken out" if view.hide_sinks else "initially shown"
    if not any(encoded_map.sinks for encoded_map, _ in drawn):
        of_blocks = any(encoded_map.block > 1 for encoded_map, _ in drawn)
        yield "no key is a sink" + (f": {_BLOCKS}" if of_blocks else "")
        return
    mass, uniform = (
        _mean([(encoded_map.removed, n) for encoded_map, n in drawn]),
        _mean([(encoded_map.uniform, n) for encoded_map, n in drawn]),
    )
    got = f"They get {percent_text(mass)} of all attention drawn, {percent_text(uniform)} if it were uniform"
    done = (
        "where they are taken out, the rest of the row is renormalised, and their weight is shown in a separate column"
    )
    beside = "" if all(encoded_map.block == 1 for encoded_map, _ in drawn) else f" {_BLOCKS.capitalize()}."
    named = _named_sinks(requests, maps)
    yield f"sinks: {named}. {got}, and are {treatment}; {done}.{beside} The sinks of each head are named below its picture"


def _named_sinks(requests: Sequence[MapRequest], maps: PageMaps) -> str:
    """The sink keys, those in most maps first."""
    counts: dict[str, int] = {}
    for request, encoded_map in zip(requests, maps.maps, strict=True):
        for place in encoded_map.sinks:
            name = key_name(request.head.record, request.sequence, place)
            counts[name] = counts.get(name, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name} in {count_of(n, 'map')}" for name, n in ordered[:_MOST_SINKS])
    return named + (f" and {count_of(len(ordered) - _MOST_SINKS, 'other key')}" if len(ordered) > _MOST_SINKS else "")


def _learned(maps: PageMaps) -> Iterator[str]:
    masses = [
        (encoded_map.learned_mass, facts.n_queries)
        for encoded_map, facts in zip(maps.maps, maps.facts, strict=True)
        if encoded_map.learned_mass is not None and facts.n_queries and not facts.n_missing
    ]
    if masses:
        taken = f"sink logits, which are not keys, take {percent_text(_mean(masses))} of the attention of their heads"
        yield f"{taken}: such rows sum to less than 1, and entropy counts them as one more key"


def _mean(masses: Sequence[tuple[float, float]]) -> float:
    """The mean of attention weights, weighted by their numbers of queries."""
    return sum(mass * n for mass, n in masses) / sum(n for _, n in masses)


def _signs(record: Record, requests: Sequence[MapRequest], maps: PageMaps) -> Iterator[str]:
    """The cells without an attention weight, and what they mean."""
    if any(facts.n_forbidden for facts in maps.facts):
        yield "hatched cells are masked, which is different from a small weight"
    missing = sum(facts.n_missing for facts in maps.facts)
    if missing:
        yield f"{count_of(missing, 'cell')} marked ? {'are' if missing > 1 else 'is'} not a number"
    if is_before_dropout(record):
        p = record.config.dropout
        yield f"the pattern is drawn before dropout ({p:g}); the layer's output was computed after dropout"
    if any("pattern" not in facts.head.record.arrays for facts in requests) and record.facts.padded:
        yield "padding is part of blocks, and gets no attention"
    elif record.facts.padded:
        yield "padding is left out"


def _missing(record: Record, options: ViewOptions, view: PageView) -> Iterator[str]:
    """What the record or the page does not show, and how to see it."""
    if record.module is not None:
        yield "the trace of a module keeps shapes and no matrices, so no head is drawn"
        return
    if record.model is not None:
        layers = chosen_layers(record, options)
        without = [layer.inspected for layer in layers if not layer.is_drawable]
        if without:
            yield f"not drawn, because the record has neither pattern nor map: {names_of(without)}; --keep-limit makes room"
        types = [f"layer {skipped.layer} ({visible(skipped.type)})" for skipped in record.model.without]
        if types:
            yield f"without an attention matrix: {', '.join(types)}"
    elif not view.heads:
        yield "the pattern is not in this record, so no head is drawn; --keep pattern keeps it, --keep-limit makes room"
    if any("pattern" not in head.record.arrays and _block(head) > 1 for head in view.heads):
        yield "mha heads stores means of blocks, never whole matrices; mha run stores every cell if the text is short enough"
    if options.words:
        yield "tokens are drawn as they are; words are merged in the terminal only"
    yield from _left_out(record, options, view)


def _left_out(record: Record, options: ViewOptions, view: PageView) -> Iterator[str]:
    """What the options left out."""
    if options.heads is not None:
        yield f"shown: {'heads' if len(options.heads) > 1 else 'head'} {ranges(options.heads)} only, as chosen"
    if options.layers is not None:
        yield f"shown: {names_of([layer.inspected for layer in chosen_layers(record, options)])} only, as chosen"
    if len(view.sequences) < len(record.sequences):
        noun = "sequences" if len(view.sequences) > 1 else "sequence"
        yield f"shown: {noun} {ranges(view.sequences)} of {len(record.sequences)} only, as chosen"
