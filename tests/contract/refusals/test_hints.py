"""The commands that the hint of a refusal names can be typed as they stand there."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.golden import SAMPLES
from support.mha import Ended

TARGETS = ("my_gpt.py:GPT", "my_port.py:ours", "my_port.py:Port")


@pytest.mark.parametrize("target", TARGETS)
def test_what_the_hint_names_for_a_whole_model_is_not_refused(
    mha: Callable[..., Ended], tmp_path: Path, target: str
) -> None:
    shutil.copytree(SAMPLES, tmp_path, dirs_exist_ok=True)
    refused = mha("trace", target, code=1)
    commands = re.findall(r"mha (?:check|trace) \S+", refused.error["hint"])
    assert [command.split()[1] for command in commands] == ["check", "trace"]
    for command, more in zip(commands, (("--length", "8"), ()), strict=True):
        mha(*shlex.split(command)[1:], *more, code=(0, 3))
