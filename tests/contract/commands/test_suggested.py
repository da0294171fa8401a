"""The command that a screen suggests is about the head that stands out there."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import load_file, save_file
from support import checkpoints
from support.checkpoints import N_HEADS
from support.mha import run

ON_A_SCREEN = {"env": {"TERM": "dumb"}, "terminal": (200, 60)}
TEXTS = ("the cat sat", "--context", "a dog ran")


def option(text: str, name: str) -> str:
    """The value of an option in the command that a screen suggests."""
    (word,) = re.findall(rf"^next: .*--{name}[\s\\]+(\S+)", text, re.M | re.S)
    return str(word)


def test_it_draws_the_head_that_exceeds_uniform_attention_most(tmp_path: Path) -> None:
    model = ("--model", checkpoints.folder("t5"), "--layer", "decoder.0,decoder.1")
    words = ("heads", *TEXTS, *model, "--all", "--save", "r")
    screen = run(tmp_path, *words, **ON_A_SCREEN).stdout
    heads = run(tmp_path, "show", "r", "--json").json["heads"]
    excess = {
        (f"decoder.{head['layer']}", head["head"]): (head["sink"] - head["uniform"]["sink"])
        / (1 - head["uniform"]["sink"])
        for head in heads
        if head["kind"] == "sink"
    }
    assert {head["kind"] for head in heads} == {"sink", "mixed"}
    assert len(excess) > 1
    named = option(screen, "layer"), int(option(screen, "map"))
    assert named == max(excess, key=excess.__getitem__) != ("decoder.0", 0)


def test_it_draws_the_first_head_of_a_requested_order(tmp_path: Path) -> None:
    words = ("heads", "the cat sat", "--sort", "distance", "--save", "r")
    screen = run(tmp_path, *words, **ON_A_SCREEN).stdout
    heads = run(tmp_path, "show", "r", "--json").json["heads"]
    farthest = max(heads, key=lambda head: head["distance"])
    assert int(option(screen, "map")) == farthest["head"] != 0


def test_it_is_about_cross_attention_where_there_is_some(tmp_path: Path) -> None:
    texts = (*TEXTS, "--model", checkpoints.folder("t5"))
    for command in ("run", "heads"):
        screen = run(tmp_path, command, *texts, **ON_A_SCREEN).stdout
        assert option(screen, "layer").startswith("cross.")
        alone = run(tmp_path, command, *texts, "--layer", "encoder.1", **ON_A_SCREEN).stdout
        assert option(alone, "layer") == "encoder.1"


def test_after_two_models_it_draws_the_head_whose_keys_differ(tmp_path: Path) -> None:
    other = checkpoints.copy_of("llama", tmp_path / "other", num_key_value_heads=N_HEADS)
    weights = load_file(other / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("layers.1.self_attn.k_proj.weight")]
    weights[name].unflatten(0, (N_HEADS, -1))[2] *= 2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    model = checkpoints.folder("llama", num_key_value_heads=N_HEADS)
    words = ("diff", model, "other", "the cat sat")
    screen = run(tmp_path, *words, code=3, **ON_A_SCREEN).stdout
    assert re.findall(r"--layer[\s\\]+(\S+)[\s\\]+--head[\s\\]+(\S+)", screen) == [("1", "2")] * 2
