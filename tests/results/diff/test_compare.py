"""Comparisons of records: the same differences as plain numpy finds, for matching tokens, in the order of execution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.heads_made import surveyed
from support.layers_made import layered, text_of
from support.records import decoded, make_record, make_sequence, walked

from mhacli.results.diff import arrays as comparing
from mhacli.results.diff.arrays import aligned
from mhacli.results.diff.compare import by_size, compare
from mhacli.results.diff.result import Differences, Match, SiteDifference, TextDifference
from mhacli.results.record.arrays import Array
from mhacli.results.record.head_statistics import Corner, HeadsRequest, Kept
from mhacli.results.record.record import Record, TensorSummary, UserModule
from mhacli.spec.tolerances import TOLERANCES

TEXT = ("the", "cat", "sat", "on", "it")
OTHER = ("dogs", "bark")
VOCABULARY = sorted({*TEXT, *OTHER, "quietly", "rug"})


def with_array(record: Record, name: str, change: Callable[[Array], Array]) -> Record:
    """The record with one array changed; what was there stays as it was."""
    return replace(record, arrays={**record.arrays, name: change(record.arrays[name].copy())})


def put(place: tuple[int, ...], value: float) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        array[place] = value
        return array

    return change


def site(found: Differences, name: str, layer: int = 0) -> SiteDifference:
    return next(one for one in found.layers[layer].sites if one.site == name)


def first_name(found: Differences) -> str | None:
    return None if found.first is None or found.first.site is None else found.first.site.site


# --------------------------------------------------------------------------------------------------------------------- numbers


def test_a_record_agrees_with_itself_in_every_bit() -> None:
    record = make_record(TEXT, OTHER, causal=True)
    found = compare(record, record, tolerance=0)
    assert found.verdict == "agree"
    assert found.settings == ()
    assert {one.site for _, one in found.compared} == {*record.arrays}
    assert all(one.is_same_bits for _, one in found.compared)


@pytest.mark.parametrize(
    ("name", "place", "axes"),
    [
        ("qk", (1, 0, 1, 0), ("sequence", "head", "query", "key")),
        ("scores", (0, 1, 4, 2), ("sequence", "head", "query", "key")),
        ("pattern", (0, 0, 3, 1), ("sequence", "head", "query", "key")),
        ("entropy", (1, 1, 1), ("sequence", "head", "query")),
        ("z", (0, 1, 2, 0), ("sequence", "head", "query", "d_v")),
        ("out", (1, 0, 5), ("sequence", "query", "head·d_v")),
    ],
)
def test_one_other_number_is_named_with_its_site_and_place(
    name: str, place: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    a = make_record(TEXT, OTHER, causal=True)
    b = with_array(a, name, put(place, 0.75))
    found = compare(a, b)
    one = site(found, name)
    assert (found.verdict, first_name(found)) == ("differ", name)
    assert one.at is not None
    assert (one.at.axes, one.at.a, one.at.b) == (axes, place, place)
    assert one.largest == abs(0.75 - float(a.arrays[name][place]))
    assert one.n_different == 1
    assert [other.status for _, other in found.compared if other.site != name] == ["identical"] * (len(a.arrays) - 1)


@pytest.mark.parametrize("piece", [1, 7, 60, 1 << 20])
def test_the_largest_difference_of_whole_arrays_is_that_of_numpy(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_PIECE", piece)
    a, b = (make_record(TEXT, OTHER, causal=True, n_heads=3, seed=seed) for seed in (0, 1))
    found = compare(a, b)
    seen = np.broadcast_to(a.arrays["allowed"], a.arrays["qk"].shape)
    for name in ("qk", "scores", "pattern", "z", "out", "entropy"):
        x, y = (record.arrays[name].astype(np.float64) for record in (a, b))
        counted = seen if name in ("qk", "scores") else np.ones(x.shape, bool)
        with np.errstate(invalid="ignore"):
            gaps = np.where(counted, abs(y - x), 0.0)
        one = site(found, name)
        assert one.largest == gaps.max()
        assert one.at is not None
        assert gaps[one.at.a] == gaps.max()
        assert one.magnitude == max(abs(x[counted]).max(), abs(y[counted]).max())
        assert one.n_cells == counted.sum()
        assert one.n_different == (x[counted] != y[counted]).sum()
    per_head = [abs(b.arrays["pattern"][:, h].astype(float) - a.arrays["pattern"][:, h]).max() for h in range(3)]
    assert [one.largest for one in site(found, "pattern").heads] == per_head


def test_the_first_to_depart_is_the_first_that_ran_not_the_one_that_is_furthest_off() -> None:
    a = make_record(TEXT)
    b = with_array(with_array(a, "out", lambda out: out * 100), "scores", put((0, 0, 1, 1), 9.0))
    assert first_name(compare(a, b)) == "scores"


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(("part", "status"), [(0.9, "within"), (1.1, "beyond")])
def test_the_tolerance_is_a_part_of_the_largest_number_whatever_its_size(size: float, part: float, status: str) -> None:
    tolerance = 1e-3
    a = with_array(make_record(TEXT), "out", lambda out: np.full(out.shape, size))
    b = with_array(a, "out", put((0, 2, 3), size * (1 - part * tolerance)))
    assert site(compare(a, b, tolerance=tolerance), "out").status == status


def test_nothing_but_zeros_is_the_same_and_the_smallest_number_beside_zeros_is_not() -> None:
    a = with_array(make_record(TEXT), "out", np.zeros_like)
    assert compare(a, a).verdict == "agree"
    assert site(compare(a, with_array(a, "out", put((0, 0, 0), 1e-40))), "out").status == "beyond"


def test_tolerance_0_demands_the_same_bits() -> None:
    a = make_record(TEXT)
    step = with_array(a, "out", put((0, 1, 2), np.nextafter(a.arrays["out"][0, 1, 2], np.float32(9))))
    assert compare(a, step).verdict == "agree"
    assert not site(compare(a, step), "out").is_same_bits
    assert first_name(compare(a, step, tolerance=0)) == "out"
    zero, minus = (with_array(a, "out", put((0, 1, 2), value)) for value in (0.0, -0.0))
    assert compare(zero, minus).verdict == "agree"
    assert first_name(compare(zero, minus, tolerance=0)) == "out"


@pytest.mark.parametrize(("dtypes", "coarser"), [
    (("float32", "float64"), "float32"), (("float64", "float64"), "float64"), (("float16", "float32"), "float16"),
    (("bfloat16", "float16"), "bfloat16"),
])  # fmt: skip
def test_the_tolerance_is_that_of_the_coarser_number_format(dtypes: tuple[str, str], coarser: str) -> None:
    a = make_record(TEXT)
    records = [replace(a, config=replace(a.config, dtype=dtype)) for dtype in dtypes]  # type: ignore[arg-type]
    for pair in (records, records[::-1]):
        found = compare(*pair)
        assert (found.dtype, found.tolerance) == (coarser, TOLERANCES[coarser].runs)
    assert compare(*records, tolerance=0.25).dtype is None


@pytest.mark.parametrize(("one", "other", "is_same"), [
    (np.nan, np.nan, True), (np.inf, np.inf, True), (-np.inf, -np.inf, True), (np.nan, 1.0, False), (1.0, np.nan, False),
    (np.inf, 1.0, False), (np.inf, -np.inf, False), (np.nan, np.inf, False),
])  # fmt: skip
def test_what_is_not_finite_in_one_alone_departs_whatever_the_tolerance(
    one: float, other: float, is_same: bool
) -> None:
    place = (0, 2, 1)
    a, b = (with_array(make_record(TEXT), "out", put(place, value)) for value in (one, other))
    found = site(compare(a, b, tolerance=1e9), "out")
    assert found.status == ("identical" if is_same else "beyond")
    assert found.n_nonfinite == (0 if is_same else 1)
    assert is_same or (found.at is not None and found.at.a == place)


def test_a_head_with_a_number_that_is_not_finite_has_no_largest_difference() -> None:
    a = make_record(TEXT)
    found = compare(a, with_array(a, "pattern", put((0, 1, 2, 2), np.nan)))
    assert [one.largest for one in site(found, "pattern").heads] == [0.0, None]


def test_a_mask_is_reported_in_cells_and_what_one_forbids_has_no_score_to_compare() -> None:
    a, b = make_record(TEXT, causal=True), make_record(TEXT)
    found = compare(a, b)
    mask = site(found, "allowed")
    assert (mask.n_only_a, mask.n_only_b, mask.status) == (0, 10, "beyond")
    assert mask.at is not None
    assert (mask.at.axes, mask.at.a) == (("sequence", "query", "key"), (0, 0, 1))
    assert first_name(found) == "allowed"  # before the scores that it forbids
    assert site(found, "scores").status == "identical"
    assert site(found, "scores").n_cells == 2 * 15
    back = site(compare(b, a), "allowed")
    assert (back.n_only_a, back.n_only_b) == (10, 0)


def test_another_strongest_key_alone_is_reported_and_departs_only_at_tolerance_0() -> None:
    a = make_record(TEXT)
    b = with_array(a, "strongest_key", lambda keys: (keys + 1) % 5)
    found = compare(a, b)
    assert (found.verdict, site(found, "strongest_key").n_different) == ("agree", 10)
    assert first_name(compare(a, b, tolerance=0)) == "strongest_key"


def test_another_strongest_key_departs_where_the_weights_do_and_rounding_is_not_named() -> None:
    a = make_record(TEXT)
    rounded = with_array(a, "strongest_key", lambda keys: (keys + 1) % 5)
    moved = with_array(rounded, "pattern", lambda pattern: np.roll(pattern, 1, axis=-1))
    statuses = [
        (found.status, "rounding" in found.why)
        for found in (site(compare(a, b), "strongest_key") for b in (rounded, moved))
    ]
    assert statuses == [("skipped", True), ("beyond", False)]


# ---------------------------------------------------------------------------------------------------------------------- tokens


def lengthened(record: Record, place: int, token: str) -> Record:
    """The record as if a token stood between two others and changed no number of theirs."""
    (text,) = record.sequences
    tokens = (*text.tokens[:place], token, *text.tokens[place:])
    arrays = {}
    for name, array in record.arrays.items():
        axes = {"strongest_key": (2,), "entropy": (2,), "z": (2,), "out": (1,)}.get(name, (2, 3))
        for axis in axes:
            array = np.insert(array, place, 1 if array.dtype == bool else 7, axis=axis)
        arrays[name] = np.where(array >= place, array + 1, array) if name == "strongest_key" else array
    return replace(record, sequences=(make_sequence(tokens, VOCABULARY),), arrays=arrays)


def spoken(*texts: tuple[str, ...], **choices: object) -> Record:
    """A record whose tokens have the same numbers whatever else stands in its texts."""
    record = make_record(*texts, **choices)  # type: ignore[arg-type]
    return replace(record, sequences=tuple(make_sequence(text, VOCABULARY) for text in texts))


@pytest.mark.parametrize("place", range(6))
def test_numbers_of_the_same_tokens_are_compared_wherever_they_stand(place: int) -> None:
    a = spoken(TEXT)
    b = lengthened(a, place, "quietly")
    for one, other, kind in ((a, b, "only B"), (b, a, "only A")):
        found = compare(one, other, tolerance=0)
        assert found.verdict == "differ"
        assert found.first is not None
        assert found.first.where == "tokens"
        assert [change.change for change in found.texts[0].changes] == [kind]
        assert found.first_site is None
        assert all(site_.is_same_bits for _, site_ in found.compared)
        assert site(found, "pattern").n_cells == 2 * 5 * 5


def test_a_place_is_reported_in_both_texts() -> None:
    a = spoken(TEXT)
    b = with_array(lengthened(a, 2, "quietly"), "pattern", put((0, 1, 4, 1), 0.9))
    at = site(compare(a, b), "pattern").at
    assert at is not None
    assert (at.a, at.b) == ((0, 1, 3, 1), (0, 1, 4, 1))


def test_a_token_that_replaces_another_is_compared_with_it() -> None:
    a = spoken(TEXT)
    b = replace(a, sequences=(make_sequence(("the", "cat", "rug", "on", "it"), VOCABULARY),))
    b = with_array(b, "pattern", lambda p: p * np.where((np.arange(5) == 2)[:, None] | (np.arange(5) == 2), 0.5, 1))
    found = compare(a, b)
    assert [change.change for change in found.texts[0].changes] == ["replaced"]
    one, other = (record.arrays["pattern"].astype(float) for record in (a, b))
    assert site(found, "pattern").n_cells == 2 * 5 * 5
    assert site(found, "pattern").largest == pytest.approx(np.abs(other - one).max(), abs=1e-12)
    assert found.texts[0].replaced == (Match(2, 2, 1),)


def test_tokens_that_are_replaced_by_more_or_fewer_are_not_compared() -> None:
    a = spoken(TEXT)
    b = lengthened(a, 2, "quietly")
    assert compare(a, b).texts[0].replaced == ()
    found = TextDifference("texts", 0, 6, 6, (Match(0, 0, 1), Match(2, 3, 2), Match(5, 5, 1)))
    assert (found.replaced, found.compared) == ((), found.matches)


def test_the_first_departure_is_a_site_and_no_statistic_of_a_later_one() -> None:
    a = layered(causal=True)
    b = with_array(
        with_array(a, "layers.1.max_score", put((0, 1, 2), 99.0)), "layers.1.pattern", put((0, 1, 4, 1), 0.9)
    )
    first = compare(a, b).first_site
    assert first is not None
    assert first.site is not None
    assert (first.layer, first.site.site) == ("layer 1", "pattern")
    only = compare(a, with_array(a, "layers.1.max_score", put((0, 1, 2), 99.0))).first_site
    assert only is not None
    assert only.site is not None
    assert only.site.site == "max_score"


def test_padding_on_the_other_side_is_no_difference() -> None:
    a = make_record(TEXT, OTHER, causal=True)

    def moved(name: str, array: Array) -> Array:
        axes = {"strongest_key": (1,), "entropy": (1,), "z": (1,), "out": (0,)}.get(name, (1, 2))
        rolled = array.copy()
        rolled[1] = np.roll(array[1], (3,) * len(axes), axes)
        if name == "strongest_key":
            rolled[1] = np.where(rolled[1] >= 0, rolled[1] + 3, -1)
        return rolled

    b = replace(
        a,
        config=replace(a.config, padding="left"),
        arrays={name: moved(name, array) for name, array in a.arrays.items()},
    )
    found = compare(a, b, tolerance=0)
    assert found.verdict == "agree"
    assert site(found, "pattern").n_cells == 2 * (5 * 5 + 2 * 2)
    off = compare(a, with_array(b, "z", put((1, 0, 3, 2), 5.0)))
    at = site(off, "z").at
    assert at is not None
    assert at.a == at.b == (1, 0, 0, 2)  # the first token of the second text


def test_keys_of_another_context_are_matched_apart_from_the_queries() -> None:
    a = make_record(("the", "cat"), context=[TEXT])
    longer = (*TEXT[:3], "quietly", *TEXT[3:])
    b = make_record(("the", "cat"), context=[longer])
    widened = {name: np.insert(a.arrays[name], 3, 0, axis=3) for name in ("qk", "scores", "pattern", "allowed")}
    b = replace(b, arrays={**b.arrays, **widened, **{name: a.arrays[name] for name in ("entropy", "z", "out")}})
    found = compare(a, b, tolerance=0)
    assert [(text.family, text.is_same) for text in found.texts] == [("texts", True), ("context", False)]
    assert site(found, "pattern").is_same_bits
    assert site(found, "pattern").n_cells == 2 * 2 * 5


def test_the_same_tokens_with_other_numbers_are_another_input() -> None:
    a = make_record(TEXT)
    b = replace(a, sequences=(replace(a.sequences[0], ids=(*a.sequences[0].ids[:4], 9)),))
    found = compare(a, b)
    assert found.first is not None
    assert (found.first.where, found.texts[0].n_other_ids) == ("ids", 1)


def test_sequences_are_compared_as_far_as_both_have_them() -> None:
    a, b = make_record(TEXT, OTHER), make_record(TEXT)
    b = replace(b, arrays={name: array[:1] for name, array in a.arrays.items()})
    found = compare(a, b)
    assert (found.verdict, found.n_sequences, found.first_site) == ("differ", (2, 1), None)
    assert site(found, "out").n_cells == 5 * 6


words = st.lists(st.sampled_from("abcde"), max_size=12)


@given(a=words, b=words, bound=st.sampled_from([0, 10**9]))
def test_matches_are_the_same_tokens_in_the_order_of_both(a: list[str], b: list[str], bound: int) -> None:
    matches, _ = aligned(a, b, most_steps=bound)
    ends = (0, 0)
    for match in matches:
        assert match.length > 0
        assert match.a >= ends[0]
        assert match.b >= ends[1]
        assert a[match.a : match.a + match.length] == b[match.b : match.b + match.length]
        ends = match.a + match.length, match.b + match.length
    assert sum(match.length for match in matches) == len(a) or a != b


def test_a_match_grows_both_ways_from_what_each_has_once() -> None:
    matches, exact = aligned([*"qxxAyyz"], [*"stxxAyyw"], most_steps=0)
    assert (matches, exact) == ((Match(1, 2, 5),), False)


def test_texts_too_long_to_match_best_are_matched_by_what_each_has_once() -> None:
    common = [f"word{n}" for n in range(40)]
    noise = ["x", "y"] * 2000
    a = [*noise, *common[:20], *noise, *common[20:], "a"]
    b = ["y", "y", *common[:20], *noise[::-1], *common[20:], "b"]
    matches, exact = aligned(a, b)
    assert not exact
    matched = {a[match.a + n] for match in matches for n in range(match.length)}
    assert matched >= {*common}


# ------------------------------------------------------------------------------------------------------------- sizes and layers


def test_other_heads_cannot_be_compared_but_what_they_come_to_can() -> None:
    a, b = make_record(TEXT, n_heads=2), make_record(TEXT, n_heads=3)
    found = compare(a, b)
    assert first_name(found) == "qk"
    assert site(found, "qk").why == "2 heads against 3"
    assert site(found, "allowed").status == "identical"
    assert site(found, "out").why == "head·d_v 6 against 9"
    assert found.layers[0].heads == ()


def test_layers_are_matched_by_kind_and_number() -> None:
    whole = layered(text_of(TEXT), n_layers=3)
    last = replace(
        whole,
        layers=whole.layers[2:],
        heads=whole.heads[8:],
        arrays={name.replace("layers.2", "layers.0"): a for name, a in whole.arrays.items() if "layers.2" in name},
    )
    found = compare(whole, last, tolerance=0)
    assert (found.verdict, found.only_a, found.only_b) == ("agree", ("layer 0", "layer 1"), ())
    assert [layer.label for layer in found.layers] == ["layer 2"]
    assert [(layer.index_a, layer.index_b) for layer in found.layers] == [(2, 0)]
    assert compare(last, whole).only_b == ("layer 0", "layer 1")


def test_two_attentions_of_one_layer_are_matched_in_their_order() -> None:
    a = layered(text_of(TEXT), n_layers=2)
    a = replace(
        a,
        layers=(a.layers[0], replace(a.layers[1], layer=0)),
        heads=tuple(replace(head, layer=0) for head in a.heads),
    )
    found = compare(a, with_array(a, "layers.1.received", lambda received: received * 2))
    assert [layer.index_b for layer in found.layers] == [0, 1]
    assert [site(found, "received", index).status for index in (0, 1)] == ["identical", "beyond"]


def test_the_first_layer_that_departs_is_named() -> None:
    a = layered(text_of(TEXT), n_layers=3)
    b = with_array(a, "layers.1.received", lambda received: received * 1.5)
    b = with_array(b, "layers.2.pattern", lambda pattern: pattern[:, ::-1])
    found = compare(a, b)
    assert found.first is not None
    assert (found.first.layer, first_name(found)) == ("layer 1", "received")


def test_each_kind_of_layer_of_a_pair_is_matched_by_the_texts_that_it_reads() -> None:
    queries, keys, other = text_of(("one", "two")), text_of(TEXT), text_of((*TEXT, "more"), parts=())
    a = layered(queries, context=[keys], n_layers=1)
    b = layered(queries, context=[other], n_layers=1)
    found = compare(a, b)
    shapes = {layer.label: site(found, "pattern", index).n_cells for index, layer in enumerate(found.layers)}
    n_keys = found.texts[1].n_aligned
    assert shapes == {"encoder layer 0": 4 * n_keys**2, "decoder layer 0": 4 * 4 * 4, "cross layer 0": 4 * 4 * n_keys}


def test_of_inspected_heads_those_are_compared_that_both_have() -> None:
    text = " ".join(TEXT * 8)
    a, b = (surveyed(text, causal=True, wanted=HeadsRequest(heads=heads)) for heads in ((0, 2, 3), (3, 1, 0)))
    found = compare(a, b, tolerance=0)
    assert found.verdict == "agree"
    assert {one.head for one in site(found, "map").heads} == {0, 3}
    none = compare(a, surveyed(text, causal=True, wanted=HeadsRequest(heads=(1,))))
    assert site(none, "map").status == "skipped"


def test_parts_of_patterns_that_were_requested_are_compared_only_where_they_are_the_same() -> None:
    text = " ".join(TEXT * 3)
    kept = [Kept(queries=(query,), top=2, corner=Corner(0, 3, corner, 2)) for query, corner in ((4, 0), (4, 0), (5, 1))]
    a, same, other = (surveyed(text, causal=True, wanted=HeadsRequest(kept=one)) for one in kept)
    assert site(compare(a, same), "corner").status == "identical"
    for name in ("corner", "top_shares"):
        assert site(compare(a, other), name).status == "skipped"
    assert compare(a, other).verdict == "agree"


def test_blocks_are_compared_where_their_tokens_are_the_same_or_replaced() -> None:
    words_ = [f"w{n % 7}" for n in range(300)]
    a = surveyed(" ".join(words_), causal=True)
    block = a.survey.block
    assert block > 1
    words_[block + 1] = "other"
    b = replace(a, sequences=surveyed(" ".join(words_), causal=True).sequences)
    n = -(-300 // block)
    assert site(compare(a, b), "map").n_cells == 4 * n**2


def test_what_one_record_alone_holds_is_named_and_is_no_difference() -> None:
    a = make_record(TEXT)
    b = replace(a, arrays={name: array for name, array in a.arrays.items() if name not in ("qk", "z")})
    found = compare(a, b)
    assert (found.verdict, found.layers[0].only_a, found.layers[0].only_b) == ("agree", ("qk", "z"), ())


def test_a_checkpoint_and_mhas_own_layer_have_nothing_in_common() -> None:
    ours = make_record(TEXT)
    theirs = replace(layered(text_of(TEXT)), sequences=ours.sequences)
    assert compare(ours, theirs).verdict == "nothing"


# ----------------------------------------------------------------------------------------------------------------------- traces


def module_record(record: Record) -> Record:
    """The record as a walk of somebody's own attention: a trace and no arrays."""
    module = UserModule("mine.py:Attention", (), "forward(x)", (("query", 5),), 2, (1, 5, 6), (1, 5, 6))
    return replace(record, module=module, arrays={}, heads=())


def test_walks_of_user_code_are_compared_step_by_step() -> None:
    a = module_record(make_record(TEXT))
    assert compare(a, a).verdict == "agree"
    wider = replace(a.trace[3], shape=(1, 2, 5, 4))
    found = compare(a, replace(a, trace=(*a.trace[:3], wider, *a.trace[4:])))
    assert (first_name(found), site(found, "z").why) == ("z", "d_v 3 against 4")
    without = compare(a, replace(a, trace=(*a.trace[:1], *a.trace[2:])))
    assert (first_name(without), site(without, "scores").why) == ("scores", "only A has it")
    assert [one.site for one in without.layers[0].sites] == [step.site for step in a.trace]


def test_another_formula_departs_where_no_numbers_can_be_compared() -> None:
    a = module_record(make_record(TEXT))
    steps = [replace(step, operation="div", values=None) for step in a.trace]
    bare = replace(a, trace=tuple(steps))
    other = replace(bare, trace=(*steps[:1], replace(steps[1], formula="another"), *steps[2:]))
    found = compare(bare, other)
    assert (found.verdict, first_name(found)) == ("differ", steps[1].site)
    assert [one.site for one in found.layers[0].sites if one.departs] == [steps[1].site]
    layout = replace(bare, trace=(*steps[:1], replace(steps[1], layout="another"), *steps[2:]))
    assert compare(bare, layout).verdict == "agree"


def test_numbers_of_a_trace_are_compared_where_arrays_were_not_kept() -> None:
    a = walked(make_record(TEXT))
    a = replace(a, arrays={name: array for name, array in a.arrays.items() if name != "out"})

    def with_values(values: TensorSummary) -> Record:
        return replace(a, trace=(*a.trace[:-1], replace(a.trace[-1], values=values)))

    values = a.trace[-1].values
    assert values is not None
    assert values.numbers is not None
    same = site(compare(a, a), "out")
    assert (same.seen, same.is_same_bits) == ("numbers", True)
    numbers = list(values.numbers)
    numbers[3] = (numbers[3] or 0) + 0.5
    other = site(compare(a, with_values(replace(values, numbers=tuple(numbers)))), "out")
    assert (other.status, other.n_different) == ("beyond", 1)
    assert other.largest == pytest.approx(0.5)
    few = with_values(replace(values, numbers=None, max=9.5))
    extremes = site(compare(a, few), "out")
    assert (extremes.seen, extremes.status, extremes.is_same_bits) == ("extremes", "beyond", False)
    assert site(compare(a, with_values(replace(values, n_nan=3))), "out").n_nonfinite == 1


def test_steps_of_a_decoding_are_no_sites_and_its_numbers_are_compared_with_a_run() -> None:
    run = make_record(TEXT, causal=True)
    found = compare(run, decoded(run), tolerance=0)
    assert found.verdict == "agree"
    assert {one.site for one in found.layers[0].sites} == {*run.arrays}
    assert ("cache", "none", "preallocated") in [(one.name, one.a, one.b) for one in found.settings]


# -------------------------------------------------------------------------------------------------------- settings, statistics


def test_a_setting_that_differs_is_named_with_both_words() -> None:
    a = make_record(TEXT)
    b = replace(
        a,
        command=("mha", "run", "the cat", "--seed", "1"),
        config=replace(a.config, seed=1, window=(3, 0)),
        environment=replace(a.environment, torch="2.7.0", threads=9),
        weights="w.safetensors",
    )
    said = {one.name: (one.a, one.b) for one in compare(a, b).settings}
    assert said == {
        "command": (f"mha run '{' '.join(TEXT)}'", "mha run 'the cat' --seed 1"),
        "seed": ("0", "1"),
        "window": ("none", "3, 0"),
        "torch": ("2.6.0", "2.7.0"),
        "threads": ("2", "9"),
        "weights": ("none", "w.safetensors"),
    }
    assert ("mha", "0.1.0") in compare(a, b).alike
    assert not {"seed", "torch"} & {name for name, _ in compare(a, b).alike}


def test_settings_of_several_layers_are_listed_once() -> None:
    a = layered(text_of(TEXT), n_layers=3)
    b = replace(a, layers=(a.layers[0], *(replace(one, kernel="tiles") for one in a.layers[1:])))
    (said,) = compare(a, b).settings
    assert (said.name, said.b, said.layers) == ("kernel", "tiles", ("layer 1", "layer 2"))


def test_two_attentions_of_a_layer_have_names_of_their_own() -> None:
    a = layered(text_of(TEXT), n_layers=3)
    a = replace(a, layers=(a.layers[0], replace(a.layers[1], layer=0), a.layers[2]))
    assert [layer.label for layer in compare(a, a).layers] == [
        "layer 0, attention 1",
        "layer 0, attention 2",
        "layer 2",
    ]
    one = replace(a, layers=a.layers[:1])
    assert compare(a, one).only_a == ("layer 0, attention 2", "layer 2")


def test_of_a_checkpoint_and_mhas_own_layer_the_sizes_and_the_mask_are_reported() -> None:
    a, b = layered(text_of(TEXT), n_heads=4), make_record(TEXT, causal=True, n_heads=3)
    told = {one.name: (one.a, one.b) for one in compare(a, b).settings}
    sizes = {name: (str(getattr(a.config, name)), str(getattr(b.config, name))) for name in ("d_model", "n_heads")}
    assert {name: told[name] for name in sizes} == sizes
    assert told["causal"] == ("no", "yes")
    both = compare(a, layered(text_of(TEXT), n_heads=2)).settings
    assert [one.layers for one in both if one.name == "n_heads"] == [("layer 0", "layer 1", "layer 2")]


def test_heads_whose_statistics_changed_come_with_the_largest_change_of_a_weight_first() -> None:
    a = make_record(TEXT, n_heads=4)
    heads = [replace(head, sink=0.25, previous=0.5, entropy=1.0) for head in a.heads]
    a = replace(a, heads=tuple(heads))
    changed = [
        replace(heads[0], entropy=9.0),
        replace(heads[1], sink=0.75, kind="sink"),
        replace(heads[2], previous=None),
        replace(heads[3], sink=0.25 + 1e-7),
    ]
    found = compare(a, replace(a, heads=tuple(changed)))
    (layer,) = found.layers
    assert [change.head for change in by_size(layer.heads)] == [2, 1, 0]
    assert [change.size for change in by_size(layer.heads)] == [None, 0.5, 0.0]
    one = by_size(layer.heads)[1]
    assert (one.kind_a, one.kind_b) == ("mixed", "sink")
    assert [(s.name, s.a, s.b) for s in one.statistics] == [("sink", 0.25, 0.75)]


# ------------------------------------------------------------------------------------------------------- the result in words


def with_entropy(record: Record, head: int, entropy: float) -> Record:
    return replace(record, heads=tuple(replace(h, entropy=entropy) if h.head == head else h for h in record.heads))


def test_the_summary_counts_the_heads_that_changed_and_names_the_first_difference() -> None:
    a = make_record(TEXT, n_heads=3)
    other_pattern = with_array(a, "pattern", put((0, 2, 3, 1), 0.875))
    other_statistics = with_entropy(other_pattern, 0, 0.125)
    assert compare(a, a).summary == "no difference in 8 sites; none of 3 heads changed"
    assert compare(a, other_pattern).summary == "1 of 3 heads changed; the first difference is in pattern"
    assert compare(a, other_statistics).summary == "2 of 3 heads changed; the first difference is in pattern"
    hidden = with_array(a, "allowed", put((0, 0, 4, 1), 0))
    assert compare(a, hidden).summary == "none of 3 heads changed; the first difference is in the mask"


def test_the_summary_names_the_layer_or_the_input() -> None:
    a = layered(text_of(TEXT), n_layers=3)
    b = with_array(a, "layers.2.pattern", put((0, 1, 4, 1), 0.9))
    n = 3 * 4
    assert compare(a, b).summary == f"1 of {n} heads changed; the first difference is in layer 2 pattern"
    replaced = replace(a, sequences=(replace(a.sequences[0], tokens=("a", *TEXT[1:])),))
    told = "; the first difference is in the tokens; the first numbers that differ are in layer 0 pattern"
    assert compare(a, replaced).summary.endswith(told)
    renumbered = replace(a, sequences=(replace(a.sequences[0], ids=(7, *a.sequences[0].ids[1:])),))
    assert compare(a, renumbered).summary.endswith("; the first difference is in the ids of the tokens")


def test_records_with_nothing_in_common_are_summed_up_as_that() -> None:
    nothing = Differences(1e-5, None, settings=(), alike=(), n_sequences=(1, 1), texts=(), layers=())
    assert nothing.summary == "nothing can be compared: the records have no layer, site or step in common"
