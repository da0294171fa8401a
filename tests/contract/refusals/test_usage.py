"""What answers before anything is computed: help, version, completion, other names of options, and
usage errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.mha import NO_TORCH, Ended

Mha = Callable[..., Ended]
COMMANDS = """
    run heads effect scan trace decode bench check doctor samples vocab weights
    view show explain diff
""".split()
LAYER = ["the cat sat", "--d-model", "8"]


def test_mha_alone_names_every_command(mha: Mha) -> None:
    alone = mha().stdout
    assert alone == mha("--help").stdout
    named = re.findall(r"^  ([a-z]+) ", alone, flags=re.MULTILINE)
    assert set(COMMANDS) <= set(named)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_and_options_within_the_width(mha: Mha, command: str) -> None:
    text = mha(*command.split(), "--help").stdout
    assert f"mha {command}" in text
    assert re.search(r"^Examples?:", text, flags=re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 60


@pytest.mark.parametrize("words", [["run"], ["weights", "info"]])
def test_help_is_a_command_too(mha: Mha, words: list[str]) -> None:
    assert mha("help", *words).stdout == mha(*words, "--help").stdout
    assert "rum" in mha("help", "rum", code=2).said


@pytest.mark.parametrize("command", ["run", "effect", "bench", "explain"])
def test_the_whole_help_has_every_option_of_the_short_one(mha: Mha, command: str) -> None:
    short, whole = (
        set(re.findall(r"--[a-z][a-z-]+", mha(command, word).stdout))
        for word in ("--help", "--help-all")
    )
    assert short - {"--help-all"} <= whole
    assert "--color" in whole


def test_a_choice_is_read_in_letters_of_any_case(mha: Mha) -> None:
    words = ("run", "the cat", "--heads", "2", "--d-model", "8", "--json")
    typed = mha(*words, "--positions", "RoPE", "--dtype", "Float64").json["config"]
    assert (typed["positions"], typed["dtype"]) == ("rope", "float64")
    assert "RoPES" in mha(*words, "--positions", "RoPES", code=2).said


@pytest.mark.parametrize("word", ["--help", "-h", "--help-all"])
def test_help_is_shown_whatever_else_is_typed(mha: Mha, word: str) -> None:
    """Also beside a value that would be refused."""
    assert mha("run", "a", "--heads", "none", word).stdout == mha("run", word).stdout
    assert mha(word, "run", "a").stdout == mha("--help").stdout


@pytest.mark.parametrize(
    ("words", "named", "program"),
    [
        (["run", "a", "--haeds", "2"], "--heads", "mha run --help"),
        (["show", "--nope"], "--nope", "mha show --help"),
        (["--nope", "run"], "--nope", "mha --help"),
        (["run", "a", "--view", "pie"], "heatmap", "mha run --help"),
        (["run", "a", "--view"], "--view", "mha run --help"),
        (["show"], "RECORD", "mha show --help"),
        (["rum"], "'run'", "mha --help"),
        (["run", "-5 degrees"], "-5", "mha run -- "),
        (["bench", "--save-baseline", "a"], "--save-baseline", "--json takes its place"),
        (["doctor", "--svg", "a.svg"], "--svg", "--html takes its place"),
        (["decode", "a", "--decimals", "3"], "--decimals", "mha show FILE --view matrix"),
    ],
)
def test_what_typer_refuses_is_answered_with_what_to_type(
    mha: Mha, words: list[str], named: str, program: str
) -> None:
    ended = mha(*words, code=2)
    assert named in ended.error["message"]
    assert program in ended.error["hint"]
    assert mha(*words, "--json", code=2).error["code"] == "usage"


def test_the_version_is_that_of_the_package(mha: Mha) -> None:
    import mhacli

    assert mha("--version").stdout.split()[-1] == mhacli.__version__


NAMES = {
    "--n-heads 2 --n-kv-heads 2 --head-dim 3 --hidden-size 12": (
        {"n_heads": 2, "n_kv_heads": 2, "d_head": 3, "d_model": 12}
    ),
    "--num-heads=6 --num-kv-heads 2 --d-k=5 --embed-dim=18": (
        {"n_heads": 6, "n_kv_heads": 2, "d_head": 5, "d_model": 18}
    ),
    "--num-attention-heads 6 --num-key-value-heads 3 --n-embd 24": (
        {"n_heads": 6, "n_kv_heads": 3, "d_model": 24}
    ),
    "--is-causal --sliding-window 3 --sink 1": {"causal": True, "window": [3, 0], "sink": 1},
    "--bidirectional --max-length 2": {"causal": False},
}
"""Other names of options, and the settings of a run that they choose."""


@pytest.mark.parametrize("words", NAMES)
def test_another_name_of_an_option_chooses_the_same_setting(mha: Mha, words: str) -> None:
    config = mha("run", "the cat sat", *words.split(), "--keep", "z", "--json").json["config"]
    assert {field: config[field] for field in NAMES[words]} == NAMES[words]


def test_another_name_of_an_option_works_in_each_command_that_has_it(mha: Mha) -> None:
    assert len(mha("vocab", "a b b c", "--top-k", "2", "--json").json["tokens"]) == 2
    (sequence,) = mha("run", "a b c", *LAYER[1:], "--max-length", "2", "--json").json["sequences"]
    assert sequence["tokens"] == ["a", "b"]
    assert mha("heads", *LAYER, "--pattern", "k < q", "--json").json["heads"][0]["patterns"]
    assert "512x" in mha("bench", "--seq-len", "512x", code=2).said


def test_what_is_a_value_or_follows_two_dashes_is_no_name_of_an_option(mha: Mha) -> None:
    for words in (["--text", "--n-heads"], ["--", "--n-heads"]):
        assert [row["token"] for row in mha("vocab", "--json", *words).json["tokens"]] == ["nheads"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_the_completion_of_a_shell_names_the_program(mha: Mha, shell: str) -> None:
    env = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    assert "_MHA_COMPLETE" in mha("--show-completion", shell, env=env).stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("mha d", {"decode", "doctor", "diff"}, marks=pytest.mark.real),
        ("mha run x --head", {"--head", "--heads"}),
        pytest.param("mha run --vi", {"--view"}, marks=pytest.mark.real),
        ("mha rum", set()),
    ],
)
def test_a_completion_gives_the_words_that_fit(mha: Mha, line: str, words: set[str]) -> None:
    n = str(len(line.split()) - 1)
    bash = mha(
        env={"_MHA_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": n},
        modules=NO_TORCH,
    )
    assert set(bash.stdout.split()) == words
    zsh = mha(env={"_MHA_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}, modules=NO_TORCH)
    assert set(re.findall(r'"([\w-]+)":"', zsh.stdout)) == words


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nofile.txt"], "nofile.txt"),
        (["./no/file.md"], "./no/file.md"),
        (["the cat", "--dropout", "0.5"], "--train"),
        (["the cat", "--view", "none", "--json"], "--view"),
        (["the cat", "--view", "top", "--csv"], "--view"),
        (["3.5 txt", "e.g. a.txt"], None),
        (["--text", "nofile.txt"], None),
        (["--brief", "--", "nofile.txt"], None),
        (["the cat", "--dropout", "0.5", "--train"], None),
        (["the cat", "--json"], None),
        (["my.py:GPT"], "my.py:GPT"),
        (["--text", "my.py:GPT"], None),
        (["--brief", "--", "my.py:GPT"], None),
        (["the", "cat", "--json"], "'the cat'"),
        (["--text", "the", "--text", "cat"], None),
        (["--file", "rows.jsonl", "--json"], "rows.jsonl"),
    ],
)
def test_what_may_be_meant_otherwise_gets_a_line(
    words: list[str], named: str | None, mha: Mha, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat"}\n')
    ended = mha("run", *words)
    lines = ended.stderr.splitlines()
    assert "--json" not in words or ended.json
    assert len(lines) == (named is not None)
    assert named is None or named in lines[0]


@pytest.mark.parametrize("typed", ["--sinkk", "--sink-sharee", "--winow"])
def test_suggested_options_stand_in_the_help(mha: Mha, typed: str) -> None:
    shown = {*re.findall(r"--[\w-]+", mha("run", "--help-all").stdout)}
    suggested = {*re.findall(r"--[\w-]+", mha("run", "a cat", typed, "3", code=2).said)} - {typed}
    assert len(suggested - {"--help"}) > 0
    assert suggested <= {*shown, "--help"}


@pytest.mark.parametrize(
    ("head", "layer"), [("1.3", "1"), ("cross.0.3", "cross.0"), ("cross 0.3", "cross.0")]
)
def test_a_head_with_its_layer_gets_the_options_of_both(mha: Mha, head: str, layer: str) -> None:
    for command in ("run", "heads", "show"):
        said = mha(command, "the cat", "--head", head, code=2).said
        assert f"--layer {layer} --head 3" in said
