"""The variants of attention: effect, purpose and source of each.

The walkthrough prints them, and docs/ATTENTION.md shows each with the command that draws it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mhacli.facts import Facts
from mhacli.settings import Config


@dataclass(frozen=True)
class Variant:
    """One variant. `used` says whether a run uses it, and `what` describes it with the run's numbers."""

    name: str
    used: Callable[[Facts], bool]
    what: Callable[[Facts], str]
    why: str
    source: str


def variants(facts: Facts) -> tuple[Variant, ...]:
    """The variants that a run uses, in the order of the computation."""
    return tuple(variant for variant in VARIANTS if variant.used(facts))


def mask_rules(facts: Facts) -> tuple[str, ...]:
    """The rules of the mask as clauses. All must hold; a clause may name an exception."""
    config = facts.config
    rules = ["no token sees a later one"] if config.causal or config.prefix is not None else []
    if config.window is not None:
        kept = f", and {_first(config.sink)}" if config.sink else ""
        rules.append(f"keys from {config.window[0]} left to {config.window[1]} right of the query{kept}")
    rules += [] if config.prefix is None else [f"except that all see {_first(config.prefix)}"]
    rules += ["no token sees another document"] if facts.packed else []
    rules += ["padding is never seen"] if facts.padded else []
    rules += ["nothing where the score bias is −∞"] if config.score_bias is not None else []
    return tuple(rules)


def positions_name(config: Config) -> str:
    """The usual name of the position scheme, with its numbers.

    >>> positions_name(Config(positions="rope"))
    'rope (half-rotation, θ 10000)'
    """
    styles = {"rope": "half-rotation", "rope-interleaved": "interleaved"}
    style = styles.get(config.positions)
    return config.positions if style is None else f"rope ({style}, θ {config.rope_theta:g})"


def _first(count: int | None) -> str:
    return "the first token" if count == 1 else f"the first {count} tokens"


def _positions(*names: str) -> Callable[[Facts], bool]:
    return lambda f: f.config.positions in names


MULTI_QUERY = Variant(
    "multi-query attention",
    lambda f: f.config.n_kv_heads == 1 < f.config.n_heads,
    lambda f: f"all {f.config.n_heads} query heads share one key and value head",
    "makes the KV cache as small as possible, so decoding reads the least",
    "Shazeer 2019, Fast Transformer Decoding: One Write-Head is All You Need, section 3",
)
GROUPED_QUERY = Variant(
    "grouped-query attention",
    lambda f: 1 < (f.config.n_kv_heads or f.config.n_heads) < f.config.n_heads,
    lambda f: (
        f"{f.config.n_heads} query heads, {f.config.heads_per_kv_head} to each of {f.config.n_kv_heads} key and value heads"
    ),
    "makes the KV cache smaller, at nearly the quality of one key and value head per query head",
    "Ainslie et al. 2023, GQA, section 2.2",
)

VARIANTS = (
    Variant(
        "random input",
        lambda f: f.config.random is not None,
        lambda f: f"{f.config.distribution} numbers of shape [{f.batch}, {f.q_len}, {f.size('d_input')}]",
        "shows shapes and layouts without a text or a tokenizer",
        "torch.randn and torch.rand, drawn from --seed",
    ),
    Variant(
        "projections from another width",
        lambda f: f.input_axis == "d_input",
        lambda f: f"rows of {f.size('d_input')} numbers are projected into a layer of d_model {f.config.d_model}",
        "reads the features of another model without a matrix in between",
        "Jaegle et al. 2021, Perceiver, section 3.1; Vaswani et al. 2017, section 3.2.2",
    ),
    Variant(
        "single-head attention",
        lambda f: f.config.n_heads == 1,
        lambda f: f"one head: d_head {f.config.d_head} for queries and keys, d_v {f.config.d_v} for values",
        "shows the formula without splitting and joining heads",
        "Vaswani et al. 2017, section 3.2.1, equation 1",
    ),
    Variant(
        "no output projection",
        lambda f: not f.config.out_proj,
        lambda f: f"the heads side by side, {f.size('head·d_v')} numbers per token, are the result",
        "keeps the outputs of the heads apart, each in its own columns",
        "Vaswani et al. 2017, equation 1, without the W^O of section 3.2.2",
    ),
    MULTI_QUERY,
    GROUPED_QUERY,
    Variant(
        "sinusoidal positions",
        _positions("sinusoidal"),
        lambda _: "sines and cosines of growing wavelength are added to the token vectors",
        "encodes positions without parameters, also beyond the lengths seen in training",
        "Vaswani et al. 2017, section 3.5",
    ),
    Variant(
        "learned positions",
        _positions("learned"),
        lambda f: f"one learned vector for each of {f.config.max_positions} positions is added",
        "lets the model learn what a position should contribute, up to a fixed length",
        "Gehring et al. 2017, Convolutional Sequence to Sequence Learning, section 3.1; Devlin et al. 2018, BERT",
    ),
    Variant(
        "rotary positions, half-rotation",
        _positions("rope"),
        lambda f: f"column j is rotated with column j + {(f.config.d_head or 0) // 2}, θ {f.config.rope_theta:g}",
        "makes scores depend on the distance between two tokens, and adds nothing to the token vectors",
        "Su et al. 2021, RoFormer, equation 34; pairing of the code of Black et al. 2022, GPT-NeoX-20B (rotate_half)",
    ),
    Variant(
        "rotary positions, interleaved",
        _positions("rope-interleaved"),
        lambda f: f"columns 2j and 2j + 1 are rotated together, θ {f.config.rope_theta:g}",
        "is the pairing of the paper; weights trained with one pairing give wrong results with the other",
        "Su et al. 2021, RoFormer, equation 34",
    ),
    Variant(
        "linear biases (ALiBi)",
        _positions("alibi"),
        lambda _: "each head subtracts its slope times the distance from the score",
        "favours near tokens, and lets texts be longer than those in training",
        "Press et al. 2021, Train Short, Test Long, section 3",
    ),
    Variant(
        "no positions",
        _positions("none"),
        lambda _: "nothing encodes the position of a token",
        "shows what attention alone can know: without a mask, a bag of tokens",
        "Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization in Transformers",
    ),
    Variant(
        "cross-attention",
        lambda f: f.cross,
        lambda f: f"{f.q_len} queries of one text, {f.k_len} keys and values of another; padding masked on both sides",
        "lets a decoder read an encoder's output for another text",
        "Vaswani et al. 2017, section 3.2.3",
    ),
    Variant(
        "causal mask",
        lambda f: f.config.causal and f.config.prefix is None,
        lambda _: "a query sees itself and earlier tokens",
        "allows training on every position at once and generating from left to right",
        "Vaswani et al. 2017, section 3.2.3",
    ),
    Variant(
        "prefix mask",
        lambda f: f.config.prefix is not None,
        lambda f: f"all see {_first(f.config.prefix)}, each other included; what follows is causal",
        "reads a question in both directions and still generates its answer token by token",
        "Raffel et al. 2020, T5, section 3.2.1",
    ),
    Variant(
        "sliding window",
        lambda f: f.config.window is not None,
        lambda f: "from {} keys left to {} right of the query".format(*(f.config.window or (0, 0))),
        "makes the time grow with the window instead of the text; a cache keeps no more than the window",
        "Beltagy et al. 2020, Longformer, section 3.1",
    ),
    Variant(
        "attention sinks",
        lambda f: f.config.sink is not None,
        lambda f: f"all see {_first(f.config.sink)}, outside the window too",
        "heads put attention that they do not need on the first tokens, and fail when these leave the window",
        "Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks, section 3",
    ),
    Variant(
        "packed documents",
        lambda f: f.packed,
        lambda _: "documents in one row see only themselves, and count positions from their own beginning",
        "fills a row with short texts without padding; each gives the same result as alone",
        "Krell et al. 2021, Efficient Sequence Packing without Cross-contamination, section 3",
    ),
    Variant(
        "padding",
        lambda f: f.padded,
        lambda f: f"shorter sequences are filled up on the {f.config.padding}; padding sees nothing and is not seen",
        "puts texts of different lengths in a batch; each gives the same result as alone",
        "Vaswani et al. 2017, section 3.2.3 (masking with −∞)",
    ),
    Variant(
        "own scale",
        lambda f: f.config.has_custom_scale,
        lambda f: f"dot products are multiplied by {f.config.scale:g} instead of {(f.config.d_head or 1) ** -0.5:.4g}",
        "some models are trained with another temperature, or with none",
        "Vaswani et al. 2017, section 3.2.1, on what the scale is for",
    ),
    Variant(
        "softcap",
        lambda f: f.config.softcap is not None,
        lambda f: f"scores are limited to ±{f.config.softcap:g} by a tanh",
        "keeps scores from growing without limit, so training stays stable",
        "Gemma Team 2024, Gemma 2, section 2",
    ),
    Variant(
        "additive score bias",
        lambda f: f.config.score_bias is not None,
        lambda f: f"numbers from {f.config.score_bias} are added to the scores",
        "brings in anything known about a pair of positions, learned or given, before the softmax",
        "Shaw et al. 2018, Self-Attention with Relative Position Representations; Raffel et al. 2020, T5, section 2.1",
    ),
    Variant(
        "attention dropout",
        lambda f: f.config.train,
        lambda f: (
            f"each weight is 0 with probability {f.config.dropout:g}, the others × {1 / (1 - f.config.dropout):.4g}"
        ),
        "keeps training from relying on any single key; rows sum to 1 only on average",
        "Srivastava et al. 2014, Dropout, section 10",
    ),
)
"""Every variant, in the order of the computation."""
