"""The score bias: the choice of file and tensor, its shape, masking by −∞, and its gradient."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mhacli.attention import masks
from mhacli.attention.layer import MultiHeadAttention
from mhacli.checkpoints.mha_weights import read_bias_file
from mhacli.compute.layer.run import RecordingOptions, inspect
from mhacli.errors import MhaError
from mhacli.requests.layer import facts_of
from mhacli.spec.config import Config
from mhacli.text.encode import encode

TEXTS = ("the cat sat on the", "a cat sat")
CONFIG = Config(d_model=12, n_heads=6, n_kv_heads=2, init="uniform", dtype="float64", device="cpu")
FACTS = facts_of(encode(TEXTS, CONFIG.resolved()), CONFIG.resolved())
INF = torch.inf


def written(folder, name="b.safetensors", **tensors):
    save_file(tensors, folder / name)
    return str(folder / name)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "suffix", "name"),
    [
        (["only"], "", "only"),
        (["bias"], "", "bias"),
        (["bias", "other"], "", "bias"),
        (["bias", "other"], ":other", "other"),
        (["only"], ":only", "only"),
        (["a.b", "bias"], ":a.b", "a.b"),
    ],
)
def test_the_tensor_is_the_only_one_or_bias_or_the_one_that_is_named(tensors, suffix, name, tmp_path):
    path = written(tmp_path, **{tensor: zeros(5, 5) for tensor in tensors})
    found = read_bias_file(path + suffix, FACTS)
    assert (found.name, found.file.path) == (name, path)


def test_a_file_whose_own_name_has_a_colon_is_that_file(tmp_path):
    path = written(tmp_path, "b:c", c=zeros(5, 5))
    assert read_bias_file(path, FACTS).file.path == path
    assert read_bias_file(f"{path}:c", FACTS).name == "c"


def refused(where):
    with pytest.raises(MhaError) as caught:
        read_bias_file(where, FACTS)
    assert caught.value.exit_code == 1
    return caught.value


def test_a_tensor_that_is_not_there_is_reported_with_those_that_are(tmp_path):
    path = written(tmp_path, one=zeros(5, 5), two=zeros(5, 5))
    for suffix, name in (("", "bias"), (":three", "three")):
        fault = refused(path + suffix)
        assert fault.message == f"{path} has no tensor '{name}': it has 'one', 'two'"
        assert fault.hint == f"try --score-bias {path}:one"
        assert fault.path == path
    empty = written(tmp_path, "empty")
    assert refused(empty).message == f"{empty} has no tensor 'bias': it has no tensor"


def test_a_file_that_is_not_there_is_reported(tmp_path):
    assert str(tmp_path / "none") in refused(str(tmp_path / "none")).message


@pytest.mark.parametrize(
    ("dtype", "told"), [(torch.bool, "BOOL"), (torch.int64, "I64"), (torch.uint8, "U8"), (torch.int32, "I32")]
)
def test_only_floats_are_a_bias(dtype, told, tmp_path):
    path = written(tmp_path, bias=zeros(5, 5, dtype=dtype))
    fault = refused(path)
    assert fault.message == f"{path}: tensor 'bias' has dtype {told}, which is not one of F64, F32, BF16, F16"
    of_mask = "a mask as a bias is 0 where allowed and -inf where not"
    assert fault.hint == (of_mask if told == "BOOL" else "save it as float32")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_is_a_bias_and_is_added_in_the_dtype_of_the_scores(dtype, tmp_path):
    bias = torch.randn(6, 5, 5, generator=torch.Generator().manual_seed(4)).to(dtype)
    with_bias, without = (
        inspect(
            TEXTS, CONFIG if path is None else config_with(path), options=RecordingOptions(repeat=1, keep=("scores",))
        )
        for path in (written(tmp_path, bias=bias), None)
    )
    allowed = np.broadcast_to(without.arrays["allowed"], without.arrays["scores"].shape)
    added = (with_bias.arrays["scores"] - np.where(allowed, without.arrays["scores"], 0.0))[allowed]
    expected = np.broadcast_to(bias.double().numpy(), allowed.shape)[allowed]
    assert np.abs(added - expected).max() <= 1e-14


def config_with(path, **choices):
    return replace(CONFIG, score_bias=path, **choices)


FITTING = [
    (),
    (1,),
    (5,),
    (5, 1),
    (1, 5),
    (5, 5),
    (6, 5, 5),
    (6, 1, 1),
    (1, 1, 5),
    (2, 6, 5, 5),
    (2, 1, 1, 5),
    (1, 6, 5, 1),
]


@pytest.mark.parametrize("shape", FITTING, ids=str)
def test_a_shape_that_broadcasts_reaches_every_score(shape, tmp_path):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    path = written(tmp_path, bias=bias)
    options = RecordingOptions(repeat=1, keep=("scores", "bias"))
    found = inspect(TEXTS, config_with(path), options=options)
    plain = inspect(TEXTS, CONFIG, options=RecordingOptions(repeat=1, keep=("scores",)))
    full = np.broadcast_to(bias.numpy(), (2, 6, 5, 5))
    assert np.array_equal(found.arrays["bias"], full)
    cells = np.broadcast_to(found.arrays["allowed"], full.shape)
    assert np.abs(found.arrays["scores"][cells] - (plain.arrays["scores"] + full)[cells]).max() <= 1e-14
    assert found.self_check.ok


@pytest.mark.parametrize(
    "shape", [(4,), (5, 4), (4, 5), (3, 5, 5), (2, 5, 5), (3, 6, 5, 5), (1, 1, 1, 5, 5), (0,), (25,)], ids=str
)
def test_a_shape_that_does_not_fit_is_refused_with_shapes_that_do(shape, tmp_path):
    path = written(tmp_path, bias=zeros(*shape))
    fault = refused(path)
    assert fault.message == (
        f"{path}: tensor 'bias' has the shape {list(shape)}, which does not broadcast to [batch, head, query, key] = [2, 6, 5, 5]"
    )
    assert fault.hint == "the shapes [5, 5] and [6, 5, 5] work"


def test_minus_infinity_means_not_allowed_and_a_row_of_it_is_zeros(tmp_path):
    bias = zeros(6, 5, 5, dtype=torch.float64)
    bias[2, 1], bias[:, 3, 0], bias[4, 0, 2:] = -INF, -INF, -INF
    record = inspect(TEXTS, config_with(written(tmp_path, bias=bias)), options=RecordingOptions(repeat=1))
    expected = np.zeros((2, 6, 5, 5), bool)
    for b, length in enumerate((5, 3)):
        for h, i, j in np.ndindex(6, 5, 5):
            forbidden = (h, i) == (2, 1) or (i, j) == (3, 0) or ((h, i) == (4, 0) and j >= 2)
            expected[b, h, i, j] = i < length and j < length and not forbidden
    assert np.array_equal(record.arrays["allowed"], expected)
    assert (record.arrays["pattern"][~expected] == 0.0).all()
    assert (record.arrays["pattern"][expected] > 0.0).all()
    assert (record.arrays["z"][:, 2, 1] == 0.0).all()
    assert (record.arrays["strongest_key"][:, 2, 1] == -1).all()
    assert np.abs(record.arrays["pattern"].sum(-1) - expected.any(-1)).max() <= 1e-14
    assert record.self_check.ok


@pytest.mark.parametrize(("number", "place"), [(torch.nan, [1, 3, 2]), (INF, [0, 0, 4])])
def test_nan_and_plus_infinity_are_refused_with_the_place(number, place, tmp_path):
    bias = zeros(6, 5, 5)
    bias[2, 2] = -INF
    bias[tuple(place)] = number
    bias[5, 4, 4] = number
    path = written(tmp_path, bias=bias)
    with pytest.raises(MhaError) as caught:
        inspect(TEXTS, config_with(path), options=RecordingOptions(repeat=1))
    assert caught.value.message == f"{path}: bias has 2 NaN or Inf, the first at {place}"
    assert caught.value.hint == "--allow-nonfinite continues anyway"


@pytest.mark.parametrize("number", [1e300, -1e300])
def test_a_number_that_the_dtype_of_the_scores_does_not_have_is_refused_and_forbids_nothing(number, tmp_path):
    path = written(tmp_path, bias=torch.full((5, 5), number, dtype=torch.float64))
    with pytest.raises(MhaError) as caught:
        inspect(TEXTS, config_with(path, dtype="float32"), options=RecordingOptions(repeat=1))
    assert caught.value.message.startswith(f"{path}: bias has ")


def test_a_damaged_file_is_reported_as_every_tensor_file_is(tmp_path):
    header = json.dumps({"bias": {"dtype": "F32", "shape": [5, 5], "data_offsets": [0, 100]}}).encode()
    (tmp_path / "cut").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 40)
    fault = refused(str(tmp_path / "cut"))
    assert fault.code == "bad-file"
    assert "60 B before the end of tensor 'bias'" in fault.message


@pytest.mark.parametrize("positions", ["none", "alibi", "rope"])
def test_a_learnable_bias_gets_a_gradient_that_agrees_with_small_differences(positions, normal):
    generator = torch.Generator().manual_seed(1)
    layer = MultiHeadAttention(6, 3, d_head=2, positions=positions, init="uniform", generator=generator).double()
    x, bias = normal(2, 4, 6), torch.nn.Parameter(normal(3, 4, 4))

    def loss(numbers):
        return layer(x, allowed=masks.causal(), bias=numbers)[0].square().sum()

    loss(bias).backward()
    later = torch.triu(torch.ones(4, 4, dtype=torch.bool), diagonal=1)
    assert (bias.grad[:, later] == 0.0).all()
    assert (bias.grad[:, ~later & (torch.arange(4) > 0)[:, None]].abs() > 1e-9).all()
    for cell in ((0, 2, 1), (2, 3, 3), (1, 1, 0)):
        step = torch.zeros_like(bias)
        step[cell] = 1e-5
        slope = (loss(bias.detach() + step) - loss(bias.detach() - step)) / 2e-5
        assert bias.grad[cell].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-10)


def test_training_lowers_a_loss_with_a_bias_that_forbids_a_cell(normal):
    generator = torch.Generator().manual_seed(1)
    layer = MultiHeadAttention(6, 3, d_head=2, init="uniform", generator=generator).double().requires_grad_(False)
    x, target, bias = normal(2, 4, 6), normal(2, 4, 6), torch.nn.Parameter(zeros(3, 4, 4, dtype=torch.float64))
    forbidden = zeros(4, 4, dtype=torch.float64)
    forbidden[2], forbidden[0, 3] = -INF, -INF
    losses = []
    optimiser = torch.optim.SGD([bias], lr=0.5)
    for _ in range(3):
        optimiser.zero_grad()
        out, pattern = layer(x, bias=bias + forbidden)
        losses.append((out - target).square().mean())
        losses[-1].backward()
        assert torch.isfinite(bias.grad).all()
        assert (pattern[:, :, 2] == 0.0).all()
        assert (pattern[:, :, 0, 3] == 0.0).all()
        optimiser.step()
    assert losses[2] < losses[1] < losses[0]
