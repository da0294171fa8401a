"""`mha run` computes attention: every tensor and every statistic of every variant, from the saved
weights by the formula.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import oracle, some
from support.layers import KEPT, cells, expected, require_heads, require_near, weights_of

TEXTS = ["the cat | sat on the", "a | cat sat", "mat | on a cat"]
CONTEXTS = ["a mat sat | the cat on mat", "the | mat", "on on | cat a the"]
N_HEADS, Q_LEN, K_LEN = 6, 5, 7
SIZES = "--d-model 11 --d-input 9 --heads 6 --kv-heads 2 --d-head 4 --d-v 8"
PACKED, LEFT = "--documents |", "--padding left"
BIAS = torch.randn(
    N_HEADS, Q_LEN, K_LEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64
)
BIAS[1, 2, :4], BIAS[:, 4, 1], BIAS[3, 0] = -torch.inf, -torch.inf, -torch.inf
BIASES = {
    "cell": BIAS[0, 0, 0],
    "keys": BIAS[0, 0, :Q_LEN],
    "rows": BIAS[:, :Q_LEN, :Q_LEN][0],
    "heads": BIAS[:, :Q_LEN, :Q_LEN],
    "head": BIAS[:, :1, :1],
    "batch": BIAS[:3, None, :1, :Q_LEN],
    "cross": BIAS,
}

VARIANTS = {
    "plain": "",
    "causal, left": f"--causal {LEFT}",
    "causal, documents": f"--causal {PACKED}",
    "window before": "--window 2",
    "window both sides": f"--window 1,2 {LEFT}",
    "window, causal": f"--window 1,1 --causal {PACKED} {LEFT}",
    "prefix": "--prefix 2",
    "prefix, documents": f"--prefix 2 {PACKED}",
    "sink window, left": f"--window 1,1 --sink-window 2 --causal {LEFT}",
    "sink window, documents": f"--window 1,0 --sink-window 1 {PACKED} {LEFT}",
    "prefix, window and sink": f"--prefix 2 --window 0,0 --sink-window 1 {LEFT}",
    "no positions": "--positions none --causal",
    "learned": "--positions learned --max-positions 7",
    "learned, left, documents": f"--positions learned --max-positions 7 {LEFT} {PACKED}",
    "rope": "--positions rope --rope-theta 50 --causal",
    "rope, left": f"--positions rope --rope-theta 50 {LEFT} --window 2,1",
    "rope, documents": f"--positions rope {PACKED} --prefix 2",
    "interleaved, left, documents": f"--positions rope-interleaved {LEFT} {PACKED} --causal",
    "alibi, left, causal": f"--positions alibi {LEFT} --causal",
    "alibi, documents": f"--positions alibi {PACKED} --window 1,2 --sink-window 1",
    "alibi, softcap, bias": "--positions alibi --softcap 1.25 --scale 4 --score-bias b.st:heads",
    "softcap": "--softcap 0.5 --scale 1.5",
    "large scores": f"--scale 1000 {LEFT} --causal",
    "bias of one number": "--score-bias b.st:cell",
    "bias of keys": "--score-bias b.st:keys",
    "bias of queries and keys": "--score-bias b.st:rows --causal",
    "bias of heads": f"--score-bias b.st:heads {LEFT}",
    "bias of head alone": "--score-bias b.st:head",
    "bias of the batch": f"--score-bias b.st:batch {PACKED}",
    "scale, softcap and bias": "--score-bias b.st:heads --softcap 1.25 --scale 4 --positions rope",
    "one key head": "--kv-heads 1 --causal",
    "all key heads": "--kv-heads 6",
    "one head": "--heads 1 --kv-heads 1",
    "no output projection": "--no-out-proj --d-head 2 --d-v 5",
    "no biases": f"--no-bias --d-v 3 {LEFT}",
    "odd width of heads": "--d-head 3 --d-v 1",
    "widths derived": "--d-model 12 --d-input 12 --d-head 2 --d-v 2",
    "normal weights": "--init normal --no-bias",
    "xavier weights": "--init xavier --causal",
    "dropout outside of training": "--dropout 0.5",
    "random rows": "--random 2,5 --positions rope",
    "uniform random rows": "--random 3,4 --distribution uniform --positions alibi --causal",
}
CROSS = {
    "cross, left": LEFT,
    "cross, documents, left": f"{PACKED} {LEFT} --positions none",
    "cross, learned": f"--positions learned --max-positions 7 {LEFT}",
    "cross, bias": "--score-bias b.st:cross --softcap 2",
    "cross, no output projection": "--no-out-proj --kv-heads 6 --no-bias",
    "one context for all": "--kv-heads 1",
}
NARROW = {
    "float32": ("--dtype float32", 2e-6),
    "float32, alibi, left": (f"--dtype float32 --positions alibi {LEFT} --causal", 2e-6),
    "float32, rope, softcap": ("--dtype float32 --positions rope --softcap 2 --kv-heads 6", 2e-6),
    "float32, cross, bias": ("--dtype float32 --score-bias b.st:cross", 2e-6),
    "float16": ("--dtype float16 --causal", 5e-3),
    "float16, rope, left": (f"--dtype float16 --positions rope {LEFT}", 5e-3),
    "bfloat16": ("--dtype bfloat16", 4e-2),
    "bfloat16, bias": ("--dtype bfloat16 --score-bias b.st:heads --positions learned", 4e-2),
}


def words_of(name: str, options: str) -> list[str]:
    texts = [] if "--random" in options else TEXTS
    contexts = [] if "cross" not in name and "context" not in name else CONTEXTS
    contexts = contexts[:1] if "one context" in name else contexts
    words = [*SIZES.split(), "--init", "uniform", "--seed", "5", *options.split()]
    return [*texts, *(word for text in contexts for word in ("--context", text)), *words]


def record_of(
    mha: Any, folder: Path, name: str, options: str, command: str = "run", *more: str
) -> tuple[Any, Any, Any]:
    """The JSON of a run, the weights that it saved, and what the formula says of it."""
    save_file({name: bias.contiguous().clone() for name, bias in BIASES.items()}, folder / "b.st")
    words = words_of(name, options)
    keep = [] if command == "heads" else ["--keep", ",".join(KEPT)]
    save = [] if "--random" in options and command == "heads" else ["--save-weights", "w.st"]
    repeat = [] if command == "heads" else ["--repeat", "1"]
    dtype = [] if "--dtype" in options else ["--dtype", "float64"]
    document = mha(command, *words, *dtype, *keep, *save, *repeat, *more, "--json").json
    bias = BIASES[options.split("b.st:")[1].split()[0]] if "b.st:" in options else None
    weights = weights_of(folder / "w.st")
    if bias is not None:
        bias = bias.to(getattr(torch, document["config"]["dtype"])).double().numpy()
    return document, weights, expected(document, weights, bias)


def require_tensors(document: Any, right: Any, tolerance: float) -> None:
    """Every tensor is that of the formula. A masked cell has no score and exactly no weight."""
    layer, allowed = right.layer, right.allowed
    assert document["self_check"]["ok"]
    assert (document["not_kept"], document["nonfinite"]) == ([], {})
    tensors = {
        "x": right.x,
        "q": layer.q,
        "k": layer.k,
        "v": layer.v,
        "pattern": layer.attention.pattern,
        "z": layer.attention.z,
        "concat": layer.concat,
        "out": layer.out,
    }
    for name, tensor in tensors.items():
        require_near(document[name], tensor, tolerance, name)
    pattern = cells(document["pattern"])
    for name, tensor in {"qk": layer.attention.qk, "scores": layer.attention.scores}.items():
        assert np.array_equal(np.isfinite(cells(document[name])), allowed), name
        require_near(cells(document[name])[allowed], tensor[allowed], tolerance, name)
    assert (pattern[~allowed] == 0).all()
    assert (cells(document["z"])[~allowed.any(axis=-1)] == 0).all()


def require_rows(document: Any, right: Any, tolerance: float) -> None:
    """Entropy and strongest key of every query."""
    pattern, has_key = right.layer.attention.pattern, right.allowed.any(axis=-1)
    require_near(document["entropy"], oracle.entropy(pattern), tolerance, "entropy")
    strongest = np.array(document["strongest_key"])
    assert np.array_equal(strongest >= 0, has_key)
    weight = np.take_along_axis(pattern, np.maximum(strongest, 0)[..., None], axis=-1)[..., 0]
    assert (weight[has_key] >= pattern.max(axis=-1)[has_key] - tolerance).all()


RARE = {
    "window before",
    "rope, left",
    "bias of one number",
    "bias of head alone",
    "bias of keys",
    "all key heads",
    "widths derived",
    "normal weights",
    "uniform random rows",
    "one context for all",
    "causal, left",
    "causal, documents",
    "window both sides",
    "prefix",
    "sink window, left",
    "learned",
    "softcap",
    "bias of heads",
    "no positions",
}
"""Variants whose parts others have together."""


@pytest.mark.parametrize("name", some([*VARIANTS, *CROSS], default={*VARIANTS, *CROSS} - RARE))
def test_a_run_computes_the_formula(name: str, mha: Any, tmp_path: Path) -> None:
    document, _, right = record_of(mha, tmp_path, name, {**VARIANTS, **CROSS}[name])
    tolerance = 1e-12 if "large" not in name else 1e-9
    require_tensors(document, right, tolerance)
    require_rows(document, right, tolerance)
    require_heads(document["heads"], right, 10 * tolerance)


@pytest.mark.parametrize(
    "name", some(NARROW, default=("float32", "float32, cross, bias", "float16", "bfloat16"))
)
def test_a_run_in_fewer_bits_computes_the_formula_up_to_rounding(
    name: str, mha: Any, tmp_path: Path
) -> None:
    options, tolerance = NARROW[name]
    document, _, right = record_of(mha, tmp_path, name, options)
    require_tensors(document, right, tolerance)
    require_rows(document, right, 4 * tolerance)
    scores = np.where(right.allowed, cells(document["scores"]), -np.inf)
    epsilon = torch.finfo(getattr(torch, document["config"]["dtype"])).eps
    assert np.abs(oracle.softmax(scores) - cells(document["pattern"])).max() <= epsilon, (
        "softmax in float32"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_text_of_few_tokens_passes_the_self_check(dtype: str, mha: Any) -> None:
    text = (
        "a b c d e f g h a c e g b d f h a a b " * 120
    )  # sums of equal terms round in one direction
    words = "--heads 1 --d-model 2 --repeat 1 --keep out --seed 1 --json --dtype".split()
    document = mha("run", text, *words, dtype).json
    assert document["self_check"]["ok"]
    assert document["self_check"]["tolerance"] < 0.2 * np.abs(document["out"]).max()


def test_the_tolerance_of_a_tiny_output_is_tiny(mha: Any) -> None:
    document = mha(
        "run", "a b c", "--init", "normal", "--dtype", "bfloat16", "--repeat", "1", "--json"
    ).json
    check = document["self_check"]
    assert 0 < check["max_abs_error"] <= check["tolerance"] < 0.2 * np.abs(document["out"]).max()


def test_the_largest_seed_draws_vectors_as_any_other(mha: Any) -> None:
    layer = ("--d-model", "4", "--heads", "2", "--repeat", "1")
    words = ("run", "--random", "1,3", *layer, "--keep", "x", "--json")
    vectors = mha(*words, "--seed", str(2**64 - 1)).json["x"]
    assert np.isfinite(vectors).all()
    assert vectors != mha(*words, "--seed", "0").json["x"]
