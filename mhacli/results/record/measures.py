"""What is measured in every record: values of tensors, timings, the self-check, the machine. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Values:
    """A tensor's numbers in one line: finite extremes and moments, a histogram of equal bins, and what is not finite.

    `numbers` holds the tensor itself, flat in row-major order, when it is small; None where a number is not finite.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    histogram: tuple[int, ...]
    n_nan: int
    n_inf: int
    numbers: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class Parameter:
    """A weight that a site uses, by its name on disk."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """Seconds of one stage: the first run apart, then the samples with their median and interquartile range."""

    first_s: float
    samples_s: tuple[float, ...]
    median_s: float
    iqr_s: float


@dataclass(frozen=True)
class SelfCheck:
    """The output recomputed in float64 from the pattern that is shown, against the output that was computed; of decoding
    also against a full recomputation, whichever is further."""

    max_abs_error: float | None
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class Environment:
    """Where it ran. `device_asked` is what the user said, `device` what that came to."""

    mha: str
    torch: str
    numpy: str
    python: str
    platform: str
    device: str
    device_name: str
    device_asked: str
    threads: int
