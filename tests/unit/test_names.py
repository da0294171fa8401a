"""When the code itself says that a mask is not read, and by which names it knows its sizes."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from mhacli.usercode.names import is_switched_off, names_within


def switched(self: Any, scores: Any, mask: Any = None) -> Any:
    if self.use_mask:
        scores = scores.masked_fill(mask == 0, -9)
    return scores


def left_early(self: Any, scores: Any, mask: Any = None) -> Any:
    if not self.masked or mask is None:
        return scores
    return scores.masked_fill(mask == 0, -9)


def chosen(self: Any, attend: Any, mask: Any = None) -> Any:
    return attend(attn_mask=mask if self.masked else None)


def of_five_axes(self: Any, scores: Any, mask: Any = None) -> Any:
    if mask is not None and mask.ndim == 5:
        scores = scores + mask
    return scores


def beside_memory(self: Any, scores: Any, mask: Any = None, memory: Any = None) -> Any:
    return scores if memory is None else scores + mask


def by_names(self: Any, scores: Any, mask: Any = None, memory: Any = None) -> Any:
    has_mask, has_memory = mask is not None, memory is not None
    if has_mask and has_memory:
        scores = scores + mask
    return scores


def switching(self: Any, attend: Any, mask: Any = None) -> Any:
    return attend(is_causal=mask is not None)


def in_one_kernel(self: Any, scores: Any, mask: Any = None) -> Any:
    if self.flash:
        return scores
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -9)
    return scores


def read_first(self: Any, scores: Any, mask: Any = None) -> Any:
    hidden = mask == 0
    return scores.masked_fill(hidden, -9) if self.masked else scores


def unkept(self: Any, scores: Any, memory_mask: Any = None, mask: Any = None) -> Any:
    if mask is not None and mask.any():
        scores = scores.masked_fill(mask == 0, -9)
    return scores


def replaced(self: Any, scores: Any, mask: Any = None) -> Any:
    if mask is not None:
        scores = scores.masked_fill(self.lower == 0, -9)
    return scores


OFF = (switched, left_early, chosen, of_five_axes, beside_memory, by_names, switching)
READ = (in_one_kernel, read_first, unkept, replaced)


@pytest.mark.parametrize("function", [*OFF, *READ])
def test_a_condition_says_that_a_mask_is_not_read(function: Callable[..., Any]) -> None:
    assert is_switched_off(function, "mask", ["memory"]) == (function in OFF)


class Layer(nn.Module):
    """Holds its number of heads under a name without a role, with which another name begins."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.parts = 3, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.part, -1))


@pytest.mark.parametrize(
    ("name", "expected"), [("forward", {}), ("split", {"n_heads": "self.part"})]
)
def test_a_size_has_the_name_of_an_attribute_that_the_function_uses(
    name: str, expected: dict[str, str]
) -> None:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(Layer, name)))).body
    assert isinstance(function, ast.FunctionDef)
    names = names_within(function, Layer(), parts=[], sizes={"n_heads": 3})
    assert {plain: names[plain] for plain in names if plain == "n_heads"} == expected
