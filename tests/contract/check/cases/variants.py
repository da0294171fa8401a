"""Attention that is right in contiguous calls, by itself, without a mask, at its own scale; the
names say what it does wrong otherwise, `right_…` if nothing.
"""

import math

import torch
from torch import nn


def attend(q, k, v, scale):
    return (q @ k.mT * scale).softmax(-1) @ v


def usual(q):
    return q.shape[-1] ** -0.5


def contiguous(tensor):
    """The numbers that lie in memory where a contiguous tensor would have its own."""
    strides = torch.empty(tensor.shape).stride()
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


WORKSPACE = {}


class ByHand(torch.autograd.Function):
    """Attention under a mask, with its derivative."""

    @staticmethod
    def forward(ctx, q, k, v, scale, mask=None, mistake=""):
        scores = q @ k.mT * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        pattern = scores.softmax(-1)
        if mistake == "workspace":  # which calls of one shape share
            shared = WORKSPACE.setdefault((pattern.shape, pattern.dtype), pattern.clone())
            pattern = shared.copy_(pattern)
        ctx.pattern = pattern
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.mistake = scale, mistake
        return pattern @ v

    @staticmethod
    def backward(ctx, d_out):
        (q, k, v), pattern, scale = ctx.saved_tensors, ctx.pattern, ctx.scale
        if ctx.mistake == "strides":
            d_out = contiguous(d_out)
        if ctx.mistake == "scale":
            scale = usual(q)
        if ctx.mistake == "mask":
            pattern = (q @ k.mT * scale).softmax(-1)
        d_pattern = d_out @ v.mT
        d_scores = pattern * (d_pattern - (pattern * d_pattern).sum(-1, keepdim=True)) * scale
        return d_scores @ k, d_scores.mT @ q, pattern.mT @ d_out, None, None, None


def strides_of_queries(q, k, v):
    return attend(contiguous(q), k, v, usual(q))


def strides_of_gradient(q, k, v):
    return ByHand.apply(q, k, v, usual(q), None, "strides")


def scale_not_used(q, k, v, scale=None):
    return attend(q, k, v, usual(q) if scale != 0 else 0.0)


def scale_of_gradient(q, k, v, softmax_scale=None):
    return ByHand.apply(q, k, v, softmax_scale or usual(q), None, "scale")


def mask_of_gradient(q, k, v, attn_mask=None):
    return ByHand.apply(q, k, v, usual(q), attn_mask, "mask")


def shared_workspace(q, k, v):
    return ByHand.apply(q, k, v, usual(q), None, "workspace")


def right_by_hand(q, k, v, scale=None, attn_mask=None):
    return ByHand.apply(q, k, v, scale or usual(q), attn_mask)


def right_views_only(q, k, v):
    """Raises for tensors that are no views in one piece."""
    heads = [each.view(-1, *each.shape[-2:]) for each in (q, k, v)]
    if k.shape[1] != q.shape[1]:
        raise ValueError("as many kv heads as query heads")
    return attend(*heads, usual(q)).view(*q.shape[:3], v.shape[3])


def right_divides(q, k, v, scale=None):
    return attend(q, k, v, 1 / (scale or math.sqrt(q.shape[-1])))


def in_place(q, k, v):
    return attend(q.mul_(usual(q)), k, v, 1.0)


def weights_in_place(x, w_qkv, w_o, n_heads):
    q, k, v = (
        each.unflatten(-1, (n_heads, -1)).transpose(1, 2)
        for each in (2 * x @ w_qkv.div_(2).mT).chunk(3, dim=-1)
    )
    return attend(q, k, v, usual(q)).transpose(1, 2).flatten(2) @ w_o.mT


def hidden_from(q, k, shift=0):
    n_q, n_k = q.shape[-2], k.shape[-2]
    return torch.ones(n_q, n_k, dtype=torch.bool).triu(n_k - n_q + 1 + shift)


def switched(q, k, v, causal, shift=0):
    scores = q @ k.mT * usual(q)
    if causal:
        scores = scores.masked_fill(hidden_from(q, k, shift), -math.inf)
    return scores.softmax(-1) @ v


def sees_later_if_causal(q, k, v, causal=False):
    return switched(q, k, v, causal, shift=1)


def right_switch(q, k, v, is_causal=True):
    return switched(q, k, v, is_causal)


def gradient_if_not_causal(q, k, v, is_causal=True):
    return switched(q, k if is_causal else k.detach(), v, is_causal)


class Projected(nn.Module):
    mistake = ""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)


class MaskOfGradient(Projected):
    def forward(self, x, attn_mask=None):
        q, k, v = self.heads(x)
        z = ByHand.apply(q, k, v, usual(q), attn_mask, "mask")
        return self.out(z.transpose(1, 2).flatten(2))


class CacheOf40(Projected):
    def forward(self, x, past_key_value=None, use_cache=False):
        q, k, v = self.heads(x)
        if past_key_value is not None:
            k = torch.cat([past_key_value[0], k], 2)
            v = torch.cat([past_key_value[1], v], 2)
        scores = (q @ k.mT * usual(q)).masked_fill(hidden_from(q, k), -math.inf)
        out = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return (out, (k[:, :, -40:], v[:, :, -40:])) if use_cache else out


def unexamined_reach(q, k, v, reach=None):
    return attend(q, k if reach is None else k[:, :, -reach:], v, usual(q))
