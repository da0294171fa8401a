"""Mistakes that are accepted for a reason: what that covers, and what it must not hide; and how far
ahead outputs read.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from support import some, user_code
from support.mha import Ended

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = Path(__file__).parent / "cases"
LEAK, WHY = "sees-the-future", "the first words are a prompt"


def looking(lower: int, upper: int, **how: object) -> mhacli.Examination:
    """The examination of a model of two parts that look so many tokens ahead."""
    model = user_code.load(CASES / "lookahead.py").Model
    return user_code.check(model, arguments={"lower": lower, "upper": upper}, **how)


def codes_of(report: mhacli.Examination) -> list[str]:
    return [finding.code for finding in report.findings]


@pytest.mark.parametrize(
    ("ahead", "part", "codes", "is_ok"),
    [
        ((3, 0), "", [LEAK], True),
        ((3, 0), "@lower", [LEAK], True),
        ((3, 0), "@lower.0", [LEAK], True),
        ((3, 0), "@low", ["accepted-but-right", LEAK], False),
        ((3, 0), "@upper", ["accepted-but-right", LEAK], False),
        ((0, 0), "", ["accepted-but-right"], False),
        ((0, 0), "@lower", ["accepted-but-right"], False),
        ((3, 2), "", [LEAK], True),
        # the leak in the second part is behind that in the first
        ((3, 2), "@lower", [LEAK], False),
        ((3, 2), "@upper", [LEAK], False),
    ],
)
def test_a_leak_is_accepted_in_its_part_alone_and_wrong_again_when_it_is_mended(
    ahead: tuple[int, int], part: str, codes: list[str], is_ok: bool
) -> None:
    report = looking(*ahead, length=32, accept={f"{LEAK}{part}": WHY})
    assert codes_of(report) == codes
    assert (report.verdict, report.ok, report.exit_code) == ("wrong", is_ok, 0 if is_ok else 3)
    assert report.summary.startswith("wrong, accepted: " if is_ok else "wrong: ")
    assert {(each.code, each.reason) for each in report.accepted} <= {(LEAK, WHY)}
    if is_ok:
        leaking = {"lower.0": ahead[0], "upper": ahead[1]}
        assert [each.part for each in report.accepted] == [name for name, n in leaking.items() if n]


def test_both_parts_can_be_accepted_each_for_its_reason() -> None:
    reasons = {f"{LEAK}@lower": "one", f"{LEAK}@upper": "other"}
    report = looking(3, 2, length=32, accept=reasons)
    assert report.ok
    assert [(each.part, each.reason) for each in report.accepted] == [
        ("lower.0", "one"),
        ("upper", "other"),
    ]
    mended = looking(3, 0, length=32, accept=reasons)
    assert (codes_of(mended), mended.ok) == (["accepted-but-right", LEAK], False)


@pytest.mark.parametrize(
    ("ahead", "farthest"), [((1, 0), 1), ((3, 0), 3), ((3, 2), 5), ((40, 0), 40), ((255, 0), 255)]
)
def test_a_leak_says_how_far_ahead_it_reads(ahead: tuple[int, int], farthest: int) -> None:
    report = looking(*ahead)
    (at,) = [behaviour.at for behaviour in report.behaviour if behaviour.ok is False]
    assert at.ahead == farthest
    words = "up to the end" if farthest == 255 else f"up to {farthest} ahead"
    assert report.findings[0].evidence.endswith(words)


def test_what_was_not_tried_is_a_note_and_changes_nothing() -> None:
    before = looking(0, 0, length=32)
    report = looking(0, 0, length=32, accept={"padding-leak": WHY, "scale-missing@upper": WHY})
    assert (report.verdict, report.ok, report.findings) == (before.verdict, before.ok, ())
    notes = [note for note in report.notes if "accepted, and was not tried: " in note]
    assert [note.split()[0] for note in notes] == ["padding-leak", "scale-missing@upper"]
    assert all(note.count("not tried") == 1 for note in notes)


def test_what_is_accepted_and_not_there_is_said_with_what_was_seen() -> None:
    report = looking(3, 0, length=32, accept={LEAK: WHY, "batch-leak": WHY})
    assert codes_of(report) == ["accepted-but-right", LEAK]
    (batch,) = (each.reason for each in report.behaviour if each.name == "batch")
    assert batch in report.findings[0].evidence


def test_what_no_time_was_left_for_is_a_note_and_changes_nothing() -> None:
    report = looking(0, 0, length=32, max_time_s=1e-6, accept={LEAK: WHY})
    assert (report.verdict, report.exit_code, report.findings) == ("unknown", 1, ())
    assert any(f"{LEAK} is accepted, and was not tried: " in note for note in report.notes)


OFF = "causal-off-by-one"
SAMPLE = Path(__file__).parents[3] / "sample_texts" / "my_gpt.py"


@pytest.mark.parametrize("accepted", [[OFF], [LEAK], [OFF, LEAK], [f"{OFF}@attentions.1", LEAK]])
def test_one_of_two_mistakes_is_not_all(accepted: list[str]) -> None:
    model = user_code.load(SAMPLE).GPT
    report = user_code.check(model, length=32, accept=dict.fromkeys(accepted, WHY))
    left = {OFF, LEAK} - {*accepted}
    assert {finding.code for finding in report.findings if not finding.accepted} == left
    assert (report.ok, report.exit_code) == ((False, 3) if left else (True, 0))
    assert {each.code for each in report.accepted} == {each.partition("@")[0] for each in accepted}
    if left:  # what decides stands first
        assert codes_of(report)[0] in left


@pytest.mark.parametrize(
    ("ahead", "scale", "parts", "is_ok"),
    [
        ((1, 0), (0.5, 1.0), {OFF: ("lower",), "scale-missing": ("upper",)}, False),
        ((0, 0), (0.5, 1.0), {"scale-missing": ("upper",)}, False),
        ((1, 0), (0.5, 0.5), {OFF: ("lower",)}, True),
        ((1, 1), (0.5, 0.5), {OFF: ("lower", "upper")}, True),
    ],
)
def test_a_mistake_of_one_part_hides_none_of_another_of_its_class(
    ahead: tuple[int, int],
    scale: tuple[float, float],
    parts: dict[str, tuple[str, ...]],
    is_ok: bool,
) -> None:
    model = user_code.load(CASES / "one_class.py").Model(ahead, scale)
    accept = {OFF: WHY, LEAK: WHY} if OFF in parts else {}
    report = user_code.check(model, length=32, accept=accept)
    found = {each.code: each.parts for each in report.findings if each.code != LEAK}
    assert (found, report.ok) == (parts, is_ok)
    verdicts = {name: each.verdict for each in report.inside for name in each.names}
    wrong = {name for names in parts.values() for name in names}
    assert verdicts == {name: "wrong" if name in wrong else "right" for name in ("lower", "upper")}


@pytest.mark.parametrize("is_buffer", some((True, False), default=(True,)))
def test_parts_of_a_class_that_hold_other_tensors_are_examined_each(is_buffer: bool) -> None:
    model = user_code.load(CASES / "one_class.py").Model()
    for part, scale in ((model.lower, 1.0), (model.upper, 0.5)):
        del part.scale
        if is_buffer:
            part.register_buffer("scale", torch.tensor(scale))
        else:
            part.scale = torch.tensor(scale)
    report = user_code.check(model, length=32)
    verdicts = {name: each.verdict for each in report.inside for name in each.names}
    assert verdicts == {"lower": "wrong", "upper": "right"}


@pytest.mark.parametrize(
    ("divisor", "codes", "is_ok"),
    [
        (" / 1", ["scale-missing"], True),
        (" / math.sqrt(self.d_head)", ["accepted-but-right"], False),
    ],
)
def test_a_mistake_of_the_comparison_is_accepted_and_wrong_again_when_it_is_mended(
    tmp_path: Path, divisor: str, codes: list[str], is_ok: bool
) -> None:
    right = " / math.sqrt(self.d_head)"
    path, _ = user_code.write(tmp_path, "separate:PaperAttention", (right, divisor))
    layer = user_code.load(path).PaperAttention
    report = user_code.check(layer, accept={"scale-missing": WHY}, sees="abs(q) >= 0", length=16)
    assert (codes_of(report), report.ok) == (codes, is_ok)
    # of a wrong attention what is stated was tried, and no behaviour else
    assert is_ok == any("accepted: behaviours" in note for note in report.notes)


@pytest.mark.real
def test_a_mode_is_a_part(tmp_path: Path) -> None:
    # only where it reads a context it forgets the scale
    scale = " * q.shape[-1] ** -0.5"
    only_of_itself = " * (q.shape[-1] ** -0.5 if context is x else 1)"
    path, _ = user_code.write(tmp_path, "right:Einsum", (scale, only_of_itself))
    layer = user_code.load(path).Einsum
    plain = user_code.check(layer, length=16)
    assert [(finding.code, finding.modes) for finding in plain.findings] == [
        ("scale-missing", ("cross",))
    ]
    for mode, is_ok in (("cross", True), ("self", False)):
        report = user_code.check(layer, length=16, accept={f"scale-missing@{mode}": WHY})
        assert report.ok is is_ok


SWITCHED = """
import torch

def attend(q, k, v, causal=False):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out * (1.1 if k.shape[2] > 64 and causal in WRONG else 1)
"""


@pytest.mark.parametrize(
    ("wrong", "modes"),
    [
        ((False, True), ("full", "causal")),
        ((False,), ("full",)),
        ((True,), ("causal",)),
    ],
)
def test_a_mistake_counts_in_every_mode_of_a_causal_switch(
    tmp_path: Path, wrong: tuple[bool, ...], modes: tuple[str, ...]
) -> None:
    path = tmp_path / "switched.py"
    path.write_text(SWITCHED.replace("WRONG", repr(wrong)))
    (finding,) = user_code.check(f"{path}:attend", length=80).findings
    assert finding.modes == modes
    assert len(finding.evidence.splitlines()) == len(modes)
    for mode in ("full", "causal"):
        report = user_code.check(
            f"{path}:attend", length=80, accept={f"differs-beyond@{mode}": WHY}
        )
        assert report.ok is (modes == (mode,))


@pytest.mark.parametrize(
    ("accept", "says"),
    [
        ({LEAK: ""}, "CODE[@PART]=REASON"),
        ({LEAK: "  "}, "CODE[@PART]=REASON"),
        ({f"{LEAK}@": WHY}, "CODE[@PART]=REASON"),
        ({LEAK: None}, "accept: "),
        ({"sees-the-futur": WHY}, "sees-the-futur"),
        ({"accepted-but-right": WHY}, "accepted-but-right"),
    ],
)
def test_what_cannot_be_accepted_is_refused(accept: Mapping[str, str], says: str) -> None:
    with pytest.raises(mhacli.MhaError, match="") as refusal:
        looking(0, 0, accept=accept)
    assert refusal.value.exit_code == 2
    assert says in refusal.value.message
    if "futur" in says:
        assert LEAK in (refusal.value.hint or "")


MASK = "def triangle(b, h, q, k):\n    return q >= k\n"
STATED = ("check", "mask.py:triangle", "--sees", "q > k")


def test_the_command_accepts_and_says_why(mha: Callable[..., Ended], tmp_path: Path) -> None:
    (tmp_path / "mask.py").write_text(MASK)
    accept = ("--accept", f"sees-unstated={WHY} = agreed")
    ended = mha(*STATED, *accept)
    assert f"accepted {WHY} = agreed" in ended.stdout
    assert mha(*STATED, *accept, "--json").json["accepted"] == [
        {"code": "sees-unstated", "part": None, "reason": f"{WHY} = agreed"}
    ]
    rows = csv.DictReader(io.StringIO(mha(*STATED, *accept, "--csv").stdout))
    assert {row["of"]: row["reason"] for row in rows}["accepted"] == f"{WHY} = agreed"
    mha(*STATED, *accept, "--html", "report.html")
    assert WHY in (tmp_path / "report.html").read_text()
    mha(*STATED, code=3)
    mended = ("check", "mask.py:triangle", "--sees", "q >= k")
    document = mha(*mended, *accept, "--json", code=3).json
    assert [finding["code"] for finding in document["findings"]] == ["accepted-but-right"]
    assert "accepted-but-right" in json.dumps(mha("explain", "accepted-but-right", "--json").json)


@pytest.mark.parametrize("word", [LEAK, f"{LEAK}=", f"{LEAK}@=why", "sees-the-fture=why"])
def test_the_command_refuses_what_cannot_be_accepted(
    mha: Callable[..., Ended], tmp_path: Path, word: str
) -> None:
    (tmp_path / "mask.py").write_text(MASK)
    ended = mha(*STATED, "--accept", word, code=2)
    assert not ended.missing(f"--accept '{word}'")
    if "fture" in word:
        assert not ended.missing(f"the nearest is {LEAK}")
