"""A GGUF file of llama.cpp: it computes what the same model from safetensors does, and what cannot
be read is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import llama_gguf
from support.small_models import TEXT, llama, llama_folder

import mhacli

pytestmark = pytest.mark.real
WIDE = {"COLUMNS": "1000"}
MISSING = {"gguf": 'raise ModuleNotFoundError("No module named gguf", name="gguf")\n'}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file."""
    pytest.importorskip("gguf")
    return llama_gguf(tmp_path_factory.mktemp("whole") / "whole.gguf").read_bytes()


@pytest.fixture
def tiny(whole: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    return path


def refusal(mha: Any, path: str, **options: Any) -> str:
    """The words with which a file is refused."""
    ended = mha("run", TEXT, "--model", path, code=1, env=WIDE, **options)
    return str(ended.stderr)


@pytest.mark.parametrize("command", ["run", "heads", "effect"])
def test_a_file_gives_the_numbers_of_the_same_model_from_safetensors(
    mha: Any, tmp_path: Path, tiny: Path, command: str
) -> None:
    llama_folder(tmp_path / "folder")
    records = [
        json.loads(mha(command, TEXT, "--model", source, "--json").stdout)
        for source in (tiny.name, "folder")
    ]
    for part in ("sequences", "heads", "effects"):
        assert records[0].get(part) == records[1].get(part)


def test_a_quantized_file_is_widened_and_its_first_line_says_so(mha: Any, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    llama_gguf(tmp_path / "tiny.Q8_0.gguf", quantized=True)
    ended = mha("run", TEXT, "--model", "tiny.Q8_0.gguf", env=WIDE)
    first = ended.stdout.splitlines()[0]
    assert "dequantized" in first
    assert "float32" in first
    assert "not the numbers of llama.cpp" in ended.stderr


def test_a_folder_with_one_file_is_that_file(mha: Any, tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "folder").mkdir()
    shutil.move(tiny, tmp_path / "folder")
    assert "tiny.gguf · dequantized" in mha("run", TEXT, "--model", "folder", env=WIDE).stdout


def test_of_several_files_in_a_folder_all_are_listed(mha: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    names = [f"tiny.Q{number}_0.gguf" for number in range(2, 22)]
    for name in names:
        (tmp_path / "folder" / name).write_bytes(b"GGUF")
    words = refusal(mha, "folder")
    assert all(name in words for name in names)
    assert "--model folder/" in words


def test_python_takes_a_file_and_a_model_that_was_loaded_from_one(tiny: Path) -> None:
    import transformers

    assert len(mhacli.heads(str(tiny), TEXT).heads) == 8
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny.parent, gguf_file=tiny.name)
    patterns = []
    for model in (loaded.eval(), llama()):
        with torch.no_grad(), mhacli.inspecting(model, keep=("pattern",)) as seen:
            model(torch.tensor([[0, 45, 17, 99]]))
        patterns.append(torch.as_tensor(seen.record.pattern().values))
    assert torch.equal(*patterns)


def test_without_the_library_the_hint_installs_it(mha: Any, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    words = refusal(mha, "tiny.gguf", cold=True, modules=MISSING)
    assert "a GGUF file needs gguf, which is not installed" in words
    assert 'pip install "gguf' in words


def test_memory_is_predicted_from_float32(
    mha: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    path = llama_gguf(tmp_path / "tiny.gguf", quantized=True)
    n_numbers = sum(parameter.numel() for parameter in llama().parameters())
    assert path.stat().st_size < 2 * n_numbers
    monkeypatch.setattr("mhacli.io.memory.available_bytes", lambda: 3 * n_numbers)
    assert "needed for the weights of tiny.gguf" in refusal(mha, "tiny.gguf")


AT_ARRAY = b"tokenizer.ggml.token_type"
AT_TENSOR = b"token_embd.weight"


def changed(whole: bytes, after: bytes, skip: int, new: bytes) -> bytes:
    """A file with other bytes some way after a name."""
    at = whole.index(after) + len(after) + skip
    return whole[:at] + new + whole[at + len(new) :]


@pytest.mark.parametrize("size", [0, 3, 20, 200, 9000, 100_000])
def test_a_file_that_is_cut_is_refused(mha: Any, tiny: Path, whole: bytes, size: int) -> None:
    tiny.write_bytes(whole[:size])
    assert "the GGUF header of tiny.gguf cannot be used" in refusal(mha, tiny.name)


LIES = {
    "number of tensors": (b"GGUF", 4, b"\xff" * 8),
    "number of values": (b"GGUF", 12, b"\xff" * 8),
    "length of an array": (AT_ARRAY, 8, b"\xff" * 6),
    "number of axes": (AT_TENSOR, 0, b"\xff\xff"),
    "unknown quantization": (AT_TENSOR, 20, b"\x63"),
    "place of a tensor": (AT_TENSOR, 24, b"\xff\xff\xff\x7f"),
    "number of layers": (b"llama.block_count", 4, b"\xff" * 4),
    "number of heads": (b"llama.attention.head_count", 4, b"\3"),
}


@pytest.mark.parametrize(("after", "skip", "new"), LIES.values(), ids=LIES)
def test_a_file_whose_bytes_lie_is_refused(
    mha: Any, tiny: Path, whole: bytes, after: bytes, skip: int, new: bytes
) -> None:
    tiny.write_bytes(changed(whole, after, skip, new))
    assert "tiny.gguf" in refusal(mha, tiny.name)


def test_an_architecture_that_transformers_does_not_know_is_refused(
    mha: Any, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    llama_gguf(tmp_path / "tiny.gguf", architecture="unheard")
    assert "architecture unheard is not supported" in refusal(mha, "tiny.gguf")
