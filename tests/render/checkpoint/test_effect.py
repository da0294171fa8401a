"""What is drawn of effects: the map, the text, the table and the verdict."""

from __future__ import annotations

import re
from dataclasses import replace

from rich.console import Console
from support.layers_made import layered

from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.checkpoint.view import layers_view
from mhacli.results.record.effect import Effect, EffectSummary, Verification
from mhacli.results.record.record import Record

VERIFIED = Verification(4, 1e-7, 1e-5, True, True)
SUMMARY = EffectSummary("d_logit", 2, "mat", 7, None, None, 3.5, -0.25, 0, 1e-6, 1, VERIFIED)


def head_effect(layer: int, head: int, change: float) -> Effect:
    return Effect(
        layer, "self", head, None, None, "head", "zero", None, change, change / 2, abs(change), 1, abs(change)
    )


def edge_effect(key: int, change: float) -> Effect:
    return Effect(0, "self", 1, 2, key, "edge", "renormalise", None, change, change / 2, abs(change), 1, abs(change))


def with_effects(*effects: Effect, summary: EffectSummary = SUMMARY) -> Record:
    return replace(layered(n_layers=2, n_heads=3), effects=effects, effect=summary)


def shown(record: Record, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(layers_view(record, ViewOptions(), Screen(width, False)))
    return captured.get()


def test_the_map_has_each_head_in_its_layers_row() -> None:
    lines = shown(with_effects(*(head_effect(*place, change) for place, change in {
        (0, 0): -1.0, (0, 1): 0.25, (0, 2): 0.0, (1, 2): -0.5,
    }.items()))).split("\n")  # fmt: skip
    top = next(place for place, line in enumerate(lines) if re.match(r" *head +0 +1 +2", line))
    assert [line.split() for line in lines[top + 1 : top + 3]] == [["0", "-1.00", ".25", "0"], ["1", "-.50"]]
    columns = [match.end() for match in re.finditer(r"\d", lines[top])]
    assert lines[top + 2].index("-.50") + 4 == columns[2], "below its number"


def test_the_largest_changes_come_first() -> None:
    text = shown(with_effects(head_effect(0, 0, 0.25), head_effect(0, 1, -2.0), head_effect(1, 2, 1.0)))
    assert re.findall(r"^(\d\.\d) ", text, re.MULTILINE) == ["0.1", "1.2", "0.0"]


def test_the_tokens_of_edges_carry_the_sign_of_their_change() -> None:
    text = shown(with_effects(edge_effect(0, -1.0), edge_effect(1, 0.0), edge_effect(2, 1.0)))
    assert re.search(r"^0\.1  #\S+ \.\S+ |^0\.1  =", text, re.MULTILINE)


def test_interaction_is_what_heads_change_beyond_the_sum_of_each() -> None:
    joint = replace(head_effect(0, 0, -1.5), removed="heads", layer=None, head=None, heads=((0, 0), (1, 2)))
    text = shown(with_effects(head_effect(0, 0, -1.0), head_effect(1, 2, -0.25), joint))
    assert re.search(r"-1\.5000.*-1\.2500.*-0\.2500", text)


def test_without_proof_no_number_is_shown() -> None:
    failed = replace(SUMMARY, verified=Verification(4, 1.0, 1e-5, True, False))
    text = shown(with_effects(head_effect(0, 0, -1.2345), summary=failed))
    assert "1.23" not in text
    assert "NOT verified" in text
