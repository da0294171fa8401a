"""Reads the parameters of a user's attention as q, k, v and output projections, in every way their names and shapes allow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.mistakes.stages import Projection, Projections
from mhacli.usercode.target import Choice

_LAYOUTS = ("3hd", "h3d", "hd3", "3dh", "d3h", "dh3")
"""The row orders of a fused matrix: `3hd` has all queries first, `h3d` the queries, keys and values of each head."""


class Widths(NamedTuple):
    """The known sizes of the attention."""

    d_in: int
    d_context: int
    n_heads: int
    n_kv_heads: int | None


@dataclass(frozen=True)
class ProjectionReading:
    """One reading of the parameters: projections with rows ordered by head, and the design choices that it implies. `order` is
    the order of q, k and v in a fused matrix if its name states one, else None. `parts` are the parameters used, `unused` the
    others."""

    weights: Projections
    n_heads: int
    n_kv_heads: int
    choices: tuple[Choice, ...] = ()
    order: str | None = None
    parts: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


class _Role(NamedTuple):
    """The projection of one role (q, k, v or o), and the design choices that this reading implies."""

    letter: str
    projection: Projection
    names: tuple[str, ...]
    choices: tuple[Choice, ...] = ()
    order: str | None = None


def projection_readings(parts: Sequence[WeightMatrix], widths: Widths) -> Iterator[ProjectionReading]:
    """Every reading, the most natural first. Empty if queries, keys and values cannot be told apart."""
    for sources, outputs in _assignments(tuple(parts), widths):
        for roles in product(*sources):
            flat = {role.letter: role for group in roles for role in group}
            yield from _with_outputs(flat, outputs, parts, widths)


def _assignments(
    parts: tuple[WeightMatrix, ...], widths: Widths
) -> Iterator[tuple[list[list[tuple[_Role, ...]]], list[_Role | None]]]:
    """Assigns the parts to queries, keys and values, by name if they have one, and the rest to the output."""
    for chosen in _choices_of_inputs(parts):
        used = {part.name for group in chosen for part in group}
        remaining = [part for part in parts if part.name not in used]
        sources = [list(_roles(group, widths)) for group in chosen]
        if all(sources):
            yield sources, list(_outputs(remaining))


def _choices_of_inputs(parts: tuple[WeightMatrix, ...]) -> Iterator[tuple[tuple[WeightMatrix, ...], ...]]:
    """Groups of parts that form q, k and v together. A group shares its letters, such as the matrices of all heads."""
    by_letters: dict[str, list[WeightMatrix]] = {}
    for part in parts:
        by_letters.setdefault(part.letters, []).append(part)
    for combination in (("q", "k", "v"), *((order,) for order in by_letters if set(order) == set("qkv"))):
        if all(letters in by_letters for letters in combination):
            yield tuple(tuple(by_letters[letters]) for letters in combination)
    for pair in (order for order in by_letters if len(order) == 2):
        single = next(letter for letter in "qkv" if letter not in pair)
        if single in by_letters:
            yield tuple(by_letters[single]), tuple(by_letters[pair])
    unnamed = [part for part in parts if not part.letters]
    for part in unnamed:
        yield ((part._replace(letters="qkv?"),),)
    if len(unnamed) in (3, 4):
        for order in permutations(unnamed, 3):
            yield tuple((part._replace(letters=letter + "?"),) for letter, part in zip("qkv", order, strict=True))


def _roles(group: tuple[WeightMatrix, ...], widths: Widths) -> Iterator[tuple[_Role, ...]]:
    """The projections that a group of parts may hold."""
    first = group[0]
    letters, is_named = first.letters.rstrip("?"), not first.letters.endswith("?")
    if len(letters) == 1:
        for projection, choices in _singles(group, letters, widths):
            notes = choices if is_named else (*choices, Choice("unnamed", f"{first.name} makes the {_NAMES[letters]}"))
            yield (_Role(letters, projection, tuple(part.name for part in group), notes),)
    elif len(group) == 1:
        yield from _fused(first, letters, is_named, widths)
    elif all(part.number is not None and part.weight.ndim == 2 for part in group):
        yield from _fused_per_head(group, letters, widths)


_NAMES = {"q": "queries", "k": "keys", "v": "values"}


def _singles(
    group: tuple[WeightMatrix, ...], letter: str, widths: Widths
) -> Iterator[tuple[Projection, tuple[Choice, ...]]]:
    """One projection, as one matrix or as a matrix for each head."""
    if len(group) > 1:
        group = tuple(sorted(group, key=lambda part: part.number or 0))
        candidates = [next(_matrices(part, widths, letter), None) for part in group]
        if all(candidate is not None for candidate in candidates):
            weights = [candidate[0] for candidate in candidates if candidate is not None]
            biases = [part.bias for part in group if part.bias is not None]
            bias = torch.cat(biases) if len(biases) == len(group) else None
            yield Projection(torch.cat(weights), bias), (Choice("per-head", "each head has projections of its own"),)
        return
    for weight, choices in _matrices(group[0], widths, letter):
        bias = None if group[0].bias is None else group[0].bias.flatten()
        if bias is not None and bias.numel() < weight.shape[0]:
            bias = bias.repeat(weight.shape[0] // bias.numel())
        yield Projection(weight, bias), choices


def _matrices(part: WeightMatrix, widths: Widths, letter: str) -> Iterator[tuple[Tensor, tuple[Choice, ...]]]:
    """The matrix as `[width, d_in]`, ordered by head."""
    d_in = widths.d_in if letter == "q" else widths.d_context
    n_heads = widths.n_heads if letter == "q" else widths.n_kv_heads or widths.n_heads
    weight, is_free = part.weight, part.orientation == "free"
    if weight.ndim == 3:
        yield from _kernels(weight, d_in, n_heads)
    if weight.ndim != 2:
        return
    if n_heads > 1 and tuple(weight.shape) == (d_in / n_heads, d_in / n_heads):
        shared = Choice(
            "shared-projections", f"{part.name} projects a slice of the row for each head, the same for all"
        )
        for block in (weight, weight.mT)[: 2 if is_free else 1]:
            yield torch.block_diag(*[block] * n_heads), (shared,)
    if part.orientation != "in-out" and weight.shape[1] == d_in:
        yield weight, ()
    if part.orientation != "out-in" and weight.shape[0] == d_in:
        yield weight.mT, (Choice("orientation", f"{part.name} is applied as x W"),) if is_free else ()


def _kernels(weight: Tensor, d_in: int, n_heads: int) -> Iterator[tuple[Tensor, tuple[Choice, ...]]]:
    """The readings of a kernel with three axes: input, heads and head width, in any order."""
    for axis in range(3):
        if weight.shape[axis] == d_in:
            input_last = weight.movedim(axis, 2)
            for heads_first in (input_last, input_last.transpose(0, 1)):
                if heads_first.shape[0] == n_heads:
                    yield heads_first.flatten(0, 1), (Choice("kernel", "weights have an axis for heads"),)


def _fused(part: WeightMatrix, letters: str, is_named: bool, widths: Widths) -> Iterator[tuple[_Role, ...]]:
    """The projections in one fused matrix, in every possible order and layout."""
    if part.weight.ndim == 3 and part.weight.shape[0] == len(letters):
        notes = (Choice("fused", f"{part.name} holds a matrix for each of {', '.join(letters)}"),)
        biases = [None] * len(letters) if part.bias is None else list(part.bias.reshape(len(letters), -1))
        for pieces in (list(part.weight), [weight.mT for weight in part.weight]):
            yield from _ordered(part, letters, is_named, pieces, biases, notes)
        return
    for matrix, applied in _matrices(part, widths, letters[0]):
        for shared, layout in product(_widths_of_fused(matrix, letters, widths), _LAYOUTS):
            pieces_of = _cut(matrix, layout, letters, shared)
            biases_of = None if part.bias is None else _cut(part.bias, layout, letters, shared)
            if pieces_of is not None:
                chosen = (*applied, *(() if layout == "3hd" else (_layout_choice(layout),)))
                yield from _ordered(part, letters, is_named, pieces_of, biases_of or [None] * len(letters), chosen)


def _widths_of_fused(matrix: Tensor, letters: str, widths: Widths) -> list[Widths]:
    """The candidate numbers of kv heads. If it is unknown, the number that the rows of a fused matrix imply comes first, for
    queries as wide as the input; then as many as query heads."""
    if len(letters) < 3 or widths.n_kv_heads is not None or widths.d_in % widths.n_heads:
        return [widths]
    n_kv, remainder = divmod(matrix.shape[0] - widths.d_in, 2 * (widths.d_in // widths.n_heads))
    is_shared = not remainder and 0 < n_kv < widths.n_heads and widths.n_heads % n_kv == 0
    return [widths._replace(n_kv_heads=n_kv), widths] if is_shared else [widths]


def _fused_per_head(group: tuple[WeightMatrix, ...], letters: str, widths: Widths) -> Iterator[tuple[_Role, ...]]:
    """The projections if each head has its own fused matrix."""
    ordered = sorted(group, key=lambda part: part.number or 0)
    matrices = [next(_matrices(part, widths, letters[0]), None) for part in ordered]
    if any(matrix is None or matrix[0].shape[0] % len(letters) for matrix in matrices):
        return
    cut = [matrix[0].chunk(len(letters)) for matrix in matrices if matrix is not None]
    biases = [None if part.bias is None else part.bias.chunk(len(letters)) for part in ordered]
    notes, names = (Choice("per-head", "each head has projections of its own"),), tuple(part.name for part in ordered)
    roles = []
    for index, letter in enumerate(letters):
        letter_biases = [bias[index] for bias in biases if bias is not None]
        bias = torch.cat(letter_biases) if len(letter_biases) == len(ordered) else None
        roles.append(
            _Role(letter, Projection(torch.cat([pieces[index] for pieces in cut]), bias), names, notes, letters)
        )
    yield tuple(roles)


def _layout_choice(layout: str) -> Choice:
    if layout == "h3d":
        return Choice("fused-per-head", "the fused projection holds queries, keys and values of each head in turn")
    return Choice("fused-layout", f"the fused projection's rows are numbered ({' '.join(layout)})")


def _ordered(
    part: WeightMatrix,
    letters: str,
    is_named: bool,
    pieces: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    notes: tuple[Choice, ...],
) -> Iterator[tuple[_Role, ...]]:
    """The pieces in the order that the name states, or in every order if it states none."""
    orders = [tuple(letters)] if is_named else list(permutations(letters))
    for order in orders:
        choice = () if is_named else (Choice("fused-order", f"{part.name} holds {', '.join(order)} in this order"),)
        yield tuple(
            _Role(letter, Projection(piece, bias), (part.name,), (*notes, *choice), letters if is_named else None)
            for letter, piece, bias in zip(order, pieces, biases, strict=True)
        )


def _cut(rows: Tensor, layout: str, letters: str, widths: Widths) -> list[Tensor] | None:
    """Splits the rows of a fused matrix or bias, each piece ordered by head; None if they do not divide evenly."""
    n_heads, n_kv = widths.n_heads, widths.n_kv_heads or widths.n_heads
    n_parts, total = len(letters), rows.shape[0]
    counts = [n_heads if letter == "q" else n_kv for letter in letters]
    if layout == "3hd" and "q" not in letters:
        return None if total % n_parts else list(rows.chunk(n_parts))
    if layout == "3hd":
        if total % sum(counts):
            return None
        return list(rows.split([count * (total // sum(counts)) for count in counts]))
    if len(set(counts)) > 1:
        return _per_group(rows, letters, n_heads, n_kv) if layout == "h3d" else None
    if total % (n_parts * counts[0]):
        return None
    sizes = {"3": n_parts, "h": counts[0], "d": total // (n_parts * counts[0])}
    numbered = rows.unflatten(0, [sizes[axis] for axis in layout])
    moved = numbered.movedim([layout.index(axis) for axis in "3hd"], [0, 1, 2])
    return [piece.flatten(0, 1) for piece in moved]


def _per_group(rows: Tensor, letters: str, n_heads: int, n_kv: int) -> list[Tensor] | None:
    """Splits rows that hold, for each group, its queries, its key and its value."""
    counts = [n_heads // n_kv if letter == "q" else 1 for letter in letters]
    if rows.shape[0] % (n_kv * sum(counts)):
        return None
    grouped = rows.unflatten(0, (n_kv, sum(counts), -1)).split(counts, dim=1)
    return [piece.flatten(0, 2) for piece in grouped]


def _outputs(remaining: Sequence[WeightMatrix]) -> Iterator[_Role | None]:
    """The candidates for the output projection; None if there is none."""
    named = [part for part in remaining if part.letters == "o"]
    candidates = named or [part for part in remaining if not part.letters]
    if not candidates:
        yield None
    if len(named) > 1 and all(part.number is not None for part in named):
        ordered = sorted(named, key=lambda part: part.number or 0)
        biases = [part.bias for part in ordered if part.bias is not None]
        bias = torch.stack(biases).sum(dim=0) if biases else None
        weights = [part.weight.mT if part.orientation == "in-out" else part.weight for part in ordered]
        if len({weight.shape[0] for weight in weights}) == 1:
            yield _Role("o", Projection(torch.cat(weights, dim=1), bias), tuple(part.name for part in ordered))
    for part in candidates:
        bias = None if part.bias is None else part.bias.flatten()
        for weight in _output_matrices(part):
            yield _Role("o", Projection(weight, bias), (part.name,))


def _output_matrices(part: WeightMatrix) -> Iterator[Tensor]:
    if part.weight.ndim == 3:
        for axis in range(3):
            output_first = part.weight.movedim(axis, 0)
            yield output_first.flatten(1)
            yield output_first.transpose(1, 2).flatten(1)
    elif part.weight.ndim == 2:
        if part.orientation != "in-out":
            yield part.weight
        if part.orientation != "out-in":
            yield part.weight.mT


def _with_outputs(
    roles: dict[str, _Role], outputs: Sequence[_Role | None], parts: Sequence[WeightMatrix], widths: Widths
) -> Iterator[ProjectionReading]:
    """The readings with these inputs and every output projection that fits."""
    q, k, v = (roles[letter].projection for letter in "qkv")
    for output in outputs:
        out = None if output is None else output.projection
        for n_kv in _kv_heads(q, k, widths):
            if q.weight.shape[0] % widths.n_heads or v.weight.shape[0] % n_kv:
                continue
            used = (*roles["q"].names, *roles["k"].names, *roles["v"].names, *(() if output is None else output.names))
            choices = [choice for role in (*roles.values(), output) if role is not None for choice in role.choices]
            yield ProjectionReading(
                Projections(q, k, v, out),
                widths.n_heads,
                n_kv,
                tuple(dict.fromkeys(choices)),
                roles["q"].order,
                tuple(dict.fromkeys(used)),
                tuple(part.name for part in parts if part.name not in used),
            )


def _kv_heads(q: Projection, k: Projection, widths: Widths) -> Iterator[int]:
    """The numbers of kv heads that the widths allow."""
    if q.weight.shape[0] % widths.n_heads or q.weight.shape[0] < widths.n_heads:
        return
    d_head = q.weight.shape[0] // widths.n_heads
    if (
        k.weight.shape[0] >= d_head
        and k.weight.shape[0] % d_head == 0
        and widths.n_heads % max(1, k.weight.shape[0] // d_head) == 0
    ):
        yield k.weight.shape[0] // d_head


# -------------------------------------------------------------------------------------------------- names of parameters


Orientation = Literal["out-in", "in-out", "free"]
"""How a matrix is applied: `x Wᵀ` as in nn.Linear, `x W` as in Conv1D, or unknown."""

_WORDS = {
    "q": "toqueries wquery q query queries querys wq qs qry fcq qproj qlin queryproj",
    "k": "tokeys wkey k key keys wk ks fck kproj klin keyproj",
    "v": "tovalues wvalue v value values val vals wv vs fcv vproj vlin valueproj",
    "o": """o out output outputs wo proj dense fc unify unifyheads final combine concat w0 cproj outproj toout oproj project
        projection mix merge last""",
}
_LETTER = {word: letter for letter, words in _WORDS.items() for word in words.split()}
_AFFIXED = re.compile(r"^(?:w|fc|linear|lin|proj)?(q|k|v)s?(?:linear|lin|proj|projection|layer|fc|net|map|embed)?$")
_FUSED = re.compile(r"^(?:to_?|w_?|c_?|fc_?)?((?!(.).?\2)[qkv]{2,3})(?:_?proj|s)?$")


class WeightMatrix(NamedTuple):
    """A matrix and its bias. `letters` are the roles that its name states: q, k, v, o, several of q, k and v in order, or none.
    `number` is its index in a list of similar matrices."""

    name: str
    weight: Tensor
    bias: Tensor | None
    orientation: Orientation
    letters: str
    number: int | None = None


def parts_of(module: nn.Module | None, tensors: Mapping[str, Tensor]) -> tuple[WeightMatrix, ...]:
    """Every matrix of a module, or of tensors passed by name, in order of creation."""
    matrices: list[WeightMatrix] = []
    raw: dict[str, Tensor] = dict(tensors)
    for path, child in () if module is None else module.named_modules(remove_duplicate=False):
        parameters = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        if is_norm(child) or isinstance(child, nn.Embedding):
            continue
        kind = _orientation(child)
        if kind is not None and parameters.get("weight") is not None:
            weight = parameters["weight"] if parameters["weight"].ndim == 2 else parameters["weight"].flatten(1)
            matrices.append(_part(path, weight, parameters.get("bias"), kind))
        else:
            raw.update({f"{path}.{name}" if path else name: tensor for name, tensor in parameters.items()})
    return (*matrices, *_raw_parts(raw))


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises its input, by its class name. Weight parametrizations do not count."""
    return "norm" in type(module).__name__.lower() and "parametriz" not in type(module).__module__


def _orientation(module: nn.Module) -> Orientation | None:
    if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv1d) and module.kernel_size == (1,)):
        return "out-in"
    return "in-out" if type(module).__name__ == "Conv1D" else None


def _part(name: str, weight: Tensor, bias: Tensor | None, orientation: Orientation) -> WeightMatrix:
    letters, index = read_name(name)
    return WeightMatrix(name, weight, bias, orientation, letters, index)


def _raw_parts(raw: Mapping[str, Tensor]) -> Iterator[WeightMatrix]:
    """Bare parameters. A vector is the bias of the matrix with the same role."""
    vectors = {name: t for name, t in raw.items() if _is_bias(name, t)}
    for name, tensor in raw.items():
        if name in vectors or tensor.ndim < 2:
            continue
        stem, letters = _stem(name), read_name(name)
        bias = next((v for n, v in vectors.items() if _stem(n) == stem), None)
        if bias is None and letters[0]:
            bias = next((v for n, v in vectors.items() if read_name(n) == letters), None)
        is_torch = name.rpartition(".")[2] in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        if bias is None and is_torch and name.rpartition(".")[2] != "in_proj_weight":
            bias = _third(vectors, letters[0])
        yield WeightMatrix(name, tensor, bias, "out-in" if is_torch else "free", *letters)


def _third(vectors: Mapping[str, Tensor], letter: str) -> Tensor | None:
    fused = next((t for name, t in vectors.items() if name.endswith("in_proj_bias")), None)
    return None if fused is None else fused.chunk(3)["qkv".index(letter)]


def _is_bias(name: str, tensor: Tensor) -> bool:
    last = name.rpartition(".")[2].lower()
    is_named = "bias" in last or re.fullmatch(r"b_?([qkvo]|out|qkv)", last) is not None
    return tensor.ndim == 1 or (is_named and tensor.ndim <= 3)


def _stem(name: str) -> str:
    folder, _, last = name.rpartition(".")
    last = re.sub(r"(?i)_?(weight|bias|kernel)s?$", "", last)
    return f"{folder}.{re.sub(r'^[wWbB]_?(?=[a-zA-Z])', '', last)}".lower()  # the same for a weight and its bias


def read_name(name: str) -> tuple[str, int | None]:
    """The role of a parameter in letters of q, k, v, o, and its index in a list of similar parameters."""
    steps = [step for step in name.split(".") if step not in ("weight", "bias", "kernel")]
    index = next((int(step) for step in reversed(steps) if step.isdigit()), None)
    named = [step for step in steps if not step.isdigit()]
    for step in reversed(named):
        letters = _letters_of(step)
        if letters:
            return letters, index
    return "", index


def _letters_of(step: str) -> str:
    """The letters of one part of a name: three for `query_key_value` and `qkv`, one for `out_proj`."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", step).lower()
    plain = re.sub(r"_?(weight|bias|kernel)s?$", "", plain)
    if plain in ("in_proj", "inproj", "in_projection"):
        return "qkv"
    fused = _FUSED.match(plain)
    if fused is not None:
        return fused[1]
    bare = plain.replace("_", "")
    affixed = _AFFIXED.match(bare)
    if bare in _LETTER or affixed is not None:
        return _LETTER.get(bare) or str(affixed and affixed[1])
    words = [word for word in re.split(r"_+|\d+", plain) if word]
    inner = next((match[1] for word in words if (match := _FUSED.match(word))), None)
    if inner is not None:
        return inner
    letters = [_LETTER[word] for word in words if word in _LETTER]
    roles = [letter for letter in letters if letter != "o"]
    return "".join(dict.fromkeys(roles)) or (letters[0] if letters else "")
