"""A causal model whose attention can also read memories, with a mask of their own; nobody gives
any.
"""

import torch
import torch.nn.functional as F
from torch import nn


def exists(value):
    return value is not None


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x, mask=None, mem=None, mem_mask=None):
        b, n, source, keep = *x.shape[:2], x, mask
        if exists(mem):
            source = torch.cat((mem, x), dim=1)
        if (exists(mask) or exists(mem_mask)) and exists(mem):
            if not exists(mem_mask):
                keep = F.pad(mask, (mem.shape[1], 0), value=True)
            else:
                keep = torch.cat(
                    (mem_mask, mask if exists(mask) else torch.ones(b, n, dtype=torch.bool)), dim=-1
                )
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.to_q(x), self.to_k(source), self.to_v(source))
        )
        s = k.shape[2]
        see = torch.ones(n, s, dtype=torch.bool, device=x.device).tril(s - n)
        if exists(keep):
            see = see & keep[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
        return self.to_out(out.transpose(1, 2).flatten(2))


class WrapperDecoder(nn.Module):
    def __init__(self, num_tokens=77, dim=48, depth=2):
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(num_tokens, dim), nn.Embedding(300, dim)
        self.norms, self.layers = (
            nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth)),
            nn.ModuleList(Attention(dim) for _ in range(depth)),
        )
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)

    def forward(self, x):
        x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.to_logits(x)
