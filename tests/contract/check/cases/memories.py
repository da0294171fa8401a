"""Decoders of token ids beside a memory of vectors, right ones and wrong ones."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.cross = (nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))

    def forward(self, x, memory):
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        x = x + self.own(x, x, x, attn_mask=mask)[0]
        return x + self.cross(x, memory, memory)[0]


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.project = nn.Embedding(80, 32), nn.Linear(48, 32)
        self.layer, self.head = Layer(), nn.Linear(32, 80)

    def used(self, features):
        return features

    def forward(self, captions, features):
        return self.head(self.layer(self.words(captions), self.project(self.used(features))))


class FeaturesFirst(Captioner):
    def forward(self, features, captions):
        return super().forward(captions, features)


class Pooled(Captioner):
    """One answer for a text."""

    def forward(self, question, encoder_out):
        return super().forward(question, encoder_out).mean(1)[:, :7]


class NeverRead(Captioner):
    def used(self, features):
        return torch.ones_like(features)


class OfOthers(Captioner):
    def used(self, features):
        return features.roll(1, 0)


class RowsOfMemory(Captioner):
    def forward(self, captions, features):
        return self.head(self.layer(self.project(features), self.words(captions)))
