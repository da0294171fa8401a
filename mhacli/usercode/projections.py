"""Reads the parameters of a user's attention as q, k, v and output projections, in every way their names and shapes allow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.mistakes.stages import Projection, Projections
from mhacli.usercode.target import Choice

_LAYOUTS = ("3hd", "h3d", "hd3", "3dh", "d3h", "dh3")
"""The row orders of a fused matrix: `3hd` has all queries first, `h3d` the queries, keys and values of each head."""
Roles = tuple[dict[str, Projection], tuple[Choice, ...]]
"""The projections by letter (q, k, v) that a parameter may hold, and the design choices of this reading."""


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


Orientation = Literal["out-in", "in-out", "free"]
"""How a matrix is applied: `x Wᵀ` as in nn.Linear, `x W` as in Conv1D, or unknown."""


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix and its bias. `letters` are the roles that its name states: q, k, v, o, several of q, k and v in order, or none.
    `number` is its index in a list of similar matrices. `biases` stand apart from it, by letter."""

    name: str
    weight: Tensor
    bias: Tensor | None
    orientation: Orientation
    letters: str
    number: int | None = None
    biases: Mapping[str, Tensor] = field(default_factory=dict)


def projection_readings(parts: Sequence[WeightMatrix], widths: Widths) -> Iterator[ProjectionReading]:
    """Every reading, the most natural first. Empty if queries, keys and values cannot be told apart."""
    for groups, letters in _groups(parts):
        names = [part.name for group in groups for part in group]
        rest = [part for part in parts if part.name not in names]
        order = next((of for of in letters if len(of) == 3), None)
        options = [list(_roles(group, of, widths)) for group, of in zip(groups, letters, strict=True)]
        for combination in product(*options):
            projections = {letter: projection for roles, _ in combination for letter, projection in roles.items()}
            n_kv_heads = _n_kv_heads(projections, widths.n_heads)
            if n_kv_heads is None:
                continue
            choices = dict.fromkeys(choice for _, chosen in combination for choice in chosen)
            for out, out_names in _outputs(rest):
                used = tuple(dict.fromkeys((*names, *out_names)))
                unused = tuple(part.name for part in parts if part.name not in used)
                weights = Projections(projections["q"], projections["k"], projections["v"], out)
                yield ProjectionReading(weights, widths.n_heads, n_kv_heads, tuple(choices), order, used, unused)


def _groups(parts: Sequence[WeightMatrix]) -> Iterator[tuple[list[list[WeightMatrix]], list[str]]]:
    """Groups of parts that form q, k and v together, with the letters of each, which end with `?` if no name states them. A
    group shares its letters, such as the matrices of all heads."""
    by_letters: dict[str, list[WeightMatrix]] = {}
    for part in parts:
        by_letters.setdefault(part.letters, []).append(part)
    fused = [[letters] for letters in by_letters if set(letters) == set("qkv")]
    halves = [["qkv".strip(pair) or "k", pair] for pair in by_letters if len(pair) == 2]
    for combination in (["q", "k", "v"], *fused, *halves):
        if all(letters in by_letters for letters in combination):
            yield [by_letters[letters] for letters in combination], combination
    unnamed = by_letters.get("", [])
    for part in unnamed:
        yield [[part]], ["qkv?"]
    if len(unnamed) in (3, 4):
        for order in permutations(unnamed, 3):
            yield [[part] for part in order], ["q?", "k?", "v?"]


def _n_kv_heads(projections: Mapping[str, Projection], n_heads: int) -> int | None:
    """The number of kv heads; None if the widths of queries, keys and values allow none."""
    q_width, k_width, v_width = (projections[letter].weight.shape[0] for letter in "qkv")
    d_head, remainder = divmod(q_width, n_heads)
    if remainder or not d_head or k_width % d_head:
        return None
    n_kv_heads = k_width // d_head
    return n_kv_heads if n_kv_heads and n_heads % n_kv_heads == 0 and v_width % n_kv_heads == 0 else None


# ------------------------------------------------------------------------------------------------------ queries, keys, values


_NAMES = {"q": "queries", "k": "keys", "v": "values"}
_PER_HEAD = Choice("per-head", "each head has projections of its own")


def _roles(group: Sequence[WeightMatrix], letters: str, widths: Widths) -> Iterator[Roles]:
    """The projections that a group of parts may hold: of one part, or of a part for each head."""
    if len(group) == 1:
        yield from _roles_of(group[0], letters, widths)
        return
    ordered = sorted(group, key=lambda part: part.number or 0)
    of_one_head = widths._replace(n_heads=1, n_kv_heads=1)
    heads = [roles for part in ordered for roles, _ in [*_roles_of(part, letters, of_one_head)][:1]]
    if len(heads) == len(group):
        yield {letter: _joined([roles[letter] for roles in heads]) for letter in letters}, (_PER_HEAD,)


def _joined(heads: Sequence[Projection]) -> Projection:
    biases = [head.bias for head in heads if head.bias is not None]
    bias = torch.cat(biases) if len(biases) == len(heads) else None
    return Projection(torch.cat([head.weight for head in heads]), bias)


def _roles_of(part: WeightMatrix, letters: str, widths: Widths) -> Iterator[Roles]:
    """The projections that one part may hold; in every order if its name states none."""
    is_named, letters = not letters.endswith("?"), letters.rstrip("?")
    if len(letters) == 1:
        unnamed = () if is_named else (Choice("unnamed", f"{part.name} makes the {_NAMES[letters]}"),)
        for weight, choices in _matrices(part, widths, letters):
            bias = part.biases.get(letters) if part.bias is None else part.bias.flatten()
            if bias is not None and bias.numel() < weight.shape[0]:
                bias = bias.repeat(weight.shape[0] // bias.numel())
            yield {letters: Projection(weight, bias)}, (*choices, *unnamed)
        return
    for weights, biases, choices in _cut_parts(part, letters, widths):
        for order in [tuple(letters)] if is_named else permutations(letters):
            words = Choice("fused-order", f"{part.name} holds {', '.join(order)} in this order")
            roles = {
                letter: Projection(weight, part.biases.get(letter) if bias is None else bias)
                for letter, weight, bias in zip(order, weights, biases, strict=True)
            }
            yield roles, choices if is_named else (*choices, words)


def _matrices(part: WeightMatrix, widths: Widths, letter: str) -> Iterator[tuple[Tensor, tuple[Choice, ...]]]:
    """The matrix as `[width, d_in]`, ordered by head."""
    d_in = widths.d_in if letter == "q" else widths.d_context
    n_heads = widths.n_heads if letter == "q" else widths.n_kv_heads or widths.n_heads
    weight, is_free = part.weight, part.orientation == "free"
    if weight.ndim == 3:
        kernel = Choice("kernel", "weights have an axis for heads")
        for axis in [axis for axis in range(3) if weight.shape[axis] == d_in]:
            input_last = weight.movedim(axis, 2)
            for heads_first in (input_last, input_last.transpose(0, 1)):
                if heads_first.shape[0] == n_heads:
                    yield heads_first.flatten(0, 1), (kernel,)
    if weight.ndim != 2:
        return
    if n_heads > 1 and tuple(weight.shape) == (d_in / n_heads, d_in / n_heads):
        words = f"{part.name} projects a slice of the row for each head, the same for all"
        for block in (weight, weight.mT)[: 2 if is_free else 1]:
            yield torch.block_diag(*[block] * n_heads), (Choice("shared-projections", words),)
    if part.orientation != "in-out" and weight.shape[1] == d_in:
        yield weight, ()
    if part.orientation != "out-in" and weight.shape[0] == d_in:
        yield weight.mT, (Choice("orientation", f"{part.name} is applied as x W"),) if is_free else ()


def _cut_parts(
    part: WeightMatrix, letters: str, widths: Widths
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor | None], tuple[Choice, ...]]]:
    """The matrices and biases in a fused matrix, in every possible layout."""
    none = [None] * len(letters)
    if part.weight.ndim == 3 and part.weight.shape[0] == len(letters):
        stacked = Choice("fused", f"{part.name} holds a matrix for each of {', '.join(letters)}")
        biases = none if part.bias is None else [*part.bias.reshape(len(letters), -1)]
        for pieces in (part.weight, part.weight.mT):
            yield [*pieces], biases, (stacked,)
        return
    for matrix, applied in _matrices(part, widths, letters[0]):
        for n_kv_heads, layout in product(_kv_heads_of_fused(matrix, letters, widths), _LAYOUTS):
            of = widths._replace(n_kv_heads=n_kv_heads)
            weights = _cut(matrix, layout, letters, of)
            if weights is not None:
                cut_bias = None if part.bias is None else _cut(part.bias, layout, letters, of)
                yield weights, cut_bias or none, (*applied, *_LAYOUT_CHOICES[layout])


_PER_HEAD_WORDS = "the fused projection holds queries, keys and values of each head in turn"
_LAYOUT_CHOICES: Mapping[str, tuple[Choice, ...]] = {
    **{layout: (Choice("fused-layout", f"the fused projection's rows are numbered ({' '.join(layout)})"),)
       for layout in _LAYOUTS},
    "3hd": (), "h3d": (Choice("fused-per-head", _PER_HEAD_WORDS),),
}  # fmt: skip


def _kv_heads_of_fused(matrix: Tensor, letters: str, widths: Widths) -> list[int | None]:
    """The candidate numbers of kv heads. If it is unknown, the number that the rows of a fused matrix imply comes first, for
    queries as wide as the input; then as many as query heads."""
    if len(letters) < 3 or widths.n_kv_heads is not None or widths.d_in % widths.n_heads:
        return [widths.n_kv_heads]
    n_kv, remainder = divmod(matrix.shape[0] - widths.d_in, 2 * (widths.d_in // widths.n_heads))
    is_shared = not remainder and 0 < n_kv < widths.n_heads and widths.n_heads % n_kv == 0
    return [n_kv, None] if is_shared else [None]


def _cut(rows: Tensor, layout: str, letters: str, widths: Widths) -> Sequence[Tensor] | None:
    """Splits the rows of a fused matrix or bias, each piece ordered by head; None if they do not divide evenly."""
    n_kv = widths.n_kv_heads or widths.n_heads
    counts = [widths.n_heads if letter == "q" else n_kv for letter in letters]
    n_parts, total = len(letters), rows.shape[0]
    if layout == "3hd":
        shares = counts if "q" in letters else [1] * n_parts
        unit, remainder = divmod(total, sum(shares))
        return None if remainder else rows.split([share * unit for share in shares])
    if len(set(counts)) > 1:  # each group holds its queries, its key and its value
        shares = [count // n_kv for count in counts]
        if layout != "h3d" or total % (n_kv * sum(shares)):
            return None
        return [piece.flatten(0, 2) for piece in rows.unflatten(0, (n_kv, sum(shares), -1)).split(shares, dim=1)]
    if total % (n_parts * counts[0]):
        return None
    sizes = {"3": n_parts, "h": counts[0], "d": total // (n_parts * counts[0])}
    numbered = rows.unflatten(0, [sizes[axis] for axis in layout])
    return [piece.flatten(0, 1) for piece in numbered.movedim([layout.index(axis) for axis in "3hd"], [0, 1, 2])]


# ------------------------------------------------------------------------------------------------------------ the output


def _outputs(rest: Sequence[WeightMatrix]) -> Iterator[tuple[Projection | None, tuple[str, ...]]]:
    """The candidates for the output projection, with the names of their parts; None if there is none."""
    named = [part for part in rest if part.letters == "o"]
    candidates = named or [part for part in rest if not part.letters]
    if not candidates:
        yield None, ()
    for part in candidates:
        bias = part.biases.get("o") if part.bias is None else part.bias.flatten()
        for weight in _output_matrices(part):
            yield Projection(weight, bias), (part.name,)


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


# ----------------------------------------------------------------------------------------------------------- the parameters


def parts_of(module: nn.Module | None, tensors: Mapping[str, Tensor]) -> tuple[WeightMatrix, ...]:
    """Every matrix of a module, or of tensors passed by name, in order of creation."""
    matrices: dict[str, tuple[Tensor, Tensor | None, Orientation]] = {}
    raw: dict[str, Tensor] = dict(tensors)
    for path, child in () if module is None else module.named_modules(remove_duplicate=False):
        parameters = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        if is_norm(child) or isinstance(child, nn.Embedding):
            continue
        orientation = _orientation(child)
        if orientation is not None and parameters.get("weight") is not None:
            weight = parameters["weight"] if parameters["weight"].ndim == 2 else parameters["weight"].flatten(1)
            matrices[path] = weight, parameters.get("bias"), orientation
        else:
            raw.update({f"{path}.{name}" if path else name: tensor for name, tensor in parameters.items()})
    vectors = {name: tensor for name, tensor in raw.items() if _is_bias(name, tensor)}
    for name, tensor in raw.items():
        if name not in vectors and tensor.ndim >= 2:
            is_torch = name.rpartition(".")[2] in _OF_TORCH
            matrices[name] = tensor, _bias_of(name, vectors), "out-in" if is_torch else "free"
    apart = {read_name(name)[0]: vector for name, vector in vectors.items() if _is_named_bias(name)}
    return tuple(WeightMatrix(name, *matrix, *read_name(name), apart) for name, matrix in matrices.items())


_OF_TORCH = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""The bare parameters of torch's own attention."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises its input, by its class name. Weight parametrizations do not count."""
    return "norm" in type(module).__name__.lower() and "parametriz" not in type(module).__module__


def _orientation(module: nn.Module) -> Orientation | None:
    if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv1d | nn.Conv2d) and set(module.kernel_size) == {1}):
        return "out-in"
    return "in-out" if type(module).__name__ == "Conv1D" else None


def _bias_of(name: str, vectors: Mapping[str, Tensor]) -> Tensor | None:
    """The bias of a bare matrix: the vector of the same name, else of the same role, else its third of torch's fused one."""
    letters = read_name(name)
    by_name = (vector for other, vector in vectors.items() if _stem(other) == _stem(name))
    by_role = (vector for other, vector in vectors.items() if letters[0] and read_name(other) == letters)
    fused = next((vector for other, vector in vectors.items() if other.endswith("in_proj_bias")), None)
    is_third = fused is not None and name.rpartition(".")[2] in _OF_TORCH[1:]
    third = fused.chunk(3)["qkv".index(letters[0])] if fused is not None and is_third else None
    return next(iter((*by_name, *by_role, third)))


def _is_bias(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 1 or (tensor.ndim <= 3 and _is_named_bias(name))


def _is_named_bias(name: str) -> bool:
    last = name.rpartition(".")[2].lower()
    return "bias" in last or re.fullmatch(r"b_?([qkvo]|out|qkv)", last) is not None


def _stem(name: str) -> str:
    folder, _, last = name.rpartition(".")
    last = re.sub(r"(?i)_?(weight|bias|kernel)s?$", "", last)
    return f"{folder}.{re.sub(r'^[wWbB]_?(?=[a-zA-Z])', '', last)}".lower()  # the same for a weight and its bias


# ------------------------------------------------------------------------------------------------------ names of parameters


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


def read_name(name: str) -> tuple[str, int | None]:
    """The role of a parameter in letters of q, k, v, o, and its index in a list of similar parameters."""
    steps = [step for step in reversed(name.split(".")) if step not in ("weight", "bias", "kernel")]
    index = next((int(step) for step in steps if step.isdigit()), None)
    return next((letters for step in steps if not step.isdigit() and (letters := _letters_of(step))), ""), index


def _letters_of(step: str) -> str:
    """The letters of one part of a name: three for `query_key_value` and `qkv`, one for `out_proj`."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", step).lower()
    plain = re.sub(r"_?(weight|bias|kernel)s?$", "", plain)
    if plain in ("in_proj", "inproj", "in_projection"):
        return "qkv"
    bare = plain.replace("_", "")
    words = [word for word in re.split(r"_+|\d+", plain) if word]
    fused = next((match[1] for word in (plain, *words) if (match := _FUSED.match(word))), None)
    affixed = _AFFIXED.match(bare)
    if fused is not None and (plain == fused or not (bare in _LETTER or affixed)):
        return fused
    if bare in _LETTER or affixed is not None:
        return _LETTER.get(bare) or str(affixed and affixed[1])
    letters = [_LETTER[word] for word in words if word in _LETTER]
    roles = [letter for letter in letters if letter != "o"]
    return "".join(dict.fromkeys(roles)) or (letters[0] if letters else "")
