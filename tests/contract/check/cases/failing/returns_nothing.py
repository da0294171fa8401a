# expect: cannot-examine
# mentions: None
# words: ReturnsNothing
from attention import Attention


class ReturnsNothing(Attention):
    def forward(self, x):
        super().forward(x)
