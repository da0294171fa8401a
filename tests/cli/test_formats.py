"""A new format of output: two files of the product, and every command that prints records has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mhacli

RENDERER = '''
"""A record in one line per head."""

from collections.abc import Iterator

from mhacli.results.record.record import Record


def pieces(record: Record) -> Iterator[str]:
    """One line per head, with its number."""
    yield from (f"head {head.head} of {len(record.sequences[0].tokens)} tokens\\n" for head in record.heads)
'''
FUNCTION = """def _madeup(record: Record, options: ViewOptions) -> Iterator[str]:
    from mhacli.render import madeup

    return madeup.pieces(record)


FORMATS: """
ROW = '    "madeup": Format("Print one line per head.", _madeup),\n    "csv": Format('
TEXT = "the cat sat on the mat"
LINES = "head 0 of 6 tokens\nhead 1 of 6 tokens\n"


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A folder with a copy of the package to which a format is added, as text, in two files."""
    folder = tmp_path_factory.mktemp("package")
    package = Path(mhacli.__file__).parent
    shutil.copytree(package, folder / "mhacli", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "mhacli/render/madeup.py").write_text(RENDERER)
    table = folder / "mhacli/cli/shared/output.py"
    source = table.read_text()
    assert source.count("FORMATS: ") == source.count('    "csv": Format(') == 1
    table.write_text(source.replace("FORMATS: ", FUNCTION).replace('    "csv": Format(', ROW))
    return folder


def mha(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "mhacli", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


@pytest.mark.full
def test_a_format_that_two_files_add_is_there_in_run_and_in_show(changed):
    computed = mha(changed, "run", TEXT, "--heads", "2", "--madeup", "--save", "cat.safetensors")
    assert (computed.returncode, computed.stdout) == (0, LINES)
    shown = mha(changed, "show", "cat.safetensors", "--madeup")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, LINES, "")


def test_its_option_stands_in_the_help_and_excludes_the_others(changed):
    assert "--madeup" in mha(changed, "show", "--help-all").stdout
    assert "--madeup" in mha(changed, "heads", "--help-all").stdout
    assert "--madeup" not in mha(changed, "trace", "--help-all").stdout
    both = mha(changed, "show", "cat.safetensors", "--json", "--madeup")
    assert (both.returncode, json.loads(both.stderr)["error"]["code"]) == (2, "usage")
