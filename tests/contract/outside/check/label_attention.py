"""A classifier of texts, in which each class has a learned query that reads the text."""

import torch
from torch import nn


class LabelQueries(nn.Module):
    def __init__(self, width=48, n_labels=5, n_heads=4, by_width=False):
        super().__init__()
        self.labels, self.norm = nn.Embedding(n_labels, width), nn.LayerNorm(width)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.n_heads, self.by_width = n_heads, by_width

    def heads(self, rows):
        return rows.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, rows, mask=None):
        labels = torch.arange(self.labels.num_embeddings).expand(len(rows), -1)
        q = self.heads(self.to_q(self.norm(self.labels(labels))))
        k, v = self.heads(self.to_k(rows)), self.heads(self.to_v(rows))
        scores = q @ k.mT / (rows.shape[-1] if self.by_width else q.shape[-1]) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -1e9)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Classifier(nn.Module):
    def __init__(self, vocab_size=60, turned=False):
        super().__init__()
        self.table, self.read = nn.Embedding(vocab_size, 48), LabelQueries()
        self.score, self.turned = nn.Linear(48, 1), turned

    def forward(self, input_ids, attention_mask=None):
        mask = attention_mask
        if mask is not None:
            mask = mask == 0 if self.turned else mask == 1
        return self.score(self.read(self.table(input_ids), mask)).squeeze(-1)
