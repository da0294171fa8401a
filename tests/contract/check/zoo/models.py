"""Whole models that take token ids. All of them are right."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, n_heads, causal=True):
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        z = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(z.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, n_heads, causal):
        super().__init__()
        self.attention, self.before, self.between = (
            Attention(width, n_heads, causal),
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Net(nn.Module):
    """Its name does not say whether tokens may see later ones."""

    def __init__(
        self,
        vocab_size=65,
        width=24,
        n_heads=3,
        n_layers=2,
        block_size=64,
        dropout=0.1,
        causal=True,
    ):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocab_size, width),
            nn.Embedding(block_size, width),
        )
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, n_heads, causal) for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def embedded(self, ids):
        return self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))

    def forward(self, ids, targets=None):
        x = self.embedded(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def attending(self, x, attend):
        """The logits with attention of its own, by the weights of its modules."""
        for block in self.blocks:
            y, attention = block.before(x), block.attention
            q, k, v = (
                p.unflatten(-1, (attention.n_heads, -1)).transpose(1, 2)
                for p in attention.qkv(y).chunk(3, dim=-1)
            )
            x = x + attention.out(attend(q, k, v).transpose(1, 2).flatten(2))
            x = x + block.mlp(block.between(x))
        return self.head(self.norm(x))


class GPT(Net):
    """Its name says that they may not."""


class Shifted(GPT):
    """It reads the ids behind a first token, so that a token changes only the outputs behind its
    own.
    """

    def forward(self, ids):
        return super().forward(F.pad(ids, (1, -1)))[0]


class LastOnly(GPT):
    """In generation only the last position is projected."""

    def forward(self, ids, targets=None):
        x = self.embedded(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LossOnly(GPT):
    def forward(self, ids, targets=None):
        _, loss = super().forward(ids, ids if targets is None else targets)
        return loss


class Compared(GPT):
    """It reads all tokens but the last, and only compares what it expects with the ids behind
    them.
    """

    def forward(self, ids):
        return super().forward(ids[:, :-1], ids[:, 1:])[1]


class Demanding(GPT):
    def forward(self, ids, segment_info, y):
        return super().forward(ids + segment_info, y)[1]


class Tableless(GPT):
    """It indexes its tables, and calls no module for it."""

    def embedded(self, ids):
        return self.tokens.weight[ids] + self.positions.weight[: ids.shape[1]]


class ZeroHead(GPT):
    """Its output layers begin at zero, beside a parameter of bools and a buffer whose numbers share
    their memory.
    """

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.is_kept = nn.Parameter(torch.ones(2, dtype=torch.bool), requires_grad=False)
        self.register_buffer("slopes", torch.ones(1).expand(3))
        for layer in (self.head, *(block.attention.out for block in self.blocks)):
            nn.init.zeros_(layer.weight)


class Encoder(Net):
    def __init__(self, **sizes):
        super().__init__(**sizes, causal=False)


class Open(Net):
    """Later tokens are seen, and nothing says whether they may."""

    def __init__(self, **sizes):
        super().__init__(**sizes, causal=False)


class PrefixModel(Net):
    """The first eight tokens see each other."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        for block in self.blocks:
            block.attention = PrefixAttention(24, 3)


class PrefixAttention(Attention):
    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        allowed[:8, :8] = True
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out(z.transpose(1, 2).flatten(2))


class Padded(Encoder):
    """A mask hides the keys of padding."""

    def forward(self, ids, padding_mask=None):
        mask = None if padding_mask is None else ~padding_mask[:, None, None]
        return self.attending(
            self.embedded(ids),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        )


class Pooled(Padded):
    """Six answers for a text, as many as it may have tokens: the mean of its real ones."""

    def forward(self, ids, padding_mask=None):
        answers = super().forward(ids, padding_mask)[..., :6]
        real = torch.zeros_like(ids) == 0 if padding_mask is None else ~padding_mask
        return (answers * real[..., None]).sum(1) / real.sum(1, keepdim=True)


class Leading(Padded):
    """One answer for a text, read at its first token. Tokens have no positions."""

    def embedded(self, ids):
        return self.tokens(ids)

    def forward(self, ids, padding_mask=None):
        return super().forward(ids, padding_mask)[:, 0, :3]


class Masked(Net):
    """The caller gives the mask, in which True keeps."""

    def forward(self, ids, mask):
        def attend(q, k, v):
            scores = (q @ k.mT / 8**0.5).masked_fill(mask == 0, -1e9)
            return scores.softmax(-1) @ v

        return self.attending(self.embedded(ids), attend)


class Cached(GPT):
    """Keys and values of earlier tokens are given back."""

    def forward(self, ids, past=None, use_cache=False):
        n_past = 0 if past is None else past[0][0].shape[2]
        positions = torch.arange(n_past, n_past + ids.shape[1])
        kept = []

        def attend(q, k, v):
            if past is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(past[len(kept)], (k, v), strict=True))
            mask = torch.ones(ids.shape[1], k.shape[2], dtype=torch.bool).tril(n_past)
            kept.append((k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        logits = self.attending(self.tokens(ids) + self.positions(positions), attend)
        return (logits, kept) if use_cache else logits


class Translation(nn.Module):
    """An encoder and a decoder of torch, the length first, with masks for both."""

    def __init__(self, vocab=31):
        super().__init__()
        self.transformer = nn.Transformer(24, 3, 1, 1, 32)
        self.table, self.head = nn.Embedding(vocab, 24), nn.Linear(24, vocab)

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask):
        masks = src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask
        return self.head(self.transformer(self.table(src), self.table(trg), *masks))
