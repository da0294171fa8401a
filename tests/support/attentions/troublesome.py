"""Layers that make it hard to examine them."""

import math
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Plain(nn.Module):
    """Self-attention."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Shouts(Plain):
    """Writes a lot to stdout and stderr, control characters too."""

    def forward(self, x):
        print("x" * 100_000)
        print("\x1b[31mred\x1b[2J", file=sys.stderr)
        sys.stdout.write('{"schema": "mha.check/1", "verdict": "right"}\n')
        return super().forward(x)


class Counts(Plain):
    """Counts its calls, and nothing else depends on it."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += x.size(1)
        return super().forward(x)


class Drifts(Plain):
    """Adds what it has seen before to what it sees."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        self.mean = 0.0

    def forward(self, x):
        out = super().forward(x + self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return out


class WantsKeyword(Plain):
    """Needs a keyword argument that nobody could guess."""

    def forward(self, x, *, temperature_schedule):
        return super().forward(x) * temperature_schedule


class WantsArgument(Plain):
    """Cannot be built from what is known."""

    def __init__(self, flux_capacity, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        self.flux_capacity = int(flux_capacity)


class RaisesInForward(Plain):
    """Raises whenever it is called."""

    def forward(self, x):
        raise ValueError("the tide table was not loaded: call load_tides() first")


class RaisesInConstructor(Plain):
    """Raises when it is built."""

    def __init__(self, d_model=24, n_heads=3):
        raise RuntimeError("licence file not found: /etc/tides.lic")


class RaisesForOddLengths(Plain):
    """Works for even lengths only."""

    def forward(self, x):
        if x.size(1) % 2:
            raise ValueError(f"the length must be even, got {x.size(1)}")
        return super().forward(x)


class WantsLengthSixteen(Plain):
    """Works for exactly sixteen tokens."""

    def forward(self, x):
        assert x.shape[1] == 16, "expected 16 tokens"
        return super().forward(x)


class Sleeps(Plain):
    """Takes a second for each call."""

    def forward(self, x):
        time.sleep(1)
        return super().forward(x)


class NeverReturns(Plain):
    """Never returns."""

    def forward(self, x):
        while True:
            time.sleep(0.05)


class NeverReturnsBusily(Plain):
    """Never returns and never sleeps."""

    def forward(self, x):
        n = 0
        while n >= 0:
            n += 1
        return super().forward(x)


class NeverBuilt(Plain):
    """Its constructor never returns."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        while True:
            time.sleep(0.05)


class NeedsCuda(Plain):
    """Lives on a GPU."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        self.to("cuda")

    def forward(self, x):
        return super().forward(x.cuda())


class Exits(Plain):
    """Ends the process."""

    def forward(self, x):
        sys.exit(0)


class Crashes(Plain):
    """Ends the process without a word."""

    def forward(self, x):
        import os

        os._exit(7)


class ReturnsNothing(Plain):
    """Forgets to return."""

    def forward(self, x):
        super().forward(x)


class ReturnsNumpy(Plain):
    """Returns an array."""

    def forward(self, x):
        return super().forward(x).detach().numpy()


class ReturnsOtherShape(Plain):
    """Returns the mean over the tokens."""

    def forward(self, x):
        return super().forward(x).mean(dim=1)


class ChangesItsInput(Plain):
    """Changes what it is given."""

    def forward(self, x):
        x.mul_(2.0).sub_(x.mean(dim=-1, keepdim=True))
        return super().forward(x)


class HugeOutput(Plain):
    """Returns far more than it was given."""

    def forward(self, x):
        return super().forward(x).repeat(1, 50_000, 1)


class HugeMemory(Plain):
    """Wants more memory than there is."""

    def forward(self, x):
        return super().forward(x) + torch.empty(1 << 50)[0]


class Random(Plain):
    """Gives another answer each time."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class FloatOnly(Plain):
    """Casts whatever comes to float32."""

    def forward(self, x):
        qkv = F.linear(x.float(), self.qkv.weight.float(), self.qkv.bias.float())
        q, k, v = qkv.unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.linear(z, self.out.weight.float(), self.out.bias.float())


class TakesTokenIds(nn.Module):
    """Takes whole numbers, as a model does."""

    def __init__(self, vocab_size=50, d_model=24, n_heads=3):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.layer = Plain(d_model, n_heads)

    def forward(self, input_ids):
        return self.layer(self.embedding(input_ids))


class Normalizes(Plain):
    """Normalizes before it attends and adds its input to the result: a block, not a layer."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__(d_model, n_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        return x + super().forward(self.norm(x))


class NoAttention(nn.Module):
    """Something else altogether."""

    def __init__(self, d_model=24):
        super().__init__()
        self.mix = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.mix(x).relu()


class NoForward(nn.Module):
    """Was never finished."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.qkv = nn.Linear(d_model, 3 * d_model)


NOT_CALLABLE = 24
