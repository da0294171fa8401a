"""SITES: every place where attention can be observed, with its axes, its formula and one line of what it means.

The printed walkthrough, the shape check at run time and the documentation all come from this table. What is *measured*
at a site (shape, layout, time) comes from the tap, never from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from mhacli.config import Config


@dataclass(frozen=True)
class Facts:
    """What formulas and counts depend on: a resolved config, the lengths, whether keys come from another text, whether some
    sequence is shorter than the others, and the size of the vocabulary."""

    config: Config
    batch: int
    q_len: int
    k_len: int
    cross: bool = False
    padded: bool = False
    n_tokens: int = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every axis word of the house."""
        config = self.config
        n_kv_heads, d_v = config.n_kv_heads or config.n_heads, config.d_v or 0
        return {
            "batch": self.batch,
            "query": self.q_len,
            "key": self.k_len,
            "head": config.n_heads,
            "kv_head": n_kv_heads,
            "d_head": config.d_head or 0,
            "d_v": d_v,
            "d_model": config.d_model,
        }

    def size(self, axis: str) -> int:
        """The size of an axis, where `·` joins words that share it (product) and `+` what lies side by side (sum).

        >>> Facts(Config(d_model=12, n_heads=3, d_head=4), batch=2, q_len=5, k_len=5).size("head·d_head")
        12
        """
        return sum(prod(self.sizes[word] for word in part.split("·")) for part in axis.split("+"))

    def cells(self) -> int:
        """How many (batch, head, query, key) cells there are."""
        return self.batch * self.config.n_heads * self.q_len * self.k_len


Text = str | Callable[[Facts], str]


@dataclass(frozen=True)
class Site:
    """One place of the computation.

    `axes` are words of the house; `formula` says how the tensor is made; `sources` are the sites that it may be a view
    of, where no arithmetic lies between; `flops` counts the floating point operations of making it: a multiply-add of a
    matrix product counts 2, every other operation on a number (add, multiply, exp, tanh, max, divide) 1, and a copy 0.
    `parameters` names the weights that are used, without `.weight` and `.bias`.
    """

    name: str
    axes: tuple[str, ...] | Callable[[Facts], tuple[str, ...]]
    formula: Text
    meaning: Text
    sources: tuple[str, ...] = ()
    flops: Callable[[Facts], int] = lambda _: 0
    parameters: tuple[str, ...] = ()

    def axes_for(self, facts: Facts) -> tuple[str, ...]:
        """The axis words that hold for these facts."""
        return self.axes(facts) if callable(self.axes) else self.axes

    def shape_for(self, facts: Facts) -> tuple[int, ...]:
        """The shape that a tensor at this site must have."""
        return tuple(facts.size(axis) for axis in self.axes_for(facts))

    def formula_for(self, facts: Facts) -> str:
        """The formula with the numbers of the config in it."""
        return self.formula(facts) if callable(self.formula) else self.formula

    def meaning_for(self, facts: Facts) -> str:
        """The one sentence of explanation."""
        return self.meaning(facts) if callable(self.meaning) else self.meaning


def _axes(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _product(out: str, weight: str, *, of: str = "x", of_cross: str | None = None) -> Callable[[Facts], str]:
    """`out = of W_weightᵀ + b_weight`, read from the context where keys and values come from it."""
    return lambda f: (
        f"{out} = {of_cross if f.cross and of_cross else of} W_{weight}ᵀ" + (f" + b_{weight}" if f.config.bias else "")
    )


def _product_flops(length: str, width: str, of: str = "d_model") -> Callable[[Facts], int]:
    def flops(f: Facts) -> int:
        n_out = f.batch * f.size(length) * f.size(width)
        return n_out * (2 * f.size(of) + (1 if f.config.bias else 0))

    return flops


def _x_formula(f: Facts) -> str:
    return "x = embed" if f.config.positions == "none" else "x = embed + positions"


def _scores_formula(f: Facts) -> str:
    scaled = f"{f.config.scale:.6g} · qk"
    c = f.config.softcap
    capped = scaled if c is None else f"{c:g} · tanh({scaled} / {c:g})"
    return f"scores = {capped}; −∞ where not allowed"


def _scores_meaning(f: Facts) -> str:
    rules = ["no token sees a later one"] if f.config.causal else []
    rules += (
        [f"keys from {f.config.window[0]} left to {f.config.window[1]} right of the query"] if f.config.window else []
    )
    rules += ["padding is never seen"] if f.padded else []
    return "scaled so that the softmax does not saturate, then masked: " + (", ".join(rules) or "every key is allowed")


def _out_formula(f: Facts) -> str:
    if not f.config.out_proj:
        return "out = concat"
    return "out = concat W_oᵀ" + (" + b_o" if f.config.bias else "")


def _out_flops(f: Facts) -> int:
    return _product_flops("query", "d_model", of="head·d_v")(f) if f.config.out_proj else 0


_QKV = "head·d_head+kv_head·d_head+kv_head·d_v"
_KV = "kv_head·d_head+kv_head·d_v"

_ORDER = (
    Site(
        "ids",
        _axes("batch query"),
        "ids = position of each token in the vocabulary",
        "each token becomes a number; −1 stands for padding",
    ),
    Site(
        "embed",
        _axes("batch query d_model"),
        "embed = E[ids]",
        "each number picks its row of the embedding table; padding gets zeros",
        parameters=("embed",),
    ),
    Site(
        "positions",
        _axes("query d_model"),
        "p[i, 2j] = sin(i / 10000^(2j/d_model)), p[i, 2j+1] = cos(same)",
        "waves that tell where each token stands; without them attention sees a bag of words",
        flops=lambda f: 2 * f.q_len * f.config.d_model,
    ),
    Site(
        "x",
        _axes("batch query d_model"),
        _x_formula,
        "what the layer reads: one row of numbers per token",
        sources=("embed",),
        flops=lambda f: 0 if f.config.positions == "none" else f.batch * f.q_len * f.config.d_model,
    ),
    Site(
        "context",
        _axes("batch key d_model"),
        lambda f: "c = E[context ids]" + ("" if f.config.positions == "none" else " + positions"),
        "the other text, embedded alike: keys and values come from it, queries do not",
        flops=lambda f: 0 if f.config.positions == "none" else (f.batch + 2) * f.k_len * f.config.d_model,
        parameters=("embed",),
    ),
    Site(
        "qkv",
        ("batch", "query", _QKV),
        _product("qkv", "qkv"),
        "one large product makes queries, keys and values side by side",
        flops=_product_flops("query", _QKV),
        parameters=("q_proj", "k_proj", "v_proj"),
    ),
    Site(
        "q_proj",
        _axes("batch query head·d_head"),
        _product("q_proj", "q"),
        "what each token asks for, all heads side by side",
        flops=_product_flops("query", "head·d_head"),
        parameters=("q_proj",),
    ),
    Site(
        "q_per_head",
        _axes("batch head query d_head"),
        _product("q[h]", "q[h]"),
        "what each token asks for, one small product per head",
        flops=_product_flops("query", "head·d_head"),
        parameters=("q_proj",),
    ),
    Site(
        "kv",
        ("batch", "key", _KV),
        _product("kv", "kv", of="c"),
        "one product of the context makes keys and values side by side",
        flops=_product_flops("key", _KV),
        parameters=("k_proj", "v_proj"),
    ),
    Site(
        "q",
        _axes("batch head query d_head"),
        "q[h] = columns h·d_head … (h+1)·d_head",
        "the queries cut into heads: each head gets its own d_head numbers of every token",
        sources=("q_proj", "qkv"),
    ),
    Site(
        "k_proj",
        _axes("batch key kv_head·d_head"),
        _product("k_proj", "k", of_cross="c"),
        "what each token offers to be found by, all heads side by side",
        flops=_product_flops("key", "kv_head·d_head"),
        parameters=("k_proj",),
    ),
    Site(
        "k_per_head",
        _axes("batch kv_head key d_head"),
        _product("k[h]", "k[h]", of_cross="c"),
        "what each token offers to be found by, one small product per head",
        flops=_product_flops("key", "kv_head·d_head"),
        parameters=("k_proj",),
    ),
    Site(
        "k",
        _axes("batch kv_head key d_head"),
        "k[h] = columns h·d_head … (h+1)·d_head",
        "the keys cut into heads",
        sources=("k_proj", "qkv", "kv"),
    ),
    Site(
        "v_proj",
        _axes("batch key kv_head·d_v"),
        _product("v_proj", "v", of_cross="c"),
        "what each token hands over when it is attended to, all heads side by side",
        flops=_product_flops("key", "kv_head·d_v"),
        parameters=("v_proj",),
    ),
    Site(
        "v_per_head",
        _axes("batch kv_head key d_v"),
        _product("v[h]", "v[h]", of_cross="c"),
        "what each token hands over when it is attended to, one small product per head",
        flops=_product_flops("key", "kv_head·d_v"),
        parameters=("v_proj",),
    ),
    Site(
        "v",
        _axes("batch kv_head key d_v"),
        "v[h] = columns h·d_v … (h+1)·d_v",
        "the values cut into heads",
        sources=("v_proj", "qkv", "kv"),
    ),
    Site(
        "qk",
        _axes("batch head query key"),
        "qk = q kᵀ",
        "every query meets every key: their dot product says how well they match",
        flops=lambda f: 2 * f.cells() * f.size("d_head"),
    ),
    Site(
        "scores",
        _axes("batch head query key"),
        _scores_formula,
        _scores_meaning,
        flops=lambda f: f.cells() * (1 if f.config.softcap is None else 4),
    ),
    Site(
        "pattern",
        _axes("batch head query key"),
        "pattern = softmax(scores) over the keys",
        "each query's attention: shares of its keys that sum to 1",
        flops=lambda f: 5 * f.cells(),
    ),
    Site(
        "dropped",
        _axes("batch head query key"),
        lambda f: f"dropped = pattern · keep / (1 − {f.config.dropout:g})",
        "dropout in training: some shares become 0, the rest grow, so rows no longer sum to 1",
        flops=lambda f: 2 * f.cells(),
    ),
    Site(
        "z",
        _axes("batch head query d_v"),
        lambda f: "z = dropped v" if f.config.train else "z = pattern v",
        "each head's result: the values, weighted by its pattern",
        flops=lambda f: 2 * f.cells() * f.size("d_v"),
    ),
    Site(
        "concat",
        _axes("batch query head·d_v"),
        "concat = z[0] … z[n_heads − 1] side by side",
        "the heads' results joined again into one row per token",
        sources=("z",),
    ),
    Site(
        "head_out",
        _axes("batch head query d_model"),
        "head_out[h] = z[h] W_o[h]ᵀ",
        "what each head alone adds to the output",
        flops=lambda f: 2 * f.batch * f.q_len * f.size("head·d_v") * f.config.d_model,
        parameters=("o_proj",),
    ),
    Site(
        "out",
        lambda f: ("batch", "query", "d_model" if f.config.out_proj else "head·d_v"),
        _out_formula,
        lambda f: (
            "the heads mixed: what the layer says"
            if f.config.out_proj
            else "no output projection: the heads side by side are the result"
        ),
        sources=("concat",),
        flops=_out_flops,
        parameters=("o_proj",),
    ),
    Site(
        "out_sum",
        _axes("batch query d_model"),
        lambda f: "out = Σ_h head_out[h]" + (" + b_o" if f.config.bias else ""),
        "the heads' contributions added up: the same as joining them and multiplying once",
        flops=lambda f: f.batch * f.q_len * f.config.d_model * (f.config.n_heads - 1 + (1 if f.config.bias else 0)),
    ),
)

SITES: Mapping[str, Site] = {site.name: site for site in _ORDER}
"""Every site by its name, in the order of execution."""
