"""Compares what two models compute, place by place in the order of execution, with how far rounding
moves each place.

What a model computes goes to a temporary file, so that memory holds one model and one layer at a
time. Scores and patterns are made again from queries and keys, in blocks of queries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from mmap import ACCESS_COPY, MADV_DONTNEED, mmap
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace as changed
from torch import Tensor, nn

from mhacli.errors import MhaError, bad_file, first_names
from mhacli.io.data import decode, plain
from mhacli.io.files import write_whole
from mhacli.io.safetensors import DTYPES, METADATA_KEY, read_tensor_header
from mhacli.models.capture import Call
from mhacli.models.layer_names import dtype_of
from mhacli.models.masking import as_attention
from mhacli.models.places import OF_CALLS, Event, Forward, Part, Pass, Place, Stack, observe
from mhacli.models.run import shaken_parts
from mhacli.run import rows_of_block
from mhacli.usercode.projections import is_norm

TIMES_ROUNDING = 8
"""A difference counts beyond this multiple of the rounding of its place."""
_SHAKES = 3
_CHUNK = 1 << 18
"""The most numbers of a tensor that are compared at once: what a cache holds."""
_ALIGNED = 8
"""Numbers stand at multiples of this in a file."""
_KNOWN = 8
"""The number of last tensors of which it is known where they are stored."""
_SAMPLED, _SAMPLES = 64, 2
"""Of many queries, the rounding of scores is that of so many at the end of each half."""


# ----------------------------------------------------------------------------------------- the file


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


Entry = tuple[Call | None, dict[str, Stored]]
"""What is stored of a place: a tensor without a name, or an attention and its tensors by name."""
Rounding = tuple[float, list[float]]
"""How far rounding moves a place, and each of its heads."""


@dataclass
class Computed:
    """What a model computes at its places, in the order of execution; `data` maps the file with the
    tensors. Scores and patterns are those of an attention. `rounding` is how far a rounding step of
    every part moves each place; until that is measured, `run` has the model, its call, and its
    first pass.
    """

    kind: str
    dtype: torch.dtype
    data: mmap
    entries: dict[Place, Entry] = field(default_factory=dict)
    rounding: dict[Place, Rounding] = field(default_factory=dict)
    run: tuple[nn.Module, Forward, Pass] | None = None

    def value(self, place: Place) -> Tensor | Call:
        """What is computed at a place, whose numbers stay in the file until they are used. What was
        used before leaves memory.
        """
        self.data.madvise(MADV_DONTNEED)
        call, tensors = self.entries[place]
        found = {
            name: torch.frombuffer(
                self.data, dtype=dtype, count=math.prod(shape), offset=start
            ).reshape(shape)
            for name, (dtype, shape, start) in tensors.items()
        }
        return found[""] if call is None else call.holding(found)

    def measure_rounding(self) -> None:
        """Measures how far the places move if every part of the model rounds otherwise, the most in
        some passes, unless it is known. The model is not needed any more.
        """
        if self.run is None:
            return
        model, forward, of_places = self.run

        def compare(event: Event, value: Tensor | Call) -> None:
            place = of_places.place_of(event)
            if place is None:
                return
            for site, gap in _gaps(place, self.value(place), value, sampled=True):
                own = changed(place, site=site)
                relative, heads = self.rounding.get(own, (0.0, gap.heads))
                heads = [max(pair) for pair in zip(heads, gap.heads, strict=True)]
                self.rounding[own] = max(relative, gap.relative), heads

        for seed in range(_SHAKES):
            with shaken_parts(model, seed):
                observe(model, forward, compare)
        self.run = None

    def rotates_nothing(self, place: Place) -> bool:
        """Whether a place is that of queries or keys before their scores that are the same as
        projected.
        """
        before = changed(place, site=place.site.removesuffix("_rotated"))
        of_same_numbers = (
            other.key for other, entry in self.entries.items() if entry == self.entries[place]
        )
        return before.site != place.site and before.key in of_same_numbers


def compute(
    model: nn.Module, forward: Forward, mapped: Mapping[str, Place | None] = {}
) -> Computed:
    """What a model computes at all its places; `mapped` modules are as for `Pass.find_places`."""
    stored, known = dict[Event, Entry](), dict[Any, tuple[Tensor, Stored]]()
    names = {
        n
        for n, module in model.named_modules()
        if n in mapped or is_norm(module) or any(True for _ in module.parameters())
    }

    def store(tensor: Tensor) -> Stored:
        """A tensor in the file; what is the same as one of the last ones, such as a mask that
        layers share, is stored once.
        """
        version = object() if tensor.is_inference() else tensor._version
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version)
        if same not in known:
            data = tensor.detach().cpu().contiguous()
            file.write(bytes(-file.tell() % _ALIGNED))
            known[same] = tensor, Stored(data.dtype, tuple(data.shape), file.tell())
            file.write(data.flatten().view(torch.uint8).numpy().data)
            if len(known) > _KNOWN:
                del known[next(iter(known))]
        return known[same][1]

    def add(event: Event, value: Tensor | Call) -> None:
        if isinstance(value, Call):
            tensors = {name: store(tensor) for name, tensor in value.tensors.items() if name != "z"}
            stored[event] = value.holding({}), tensors
        elif event.source[0] != "out" or event.name in names:
            stored[event] = None, {"": store(value)}

    with TemporaryFile() as file:
        ran = observe(model, forward, add)
        ran.find_places(mapped)
        file.write(b"\0")  # a file without content cannot be mapped
        file.flush()
        data = mmap(file.fileno(), 0, access=ACCESS_COPY)
    entries = {
        place: entry
        for event, entry in stored.items()
        if (place := ran.place_of(event)) is not None
    }
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return Computed(kind, dtype_of(model), data, entries, run=(model, forward, ran))


# ---------------------------------------------------------------------------- places that are saved


SCHEMA = "mha.places/1"


class _Saved(msgspec.Struct, frozen=True):
    """The JSON of a file of places, with the inputs of the model. An entry has its place, what else
    its attention has, and the names of its tensors in the file.
    """

    schema: str
    command: list[str]
    kind: str
    dtype: str
    inputs: dict[str, Any]
    entries: list[tuple[Place, Any, dict[str, str]]]
    rounding: list[tuple[Place, Rounding]]


def save_places(
    found: Computed, inputs: dict[str, Any], command: Sequence[str], path: str, *, force: bool
) -> None:
    """Writes what a model computes, and its inputs as lists of ids, to a safetensors file. Raises
    `MhaError`.
    """
    every = [stored for _, tensors in found.entries.values() for stored in tensors.values()]
    widest_first = sorted(dict.fromkeys(every), key=lambda stored: -stored.dtype.itemsize)
    names = {stored: f"{n}" for n, stored in enumerate(widest_first)}
    entries = [
        (place, call, {name: names[stored] for name, stored in tensors.items()})
        for place, (call, tensors) in found.entries.items()
    ]
    dtype, rounding = str(found.dtype).removeprefix("torch."), [*found.rounding.items()]
    saved = _Saved(SCHEMA, [*command], found.kind, dtype, inputs, entries, rounding)
    document: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(plain(saved))}}
    words, end, spans = (
        {getattr(torch, name): word for word, name in DTYPES.items()},
        0,
        list[slice](),
    )
    for stored, name in names.items():
        start, end = end, end + math.prod(stored.shape) * stored.dtype.itemsize
        document[name] = {
            "dtype": words[stored.dtype],
            "shape": stored.shape,
            "data_offsets": [start, end],
        }
        spans.append(slice(stored.start, stored.start + end - start))
    head = json.dumps(document).encode()
    head += b" " * (-len(head) % _ALIGNED)
    parts = (found.data[span] for span in spans)
    write_whole(path, chain([len(head).to_bytes(8, "little") + head], parts), force=force)


def load_places(path: str) -> tuple[Computed, dict[str, Any]]:
    """What `save_places` wrote, with the inputs. Raises `MhaError` for another file."""
    header = read_tensor_header(path)
    saved = decode(_Saved, header.metadata, path)
    with open(path, "rb") as file:
        data = mmap(file.fileno(), 0, access=ACCESS_COPY)
    found = Computed(saved.kind, getattr(torch, saved.dtype, torch.float32), data)
    for place, call, names in saved.entries:
        tensors = {}
        for name, word in names.items():
            info = header.tensors.get(word)
            if info is None or info.dtype not in DTYPES:
                raise bad_file(path, f"{path}: it lacks the tensor of {place.site}")
            tensors[name] = Stored(getattr(torch, DTYPES[info.dtype]), info.shape, info.start)
        found.entries[place] = call and Call(**call), tensors
    found.rounding |= dict(saved.rounding)
    return found, saved.inputs


# ------------------------------------------------------------------------------------- a difference


class Gap:
    """How far two arrays of a `shape` are apart: for each head, if the second of four axes is that
    of heads, the squares of the difference and of the first array; and the largest difference, in
    rows of `n_columns` of which the first begins at `start`.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        has_heads = len(shape) == 4
        self.shape, self.of_head = shape, math.prod(shape[2:] if has_heads else shape)
        self.squares = [[0.0, 0.0] for _ in range(shape[1] if has_heads else 1)]
        self.largest = 0.0
        self._worst: tuple[int, Tensor, int] | None = None

    def add(self, start: int, a: Tensor, b: Tensor) -> None:
        """Adds the numbers from `start` on in the flattened array, of one head; rows may lack their
        last columns.
        """
        n_columns = a.shape[-1]
        wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
        a, b = a.flatten().to(wide), b.flatten().to(wide)
        change = b - a
        sizes = [torch.linalg.vector_norm(each).item() for each in (change, a)]
        if not all(map(math.isfinite, sizes)):
            is_same = (a == b) | (a.isnan() & b.isnan())
            change = change.double().masked_fill(is_same, 0.0).nan_to_num(nan=math.inf)
            parts = (change, a.double().nan_to_num(posinf=0.0, neginf=0.0))
            sizes = [torch.linalg.vector_norm(each).item() for each in parts]
        of_head = self.squares[start // self.of_head % len(self.squares)]
        of_head[:] = [before + size * size for before, size in zip(of_head, sizes, strict=True)]
        if (
            sizes[0]
            and (worst := max(map(abs, torch.stack(change.aminmax()).tolist()))) > self.largest
        ):
            self.largest, self._worst = worst, (start, change, n_columns)

    @property
    def at(self) -> tuple[int, ...] | None:
        """The place of the largest difference."""
        if self._worst is None:
            return None
        start, change, n_columns = self._worst
        row, column = divmod(int(change.abs().argmax()), n_columns)
        return tuple(map(int, np.unravel_index(start + row * self.shape[-1] + column, self.shape)))

    @property
    def relative(self) -> float:
        """The norm of the difference over that of the first array."""
        return _ratio(*map(sum, zip(*self.squares, strict=True)))

    @property
    def heads(self) -> list[float]:
        """The same of each head; none without heads."""
        return [_ratio(*squares) for squares in self.squares] if len(self.shape) == 4 else []


def _ratio(change: float, of: float) -> float:
    return 0.0 if change == 0.0 else math.inf if of == 0.0 else math.sqrt(change / of)


def _gaps(
    place: Place, a: Tensor | Call, b: Tensor | Call, sampled: bool = False
) -> Iterator[tuple[str, Gap]]:
    """The differences at a place by site: that of an array; or of an attention, in blocks of
    queries, those of the scores that both see and of the patterns. None where shapes do not fit.
    """
    if (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (pair := _fitted(place, a, b)) is not None
    ):
        gap = Gap(tuple(pair[0].shape))
        per_head = (each.detach().reshape(-1, gap.of_head) for each in pair)
        for number, (x, y) in enumerate(zip(*per_head, strict=True)):
            for start in range(0, gap.of_head, _CHUNK):
                stop = start + _CHUNK
                gap.add(number * gap.of_head + start, x[start:stop].cpu(), y[start:stop].cpu())
        yield place.site, gap
    if not isinstance(a, Call) or not isinstance(b, Call) or a.shape != b.shape:
        return
    (n_texts, n_heads, n_queries, n_keys), scores, pattern = a.shape, Gap(a.shape), Gap(a.shape)
    step = rows_of_block(n_keys, "cpu")
    starts = range(0, n_queries, step)
    if sampled and n_queries > 2 * _SAMPLES * _SAMPLED:
        step, of_sample = _SAMPLED, n_queries // _SAMPLES
        starts = range(of_sample - step, n_queries, of_sample)
    hides_later = a.causal and b.causal and n_queries == n_keys
    for first in starts:
        rows = slice(first, min(n_queries, first + step))
        keys = slice(0, rows.stop if hides_later else n_keys)
        x, y = (as_attention(call.cropped(rows, keys)).matrices() for call in (a, b))
        hidden = ~(
            x["allowed"].cpu() & y["allowed"].cpu()
        )  # what is stored is on the CPU, what passes on its device
        for text in range(n_texts):
            for head in range(n_heads):
                start = ((text * n_heads + head) * n_queries + first) * n_keys
                own = hidden[text, min(head, hidden.shape[1] - 1)]
                scores.add(
                    start,
                    *(each["scores"][text, head].cpu().masked_fill_(own, 0.0) for each in (x, y)),
                )
                pattern.add(start, *(each["pattern"][text, head].cpu() for each in (x, y)))
    yield "scores", scores
    yield "pattern", pattern


def _fitted(place: Place, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two tensors as far as they are the same, if their shapes differ: keys and values that heads
    share, merged axes, the last position of logits where one side has no more, and the entries that
    both vocabularies have. None if they do not fit.
    """
    if a.ndim == b.ndim == 4 and a.shape != b.shape and place.site in ("k", "v", "k_rotated"):
        n = max(a.shape[1], b.shape[1])
        if n % a.shape[1] == n % b.shape[1] == 0:
            a, b = (tensor.repeat_interleave(n // tensor.shape[1], dim=1) for tensor in (a, b))
    if place.site == "logits" and a.ndim == b.ndim == 3:
        if 1 in (a.shape[1], b.shape[1]):
            a, b = a[:, -1:], b[:, -1:]
        n = min(a.shape[2], b.shape[2])
        a, b = a[..., :n], b[..., :n]
    if a.ndim != b.ndim and a.numel() == b.numel() and a.shape[-1:] == b.shape[-1:]:
        b = b.reshape(a.shape)
    return (a, b) if a.shape == b.shape else None


# ---------------------------------------------------------------------------------- all differences


class _OfBoth(msgspec.Struct, frozen=True):
    """A place of one model or of both, with the names of the modules."""

    layer: int | None
    stack: Stack | None
    part: Part
    site: str
    name_a: str | None
    name_b: str | None


class Difference(_OfBoth, frozen=True):
    """The difference of two models at a place: `relative` to what the first computes, the `largest`
    of a number with its indices `at`, and the `head` that differs most. It is `beyond` rounding,
    and so are `heads`; it is `healed` if what follows from it is the same in both again, as where
    two implementations scale in another order.
    """

    relative: float
    rounding: float
    largest: float
    at: tuple[int, ...] | None
    head: int | None
    heads: tuple[int, ...]
    n_heads: int
    beyond: bool
    healed: bool = False


class Unmatched(_OfBoth, frozen=True):
    """A place that could not be compared, and why."""

    why: str


@dataclass(frozen=True)
class Comparison:
    """The differences of two models at the `places` that both have, in the order of execution of
    the first, the other places, the dtypes of both, and notes. Nothing is compared of two models
    that read other `ids`.
    """

    places: list[Difference] = field(default_factory=list)
    unmatched: list[Unmatched] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    times_rounding: int | None = None
    ids: tuple[list[int], list[int]] | None = None


def compare(a: Computed, b: Computed) -> Comparison:
    """The differences of `b` from `a`, with the rounding of the one with the coarser dtype, of
    equals that of `a`. Places of other shapes are unmatched. Raises `MhaError` if no place can be
    compared.
    """
    rounds = max((a, b), key=lambda side: torch.finfo(side.dtype).eps)
    rounds.measure_rounding()
    floor = max(torch.finfo(each).eps for each in (rounds.dtype, torch.float32))
    rounding = {place.key: how for place, how in rounds.rounding.items()}
    of_b = {place.key: place for place in b.entries}
    rows, unmatched, has_all_tokens = list[Difference](), list[Unmatched](), True
    for place in a.entries:
        other = of_b.pop(place.key, None)
        if a.rotates_nothing(place) and (other is None or b.rotates_nothing(other)):
            continue
        if other is None:
            unmatched.append(Unmatched(*place.where, place.name, None, "only A has it"))
            continue
        x, y = a.value(place), b.value(other)
        gaps = [*_gaps(place, x, y)]
        if place.site == "logits":
            has_all_tokens = x.shape[:-1] == y.shape[:-1]
            if bool(place.name) != bool(other.name) and x.shape[-1] != y.shape[-1]:
                gaps = []  # one has no head, and gives its last hidden states
        if not gaps:
            why = f"its shape is {list(x.shape)} in A and {list(y.shape)} in B"
            unmatched.append(Unmatched(*place.where, place.name, other.name, why))
        rows += [
            _row(changed(place, site=site), other.name, gap, rounding, floor) for site, gap in gaps
        ]
    alone = (place for place in of_b.values() if not b.rotates_nothing(place))
    unmatched += [Unmatched(*place.where, None, place.name, "only B has it") for place in alone]
    if not rows:
        why = "; ".join(f"{place.part} {place.site}: {place.why}" for place in unmatched[:4])
        message = f"the two models have no place that could be compared: {why or 'neither has any'}"
        raise MhaError(message, code="cannot-compare")
    if a.kind != b.kind:
        is_coarse = torch.finfo(rounds.dtype).eps > torch.finfo(torch.float32).eps
        heals = partial(_is_healed, is_coarse=is_coarse, has_all_tokens=has_all_tokens)
        rows = [
            changed(row, healed=row.beyond and heals(row, rows[at + 1 :]))
            for at, row in enumerate(rows)
        ]
    dtypes = [str(side.dtype).removeprefix("torch.") for side in (a, b)]
    return Comparison(rows, unmatched, _notes(a, b), dtypes, TIMES_ROUNDING)


def _notes(a: Computed, b: Computed) -> list[str]:
    """Other numbers of layers and heads, and attentions that could not be seen inside."""
    notes, heads = list[str](), list[str]()
    for letter, side in zip("AB", (a, b), strict=True):
        seen = {(place.stack, place.layer) for place in side.entries if place.site in OF_CALLS}
        outputs = [
            place for place in side.entries if (place.part, place.site) == ("attention", "output")
        ]
        if hidden := [place.name for place in outputs if (place.stack, place.layer) not in seen]:
            words = "the output is compared, but no head: mha could not capture its attention"
            notes.append(f"of {first_names(hidden, 3)} of {letter} {words}")
        parts = {
            (place.stack, place.layer, place.part)
            for place in side.entries
            if place.layer is not None
        }
        bare = sorted(
            {str(layer) for stack, layer, _ in parts if (stack, layer, "attention") not in parts}
        )
        if bare:
            layers = f"layers {first_names(bare, 3)} of {letter}"
            notes.append(f"no attention was captured in {layers}: all in them counts as MLP")
        tensors = [
            tensors.get("q") or tensors["scores"]
            for call, tensors in side.entries.values()
            if call is not None
        ]
        heads.append(
            " or ".join(map(str, sorted({tensor.shape[1] for tensor in tensors}))) or "no captured"
        )
    for stack in dict.fromkeys(
        place.stack for place in (*a.entries, *b.entries) if place.layer is not None
    ):
        counts = [
            len({place.layer for place in side.entries if place.stack == stack} - {None})
            for side in (a, b)
        ]
        if counts[0] != counts[1]:
            notes.append(
                f"A has {counts[0]} {stack or ''} layers and B {counts[1]}".replace("  ", " ")
            )
    if heads[0] != heads[1]:
        notes.append(f"A has {heads[0]} heads and B {heads[1]}")
    return notes


def _row(
    place: Place, name_b: str, gap: Gap, rounding: dict[Any, Rounding], floor: float
) -> Difference:
    known, of_heads = rounding.get(place.key, (0.0, []))
    least, relatives = max(known, floor) if math.isfinite(known) else floor, gap.heads
    of_heads = (
        [max(floor, each) for each in of_heads]
        if len(of_heads) == len(relatives)
        else [least] * len(relatives)
    )
    is_beyond = not gap.relative <= TIMES_ROUNDING * least
    pairs = enumerate(zip(relatives, of_heads, strict=True))
    heads = [n for n, (relative, own) in pairs if is_beyond and relative > TIMES_ROUNDING * own]
    head = (
        max(range(len(relatives)), key=relatives.__getitem__) if relatives and is_beyond else None
    )
    where = (*place.where, place.name, name_b)
    return Difference(
        *where,
        gap.relative,
        least,
        gap.largest,
        gap.at,
        head,
        tuple(heads),
        len(relatives),
        beyond=is_beyond,
    )


def _is_healed(
    row: Difference, later: list[Difference], *, is_coarse: bool, has_all_tokens: bool
) -> bool:
    """Whether what follows from a difference is the same in both: the output of the same part, the
    residual stream, or the logits of all tokens; in 16 bits, where rounding hides much of what
    follows, the scores that queries and keys make.
    """
    for other in later:
        is_same_part = (other.layer, other.stack, other.part) == (row.layer, row.stack, row.part)
        if is_coarse:
            if is_same_part and other.site == "scores":
                return row.site.startswith(("q", "k")) and not other.beyond
            continue
        is_cut = is_same_part and row.layer is not None and other.site in ("z", "output")
        is_cut |= (other.site == "logits" and has_all_tokens) or (
            other.site == "residual" and other.stack == row.stack
        )
        if is_cut and not other.beyond:
            return True
    return False
