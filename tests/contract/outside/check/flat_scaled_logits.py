"""A translator whose logits are scaled in place and laid flat for the loss."""

import torch
from torch import nn


class FlatTranslator(nn.Module):
    def __init__(self, n_src=60, n_trg=65, d=48, h=4, leaky=False):
        super().__init__()
        self.scale, self.leaky = d**-0.5, leaky
        self.src_emb, self.trg_emb, self.pos = (
            nn.Embedding(n_src, d),
            nn.Embedding(n_trg, d),
            nn.Embedding(300, d),
        )
        self.net = nn.Transformer(d, h, 1, 2, 2 * d, batch_first=True)
        self.trg_word_prj = nn.Linear(d, n_trg, bias=False)

    def forward(self, src_seq, trg_seq):
        s = self.src_emb(src_seq) + self.pos(torch.arange(src_seq.shape[1]))
        t = self.trg_emb(trg_seq) + self.pos(torch.arange(trg_seq.shape[1]))
        n = t.shape[1]
        mask = None if self.leaky else torch.ones(n, n, dtype=torch.bool).triu(1)
        logits = self.trg_word_prj(self.net(s, t, tgt_mask=mask))
        logits *= self.scale
        return logits.view(-1, logits.size(2))
