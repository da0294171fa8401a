"""Models that mark padding in some way, right and wrong, and decoders beside a memory."""

import math

import torch
from torch import nn

PAD = 2


class Heads(nn.Module):
    def __init__(self, width=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, memory, keep=None):
        q, k, v = (
            each(rows).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for each, rows in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if keep is not None:
            scores = scores.masked_fill(~keep, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """An encoder of ids that makes its mask of padding in `keep`."""

    def __init__(self, width=32, padding_idx=None):
        super().__init__()
        self.tokens = nn.Embedding(50, width, padding_idx=padding_idx)
        self.places = nn.Embedding(300, width)
        self.heads, self.norm = Heads(width), nn.LayerNorm(width)

    def read(self, ids, keep):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.norm(x + self.heads(x, x, keep))

    def forward(self, ids):
        return self.read(ids, (ids != PAD)[:, None, None])


class AlongQueries(Encoder):
    def forward(self, ids):
        return self.read(ids, ids.ne(PAD)[:, None, :, None])


class UpsideDown(Encoder):
    def forward(self, ids):
        return self.read(ids, (ids == PAD)[:, None, None])


class NotHandedOn(Encoder):
    def forward(self, ids):
        padding = ids == PAD
        return self.read(ids, None).masked_fill(padding[..., None], 0.0)


class AboveZero(Encoder):
    """0 is the id of padding."""

    def forward(self, ids):
        return self.read(ids, (ids > 0)[:, None, None])


class AboveZeroNotHandedOn(Encoder):
    def forward(self, ids):
        return self.read(ids, None) * (ids > 0)[..., None]


class EqualToZeroNotHandedOn(Encoder):
    def forward(self, ids):
        return self.read(ids, None).masked_fill((ids == 0)[..., None], 0.0)


class Pooled(Encoder):
    """A classifier whose mean leaves padding out."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(32, 3)

    def forward(self, ids):
        real = ids != PAD
        states = self.read(ids, real[:, None, None]) * real[..., None]
        return self.classes(states.sum(1) / real.sum(1, keepdim=True))


class PooledWithPadding(Pooled):
    def forward(self, ids):
        return self.classes(self.read(ids, (ids != PAD)[:, None, None]).mean(1))


class MeanOverAll(Encoder):
    """A classifier that knows its id of padding, and never looks at it."""

    def __init__(self):
        super().__init__(padding_idx=0)
        self.classes = nn.Linear(32, 3)

    def forward(self, ids):
        return self.classes(self.read(ids, None).mean(1))


class EndOfText(Encoder):
    """The answer is read at the token that ends a text."""

    def __init__(self):
        super().__init__()
        self.eos_token_id = 7

    def forward(self, ids):
        ends = (ids == self.eos_token_id).int().argmax(1)
        return self.read(ids, None) + 0.0 * ends[:, None, None]


class BoolNotHandedOn(Encoder):
    def forward(self, ids):
        return self.read(ids, None) * ids.bool()[..., None]


class PooledAtTheEnd(Encoder):
    """7 ends a text, which only a number says."""

    def forward(self, ids):
        ends = (ids == 7).int().argmax(1)
        return self.read(ids, None) + 0.0 * ends[:, None, None]


class MaskAdded(Encoder):
    """The 1 and 0 of a tokenizer, added to scores."""

    def read(self, ids, keep):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (
            each(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for each in (self.heads.q, self.heads.k, self.heads.v)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if keep is None else scores + keep[:, None, None]
        return self.norm(x + self.heads.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))

    def forward(self, ids, attention_mask=None):
        return self.read(ids, attention_mask)


class InvertedWhole(Encoder):
    """`~` of whole numbers is never 0."""

    def forward(self, ids, attention_mask=None):
        keep = None if attention_mask is None else ~(~attention_mask).bool()[:, None, None]
        return self.read(ids, keep)


class ByMask(Encoder):
    def forward(self, ids, attention_mask=None):
        keep = None if attention_mask is None else (attention_mask > 0)[:, None, None]
        return self.read(ids, keep)


class ByMaskTurned(Encoder):
    def forward(self, ids, attention_mask=None):
        keep = None if attention_mask is None else ~attention_mask.bool()[:, None, None]
        return self.read(ids, keep)


class LayerByMask(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.heads = Heads(width)
        self.more = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x, key_padding_mask=None):
        keep = None if key_padding_mask is None else ~key_padding_mask.bool()[:, None, None]
        return self.more(x + self.heads(x, x, keep))


class LayerWithoutMask(LayerByMask):
    def forward(self, x, key_padding_mask=None):
        if key_padding_mask is not None:
            x = x.masked_fill(key_padding_mask.bool()[..., None], 5.0)
        return self.more(x + self.heads(x, x))


class CausalFromTheLeft(Encoder):
    """A decoder that forgets the mask where it attends, and hides later tokens."""

    def forward(self, ids, attention_mask=None, position_ids=None):
        n = ids.shape[1]
        places = torch.arange(n)[None] if position_ids is None else position_ids
        x, keep = self.tokens(ids) + self.places(places), torch.ones(n, n).tril().bool()
        if attention_mask is not None and self.obeys:
            keep = keep & (attention_mask.bool()[:, None, None] | torch.eye(n).bool())
        return self.norm(x + self.heads(x, x, keep))

    obeys = False


class CausalByMask(CausalFromTheLeft):
    obeys = True


class WithoutPositions(Encoder):
    """A decoder that knows the order of its tokens by its mask alone."""

    def real(self, mask):
        return mask.bool()

    def read(self, ids, keep):
        n = ids.shape[1]
        keep = keep[:, None, None] | torch.eye(n).bool()
        x = self.tokens(ids) + self.of_places(n)
        return self.norm(x + self.heads(x, x, keep & torch.ones(n, n).tril().bool()))

    def of_places(self, n):
        return 0.0

    def forward(self, ids, attention_mask=None):
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        return self.read(ids, self.real(mask))


class OneTooMany(WithoutPositions):
    """The mask hides the first token behind padding too."""

    def real(self, mask):
        real = mask.bool()
        return real & torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], 1)


class OneTooManyById(OneTooMany):
    def forward(self, ids):
        return self.read(ids, self.real(ids != PAD))


class WithPlaces(WithoutPositions):
    """Places count from the first token of a batch."""

    def of_places(self, n):
        return self.places(torch.arange(n))


class WithPlacesInScores(WithoutPositions):
    """A score bias for each key, by its place in the batch."""

    def read(self, ids, keep):
        n = ids.shape[1]
        keep = (keep[:, None, None] | torch.eye(n).bool()) & torch.ones(n, n).tril().bool()
        x = self.tokens(ids)
        q, k, v = (each(x) for each in (self.heads.q, self.heads.k, self.heads.v))
        scores = q @ k.mT / 6 + self.places(torch.arange(n)).sum(-1)
        return self.norm(x + self.heads.out(scores.masked_fill(~keep[:, 0], -1e9).softmax(-1) @ v))


class Translator(nn.Module):
    """An encoder and a decoder, with a mask of what the encoder reads."""

    def __init__(self, width=32):
        super().__init__()
        self.encoder, self.tokens = Encoder(width), nn.Embedding(50, width)
        self.own, self.cross, self.head = Heads(width), Heads(width), nn.Linear(width, 50)

    def masks(self, src):
        real = src != PAD
        return real[:, None, None], real[:, None, None]

    def decode(self, x, memory, keep):
        later = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        x = x + self.own(x, x, later)
        return x + self.cross(x, memory, keep)

    def forward(self, src, tgt):
        of_encoder, of_decoder = self.masks(src)
        memory = self.encoder.read(src, of_encoder)
        return self.head(self.decode(self.tokens(tgt), memory, of_decoder))


class TranslatorOfColumns(Translator):
    """`[token, text]`."""

    def forward(self, src, tgt):
        return super().forward(src.T, tgt.T).transpose(0, 1)


class SourceSeesPadding(Translator):
    def masks(self, src):
        return None, (src != PAD)[:, None, None]


class DecoderSeesPadding(Translator):
    def masks(self, src):
        return (src != PAD)[:, None, None], None


class NeverRead(Translator):
    def decode(self, x, memory, keep):
        return super().decode(x, x, None)


class OfAnother(Translator):
    def decode(self, x, memory, keep):
        return super().decode(x, memory.roll(1, 0), keep.roll(1, 0))


class DecoderLayer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.own, self.cross = Heads(width), Heads(width)
        self.norm, self.more = nn.LayerNorm(width), nn.Linear(width, width)

    def read(self, x, memory):
        return x + self.cross(x, memory)

    def forward(self, x, memory):
        x = self.norm(x + self.own(x, x))
        return self.more(self.read(x, memory)).tanh()


class ValuesOfTarget(DecoderLayer):
    def read(self, x, memory):
        return x + self.cross(memory, x)


class RowsOfMemory(DecoderLayer):
    def read(self, x, memory):
        return self.cross(memory, x)


class MemoryNeverRead(DecoderLayer):
    def read(self, x, memory):
        return x + self.cross(x, x) + 0.0 * memory.sum()


class MemoryOfAnother(DecoderLayer):
    def read(self, x, memory):
        return x + self.cross(x, memory.flip(0))


class SameLengthOnly(DecoderLayer):
    """Raises for a memory of another length."""

    def read(self, x, memory):
        return x + self.cross(x, memory.view(x.shape))
