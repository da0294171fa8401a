"""`mha effect` without a checkpoint: the change of a layer's output is that of the same sums in
numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import oracle
from support.mha import run

TEXT, CONTEXT = "the cat sat on the mat", "a dog ran"
HEADS, KV_HEADS, D_HEAD, POSITION = 6, 3, 5, 3
SIZES = ("--d-model", "30", "--heads", "6", "--kv-heads", "3", "--dtype", "float64", "--seed", "3")
CAUSAL, WINDOW, BARE, CROSS = (
    ("--causal",),
    ("--window", "1,2"),
    ("--no-out-proj",),
    ("--context", CONTEXT),
)


class Case:
    """The record of a command, and the layer by hand: the scores, values and output at one
    position.
    """

    def __init__(self, mha: Any, folder: Path, options: tuple[str, ...], *removal: str) -> None:
        weights = folder / f"{'-'.join(options) or 'plain'}.safetensors"
        if not weights.exists():
            run(folder, "run", TEXT, *SIZES, *options, "--save-weights", weights)
        more = ["--weights", weights, "--position", str(POSITION), *removal, "--json"]
        self.json = mha("effect", TEXT, *SIZES, *options, *more).json
        self.weights = load_file(weights)
        texts = oracle.side(self.json["sequences"])
        keys = oracle.side(self.json["context"]) if self.json["context"] else texts
        table, embedding = oracle.sinusoidal(9, 30), self.weights["embed.weight"]
        window = (1, 2) if "--window" in options else None
        allowed = oracle.visible(texts, texts, causal="--causal" in options, window=window)
        self.layer = oracle.layer(
            oracle.embedded(texts.ids, embedding, table),
            self.weights,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            context=oracle.embedded(keys.ids, embedding, table) if self.json["context"] else None,
            allowed=None if self.json["context"] else allowed,
        )

    def output(self, z: np.ndarray) -> np.ndarray:
        """The output at the position, of the heads' z there."""
        row = z.reshape(1, -1)
        return (
            oracle.linear(row, self.weights, "o_proj") if "o_proj.weight" in self.weights else row
        )[0]

    def change(self, z: np.ndarray) -> float:
        """How far the output is moved by another z `[head, d_v]` at the position."""
        plain = self.output(self.layer.attention.z[0, :, POSITION])
        return float(np.linalg.norm(self.output(z) - plain) / np.linalg.norm(plain))

    def without_key(self, heads: list[int], key: int) -> float:
        """The change where the scores of some heads to a key are left out."""
        scores = self.layer.attention.scores[0, :, POSITION].copy()
        scores[heads, key] = -np.inf
        v = np.repeat(self.layer.v[0], HEADS // KV_HEADS, axis=0)
        return self.change(np.einsum("hk,hkd->hd", oracle.softmax(scores), v))

    @property
    def changes(self) -> list[float]:
        return [effect["d_output"] for effect in self.json["effects"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the weights of the layers are saved the first time."""
    return tmp_path_factory.mktemp("weights")


@pytest.mark.parametrize("replace", ["zero", "mean"])
@pytest.mark.parametrize("options", [(), CAUSAL, WINDOW, BARE, CROSS], ids=" ".join)
def test_a_head_changes_what_it_changes_by_hand(
    mha: Any, folder: Path, options: tuple[str, ...], replace: str
) -> None:
    case = Case(mha, folder, options, "--replace", replace)
    z = case.layer.attention.z[0]
    expected = []
    for head in range(HEADS):
        without = z[:, POSITION].copy()
        without[head] = z[head].mean(axis=0) if replace == "mean" else 0
        expected.append(case.change(without))
    assert case.changes == pytest.approx(expected, abs=1e-12)
    assert case.json["effect"]["metric"] == "d_output"
    assert case.json["effect"]["verified"]["ok"]


@pytest.mark.parametrize("heads", [[], [1, 4]], ids=str)
@pytest.mark.parametrize("options", [(), CAUSAL, WINDOW, CROSS], ids=" ".join)
def test_an_edge_changes_what_a_score_that_is_left_out_changes(
    mha: Any, folder: Path, options: tuple[str, ...], heads: list[int]
) -> None:
    chosen = ("--head", ",".join(map(str, heads))) if heads else ()
    case = Case(mha, folder, options, "--edges", *chosen)
    n_keys = case.layer.v.shape[2]
    groups = [[head] for head in heads] or [[*range(HEADS)]]
    expected = [case.without_key(together, key) for together in groups for key in range(n_keys)]
    assert case.changes == pytest.approx(expected, abs=1e-12)
    scores = case.layer.attention.scores[0, :, POSITION]
    hidden = [np.isneginf(scores[together[0], key]) for together in groups for key in range(n_keys)]
    assert [effect.get("masked", False) for effect in case.json["effects"]] == hidden
    assert case.json["effect"]["verified"]["ok"]


def test_a_layer_is_measured_in_which_a_query_sees_no_key(mha: Any, tmp_path: Path) -> None:
    save_file({"bias": np.array([[0.0] * 3, [-np.inf] * 3, [0.0] * 3])}, tmp_path / "b.st")
    assert mha("effect", "a b c", "--score-bias", "b.st", "--json").json["effect"]["verified"]["ok"]


def test_heads_are_removed_alone_and_together(mha: Any, folder: Path) -> None:
    case = Case(mha, folder, (), "--head", "4,1")
    expected = []
    for heads in ([1], [4], [1, 4]):
        z = case.layer.attention.z[0, :, POSITION].copy()
        z[heads] = 0
        expected.append(case.change(z))
    rows = [(effect["removed"], effect["head"], effect["heads"]) for effect in case.json["effects"]]
    assert rows == [("head", 1, []), ("head", 4, []), ("heads", None, [[0, 1], [0, 4]])]
    assert case.changes == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("at", [POSITION, POSITION + 1])
def test_a_head_at_one_position_changes_the_output_there_alone(
    mha: Any, folder: Path, at: int
) -> None:
    case = Case(mha, folder, (), "--at", str(at))
    z, expected = case.layer.attention.z[0, :, POSITION], []
    for head in range(HEADS):
        without = z.copy()
        without[head] *= at != POSITION
        expected.append(case.change(without))
    assert case.changes == pytest.approx(expected, abs=1e-12)


def test_a_saved_record_has_the_effects_of_the_document(mha: Any) -> None:
    words = ("effect", TEXT, "--heads", "8", "--head", "5,2")
    document = mha(*words, "--json").json
    shown = mha(*words, "--save", "r.safetensors").stdout
    assert mha("show", "r.safetensors", "--json").json["effects"] == document["effects"]
    assert mha("show", "r.safetensors").stdout == shown


@pytest.mark.parametrize(
    "words",
    [
        "--head 4",
        "--head 1.2",
        "--target a",
        "--cut a:b",
        "--position 99",
        "--at 99",
        "--train --dropout 0.1",
    ],
)
def test_what_a_layer_does_not_have_is_a_usage_error(mha: Any, words: str) -> None:
    assert words.split()[0] in mha("effect", TEXT, *words.split(), "--json", code=2).said
