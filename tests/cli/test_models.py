"""`mha … --model`: what the commands print and write of a checkpoint, what they refuse and how, and how they are stopped."""

from __future__ import annotations

import csv
import getpass
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from support.checkpoints_saved import (
    ANSWER,
    PAD_ID,
    STORY,
    TEXT,
    Checkpoints,
    attentions,
    likeliest,
    reference,
    tokenizer_of,
)
from support.model_families import N_HEADS, N_LAYERS, run_plain
from support.processes import PATIENCE_S, WITH_TORCH, Launch, attempt, obeyed_or_hidden, shell_code, start, state_of

from mhacli.cli.app import main
from mhacli.cli.options import LayerOptions
from mhacli.cli.shared.checkpoint import _ALLOWED_LAYER
from mhacli.compute.checkpoint import run as study

COMMANDS = ("run", "heads", "trace", "decode")
TOLERANCE = 5e-6
IDS = tokenizer_of("gpt2")(TEXT)["input_ids"]
N = len(IDS)
CACHE = f"torchinductor_{getpass.getuser()}"
"""An empty folder that transformers makes with torch's compiler when it is imported."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def gpt2(checkpoints: Checkpoints) -> str:
    return checkpoints.of("gpt2")


Mha = Callable[..., Any]


@pytest.fixture
def mha(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Mha:
    """`mha(word, …, code=0)`: what a command line writes, in this process, where nothing may reach a terminal raw."""

    def told(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["mha", *words])
        found = main()
        said = capsys.readouterr()
        assert found == code, said.err
        assert not obeyed_or_hidden(said.out + said.err)
        assert "Traceback" not in said.out + said.err
        return said

    return told


@pytest.fixture(scope="module")
def eager(gpt2: str) -> list[np.ndarray]:
    """The patterns of the text that transformers returns."""
    found = attentions(gpt2, input_ids=torch.tensor([IDS])).attentions
    return [pattern[0].double().numpy() for pattern in found]


def results_of(gpt2: str) -> list[np.ndarray]:
    """The heads' results of every layer, side by side: what its output projection reads."""
    model, found = reference(gpt2, "AutoModel"), []
    handles = [
        block.attn.c_proj.register_forward_pre_hook(lambda _m, given: found.append(given[0][0].double().numpy()))
        for block in model.h
    ]
    run_plain(model, {"input_ids": torch.tensor([IDS])})
    for handle in handles:
        handle.remove()
    return found


def values_of(gpt2: str) -> list[np.ndarray]:
    """The values of every layer `[head, key, d]`: the last third of its first projection."""
    model, found = reference(gpt2, "AutoModel"), []
    handles = [
        block.attn.c_attn.register_forward_hook(lambda _m, _i, out: found.append(out[0, :, 96:].double().numpy()))
        for block in model.h
    ]
    run_plain(model, {"input_ids": torch.tensor([IDS])})
    for handle in handles:
        handle.remove()
    return [rows.reshape(N, N_HEADS, 12).transpose(1, 0, 2) for rows in found]


# ------------------------------------------------------------------------------------------------------------ what they print


def test_run_prints_the_model_its_tokens_every_head_and_its_checks(mha: Mha, gpt2: str) -> None:
    said = mha("run", "--model", gpt2, TEXT, "--all", "--tokens")
    assert said.err == ""
    flat = " ".join(said.out.split())
    for piece in ("gpt2 · GPT2Model ", f"{N_LAYERS} layers", f"{N_HEADS} heads × d_head 12", "positions learned, up to 64",
                  "attention: sdpa (unchanged)", "inspecting changed no bit of the outputs",
                  "kernel flash", "mask: causal", f"text: {N} tokens", "self-check ok: 12 checks, errors at most"):  # fmt: skip
        assert piece in flat, piece
    rows = re.findall(r"^ +(\d) +(\d) [^\w\s] [a-z]", said.out, re.MULTILINE)
    assert rows == [(str(i), str(h)) for i in range(N_LAYERS) for h in range(N_HEADS)]
    ids = re.findall(r"^ *(\d+) +(\d+) +\S+ +\S+ +[0-9a-f]+ +\d+–\d+$", said.out, re.MULTILINE)
    assert [int(i) for _, i in ids] == IDS


def test_run_draws_the_pattern_of_a_chosen_head(mha: Mha, gpt2: str, eager: list[np.ndarray]) -> None:
    said = mha("run", "--model", gpt2, "the cat sat", "--layer", "1", "--head", "2", "--precision", "3", "--all")
    ids = tokenizer_of("gpt2")("the cat sat")["input_ids"]
    last = eager[1][2][len(ids) - 1, : len(ids)]  # causal: more text changes nothing of it
    shown = [f"{share:.3f}".removeprefix("0") for share in last]
    row = next(line for line in said.out.splitlines() if all(number in line for number in shown))
    assert re.findall(r"\.\d{3}", row)[: len(shown)] == shown


def test_the_json_of_a_run_has_the_patterns_and_results_that_transformers_gives(
    mha: Mha, gpt2: str, eager: list[np.ndarray]
) -> None:
    said = mha("run", "--model", gpt2, TEXT, "--json", "--keep", "pattern,z,scores,qk")
    assert said.err == ""
    document = json.loads(said.out)
    assert document["schema"] == "mha.record/1"
    assert document["sequences"][0]["ids"] == IDS
    assert document["model"]["identical_outputs"] is True
    assert document["self_check"]["ok"] is True
    assert [layer["layer"] for layer in document["layers"]] == list(range(N_LAYERS))
    for layer, pattern, rows, v in zip(document["layers"], eager, results_of(gpt2), values_of(gpt2), strict=True):
        shares, z = np.array(layer["pattern"][0]), np.array(layer["z"][0])
        assert shares == pytest.approx(pattern, abs=TOLERANCE)
        assert z.transpose(1, 0, 2).reshape(N, 48) == pytest.approx(rows, abs=5e-5)
        assert shares @ v == pytest.approx(z, abs=5e-5)
        qk, allowed = np.array(layer["qk"][0], dtype=float), np.tril(np.ones((N, N), dtype=bool))
        assert (np.isnan(qk) == ~allowed).all()
        exps = np.where(allowed, np.exp(qk * 12**-0.5), 0)
        assert shares == pytest.approx(exps / exps.sum(axis=-1, keepdims=True), abs=TOLERANCE)


def test_the_csv_of_a_run_has_every_cell_of_every_layer(mha: Mha, gpt2: str, eager: list[np.ndarray]) -> None:
    rows = list(csv.DictReader(StringIO(mha("run", "--model", gpt2, TEXT, "--csv").out)))
    assert len(rows) == N_LAYERS * N_HEADS * N * N
    shares = np.array([float(row["pattern"]) for row in rows]).reshape(N_LAYERS, N_HEADS, N, N)
    assert shares == pytest.approx(np.stack(eager), abs=TOLERANCE)
    assert {row["attention"] for row in rows} == {f"h.{i}.attn" for i in range(N_LAYERS)}
    assert "".join(row["key_token"] for row in rows[:N]) == TEXT
    assert [row["allowed"] for row in rows[:3]] == ["1", "0", "0"]


def test_the_csv_of_heads_has_a_line_for_each(mha: Mha, gpt2: str, eager: list[np.ndarray]) -> None:
    rows = list(csv.DictReader(StringIO(mha("heads", "--model", gpt2, TEXT, "--csv").out)))
    assert [(row["layer"], row["head"]) for row in rows] == [
        (str(i), str(h)) for i in range(N_LAYERS) for h in range(N_HEADS)
    ]
    for row, pattern in zip(rows, np.concatenate(eager), strict=True):
        assert float(row["sink"]) == pytest.approx(pattern[:, 0].mean(), abs=TOLERANCE)
        assert float(row["diagonal"]) == pytest.approx(pattern.diagonal().mean(), abs=TOLERANCE)
        assert float(row["previous"]) == pytest.approx(pattern.diagonal(-1).sum() / N, abs=TOLERANCE)


def test_heads_keeps_no_matrices_and_takes_the_heads_that_are_chosen(mha: Mha, gpt2: str) -> None:
    document = json.loads(mha("heads", "--model", gpt2, TEXT, "--head", "1,3", "--layer", "0,2", "--json").out)
    assert [(head["layer"], head["head"]) for head in document["heads"]] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert [layer["layer"] for layer in document["layers"]] == [0, 2]
    assert {layer["pattern"] for layer in document["layers"]} == {None}
    assert document["command"][:4] == ["mha", "heads", "--model", gpt2]


def test_trace_walks_through_one_layer(mha: Mha, gpt2: str, eager: list[np.ndarray]) -> None:
    sites = ["x", "c_attn", "q", "k", "v", "qk", "scores", "pattern", "z", "c_proj"]
    words = ["trace", "--model", gpt2, TEXT, "--layer", "2", "--cell", "1,5,3"]
    steps, said = mha(*words[:-2]), mha(*words)
    for out, listed in ((steps.out, sites), (said.out, [])):
        assert re.findall(r"^ *\d+  (\w+) +(?:query|key|kv_head|head) ", out, re.MULTILINE) == listed
    assert "h.2.attn" in said.out or "layer 2" in said.out
    document = json.loads(mha(*words, "--json").out)
    assert [step["site"] for step in document["trace"]] == sites
    assert document["cell"]["share"] == pytest.approx(eager[2][1, 5, 3], abs=TOLERANCE)
    assert document["cell"]["pattern_row"] == pytest.approx(eager[2][1, 5], abs=TOLERANCE)
    assert f"{document['cell']['share']:.4f}"[1:] in said.out


def test_decode_tells_every_step(mha: Mha, gpt2: str, eager: list[np.ndarray]) -> None:
    words = ["decode", "--model", gpt2, TEXT, "--layer", "1", "--prompt-len", "20"]
    said = mha(*words)
    steps = re.findall(r"^ *(\d+) +(prefill|decode) ", said.out, re.MULTILINE)
    assert steps == [("0", "prefill"), *((str(i), "decode") for i in range(1, N - 19))]
    document = json.loads(mha(*words, "--json").out)
    assert np.array(document["layers"][0]["pattern"][0]) == pytest.approx(eager[1], abs=TOLERANCE)
    assert [step["cache"]["n_past"] for step in document["trace"]] == [0, *range(20, N)]
    assert document["self_check"]["ok"] is True


def test_what_a_checkpoint_generates_is_part_of_what_is_looked_at(mha: Mha, checkpoints: Checkpoints) -> None:
    folder = checkpoints.of("llama")
    ids = tokenizer_of("llama")(ANSWER)["input_ids"]
    document = json.loads(mha("run", "--model", folder, ANSWER, "--generate", "4", "--json").out)
    assert document["sequences"][0]["ids"] == [*ids, *likeliest(folder, ids, 4)]
    assert document["model"]["generated"] == {"prompt_lens": [len(ids)], "n_tokens": 4, "repeated": 4}
    assert np.array(document["layers"][0]["pattern"]).shape == (1, N_HEADS, len(ids) + 4, len(ids) + 4)


def test_a_chat_and_its_roles_reach_the_command(mha: Mha, checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": "the cat"},
                                                    {"role": "assistant", "content": "sat"}]))  # fmt: skip
    said = mha(
        "heads", "--model", checkpoints.of("gpt2"), "--chat", str(tmp_path / "chat.json"), "--span", "user,assistant"
    )
    assert "between spans" in said.out
    assert re.search(r"user.*assistant", said.out)


def test_the_layers_of_a_pair_are_chosen_by_their_kind(mha: Mha, checkpoints: Checkpoints) -> None:
    folder = checkpoints.of("t5")
    words = ["run", "--model", folder, ANSWER, "--context", TEXT, "--json", "--keep", "pattern", "--layer"]
    document = json.loads(mha(*words, "cross.1,encoder.0").out)
    assert [(layer["kind"], layer["layer"]) for layer in document["layers"]] == [("encoder", 0), ("cross", 1)]
    encoder, decoder = tokenizer_of("t5")(TEXT)["input_ids"], [PAD_ID, *tokenizer_of("gpt2")(ANSWER)["input_ids"]]
    outputs = attentions(folder, input_ids=torch.tensor([encoder]), decoder_input_ids=torch.tensor([decoder]))
    assert np.array(document["layers"][0]["pattern"]) == pytest.approx(outputs.encoder_attentions[0].numpy(), abs=5e-5)
    assert np.array(document["layers"][1]["pattern"]) == pytest.approx(outputs.cross_attentions[1].numpy(), abs=5e-5)
    both = json.loads(mha(*words, "1").out)
    assert [(layer["kind"], layer["layer"]) for layer in both["layers"]] == [
        ("encoder", 1), ("decoder", 1), ("cross", 1)
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- what is saved


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("command", "drawn"),
    [("run", ["--layer", "1", "--head", "0"]), ("heads", ["--sort", "sink"]), ("decode", [])],
)
def test_a_saved_record_is_shown_the_same_without_torch(
    command: str, drawn: list[str], mha: Mha, gpt2: str, tmp_path: Path
) -> None:
    made = mha(command, "--model", gpt2, "the cat sat", *drawn, "--save", str(tmp_path / "r"))
    assert made.err.startswith(f"mha: saved {tmp_path}/r, ")
    assert attempt(tmp_path, "show", "r", *drawn).stdout == made.out


def test_a_process_writes_one_document_and_one_record(gpt2: str, tmp_path: Path) -> None:
    words = ["--model", gpt2, TEXT, "--save", "r"]
    done = attempt(tmp_path, "run", *words, form=("--json",), writes={"r", CACHE}, launch=Launch(WITH_TORCH))
    assert done.stderr == ""
    document, shown = json.loads(done.stdout), json.loads(attempt(tmp_path, "show", "r", form=("--json",)).stdout)
    assert document == shown
    again = attempt(tmp_path, "run", *words, code=1, form=("--json",))  # before torch is loaded
    assert again.error["path"] == "r"


# ------------------------------------------------------------------------------------------------------------ what is refused

VALUES = {
    "d_model": "8", "heads": "2", "kv_heads": "2", "d_head": "4", "d_v": "4", "d_input": "8", "bias": None,
    "no_out_proj": None, "dropout": "0.1", "train": None, "init": "uniform", "seed": "3", "weights": "w",
    "positions": "rope", "rope_theta": "100", "max_positions": "64", "causal": None, "window": "3", "prefix": "1",
    "sink": "1", "scale": "0.5", "softcap": "5", "score_bias": "b",
}  # fmt: skip
OTHERS = {"random": "3", "documents": "---", "vocab": "v", "keep_case": None, "punctuation": "drop"}


def options_of_a_layer() -> dict[str, str | None]:
    return {**VALUES, **OTHERS}


def test_every_option_of_a_layer_of_our_own_is_among_those_that_are_tried() -> None:
    assert {field.name for field in fields(LayerOptions)} - {*_ALLOWED_LAYER} == VALUES.keys() - {"heads"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", options_of_a_layer())
def test_what_a_checkpoint_brings_itself_cannot_be_chosen(name: str, mha: Mha, gpt2: str) -> None:
    option, value = "--" + name.replace("_", "-"), options_of_a_layer()[name]
    for command in COMMANDS:
        said = mha(command, "--model", gpt2, TEXT, option, *([] if value is None else [value]), code=2)
        hint = "--head LIST chooses which heads to show" if name == "heads" else f"leave out {option}"
        assert said.err.startswith(f"mha: error: {option} does not work with --model, which ")
        assert said.err.endswith(f"\nhint: {hint}\n")
        assert said.out == ""


OWN_WAYS = {
    "route": (["trace", "--route", "fused"], "--route does not work with --model, which has its own"),
    "mask": (["trace", "--mask"], "--mask does not work with --model"),
    "cache": (["decode", "--cache", "concat"], "--cache does not work with --model, which has its own cache"),
    "lengths": (["decode", "--lengths", "3"], "--lengths does not work with --model, which has its own cache"),
    "revision": (["run", "--revision", "main"], "--revision is for checkpoints on a hub, and "),
    "two layers walked": (["trace", "--layer", "0,1"], "mha trace takes one layer, but --layer names 2"),
    "two layers decoded": (["decode", "--layer", "0-2"], "mha decode takes one layer, but --layer names 3"),
    "repeat": (["heads", "--repeat", "3"], "--repeat does not work with --model, which runs once"),
    "kind that it has not": (["run", "--layer", "decoder.1"], ""),
    "layer": (["run", "--layer", "3"], "--layer 3 is out of range: 0 to 2"),
    "layer of heads": (["heads", "--layer", "0,5"], "--layer 5 "),
    "layer walked": (["trace", "--layer", "7"], "--layer 7 "),
    "layer decoded": (["decode", "--layer", "3"], "--layer 3 "),
    "layer that is no list": (["run", "--layer", "x"], "--layer x is not a list such as 5, 0,8-10 or decoder.5,cross.5"),
    "kind of layer": (["heads", "--layer", "middle.1"], "--layer middle.1 "),
    "head": (["run", "--head", "0,4"], "--head 4 is out of range: 0 to 3"),
    "head of heads": (["heads", "--head", "9"], "--head 9 "),
    "head decoded": (["decode", "--head", "4"], "--head 4 "),
    "map": (["heads", "--map", "4"], "--map 4 "),
    "query": (["heads", "--query", "99"], "--query 99 "),
    "cell": (["trace", "--cell", "4,0,0"], ""),
    "prompt-len": (["decode", "--prompt-len", "99"], ""),
    "keep": (["run", "--keep", "pattern,out"], "--keep: 'out' is not one of pattern, scores, qk, z"),
    "keep of decode": (["decode", "--keep", "z"], ""),
    "context": (["run", "--context", "a"], ""),
    "formats": (["run", "--json", "--csv"], "--json and --csv exclude each other: stdout takes one of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_WAYS)
def test_what_a_command_does_not_do_with_a_checkpoint_is_refused(name: str, mha: Mha, gpt2: str) -> None:
    (command, *words), message = OWN_WAYS[name]
    said = mha(command, "--model", gpt2, TEXT, *words, code=2)
    assert said.out == ""
    if "--json" in words:
        assert json.loads(said.err)["error"]["message"] == message
    else:
        assert said.err.startswith(f"mha: error: {message}")


@pytest.mark.parametrize(
    ("command", "option"),
    [("run", ["--layer", "1"]), ("run", ["--chat", "c"]), ("run", ["--span", "a=0:1"]), ("run", ["--generate", "3"]),
     ("run", ["--words"]), ("run", ["--revision", "main"]), ("heads", ["--layer", "1"]), ("heads", ["--chat", "c"]),
     ("trace", ["--layer", "1"]), ("decode", ["--generate", "2"]), ("decode", ["--layer", "0"])],
)  # fmt: skip
def test_what_only_a_checkpoint_understands_must_come_with_one(command: str, option: list[str], mha: Mha) -> None:
    said = mha(command, TEXT, *option, code=2)
    assert said.err == f"mha: error: {option[0]} needs --model\nhint: add --model DIR\n"


def spoiled(source: str, target: Path, *, without: str = "", **written: bytes) -> str:
    """A copy of a folder without some files, and with others."""
    shutil.copytree(source, target)
    for path in target.glob(without) if without else ():
        path.unlink()
    for name, content in written.items():
        (target / name.replace("__", ".")).write_bytes(content)
    return str(target)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no config": ({"without": "config.json"}, "{} has no config.json: "),
    "pickles": ({"without": "*.safetensors", "pytorch_model__bin": b"PK"},
                "{} has its weights as pickles "),
    "broken tokenizer": ({"tokenizer__json": b'{"version": 1'}, "the tokenizer of {} "),
    "broken merges": ({"tokenizer__json": b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["b c"]}}'},
                      "the tokenizer of {} "),
    "broken config": ({"config__json": b"{"}, "{}/config.json "),
    "cut weights": ({"model__safetensors": b"\x08"}, "{}/model.safetensors: "),
    "unknown family": ({"config__json": b'{"model_type": "nobody"}'},
                       "config.json of {} "),
}  # fmt: skip


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "json"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_folder_that_cannot_be_used_is_told_in_one_line(
    name: str, form: tuple[str, ...], mha: Mha, gpt2: str, tmp_path: Path
) -> None:
    changes, begins = FAULTS[name]
    folder = spoiled(gpt2, tmp_path / "model", **changes)
    command = COMMANDS[len(name) % 4]
    said = mha(command, "--model", folder, TEXT, *form, code=1)
    assert said.out == ""
    lines = said.err.splitlines()
    if form:
        assert len(lines) == 1
        error = json.loads(lines[0])["error"]
        assert error.keys() == {"code", "message", "hint", "path", "exit"}
        assert error["exit"] == 1
        assert error["message"].startswith(begins.format(folder))
    else:
        assert lines[0].startswith("mha: error: " + begins.format(folder))
        assert [line.startswith("hint: ") for line in lines[1:]] in ([], [True])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_not_there_is_told_with_what_an_id_looks_like(command: str, mha: Mha, tmp_path: Path) -> None:
    folder = str(tmp_path / "absent")
    said = mha(command, "--model", folder, TEXT, code=1)
    assert (
        said.err == f"mha: error: {folder} does not exist\nhint: the id of a checkpoint on a hub looks like org/name\n"
    )


@pytest.mark.parametrize("command", ["run", "heads"])
def test_a_chat_that_is_no_json_or_stands_beside_a_text_is_refused(
    command: str, mha: Mha, gpt2: str, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "user"')
    said = mha(command, "--model", gpt2, "--chat", str(path), code=1)
    assert said.err.startswith(f"mha: error: {path} ")
    path.write_text('[{"role": "user", "content": "hi"}]')
    beside = mha(command, "--model", gpt2, TEXT, "--chat", str(path), code=2)
    assert beside.err == (
        "mha: error: --chat takes the place of a text, but a text is given too\nhint: leave out the text or --chat\n"
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", COMMANDS)
def test_without_the_extra_the_command_that_installs_it_is_told(
    command: str, mha: Mha, gpt2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = mha(command, "--model", gpt2, TEXT, "--json", code=1)
    error = json.loads(said.err)["error"]
    assert error["hint"] == 'pip install "transformers<6,>=5.3" "tokenizers>=0.22" installs it'
    assert error["code"] == "missing-extra"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_text_of_white_space_is_refused(command: str, mha: Mha, gpt2: str) -> None:
    said = mha(command, "--model", gpt2, " \t ", code=1)
    assert said.err == "mha: error: text 0 is only white space\n"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", ["run", "heads", "trace"])
def test_a_look_that_changes_what_comes_out_ends_with_3(
    command: str, mha: Mha, gpt2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "are_identical", lambda one, other: False)
    said = mha(command, "--model", gpt2, TEXT, code=3)
    assert said.out != ""
    assert said.err.startswith("mha: error: ")


def test_usage_errors_need_no_torch(gpt2: str, tmp_path: Path) -> None:
    """The process would end at once if it imported torch."""
    for words in (["run", "--layer", "9"], ["heads", "--causal"], ["decode", "--head", "4"]):
        attempt(tmp_path, words[0], "--model", gpt2, TEXT, *words[1:], code=2, form=("--json",))


def test_an_id_of_a_hub_without_a_network_is_told_in_time(tmp_path: Path) -> None:
    launch = Launch(WITH_TORCH, env={"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")})
    says = ["--model nobody/nothing"]
    done = attempt(
        tmp_path,
        "run",
        "--model",
        "nobody/nothing",
        TEXT,
        code=1,
        form=("--json",),
        says=says,
        writes={CACHE},
        launch=launch,
    )
    assert done.error["code"] == "no-model"


# ------------------------------------------------------------------------------------------------------------- strange tokens

HOSTILE = "\x1b]52;c;aGk=\x07 \x1b[2J \x9b31m [red]x[/b] \u202eevil \u2066iso \u200bzero \ufeff \U000e0041 日本 end"


@pytest.fixture(scope="module")
def whole_tokens(gpt2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose tokens are the hostile words themselves."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    shutil.copytree(gpt2, folder)
    known = {word: i for i, word in enumerate(["?", *HOSTILE.split(" ")])}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
        "post_processor": None, "decoder": None, "model": {"type": "WordLevel", "vocab": known, "unk_token": "?"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", COMMANDS)
def test_hostile_tokens_are_shown_and_never_obeyed(command: str, mha: Mha, whole_tokens: str, tmp_path: Path) -> None:
    """`mha` of these tests refuses every raw character that a terminal would obey."""
    path = tmp_path / "text"
    path.write_text(HOSTILE)
    more = {"run": ["--layer", "0", "--head", "0", "--all"], "heads": ["--query", "0-10", "--rows", ":"],
            "trace": ["--cell", "0,3,1"], "decode": ["--all"]}[command]  # fmt: skip
    said = mha(command, "--model", whole_tokens, "--file", str(path), *more)
    shown = [piece for piece in (r"\x1b]52", r"\x1b[2J", r"\u009b31m", "[red]x[/b]", r"\u202eevil", r"\u2066iso",
                                 r"\u200bzero", r"\ufeff", r"\U000e0041", "日本") if piece in said.out]  # fmt: skip
    assert len(shown) == 10
    document = json.loads(mha(command, "--model", whole_tokens, "--file", str(path), "--json").out)
    assert document["sequences"][0]["tokens"] == HOSTILE.split(" ")


def test_a_hostile_name_of_a_folder_is_shown_and_never_obeyed(mha: Mha, gpt2: str, tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J\u202eb"
    shutil.copytree(gpt2, folder)
    assert r"a\x1b[2J\u202eb" in "".join(mha("run", "--model", str(folder), "the cat").out.split())
    said = mha("run", "--model", str(folder) + "\x9b", TEXT, code=1)
    assert r"a\x1b[2J\u202eb\u009b does not exist" in said.err


# ------------------------------------------------------------------------------------------------------- processes and signals

NO_TRANSFORMERS = {"transformers": "import os\nos._exit(99)\n"}


@pytest.mark.full
def test_a_run_without_a_checkpoint_and_help_do_without_transformers(tmp_path: Path) -> None:
    attempt(tmp_path, "run", "the cat sat", launch=Launch(NO_TRANSFORMERS))
    assert "--model" in attempt(tmp_path, "heads", "--help").stdout


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Exit code, output and errors of a process after Ctrl-C."""
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return shell_code(process.returncode), stdout.decode(), stderr.decode()


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.full
def test_ctrl_c_while_a_long_text_is_looked_at_ends_it(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoints.of("llama", max_position_embeddings=32_768)
    (tmp_path / "long.txt").write_text(STORY.read_text() * 3)
    before = state_of(tmp_path)
    words = ["heads", "--model", folder, "--file", "long.txt", "--max-tokens", "12000", "--save", "r"]
    launch = Launch(WITH_TORCH, env=ONE_THREAD)
    process = start(tmp_path, words, launch, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    told = process.stderr.readline().decode()
    assert re.fullmatch(r"mha: 12,000 tokens, 3 layers: about .*B in addition to the weights\n", told)
    time.sleep(0.3)
    found = ended(process)
    assert found == (130, "", "mha: interrupted: 0 of 3 layers are finished, and nothing was saved\n")
    assert state_of(tmp_path).keys() - {CACHE} == before.keys()


STOPPING = """
import time
from pathlib import Path
import mhacli.compute.checkpoint.layers as study
real, seen = study.PassInspection._inspect, []
def slow(*given, **named):
    seen.append(1)
    if len(seen) == 3:
        Path('modules/reached').touch()
        time.sleep(600)
    return real(*given, **named)
study.PassInspection._inspect = slow
"""


@pytest.mark.full
def test_the_layers_that_are_finished_are_told_at_ctrl_c(gpt2: str, tmp_path: Path) -> None:
    launch = Launch({"sitecustomize": STOPPING}, env=ONE_THREAD)
    words = ["heads", "--model", gpt2, TEXT, "--save", "r"]
    process = start(tmp_path, words, launch, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "modules" / "reached").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    code, stdout, stderr = ended(process)
    assert code == 130
    assert not (tmp_path / "r").exists()
    rows = re.findall(r"^ +(\d) +(\d) [^\w\s] [a-z]", stdout, re.MULTILINE)
    assert rows == [(str(i), str(h)) for i in range(2) for h in range(N_HEADS)]
    assert stderr == "mha: interrupted: 2 of 3 layers are finished, and nothing was saved\n"


def test_outputs_that_inspection_would_change_end_with_3(mha: Mha, gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhacli.compute.checkpoint.run.are_identical", lambda one, other: False)
    said = mha("run", TEXT, "--model", gpt2, code=3)
    assert "inspecting CHANGED the outputs" in " ".join(said.out.split())
    assert said.err.startswith("mha: error: the model's outputs with inspection differ from those without\n")


def test_padding_of_a_pair_stays_on_the_right(mha: Mha, checkpoints: Checkpoints) -> None:
    said = mha("run", TEXT, "--model", checkpoints.of("t5"), "--padding", "left", code=2)
    assert said.err == (
        "mha: error: --padding left does not work with a pair of encoder and decoder\nhint: leave out --padding\n"
    )
