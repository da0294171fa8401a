# expect: cannot-examine
# mentions: SystemExit|Exits
# words: Exits
import sys

from attention import Attention


class Exits(Attention):
    def forward(self, x):
        sys.exit(0)
