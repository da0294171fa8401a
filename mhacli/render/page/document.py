"""The page of a record: one HTML file with style, script and numbers, which needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from mhacli.record.heads import UNTYPED
from mhacli.record.record import Record
from mhacli.render.base.format import (
    count_of,
    fitted,
    provenance,
)
from mhacli.render.base.options import ViewOptions, chosen
from mhacli.render.base.selection import chosen_heads, chosen_layers
from mhacli.render.checkpoint.corpus import corpus_tables
from mhacli.render.checkpoint.header import checks_view
from mhacli.render.heads.drawable import DrawableHead, drawable_heads, missing_notes, scale_of
from mhacli.render.page.effects import effects
from mhacli.render.page.elements import (
    WIDE,
    Html,
    content_policy,
    joined,
    lines_of,
    page_part,
    page_script,
    page_style,
    preformatted,
    sentence,
    tag,
    text,
    whole,
)
from mhacli.render.page.payload import LIMIT_BYTES, PageMaps, PageView, page_maps, payload
from mhacli.render.page.tables import head_statistics, walkthrough
from mhacli.render.run.trace import header
from mhacli.text.escape import visible
from mhacli.text.numbers import shown

_RESERVE = 4 << 10
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
    view = PageView(heads, sequences, scale_of(options, heads), options.hide_sinks, begin)
    title, script = _title(record), page_script()
    style = page_style(has_effects=record.effect is not None)
    policy = content_policy(script, style)
    statistics, orders = head_statistics(record, options, heads)
    tables = [effects(record), _documents(record, options), statistics, walkthrough(record)]

    def whole_page(maps: PageMaps, sections: Sequence[Html]) -> str:
        content = tag("script", payload(view, maps, orders), type="application/json", id="record")
        parts = [*_top(record, title), tag("main", joined(sections)), content, tag("script", Html(script))]
        return whole(title, policy, style, joined(parts))

    fixed = [page_part("explore.html"), *tables, _provenance(record)]
    room = LIMIT_BYTES - _RESERVE - len(whole_page(PageMaps(), fixed).encode())
    maps = page_maps(view, inf if options.full else max(room, _LEAST_ROOM))
    sentences = [*notes(record, options, view, maps)]
    first = page_part("explore.html") if heads else _nothing_section(sentences.pop(0))
    noted = [_notes_section(sentences)] if sentences else []
    return whole_page(maps, [first, *tables, *noted, _provenance(record)])


def most_certain(heads: Sequence[DrawableHead]) -> int:
    """The index of the head with the largest excess of its type; 0 if no head has a type."""
    named = [
        (-head.statistics.certainty, place)
        for place, head in enumerate(heads)
        if head.statistics is not None and head.statistics.certainty is not None and head.statistics.kind not in UNTYPED
    ]
    return min(named)[1] if named else 0


def _title(record: Record) -> str:
    """The page's title: the model, the module, or the first text."""
    if record.module is not None:
        return f"shapes of {visible(record.module.target)}"
    what = "decoding" if record.decoding is not None else "attention"
    if record.config.random is not None and record.model is None:
        return f"{what} over random rows"
    model = "" if record.model is None else f" in {visible(record.model.path.rstrip('/').rpartition('/')[2])}"
    if record.corpus is not None:
        return f"{what}{model}: {count_of(record.corpus.n_documents, 'document')}"
    words = " ".join(record.sequences[0].text[: 8 * _TITLE].split())
    cut = fitted(visible(words), _TITLE)
    more = f" and {count_of(len(record.sequences) - 1, 'text')} more" if len(record.sequences) > 1 else ""
    return f"{what}{model}: “{cut}”{more}"


def _top(record: Record, title: str) -> list[Html]:
    """The head of the page: title, configuration, and controls."""
    origin = tag("div", *(tag("p", line) for line in lines_of(header(record, WIDE), WIDE.width)), id="origin")
    skip = tag("a", text("to the chosen head"), href="#chosen", class_="skip scripted")
    return [
        skip,
        tag("header", tag("h1", tag("bdi", text(title))), origin, page_part("controls.html"), id="top"),
        tag("noscript", tag("p", text(_NO_SCRIPT), class_="warning")),
    ]


def _nothing_section(why: str) -> Html:
    return tag("section", tag("p", sentence(why), class_="warning"), id="nothing")


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


def notes(record: Record, options: ViewOptions, view: PageView, maps: PageMaps) -> Iterator[str]:
    """The notes on the pictures, one sentence each. The first says why no head is drawn, if so."""
    if maps.maps:
        yield _cell(maps)
        yield _exactness(view, maps)
        yield from _signs(view, maps)
    yield from _missing(record, options, view)


def _cell(maps: PageMaps) -> str:
    blocks = sorted({each["block"] for each in maps.maps})
    if blocks == [1]:
        return "a cell is the attention weight that a query (row) gives to a key (column)"
    sizes = " or ".join(f"{n} × {n}" for n in blocks)
    return f"a cell stands for {sizes} tokens: the attention that the queries of a row give, on average, to all keys of a column"


def _exactness(view: PageView, maps: PageMaps) -> str:
    """What the page has of the record's numbers."""
    rounded = ", rounded to 32-bit floats" if view.bits > 32 else ""
    if maps.factor == 1:
        return f"attention weights are as the record holds them{rounded}"
    kept = f", and the strongest keys, {maps.n_keys} of every query, with their weights{rounded}"
    also = kept if maps.n_keys else ""
    limit = f"so that the page stays about {shown(LIMIT_BYTES, 'bytes')}"
    return f"the page has the means of blocks{also}, {limit}; --full stores every cell"


def _signs(view: PageView, maps: PageMaps) -> Iterator[str]:
    """Which cells are no plain attention weight, and what they mean."""
    if not any(each["sinks"] for each in maps.maps):
        yield "no key is a sink"
    elif view.hide_sinks:
        yield "sinks are taken out: the rest of the row is renormalised, and their weight stands in a separate column"
    if any(each["learned"] for each in maps.maps):
        yield "rows of heads with a sink logit sum to less than 1, and entropy counts it as one more key"
    if any(each["masked"] for each in maps.maps):
        yield "grey cells are masked, which is different from a small weight"
    missing = sum(each["missing"] for each in maps.maps)
    if missing:
        yield f"{count_of(missing, 'cell')} marked ? {'are' if missing > 1 else 'is'} not a number"


def _missing(record: Record, options: ViewOptions, view: PageView) -> Iterator[str]:
    """What the record or the page does not show, and how to see it."""
    if record.module is not None:
        yield "the trace of a module keeps shapes and no matrices, so no head is drawn"
        return
    yield from missing_notes(record, options)
    if record.model is None and not view.heads:
        yield "the pattern is not in this record, so no head is drawn; --keep pattern keeps it, --keep-limit makes room"
    if any(not head.is_exact for head in view.heads):
        yield "mha heads stores means of blocks, which show sinks only at the first token; mha run stores every cell"
    if options.words:
        yield "tokens are drawn as they are; words are merged in the terminal only"
