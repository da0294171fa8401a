"""A text that is the path of something: refused without torch, with the option that was meant, unless it is taken as it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.processes import attempt, forms
from support.records import make_record

from mhacli.cli.options import SourceOptions
from mhacli.cli.shared.request import typed_texts
from mhacli.text.encode import Decoding


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("poem.txt", "my poem.txt", "Makefile", "-poem"):
        (tmp_path / name).write_text("the cat sat on the mat\n")
    (tmp_path / "MiniLM").mkdir()
    (tmp_path / "MiniLM" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "queue")
    make_record(("the", "cat")).save(str(tmp_path / "cat.safetensors"))
    (tmp_path / "layer.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return tmp_path


@forms
@pytest.mark.parametrize("command", ["run", "heads", "trace", "decode", "vocab"])
@pytest.mark.parametrize(
    "path", ["poem.txt", "./poem.txt", "MiniLM", "MiniLM/", "notes", "Makefile", "broken", "queue", "."]
)
def test_a_path_is_not_taken_for_a_text(command: str, path: str, form: Sequence[str], folder: Path) -> None:
    outcome = attempt(folder, command, path, form=form, code=2, says=(repr(path), f"--text {path}"))
    assert not outcome.stdout
    if form:
        assert (outcome.error["code"], outcome.error["path"]) == ("usage", path)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run", "poem.txt"], "--file poem.txt"),
        (["run", "my poem.txt"], "--file 'my poem.txt'"),
        (["vocab", "the cat", "Makefile"], "--file Makefile"),
        (["heads", "MiniLM"], "--model MiniLM"),
        (["decode", "MiniLM/"], "--model MiniLM/"),
        (["doctor", "notes"], "--model notes"),
        (["doctor", "Makefile"], '"$(cat Makefile)"'),
        (["trace", "notes"], "--file FILE"),
        (["vocab", "MiniLM"], "--file FILE"),
        (["run", "cat.safetensors"], "mha show cat.safetensors"),
        (["heads", "layer.safetensors"], "mha weights info layer.safetensors"),
        (["doctor", "poem.txt"], '"$(cat poem.txt)"'),
        (["run", "queue"], "--file queue"),
        (["run", "broken"], "--text broken"),
        (["run", "missing.txt"], "--text missing.txt"),
        (["run", "the cat", "--csv", "a.csv"], "--csv > a.csv"),
        (["run", "the cat", "--csv", "poem.txt"], "--csv > poem.txt"),
        (["heads", "the cat", "Missing.SAFETENSORS"], "--text Missing.SAFETENSORS"),
        (["run", "the cat", "--context", "poem.txt"], '--context "$(cat poem.txt)"'),
    ],
    ids=str,
)
def test_the_hint_names_what_was_meant(words: Sequence[str], meant: str, folder: Path) -> None:
    attempt(folder, *words, code=2, says=(f"hint: {meant}",))


def test_the_message_says_what_is_there(folder: Path) -> None:
    outcome = attempt(folder, "run", "poem.txt", code=2)
    assert outcome.stderr == (
        "mha: error: 'poem.txt' is a file, not a text\n"
        "hint: --file poem.txt reads it; --text poem.txt inspects the word itself\n"
    )


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["--text", "notes"], ["notes"]),
        (["--text", "notes", "--text", "the cat"], ["cat", "notes", "the"]),
        (["the cat", "--text", "notes"], ["cat", "notes", "the"]),
        (["--", "notes"], ["notes"]),
        (["--tokenizer", "char", "--text", "-"], ["-"]),
        (["the notes"], ["notes", "the"]),
        (["poem"], ["poem"]),
        (["--text", "missing.txt", "--punctuation", "keep"], [".", "missing", "txt"]),
        (["3.14", "--punctuation", "keep"], ["3.14"]),
        (["the poem.txt", "--punctuation", "keep"], [".", "poem", "the", "txt"]),
    ],
    ids=str,
)
def test_a_text_is_taken_as_it_is_where_that_is_said_or_nothing_has_its_name(
    words: Sequence[str], tokens: list[str], folder: Path
) -> None:
    assert sorted({*attempt(folder, "vocab", "--json", *words).tokens} - {"<unk>"}) == tokens


@pytest.mark.parametrize("folder_of_context", ["notes", "MiniLM"])
def test_a_context_is_refused_as_a_text_is(folder_of_context: str, folder: Path) -> None:
    words = ["heads", "the cat", "--context", folder_of_context]
    outcome = attempt(folder, *words, form=("--json",), code=2)
    assert outcome.error["path"] == folder_of_context


@forms
@pytest.mark.parametrize(
    ("words", "code", "meant"),
    [
        (["show"], 2, "mha show cat.safetensors takes the newest of 1 in this folder"),
        (["diff"], 2, "--save cat.safetensors makes one"),
        (["diff", "cat.safetensors"], 2, "mha diff cat.safetensors another.safetensors compares both"),
        (["show", "MiniLM"], 1, "mha weights info MiniLM"),
        (["show", "poem.txt"], 1, "mha run --file poem.txt"),
        (["diff", "cat.safetensors", "poem.txt"], 1, "mha run --file poem.txt"),
        (["check"], 2, "mha check my.py:Attention"),
        (["check", "MiniLM"], 2, "mha doctor --model MiniLM"),
        (["check", "poem.txt"], 2, "FILE.py:NAME"),
        (["check", "a.py:A", "--against", "MiniLM"], 2, "FILE.py:NAME"),
        (["run", "the cat", "--weights", "MiniLM"], 1, "--model MiniLM"),
        (["run", "the cat", "--tokenizer", "MiniLM"], 1, "--tokenizer MiniLM/tokenizer.json"),
        (["doctor", "some words"], 2, "--model DIR"),
    ],
    ids=str,
)
def test_what_to_type_is_said_where_something_is_left_out_or_of_another_kind(
    words: Sequence[str], code: int, meant: str, form: Sequence[str], folder: Path
) -> None:
    (folder / "a.py").write_text("def A(q, k, v):\n    return v\n")
    attempt(folder, *words, form=form, code=code, says=(meant,))


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["show", "cat.safetensors", "out.html"], "did you mean --html out.html?"),
        (["show", "cat.safetensors", "out.json"], "mha show --help"),
        (["check", "a.py:A", "out.html"], "mha check --help"),
        (["cat.safetensors"], "mha show cat.safetensors"),
        (["MiniLM"], "mha run TEXT --model MiniLM"),
        (["my poem.txt"], "mha run --file 'my poem.txt'"),
        (["the cat sat"], "mha run 'the cat sat'"),
        (["nothing"], "mha --help"),
        (["weights", "info"], "try mha weights info DIR"),
    ],
    ids=str,
)
def test_what_stands_in_the_place_of_a_command_is_told_with_the_command_for_it(
    words: Sequence[str], meant: str, folder: Path
) -> None:
    attempt(folder, *words, code=2, says=(f"hint: {meant}",))


def test_the_newest_records_are_named_where_none_is_given(folder: Path) -> None:
    for age, name in enumerate(("old", "older", "oldest"), 1):
        make_record((name, "cat")).save(str(folder / f"{name}.safetensors"))
        os.utime(folder / f"{name}.safetensors", (1e9 - age, 1e9 - age))
    attempt(folder, "show", code=2, says=("hint: mha show cat.safetensors takes the newest of 4",))
    attempt(folder, "diff", code=2, says=("hint: mha diff old.safetensors cat.safetensors takes the newest of 4",))
    beside = "hint: mha diff ./oldest.safetensors cat.safetensors takes the newest of 3 others"
    attempt(folder, "diff", "./oldest.safetensors", code=2, says=(beside,))


def test_the_folder_of_a_checkpoint_is_examined_where_it_can_mean_nothing_else(folder: Path) -> None:
    typed = attempt(folder, "doctor", "MiniLM", "the cat", code=1)
    by_option = attempt(folder, "doctor", "--model", "MiniLM", "the cat", code=1)
    assert typed.stderr == f"mha: MiniLM is a checkpoint: examined as with --model MiniLM\n{by_option.stderr}"
    attempt(folder, "doctor", "--", "MiniLM", code=2, says=("--model DIR",))


@pytest.mark.parametrize(("path", "code"), [("cat.safetensors", 1), ("layer.safetensors", 0)])
def test_weights_takes_a_path_for_that_of_info(path: str, code: int, folder: Path) -> None:
    typed, info = (attempt(folder, "weights", *words, code=code) for words in ([path], ["info", path]))
    assert (typed.stdout, typed.code) == (info.stdout, info.code)
    assert typed.stderr.startswith(f"mha: showing mha weights info {path}\n")


def test_a_record_of_any_name_is_still_a_record(folder: Path) -> None:
    (folder / "cat.rec").write_bytes((folder / "cat.safetensors").read_bytes())
    assert "cat" in attempt(folder, "show", "cat.rec").stdout


def test_what_installs_a_library_names_it_with_the_range_that_is_needed() -> None:
    from importlib import metadata

    from mhacli.errors import installing

    needed = {line.partition(";")[0].strip() for line in metadata.requires("mhacli") or ()}
    said = installing("transformers", "resvg-py", "torch")
    assert said.startswith("pip install ")
    assert {word.strip('"') for word in said.split()[2:]} <= needed
    assert "mhacli" not in said


def test_behind_two_dashes_a_context_and_the_name_of_a_target_are_texts() -> None:
    from mhacli.cli import values as words
    from mhacli.cli.commands import trace as ownmodule
    from mhacli.cli.options import SourceOptions, TextOptions
    from mhacli.cli.shared import request as sources
    from mhacli.text.encode import Decoding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["mha", "trace", "--context", ".", "--", "my.py:Attention"])
        assert words.are_literal()
        assert sources.read_context(TextOptions(context=["."]), Decoding()) == ["."]
        assert ownmodule.target_in(SourceOptions(typed=["my.py:Attention"]), ownmodule.UserModuleOptions()) is None


def test_a_text_given_by_the_option_is_told_in_the_record_as_any_other(tmp_path: Path) -> None:
    from support.processes import WITH_TORCH, Launch

    (tmp_path / "docs").mkdir()
    outcome = attempt(tmp_path, "run", "--text", "docs", "--d-model", "8", form=("--json",), launch=Launch(WITH_TORCH))
    assert [sequence["text"] for sequence in json.loads(outcome.stdout)["sequences"]] == ["docs"]


@pytest.mark.parametrize(
    ("words", "is_told"), [(["the", "cat"], True), (["the"], False), (["the cat", "sat"], False), (["the cat"], False)]
)
def test_a_terminal_gets_a_hint_to_quote_a_sentence_of_single_words(
    words: list[str], is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda answer=is_terminal: answer)
        assert typed_texts(SourceOptions(typed=words), Decoding()) == words
        assert ('"the cat"' in capsys.readouterr().err) == (is_told and is_terminal)
