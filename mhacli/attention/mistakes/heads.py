"""Mistakes in cutting rows into heads, and in joining them again."""

from __future__ import annotations

from mhacli.attention import replaced
from mhacli.attention.mistakes.entry import Mistake, Way

HEADS = (
    Mistake(
        "split-without-transpose",
        "the projected rows are read as heads without moving the axis of the tokens",
        "q.view(batch, n_heads, length, d_head)",
        "a head gets some tokens whole instead of some columns of every token: tokens are mixed, and the future leaks",
        "q.view(batch, length, n_heads, d_head).transpose(1, 2)",
        "split",
        "q",
        (
            Way(
                "q, k and v are cut into heads by a reshape alone",
                replaced.split_flat("q", "k", "v"),
                (
                    "q",
                    "k",
                    "v",
                ),
            ),
            Way("v is cut into heads by a reshape alone", replaced.split_flat("v"), ("v",)),
            Way(
                "q and k are cut into heads by a reshape alone",
                replaced.split_flat("q", "k"),
                (
                    "q",
                    "k",
                ),
            ),
            Way(
                "k and v are cut into heads by a reshape alone",
                replaced.split_flat("k", "v"),
                (
                    "k",
                    "v",
                ),
            ),
            Way("q is cut into heads by a reshape alone", replaced.split_flat("q"), ("q",)),
            Way("k is cut into heads by a reshape alone", replaced.split_flat("k"), ("k",)),
        ),
    ),
    Mistake(
        "split-without-transpose",
        "the fused projection is read as queries, keys and values without moving the axis of the tokens",
        "self.qkv(x).reshape(batch, 3, n_heads, length, d_head)",
        "a head gets pieces of queries, keys and values of some tokens: everything is mixed",
        "self.qkv(x).reshape(batch, length, 3, n_heads, d_head).permute(2, 0, 3, 1, 4)",
        "project",
        "q",
        (Way("the fused projection is reshaped to [batch, 3, head, length, d_head]", replaced.fused_flat),),
    ),
    Mistake(
        "merge-without-transpose",
        "the heads are joined without moving their axis back behind the tokens",
        "z.reshape(batch, length, n_heads * d_head)  # z is [batch, head, query, d_head]",
        "an output row is made of several tokens of one head instead of all heads of one token: tokens are mixed",
        "z.transpose(1, 2).reshape(batch, length, n_heads * d_head)",
        "merge",
        "concat",
        (
            Way(
                "[batch, head, query, d_v] is reshaped to [batch, query, head·d_v] without a transpose",
                replaced.merge_flat,
            ),
        ),
    ),
    Mistake(
        "value-not-split",
        "the values are not cut into heads: every head weighs whole rows",
        "pattern @ v  # v is [batch, length, d_model]",
        "the heads do not have values of their own, so the output is as wide as many copies or mixes what should stay apart",
        "v = v.view(batch, length, n_heads, d_head).transpose(1, 2)",
        "split",
        "z",
        (Way("each head weighs the whole rows of v", replaced.values_whole),),
    ),
    Mistake(
        "heads-averaged",
        "the mean of the heads takes the place of the heads side by side",
        "z.mean(dim=1)",
        "what the heads found apart is blurred into one",
        "z.transpose(1, 2).reshape(batch, length, n_heads * d_head)",
        "merge",
        "concat",
        (Way("the heads are averaged instead of joined", replaced.heads_as(replaced.mean_of_heads)),),
    ),
    Mistake(
        "heads-summed",
        "the sum of the heads takes the place of the heads side by side",
        "z.sum(dim=1)",
        "what the heads found apart is blurred into one, and grows with their number",
        "z.transpose(1, 2).reshape(batch, length, n_heads * d_head)",
        "merge",
        "concat",
        (Way("the heads are added up instead of joined", replaced.heads_as(replaced.sum_of_heads)),),
    ),
    Mistake(
        "gqa-tiled",
        "the kv heads are repeated as 0 1 0 1, where query heads share them as 0 0 1 1",
        "k.repeat(1, n_heads // n_kv_heads, 1, 1)",
        "query heads read the keys of a neighbour's group: weights of any published model give nonsense",
        "k.repeat_interleave(n_heads // n_kv_heads, dim=1)",
        "share",
        "qk",
        (Way("kv heads are tiled, head h reading kv head h mod n_kv_heads", replaced.shared_as(replaced.tiled)),),
    ),
    Mistake(
        "kv-head-shared-by-all",
        "every query head reads the first kv head",
        "k[:, :1].expand(-1, n_heads, -1, -1)",
        "the other kv heads are projected and never used",
        "k.repeat_interleave(n_heads // n_kv_heads, dim=1)",
        "share",
        "qk",
        (Way("every query head reads kv head 0", replaced.shared_as(replaced.first_for_all)),),
    ),
    Mistake(
        "head-width",
        "the projections are as wide as one head instead of all heads together",
        "nn.Linear(d_model, d_model // n_heads)  # for all heads",
        "the heads together have only d_model / n_heads columns: n_heads times too few weights",
        "nn.Linear(d_model, n_heads * d_head)",
        None,
        "q",
    ),
    Mistake(
        "heads-missing",
        "the rows are never cut into heads: there is one head, whatever the number that was told",
        "q @ k.transpose(-2, -1)  # q is [batch, length, d_model]",
        "each token has one set of shares instead of one per head",
        "q.view(batch, length, n_heads, d_head).transpose(1, 2)",
        None,
        "qk",
    ),
)
