"""The variants of attention that a run uses: what each does, why one would use it, and who described it.

The walkthrough tells them, and docs/ATTENTION.md shows each with the command that draws it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mhacli.spec.config import Config
from mhacli.spec.facts import Facts


@dataclass(frozen=True)
class Variant:
    """One choice about attention. `used` says whether a run makes it, `what` describes it with the run's numbers."""

    name: str
    used: Callable[[Facts], bool]
    what: Callable[[Facts], str]
    why: str
    source: str


def variants(facts: Facts) -> tuple[Variant, ...]:
    """The variants that a run uses, in the order in which the computation meets them."""
    return tuple(variant for variant in VARIANTS if variant.used(facts))


def mask_rules(facts: Facts) -> tuple[str, ...]:
    """The rules of the mask, each as a clause; all must hold, but for the exception that one of them names."""
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
    """The position scheme as people call it, with its numbers.

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
    "the cache of keys and values is as small as it can be, so decoding reads the least",
    "Shazeer 2019, Fast Transformer Decoding: One Write-Head is All You Need, section 3",
)
GROUPED_QUERY = Variant(
    "grouped-query attention",
    lambda f: 1 < (f.config.n_kv_heads or f.config.n_heads) < f.config.n_heads,
    lambda f: (
        f"{f.config.n_heads} query heads, {f.config.heads_per_kv_head} to each of {f.config.n_kv_heads} key and value heads"
    ),
    "decoding reads a smaller cache, at nearly the quality of one key and value head per query head",
    "Ainslie et al. 2023, GQA, section 2.2",
)

VARIANTS = (
    Variant(
        "random input",
        lambda f: f.config.random is not None,
        lambda f: f"{f.config.distribution} numbers of shape [{f.batch}, {f.q_len}, {f.size('d_input')}]",
        "shapes and layouts can be studied without a text or a tokenizer",
        "torch.randn and torch.rand, drawn from --seed",
    ),
    Variant(
        "projections from another width",
        lambda f: f.input_axis == "d_input",
        lambda f: f"rows of {f.size('d_input')} numbers are projected into a layer of d_model {f.config.d_model}",
        "the layer can read features that another model made, without a matrix in between",
        "Jaegle et al. 2021, Perceiver, section 3.1; Vaswani et al. 2017, section 3.2.2",
    ),
    Variant(
        "single-head attention",
        lambda f: f.config.n_heads == 1,
        lambda f: f"one head: d_head {f.config.d_head} for queries and keys, d_v {f.config.d_v} for values",
        "the formula can be seen without the cutting and joining of heads",
        "Vaswani et al. 2017, section 3.2.1, equation 1",
    ),
    Variant(
        "no output projection",
        lambda f: not f.config.out_proj,
        lambda f: f"the heads side by side, {f.size('head·d_v')} numbers per token, are the result",
        "what each head says stays apart, in columns of its own",
        "Vaswani et al. 2017, equation 1, without the W^O of section 3.2.2",
    ),
    MULTI_QUERY,
    GROUPED_QUERY,
    Variant(
        "sinusoidal positions",
        _positions("sinusoidal"),
        lambda _: "waves of growing length are added to the rows",
        "a place is told without parameters, also beyond the lengths that training saw",
        "Vaswani et al. 2017, section 3.5",
    ),
    Variant(
        "learned positions",
        _positions("learned"),
        lambda f: f"one learned row for each of {f.config.max_positions} places is added",
        "the model finds out itself what a place should say, up to a fixed length",
        "Gehring et al. 2017, Convolutional Sequence to Sequence Learning, section 3.1; Devlin et al. 2018, BERT",
    ),
    Variant(
        "rotary positions, half-rotation",
        _positions("rope"),
        lambda f: f"column j turns with column j + {(f.config.d_head or 0) // 2}, θ {f.config.rope_theta:g}",
        "scores depend on the distance between two tokens, and nothing is added to the rows",
        "Su et al. 2021, RoFormer, equation 34; pairing of the code of Black et al. 2022, GPT-NeoX-20B (rotate_half)",
    ),
    Variant(
        "rotary positions, interleaved",
        _positions("rope-interleaved"),
        lambda f: f"columns 2j and 2j + 1 turn together, θ {f.config.rope_theta:g}",
        "the paper's own pairing: weights made for one pairing are wrong under the other",
        "Su et al. 2021, RoFormer, equation 34",
    ),
    Variant(
        "linear biases (ALiBi)",
        _positions("alibi"),
        lambda _: "each head takes its slope times the distance off the score",
        "near tokens count more, and texts may be longer than those of the training",
        "Press et al. 2021, Train Short, Test Long, section 3",
    ),
    Variant(
        "no positions",
        _positions("none"),
        lambda _: "nothing tells where a token stands",
        "it shows what attention alone can know: without a mask, a bag of tokens",
        "Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization in Transformers",
    ),
    Variant(
        "cross-attention",
        lambda f: f.cross,
        lambda f: f"{f.q_len} queries of one text, {f.k_len} keys and values of another; padding masked on both sides",
        "a decoder reads what an encoder made of another text",
        "Vaswani et al. 2017, section 3.2.3",
    ),
    Variant(
        "causal mask",
        lambda f: f.config.causal and f.config.prefix is None,
        lambda _: "a query sees itself and what came before",
        "the model can be trained on every position at once and still generate from left to right",
        "Vaswani et al. 2017, section 3.2.3",
    ),
    Variant(
        "prefix mask",
        lambda f: f.config.prefix is not None,
        lambda f: f"all see {_first(f.config.prefix)}, each other included; what follows is causal",
        "a question is read in both directions, and its answer is still generated",
        "Raffel et al. 2020, T5, section 3.2.1",
    ),
    Variant(
        "sliding window",
        lambda f: f.config.window is not None,
        lambda f: "from {} keys left to {} right of the query".format(*(f.config.window or (0, 0))),
        "time grows with the window instead of the text, and a cache need not keep more than the window",
        "Beltagy et al. 2020, Longformer, section 3.1",
    ),
    Variant(
        "attention sinks",
        lambda f: f.config.sink is not None,
        lambda f: f"all see {_first(f.config.sink)}, outside the window too",
        "heads park the attention that they do not need on the first tokens, and break when those leave the window",
        "Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks, section 3",
    ),
    Variant(
        "packed documents",
        lambda f: f.packed,
        lambda _: "documents in one row see only themselves, and count their places from their own beginning",
        "short texts fill a row without padding, and give what they give alone",
        "Krell et al. 2021, Efficient Sequence Packing without Cross-contamination, section 3",
    ),
    Variant(
        "padding",
        lambda f: f.padded,
        lambda f: f"shorter sequences are filled up on the {f.config.padding}; padding sees nothing and is not seen",
        "texts of different lengths share a batch and still give what they give alone",
        "Vaswani et al. 2017, section 3.2.3 (masking with −∞)",
    ),
    Variant(
        "own scale",
        lambda f: f.config.has_own_scale,
        lambda f: f"dot products times {f.config.scale:g} instead of {(f.config.d_head or 1) ** -0.5:.4g}",
        "some models train with another temperature, or without any",
        "Vaswani et al. 2017, section 3.2.1, on what the scale is for",
    ),
    Variant(
        "softcap",
        lambda f: f.config.softcap is not None,
        lambda f: f"scores bent into ±{f.config.softcap:g} by a tanh",
        "no score can run away, which keeps training stable",
        "Gemma Team 2024, Gemma 2, section 2",
    ),
    Variant(
        "additive score bias",
        lambda f: f.config.score_bias is not None,
        lambda f: f"numbers from {f.config.score_bias} are added to the scores",
        "anything known of a pair of places, learned or given, can speak before the softmax",
        "Shaw et al. 2018, Self-Attention with Relative Position Representations; Raffel et al. 2020, T5, section 2.1",
    ),
    Variant(
        "attention dropout",
        lambda f: f.config.train,
        lambda f: (
            f"each share is 0 with probability {f.config.dropout:g}, the others × {1 / (1 - f.config.dropout):.4g}"
        ),
        "training cannot lean on any single key; rows sum to 1 only on average",
        "Srivastava et al. 2014, Dropout, section 10",
    ),
)
"""Every variant, in the order of the computation."""
