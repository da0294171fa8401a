"""The grid of calls in which an attention is compared once it is right in its first ones: lengths
that cross the tiles of a kernel, batches, widths, groups of kv heads, sharp scores, and dtypes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.attention.core import dtype_name
from mhacli.attention.stages import Inputs, ReferenceLayer
from mhacli.usercode.masks import MaskForm
from mhacli.usercode.roles import stated
from mhacli.usercode.user_attention import UserAttention

LONGEST = 257
"""The tokens of the longest call: one more than tiles of 256."""
SHORTER = (255, 63)
"""The longest calls of code that has fewer positions: no multiples of a tile either."""
_INTERPRETED = (8, 130)
"""The most calls of a function in Triton's interpreter, which is slow, and the tokens of the
longest."""
_INTERPRETED_LAYER = (4, 65)
"""The same of a class."""
BUDGET = 2e9
"""Multiplications of the plain formula, forward and backward, of all calls in the first dtype."""
BUDGET_NARROWER = 1.5e8
"""The same in each narrower one."""
SHARP = 10.0
"""Inputs times this make scores a hundred times as large."""
_SHARP_FROM = 60
"""The fewest keys of a call that is also tried with sharp scores."""
_SCALE = 0.3
"""The scale that is given to a function that takes one."""
_TILE = 64
_BLOCKS = (16, 32, 64, 128)
"""The usual tiles of a kernel, in keys."""
NARROW = (torch.bfloat16, torch.float16)
"""The dtypes of 16 bits."""


class Shape(NamedTuple):
    """The sizes of a call; those from `n_heads` on are of a function of q, k and v alone, else
    0.
    """

    batch: int
    q_len: int
    k_len: int
    n_heads: int = 0
    n_kv_heads: int = 0
    d_head: int = 0
    d_v: int = 0

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of q, k and v of a function, `[batch, head, token, width]`."""
        b, n_q, n_k, h, h_kv, d, d_v = self
        return (b, h, n_q, d), (b, h_kv, n_k, d), (b, h_kv, n_k, d_v)

    @property
    def is_unusual(self) -> bool:
        """Whether heads share keys, or values have another width: many functions take no such."""
        return self.n_kv_heads != self.n_heads or self.d_v != self.d_head

    @property
    def words(self) -> str:
        """The sizes by the letters that papers and kernels use."""
        letters = ("B", "Tq", "Tk", "H", "Hkv", "d", "dv")
        return " ".join(f"{letter}={n}" for letter, n in zip(letters, self, strict=True) if n)


class Variant(NamedTuple):
    """What a call has besides its sizes and its dtype, in `words`: sharp scores; inputs and an
    output that are views of larger tensors; another call before its backward pass; a mask of a
    form; or an argument that is `given`, for which scores have another `scale`.
    """

    words: str = ""
    is_sharp: bool = False
    is_strided: bool = False
    is_between: bool = False
    form: MaskForm | None = None
    given: tuple[tuple[str, float], ...] = ()
    scale: float | None = None


PLAIN = Variant()
_SHARP = Variant("sharp scores", is_sharp=True)
_STRIDED = Variant("strided inputs", is_strided=True)
_BETWEEN = Variant("another call before the backward pass", is_between=True)


class Cell(NamedTuple):
    """A call of the grid: its sizes, its dtype, what else it has, and the dtype in which the code
    computes inside, None for the same.
    """

    shape: Shape
    dtype: torch.dtype
    variant: Variant = PLAIN
    inner: torch.dtype | None = None

    @property
    def computed(self) -> torch.dtype:
        """The dtype in which it is computed."""
        return self.inner or self.dtype

    @property
    def words(self) -> str:
        """The sizes, the dtype and what else it has."""
        words = (self.shape.words, dtype_name(self.dtype), self.variant.words)
        return ", ".join(filter(None, words))


# ------------------------------------------------------------------------------------------- sizes


_ANY = 4096
"""More tokens than any call has: in a shape, those of the longest one."""
_OF_FUNCTION = (
    Shape(1, _ANY, _ANY, 1, 1, 64, 64),  # the longest, also whether its positions suffice
    Shape(2, 7, 7, 2, 2, 8, 8),  # the least that has texts, heads and an odd length
    Shape(4, 48, 48, 1, 1, 16, 16),  # several texts, in tiles of 16
    Shape(1, 65, 65, 1, 1, 24, 24),  # a tile of 64 and one key, and a width that is no power of 2
    Shape(1, 5, 40, 2, 2, 16, 16),  # more keys than queries
    Shape(1, 40, 5, 2, 2, 16, 16),  # more queries than keys
    Shape(1, 64, 64, 2, 1, 16, 16),  # heads that share keys
    Shape(1, 33, 33, 2, 2, 16, 24),  # values of another width
    Shape(1, 1, 1, 2, 2, 8, 8),  # one token
    Shape(2, 64, 64, 2, 2, 16, 16),  # a whole tile
    Shape(1, 127, 127, 2, 2, 32, 32),  # a tile of 128 but one key
    Shape(1, 1, 130, 1, 1, 16, 16),  # one query of a long text, as behind a cache
    Shape(1, 70, 70, 6, 2, 24, 24),  # groups of three heads
    Shape(3, 33, 33, 11, 11, 8, 8),  # many heads, in a number that no power of 2 divides
    Shape(1, 40, 40, 2, 2, 80, 80),  # a width between powers of 2
    Shape(1, 33, 33, 1, 1, 128, 128),  # a large width
    Shape(1, 256, 256, 1, 1, 16, 16),  # whole tiles of every size
)
"""The shapes of a function, each for a reason. What shows most comes first:
Triton's interpreter takes the first ones alone, and the budget ends the list."""
_OF_LAYER = (
    Shape(1, _ANY, _ANY),  # the longest
    Shape(2, 7, 7),  # several texts of an odd length
    Shape(1, 1, 1),  # one token
    Shape(1, 64, 64),  # a whole tile
    Shape(3, 65, 65),  # a tile and one key
    Shape(4, 33, 33),  # a tile of 32 and one key, in several texts
    Shape(1, 127, 127),  # a tile of 128 but one key
    Shape(1, 256, 256),  # whole tiles of every size
)
"""Those of a class, whose heads and widths its arguments fix, in the same order."""
_WITH_CONTEXT = (
    Shape(2, 5, 40),  # more keys than queries
    Shape(1, 40, 5),  # more queries than keys
    Shape(1, 1, 130),  # one query of a long text
)
"""Those of a class whose keys may be of another text, behind the others."""


def _shapes_to_try(subject: UserAttention, longest: int) -> list[Shape]:
    """The shapes of a subject before anything excludes some. No text is longer than the longest;
    queries that an attention learned keep their number.
    """
    has_own = subject.has_own_queries
    shapes = [*(_OF_FUNCTION if subject.is_function else _OF_LAYER)]
    if subject.takes_context and not (subject.is_function or has_own):
        shapes += _WITH_CONTEXT
    return [
        shape._replace(
            q_len=subject.sizes.q_len if has_own else min(shape.q_len, longest),
            k_len=min(shape.k_len, longest),
        )
        for shape in shapes
    ]


def shapes_of(subject: UserAttention, layer: ReferenceLayer, longest: int | None) -> list[Shape]:
    """The shapes in which a subject is called, up to the stated or the usual longest: those that
    its arguments leave open, as far as their work fits into the budget. Their order decides which
    are left out for their number or their work.
    """
    sizes = subject.sizes
    is_slow = subject.built.is_interpreted
    most, usual = _INTERPRETED if subject.is_function else _INTERPRETED_LAYER
    if subject.is_resizable:
        shapes = _shapes_to_try(subject, longest or (usual if is_slow else LONGEST))
        if subject.is_function:
            shapes = [_in_its_widths(shape, subject, layer) for shape in shapes]
    else:
        shapes = [Shape(sizes.batch, sizes.q_len, sizes.k_len)]
    if is_slow:
        shapes = shapes[:most]
    if not subject.takes_context and not {"part", "token"}.isdisjoint(subject.axes):
        shapes = [shape for shape in shapes if shape.q_len == shape.k_len]
    if "part" in subject.axes:
        shapes = [shape for shape in shapes if not shape.is_unusual]
    # the first of more queries than keys see no key
    if (layer.causal and not layer.top_left) or layer.visible_cells is not None:
        shapes = [shape for shape in shapes if shape.q_len <= shape.k_len]
    return within_budget(dict.fromkeys(shapes), layer, BUDGET)


def _in_its_widths(shape: Shape, subject: UserAttention, layer: ReferenceLayer) -> Shape:
    """A shape with the heads and widths of the first call, where something fixes them."""
    given = (each for each in subject.others.values() if not isinstance(each, bool))
    is_fixed = any(isinstance(each, int | float | Tensor) for each in given)
    is_fixed = is_fixed or stated(subject.built.arguments, "d_head") is not None
    if "head" not in subject.axes:
        shape = shape._replace(n_heads=1, n_kv_heads=1)
    if is_fixed or any(each is not None for each in (layer.scale, layer.pairing, layer.bias)):
        n = subject.sizes.n_heads
        d = subject.sizes.d_in
        shape = shape._replace(n_heads=n, n_kv_heads=n, d_head=d, d_v=d)
    return shape


def within_budget(shapes: Iterable[Shape], layer: ReferenceLayer, budget: float) -> list[Shape]:
    """The shapes whose work fits into a budget: each takes of it what those before it left, and one
    that is too large is left out, not those behind it.
    """
    taken = []
    for shape in shapes:
        work = _work(shape, layer)
        if work <= budget:
            budget -= work
            taken.append(shape)
    return taken


def _work(shape: Shape, layer: ReferenceLayer) -> float:
    """The multiplications of the plain formula, forward and backward."""
    n_heads = shape.n_heads or layer.n_heads
    d_head = shape.d_head or layer.d_head or 1
    projections = (each for each in layer.weights or () if each is not None)
    n_projected = sum(each.weight.numel() for each in projections)
    products = 2 * n_heads * shape.q_len * d_head * shape.k_len
    return 3.0 * shape.batch * (n_projected * max(shape.q_len, shape.k_len) + products)


def in_tiles(shape: Shape) -> Shape:
    """A shape whose lengths are multiples of 64, as the widths of a function, for code that takes
    no others.
    """
    q_len, k_len = (-(-length // _TILE) * _TILE for length in (shape.q_len, shape.k_len))
    width = _TILE if shape.d_head else 0
    return shape._replace(q_len=q_len, k_len=k_len, d_head=width, d_v=width)


def variants_of(subject: UserAttention, forms: Iterable[MaskForm]) -> list[Variant]:
    """What one call is tried with besides, where masks of some forms act."""
    variants = [_BETWEEN, *(Variant(f"{form.parameter}=…", form=form) for form in forms)]
    if subject.is_function:
        variants.append(_STRIDED)
    if subject.is_function and subject.example is None:
        variants += [
            Variant(f"{p.name}={_SCALE}", given=((p.name, _SCALE),), scale=_SCALE)
            for p in subject.parameters("scale")
            if p.default is None and p.name not in subject.others
        ]
    return variants


def cells_of(
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    variants: Iterable[Variant],
    *,
    is_narrower: bool = False,
) -> list[Cell]:
    """The calls of some shapes in a dtype: the shortest and the longest of many keys with sharp
    scores too, and that of several texts with several heads with each variant. In a dtype narrower
    than the first, sharp scores show an overflow, for which the shortest call is enough, and of the
    variants only masks may act otherwise.
    """
    long = [shape for shape in shapes if shape.k_len >= _SHARP_FROM]
    long = sorted(long, key=attrgetter("k_len"))
    long = long[:1] if is_narrower or not long[1:] else [long[0], long[-1]]
    if is_narrower:
        variants = [variant for variant in variants if variant.form is not None]
    several = [shape for shape in shapes if shape.batch > 1 and shape.q_len == shape.k_len]
    several.sort(key=lambda shape: (min(shape.n_heads, 2), shape.k_len))
    return [
        *(Cell(shape, dtype) for shape in shapes),
        *(Cell(shape, dtype, _SHARP) for shape in long),
        *(Cell(shape, dtype, variant) for shape in several[-1:] for variant in variants),
    ]


def inputs_of(cell: Cell, subject: UserAttention, seed: int) -> Inputs:
    """Random inputs of a call in float64, rounded to its dtype; under a mask each query sees its
    own key, and the first key of each text is real.
    """
    drawer = subject.drawer(seed)
    form = cell.variant.form
    if subject.is_function:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (
            torch.randn(size, generator=generator, dtype=torch.float64) for size in cell.shape.sizes
        )
        inputs = Inputs(q, k, v)
    else:
        batch, q_len, k_len, *_ = cell.shape
        inputs = drawer.inputs(with_context=q_len != k_len, q_len=q_len, k_len=k_len, batch=batch)
    if form is not None and form.is_padding:
        inputs = inputs._replace(real=drawer.real(inputs))
    elif form is not None:
        own = torch.eye(cell.shape.q_len, dtype=torch.bool)
        inputs = inputs._replace(allowed=form.repeated(drawer.allowed(inputs) | own))
    if cell.variant.is_sharp:
        keys = None if inputs.keys is None else inputs.keys * SHARP
        inputs = inputs._replace(queries=inputs.queries * SHARP, keys=keys)
    return inputs.map(lambda rows: rows.to(cell.dtype).double())


# --------------------------------------------------------------------------- which calls differ


class Separation(NamedTuple):
    """What calls that differ have in common and no other call has, in words; with the longest
    length that does not differ, where length alone tells them apart.
    """

    words: str
    beyond: int | None = None


def separation_of(failing: Sequence[Cell], passing: Sequence[Cell]) -> Separation:
    """What tells the calls that differ from those that do not; the first of them where nothing
    does. Calls with sharp scores, which hide small differences, or with anything else besides count
    only where all others pass.
    """
    plain = [cell for cell in failing if cell.variant == PLAIN]
    if not plain:
        besides = dict.fromkeys(cell.variant.words for cell in failing)
        return Separation(f"only with {' and '.join(besides)}")
    differing = [cell.shape for cell in plain]
    others = [cell.shape for cell in passing if cell.variant == PLAIN]
    if not others:
        return Separation("at every shape")
    for name, size in _SIZES.items():
        most = max(map(size, others))
        if min(map(size, differing)) > most:
            beyond = most if name == "keys" else None
            return Separation(f"only with more than {most} {name}", beyond)
    for words, holds in _CONDITIONS.items():
        if all(map(holds, differing)) and not any(map(holds, others)):
            return Separation(words)
    return Separation(f"first at {plain[0].shape.words}")


def _is_broken(n: int) -> Callable[[Shape], bool]:
    """Whether keys end in an incomplete block of n, behind a complete one."""
    return lambda shape: shape.k_len > n and shape.k_len % n > 0


_CONDITIONS: Mapping[str, Callable[[Shape], bool]] = {
    "only where Tq ≠ Tk": lambda shape: shape.q_len != shape.k_len,
    "only where Tq < Tk": lambda shape: shape.q_len < shape.k_len,
    "only where Tq > Tk": lambda shape: shape.q_len > shape.k_len,
    "only where query heads share kv heads": lambda shape: shape.n_kv_heads < shape.n_heads,
    "only where values have another width than keys": lambda shape: shape.d_v != shape.d_head,
    "only where the width is no power of two": lambda shape: shape.d_head.bit_count() > 1,
    **{f"only where the last block of {n} keys is incomplete": _is_broken(n) for n in _BLOCKS},
}
_SIZES: Mapping[str, Callable[[Shape], int]] = {
    "keys": attrgetter("k_len"),
    "texts in a batch": attrgetter("batch"),
    "heads": attrgetter("n_heads"),
    "columns in a head": attrgetter("d_head"),
}
