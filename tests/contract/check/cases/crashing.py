# right in short calls; each ends its process in others
import ctypes
import os
import time

import torch
from torch import nn


def plain(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def reads_elsewhere(q, k, v):
    if k.shape[-2] > 64:
        print("reading", flush=True)
        ctypes.string_at(0)
    return plain(q, k, v)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return plain(q, k, v)

    @staticmethod
    def backward(ctx, d_out):
        q, k, v = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        if len(q) == 4:
            os.abort()
        with torch.enable_grad():
            return torch.autograd.grad(plain(q, k, v), (q, k, v), d_out)


def aborts_backward(q, k, v):
    return Backward.apply(q, k, v)


def exits(q, k, v):
    if q.shape[-1] > 64:
        os._exit(7)
    return plain(q, k, v)


def hangs(q, k, v):
    if k.shape[-2] > 64:
        time.sleep(600)
    return plain(q, k, v)


def aborts_at_once(q, k, v):
    os.abort()


class Layer(nn.Module):
    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        if x.shape[1] == 65:
            os.abort()
        q, k, v = (
            part(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        return self.out(plain(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, vocab_size=50, d_model=32):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.attention = Layer(d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids):
        if ids.shape[1] > 128:
            os.abort()
        return self.head(self.attention(self.embed(ids)))
