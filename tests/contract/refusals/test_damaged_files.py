"""Damaged and hostile files: each is refused with its name, nothing in it runs, nothing is written,
and memory stays flat.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from support.mha import NO_TORCH, PATIENCE_S, PLAIN_SHELL, Ended, environment, run, start

Mha = Callable[..., Ended]
Arrays = dict[str, np.ndarray]
Edit = Callable[[dict[str, Any], Arrays], object]
READERS = (
    ["run", "a b c", "--heads", "2", "--weights"],
    ["show", "--json"],
    ["run", "a b c", "--score-bias"],
)
"""Commands that read a safetensors file: as weights, as a record and as a bias of the scores."""
SIZE_OF = {"F32": 4, "F16": 2, "I64": 8, "BOOL": 1, "C64": 8}
NUMPY = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "BOOL": "|b1"}
LAYER = {"embed.weight": (3, 4), **{f"{name}_proj.weight": (4, 4) for name in "qkvo"}}
MIB = 1 << 20
LITTLE_MEMORY = f"ulimit -v {600 * MIB // 1024}; {PLAIN_SHELL}"


def framed(header: object, body: bytes = b"") -> bytes:
    """A safetensors file of any header: JSON values, or bytes that are none."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def parts_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the body of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def entry(
    shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32"
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def layer_file(
    shapes: Mapping[str, Sequence[int]] = LAYER,
    dtype: str = "F32",
    numbers: Mapping[str, list[float]] | None = None,
) -> bytes:
    """A weights file that another program wrote: ones, or the `numbers` of a tensor."""
    header, body = {}, b""
    for name, shape in shapes.items():
        n = math.prod(shape)
        data = bytes(n * SIZE_OF[dtype])
        if dtype in ("F32", "F16"):
            data = struct.pack(
                f"<{n}{'f' if dtype == 'F32' else 'e'}", *(numbers or {}).get(name, [1.0] * n)
            )
        header[name] = entry(shape, (len(body), len(body) + len(data)), dtype)
        body += data
    return framed(header, body)


def edited(content: bytes, edit: Edit) -> bytes:
    """A file of ours, with its JSON and its arrays changed in place."""
    header, body = parts_of(content)
    store, arrays = bytearray(body), {}
    document = json.loads(header["__metadata__"]["mha"])
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            arrays[name] = np.frombuffer(
                memoryview(store)[begin:end], NUMPY[tensor["dtype"]]
            ).reshape(tensor["shape"])
    edit(document, arrays)
    header["__metadata__"]["mha"] = json.dumps(document)
    return framed(header, bytes(store))


def require_bad_file(mha: Mha, words: Sequence[str], name: str, *pieces: str) -> Ended:
    """Asserts that a command refuses a file in a short message that mentions it and the pieces, and
    prints nothing else.
    """
    words = words if "--json" in words else [words[0], "--json", *words[1:]]
    ended = mha(*words, name, code=1)
    assert ended.error["code"] == "bad-file"
    assert ended.missing(name, *pieces) == []
    return ended


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A record of two texts and a weights file, as they are written."""
    folder = tmp_path_factory.mktemp("saved")
    layer = ["--d-model", "8", "--heads", "2", "--repeat", "1", "--view", "none"]
    run(folder, "run", "the cat sat", "a dog", "--causal", *layer, "--save", "record")
    run(folder, "run", "a b c", *layer, "--no-bias", "--save-weights", "weights")
    return {name: (folder / name).read_bytes() for name in ("record", "weights")}


# ------------------------------------------------------------------------------------ the container

HEADERS = {
    "empty": b"",
    "7 bytes": b"\0" * 7,
    "length 2^63": struct.pack("<Q", 1 << 63),
    "length of 100 MB": struct.pack("<Q", 100_000_001),
    "length over the file": struct.pack("<Q", 50) + b"{}",
    "no UTF-8": framed(b'{"\xff": 1}'),
    "no JSON": framed(b"hello"),
    "UTF-16": framed("{}".encode("utf-16-le")),
    "an array": framed([1]),
    "a deep list": framed(b"[" * 100_000),
    "a deep object": framed(b'{"a":' * 100_000),
    "deep metadata": framed({"__metadata__": {"mha": "[" * 100_000}}),
    "names that occur twice": framed(
        b'{"twin":%b,"twin":%b}' % ((b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}',) * 2),
        bytes(8),
    ),
    "metadata that is a number": framed({"__metadata__": {"mha": 5}}),
    "metadata that is cut": framed({"__metadata__": {"mha": "{"}}),
    "5,000 digits": framed(
        b'{"a": {"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'
    ),
}
ENTRIES: dict[str, tuple[dict[str, object], int]] = {
    "cut by one byte": ({"odd": entry()}, 7),
    "one byte too many": ({"odd": entry()}, 9),
    "overlap": ({"a": entry(), "odd": entry(offsets=(4, 12))}, 12),
    "gap": ({"a": entry(), "odd": entry(offsets=(9, 17))}, 17),
    "reversed": ({"odd": entry(offsets=(8, 0))}, 8),
    "negative": ({"odd": entry(offsets=(-8, 0))}, 8),
    "offset 2^70": ({"odd": entry(offsets=(0, 1 << 70))}, 8),
    "shape of 2^64 bytes": ({"odd": entry(shape=(1 << 62, 4))}, 8),
    "rank 1000": ({"odd": entry(shape=[1] * 1000)}, 8),
    "true in a shape": ({"odd": entry(shape=[True, 2])}, 8),
    "another size": ({"odd": entry(shape=[3])}, 8),
    "unknown dtype": ({"odd": entry(dtype="F33")}, 8),
    "no offsets": ({"odd": {"dtype": "F32", "shape": [2]}}, 8),
    "null": ({"odd": None}, 8),
}
DAMAGED = {**HEADERS, **{name: framed(header, bytes(n)) for name, (header, n) in ENTRIES.items()}}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_container_is_refused_by_every_reader(
    what: str, mha: Mha, tmp_path: Path
) -> None:
    (tmp_path / "made.safetensors").write_bytes(DAMAGED[what])
    for words in READERS[1:2] if what in ENTRIES else READERS:
        require_bad_file(mha, words, "made.safetensors")


def test_a_name_that_occurs_twice_is_why_a_file_is_refused(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "made.safetensors").write_bytes(HEADERS["names that occur twice"])
    for words in (*READERS, ["weights", "info"]):
        require_bad_file(mha, words, "made.safetensors", "twin", "twice")


def test_a_word_that_is_no_number_in_json_is_named(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text('{"schema": "mha.vocab/1", "tokens": NaN}')
    require_bad_file(mha, ["run", "a", "--vocab"], "words.json", "NaN")


def test_an_error_in_the_json_of_a_header_has_the_path_of_its_file(
    mha: Mha, tmp_path: Path
) -> None:
    (tmp_path / "made.safetensors").write_bytes(HEADERS["no JSON"])
    assert require_bad_file(mha, READERS[1], "made.safetensors").error["path"] == "made.safetensors"


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(100_000_001, id="header over 100 MB"),
        pytest.param(1 << 20, id="header of zeros", marks=pytest.mark.real),
    ],
)
def test_a_huge_damaged_file_takes_no_memory(length: int, mha: Mha, tmp_path: Path) -> None:
    with (tmp_path / "made.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(8 << 30)
    for words in READERS[:2]:
        ended = mha(*words, "made.safetensors", code=1, shell=LITTLE_MEMORY, modules=NO_TORCH)
        assert "made.safetensors" in ended.said


@pytest.mark.parametrize(
    "name",
    ["\x1b]52;c;aGk=\x07\u202e", "../../x", "", "m" * 1_000_000],
    ids=["escapes", "climbing", "empty", "megabyte"],
)
def test_a_hostile_tensor_name_is_refused_and_nothing_is_written(
    name: str, mha: Mha, tmp_path: Path
) -> None:
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    (folder / "made.safetensors").write_bytes(framed({name: entry(dtype="I9")}, bytes(8)))
    for words in READERS:
        require_bad_file(mha, words, "one/two/made.safetensors")
    (folder / "made.safetensors").write_bytes(layer_file({**LAYER, name[:1000]: (2,)}))
    require_bad_file(mha, READERS[0], "one/two/made.safetensors")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["made.safetensors", "one", "two"]


class Trap:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch sprung",)


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("w.pt", zipped()),
        ("w.pth", pickle.dumps(Trap())),
        ("w.BIN", pickle.dumps(Trap(), 0)),
        ("w.pkl", pickle.dumps(Trap())),
        ("w.ckpt", zipped()),
        ("w.safetensors", pickle.dumps(Trap())),
        ("w.safetensors", pickle.dumps(Trap(), 2)),
        ("w.safetensors", zipped()),
    ],
    ids=["pt", "pth", "bin", "pkl", "ckpt", "protocol 4", "protocol 2", "zip"],
)
def test_a_pickle_is_refused_unopened_with_the_way_to_convert(
    name: str, content: bytes, mha: Mha, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    for words in READERS[:2]:
        require_bad_file(mha, words, name, "pickle", "safetensors.torch.save_file")
    assert not (tmp_path / "sprung").exists()


# ------------------------------------------------------------------------------------------ weights

WEIGHTS = ["run", "a b c", "--heads", "2", "--weights"]
NOT_FINITE = [1.0] * 6 + [math.nan, 1.0, 1.0, math.inf] + [1.0] * 6
LARGE = [75.0 if row >= 2 else 1.0 for row in range(4) for _ in range(4)]


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "C64", "F4"])
def test_a_dtype_that_is_no_weight_is_refused_with_those_that_are(
    dtype: str, mha: Mha, tmp_path: Path
) -> None:
    content = (
        framed({"embed.weight": entry((2, 2), (0, 2), "F4")}, bytes(2))
        if dtype == "F4"
        else layer_file(dtype=dtype)
    )
    (tmp_path / "made.safetensors").write_bytes(content)
    require_bad_file(mha, WEIGHTS, "made.safetensors", "embed.weight", dtype, "F32", "BF16")


def test_all_tensors_that_do_not_fit_are_listed(mha: Mha, tmp_path: Path) -> None:
    shapes = {
        **LAYER,
        "k_proj.weight": (4, 5),
        "v_proj.weight": (4, 7),
        "extra.one": (1,),
        "extra.two": (2,),
    }
    (tmp_path / "made.safetensors").write_bytes(layer_file({**shapes, "q_proj.bias": (4,)}))
    pieces = (
        "k_proj.weight",
        "[4, 5]",
        "v_proj.weight",
        "[4, 7]",
        "[4, 4]",
        "k_proj.bias",
        "extra.one",
        "extra.two",
    )
    require_bad_file(mha, WEIGHTS, "made.safetensors", *pieces)


def test_the_matrices_that_a_layer_cannot_lack_are_listed(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "made.safetensors").write_bytes(
        layer_file({"embed.weight": (3, 4), "q_proj.weight": (4, 4)})
    )
    require_bad_file(mha, WEIGHTS, "made.safetensors", "k_proj.weight", "v_proj.weight")


def test_numbers_that_are_not_finite_are_counted_and_placed(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "made.safetensors").write_bytes(layer_file(numbers={"k_proj.weight": NOT_FINITE}))
    ended = mha(*WEIGHTS, "made.safetensors", "--json", code=1)
    for piece in ("made.safetensors", "k_proj.weight", " 2 ", "[1, 2]", "--allow-nonfinite"):
        assert piece in ended.said
    assert mha(*WEIGHTS, "made.safetensors", "--json", "--allow-nonfinite").json["pattern"]


def test_a_transposed_square_matrix_is_noticed_by_the_stored_outputs(
    mha: Mha, tmp_path: Path, saved: dict[str, bytes]
) -> None:
    def transpose(document: dict[str, Any], arrays: Arrays) -> None:
        arrays["q_proj.weight"][:] = arrays["q_proj.weight"].T.copy()

    (tmp_path / "made.safetensors").write_bytes(edited(saved["weights"], transpose))
    ended = mha("run", "a b c", "--weights", "made.safetensors", "--json", code=3)
    assert "made.safetensors" in ended.said
    assert ended.stdout == ""


def test_an_overflow_of_16_bits_names_the_head(mha: Mha, tmp_path: Path) -> None:
    content = layer_file(dtype="F16", numbers={"q_proj.weight": LARGE, "k_proj.weight": LARGE})
    (tmp_path / "made.safetensors").write_bytes(content)
    ended = mha(*WEIGHTS, "made.safetensors", "--positions", "none", "--json", code=1)
    for piece in ("head 1", "float16", "--dtype"):
        assert piece in ended.said


@pytest.mark.parametrize(
    ("change", "code", "mentioned"),
    [
        ({"n_heads": 8, "n_kv_heads": 3, "d_head": 1, "d_v": 1}, (1, 2), "3"),
        ({"n_heads": 10**9}, (1, 2), "1000000000"),
        ({"n_heads": "2"}, 1, "n_heads"),
        ({"positions": "polar"}, (1, 2), "polar"),
        ({"d_model": -8}, (1, 2), "-8"),
        ({"dtype": "int8"}, (1, 2), "int8"),
    ],
    ids=str,
)
def test_a_config_of_weights_that_breaks_a_rule_is_refused(
    change: dict[str, object],
    code: int,
    mentioned: str,
    mha: Mha,
    tmp_path: Path,
    saved: dict[str, bytes],
) -> None:
    content = edited(saved["weights"], lambda document, arrays: document["config"].update(change))
    (tmp_path / "made.safetensors").write_bytes(content)
    assert (
        mentioned in mha("run", "a b c", "--weights", "made.safetensors", "--json", code=code).said
    )


@pytest.mark.real
@pytest.mark.parametrize("fate", ["truncated", "replaced"])
def test_weights_that_change_while_they_are_in_use_do_no_harm(
    fate: str, tmp_path: Path, saved: dict[str, bytes]
) -> None:
    """The text comes after the weights have been read: a pipe takes no more than a part of it
    before.
    """
    weights = tmp_path / "w"
    weights.write_bytes(saved["weights"])
    words = ["run", "--weights", "w", "-", "--json"]
    process = start(
        tmp_path, *words, env=environment(tmp_path), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert process.stdin is not None
    process.stdin.write(b" " * 100_000)
    process.stdin.flush()
    if fate == "truncated":
        os.truncate(weights, 0)
    else:
        weights.write_bytes(b"x" * len(saved["weights"]))
    stdout, stderr = process.communicate(b"a b c", timeout=PATIENCE_S)
    assert process.returncode in (0, 1)
    assert b"Traceback" not in stderr
    assert process.returncode or json.loads(stdout)["self_check"]["ok"]


# ------------------------------------------------------------------------------------------ records

IMPOSSIBLE: dict[str, Edit] = {
    "no schema": lambda d, a: d.pop("schema"),
    "a later schema": lambda d, a: d.update(schema="mha.record/2"),
    "offsets beyond the text": lambda d, a: d["sequences"][0]["offsets"].__setitem__(2, [9, 99]),
    "offsets that are reversed": lambda d, a: d["sequences"][0]["offsets"].__setitem__(2, [7, 3]),
    "an id beyond the vocabulary": lambda d, a: d["sequences"][0]["ids"].__setitem__(0, 10**6),
    "more tokens than ids": lambda d, a: d["sequences"][0]["tokens"].append("more"),
    "no sequences": lambda d, a: d.update(sequences=[]),
    "a context too many": lambda d, a: d.update(context=d["sequences"] * 2),
    "a head beyond the heads": lambda d, a: d["heads"][0].update(head=9),
    "a head twice": lambda d, a: d["heads"][0].update(head=1),
    "a sink beyond the keys": lambda d, a: d["heads"][0].update(
        sinks=[{"sequence": 0, "key": 77, "share": 0.5, "uniform": 0.1}]
    ),
    "no heads in the config": lambda d, a: d["config"].update(n_heads=0),
    "kv heads that do not divide": lambda d, a: d["config"].update(n_kv_heads=3),
    "an unknown dtype": lambda d, a: d["config"].update(dtype="int8"),
    "a negative count": lambda d, a: d["trace"][0].update(flops=-1),
    "a negative time": lambda d, a: next(iter(d["timings"].values())).update(median_s=-1.0),
    "a number of 400 digits": lambda d, a: d["trace"][0].update(flops=10**400),
    "weights above 1": lambda d, a: a["pattern"].__setitem__((0, 0, 0, 0), 1.5),
    "entropy below 0": lambda d, a: a["entropy"].__setitem__((0, 0, 2), -1.0),
    "a strongest key that is none": lambda d, a: a["strongest_key"].__setitem__((0, 1, 2), 1 << 40),
    "a mask of other bytes": lambda d, a: a["allowed"].view(np.uint8).__setitem__((0, 0, 0, 0), 7),
}


def exchange(document: dict[str, Any], arrays: Arrays) -> None:
    """Two weights of a row in each other's place."""
    row = arrays["pattern"][0, 1, 2]
    assert abs(row[0] - row[1]) > 0.01
    row[[0, 1]] = row[[1, 0]]


def mask(document: dict[str, Any], arrays: Arrays) -> None:
    arrays["pattern"][0, 0, 0] = [0.5, 0.5, 0.0]


CONTRADICTORY: dict[str, Edit] = {
    "rows that do not sum to 1": lambda d, a: a["pattern"][0, 0, 2].__itruediv__(2),
    "weights of masked keys": mask,
    "weights that the scores do not give": exchange,
    "another strongest key": lambda d, a: a["strongest_key"].__setitem__(
        (0, 0, 2), (a["pattern"][0, 0, 2].argmax() + 1) % 3
    ),
    "another entropy of a row": lambda d, a: a["entropy"].__setitem__((0, 0, 2), 0.1),
    "another entropy of a head": lambda d, a: d["heads"][0].update(entropy=9.0),
    "a check that is not ok": lambda d, a: d["self_check"].update(max_abs_error=99.0),
}


@pytest.mark.parametrize("what", [*IMPOSSIBLE, *CONTRADICTORY])
def test_an_altered_record_is_never_taken_for_whole(
    what: str, mha: Mha, tmp_path: Path, saved: dict[str, bytes]
) -> None:
    """It is refused, or shown with the verdict that it is not right: 3."""
    (tmp_path / "r").write_bytes(edited(saved["record"], {**IMPOSSIBLE, **CONTRADICTORY}[what]))
    ended = mha("show", "r", "--json", code=1 if what in IMPOSSIBLE else (1, 3))
    if ended.code == 1:
        assert ended.error["code"] == "bad-file"
        assert ended.error["message"].startswith("r")
    if what in CONTRADICTORY:
        assert mha("diff", "r", "r", "--json", code=(1, 3)).code == ended.code


@pytest.mark.parametrize(
    "form", [(), ("--csv",), ("--html", "p.html"), ("--svg", "p.svg")], ids=" ".join
)
def test_every_form_of_a_record_that_contradicts_itself_ends_with_3_or_is_refused(
    form: tuple[str, ...], mha: Mha, tmp_path: Path, saved: dict[str, bytes]
) -> None:
    (tmp_path / "r").write_bytes(
        edited(saved["record"], CONTRADICTORY["rows that do not sum to 1"])
    )
    assert mha("show", "r", *form, code=(1, 3)).stderr


@pytest.mark.parametrize("name", ["entropy", "allowed", "strongest_key"])
def test_an_array_that_every_view_needs_must_be_there_in_its_shape(
    name: str, mha: Mha, tmp_path: Path, saved: dict[str, bytes]
) -> None:
    header, body = parts_of(saved["record"])
    shape = header[name]["shape"]
    for change in (
        {"renamed": header[name]},
        {name: {**header[name], "shape": [math.prod(shape)]}},
    ):
        changed = {key: value for key, value in header.items() if key != name} | change
        (tmp_path / "r").write_bytes(framed(changed, body))
        require_bad_file(mha, ["show"], "r", name)


def test_an_array_of_a_later_version_does_not_disturb(
    mha: Mha, tmp_path: Path, saved: dict[str, bytes]
) -> None:
    header, body = parts_of(saved["record"])
    header["later"] = entry((3,), (len(body), len(body) + 12))
    (tmp_path / "r").write_bytes(framed(header, body + bytes(12)))
    (tmp_path / "whole").write_bytes(saved["record"])
    assert mha("show", "r", "--json").json == mha("show", "whole", "--json").json


@pytest.mark.real
@pytest.mark.parametrize("seed", range(2))
def test_bytes_that_were_changed_or_cut_break_no_command(
    seed: int, mha: Mha, tmp_path: Path, saved: dict[str, bytes]
) -> None:
    """Runs keep what always holds; 0 may be where the byte stands in a word that any text may
    be.
    """
    chance = random.Random(seed)
    for _ in range(12):
        content = bytearray(saved["record"])
        place = (
            chance.randrange(len(content))
            if chance.random() < 0.5
            else chance.randrange(min(len(content), 9000))
        )
        if chance.random() < 0.2:
            del content[place:]
        else:
            content[place] = chance.choice(b'\0\x1b"{}[],:09-eE\xff\x80')
        (tmp_path / "r").write_bytes(content)
        for form in (["--json"], ["--view", "matrix", "--all"], ["--csv"]):
            mha("show", "r", *form, code=(0, 1, 3))


VALUES = [
    None,
    True,
    -1,
    0,
    3,
    2**40,
    10**400,
    1e307,
    "",
    "\x1b[2J\u202e\ud800",
    [],
    [[]],
    {},
    {"a": 1},
]


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every holder in a document with each of its keys."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, item in items for place in ((value, key), *places_in(item))]


@pytest.mark.real
@pytest.mark.parametrize("seed", range(2))
def test_a_field_of_any_other_value_breaks_no_command(
    seed: int, mha: Mha, tmp_path: Path, saved: dict[str, bytes]
) -> None:
    chance = random.Random(seed)

    def alter(document: dict[str, Any], arrays: Arrays) -> None:
        holder, key = chance.choice(places_in(document))
        if chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = chance.choice(VALUES)

    for _ in range(12):
        (tmp_path / "r").write_bytes(edited(saved["record"], alter))
        for form in (["--json"], ["--view", "heatmap", "--all", "--verbose"]):
            mha("show", "r", *form, code=(0, 1, 3))


def test_an_array_of_a_record_in_an_unknown_kind_of_numbers_is_refused(
    mha: Any, tmp_path: Path
) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    mha("run", "the cat sat", "--heads", "2", "--save", "whole.safetensors")
    with safe_open(tmp_path / "whole.safetensors", "np") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}
    save_file(
        arrays | {"entropy": arrays["entropy"].astype(np.int16)},
        tmp_path / "other.safetensors",
        metadata,
    )
    ended = mha("show", "other.safetensors", "--json", code=1)
    assert ended.error["code"] == "bad-file"
    assert "I16" in ended.error["message"]
