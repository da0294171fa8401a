"""Attention whose gradients have no reference: parameters of norms and biases, dropout by hand,
scores that are no softmax. What each is said to be stands in `test_gradients.py`.
"""

import math

import torch
from torch import nn


class Plain(nn.Module):
    """Right, with dropout in training."""

    def __init__(self, width=24, n_heads=3):
        super().__init__()
        self.n_heads, self.p = n_heads, 0.1
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def heads(self, x):
        rows = (self.query(x), self.key(x), self.value(x))
        return [each.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for each in rows]

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(q.shape[-1])

    def pattern(self, scores):
        return scores.softmax(dim=-1)

    def drop(self, pattern):
        return torch.dropout(pattern, self.p, self.training)

    def forward(self, x):
        q, k, v = self.heads(x)
        z = self.drop(self.pattern(self.scores(q, k))) @ v
        return self.out(z.transpose(1, 2).flatten(2))


class Normed(Plain):
    """Norms of queries and keys with a gain."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def heads(self, x):
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class GainCut(Normed):
    """The gain of the queries is never trained."""

    def heads(self, x):
        q, k, v = Plain.heads(self, x)
        gain = self.q_norm.weight.detach()
        return nn.functional.rms_norm(q, (8,), gain), self.k_norm(k), v


class Biased(Plain):
    """A learned bias of each distance."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 513))

    def bias(self):
        return self.table

    def scores(self, q, k):
        places = torch.arange(q.shape[-2])
        distances = (places[:, None] - places).clamp(-256, 256) + 256
        return super().scores(q, k) + self.bias()[:, distances]


class BiasCut(Biased):
    """The biases are never trained."""

    def bias(self):
        return self.table.detach()


class Dropped(torch.autograd.Function):
    """Dropout with its own backward pass."""

    @staticmethod
    def forward(ctx, pattern, p):
        kept = (torch.rand_like(pattern) >= p) / (1 - p)
        ctx.save_for_backward(kept)
        return pattern * kept

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


class DroppedAnew(Dropped):
    """The backward pass draws another mask."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (torch.rand_like(gradient) >= 0.5) / 0.5, None


class DropoutByHand(Plain):
    """Right."""

    dropped = Dropped

    def drop(self, pattern):
        return self.dropped.apply(pattern, self.p) if self.training and self.p else pattern


class DropoutDrawnAnew(DropoutByHand):
    """Wrong in training alone."""

    dropped = DroppedAnew


class OtherInTraining(Plain):
    """Another output in training, without dropout."""

    def drop(self, pattern):
        return pattern * 1.01 if self.training else pattern


class Sigmoid(Plain):
    """No reference: weights that do not sum to 1."""

    def pattern(self, scores):
        return scores.sigmoid() / scores.shape[-2]


class Products(torch.autograd.Function):
    """Products whose backward pass doubles the gradient of the queries."""

    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return q @ k.mT

    @staticmethod
    def backward(ctx, gradient):
        q, k = ctx.saved_tensors
        return gradient @ k * 2, gradient.mT @ q


class SigmoidDoubled(Sigmoid):
    """No reference, and gradients that do not fit the outputs."""

    def scores(self, q, k):
        return Products.apply(q, k) / math.sqrt(q.shape[-1])


class SigmoidCut(Sigmoid):
    """No reference, and keys that are never trained."""

    def scores(self, q, k):
        return super().scores(q, k.detach())


class SigmoidCutAndDoubled(SigmoidDoubled):
    """The gradient of the queries is wrong too."""

    def scores(self, q, k):
        return super().scores(q, k.detach())


class Unfinished(torch.autograd.Function):
    """The products of queries and keys, whose backward pass raises."""

    @staticmethod
    def forward(ctx, q, k):
        return q @ k.mT

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("to do")


class BackwardRaises(Plain):
    """Right outputs, and no backward pass."""

    def scores(self, q, k):
        return Unfinished.apply(q, k) / math.sqrt(q.shape[-1])


class Checkpointed(Plain):
    """Right: the backward pass computes the forward one anew."""

    def forward(self, x):
        attend = nn.functional.scaled_dot_product_attention
        z = torch.utils.checkpoint.checkpoint(attend, *self.heads(x), use_reentrant=False)
        return self.out(z.transpose(1, 2).flatten(2))


class InBfloat16(Plain):
    """Right: attention in bfloat16, whatever the dtype of its rows."""

    def heads(self, x):
        return [each.bfloat16() for each in super().heads(x)]

    def forward(self, x):
        q, k, v = self.heads(x)
        z = self.pattern(self.scores(q, k)) @ v
        return self.out(z.to(x.dtype).transpose(1, 2).flatten(2))


class DropPath(Plain):
    """Right: in training some outputs of the whole layer are dropped, by no function of torch."""

    def forward(self, x):
        out = super().forward(x)
        return out * (torch.rand(len(x), 1, 1) < 0.9) / 0.9 if self.training else out


class Selecting(Sigmoid):
    """No reference, and jumps: only the three largest scores of a query count."""

    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores.masked_fill(scores < scores.topk(3).values[..., -1:], -math.inf)


class Rounding(Sigmoid):
    """No reference, and gradients that pass through a rounding on purpose."""

    def heads(self, x):
        return [each + (torch.round(4 * each) / 4 - each).detach() for each in super().heads(x)]


class RoundedScale(Sigmoid):
    """No reference, and a scale of each head that is rounded to quarters on purpose."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.1, 0.6, 1.3]))

    def pattern(self, scores):
        scale = self.scale + (torch.round(4 * self.scale) / 4 - self.scale).detach()
        return scale[:, None, None] * super().pattern(scores)


class Kinked(Sigmoid):
    """No reference, and kinks."""

    def pattern(self, scores):
        return scores.relu() / scores.shape[-2]
