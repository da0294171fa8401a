# expect: build
# mentions: TypeError|unhashable|Unhashable
# words: Unhashable
from attention import Attention


class Unhashable(Attention):
    def __eq__(self, other):
        return type(self) is type(other)
