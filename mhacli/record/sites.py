"""SITES, the points at which attention can be observed, with their axes, their cost and their
words, and VARIANTS of attention.

The printed walkthrough, the shape check at run time and the documentation all come from this table.
*Measurements* of a site (shape, layout, time) come from the tap. The texts stand in
record/glossary.toml. `Dims` are the sizes of a run, known before its first tensor; the end of the
file computes the cost of a decoding step from them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from msgspec.structs import replace

from mhacli.record.glossary import Word, words_of
from mhacli.settings import ITEM_BYTES, ROPE, Config

WAVES_AT_ONCE = 1 << 20
"""The number of sinusoidal position values computed at a time in float64."""


@dataclass(frozen=True)
class Dims:
    """A resolved config, the lengths, and properties of the text.

    `cross`: keys come from another text. `padded`: sequences differ in length. `packed`: a row
    holds several documents. `n_tokens` is the size of the vocabulary.
    """

    config: Config
    batch: int
    q_len: int
    k_len: int
    cross: bool = False
    padded: bool = False
    packed: bool = False
    n_tokens: int = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every axis by name."""
        config = self.config
        return {
            "batch": self.batch,
            "query": self.q_len,
            "key": self.k_len,
            "head": config.n_heads,
            "kv_head": config.n_kv_heads or config.n_heads,
            "d_head": config.d_head or 0,
            "d_v": config.d_v or 0,
            "d_model": config.d_model,
            "d_input": config.d_input or config.d_model,
        }

    @property
    def input_axis(self) -> str:
        """The axis name for the width of the layer's input: `d_input` only if it differs from
        `d_model`.
        """
        return "d_model" if self.sizes["d_input"] == self.config.d_model else "d_input"

    @property
    def has_separate_positions(self) -> bool:
        """Whether sequences count positions separately: left padding or packing shifts their
        beginnings.
        """
        return self.packed or (self.padded and self.config.padding == "left")

    @property
    def adds_positions(self) -> bool:
        """Whether positions are added to the token vectors."""
        return self.config.positions in ("sinusoidal", "learned")

    @property
    def item_bytes(self) -> int:
        """The bytes of a number in matrices and in the record, where 16-bit numbers become
        float32.
        """
        return max(ITEM_BYTES["float32"], ITEM_BYTES[self.config.dtype])

    def size(self, axis: str) -> int:
        """The size of an axis: `·` joins axes that are merged (product), `+` joins axes side by
        side (sum).

        >>> Dims(Config(d_model=12, n_heads=3, d_head=4), batch=2, q_len=5,
        k_len=5).size("head·d_head") 12
        """
        return sum(prod(self.sizes[word] for word in part.split("·")) for part in axis.split("+"))

    def cells(self) -> int:
        """The number of (batch, head, query, key) cells."""
        return self.batch * self.config.n_heads * self.q_len * self.k_len


# ----------------------------------------------------------------------------------- texts of a run


def filled_in(template: str, f: Dims) -> str:
    """A template of record/glossary.toml for a run: `<condition:then|else>` is one of two texts,
    `{name}` a value.
    """
    config, d_head, group = f.config, f.config.d_head or 1, f.config.heads_per_kv_head
    scaled, softcap = f"{config.scale or 0:.4g} · qk", config.softcap
    sharing = ""
    if group == config.n_heads > 1:
        sharing = "; all query heads read the same one"
    elif group > 1:
        sharing = f"; each is read by {group} query heads in a row"
    slopes = [f"{slope:.4g}" for slope in alibi_slopes(config.n_heads)]
    values = vars(config) | {
        "normal": config.distribution == "normal",
        "learned": config.positions == "learned",
        "adds_positions": f.adds_positions,
        "separate": f.has_separate_positions,
        "cross": f.cross,
        "rotated": config.positions in ROPE,
        "alibi": config.positions == "alibi",
        "projected_bias": config.out_proj and config.bias,
        "n_concat": f.size("head·d_v"),
        "half": d_head // 2,
        "place": "place of i" if f.has_separate_positions else "i",
        "pair": f"j and j + {d_head // 2}" if config.positions == "rope" else "2j and 2j + 1",
        "slopes": ", ".join(slopes if len(slopes) <= 4 else [*slopes[:4], "…"]),
        "scaled": (scaled if softcap is None else f"{softcap:g} · tanh({scaled} / {softcap:g})"),
        "usual_scale": d_head**-0.5,
        "kept_factor": 1 / (1 - config.dropout),
        "mask": ", ".join(mask_rules(f)) or "every key is visible",
        "prefix": _first(config.prefix),
        "sink": _first(config.sink),
        "sharing": sharing,
    }
    chosen = _CHOICE.sub(lambda choice: choice[2 if values[choice[1]] else 3] or "", template)
    return chosen.format(config=f.config, dims=f, **values) if "{" in chosen else chosen


_CHOICE = re.compile(r"<(\w+):([^|>]*)(?:\|([^>]*))?>")


def _first(count: int | None) -> str:
    return "the first token" if count == 1 else f"the first {count} tokens"


def mask_rules(dims: Dims) -> tuple[str, ...]:
    """The rules of the mask as clauses. All must hold; a clause may name an exception."""
    config = dims.config
    rules: list[str] = []
    if config.causal or config.prefix is not None:
        rules.append("no token sees a later one")
    if config.window is not None:
        kept = f", and {_first(config.sink)}" if config.sink else ""
        rules.append(
            f"keys from {config.window[0]} left to {config.window[1]} right of the query{kept}"
        )
    if config.prefix is not None:
        rules.append(f"except that all see {_first(config.prefix)}")
    if dims.packed:
        rules.append("no token sees another document")
    if dims.padded:
        rules.append("padding is never seen")
    if config.score_bias is not None:
        rules.append("nothing where the score bias is −∞")
    return tuple(rules)


def mask_words(dims: Dims) -> Iterator[str]:
    """The mask in a few words each, as the header of a run has it."""
    c = dims.config
    if c.prefix is not None:
        yield f"prefix {c.prefix}"
    elif c.causal:
        yield "causal"
    if c.window is not None:
        yield f"window {c.window[0]} left, {c.window[1]} right"
    if c.sink is not None:
        yield f"sink window {c.sink}"
    if c.documents is not None:
        yield f"documents split at {c.documents}"
    if dims.padded and c.padding == "left":
        yield "padding left"


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """The slope by which each head lowers its scores per step of distance: `2^(−8(h+1)/n)`.

    If `n` is not a power of two: the slopes for the power below, then every other slope for the
    power above. Source: Press et al. 2021, section 3, and its published code for other head counts.

    >>> alibi_slopes(2)
    (0.0625, 0.00390625)
    """
    below = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    between = [2.0 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * below, 2)]
    return tuple(slopes + between[: n_heads - below])


# ---------------------------------------------------------------------------- variants of attention


def variants(dims: Dims) -> dict[str, Word]:
    """The variants that a run uses, in the order of the computation, with its numbers."""
    used = (name for name, is_used in VARIANTS.items() if is_used(dims))
    words = {name: words_of("glossary", "variant")[name] for name in used}
    return {
        name: replace(word, explanation=filled_in(word.explanation, dims))
        for name, word in words.items()
    }


def positions_name(config: Config) -> str:
    """The usual name of the position scheme, with its numbers.

    >>> positions_name(Config(positions="rope"))
    'rope (half-rotation, θ 10000)'
    """
    style = {"rope": "half-rotation", "rope-interleaved": "interleaved"}.get(config.positions)
    return config.positions if style is None else f"rope ({style}, θ {config.rope_theta:g})"


def _positions(name: str) -> Callable[[Dims], bool]:
    return lambda f: f.config.positions == name


VARIANTS: Mapping[str, Callable[[Dims], bool]] = {
    "random input": lambda f: f.config.random is not None,
    "projections from another width": lambda f: f.input_axis == "d_input",
    "single-head attention": lambda f: f.config.n_heads == 1,
    "no output projection": lambda f: not f.config.out_proj,
    "multi-query attention": lambda f: f.config.n_kv_heads == 1 < f.config.n_heads,
    "grouped-query attention": lambda f: (
        1 < (f.config.n_kv_heads or f.config.n_heads) < f.config.n_heads
    ),
    "sinusoidal positions": _positions("sinusoidal"),
    "learned positions": _positions("learned"),
    "rotary positions, half-rotation": _positions("rope"),
    "rotary positions, interleaved": _positions("rope-interleaved"),
    "linear biases (ALiBi)": _positions("alibi"),
    "no positions": _positions("none"),
    "cross-attention": lambda f: f.cross,
    "causal mask": lambda f: f.config.causal and f.config.prefix is None,
    "prefix mask": lambda f: f.config.prefix is not None,
    "sliding window": lambda f: f.config.window is not None,
    "attention sinks": lambda f: f.config.sink is not None,
    "packed documents": lambda f: f.packed,
    "padding": lambda f: f.padded,
    "own scale": lambda f: f.config.has_custom_scale,
    "softcap": lambda f: f.config.softcap is not None,
    "additive score bias": lambda f: f.config.score_bias is not None,
    "attention dropout": lambda f: f.config.train,
}
"""Whether a run uses each variant, in the order of the computation."""


# -------------------------------------------------------------------------------------------- sites


@dataclass(frozen=True)
class Site:
    """One point of the computation.

    `axes` are axis names; `d_out` is the width of the layer's output, and `batch?` stands where
    sequences count positions separately. `parameters` names the weights used, without `.weight` and
    `.bias`. `operations` counts the floating point operations of its n numbers: 2 per multiply-add
    of a matrix product, 1 per other operation on a number (add, multiply, exp, tanh, max, divide),
    0 per copy.
    """

    name: str
    axes: str
    operations: Callable[[Dims, int], int] = lambda f, n: 0
    parameters: tuple[str, ...] = ()

    @property
    def words(self) -> Word:
        """Its meaning and its formula."""
        return words_of("glossary", "site")[self.name]

    def axes_for(self, dims: Dims) -> tuple[str, ...]:
        """The axis names under these dims."""
        named = {
            "batch?": "batch" if dims.has_separate_positions else "",
            "d_input": dims.input_axis,
            "d_out": "d_model" if dims.config.out_proj else "head·d_v",
        }
        return tuple(filter(None, (named.get(axis, axis) for axis in self.axes.split())))

    def shape_for(self, dims: Dims) -> tuple[int, ...]:
        """The required shape of the tensor."""
        return tuple(dims.size(axis) for axis in self.axes_for(dims))

    def flops(self, dims: Dims) -> int:
        """The floating point operations under these dims."""
        return self.operations(dims, prod(self.shape_for(dims)))

    def described(self, dims: Dims) -> dict[str, Any]:
        """Its axes, formula, meaning and operations under these dims, as fields of `Step`."""
        return {
            "axes": self.axes_for(dims),
            "formula": filled_in(self.words.formula, dims),
            "meaning": filled_in(self.words.explanation, dims),
            "flops": self.flops(dims),
        }

    def in_general(self) -> tuple[str, str]:
        """Its meaning with its axes, and its formula, for the causal layer that `mha run` has by
        default.
        """
        dims = Dims(Config(causal=True).resolved(), batch=1, q_len=6, k_len=6)
        meaning, axes = filled_in(self.words.explanation, dims), " · ".join(self.axes_for(dims))
        formula = self.words.general or filled_in(self.words.formula, dims)
        return f"{meaning[:1].upper()}{meaning[1:]}. Its axes are {axes}.", formula


def _projection(f: Dims, n: int) -> int:
    """The product of token vectors with a weight matrix, and its bias."""
    return n * (2 * f.size("d_input") + f.config.bias)


def _waves(f: Dims, n: int) -> int:
    """A sine or cosine for each number, computed once for all sequences where they count positions
    alike.
    """
    return 2 * n if f.config.positions == "sinusoidal" else 0


def _scores(f: Dims, n: int) -> int:
    """1 operation for the scale, 3 for a softcap, and 1 per additive term."""
    added = (f.config.positions == "alibi") + (f.config.score_bias is not None)
    return n * ((1 if f.config.softcap is None else 4) + added)


_QKV = "head·d_head+kv_head·d_head+kv_head·d_v"
_CELLS = "batch head query key"

_ORDER = (
    Site("ids", "batch query"),
    Site("random", "batch query d_input"),
    Site("embed", "batch query d_input", parameters=("embed",)),
    Site("positions", "batch? query d_input", _waves, ("embed_positions",)),
    Site("x", "batch query d_input", lambda f, n: n * f.adds_positions),
    Site(
        "context",
        "batch key d_input",
        parameters=("embed", "embed_positions"),
        operations=lambda f, n: (
            n * f.adds_positions + _waves(f, n if f.has_separate_positions else n // f.batch)
        ),
    ),
    Site("qkv", f"batch query {_QKV}", _projection, ("q_proj", "k_proj", "v_proj")),
    Site("q_proj", "batch query head·d_head", _projection, ("q_proj",)),
    Site("q_per_head", "batch head query d_head", _projection, ("q_proj",)),
    Site("kv", "batch key kv_head·d_head+kv_head·d_v", _projection, ("k_proj", "v_proj")),
    Site("q", "batch head query d_head"),
    Site("k_proj", "batch key kv_head·d_head", _projection, ("k_proj",)),
    Site("k_per_head", "batch kv_head key d_head", _projection, ("k_proj",)),
    Site("k", "batch kv_head key d_head"),
    Site("v_proj", "batch key kv_head·d_v", _projection, ("v_proj",)),
    Site("v_per_head", "batch kv_head key d_v", _projection, ("v_proj",)),
    Site("v", "batch kv_head key d_v"),
    Site("q_rot", "batch head query d_head", lambda f, n: 3 * n),
    Site("k_rot", "batch kv_head key d_head", lambda f, n: 3 * n),
    Site("alibi", "batch? head query key", lambda f, n: n),
    Site("bias", _CELLS),
    Site("qk", _CELLS, lambda f, n: 2 * n * f.size("d_head")),
    Site("scores", _CELLS, _scores),
    Site("pattern", _CELLS, lambda f, n: 5 * n),
    Site("dropped", _CELLS, lambda f, n: 2 * n),
    Site("z", "batch head query d_v", lambda f, n: 2 * n * f.k_len),
    Site("concat", "batch query head·d_v"),
    Site("head_out", "batch head query d_model", lambda f, n: 2 * n * f.size("d_v"), ("o_proj",)),
    Site(
        "out",
        "batch query d_out",
        parameters=("o_proj",),
        operations=lambda f, n: n * f.config.out_proj * (2 * f.size("head·d_v") + f.config.bias),
    ),
    Site("out_sum", "batch query d_model", lambda f, n: n * (f.config.n_heads - 1 + f.config.bias)),
)

SITES: Mapping[str, Site] = {site.name: site for site in _ORDER}
"""Every site by its name, in the order of execution."""


# -------------------------------------------------------------------------- cost of a decoding step


CacheKind = Literal["none", "concat", "preallocated"]


def token_bytes(config: Config, n_kv_heads: int | None = None) -> int:
    """The bytes of one token's keys and values: `n_kv_heads · (d_head + d_v)` numbers."""
    heads = n_kv_heads or config.n_kv_heads or config.n_heads
    return heads * ((config.d_head or 0) + (config.d_v or 0)) * ITEM_BYTES[config.dtype]


def step_flops(config: Config, *, batch: int, n_new: int, length: int, cache: CacheKind) -> int:
    """The operations of one step's matrix products and their biases. Scale, softmax and positions
    are few and left out. Without a cache all tokens are projected and all cells computed, masked
    ones included, as in the explicit computation.
    """
    rows = length if cache == "none" else n_new
    row = Dims(config, batch=1, q_len=1, k_len=1)
    cells = Dims(config, batch, q_len=rows, k_len=length)
    of_row = sum(SITES[name].flops(row) for name in ("q_proj", "k_proj", "v_proj", "out"))
    return batch * rows * of_row + SITES["qk"].flops(cells) + SITES["z"].flops(cells)


def moved_bytes(config: Config, *, batch: int, n_new: int, length: int, cache: CacheKind) -> int:
    """The bytes of keys and values that one step reads and writes.

    `none` writes all of them again and reads them once. `concat` reads the old ones, writes old and
    new, and reads all. `preallocated` writes the new ones and reads all.
    """
    tokens = {"none": 2 * length, "concat": 3 * length - n_new, "preallocated": length + n_new}
    return batch * tokens[cache] * token_bytes(config)
