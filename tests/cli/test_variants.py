"""What the installed program says of combinations that mean nothing: at once, without torch, with a value that works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import WITH_TORCH, Launch, attempt

MASK_MEMORY_BYTES = 450_000_000

ORDER = "must be off with a context, got both: a context has no order relative to the text"
REFUSED = {
    "kv heads that do not divide": (
        ["run", "a b", "--heads", "8", "--kv-heads", "3"],
        "n_heads (8) must be a multiple of n_kv_heads (3)",
        "--kv-heads 4 works",
    ),
    "rotary positions with an odd width": (
        ["run", "a b", "--positions", "rope", "--d-head", "5"],
        "d_head (5) must be even with positions rope, which turns pairs of columns",
        "--d-head 6 works",
    ),
    "interleaved ones too": (
        ["decode", "a b", "--positions", "rope-interleaved", "--d-model", "12"],
        "d_head (3) must be even with positions rope-interleaved, which turns pairs of columns",
        "--d-head 4 works",
    ),
    "a window with a context": (
        ["run", "a b", "--context", "c", "--window", "2"], f"window {ORDER}", "leave --window or --context out",
    ),
    "a prefix with a context": (
        ["trace", "a b", "--context", "c", "--prefix", "2"], f"prefix {ORDER}", "leave --prefix or --context out",
    ),
    "rotary positions with a context": (
        ["run", "a b", "--context", "c", "--positions", "rope"],
        f"positions rope {ORDER}", "leave --positions rope or --context out",
    ),
    "ALiBi with a context": (
        ["run", "a b", "--context", "c", "--positions", "alibi"],
        f"positions alibi {ORDER}", "leave --positions alibi or --context out",
    ),
    "random rows with a text": (
        ["run", "a b", "--random", "2,3"],
        "random must stand alone, got a text besides: random rows take its place", "leave the text or --random out",
    ),
    "random rows with a context": (
        ["trace", "--random", "2,3", "--context", "a b"],
        "random must stand alone, got --context besides: there is no text", "leave --random or --context out",
    ),
    "a shape that is none": (
        ["run", "--random", "2,0"], "random must be BATCH,LENGTH, two counts from 1 up such as 2,5, got '2,0'", None,
    ),
    "sinks without a window": (
        ["run", "a b", "--sink", "3"],
        "sink must come with a window, to which it is the exception, got no window", "try --window 8 --sink 3",
    ),
    "an angle that nothing turns by": (
        ["run", "a b", "--rope-theta", "500"],
        "--rope-theta must come with --positions rope, without which it changes nothing", "add --positions rope",
    ),
    "a table that nobody reads": (
        ["decode", "a b", "--max-positions", "9", "--positions", "alibi"],
        "--max-positions must come with --positions learned, without which it changes nothing",
        "add --positions learned",
    ),
    "a distribution of nothing": (
        ["run", "a b", "--distribution", "uniform"],
        "--distribution must come with --random, without which it changes nothing", "add --random",
    ),
    "documents that do not match": (
        ["run", "a | b", "--context", "c", "--documents", "|"],
        "context must have as many documents as its text, 2 in sequence 0, got 1",
        "each document of the text reads the document of the context that has its number",
    ),
    "documents of random rows": (
        ["run", "--random", "2,3", "--documents", "|"],
        "documents must be the separator of a text, got random rows", "leave --documents or --random out",
    ),
    "decoding with a context": (
        ["decode", "a b", "--context", "c"],
        "context must be left out of decode, which follows one text", "mha run shows it",
    ),
    "decoding in training": (
        ["decode", "a b", "--train", "--dropout", "0.1"],
        "train must be off in decode: dropout would differ from the recomputation", "leave it out",
    ),
    "decoding without causality": (
        ["decode", "a b", "--no-causal"],
        "decode must be causal, got --no-causal: a token cannot read what is not there yet", None,
    ),
    "a prompt longer than the text": (
        ["decode", "a b c", "--prompt-len", "4"], "prompt_len must be from 0 to the 3 tokens of the text, got 4", None,
    ),
    "a prefix longer than the prompt": (
        ["decode", "a b c", "--prefix", "2", "--prompt-len", "1"],
        "prompt_len must hold the prefix, whose tokens see each other at once, got 1 of 2 tokens", "--prompt-len 2 works",
    ),
    "training without dropout": (
        ["run", "a b", "--train"],
        "train must come with a dropout above 0, got dropout 0", "try --train --dropout 0.1",
    ),
    "a softcap of nothing": (["run", "a b", "--softcap", "0"], "softcap must be above 0, got 0.0", None),
    "a window of words": (
        ["run", "a b", "--window", "2,x"],
        "window must be LEFT or LEFT,RIGHT, counts of keys such as 4 or 2,2, got '2,x'", None,
    ),
}  # fmt: skip


def written_out(message: str, hint: str | None) -> str:
    return f"mha: error: {message}\n" + (f"hint: {hint}\n" if hint else "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_combination_that_means_nothing_is_refused_with_the_rule_and_a_way_out(name: str, tmp_path: Path) -> None:
    words, message, hint = REFUSED[name]
    outcome = attempt(tmp_path, *words, code=2)
    assert (outcome.stdout, outcome.stderr) == ("", written_out(message, hint))


def test_with_json_the_rule_is_one_json_line(tmp_path: Path) -> None:
    words, message, hint = REFUSED["sinks without a window"]
    outcome = attempt(tmp_path, *words, code=2, form=("--json",))
    assert outcome.error == {"code": "usage", "message": message, "hint": hint, "path": None, "exit": 2}


def test_learned_positions_that_are_too_few_are_told_without_torch(tmp_path: Path) -> None:
    outcome = attempt(tmp_path, "run", "a b c", "--positions", "learned", "--max-positions", "2", code=1)
    assert outcome.stderr == (
        "mha: error: there must be at most 2 tokens where positions are learned, got 3\n"
        "hint: --max-tokens 2 takes a shorter text; --max-positions 3 makes a longer table, where it does not come "
        "from a file\n"
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


def test_a_score_bias_that_does_not_fit_is_told_without_torch(tmp_path: Path) -> None:
    header = json.dumps({"b": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}).encode()
    (tmp_path / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(32))
    outcome = attempt(tmp_path, "run", "a b c", "--score-bias", "b.safetensors", code=1)
    assert outcome.stderr == (
        "mha: error: b.safetensors: tensor 'b' must broadcast to [batch, head, query, key] = [1, 4, 3, 3], got [2, 4]\n"
        "hint: the shapes [3, 3] and [4, 3, 3] work\n"
    )
    missing = attempt(tmp_path, "run", "a b c", "--score-bias", "b.safetensors:c", code=1)
    assert missing.stderr == (
        "mha: error: b.safetensors must hold the tensor 'c', got 'b'\n"
        "hint: --score-bias b.safetensors:b names the one to take\n"
    )


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
        "--no-out-proj", "--window", "1,1", "--sink", "1", "--padding", "left", "--softcap", "2", "--scale", "0.7",
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
