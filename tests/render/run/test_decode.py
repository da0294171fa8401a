import re
from dataclasses import replace

import numpy as np
import pytest
from support.layers_made import layered
from support.records import decoded, drawn, make_record

from mhacli.errors import UsageError
from mhacli.render.base.format import seconds_text
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.run.decode import MAX_STEPS, decode_view
from mhacli.render.run.view import MAX_SEQUENCES
from mhacli.results.record.record import CacheTiming, DecodeSummary, SelfCheck, Timing

WIDTHS = [40, 80, 200]
widths = pytest.mark.parametrize("width", WIDTHS)
TEXT = ("the", "cat", "sat", "down")
OPTIONS = ViewOptions(verbose=True)


def lines_of(record, width=80, options=OPTIONS):
    return drawn(decode_view(record, options, Screen(width, False)), width)


def said(lines):
    """The words of some lines, whatever breaks them: a break may stand for a point, or for a comma of a row."""
    return re.sub(r"(\.\d\d\d?\*?),", r"\1", " ".join(" ".join(lines).replace("·", " ").split()))


def sections(record, width=80, options=OPTIONS):
    """What stands between empty lines."""
    return [said(part.split("\n")) for part in "\n".join(lines_of(record, width, options)).split("\n\n")]


def steps_of(record, width=80, options=OPTIONS):
    """The words of each step, without the line that follows its title."""
    return [re.sub(" ─+", "", part) for part in sections(record, width, options) if re.match(r"step \d+ ", part)]


def shared(record, n_kv_heads):
    """The record with fewer heads for keys and values."""
    return replace(record, config=replace(record.config, n_kv_heads=n_kv_heads))


def padded_left(record):
    """The record with its padding moved to the other side of every array."""
    arrays = {name: array.copy() for name, array in record.arrays.items()}
    for b, sequence in enumerate(record.sequences):
        n_padding = record.facts.q_len - len(sequence.tokens)
        for name in ("pattern", "allowed"):
            arrays[name][b] = np.roll(arrays[name][b], (n_padding, n_padding), axis=(1, 2))
    return replace(record, config=replace(record.config, padding="left"), arrays=arrays)


def with_row(record, query, shares):
    """The record with one query's shares, by key, in both heads."""
    pattern = record.arrays["pattern"].copy()
    pattern[0, :, query, : len(shares)] = shares
    return replace(record, arrays={**record.arrays, "pattern": pattern})


# --------------------------------------------------------------------------------------------------------------- steps


@widths
def test_a_prompt_and_its_steps_show_all_that_comes_in_and_what_is_kept(width):
    record = make_record(TEXT, causal=True)
    record = with_row(with_row(record, 1, [0.25, 0.75]), 2, [0.5, 0.375, 0.125])
    record = with_row(record, 3, [0.25, 0.125, 0.0, 0.625])
    rows = ["the 0 .25 cat 1 .75*", "the 0 .50* cat 1 .38 sat 2 .12", "the 0 .25 cat 1 .12 sat 2 .00 down 3 .62*"]
    first, second, third = steps_of(decoded(record, prompt_len=2), width)
    assert first == (
        "step 0 prefill the cat new q [1, 2, 2, 3] k [1, 2, 2, 3] v [1, 2, 2, 3] attends to k [1, 2, 2, 3] v [1, 2, 2, 3] "
        "appends 96 B to 0 tokens before reads 96 B cache 96 B in room for 192 B "
        f"head 0 {rows[0]} head 1 {rows[0]} "
        "largest difference from the full recomputation: 1.00e-07 1000 FLOPs 1 ms"
    )
    assert second == (
        "step 1 decode sat new q [1, 2, 1, 3] k [1, 2, 1, 3] v [1, 2, 1, 3] attends to k [1, 2, 3, 3] v [1, 2, 3, 3] "
        "appends 48 B to 2 tokens before reads 144 B cache 144 B in room for 192 B "
        f"head 0 {rows[1]} head 1 {rows[1]} "
        "largest difference from the full recomputation: 2.00e-07 2000 FLOPs 2 ms"
    )
    assert third == (
        "step 2 decode down new q [1, 2, 1, 3] k [1, 2, 1, 3] v [1, 2, 1, 3] attends to k [1, 2, 4, 3] v [1, 2, 4, 3] "
        "appends 48 B to 3 tokens before reads 192 B cache 192 B "
        f"head 0 {rows[2]} head 1 {rows[2]} "
        "largest difference from the full recomputation: 3.00e-07 3000 FLOPs 3 ms"
    )


@widths
def test_a_cache_that_copies_has_no_room_to_spare_and_one_that_keeps_nothing_says_so(width):
    record = make_record(TEXT, causal=True)
    for number, step in enumerate(steps_of(decoded(record, cache="concat"), width), 1):
        past = "1 token" if number == 2 else f"{number - 1} tokens"
        assert f"appends 48 B to {past} before reads {48 * number} B cache {48 * number} B head" in step
    for number, step in enumerate(steps_of(decoded(record, cache="none"), width), 1):
        tokens = "1 token" if number == 1 else f"{number} tokens"
        assert f"computes q [1, 2, {number}, 3] k [1, 2, {number}, 3] v [1, 2, {number}, 3]" in step
        assert f"keys and values of all {tokens} recomputed, nothing is stored head" in step
        assert "cache" not in step


@widths
def test_the_introduction_describes_the_cache(width):
    record = make_record(TEXT, causal=True)
    start = "cache concat: each step copies the cached keys and values into new tensors and appends its own "
    one_by_one = "one token at a time: its query meets the keys of all tokens so far "
    legend = "per head, the newest query's row: key, position, weight; * the largest; long rows show the largest weights only"
    assert sections(decoded(record, cache="concat"), width)[1] == start + one_by_one + legend
    with_prompt = sections(decoded(record, cache="concat", prompt_len=3), width)[1]
    assert with_prompt == start + "prefill of 3 tokens, then " + one_by_one + legend
    for cache, words in (
        ("none", "no cache: every step recomputes all keys and values "),
        ("preallocated", "each step writes its keys and values into memory that was allocated at the beginning "),
    ):
        assert sections(decoded(record, cache=cache), width)[1] == f"cache {cache}: {words}{one_by_one}{legend}"


@widths
def test_sequences_share_a_step_and_one_that_has_ended_is_padding(width):
    record = make_record(("the", "cat", "sat"), ("a", "dog"), causal=True)
    first, second, third = steps_of(decoded(record), width)
    assert first.startswith("step 0 decode the | a new q [2, 2, 1, 3]")
    assert second.startswith("step 1 decode cat | dog new q")
    assert third.startswith("step 2 decode sat | padding new q")
    named = [re.findall(r"sequence (\d) head (\d) (\w+) 0 ", step) for step in (first, second, third)]
    both = [("0", "0", "the"), ("0", "1", "the"), ("1", "0", "a"), ("1", "1", "a")]
    assert named == [both, both, both[:2]]


@widths
def test_a_sequence_that_begins_behind_its_padding_counts_positions_from_its_own_beginning(width):
    record = padded_left(make_record(("the", "cat", "sat"), ("a", "dog"), causal=True))
    first, second, third = steps_of(decoded(record), width)
    assert first.startswith("step 0 decode the | padding new q")
    assert second.startswith("step 1 decode cat | a new q")
    assert third.startswith("step 2 decode sat | dog new q")
    assert "sequence 1" not in first
    assert "sequence 1 head 0 a 0 1.00* sequence 1 head 1 a 0 1.00* largest" in second
    weights = record.arrays["pattern"][1, :, 2, 1:]
    for head in (0, 1):
        a, dog = (
            f"{weight:.2f}".removeprefix("0") + "*" * int(weight == weights[head].max()) for weight in weights[head]
        )
        assert f"sequence 1 head {head} a 0 {a} dog 1 {dog}" in third


def test_a_prompt_that_is_longer_than_a_sequence_shows_the_row_of_its_last_token():
    record = make_record(("the", "cat", "sat"), ("a", "dog"), causal=True)
    (step,) = steps_of(decoded(record, prompt_len=3))
    assert step.startswith("step 0 prefill the cat sat | a dog new q [2, 2, 3, 3]")
    for b, query, last in ((0, 2, "sat 2"), (1, 1, "dog 1")):
        for head in (0, 1):
            weight = f"{record.arrays['pattern'][b, head, query, query]:.2f}".removeprefix("0")
            assert re.search(rf"sequence {b} head {head} [^:]*?{last} {re.escape(weight)}", step)


@widths
def test_a_row_of_keys_is_broken_between_keys_only_and_continues_below_the_first(width):
    tokens = tuple(f"token-{i}" for i in range(8))
    record = with_row(make_record(tokens, causal=True, n_heads=1), 7, [0.125] * 8)
    lines = lines_of(decoded(record), width)
    begin = next(i for i, line in enumerate(lines) if line.startswith("step 7 "))
    begin = next(i for i in range(begin, len(lines)) if "head 0" in lines[i])
    end = next(i for i in range(begin, len(lines)) if "largest difference" in lines[i])
    keys = [f"token-{i} {i} .12{'*' * (i == 0)}" for i in range(8)]
    assert lines[begin].startswith("   head 0  token-0 0 .12*")
    assert all(line.startswith(" " * 11 + "token-") for line in lines[begin + 1 : end])
    assert [key for line in lines[begin:end] for key in line[11:].split(", ")] == keys
    assert end - begin == {40: 4, 80: 2, 200: 1}[width]


def test_chosen_sequences_and_heads_are_the_only_ones_drawn():
    record = decoded(make_record(("the", "cat"), ("a", "dog"), causal=True, n_heads=3))
    (_, step) = steps_of(record, options=ViewOptions(sequences=(1,), heads=(2,), precision=3))
    a, dog = (f"{weight:.3f}".removeprefix("0") for weight in record.arrays["pattern"][1, 2, 1])
    largest = "a" if record.arrays["pattern"][1, 2, 1].argmax() == 0 else "dog"
    assert step.startswith("step 1 decode dog new q")
    row = f"head 2 a 0 {a}{'*' * (largest == 'a')} dog 1 {dog}{'*' * (largest == 'dog')} largest difference"
    assert row in step
    assert "head 0" not in step
    assert "sequence" not in step
    for options, message in (
        (ViewOptions(heads=(3,)), "--head 3 "),
        (ViewOptions(sequences=(2,)), "--sequence 2 "),
    ):
        with pytest.raises(UsageError) as caught:
            lines_of(record, options=options)
        assert str(caught.value).startswith(message)


def test_more_sequences_and_heads_than_a_screen_takes_are_drawn_with_all():
    record = decoded(make_record(*[("a",)] * (MAX_SEQUENCES + 2), causal=True, n_heads=10))
    (few,), (all_of_them,) = steps_of(record), steps_of(record, options=ViewOptions(everything=True))
    assert set(re.findall(r"sequence (\d) head", few)) == {"0", "1", "4", "5"}
    assert set(re.findall(r"head (\d) ", few)) == set("01236789")
    assert len(re.findall(r"sequence \d head \d a 0 1\.00\*", all_of_them)) == (MAX_SEQUENCES + 2) * 10


@widths
def test_the_strongest_of_many_keys_come_first_and_the_rest_is_counted(width):
    weights = [0.01, 0.02, 0.2, 0.03, 0.15, 0.04, 0.3, 0.05, 0.1, 0.1]
    record = with_row(make_record(tuple(f"t{i}" for i in range(10)), causal=True), 9, weights)
    last = steps_of(decoded(record), width)[-1]
    row = "t6 6 .30* t2 2 .20 t4 4 .15 t8 8 .10 t9 9 .10 t7 7 .05 t5 5 .04 t3 3 .03 2 keys more .03"
    assert f"head 0 {row} head 1 {row} largest" in last
    whole = steps_of(decoded(record), width, ViewOptions(everything=True))[-1]
    in_order = " ".join(
        f"t{i} {i} {weight:.2f}".replace(" 0.", " .") + "*" * (i == 6) for i, weight in enumerate(weights)
    )
    assert f"head 0 {in_order} head 1 {in_order} largest" in whole


def test_of_equal_weights_the_first_is_marked_and_a_masked_key_is_left_out():
    record = with_row(make_record(TEXT, causal=True), 3, [0.5, 0.0, 0.0, 0.5])
    assert "head 0 the 0 .50* cat 1 .00 sat 2 .00 down 3 .50 head 1" in steps_of(decoded(record))[-1]
    record.arrays["allowed"][0, 0, 3, 1:3] = False
    assert "head 0 the 0 .50* down 3 .50 head 1" in steps_of(decoded(record))[-1]
    record.arrays["allowed"][0, 0, 3] = False
    assert "head 0 no visible key head 1 no visible key largest" in steps_of(decoded(record))[-1]


@pytest.mark.parametrize("width", [80, 200])
def test_a_long_prompt_is_named_by_its_first_tokens_and_a_count(width):
    record = make_record(tuple(f"t{i}" for i in range(12)), causal=True)
    assert steps_of(decoded(record, prompt_len=11), width)[0].startswith(
        "step 0 prefill t0 t1 t2 t3 t4 t5 t6 … 4 more new q [1, 2, 11, 3]"
    )
    assert steps_of(decoded(record, prompt_len=8), width)[0].startswith(
        "step 0 prefill t0 t1 t2 t3 t4 t5 t6 t7 new q ["
    )


def test_a_pattern_that_was_not_kept_leaves_the_rows_out():
    record = make_record(TEXT, causal=True)
    arrays = {name: array for name, array in record.arrays.items() if name != "pattern"}
    step = steps_of(decoded(replace(record, arrays=arrays)))[0]
    assert "cache 48 B in room for 192 B largest difference" in step


def test_a_difference_that_is_not_finite_and_a_step_without_a_time_say_so():
    record = decoded(make_record(TEXT, causal=True))
    step = replace(record.trace[0], time_s=None, cache=replace(record.trace[0].cache, max_abs_difference=None))
    found = steps_of(replace(record, trace=(step, *record.trace[1:])))[0]
    assert found.endswith("largest difference from the full recomputation: nan 1000 FLOPs –")


@widths
def test_steps_in_the_middle_are_counted_where_they_are_not_drawn(width):
    record = decoded(make_record(tuple(f"t{i}" for i in range(MAX_STEPS + 5)), causal=True))
    parts = sections(record, width)
    gap = parts.index("⋮ 5 steps not drawn (--all)")
    numbers = [int(re.match(r"step (\d+)", part)[1]) for part in parts if re.match(r"step \d", part)]
    assert numbers == [*range(MAX_STEPS // 2), *range(MAX_STEPS // 2 + 5, MAX_STEPS + 5)]
    assert parts[gap - 1].startswith(f"step {MAX_STEPS // 2 - 1} ")
    assert parts[gap + 1].startswith(f"step {MAX_STEPS // 2 + 5} ")
    whole = lines_of(record, width, ViewOptions(everything=True))
    assert sum(line.startswith("step ") for line in whole) == MAX_STEPS + 5
    assert not any("not drawn" in line for line in whole)
    (one_gap,) = (
        line for line in lines_of(decoded(make_record(tuple("a" * (MAX_STEPS + 1)), causal=True))) if "⋮" in line
    )
    assert one_gap == "⋮ 1 step not drawn (--all)"


@widths
def test_names_from_outside_cannot_reach_the_terminal(width):
    tokens = ("\x1b[31m", "\u202e", "[bold]b[/bold]", "a b", "\r\n")
    record = make_record(tokens, causal=True)
    way = CacheTiming("\x1b[2J", 5, Timing(1.0, (1.0,), 1.0, 0.0), 1.0, 5, 1, 1, 1, 1)
    record = decoded(record, prompt_len=2, ways=(way,))
    hostile = replace(
        record,
        trace=(*record.trace[:-1], replace(record.trace[-1], site="step\x1b[0m")),
    )
    text = "\n".join(lines_of(hostile, width))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    shown = said(text.split("\n"))
    for name in (r"\x1b[31m 0 ", r"\u202e 1 ", "[bold]b[/bold] 2 ", "a␣b 3 ", r"\r\n 4 ", r"\x1b[2J", r"step\x1b[0m"):
        assert name in shown


def test_a_kind_of_cache_that_is_unknown_is_named_harmlessly():
    record = decoded(make_record(TEXT, causal=True))
    lines = lines_of(replace(record, decoding=replace(record.decoding, cache="\x1b[1m\u202e")))
    assert r"cache \x1b[1m\u202e:" in lines


@widths
def test_a_token_wider_than_the_screen_stays_within_it(width):
    record = make_record(("x" * 300, "漢字" * 60, "b"), causal=True)
    text = "".join(line.strip() for line in lines_of(decoded(record), width))
    assert "x" * 300 in text
    assert "漢字" * 60 in text


# --------------------------------------------------------------------------------------------------------- step by step


def step_rows(record, width=80, cache="preallocated"):
    """The cells of the table of steps, by column."""
    lines = lines_of(decoded(record, prompt_len=2, cache=cache), width, ViewOptions())
    begin = next(i for i, line in enumerate(lines) if line.startswith("step"))
    headings, *rows = (re.split(r" {2,}", line.strip()) for line in lines[begin : lines.index("", begin)])
    return [dict(zip(headings, row, strict=True)) for row in rows if row[0].isdigit()]


def test_each_step_has_a_line_with_what_it_reads_and_adds():
    first, second, third = step_rows(make_record(TEXT, causal=True))
    assert first == {
        "step": "0", "phase": "prefill", "new tokens": "the cat", "sees": "2", "appends": "96 B", "reads": "96 B",
        "difference": "1.00e-07",
    }  # fmt: skip
    assert [second[name] for name in ("phase", "new tokens", "sees", "appends", "reads")] == [
        "decode", "sat", "3", "48 B", "144 B",
    ]  # fmt: skip
    assert [third[name] for name in ("new tokens", "sees", "reads")] == ["down", "4", "192 B"]


def test_a_narrow_screen_keeps_the_tokens_and_what_is_read():
    assert step_rows(make_record(TEXT, causal=True), 40)[1] == {
        "step": "1", "new tokens": "sat", "sees": "3", "reads": "144 B",
    }  # fmt: skip


def test_without_a_cache_nothing_is_appended_or_read():
    assert {(row["appends"], row["reads"]) for row in step_rows(make_record(TEXT, causal=True), cache="none")} == {
        ("–", "–")
    }


def test_lines_of_steps_in_the_middle_are_counted_where_they_are_left_out():
    record = decoded(make_record(tuple(f"t{i}" for i in range(MAX_STEPS + 5)), causal=True))
    lines = lines_of(record, options=ViewOptions())
    numbers = [int(line.split()[0]) for line in lines if re.match(r" +\d+ +decode", line)]
    assert numbers == [*range(MAX_STEPS // 2), *range(MAX_STEPS // 2 + 5, MAX_STEPS + 5)]
    assert any("⋮ 5 steps more (--all)" in line for line in lines)


@pytest.mark.parametrize("chosen", [{"heads": (1,)}, {"sequences": (0,)}, {"precision": 3}, {"verbose": True}])
def test_what_chooses_rows_of_the_pattern_shows_them(chosen):
    assert len(steps_of(decoded(make_record(TEXT, causal=True)), options=ViewOptions(**chosen))) == len(TEXT)
    assert not steps_of(decoded(make_record(TEXT, causal=True)), options=ViewOptions())


# ---------------------------------------------------------------------------------------------------------------- ways


def way(cache, length, seconds, total, *, n_timed=None, flops=9, step_bytes=0, total_bytes=0, holds=0):
    timing = Timing(9.0, (seconds,), seconds, 0.0)
    n_timed = length if n_timed is None else n_timed
    return CacheTiming(cache, length, timing, total, n_timed, step_bytes, total_bytes, flops, holds)


WAYS = (
    way("none", 3, 0.009, 0.018, flops=12_000, step_bytes=600, total_bytes=1200),
    way("concat", 3, 0.006, 0.012, flops=4000, step_bytes=800, total_bytes=2048, holds=300),
    way("preallocated", 3, 0.012, 0.009, flops=4000, step_bytes=400, total_bytes=900, holds=300),
    way("none", 1024, 1.5, 700.0, n_timed=9, flops=2_500_000, step_bytes=6144, total_bytes=3 << 20),
    way("concat", 1024, 0.5, 300.0, n_timed=9, flops=2500, step_bytes=9216, total_bytes=5 << 20, holds=3 << 10),
    way("preallocated", 1024, 0.001, 2.0, n_timed=9, flops=2500, step_bytes=3072, total_bytes=2 << 20, holds=3 << 10),
)


def table_of(record, width):
    """The rows of the ways, from the headings on, and what is said below."""
    lines = lines_of(record, width)
    begin = next(i for i, line in enumerate(lines) if line.startswith("length"))
    rows = [line.split() for line in lines[begin : begin + 1 + len(record.decoding.ways)]]
    return rows, said(lines[begin + len(rows) : lines.index("", begin)])


def words(*rows):
    return [row.split() for row in rows]


TITLE = "three cache strategies, timed in turns over random rows "
FASTER = "a step: the last one of the length speed-up: time of a step without a cache ÷ with this one"
ALL = " all steps: from 1 token to the length"
SUM = " ≈ 9 steps timed, those between estimated"
MOVED = " moved: keys and values read and written"
GAIN_OF_TWO = " a step at 1,024 tokens: 500 ms with concat, 1.5 s with none; 1 round cannot tell them apart"
GAIN = " a step at 1,024 tokens: 1 ms with preallocated, 1.5 s with none; 1 round cannot tell them apart"


def test_a_wide_screen_shows_all_of_every_way():
    rows, below = table_of(decoded(make_record(TEXT, causal=True), ways=WAYS), 200)
    assert rows == words(
        "length cache a step speed-up FLOPs moved all steps moved in all holds",
        "3 none 9 ms 12 k 600 B 18 ms 1.2 KiB 0 B",
        "concat 6 ms 1.50 × 4000 800 B 12 ms 2.0 KiB 300 B",
        "preallocated 12 ms 0.75 × 4000 400 B 9 ms 900 B 300 B",
        "1,024 none 1.5 s 2.5 M 6.0 KiB ≈ 700 s 3.0 MiB 0 B",
        "concat 500 ms 3.00 × 2500 9.0 KiB ≈ 300 s 5.0 MiB 3.0 KiB",
        "preallocated 1 ms 1,500 × 2500 3.0 KiB ≈ 2 s 2.0 MiB 3.0 KiB",
    )
    assert below == FASTER + ALL + SUM + MOVED + GAIN


def test_a_narrower_screen_leaves_out_columns_and_their_description():
    record = decoded(make_record(TEXT, causal=True), ways=WAYS[:5])
    rows, below = table_of(record, 80)
    assert rows == words(
        "length cache a step speed-up all steps moved in all holds",
        "3 none 9 ms 18 ms 1.2 KiB 0 B",
        "concat 6 ms 1.50 × 12 ms 2.0 KiB 300 B",
        "preallocated 12 ms 0.75 × 9 ms 900 B 300 B",
        "1,024 none 1.5 s ≈ 700 s 3.0 MiB 0 B",
        "concat 500 ms 3.00 × ≈ 300 s 5.0 MiB 3.0 KiB",
    )
    assert below == FASTER + ALL + SUM + MOVED + GAIN_OF_TWO
    rows, below = table_of(record, 40)
    assert rows == words(
        "length cache a step speed-up",
        "3 none 9 ms",
        "concat 6 ms 1.50 ×",
        "preallocated 12 ms 0.75 ×",
        "1,024 none 1.5 s",
        "concat 500 ms 3.00 ×",
    )
    assert below == FASTER + GAIN_OF_TWO


def test_a_sum_of_steps_that_were_all_timed_is_exact_and_without_none_nothing_is_faster():
    record = decoded(make_record(TEXT, causal=True), ways=WAYS[1:3])
    rows, below = table_of(record, 80)
    assert rows[1:] == words("3 concat 6 ms 12 ms 2.0 KiB 300 B", "preallocated 12 ms 9 ms 900 B 300 B")
    assert below == FASTER + ALL + MOVED


@pytest.mark.parametrize(
    ("cached", "verdict"),
    [
        ([1.0, 2.0, 1.0, 1.0, 2.0, 1.0], "concat is 4.00 × as fast, 95 % interval 2.00 to 4.00 ×"),
        ([5.0, 5.0, 8.0, 5.0, 5.0, 8.0], "concat is 0.80 × as fast, 95 % interval 0.50 to 0.80 ×"),
        (
            [5.0, 3.0, 4.0, 3.0, 5.0, 4.0],
            "no certain difference: concat is 1.00 × as fast, 95 % interval 0.80 to 1.33 ×",
        ),
        ([1.0] * 5, "5 rounds cannot tell them apart"),
    ],
)
def test_by_hand_how_the_quickest_cache_compares_with_none(cached, verdict):
    ways = [
        replace(timed, step=Timing(9.0, tuple(samples), float(np.median(samples)), 0.0))
        for timed, samples in zip(WAYS[:2], ([4.0] * len(cached), cached), strict=True)
    ]
    _, below = table_of(decoded(make_record(TEXT, causal=True), ways=tuple(ways)), 200)
    assert below.endswith(f" {seconds_text(ways[1].step.median_s)} with concat, 4 s with none; {verdict}")


def test_the_table_and_the_sentence_give_one_ratio_and_the_last_line_is_no_empty_one():
    none, cached = [4.0, 4.0, 9.0, 4.0, 5.0, 4.0], [1.0, 2.0, 3.0, 2.0, 2.0, 2.0]  # round by round 4, 2, 3, 2, 2.5, 2
    ways = [
        replace(timed, step=Timing(9.0, tuple(samples), float(np.median(samples)), 0.0))
        for timed, samples in zip(WAYS[:2], (none, cached), strict=True)
    ]
    record = decoded(make_record(TEXT, causal=True), ways=tuple(ways))
    rows, below = table_of(record, 200)
    assert rows[2][3:5] == ["2.00", "×"]
    assert "concat is 2.00 × as fast, 95 % interval 2.00 to 4.00 ×" in below
    lines = lines_of(record)
    assert lines[-1].strip()
    assert lines.index(TITLE.strip()) > lines.index("what it costs")


# --------------------------------------------------------------------------------------------------- costs and verdict


@widths
def test_what_it_costs_counts_with_the_numbers_of_the_layer(width):
    record = make_record(("the", "cat"), ("a", "dog"), causal=True, n_heads=4)
    *_, costs, _ = sections(decoded(record), width)
    # rows of 12 numbers to 4 heads of 3 + 3 + 3 numbers, twice for products and sums, and a bias for each
    assert "what it costs FLOPs of a cached step (products and biases): batch (900 to project + " in costs
    assert "2 4 heads (d_head + d_v) T); without a cache T times as many" in costs
    assert "cache: batch T n_kv_heads (d_head + d_v) 4 B = 2 T 96 B; a step reads all of it once" in costs
    assert "moved per step: preallocated T + 1 tokens, concat 3T − 1, none 2T" in costs
    assert "weights: every step reads all 4.8 KiB; beyond T = 26 tokens it reads more cache" in costs
    assert costs.endswith("with --kv-heads 1 the cache would be 4 × smaller per token")


def test_a_window_says_how_little_of_the_cache_it_needs():
    record = decoded(make_record(TEXT, causal=True))
    for sink, words_of_it in ((None, "only the last 2,001 "), (4, "only the last 2,001 and the first 4 ")):
        config = replace(record.config, window=(2000, 0), sink=sink)
        *_, costs, _ = sections(replace(record, config=config))
        assert "all keys and values are kept and read here; the window needs " + words_of_it in costs
    assert "window" not in sections(record)[-2]


@widths
@pytest.mark.parametrize(("n_kv_heads", "kind"), [(2, "grouped-query"), (1, "multi-query")])
def test_shared_keys_and_values_say_what_they_save(n_kv_heads, kind, width):
    record = shared(make_record(TEXT, causal=True, n_heads=4), n_kv_heads)
    parts = sections(decoded(record), width)
    heads = "1 kv head" if n_kv_heads == 1 else "2 kv heads"
    kept, group = 24 * n_kv_heads, 4 // n_kv_heads
    assert parts[-2].endswith(
        f"{heads} instead of 4: {kept} B per token instead of 96 B, {group} × less to keep and to read"
    )
    assert f"4 B = 1 T {kept} B;" in parts[-2]
    assert "--kv-heads" not in parts[-2]
    assert f"long rows show the largest weights only {kind} attention: " in parts[1]
    assert f"take {kept} B instead of 96 B: 1/{group} of the cache" in parts[2]


def test_one_head_has_nothing_to_share_and_a_short_crossing_keeps_a_digit():
    record = decoded(make_record(TEXT, causal=True, n_heads=1))
    for crossing_len, words_of_it in ((9.96, "10.0"), (2.0, "2.0"), (10.4, "10"), (1234.5, "1,234")):
        *_, costs, _ = sections(replace(record, decoding=replace(record.decoding, crossing_len=crossing_len)))
        assert f"beyond T = {words_of_it} tokens " in costs
        assert "--kv-heads" not in costs
        assert "instead of" not in costs


@pytest.mark.parametrize(
    ("crossing_len", "words_of_it"),
    [(512.0, "beyond T = 512 tokens it reads"), (2560.0, "beyond T = 2,560 tokens (this model ends at 512) it reads")],
)
def test_a_crossing_beyond_the_positions_of_a_model_names_their_end(crossing_len, words_of_it):
    decoding = DecodeSummary("DynamicCache", 0, (), 4096, 8, 8, crossing_len)
    assert words_of_it in sections(replace(layered(), decoding=decoding))[-2]


@widths
def test_the_verdict_says_whether_the_steps_give_what_a_full_recomputation_gives(width):
    record = decoded(make_record(TEXT, causal=True))
    for check, verdict in (
        (SelfCheck(1.5e-7, 2e-6, True), "ok: {} within 1.50e-07 (tolerance 2.00e-06)"),
        (SelfCheck(0.25, 2e-6, False), "FAILED: {} only within 2.50e-01 (tolerance 2.00e-06)"),
        (
            SelfCheck(None, 2e-6, False),
            "FAILED: the outputs of the steps, or of the full pass, have NaN or infinite numbers",
        ),
    ):
        words_of_it = verdict.format("the steps equal a full pass and the pattern gives the output")
        assert sections(replace(record, self_check=check), width)[-1] == f"self-check {words_of_it}"


def test_a_verdict_whose_difference_is_that_of_the_pattern_says_that_of_the_steps_too():
    record = decoded(make_record(TEXT, causal=True))
    steps = max(step.cache.max_abs_difference for step in record.trace if step.cache is not None)
    check = SelfCheck(2 * steps, 4 * steps, True)
    assert sections(replace(record, self_check=check))[-1] == (
        f"self-check ok: the steps equal a full pass within {steps:.2e}, the pattern gives the output within {2 * steps:.2e} "
        f"(tolerance {4 * steps:.2e})"
    )


def test_a_record_of_a_run_holds_no_decoding():
    assert lines_of(make_record()) == ["this record holds no decoding"]
