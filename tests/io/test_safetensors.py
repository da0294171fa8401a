import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load, save

from mhacli.errors import MhaError
from mhacli.io import safetensors as tensorfile
from mhacli.io.safetensors import TensorInfo, read_tensor_file, shown_name, tensors_of

LIMIT = 1 << 30
DTYPES = (
    "F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8, BOOL, C64"
    ", F8_E4M3, F8_E5M2, F8_E8M0, F4, F6_E2M3, F6_E3M2"
)


def content(header, body=b"", *, length=None):
    """A file with this header, which may be text, bytes, or any JSON value."""
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
        return caught.value.message.removeprefix(f"{path}: "), caught.value.hint

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
        (b"", "the file has 0 bytes, less than the 8 of a safetensors file without tensors"),
        (b"1234567", "the file has 7 bytes, less than the 8 of a safetensors file without tensors"),
        (
            content({}, length=100_000_001),
            "the header has 100000001 bytes by its first 8 bytes, more than 100000000",
        ),
        (
            content({}, length=2**64 - 1),
            f"the header has {2**64 - 1} bytes by its first 8 bytes, more than 100000000",
        ),
        (b"\x7b" + b"\0" * 7, "the file of 8 bytes is cut off within its header of 123 bytes"),
        (content("{}", length=3), "the file of 10 bytes is cut off within its header of 3 bytes"),
        (content([]), "the header is not a JSON object but []"),
        (content(b"\xef\xbb\xbf{}"), "the header begins with b'\\xef\\xbb\\xbf{}', not with {"),
        (content(" {}"), "the header begins with b' {}', not with {"),
        (content({"__metadata__": [1]}), "__metadata__ must map names to strings, got [1]"),
        (content({"__metadata__": {"mha": 1}}), "__metadata__ must map names to strings, got {'mha': 1}"),
        (content({"": entry()}), "tensor '' has a name of 0 characters: at least 1, at most 1024"),
        (
            content({"n" * 1025: entry()}),
            f"tensor '{'n' * 40} … {'n' * 20}' has a name of 1025 characters: at least 1, at most 1024",
        ),
        (
            content({"w": {"dtype": "F32", "shape": []}}),
            "tensor 'w' lacks dtype, shape or data_offsets: {'dtype': 'F32', 'shape': []}",
        ),
        (content({"w": 3}), "tensor 'w' lacks dtype, shape or data_offsets: 3"),
        (content({"w": entry(dtype="F31")}), f"tensor 'w' has dtype 'F31', which is not one of {DTYPES}"),
        (content({"w": entry(dtype=["F32"])}), f"tensor 'w' has dtype ['F32'], which is not one of {DTYPES}"),
        (content({"w": entry([-1])}), "tensor 'w' has shape [-1], which is not a list of at most 64 counts"),
        (content({"w": entry([True])}), "tensor 'w' has shape [True], which is not a list of at most 64 counts"),
        (content({"w": entry([1.0])}), "tensor 'w' has shape [1.0], which is not a list of at most 64 counts"),
        (content({"w": entry([2**63])}), f"tensor 'w' has shape [{2**63}], which is not a list of at most 64 counts"),
        (content({"w": entry(offsets=[0])}), "tensor 'w' has data_offsets [0], which are not a start and an end"),
        (content({"w": entry(offsets=[8, 0])}), "tensor 'w' has data_offsets [8, 0], which are not a start and an end"),
        (content({"w": entry([3])}, b"12345678"), "tensor 'w' has 8 bytes by its offsets, 12 by its shape and dtype"),
        (
            content({"v": entry(), "w": entry(offsets=[4, 12])}, b"123456789012"),
            "tensor 'w' overlaps the tensor before it",
        ),
        (
            content({"v": entry(), "w": entry(offsets=[9, 17])}, b"x" * 17),
            "tensor 'w' leaves a gap after the tensor before it",
        ),
        (
            content({"w": entry(offsets=[1, 9])}, b"x" * 9),
            "tensor 'w' leaves a gap after the tensor before it",
        ),
        (
            content({"w": entry()}, b"12345"),
            "the file is cut off 3 B before the end of tensor 'w'",
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
    assert message.startswith("tensor 'w' has shape [1, 1, 1, ")


@pytest.mark.parametrize("header", [{"w": entry()}, {}])
def test_bytes_after_the_last_tensor_are_refused(fault_of, header):
    message, _ = fault_of(content(header, b"12345678" * bool(header) + b"9"))
    assert message.startswith("the file has bytes after its ")


@pytest.mark.parametrize(
    ("header", "place"),
    [
        ("{", "header is not JSON: "),
        (b"\xff{}", "header is not UTF-8: byte 0"),
        ("{}".encode("utf-16-le"), "header is not JSON: "),
        ("[" * 100_000, "header is JSON that is nested too deeply"),
        ('{"w": 1, "w": 2}', "header is not JSON: the name 'w' occurs twice"),
        ({"__metadata__": {"mha": "{"}}, "metadata is not JSON: "),
    ],
)
def test_json_that_is_none_is_reported_with_its_place(fault_of, header, place):
    assert fault_of(content(header))[0].startswith(place)


@pytest.mark.parametrize("ending", [".pt", ".PTH", ".bin", ".pkl", ".pickle", ".ckpt"])
def test_a_pickle_is_refused_by_its_name_without_being_read(ending):
    with pytest.raises(MhaError) as caught:
        read_tensor_file(f"/nowhere/model{ending}", LIMIT)
    assert caught.value.message == (
        f"model{ending} is not a safetensors file: its name is that of a pickle, and mha opens no pickles, which can run code"
    )


@pytest.mark.parametrize(("first", "kind"), [(b"PK\3\4", "zip"), (b"\x80\2}q", "pickle"), (b"\x80\5", "pickle")])
def test_a_pickle_is_refused_by_its_first_bytes(fault_of, first, kind):
    message, hint = fault_of(first + b"x" * 20, "model.safetensors")
    assert message == (
        f"model.safetensors is not a safetensors file: its first bytes are those of a {kind}, "
        "and mha opens no pickles, which can run code"
    )
    assert hint == "if you trust it, convert it with torch.load(…, weights_only=True) and safetensors.torch.save_file"


def test_a_file_beyond_the_limit_is_refused(fault_of):
    message, _ = fault_of(content({"w": entry((512,), (0, 2048))}, b"x" * 2048), limit=1024)
    assert message.endswith("at most 1.0 KiB")


def test_a_file_that_memory_does_not_hold_three_times_is_refused(fault_of, monkeypatch):
    data = content({"w": entry((512,), (0, 2048))}, b"x" * 2048)
    monkeypatch.setattr(tensorfile.memory, "available_bytes", lambda: 7680)
    assert fault_of(data)[0].endswith("at most 2.0 KiB")


def test_a_long_name_is_shortened_in_the_middle():
    assert shown_name("n" * 80) == repr("n" * 80)
    assert shown_name("a" * 50 + "b" * 50) == repr("a" * 40 + " … " + "b" * 20)


@pytest.mark.parametrize("data", [b'{\n  "architectures": []}', b"the cat sat", b"12345678"])
def test_a_text_file_is_named_as_one_with_what_to_give_instead(tmp_path, data):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(MhaError) as caught:
        read_tensor_file(str(path), LIMIT)
    assert (caught.value.code, caught.value.message) == ("bad-file", f"{path} is a text file, not a safetensors file")
    assert caught.value.hint == "--weights takes a .safetensors file, --model the folder of a checkpoint"
