import re
from dataclasses import replace

import numpy as np
import pytest
from support.records import drawn, make_record, walked, with_sinks

from mhacli.errors import UsageError
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.base.tokens import token_table
from mhacli.render.heads.table import overview
from mhacli.render.run.view import (
    axes_text,
    run_view,
    self_check_line,
    shape_trace,
    timing_table,
)
from mhacli.results.record.head_statistics import Averages, HeadStatistics
from mhacli.results.record.record import SelfCheck, Step, Timing

WIDTHS = [40, 80, 200]
HOSTILE = ("\x1b[31mred", "\u202eevil", "漢字漢字漢字", "a\u0301\u0301", " ", "\n", "x" * 300, "[bold]b[/bold]", "")


def numbered(count):
    return tuple(f"t{i}" for i in range(count))


RECORDS = {
    "small": make_record(),
    "batch": make_record(("the", "cat", "sat"), ("a", "dog"), causal=True),
    "context": make_record(("the", "cat"), context=[numbered(30)]),
    "training": make_record(causal=True, dropout=0.5),
    "large": make_record(numbered(300), n_heads=11),
    "hostile": make_record(HOSTILE, ("[link]",)),
    "many": make_record(*[(f"t{i}",) for i in range(9)]),
    "walked": walked(make_record()),
}


def view(record, width=80, **options):
    return drawn(run_view(record, ViewOptions(**options), Screen(width, False)), width)


def test_the_short_name_of_a_type_beside_mixed_is_explained():
    record = make_record()
    numbers = {"offset": -3, "at_offset": 0.99}
    uniform = Averages(effective_keys=3.0, offset=-3, at_offset=0.0)
    heads = [replace(head, kind="mixed", uniform=uniform, **numbers) for head in record.heads]
    lines = view(replace(record, heads=heads))
    assert any("mixed (pos" in line for line in lines)
    assert "pos = positional" in " ".join(lines)


@pytest.mark.parametrize("causal", [False, True])
def test_the_last_screen_of_a_sentence_holds_the_patterns_of_four_heads(causal):
    lines = view(make_record(("the", "cat", "sat", "on", "the", "mat"), n_heads=4, causal=causal))
    first = next(i for i, line in enumerate(lines) if line.startswith("head 0 ─"))
    n_next, prompt = 4, 1  # what `mha run` suggests to type stands below
    assert len(lines) - first + n_next + prompt <= 24
    assert len(lines) + n_next <= 45


@pytest.mark.parametrize("typed", [("--file", "poem.txt"), ("--file=poem.txt",), ("-f", "poem.txt"), ("-fpoem.txt",)])
def test_the_header_names_the_file_and_counts_the_tokens(typed):
    record = replace(make_record(("the", "cat"), ("a", "dog", "sat")), command=("mha", "run", *typed))
    assert "poem.txt · 2 sequences of 2 to 3 tokens" in " ".join(view(record, 200)[:1])
    unnamed = replace(record, command=("mha", "run", "--", *typed))
    assert "poem.txt" not in " ".join(view(unnamed, 200))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["matrix", "heatmap", "top", "none"])
@pytest.mark.parametrize("name", RECORDS)
def test_no_view_is_wider_than_the_screen_or_lets_a_token_speak_to_it(name, kind, width):
    text = "\n".join(view(RECORDS[name], width, view=kind))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert "self-check ok" in text


@pytest.mark.parametrize("kind", ["matrix", "heatmap", "top"])
@pytest.mark.parametrize("colour", [True, False])
def test_a_pattern_with_nan_is_drawn_in_every_view(kind, colour):
    record = RECORDS["large"]
    pattern = record.arrays["pattern"].copy()
    pattern[0, 0, 1], pattern[0, 1] = np.nan, np.nan
    record = replace(record, arrays={**record.arrays, "pattern": pattern})
    text = "\n".join(drawn(run_view(record, ViewOptions(view=kind), Screen(80, colour)), 80))
    assert ("?" if kind == "heatmap" else "nan") in text


def titles(lines):
    """Of each pattern its sequence, 0 where there is one, and its head."""
    return [
        (int(sequence or 0), int(head))
        for line in lines
        if "──" in line
        for sequence, head in re.findall(r"(?:sequence (\d+) · )?head (\d+)", line)
    ]


def test_every_head_of_every_sequence_is_drawn_under_its_title():
    assert titles(view(RECORDS["batch"])) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_is_not_drawn_is_counted():
    lines = view(RECORDS["large"], view="top", verbose=True)
    assert titles(lines) == [(0, head) for head in (0, 1, 2, 3, 7, 8, 9, 10)]
    assert "⋮ 3 heads not drawn (--all or --head)" in lines
    lines = view(RECORDS["large"], view="top")
    assert titles(lines) == [(0, 0)]
    assert "⋮ 10 heads not drawn (--all or --head)" in lines
    lines = view(RECORDS["many"], view="none")
    assert titles(lines) == []
    lines = view(RECORDS["many"], view="none", tokens=True)
    assert "⋮ 5 sequences not drawn (--all or --sequence)" in lines
    assert [line[:11] for line in lines if line.startswith("sequence")] == [f"sequence {i}:" for i in (0, 1, 7, 8)]


SENTENCE = make_record(("the", "cat", "sat", "on", "the", "mat"), n_heads=4)


@pytest.mark.parametrize(("width", "beside"), [(70, 1), (80, 2), (120, 2), (200, 4)])
def test_patterns_stand_side_by_side_as_many_as_fit_and_each_keeps_its_numbers(width, beside):
    lines = view(SENTENCE, width, heads=(0, 1, 2, 3))
    starts = [i for i, line in enumerate(lines) if re.match("head [0-9] ─", line)]
    assert titles(lines) == [(0, head) for head in range(4)]
    assert len(starts) == 4 // beside
    for row, start in enumerate(starts):
        for query in range(6):
            cells = re.findall(r"(?<![\d.])[01]?\.\d\d(?=[* ]|$)", lines[start + 2 + query])
            weights = SENTENCE.arrays["pattern"][0, row * beside : (row + 1) * beside, query]
            expected = [f"{weight:.2f}".removeprefix("0") for weight in weights.ravel()]
            assert [cell for cell in cells if not cell.startswith(("0", "1"))] == expected


def test_of_heads_whose_patterns_take_many_lines_the_first_are_drawn_and_the_table_holds_all():
    words = ("i", "gave", "my", "sister", "the", "red", "book", "on", "monday")
    lines = view(make_record(words, n_heads=4), 100)
    assert titles(lines) == [(0, 0), (0, 1)]
    assert "⋮ 2 heads not drawn (--all or --head)" in lines
    assert [line.split()[0] for line in lines if re.match(r" +\d ", line)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("n_tokens", [6, 9, 13, 22])
def test_the_first_screen_of_a_sentence_has_at_most_45_lines(n_tokens, width, causal):
    record = make_record(tuple(f"word{i}" for i in range(n_tokens)), n_heads=4, causal=causal)
    lines = view(record, width)
    assert len(lines) <= 45 - 5 or len(titles(lines)) == 1  # a terminal shows besides what to type next


def test_the_sentence_of_the_readme_shows_all_its_heads():
    assert len(titles(view(SENTENCE))) == 4


def test_sinks_are_named_below_the_table_where_a_head_has_one():
    with_key = with_sinks(SENTENCE, 4)
    words = " ".join(" ".join(view(with_key)).split())
    key = with_key.heads[0].sink_keys[0]
    assert f"head 3: 4 “the” {100 * key.share:.0f} %" in words
    assert [line for line in view(SENTENCE) if "sinks" in line] == []


def test_heads_whose_queries_see_one_key_have_no_type():
    alone = Averages(effective_keys=1.0)
    record = make_record(("cat",))
    record = replace(record, heads=tuple(replace(head, uniform=alone) for head in record.heads))
    lines = view(record)
    assert [line.split()[:2] for line in lines if re.match(r" +\d ", line)] == [["0", "–"], ["1", "–"]]
    assert "no query sees more than one key" in " ".join(lines)
    two = replace(record, heads=tuple(replace(head, uniform=Averages(effective_keys=1.5)) for head in record.heads))
    assert [line.split()[2] for line in view(two) if re.match(r" +\d ", line)] == ["mixed", "mixed"]


def test_each_table_is_printed_where_it_is_wanted():
    record = RECORDS["small"]
    rows = {"tokens": "sequence 0: 3 tokens", "shapes": "batch 1 ·", "timings": "first run"}

    def shown(**options):
        lines = view(record, **options)
        return {name for name, words in rows.items() if words in " ".join(lines)}

    assert shown() == set()
    for name in rows:
        assert shown(**{name: True}) == {name}
    assert shown(verbose=True) == set(rows)


def test_the_brief_view_has_a_line_per_head_and_the_self_check():
    lines = [line for line in view(RECORDS["batch"], brief=True) if line]
    assert [line.split()[0] for line in lines] == ["head", "0", "1", "self-check"]


def test_choices_draw_what_was_chosen():
    assert titles(view(RECORDS["large"], heads=(9, 2), view="top")) == [(0, 9), (0, 2)]
    assert titles(view(RECORDS["many"], sequences=(5,), heads=(1,))) == [(5, 1)]


def test_everything_draws_all():
    assert len(titles(view(RECORDS["many"], everything=True))) == 18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": (2,)}, "--head 2 "),
        ({"sequences": (3,)}, "--sequence 3 "),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(options, message):
    with pytest.raises(UsageError) as caught:
        view(RECORDS["small"], **options)
    assert caught.value.message.startswith(message)


def test_a_record_without_its_pattern_says_so():
    record = RECORDS["small"]
    arrays = {name: array for name, array in record.arrays.items() if name != "pattern"}
    text = " ".join(view(replace(record, arrays=arrays)))
    assert "the pattern is not in this record, so no head is drawn; --keep pattern keeps it" in text


def test_training_shows_the_pattern_before_and_after_dropout():
    lines = [line for line in view(RECORDS["training"]) if "head 0," in line]
    assert re.findall("head 0, (before|after) dropout", " ".join(lines)) == ["before", "after"]


def test_the_scale_is_printed_with_its_range_and_kind():
    record = RECORDS["batch"]
    weights, allowed = record.arrays["pattern"], record.arrays["allowed"]
    rows = [weights[b, h, i].max() for b in range(2) for h in range(2) for i in range(3) if allowed[b, 0, i].sum() > 1]
    top = f"{max(rows):.3f}".lstrip("0")
    largest = f"{top} or more" if weights.max() > max(rows) + 0.001 else top  # a query that sees one key gives it all
    assert f"shade linear, 0 … {largest} for all heads" in " ".join(view(record, precision=3))
    assert f"scale linear, 0 … {largest} for all heads" in " ".join(view(record, precision=3, view="heatmap"))


@pytest.mark.parametrize("drawn_as", ["matrix", "heatmap"])
def test_of_one_head_the_scale_compares_it_with_no_other(drawn_as):
    assert "all heads" not in " ".join(view(make_record(), heads=(1,), view=drawn_as))


def test_the_signs_of_the_table_are_explained():
    text = " ".join(" ".join(view(RECORDS["batch"], verbose=True)).split())
    for part in ("each row: a query's attention weights over the keys", "* the row's maximum", "0 masked, .00 small",
                 "Σ sum of the row", "H entropy in nats"):  # fmt: skip
        assert part in text
    assert "Σ sum" not in " ".join(view(RECORDS["batch"]))
    assert "‹pad› padding, masked" in text
    assert "‹pad›" not in " ".join(view(RECORDS["small"]))


# ------------------------------------------------------------------------------------------------------------ tokens


def tokens_of(record, width=80, index=0, **options):
    of_context = options.pop("of_context", False)
    table = token_table(record, index, ViewOptions(**options), Screen(width, False), of_context=of_context)
    return drawn(table, width)


def test_tokens_are_listed_with_id_and_offsets_and_padding_as_padding():
    assert [line.split() for line in tokens_of(RECORDS["batch"], index=1)] == [
        ["sequence", "1:", "2", "tokens", "+", "1", "padding,", "vocabulary", "of", "5"],
        ["index", "token", "id", "offsets"],
        ["0", "a", "0", "0–1"],
        ["1", "dog", "2", "2–5"],
        ["2", "‹pad›", "–", "–"],
    ]


def test_the_tokens_of_a_context_are_listed_under_its_name():
    lines = tokens_of(RECORDS["context"], of_context=True)
    assert lines[0].startswith("context 0: 30 tokens, ")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_hidden_tokens_are_counted(width):
    lines = tokens_of(RECORDS["large"], width)
    rows = lines[[line.split()[0] for line in lines].index("index") + 1 :]
    gap = next(i for i, line in enumerate(rows) if "⋮" in line)
    assert rows[gap].split() == ["⋮", "284", "more", "(--all)"]
    assert [int(line.split()[0]) for line in rows[:gap] + rows[gap + 1 :]] == [*range(8), *range(292, 300)]
    assert len(tokens_of(RECORDS["large"], width, everything=True)) == len(lines) - 17 + 300


@pytest.mark.parametrize("width", WIDTHS)
def test_ids_and_offsets_stay_whole_beside_any_token(width):
    record = RECORDS["hostile"]
    for line, token_id, (start, end) in zip(
        tokens_of(record, width)[2:], record.sequences[0].ids, record.sequences[0].offsets, strict=True
    ):
        assert line.split()[-2:] == [str(token_id), f"{start}–{end}"]


def test_a_token_that_the_vocabulary_lacks_is_marked():
    record = make_record(("cat", "dog"))
    sequence = replace(record.sequences[0], ids=(0, 1))
    record = replace(record, vocabulary=("cat", "<unk>"), sequences=(sequence,))
    assert [line.split()[1:3] for line in tokens_of(record)[2:]] == [["cat", "0"], ["dog", "<unk>"]]


# ------------------------------------------------------------------------------------------------------------ shapes


def test_axes_are_named_with_their_sizes():
    assert axes_text(("batch", "query"), (2, 5)) == "batch 2 · query 5"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["small", "large"])
def test_every_site_and_every_axis_is_in_the_trace(name, width):
    record = RECORDS[name]
    text = " ".join(" ".join(drawn(shape_trace(record, Screen(width, False)), width)).split())
    for step in record.trace:
        axes = [f"{axis} {size}" for axis, size in zip(step.axes, step.shape, strict=True)]
        assert re.search(rf"\b{step.site} +" + "( · | )".join(map(re.escape, axes)), text)


def test_formulas_are_shown_where_there_is_room():
    step = Step("z", ("batch",), (1,), "float32", "z = pattern v", "", "copy", (1,), 0, 4)
    record = replace(RECORDS["small"], trace=(step,))
    assert drawn(shape_trace(record, Screen(80, False)), 80) == ["z  batch 1  z = pattern v"]
    assert drawn(shape_trace(record, Screen(36, False)), 36) == ["z  batch 1  z = pattern v"]
    assert drawn(shape_trace(record, Screen(35, False)), 35) == ["z  batch 1"]


# ------------------------------------------------------------------------------------------------------ heads, timing


@pytest.mark.parametrize("width", WIDTHS)
def test_heads_have_their_entropy_relative_to_the_largest(width):
    heads = (
        HeadStatistics(head=0, entropy=1.25, entropy_share=0.5),
        HeadStatistics(head=1, entropy=None, entropy_share=None),
        HeadStatistics(head=2, entropy=0.0, entropy_share=0.0),
        HeadStatistics(head=3, entropy=2.0, entropy_share=1.0, kind="uniform", certainty=1.0),
    )
    record = replace(RECORDS["small"], heads=heads)
    lines = drawn(overview(record, heads, ViewOptions(), Screen(width, False)), width)
    place = lines[0].index("H/max") + len("H/max")
    assert [line[:place].split()[0] for line in lines[1:]] == ["0", "1", "2", "3"]
    assert [line[:place].split()[-1] for line in lines[1:]] == ["50%", "–", "0%", "100%"]
    assert "░ uniform 1.00" in lines[4]


def test_hidden_heads_are_counted_in_the_table():
    known = {head.head: head for head in RECORDS["large"].heads}
    listed = [known[head] for head in (0, 1, 9, 10)]
    lines = drawn(overview(RECORDS["large"], listed, ViewOptions(), Screen(80, False), gap=(2, 7)), 80)
    assert [line.split()[0] for line in lines] == ["head", "0", "1", "⋮", "9", "10"]
    assert lines[3].split()[:3] == ["⋮", "7", "more"]


@pytest.mark.parametrize("width", WIDTHS)
def test_stages_have_their_times_and_shares(width):
    record = replace(
        RECORDS["small"],
        timings={
            "qk": Timing(0.5, (0.004,), 0.004, 0.0001234),
            "q_per_head": Timing(0.0001234, (1.0,), 0.001, 1e-9),
            "total": Timing(0.6, (0.008,) * 5, 0.008, 0.0),
        },
    )
    _, *rows, caption = drawn(timing_table(record, Screen(width, False)), width)
    assert [row.split() for row in rows[:3]] == [
        ["qk", "500", "ms", "4", "ms", "123", "µs", "50", "%"],
        ["q_per_head", "123", "µs", "1", "ms", "1", "ns", "12", "%"],
        ["total", "600", "ms", "8", "ms", "0", "ns"],
    ]
    assert " ".join([*rows[3:], caption]) == "375 tokens/s over 5 runs after the first"


def test_times_that_are_zero_or_missing_are_drawn():
    zero = replace(RECORDS["small"], timings={"qk": Timing(0, (), 0, 0), "total": Timing(0, (), 0, 0)})
    assert drawn(timing_table(zero, Screen(80, False)), 80)[1].split()[-1] == "–"
    assert len(drawn(timing_table(replace(zero, timings={}), Screen(80, False)), 80)) == 1


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (
            SelfCheck(1.5e-7, 2e-6, True),
            "self-check ok: the pattern gives the output within 1.50e-07 (tolerance 2.00e-06)",
        ),
        (
            SelfCheck(None, 2e-6, False),
            "self-check FAILED: the output, or what the pattern gives for it, has NaN or infinite numbers",
        ),
    ],
)
def test_the_self_check_is_reported_with_its_numbers(check, text):
    assert self_check_line(check).plain == text


# --------------------------------------------------------------------------------------------------------- strongest


@pytest.mark.parametrize("width", WIDTHS)
def test_the_strongest_keys_of_each_query_are_listed_in_order(width):
    record = RECORDS["batch"]
    lines = view(record, width, view="top", top=2, heads=(1,), sequences=(0,))
    pattern = record.arrays["pattern"][0, 1]
    for query, token in enumerate(("the", "cat", "sat")):
        keys = sorted(range(query + 1), key=lambda key: -pattern[query, key])[:2]
        weights = (f"{pattern[query, key]:.2f}".removeprefix("0") for key in keys)
        said = ", ".join(
            f"{key} “{('the', 'cat', 'sat')[key]}” {weight}" for key, weight in zip(keys, weights, strict=True)
        )
        assert [line.split() for line in lines].count(f"{query} “{token}” → {said}".split()) == 1


def test_the_hidden_queries_are_counted():
    lines = view(RECORDS["large"], view="top", heads=(0,))
    queries = [int(found[1]) for line in lines if (found := re.match(r"(\d+) “t\d+” →", line))]
    assert queries == [*range(8), *range(292, 300)]
    assert any(line.split() == ["⋮", "284", "rows", "(--all)"] for line in lines)
