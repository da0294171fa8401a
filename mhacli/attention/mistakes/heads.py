"""Mistakes in cutting rows into heads, and in joining them again."""

from __future__ import annotations

import functools

from mhacli.attention.mistakes import head_replacements as replacedheads
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
                replacedheads.split_flat("q", "k", "v"),
                (
                    "q",
                    "k",
                    "v",
                ),
            ),
            Way("v is cut into heads by a reshape alone", replacedheads.split_flat("v"), ("v",)),
            Way(
                "q and k are cut into heads by a reshape alone",
                replacedheads.split_flat("q", "k"),
                (
                    "q",
                    "k",
                ),
            ),
            Way(
                "k and v are cut into heads by a reshape alone",
                replacedheads.split_flat("k", "v"),
                (
                    "k",
                    "v",
                ),
            ),
            Way("q is cut into heads by a reshape alone", replacedheads.split_flat("q"), ("q",)),
            Way("q and v are cut into heads by a reshape alone", replacedheads.split_flat("q", "v"), ("q", "v")),
            Way("k is cut into heads by a reshape alone", replacedheads.split_flat("k"), ("k",)),
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
        tuple(
            Way(f"the fused projection is reshaped to [{axes}]", replacedheads.fused_read(order), is_rare=n > 0)
            for n, (order, axes) in enumerate(
                (
                    ("b3htd", "batch, 3, head, length, d_head"),
                    ("3bhtd", "3, batch, head, length, d_head"),
                    ("3bthd", "3, batch, length, head, d_head"),
                    ("b3thd", "batch, 3, length, head, d_head"),
                    ("bht3d", "batch, head, length, 3 · d_head"),
                    ("bh3td", "batch, head, 3, length, d_head"),
                )
            )
        ),
    ),
    Mistake(
        "split-batch-moved",
        "batch and heads are made one axis in another order than that of the others",
        "q.permute(2, 0, 1, 3).reshape(n_heads * batch, length, d_head)  # where k and v are [batch * n_heads, length, d_head]",
        "a sequence attends to the tokens of others in its batch",
        "q.permute(0, 2, 1, 3).reshape(batch * n_heads, length, d_head)",
        "split",
        "q",
        tuple(
            Way(
                f"the planes of {' and '.join(of)} lie head after head, those of the others batch after batch",
                replacedheads.planes_split(*of),
                of,
                is_rare=True,
            )
            for of in (("q",), ("k",), ("v",), ("q", "k"), ("q", "v"), ("k", "v"))
        ),
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
                replacedheads.merged_as("bhtd"),
            ),
        ),
    ),
    Mistake(
        "merge-axis-order",
        "the axes are moved to another order than tokens, heads, columns before the heads are joined",
        "z.transpose(2, 3).reshape(batch, length, n_heads * d_head)  # z is [batch, head, query, d_head]",
        "an output row is made of pieces of several tokens: tokens are mixed",
        "z.transpose(1, 2).reshape(batch, length, n_heads * d_head)",
        "merge",
        "concat",
        tuple(
            Way(f"the heads are read as rows in the order {axes}", replacedheads.merged_as(order), is_rare=True)
            for order, axes in (
                ("bhdt", "batch, head, column, query"),
                ("btdh", "batch, query, column, head"),
                ("bdht", "batch, column, head, query"),
                ("bdth", "batch, column, query, head"),
            )
        ),
    ),
    Mistake(
        "merge-batch-moved",
        "the axis of the batch is moved when the heads are joined",
        "z.transpose(0, 1).reshape(batch, length, n_heads * d_head)  # or z.view(n_heads, batch, …) of [batch * n_heads, …]",
        "a sequence gets rows and heads of the others in its batch",
        "z.transpose(1, 2).reshape(batch, length, n_heads * d_head)",
        "merge",
        "concat",
        (
            Way(
                "[batch · head, query, d_v] is read as [head, batch, query, d_v]",
                replacedheads.planes_read,
                is_rare=True,
            ),
            Way(
                "[head · batch, query, d_v] is read as [batch, head, query, d_v]",
                replacedheads.planes_laid,
                is_rare=True,
            ),
            *(
                Way(f"the heads are read as rows in the order {axes}", replacedheads.merged_as(order), is_rare=True)
                for order, axes in (
                    ("hbtd", "head, batch, query, column"),
                    ("htbd", "head, query, batch, column"),
                    ("tbhd", "query, batch, head, column"),
                    ("thbd", "query, head, batch, column"),
                )
            ),
        ),
    ),
    Mistake(
        "attention-over-heads",
        "the axis of the tokens stays before that of the heads: the heads of a token attend to each other",
        "q.view(batch, length, n_heads, d_head) @ k.view(batch, length, n_heads, d_head).transpose(-2, -1)",
        "no token attends to another: nothing of the text reaches a token but itself",
        "q.view(batch, length, n_heads, d_head).transpose(1, 2), and the same of k and v",
        "split",
        "q",
        (
            Way(
                "[batch, length, head, d_head] is attended over its heads",
                replacedheads.heads_as_tokens,
                besides={"merge": replacedheads.tokens_side_by_side},
                is_rare=True,
            ),
            Way(
                "[batch, length, head, d_head] is attended over its heads, and transposed all the same when they are joined",
                replacedheads.heads_as_tokens,
                besides={"merge": replacedheads.tokens_moved},
                is_rare=True,
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
        (Way("each head weighs the whole rows of v", replacedheads.values_whole),),
    ),
    Mistake(
        "heads-averaged",
        "the mean of the heads takes the place of the heads side by side",
        "z.mean(dim=1)",
        "what the heads found apart is blurred into one",
        "z.transpose(1, 2).reshape(batch, length, n_heads * d_head)",
        "merge",
        "concat",
        (Way("the heads are averaged instead of joined", replacedheads.heads_as(replacedheads.mean_of_heads)),),
    ),
    Mistake(
        "heads-summed",
        "the sum of the heads takes the place of the heads side by side",
        "z.sum(dim=1)",
        "what the heads found apart is blurred into one, and grows with their number",
        "z.transpose(1, 2).reshape(batch, length, n_heads * d_head)",
        "merge",
        "concat",
        (Way("the heads are added up instead of joined", replacedheads.heads_as(replacedheads.sum_of_heads)),),
    ),
    Mistake(
        "gqa-tiled",
        "the kv heads are repeated as 0 1 0 1, where query heads share them as 0 0 1 1",
        "k.repeat(1, n_heads // n_kv_heads, 1, 1)",
        "query heads read the keys of a neighbour's group: weights of any published model give nonsense",
        "k.repeat_interleave(n_heads // n_kv_heads, dim=1)",
        "share",
        "qk",
        (
            Way(
                "kv heads are tiled, head h reading kv head h mod n_kv_heads",
                replacedheads.shared_as(replacedheads.tiled),
            ),
            *(
                Way(
                    f"the heads of the {name} alone are tiled, head h reading kv head h mod n_kv_heads",
                    replacedheads.shared_as(replacedheads.tiled, letter),
                    (site,),
                    is_rare=True,
                )
                for letter, name, site in (("k", "keys", "qk"), ("v", "values", "z"))
            ),
        ),
    ),
    Mistake(
        "head-repeated",
        "the output of one head stands in the place of every head",
        "torch.cat([self.heads[0](x) for head in self.heads], dim=-1)",
        "the weights of the other heads are never used",
        "torch.cat([head(x) for head in self.heads], dim=-1)",
        "merge",
        "concat",
        (Way("the output of head 0 is repeated for every head", replacedheads.repeated_head, is_rare=True),),
    ),
    Mistake(
        "kv-head-shared-by-all",
        "every query head reads the first kv head",
        "k[:, :1].expand(-1, n_heads, -1, -1)",
        "the other kv heads are projected and never used",
        "k.repeat_interleave(n_heads // n_kv_heads, dim=1)",
        "share",
        "qk",
        (Way("every query head reads kv head 0", replacedheads.shared_as(replacedheads.first_for_all)),),
    ),
    *(
        Mistake(
            f"{one}-of-one-head",
            f"every head reads the {many} of one head",
            looks_like,
            effect,
            fix,
            stage,
            site,
            tuple(
                Way(f"every head reads the {many} of head {name}", made(chosen), is_rare=True)
                for name, chosen in (("0", replacedheads.first_for_all), ("n_heads − 1", replacedheads.last_for_all))
            ),
        )
        for one, many, looks_like, effect, fix, stage, site, made in (
            (
                "value",
                "values",
                "pattern @ v[:, :1]",
                "the values of the other heads are projected and never used",
                "pattern @ v",
                "share",
                "z",
                functools.partial(replacedheads.shared_as, of="v"),
            ),
            (
                "key",
                "keys",
                "q @ k[:, :1].transpose(-2, -1)",
                "the keys of the other heads are projected and never used",
                "q @ k.transpose(-2, -1)",
                "share",
                "qk",
                functools.partial(replacedheads.shared_as, of="k"),
            ),
            (
                "query",
                "queries",
                "q[:, :1] @ k.transpose(-2, -1)",
                "the queries of the other heads are projected and never used",
                "q @ k.transpose(-2, -1)",
                "products",
                "qk",
                replacedheads.asked_by_one,
            ),
        )
    ),
    Mistake(
        "pattern-of-one-head",
        "every head weighs its values by one pattern",
        "pattern[:, :1] @ v",
        "the heads attend alike: what each is to look for is lost",
        "pattern @ v",
        "shares",
        "z",
        (
            Way(
                "every head weighs by the pattern of head 0",
                replacedheads.patterns_as(replacedheads.first_for_all),
                is_rare=True,
            ),
            Way(
                "every head weighs by the mean of all patterns",
                replacedheads.patterns_as(replacedheads.mean_for_all),
                is_rare=True,
            ),
        ),
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
