# expect: no-device
# mentions: CUDA|NeedsCuda
# words: NeedsCuda
from attention import Attention


class NeedsCuda(Attention):
    def __init__(self):
        raise AssertionError("Torch not compiled with CUDA enabled")
