"""Every variant of attention, whole layer after whole layer, against loops over the formulas."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from support.variant_cases import (
    K_LEN,
    MASKS,
    N_HEADS,
    POSITIONS,
    Q_LEN,
    SCORES,
    TEXTS,
    WIDTHS,
    Case,
    expected_of,
    grid,
    setup_of,
)

from mhacli.compute.base.setup import make_setup
from mhacli.compute.layer.run import RecordingOptions, inspect
from mhacli.requests.layer import layer_request
from mhacli.spec.config import Config
from mhacli.text.encode import encode

GRID = grid()
EVERY_SEVENTH = GRID[::7]
CEILING = {"float64": 1e-12, "float32": 2e-6}


def observed(setup, route="separate"):
    seen = {}
    with torch.no_grad():
        out = setup.run(lambda site, tensor, **_: seen.update({site: tensor}), route)
    return {**seen, "out": out}


def require_agreement(seen, expected, ceiling):
    """Every tensor of a run is that of the loops, relative to the largest of its numbers."""
    layer, cells = expected.layer, expected.allowed
    arrays = {
        "x": expected.x, "q": layer.q, "k": layer.k, "v": layer.v, "pattern": layer.attention.pattern,
        "z": layer.attention.z, "concat": layer.concat, "out": layer.out,
    }  # fmt: skip
    for name, array in arrays.items():
        assert tuple(seen[name].shape) == array.shape, name
        assert worst(seen[name].double().numpy(), array) <= ceiling, name
    for name, array in {"qk": layer.attention.qk, "scores": layer.attention.scores}.items():
        assert worst(seen[name].double().numpy()[cells], array[cells]) <= ceiling, name
    forbidden = torch.from_numpy(~cells)
    assert (seen["pattern"][forbidden] == 0.0).all()
    assert (seen["scores"][forbidden] == -torch.inf).all()
    no_key = torch.from_numpy(~cells.any(axis=-1))
    assert (seen["z"][no_key] == 0.0).all()


def worst(found, array):
    assert np.isfinite(found).all()
    return np.abs(found - array).max(initial=0.0) / max(1.0, np.abs(array).max(initial=0.0))


@pytest.mark.parametrize("case", GRID, ids=str)
def test_a_layer_agrees_with_loops_over_the_formulas(case, biases, bias_file):
    setup = setup_of(case, bias_file)
    bias = biases[case.kind].numpy() if setup.bias is not None else None
    expected = expected_of(case, setup, bias)
    require_agreement(observed(setup), expected, CEILING["float64"])
    route = ("fused", "per-head")[GRID.index(case) % 2]
    assert worst(observed(setup, route)["out"].numpy(), expected.layer.out) <= CEILING["float64"]
    assert np.array_equal(setup.visible().expand(*expected.allowed.shape).numpy(), expected.allowed)


@pytest.mark.parametrize("case", EVERY_SEVENTH, ids=str)
def test_a_layer_agrees_with_the_loops_in_float32(case, biases, bias_file):
    setup = setup_of(case, bias_file, dtype="float32")
    bias = biases[case.kind].float().double().numpy() if setup.bias is not None else None
    seen = observed(setup)
    assert {tensor.dtype for tensor in seen.values()} <= {torch.float32, torch.int64}
    require_agreement(seen, expected_of(case, setup, bias), CEILING["float32"])


def test_the_grid_holds_every_combination_of_positions_and_masks_and_every_pair_of_other_choices():
    assert len(GRID) == len(POSITIONS) * len(MASKS) * 2 * 2 + 5 * 3 * 2 * 2
    assert len(set(GRID)) == len(GRID)
    values = (POSITIONS, MASKS, (False, True), ("right", "left"), ("self", "cross"), (1, 2, N_HEADS), WIDTHS, SCORES)
    defaults = ("none", "no mask", False, "right", "self", 1, "all widths different", "plain scores")
    for one, other in combinations(range(len(values)), 2):
        there = {(case[one], case[other]) for case in GRID}
        for a, b in product(values[one], values[other]):
            case = list(defaults)
            case[one], case[other] = a, b
            assert ((a, b) in there) == Case(*case).is_legal, (a, b)


@pytest.mark.parametrize("case", GRID[::31], ids=str)
def test_the_record_of_inspect_holds_what_ran(case, bias_file):
    setup = setup_of(case, bias_file)
    keep = ("x", "q", "k", "v", "qk", "scores", "pattern", "z", "concat", "out")
    record = inspect(setup.encoded, case.config(bias_file), options=RecordingOptions(keep=keep, repeat=1))
    seen = observed(setup)
    for name in keep:
        assert np.array_equal(record.arrays[name], seen[name].numpy()), name
    visible = setup.visible().numpy()
    assert np.array_equal(record.arrays["allowed"], visible)
    assert record.self_check.ok
    has_row = np.broadcast_to(visible.any(axis=-1), record.arrays["strongest_key"].shape)
    assert np.array_equal(record.arrays["strongest_key"] >= 0, has_row)
    assert (record.arrays["entropy"][~has_row] == 0.0).all()


SIZES = {
    "init": "uniform", "device": "cpu", "dtype": "float64", "n_heads": 6, "n_kv_heads": 2, "d_head": 4, "d_v": 3,
    "d_model": 5, "d_input": 9, "rope_theta": 20.0, "max_positions": 9,
}  # fmt: skip


def out_of(texts, context=(), **choices):
    """`(out, pattern)` of texts of the letters a to h, whose ids therefore never depend on what else is there."""
    config = Config(**SIZES | {"tokenizer": "char"} | choices).resolved()
    alphabet = encode(["abcdefgh"], config).vocabulary
    setup = make_setup(layer_request(encode(texts, config, context=context, vocabulary=alphabet), config))
    seen = observed(setup)
    return seen["out"], seen["pattern"]


ORDERED = {
    "window": {"window": (1, 2)}, "prefix and window": {"prefix": 2, "window": (0, 1)},
    "sink, causal": {"window": (1, 1), "sink": 2, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("mask", ORDERED)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_texts_give_what_each_gives_alone(side, positions, mask):
    texts, choices = ["abcdefg", "cab"], {"positions": positions, "scale": 3.0} | ORDERED[mask]
    together, pattern = out_of(texts, padding=side, **choices)
    for b, text in enumerate(texts):
        own = slice(0, len(text)) if side == "right" else slice(7 - len(text), 7)
        alone, own_pattern = out_of([text], padding=side, **choices)
        assert (together[b, own] - alone[0]).abs().max() <= 1e-12
        assert (pattern[b, :, own, own] - own_pattern[0]).abs().max() <= 1e-12


@pytest.mark.parametrize("mask", ORDERED)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_documents_give_what_each_gives_alone(side, positions, mask):
    choices = {"positions": positions, "scale": 3.0, "padding": side, "documents": "h"} | ORDERED[mask]
    packed, pattern = out_of(["abchdehfgab", "chaf"], **choices)  # "h" separates
    for b, begins, text in ((0, 3, "de"), (0, 5, "fgab"), (1, 1, "af")):
        first = begins + (6 if side == "left" and b else 0)
        own = slice(first, first + len(text))
        alone, own_pattern = out_of([text], **choices)
        assert (packed[b, own] - alone[0]).abs().max() <= 1e-12
        assert (pattern[b, :, own, own] - own_pattern[0]).abs().max() <= 1e-12
        others = pattern[b, :, own].clone()
        others[:, :, own] = 0.0
        assert (others == 0.0).all()


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_contexts_and_documents_of_a_context_give_what_each_gives_alone(side, positions):
    choices = {"positions": positions, "padding": side, "scale": 3.0}
    texts, contexts = ["abcde", "fga"], ["gf", "bcdefga"]
    together, _ = out_of(texts, contexts, **choices)
    for b, text in enumerate(texts):
        own = slice(0, len(text)) if side == "right" else slice(5 - len(text), 5)
        assert (together[b, own] - out_of([text], [contexts[b]], **choices)[0][0]).abs().max() <= 1e-12
    packed, _ = out_of(["abhhcde"], ["hghbcdf"], documents="h", **choices)  # pieces of nothing are no documents
    for own, text, context in ((slice(0, 2), "ab", "g"), (slice(2, 5), "cde", "bcdf")):
        assert (packed[0, own] - out_of([text], [context], documents="h", **choices)[0][0]).abs().max() <= 1e-12


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", ["window", "sink, causal", "documents"])
def test_one_token_gets_its_own_value_whatever_the_variant(positions, mask):
    choices = ORDERED.get(mask, {"documents": "h"})
    config = Config(**SIZES | {"tokenizer": "char", "positions": positions} | choices).resolved()
    setup = make_setup(layer_request(encode(["a"], config), config))
    seen = observed(setup)
    assert (seen["pattern"] == 1.0).all()
    assert torch.equal(seen["z"][0, :, 0], seen["v"][0, :, 0].repeat_interleave(3, dim=0))


@pytest.mark.parametrize(("text", "context"), [("abc", "defghab"), ("abcdefg", "hab"), ("a", "bcd"), ("abc", "d")])
def test_fewer_and_more_queries_than_keys_agree_with_a_sum_over_the_keys(text, context):
    out, pattern = out_of([text], [context], positions="learned", out_proj=False)
    assert (out.shape, pattern.shape) == ((1, len(text), 18), (1, 6, len(text), len(context)))
    assert (pattern.sum(dim=-1) - 1).abs().max() <= 1e-14
    for i, letter in enumerate(text):
        alone = [out_of([letter], [context], positions="none", out_proj=False)[0][0, 0]]
        without = out_of([text], [context], positions="none", out_proj=False)[0][0, i]
        assert (alone[0] - without).abs().max() <= 1e-12  # no query knows of another


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", ["no mask", "sink", "prefix"])
def test_scores_a_thousand_times_larger_stay_exact(positions, mask):
    widths = "widths derived"
    case = Case(positions, mask, True, "left", "self", 2, widths, "plain scores")
    setup = setup_of(case, scale=1000.0)
    expected = expected_of(case, setup)
    assert np.abs(expected.layer.attention.scores[expected.allowed]).max() > 500
    require_agreement(observed(setup), expected, 1e-12 * 1000)  # the pattern errs as the scores do


def test_the_texts_of_the_grid_have_different_lengths_and_no_size_is_that_of_another():
    config = GRID[0].config()
    lengths = [len(s.tokens) for s in encode(TEXTS, config).sequences]
    assert lengths == [5, 3, 4]
    sizes = [len(TEXTS), N_HEADS, 2, Q_LEN, K_LEN, *WIDTHS["all widths different"].values()]
    assert len(set(sizes)) == len(sizes)
