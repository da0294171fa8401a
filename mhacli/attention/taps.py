"""Taps: one records the tensors at each site, another the time of each site."""

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mhacli.errors import MhaError
from mhacli.io.data import Array
from mhacli.record.record import Step, TensorSummary, Timing, WeightShape
from mhacli.record.sites import SITES, Dims

from .core import Tap, dtype_name, no_tap

HISTOGRAM_BINS = 16
SMALL_TENSOR = 64
"""The most numbers of a tensor that is shown in full."""


class Capture:
    """A tap that keeps every tensor, with its shape and layout (and a summary of its numbers on
    request). What is kept does not give its memory to others, so that a view is known by its
    address.

    `weights` are those of the layer by their names on disk. Each shape is checked against `SITES`:
    a tensor with other axes than its site's is a bug of mha.
    """

    def __init__(self, dims: Dims, weights: Mapping[str, Tensor], *, values: bool = False) -> None:
        self._dims, self._values, self._owners = dims, values, dict[int, str]()
        self._weights = [WeightShape(name, tuple(tensor.shape)) for name, tensor in weights.items()]
        self.tensors: dict[str, Tensor] = {}
        self.steps: list[Step] = []

    def __call__(self, site: str, tensor: Tensor, **_: Any) -> None:
        """Records one tensor."""
        entry, dims = SITES[site], self._dims
        if tuple(tensor.shape) != entry.shape_for(dims):
            raise AssertionError(
                f"{site} must have the shape {entry.shape_for(dims)}, got {tuple(tensor.shape)}"
            )
        view_of = owner_of(tensor, site, self._owners)
        is_repeated = any(
            step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        step = step_of(
            site,
            tensor,
            is_view=view_of is not None or is_repeated,  # rows of an expanded tensor share memory
            view_of=view_of,
            parameters=tuple(
                w for w in self._weights if w.name.partition(".")[0] in entry.parameters
            ),
            values=summarise(tensor) if self._values else None,
            **entry.described(dims),
        )
        self.steps.append(step)
        self.tensors[site] = tensor


def owner_of(tensor: Tensor, site: str, owners: dict[int, str]) -> str | None:
    """The first site with the memory that the tensor of a site is a view of; None for one with
    memory of its own, which is added to the `owners`.
    """
    owner = owners.setdefault(memory_of(tensor), site)
    return None if owner == site else owner


def memory_of(tensor: Tensor) -> int:
    """What tells the memory of a tensor from that of others that are alive: its address, or that of
    its entry on the device meta, which has none.
    """
    storage = tensor.untyped_storage()
    return StorageWeakRef(storage).cdata if tensor.is_meta else storage.data_ptr()


def step_of(site: str, tensor: Tensor, *, is_view: bool = False, **described: Any) -> Step:
    """A step of a trace, measured on its tensor. `described` are the other fields
    of `Step`.
    """
    return Step(
        site=site,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        layout="view" if is_view else "copy",
        strides=tuple(tensor.stride()),
        bytes=tensor.numel() * tensor.element_size(),
        **described,
    )


def summarise(tensor: Tensor) -> TensorSummary:
    """A one-line summary of a tensor's numbers.

    The moments are those of the finite numbers, computed in float64, with the population's
    deviation.
    """
    tensor = tensor.detach().cpu()  # not every device has float64
    finite = tensor[torch.isfinite(tensor)].double()
    n_nan, n_inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    numbers = None
    if tensor.numel() <= SMALL_TENSOR:
        numbers = tuple(x if math.isfinite(x) else None for x in tensor.double().flatten().tolist())
    if not finite.numel():
        return TensorSummary(None, None, None, None, (0,) * HISTOGRAM_BINS, n_nan, n_inf, numbers)
    low, high = (end.item() for end in finite.aminmax())
    place = (
        (finite - low) / (high - low) * HISTOGRAM_BINS if high > low else torch.zeros_like(finite)
    )
    counts = torch.bincount(
        place.long().clamp(0, HISTOGRAM_BINS - 1), minlength=HISTOGRAM_BINS
    ).tolist()
    mean, deviation = finite.mean().item(), finite.std(correction=0).item()
    return TensorSummary(low, high, mean, deviation, tuple(counts), n_nan, n_inf, numbers)


def to_array(tensor: Tensor) -> Array:
    """The tensor as a numpy array. 16-bit floats, which some readers lack, become float32
    (exactly).
    """
    wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    array: Array = wide.detach().cpu().numpy()
    return array


def require_finite(qk: Tensor, out: Tensor, dtype: str) -> None:
    """Raises `MhaError` that names the heads with non-finite dot products, or else says that the
    output is not finite.
    """
    bad = ~qk.isfinite()
    heads = bad.flatten(2).any(dim=-1).any(dim=0).nonzero().flatten().tolist()
    name = f"the dot products q·k of {'head' if len(heads) == 1 else 'heads'}"
    name += f" {', '.join(map(str, heads))}"
    if not heads:
        name, bad = "the output", ~out.isfinite()
    if bad.any():
        raise not_finite(f"{int(bad.sum())} numbers of {name} are NaN or Inf in {dtype}", dtype)


def not_finite(message: str, dtype: str) -> MhaError:
    """The error of numbers that overflow in a dtype."""
    wider = {"float16": "--dtype bfloat16 or float32", "float64": ""}.get(dtype, "--dtype float64")
    helps = " or ".join(filter(None, [wider, "a smaller --scale"]))
    return MhaError(
        message, hint=f"{helps} may help; --allow-nonfinite continues anyway", code="not-finite"
    )


# --------------------------------------------------------------------------------------------- time


TOTAL = "total"
MIN_RUNS = 2
DEFAULT_RUNS = 5
DEFAULT_BUDGET_S = 1.0


class Stopwatch:
    """A tap that measures the time of each site, and passes its tensor to another tap while the
    clock is stopped.

    On an accelerator every site waits for the device, so the times of stages include waiting that
    an unobserved run does not have.
    """

    def __init__(self, device: torch.device, then: Tap = no_tap) -> None:
        self._device, self._then = device, then
        self.seconds: dict[str, float] = {}
        self._since = self._now()

    def __call__(self, site: str, tensor: Tensor, **where: Any) -> None:
        """Ends the site's interval. The next one begins after the other tap."""
        self.seconds[site] = self._now() - self._since
        self._then(site, tensor, **where)
        self._since = self._now()

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return perf_counter()


def time_stages(
    run: Callable[[Tap], object],
    first: Mapping[str, float],
    device: torch.device,
    repeat: int | None,
) -> dict[str, Timing]:
    """Timings of every site, and of their sum as `total`, over `repeat` runs after the first, which
    is kept separate.

    `repeat` None means 5 runs, or fewer (at least 2) if they take longer than a second together.
    """
    runs: list[dict[str, float]] = []
    began = perf_counter()
    while len(runs) < (DEFAULT_RUNS if repeat is None else repeat):
        if repeat is None and len(runs) >= MIN_RUNS and perf_counter() - began > DEFAULT_BUDGET_S:
            break
        watch = Stopwatch(device)
        run(watch)
        runs.append(watch.seconds)
    return stage_timings(first, runs)


def stage_timings(
    first: Mapping[str, float], runs: Sequence[Mapping[str, float]]
) -> dict[str, Timing]:
    """Timings of every stage, and of their sum as `total`."""
    stages = {site: timing(first[site], [seconds[site] for seconds in runs]) for site in first}
    return stages | {
        TOTAL: timing(sum(first.values()), [sum(seconds.values()) for seconds in runs])
    }


def timing(first_s: float, samples_s: list[float]) -> Timing:
    """The samples with their median and interquartile range (inclusive quartiles; 0 for one
    sample).
    """
    low, middle, high = np.quantile(samples_s, (0.25, 0.5, 0.75)).tolist()
    return Timing(first_s, tuple(samples_s), middle, high - low)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two cells; infinite if only one of them is finite, and for other
    shapes.
    """
    a, b = a.cpu().double(), b.cpu().double()
    if a.shape != b.shape:
        return math.inf
    largest = (a - b).abs().max().item()
    if math.isfinite(largest):  # as all cells are
        return largest
    if bool((a.isfinite() != b.isfinite()).any()):
        return math.inf
    return torch.where(a.isfinite(), (a - b).abs(), 0.0).max().item()
