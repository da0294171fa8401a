"""Whether a record agrees with itself: what cannot be is refused when it is read, and what does not add up is said wherever it is
shown. Nothing is computed anew: a pattern's rows, its mask, what is said of each row and the verdicts must fit each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.results.record.arrays import Array, are_read
from mhacli.results.record.head_statistics import STATISTICS, HeadStatistics
from mhacli.spec.tolerances import TOLERANCES

if TYPE_CHECKING:
    from mhacli.results.record.record import Record
    from mhacli.spec.tokens import TokenSequence

ENTROPY_TOLERANCE = 1e-2
"""How far an entropy may be from that of its row, in nats: the last digit on the screen. It is computed from log-sum-exp in
float32, where scores of a thousand cost a thousandth."""
_IN_16_BITS = 10
"""Nats that the rounding of a row's weights may cost, for each unit of it: the logarithm of a small weight."""
MOST_OF_SUMS = 1e-2
"""The largest tolerance that a look at heads gives a sum of weights, however large scores are."""
_SAID_ONCE = 6


# ------------------------------------------------------------------------------------------------------- what cannot be


def impossible(record: Record) -> str | None:
    """The first thing in a record's description that no computation can have given, as `FIELD must RULE`; None where all can be.

    Arrays are not asked for: their shapes are checked beside them, and their ranges when they are read.
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
            return f"{name} must not be negative"
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
    """Whether heads are numbered once each, and queries and keys that are named of them are there."""
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
    """The name of the first count, length, size or time in a part of a record that is below 0."""
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
        if is_count and any(number < 0 for number in (value if isinstance(value, tuple) else (value,))):
            return name
        if not isinstance(value, (int, float)):
            found = _negative(value)
            if found is not None:
                return found
    return None


@cache
def _fields(kind: Any) -> tuple[tuple[str, bool], ...]:
    """The names of a dataclass's fields, and whether each is a count, length, size or time, which its name says."""
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


# ------------------------------------------------------------------------------------------------- what does not add up


def contradictions(record: Record) -> tuple[str, ...]:
    """What does not add up in a record, in words, nothing where all does: verdicts against their own numbers, means beyond their
    range, and of the arrays, once they are read, rows that do not sum to 1, weights of keys that are masked, and entropies,
    strongest keys and scores that are not those of their row."""
    of_arrays = are_read(record.arrays)
    views = {layer.label: record.of_layer(i) for i, layer in enumerate(record.layers)} or {"": record}
    unverified = {layer.label for layer in record.layers if not layer.verified}  # which may be no softmax at all
    found = list(_verdicts(record, views))
    for label, view in views.items():
        said = [*_means(view), *(_of_arrays(view) if of_arrays and label not in unverified else ())]
        found += [f"{label}: {words}" if label else words for words in said]
    return tuple(dict.fromkeys(found))


def require_agreement(*records: Record, names: tuple[str, ...] = ()) -> None:
    """Raises `MhaError` with exit code 3 that says what does not add up in records that were shown."""
    found = [
        f"{name}{words}"
        for record, name in zip(records, [f"{name}: " for name in names] or [""] * len(records), strict=True)
        for words in contradictions(record)
    ]
    if found:
        more = f"; and {len(found) - _SAID_ONCE} more" if len(found) > _SAID_ONCE else ""
        raise MhaError(
            f"the record contradicts itself: {'; '.join(found[:_SAID_ONCE])}{more}",
            hint="the file was changed or damaged after it was saved; do not trust what is shown of it",
            code="contradiction",
            exit_code=EXIT_CHECK,
        )


def _verdicts(record: Record, views: Mapping[str, Record]) -> Iterator[str]:
    """Checks that are said to hold although their error is beyond their tolerance, or their parts do not hold."""
    checks = [("the self-check", record.self_check.max_abs_error, record.self_check.tolerance, record.self_check.ok)]
    checks += [
        (f"the route {route.route}", route.max_abs_difference, route.tolerance, route.ok) for route in record.routes
    ]
    for label, view in views.items():
        behind = f" of {label}" if label else ""
        own = view.self_check
        checks += [(f"the self-check{behind}", own.max_abs_error, own.tolerance, own.ok)] if label else []
        parts = () if view.survey is None else view.survey.checks
        checks += [(f"the check {part.name!r}{behind}", part.error, part.tolerance, part.ok) for part in parts]
        yield from (
            f"the check {part.name!r}{behind} has a tolerance of {part.tolerance:.3g}"
            for part in parts
            if part.tolerance > MOST_OF_SUMS and not part.name.startswith("z ")
        )
        if own.ok and not all(part.ok for part in parts):
            yield f"the self-check{behind} is marked ok, but one of its parts is not"
        if label and record.self_check.ok and not own.ok:
            yield f"the self-check is marked ok, but that of {label} is not"
    for name, error, tolerance, ok in checks:
        if ok and (error is None or not 0 <= error <= tolerance):
            shown = "numbers that are not finite" if error is None else f"a difference of {error:.3g}"
            yield f"{name} is marked ok within {tolerance:.3g}, but has {shown}"


def _means(view: Record) -> Iterator[str]:
    """Means of heads that are beyond what they can be."""
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
    is_signed = "offset"  # the one distance that has a direction
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
    found = [*_sums(view), *_ranges(view)]
    if not found and "pattern" in view.arrays and not _has_learned_sink(view):
        found = [*_rows(view)]  # one cause has one line: rows of weights that cannot be give nothing else
    yield from found


def _has_learned_sink(view: Record) -> bool:
    return any(head.learned_sink is not None for head in view.heads)


def _ranges(view: Record) -> Iterator[str]:
    """Entropies and effective keys of queries beyond what the keys that they see allow. A sink logit counts as a key."""
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
            n_beyond = int((arrays[name] > limit).sum())  # NaN, where no key is seen, is not
            if n_beyond:
                yield f"{n_beyond} of {arrays[name].size} numbers of {name} are more than the visible keys allow"


_OF_A_ROW = {
    "entropy": ("entropy", "is not that of"),
    "strongest_key": ("strongest key", "is not that of"),
    "scores": ("scores", "do not give"),
}


def _rows(view: Record) -> Iterator[str]:
    """What is said of rows of the pattern, and does not follow from them: their entropy, strongest key, and scores."""
    import numpy as np

    arrays, slack = view.arrays, TOLERANCES[view.config.dtype].stored_row_sum
    wrong = dict.fromkeys(_OF_A_ROW, 0)
    for b, h in np.ndindex(arrays["pattern"].shape[:2]):  # head by head, for patterns may be large
        pattern = arrays["pattern"][b, h].astype(np.float64)
        is_open = pattern.sum(axis=-1) > 0  # NaN, and rows that see nothing, are not
        if "entropy" in arrays:
            entropy = -(pattern * np.log(np.where(pattern > 0, pattern, 1.0))).sum(axis=-1)
            difference = np.abs(entropy - arrays["entropy"][b, h])
            wrong["entropy"] += int((is_open & (difference > ENTROPY_TOLERANCE + _IN_16_BITS * slack)).sum())
        if "strongest_key" in arrays:
            keys = arrays["strongest_key"][b, h].astype(np.int64)
            weight = np.where(keys < 0, 0.0, np.take_along_axis(pattern, np.maximum(keys, 0)[:, None], axis=-1)[:, 0])
            wrong["strongest_key"] += int((is_open & (pattern.max(axis=-1) - weight > slack)).sum())
        if "scores" in arrays and view.config.dtype in ("float32", "float64"):  # of 16 bits, scores are too coarse
            wrong["scores"] += int((is_open & _differs(pattern, arrays["scores"][b, h], slack)).sum())
    n_rows = int(np.prod(arrays["pattern"].shape[:3]))
    for name, (subject, verb) in _OF_A_ROW.items():
        if wrong[name]:
            yield f"the {subject} of {wrong[name]} of {n_rows} rows {verb} their pattern"


def _differs(pattern: Array, scores: Array, slack: float) -> Any:
    """For each row, whether the softmax of its scores, where something may be attended, is another than its pattern."""
    import numpy as np

    scores = np.where(pattern > 0, scores, -np.inf).astype(np.float64)
    top = scores.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinities less infinities are NaN, and compare as no difference
        weights = np.exp(scores - top)
        return np.abs(weights / weights.sum(axis=-1, keepdims=True) - pattern).max(axis=-1) > slack


def _sums(view: Record) -> Iterator[str]:
    """What rows of patterns and maps sum to, and what masked keys get. A sink logit takes a part of every row."""
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
        else:  # every query that sees a key gives 1 in all
            n_seen = seen.sum(axis=-1)
            yield from _off(f"sums of {name}", sums / np.maximum(n_seen, 1), n_seen > 0, lowest, slack)


def _off(what: str, sums: Any, is_open: Any, least: float, slack: float) -> Iterator[str]:
    """How many sums are not 1 where something may be attended, or 0 where nothing may; NaN is shown as what it is."""
    import numpy as np

    low, high = np.where(is_open, least, 0.0) - slack, np.where(is_open, 1.0, 0.0) + slack
    wrong = (sums < low) | (sums > high)
    if wrong.any():
        distance = np.where(wrong, np.maximum(low - sums, sums - high), 0.0)
        worst = float(sums.flat[int(distance.argmax())])
        yield f"{int(wrong.sum())} of {wrong.size} {what} do not sum to 1, the worst to {worst:.6g}"
