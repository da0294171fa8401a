# expect: consistent
# called: forward(ids)  # rows [seq, batch]
# common: yes
from torch import nn


class Model(nn.Module):
    """The tokens of several texts are beside each other, as in torch's own layers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, 24), nn.Linear(24, 40)
        self.layers = nn.LSTM(24, 24)

    def forward(self, ids):
        return self.head(self.layers(self.tokens(ids))[0])
