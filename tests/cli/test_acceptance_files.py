"""What the installed program answers to damaged and hostile weights files and records, and to options that cannot work."""

import io
import json
import math
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from support.processes import WITH_TORCH, Launch, attempt, forms, limited_memory, start

SIZE_OF = {"F32": 4, "F16": 2, "I64": 8, "BOOL": 1, "C64": 8}
LAYER = {
    "embed.weight": (3, 4),
    "q_proj.weight": (4, 4),
    "k_proj.weight": (4, 4),
    "v_proj.weight": (4, 4),
    "o_proj.weight": (4, 4),
}
CHANGEABLE = "made.safetensors"

readers = pytest.mark.parametrize(
    ("words", "form"),
    [(["run", "a b c", "--weights"], ()), (["show"], ("--json",))],
    ids=["weights-plain", "record-json"],
)
commands = pytest.mark.parametrize(
    ("command", "form"), [("run", ()), ("trace", ("--json",))], ids=["run-plain", "trace-json"]
)


def framed(header: object, body: bytes = b"") -> bytes:
    """A safetensors file of any header: JSON values, or bytes that are none."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def layer_file(
    shapes: Mapping[str, tuple[int, ...]] = LAYER, dtype: str = "F32", numbers: Mapping[str, list[float]] | None = None
) -> bytes:
    """A weights file without our metadata: ones, or the `numbers` of a tensor."""
    header, body = {}, b""
    for name, shape in shapes.items():
        n = math.prod(shape)
        data = bytes(n * SIZE_OF[dtype])
        if dtype in ("F32", "F16"):
            data = struct.pack(f"<{n}{'f' if dtype == 'F32' else 'e'}", *(numbers or {}).get(name, [1.0] * n))
        header[name] = entry(shape, (len(body), len(body) + len(data)), dtype)
        body += data
    return framed(header, body)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The content of a weights file of ours, for the words a, b, c."""
    folder = tmp_path_factory.mktemp("saved")
    words = ["a b c", "--d-model", "8", "--heads", "2", "--no-bias", "--repeat", "1", "--view", "none"]
    attempt(folder, "run", *words, "--save-weights", "w", writes={"w"}, launch=Launch(WITH_TORCH))
    return (folder / "w").read_bytes()


def taken_apart(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


# --------------------------------------------------------------------------------------------------------- the container


@readers
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes"),
        (b"\0" * 7, "7 bytes"),
        (struct.pack("<Q", 1 << 63), str(1 << 63)),
        (struct.pack("<Q", 100_000_001), "100000001"),
        (struct.pack("<Q", 50) + b"{}", "50 bytes"),
        (framed(b'{"\xff": 1}'), "UTF-8"),
        (framed(b"hello"), "JSON"),
        (framed([1]), "object"),
        (framed(b"[" * 100_000), "nested"),
        (framed(b'{"a":' * 100_000), "nested"),
        (framed({"__metadata__": {"mha": "[" * 100_000}}), "nested"),
        (framed(b'{"twin": 1, "twin": 2}'), "'twin'"),
        (framed({"__metadata__": {"mha": 5}}), "metadata"),
        (framed({"__metadata__": {"mha": "{"}}), "metadata"),
        (framed(b'{"a": {"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'), "digits"),
    ],
    ids=["empty", "7-bytes", "length-2^63", "length-100-MB", "length-over-file", "no-utf8", "no-json", "array", "deep-list",
         "deep-object", "deep-metadata", "duplicate-names", "metadata-number", "metadata-cut", "5000-digits"],
)  # fmt: skip
def test_a_damaged_header_is_told_in_one_line(
    tmp_path: Path, words: list[str], content: bytes, says: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "made.safetensors").write_bytes(content)
    done = attempt(tmp_path, *words, CHANGEABLE, code=1, form=form, says=[CHANGEABLE, says])
    assert len(done.stderr) < 1000


@readers
@pytest.mark.parametrize("length", [1 << 63, 100_000_001, 1 << 20], ids=["2^63", "over-100-MB", "zeros"])
def test_a_huge_damaged_file_costs_no_memory(
    tmp_path: Path, words: list[str], length: int, form: tuple[str, ...]
) -> None:
    with (tmp_path / "made.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(8 << 30)
    launch = Launch(shell=limited_memory(600 << 20))
    attempt(tmp_path, *words, CHANGEABLE, code=1, form=form, says=[CHANGEABLE, "header"], launch=launch)


# ----------------------------------------------------------------------------------------------------------- the tensors


@readers
@pytest.mark.parametrize(
    ("header", "body_len"),
    [
        ({"odd": entry()}, 7),
        ({"odd": entry()}, 9),
        ({"a": entry(), "odd": entry(offsets=(4, 12))}, 12),
        ({"a": entry(), "odd": entry(offsets=(9, 17))}, 17),
        ({"odd": entry(offsets=(8, 0))}, 8),
        ({"odd": entry(offsets=(-8, 0))}, 8),
        ({"odd": entry(offsets=(0, 8, 9))}, 8),
        ({"odd": entry(offsets=None)}, 8),
        ({"odd": entry(offsets=(0.0, 8.0))}, 8),
        ({"odd": entry(offsets=(0, 1 << 70))}, 8),
        ({"odd": entry(shape=(1 << 62, 4))}, 8),
        ({"odd": entry(shape=(1 << 40, 1 << 40), offsets=(0, 1 << 62))}, 8),
        ({"odd": entry(shape=(1 << 58,), offsets=(0, 1 << 60))}, 8),
        ({"odd": entry(shape=(-1, -2))}, 8),
        ({"odd": entry(shape=[1] * 1000)}, 8),
        ({"odd": entry(shape="22")}, 8),
        ({"odd": entry(shape=[[2]])}, 8),
        ({"odd": entry(shape=[True, 2])}, 8),
        ({"odd": entry(shape=[3])}, 8),
        ({"odd": entry(dtype="F33")}, 8),
        ({"odd": entry(dtype=["F32"])}, 8),
        ({"odd": {"dtype": "F32", "shape": [2]}}, 8),
        ({"odd": 5}, 8),
        ({"odd": None}, 8),
    ],
    ids=["cut-by-one", "one-too-many", "overlap", "gap", "reversed", "negative", "three-offsets", "no-offsets", "floats",
         "offset-2^70", "shape-overflow", "product-overflow", "body-2^60", "negative-shape", "rank-1000", "shape-text",
         "shape-nested", "shape-bool", "size-mismatch", "dtype-unknown", "dtype-list", "no-offsets-field", "number", "null"],
)  # fmt: skip
def test_a_damaged_entry_names_its_tensor(
    tmp_path: Path, words: list[str], header: dict[str, object], body_len: int, form: tuple[str, ...]
) -> None:
    (tmp_path / "made.safetensors").write_bytes(framed(header, bytes(body_len)))
    done = attempt(tmp_path, *words, CHANGEABLE, code=1, form=form, says=[CHANGEABLE, "'odd'"])
    assert len(done.stderr) < 1000


@readers
@pytest.mark.parametrize(
    ("name", "says"),
    [("\x1b]52;c;aGk=\x07\u202e", "]52;c;aGk="), ("../../x", "../../x"), ("", "''"), ("m" * 1_000_000, "1000000")],
    ids=["escapes", "climbing", "empty", "megabyte"],
)
def test_a_hostile_tensor_name_is_told_short_and_in_escapes(
    tmp_path: Path, words: list[str], name: str, says: str, form: tuple[str, ...]
) -> None:
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    (folder / "made.safetensors").write_bytes(framed({name: entry(dtype="I9")}, bytes(8)))
    done = attempt(folder, *words, CHANGEABLE, code=1, form=form, says=[CHANGEABLE, says])
    assert len(done.stderr) < 1000
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["made.safetensors", "modules", "one", "torch.py", "two"]


@forms
@pytest.mark.parametrize("name", ["\x1b]52;c;aGk=\x07", "../../x"], ids=["escapes", "climbing"])
def test_a_whole_tensor_with_a_hostile_name_is_told_as_not_expected(
    tmp_path: Path, name: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "made.safetensors").write_bytes(layer_file({**LAYER, name: (2,)}))
    words = ["run", "a b c", "--heads", "2", "--weights", CHANGEABLE]
    attempt(tmp_path, *words, code=1, form=form, says=[name.strip("\x1b\x07"), "is not expected"])


@forms
@pytest.mark.parametrize("dtype", ["I64", "BOOL", "C64", "F4"])
def test_a_dtype_that_is_no_weight_is_told_with_those_that_are(
    tmp_path: Path, dtype: str, form: tuple[str, ...]
) -> None:
    content = framed({"embed.weight": entry((2, 2), (0, 2), "F4")}, bytes(2))
    if dtype != "F4":
        content = layer_file(dtype=dtype)
    (tmp_path / "made.safetensors").write_bytes(content)
    words = ["run", "a b c", "--heads", "2", "--weights", CHANGEABLE]
    says = [CHANGEABLE, "embed.weight", "F32", "BF16", f"dtype {dtype}"]
    attempt(tmp_path, *words, code=1, form=form, says=says)


@forms
def test_all_tensors_that_do_not_fit_are_listed(tmp_path: Path, form: tuple[str, ...]) -> None:
    shapes = {**LAYER, "k_proj.weight": (4, 5), "v_proj.weight": (4, 7), "extra.one": (1,), "extra.two": (2,)}
    shapes["q_proj.bias"] = (4,)
    (tmp_path / "made.safetensors").write_bytes(layer_file(shapes))
    says = [
        "k_proj.weight is [4, 5], not [4, 4]",
        "v_proj.weight is [4, 7], not [4, 4]",
        "k_proj.bias [4] is missing",
        "'extra.one' is not expected",
        "'extra.two' is not expected",
    ]
    attempt(tmp_path, "run", "a b c", "--heads", "2", "--weights", CHANGEABLE, code=1, form=form, says=says)


@forms
def test_the_matrices_that_a_layer_cannot_lack_are_listed(tmp_path: Path, form: tuple[str, ...]) -> None:
    (tmp_path / "made.safetensors").write_bytes(layer_file({"embed.weight": (3, 4), "q_proj.weight": (4, 4)}))
    says = ["k_proj.weight", "v_proj.weight", CHANGEABLE]
    attempt(tmp_path, "run", "a b c", "--heads", "2", "--weights", CHANGEABLE, code=1, form=form, says=says)


# ------------------------------------------------------------------------------------------------------------- the numbers


@forms
def test_a_number_that_is_not_finite_is_counted_and_placed(tmp_path: Path, form: tuple[str, ...]) -> None:
    numbers = [1.0] * 16
    numbers[6], numbers[9] = math.nan, math.inf
    (tmp_path / "made.safetensors").write_bytes(layer_file(numbers={"k_proj.weight": numbers}))
    words = ["run", "a b c", "--heads", "2", "--weights", CHANGEABLE]
    says = [CHANGEABLE, "k_proj.weight", "has 2 NaN or Inf", "[1, 2]", "--allow-nonfinite"]
    attempt(tmp_path, *words, code=1, form=form, says=says, launch=Launch(WITH_TORCH))
    attempt(tmp_path, *words, "--allow-nonfinite", "--repeat", "1", form=form, launch=Launch(WITH_TORCH))


@forms
def test_a_transposed_square_matrix_is_noticed(tmp_path: Path, saved: bytes, form: tuple[str, ...]) -> None:
    header, body = taken_apart(saved)
    begin, end = header["q_proj.weight"]["data_offsets"]
    matrix = struct.unpack("<64f", body[begin:end])
    transposed = [matrix[8 * column + row] for row in range(8) for column in range(8)]
    body = body[:begin] + struct.pack("<64f", *transposed) + body[end:]
    (tmp_path / "made.safetensors").write_bytes(framed(header, body))
    says = [CHANGEABLE, "q_proj.weight", "transposed"]
    attempt(tmp_path, "run", "a b c", "--weights", CHANGEABLE, code=3, form=form, says=says, launch=Launch(WITH_TORCH))


@forms
def test_a_16_bit_overflow_names_the_head(tmp_path: Path, form: tuple[str, ...]) -> None:
    large = [75.0 if row >= 2 else 1.0 for row in range(4) for _ in range(4)]
    content = layer_file(dtype="F16", numbers={"q_proj.weight": large, "k_proj.weight": large})
    (tmp_path / "made.safetensors").write_bytes(content)
    words = ["run", "a b c", "--heads", "2", "--positions", "none", "--weights", CHANGEABLE]
    says = ["of head 1 are NaN or Inf in float16", "--dtype bfloat16"]
    attempt(tmp_path, *words, code=1, form=form, says=says, launch=Launch(WITH_TORCH))


@forms
def test_key_heads_that_do_not_divide_the_query_heads_get_the_rule(
    tmp_path: Path, saved: bytes, form: tuple[str, ...]
) -> None:
    header, body = taken_apart(saved)
    metadata = json.loads(header["__metadata__"]["mha"])
    metadata["config"] |= {"n_heads": 8, "n_kv_heads": 3, "d_head": 1, "d_v": 1}
    header["__metadata__"]["mha"] = json.dumps(metadata)
    (tmp_path / "made.safetensors").write_bytes(framed(header, body))
    says = ["--kv-heads 3", "try --kv-heads 4"]
    attempt(tmp_path, "run", "a b c", "--weights", CHANGEABLE, code=2, form=form, says=says)


# ----------------------------------------------------------------------------------------------------------------- pickles


class Trap:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch sprung",)


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    return content.getvalue()


@readers
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
    ids=["pt", "pth", "bin", "pkl", "ckpt", "renamed-4", "renamed-2", "renamed-zip"],
)
def test_a_pickle_is_refused_unopened_with_the_way_to_convert(
    tmp_path: Path, words: list[str], name: str, content: bytes, form: tuple[str, ...]
) -> None:
    (tmp_path / name).write_bytes(content)
    says = [name, "pickle", "weights_only=True", "safetensors.torch.save_file"]
    attempt(tmp_path, *words, name, code=1, form=form, says=says)


# ------------------------------------------------------------------------------------------------------------------ in use


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fate", ["truncated", "replaced"])
def test_a_file_that_is_lost_while_in_use_does_no_harm(tmp_path: Path, saved: bytes, fate: str) -> None:
    weights = tmp_path / "w"
    weights.write_bytes(saved)
    words = ["run", "--weights", "w", "-", "--repeat", "1", "--view", "none"]
    process = start(tmp_path, words, Launch(WITH_TORCH), stdin=PIPE, stdout=PIPE, stderr=PIPE)
    assert process.stdin is not None
    process.stdin.write(b" " * 100_000)  # more than a pipe takes: once it is written, the weights have been read
    process.stdin.flush()
    if fate == "truncated":
        os.truncate(weights, 0)
    else:
        weights.write_bytes(b"x" * len(saved))
    stdout, stderr = process.communicate(b"a b c")
    assert (process.returncode, stderr) == (0, b"")
    assert b"self-check ok" in stdout


# ----------------------------------------------------------------------------------------------------------------- options


@commands
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--heads", "0"], ["--heads 0", "at least 1", "try --heads 1"]),
        (["--heads", "-1"], ["--heads -1", "at least 1", "try --heads 1"]),
        (["--heads", "3"], ["--heads 3", "--heads 4", "--d-model 513"]),
        (["--heads", "100000"], ["--heads 100000", "at most 1024", "try --heads 512"]),
        (["--heads", "1_0"], ["heads", "1_0"]),
        (["--heads", "9" * 5000], ["heads", "999"]),
        (["--seed", "-1"], ["--seed -1", "at least 0"]),
        (["--seed", str(1 << 64)], ["--seed 18446744073709551616", "at most 18446744073709551615"]),
        (["--device", "tpu"], ["--device tpu", "auto, cpu, cuda, cuda:N, mps"]),
        (["--device", "cuda:-1"], ["--device cuda:-1", "auto, cpu, cuda, cuda:N, mps"]),
        (["--dtype", "int8"], ["dtype", "'int8'", "'float32'", "'bfloat16'"]),
        (["--tokenizer", "words"], ["--tokenizer words", "word, char, byte"]),
        (["--scale", "nan"], ["scale", "finite", "'nan'"]),
        (["--dropout", "1"], ["--dropout 1.0", "from 0 to below 1"]),
    ],
    ids=["heads-0", "heads--1", "heads-3", "heads-100000", "heads-1_0", "heads-5000-digits", "seed--1", "seed-2^64",
         "device", "device-index", "dtype", "tokenizer", "scale", "dropout"],
)  # fmt: skip
def test_an_option_that_cannot_work_gets_its_rule_and_a_way_out(
    tmp_path: Path, command: str, words: list[str], says: list[str], form: tuple[str, ...]
) -> None:
    done = attempt(tmp_path, command, "a b", "--d-model", "512", *words, code=2, form=form, says=says)
    assert len(done.stderr) < 1000


@forms
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "a", "--view", "cubist"], ["view", "'cubist'", "'matrix'", "'heatmap'"]),
        (["show", "r", "--view", "cubist"], ["view", "'cubist'", "'matrix'", "'heatmap'"]),
        (["vocab", "a", "--tokenizer", "words"], ["--tokenizer words", "word, char, byte"]),
        (["run", "a", "--colours"], ["--colours", "--color"]),
        (["run", "a", "--heads"], ["--heads"]),
        (["run", "a", "--top", "0"], ["--top", "from 1 to 1000"]),
        (["trace", "a", "--cell", "0,1"], ["cell", "HEAD,QUERY,KEY", "'0,1'"]),
    ],
    ids=["view", "view-of-record", "tokenizer", "unknown-option", "no-value", "top", "cell"],
)
def test_a_word_that_is_no_choice_gets_the_choices(
    tmp_path: Path, words: list[str], says: list[str], form: tuple[str, ...]
) -> None:
    attempt(tmp_path, *words, code=2, form=form, says=says)


@forms
def test_a_device_that_is_absent_is_blamed_on_the_build_or_the_machine(tmp_path: Path, form: tuple[str, ...]) -> None:
    done = attempt(tmp_path, "run", "a", "--device", "cuda:99", code=1, form=form, launch=Launch(WITH_TORCH))
    assert "cuda:99" in done.told
    assert re.search(r"this build of torch \(.+\) has no CUDA|this machine has (no CUDA|\d+, numbered)", done.told)


def test_cuda_without_a_device_is_refused(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    says = ["--device cuda", "not available", "--device cpu"]
    attempt(tmp_path, "trace", "a", "--device", "cuda", code=1, says=says, launch=Launch(WITH_TORCH))


@commands
def test_matrices_that_do_not_fit_are_refused_before_torch_with_a_size_that_does(
    tmp_path: Path, command: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on " * 5000)
    words = [command, "--file", "text.txt", "--d-model", "64", "--heads", "8", "--device", "cpu"]
    launch = Launch(shell=limited_memory(8 << 30))
    says = ["20000 × 20000 tokens", "8 heads", "needed", "available", "--max-tokens"]
    done = attempt(tmp_path, *words, code=1, form=form, says=says, launch=launch)
    ways_out = re.findall(r"(--max-tokens|--heads) (\d+)", done.told)
    assert ways_out
    for way_out in ways_out:  # code 99: the stand-in for torch was reached, so the size was let through
        attempt(tmp_path, *words, *way_out, code=99, form=form, launch=launch)


def test_the_files_that_were_written_are_named_unless_stdout_is_data(tmp_path: Path) -> None:
    words = ["vocab", "a b", "--save", "v", "--force"]
    assert attempt(tmp_path, *words, writes={"v"}).stderr == f"mha: saved v, {(tmp_path / 'v').stat().st_size} B\n"
    assert attempt(tmp_path, *words, form=("--json",), writes={"v"}).stderr == ""
