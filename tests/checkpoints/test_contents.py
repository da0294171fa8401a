"""The contents of checkpoints, counted from their headers."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch import nn

from mhacli.checkpoints.contents import contents_of
from mhacli.checkpoints.folder import read_checkpoint
from mhacli.errors import MhaError


class _Attention(nn.Module):
    """An attention that stores its mask, its angles and its positions beside its weights, as older models do."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(6, 18)
        self.rotary_emb = nn.Module()
        self.rotary_emb.register_buffer("inv_freq", torch.ones(3))
        self.register_buffer("bias", torch.ones(1, 1, 5, 5))
        self.register_buffer("masked_bias", torch.tensor(-1e4))
        self.register_buffer("position_ids", torch.arange(7)[None])


class _Model(nn.Module):
    """Two layers, one of them with a bias of its own under the name that a mask has in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.ModuleDict({"attn": _Attention()}), nn.ModuleDict({"attn": nn.LayerNorm(5)})])
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))


def test_parameters_are_those_of_the_module_without_its_buffers(tmp_path):
    model = _Model()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of"}))
    found = contents_of(read_checkpoint(str(tmp_path)))
    assert found.n_parameters == sum(p.numel() for p in model.parameters()) == 6 * 18 + 18 + 5 + 5
    assert {d.dtype: (d.n_tensors, d.n_parameters) for d in found.dtypes} == {
        "BOOL": (1, 0), "F32": (7, 136), "I64": (1, 0)
    }  # fmt: skip
    assert found.n_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())


def test_a_saved_record_is_named_with_the_command_that_draws_it(tmp_path):
    path = tmp_path / "a record.safetensors"
    safetensors.torch.save_file({"z": torch.zeros(1)}, path, {"mha": json.dumps({"schema": "mha.record/1"})})
    with pytest.raises(MhaError) as caught:
        contents_of(read_checkpoint(str(path)))
    assert caught.value.message == f"{path} is a saved record (mha.record/1), not weights"
    assert caught.value.hint == f"mha show '{path}' draws it"
