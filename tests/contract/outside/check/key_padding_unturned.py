"""A classifier around torch's encoder: the mask marks real tokens, and torch hides those."""

import torch
from torch import nn


class ReviewClassifier(nn.Module):
    def __init__(self, vocab_size=90, width=64, heads=4, classes=3, mended=False):
        super().__init__()
        self.mended = mended
        self.embed, self.places = nn.Embedding(vocab_size, width), nn.Embedding(300, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        real = attention_mask.bool()
        x = self.encoder(x, src_key_padding_mask=~real if self.mended else real)
        return self.head(x[:, 0])


def wrong():
    return ReviewClassifier()


def mended():
    return ReviewClassifier(mended=True)
