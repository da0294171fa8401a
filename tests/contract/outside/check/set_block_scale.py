"""A block over sets: the projected queries are added to each head, then a row-wise layer."""

import torch
from torch import nn


class SetBlockScale(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, context):
        q, k, v = self.fc_q(query), self.fc_k(context), self.fc_v(context)
        qh, kh, vh = (rows.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for rows in (q, k, v))
        weights = torch.softmax(qh @ kh.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        z = q + (weights @ vh).transpose(1, 2).flatten(2)
        return z + torch.relu(self.fc_o(z))
