# expect: cannot-examine
# mentions: ValueError|the tide table is missing|line 9
# words: RaisesInCall
from attention import Attention


class RaisesInCall(Attention):
    def forward(self, x):
        raise ValueError("the tide table is missing \x1b[2J")
