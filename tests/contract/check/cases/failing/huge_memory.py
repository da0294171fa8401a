# expect: cannot-examine
# mentions: HugeMemory|memory
# words: HugeMemory
import torch
from attention import Attention


class HugeMemory(Attention):
    def forward(self, x):
        return super().forward(x) + torch.empty(1 << 50)[0]
