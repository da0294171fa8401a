"""The probes of `mha check`: right code passes all of them, and each mistake fails its probe."""

from __future__ import annotations

import inspect
import math
import types
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mhacli.adapters.usercode.types import AttentionOutput, Built, InputSizes, MaskForm
from mhacli.compute.check.probes import catalogue as probes
from mhacli.compute.check.probes.context import ProbeFacts
from mhacli.compute.check.probes.visibility import mentions_positions, pattern_of
from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.check import PROBES

D, HEADS, D_HEAD = 24, 3, 8
REQUEST = CheckRequest(TargetRequest("mine.py:Attention"))


# ------------------------------------------------------------------------------------------------------ asking, for the tests


def masks(parameter, *, axes=("query", "key"), kinds=("bool", "01", "additive")):
    """Both meanings of every kind, as `find_call` lists them."""
    return tuple(
        MaskForm(parameter, axes, kind, means)
        for kind in kinds
        for means in (("keep",) if kind in ("additive", "lengths") else ("keep", "hide"))
    )


def written(form, inputs):
    """A mask of this form for the allowed cells, or for padding."""
    if form is None:
        return None
    if inputs.real is not None:
        if form.kind == "lengths":
            return inputs.real.sum(1)
        allowed = inputs.real[:, None, None, :]
    else:
        allowed = inputs.allowed
    axes = ("batch", "head", "query", "key")
    for axis in (3, 2, 1, 0):
        if axes[axis] not in form.axes:
            allowed = allowed.select(axis, 0)
    true = allowed if form.true_means == "keep" else ~allowed
    if form.kind == "bool":
        return true
    if form.kind == "additive":
        return torch.zeros(true.shape, dtype=inputs.queries.dtype).masked_fill(~true, -math.inf)
    return true.to(torch.long if form.kind == "whole" else inputs.queries.dtype)


@dataclass
class Asked:
    """A subject that calls `way(call, inputs, mask, padding)`."""

    built: Built
    way: Any
    is_function: bool = False
    n_heads: int = HEADS
    takes_context: bool = False
    causal_by: str | None = None
    mask_forms: tuple = ()
    padding_forms: tuple = ()
    dtype: torch.dtype = torch.float64
    sizes: InputSizes = field(default_factory=lambda: InputSizes(3, 7, 7, D, D))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    described: str = "module(x)"
    n_calls: int = 0

    def __call__(self, inputs, *, mask=None, padding=None, training=False):
        self.n_calls += 1
        module = self.built.module
        if module is not None:
            module.train(training)
        answer = self.way(self.built.call, inputs, written(mask, inputs), written(padding, inputs))
        out, pattern = answer if isinstance(answer, tuple) else (answer, None)
        if pattern is not None and pattern.ndim == 3:
            pattern = pattern[:, None]
        return AttentionOutput(out, pattern)

    def of(self, call, dtype):
        module = call if isinstance(call, nn.Module) else None
        return replace(self, built=replace(self.built, call=call, module=module), dtype=dtype)


def built(thing, documentation="", **arguments):
    """A target built with arguments."""
    torch.manual_seed(4)
    is_class = inspect.isclass(thing)
    call = thing(**arguments) if is_class else thing
    module = call.to(torch.float64) if isinstance(call, nn.Module) else None
    if module is not None:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
    return Built(
        thing.__name__, thing, call, module, types.MappingProxyType(arguments), frozenset(arguments), (),
        lambda changes: built(thing, documentation, **arguments | dict(changes)), documentation,
    )  # fmt: skip


def subject(thing, way=None, documentation="", *, of=None, **how):
    arguments = {"d_model": D, "n_heads": HEADS} if of is None else of
    if inspect.isclass(thing):
        return Asked(built(thing, documentation, **arguments), way or (lambda f, i, m, p: f(i.queries)), **how)
    way = way or (lambda f, i, m, p: f(i.queries, i.keys, i.values))
    how = {"is_function": True, "takes_context": True, "sizes": InputSizes(3, 5, 11, D_HEAD, D_HEAD)} | how
    return Asked(built(thing, documentation), way, **how)


def found(asked, *, causal=False, request=REQUEST):
    """The probes by name, and the facts. Asserts that every probe ran."""
    stages: list[str] = []
    answers, facts = probes.probe(asked, request, stages.append, expects_causal=causal)
    assert [answer.name for answer in answers] == [entry.name for entry in probes.PROBES] == list(PROBES)
    assert {f"probing {asked.built.name} ({entry.name})" for entry in probes.PROBES} <= set(stages)
    assert all(answer.value is None or math.isfinite(answer.value) for answer in answers)
    return {answer.name: answer for answer in answers}, facts


def failed(asked, **how):
    """The names of the failed probes."""
    return {name for name, answer in found(asked, **how)[0].items() if answer.ok is False}


# ------------------------------------------------------------------------------------------------------------- right styles


class Separate(nn.Module):
    """Four projections; True in the mask is to be kept. With switches for mistakes."""

    def __init__(self, d_model, n_heads, dropout=0.0, bias=True, sentinel=-1e9):
        super().__init__()
        self.n_heads, self.d_head, self.sentinel = n_heads, d_model // n_heads, sentinel
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def split(self, t):
        return t.view(*t.shape[:2], self.n_heads, self.d_head).transpose(1, 2)

    def hide(self, scores, mask):
        return scores if mask is None else scores.masked_fill(mask == 0, self.sentinel)

    def normal(self, scores):
        return scores.softmax(-1)

    def drop(self, pattern):
        return self.dropout(pattern)

    def merge(self, z):
        return z.transpose(1, 2).flatten(2)

    def forward(self, query, key=None, value=None, mask=None):
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = self.split(self.w_q(query)), self.split(self.w_k(key)), self.split(self.w_v(value))
        pattern = self.normal(self.hide(q @ k.transpose(-2, -1) / self.d_head**0.5, mask))
        return self.w_o(self.merge(self.drop(pattern) @ v)), pattern


class Fused(nn.Module):
    """nanoGPT's: one matrix, a triangle in a buffer."""

    def __init__(self, d_model, n_heads, block_size=64, dropout=0.0):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_heads = n_heads
        self.register_buffer("bias", torch.ones(block_size, block_size).tril().view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_heads, C // self.n_heads).transpose(1, 2) for t in self.c_attn(x).split(C, 2))
        scores = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5
        pattern = self.attn_dropout(scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1))
        return self.resid_dropout(self.c_proj((pattern @ v).transpose(1, 2).contiguous().view(B, T, C)))


class Einsum(nn.Module):
    """Kernels per head, no bias, batch second."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.empty(d_model, n_heads, d_model // n_heads)) for _ in range(3))
        self.o = nn.Parameter(torch.empty(n_heads, d_model // n_heads, d_model))

    def forward(self, x):
        q, k, v = (torch.einsum("tbd,dhe->tbhe", x, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("tbhe,sbhe->bhts", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("tbhe,hed->tbd", torch.einsum("bhts,sbhe->tbhe", scores.softmax(-1), v), self.o)


class PerHead(nn.Module):
    """A loop over heads, and no output projection."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        width = d_model // n_heads
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(d_model, width) for _ in range(3)) for _ in range(n_heads))

    def forward(self, x):
        rows = []
        for to_q, to_k, to_v in self.heads:
            q, k, v = to_q(x), to_k(x), to_v(x)
            rows.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)
        return torch.cat(rows, -1)


class Kernel(nn.Module):
    """torch's kernel, causal, with grouped heads."""

    def __init__(self, d_model, n_heads, n_kv_heads=1, dropout=0.0):
        super().__init__()
        self.d_head, self.dropout = d_model // n_heads, dropout
        self.q_proj, self.o_proj = nn.Linear(d_model, d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(d_model, n_kv_heads * self.d_head, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout_p = self.dropout if self.training else 0.0
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=True)
        return self.o_proj(z.transpose(1, 2).flatten(2))


class Rotary(Separate):
    """Keys and queries turned by their places."""

    def rotate(self, t):
        at = torch.arange(t.shape[2], dtype=t.dtype)[:, None] * 100.0 ** -torch.linspace(
            0, 1, t.shape[3] // 2, dtype=t.dtype
        )
        one, two = t.chunk(2, -1)
        return torch.cat([one * at.cos() - two * at.sin(), one * at.sin() + two * at.cos()], -1)

    def forward(self, x):
        q, k, v = (self.split(w(x)) for w in (self.w_q, self.w_k, self.w_v))
        q, k = self.rotate(q), self.rotate(k)
        return self.w_o(self.merge((q @ k.mT / self.d_head**0.5).softmax(-1) @ v))


class Padded(Separate):
    """Tells padding, and zeroes what padded tokens answer."""

    def forward(self, x, pad_mask=None):
        mask = None if pad_mask is None else ~pad_mask[:, None, None, :]
        out, _ = super().forward(x, mask=mask)
        return out if pad_mask is None else out.masked_fill(pad_mask[:, :, None], 0.0)


class PaddedBothWays(Separate):
    """Hides padded queries too, whose rows then have no key at all: what they answer is nobody's business."""

    def forward(self, x, real=None):
        mask = None if real is None else (real[:, None, :, None] & real[:, None, None, :])
        return super().forward(x, mask=mask)[0]


class ByLengths(Separate):
    """ProbeAnswer by how many tokens are real."""

    def forward(self, x, lengths=None):
        mask = None if lengths is None else (torch.arange(x.shape[1]) < lengths[:, None])[:, None, None, :]
        return super().forward(x, mask=mask)[0]


def attend(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    pattern = scores.softmax(-1)
    return pattern @ v, pattern


BY_MASK = {"way": lambda f, i, m, p: f(i.queries, i.keys, i.values, mask=m), "mask_forms": masks("mask"),
           "takes_context": True, "sizes": InputSizes(3, 5, 11, D, D)}  # fmt: skip
TORCH_MASKS = masks("attn_mask")
BY_TORCH = {
    "way": lambda f, i, m, p: f(i.queries, i.queries if i.keys is None else i.keys,
                                i.queries if i.keys is None else i.keys, key_padding_mask=p, attn_mask=m),
    "of": {"embed_dim": D, "num_heads": HEADS, "batch_first": True}, "takes_context": True, "sizes": InputSizes(3, 5, 11, D, D),
    "mask_forms": masks("attn_mask"),
    "padding_forms": masks("key_padding_mask", axes=("batch", "key"), kinds=("bool", "additive")),
}  # fmt: skip


def _sdpa(f, i, m, p):
    return f(i.queries, i.keys, i.values, attn_mask=m)


RIGHT = {
    "separate, a sentinel": lambda: subject(Separate, **BY_MASK),
    "separate, minus infinity": lambda: subject(Separate, of={"d_model": D, "n_heads": HEADS, "sentinel": -math.inf}, **BY_MASK),
    "separate, dropout, no bias": lambda: subject(
        Separate, of={"d_model": D, "n_heads": HEADS, "dropout": 0.2, "bias": False}, **BY_MASK
    ),
    "fused, a causal buffer": lambda: subject(Fused),
    "fused, dropout": lambda: subject(Fused, of={"d_model": D, "n_heads": HEADS, "dropout": 0.1}),
    "einsum, batch second": lambda: subject(
        Einsum, lambda f, i, m, p: f(i.queries.transpose(0, 1)).transpose(0, 1)
    ),
    "a loop over heads": lambda: subject(PerHead),
    "torch's kernel in a module": lambda: subject(
        Kernel, of={"d_model": D, "n_heads": HEADS, "n_kv_heads": 1, "dropout": 0.1}
    ),
    "rotary": lambda: subject(Rotary, sizes=InputSizes(2, 7, 7, D, D)),
    "padding, zeroed": lambda: subject(
        Padded, lambda f, i, m, p: f(i.queries, p),
        padding_forms=masks("pad_mask", axes=("batch", "key"), kinds=("bool",)),
    ),
    "padding, both ways": lambda: subject(
        PaddedBothWays,
        lambda f, i, m, p: f(i.queries, p),
        padding_forms=masks("real", axes=("batch", "key"), kinds=("bool",)),
    ),
    "lengths": lambda: subject(
        ByLengths, lambda f, i, m, p: f(i.queries, p), padding_forms=masks("lengths", axes=("batch",), kinds=("lengths",))
    ),
    "torch's own module": lambda: subject(nn.MultiheadAttention, **BY_TORCH),
    "torch's own function": lambda: subject(F.scaled_dot_product_attention, _sdpa, mask_forms=masks("attn_mask")),
    "torch's own function, causal": lambda: subject(
        F.scaled_dot_product_attention, lambda f, i, m, p: f(i.queries, i.keys, i.values, is_causal=True)
    ),
    "a causal sentinel": lambda: subject(CausalSentinel),
    "a function": lambda: subject(
        attend, lambda f, i, m, p: f(i.queries, i.keys, i.values, m), mask_forms=masks("mask", kinds=("bool",))
    ),
    "float32": lambda: single(subject(Separate, **BY_MASK)),
    "torch's own module, float32": lambda: single(subject(nn.MultiheadAttention, **BY_TORCH)),
    "one sequence": lambda: subject(Fused, sizes=InputSizes(1, 5, 5, D, D)),
}  # fmt: skip


def single(asked):
    return asked.of(asked.built.module.to(torch.float32), torch.float32)


@pytest.mark.parametrize("style", RIGHT)
def test_what_is_right_passes_every_probe(style):
    answers, _ = found(RIGHT[style]())
    assert {name: answer.message for name, answer in answers.items() if answer.ok is False} == {}
    assert not [answer.message for answer in answers.values() if "could not run" in answer.message]


# ----------------------------------------------------------------------------------------------------------------- mistakes


class OverQueries(Separate):
    def normal(self, scores):
        return scores.softmax(-2)


class OverBatch(Separate):
    def normal(self, scores):
        return scores.softmax(0)


class SplitWithoutTranspose(Separate):
    def split(self, t):
        return t.reshape(t.shape[0], self.n_heads, t.shape[1], self.d_head)


class MergeWithoutTranspose(Separate):
    def merge(self, z):
        return z.reshape(z.shape[0], z.shape[2], -1)


class BareExponential(Separate):
    def normal(self, scores):
        return scores.exp() / scores.exp().sum(-1, keepdim=True)


class MaskIgnored(Separate):
    def hide(self, scores, mask):
        return scores


class MaskMultiplied(Separate):
    def hide(self, scores, mask):
        return scores if mask is None else scores * mask


class MaskAdded(Separate):
    def hide(self, scores, mask):
        return scores if mask is None else scores + mask.double()


class MaskNotFinite(Separate):
    def hide(self, scores, mask):
        return scores if mask is None else scores + (1 - mask.double()) * -torch.inf


class MaskTransposed(Separate):
    def hide(self, scores, mask):
        return scores if mask is None else scores.masked_fill(mask.mT == 0, -torch.inf)


class MaskOfFirstQuery(Separate):
    def hide(self, scores, mask):
        return scores if mask is None else scores.masked_fill(mask[..., :1, :] == 0, -torch.inf)


class MaskAfterSoftmax(Separate):
    def forward(self, query, key=None, value=None, mask=None):
        key = query if key is None else key
        q, k, v = self.split(self.w_q(query)), self.split(self.w_k(key)), self.split(self.w_v(key))
        pattern = (q @ k.mT / self.d_head**0.5).softmax(-1)
        pattern = pattern if mask is None else pattern * mask
        return self.w_o(self.merge(pattern @ v)), pattern


class CausalSentinel(Separate):
    """Masks the future itself, by a number."""

    def hide(self, scores, mask):
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), self.sentinel)


class DropoutInEval(Separate):
    def __init__(self, d_model, n_heads, dropout=0.0):
        super().__init__(d_model, n_heads)
        self.p = dropout

    def drop(self, pattern):
        return F.dropout(pattern, self.p)


class NotRescaled(DropoutInEval):
    def drop(self, pattern):
        return pattern * (torch.rand_like(pattern) > self.p) if self.training else pattern


class DropsRows(DropoutInEval):
    """Of what is dropped, dropout on the scores, which is neither."""

    def normal(self, scores):
        return F.dropout(scores, self.p, self.training).softmax(-1)

    def drop(self, pattern):
        return pattern


class Noisy(Separate):
    def drop(self, pattern):
        return pattern + 0.1 * torch.randn_like(pattern)


class KeepsMean(Separate):
    mean = 0.0

    def drop(self, pattern):
        self.mean = 0.9 * self.mean + 0.1 * float(pattern.detach()[..., 0].mean())
        return pattern + self.mean


class KeepsKeys(Separate):
    """A cache that nobody empties."""

    cache = None

    def forward(self, query, key=None, value=None, mask=None):
        key = query if key is None else key
        self.cache = key if self.cache is None else torch.cat([self.cache, key], 1)
        return super().forward(query, self.cache, self.cache, mask)[0]


class WithoutOutput(Separate):
    def merge(self, z):
        self.merged = super().merge(z)
        return self.merged

    def forward(self, query, key=None, value=None, mask=None):
        super().forward(query, key, value, mask)
        return self.merged


class OneIsOther(Separate):
    """Squeezes away the batch, as it were."""

    def normal(self, scores):
        return (2 * scores).softmax(-1) if scores.shape[0] == 1 else scores.softmax(-1)


class SmallRange(Separate):
    def normal(self, scores):
        return (scores * 1e6 * 1e-6).softmax(-1)


def triangle(offset, upper=False):
    class Triangle(Fused):
        def __init__(self, d_model, n_heads):
            super().__init__(d_model, n_heads)
            ones = torch.ones_like(self.bias)
            self.bias = ones.triu(offset) if upper else ones.tril(offset)

    return Triangle


PAD = {"way": lambda f, i, m, p: f(i.queries, p),
       "padding_forms": masks("pad_mask", axes=("batch", "key"), kinds=("bool", "01"))}  # fmt: skip


class PaddingIgnored(Separate):
    def forward(self, x, pad_mask=None):
        return super().forward(x)[0]


class PaddingOfQueries(Separate):
    """Empties the rows of padded queries, and lets everybody see the padded keys."""

    def forward(self, x, pad_mask=None):
        out = super().forward(x)[0]
        return out if pad_mask is None else out * (pad_mask[:, :, None] == 0)


def heads_mixed(q, k, v):
    z = attend(q, k, v)[0]
    return z + z.mean(1, keepdim=True)


MISTAKES = {
    "softmax over queries": (lambda: subject(OverQueries, **BY_MASK), {"row sums"}),
    "softmax over the batch": (lambda: subject(OverBatch, **BY_MASK), {"batch independence", "row sums", "batch of one"}),
    "split without transpose": (lambda: subject(SplitWithoutTranspose, **BY_MASK), {"mask", "keys permuted"}),
    "merge without transpose": (lambda: subject(MergeWithoutTranspose, **BY_MASK), {"tokens permuted"}),
    "a bare exponential": (lambda: subject(BareExponential, **BY_MASK), {"scores × 1000"}),
    "a mask ignored": (lambda: subject(MaskIgnored, **BY_MASK), {"mask"}),
    "a mask multiplied": (lambda: subject(MaskMultiplied, **BY_MASK), {"mask"}),
    "a mask added as 0 and 1": (
        lambda: subject(MaskAdded, **BY_MASK | {"mask_forms": masks("mask", kinds=("bool", "01"))}), {"mask"},
    ),
    "a mask that is not finite": (lambda: subject(MaskNotFinite, **BY_MASK), {"mask"}),
    "a mask transposed": (lambda: subject(MaskTransposed, **BY_MASK), {"mask"}),
    "the first query's mask for all": (lambda: subject(MaskOfFirstQuery, **BY_MASK), {"mask"}),
    "a mask after the softmax": (lambda: subject(MaskAfterSoftmax, **BY_MASK), {"mask"}),
    "a sentinel too small": (
        lambda: subject(Separate, of={"d_model": D, "n_heads": HEADS, "sentinel": -100.0}, **BY_MASK), {"scores × 1000"},
    ),
    "a causal sentinel too small": (
        lambda: subject(CausalSentinel, of={"d_model": D, "n_heads": HEADS, "sentinel": -100.0}), {"scores × 1000"},
    ),
    "dropout in eval": (
        lambda: subject(DropoutInEval, **BY_MASK, of={"d_model": D, "n_heads": HEADS, "dropout": 0.0}), {"dropout in eval"},
    ),
    "dropout that is not rescaled": (
        lambda: subject(NotRescaled, **BY_MASK, of={"d_model": D, "n_heads": HEADS, "dropout": 0.1}), {"dropout in training"},
    ),
    "noise": (lambda: subject(Noisy), {"determinism"}),
    "a mean that is kept": (lambda: subject(KeepsMean), {"determinism"}),
    "a cache that is kept": (lambda: subject(KeepsKeys), {"determinism"}),
    "no output projection": (lambda: subject(WithoutOutput), {"unused parameters"}),
    "one sequence is another case": (lambda: subject(OneIsOther), {"batch of one"}),
    "out of the range of float16": (lambda: subject(SmallRange), {"float16"}),
    "without itself": (lambda: subject(triangle(-1)), {"self-visibility", "finite"}),
    "plus the next": (lambda: subject(triangle(1)), {"causality"}),
    "transposed": (lambda: subject(triangle(0, upper=True)), {"causality"}),
    "padding ignored": (lambda: subject(PaddingIgnored, **PAD), {"padding"}),
    "padding of queries": (lambda: subject(PaddingOfQueries, **PAD), {"padding"}),
    "heads that mix": (lambda: subject(heads_mixed), {"heads"}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_the_probe_that_is_about_it(mistake):
    make, expected = MISTAKES[mistake]
    assert expected <= failed(make())


# -------------------------------------------------------------------------------------------------------------------- facts


def test_whom_a_token_sees_is_measured_cell_by_cell():
    length = 7
    triangles = {
        "causal": (0, False), "without itself": (-1, False), "plus the next": (1, False), "transposed": (0, True),
    }  # fmt: skip
    for name, (offset, upper) in triangles.items():
        _, facts = found(subject(triangle(offset, upper)))
        expected = [[j >= i if upper else j <= i + offset for j in range(length)] for i in range(length)]
        assert facts.influence.tolist() == expected, name
        assert facts.visible == name


@pytest.mark.parametrize(
    ("drawing", "name"),
    [
        ("111 111 111", "full"),
        ("100 110 111", "causal"),
        ("111 100 110", "without itself"),  # a first query that sees no key may answer anything
        ("000 100 110", "without itself"),
        ("110 111 111", "plus the next"),
        ("111 011 001", "transposed"),
        ("011 001 111", "transposed"),
        ("100 010 001", "itself only"),
        ("101 010 111", "other"),
        ("1000 1100 1110", "top-left"),
        ("1100 1110 1111", "bottom-right"),
        ("1110 1111 1111", "other"),
        ("000 000 000", "other"),
    ],
)
def test_what_is_visible_has_a_name(drawing, name):
    assert pattern_of(torch.tensor([[cell == "1" for cell in row] for row in drawing.split()])) == name


def test_a_triangle_over_fewer_queries_than_keys_is_aligned_at_one_end():
    _, facts = found(RIGHT["torch's own function, causal"]())
    assert (facts.visible, facts.visible_cross) == ("causal", "top-left")

    def from_the_end(q, k, v):
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
        return attend(q, k, v, allowed)

    _, facts = found(subject(from_the_end))
    assert (facts.visible, facts.visible_cross) == ("causal", "bottom-right")


def test_a_token_of_own_rows_sees_itself_only_where_its_value_moves_its_output():
    class ByQueryAlone(Separate):
        """Its own output moves with its query all the same."""

        def hide(self, scores, mask):
            return scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), -torch.inf)

    _, facts = found(subject(ByQueryAlone))
    assert torch.equal(facts.influence, ~torch.eye(7, dtype=torch.bool))


def test_randomness_and_state_are_distinguished():
    facts = {name: found(MISTAKES[name][0]())[1] for name in ("noise", "a mean that is kept", "a cache that is kept")}
    assert [(f.is_random, f.keeps_state) for f in facts.values()] == [(True, False), (False, True), (False, True)]
    _, calm = found(RIGHT["fused, dropout"]())
    assert (calm.is_random, calm.keeps_state, calm.is_random_with_dropout) == (False, False, False)


def test_a_module_with_state_gets_fresh_copies_so_that_other_probes_pass():
    assert failed(MISTAKES["a cache that is kept"][0]()) == {"determinism"}


def test_dropout_in_eval_mode_is_distinguished_from_other_noise():
    by_dropout = subject(DropoutInEval, of={"d_model": D, "n_heads": HEADS, "dropout": 0.3})
    _, facts = found(by_dropout)
    assert (facts.is_random, facts.is_random_with_dropout, facts.dropout_names) == (True, True, ("dropout",))
    _, facts = found(subject(Noisy))
    assert (facts.is_random, facts.is_random_with_dropout) == (True, False)


@pytest.mark.parametrize(
    ("thing", "slope", "verdict"), [(Separate, 1.0, True), (NotRescaled, 0.5, False), (DropsRows, None, None)]
)
def test_the_slope_of_dropout_is_1_or_1_minus_p_or_decides_nothing(thing, slope, verdict):
    answers, facts = found(subject(thing, of={"d_model": D, "n_heads": HEADS, "dropout": 0.1}))
    assert facts.is_rescaled is verdict
    assert 0 < facts.dropout_slope_error < 0.05
    if slope is not None:
        assert abs(answers["dropout in training"].value - slope) < 5 * facts.dropout_slope_error


def test_dropout_without_an_argument_is_raised_in_its_modules():
    class Fixed(Separate):
        def __init__(self, d_model, n_heads):
            super().__init__(d_model, n_heads, dropout=0.1)

    asked = subject(Fixed)
    _, facts = found(asked)
    assert facts.dropout_names == ("dropout",)
    assert facts.is_rescaled is True
    assert asked.built.module.dropout.p == 0.1


def test_a_mask_is_read_in_the_meaning_that_works():
    _, facts = found(RIGHT["torch's own module"]())
    assert (facts.mask.kind, facts.mask.true_means) == ("bool", "hide")
    assert (facts.padding.kind, facts.padding.true_means) == ("bool", "hide")
    _, facts = found(RIGHT["torch's own function"]())
    assert (facts.mask.kind, facts.mask.true_means) == ("bool", "keep")
    keep, hide = facts.masks[0], found(RIGHT["torch's own module"]())[1].masks[0]
    assert (keep.leaked, keep.seen, keep.nonfinite) == (0, 1, 0)
    assert not hide.works


def test_a_mask_with_the_opposite_of_the_stated_meaning_fails():
    asked = RIGHT["torch's own function"]()
    assert failed(asked, request=replace(REQUEST, mask_means="keep")) == set()
    assert failed(asked, request=replace(REQUEST, mask_means="hide")) == {"mask"}


def test_a_form_serves_as_mask_and_as_padding():
    asked = subject(
        Separate, **BY_MASK | {"way": lambda f, i, m, p: f(i.queries, i.keys, mask=m if p is None else p)},
        padding_forms=masks("mask", axes=("batch", "head", "query", "key"), kinds=("bool",)),
    )  # fmt: skip
    assert failed(asked) == set()
    assert found(asked)[1].padding is not None


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: RIGHT["separate, a sentinel"](), "mean"),
        (lambda: RIGHT["separate, minus infinity"](), "nan"),
        (lambda: RIGHT["torch's own function"](), "zeros"),
    ],
)
def test_a_query_without_a_key_may_give_zeros_the_mean_or_nan(make, kind):
    answers, facts = found(make())
    assert facts.empty_row == kind
    assert answers["query without a key"].ok is None, "no NaN reaches other queries"


def test_causality_is_judged_only_where_it_is_expected():
    assert found(subject(PerHead))[0]["causality"].ok is None
    assert found(subject(PerHead), causal=True)[0]["causality"].ok is False
    assert found(subject(Fused), causal=True)[0]["causality"].ok is True
    answers, facts = found(subject(Separate, **BY_MASK), causal=True)
    assert (answers["causality"].ok, facts.is_causal_by_mask) == (None, True)
    assert found(subject(MaskIgnored, **BY_MASK), causal=True)[0]["causality"].ok is False


def test_a_token_that_does_not_see_itself_is_a_choice_where_it_is_documented():
    made = subject(triangle(-1), documentation="Strictly causal: a token sees only those before it.")
    assert "self-visibility" not in failed(made)


def test_positions_are_no_mistake_where_names_speak_of_them():
    permuted = found(subject(Rotary))[0]["tokens permuted"]
    assert (permuted.ok, permuted.message) == (None, "the order of keys matters: its names mention positions")
    permuted = found(subject(MergeWithoutTranspose))[0]["tokens permuted"]
    said = "the order of keys matters, although nothing in its code mentions positions"
    assert (permuted.ok, permuted.message) == (False, said)


def test_positions_are_found_in_the_names_of_parameters_and_of_the_source():
    class Biased(Separate):
        def __init__(self, d_model, n_heads):
            super().__init__(d_model, n_heads)
            self.register_buffer("relPosBias", torch.zeros(1))

    assert mentions_positions(built(Biased, d_model=D, n_heads=HEADS))
    assert mentions_positions(built(Rotary, d_model=D, n_heads=HEADS))
    assert mentions_positions(built(Separate, d_model=D, n_heads=HEADS)) is False
    assert mentions_positions(built(torch.addmm)) is None


def test_a_row_of_zeros_is_no_row_that_misses_one():
    def strictly_causal(q, k, v):
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(-1)
        pattern = attend(q, k, v, allowed)[1].nan_to_num()
        return pattern @ v, pattern

    answers, facts = found(subject(strictly_causal))
    assert (answers["row sums"].ok, facts.visible) == (True, "without itself")


def test_the_largest_move_by_a_later_token_is_that_of_the_output():
    _, facts = found(subject(Fused))
    assert facts.largest_future == 0
    _, facts = found(subject(PerHead))
    assert 0.01 < facts.largest_future < 10


# ------------------------------------------------------------------------------------------------------------ whoever it is


class Raising(Separate):
    """Takes one shape only, and says so."""

    def forward(self, x):
        if x.shape != (3, 7, D) or x.abs().max() > 20:
            raise ValueError(f"odd rows\n{list(x.shape)}")
        return super().forward(x)[0]


def test_what_raises_is_quoted_and_decides_nothing():
    answers, _ = found(subject(Raising))
    assert {answer.name for answer in answers.values() if answer.ok is False} == set()
    assert answers["one token"].message == "raises ValueError: odd rows [3, 1, 24]"
    assert answers["scores × 1000"].message == "could not run: the code raises ValueError: odd rows [3, 7, 24]"


class Dying(Separate):
    """Works once."""

    n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        if self.n_calls > 1:
            raise RuntimeError("worn out")
        return super().forward(x)[0]


def test_what_works_once_keeps_state(monkeypatch):
    monkeypatch.setattr("mhacli.compute.check.probes.context.ProbeContext.timed", lambda self, inputs: 0.001)
    answers, facts = found(subject(Dying))
    assert answers["determinism"].message.endswith("raises RuntimeError: worn out")
    assert facts.keeps_state


def test_a_slow_module_gets_few_calls(monkeypatch):
    for call_s, most in ((0.06, 75), (0.6, 25), (10.0, 25)):
        monkeypatch.setattr("mhacli.compute.check.probes.context.ProbeContext.timed", lambda self, inputs, s=call_s: s)
        asked = subject(Separate, **BY_MASK, of={"d_model": D, "n_heads": HEADS, "dropout": 0.1})
        answers, _ = found(asked)
        assert asked.n_calls <= most
        left_out = [answer for answer in answers.values() if answer.message.startswith("left out: a call takes")]
        assert len(left_out) > 8
        assert all(answer.ok is None for answer in left_out)


def test_neither_the_module_nor_the_global_generator_is_changed():
    asked = subject(Separate, **BY_MASK, of={"d_model": D, "n_heads": HEADS, "dropout": 0.1})
    before = {name: tensor.clone() for name, tensor in asked.built.module.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    found(asked)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in asked.built.module.state_dict().items())


def test_the_same_question_gives_the_same_numbers():
    once, again = (found(RIGHT["fused, dropout"]())[0] for _ in range(2))
    assert once == again
    other = found(RIGHT["fused, dropout"](), request=CheckRequest(TargetRequest("mine.py:Attention", seed=5)))[0]
    assert other["float16"].value != once["float16"].value


def test_every_call_is_reported_before_it_begins():
    asked, stages = subject(Separate, **BY_MASK), []
    way = asked.way

    def watched(*words):
        stages.append("called")
        return way(*words)

    probes.probe(replace(asked, way=watched), REQUEST, stages.append, expects_causal=False)
    assert stages[:2] == ["calling Separate", "called"]
    assert not [stages[i : i + 2] for i in range(len(stages) - 1) if stages[i : i + 2] == ["called", "called"]]


def test_facts_begin_with_nothing_known():
    facts = ProbeFacts()
    assert (facts.is_random, facts.influence, facts.masks) == (None, None, ())
