"""`mha doctor` as a Python function, and its report, `mha.doctor/1`: a line for each check, with
advice where one fails.

Works without torch, and reports that it is missing.
"""

from __future__ import annotations

import copy
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

import mhacli
from mhacli.errors import UsageError, installing, needed_ranges
from mhacli.io.data import plain
from mhacli.io.long_work import Progress, no_progress
from mhacli.numbers import shown
from mhacli.record.shown import Shown
from mhacli.render.base.doc import Column, Table, column
from mhacli.render.base.format import count_of, flowing
from mhacli.render.base.terminal import table
from mhacli.settings import Config, Dtype, ModelSettings
from mhacli.text.escape import visible

from .result import CheckStatus, ExaminedModel, HealthCheck

if TYPE_CHECKING:
    from torch import nn

_REQUIRED = ("torch", "numpy", "safetensors", "msgspec", "typer", "rich", "jaxtyping")
_EXTRAS = {"transformers": "hf", "tokenizers": "hf", "textual": "tui", "gguf": "gguf"}


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of an examination: of a checkpoint, if `model` is set, else of the installation. A
    library has its `name`, the installed `version` (None: missing), the range that mha `needs`, and
    the `extra` that installs it (None: always needed); a device has its `name`, `what` it is, and
    its `total_bytes` and `free_bytes` of memory. `kernels` and `numerics` are always empty now.
    """

    checks: tuple[HealthCheck, ...]
    libraries: tuple[Mapping[str, str | None], ...]
    environment: Mapping[str, str]
    devices: tuple[Mapping[str, Any], ...] = ()
    kernels: tuple[str, ...] = ()
    numerics: tuple[str, ...] = ()
    model: ExaminedModel | None = None
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    seed: int = 0
    time_s: float = 0.0

    def view(self, screen: Any) -> RenderableType:
        """What `mha doctor` prints on a screen."""
        style = "bold yellow" if self.having("care") else "bold green"
        if self.failed:
            style = "bold red"
        legend = [f"note: {note}" for note in self.notes]
        if self.model is not None:
            legend = [
                "found: the largest change of a token's output, relative to the typical size of an"
                " output",
                f"at most: {self.model.tolerance}",
                *legend,
            ]
        about = flowing(map(visible, _facts(self)), screen.width, style="bold")
        checks = table(_table(self.checks), screen.width, *map(visible, legend), has_all=True)
        return Group(about, Text(), *checks, Text(), Text(self.summary, style=style))

    def __repr__(self) -> str:
        """The verdict in a sentence."""
        return f"<Report: {self.summary}>"

    @property
    def verdict(self) -> str:
        """`healthy`, or `unhealthy` where a check failed."""
        return "unhealthy" if self.failed else "healthy"

    @property
    def failed(self) -> tuple[HealthCheck, ...]:
        """The checks that failed."""
        return self.having("fail")

    def having(self, status: CheckStatus) -> tuple[HealthCheck, ...]:
        """The checks with this status; `care` is a warning."""
        return tuple(check for check in self.checks if check.status == status)

    @property
    def summary(self) -> str:
        """The verdict in a sentence: `everything works; warnings: threads (9 pass, 1 care)`."""
        parts = [] if self.failed else ["everything works"]
        for checks, word in ((self.failed, "problems"), (self.having("care"), "warnings")):
            if checks:
                parts.append(f"{word}: {', '.join(check.name for check in checks)}")
        counts = Counter(check.status for check in self.checks).most_common()
        return f"{'; '.join(parts)} ({', '.join(f'{n} {status}' for status, n in counts)})"

    def to_dict(self) -> dict[str, Any]:
        """The document that `--json` prints. Non-finite numbers are null."""
        report: dict[str, Any] = plain(self)
        for check, fields in zip(self.checks, report["checks"], strict=True):
            fields["status"] = check.status
        return {"schema": "mha.doctor/1", "verdict": self.verdict, "summary": self.summary} | report


def doctor(
    model: str | nn.Module | None = None,
    tokenizer: Any = None,
    *,
    texts: Sequence[str] = (),
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
    revision: str | None = None,
    report_progress: Progress = no_progress,
) -> Report:
    """The report on an installation or a model, as `mha doctor` prints it.

    Without `model` it examines this installation, on every device or one, in every dtype or one. A
    path or hub id is a checkpoint, examined as by `--model`; `tokenizer` is then `byte` or the path
    of a `tokenizer.json`. A transformers model in memory is copied, which takes as much memory
    again, and examined on its own device in its own dtype; `tokenizer` is then a transformers
    tokenizer, and without one the model reads random ids. Raises `MhaError` for a missing device,
    and if the model cannot be loaded or reads no text.
    """
    began = perf_counter()
    Config(device=device, dtype=dtype or "float32").resolved()  # which knows the words of both
    ranges = needed_ranges()
    libraries: list[Mapping[str, str | None]] = []
    for name in (*_REQUIRED, *_EXTRAS):
        version = None
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
        libraries.append(
            {
                "name": name,
                "version": version,
                "needs": ranges.get(name, ""),
                "extra": _EXTRAS.get(name),
            }
        )
    if model is None:
        if tokenizer is not None or texts:
            hint = "add --model DIR, or a model in Python"
            given = texts[0] if texts else tokenizer
            raise UsageError(f"{given!r:.80} needs a model", hint=hint)
        checks, devices = _check_installation(libraries, device, dtype, seed)
        about = {
            "mha": mhacli.__version__,
            "python": platform.python_version(),
            "device_asked": device,
        }
        about["platform"] = f"{platform.system()} {platform.machine()}"
        time_s = perf_counter() - began
        return Report(checks, tuple(libraries), about, devices, seed=seed, time_s=time_s)
    subject: Any = model
    if isinstance(model, str):
        subject = ModelSettings(
            path=model, revision=revision, tokenizer=tokenizer, device=device, dtype=dtype
        )
    elif device == "auto" and dtype is None:
        subject = copy.deepcopy(model)
    else:
        raise UsageError("a model in memory is examined on its own device and in its own dtype")
    from .checkpoint import examine_checkpoint

    examined, checks, notes = examine_checkpoint(
        subject, tokenizer, texts, seed=seed, report_progress=report_progress
    )
    import torch

    from mhacli.attention.environment import environment

    about = {
        name: str(value)
        for name, value in asdict(environment(torch.device(examined.device), device)).items()
        if value is not None
    }
    time_s = perf_counter() - began
    return Report(
        checks, tuple(libraries), about, model=examined, notes=notes, seed=seed, time_s=time_s
    )


def _check_installation(
    libraries: Sequence[Mapping[str, Any]], device: str, dtype: Dtype | None, seed: int
) -> tuple[tuple[HealthCheck, ...], tuple[Mapping[str, Any], ...]]:
    """The checks of the installation, and the devices of torch."""
    extras = [library for library in libraries if library["extra"] is not None]
    required = [library for library in libraries if library["extra"] is None]
    checks = _check_libraries("libraries", required), _check_libraries("extras", extras)
    try:
        from .machine import check_machine, find_devices
    except (ImportError, OSError) as fault:  # a library that torch depends on may be missing too
        missing = str(getattr(fault, "name", "")).partition(".")[0]
        name = missing if missing in _REQUIRED else "torch"
        message = f"it cannot be imported: {str(fault)[:200]}"
        advice = f"pip install --force-reinstall {name}"
        return (*checks, HealthCheck(name, False, message, advice=advice)), ()
    devices = tuple(find_devices(device))
    return (*checks, *check_machine(devices, dtype, seed)), devices


def _check_libraries(row: str, libraries: Sequence[Mapping[str, Any]]) -> HealthCheck:
    """Whether libraries have versions that mha works with. A missing extra is no fault."""
    from packaging.specifiers import SpecifierSet

    versions: list[str] = []
    unfit: list[str] = []
    is_fault = False
    for library in libraries:
        name, version = library["name"], library["version"]
        versions.append(f"{name} {version or 'missing'}")
        if version is None or not SpecifierSet(library["needs"]).contains(
            version, prereleases=True
        ):
            unfit.append(name)
            is_fault = is_fault or version is not None or name in _REQUIRED
    if not unfit:
        return HealthCheck(row, True, ", ".join(versions))
    ok = False if is_fault else None
    return HealthCheck(row, ok, ", ".join(versions), advice=installing(*unfit))


# --------------------------------------------------------------------------------------- the report

_STYLES = {"pass": "green", "fail": "bold red", "care": "yellow", "n/a": "dim"}


def _facts(report: Report) -> list[str]:
    """What was examined, and how."""
    e, model = report.environment, report.model
    if model is None:
        return [f"mha {e['mha']} doctor", f"python {e['python']}", e["platform"]]
    parts = [
        f"mha {e['mha']} doctor",
        model.path,
        f"family {model.family}",
        model.architecture,
        count_of(model.n_parameters, "parameter"),
        " stored as ".join([model.dtype, *model.stored[:1]]),
        f"attention {model.implementation}",
        model.device,
        count_of(int(e["threads"]), "thread"),
        f"torch {e['torch']}",
        f"texts of {', '.join(map(str, model.lengths))} tokens",
        f"{model.n_passes} forward passes",
    ]
    if model.revision is not None:
        parts.insert(2, f"revision {model.revision}")
    return parts


def _table(checks: Sequence[HealthCheck]) -> Table[HealthCheck]:
    """A line per check: name, status, number with its limit, and message. Below it what a fault
    means, and what to do.
    """

    def message(check: HealthCheck) -> str:
        words = visible(
            ". ".join([check.message, check.meaning] if check.meaning else [check.message])
        )
        return words + (f"\n→ {visible(check.advice)}" if check.advice else "")

    columns: list[Column[HealthCheck]] = [
        Column("check", lambda check: check.name),
        Column(
            heading="", value=lambda check: check.status, style=lambda check: _STYLES[check.status]
        ),
        column("doctor", "found", lambda check: shown(check.value, "error", 2), "id"),
        column("doctor", "tolerance", lambda check: shown(check.tolerance, "error", 2), "id"),
        Column(heading="", value=message, least=20, wraps=True),
    ]
    return Table(columns=columns, rows=checks)
