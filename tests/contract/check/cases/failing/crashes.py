# expect: crashed
# mentions: Crashes|7
# words: Crashes
import os

from attention import Attention


class Crashes(Attention):
    def forward(self, x):
        os._exit(7)
