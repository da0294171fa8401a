"""What somebody's attention is asked with: rows and lengths, and other ones, by which sizes can be told apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from mhacli.adapters.usercode.arguments import role_of
from mhacli.adapters.usercode.user_attention import Built, Inputs, MaskForm, UserAttention

_WIDTHS = (6, 10, 14, 4, 12, 16)
"""Of a head, in a second build: even, as rotary positions need."""
_COUNTS = (5, 3, 7, 4, 2)
_OF_WIDTH = ("d_model", "d_out")


@dataclass(frozen=True)
class Asked:
    """The sizes of one call, a function's `head` and `d_head` among them; the mask that it is given, if any."""

    batch: int
    q_len: int
    k_len: int
    d_in: int
    d_context: int
    n_heads: int | None = None
    takes_context: bool = False
    mask: MaskForm | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """By the words of the house."""
        found = {"batch": self.batch, "query": self.q_len, "key": self.k_len}
        if self.n_heads is not None:
            return {**found, "head": self.n_heads, "d_head": self.d_in}
        return {**found, "d_model": self.d_in, **({"d_context": self.d_context} if self.takes_context else {})}

    def inputs(self, seed: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        """Random rows of these sizes, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)

        def rows(length: int, width: int) -> Tensor:
            heads = () if self.n_heads is None else (self.n_heads,)
            made = torch.randn(self.batch, *heads, length, width, generator=generator)
            return made.to(device=device, dtype=dtype)

        queries = rows(self.q_len, self.d_in)
        is_function = self.n_heads is not None
        keys = rows(self.k_len, self.d_context) if self.takes_context or is_function else None
        values = rows(self.k_len, self.d_context) if is_function else None
        allowed = None
        if self.mask is not None:
            places = torch.arange(max(self.q_len, self.k_len), device=device)
            allowed = (places[: self.k_len] <= places[: self.q_len, None])[None, None]
        return Inputs(queries, keys, values, allowed)


def asked_of(subject: UserAttention, *, causal: bool) -> Asked:
    """The sizes that the subject is asked with first: keys are other rows, and of another number, where it lets them be. With
    `causal`, a mask says so where no argument does; queries and keys are then the same number of rows."""
    sizes = subject.sizes
    mask = subject.mask_forms[0] if causal and subject.causal_by is None and subject.mask_forms else None
    takes_context = subject.takes_context and not causal
    k_len = sizes.k_len if takes_context else sizes.q_len
    n_heads = subject.n_heads if subject.is_function else None
    return Asked(sizes.batch, sizes.q_len, k_len, sizes.d_in, sizes.d_context, n_heads, takes_context, mask)


def other_lengths(asked: Asked) -> Asked:
    """The same with another batch and shorter lengths, for some attention knows a longest one."""
    q_len = max(2, asked.q_len - 2)
    k_len = max(2, asked.k_len - 3) if asked.takes_context else q_len
    return replace(asked, batch=asked.batch + 2, q_len=q_len, k_len=k_len + (k_len == q_len and asked.takes_context))


def other_heads(asked: Asked) -> Asked:
    """Of a function: the same with more and wider heads; one that knows no heads keeps its one."""
    n_heads = asked.n_heads or 1
    return replace(
        asked, n_heads=n_heads if n_heads == 1 else n_heads + 2, d_in=asked.d_in + 2, d_context=asked.d_context + 2
    )


def other_widths(built: Built) -> Iterator[Mapping[str, Any]]:
    """Changes of its arguments that give it other heads and widths, the likeliest to work first; nothing where none of its
    arguments is known to be one."""
    roles = _roles(built)
    if not roles:
        return
    old = {role: value for role, (_, value) in roles.items()}
    old_heads, old_kv_heads = old.get("n_heads", 1), old.get("n_kv_heads")
    old_width = old.get("d_head") or old.get("d_model", 0) // max(1, old_heads)
    for width in _WIDTHS:
        for count in _COUNTS:
            group = 1 if old_kv_heads in (None, old_heads) else 2 if width == 6 else 3  # and not half a head's width
            n_heads = count * group if "n_heads" in old else 1
            if width in (old_width, n_heads) or (n_heads == old_heads and "n_heads" in old):
                continue
            new = {"n_heads": n_heads, "n_kv_heads": count, "d_head": width}
            new["d_v"] = width if old.get("d_v") == old.get("d_head") else width + 1
            for role in _OF_WIDTH:
                new[role] = n_heads * width + (0 if old.get(role) == old_heads * old_width else width)
            yield _changes(built, new)


def _roles(built: Built) -> dict[str, tuple[str, int]]:
    """The arguments that are sizes, by what each is, the first of each."""
    found: dict[str, tuple[str, int]] = {}
    for name, value in _counts(built):
        role = role_of(name.rpartition(".")[2], frozenset(built.arguments))
        if role is not None:
            found.setdefault(role, (name, value))
    return {role: one for role, one in found.items() if role in ("n_heads", "n_kv_heads", "d_head", "d_v", *_OF_WIDTH)}


def _counts(built: Built) -> Iterator[tuple[str, int]]:
    for name, value in built.arguments.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _changes(built: Built, new: Mapping[str, int]) -> Mapping[str, Any]:
    names = frozenset(built.arguments)
    found = {}
    for name, _ in _counts(built):
        role = role_of(name.rpartition(".")[2], names)
        if role is not None and role in new:
            found[name] = new[role]
    return found


def expected_of(asked: Asked, out: Tensor) -> tuple[int, ...]:
    """The shape that attention must give: a row for each query; how wide it is, is the author's choice."""
    width = out.shape[-1] if out.ndim else 1
    heads = () if asked.n_heads is None else (asked.n_heads,)
    expected = (asked.batch, *heads, asked.q_len, width)
    is_lost = prod(out.shape) % max(1, prod(expected[:-1]))
    return (*expected[:-1], asked.d_in) if is_lost or out.ndim != len(expected) else expected
