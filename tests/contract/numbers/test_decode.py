"""`mha decode`: each step gives what one computation over everything gives, and costs what it costs
by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import oracle
from support.layers import cells, expected, require_near, weights_of

TEXTS = ["the cat | sat on the | mat a", "a mat | sat"]
SIZES = "--d-model 5 --heads 6 --kv-heads 2 --d-head 4 --d-v 3 --d-input 9".split()
SIZES += "--init uniform --scale 1.5".split()
CACHES = ("none", "concat", "preallocated")
TOKEN = 2 * 2 * (4 + 3) * 8
"""Bytes of one place of the cache: batch 2, kv heads 2, d_head 4 and d_v 3, 8 bytes each."""
BIAS = torch.randn(6, 7, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
BIAS[..., 4, 1:], BIAS[..., 6, 5] = -torch.inf, -torch.inf
BIASES = {"whole": BIAS, "keys": BIAS[0, 0].clone(), "heads": BIAS[:, :1, :1].clone()}

VARIANTS = {
    "plain": "--positions none --no-bias",
    "sinusoidal": "--softcap 2",
    "learned, left": "--positions learned --max-positions 9 --padding left",
    "rope, left, window": "--positions rope --rope-theta 30 --padding left --window 1",
    "interleaved, documents, sink window": (
        "--positions rope-interleaved --documents | --window 1,5 --sink-window 1"
    ),
    "alibi, documents, left": "--positions alibi --documents | --padding left",
    "alibi, one key head, no projection": "--positions alibi --kv-heads 1 --no-out-proj",
    "bias of all": "--score-bias b.st:whole --positions alibi",
    "bias of keys": "--score-bias b.st:keys",
    "bias of heads": "--score-bias b.st:heads --padding left",
    "random rows": "--random 3,5 --positions rope",
}


def decoded(mha: Any, *words: str, texts: list[str] = TEXTS, code: int = 0) -> Any:
    dtype = [] if "--dtype" in words else ["--dtype", "float64"]
    return mha("decode", *texts, *SIZES, *dtype, *words, "--repeat", "1", "--json", code=code)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        pytest.param(name, n + m, marks=pytest.mark.real if m or n not in (3, 4, 5, 10) else ())
        for n, name in enumerate(VARIANTS)
        for m in range(2)
    ],
)
def test_steps_give_what_one_computation_of_everything_gives(
    name: str, n: int, mha: Any, tmp_path: Path
) -> None:
    save_file(BIASES, tmp_path / "b.st")
    options, cache, prompt_len = VARIANTS[name].split(), CACHES[n % 3], [0, 3][n % 2]
    bias = BIASES[options[1].split(":")[1]].numpy() if "--score-bias" in options else None
    how = ["--cache", cache, "--prompt-len", str(prompt_len), "--save-weights", "w.st"]
    document = decoded(mha, *options, *how, texts=[] if "--random" in options else TEXTS).json
    assert document["config"]["causal"]
    if "--random" in options:
        rows = mha(
            "run", *SIZES, *options, "--dtype", "float64", "--repeat", "1", "--keep", "x", "--json"
        )
        document["x"] = rows.json["x"]
    right = expected(document, weights_of(tmp_path / "w.st"), bias)
    require_steps(document, right)
    assert document["decoding"]["cache"] == cache
    phases = [
        (step["cache"]["phase"], step["cache"]["start"], step["cache"]["n_past"])
        for step in document["trace"]
    ]
    steps = range(prompt_len or 0, right.x.shape[1])
    assert phases == [
        *([("prefill", 0, 0)] if prompt_len else []),
        *(("decode", t, t) for t in steps),
    ]


def require_steps(document: Any, right: Any) -> None:
    attention, allowed = right.layer.attention, right.allowed
    assert document["self_check"]["ok"]
    assert document["self_check"]["max_abs_error"] <= 1e-12
    assert all(step["cache"]["max_abs_difference"] <= 1e-12 for step in document["trace"])
    for step in document["trace"]:
        last = step["cache"]["n_past"] + step["shape"][1] - 1
        assert step["cache"]["n_visible"] == allowed[:, :, last].any(1).sum(-1).tolist()
    for name, tensor in {
        "pattern": attention.pattern,
        "z": attention.z,
        "out": right.layer.out,
    }.items():
        require_near(document[name], tensor, 1e-12, name)
    for name, tensor in {"qk": attention.qk, "scores": attention.scores}.items():
        assert np.array_equal(np.isfinite(cells(document[name])), allowed), name
        require_near(cells(document[name])[allowed], tensor[allowed], 1e-12, name)
    require_near(document["entropy"], oracle.entropy(attention.pattern), 1e-12)
    for head in document["heads"]:
        cells_of_head = attention.pattern[:, head["head"]], allowed[:, head["head"]]
        expected = oracle.head_statistics(*cells_of_head, right.marks)["entropy"]
        assert head["entropy"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("prompt_len", [2, pytest.param(7, marks=pytest.mark.real)])
def test_a_prefix_inside_of_the_prompt_is_read_at_once(
    prompt_len: int, mha: Any, tmp_path: Path
) -> None:
    words = [
        *"--prefix 2 --window 2 --positions rope --prompt-len".split(),
        str(prompt_len),
    ]
    document = decoded(mha, *words, "--save-weights", "w.st").json
    require_steps(document, expected(document, weights_of(tmp_path / "w.st")))
    assert cells(document["pattern"])[0, :, 0, 1].min() > 0


@pytest.mark.parametrize(
    ("options", "prompt_len"), [(["--padding", "left"], 6), (["--documents", "|"], 7)]
)
def test_a_prefix_behind_the_prompt_is_refused_with_a_prompt_that_works(
    options: list[str], prompt_len: int, mha: Any
) -> None:
    words = ["--prefix", "2", *options]
    assert (
        f"--prompt-len {prompt_len}"
        in decoded(mha, *words, "--prompt-len", "2", code=2).error["hint"]
    )
    assert decoded(mha, *words, "--prompt-len", str(prompt_len)).json["self_check"]["ok"]


def test_a_layer_from_a_file_decodes_with_its_weights(mha: Any, tmp_path: Path) -> None:
    decoded(mha, "--positions", "rope", "--seed", "4", "--save-weights", "w.st")
    document = mha("decode", *TEXTS, "--weights", "w.st", "--repeat", "1", "--json").json
    require_steps(document, expected(document, weights_of(tmp_path / "w.st")))
    assert document["weights"] == "w.st"


def test_every_step_tells_its_tokens_and_shapes(mha: Any) -> None:
    document = decoded(mha).json
    steps = [step["cache"] for step in document["trace"]]
    assert [step["tokens"] for step in steps] == [
        [["the"], ["a"]],
        [["cat"], ["mat"]],
        [["sat"], ["sat"]],
        [["on"], []],
        [["the"], []],
        [["mat"], []],
        [["a"], []],
    ]
    assert {tuple(map(tuple, (s["q_shape"], s["k_shape"], s["v_shape"]))) for s in steps} == {
        ((2, 6, 1, 4), (2, 2, 1, 4), (2, 2, 1, 3))
    }
    assert {tuple(step["shape"]) for step in document["trace"]} == {(2, 1, 5)}
    left = decoded(mha, "--padding", "left", "--no-out-proj", "--prompt-len", "5").json["trace"]
    assert [step["cache"]["tokens"] for step in left] == [
        [["the", "cat", "sat", "on", "the"], ["a"]],
        [["mat"], ["mat"]],
        [["a"], ["sat"]],
    ]
    assert [step["shape"] for step in left] == [[2, n, 18] for n in (5, 1, 1)]
    again = decoded(mha, "--cache", "none", "--prompt-len", "5").json["trace"]
    assert [step["cache"]["k_shape"][2] for step in again] == [5, 6, 7]


@pytest.mark.parametrize(
    ("cache", "read", "appended", "moved", "held"),
    [
        ("none", [0, 0, 0], [0, 0, 0], [10, 12, 14], [0, 0, 0]),
        ("concat", [5, 6, 7], [5, 1, 1], [10, 17, 20], [5, 6, 7]),
        ("preallocated", [5, 6, 7], [5, 1, 1], [10, 7, 8], [7, 7, 7]),
    ],
)
def test_a_prefill_of_five_and_two_steps_move_the_bytes_of_their_tokens(
    cache: str, read: list[int], appended: list[int], moved: list[int], held: list[int], mha: Any
) -> None:
    steps = [
        step["cache"] for step in decoded(mha, "--cache", cache, "--prompt-len", "5").json["trace"]
    ]
    by_name = {
        "read_bytes": read,
        "appended_bytes": appended,
        "moved_bytes": moved,
        "cache_bytes": held,
    }
    for name, tokens in by_name.items():
        assert [step[name] for step in steps] == [n * TOKEN for n in tokens], name


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("window", "visible"), [("", ["4", "5", "6"]), ("--window 2", ["3", "3", "3"])]
)
def test_the_last_token_sees_the_same_keys_with_every_cache(
    cache: str, window: str, visible: list[str], mha: Any
) -> None:
    words = ["decode", "the cat sat on the mat", *window.split(), "--cache", cache]
    lines = mha(*words, "--prompt-len", "4").stdout.splitlines()
    rows = [line.split() for line in lines if " prefill " in line or " decode " in line]
    n_after = 5 if cache != "none" else 3  # two sizes with a unit each, or two dashes; a number
    assert [row[-n_after - 1] for row in rows] == visible


LAYERS = {
    "all different": ("", 9 * 24 + 24 + 9 * 8 + 8 + 9 * 6 + 6 + 18 * 5 + 5, 43, 2, 8),
    "no biases": ("--no-bias --dtype float32", 9 * 24 + 9 * 8 + 9 * 6 + 18 * 5, 0, 2, 4),
    "no output projection": (
        "--no-out-proj --dtype float16",
        9 * 24 + 24 + 9 * 8 + 8 + 9 * 6 + 6,
        38,
        2,
        2,
    ),
    "one key head": (
        "--kv-heads 1 --dtype bfloat16",
        9 * 24 + 24 + 9 * 4 + 4 + 9 * 3 + 3 + 18 * 5 + 5,
        36,
        1,
        2,
    ),
}


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("all different", "none"),
        pytest.param("no biases", "preallocated", marks=pytest.mark.real),
        ("no output projection", "concat"),
        pytest.param("one key head", "none", marks=pytest.mark.real),
    ],
)
def test_a_step_costs_its_products_and_the_layer_its_parameters(
    name: str, cache: str, mha: Any
) -> None:
    words, parameters, biases, n_kv_heads, width = LAYERS[name]
    document = decoded(mha, *words.split(), "--cache", cache, "--prompt-len", "3").json
    decoding = document["decoding"]
    assert decoding["weight_bytes"] == parameters * width
    assert decoding["token_bytes"] == n_kv_heads * (4 + 3) * width
    assert decoding["full_token_bytes"] == 6 * (4 + 3) * width
    assert decoding["crossing_len"] == pytest.approx(parameters / (2 * n_kv_heads * 7))
    per_row, per_cell = 2 * (parameters - biases) + biases, 2 * 6 * (4 + 3)
    sizes = [(3, 3), *((length if cache == "none" else 1, length) for length in (4, 5, 6, 7))]
    expected = [2 * n * (per_row + per_cell * length) for n, length in sizes]
    assert [step["flops"] for step in document["trace"]] == expected


REFUSED = {
    "negative prompt": (["--prompt-len", "-1"], "-1"),
    "training": (["--train", "--dropout", "0.5"], "--train"),
    "prefix longer than the prompt": (["--prefix", "3", "--prompt-len", "2"], "--prompt-len 3"),
    "prefix longer than the text": (["--prefix", "9"], "--prompt-len 7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_decoded_is_refused(name: str, mha: Any) -> None:
    words, mentioned = REFUSED[name]
    ended = decoded(mha, *words, code=2)
    assert mentioned in ended.said
    assert ended.error["code"] == "usage"
