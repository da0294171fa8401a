"""Reads the parameters of a user's attention as q, k, v and output projections, in every way their
names and shapes allow.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.stages import Projection, Projections

from .target import Choice

Orientation = Literal["out-in", "in-out", "free"]
"""How a matrix is applied: `x Wᵀ` as in nn.Linear, `x W` as in Conv1D, or unknown."""


class Widths(NamedTuple):
    """The known sizes of the attention."""

    d_in: int
    d_context: int
    n_heads: int
    n_kv_heads: int | None


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix and its bias. `letters` are the roles that its name states: q, k, v, o, several of
    q, k and v in order, or none. `number` is its index in a list of similar matrices. `biases` are
    all that belong to no matrix, by letters and number.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    orientation: Orientation
    letters: str
    number: int | None = None
    biases: Mapping[tuple[str, int | None], Tensor] = field(default_factory=dict)

    def bias_of(self, letter: str, width: int) -> Tensor | None:
        """The bias of one role, of this width: its own, a separate one, or its third of one for q,
        k and v. Heads that share a projection share its bias.
        """
        bias = self.biases.get((letter, self.number)) if self.bias is None else self.bias
        fused = self.biases.get(("qkv", self.number))
        if bias is None and fused is not None and letter != "o":
            bias = fused.flatten().chunk(3)["qkv".index(letter)]
        return None if bias is None else bias.flatten().repeat(width // bias.numel())


class MatrixRows(NamedTuple):
    """The rows of a matrix `[width, d_in]`, made from a part, that project one of q, k and v, in
    the order of heads.
    """

    part: WeightMatrix
    matrix: Tensor
    letter: str
    rows: Tensor

    @property
    def projection(self) -> Projection:
        """A copy of them, with their biases, which are cut as the matrix is."""
        bias = self.part.bias
        if bias is not None and bias.numel() == len(self.matrix):
            bias = bias.flatten()[self.rows]
        else:
            bias = self.part.bias_of(self.letter, len(self.rows))
        return Projection(self.matrix[self.rows], bias)


Roles = tuple[dict[str, MatrixRows], tuple[Choice, ...]]
"""What parameters may hold by letter (q, k, v), and the design choices of this reading."""


@dataclass(frozen=True)
class ProjectionReading:
    """One reading of the parameters: what q, k, v and the output read, and the design choices that
    it implies. `order` is the order of q, k and v in a fused matrix if its name states one, else
    None. `parts` are the parameters used, `unused` the others.
    """

    qkv: Sequence[MatrixRows]
    out: Projection | None
    n_heads: int
    n_kv_heads: int
    choices: tuple[Choice, ...] = ()
    order: str | None = None
    parts: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @cached_property
    def weights(self) -> Projections:
        """The projections, which are copied when they are first read: there may be hundreds of
        readings of a large matrix.
        """
        q, k, v = (role.projection for role in self.qkv)
        return Projections(q, k, v, self.out)


def projection_readings(
    parts: Sequence[WeightMatrix], widths: Widths
) -> Iterator[ProjectionReading]:
    """Every reading, the most natural first. Empty if queries, keys and values cannot be
    distinguished.
    """
    parts, makers = _through_latents(parts, widths)
    for groups in _groups(parts, widths.d_in):
        named = [part.name for _, group in groups for part in group]
        order = next((part.letters for _, (part, *_) in groups if len(part.letters) == 3), None)
        outputs = list(_outputs([part for part in parts if part.name not in named]))
        of_groups = [list(_of_group(letters, group, widths)) for letters, group in groups]
        for combination in product(*of_groups):
            roles = {
                letter: rows for held, _ in reversed(combination) for letter, rows in held.items()
            }
            qkv = tuple(roles[letter] for letter in "qkv")
            n_kv_heads = _n_kv_heads([len(role.rows) for role in qkv], widths.n_heads)
            if n_kv_heads == 0:
                continue
            choices = dict.fromkeys(choice for _, chosen in combination for choice in chosen)
            for out, out_names in outputs:
                used = tuple(dict.fromkeys((*named, *out_names, *makers)))
                unused = tuple(part.name for part in parts if part.name not in used)
                yield ProjectionReading(
                    qkv, out, widths.n_heads, n_kv_heads, tuple(choices), order, used, unused
                )


def _n_kv_heads(rows: Sequence[int], n_heads: int) -> int:
    """The number of kv heads of queries, keys and values with these numbers of rows; 0 if they do
    not fit to each other.
    """
    of_q, of_k, of_v = rows
    d_head = of_q // n_heads
    n_kv_heads = of_k // max(1, d_head)
    if n_kv_heads == 0 or (of_q, of_k) != (n_heads * d_head, n_kv_heads * d_head):
        return 0
    return n_kv_heads if n_heads % n_kv_heads == of_v % n_kv_heads == 0 else 0


def _through_latents(
    parts: Sequence[WeightMatrix], widths: Widths
) -> tuple[list[WeightMatrix], list[str]]:
    """The parts, with each that reads a latent as its product with the matrix that makes the
    latent, and the names of those.
    """
    d_ins = (widths.d_in, widths.d_context)
    linear = [part for part in parts if part.orientation == "out-in"]
    first = [part for part in linear if part.weight.shape[1] in d_ins]
    makers = dict[str, WeightMatrix]()
    for part, maker in product(linear, first):
        width = part.weight.shape[1]
        makes_it = width not in d_ins and width == len(maker.weight)
        if makes_it and {*part.letters} <= {*(maker.letters or "qkv")}:
            makers[part.name] = maker
    names = [maker.name for maker in makers.values()]
    rest = [part for part in parts if part.name not in names]
    return [_with_maker(part, makers.get(part.name)) for part in rest], names


def _with_maker(part: WeightMatrix, maker: WeightMatrix | None) -> WeightMatrix:
    """A part as its product with the matrix that makes what it reads."""
    if maker is None:
        return part
    biases = [part.bias, None if maker.bias is None else part.weight @ maker.bias]
    fitting = [bias for bias in biases if bias is not None and len(bias) == len(part.weight)]
    bias = torch.stack(fitting).sum(dim=0) if fitting else None
    return replace(part, weight=part.weight @ maker.weight, bias=bias)


def _by_letters(parts: Sequence[WeightMatrix]) -> dict[str, list[WeightMatrix]]:
    """The parts by their letters; those of a list that has one for each letter by this one too."""
    by_letters: dict[str, list[WeightMatrix]] = {}
    for part in parts:
        by_letters.setdefault(part.letters, []).append(part)
    for letters, group in [*by_letters.items()]:
        if len(letters) == len(group) > 1:
            for letter, part in zip(letters, group, strict=True):
                by_letters.setdefault(letter, []).append(part)
    return by_letters


def _groups(
    parts: Sequence[WeightMatrix], d_in: int
) -> Iterator[list[tuple[str, list[WeightMatrix]]]]:
    """Groups of parts that form q, k and v together, with the letters of each, in every order where
    no name states them. A group shares its letters, such as the matrices of all heads. Where three
    or more have no name, one holds q, k and v together only if it has more numbers than a square.
    """
    by_letters = _by_letters(parts)
    fused = [[letters] for letters in by_letters if set(letters) == set("qkv")]
    halves = [["qkv".strip(pair) or "k", pair] for pair in by_letters if len(pair) == 2]
    for combination in (["q", "k", "v"], *fused, *halves):
        if all(letters in by_letters for letters in combination):
            yield [(letters, by_letters[letters]) for letters in combination]
    unnamed = by_letters.get("", [])
    if len(unnamed) in (3, 4):
        for trio in permutations(unnamed, 3):
            yield [(letter, [part]) for letter, part in zip("qkv", trio, strict=True)]
    for part in [part for part in unnamed if len(unnamed) < 3 or part.weight.numel() > d_in**2]:
        yield from ([("".join(order), [part])] for order in permutations("qkv"))


# ---------------------------------------------------------------------------- queries, keys, values


def _of_group(letters: str, group: Sequence[WeightMatrix], widths: Widths) -> Iterator[Roles]:
    """What a part may hold, or the parts of all heads."""
    if len({part.weight.shape for part in group}) > 1:
        return
    part = group[0]
    if len(group) > 1:  # the matrices of all heads as one with an axis for heads
        ordered = sorted(group, key=lambda part: part.number or 0)
        bias = part.bias
        if bias is not None:
            bias = torch.cat([each.bias for each in ordered if each.bias is not None])
        weight = torch.stack([each.weight for each in ordered])
        part = replace(part, weight=weight, bias=bias, number=0, orientation="free")
    words = f"{part.name} holds {', '.join(letters)}, which its name does not say"
    unnamed = () if part.letters else (Choice("unnamed", words),)
    for matrix, choices in _matrices(part, letters, widths):
        for fused, pieces in _pieces(torch.arange(len(matrix)), letters, widths):
            named = zip(letters, pieces, strict=True)
            roles = {letter: MatrixRows(part, matrix, letter, rows) for letter, rows in named}
            yield roles, (*choices, *fused, *unnamed)


def _matrices(
    part: WeightMatrix, letters: str, widths: Widths
) -> Iterator[tuple[Tensor, tuple[Choice, ...]]]:
    """The matrix of a part as `[width, d_in]`, ordered by head, in each way in which it may be
    read, with the choices that this is. Weights with three axes hold a matrix for each letter, or
    one for each head, whose axes are told by their lengths. One with two axes is as wide as the
    input, or projects a slice of it for each head; it is turned where nothing says how it is
    applied.
    """
    d_in = widths.d_in if "q" in letters else widths.d_context
    n_heads = widths.n_heads if "q" in letters else widths.n_kv_heads or widths.n_heads
    weight = part.weight
    if weight.ndim == 3 and len(weight) == len(letters) > 1:  # a matrix for each
        yield from (
            (each.flatten(0, 1), ()) for each in (weight, weight.mT) if each.shape[2] == d_in
        )
    if weight.ndim == 3:
        kernel = Choice("kernel", "weights have an axis for heads")
        if part.number is not None:
            kernel = Choice("per-head", "each head has projections of its own")
        for axis in [axis for axis in range(3) if weight.shape[axis] == d_in]:
            input_last = weight.movedim(axis, 2)
            for first in (input_last, input_last.transpose(0, 1)):
                if first.shape[0] == n_heads:
                    yield first.flatten(0, 1), (kernel,)
        return
    for matrix in _oriented(part):
        # the second of `_oriented`
        is_swapped = part.orientation == "free" and matrix is not weight
        if n_heads > 1 and tuple(matrix.shape) == (d_in / n_heads, d_in / n_heads):
            words = f"{part.name} projects a slice of the row for each head, the same for all"
            yield torch.block_diag(*[matrix] * n_heads), (Choice("shared-projections", words),)
        if matrix.shape[1] == d_in:
            orientation = Choice("orientation", f"{part.name} is applied as x W")
            yield matrix, (orientation,) if is_swapped else ()


def _oriented(part: WeightMatrix) -> Iterator[Tensor]:
    """A matrix as `[out, in]`, in both ways if it is not known how it is applied."""
    if part.orientation != "in-out":
        yield part.weight
    if part.orientation != "out-in":
        yield part.weight.mT


# ----------------------------------------------------------------------------------- fused matrices


_LAYOUTS = ("3hd", "h3d", "hd3", "3dh", "d3h", "dh3")
"""The row orders of a fused matrix: `3hd` has all queries first, `h3d` the queries, keys and values
of each head."""


def _pieces(
    rows: Tensor, letters: str, widths: Widths
) -> Iterator[tuple[tuple[Choice, ...], Sequence[Tensor]]]:
    """The rows of a matrix cut into a piece for each letter, ordered by head, in every layout, with
    the choice that it is. If the number of kv heads is unknown, those that the rows of a fused
    matrix imply come first, for queries as wide as the input; then as many as query heads.
    """
    if len(letters) == 1:
        yield (), [rows]
        return
    n_heads = widths.n_heads
    counts = [widths.n_kv_heads or n_heads]
    if widths.n_kv_heads is None and len(letters) == 3:
        d_in = widths.d_in
        n_more = len(rows) - d_in
        implied = [n for n in range(1, n_heads) if n_more * n_heads == 2 * n * d_in]
        counts = [*(n for n in implied if n_heads % n == 0), n_heads]
    for n_kv_heads in counts:
        heads = [n_heads if letter == "q" else n_kv_heads for letter in letters]
        for layout in _LAYOUTS:
            yield from _pieces_of_layout(rows, heads, layout)


def _pieces_of_layout(
    rows: Tensor, heads: Sequence[int], layout: str
) -> Iterator[tuple[tuple[Choice, ...], Sequence[Tensor]]]:
    """The rows of a matrix cut into a piece for each number of heads; nothing if they do not fit
    the layout.
    """
    shares = [count // min(heads) for count in heads]
    n_groups = 1 if layout == "3hd" else min(heads)
    unit, remainder = divmod(len(rows), n_groups * sum(shares))
    if remainder:
        return
    if layout in ("3hd", "h3d"):  # each of the groups holds its queries, its keys and its values
        sizes = [share * unit for share in shares]
        groups = rows.unflatten(0, (n_groups, -1)).split(sizes, dim=1)
        words = "the fused projection holds queries, keys and values of each head in turn"
        in_turn = Choice("fused-per-head", words)
        yield (in_turn,) if layout == "h3d" else (), [group.flatten(0, 1) for group in groups]
    elif len(set(heads)) == 1:
        lengths = {"3": len(heads), "h": n_groups, "d": unit}
        numbered = rows.unflatten(0, [lengths[axis] for axis in layout])
        pieces = numbered.permute(*(layout.index(axis) for axis in "3hd"))
        words = f"the fused projection's rows are numbered ({' '.join(layout)})"
        yield (Choice("fused-layout", words),), [piece.flatten(0, 1) for piece in pieces]


# --------------------------------------------------------------------------------------- the output


def _outputs(rest: Sequence[WeightMatrix]) -> Iterator[tuple[Projection | None, tuple[str, ...]]]:
    """The candidates for the output projection, with the names of their parts; None if there is
    none.
    """
    candidates = [part for part in rest if part.letters == "o"] or [
        part for part in rest if not part.letters
    ]
    if not candidates:
        yield None, ()
    for part in candidates:
        planes: list[Tensor] = []
        if part.weight.ndim == 2:
            planes += _oriented(part)
        elif part.weight.ndim == 3:
            for axis in range(3):
                output_first = part.weight.movedim(axis, 0)
                planes += [output_first.flatten(1), output_first.transpose(1, 2).flatten(1)]
        for weight in planes:
            yield Projection(weight, part.bias_of("o", len(weight))), (part.name,)


# ----------------------------------------------------------------------------------- the parameters


def parts_of(module: nn.Module | None, tensors: Mapping[str, Tensor]) -> tuple[WeightMatrix, ...]:
    """Every matrix of a module, or of tensors passed by name, in order of creation."""
    parents = {} if module is None else dict(module.named_modules(remove_duplicate=False))
    named: dict[str, Tensor] = dict(tensors)
    for path, child in parents.items():
        if not is_norm(child) and not isinstance(child, nn.Embedding):
            own = child.named_parameters(recurse=False, remove_duplicate=False)
            named |= {f"{path}.{name}" if path else name: tensor for name, tensor in own}
    biases = {name: named[name] for name in named if _BIAS.fullmatch(name.rpartition(".")[2])}
    beside = {name: re.sub(r"weight$", "bias", name) for name in named if name not in biases}
    separate = {
        read_name(name): bias for name, bias in biases.items() if name not in beside.values()
    }
    parts = []
    for name, bias_name in beside.items():
        weight = named[name]
        parent = parents.get(name.rpartition(".")[0])
        if isinstance(parent, nn.Conv1d | nn.Conv2d):
            weight = weight.flatten(1)
        if weight.ndim < 2:
            continue
        letters, number = read_name(name)
        bias = biases.get(bias_name, separate.get((letters, number)))
        plain = name.removesuffix(".weight")
        orientation = _orientation(parent)
        parts.append(WeightMatrix(plain, weight, bias, orientation, letters, number, separate))
    return tuple(parts)


def _orientation(module: nn.Module | None) -> Orientation:
    """How a module applies its matrix."""
    if isinstance(module, nn.Linear | nn.MultiheadAttention):
        return "out-in"
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return "out-in" if set(module.kernel_size) == {1} else "free"
    return "in-out" if type(module).__name__ == "Conv1D" else "free"


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises its input, by its class name."""
    return "norm" in type(module).__name__.lower()


_BIAS = re.compile(r"(?i).*bias.*|b_?([qkvo]|out|qkv)")


# ------------------------------------------------------------------------------ names of parameters


_NEAR = "to|w|c|fc|linear|lin|projection|proj|layer|net|map|embed"
_ROLE = re.compile(
    rf"(?:{_NEAR})*((?:q(?:uer(?:ys?|ies)|ry)?|k(?:eys?)?|v(?:al(?:ue)?s?)?)+)s?(?:{_NEAR})*"
)
_OUTPUT = (
    "o out output outputs wo proj dense fc unify unifyheads final combine concat w0 cproj outproj "
    "toout oproj project projection mix merge last"
)


def read_name(name: str) -> tuple[str, int | None]:
    """The role of a parameter in letters of q, k, v, o, and its index in a list of similar
    parameters.
    """
    steps = [step for step in reversed(name.split(".")) if step not in ("weight", "bias", "kernel")]
    index = next((int(step) for step in steps if step.isdigit()), None)
    letters = (_letters_of(step) for step in steps if not step.isdigit())
    return next(filter(None, letters), ""), index


def _letters_of(step: str) -> str:
    """The letters of one part of a name: three for `query_key_value` and `qkv`, one for
    `out_proj`.
    """
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", step).lower()
    plain = re.sub(r"_?(weight|bias|kernel)s?$", "", plain)
    whole = plain.replace("_", "")
    words = re.findall("[a-z]+", plain)
    if whole in ("inproj", "inprojection"):
        return "qkv"
    if _ROLE.fullmatch(whole):
        words = [whole]
    roles = dict.fromkeys(
        letter
        for match in map(_ROLE.fullmatch, words)
        if match is not None
        for letter in re.findall("[qkv]", match[1])
    )
    if roles:
        return "".join(roles)
    return "" if {*_OUTPUT.split()}.isdisjoint((whole, *words)) else "o"
