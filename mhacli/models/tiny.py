"""The config of a small model of the same family: its sizes are divided, its ratios and switches
stay.

The names are those of the configs of transformers. A number that no pattern names stays, such as
a window or the number of positions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import gcd, sqrt
from typing import Any

MOST_IDS = 320
"""The most token ids of a small model: those of bytes, and special ones behind them."""
_LEAST_LAYERS, _LEAST_HEADS, _LEAST_D_HEAD, _MULTIPLE = 2, 4, 8, 8
_KINDS = {
    "special": r"(token|pad|unk|mask|sep|bos|eos)_(id|index)$",
    "vocabulary": r"vocab_size(_per_layer_input)?$",
    "heads": r"heads(_per_layer)?$|^n_head$|head_kv$|n_groups$|(o|query)_groups$",
    "rotated": r"^rotary_dim$|rope_head_dim$|^mrope_section$",
    "d_head": r"head_?(dim|size|width)$|^d_kv$|^(dim|d)_head$|_d_head$|^kv_channels$",
    "experts": r"experts(_per_tok(en)?)?$|moe_topk$|^top_k_experts$|^moe_k$|_group$",
    "width": (
        r"(hidden|intermediate|embedding|embed|emb|ffn|ff|mlp|inner|proj|model|forward|output|input"
        r"|bottleneck)_(size|dim|width)|_(rank|ssm)$|lowrank$"
        r"|^(d_model|d_ff|n_embd|n_inner|dim|dim_ff|d_inner|lru_width)$"
    ),
    "fraction": "^partial_rotary_factor$",
    "factors": "^(long|short)_factor$",  # a number for two columns that are rotated together
    "spread": "^(initializer_range|init_std|init_method_std)$",
    "depth": r"^(num_|n_)?((en|de)coder_|hidden_|num_hidden_)*layers?$|^depth$",
    "period": "period|interval|pattern|every_n|sparse_step|offset",
    "first": "^(first_k_dense_replace|num_dense_layers)$",
    "last": "^num_kv_shared_layers$",
    "numbers": r"(layers|_ids|_idxs?|indexes|indices)$",
}
"""The names of each kind of number; the first that fits counts. `first` and `last` are numbers of
layers that differ, `numbers` lists them.
"""
_Part = Mapping[Any, Any]
_Divisors = Mapping[str, Fraction]
"""What numbers of heads, widths of heads and numbers of experts are divided by, by their kind."""


def tiny(config: Any, *, keeps_vocabulary: bool = False) -> Any:
    """The config with few layers, of each kind one, and with heads, widths, experts and, unless
    `keeps_vocabulary`, token ids divided by common divisors. Special ids move into the vocabulary.
    """
    text = config.get_text_config(decoder=True)
    whole, part = config.to_dict(), text.to_dict()
    n_ids = text.vocab_size if keeps_vocabulary else min(text.vocab_size, MOST_IDS)
    special = {*_numbers(whole)["special"], *_numbers(part)["special"]}
    outside = sorted(i for i in special if i >= n_ids)
    moved = {i: n_ids - 1 - place % n_ids for place, i in enumerate(outside)}
    by = _divisors(part)
    narrowing = by["heads"] * by["d_head"]

    def change(kind: str, n: int, by: _Divisors) -> Any:
        """A number of a kind in a part with these divisors; widths change alike in all parts."""
        match kind:
            case "special":
                return moved.get(n, n)
            case "vocabulary":
                return min(n, n_ids)
            case "width":  # the products of experts need a multiple
                return -int(-n // (narrowing * _MULTIPLE)) * _MULTIPLE
        return max(1, int(n // by.get(kind, 1)))

    return type(config).from_dict(_small(whole, by, change, spread=sqrt(narrowing)))


def _small(
    part: _Part, by: _Divisors, change: Callable[[str, int, _Divisors], int], *, spread: float
) -> dict[Any, Any]:
    """A part of a config with smaller numbers. The weights of narrow layers are drawn with more
    `spread`, so that scores keep their size.
    """
    if part.get("model_type"):
        by = _divisors(part)

    def changed(kind: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [changed(kind, each) for each in value]
        return change(kind, value, by) if type(value) is int and value > 0 else value

    small = _with_few_layers(part)
    for name, value in small.items():
        kind = _kind_of(name)
        if isinstance(value, Mapping):
            small[name] = _small(value, by, change, spread=spread)
        elif kind == "factors" and value:
            small[name] = value[: int(len(value) // by["d_head"])]
        elif kind == "spread" and value:
            small[name] = value * spread
        else:
            small[name] = changed(kind, value)
    return small


def _divisors(part: _Part) -> _Divisors:
    """The divisors that leave four heads and two of each kind, unless there is one, widths of heads
    that are a multiple of 8, or even, and two experts. Heads of one number need not be divisible.
    """
    numbers = _numbers(part)
    heads, d_heads, experts = (numbers[kind] for kind in ("heads", "d_head", "experts"))
    width = next((part[name] for name in ("hidden_size", "d_model", "n_embd") if name in part), 0)
    if heads and not d_heads and isinstance(width, int):
        d_heads = [width // max(heads)]
    rotated = numbers["rotated"] + [int(d_heads[0] * f) for f in numbers["fraction"] if d_heads]
    units = [d // 8 if d % 8 == 0 else d // 2 for d in d_heads]
    units += [n if n % 2 else n // 2 for n in rotated]
    least, most = min(heads, default=0), max(heads, default=0)
    by_heads = Fraction(_common(heads, min(least // 2, most // _LEAST_HEADS)))
    if _LEAST_HEADS <= least == most:
        by_heads = Fraction(most, _LEAST_HEADS)
    by_d_head = Fraction(_common(units, min(d_heads, default=0) // _LEAST_D_HEAD))
    by_experts = Fraction(_common(experts, min(experts, default=0) // 2))
    return {"heads": by_heads, "d_head": by_d_head, "rotated": by_d_head, "experts": by_experts}


def _common(numbers: Sequence[int], most: int) -> int:
    """The largest common divisor of all numbers up to `most`, at least 1."""
    common = gcd(*numbers)
    return max((n for n in range(1, most + 1) if common % n == 0), default=1)


def _kind_of(name: object) -> str:
    """The kind of number that has a name; empty for others."""
    return next((kind for kind, form in _KINDS.items() if re.search(form, str(name))), "")


def _numbers(part: _Part) -> dict[str, list[Any]]:
    """The numbers of each kind, without 1, in a part and what is within it, but not in a part of
    another model.
    """
    numbers = defaultdict[str, list[Any]](list)
    for name, value in part.items():
        if isinstance(value, Mapping):
            for kind, inner in ({} if value.get("model_type") else _numbers(value)).items():
                numbers[kind] += inner
            continue
        values = value if isinstance(value, list | tuple) else [value]
        numbers[_kind_of(name)] += [
            n for n in values if type(n) in (int, float) and n > 0 and n != 1
        ]
    return numbers


# -------------------------------------------------------------------------------------- the layers


def _with_few_layers(part: _Part) -> dict[Any, Any]:
    """A part with the first layer of each kind, or as many as a period has, and with what is said
    of each layer accordingly.
    """
    small = dict(part)
    depths = [name for name, n in part.items() if _kind_of(name) == "depth" and type(n) is int]
    for name in depths:
        n = part[name]
        named = {other: _named(other, value, n) for other, value in small.items()}
        lists = {
            other: value
            for other, value in small.items()
            if isinstance(value, list | tuple) and len(value) == n and named[other] is None
        }
        about = [layers for layers in named.values() if layers is not None]
        kinds = [
            [*(v[i] for v in lists.values()), *(i in layers for layers in about)] for i in range(n)
        ]
        kept = _first_of_each([repr(kind) for kind in kinds], part)
        small[name] = len(kept)
        small |= {other: [value[i] for i in kept] for other, value in lists.items()}
        for other, layers in named.items():
            if layers is not None:
                places = {i: place for place, i in enumerate(kept) if i in layers}
                small[other] = _written(small[other], places)
    return small


def _first_of_each(kinds: Sequence[str], part: _Part) -> Sequence[int]:
    """The first layer of each kind; of a single kind, as many as a period of the part has."""
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    if len(first) >= _LEAST_LAYERS:
        return first
    periods = [*_numbers(part)["period"], len(part.get("block_types") or ())]
    most = max([_LEAST_LAYERS, *(int(p) for p in periods if p < len(kinds))])
    return range(min(len(kinds), most))


def _named(name: Any, value: Any, n: int) -> Sequence[int] | None:
    """The layers of `n` that a value names; None if it names none."""
    kind = _kind_of(name)
    if isinstance(value, int):
        ranges = {"first": range(value), "last": range(n - value, n)}
        return ranges.get(kind)
    if name == "per_layer_config" and value:
        return [*map(int, value)]
    if kind == "numbers" and isinstance(value, list | tuple):
        return value if [*value] == [i for i in range(n) if i in value] else None
    return None


def _written(value: Any, places: Mapping[int, int]) -> Any:
    """What names layers, for those that are kept at new places."""
    if isinstance(value, int):
        return len(places)
    if isinstance(value, Mapping):
        return {places[int(i)]: of for i, of in value.items() if int(i) in places}
    return [*places.values()]
