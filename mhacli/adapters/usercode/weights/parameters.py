"""The parameters of somebody's attention, each with what its name says it is for: queries, keys, values, output."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from torch import Tensor, nn

Orientation = Literal["out-in", "in-out", "free"]
"""How a matrix is applied: `x Wᵀ` as nn.Linear does, `x W` as Conv1D does, or nobody knows."""

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


class Part(NamedTuple):
    """A matrix and its bias. `letters` say what its name claims: q, k, v, o, several of q, k and v in the order in which it has
    them side by side, or nothing. `number` is its place in a list of alike ones."""

    name: str
    weight: Tensor
    bias: Tensor | None
    orientation: Orientation
    letters: str
    number: int | None = None


def parts_of(module: nn.Module | None, tensors: Mapping[str, Tensor]) -> tuple[Part, ...]:
    """Every matrix of a module, or of tensors that are passed by name, in the order in which they were made."""
    found: list[Part] = []
    raw: dict[str, Tensor] = dict(tensors)
    for path, child in () if module is None else module.named_modules(remove_duplicate=False):
        own = dict(child.named_parameters(recurse=False, remove_duplicate=False))
        if is_norm(child) or isinstance(child, nn.Embedding):
            continue
        kind = _orientation(child)
        if kind is not None and own.get("weight") is not None:
            weight = own["weight"] if own["weight"].ndim == 2 else own["weight"].flatten(1)
            found.append(_part(path, weight, own.get("bias"), kind))
        else:
            raw.update({f"{path}.{name}" if path else name: tensor for name, tensor in own.items()})
    return (*found, *_raw_parts(raw))


def is_norm(module: nn.Module) -> bool:
    """Whether a module norms rows, by what it is called; a parametrization of weights does not."""
    return "norm" in type(module).__name__.lower() and "parametriz" not in type(module).__module__


def _orientation(module: nn.Module) -> Orientation | None:
    if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv1d) and module.kernel_size == (1,)):
        return "out-in"
    return "in-out" if type(module).__name__ == "Conv1D" else None


def _part(name: str, weight: Tensor, bias: Tensor | None, orientation: Orientation) -> Part:
    letters, index = read_name(name)
    return Part(name, weight, bias, orientation, letters, index)


def _raw_parts(raw: Mapping[str, Tensor]) -> Iterator[Part]:
    """Bare parameters; a vector is the bias of the matrix whose name claims the same."""
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
        yield Part(name, tensor, bias, "out-in" if is_torch else "free", *letters)


def _third(vectors: Mapping[str, Tensor], letter: str) -> Tensor | None:
    fused = next((t for name, t in vectors.items() if name.endswith("in_proj_bias")), None)
    return None if fused is None else fused.chunk(3)["qkv".index(letter)]


def _is_bias(name: str, tensor: Tensor) -> bool:
    last = name.rpartition(".")[2].lower()
    is_named = "bias" in last or re.fullmatch(r"b_?([qkvo]|out|qkv)", last) is not None
    return tensor.ndim == 1 or (is_named and tensor.ndim <= 3)


def _stem(name: str) -> str:
    """A name without what tells weights from biases."""
    folder, _, last = name.rpartition(".")
    last = re.sub(r"(?i)_?(weight|bias|kernel)s?$", "", last)
    return f"{folder}.{re.sub(r'^[wWbB]_?(?=[a-zA-Z])', '', last)}".lower()


def read_name(name: str) -> tuple[str, int | None]:
    """What a parameter's name claims to be, in letters of q, k, v, o, and its number in a list of alike ones."""
    steps = [step for step in name.split(".") if step not in ("weight", "bias", "kernel")]
    index = next((int(step) for step in reversed(steps) if step.isdigit()), None)
    named = [step for step in steps if not step.isdigit()]
    for step in reversed(named):
        letters = _letters_of(step)
        if letters:
            return letters, index
    return "", index


def _letters_of(step: str) -> str:
    """The letters of one step of a name: `query_key_value` and `qkv` are three, `out_proj` is one."""
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
