# expect: build
# mentions: RuntimeError|licence missing|/etc/tides.lic
# words: RaisesInConstructor
from attention import Attention


class RaisesInConstructor(Attention):
    def __init__(self):
        raise RuntimeError("licence missing: /etc/tides.lic")
