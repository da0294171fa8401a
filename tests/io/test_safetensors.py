import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load, save

from mhacli.errors import MhaError
from mhacli.io import safetensors as tensorfile
from mhacli.io.safetensors import TensorInfo, read_tensor_file, shown_name, tensors_of

LIMIT = 1 << 30


def content(header, body=b"", *, length=None):
    """A file with this header, which may be text, bytes, or anything that JSON can say."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def fault_of(tmp_path):
    """The message about a file with this content, less its path, and the hint."""

    def fault(data, name="weights.safetensors", limit=LIMIT):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(MhaError) as caught:
            read_tensor_file(str(path), limit)
        assert caught.value.path in (str(path), None)
        return caught.value.message.removeprefix(str(path)).removeprefix(" "), caught.value.hint

    return fault


def test_a_file_of_the_library_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.int64), "c": np.array(True)}
    path.write_bytes(save(arrays, metadata={"mha": '{"n": 1}', "other": "x"}))
    file = read_tensor_file(str(path), LIMIT)
    assert file.metadata == {"n": 1}
    assert file.data == path.read_bytes()
    assert {name: (info.dtype, info.shape) for name, info in file.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (0, 4)),
        "c": ("BOOL", ()),
    }


def test_a_file_without_our_metadata_has_none(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content({"w": entry()}, b"12345678"))
    assert read_tensor_file(str(path), LIMIT).metadata is None
    assert read_tensor_file(str(path), LIMIT).tensors == {"w": TensorInfo("F32", (2,), 0, 8)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must begin with 8 bytes of header length, got a file of 0 bytes"),
        (b"1234567", "must begin with 8 bytes of header length, got a file of 7 bytes"),
        (
            content({}, length=100_000_001),
            "must have a header of at most 100000000 bytes, got a header length of 100000001",
        ),
        (
            content({}, length=2**64 - 1),
            f"must have a header of at most 100000000 bytes, got a header length of {2**64 - 1}",
        ),
        (content("{}", length=3), "must hold its whole header of 3 bytes, got a file of 10 bytes"),
        (content([]), "must have a JSON object as header, got list"),
        (content(b"\xef\xbb\xbf{}"), "must begin its header with {, got b'\\xef\\xbb\\xbf{}'"),
        (content(" {}"), "must begin its header with {, got b' {}'"),
        (content({"__metadata__": [1]}), "must have metadata that maps names to strings, got [1]"),
        (content({"__metadata__": {"mha": 1}}), "must have metadata that maps names to strings, got {'mha': 1}"),
        (content({"": entry()}), "must name its tensors with 1 to 1024 characters, got '' of 0"),
        (
            content({"n" * 1025: entry()}),
            f"must name its tensors with 1 to 1024 characters, got '{'n' * 40} … {'n' * 20}' of 1025",
        ),
        (
            content({"w": {"dtype": "F32", "shape": []}}),
            "must give dtype, shape and data_offsets for tensor 'w', got {'dtype': 'F32', 'shape': []}",
        ),
        (content({"w": 3}), "must give dtype, shape and data_offsets for tensor 'w', got 3"),
        (content({"w": entry(dtype="F31")}), "must give tensor 'w' a dtype of the format, got 'F31'"),
        (content({"w": entry(dtype=["F32"])}), "must give tensor 'w' a dtype of the format, got ['F32']"),
        (content({"w": entry([-1])}), "must give tensor 'w' a shape of at most 64 counts, got [-1]"),
        (content({"w": entry([True])}), "must give tensor 'w' a shape of at most 64 counts, got [True]"),
        (content({"w": entry([1.0])}), "must give tensor 'w' a shape of at most 64 counts, got [1.0]"),
        (content({"w": entry([2**63])}), f"must give tensor 'w' a shape of at most 64 counts, got [{2**63}]"),
        (content({"w": entry(offsets=[0])}), "must give tensor 'w' two offsets, start and end, got [0]"),
        (content({"w": entry(offsets=[8, 0])}), "must give tensor 'w' two offsets, start and end, got [8, 0]"),
        (content({"w": entry([3])}, b"12345678"), "must hold 12 bytes for tensor 'w', got 8"),
        (
            content({"v": entry(), "w": entry(offsets=[4, 12])}, b"123456789012"),
            "must hold its tensors side by side, got tensor 'w', which overlaps the one before it",
        ),
        (
            content({"v": entry(), "w": entry(offsets=[9, 17])}, b"x" * 17),
            "must hold its tensors side by side, got tensor 'w', which leaves a gap to the one before it",
        ),
        (
            content({"w": entry(offsets=[1, 9])}, b"x" * 9),
            "must hold its tensors side by side, got tensor 'w', which leaves a gap to the one before it",
        ),
        (
            content({"w": entry()}, b"12345"),
            "must be whole, but it is cut 3 B before the end of tensor 'w', got 5 bytes",
        ),
    ],
)
def test_each_fault_of_a_header_is_named_with_its_rule(fault_of, data, message):
    assert fault_of(data) == (message, None)


def test_what_the_library_refuses_of_a_checked_file_is_an_error_about_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content('{"w":{"dtype":"F32","shape":[-0],"data_offsets":[0,-0]}}'))
    file = read_tensor_file(str(path), LIMIT)
    with pytest.raises(MhaError) as caught:
        tensors_of(file, load)
    assert (caught.value.code, caught.value.path) == ("bad-file", str(path))


def test_a_rank_beyond_the_limit_is_refused(fault_of):
    message, _ = fault_of(content({"w": entry([1] * 65, (0, 4))}, b"1234"))
    assert message.startswith("must give tensor 'w' a shape of at most 64 counts, got [1, 1, 1, ")


@pytest.mark.parametrize("header", [{"w": entry()}, {}])
def test_bytes_after_the_last_tensor_are_refused(fault_of, header):
    message, _ = fault_of(content(header, b"12345678" * bool(header) + b"9"))
    assert message.startswith("must end with ")


@pytest.mark.parametrize(
    ("header", "place"),
    [
        ("{", "header must be JSON, got: "),
        (b"\xff{}", "header must be UTF-8, got a bad byte at 0"),
        ("{}".encode("utf-16-le"), "header must be JSON, got: "),
        ("[" * 100_000, "header must be JSON of moderate depth, got deeper nesting"),
        ('{"w": 1, "w": 2}', "header must be JSON, got: the name 'w' stands twice"),
        ({"__metadata__": {"mha": "{"}}, "metadata must be JSON, got: "),
    ],
)
def test_json_that_is_none_is_told_with_its_place(fault_of, header, place):
    assert fault_of(content(header))[0].startswith(f": {place}")


@pytest.mark.parametrize("ending", [".pt", ".PTH", ".bin", ".pkl", ".pickle", ".ckpt"])
def test_a_pickle_is_refused_by_its_name_without_being_read(ending):
    with pytest.raises(MhaError) as caught:
        read_tensor_file(f"/nowhere/model{ending}", LIMIT)
    assert caught.value.message == (
        f"model{ending} must be a safetensors file, and its name says that it is a pickle: "
        "pickles can run code and are never opened"
    )


@pytest.mark.parametrize(("first", "kind"), [(b"PK\3\4", "zip"), (b"\x80\2}q", "pickle"), (b"\x80\5", "pickle")])
def test_a_pickle_is_refused_by_its_first_bytes(fault_of, first, kind):
    message, hint = fault_of(first + b"x" * 20, "model.safetensors")
    assert message == (
        f"model.safetensors must be a safetensors file, and its first bytes are those of a {kind}: "
        "pickles can run code and are never opened"
    )
    assert hint == "where you trust it: torch.load(…, weights_only=True), then safetensors.torch.save_file"


def test_a_file_beyond_the_limit_is_refused(fault_of):
    message, _ = fault_of(content({"w": entry((512,), (0, 2048))}, b"x" * 2048), limit=1024)
    assert message.startswith("must have at most 1.0 KiB, got ")


def test_a_file_that_memory_does_not_hold_three_times_is_refused(fault_of, monkeypatch):
    data = content({"w": entry((512,), (0, 2048))}, b"x" * 2048)
    monkeypatch.setattr(tensorfile.memory, "available_bytes", lambda: 7680)
    assert fault_of(data)[0].startswith("must have at most 2.0 KiB, got ")


def test_a_long_name_is_shortened_in_the_middle():
    assert shown_name("n" * 80) == repr("n" * 80)
    assert shown_name("a" * 50 + "b" * 50) == repr("a" * 40 + " … " + "b" * 20)
