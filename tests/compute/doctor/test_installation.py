"""The examined installation: kernels, numerics, settings and libraries. Each fault fails its own check."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mhacli.attention import backends
from mhacli.compute.doctor import installation as doctorsurvey
from mhacli.compute.doctor import machine as doctorkernels
from mhacli.compute.doctor import machine as doctorsettings
from mhacli.compute.doctor.installation import (
    USED,
    check_libraries,
    check_threads,
    examine_installation,
    is_within,
    libraries,
)
from mhacli.compute.doctor.machine import DTYPES, numerics_of
from mhacli.errors import MhaError
from mhacli.results.bench.workload import BACKENDS
from mhacli.results.doctor import Device, HealthCheck, Library, Numerics, Report

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def examined(**choices: Any) -> Report:
    return examine_installation(**({"device": "cpu", "dtype": "float32"} | choices))


def failed(report: Report) -> list[str]:
    return [check.name for check in report.failed]


def named(report: Report, name: str) -> HealthCheck:
    return next(check for check in report.checks if check.name == name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_this_installation_is_healthy_whatever_is_drawn(seed: int) -> None:
    report = examined(dtype=None, seed=seed)
    assert failed(report) == []
    assert {(one.dtype, one.backend) for one in report.kernels} == {(d, b) for d in DTYPES for b in BACKENDS}
    assert all(one.max_error is not None and one.tolerance is not None for one in report.kernels if one.ok)
    assert all((one.max_error or 0) < 0.6 * (one.tolerance or 0) for one in report.kernels if one.ok)
    assert all(
        one.max_error < 0.6 * one.ceiling and one.row_sum_error < 0.9 * one.row_sum_ceiling for one in report.numerics
    )
    assert {one.backend for one in report.kernels if one.ok} >= {
        "explicit",
        "sdpa",
        "math",
        "flash",
        "tiled",
        "torch-mha",
    }


def test_what_torch_compiles_is_tried_only_where_it_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    prepare = doctorkernels.prepare

    def noted(backend: str, *given: Any) -> Any:
        asked.append(backend)
        if backend == "compiled":
            raise backends.UnsupportedError("no compiler here")
        return prepare(backend, *given)

    monkeypatch.setattr(doctorkernels, "prepare", noted)
    assert failed(examined()) == []
    assert "compiled" not in asked
    report = examined(compiles=True)
    kernel = next(one for one in report.kernels if one.backend == "compiled")
    assert (kernel.ok, kernel.status, kernel.reason) == (None, "unsupported", "no compiler here")


def test_a_kernel_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = backends.fused_attend
    monkeypatch.setattr(backends, "fused_attend", lambda *given, **named: fused(*given, **named) * 1.0001)
    report = examined()
    assert failed(report) == ["kernels cpu float32"]
    found = named(report, "kernels cpu float32")
    assert found.message.startswith("3 of 7 backends are wrong: sdpa differs by ")
    assert {one.backend for one in report.kernels if one.ok is False} == {"sdpa", "math", "flash"}


@pytest.mark.parametrize(("number", "said"), [(float("nan"), "sdpa results are not finite")])
def test_a_kernel_that_gives_no_numbers_is_wrong(number: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = backends.fused_attend
    monkeypatch.setattr(backends, "fused_attend", lambda *given, **named: fused(*given, **named) * number)
    assert said in named(examined(), "kernels cpu float32").message


@pytest.mark.parametrize("backend", ["explicit", "flash"])
def test_a_kernel_that_breaks_fails_only_where_it_must_exist(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("it broke")

    monkeypatch.setattr(backends, "_MAKERS", {**backends._MAKERS, backend: broken})
    report = examined()
    assert failed(report) == (["kernels cpu float32"] if backend == "explicit" else [])
    kernel = next(one for one in report.kernels if one.backend == backend)
    assert (kernel.status, kernel.reason) == ("failed", "it broke")


def _attend(change: Callable[[Tensor], Tensor], site: str) -> Callable[..., Tensor]:
    from mhacli.attention.core import attend

    def changed(q: Tensor, k: Tensor, v: Tensor, *, tap: Any = None, **named: Any) -> Tensor:
        def altered(at: str, tensor: Tensor, **where: Any) -> None:
            if tap is not None:
                tap(at, change(tensor.clone()) if at == site else tensor, **where)

        return attend(q, k, v, tap=altered, **named)

    return changed


def _leaking(pattern: Tensor) -> Tensor:
    pattern[0, 0, 3, 7] += 1e-12
    return pattern


def _uniform_where_empty(z: Tensor) -> Tensor:
    z[:, :, 0][z[:, :, 0] == 0] = 1e-9
    return z


@pytest.mark.parametrize(
    ("site", "change", "said"),
    [
        ("z", lambda z: z * 1.001, "the error is "),
        ("pattern", lambda p: p * 1.00001, "row sums differ from 1 by 1e-05, above 1e-06"),
        ("pattern", _leaking, "a masked cell has the weight 1e-12"),
        ("z", _uniform_where_empty, "a query without keys gets 1e-09"),
        ("z", lambda z: z * float("inf") if z.abs().max() > 4.4 else z, "scores × 1000 are not finite"),
    ],
)
def test_a_definition_that_is_inexact_here_is_reported(
    site: str, change: Callable[[Tensor], Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "1000" in said:
        plain = numerics_of(torch.device("cpu"), "float32", 0)
        wrong = Numerics(**{**vars(plain), "loud": False})
        monkeypatch.setattr(doctorkernels, "numerics_of", lambda *_: wrong)
    else:
        monkeypatch.setattr(doctorkernels, "attend", _attend(change, site))
    report = examined()
    assert failed(report) == ["numerics cpu float32"]
    assert said in named(report, "numerics cpu float32").message


# --------------------------------------------------------------------------------------------------------------- settings


def test_another_default_dtype_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert doctorsettings._default_dtype().message == "torch makes tensors of float64 by default"
    assert doctorsettings._default_dtype().ok is False


def test_a_lower_precision_of_products_fails() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        found = doctorsettings._precision()
    finally:
        torch.set_float32_matmul_precision(before)
    assert (found.ok, doctorsettings._precision().ok) == (False, True)
    assert "set_float32_matmul_precision('highest')" in found.advice


def test_deterministic_algorithms_need_a_workspace_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device("cuda:0", "a card", None, None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert doctorsettings._deterministic([card]).ok is False
    assert doctorsettings._deterministic([]).ok is True
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert doctorsettings._deterministic([card]).ok is True


def test_a_card_that_this_torch_cannot_use_is_to_be_taken_care_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctorsettings, "nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctorsettings._build([]).status == "care"
    monkeypatch.setattr(doctorsettings, "nvidia_driver", lambda: False)
    assert doctorsettings._build([]).status == "pass"


@pytest.mark.parametrize(("fault", "status"), [(None, "pass"), ("it is raining", "care")])
def test_a_kernel_for_statistics_that_cannot_run_on_a_device_is_to_be_taken_care_of(
    fault: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctorsettings, "kernel_fault", lambda device, dtype: fault)
    check = doctorsettings._reducer([Device("cuda:0", "a card", None, None)])
    assert check.status == status
    assert (fault is None) or fault in check.message
    assert doctorsettings._reducer([Device("cpu", "a processor", None, None)]).status == "n/a"


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(MhaError, match=r"^--device cuda:9: there is no such device here, only cpu"):
        doctorsettings.devices("cuda:9", doctorsurvey.cpu())
    assert [one.name for one in doctorsettings.devices("cpu", doctorsurvey.cpu())] == ["cpu"]


# -------------------------------------------------------------------------------------------------------------- libraries


def test_the_ranges_are_those_of_the_project() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = [*project["dependencies"], *(one for many in project["optional-dependencies"].values() for one in many)]
    for one in libraries():
        line = next(line.partition("#")[0] for line in wanted if line.startswith(one.name))
        assert sorted(one.needs.split(",")) == sorted(line.removeprefix(one.name).strip().split(","))
        assert one.version == (metadata.version(one.name) if one.version else None)
    assert [one.name for one in libraries()] == list(USED)


@pytest.mark.parametrize(
    ("version", "needs", "within"),
    [("5.23.0", "<6,>=5.3", True), ("4.57.1", "<6,>=5.3", False), ("6.0", "<6,>=5.3", False), ("2.13.0+cpu", ">=2.6", True),
     ("2.6", ">=2.6.0", True), ("2.5.9", ">=2.6", False), ("unknown", ">=1", True), ("1.0", "", True), ("1.2", "!=1.2", False)],
)  # fmt: skip
def test_versions_lie_within_ranges_or_not(version: str, needs: str, within: bool) -> None:
    assert is_within(version, needs) is within


def test_extras_that_are_missing_are_no_fault_and_wrong_versions_are() -> None:
    here = Library("torch", "2.13.0", ">=2.6", None)
    ok, extras = check_libraries(
        (here, Library("transformers", None, ">=5.3,<6", "hf"), Library("textual", None, "", "tui"))
    )
    assert (ok.ok, extras.status) == (True, "n/a")
    assert extras.message == (
        'not installed: transformers, textual. pip install "transformers<6,>=5.3" "textual<9,>=8" installs them'
    )
    wrong, _ = check_libraries((here, Library("transformers", "4.57.1", "<6,>=5.3", "hf")))
    assert (wrong.ok, wrong.message) == (False, "transformers is 4.57.1, but mha needs <6,>=5.3")
    assert wrong.advice == 'pip install "transformers<6,>=5.3" brings what is needed'
    gone, _ = check_libraries((here, Library("numpy", None, ">=1.26", None)))
    assert (gone.ok, gone.message) == (False, "numpy is missing")


def test_threads_that_wait_for_each_other_are_a_caution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctorsurvey, "n_cpus", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert (check_threads(9).status, check_threads(9).value, check_threads(9).tolerance) == ("care", 9, 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (check_threads(1).status, check_threads(1).message) == ("pass", "1 of 4 cores (OMP_NUM_THREADS=1)")
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    assert check_threads(4).status == "care"


def test_a_document_holds_no_number_that_json_lacks() -> None:
    checks = (HealthCheck("a", False, "m", float("nan"), float("inf")), HealthCheck("b", None, "n", is_caution=True))
    told = Report(checks, (), (("mha", "0"),)).to_dict()
    assert (told["schema"], told["verdict"], told["environment"]) == ("mha.doctor/1", "unhealthy", {"mha": "0"})
    assert [(one["value"], one["tolerance"], one["status"]) for one in told["checks"]] == [
        (None, None, "fail"),
        (None, None, "care"),
    ]
