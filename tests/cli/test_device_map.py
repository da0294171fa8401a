"""`--device-map`: refused before anything is loaded where it cannot work; under torchrun the first process says it all."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints_saved import KINDS, TEXT, Checkpoints, tokenizer_of
from support.model_families import GROUPED, made
from support.processes import WITH_TORCH, Launch, attempt

from mhacli.results.record import storage
from mhacli.results.record.record import Record

CACHE = f"torchinductor_{getpass.getuser()}"
"""What torch makes beside its temporary files when transformers is imported."""
PATIENCE_S = 300
BROKEN = """
import os
if os.environ.get("RANK") == "1":
    from transformers.models.llama.modeling_llama import LlamaMLP
    def forward(self, x):
        raise RuntimeError("this rank is broken")
    LlamaMLP.forward = forward
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def of_family(name: str, checkpoints: Checkpoints) -> str:
    """The folder of a family, those among them that no other test saves."""
    if name in KINDS:
        return checkpoints.of(name)
    folder = checkpoints.root / name
    if not folder.exists():
        sizes = {"num_key_value_heads": 4} if name == "gpt_neox" else {}
        made(name, {**GROUPED, **sizes, "vocab_size": 300}, automatic="AutoModelForCausalLM").save_pretrained(folder)
        tokenizer_of(name).save_pretrained(folder)
    return str(folder)


def ranks(n: int, *words: str, modules: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`mha` in `n` processes of torchrun, which finds a free port of this machine by itself."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    surroundings |= {} if modules is None else {"PYTHONPATH": str(modules)}
    return subprocess.run(
        [*torchrun, "-m", "mhacli", *words], capture_output=True, text=True, timeout=PATIENCE_S, env=surroundings
    )


def errors(outcome: subprocess.CompletedProcess[str]) -> list[str]:
    """What mha says of errors, in however many processes."""
    return [line for line in outcome.stderr.splitlines() if line.startswith(("mha: error:", "hint:"))]


def saved(folder: Path, name: str) -> Record:
    return storage.load(str(folder / name))


# ------------------------------------------------------------------------------------------------ refused by one process


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "a", "--device-map", "auto"], "--device-map needs --model"),
        (["run", "a", "--model", "{}", "--device-map", "auto", "--device", "cpu"],
         "--device and --device-map exclude each other"),
        (["heads", "a", "--model", "{}", "--device-map", "tp"], "--device-map tp needs several processes, and this is one"),
        (["effect", "a", "--model", "{}", "--device-map", "tp"], "--device-map tp works only with mha run and mha heads"),
        (["run", "a", "--model", "{}", "--device-map", "here.json"], "--device-map here.json is neither auto nor tp nor a file"),
    ],
    ids=["own layer", "device", "one process", "effect", "no file"],
)  # fmt: skip
def test_what_cannot_work_is_refused_without_torch(
    words: Sequence[str], message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoints.of("llama")
    attempt(tmp_path, *(word.format(folder) for word in words), code=2, says=[message])


def test_a_device_that_is_not_there_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"": "cuda:77"}')
    words = ("run", TEXT, "--model", checkpoints.of("llama"), "--device-map", "map.json")
    attempt(
        tmp_path,
        *words,
        code=1,
        says=["--device-map cuda:77 is not available"],
        writes=[CACHE],
        launch=Launch(WITH_TORCH),
    )


def test_a_folder_for_weights_on_disk_is_gone_afterwards(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"": "disk"}')
    words = ("heads", TEXT, "--model", checkpoints.of("llama"), "--device-map", "map.json")
    attempt(tmp_path, *words, writes=[CACHE], launch=Launch(WITH_TORCH))


# ---------------------------------------------------------------------------------------------------- several processes


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "words", "n"),
    [
        ("llama", ["heads"], 2),
        ("llama", ["run", "--keep", "pattern,scores,qk,z"], 2),
        ("llama", ["heads", "--head", "3", "--query", "4", "--keep-z"], 2),
        ("llama", ["heads", "--head", "0,2", "--layer", "1", "--span", "a=/cat/"], 2),
        ("phi3", ["run", "--keep", "pattern,z"], 2),
        ("qwen3", ["heads"], 2),
        ("gpt_neox", ["heads"], 4),
    ],
    ids=["heads", "matrices", "second rank", "both ranks", "heads everywhere", "norms", "four"],
)
def test_heads_that_are_split_over_processes_are_those_of_one(
    name: str, words: Sequence[str], n: int, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    given = [words[0], TEXT, *words[1:], "--model", of_family(name, checkpoints), "--dtype", "float64", "--json"]
    split = ranks(n, *given, "--device-map", "tp", "--save", str(tmp_path / "split"))
    assert (split.returncode, errors(split)) == (0, []), split.stderr
    json.loads(split.stdout)  # one document, of the first process
    attempt(tmp_path, *given, "--save", "whole", writes=["whole", "split", CACHE], launch=Launch(WITH_TORCH))
    split_record, whole = saved(tmp_path, "split"), saved(tmp_path, "whole")
    assert [layer.n_heads for layer in split_record.layers] == [layer.n_heads for layer in whole.layers]
    assert [layer.n_kv_heads for layer in split_record.layers] == [layer.n_kv_heads for layer in whole.layers]
    assert split_record.self_check.ok
    assert split_record.arrays.keys() == whole.arrays.keys()
    for array_name, array in whole.arrays.items():
        np.testing.assert_allclose(split_record.arrays[array_name], array, rtol=1e-12, atol=1e-12)
    require_near(numbers([*split_record.heads]), numbers([*whole.heads]))


@pytest.mark.full
@pytest.mark.parametrize("words", [["heads"], ["run", "--keep", "pattern,scores,qk,z"]], ids=["heads", "matrices"])
def test_heads_that_are_split_over_processes_have_the_bits_of_one_where_no_sum_rounds(
    words: Sequence[str], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Each projection copies numbers, with a sign, so that its sums are exact, in one process or in two."""
    shutil.copytree(checkpoints.of("llama"), tmp_path / "llama")
    path = tmp_path / "llama" / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(0)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            chosen = torch.randint(columns, (rows, 1), generator=generator)
            signs = torch.randint(2, (rows, 1), generator=generator) * 2.0 - 1
            tensors[name] = torch.zeros_like(weight).scatter_(1, chosen, signs)
    save_file(tensors, path, metadata={"format": "pt"})
    given = [words[0], TEXT, *words[1:], "--model", str(tmp_path / "llama"), "--dtype", "float64", "--json"]
    split = ranks(2, *given, "--device-map", "tp", "--save", str(tmp_path / "split"))
    assert (split.returncode, errors(split)) == (0, []), split.stderr
    attempt(tmp_path, *given, "--save", "whole", writes=["whole", "split", "llama", CACHE], launch=Launch(WITH_TORCH))
    split_record, whole = saved(tmp_path, "split"), saved(tmp_path, "whole")
    assert split_record.heads == whole.heads
    for array_name, array in whole.arrays.items():
        np.testing.assert_array_equal(split_record.arrays[array_name], array, err_msg=array_name)


def numbers(value: Any) -> Any:
    """Data classes as plain values, of which pytest compares the numbers nearly."""
    if dataclasses.is_dataclass(value):
        return {field.name: numbers(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [numbers(each) for each in value]
    return value


def require_near(found: Any, meant: Any) -> None:
    """Every layer behind the first reads sums over the processes, whose last bits may be others."""
    if isinstance(meant, dict):
        assert found.keys() == meant.keys()
        for name in meant:
            require_near(found[name], meant[name])
    elif isinstance(meant, list):
        for one, other in zip(found, meant, strict=True):
            require_near(one, other)
    else:
        assert found == (pytest.approx(meant, rel=1e-12, abs=1e-12) if isinstance(meant, float) else meant)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "n", "message", "hint"),
    [
        ("llama", 3, "4 heads cannot be shared evenly by 3 processes", "--nproc-per-node takes a divisor of 4"),
        ("llama", 4, "2 kv heads cannot be shared evenly by 4 processes", "--nproc-per-node takes a divisor of 2"),
        ("gpt2", 2, "transformers has no plan that splits gpt2 over processes", "--device-map auto spreads its layers"),
    ],
    ids=["heads", "kv heads", "no plan"],
)  # fmt: skip
def test_a_model_that_the_processes_cannot_share_is_refused_once(
    name: str, n: int, message: str, hint: str, checkpoints: Checkpoints
) -> None:
    outcome = ranks(n, "run", TEXT, "--model", checkpoints.of(name), "--device-map", "tp")
    assert outcome.returncode != 0
    assert outcome.stdout == ""
    assert errors(outcome) == [f"mha: error: --device-map tp: {message}", f"hint: {hint}"]


@pytest.mark.full
def test_a_number_that_is_not_finite_in_the_part_of_one_process_is_told_once(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints.of("llama"), tmp_path / "llama")
    path = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.weight"][47, 3] = float("nan")  # of the last head, which the second has
    save_file(tensors, path, metadata={"format": "pt"})
    outcome = ranks(2, "run", TEXT, "--model", str(tmp_path / "llama"), "--device-map", "tp")
    assert [line for line in errors(outcome) if "NaN" in line] == [
        f"mha: error: {tmp_path / 'llama'}: layers.1.self_attn.q_proj.weight has 1 NaN or Inf"
    ]


@pytest.mark.full
def test_a_process_that_fails_alone_says_so_itself(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    outcome = ranks(2, "run", TEXT, "--model", checkpoints.of("llama"), "--device-map", "tp", modules=tmp_path)
    assert outcome.returncode != 0
    said = [line for line in errors(outcome) if "this rank is broken" in line]
    assert said == [
        "mha: error: rank 1 of 2: the forward pass of the model raised RuntimeError in layers.0.mlp (LlamaMLP) of LlamaModel: "
        "this rank is broken"
    ]
