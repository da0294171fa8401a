"""The steps of a walk, one line each."""

import re
from dataclasses import replace

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


def test_a_formula_for_which_there_is_no_room_is_cut_and_then_left_out():
    step = replace(STEP, formula="q = a" + "b" * 60)
    assert lines_of(with_steps(step))[0].endswith("b…")
    assert "ab" not in lines_of(with_steps(step), 60)[0]


def test_a_step_of_a_users_file_has_its_line_of_code_first_and_the_formula_where_there_is_room():
    step = replace(STEP, file="/x/mine.py", line=12, source="q = self.q(x).view(\n    batch, length)")
    record = with_steps(step, replace(STEP, site="x"), module=MODULE)
    code = "12: q = self.q(x).view( batch, length)"
    assert lines_of(record, 100)[0] == f"1  q     batch head query d_head  {code}  columns h·d_head"
    assert lines_of(record, 70)[0].endswith("…")
    assert "columns" not in lines_of(record, 70)[0]
    assert "12" not in lines_of(record, 100)[1]


def test_lines_of_several_files_are_named_by_their_file():
    steps = [replace(STEP, file=f"/x/{name}.py", line=3, source="pass") for name in "ab"]
    lines = lines_of(with_steps(*steps, module=MODULE), 120)
    assert ["a.py:3: pass" in lines[0], "b.py:3: pass" in lines[1]] == [True, True]


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
