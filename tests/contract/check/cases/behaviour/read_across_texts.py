# expect: wrong batch-leak
# common: yes
from torch import nn


class Model(nn.Module):
    """The batch is read as one text, each text behind those before it."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, 24), nn.Linear(24, 40)
        self.layers = nn.LSTM(24, 24)

    def forward(self, ids):
        batch, length = ids.shape
        return self.head(self.layers(self.tokens(ids))[0]).view(batch, length, -1)
