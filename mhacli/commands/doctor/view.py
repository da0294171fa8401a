"""The report of `mha doctor`: facts, a line per check, and a numbered list of problems with advice."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.commands.check import ExaminedModel, HealthCheck
from mhacli.commands.doctor.result import Report
from mhacli.io.files import format_size
from mhacli.record.glossary import words_of
from mhacli.render.base.format import count_of, filled
from mhacli.render.base.options import Screen
from mhacli.text.escape import visible

_STYLES = {"pass": "green", "fail": "bold red", "care": "yellow", "n/a": "dim"}
_WORDS = {"care": "warning"}
"""Statuses whose words on screen differ from those in JSON."""
_NO_NUMBER = "–"


def doctor_view(report: Report, on: Screen) -> RenderableType:
    """The complete output of `mha doctor`."""
    model = report.model
    facts = _machine(report, on) if model is None else [_patient(model, report, on), Text()]
    legend = _INSTALLATION if model is None else _legend(model, report.checks)
    parts = [*facts, _checks(report.checks), Text(), Text(legend, style="dim")]
    notes = [Text(), *(Text(f"note: {visible(note)}") for note in report.notes)] if report.notes else []
    return Group(*parts, *_findings(report.failed + report.having("care")), *notes, Text(), _summary(report))


# ------------------------------------------------------------------------------------------------------------------- facts


def _machine(report: Report, on: Screen) -> list[RenderableType]:
    about = report.environment
    head = [f"mha {about['mha']} doctor", f"python {about['python']}", about["platform"]]
    required = [library for library in report.libraries if library["version"] and not library["extra"]]
    head += [f"{library['name']} {library['version']}" for library in required]
    lines: list[RenderableType] = [_joined(head, on, "bold")]
    extras = [f"{each['name']} {each['version'] or 'missing'}" for each in report.libraries if each["extra"]]
    lines.append(_joined(["extras: " + extras[0], *extras[1:]] if extras else [], on, ""))
    for device in report.devices:
        parts = [f"{device.name}: {device.what}"]
        parts += [] if device.total_bytes is None else [f"memory {format_size(device.total_bytes)}"]
        parts += [] if device.free_bytes is None else [f"{format_size(device.free_bytes)} free"]
        lines.append(_joined(parts, on, ""))
    return [*lines, Text()]


def _patient(model: ExaminedModel, report: Report, on: Screen) -> RenderableType:
    about = report.environment
    stored = "as stored" if _is_stored(model) else f"stored as {' and '.join(model.stored[:3])}"
    head = [
        f"mha {about['mha']} doctor",
        model.path,
        *([] if model.revision is None else [f"revision {model.revision}"]),
    ]
    facts = [
        f"family {model.family}",
        model.architecture,
        count_of(model.n_parameters, "parameter", grouped=True),
        f"{model.dtype} {stored}",
        f"attention {model.implementation}",
        model.device,
        count_of(int(about["threads"]), "thread"),
        f"torch {about['torch']}",
        f"texts of {', '.join(map(str, model.lengths))} tokens",
        f"{model.n_passes} forward pass{'es' * (model.n_passes != 1)}",
    ]
    return Group(_joined(head, on, "bold"), _joined(facts, on, ""))


def _is_stored(model: ExaminedModel) -> bool:
    """Whether the computation uses the dtype of most stored numbers."""
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return not model.stored or names.get(model.stored[0]) == model.dtype


def _joined(parts: Sequence[str], on: Screen, style: str) -> Text:
    return Text("\n".join(filled([visible(part) for part in parts], on.width)), style=style) if parts else Text()


# ------------------------------------------------------------------------------------------------------------------ checks


_INSTALLATION = "found: of attention, the largest difference from float64. at most: what rounding explains."


def _checks(checks: Sequence[HealthCheck]) -> RenderableType:
    """A line per check: name, status, number with its limit, and message."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("found", "tolerance"):
        table.add_column(words_of("columns", "doctor")[name].heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for check in checks:
        style, word = _STYLES[check.status], _WORDS.get(check.status, check.status)
        numbers = (Text(_number(check.value)), Text(_number(check.tolerance), style="dim"))
        message = Text(visible(check.message), style="dim" if check.status == "n/a" else "")
        table.add_row(Text(visible(check.name)), Text(word, style=style), *numbers, message)
    return table


def _number(value: float | None) -> str:
    """A number in seven columns: `0`, `2`, `3.4e-07`, `0.25`."""
    if value is None:
        return _NO_NUMBER
    if value == int(value) if abs(value) < 1e15 else False:
        return str(int(value))
    return f"{value:.2g}" if 1e-2 <= abs(value) < 1e3 else f"{value:.1e}"


def _legend(model: ExaminedModel, checks: Sequence[HealthCheck]) -> str:
    """The meaning of a check's two numbers, which differs for `repeat`, `finite`, `bos` and `row-sums`."""
    of_repeat = [
        f"repeat: at most {_number(check.tolerance)}, above what a different order of summation changes, "
        "below what dropout changes."
        for check in checks
        if check.name == "repeat" and check.tolerance is not None
    ]
    return "\n".join(
        [
            "found: the largest change of a token's output, relative to the typical size of an output.",
            f"at most: {model.tolerance}.",
            *of_repeat,
            "finite and bos: counts. row-sums: the largest deviation of a row sum from 1, or of a recomputed output.",
        ]
    )


def _findings(findings: Sequence[HealthCheck]) -> list[RenderableType]:
    """The problems, then the warnings, numbered, each with its advice."""
    parts: list[RenderableType] = []
    for place, check in enumerate(findings, start=1):
        line = Text()
        line.append(f"{place}. {visible(check.name)}: ", style=_STYLES[check.status])
        line.append(visible(check.message) + "." + (f" {visible(check.meaning)}" if check.meaning else ""))
        described: list[RenderableType] = [line]
        if check.advice:
            described.append(Text(f"   → {visible(check.advice)}"))
        parts += [Text(), *described]
    return parts


def _summary(report: Report) -> Text:
    style = "bold red" if report.failed else "bold yellow" if report.having("care") else "bold green"
    return Text(visible(report.summary), style=style)
