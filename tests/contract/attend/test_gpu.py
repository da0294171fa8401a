"""The same numbers on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support import oracle
from support.layers import cells, expected, require_heads, require_near, weights_of

from mhacli.attention import attend, masks

pytestmark = pytest.mark.gpu
TEXTS = ["the cat sat | on the mat", "a dog | ran"]
SIZES = "--d-model 32 --heads 4 --kv-heads 2 --init uniform --dtype float64 --device cuda".split()


@pytest.mark.parametrize(
    ("dtype", "ceiling"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
def test_attend_on_the_device_is_the_formula(
    dtype: torch.dtype, ceiling: float, normal: Any
) -> None:
    q, k, v = (t.to(dtype) for t in (normal(2, 9, 5, 11), normal(2, 3, 7, 11), normal(2, 3, 7, 13)))
    right = oracle.attention(
        *(t.double().numpy() for t in (q, k, v)), allowed=np.tri(5, 7, 2, dtype=bool)
    )
    z = attend(q.cuda(), k.cuda(), v.cuda(), allowed=masks.causal(offset=2))
    assert (z.device.type, z.dtype) == ("cuda", dtype)
    assert np.abs(z.cpu().double().numpy() - right.z).max() <= ceiling


VARIANTS = [
    "--positions sinusoidal --padding left --causal",
    "--positions rope --documents | --window 2,0 --sink-window 1",
    "--positions alibi --prefix 2 --d-input 24",
    "--positions learned --score-bias b.st --softcap 2",
]


@pytest.mark.parametrize("command", ["run", "heads"])
@pytest.mark.parametrize("options", VARIANTS)
def test_a_command_on_the_device_computes_the_formula(
    options: str, command: str, mha: Any, tmp_path: Path
) -> None:
    bias = np.linspace(-2, 2, 4 * 6 * 6).reshape(4, 6, 6)
    bias[:, 3, 1] = -np.inf
    save_file({"bias": bias}, tmp_path / "b.st")
    words = [*TEXTS, *SIZES, *options.split()]
    run = mha("run", *words, "--save-weights", "w.st", "--repeat", "1", "--json", cold=True).json
    document = run if command == "run" else mha("heads", *words, "--json", cold=True).json
    assert document["environment"]["device"].startswith("cuda")
    assert document["self_check"]["ok"]
    right = expected(document, weights_of(tmp_path / "w.st"), bias if "bias" in options else None)
    require_heads(document["heads"], right, 1e-11)
    if command == "run":
        assert np.array_equal(np.isfinite(cells(document["scores"])), right.allowed)
        require_near(document["pattern"], right.layer.attention.pattern, 1e-12)
        require_near(document["out"], right.layer.out, 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_fewer_bits_pass_their_checks_on_the_device(dtype: str, mha: Any) -> None:
    text = "the cat sat on the mat " * 50
    words = [text, "--causal", "--device", "cuda", "--dtype", dtype, "--json"]
    assert mha("heads", *words, cold=True).json["self_check"]["ok"]
