"""What `SITES` says where it depends on the run: formulas and meanings in words, operations in numbers."""

from __future__ import annotations

from collections.abc import Callable

from mhacli.spec.config import ROPE
from mhacli.spec.facts import Facts
from mhacli.spec.variants import mask_rules

WAVES_AT_ONCE = 1 << 20
"""Numbers of sinusoidal positions that are made at one time, in float64."""


def product(out: str, weight: str, *, of: str = "x", of_cross: str | None = None) -> Callable[[Facts], str]:
    """`out = of W_weightᵀ + b_weight`, read from the context where keys and values come from it."""
    return lambda f: (
        f"{out} = {of_cross if f.cross and of_cross else of} W_{weight}ᵀ" + (f" + b_{weight}" if f.config.bias else "")
    )


def product_flops(length: str, width: str, of: str = "d_input") -> Callable[[Facts], int]:
    """Operations of a product with a weight: 2 per weight and row, and 1 per number where a bias is added."""

    def flops(f: Facts) -> int:
        n_out = f.batch * f.size(length) * f.size(width)
        return n_out * (2 * f.size(of) + (1 if f.config.bias else 0))

    return flops


def adds_positions(f: Facts) -> bool:
    """Whether positions are added to the rows."""
    return f.config.positions in ("sinusoidal", "learned")


def position_formula(f: Facts) -> str:
    """What is added at each place."""
    place = "place of i" if f.own_places else "i"
    if f.config.positions == "learned":
        return f"p[i] = P[{place}]"
    return f"p[i, 2j] = sin({place} / 10000^(2j/{f.input_axis})), p[i, 2j+1] = cos(same)"


def position_meaning(f: Facts) -> str:
    """Why it is added."""
    kind = (
        "a learned row for each place" if f.config.positions == "learned" else "waves that tell where each token stands"
    )
    own = "; places count from each text's own beginning" if f.own_places else ""
    return f"{kind}; without them attention sees a bag of words{own}"


def position_flops(f: Facts) -> int:
    """Sines and cosines count 1 each; reading a table is a copy."""
    return 0 if f.config.positions == "learned" else 2 * (f.batch if f.own_places else 1) * f.q_len * f.size("d_input")


def x_formula(f: Facts) -> str:
    """How the rows that the layer reads are made."""
    made = "embed" if f.config.random is None else "random"
    return f"x = {made} + positions" if adds_positions(f) else f"x = {made}"


def context_flops(f: Facts) -> int:
    """Of the positions of the context."""
    waves = 2 * (f.batch if f.own_places else 1) if f.config.positions == "sinusoidal" else 0
    return (f.batch + waves) * f.k_len * f.size("d_input") if adds_positions(f) else 0


def sharing(f: Facts) -> str:
    """Which query heads read which kv head, where they share."""
    group = f.config.heads_per_kv_head
    if group == 1:
        return ""
    all_share = group == f.config.n_heads
    return "; all query heads read this one" if all_share else f"; each is read by {group} query heads in a row"


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """What each head takes off its scores per step of distance: `2^(−8(h+1)/n)`.

    Where `n` is no power of two: the slopes for the power below, then every other slope of the power above. Source: Press
    et al. 2021, section 3, and its published code for other counts of heads.

    >>> alibi_slopes(2)
    (0.0625, 0.00390625)
    """
    below = 1 << (n_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    between = [2.0 ** (-8 * (h + 1) / (2 * below)) for h in range(0, 2 * below, 2)]
    return tuple(slopes + between[: n_heads - below])


def slopes(f: Facts) -> str:
    """The slopes of ALiBi, the first of many."""
    all_slopes = alibi_slopes(f.config.n_heads)
    return ", ".join(f"{slope:.4g}" for slope in all_slopes[:4]) + (", …" if len(all_slopes) > 4 else "")


def rotation(of: str) -> Callable[[Facts], str]:
    """How queries or keys are turned by their places."""

    def formula(f: Facts) -> str:
        half = f.size("d_head") // 2
        a, b = ("j", f"j + {half}") if f.config.positions == "rope" else ("2j", "2j + 1")
        return f"{of}_rot[i] = columns {a} and {b} of {of}[i], turned by i · {f.config.rope_theta:g}^(−2j/d_head)"

    return formula


def qk_formula(f: Facts) -> str:
    """The dot product, of turned rows where positions are rotary."""
    return "qk = q_rot k_rotᵀ" if f.config.positions in ROPE else "qk = q kᵀ"


def scores_formula(f: Facts) -> str:
    """Scale, softcap and what is added, in their order."""
    scaled = f"{f.config.scale:.6g} · qk"
    c = f.config.softcap
    capped = scaled if c is None else f"{c:g} · tanh({scaled} / {c:g})"
    added = " + alibi" if f.config.positions == "alibi" else ""
    added += " + bias" if f.config.score_bias is not None else ""
    return f"scores = {capped}{added}; −∞ where not allowed"


def scores_meaning(f: Facts) -> str:
    """The rules of the mask in words."""
    rules = ", ".join(mask_rules(f)) or "every key is allowed"
    return f"scaled so that the softmax does not saturate, then masked: {rules}"


def scores_flops(f: Facts) -> int:
    """Scale 1, softcap 3 more, 1 for each thing that is added."""
    added = (f.config.positions == "alibi") + (f.config.score_bias is not None)
    return f.cells() * ((1 if f.config.softcap is None else 4) + added)


def out_formula(f: Facts) -> str:
    """The output projection, if there is one."""
    if not f.config.out_proj:
        return "out = concat"
    return "out = concat W_oᵀ" + (" + b_o" if f.config.bias else "")


def out_flops(f: Facts) -> int:
    """Its operations."""
    return product_flops("query", "d_model", of="head·d_v")(f) if f.config.out_proj else 0
