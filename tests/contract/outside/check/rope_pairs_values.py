"""The same attention as in rope_pairs_table.py, whose values are rotated too."""

import torch.nn.functional as F
from rope_pairs_table import RotaryAttention, rotate


class RotaryAttentionV(RotaryAttention):
    def forward(self, x, freqs_cis, mask=None):
        batch, length, dim = x.shape
        q = rotate(self.wq(x).view(batch, length, self.n_heads, self.d_head), freqs_cis)
        k = rotate(self.wk(x).view(batch, length, self.n_kv_heads, self.d_head), freqs_cis)
        v = rotate(self.wv(x).view(batch, length, self.n_kv_heads, self.d_head), freqs_cis)
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        shared = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(z.transpose(1, 2).reshape(batch, length, dim))
