"""The config of a small model of the same family: its sizes are divided, its ratios and switches
stay.

The names are those of the configs of transformers. A number that no pattern names stays, such as
a window or the number of positions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import gcd, sqrt
from typing import Any

MOST_IDS = 320
"""The most token ids of a small model: those of bytes, and special ones behind them."""
_LEAST_LAYERS, _LEAST_D_HEAD, _MULTIPLE = 2, 8, 8
_SIZES = {
    "special": re.compile(r"(token|pad|unk|mask|sep|bos|eos)_(id|index)$"),
    "vocabulary": re.compile(r"vocab_size(_per_layer_input)?$"),
    "heads": re.compile(r"heads(_per_layer)?$|^n_head$|head_kv$|n_groups$|(o|query)_groups$"),
    "rotated": re.compile(r"^rotary_dim$|rope_head_dim$|^mrope_section$"),
    "d_head": re.compile(r"head_?(dim|size|width)$|^d_kv$|^(dim|d)_head$|_d_head$|^kv_channels$"),
    "experts": re.compile(r"experts(_per_tok(en)?)?$|moe_topk$|^top_k_experts$|^moe_k$|_group$"),
    "width": re.compile(
        r"(hidden|intermediate|embedding|embed|emb|ffn|ff|mlp|inner|proj|model|forward|output|input"
        r"|bottleneck)_(size|dim|width)|_(rank|ssm)$|lowrank$"
        r"|^(d_model|d_ff|n_embd|n_inner|dim|dim_ff|d_inner|lru_width)$"
    ),
}
"""The names of each kind of size; the first that fits counts."""
_FACTORS = ("long_factor", "short_factor")
"""Lists with a number for each two columns of a head that are rotated together."""
_SPREAD = ("initializer_range", "init_std", "init_method_std")
_DEPTH = re.compile(r"^(num_|n_)?((en|de)coder_|hidden_|num_hidden_)*layers?$|^depth$")
_PERIOD = re.compile(r"period|interval|pattern|every_n|sparse_step|offset")
_FIRST, _LAST = ("first_k_dense_replace", "num_dense_layers"), ("num_kv_shared_layers",)
"""Numbers of layers at the beginning or the end that differ from the others."""
_NUMBERS = re.compile(r"(layers|_ids|_idxs?|indexes|indices)$")
"""Names of lists with the numbers of some layers."""


def tiny(config: Any, *, keeps_vocabulary: bool = False) -> Any:
    """The config with few layers, of each kind one, and with heads, widths, experts and, unless
    `keeps_vocabulary`, token ids divided by common divisors. Special ids move into the vocabulary.
    """
    text = config.get_text_config(decoder=True)
    parts = config.to_dict(), text.to_dict()
    n_ids = text.vocab_size if keeps_vocabulary else min(text.vocab_size, MOST_IDS)
    outside = {i for part in parts for i in _numbers(part, "special") if i >= n_ids}
    moved = {i: n_ids - 1 - place % n_ids for place, i in enumerate(sorted(outside))}
    by_heads, by_d_head = _divisors(parts[1])
    by = by_heads * by_d_head
    common = {
        "special": lambda i: moved.get(i, i),
        "vocabulary": lambda n: min(n, n_ids),
        # the products of experts need a multiple
        "width": lambda n: -int(-n // (by * _MULTIPLE)) * _MULTIPLE,
    }
    return type(config).from_dict(_small(parts[0], common, spread=sqrt(by)))


_Change = Callable[[int], int]


def _small(part: Mapping[Any, Any], change: Mapping[str, _Change], spread: float) -> dict[Any, Any]:
    """A part of a config with smaller numbers, by the change of each kind of size; widths change
    alike in all parts. The weights of narrow layers are drawn with more `spread`, so that scores
    keep their size.
    """
    if part.get("model_type"):
        by_heads, by_d_head = _divisors(part)
        by_experts = _common(experts := [*_numbers(part, "experts")], min(experts, default=0) // 2)
        change = {
            **change,
            "heads": lambda n: max(1, int(n // by_heads)),
            "d_head": lambda n: n // by_d_head,
            "rotated": lambda n: n // by_d_head,
            "experts": lambda n: max(1, n // by_experts),
        }
    small = _with_few_layers(part)
    for name, value in small.items():
        kind = _kind_of(name)
        if isinstance(value, Mapping):
            small[name] = _small(value, change, spread)
        elif name in _FACTORS and value:
            small[name] = value[: change["rotated"](len(value))]
        elif name in _SPREAD and value:
            small[name] = value * spread
        elif kind is not None:
            small[name] = _each(value, change[kind])
    return small


def _each(value: Any, change: _Change) -> Any:
    """The value with its positive whole numbers changed, those of a list too."""
    if isinstance(value, list | tuple):
        return [_each(each, change) for each in value]
    return change(value) if type(value) is int and value > 0 else value


def _divisors(part: Mapping[Any, Any]) -> tuple[Fraction, int]:
    """What numbers of heads and widths of heads are divided by: it leaves four heads and two of
    each kind, unless there is one, and widths of a multiple of 8, or even ones. Numbers of one kind
    need not be divisible.
    """
    heads, d_heads = [*_numbers(part, "heads")], [*_numbers(part, "d_head")]
    width = next((part[name] for name in ("hidden_size", "d_model", "n_embd") if name in part), 0)
    if heads and not d_heads and isinstance(width, int):
        d_heads = [width // max(heads)]
    rotated = [*_numbers(part, "rotated")]
    for fraction in _values(part, lambda name: name == "partial_rotary_factor"):
        rotated += [int(d * (fraction or 1)) for d in d_heads[:1]]
    units = [d // 8 if d % 8 == 0 else d // 2 for d in d_heads]
    units += [n if n % 2 else n // 2 for n in rotated]
    most_heads = min(min(heads, default=0) // 2, max(heads, default=0) // 4)
    by_heads = Fraction(_common(heads, most_heads))
    if len({*heads}) == 1 and most_heads:
        by_heads = Fraction(heads[0], 4)
    return by_heads, _common(units, min(d_heads, default=0) // _LEAST_D_HEAD)


def _common(numbers: Sequence[int], most: int) -> int:
    """The largest common divisor of all numbers up to `most`, at least 1."""
    common = gcd(*numbers)
    return max((n for n in range(1, most + 1) if common % n == 0), default=1)


def _kind_of(name: object) -> str | None:
    """The kind of size that has a name."""
    return next((kind for kind, form in _SIZES.items() if form.search(str(name))), None)


def _values(part: Mapping[Any, Any], fits: Callable[[object], object]) -> Iterator[Any]:
    """The values whose names fit, also within the part, but not in a part with another model."""
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from () if value.get("model_type") else _values(value, fits)
        elif fits(name):
            yield from value if isinstance(value, list | tuple) else [value]


def _numbers(part: Mapping[Any, Any], kind: str) -> Iterator[int]:
    """The whole numbers above 1 of a kind of size."""
    of_kind = _values(part, lambda name: _kind_of(name) == kind)
    return (value for value in of_kind if type(value) is int and value > 1)


# -------------------------------------------------------------------------------------- the layers


def _with_few_layers(part: Mapping[Any, Any]) -> dict[Any, Any]:
    """A part with the first layer of each kind, or as many as a period has, and with what is said
    of each layer accordingly.
    """
    small = dict(part)
    for name, n in part.items():
        if not (_DEPTH.search(str(name)) and type(n) is int and n > _LEAST_LAYERS):
            continue
        of_layers = {other: _of_each(other, value, n) for other, value in small.items()}
        known = {other: each for other, each in of_layers.items() if each is not None}
        kept = _kept(part, n, [*known.values()])
        for other, each in known.items():
            small[other] = _written(small[other], [each[i] for i in kept])
        small[name] = len(kept)
    return small


def _kept(part: Mapping[Any, Any], n: int, known: Sequence[Sequence[Any]]) -> Sequence[int]:
    """The numbers of the layers that are kept of `n`, by what is known of each."""
    first = dict[str, int]()
    for i, kind in enumerate(zip(*known, strict=True)):
        first.setdefault(repr(kind), i)
    if len(first) > 1:
        return sorted(first.values())
    periods = [*_values(part, lambda name: _PERIOD.search(str(name)))]
    periods.append(len(part.get("block_types") or ()))  # which are repeated
    return range(max([_LEAST_LAYERS, *(p for p in periods if type(p) is int and p < n)]))


def _of_each(name: Any, value: Any, n: int) -> list[Any] | None:
    """What a value says of each of `n` layers; None if it is not about each."""
    if name in _FIRST and value is not None:
        return [i < value for i in range(n)]
    if name in _LAST and value is not None:
        return [i >= n - value for i in range(n)]
    if isinstance(value, Mapping):  # by the numbers of layers, as text
        if not value or not all(isinstance(of, Mapping) for of in value.values()):
            return None
        by_number = {int(i): of for i, of in value.items() if str(i).isdigit()}
        return [by_number.get(i) for i in range(n)] if by_number else None
    if not isinstance(value, list | tuple):
        return None
    if _NUMBERS.search(str(name)) and value == sorted({i for i in value if i in range(n)}):
        return [i in value for i in range(n)]
    return [*value] if len(value) == n else None


def _written(value: Any, chosen: Sequence[Any]) -> Any:
    """What is said of the chosen layers, in the form of a value about all."""
    if isinstance(value, int):
        return sum(chosen)
    if isinstance(value, Mapping):
        return {i: of for i, of in enumerate(chosen) if of is not None}
    if bool in {*map(type, chosen)} - {*map(type, value)}:
        return [i for i, is_in in enumerate(chosen) if is_in]
    return chosen
