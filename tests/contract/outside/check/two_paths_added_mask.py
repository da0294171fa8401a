"""torch's function without a state, own code with one; a mask is added to the scores, so it is a
float.
"""

import torch
import torch.nn.functional as F
from torch import nn


class TwoPaths(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads, self.width = embed_dim, num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )

    def forward(self, query, key, value, incremental_state=None, attn_mask=None):
        """rows: [time, batch, width]; attn_mask: 0 and −∞, added to the scores"""
        if incremental_state is None:
            return F.multi_head_attention_forward(
                query,
                key,
                value,
                self.embed_dim,
                self.num_heads,
                None,
                torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]),
                None,
                None,
                False,
                0.0,
                self.out_proj.weight,
                self.out_proj.bias,
                attn_mask=attn_mask,
                need_weights=False,
                use_separate_proj_weight=True,
                q_proj_weight=self.q_proj.weight,
                k_proj_weight=self.k_proj.weight,
                v_proj_weight=self.v_proj.weight,
            )[0]
        steps, batch, _ = query.shape

        def planes(rows):
            return rows.reshape(rows.shape[0], batch * self.num_heads, self.width).transpose(0, 1)

        q, k, v = planes(self.q_proj(query)), planes(self.k_proj(key)), planes(self.v_proj(value))
        if "k" in incremental_state:
            k, v = (
                torch.cat([incremental_state["k"], k], 1),
                torch.cat([incremental_state["v"], v], 1),
            )
        incremental_state["k"], incremental_state["v"] = k, v
        scores = q @ k.transpose(1, 2) / self.width**0.5
        if attn_mask is not None:
            scores = scores + attn_mask
        return self.out_proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(steps, batch, -1))
