"""What stands in a report whose documents could not be changed."""

from __future__ import annotations

import pytest
from torch import Tensor

import mhacli
from mhacli.commands.check import examine
from mhacli.usercode.limits import OutOfTime


def attend(scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q.shape[-1] ** -0.5, q, k, v)


def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(1.0, q, k, v)


def test_the_end_of_time_keeps_what_was_found_and_lets_nothing_be_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def over(*_: object) -> None:
        raise OutOfTime(1.0)

    monkeypatch.setattr(examine, "isolation", over)
    assert [finding.code for finding in mhacli.check(wrong).findings] == ["scale-missing"]
    assert mhacli.check(right).verdict == "unknown"


def test_what_was_not_tried_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise mhacli.MhaError("no other documents")

    monkeypatch.setattr(examine, "isolation", refused)
    (packing,) = mhacli.check(right).behaviour
    assert (packing.name, packing.was_omitted) == ("packing", True)
    assert "no other documents" in packing.reason
