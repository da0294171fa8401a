"""Checks the internal consistency of a record, without recomputing it.

Impossible contents are refused on reading; contradictions are reported wherever the record is shown. A pattern's rows,
its mask, the statistics of each row and the verdicts must fit each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.record.arrays import Array, are_read
from mhacli.record.heads import STATISTICS, HeadStatistics
from mhacli.record.tolerances import TOLERANCES

if TYPE_CHECKING:
    from mhacli.record.record import Record
    from mhacli.text.tokens import TokenSequence

ENTROPY_TOLERANCE = 1e-2
"""The tolerance of an entropy against its row's, in nats: the last digit on screen. It comes from a float32
log-sum-exp, which costs a thousandth for scores of a thousand."""
_IN_16_BITS = 10
"""Nats per unit of rounding of a row's weights, caused by the logarithm of small weights."""
MOST_OF_SUMS = 1e-2
"""The largest tolerance of row sums in head statistics, however large the scores."""
_MOST_LISTED = 6


# -------------------------------------------------------------------------------------------------- impossible contents


def impossible(record: Record) -> str | None:
    """The first impossible entry in a record's description, as `FIELD must RULE`, or None.

    Arrays are not read here: their shapes are checked with the header, and their ranges when they are read.
    """
    for sequence in (*record.sequences, *record.keys):
        fault = _impossible_text(sequence, len(record.vocabulary))
        if fault is not None:
            return fault
    views = [record.of_layer(index) for index in range(len(record.layers))] or [record]
    if not all(_are_placed(view) for view in views):
        return "heads and survey must lie within the record"
    for view in views:
        if view.config.n_heads % (view.config.n_kv_heads or 1):
            return f"n_kv_heads must divide the {view.config.n_heads} heads"
    parts = (record.trace, record.heads, record.timings, record.environment, record.decoding, record.survey)
    for name in map(_negative, (*parts, record.model, record.layers)):
        if name is not None:
            return f"{name} must be from 0 to 2**64"
    return None


def _impossible_text(sequence: TokenSequence, n_vocabulary: int) -> str | None:
    if not all(0 <= start <= end <= len(sequence.text) for start, end in sequence.offsets):
        return f"offsets must lie within their text of {len(sequence.text)} characters"
    if min(sequence.ids) < 0 or (n_vocabulary and max(sequence.ids) >= n_vocabulary):
        return f"ids must be from 0 to {n_vocabulary - 1}" if n_vocabulary else "ids must not be negative"
    documents = sequence.documents
    if documents and (documents[0] < 0 or any(a > b for a, b in pairwise(documents))):
        return "documents must be numbered in their order, from 0 up"
    if not all(1 <= piece.part <= piece.parts and (piece.word or 0) >= 0 for piece in sequence.pieces):
        return "the parts of pieces must count from 1 up to their number"
    return None


def _are_placed(view: Record) -> bool:
    """Whether head numbers are valid and distinct, and the queries and keys that heads name exist."""
    heads, facts = [head.head for head in view.heads], view.facts
    if len(set(heads)) < len(heads) or not all(0 <= head < view.config.n_heads for head in heads):
        return False
    keys = [(sink.sequence, sink.key) for head in view.heads for sink in head.sinks]
    cells = [(cell.sequence, cell.query, cell.key) for head in view.heads for cell in head.largest]
    cells += [head.max_score_at for head in view.heads if head.max_score_at is not None]
    keys += [(b, key) for b, _, key in cells]
    return all(0 <= b < facts.batch and 0 <= key < facts.k_len for b, key in keys) and all(
        0 <= query < facts.q_len for _, query, _ in cells
    )


def _negative(part: Any) -> str | None:
    """The name of the first negative count, length, size or time in a part of a record, or None."""
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, tuple):
        return next((name for name in map(_negative, part) if name is not None), None)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return None
    for name, is_count in _fields(type(part)):
        value = getattr(part, name)
        if value is None or isinstance(value, (str, bool)):
            continue
        if is_count and any(not 0 <= number <= 2**64 for number in (value if isinstance(value, tuple) else (value,))):
            return name
        if not isinstance(value, (int, float)):
            negative = _negative(value)
            if negative is not None:
                return negative
    return None


@cache
def _fields(kind: Any) -> tuple[tuple[str, bool], ...]:
    """The names of a dataclass's fields, and whether each name is that of a count, length, size or time."""
    names = [f.name for f in dataclasses.fields(kind)]
    return tuple((name, name in _COUNTS or name.startswith("n_") or name.endswith(_COUNT_ENDS)) for name in names)


_COUNTS = {
    "bytes",
    "flops",
    "shape",
    "threads",
    "samples_s",
    "layer",
    "repeats",
    "histogram",
    "max_positions",
    "sequence",
}
_COUNT_ENDS = ("_len", "_bytes", "_s", "_flops", "_shape")


# ------------------------------------------------------------------------------------------------------- contradictions


def contradictions(record: Record) -> tuple[str, ...]:
    """The contradictions in a record, in words.

    They are verdicts that contradict their numbers, means out of range and, once arrays are read, rows that do not sum
    to 1, weights of masked keys, and entropies, strongest keys and scores that contradict their row.
    """
    of_arrays = are_read(record.arrays)
    views = {layer.label: record.of_layer(i) for i, layer in enumerate(record.layers)} or {"": record}
    unverified = {layer.label for layer in record.layers if not layer.verified}  # may not use softmax
    faults = list(_verdicts(record, views))
    for label, view in views.items():
        texts = [*_means(view), *(_of_arrays(view) if of_arrays and label not in unverified else ())]
        faults += [f"{label}: {text}" if label else text for text in texts]
    return tuple(dict.fromkeys(faults))


def require_agreement(*records: Record, names: tuple[str, ...] = ()) -> None:
    """Raises `MhaError` with exit code 3 that lists the contradictions in records that were shown."""
    faults = [
        f"{name}{text}"
        for record, name in zip(records, [f"{name}: " for name in names] or [""] * len(records), strict=True)
        for text in contradictions(record)
    ]
    if faults:
        more = f"; and {len(faults) - _MOST_LISTED} more" if len(faults) > _MOST_LISTED else ""
        raise MhaError(
            f"the record contradicts itself: {'; '.join(faults[:_MOST_LISTED])}{more}",
            hint="the file was changed or damaged after it was saved; do not trust its numbers",
            code="contradiction",
            exit_code=EXIT_CHECK,
        )


def _verdicts(record: Record, views: Mapping[str, Record]) -> Iterator[str]:
    """Checks marked ok whose error exceeds the tolerance, or whose parts are not ok."""
    checks = [("the self-check", record.self_check.max_abs_error, record.self_check.tolerance, record.self_check.ok)]
    checks += [
        (f"the route {route.route}", route.max_abs_difference, route.tolerance, route.ok) for route in record.routes
    ]
    for label, view in views.items():
        of_label = f" of {label}" if label else ""
        self_check = view.self_check
        checks += (
            [(f"the self-check{of_label}", self_check.max_abs_error, self_check.tolerance, self_check.ok)]
            if label
            else []
        )
        parts = () if view.survey is None else view.survey.checks
        checks += [(f"the check {part.name!r}{of_label}", part.error, part.tolerance, part.ok) for part in parts]
        yield from (
            f"the check {part.name!r}{of_label} has a tolerance of {part.tolerance:.3g}"
            for part in parts
            if part.tolerance > MOST_OF_SUMS and not part.name.startswith("z ")
        )
        if self_check.ok and not all(part.ok for part in parts):
            yield f"the self-check{of_label} is marked ok, but one of its parts is not"
        if label and record.self_check.ok and not self_check.ok:
            yield f"the self-check is marked ok, but that of {label} is not"
    for name, error, tolerance, ok in checks:
        if ok and (error is None or not 0 <= error <= tolerance):
            shown = "numbers that are not finite" if error is None else f"a difference of {error:.3g}"
            yield f"{name} is marked ok within {tolerance:.3g}, but has {shown}"


def _means(view: Record) -> Iterator[str]:
    """Means of heads that are out of range."""
    of_corpus = 0 if view.corpus is None else view.corpus.longest
    longest = max(view.facts.q_len, view.facts.k_len, of_corpus)
    n_keys = max(view.facts.k_len, of_corpus) + 1  # a sink logit counts as a key
    limits: dict[str, tuple[float, float]] = {
        "weight": (0.0, 1.0),
        "fraction": (0.0, 1.0),
        "nats": (0.0, math.log(n_keys)),
        "count": (1.0, float(n_keys)),
        "tokens": (0.0, float(longest)),
    }
    is_signed = "offset"  # the only signed distance
    ranges = {row.field: limits[row.unit] for row in STATISTICS if row.unit in limits and row.field != is_signed}
    slack = max(1e-3, TOLERANCES[view.config.dtype].stored_row_sum)
    for head in view.heads:
        for name, (low, high) in ranges.items():
            for part in (head, head.uniform):
                value = getattr(part, name, None)
                if value is not None and not low - slack <= value <= high + slack * max(1.0, high):
                    yield f"{name} of head {head.head} is {value:.6g}, which is not from {low:g} to {high:.6g}"
        yield from _strong(head, slack)


def _strong(head: HeadStatistics, slack: float) -> Iterator[str]:
    for weight in (*(sink.share for sink in head.sinks), *(cell.share for cell in head.largest)):
        if not -slack <= weight <= 1 + slack:
            yield f"an attention weight of head {head.head} is {weight:.6g}, which is not from 0 to 1"


def _of_arrays(view: Record) -> Iterator[str]:
    faults = [*_sums(view), *_ranges(view)]
    if not faults and "pattern" in view.arrays and not _has_learned_sink(view):
        faults = [*_rows(view)]  # impossible weights are reported once, not also by row
    yield from faults


def _has_learned_sink(view: Record) -> bool:
    return any(head.learned_sink is not None for head in view.heads)


def _ranges(view: Record) -> Iterator[str]:
    """Entropies and effective keys above what the visible keys allow. A sink logit counts as a key."""
    import numpy as np

    arrays = view.arrays
    if "visible" not in arrays and "allowed" not in arrays:
        return
    n_seen = arrays["visible"] if "visible" in arrays else arrays["allowed"].sum(axis=-1)
    most = np.maximum(n_seen + _has_learned_sink(view), 1)
    for name, limit in (
        ("entropy", np.log(most) + ENTROPY_TOLERANCE),
        ("participation", most * (1 + ENTROPY_TOLERANCE)),
    ):
        if name in arrays:
            n_beyond = int((arrays[name] > limit).sum())  # NaN (no visible key) compares as false
            if n_beyond:
                yield f"{n_beyond} of {arrays[name].size} numbers of {name} are more than the visible keys allow"


_OF_A_ROW = {
    "entropy": ("entropy", "is not that of"),
    "strongest_key": ("strongest key", "is not that of"),
    "scores": ("scores", "do not give"),
}


def _rows(view: Record) -> Iterator[str]:
    """Rows whose entropy, strongest key or scores contradict the pattern."""
    import numpy as np

    arrays, slack = view.arrays, TOLERANCES[view.config.dtype].stored_row_sum
    wrong = dict.fromkeys(_OF_A_ROW, 0)
    for b, h in np.ndindex(arrays["pattern"].shape[:2]):  # head by head, because patterns may be large
        pattern = arrays["pattern"][b, h].astype(np.float64)
        is_open = pattern.sum(axis=-1) > 0  # false for NaN and for rows without visible keys
        if "entropy" in arrays:
            entropy = -(pattern * np.log(np.where(pattern > 0, pattern, 1.0))).sum(axis=-1)
            difference = np.abs(entropy - arrays["entropy"][b, h])
            wrong["entropy"] += int((is_open & (difference > ENTROPY_TOLERANCE + _IN_16_BITS * slack)).sum())
        if "strongest_key" in arrays:
            keys = arrays["strongest_key"][b, h].astype(np.int64)
            weight = np.where(keys < 0, 0.0, np.take_along_axis(pattern, np.maximum(keys, 0)[:, None], axis=-1)[:, 0])
            wrong["strongest_key"] += int((is_open & (pattern.max(axis=-1) - weight > slack)).sum())
        if "scores" in arrays and view.config.dtype in ("float32", "float64"):  # 16-bit scores are too coarse
            wrong["scores"] += int((is_open & _differs(pattern, arrays["scores"][b, h], slack)).sum())
    n_rows = int(np.prod(arrays["pattern"].shape[:3]))
    for name, (subject, verb) in _OF_A_ROW.items():
        if wrong[name]:
            yield f"the {subject} of {wrong[name]} of {n_rows} rows {verb} their pattern"


def _differs(pattern: Array, scores: Array, slack: float) -> Any:
    """For each row, whether its pattern differs from the softmax of its scores over visible keys."""
    import numpy as np

    scores = np.where(pattern > 0, scores, -np.inf).astype(np.float64)
    top = scores.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # ∞ − ∞ is NaN, which compares as no difference
        weights = np.exp(scores - top)
        return np.abs(weights / weights.sum(axis=-1, keepdims=True) - pattern).max(axis=-1) > slack


def _sums(view: Record) -> Iterator[str]:
    """Rows of patterns and maps that do not sum to 1, and masked keys with attention. A sink logit takes a part of
    every row."""
    import numpy as np

    arrays, least = view.arrays, 0.0 if _has_learned_sink(view) else 1.0
    slack = TOLERANCES[view.config.dtype].stored_row_sum
    if view.survey is not None and view.survey.checks:
        slack = max(slack, min(MOST_OF_SUMS, view.survey.checks[0].tolerance))
    if "pattern" in arrays and "allowed" in arrays:
        pattern, allowed = arrays["pattern"], np.broadcast_to(arrays["allowed"], arrays["pattern"].shape)
        n_masked = int((~allowed & (pattern != 0)).sum())
        if n_masked:
            yield f"{n_masked} keys that are masked get attention"
        yield from _off("rows of pattern", pattern.sum(axis=-1, dtype=np.float64), allowed.any(axis=-1), least, slack)
    if "visible" not in arrays:
        return
    seen = arrays["visible"] > 0
    for name in ("map", "uniform_map", "received", "uniform_received"):
        if name not in arrays:
            continue
        sums, lowest = arrays[name].sum(axis=-1, dtype=np.float64), 1.0 if name.startswith("uniform") else least
        if name.endswith("map"):
            block = view.survey.block if view.survey is not None else 1
            starts = np.arange(0, seen.shape[-1], block)
            yield from _off(f"rows of {name}", sums, np.logical_or.reduceat(seen, starts, axis=-1), lowest, slack)
        else:  # every query with a visible key gives 1 in total
            n_seen = seen.sum(axis=-1)
            yield from _off(f"sums of {name}", sums / np.maximum(n_seen, 1), n_seen > 0, lowest, slack)


def _off(what: str, sums: Any, is_open: Any, least: float, slack: float) -> Iterator[str]:
    """Sums that are not 1 for rows with visible keys, or not 0 for others. NaN is no contradiction."""
    import numpy as np

    low, high = np.where(is_open, least, 0.0) - slack, np.where(is_open, 1.0, 0.0) + slack
    wrong = (sums < low) | (sums > high)
    if wrong.any():
        distance = np.where(wrong, np.maximum(low - sums, sums - high), 0.0)
        worst = float(sums.flat[int(distance.argmax())])
        yield f"{int(wrong.sum())} of {wrong.size} {what} do not sum to 1, the worst to {worst:.6g}"
