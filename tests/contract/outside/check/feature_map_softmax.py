"""Attention between pixels of [batch, channels, height, width]; the weights of a key sum to one."""

import feature_map
import torch


class PixelAttention(feature_map.PixelAttention):
    def forward(self, x):
        batch, channels, height, width = x.shape
        q, k, v = (conv(x).flatten(2) for conv in (self.query, self.key, self.value))
        pattern = torch.softmax(q.transpose(1, 2) @ k * channels**-0.5, dim=1)
        z = (v @ pattern.transpose(1, 2)).reshape(batch, channels, height, width)
        return x + self.out(z)
