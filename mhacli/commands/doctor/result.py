"""The result of `mha doctor` as plain data, schema `mha.doctor/1`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mhacli.io.data import plain
from mhacli.models.folder import Checkpoint
from mhacli.record.display import Shown
from mhacli.settings import Dtype
from mhacli.text.escape import visible

HealthVerdict = Literal["healthy", "unhealthy"]
CheckStatus = Literal["pass", "fail", "n/a", "care"]


@dataclass(frozen=True)
class DoctorRequest:
    """The checkpoint to examine, by path or id, and its folder if already read.

    Without `texts` it reads default sentences. `tokenizer` and `dtype` None are the checkpoint's own.
    """

    source: str
    checkpoint: Checkpoint | None = None
    texts: tuple[str, ...] = ()
    revision: str | None = None
    tokenizer: str | None = None
    device: str = "auto"
    dtype: Dtype | None = None
    seed: int = 0
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class HealthCheck:
    """A check and its result. `ok` is None for a warning (`is_caution`), and if the check does not apply (see
    `message`).

    `value` is the measured number and `tolerance` the largest that passes. `layer` is the first attention with the
    fault. `meaning` says how a failure affects results, and `advice` what to do.
    """

    name: str
    ok: bool | None
    message: str
    value: float | None = None
    tolerance: float | None = None
    layer: str | None = None
    is_caution: bool = False
    meaning: str = ""
    advice: str = ""

    @property
    def status(self) -> CheckStatus:
        """The result in a word; `care` is a warning."""
        if self.ok is None:
            return "care" if self.is_caution else "n/a"
        return "pass" if self.ok else "fail"


@dataclass(frozen=True)
class Library:
    """A library of mha: the installed version (None: missing), the required range, and the extra that installs it
    (None: always needed)."""

    name: str
    version: str | None
    needs: str
    extra: str | None


@dataclass(frozen=True)
class Device:
    """A device for torch: its description, and its memory if known."""

    name: str
    what: str
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True)
class Kernel:
    """A backend's result on a device in a dtype: the largest error against float64, or the reason for having none.

    `ran` is the kernel that ran. `ok` is None if the backend does not exist here or was not tried.
    """

    device: str
    dtype: str
    backend: str
    status: str
    ok: bool | None
    max_error: float | None = None
    tolerance: float | None = None
    ran: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Numerics:
    """The exactness of `attend` on a device in a dtype: errors with their limits, and properties that must hold
    exactly.

    `forbidden` is the largest weight of a masked cell, `empty` the largest number for a query without keys, and `loud`
    whether scores × 1000 stay finite with rows that sum to 1.
    """

    device: str
    dtype: str
    max_error: float
    ceiling: float
    row_sum_error: float
    row_sum_ceiling: float
    forbidden: float
    empty: float
    loud: bool

    @property
    def ok(self) -> bool:
        """Whether all errors and properties are within their limits."""
        is_exact = self.forbidden == 0 and self.empty == 0 and self.loud
        return is_exact and self.max_error <= self.ceiling and self.row_sum_error <= self.row_sum_ceiling


@dataclass(frozen=True)
class ExaminedModel:
    """The examined checkpoint. `stored` are the dtypes of its tensors, the most frequent first; `lengths` are the
    lengths of its texts."""

    path: str
    revision: str | None
    family: str
    architecture: str
    n_parameters: int
    dtype: str
    stored: tuple[str, ...]
    implementation: str
    device: str
    lengths: tuple[int, ...]
    n_passes: int
    tolerance: str


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of an examination. Either `model` is set, or `kernels` and `numerics` are (for the installation)."""

    checks: tuple[HealthCheck, ...]
    libraries: tuple[Library, ...]
    environment: Mapping[str, str]
    devices: tuple[Device, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    numerics: tuple[Numerics, ...] = ()
    model: ExaminedModel | None = None
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    seed: int = 0
    time_s: float = 0.0

    def views(self, screen: Any) -> Iterator[Any]:
        """What `mha doctor` prints on a screen."""
        from mhacli.commands.doctor.view import doctor_view

        yield doctor_view(self, screen)

    def __repr__(self) -> str:
        """The object of the examination and the verdict in a sentence."""
        return f"<Report on {'this installation' if self.model is None else visible(self.model.path)}: {self.summary}>"

    @property
    def verdict(self) -> HealthVerdict:
        """Whether any check failed."""
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
        """The verdict in a sentence: `everything works; 1 warning: threads (9 checks pass, 1 does not apply)`."""
        n_passed, n_open = len(self.having("pass")), len(self.having("n/a"))
        counts = [f"{n_passed} check{'s' * (n_passed != 1)} pass{'es' * (n_passed == 1)}"]
        counts += [f"{n_open} do{'es' * (n_open == 1)} not apply"] if n_open else []
        parts = [] if self.failed else ["everything works"]
        for checks, word, end in ((self.failed, "problem", " found"), (self.having("care"), "warning", "")):
            names = ", ".join(check.name for check in checks)
            parts += [f"{len(checks)} {word}{'s' * (len(checks) != 1)}{end}: {names}"] if checks else []
        return f"{'; '.join(parts)} ({', '.join(counts)})"

    @property
    def findings(self) -> tuple[HealthCheck, ...]:
        """The failures, then the warnings."""
        return self.failed + self.having("care")

    def to_dict(self) -> dict[str, Any]:
        """The document that `--json` prints. Non-finite numbers are null."""
        report: dict[str, Any] = plain(self)
        for check, fields in zip(self.checks, report["checks"], strict=True):
            fields["status"] = check.status
        for row, fields in zip(self.numerics, report["numerics"], strict=True):
            fields["ok"] = row.ok
        return {"schema": "mha.doctor/1", "verdict": self.verdict, "summary": self.summary} | report
