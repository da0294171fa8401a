# expect: consistent
# called: forward(ids, durations=…)
# options: length=32,
# options: example="lambda m, T: m(torch.randint(20, (2, T)), torch.randint(20, (2, T)), "
# options: "torch.arange(64)[:T].expand(2, T))"
# common: yes
from torch import nn


class Model(nn.Module):
    """Beside each token stands another, and its number. What an example draws begins alike at each
    length.
    """

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, 24), nn.Linear(24, 40)
        self.layers = nn.LSTM(24, 24)

    def forward(self, ids, durations, places):
        rows = self.tokens((ids + durations + 0 * places).T % 40)
        return self.head(self.layers(rows)[0]).transpose(0, 1)
