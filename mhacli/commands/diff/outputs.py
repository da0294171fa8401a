"""The outputs of another implementation, from a safetensors file: a tensor for each module, [token,
width] or [batch, token, width], of the ids that the first model reads.
"""

import re
from collections.abc import Collection, Iterable, Sequence

import torch
from msgspec.structs import replace as changed
from torch import nn

from mhacli.errors import MhaError, UsageError, bad_file, first_names
from mhacli.io.safetensors import TensorInfo, read_tensor_header, shown_name
from mhacli.settings import Dtype

from .computed import OUTPUTS, Computed, Entry, Stored, eps_of, mapped_file
from .gaps import Relative, fitted
from .places import OF_CALLS, ModelPlace
from .request import MapForm

_REAL = ("F64", "F32", "F16", "BF16")


def asked_for(
    model: nn.Module, path: str, forms: Sequence[MapForm]
) -> dict[str, ModelPlace | None]:
    """The modules of a model whose outputs a file has, as for `Pass.find_places`. Raises `MhaError`
    for a file of its weights, and for names that do not fit.
    """
    weights = model.state_dict()
    named = _named(path, forms, [*dict(model.named_modules()), *weights])
    of_weights = [info.name for name, info in named.items() if name in weights]
    if of_weights:
        raise MhaError(
            f"{path} has weights of A, {_shown(of_weights)}, and no outputs of modules",
            hint="save what each module gives, [token, width], under the name of the module",
            code="cannot-compare",
            path=path,
        )
    return dict.fromkeys(named)


def _named(path: str, forms: Sequence[MapForm], names: Collection[str]) -> dict[str, TensorInfo]:
    """The tensors of a file by the `names` of A that they have, or into which the forms of `--map`
    turn theirs. Raises `MhaError` if there are none, and for forms that do not fit both.
    """
    tensors = read_tensor_header(path).tensors
    turned = {name: _turned(name, forms) for name in tensors}
    for form in forms:
        lefts = [known for known, other in turned.values() if other is form]
        why = f"no tensor of {path} has the name {form.right}"
        if lefts:
            why = f"A computes nothing of the name {lefts[0]}"
        if not any(left in names for left in lefts):
            raise UsageError(f"--map {form.word}: {why}")
    named = dict[str, TensorInfo]()
    for name, (known, _) in turned.items():
        if known in named:
            both = _shown([named[known].name, name])
            raise UsageError(f"{path}: {both} are both {known} of A", hint="save one of them")
        if known in names:
            named[known] = tensors[name]
    if not named:
        raise MhaError(
            f"no tensor of {path} has the name of a module of A: it has"
            f" {_shown(tensors) or 'none'}, and A {_shown(filter(None, names))}",
            hint="--map 'model.layers.{i}.mlp=h.{i}.ffn' names a module of A and its tensor in B",
            code="cannot-compare",
            path=path,
        )
    return named


def _turned(name: str, forms: Sequence[MapForm]) -> tuple[str, MapForm | None]:
    """A name of B as one of A, and the form that says so, which is the one for most of it. A name
    that no form is for is the same in A.
    """
    known = name
    used = None
    n = 0  # the letters of the name that the form is for
    for form in forms:
        begin = re.escape(form.right).replace(r"\{i\}", r"(?P<i>\d+)", 1)
        match = re.match(begin.replace(r"\{i\}", "(?P=i)") + r"(?=\.|$)", name)
        if match and match.end() > n:
            used = form
            n = match.end()
            known = form.left.replace("{i}", match.groupdict().get("i", "{i}")) + name[n:]
    return known, used


def _shown(names: Iterable[str]) -> str:
    return first_names(map(shown_name, names), 3)


def outputs_of(path: str, forms: Sequence[MapForm], a: Computed, dtype: Dtype | None) -> Computed:
    """What a file gives at the places of A, which has computed them, and its other tensors. Of
    several places with the same numbers A keeps the one that both have. `dtype` is that in which B
    was computed, if it is coarser than that of the file; the rounding of B is that of A, widened.
    Raises `MhaError`.
    """
    entries = dict[ModelPlace, Entry]()
    dtypes = [torch.float64 if dtype is None else getattr(torch, dtype)]
    others = read_tensor_header(path).tensors
    spans = [] if a.first is None else a.first.places.root.inner
    ran_again = {span.name for span in spans if span.run}
    named = _named(path, forms, {place.name: place for place in a.entries})
    for name, info in named.items():
        if name in ran_again:
            continue
        shape = (1, *info.shape) if len(info.shape) == 2 else info.shape
        own = [place for place in a.entries if place.name == name and place.site != "embedding"]
        place = _place(a, own, shape, named, {place.key for place in entries})
        _leave_out_names(a, own, place)
        if place is not None:
            stored = _stored(path, info, shape, a, place)
            dtypes.append(stored.dtype)
            entries[changed(place, name=info.name)] = Entry(None, {"": stored})
    known = {place.name for place in entries}
    for name in others:
        if name not in known:
            entries[changed(ModelPlace.mapped(name), number=1)] = Entry(None, {})
    b = Computed(OUTPUTS, max(dtypes, key=eps_of), mapped_file(path), entries)
    ratio = eps_of(b.dtype) / max(eps_of(a.dtype), eps_of(torch.float32))
    if ratio > 1:
        a.measure_rounding()
        for place, (whole, heads) in a.rounding.items():
            b.rounding[place] = Relative(whole * ratio, [head * ratio for head in heads])
    return b


def _leave_out_names(a: Computed, own: Sequence[ModelPlace], best: ModelPlace | None) -> None:
    """Leaves out what A has at a name alone, where its module is compared at the `best` place."""
    for place in own:
        if place.is_mapped and place != best:
            del a.entries[place]


def _place(
    a: Computed,
    own: Sequence[ModelPlace],
    shape: tuple[int, ...],
    names: Collection[str],
    taken: Collection[ModelPlace],
) -> ModelPlace | None:
    """The place of a module of A, which has `own` ones: that of its queries, keys or values, or
    its output. What was only asked for by its name stands at the place of another module that gives
    the same, if B lacks that. None if A has none.
    """
    calls = [place for place in own if place.site in OF_CALLS]
    if len(calls) == 1 and shape == _beside(a.entries[calls[0]]):
        return calls[0]  # several are the parts of one output
    output = next((place for place in own if place.site not in OF_CALLS), None)
    if output is None or not output.is_mapped:
        return output
    others = [
        place
        for place, entry in a.entries.items()
        if entry == a.entries[output] and not place.is_mapped
    ]
    free = [
        place
        for place in others
        if place in own or (place.name not in names and place.key not in taken)
    ]
    return [output, *free][-1]


def _beside(entry: Entry) -> tuple[int, ...]:
    """The shape of what has an axis of heads, with the heads beside each other."""
    shapes = [stored.shape for stored in entry.tensors.values()]
    if len(shapes) > 1 or len(shapes[0]) != 4:
        return ()
    batch, n_heads, n_tokens, width = shapes[0]
    return batch, n_tokens, n_heads * width


def _stored(
    path: str, info: TensorInfo, shape: tuple[int, ...], a: Computed, place: ModelPlace
) -> Stored:
    """A tensor of the file in the axes that A has. Raises `MhaError` if it does not fit."""
    name, size = shown_name(info.name), a.entries[place].tensors[""].shape
    if info.dtype not in _REAL:
        message = f"{path}: its tensor {name} has the dtype {info.dtype}: no real numbers"
        raise bad_file(path, message)
    pair = [torch.empty(each, device="meta") for each in (size, shape)]
    if fitted(place, *pair) is None:
        raise MhaError(
            f"{path}: {name} is {[*info.shape]}, and A gives {[*size]} at {place.name}",
            hint="outputs are [token, width] or [batch, token, width] of the ids that A reads",
            code="cannot-compare",
            path=path,
        )
    return Stored.of(info)._replace(shape=shape)
