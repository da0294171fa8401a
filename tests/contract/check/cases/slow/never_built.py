# expect: too-slow
# mentions: NeverBuilt|than 3 seconds|--time-limit
# words: never_built.py:NeverBuilt --time-limit 1.5
import time

from attention import Attention


class NeverBuilt(Attention):
    def __init__(self):
        while True:
            time.sleep(0.05)
