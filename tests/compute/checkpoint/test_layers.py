"""Masks that cannot be read are named, and those that were written to in place are read again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.model_families import sequences_of
from torch import Tensor

from mhacli.adapters.hf.calls import ScoredCall
from mhacli.adapters.hf.captured_pattern import KnownMasks
from mhacli.adapters.hf.inputs import ModelInputs
from mhacli.compute.checkpoint.layers import axes_of, misfit

BATCH, HEADS, LENGTH = 2, 3, 5


def called(mask: Any, level: Any = "registry") -> ScoredCall:
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, 4) for _ in range(3))
    place: dict[str, Any] = {"name": "attn", "layer": 0, "kind": "self", "part": 0, "implementation": "sdpa"}
    return ScoredCall(**place, level=level, q=q, k=k, v=v, z=v, scale=0.5, mask=mask)


@pytest.mark.parametrize(
    ("mask", "level", "reason"),
    [
        (None, "registry", None),
        (torch.ones(BATCH, 1, LENGTH, LENGTH), "registry", None),
        (torch.ones(1, 1, 1, LENGTH, dtype=torch.bool), "module", None),
        (torch.ones(LENGTH, LENGTH), "sdpa", None),
        (object(), "registry", "attention whose mask is of type object, not a tensor"),
        (torch.ones(BATCH, LENGTH), "registry",
         "attention whose mask [2, 5] has other axes than batch, head, query and key"),
        (torch.ones(BATCH, 1, LENGTH, LENGTH + 1), "registry",
         "attention whose mask [2, 1, 5, 6] has other axes than batch, head, query and key"),
    ],
)  # fmt: skip
def test_a_mask_that_cannot_be_read_is_named(mask: Any, level: str, reason: str | None) -> None:
    texts = sequences_of(torch.zeros(BATCH, LENGTH, dtype=torch.long))
    inputs = ModelInputs(texts, None, "right", {})
    axes = axes_of(inputs, "self", dtype="float32", device=torch.device("cpu"))
    assert misfit(called(mask, level), axes) == reason


def test_a_mask_that_was_written_to_is_read_again() -> None:
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    known, real, call = KnownMasks(), torch.ones(BATCH, LENGTH, dtype=torch.bool), called(mask)

    def seen() -> Tensor | None:
        allowed, _ = known.of(replace(call), real)
        places = torch.arange(LENGTH)
        return None if allowed is None else allowed(places, places).expand(1, 1, LENGTH, LENGTH)

    assert seen() is None
    mask[..., 1] = False
    assert torch.equal(seen(), mask)  # type: ignore[arg-type]
