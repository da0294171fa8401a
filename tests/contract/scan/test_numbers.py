"""`mha scan`: rows are those of the commands for single texts, and the statistics of a corpus are
numpy's over the rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import checkpoints, some
from support.checkpoints import N_HALF, N_HEADS, N_LAYERS
from support.mha import run
from support.scans import corpus_file, rows_of, sentences

import mhacli

TEXTS = [*sentences(5), "rain"]
BAD = 3
"""The line of the corpus that holds no text."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EFFECTS = ("d_logit", "d_logprob", "kl", "rank", "d_output")


class Scan(NamedTuple):
    """A finished scan: its folder, its document and its rows."""

    folder: Path
    json: Any
    rows: list[dict[str, Any]]

    def of_head(self, layer: int, head: int) -> list[dict[str, Any]]:
        """The rows of a head, one for each document."""
        return [row for row in self.rows if (row["layer"], row["head"]) == (layer, head)]


def scanned(folder: Path, family: str, *words: str, texts: list[str] = TEXTS) -> Scan:
    """A scan of texts, with an entry without a text between them."""
    corpus_file(folder / "c.jsonl", [*texts[: BAD - 1], {"no": "text"}, *texts[BAD - 1 :]])
    model = checkpoints.folder(family)
    ended = run(folder, "scan", "--model", model, "c.jsonl", "--out", "out", "--json", *words)
    return Scan(folder / "out", ended.json, rows_of(folder / "out"))


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Scan:
    return scanned(tmp_path_factory.mktemp("scan"), "gpt2", "--effect", "--where", "k == 0")


def place_of(number: int) -> int:
    """The line of a text."""
    return number + 1 if number < BAD - 1 else number + 2


@pytest.mark.parametrize("family", some(("gpt2", "llama", "bert", "t5"), default=["gpt2"]))
def test_rows_are_those_of_heads_for_each_document(mha: Any, tmp_path: Path, family: str) -> None:
    words = ("--where", "k == 0", "--first-tokens", "3")
    scan = scanned(tmp_path, family, *words, texts=TEXTS[:3])
    n_heads = N_HEADS * (3 * N_HALF if family == "t5" else N_LAYERS)
    assert len(scan.rows) == 3 * n_heads
    for number, text in enumerate(TEXTS[:3]):
        document = mha("heads", text, "--model", checkpoints.folder(family), *words, "--json").json
        rows = scan.rows[number * n_heads : (number + 1) * n_heads]
        ids = (document["context"] or document["sequences"])[0]["ids"]
        found = {(row["file"], row["place"], row["n_tokens"]) for row in rows}
        assert found == {("c.jsonl", place_of(number), len(ids))}
        for row, head in zip(rows, document["heads"], strict=True):
            assert (row["kind"], row["attention"]) == (head["kind"], head["attention"])
            names = (row.keys() & head.keys()) - {"kind", "attention"}
            known = {name for name in names if head[name] is not None}
            assert {name for name in names if row[name] is not None} == known
            expected = {name: head[name] for name in known}
            assert {name: row[name] for name in known} == pytest.approx(
                expected, rel=1e-6, abs=1e-9
            )
            assert row["pattern_1"] == pytest.approx(head["patterns"][0], abs=1e-7)
            assert len(expected) > 15


@pytest.mark.real
@pytest.mark.parametrize("number", [0, 4])
def test_effects_in_rows_are_those_of_the_command(mha: Any, scan: Scan, number: int) -> None:
    document = mha("effect", TEXTS[number], "--model", checkpoints.folder("gpt2"), "--json").json
    rows = [row for row in scan.rows if row["place"] == place_of(number)]
    for row, effect in zip(rows, document["effects"], strict=True):
        assert (row["layer"], row["head"]) == (effect["layer"], effect["head"])
        found, expected = ({name: of[name] for name in EFFECTS} for of in (row, effect))
        assert found == pytest.approx(expected, abs=2e-5)


def test_layers_and_heads_that_are_chosen_are_the_only_ones(tmp_path: Path) -> None:
    scan = scanned(tmp_path, "llama", "--layer", "1", "--effect", texts=TEXTS[:2])
    assert {(row["layer"], row["head"]) for row in scan.rows} == {
        (1, head) for head in range(N_HEADS)
    }
    assert [(head["layer"], head["head"]) for head in scan.json["corpus"]["heads"]] == [
        (1, h) for h in range(N_HEADS)
    ]


# ------------------------------------------------------------------------------- over the documents


def test_means_deviations_and_quantiles_are_those_of_numpy_over_the_rows(scan: Scan) -> None:
    n_spreads = 0
    for head, mean in zip(scan.json["corpus"]["heads"], scan.json["heads"], strict=True):
        rows = [
            {**row, "at_offset": row["at_offset"] if row["offset"] == mean["offset"] else 0.0}
            for row in scan.of_head(head["layer"], head["head"])
        ]
        assert {"at_offset", "previous"} < {spread["statistic"] for spread in head["spreads"]}
        for spread in head["spreads"]:
            values = np.array(
                [row[spread["statistic"]] for row in rows if row[spread["statistic"]] is not None],
                float,
            )
            assert spread["n"] == len(values)
            assert spread["mean"] == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
            assert spread["std"] == pytest.approx(values.std(ddof=1), rel=1e-9, abs=1e-12)
            assert (
                spread["quantiles"]
                == np.quantile(values, QUANTILES, method="inverted_cdf").tolist()
            )
            n_spreads += 1
    assert n_spreads > N_LAYERS * N_HEADS * 20


def test_an_interval_is_that_of_a_bootstrap_over_documents(scan: Scan) -> None:
    weights = np.random.default_rng(0).poisson(1.0, size=(20_000, len(TEXTS)))
    weights = weights[weights.sum(axis=1) > 0]
    for head in scan.json["corpus"]["heads"]:
        rows = scan.of_head(head["layer"], head["head"])
        for spread in head["spreads"]:
            if spread["statistic"] in ("distance", "d_output", "sink"):
                values = np.array([row[spread["statistic"]] for row in rows])
                means = (weights * values).sum(axis=1) / weights.sum(axis=1)
                expected = np.quantile(means, [0.025, 0.975])
                assert spread["low"] < spread["mean"] < spread["high"]
                assert [spread["low"], spread["high"]] == pytest.approx(
                    expected, abs=0.2 * np.ptp(expected)
                )


def test_one_document_has_no_deviation_and_no_interval(tmp_path: Path) -> None:
    scan = scanned(tmp_path, "gpt2", "--layer", "0", texts=TEXTS[:1])
    spreads = [spread for head in scan.json["corpus"]["heads"] for spread in head["spreads"]]
    found = {(spread["n"], spread["std"], spread["low"], spread["high"]) for spread in spreads}
    assert found == {(1, None, None, None)}
    assert all(spread["quantiles"] == [spread["mean"]] * 5 for spread in spreads)


def test_a_head_counts_its_types_and_has_the_means_of_its_documents(scan: Scan) -> None:
    for head, record in zip(scan.json["corpus"]["heads"], scan.json["heads"], strict=True):
        rows = scan.of_head(head["layer"], head["head"])
        kinds = [row["kind"] for row in rows]
        assert head["kinds"] == {kind: kinds.count(kind) for kind in set(kinds)}
        assert head["agree"] == pytest.approx(kinds.count(record["kind"]) / len(kinds))
        for name in ("entropy", "sink", "previous", "distance", "d_logit", "d_output"):
            assert record[name] == pytest.approx(np.mean([row[name] for row in rows]), rel=1e-9)
        assert record["max_score"] == pytest.approx(max(row["max_score"] for row in rows), rel=1e-6)


def test_documents_tokens_and_bad_entries_are_counted(scan: Scan) -> None:
    corpus = scan.json["corpus"]
    lengths = {row["place"]: row["n_tokens"] for row in scan.rows}
    assert [*lengths] == [place_of(number) for number in range(len(TEXTS))]
    assert (corpus["n_documents"], corpus["n_tokens"], corpus["n_bad"]) == (
        len(TEXTS),
        sum(lengths.values()),
        1,
    )
    assert corpus["longest"] == max(lengths.values())
    (bad,) = corpus["bad"]
    assert (bad["file"], bad["place"]) == ("c.jsonl", BAD)
    assert "text" in bad["reason"]


def test_the_example_is_the_longest_document(scan: Scan) -> None:
    (sequence,) = scan.json["sequences"]
    assert sequence["text"] == max(TEXTS, key=len)
    assert scan.json["corpus"]["example_place"] == place_of(TEXTS.index(sequence["text"]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any]]:
    """The document and the record of `mha heads` for each text."""
    folder, model = tmp_path_factory.mktemp("alone"), checkpoints.folder("gpt2")
    results = []
    for number, text in enumerate(TEXTS):
        path = folder / f"{number}.safetensors"
        ended = run(folder, "heads", text, "--model", model, "--json", "--save", path)
        results.append((ended.json, mhacli.load(str(path))))
    return results


@pytest.mark.real
def test_cells_that_stand_out_are_the_largest_of_all_documents(
    scan: Scan, alone: list[tuple[Any, Any]]
) -> None:
    for index, head in enumerate(scan.json["corpus"]["heads"]):
        cells = [
            (cell["lift"], cell["share"], place_of(number), cell["query"], cell["key"])
            for number, (document, _) in enumerate(alone)
            for cell in document["heads"][index]["largest"]
        ]
        fields = ("lift", "share", "place", "query", "key")
        computed = [tuple(cell[field] for field in fields) for cell in head["cells"]]
        assert len(computed) == 5
        assert [
            pytest.approx(cell, rel=1e-5) for cell in sorted(cells, reverse=True)[:5]
        ] == computed


@pytest.mark.real
def test_a_profile_is_the_mean_profile_of_the_documents(
    scan: Scan, alone: list[tuple[Any, Any]]
) -> None:
    mean = mhacli.load(str(scan.folder)).arrays["layers.1.profile"]
    total = np.zeros_like(mean)
    for _, record in alone:
        profile = record.arrays["layers.1.profile"]
        total[..., : profile.shape[-1]] += profile
    np.testing.assert_allclose(mean, total / len(TEXTS), atol=1e-6)


@pytest.mark.real
def test_weights_between_spans_are_means_over_the_documents_that_have_them(
    mha: Any, tmp_path: Path
) -> None:
    texts, words = (
        ["the cat saw a dog", "a cat", "rain fell on the dog"],
        ("--layer", "1", "--span"),
    )
    both = (*words, "cats=/cat/", "--span", "dogs=/dog/")
    scan = scanned(tmp_path, "llama", *both, texts=texts)
    model = checkpoints.folder("llama")
    alone = [
        mha("heads", text, "--model", model, *options, "--json").json["layers"][0]["span_mass"][0]
        for text, options in zip(
            texts, (both, (*words, "cats=/cat/"), (*words, "dogs=/dog/")), strict=True
        )
    ]
    expected = np.array(alone[0])
    expected[:, 0, 0] = (expected[:, 0, 0] + np.array(alone[1])[:, 0, 0]) / 2
    expected[:, 1, 1] = (expected[:, 1, 1] + np.array(alone[2])[:, 0, 0]) / 2
    np.testing.assert_allclose(
        np.array(scan.json["layers"][0]["span_mass"][0], float), expected, rtol=1e-6
    )


def test_a_token_is_a_sink_in_as_many_documents_as_have_it_among_the_sinks_of_the_head(
    mha: Any, tmp_path: Path
) -> None:
    def sharpen(tensors: dict[str, Any]) -> None:
        tensors["transformer.h.1.attn.c_attn.weight"][:, : 2 * 48] *= 6  # of queries and keys

    checkpoints.change(checkpoints.copy_of("gpt2", tmp_path / "m"), sharpen)
    texts = ["a dog ran and ran and ran over the old mill by the sea while it rained"] * 2
    corpus_file(tmp_path / "c.jsonl", texts)
    words = ("--model", "m", "--layer", "1", "--json")
    heads = mha("scan", "c.jsonl", "--out", "out", *words).json["corpus"]["heads"]
    alone = mha("heads", texts[0], *words).json
    tokens = alone["sequences"][0]["tokens"]
    expected = [{tokens[sink["key"]] for sink in head["sinks"]} for head in alone["heads"]]
    assert [{sink["token"] for sink in head["sinks"]} for head in heads] == expected
    assert {sink["documents"] for head in heads for sink in head["sinks"]} == {2}  # there are some


def test_documents_are_cut_to_their_first_tokens(mha: Any, tmp_path: Path) -> None:
    scan = scanned(tmp_path, "gpt2", "--max-tokens", "4", "--layer", "2", texts=TEXTS[:3])
    assert {row["n_tokens"] for row in scan.rows} == {4}
    (sequence,) = scan.json["sequences"]
    assert len(sequence["ids"]) == 4
    assert sequence["text"] == "".join(sequence["tokens"]), "no text behind the tokens"
    document = mha(
        "heads",
        TEXTS[0],
        "--model",
        checkpoints.folder("gpt2"),
        *"--max-tokens 4 --layer 2 --json".split(),
    ).json
    expected = [head["entropy"] for head in document["heads"]]
    assert [row["entropy"] for row in scan.rows[:N_HEADS]] == pytest.approx(expected, rel=1e-6)
