"""A checkpoint in several places: each tensor is where the map says, what is not there is fetched, and faults are named."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from safetensors.torch import load_file, save_file
from support.model_families import N_LAYERS, ids_of, run_plain, tiny

from mhacli.adapters.hf import device_map as places
from mhacli.adapters.hf.load import Loaded, find_checkpoint, load_config, load_model
from mhacli.errors import MhaError
from mhacli.io import files, memory

PARTS = ("embed_tokens", *(f"layers.{n}" for n in range(N_LAYERS)), "norm", "rotary_emb")
HALF = dict.fromkeys(PARTS, "disk") | {"embed_tokens": "cpu", "layers.0": "cpu", "rotary_emb": "cpu"}
Saved = Callable[..., str]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    """`saved(name)`: a folder with the tiny model of a family. Temporary folders are beside it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def save(name: str = "llama") -> str:
        tiny(name).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


def load(source: str, device_map: Any, **choices: Any) -> Loaded:
    checkpoint, _ = find_checkpoint(source)
    device = torch.device("cpu")
    return load_model(
        source, checkpoint, load_config(checkpoint), revision=None, device=device, device_map=device_map, **choices
    )


def refusal(source: str, device_map: Mapping[str, str]) -> MhaError:
    with pytest.raises(MhaError) as caught:
        load(source, device_map)
    return caught.value


def outputs(model: Any) -> torch.Tensor:
    found: torch.Tensor = run_plain(model, {"input_ids": ids_of(1, 5)}).last_hidden_state
    return found


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}, HALF], ids=["cpu", "disk", "both"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_spread_model_gives_the_bits_of_the_one_that_was_saved(
    name: str, device_map: Mapping[str, str], saved: Saved
) -> None:
    loaded = load(saved(name), device_map)
    assert torch.equal(outputs(loaded.model), outputs(tiny(name)))
    assert loaded.device == torch.device("cpu")
    for parameter_name, parameter in loaded.model.named_parameters():
        owner = parameter_name.rpartition(".")[0]
        place = next(device for part, device in device_map.items() if not part or f"{owner}.".startswith(f"{part}."))
        assert parameter.is_meta == (place == "disk")


def test_what_is_fetched_is_what_was_saved(saved: Saved) -> None:
    model = load(saved(), {"": "disk"}).model
    for own, meant in zip(model.modules(), tiny("llama").modules(), strict=True):
        for name, parameter in meant.named_parameters(recurse=False):
            assert torch.equal(places.fetched(own, name), parameter)


def test_weights_of_a_language_head_are_fetched_in_the_dtype_that_is_asked_for(saved: Saved) -> None:
    model = load(saved(), {"": "disk"}, dtype="float64").model
    assert places.fetched(model.layers[0].self_attn.q_proj).dtype == torch.float64


def test_one_map_serves_a_model_with_and_without_its_language_head(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder = str(tmp_path / "causal")
    LlamaForCausalLM(tiny("llama").config).save_pretrained(folder)
    with_head = {f"model.{part}": device for part, device in HALF.items()} | {"lm_head": "disk"}
    assert load(folder, with_head).model.hf_device_map == HALF
    assert load(folder, with_head, head="predict").model.hf_device_map == with_head
    assert load(folder, HALF | {"lm_head": "disk"}, head="predict").model.hf_device_map == with_head


def test_auto_leaves_on_disk_what_memory_cannot_take(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved()
    n_bytes = os.path.getsize(f"{folder}/model.safetensors")
    monkeypatch.setattr(memory, "available_bytes", lambda: n_bytes)
    loaded = load(folder, "auto")
    assert set(loaded.model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(outputs(loaded.model), outputs(tiny("llama")))


def test_a_note_says_how_much_is_where(saved: Saved) -> None:
    sizes = {"cpu": 0, "disk": 0}
    for name, parameter in tiny("llama").named_parameters():
        sizes[next(device for part, device in HALF.items() if name.startswith(f"{part}."))] += parameter.nbytes
    expected = ", ".join(f"{files.format_size(size)} on {device}" for device, size in sizes.items())
    assert load(saved(), HALF).notes[-1] == f"weights: {expected}"


def test_modules_that_the_model_does_not_have_are_named(saved: Saved) -> None:
    fault = refusal(saved(), HALF | {"layers.9": "cpu", "nonsense": "cpu"})
    assert fault.message == "--device-map names modules that LlamaModel does not have: layers.9, nonsense"
    assert fault.hint == f"its parts are embed_tokens, layers.0 … layers.{N_LAYERS - 1}, norm, rotary_emb"


def test_tensors_without_a_device_are_named(saved: Saved) -> None:
    fault = refusal(saved(), {name: device for name, device in HALF.items() if name != "norm"})
    assert (fault.message, fault.hint) == ("--device-map gives no device to norm.weight", 'for example "norm": "cpu"')


def test_numbers_that_are_not_finite_are_found_on_disk(saved: Saved) -> None:
    folder = saved()
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["layers.1.mlp.up_proj.weight"][2, 3] = torch.nan
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    assert refusal(folder, {"": "disk"}).code == "not-finite"


def test_temporary_folders_go_with_the_process(saved: Saved, tmp_path: Path) -> None:
    load(saved("mixtral"), {"": "disk"})  # whose experts are put on disk anew
    (made,) = tmp_path.glob("mha-*")
    assert [*made.iterdir()]
    files.remove_temporary_folders()
    assert not made.exists()


def test_without_accelerate_the_extra_is_named(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, load_module = saved(), places.importlib.import_module

    def missing(name: str) -> Any:
        if name == "accelerate":
            raise ImportError(name)
        return load_module(name)

    monkeypatch.setattr(places.importlib, "import_module", missing)
    fault = refusal(folder, {"": "disk"})
    assert fault.message == "--device-map needs accelerate (extra device-map), which is not installed"
    assert (fault.code, str(fault.hint).startswith("pip install")) == ("missing-extra", True)
