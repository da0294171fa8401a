"""`mha heads` computes the statistics of heads without keeping their patterns: each number against
the formula.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import checkpoints, oracle, some
from support.layers import Expected, cells, expected, require_heads, require_near, weights_of

N_HEADS = 6
TEXTS = ["the cat | sat on the", "a | cat sat", "mat | on a cat"]
CONTEXTS = ["a mat sat | the cat on mat", "the | mat", "on on | cat a the"]
WORDS = ["a", "cat", "mat", "on", "sat", "the"]


def layer_file(
    folder: Path,
    n_words: int,
    *,
    n_kv_heads: int = 2,
    n_heads: int = N_HEADS,
    std: float = 0.7,
    **more: Any,
) -> str:
    """Random weights as a plain file, with the bias of scores beside them."""
    generator = torch.Generator().manual_seed(8)

    def draw(*shape: int) -> torch.Tensor:
        return std * torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = (
        {"embed.weight": draw(n_words, 9) / std, "embed_positions.weight": draw(7, 9)}
        if n_words < 10
        else {}
    )
    tensors |= {} if tensors else {"embed.weight": draw(n_words, 9) / std}
    for name, rows in {"q": n_heads * 4, "k": n_kv_heads * 4, "v": n_kv_heads * 5}.items():
        tensors |= {f"{name}_proj.weight": draw(rows, 9), f"{name}_proj.bias": draw(rows)}
    tensors |= {"o_proj.weight": draw(11, n_heads * 5), "o_proj.bias": draw(11)}
    save_file(tensors, folder / "w.st")
    if more:
        save_file({name: bias.contiguous() for name, bias in more.items()}, folder / "b.st")
    return f"--weights w.st --heads {n_heads} --dtype float64"


def heads_and_formula(
    mha: Any, folder: Path, words: list[str], bias: Any = None
) -> tuple[Any, Expected]:
    """The JSON of `mha heads`, and what the formula says."""
    document = mha("heads", *words, "--json").json
    weights = weights_of(folder / "w.st")
    return document, expected(document, weights, bias)


def contexts(texts: list[str]) -> list[str]:
    return [word for text in texts for word in ("--context", text)]


# -------------------------------------------------------------------------------------- short texts

NUMBERS = torch.randn(
    N_HEADS, 5, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64
)
NUMBERS[1, 2, :4], NUMBERS[:, 4, 1], NUMBERS[3, 0], NUMBERS[4] = (
    -torch.inf,
    -torch.inf,
    -torch.inf,
    -torch.inf,
)
BIAS = {"self": NUMBERS[:, :, :5], "cross": NUMBERS}

VARIANTS = {
    "plain": "--positions none",
    "causal": "--positions sinusoidal --causal",
    "rope, left, bias": (
        "--positions rope --rope-theta 50 --causal --padding left --score-bias b.st:self --softcap"
        " 2 --scale 4"
    ),
    "alibi, window, documents, left": (
        "--positions alibi --window 1,1 --causal --documents | --padding left"
    ),
    "learned": "--positions learned",
    "sink window, documents": "--window 0,1 --sink-window 1 --documents | --positions none",
    "interleaved, prefix, window, left": (
        "--positions rope-interleaved --prefix 2 --window 0,0 --sink-window 1 --padding left"
    ),
    "documents, scale": "--documents | --scale -3 --positions sinusoidal",
    "bias": "--score-bias b.st:self --positions none",
    "cross": "--positions none",
    "cross, left, bias": "--positions learned --padding left --score-bias b.st:cross",
    "cross, documents": "--positions sinusoidal --documents |",
}


RARE = ("plain", "learned", "documents, scale", "cross")


@pytest.mark.parametrize("name", some(VARIANTS, default=VARIANTS.keys() - RARE))
def test_every_number_of_every_head_is_that_of_its_pattern(
    name: str, mha: Any, tmp_path: Path
) -> None:
    options = VARIANTS[name].split()
    base = layer_file(tmp_path, len(WORDS), **BIAS).split()
    words = [*TEXTS, *(contexts(CONTEXTS) if "cross" in name else []), *base, *options]
    bias = (
        BIAS[words[words.index("--score-bias") + 1].split(":")[1]].numpy()
        if "--score-bias" in words
        else None
    )
    chosen = (
        []
        if "left" in name
        else ["--query", "0,3,1", "--top", "3", "--rows", "1:4", "--keys", "0:4"]
    )
    document, right = heads_and_formula(mha, tmp_path, [*words, *chosen], bias)
    assert document["self_check"]["ok"]
    assert all(check["ok"] for check in document["survey"]["checks"])
    assert [head["head"] for head in document["heads"]] == list(range(N_HEADS))
    require_heads(document["heads"], right, 1e-11)
    require_arrays(document, right)
    if "left" not in name:
        require_cells(document, right)


def require_arrays(document: Any, right: Expected) -> None:
    """The numbers of each query, of each key, of blocks of them, and of distances."""
    pattern, allowed = right.layer.attention.pattern, right.allowed
    has_key, even = allowed.any(axis=-1), oracle.uniform(allowed)
    shape = np.broadcast_shapes(has_key.shape)
    first = (right.keys.places == 0)[:, None, None, :]
    far = abs(right.marks["signed"])[:, None]
    rows = {
        "entropy": oracle.entropy(pattern),
        "distance": (pattern * far).sum(axis=-1),
        "participation": 1 / np.where(has_key, (pattern**2).sum(axis=-1), 1),
        "sink": (pattern * first).sum(axis=-1),
        "max_score": right.layer.attention.scores.max(axis=-1),
        "lse": np.log(
            np.exp(right.layer.attention.scores).sum(axis=-1, where=allowed),
            where=has_key,
            out=np.zeros(shape),
        ),
    }
    for name, numbers in rows.items():
        computed = cells(document[name])
        assert np.array_equal(np.isfinite(computed), has_key), name
        require_near(computed[has_key], numbers[has_key], 1e-11, name)
    assert np.array_equal(np.broadcast_to(cells(document["visible"]), shape), allowed.sum(axis=-1))
    require_near(document["received"], pattern.sum(axis=2), 1e-11, "received")
    require_near(full(document["uniform_received"], N_HEADS), even.sum(axis=2), 1e-11)
    block, steps = document["survey"]["block"], document["survey"]["steps"]
    require_near(document["map"], blocks_of(pattern, has_key, block), 1e-11, "map")
    require_near(full(document["uniform_map"], N_HEADS), blocks_of(even, has_key, block), 1e-11)
    require_near(document["profile"], profile_of(pattern, far, steps), 1e-11, "profile")
    require_near(full(document["uniform_profile"], N_HEADS), profile_of(even, far, steps), 1e-11)


def full(nested: Any, n_heads: int) -> np.ndarray:
    """An array that may be one for all heads, for each of them."""
    array = cells(nested)
    return np.repeat(array, n_heads, axis=1) if array.shape[1] == 1 < n_heads else array


def blocks_of(pattern: np.ndarray, has_key: np.ndarray, block: int) -> np.ndarray:
    """The weight that the queries of a block, those with a key, give to a block of keys, on
    average.
    """
    n_queries, n_keys = pattern.shape[2:]
    starts = range(0, n_queries, block), range(0, n_keys, block)
    sums = np.add.reduceat(np.add.reduceat(pattern, starts[0], axis=2), starts[1], axis=3)
    return sums / np.maximum(np.add.reduceat(has_key.astype(int), starts[0], axis=2), 1)[..., None]


def profile_of(pattern: np.ndarray, distance: np.ndarray, steps: list[int]) -> np.ndarray:
    """The part of the attention at distances up to each step and beyond the one before."""
    total = np.maximum(pattern.sum(axis=(2, 3)), 1e-300)
    bins = [(distance <= step) & (distance > before) for before, step in pairwise((-1, *steps))]
    return np.stack([(pattern * inside).sum(axis=(2, 3)) / total for inside in bins], axis=-1)


def require_cells(document: Any, right: Expected, tolerance: float = 1e-11) -> None:
    """The rows and keys of `--rows` and `--keys`, and the strongest keys of `--query`."""
    pattern, allowed = right.layer.attention.pattern, right.allowed
    corner, part = cells(document["corner"]), np.s_[:, :, 1:4, 0:4]
    assert np.array_equal(np.isfinite(corner), allowed[part])
    require_near(np.nan_to_num(corner), pattern[part], tolerance, "corner")
    shares, keys = cells(document["top_shares"]), np.array(document["top_keys"])
    chosen = pattern[:, :, [0, 3, 1]]
    require_near(shares, -np.sort(-chosen, axis=-1)[..., :3], tolerance, "top")
    assert np.array_equal(keys >= 0, shares > 0)
    of_keys = np.take_along_axis(chosen, np.maximum(keys, 0), axis=-1)
    require_near(np.where(keys >= 0, of_keys, 0), shares, tolerance)
    for row in keys.reshape(-1, 3):
        assert len(set(row[row >= 0])) == (row >= 0).sum()


def test_a_causal_text_without_padding_has_the_numbers_of_its_pattern(
    mha: Any, tmp_path: Path
) -> None:
    words = [
        "a cat sat on the mat a cat sat",
        *layer_file(tmp_path, len(WORDS)).split(),
        "--causal",
    ]
    document, right = heads_and_formula(mha, tmp_path, [*words, "--positions", "none"])
    require_heads(document["heads"], right, 1e-11)
    require_arrays(document, right)


def test_chosen_cells_of_huge_scores_are_those_of_the_pattern(mha: Any, tmp_path: Path) -> None:
    words = ["a cat sat on the mat a", *layer_file(tmp_path, len(WORDS)).split(), "--scale", "1e9"]
    chosen = [
        "--query",
        "0,3,1",
        "--top",
        "3",
        "--rows",
        "1:4",
        "--keys",
        "0:4",
        "--positions",
        "none",
    ]
    require_cells(*heads_and_formula(mha, tmp_path, [*words, *chosen]), 1e-5)


def test_some_heads_have_the_numbers_that_they_have_among_all(mha: Any, tmp_path: Path) -> None:
    layer = layer_file(tmp_path, len(WORDS), **BIAS).split()
    words = [*TEXTS, *layer, "--positions", "alibi", "--score-bias", "b.st:self"]
    document, right = heads_and_formula(
        mha, tmp_path, [*words, "--head", "1,4,5"], BIAS["self"].numpy()
    )
    assert [head["head"] for head in document["heads"]] == [1, 4, 5]
    require_heads(document["heads"], right, 1e-11)
    chosen = right.layer.attention.pattern[:, [1, 4, 5]]
    require_near(document["received"], chosen.sum(axis=2), 1e-11)


NOTHING = {"entropy", "sink", "max_score", "max_score_at", "window_50", "certainty"}


def test_a_head_that_sees_no_key_has_no_numbers(mha: Any, tmp_path: Path) -> None:
    bias = torch.zeros(4, 5, 5)
    bias[2] = -torch.inf
    save_file({"some": bias, "all": torch.full((5, 5), -torch.inf)}, tmp_path / "b.st")
    for command in (("run", "--repeat", "1"), ("heads", "--where", "k == q")):
        heads = mha(*command, "a b c d e", "--score-bias", "b.st:some", "--json").json["heads"]
        assert [head["entropy"] is None for head in heads] == [False, False, True, False]
        assert {name: heads[2][name] for name in NOTHING - {"certainty"}} == dict.fromkeys(
            NOTHING - {"certainty"}
        )
        assert (heads[2]["sinks"], heads[2]["largest"], heads[2]["uniform"]["entropy"]) == (
            [],
            [],
            None,
        )
        assert (heads[2]["patterns"] or [None]) == [None]
    blind = mha("heads", "a b c d e", "--score-bias", "b.st:all", "--json").json["heads"]
    assert [head["entropy"] for head in blind] == [None] * 4


@pytest.mark.parametrize("mask", ["--window 3,0", "--window 2,2", "--prefix 2"])
def test_copies_are_possible_in_every_text_of_a_batch(mask: str, mha: Any) -> None:
    """A mask is the same for all texts of one length, and their copies stand elsewhere."""
    words = [*mask.split(), "--heads", "2", "--json"]
    texts = ["a b a b c c", "c d e e e d"]
    of_both = mha("heads", *texts, *words).json["heads"]
    alone = [mha("heads", text, *words).json["heads"] for text in texts]
    for number, head in enumerate(of_both):
        for name in ("n_duplicate_queries", "n_induction_queries"):
            assert head[name] == sum(heads[number][name] for heads in alone) > 0


def test_a_single_token_has_no_choice(mha: Any) -> None:
    document = mha("heads", "alone", "--dtype", "float64", "--json").json
    for head in document["heads"]:
        assert head["entropy_share"] is None
        assert [
            head[name] for name in ("sink", "diagonal", "previous", "duplicate", "distance")
        ] == [1, 1, 0, 0, 0]
        assert [head[name] for name in ("window_50", "window_90", "window_99")] == [0, 0, 0]
        assert (head["largest"], head["max_score_at"]) == ([], [0, 0, 0])
    assert (document["survey"]["steps"], document["profile"]) == ([0], [[[1.0]] * 4])


# --------------------------------------------------------------------------------------- long texts

LONG = [f"w{i * i % 53}" for i in range(811)]
LONG_VARIANTS = {
    "causal": "--causal --positions none",
    "alibi, window, softcap": "--positions alibi --window 300,20 --softcap 3",
    "rope, left": "--positions rope --padding left --causal",
    "documents": "--documents | --positions sinusoidal",
    "causal, float32": "--causal --positions none --dtype float32",
}


@pytest.mark.real
@pytest.mark.parametrize("name", LONG_VARIANTS)
def test_a_long_text_has_the_numbers_of_its_pattern(name: str, mha: Any, tmp_path: Path) -> None:
    texts = [" ".join(LONG), " ".join([*LONG[:400], "|", *LONG[100:301]])]
    words = layer_file(tmp_path, len(set(LONG)), n_heads=2, n_kv_heads=1, std=0.4).split()
    for option in LONG_VARIANTS[name].split():
        if option == "--dtype":
            words.remove("--dtype")
            words.remove("float64")
        words.append(option)
    queries = [0, 399, 511, 512, 600]
    of_cells = (
        []
        if "left" in name
        else ["--query", ",".join(map(str, queries)), "--top", "5", "--rows", "500:530"]
    )
    document, right = heads_and_formula(
        mha,
        tmp_path,
        [*texts, *words, *of_cells, *([] if "left" in name else ["--keys", "240:280"])],
    )
    tolerance = 1e-11 if "float32" not in name else 1e-5
    pattern, allowed = right.layer.attention.pattern, right.allowed
    assert document["self_check"]["ok"]
    assert document["survey"]["block"] == 8
    for head in document["heads"]:
        h = head["head"]
        means = oracle.head_statistics(pattern[:, h], allowed[:, h], right.marks, head["offset"])
        for field, number in means.items():
            limit = (
                2
                if field.startswith("window") and "float32" in name
                else tolerance * max(1.0, abs(number))
            )
            assert abs(head[field] - number) <= limit, field
        assert head["kind"] == oracle.head_type(head, head["uniform"])[0]
    require_near(document["received"], pattern.sum(axis=2), 10 * tolerance)
    require_near(document["map"], blocks_of(pattern, allowed.any(axis=-1), 8), 10 * tolerance)
    far = abs(right.marks["signed"])[:, None]
    require_near(
        document["profile"], profile_of(pattern, far, document["survey"]["steps"]), 10 * tolerance
    )
    if of_cells:
        corner, part = cells(document["corner"]), np.s_[:, :, 500:530, 240:280]
        assert np.array_equal(np.isfinite(corner), allowed[part])
        require_near(np.nan_to_num(corner), pattern[part], tolerance)
        require_near(
            document["top_shares"], -np.sort(-pattern[:, :, queries], axis=-1)[..., :5], tolerance
        )


# ----------------------------------------------------------------------------------- types of heads

T = 96
KINDS = """
    previous-token sink diagonal induction duplicate-token positional local uniform mixed
""".split()


def crafted(causal: bool) -> torch.Tensor:
    """Scores of nine heads over a text in which every word comes three times, each head of another
    kind.
    """
    token, (i, j) = np.arange(T) % 32, np.indices((T, T))
    past = j <= i if causal else np.ones((T, T), bool)
    marks = {
        "previous-token": j == np.maximum(i - 1, 0),
        "sink": j == 0,
        "diagonal": j == i,
        "induction": (np.roll(token, 1)[j] == token[i]) & (j > 0) & (j - 1 != i) & past,
        "duplicate-token": (token[j] == token[i]) & (i != j) & past,
        "positional": j == np.maximum(i - 5, 0),
        "local": (np.abs(i - j) <= 8) & past,
        "uniform": np.zeros((T, T), bool),
        "mixed": (i * 7 + j * 13) % 5 == 0,
    }
    return torch.tensor(np.stack([60.0 * marks[kind] for kind in KINDS]), dtype=torch.float32)


@pytest.mark.parametrize("options", ["--causal", "--dtype float64"])
@pytest.mark.parametrize("command", ["run", "heads"])
def test_a_head_made_to_be_of_a_type_has_that_type(
    command: str, options: str, mha: Any, tmp_path: Path
) -> None:
    save_file({"bias": crafted("causal" in options)}, tmp_path / "b.st")
    text = " ".join(f"w{i % 32}" for i in range(T))
    words = [
        *"--heads 9 --d-model 9 --scale 1e-9 --score-bias b.st".split(),
        *options.split(),
    ]
    keep = ["--keep", "z", "--repeat", "1"] if command == "run" else []
    heads = {
        head["kind"]: head for head in mha(command, text, *words, *keep, "--json").json["heads"]
    }
    assert list(heads) == KINDS
    assert heads["previous-token"]["previous"] == pytest.approx((T - 1) / T, abs=1e-6)
    assert heads["sink"]["sink"] == pytest.approx(1, abs=1e-6)
    assert [(sink["sequence"], sink["key"]) for sink in heads["sink"]["sinks"]] == [(0, 0)]
    assert heads["diagonal"]["diagonal"] == pytest.approx(1, abs=1e-6)
    assert (heads["positional"]["offset"], heads["positional"]["at_offset"]) == (
        -5,
        pytest.approx((T - 5) / T, abs=1e-6),
    )
    assert heads["uniform"]["certainty"] == pytest.approx(1, abs=1e-6)
    assert heads["local"]["near"] == pytest.approx(1, abs=1e-5)


def boosted(cells: np.ndarray, measure: Callable[[np.ndarray], float], goal: float) -> np.ndarray:
    """Scores that are larger on these cells, by as much as makes `measure` of their pattern the
    goal.
    """
    low, high = 0.0, 20.0
    falls = measure(oracle.softmax(high * cells)) < measure(oracle.softmax(low * cells))
    for _ in range(60):
        middle = (low + high) / 2
        is_below = measure(oracle.softmax(middle * cells)) < goal
        low, high = (middle, high) if is_below != falls else (low, middle)
    return low * cells


def test_a_head_has_a_type_from_four_tenths_of_excess_or_nine_tenths_of_entropy_on(
    mha: Any, tmp_path: Path
) -> None:
    n = 20
    i, j = np.indices((n, n))
    heads = []
    for marks, kind in (
        (j == 0, "sink"),
        (i == j, "diagonal"),
        (j == i - 1, "previous-token"),
        (j == i + 4, "positional"),
    ):
        even = marks.sum() / n**2

        def excess(pattern: np.ndarray, marks: np.ndarray = marks, even: float = even) -> float:
            return float(((pattern * marks).sum() / n - even) / (1 - even))

        heads += [
            (boosted(marks, excess, goal), kind if goal > 0.4 else None) for goal in (0.41, 0.39)
        ]
    spread = (i * 7 + j * 13) % 5 == 0
    for goal in (0.91, 0.89):
        scores = boosted(
            spread, lambda pattern: float(oracle.entropy(pattern).mean() / np.log(n)), goal
        )
        heads.append((scores, "uniform" if goal > 0.9 else "mixed"))
    save_file({"bias": torch.tensor(np.stack([scores for scores, _ in heads]))}, tmp_path / "b.st")
    words = "--heads 10 --d-model 10 --scale 1e-12 --dtype float64 --score-bias b.st".split()
    document = mha("heads", " ".join(f"w{t}" for t in range(n)), *words, "--json").json
    for head, (_, kind) in zip(document["heads"], heads, strict=True):
        assert head["kind"] == kind or (kind is None and head["kind"] in ("mixed", "uniform")), head
    assert document["heads"][0]["certainty"] == pytest.approx(0.41, abs=1e-9)
    assert document["heads"][8]["certainty"] == pytest.approx(0.91, abs=1e-9)


N_SUNK = 40


@pytest.mark.parametrize(
    "options",
    ["", "--causal", "--window 9,4 --sink-weight 0.3", "--causal --padding left --sink-weight 0.3"],
)
def test_sinks_are_keys_that_get_several_times_their_part_from_most_queries(
    options: str, mha: Any, tmp_path: Path
) -> None:
    bias = np.random.default_rng(3).normal(size=(6, N_SUNK, N_SUNK))
    bias[0, :, 0] += 6
    bias[1, : 2 * N_SUNK // 5, 5] += 9  # from a part of the queries
    bias[2, N_SUNK // 5 :, 5] += 9
    bias[3, :, -3:] += 9
    bias[4, :, (0, 7, 20)] += 5
    save_file({"bias": torch.tensor(bias)}, tmp_path / "b.st")
    words = [f"w{i}" for i in range(N_SUNK)]
    texts = [" ".join(words), " ".join(words[:25])]
    sizes = "--heads 6 --d-model 12 --scale 1e-12 --dtype float64 --score-bias b.st".split()
    document = mha("heads", *texts, *sizes, *options.split(), "--json").json
    side = oracle.side(document["sequences"], document["config"]["padding"])
    rules = {name: document["config"][name] for name in ("causal", "window")}
    allowed = np.broadcast_to(oracle.visible(side, side, **rules), (2, 6, N_SUNK, N_SUNK))
    pattern = oracle.softmax(np.where(allowed, bias, -np.inf))
    n_sinks = 0
    for head in document["heads"]:
        right = oracle.sink_keys(
            pattern[:, head["head"]], allowed[:, head["head"]], document["survey"]["sink_share"]
        )
        first = np.argmax(side.real, axis=1)
        computed = [
            (s["share"], s["uniform"], s["sequence"], s["key"] + first[s["sequence"]])
            for s in head["sinks"]
        ]
        assert [place[2:] for place in computed] == [place[2:] for place in right]
        assert np.allclose(computed, right, rtol=0, atol=1e-6) or not right
        n_sinks += len(right)
    assert n_sinks >= 2


@pytest.mark.parametrize(("n", "n_sinks"), [(7, 0), (8, 1)])
def test_a_key_is_a_sink_from_8_queries_on(n: int, n_sinks: int, mha: Any, tmp_path: Path) -> None:
    save_file({"bias": torch.tensor([9.0, *[0.0] * (n - 1)]).repeat(n, 1)}, tmp_path / "b.st")
    words = [" ".join(f"w{i}" for i in range(n)), "--scale", "1e-12", "--score-bias", "b.st"]
    for head in mha("heads", *words, "--json").json["heads"]:
        assert len(head["sinks"]) == n_sinks


def test_first_tokens_are_counted_together(mha: Any, tmp_path: Path) -> None:
    words = [
        *TEXTS,
        *layer_file(tmp_path, len(WORDS)).split(),
        *"--documents | --positions none --first-tokens 2".split(),
    ]
    document, right = heads_and_formula(mha, tmp_path, words)
    for head in document["heads"]:
        of_first = (
            right.layer.attention.pattern[:, head["head"]] * (right.keys.places < 2)[:, None, :]
        )
        assert head["leading"] == pytest.approx(
            of_first.sum() / right.queries.real.sum(), abs=1e-12
        )


# ------------------------------------------------------------------------------ order, and refusals


@pytest.mark.real
def test_heads_are_printed_in_the_order_of_a_statistic(mha: Any) -> None:
    words = [
        "the cat sat on the mat and the dog sat",
        *"--heads 8 --init uniform --scale 9 --causal".split(),
    ]
    heads = {head["head"]: head for head in mha("heads", *words, "--json").json["heads"]}
    sorts = ("entropy", "eff.keys:up", "head:down", "kind")
    for command, sort in ((name, sort) for name in ("heads", "run") for sort in sorts):
        lines = mha(command, *words, "--brief", "--sort", sort).stdout.splitlines()
        order = [int(line.split()[0]) for line in lines if re.match(r"\s*\d+ ", line)]
        field = sort.partition(":")[0].replace("eff.keys", "effective_keys")
        column = [heads[head][field] for head in order]
        assert column == sorted(column, reverse=not (sort.endswith(":up") or sort == "kind")), sort
        assert sorted(order) == list(range(8))
        assert len(set(column)) > 1


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.real)])
def test_sixteen_bits_and_huge_scores_pass_their_checks(dtype: str, mha: Any) -> None:
    words = ["the cat sat on the mat and saw the dog " * 20, "--causal", "--dtype", dtype]
    document = mha("heads", *words, "--json").json
    assert document["self_check"]["ok"]
    assert all(check["ok"] for check in document["survey"]["checks"])
    assert mha("heads", *words, "--dtype", "float32", "--scale", "1e20", "--json").json[
        "self_check"
    ]["ok"]
    wide = mha("heads", *words, "--dtype", "float32", "--json").json
    for one, other in zip(document["heads"], wide["heads"], strict=True):
        assert one["entropy"] == pytest.approx(other["entropy"], abs=0.05)


REFUSED = {
    "head that is not there": (["--head", "4"], 2, "4"),
    "map of a head that was not chosen": (["--head", "0,1", "--map", "2"], 2, "2"),
    "query beyond the text": (["--query", "1,13"], 2, "13"),
    "rows beyond the text": (["--rows", "4:14"], 2, "14"),
    "keys that are none": (["--keys", "5:5"], 2, "5:5"),
    "unknown order": (["--sort", "size"], 2, "size"),
    "order by numbers that are not there": (["--sort", "d_logit"], 2, "d_logit"),
    "sequence that is not there": (["--sequence", "1"], 2, "sequence"),
    "training": (["--train", "--dropout", "0.5"], 2, "--train"),
    "queries of padded texts": (["a dog", "--padding", "left", "--query", "1"], 2, "padding"),
    "scores too large": (["--scale", "1e36"], 1, "float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_heads_cannot_compute_is_refused_and_nothing_is_saved(
    name: str, mha: Any, tmp_path: Path
) -> None:
    words, code, mentioned = REFUSED[name]
    text = "the cat sat on the mat and the dog sat on the cat"
    ended = mha("heads", text, *words, "--save", "r", "--json", code=code)
    assert mentioned in ended.said
    assert not (tmp_path / "r").exists()


def test_spans_add_up_the_weights_between_parts_of_a_text(mha: Any) -> None:
    folder = checkpoints.folder("gpt2")
    spans = {"first": "first=0:7", "sat-on": "sat-on=/sat on/", "end": "end=/too/"}
    words = [word for span in spans.values() for word in ("--span", span)]
    text = ["the cat sat on the mat and the dog sat too", "--layer", "1", "--model", str(folder)]
    document = mha("heads", *text, *words, "--json").json
    pattern = cells(mha("run", *text, "--json").json["layers"][0]["pattern"])
    assert [span["name"] for span in document["spans"]] == list(spans)
    offsets = document["sequences"][0]["offsets"]
    tokens = [span["tokens"][0] for span in document["spans"]]
    for chosen, (start, end) in zip(tokens, ((0, 7), (8, 14), (39, 42)), strict=True):
        assert chosen == [t for t, (a, b) in enumerate(offsets) if a < end and b > start]
    right = [
        [pattern[:, :, queries][..., keys].sum(axis=-1).mean(axis=-1) for keys in tokens]
        for queries in tokens
    ]
    require_near(
        document["layers"][0]["span_mass"], np.moveaxis(np.array(right), (0, 1), (2, 3)), 1e-5
    )


def test_the_last_query_is_that_of_the_largest_number(mha: Any) -> None:
    words = ("heads", "the cat sat", "--d-model", "8", "--heads", "2", "--query")
    expected = mha(*words, "2").stdout
    assert "query 2" in expected
    assert mha(*words, "last").stdout == mha(*words, "-1").stdout == expected


def test_json_that_is_read_as_text_is_named(mha: Any, tmp_path: Path) -> None:
    for name in ("c.jsonl", "c.txt"):
        (tmp_path / name).write_text('{"text": "the cat"}\n')
        ended = mha("heads", "--d-model", "8", "--heads", "2", "--lines", "--file", name)
        assert (name in ended.stderr) == (name == "c.jsonl")
