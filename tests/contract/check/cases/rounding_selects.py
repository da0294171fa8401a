# expect: unknown
import torch
from torch import nn


class Model(nn.Module):
    """Of all keys of the text the longer half is seen: as small a change as rounding selects
    others.
    """

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(65, 48), nn.Linear(48, 65)
        self.layers = nn.ModuleList(nn.Linear(48, 144) for _ in range(2))

    def forward(self, ids):
        x, n = self.tokens(ids), ids.shape[1]
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)
            best = k.norm(dim=-1).topk(max(1, n // 2)).indices
            seen = torch.zeros_like(k[..., 0], dtype=torch.bool).scatter(2, best, True)[:, :, None]
            seen = (seen | torch.eye(n, dtype=torch.bool)) & torch.ones(n, n).tril().bool()
            z = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + z.transpose(1, 2).flatten(2)
        return self.head(x)
