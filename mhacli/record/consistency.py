"""Contradictions in the arrays of a record, without recomputing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.record.arrays import read_arrays
from mhacli.record.checks import TOLERANCES

if TYPE_CHECKING:
    from mhacli.record.record import Record

_MOST_LISTED = 6


def contradictions(record: Record) -> tuple[str, ...]:
    """The contradictions in the arrays of a record that were read, in words: rows of weights that do not sum to 1, and
    masked keys that get attention."""
    views = [(f"{layer.label}: ", record.of_layer(i)) for i, layer in enumerate(record.layers) if layer.verified]
    views = views if record.layers else [("", record)]  # a layer that is not verified may use no softmax
    return tuple(dict.fromkeys(label + text for label, view in views for text in _of_rows(view)))


def require_agreement(record: Record, name: str = "") -> None:
    """Raises `MhaError` with exit code 3 that lists the contradictions in a record that was shown."""
    faults = contradictions(record)
    if faults:
        message = f"{name or 'the record'} contradicts itself: {'; '.join(faults[:_MOST_LISTED])}"
        hint = "the file was changed or damaged after it was saved; do not trust its numbers"
        raise MhaError(message, hint=hint, code="contradiction", exit_code=EXIT_CHECK)


def _of_rows(view: Record) -> Iterator[str]:
    """A sink logit takes a part of every row, so that the keys get less than 1. NaN is no contradiction."""
    arrays = read_arrays(view.arrays)
    if "pattern" not in arrays:
        return
    import numpy as np

    pattern, allowed = arrays["pattern"], np.broadcast_to(view.arrays["allowed"], arrays["pattern"].shape)
    n_masked = int((~allowed & (np.abs(pattern) > 0)).sum())
    if n_masked:
        yield f"{n_masked} keys that are masked get attention"
    slack = TOLERANCES[view.config.dtype].stored_row_sum
    if view.survey is not None:
        slack = max(slack, view.survey.checks[0].tolerance)
    least = 0.0 if any(head.learned_sink is not None for head in view.heads) else 1.0
    sums, sees_a_key = pattern.sum(axis=-1, dtype=np.float64), allowed.any(axis=-1)
    wrong = (sums < sees_a_key * least - slack) | (sums > sees_a_key + slack)
    if wrong.any():
        worst = max(sums[wrong].tolist(), key=lambda total: abs(total - 1))
        yield f"{int(wrong.sum())} of {wrong.size} rows of pattern do not sum to 1, the worst to {worst:.6g}"
