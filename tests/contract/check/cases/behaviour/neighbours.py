# expect: right
# holds: right-padding
# common: yes
from torch import nn


class Model(nn.Module):
    """A token that is hidden reaches the one before it, but padding, whose vector is zero, reaches
    none.
    """

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3)
        self.tokens = nn.Embedding(40, 24, padding_idx=0)

    def forward(self, ids, key_padding_mask=None):
        x = self.tokens(ids.T)
        x = x + nn.functional.pad(x, (0, 0, 0, 0, 0, 1))[1:]
        return self.attention(x, x, x, key_padding_mask=key_padding_mask)[0].transpose(0, 1)
