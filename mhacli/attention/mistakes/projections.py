"""Mistakes in projections and rotations, in dropout, and in what is remembered."""

from __future__ import annotations

from itertools import permutations

import torch

from mhacli.attention.mistakes import replacements as replaced
from mhacli.attention.mistakes.entry import Mistake, Way
from mhacli.attention.mistakes.replacements import OTHER_ORDERS

_USED_TWICE = tuple(permutations(("values", "keys", "queries"), 2))
"""What is taken from another's place, and whose: the likeliest first."""
_PRODUCTS = {"q": "q @ k.transpose(-2, -1)", "k": "q @ k.transpose(-2, -1)", "v": "pattern @ v"}

PROJECTIONS = (
    Mistake(
        "qkv-order",
        "queries, keys and values are taken from other projections than those that are named so",
        "k, q, v = self.qkv(x).chunk(3, dim=-1)",
        "queries, keys and values are taken for each other: weights of any published model give nonsense",
        "q, k, v = self.qkv(x).chunk(3, dim=-1)",
        "project",
        "q_proj",
        tuple(
            Way(f"what is named {', '.join('qkv')} is used as {', '.join(order)}", replaced.order_of(order))
            for order in OTHER_ORDERS
        ),
    ),
    *(
        Mistake(
            f"{taker}-from-{giver}",
            f"the {taker} are made with the projection of the {giver}",
            f"{taker[0]} = self.{giver[0]}_proj(x)",
            f"the projection of the {taker} is never used",
            f"{taker[0]} = self.{taker[0]}_proj(x)",
            "project",
            f"{taker[0]}_proj",
            (
                Way(
                    f"the {taker} are made by the projection of the {giver}",
                    replaced.used_as("qkv".replace(taker[0], giver[0])),
                    is_rare=taker != "values" or giver != "keys",
                ),
            ),
        )
        for taker, giver in _USED_TWICE
    ),
    *(
        Mistake(
            f"{taker}-from-{giver}",
            f"the {giver} take the place of the {taker}",
            _PRODUCTS[taker[0]].replace(taker[0], giver[0]),
            f"the {taker} are never used",
            _PRODUCTS[taker[0]],
            "take",
            "z" if taker == "values" else "qk",
            (
                Way(
                    f"the {giver} take the place of the {taker}",
                    replaced.taken_as("qkv".replace(taker[0], giver[0])),
                    is_rare=True,
                ),
            ),
        )
        for taker, giver in _USED_TWICE
    ),
    Mistake(
        "one-projection",
        "queries, keys and values are all made with one projection",
        "q, k, v = self.q_proj(x), self.q_proj(x), self.q_proj(x)",
        "two projections are never used, and every token attends to what is like itself",
        "q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)",
        "project",
        "q_proj",
        tuple(
            Way(
                f"queries, keys and values are made by the projection of the {name}",
                replaced.used_as(name[0] * 3),
                is_rare=True,
            )
            for name in ("queries", "keys", "values")
        ),
    ),
    *(
        Mistake(
            "projection-missing",
            f"the {name} are the rows themselves, although there is a projection for them",
            f"{name[0]} = x",
            f"the projection of the {name} is never used",
            f"{name[0]} = self.{name[0]}_proj(x)",
            "project",
            name[0],
            (Way(f"the rows are taken for the {name} as they are", replaced.not_projected(name[0]), is_rare=True),),
        )
        for name in ("values", "keys", "queries")
    ),
    Mistake(
        "values-of-queries",
        "the values are made from the querying rows instead of the context",
        "v = self.v_proj(query)",
        "with another text as context, nothing of it reaches the output but its shares",
        "v = self.v_proj(context)",
        "project",
        "v_proj",
        (Way("the values come from the rows that ask", replaced.rows_for("qkq")),),
    ),
    Mistake(
        "values-of-keys",
        "the values are made from the rows that are given for the keys",
        "v = self.v_proj(key)",
        "what is given for the values is never read: wherever keys and values differ, the keys come out",
        "v = self.v_proj(value)",
        "project",
        "v_proj",
        (Way("the values come from the rows of the keys", replaced.rows_for("qkk")),),
    ),
    Mistake(
        "keys-of-values",
        "the keys are made from the rows that are given for the values",
        "k = self.k_proj(value)",
        "wherever keys and values differ, queries are compared with what they are to get",
        "k = self.k_proj(key)",
        "project",
        "k_proj",
        (
            Way("the keys come from the rows of the values", replaced.rows_for("qvv")),
            Way("keys and values come from each other's rows", replaced.rows_for("qvk")),
        ),
    ),
    Mistake(
        "keys-of-queries",
        "the keys are made from the querying rows instead of those that are given for the keys",
        "k = self.k_proj(query)",
        "queries are compared with each other, whatever the keys are",
        "k = self.k_proj(key)",
        "project",
        "k_proj",
        (Way("the keys come from the rows that ask", replaced.rows_for("qqv")),),
    ),
    Mistake(
        "bias-missing",
        "a bias that the layer has is not added",
        "F.linear(x, self.q_proj.weight)",
        "the layer answers as if it had been trained without it",
        "F.linear(x, self.q_proj.weight, self.q_proj.bias)",
        "project",
        "q_proj",
        tuple(
            Way(f"the bias of {' and '.join(of)} is left out", replaced.unbiased(*of))
            for of in (("q",), ("v",), ("q", "k", "v"), ("q", "v"), ("q", "k"), ("k", "v"), ("k",))
        ),
    ),
    Mistake(
        "bias-missing",
        "the bias of the output projection is not added",
        "z @ self.out_proj.weight.T",
        "the layer answers as if it had been trained without it",
        "self.out_proj(z)",
        "project_out",
        "out",
        (Way("the bias of the output projection is left out", replaced.out_unbiased),),
    ),
    Mistake(
        "out-proj-missing",
        "the output projection exists and is not applied",
        "return z.transpose(1, 2).reshape(batch, length, d_model)",
        "the heads are never mixed, and the projection's weights never learn",
        "return self.out_proj(z.transpose(1, 2).reshape(batch, length, d_model))",
        "project_out",
        "concat",
        (Way("the heads side by side are returned as they are", replaced.rows_as_they_are),),
    ),
    Mistake(
        "out-proj-transposed",
        "the weight of the output projection is applied the other way round",
        "z @ self.out_proj.weight",
        "with square weights nothing complains, and weights of any published model give nonsense",
        "z @ self.out_proj.weight.T",
        "project_out",
        "out",
        (Way("the output projection's weight is applied transposed", replaced.out_transposed),),
    ),
    Mistake(
        "projection-transposed",
        "the weights of the projections are applied the other way round",
        "x @ self.q_proj.weight",
        "with square weights nothing complains, and weights of any published model give nonsense",
        "x @ self.q_proj.weight.T",
        "project",
        "q_proj",
        (Way("the weights of queries, keys and values are applied transposed", replaced.transposed_inputs),),
    ),
    Mistake(
        "rope-pairing",
        "rotary positions pair columns in another way than their angles, or the weights, are made for",
        "angles = torch.cat([a, a], -1) with x[..., ::2], x[..., 1::2] rotated",
        "columns are turned by angles that are not theirs: scores no longer depend on the distance alone",
        "rotate_half with torch.cat([a, a], -1), or neighbours with a.repeat_interleave(2, -1)",
        "turn",
        "q",
        (
            Way(
                "neighbouring columns are turned by angles laid out for halves",
                replaced.turned_as("interleaved", "interleaved", "half"),
            ),
            Way(
                "halves are turned by angles laid out for neighbouring columns",
                replaced.turned_as("half", "half", "interleaved"),
            ),
            Way("queries are turned by halves and keys by neighbours", replaced.turned_as("half", "interleaved", None)),
            Way("queries are turned by neighbours and keys by halves", replaced.turned_as("interleaved", "half", None)),
            Way("columns are paired in the other way than is meant", replaced.turned_other),
        ),
    ),
    Mistake(
        "rope-of-values",
        "the values are turned by their places like queries and keys",
        "q, k, v = apply_rotary(q), apply_rotary(k), apply_rotary(v)",
        "what a token hands over depends on where it stands",
        "q, k = apply_rotary(q), apply_rotary(k)  # v stays as it is",
        "turn_values",
        "v",
        (Way("the values are turned too", replaced.turned_values),),
    ),
    Mistake(
        "rope-of-queries-only",
        "queries are turned by their places, keys are not",
        "q = apply_rotary(q)  # and k is left as it is",
        "scores depend on where the query stands instead of on the distance",
        "q, k = apply_rotary(q), apply_rotary(k)",
        "turn",
        "k",
        (Way("the keys are not turned", replaced.turned_queries),),
    ),
    Mistake(
        "rope-of-keys-only",
        "keys are turned by their places, queries are not",
        "k = apply_rotary(k)  # and q is left as it is",
        "scores depend on where the key stands instead of on the distance",
        "q, k = apply_rotary(q), apply_rotary(k)",
        "turn",
        "q",
        (Way("the queries are not turned", replaced.turned_keys),),
    ),
    Mistake(
        "rope-offset",
        "the places of queries and keys do not begin at the same number",
        "q, k = rotate(q, places), rotate(k, places + 1)",
        "a token takes its neighbour for itself: with weights of any published model scores are those of other distances",
        "q, k = rotate(q, places), rotate(k, places)",
        "turn",
        "q",
        (
            Way("queries are turned one place too far", replaced.turned_off_by(1)),
            Way("keys are turned one place too far", replaced.turned_off_by(-1)),
        ),
    ),
    Mistake(
        "qk-norm-shared",
        "queries and keys are normed by one of the two norms, and the other is never used",
        "q, k = self.q_norm(q), self.q_norm(k)",
        "the gain that was learned for the other has no effect",
        "q, k = self.q_norm(q), self.k_norm(k)",
        "norm",
        "q",
        (
            Way("the keys are normed by the norm of the queries", replaced.normed_as("q", "q"), ("k",)),
            Way("the queries are normed by the norm of the keys", replaced.normed_as("k", "k")),
        ),
    ),
    Mistake(
        "qk-norm-of-one",
        "queries or keys alone are normed, and the norm of the other is never used",
        "q = self.q_norm(q)  # and k is left as it is",
        "the size of scores grows with what is not normed",
        "q, k = self.q_norm(q), self.k_norm(k)",
        "norm",
        "q",
        (
            Way("the keys are not normed", replaced.normed_as("q", None), ("k",)),
            Way("the queries are not normed", replaced.normed_as(None, "k")),
        ),
    ),
    Mistake(
        "rope-axis",
        "rotary positions count heads instead of tokens",
        "places = torch.arange(q.shape[1])  # q is [batch, head, query, d_head]",
        "all tokens are turned alike: the order of the text has no effect",
        "places = torch.arange(q.shape[-2])  # or turn before the transpose",
        "turn",
        "q",
        (Way("the number of the head is taken for the place", replaced.turned_by_head),),
    ),
    Mistake(
        "rope-rates",
        "the angles of rotary positions do not fall from pair to pair",
        "theta ** (torch.arange(0, d, 2) / d)  # without 1 /",
        "neighbouring places cannot be told from far ones",
        "1.0 / theta ** (torch.arange(0, d, 2) / d)",
        "turn",
        "q",
        (
            Way("the angles grow from pair to pair by theta^(2j/d)", replaced.turned_with(torch.reciprocal)),
            Way("all pairs are turned by one angle", replaced.turned_with(torch.ones_like)),
        ),
    ),
    Mistake(
        "rope-sign",
        "queries and keys are turned in opposite directions",
        "q * cos + rotate(q) * sin, k * cos - rotate(k) * sin",
        "scores depend on the sum of two places instead of their difference",
        "t * cos + rotate(t) * sin for both",
        "turn",
        "k",
        (Way("keys are turned backwards", replaced.turned_back),),
    ),
    Mistake(
        "rope-without-minus",
        "the two columns of a pair are turned with the same sign",
        "rotate_half: torch.cat([x2, x1], dim=-1)",
        "it is no rotation: queries and keys grow and shrink with their places",
        "rotate_half: torch.cat([-x2, x1], dim=-1)",
        "turn",
        "q",
        (Way("no column of a pair is turned with a minus", replaced.turned_one_way, is_rare=True),),
    ),
    Mistake(
        "dropout-in-eval",
        "dropout acts although the module is in evaluation",
        "F.dropout(pattern, self.p)  # or F.scaled_dot_product_attention(…, dropout_p=self.p)",
        "the same input gives another output each time",
        "F.dropout(pattern, self.p, training=self.training)",
        None,
        "pattern",
        fix_in_torch="F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)",
    ),
    Mistake(
        "dropout-not-rescaled",
        "what dropout keeps is not divided by 1 − p",
        "pattern * (torch.rand_like(pattern) > p)",
        "outputs in training are smaller than in evaluation by 1 − p",
        "F.dropout(pattern, p, training=self.training)",
        None,
        "pattern",
    ),
    Mistake(
        "state-kept-between-calls",
        "the module remembers earlier calls: the same input gives another output later",
        "self.cache = torch.cat([self.cache, k], dim=1)",
        "what one text gives depends on what was asked before",
        "pass the cache in and out: forward(x, past) -> out, past",
        None,
        "k",
    ),
)
