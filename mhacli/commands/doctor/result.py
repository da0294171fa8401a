"""The result of `mha doctor` as plain data, schema `mha.doctor/1`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mhacli.commands.check import CheckStatus, ExaminedModel, HealthCheck
from mhacli.io.data import plain
from mhacli.record.display import Shown
from mhacli.text.escape import visible


@dataclass(frozen=True)
class Device:
    """A device for torch: its description, and its memory if known."""

    name: str
    what: str
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of an examination: of a checkpoint, if `model` is set, else of the installation. A library has its `name`, the
    installed `version` (None: missing), the range that mha `needs`, and the `extra` that installs it (None: always needed).
    `kernels` and `numerics` are always empty now."""

    checks: tuple[HealthCheck, ...]
    libraries: tuple[Mapping[str, str | None], ...]
    environment: Mapping[str, str]
    devices: tuple[Device, ...] = ()
    kernels: tuple[str, ...] = ()
    numerics: tuple[str, ...] = ()
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
        """The verdict in a sentence: `everything works; 1 warning: threads (9 checks pass, 1 does not apply)`."""
        n_passed, n_open = len(self.having("pass")), len(self.having("n/a"))
        counts = [f"{n_passed} check{'s' * (n_passed != 1)} pass{'es' * (n_passed == 1)}"]
        counts += [f"{n_open} do{'es' * (n_open == 1)} not apply"] if n_open else []
        parts = [] if self.failed else ["everything works"]
        for checks, word, end in ((self.failed, "problem", " found"), (self.having("care"), "warning", "")):
            names = ", ".join(check.name for check in checks)
            parts += [f"{len(checks)} {word}{'s' * (len(checks) != 1)}{end}: {names}"] if checks else []
        return f"{'; '.join(parts)} ({', '.join(counts)})"

    def to_dict(self) -> dict[str, Any]:
        """The document that `--json` prints. Non-finite numbers are null."""
        report: dict[str, Any] = plain(self)
        for check, fields in zip(self.checks, report["checks"], strict=True):
            fields["status"] = check.status
        return {"schema": "mha.doctor/1", "verdict": self.verdict, "summary": self.summary} | report
