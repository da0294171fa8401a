"""Every head of a long text: exact statistics, and no matrix of queries × keys.

Some heads at a time go through one pass: the scores of a block of queries become weights, z and statistics. What is finished
can be shown at any moment.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from math import prod
from threading import Lock
from time import perf_counter

import torch

from mhacli.attention.axes import make_statistics_request
from mhacli.attention.devices import choose_device, free_bytes, one_thread, shared_out
from mhacli.attention.head_statistics import HeadResults, joined, results_of
from mhacli.attention.memory import require_memory
from mhacli.attention.statistics import Baseline, blocks_of, head_groups, make_baseline
from mhacli.attention.taps import not_finite, stage_timings, to_array
from mhacli.io.long_work import Progress, no_progress
from mhacli.layer.run import Setup
from mhacli.record.checks import SelfCheck
from mhacli.record.record import Record
from mhacli.record.tables import HeadTable
from mhacli.run import Run

_CELLS_AT_ONCE = 1 << 31
"""Of the heads that one thread inspects together: some seconds. Masks and conditions are evaluated once for all of them."""
SMALL_CELLS = 1 << 18
"""Queries × keys up to which one thread is as quick as several."""


class HeadsRun:
    """The statistics of every head, with queries, keys and values computed. `run` computes the statistics; `record` returns
    what is finished."""

    @torch.no_grad()
    def __init__(self, request: Run) -> None:
        """Raises `MhaError` where the run cannot fit, before the first large tensor; where the device is missing; and for
        numbers that overflow."""
        config, chosen = request.config, request.statistics
        on_gpu = choose_device(config.device).type != "cpu"
        self.peak_bytes = require_memory(request, free_bytes(config.device), has_matrices=False, on_gpu=on_gpu)
        self.wanted, self.setup, self.results = request, Setup(request), list[HeadResults]()
        began, capture = perf_counter(), self.setup.capture()
        attention = self.attention = self.setup.attention(capture)
        if not attention.is_finite and not request.allow_nonfinite:
            made = (attention.q, attention.k, attention.v)
            n_bad = sum(int((~tensor.isfinite()).sum()) for tensor in made if tensor is not None)
            raise not_finite(f"queries, keys and values have {n_bad} NaN or Inf in {config.dtype}", config.dtype)
        self.steps = tuple(capture.steps)
        self.statistics_request = make_statistics_request(
            self.setup.axes, chosen.conditions, sink_tokens=chosen.first_tokens
        )
        self.seconds = {"projections": perf_counter() - began}
        self.heads = tuple(range(config.n_heads)) if chosen.heads is None else chosen.heads
        self.baseline: Baseline | None = None

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress) -> None:
        """Inspects all heads, on a CPU some in each thread; `report_progress` receives the completed fraction."""
        began, lock, done = perf_counter(), Lock(), 0
        attention, request = self.attention, self.statistics_request
        report_progress(0.0, "uniform attention")
        baseline = self.baseline = make_baseline(attention, request)
        of_head = sum(len(queries) * len(keys) for queries, keys in blocks_of(attention, request.block))
        n_cells = attention.shape[0] * of_head * len(self.heads)
        doing = "1 head" if len(self.heads) == 1 else f"{len(self.heads)} heads"
        reduce = partial(results_of, self.setup.axes, attention, statistics_request=request, wanted=self.wanted)

        def report_cells(cells: int) -> None:
            nonlocal done
            with lock:
                done += cells
                report_progress(min(1.0, done / max(1, n_cells)), doing)

        def inspect(heads: range) -> None:
            self.results.append(reduce(heads, baseline=baseline, report_progress=report_cells))
            self.seconds["statistics"] = perf_counter() - began

        is_alone = prod(attention.shape[2:]) <= SMALL_CELLS or attention.q.device.type != "cpu"
        with one_thread() if is_alone else nullcontext():
            # so few heads together that every thread has some, and that each part is soon finished
            most = min(_CELLS_AT_ONCE // max(1, of_head), -(-len(self.heads) // torch.get_num_threads()))
            parts = head_groups(self.heads, attention.shape[1] // attention.n_kv_heads, most=most)
            shared_out([partial(inspect, heads) for heads in parts])

    def record(self) -> Record:
        """The record of the heads that are finished, of which there must be one at least."""
        setup, wanted, request, baseline = self.setup, self.wanted, self.statistics_request, self.baseline
        assert baseline is not None, "no head is finished"
        batch, _, *sizes = self.attention.shape
        full_bytes = batch * len(self.heads) * prod(sizes) * self.attention.dtype.itemsize
        finished, peak = sorted(self.results, key=lambda part: part.heads[0].head), self.peak_bytes
        results, survey = joined(
            finished,
            baseline,
            wanted,
            axes=setup.axes,
            statistics_request=request,
            peak_bytes=peak,
            full_bytes=full_bytes,
        )
        return setup.record(
            wanted,
            trace=self.steps,
            heads=HeadTable(results.heads),
            timings=stage_timings(self.seconds, [self.seconds]),
            self_check=SelfCheck.of_layers([results.checks]),
            survey=survey,
            arrays={name: to_array(array) for name, array in results.arrays.items()},
        )
