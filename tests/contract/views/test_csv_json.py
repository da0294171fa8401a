"""CSV, JSON and the printed numbers: what a program reads back, and what a person reads, is the
record.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import checkpoints, some
from support.records import RECIPES, document, pattern, saved, short, tokens

Run = Callable[..., Any]
SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "mha.record-1.json"


def lines_of(text: str) -> list[dict[str, str]]:
    """The rows of a CSV, read strictly; each has a cell for every heading."""
    heading, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    assert len(set(heading)) == len(heading)
    return [dict(zip(heading, row, strict=True)) for row in rows]


def token_of(cell: str) -> str:
    """The token that a cell stands for."""
    return str(json.loads(cell)) if cell.startswith('"') else cell


# ---------------------------------------------------------------------------------------------- CSV


def expected_cells(name: str) -> Iterator[tuple[int | None, int, int, int, int, str, str, float]]:
    """Layer, sequence, head, query, key, their tokens and the weight of each cell that is no
    padding, in order.
    """
    held = document(name)
    parts = held["layers"] if held["model"] else [None]
    for index, layer in enumerate(parts):
        weights = pattern(name, index if layer else None)
        kind = layer["kind"] if layer else "cross" if held["context"] else "self"
        queries = held["context"] if layer and kind == "encoder" else held["sequences"]
        keys = held["context"] if kind in ("cross", "encoder") else held["sequences"]
        for sequence in range(len(weights)):
            texts = [side[sequence]["tokens"] for side in (queries, keys)]
            first = [size - len(text) for size, text in zip(weights.shape[2:], texts, strict=True)]
            assert not any(first) or held["config"]["padding"] == "left"
            for head in range(weights.shape[1]):
                for query, query_token in enumerate(texts[0]):
                    for key, key_token in enumerate(texts[1]):
                        weight = weights[sequence, head, query + first[0], key + first[1]]
                        yield (
                            layer and layer["layer"],
                            sequence,
                            head,
                            query,
                            key,
                            query_token,
                            key_token,
                            weight,
                        )


@pytest.mark.parametrize(
    "name",
    [
        "pair",
        "cross",
        "gpt2",
        *(pytest.param(name, marks=pytest.mark.real) for name in ("sinks", "nan", "hostile", "t5")),
    ],
)
def test_the_csv_of_a_record_has_a_line_for_every_cell(mha: Run, name: str) -> None:
    printed = mha("show", saved(name), "--csv").stdout
    lines, expected = lines_of(printed), list(expected_cells(name))
    assert len(lines) == len(expected)
    for line, (layer, sequence, head, query, key, query_token, key_token, weight) in zip(
        lines, expected, strict=True
    ):
        assert [line[column] for column in ("sequence", "head", "query", "key")] == list(
            map(str, (sequence, head, query, key))
        )
        assert (token_of(line["query_token"]), token_of(line["key_token"])) == (
            query_token,
            key_token,
        )
        assert (line["pattern"] == "") == bool(np.isnan(weight))
        assert line["pattern"] == "" or np.float32(line["pattern"]) == np.float32(weight)
        assert line["allowed"] == "1" or weight == 0
        assert line.get("layer") in (None, str(layer))


def test_a_token_that_is_a_formula_behind_blanks_is_a_json_string_in_csv(
    mha: Run, tmp_path: Path
) -> None:
    between = {"type": "Split", "pattern": {"String": "|"}, "behavior": "Removed", "invert": False}
    tokenizer = checkpoints.words_tokenizer("a", " =1+1", splitter=between)
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    words = ("run", "a| =1+1", "--tokenizer", "tokenizer.json", "--csv")
    assert {line["key_token"] for line in lines_of(mha(*words).stdout)} == {"a", '" =1+1"'}


def test_the_csv_has_the_chosen_heads_and_sequences_alone(mha: Run) -> None:
    words = ("run", "--text", "the cat sat", "--text", "a b", "--csv")
    lines = lines_of(mha(*words).stdout)
    chosen = [line for line in lines if line["head"] in ("0", "2") and line["sequence"] == "1"]
    assert lines_of(mha(*words, "--head", "0,2", "--sequence", "1").stdout) == chosen != []
    assert {
        line["head"]
        for line in lines_of(mha("show", saved("sinks"), "--csv", "--head", "1").stdout)
    } == {"1"}
    mha("show", saved("sinks"), "--csv", "--head", "99", code=2)


def test_a_mask_is_a_column_and_a_small_weight_is_not_masked(mha: Run) -> None:
    lines = lines_of(mha("show", saved("sinks"), "--csv").stdout)
    assert all(
        (line["allowed"] == "1") == (int(line["key"]) <= int(line["query"])) for line in lines
    )


def test_the_csv_of_heads_has_the_statistics_of_the_json_and_those_of_uniform_attention(
    mha: Run,
) -> None:
    words = (
        "heads",
        "the cat sat on the mat and the cat slept",
        *"--heads 3 --d-model 33 --causal".split(),
    )
    lines, heads = lines_of(mha(*words, "--csv").stdout), mha(*words, "--json").json["heads"]
    assert len(lines) == len(heads) == 3
    n_numbers = 0
    for line, head in zip(lines, heads, strict=True):
        for name, cell in line.items():
            if name.startswith("pattern"):
                continue
            held = (
                head["uniform"][name.removeprefix("uniform_")]
                if name.startswith("uniform_")
                else head[name]
            )
            assert cell == ("" if held is None else str(held)), name
            n_numbers += isinstance(held, float)
    assert n_numbers > 3 * 20


@pytest.mark.parametrize("name", ["effects", "edges"])
def test_the_csv_of_effects_has_a_line_for_every_removal(mha: Run, name: str) -> None:
    lines, effects = lines_of(mha("show", saved(name), "--csv").stdout), document(name)["effects"]
    assert len(lines) == len(effects) > 5
    for line, effect in zip(lines, effects, strict=True):
        for column, held in effect.items():
            shown = (
                json.dumps(held) if isinstance(held, list) else "" if held is None else str(held)
            )
            assert line[column] == shown, column


# --------------------------------------------------------------------------------------------- JSON


def strict(text: str) -> dict[str, Any]:
    """A document without NaN, and without a name that stands twice in an object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    def constant(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return dict(json.loads(text, parse_constant=constant, object_pairs_hook=unique))


SIMPLE = ("plain", "gpt2", "effects")
"""Records that have what others have."""


@pytest.mark.parametrize("name", some([name for name in RECIPES if name != "many"], default=SIMPLE))
def test_the_json_of_every_kind_of_record_is_strict_and_follows_its_schema(
    mha: Run, name: str
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    held = strict(mha("show", saved(name), "--json").stdout)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(held)
    assert held["command"][:2] == ["mha", RECIPES[name][0]]
    assert held["self_check"]["ok"] is True


@pytest.mark.parametrize("name", ["sinks", "pair", "cross", "trained", "nan"])
def test_the_arrays_in_the_json_are_those_in_the_file(name: str) -> None:
    held, arrays = document(name), load_file(saved(name))
    allowed = np.broadcast_to(arrays["allowed"], arrays["pattern"].shape)
    for site in ("qk", "scores", "pattern", "z", "out"):
        printed, kept = np.array(held[site], float), arrays[site]
        assert printed.shape == kept.shape
        if site in ("qk", "scores"):
            assert np.array_equal(np.isnan(printed), ~allowed | ~np.isfinite(kept))
        finite = ~np.isnan(printed)
        assert np.array_equal(printed[finite].astype(kept.dtype), kept[finite])
    assert np.array_equal(arrays["pattern"][~allowed], np.zeros((~allowed).sum(), np.float32))


def test_numbers_that_are_not_finite_are_null_and_counted() -> None:
    held = document("nan")
    assert held["nonfinite"]["pattern"] == 7
    assert held["pattern"][0][0][4] == [None] * 7
    assert document("sinks")["nonfinite"] == {}, "a mask is no fault"


def test_arrays_that_were_not_kept_are_null_and_others_are_there_by_name() -> None:
    held = document("bare")
    assert (held["qk"], held["pattern"], np.shape(held["z"])) == (None, None, (1, 2, 7, 32))
    assert np.shape(document("plain")["v"]) == (1, 3, 7, 11)


def test_a_page_keeps_the_values_that_it_shows(mha: Run) -> None:
    words = ("run", "a b", "--heads", "2", "--repeat", "1", "--json")
    assert np.shape(mha(*words, "--html", "p.html").json["v"]) == (1, 2, 2, 32)
    assert "v" not in mha(*words, "--svg", "f.svg").json


# ------------------------------------------------------------------------------------ printed views

CELL = r"(?:\d?\.\d+|\b0|nan)"


@pytest.mark.parametrize(
    ("name", "words", "weights"),
    [
        ("sinks", ("--head", "1"), lambda: pattern("sinks")[0, 1]),
        ("pair", ("--head", "0", "--sequence", "1"), lambda: pattern("pair")[1, 0, 4:, 4:]),
        ("cross", ("--head", "1"), lambda: pattern("cross")[0, 1]),
        ("nan", ("--head", "0"), lambda: pattern("nan")[0, 0]),
        ("gpt2", ("--layer", "2", "--head", "5"), lambda: pattern("gpt2", 2)[0, 5]),
        (
            "gpt2",
            ("--layer", "1", "--head", "0", "--from", "3,7-9"),
            lambda: pattern("gpt2", 1)[0, 0, [3, 7, 8, 9]],
        ),
    ],
    ids=["causal", "left padding", "cross", "nan", "checkpoint", "--from"],
)
def test_a_printed_matrix_has_the_weights_of_the_record(
    mha: Run, name: str, words: tuple[str, ...], weights: Callable[[], np.ndarray]
) -> None:
    held = weights()
    shown = mha(
        "show", saved(name), "--view", "matrix", "--precision", "4", *words, env={"COLUMNS": "300"}
    ).stdout
    expected = [
        ["nan" if np.isnan(w) else "0" if w == 0 else short(w, 4) for w in row] for row in held
    ]
    rows = re.findall(
        rf"^(?:\d+ )?\S+ +((?:{CELL}\*? +){{{held.shape[1]}}})", shown + "\n", re.MULTILINE
    )
    assert [row.replace("*", "").split() for row in rows] == expected


def test_the_strongest_keys_are_listed_in_order(mha: Run) -> None:
    shown = mha(
        "show", saved("sinks"), "--view", "top", "--top", "4", "--head", "0", env={"COLUMNS": "200"}
    ).stdout
    weights = pattern("sinks")[0, 0]
    for query, row in enumerate(weights):
        line = next(line for line in shown.splitlines() if line.startswith(f"{query} “"))
        listed = re.findall(r"(\d+) “(\w+)” (\d?\.\d+)", line.partition("→")[2])
        order = sorted(range(query + 1), key=lambda key: -row[key])[:4]
        assert [(int(key), token) for key, token, _ in listed] == [
            (key, tokens("sinks")[key]) for key in order
        ]
        assert [weight for *_, weight in listed] == [short(row[key]) for key in order]


def test_a_heat_map_of_a_long_text_shows_the_means_of_its_blocks(mha: Run) -> None:
    shown = mha(
        "show", saved("long"), "--view", "heatmap", "--head", "0", env={"COLUMNS": "160"}
    ).stdout
    rows = re.findall(r"^ *(\d+) w\d+ +([·░▒▓█]+)$", shown, re.MULTILINE)
    places = [int(place) for place, _ in rows]
    (block,) = set(np.diff(places))
    weights = pattern("long")[0, 0]
    levels, means = [], []
    for place, (_, signs) in zip(places, rows, strict=True):
        for column, sign in enumerate(signs):
            part = weights[place : place + block, column * block : (column + 1) * block]
            levels.append("·░▒▓█".index(sign))
            means.append(part.sum(axis=1).mean())
    assert block > 1
    assert len(levels) > 400
    order = np.argsort(means)
    assert (np.diff(np.array(levels)[order]) >= 0).all(), (
        "a block with more weight never has a lighter sign"
    )
    assert len(set(levels)) >= 4


def test_the_table_of_heads_prints_the_statistics_and_sorts_by_them(mha: Run) -> None:
    wide = {"COLUMNS": "300"}
    shown = mha("show", saved("plain"), "--view", "none", "--precision", "3", env=wide).stdout
    for head in document("plain")["heads"]:
        row = next(line for line in shown.splitlines() if re.match(rf" +{head['head']} ", line))
        expected = (
            f"{head['entropy']:.2f} +{100 * head['entropy_share']:.0f} %"
            f" +{head['effective_keys']:.2f} "
        )
        assert re.search(expected, row), row
        assert short(head["diagonal"], 3) in row.split()
        assert {short(head["previous"], 3), f"{head['distance']:.2f}"} <= {*row.split()}
    entropies = [head["entropy"] for head in document("blocks")["heads"]]
    for direction, order in (("", np.argsort(entropies)[::-1]), (":up", np.argsort(entropies))):
        sorted_view = mha("show", saved("blocks"), "--sort", f"entropy{direction}", env=wide).stdout
        assert [
            int(head) for head in re.findall(r"^ +(\d) \S \w.* \d+ % ", sorted_view, re.MULTILINE)
        ] == list(order)


def test_a_grid_of_effects_prints_the_change_of_each_head(mha: Run) -> None:
    shown = mha("show", saved("effects"), env={"COLUMNS": "200"}).stdout
    rows = re.findall(r"^ +\d((?: +-?\d?\.\d\d){6})$", shown, re.MULTILINE)
    held = np.array([effect["d_logit"] for effect in document("effects")["effects"]]).reshape(3, 6)
    assert np.array([row.split() for row in rows], float) == pytest.approx(held, abs=0.0051)
    ranked = re.findall(r"^(\d)\.(\d) .* -?\d*\.\d\d ", shown, re.MULTILINE)
    strongest = sorted(np.ndindex(3, 6), key=lambda place: -abs(held[place]))
    assert [(int(layer), int(head)) for layer, head in ranked] == strongest[: len(ranked)]
    assert len(ranked) >= 5


# ------------------------------------------------------------------------------------------ reports


def names_in(document: dict[str, Any]) -> list[str]:
    """The names of what the JSON of a report lists."""
    if "checks" in document:
        return [check["name"] for check in document["checks"]]
    if "layers" in document:
        return [site["site"] for layer in document["layers"] for site in layer["sites"]]
    codes = [finding["code"] for finding in document["findings"]]
    return codes + [each["name"] for each in (*document["behaviour"], *document["probes"])]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("doctor", 0),
        pytest.param("check functions.py:attend --length 8", 0, marks=pytest.mark.real),
        ("check functions.py:attend_without_scale --length 8", 3),
        ("diff a b", 3),
    ],
)
def test_a_report_has_rows_as_csv_and_its_screen_as_a_page(
    mha: Run, tmp_path: Path, words, code
) -> None:
    shutil.copy(Path(__file__).parent / "cases" / "functions.py", tmp_path)
    if words.startswith("diff"):
        layer = "--d-model 8 --heads 2 --view none".split()
        mha("run", "a b c", *layer, "--seed", "1", "--save", "a")
        mha("run", "a b c", *layer, "--seed", "2", "--save", "b")
    report = mha(*words.split(), "--json", "--html", "p.html", code=code).json
    rows = lines_of(mha(*words.split(), "--csv", code=code).stdout)
    first = "site" if "diff" in words else "name"
    assert [row[first] for row in rows if row[first]] == names_in(report)
    page = (tmp_path / "p.html").read_text()
    assert "<script" not in page
    shown = html.unescape(re.sub(r"<[^>]+>", " ", page))
    verdict = report["summary"]
    if "check" in words:
        verdict = f"{'✗' if code else '✓'} {report['verdict']} functions.py"
    assert " ".join(verdict.split()) in " ".join(shown.split())
    assert "exists" in mha(*words.split(), "--html", "p.html", code=1).said
