"""Whether `mha check` sees that each text reads its own memory, where this holds vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import user_code

MEMORIES = Path(__file__).parent / "cases" / "memories.py"
LONGER = "lambda m, T: m(torch.randint(80, (2, T)), torch.randn(2, T, 48))"


@pytest.mark.parametrize(
    ("name", "example", "holds"),
    [
        ("Captioner", None, True),
        ("Captioner", LONGER, True),
        ("FeaturesFirst", None, True),
        ("Pooled", None, True),
        ("NeverRead", None, False),
        ("OfOthers", None, False),
        ("RowsOfMemory", None, False),
    ],
)
def test_a_memory_of_vectors_is_examined(name: str, example: str | None, holds: bool) -> None:
    decoder = getattr(user_code.load(MEMORIES), name)
    examination = user_code.check(decoder, example=example)
    answers = {behaviour.name: behaviour.ok for behaviour in examination.behaviour}
    assert (answers["memory"], examination.verdict == "wrong") == (holds, not holds)
    assert not holds or answers["prefix"] is not False
