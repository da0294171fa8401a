"""The result of `mha doctor` as plain data, schema `mha.doctor/1`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mhacli.commands.check import CheckStatus, ExaminedModel, HealthCheck
from mhacli.io.data import plain
from mhacli.record.display import Shown


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of an examination: of a checkpoint, if `model` is set, else of the installation. A library has its `name`, the
    installed `version` (None: missing), the range that mha `needs`, and the `extra` that installs it (None: always needed); a
    device has its `name`, `what` it is, and its `total_bytes` and `free_bytes` of memory. `kernels` and `numerics` are always
    empty now."""

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

    def views(self, screen: Any) -> Iterator[Any]:
        """What `mha doctor` prints on a screen."""
        from mhacli.commands.doctor.view import doctor_view

        yield doctor_view(self, screen)

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
            parts += [f"{word}: {', '.join(check.name for check in checks)}"] if checks else []
        counts = Counter(check.status for check in self.checks).most_common()
        return f"{'; '.join(parts)} ({', '.join(f'{n} {status}' for status, n in counts)})"

    def to_dict(self) -> dict[str, Any]:
        """The document that `--json` prints. Non-finite numbers are null."""
        report: dict[str, Any] = plain(self)
        for check, fields in zip(self.checks, report["checks"], strict=True):
            fields["status"] = check.status
        return {"schema": "mha.doctor/1", "verdict": self.verdict, "summary": self.summary} | report
