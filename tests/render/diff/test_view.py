"""The view of a comparison: a one-line verdict, every difference in its place, and exact pictures."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text
from support.heads_made import surveyed
from support.layers_made import layered, text_of
from support.records import drawn, make_record, make_sequence

from mhacli.errors import UsageError
from mhacli.render.base.colours import change_colour
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.diff.json import json_pieces
from mhacli.render.diff.maps import aligned_maps, require_drawable
from mhacli.render.diff.view import diff_view
from mhacli.render.diff.words import verdict_text
from mhacli.render.heads.drawable import drawable_heads
from mhacli.render.heads.head_map import head_map
from mhacli.results.diff.compare import compare
from mhacli.results.record.record import Record, UserModule

TEXT = ("the", "cat", "sat", "on", "it")
WIDTHS = [20, 80, 200]
HOSTILE = ("\x1b[31mred", "\u202eevil", "[bold]b[/bold]", "漢字漢字", "\n", "a\u200b", "=1")
A = make_record(TEXT, causal=True, n_heads=3)
_FIRST = A.trace[0]
WALKED = replace(A, trace=(*(replace(_FIRST, site=name, shape=(1, 5)) for name in ("ids", "embed")), *A.trace))
"""With steps whose numbers the record does not hold."""


def with_cell(record: Record, name: str, place: tuple[int, ...], value: float) -> Record:
    array = record.arrays[name].copy()
    array[place] = value
    return replace(record, arrays={**record.arrays, name: array})


def view(a: Record, b: Record, width: int = 80, *, colour: bool = False, names=("a.st", "b.st"), **options):
    found = compare(a, b)
    shown = diff_view(
        found, (a, b), names, options=ViewOptions(view="heatmap", **options), screen=Screen(width, colour)
    )
    if not colour:
        return drawn(shown, width)
    with (console := Console(width=width, color_system="truecolor", force_terminal=True)).capture() as paper:
        console.print(shown)
    return paper.get().split("\n")


DIFFER = "A and B differ; the first difference is in "


def said(a: Record, b: Record, **options) -> str:
    return verdict_text(compare(a, b, **options), a, b)


# --------------------------------------------------------------------------------------------------------------------- verdict


def test_records_that_agree_say_in_how_many_sites_and_how_far_they_are_apart() -> None:
    assert said(A, A) == "A and B agree in 8 sites, bit for bit"
    value = A.arrays["z"][0, 1, 2, 1]
    b = with_cell(A, "z", (0, 1, 2, 1), np.nextafter(value, np.float32(9)))
    gap = float(b.arrays["z"][0, 1, 2, 1]) - float(value)
    relative = gap / max(abs(A.arrays["z"]).max(), abs(b.arrays["z"]).max())
    expected = f"bit for bit in 7; the largest relative difference is {relative:.2e} in z (tolerance 1e-05)"
    assert said(A, b) == f"A and B agree in 8 sites, {expected}"


def test_records_that_differ_say_where_first_and_by_how_much() -> None:
    b = with_cell(A, "pattern", (0, 2, 3, 1), 0.875)
    gap = abs(0.875 - float(A.arrays["pattern"][0, 2, 3, 1]))
    expected = f"largest difference {gap:.4g} at head 2, query 3 “on”, key 1 “cat”; tolerance 1e-05 × 1"
    assert said(A, b) == f"{DIFFER}pattern ({expected})"


def test_the_verdict_names_the_layer_and_the_sequence_where_there_are_several() -> None:
    a = layered(text_of(TEXT), text_of(TEXT[:2]), n_layers=2)
    b = with_cell(a, "layers.1.entropy", (1, 3, 2), 9.0)
    assert said(a, b).startswith(f"{DIFFER}layer 1 entropy (largest difference ")
    assert "at sequence 1, head 3, query 2 “cat”;" in said(a, b)


@pytest.mark.parametrize(
    ("b", "expected"),
    [
        (
            with_cell(A, "out", (0, 1, 2), np.nan),
            "out (1 number finite in only one of the records, the first at query 1 “cat”, head·d_v 2)",
        ),
        (
            with_cell(A, "allowed", (0, 0, 4, 1), 0),
            "the mask (1 cell visible only in A, 0 only in B, the first at query 4 “it”, key 1 “cat”)",
        ),
        (make_record(TEXT, causal=True, n_heads=2), "qk (3 heads against 2)"),
        (
            replace(
                A, sequences=(make_sequence(("the", "dog", "sat", "on", "it"), ("it", "on", "sat", "the", "dog")),)
            ),
            "the tokens: 1 token replaced (1 “cat” by “dog”), 4 tokens with another id in the vocabulary",
        ),
        (
            replace(A, sequences=(replace(A.sequences[0], ids=(7, *A.sequences[0].ids[1:])),)),
            "the tokens: 1 token with another id in the vocabulary",
        ),
    ],
    ids=["nan", "mask", "heads", "tokens", "ids"],
)
def test_every_kind_of_departure_has_its_words(b: Record, expected: str) -> None:
    assert said(A, b) == f"{DIFFER}{expected}"


def test_a_token_at_another_place_in_b_is_reported_with_both() -> None:
    vocabulary = sorted({*TEXT, "well"})
    a = replace(A, sequences=(make_sequence(TEXT, vocabulary),))
    longer = make_record(("well", *TEXT), causal=True, n_heads=3, seed=1)
    b = replace(longer, sequences=(make_sequence(("well", *TEXT), vocabulary),))
    line = said(a, b)
    assert line.startswith(f"{DIFFER}the tokens: 1 token only in B (0 “well”); the first numbers that differ are in ")
    assert re.search(r"query \d “\w+” \(\d in B\)", line)


# ---------------------------------------------------------------------------------------------------------------------- tables


def test_the_last_line_is_the_result_in_a_sentence() -> None:
    b = with_cell(A, "pattern", (0, 2, 3, 1), 0.875)
    assert view(A, b, 200)[-1] == compare(A, b).summary
    assert json.loads("".join(json_pieces(compare(A, b), (A, b), ("a", "b"), ())))["summary"] == compare(A, b).summary


@pytest.mark.parametrize("width", WIDTHS)
def test_who_is_who_comes_first_then_the_verdict_and_what_is_the_same_in_both(width: int) -> None:
    b = replace(A, config=replace(A.config, seed=5), environment=replace(A.environment, torch="2.9.9"))
    lines = view(A, b, width)
    text = " ".join(" ".join(lines).split())
    assert text.startswith("A = a.st B = b.st A and B agree in 8 sites, bit for bit the same in both: dtype float32")
    rows = [line.split() for line in lines]
    assert ["seed", "0", "5"] in rows
    assert ["torch", "2.6.0", "2.9.9"] in rows


def test_every_site_has_its_row_in_the_order_of_execution() -> None:
    b = with_cell(with_cell(A, "scores", (0, 0, 2, 1), 3.5), "out", (0, 1, 7), np.nan)
    lines = view(A, b, 120)
    start = next(i for i, line in enumerate(lines) if line.startswith("site  "))
    rows = {line.split()[0]: line for line in lines[start + 1 : start + 9]}
    assert [*rows] == ["qk", "mask", "scores", "pattern", "entropy", "strongest_key", "z", "out"]
    gap = abs(3.5 - float(A.arrays["scores"][0, 0, 2, 1]))
    largest = max(np.abs(r.arrays["scores"][np.isfinite(r.arrays["scores"])]).max() for r in (A, b))
    assert rows["scores"].split()[:6] == ["scores", "45", "1", f"{gap:.4g}", f"{gap / largest:.4g}", "DIFFERS"]
    assert rows["scores"].endswith("head 0, query 2 “sat”, key 1 “cat”")
    assert "1 number finite in only one; query 1 “cat”, head·d_v 7" in rows["out"]
    assert all("same bits" in rows[name] for name in ("qk", "mask", "pattern", "entropy", "strongest_key", "z"))


def test_of_several_layers_each_has_a_line_and_the_first_that_departs_its_sites() -> None:
    a = layered(text_of(TEXT), n_layers=3)
    b = with_cell(a, "layers.1.lse", (0, 2, 3), 4.0)
    lines = view(a, b)
    table = [line.split() for line in lines if re.match(r"layer \d  ", line)]
    assert [row[-1] for row in table] == ["–", "lse", "–"]
    assert [row[5] for row in table] == ["0", "1", "0"]
    assert sum(line.startswith("layer 1 · site by site") for line in lines) == 1
    assert not any(line.startswith("layer 0 · site by site") for line in lines)
    assert sum("site by site" in line for line in view(a, b, everything=True)) == 3


def test_sites_and_heads_are_those_of_the_chosen_layers() -> None:
    a, b = (layered(text_of(TEXT), n_layers=3, seed=seed) for seed in (0, 1))
    lines = view(a, b, layers=((None, 1),))
    assert [line.split(" · ")[0] for line in lines if " · site by site" in line] == ["layer 1"]
    assert not any("layer by layer" in line for line in lines)
    listed = {line.split(" head ")[0] for line in lines if re.match(r"layer \d head \d", line)}
    assert listed == {"layer 1"}
    both = view(a, b, layers=((None, 1), ("self", 2)))
    assert [line.split()[1] for line in both if re.match(r"layer \d  ", line)] == ["1", "2"]


def test_changed_heads_show_their_kind_and_what_changed_most() -> None:
    heads = [replace(head, sink=0.25, previous=0.5, near=0.5) for head in A.heads]
    a = replace(A, heads=tuple(heads))
    b = replace(a, heads=(heads[0], replace(heads[1], sink=0.75, kind="sink", entropy=0.5), heads[2]))
    lines = view(a, b, 120)
    row = next(line for line in lines if line.startswith("head 1  "))
    assert "mixed → first token" in row
    assert "first-token weight .25 → .75 · entropy 0.80 → 0.50 nats" in row
    assert not any(line.startswith(("head 0  ", "head 2  ")) for line in lines)


def test_more_heads_than_fit_are_counted_and_all_shows_them() -> None:
    a = make_record(TEXT, n_heads=13)
    b = replace(a, heads=tuple(replace(head, sink=0.5) for head in a.heads))
    a = replace(a, heads=tuple(replace(head, sink=head.head / 100) for head in a.heads))
    shown = [line.split()[1] for line in view(a, b) if re.match(r"head \d+ ", line)]
    assert shown == [str(n) for n in range(4)]
    assert "⋮ 9 heads more (--all)" in view(a, b)
    assert len([line for line in view(a, b, everything=True) if re.match(r"head \d+ ", line)]) == 13


def test_tokens_that_are_others_stand_among_those_that_are_the_same() -> None:
    b = make_record(("the", "big", "dog", "sat", "on", "it", "too"), causal=True, n_heads=3)
    lines = view(A, b)
    assert "  the -cat +big +dog sat on it" in lines
    assert "  … sat on it +too" in lines
    assert any("4 tokens are the same, of 5 in A and 7 in B" in line for line in lines)


def test_a_site_before_which_no_number_is_known_is_reported_as_the_first_that_both_hold() -> None:
    b = with_cell(WALKED, "qk", (0, 1, 2, 0), 3.5)
    assert said(A, with_cell(A, "qk", (0, 1, 2, 0), 3.5)).startswith(f"{DIFFER}qk (largest difference ")
    assert said(WALKED, b).startswith(
        f"{DIFFER}qk, the first site whose numbers both records hold (largest difference "
    )
    later = with_cell(WALKED, "scores", (0, 1, 2, 0), 3.5)
    assert said(WALKED, later).startswith(f"{DIFFER}scores (largest difference ")
    a = layered(text_of(TEXT), n_layers=2)
    assert ", the first site whose" in said(a, with_cell(a, "layers.0.max_score", (0, 1, 2), 99.0))
    assert ", the first site whose" not in said(a, with_cell(a, "layers.1.max_score", (0, 1, 2), 99.0))


def test_numbers_of_tokens_are_no_numbers_that_records_lack() -> None:
    lines = [line for line in view(WALKED, WALKED) if line.startswith("same shape, numbers not saved: ")]
    assert lines == ["same shape, numbers not saved: embed"]
    text = A.sequences[0]
    b = replace(
        make_record(TEXT, TEXT, causal=True, n_heads=3), sequences=(replace(text, ids=(9, *text.ids[1:])), text)
    )
    expected = "the tokens: 1 against 2 sequences, 1 token with another id in the vocabulary"
    assert said(A, b).startswith(f"{DIFFER}{expected}")


def test_layers_that_one_alone_has_are_reported_in_lines_of_their_own() -> None:
    lines = view(layered(text_of(TEXT), n_layers=3), A)
    start = next(i for i, line in enumerate(lines) if line.startswith("layer by layer "))
    assert lines[start + 1 : start + 3] == ["only in A: layers 0–2", "the records have no layer in common"]


def test_maps_say_how_many_of_their_cells_were_compared() -> None:
    a, b = (layered(text_of(text), n_layers=1) for text in (TEXT, (*TEXT[:2], "dogs", *TEXT[2:])))
    row = next(line for line in view(a, b, 300) if line.startswith("map "))
    assert "; 36 of 196 cells compared: blocks with the same tokens at the same positions" in row


def test_a_change_too_small_for_its_decimals_is_written_out_and_statistics_have_their_names() -> None:
    heads = [replace(head, entropy=1.0, near=0.5) for head in A.heads]
    a = replace(A, heads=tuple(heads))
    b = replace(a, heads=(replace(heads[0], entropy=0.9975), replace(heads[1], near=0.75), heads[2]))
    lines = view(a, b, 120)
    assert next(line for line in lines if line.startswith("head 0  ")).endswith("entropy 1.00 nats, down by 0.0025")
    assert next(line for line in lines if line.startswith("head 1  ")).endswith("weight within 8 tokens .50 → .75")


# -------------------------------------------------------------------------------------------------------------------- pictures


SIGNS_ONLY = 32
"""A screen on which no cell of five columns has room for a number."""


def panels_of(lines: list[str], title: str, n_rows: int, width: int) -> list[list[str]]:
    """The three panels below a title, each its rows of signs; a sign for each cell."""
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    header = lines[start + 1]
    begins = [header.index("A"), header.index("B"), header.index("B − A")]
    rows = [line.ljust(200) for line in lines[start + 3 : start + 3 + n_rows]]
    return [[row[begin : begin + width] for row in rows] for begin in begins]


def test_signs_of_the_change_are_those_of_the_numbers() -> None:
    b = make_record(TEXT, causal=True, n_heads=3, seed=3)
    change = b.arrays["pattern"][0].astype(float) - A.arrays["pattern"][0]
    top = abs(change).max()
    head = int(abs(change).max(axis=(1, 2)).argmax())
    lines = view(A, b, SIGNS_ONLY)
    assert next(line for line in lines if " · largest change" in line).startswith(
        f"head {head} · largest change {top:.4g}"
    )
    signs = panels_of(lines, f"head {head} · ", 5, 5)[2]
    for i in range(5):
        for j in range(5):
            part = change[head, i, j] / top
            expected = "=" if part < -0.51 else "#" if part > 0.51 else "." if abs(part) < 0.045 else ""
            expected = expected or ("-" if -0.49 < part < -0.055 else "+" if 0.055 < part < 0.49 else "")
            sign = signs[i][j]
            assert sign == " " if j > i else not expected or sign == expected, (i, j, part, sign)


def test_numbers_stand_in_cells_that_are_wide_enough() -> None:
    b = with_cell(A, "pattern", (0, 1, 4, 2), 0.0)
    lines = view(A, b, 200, heads=(1,))
    before, after, change = (rows[4].split() for rows in panels_of(lines, "head 1 · ", 5, 40))
    weight = float(A.arrays["pattern"][0, 1, 4, 2])
    assert before == [f"{x:.2f}".lstrip("0") for x in A.arrays["pattern"][0, 1, 4]]
    assert (after[2], change[2]) == (".00", f"−{weight:.2f}".replace("0.", "."))
    assert {change[j] for j in (0, 1, 3, 4)} == {".00"}


def test_the_change_stands_below_where_numbers_then_fit() -> None:
    b = with_cell(A, "pattern", (0, 1, 4, 2), 0.0)
    lines = view(A, b, heads=(1,))
    header = next(i for i, line in enumerate(lines) if "B − A" in line)
    assert lines[header - 7].split() == ["A", "B"]
    weight = float(A.arrays["pattern"][0, 1, 4, 2])
    assert lines[header + 6].split()[3] == f"−{weight:.2f}".replace("0.", ".")


def test_the_largest_changes_are_named_where_no_number_fits() -> None:
    words = tuple(f"w{n}" for n in range(12))
    a = make_record(words, n_heads=1, causal=True)
    b = with_cell(with_cell(a, "pattern", (0, 0, 7, 2), 2.0), "pattern", (0, 0, 9, 4), 1.5)
    before = [f"{a.arrays['pattern'][0, 0, i, j]:.2f}".lstrip("0") for i, j in ((7, 2), (9, 4))]
    named = next(line for line in view(a, b, 100) if line.startswith("largest changes: "))
    assert named.split(": ")[1].split(" · ") == [
        f"7 “w7” → 2 “w2” from {before[0]} to 2.00", f"9 “w9” → 4 “w4” from {before[1]} to 1.50"
    ]  # fmt: skip


def backgrounds(line: str) -> list[tuple[int, ...] | None]:
    """The background colour of each character of a line."""
    text = Text.from_ansi(line)
    found: list[tuple[int, ...] | None] = [None] * len(text)
    for span in text.spans:
        colour = getattr(span.style, "bgcolor", None)
        if colour is not None and colour.triplet is not None:
            found[span.start : span.end] = [tuple(colour.triplet)] * (span.end - span.start)
    return found


def test_colours_of_the_change_are_blue_for_less_orange_for_more_and_grey_for_none() -> None:
    b = with_cell(with_cell(A, "pattern", (0, 1, 4, 0), 0.0), "pattern", (0, 1, 4, 3), 1.0)
    change = b.arrays["pattern"][0, 1].astype(float) - A.arrays["pattern"][0, 1]
    lines = view(A, b, 80, colour=True, heads=(1,))
    plain = [Text.from_ansi(line).plain for line in lines]
    start = next(i for i, line in enumerate(plain) if line.startswith("head 1 · "))
    header = next(i for i, line in enumerate(plain) if i > start and "B − A" in line)
    begin, width = plain[header].index("B − A"), 7
    top = abs(change).max()
    cells = backgrounds(lines[header + 2 + 4])[begin : begin + 5 * width : width]
    for j, cell in enumerate(cells):
        end = np.array((230, 159, 0) if change[4, j] > 0 else (86, 180, 233))
        expected = np.array((68, 68, 68)) + (end - 68) * abs(change[4, j]) / top
        assert cell is not None
        assert np.abs(np.array(cell) - expected).max() <= 2
    assert cells[1] == (68, 68, 68)
    assert backgrounds(lines[header + 2])[begin + width] is None  # the first query may not see the second key


def test_no_two_changes_look_alike_and_both_ways_are_as_bright() -> None:
    colours = [change_colour(level) for level in (-255, -128, 0, 128, 255)]
    assert len({*colours}) == 5
    assert colours[2] == (68, 68, 68)

    def luminance(colour: tuple[int, int, int]) -> float:  # Source: WCAG 2, relative luminance
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    assert luminance(colours[0]) == pytest.approx(luminance(colours[4]), rel=0.15)
    assert luminance(colours[0]) > 4 * luminance(colours[2])


def test_a_long_text_is_drawn_in_blocks_of_mean_weights_and_mean_changes() -> None:
    words = tuple(f"w{n}" for n in range(90))
    a, b = (make_record(words, n_heads=1, causal=True, seed=seed) for seed in (0, 1))
    lines = view(a, b)
    title = next(line for line in lines if line.startswith("head 0 · "))
    change = b.arrays["pattern"][0, 0].astype(float) - a.arrays["pattern"][0, 0]
    assert title.startswith(f"head 0 · largest change {abs(change).max():.4g} · each mark 5 × 5 tokens")
    means = [
        np.array([[cells[i : i + 5, j : j + 5].mean() * 5 for j in range(0, 90, 5)] for i in range(0, 90, 5)])
        for cells in (record.arrays["pattern"][0, 0].astype(float) for record in (a, b))
    ]
    allowed = np.tri(18, dtype=bool)
    top = max(part[1:].max() for part in means)  # the first row has no choice
    pictures = panels_of(lines, "head 0 · ", 18, 18)
    for part, signs in zip(means, pictures, strict=False):
        for i, j in zip(*allowed.nonzero(), strict=True):
            level = 1 + np.log10(max(part[i, j], top / 1000) / top) / 3
            assert signs[i][j] in {"·░▒▓█"[min(4, int(near * 5))] for near in (level - 0.003, level + 0.003)}
    moved = means[1] - means[0]
    caption = " ".join(lines)
    assert f"B − A: linear, −{abs(moved).max():.4g} … +{abs(moved).max():.4g}: " in caption
    assert "shows their mean weight, in B − A their mean change" in caption
    for i, j in zip(*allowed.nonzero(), strict=True):
        part = moved[i, j] / abs(moved).max()
        signs_near = {
            "." if abs(x) < 0.05 else ("-=" if x < 0 else "+#")[int(abs(x) >= 0.5)]
            for x in (part - 0.003, part + 0.003)
        }
        assert pictures[2][i][j] in signs_near
    assert all(picture[i][j] == " " for picture in pictures for i, j in zip(*(~allowed).nonzero(), strict=True))


def test_the_mean_change_is_of_the_queries_that_are_compared() -> None:
    words = tuple(f"w{n}" for n in range(40))
    a = make_record(words, n_heads=1)
    b = make_record((*words[:6], "new", *words[6:]), n_heads=1, seed=1)
    found = compare(a, b)
    maps = (head_map(drawable_heads(record, ViewOptions())[0], 0) for record in (a, b))
    text = found.texts[0]
    whole = aligned_maps(*maps, text, text)
    assert whole is not None
    part = whole.fitting(21, 21)
    assert part.block == 2
    rows = whole.change[6:8]  # a token that B alone has, and one that both have
    assert np.isnan(rows[0]).all()
    assert part.change[3, 5] == pytest.approx(rows[1, 10] + rows[1, 11])
    assert part.change[0, 0] == pytest.approx(whole.change[:2, :2].sum() / 2)
    assert part.a.weights[0, 0] == pytest.approx(a.arrays["pattern"][0, 0, :2, :2].sum() / 2)


def test_ranks_are_those_among_the_cells_of_all_pictures() -> None:
    b = replace(A, arrays={**A.arrays, "pattern": A.arrays["pattern"] / 16})
    lines = view(A, b, SIGNS_ONLY, heads=(1,), map_scale="rank")
    allowed = np.tril(np.ones((5, 5), bool))
    weights = [record.arrays["pattern"][0, 1].astype(float) for record in (A, b)]
    order = sorted(value for cells in weights for value in cells[allowed])
    for cells, signs in zip(weights, panels_of(lines, "head 1 · ", 5, 5), strict=False):
        for i, j in zip(*allowed.nonzero(), strict=True):
            place = order.index(cells[i, j]) / (len(order) - 1)
            assert signs[i][j] in {"·░▒▓█"[min(4, int(near * 5))] for near in (place - 0.002, place + 0.002)}
    caption = lines[next(i for i, line in enumerate(lines) if line.startswith("A and B: ")) :]
    assert " ".join(caption).startswith("A and B: rank, the smallest … the largest of 30 cells, the same for all: ")


def test_the_scale_says_that_rows_without_a_choice_have_more_than_its_end() -> None:
    b = with_cell(A, "pattern", (0, 1, 3, 1), 0.25)
    rows = [record.arrays["pattern"][0, 1, 1:].astype(float) for record in (A, b)]
    caption = next(line for line in view(A, b, 200, heads=(1,)) if line.startswith("A and B: "))
    assert caption.startswith(f"A and B: linear, 0 … {max(row.max() for row in rows):.4g} or more, the same for all: ")
    full = make_record(TEXT, n_heads=3)
    caption = next(line for line in view(full, full, 200, heads=(1,)) if line.startswith("A and B: "))
    assert "or more" not in caption
    assert "B − A: no change of a number" in view(full, full, 200, heads=(1,))


def test_of_two_attentions_of_a_layer_the_one_that_changed_is_drawn() -> None:
    a = layered(text_of(TEXT), n_layers=2)
    a = replace(
        a,
        layers=(a.layers[0], replace(a.layers[1], layer=0)),
        heads=tuple(replace(head, layer=0) for head in a.heads),
    )
    b = with_cell(a, "layers.1.pattern", (0, 2, 3, 1), 0.875)
    gap = abs(0.875 - float(a.arrays["layers.1.pattern"][0, 2, 3, 1]))
    assert said(a, b).startswith(f"{DIFFER}layer 0, attention 2 pattern (")
    titles = [line for line in view(a, b) if " · largest change" in line]
    assert [title.split(" ─")[0] for title in titles] == [f"layer 0, attention 2 · head 2 · largest change {gap:.4g}"]


def test_a_head_that_is_requested_and_not_drawn_has_its_reason() -> None:
    assert "no head is drawn: 3 heads against 2" in view(A, make_record(TEXT, causal=True, n_heads=2), heads=(1,))
    bare = replace(A, arrays={"out": A.arrays["out"]})
    expected = "no head is drawn: one of the records does not hold its pattern or map (--keep pattern)"
    assert expected in view(A, bare, 200, sequences=(0,))


def test_maps_of_heads_are_drawn_where_there_is_no_pattern() -> None:
    text = " ".join(f"w{n % 9}" for n in range(300))
    a, b = (surveyed(text, causal=True, seed=seed) for seed in (0, 1))
    lines = view(a, b, heads=(2,))
    title = next(line for line in lines if line.startswith("head 2 · "))
    gap = abs(b.arrays["map"][0, 2].astype(float) - a.arrays["map"][0, 2]).max()
    assert title.startswith(f"head 2 · largest change {gap:.4g} · each mark ")
    assert any(line.startswith("A and B: log, ") for line in lines)


def test_the_row_and_the_column_of_a_replaced_token_hold_the_change() -> None:
    a = make_record(TEXT, n_heads=1)
    b = make_record(("the", "dog", "sat", "on", "it"), n_heads=1, seed=1)
    vocabulary = sorted({*TEXT, "dog"})
    a, b = (replace(one, sequences=(make_sequence(one.sequences[0].tokens, vocabulary),)) for one in (a, b))
    (text,) = compare(a, b).texts
    maps = (head_map(drawable_heads(one, ViewOptions(heads=(0,)))[0], 0) for one in (a, b))
    found = aligned_maps(*maps, text, text)
    assert found is not None
    expected = b.arrays["pattern"][0, 0].astype(float) - a.arrays["pattern"][0, 0].astype(float)
    assert np.allclose(found.change, expected, rtol=0, atol=1e-12)
    assert found.rows[1] == found.columns[1] == "cat|dog"
    shown = " ".join(" ".join(view(a, b, 120)).split())
    assert "those replaced one to one" in shown


def test_rows_of_tokens_that_one_alone_has_are_blank_in_the_other_and_in_the_change() -> None:
    b = make_record(("the", "cat", "sat", "well", "on", "it"), causal=True, n_heads=3)
    lines = view(A, b, SIGNS_ONLY, heads=(1,))
    panels = panels_of(lines, "head 1 · ", 6, 6)
    assert panels[0][3].strip() == panels[2][3].strip() == ""
    assert panels[1][3].strip() != ""
    names = [
        line.split()[0] for line in lines[lines.index(next(x for x in lines if x.startswith("head 1 · "))) + 3 :][:6]
    ]
    assert names == ["the", "cat", "sat", "well", "on", "it"]


def test_what_is_no_number_in_one_alone_is_marked() -> None:
    b = with_cell(A, "pattern", (0, 1, 3, 2), np.nan)
    lines = view(A, b, SIGNS_ONLY, heads=(1,))
    panels = panels_of(lines, "head 1 · ", 5, 5)
    assert "?" not in "".join(panels[0])
    assert panels[1][3][2] == panels[2][3][2] == "?"
    assert "".join(panels[2]).count("?") == 1


def test_heads_are_drawn_as_they_are_chosen_and_those_that_did_not_change_only_then() -> None:
    b = with_cell(A, "pattern", (0, 2, 3, 1), 0.875)
    drawn_ = [line.split(" · ")[0] for line in view(A, b) if " · largest change" in line]
    assert drawn_ == ["head 2"]
    chosen = [line.split(" · ")[0] for line in view(A, b, heads=(0, 1)) if " · largest change" in line]
    assert chosen == ["head 0", "head 1"]
    assert not any(" · largest change" in line for line in view(A, A))


@pytest.mark.parametrize(("options", "message"), [
    ({"heads": (3,)}, "--head 3 "),
    ({"sequences": (1,)}, "--sequence 1 "),
    ({"layers": ((None, 0),)}, "--layer works only with records of a checkpoint"),
])  # fmt: skip
def test_a_choice_that_is_not_there_is_refused(options: dict[str, tuple[int]], message: str) -> None:
    with pytest.raises(UsageError) as fault:
        require_drawable((A, A), ViewOptions(**options))
    assert fault.value.message.startswith(message)


def test_layers_are_chosen_by_number() -> None:
    a = layered(text_of(TEXT), n_layers=3)
    b = layered(text_of(TEXT), n_layers=3, seed=1)
    titles = [line for line in view(a, b, layers=((None, 1),), heads=(0, 3)) if " · largest change" in line]
    assert [title.split(" · ")[:2] for title in titles] == [["layer 1", "head 0"], ["layer 1", "head 3"]]


# --------------------------------------------------------------------------------------------------------------- trust, programs


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("colour", [False, True])
def test_hostile_tokens_show_as_escapes_at_every_width(width: int, colour: bool) -> None:
    a = make_record(HOSTILE)
    b = make_record((*HOSTILE[:2], "\x9b2J", *HOSTILE[2:]), seed=1)
    a = replace(a, command=("mha", "\x1b]0;evil\x07"))
    lines = view(a, b, width, colour=colour, names=("\x1b[2Ja", "b"))
    text = "\n".join(Text.from_ansi(line).plain for line in lines) if colour else "\n".join(lines)
    for raw in ("\x1b", "\u202e", "\x9b", "\u200b", "\x07"):
        assert raw not in text
    if width == 200:
        assert "[bold]b[/bold]" in text
        assert "\\x1b[31mred" in text


def test_steps_of_user_code_show_as_escapes_with_their_description() -> None:
    module = UserModule("mine.py:A", (), "forward(x)", (("query", 5),), 2, (1, 5, 9), (1, 5, 9))
    a = replace(A, module=module, arrays={}, heads=())
    step = replace(a.trace[0], site="\x1b[2Jevil", operation="matmul", formula="one \u202e")
    a, b = (replace(a, trace=(one, *a.trace[1:])) for one in (step, replace(step, formula="two", shape=(1, 3, 5, 6))))
    lines = view(a, b, 200)
    assert lines[2] == f"{DIFFER}\\x1b[2Jevil (5 keys against 6)"
    row = next(line for line in lines if line.startswith("\\x1b[2Jevil "))
    assert row.endswith("OTHER SHAPE  5 keys against 6; formula: one \\u202e against two")


CONTEXT = [text_of(("on", "it"))]


@pytest.mark.parametrize(("a", "b"), [
    (make_record(TEXT, ("a", "dog"), n_heads=3), make_record(TEXT, n_heads=3)),
    (make_record(TEXT, dropout=0.25), make_record(TEXT, dropout=0.25, seed=1)),
    (make_record(("on", "it"), context=[TEXT]), make_record(("on", "it"), context=[TEXT[1:]])),
    (layered(text_of(TEXT), context=CONTEXT, n_layers=2), layered(text_of(TEXT[1:]), context=CONTEXT)),
    (layered(text_of(TEXT), keep=False, sinks=True), layered(text_of(TEXT), seed=1, sinks=True)),
    (layered(text_of(TEXT)), make_record(TEXT)),
], ids=["batch", "dropout", "context", "pair", "sinks", "nothing"])  # fmt: skip
@pytest.mark.parametrize(("width", "everything"), [(20, False), (120, True)])
def test_every_kind_of_record_is_drawn_at_every_width(a: Record, b: Record, width: int, everything: bool) -> None:
    assert view(a, b, width, everything=everything)
    assert view(a, b, width, colour=True, everything=everything)


def test_what_pictures_leave_out_is_noted() -> None:
    a, b = (make_record(TEXT, dropout=0.25, seed=seed) for seed in (0, 1))
    assert "A and B before dropout" in " ".join(" ".join(view(a, b)).split())
    untrained = replace(a, config=replace(a.config, train=False))
    said = " ".join(" ".join(view(untrained, b)).split())
    assert "B before dropout" in said
    assert "A and B before dropout" not in said
    a, b = (layered(text_of(TEXT), sinks=True, seed=seed) for seed in (0, 1))
    assert "the weight of sink logits is not drawn" in " ".join(view(a, b))


def test_the_document_holds_what_the_view_shows_and_reads_back_strictly() -> None:
    b = with_cell(with_cell(A, "pattern", (0, 2, 3, 1), 0.875), "out", (0, 1, 2), np.inf)
    found = compare(A, b)
    text = "".join(json_pieces(found, (A, b), ("a\udcff", "b"), ("mha", "diff")))
    document = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert text.isascii()
    assert (document["schema"], document["verdict"], document["a"]) == ("mha.diff/1", "differ", "a\\xff")
    assert document["said"] == verdict_text(found, A, b)
    assert document["first"] == {"where": "site", "layer": "", "site": "pattern"}
    assert document["tolerance"] == {"relative": 1e-5, "of_dtype": "float32"}
    sites = {one["site"]: one for one in document["layers"][0]["sites"]}
    assert sites["pattern"]["at"] == {
        "axes": ["sequence", "head", "query", "key"], "a": [0, 2, 3, 1], "b": [0, 2, 3, 1],
    }  # fmt: skip
    assert sites["out"]["n_nonfinite"] == 1
    assert [sites[name]["status"] for name in ("qk", "pattern", "out")] == ["identical", "beyond", "beyond"]


def test_the_document_names_tokens_that_are_others() -> None:
    b = make_record(("the", "big", "dog", "sat", "on", "it"), causal=True, n_heads=3)
    found = compare(A, b)
    document = json.loads("".join(json_pieces(found, (A, b), ("a", "b"), ())))
    (change,) = document["texts"][0]["changes"]
    assert (change["change"], change["a"], change["b"]) == ("replaced", ["cat"], ["big", "dog"])


# --------------------------------------------------------------------------------------------------------- the first screen


def test_of_itself_the_head_that_changed_most_is_drawn_and_the_others_are_counted() -> None:
    b = with_cell(with_cell(A, "pattern", (0, 2, 3, 1), 0.875), "pattern", (0, 0, 1, 0), 0.5)
    titles = lambda lines: [line.split(" · ")[0] for line in lines if " · largest change " in line]  # noqa: E731
    lines = view(A, b)
    assert titles(lines) == ["head 2"]
    assert [line for line in lines if line.startswith("⋮ 1 more head ")]
    everything = view(A, b, everything=True)
    assert titles(everything) == ["head 2", "head 0"]
    assert not [line for line in everything if line.startswith("⋮")]


def test_command_lines_are_shown_where_nothing_else_differs_or_all_is_requested() -> None:
    b = replace(A, command=("mha", "run", "x", "--other"))
    other_seed = replace(b, config=replace(b.config, seed=77))
    assert any("--other" in line for line in view(A, b))
    assert not any("--other" in line for line in view(A, other_seed))
    assert any("--other" in line for line in view(A, other_seed, everything=True))


def test_steps_without_numbers_differ_by_their_formulas_and_the_table_has_no_empty_columns() -> None:
    module = UserModule("mine.py:A", (), "forward(x)", (("query", 5),), 2, (1, 5, 9), (1, 5, 9))
    steps = [replace(step, operation="matmul", values=None) for step in A.trace]
    a = replace(A, module=module, arrays={}, heads=(), trace=tuple(steps))
    others = [replace(step, formula="another") if n in (1, 2) else step for n, step in enumerate(steps)]
    lines = view(a, replace(a, trace=tuple(others)), 120)
    both = f"{steps[1].site}, {steps[2].site}"
    assert lines[2] == f"A and B differ in 2 formulas: {both} (no numbers saved, so none compared)"
    assert ["site", "where"] in [line.split() for line in lines]
    assert sum("DIFFERS" in line for line in lines) == 2
