"""`mha explain` as a process: terms, the list, a misspelt term, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import Launch, attempt


def test_a_term_is_explained_with_formula_and_source(tmp_path: Path) -> None:
    done = attempt(tmp_path, "explain", "effective", "keys", launch=Launch(env={"COLUMNS": "80"}))
    title, *lines = done.stdout.splitlines()
    assert title.startswith("eff.keys · column")
    assert "  Formula: exp(H), the perplexity of the row" in lines
    assert "  Source: Hill 1973 (order 1)" in lines


def test_without_a_term_all_are_listed_by_groups_that_fit_the_screen(tmp_path: Path) -> None:
    done = attempt(tmp_path, "explain", launch=Launch(env={"COLUMNS": "80"}))
    lines = done.stdout.splitlines()
    assert lines[0] == "concepts"
    assert {"sink", "eff.keys", "induction", "qk", "scale-missing", "*"} <= {
        word for line in lines for word in line.split(" · ")
    }
    assert max(map(len, lines)) <= 80


def test_an_unknown_term_suggests_the_nearest(tmp_path: Path) -> None:
    done = attempt(tmp_path, "explain", "indcution", code=2)
    assert (
        done.stderr
        == "mha: error: no term is called 'indcution'\nhint: try mha explain induction, or induction score\n"
    )


def test_file_names_in_place_of_a_star_get_a_hint(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    assert "mha explain star" in attempt(tmp_path, "explain", "a.txt", "b.txt", code=2).stderr
    assert "mha explain star" not in attempt(tmp_path, "explain", "a.txt", "c.txt", code=2).stderr


@pytest.mark.parametrize("words", [("sink",), ()])
def test_terms_are_json_too(words: tuple[str, ...], tmp_path: Path) -> None:
    document = json.loads(attempt(tmp_path, "explain", *words, form=("--json",)).stdout)
    assert document["schema"] == "mha.explain/1"
    names = [(term["group"], term["name"]) for term in document["terms"]]
    if words:
        assert names == [("concept", "sink"), ("column", "first"), ("head type", "first token")]
    else:
        assert ("site", "qk") in names
        assert len(names) > 150
