"""Every head of a long text: exact statistics at the cost of fused attention, and no matrix of queries × keys.

A few heads at a time go through two passes: the first makes z and the log-sum-exp, the second reduces the shares that follow
from it, tile by tile. What is finished can be told at any moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from time import perf_counter
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mhacli.attention.tiled.forward import attend_lse, pattern_of
from mhacli.attention.tiled.scores import Scores
from mhacli.attention.tiled.statistics import Asked, summarise
from mhacli.attention.tiled.tiles import n_cells
from mhacli.checkpoints.mha_weights import LayerFile
from mhacli.compute.base.devices import free_bytes
from mhacli.compute.base.head_statistics import Baseline, make_asked, make_baseline
from mhacli.compute.base.recording_tap import Capture, to_array
from mhacli.compute.base.setup import Setup, make_setup
from mhacli.compute.heads.passes import Look, attention_of, joined_arrays, look, profile_steps, uniform_arrays, worst_of
from mhacli.errors import MhaError
from mhacli.requests.plan import facts_of, foresee_heads, require_no_dropout
from mhacli.results.record.measures import SelfCheck, Timing
from mhacli.results.record.record import Record
from mhacli.results.record.steps import Step
from mhacli.results.record.tiled import Survey, Wanted
from mhacli.spec.config import Config
from mhacli.text.encode import Encoded

_CELLS_AT_ONCE = 1 << 31
"""Of the heads that share a pass: some seconds. Masks and matches are asked once for all of them."""
_PASS_COST = 1.3
"""What the second pass takes relative to the first, by benchmarks/heads.py, to tell the time that is left."""
_SAMPLE_LEN, _SAMPLING_S, _MIN_SAMPLES = 1024, 0.2, 4


class Prediction(NamedTuple):
    """What a run will take: bytes at its largest, seconds, and the bytes of the matrices that it does not build."""

    peak_bytes: int
    seconds: float
    full_bytes: int


@dataclass
class HeadsRun:
    """A look at every head, made ready by `prepare_heads`. `run` does it; `record` tells what is finished."""

    setup: Setup
    wanted: Wanted
    asked: Asked
    scores: Scores
    v: Float[Tensor, "batch kv_head key d_v"]
    steps: tuple[Step, ...]
    peak_bytes: int
    looks: list[Look] = field(default_factory=list)
    baseline: Baseline | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads that are looked at."""
        return tuple(range(self.setup.config.n_heads)) if self.wanted.heads is None else self.wanted.heads

    @property
    def n_finished(self) -> int:
        """How many of them are done."""
        return sum(len(done.said) for done in self.looks)

    @property
    def full_bytes(self) -> int:
        """What the patterns of these heads would take."""
        batch, _, q_len, k_len = self.scores.shape
        return batch * len(self.heads) * q_len * k_len * self.scores.like.element_size()

    @torch.no_grad()
    def predict(self) -> Prediction:
        """What the run will take, by the time of the first tokens of one head."""
        n = min(_SAMPLE_LEN, *self.scores.shape[2:])
        one = self.scores.of_heads(range(1))
        small = replace(one, q=one.q[:1, :, :n], k=one.k[:1, :, :n])
        asked = self.asked.beginning(n)
        seconds, until = math.inf, perf_counter() + _SAMPLING_S
        for attempt in count():  # the first ones take longer, and others are on the machine
            began = perf_counter()
            if attempt >= _MIN_SAMPLES and began > until:
                break
            summarise(pattern_of(small, attend_lse(small, self.v[:1, :1, :n]).lse), asked)
            seconds = min(seconds, perf_counter() - began)
        ratio = (len(self.heads) + 1) * n_cells(one) / max(1, n_cells(small))
        return Prediction(self.peak_bytes, seconds * ratio, self.full_bytes)

    @torch.no_grad()
    def run(self, tell: Callable[[float, str], None] = lambda share, doing: None) -> None:
        """Looks at all heads, a few at a time; `tell` hears which share of the work is done."""
        began = perf_counter()
        tell(0.0, "uniform attention")
        self.baseline = make_baseline(self.scores, self.asked)
        per_head = n_cells(self.scores) // self.scores.shape[1]
        progress = _Progress(per_head, len(self.heads), tell)
        group = self.scores.shape[1] // self.v.shape[1]
        for heads in head_groups(self.heads, group, most=_CELLS_AT_ONCE // max(1, per_head)):
            scores, v = self.scores.of_heads(heads), self.v[:, heads.start // group : (heads.stop - 1) // group + 1]
            attended = attend_lse(scores, v)
            steps = progress.steps(heads)
            steps.first_pass()
            done = look(
                self.setup.axes,
                attention_of(scores, attended, v, heads),
                asked=self.asked,
                sink_share=self.wanted.sink_share,
                baseline=self.baseline,
                kept=self.wanted.kept,
                allow_nonfinite=self.wanted.allow_nonfinite,
                tell=steps.cells,
            )
            self.looks.append(done)
            self.seconds["statistics"] = perf_counter() - began

    def record(self) -> Record:
        """The record of the heads that are finished, of which there must be one at least."""
        assert self.baseline is not None, "nothing is told before something is done"
        setup, wanted, looks = self.setup, self.wanted, tuple(self.looks)  # another may be finished meanwhile
        checks = worst_of([look.checks for look in looks])
        z_check = checks[-1]
        uniform = uniform_arrays(self.baseline, setup.axes, self.asked)
        return Record(
            command=wanted.command,
            config=setup.config,
            sequences=setup.encoded.sequences,
            context=setup.encoded.context,
            vocabulary=setup.encoded.vocabulary.tokens,
            trace=self.steps,
            heads=tuple(head for done in looks for head in done.said),
            timings={name: Timing(s, (s,), s, 0.0) for name, s in self._stages().items()},
            self_check=SelfCheck(z_check.error, z_check.tolerance, all(check.ok for check in checks)),
            environment=setup.environment,
            weights=setup.weights,
            survey=Survey(
                block=self.asked.block,
                steps=profile_steps(setup.axes),
                patterns=tuple(pattern.text for pattern in wanted.patterns),
                sink_tokens=wanted.sink_tokens,
                sink_share=wanted.sink_share,
                kernel=looks[0].kernel,
                checks=checks,
                peak_bytes=self.peak_bytes,
                full_bytes=self.full_bytes,
                kept=wanted.kept,
            ),
            arrays={name: to_array(array) for name, array in joined_arrays(looks, uniform).items()},
        )

    def _stages(self) -> dict[str, float]:
        return {**self.seconds, "total": sum(self.seconds.values())}


@torch.no_grad()
def prepare_heads(encoded: Encoded, config: Config, *, source: LayerFile | None = None, wanted: Wanted) -> HeadsRun:
    """A look at every head, made ready: queries, keys and values are computed.

    Raises `MhaError` where it cannot fit, before the first large tensor; where the device is missing; for numbers that
    overflow; and `UsageError` in training, for what dropout does is another thing each time.
    """
    require_no_dropout(config)
    facts = facts_of(encoded, config)
    peak_bytes = foresee_heads(facts, wanted, free_bytes(config.device))
    setup = make_setup(encoded, config, source=source, allow_nonfinite=wanted.allow_nonfinite)
    began = perf_counter()
    shapes = {name: tuple(tensor.shape) for name, tensor in setup.layer.tensors().items()}
    capture = Capture(facts, shapes, keep=())
    q, k, v = setup.heads(capture)
    if not wanted.allow_nonfinite:
        _require_finite((q, k, v), config.dtype)
    asked = make_asked(setup.axes, wanted.patterns, sink_tokens=wanted.sink_tokens)
    seconds = {"projections": perf_counter() - began}
    return HeadsRun(setup, wanted, asked, setup.scores(q, k), v, tuple(capture.steps), peak_bytes, seconds=seconds)


def head_groups(heads: Sequence[int], group: int, *, most: int) -> Iterator[range]:
    """The heads in ascending order, neighbours together, `most` at a time; where `group` query heads share a kv head, whole
    groups or a part of one.

    >>> list(head_groups((0, 1, 2, 5), 1, most=2))
    [range(0, 2), range(2, 3), range(5, 6)]
    """
    waiting = range(0)
    for head in sorted(set(heads)):
        is_next = waiting and head == waiting.stop and len(waiting) < max(1, most)
        if is_next and (group == 1 or head // group == waiting.start // group):
            waiting = range(waiting.start, head + 1)
            continue
        if waiting:
            yield waiting
        waiting = range(head, head + 1)
    if waiting:
        yield waiting


class _Steps(NamedTuple):
    """Who hears how far a look is: that the first pass is done, and of the cells that the second has looked at."""

    first_pass: Callable[[], None]
    cells: Callable[[int], None]


class _Progress:
    """Which share of the work is done, in cells: those of the first pass, and those of the second, which take longer."""

    def __init__(self, cells_per_head: int, n_heads: int, tell: Callable[[float, str], None]) -> None:
        self._per_head, self._tell = cells_per_head, tell
        self._whole, self._done = max(1, cells_per_head * n_heads) * (1 + _PASS_COST), 0.0

    def steps(self, heads: range) -> _Steps:
        """Who is told how far the look at these heads is."""
        named = f"head {heads[0]}" if len(heads) == 1 else f"heads {heads[0]} to {heads[-1]}"
        return _Steps(lambda: self._add(len(heads) * self._per_head, named), lambda n: self._add(_PASS_COST * n, named))

    def _add(self, cells: float, doing: str) -> None:
        self._done += cells
        self._tell(min(1.0, self._done / self._whole), doing)


def _require_finite(tensors: Sequence[Tensor], dtype: str) -> None:
    """Raises `MhaError` where queries, keys or values hold NaN or Inf."""
    n_bad = sum(int((~tensor.isfinite()).sum()) for tensor in tensors)
    if n_bad:
        raise MhaError(
            f"queries, keys and values must be finite in {dtype}, got {n_bad} NaN or Inf",
            hint="--dtype bfloat16 or float32 has a wider range; --allow-nonfinite looks anyway",
            code="not-finite",
        )
