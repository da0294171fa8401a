"""`--device-map`: a keyword or a JSON file of devices, and the processes of torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mhacli.errors import MhaError
from mhacli.requests.device_map import n_ranks, read_device_map, this_rank

PLACES = {"model.layers.0": "cuda:1", "model.layers.1": "cpu", "model.norm": "disk", "lm_head": "mps"}


@pytest.mark.parametrize("word", ["auto", "tp"])
def test_a_word_means_itself(word: str) -> None:
    assert read_device_map(word) == word


def test_a_file_names_the_device_of_each_module_and_a_number_is_that_of_a_cuda_device(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(PLACES | {"model.layers.2": 0}))
    assert read_device_map(str(path)) == PLACES | {"model.layers.2": "cuda:0"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1], "holds no JSON object of modules and devices"),
        ({}, "holds no JSON object of modules and devices"),
        ({"": "cpu", "lm_head": "disk"}, ' names the whole model, "", and parts of it'),
        ({"a": "gpu"}, ": the device of 'a' is 'gpu', not cpu, disk, mps, cuda, cuda:N or a number"),
        ({"a": True}, ": the device of 'a' is True, not cpu, disk, mps, cuda, cuda:N or a number"),
        ({"a": -1}, ": the device of 'a' is -1, not cpu, disk, mps, cuda, cuda:N or a number"),
        ({"a": "cuda:x"}, ": the device of 'a' is 'cuda:x', not cpu, disk, mps, cuda, cuda:N or a number"),
    ],
)
def test_another_document_is_refused(document: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(document))
    with pytest.raises(MhaError) as caught:
        read_device_map(str(path))
    assert caught.value.message.removeprefix(str(path)).strip() == message.strip()
    assert (caught.value.code, caught.value.exit_code) == ("bad-file", 1)


def test_a_word_that_is_no_file_is_refused_with_the_form_of_one() -> None:
    with pytest.raises(MhaError) as caught:
        read_device_map("gpu")
    assert caught.value.message == "--device-map gpu is neither auto nor tp nor a file"
    assert caught.value.hint == 'a file holds JSON, such as {"model.layers.0": "cuda:0", "model.layers.1": "cpu"}'
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("given", "found"), [({}, (0, 1)), ({"RANK": "2", "WORLD_SIZE": "3"}, (2, 3)), ({"RANK": "x"}, (0, 1))]
)
def test_the_processes_are_those_that_torchrun_names(
    given: dict[str, str], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert (this_rank(), n_ranks()) == found
