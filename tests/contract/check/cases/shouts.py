# expect: right
import sys

from attention import Attention


class Shouts(Attention):
    def forward(self, x):
        print("x" * 100_000)
        print("\x1b[31mred\x1b[2J", file=sys.stderr)
        sys.stdout.write('{"schema": "mha.check/1", "verdict": "wrong"}\n')
        return super().forward(x)
