"""Extra keys and values may be given, with a mask of their own."""

import torch
import torch.nn.functional as F
from torch import nn


class AddedKeysAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask=None, additional_key_values=None, additional_key_value_mask=None):
        batch, length, dim = x.shape

        def split(rows):
            return rows.view(batch, length, self.heads, -1).transpose(1, 2)

        q, k, v = split(self.to_q(x)), split(self.to_k(x)), split(self.to_v(x))
        keep = (
            torch.ones(batch, length, dtype=torch.bool, device=x.device) if mask is None else mask
        )
        if additional_key_values is not None:
            more_k, more_v = additional_key_values
            k, v = torch.cat([more_k, k], dim=2), torch.cat([more_v, v], dim=2)
            if additional_key_value_mask is None:
                additional_key_value_mask = torch.ones(
                    batch, more_k.shape[2], dtype=torch.bool, device=x.device
                )
            keep = torch.cat([additional_key_value_mask, keep], dim=1)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        return self.to_out(z.transpose(1, 2).reshape(batch, length, dim))
