"""What the installed program says of combinations that mean nothing: at once, without torch, with a value that works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import WITH_TORCH, Launch, attempt

MASK_MEMORY_BYTES = 450_000_000

REFUSED = {
    "kv heads that do not divide": ("run", "a b", "--heads", "8", "--kv-heads", "3"),
    "rotary positions with an odd width": ("run", "a b", "--positions", "rope", "--d-head", "5"),
    "interleaved ones too": ("decode", "a b", "--positions", "rope-interleaved", "--d-model", "12"),
    "a window with a context": ("run", "a b", "--context", "c", "--window", "2"),
    "a prefix with a context": ("trace", "a b", "--context", "c", "--prefix", "2"),
    "rotary positions with a context": ("run", "a b", "--context", "c", "--positions", "rope"),
    "ALiBi with a context": ("run", "a b", "--context", "c", "--positions", "alibi"),
    "random rows with a text": ("run", "a b", "--random", "2,3"),
    "a shape that is none": ("run", "--random", "2,0"),
    "sinks without a window": ("run", "a b", "--sink-window", "3"),
    "documents that do not match": ("run", "a | b", "--context", "c", "--documents", "|"),
    "documents of random rows": ("run", "--random", "2,3", "--documents", "|"),
    "training without dropout": ("run", "a b", "--train"),
    "a softcap of nothing": ("run", "a b", "--softcap", "0"),
    "a window of words": ("run", "a b", "--window", "2,x"),
}
MESSAGES = {
    "random rows with a context": (
        ["trace", "--random", "2,3", "--context", "a b"],
        "--random and --context exclude each other: random vectors take the place of text",
        "leave out --random or --context",
    ),
    "an angle that nothing turns by": (
        ["run", "a b", "--rope-theta", "500"],
        "--rope-theta changes nothing without --positions rope",
        "add --positions rope",
    ),
    "a table that nobody reads": (
        ["decode", "a b", "--max-positions", "9", "--positions", "alibi"],
        "--max-positions changes nothing without --positions learned",
        "add --positions learned",
    ),
    "a distribution of nothing": (
        ["run", "a b", "--distribution", "uniform"],
        "--distribution changes nothing without --random",
        "add --random",
    ),
    "decoding with a context": (
        ["decode", "a b", "--context", "c"],
        "--context does not work with mha decode, which follows one text",
        "mha run shows cross-attention",
    ),
    "decoding in training": (
        ["decode", "a b", "--train", "--dropout", "0.1"],
        "--train does not work with mha decode: with dropout a step differs from the full recomputation",
        "leave out --train",
    ),
    "decoding without causality": (
        ["decode", "a b", "--no-causal"],
        "--no-causal does not work with mha decode: later tokens do not exist yet",
        None,
    ),
    "a prompt longer than the text": (
        ["decode", "a b c", "--prompt-len", "4"],
        "--prompt-len 4 is out of range: the text has 3 tokens",
        None,
    ),
    "a prompt longer than a text of one token": (
        ["decode", "a", "--prompt-len", "4"],
        "--prompt-len 4 is out of range: the text has 1 token",
        None,
    ),
    "a prefix longer than the prompt": (
        ["decode", "a b c", "--prefix", "2", "--prompt-len", "1"],
        "--prompt-len 1 cuts the prefix of 2 tokens, which see each other at once",
        "try --prompt-len 2",
    ),
}


def written_out(message: str, hint: str | None) -> str:
    return f"mha: error: {message}\n" + (f"hint: {hint}\n" if hint else "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_combination_that_means_nothing_is_a_usage_error_that_names_an_option(name: str, tmp_path: Path) -> None:
    outcome = attempt(tmp_path, *REFUSED[name], code=2)
    assert outcome.stdout == ""
    first, *hints = outcome.stderr.splitlines()
    assert any(word.lstrip("-") in first for word in REFUSED[name] if word.startswith("--"))
    assert [hint[:6] for hint in hints] in ([], ["hint: "])


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_command_does_not_take_is_refused_with_the_reason_and_a_way_out(name: str, tmp_path: Path) -> None:
    words, message, hint = MESSAGES[name]
    outcome = attempt(tmp_path, *words, code=2)
    assert (outcome.stdout, outcome.stderr) == ("", written_out(message, hint))


def test_with_json_the_rule_is_one_json_line(tmp_path: Path) -> None:
    words, message, hint = MESSAGES["a prefix longer than the prompt"]
    outcome = attempt(tmp_path, *words, code=2, form=("--json",))
    assert outcome.error == {"code": "usage", "message": message, "hint": hint, "path": None, "exit": 2}


def test_learned_positions_that_are_too_few_are_told_without_torch(tmp_path: Path) -> None:
    outcome = attempt(tmp_path, "run", "a b c", "--positions", "learned", "--max-positions", "2", code=1)
    assert outcome.stderr == (
        "mha: error: 3 tokens are more than the 2 learned positions\n"
        "hint: --max-tokens 2 fits; without --weights --max-positions 3 makes room for all\n"
    )


FOLLOWED = {
    "prefix": ["a b c", "--prefix", "9", "--prompt-len", "1"],
    "prefix of nothing": ["a b c", "--prefix", "4"],
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_hint_about_a_prefix_works_when_it_is_followed(name: str, tmp_path: Path) -> None:
    words = FOLLOWED[name]
    hint = attempt(tmp_path, "decode", *words, code=2).stderr.splitlines()[-1]
    options = hint.removeprefix("hint: ").removesuffix(" works").split()
    assert {option for option in options if option.startswith("--")} <= {"--prefix", "--prompt-len"}
    attempt(tmp_path, "decode", *words, *options, "--repeat", "1", launch=Launch(WITH_TORCH))


def test_a_score_bias_that_does_not_fit_is_refused_without_torch(tmp_path: Path) -> None:
    header = json.dumps({"b": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}).encode()
    (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    attempt(tmp_path, "run", "a b c", "--score-bias", "b.safetensors", code=1)
    attempt(tmp_path, "run", "a b c", "--score-bias", "b.safetensors:c", code=1)


OWN_PEAK = r"""
import re, sys
from mhacli.cli.app import main
sys.argv[0] = "mha"
code = main()
print(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(code)
"""
"""Runs the command line, then tells the process's own high-water mark in KiB: `ru_maxrss` would count its parent's too."""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_mask_of_a_long_text_is_drawn_in_little_memory() -> None:
    words = ["trace", "--random", "1,20000", "--mask", "--causal", "--window", "512", "--json"]
    done = subprocess.run([sys.executable, "-c", OWN_PEAK, *words], capture_output=True, text=True, check=True)
    (of_sequence,) = json.loads(done.stdout)["masks"]
    assert of_sequence["n_visible"] == 513 * (20_000 - 512) + 512 * 513 // 2
    assert int(done.stderr.split()[-1]) * 1024 < MASK_MEMORY_BYTES


def test_every_choice_together_passes_its_own_checks(tmp_path: Path) -> None:
    words = [
        "run", "the cat | sat on", "a | mat is", "--documents", "|", "--positions", "rope", "--rope-theta", "500",
        "--heads", "6", "--kv-heads", "2", "--d-head", "4", "--d-v", "3", "--d-input", "9", "--d-model", "10",
        "--no-out-proj", "--window", "1,1", "--sink-window", "1", "--padding", "left", "--softcap", "2", "--scale", "0.7",
        "--repeat", "1",
    ]  # fmt: skip
    outcome = attempt(tmp_path, *words, form=("--json",), launch=Launch(WITH_TORCH))
    document = json.loads(outcome.stdout)
    assert document["self_check"]["ok"] is True
    assert document["config"]["n_kv_heads"] == 2
    scores = document["scores"][0][0]
    assert [[score is not None for score in row] for row in scores] == [
        [True, True, False, False], [True, True, False, False], [False, False, True, True], [False, False, True, True],
    ]  # fmt: skip
