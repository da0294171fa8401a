"""`mha diff MODEL FILE`, where the file has the outputs of another implementation, by names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import checkpoints
from torch import Tensor

import mhacli

IDS = torch.tensor([[5, 7, 9, 4, 8, 3]])
"""As many tokens as heads: axes are not told apart by their lengths."""
MLP = ("--map", "model.layers.{i}.mlp=h.{i}.ffn")


def outputs(model: Any, ids: Tensor = IDS) -> dict[str, Tensor]:
    """The first tensor that each module gives."""
    made = dict[str, Tensor]()

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            first = output if isinstance(output, Tensor) else next(iter(output))
            if name and isinstance(first, Tensor) and first.is_floating_point():
                made[name] = first.clone().contiguous()

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return checkpoints.model("llama")


@pytest.fixture(scope="module")
def made(model: Any) -> dict[str, Tensor]:
    return outputs(model)


def compared(model: Any, tensors: dict[str, Tensor], folder: Path, *forms: str) -> Any:
    save_file({name: x.clone() for name, x in tensors.items()}, folder / "x.safetensors")
    return mhacli.diff(model, folder / "x.safetensors", IDS, map=forms)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("has_batch", [True, False])
def test_the_same_outputs_agree_bit_for_bit(family: str, has_batch: bool, tmp_path: Path) -> None:
    model = checkpoints.model(family)
    tensors = {name: x if has_batch else x[0] for name, x in outputs(model).items()}
    document = compared(model, tensors, tmp_path)
    assert document["verdict"] == "agree"
    assert {place["relative"] for place in document["places"]} == {0.0}
    names = {place["name_b"] for place in document["places"]}
    assert names == {*tensors}
    assert all(row["name_b"] is None for row in document["unmatched"])
    assert any(row["site"] == "scores" for row in document["unmatched"])


@pytest.mark.parametrize(
    ("name", "layer", "part", "site"),
    [
        ("model.layers.1.mlp", 1, "mlp", "output"),
        ("model.layers.2.self_attn", 2, "attention", "output"),
        ("model.layers.1.self_attn.q_proj", 1, "attention", "q"),
        ("model.layers.0", 0, "mlp", "residual"),
        ("model.norm", None, "norm", "norm"),
        ("lm_head", None, "logits", "logits"),
        ("model.layers.1.mlp.up_proj", None, "mlp", "mapped model.layers.1.mlp.up_proj"),
    ],
)
def test_one_changed_output_is_the_first_difference(
    name: str, layer: int | None, part: str, site: str, model: Any, made: Any, tmp_path: Path
) -> None:
    changed = made[name].clone()
    changed[:, 2, 9] += 0.3
    first = compared(
        model, {name: changed, "model.embed_tokens": made["model.embed_tokens"]}, tmp_path
    )["first"]
    assert (first["layer"], first["part"], first["site"]) == (layer, part, site)
    assert first["heads"] == ([1] if site == "q" else [])
    whole = compared(model, made | {name: changed}, tmp_path)
    assert whole["first"]["name_b"] == name
    assert sum(place["beyond"] for place in whole["places"]) == 1


def test_names_of_another_program_are_turned_into_those_of_the_model(
    mha: Any, made: Any, tmp_path: Path
) -> None:
    folder = str(checkpoints.folder("llama"))
    tensors = {f"h.{i}.ffn": made[f"model.layers.{i}.mlp"][0].clone() for i in range(3)}
    tensors["extra"] = torch.ones(3)
    save_file(tensors, tmp_path / "same.safetensors")
    ids = ("--ids", "5,7,9,4,8,3", "--json")
    document = mha("diff", folder, "same.safetensors", *ids, *MLP).json
    assert [(row["name_a"], row["name_b"]) for row in document["places"]] == [
        (f"model.layers.{i}.mlp", f"h.{i}.ffn") for i in range(3)
    ]
    assert [row["why"] for row in document["unmatched"] if row["name_b"] == "extra"] == [
        "only B has it"
    ]
    tensors["h.1.ffn"][3, 4] = torch.nan
    save_file(tensors, tmp_path / "other.safetensors")
    document = mha("diff", folder, "other.safetensors", *ids, *MLP, code=3).json
    assert (document["first"]["name_b"], document["first"]["relative"]) == ("h.1.ffn", None)
    shown = " ".join(
        mha("diff", folder, "other.safetensors", *ids[:2], *MLP, code=3).stdout.split()
    )
    assert "they first differ in layer 1, mlp (output)" in shown
    assert "not compared why" in shown
    assert "only A has it" in shown
    assert mha("diff", "other.safetensors", folder, *ids, code=2).error
    assert "text" in mha("diff", folder, "other.safetensors", code=2).said


def test_a_form_stands_for_all_names_that_begin_with_it(
    model: Any, made: Any, tmp_path: Path
) -> None:
    named = {name.replace("model.layers.", "h."): x for name, x in made.items()}
    document = compared(model, named, tmp_path, "model.layers.{i}=h.{i}")
    assert len(document["places"]) == len(made)
    only = {name: x for name, x in named.items() if name.startswith("h.2.")}
    assert len(compared(model, only, tmp_path, "model.layers.{i}=h.{i}")["places"]) == len(only)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_numbers_of_another_dtype_are_widened_and_held_to_its_rounding(
    dtype: str, model: Any, made: Any, tmp_path: Path
) -> None:
    other = {name: x.to(getattr(torch, dtype)) for name, x in made.items()}
    document = compared(model, other, tmp_path)
    assert (document["verdict"], document["dtypes"]) == ("agree", ["float32", dtype])
    other["model.norm"] = other["model.norm"] * 1.5
    assert compared(model, other, tmp_path)["first"]["site"] == "norm"


def test_the_dtype_in_which_the_other_computed_may_be_stated(
    mha: Any, made: Any, tmp_path: Path
) -> None:
    rounded = {name: x.bfloat16().float() for name, x in made.items()}
    save_file(rounded, tmp_path / "x.safetensors")
    words = ("diff", str(checkpoints.folder("llama")), "x.safetensors", "--ids", "5,7,9,4,8,3")
    mha(*words, code=3)
    mha(*words, "--dtype-b", "bfloat16")


def test_a_saved_model_is_compared_with_outputs(mha: Any, made: Any, tmp_path: Path) -> None:
    folder = str(checkpoints.folder("llama"))
    mha("diff", folder, "--ids", "5,7,9,4,8,3", "--save", "a.safetensors")
    save_file(made, tmp_path / "x.safetensors")
    document = mha("diff", "a.safetensors", "x.safetensors", "--json").json
    assert {"q", "residual", "logits"} <= {place["site"] for place in document["places"]}


def weights_of(model: Any, made: Any) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


HEAD = "lm_head"
FFN = MLP[1]


@pytest.mark.parametrize(
    ("tensors", "forms", "said"),
    [
        (weights_of, (), "has weights of A"),
        (lambda _, made: {"h.0.ffn.weight": made[HEAD]}, ("lm_head=h.0.ffn",), "has weights of A"),
        (lambda _, made: {"foo": made[HEAD]}, (), "no tensor of .* has the name of a module of A"),
        (lambda _, made: {}, (), "it has none"),
        (lambda _, made: {HEAD: made[HEAD][:, :-1].repeat(1, 2, 1)}, (), r"is \[1, 10, 300\]"),
        (lambda _, made: {HEAD: made[HEAD], "model.norm": made["model.norm"][..., 1:]}, (), "47"),
        (lambda _, made: {"model.norm": made["model.norm"].repeat(2, 1, 1)}, (), r"\[2, 6, 48\]"),
        (lambda _, made: {"model.norm": made["model.norm"].view(1, 6, 6, 8)}, (), "6, 6, 8"),
        (lambda _, made: {HEAD: made[HEAD].flatten()}, (), r"is \[1800\]"),
        (lambda _, made: {HEAD: made[HEAD].int()}, (), "I32"),
        (lambda _, made: {HEAD: made[HEAD]}, (FFN,), r"has the name h\.\{i\}\.ffn"),
        (lambda _, made: {"a.0": made[HEAD]}, ("x.{i}=a.{i}",), r"nothing of the name x\.0"),
        (lambda _, made: {"a": made[HEAD], HEAD: made[HEAD]}, ("lm_head=a",), "both lm_head of A"),
        (lambda _, made: {"a": made[HEAD]}, ("lm_head",), "not of the form"),
    ],
)
def test_what_is_no_file_of_outputs_is_refused_with_the_reason(
    tensors: Any, forms: tuple[str, ...], said: str, model: Any, made: Any, tmp_path: Path
) -> None:
    with pytest.raises(mhacli.MhaError, match=said):
        compared(model, tensors(model, made), tmp_path, *forms)
