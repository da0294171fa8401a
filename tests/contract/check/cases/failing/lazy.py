# expect: cannot-examine
# mentions: Lazy|numbers
# words: Lazy
from attention import Attention
from torch import nn


class Lazy(Attention):
    def __init__(self):
        super().__init__()
        self.out = nn.LazyLinear(24)
