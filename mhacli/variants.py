"""The variants of attention: which of them a run uses. Their effect, purpose and source stand in record/glossary.toml.

The walkthrough prints them, and docs/ATTENTION.md shows each with the command that draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from mhacli.record.glossary import Word, words_of
from mhacli.settings import Config
from mhacli.sites import Facts, filled_in


def variants(facts: Facts) -> dict[str, Word]:
    """The variants that a run uses, in the order of the computation, with its numbers."""
    used = (name for name, is_used in VARIANTS.items() if is_used(facts))
    words = {name: words_of("glossary", "variant")[name] for name in used}
    return {name: replace(of, explanation=filled_in(of.explanation, facts)) for name, of in words.items()}


def positions_name(config: Config) -> str:
    """The usual name of the position scheme, with its numbers.

    >>> positions_name(Config(positions="rope"))
    'rope (half-rotation, θ 10000)'
    """
    styles = {"rope": "half-rotation", "rope-interleaved": "interleaved"}
    style = styles.get(config.positions)
    return config.positions if style is None else f"rope ({style}, θ {config.rope_theta:g})"


def _positions(name: str) -> Callable[[Facts], bool]:
    return lambda f: f.config.positions == name


VARIANTS: Mapping[str, Callable[[Facts], bool]] = {
    "random input": lambda f: f.config.random is not None,
    "projections from another width": lambda f: f.input_axis == "d_input",
    "single-head attention": lambda f: f.config.n_heads == 1,
    "no output projection": lambda f: not f.config.out_proj,
    "multi-query attention": lambda f: f.config.n_kv_heads == 1 < f.config.n_heads,
    "grouped-query attention": lambda f: 1 < (f.config.n_kv_heads or f.config.n_heads) < f.config.n_heads,
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
