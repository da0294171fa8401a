"""The remaining time of work that goes on where an earlier call stopped."""

import pytest

from mhacli.cli import console


def test_remaining_time_is_that_of_the_work_of_this_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "monotonic", lambda: 100.0)
    fractions = {0.0: 0.5, 0.5: 0.75, 0.9: 0.95}
    works = [
        console._Work("text", None, None, now, first, began=0.0) for first, now in fractions.items()
    ]
    assert len({str(work).rpartition(" · ")[2] for work in works}) == 1
