"""Layers that attend to their own rows, or to a context that may be left out, with masks for each."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class ContextAttention(nn.Module):
    """As x-transformers has it: `mask` for its own rows, `context_mask` for those of the context."""

    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def masks(self, context, mask, context_mask):
        return mask if context is None else context_mask

    def forward(self, x, context=None, mask=None, context_mask=None):
        rows = x if context is None else context
        q, k, v = (
            layer(part).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, part in ((self.to_q, x), (self.to_k, rows), (self.to_v, rows))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        keep = self.masks(context, mask, context_mask)
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None, :], -torch.finfo(scores.dtype).max)
        return self.to_out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class BertAttention(nn.Module):
    """As BERT has it: masks that are added, one for its own rows and one for those of an encoder."""

    def __init__(self, hidden_size=32, num_attention_heads=4):
        super().__init__()
        self.heads = num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def cut(self, rows):
        return rows.view(*rows.shape[:-1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        head_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        output_attentions=False,
    ):
        rows = hidden_states
        if encoder_hidden_states is not None:
            rows, attention_mask = encoder_hidden_states, encoder_attention_mask
        q, k, v = self.cut(self.query(hidden_states)), self.cut(self.key(rows)), self.cut(self.value(rows))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if attention_mask is not None:
            scores = scores + attention_mask
        pattern = F.softmax(scores, dim=-1)
        z = (pattern @ v).permute(0, 2, 1, 3).flatten(2)
        return (z, pattern) if output_attentions else (z,)


class CausalOverOwnRows(ContextAttention):
    """A decoder's: causal over its own rows, open over a context."""

    def forward(self, x, context=None, mask=None, context_mask=None):
        if context is not None:
            return super().forward(x, context, mask, context_mask)
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v)
        )
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            keep = keep & mask[:, None, None, :]
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.to_out(z.transpose(1, 2).flatten(2))


class BothMasksOrNone(ContextAttention):
    """Its masks act only together: one for the queries, one for the keys."""

    def masks(self, context, mask, context_mask):
        return None if mask is None else context_mask

    def forward(self, x, context, mask=None, context_mask=None):
        out = super().forward(x, context, mask, context_mask)
        return out if mask is None else out * mask[..., None]


class MaskBehindASwitch(ContextAttention):
    """Its mask acts where a switch of the call says so."""

    def forward(self, x, mask=None, apply_mask: bool = False):
        return super().forward(x, None, mask if apply_mask else None)


class ContextMaskUnread(ContextAttention):
    """The mask of the context is never read."""

    def masks(self, context, mask, context_mask):
        return mask if context is None else None


class OwnMaskUnread(ContextAttention):
    """The mask of its own rows is never read."""

    def masks(self, context, mask, context_mask):
        return None if context is None else context_mask


class ContextMaskInverted(ContextAttention):
    """context_mask: True = may attend."""

    def masks(self, context, mask, context_mask):
        return mask if context is None else None if context_mask is None else ~context_mask


class SecondMaskUnread(ContextAttention):
    """Of two masks of its own rows the second is never read."""

    def forward(self, x, attention_mask=None, valid_mask=None):
        return super().forward(x, None, attention_mask)


class CachedOverOwnRows(ContextAttention):
    """Causal over its own rows, of which a cache can hold the past ones; a context comes whole."""

    def forward(self, x, context=None, past_key_value=None):
        rows = x if context is None else context
        q, k, v = (
            layer(part).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, part in ((self.to_q, x), (self.to_k, rows), (self.to_v, rows))
        )
        if past_key_value is not None:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(past_key_value, (k, v), strict=True))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if context is None:
            scores = scores.masked_fill(~self.seen(q.shape[2], k.shape[2]), -torch.inf)
        return self.to_out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)), (k, v)

    def seen(self, q_len, k_len):
        return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)


class CachedAndMaskedFromTheFirstKey(CachedOverOwnRows):
    """The mask of a step puts its first query at the first key."""

    def seen(self, q_len, k_len):
        return torch.ones(q_len, k_len, dtype=torch.bool).tril()


class T5Attention(nn.Module):
    """As T5 has it, without its table of biases: scores as they are."""

    def __init__(self, d_model=32, num_heads=4):
        super().__init__()
        self.n_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, hidden_states, mask=None, key_value_states=None):
        rows = hidden_states if key_value_states is None else key_value_states
        q, k, v = (
            layer(part).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer, part in ((self.q, hidden_states), (self.k, rows), (self.v, rows))
        )
        scores = q @ k.transpose(3, 2)
        if mask is not None:
            scores = scores + mask
        return self.o((F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2))


class PlainAttention(T5Attention):
    """The same under another name, where nothing says that the scores are meant to be as they are."""
