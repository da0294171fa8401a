# expect: wrong outputs-not-finite
# common: yes
import torch
from torch import nn


class Model(nn.Module):
    """The first token has no earlier one, and its mean of none is NaN."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(40, 24)

    def forward(self, ids):
        n_earlier = torch.arange(ids.shape[1])[:, None]
        return self.tokens(ids).cumsum(1) / n_earlier * (n_earlier / n_earlier)
