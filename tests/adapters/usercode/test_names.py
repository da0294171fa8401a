"""The user's names for sizes, projections and inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from mhacli.adapters.usercode.names import function_around, in_user_names, names_within
from mhacli.adapters.usercode.process import SourceLine

SOURCE = """def shared(scores):
    return scores.softmax(-2)


class Attention:
    def forward(self, hidden, mask=None):
        B, T, _ = hidden.size()

        def inner(b, t, d):
            return b

        return shared(inner(hidden, T, B))
"""


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale = 3, 5, 0.2


@pytest.mark.parametrize(
    ("number", "name"),
    [(2, "shared"), (7, "forward"), (9, "inner"), (10, "inner"), (12, "forward"), (4, None), (99, None)],
)
def test_a_line_stands_in_the_innermost_function(tmp_path: Path, number: int, name: str | None) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    found = function_around(SourceLine(str(path), number))
    assert (None if found is None else found.name) == name


def test_a_line_of_no_file_and_of_no_python_has_no_function(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    assert function_around(SourceLine()) is None
    assert function_around(SourceLine(str(broken), 1)) is None
    assert function_around(SourceLine(str(tmp_path / "none.py"), 1)) is None


def test_names_are_those_of_the_function_and_of_the_module_where_it_has_a_self(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    method, function = (function_around(SourceLine(str(path), number)) for number in (7, 2))
    assert method is not None
    assert function is not None
    parts = ("query.weight", "blocks.0.key.weight", "to_out.weight", "bulk.weight")
    assert names_within(method, Module(), parts) == {
        "batch": "B", "length": "T", "x": "hidden", "n_heads": "self.num_heads", "d_head": "self.head_dim",
        "self.q_proj": "self.query", "self.out_proj": "self.to_out",
    }  # fmt: skip
    assert names_within(method, None, parts) == {"batch": "B", "length": "T"}
    assert names_within(function, Module(), parts) == {}


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("scores.softmax(dim=-1)  # scores", "att.softmax(dim=-1)  # scores"),
        ("self.q_proj(x).scores", "self.query(x).scores"),
        ("x @ self.q_proj.weight.T", "x @ self.query.weight.T"),
        ("masked_scores + scores_of", "masked_scores + scores_of"),
        ("float('scores')", "float('scores')"),
    ],
)
def test_only_whole_names_in_code_are_exchanged(expression: str, shown: str) -> None:
    assert in_user_names(expression, {"scores": "att", "self.q_proj": "self.query"}) == shown
