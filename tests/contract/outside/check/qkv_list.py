"""Three projections in one list whose name says qkv."""

from torch import nn


class ListHeads(nn.Module):
    def __init__(self, d_model=64, num_heads=4, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_nets = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(3))
        self.out_net = nn.Linear(d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            net(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for net, x in zip(self.qkv_nets, (query, key, value), strict=True)
        )
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        return self.out_net((self.drop(logits.softmax(-1)) @ v).transpose(1, 2).flatten(2))
