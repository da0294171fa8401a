"""The data types of user code: the built target, its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from mhacli.usercode.process import Stage, no_stage


@dataclass(frozen=True)
class Built:
    """The target, ready to be called.

    `thing` is the class or function that the target names. `call` is the callable: an `nn.Module`, an instance of another
    class, or the function itself. `module` is `call` if it is an `nn.Module`, else None. `arguments` are all constructor
    arguments, defaults included; `given` names those from the user, and `guesses` those that mha had to guess, with the reason
    of each. `rebuild(changes)` builds the target again with some arguments changed. `file` is its source file, None if there is
    none. `stage` is told when a call begins and ends, so that only calls have a time limit.
    """

    name: str
    thing: Any
    call: Callable[..., Any]
    module: nn.Module | None
    arguments: Mapping[str, Any]
    given: frozenset[str]
    guesses: Mapping[str, str]
    rebuild: Callable[[Mapping[str, Any]], Built]
    file: str | None = None
    stage: Stage = no_stage

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Tells the stage that a call begins, and at the end that it ended."""
        self.stage(f"calling {self.name}")
        try:
            yield
        finally:
            self.stage(f"examining {self.name}", limited=False)

    @property
    def files(self) -> list[str]:
        """The source file as a list, empty if there is none."""
        return [] if self.file is None else [self.file]


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
