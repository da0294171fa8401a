"""A workflow of GitHub, run here step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from .mha import environment


@dataclass(frozen=True)
class Step:
    """A command line, and how it ended."""

    line: str
    code: int
    stdout: str
    stderr: str


def run_workflow(text: str, folder: Path) -> list[Step]:
    """The steps of a workflow's only job in a folder, up to the first that fails, in the shell and
    the variables that a runner of GitHub has. Actions are there already. `pip` is a program that
    does nothing: what it would install is the environment of the tests.
    """
    (job,) = yaml.safe_load(text)["jobs"].values()
    programs = folder.with_name("programs")
    programs.mkdir(exist_ok=True)
    (programs / "pip").write_text("#!/bin/sh\n")
    (programs / "pip").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment(
        folder, PATH=path, CI="true", GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(folder)
    )
    steps: list[Step] = []
    for line in (step["run"] for step in job["steps"] if "run" in step):
        ended = subprocess.run(
            ["bash", "-e", "-c", line],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        steps.append(Step(line, ended.returncode, ended.stdout, ended.stderr))
        if ended.returncode:
            break
    return steps
