"""GPT-2 of transformers and a port with the same weights: `mha diff` says what is missing."""

import torch
from torch import nn


def theirs():
    """The model that is ported, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=48,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.2,
    )
    return GPT2LMHeadModel(config)


def ours():
    """The port, with the weights of the other."""
    given, port = theirs().state_dict(), Port()
    for name, parameter in port.named_parameters():
        weight = given[name if name.startswith("lm_head") else f"transformer.{name}"]
        is_conv1d = ".c_" in name and weight.ndim == 2  # which holds [in, out]
        parameter.data = weight.T if is_conv1d else weight
    return port


class Attention(nn.Module):
    def __init__(self, width=48, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (y.view(batch, length, self.n_heads, -1).transpose(1, 2) for y in parts)
        scores = q @ k.transpose(2, 3)
        seen = torch.ones(length, length).tril().bool()
        z = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v
        return self.c_proj(z.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(nn.functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width), MLP(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Port(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(64, width)
        self.h, self.ln_f = nn.ModuleList(Block(width) for _ in range(3)), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))
