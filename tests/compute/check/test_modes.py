"""Attention with an optional context is examined in both modes, each with its own masks."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.examined import examination_of

from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.check import Examination

FILE = Path(__file__).parents[2] / "support" / "attentions" / "two_modes.py"
D, T, S, HIDDEN = 32, 5, 7, 2

RIGHT = ("ContextAttention", "BertAttention", "CausalOverOwnRows", "BothMasksOrNone", "MaskBehindASwitch")
WRONG = {
    "ContextMaskUnread": ("padding-ignored", ("cross",)),
    "OwnMaskUnread": ("mask-ignored", ("self",)),
    "ContextMaskInverted": ("padding-inverted", ("cross",)),
    "SecondMaskUnread": ("padding-ignored", ()),
}
"""The mistake of each, and the modes in which it shows; none where there is one mode."""


@functools.cache
def examined(name: str) -> Examination:
    arguments = () if name == "BertAttention" else (("dim", "32"),)
    return examination_of(CheckRequest(TargetRequest(f"{FILE}:{name}", arguments)))


def layer(name: str) -> Any:
    spec = importlib.util.spec_from_file_location("two_modes", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return getattr(module, name)(D).eval()


def hides(name: str, *, cross: bool) -> bool:
    """Called by hand: whether masks remove the influence of a key that has some without them."""
    it, generator = layer(name), torch.Generator().manual_seed(1)
    x = torch.randn(2, T, D, generator=generator)
    rows = torch.randn(2, S, D, generator=generator) if cross else x
    keep = torch.ones(2, rows.shape[1], dtype=torch.bool)
    keep[:, HIDDEN] = False
    changed = rows.clone()
    changed[:, HIDDEN] += 1
    others = [row for row in range(T) if cross or row != HIDDEN]

    def asked(rows: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        masks: dict[str, Any] = {}
        if name == "BertAttention":
            added = None if keep is None else torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)[:, None, None]
            masks = {"encoder_attention_mask" if cross else "attention_mask": added}
            return it(x if cross else rows, encoder_hidden_states=rows if cross else None, **masks)[0][:, others]
        if name == "MaskBehindASwitch":
            return it(rows, mask=keep, apply_mask=True)[:, others]
        if name == "SecondMaskUnread":
            return it(rows, valid_mask=keep)[:, others]
        if cross:
            own = torch.ones(2, T, dtype=torch.bool) if name == "BothMasksOrNone" and keep is not None else None
            return it(x, rows, mask=own, context_mask=keep)[:, others]
        return it(rows, mask=keep)[:, others]

    with torch.no_grad():
        assert not torch.allclose(asked(rows, None), asked(changed, None))
        return torch.allclose(asked(rows, keep), asked(changed, keep), atol=1e-6)


@pytest.mark.parametrize("name", RIGHT)
def test_a_layer_whose_masks_hide_what_belongs_to_them_is_right(name: str) -> None:
    modes = {"BothMasksOrNone": (True,), "MaskBehindASwitch": (False,)}.get(name, (False, True))
    assert all(hides(name, cross=cross) for cross in modes)
    assert examined(name).findings == ()
    assert examined(name).verdict == "right"


@pytest.mark.parametrize("name", WRONG)
def test_a_mask_that_does_nothing_where_it_belongs_is_a_mistake_of_that_mode(name: str) -> None:
    code, modes = WRONG[name]
    assert not hides(name, cross="cross" in modes)
    assert [(finding.code, finding.modes) for finding in examined(name).findings] == [(code, modes)]
    assert examined(name).findings[0].proven


def test_each_mode_is_reported_with_its_call_and_its_verdict() -> None:
    document = json.loads(json.dumps(examined("ContextMaskUnread").to_dict()))
    told = [(one["mode"], one["verdict"], one["called"], one["findings"]) for one in document["modes"]]
    assert told == [
        ("self", "right", "forward(x, mask=…)", []),
        ("cross", "wrong", "forward(x, context, context_mask=…)", ["padding-ignored"]),
    ]


def test_a_probe_that_fails_in_one_mode_fails_and_names_the_mode() -> None:
    (padding,) = (probe for probe in examined("ContextMaskUnread").probes if probe.name == "padding")
    assert padding.ok is False
    assert padding.message.startswith("in cross-attention: ")


def test_what_can_be_called_in_one_way_alone_has_no_modes() -> None:
    assert examined("MaskBehindASwitch").modes == ()


def test_a_choice_of_one_mode_names_the_mode() -> None:
    told = {choice.name: choice.message for choice in examined("CausalOverOwnRows").choices}
    assert told["meant-causal"].endswith("(in self-attention)")


def test_a_cache_is_examined_over_its_own_rows_alone() -> None:
    right, wrong = examined("CachedOverOwnRows"), examined("CachedAndMaskedFromTheFirstKey")
    for examination, is_right in ((right, True), (wrong, False)):
        own, cross = ({probe.name: probe.ok for probe in mode.probes} for mode in examination.modes)
        assert (own["cache"], "cache" in cross) == (is_right, False)
        assert [probe.ok for probe in examination.probes if probe.name == "cache"] == [is_right]
        assert examination.not_examined == ()
    assert (right.verdict, wrong.verdict) == ("right", "wrong")
    assert [(finding.code, finding.modes) for finding in wrong.findings] == [("cache-mask", ("self",))]


def test_a_function_that_returns_a_module_is_examined_as_what_it_returns(tmp_path: Path) -> None:
    made = tmp_path / "made.py"
    made.write_text(
        f"import sys\nsys.path.insert(0, {str(FILE.parent)!r})\nimport two_modes\n"
        "def build(name, width=32):\n    return getattr(two_modes, name)(width)\n",
        encoding="utf-8",
    )
    for name in ("ContextAttention", "ContextMaskUnread"):
        found = examination_of(CheckRequest(TargetRequest(f"{made}:build", (("name", name),))))
        assert [finding.code for finding in found.findings] == [finding.code for finding in examined(name).findings]


def test_scores_that_are_not_scaled_are_a_choice_of_t5_and_a_mistake_of_others() -> None:
    def asked(name: str) -> Examination:
        return examination_of(CheckRequest(TargetRequest(f"{FILE}:{name}", ())))

    assert (asked("T5Attention").verdict, asked("T5Attention").findings) == ("right", ())
    assert {finding.code for finding in asked("PlainAttention").findings} == {"scale-missing"}
