"""Three projections in a list, of which the name says that keys come first."""

from torch import nn
from torch.nn import functional as F


class KeysFirst(nn.Module):
    def __init__(self, d_model=64, n_heads=4, queries_first=False):
        super().__init__()
        self.n_heads, self.queries_first = n_heads, queries_first
        self.kqv_nets = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(3))
        self.fc = nn.Linear(d_model, d_model)

    def forward(self, x):
        k, q, v = (
            net(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for net in self.kqv_nets
        )
        if self.queries_first:
            k, q, v = v, k, q
        return self.fc(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
