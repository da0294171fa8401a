"""`mha run`: a text, and the attention of every head over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from mhacli.attention import layer_file as weights
from mhacli.attention import masks
from mhacli.attention.axes import make_statistics_request
from mhacli.attention.core import Tap, per_query_head
from mhacli.attention.devices import free_bytes
from mhacli.attention.head_statistics import head_statistics
from mhacli.attention.layer import merge_heads
from mhacli.attention.memory import require_memory
from mhacli.attention.scores import GivenAttention, strongest_key
from mhacli.attention.statistics import make_baseline, reduce_heads
from mhacli.attention.taps import Stopwatch, largest_difference, require_finite, time_stages, to_array
from mhacli.errors import UsageError
from mhacli.layer.setup import Setup
from mhacli.record.checks import TOLERANCES, SelfCheck
from mhacli.record.heads import HeadStatistics
from mhacli.record.record import Record, Step
from mhacli.record.tables import HeadTable
from mhacli.run import Run
from mhacli.settings import Config
from mhacli.text.encode import Encoded, encode

_BLOCK_CELLS = 1 << 22


def inspect(
    text: str | Sequence[str] | Encoded = (),
    config: Config | None = None,
    *,
    context: Sequence[str] = (),
) -> Record:
    """The record of one attention layer over the text: tokens, shapes, patterns, statistics, timings, self-check.

    `text` is one sequence, several (a padded batch), tokenized texts, or nothing with `config.random`. `context` makes
    it cross-attention. The weights come from the config's seed. Raises `MhaError` for errors that the user can fix:
    contradictory sizes, text without tokens, too little memory, numbers that overflow.
    """
    config = (config or Config()).resolved()
    if not isinstance(text, Encoded):
        text = encode([text] if isinstance(text, str) else text or (), config, context=context)
    return inspect_layer(Run(encoded=text, config=config))


@torch.no_grad()
def inspect_layer(request: Run) -> Record:
    """The record for a resolved request, as by `inspect`."""
    return record_run(prepare(request), request)[0]


def prepare(request: Run) -> Setup:
    """The setup of a run. Raises `MhaError`, before the first large tensor, if the run does not fit into the device's
    memory."""
    require_memory(request, free_bytes(request.config.device))
    return Setup(request)


def record_run(
    setup: Setup, request: Run, *, route: str = "separate", values: bool = False, also: Sequence[str] = ()
) -> tuple[Record, Mapping[str, Tensor]]:
    """The record of one observed run and its repetitions, and the tensors of that run: those that the record is made of, and
    the sites of `also`."""
    capture = setup.capture({*request.plan[0], *also, *_ALWAYS, *_OTHER_NAMES}, values=values)
    watch = Stopwatch(setup.device, then=capture)
    setup.run(watch, route)
    return make_record(
        setup, request, capture.steps, capture.tensors, watch.seconds, again=lambda tap: setup.run(tap, route)
    )


def weights_content(request: Run) -> bytes:
    """The content of a weights file with the weights that `inspect` uses. Raises `MhaError` if they are not finite."""
    setup = Setup(replace(request, allow_nonfinite=False))
    return weights.to_bytes(setup.layer, setup.config, request.encoded.vocabulary.tokens)


_ALWAYS = ("q", "k", "v", "qk", "scores", "pattern", "dropped", "out")
"""The sites that statistics, the self-check and a cell read."""
_OTHER_NAMES = {"q_per_head": "q", "k_per_head": "k", "v_per_head": "v", "out_sum": "out"}
"""What other routes call some of them."""


def make_record(
    setup: Setup,
    request: Run,
    steps: Sequence[Step],
    tensors: Mapping[str, Tensor],
    seconds: Mapping[str, float],
    *,
    again: Callable[[Tap], object],
) -> tuple[Record, Mapping[str, Tensor]]:
    """The record of an observed run with the `seconds` of each site, and of runs `again`. And the tensors of that run, on the
    CPU: those of other routes under the usual names too, the `shares` that multiplied the values, and what is `allowed`.

    Raises `MhaError` for numbers that are not finite, and `UsageError` for an array of a site that the run does not have.
    """
    found = {site: tensor.cpu() for site, tensor in tensors.items()}
    found |= {_OTHER_NAMES[site]: found[site] for site in tensors if site in _OTHER_NAMES}
    if not request.allow_nonfinite:
        require_finite(found["qk"], found["out"], setup.config.dtype)
    timings = time_stages(again, seconds, setup.device, request.repeat)
    for name in request.keep or ():
        if name not in tensors:
            passed = [step.site for step in steps if step.cache is None] or list(tensors)
            raise UsageError(f"--keep: this run does not compute {name}", hint=f"it computes {' '.join(passed)}")
    found |= {"shares": found.get("dropped", found["pattern"]), "allowed": setup.visible().cpu()}
    entropy, heads = _statistics_of(setup, found)
    derived = {"allowed": found["allowed"], "entropy": entropy, "strongest_key": strongest_key(found["pattern"])}
    kept = {name: found[name] for name in request.plan[0]} | derived
    record = setup.record(
        request,
        trace=tuple(replace(step, time_s=timings[step.site].median_s) for step in steps),
        heads=HeadTable(heads),
        timings=timings,
        self_check=_self_check(setup, found),
        not_kept=request.plan[1],
        arrays={name: to_array(tensor) for name, tensor in kept.items()},
    )
    return record, found


def _statistics_of(setup: Setup, tensors: Mapping[str, Tensor]) -> tuple[Tensor, tuple[HeadStatistics, ...]]:
    """The entropy of each query and the statistics of each head, from the pattern shown."""
    allowed, scores = masks.from_tensor(tensors["allowed"]), tensors["scores"]
    attention = GivenAttention(weights=tensors["pattern"], scores=scores, allowed=allowed, wide=True)
    axes = replace(setup.axes, device=torch.device("cpu"))
    request = make_statistics_request(axes)
    baseline = make_baseline(attention, request)
    reduced = reduce_heads(attention, request, range(setup.config.n_heads))
    heads = head_statistics(reduced, top_score=scores.amax(dim=-1), baseline=baseline, axes=axes)
    return reduced.statistics["entropy"], heads


def _self_check(setup: Setup, tensors: Mapping[str, Tensor]) -> SelfCheck:
    """The error of the output against a recomputation in float64 from the weights shown, in blocks that bound the memory.
    It holds only if the weights of every query that sees a key sum to 1.

    The tolerance is relative to the largest sum of magnitudes behind an output, which bounds its rounding.
    """
    weights, out = tensors["shares"], tensors["out"]
    of_layer = setup.layer.tensors()
    given = (of_layer.get(f"o_proj.{part}") for part in ("weight", "bias"))
    w, b = (None if tensor is None else tensor.cpu().double() for tensor in given)
    v = per_query_head(tensors["v"], setup.config.n_heads).double()
    block = max(1, _BLOCK_CELLS // (weights.shape[0] * weights.shape[1] * weights.shape[3]))
    error, magnitude = 0.0, 0.0
    for rows, seen in zip(weights.split(block, dim=2), out.split(block, dim=1), strict=True):
        again, sums = (merge_heads(rows.double() @ values) for values in (v, v.abs()))
        if w is not None:
            again, sums = linear(again, w, b), linear(sums, w.abs(), None if b is None else b.abs())
        error = max(error, largest_difference(again, seen))
        magnitude = max(magnitude, torch.nan_to_num(sums, nan=0.0, posinf=0.0).max().item())
    excess = tensors["pattern"].sum(dim=-1, dtype=torch.float64) - tensors["allowed"].any(dim=-1).double()
    largest = excess.nan_to_num(nan=0.0).abs().max().item()
    tolerance = TOLERANCES[setup.config.dtype]
    return SelfCheck.of(error, tolerance.output * magnitude, holds=largest <= tolerance.stored_row_sum)
