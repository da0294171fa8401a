"""How large the cells of a matrix are drawn, from blocks that all fit to cells with four decimals."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHADED, SQUARE, NUMBERS, DECIMALS = 1, 2, 6, 8
"""Columns of a cell: shaded alone, as wide as high, with two decimals, with four."""


@dataclass(frozen=True)
class Zoom:
    """Blocks of `factor` × `factor` cells of the map, `width` columns each; `halves`: two rows share a line."""

    factor: int = 1
    width: int = SHADED
    halves: bool = False

    @property
    def decimals(self) -> int:
        """How many decimals of a share stand in a cell; 0 for a shade alone."""
        return {NUMBERS: 2, DECIMALS: 4}.get(self.width, 0)

    def lines(self, n_rows: int) -> int:
        """How many lines so many rows of the map take."""
        blocks = -(-n_rows // self.factor)
        return -(-blocks // 2) if self.halves else blocks

    def columns(self, n_columns: int) -> int:
        """How many columns of the screen so many columns of the map take."""
        return -(-n_columns // self.factor) * self.width

    def fits(self, shape: tuple[int, int], room: tuple[int, int]) -> bool:
        """Whether a map of this shape fits into lines and columns."""
        return self.lines(shape[0]) <= room[0] and self.columns(shape[1]) <= room[1]


def ladder(shape: tuple[int, int], room: tuple[int, int], *, colour: bool) -> tuple[Zoom, ...]:
    """Every zoom of a map, the smallest picture first: blocks that all fit, then half as large ones, then single cells,
    wider and wider. With colour, cells that are one column wide share lines; without, blocks are two columns wide where
    those fit."""
    smallest = max(1, -(-shape[0] // max(1, room[0] * (2 if colour else 1))), -(-shape[1] // max(1, room[1])))
    factors, factor = [smallest], 1 << (smallest.bit_length() - 1)
    while factor >= 1:
        factors += [factor] if factor < smallest else []
        factor //= 2
    blocks = [Zoom(factor, SHADED, colour) for factor in factors]
    if not colour:
        wide = [replace(zoom, width=SQUARE) for zoom in blocks]
        blocks = [two if two.columns(shape[1]) <= room[1] else one for one, two in zip(blocks, wide, strict=True)]
    return (
        *(zoom for zoom in blocks if zoom != Zoom(1, SQUARE)),
        *(Zoom(1, width) for width in (SQUARE, NUMBERS, DECIMALS)),
    )


def fitting(shape: tuple[int, int], room: tuple[int, int], *, colour: bool) -> Zoom:
    """The largest zoom at which all of a map fits."""
    steps = ladder(shape, room, colour=colour)
    return next((zoom for zoom in reversed(steps) if zoom.fits(shape, room)), steps[0])


def nearest(zoom: Zoom, steps: tuple[Zoom, ...]) -> int:
    """Where a zoom stands among the steps, or that which is most like it."""
    return min(range(len(steps)), key=lambda i: (abs(steps[i].factor - zoom.factor), abs(steps[i].width - zoom.width)))
