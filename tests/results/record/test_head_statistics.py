"""Head types by hand at every threshold, the order of heads, and the arrays of head statistics."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace

import numpy as np
import pytest
from safetensors.numpy import save
from support.heads_made import surveyed
from support.records import with_sinks

from mhacli.errors import EXIT_USAGE, MhaError, UsageError
from mhacli.results.record import storage
from mhacli.results.record.head_statistics import (
    CERTAIN_ENOUGH,
    FOR_ALL_HEADS,
    HEAD_OUTPUTS,
    NEAR,
    NEARLY_UNIFORM,
    OPTIONAL,
    PER_QUERY,
    ROW_SUMS,
    SINK_SHARE,
    SINK_TOKENS,
    SORTS,
    Averages,
    Check,
    Corner,
    HeadsRequest,
    HeadsSummary,
    HeadStatistics,
    Kept,
    Sink,
    in_order,
    is_sink,
    require_order,
    summary_shapes,
    with_kind,
)
from mhacli.spec.conditions import parse_pattern

MASSES = {
    "sink": "sink", "previous": "previous-token", "diagonal": "diagonal", "induction": "induction",
    "duplicate": "duplicate-token", "at_offset": "positional",
}  # fmt: skip
UNIFORM = Averages(sink=0.2, previous=0.2, diagonal=0.2, induction=0.2, duplicate=0.2, at_offset=0.2, near=0.5)


def head_with(uniform=UNIFORM, **numbers):
    plain = {**dict.fromkeys(MASSES, 0.2), "near": 0.5, "entropy_share": 0.5}
    return with_kind(HeadStatistics(head=3, **{**plain, **numbers}, uniform=uniform))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (Sink(0, 0, 0.375, 0.125, 0.6, 8), True),
        (Sink(0, 0, 0.374, 0.125, 0.6, 8), False),
        (Sink(0, 0, 0.375, 0.125, 0.5, 8), False),
        (Sink(0, 0, 0.375, 0.125, 0.6, 7), False),
        (Sink(0, 0, 0.375, 0.125), True),
        (Sink(0, 0, 0.0037, 0.002), False),
    ],
)
def test_by_hand_a_sink_gets_three_times_its_uniform_weight_from_most_of_eight_queries(key, expected):
    assert is_sink(key) is expected
    assert HeadStatistics(sinks=(key,)).sink_keys == ((key,) if expected else ())
    assert not is_sink(key, 0.38)


@pytest.mark.parametrize("name", MASSES)
def test_by_hand_a_mass_that_exceeds_the_uniform_weight_names_the_head(name):
    # (0.6 − 0.2) / (1 − 0.2) = 0.5
    found = head_with(**{name: 0.6})
    assert (found.kind, found.certainty) == (MASSES[name], pytest.approx(0.5, abs=1e-15))


@pytest.mark.parametrize("name", MASSES)
def test_an_excess_of_exactly_the_threshold_is_enough_and_less_is_not(name):
    uniform = replace(UNIFORM, **{name: 0.0})
    assert head_with(uniform, **{name: CERTAIN_ENOUGH}).kind == MASSES[name]
    below = head_with(uniform, **{name: CERTAIN_ENOUGH - 1e-9})
    assert (below.kind, below.certainty) == ("mixed", pytest.approx(1 - CERTAIN_ENOUGH, abs=1e-8))


def test_the_thresholds_are_those_of_the_documentation():
    assert (CERTAIN_ENOUGH, NEARLY_UNIFORM, NEAR, SINK_TOKENS, SINK_SHARE) == (0.4, 0.9, 8, 4, 0.1)


@pytest.mark.parametrize(("first", "second"), [("sink", "previous"), ("previous", "induction"), ("at_offset", "sink")])
def test_of_two_masses_the_one_with_more_excess_names_the_head(first, second):
    assert head_with(**{first: 0.8, second: 0.7}).kind == MASSES[first]
    assert head_with(**{first: 0.7, second: 0.8}).kind == MASSES[second]


def test_the_excess_counts_and_not_the_mass():
    # sink: (0.8 − 0.7) / 0.3 = 1/3;  previous: (0.6 − 0.1) / 0.9 = 5/9
    found = head_with(replace(UNIFORM, sink=0.7, previous=0.1), sink=0.8, previous=0.6)
    assert (found.kind, found.certainty) == ("previous-token", pytest.approx(5 / 9, abs=1e-15))


def test_nearness_names_a_head_only_where_no_single_distance_does():
    # near: (0.9 − 0.5) / 0.5 = 0.8, diagonal: (0.6 − 0.2) / 0.8 = 0.5
    assert head_with(near=0.9, diagonal=0.6).kind == "diagonal"
    found = head_with(near=0.9, diagonal=0.5)
    assert (found.kind, found.certainty) == ("local", pytest.approx(0.8, abs=1e-15))
    uniform = replace(UNIFORM, near=0.0)
    assert head_with(uniform, near=CERTAIN_ENOUGH).kind == "local"
    assert head_with(uniform, near=CERTAIN_ENOUGH - 1e-9).kind == "mixed"


def test_a_head_without_another_name_is_uniform_from_nine_tenths_of_the_largest_entropy_on():
    found = head_with(entropy_share=NEARLY_UNIFORM)
    assert (found.kind, found.certainty) == ("uniform", NEARLY_UNIFORM)
    assert head_with(entropy_share=NEARLY_UNIFORM - 1e-9).kind == "mixed"
    assert head_with(entropy_share=0.99, sink=0.6).kind == "sink"
    assert head_with(entropy_share=0.99, near=0.9).kind == "local"


def test_a_mixed_head_is_as_sure_as_its_strongest_excess_leaves_room():
    # previous: (0.4 − 0.2) / 0.8 = 0.25; near: (0.65 − 0.5) / 0.5 = 0.3, which counts too
    assert head_with(previous=0.4).certainty == pytest.approx(0.75, abs=1e-15)
    assert head_with(previous=0.4, near=0.65).certainty == pytest.approx(0.7, abs=1e-15)


def test_less_than_uniform_everywhere_is_mixed_for_certain():
    found = head_with(**dict.fromkeys(MASSES, 0.1), near=0.3)
    assert (found.kind, found.certainty) == ("mixed", 1.0)


@pytest.mark.parametrize("name", MASSES)
def test_a_mass_that_is_missing_names_nothing(name):
    assert head_with(**{name: None}).kind == "mixed"
    assert head_with(replace(UNIFORM, **{name: None}), **{name: 1.0}).kind == "mixed"


@pytest.mark.parametrize("name", [*MASSES, "near"])
@pytest.mark.parametrize("rounding", [0, 2.2e-16, 6e-8])
def test_a_mass_that_uniform_attention_has_whole_names_nothing(name, rounding):
    found = head_with(replace(UNIFORM, **{name: 1.0 - rounding}), **{name: 1.0})
    assert (found.kind, found.certainty) == ("mixed", pytest.approx(1.0, abs=1e-6))
    assert head_with(replace(UNIFORM, **{name: 1.0 - rounding}), **{name: 1.0 + rounding}).kind == "mixed"


def test_a_head_of_which_nothing_is_known_is_mixed():
    for head in (HeadStatistics(head=1), HeadStatistics(head=1, uniform=Averages())):
        found = with_kind(head)
        assert (found.kind, found.certainty) == ("mixed", 1.0)
    assert with_kind(HeadStatistics(head=0, entropy_share=0.95)).kind == "uniform"


def test_a_kind_changes_nothing_else():
    found = head_with(sink=0.9, entropy=1.5, max_score=4.0)
    plain = replace(found, kind="mixed", certainty=None)
    assert plain == HeadStatistics(
        head=3, **{**dict.fromkeys(MASSES, 0.2), "near": 0.5, "entropy_share": 0.5, "sink": 0.9},
        entropy=1.5, max_score=4.0, uniform=UNIFORM,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- order

NUMBERS = [name for name in SORTS if name not in ("head", "layer", "kind")]


def heads_by(name, values):
    return [HeadStatistics(**{"head": index, name: value}) for index, value in enumerate(values)]


def order_of(heads, sort):
    return [head.head for head in in_order(heads, sort)]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_go_down_by_themselves_and_up_on_request_with_what_is_missing_last(name):
    heads = heads_by(name, [2.0, None, 5.0, 1.0, 0.0, None])
    assert order_of(heads, name) == [2, 0, 3, 4, 1, 5]
    assert order_of(heads, f"{name}:down") == [2, 0, 3, 4, 1, 5]
    assert order_of(heads, f"{name}:up") == [4, 3, 0, 2, 1, 5]


def test_equal_numbers_stay_in_the_order_in_which_they_came():
    heads = heads_by("sink", [0.5, 0.7, 0.5, 0.7])
    assert order_of(heads, "sink") == [1, 3, 0, 2]
    assert order_of(heads, "sink:up") == [0, 2, 1, 3]


@pytest.mark.parametrize("sort", ["head", "head:up"])
def test_heads_go_up_by_their_number(sort):
    heads = [HeadStatistics(head=head) for head in (3, 0, 10, 2)]
    assert order_of(heads, sort) == [0, 2, 3, 10]
    assert order_of(heads, "head:down") == [10, 3, 2, 0]


def test_kinds_go_up_by_their_name():
    kinds = ("sink", "diagonal", "uniform", "diagonal", "induction")
    heads = [HeadStatistics(head=head, kind=kind) for head, kind in enumerate(kinds)]
    assert order_of(heads, "kind") == order_of(heads, "kind:up") == [1, 3, 4, 0, 2]
    assert order_of(heads, "kind:down") == [2, 0, 4, 1, 3]


@pytest.mark.parametrize(
    ("heading", "field"), [("eff.keys", "effective_keys"), ("H:up", "entropy:up"), ("first", "sink")]
)
def test_heads_are_ordered_by_the_heading_of_a_column_too(heading, field):
    assert require_order(heading) == require_order(field)


def test_every_word_to_sort_by_is_a_field_of_a_head():
    names = {field.name for field in fields(HeadStatistics)}
    assert set(SORTS) <= names
    assert names - set(SORTS) == {
        "attention", "max_score_at", "sinks", "largest", "uniform", "patterns", "offset", "at_offset",
    }  # fmt: skip


@pytest.mark.parametrize(
    "word",
    ["", "nothing", "Head", "head:sideways", "head:up:down", "entropy :up", ":up", "sinks", "attention", "patterns"],
)
def test_another_word_is_refused_with_all_that_work(word):
    for refuse in (require_order, lambda word: in_order([HeadStatistics()], word)):
        with pytest.raises(UsageError) as caught:
            refuse(word)
        assert caught.value.message == (
            f"--sort {shlex.quote(word)} is not one of "
            "head, layer, kind, certainty, entropy, entropy_share, effective_keys, participation, distance, "
            "window_50, window_90, window_99, sink, leading, diagonal, previous, duplicate, induction, near, learned_sink, "
            "max_score, alone or with :up or :down"
        )
        assert caught.value.exit_code == EXIT_USAGE


def test_a_long_word_is_cut_in_the_message():
    with pytest.raises(UsageError) as caught:
        require_order("x" * 1000)
    assert caught.value.message.startswith(f"--sort {'x' * 40} ")


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("head", ("head", True)), ("kind", ("kind", True)), ("entropy", ("entropy", False)),
        ("entropy:up", ("entropy", True)), ("head:down", ("head", False)), ("sink:down", ("sink", False)),
    ],
)  # fmt: skip
def test_what_a_word_means(word, meaning):
    assert require_order(word) == meaning


# ------------------------------------------------------------------------------------------------------------ shapes

SURVEY = HeadsSummary(
    block=4, steps=(0, 1, 2, 4, 8), patterns=(), sink_tokens=4, sink_share=0.1, kernel="tiles", checks=(), peak_bytes=1,
    full_bytes=2,
)  # fmt: skip
SIZES = {"batch": 2, "n_heads": 3, "q_len": 7, "k_len": 11, "d_v": 5}


def test_by_hand_the_shapes_of_the_arrays():
    rows = (2, 3, 7)
    assert summary_shapes(SURVEY, **SIZES) == {
        **dict.fromkeys(("entropy", "participation", "distance", "sink", "max_score", "lse"), rows),
        "received": (2, 3, 11),
        "map": (2, 3, 2, 3),
        "profile": (2, 3, 5),
        "visible": rows,
        "uniform_map": (2, 3, 2, 3),
        "uniform_received": (2, 3, 11),
        "uniform_profile": (2, 3, 5),
        "z": (2, 3, 7, 5),
        **dict.fromkeys(("qk", "scores", "pattern", "allowed"), (2, 3, 7, 11)),
        "strongest_key": rows,
    }
    spans = summary_shapes(SURVEY, **SIZES, n_spans=4)
    assert {name: spans.pop(name) for name in ("span_mass", "uniform_span_mass")} == dict.fromkeys(
        ("span_mass", "uniform_span_mass"), (2, 3, 4, 4)
    )
    assert spans == summary_shapes(SURVEY, **SIZES)
    assert set(PER_QUERY) | set(OPTIONAL) | set(FOR_ALL_HEADS) <= summary_shapes(SURVEY, **SIZES, n_spans=1).keys()


def test_by_hand_the_shapes_of_what_was_requested():
    kept = Kept(queries=(6, 0, 2, 5), top=6, corner=Corner(1, 2, 3, 8))
    shapes = summary_shapes(replace(SURVEY, kept=kept), **SIZES)
    assert shapes.keys() - summary_shapes(SURVEY, **SIZES).keys() == {"corner", "top_keys", "top_shares"}
    assert shapes["corner"] == (2, 3, 2, 8)
    assert shapes["top_keys"] == shapes["top_shares"] == (2, 3, 4, 6)
    many = summary_shapes(replace(SURVEY, kept=replace(kept, top=1000)), **SIZES)
    assert many["top_keys"] == (2, 3, 4, 11)


def test_what_is_wanted_by_default_is_every_head_and_nothing_cell_by_cell():
    wanted = HeadsRequest()
    assert (wanted.heads, wanted.kept, wanted.sink_tokens, wanted.sink_share) == (None, Kept(), 4, 0.1)
    assert (wanted.kept.queries, wanted.kept.top, wanted.kept.corner, wanted.kept.z) == ((), 0, None, False)


# -------------------------------------------------------------------------------------------------------------- files

KEPT = Kept((1, 4), 3, Corner(1, 3, 0, 4), True)
TEXTS = ("the cat sat on the mat", "a cat")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    bias = tmp_path_factory.mktemp("bias") / "b.st"
    numbers = np.zeros((4, 6, 6), np.float32)
    numbers[1, 2:, 0], numbers[2, 3] = -np.inf, -np.inf
    bias.write_bytes(save({"bias": numbers}))
    wanted = HeadsRequest(kept=KEPT, patterns=(parse_pattern("k == q - 1"),), command=("mha", "heads"))
    return {
        "plain": surveyed("the cat sat", causal=True),
        "padded": surveyed(*TEXTS, causal=True, wanted=wanted),
        "left": surveyed(*TEXTS, padding="left", dtype="float64"),
        "context": surveyed("a cat", context=["the cat sat on"], wanted=HeadsRequest(kept=Kept(z=True))),
        "some heads": surveyed(TEXTS[0], wanted=HeadsRequest(heads=(1, 3), kept=KEPT)),
        "masks of heads": surveyed(TEXTS[0], score_bias=str(bias), wanted=wanted),
        "one": surveyed("alone", dtype="bfloat16"),
    }


NAMES = ("plain", "padded", "left", "context", "some heads", "masks of heads", "one")


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_record_of_heads_comes_back_as_it_was(name, records, tmp_path):
    record, path = records[name], str(tmp_path / "r")
    record.save(path)
    found = storage.load(path)
    assert replace(found, arrays={}) == replace(record, arrays={})
    assert found.arrays.keys() == record.arrays.keys()
    for key, array in record.arrays.items():
        assert found.arrays[key].dtype == array.dtype
        assert found.arrays[key].tobytes() == np.ascontiguousarray(array).tobytes()
    found.save(str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == (tmp_path / "r").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_arrays_are_those_that_were_announced(name, records):
    record = records[name]
    shapes = summary_shapes(
        record.survey, batch=len(record.sequences), n_heads=len(record.heads), q_len=record.facts.q_len,
        k_len=record.facts.k_len, d_v=record.config.d_v,
    )  # fmt: skip
    left_out = set(OPTIONAL) - ({"z"} if record.survey.kept.z else set())
    assert record.arrays.keys() == shapes.keys() - left_out
    for key, array in record.arrays.items():
        wanted = shapes[key]
        assert array.shape == wanted or (key in FOR_ALL_HEADS and array.shape == (wanted[0], 1, *wanted[2:])), key


def fault_of(path, document, arrays):
    contents = save({k: np.array(v, order="C") for k, v in arrays.items()}, metadata={"mha": json.dumps(document)})
    path.write_bytes(contents)
    with pytest.raises(MhaError) as caught:
        storage.load(str(path))
    assert (caught.value.code, caught.value.exit_code) == ("bad-file", 1)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(str(path))
    return caught.value.message.removeprefix(str(path)).removeprefix(": ")


def changed(array, index, value):
    array = np.array(array)
    array[index] = value
    return array


ARRAY_FAULTS = {
    "entropy too short": ("entropy", lambda a: a[:, :, 1:], "entropy has the shape "),
    "a head too many": ("sink", lambda a: np.concatenate([a, a], 1), "sink has the shape "),
    "received by queries": ("received", lambda a: a[:, :, :-1], "received has the shape "),
    "map of other blocks": ("map", lambda a: a[:, :, :3, :3], "map has the shape "),
    "profile of other steps": ("profile", lambda a: a[..., :-1], "profile has the shape "),
    "visible of two heads": ("visible", lambda a: np.repeat(a, 2, 1), "visible has the shape "),
    "corner of other cells": ("corner", lambda a: a[:, :, :, :-1], "corner has the shape "),
    "top of other queries": ("top_keys", lambda a: a[:, :, :1], "top_keys has the shape "),
    "whole numbers as entropy": ("entropy", lambda a: np.zeros(a.shape, np.int64), "entropy must hold floating point"),
    "fractions as keys": ("top_keys", lambda a: a.astype(np.float32), "top_keys must hold whole numbers"),
    "fractions as counts": ("visible", lambda a: a.astype(np.float32), "visible must hold whole numbers"),
    "a key beyond the text": ("top_keys", lambda a: changed(a, (0, 0, 0, 0), 6), "top_keys must hold key positions from -1"),
    "a key before the text": ("top_keys", lambda a: changed(a, (0, 0, 0, 0), -2), "top_keys must hold key positions from -1"),
    "a share above 1": ("map", lambda a: changed(a, (0, 0, 0, 0), 1.5), "map must hold weights from 0 to 1"),
    "a share below 0": ("corner", lambda a: changed(a, (0, 0, 0, 0), -0.5), "corner must hold weights from 0 to 1"),
    "a profile above 1": ("profile", lambda a: changed(a, (0, 0, 0), 2), "profile must hold weights from 0 to 1"),
    "a sink above 1": ("sink", lambda a: changed(a, (0, 0, 1), np.inf), "sink must hold weights from 0 to 1"),
    "a top share above 1": ("top_shares", lambda a: changed(a, (0, 0, 0, 0), 9), "top_shares must hold weights from 0 to 1"),
    "z of another width": ("z", lambda a: a[..., :-1], "z has the shape "),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRAY_FAULTS)
def test_arrays_that_do_not_belong_to_the_heads_are_refused(name, records, tmp_path):
    key, change, message = ARRAY_FAULTS[name]
    record = records["padded"]
    arrays = {**record.arrays, key: change(record.arrays[key])}
    assert message in fault_of(tmp_path / "r", record.document(), arrays)


@pytest.mark.parametrize(
    "key",
    [*PER_QUERY, "received", "map", "profile", "visible", "uniform_map", "uniform_received", "uniform_profile", "corner",
     "top_keys", "top_shares"],
)  # fmt: skip
def test_an_array_that_is_missing_is_named(key, records, tmp_path):
    record = records["padded"]
    arrays = {name: array for name, array in record.arrays.items() if name != key}
    assert fault_of(tmp_path / "r", record.document(), arrays).strip() == f"lacks the array {key}"


def put(*way):
    """A change of a document: the value goes where the way leads."""

    def change(document):
        *before, last, value = way
        inner = document
        for step in before:
            inner = inner[step]
        inner[last] = value

    return change


SURVEY_FAULTS = {
    "a head out of range": put("heads", 3, "head", 4),
    "a negative head": put("heads", 3, "head", -1),
    "a head twice": put("heads", 3, "head", 0),
    "no head": put("heads", []),
    "blocks of nothing": put("survey", "block", 0),
    "negative blocks": put("survey", "block", -4),
    "no steps": put("survey", "steps", []),
    "steps from 1": put("survey", "steps", [1, 2, 4, 8, 16]),
    "steps that fall": put("survey", "steps", [0, 1, 2, 1, 8]),
    "another count of patterns": put("survey", "patterns", []),
    "a head with more patterns": put("heads", 1, "patterns", [0.5, 0.5]),
    "queries without keys": put("survey", "kept", "top", 0),
    "negative keys": put("survey", "kept", "top", -3),
    "a query beyond the text": put("survey", "kept", "queries", [1, 6]),
    "a query before the text": put("survey", "kept", "queries", [-1, 4]),
    "a corner beyond the queries": put("survey", "kept", "corner", "first_query", 4),
    "a corner beyond the keys": put("survey", "kept", "corner", "first_key", 3),
    "a corner before the text": put("survey", "kept", "corner", "first_query", -1),
    "a corner before the keys": put("survey", "kept", "corner", "first_key", -1),
    "a corner without queries": put("survey", "kept", "corner", "n_queries", 0),
    "a corner without keys": put("survey", "kept", "corner", "n_keys", 0),
    "the largest score elsewhere": put("heads", 0, "max_score_at", [0, 6, 0]),
    "the largest score at a key elsewhere": put("heads", 0, "max_score_at", [0, 0, 6]),
    "the largest score of another sequence": put("heads", 0, "max_score_at", [2, 0, 0]),
    "a cell of another query": put("heads", 1, "largest", 0, "query", 6),
    "a cell of another key": put("heads", 1, "largest", 0, "key", -1),
    "a cell of another sequence": put("heads", 1, "largest", 0, "sequence", 2),
    "a sink elsewhere": put("heads", 1, "sinks", 0, "key", 6),
    "a sink of another sequence": put("heads", 1, "sinks", 0, "sequence", -1),
}


@pytest.mark.parametrize("name", SURVEY_FAULTS)
def test_heads_and_a_survey_that_lie_outside_of_the_record_are_refused(name, records, tmp_path):
    record = with_sinks(records["padded"], 0)
    document = json.loads(json.dumps(record.document()))
    SURVEY_FAULTS[name](document)
    assert fault_of(tmp_path / "r", document, record.arrays) == "heads and survey must lie within the record"


@pytest.mark.parametrize(
    "change",
    [
        put("heads", 0, "kind", "nice"), put("heads", 0, "entropy", "much"), put("heads", 0, "window_50", 1.5),
        put("heads", 0, "patterns", "k"), put("heads", 0, "uniform", 3), put("survey", "block", "many"),
        put("survey", "steps", [0, "1"]), put("survey", "kept", "corner", [1, 2, 3, 4]), put("survey", "kernel", None),
        put("heads", 0, "max_score_at", [0, 0]), put("heads", 0, "head", True),
    ],
)  # fmt: skip
def test_fields_of_another_kind_are_refused(change, records, tmp_path):
    record = records["padded"]
    document = json.loads(json.dumps(record.document()))
    change(document)
    assert fault_of(tmp_path / "r", document, record.arrays)


def test_a_survey_of_huge_blocks_or_steps_takes_no_memory(records, tmp_path):
    record = records["plain"]
    document = json.loads(json.dumps(record.document()))
    document["survey"]["block"] = 10**30
    fault_of(tmp_path / "r", document, record.arrays)


def test_the_heads_of_a_run_are_saved_with_all_their_statistics(tmp_path):
    from mhacli.compute.layer.run import RecordingOptions, inspect
    from mhacli.spec.config import Config

    record = inspect("the cat sat on the cat", Config(causal=True, device="cpu"), options=RecordingOptions(repeat=1))
    record.save(str(tmp_path / "r"))
    found = storage.load(str(tmp_path / "r"))
    assert found.heads == record.heads
    assert found.survey is None
    assert found.heads[0].uniform.entropy > 0


def test_of_several_checks_a_failed_one_comes_last_and_then_the_largest_error():
    passed = [Check("", error, tolerance, ok=True) for error, tolerance in ((0.5, 9), (0.25, 0.3), (0, 1))]
    failed = [Check("", error, 0.1, ok=False) for error in (0.125, None)]
    assert sorted([*failed, *passed], key=lambda check: check.severity) == [*passed[::-1], *failed]


@pytest.mark.parametrize(
    ("name", "is_of_outputs"),
    [
        (HEAD_OUTPUTS, True),
        ("z of the pattern is the kernel's", True),
        (ROW_SUMS, False),
        ("each query gives 1", False),
    ],
)
def test_the_check_of_outputs_is_known_in_records_of_earlier_versions_too(name, is_of_outputs):
    assert Check(name, 0.0, 1.0, ok=True).is_of_outputs is is_of_outputs
