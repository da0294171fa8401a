"""Asks a user's attention: random inputs of its sizes, calls with a seed, and copies in which a call leaves nothing behind."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.types import Inputs, InputSizes

T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)
MAX_COPIED = 100_000_000
"""Parameters of a module up to which `copy_or_none` copies it."""


# --------------------------------------------------------------------------------------------------------------- inputs


class InputDrawer:
    """Random inputs of given sizes: the same seed gives the same inputs in the same order.

    `n_heads` is None where rows are `[batch, length, width]`; of a function of q, k and v it is the number of heads, and rows are
    `[batch, head, length, width]`. `separate_values`: inputs with a context have rows of their own for the values too. Numbers
    are standard normal, drawn on the CPU in the dtype `drawn_in`, and given in `dtype` on `device`.
    """

    def __init__(
        self,
        sizes: InputSizes,
        *,
        seed: int,
        n_heads: int | None = None,
        separate_values: bool = False,
        drawn_in: torch.dtype = torch.float64,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.sizes, self.n_heads, self.separate_values = sizes, n_heads, separate_values
        self._seed, self._drawn_in, self._dtype, self._device = seed, drawn_in, dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def restart(self) -> None:
        """Begins again with the first numbers of the seed."""
        self.generator.manual_seed(self._seed)

    def numbers(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        drawn = torch.randn(shape, generator=self.generator, dtype=self._drawn_in)
        return drawn.to(device=self._device, dtype=self._dtype)

    def rows(self, length: int, *, context: bool = False, batch: int | None = None) -> Tensor:
        """Rows of the width of the queries, or of the context."""
        heads = () if self.n_heads is None else (self.n_heads,)
        width = self.sizes.d_context if context else self.sizes.d_in
        return self.numbers(batch or self.sizes.batch, *heads, length, width)

    def inputs(
        self, *, with_context: bool, q_len: int | None = None, k_len: int | None = None, batch: int | None = None
    ) -> Inputs:
        """Rows that attend to themselves, where the widths allow it, or `with_context` to other rows, of another number; of a
        function q, k and v."""
        q_len = q_len or self.sizes.q_len
        queries = self.rows(q_len, batch=batch)
        if not with_context and self.n_heads is None and self.sizes.d_in == self.sizes.d_context:
            return Inputs(queries)
        k_len = k_len or self.sizes.k_len if with_context else q_len
        keys = self.rows(k_len, context=True, batch=batch)
        has_values = self.n_heads is not None or (with_context and self.separate_values)
        return Inputs(queries, keys, self.rows(k_len, context=True, batch=batch) if has_values else None)

    def replaced(
        self, inputs: Inputs, places: Sequence[int], *, by: float | None = None, factor: float = 1.0
    ) -> Inputs:
        """The inputs with other rows at some keys, and other values: `factor` times new numbers, or the number `by`. Where the
        keys are the queries' own rows, the queries change too."""

        def changed(rows: Tensor) -> Tensor:
            shape = (*rows.shape[:-2], len(places), rows.shape[-1])
            other = rows.clone()
            other[..., list(places), :] = self.numbers(*shape) * factor if by is None else by
            return other

        if inputs.keys is None:
            return inputs._replace(queries=changed(inputs.queries))
        values = None if inputs.values is None else changed(inputs.values)
        return inputs._replace(keys=changed(inputs.keys), values=values)

    def allowed(self, inputs: Inputs) -> Tensor:
        """A random mask `[batch, 1, query, key]` that leaves each query a key, and is neither symmetric nor a triangle."""
        batch, q_len, k_len = lengths_of(inputs)
        keep = torch.rand(batch, 1, q_len, k_len, generator=self.generator) < 0.6
        keep[..., torch.arange(q_len), torch.randint(k_len, (q_len,), generator=self.generator)] = True
        return keep

    def real(self, inputs: Inputs, *, on_the_right: bool = True) -> Tensor:
        """Padding `[batch, key]` that differs from sequence to sequence: on the right, or anywhere, in the first position too."""
        batch, _, k_len = lengths_of(inputs)
        if on_the_right:
            lengths = torch.tensor([max(1, k_len - 1 - row * max(1, k_len // 3)) for row in range(batch)])
            lengths[-1] = k_len if batch > 1 else lengths[-1]
            return torch.arange(k_len)[None] < lengths[:, None]
        real = torch.rand(batch, k_len, generator=self.generator) < 0.7
        real[0, 0], real[-1, 0] = True, batch == 1 or k_len == 1
        real[:, -1] |= ~real.any(dim=1)
        return real


def lengths_of(inputs: Inputs) -> tuple[int, int, int]:
    """How many sequences, queries and keys there are."""
    keys = inputs.queries if inputs.keys is None else inputs.keys
    return inputs.queries.shape[0], inputs.queries.shape[-2], keys.shape[-2]


def map_rows(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with each tensor of rows changed; masks stay."""
    keys = None if inputs.keys is None else change(inputs.keys)
    values = None if inputs.values is None else change(inputs.values)
    return inputs._replace(queries=change(inputs.queries), keys=keys, values=values)


# ---------------------------------------------------------------------------------------------------------------- calls


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """What torch draws inside begins with `seed`; afterwards its generators go on as if nothing had been drawn."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        (torch.manual_seed if is_cuda else torch.default_generator.manual_seed)(seed)  # the latter is ten times as fast
        yield


# --------------------------------------------------------------------------------------------------------------- copies


def copied(thing: T) -> T:
    """A copy, or the thing itself where its author's objects cannot be copied."""
    try:
        return copy.deepcopy(thing)
    except Exception:  # it may hold anything
        return thing


def copy_or_none(module: Module | None) -> Module | None:
    """A copy; None where there is no module, where it is huge, and where it cannot be copied."""
    if module is None or sum(parameter.numel() for parameter in module.parameters()) > MAX_COPIED:
        return None
    try:
        return copy.deepcopy(module)
    except Exception:  # it may hold anything
        return None


def cast(module: Module, dtype: torch.dtype, device: torch.device | str | None = None) -> Module:
    """The module itself with its floating parameters and buffers in `dtype`, on `device` where one is given.

    Complex numbers become those of the same precision, complex64 at least, because few operations take narrower ones.
    Integers and truth values stay as they are. `nn.Module.to` would drop the imaginary parts, and with them the angles of a
    rotary table.
    """
    module._apply(lambda t: t.to(device=device, dtype=cast_dtype(t, dtype)))  # type: ignore[no-untyped-call]
    return module


def cast_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor has in a module whose floating numbers are in `dtype`."""
    if tensor.is_complex():
        return torch.promote_types(dtype, torch.float32).to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def cast_copy(module: Module, dtype: torch.dtype, device: torch.device | str | None = None) -> Module:
    """A copy of a module, cast. Raises what copying raises."""
    return cast(copy.deepcopy(module), dtype, device)


def float64_copy(call: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a module or an instance whose floating tensors are float64 and complex ones complex128, also those that are
    registered nowhere; a function as it is. Raises what copying raises."""
    if inspect.isroutine(call):
        return call
    other = copy.deepcopy(call)
    held = vars(other).values() if hasattr(other, "__dict__") else ()
    roots = [other] if isinstance(other, nn.Module) else [part for part in held if isinstance(part, nn.Module)]
    parts: list[Any] = [part for root in roots for part in cast(root, torch.float64).modules()]
    for part in parts if isinstance(other, nn.Module) else [other, *parts]:
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if isinstance(value, Tensor):
                part.__dict__[name] = value.to(cast_dtype(value, torch.float64))
    return other
