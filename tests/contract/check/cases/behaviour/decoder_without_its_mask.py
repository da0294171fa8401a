# expect: wrong sees-the-future
# common: yes
from torch import nn


class Model(nn.Module):
    """The mask of the decoder is not passed on."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, 24), nn.Linear(24, 40)
        self.layers = nn.Transformer(24, 3, 1, 1, 32, batch_first=True)

    def forward(self, src, tgt, tgt_mask=None):
        return self.head(self.layers(self.tokens(src), self.tokens(tgt)))
