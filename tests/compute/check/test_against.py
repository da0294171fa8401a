"""Comparing two attentions with the same weights: equal outputs if both are right, a difference for each mistake."""

from __future__ import annotations

import copy
import textwrap

import pytest
import torch
from torch import nn

from mhacli.compute.check import against
from mhacli.compute.check.against import compare
from mhacli.compute.check.inputs import randomised
from mhacli.errors import MhaError
from mhacli.requests.user_code import CheckRequest, TargetRequest

SOURCE = '''
import math

import torch
import torch.nn.functional as F
from torch import nn


class Separate(nn.Module):
    """A linear layer each."""

    def __init__(self, d_model, n_heads, bias=True):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)

    def heads(self, rows):
        return rows.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def shares(self, scores):
        return scores.softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        pattern = self.shares(q @ k.mT / math.sqrt(q.shape[-1]))
        return self.out_proj((pattern @ v).transpose(1, 2).flatten(2))


class OverQueries(Separate):
    """The softmax runs over queries."""

    def shares(self, scores):
        return scores.softmax(dim=-2)


class Biased(Separate):
    """With biases, that are zero before training."""

    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads, bias=True)


class Unbiased(Separate):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads, bias=False)


class Fused(nn.Module):
    """One layer for queries, keys and values."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FusedUnscaled(Fused):
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2))


class FusedPerHead(Fused):
    """The same layer with its rows numbered head after head."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Bare(nn.Module):
    """Matrices as they are, applied as x W."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        for name in ("W_q", "W_k", "W_v", "W_o"):
            self.register_parameter(name, nn.Parameter(torch.randn(d_model, d_model) / d_model**0.5))

    def forward(self, x):
        q, k, v = ((x @ w).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ self.W_o


class Masked(Separate):
    def forward(self, x, mask=None):
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = self.masked(scores, mask)
        return self.out_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))

    def masked(self, scores, mask):
        return scores.masked_fill(~mask, -torch.inf)


class Undocumented(Masked):
    pass


class HiddenByTrue(Masked):
    def masked(self, scores, mask):
        return scores.masked_fill(mask, -torch.inf)


class MaskMultiplied(Masked):
    def masked(self, scores, mask):
        return scores * mask


class SharedByHeads(nn.Module):
    """One small layer projects every head."""

    names = ("queries", "keys", "values", "fc_out")

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        d_head = d_model // n_heads
        for name, width in zip(self.names, (d_head, d_head, d_head, d_model)):
            setattr(self, name, nn.Linear(width, width, bias=name == self.names[3]))

    def forward(self, x):
        cut = x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        q, k, v = (getattr(self, name)(cut) for name in self.names[:3])
        return getattr(self, self.names[3])(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SharedToo(SharedByHeads):
    names = ("wq", "wk", "wv", "wo")


class Wider(Separate):
    """Rows of twice the width."""

    def __init__(self, d_model, n_heads):
        super().__init__(2 * d_model, n_heads)


class Unfindable(nn.Module):
    """Its layers have no names that say anything, and there are five."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.layers = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(5))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for layer in self.layers[:3])
        return self.layers[4](self.layers[3](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def attend(q, k, v):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def attend_by_einsum(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def attend_unscaled(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v
'''
ARGUMENTS = (("d_model", "12"), ("n_heads", "3"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


@pytest.fixture
def asked(file):
    """`asked(ONE, OTHER)`: the request to compare two targets, by name in the file or a package."""

    def target(name):
        arguments = () if name.startswith("attend") else ARGUMENTS
        if name.startswith("torch."):
            arguments = (("embed_dim", "12"), ("num_heads", "3"), ("batch_first", "true"))
        return TargetRequest(name if ":" in name else f"{file}:{name}", arguments)

    return lambda one, other: CheckRequest(target(one), target(other))


@pytest.fixture
def compared(asked):
    return lambda one, other: compare(asked(one, other), lambda *stage, **how: None)


def test_a_module_is_like_itself(compared):
    found = compared("Separate", "Separate")
    assert (found.verdict, found.findings) == ("right", ())
    assert found.comparison.max_abs_difference == 0
    assert found.choices[0].message == "weights are copied by their names"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Separate", "Fused"),
        ("Fused", "Separate"),
        ("Separate", "FusedPerHead"),
        ("FusedPerHead", "Separate"),
        ("Separate", "torch.nn:MultiheadAttention"),
        ("torch.nn:MultiheadAttention", "Fused"),
        ("Unbiased", "Bare"),
        ("Bare", "Unbiased"),
        ("SharedByHeads", "SharedToo"),
        ("SharedByHeads", "Separate"),
    ],
)
def test_the_same_layer_written_otherwise_is_alike_with_its_weights_carried_over(one, other, compared):
    found = compared(one, other)
    assert (found.verdict, found.findings) == ("right", ())
    assert found.comparison.max_abs_difference <= found.comparison.tolerance
    assert found.choices[0].message.startswith("weights are copied: ")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Separate", "OverQueries"),
        ("OverQueries", "Separate"),
        ("Separate", "FusedUnscaled"),
        ("FusedUnscaled", "Fused"),
    ],
)
def test_a_layer_with_a_mistake_differs_with_numbers(one, other, compared):
    found = compared(one, other)
    (finding,) = found.findings
    assert found.verdict == "wrong"
    assert finding.code == "differs"
    assert finding.message.endswith("give different outputs with the same weights")
    assert one in finding.message
    assert other in finding.message
    assert finding.evidence.startswith("self-attention: largest difference ")
    assert found.comparison.max_abs_difference > 1000 * found.comparison.tolerance


def test_functions_are_compared_without_weights(compared):
    found = compared("attend", "attend_by_einsum")
    assert (found.verdict, found.choices[0].message) == ("right", "there are no weights to copy")
    assert compared("attend", "attend_unscaled").verdict == "wrong"


def test_what_true_means_in_a_mask_is_a_choice_but_how_it_acts_is_not(compared):
    assert compared("Undocumented", "HiddenByTrue").verdict == "right"
    found = compared("Masked", "MaskMultiplied")
    assert found.verdict == "wrong"
    assert "a mask: largest difference " in found.findings[0].evidence
    assert "self-attention: the same" in found.findings[0].evidence


def refusal(asked, one, other):
    request = asked(one, other)
    with pytest.raises(MhaError) as raised:
        compare(request, lambda *stage, **how: None)
    assert raised.value.code == "cannot-compare"
    return raised.value, request


def test_a_function_and_a_layer_are_not_compared(asked):
    error, _ = refusal(asked, "Separate", "attend")
    assert str(error) == "cannot compare the two: one projects token vectors, the other takes q, k and v as they are"


def test_rows_must_be_as_wide(asked):
    error, request = refusal(asked, "Separate", "Wider")
    one, other = request.of.target, request.against.target
    assert str(error) == f"cannot compare the two: {one} takes vectors of width 12, {other} of width 24"
    assert (
        error.hint
        == "--arg sets an argument of both, by the name that each has for it; --against-arg NAME=VALUE of the second alone"
    )


def test_unidentified_projections_are_not_copied(asked):
    error, _ = refusal(asked, "Separate", "Unfindable")
    assert str(error) == (
        "cannot give both the same weights: the names or shapes of their projections do not correspond"
    )
    assert error.hint == "projections are recognised by names such as q_proj, wk, qkv, out_proj"


@pytest.mark.parametrize(("one", "other"), [("Separate", "SharedByHeads"), ("Biased", "Bare")])
def test_weights_that_the_other_has_no_place_for_are_not_dropped_but_carried_the_other_way(compared, one, other):
    assert compared(one, other).verdict == compared(other, one).verdict == "right"


# ------------------------------------------------------------------------------------------------------- carrying weights over


@pytest.fixture
def pair(asked, monkeypatch):
    """Both modules of the comparison, with the weights copied."""
    kept = []
    plain = against._gaps

    def gaps(one, other, *more):
        kept.append((one, other))
        return plain(one, other, *more)

    monkeypatch.setattr(against, "_gaps", gaps)

    def made(one, other):
        compare(asked(one, other), lambda *stage, **how: None)
        return tuple(subject.built.module for subject in kept[-1])

    return made


def test_every_cell_of_the_weights_lies_where_the_other_reads_it(pair):
    separate, fused = pair("Separate", "Fused")
    for kind in ("weight", "bias"):
        parts = [getattr(layer, kind) for layer in (separate.q_proj, separate.k_proj, separate.v_proj)]
        assert torch.equal(getattr(fused.qkv, kind), torch.cat(parts))
        assert torch.equal(getattr(fused.proj, kind), getattr(separate.out_proj, kind))


def test_cells_are_sorted_into_another_layout(pair):
    separate, per_head = pair("Separate", "FusedPerHead")
    rows = per_head.qkv.weight.unflatten(0, (3, 3, 4))  # head, one of q, k, v, column
    for place, layer in enumerate((separate.q_proj, separate.k_proj, separate.v_proj)):
        assert torch.equal(rows[:, place].flatten(0, 1), layer.weight)


def test_bare_matrices_are_carried_over_transposed(pair):
    layers, bare = pair("Unbiased", "Bare")
    assert torch.equal(bare.W_q, layers.q_proj.weight.mT)
    assert torch.equal(bare.W_o, layers.out_proj.weight.mT)


def test_biases_that_only_the_other_has_are_zero(pair):
    _, biased = pair("Unbiased", "Biased")
    assert all(not layer.bias.any() for layer in (biased.q_proj, biased.k_proj, biased.v_proj, biased.out_proj))


def test_one_changed_weight_is_seen(pair):
    separate, fused = pair("Separate", "Fused")
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        right = separate(x)
        assert torch.allclose(fused(x), right, rtol=0, atol=1e-12)
        for name, parameter in fused.named_parameters():
            changed = copy.deepcopy(fused)
            dict(changed.named_parameters())[name].view(-1)[7] += 0.5
            assert not torch.allclose(changed(x), right, rtol=0, atol=1e-4), (name, parameter.shape)


def test_weights_are_drawn_anew_so_that_biases_and_small_weights_count():
    layer = nn.Linear(8, 8)
    nn.init.zeros_(layer.bias)
    made = randomised(layer, 0)
    assert made.bias.abs().min() > 0
    assert 0.8 < made.weight.std() * 8**0.5 < 1.6
    assert not torch.equal(made.weight, randomised(layer, 1).weight)
    assert torch.equal(made.weight, randomised(layer, 0).weight)
    assert not layer.bias.any()
