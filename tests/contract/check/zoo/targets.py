"""Small right attentions that differ in how they are built and called, and in what they return."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(q, k, v, change=lambda scores: scores):
    pattern = change(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1)
    return pattern @ v, pattern


class Projections(nn.Module):
    """What most of the layers below have."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v_proj, self.out_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def split(self, rows):
        return rows.view(rows.size(0), rows.size(1), self.n_heads, -1).transpose(1, 2)

    def run(self, q, k, v, change=lambda scores: scores):
        z, pattern = attend(
            self.split(self.q_proj(q)),
            self.split(self.k_proj(k)),
            self.split(self.v_proj(v)),
            change,
        )
        return self.out_proj(z.transpose(1, 2).reshape(q.size(0), q.size(1), -1)), pattern


# ---------------------------------------------------------------------------------- which arguments


class OddName(Projections):
    def forward(self, melody):
        return self.run(melody, melody, melody)[0]


class Unbatched(Projections):
    def forward(self, x):
        length, _ = x.shape
        return self.run(*[x.view(1, length, -1)] * 3)[0][0]


class ChannelsFirst(Projections):
    def forward(self, x):
        return self.run(*[x.transpose(1, 2)] * 3)[0].transpose(1, 2)


class Prompted(Projections):
    def forward(self, melody, prompt):
        return {"length": prompt["length"], "z": self.run(*[melody[:, : prompt["length"]]] * 3)[0]}


class OfTwoWidths(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.of_actions, self.of_states = nn.Linear(3, d_model), nn.Linear(5, d_model)
        self.layer = nn.TransformerEncoderLayer(d_model, n_heads, 32, batch_first=True)

    def forward(self, states, actions):
        return self.layer(self.of_states(states) + self.of_actions(actions))


class BatchSecond(Projections):
    def __init__(self, d_model, n_heads, batch_first=False):
        super().__init__(d_model, n_heads)

    def forward(self, query, key, value):
        out, _ = self.run(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        return out.transpose(0, 1)


class LengthUnpacked(Projections):
    def forward(self, query, key, value):
        """A padding mask would be [batch, src_len]."""
        tgt_len, bsz, width = query.size()
        out, _ = self.run(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        return out.transpose(0, 1).reshape(tgt_len, bsz, width)


class OptionalMemory(Projections):
    def forward(self, hidden_states, encoder_hidden_states=None):
        memory = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return self.run(hidden_states, memory, memory)[0]


class SourceAndTarget(Projections):
    def forward(self, src, tgt):
        return self.run(tgt, src, src)[0]


class QueryAndKv(Projections):
    def forward(self, q, kv):
        return self.run(q, kv, kv)[0]


class CapitalLetters(Projections):
    def forward(self, V, K, Q):
        return self.run(Q, K, V)[0]


class OptionalKeys(Projections):
    def forward(self, query, key=None, value=None):
        key = query if key is None else key
        return self.run(query, key, key if value is None else value)[0]


class KeywordOnly(Projections):
    def forward(self, *, value, query, key):
        return self.run(query, key, value)[0]


class Rotations(Projections):
    def forward(self, hidden_states, position_embeddings, past_key_values=None, use_cache=False):
        cos, sin = position_embeddings

        def rotate(y):
            one, two = y.chunk(2, -1)
            return y * cos[:, None] + torch.cat([-two, one], -1) * sin[:, None]

        q, k, v = (self.split(w(hidden_states)) for w in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(attend(rotate(q), rotate(k), v)[0].transpose(1, 2).flatten(2)), None


class Phases(Projections):
    def forward(self, x, start_pos, freqs_cis, mask):
        def rotate(y):
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * freqs_cis[: y.size(2)]).flatten(-2).type_as(y)

        q, k, v = (self.split(w(x)) for w in (self.q_proj, self.k_proj, self.v_proj))
        z, _ = attend(rotate(q), rotate(k), v, lambda s: s if mask is None else s + mask)
        return self.out_proj(z.transpose(1, 2).flatten(2))


class Switch(Projections):
    def forward(self, x, is_causal=False):
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        return self.run(x, x, x, lambda s: s.masked_fill(future, -math.inf) if is_causal else s)[0]


class NeedsNumber(Projections):
    def forward(self, x, fudge):
        return self.run(x, x, x)[0] * fudge


class Gated(Projections):
    def forward(
        self, x, mask=None, gate=None, sharpen=False, positions=None, output_attentions=False
    ):
        q, k, v = (self.split(w(x)) for w in (self.q_proj, self.k_proj, self.v_proj))
        k = k if gate is None else k * gate
        q = q * 3 if sharpen else q
        z, _ = attend(q, k, v, lambda s: s if mask is None else s.masked_fill(mask == 0, -math.inf))
        return self.out_proj(z.transpose(1, 2).flatten(2))


# -------------------------------------------------------------------------------------------- masks


class KeepMask(Projections):
    def forward(self, x, mask=None):
        return self.run(x, x, x, lambda s: s if mask is None else s.masked_fill(mask == 0, -1e9))[0]


class HideMask(Projections):
    def forward(self, x, mask=None):
        return self.run(x, x, x, lambda s: s if mask is None else s.masked_fill(mask, -math.inf))[0]


class RequiredMask(Projections):
    def forward(self, x, mask):
        return self.run(x, x, x, lambda scores: scores.masked_fill(mask == 0, -1e9))[0]


class OddMask(Projections):
    def forward(self, melody, chords):
        return self.run(melody, melody, melody, lambda scores: scores + chords)[0]


class AddedMask(Projections):
    def forward(self, hidden_states, attention_mask=None):
        x = hidden_states
        return self.run(
            x, x, x, lambda scores: scores if attention_mask is None else scores + attention_mask
        )[0]


class TwoMasks(Projections):
    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None):
        def change(s):
            s = s if attn_mask is None else s + attn_mask
            return (
                s
                if key_padding_mask is None
                else s.masked_fill(key_padding_mask[:, None, None], -math.inf)
            )

        return self.run(query, key, value, change)[0]


class TokenMask(Projections):
    def forward(self, x, attention_mask=None):
        hide = None if attention_mask is None else attention_mask[:, None, None, :].to(x.dtype)
        return self.run(x, x, x, lambda s: s if hide is None else s + (1.0 - hide) * -1e9)[0]


# ------------------------------------------------------------------------------------------ results


class Named(NamedTuple):
    attention_weights: Tensor
    context: Tensor


@dataclass
class Output:
    last_hidden_state: Tensor
    attentions: Tensor | None = None


class ReturnsNamed(Projections):
    def forward(self, x):
        out, pattern = self.run(x, x, x)
        return Named(pattern, out)


class ReturnsDict(Projections):
    def forward(self, x):
        out, pattern = self.run(x, x, x)
        return {"weights": pattern.mean(1), "output": out}


class ReturnsDataclass(Projections):
    def forward(self, x, output_attentions=False):
        out, pattern = self.run(x, x, x)
        return Output(out, pattern if output_attentions else None)


class ReturnsScoresToo(Projections):
    def forward(self, x):
        out, pattern = self.run(x, x, x)
        return out, pattern.log(), pattern


# ------------------------------------------------------------------------------------------ weights


class Conv1D(nn.Module):
    def __init__(self, d_out, d_in):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(d_in, d_out)),
            nn.Parameter(torch.zeros(d_out)),
        )

    def forward(self, x):
        return x @ self.weight + self.bias


class Weights(nn.Module):
    """Layers that differ only in how their weights lie: `heads` gives q, k and v, `out` the
    output.
    """

    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.make(d_model, n_heads)

    def split(self, rows):
        return rows.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, x):
        return self.out(attend(*self.heads(x))[0].transpose(1, 2).flatten(2))


class ThirdsInnermost(Weights):
    def make(self, d_model, n_heads):
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def heads(self, x):
        return (
            self.qkv(x)
            .unflatten(-1, (self.n_heads, self.d_head, 3))
            .permute(4, 0, 2, 1, 3)
            .unbind(0)
        )


class NamedOrder(Weights):
    def make(self, d_model, n_heads):
        self.kqv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def heads(self, x):
        k, q, v = (self.split(t) for t in self.kqv(x).chunk(3, dim=-1))
        return q, k, v


class Transposed(Weights):
    def make(self, d_model, n_heads):
        self.c_attn, self.out = Conv1D(3 * d_model, d_model), Conv1D(d_model, d_model)

    def heads(self, x):
        return (self.split(t) for t in self.c_attn(x).chunk(3, dim=-1))


class ListPerProjection(Weights):
    def make(self, d_model, n_heads):
        self.queries, self.keys, self.values = (
            nn.ModuleList(nn.Linear(d_model, d_model // n_heads) for _ in range(n_heads))
            for _ in range(3)
        )
        self.out = nn.Linear(d_model, d_model)

    def heads(self, x):
        return (
            torch.stack([layer(x) for layer in layers], 1)
            for layers in (self.queries, self.keys, self.values)
        )


class KeysAndValues(Weights):
    def make(self, d_model, n_heads):
        self.q_proj, self.kv_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, 2 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def heads(self, x):
        k, v = self.split(self.kv_proj(x)).chunk(2, dim=-1)
        return self.split(self.q_proj(x)), k, v


# ---------------------------------------------------------------------------------------- built how


@dataclass
class Sizes:
    n_embd: int
    n_head: int = 3


class OfDataclass(Projections):
    def __init__(self, args: Sizes):
        super().__init__(args.n_embd, args.n_head)

    def forward(self, x):
        return self.run(x, x, x)[0]


class OfConfig(Projections):
    def __init__(self, config):
        super().__init__(config.hidden_size, config.num_attention_heads)

    def forward(self, x):
        return self.run(x, x, x)[0]


class OfMapping(Projections):
    def __init__(self, cfg):
        super().__init__(cfg["emb_dim"], cfg["n_heads"])

    def forward(self, x):
        return self.run(x, x, x)[0]


def build(d_model=24, n_heads=3):
    return OddName(d_model, n_heads)


ready = OddName(24, 3)


def attend_heads_third(q, k, v):
    z = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return z.transpose(1, 2)


class Inner:
    class Attention(OddName):
        pass


class ChannelsLast(OddName):
    """Over the pixels of a map, its channels last."""

    def forward(self, melody):
        return super().forward(melody.flatten(1, 2)).view_as(melody)
