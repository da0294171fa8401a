"""Sizes that nobody gave: consistent with each other and with those that were given, and such that shapes tell axes apart."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final, NamedTuple

import torch

from mhacli.adapters.usercode.arguments import Role

D_HEAD: Final = 8
"""Even, as rotary positions need, and not so small that the pairings of their columns are the same."""
_HEADS: Final = (5, 7, 3, 9, 15, 11, 13, 4, 6, 8, 12, 10, 16, 14, 20, 24, 32, 2, 1)
_GROUPED_HEADS: Final = (15, 9, 21, 25, 35, 6, 12, 10, 20, 4, 8, 16, 18, 24, 32, 14, 2, 5, 7, 3, 1)
"""Those that kv heads can divide come first."""
_CONTEXTS: Final = (64, 48, 96)
SIZES: Final[frozenset[Role]] = frozenset(
    {"d_model", "d_out", "n_heads", "n_kv_heads", "d_head", "d_v", "context_length"}
)


MEANINGS: Final[Mapping[Role, str]] = {
    "d_model": "the width of a token",
    "d_out": "the width of the output",
    "n_heads": "the number of heads",
    "n_kv_heads": "the number of kv heads",
    "d_head": "the width of a head",
    "d_v": "the width of a head's values",
    "dropout": "dropout, which eval turns off",
    "context_length": "the longest text",
    "bias": "with biases",
    "batch_first": "the batch stands first",
    "layer": "the first layer",
    "n_layers": "the number of layers",
    "device": "--device",
    "dtype": "the usual one",
    "eps": "a small number",
    "theta": "the usual base of rotary positions",
    "scale": "1/√d_head",
    "temperature": "√d_head",
}
"""As what a name was understood whose value nobody gave, in a few words."""


class Surroundings(NamedTuple):
    """What values depend on that are no sizes: whether the user wants it causal, and the device that it will be on."""

    causal: bool
    device: str


def guessed(roles: Set[Role], known: Mapping[Role, Any], around: Surroundings) -> dict[Role, Any]:
    """A value for every role of `roles`, given those that are known."""
    sizes = _sizes(roles, {role: value for role, value in known.items() if role in SIZES and _is_size(value)})
    d_head = int(sizes["d_head"])
    others: dict[Role, Any] = {
        "dropout": 0.1,
        "bias": True,
        "causal": around.causal,
        "batch_first": True,
        "layer": 0,
        "n_layers": 2,
        "device": around.device,
        "dtype": torch.float32,
        "eps": 1e-5,
        "theta": 10000.0,
        "scale": d_head**-0.5,
        "temperature": d_head**0.5,
    }
    return {role: sizes[role] if role in SIZES else others[role] for role in roles if role in SIZES or role in others}


def why(role: Role, around: Surroundings) -> str:
    """What a guess for the role rests on, in a few words."""
    return MEANINGS.get(role, "--causal" if around.causal else "no --causal")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _sizes(roles: Set[Role], known: Mapping[Role, int]) -> dict[Role, int]:
    """All sizes. `d_model = n_heads · d_head` where that leaves a choice, and `n_kv_heads` divide `n_heads`."""
    is_grouped = "n_kv_heads" in roles or "n_kv_heads" in known
    width = known.get("d_out", known.get("d_model"))
    n_heads = known.get("n_heads") or _n_heads(known, width, is_grouped)
    d_head = known.get("d_head") or (
        width // n_heads if width and width >= n_heads else D_HEAD if n_heads != D_HEAD else D_HEAD + 4
    )
    d_model = known.get("d_model") or known.get("d_out") or n_heads * d_head
    context = next(length for length in _CONTEXTS if length not in (d_model, n_heads * d_head))
    return {
        "d_model": d_model,
        "d_out": known.get("d_out") or (d_model if d_model % n_heads == 0 else n_heads * d_head),
        "n_heads": n_heads,
        "n_kv_heads": known.get("n_kv_heads") or _n_kv_heads(n_heads),
        "d_head": d_head,
        "d_v": known.get("d_v") or d_head,
        "context_length": known.get("context_length") or context,
    }


def _n_heads(known: Mapping[Role, int], width: int | None, is_grouped: bool) -> int:
    """How many heads, where nobody says: three at least, odd, and unlike their width, as far as the known sizes let them."""
    n_kv_heads, d_head = known.get("n_kv_heads", 1), known.get("d_head")
    if width and d_head and width % d_head == 0 and width // d_head % n_kv_heads == 0:
        return width // d_head
    candidates = [n for n in (_GROUPED_HEADS if is_grouped else _HEADS) if n % n_kv_heads == 0 and n != d_head]
    if "n_kv_heads" in known:
        candidates = [n_kv_heads * group for group in (3, 5, 2, 4, 1) if group != n_kv_heads] + [n_kv_heads]
    if not width or d_head:
        return candidates[0]
    return min(candidates, key=lambda n: _faults(n, width))


def _faults(n_heads: int, width: int) -> tuple[bool, ...]:
    """What speaks against a number of heads for a width, the worst first."""
    d_head = width // n_heads
    return (
        width % n_heads != 0,
        d_head < 2,
        n_heads < 3,
        d_head % 2 != 0,
        d_head < 4,
        d_head == n_heads,
        n_heads % 2 == 0,
    )


def _n_kv_heads(n_heads: int) -> int:
    """Kv heads for query heads: more than one, several queries each, and as many of both only where nothing else divides."""
    inner = [n for n in range(2, n_heads) if n_heads % n == 0]
    unlike = [n for n in inner if n * n != n_heads]
    odd = [n for n in unlike if n % 2]
    return max(odd) if odd and n_heads % 2 else (unlike or inner or [1])[0]
