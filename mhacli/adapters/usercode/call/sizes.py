"""The sizes that somebody's attention can be asked with: what its arguments, parameters and errors tell of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from mhacli.adapters.usercode.arguments import SPELLINGS
from mhacli.adapters.usercode.user_attention import Built

_WIDTHS = {
    "in": """d_in dim_in input_dim in_dim in_features input_size query_dim q_dim query_size d_input in_channels
        d_model embed_dim emb_dim embedding_dim embed_size hidden_size n_embd model_dim dim_model dim hidden_dim
        emb_size embedding_size d_emb d_embed n_embed dmodel num_hiddens n_state width channels d c k emb
        n_units hidden size feature_dim num_features features model_size units hid_dim""",
    "context": """d_context context_dim cross_attention_dim kdim d_ctx kv_dim encoder_dim dim_context d_kv_in key_dim_in
        memory_dim d_memory d_cross encoder_hidden_size dim_kv key_size cross_dim context_width d_encoder d_cond""",
}
"""What the widths of rows are called, the surest name first."""
_HEADS, _D_HEAD, _LIMITS = (
    frozenset(name.replace("_", "") for name in SPELLINGS[role].split())
    for role in ("n_heads", "d_head", "context_length")
)
_LONGEST = 4096
"""The longest sequence that a fixed length is tried with."""
FREE_WIDTH, FREE_HEADS, FREE_HEAD_WIDTH = 32, 4, 8
"""The widths and heads of what has none of its own, such as a plain function."""


class Known(NamedTuple):
    """What is known before any call. `widths` and `context_widths` are the likely ones, the likeliest first; `limits` the
    lengths that it may not bear more than, or nothing but; `taken` numbers that lengths had better not be."""

    widths: tuple[int, ...]
    context_widths: tuple[int, ...]
    n_heads: int | None
    d_head: int | None
    limits: tuple[int, ...]
    taken: frozenset[int]


class Lengths(NamedTuple):
    """The lengths of an experiment."""

    batch: int
    q_len: int
    k_len: int


def known_of(built: Built) -> Known:
    """What the arguments and the parameters tell."""
    numbers = dict(_numbers(built.arguments))
    shapes = _shapes(built.module)
    n_heads = _spelled(built, numbers, _HEADS)
    widths = list(_values(numbers, _WIDTHS["in"].split()))
    linear = _linear_widths(built.module, r"(^|[._])(w?_?q|to_?q|query|queries|qkv|c_attn|in_proj|w?qkv)")
    context = [
        *_values(numbers, _WIDTHS["context"].split()),
        *_linear_widths(built.module, r"(^|[._])(w?_?kv?|to_?kv?|keys?|key_value)"),
    ]
    sides = [size for _, shape in shapes for size in shape[-2:]] if not widths and not linear else []
    first = _unique([*widths, *linear, *_linear_widths(built.module, ""), *(side for side in sides if side > 1)])
    d_head = _spelled(built, numbers, _D_HEAD)
    if d_head is None and n_heads and first and first[0] % n_heads == 0:
        d_head = first[0] // n_heads
    if n_heads is None and d_head and first and first[0] % d_head == 0:
        n_heads = first[0] // d_head
    taken = {*numbers.values(), *(size for _, shape in shapes for size in shape), d_head or 0, n_heads or 0}
    limit = _spelled(built, numbers, _LIMITS)
    limits = [*([limit] if limit else []), *_square_buffers(built.module), *_position_rows(shapes)]
    return Known(tuple(first), tuple(_unique(context)), n_heads, d_head, tuple(_unique(limits)), frozenset(taken))


def _numbers(arguments: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, int]]:
    """Whole numbers among the arguments, and in those that are configurations, by name."""
    for name, value in arguments.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield name.lower(), value
        elif depth < 2 and not isinstance(value, Tensor | nn.Module):
            yield from _numbers(_fields(value), depth + 1)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {name: part for name, part in value.items() if isinstance(name, str)}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else {}


def _values(numbers: Mapping[str, int], names: Iterable[str]) -> Iterator[int]:
    return (numbers[name] for name in names if numbers.get(name, 0) > 0)


def _spelled(built: Built, numbers: Mapping[str, int], names: frozenset[str]) -> int | None:
    """The first number of one of these names, without underscores, among the arguments or the attributes of a module."""
    own = {} if built.module is None else vars(built.module)
    held = {name: value for name, value in own.items() if isinstance(value, int) and not isinstance(value, bool)}
    found = (value for name, value in [*numbers.items(), *held.items()] if name.lower().replace("_", "") in names)
    return next((value for value in found if value > 0), None)


def _shapes(module: nn.Module | None) -> list[tuple[str, tuple[int, ...]]]:
    if module is None:
        return []
    return [
        (name, tuple(p.shape)) for name, p in module.named_parameters() if not nn.parameter.is_lazy(p) and p.ndim > 1
    ]


def _linear_widths(module: nn.Module | None, pattern: str) -> list[int]:
    """How many columns the linear layers take whose name matches, in the order in which they were made."""
    if module is None:
        return []
    found = [(name, part) for name, part in module.named_modules() if re.search(pattern, name, re.I)]
    widths = []
    for _, part in found:
        if isinstance(part, nn.Linear):
            widths.append(part.in_features)
        elif type(part).__name__ == "Conv1D" and isinstance(getattr(part, "weight", None), Tensor):
            widths.append(part.weight.shape[0])
        elif isinstance(part, nn.Conv1d | nn.Conv2d):
            widths.append(part.in_channels)
    return [width for width in widths if width > 0]


def _square_buffers(module: nn.Module | None) -> list[int]:
    """Sides of square buffers: most often a causal mask of the longest sequence."""
    buffers = [] if module is None else [buffer for buffer in module.buffers() if buffer.ndim > 1]
    return [buffer.shape[-1] for buffer in buffers if buffer.shape[-1] == buffer.shape[-2] and buffer.shape[-1] > 1]


def _position_rows(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> list[int]:
    return [shape[-2] for name, shape in shapes if re.search(r"pos|rel|(^|\.)er$", name, re.I)]


def _unique(numbers: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(numbers))


def lengths_to_try(known: Known, *, apart: bool, hinted: Iterable[int] = ()) -> list[Lengths]:
    """The sizes of experiments, the most telling first: with keys of another number than queries where they may be (`apart`),
    then of the same, then those that the limits say, then even ones."""
    limit = min(known.limits, default=None)
    batch = _pick((3, 4, 6), known.taken, None)
    q_len = _pick((5, 7, 9, 6), known.taken | {batch}, limit)
    k_len = _pick((11, 13, 10, 9, 8, 7, 6, 5, 4, 3, 2), known.taken | {batch, q_len}, limit)
    same = _pick((7, 5, 9, 6, 4, 3, 2), known.taken | {batch}, limit)
    found = [Lengths(batch, q_len, k_len)] if apart and q_len != k_len else []
    found.append(Lengths(batch, same, same))
    for exact in _unique(
        [*hinted, *sorted(known.limits), *(size for size in (8, 16) if limit is None or size <= limit)]
    ):
        if 1 < exact <= _LONGEST:
            found += [Lengths(batch if batch != exact else batch + 1, exact, exact)]
    return list(dict.fromkeys(found))


def _pick(preferred: tuple[int, ...], taken: frozenset[int], limit: int | None) -> int:
    small = [number for number in preferred if limit is None or number <= limit] or [limit or preferred[0]]
    return next((number for number in small if number not in taken), small[0])


_MOST_HINTS = 8
_WIDTH_ERRORS = (
    r"shapes cannot be multiplied \(\d+x\d+ and (\d+)x\d+\)", r"embedding dim(?:ension)? of (\d+)", r"normalized_shape=\[(\d+)\]",
    r"expected input\[.*?\] to have (\d+) channels", r"last dim(?:ension)? (?:to be|must be|of) (\d+)",
)  # fmt: skip


def widths_told(errors: Iterable[str]) -> list[int]:
    """The widths that errors of torch said were wanted."""
    return _told(errors, _WIDTH_ERRORS)


def lengths_told(errors: Iterable[str]) -> list[int]:
    """Numbers in errors that may be the length that is wanted: sizes that were there, and those that an author names."""
    return [number for number in _told(errors, (r"(?<![\w.])(\d+)(?![\w.])",)) if 3 < number <= _LONGEST][:_MOST_HINTS]


def _told(errors: Iterable[str], patterns: Iterable[str]) -> list[int]:
    return _unique(int(match[1]) for error in errors for pattern in patterns for match in re.finditer(pattern, error))
