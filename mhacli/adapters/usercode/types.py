"""The plain data of user code: what was built, what it is asked, what it gives, and the operations that ran meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from mhacli.adapters.usercode.process import SourceLine


class Guess(NamedTuple):
    """An argument that was not given: its `name`, the `value` that was taken, and `why`, in a few words."""

    name: str
    value: object
    why: str


@dataclass(frozen=True)
class Built:
    """What is examined, ready to be called.

    `thing` is the class or function that the target names, `call` what is called: an `nn.Module`, an instance of another
    class, or the function itself. `module` is `call` where it is an `nn.Module`, else None. `arguments` are those that the
    constructor ran with, defaults included; `given` those that the user gave; `guesses` those that nobody gave and that have no
    default. `rebuild(changes)` builds it anew with some arguments changed; it raises what the constructor raises.
    `documentation` is what its author says: docstrings and comments of the class or function, and of its file. `file` is where
    its source stands, None where there is none to read.
    """

    name: str
    thing: Any
    call: Callable[..., Any]
    module: nn.Module | None
    arguments: Mapping[str, Any]
    given: frozenset[str]
    guesses: tuple[Guess, ...]
    rebuild: Callable[[Mapping[str, Any]], Built]
    documentation: str = ""
    file: str | None = None

    @property
    def files(self) -> list[str]:
        """The file of its source, as far as there is one."""
        return [] if self.file is None else [self.file]


MaskKind = Literal["bool", "01", "whole", "additive", "lengths"]
MaskMeaning = Literal["keep", "hide"]


class MaskForm(NamedTuple):
    """A way to write a mask for a parameter of a user's attention.

    `axes` are words of `batch head query key`, in order; ("batch", "key") is a padding mask, ("batch",) lengths. `kind`: bool;
    01, numbers in the module's dtype; whole, integers 0 and 1; additive, 0 and −∞ in the module's dtype; lengths, how many tokens
    each sequence has. `true_means` says what True or 1 stands for; of additive and lengths it is always keep. `n_shared`: along
    the batch the mask has one in so many, which serve the sequences in turn, as masks of windows serve several images.
    """

    parameter: str
    axes: tuple[str, ...]
    kind: MaskKind
    true_means: MaskMeaning = "keep"
    n_shared: int = 1


class Inputs(NamedTuple):
    """What attention is asked about.

    Rows `[batch, query, d_in]` and `[batch, key, d_in]`; of a function of q, k and v, `[batch, head, query, d_head]` and
    `[batch, kv_head, key, d_head]`. `keys` of None are the queries' own rows, `values` of None those of the keys. `allowed`, bool
    `[batch or 1, 1, query, key]`, is what a mask argument is to say, `real`, bool `[batch, key]`, what a padding argument is to
    say: True = may attend, True = a token.
    """

    queries: Float[Tensor, "..."]
    keys: Float[Tensor, "..."] | None = None
    values: Float[Tensor, "..."] | None = None
    allowed: Bool[Tensor, "..."] | None = None
    real: Bool[Tensor, "batch key"] | None = None


class AttentionOutput(NamedTuple):
    """What attention answered: `out` `[batch, query, d_out]`, of a function `[batch, head, query, d_v]`; and the pattern that
    it returned besides, `[batch, head, query, key]`, with one head where it is their mean, None where it returns none."""

    out: Float[Tensor, "..."]
    pattern: Float[Tensor, "batch head query key"] | None = None


@dataclass(frozen=True)
class InputSizes:
    """The sizes that it is asked with. Pairwise different, and different from its own, as far as it lets them be."""

    batch: int
    q_len: int
    k_len: int
    d_in: int
    d_context: int


@dataclass(eq=False)
class Operation:
    """One call of a torch function while a user's attention ran, in order.

    `name` is torch's own, such as `softmax`, `matmul`, `linear`, `masked_fill`; `inputs` are the tensors that went in, `output`
    what came out, `arguments` those that are no tensors, by name where the name is known, else by place ("0", "1", …).
    `file` and `line` say where the author's own code asked for it, None where it was not the author's code; `source` is that
    line. Tensors are exchanged for copies before a later operation writes into their memory.
    """

    name: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    arguments: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None
    line: int | None = None
    source: str = ""

    @property
    def at(self) -> SourceLine:
        """The author's line."""
        return SourceLine(self.file, self.line, self.source)
