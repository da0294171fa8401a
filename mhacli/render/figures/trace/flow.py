"""Where the sites of our own layer stand in the diagram, and which of them each is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mhacli.render.figures.svg.elements import Piece, element, placed, value_text
from mhacli.render.figures.trace.boxes import box
from mhacli.results.record.record import Step

_GAP, _LANE, _BETWEEN = 26.0, 300.0, 18.0
_ARROW = "#44607c"
_Q, _K, _V, _ADDED = (0,), (1,), (2,), (3,)
_PAIR, _KV, _ALL = (0, 1), (1, 2), (0, 1, 2)


@dataclass(frozen=True)
class _Place:
    """The lanes that a site takes, and the sites that its numbers come from, as far as they were passed. It stands no higher
    than those that it comes `after`."""

    lanes: tuple[int, ...]
    sources: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def _projected(lane: tuple[int, ...], letter: str, rows: tuple[str, ...]) -> Mapping[str, _Place]:
    """The sites of queries, keys or values."""
    fused = ("qkv",) if letter == "q" else ("qkv", "kv")
    return {
        f"{letter}_proj": _Place(lane, rows),
        f"{letter}_per_head": _Place(lane, rows),
        letter: _Place(lane, (f"{letter}_proj", f"{letter}_per_head", *fused)),
    }


_OF_KEYS = ("context", "x")
"""What keys and values are made of: the first of these that was passed."""
PLACES: Mapping[str, _Place] = {
    "ids": _Place(_Q),
    "random": _Place(_Q),
    "embed": _Place(_Q, ("ids",)),
    "positions": _Place(_K, (), ("ids",)),
    "x": _Place(_Q, ("embed", "random", "positions")),
    "context": _Place(_KV, (), ("positions",)),
    "qkv": _Place(_ALL, ("x",)),
    "kv": _Place(_KV, ("context",)),
    **_projected(_Q, "q", ("x",)),
    **_projected(_K, "k", _OF_KEYS),
    **_projected(_V, "v", _OF_KEYS),
    "q_rot": _Place(_Q, ("q",)),
    "k_rot": _Place(_K, ("k",)),
    "alibi": _Place(_ADDED, (), ("q", "k")),
    "bias": _Place(_ADDED, (), ("q", "k")),
    "qk": _Place(_PAIR, ("q", "q_rot", "k", "k_rot")),
    "scores": _Place(_PAIR, ("qk", "alibi", "bias")),
    "pattern": _Place(_PAIR, ("scores",)),
    "dropped": _Place(_PAIR, ("pattern",)),
    "z": _Place(_ALL, ("pattern", "dropped", "v")),
    "concat": _Place(_ALL, ("z",)),
    "head_out": _Place(_ALL, ("z",)),
    "out": _Place(_ALL, ("concat", "z")),
    "out_sum": _Place(_ALL, ("head_out",)),
}
"""The sites that the diagram knows. Their formulas say the same, and a test holds the two together."""
_REPLACED = {"q": "q_rot", "k": "k_rot", "pattern": "dropped", "z": "concat"}
"""A site that is not read where the other was passed."""


def is_flow(steps: Sequence[Step]) -> bool:
    """Whether every step is a site of our own layer, each once."""
    names = [step.site for step in steps]
    return bool(names) and set(names) <= set(PLACES) and len(names) == len(set(names))


def sources_of(site: str, passed: Sequence[str]) -> tuple[str, ...]:
    """The sites among those `passed` that a site is made of.

    >>> sources_of("qk", ("q", "k", "q_rot", "k_rot"))
    ('q_rot', 'k_rot')
    """
    found = [source for source in PLACES[site].sources if source in passed]
    if PLACES[site].sources == _OF_KEYS:
        return tuple(found[:1])
    return tuple(source for source in found if _REPLACED.get(source) not in found)


@dataclass(frozen=True)
class _Box:
    lanes: tuple[int, ...]
    y: float
    piece: Piece

    @property
    def bottom(self) -> float:
        return self.y + self.piece.height


def flow(steps: Sequence[Step]) -> Piece:
    """The diagram: queries, keys and values in lanes, arrows from what a site is made of."""
    boxes: dict[str, _Box] = {}
    bottoms: dict[int, float] = {}
    for number, step in enumerate(steps, 1):
        lanes = _lanes(step.site, [s.site for s in steps])
        place, sources = PLACES[step.site], sources_of(step.site, [*boxes])
        above = [bottoms.get(lane, -_GAP) for lane in lanes]
        above += [boxes[name].bottom for name in (*sources, *place.after) if name in boxes]
        y = max(above) + _GAP
        width = len(lanes) * _LANE + (len(lanes) - 1) * _BETWEEN
        boxes[step.site] = _Box(lanes, y, box(number, step, width))
        bottoms |= dict.fromkeys(lanes, boxes[step.site].bottom)
    arrows = "".join(_arrows(boxes))
    content = "".join(placed(one.piece, _left(one.lanes[0]), one.y) for one in boxes.values())
    n_lanes = 1 + max(max(one.lanes) for one in boxes.values())
    return Piece(_marker() + arrows + content, _left(n_lanes) - _BETWEEN, max(one.bottom for one in boxes.values()))


def _lanes(site: str, passed: Sequence[str]) -> tuple[int, ...]:
    """The lanes of a site: rows stand above all that is made of them, and beside the context where there is one."""
    return _ALL if site in ("x", "random") and "context" not in passed else PLACES[site].lanes


def _left(lane: int) -> float:
    return lane * (_LANE + _BETWEEN)


def _middle(lanes: Sequence[int]) -> float:
    return (_left(lanes[0]) + _left(lanes[-1]) + _LANE) / 2


def _arrows(boxes: Mapping[str, _Box]) -> Iterator[str]:
    for site, target in boxes.items():
        for source in sources_of(site, [*boxes]):
            yield _arrow(boxes[source], target)


def _arrow(source: _Box, target: _Box) -> str:
    """Straight down where the two share a lane; else down, along, and down; from beside, into the right edge."""
    shared = [lane for lane in target.lanes if lane in source.lanes]
    if shared:
        x = _middle(shared)
        path = f"M{value_text(x)} {value_text(source.bottom)}V{value_text(target.y - 2)}"
    elif source.lanes == _ADDED:
        edge, y = _left(target.lanes[-1]) + _LANE + 2, target.y + target.piece.height / 2
        path = f"M{value_text(_middle(source.lanes))} {value_text(source.bottom)}V{value_text(y)}H{value_text(edge)}"
    else:
        start, end, y = _middle(source.lanes), _middle(target.lanes), target.y - _GAP / 2
        path = f"M{value_text(start)} {value_text(source.bottom)}V{value_text(y)}H{value_text(end)}V{value_text(target.y - 2)}"
    return element("path", d=path, fill="none", stroke=_ARROW, stroke_width=1.2, marker_end="url(#arrow)")


def _marker() -> str:
    head = element("path", d="M0 0L8 4L0 8Z", fill=_ARROW)
    marker = element(
        "marker",
        head,
        id="arrow",
        viewBox="0 0 8 8",
        refX=7.0,
        refY=4.0,
        markerWidth=7.0,
        markerHeight=7.0,
        orient="auto",
    )
    return element("defs", marker)
