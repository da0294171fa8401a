"""The steps of a trace, one line each."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.cells import cell_len
from support.records import drawn, make_record, walked

from mhacli.render.base.options import Screen
from mhacli.render.run.steps import step_lines
from mhacli.results.record.record import Step, UserModule

STEP = Step(
    site="q",
    axes=("batch", "head", "query", "d_head"),
    shape=(2, 3, 5, 7),
    dtype="float32",
    formula="q[h] = columns h·d_head",
    meaning="the queries",
    layout="view",
    strides=(105, 7, 21, 1),
    flops=0,
    bytes=840,
)
MODULE = UserModule(
    target="mine.py:Attention", arguments=(), called="forward(x)", sizes=(("batch", 2), ("head", 3)), n_runs=3,
    result=(2, 5, 7), expected=(2, 5, 7),
)  # fmt: skip


def lines_of(record, width=80):
    """The lines of the steps, below the heading."""
    lines = drawn(step_lines(record, Screen(width, False)), width)
    begin = next(i for i, line in enumerate(lines) if re.match(r" +step ", line))
    end = next(i for i, line in enumerate(lines) if line.startswith("--verbose"))
    return lines[begin + 1 : end]


def with_steps(*steps, module=None):
    return replace(make_record(), trace=steps, module=module)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_each_step_has_one_line_in_order_with_its_axes(width):
    record = walked(make_record())
    lines = lines_of(record, width)
    assert [line.split()[:2] for line in lines] == [[str(n), step.site] for n, step in enumerate(record.trace, 1)]
    assert all(cell_len(line) <= width for line in lines)


def test_axes_have_sizes_and_a_formula_goes_without_its_name():
    assert lines_of(with_steps(STEP)) == ["1  q     batch 2 · head 3 · query 5 · d_head 7  columns h·d_head"]


def test_a_batch_of_one_is_left_out():
    (line,) = lines_of(with_steps(replace(STEP, shape=(1, 3, 5, 7))))
    assert line == "1  q     head 3 · query 5 · d_head 7  columns h·d_head"


def test_a_formula_goes_on_below_its_column_and_is_left_out_where_there_is_no_room():
    step = replace(STEP, formula=" ".join(["abc"] * 20))
    lines = lines_of(with_steps(step, STEP))
    assert [line.count("abc") for line in lines] == [8, 8, 4, 0]
    assert len({line.index("abc") for line in lines[:3]}) == 1
    assert [line.count("abc") for line in lines_of(with_steps(step), 60)] == [0]


@pytest.mark.parametrize("width", [40, 60, 120])
def test_a_line_of_a_users_file_stands_once_and_whole_above_its_steps(width):
    code = "q, k = (self.q(x).view(batch, length, 8, -1), self.k(x).view(batch, length, 8, -1))"
    own = replace(STEP, file="/x/mine.py", line=12, source=code.replace(", self.k", ",\n    self.k"))
    steps = (replace(STEP, site="x"), own, own, replace(own, line=13, source="z = q"), own)
    lines = lines_of(with_steps(*steps, module=MODULE), width)
    numbers = [i for i, line in enumerate(lines) if re.match(r"\d  ", line)]
    between = [" ".join(" ".join(lines[i + 1 : j]).split()) for i, j in pairwise([*numbers, len(lines)])]
    assert between == [f"line 12: {code}", "", "line 13: z = q", f"line 12: {code}", ""]
    assert all(cell_len(line) <= width for line in lines)


def test_steps_outside_of_the_users_code_do_not_stand_below_a_line_of_it():
    own = replace(STEP, file="/x/mine.py", line=3, source="pass")
    lines = lines_of(with_steps(own, replace(STEP, site="hidden"), own, module=MODULE))
    assert [lines[i] for i in (0, 4)] == ["line 3: pass"] * 2
    assert lines[2] == "outside of your code:"


def test_lines_of_several_files_are_named_by_their_file():
    steps = [replace(STEP, file=f"/x/{name}.py", line=3, source="pass") for name in "ab"]
    lines = lines_of(with_steps(*steps, module=MODULE), 120)
    assert lines[::2] == ["a.py:3: pass", "b.py:3: pass"]


def test_a_warning_stands_below_its_step():
    lines = lines_of(with_steps(replace(STEP, remark="head and query are mixed"), STEP))
    assert lines[1].strip() == "! head and query are mixed"
    assert lines[2].split()[:2] == ["2", "q"]


def test_text_from_a_file_is_harmless():
    step = replace(STEP, file="/x/mine.py", line=1, source="x = '\x1b[31m'", remark="\u202eevil")
    text = "\n".join(lines_of(with_steps(step, module=MODULE), 120))
    assert not re.search(r"[\x1b\u202e]", text)


def test_each_variant_has_a_line():
    lines = drawn(step_lines(make_record(causal=True), Screen(80, False)), 80)
    names = [line.partition(":")[0] for line in lines if ": " in line]
    assert names == ["no output projection", "sinusoidal positions", "causal mask"]
