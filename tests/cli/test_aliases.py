"""Other names of options are what they stand for, and what is misspelt gets a hint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from support.processes import Launch, attempt, forms

from mhacli.cli import app as cli
from mhacli.cli.aliases import ALIASES, COMMAND_ALIASES, HINTS, expanded

LOADED = {name: cli._load(name) for name in cli.COMMANDS if name != "weights"}


def given(command: str, words: Sequence[str]) -> dict[str, Any]:
    """What a command reads from the words."""
    return dict(LOADED[command].make_context(command, list(words)).params)


def options(command: str) -> dict[str, Any]:
    """The options of a command by each of their names."""
    listed = (one for one in LOADED[command].params if isinstance(one, typer.core.TyperOption))
    return {name: one for one in listed for name in (*one.opts, *one.secondary_opts)}


def cases() -> Iterator[tuple[str, str, str]]:
    """Each other name in every command that takes it, with what it stands for."""
    for command in LOADED:
        known = options(command)
        for name, words in {**ALIASES, **COMMAND_ALIASES.get(command, {})}.items():
            if words.split()[0] in known and name not in known:
                yield command, name, words


CASES = list(cases())


def test_every_other_name_is_taken_somewhere() -> None:
    taken = {name for _, name, _ in CASES}
    assert taken == {*ALIASES, *(name for names in COMMAND_ALIASES.values() for name in names)}


@pytest.mark.parametrize(("command", "name", "words"), CASES)
def test_another_name_is_what_it_stands_for(command: str, name: str, words: str) -> None:
    option = options(command)[words.split()[0]]
    value = [] if option.is_flag or " " in words else ["always" if name == "--colour" else "7"]
    ours = given(command, [*words.split(), *value])
    assert given(command, [name, *value]) == ours
    assert ours != given(command, []) or (command, name) == ("check", "--cpu")  # its default
    if value:
        assert given(command, [f"{name}={value[0]}"]) == ours


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["x", "--n-heads", "4"], ["x", "--heads", "4"]),
        (["--text", "--n-heads", "--n-heads", "4"], ["--text", "--n-heads", "--heads", "4"]),
        (["--n-heads", "--n-heads"], ["--heads", "--n-heads"]),
        (["--", "--n-heads"], ["--", "--n-heads"]),
        (["--no-color", "--n-heads=4"], ["--color", "never", "--heads=4"]),
        (["--no-color=4"], ["--no-color=4"]),
        (["--rope"], ["--rope"]),
        (["--n-heads"], ["--heads"]),
    ],
    ids=str,
)
def test_values_and_what_follows_two_dashes_stay_as_they_are(words: list[str], read: list[str]) -> None:
    takes_value = {"--heads": True, "--text": True, "--color": True, "--json": False}
    assert list(expanded(words, takes_value, "run")) == read


def test_a_name_with_several_meanings_is_an_alias_in_none_of_the_commands_that_hint() -> None:
    assert not HINTS.keys() & ALIASES.keys()


def test_a_width_is_that_of_columns(tmp_path: Path) -> None:
    def printed(columns: str, *words: str) -> str:
        launch = Launch(modules={}, env={"COLUMNS": columns})
        return attempt(tmp_path, "run", "the cat sat on the mat", "--heads", "4", *words, launch=launch).stdout

    assert printed("80", "--width", "130") == printed("130") != printed("80")


@forms
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "x", "--haeds", "4"], "did you mean --heads?"),
        (["run", "x", "--seq-len", "4"], "--max-tokens N"),
        (["run", "x", "--zzz"], "mha run --help-all"),
        (["rum"], "did you mean mha run?"),
        (["run", "x", "--head", "4"], "did you mean --heads 4"),
        (["heads", "x", "--head", "8"], "did you mean --heads 8"),
        (["decode", "x", "--head", "4"], "did you mean --heads 4"),
        (["run", "x", "--html"], "--html FILE"),
        (["run", "x", "--view", "matrx"], "did you mean matrix?"),
        (["bench", "512"], "did you mean --lengths 512?"),
        (["show", "a", "b"], "mha show --help"),
    ],
    ids=str,
)
def test_a_misspelt_name_gets_the_one_that_was_meant(
    words: list[str], hint: str, form: Sequence[str], tmp_path: Path
) -> None:
    attempt(tmp_path, *words, form=form, code=2, says=(hint,))


@pytest.mark.parametrize("words", [["--heads", "2", "--head", "4"], ["--head", "0,9"], ["--head", "9"]], ids=str)
def test_a_head_that_can_be_no_count_of_heads_gets_no_such_hint(words: list[str], tmp_path: Path) -> None:
    assert "did you mean" not in attempt(tmp_path, "run", "x", *words, code=2).stderr


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["help"], ["--help"]),
        (["help", "--json"], ["--help"]),
        (["help", "run"], ["run", "--help"]),
        (["help", "weights", "info"], ["weights", "info", "--help"]),
    ],
    ids=str,
)
def test_help_is_a_command_too(words: list[str], same: list[str], tmp_path: Path) -> None:
    assert attempt(tmp_path, *words).stdout == attempt(tmp_path, *same).stdout
