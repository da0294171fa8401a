"""The page of a record: one HTML file with style, script and numbers, which needs no network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from mhacli.numbers import shown
from mhacli.record.heads import UNTYPED
from mhacli.record.record import CheckpointRecord, CodeRecord, DecodingRecord, Record, is_a
from mhacli.render.base.doc import pairs
from mhacli.render.base.format import count_of, fitted, provenance
from mhacli.render.base.options import ViewOptions, chosen
from mhacli.render.base.selection import (
    DrawableHead,
    chosen_heads,
    chosen_layers,
    drawable_heads,
    missing_notes,
    scale_of,
)
from mhacli.render.checkpoint.header import checks_view
from mhacli.render.checkpoint.view import corpus_tables
from mhacli.render.heads.head_map import cell_meaning
from mhacli.render.run.trace import header
from mhacli.text.escape import visible

from .elements import (
    WIDE,
    Html,
    content_policy,
    joined,
    page_part,
    page_script,
    paragraphs,
    preformatted,
    section,
    sentence,
    table,
    tag,
    text,
    whole,
)
from .payload import page_data, script_safe
from .tables import effects, head_statistics, walkthrough

LIMIT_BYTES = 1 << 20
"""The largest size of a page if possible: small enough for a mail, a ticket, a chat."""
_RESERVE = 16 << 10
"""Bytes for what stands beside maps: their notes, colours and words."""
_LEAST_ROOM = LIMIT_BYTES // 4
"""Bytes for maps even if tokens and tables alone fill the page."""
_TITLE = 80
_NO_SCRIPT = (
    "Without JavaScript this page shows no patterns: their numbers are in it, packed. What follows"
    " can be read without."
)


def page(record: Record, options: ViewOptions) -> str:
    """The whole page as text. Raises `UsageError` for a head, layer or sequence that the record
    lacks.

    Its size is at most `LIMIT_BYTES` if possible, unless `options.full`. The page says how that
    reduced precision.
    """
    heads = drawable_heads(record, options)
    sequences = chosen(options.sequences, len(record.sequences), 1, True, "sequence").shown
    title = _title(record)
    script = page_script()
    statistics, orders = head_statistics(record, options, heads)
    steps = walkthrough(record)
    tables = [_documents(record, options), statistics]
    if "trace" in record.command[:2]:
        answer = steps
    else:
        answer = effects(record)
        tables.append(steps)
    tables.append(_provenance(record))
    begin = 0 if options.heads is not None else most_certain(heads)

    def whole_page(data: Mapping[str, Any], sections: Sequence[Html]) -> str:
        content = script_safe({**data, "begin": begin, "orders": orders})
        numbers = tag("script", content, type="application/json", id="record")
        parts = [
            *_top(record, title),
            tag("main", joined(sections)),
            numbers,
            tag("script", Html(script)),
        ]
        return whole("".join(title), content_policy(script), page_part(".css"), joined(parts))

    scale = scale_of(options, heads)
    fixed = len(whole_page({}, [answer, page_part("explore.html"), *tables]).encode())
    room = inf if options.full else max(LIMIT_BYTES - _RESERVE - fixed, _LEAST_ROOM)
    data = page_data(heads, sequences, scale, room, hides_sinks=options.hide_sinks)
    pictures = [page_part("explore.html")] if heads else []
    lines = tag("ul", *(tag("li", sentence(line)) for line in notes(record, options, heads, data)))
    about = section("notes", "about the pictures", lines)
    return whole_page(data, [answer, *pictures, about, *tables])


def most_certain(heads: Sequence[DrawableHead]) -> int:
    """The index of the head with the largest excess of its type; 0 if no head has a type."""
    typed = [place for place, head in enumerate(heads) if head.statistics.kind not in UNTYPED]
    return max(typed, key=lambda place: heads[place].statistics.certainty or 0.0, default=0)


def _title(record: Record) -> tuple[str, str]:
    """The page's title, and the words of a text in it, which have a direction of their own."""
    if is_a(record, CodeRecord):
        return "shapes of ", visible(record.module.target)
    what = "decoding" if is_a(record, DecodingRecord) else "attention"
    if record.config.random is not None:
        return f"{what} over random rows", ""
    if is_a(record, CheckpointRecord):
        what += f" in {visible(record.model.path.rstrip('/').rpartition('/')[2])}"
    if record.scan is not None:
        return f"{what}: {count_of(record.scan.n_documents, 'document')}", ""
    if len(record.sequences) > 1:
        what += f" over {len(record.sequences)} texts"
    words = " ".join(record.sequences[0].text[: 8 * _TITLE].split())
    return f"{what}: ", f"“{fitted(visible(words), _TITLE)}”"


def _top(record: Record, title: tuple[str, str]) -> list[Html]:
    """The head of the page: title, configuration, and controls."""
    origin = tag("div", *paragraphs(header(record, WIDE)), id="origin")
    skip = tag("a", text("to the chosen head"), href="#chosen", class_="skip scripted")
    before, words = title
    heading = tag("h1", text(before), tag("bdi", text(words)))
    return [
        skip,
        tag("header", heading, origin, page_part("controls.html"), id="top"),
        tag("noscript", tag("p", text(_NO_SCRIPT), class_="warning")),
    ]


def _documents(record: Record, options: ViewOptions) -> Html:
    """The distributions of statistics and effects over a corpus; empty without one."""
    if record.scan is None:
        return Html("")
    layers = chosen_layers(record, options)
    heads = chosen_heads(record, options)
    views = corpus_tables(record, layers, heads, replace(options, everything=True), WIDE)
    body = (preformatted(view, WIDE.width) for view in views)
    return section("documents", "documents", *body)


def _provenance(record: Record) -> Html:
    """What made the page, and the checks of a checkpoint."""
    origin = table(pairs(provenance(record), title="what made this page"))
    checks = []
    if is_a(record, CheckpointRecord):
        checks = paragraphs(checks_view(record, WIDE, in_detail=True))
    return section("provenance", "provenance", origin, *checks)


# -------------------------------------------------------------------------------------------- notes


def _precision(data: Mapping[str, Any]) -> str:
    """What a cell means, and with how many digits the page has it."""
    block = max(cells["block"] for cells in data["maps"])
    if data["precision"] == "exact":
        return f"{cell_meaning(block)}, as the record holds it, in 32 bits"
    weights = "every cell"
    if data["factor"] > 1:
        weights = f"the mean of {block} × {block} tokens"
        if data["n_keys"]:
            n_keys = count_of(data["n_keys"], "strongest key")
            weights += f", and the {n_keys} of every query with weights"
    return (
        f"{cell_meaning(block)}; the page has {weights} {data['precision']}, so that it stays about"
        f" {shown(LIMIT_BYTES, 'bytes')}; --full stores every weight with all digits"
    )


def notes(
    record: Record, options: ViewOptions, heads: Sequence[DrawableHead], data: Mapping[str, Any]
) -> Iterator[str]:
    """The notes on the pictures, one sentence each. The first says why no head is drawn, if so."""
    if heads:
        yield _precision(data)
    if is_a(record, CodeRecord):
        yield "the trace of a module keeps shapes and no matrices, so no head is drawn"
        return
    yield from missing_notes(record, options)
    if not heads and not is_a(record, CheckpointRecord):
        yield (
            "the pattern is not in this record, so no head is drawn; --keep pattern keeps it,"
            " --keep-limit makes room"
        )
    in_blocks = [head.layer.inspected for head in heads if not head.layer.has_pattern]
    if any(layer.survey.block > 1 for layer in in_blocks):
        yield (
            "mha heads stores means of blocks, which show sinks only at the first token; mha run"
            " stores every cell"
        )
    if options.words:
        yield "tokens are drawn as they are; words are merged in the terminal only"
