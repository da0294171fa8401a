"""Targets as tests of pytest, and the reports of examinations in its output."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mhacli.errors import MhaError
from mhacli.text.escape import visible

from .acceptance import untried_beside
from .annotations import annotations, print_annotations
from .result import CheckRequest, Examination
from .run import examined_or_refused
from .table import request_of, requests_of


class Targets:
    """The targets of `--mha`, of which those are collected whose ids are typed, or all where no id
    is. Raises `pytest.UsageError` for an unknown id.
    """

    def __init__(self, config: pytest.Config) -> None:
        named = _named(each for words in config.option.mha for each in _requests(*words))
        is_typed = config.args_source == pytest.Config.ArgsSource.ARGS
        typed = config.args if is_typed else []
        ids = {arg: arg.partition("mha::")[2] for arg in typed if re.match(r"(\.\./)*mha::", arg)}
        config.args = [arg for arg in typed if arg not in ids]
        if unknown := set(ids.values()) - named.keys():
            problem = f"--mha names no {', '.join(unknown)}"
            raise pytest.UsageError(f"{problem}; there is {', '.join(named)}")
        self.requests = {name: named[name] for name in ids.values() or named}

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """Puts the targets first: `--last-failed` skips files behind one that failed."""
        outcome: Any = yield
        if isinstance(collector, pytest.Session):
            path = collector.config.rootpath / "mha"
            targets = _Collected.from_parent(collector, path=path, requests=self.requests)
            outcome.get_result().result.insert(0, targets)


def _requests(target: str, *arguments: str) -> tuple[CheckRequest, ...]:
    """What a target of `--mha` and its arguments request."""
    is_table = target.endswith(".toml")
    key = "model" if os.path.isdir(target) else "target"
    if arguments and (is_table or key == "model"):
        raise pytest.UsageError(f"--mha-arg: {target} has no constructor")
    stated = {key: target} | ({"arg": arguments} if arguments else {})
    try:
        return requests_of(Path(target)) if is_table else (request_of(stated, os.getcwd()),)
    except MhaError as fault:
        raise pytest.UsageError(f"{fault.typed_message}. {fault.typed_hint or ''}") from None


def _named(requests: Iterable[CheckRequest]) -> dict[str, CheckRequest]:
    """Each request by its target; those that repeat one have numbers."""
    named = dict[str, CheckRequest]()
    for request in requests:
        name = target = visible(request.model or request.target or "")
        numbers = count(2)
        while name in named:
            name = f"{target}[{next(numbers)}]"
        named[name] = request
    return named


class _Collected(pytest.File):
    """All targets, in what looks like a file `mha`."""

    def __init__(self, *, requests: dict[str, CheckRequest], **of_node: Any) -> None:
        super().__init__(**of_node)
        self.requests = requests

    def collect(self) -> Iterator[pytest.Item]:
        """A test of each target."""
        for name, request in self.requests.items():
            yield Target.from_parent(self, name=name, request=request)


class Target(pytest.Item):
    """A test that examines a target."""

    def __init__(self, *, request: CheckRequest, **of_node: Any) -> None:
        super().__init__(**of_node)
        self.request = request
        self.examination: Examination | None = None
        self.add_marker("mha")

    def runtest(self) -> None:
        """Fails with the report if the target is wrong, not decided, or refused."""
        request = replace(self.request, import_path=tuple(sys.path))  # pytest has added folders
        self.examination = examination = examined_or_refused(request)
        self.user_properties += _properties(examination)
        if not examination.ok:
            pytest.fail(str(examination), pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """The title of its failure."""
        return self.path, None, f"mha {self.name}"


def _properties(examination: Examination) -> list[tuple[str, object]]:
    """The verdict, the behaviours, those that were not tried, the mistakes, and those accepted."""
    words = {True: "holds", False: "fails", None: "noted"}
    tried = [f"{one.name} {words[one.ok]}" for one in examination.behaviour if not one.was_omitted]
    untried = [one.name for one in examination.behaviour if one.was_omitted]
    if examination.is_accepted:
        untried += untried_beside(examination)
    return [
        ("verdict", examination.verdict),
        ("behaviours", ", ".join(tried)),
        ("not tried", ", ".join(dict.fromkeys(untried))),
        ("mistakes", ", ".join(finding.code for finding in examination.findings)),
        ("accepted", "; ".join(f"{each.code}: {each.reason}" for each in examination.accepted)),
    ]


def complete(report: Any, item: pytest.Item, failure: Any) -> None:
    """Adds an examination to the report of its test: that of a target, or one about which an
    assertion failed, with its report below. `failure` is pytest's of an exception, or None.
    """
    crash = getattr(report.longrepr, "reprcrash", None)  # not of all kinds of tests
    if isinstance(item, Target):
        examination = item.examination if report.when == "call" else None
    else:
        examination = _asserted(failure) if report.failed and crash else None
        if examination is not None and str(examination) not in str(failure.value):
            report.longrepr.addsection("mha", str(examination))
    if examination is None:
        return
    if crash:
        crash.message = examination.headline  # the short summary has its beginning
    summary = visible(" ".join(examination.summary.split()))
    report.mha = {"summary": summary, "annotations": [*annotations(examination)]}


def _asserted(failure: Any) -> Examination | None:
    """The examination whose `.ok` an assertion wants, or whose report is its text. The frame of the
    assertion has the object, also one without a name.
    """
    if failure is None or not isinstance(failure.value, AssertionError):
        return None
    text = str(failure.value)
    frame = failure.traceback[-1].frame
    for value in (*frame.f_locals.values(), *frame.f_globals.values()):
        if isinstance(value, Examination) and (f"{value!r}.ok" in text or str(value) == text):
            return None if value.ok else value
    return None


def summarize(terminal: Any, reports: Iterable[Any]) -> None:
    """Prints what was found of each target that passed, with `-v` of all and by behaviour, and the
    annotations.
    """
    is_verbose = terminal.config.option.verbose > 0
    of_targets = [report for report in reports if "mha" in report.keywords]
    shown = [report for report in of_targets if is_verbose or report.passed]
    if shown:
        terminal.section("mha")
    for report in shown:
        terminal.line(f"{report.nodeid}: {report.mha['summary']}")
        for name, words in report.user_properties:
            if words and (is_verbose or name in ("not tried", "accepted")):
                terminal.line(f"  {name}: {visible(words)}")
    terminal.ensure_newline()
    terminal.flush()
    if not terminal.config.option.no_annotations:
        print_annotations(line for report in reports for line in report.mha["annotations"])
