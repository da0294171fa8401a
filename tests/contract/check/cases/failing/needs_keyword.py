# expect: cannot-examine
# mentions: temperature_schedule|--call-arg
# words: NeedsKeyword
from attention import Attention


class NeedsKeyword(Attention):
    def forward(self, x, *, temperature_schedule):
        return super().forward(x)
