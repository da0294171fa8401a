"""The view of a checkpoint's record: every layer, head and token in its place at every width."""

from __future__ import annotations

import csv as csv_reader
import json
import re
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from support.checkpoint_views import KEPT, RECORDS, SHORT, SPANS, view
from support.layers_made import KINDS, WORDS, layered, spoiled, text_of

from mhacli.errors import UsageError
from mhacli.render import csv
from mhacli.render import json as json_view
from mhacli.render.base.colours import KIND_SIGNS
from mhacli.render.base.format import flowing, short_text, weight_text
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.selection import ranges
from mhacli.render.checkpoint.patterns import merge_words, words_with
from mhacli.render.checkpoint.view import layers_view
from mhacli.render.csv import cell_text
from mhacli.results.record import storage
from mhacli.results.record.head_statistics import HEAD_OUTPUTS, HEAD_TYPES, ROW_SUMS
from mhacli.results.record.record import Generated, SpanTokens

WIDTHS = [40, 80, 120, 200]


def flat(lines):
    return " ".join(" ".join(lines).split())


SIGNS = {sign: kind for kind, (sign, _) in KIND_SIGNS.items()}


def table_rows(lines):
    """The rows of the table of heads as (layer, head, kind, the words behind)."""
    found = []
    for line in lines:
        match = re.match(rf"\s*((?:encoder |decoder |cross )?\d+)\s+(\d+) ([{''.join(SIGNS)}]) (.*)", line)
        if match:
            kind = SIGNS[match[3]]
            words = re.sub(r"^ \([a-z]+ \S+\)", "", match[4].removeprefix(HEAD_TYPES[kind].name))
            found.append((match[1], int(match[2]), kind, words.split()))
    return found


def grid_signs(lines):
    """The signs of each row of the grid by its label, panels joined."""
    found = {}
    for line in lines:
        match = re.match(rf"\s*((?:encoder |decoder |cross )?\d+)[ !] ([{''.join(SIGNS)} ]+)$", line)
        if match:
            found.setdefault(match[1], []).extend(match[2].split())
    return found


# ---------------------------------------------------------------------------------------------------------- every view

OPTIONS = {
    "plain": {},
    "all": {"everything": True, "maps": (0,)},
    "matrix": {"layers": ((None, 0),), "maps": (0,)},
    "heatmap": {"layers": ((None, 0),), "heads": (0,), "view": "heatmap", "words": True},
    "top": {"heads": (0,), "view": "top", "rows": (1,)},
}


@pytest.mark.parametrize(("width", "colour"), [(40, True), (80, False), (120, True), (200, False)])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", RECORDS)
def test_no_view_is_wider_than_the_screen_or_lets_a_token_speak_to_it(name, kind, width, colour):
    lines = view(RECORDS[name], width, colour, **OPTIONS[kind])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e]", "\n".join(lines))
    assert "self-check" in "\n".join(lines)


@pytest.mark.parametrize("name", ["run", "hostile", "bad"])
def test_colour_is_used_only_when_it_is_on_and_never_comes_from_a_token(name):
    for colour in (False, True):
        paper = StringIO()
        system = "truecolor" if colour else None
        console = Console(width=80, file=paper, force_terminal=True, color_system=system, legacy_windows=False)
        options = ViewOptions(layers=((None, 0),), heads=(0,), view="heatmap")
        console.print(layers_view(RECORDS[name], options, Screen(80, colour)))
        assert bool(re.search(r"\x1b\[[0-9;]*[34]8;2;", paper.getvalue())) == colour
        plain = re.sub(r"\x1b\[[0-9;]*m", "", paper.getvalue())
        assert "\x1b" not in plain
        assert max(map(cell_len, plain.split("\n"))) <= 80


def test_markup_in_tokens_names_and_reasons_is_printed_as_it_is():
    hostile = flat(view(RECORDS["hostile"], 200, tokens=True))
    for piece in ("[bold]b[/bold]", r"\x1b[31mred", r"\u202eevil", "[red]", r"\x1b]0;"):
        assert piece in hostile
    assert r"the keyword \x1b[2J[foo] is not understood" in flat(view(RECORDS["bad"], 200))


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_made_by_hand_is_a_record_that_can_be_saved(name, tmp_path):
    RECORDS[name].save(str(tmp_path / "r.st"))
    loaded = storage.load(str(tmp_path / "r.st"))
    assert view(loaded) == view(RECORDS[name])


# -------------------------------------------------------------------------------------------------------------- header


def test_the_header_says_what_the_model_is():
    record = replace(RECORDS["sinks"], model=replace(RECORDS["sinks"].model, revision="1a2b3c"))
    text = flat(view(record, 200))
    for piece in (
        "./tiny · revision 1a2b3c", "tinybert · TinyModel · 22.7 M parameters · 3 layers · 4 heads × d_head 5, 2 kv heads",
        "positions learned, up to 512", "float32", "cpu", "torch 2.6.0",
        "sink logits (s_aux), which entropy counts as one more key", "took 219 ms",
        "captured in transformers' attention registry", "kernel flash",
        "mask: causal (layers 0, 2) · mask: causal, window 3 (layer 1)",
    ):  # fmt: skip
        assert piece in text, piece
    assert "scale" not in text.split("text: ")[0]  # the usual one


@pytest.mark.parametrize(
    ("identical", "compared", "said"),
    [
        (True, 15, "inspecting changed no bit of the outputs"),
        (True, 8, "inspecting changed no bit of the outputs (first 8 tokens)"),
        (False, 15, "inspecting CHANGED the outputs"),
        (None, 0, "outputs not compared with a run without inspection"),
    ],
)
def test_the_proof_says_whether_inspection_changed_anything(identical, compared, said):
    record = RECORDS["run"]
    model = replace(record.model, identical_outputs=identical, compared_len=compared)
    text = flat(view(replace(record, model=model), 200, verbose=True))
    assert f"attention: sdpa (unchanged) · {said} 15 tokens · captured in" in text
    assert f"{HEAD_OUTPUTS} within 6.00e-08" in text  # 2e-8 times the number of the layer, from 1


def test_what_was_inspected_of_a_model_is_reported_where_it_is_not_all():
    record = replace(RECORDS["run"], model=replace(RECORDS["run"].model, n_layers=12))
    assert "12 layers, layers 0–2 inspected" in flat(view(record, 200))
    assert "inspected ·" not in flat(view(RECORDS["run"], 200)).split("attention: ")[0]
    pair = flat(view(RECORDS["pair"], 200))
    assert "no mask (encoder, cross) · mask: causal (decoder)" in pair


def test_a_layer_seen_only_by_its_softmax_says_so_and_claims_no_keys():
    record = RECORDS["run"]
    seen = replace(record.layers[1], captured_by="softmax", scale=None)
    text = flat(view(replace(record, layers=(record.layers[0], seen, record.layers[2])), 200))
    assert "captured at its softmax: weights and values, but no queries and keys (layer 1)" in text
    assert "4 heads × d_v 5 (layer 1)" in text
    assert "kernel flash (layers 0, 2)" in text


def test_layers_that_are_not_verified_are_named_with_number_and_reason():
    lines = view(RECORDS["bad"], 200)
    (line,) = [line for line in lines if line.startswith("! ")]
    assert line == (
        f"! layer 1 NOT verified: '{HEAD_OUTPUTS}' is off by 1.25e-01 (tolerance 2.00e-06); "
        r"the keyword \x1b[2J[foo] is not understood"
    )
    assert any(re.match(r"\s+1! ", line) for line in lines)
    assert "self-check FAILED" in lines
    assert f"{HEAD_OUTPUTS} within 1.25e-01 (tolerance 2.00e-06), layer 1: FAILED in layer 1" in flat(lines)
    assert "layer 1 · head 0 · NOT verified" in flat(view(RECORDS["bad"], layers=((None, 1),)))


def test_so_many_doubtful_layers_that_they_would_fill_the_screen_are_counted():
    record = layered(SHORT, n_layers=11, n_heads=1)
    for index in range(11):
        record = spoiled(record, index)
    told = [line for line in view(record, 200) if line.startswith("! ")]
    assert (len(told), told[-1]) == (9, "! layers 8–10 NOT verified either (--all says why)")
    assert len([line for line in view(record, 200, everything=True) if line.startswith("! ")]) == 11


def test_every_check_is_reported_where_it_is_worst():
    assert re.fullmatch(
        r"self-check ok: 6 checks, errors at most [\d.]+ % of their tolerances \(--verbose\)", view(RECORDS["run"])[-1]
    )
    lines = view(RECORDS["run"], 200, verbose=True)
    assert lines[-2] == "self-check ok: 6 checks, layers 0–2"
    assert f"{ROW_SUMS} within 3.00e-08 (tolerance 2.00e-06), layer 2" in flat(lines[-1:])
    changed = replace(RECORDS["run"], model=replace(RECORDS["run"].model, identical_outputs=False))
    assert "outputs differ from those without inspection" in flat(view(changed)[-6:])


def test_by_hand_ranges_and_lines():
    assert ranges([5, 0, 1, 2, 8, 7]) == "0–2, 5, 7, 8"
    parts = [Text(word) for word in ("ab", "cd", "efghij", "k")]
    assert flowing(parts, 7).plain.split("\n") == ["ab · cd", "efghij", "k"]
    assert flowing(parts, 10).plain.split("\n") == ["ab · cd", "efghij · k"]


# -------------------------------------------------------------------------------------------------------------- tokens


def token_rows(lines, title):
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rows = lines[start + 2 :]
    return rows[: next(i for i, line in enumerate(rows) if not line)]


def test_tokens_have_their_ids_names_bytes_and_places():
    lines = view(RECORDS["run"], 120, everything=True, tokens=True)
    rows = token_rows(lines, "text: 15 tokens, vocabulary of 30,522")
    for index, row in enumerate(rows):
        text = RECORDS["run"].sequences[0]
        token, piece, (start, end) = text.tokens[index], text.pieces[index], text.offsets[index]
        offsets = "–" if index in (0, 14) else f"{start}–{end}"
        expected = [str(index), str(100 + index), token, piece.name, piece.bytes, offsets]
        assert row.split() == [*expected, *(["special"] if index in (0, 14) else [])]
    assert "##es" in rows[5]


def test_all_heads_come_first_then_the_tokens_and_patterns_last():
    lines = view(RECORDS["run"], 80, layers=((None, 0),), heads=(0,), tokens=True)
    begins = [
        next(i for i, line in enumerate(lines) if line.startswith(words)) for words in ("layer  0", "text:", "query")
    ]
    assert begins == sorted(begins)


def test_columns_give_way_but_what_is_special_stays():
    rows = token_rows(view(RECORDS["run"], 40, everything=True, tokens=True), "text")
    assert rows[0].split() == ["0", "100", "[CLS]", "–", "special"]
    assert "…" not in "".join(rows)


def test_padding_is_masked_and_generated_tokens_are_marked():
    rows = token_rows(view(RECORDS["batch"], 80, everything=True, tokens=True), "sequence 1: 4 tokens + 11 padding")
    assert [row.split()[-1] for row in rows[4:]] == ["masked"] * 11
    rows = token_rows(view(KEPT, 80, everything=True, tokens=True), "text")
    assert ["generated" in row for row in rows] == [False] * 9 + [True] * 6
    assert "6 tokens generated greedily · one pass over the whole text reproduces 5 of 6" in flat(view(KEPT, 120))
    short = token_rows(view(KEPT, 80, tokens=True), "text")
    assert len(short) == 15
    long = layered(text_of(WORDS * 3))
    assert any(line.split() == ["⋮", "25", "more", "(--all)"] for line in view(long, tokens=True))


def test_both_texts_of_a_pair_are_named_the_encoder_s_first():
    lines = view(RECORDS["pair"], 80, tokens=True)
    titles = [line.split(",")[0] for line in lines if "vocabulary of" in line]
    assert titles == ["encoder: 15 tokens", "decoder: 9 tokens"]


# ---------------------------------------------------------------------------------------------------------------- grid


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "heads", "pair", "wide", "bad", "hybrid"])
def test_the_grid_has_a_sign_for_every_head(name, width):
    record = RECORDS[name]
    signs = grid_signs(view(record, width, view="none"))
    for index, layer in enumerate(record.layers):
        label = str(layer.layer) if layer.kind == "self" else f"{layer.kind} {layer.layer}"
        expected = [KINDS[(3 * index + h) % len(KINDS)] for h in range(layer.n_heads)]
        assert [SIGNS[sign] for sign in signs[label]] == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_the_numbers_above_the_grid_stand_above_their_heads(width):
    lines = view(RECORDS["wide"], width)
    numbers = {}
    for i, line in enumerate(lines):
        if re.match(r"layer\s+\d+ +\d", line):
            for match in re.finditer(r"\d+", line):
                numbers[int(match[0])] = lines[i + 1][match.start()]
    assert {0, 5, 10, 35, 65} <= set(numbers)
    for head, sign in numbers.items():
        assert SIGNS[sign] == KINDS[head % len(KINDS)]


def test_kinds_are_counted_and_few_heads_of_a_kind_are_named():
    text = flat(view(RECORDS["run"], 200))
    kinds = {(i, h): KINDS[(3 * i + h) % len(KINDS)] for i in range(3) for h in range(4)}
    for kind in set(kinds.values()):
        own = [f"{i}.{h}" for (i, h), k in kinds.items() if k == kind]
        assert re.search(rf"{KIND_SIGNS[kind][0]} {HEAD_TYPES[kind].name} {len(own)}\b", text)
        if kind not in ("mixed", "uniform"):
            assert f"{', '.join(own)})" in text


def test_layers_without_attention_stand_in_their_place():
    lines = view(RECORDS["hybrid"], 80)
    start = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == ["0", "1", "2"]
    assert lines[start + 2].split() == ["1", "–", "linear_attention"]
    assert "without attention matrix: linear_attention (layer 1)" in flat(lines)


# --------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("name", ["run", "batch", "left", "pair", "sinks"])
def test_every_number_of_a_head_is_in_its_row(name):
    record = RECORDS[name]
    rows = table_rows(view(record, 260, everything=True))
    assert len(rows) == len(record.heads)
    for (label, h, kind, words), head in zip(rows, record.heads, strict=True):
        index = next(i for i, layer in enumerate(record.layers) if layer.name == head.attention)
        arrays = record.of_layer(index).arrays
        p, allowed = arrays["pattern"][:, h].astype(float), arrays["allowed"][:, 0]
        seen = allowed.any(-1)
        assert label.split()[-1] == str(record.layers[index].layer)
        assert (h, kind) == (head.head, KINDS[(3 * index + h) % len(KINDS)])
        sure = [] if kind == "mixed" else [weight_text(head.certainty, 2)]
        entropy = -np.sum(p[p > 0] * np.log(p[p > 0])) / seen.sum()
        assert words[: len(sure) + 1] == [*sure, f"{entropy:.2f}"]
        firsts = words[len(sure) + 8 :]
        assert firsts[0] == weight_text(float(p[..., 0][seen].mean()), 2)
        if record.layers[index].sinks:
            assert firsts[1] == weight_text(float((1 - p.sum(-1))[seen].mean()), 2)
        assert short_text(head.max_score) in words


def test_a_learned_sink_has_a_column_only_where_there_is_one():
    for name in RECORDS:
        heading = next(line for line in view(RECORDS[name], 200) if re.search(r"head +head type", line))
        assert ("s_aux" in heading.split()) == (name in ("sinks", "left"))
    assert "s_aux = weight of the sink logit, which no key gets" in flat(view(RECORDS["sinks"], 80))


def test_of_many_heads_the_surest_are_listed_and_the_rest_counted():
    record = RECORDS["heads"]
    lines = view(record, 120)
    named = [head for head in record.heads if head.kind not in ("mixed", "uniform")]
    expected = sorted(named, key=lambda head: -head.certainty)[:8]
    assert [(layer, h) for layer, h, _, _ in table_rows(lines)] == [(str(head.layer), head.head) for head in expected]
    assert "8 of 48 heads, by excess over uniform, mixed left out (--all, --layer N, --sort)" in flat(lines)
    by_entropy = sorted(record.heads, key=lambda head: head.entropy)[:8]
    lines = view(record, 120, sort="entropy:up")
    assert [(layer, h) for layer, h, _, _ in table_rows(lines)] == [(str(x.layer), x.head) for x in by_entropy]
    assert "the first 8 of 48 heads by entropy:up (--all" in flat(lines)
    assert len(table_rows(view(record, 120, everything=True))) == 48


def test_the_last_screen_holds_the_table_of_heads():
    lines = view(RECORDS["heads"], 80)
    first = next(i for i, line in enumerate(lines) if re.search(r"head +head type", line))
    n_next, prompt = 4, 1  # what `mha run` suggests to type stands below
    assert len(lines) - first + n_next + prompt <= 24
    assert len(lines) + n_next <= 45


def test_the_map_of_heads_names_its_rows_and_columns():
    lines = view(RECORDS["heads"], 80)
    top = next(i for i, line in enumerate(lines) if re.match(" *layer +0 +1", line))
    assert lines[top - 1].split() == ["head"]
    assert lines[top - 1].index("head") == lines[top].index("0")


def test_where_no_head_has_a_kind_the_first_are_listed():
    record = RECORDS["heads"]
    record = replace(record, heads=tuple(replace(head, kind="mixed") for head in record.heads))
    lines = view(record, 120)
    assert "the first 8 of 48 heads (--all" in flat(lines)
    assert [(layer, h) for layer, h, _, _ in table_rows(lines)] == [("0", h) for h in range(8)]


def test_uniform_attention_stands_below_once_for_all_layers_that_share_it():
    lines = [line.split() for line in view(RECORDS["run"], 200) if "if uniform" in line]
    assert len(lines) == 1
    view_ = RECORDS["run"].of_layer(0)
    assert lines[0][2] == f"{np.log(15):.2f}" == f"{-np.log(view_.arrays['uniform_map'][0, 0, 3, 3]):.2f}"
    rows = [line.split("  ") for line in view(RECORDS["sinks"], 200) if line.strip().startswith("uniform, ")]
    assert [next(word for word in row if word).strip() for row in rows] == ["uniform, layers 0, 2", "uniform, layer 1"]


def test_chosen_layers_and_heads_are_listed_alone():
    record = RECORDS["heads"]
    lines = view(record, 120, layers=((None, 2), ("self", 0)), heads=(5, 1))
    assert [(layer, h) for layer, h, _, _ in table_rows(lines)] == [("0", 1), ("0", 5), ("2", 1), ("2", 5)]
    assert set(grid_signs(lines)) == {"0", "2"}
    lines = view(RECORDS["pair"], 120, layers=(("cross", 1),))
    assert set(grid_signs(lines)) == {"cross 1"}
    assert set(grid_signs(view(RECORDS["pair"], 120, layers=((None, 1),)))) == {"encoder 1", "decoder 1", "cross 1"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("run", {"layers": ((None, 3),)}, "--layer 3 is not in the record, which has layers 0–2"),
        ("run", {"layers": (("cross", 1),)}, "--layer cross.1 is not in the record, which has layers 0–2"),
        (
            "pair",
            {"layers": ((None, 2),)},
            "--layer 2 is not in the record, which has encoder 0, 1, decoder 0, 1, cross 0, 1",
        ),
        ("run", {"heads": (4,)}, "head 4 is not in layers 0–2 of the record, with the heads 0 to 3"),
        (
            "run",
            {"layers": ((None, 1),), "maps": (9,)},
            "head 9 is not in layer 1 of the record, with the heads 0 to 3",
        ),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(name, options, message):
    with pytest.raises(UsageError) as caught:
        view(RECORDS[name], **options)
    assert caught.value.message == message


def test_sinks_are_reported_by_key_with_how_many_heads_have_them():
    record = RECORDS["run"]
    text = flat(view(record, 200))
    keys = {}
    for index in range(3):
        pattern = record.of_layer(index).arrays["pattern"][0].astype(float)
        for h in range(4):
            key = int(pattern[h].sum(0).argmax())
            keys.setdefault(key, []).append((pattern[h].sum(0)[key] / pattern[h].sum(), f"{index}.{h}"))
    key, own = max(keys.items(), key=lambda item: (len(item[1]), max(item[1])))
    noun = "head" if len(own) == 1 else "heads"
    name = record.sequences[0].tokens[key]
    expected = f"{key} “{name}” in {len(own)} {noun}, at most {100 * max(own)[0]:.0f} % (layer.head {max(own)[1]})"
    meant = "sinks (at least 10 % of all attention and 3 × uniform, from most queries)"
    assert f"{meant}: {expected}" in text


def test_a_few_chosen_heads_say_where_they_attend_most():
    record = RECORDS["run"]
    text = flat(view(record, 120, layers=((None, 1),), heads=(2,)))
    received = record.of_layer(1).arrays["received"][0, 2]
    key = int(received.argmax())
    uniform = record.of_layer(1).arrays["uniform_received"][0, 0, key]
    weight = 100 * received[key] / received.sum()
    assert f"{key} “{record.sequences[0].tokens[key]}” {weight:.0f} % ×{received[key] / uniform:.2f}" in text
    assert "receives most" not in flat(view(layered(n_layers=1), 120))


# --------------------------------------------------------------------------------------------------------------- spans


def span_cells(lines, n_rows):
    start = lines.index("between spans")
    return [line.split() for line in lines[start + 3 : start + 3 + n_rows]]


def expected_span(record, index, one, other, heads):
    p = record.of_layer(index).arrays["pattern"][0].astype(float)[heads]
    rows, columns = list(SPANS[one].tokens[0]), list(SPANS[other].tokens[0])
    mass = p[:, rows][:, :, columns].sum(-1).mean()
    return [weight_text(mass, 2), f"×{short_text(mass / (len(columns) / 15))}"]


def test_spans_give_each_other_what_the_patterns_say_beside_uniform_attention():
    record = RECORDS["run"]
    cells = span_cells(view(record, 120), 3)
    for index, row in enumerate(cells):
        expected = [expected_span(record, index, a, b, slice(None)) for a in (0, 1) for b in (0, 1)]
        assert row == [str(index), *(word for pair in expected for word in pair)]
    chosen = span_cells(view(record, 120, heads=(3,)), 3)
    for index, row in enumerate(chosen):
        assert row[:4] == [str(index), "·", "head", "3"]
        assert row[4:6] == expected_span(record, index, 0, 0, [3])
    text = flat(view(record, 120))
    assert "attention is not causation" in text
    assert "long spans are not favoured" in text


def test_pairs_of_spans_that_do_not_fit_get_tables_of_their_own():
    lines = view(RECORDS["run"], 40)
    start = lines.index("between spans")
    assert lines[start + 1].split() == ["animals", "animals"]
    assert lines[start + 6].split() == ["rest", "rest"]
    assert lines[start + 7].split() == ["layer", "→", "animals", "→", "rest"]
    assert lines[start + 8].split()[1:3] == expected_span(RECORDS["run"], 0, 1, 0, slice(None))


@pytest.mark.parametrize(("width", "per_table"), [(40, 2), (55, 3), (70, 3), (120, 9)])
def test_every_pair_of_spans_has_a_column_beside_those_of_its_own_span(width, per_table):
    spans = tuple(SpanTokens(name, ((i + 1,),)) for i, name in enumerate(("a", "b", "animals")))
    lines = view(layered(n_layers=1, n_heads=2, spans=spans), width)
    start = lines.index("between spans")
    headings = [i for i, line in enumerate(lines[start:], start) if line.startswith("layer") and "→" in line]
    pairs = [list(zip(lines[i - 1].split(), lines[i].split()[2::2], strict=True)) for i in headings]
    names = [span.name for span in spans]
    assert [pair for table in pairs for pair in table] == [(a, b) for a in names for b in names]
    assert max(map(len, pairs)) == per_table
    assert per_table == 9 or all(len({one for one, _ in table}) == 1 for table in pairs)
    masses = layered(n_layers=1, n_heads=2, spans=spans).of_layer(0).arrays["span_mass"][0].mean(0)
    shown = [word for i in headings for word in lines[i + 1].split()[1::2]]
    assert shown == [weight_text(float(mass), 2) for mass in masses.ravel()]


# ------------------------------------------------------------------------------------------------------------ patterns


def titles(lines):
    return [
        line.split(" ·")[0] + " ·" + line.split(" ·")[1] for line in lines if re.match(r"(\w+ )?layer \d+ · head", line)
    ]


def matrix_rows(lines, title):
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    return lines[
        start + 2 : start
        + 2
        + next(i for i, line in enumerate(lines[start + 2 :]) if not line.strip() or re.search("─|each row:", line))
    ]


def test_without_a_choice_nothing_is_drawn_but_a_hint():
    lines = view(RECORDS["run"])
    assert "--layer N --head H draws a pattern" in lines
    assert titles(lines) == []
    assert "draws a pattern" not in flat(view(RECORDS["heads"]))
    assert "draws a pattern" not in flat(view(RECORDS["run"], view="none"))


@pytest.mark.parametrize("name", ["run", "sinks"])
def test_a_chosen_head_of_a_chosen_layer_is_drawn_cell_by_cell(name):
    record = RECORDS[name]
    lines = view(record, 200, layers=((None, 1),), heads=(2,))
    assert titles(lines) == ["layer 1 · head 2"]
    arrays = record.of_layer(1).arrays
    pattern, allowed = arrays["pattern"][0, 2].astype(float), arrays["allowed"][0, 0]
    rows = matrix_rows(lines, "layer 1 · head 2")
    assert len(rows) == 15
    for i, line in enumerate(rows):
        words = line.split()
        cells = [weight_text(pattern[i, j], 2) if allowed[i, j] else "0" for j in range(15)]
        assert [word.rstrip("*") for word in words[1:16]] == cells
        sums = [weight_text(x, 2) for x in (pattern[i].sum(), 1 - pattern[i].sum())] if name == "sinks" else []
        assert words[16 : 16 + len(sums)] == sums
        assert words[16 + len(sums)] == f"{arrays['entropy'][0, 2, i]:.2f}"


def test_all_drawn_heads_share_one_scale_of_the_rows_that_are_drawn():
    record = RECORDS["generated"]
    for rows in (None, (3, 7)):
        text = flat(view(record, 200, layers=((None, 0), (None, 2)), heads=(0, 1), rows=rows))
        largest = max(
            record.of_layer(i).arrays["pattern"][0, h, list(rows or range(1, 15))].max() for i in (0, 2) for h in (0, 1)
        )
        assert text.count("shade linear") == 1
        assert f"shade linear, 0 … {weight_text(largest, 2)}{' or more' * (rows is None)} for all heads" in text


def test_layers_that_are_chosen_show_their_first_and_last_heads_and_heads_those_of_some_layers():
    record = layered(SHORT, n_layers=6, n_heads=11)
    lines = view(record, layers=((None, 2),))
    assert titles(lines) == [f"layer 2 · head {h}" for h in (0, 1, 2, 3, 7, 8, 9, 10)]
    assert "⋮ 3 patterns not drawn (--all, --layer, --head)" in lines
    assert len(titles(view(record, layers=((None, 2),), everything=True))) == 11
    lines = view(record, heads=(4, 5))
    assert titles(lines) == [f"layer {i} · head {h}" for i in (0, 1, 4, 5) for h in (4, 5)]
    assert "⋮ 4 patterns not drawn (--all, --layer, --head)" in lines
    assert len(titles(view(record, layers=((None, 2), (None, 3)), heads=tuple(range(11))))) == 22


def test_rows_that_are_requested_are_drawn_alone_with_their_places():
    lines = view(RECORDS["run"], 200, layers=((None, 0),), heads=(1,), rows=(13, 2))
    rows = matrix_rows(lines, "layer 0 · head 1")
    assert [row.split()[:2] for row in rows] == [["13", "on"], ["2", "quick"]]
    pattern = RECORDS["run"].of_layer(0).arrays["pattern"][0, 1]
    assert rows[1].split()[2].rstrip("*") == weight_text(float(pattern[2, 0]), 2)
    many = layered(text_of(WORDS * 3))
    rows = matrix_rows(view(many, 200, layers=((None, 0),), heads=(1,), rows=tuple(range(30))), "layer 0 · head 1")
    assert len(rows) == 30
    text = flat(view(RECORDS["batch"], 120, layers=((None, 0),), heads=(0,), rows=(9,)))
    assert "none of the chosen rows is in this text" in text


def test_rows_are_looked_up_in_the_text_that_each_layer_reads():
    lines = view(RECORDS["pair"], 200, layers=((None, 0),), heads=(0,), rows="last")
    for title, row in (("encoder layer 0", "14"), ("decoder layer 0", "8"), ("cross layer 0", "8")):
        assert [found.split()[:2] for found in matrix_rows(lines, f"{title} · head 0")] == [[row, "[SEP]"]]
    lines = view(RECORDS["batch"], 200, layers=((None, 0),), heads=(0,), rows="last", view="top")
    assert [line.split()[:2] for line in lines if "→  " in line] == [["14", "“[SEP]”"], ["3", "“[SEP]”"]]
    lines = view(KEPT, 200, layers=((None, 0),), heads=(0,), rows="generated")
    rows = matrix_rows(lines, "layer 0 · head 0")
    assert [row.split()[0] for row in rows] == ["8", "9", "10", "11", "12", "13"]
    made = replace(RECORDS["pair"].model, generated=Generated((7,), 2, 2))
    pair = replace(RECORDS["pair"], model=made)
    lines = view(pair, 200, layers=(("encoder", 0), ("cross", 0)), heads=(0,), rows="generated")
    assert "none of the chosen rows is in this text" in flat(lines)
    assert [row.split()[0] for row in matrix_rows(lines, "cross layer 0 · head 0")] == ["6", "7"]


def test_rows_of_which_the_model_made_the_next_token_say_what_they_made():
    for options in ({}, {"view": "top"}):
        lines = view(KEPT, 200, layers=((None, 0),), heads=(0,), everything=True, **options)
        text = flat(lines)
        tokens = KEPT.sequences[0].tokens
        for i in range(14):
            assert (f"{tokens[i]} → {tokens[i + 1]}" + ("”" if options else " ") in text) == (i >= 8)
    assert "after query a the model generated token b" in text
    rows = matrix_rows(view(KEPT, 120, layers=((None, 0),), heads=(0,), rows=(8, 12)), "layer 0 · head 0")
    assert [row.split()[:4] for row in rows] == [["8", "over", "→", "it"], ["12", "slept", "→", "on"]]
    assert "made the next token" not in flat(view(KEPT, 120, layers=((None, 0),), heads=(0,), rows=(3,)))


def test_the_strongest_keys_of_a_row_come_with_what_a_learned_sink_took():
    record = RECORDS["sinks"]
    lines = view(record, 120, layers=((None, 0),), heads=(1,), view="top", rows=(6,), top=2)
    pattern = record.of_layer(0).arrays["pattern"][0, 1, 6].astype(float)
    tokens = record.sequences[0].tokens
    keys = np.argsort(-pattern)[:2]
    said = ", ".join(f"{k} “{tokens[k]}” {weight_text(pattern[k], 2)}" for k in keys)
    assert f"6 “jump” → {said} · s_aux {weight_text(1 - pattern.sum(), 2)}" in flat(lines)
    assert "rows sum to less than 1" in flat(lines)


def test_a_layer_whose_pattern_was_not_kept_is_named():
    record = RECORDS["run"]
    arrays = {
        name: a for name, a in record.arrays.items() if not name.startswith(("layers.1.pattern", "layers.1.allowed"))
    }
    text = flat(view(replace(record, arrays=arrays), 200, heads=(0,)))
    assert "the pattern of layer 1 is not in this record, so it is not drawn; --keep-limit makes room" in text
    assert titles(view(replace(record, arrays=arrays), heads=(0,))) == ["layer 0 · head 0", "layer 2 · head 0"]


@pytest.mark.parametrize("colour", [False, True])
def test_maps_corners_and_queries_are_those_of_their_layer(colour):
    record = RECORDS["batch"]
    lines = view(record, 100, colour, layers=((None, 1),), maps=(2,))
    assert [line[:35] for line in lines if "each cell" in line] == [
        f"layer 1 · head 2 · sequence {b} · {KINDS[5][:3]}" for b in (0, 1)
    ]
    assert sum("· cells" in line for line in lines) == 8
    tokens = record.sequences[0].tokens
    weights = record.of_layer(1).arrays["top_shares"][0, 0, 0]
    keys = record.of_layer(1).arrays["top_keys"][0, 0, 0]
    said = ", ".join(f"0:{k} “{tokens[k]}” {100 * s:.0f} %" for k, s in zip(keys, weights, strict=True))
    assert f"layer 1 · sequence 0 · query 0:3 “{tokens[3]}” · 15 visible keys" in flat(lines)
    assert f"head 0 {said}" in flat(lines)
    assert "layer 2 ·" not in flat(lines)


def test_a_map_distinguishes_the_learned_sink_from_what_is_shown():
    record = RECORDS["sinks"]
    (line,) = [line for line in view(record, 120, layers=((None, 0),), maps=(1,)) if "sink logit ." in line]
    p = record.of_layer(0).arrays["pattern"][0, 1].astype(float)
    sink, learned = p[:, 0].mean(), (1 - p.sum(-1)).mean()
    found = [float(word) for word in re.findall(r"\.\d\d", line)[:3]]
    assert np.abs(np.array(found) - [sink, learned, 1 - sink - learned]).max() <= 0.0051


def test_maps_of_all_layers_are_limited_and_counted():
    lines = view(layered(SHORT, n_layers=11), maps=(0,))
    assert sum("each cell" in line for line in lines) == 8
    assert "⋮ 3 maps not drawn (--all or --layer)" in lines


# --------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize("name", ["run", "generated", "sinks", "left", "batch"])
def test_words_are_sums_over_their_keys_and_means_over_their_queries(name):
    record = RECORDS[name]
    before = record.of_layer(1)
    after = merge_words(before)
    groups = [[0], [1], [2], [3], [4, 5], [6, 7], [8], [9], [10], [11], [12], [13], [14]]
    assert after.sequences[0].tokens == ("[CLS]", "the", "quick", "brown", "foxes", "jumped", *(*WORDS[7:], "[SEP]"))
    assert after.arrays["pattern"].shape[2:] == (13, 13)
    pattern, allowed = before.arrays["pattern"][0].astype(float), before.arrays["allowed"][0, 0]
    for a, rows in enumerate(groups):
        for b, columns in enumerate(groups):
            mass = sum(pattern[:, i, j] for i in rows for j in columns) / len(rows)
            assert np.abs(after.arrays["pattern"][0, :, a, b] - mass).max() < 1e-12
            assert after.arrays["allowed"][0, 0, a, b] == any(allowed[i, j] for i in rows for j in columns)
    rows = after.arrays["pattern"][0]
    rest = 1 - rows.sum(-1)
    own = -np.sum(np.where(rows > 0, rows * np.log(np.maximum(rows, 1e-300)), 0), -1)
    own -= np.where(rest > 1e-4, rest * np.log(np.maximum(rest, 1e-300)), 0)
    assert np.abs(after.arrays["entropy"][0] - own).max() < 1e-9
    if len(record.sequences) > 1:  # the short text stays where its padding puts it
        first = 13 - 4 if name == "left" else 0
        small = before.arrays["pattern"][1, :, 11:, 11:] if name == "left" else before.arrays["pattern"][1, :, :4, :4]
        assert np.abs(after.arrays["pattern"][1, :, first : first + 4, first : first + 4] - small).max() < 1e-6
        assert after.arrays["pattern"][1].sum() == pytest.approx(small.sum())


def test_a_word_that_is_cut_through_a_character_is_whole_again():
    text = text_of(("a", "日⟨1/3⟩", "日⟨2/3⟩", "日⟨3/3⟩"), parts=(2, 3))
    pieces = [replace(p, bytes=b) for p, b in zip(text.pieces, ("5b", "61", "e6", "97", "a5", "5d"), strict=True)]
    record = layered(replace(text, pieces=tuple(pieces)))
    assert merge_words(record.of_layer(0)).sequences[0].tokens == ("[CLS]", "a", "日", "[SEP]")


def test_words_are_drawn_with_what_was_done_to_them():
    lines = view(RECORDS["run"], 200, layers=((None, 0),), heads=(0,), words=True, rows=(5, 8))
    rows = matrix_rows(lines, "layer 0 · head 0")
    assert [row.split()[:2] for row in rows] == [["4", "foxes"], ["6", "over"]]
    assert words_with(RECORDS["run"].sequences[0], (5, 8)) == (4, 6)
    text = flat(lines)
    assert (
        "attention weights summed over the tokens of the attended word, averaged over those of the attending word"
        in text
    )
    assert "rows count words, not tokens" in text
    made = replace(KEPT, model=replace(KEPT.model, generated=Generated((8,), 7, 7)))
    text = flat(view(made, 200, layers=((None, 0),), heads=(0,), words=True))
    assert "jumped → over" in text
    assert "foxes →" not in text


def test_words_of_a_pair_are_those_of_each_text():
    after = merge_words(RECORDS["pair"].of_layer(3))
    assert (len(after.sequences[0].tokens), len(after.context[0].tokens)) == (7, 13)
    assert after.arrays["pattern"].shape[2:] == (7, 13)
    assert np.abs(after.arrays["pattern"].sum(-1) - 1).max() < 1e-6


# -------------------------------------------------------------------------------------------------------- for programs


def read_csv(record):
    return list(csv_reader.DictReader(StringIO("".join(csv.pieces(record)))))


@pytest.mark.parametrize("name", ["run", "pair", "left"])
def test_csv_has_a_line_for_every_cell_of_every_layer(name):
    record = RECORDS[name]
    rows = iter(read_csv(record))
    for index, layer in enumerate(record.layers):
        one = record.of_layer(index)
        for b, text in enumerate(one.sequences):
            for h in range(4):
                for i in range(len(text.tokens)):
                    for j in range(len(one.keys[b].tokens)):
                        row = next(rows)
                        cell = (b, h, one.first_query(b) + i, one.first_key(b) + j)
                        assert (row["layer"], row["attention"]) == (str(layer.layer), layer.name)
                        assert [int(row[key]) for key in ("sequence", "head", "query", "key")] == [b, h, i, j]
                        assert np.float32(row["pattern"]) == one.arrays["pattern"][cell]
                        assert row["allowed"] == str(int(one.arrays["allowed"][b, 0, *cell[2:]]))
                        assert row["key_token"] == cell_text(one.keys[b].tokens[j])
    assert next(rows, None) is None


def test_csv_without_matrices_has_a_line_for_every_head():
    record = RECORDS["heads"]
    rows = read_csv(record)
    assert list(rows[0])[:4] == ["layer", "attention", "head", "kind"]
    assert len(rows) == 48
    for row, head in zip(rows, record.heads, strict=True):
        assert (row["layer"], row["attention"], row["head"]) == (str(head.layer), head.attention, str(head.head))
        assert float(row["entropy"]) == head.entropy


def test_the_name_of_an_attention_cannot_be_taken_for_a_formula():
    record = layered(SHORT, n_layers=1, keep=False)
    renamed = replace(
        record, layers=(replace(record.layers[0], name="=1+\x1b"),),
        heads=tuple(replace(head, attention="=1+\x1b") for head in record.heads),
    )  # fmt: skip
    rows = read_csv(renamed)
    assert [json.loads(row["attention"]) for row in rows] == ["=1+\x1b"] * 4
    assert "\x1b" not in "".join(csv.pieces(renamed))


@pytest.mark.parametrize("name", RECORDS)
def test_json_is_one_document_with_the_arrays_inside_their_layers(name):
    record = RECORDS[name]

    def refuse(word):
        raise AssertionError(word)

    document = json.loads("".join(json_view.pieces(record)), parse_constant=refuse)
    assert document["model"]["path"] == "./tiny"
    assert "pattern" not in document
    for index, layer in enumerate(document["layers"]):
        arrays = record.of_layer(index).arrays
        assert (layer["layer"], layer["kind"]) == (record.layers[index].layer, record.layers[index].kind)
        for key in ("pattern", "entropy", "map"):
            if key in arrays:
                seen = arrays["visible"] > 0 if key == "entropy" else True  # elsewhere it means nothing
                found = np.array(layer[key], np.float32)
                assert np.array_equal(found, np.where(seen, arrays[key], np.nan), equal_nan=True)
            else:
                assert layer[key] is None
