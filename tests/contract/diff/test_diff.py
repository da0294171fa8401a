"""`mha diff A B`: which site differs first, by how much and where, by numpy over the arrays of both
records.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import checkpoints, rows
from support.mha import NO_TORCH, run

import mhacli

TEXT, LONGER = "the cat sat on the mat", "the cat quietly sat on the mat"
LAYER = ("--d-model", "30", "--heads", "6", "--kv-heads", "3", "--causal", "--repeat", "1")
KNOWN = (*LAYER, "--vocab", "words.json")
"""The ids of the tokens do not depend on the text."""
MODEL = ("--model", "model")
TRACE = ("trace", "attention.py:Attention")


def of_weights(name: str) -> tuple[str, ...]:
    """A run with the weights of a file."""
    weights = ("--weights", f"{name}.safetensors")
    return ("run", TEXT, *weights, "--heads", "6", "--causal", "--repeat", "1")


RECORDS: dict[str, tuple[str, ...]] = {
    "a": ("run", TEXT, *LAYER),
    "again": ("run", TEXT, *LAYER, "--view", "none"),
    "double": ("run", TEXT, *LAYER, "--dtype", "float64"),
    "half": ("run", TEXT, *LAYER, "--dtype", "bfloat16"),
    "seed": ("run", TEXT, *LAYER, "--seed", "1"),
    "rug": ("run", "the cat sat on the rug", *LAYER),
    "inserted": ("run", LONGER, *LAYER),
    "repeated": ("run", f"{TEXT} mat", *LAYER),
    "known": ("run", TEXT, *KNOWN),
    "known inserted": ("run", LONGER, *KNOWN, "--positions", "none", "--no-causal"),
    "known full": ("run", TEXT, *KNOWN, "--positions", "none", "--no-causal"),
    "known appended": ("run", f"{TEXT} quietly", *KNOWN),
    "full": ("run", TEXT, *LAYER, "--no-causal"),
    "window": ("run", TEXT, *LAYER, "--window", "2"),
    "wide": ("run", TEXT, *LAYER, "--d-model", "60"),
    "heads": ("run", TEXT, *LAYER, "--heads", "3"),
    "kv": ("run", TEXT, *LAYER, "--kv-heads", "6"),
    "scale": ("run", TEXT, *LAYER, "--scale", "0.5"),
    "softcap": ("run", TEXT, *LAYER, "--softcap", "2"),
    "bias": ("run", TEXT, *LAYER, "--score-bias", "bias.safetensors"),
    "bare": ("run", TEXT, *LAYER, "--no-out-proj"),
    "pattern": ("run", TEXT, *LAYER, "--keep", "pattern"),
    "kept": ("run", TEXT, *LAYER, "--seed", "1", "--keep", "q,k,v,x,qk,pattern"),
    "kept of seed 0": ("run", TEXT, *LAYER, "--keep", "q,k,v,qk,pattern"),
    "two": ("run", TEXT, "a dog", *LAYER),
    "right": ("run", TEXT, "the cat", *LAYER),
    "left": ("run", TEXT, "the cat", *LAYER, "--padding", "left"),
    "context": ("run", "a dog", "--context", TEXT, *LAYER, "--no-causal"),
    "longer context": ("run", "a dog", "--context", LONGER, *LAYER, "--no-causal"),
    "decode": ("decode", TEXT, *LAYER),
    **{name: of_weights(name) for name in ("weights", "o_proj", "v_proj", "q_proj")},
    "infinite": (*of_weights("infinite"), "--allow-nonfinite"),
    "float16": ("run", TEXT, *LAYER, "--dtype", "float16"),
    "tokens of a model": ("run", "that", *LAYER, "--tokenizer", "gpt2/tokenizer.json"),
    "model of gpt2": ("run", "that", "--model", "gpt2"),
    "trace": TRACE,
    "trace with scale": (*TRACE, "--arg", "scale=0.577"),
    "trace with width": (*TRACE, "--arg", "d_model=24"),
    "model": ("run", TEXT, *MODEL),
    "model query": ("run", TEXT, "--model", "query"),
    "model value": ("run", TEXT, "--model", "value"),
    "model layer 2": ("run", TEXT, *MODEL, "--layer", "2"),
    "model other text": ("run", "the cat sat on the red mat", *MODEL),
    "pair": ("run", TEXT, "--model", checkpoints.FAMILIES["t5"].kind),
    "pair longer": ("run", "the cat sat on the red mat", "--model", "t5"),
    "statistics": ("heads", TEXT, *LAYER, "--head", "0,2,3"),
    "statistics of one": ("heads", TEXT, *LAYER, "--head", "1"),
    "statistics of others": ("heads", TEXT, *LAYER, "--head", "3,1,0"),
}
AXES = {
    **dict.fromkeys(("qk", "scores", "pattern", "allowed"), "batch head query key"),
    **dict.fromkeys(
        ("entropy", "distance", "participation", "max_score", "lse", "sink"), "batch head query"
    ),
    "received": "batch head key",
    "z": "batch head query d_v",
    "out": "batch query d_model",
}


class Answer(NamedTuple):
    """What `mha diff` says of two records: its exit code, its verdict, where the first difference
    is, and the first site whose numbers differ.
    """

    code: int
    verdict: str
    first: dict[str, str | None] | None
    first_site: dict[str, str] | None


SAME = Answer(0, "agree", None, None)


def tokens_first(site: str | None, layer: str = "") -> Answer:
    """Tokens differ, and then the numbers of a site, if they can be compared."""
    first = {"where": "tokens", "layer": "", "site": None}
    return Answer(3, "differ", first, None if site is None else {"layer": layer, "site": site})


def site_first(site: str, layer: str = "") -> Answer:
    """The same tokens give other numbers at a site."""
    at = {"layer": layer, "site": site}
    return Answer(3, "differ", {"where": "site", **at}, at)


class Pair(NamedTuple):
    """Two records of `RECORDS`. Only the common pairs are run by default."""

    a: str
    b: str
    answer: Answer
    common: bool = False


PAIRS = (
    Pair("a", "a", SAME, common=True),
    Pair("a", "again", SAME),
    Pair("a", "double", SAME, common=True),
    Pair("a", "half", SAME, common=True),
    Pair("a", "seed", site_first("qk"), common=True),
    Pair("a", "scale", site_first("scores"), common=True),
    Pair("a", "softcap", site_first("scores")),
    Pair("a", "bias", site_first("scores")),
    Pair("a", "full", site_first("allowed"), common=True),
    Pair("a", "window", site_first("allowed")),
    Pair("a", "heads", site_first("q"), common=True),
    Pair("a", "pattern", SAME, common=True),
    Pair("a", "decode", SAME, common=True),
    Pair("right", "left", SAME, common=True),
    Pair("statistics", "statistics of others", SAME),
    Pair("weights", "o_proj", site_first("out"), common=True),
    Pair("weights", "v_proj", site_first("z")),
    Pair("weights", "q_proj", site_first("qk"), common=True),
    Pair("model", "model", SAME, common=True),
    Pair("model", "model query", site_first("qk", "layer 1")),
    Pair("model", "model value", site_first("z", "layer 1")),
    Pair("model", "model layer 2", SAME),
    Pair("pair", "pair", SAME),
    Pair("a", "rug", tokens_first("qk")),
    Pair("a", "inserted", tokens_first("qk")),
    Pair("known", "known appended", tokens_first(None), common=True),
    Pair("known full", "known inserted", tokens_first("pattern"), common=True),
    Pair("context", "longer context", tokens_first("qk"), common=True),
    Pair("model", "model other text", tokens_first("qk", "layer 0")),
    Pair("pair", "pair longer", tokens_first("visible", "encoder layer 0")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the records are made of: weights and checkpoints of which one has another
    number in one place.
    """
    place = tmp_path_factory.mktemp("records")
    run(place, "run", TEXT, *LAYER, "--save-weights", "plain.safetensors")
    tensors = load_file(place / "plain.safetensors")
    save_file(tensors, place / "weights.safetensors")
    for name in ("o_proj", "v_proj", "q_proj"):
        changed = {key: tensor.copy() for key, tensor in tensors.items()}
        changed[f"{name}.weight"][7, 3] += 0.25  # of head 1, or of its kv head
        save_file(changed, place / f"{name}.safetensors")
    tensors["q_proj.weight"][7, 3] = np.inf
    save_file(tensors, place / "infinite.safetensors")
    bias = np.zeros((6, 6, 6), np.float32)
    bias[4, 3, 1] = 0.75
    save_file({"bias": bias}, place / "bias.safetensors")
    run(place, "vocab", f"a rug {LONGER}", "--save", "words.json")
    original = checkpoints.folder("bert")
    (place / "model").symlink_to(original)
    for name in ("t5", "gpt2"):
        (place / name).symlink_to(checkpoints.folder(name))
    shutil.copy(Path(__file__).parent / "cases" / "attention.py", place)
    for name in ("query", "value"):
        tensors = load_file(shutil.copytree(original, place / name) / "model.safetensors")
        tensors[f"bert.encoder.layer.1.attention.self.{name}.weight"][3, 5] += 0.25
        save_file(tensors, place / name / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.fixture(scope="module")
def record(folder: Path) -> Any:
    """The path of a record of `RECORDS`, which is computed the first time."""

    def saved(name: str) -> Path:
        path = folder / f"{name.replace(' ', '-')}.record"
        if not path.exists():
            run(folder, *RECORDS[name], "--save", path)
        return path

    return saved


def diff(
    mha: Any, record: Any, a: str, b: str, *words: str, code: int | Sequence[int] = (0, 3)
) -> Any:
    """The document of a comparison."""
    ended = mha("diff", record(a), record(b), *words, "--json", code=code)
    assert ended.stderr == ""
    return ended.json


# --------------------------------------------------------------------------------------- the oracle


def aligned(a: Sequence[str], b: Sequence[str]) -> np.ndarray:
    """Positions of equal tokens, and of those that are replaced one to one: `[2, pairs]`."""
    steps = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    pairs = [
        (i + n, j + n)
        for _, i, i_end, j, j_end in steps
        if i_end - i == j_end - j
        for n in range(i_end - i)
    ]
    return np.array(pairs, int).reshape(-1, 2).T


def first_of(record: Any, sequences: Sequence[Any], s: int) -> int:
    """The position of the first token of a text behind its padding."""
    if record.config.padding != "left" or record.model is not None:
        return 0
    longest = max(len(sequence.tokens) for sequence in sequences)
    return longest - len(sequences[s].tokens)


def cells(
    axes: Sequence[str], a: Any, b: Any, s: int, x: np.ndarray, y: np.ndarray
) -> tuple[list[Any], list[Any]]:
    """The indices of sequence `s` that correspond, of each axis but the batch."""
    chosen: tuple[list[Any], list[Any]] = ([], [])
    for axis, n_a, n_b in zip(axes[1:], x.shape[1:], y.shape[1:], strict=True):
        if axis in ("query", "key"):
            texts = [
                (one.sequences if axis == "query" else one.context or one.sequences)
                for one in (a, b)
            ]
            pairs = aligned(texts[0][s].tokens, texts[1][s].tokens)
            both = [pairs[i] + first_of(one, texts[i], s) for i, one in enumerate((a, b))]
        else:  # one row may stand for all heads
            assert n_a == n_b or (axis == "head" and 1 in (n_a, n_b))
            both = [np.arange(max(n_a, n_b)) * (n > 1) for n in (n_a, n_b)]
        for part, indices in zip(chosen, both, strict=True):
            part.append(indices)
    return chosen


def expected(name: str, a: Any, b: Any) -> dict[str, Any]:
    """Counts and largest differences of a site of one layer by numpy."""
    axes, x, y = AXES[name].split(), a.arrays[name], b.arrays[name]
    sums = {"n_cells": 0, "n_different": 0, "n_only_a": 0, "n_only_b": 0}
    largest, magnitude, by_head = 0.0, 0.0, np.zeros(max(x.shape[1], y.shape[1]))
    for s in range(min(len(a.sequences), len(b.sequences))):
        at_a, at_b = cells(axes, a, b, s, x, y)
        u, v = x[s][np.ix_(*at_a)].astype(np.float64), y[s][np.ix_(*at_b)].astype(np.float64)
        counted = np.ones(u.shape, bool)
        if name in ("qk", "scores"):
            both = [
                one.arrays["allowed"][s][np.ix_([0], *at[1:])] for one, at in ((a, at_a), (b, at_b))
            ]
            counted = np.broadcast_to(both[0] & both[1], u.shape)
        u, v = u[counted], v[counted]
        sums["n_cells"] += u.size
        sums["n_different"] += int((u != v).sum())
        sums["n_only_a"] += int((u > v).sum()) if name == "allowed" else 0
        sums["n_only_b"] += int((u < v).sum()) if name == "allowed" else 0
        gaps = np.zeros(counted.shape)
        gaps[counted] = abs(u - v)
        largest = max(largest, gaps.max(initial=0))
        magnitude = max(magnitude, abs(u).max(), abs(v).max())
        if axes[1] == "head":
            by_head = np.maximum(by_head, gaps.reshape(len(gaps), -1).max(axis=1))
    if name == "allowed":
        largest = magnitude = None
    return {**sums, "largest": largest, "magnitude": magnitude, "by_head": by_head}


def assert_as_numpy(document: Any, a: Any, b: Any) -> int:
    """Every site of every layer that both records hold; the number of sites that were compared."""
    n_sites = 0
    for layer in document["layers"]:
        places = [
            [one.label for one in r.layers].index(layer["layer"]) if r.model else None
            for r in (a, b)
        ]
        x, y = (
            r if place is None else r.of_layer(place)
            for r, place in zip((a, b), places, strict=True)
        )
        for site in layer["sites"]:
            if site["seen"] != "array" or site["site"] not in AXES or site["status"] == "shape":
                continue
            numbers = expected(site["site"], x, y)
            by_head = numbers.pop("by_head")
            assert {name: site[name] for name in numbers} == numbers, site
            if site["largest"]:
                at = [tuple(site["at"][side]) for side in "ab"]
                values = [
                    float(r.arrays[site["site"]][place])
                    for r, place in zip((x, y), at, strict=True)
                ]
                assert abs(values[0] - values[1]) == site["largest"]
                assert site["relative"] == pytest.approx(site["largest"] / site["magnitude"])
            if site["heads"] and site["site"] != "allowed":
                assert [head["largest"] for head in site["heads"]] == by_head.tolist()
            n_sites += 1
    return n_sites


# ---------------------------------------------------------------------------------------- the pairs


@pytest.mark.parametrize("pair", rows(PAIRS, lambda pair: f"{pair.a}-{pair.b}"))
def test_the_first_difference_and_every_number_are_those_of_numpy(
    mha: Any, record: Any, pair: Pair
) -> None:
    a, b, answer, _ = pair
    document = diff(mha, record, a, b, code=answer.code)
    assert document["verdict"] == answer.verdict
    assert document["first"] == answer.first
    assert document["first_site"] == answer.first_site
    records = [mhacli.load(str(record(name))) for name in (a, b)]
    if "nfinite" not in b and "statistics" not in a and b != "heads":
        assert assert_as_numpy(document, *records) >= (1 if b == "pattern" else 5)
    statuses = {site["status"] for layer in document["layers"] for site in layer["sites"]}
    assert bool({"beyond", "shape"} & statuses) == (answer.first_site is not None)
    if a == b or (a, b) == ("a", "again"):
        assert statuses <= {"identical", "skipped"}
    for site in (site for layer in document["layers"] for site in layer["sites"]):
        assert site["status"] != "skipped" or site["why"], site
        is_partial = site["seen"] in ("shape", "extremes")
        assert not (is_partial and site["status"] == "identical"), site


# ------------------------------------------------------------------------------------------ numbers


def sites_of(document: Any, layer: int = 0) -> dict[str, Any]:
    """The sites of a layer by name."""
    return {site["site"]: site for site in document["layers"][layer]["sites"]}


def test_one_other_score_is_named_with_its_place_and_size(mha: Any, record: Any) -> None:
    document = diff(mha, record, "a", "bias", code=3)
    scores = sites_of(document)["scores"]
    assert (scores["status"], scores["n_different"]) == ("beyond", 1)
    assert scores["largest"] == pytest.approx(0.75, abs=1e-6)
    assert scores["at"] == {
        "axes": ["sequence", "head", "query", "key"],
        "a": [0, 4, 3, 1],
        "b": [0, 4, 3, 1],
    }
    assert [head["largest"] > 0 for head in scores["heads"]] == [False] * 4 + [True, False]
    assert [head["head"] for head in document["layers"][0]["heads"]] == [4]


def test_heads_that_changed_come_with_their_statistics_and_the_largest_change_of_a_fraction(
    mha: Any, record: Any
) -> None:
    document = diff(mha, record, "a", "seed", code=3)
    before, after = (
        {head.head: head for head in mhacli.load(str(record(name))).heads} for name in ("a", "seed")
    )
    heads = document["layers"][0]["heads"]
    assert sorted(head["head"] for head in heads) == [*range(6)]
    for head in heads:
        a, b = before[head["head"]], after[head["head"]]
        assert (head["kind_a"], head["kind_b"]) == (a.kind, b.kind)
        assert len(head["statistics"]) > 5
        for statistic in head["statistics"]:
            assert (statistic["a"], statistic["b"]) == (
                getattr(a, statistic["name"]),
                getattr(b, statistic["name"]),
            )
            assert statistic["a"] != statistic["b"]
    fractions = "sink leading diagonal previous duplicate induction near entropy_share".split()
    for head in heads:
        gaps = [
            abs(getattr(after[head["head"]], name) - getattr(before[head["head"]], name))
            for name in fractions
        ]
        is_partial = any(
            None in (statistic["a"], statistic["b"]) for statistic in head["statistics"]
        )
        assert head["size"] == (None if is_partial else pytest.approx(max(gaps)))


@pytest.mark.parametrize(
    ("a", "b", "relative", "dtype"),
    [
        ("a", "again", 1e-5, "float32"),
        ("a", "double", 1e-5, "float32"),
        ("double", "double", 1e-12, "float64"),
        ("float16", "a", 5e-3, "float16"),
        ("half", "float16", 2e-2, "bfloat16"),
    ],
)
def test_the_tolerance_is_that_of_the_coarser_number_format(
    mha: Any, record: Any, a: str, b: str, relative: float, dtype: str
) -> None:
    assert diff(mha, record, a, b)["tolerance"] == {"relative": relative, "of_dtype": dtype}


@pytest.mark.parametrize("site", ["pattern", "out"])
@pytest.mark.parametrize(("part", "status"), [(1.01, "within"), (0.99, "beyond")])
def test_a_tolerance_is_relative_to_the_largest_number_of_a_site(
    mha: Any, record: Any, site: str, part: float, status: str
) -> None:
    relative = sites_of(diff(mha, record, "a", "seed"))[site]["relative"]
    document = diff(mha, record, "a", "seed", "--tolerance", f"{part * relative:.17g}")
    assert sites_of(document)[site]["status"] == status
    assert document["tolerance"]["of_dtype"] is None


def test_tolerance_0_demands_the_same_bits(mha: Any, record: Any) -> None:
    assert diff(mha, record, "a", "again", "--tolerance", "0", code=0)["verdict"] == "agree"
    document = diff(mha, record, "a", "double", "--tolerance", "0", code=3)
    assert document["first_site"] == {"layer": "", "site": "qk"}
    assert diff(mha, record, "a", "double", "--tolerance", "1e-12", code=3)["verdict"] == "differ"


def test_a_mask_is_counted_in_cells(mha: Any, record: Any) -> None:
    mask = sites_of(diff(mha, record, "a", "full", code=3))["allowed"]
    back = sites_of(diff(mha, record, "full", "a", code=3))["allowed"]
    assert (mask["n_only_a"], mask["n_only_b"]) == (0, 15)
    assert (back["n_only_a"], back["n_only_b"]) == (15, 0)
    assert mask["at"]["a"] == [0, 0, 1]


def test_heads_that_share_no_number_are_not_compared(mha: Any, record: Any) -> None:
    document = diff(mha, record, "a", "heads", code=3)
    assert all(str(n) in sites_of(document)["qk"]["why"] for n in (6, 3))
    assert sites_of(document)["allowed"]["status"] == "identical"
    assert document["layers"][0]["heads"] == []
    width = diff(mha, record, "a", "wide", code=3)
    assert width["first"] == {"where": "site", "layer": "", "site": "embed"}
    assert all(str(n) in sites_of(width)["embed"]["why"] for n in (30, 60))


@pytest.mark.real
def test_heads_that_both_records_have_are_compared(mha: Any, record: Any) -> None:
    document = diff(mha, record, "statistics", "statistics of others", "--tolerance", "0", code=0)
    assert {head["head"] for head in sites_of(document)["map"]["heads"]} == {0, 3}
    assert (
        sites_of(diff(mha, record, "statistics", "statistics of one"))["map"]["status"] == "skipped"
    )


def test_arrays_and_layers_of_one_record_alone_are_named_and_are_no_difference(
    mha: Any, record: Any
) -> None:
    document = diff(mha, record, "a", "pattern", code=0)
    assert {"qk", "scores", "z", "out"} <= {*document["layers"][0]["only_a"]}
    assert document["layers"][0]["only_b"] == []
    for pair, side in (
        (("model", "model layer 2"), "only_a"),
        (("model layer 2", "model"), "only_b"),
    ):
        document = diff(mha, record, *pair, code=0)
        assert document[side] == ["layer 0", "layer 1"]
        assert [layer["layer"] for layer in document["layers"]] == ["layer 2"]


@pytest.mark.parametrize(
    ("a", "b", "letters"), [("a", "seed", ""), ("a", "kept", "B"), ("kept", "a", "A")]
)
def test_what_is_not_in_both_records_is_not_compared(
    mha: Any, record: Any, a: str, b: str, letters: str
) -> None:
    sites = sites_of(diff(mha, record, a, b, code=3))
    for name in ("x", "q", "k", "v"):
        assert sites[name]["status"] == "skipped"
        assert [letter for letter in "AB" if letter in sites[name]["why"]] == [*letters]
    assert sites["qk"]["status"] == "beyond"
    kept = diff(mha, record, "kept", "kept of seed 0", code=3)
    assert kept["first_site"] == {"layer": "", "site": "q"}
    assert sites_of(kept)["scores"]["status"] == "skipped"


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("a", "b", "changes"),
    [
        ("a", "rug", [("replaced", ["mat"], ["rug"])]),
        ("a", "inserted", [("only B", [], ["quietly"])]),
        ("inserted", "a", [("only A", ["quietly"], [])]),
        ("known", "known appended", [("only B", [], ["quietly"])]),
        ("a", "repeated", [("only B", [], ["mat"])]),
    ],
)
def test_tokens_that_differ_are_listed(mha: Any, record: Any, a: str, b: str, changes: Any) -> None:
    (text,) = diff(mha, record, a, b, code=3)["texts"]
    assert [(change["change"], change["a"], change["b"]) for change in text["changes"]] == changes
    texts = [mhacli.load(str(record(name))).sequences[0].tokens for name in (a, b)]
    matched = [
        (match["a"] + n, match["b"] + n)
        for match in text["matches"]
        for n in range(match["length"])
    ]
    assert [texts[0][i] for i, _ in matched] == [texts[1][j] for _, j in matched]
    assert text["n_aligned"] == len(matched) == 5 + (a != "a" or b != "rug")
    assert (text["n_a"], text["n_b"]) == tuple(map(len, texts))


def test_equal_tokens_with_other_numbers_are_another_input(mha: Any, record: Any) -> None:
    document = diff(mha, record, "a", "known", code=3)
    assert document["first"]["where"] == "ids"
    assert document["texts"][0]["is_same"]
    assert document["texts"][0]["n_other_ids"] > 0


def test_texts_are_compared_as_far_as_both_records_have_them(mha: Any, record: Any) -> None:
    document = diff(mha, record, "right", "known", code=3)
    assert document["n_sequences"] == [2, 1]
    assert sites_of(document)["out"]["n_cells"] == 6 * 30


def test_a_layer_and_a_checkpoint_have_nothing_in_common(mha: Any, record: Any) -> None:
    ended = mha("diff", record("tokens of a model"), record("model of gpt2"), "--json", code=1)
    assert ended.error["code"] == "nothing-in-common"


@pytest.mark.real
def test_traces_of_code_are_compared_step_by_step(mha: Any, record: Any) -> None:
    assert diff(mha, record, "trace", "trace", code=0)["verdict"] == "agree"
    formula = diff(mha, record, "trace", "trace with scale", code=3)
    assert formula["first"]["where"] == "site"
    width = diff(mha, record, "trace", "trace with width", code=3)
    statuses = [site["status"] for site in width["layers"][0]["sites"]]
    assert "shape" in statuses


# ------------------------------------------------------------------------------- command and Python


def test_the_document_is_the_same_bytes_each_time_and_names_the_command(
    mha: Any, record: Any
) -> None:
    words = ("diff", record("a"), record("seed"), "--json")
    one, other = (mha(*words, code=3) for _ in range(2))
    assert one.stdout == other.stdout
    assert one.json["command"] == ["mha", *map(str, words)]
    assert one.json["schema"] == "mha.diff/1"
    assert [one.json["a"], one.json["b"]] == [str(words[1]), str(words[2])]


def test_the_command_needs_no_torch(mha: Any, record: Any) -> None:
    ended = mha("diff", record("a"), record("seed"), code=3, modules=NO_TORCH)
    assert "qk" in ended.stdout


def test_python_gives_the_document_of_the_command(mha: Any, record: Any) -> None:
    document = diff(mha, record, "a", "rug", code=3)
    paths = [str(record(name)) for name in ("a", "rug")]
    differences = mhacli.diff(*paths)
    assert differences.to_dict() | {"command": []} == document | {"command": []}
    assert (differences.verdict, differences.summary) == (document["verdict"], document["summary"])
    of_records = mhacli.diff(*map(mhacli.load, paths))
    assert of_records.to_dict()["layers"] == document["layers"]
    assert mhacli.diff(*paths, tolerance=1e6).to_dict()["tolerance"]["relative"] == 1e6
    with pytest.raises(mhacli.MhaError):
        mhacli.diff(*paths, tolerance=-1)


@pytest.mark.parametrize(
    ("words", "code", "mentions"),
    [
        ("RECORD --tolerance -1", 2, "--tolerance"),
        ("RECORD --layer 0", 2, "--layer"),
        ("", 2, ""),
    ],
)
def test_what_cannot_be_compared_is_refused(
    mha: Any, record: Any, words: str, code: int, mentions: str
) -> None:
    more = [str(record("a")) if word == "RECORD" else word for word in words.split()]
    ended = mha("diff", record("a"), *more, "--json", code=code)
    assert mentions in ended.said


def test_names_and_tokens_that_a_terminal_obeys_are_escaped(mha: Any) -> None:
    for name, text in (("a", "\x1b]52;c;x\x07 cat"), ("\x1b[2Jb", "\u202ecat [red]")):
        mha("run", text, "--tokenizer", "char", "--save", name)
    ended = mha("diff", "a", "\x1b[2Jb", code=3, env={"COLUMNS": "200"})
    assert "\\x1b[2Jb" in ended.stdout


@pytest.mark.parametrize(
    ("option", "replacement"),
    [
        ("--view none", "mha show"),
        ("--head 1", "mha show"),
        ("--sequence 0", "mha show"),
        ("--decimals 3", "mha show"),
        ("--map-scale log", "mha show"),
        ("--svg p.svg", "--html"),
        ("--png p.png", "--html"),
    ],
)
def test_an_option_of_pictures_names_its_replacement(
    mha: Any, record: Any, option: str, replacement: str
) -> None:
    ended = mha("diff", record("a"), record("seed"), *option.split(), "--json", code=2)
    assert ended.error["code"] == "usage"
    assert replacement in ended.error["hint"]
    assert option.split()[0] not in mha("diff", "--help-all").stdout.split()


def test_effects_are_not_compared_and_the_verdict_says_so(mha: Any) -> None:
    for name, how in (("a", "zero"), ("b", "mean")):
        mha("effect", TEXT, "--causal", "--replace", how, "--save", name)
    document = mha("diff", "a", "b", "--json").json
    assert document["verdict"] == "agree"
    assert "effects are not compared" in document["summary"]


def test_numbers_that_are_not_finite_in_one_record_alone_are_counted(mha: Any, record: Any) -> None:
    document = diff(mha, record, "weights", "infinite", "--tolerance", "1e9", code=3)
    sites = {site["site"]: site for site in document["layers"][0]["sites"]}
    assert document["first_site"]["site"] == "qk"
    arrays = mhacli.load(str(record("infinite"))).arrays
    visible = np.broadcast_to(arrays["allowed"], arrays["qk"].shape)
    assert sites["qk"]["n_nonfinite"] == (~np.isfinite(arrays["qk"][visible])).sum() > 0
    assert [head["largest"] is None for head in sites["qk"]["heads"]] == [False, True, *[False] * 4]


def test_an_option_for_weights_beside_records_is_said_to_change_nothing(
    mha: Any, record: Any
) -> None:
    words = ("diff", record("a"), record("a"))
    plain, given = mha(*words), mha(*words, "--axes", "head,query,key")
    assert given.stdout == plain.stdout
    assert ("--axes" in given.stderr, "--axes" in plain.stderr) == (True, False)
