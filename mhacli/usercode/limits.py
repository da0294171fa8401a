"""The limits of time: how long an examination may take after the first call, whatever a single call
may take. Nothing here loads torch.
"""

import time
from typing import Any

from .process import Stage

DEFAULT_MAX_TIME_S = 60.0
"""Seconds for all that follows the import, the constructor and the first call."""


class OutOfTime(Exception):
    """The time of an examination is over. It ends what is being compared, and never decides it."""

    def __init__(self, max_time_s: float) -> None:
        super().__init__(f"--max-time {max_time_s:g} seconds were over")
        self.max_time_s = max_time_s


class TimedStage:
    """A `Stage` that raises `OutOfTime` when one begins too long after the end of the first call of
    the user's code. What is restored after a call, `examining`, never raises.
    """

    def __init__(self, stage: Stage, max_time_s: float) -> None:
        self._stage = stage
        self._max_time_s = max_time_s
        self._is_calling = False
        self._started_s = -1.0

    def __call__(self, text: str, **how: Any) -> None:
        """Reports the stage that begins. The first words of its text are those of `Stage`: time
        counts from the end of the first call.
        """
        if self._started_s < 0 and self._is_calling:
            self._started_s = time.monotonic()
        self._is_calling = text.startswith("calling")
        is_over = 0 <= self._started_s < time.monotonic() - self._max_time_s
        if is_over and not text.startswith("examining"):
            raise OutOfTime(self._max_time_s)
        self._stage(text, **how)
