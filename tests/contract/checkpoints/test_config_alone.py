"""A config without weights: they are drawn, every view says so, and weights that are missing by
mistake are never replaced.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support import checkpoints
from support.checkpoints import FAMILIES, TEXT

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LARGE = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}
"""The config of a model of 70 billion parameters."""
MARK = "random weights (seed 0)"


def config_alone(place: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    """A folder with nothing but a config."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    return place


def with_tokenizer(place: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    """A folder with a config and a tokenizer."""
    config_alone(place, config)
    for path in checkpoints.folder("llama").iterdir():
        if "token" in path.name:
            shutil.copy(path, place)
    return place


@pytest.mark.parametrize(("words", "seed"), [((), 0), (("--seed", "5"), 5)])
def test_the_weights_are_those_that_transformers_draws_from_the_seed(
    words: tuple[str, ...], seed: int, mha: Any, tmp_path: Path
) -> None:
    place = config_alone(tmp_path / "m")
    record = mha("run", TEXT, "--model", "m", "--json", *words).json
    with checkpoints.quiet():
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(place)
        model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
        ids = torch.tensor([[*TEXT.encode()]])
        with torch.no_grad():
            patterns = model(ids, output_attentions=True).attentions
    assert record["model"]["random_weights"] == seed
    assert not record["model"]["tiny"]
    for layer, pattern in zip(record["layers"], patterns, strict=True):
        shown = np.array(layer["pattern"], dtype=float)
        assert np.allclose(np.nan_to_num(shown), pattern.numpy(), atol=1e-6)


def test_a_seed_of_check_draws_the_weights(mha: Any, tmp_path: Path) -> None:
    config_alone(tmp_path / "m")
    report = mha("check", "--model", "m", "--seed", "5", "--length", "16", "--json").json
    assert report["verdict"] == "right"
    assert report["random_weights"] == 5


COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", TEXT, "--model", "m"),
    "one head": ("run", TEXT, "--model", "m", "--layer", "0", "--head", "1"),
    "in brief": ("heads", TEXT, "--model", "m", "--brief"),
    "heads": ("heads", TEXT, "--model", "m"),
    "trace": ("trace", TEXT, "--model", "m"),
    "decode": ("decode", "a cat", "--model", "m"),
    "effect": ("effect", "a cat", "--model", "m"),
    "scan": ("scan", "texts.txt", "--model", "m", "--out", "s.mha"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_line_and_the_record_say_that_weights_are_random(
    name: str, mha: Any, tmp_path: Path
) -> None:
    config_alone(tmp_path / "m")
    (tmp_path / "texts.txt").write_text("a cat")
    words = COMMANDS[name]
    assert MARK in " ".join(mha(*words).stdout.splitlines()[:2])
    assert mha(*words, "--json").json["model"]["random_weights"] == 0


def test_reports_say_that_weights_are_random(mha: Any, tmp_path: Path) -> None:
    with_tokenizer(tmp_path / "m")
    checked = mha("check", "--model", "m", "--length", "16")
    assert MARK in checked.stdout.splitlines()[0]
    examined = mha("doctor", "--model", "m")
    assert MARK in examined.stdout
    assert mha("doctor", "--model", "m", "--json").json["model"]["random_weights"] == 0
    other = str(checkpoints.folder("llama"))
    compared = mha("diff", "m", other, TEXT, code=3)
    assert f"A has {MARK}" in compared.stdout
    document = mha("diff", other, "m", TEXT, "--json", code=3).json
    assert document["random_weights"] == {"b": 0}
    assert mha("diff", "m", TEXT, "--save", "places", "--json", code=2).error["code"] == "usage"


@pytest.mark.parametrize("name", ["run", "effect", "trace"])
def test_every_picture_says_that_weights_are_random(name: str, mha: Any, tmp_path: Path) -> None:
    config_alone(tmp_path / "m")
    figure = ("--figure", "grid") if name == "run" else ()
    mha(
        *COMMANDS[name],
        *figure,
        *("--svg", "picture.svg", "--html", "page.html"),
    )
    drawn = (tmp_path / "picture.svg").read_text().partition("</metadata>")[2]
    assert MARK in " ".join(drawn.replace("</text>", " ").split())
    assert MARK in (tmp_path / "page.html").read_text()


def test_a_checkpoint_with_weights_is_not_marked(mha: Any) -> None:
    record = mha("run", TEXT, "--model", checkpoints.folder("llama"), "--json").json
    assert record["model"]["random_weights"] is None


# ---------------------------------------------------------------------- weights missing by mistake


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n"
MISTAKES: dict[str, Mapping[str, str]] = {
    "an index without its files": {"model.safetensors.index.json": '{"weight_map": {"w": "a"}}'},
    "an index of pickles": {"pytorch_model.bin.index.json": '{"weight_map": {"w": "a.bin"}}'},
    "a pickle": {"pytorch_model.bin": "x"},
    "weights of TensorFlow": {"tf_model.h5": "x"},
    "weights of Flax": {"flax_model.msgpack": "x"},
    "weights in a folder within": {"original/consolidated.00.pth": "x"},
    "a download that stopped": {".cache/huggingface/download/x.incomplete": "x"},
    "a pointer of Git LFS": {"model.safetensors": LFS},
    "pointers of Git LFS": {
        "model-00001-of-00002.safetensors": LFS,
        "model-00002-of-00002.safetensors": LFS,
    },
    "an adapter": {"adapter_config.json": "{}", "adapter_model.safetensors": "x"},
}


@pytest.mark.parametrize("tiny", [(), ("--tiny",)], ids=["whole", "tiny"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_weights_that_are_missing_by_mistake_are_never_random(
    mistake: str, tiny: tuple[str, ...], mha: Any, tmp_path: Path
) -> None:
    place = config_alone(tmp_path / "m")
    for name, content in MISTAKES[mistake].items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)
    for words in (("run", TEXT), ("check",)):
        assert mha(*words, "--model", "m", *tiny, "--json", code=1).error["code"] == "bad-file"


def test_a_cache_without_weights_is_an_error(mha: Any, tmp_path: Path) -> None:
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    place = config_alone(tmp_path / "models--a--b" / "snapshots" / "0123")
    assert mha("run", TEXT, "--model", place, "--json", code=1).error["code"] == "bad-file"


def test_what_describes_a_model_does_not_count_as_weights(mha: Any, tmp_path: Path) -> None:
    place = with_tokenizer(tmp_path / "m")
    (place / "1_Pooling").mkdir()
    for name in ("README.md", "LICENSE", ".gitattributes", "use.py", "1_Pooling/config.json"):
        (place / name).write_text("{}")
    assert mha("run", TEXT, "--model", "m", "--json").json["model"]["random_weights"] == 0


@pytest.mark.parametrize("name", ["heads", "trace", "decode", "effect"])
def test_each_command_draws_other_weights_from_another_seed(
    name: str, mha: Any, tmp_path: Path
) -> None:
    config_alone(tmp_path / "m")
    records = [mha(*COMMANDS[name], "--tiny", "--seed", seed, "--json").json for seed in "78"]
    assert [record["model"]["random_weights"] for record in records] == [7, 8]
    assert name == "trace" or records[0]["heads"] != records[1]["heads"]


def test_what_is_for_random_weights_is_refused_where_weights_are(mha: Any) -> None:
    place = checkpoints.folder("llama")
    for words in (("--tiny",), ("--seed", "0")):
        ended = mha("run", TEXT, "--model", place, *words, code=2)
        assert "has weights" in ended.error["message"]
    assert mha("check", "--model", place, "--tiny", "--json", code=2).error["code"] == "usage"


def test_code_of_a_config_is_refused(mha: Any, tmp_path: Path) -> None:
    config_alone(tmp_path / "m", {"model_type": "own", "auto_map": {"AutoConfig": "code.C"}})
    for tiny in ((), ("--tiny",)):
        ended = mha("run", TEXT, "--model", "m", *tiny, code=1)
        assert "code of its own" in ended.error["message"]


def test_a_listing_of_weights_needs_weights(mha: Any, tmp_path: Path) -> None:
    config_alone(tmp_path / "m")
    assert mha("weights", "info", "m", "--json", code=1).error["code"] == "bad-file"


# ------------------------------------------------------------------------------ sizes and tokens


def test_70_billion_parameters_are_refused_with_their_bytes_and_traced_without_any(
    mha: Any, tmp_path: Path
) -> None:
    config_alone(tmp_path / "m", LARGE)
    d, table = 8192, 128256 * 8192
    layer = 2 * d * d + 2 * d * 1024 + 3 * d * 28672 + 2 * d
    for words, n_tables in ((("run", TEXT), 1), (("check",), 2)):
        n = n_tables * table + 80 * layer + d
        ended = mha(*words, "--model", "m", "--json", code=1)
        assert ended.error["code"] == "out-of-memory"
        # 2 bytes a number, and the largest tensor twice
        assert f"{2 * (n + table) / 2**30:.1f} GiB" in ended.error["message"]
        assert "--tiny" in ended.error["hint"]
    record = mha("trace", "a cat", "--model", "m", "--layer", "79", "--json").json
    steps = {step["site"]: step for step in record["trace"]}
    assert steps["q"]["shape"] == [1, 64, 5, 128]
    assert steps["k"]["shape"] == [1, 8, 5, 128]
    assert steps["q_proj"]["flops"] == 2 * 5 * 8192 * 8192
    assert record["self_check"]["ok"] is None
    assert record["model"]["random_weights"] == 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gptj", "gemma2", "t5", "mixtral"])
def test_shapes_without_numbers_are_those_of_a_pass_with_numbers(
    family: str, mha: Any, tmp_path: Path
) -> None:
    config = checkpoints.from_config(FAMILIES[family].kind, FAMILIES[family].config).config
    config_alone(tmp_path / "m", config.to_dict())
    words = ("trace", "a cat", "--model", "m", "--json")
    alone, whole = mha(*words).json["trace"], mha(*words, "--values").json["trace"]
    for name, more in (("shapes", ()), ("numbers", ("--values",))):
        mha(*words[:-1], *more, "--save", name)
    assert mha("show", "shapes", "--json").json["trace"] == alone
    document = mha("diff", "shapes", "numbers", "--json").json
    sites = [site for layer in document["layers"] for site in layer["sites"]]
    n_same = len([site for site in sites if site["shape_a"] == site["shape_b"]])
    assert {str(n_same), str(len(sites))} <= {*re.findall("[0-9]+", document["summary"])}
    named = ("site", "axes", "shape", "dtype", "flops", "bytes", "layout", "view_of")
    masks = ("mask",)
    of_alone, of_whole = (
        [[step.get(name) for name in named] for step in steps if step["site"] not in masks]
        for steps in (alone, whole)
    )
    assert of_alone == of_whole


def test_bytes_are_ids_modulo_the_vocabulary_without_a_tokenizer(mha: Any, tmp_path: Path) -> None:
    config_alone(tmp_path / "m", LLAMA | {"vocab_size": 100})
    ended = mha("run", "the çat", "--model", "m", "--json")
    assert ended.json["sequences"][0]["ids"] == [byte % 100 for byte in "the çat".encode()]
    assert "modulo 100" in ended.stderr


def test_a_tokenizer_decides_the_ids_and_keeps_its_vocabulary_in_a_tiny_model(
    mha: Any, tmp_path: Path
) -> None:
    with_tokenizer(tmp_path / "m", LLAMA | {"vocab_size": 1000})
    usual = mha("run", TEXT, "--model", checkpoints.folder("llama"), "--json").json
    for tiny in ((), ("--tiny",)):
        record = mha("run", TEXT, "--model", "m", *tiny, "--json").json
        assert record["sequences"][0]["ids"] == usual["sequences"][0]["ids"]
        assert record["model"]["n_vocabulary"] == 1000
        assert record["model"]["tiny"] == bool(tiny)


def test_ids_of_a_tokenizer_outside_of_the_vocabulary_are_refused(mha: Any, tmp_path: Path) -> None:
    with_tokenizer(tmp_path / "m", LLAMA | {"vocab_size": 40})
    for tiny in ((), ("--tiny",)):
        ended = mha("run", TEXT, "--model", "m", *tiny, "--json", code=1)
        assert ended.error["code"] == "unknown-token"


def test_special_ids_outside_of_the_vocabulary_move_into_a_tiny_model(
    mha: Any, tmp_path: Path
) -> None:
    outside = LLAMA | {"vocab_size": 100, "pad_token_id": 50256, "eos_token_id": [50257, 2]}
    config_alone(tmp_path / "m", outside)
    assert mha("run", TEXT, "--model", "m", "--json", code=1).error["code"] == "bad-file"
    report = mha("check", "--model", "m", "--tiny", "--length", "16", "--json").json
    assert report["verdict"] == "right"
    assert report["tiny"]


def test_a_device_map_does_not_place_random_weights(mha: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config_alone(tmp_path / "m")
    ended = mha("run", TEXT, "--model", "m", "--device-map", "auto", "--json", code=2)
    assert ended.error["code"] == "usage"


def test_a_scan_of_a_tiny_model_does_not_go_on_with_the_whole_one(mha: Any, tmp_path: Path) -> None:
    config_alone(tmp_path / "m")
    (tmp_path / "texts.txt").write_text("a cat")
    mha(*COMMANDS["scan"], "--tiny")
    assert mha(*COMMANDS["scan"], "--json", code=2).error["code"] == "usage"
