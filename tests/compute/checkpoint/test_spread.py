"""A checkpoint whose weights wait on the disk gives the record, and the effects, that it gives in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from support.checkpoints_saved import TEXT, Checkpoints, reference, request_of

import mhacli
from mhacli.adapters.hf import passes
from mhacli.compute.checkpoint.prepare import prepare_checkpoint
from mhacli.compute.effect.study import prepare_effect
from mhacli.errors import MhaError
from mhacli.requests.effect import EffectRequest
from mhacli.results.record.record import Record

DISK = {"": "disk"}
LLAMA = {"embed_tokens": "cpu", "layers.0": "disk", "layers.1": "cpu", "layers.2": "disk", "norm": "disk"}
MIXED = {f"model.{name}": device for name, device in LLAMA.items()} | {"model.rotary_emb": "cpu", "lm_head": "disk"}


@pytest.fixture(autouse=True)
def temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that go with a process are those of the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def inspected(folder: str, device_map: Mapping[str, str] | None, **choices: Any) -> Record:
    run, _ = prepare_checkpoint(request_of(folder, TEXT, device_map=device_map, **choices))
    run.run()
    return run.record()


def same(one: Record, other: Record) -> bool:
    """Whether two records hold the same heads and the same bits in all arrays."""
    arrays = one.arrays.keys() == other.arrays.keys() and all(
        np.array_equal(array, other.arrays[name], equal_nan=array.dtype.kind == "f")
        for name, array in one.arrays.items()
    )
    return arrays and one.heads == other.heads and one.layers == other.layers


@pytest.mark.parametrize(
    ("name", "device_map"),
    [("llama", DISK), ("llama", MIXED), ("gpt2", DISK), ("gpt_oss", DISK), ("bert", DISK), ("t5", DISK)],
    ids=["llama-disk", "llama-mixed", "gpt2", "gpt_oss", "bert", "t5"],
)
def test_statistics_and_matrices_have_the_bits_of_a_model_in_memory(
    name: str, device_map: Mapping[str, str], checkpoints: Checkpoints
) -> None:
    folder = checkpoints.of(name)
    spread = inspected(folder, device_map, keep=("pattern", "z"))
    assert same(spread, inspected(folder, None, keep=("pattern", "z")))
    assert spread.self_check.ok
    assert spread.environment.device == "cpu"


def test_what_a_spread_model_generates_is_inspected(checkpoints: Checkpoints) -> None:
    folder = checkpoints.of("llama")
    assert same(inspected(folder, MIXED, n_generated=3), inspected(folder, None, n_generated=3))


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"replace": "mean"},
        {"at": 3},
        {"edges": True, "heads": ((None, 1, 1),), "judge": True},
        {"n_screened": 2},
    ],
    ids=["zero", "mean", "at", "edges", "screen"],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_effects_have_the_bits_of_a_model_in_memory(
    name: str, choices: Mapping[str, Any], checkpoints: Checkpoints
) -> None:
    records = []
    for device_map in (None, DISK):
        study, _ = prepare_effect(
            EffectRequest(request_of(checkpoints.of(name), TEXT, device_map=device_map), **choices)
        )
        study.inspect()
        study.run()
        records.append(study.record())
    whole, spread = records
    assert whole.effect is not None
    assert spread.effect is not None
    assert spread.effects == whole.effects
    assert spread.effect.judgements == whole.effect.judgements
    assert spread.effect.direct == whole.effect.direct
    assert (spread.effect.verified.ok, spread.effect.verified.n) == (True, whole.effect.verified.n)


def test_a_model_in_memory_with_offloaded_weights_is_inspected(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, ids = checkpoints.of("llama"), torch.arange(3, 12)[None]
    spread = reference.__wrapped__(folder, device_map=MIXED, offload_folder=str(tmp_path))
    records = []
    for model in (reference(folder), spread):
        with mhacli.inspecting(model, keep=("pattern", "z")) as seen, torch.no_grad():
            model(input_ids=ids)
        records.append(seen.record)
    assert [head.entropy for head in records[0].heads] == [head.entropy for head in records[1].heads]


def test_a_part_of_a_model_that_is_split_over_processes_is_refused(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference(checkpoints.of("llama"))
    monkeypatch.setattr(model, "_tp_size", 2)
    with pytest.raises(MhaError) as caught:
        passes.require_open(model, "mhacli.inspecting")
    assert caught.value.message == (
        "LlamaForCausalLM cannot be inspected: it is split over processes by tensor parallelism, and this one has a part of its "
        "heads"
    )
    assert caught.value.hint == "torchrun -m mhacli heads --model DIR --device-map tp inspects it by its folder"
