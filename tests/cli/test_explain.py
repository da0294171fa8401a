"""`mha explain` as a process: terms, the list, a misspelt term, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import Launch, attempt

from mhacli.results.columns import BENCH_COLUMNS
from mhacli.results.glossary import terms


def test_a_term_is_explained_with_formula_and_source(tmp_path: Path) -> None:
    done = attempt(tmp_path, "explain", "effective", "keys", launch=Launch(env={"COLUMNS": "80"}))
    title, *lines = done.stdout.splitlines()
    assert title.startswith("eff.keys · column")
    assert "  Formula: mean over i of exp(H_i), H_i the entropy of query i" in lines
    assert "  Source: Hill 1973 (order 1)" in lines


def words_of(lines: list[str]) -> set[str]:
    """The names in lists whose groups begin with a title."""
    return {word for line in lines for word in line.partition(": ")[2].split(" · ") + line.split(" · ")}


def test_without_a_term_the_first_screen_lists_all_but_the_longest_groups(tmp_path: Path) -> None:
    done = attempt(tmp_path, "explain", launch=Launch(env={"COLUMNS": "80"}))
    lines = done.stdout.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert words_of(lines) >= {term.name for term in terms() if term.group not in ("site", "probe", "mistake")}
    for group in ("sites", "probes", "mistakes"):
        assert any(f"mha explain {group}" in line for line in lines)


@pytest.mark.parametrize(("word", "group"), [("sites", "site"), ("mistakes", "mistake"), ("Mistake", "mistake")])
def test_a_long_group_is_listed_by_its_name(word: str, group: str, tmp_path: Path) -> None:
    lines = attempt(tmp_path, "explain", word, launch=Launch(env={"COLUMNS": "80"})).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    names = {term.name for term in terms() if term.group == group}
    assert names <= words_of(lines)
    assert not {term.name for term in terms() if term.group == "concept"} & words_of(lines)


def test_the_columns_of_a_command_are_explained_by_its_name(tmp_path: Path) -> None:
    text = " ".join(attempt(tmp_path, "explain", "bench").stdout.split())
    for column in BENCH_COLUMNS.values():
        assert f"{column.heading} · bench" in text
        assert column.explanation in text


@pytest.mark.parametrize(
    ("word", "name"),
    [("|i-j|", "|i−j|"), ("d_k", "head"), ("softmax", "attention pattern"), ("distance →", "profile"), ("○", "mixed")],
)
def test_other_spellings_and_the_signs_of_types_find_their_terms(word: str, name: str, tmp_path: Path) -> None:
    assert attempt(tmp_path, "explain", word).stdout.startswith(f"{name} · ")


def test_the_headings_of_a_table_are_explained_one_after_the_other(tmp_path: Path) -> None:
    lines = attempt(tmp_path, "explain", "eff.keys", "H/max", "eff.keys").stdout.splitlines()
    assert [line.partition(" · ")[0] for line in lines if " · column" in line] == ["eff.keys", "H/max"]
    assert attempt(tmp_path, "explain", "H/max", "nothing-so-called", code=2).stdout == ""


def test_an_unknown_term_suggests_the_nearest(tmp_path: Path) -> None:
    done = attempt(tmp_path, "explain", "indcution", code=2)
    assert done.stderr == "mha: error: no term is called 'indcution'\nhint: try mha explain induction\n"


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
