"""`mha doctor` examines the installation: libraries, extras, devices, threads, and attention in
each dtype against float64.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from support.mha import Ended, run

import mhacli

Mha = Callable[..., Ended]
PROJECT = Path(__file__).parents[3] / "pyproject.toml"
MISSING = "raise ImportError('it is not installed', name=__name__)\n"
DTYPES = ("float64", "float32", "float16", "bfloat16")
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The document of this installation."""
    return dict(
        run(
            tmp_path_factory.mktemp("doctor"), "doctor", "--device", "cpu", "--json", "--seed", "3"
        ).json
    )


def check_of(document: Document, name: str) -> Document:
    (check,) = [check for check in document["checks"] if check["name"] == name]
    return dict(check)


def failing(document: Document) -> list[str]:
    return [check["name"] for check in document["checks"] if check["ok"] is False]


def test_this_installation_is_healthy_and_nothing_fails(healthy: Document) -> None:
    assert (healthy["schema"], healthy["verdict"], healthy["model"], healthy["seed"]) == (
        "mha.doctor/1",
        "healthy",
        None,
        3,
    )
    assert failing(healthy) == []
    assert healthy["command"][1] == "doctor"
    for check in healthy["checks"]:
        assert (
            check["status"] == "care" or check["ok"] is {"pass": True, "n/a": None}[check["status"]]
        )
    assert {"libraries", "extras", "threads"} <= {check["name"] for check in healthy["checks"]}


def test_the_environment_is_that_of_this_machine(healthy: Document) -> None:
    assert healthy["environment"]["mha"] == mhacli.__version__
    assert [device["name"] for device in healthy["devices"]] == ["cpu"]
    assert 0 < healthy["devices"][0]["free_bytes"] < healthy["devices"][0]["total_bytes"]


def test_every_library_has_its_version_and_the_range_of_the_project(healthy: Document) -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    needed = {re.split(r"[<>=!;\[ ]", line)[0]: line for line in reversed(lines)}
    names = {library["name"] for library in healthy["libraries"]}
    assert {"torch", "numpy", "safetensors", "typer", "rich", "transformers"} <= names
    for library in healthy["libraries"]:
        parts = (
            needed[library["name"]].removeprefix(library["name"]).split(";")[0].strip().split(",")
        )
        assert sorted(library["needs"].split(",")) == sorted(part.strip() for part in parts)
        try:
            version = metadata.version(library["name"])
        except metadata.PackageNotFoundError:
            version = None
            assert library["extra"] is not None
        assert library["version"] == version


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_in_a_dtype_is_as_close_to_float64_as_its_rounding_allows(
    healthy: Document, dtype: str
) -> None:
    """The largest error lies within its tolerance, which is a small number of roundings of numbers
    of size one to ten.
    """
    numbers = [check for check in healthy["checks"] if check["name"].endswith(f" cpu {dtype}")]
    assert numbers
    for check in numbers:
        assert check["ok"]
        assert 0 <= check["value"] <= check["tolerance"]
        assert EPSILON[dtype] < check["tolerance"] < 2e4 * EPSILON[dtype]


def test_text_has_a_line_for_every_check_and_the_verdict_last(mha: Mha) -> None:
    done = mha("doctor", "--device", "cpu", "--dtype", "float32", env={"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    for word in ("torch", "numpy", "cpu", "float32", "libraries", "extras", "threads"):
        assert word in done.stdout
    assert "float16" not in done.stdout
    assert "works" in lines[-1]
    assert max(map(len, lines)) <= 80
    coloured = mha(
        "doctor", "--device", "cpu", "--dtype", "float32", "--color", "always", colour=True
    ).stdout
    assert "\x1b[" in coloured.splitlines()[-1]


def test_the_block_that_computes_statistics_is_named(mha: Mha) -> None:
    words = ("doctor", "--device", "cpu", "--dtype", "float32", "--json")
    check = check_of(mha(*words, env={"MHA_BLOCK": "torch"}).json, "statistics")
    assert (check["status"], check["message"].split()[0]) == ("pass", "torch")


@pytest.mark.parametrize("name", ["torch", pytest.param("numpy", marks=pytest.mark.real)])
def test_a_library_that_cannot_be_imported_is_a_failure(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, "doctor", "--json", code=3, modules={name: MISSING})
    document = done.json
    assert (document["verdict"], failing(document)) == ("unhealthy", [name])
    assert "it is not installed" in check_of(document, name)["message"]


@pytest.mark.real
def test_a_version_outside_its_range_is_a_failure_with_a_way_to_mend_it(tmp_path: Path) -> None:
    """A file of metadata that stands before that of the installed library says another version."""
    place = tmp_path / "modules" / "rich-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 1.0\n")
    words = ("doctor", "--device", "cpu", "--dtype", "float32", "--json")
    document = run(tmp_path, *words, code=3, modules={"unused": ""}).json
    assert failing(document) == ["libraries"]
    check = check_of(document, "libraries")
    assert "rich" in check["message"]
    assert "1.0" in check["message"]
    assert "pip install" in check["advice"]


@pytest.mark.real
def test_settings_of_the_environment_are_judged(tmp_path: Path) -> None:
    """Rounded products are a failure with a way to mend it, more threads than cores are a
    caution.
    """
    words = ("doctor", "--device", "cpu", "--dtype", "float32", "--json")
    env = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "OMP_NUM_THREADS": "999"}
    document = run(tmp_path, *words, code=3, env=env, cold=True).json
    assert len(failing(document)) == 1
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in check_of(document, failing(document)[0])["advice"]
    threads = check_of(document, "threads")
    assert threads["status"] == "care"
    assert threads["value"] > threads["tolerance"]


def test_settings_of_torch_that_change_numbers_are_named() -> None:
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        document = mhacli.doctor(device="cpu", dtype="float32").to_dict()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
    assert failing(document) == ["attention cpu float32"]
    assert "TF32" in check_of(document, "attention cpu float32")["message"]
    assert check_of(document, "default dtype")["status"] == "care"
    assert "float64" in check_of(document, "default dtype")["message"]


def test_the_function_gives_the_same_report(healthy: Document) -> None:
    document = mhacli.doctor(device="cpu", dtype="float32", seed=3).to_dict()
    assert (document["schema"], document["verdict"]) == ("mha.doctor/1", "healthy")
    for check in document["checks"]:
        if check["name"].endswith("float32"):
            assert check["value"] == check_of(healthy, check["name"])["value"]
