# expect: right
# inside: right
from torch import nn


class Model(nn.Module):
    """Attention behind a recurrence with biases, which are not those of the projection before
    it.
    """

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 36), nn.Linear(36, 24, bias=False)
        self.lstm, self.attention = nn.LSTM(24, 24), nn.MultiheadAttention(24, 3)

    def forward(self, x):
        x = self.lstm(self.narrow(self.wide(x)))[0]
        return self.attention(x, x, x)[0]
