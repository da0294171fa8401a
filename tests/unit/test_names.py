"""When the code itself says that a mask is not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mhacli.usercode.names import is_switched_off


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
