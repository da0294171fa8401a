"""Code that ends its process in some calls: the report names the call, and this one goes on."""

from __future__ import annotations

import faulthandler
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import some, user_code

import mhacli

CASES = Path(__file__).with_name("cases")
PATH = CASES / "crashing.py"
CRASHING = user_code.load(PATH)

ENDS = {
    "reads_elsewhere": ("ended the process by Segmentation fault (signal 11)", ", 65, "),
    "aborts_backward": ("the backward pass of", "q [4, "),
    "exits": ("ended the process with exit status 7", "[1, 1, 33, 128]"),
    "Layer": ("ended the process by Aborted (signal 6)", "x [3, 65, 32] float64"),
    "Model": ("ended the process by Aborted (signal 6)", "ids [1, 256] int64"),
}
"""How each ends its process, and the first call that does."""


@pytest.mark.parametrize("name", ENDS)
def test_an_object_that_ends_its_process_is_wrong_in_a_call_that_is_named(name: str) -> None:
    examination = user_code.check(getattr(CRASHING, name))
    (finding,) = examination.findings
    assert (examination.verdict, finding.code) == ("wrong", "crashes")
    words, call = ENDS[name]
    assert words in finding.evidence
    assert call in finding.where
    if name != "exits":  # no signal shows its line
        assert finding.file == str(PATH)
        assert finding.source
    assert examination.called
    assert examination.environment["torch"]
    assert bool(examination.arguments) == name.istitle()


@pytest.mark.parametrize("name", some([*ENDS], default=("reads_elsewhere", "Model")))
def test_a_name_that_ends_its_process_gives_the_same_report(mha: Any, name: str) -> None:
    document = json.loads(mha("check", f"{PATH}:{name}", "--json", code=3).stdout)
    (finding,) = document["findings"]
    assert finding["code"] == "crashes"
    assert ENDS[name][1] in finding["where"]
    assert document["called"]
    assert document["environment"]["torch"]
    assert ("reading" in document["printed"]) == (name == "reads_elsewhere")


def test_a_crash_before_the_call_is_known_is_an_error() -> None:
    with pytest.raises(mhacli.MhaError, match="ended the process by Aborted") as raised:
        user_code.check(CRASHING.aborts_at_once)
    assert raised.value.code == "crashed"
    assert "its last call: q [" in str(raised.value.hint)


def test_a_time_limit_holds_for_objects_too_and_names_the_call() -> None:
    faulthandler.dump_traceback_later(600)  # whose thread is missing in a copy of this process
    try:
        with pytest.raises(mhacli.MhaError, match="took longer than 1 seconds") as raised:
            user_code.check(CRASHING.hangs, time_limit_s=1.0)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert raised.value.code == "too-slow"
    assert ", 65, " in str(raised.value.hint)
    assert "time.sleep(600)" in str(raised.value.hint)


def test_an_object_is_examined_as_it_is_and_changes_nothing_here() -> None:
    seen = []

    def attend(q: Any, k: Any, v: Any) -> Any:
        print("attending")
        seen.append(os.getpid())
        return CRASHING.plain(q, k, v)

    examination = user_code.check(attend)
    assert examination.verdict == "right"
    assert "attending" in examination.printed
    assert not seen


def test_code_that_is_checked_cannot_check(tmp_path: Path) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        mhacli.check(CRASHING.plain)
        return CRASHING.plain(q, k, v)

    with pytest.raises(mhacli.MhaError, match="cannot check other code"):
        user_code.check(attend)
