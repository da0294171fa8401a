from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

import pytest

from mhacli.checkpoints.mha_weights import Metadata
from mhacli.compute.user_trace.trace import WalkRequest
from mhacli.errors import MhaError
from mhacli.io.json_schema import _hint, decode, load_json
from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.bench.result import Benchmark, BenchRow
from mhacli.results.bench.workload import Workload
from mhacli.results.check import Examination, FirstDifference
from mhacli.results.record.head_statistics import HeadsSummary
from mhacli.results.record.record import CacheStep, Cell, InspectedLayer, Model, Record, UserModule
from mhacli.spec.config import Config
from mhacli.text.vocabulary import _File


@dataclass(frozen=True)
class Leaf:
    name: str
    size: int = 0


@dataclass(frozen=True)
class Tree:
    kind: Literal["oak", "elm"]
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, float] | None = None
    by_name: Mapping[str, float] = field(default_factory=dict)
    tall: bool = False
    memory: Any = field(default=None, metadata={"json": False})


def fault_of(action, *arguments):
    with pytest.raises(MhaError) as caught:
        action(*arguments)
    assert caught.value.code == "bad-file"
    return caught.value.message


def test_json_of_every_kind_becomes_frozen_data():
    found = decode(
        Tree,
        {
            "kind": "elm",
            "leaves": [{"name": "a", "size": 3}, {"name": "b"}],
            "pair": [1, 2],
            "by_name": {"x": 0.5},
            "tall": True,
        },
        "file",
    )
    assert found == Tree("elm", (Leaf("a", 3), Leaf("b")), (1, 2.0), {"x": 0.5}, True)
    assert type(found.pair[1]) is float


@dataclass(frozen=True)
class Branch:
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()


@dataclass(frozen=True)
class Twig(Branch):
    length: int = 1


@pytest.mark.parametrize("kind", [Branch, Twig])
def test_fields_may_be_inherited_and_empty(kind):
    assert decode(kind, {"leaf": None, "leaves": []}, "file") == kind()
    found = decode(kind, {"leaf": {"name": "a"}, "leaves": [{"name": "b"}]}, "file")
    assert found == kind(Leaf("a"), (Leaf("b"),))
    fault = fault_of(decode, kind, {"leaves": [{"name": 3}]}, "file")
    assert fault == "file.leaves[0].name must be a string, got 3"


def classes_within(kind):
    """The dataclasses that an annotation names, and those that their fields do."""
    found, waiting = set(), [kind]
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if is_dataclass(kind) and kind not in found:
            found.add(kind)
            waiting += [_hint(kind, f.name) for f in fields(kind) if f.metadata.get("json", True)]
    return found


@pytest.mark.parametrize(
    ("root", "within"),
    [
        (Record, {CacheStep, Cell, UserModule, HeadsSummary, InspectedLayer, Model}),
        (Benchmark, {BenchRow}),
        (Examination, {FirstDifference}),
        (CheckRequest, {TargetRequest}),
        (WalkRequest, {TargetRequest}),
        (Metadata, {Config}),
        (_File, set()),
    ],
    ids=lambda kind: getattr(kind, "__name__", ""),
)
def test_the_type_of_every_field_that_is_read_is_known(root, within):
    found = classes_within(root)
    assert found >= within | {root}


def test_an_inherited_field_is_read_with_the_names_of_the_module_that_declares_it():
    assert BenchRow.__module__ != Workload.__module__
    assert get_args(_hint(BenchRow, "direction")) == ("forward", "backward", "both")


def test_nothing_is_no_value_for_a_field_that_has_no_such_default():
    assert fault_of(decode, Tree, {"kind": None}, "file").startswith("file.kind must be one of oak, elm, got null")
    assert fault_of(decode, Tree, {"kind": "oak", "tall": None}, "file") == "file.tall must be true or false, got null"
    assert fault_of(decode, Tree, {"kind": "oak", "leaves": None}, "file") == "file.leaves must be a list, got null"


def test_unknown_fields_and_fields_that_are_no_json_are_ignored():
    assert decode(Tree, {"kind": "oak", "later": 1, "memory": "x"}, "file") == Tree("oak")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "file must be an object, got 3"),
        ({}, "file lacks the field kind"),
        ({"kind": "fir"}, 'file.kind must be one of oak, elm, got "fir"'),
        ({"kind": ["oak"]}, 'file.kind must be one of oak, elm, got ["oak"]'),
        ({"kind": "oak", "leaves": {}}, "file.leaves must be a list, got {}"),
        (
            {"kind": "oak", "leaves": [{"name": "a"}, {}]},
            "file.leaves[1] lacks the field name",
        ),
        ({"kind": "oak", "leaves": [{"name": None}]}, "file.leaves[0].name must be a string, got null"),
        (
            {"kind": "oak", "leaves": [{"name": "a", "size": 1.0}]},
            "file.leaves[0].size must be a whole number, got 1.0",
        ),
        (
            {"kind": "oak", "leaves": [{"name": "a", "size": True}]},
            "file.leaves[0].size must be a whole number, got true",
        ),
        ({"kind": "oak", "pair": [1]}, "file.pair must be a list of 2, got [1]"),
        ({"kind": "oak", "pair": [1, "x"]}, 'file.pair[1] must be a number, got "x"'),
        ({"kind": "oak", "pair": [1, True]}, "file.pair[1] must be a number, got true"),
        ({"kind": "oak", "by_name": [1]}, "file.by_name must be an object, got [1]"),
        ({"kind": "oak", "by_name": {"x": "y"}}, 'file.by_name.x must be a number, got "y"'),
        ({"kind": "oak", "by_name": {"x": 1e308}}, "file.by_name.x must be a finite number, got 1e+308"),
        ({"kind": "oak", "tall": 1}, "file.tall must be true or false, got 1"),
    ],
)
def test_a_fault_is_reported_with_its_place_and_the_rule(value, message):
    assert fault_of(decode, Tree, value, "file") == message


def test_a_whole_number_too_large_for_a_float_is_refused():
    assert fault_of(decode, Tree, {"kind": "oak", "by_name": {"x": 10**400}}, "file").startswith(
        "file.by_name.x must be "
    )


def test_a_whole_number_too_large_for_any_count_is_refused():
    assert fault_of(decode, Leaf, {"name": "a", "size": 10**400}, "file").startswith("file.size must be ")


def test_a_long_value_is_shortened_in_the_message():
    assert len(fault_of(decode, Tree, {"kind": "x" * 10_000}, "file")) < 150


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"a": 1, "a": 2}', "file is not JSON: the name 'a' occurs twice"),
        ("NaN", "file is not JSON: NaN is not a JSON number"),
        ("[-Infinity]", "file is not JSON: -Infinity is not a JSON number"),
        (b"\xff", "file is not UTF-8: byte 0 cannot be decoded"),
        ("[" * 200_000, "file is JSON that is nested too deeply"),
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(text, message):
    assert fault_of(load_json, text, "file") == message


def test_a_number_of_too_many_digits_is_refused():
    assert fault_of(load_json, "9" * 5000, "file").startswith("file is not JSON: ")
