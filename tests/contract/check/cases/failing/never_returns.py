# expect: too-slow
# mentions: 1.5|--time-limit
# words: NeverReturns --time-limit 1.5
import time

from attention import Attention


class NeverReturns(Attention):
    def forward(self, x):
        while True:
            time.sleep(0.05)
