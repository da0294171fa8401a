"""The effects of two records: which removals belong together, how far their effects differ, and what is noise."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from rich.console import Console
from support.effects_made import SUMMARY, VERIFIED, edge_effect, head_effect, with_effects

from mhacli.render.base.options import Screen, ViewOptions
from mhacli.render.diff.view import diff_view
from mhacli.results.diff.compare import compare
from mhacli.results.record.effect import EffectSummary
from mhacli.results.record.record import Record


def heads(*changes: float, summary: EffectSummary = SUMMARY) -> Record:
    return with_effects(*(head_effect(0, head, change) for head, change in enumerate(changes)), summary=summary)


def shown(a: Record, b: Record) -> str:
    differences = compare(a, b)
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(
            diff_view(differences, (a, b), ("a", "b"), options=ViewOptions(view="none"), screen=Screen(100, False))
        )
    return captured.get()


def test_effects_that_differ_are_a_difference_the_largest_first() -> None:
    a, b = heads(-1.0, 0.5, 0.25), heads(-0.75, 0.5, -0.5)
    differences = compare(a, b)
    assert differences.verdict == "differ"
    assert differences.effects is not None
    assert [(one.a.head, one.change) for one in differences.effects.changes] == [(2, -0.75), (0, 0.25)]
    assert "2 of 3 effects changed" in differences.summary
    text = shown(a, b)
    assert re.search(
        r"^0\.2 .* \+0\.2500 +-0\.5000 +-0\.7500\n0\.0 .* -1\.0000 +-0\.7500 +\+0\.2500$", text, re.MULTILINE
    )


def test_the_same_effects_are_no_difference() -> None:
    differences = compare(heads(-1.0, 0.5), heads(-1.0, 0.5))
    assert differences.verdict == "agree"
    assert differences.effects is not None
    assert not differences.effects.changes


@pytest.mark.parametrize(
    ("distance", "tolerance", "n"), [(1.5e-3, None, 0), (2.5e-3, None, 1), (1.5e-3, 0, 1), (0.01, 0.02, 0)]
)
def test_what_is_noise_in_either_or_within_the_tolerance_is_no_difference(distance, tolerance, n) -> None:
    noisy = replace(SUMMARY, floor=1e-3)
    a, b = heads(-1.0, summary=noisy), heads(-1.0 + distance, summary=noisy)
    effects = compare(a, b, tolerance=tolerance).effects
    assert effects is not None
    assert len(effects.changes) == n


def test_removals_of_one_record_alone_are_named() -> None:
    a, b = heads(-1.0, 0.5), with_effects(head_effect(0, 1, 0.5), head_effect(1, 0, 2.0))
    effects = compare(a, b).effects
    assert effects is not None
    assert [[(one.layer, one.head) for one in own] for own in (effects.only_a, effects.only_b)] == [[(0, 0)], [(1, 0)]]
    assert "removed only in A: 0.0" in shown(a, b)


def test_edges_belong_together_by_their_tokens() -> None:
    a = replace(with_effects(*(edge_effect(key, float(key)) for key in range(3))), arrays={})
    first, *others = a.sequences[0].tokens
    text = replace(
        a.sequences[0],
        tokens=(first, "new", *others),
        ids=(a.sequences[0].ids[0], 99, *a.sequences[0].ids[1:]),
        offsets=None,
    )
    moved = [replace(edge_effect(key + (key > 0), float(key)), query=3) for key in range(3)]
    b = replace(with_effects(*moved, replace(edge_effect(1, 5.0), query=3)), sequences=(text,), arrays={})
    effects = compare(a, b).effects
    assert effects is not None
    assert (effects.n_compared, effects.changes, effects.only_a) == (3, (), ())
    assert [one.d_logit for one in effects.only_b] == [5.0]


def test_settings_of_the_measurement_that_differ_are_told() -> None:
    mean = [replace(head_effect(0, head, -1.0), replace="mean", at=1) for head in range(2)]
    b = with_effects(*mean, summary=replace(SUMMARY, target="cat", position=1))
    told = {one.name: (one.a, one.b) for one in compare(heads(-1.0, -1.0), b).settings}
    tokens = b.sequences[0].tokens
    assert told == {
        "position": (f"2 {tokens[2]}", f"1 {tokens[1]}"),
        "target": ("mat", "cat"),
        "replaced by": ("zero", "mean"),
        "removed at": ("all positions", "1"),
    }


def test_effects_of_different_metrics_are_compared_by_the_output() -> None:
    b = with_effects(
        replace(head_effect(0, 0, 0.25), d_logit=None), summary=replace(SUMMARY, metric="d_output", target=None)
    )
    effects = compare(heads(-1.0), b).effects
    assert effects is not None
    assert [one.change for one in effects.changes] == [-0.75]


def test_effects_that_are_not_proven_are_not_compared() -> None:
    failed = replace(SUMMARY, verified=replace(VERIFIED, max_abs_error=1.0, ok=False))
    assert compare(heads(-1.0), heads(2.0, summary=failed)).effects is None
