"""What each command of commands.txt prints and writes is in approved.txt, which `pytest
tests/golden --approve` writes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import pytest
from support import golden


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A case for each command. The slow ones are approved together with the others."""
    approving = metafunc.config.getoption("--approve")
    rows = [
        pytest.param(
            one,
            id=golden.key(one),
            marks=[pytest.mark.real] if one.is_real and not approving else [],
        )
        for one in golden.commands()
    ]
    if "command" in metafunc.fixturenames:
        metafunc.parametrize("command", rows)


@pytest.fixture(scope="session")
def newly_approved(request: pytest.FixtureRequest) -> Iterator[dict[str, str] | None]:
    """Where `--approve` puts the texts, which are written at the end; None without it."""
    if not request.config.getoption("--approve"):
        yield None
        return
    texts: dict[str, str] = {}
    yield texts
    golden.write_approved(texts)


def test_a_command_prints_what_is_approved(
    command: golden.Command, newly_approved: dict[str, str] | None
) -> None:
    printed = golden.printed(command.section)[command.line]
    assert printed.fault == ""
    text = golden.text_of(command, printed)
    expected = golden.approved().get(golden.key(command), "")
    now = golden.with_near_numbers_of_old(text, expected)
    if newly_approved is not None:
        newly_approved[golden.key(command)] = now
    elif now != expected:
        changes = difflib.unified_diff(
            expected.split("\n"), now.split("\n"), "approved", "printed", lineterm=""
        )
        pytest.fail(f"{golden.key(command)}\n" + "\n".join(changes), pytrace=False)


def test_every_approved_text_belongs_to_a_command(newly_approved: dict[str, str] | None) -> None:
    keys = [golden.key(command) for command in golden.commands()]
    assert len(set(keys)) == len(keys)
    assert newly_approved is not None or golden.approved().keys() == set(keys)
