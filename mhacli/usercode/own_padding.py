"""The padding that a model recognises among its own ids."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .axes import at_sizes
from .door import NO_ANSWER, on_behalf, ours, plainly
from .user_attention import UserAttention

_PAD = re.compile(r"(\w+_)?pad(ding)?_?(tok(en)?_?)?(id|idx|index)|(\w+_)?pad(ding)?_?tok(en)?")
"""Names of the id of padding."""
_SPECIAL = re.compile(
    r"(\w+_)?(bos|eos|sos|sep|cls|mask|unk|start|end)_?(tok(en)?_?)?(id|idx|index)"
)
"""Names of the ids of other special tokens."""


class OwnPadding(NamedTuple):
    """The ids of padding with which a model compares its texts, and what its encoder reads, and so
    makes masks; None for none.
    """

    pad: int | None = None
    source_pad: int | None = None


def stated_pads(module: nn.Module | None, table: nn.Embedding | None) -> list[int]:
    """The ids that a config, the table of the ids, or attributes state to be those of padding."""
    of_config = getattr(getattr(module, "config", None), "pad_token_id", None)
    stated = [of_config, getattr(table, "padding_idx", None), *_named(module, _PAD)]
    return [*dict.fromkeys(i for i in stated if type(i) is int and i >= 0)]


def _named(module: nn.Module | None, names: re.Pattern[str]) -> Iterator[int]:
    """The whole numbers that a model of the user's holds under some names."""
    for part in [] if module is None else module.modules():
        is_of_torch = type(part).__module__.startswith("torch.")
        for name, value in [] if is_of_torch else vars(part).items():
            if type(value) is int and names.fullmatch(name.lower()):
                yield value


@dataclass
class _Comparisons(TorchFunctionMode):
    """Notes the ids which tensors of ids are compared with."""

    noted: list[tuple[Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @ours(instead=plainly)
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if len(args) == 2 and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            ids, number = args
            is_number = type(number) is int or (isinstance(number, Tensor) and number.numel() == 1)
            # ids > 0 and ids >= 1 tell 0 from all others
            least = {"eq": 0, "ne": 0, "gt": 0, "ge": 1}.get(name)
            if least is not None and is_number and (name in ("eq", "ne") or int(number) == least):
                self.noted.append((ids.detach().clone(), int(number) - least))
        return on_behalf(func, *args, **(kwargs or {}))

    def of(self, ids: Tensor) -> list[int]:
        """What these ids were compared with, however they lie."""
        own, _ = ids.flatten().sort()
        return [
            number
            for compared, number in self.noted
            if compared.numel() == len(own) and torch.equal(compared.flatten().sort()[0], own)
        ]


def own_padding(attention: UserAttention, stated: Sequence[int], source: str | None) -> OwnPadding:
    """The ids of padding with which a model compares its texts, and its `source`. Of several that
    which is stated counts, else the first that no name says to be another special token.
    """
    comparisons, inputs = _Comparisons(), attention.drawer(0).inputs(with_context=False)
    with suppress(*NO_ANSWER):  # compiled code refuses to be watched
        attention(inputs, seed=0, within=comparisons)
    others = {*_named(attention.built.module, _SPECIAL)}

    def pad_of(ids: Tensor) -> int | None:
        found = [each for each in comparisons.of(ids) if each >= 0]
        plain = [each for each in found if each not in others]
        return next((each for each in found if each in stated), next(iter(plain), None))

    source_pad = None
    if source is not None:
        source_pad = pad_of(at_sizes(attention.others[source], attention.sizes_of(inputs)))
    return OwnPadding(pad_of(inputs.queries), source_pad)
