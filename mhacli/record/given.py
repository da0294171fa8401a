"""Attention weights that other programs computed, as a record: of arrays in memory, or of a file of
numpy or safetensors. Without torch; `mhacli.models.given` adds the statistics of heads.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import IO, Any

import numpy as np

import mhacli
from mhacli.errors import MhaError, UsageError, bad_file, first_names, guarded
from mhacli.io import memory
from mhacli.io.data import Array
from mhacli.io.files import opened, read_up_to
from mhacli.io.safetensors import NUMPY, TensorFile, read_tensor_header
from mhacli.numbers import shown
from mhacli.settings import DEFAULT_MAX_BYTES, Config
from mhacli.text.tokens import Sequences, places, spaced

from .checks import TOLERANCES, SelfCheck
from .exports import HeadTable
from .heads import UNMEASURED, HeadStatistics
from .record import Environment, InspectedLayer, Model, Record, layer_prefix
from .storage import load_array

AXES = ("layer", "batch", "head", "query", "key")
ARRAYS = "arrays"
"""The architecture of a record of arrays."""
AS_GIVEN = "weights as given"
UNKNOWN_MASK = "not known: a weight of 0 may be masked"
_READINGS = {
    3: ("head,query,key", "layer,query,key"),
    4: ("layer,head,query,key", "batch,head,query,key"),
    5: ("layer,batch,head,query,key", "batch,layer,head,query,key"),
}
"""What arrays of so many axes may be."""


@dataclass(frozen=True)
class Stack:
    """The weights of layers, each `[batch, head, query, key]`, with the name of the dtype in which
    they were computed, and the numbers of the layers, if these are not counted from 0.
    """

    layers: tuple[Array, ...]
    dtype: str
    numbers: tuple[int, ...] = ()


# ------------------------------------------------------------------------------------------- arrays


def stack_of(given: Any, axes: str | Sequence[str] | None, source: str) -> Stack:
    """The weights in an array with named axes, or in a list of layers, each `[batch, head, query,
    key]`. Raises `UsageError` for axes that are not known, and for numbers that are no weights.
    """
    is_list = isinstance(given, (list, tuple))
    arrays = [array_of(each, source) for each in (given if is_list else [given])]
    if not arrays:
        raise UsageError(f"{source} has no layer")
    dtype = arrays[0][1]
    layers = list[Array]()
    for number, (array, _) in enumerate(arrays):
        where = f"layer {number} of {source}" if is_list else source
        names = _names(axes or ("batch,head,query,key" if is_list else None), array, where)
        layers += _split(array, names)
    if is_list and len(layers) > len(arrays):
        raise UsageError(f"{source} is a list of layers, whose arrays have no axis layer")
    return Stack(tuple(layers), dtype)


def array_of(given: Any, source: str) -> tuple[Array, str]:
    """An array of any library as float32 or float64, and the name of its own dtype."""
    tensor = given.detach().cpu() if hasattr(given, "detach") else given
    name = str(getattr(tensor, "dtype", "")).rpartition(".")[2]
    if name == "bfloat16":  # which numpy does not have
        tensor = tensor.float() if hasattr(tensor, "float") else tensor.astype("float32")
    try:
        array = np.asarray(tensor)
    except (TypeError, ValueError) as fault:
        raise UsageError(f"{source} is no array: {fault}") from None
    if array.dtype.kind != "f":
        raise UsageError(f"{source} has the dtype {array.dtype}, and weights are real numbers")
    wide = array.astype(np.float64 if array.dtype.itemsize > 4 else np.float32)
    return wide, name if name in TOLERANCES else str(wide.dtype)


def _names(axes: str | Sequence[str] | None, array: Array, source: str) -> tuple[str, ...]:
    """The names of the axes of an array. Two are those of queries and keys; more have to be
    named.
    """
    shape = " × ".join(map(str, array.shape))
    if axes is None and array.ndim == 2:
        return AXES[-2:]
    if axes is None:
        readings = _READINGS.get(array.ndim)
        if readings is None:
            raise UsageError(f"{source} has {array.ndim} axes, {shape}: no weights of attention")
        raise UsageError(
            f"{source} has {array.ndim} axes, {shape}, which may be {' or '.join(readings)}",
            hint=f"state them: --axes {readings[0]}",
        )
    axes = axes if isinstance(axes, str) else ",".join(map(str, axes))
    names = tuple(name.strip() for name in axes.split(","))
    is_known = set(names) <= set(AXES) and len(set(names)) == len(names)
    if not is_known or not {"query", "key"} <= set(names):
        raise UsageError(
            f"--axes {axes[:60]!r} is not of {', '.join(AXES)}, each once, with query and key"
        )
    if len(names) != array.ndim:
        raise UsageError(
            f"--axes {axes} names {len(names)} axes, and {source} has {array.ndim}: {shape}"
        )
    if 0 in array.shape:
        raise UsageError(f"{source} has an axis of length 0: {shape}")
    return names


def _split(array: Array, names: Sequence[str]) -> list[Array]:
    """The layers of an array, each `[batch, head, query, key]`."""
    missing = [name for name in AXES if name not in names]
    array = array.reshape((1,) * len(missing) + array.shape)
    order = [(*missing, *names).index(name) for name in AXES]
    return list(array.transpose(order))


def require_weights(stack: Stack, source: str) -> None:
    """Raises `MhaError` for numbers that are no attention weights, with the first place: NaN,
    infinities, weights below 0, and rows that do not sum to 1 within the rounding of the dtype.
    """
    tolerance = TOLERANCES[stack.dtype].stored_row_sum
    for number, layer in enumerate(stack.layers):
        sums = layer.sum(axis=-1, dtype=np.float64)
        for faults, numbers, why in (
            (~np.isfinite(layer), layer, "is {}"),
            (layer < 0, layer, "is {:.4g}, below 0"),
            (np.abs(sums - 1) > tolerance, sums, "sums to {:.6g} and not to 1"),
        ):
            if faults.any():
                at = tuple(int(i) for i in np.argwhere(faults)[0])
                places = zip(("sequence", "head", "query", "key"), at, strict=False)
                place = ", ".join([f"layer {number}", *(f"{name} {i}" for name, i in places)])
                kind = "the weight" if len(at) == 4 else "the row"
                raise MhaError(
                    f"{source}: {kind} at {place} {why.format(numbers[at])}",
                    hint="--raw shows numbers as they are",
                    code="not-weights",
                )


# -------------------------------------------------------------------------------------------- texts


def texts_of_tokens(tokens: Any, batch: int) -> Sequences:
    """The texts of tokens: one list for each sequence, or one for all."""
    rows = [*tokens]
    if all(isinstance(token, str) for token in rows):
        rows = [rows] * batch
    if not all(isinstance(row, (list, tuple)) and {*map(type, row)} <= {str} for row in rows):
        raise UsageError(
            "tokens are no texts, or a list of them for each sequence",
            hint="tokenizer.convert_ids_to_tokens(ids) names the tokens of ids",
        )
    ids = {token: i for i, token in enumerate(dict.fromkeys(t for row in rows for t in row))}
    return tuple(spaced(row, [ids[token] for token in row]) for row in rows)


def read_labels(path: str) -> list[Any]:
    """Tokens from a file: a JSON list, of lists for several sequences, or one token a line."""
    with opened(path) as read:
        data = read_up_to(read, DEFAULT_MAX_BYTES)
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise bad_file(path, f"{path} is not a text in UTF-8") from None
    if text.lstrip().startswith("["):
        try:
            labels = json.loads(text)
        except ValueError:
            labels = None
        rows = labels if labels and all(isinstance(row, list) for row in labels) else [labels]
        if labels and all(isinstance(token, str) for row in rows for token in row):
            return list(labels)
    return text.removesuffix("\n").split("\n")


# ------------------------------------------------------------------------------------------- record


def record_of_stack(
    stack: Stack, tokens: Any = None, *, source: str, name: str, is_raw: bool = False
) -> Record:
    """The record of weights: `name` says whose they are, and `source` stands in messages. Raises
    `MhaError` where they are no weights, unless they are `raw`, and for other counts of tokens.
    """
    batch, _, n_queries, n_keys = stack.layers[0].shape
    for number, layer in enumerate(stack.layers):
        if (layer.shape[0], *layer.shape[2:]) != (batch, n_queries, n_keys):
            raise UsageError(
                f"layer {number} of {source} has {layer.shape[2]} queries and {layer.shape[3]} keys"
                f" in {layer.shape[0]} sequences, and layer 0 {n_queries} and {n_keys} in {batch}"
            )
    if not is_raw:
        require_weights(stack, source)
    positions = None
    texts: Sequences = (places(n_keys),) * batch
    if tokens is not None:
        texts = texts_of_tokens(tokens, batch)
        lengths = [len(text.tokens) for text in texts]
        if len(texts) != batch or {n_queries, n_keys} != set(lengths):
            counts = ", ".join(map(str, lengths[:8]))
            raise UsageError(
                f"{source} has {n_queries} queries and {n_keys} keys in {batch} sequences, and"
                f" there are {counts} tokens"
            )
    elif n_queries != n_keys:
        positions = (batch, n_queries, n_keys)
    check = SelfCheck(error=None, tolerance=TOLERANCES[stack.dtype].output, ok=None, note=AS_GIVEN)
    layers = tuple(
        InspectedLayer(
            layer=number,
            name=f"layer.{number}",
            kind="self",
            captured_by="given",
            kernel="",
            n_heads=layer.shape[1],
            n_kv_heads=layer.shape[1],
            d_head=1,
            d_v=1,
            scale=None,
            softcap=None,
            mask=UNKNOWN_MASK,
            bias=False,
            sinks=False,
            verified=False,
            unverified=(AS_GIVEN,),
            self_check=check,
            survey=UNMEASURED,
            positions=positions,
        )
        for number, layer in zip(stack.numbers or count(), stack.layers, strict=False)
    )
    n_heads = layers[0].n_heads
    return Record(
        command=(),
        config=Config(
            d_model=n_heads,
            n_heads=n_heads,
            positions="none",
            dtype=stack.dtype,  # type: ignore[arg-type]
        ).resolved(),
        sequences=texts,
        context=None,
        vocabulary=(),
        trace=(),
        heads=HeadTable(
            HeadStatistics(layer=layer.layer, attention=layer.name, head=head)
            for layer in layers
            for head in range(layer.n_heads)
        ),
        timings={},
        self_check=check,
        environment=_environment(),
        model=Model(
            path=name,
            revision=None,
            family="",
            architecture=ARRAYS,
            implementation="",
            path_inspected=AS_GIVEN,
            identical_outputs=None,
            compared_len=max(len(text.tokens) for text in texts),
            n_layers=len(layers),
            n_parameters=0,
            n_vocabulary=0,
            positions="none",
            max_positions=None,
            dtype=stack.dtype,
        ),
        layers=layers,
        arrays={
            layer_prefix(number) + key: array
            for number, layer in enumerate(stack.layers)
            for key, array in _matrices(layer).items()
        },
    )


def _matrices(layer: Array) -> dict[str, Array]:
    """The weights of a layer as a record keeps them."""
    strongest = np.where(layer.max(axis=-1) > 0, layer.argmax(axis=-1), -1)
    return {
        "pattern": layer,
        "allowed": np.ones((len(layer), 1, *layer.shape[2:]), dtype=bool),
        "strongest_key": strongest,
    }


def _environment() -> Environment:
    """The versions without torch, which computed nothing."""
    return Environment(
        mha=mhacli.__version__,
        torch="–",
        numpy=np.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device="cpu",
        device_name=memory.cpu_name(),
        device_asked="auto",
        threads=1,
    )


# -------------------------------------------------------------------------------------------- files


def read_stack(path: str, axes: str | None) -> Stack:
    """The weights in a file of numpy (`.npy`, `.npz`) or safetensors: one array, or one for each
    layer, whose names differ by a number. Nothing is unpacked that memory has no room for.
    """
    with opened(path) as read:
        begin = read_up_to(read, len(NUMPY))
    is_rounded = False
    if begin == NUMPY:
        arrays = {"": guarded("the array", path, lambda: _npy(path))}
    elif begin.startswith(b"PK"):
        arrays = guarded("the archive", path, lambda: _npz(path))
    else:
        header = read_tensor_header(path)
        _require_room(sum(tensor.n_bytes for tensor in header.tensors.values()), path)
        arrays = {name: _tensor(header, name) for name in header.tensors}
        is_rounded = any(tensor.dtype == "BF16" for tensor in header.tensors.values())
    order = _in_order(arrays, path)
    given: Any = [arrays[name] for name in order.values()]
    is_of_numpy = begin == NUMPY or begin.startswith(b"PK")
    source = f"{path}, a file of numpy," if is_of_numpy else path
    stack = stack_of(given if len(given) > 1 else given[0], axes, source)
    numbers = tuple(order) if len(order) > 1 else ()
    return replace(stack, dtype="bfloat16" if is_rounded else stack.dtype, numbers=numbers)


def _tensor(file: TensorFile, name: str) -> Array:
    """A tensor of a file. One of bfloat16, which numpy does not have, becomes float32."""
    info = file.tensors[name]
    if info.dtype != "BF16":
        return load_array(file, name)
    bits = np.fromfile(file.path, np.uint16, math.prod(info.shape), offset=info.start)
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(info.shape)


def _in_order(names: Mapping[str, Any], path: str) -> dict[int, str]:
    """The names of layers by their numbers, in order. Raises `MhaError` if they differ
    otherwise.
    """
    if not names:
        raise bad_file(path, f"{path} has no array")
    if len(names) == 1:
        return dict(enumerate(names))
    numbers = {name: [*map(int, re.findall(r"\d+", name))] for name in names}
    forms = {re.sub(r"\d+", "0", name) for name in names}
    varying = [at for at in zip(*numbers.values(), strict=False) if len(set(at)) == len(names)]
    if len(forms) != 1 or len(varying) != 1:
        raise bad_file(
            path,
            f"{path} has several arrays, {first_names(names)}, whose names are not those of layers",
            hint="save the weights as one array, or a numbered array for each layer",
        )
    return dict(sorted(zip(varying[0], names, strict=True)))


def _require_room(n_bytes: int, path: str) -> None:
    if not memory.fits(2 * n_bytes, memory.available_bytes()):
        message = f"{path} is too large to read: arrays of {shown(n_bytes, 'bytes')}"
        raise MhaError(message, code="too-large", path=path)


def _npy(path: str) -> Array:
    """The array of a file, after its header was tested."""
    with open(path, "rb") as file:
        _require_declared(file, os.path.getsize(path), path)
    array: Array = np.load(path, allow_pickle=False)
    return array


def _npz(path: str) -> dict[str, Array]:
    """The arrays of an archive, after the sizes that it declares were tested."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _require_room(sum(member.file_size for member in members), path)
        for member in members:
            with archive.open(member) as file:
                _require_declared(file, member.file_size, path)
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _require_declared(file: IO[bytes], n_bytes: int, path: str) -> None:
    """Raises `MhaError` for an array of objects, and for one that declares more than its file
    has.
    """
    formats = np.lib.format
    major, _ = formats.read_magic(file)
    read: Callable[..., Any] = (
        formats.read_array_header_1_0 if major == 1 else formats.read_array_header_2_0
    )
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise bad_file(
            path, f"{path} has an array of Python objects, a pickle, which mha opens not"
        )
    if math.prod(shape) * dtype.itemsize > n_bytes:
        raise bad_file(path, f"{path} is damaged: an array of {shape} in {n_bytes:,} bytes")
    _require_room(math.prod(shape) * dtype.itemsize, path)
