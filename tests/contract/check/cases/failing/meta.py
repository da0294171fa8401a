# expect: cannot-examine
# mentions: Meta|numbers
# words: Meta
from attention import Attention


class Meta(Attention):
    def __init__(self):
        super().__init__()
        self.out.to("meta")
