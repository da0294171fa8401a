"""The report of `mha doctor`: a line for each check, with the advice where one fails, and the verdict last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.commands.check import ExaminedModel, HealthCheck
from mhacli.commands.doctor.run import Report
from mhacli.render.base.doc import Column, Table, column
from mhacli.render.base.format import count_of, filled
from mhacli.render.base.options import Screen
from mhacli.render.base.terminal import table
from mhacli.text.escape import visible
from mhacli.text.numbers import shown

_STYLES = {"pass": "green", "fail": "bold red", "care": "yellow", "n/a": "dim"}


def doctor_view(report: Report, on: Screen) -> RenderableType:
    """The complete output of `mha doctor`."""
    style = "bold red" if report.failed else "bold yellow" if report.having("care") else "bold green"
    verdict = Text(visible(report.summary), style=style)
    if report.model is None:
        e = report.environment
        verdict.append(f"  mha {e['mha']} · python {e['python']} · {e['platform']}", style="dim not bold")
        return Group(*table(_table(_in_brief(report), has_numbers=False), on.width), verdict)
    legend = [
        "found: the largest change of a token's output, relative to the typical size of an output",
        f"at most: {report.model.tolerance}",
        *(f"note: {note}" for note in report.notes),
    ]
    explained = Text("\n".join(map(visible, legend)), style="dim")
    about = Text("\n".join(filled(_facts(report, report.model), on.width)), style="bold")
    checks = table(_table(report.checks, has_numbers=True), on.width)
    return Group(about, Text(), *checks, Text(), explained, Text(), verdict)


_NAMED = 2
"""The libraries that are named where all fit."""


def _in_brief(report: Report) -> list[HealthCheck]:
    """The checks of an installation. Libraries that fit have one line, and so has attention that is right on a device."""
    right = [check for check in report.checks if check.name.startswith("attention ") and check.ok]
    brief = [check for check in report.checks if check not in right]
    required = [f"{library['name']} {library['version']}" for library in report.libraries if library["extra"] is None]
    if brief[0].ok and len(required) > _NAMED:
        words = f"{', '.join(required[:_NAMED])} and {len(required) - _NAMED} more (--json)"
        brief[0] = HealthCheck(brief[0].name, True, words)
    for device, of_device in groupby(right, key=lambda check: check.name.rpartition(" ")[0]):
        errors = [f"{shown(check.value, 'error', 2)} in {check.name.rpartition(' ')[2]}" for check in of_device]
        brief.append(HealthCheck(device, True, f"largest difference from float64: {', '.join(errors)}"))
    return brief


def _facts(report: Report, model: ExaminedModel) -> list[str]:
    """What was examined, and how."""
    parts = [
        f"mha {report.environment['mha']} doctor", model.path, f"family {model.family}", model.architecture,
        count_of(model.n_parameters, "parameter"), " stored as ".join([model.dtype, *model.stored[:1]]),
        f"attention {model.implementation}", model.device, count_of(int(report.environment["threads"]), "thread"),
        f"torch {report.environment['torch']}", f"texts of {', '.join(map(str, model.lengths))} tokens",
        f"{model.n_passes} forward passes",
    ]  # fmt: skip
    parts[2:2] = [] if model.revision is None else [f"revision {model.revision}"]
    return [visible(part) for part in parts]


def _table(checks: Sequence[HealthCheck], *, has_numbers: bool) -> Table[HealthCheck]:
    """A line per check: name, status, number with its limit, and message. Below it what a fault means, and what to do."""

    def message(check: HealthCheck) -> str:
        words = visible(". ".join([check.message, check.meaning] if check.meaning else [check.message]))
        return words + (f"\n→ {visible(check.advice)}" if check.advice else "")

    columns: list[Column[HealthCheck]] = [
        Column(heading="check" if has_numbers else "", value=lambda check: visible(check.name)),
        Column(
            heading="",
            value=lambda check: "warning" if check.status == "care" else check.status,
            style=lambda check: _STYLES[check.status],
        ),
        Column(heading="", value=message, least=20, wraps=True),
    ]
    if has_numbers:
        columns[2:2] = [
            column("doctor", "found", lambda check: shown(check.value, "error", 2), "id"),
            column("doctor", "tolerance", lambda check: shown(check.tolerance, "error", 2), "id"),
        ]
    return Table(columns=columns, rows=checks)
