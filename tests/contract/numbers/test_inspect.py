"""`mhacli.inspect` and `mhacli.Config` in Python: what `mha run` computes, and the settings that
fit together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.layers import cells

import mhacli
from mhacli import Config, MhaError

TEXTS, CONTEXTS = (
    ["the cat sat on the mat", "a cat | sat"],
    ["some other words", "words that are some other"],
)
SIZES: dict[str, Any] = {
    "d_model": 10,
    "n_heads": 9,
    "n_kv_heads": 3,
    "d_head": 4,
    "d_v": 2,
    "init": "uniform",
    "dtype": "float64",
    "device": "cpu",
}
WORDS = (
    "--d-model 10 --heads 9 --kv-heads 3 --d-head 4 --d-v 2 --init uniform --dtype float64"
    " --device cpu"
)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "causal, softcap": (
        {"causal": True, "softcap": 2.0, "scale": 1.5},
        "--causal --softcap 2 --scale 1.5",
    ),
    "rope, window, left": (
        {"positions": "rope", "rope_theta": 50.0, "window": (2, 1), "sink": 1, "padding": "left"},
        "--positions rope --rope-theta 50 --window 2,1 --sink-window 1 --padding left",
    ),
    "training": (
        {"train": True, "dropout": 0.3, "seed": 7, "bias": False},
        "--train --dropout 0.3 --seed 7 --no-bias",
    ),
    "documents, prefix": (
        {"documents": "|", "prefix": 2, "out_proj": False},
        "--documents | --prefix 2 --no-out-proj",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_inspect_computes_what_run_computes(name: str, mha: Any) -> None:
    choices, words = CASES[name]
    torch.manual_seed(11)
    state = torch.random.get_rng_state()
    record = mhacli.inspect(TEXTS, Config(**SIZES, **choices))
    assert torch.equal(torch.random.get_rng_state(), state)
    document = mha("run", *TEXTS, *WORDS.split(), *words.split(), "--repeat", "1", "--json").json
    for array in ("pattern", "z", "out"):
        assert np.array_equal(record.arrays[array], cells(document[array])), array
    assert np.array_equal(record.arrays["allowed"], np.isfinite(cells(document["scores"]))[:, :1])
    assert (record.arrays["scores"][np.isnan(cells(document["scores"]))] == -np.inf).all()
    assert record.self_check.ok
    for head, other in zip(record.heads, document["heads"], strict=True):
        assert (head.kind, head.entropy, head.previous) == (
            other["kind"],
            other["entropy"],
            other["previous"],
        )


def test_inspect_takes_a_context_and_a_single_text(mha: Any) -> None:
    record = mhacli.inspect(TEXTS, Config(**SIZES), context=CONTEXTS)
    context = [word for text in CONTEXTS for word in ("--context", text)]
    document = mha("run", *TEXTS, *context, *WORDS.split(), "--repeat", "1", "--json").json
    assert np.array_equal(record.arrays["out"], cells(document["out"]))
    assert mhacli.inspect("the cat").arrays["pattern"].shape == (1, 4, 2, 2)


TOO_LARGE = [
    ("run", "1e38"),
    ("heads", "1e36"),
    ("decode", "1e38"),
    ("run", "1e300"),
    ("heads", "1e300"),
]


@pytest.mark.parametrize(("command", "scale"), TOO_LARGE)
def test_scores_too_large_for_their_dtype_are_refused(command: str, scale: str, mha: Any) -> None:
    ended = mha(command, "the cat sat on", "--init", "uniform", "--scale", scale, "--json", code=1)
    assert ended.error["code"] == "not-finite"
    assert "float32" in ended.said


def overflowing(folder: Path, *heads: int) -> list[str]:
    """A float16 layer whose queries and keys are 400 in these heads of three: products of 320
    000.
    """
    rows, one = torch.zeros(3, 2, 4), torch.ones(6, 4)
    rows[list(heads)] = 100.0
    tensors = {
        "embed": torch.ones(3, 4),
        "q_proj": rows.flatten(0, 1),
        "k_proj": rows.flatten(0, 1),
        "v_proj": one,
    }
    save_file({f"{name}.weight": t.half().clone() for name, t in tensors.items()}, folder / "w.st")
    return [
        "a b c",
        *"--weights w.st --heads 3 --positions none --repeat 1 --json".split(),
    ]


def test_products_too_large_for_sixteen_bits_name_their_heads_and_are_shown_if_allowed(
    mha: Any, tmp_path: Path
) -> None:
    ended = mha("run", *overflowing(tmp_path, 0, 2), code=1)
    assert ended.error["code"] == "not-finite"
    assert ended.missing("heads 0, 2", "float16", "18") == []
    words = overflowing(tmp_path, 1)
    assert "head 1" in mha("run", *words, code=1).said
    document = mha("run", *words, "--allow-nonfinite", code=(0, 3)).json
    assert [head["entropy"] is None for head in document["heads"]] == [False, True, False]
    assert np.isfinite(cells(document["qk"])[0, [0, 2]]).all()
    assert np.isnan(cells(document["pattern"])[0, 1]).all()
    assert document["nonfinite"]["qk"] == 9


def test_what_is_left_open_follows_from_the_width_and_the_heads() -> None:
    whole = Config(d_model=66, n_heads=11).resolved()
    assert (whole.d_head, whole.d_v, whole.n_kv_heads, whole.d_input) == (6, 6, 11, 66)
    assert whole.scale == pytest.approx(6**-0.5, rel=1e-15)
    given = Config(
        d_model=7, n_heads=6, n_kv_heads=3, d_head=5, d_input=9, scale=2, window=(3, 0)
    ).resolved()
    assert (given.d_head, given.d_v, given.n_kv_heads, given.d_input, given.scale) == (
        5,
        5,
        3,
        9,
        2.0,
    )
    assert whole.resolved() == whole
    assert given.resolved() == given
    assert Config(positions="alibi", d_head=5).resolved().d_head == 5


REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"d_model": 64.0}, ["64.0"], ""),
    ({"d_model": 65537}, ["65537", "65536"], ""),
    ({"d_model": 64, "n_heads": 5}, ["n_heads=5", "64"], "n_heads=4 or d_model=65"),
    ({"d_model": 8, "n_heads": 3}, ["3", "8"], "n_heads=4 or d_model=9"),
    ({"d_model": 65_536, "n_heads": 1000}, ["1000"], "n_heads=1024 or d_model=65000"),
    ({"n_kv_heads": 3}, ["n_kv_heads=3", "4"], "n_kv_heads=4"),
    ({"train": True}, ["train"], "dropout"),
    ({"positions": "rope", "d_head": 5}, ["rope", "5"], "d_head=6"),
    ({"sink": 3}, ["sink=3"], "window"),
    ({"documents": ""}, ["documents"], ""),
    ({"random": (0, 5)}, ["0,5", "batch"], ""),
    ({"window": (-1, 0)}, ["-1,0"], ""),
]


@pytest.mark.parametrize(
    ("choices", "mentioned", "hint"), REFUSED, ids=[str(row[0]) for row in REFUSED]
)
def test_settings_that_do_not_fit_are_refused_with_one_that_does(
    choices: dict[str, Any], mentioned: list[str], hint: str
) -> None:
    with pytest.raises(MhaError) as caught:
        Config(**choices).resolved()
    assert caught.value.exit_code == 2
    assert all(word in caught.value.message for word in mentioned), caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_context_that_is_one_text_is_no_list_of_characters() -> None:
    context = mhacli.inspect("a cat", context="le").context
    assert context is not None
    assert [text.tokens for text in context] == [("le",)]


@pytest.mark.parametrize("text", [[], None, (), 3, [3]])
def test_a_call_without_a_text_is_refused(text: Any) -> None:
    with pytest.raises(MhaError) as caught:
        mhacli.inspect(text)
    assert caught.value.exit_code == 2


COMBINATIONS = {
    "window with a context": "run a --context c --window 2",
    "prefix with a context": "trace a --context c --prefix 2",
    "rope with a context": "run a --context c --positions rope",
    "alibi with a context": "run a --context c --positions alibi",
    "random rows with a text": "run a --random 2,3",
    "random rows with a context": "trace --random 2,3 --context c",
    "a shape that is none": "run --random 2,0",
    "documents that do not match": "run a|b --context c --documents |",
    "documents of random rows": "run --random 2,3 --documents |",
    "training without dropout": "run a --train",
    "theta without rope": "run a --rope-theta 500",
    "a table that nobody reads": "decode a --max-positions 9 --positions alibi",
    "a distribution of nothing": "run a --distribution uniform",
    "a site that the run does not pass": "run a --positions none --keep pattern,qkv",
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_options_that_mean_nothing_together_are_refused_by_name(name: str, mha: Any) -> None:
    words = COMBINATIONS[name].split()
    ended = mha(*words, "--json", code=2)
    assert any(word[2:] in ended.error["message"] for word in words if word.startswith("--"))


def test_what_is_kept_is_what_was_chosen_within_a_limit(mha: Any) -> None:
    words = [*TEXTS, *WORDS.split(), "--repeat", "1", "--json"]
    kept = mha("run", *words, "--keep", "z,q_proj").json
    assert (kept["pattern"], kept["qk"], kept["out"]) == (None, None, None)
    assert np.shape(kept["q_proj"]) == (2, 6, 36)
    sizes = {"pattern": 2 * 9 * 36 * 8, "out": 2 * 6 * 10 * 8, "z": 2 * 9 * 6 * 2 * 8}
    limited = mha("run", *words, "--keep-limit", str(sum(sizes.values()))).json
    assert set(limited["not_kept"]) == {"scores", "qk"}
    assert all(limited[name] is not None for name in sizes)
