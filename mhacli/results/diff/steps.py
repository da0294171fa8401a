"""What two walkthroughs say of their steps: shapes everywhere, and numbers as far as a trace tells them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from mhacli.results.diff.axes import Unlike, unlike_axes
from mhacli.results.diff.result import Place, Setting, SiteDifference, Status
from mhacli.results.diff.tokens import aligned
from mhacli.results.record.measures import Values
from mhacli.results.record.record import Record
from mhacli.results.record.steps import Step

_TOKEN_AXES = ("batch", "query", "key")
_SAID = ("layout", "formula", "operation")
_EXTREMES = ("min", "max", "mean", "std")


def compared_steps(
    a: Record, b: Record, tolerance: float, *, known: Collection[str], has_same_tokens: bool
) -> tuple[SiteDifference, ...]:
    """The steps of both traces, those of A in their order and those of B between them. Of sites that are `known` by their arrays
    only the shape is compared. A step that one alone has counts as a difference only where traces are all there is."""
    if a.decoding is not None or b.decoding is not None:  # steps of a decoding are no sites
        return ()
    is_all = a.module is not None and b.module is not None
    rows = []
    for one, other in _pairs(a.trace, b.trace):
        if one is not None and other is not None:
            is_counted = has_same_tokens and one.site not in known
            rows.append(_compared_step(one, other, tolerance, has_same_tokens=has_same_tokens, is_counted=is_counted))
        elif is_all and (step := one or other) is not None:
            rows.append(_alone(step, is_of_a=other is None))
    return tuple(rows)


def names_alone(a: Record, b: Record) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The sites of the traces that one of them alone has, each once."""
    if a.decoding is not None or b.decoding is not None or not a.trace or not b.trace:
        return (), ()
    names = [{step.site: None for step in record.trace} for record in (a, b)]
    return tuple(n for n in names[0] if n not in names[1]), tuple(n for n in names[1] if n not in names[0])


def _pairs(a: Sequence[Step], b: Sequence[Step]) -> Iterator[tuple[Step | None, Step | None]]:
    """Steps of the same name beside each other, in the order of both."""
    matches, _ = aligned([step.site for step in a], [step.site for step in b])
    i = j = 0
    for match in matches:
        yield from ((step, None) for step in a[i : match.a])
        yield from ((None, step) for step in b[j : match.b])
        i, j = match.a + match.length, match.b + match.length
        yield from zip(a[match.a : i], b[match.b : j], strict=True)
    yield from ((step, None) for step in a[i:])
    yield from ((None, step) for step in b[j:])


def _alone(step: Step, *, is_of_a: bool) -> SiteDifference:
    a, b = (step.shape, None) if is_of_a else (None, step.shape)
    return SiteDifference(step.site, "shape", "shape", step.axes, a, b, why=f"only {'A' if is_of_a else 'B'} has it")


def _compared_step(a: Step, b: Step, tolerance: float, *, has_same_tokens: bool, is_counted: bool) -> SiteDifference:
    words = ((name, str(getattr(a, name)), str(getattr(b, name))) for name in _SAID)
    told = tuple(Setting(name, of_a, of_b) for name, of_a, of_b in words if of_a != of_b)
    unlike = _unlike(a, b, has_same_tokens)
    row = SiteDifference(
        site=a.site,
        seen="shape",
        status="identical" if unlike is None else "shape" if unlike.departs else "skipped",
        axes=a.axes,
        shape_a=a.shape,
        shape_b=b.shape,
        why="" if unlike is None else unlike.why,
        told=told if a.operation and b.operation else (),
    )
    if unlike is not None or not is_counted or a.values is None or b.values is None:
        return row
    return _compared_values(row, a.values, b.values, tolerance)


def _unlike(a: Step, b: Step, has_same_tokens: bool) -> Unlike | None:
    """What is other in the axes and sizes of a step; other tokens excuse other lengths."""
    if a.axes != b.axes:
        return unlike_axes(a.axes, b.axes)
    if len(a.shape) != len(b.shape):
        return Unlike(f"{len(a.shape)} axes against {len(b.shape)}")
    sizes = zip(a.axes, a.shape, b.shape, strict=False)
    parts = [
        f"{axis} {n_a} against {n_b}"
        for axis, n_a, n_b in sizes
        if n_a != n_b and (has_same_tokens or axis not in _TOKEN_AXES)
    ]
    return Unlike(", ".join(parts)) if parts else None


def _compared_values(row: SiteDifference, a: Values, b: Values, tolerance: float) -> SiteDifference:
    """All numbers where the trace holds them, else the extremes and moments."""
    is_whole = a.numbers is not None and b.numbers is not None and len(a.numbers) == len(b.numbers)
    pairs = [*zip(*(_numbers(v, is_whole) for v in (a, b)), strict=True)]
    known = [(n, abs(y - x)) for n, (x, y) in enumerate(pairs) if x is not None and y is not None]
    n_gone = sum((x is None) != (y is None) for x, y in pairs)
    n_broken = max(n_gone, abs(a.n_nan - b.n_nan), abs(a.n_inf - b.n_inf))
    place, largest = max(known, key=lambda item: item[1], default=(0, 0.0))
    magnitude = max((abs(x) for pair in pairs for x in pair if x is not None), default=0.0)
    status: Status = "within" if tolerance > 0 and largest <= tolerance * magnitude else "beyond"
    return replace(
        row,
        seen="numbers" if is_whole else "extremes",
        status="beyond" if n_broken else "identical" if largest == 0 else status,
        n_cells=len(pairs) if is_whole else math.prod(row.shape_a or ()),
        n_different=sum(x != y for x, y in pairs) if is_whole else 0,
        n_nonfinite=n_broken,
        largest=largest,
        magnitude=magnitude,
        at=_place(place, row) if is_whole and largest else None,
        why="" if is_whole else f"by {', '.join(_EXTREMES)}",
    )


def _numbers(values: Values, is_whole: bool) -> Sequence[float | None]:
    if is_whole:
        return values.numbers or ()
    return [getattr(values, name) for name in _EXTREMES]


def _place(flat: int, row: SiteDifference) -> Place:
    """Where a number of a small tensor stands, counted along its axes."""
    indices: list[int] = []
    for size in reversed(row.shape_a or ()):
        flat, index = divmod(flat, size)
        indices.insert(0, index)
    axes = tuple("sequence" if axis == "batch" else axis for axis in row.axes)
    return Place(axes, tuple(indices), tuple(indices))
