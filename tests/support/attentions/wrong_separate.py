"""Attention for a handful of small projects, with a linear layer each for queries, keys and values."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class SentenceAttention(nn.Module):
    """Multi-head attention over the words of a sentence."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        assert d_model % n_heads == 0
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q = self.q_linear(x).view(b, self.n_heads, t, self.d_head)
        k = self.k_linear(x).view(b, self.n_heads, t, self.d_head)
        v = self.v_linear(x).view(b, self.n_heads, t, self.d_head)

        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = F.softmax(scores, dim=-1)
        z = torch.matmul(weights, v)
        z = z.transpose(1, 2).contiguous().view(b, t, d)
        return self.out(z)


class ReviewAttention(nn.Module):
    """Attention over the words of a product review."""

    def __init__(self, hidden_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_dim // num_heads
        self.query = nn.Linear(hidden_dim, hidden_dim)
        self.key = nn.Linear(hidden_dim, hidden_dim)
        self.value = nn.Linear(hidden_dim, hidden_dim)
        self.dense = nn.Linear(hidden_dim, hidden_dim)

    def heads(self, t):
        batch, length, _ = t.shape
        return t.reshape(batch, self.num_heads, length, self.head_dim)

    def forward(self, inputs):
        batch, length, hidden = inputs.shape
        q, k, v = self.heads(self.query(inputs)), self.heads(self.key(inputs)), self.heads(self.value(inputs))
        energy = q @ k.transpose(2, 3) / self.head_dim**0.5
        context = energy.softmax(-1) @ v
        return self.dense(context.reshape(batch, length, hidden))


class PaperAttention(nn.Module):
    """The layer of "Attention is all you need"."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def scaled_dot_product_attention(self, Q, K, V, mask=None):
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        probs = torch.softmax(scores, dim=-1)
        return torch.matmul(probs, V)

    def split_heads(self, x):
        batch_size, seq_length, _ = x.size()
        return x.view(batch_size, seq_length, self.num_heads, self.d_k).transpose(1, 2)

    def combine_heads(self, x):
        batch_size, _, seq_length, _ = x.size()
        return x.contiguous().view(batch_size, seq_length, self.d_model)

    def forward(self, Q, K, V, mask=None):
        Q = self.split_heads(self.W_q(Q))
        K = self.split_heads(self.W_k(K))
        V = self.split_heads(self.W_v(V))
        return self.W_o(self.combine_heads(self.scaled_dot_product_attention(Q, K, V, mask)))


class TranslationAttention(nn.Module):
    """Attention between the words of two languages."""

    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.d_k = d_model // heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        bs = q.size(0)
        q = self.q_proj(q).view(bs, -1, self.heads, self.d_k).transpose(1, 2)
        k = self.k_proj(k).view(bs, -1, self.heads, self.d_k).transpose(1, 2)
        v = self.v_proj(v).view(bs, -1, self.heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        scores = F.softmax(scores, dim=-2)
        concat = (scores @ v).transpose(1, 2).contiguous().view(bs, -1, self.heads * self.d_k)
        return self.o_proj(concat)


class WeatherAttention(nn.Module):
    """Self-attention over the days of a forecast."""

    def __init__(self, size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_size = size // num_heads
        self.to_query = nn.Linear(size, size)
        self.to_key = nn.Linear(size, size)
        self.to_value = nn.Linear(size, size)
        self.to_out = nn.Linear(size, size)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, days):
        def split(t):
            return t.unflatten(-1, (self.num_heads, self.head_size)).transpose(1, 2)

        q, k, v = split(self.to_query(days)), split(self.to_key(days)), split(self.to_value(days))
        weights = self.softmax(q @ k.mT / math.sqrt(self.head_size))
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Head(nn.Module):
    """One head."""

    def __init__(self, width, head_width):
        super().__init__()
        self.q = nn.Linear(width, head_width)
        self.k = nn.Linear(width, head_width)
        self.v = nn.Linear(width, head_width)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
        return torch.bmm(F.softmax(scores, dim=0), v)


class HeadsInALoop(nn.Module):
    """Several heads side by side, then a linear layer."""

    def __init__(self, width, n_heads):
        super().__init__()
        self.heads = nn.ModuleList([Head(width, width // n_heads) for _ in range(n_heads)])
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(torch.cat([head(x) for head in self.heads], dim=-1))


class ParagraphAttention(nn.Module):
    """Attention between paragraphs. mask is 1 where attention is allowed and 0 where it is not."""

    def __init__(self, d_model, n_heads, bias=True):
        super().__init__()
        self.n_heads = n_heads
        self.wq = nn.Linear(d_model, d_model, bias=bias)
        self.wk = nn.Linear(d_model, d_model, bias=bias)
        self.wv = nn.Linear(d_model, d_model, bias=bias)
        self.wo = nn.Linear(d_model, d_model, bias=bias)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q, k, v = (
            layer(t).view(b, t.size(1), self.n_heads, -1).transpose(1, 2)
            for layer, t in ((self.wq, query), (self.wk, key), (self.wv, value))
        )
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        out = torch.einsum("bhqk,bhkd->bqhd", scores.softmax(dim=-1), v)
        return self.wo(out.flatten(2))


class ChapterAttention(nn.Module):
    """Multi-head attention for long documents."""

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.d_model, self.n_heads = d_model, n_heads
        self.depth = d_model // n_heads
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.dense = nn.Linear(d_model, d_model)

    def split_heads(self, x, batch_size):
        x = x.view(batch_size, -1, self.n_heads, self.depth)
        return x.permute(0, 2, 1, 3)

    def forward(self, v, k, q, mask=None):
        batch_size = q.size(0)
        q = self.split_heads(self.wq(q), batch_size)
        k = self.split_heads(self.wk(k), batch_size)
        v = self.split_heads(self.wv(v), batch_size)
        logits = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_model)
        if mask is not None:
            logits = logits.masked_fill(mask == 0, -1e9)
        attention_weights = F.softmax(logits, dim=-1)
        out = torch.matmul(attention_weights, v).permute(0, 2, 1, 3).contiguous()
        return self.dense(out.view(batch_size, -1, self.d_model)), attention_weights


class MelodyAttention(nn.Module):
    """Attention over the notes of a melody."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, notes, mask=None):
        n, length, _ = notes.shape
        shape = (n, length, self.num_heads, self.head_dim)
        q = self.q_proj(notes).view(shape).permute(0, 2, 1, 3)
        k = self.k_proj(notes).view(shape).permute(0, 2, 3, 1)
        v = self.v_proj(notes).view(shape).permute(0, 2, 1, 3)
        scores = (q @ k) / self.head_dim
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        z = scores.softmax(dim=-1) @ v
        return self.out_proj(z.permute(0, 2, 1, 3).reshape(n, length, -1))


class SpeechAttention(nn.Module):
    """Multi-head attention over frames of sound."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.scaling = self.d_head**-0.5
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b, q_len, _ = query.shape
        q = self.q_proj(query) * self.scaling
        k = self.k_proj(key)
        v = self.v_proj(value)
        q = q.view(b, q_len, self.n_heads, self.d_head).transpose(1, 2)
        k = k.view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = v.view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        z = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.out_proj(z.transpose(1, 2).reshape(b, q_len, -1))


class PoemAttention(nn.Module):
    """Self-attention over the lines of a poem."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        b, t, c = x.shape
        k = self.key(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        q = self.query(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.value(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        att = (k @ q.transpose(-2, -1)) / math.sqrt(self.d_head)
        if mask is not None:
            att = att.masked_fill(mask == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class LetterAttention(nn.Module):
    """Self-attention over the letters of a word."""

    def __init__(self, emb, heads):
        super().__init__()
        self.heads = heads
        self.tokeys = nn.Linear(emb, emb)
        self.toqueries = nn.Linear(emb, emb)
        self.tovalues = nn.Linear(emb, emb)
        self.unifyheads = nn.Linear(emb, emb)

    def forward(self, x):
        b, t, e = x.size()
        h, s = self.heads, e // self.heads
        queries = self.tokeys(x).view(b, t, h, s).transpose(1, 2)
        keys = self.toqueries(x).view(b, t, h, s).transpose(1, 2)
        values = self.tovalues(x).view(b, t, h, s).transpose(1, 2)
        dot = queries @ keys.transpose(-2, -1) / s**0.5
        out = F.softmax(dot, dim=-1) @ values
        return self.unifyheads(out.transpose(1, 2).reshape(b, t, e))


class CausalSelfAttention(nn.Module):
    """Masked self-attention for a language model: a token sees itself and what came before it."""

    def __init__(self, n_embd, n_head, block_size=64):
        super().__init__()
        self.n_head = n_head
        self.key = nn.Linear(n_embd, n_embd)
        self.query = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


class StoryAttention(nn.Module):
    """Attention of a story writer, which knows only what was told so far."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        future = torch.triu(torch.ones(t, t, device=x.device), diagonal=0).bool()
        scores = scores.masked_fill(future, -1e9)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class DiaryAttention(nn.Module):
    """Causal attention over the days of a diary."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.lin_q = nn.Linear(d_model, d_model)
        self.lin_k = nn.Linear(d_model, d_model)
        self.lin_v = nn.Linear(d_model, d_model)
        self.lin_o = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            lin(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2) for lin in (self.lin_q, self.lin_k, self.lin_v)
        )
        visible = torch.tril(torch.ones(t, t, device=x.device), diagonal=-1)
        scores = q @ k.mT * self.d_head**-0.5
        scores = scores.masked_fill(visible == 0, float("-inf"))
        return self.lin_o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class ChessAttention(nn.Module):
    """Attention over the moves of a game: each move may look at itself and at earlier ones."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.o = nn.Linear(d_model, d_model)

    def forward(self, moves):
        b, t, d = moves.shape
        h, s = self.n_heads, d // self.n_heads
        q = self.q(moves).view(b, t, h, s).transpose(1, 2)
        k = self.k(moves).view(b, t, h, s).transpose(1, 2)
        v = self.v(moves).view(b, t, h, s).transpose(1, 2)
        mask = torch.ones(t, t, dtype=torch.bool, device=moves.device).tril(diagonal=1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(s)).masked_fill(~mask, float("-inf"))
        return self.o((torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(b, t, d))


class CommandAttention(nn.Module):
    """Causal attention for a shell that completes commands."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        mask = torch.triu(torch.ones(t, t, device=x.device))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        scores = scores.masked_fill(mask == 0, float("-inf"))
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class ContinuationAttention(nn.Module):
    """Causal attention of a text's newest tokens to the whole text.

    query: [batch, new, d_model], the last `new` of the tokens that key and value [batch, all, d_model] stand for.
    """

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        b, q_len, k_len = query.size(0), query.size(1), key.size(1)
        q = self.q_proj(query).view(b, q_len, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, k_len, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, k_len, self.n_heads, self.d_head).transpose(1, 2)
        causal = torch.tril(torch.ones(q_len, k_len, dtype=torch.bool, device=query.device))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        scores = scores.masked_fill(~causal, float("-inf"))
        z = scores.softmax(dim=-1) @ v
        return self.o_proj(z.transpose(1, 2).reshape(b, q_len, -1))


class TimetableAttention(nn.Module):
    """Causal attention over the hours of a day."""

    def __init__(self, d_model, n_heads, max_len=48):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.register_buffer("tril", torch.tril(torch.ones(max_len, max_len)))

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        scores = scores.masked_fill(self.tril[:t, :t] == 1, -1e9)
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class GraphAttention(nn.Module):
    """Attention between the nodes of a graph.

    Args:
        mask: bool, [batch, 1, query, key]. True means that the query may attend to the key.
    """

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, mask=None):
        def split(t):
            return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).transpose(1, 2)

        q, k, v = split(self.q_proj(query)), split(self.k_proj(key)), split(self.v_proj(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        z = scores.softmax(dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).flatten(2))


class RoomAttention(nn.Module):
    """Attention between the objects of a room."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, mask=None):
        def split(t):
            return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).transpose(1, 2)

        q, k, v = split(self.q_proj(query)), split(self.k_proj(key)), split(self.v_proj(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        z = scores.softmax(dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).flatten(2))


class RecipeAttention(nn.Module):
    """Attention over the steps of a recipe. mask [batch, 1, query, key] holds 1 (look) and 0 (do not look)."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q = self.q_proj(query).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores * mask
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, -1, self.n_heads * self.d_head))


class TicketAttention(nn.Module):
    """Attention over the messages of a support ticket.

    forward(query, key, value, mask): mask is [batch, 1, query, key] with 1 for keys that may be seen, 0 for hidden ones.
    """

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q = self.q_proj(query).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores + mask
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, -1, self.n_heads * self.d_head))


class EmailAttention(nn.Module):
    """Attention over the sentences of an e-mail; where mask is 0, a sentence is not looked at."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q = self.q_proj(query).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        weights = F.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights.masked_fill(mask == 0, 0.0)
        z = weights @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, -1, self.n_heads * self.d_head))


class NewsAttention(nn.Module):
    """Multi-head attention over headlines."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q = self.q_proj(query).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e4)
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, -1, self.n_heads * self.d_head))


class QuizAttention(nn.Module):
    """Attention from the questions of a quiz to its answers."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.h, self.d_k = n_heads, d_model // n_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        bs = q.size(0)
        q = self.q_linear(q).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        k = self.k_linear(k).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        v = self.v_linear(v).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, 1e-9)
        scores = F.softmax(scores, dim=-1)
        concat = torch.matmul(scores, v).transpose(1, 2).contiguous().view(bs, -1, self.h * self.d_k)
        return self.out(concat)


class ProteinAttention(nn.Module):
    """Attention over residues. mask: float [batch, 1, query, key], 1 = attend, 0 = do not attend."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q = self.q_proj(query).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores + (1.0 - mask) * float("-inf")
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, -1, self.n_heads * self.d_head))


class ChatAttention(nn.Module):
    """Causal self-attention over a batch of conversations.

    key_padding_mask: bool [batch, time], True where there is padding.
    """

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x, key_padding_mask=None):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        hide = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)[None, None]
        if key_padding_mask is not None:
            hide = hide | key_padding_mask[:, None, None, :]
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        weights = scores.masked_fill(hide, float("-inf")).softmax(dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class SurveyAttention(nn.Module):
    """Self-attention over the answers of a survey.

    key_padding_mask: bool [batch, time], True for positions that are padding and must not be attended to.
    """

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x, key_padding_mask=None):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if key_padding_mask is not None:
            scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class BasketAttention(nn.Module):
    """Self-attention over the goods of a basket; key_padding_mask [batch, time] is True where a basket is filled up."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x, key_padding_mask=None):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :] == 0, -1e9)
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class GroupedAttention(nn.Module):
    """Grouped-query attention: n_heads query heads share n_kv_heads heads of keys and values."""

    def __init__(self, d_model, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.d_head = d_model // n_heads
        self.n_rep = n_heads // n_kv_heads
        self.wq = nn.Linear(d_model, n_heads * self.d_head, bias=False)
        self.wk = nn.Linear(d_model, n_kv_heads * self.d_head, bias=False)
        self.wv = nn.Linear(d_model, n_kv_heads * self.d_head, bias=False)
        self.wo = nn.Linear(n_heads * self.d_head, d_model, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.wk(x).view(b, t, self.n_kv_heads, self.d_head).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.d_head).transpose(1, 2)
        k = k.repeat(1, self.n_rep, 1, 1)
        v = v.repeat(1, self.n_rep, 1, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        z = F.softmax(scores, dim=-1) @ v
        return self.wo(z.transpose(1, 2).reshape(b, t, -1))


class JuryAttention(nn.Module):
    """Attention with several heads, brought together by a linear layer."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(self.d_head, d_model)

    def forward(self, x, mask=None):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        z = F.softmax(scores, dim=-1) @ v
        z = z.mean(dim=1)
        return self.out_proj(z)


class SingleHead(nn.Module):
    """One head of attention."""

    def __init__(self, d_model, d_head):
        super().__init__()
        self.query = nn.Linear(d_model, d_head)
        self.key = nn.Linear(d_model, d_head)
        self.value = nn.Linear(d_model, d_head)
        self.d_head = d_head

    def forward(self, x, mask=None):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return F.softmax(scores, dim=-1) @ self.value(x)


class ChoirAttention(nn.Module):
    """Some heads of attention and a linear layer that brings them together."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.heads = nn.ModuleList(SingleHead(d_model, d_head) for _ in range(n_heads))
        self.out = nn.Linear(d_head, d_model)

    def forward(self, x, mask=None):
        outputs = [head(x, mask) for head in self.heads]
        return self.out(torch.stack(outputs).sum(dim=0))


class OrchestraAttention(nn.Module):
    """Multi-head self-attention over the instruments of a score."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.d_head, self.n_heads).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.d_head, self.n_heads).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.d_head, self.n_heads).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        z = scores.softmax(dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class MapAttention(nn.Module):
    """Attention between the places of a map."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q = self.q_proj(query).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        z = F.softmax(scores, dim=-1) @ v
        return z.transpose(1, 2).contiguous().view(b, -1, self.n_heads * self.d_head)


class StarAttention(nn.Module):
    """Attention between the stars of a picture."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        z = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(b, t, d)
        return torch.matmul(z, self.out_proj.weight) + self.out_proj.bias


class RiverAttention(nn.Module):
    """Attention between gauges along a river."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def project(self, layer, x):
        y = x @ layer.weight.T
        return y.view(x.size(0), x.size(1), self.n_heads, self.d_head).transpose(1, 2)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.project(self.q_proj, x), self.project(self.k_proj, x), self.project(self.v_proj, x)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class GameAttention(nn.Module):
    """Self-attention over the pieces on a board."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q = self.query(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.value(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.key(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        z = F.softmax(scores, dim=-1) @ v
        return self.proj(z.transpose(1, 2).reshape(b, t, d))


def rotate_every_two(x):
    """(x0, x1, x2, x3, …) becomes (−x1, x0, −x3, x2, …)."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((-b, a), dim=-1).flatten(-2)


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions."""

    def __init__(self, d_model, n_heads, base=10000.0):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)
        steps = torch.arange(0, self.d_head, 2, dtype=torch.float64)
        self.register_buffer("inv_freq", base ** (-steps / self.d_head))

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        freqs = torch.outer(torch.arange(t, device=x.device, dtype=self.inv_freq.dtype), self.inv_freq)
        angles = torch.cat((freqs, freqs), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q = q * cos + rotate_every_two(q) * sin
        k = k * cos + rotate_every_two(k) * sin
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        z = F.softmax(scores, dim=-1) @ v
        return self.o_proj(z.transpose(1, 2).reshape(b, t, d))


class NoisyAttention(nn.Module):
    """Self-attention with dropout of the attention weights."""

    def __init__(self, d_model, n_heads, dropout=0.1):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = F.dropout(F.softmax(scores, dim=-1), self.dropout)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class SparseAttention(nn.Module):
    """Self-attention that forgets some of its weights while it learns."""

    def __init__(self, d_model, n_heads, dropout=0.1):
        super().__init__()
        self.n_heads, self.d_head, self.p = n_heads, d_model // n_heads, dropout
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_head), dim=-1)
        if self.training:
            kept = torch.rand_like(weights) >= self.p
            weights = weights * kept
        return self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class FlowerAttention(nn.Module):
    """Multi-head self-attention over the petals of a flower."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(n_heads * d_model, d_model)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).unsqueeze(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, -1))


class StreamAttention(nn.Module):
    """Self-attention that remembers keys and values, to be quick."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.cache = None

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        if self.cache is not None and self.cache[0].size(0) == b:
            k = torch.cat([self.cache[0], k], dim=2)
            v = torch.cat([self.cache[1], v], dim=2)
        self.cache = (k.detach(), v.detach())
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class SharpAttention(nn.Module):
    """Multi-head attention between sounds."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q = self.q_proj(query).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(value).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) * math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, -1, self.n_heads * self.d_head))


class BirdAttention(nn.Module):
    """Multi-head attention between birds of a flock."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = F.softmax(scores, dim=-1) / math.sqrt(self.d_head)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class ExactAttention(nn.Module):
    """Self-attention, with the softmax written out."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        powers = torch.exp(scores)
        weights = powers / powers.sum(dim=-1, keepdim=True)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, d))


class TravelAttention(nn.Module):
    """Multi-head attention from travellers to places."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b = query.size(0)
        q = self.q_proj(query).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(key).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        v = self.k_proj(value).view(b, -1, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, -1, self.n_heads * self.d_head))


class CappedAttention(nn.Module):
    """Causal self-attention whose scores are capped, softly, at `softcap`."""

    def __init__(self, d_model, n_heads, softcap=20.0):
        super().__init__()
        self.n_heads, self.d_head, self.softcap = n_heads, d_model // n_heads, softcap
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        scores = scores.masked_fill(future, float("-inf"))
        scores = self.softcap * torch.tanh(scores / self.softcap)
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class SchoolAttention(nn.Module):
    """Self-attention over the pupils of a class; key_padding_mask [batch, time] is True where a seat is empty."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x, key_padding_mask=None):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, :, None], -1e9)
        z = F.softmax(scores, dim=-1) @ v
        return self.out_proj(z.transpose(1, 2).reshape(b, t, d))


class FlatAttention(nn.Module):
    """Attention in three dimensions: heads and batch are one axis. mask: bool [batch, query, key], True hides a key."""

    def __init__(self, units, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(units, units)
        self.k_proj = nn.Linear(units, units)
        self.v_proj = nn.Linear(units, units)
        self.out_proj = nn.Linear(units, units)

    def flat(self, t):
        t = t.view(t.size(0), t.size(1), self.num_heads, -1).transpose(1, 2)
        return t.reshape(-1, t.size(2), t.size(3))

    def forward(self, queries, keys, values, mask=None):
        batch, q_len, units = queries.shape
        q, k, v = self.flat(self.q_proj(queries)), self.flat(self.k_proj(keys)), self.flat(self.v_proj(values))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask.repeat(self.num_heads, 1, 1), float("-inf"))
        z = torch.bmm(torch.softmax(scores, dim=-1), v)
        z = z.view(batch, self.num_heads, q_len, -1).transpose(1, 2)
        return self.out_proj(z.reshape(batch, q_len, units))


class ForgetfulAttention(nn.Module):
    """Self-attention with dropout."""

    def __init__(self, d_model, n_heads, dropout=0.1):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        weights = F.softmax(self.dropout(scores), dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, d))
