# expect: raised
# mentions: Unspeakable|raises_later.py:20
# words: RaisesLater
from attention import Attention


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class RaisesLater(Attention):
    n_calls = 0

    def forward(self, x):
        """The first calls work. Later ones raise an exception that has no text."""
        RaisesLater.n_calls += 1
        if RaisesLater.n_calls > 10:
            print("the last words of a call")
            raise Unspeakable
        return super().forward(x)
