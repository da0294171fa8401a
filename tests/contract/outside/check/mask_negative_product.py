"""Several graphs in one batch of nodes; the mask that keeps them apart is multiplied, not added."""

from torch import nn


class NodeHead(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x, mask=None):
        score = self.q(x) @ self.k(x).transpose(-2, -1) / x.shape[-1] ** 0.5
        if mask is not None:
            score = score * mask.float().masked_fill(mask == 0, -1e6)
        return score.softmax(-1) @ self.v(x)
