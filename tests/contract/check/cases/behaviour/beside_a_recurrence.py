# expect: right
# inside:
# common: yes
import torch
from torch import nn


class Model(nn.Module):
    """Attention beside a recurrence, whose output has no share in what it reads."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 36), nn.Linear(36, 24, bias=False)
        self.lstm, self.attention = nn.LSTM(24, 24), nn.MultiheadAttention(24, 3)

    def forward(self, x):
        x = torch.lerp(self.lstm(self.narrow(self.wide(x)))[0], x, 1.0)
        return self.attention(x, x, x)[0]
