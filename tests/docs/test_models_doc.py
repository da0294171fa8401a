"""docs/MODELS.md tells of every family what is found when a tiny model of it is watched.

    python tests/docs/test_models_doc.py

writes its table anew, between the comments `families` and `/families`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from support.model_families import FAMILIES, N_HEADS, calls_of, keywords_of, sights_of, tiny

from mhacli.adapters.hf.calls import InterceptionLevel, ScoredCall

DOCUMENT = Path(__file__).parents[2] / "docs" / "MODELS.md"
BETWEEN = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- /families -->)", re.DOTALL)
RUNGS: tuple[InterceptionLevel, ...] = ("registry", "module", "sdpa", "softmax")


def row(name: str) -> str:
    """What is found of a family, as a row of the table."""
    family, (calls, _) = FAMILIES[name], calls_of(tiny(name), keywords_of(name), 2)
    (implementation,), (level,) = {call.implementation for call in calls}, {call.level for call in calls}
    (kernel,) = {call.kernel if isinstance(call, ScoredCall) else "hand-written" for call in calls}
    windows = [window for _, window in sights_of(name)]
    notes = []
    n_kv_heads = calls[0].v.shape[1]  # type: ignore[attr-defined]
    if n_kv_heads < N_HEADS:
        notes.append(f"{n_kv_heads} kv head{'s' * (n_kv_heads > 1)} for {N_HEADS} heads")
    if any(windows):
        n = sum(window is not None for window in windows)
        notes.append("windows" if n == len(windows) else f"windows in {n} of {len(windows)} layers")
    scored = [call for call in calls if isinstance(call, ScoredCall)]
    notes += ["softcap"] * any(call.softcap is not None for call in scored)
    notes += ["sink logits"] * any(call.sinks is not None for call in scored)
    notes += ["position bias"] * any(call.bias is not None for call in scored)
    notes += [family.note] if family.note else []
    seen = "q, k, v, z" if scored else "scores, pattern, v, z"
    compared = "its definition" if name in ("falcon-alibi", "granite_swa") else "`eager`"
    return f"| {name} | `{implementation}` | {level} | {kernel} | {seen} | z, {compared} | {', '.join(notes) or '–'} |"


def table() -> str:
    """All families."""
    head = "| family | implementation | seen by | kernel | what is seen | compared with | note |\n|---|---|---|---|---|---|---|"
    return "\n".join([head, *(row(name) for name in FAMILIES)])


def test_the_table_is_what_is_found() -> None:
    (shown,) = BETWEEN.findall(DOCUMENT.read_text())
    assert shown == f"{table()}\n"


def test_every_way_of_seeing_is_explained() -> None:
    text, _, _ = DOCUMENT.read_text().partition("<!-- families -->")
    assert [name for name in RUNGS if f"- **{name}**: " not in text] == []


if __name__ == "__main__":
    DOCUMENT.write_text(BETWEEN.sub(lambda _: f"{table()}\n", DOCUMENT.read_text()))
