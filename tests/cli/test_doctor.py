"""`mha doctor` as a process: what it prints, how it ends, and how it fares where something is missing or wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.processes import WITH_TORCH, Launch, Outcome, attempt, bufferings, forms

MISSING = "raise ImportError('it is not installed', name=__name__)\n"


ONE = {"OMP_NUM_THREADS": "1"}
"""Threads of tiny products only wait for each other."""


def installed(*words: str, folder: Path, code: int = 0, env: Mapping[str, str] = ONE) -> Outcome:
    chosen = Launch(modules=WITH_TORCH, env=ONE | env)
    return attempt(folder, "doctor", *words, code=code, launch=chosen)


def document(
    *words: str, folder: Path, code: int = 0, env: Mapping[str, str] = ONE, modules: Mapping[str, str] = WITH_TORCH
) -> dict[str, Any]:
    done = attempt(folder, "doctor", *words, code=code, form=["--json"], launch=Launch(modules=modules, env=ONE | env))
    return dict(json.loads(done.stdout))


def failing(told: dict[str, Any]) -> list[str]:
    return [check["name"] for check in told["checks"] if check["ok"] is False]


# ---------------------------------------------------------------------------------------------------------- the installation


def test_a_healthy_installation_in_words(tmp_path: Path) -> None:
    done = installed(folder=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mha 0.")
    assert lines[-1].startswith("everything works")
    for word in ("cpu:", "explicit", "flash", "tiled", "float64", "bfloat16", "attend", "precision", "threads"):
        assert word in done.stdout
    assert "libraries      pass" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_no_line_is_wider_than_the_screen_but_a_table(columns: str, tmp_path: Path) -> None:
    done = installed("--dtype", "float32", folder=tmp_path, env={"COLUMNS": columns})
    widest = max(map(len, done.stdout.splitlines()))
    assert widest <= max(int(columns), 80)


def test_a_healthy_installation_as_a_document(tmp_path: Path) -> None:
    told = document("--dtype", "float32", "--seed", "3", folder=tmp_path)
    assert (told["schema"], told["verdict"], told["seed"], told["model"]) == ("mha.doctor/1", "healthy", 3, None)
    assert {"name", "ok", "value", "tolerance", "message", "layer", "meaning", "advice", "status"} <= told["checks"][
        0
    ].keys()
    assert {row["backend"] for row in told["kernels"]} >= {
        "explicit",
        "sdpa",
        "flash",
        "efficient",
        "cudnn",
        "flex",
        "tiled",
    }
    assert all(row["max_error"] <= row["tolerance"] for row in told["kernels"] if row["ok"])
    assert all(row["reason"] for row in told["kernels"] if row["ok"] is None)
    assert [row["dtype"] for row in told["numerics"]] == ["float32"]
    assert told["numerics"][0]["ok"]
    assert told["command"][1] == "doctor"


def test_colour_only_where_it_is_asked_for(tmp_path: Path) -> None:
    words = ("doctor", "--dtype", "float64", "--color", "always")
    done = attempt(tmp_path, *words, colour=True, launch=Launch(modules=WITH_TORCH, env=ONE))
    assert "\x1b[1;32meverything works" in done.stdout or "\x1b[1;33meverything works" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("surroundings", "check", "advice"),
    [
        ({"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "precision", "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    ],
)
def test_settings_that_change_numbers_fail(
    surroundings: dict[str, str], check: str, advice: str, tmp_path: Path
) -> None:
    told = document("--dtype", "float32", folder=tmp_path, code=3, env=surroundings)
    assert failing(told) == [check]
    assert next(one for one in told["checks"] if one["name"] == check)["advice"] == advice
    assert told["verdict"] == "unhealthy"


@pytest.mark.sampled(1)
def test_what_fails_is_told_with_what_to_do(tmp_path: Path) -> None:
    done = installed("--dtype", "float32", folder=tmp_path, code=3, env={"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"})
    assert "1. precision: products of float32 may be rounded" in done.stdout
    assert "   → unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in done.stdout
    assert done.stderr == ""


@pytest.mark.full
def test_threads_that_do_not_suit_are_a_caution(tmp_path: Path) -> None:
    told = document("--dtype", "float64", folder=tmp_path, env={"OMP_NUM_THREADS": "9999"})
    found = next(one for one in told["checks"] if one["name"] == "threads")
    assert (told["verdict"], found["status"]) == ("healthy", "care")
    assert "more threads than cores" in found["message"]


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_library_that_cannot_be_imported_is_told(name: str, tmp_path: Path) -> None:
    told = document(folder=tmp_path, code=3, modules={name: MISSING})
    assert failing(told) == [name]
    assert "it is not installed" in next(check["message"] for check in told["checks"] if check["name"] == name)
    assert told["kernels"] == []


# --------------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("transformers")
    from support.checkpoints_saved import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("checkpoints")).of("gpt2")


def copied(gpt2: str, place: Path, name: str = "model") -> str:
    shutil.copytree(gpt2, place / name)
    return str(place / name)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Where transformers may make its folders."""
    surroundings = ONE | {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        [forks.program(), "doctor", *words], cwd=folder, env=surroundings, capture_output=True, text=True, check=False
    )


def test_a_healthy_checkpoint_in_words_and_as_a_document(gpt2: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--model", gpt2, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "causality      pass        0  " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("everything works")
    told = json.loads(run(tmp_path, "--model", gpt2, "--device", "cpu", "--json", "the cat sat", "a dog").stdout)
    assert (told["schema"], told["verdict"], told["model"]["dtype"]) == ("mha.doctor/1", "healthy", "float32")
    assert told["environment"]["device"] == "cpu"


def test_a_faulty_checkpoint_ends_with_3_and_harmless_names(gpt2: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copied(gpt2, tmp_path, "red\x1b[31m")
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["transformer.h.0.ln_1.weight"][3] = float("nan")
    save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    done = run(tmp_path, "--model", folder, "--device", "cpu")
    assert (done.returncode, done.stderr) == (3, "")
    assert "\x1b" not in done.stdout
    assert "red\\x1b[31m" in done.stdout.replace("\n", "")
    assert "1. finite: 1 NaN or Inf in weights, the first in transformer.h.0.ln_1.weight" in done.stdout
    json_form = run(tmp_path, "--model", folder, "--device", "cpu", "--json")
    assert json_form.returncode == 3
    assert json.loads(json_form.stdout)["verdict"] == "unhealthy"
    assert json_form.stderr == ""


@forms
@bufferings
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--model", "nowhere/x"], 1, "nowhere/x"),
        (["--model", "./nowhere"], 1, "./nowhere does not exist"),
        (["--model", "empty"], 1, "empty"),
        (["--model", "."], 1, "."),
        (["--model", "empty", "--revision", "main"], 2, "--revision"),
        (["--model", "empty", "--compile"], 2, "--compile does not work with --model"),
        (["--model", "empty", " "], 1, "text 0 is empty or white space"),
        (["some text"], 2, "a text works only with --model: 'some text'"),
        (["--text", "."], 2, "a text works only with --model: '.'"),
        (["--revision", "x"], 2, "--revision needs --model"),
        (["--tokenizer", "byte"], 2, "--tokenizer needs --model"),
        (["--device", "gpu"], 2, "--device gpu "),
        (["--dtype", "int8"], 2, "dtype"),
        (["--seed", "-1"], 2, "--seed -1 "),
    ],
)
def test_bad_input_is_told_without_torch(
    words: list[str], code: int, says: str, form: Sequence[str], buffering: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    if words[:2] == ["--model", "nowhere/x"]:
        (tmp_path / "nowhere").mkdir()
    attempt(tmp_path, "doctor", *words, code=code, form=form, says=[says], launch=Launch(env=buffering))


def test_a_device_that_is_not_here_is_told(tmp_path: Path) -> None:
    done = attempt(tmp_path, "doctor", "--device", "cuda:9", code=1, launch=Launch(modules=WITH_TORCH, env=ONE))
    assert "--device cuda:9" in done.stderr
