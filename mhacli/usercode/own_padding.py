"""The padding that a model recognises among its own ids."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .axes import at_sizes
from .build import Built, is_of_torch
from .door import NO_ANSWER, on_behalf
from .foreign import FunctionMode
from .names import source_of
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


def stated_pads(built: Built, table: nn.Embedding | None) -> list[int]:
    """The ids that a config, the table of the ids, or attributes state to be those of padding."""
    of_config = getattr(getattr(built.module, "config", None), "pad_token_id", None)
    stated = [of_config, getattr(table, "padding_idx", None), *_named(built, _PAD)]
    return [*dict.fromkeys(i for i in stated if type(i) is int and i >= 0)]


def _named(built: Built, names: re.Pattern[str]) -> Iterator[int]:
    """The whole numbers that a model of the user's holds under some names."""
    for part in built.parts.values():
        for name, value in vars(part).items():
            if type(value) is int and names.fullmatch(name.lower()) and not is_of_torch(part):
                yield value


class _Comparisons(FunctionMode):
    """Notes the ids which tensors of ids are compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Tensor, int, bool]] = []

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Notes a comparison that a function is."""
        name = getattr(func, "__name__", "").strip("_")
        if args and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            ids, *others = args
            told = _id_told_apart(name, _whole_number(others[0]) if others else None)
            if told is not None:
                self.noted.append((ids.detach().clone(), told, name == "eq"))
        return on_behalf(func, *args, **kwargs)

    def of(self, ids: Tensor) -> list[tuple[int, bool]]:
        """What these ids were compared with, however they lie, and whether for being equal."""
        own, _ = ids.flatten().sort()
        return [
            (number, is_equal)
            for compared, number, is_equal in self.noted
            if compared.numel() == len(own) and torch.equal(compared.flatten().sort()[0], own)
        ]


def _whole_number(value: object) -> int | None:
    """A number, also in a tensor; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        return int(value)
    return value if type(value) is int else None


def _id_told_apart(name: str, number: int | None) -> int | None:
    """The id which an operation tells from all others; None if it tells none."""
    if name in ("eq", "ne"):
        return number
    is_of_zero = (name, number) in (("gt", 0), ("ge", 1))
    return 0 if is_of_zero or name in ("bool", "sign", "logical_not") else None


def own_padding(attention: UserAttention, stated: Sequence[int], source: str | None) -> OwnPadding:
    """The ids of padding with which a model compares its texts, and its `source`. Of several that
    which is stated counts, else the first that no name says to be another special token. Codes look
    for the end of a text, or for a mask, by `==`: so only 0 is looked for as padding, unless the
    source names padding.
    """
    comparisons = _Comparisons()
    inputs = attention.drawer(0).inputs(with_context=False)
    with suppress(*NO_ANSWER):  # compiled code refuses to be watched
        attention(inputs, seed=0, within=comparisons)
    others = {*_named(attention.built, _SPECIAL)}
    code = "".join(source_of(cls) for cls in type(attention.module).__mro__)
    names_padding = re.search(r"== *[\w.]*pad|eq\([\w.]*pad", code, re.I)

    def pad_of(ids: Tensor) -> int | None:
        """The id of padding that the code looks for among these ids, a stated one before another;
        None if it looks for none.
        """
        found = [each for each in comparisons.of(ids) if each[0] >= 0]
        plain = [
            number
            for number, is_equal in found
            if number not in others and (not is_equal or number == 0 or names_padding)
        ]
        known = [number for number, _ in found if number in stated]
        return next(iter([*known, *plain]), None)

    source_pad = None
    if source is not None:
        source_pad = pad_of(at_sizes(attention.others[source], attention.sizes_of(inputs)))
    return OwnPadding(pad_of(inputs.queries), source_pad)
