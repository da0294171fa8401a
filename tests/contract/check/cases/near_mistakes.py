"""Attention with mistakes that are easily taken for others, and right attention beside them."""

import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, d_model=48, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def scores(self, x):
        q, k = self.split(self.q(x)), self.split(self.k(x))
        return q @ k.mT / q.shape[-1] ** 0.5


class Averaged(Heads):
    def forward(self, x):
        z = self.scores(x).softmax(-1) @ self.v(x)[:, None]
        return self.o(z.mean(1))


class Summed(Heads):
    def forward(self, x):
        z = self.scores(x).softmax(-1) @ self.v(x)[:, None]
        return self.o(z.sum(1))


class FirstColumns(Heads):
    def forward(self, x):
        z = self.scores(x).softmax(-1) @ self.v(x)[:, None]
        return self.o(z[..., : z.shape[-1] // self.n_heads].transpose(1, 2).flatten(2))


class OnePattern(Heads):
    def forward(self, x):
        return self.o(self.scores(x).softmax(-1).mean(1) @ self.v(x))


class Multiplied(Heads):
    def forward(self, x, mask=None):
        scores = self.scores(x)
        if mask is not None:
            scores = scores * (1.0 - mask.to(scores.dtype)) * -10000.0
        return self.o((scores.softmax(-1) @ self.split(self.v(x))).transpose(1, 2).flatten(2))


class Noisy(Heads):
    def forward(self, x):
        scores = self.scores(x)
        pattern = (scores + 0.1 * torch.randn_like(scores)).softmax(-1)
        return self.o((pattern @ self.split(self.v(x))).transpose(1, 2).flatten(2))


class DroppedByHand(Heads):
    def forward(self, x):
        scores = self.scores(x)
        pattern = scores.masked_fill(torch.rand_like(scores) < 0.1, -1e9).softmax(-1)
        return self.o((pattern @ self.split(self.v(x))).transpose(1, 2).flatten(2))


class HalfStill(Heads):
    """Half of the pairs of columns do not turn."""

    axis = 2

    def __init__(self, d_model=48, n_heads=3, theta=10000.0):
        super().__init__(d_model, n_heads)
        width = d_model // n_heads
        rates = theta ** -(torch.arange(0, width, 2) / width)
        rates[len(rates) // 2 :] = 0
        self.register_buffer("rates", rates)

    def turned(self, x):
        places = torch.arange(x.shape[self.axis]).to(x)
        angles = places.view(-1, *[1] * (3 - self.axis)) * self.rates
        a, b = x[..., ::2], x[..., 1::2]
        rows = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
        return torch.stack(rows, -1).flatten(-2)

    def forward(self, x):
        q, k = self.turned(self.split(self.q(x))), self.turned(self.split(self.k(x)))
        pattern = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((pattern @ self.split(self.v(x))).transpose(1, 2).flatten(2))


class HalfStillByHead(HalfStill):
    axis = 1


class Chomped(nn.Module):
    def __init__(self, width, step, is_leaky):
        super().__init__()
        self.step = step
        self.conv = nn.Conv1d(width, width, 3, padding=2 * step, dilation=step)
        self.norm = nn.InstanceNorm1d(width) if is_leaky else nn.Identity()

    def forward(self, x):
        return x + self.norm(self.conv(x)[..., : -2 * self.step]).relu()


class Convolutions(nn.Module):
    def __init__(self, leaky=None):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 32), nn.Linear(32, 6)
        self.blocks = nn.ModuleList(Chomped(32, 2**n, n == leaky) for n in range(3))

    def forward(self, x):
        x = self.inner(x).mT
        for block in self.blocks:
            x = block(x)
        return self.outer(x.mT)


class Mixed(nn.Module):
    def __init__(self, width, is_leaky):
        super().__init__()
        self.turn, self.is_leaky = nn.Linear(width, width), is_leaky

    def forward(self, x):
        mean = x.mean(1, keepdim=True).expand_as(x) if self.is_leaky else x.cumsum(1)
        return x + torch.tanh(self.turn(mean))


class Patches(nn.Module):
    """Patches of four tokens, each of which sees those before it."""

    def __init__(self, leaky=1):
        super().__init__()
        self.inner, self.outer = nn.Linear(24, 20), nn.Linear(20, 24)
        self.mixers = nn.ModuleList(Mixed(20, n == leaky) for n in range(3))

    def forward(self, x):
        y = self.inner(x.reshape(len(x), -1, 24))
        y = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
        for mixer in self.mixers:
            y = mixer(y)
        return self.outer(y).reshape(x.shape)
