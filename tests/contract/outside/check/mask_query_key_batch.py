"""Time first; logits [query, key, batch, head]; the mask has three axes, query, key and batch, and
True hides.
"""

import torch
from torch import nn


class TimeFirst(nn.Module):
    def __init__(self, n_head=4, d_model=32):
        super().__init__()
        self.n_head = n_head
        self.q_net = nn.Linear(d_model, d_model, bias=False)
        self.kv_net = nn.Linear(d_model, 2 * d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)

    def forward(self, h, attn_mask=None):
        q, k, v = (
            x.unflatten(2, (self.n_head, -1)) for x in (self.q_net(h), *self.kv_net(h).chunk(2, 2))
        )
        logits = torch.einsum("qnhw,knhw->qknh", q, k) * q.shape[-1] ** -0.5
        if attn_mask is not None and attn_mask.dim() == 3:
            logits = logits.masked_fill(attn_mask[..., None], float("-inf"))
        mixed = torch.einsum("qknh,knhw->qnhw", logits.softmax(1), v)
        return self.o_net(mixed.flatten(2))
