"""What is drawn of effects: the map, the text, the table and the verdict."""

from __future__ import annotations

import re
from dataclasses import replace

from rich.console import Console
from support.effects_made import SUMMARY, edge_effect, head_effect, with_effects

from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.checkpoint.effect import effect_view
from mhacli.results.record.effect import DirectSum, Effect, EffectSummary, Judgement, Screening, Verification
from mhacli.results.record.record import Record


def shown(record: Record, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(*effect_view(record, ViewOptions(), Screen(width, False)), sep="\n")
    return captured.get()


def test_the_map_has_each_head_in_its_layers_row() -> None:
    lines = shown(with_effects(*(head_effect(*place, change) for place, change in {
        (0, 0): -1.0, (0, 1): 0.25, (0, 2): 0.0, (1, 2): -0.5,
    }.items()))).split("\n")  # fmt: skip
    top = next(place for place, line in enumerate(lines) if re.match(r" *layer +0 +1 +2", line))
    assert [line.split() for line in lines[top + 1 : top + 3]] == [["0", "-1.00", ".25", "0"], ["1", "-.50"]]
    columns = [match.end() for match in re.finditer(r"\d", lines[top])]
    assert lines[top - 1].split() == ["head"]
    assert lines[top + 2].index("-.50") + 4 == columns[2], "below its number"


def test_the_largest_changes_come_first() -> None:
    text = shown(with_effects(head_effect(0, 0, 0.25), head_effect(0, 1, -2.0), head_effect(1, 2, 1.0)))
    assert re.findall(r"^(\d\.\d) ", text, re.MULTILINE) == ["0.1", "1.2", "0.0"]


def test_the_tokens_of_edges_carry_the_sign_of_their_change() -> None:
    text = shown(with_effects(edge_effect(0, -1.0), edge_effect(1, 0.0), edge_effect(2, 1.0)))
    assert re.search(r"^0\.1  #\S+ \.\S+ |^0\.1  =", text, re.MULTILINE)


def test_signs_are_explained_where_they_stand_for_numbers_and_left_out_elsewhere() -> None:
    numbered = shown(with_effects(head_effect(0, 0, -1.0), head_effect(1, 2, 0.5)))
    drawn = shown(with_effects(edge_effect(0, -1.0), edge_effect(1, 0.5)), 120)
    assert "=-.+#" not in numbered
    assert "most negative" not in numbered
    assert re.search(r"^-1 =-\.\+# 1 .*= most negative, - negative", drawn, re.MULTILINE | re.DOTALL)


def test_what_a_change_is_of_stands_beside_its_scale() -> None:
    line = next(line for line in shown(with_effects(head_effect(0, 0, -1.0))).split("\n") if line.startswith("-1 … 1"))
    assert f"the logit of “{SUMMARY.target}” at {SUMMARY.position}" in line


def test_a_scale_of_no_change_has_no_sign() -> None:
    assert re.search(r"^0 … 0 ", shown(with_effects(head_effect(0, 0, 0.0))), re.MULTILINE)


def test_interaction_is_what_heads_change_beyond_the_sum_of_each() -> None:
    joint = replace(head_effect(0, 0, -1.5), removed="heads", layer=None, head=None, heads=((0, 0), (1, 2)))
    text = shown(with_effects(head_effect(0, 0, -1.0), head_effect(1, 2, -0.25), joint))
    assert re.search(r"-1\.5000.*-1\.2500.*-0\.2500", text)


def test_without_proof_no_number_is_shown() -> None:
    failed = replace(SUMMARY, verified=Verification(4, 1.0, 1e-5, True, False))
    text = shown(with_effects(head_effect(0, 0, -1.2345), summary=failed))
    assert "1.23" not in text
    assert "NOT verified" in text


DIRECT = DirectSum(1.0, 1.5, 0.75, 0.25, 2e-7, 1e-5, True)


def test_what_later_layers_do_is_the_change_without_its_direct_part() -> None:
    effect = replace(head_effect(1, 2, -1.0), direct=-1.75)
    text = shown(with_effects(effect, summary=replace(SUMMARY, direct=DIRECT)), 120)
    heading = next(line for line in text.split("\n") if line.startswith("removed "))
    row = next(line for line in text.split("\n") if line.startswith("1.2"))
    named = {name: row[: heading.index(name) + len(name)].split()[-1] for name in ("Δlogit", "direct", "later")}
    assert {name: float(value) for name, value in named.items()} == {"Δlogit": -1.0, "direct": -1.75, "later": 0.75}
    sums = re.search(r"logit (\S+) = embedding (\S+) \+ heads (\S+) \+ MLPs (\S+) \+ biases (\S+)", text)
    assert sums is not None
    assert [float(value) for value in sums.groups()] == [3.5, 1.0, 1.5, 0.75, 0.25]


def test_what_later_layers_do_is_0_below_the_noise() -> None:
    for later, words in ((1e-8, "0"), (0.5, "+0.5000")):
        effect = replace(head_effect(1, 2, -1.0 + later), direct=-1.0)
        summary = replace(SUMMARY, direct=DIRECT, floor=1e-6)
        lines = shown(with_effects(effect, summary=summary), 120).split("\n")
        heading, row = (next(line for line in lines if line.startswith(begin)) for begin in ("removed ", "1.2"))
        assert row[: heading.index("later") + len("later")].split()[-1] == words


def test_direct_effects_that_do_not_add_up_are_marked() -> None:
    failed = replace(DIRECT, heads=0.5, residue=1.0, ok=False)
    text = shown(
        with_effects(replace(head_effect(1, 2, -1.0), direct=-1.75), summary=replace(SUMMARY, direct=failed)), 120
    )
    assert "direct?" in text
    assert "later?" in text
    assert "NOT verified" in text


def test_a_narrow_screen_keeps_the_changes_of_the_logit() -> None:
    record = with_effects(replace(head_effect(1, 2, -1.0), direct=-1.75), summary=replace(SUMMARY, direct=DIRECT))
    wide, narrow = (
        next(line for line in shown(record, width).split("\n") if line.startswith("removed ")).split()
        for width in (120, 60)
    )
    assert "Δoutput" in wide
    assert [name for name in wide if name not in narrow] == ["type", "rank", "Δoutput"]


def test_no_number_is_cut_on_a_narrow_screen_and_what_is_left_out_is_said() -> None:
    effects = [replace(head_effect(1, 2, -1.0625), direct=-1.75, first_order=-0.1875), edge_effect(0, -0.0625)]
    record = with_effects(*effects, summary=replace(SUMMARY, direct=DIRECT))
    for width in range(40, 120):
        lines = shown(record, width).split("\n")
        begin = next(place for place, line in enumerate(lines) if line.startswith("removed  "))
        numbers = re.findall(r"[-+]?\d\.\d{3,}\S*", "\n".join(lines[begin + 1 : begin + 3]))
        assert {"-1.0625", "-0.0625"} <= set(numbers) <= {
            "-1.0625", "-0.0625", "-1.7500", "+0.6875", "-0.1875", "-0.5312", "-0.0312", "1.0625", "0.0625", "0.0312",
        }, width  # fmt: skip
        assert max(map(len, lines[begin : begin + 3])) <= width
        n_hidden = 11 - len(re.split(r" {2,}", lines[begin].strip()))
        more = re.search(r"^(\d+) more columns? on ", "\n".join(lines), re.MULTILINE)
        assert int(more[1] if more else 0) == n_hidden, width


def test_numbers_of_a_column_have_as_many_digits() -> None:
    effects = [replace(head_effect(0, head, change), d_output=abs(change)) for head, change in enumerate((-1.25, 0.5))]
    lines = shown(with_effects(*effects), 120).split("\n")
    begin = next(place for place, line in enumerate(lines) if line.startswith("removed  "))
    assert [re.findall(r"\d\.(\d+)", line[8:]) for line in lines[begin + 1 : begin + 3]] == [
        ["2500", "6250", "2500", "2500"],
        ["5000", "2500", "5000", "5000"],
    ]


def test_a_screening_that_ranks_badly_is_called_so() -> None:
    effects = [replace(head_effect(0, head, -1.0 - head), first_order=-0.125) for head in range(3)]
    badly, well = (replace(SUMMARY, screening=Screening(8, 2, 1, correlation)) for correlation in (0.25, 0.95))
    assert "-0.1250" in shown(with_effects(*effects, summary=badly))
    assert "run without --screen" in shown(with_effects(*effects, summary=badly))
    assert "run without --screen" not in shown(with_effects(*effects, summary=well))
    every = replace(SUMMARY, screening=Screening(3, 2, 1, 0.25))
    assert "run without --screen" not in shown(with_effects(*effects, summary=every)), "all heads were removed"


def test_each_picture_has_its_rank_correlation() -> None:
    judged = (Judgement("attention weight", 0.625, 9), Judgement("gradient × attention", None, 0))
    text = shown(with_effects(edge_effect(0, -1.0), summary=replace(SUMMARY, judgements=judged)))
    assert re.search(r"^attention weight +\+0\.62\ngradient × attention +–$", text, re.MULTILINE)


def test_a_text_of_several_lines_keeps_to_the_right_of_its_head() -> None:
    lines = shown(with_effects(*(edge_effect(key, 1.0) for key in range(12))), width=40).split("\n")
    first = next(place for place, line in enumerate(lines) if line.startswith("0.1  "))
    assert re.match(r" {5}\S", lines[first + 1])


def test_edges_that_are_masked_already_are_named_and_counted() -> None:
    masked = replace(edge_effect(2, 0.0), masked=True)
    text = shown(with_effects(edge_effect(0, -1.0), edge_effect(1, 0.5), masked), 120)
    assert len(re.findall(r"^0\.1 .*\(masked\)", text, re.MULTILINE)) == 1
    assert re.search(r"^1 of 3 removals .* exactly 0", text, re.MULTILINE)


def answer(*effects: Effect, summary: EffectSummary = SUMMARY) -> str:
    """The last lines, as one."""
    text = " ".join(shown(with_effects(*effects, summary=summary), 200).split())
    return text[text.index(" noise and print as 0 ") + len(" noise and print as 0 ") :]


def test_the_last_sentence_says_what_matters_most_and_what_the_model_answers_without_it() -> None:
    largest = replace(head_effect(1, 2, -2.0), d_logprob=-1.0, rank=3)
    words = answer(head_effect(0, 0, 0.5), largest, head_effect(0, 1, 0.0))
    assert words == (  # e^-0.25 = 0.78, e^-1.25 = 0.29
        "head 1.2 matters most: without it the logit of “mat” falls by 2, its probability goes from 78 % to 29 %, "
        "and it is no longer the most likely; 1 of 3 removals change nothing"
    )


def test_the_last_sentence_calls_small_what_changes_no_digit_and_nothing_what_is_noise() -> None:
    small = replace(head_effect(1, 2, 1e-3), d_logprob=1e-4, rank=0)
    assert answer(small).startswith("head 1.2 hardly matters: ")
    assert answer(head_effect(1, 2, 0.0)).startswith("head 1.2 does not matter here: ")
    assert answer(head_effect(1, 2, 0.0), head_effect(1, 1, 0.0)).startswith("none of the 2 removals matters here: ")


def test_the_last_sentence_of_an_output_vector_and_of_heads_together() -> None:
    vector = replace(SUMMARY, metric="d_output", target=None, target_id=None, logit=None, logprob=None, rank=None)
    both = replace(head_effect(0, 0, 0.25), removed="heads", layer=None, head=None, heads=((0, 0), (1, 2)))
    assert answer(both, head_effect(0, 0, 0.1), summary=vector) == (
        "heads 0.0 + 1.2 matter most: without them the output vector moves by 25 % of its length"
    )
