"""Impossible records are refused, contradictions are reported, and computed records pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from support.layers_made import layered
from support.processes import attempt
from support.records import make_record, walked

from mhacli.errors import MhaError
from mhacli.results.record import storage
from mhacli.results.record.consistency import contradictions
from mhacli.results.record.record import Record
from mhacli.spec.tolerances import TOLERANCES

TEXT = ("the", "cat", "sat")
Document = dict[str, Any]
Arrays = dict[str, np.ndarray]


def written(folder: Path, change: Callable[[Document, Arrays], object], record: Record | None = None) -> str:
    """A record's file, with its JSON and its arrays changed in place."""
    record = record or walked(make_record(TEXT, ("a", "dog"), causal=True))
    document, arrays = json.loads(json.dumps(record.document())), {k: v.copy() for k, v in record.arrays.items()}
    change(document, arrays)
    path = folder / "r.safetensors"
    path.write_bytes(save(arrays, metadata={"mha": json.dumps(document)}))
    return str(path)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_record_that_was_computed_agrees_with_itself(dtype: str) -> None:
    record = make_record(TEXT, ("a", "dog"), causal=True)
    assert contradictions(replace(record, config=replace(record.config, dtype=dtype))) == ()  # type: ignore[arg-type]


def test_effective_keys_may_be_as_many_as_the_visible_ones_and_one_hundredth_more() -> None:
    record = make_record(TEXT)
    most = np.full(record.arrays["entropy"].shape, 3 * 1.01)

    def with_keys(numbers: np.ndarray) -> Record:
        return replace(record, arrays={**record.arrays, "participation": numbers})

    assert contradictions(with_keys(most)) == ()
    assert len(contradictions(with_keys(np.nextafter(most, 4.0)))) == 1


IMPOSSIBLE: dict[str, Callable[[Document, Arrays], object]] = {
    "offsets": lambda d, a: d["sequences"][0]["offsets"].__setitem__(2, [9, 99]),
    "offsets reversed": lambda d, a: d["sequences"][0]["offsets"].__setitem__(2, [7, 3]),
    "an id below 0": lambda d, a: d["sequences"][0]["ids"].__setitem__(0, -1),
    "an id beyond the vocabulary": lambda d, a: d["sequences"][0]["ids"].__setitem__(0, 10**6),
    "documents": lambda d, a: d["sequences"][0].update(documents=[1, 0, 0]),
    "a head": lambda d, a: d["heads"][0].update(head=9),
    "a head twice": lambda d, a: d["heads"][0].update(head=1),
    "a sink": lambda d, a: d["heads"][0].update(sinks=[{"sequence": 0, "key": 77, "share": 0.5, "uniform": 0.1}]),
    "a cell": lambda d, a: d["heads"][0].update(max_score_at=[0, 50, 0]),
    "a count": lambda d, a: d["trace"][0].update(flops=-1),
    "a time": lambda d, a: next(iter(d["timings"].values())).update(median_s=-1.0),
    "a shape": lambda d, a: d["trace"][0].update(shape=[-3, 2]),
    "threads": lambda d, a: d["environment"].update(threads=-2),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be_is_refused_when_the_record_is_read(what: str, tmp_path: Path) -> None:
    path = written(tmp_path, IMPOSSIBLE[what])
    for read in (storage.load, storage.load_late):
        with pytest.raises(MhaError) as caught:
            read(path)
        assert caught.value.code == "bad-file"
        assert caught.value.message.startswith(path)


@pytest.mark.parametrize("number", [np.inf, -1.0, 1e30])
@pytest.mark.parametrize("name", ["entropy", "pattern"])
def test_arrays_beyond_what_they_can_hold_are_refused(name: str, number: float, tmp_path: Path) -> None:
    path = written(tmp_path, lambda d, a: a[name].flat.__setitem__(0, number))
    with pytest.raises(MhaError, match=name):
        storage.load(path)


def halved(document: Document, arrays: Arrays) -> None:
    arrays["pattern"][0, 0, 2] /= 2


def masked(document: Document, arrays: Arrays) -> None:
    arrays["pattern"][0, 0, 0] = [0.5, 0.5, 0.0]


def exchanged(document: Document, arrays: Arrays) -> None:
    """Two shares of a row in each other's place: their sum and their entropy stay, and no longer follow from the scores."""
    row = arrays["pattern"][0, 1, 2]
    assert abs(row[0] - row[1]) > 0.01
    row[[0, 1]] = row[[1, 0]]
    arrays["strongest_key"][0, 1, 2] = row.argmax()


def another(document: Document, arrays: Arrays) -> None:
    """The strongest key of a row is the next one."""
    arrays["strongest_key"][0, 0, 2] = (arrays["pattern"][0, 0, 2].argmax() + 1) % 3


DOUBTFUL: dict[str, tuple[Callable[[Document, Arrays], object], str]] = {
    "a check": (lambda d, a: d["self_check"].update(max_abs_error=99.0), "the self-check is marked ok"),
    "no error": (lambda d, a: d["self_check"].update(max_abs_error=None), "the self-check is marked ok"),
    "a route": (lambda d, a: d["routes"][1].update(max_abs_difference=1.0), "the route fused is marked ok"),
    "rows": (halved, "1 of 12 rows of pattern do not sum to 1, the worst to 0.5"),
    "a mask": (masked, "1 keys that are masked get attention"),
    "entropy": (lambda d, a: d["heads"][0].update(entropy=9.0), "entropy of head 0 is 9"),
    "exchanged shares": (exchanged, "the scores of 1 of 12 rows do not give their pattern"),
    "a strongest key": (another, "the strongest key of 1 of 12 rows is not that of their pattern"),
    "a row's entropy": (lambda d, a: a["entropy"].__setitem__((0, 0, 2), 0.1), "the entropy of 1 of 12 rows"),
    "more than ln 3": (lambda d, a: a["entropy"].__setitem__((0, 0, 2), 1.2), "1 of 12 numbers of entropy"),
    "a share": (lambda d, a: d["heads"][0].update(previous=1.5), "previous of head 0 is 1.5"),
}


@pytest.mark.parametrize("what", DOUBTFUL)
def test_what_does_not_add_up_is_reported(what: str, tmp_path: Path) -> None:
    change, words = DOUBTFUL[what]
    (found,) = contradictions(storage.load(written(tmp_path, change)))
    assert found.startswith(words)


def test_arrays_that_are_unread_are_not_read_to_report_it(tmp_path: Path) -> None:
    record = storage.load_late(written(tmp_path, halved))
    assert contradictions(record) == ()
    record.arrays["pattern"]
    assert len(contradictions(record)) == 1


def test_a_layer_whose_check_does_not_hold_contradicts_the_whole() -> None:
    record = layered()
    assert contradictions(record) == ()
    first = record.layers[0]
    check = replace(first.self_check, max_abs_error=99.0)
    found = contradictions(replace(record, layers=(replace(first, self_check=check), *record.layers[1:])))
    assert [words.partition(" is marked")[0] for words in found] == [f"the self-check of {first.label}"]


def test_kv_heads_of_a_layer_that_do_not_divide_its_heads_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, lambda d, a: d["layers"][0].update(n_kv_heads=5), layered())
    with pytest.raises(MhaError, match="n_kv_heads must divide"):
        storage.load(path)


def test_a_learned_sink_takes_its_part_of_a_row() -> None:
    record = make_record(TEXT, causal=True)
    arrays = dict(record.arrays) | {"pattern": record.arrays["pattern"] * np.float32(0.7)}
    less = replace(record, arrays=arrays)
    assert len(contradictions(less)) == 1
    assert contradictions(replace(less, heads=tuple(replace(h, learned_sink=0.3) for h in less.heads))) == ()


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["plain", "json"])
def test_a_record_that_contradicts_itself_is_shown_and_ends_with_3(form: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path, halved)
    shown = attempt(tmp_path, "show", path, code=3, form=form, says=["do not sum to 1"])
    assert "sat" in shown.stdout
    attempt(tmp_path, "diff", path, path, code=3, form=form, says=["do not sum to 1"])


def test_the_page_of_a_record_that_contradicts_itself_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, halved)
    attempt(tmp_path, "show", path, "--html", "p.html", code=3, writes=["p.html"])
    assert "contradicts itself" in (tmp_path / "p.html").read_text()
