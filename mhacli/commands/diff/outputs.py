"""The outputs of another implementation, from a safetensors file: a tensor for each module, [token,
width] or [batch, token, width], of the ids that the first model reads.
"""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from mmap import ACCESS_COPY, mmap
from typing import Any

import torch
from msgspec.structs import replace as changed
from torch import nn

from mhacli.errors import MhaError, UsageError, bad_file, first_names
from mhacli.io.safetensors import DTYPES, TensorInfo, read_tensor_header, shown_name
from mhacli.settings import Dtype

from .computed import OUTPUTS, Computed, Entry, Stored
from .gaps import Relative, fitted
from .places import OF_CALLS, Place
from .request import MapForm

_REAL = ("F64", "F32", "F16", "BF16")


def read_outputs(
    path: str, forms: Sequence[MapForm], names: Collection[str], weights: Collection[str] = ()
) -> dict[str, TensorInfo]:
    """The tensors of a file by the `names` of A's modules: its own, or those into which the forms
    of `--map` turn them. Raises `MhaError` for a file of A's weights, for one without any such
    name, and for forms that do not fit both.
    """
    tensors = read_tensor_header(path).tensors
    turned = dict[str, tuple[str, MapForm | None]]()
    for name in tensors:
        found = ((_begin(form).match(name), form) for form in forms)
        matches = [(match, form) for match, form in found if match]
        match, form = max(matches, key=lambda pair: pair[0].end(), default=(None, None))
        left = ""
        if match is not None and form is not None:
            left = form.left.replace("{i}", match.groupdict().get("i", "{i}"))
        turned[name] = left + name[match.end() if match else 0 :], form
    of_weights = [name for name, (known, _) in turned.items() if known in weights]
    if of_weights:
        raise MhaError(
            f"{path} has weights of A, {_names(of_weights)}, and no outputs of modules",
            hint="save what each module gives, [token, width], under the name of the module",
            code="cannot-compare",
            path=path,
        )
    for form in forms:
        lefts = [known for known, other in turned.values() if other is form]
        if not lefts:
            raise UsageError(f"--map {form.word}: no tensor of {path} has the name {form.right}")
        if not any(left in names for left in lefts):
            raise UsageError(f"--map {form.word}: A computes nothing of the name {lefts[0]}")
    named = dict[str, TensorInfo]()
    for name, (known, _) in turned.items():
        if known in named:
            both = " and ".join(map(shown_name, (named[known].name, name)))
            message = f"{both} of {path} are both {known} of A"
            raise UsageError(message, hint="map or save one of them")
        if known in names:
            named[known] = tensors[name]
    if not named:
        raise MhaError(
            f"no tensor of {path} has the name of a module of A: it has"
            f" {_names(tensors) or 'none'}, and A {_names(filter(None, names))}",
            hint="--map 'model.layers.{i}.mlp=h.{i}.ffn' names a module of A and its tensor in B",
            code="cannot-compare",
            path=path,
        )
    return named


def _names(names: Iterable[str]) -> str:
    return first_names(map(shown_name, names), 3)


def asked_for(model: nn.Module, path: str, forms: Sequence[MapForm]) -> dict[str, Place | None]:
    """The modules of a model whose outputs a file has, as for `Pass.find_places`."""
    modules = dict(model.named_modules())
    return dict.fromkeys(read_outputs(path, forms, modules, {*model.state_dict()}))


def _begin(form: MapForm) -> re.Pattern[str]:
    """What the names begin with that a form turns into names of A."""
    words = re.escape(form.right).replace(r"\{i\}", r"(?P<i>\d+)", 1)
    return re.compile(words.replace(r"\{i\}", "(?P=i)") + r"(?=\.|$)")


def outputs_of(path: str, forms: Sequence[MapForm], a: Computed, dtype: Dtype | None) -> Computed:
    """What a file gives at the places of A, which has computed them. Of several places with the
    same numbers A keeps the one that both have. `dtype` is that in which B was computed, if it is
    coarser than that of the file; the rounding of B is that of A, widened. Raises `MhaError`.
    """
    named = read_outputs(path, forms, {place.name: place for place in a.entries})
    others = [*read_tensor_header(path).tensors]
    entries = dict[Place, Entry]()
    dtypes = [torch.float64 if dtype is None else getattr(torch, dtype)]
    for name, info in named.items():
        shape = (1, *info.shape) if len(info.shape) == 2 else info.shape
        place = _place(a, name, shape, {place.key for place in entries}, named)
        if place is None:
            continue
        others.remove(info.name)
        stored = _stored(path, info, shape, place, a.entries[place])
        dtypes.append(stored.dtype)
        entries[changed(place, name=info.name)] = Entry(None, {"": stored})
    with open(path, "rb") as file:
        data = mmap(file.fileno(), 0, access=ACCESS_COPY)
    b = Computed(OUTPUTS, max(dtypes, key=_eps), data, entries, others=tuple(others))
    ratio = _eps(b.dtype) / max(_eps(a.dtype), _eps(torch.float32))
    if ratio > 1:
        a.measure_rounding()
        for place, (whole, heads) in a.rounding.items():
            b.rounding[place] = Relative(whole * ratio, [head * ratio for head in heads])
    return b


def _stored(
    path: str, info: TensorInfo, shape: tuple[int, ...], place: Place, of_a: Entry
) -> Stored:
    """A tensor of the file in the axes that A has. Raises `MhaError` if it does not fit."""
    name = shown_name(info.name)
    if info.dtype not in _REAL:
        message = f"{path}: its tensor {name} has the dtype {info.dtype}: no real numbers"
        raise bad_file(path, message)
    size = of_a.tensors[""].shape
    can_split = place.site not in OF_CALLS and len(shape) == 3
    if can_split and size[:2] == shape[:2] and math.prod(size) == math.prod(shape):
        shape = size  # a module may give axes of heads
    if fitted(place, *(torch.empty(each, device="meta") for each in (size, shape))) is None:
        raise MhaError(
            f"{path}: {name} is {[*info.shape]}, and A gives {[*size]} at {place.name}",
            hint="outputs are [token, width] or [batch, token, width] of the ids that A reads",
            code="cannot-compare",
            path=path,
        )
    return Stored(getattr(torch, DTYPES[info.dtype]), shape, info.start)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _are_heads(entry: Entry, shape: tuple[int, ...]) -> bool:
    """Whether an array has the heads of a place beside each other."""
    if entry.call is not None or len(entry.tensors[""].shape) != 4:
        return False
    batch, n_heads, n_tokens, width = entry.tensors[""].shape
    return shape == (batch, n_tokens, n_heads * width)


def _place(
    a: Computed,
    name: str,
    shape: tuple[int, ...],
    taken: Collection[tuple[Any, ...]],
    names: Collection[str],
) -> Place | None:
    """The place of a module of A: that of its queries, keys or values; its own; or the one of
    another module that gives the same, unless B has that too. None if the module runs several
    times.
    """
    own = [place for place in a.entries if place.name == name and place.site != "embedding"]
    calls = [place for place in own if place.site in OF_CALLS]
    modules = [place for place in own if place.site not in OF_CALLS]
    if len(calls) != 1 or not _are_heads(a.entries[calls[0]], shape):
        calls = []  # several are the parts of one output
    ran = [] if a.first is None else a.first.places.root.inner
    if not calls + modules or any(span.name == name and span.run for span in ran):
        return None
    if not modules or not modules[0].is_mapped:
        return (modules + calls)[0]
    at = modules[0]
    twins = [
        other
        for other, entry in a.entries.items()
        if entry == a.entries[at]
        and not other.is_mapped
        and other.key not in taken
        and (other.name == name or other.name not in names)
    ]
    place = (calls + twins + [at])[0]
    if place != at:
        del a.entries[at]
    return place
