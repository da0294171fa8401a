"""What must hold of attention whatever the sizes and the numbers are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhacli.attention import attend, masks
from mhacli.attention.core import attention_pattern
from mhacli.attention.layer import MultiHeadAttention

some = settings(max_examples=25, derandomize=True)
TOLERANCE = 1e-11


class Sizes(NamedTuple):
    batch: int
    n_kv_heads: int
    group: int
    q_len: int
    k_len: int
    d_head: int
    d_v: int
    seed: int

    def draw(self, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64) * 2

    def qkv(self):
        n_heads = self.n_kv_heads * self.group
        q_shape = (self.batch, n_heads, self.q_len, self.d_head)
        k_shape = (self.batch, self.n_kv_heads, self.k_len, self.d_head)
        v_shape = (self.batch, self.n_kv_heads, self.k_len, self.d_v)
        counts = [torch.Size(shape).numel() for shape in (q_shape, k_shape, v_shape)]
        parts = self.draw(sum(counts)).split(counts)
        return tuple(part.view(shape) for part, shape in zip(parts, (q_shape, k_shape, v_shape), strict=True))


def sizes(least_keys=1, least_batch=1):
    return st.builds(
        Sizes,
        batch=st.integers(least_batch, 3),
        n_kv_heads=st.integers(1, 3),
        group=st.integers(1, 3),
        q_len=st.integers(1, 6),
        k_len=st.integers(least_keys, 7),
        d_head=st.integers(1, 5),
        d_v=st.integers(1, 4),
        seed=st.integers(0, 2**32),
    )


def same(a, b):
    return (a - b).abs().max() <= TOLERANCE


class Rows(NamedTuple):
    layer: MultiHeadAttention
    x: torch.Tensor


def layer_with_rows(of, d_model=6, bias=True):
    """A layer whose parameters are all random and not small, and rows for it to read."""
    layer = MultiHeadAttention(
        d_model, of.n_kv_heads * of.group, n_kv_heads=of.n_kv_heads, d_head=of.d_head, d_v=of.d_v, bias=bias
    ).double()
    generator = torch.Generator().manual_seed(of.seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(of.batch, of.k_len, d_model, generator=generator, dtype=torch.float64)
    return Rows(layer.eval().requires_grad_(False), x)


@some
@given(sizes(least_keys=2), st.data())
def test_a_later_token_changes_no_earlier_result_and_does_change_its_own(of, data):
    layer, x = layer_with_rows(of)
    changed_at = data.draw(st.integers(0, of.k_len - 1))
    other = x.clone()
    other[:, changed_at] += 1.0
    before, after = (layer(rows, allowed=masks.causal())[0] for rows in (x, other))
    assert torch.equal(before[:, :changed_at], after[:, :changed_at])
    assert not same(before[:, changed_at], after[:, changed_at])


@some
@given(sizes(least_batch=2), st.data())
def test_sequences_of_a_batch_do_not_know_of_each_other(of, data):
    q, k, v = of.qkv()
    b = data.draw(st.integers(0, of.batch - 1))
    together = attend(q, k, v, allowed=masks.causal(1))
    alone = attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], allowed=masks.causal(1))
    assert same(together[b : b + 1], alone)


@some
@given(sizes(least_keys=2), st.randoms(use_true_random=False))
def test_without_positions_the_order_of_the_keys_does_not_matter(of, random):
    q, k, v = of.qkv()
    order = random.sample(range(of.k_len), of.k_len)
    assert same(attend(q, k, v), attend(q, k[:, :, order], v[:, :, order]))
    patterns = [attention_pattern(q, k), attention_pattern(q, k[:, :, order])]
    assert same(patterns[0][..., order], patterns[1])


@some
@given(sizes(), st.randoms(use_true_random=False))
def test_the_order_of_the_queries_is_the_order_of_the_results(of, random):
    q, k, v = of.qkv()
    order = random.sample(range(of.q_len), of.q_len)
    assert same(attend(q, k, v)[:, :, order], attend(q[:, :, order], k, v))


@some
@given(sizes(), st.sampled_from([99.0, 1e300, float("inf"), float("nan")]), st.data())
def test_what_stands_in_the_padding_does_not_matter(of, content, data):
    q, k, v = of.qkv()
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, of.k_len), min_size=of.batch, max_size=of.batch)))
    side = data.draw(st.sampled_from(["left", "right"]))
    allowed = masks.padding(lengths, side, padded_len=of.k_len)
    expected = attend(q, k, v, allowed=allowed)
    for b, length in enumerate(lengths.tolist()):
        padded = slice(length, None) if side == "right" else slice(0, of.k_len - length)
        k[b, :, padded], v[b, :, padded] = content, content
    assert torch.equal(attend(q, k, v, allowed=allowed), expected)


@some
@given(sizes(), st.data())
def test_a_padded_sequence_gives_what_it_gives_alone(of, data):
    q, k, v = of.qkv()
    length = data.draw(st.integers(1, of.k_len))
    side = data.draw(st.sampled_from(["left", "right"]))
    allowed = masks.padding(torch.tensor([length] * of.batch), side, padded_len=of.k_len)
    real = slice(0, length) if side == "right" else slice(of.k_len - length, None)
    assert same(attend(q, k, v, allowed=allowed), attend(q, k[:, :, real], v[:, :, real]))


@some
@given(sizes(), st.randoms(use_true_random=False))
def test_the_order_of_the_heads_is_free_when_the_columns_of_the_output_follow(of, random):
    layer, x = layer_with_rows(of)
    expected = layer(x, allowed=masks.causal())[0]
    kv_order = random.sample(range(of.n_kv_heads), of.n_kv_heads)
    order = [kv_head * of.group + member for kv_head in kv_order for member in random.sample(range(of.group), of.group)]
    for linear, heads, d in (
        (layer.q_proj, order, of.d_head),
        (layer.k_proj, kv_order, of.d_head),
        (layer.v_proj, kv_order, of.d_v),
    ):
        rows = torch.tensor([head * d + c for head in heads for c in range(d)])
        linear.weight.copy_(linear.weight[rows])
        linear.bias.copy_(linear.bias[rows])
    columns = torch.tensor([head * of.d_v + c for head in order for c in range(of.d_v)])
    layer.o_proj.weight.copy_(layer.o_proj.weight[:, columns])
    assert same(layer(x, allowed=masks.causal())[0], expected)


@some
@given(sizes())
def test_without_queries_every_key_weighs_the_same(of):
    layer, x = layer_with_rows(of)
    layer.q_proj.weight.zero_()
    layer.q_proj.bias.zero_()
    mean = layer.v_proj(x).mean(dim=1).unflatten(1, (of.n_kv_heads, of.d_v))
    of_every_head = torch.stack([mean[:, h // of.group] for h in range(of.n_kv_heads * of.group)], dim=1)
    expected = layer.o_proj(of_every_head.flatten(1))
    assert same(layer(x)[0], expected[:, None].expand(of.batch, of.k_len, 6))


@some
@given(sizes(), st.floats(-50, 50))
def test_a_constant_added_to_a_row_of_scores_changes_nothing(of, constant):
    q, k, v = of.qkv()
    row = torch.zeros(of.q_len, 1, dtype=torch.float64)
    row[-1] = constant
    assert same(attend(q, k, v, bias=row, allowed=masks.causal(2)), attend(q, k, v, allowed=masks.causal(2)))


@some
@given(sizes(), st.floats(-3, 3))
def test_the_result_is_linear_in_the_values(of, factor):
    q, k, v = of.qkv()
    other = v.flip(0, 2)
    assert same(attend(q, k, v + factor * other), attend(q, k, v) + factor * attend(q, k, other))


@some
@given(sizes())
def test_a_single_key_hands_over_its_value_whole(of):
    q, k, v = of.qkv()
    z = attend(q, k[:, :, :1], v[:, :, :1])
    for h in range(of.n_kv_heads * of.group):
        assert torch.equal(z[:, h], v[:, h // of.group, :1].expand(of.batch, of.q_len, of.d_v))


@some
@given(sizes())
def test_every_result_lies_between_the_values(of):
    q, k, v = of.qkv()
    z = attend(q, k, v)
    for h in range(of.n_kv_heads * of.group):
        low, high = v[:, h // of.group].amin(dim=1, keepdim=True), v[:, h // of.group].amax(dim=1, keepdim=True)
        assert ((z[:, h] >= low - TOLERANCE) & (z[:, h] <= high + TOLERANCE)).all()


@some
@given(sizes())
def test_the_same_keys_and_queries_scaled_apart_give_the_same_pattern(of):
    q, k, _ = of.qkv()
    assert same(attention_pattern(q, k), attention_pattern(4 * q, k / 4))
    assert same(attention_pattern(q, k, scale=0.5), attention_pattern(q / 2, k, scale=1.0))


@some
@given(sizes())
def test_a_mask_of_nothing_but_true_is_no_mask(of):
    q, k, v = of.qkv()
    allowed = masks.from_tensor(torch.ones(of.q_len, of.k_len, dtype=torch.bool))
    assert torch.equal(attend(q, k, v, allowed=allowed), attend(q, k, v))
