"""The report of the doctor on screens of every width, with names that could harm a terminal."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from support.processes import obeyed_or_hidden

from mhacli.render.base.options import Screen
from mhacli.render.reports.doctor import doctor_view
from mhacli.results.doctor import Device, ExaminedModel, HealthCheck, Kernel, Library, Numerics, Report

EVIL = "x\x1b[31m\u202e[/b]"
ABOUT = (("mha", "0.1.0"), ("python", "3.11"), ("platform", "Linux"), ("threads", "2"), ("torch", "2.13"))
CHECKS = (
    HealthCheck("causality", True, "exchanging a token moves no output before it", 0.0, 2e-6),
    HealthCheck("cache", None, "the model keeps no cache"),
    HealthCheck("eager", False, f"sdpa and eager differ; first in layer 1 ({EVIL})", 0.25, 1e-5, "layer 1",
                meaning="One of the two is wrong.", advice="load the other"),
    HealthCheck("bos", None, "the template writes it too", 2, 1, is_caution=True, advice="add_special_tokens=False"),
)  # fmt: skip
MODEL = ExaminedModel(
    f"./{EVIL}", "abc", "gpt2", "GPT2Model", 12_345, "bfloat16", ("F32",), "sdpa", "cpu", (9, 4), 12, "8 × x"
)
KERNELS = (
    Kernel("cpu", "float32", "sdpa", "ok", True, 1e-7, 2e-6, "flash"),
    Kernel("cpu", "float32", "math", "ok", False, 1e-3, 2e-6, "math"),
    Kernel("cpu", "float32", "explicit", "ok", False, None, 2e-6, None, "results are not finite"),
    Kernel("cpu", "float32", "cudnn", "unsupported", None, reason="torch has no cudnn kernel here"),
)
NUMERICS = (
    Numerics("cpu", "float32", 1e-7, 2e-6, 1e-7, 1e-6, 0.0, 0.0, True),
    Numerics("cpu", "float16", 1e-1, 5e-3, 1e-2, 1e-3, 0.5, 0.25, False),
)
OF_MODEL = Report(CHECKS, (), ABOUT, model=MODEL)
OF_MACHINE = Report(
    CHECKS,
    (Library("torch", "2.13", ">=2.6", None), Library("transformers", None, "", "hf")),
    ABOUT,
    (Device("cpu", f"A CPU {EVIL}", 8 << 30, None),),
    KERNELS,
    NUMERICS,
)


def drawn(report: Report, width: int = 80, *, colour: bool = False) -> str:
    paper = StringIO()
    system = "standard" if colour else None
    Console(file=paper, width=width, force_terminal=colour, color_system=system, markup=False, emoji=False,
            highlight=False).print(doctor_view(report, Screen(width, colour)))  # type: ignore[arg-type]  # fmt: skip
    return paper.getvalue()


@pytest.mark.parametrize("report", [OF_MODEL, OF_MACHINE], ids=["model", "machine"])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_are_harmless_and_nothing_is_wider_than_the_screen(report: Report, width: int) -> None:
    text = drawn(report, width)
    assert not obeyed_or_hidden(text)
    assert "x\\x1b[31m\\u202e[/b]" in text.replace("\n", "").replace(" ", "") or width == 40
    assert max(map(len, text.splitlines())) <= width


def test_a_checkpoint_has_a_line_for_each_check_and_a_list_of_what_to_do() -> None:
    text = drawn(OF_MODEL, 200)
    assert "bfloat16 stored as F32" in text
    rows = [line.rstrip().split(maxsplit=4) for line in text.splitlines()]
    assert ["causality", "pass", "0", "2.0e-06", "exchanging a token moves no output before it"] in rows
    assert ["cache", "n/a", "–", "–", "the model keeps no cache"] in rows
    assert ["eager", "fail", "0.25", "1.0e-05"] in [row[:4] for row in rows]
    assert (
        "\n1. eager: sdpa and eager differ; first in layer 1 (x\\x1b[31m\\u202e[/b]). One of the two is wrong.\n"
        in text
    )
    assert "\n   → load the other\n" in text
    assert "\n2. bos: the template writes it too.\n   → add_special_tokens=False\n" in text
    assert ["bos", "warning", "2", "1", "the template writes it too"] in rows
    assert text.splitlines()[-1] == OF_MODEL.summary


def test_no_verdict_is_cut_on_a_narrow_screen() -> None:
    names = [check.name for check in CHECKS]

    def verdicts(width: int) -> list[list[str]]:
        return [
            words[:2]
            for words in map(str.split, drawn(OF_MODEL, width).partition("\n\nfound: ")[0].splitlines())
            if words[:1] and words[0] in names
        ]

    assert [name for name, _ in verdicts(40)] == names
    assert verdicts(40) == verdicts(200)


def test_what_a_reader_must_know_of_the_run_stands_above_the_last_line() -> None:
    text = drawn(replace(OF_MODEL, notes=("texts are cut to their first 512 tokens",)))
    assert text.splitlines()[-3:] == ["note: texts are cut to their first 512 tokens", "", OF_MODEL.summary]


def test_kernels_stand_in_a_table_with_what_is_wrong_marked() -> None:
    text = drawn(OF_MACHINE)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert {"sdpa 1.0e-07", "math ! 1.0e-03", "explicit ! NaN", "at most 2.0e-06"} <= set(lines)
    assert "cudnn: torch has no such kernel here" in text
    assert "float16 ! 0.1 5.0e-03 ! 0.01 1.0e-03 ! 0.5 ! 0.25 ! not finite" in lines


def test_colour_marks_the_verdicts() -> None:
    text = drawn(OF_MODEL, colour=True)
    assert "\x1b[32mpass" in text
    assert "\x1b[1;31mfail" in text
    healthy = replace(OF_MODEL, checks=CHECKS[:2])
    assert f"\x1b[1;32m{healthy.summary}\x1b[0m" in drawn(healthy, colour=True)
    warned = replace(OF_MODEL, checks=CHECKS[3:])
    assert f"\x1b[1;33m{warned.summary}\x1b[0m" in drawn(warned, colour=True)


def test_the_legend_gives_the_repeated_pass_the_limit_of_its_line() -> None:
    repeat = HealthCheck("repeat", True, "agree", 0.0, 3e-4)
    with_it = " ".join(drawn(replace(OF_MODEL, checks=(*CHECKS, repeat)), 200).split())
    assert "repeat pass 0 3.0e-04" in with_it
    assert "at most: 8 × x. repeat: at most 3.0e-04," in with_it
    assert "12 forward passes" in with_it
    assert "repeat:" not in drawn(OF_MODEL)
