"""No projection: three tensors [batch, length, heads, width of a head]; the mask is an object, or
none is wanted.
"""

import torch
from torch import nn


class Hidden:
    """Later places are hidden."""

    def __init__(self, n_texts, n_places):
        self.places = torch.ones(n_places, n_places).triu(1).bool().expand(n_texts, 1, -1, -1)


class SeriesCore(nn.Module):
    def __init__(self, masked=True, factor=None, drop=0.1, with_weights=False):
        super().__init__()
        self.masked, self.factor, self.with_weights = masked, factor, with_weights
        self.drop = nn.Dropout(drop)

    def forward(self, queries, keys, values, attn_mask):
        n_texts, n_places, _, width = queries.shape
        logits = torch.einsum("nqhw,nkhw->nhqk", queries, keys)
        if self.masked:
            if attn_mask is None:
                attn_mask = Hidden(n_texts, n_places)
            logits = logits.masked_fill(attn_mask.places, float("-inf"))
        weights = self.drop((logits * (self.factor or width**-0.5)).softmax(3))
        mixed = torch.einsum("nhqk,nkhw->nqhw", weights, values)
        return mixed, weights if self.with_weights else None
