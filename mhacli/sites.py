"""SITES: all points at which attention can be observed, with axes, formula and a one-line explanation.

The printed walkthrough, the shape check at run time and the documentation all come from this table. *Measurements* of a
site (shape, layout, time) come from the tap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mhacli.facts import Facts
from mhacli.settings import ROPE
from mhacli.variants import mask_rules

WAVES_AT_ONCE = 1 << 20
"""The number of sinusoidal position values computed at a time in float64."""


def product(out: str, weight: str, *, of: str = "x", of_cross: str | None = None) -> Callable[[Facts], str]:
    """The formula `out = of W_weightᵀ + b_weight`. In cross-attention `of_cross` replaces `of`."""
    return lambda f: (
        f"{out} = {of_cross if f.cross and of_cross else of} W_{weight}ᵀ" + (f" + b_{weight}" if f.config.bias else "")
    )


def product_flops(length: str, width: str, of: str = "d_input") -> Callable[[Facts], int]:
    """The operations of a product with a weight matrix: 2 per weight and vector, and 1 per result for a bias."""

    def flops(f: Facts) -> int:
        n_out = f.batch * f.size(length) * f.size(width)
        return n_out * (2 * f.size(of) + (1 if f.config.bias else 0))

    return flops


def adds_positions(f: Facts) -> bool:
    """Whether positions are added to the token vectors."""
    return f.config.positions in ("sinusoidal", "learned")


def position_formula(f: Facts) -> str:
    """The formula of the vectors added at each position."""
    place = "place of i" if f.has_separate_positions else "i"
    if f.config.positions == "learned":
        return f"p[i] = P[{place}]"
    return f"p[i, 2j] = sin({place} / 10000^(2j/{f.input_axis})), p[i, 2j+1] = cos(same)"


def position_meaning(f: Facts) -> str:
    """The purpose of these vectors."""
    kind = (
        "a learned vector for each position"
        if f.config.positions == "learned"
        else "sines and cosines that encode the position of each token"
    )
    note = "; positions count from the first token of each text" if f.has_separate_positions else ""
    return f"{kind}; without them attention ignores the order of the tokens{note}"


def position_flops(f: Facts) -> int:
    """The operations of `position_formula`: 1 per sine or cosine; reading a table is a copy."""
    return (
        0
        if f.config.positions == "learned"
        else 2 * (f.batch if f.has_separate_positions else 1) * f.q_len * f.size("d_input")
    )


def x_formula(f: Facts) -> str:
    """The formula of the layer's input."""
    source = "embed" if f.config.random is None else "random"
    return f"x = {source} + positions" if adds_positions(f) else f"x = {source}"


def context_flops(f: Facts) -> int:
    """The operations of adding positions to the context."""
    waves = 2 * (f.batch if f.has_separate_positions else 1) if f.config.positions == "sinusoidal" else 0
    return (f.batch + waves) * f.k_len * f.size("d_input") if adds_positions(f) else 0


def sharing(f: Facts) -> str:
    """A clause on query heads that share a kv head, if they do."""
    group = f.config.heads_per_kv_head
    if group == 1:
        return ""
    is_multi_query = group == f.config.n_heads
    return (
        "; all query heads read the same one" if is_multi_query else f"; each is read by {group} query heads in a row"
    )


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """The slope by which each head lowers its scores per step of distance: `2^(−8(h+1)/n)`.

    If `n` is not a power of two: the slopes for the power below, then every other slope for the power above. Source:
    Press et al. 2021, section 3, and its published code for other head counts.

    >>> alibi_slopes(2)
    (0.0625, 0.00390625)
    """
    below = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    between = [2.0 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * below, 2)]
    return tuple(slopes + between[: n_heads - below])


def slopes(f: Facts) -> str:
    """The first slopes of ALiBi as text."""
    all_slopes = alibi_slopes(f.config.n_heads)
    return ", ".join(f"{slope:.4g}" for slope in all_slopes[:4]) + (", …" if len(all_slopes) > 4 else "")


def rotation(of: str) -> Callable[[Facts], str]:
    """The formula for the rotation of queries or keys by their positions."""

    def formula(f: Facts) -> str:
        half = f.size("d_head") // 2
        a, b = ("j", f"j + {half}") if f.config.positions == "rope" else ("2j", "2j + 1")
        return f"{of}_rot[i] = columns {a} and {b} of {of}[i], rotated by i · {f.config.rope_theta:g}^(−2j/d_head)"

    return formula


def qk_formula(f: Facts) -> str:
    """The formula of the dot products, after any rotation."""
    return "qk = q_rot k_rotᵀ" if f.config.positions in ROPE else "qk = q kᵀ"


def scores_formula(f: Facts) -> str:
    """The formula of scale, softcap and additive terms, in this order."""
    scaled = f"{f.config.scale:.6g} · qk"
    c = f.config.softcap
    capped = scaled if c is None else f"{c:g} · tanh({scaled} / {c:g})"
    added = " + alibi" if f.config.positions == "alibi" else ""
    added += " + bias" if f.config.score_bias is not None else ""
    return f"scores = {capped}{added}; −∞ where masked"


def scores_meaning(f: Facts) -> str:
    """The explanation of scores, with the rules of the mask."""
    rules = ", ".join(mask_rules(f)) or "every key is visible"
    return f"scaled so that the softmax does not saturate, then masked: {rules}"


def scores_flops(f: Facts) -> int:
    """The operations of scores: 1 for the scale, 3 for a softcap, and 1 per additive term."""
    added = (f.config.positions == "alibi") + (f.config.score_bias is not None)
    return f.cells() * ((1 if f.config.softcap is None else 4) + added)


def out_formula(f: Facts) -> str:
    """The formula of the output projection, if there is one."""
    if not f.config.out_proj:
        return "out = concat"
    return "out = concat W_oᵀ" + (" + b_o" if f.config.bias else "")


def out_flops(f: Facts) -> int:
    """The operations of the output projection."""
    return product_flops("query", "d_model", of="head·d_v")(f) if f.config.out_proj else 0


# --------------------------------------------------------------------------------------------------------------- sites


Text = str | Callable[[Facts], str]


@dataclass(frozen=True)
class Site:
    """One point of the computation.

    `axes` are axis names; `formula` says how the tensor is computed; `sources` are the sites of which it may be a view,
    with no arithmetic between. `flops` counts floating point operations: 2 per multiply-add of a matrix product, 1 per
    other operation on a number (add, multiply, exp, tanh, max, divide), 0 per copy. `parameters` names the weights
    used, without `.weight` and `.bias`. `in_general` is the formula for any config, where `formula` has numbers.
    """

    name: str
    axes: tuple[str, ...] | Callable[[Facts], tuple[str, ...]]
    formula: Text
    meaning: Text
    sources: tuple[str, ...] = ()
    flops: Callable[[Facts], int] = lambda _: 0
    in_general: str = ""
    parameters: tuple[str, ...] = ()

    def axes_for(self, facts: Facts) -> tuple[str, ...]:
        """The axis names under these facts."""
        return self.axes(facts) if callable(self.axes) else self.axes

    def shape_for(self, facts: Facts) -> tuple[int, ...]:
        """The required shape of the tensor."""
        return tuple(facts.size(axis) for axis in self.axes_for(facts))

    def formula_for(self, facts: Facts) -> str:
        """The formula with the config's numbers."""
        return self.formula(facts) if callable(self.formula) else self.formula

    def meaning_for(self, facts: Facts) -> str:
        """The explanation in one sentence."""
        return self.meaning(facts) if callable(self.meaning) else self.meaning


def _axes(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _rows(length: str) -> Callable[[Facts], tuple[str, ...]]:
    return lambda f: ("batch", length, f.input_axis)


def _position_axes(f: Facts) -> tuple[str, ...]:
    return ("batch", "query", f.input_axis) if f.has_separate_positions else ("query", f.input_axis)


_QKV = "head·d_head+kv_head·d_head+kv_head·d_v"
_KV = "kv_head·d_head+kv_head·d_v"

_ORDER = (
    Site(
        "ids",
        _axes("batch query"),
        "ids = position of each token in the vocabulary",
        "the number of each token in the vocabulary; −1 stands for padding",
    ),
    Site(
        "random",
        _rows("query"),
        lambda f: (
            "random = N(0, 1) from the seed" if f.config.distribution == "normal" else "random = U(0, 1) from the seed"
        ),
        "random numbers in place of embedded tokens, to study shapes without a text",
    ),
    Site(
        "embed",
        _rows("query"),
        "embed = E[ids]",
        "the row of the embedding table for each token; padding gets zeros",
        parameters=("embed",),
    ),
    Site(
        "positions",
        _position_axes,
        position_formula,
        position_meaning,
        flops=position_flops,
        in_general="p[i, 2j] = sin(i / 10000^(2j/d_model)), p[i, 2j+1] = cos(same); or a learned table P[i]",
        parameters=("embed_positions",),
    ),
    Site(
        "x",
        _rows("query"),
        x_formula,
        "the input of the layer: one vector per token",
        sources=("embed", "random"),
        flops=lambda f: f.batch * f.q_len * f.size("d_input") if adds_positions(f) else 0,
    ),
    Site(
        "context",
        _rows("key"),
        lambda f: "c = E[context ids]" + (" + positions" if adds_positions(f) else ""),
        "the embedded context: keys and values are computed from it, queries are not",
        flops=context_flops,
        parameters=("embed", "embed_positions"),
    ),
    Site(
        "qkv",
        ("batch", "query", _QKV),
        product("qkv", "qkv"),
        "one matrix product gives queries, keys and values side by side",
        flops=product_flops("query", _QKV),
        parameters=("q_proj", "k_proj", "v_proj"),
    ),
    Site(
        "q_proj",
        _axes("batch query head·d_head"),
        product("q_proj", "q"),
        "the queries of all heads side by side",
        flops=product_flops("query", "head·d_head"),
        parameters=("q_proj",),
    ),
    Site(
        "q_per_head",
        _axes("batch head query d_head"),
        product("q[h]", "q[h]"),
        "the queries, one matrix product per head",
        flops=product_flops("query", "head·d_head"),
        parameters=("q_proj",),
    ),
    Site(
        "kv",
        ("batch", "key", _KV),
        product("kv", "kv", of="c"),
        "one matrix product of the context gives keys and values side by side",
        flops=product_flops("key", _KV),
        parameters=("k_proj", "v_proj"),
    ),
    Site(
        "q",
        _axes("batch head query d_head"),
        "q[h] = columns h·d_head … (h+1)·d_head",
        "the queries split into heads: each head gets d_head numbers of every token",
        sources=("q_proj", "qkv"),
    ),
    Site(
        "k_proj",
        _axes("batch key kv_head·d_head"),
        product("k_proj", "k", of_cross="c"),
        "the keys of all heads side by side",
        flops=product_flops("key", "kv_head·d_head"),
        parameters=("k_proj",),
    ),
    Site(
        "k_per_head",
        _axes("batch kv_head key d_head"),
        product("k[h]", "k[h]", of_cross="c"),
        "the keys, one matrix product per head",
        flops=product_flops("key", "kv_head·d_head"),
        parameters=("k_proj",),
    ),
    Site(
        "k",
        _axes("batch kv_head key d_head"),
        "k[h] = columns h·d_head … (h+1)·d_head",
        lambda f: f"the keys split into heads{sharing(f)}",
        sources=("k_proj", "qkv", "kv"),
    ),
    Site(
        "v_proj",
        _axes("batch key kv_head·d_v"),
        product("v_proj", "v", of_cross="c"),
        "the values of all heads side by side",
        flops=product_flops("key", "kv_head·d_v"),
        parameters=("v_proj",),
    ),
    Site(
        "v_per_head",
        _axes("batch kv_head key d_v"),
        product("v[h]", "v[h]", of_cross="c"),
        "the values, one matrix product per head",
        flops=product_flops("key", "kv_head·d_v"),
        parameters=("v_proj",),
    ),
    Site(
        "v",
        _axes("batch kv_head key d_v"),
        "v[h] = columns h·d_v … (h+1)·d_v",
        lambda f: f"the values split into heads{sharing(f)}",
        sources=("v_proj", "qkv", "kv"),
    ),
    Site(
        "q_rot",
        _axes("batch head query d_head"),
        rotation("q"),
        "each pair of columns rotated by an angle that grows with the position",
        in_general="q_rot[i] = each pair j of columns of q[i], rotated by i · θ^(−2j/d_head)",
        flops=lambda f: 3 * f.batch * f.q_len * f.size("head·d_head"),
    ),
    Site(
        "k_rot",
        _axes("batch kv_head key d_head"),
        rotation("k"),
        "the keys rotated in the same way: the dot product of two rotated vectors depends on their distance",
        in_general="k_rot[i] = each pair j of columns of k[i], rotated by i · θ^(−2j/d_head)",
        flops=lambda f: 3 * f.batch * f.k_len * f.size("kv_head·d_head"),
    ),
    Site(
        "alibi",
        lambda f: (*(("batch",) if f.has_separate_positions else ()), "head", "query", "key"),
        lambda f: f"alibi[h, i, j] = −m[h] · |i − j|, m = {slopes(f)}",
        "a penalty on distance; heads with steep slopes attend to near tokens",
        in_general="alibi[h, i, j] = −m[h] · |i − j|, m[h] = 2^(−8(h+1)/n_heads)",
        flops=lambda f: f.cells() // (1 if f.has_separate_positions else f.batch),
    ),
    Site(
        "bias",
        _axes("batch head query key"),
        lambda f: f"bias = {f.config.score_bias}",
        "numbers for each pair of positions, added to the scores; −∞ masks a pair",
        in_general="bias[h, i, j], from the file of --score-bias",
    ),
    Site(
        "qk",
        _axes("batch head query key"),
        qk_formula,
        "the dot product of every query with every key: how well they match",
        flops=lambda f: 2 * f.cells() * f.size("d_head"),
    ),
    Site(
        "scores",
        _axes("batch head query key"),
        scores_formula,
        scores_meaning,
        flops=scores_flops,
        in_general="scores = scale · qk + bias, softcapped first if asked for; −∞ where masked",
    ),
    Site(
        "pattern",
        _axes("batch head query key"),
        "pattern = softmax(scores) over the keys",
        "the attention weights: each query's row sums to 1 over its keys",
        flops=lambda f: 5 * f.cells(),
    ),
    Site(
        "dropped",
        _axes("batch head query key"),
        lambda f: f"dropped = pattern · keep / (1 − {f.config.dropout:g})",
        "dropout in training: some weights become 0, the rest grow, so rows no longer sum to 1",
        in_general="dropped = pattern · keep / (1 − p)",
        flops=lambda f: 2 * f.cells(),
    ),
    Site(
        "z",
        _axes("batch head query d_v"),
        lambda f: "z = dropped v" if f.config.train else "z = pattern v",
        "the output of each head: the values, weighted by its attention pattern",
        flops=lambda f: 2 * f.cells() * f.size("d_v"),
    ),
    Site(
        "concat",
        _axes("batch query head·d_v"),
        "concat = z[0] … z[n_heads − 1] side by side",
        "the head outputs joined into one vector per token",
        sources=("z",),
    ),
    Site(
        "head_out",
        _axes("batch head query d_model"),
        "head_out[h] = z[h] W_o[h]ᵀ",
        "what each head adds to the output",
        flops=lambda f: 2 * f.batch * f.q_len * f.size("head·d_v") * f.config.d_model,
        parameters=("o_proj",),
    ),
    Site(
        "out",
        lambda f: ("batch", "query", "d_model" if f.config.out_proj else "head·d_v"),
        out_formula,
        lambda f: (
            "the output of the layer: the output projection mixes the heads"
            if f.config.out_proj
            else "no output projection: the head outputs side by side are the output"
        ),
        sources=("concat",),
        flops=out_flops,
        parameters=("o_proj",),
    ),
    Site(
        "out_sum",
        _axes("batch query d_model"),
        lambda f: "out = Σ_h head_out[h]" + (" + b_o" if f.config.bias else ""),
        "the sum of what the heads add: the same as joining them and multiplying once",
        flops=lambda f: f.batch * f.q_len * f.config.d_model * (f.config.n_heads - 1 + (1 if f.config.bias else 0)),
    ),
)

SITES: Mapping[str, Site] = {site.name: site for site in _ORDER}
"""Every site by its name, in the order of execution."""
