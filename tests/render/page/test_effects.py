"""Effects as HTML, in the page and in a notebook: numbers, colours and order are those of the record."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest
from support.effects_made import SUMMARY, VERIFIED, edge_effect, head_effect, with_effects
from support.html_read import TableReader

from mhacli.render.base.options import ViewOptions
from mhacli.render.figures.document import figure
from mhacli.render.page.document import page
from mhacli.results.record.record import Record

CHANGES = {(0, 0): -1.0, (0, 1): 0.25, (0, 2): 0.0, (1, 2): -0.5}
LESS, NONE, MORE = (86, 180, 233), (68, 68, 68), (230, 159, 0)
LIMIT = 200_000


def heads() -> Record:
    return with_effects(*(head_effect(*place, change) for place, change in CHANGES.items()))


def edges() -> Record:
    return with_effects(edge_effect(0, -1.0), edge_effect(1, 0.0), edge_effect(2, 0.5))


def colour(change: float) -> list[float]:
    end = LESS if change < 0 else MORE
    return [none + (own - none) * abs(change) for none, own in zip(NONE, end, strict=True)]


def rgb(name: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(name))


def page_section(record: Record) -> tuple[str, dict[str, tuple[int, ...]]]:
    """The section of effects, and the colours of its classes."""
    html = page(record, ViewOptions())
    colours = {name: rgb(own) for name, own in re.findall(r"#effects \.(c\d+) \{ background: #(\w{6})", html)}
    return html.partition('<section id="effects">')[2].partition("</section>")[0], colours


def tokens_of(html: str) -> list[tuple[str, str]]:
    """The attributes and words of the tokens that are drawn."""
    (read,) = re.findall(r'<p class="read">(.*?)</p>', html, re.DOTALL)
    return [(tag, unescape(word)) for tag, word in re.findall(r"<span ([^>]*)>([^<]*)</span>", read)]


@pytest.mark.parametrize(
    "html", [lambda: page_section(heads())[0], lambda: heads()._repr_html_()], ids=["page", "notebook"]
)
def test_the_table_of_heads_has_the_changes_of_the_record(html) -> None:
    grid, ranked, *_ = TableReader(html()).tables
    assert grid == [["head", "0", "1", "2"], ["0", "-1.00", ".25", "0"], ["1", "", "", "-.50"]]
    place = ranked[0].index("Δlogit")
    assert [(row[0], float(row[place])) for row in ranked[1:]] == [
        ("0.0", -1),
        ("1.2", -0.5),
        ("0.1", 0.25),
        ("0.2", 0),
    ]


def test_cells_of_a_notebook_carry_their_colour_and_every_number() -> None:
    shown = TableReader(heads()._repr_html_())
    styles, titles = shown.styles[0], shown.titles[0]
    for (layer, head), change in CHANGES.items():
        found = rgb(re.search(r"background:#(\w{6})", styles[1 + layer][1 + head])[1])
        assert found == pytest.approx(colour(change), abs=2)
        assert float(re.search(r"Δlogit ([-+.\d]+)", titles[1 + layer][1 + head])[1]) == change


def test_tokens_have_the_colour_of_what_the_loss_of_their_edge_changes() -> None:
    record, expected = edges(), [colour(change) for change in (-1.0, 0.0, 0.5)]
    html, classes = page_section(record)
    in_page, in_notebook = tokens_of(html), tokens_of(record._repr_html_())
    assert [word for _, word in in_page] == [word for _, word in in_notebook] == [*record.sequences[0].tokens[:3]]
    for own, (of_page, _), (of_notebook, _) in zip(expected, in_page, in_notebook, strict=True):
        assert classes[re.search(r'class="(c\d+)"', of_page)[1]] == pytest.approx(own, abs=4)
        assert rgb(re.search(r"background:#(\w{6})", of_notebook)[1]) == pytest.approx(own, abs=2)


def test_the_page_has_no_style_of_an_elements_own() -> None:
    assert "style=" not in page_section(heads())[0]


def test_a_notebook_stays_small_and_static_for_many_heads() -> None:
    many = with_effects(*(head_effect(0, head % 3, 0.5) for head in range(4000)))
    html = many._repr_html_()
    assert len(html.encode()) < LIMIT
    assert not re.search(r"<script|<iframe|<img|http", html)


@pytest.mark.parametrize("html", [lambda r: page_section(r)[0], Record._repr_html_], ids=["page", "notebook"])
def test_without_proof_no_number_is_shown(html) -> None:
    failed = replace(SUMMARY, verified=replace(VERIFIED, max_abs_error=1.0, ok=False))
    shown = html(with_effects(head_effect(0, 0, -1.2345), summary=failed))
    assert "1.23" not in shown
    assert "NOT verified" in shown


def test_tokens_and_spans_are_harmless_on_every_surface() -> None:
    bad = "\x1b[31m<b>[red]\u202e\u200b&\x00"
    spans = replace(
        edge_effect(0, 2.0), removed="spans", head=None, query=None, key=None, spans=(bad, bad), layers=(0,)
    )
    record = with_effects(edge_effect(0, 1.0), spans, summary=replace(SUMMARY, target=bad))
    text = record.sequences[0]
    record = replace(record, sequences=(replace(text, tokens=(bad,) * len(text.tokens)),))
    for shown in (page_section(record)[0], record._repr_html_(), figure(record, ViewOptions())):
        assert not re.search("[\x00\x1b\u202e\u200b]|<b>.red", shown)
        assert r"\x1b[31m" in shown
