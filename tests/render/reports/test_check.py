"""The report of `mha check`: what a reader gets to see of an examination, on one screen, harmless whatever the module says."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from support.examinations import ALIKE, AXIS, RIGHT, STATE, UNKNOWN, WRONG, drawn

from mhacli.results.check import (
    Argument,
    Choice,
    Examination,
    Finding,
    FirstDifference,
    ModeReport,
    OutputComparison,
    ProbeResult,
)


def test_a_mistake_is_shown_with_its_line_its_fix_and_its_proof():
    assert (
        drawn(WRONG, 104)
        == """\
✗ wrong  mine.py:MultiHeadAttention
the softmax runs over another axis than the keys

softmax-axis  proven
found    attn = torch.softmax(scores, dim=-2)
         mine.py:31
fix      scores.softmax(dim=-1)
effect   the weights of a query do not sum to 1: some outputs are nearly 0, others much too large
proof    matches exactly if the softmax runs over queries instead of keys: largest difference 2.2e-16,
         tolerance 5e-05
         smallest example, 1 sequence of 2 tokens: the output is off by 0.31 (its largest number is
         1.24)

built    MultiHeadAttention(d_model=64, n_heads=8)
guessed  n_heads=8 (the number of heads) · set it with --arg n_heads=…
defaults dropout=0.1
called   forward(x)[0]
choices  no projection has a bias
probes   3 pass · 1 fail · 3 without a verdict · 2 do not apply · 2 left out: a call takes 0.2 s
         ✗ row sums: the rows of the returned pattern miss one by up to 2.3
compared with the reference with the same mistake, in float64, 12 inputs: largest difference 2.20e-16,
         tolerance 5.00e-05; 117 hypotheses tried
         16,640 parameters · 2.5 s · mha 0.1.0 · torch 2.13.0

wrong: the softmax runs over another axis than the keys (mine.py:31); fix: scores.softmax(dim=-1)
"""
    )


def test_a_right_verdict_takes_few_lines():
    shown = drawn(RIGHT)
    assert shown.startswith(
        "✓ right  mine.py:MultiHeadAttention\nthe reference gives the same output with the same weights\n"
    )
    assert "1 hypothesis tried" in " ".join(shown.split())
    assert "with the same mistake" not in shown
    assert len(shown.splitlines()) < 22


def test_each_of_two_modes_is_shown_with_its_verdict_and_its_call():
    modes = (
        ModeReport("self", "right", "forward(x, mask=…)", (), (), None),
        ModeReport("cross", "wrong", "forward(x, context)", ("mask-ignored",), (), None),
    )
    shown = drawn(replace(WRONG, modes=modes))
    assert "called   self-attention: ✓ right  forward(x, mask=…)\n" in shown
    assert "         cross-attention: ✗ wrong  forward(x, context)\n" in shown


def test_an_unknown_verdict_has_a_reason_the_closest_mistake_and_the_first_difference():
    shown = drawn(UNKNOWN)
    for piece in (
        "? unknown  mine.py:MultiHeadAttention\n\nbuilt ",
        "closest  if the scores are scaled twice, the reference still differs by 0.4",
        "differs  first at scores, compared with the reference; qk is still the same\n"
        "         mine.py:28  scores = scores ** 2",
        "printed  hello\n         there",
    ):
        assert piece in shown


def test_an_unknown_verdict_suggests_next_steps():
    shown = drawn(replace(UNKNOWN, next_steps=("try this", "or \x1b[31mthat")))
    assert "next     try this\n         or \\x1b[31mthat\n" in shown
    assert "next" not in drawn(UNKNOWN)


@pytest.mark.parametrize("examination", [RIGHT, UNKNOWN, replace(WRONG, findings=(AXIS, STATE))])
def test_unless_all_is_proven_every_probe_is_listed(examination):
    shown = drawn(examination)
    assert "· visible keys: every token sees every token\n" in shown
    assert "✓ determinism" in shown
    if examination.verdict != "right":
        assert "✓ determinism · float16 · parameters\n" in shown
        assert "✗ row sums: the rows of the returned pattern miss one by up to 2.3\n" in shown


@pytest.mark.parametrize("width", [40, 80])
def test_what_a_probe_found_is_never_cut(width):
    long = " ".join(f"reason{number}" for number in range(30))
    probes = (ProbeResult("fails", long, 1.0, False), ProbeResult("undecided", long, 1.0))
    for examination in (replace(RIGHT, probes=probes), replace(WRONG, probes=probes[:1])):
        shown = " ".join(drawn(examination, width).split())
        assert all(f"{probe.name}: {long}" in shown for probe in examination.probes)


def test_every_guessed_argument_is_named_with_the_option_that_sets_it():
    guesses = (Argument("dim", "40", "guessed", "the width"), Argument("heads", "5", "guessed", "the number of heads"))
    shown = " ".join(drawn(replace(RIGHT, arguments=guesses)).split())
    assert "dim=40 (the width) · heads=5 (the number of heads)" in shown
    assert "--arg dim=… --arg heads=…" in shown


def test_probes_with_the_same_message_share_a_line():
    undecided = (
        ProbeResult("float16", "NaN", 3.0),
        ProbeResult("one key", "other", 1.0),
        ProbeResult("one token", "NaN", 1.0),
    )
    shown = drawn(replace(RIGHT, probes=undecided))
    assert "· float16, one token: NaN\n" in shown
    assert "3 without a verdict" in shown


def test_probes_that_do_not_apply_are_counted_and_not_named():
    shown = drawn(RIGHT)
    assert "1 pass · 0 fail · 2 without a verdict · 2 do not apply\n" in shown
    assert "padding" not in shown


def test_defaults_and_versions_never_take_more_than_a_line():
    many = tuple(Argument(f"argument_{i}", "1.0", "default") for i in range(30))
    shown = drawn(replace(RIGHT, arguments=many, environment={"mha": "0.1.0", "torch": "2" * 90})).splitlines()
    (defaults,) = (number for number, line in enumerate(shown) if line.startswith("defaults"))
    assert shown[defaults].endswith("…")
    assert shown[defaults + 1].startswith("called")
    cost = len(shown) - 2 - shown[::-1].index("")
    assert shown[cost].endswith("…")
    assert shown[cost - 1].startswith("         tolerance")


def test_code_is_broken_between_words_and_never_inside_them():
    for width in range(24, 100):
        source = (
            "weights = scores.masked_fill(torch.ones(n,n).triu(1).bool(),float('-inf')).softmax(dim=-1) * self.scale"
        )
        shown = drawn(replace(WRONG, findings=(replace(AXIS, source=source),)), width).splitlines()
        first = next(number for number, line in enumerate(shown) if line.startswith("found"))
        lines = shown[first : next(number for number, line in enumerate(shown) if line.strip() == "mine.py:31")]
        assert max(map(len, lines)) <= width
        pieces = "".join(line[9:] + "\n" for line in lines)
        assert "".join(pieces.split()) == "".join(source.split())
        for word in ("float(", "'-inf'", "masked_fill", "torch.ones", "softmax", "self.scale"):
            assert word in pieces or width < 40


def test_two_implementations_are_named_both():
    shown = drawn(ALIKE)
    assert shown.startswith("✓ right  mine.py:MultiHeadAttention  against theirs.py:Attention\nboth give the same")
    assert "with theirs.py:Attention, in float32, 3 inputs: the difference is not finite" in " ".join(shown.split())


def test_what_a_probe_alone_shows_is_not_called_proven():
    shown = drawn(replace(WRONG, findings=(STATE,)))
    assert "state-kept-between-calls  not proven, seen by a probe\n" in shown
    assert "evidence the same input gives another output" in shown
    assert "with the same mistake" not in shown
    assert "state-kept-between-calls  measured\n" in drawn(replace(ALIKE, verdict="wrong", findings=(STATE,)))


def test_a_proof_without_words_of_its_own_gets_its_numbers():
    shown = drawn(replace(WRONG, findings=(replace(AXIS, evidence="two tokens show it"),)))
    assert (
        "proof    the reference with this mistake gives the same within 2.20e-16,\n         tolerance 5.00e-05\n"
        "         two tokens show it"
    ) in shown


def test_mistakes_that_only_explain_it_together_name_each_other():
    other = replace(AXIS, code="scale-missing", together_with=("softmax-axis",))
    shown = drawn(replace(WRONG, findings=(replace(AXIS, together_with=("scale-missing",)), other)))
    assert "softmax-axis with scale-missing  proven" in shown
    assert "scale-missing with softmax-axis  proven" in shown


def test_of_many_mistakes_the_first_are_shown_in_full_and_the_others_named():
    many = tuple(replace(AXIS, code=f"code-{i}", message=f"mistake {i}") for i in range(6))
    shown = drawn(replace(WRONG, findings=many), 120)
    assert "mistake 0; mistake 1; mistake 2; and 3 mistakes more" in shown
    assert shown.count("\nfix ") == 3
    assert "\n3 more\n  code-3: mistake 3\n  code-4: mistake 4\n  code-5: mistake 5\n" in shown


@pytest.mark.parametrize("examination", [WRONG, RIGHT, UNKNOWN, ALIKE], ids=["wrong", "right", "unknown", "alike"])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_screen(examination, width):
    if width >= 40:
        assert max(cell_len(line) for line in drawn(examination, width).splitlines()) <= width
    assert drawn(examination, width)


@pytest.mark.parametrize("examination", [WRONG, RIGHT, UNKNOWN], ids=["wrong", "right", "unknown"])
def test_a_report_fits_a_screen(examination):
    assert len(drawn(examination).splitlines()) <= 30


def test_colour_changes_no_letter():
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn(WRONG, colour=True))
    assert "\x1b[" in drawn(WRONG, colour=True)
    assert [line.rstrip() for line in plain.splitlines()] == drawn(WRONG).splitlines()


def test_no_text_of_a_module_reaches_the_terminal_raw():
    evil = "[red]x\x1b[2J\u202e\u200b\x9b"
    finding = Finding(evil, evil, f"{evil}\n{evil}", evil, evil, together_with=(evil,), file=evil, line=3, source=evil)
    examination = Examination(
        "wrong", evil, evil, (Argument(evil, evil, "guessed", evil), Argument(evil, evil, "default")), (finding,) * 5,
        (Choice(evil, evil),),
        (ProbeResult(evil, evil, 1.0, False), ProbeResult(evil, evil, 2.0), ProbeResult(evil, "left out: " + evil),
         ProbeResult(evil, evil, 3.0, True)), OutputComparison(evil, evil, 1, None, 1.0), reason=evil, closest=evil,
        departure=FirstDifference(evil, evil, evil, 1, evil), printed=evil, against=evil, environment={evil: evil},
    )  # fmt: skip
    for shown in (drawn(examination), drawn(replace(examination, verdict="unknown"))):
        assert not set("\x1b\u202e\u200b\x9b") & set(shown)
        assert "[red]x" in shown
