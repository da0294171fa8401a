"""What a model computes at its places, in a temporary file, so that memory holds one model and one
layer at a time; how far rounding moves each place; and the same in a file that is kept.

Scores and patterns are not stored: they are made again from queries and keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from mmap import ACCESS_COPY, MADV_DONTNEED, mmap
from tempfile import TemporaryFile
from typing import IO, Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta
from msgspec.structs import replace as changed
from torch import Tensor, nn

from mhacli.attention.core import dtype_name
from mhacli.errors import bad_file
from mhacli.io.data import decode, plain
from mhacli.io.files import append_temporary, write_whole
from mhacli.io.safetensors import DTYPES, METADATA_KEY, TensorInfo, read_tensor_header
from mhacli.models import foreign
from mhacli.models.capture import Call, are_of_one_attention
from mhacli.models.layer_names import dtype_of
from mhacli.models.run import shaken_parts
from mhacli.usercode.projections import is_norm

from .gaps import Relative, gaps_at
from .places import Event, Forward, ModelPlace, Pass, observe
from .request import PLACES

_N_PERTURBED_PASSES = 3
_ALIGNED = 8
"""Numbers stand at multiples of this in a file."""
OUTPUTS = "outputs"
"""The kind of what a file of another implementation gives."""
_N_KNOWN = 8
"""So many of the last tensors are remembered with their places in the file."""


def eps_of(dtype: torch.dtype) -> float:
    """The relative rounding step of numbers of a dtype."""
    return torch.finfo(dtype).eps


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, info: TensorInfo) -> Stored:
        """One that a file describes."""
        return cls(getattr(torch, DTYPES[info.dtype]), info.shape, info.start)

    @property
    def n_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


class Entry(NamedTuple):
    """What is stored of a place: an attention and its tensors by name, or one tensor without a
    name.
    """

    call: Call | None
    tensors: dict[str, Stored]


class FirstPass(NamedTuple):
    """A model, its call, and the pass in which its places were found."""

    model: nn.Module
    forward: Forward
    places: Pass


@dataclass
class Computed:
    """What a model computes at its places, in the order of execution; `data` maps the file with the
    tensors. Scores and patterns are those of an attention. `rounding` is how far a rounding step of
    every part moves each place; until that is measured, the `first` pass is kept.
    """

    kind: str
    dtype: torch.dtype
    data: mmap
    entries: dict[ModelPlace, Entry] = field(default_factory=dict)
    rounding: dict[ModelPlace, Relative] = field(default_factory=dict)
    first: FirstPass | None = None

    def value(self, place: ModelPlace) -> Tensor | Call:
        """What is computed at a place, whose numbers stay in the file until they are used. What was
        used before leaves memory.
        """
        self.data.madvise(MADV_DONTNEED)
        call, stored = self.entries[place]
        tensors = {name: self._tensor(each) for name, each in stored.items()}
        return tensors[""] if call is None else call.holding(tensors)

    def _tensor(self, stored: Stored) -> Tensor:
        dtype, shape, start = stored
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self.data, dtype=dtype, count=math.prod(shape), offset=start)
        return flat.reshape(shape)

    def measure_rounding(self) -> None:
        """Measures how far the places move if every part of the model rounds otherwise, the most in
        some passes, unless it is known. The model is not needed any more.
        """
        if self.first is None:
            return
        model, forward, places = self.first

        def compare(event: Event, value: Tensor | Call) -> None:
            place = places.place_of(event)
            if place is None or place not in self.entries:
                return
            for site, gap in gaps_at(place, self.value(place), value, sampled=True).items():
                at = changed(place, site=site)
                now = gap.relative
                before = self.rounding.get(at, now)
                heads = [*map(max, before.heads, now.heads)]
                self.rounding[at] = Relative(max(before.whole, now.whole), heads)

        for seed in range(_N_PERTURBED_PASSES):
            with shaken_parts(model, seed):
                observe(model, forward, compare)
        self.first = None

    def rotates_nothing(self, place: ModelPlace) -> bool:
        """Whether a place is that of queries or keys before their scores that are the same as
        projected.
        """
        before = changed(place, site=place.site.removesuffix("_rotated"))
        entry = self.entries[place]
        return before.site != place.site and any(
            other.key == before.key and of_other == entry
            for other, of_other in self.entries.items()
        )


def compute(
    model: nn.Module, forward: Forward, mapped: Mapping[str, ModelPlace | None] = {}
) -> Computed:
    """What a model computes at all its places; `mapped` modules are as for `Pass.find_places`."""
    stored = dict[Event, Entry]()
    names = {
        name
        for name, module in model.named_modules()
        if name in mapped or is_norm(module) or [*module.parameters()]
    }

    def add(event: Event, value: Tensor | Call) -> None:
        if isinstance(value, Call):
            tensors = {name: store(tensor) for name, tensor in value.tensors.items() if name != "z"}
            stored[event] = Entry(value.holding({}), tensors)
        elif event.kind != "out" or event.name in names:
            stored[event] = Entry(None, {"": store(value)})

    with TemporaryFile(buffering=0) as file:
        store = _Writer(file).store
        first = observe(model, forward, add)
        first.find_places(mapped)
        append_temporary(file, b"\0")  # a file without content cannot be mapped
        data = mmap(file.fileno(), 0, access=ACCESS_COPY)
    placed = ((first.place_of(event), entry) for event, entry in stored.items())
    entries = {place: entry for place, entry in placed if place is not None}
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    first_pass = FirstPass(model, forward, first)
    return Computed(kind, dtype_of(model), data, entries, first=first_pass)


class _Writer:
    """Writes tensors to a file; one that is the same as one of the last ones, such as a mask that
    layers share, is not written again.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._known = dict[Any, tuple[Tensor, Stored]]()  # a tensor that lives keeps its memory

    def store(self, tensor: Tensor) -> Stored:
        """Where a tensor is in the file, after it was written."""
        version = foreign.version_of(tensor)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version)
        if key not in self._known:
            data = tensor.detach().cpu().contiguous()
            append_temporary(self._file, bytes(-self._file.tell() % _ALIGNED))
            stored = Stored(data.dtype, tuple(data.shape), self._file.tell())
            append_temporary(self._file, data.flatten().view(torch.uint8).numpy().data)
            self._known[key] = tensor, stored
            if len(self._known) > _N_KNOWN:
                del self._known[next(iter(self._known))]
        return self._known[key][1]


# ---------------------------------------------------------------------------- places that are saved


_Ids = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=1)]


class _SavedEntry(NamedTuple):
    """A place, its attention without tensors, and the names of its tensors in the file."""

    place: ModelPlace
    call: Call | None
    tensors: dict[str, str]


class _Saved(msgspec.Struct, frozen=True):
    """The JSON of a file of places, with the inputs of the model."""

    schema: str
    command: list[str]
    kind: str
    dtype: str
    inputs: Annotated[dict[str, tuple[_Ids]], Meta(min_length=1)]
    entries: list[_SavedEntry]
    rounding: list[tuple[ModelPlace, Relative]]


def save_places(
    computed: Computed, inputs: dict[str, Any], command: Sequence[str], path: str, *, force: bool
) -> None:
    """Writes what a model computes, and its inputs as lists of ids, to a safetensors file. Raises
    `MhaError`.
    """
    every = [stored for entry in computed.entries.values() for stored in entry.tensors.values()]
    widest_first = sorted(dict.fromkeys(every), key=lambda stored: -stored.dtype.itemsize)
    names = {stored: str(n) for n, stored in enumerate(widest_first)}
    entries = [
        _SavedEntry(place, call, {name: names[stored] for name, stored in tensors.items()})
        for place, (call, tensors) in computed.entries.items()
    ]
    rounding = [*computed.rounding.items()]
    dtype = dtype_name(computed.dtype)
    saved = _Saved(PLACES, [*command], computed.kind, dtype, inputs, entries, rounding)
    document: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(plain(saved))}}
    words = {getattr(torch, name): word for word, name in DTYPES.items()}
    end = 0
    for stored, name in names.items():
        offsets = [end, end + stored.n_bytes]
        end += stored.n_bytes
        document[name] = {
            "dtype": words[stored.dtype],
            "shape": stored.shape,
            "data_offsets": offsets,
        }
    head = json.dumps(document).encode()
    head += b" " * (-len(head) % _ALIGNED)
    parts = (computed.data[stored.start : stored.start + stored.n_bytes] for stored in names)
    write_whole(path, chain([len(head).to_bytes(8, "little") + head], parts), force=force)


def mapped_file(path: str) -> mmap:
    """The bytes of a file, which stay in it until they are used."""
    with open(path, "rb") as file:
        return mmap(file.fileno(), 0, access=ACCESS_COPY)


class SavedPlaces(NamedTuple):
    """What a model computed, and the inputs that it read."""

    computed: Computed
    inputs: dict[str, Any]


def load_places(path: str) -> SavedPlaces:
    """What `save_places` wrote. Raises `MhaError` for another file."""
    header = read_tensor_header(path)
    saved = decode(_Saved, header.metadata, path)
    dtype = getattr(torch, saved.dtype, torch.float32)
    computed = Computed(saved.kind, dtype, mapped_file(path))
    for place, call, names in saved.entries:
        tensors = {}
        for name, word in names.items():
            info = header.tensors.get(word)
            if info is None or info.dtype not in DTYPES:
                raise bad_file(path, f"{path}: it lacks the tensor of {place.site}")
            tensors[name] = Stored.of(info)
        if not _fit(call, {name: tensor.shape for name, tensor in tensors.items()}):
            raise bad_file(path, f"{path}: the tensors of {place.site} do not fit each other")
        computed.entries[place] = Entry(call, tensors)
    computed.rounding |= dict(saved.rounding)
    return SavedPlaces(computed, saved.inputs)


def _fit(call: Call | None, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a place has the tensors that it needs, and those of an attention fit each other."""
    if call is None:
        return [*shapes] == [""]
    q, k, v = (shapes.get(name, ()) for name in "qkv")
    cells = shapes.get("scores", q[:3] + k[2:3])
    if len(cells) != 4 or shapes.get("pattern", cells) != cells:
        return False
    have_axes = len(q) == len(k) == len(v) == 4
    return "scores" in shapes or (have_axes and are_of_one_attention(q, k, v))
