"""The face of the command line: help, panels, streams."""

import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path

from support import forks

from mhacli.cli import options
from mhacli.cli.app import COMMANDS
from mhacli.cli.commands import (
    bench,
    check,
    decode,
    diff,
    doctor,
    effect,
    explain,
    heads,
    show,
    trace,
    view,
    vocab,
    weights,
)
from mhacli.cli.shared import output

MHA = str(Path(sys.executable).with_name("mha"))
GROUPS = [
    kind
    for room in (
        options,
        bench,
        check,
        decode,
        diff,
        doctor,
        effect,
        explain,
        heads,
        output,
        show,
        trace,
        view,
        vocab,
        weights,
    )
    for kind in vars(room).values()
    if dataclasses.is_dataclass(kind) and kind.__module__ == room.__name__
]


def mha(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    home = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": "100", "LANG": "C.UTF-8"}
    program = MHA if environment else forks.program()
    return subprocess.run([program, *words], env=home | environment, capture_output=True, text=True, check=False)


def test_there_are_options_to_look_at() -> None:
    assert len(GROUPS) >= 8


def test_every_option_says_what_it_does() -> None:
    for group in GROUPS:
        for name, hint in typing.get_type_hints(group, include_extras=True).items():
            if isinstance(hint, type):  # a group in a group
                assert hint in GROUPS or hint in (output.Formats, output.SavedOutput), name
                continue
            (info,) = hint.__metadata__
            assert len(info.help or "") >= 6, f"{group.__name__}.{name} has no help text"


def test_every_command_is_looked_at() -> None:
    words = "run heads effect scan trace decode bench check doctor vocab weights show view explain diff"
    assert set(COMMANDS) == set(words.split())


def test_mha_alone_prints_its_help() -> None:
    alone = mha()
    assert alone.returncode == 0
    assert alone.stdout == mha("--help").stdout


def test_an_unknown_command_is_a_usage_error() -> None:
    done = mha("rum")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mha: error: no such command: rum\nhint: did you mean mha run?\n"


def test_options_of_run_behind_a_saved_record_get_what_to_type() -> None:
    done = mha("show", "cat.safetensors", "--causal")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "mha: error: no such option: --causal",
        "hint: a saved record stays as it was computed; mha run TEXT --causal computes another, and --save FILE saves it",
    ]
    assert "saved record" not in mha("show", "cat.safetensors", "--causality").stderr


def test_a_text_that_begins_with_a_minus_gets_the_way_out() -> None:
    done = mha("run", "-5")
    assert done.returncode == 2
    assert done.stderr == (
        "mha: error: no such option: -5\nhint: put -- before a text that begins with a minus: mha run -- '-5'\n"
    )
    assert mha("run", "--view", "none", "--", "-5").returncode == 0


def test_with_json_an_error_is_one_json_line() -> None:
    done = mha("run", "the cat", "--heads", "5", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr) == {
        "error": {
            "code": "usage",
            "message": "--heads 5 does not divide d_model 64",
            "hint": "try --heads 4 or --d-model 65, or set --d-head",
            "path": None,
            "exit": 2,
        }
    }


def test_a_bug_of_ours_is_told_in_one_line_and_shown_on_request() -> None:
    script = (
        "import sys, mhacli.cli.app as cli\n"
        "def broken(): raise ZeroDivisionError('by [red]zero\\x1b')\n"
        "cli._run_app = broken\nsys.exit(cli.main())"
    )
    plain = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert plain.returncode == 1
    assert plain.stderr == (
        "mha: error: internal error: ZeroDivisionError: by [red]zero\\x1b\n"
        "hint: this is a bug of mha; MHA_DEBUG=1 shows where it happened\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], env={"MHA_DEBUG": "1"}, capture_output=True, text=True, check=False
    )
    assert "Traceback" in told.stderr


def test_messages_go_to_stderr_and_data_to_stdout(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text('["the"]')
    done = mha("run", "the cat", "--vocab", str(vocabulary), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["sequences"][0]["ids"] == [0, 1]
    assert done.stderr == "mha: 1 of 2 tokens are not in the vocabulary and became <unk>\n"


def test_the_same_command_prints_the_same_numbers() -> None:
    first, second = (json.loads(mha("run", "the cat sat", "a b", "--json").stdout) for _ in range(2))
    for name in ("qk", "scores", "pattern", "z", "out", "heads", "vocabulary", "self_check"):
        assert first[name] == second[name], name


def test_a_byte_has_one_byte_whatever_its_name() -> None:
    rows = json.loads(mha("vocab", "né né", "--tokenizer", "byte", "--json").stdout)["tokens"]
    found = [(row["token"], row["count"], row["bytes"]) for row in rows]
    assert found == [(" ", 1, 1), ("<0xA9>", 2, 1), ("<0xC3>", 2, 1), ("n", 2, 1)]
