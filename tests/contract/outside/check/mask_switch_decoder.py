"""A speech decoder: any mask that is given to its attention only switches SDPA's is_causal on."""

import torch
import torch.nn.functional as F
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query, self.key = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state, bias=False)
        self.value, self.out = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None):
        src = x if xa is None else xa
        q, k, v = (
            t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for t in (self.query(x), self.key(src), self.value(src))
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None and x.shape[1] > 1)
        return self.out(a.transpose(1, 2).flatten(2)), None


class Block(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(n_state, n_head), nn.LayerNorm(n_state)
        self.cross_attn, self.cross_attn_ln = (
            MultiHeadAttention(n_state, n_head),
            nn.LayerNorm(n_state),
        )

    def forward(self, x, xa, mask):
        x = x + self.attn(self.attn_ln(x), mask=mask)[0]
        return x + self.cross_attn(self.cross_attn_ln(x), xa)[0]


class SpeechTextDecoder(nn.Module):
    def __init__(self, n_vocab=80, n_ctx=128, n_state=48, n_head=4, n_layer=2):
        super().__init__()
        self.token_embedding, self.places = (
            nn.Embedding(n_vocab, n_state),
            nn.Parameter(torch.randn(n_ctx, n_state)),
        )
        self.blocks, self.ln = (
            nn.ModuleList(Block(n_state, n_head) for _ in range(n_layer)),
            nn.LayerNorm(n_state),
        )
        self.register_buffer(
            "mask", torch.full((n_ctx, n_ctx), float("-inf")).triu_(1), persistent=False
        )

    def forward(self, x, xa):
        x = self.token_embedding(x) + self.places[: x.shape[-1]]
        for block in self.blocks:
            x = block(x, xa, self.mask)
        return self.ln(x) @ self.token_embedding.weight.T
