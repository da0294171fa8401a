"""The study `heads` against loops over the definitions, against `run`, and on heads that were made to be of a kind."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.heads_made import (
    Texts,
    excess_at,
    largest_cells,
    means,
    require_means,
    row_numbers,
    sinks_of,
    uniform_of,
)
from support.variant_cases import CONTEXTS, N_HEADS, Q_LEN, TEXTS, Case, expected_of, grid

from mhacli.attention.tiled.scores import Scores
from mhacli.attention.tiled.softmax import AttentionResult, SoftmaxPattern
from mhacli.compute import heads as looks
from mhacli.compute import heads as study
from mhacli.compute.base.head_statistics import block_of
from mhacli.compute.base.setup import make_setup
from mhacli.compute.heads import head_groups, prepare_heads
from mhacli.compute.layer.run import RecordingOptions, inspect
from mhacli.errors import MhaError, UsageError
from mhacli.requests.layer import facts_of, layer_request
from mhacli.requests.memory import BASE_BYTES, predict_heads_memory
from mhacli.results.record import storage
from mhacli.results.record.head_statistics import (
    COLUMN_TOTALS,
    HEAD_OUTPUTS,
    MAP_TOTALS,
    PER_QUERY,
    ROW_SUMS,
    Averages,
    Corner,
    HeadsRequest,
    Kept,
    with_kind,
)
from mhacli.spec.conditions import parse_pattern
from mhacli.spec.config import Config
from mhacli.text.encode import encode

GRID = grid()
SELECTED = [
    Case("none", "no mask", False, "right", "self", 6, "widths derived", "plain scores"),
    Case("sinusoidal", "causal", False, "right", "self", 2, "widths derived", "plain scores"),
    Case("rope", "causal", False, "left", "self", 1, "no biases", "scale, softcap and bias"),
    Case("alibi", "window, causal", True, "left", "self", 2, "all widths different", "bias"),
    Case("learned", "no mask", False, "left", "cross", 2, "no output projection", "bias"),
    Case("none", "no mask", True, "right", "cross", 6, "odd d_head", "scale"),
    Case("sinusoidal", "sink", True, "right", "self", 6, "no biases", "softcap"),
    Case("rope-interleaved", "prefix, window and sink", False, "left", "self", 1, "widths derived", "plain scores"),
    *GRID[::54],
]
CONDITIONS = (
    "k == q - 1",
    "tok[k] == tok[q] and k != q",
    'tok[k] == "cat"',
    "q - k >= 2 or k == 0",
    "tok[k - 1] == tok[q]",
)


def looked(encoded, config, **wanted):
    run = prepare_heads(layer_request(encoded, config), HeadsRequest(**wanted))
    run.run()
    return run.record()


def encoded_of(case, config):
    return encode(TEXTS, config, context=CONTEXTS if case.kind == "cross" else ())


def condition_of(text, texts, vocabulary):
    """What each of `CONDITIONS` means, in columns."""
    cat = vocabulary.index("cat")

    def places(b, i, j):
        return i - texts.q_first[b], j - texts.k_first[b]

    def token(b, k):
        return texts.k_ids[b][k] if 0 <= k < len(texts.k_ids[b]) else None

    def holds(b, i, j):
        q, k = places(b, i, j)
        own = texts.q_ids[b][q]
        return {
            "k == q - 1": k == q - 1,
            "tok[k] == tok[q] and k != q": token(b, k) == own and k != q,
            'tok[k] == "cat"': token(b, k) == cat,
            "q - k >= 2 or k == 0": q - k >= 2 or k == 0,
            "tok[k - 1] == tok[q]": token(b, k - 1) == own,
        }[text]

    return holds


@pytest.mark.parametrize("case", SELECTED, ids=str)
def test_every_number_of_every_head_agrees_with_loops_over_the_definitions(case, biases, bias_file):
    config = case.config(bias_file)
    encoded = encoded_of(case, config)
    setup = make_setup(layer_request(encoded, config))
    bias = biases[case.kind].numpy() if setup.bias is not None else None
    expected = expected_of(case, setup, bias)
    pattern, allowed = expected.layer.attention.pattern, expected.allowed
    kept = Kept(queries=(0, 3, 1), top=3, corner=Corner(1, 3, 0, 4), z=True)
    record = looked(
        encoded, config, patterns=tuple(map(parse_pattern, CONDITIONS)), sink_tokens=2, sink_share=0.3, kept=kept
    )
    texts = Texts.of(record, sink_tokens=2)
    require_heads(record, pattern, allowed, texts)
    require_extremes(record, pattern, expected.layer.attention.scores, allowed, texts)
    require_arrays(record, pattern, allowed, texts)
    require_cells(record, pattern, allowed)
    assert np.abs(record.arrays["z"] - expected.layer.attention.z).max() <= 1e-12
    assert record.self_check.ok


def require_heads(record, pattern, allowed, texts, tolerance=1e-12):
    conditions = [condition_of(text, texts, record.vocabulary) for text in CONDITIONS]
    assert [head.head for head in record.heads] == list(range(N_HEADS))
    for h, head in enumerate(record.heads):
        shares, cells = pattern[:, h], allowed[:, h]
        excess = excess_at(shares, cells)
        if head.entropy is not None:
            most = max(excess.values(), default=0.0)
            assert excess.get(head.offset, 0.0) >= most - (1e-12 if head.offset is not None else 2e-6)
        require_means(head, means(shares, cells, texts, head.offset, conditions), tolerance)
        require_means(head.uniform, means(uniform_of(cells), cells, texts, head.offset, conditions), tolerance)
        assert head.uniform.offset == head.offset
        assert with_kind(replace(head, kind="mixed", certainty=None)) == head


def require_extremes(record, pattern, scores, allowed, texts):
    for h, head in enumerate(record.heads):
        seen = np.where(allowed[:, h], scores[:, h], -np.inf)
        b, i, j = head.max_score_at
        i, j = i + texts.q_first[b], j + texts.k_first[b]
        assert head.max_score == pytest.approx(seen.max(), abs=1e-12)
        assert seen[b, i, j] == pytest.approx(seen.max(), abs=1e-12)
        strong = [(s.share, s.sequence, s.key + texts.k_first[s.sequence]) for s in head.sinks]
        wanted = sinks_of(pattern[:, h], allowed[:, h], 0.3)
        assert [place[1:] for place in strong] == [place[1:3] for place in wanted]
        assert np.allclose([share for share, *_ in strong], [share for share, *_ in wanted], rtol=0, atol=1e-12)
        uniform = uniform_of(allowed[:, h])
        for sink, (_, b, j) in zip(head.sinks, strong, strict=True):
            assert sink.uniform == pytest.approx(uniform[b, :, j].sum() / uniform[b].sum(), abs=1e-12)
        cells = largest_cells(pattern[:, h], allowed[:, h])
        assert len(cells) == len(head.largest)
        for cell, (lift, *_) in zip(head.largest, cells, strict=True):
            b, i, j = cell.sequence, cell.query + texts.q_first[cell.sequence], cell.key + texts.k_first[cell.sequence]
            n_keys = allowed[b, h, i].sum()
            assert cell.lift == pytest.approx(lift, abs=1e-11)
            assert cell.share == pytest.approx(pattern[b, h, i, j], abs=1e-12)
            assert cell.lift == pytest.approx(pattern[b, h, i, j] * n_keys, abs=1e-11)


def require_arrays(record, pattern, allowed, texts):
    arrays, batch = record.arrays, len(record.sequences)
    rows = row_numbers(pattern, allowed, texts)
    has_keys = allowed.any(axis=-1)
    for name in ("entropy", "participation", "distance", "sink"):
        assert np.array_equal(np.isnan(arrays[name]), ~has_keys), name
        assert np.nanmax(np.abs(arrays[name] - rows[name])) <= 1e-11, name
    assert np.array_equal(np.broadcast_to(arrays["visible"], has_keys.shape), rows["visible"])
    assert np.abs(arrays["received"] - pattern.sum(axis=2)).max() <= 1e-12
    assert arrays["map"].shape == pattern.shape  # such short texts have a cell for each token
    assert np.abs(arrays["map"] - pattern).max() <= 1e-12
    sums = arrays["map"].sum(axis=-1)
    assert np.abs(sums - has_keys).max() <= 1e-12
    steps = record.survey.steps
    assert steps == (0, 1, 2, 4) if pattern.shape[3] == Q_LEN else (0, 1, 2, 4, 8)
    uniform = uniform_of(allowed)
    for shares, kind in ((pattern, ""), (uniform, "uniform_")):
        profile = np.broadcast_to(arrays[f"{kind}profile"], (batch, N_HEADS, len(steps)))
        assert np.abs(profile - profile_by_hand(shares, steps)).max() <= 1e-12
        sums = profile.sum(axis=-1)
        assert np.abs(sums[has_keys.any(axis=-1)] - 1).max() <= 1e-12
    assert np.abs(arrays["uniform_map"] - uniform).max() <= 1e-12
    assert np.abs(arrays["uniform_received"] - uniform.sum(axis=2)).max() <= 1e-12


def profile_by_hand(pattern, steps):
    n_queries, n_keys = pattern.shape[2:]
    distance = np.abs(np.arange(n_queries)[:, None] - np.arange(n_keys))
    total = np.maximum(pattern.sum(axis=(2, 3)), 1e-300)
    bins = [(distance <= step) & (distance > before) for before, step in pairwise((-1, *steps))]
    return np.stack([(pattern * cells).sum(axis=(2, 3)) / total for cells in bins], axis=-1)


def require_cells(record, pattern, allowed):
    corner = record.arrays["corner"]
    part, cells = pattern[:, :, 1:4, 0:4], allowed[:, :, 1:4, 0:4]
    assert np.array_equal(np.isnan(corner), ~cells)
    assert np.abs(corner[cells] - part[cells]).max(initial=0) <= 1e-12
    for number, query in enumerate((0, 3, 1)):
        for b, h in np.ndindex(pattern.shape[:2]):
            row = pattern[b, h, query]
            shares, keys = (record.arrays[name][b, h, number] for name in ("top_shares", "top_keys"))
            assert np.abs(shares - -np.sort(-row)[:3]).max() <= 1e-12
            assert np.array_equal(keys >= 0, shares > 0)
            named = keys[keys >= 0]  # of equal shares either may be named, but none twice
            assert len(set(named.tolist())) == len(named)
            assert np.abs(row[named] - shares[: len(named)]).max(initial=0) <= 1e-12


@pytest.mark.parametrize("case", [SELECTED[0], SELECTED[4], *GRID[5::65]], ids=str)
def test_run_and_heads_say_the_same_of_every_head(case, bias_file):
    config = case.config(bias_file)
    encoded = encoded_of(case, config)
    require_same(
        looked(encoded, config).heads, inspect(encoded, config, options=RecordingOptions(repeat=1)).heads, 1e-11
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_run_and_heads_say_the_same_in_narrower_numbers(dtype):
    case = Case("rope", "causal", False, "left", "self", 2, "widths derived", "plain scores")
    config = case.config(dtype=dtype)
    encoded = encoded_of(case, config)
    tolerance = {"float32": 1e-5}.get(dtype, 0.05)
    require_same(
        looked(encoded, config).heads, inspect(encoded, config, options=RecordingOptions(repeat=1)).heads, tolerance
    )


NAMING = ("sink", "previous", "diagonal", "induction", "duplicate", "at_offset", "near")


def require_same(found, expected, tolerance):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.layer, one.head) == (other.layer, other.head)
        require_same_means(one, other, tolerance)
        require_same_means(one.uniform, other.uniform, tolerance)
        assert is_near(one.max_score, other.max_score, tolerance)
        if tolerance > 1e-6:  # what is nearly equal may change places
            continue
        if all((getattr(one.uniform, name) or 0) < 1 - 1e-9 for name in NAMING):
            assert one.kind == other.kind
            assert is_near(one.certainty, other.certainty, 100 * tolerance)
        assert [(s.sequence, s.key) for s in one.sinks] == [(s.sequence, s.key) for s in other.sinks]
        for sink, wanted in zip(one.sinks, other.sinks, strict=True):
            assert is_near(sink.share, wanted.share, tolerance)
            assert is_near(sink.uniform, wanted.uniform, tolerance)
        for cell, wanted in zip(one.largest, other.largest, strict=True):
            assert is_near(cell.lift, wanted.lift, 10 * tolerance)


def require_same_means(one, other, tolerance):
    for field in fields(Averages):
        pair = getattr(one, field.name), getattr(other, field.name)
        if field.name.startswith("window"):
            assert pair[0] == pair[1] or tolerance > 1e-6, field.name
        elif field.name == "patterns":
            assert pair[0] == pair[1]
        elif field.name not in ("offset", "at_offset"):
            assert is_near(*pair, tolerance), (field.name, pair)
    if one.offset == other.offset:
        assert is_near(one.at_offset, other.at_offset, tolerance)


def is_near(one, other, tolerance):
    if one is None or other is None:
        return one is other
    return abs(one - other) <= tolerance * max(1.0, abs(other))


# -------------------------------------------------------------------------------------------------------- long texts

WORDS = [f"w{(i * i) % 53}" for i in range(1100)]


def long_config(**choices):
    return Config(
        **{"d_model": 8, "n_heads": 2, "n_kv_heads": 1, "device": "cpu", "init": "uniform", **choices}
    ).resolved()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "choices",
    [
        {"causal": True, "dtype": "float64"},
        {"positions": "alibi", "window": (300, 20), "softcap": 3.0},
        {"positions": "rope", "padding": "left", "causal": True},
        {"documents": "|", "n_kv_heads": 2},
    ],
    ids=["causal", "alibi window softcap", "rope left padding", "documents"],
)
def test_a_text_of_many_tiles_agrees_with_its_pattern(choices):
    config = long_config(**choices)
    texts = [" ".join(WORDS), " ".join([*WORDS[:400], "|", *WORDS[100:401]])]
    encoded = encode(texts, config)
    queries = (0, 511, 512, 1099)  # at the edges of tiles
    record = looked(encoded, config, kept=Kept(queries=queries, top=5, corner=Corner(500, 30, 240, 40)))
    whole = inspect(encoded, config, options=RecordingOptions(repeat=1, keep=("pattern", "scores")))
    tolerance = 1e-11 if config.dtype == "float64" else 2e-5
    require_same(record.heads, whole.heads, tolerance)
    pattern = whole.arrays["pattern"].astype(np.float64)
    allowed = np.broadcast_to(whole.arrays["allowed"], pattern.shape)
    block = record.survey.block
    assert block == 8
    assert np.abs(record.arrays["received"] - pattern.sum(axis=2)).max() <= 100 * tolerance
    assert np.abs(record.arrays["map"] - map_by_hand(pattern, allowed.any(axis=-1), block)).max() <= 10 * tolerance
    assert np.abs(record.arrays["profile"] - profile_by_hand(pattern, record.survey.steps)).max() <= 10 * tolerance
    corner, cells = record.arrays["corner"], allowed[:, :, 500:530, 240:280]
    assert np.array_equal(np.isnan(corner), ~cells)
    assert np.abs(corner[cells] - pattern[:, :, 500:530, 240:280][cells]).max(initial=0) <= tolerance
    strongest = -np.sort(-pattern[:, :, queries], axis=-1)[..., :5]
    assert np.abs(record.arrays["top_shares"] - strongest).max() <= tolerance
    named = np.take_along_axis(pattern[:, :, queries], np.maximum(record.arrays["top_keys"], 0), axis=-1)
    named = np.where(record.arrays["top_keys"] >= 0, named, 0)
    assert np.abs(named - strongest).max() <= tolerance
    scores = np.where(allowed, whole.arrays["scores"], -np.inf).max(axis=-1)
    seen = allowed.any(axis=-1)
    assert np.abs(record.arrays["max_score"][seen] - scores[seen]).max() <= 10 * tolerance
    assert record.self_check.ok


def map_by_hand(pattern, seen, block):
    batch, n_heads, n_queries, n_keys = pattern.shape
    blocks = [range(start, min(start + block, n_queries)) for start in range(0, n_queries, block)]
    columns = [slice(start, start + block) for start in range(0, n_keys, block)]
    found = np.zeros((batch, n_heads, len(blocks), len(columns)))
    for top, rows in enumerate(blocks):
        n_seen = np.maximum(seen[:, :, rows.start : rows.stop].sum(axis=-1), 1)
        for left, keys in enumerate(columns):
            found[:, :, top, left] = pattern[:, :, rows.start : rows.stop, keys].sum(axis=(2, 3)) / n_seen
    return found


@pytest.mark.parametrize(
    ("longest", "block"), [(1, 1), (192, 1), (193, 2), (384, 2), (385, 4), (768, 4), (769, 8), (32768, 256)]
)
def test_a_map_has_at_most_192_cells_along_its_longer_side(longest, block):
    assert block_of(longest) == block


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("n_tokens", [3, 5])
def test_a_text_that_is_shorter_than_the_neighbourhood_has_no_local_head(n_tokens, dtype):
    # all of it is near, under uniform attention too: nothing can exceed that
    for seed in range(5):
        words = " ".join(f"w{i}" for i in range(n_tokens))
        for head in looked(*small(words, causal=True, seed=seed, dtype=dtype, positions="none")).heads:
            assert head.kind != "local"
            assert -1e-6 <= head.certainty <= 1 + 1e-6


def test_the_kernel_is_named():
    assert looked(*small(causal=True)).survey.kernel == "tiles"
    assert looked(*small()).survey.kernel == "tiles"
    assert looked(*small("a b c", "d", causal=True)).survey.kernel == "tiles"
    assert looked(*small(softcap=2.0)).survey.kernel == "tiles"


def test_a_single_token_has_no_choice():
    record = looked(*small("alone"))
    for head in record.heads:
        assert head.entropy == pytest.approx(0.0, abs=1e-12)  # of a share of 1, but for rounding
        assert head.effective_keys == pytest.approx(1.0, abs=1e-12)
        assert (head.entropy_share, head.distance) == (None, 0.0)
        assert (head.sink, head.diagonal, head.previous, head.duplicate, head.induction) == (1.0, 1.0, 0.0, 0.0, 0.0)
        assert (head.window_50, head.window_90, head.window_99, head.largest) == (0, 0, 0, ())
        assert head.max_score_at == (0, 0, 0)
    assert record.survey.steps == (0,)
    assert record.arrays["profile"].tolist() == [[[1.0]] * 4]


def test_one_query_over_a_longer_context():
    config = long_config(dtype="float64").resolved()
    encoded = encode(["cat"], config, context=["the cat sat on the cat mat"])
    record = looked(encoded, config)
    whole = inspect(encoded, config, options=RecordingOptions(repeat=1))
    require_same(record.heads, whole.heads, 1e-12)
    pattern = whole.arrays["pattern"]
    for h, head in enumerate(record.heads):
        assert head.previous == 0.0
        assert head.offset != 0
        assert head.duplicate == pytest.approx(pattern[0, h, 0, [1, 5]].sum(), abs=1e-12)
        assert head.induction == pytest.approx(pattern[0, h, 0, [2, 6]].sum(), abs=1e-12)


def small(*texts, **choices):
    config = Config(**{"device": "cpu", "dtype": "float64", "init": "uniform", **choices}).resolved()
    return encode(texts or ["the cat sat on the mat and the dog sat"], config), config


# ------------------------------------------------------------------------------------------------------ crafted heads

T = 96
CRAFTED_KINDS = (
    "previous-token", "sink", "diagonal", "induction", "duplicate-token", "positional", "local", "uniform", "mixed",
)  # fmt: skip
LOUD = 60.0


def crafted_words():
    """A text in which every word comes three times, far from itself and in another order of neighbours."""
    return [f"w{i % 32}" for i in range(T)]


def crafted_bias(causal):
    ids = np.array([i % 32 for i in range(T)])
    i, j = np.indices((T, T))
    past = j <= i if causal else np.ones((T, T), bool)
    before = np.roll(ids, 1)
    marks = {
        "previous-token": j == np.maximum(i - 1, 0),
        "sink": j == 0,
        "diagonal": j == i,
        "induction": (before[j] == ids[i]) & (j > 0) & (j - 1 != i) & past,
        "duplicate-token": (ids[j] == ids[i]) & (i != j) & past,
        "positional": j == np.maximum(i - 5, 0),
        "local": (np.abs(i - j) <= 8) & past,
        "uniform": np.zeros((T, T), bool),
        "mixed": (i * 7 + j * 13) % 5 == 0,
    }
    return torch.tensor(np.stack([LOUD * marks[kind] for kind in CRAFTED_KINDS]), dtype=torch.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_head_that_was_made_to_be_of_a_kind_is_told_to_be_of_it(causal, dtype, tmp_path):
    save_file({"bias": crafted_bias(causal)}, tmp_path / "bias.st")
    config = Config(
        n_heads=9, d_model=9, scale=1e-9, causal=causal, score_bias=str(tmp_path / "bias.st"), device="cpu", dtype=dtype
    ).resolved()
    encoded = encode([" ".join(crafted_words())], config)
    heads = looked(encoded, config).heads
    assert dict(zip(CRAFTED_KINDS, (head.kind for head in heads), strict=True)) == {
        kind: kind for kind in CRAFTED_KINDS
    }
    by_kind = dict(zip(CRAFTED_KINDS, heads, strict=True))
    assert by_kind["previous-token"].previous == pytest.approx((T - 1) / T, abs=1e-6)
    assert by_kind["sink"].sink == pytest.approx(1, abs=1e-6)
    assert [(s.sequence, s.key) for s in by_kind["sink"].sinks] == [(0, 0)]
    assert by_kind["diagonal"].diagonal == pytest.approx(1, abs=1e-6)
    assert by_kind["diagonal"].entropy == pytest.approx(0, abs=1e-6)
    assert by_kind["positional"].offset == -5
    assert by_kind["positional"].at_offset == pytest.approx((T - 5) / T, abs=1e-6)
    assert by_kind["uniform"].certainty == pytest.approx(1, abs=1e-6)
    assert by_kind["local"].near == pytest.approx(1, abs=1e-5)
    if not causal:  # else the first queries have no such key, and look everywhere
        assert by_kind["duplicate-token"].duplicate == pytest.approx(1, abs=1e-6)
    assert is_near(by_kind["uniform"].entropy, by_kind["uniform"].uniform.entropy, 1e-6)


def test_heads_of_alibi_with_steep_slopes_are_local_and_those_with_gentle_ones_uniform():
    encoded, config = small(
        " ".join(crafted_words()), positions="alibi", n_heads=16, d_model=16, scale=1e-9, causal=True
    )
    kinds = [head.kind for head in looked(encoded, config).heads]
    assert set(kinds[:4]) <= {"local", "diagonal"}
    assert set(kinds[-4:]) == {"uniform"}


# --------------------------------------------------------------------------------------------- some heads, and in turns


VARIED = {
    "plain": {"causal": True},
    "grouped": {"causal": True, "n_heads": 8, "n_kv_heads": 2},
    "alibi": {"positions": "alibi", "n_heads": 8, "n_kv_heads": 4},
}


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("cells", [1, 300])
def test_heads_looked_at_in_turns_have_the_numbers_that_they_have_together(name, cells, monkeypatch):
    encoded, config = small(**VARIED[name])
    together = looked(encoded, config)
    monkeypatch.setattr(study, "_CELLS_AT_ONCE", cells)
    apart = looked(encoded, config)
    require_same(apart.heads, together.heads, 1e-12)
    require_same_arrays(apart.arrays, together.arrays)


def require_same_arrays(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert np.allclose(found[name], array, rtol=0, atol=1e-11, equal_nan=True), name


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("heads", [(3,), (1, 2), (0, 3)])
def test_some_heads_have_the_numbers_that_they_have_among_all(name, heads):
    encoded, config = small(**VARIED[name])
    kept = Kept((1, 3), 2, Corner(2, 3, 0, 5), True)
    some, every = looked(encoded, config, heads=heads, kept=kept), looked(encoded, config, kept=kept)
    assert [head.head for head in some.heads] == list(heads)
    require_same(some.heads, [every.heads[head] for head in heads], 1e-12)
    of_all = ("visible", "uniform_map", "uniform_received", "uniform_profile")
    require_same_arrays(
        some.arrays, {n: a if n in of_all else a[:, list(heads)] for n, a in every.arrays.items()}
    )  # fmt: skip
    assert some.survey.full_bytes * config.n_heads == every.survey.full_bytes * len(heads)


@pytest.mark.parametrize("heads", [None, (1,), (4,), (1, 4)])
def test_heads_with_masks_of_their_own_keep_them_when_only_some_are_looked_at(heads, bias_file, tmp_path):
    case = Case("none", "no mask", False, "right", "self", 6, "widths derived", "bias")
    config = case.config(bias_file)
    encoded = encoded_of(case, config)
    record, every = looked(encoded, config, heads=heads), looked(encoded, config)
    own = list(heads or range(N_HEADS))
    require_same(record.heads, [every.heads[head] for head in own], 1e-12)
    for name in ("visible", "uniform_map", "uniform_received", "uniform_profile"):
        assert np.array_equal(record.arrays[name], every.arrays[name][:, own]), name
    record.save(str(tmp_path / "r"))
    assert storage.load(str(tmp_path / "r")).arrays.keys() == record.arrays.keys()


@pytest.mark.parametrize(
    ("heads", "group", "most", "groups"),
    [
        ((0, 1, 2, 3), 1, 9, [(0, 1, 2, 3)]),
        ((0, 1, 2, 3), 1, 3, [(0, 1, 2), (3,)]),
        ((0, 1, 2, 3), 1, 0, [(0,), (1,), (2,), (3,)]),
        ((3, 0, 1, 1), 1, 9, [(0, 1), (3,)]),
        ((0, 1, 2, 3, 4, 5), 3, 9, [(0, 1, 2), (3, 4, 5)]),
        ((0, 1, 2, 3, 4, 5), 3, 2, [(0, 1), (2,), (3, 4), (5,)]),
        ((1, 2, 3), 2, 9, [(1,), (2, 3)]),
        ((5,), 2, 1, [(5,)]),
        ((), 2, 1, []),
    ],
)
def test_by_hand_the_groups_of_heads_that_share_a_pass(heads, group, most, groups):
    assert [tuple(found) for found in head_groups(heads, group, most=most)] == groups


def test_progress_rises_from_nothing_to_all(monkeypatch):
    monkeypatch.setattr(study, "_CELLS_AT_ONCE", 1)
    encoded, config = small(causal=True)
    run, told = prepare_heads(layer_request(encoded, config), HeadsRequest(heads=(0, 2))), []
    run.run(lambda share, doing: told.append((share, doing)))
    shares = [share for share, _ in told]
    assert shares == sorted(shares)
    assert shares == [0, 0.5, 1]
    assert [doing for _, doing in told] == ["uniform attention", *["2 heads"] * 2]
    assert run.n_finished == 2


def test_what_is_finished_when_it_is_interrupted_is_told_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "_CELLS_AT_ONCE", 1)
    encoded, config = small(causal=True)
    run = prepare_heads(layer_request(encoded, config), HeadsRequest(kept=Kept((1,), 2, Corner(0, 2, 0, 2))))

    def report_progress(share, doing):
        if share > 0.55:  # the first two of four heads are finished
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(report_progress)
    record, every = run.record(), looked(encoded, config, kept=Kept((1,), 2, Corner(0, 2, 0, 2)))
    assert run.n_finished == 2
    assert [head.head for head in record.heads] == [0, 1]
    require_same(record.heads, every.heads[:2], 1e-12)
    assert record.arrays["map"].shape[1] == 2
    record.save(str(tmp_path / "r"))
    assert storage.load(str(tmp_path / "r")).heads == record.heads


def test_heads_that_are_finished_while_the_record_is_made_are_in_it_whole_or_not_at_all(monkeypatch):
    """After Ctrl-C the worker goes on for a moment beside the main thread, which tells what is finished."""
    monkeypatch.setattr(study, "_CELLS_AT_ONCE", 1)
    encoded, config = small(causal=True)
    run = prepare_heads(layer_request(encoded, config), HeadsRequest())
    run.run()
    last, steps = run.results.pop(), study.profile_steps

    def finished_meanwhile(setup):
        if len(run.results) == 3:
            run.results.append(last)
        return steps(setup)

    monkeypatch.setattr(study, "profile_steps", finished_meanwhile)
    record = run.record()
    assert record.arrays["map"].shape[1] == len(record.heads)


def test_a_prediction_is_about_the_whole_run():
    encoded, config = small(causal=True)
    run = prepare_heads(layer_request(encoded, config), HeadsRequest(heads=(0, 1)))
    prediction = run.predict()
    assert prediction.seconds > 0
    assert prediction.full_bytes == 2 * 10 * 10 * 8
    assert prediction.peak_bytes == run.peak_bytes == predict_heads_memory(facts_of(encoded, config), run.wanted)


def test_by_hand_the_seconds_that_a_run_is_predicted_to_take(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(study, "perf_counter", lambda: 0.5 * next(clock))
    monkeypatch.setattr(study, "_SAMPLE_LEN", 5)
    encoded, config = small(causal=True)
    run = prepare_heads(layer_request(encoded, config), HeadsRequest(heads=(0, 1)))
    # half a second for 5 × 5 cells of two heads; 10 × 10 of these two and of uniform attention
    assert run.predict().seconds == pytest.approx(0.5 * 3 * 100 / 50)


# ------------------------------------------------------------------------------------------------------------- checks


def test_the_checks_hold_and_are_told_with_their_numbers():
    survey = looked(*small(causal=True)).survey
    assert [check.name for check in survey.checks] == [ROW_SUMS, COLUMN_TOTALS, MAP_TOTALS, HEAD_OUTPUTS]
    for check in survey.checks:
        assert check.ok
        assert 0 <= check.error <= check.tolerance <= 1e-9


def of_lse(attention, change):
    return replace(attention, pattern=replace(attention.pattern, lse=change(attention.pattern.lse)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: of_lse(a, lambda lse: lse * 1.4427),
        lambda a: of_lse(a, lambda lse: lse.flip(1)),
        lambda a: replace(a, z=a.z.flip(1)),
        lambda a: replace(a, z=a.z + 1e-8),
        lambda a: replace(a, z=a.z.index_fill(1, torch.tensor([0]), 9.0)),
        lambda a: replace(a, z=a.z.index_fill(2, torch.tensor([9]), 9.0)),
        lambda a: replace(a, z=a.z * torch.nan),
    ],
    ids=[
        "base of the logarithm",
        "log-sum-exp of another head",
        "z of another head",
        "z a little off",
        "z of the first head",
        "z of the last query",
        "z not finite",
    ],
)
def test_a_check_notices_z_that_is_not_of_the_weights(spoil, monkeypatch):
    finished = AttentionResult.finished
    monkeypatch.setattr(AttentionResult, "finished", lambda attention: spoil(finished(attention)))
    record = looked(*small(causal=True))
    assert {index for index, check in enumerate(record.survey.checks) if not check.ok} == {3}
    assert not record.self_check.ok


@pytest.mark.parametrize(
    ("spoil", "failing"),
    [
        (lambda tile: tile.weights.mul_(1 + 1e-8), {0, 1, 2, 3}),
        (lambda tile: tile.weights.copy_(tile.weights.roll(1, dims=1)), {3}),
        (lambda tile: tile.weights[-1].zero_(), {3}),
    ],
    ids=["too large", "of the key before", "none for the last query"],
)
def test_the_checks_notice_weights_that_are_wrong(spoil, failing, monkeypatch):
    add_values = SoftmaxPattern._add_values

    def wrong(pattern, tile, rows):
        spoil(tile)
        add_values(pattern, tile, rows)

    monkeypatch.setattr(SoftmaxPattern, "_add_values", wrong)
    record = looked(*small(causal=True))
    assert {index for index, check in enumerate(record.survey.checks) if not check.ok} == failing
    assert not record.self_check.ok


def test_z_of_tiles_is_compared_with_the_definition_too(monkeypatch):
    log2_into = Scores.log2_into

    def wrong(scores, out, batch_head, rectangle, lse=None):
        log2_into(replace(scores, scale=scores.scale * (1 + 1e-6)), out, batch_head, rectangle, lse)

    monkeypatch.setattr(Scores, "log2_into", wrong)  # of all tiles, whoever asks for them
    record = looked(*small(causal=True))
    assert {index for index, check in enumerate(record.survey.checks) if not check.ok} == {3}


@pytest.mark.parametrize(("name", "failing"), [("mass", {0}), ("received", {1}), ("map", {2})])
def test_the_checks_notice_sums_that_do_not_add_up(name, failing, monkeypatch):
    summarise = looks.summarise_by

    def wrong(*given, **chosen):
        found = summarise(*given, **chosen)
        return replace(found, **{name: getattr(found, name) * (1 + 1e-8)})

    monkeypatch.setattr(looks, "summarise_by", wrong)
    record = looked(*small(causal=True))
    assert {index for index, check in enumerate(record.survey.checks) if not check.ok} == failing
    assert not record.self_check.ok


def test_the_worst_of_all_heads_is_what_a_check_tells(monkeypatch):
    monkeypatch.setattr(study, "_CELLS_AT_ONCE", 1)
    finished, seen = AttentionResult.finished, []

    def wrong_once(attention):
        seen.append(1)
        found = finished(attention)
        return replace(found, z=found.z + 0.5) if len(seen) == 2 else found

    monkeypatch.setattr(AttentionResult, "finished", wrong_once)
    record = looked(*small(causal=True))
    assert record.survey.checks[-1].error == pytest.approx(0.5, abs=1e-9)
    assert (record.self_check.ok, record.self_check.max_abs_error) == (False, record.survey.checks[-1].error)


# ----------------------------------------------------------------------------------------------------------- the edges


def test_training_is_refused():
    encoded, config = small(dropout=0.5, train=True)
    with pytest.raises(UsageError) as caught:
        prepare_heads(layer_request(encoded, config), HeadsRequest())
    assert (
        caught.value.message
        == "--train does not work with mha heads, which never builds the patterns that dropout acts on"
    )
    assert caught.value.hint == "leave out --train"


def test_a_run_in_which_nothing_is_allowed_says_nothing_of_its_heads(tmp_path):
    save_file({"bias": torch.full((10, 10), -torch.inf)}, tmp_path / "b.st")
    encoded, config = small(score_bias=str(tmp_path / "b.st"))
    run = prepare_heads(layer_request(encoded, config), HeadsRequest())
    run.predict()
    run.run()
    for head in run.record().heads:
        assert (head.entropy, head.sink, head.max_score, head.max_score_at) == (None, None, None, None)
        assert (head.sinks, head.largest, head.window_50) == ((), (), None)
    assert [head.entropy for head in inspect(encoded, config, options=RecordingOptions(repeat=1)).heads] == [None] * 4


def test_a_head_that_sees_nothing_among_heads_that_do_has_no_numbers(tmp_path):
    bias = torch.zeros(4, 10, 10)
    bias[2] = -torch.inf
    save_file({"b": bias}, tmp_path / "b.st")
    encoded, config = small(score_bias=str(tmp_path / "b.st"))
    record = looked(encoded, config, patterns=(parse_pattern("k == q"),))
    assert [head.entropy is None for head in record.heads] == [False, False, True, False]
    blind = record.heads[2]
    for of in (blind, blind.uniform):
        for field in fields(Averages):
            assert getattr(of, field.name) == ((None,) if field.name == "patterns" else None) or field.name == "offset"
    assert (blind.max_score, blind.max_score_at, blind.sinks, blind.largest) == (None, None, (), ())
    assert record.self_check.ok
    whole = inspect(encoded, config, options=RecordingOptions(repeat=1)).heads
    assert (whole[2].entropy, whole[2].window_90, whole[2].max_score) == (None, None, None)


def test_a_first_part_without_a_visible_cell_can_be_predicted(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "_SAMPLE_LEN", 3)
    bias = torch.zeros(10, 10)
    bias[:3] = -torch.inf
    save_file({"bias": bias}, tmp_path / "b.st")
    encoded, config = small(score_bias=str(tmp_path / "b.st"))
    assert prepare_heads(layer_request(encoded, config), HeadsRequest()).predict().seconds > 0


def test_random_rows_are_looked_at_like_tokens():
    config = Config(random=(3, 7), positions="none", device="cpu", dtype="float64").resolved()
    encoded = encode([], config)
    require_same(
        looked(encoded, config).heads, inspect(encoded, config, options=RecordingOptions(repeat=1)).heads, 1e-12
    )


def test_numbers_that_are_not_finite_are_refused_unless_allowed(monkeypatch):
    encoded, config = small()
    original = study.make_setup

    def broken(*given, **named):
        setup = original(*given, **named)
        with torch.no_grad():
            setup.layer.attention.q_proj.weight[3] = torch.nan
        return setup

    monkeypatch.setattr(study, "make_setup", broken)
    with pytest.raises(MhaError) as caught:
        prepare_heads(layer_request(encoded, config), HeadsRequest())
    assert caught.value.message == "queries, keys and values have 10 NaN or Inf in float64"
    assert (
        caught.value.hint
        == "--dtype bfloat16 and --dtype float32 have a wider range; --allow-nonfinite continues anyway"
    )
    assert caught.value.code == "not-finite"
    heads = looked(encoded, config, allow_nonfinite=True).heads
    assert [head.entropy is None for head in heads] == [True, False, False, False]


def test_the_largest_score_of_a_head_stands_where_it_is_and_a_tie_anywhere(tmp_path):
    bias = torch.zeros(4, 10, 10)
    bias[0, 7, 2], bias[1, 0, 9], bias[2, 9, 9] = 5.0, 3.0, 1.0
    save_file({"bias": bias}, tmp_path / "b.st")
    encoded, config = small(score_bias=str(tmp_path / "b.st"), scale=1e-12)
    found = [(head.max_score, head.max_score_at) for head in looked(encoded, config).heads]
    assert [place for _, place in found[:3]] == [(0, 7, 2), (0, 0, 9), (0, 9, 9)]
    assert [score for score, _ in found] == pytest.approx([5, 3, 1, 0], abs=1e-9)


N_SUNK = 40


def sunk_bias(seed):
    """Scores of heads whose keys get much: the first from all queries, key 5 from a part of them, the last ones, and noise."""
    bias = np.random.default_rng(seed).normal(size=(6, N_SUNK, N_SUNK))
    bias[0, :, 0] += 6
    bias[1, : 2 * N_SUNK // 5, 5] += 9
    bias[2, N_SUNK // 5 :, 5] += 9
    bias[3, :, -3:] += 9
    bias[4, :, (0, 7, 20)] += 5
    return bias


@pytest.mark.parametrize("choices", [{}, {"causal": True}, {"window": (9, 4)}, {"causal": True, "padding": "left"}])
@pytest.mark.parametrize("least", [0.1, 0.3])
def test_sinks_are_keys_that_get_several_times_their_uniform_share_from_most_queries(choices, least, tmp_path):
    words = [f"w{i}" for i in range(N_SUNK)]
    save_file({"bias": torch.tensor(sunk_bias(3))}, tmp_path / "bias.st")
    config = Config(
        n_heads=6,
        d_model=12,
        scale=1e-12,
        score_bias=str(tmp_path / "bias.st"),
        device="cpu",
        dtype="float64",
        **choices,
    ).resolved()
    encoded = encode([" ".join(words), " ".join(words[:25])], config)
    setup = make_setup(layer_request(encoded, config))
    allowed = np.broadcast_to(setup.visible().numpy(), (2, 6, N_SUNK, N_SUNK))
    scores = np.where(allowed, sunk_bias(3), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, where=allowed, initial=-99))
    pattern = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    first = [N_SUNK - 25 if b and choices.get("padding") == "left" else 0 for b in range(2)]
    n_found = 0
    for head in looked(encoded, config, sink_share=least).heads:
        wanted = sinks_of(pattern[:, head.head], allowed[:, head.head], least)
        found = [(s.sequence, s.key + first[s.sequence], s.n_queries) for s in head.sinks]
        assert found == [(b, j, n) for _, b, j, _, n in wanted]
        assert [s.share for s in head.sinks] == pytest.approx([share for share, *_ in wanted], abs=1e-6)
        assert [s.often for s in head.sinks] == pytest.approx([often for *_, often, _ in wanted], abs=1e-12)
        n_found += len(found)
    assert n_found >= 2


def test_queries_without_a_choice_do_not_keep_cells_of_others_from_standing_out():
    encoded, config = small("a | b | c | d | e | f | g h i", documents="|", scale=1e-12)
    for head in looked(encoded, config).heads:
        assert len(head.largest) == 5
        assert [cell.lift for cell in head.largest] == pytest.approx([1] * 5)
        assert all(cell.query >= 6 and cell.key >= 6 for cell in head.largest)


@pytest.mark.parametrize("name", PER_QUERY)
def test_what_is_kept_by_query_has_nan_for_padding_alone(name):
    encoded, config = small("the cat sat on", "a cat", padding="left")
    array = looked(encoded, config).arrays[name]
    assert np.isnan(array[1, :, :2]).all()
    assert np.isfinite(array[1, :, 2:]).all()
    assert np.isfinite(array[0]).all()


# ------------------------------------------------------------------------------------------------------------- memory

MIB = 1 << 20


def facts_for(n_tokens, **choices):
    config = Config(**{"n_heads": 8, "d_model": 64, "causal": True, "device": "cpu", **choices}).resolved()
    facts = facts_of(encode(["a b c"], config), config)
    return replace(facts, q_len=n_tokens, k_len=n_tokens)


@pytest.mark.parametrize("choices", [{}, {"positions": "rope"}, {"dtype": "bfloat16", "n_kv_heads": 2}])
def test_the_predicted_memory_grows_with_the_length_and_not_with_its_square(choices):
    sizes = [
        predict_heads_memory(facts_for(n, **choices), HeadsRequest(), 1 << 50)
        for n in (8_000, 32_000, 128_000, 512_000)
    ]
    for one, four in pairwise(sizes):
        assert one < four < 4.5 * one
    assert (sizes[-1] - BASE_BYTES) / (sizes[-2] - BASE_BYTES) == pytest.approx(4, rel=0.2)  # it does grow


def test_fewer_heads_take_less_memory():
    assert predict_heads_memory(facts_for(64_000), HeadsRequest(heads=(0,)), 1 << 50) < predict_heads_memory(
        facts_for(64_000), HeadsRequest(), 1 << 50
    )


@pytest.mark.parametrize("choices", [{}, {"positions": "rope", "dtype": "float64"}, {"n_kv_heads": 1}])
def test_what_does_not_fit_is_refused_with_the_longest_text_that_does(choices):
    facts, have = facts_for(2_000_000, **choices), 1000 * MIB
    with pytest.raises(MhaError) as caught:
        predict_heads_memory(facts, HeadsRequest(), have)
    error = caught.value
    assert "2000000 × 2000000 tokens, 8 heads, batch 1" in error.message
    assert "1000.0 MiB" in error.message
    assert error.code == "out-of-memory"
    n = int(error.hint.removeprefix("--max-tokens ").split()[0])
    assert predict_heads_memory(facts_for(n, **choices), HeadsRequest(), have) <= 0.8 * have
    with pytest.raises(MhaError):
        predict_heads_memory(facts_for(n + 1000, **choices), HeadsRequest(), have)


def test_the_study_refuses_before_a_tensor_is_made(monkeypatch):
    monkeypatch.setattr(study, "free_bytes", lambda device: 10 * MIB)
    monkeypatch.setattr(study, "make_setup", lambda *_, **__: pytest.fail("nothing may be made"))
    with pytest.raises(MhaError) as caught:
        prepare_heads(layer_request(*small()), HeadsRequest())
    assert caught.value.code == "out-of-memory"


@pytest.mark.parametrize(
    "kept",
    [Kept(corner=Corner(0, 8000, 0, 8000)), Kept(queries=tuple(range(8000)), top=8000)],
    ids=["a corner that is the whole", "all queries"],
)
def test_what_is_asked_for_cell_by_cell_is_foreseen_too(kept, monkeypatch):
    # 8 heads × 8000 × 8000 × 4 bytes are 2 GB as a corner, and as keys of all queries
    monkeypatch.setattr(study, "free_bytes", lambda device: 650 * MIB)
    monkeypatch.setattr(study, "make_setup", lambda *_, **__: pytest.fail("it was not refused"))
    config = Config(n_heads=8, d_model=64, causal=True, device="cpu").resolved()
    encoded = encode(["a " * 8000], config)
    with pytest.raises(MhaError) as caught:
        prepare_heads(layer_request(encoded, config), HeadsRequest(kept=kept))
    assert caught.value.code == "out-of-memory"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_pass_their_checks(dtype):
    config = Config(causal=True, dtype=dtype, device="cpu").resolved()
    run = prepare_heads(
        layer_request(encode(["the cat sat on the mat and saw the dog " * 20], config), config), HeadsRequest()
    )
    run.run()
    record = run.record()
    assert record.self_check.ok
    assert all(check.ok for check in record.survey.checks)


def test_scores_too_large_for_their_dtype_are_refused_with_their_heads():
    config = Config(scale=1e36, device="cpu").resolved()
    run = prepare_heads(layer_request(encode(["a b c d"], config), config), HeadsRequest())
    with pytest.raises(MhaError) as caught:
        run.run()
    assert caught.value.code == "not-finite"
    assert "are too large for float32: some rows of weights do not sum to 1" in caught.value.message


def test_all_heads_share_a_pass_up_to_a_number_of_cells():
    from mhacli.compute.heads import head_groups

    assert list(head_groups(range(6), 1, most=4)) == [range(4), range(4, 6)]
    assert list(head_groups(range(6), 3, most=9)) == [range(3), range(3, 6)]
    assert list(head_groups((5, 1, 2), 1, most=0)) == [range(1, 2), range(2, 3), range(5, 6)]
