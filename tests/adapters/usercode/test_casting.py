"""Casting a module keeps the imaginary parts of its tables, so that the verdict does not depend on their format."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from mhacli.adapters.usercode.build import build
from mhacli.adapters.usercode.inputs import cast, float64_copy
from mhacli.adapters.usercode.target import find_target
from mhacli.compute.check.against import compare
from mhacli.compute.check.examine import examine
from mhacli.requests.user_code import CheckRequest, TargetRequest

ROTARY = '''
import torch
from torch import nn


def turns(n, width):
    angle = torch.outer(torch.arange(n).float(), 10000.0 ** -(torch.arange(0, width, 2) / width))
    return torch.polar(torch.ones_like(angle), angle)


class Registered(nn.Module):
    """The turns are a complex buffer."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads = n_heads
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.keep(turns(40, width // n_heads))

    def keep(self, table):
        self.register_buffer("table", table, persistent=False)

    def rope(self, heads):
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.table[: heads.shape[2]]).flatten(-2)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        pattern = (self.rope(q) @ self.rope(k).mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.wo((pattern @ v).transpose(1, 2).flatten(2))


class AddedWithoutAScale(Registered):
    """The input is added to the output."""

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        pattern = (self.rope(q) @ self.rope(k).mT).softmax(-1)
        return x + self.wo((pattern @ v).transpose(1, 2).flatten(2))


class Attribute(Registered):
    """The turns are a plain attribute."""

    def keep(self, table):
        self.table = table


class Computed(Registered):
    """Cosine and sine are computed in each call, without complex numbers."""

    def keep(self, table):
        pass

    def rope(self, heads):
        width, n = heads.shape[-1], heads.shape[2]
        angle = torch.arange(n, dtype=heads.dtype)[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width).to(heads.dtype)
        one, other = heads[..., 0::2], heads[..., 1::2]
        turned = (one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos())
        return torch.stack(turned, dim=-1).flatten(-2)
'''
WIDTHS = (("width", "24"), ("n_heads", "3"))


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "rotary.py"
    path.write_text(ROTARY)
    return lambda name: TargetRequest(f"{path}:{name}", WIDTHS)


def quiet(*stage, **how):
    pass


class Tables(nn.Module):
    """One of each kind of number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("turn", torch.tensor([0.6 + 0.8j]))
        self.register_buffer("places", torch.tensor([2**24 + 1]))
        self.register_buffer("kept", torch.tensor([True, False]))


@pytest.mark.parametrize(
    ("dtype", "turn"),
    [(torch.float64, torch.complex128), (torch.float32, torch.complex64), (torch.bfloat16, torch.complex64)],
)
def test_floating_numbers_get_the_dtype_and_complex_ones_their_precision(dtype, turn):
    made = cast(Tables(), dtype)
    assert made.layer.weight.dtype == made.layer.bias.dtype == dtype
    assert (made.turn.dtype, made.places.dtype, made.kept.dtype) == (turn, torch.int64, torch.bool)
    assert made.turn.imag.item() == pytest.approx(0.8)
    assert made.places.item() == 2**24 + 1


def test_a_table_that_is_registered_nowhere_is_widened_too():
    module = Tables()
    module.free, module.count = torch.tensor([1j]), torch.tensor([3])
    wide = float64_copy(module)
    assert (wide.free.dtype, wide.turn.dtype, wide.count.dtype) == (torch.complex128, torch.complex128, torch.int64)
    assert module.free.dtype == torch.complex64


@pytest.mark.parametrize("one", ["Registered", "Attribute"])
@pytest.mark.parametrize("other", ["Registered", "Attribute", "Computed"])
def test_where_a_rotary_table_is_kept_makes_no_difference(one, other, target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where imaginary parts are dropped
        found = compare(CheckRequest(target(one), target(other)), quiet)
    assert (found.verdict, found.findings) == ("right", ())


def test_an_attention_with_a_complex_buffer_is_right(target):
    assert examine(CheckRequest(target("Registered")), quiet).verdict == "right"


def test_no_part_of_an_examination_drops_imaginary_parts(target):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = examine(CheckRequest(target("AddedWithoutAScale")), quiet)
    assert [finding.code for finding in found.findings] == ["scale-missing"]
    assert not [str(one.message) for one in heard if "imaginary" in str(one.message)]


def test_a_built_module_in_float64_answers_as_it_did(target):
    request = target("Registered")
    module = build(find_target(request.target), request).module
    rows = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
    wide = cast(copy.deepcopy(module), torch.float64)
    assert torch.allclose(wide(rows.double()).float(), module(rows), atol=1e-5)
