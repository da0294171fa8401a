# expect: cannot-examine
# mentions: ReturnsMean|24]
# words: ReturnsMean
from attention import Attention


class ReturnsMean(Attention):
    def forward(self, x):
        return super().forward(x).mean(dim=1)
