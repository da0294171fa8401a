"""`pytest --mha FILE.py:NAME`: targets of `mha check` as tests, and the report below a test that
asserts what `mhacli.check` finds.

pytest imports this file in all its runs, so it imports nothing of mha before it is needed.
PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import pytest


class _AsTheyAre:
    """Finds the modules of mhacli as Python does. pytest would rewrite all of them, because the
    package has a plugin: on an import that takes longer than an examination.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Where a module of mhacli is; None for any other."""
        return PathFinder.find_spec(name, path) if name.startswith("mhacli.") else None


class _Target(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.mha = (*namespace.mha, (values,))


class _Argument(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if not namespace.mha:
            raise argparse.ArgumentError(self, "there is no --mha before it")
        *others, target = namespace.mha
        namespace.mha = (*others, (*target, values))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the options; `mha` becomes each target with its arguments, in their order."""
    group = parser.getgroup("mha", "attention that mha checks")
    group.addoption(
        "--mha",
        action=_Target,
        default=(),
        metavar="TARGET",
        help="A test that runs `mha check` of FILE.py:NAME or of the checkpoint in DIR; repeatable."
        " Where no path is typed, nothing else is collected.",
    )
    group.addoption(
        "--mha-arg",
        action=_Argument,
        metavar="NAME=VALUE",
        help="Argument of the constructor of the --mha before it; repeatable.",
    )
    group.addoption(
        "--no-annotations",
        action="store_true",
        help="Print no annotations of GitHub for what mha finds.",
    )


@pytest.hookimpl(tryfirst=True)  # before the user's first file, which may import mhacli
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Has the modules of mhacli imported as they are."""
    sys.meta_path.insert(0, _AsTheyAre)
    early_config.add_cleanup(lambda: sys.meta_path.remove(_AsTheyAre))


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker, and has the targets collected."""
    config.addinivalue_line("markers", "mha: a target of --mha")
    if config.option.mha:
        from mhacli.commands.check.in_pytest import Targets

        config.pluginmanager.register(Targets(config), "mha-targets")


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # after what turns failures into other outcomes
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Adds what an examination found to the report of its test."""
    outcome: Any = yield
    if "mhacli.commands.check.result" in sys.modules:
        from mhacli.commands.check.in_pytest import complete

        complete(outcome.get_result(), item, call.excinfo)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what the examinations found."""
    reports = [each for kind in terminalreporter.stats.values() for each in kind]
    reports = [report for report in reports if hasattr(report, "mha")]
    if reports and not hasattr(terminalreporter.config, "workerinput"):  # a worker of xdist
        from mhacli.commands.check.in_pytest import summarize

        summarize(terminalreporter, reports)
