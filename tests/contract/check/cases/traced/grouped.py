# expect: k = batch head key d_head
# expect: z = batch head query d_head
# target: Grouped
# lines: z = y = F.scaled_dot_product
# lines: k = repeat_interleave
import torch.nn.functional as F
from torch import nn


class Grouped(nn.Module):
    def __init__(self, d_model=96, n_heads=6, n_kv_heads=2):
        super().__init__()
        self.h, self.kv, self.d = n_heads, n_kv_heads, d_model // n_heads
        self.q_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.k_proj, self.v_proj = (nn.Linear(d_model, self.d * n_kv_heads) for _ in range(2))

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.h, self.d).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        k, v = (each.repeat_interleave(self.h // self.kv, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
