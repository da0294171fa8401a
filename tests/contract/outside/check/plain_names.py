"""Arguments in whole words, without defaults."""

from torch import nn


class MultiHead(nn.Module):
    def __init__(self, model_dimension, number_of_heads, dropout_probability):
        super().__init__()
        self.number_of_heads = number_of_heads
        self.query = nn.Linear(model_dimension, model_dimension)
        self.key = nn.Linear(model_dimension, model_dimension)
        self.value = nn.Linear(model_dimension, model_dimension)
        self.output = nn.Linear(model_dimension, model_dimension)
        self.dropout = nn.Dropout(dropout_probability)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            p(x).view(b, t, self.number_of_heads, -1).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        w = self.dropout((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1))
        return self.output((w @ v).transpose(1, 2).reshape(b, t, d))
