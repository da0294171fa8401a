"""Small models that take several documents in one row, right ones and wrong ones."""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, visible):
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return x + self.out(z.transpose(1, 2).reshape(x.shape))


class Base(nn.Module):
    """A language model; what it is given tells what tokens see."""

    causal = True

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(61, 32)
        self.places = nn.Embedding(128, 32)
        self.layers = nn.ModuleList([Layer(32) for _ in range(2)])
        self.head = nn.Linear(32, 61)

    def compute(self, idx, same=None, places=None):
        n = idx.shape[1]
        places = torch.arange(n) if places is None else places
        visible = torch.ones(n, n, dtype=torch.bool)
        visible = visible.tril() if self.causal else visible
        if same is not None:
            visible = self.joined(visible, same)
        x = self.tokens(idx) + self.places(places)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.of_layer(number, visible, n))
        return self.head(x)

    def joined(self, visible, same):
        return visible & same

    def of_layer(self, number, visible, n):
        return visible


def same(documents):
    """Which tokens are in one document, with an axis of heads."""
    return documents[:, None, :, None] == documents[:, None, None, :]


class CuSeqlens(Base):
    right = True

    def forward(self, idx, cu_seqlens=None, max_seqlen=None):
        if cu_seqlens is None:
            return self.compute(idx)
        at = torch.arange(idx.shape[1])
        documents = torch.searchsorted(cu_seqlens.long(), at, right=self.right) - 1
        documents = documents.clamp(min=0)
        return self.compute(idx, same(documents[None]), at - cu_seqlens[documents])


class CuSeqlensOffByOne(CuSeqlens):
    right = False


class CuSeqlensNeeded(CuSeqlens):
    def forward(self, idx, cu_seqlens, max_seqlen):
        return super().forward(idx, cu_seqlens)


class DocumentIds(Base):
    """Positions run on."""

    def forward(self, idx, document_ids=None):
        return self.compute(idx, None if document_ids is None else same(document_ids))


class DocumentIdsFromZero(DocumentIds):
    """Numbers from 0 on, of a table."""

    def forward(self, idx, document_ids=None):
        if document_ids is not None:
            assert document_ids.min() == 0
        return super().forward(idx, document_ids)


class SampleIds(Base):
    """0 stands for padding."""

    def forward(self, idx, sample_ids):
        return self.compute(idx, same(sample_ids) & (sample_ids > 0)[:, None, None])


class DocumentIdsAndPositions(Base):
    def forward(self, idx, doc_ids=None, position_ids=None):
        return self.compute(idx, None if doc_ids is None else same(doc_ids), position_ids)


class ShortRowsOnly(DocumentIds):
    def forward(self, idx, document_ids=None):
        return super().forward(idx, document_ids if idx.shape[1] <= 56 else None)


class FirstLayerOnly(DocumentIds):
    def of_layer(self, number, visible, n):
        return visible if number == 0 else torch.ones(n, n, dtype=torch.bool).tril()


class CausalMaskReplaced(DocumentIdsAndPositions):
    """The mask of documents stands in the place of the causal one."""

    def joined(self, visible, same):
        return same


class DocumentIdsIgnored(Base):
    def forward(self, idx, doc_ids=None):
        return self.compute(idx)


class NextDocument(Base):
    """A document sees the one before it."""

    def forward(self, idx, seq_idx=None):
        if seq_idx is None:
            return self.compute(idx)
        before = seq_idx[:, None, :, None] - seq_idx[:, None, None, :]
        return self.compute(idx, before <= 1)


class EncoderDocumentIds(DocumentIds):
    causal = False


class EncoderOfPairs(Base):
    """Two sentences see each other by design."""

    causal = False

    def __init__(self):
        super().__init__()
        self.segments = nn.Embedding(3, 32)

    def forward(self, idx, segment_label=None):
        x = idx if segment_label is None else (idx + segment_label) % 61
        return self.compute(x)


class MaskOfPositions(Base):
    def forward(self, idx, position_ids=None):
        if position_ids is None:
            return self.compute(idx)
        return self.compute(idx, same((position_ids == 0).cumsum(1)), position_ids)


class PositionsOnly(Base):
    def forward(self, idx, position_ids=None):
        return self.compute(idx, None, position_ids)


class BlockMask(Base):
    def forward(self, idx, mask=None):
        return self.compute(idx, mask)


class OnesForgetDocuments(Base):
    def forward(self, idx, attention_mask=None, document_ids=None):
        if attention_mask is not None:
            return self.compute(idx, attention_mask[:, None, None].bool())
        return self.compute(idx, None if document_ids is None else same(document_ids))


class Plain(Base):
    def forward(self, idx):
        return self.compute(idx)


class UnusualName(Base):
    """Only an example shows how it is told documents apart."""

    def forward(self, idx, story=None):
        return self.compute(idx, None if story is None else same(story))


class UnusualNameIgnored(Base):
    def forward(self, idx, story=None):
        return self.compute(idx)


class Attention(nn.Module):
    """A layer over vectors."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def seen(self, same):
        return same.tril()

    def forward(self, x, doc_ids=None):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        if doc_ids is not None:
            visible = self.seen(same(doc_ids))
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out(z.transpose(1, 2).reshape(x.shape))


class AttentionToNeighbours(Attention):
    """The first token of a document sees the last one before it."""

    def seen(self, same):
        n = same.shape[-1]
        return (same | torch.eye(n, dtype=torch.bool).roll(1, 0)).tril()


class CacheForgetsDocuments(Base):
    def forward(self, idx, doc_ids=None, use_cache=True):
        known = doc_ids is not None and not use_cache
        return self.compute(idx, same(doc_ids) if known else None)


class SegmentsTellApart(Base):
    """Segments have a vector too."""

    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(4, 61)

    def forward(self, idx, segment_ids=None):
        segments = torch.zeros_like(idx) if segment_ids is None else segment_ids
        return self.compute(idx, same(segments)) + self.kinds(segments)


class PositionsUnread(Base):
    def forward(self, idx, doc_ids=None, position_ids=None):
        return self.compute(idx, None if doc_ids is None else same(doc_ids))
