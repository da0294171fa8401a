# expect: no-target
# mentions: NoForward|forward
# words: NoForward
from torch import nn


class NoForward(nn.Module):
    pass
