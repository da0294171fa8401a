"""The parts of a score: they add up to it, and each equals the score computed with that part alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mhacli.checkpoints.mha_weights import read_layer_file
from mhacli.compute.layer import trace as study
from mhacli.compute.layer.run import RecordingOptions, weights_content
from mhacli.requests.layer import CellIndex, layer_request
from mhacli.spec.config import Config
from mhacli.text.encode import encode

CHOICES = {
    "d_model": 5, "n_heads": 6, "n_kv_heads": 2, "d_head": 4, "d_v": 3, "d_input": 9, "init": "uniform",
    "dtype": "float64", "device": "cpu", "max_positions": 9, "scale": 1.5, "rope_theta": 30.0,
}  # fmt: skip
TEXTS = ("the cat | sat on the | mat a", "a mat | sat")
CONTEXTS = ("on | mat the | a cat", "the sat cat a on | mat")
POSITIONS = ("none", "sinusoidal", "learned", "rope", "rope-interleaved", "alibi")
PLACES = (CellIndex(0, 0, 4, 2), CellIndex(0, 5, 3, 3), CellIndex(1, 3, 2, 0), CellIndex(1, 2, 1, 2))
QUICK = RecordingOptions(repeat=1, keep=("scores", "qk", "pattern", "z", "q", "k", "v"))


@pytest.fixture(autouse=True)
def one_route(monkeypatch):
    """That the routes agree is told elsewhere."""
    monkeypatch.setattr(study, "compare_routes", lambda *_, **__: ())


def walked(place, texts=TEXTS, context=(), config=None, **choices):
    config = config or Config(**CHOICES | choices)
    return study.walk(layer_request(encode(texts, config, context=context), config, options=QUICK), place=place)


def values(cell):
    return {part.name: part.value for part in cell.parts}


def total(cell):
    return sum(part.value for part in cell.parts)


def first_of(record, place, *, keys=False):
    """Where the sequence of the place begins on the axis of queries or keys."""
    family = record.keys if keys else record.sequences
    own = len(family[place.sequence].tokens)
    return max(len(s.tokens) for s in family) - own if record.config.padding == "left" else 0


def require_right(record, place):
    """The cell is that of the arrays, and its parts add up to its score."""
    cell, config = record.cell, record.config
    i = place.query + first_of(record, place)
    j = place.key + first_of(record, place, keys=True)
    at = (place.sequence, place.head, i, j)
    kv_head = place.head // (config.n_heads // config.n_kv_heads)
    assert cell.qk == record.arrays["qk"][at]
    assert cell.qk == pytest.approx(np.dot(cell.q, cell.k), abs=1e-12)
    assert cell.v == tuple(record.arrays["v"][place.sequence, kv_head, j])
    assert cell.share == record.arrays["pattern"][at]
    assert cell.z == tuple(record.arrays["z"][place.sequence, place.head, i])
    if config.positions not in ("rope", "rope-interleaved"):
        assert cell.q == tuple(record.arrays["q"][place.sequence, place.head, i])
        assert cell.k == tuple(record.arrays["k"][place.sequence, kv_head, j])
    score = record.arrays["scores"][at]
    assert cell.allowed == np.isfinite(score)
    assert cell.score == (score if cell.allowed else None)
    n_keys = len(record.keys[place.sequence].tokens)
    assert len(cell.scores_row) == len(cell.pattern_row) == n_keys
    assert (cell.scores_row[place.key], cell.pattern_row[place.key]) == (cell.score, cell.share)
    if cell.allowed:
        assert total(cell) == pytest.approx(score, abs=1e-10)


SCORES = {
    "plain": {},
    "softcap": {"softcap": 0.4},
    "score bias": {"score_bias": True},
    "softcap and score bias": {"softcap": 0.7, "score_bias": True},
}


@pytest.fixture(scope="module")
def bias_path(tmp_path_factory):
    bias = torch.randn(6, 7, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    path = tmp_path_factory.mktemp("bias") / "b.safetensors"
    save_file({"bias": bias}, path)
    return str(path)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("place", PLACES[:3:2], ids=str)
def test_the_parts_of_a_score_add_up_to_it(place, positions, scores, bias_path):
    choices = SCORES[scores] | ({"score_bias": bias_path} if "score_bias" in SCORES[scores] else {})
    record = walked(place, positions=positions, **choices)
    require_right(record, place)
    kinds = [part.kind for part in record.cell.parts]
    assert ("softcap" in kinds) == ("softcap" in choices)
    assert ("given" in kinds) == ("score_bias" in choices)
    assert ("position" in kinds) == (positions != "none")
    assert kinds.count("both") == (2 if positions in ("sinusoidal", "learned") else 0)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("documents", [None, "|"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_parts_add_up_behind_padding_and_between_documents(positions, documents, padding):
    apart = documents is not None
    for place, is_allowed in (
        (CellIndex(0, 1, 3, 2), True),
        (CellIndex(1, 4, 1, 0), True),
        (CellIndex(1, 2, 0, 2), not apart),
    ):
        record = walked(place, positions=positions, documents=documents, padding=padding, window=(2, 2))
        require_right(record, place)
        assert record.cell.allowed == is_allowed


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("documents", [None, "|"])
@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned"])
def test_parts_add_up_across_two_texts(positions, documents, padding):
    texts = ("the cat | sat", "a mat | sat") if documents else TEXTS
    contexts = ("on mat | the a cat", "the sat cat a on mat | cat") if documents else CONTEXTS
    for place in (CellIndex(0, 1, 0, 1), CellIndex(1, 5, 2, 5), CellIndex(0, 3, 2, 4)):
        record = walked(place, texts, contexts, positions=positions, documents=documents, padding=padding)
        require_right(record, place)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("positions", POSITIONS)
def test_every_head_reads_its_own_key_head(positions, n_kv_heads):
    for head in (1, 4):
        place = CellIndex(1, head, 2, 1)
        require_right(walked(place, positions=positions, n_kv_heads=n_kv_heads), place)


def same_layer(tmp_path, positions):
    """The config of a file with learned positions whose layer is read with other positions, and the file."""
    config = Config(**CHOICES | {"positions": positions, "seed": 6})
    path = tmp_path / "w.safetensors"
    path.write_bytes(weights_content(layer_request(encode(TEXTS, config), config)))
    return path


def of_positions(path, place, positions, **choices):
    given = {"positions": positions, "dtype": "float64", "device": "cpu", "rope_theta": 30.0, **choices}
    source = read_layer_file(str(path), given)
    return study.walk(layer_request(encode(TEXTS, source.config), source=source, options=QUICK), place=place)


@pytest.mark.parametrize("positions", ["rope", "rope-interleaved", "alibi", "sinusoidal", "learned"])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("place", PLACES[1:3], ids=str)
def test_the_content_is_the_score_that_there_would_be_without_positions(place, padding, positions, tmp_path):
    path = same_layer(tmp_path, positions)
    with_them = of_positions(path, place, positions, padding=padding).cell
    without = of_positions(path, place, "none", padding=padding).cell
    content = [part.value for part in with_them.parts if part.kind == "content"]
    assert content == pytest.approx([without.score], abs=1e-12)
    assert values(without) == {"scale · q · k": pytest.approx(without.score, abs=1e-12)}


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_by_hand_what_distance_costs_is_the_slope_times_the_distance(place):
    slopes = [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    cell = walked(place, positions="alibi").cell
    slope, distance = slopes[place.head], abs(place.query - place.key)
    name = f"−slope {slope:.4g} · distance {distance}"
    assert values(cell)[name] == pytest.approx(-slope * distance, abs=1e-15)


def test_distances_and_turns_are_counted_inside_a_document():
    inside = CellIndex(0, 1, 4, 2)  # places 2 and 0 of the second document
    for positions in ("alibi", "rope", "rope-interleaved", "learned", "sinusoidal"):
        packed = walked(inside, positions=positions, documents="|").cell
        apart = walked(CellIndex(0, 1, 2, 0), ("sat on the", "the cat mat a"), positions=positions).cell
        assert values(packed) == pytest.approx(values(apart), abs=1e-12)
    alibi = walked(inside, positions="alibi", documents="|").cell
    assert values(alibi)["−slope 0.0625 · distance 2"] == -2 / 16


def test_a_key_at_the_place_of_its_query_is_turned_by_nothing_that_counts():
    cell = walked(CellIndex(0, 2, 5, 5), positions="rope").cell
    assert values(cell)["change by the rotation, distance 0"] == pytest.approx(0.0, abs=1e-12)
    other = walked(CellIndex(0, 2, 5, 1), positions="rope").cell
    assert abs(values(other)["change by the rotation, distance 4"]) > 1e-3


def test_at_place_0_the_parts_of_a_learned_table_are_products_with_its_first_row():
    cell = walked(CellIndex(0, 1, 0, 0), positions="learned").cell
    names = list(values(cell))
    assert names == [
        "content of the query · content of the key",
        "content of the query · position of the key",
        "position of the query · content of the key",
        "position of the query · position of the key",
    ]
    assert all(abs(value) > 1e-6 for value in values(cell).values())


def test_a_cell_that_is_not_allowed_has_parts_and_no_score(bias_path):
    cell = walked(CellIndex(0, 1, 1, 4), positions="rope", causal=True, score_bias=bias_path, softcap=2.0).cell
    assert (cell.allowed, cell.score, cell.share) == (False, None, 0.0)
    assert total(cell) == pytest.approx(
        walked(CellIndex(0, 1, 1, 4), positions="rope", score_bias=bias_path, softcap=2.0).cell.score, abs=1e-10
    )


@pytest.mark.parametrize("positions", POSITIONS)
def test_random_rows_are_content(positions):
    config = Config(**CHOICES | {"positions": positions, "random": (2, 5)})
    place = CellIndex(1, 4, 3, 1)
    record = walked(place, (), config=config)
    require_right(record, place)
    without = walked(place, (), config=replace(config, positions="none")).cell
    assert next(p.value for p in record.cell.parts if p.kind == "content") == pytest.approx(without.score, abs=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-2), ("bfloat16", 1e-1)])
@pytest.mark.parametrize("positions", POSITIONS)
def test_in_low_precision_parts_add_up_but_for_rounding(positions, dtype, tolerance):
    cell = walked(PLACES[0], positions=positions, dtype=dtype).cell
    assert total(cell) == pytest.approx(cell.score, abs=tolerance)
