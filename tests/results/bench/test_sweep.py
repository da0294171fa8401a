"""The sizes that follow from options: defaults by type of device, crossed lists, and refused sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from mhacli.errors import EXIT_USAGE, UsageError
from mhacli.results.bench.workload import BACKENDS, MAX_WORKLOADS, SCALES, Sweep, Workload

KINDS = tuple(SCALES)


def refusal(sweep: Sweep, kind: str | None = None) -> tuple[str, str | None]:
    """Message and hint of the error."""
    with pytest.raises(UsageError) as caught:
        sweep.checked() if kind is None else sweep.workloads(kind)
    assert caught.value.exit_code == EXIT_USAGE
    return caught.value.message, caught.value.hint


def test_by_hand_the_sizes_of_a_cpu() -> None:
    found = Sweep().workloads("cpu")
    assert [(work.batch, work.q_len, work.k_len) for work in found] == [
        (4, 256, 256),
        (2, 512, 512),
        (1, 1024, 1024),
        (1, 2048, 2048),
    ]
    assert found[0] == Workload(4, 8, 8, 64, 256, 256, "float32", False, "forward")
    assert Sweep().on("cpu").backends == ("explicit", "sdpa", "math", "flash", "torch-mha", "torch-mha-weights")


def test_by_hand_the_sizes_of_a_gpu() -> None:
    found = Sweep().workloads("cuda")
    assert [(work.batch, work.q_len) for work in found] == [
        (32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768),
    ]  # fmt: skip
    assert {(work.n_heads, work.n_kv_heads, work.d_head, work.dtype) for work in found} == {(32, 32, 64, "bfloat16")}
    assert Sweep().on("cuda").backends == tuple(BACKENDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_by_default_tokens_and_width_are_constant_but_for_long_rows(kind: str, causal: bool) -> None:
    scale = SCALES[kind]
    found = Sweep(causal=causal, d_head=(32, 64, 128)).workloads(kind)
    assert {work.n_heads * work.d_head for work in found} == {scale.width}
    for work in found:
        assert (work.causal, work.direction, work.q_len) == (causal, "forward", work.k_len)
        if work.k_len in scale.long_lengths:
            assert work.batch == 1
        else:
            assert work.batch * work.k_len == scale.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_backends_exist_in_the_order_in_which_they_are_described(kind: str) -> None:
    chosen = Sweep().on(kind).backends
    assert [name for name in BACKENDS if name in chosen] == list(chosen)


def test_lists_are_crossed_the_lengths_innermost() -> None:
    sweep = Sweep(
        batch=(2, 3), n_heads=(6, 12), n_kv_heads=(3, 2), d_head=(5, 7), lengths=(11, 13), dtypes=("float64", "float16"),
        directions=("both", "backward"),
    )  # fmt: skip
    expected = [
        Workload(batch, heads, kv_heads, d_head, length, length, dtype, False, direction)
        for dtype, direction, d_head, heads, kv_heads, batch, length in product(
            sweep.dtypes, sweep.directions, sweep.d_head, sweep.n_heads, sweep.n_kv_heads, sweep.batch, sweep.lengths
        )
    ]
    assert list(sweep.workloads("cpu")) == expected
    assert len(set(expected)) == 2**7


def test_a_width_that_no_head_fits_still_has_one_head_and_long_texts_one_sequence() -> None:
    (found,) = Sweep(d_head=(1000,), lengths=(5000,)).workloads("cpu")
    assert (found.n_heads, found.batch) == (1, 1)


def test_what_is_requested_twice_is_measured_once() -> None:
    assert len(Sweep(lengths=(7, 5, 7), batch=(2, 2)).workloads("cpu")) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_has_one_query_and_one_sequence_and_no_layer_that_keeps_no_past(kind: str) -> None:
    sweep = Sweep(decode=True, causal=True)
    found = sweep.workloads(kind)
    assert [(work.batch, work.q_len, work.k_len) for work in found] == [(1, 1, n) for n in SCALES[kind].decode_lengths]
    assert not any(work.is_masked for work in found)
    assert not any(name.startswith("torch-mha") for name in sweep.on(kind).backends)
    assert Sweep(decode=True, backends=("torch-mha",)).on(kind).backends == ("torch-mha",)
    assert [work.batch for work in replace(sweep, batch=(3, 5), lengths=(7,)).workloads(kind)] == [3, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_filling_in_again_changes_nothing(kind: str) -> None:
    full = Sweep(lengths=(5,), directions=("both",)).on(kind)
    assert full.on(kind) == full
    assert full.checked() is full
    assert full.workloads(kind) == Sweep(lengths=(5,), directions=("both",)).workloads(kind)


@pytest.mark.parametrize(
    ("sweep", "message", "hint"),
    [
        (
            Sweep(backends=("sdpa", "flsh")),
            "there is no backend 'flsh': choose from explicit, sdpa, math, flash, efficient, cudnn, flex, compiled, tiled, "
            "torch-mha, torch-mha-weights, all",
            None,
        ),
        (
            Sweep(decode=True, directions=("forward", "backward")),
            "--direction forward,backward does not go with --decode: a decoding step has no backward pass",
            None,
        ),
        (Sweep(directions=()), "--direction names none: choose from forward, backward, both", None),
        (Sweep(batch=(2, 0)), "--batch 0 is too small: the least is 1", None),
        (Sweep(lengths=(5, 10**9 + 1)), "--lengths 1000000001 is too long: the most is 1000000000", None),
    ],
    ids=["backend", "decode", "direction", "batch", "length"],
)
def test_what_cannot_be_is_refused_with_its_value(sweep: Sweep, message: str, hint: str | None) -> None:
    assert refusal(sweep) == (message, hint)


@pytest.mark.parametrize(
    ("sweep", "value"),
    [
        (Sweep(n_heads=(6, 9), n_kv_heads=(3, 2)), "9"),
        (Sweep(n_heads=(2000,)), "2000"),
        (Sweep(n_heads=(2,), d_head=(70000,)), "70000"),
        (Sweep(n_heads=(3,), n_kv_heads=(5,)), "5"),
    ],
    ids=["groups", "heads", "width", "kv heads"],
)
def test_heads_and_widths_that_cannot_be_are_refused_with_their_value(sweep: Sweep, value: str) -> None:
    assert value in refusal(sweep)[0]


def test_heads_that_follow_from_the_device_are_checked_there() -> None:
    sweep: Any = Sweep(n_kv_heads=(3,))
    assert sweep.checked() is sweep
    assert "8" in refusal(sweep, "cpu")[0]


def test_more_sizes_than_one_would_wait_for_are_refused() -> None:
    most = Sweep(batch=tuple(range(1, 51)), lengths=tuple(range(1, 21)))
    assert len(most.workloads("cpu")) == MAX_WORKLOADS
    more = replace(most, batch=tuple(range(1, 52)))
    assert refusal(more, "cpu") == (
        "these options combine to 1020 sizes: the most for a run is 1000",
        "shorten one of the lists",
    )
