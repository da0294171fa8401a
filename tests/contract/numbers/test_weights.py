"""Weights on disk: saved, loaded again with every bit, used in Python, and refused where they are
not what they were.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from support import oracle
from support.layers import cells, expected, require_near, weights_of
from support.mha import run

from mhacli import MultiHeadAttention
from mhacli.attention import masks

TEXTS = ["the cat sat on the mat", "a cat sat"]
WORDS = ["a", "cat", "mat", "on", "sat", "the"]
GROUPED = "--d-model 10 --heads 6 --kv-heads 2 --d-head 4 --d-v 5 --init uniform".split()
SQUARE = "--d-model 6 --heads 3 --init uniform --dtype float64".split()
SQUARE += "--positions learned --max-positions 6".split()
LAYERS = {
    "grouped": "--dtype float64",
    "learned, other input": "--positions learned --max-positions 7 --d-input 9 --dtype float32",
    "no biases": "--no-bias --no-out-proj --dtype float16 --positions rope",
    "scores": "--softcap 7.5 --scale 0.25 --causal --window 3,0 --dtype bfloat16 --positions alibi",
}


def saved(mha: Any, *words: str, file: str = "w.st") -> Any:
    return mha(
        "run",
        *TEXTS,
        *words,
        "--save-weights",
        file,
        *"--repeat 1 --keep pattern,z,out --json".split(),
    ).json


def rewritten(path: Path, change: Any) -> None:
    """The same file, its metadata untouched, with tensors changed by `change(tensors)`."""
    with safetensors.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_comes_back_with_its_settings_and_every_bit(
    name: str, mha: Any, tmp_path: Path
) -> None:
    first = saved(mha, *GROUPED, *LAYERS[name].split(), "--seed", "3")
    again = saved(mha, "--weights", "w.st", file="again.st")
    for field in ("pattern", "z", "out", "vocabulary", "sequences"):
        assert again[field] == first[field], field
    assert again["weights"] == "w.st"
    of_a_run = {"seed", "init", "device", "threads"}
    for field in first["config"].keys() - of_a_run:
        assert again["config"][field] == first["config"][field], field
    one, other = (safetensors.torch.load_file(tmp_path / file) for file in ("w.st", "again.st"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[tensor_name]) for tensor_name, tensor in one.items())


def test_the_file_has_the_names_and_shapes_of_hugging_face_and_one_key_of_metadata(
    mha: Any, tmp_path: Path
) -> None:
    saved(mha, *GROUPED, "--positions", "learned", "--max-positions", "7", "--d-input", "9")
    shapes = {
        name: tuple(t.shape) for name, t in safetensors.torch.load_file(tmp_path / "w.st").items()
    }
    assert shapes == {
        "embed.weight": (6, 9),
        "embed_positions.weight": (7, 9),
        "q_proj.weight": (24, 9),
        "q_proj.bias": (24,),
        "k_proj.weight": (8, 9),
        "k_proj.bias": (8,),
        "v_proj.weight": (10, 9),
        "v_proj.bias": (10,),
        "o_proj.weight": (10, 30),
        "o_proj.bias": (10,),
    }
    with safetensors.safe_open(tmp_path / "w.st", framework="pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["mha"]
    document = json.loads(metadata["mha"])
    assert metadata["mha"] == json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert document["format"] == "mha.weights/1"
    assert (document["tokenizer"], document["vocabulary"]) == ("word", WORDS)
    of_the_run = "train device threads seed random documents score_bias"
    assert not document["config"].keys() & set(of_the_run.split())


def test_the_same_layer_gives_the_same_bytes_whatever_the_run(mha: Any, tmp_path: Path) -> None:
    saved(mha, *GROUPED, "--positions", "rope")
    saved(
        mha,
        *GROUPED,
        *"--positions rope --padding left --threads 1 --device cpu".split(),
        file="again.st",
    )
    assert (tmp_path / "w.st").read_bytes() == (tmp_path / "again.st").read_bytes()


def test_python_computes_with_a_saved_layer_what_the_command_computes(
    mha: Any, tmp_path: Path
) -> None:
    document = saved(mha, *GROUPED, "--dtype", "float64", "--causal", "--positions", "rope")
    tensors = safetensors.torch.load_file(tmp_path / "w.st")
    layer = (
        MultiHeadAttention(10, 6, n_kv_heads=2, d_head=4, d_v=5, positions="rope").double().eval()
    )
    layer.load_state_dict(
        {name: tensor for name, tensor in tensors.items() if not name.startswith("embed")}
    )
    x = tensors["embed.weight"][torch.tensor(document["sequences"][0]["ids"])][None]
    with torch.no_grad():
        out, pattern = layer(x, allowed=masks.causal())
    require_near(out.numpy(), cells(document["out"])[:1], 1e-12)
    require_near(pattern.numpy(), cells(document["pattern"])[:1], 1e-12)


def test_python_saves_a_layer_that_the_command_computes_with(mha: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    layer = MultiHeadAttention(
        10, 6, n_kv_heads=2, d_head=3, d_v=5, d_input=4, init="uniform", generator=generator
    ).double()
    tensors = {
        **layer.state_dict(),
        "embed.weight": torch.randn(6, 4, generator=generator, dtype=torch.float64),
    }
    safetensors.torch.save_file(tensors, tmp_path / "w.st", metadata={"format": "pt"})
    words = ["--weights", "w.st", "--heads", "6", "--positions", "none", "--repeat", "1"]
    document = mha("run", *TEXTS, *words, "--json").json
    widths = {"n_kv_heads": 2, "d_head": 3, "d_v": 5, "d_model": 10, "d_input": 4}
    assert {name: document["config"][name] for name in widths} == widths
    assert document["config"]["dtype"] == "float64"
    require_near(
        document["out"], expected(document, weights_of(tmp_path / "w.st")).layer.out, 1e-12
    )


def test_a_file_loads_whatever_the_length_of_its_header(mha: Any, tmp_path: Path) -> None:
    layer = MultiHeadAttention(6, 3).state_dict() | {"embed.weight": torch.ones(6, 6)}
    lengths = set()
    for n in range(0, 400, 4):
        safetensors.torch.save_file(layer, tmp_path / "w.st", metadata={"note": "n" * n})
        lengths.add(int.from_bytes((tmp_path / "w.st").read_bytes()[:8], "little"))
        if 896 in lengths:
            break
    assert 896 in lengths
    mha("run", *TEXTS, "--weights", "w.st", "--heads", "3", "--repeat", "1", "--json")


def test_loading_in_another_dtype_rounds_the_saved_numbers_once(mha: Any, tmp_path: Path) -> None:
    saved(mha, *GROUPED, "--dtype", "float64")
    saved(mha, "--weights", "w.st", "--dtype", "bfloat16", file="again.st")
    one, other = (safetensors.torch.load_file(tmp_path / file) for file in ("w.st", "again.st"))
    assert all(torch.equal(tensor.bfloat16(), other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("positions", ["none", "rope", "alibi"])
def test_a_layer_may_be_read_with_other_positions_and_another_scale(
    positions: str, mha: Any, tmp_path: Path
) -> None:
    saved(mha, *GROUPED, "--positions", "learned", "--max-positions", "7", "--dtype", "float64")
    document = saved(
        mha, "--weights", "w.st", "--positions", positions, "--scale", "2", file="again.st"
    )
    require_near(
        document["out"], expected(document, weights_of(tmp_path / "w.st")).layer.out, 1e-12
    )
    assert document["config"]["scale"] == 2.0
    assert "embed_positions.weight" not in safetensors.torch.load_file(tmp_path / "again.st")


def test_projections_do_not_depend_on_the_words_or_positions_but_on_the_seed(
    mha: Any, tmp_path: Path
) -> None:
    saved(mha, *GROUPED)
    others = ["quite other words", *GROUPED, "--positions", "rope", "--save-weights", "words.st"]
    mha("run", *others, "--repeat", "1", "--json")
    saved(mha, *GROUPED, "--seed", "1", file="seed.st")
    saved(mha, *GROUPED, "--dtype", "float64", file="exact.st")
    first, words, seed, exact = (
        weights_of(tmp_path / f"{file}.st") for file in ("w", "words", "seed", "exact")
    )
    for name in first.keys() - {"embed.weight"}:
        assert np.array_equal(first[name], words[name]), name
        assert not np.array_equal(first[name], seed[name]), name
    assert all(np.abs(first[name] - exact[name]).max() <= 2**-22 for name in first), (
        "the same numbers, rounded"
    )


# ---------------------------------------------------------------------------------- what is refused


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a layer with square matrices."""
    folder = tmp_path_factory.mktemp("square")
    saved(functools.partial(run, folder), *SQUARE)
    return (folder / "w.st").read_bytes()


def transpose(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name].T.contiguous()})


def exchange(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name][[1, 0, *range(2, 6)]].contiguous()})


CHANGED = {
    **{
        f"transposed {name}": (f"{name}.weight", transpose(f"{name}.weight"))
        for name in ("embed", "embed_positions", "q_proj", "k_proj", "v_proj", "o_proj")
    },
    **{
        f"rows of {name}.{part}": (f"{name}.weight", exchange(f"{name}.{part}"))
        for name, part in (
            ("q_proj", "weight"),
            ("k_proj", "bias"),
            ("v_proj", "bias"),
            ("embed_positions", "weight"),
        )
    },
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_matrix_that_was_changed_after_saving_is_noticed(
    name: str, square: bytes, mha: Any, tmp_path: Path
) -> None:
    (tmp_path / "w.st").write_bytes(square)
    mentioned, change = CHANGED[name]
    rewritten(tmp_path / "w.st", change)
    ended = mha("run", *TEXTS, "--weights", "w.st", "--json", code=3)
    assert (ended.error["code"], ended.error["path"]) == ("probe-mismatch", "w.st")
    assert mentioned in ended.said


def test_the_probe_forgives_the_rounding_of_other_machines(
    square: bytes, mha: Any, tmp_path: Path
) -> None:
    (tmp_path / "w.st").write_bytes(square)
    rewritten(
        tmp_path / "w.st", lambda tensors: [tensor.mul_(1 + 1e-9) for tensor in tensors.values()]
    )
    mha("run", *TEXTS, "--weights", "w.st", "--repeat", "1", "--json")


def lacking(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["v_proj.bias"], tensors["embed_positions.weight"]


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_positions.weight"] = torch.zeros(2, 6, 6, dtype=torch.float64)


DAMAGED: dict[str, tuple[Any, list[str], int, list[str]]] = {
    "missing": (lacking, [], 1, ["v_proj.bias", "embed_positions.weight [6, 6]"]),
    "other table of positions": (of_another_shape, [], 1, ["embed_positions.weight"]),
    "other heads": (lambda t: None, ["--heads", "2"], 2, ["--heads 2", "3"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_of_another_layer_is_refused_with_what_differs(
    name: str, square: bytes, mha: Any, tmp_path: Path
) -> None:
    (tmp_path / "w.st").write_bytes(square)
    change, words, code, mentioned = DAMAGED[name]
    rewritten(tmp_path / "w.st", change)
    ended = mha("run", *TEXTS, "--weights", "w.st", *words, "--json", code=code)
    assert ended.missing("w.st", *mentioned) == []


def test_another_format_and_a_file_without_the_number_of_heads_are_refused(
    square: bytes, mha: Any, tmp_path: Path
) -> None:
    (tmp_path / "w.st").write_bytes(square)
    tensors = safetensors.torch.load_file(tmp_path / "w.st")
    safetensors.torch.save_file(
        tensors, tmp_path / "other.st", metadata={"mha": json.dumps({"format": "mha.weights/9"})}
    )
    assert "mha.weights/9" in mha("run", *TEXTS, "--weights", "other.st", "--json", code=1).said
    safetensors.torch.save_file(tensors, tmp_path / "plain.st")
    assert "--heads" in mha("run", *TEXTS, "--weights", "plain.st", "--json", code=2).said
    ended = mha(
        "run", "one two three", "--weights", "plain.st", "--heads", "3", "--json", code=(1, 2)
    )
    assert "6" in ended.said, "the vocabulary of the text has another size"


def test_learned_positions_are_as_many_as_the_table_has(mha: Any) -> None:
    words = ["--positions", "learned", "--max-positions", "2", "--json"]
    assert "--max-tokens 2" in mha("run", "a b c", *words, code=(1, 2)).said
    assert mha("run", "a b c", *words, "--max-tokens", "2").json["trace"][0]["shape"] == [1, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_numbers_and_another_seed_does_not(
    dtype: str, mha: Any
) -> None:
    words = [*TEXTS, *GROUPED, "--dtype", dtype, "--repeat", "1", "--keep", "x,qk,v,out", "--json"]
    first, again, other = (mha("run", *words, "--seed", seed).json for seed in ("0", "0", "1"))
    for name in ("x", "qk", "v", "out"):
        assert first[name] == again[name]
        assert first[name] != other[name]


def test_dropout_in_training_shows_what_is_left_and_repeats_itself(mha: Any) -> None:
    options = "--dropout 0.4 --dtype float64 --repeat 1 --keep v,pattern,dropped,z --json".split()
    words = [*TEXTS, *GROUPED, *options]
    first, again, other = (
        mha("run", *words, "--train", "--seed", seed).json for seed in ("0", "0", "1")
    )
    pattern, dropped = np.array(first["pattern"]), np.array(first["dropped"])
    survived = dropped != 0
    assert 0.4 < survived[pattern > 0].mean() < 0.8
    assert np.abs(dropped[survived] - pattern[survived] / 0.6).max() <= 1e-15
    values = np.repeat(np.array(first["v"]), 3, axis=1)
    require_near(first["z"], dropped @ values, 1e-12)
    assert first["self_check"]["ok"]
    assert again["dropped"] == first["dropped"] != other["dropped"]
    assert oracle.entropy(pattern) == pytest.approx(np.array(first["entropy"]), abs=1e-12)


def of_torch(*, separate: bool, bias: bool) -> torch.nn.MultiheadAttention:
    """A module of torch with random weights, in one matrix or in three."""
    torch.manual_seed(1)
    module = torch.nn.MultiheadAttention(12, 3, bias=bias, batch_first=True)
    if separate:
        module._qkv_same_embed_dim = False
        for letter, rows in zip("qkv", module.in_proj_weight.detach().chunk(3), strict=True):
            module.register_parameter(f"{letter}_proj_weight", torch.nn.Parameter(rows.clone()))
        module.register_parameter("in_proj_weight", None)
    if bias:
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
    return module


@pytest.mark.parametrize("prefix", ["", "encoder.0.attn."])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_a_module_of_torch_gives_its_own_pattern(
    separate: bool, bias: bool, prefix: str, mha: Any, tmp_path: Path
) -> None:
    module = of_torch(separate=separate, bias=bias)
    tensors = {prefix + name: tensor for name, tensor in module.state_dict().items()}
    safetensors.torch.save_file(tensors, tmp_path / "torch.safetensors")
    words = ("the cat sat on the mat", "--weights", "torch.safetensors", "--positions", "none")
    document = mha(
        "run", *words, "--heads", "3", "--save-weights", "w", "--json", writes=["w"]
    ).json
    assert document["random_embedding"] is True
    embedding = safetensors.torch.load_file(tmp_path / "w")["embed.weight"]
    x = embedding[document["sequences"][0]["ids"]][None]
    out, pattern = module(x, x, x, average_attn_weights=False)
    assert document["pattern"] == pytest.approx(pattern.detach().numpy(), abs=1e-6)
    assert document["out"] == pytest.approx(out.detach().numpy(), abs=1e-6)
    again = mha("run", *words[:2], "w", "--json").json
    assert (again["pattern"], again["random_embedding"]) == (document["pattern"], False)


def test_a_module_of_torch_needs_its_heads_and_one_width(mha: Any, tmp_path: Path) -> None:
    safetensors.torch.save_file(
        of_torch(separate=False, bias=True).state_dict(), tmp_path / "a.safetensors"
    )
    assert "1, 2, 3, 4, 6, 12" in mha("run", "a b", "--weights", "a.safetensors", code=2).said
    narrow = torch.nn.MultiheadAttention(12, 3, kdim=10, vdim=8)
    safetensors.torch.save_file(narrow.state_dict(), tmp_path / "b.safetensors")
    said = mha("run", "a b", "--weights", "b.safetensors", "--heads", "3", code=1).said
    assert "[12, 10]" in said
    biased = torch.nn.MultiheadAttention(12, 3, add_bias_kv=True)
    safetensors.torch.save_file(biased.state_dict(), tmp_path / "c.safetensors")
    said = mha("run", "a b", "--weights", "c.safetensors", "--heads", "3", code=1).said
    assert "bias_k" in said


@pytest.mark.parametrize("name", ["run", "heads", "trace", "decode", "effect"])
def test_a_layer_says_what_of_it_is_random(name: str, mha: Any, tmp_path: Path) -> None:
    words = (name, "the cat sat")
    saved_as = () if name in ("effect", "heads") else ("--save-weights", "w")
    first = mha(*words, "--seed", "3", "--save", "r", *saved_as).stdout
    assert "random weights (seed 3)" in " ".join(first.split("\n")[:2])
    assert "random weights (seed 3)" in mha("show", "r").stdout
    mha("run", "the cat sat", "--seed", "3", "--save-weights", "w", "--force")
    assert "random" not in mha(*words, "--weights", "w").stdout
    tensors = of_torch(separate=False, bias=True).state_dict()
    safetensors.torch.save_file(tensors, tmp_path / "t.safetensors")
    torchs = ("--weights", "t.safetensors", "--heads", "3")
    assert "random embedding" in mha(*words, *torchs).stdout
    assert "random weights" not in mha(*words, *torchs).stdout


@pytest.mark.parametrize("name", ["run", "heads"])
def test_what_is_random_stands_in_brief_output_and_in_pictures(
    name: str, mha: Any, tmp_path: Path
) -> None:
    pictures = ("--html", "p.html", "--svg", "p.svg")
    for words in ((), ("--train", "--dropout", "0.5")) if name == "run" else ((),):
        said = mha(name, "the cat sat", "--brief", *words, *pictures, "--force").stdout
        assert said.startswith("random weights (seed 0)\n")
        for file in ("p.html", "p.svg"):
            assert "random weights (seed 0)" in (tmp_path / file).read_text()
    mha("run", "the cat sat", "--save-weights", "w")
    assert "random" not in mha(name, "the cat sat", "--brief", "--weights", "w").stdout
    tensors = of_torch(separate=False, bias=True).state_dict()
    safetensors.torch.save_file(tensors, tmp_path / "t.safetensors")
    torchs = ("--weights", "t.safetensors", "--heads", "3")
    assert mha(name, "the cat sat", *torchs, "--brief").stdout.startswith("random embedding")
