"""The checks of `mha doctor`, and the checkpoint that it examined, as plain data."""

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

CheckStatus = Literal["pass", "fail", "n/a", "care"]


@dataclass(frozen=True)
class HealthCheck:
    """A check and its result. `ok` is None for a warning (`is_caution`), and if the check does not
    apply (see `message`).

    `value` is the measured number and `tolerance` the largest that passes. `layer` is the first
    attention with the fault. `meaning` says how a failure affects results, and `advice` what to do.
    """

    name: str
    ok: bool | None
    message: str
    value: float | None = None
    tolerance: float | None = None
    layer: str | None = None
    is_caution: bool = False
    meaning: str = ""
    advice: str = ""

    @property
    def status(self) -> CheckStatus:
        """The result in a word; `care` is a warning."""
        if self.ok is None:
            return "care" if self.is_caution else "n/a"
        return "pass" if self.ok else "fail"


class ExaminedModel(Struct, frozen=True):
    """The examined checkpoint. `stored` are the dtypes of its tensors, the most frequent first;
    `lengths` are the lengths of its texts. `random_weights` is the seed of weights that were drawn
    for a config without any.
    """

    path: str
    revision: str | None
    family: str
    architecture: str
    n_parameters: int
    dtype: str
    stored: tuple[str, ...]
    implementation: str
    device: str
    lengths: tuple[int, ...]
    n_passes: int
    tolerance: str
    random_weights: int | None = None
