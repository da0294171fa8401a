"""The view of head statistics: every number in its place at every width, and the same numbers in JSON and CSV."""

from __future__ import annotations

import csv as csv_reader
import json
import math
import re
from dataclasses import fields, replace
from io import StringIO

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from safetensors.numpy import save
from support.heads_made import surveyed
from support.records import drawn, make_record, with_sinks

from mhacli.errors import UsageError
from mhacli.io.files import format_size
from mhacli.render import csv
from mhacli.render import json as json_view
from mhacli.render.base.cells import FORBIDDEN, levels
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import percent_text, short_text, weight_text
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import places_of
from mhacli.render.heads.heatmap import renormalised
from mhacli.render.heads.view import heads_view
from mhacli.render.run.view import run_view
from mhacli.requests.memory import BASE_BYTES
from mhacli.results.record.head_statistics import (
    HEAD_TYPES,
    SORTS,
    Averages,
    Corner,
    HeadsRequest,
    HeadStatistics,
    Kept,
    Sink,
    in_order,
)
from mhacli.results.record.record import SelfCheck
from mhacli.spec.conditions import parse_pattern

WIDTHS = [40, 80, 120, 200]
CAT = "the cat sat on the mat and the dog sat on the cat"
HOSTILE = (
    "\x1b[31mred", "\u202eevil", "漢字漢字漢字", "[bold]b[/b]", "a\u0301\u0301", " ", "\n", "x" * 300, "", "\x9b2J",
    "\u200b", "[link=http://e]", "\U000e0041",
)  # fmt: skip
KEPT = Kept((3, 1), 2, Corner(2, 3, 0, 5))
PATTERNS = (parse_pattern("k == q - 1"), parse_pattern('tok[k] == "[red]\x1b[31m"'))


REASON = "heads of 300 numbers are wider than 256"


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize(
    ("device", "reducer", "because", "words"),
    [
        ("cpu", "torch", "the kernel needs a CUDA device, and this one is cpu", None),
        ("cpu", "triton", None, "statistics by triton"),
        ("cuda:0", "triton", None, "statistics by triton"),
        ("cuda:0", "torch", REASON, f"statistics by torch ({REASON})"),
        ("cuda:0", "triton and torch", REASON, f"statistics by triton and torch ({REASON})"),
    ],
)
def test_the_self_check_says_what_made_the_statistics_where_there_is_a_choice(device, reducer, because, words, verbose):
    record = surveyed("the cat sat on the mat", n_heads=2)
    record = replace(
        record,
        environment=replace(record.environment, device=device),
        survey=replace(record.survey, reducer=reducer, torch_because=because),
    )
    text = " ".join(drawn(heads_view(record, ViewOptions(verbose=verbose), Screen(400, False)), 400))
    assert ("statistics by" in text) == (words is not None)
    assert words is None or words in text
    survey = json.loads("".join(json_view.pieces(record)))["survey"]
    assert (survey["reducer"], survey["torch_because"]) == (reducer, because)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    bias = tmp_path_factory.mktemp("bias") / "b.st"
    numbers = np.zeros((4, 13, 13), np.float32)
    numbers[1, 2:, 0], numbers[2, 3] = -np.inf, -np.inf
    bias.write_bytes(save({"bias": numbers}))
    small = surveyed(CAT, causal=True, wanted=HeadsRequest(kept=KEPT, patterns=PATTERNS))
    hostile = replace(small.sequences[0], tokens=HOSTILE)
    survey = replace(
        small.survey, kernel="\x1b[2J[red]", patterns=("\u202e", "[/b]"),
        checks=tuple(replace(check, name=f"\x1b]0;{check.name}") for check in small.survey.checks),
    )  # fmt: skip
    return {
        "small": small,
        "batch": surveyed(CAT, "a dog", wanted=HeadsRequest(kept=KEPT)),
        "left": surveyed(CAT, "a dog", causal=True, padding="left"),
        "context": surveyed("the cat", context=[CAT], wanted=HeadsRequest(kept=Kept((1,), 3, Corner(0, 2, 4, 6)))),
        "documents": surveyed("a b c d | e f g | h i j k", documents="|", causal=True),
        "many": surveyed(" ".join([CAT] * 4), n_heads=18, d_model=18, causal=True),
        "masks of heads": surveyed(CAT, score_bias=str(bias), wanted=HeadsRequest(kept=KEPT)),
        "hostile": replace(small, sequences=(hostile,), survey=survey),
        "one": surveyed("alone"),
        "some heads": surveyed(CAT, wanted=HeadsRequest(heads=(1, 3))),
    }


NAMES = (
    "small", "batch", "left", "context", "documents", "many", "masks of heads", "hostile", "one", "some heads",
)  # fmt: skip


def view(record, width=80, colour=False, **options):
    return drawn(heads_view(record, ViewOptions(**options), Screen(width, colour)), width)


def rows_of(lines):
    """The overview's rows of heads, by head."""
    signs = "".join(sign for sign, _ in KIND_SIGNS.values()) + "–"
    found = [(re.match(rf"\s*(\d+) [{re.escape(signs)}] ", line), line) for line in lines]
    return [(int(match[1]), line) for match, line in found if match]


@pytest.mark.parametrize(("width", "colour", "everything"), [(40, True, False), (80, False, True), (120, False, False)])
@pytest.mark.parametrize("name", NAMES)
def test_no_view_is_wider_than_the_screen_or_lets_a_token_speak_to_it(name, width, colour, everything, records):
    record = records[name]
    text = "\n".join(view(record, width, colour, maps=(record.heads[0].head,), everything=everything))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e\U000e0041]", text)
    assert "self-check ok" in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_head_has_a_row_with_its_kind(name, width, records):
    record = records[name]
    rows = rows_of(view(record, width))
    assert [head for head, _ in rows] == [head.head for head in record.heads]
    for (_, line), head in zip(rows, record.heads, strict=True):
        sure = "" if head.kind == "mixed" else f" {weight_text(head.certainty, 2)}"
        named = "–" if name == "one" else f"{KIND_SIGNS[head.kind][0]} {HEAD_TYPES[head.kind].name}{sure}"
        assert re.match(rf"\s*{head.head} {re.escape(named)} ", line)


def test_markup_in_tokens_patterns_and_names_is_printed_as_it_is(records):
    text = " ".join(view(records["hostile"], 200, maps=(0,), everything=True, verbose=True))
    for piece in (
        "[bold]b[/b",
        r"\x1b[31mred",
        r"\u202eevil",
        r"\x1b[2J[red]",
        "p2 = weight where [/b]",
        r"\x1b]0;every query",
    ):
        assert piece in text, piece


def words(number, tell):
    return "–" if number is None else tell(number)


def expected_words(of, precision=2):
    """What the wide overview says, in its order, without the name of the kind."""
    return [
        words(of.entropy, lambda x: f"{x:.2f}"), words(of.entropy_share, lambda x: f"{100 * x:.0f}%"),
        *(words(getattr(of, name), short_text) for name in
          ("effective_keys", "participation", "distance", "window_50", "window_90", "window_99")),
        *(words(getattr(of, name), lambda x: f"{x:.{precision}f}".removeprefix("0")) for name in
          ("sink", "leading", "diagonal", "previous", "duplicate", "induction", "near")),
    ]  # fmt: skip


@pytest.mark.parametrize("precision", [2, 4])
@pytest.mark.parametrize("name", ["small", "batch", "left", "context", "masks of heads", "one"])
def test_every_number_of_a_head_is_in_its_row_where_there_is_room(name, precision, records):
    record = records[name]
    for (_, line), head in zip(rows_of(view(record, 260, precision=precision)), record.heads, strict=True):
        named = "–" if name == "one" else HEAD_TYPES[head.kind].name
        shown = re.sub(r"\([a-z]+ \S+\)", "", line.partition(named)[2]).split()
        begin = 0 if head.kind == "mixed" or name == "one" else 1
        expected = [*expected_words(head, precision), *(weight_text(p, precision) for p in head.patterns)]
        assert shown[begin : begin + len(expected)] == expected
        assert shown[begin + len(expected)] == words(head.max_score, short_text)


def test_uniform_attention_stands_below_with_the_same_numbers(records):
    record = records["small"]
    (line,) = [line for line in view(record, 200) if line.strip().startswith("if uniform")]
    assert line.split()[2:17] == expected_words(record.heads[0].uniform)
    lines = [
        line
        for line in view(records["masks of heads"], 200)
        if line.strip().startswith("head") and "if uniform" in line
    ]
    for line, head in zip(lines, records["masks of heads"].heads, strict=True):
        assert line.split()[:4] == ["head", str(head.head), "if", "uniform"]
        assert line.split()[4:19] == expected_words(head.uniform)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_what_names_kinds_stays_where_there_is_less_room(width, records):
    lines = view(records["small"], width)
    heading = next(line for line in lines if line.startswith("head head type"))
    for name in ("|i−j|", "first", "prev", "dup", "ind"):
        assert name in heading.split()


@pytest.mark.parametrize("sort", [*SORTS, "head:down", "kind:down", "entropy:up", "sink:up"])
def test_heads_are_listed_in_the_order_that_was_requested(sort, records):
    record = records["many"]
    listed = [head for head, _ in rows_of(view(record, 80, sort=sort))]
    assert listed == [head.head for head in in_order(record.heads, sort)]


def test_chosen_heads_are_listed_alone(records):
    assert [head for head, _ in rows_of(view(records["many"], heads=(5, 2), sort="head:down"))] == [5, 2]
    with pytest.raises(UsageError):
        view(records["some heads"], heads=(0,))


def test_the_legend_explains_the_headings_and_the_patterns(records):
    text = " ".join(" ".join(view(records["small"], 200)).split())
    for piece in (
        "H = entropy in nats",
        "p1 = weight where k == q - 1",
        "±8 = weight within",
        "first 4 = on the first 4 tokens",
    ):
        assert piece in text
    assert "more columns" not in text
    narrow = " ".join(" ".join(view(records["small"], 60)).split())
    assert "p1 = weight where k == q - 1" in narrow
    assert "±8 = " not in narrow
    assert re.search(r"\d+ more columns on a wider screen or with --sort, --csv", narrow)


def test_what_was_inspected_is_reported(records):
    record = records["batch"]
    text = " ".join(" ".join(view(record, 200)).split())
    for piece in (
        "2 sequences of 2 to 13 tokens", "tiles", "took ", format_size(record.survey.peak_bytes - BASE_BYTES),
        format_size(record.survey.full_bytes),
    ):  # fmt: skip
        assert piece in text


def test_a_record_that_is_not_of_heads_is_refused():
    with pytest.raises(UsageError) as caught:
        view(make_record())
    assert caught.value.message == "the record is not one of mha heads"


# ---------------------------------------------------------------------------------------------------------- strongest


def test_the_keys_that_receive_most_and_the_cells_that_stand_out_are_named_with_their_numbers(records):
    record = records["small"]
    text = " ".join(" ".join(view(record, 200)).split())
    tokens = record.sequences[0].tokens
    for place, head in enumerate(record.heads):
        received, uniform = record.arrays["received"][0, place], record.arrays["uniform_received"][0, 0]
        key = int(received.argmax())
        assert (
            f"{key} “{tokens[key]}” {percent_text(received[key] / 13)} ×{short_text(received[key] / uniform[key])}"
            in text
        )
        cell = head.largest[0]
        said = f"{cell.query} “{tokens[cell.query]}” → {cell.key} “{tokens[cell.key]}” {weight_text(cell.share, 2)}"
        assert f"{said} ×{short_text(cell.lift)}" in text
        _, query, key = head.max_score_at
        assert f"{short_text(head.max_score)} at {query} “{tokens[query]}” → {key} “{tokens[key]}”" in text


@pytest.mark.parametrize("name", ["one"])
def test_a_key_that_gets_everything_has_a_hundred_percent(name, records):
    text = "\n".join(view(records[name], 200))
    assert "e+" not in text
    assert "100 %" in text


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100 %"), (0.996, "100 %"), (0.12, "12 %"), (0.00034, "0.034 %"), (0.0, "0 %")]
)
def test_by_hand_percent(share, text):
    assert percent_text(share) == text


def test_several_sequences_are_distinguished(records):
    text = " ".join(view(records["left"], 200))
    assert re.search(r"\b1:[01] “(a|dog)” ", text)
    assert "‹pad›" not in text


@pytest.mark.parametrize("width", [80, 200])
def test_heads_whose_places_are_not_listed_are_counted(width, records):
    assert any(line.split() == ["⋮", "10", "more", "(--all)"] for line in view(records["many"], width))
    assert not any("more (--all)" in line for line in view(records["many"], width, everything=True))


def test_the_receivers_of_heads_with_masks_of_their_own_are_measured_by_these(records):
    record = records["masks of heads"]
    text = " ".join(" ".join(view(record, 200)).split())
    for place in range(4):
        received, uniform = (record.arrays[name][0, place] for name in ("received", "uniform_received"))
        key = int(received.argmax())
        weight = percent_text(received[key] / received.sum())
        assert (
            f" {key} “{record.sequences[0].tokens[key]}” {weight} ×{short_text(received[key] / uniform[key])}" in text
        )


# ------------------------------------------------------------------------------------------------------------ corners


@pytest.mark.parametrize("width", [60, 100])
def test_the_largest_key_of_a_row_of_a_corner_is_named_though_its_column_is_hidden(width):
    record = surveyed(
        " ".join([CAT] * 8), n_heads=1, d_model=4, wanted=HeadsRequest(kept=Kept(corner=Corner(2, 6, 3, 90)))
    )
    cells = record.arrays["corner"].copy()
    places = [40 + row for row in range(6)]
    cells[0, 0, range(6), places] = 0.75
    lines = view(replace(record, arrays={**record.arrays, "corner": cells}), width)
    begin = next(n for n, line in enumerate(lines) if "head 0 · cells" in line)
    rows = [line for line in lines[begin:] if " .75 " in line]
    assert [line.split(" .75 ")[1].split()[0] for line in rows] == [str(3 + place) for place in places]


def test_by_hand_the_cells_of_a_corner(records):
    record = records["small"]
    lines = view(record, 80, precision=3)
    starts = [number for number, line in enumerate(lines) if re.match(r"sequence 0 · head \d · cells", line)]
    assert len(starts) == 4
    tokens = record.sequences[0].tokens
    for place, start in enumerate(starts):
        assert lines[start + 1].split() == list(tokens[:5])
        assert lines[start + 2].split() == ["query", *map(str, range(5))]
        for row in range(3):
            weights = record.arrays["corner"][0, place, row]
            cells = ["0" if math.isnan(weight) else weight_text(weight, 3) for weight in weights]
            assert lines[start + 3 + row].split() == [str(2 + row), f"“{tokens[2 + row]}”", *cells]
        largest = weight_text(np.nanmax(record.arrays["corner"][0, place]), 3)
        assert lines[start + 6].startswith(f"shade linear, 0 … {largest} · 0 masked")


def test_a_corner_of_another_text_has_its_own_names(records):
    lines = view(records["context"], 120)
    start = next(number for number, line in enumerate(lines) if "cells" in line)
    keys = records["context"].context[0].tokens
    assert lines[start + 1].split() == list(keys[4:10])
    assert lines[start + 2].split() == ["query", *map(str, range(4, 10))]
    assert [line.split()[:2] for line in lines[start + 3 : start + 5]] == [["0", "“the”"], ["1", "“cat”"]]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_corner_hides_is_counted(width):
    record = surveyed(
        " ".join([CAT] * 8), n_heads=1, d_model=4, wanted=HeadsRequest(kept=Kept(corner=Corner(2, 60, 3, 90)))
    )
    lines = view(record, width)
    assert any(re.search(r"⋮ 20 \(--all\)", line) for line in lines)
    header = next(line for line in lines if line.startswith("query ") and "sink" not in line).split()
    drawn_keys = [word for word in header if word.isdigit()]
    assert re.search(rf"\b{90 - len(drawn_keys)} keys between\b", " ".join(" ".join(lines).split()))
    numbers = list(map(int, drawn_keys))
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (3, 92)


def test_queries_say_what_they_attend_to_in_every_head(records):
    record = records["small"]
    lines = view(record, 200)
    tokens = record.sequences[0].tokens
    for number, query in enumerate((3, 1)):
        start = next(
            i for i, line in enumerate(lines) if line.startswith(f"sequence 0 · query {query} “{tokens[query]}” ·")
        )
        assert f"{query + 1} visible keys" in lines[start]
        for place in range(4):
            keys, weights = (record.arrays[name][0, place, number] for name in ("top_keys", "top_shares"))
            said = ", ".join(f"{k} “{tokens[k]}” {percent_text(s)}" for k, s in zip(keys, weights, strict=True))
            rest = percent_text(max(0.0, 1 - sum(weights.tolist())))
            beyond = f", the rest {rest}" if 1 - sum(weights.tolist()) > 1e-5 else ""
            assert " ".join(lines[start + 1 + place].split()) == f"head {place} {said}{beyond}"


def test_shares_that_are_no_numbers_are_neither_forbidden_nor_nothing():
    kept = Kept((1, 2), 2, Corner(0, 3, 0, 5))
    record = surveyed(CAT, n_heads=2, d_model=4, causal=True, wanted=HeadsRequest(kept=kept))
    assert "?" not in "".join(drawn(heads_view(record, ViewOptions(), Screen(120, False)), 120))
    for name, index in (("entropy", (0, 1, 1)), ("corner", (0, 1, 1)), ("top_shares", (0, 1, 0))):
        record.arrays[name][index] = np.nan
    record.arrays["top_keys"][0, 1, 0] = -1
    lines = drawn(heads_view(record, ViewOptions(), Screen(120, False)), 120)
    corner = lines[next(n for n, line in enumerate(lines) if "head 1 · cells" in line) :]
    assert next(line for line in corner if line.startswith("1 “cat”")).split() == ["1", "“cat”", *"?????"]
    assert any("0 masked · ? not a number" in line for line in corner)
    assert [line.split() for line in corner if "not a number" in line][1:] == [["head", "1", "not", "a", "number"]]


def test_a_query_that_a_sequence_does_not_have_is_left_out(records):
    text = " ".join(view(records["batch"], 200))
    assert text.count("sequence 0 · query") == 2
    assert text.count("sequence 1 · query") == 1
    assert "query ‹pad›" not in text


def test_a_query_that_sees_other_keys_in_other_heads_is_not_given_the_count_of_the_first(records):
    lines = [line for line in view(records["masks of heads"], 120) if line.startswith("sequence 0 · query 3 “on”")]
    assert len(lines) == 1
    assert "· 13 visible keys" not in lines[0]  # 13, 12, none and 13


# --------------------------------------------------------------------------------------------------------------- maps


def all_led(record):
    """The record with heads of which the first token of every text and document is a sink."""
    led = [(b, key) for b, text in enumerate(record.keys) for key, place in enumerate(text.places) if place == 0]
    sinks = tuple(Sink(b, key, 0.5, 0.1) for b, key in led)
    return replace(record, heads=tuple(replace(head, sinks=sinks) for head in record.heads))


def by_hand(record, place, sequence, cell):
    """Rows without the first token of each document, renormalised, in cells of `cell` × `cell`, from a map of single tokens."""
    assert record.survey.block == 1
    weights = record.arrays["map"][sequence, place].astype(np.float64)
    visible = np.broadcast_to(record.arrays["visible"][sequence], (len(record.heads), len(weights)))[place] > 0
    sequences = record.keys[sequence]
    firsts = {d: i for i, d in reversed(list(enumerate(sequences.documents or (0,) * len(sequences.tokens))))}
    columns = [first + record.first_key(sequence) for first in firsts.values()]
    sinks = weights[:, columns].sum(axis=1)
    rest = weights.copy()
    rest[:, columns] = 0
    rows = [slice(start, start + cell) for start in range(0, len(weights), cell)]
    keys = [slice(start, start + cell) for start in range(0, weights.shape[1], cell)]
    n = np.array([max(1, visible[r].sum()) for r in rows])
    mean_sinks = np.array([sinks[r].sum() for r in rows]) / n
    cells = np.array([[rest[r, c].sum() for c in keys] for r in rows]) / n[:, None]
    left = np.where(1 - mean_sinks > 1e-6, 1 - mean_sinks, np.inf)
    return cells / left[:, None], mean_sinks


@pytest.mark.parametrize(("rows", "cell"), [(99, 1), (7, 2), (5, 3)])
@pytest.mark.parametrize("name", ["small", "batch", "left", "context", "documents", "masks of heads"])
def test_by_hand_a_map_without_the_first_token_of_each_text(name, rows, cell, records):
    record = all_led(records[name])
    n_keys = record.facts.k_len
    for sequence in range(len(record.sequences)):
        for place in range(len(record.heads)):
            found = renormalised(record, place, sequence, rows=rows, columns=99)
            if name in ("context", "documents"):
                cell = max(1, -(-record.facts.q_len // rows))
            expected, sinks = by_hand(record, place, sequence, cell)
            is_open = found.weights != FORBIDDEN
            assert found.block == cell
            assert found.weights.shape == expected.shape == (-(-record.facts.q_len // cell), -(-n_keys // cell))
            assert np.abs(found.weights[is_open] - expected[is_open]).max(initial=0) <= 2e-6
            assert np.abs(found.sink_weights - sinks).max() <= 1e-6
            assert np.abs(expected[~is_open]).max(initial=0) == 0


def test_cells_that_no_query_may_see_are_blank(records):
    found = renormalised(records["small"], 0, 0, rows=99, columns=99)
    assert np.array_equal(found.weights == FORBIDDEN, ~np.tri(13, dtype=bool))
    found = renormalised(records["left"], 0, 1, rows=99, columns=99)
    expected = np.zeros((13, 13), bool)
    expected[11:, 11:] = np.tri(2, dtype=bool)
    assert np.array_equal(found.weights != FORBIDDEN, expected)
    found = renormalised(records["masks of heads"], 1, 0, rows=99, columns=99)
    assert (found.weights[2:, 0] == FORBIDDEN).all()
    assert (found.weights[:2, 0] != FORBIDDEN).all()


def test_columns_that_do_not_fit_are_put_together_too(records):
    found = renormalised(records["context"], 0, 0, rows=99, columns=5)
    assert (found.block, found.weights.shape) == (3, (1, 5))


def test_by_hand_the_three_scales():
    weights = np.array([[0.0, FORBIDDEN, 0.001], [0.1, 1.0, 0.01]])
    assert levels(weights, "linear").tolist() == [[0, -1, 0], [26, 255, 3]]
    # decades below the largest: −∞, −3 → 0; −1 → 2/3; 0 → 1; −2 → 1/3
    assert levels(weights, "log").tolist() == [[0, -1, 0], [170, 255, 85]]
    assert levels(weights, "rank").tolist() == [[0, -1, 64], [191, 255, 128]]


@pytest.mark.parametrize("scale", ["linear", "log", "rank"])
def test_scales_of_nothing_or_one_number_are_numbers(scale):
    for weights in ([[FORBIDDEN]], [[0.0]], [[0.5]], [[FORBIDDEN, 0.0], [0.3, 0.3]]):
        found = levels(np.array(weights), scale)
        assert np.isfinite(found).all()
        assert ((found == FORBIDDEN) == (np.array(weights) == FORBIDDEN)).all()
        assert found.max() <= 255


@pytest.mark.parametrize("scale", ["linear", "log", "rank"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_map_names_its_head_and_its_scale(scale, width, records):
    record = records["small"]
    text = " ".join(" ".join(view(record, width, maps=(2,), map_scale=scale)).split())
    assert f"sequence 0 · head 2 · {record.heads[2].kind} · each cell 1 × 1 tokens" in text or width == 40
    assert f"scale {scale}, " in text
    largest = renormalised(record, 2, 0, rows=99, columns=99).weights.max()
    ends = {"linear": f"0 … {largest:.4g}", "log": f"or less … {largest:.4g}", "rank": "the largest of 91 cells"}
    assert ends[scale] in text


@pytest.mark.parametrize("name", ["small", "batch", "left", "context", "documents", "masks of heads", "many", "one"])
def test_the_weight_of_the_sink_and_of_what_is_shown_is_that_of_all_queries(name, records):
    record = all_led(records[name])
    for place in (0, 1):
        lines = view(record, 80, maps=(record.heads[place].head,), precision=3)
        said = [found for line in lines if (found := re.search(r"sink (\S+) · shown (\S+) of", line))]
        assert len(said) == len(record.sequences)
        for sequence, found in enumerate(said):
            sink = float(np.nanmean(record.arrays["sink"][sequence, place]))
            assert float(found[1]) == pytest.approx(sink, abs=0.00051)
            assert float(found[2]) == pytest.approx(1 - sink, abs=0.00051)


def test_a_map_says_where_the_first_token_is_no_sink_and_takes_nothing_out(records):
    record = with_sinks(records["small"], 4)
    found = renormalised(record, 1, 0, rows=99, columns=99)
    whole = record.arrays["map"][0, 1].astype(np.float64)
    is_open = found.weights != FORBIDDEN
    assert np.abs(found.weights - whole)[is_open].max() <= 2e-6
    assert not found.sink_weights.any()
    text = " ".join(" ".join(view(record, 80, maps=(1,))).split())
    assert "shown 1.00 of all attention: the first token is no sink of this head" in text


def test_the_lines_of_a_map_are_its_rows(records):
    record = all_led(records["small"])
    lines = view(record, 80, maps=(1,))
    start = next(i for i, line in enumerate(lines) if line.startswith("sequence 0 · head 1 ·"))
    sinks = renormalised(record, 1, 0, rows=99, columns=99).sink_weights
    for row in range(13):
        found = lines[start + 2 + row].split(maxsplit=2)
        assert found[:2] == [str(row), f"{100 * sinks[row]:.0f}"]
        assert len(found[2]) == 2 * (row + 1)  # two characters for each key that the row may see


def test_a_map_is_drawn_for_each_sequence_that_was_chosen(records):
    def titles(**options):
        lines = view(records["batch"], 80, maps=(0, 2), **options)
        return [found[0] for line in lines if (found := re.match(r"sequence \d · head \d · (?!cells)\w", line))]

    assert [title[:21] for title in titles()] == [f"sequence {b} · head {h} ·" for h in (0, 2) for b in (0, 1)]
    assert len(titles(sequences=(1,))) == 2


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("some heads", 0, "head 0 is not in the record, which has the heads 1, 3"),
        ("small", 4, "head 4 is not in the record, which has the heads 0 to 3"),
    ],
)
def test_a_map_of_a_head_that_the_record_does_not_have_is_refused(name, head, message, records):
    for refuse in (lambda: view(records[name], maps=(head,)), lambda: places_of(records[name], [head])):
        with pytest.raises(UsageError) as caught:
            refuse()
        assert caught.value.message == message


# -------------------------------------------------------------------------------------------------------------- colour


def painted(record, width, colour, **options):
    paper = StringIO()
    console = Console(
        width=width, file=paper, force_terminal=True, color_system="truecolor" if colour else None, legacy_windows=False
    )
    console.print(heads_view(record, ViewOptions(**options), Screen(width, colour)))
    return paper.getvalue()


@pytest.mark.parametrize("name", ["small", "left", "hostile", "many"])
def test_colour_is_used_only_when_it_is_on(name, records):
    off, on = (painted(records[name], 80, colour, maps=(0,)) for colour in (False, True))
    assert "\x1b[" not in off or not re.search(r"\x1b\[[0-9;]*[34]8;2;", off)
    assert re.search(r"\x1b\[[0-9;]*48;2;", on)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", on)
    assert "\x1b" not in plain
    assert max(map(cell_len, plain.split("\n"))) <= 80


# -------------------------------------------------------------------------------------------------------------- checks


def test_every_check_is_reported_with_its_number_and_tolerance(records):
    record = records["small"]
    text = " ".join(" ".join(view(record, 80, verbose=True)).split())
    for check in record.survey.checks:
        assert f"{check.name} within " in text
    largest = max(check.error / check.tolerance for check in record.survey.checks)
    n = len(record.survey.checks)
    brief = f"self-check ok: {n} checks, errors at most {percent_text(largest)} of their tolerances (--verbose)"
    assert view(record, 80)[-1] == brief
    failed = replace(record, self_check=SelfCheck(None, 1e-6, False))
    assert "self-check FAILED" in "\n".join(view(failed))


# -------------------------------------------------------------------------------------------------------- for programs


def read_csv(record):
    return list(csv_reader.DictReader(StringIO("".join(csv.pieces(record)))))


@pytest.mark.parametrize("name", NAMES)
def test_the_lines_of_csv_hold_the_numbers_of_every_head_exactly(name, records):
    record = records[name]
    rows = read_csv(record)
    assert [int(row["head"]) for row in rows] == [head.head for head in record.heads]
    for row, head in zip(rows, record.heads, strict=True):
        assert (row["layer"], row["kind"]) == ("0", head.kind)
        for prefix, of in (("", head), ("uniform_", head.uniform)):
            for field in fields(Averages):
                if field.name != "patterns":
                    same(row[prefix + field.name], getattr(of, field.name))
            for number, mass in enumerate(of.patterns):
                same(row[f"{prefix}pattern_{number + 1}"], mass)
        same(row["certainty"], head.certainty)
        same(row["max_score"], head.max_score)


def same(word, number):
    assert (word == "") == (number is None)
    assert number is None or float(word) == number


def test_csv_does_not_let_a_pattern_or_token_into_a_cell(records):
    text = "".join(csv.pieces(records["hostile"]))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert not re.search(r"(^|,)[=+@]", text, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_json_is_one_document_with_plain_numbers_for_every_head(name, records):
    record = records[name]

    def refuse(word):
        raise AssertionError(word)

    text = "".join(json_view.pieces(record))
    assert text.isascii()
    document = json.loads(text, parse_constant=refuse)
    assert document["schema"] == "mha.record/1"
    assert len(document["heads"]) == len(record.heads)
    for said, head in zip(document["heads"], record.heads, strict=True):
        assert (said["layer"], said["head"], said["kind"]) == (0, head.head, head.kind)
        for key in (
            "entropy", "entropy_share", "effective_keys", "distance", "sink", "diagonal", "previous", "duplicate",
            "induction", "max_score",
        ):  # fmt: skip
            assert said[key] == getattr(head, key)
            assert said[key] is None or isinstance(said[key], float)
        assert said["uniform"]["entropy"] == head.uniform.entropy
    for key, array in record.arrays.items():
        assert np.shape(document[key]) == array.shape
    found = np.array(document["map"], dtype=np.float32)
    assert np.array_equal(found, record.arrays["map"])
    assert document["survey"]["block"] == record.survey.block
    assert document["nonfinite"] == {}


def test_what_means_nothing_is_null_in_json(records):
    document = json.loads("".join(json_view.pieces(records["left"])))
    for name in ("entropy", "participation", "distance", "sink", "max_score", "lse"):
        assert document[name][1][0][:11] == [None] * 11
        assert None not in document[name][1][0][11:]
    document = json.loads("".join(json_view.pieces(records["small"])))
    assert document["corner"][0][0][0][3:] == [None, None]


def test_numbers_that_should_be_finite_and_are_not_are_counted(records):
    record = records["small"]
    entropy = record.arrays["entropy"].copy()
    entropy[0, 2, 5] = np.nan
    spoiled = replace(record, arrays={**record.arrays, "entropy": entropy})
    assert json_view.nonfinite(spoiled) == {"entropy": 1}
    assert json_view.nonfinite(record) == {}


# ------------------------------------------------------------------------------------------------------- heads of a run


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_missing_is_a_dash(width, records):
    record = records["small"]
    empty = replace(record.heads[1], **{f.name: None for f in fields(Averages) if f.name != "patterns"}, max_score=None)
    empty = replace(empty, patterns=(None, None), max_score_at=None, largest=(), sinks=(), certainty=None)
    heads = (record.heads[0], empty, *record.heads[2:])
    row = dict(rows_of(view(replace(record, heads=heads), width)))[1] if width > 40 else ""
    assert row.count("–") >= 8 or width == 40


def test_the_heads_of_a_run_have_their_rows_too():
    record = make_record(("the", "cat", "sat"), n_heads=3)
    lines = drawn(run_view(record, ViewOptions(), Screen(120, False)), 120)
    assert [head for head, _ in rows_of(lines)] == [0, 1, 2]
    for (_, line), head in zip(rows_of(lines), record.heads, strict=True):
        assert {f"{head.entropy:.2f}", f"{100 * head.entropy_share:.0f}%"} <= set(line.split())


def test_the_legend_explains_what_stands_beside_the_types_that_are_listed(records):
    """Only these: a head of a type, a uniform one, and a mixed one that comes near to a type."""
    record = records["small"]
    patterns = record.heads[0].patterns
    near = Averages(previous=0.25, patterns=patterns)
    for kind, weight, expected in (
        ("induction", None, ["beside a type"]),
        ("uniform", None, ["beside uniform"]),
        ("mixed", 0.25 + 0.75 * 0.2, ["mixed (nearest type)"]),
        ("mixed", 0.25, []),
    ):
        heads = tuple(
            HeadStatistics(head=head.head, kind=kind, certainty=0.5, previous=weight, uniform=near, patterns=patterns)
            for head in record.heads
        )
        text = " ".join(view(replace(record, heads=heads), 200))
        assert re.findall(r"beside (?:a type|uniform)|mixed \(nearest type\)", text) == expected
        assert ("(prev .20)" in text) == (expected == ["mixed (nearest type)"])


def test_the_legend_says_what_a_short_name_of_a_type_stands_for_where_no_heading_does(records):
    record = records["small"]
    patterns = record.heads[0].patterns
    uniform = Averages(previous=0.25, at_offset=0.25, near=0.25, patterns=patterns)
    for near, short, expected in (
        ("at_offset", "pos", ["pos = positional"]),
        ("previous", "prev", []),
        ("near", "local", []),
    ):
        heads = tuple(
            HeadStatistics(
                head=head.head,
                kind="mixed",
                certainty=0.5,
                uniform=uniform,
                patterns=patterns,
                **{near: 0.25 + 0.75 * 0.2},
            )
            for head in record.heads
        )
        text = " ".join(view(replace(record, heads=heads), 200))
        assert re.findall(r"(?:pos|prev|local) = \w+al", text) == expected
        assert f"({short} .20)" in text
