"""The terminal view of a corpus: documents, distributions of statistics, sink tokens, and strongest cells."""

from __future__ import annotations

import re
from dataclasses import replace

from support.checkpoint_views import RECORDS, view

from mhacli.render.base.options import ViewOptions
from mhacli.render.page.document import page
from mhacli.results.record.corpus import BadEntry, CorpusCell, CorpusHead, CorpusSummary, Spread, TokenSink
from mhacli.results.record.head_statistics import STATISTICS
from mhacli.results.record.record import Record


def corpus_of(record: Record) -> CorpusSummary:
    """A corpus of 1,234 documents, in which head 1 of layer 2 is told apart from the others."""

    def own(layer: int, head: int) -> CorpusHead:
        is_one = (layer, head) == (2, 1)
        spreads = [
            Spread(row.field, 1234, 0.5, 0.1, 0.491, 0.512, (0.1, 0.2, 0.3, 0.4, 0.876))
            for row in STATISTICS
            if row.heading
        ]
        cell = CorpusCell("c.jsonl", 77, 9, 4, "\x1b[2Jred", "blue", 0.91, 44.0)
        sinks = (TokenSink("\u202ecat", 617, 0.3),) if is_one else ()
        name = next(known.attention for known in record.heads if known.layer == layer)
        return CorpusHead(layer, name, head, 0.25 if is_one else 0.75, {}, tuple(spreads), sinks, (cell,))

    heads = tuple(own(head.layer, head.head) for head in record.heads)
    return CorpusSummary(1234, 98765, 3, 512, "c.jsonl", 17, ("cpu AVX2",), heads, (BadEntry("c.jsonl", 4, "empty"),))


RECORD = replace(RECORDS["heads"], corpus=corpus_of(RECORDS["heads"]))


def flat(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_the_header_says_how_many_documents_there_are_and_which_is_the_example() -> None:
    words = flat(view(RECORD))
    assert "1,234 documents with 98,765 tokens, 512 at most" in words
    assert "3 bad ones left out" in words
    assert "patterns of one document, c.jsonl:17" in words
    assert "cpu AVX2" not in words


def test_the_header_and_the_page_name_the_devices_where_there_are_several() -> None:
    record = replace(RECORD, corpus=replace(corpus_of(RECORD), devices=("cpu AVX2", "cuda <H100>")))
    assert "on different devices: cpu AVX2, cuda <H100> ·" in flat(view(record))
    assert "on different devices: cpu AVX2, cuda &lt;H100&gt;" in page(record, ViewOptions())


def test_sinks_are_named_by_their_tokens_with_the_part_of_the_documents() -> None:
    assert "“\\u202ecat” in 1 head, in 50 % of the documents at most (layer.head 2.1)" in flat(view(RECORD))


def test_a_row_says_how_the_statistic_of_the_type_spreads() -> None:
    (row,) = [line.split() for line in view(RECORD, layers=((None, 2),), heads=(1,)) if ".491" in line]
    assert row[:3] == ["2", "1", "25"]
    assert row[-7:] == [".500", ".491", "to", ".512", ".100", "to", ".876"]


def test_four_heads_are_listed_and_all_on_request() -> None:
    assert len(RECORD.heads) > 4
    for options, n in (({}, 4), ({"everything": True}, len(RECORD.heads))):
        spreads = [line for line in view(RECORD, **options) if ".491 to .512" in line]
        assert len(spreads) == n


def test_a_page_says_how_many_documents_there_are_and_how_statistics_spread() -> None:
    drawn = page(RECORD, ViewOptions())
    assert re.search(r"<h1><bdi>attention in [^<]+: 1,234 documents</bdi></h1>", drawn)
    section = drawn[drawn.index('id="documents"') : drawn.index("</section>", drawn.index('id="documents"'))]
    assert section.count(".491 to .512") == len(RECORD.heads)
    assert "<caption>means over documents; " in drawn


def with_removals() -> Record:
    """The record with the effects of removing each head."""
    corpus = corpus_of(RECORDS["heads"])

    def with_effects(own: CorpusHead) -> CorpusHead:
        mean = -1.5 if (own.layer, own.head) == (2, 1) else 0.25
        d_logit = Spread("d_logit", 1234, mean, 0.1, mean - 0.1, mean + 0.1, (-2.5, -2.0, mean, 0.0, 0.5))
        return replace(own, spreads=(*own.spreads, d_logit, replace(d_logit, statistic="kl", mean=0.125)))

    return replace(RECORD, corpus=replace(corpus, heads=tuple(map(with_effects, corpus.heads))))


def test_heads_whose_removal_changes_most_come_first() -> None:
    lines = view(with_removals())
    first = lines.index(next(line for line in lines if line.startswith("removed")))
    assert lines[first + 1].split() == [
        "2.1", "-1.5000", "-1.6000", "to", "-1.4000", "-2.5000", "to", "+0.5000", "0.125",
    ]  # fmt: skip


def test_removals_are_those_of_the_heads_that_are_shown() -> None:
    lines = view(with_removals(), heads=(1,))
    first = lines.index(next(line for line in lines if line.startswith("removed"))) + 1
    names = [line.split()[0] for line in lines[first : lines.index(next(x for x in lines if x.startswith("Δlogit")))]]
    assert names
    assert {name.rpartition(".")[2] for name in names} == {"1"}


def test_cells_that_stand_out_are_named_by_document_and_place_and_made_harmless() -> None:
    words = flat(view(RECORD, layers=((None, 2),), heads=(1,)))
    assert "layer 2, head 1: c.jsonl:77, 9 “\\x1b[2Jred” → 4 “blue”: .91, × 44.0 of uniform" in words
