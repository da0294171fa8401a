"""Whose fault it is when a pass of a model raises: the model's own code, or what looks at it."""

from __future__ import annotations

import getpass
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from support.checkpoints_saved import TEXT, Checkpoints, reference
from support.model_families import tiny
from support.processes import WITH_TORCH, Launch, attempt

from mhacli.adapters.hf.capture import captured
from mhacli.adapters.hf.inputs import outputs_of, run_model
from mhacli.errors import MhaError

CACHE = f"torchinductor_{getpass.getuser()}"
"""An empty folder that transformers makes with torch's compiler when it is imported."""
IDS = {"input_ids": torch.tensor([[3, 4, 5]])}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def broken(checkpoints: Checkpoints) -> str:
    """A checkpoint whose router is to choose more experts than there are, which only its forward pass notices."""
    source = Path(checkpoints.of("gpt_oss"))
    folder = source.with_name("broken")
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 99}))
    return str(folder)


def refusal(model: Any) -> MhaError:
    with pytest.raises(MhaError) as caught:
        outputs_of(model, IDS)
    return caught.value


def test_what_a_part_of_the_model_raises_is_told_with_its_name(broken: str) -> None:
    fault = refusal(reference(broken, "AutoModel"))
    assert fault.message == (
        "the forward pass of the model raised RuntimeError in layers.0.mlp.router (GptOssTopKRouter) of GptOssModel: "
        "selected index k out of range"
    )
    assert (fault.code, fault.path, fault.exit_code) == ("model-failed", broken, 1)


def test_a_call_that_the_model_does_not_take_is_the_models(checkpoints: Checkpoints) -> None:
    model = reference(checkpoints.of("llama"), "AutoModel")
    with pytest.raises(MhaError) as caught:
        outputs_of(model, {})
    assert "LlamaModel" in caught.value.message


@pytest.mark.parametrize(("family", "keywords", "said"), [
    ("llama", {**IDS, "attention_mask": torch.zeros(1, 1, 3, 7)}, "layers.0.self_attn"),
    ("bloom", {"input_ids": torch.tensor([[3, 1 << 40]])}, "word_embeddings"),
])  # fmt: skip
def test_what_the_model_raises_is_told_while_it_is_watched(family: str, keywords: dict[str, Any], said: str) -> None:
    model = tiny(family)
    with captured(model, lambda call: None, batch=1), pytest.raises(MhaError) as caught:
        outputs_of(model, keywords)
    assert caught.value.code == "model-failed"
    assert said in caught.value.message


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_what_torch_raises_for_whoever_looks_stays_as_it_is(family: str) -> None:
    model = tiny(family)

    def take(call: Any) -> None:
        _ = torch.ones(2, 3) @ torch.ones(2, 3)

    with captured(model, take, batch=1), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        outputs_of(model, IDS)


@pytest.mark.parametrize("raised", [TypeError("a bug of ours"), MhaError("said already"), MemoryError()])
def test_what_is_raised_by_looking_at_a_pass_stays_as_it_is(checkpoints: Checkpoints, raised: Exception) -> None:
    model = reference(checkpoints.of("llama"), "AutoModel")

    def take(call: Any) -> None:
        from mhacli.results.record.arrays import Prefixed

        if isinstance(raised, TypeError):
            Prefixed({}, 3)["x"]  # type: ignore[arg-type]
        raise raised

    with captured(model, take, batch=1), pytest.raises(type(raised)) as caught:
        run_model(model, lambda: model(**IDS))
    assert getattr(caught.value, "code", "failed") == "failed"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("command", ["run", "heads", "trace", "decode"])
def test_every_command_says_what_the_model_raised(broken: str, command: str, tmp_path: Path) -> None:
    for form in ((), ("--json",)):
        words, launch = (command, TEXT, "--model", broken), Launch(modules=WITH_TORCH)
        attempt(tmp_path, *words, code=1, form=form, says=["layers.0.mlp.router"], writes=[CACHE], launch=launch)
