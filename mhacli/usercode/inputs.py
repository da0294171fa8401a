"""The inputs of a user's attention and the forms of its masks, random inputs, seeded calls, and copies of modules."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)


# --------------------------------------------------------------------------------------------------------------- inputs


MaskKind = Literal["bool", "01", "whole", "additive", "lengths"]
MaskMeaning = Literal["keep", "hide"]


class MaskForm(NamedTuple):
    """The format of a mask argument.

    `axes` are words of `batch head query key`, in order; ("batch", "key") is a padding mask, ("batch",) lengths. `kind`: bool;
    01, numbers in the module's dtype; whole, integers 0 and 1; additive, 0 and −∞ in the module's dtype; lengths, the number of
    tokens of each sequence. `true_means` is the meaning of True or 1, always keep for additive masks and lengths. `n_shared`:
    the batch axis of the mask is shorter by this factor and repeats, as the masks of windows repeat for each image.
    """

    parameter: str
    axes: tuple[str, ...]
    kind: MaskKind
    true_means: MaskMeaning = "keep"
    n_shared: int = 1


class Inputs(NamedTuple):
    """The inputs of a call.

    Queries `[batch, query, d_in]` and keys `[batch, key, d_in]`; for a function of q, k and v, `[batch, head, query, d_head]`
    and `[batch, kv_head, key, d_head]`. `keys` is None for self-attention; `values` is None if they are the keys. `allowed`,
    bool `[batch or 1, 1, query, key]`, is True where a query may attend to a key. `real`, bool `[batch, key]`, is True for
    tokens and False for padding.
    """

    queries: Float[Tensor, "..."]
    keys: Float[Tensor, "..."] | None = None
    values: Float[Tensor, "..."] | None = None
    allowed: Bool[Tensor, "..."] | None = None
    real: Bool[Tensor, "batch key"] | None = None


@dataclass(frozen=True)
class InputSizes:
    """The sizes of the inputs. They differ from each other and from the sizes of the module as far as the module allows."""

    batch: int
    q_len: int
    k_len: int
    d_in: int
    d_context: int


class InputDrawer:
    """Random inputs of given sizes, in float64 on the CPU. The same seed gives the same inputs in the same order.

    `n_heads` is None for inputs `[batch, length, width]`. For a function of q, k and v it is the number of heads, and inputs
    are `[batch, head, length, width]`. With `separate_values`, inputs with a context also have separate values. Numbers are
    standard normal.
    """

    def __init__(
        self, sizes: InputSizes, *, seed: int, n_heads: int | None = None, separate_values: bool = False
    ) -> None:
        self.sizes, self.seed, self.n_heads, self.separate_values = sizes, seed, n_heads, separate_values
        self.generator = torch.Generator().manual_seed(seed)

    def restart(self) -> None:
        """Starts the random sequence again."""
        self.generator.manual_seed(self.seed)

    def numbers(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def rows(self, length: int, *, context: bool = False, batch: int | None = None) -> Tensor:
        """Token vectors of the query width, or of the context width."""
        heads = () if self.n_heads is None else (self.n_heads,)
        width = self.sizes.d_context if context else self.sizes.d_in
        return self.numbers(batch or self.sizes.batch, *heads, length, width)

    def inputs(
        self, *, with_context: bool, q_len: int | None = None, k_len: int | None = None, batch: int | None = None
    ) -> Inputs:
        """Inputs for self-attention where the widths allow it. `with_context`, and for a function of q, k and v, the keys are a
        separate sequence of another length."""
        q_len = q_len or self.sizes.q_len
        queries = self.rows(q_len, batch=batch)
        if not with_context and self.n_heads is None and self.sizes.d_in == self.sizes.d_context:
            return Inputs(queries)
        k_len = k_len or self.sizes.k_len if with_context else q_len
        keys = self.rows(k_len, context=True, batch=batch)
        has_values = self.n_heads is not None or (with_context and self.separate_values)
        return Inputs(queries, keys, self.rows(k_len, context=True, batch=batch) if has_values else None)

    def replaced(self, inputs: Inputs, key: int, *, factor: float = 1.0) -> Inputs:
        """The inputs with another key and value at a position: `factor` times new random numbers. Without separate keys, the
        query changes."""

        def change(rows: Tensor) -> Tensor:
            new_rows = rows.clone()
            new_rows[..., key, :] = factor * self.numbers(*rows[..., key, :].shape)
            return new_rows

        if inputs.keys is None:
            return inputs._replace(queries=change(inputs.queries))
        values = None if inputs.values is None else change(inputs.values)
        return inputs._replace(keys=change(inputs.keys), values=values)

    def allowed(self, inputs: Inputs) -> Tensor:
        """A random mask `[batch, 1, query, key]` that leaves each query a key, and is neither symmetric nor triangular."""
        batch, q_len, k_len = lengths_of(inputs)
        keep = torch.rand(batch, 1, q_len, k_len, generator=self.generator) < 0.6
        keep[..., torch.arange(q_len), torch.randint(k_len, (q_len,), generator=self.generator)] = True
        return keep

    def real(self, inputs: Inputs, *, on_the_right: bool = True) -> Tensor:
        """Padding `[batch, key]` that differs between sequences: on the right, or anywhere, the first position included."""
        batch, _, k_len = lengths_of(inputs)
        if on_the_right:
            lengths = torch.tensor([max(1, k_len - 1 - row * max(1, k_len // 3)) for row in range(batch)])
            lengths[-1] = k_len if batch > 1 else lengths[-1]
            return torch.arange(k_len) < lengths[:, None]
        real = torch.rand(batch, k_len, generator=self.generator) < 0.7
        real[0, 0], real[-1, 0] = True, batch == 1 or k_len == 1
        real[:, -1] |= ~real.any(dim=1)
        return real


def lengths_of(inputs: Inputs) -> tuple[int, int, int]:
    """The numbers of sequences, queries and keys."""
    keys = inputs.queries if inputs.keys is None else inputs.keys
    return inputs.queries.shape[0], inputs.queries.shape[-2], keys.shape[-2]


def map_rows(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with `change` applied to queries, keys and values; the masks stay."""
    keys = None if inputs.keys is None else change(inputs.keys)
    values = None if inputs.values is None else change(inputs.values)
    return inputs._replace(queries=change(inputs.queries), keys=keys, values=values)


# ---------------------------------------------------------------------------------------------------------------- calls


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators inside the block and restores their state afterwards."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        (torch.manual_seed if is_cuda else torch.default_generator.manual_seed)(seed)  # the latter is ten times as fast
        yield


# --------------------------------------------------------------------------------------------------------------- copies


def copied(obj: T) -> T:
    """A deep copy, or the object itself if it cannot be copied."""
    try:
        return copy.deepcopy(obj)
    except Exception:  # user objects may raise anything
        return obj


def cast(module: Module, dtype: torch.dtype, device: torch.device | str | None = None) -> Module:
    """Casts floating parameters and buffers in place to `dtype`, moves the module to `device` if given, and returns it.

    Complex tensors get the same precision, complex64 at least, because few operations support narrower ones. Integers and bools
    keep their dtype. `nn.Module.to` would drop imaginary parts, and with them the angles of a rotary table.
    """
    module._apply(lambda t: t.to(device=device, dtype=cast_dtype(t, dtype)))  # type: ignore[no-untyped-call]
    return module


def cast_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor after its module is cast to `dtype`."""
    if tensor.is_complex():
        return torch.promote_types(dtype, torch.float32).to_complex()
    return dtype if tensor.is_floating_point() else tensor.dtype


def cast_copy(module: Module, dtype: torch.dtype, device: torch.device | str | None = None) -> Module:
    """A cast copy of a module. Raises what copying raises."""
    return cast(copy.deepcopy(module), dtype, device)


def float64_copy(call: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a module or instance with float64 and complex128 tensors, unregistered ones included. A function is returned
    unchanged. Raises what copying raises."""
    if inspect.isroutine(call):
        return call
    copied_call = copy.deepcopy(call)
    roots = [copied_call, *getattr(copied_call, "__dict__", {}).values()]
    modules = [cast(root, torch.float64).modules() for root in roots if isinstance(root, nn.Module)]
    for part in {copied_call, *itertools.chain(*modules)}:
        for name, value in list(getattr(part, "__dict__", {}).items()):
            if isinstance(value, Tensor):
                part.__dict__[name] = value.to(cast_dtype(value, torch.float64))
    return copied_call
