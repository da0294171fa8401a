"""Hidden scores are set to −10⁴, as in BERT's first code."""

from torch import nn


class MaskedHeads(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q, k, v, mask=None):
        def split(rows):
            return rows.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

        q, k, v = split(self.w_q(q)), split(self.w_k(k)), split(self.w_v(v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -10000)
        return self.w_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
