"""A step of the trace: what was seen at one site. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mhacli.io.json_schema import section
from mhacli.results.record.measures import Parameter, Values

if TYPE_CHECKING:
    from mhacli.results.record.sections import CacheStep


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
