"""What every record is made of: tokens, steps, their numbers and timings, the self-check, the machine. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mhacli.io.json_schema import section

if TYPE_CHECKING:
    from mhacli.results.record.sections import CacheStep


@dataclass(frozen=True)
class Piece:
    """What the tokenizer of a checkpoint says of a token besides its id: its own `name` for it, the `bytes` that it stands
    for in hex, whether it is `special`, and the number of the `word` that it is part of (None for special tokens).

    Where a character is cut into several tokens, the token is its `part` of `parts`, 1 first.
    """

    name: str
    bytes: str
    special: bool = False
    word: int | None = None
    part: int = 1
    parts: int = 1


@dataclass(frozen=True)
class TokenSequence:
    """One text as tokens. `offsets` are characters of `text`, end exclusive; `documents` says which document of the text
    each token belongs to, 0 first, and is empty where texts are not cut into documents. `pieces` are those of a tokenizer
    that has its own names for tokens, else empty; then `tokens` are what they stand for, and parts of a character are
    marked, `日⟨1/3⟩`."""

    text: str
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    documents: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each token in its own document, 0 first."""
        begins: dict[int, int] = {}
        for index, document in enumerate(self.documents):
            begins.setdefault(document, index)
        return tuple(index - begins[document] for index, document in enumerate(self.documents)) or tuple(
            range(len(self.tokens))
        )


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
class Step:
    """What was seen at one site. `layout` says whether the tensor shares memory with `view_of`; strides count numbers.

    `parameters` maps weight names to shapes; `bytes` is the tensor's size; `time_s` is None where nothing was timed. What is
    not `built` was made to be looked at: the kernel that ran never makes it.
    Of somebody's own attention `operation` is what torch calls it, `file`, `line` and `source` say where it stands in their code,
    `remark` what is odd about it. A
    line that ran `repeats` times is one step: flops and bytes are those of all times, the rest of the first; `repeats_of` is
    the word for what it was repeated.
    """

    site: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    formula: str
    meaning: str
    layout: Literal["view", "copy"]
    strides: tuple[int, ...]
    flops: int
    bytes: int
    time_s: float | None = None
    view_of: str | None = None
    parameters: tuple[Parameter, ...] = ()
    values: Values | None = None
    cache: CacheStep | None = field(default=None, metadata=section("mhacli.results.record.sections"))
    built: bool = True
    operation: str = ""
    file: str | None = None
    line: int | None = None
    source: str = ""
    remark: str = ""
    repeats: int = 1
    repeats_of: str = ""


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
