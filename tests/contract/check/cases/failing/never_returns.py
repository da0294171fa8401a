# expect: too-slow
# mentions: 1.5|--time-limit
# words: NeverReturns --time-limit 1.5
import time

from attention import Attention


class NeverReturns(Attention):
    calls = 0

    def forward(self, x):
        NeverReturns.calls += 1
        while NeverReturns.calls > 1:  # the first call has a minute
            time.sleep(0.05)
        return super().forward(x)
