"""Every common layout of weights, read as projections: the right reading is found, and a plain one comes first. The oracle is
the module's own expression for the heads and the output of an input vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhacli.adapters.usercode.projections import ProjectionReading, Widths, parts_of, projection_readings

D, HEADS = 12, 3
WIDTHS = Widths(D, D, HEADS, None)
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Layout(NamedTuple):
    """A module with its own expressions for the heads `[batch, head, token, d]` and for the output of `[batch, token, head·d]`.
    `first` is the largest allowed index of the right reading, `named` the required choices, `order` the order in the name of a
    fused matrix."""

    module: nn.Module
    heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    out: Callable[[Tensor], Tensor] | None
    widths: Widths = WIDTHS
    first: int = 0
    named: tuple[str, ...] = ()
    order: str | None = None


def module_of(**children):
    module = nn.Module()
    for name, child in children.items():
        if isinstance(child, Tensor):
            module.register_parameter(name, nn.Parameter(child))
        else:
            setattr(module, name, child)
    generator = torch.Generator().manual_seed(3)
    module.double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def cut(rows, n_heads=HEADS):
    return rows.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def empty(*shape):
    return torch.empty(shape)


# ------------------------------------------------------------------------------------------------------------ what people write


def separate(bias=True):
    m = module_of(
        q_proj=nn.Linear(D, D, bias),
        k_proj=nn.Linear(D, D, bias),
        v_proj=nn.Linear(D, D, bias),
        out_proj=nn.Linear(D, D, bias),
    )
    return Layout(m, lambda x: (cut(m.q_proj(x)), cut(m.k_proj(x)), cut(m.v_proj(x))), m.out_proj)


def without_output():
    m = module_of(query=nn.Linear(D, D), key=nn.Linear(D, D), value=nn.Linear(D, D))
    return Layout(m, lambda x: (cut(m.query(x)), cut(m.key(x)), cut(m.value(x))), None)


def values_of_another_width():
    m = module_of(w_q=nn.Linear(D, 6), w_k=nn.Linear(D, 6), w_v=nn.Linear(D, 15), w_o=nn.Linear(15, D))
    return Layout(m, lambda x: (cut(m.w_q(x)), cut(m.w_k(x)), cut(m.w_v(x))), m.w_o)


def grouped():
    m = module_of(wq=nn.Linear(D, 24), wk=nn.Linear(D, 8), wv=nn.Linear(D, 8), wo=nn.Linear(24, D))
    return Layout(m, lambda x: (cut(m.wq(x), 6), cut(m.wk(x), 2), cut(m.wv(x), 2)), m.wo, Widths(D, D, 6, 2))


def grouped_without_being_told():
    return grouped()._replace(widths=Widths(D, D, 6, None))


def thirds(name="qkv"):
    m = module_of(**{name: nn.Linear(D, 3 * D), "proj": nn.Linear(D, D)})
    return Layout(m, lambda x: tuple(cut(t) for t in getattr(m, name)(x).chunk(3, dim=-1)), m.proj, order="qkv")


def thirds_in_the_order_of_the_name():
    m = module_of(kqv=nn.Linear(D, 3 * D), proj=nn.Linear(D, D))

    def heads(x):
        k, q, v = m.kqv(x).chunk(3, dim=-1)
        return cut(q), cut(k), cut(v)

    return Layout(m, heads, m.proj, order="kqv")


def per_head():
    m = module_of(qkv_proj=nn.Linear(D, 3 * D), o_proj=nn.Linear(D, D))

    def heads(x):
        return m.qkv_proj(x).reshape(2, 5, HEADS, 3 * D // HEADS).permute(0, 2, 1, 3).chunk(3, dim=-1)

    return Layout(m, heads, m.o_proj, first=1, named=("fused-per-head",), order="qkv")


LAID = ("3hd", "h3d", "hd3", "3dh", "d3h", "dh3")
"""The likelier first."""


def numbered(pattern):
    """`rearrange(qkv(x), "b t (…) -> …")` for any order of the axes."""
    sizes = {"3": 3, "h": HEADS, "d": D // HEADS}
    m = module_of(qkv=nn.Linear(D, 3 * D), proj=nn.Linear(D, D))

    def heads(x):
        rows = m.qkv(x).unflatten(-1, [sizes[axis] for axis in pattern])
        axes = [2 + pattern.index(axis) for axis in "3hd"]
        return rows.permute(axes[0], 0, axes[1], 1, axes[2]).unbind(0)

    return Layout(m, heads, m.proj, first=LAID.index(pattern), named=("fused-layout",), order="qkv")


def thirds_of_groups():
    m = module_of(qkv_proj=nn.Linear(D, 24 + 8 + 8), o_proj=nn.Linear(24, D))

    def heads(x):
        q, k, v = m.qkv_proj(x).split([24, 8, 8], dim=-1)
        return cut(q, 6), cut(k, 2), cut(v, 2)

    return Layout(m, heads, m.o_proj, Widths(D, D, 6, 2), order="qkv")


def thirds_of_groups_without_being_told(n_kv):
    m = module_of(c_attn=nn.Linear(D, D + 4 * n_kv), c_proj=nn.Linear(D, D))

    def heads(x):
        q, k, v = m.c_attn(x).split([D, 2 * n_kv, 2 * n_kv], dim=-1)
        return cut(q, 6), cut(k, n_kv), cut(v, n_kv)

    return Layout(m, heads, m.c_proj, Widths(D, D, 6, None))


def per_group():
    m = module_of(query_key_value=nn.Linear(D, 24 + 8 + 8), dense=nn.Linear(24, D))

    def heads(x):
        rows = m.query_key_value(x).view(2, 5, 2, 5, 4)  # two groups of three queries, a key and a value
        q = rows[:, :, :, :3].flatten(2, 3)
        return q.transpose(1, 2), rows[:, :, :, 3].transpose(1, 2), rows[:, :, :, 4].transpose(1, 2)

    return Layout(m, heads, m.dense, Widths(D, D, 6, 2), first=1, named=("fused-per-head",), order="qkv")


def torchs_own():
    m = nn.MultiheadAttention(D, HEADS).double()
    for parameter in m.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))

    def heads(x):
        return tuple(
            cut(F.linear(x, w, b)) for w, b in zip(m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True)
        )

    return Layout(m, heads, m.out_proj, order="qkv")


def torchs_own_apart():
    m = nn.MultiheadAttention(D, HEADS, kdim=7, vdim=7).double()
    for parameter in m.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    biases = m.in_proj_bias.chunk(3)

    def heads(x):
        return (
            cut(F.linear(x, m.q_proj_weight, biases[0])),
            cut(F.linear(x[..., :7], m.k_proj_weight, biases[1])),
            cut(F.linear(x[..., :7], m.v_proj_weight, biases[2])),
        )

    return Layout(m, heads, m.out_proj, Widths(D, 7, HEADS, None))


class Conv1D(nn.Module):
    """GPT-2's."""

    def __init__(self, d_out, d_in):
        super().__init__()
        self.weight, self.bias = nn.Parameter(empty(d_in, d_out)), nn.Parameter(empty(d_out))

    def forward(self, x):
        return x @ self.weight + self.bias


def conv1d():
    m = module_of(c_attn=Conv1D(3 * D, D), c_proj=Conv1D(D, D))
    return Layout(m, lambda x: tuple(cut(t) for t in m.c_attn(x).split(D, 2)), m.c_proj, named=("fused-order",))


def conv1d_of_width_one():
    m = module_of(to_q=nn.Conv1d(D, D, 1), to_k=nn.Conv1d(D, D, 1), to_v=nn.Conv1d(D, D, 1), to_out=nn.Conv1d(D, D, 1))
    return Layout(
        m,
        lambda x: tuple(cut(layer(x.mT).mT) for layer in (m.to_q, m.to_k, m.to_v)),
        lambda z: m.to_out(z.mT).mT,
    )


def stacked(transposed):
    m = module_of(qkv=empty(3, D, D), wo=empty(D, D))

    def heads(x):
        return tuple(cut(x @ (w.mT if transposed else w)) for w in m.qkv)

    out = (lambda z: z @ m.wo.mT) if transposed else (lambda z: z @ m.wo)
    return Layout(m, heads, out, first=0 if transposed else 3, named=("fused",), order="qkv")


def kernels(axes):
    """Weights with an axis each for rows (i), heads (h) and columns (d), as einsum takes them."""
    sizes = {"i": D, "h": HEADS, "d": 4}
    m = module_of(
        query_kernel=empty(*(sizes[a] for a in axes)),
        key_kernel=empty(*(sizes[a] for a in axes)),
        value_kernel=empty(*(sizes[a] for a in axes)),
        query_bias=empty(HEADS, 4),
        out_kernel=empty(HEADS, 4, D),
        out_bias=empty(D),
    )

    def heads(x):
        q, k, v = (torch.einsum(f"bti,{axes}->bhtd", x, w) for w in (m.query_kernel, m.key_kernel, m.value_kernel))
        return q + m.query_bias[:, None], k, v

    def out(z):
        return torch.einsum("bthd,hdi->bti", z.unflatten(-1, (HEADS, 4)), m.out_kernel) + m.out_bias

    return Layout(m, heads, out, first=4, named=("kernel",))


def output_kernel(axes):
    made = separate()
    sizes = {"i": 5, "h": HEADS, "d": 4}
    m = module_of(q_proj=nn.Linear(D, D), k_proj=nn.Linear(D, D), v_proj=nn.Linear(D, D),
                  out_proj=empty(*(sizes[a] for a in axes)))  # fmt: skip

    def out(z):
        return torch.einsum(f"bthd,{axes}->bti", z.unflatten(-1, (HEADS, 4)), m.out_proj)

    return made._replace(
        module=m, heads=lambda x: (cut(m.q_proj(x)), cut(m.k_proj(x)), cut(m.v_proj(x))), out=out, first=5
    )


def one_layer_for_each_head():
    m = module_of(
        queries=nn.ModuleList(nn.Linear(D, 4) for _ in range(HEADS)),
        keys=nn.ModuleList(nn.Linear(D, 4) for _ in range(HEADS)),
        values=nn.ModuleList(nn.Linear(D, 4) for _ in range(HEADS)),
        out=nn.Linear(D, D),
    )

    def heads(x):
        return tuple(torch.stack([f(x) for f in layers], dim=1) for layers in (m.queries, m.keys, m.values))

    return Layout(m, heads, m.out, named=("per-head",))


class Head(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(D, 4, bias=bias) for _ in range(3))


def a_module_for_each_head(count=HEADS, width=D):
    m = module_of(heads=nn.ModuleList(Head() for _ in range(count)), proj=nn.Linear(4 * count, width))

    def heads(x):
        return tuple(
            torch.stack([getattr(head, name)(x) for head in m.heads], dim=1) for name in ("query", "key", "value")
        )

    return Layout(m, heads, m.proj, Widths(D, D, count, None), named=("per-head",))


class FusedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 12)


def a_fused_layer_for_each_head():
    m = module_of(heads=nn.ModuleList(FusedHead() for _ in range(HEADS)), proj=nn.Linear(D, D))

    def heads(x):
        return tuple(torch.stack(t, dim=1) for t in zip(*(h.qkv(x).chunk(3, -1) for h in m.heads), strict=True))

    return Layout(m, heads, m.proj, named=("per-head",), order="qkv")


def linears_without_names():
    m = module_of(linears=nn.ModuleList(nn.Linear(D, D) for _ in range(4)))
    return Layout(m, lambda x: tuple(cut(layer(x)) for layer in list(m.linears)[:3]), m.linears[3], named=("unnamed",))


def linears_without_names_in_another_order():
    m = module_of(linears=nn.ModuleList(nn.Linear(D, D) for _ in range(4)))
    o, v, q, k = m.linears
    return Layout(m, lambda x: (cut(q(x)), cut(k(x)), cut(v(x))), o, first=17, named=("unnamed",))


def raw(transposed):
    m = module_of(W_q=empty(D, D), W_k=empty(D, D), W_v=empty(D, D), W_o=empty(D, D), b_q=empty(D), b_o=empty(D))

    def apply(x, w):
        return x @ (w.mT if transposed else w)

    return Layout(
        m,
        lambda x: (cut(apply(x, m.W_q) + m.b_q), cut(apply(x, m.W_k)), cut(apply(x, m.W_v))),
        lambda z: apply(z, m.W_o) + m.b_o,
        first=0 if transposed else 15,
        named=() if transposed else ("orientation",),
    )


def keys_and_values_fused():
    m = module_of(to_q=nn.Linear(D, D), to_kv=nn.Linear(D, 2 * D), to_out=nn.Linear(D, D))

    def heads(x):
        k, v = m.to_kv(x).chunk(2, dim=-1)
        return cut(m.to_q(x)), cut(k), cut(v)

    return Layout(m, heads, m.to_out)


def keys_and_values_fused_for_groups():
    m = module_of(wq=nn.Linear(D, 24), wkv=nn.Linear(D, 16), wo=nn.Linear(24, D))

    def heads(x):
        k, v = m.wkv(x).chunk(2, dim=-1)
        return cut(m.wq(x), 6), cut(k, 2), cut(v, 2)

    return Layout(m, heads, m.wo, Widths(D, D, 6, 2))


def keys_and_values_fused_per_head():
    m = module_of(q_proj=nn.Linear(D, D), kv_proj=nn.Linear(D, 2 * D), o_proj=nn.Linear(D, D))

    def heads(x):
        k, v = m.kv_proj(x).unflatten(-1, (HEADS, 8)).transpose(1, 2).chunk(2, dim=-1)
        return cut(m.q_proj(x)), k, v

    return Layout(m, heads, m.o_proj, first=1, named=("fused-per-head",))


def queries_and_keys_fused():
    m = module_of(to_qk=nn.Linear(D, 2 * D), to_v=nn.Linear(D, D), to_out=nn.Linear(D, D))

    def heads(x):
        q, k = m.to_qk(x).chunk(2, dim=-1)
        return cut(q), cut(k), cut(m.to_v(x))

    return Layout(m, heads, m.to_out, order="qk")


def one_projection_for_all_heads():
    m = module_of(queries=nn.Linear(4, 4), keys=nn.Linear(4, 4), values=nn.Linear(4, 4), fc_out=nn.Linear(D, D))

    def heads(x):
        return m.queries(cut(x)), m.keys(cut(x)), m.values(cut(x))

    return Layout(m, heads, m.fc_out, named=("shared-projections",))


LAYOUTS = {
    "separate": separate(),
    "separate without biases": separate(bias=False),
    "no output projection": without_output(),
    "values of another width": values_of_another_width(),
    "grouped queries": grouped(),
    "grouped queries, as the widths say": grouped_without_being_told(),
    "fused in thirds": thirds(),
    "fused in thirds, in_proj": thirds("in_proj"),
    "fused in thirds, query_key_value": thirds("query_key_value"),
    "fused as the name says": thirds_in_the_order_of_the_name(),
    "fused per head": per_head(),
    **{f"fused ({' '.join(pattern)})": numbered(pattern) for pattern in ("hd3", "3dh", "d3h", "dh3")},
    "fused thirds of grouped queries": thirds_of_groups(),
    **{f"fused thirds, {n} kv heads that nobody tells": thirds_of_groups_without_being_told(n) for n in (1, 2, 3)},
    "fused per group": per_group(),
    "nn.MultiheadAttention": torchs_own(),
    "nn.MultiheadAttention of two widths": torchs_own_apart(),
    "Conv1D": conv1d(),
    "nn.Conv1d": conv1d_of_width_one(),
    "stacked [3, out, in]": stacked(True),
    "stacked [3, in, out]": stacked(False),
    **{f"kernels {axes}": kernels(axes) for axes in ("ihd", "idh", "hid", "hdi", "dih", "dhi")},
    **{f"output kernel {axes}": output_kernel(axes) for axes in ("hdi", "ihd", "hid", "dhi")},
    "a list for each of q, k, v": one_layer_for_each_head(),
    "a module for each head": a_module_for_each_head(),
    "a module for each of eleven heads": a_module_for_each_head(11),
    "a fused layer for each head": a_fused_layer_for_each_head(),
    "linears[0..3]": linears_without_names(),
    "linears in another order": linears_without_names_in_another_order(),
    "bare matrices x Wᵀ": raw(True),
    "bare matrices x W": raw(False),
    "keys and values fused": keys_and_values_fused(),
    "keys and values of groups fused": keys_and_values_fused_for_groups(),
    "keys and values fused per head": keys_and_values_fused_per_head(),
    "queries and keys fused": queries_and_keys_fused(),
    "one projection for all heads": one_projection_for_all_heads(),
}


def read(layout) -> list[ProjectionReading]:
    return list(projection_readings(parts_of(layout.module, {}), layout.widths))


def is_right(reading, layout):
    """Whether a reading gives the module's heads and output."""
    context = X[..., : layout.widths.d_context]
    q, k, v = layout.heads(X)
    rows = (X, context, context)
    for wanted, projection, given in zip((q, k, v), reading.weights[:3], rows, strict=True):
        n_heads = reading.n_heads if wanted is q else reading.n_kv_heads
        made = projection(given)
        if made.shape[-1] % n_heads or not same(cut(made, n_heads), wanted):
            return False
    z = torch.randn(2, 5, v.shape[1] * v.shape[-1] * (q.shape[1] // v.shape[1]), dtype=torch.float64)
    if layout.out is None:
        return reading.weights.out is None
    out = reading.weights.out
    return out is not None and out.weight.shape[1] == z.shape[-1] and same(out(z), layout.out(z))


def same(a, b):
    return a.shape == b.shape and bool((a - b).abs().max() < 1e-10)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_right_reading_comes_early_with_its_choices(name):
    layout = LAYOUTS[name]
    found = read(layout)
    right = [place for place, reading in enumerate(found) if is_right(reading, layout)]
    assert right
    assert right[0] <= layout.first
    reading = found[right[0]]
    assert {choice.name for choice in reading.choices} >= set(layout.named)
    assert reading.order == layout.order
    assert (reading.n_heads, reading.n_kv_heads) == tuple(t.shape[1] for t in layout.heads(X)[:2])


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_reading_has_shapes_that_fit(name):
    layout = LAYOUTS[name]
    widths = layout.widths
    for reading in read(layout):
        q, k, v, _ = reading.weights
        assert [p.weight.ndim for p in (q, k, v)] == [2, 2, 2]
        assert [p.weight.shape[1] for p in (q, k, v)] == [widths.d_in, widths.d_context, widths.d_context]
        assert q.weight.shape[0] % reading.n_heads == 0
        assert k.weight.shape[0] * reading.n_heads == q.weight.shape[0] * reading.n_kv_heads
        assert v.weight.shape[0] % reading.n_kv_heads == 0
        assert all(p.bias is None or p.bias.shape == p.weight.shape[:1] for p in (q, k, v))


@pytest.mark.parametrize("name", LAYOUTS)
def test_everything_that_a_layer_has_is_read(name):
    layout = LAYOUTS[name]
    reading = next(reading for reading in read(layout) if is_right(reading, layout))
    assert reading.unused == ()
    assert set(reading.parts) == {part.name for part in parts_of(layout.module, {})}


PLAIN = ("separate", "grouped queries", "fused in thirds", "nn.MultiheadAttention", "keys and values fused")


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_reading_comes_first_and_is_no_choice(name):
    layout = LAYOUTS[name]
    first = read(layout)[0]
    assert is_right(first, layout)
    assert first.choices == ()


def test_named_layers_are_read_in_one_way_only():
    assert len(read(LAYOUTS["separate"])) == 1
    assert len(read(LAYOUTS["values of another width"])) == 1


def test_what_lies_side_by_side_without_a_name_is_tried_in_every_order():
    orders = {
        choice.message
        for reading in read(LAYOUTS["Conv1D"])
        for choice in reading.choices
        if choice.name == "fused-order"
    }
    assert len(orders) == math.factorial(3)
    assert "c_attn holds q, k, v in this order" in orders


def test_an_unused_layer_is_listed():
    module = module_of(
        q_proj=nn.Linear(D, D),
        k_proj=nn.Linear(D, D),
        v_proj=nn.Linear(D, D),
        out_proj=nn.Linear(D, D),
        gate=nn.Linear(D, 1),
    )
    assert {reading.unused for reading in projection_readings(parts_of(module, {}), WIDTHS)} == {("gate",)}


@pytest.mark.parametrize(
    "module",
    [
        module_of(first=nn.Linear(D, D), second=nn.Linear(D, D)),
        module_of(q_proj=nn.Linear(D, D), k_proj=nn.Linear(D, D)),
        module_of(q_proj=nn.Linear(7, D), k_proj=nn.Linear(7, D), v_proj=nn.Linear(7, D)),
        nn.Module(),
    ],
    ids=["two without names", "no values", "rows of another width", "nothing"],
)
def test_indistinguishable_queries_keys_and_values_give_no_reading(module):
    assert list(projection_readings(parts_of(module, {}), WIDTHS)) == []


def test_widths_that_the_heads_do_not_divide_are_not_read():
    module = module_of(q_proj=nn.Linear(D, 10), k_proj=nn.Linear(D, 10), v_proj=nn.Linear(D, 10))
    assert list(projection_readings(parts_of(module, {}), WIDTHS)) == []
