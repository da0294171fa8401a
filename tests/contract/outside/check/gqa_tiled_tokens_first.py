"""Grouped queries: keys and values are tiled head by head instead of repeated in groups."""

import torch.nn as nn
import torch.nn.functional as F


class Grouped(nn.Module):
    def __init__(self, hidden_size=64, num_heads=8, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            num_heads,
            num_kv_heads,
            hidden_size // num_heads,
        )
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, hidden_states):
        b, s, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, s, self.num_heads, self.head_dim)
        k = self.k_proj(hidden_states).view(b, s, self.num_kv_heads, self.head_dim)
        v = self.v_proj(hidden_states).view(b, s, self.num_kv_heads, self.head_dim)
        n = self.num_heads // self.num_kv_heads
        k = (
            k[:, :, None]
            .expand(b, s, n, self.num_kv_heads, self.head_dim)
            .reshape(b, s, -1, self.head_dim)
        )
        v = (
            v[:, :, None]
            .expand(b, s, n, self.num_kv_heads, self.head_dim)
            .reshape(b, s, -1, self.head_dim)
        )
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))
