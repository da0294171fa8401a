# expect: argument
# mentions: flux_capacity|--arg
# words: NeedsArgument
from attention import Attention


class NeedsArgument(Attention):
    def __init__(self, flux_capacity):
        super().__init__()
