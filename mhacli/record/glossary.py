"""Every term on screens with its explanation: columns, head types, sites, mistakes, signs and concepts.

Columns, head types and sites come from the tables behind the screens. Mistakes come from mistakes.json, which
docs/reading.py writes from `mhacli.attention.mistakes` because that package needs torch. docs/READING.md is generated
from here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Literal, get_args

from mhacli.commands.check.result import PROBES
from mhacli.facts import Facts
from mhacli.record.columns import (
    BENCH_COLUMNS,
    DECODE_COLUMNS,
    DIFF_COLUMNS,
    DOCTOR_COLUMNS,
    EFFECT_COLUMNS,
    STEP_COLUMNS,
    ColumnText,
)
from mhacli.record.heads import (
    CERTAIN_ENOUGH,
    HEAD_TYPES,
    SINK_LIFT,
    SINK_PART,
    SINK_QUERIES,
    SINK_SHARE,
    SINK_TOKENS,
    STATISTICS,
    UNTYPED,
)
from mhacli.settings import Config
from mhacli.sites import SITES

Group = Literal[
    "concept", "sign", "column", "head type", "bench", "decode", "effect", "diff", "doctor", "site", "probe", "mistake"
]
GROUPS: tuple[Group, ...] = get_args(Group)
"""`column` has the columns of head tables; the groups of commands have those of their tables."""
TABLES: Mapping[Group, Mapping[str, ColumnText]] = {
    "bench": BENCH_COLUMNS,
    "decode": {**STEP_COLUMNS, **DECODE_COLUMNS},
    "effect": EFFECT_COLUMNS,
    "diff": DIFF_COLUMNS,
    "doctor": DOCTOR_COLUMNS,
}
_MOST_SUGGESTED, _ALIKE = 3, 0.75
"""The most suggestions for a misspelt term, and the least fraction of letters in common."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term with its explanation. `also` are synonyms, JSON names and headings included.

    A mistake has its expression (`wrong`) and the correct one (`right`).
    """

    name: str
    group: Group
    explanation: str
    formula: str = ""
    source: str = ""
    wrong: str = ""
    right: str = ""
    also: tuple[str, ...] = ()


def _concept(name: str, explanation: str, formula: str = "", source: str = "", *, also: tuple[str, ...] = ()) -> Term:
    return Term(name=name, group="concept", explanation=explanation, formula=formula, source=source, also=also)


CONCEPTS = (
    _concept(
        "attention weight",
        "How much of its attention a query gives to one key: a number from 0 to 1, one cell of the attention "
        "pattern. The weights of a query sum to 1 over the keys that it can see. The head output is the sum "
        "of the values of the keys, each multiplied by its weight.",
        "p[i, j] = exp(s[i, j]) / Σ_k exp(s[i, k])",
        "Vaswani et al. 2017, equation 1",
        also=("weight", "weights", "share", "attention probability", "attention weights"),
    ),
    _concept(
        "attention pattern",
        "The attention weights of one head as a matrix: a row for each query, a column for each key. Read a "
        "row from left to right to see what that token attends to. A causal head has weights only on and "
        "below the diagonal.",
        "pattern = softmax(scores) over the keys",
        also=("attention matrix", "attn_weights", "softmax", "exp(score − max)"),
    ),
    _concept(
        "attention scores",
        "What the softmax reads: the dot products of queries and keys after scaling, softcap, additive bias "
        "and mask. A larger score gives a larger weight. A masked cell has the score −∞ and the weight 0. The scale is 1/√d_head "
        "if nothing else is stated.",
        "scores = scale · q kᵀ + bias",
        also=("logits", "score", "scale"),
    ),
    _concept(
        "query",
        "The token that attends: a row of the pattern. Each head computes a query vector for every token, "
        "which is compared with the keys of the tokens that it can see.",
        "q = x W_qᵀ + b_q",
        also=("queries", "q", "row"),
    ),
    _concept(
        "key",
        "The token that is attended to: a column of the pattern. Each head computes a key vector for every "
        "token. The dot product of a query and a key says how well they match.",
        "k = x W_kᵀ + b_k",
        also=("keys", "k", "column"),
    ),
    _concept(
        "value",
        "The vector that a token contributes where it is attended to. The head output of a query is the "
        "weighted sum of the values.",
        "v = x W_vᵀ + b_v",
        also=("values", "v"),
    ),
    _concept(
        "head output",
        "The output of one head before the output projection: for each query the weighted sum of the values.",
        "z = pattern v",
        also=("z", "context vector"),
    ),
    _concept(
        "head",
        "One of several attentions that run side by side in a layer, each with its own queries, keys and "
        "values of width d_head. Their outputs are joined and projected to the layer's output. Heads are "
        "counted from 0; layer.head, such as 5.11, is head 11 of layer 5.",
        source="Vaswani et al. 2017, section 3.2.2",
        also=("heads", "n_heads", "query head", "d_head", "d_k", "layer.head", "layer"),
    ),
    _concept(
        "kv head",
        "A head of keys and values. With grouped queries several query heads read the same kv head, so the "
        "cache is smaller. Query head h reads kv head h // (n_heads / n_kv_heads).",
        source="Ainslie et al. 2023, GQA",
        also=("kv heads", "n_kv_heads", "grouped queries", "gqa", "mqa"),
    ),
    _concept(
        "causal",
        "With a causal mask a token sees itself and earlier tokens only. The weights of masked keys are "
        "exactly 0, and are printed as 0; a small weight is printed as .00. --window, --prefix and "
        "--documents mask keys too.",
        also=("causal mask", "mask", "masked", "visible"),
    ),
    _concept(
        "uniform attention",
        "What the numbers would be if every query gave all keys that it sees the same weight. The last row "
        "of the table shows it, because long texts and causal masks alone change most statistics. Compare a "
        "head with this row, not with 0.",
        also=("if uniform", "baseline"),
    ),
    _concept(
        "sink",
        "A key that many queries attend to much more than they would with uniform attention, often the first "
        f"token. mha calls a key a sink if it receives at least {100 * SINK_SHARE:.0f} % of all attention and "
        f"{SINK_LIFT:g} times what uniform attention would give it, and if more than {100 * SINK_PART:.0f} % "
        f"of the queries that see it, and at least {SINK_QUERIES}, give it {SINK_LIFT:g} times their uniform weight. Trained "
        "models use sinks to attend to nothing in particular.",
        source="Xiao et al. 2023, StreamingLLM; Gu et al. 2024, When Attention Sink Emerges in Language Models",
        also=("sink key", "attention sink", "sinks"),
    ),
    _concept(
        "sink logit",
        "A learned number per head that takes part in the softmax like the score of one more key, but has no value. "
        "It takes a part of the attention, so the weights of a row sum to less than 1. The column s_aux shows that part.",
        "p[i, j] = exp(s[i, j]) / (exp(sink logit) + Σ_k exp(s[i, k]))",
        "gpt-oss; Xiao et al. 2023",
        also=("learned sink", "σ"),
    ),
    _concept(
        "softcap",
        "A tanh that keeps scores between −c and c before the mask and the softmax.",
        "c · tanh(s / c)",
        "Gemma 2 technical report, 2024",
    ),
    _concept(
        "RoPE",
        "Rotary position embedding: pairs of numbers in queries and keys are rotated by an angle that grows "
        "with the position. Their dot product then depends on the distance of the two tokens.",
        source="Su et al. 2021, RoFormer",
        also=("rotary positions", "rotary"),
    ),
    _concept(
        "ALiBi",
        "A bias that lowers the score of a key in proportion to its distance; each head has its own slope.",
        "scores = scale · q kᵀ − m[h] · |i − j|",
        "Press et al. 2021",
    ),
    _concept(
        "log-sum-exp",
        "The logarithm of the denominator of the softmax. mha heads recomputes any weight from it, so that no T × T matrix "
        "is stored.",
        "lse[i] = ln Σ_k exp(s[i, k])",
        "Dao et al. 2022, FlashAttention",
        also=("lse",),
    ),
    _concept(
        "KV cache",
        "The keys and values of earlier tokens, stored so that each step computes only those of the new token. mha "
        "decode shows what each step reads and how large the cache is.",
        source="Shazeer 2019, section 2.4",
        also=("cache", "KV cache per token"),
    ),
    _concept(
        "token",
        "The unit of text that a model reads: a word, a part of a word or a mark. --tokens lists them: index is the position, "
        "id the number in the vocabulary, piece the tokenizer's own name, bytes its UTF-8 bytes, offsets its characters.",
        also=("index", "id", "piece", "bytes", "offsets", "special"),
    ),
    _concept(
        "timings",
        "The times of mha run --timings. The first run includes costs that occur only once, such as allocating memory; median "
        "and IQR are those of the other runs. of total is the median of the stage divided by that of the whole run.",
        also=("first run", "stage", "of total"),
    ),
    _concept(
        "route",
        "One of three common formulations of multi-head attention. separate: one matrix each for q, k and v. fused: one matrix "
        "for all three. per-head: small matrices for each head. mha trace computes all of them; the table shows the largest "
        "difference of the output from that of separate.",
        also=("routes", "separate", "fused", "per-head", "largest difference"),
    ),
    _concept(
        "agree",
        "In mha scan, the percentage of documents in which the head has this type, judged by that document alone. Beside it "
        "stands the statistic that defines the type: its mean over the documents, the 95 % interval of this mean, and the "
        "values between which 90 % of the documents lie.",
        also=("spread", "statistic", "5 to 95 % of documents"),
    ),
    _concept(
        "span",
        "A named part of the text. With two or more spans mha reports how much attention the queries of each "
        "give to the keys of each, next to the uniform baseline, so that long spans are not favoured.",
        also=("spans", "--span"),
    ),
    _concept(
        "self-check",
        "Every run recomputes the output of attention from the numbers on the screen and compares it with "
        "the output of the layer. The line shows the largest difference and the tolerance for the dtype. If "
        "it fails, mha exits with code 3.",
        also=("tolerance",),
    ),
    _concept(
        "not verified",
        "A layer of a checkpoint whose numbers mha could not confirm: a check failed, or the model passes "
        "its attention function a keyword that mha does not know. Its numbers are shown with this warning.",
        also=("verified",),
    ),
    _concept(
        "cell",
        "One entry of the pattern of a head: the attention weight that one query gives to one key. mha trace --cell "
        "HEAD,QUERY,KEY shows how it is computed; all three are counted from 0.",
        also=("--cell",),
    ),
    _concept(
        "nats",
        "The unit of entropy with the natural logarithm. A query that gives n keys the same weight has an entropy of ln n nats; "
        "1 nat is 1.44 bits.",
        also=("nat",),
    ),
    _concept(
        "position",
        "The index of a token in its text, counted from 0. The type positional depends on the positions of query and key, not on "
        "their tokens.",
        also=("pos", "positions"),
    ),
    _concept(
        "IQR",
        "The interquartile range: the distance between the first and the third quartile of the measured "
        "times. Half of the runs lie within it.",
        also=("interquartile range",),
    ),
    _concept(
        "noise",
        "How far repeated measurements of the same thing differ. mha effect compares two untouched rows of a batch: a change "
        "that is not larger is printed as 0.",
        also=("floor", "noise floor"),
    ),
    _concept(
        "verdict",
        "The answer of a command in one word. mha check: right, wrong, or unknown where it cannot tell. mha doctor: healthy or "
        "unhealthy. mha diff: agree, differ, or nothing if nothing can be compared. mha bench --compare: slower, faster or "
        "similar. A mistake is proven if the reference with this mistake gives the same output as the code, within the "
        "tolerance; otherwise a probe shows it.",
        also=("right", "wrong", "unknown", "without a verdict", "proven", "proof"),
    ),
    _concept(
        "axes",
        "The dimensions of a tensor by name and in order, each with its size: batch, head, query, key, d_head, d_v, d_model. "
        "head·d_head is the heads side by side.",
        also=("axis", "batch", "shape", "d_model", "d_v"),
    ),
    _concept(
        "residue",
        "The part of the logit that the direct contributions of embedding, heads, MLPs and biases do not explain. If it exceeds "
        "its tolerance, the logit is not the sum of these parts, and direct effects are not verified.",
        "residue = logit − (embedding + heads + MLPs + biases)",
    ),
    _concept(
        "stands out",
        "In a table of mha heads, the attention weights with the largest ratio to uniform attention: query, key, weight, and "
        "the ratio after ×.",
        "× = p[i, j] · number of keys that i sees",
        also=("×", "× uniform", "outstanding cells"),
    ),
    _concept(
        "shade",
        "The colour or character of a cell; it shows the attention weight. The caption names the scale and its range: linear, "
        "proportional to the weight; log, over three decades; or rank, by the order of the weights alone.",
        also=("shades", "scale of shades", "linear", "log", "rank scale", "--map-scale"),
    ),
    _concept(
        "map",
        "In a record of mha heads, the attention pattern reduced to blocks: a cell is the attention that the queries of a block "
        "give, on average, to all keys of a block. uniform_map is the same for uniform attention.",
        also=("uniform_map",),
    ),
    _concept(
        "received",
        "In a record of mha heads, how much attention each key receives: the sum of its weights over all queries. "
        "uniform_received is the same for uniform attention.",
        "received[j] = Σ_i p[i, j]",
        also=("uniform_received", "receives most"),
    ),
    _concept(
        "profile",
        "In a record of mha heads, how the attention of a head is distributed over the distance between query and key, in steps "
        "that double. uniform_profile is the same for uniform attention.",
        also=("distance →", "uniform_profile"),
    ),
)


def _sign(name: str, explanation: str, *, also: tuple[str, ...] = ()) -> Term:
    return Term(name=name, group="sign", explanation=explanation, also=also)


SIGNS = (
    _sign(
        "*",
        "The largest attention weight of its row. The column strongest names the key where columns are hidden.",
        also=("row maximum", "star"),
    ),
    _sign(
        "0", "A masked cell: this query may not attend to this key, and the weight is exactly 0. A small weight is .00."
    ),
    _sign(
        ".00",
        "A visible cell whose weight is too small for the printed decimals; --precision shows more. A masked cell is 0.",
    ),
    _sign(
        "Σ",
        "The sum of a row of attention weights. It is 1 for a query that sees a key, 0 for a query that sees "
        "none, and less than 1 if a sink logit or dropout takes a part.",
        also=("row sum", "sum"),
    ),
    _sign(
        "strongest",
        "The key with the largest weight of a query: its position and token. In the matrix * marks the same cell. If two "
        "keys have nearly the same weight, rounding decides; mha diff reports another key only if the weights differ too.",
        also=("strongest_key",),
    ),
    _sign("⋮", "Rows that do not fit on the screen. The line says how many; --all shows them.", also=("…",)),
    _sign(
        "‹pad›",
        "Padding: it fills up a shorter text of a batch. It is masked, and attends to nothing.",
        also=("pad",),
    ),
    _sign("–", "A number that does not exist: no query counts, or the value is not finite.", also=("dash",)),
    _sign(
        "≈",
        "About: a number that is estimated, or rounded more than the others. In mha bench it marks a time that is not certainly "
        "slower, or not certainly changed: the interval of its ratio contains 1.",
        also=("about", "approximately"),
    ),
    _sign(
        "?",
        "A number that is not finite: NaN or infinite.",
        also=("nan",),
    ),
    _sign("~", "In mha bench a time of less than a millisecond: mostly the cost of calling torch, not of attention."),
    _sign(
        "!",
        "In mha bench an unfused fallback where a fused kernel was expected; in mha doctor a number beyond its limit.",
    ),
)


@cache
def terms() -> tuple[Term, ...]:
    """Every term, group by group."""
    return (*CONCEPTS, *SIGNS, *_columns(), *_head_types(), *_of_commands(), *_sites(), *_probes(), *_mistakes())


def of_group(word: str) -> tuple[Term, ...]:
    """The terms of a group, named in the singular or plural; empty for any other word."""
    groups = {name: group for group in GROUPS for name in (group, f"{group}s")}
    group = groups.get(_plain(word))
    return tuple(term for term in terms() if term.group == group)


def meanings(word: str) -> tuple[Term, ...]:
    """The terms that a word names, ignoring case, spaces, hyphens and underscores; empty for an unknown word."""
    exact = tuple(term for term in terms() if word.strip() in (term.name, *term.also))
    return exact or tuple(term for term in terms() if _plain(word) in map(_plain, (term.name, *term.also)))


def similar(word: str) -> tuple[str, ...]:
    """The terms with the most similar spelling, then terms of several words that contain the word."""
    names = {_plain(name): name for term in terms() for name in (*term.also, term.name)}
    near = get_close_matches(_plain(word), names, _MOST_SUGGESTED, _ALIKE)
    words = {part: None for term in terms() for part in _plain(term.name).split()}
    nearest = get_close_matches(_plain(word), words, 1, _ALIKE)
    longer = [term.name for term in terms() if not {*nearest}.isdisjoint(_plain(term.name).split())]
    return tuple(dict.fromkeys([*(names[name] for name in near), *longer]))[:_MOST_SUGGESTED]


def _plain(word: str) -> str:
    return " ".join(word.casefold().replace("−", "-").replace("-", " ").replace("_", " ").split()) or word


def _others(name: str, *words: str) -> tuple[str, ...]:
    return tuple(word for word in dict.fromkeys(words) if word != name)


_SHORTER = {"certainty": ("excess",)}
"""Shorter names of columns, by field, for screens that list several of them."""


def _columns() -> Iterator[Term]:
    for row in STATISTICS:
        heading = row.heading.format(sink_tokens=SINK_TOKENS)
        yield Term(
            name=heading or row.name,
            group="column",
            explanation=row.explanation,
            formula=row.formula,
            source=row.source,
            also=_others(heading or row.name, row.name, row.field, *_SHORTER.get(row.field, ())),
        )


def _head_types() -> Iterator[Term]:
    for kind, head_type in HEAD_TYPES.items():
        rule = (
            f" The head has this type if the excess of that weight over uniform attention is at least {CERTAIN_ENOUGH} and the "
            "largest of all types."
        )
        is_weight = kind not in UNTYPED
        yield Term(
            name=head_type.name,
            group="head type",
            explanation=head_type.explanation + rule * is_weight,
            also=_others(head_type.name, kind, head_type.short),
        )


def _of_commands() -> Iterator[Term]:
    for group, columns in TABLES.items():
        for column in columns.values():
            yield Term(name=column.heading, group=group, explanation=column.explanation, also=column.also)


def _sites() -> Iterator[Term]:
    facts = Facts(Config(causal=True).resolved(), batch=1, q_len=6, k_len=6)
    for site in SITES.values():
        meaning, axes = site.meaning_for(facts), " · ".join(site.axes_for(facts))
        yield Term(
            name=site.name,
            group="site",
            explanation=f"{meaning[:1].upper()}{meaning[1:]}. Its axes are {axes}.",
            formula=site.in_general or site.formula_for(facts),
        )


def _probes() -> Iterator[Term]:
    for name, explanation in PROBES.items():
        yield Term(name=name, group="probe", explanation=explanation)


def _mistakes() -> Iterator[Term]:
    mistakes = json.loads(
        resources.files("mhacli.commands.check").joinpath("mistakes.json").read_text(encoding="utf-8")
    )
    for code, of in mistakes.items():
        sentences = (of["message"], of["effect"])
        yield Term(
            name=code,
            group="mistake",
            explanation=" ".join(f"{text[:1].upper()}{text[1:]}." for text in sentences),
            wrong=of["wrong"],
            right=of["right"],
        )
    for option, fact in (("heads", "number of heads"), ("scale", "factor of the scores")):
        yield Term(
            name=f"{option}-not-as-stated",
            group="mistake",
            explanation=f"The code is understood, and its {fact} is not the one that --{option} states. "
            "Either of the two may be the one that was meant.",
        )
