"""The default of the mask is an empty tensor that stands for none; the fused kernel takes any
other.
"""

import torch
import torch.nn.functional as F
from torch import nn


class ExportableAttention(nn.Module):
    def __init__(self, n_head, n_feat, dropout_rate=0.0):
        super().__init__()
        self.h, self.rate = n_head, dropout_rate
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (
            nn.Linear(n_feat, n_feat) for _ in range(4)
        )

    def forward(
        self,
        query,
        key,
        value,
        mask=torch.ones((0, 0, 0), dtype=torch.bool),  # noqa: B008
    ):
        q, k, v = (
            rows.unflatten(-1, (self.h, -1)).transpose(1, 2)
            for rows in (self.linear_q(query), self.linear_k(key), self.linear_v(value))
        )
        rate = self.rate if self.training else 0.0
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1), dropout_p=rate)
        return self.linear_out(z.transpose(1, 2).flatten(2))
