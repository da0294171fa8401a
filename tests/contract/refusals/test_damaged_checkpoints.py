"""Damaged and hostile folders of checkpoints, tokenizers and corpora: refused by name, and no code
of theirs runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from support import checkpoints
from support.mha import Ended

Mha = Callable[..., Ended]
CODE = "import pathlib\npathlib.Path(__file__).with_name('sprung').touch()\n"


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def only_index(folder: Path, files: dict[str, str]) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def link_out(folder: Path) -> None:
    """The weights are a link to a file outside of the folder."""
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors").symlink_to("../outside.safetensors")


def sparse(path: Path, n_bytes: int) -> None:
    path.write_bytes(b" ")
    os.truncate(path, n_bytes)


def replace(folder: Path, name: str, content: bytes | str) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


HEADER = b"\x00\x00\x00\x00\x00\x00\x00\x80"
FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "shard that climbs": (
        lambda m: only_index(m, {"w": "../../etc/passwd"}),
        ("../../etc/passwd",),
    ),
    "shard of an absolute path": (
        lambda m: only_index(m, {"w": "/etc/x.safetensors"}),
        ("/etc/x.safetensors",),
    ),
    "missing shard": (lambda m: only_index(m, {"w": "one.safetensors"}), ("one.safetensors",)),
    "index that is no JSON": (
        lambda m: (only_index(m, {}), replace(m, "model.safetensors.index.json", "{")),
        (),
    ),
    "index without files": (lambda m: only_index(m, {}), ()),
    "link that leaves the folder": (link_out, ("model.safetensors",)),
    "pickles alone": (
        lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"),
        ("safetensors",),
    ),
    "weights of 0 bytes": (lambda m: replace(m, "model.safetensors", b""), ("model.safetensors",)),
    "weights with a long header": (
        lambda m: replace(m, "model.safetensors", HEADER),
        ("model.safetensors",),
    ),
    "weights that are cut": (
        lambda m: os.truncate(m / "model.safetensors", 50_000),
        ("model.safetensors",),
    ),
    "weights that are a pipe": (pipe, ("model.safetensors",)),
    "no config": (lambda m: (m / "config.json").unlink(), ("config.json",)),
    "config that is cut": (lambda m: replace(m, "config.json", "{"), ("config.json",)),
    "config that is a list": (lambda m: replace(m, "config.json", "[1]"), ("config.json",)),
    "config of 200 MB": (lambda m: sparse(m / "config.json", 200 << 20), ("config.json",)),
    "config 10,000 deep": (
        lambda m: replace(m, "config.json", '{"a":' * 10_000 + "1" + "}" * 10_000),
        ("config.json",),
    ),
    "10^9 heads": (
        lambda m: change_json(m / "config.json", n_head=10**9),
        ("n_head", "1000000000"),
    ),
}
USED_FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "heads that do not divide": (lambda m: change_json(m / "config.json", n_head=7), ("7",)),
    "unknown family": (lambda m: change_json(m / "config.json", model_type="nobody"), ("nobody",)),
    "tokenizer that is cut": (
        lambda m: replace(m, "tokenizer.json", '{"version": 1'),
        ("tokenizer",),
    ),
    "tokenizer of broken merges": (
        lambda m: replace(
            m,
            "tokenizer.json",
            '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["b c"]}}',
        ),
        ("tokenizer",),
    ),
    "other shapes than the config": (lambda m: change_json(m / "config.json", n_embd=96), ("96",)),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_a_damaged_checkpoint_is_refused_by_name(what: str, mha: Mha, tmp_path: Path) -> None:
    damage, pieces = FOLDERS[what]
    damage(checkpoints.copy_of("gpt2", tmp_path / "m"))
    for words in (["weights", "info", "m"], ["run", "x", "--model", "m"]):
        ended = mha(*words, "--json", code=1)
        assert ended.missing(*pieces, "m") == []


@pytest.mark.parametrize("what", USED_FOLDERS)
def test_a_checkpoint_that_cannot_be_used_is_refused_by_name(
    what: str, mha: Mha, tmp_path: Path
) -> None:
    damage, pieces = USED_FOLDERS[what]
    damage(checkpoints.copy_of("gpt2", tmp_path / "m"))
    ended = mha("run", "x", "--model", "m", "--json", code=1)
    assert ended.missing(*pieces, "m") == []


@pytest.mark.parametrize(
    "config",
    [
        {
            "auto_map": {
                "AutoModel": "evil.M",
                "AutoConfig": "evil.C",
                "AutoTokenizer": ["evil.T", None],
            }
        },
        {"trust_remote_code": True, "auto_map": {"AutoModelForCausalLM": "evil.M"}},
    ],
    ids=["auto_map", "trust_remote_code"],
)
def test_code_in_a_folder_never_runs(config: dict[str, Any], mha: Mha, tmp_path: Path) -> None:
    folder = checkpoints.copy_of("gpt2", tmp_path / "m")
    change_json(folder / "config.json", **config)
    change_json(folder / "tokenizer_config.json", **config)
    (folder / "evil.py").write_text(CODE)
    mha("weights", "info", "m")
    mha("run", "x", "--model", "m", code=(0, 1))
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{% for m in messages %}", id="cut"),
        pytest.param(
            "{{ messages.__class__.__mro__[1].__subclasses__() }}",
            id="out of the template",
            marks=pytest.mark.real,
        ),
        pytest.param("{{ undefined.field }}", id="undefined"),
        pytest.param("{{ 'a' * 10**9 }}", id="long", marks=pytest.mark.real),
        pytest.param("{{ 'ab' * 10**12 }}", id="longer", marks=pytest.mark.real),
        pytest.param(
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            id="endless",
            marks=pytest.mark.real,
        ),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused(
    template: str, mha: Mha, tmp_path: Path
) -> None:
    folder = checkpoints.copy_of("gpt2", tmp_path / "m")
    change_json(folder / "tokenizer_config.json", chat_template=template)
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "hi"}]')
    ended = mha("run", "--chat", "chat.json", "--model", "m", "--json", code=1)
    assert "template" in ended.said


@pytest.mark.real
@pytest.mark.parametrize("number", [10**30, -1, 1e308, 320])
def test_a_start_token_that_is_no_id_is_refused(number: float, mha: Mha, tmp_path: Path) -> None:
    folder = checkpoints.copy_of("t5", tmp_path / "m")
    change_json(folder / "config.json", decoder_start_token_id=number)
    ended = mha("run", "the cat", "--model", "m", "--json", code=1)
    assert ended.error["code"] == "bad-file"
    assert "decoder_start_token_id" in ended.said


def test_names_in_the_headers_of_a_folder_are_escaped(mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "x\\u001b[2J"}')
    (tmp_path / "m" / "model.safetensors").write_bytes(save({"w\x1b]52;\u202e": np.zeros(2)}))
    shown = mha("weights", "info", "m", "--tensors").stdout
    assert "x\\x1b[2J" in shown
    assert "w\\x1b]52;\\u202e" in shown
    names = [
        one["name"] for one in mha("weights", "info", "m", "--tensors", "--json").json["tensors"]
    ]
    assert names == ["w\x1b]52;\u202e"]


# ---------------------------------------------------------------------------------- tokenizer files


def split_at(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


TOKENIZERS = {
    "merge of an unknown token": checkpoints.words_tokenizer(
        type="BPE", vocab={"a": 0}, merges=[["a", "zz"]]
    ),
    "half a merge": checkpoints.words_tokenizer(type="BPE", vocab={"a": 0}, merges=["a"]),
    "id of 4e9": checkpoints.words_tokenizer(vocab={"a": 4_000_000_000}),
    "id of 1e30": checkpoints.words_tokenizer(vocab={"a": 10**30}),
    "negative id": checkpoints.words_tokenizer(vocab={"a": -1}),
    "unknown kind of model": checkpoints.words_tokenizer(type="Unheard"),
    "expression that is none": checkpoints.words_tokenizer("a", splitter=split_at("(")),
    "expression that backtracks without end": checkpoints.words_tokenizer(
        "a", splitter=split_at("^(a+)+$")
    ),
    "cut": "{",
    "list": "[]",
    "100,000 deep": "[" * 100_000,
    "no UTF-8": b"\x80",
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_damaged_tokenizer_file_is_refused(what: str, mha: Mha, tmp_path: Path) -> None:
    replace(tmp_path, "t.json", TOKENIZERS[what])
    text = "a" * 200 + "b" if "backtracks" in what else "a b"
    ended = mha("vocab", text, "--tokenizer", "t.json", "--json", code=1)
    assert "t.json" in ended.said


@pytest.mark.parametrize(
    ("entry", "pieces"),
    [
        ({"ids": [1], "tokens": ["[CLS]", "[CLS]"]}, ("2 ids", "3 tokens")),
        ({"ids": [1, 1], "tokens": ["[CLS]"]}, ("3 ids", "2 tokens")),
        ({"ids": [9], "tokens": ["[CLS]"]}, ("[CLS]", "9")),
    ],
)
def test_special_tokens_that_do_not_agree_with_their_ids_are_refused(
    entry: dict[str, Any], pieces: tuple[str, ...], mha: Mha, tmp_path: Path
) -> None:
    document = json.loads(checkpoints.words_tokenizer("[CLS]", "the"))
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "pair": [],
        "single": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "special_tokens": {"[CLS]": {"id": "[CLS]", **entry}},
    }
    (tmp_path / "t.json").write_text(json.dumps(document))
    ended = mha("run", "the", "--tokenizer", "t.json", "--json", code=1)
    assert ended.missing("t.json", *pieces) == []


# ------------------------------------------------------------------------------------------ corpora


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("c.jsonl", b'{"text": "one"}\n{"txt": "two"}\n', "c.jsonl:2"),
        ("c.txt", b"caf\xff", "c.txt"),
    ],
    ids=["no field", "no UTF-8"],
)
def test_a_bad_document_stops_a_strict_scan_at_its_place(
    name: str, content: bytes, place: str, mha: Mha, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    words = ["scan", name, "--model", checkpoints.folder("gpt2"), "--out", "o.mha"]
    assert place in mha(*words, "--strict", "--json", code=1).said


@pytest.mark.parametrize(
    "content",
    [b'{"schema": ', b"\xff", b"[]", b'{"schema": "mha.scan/1", "settings": [{}]}', b"{}"],
)
def test_a_scan_with_a_damaged_manifest_is_named(content: bytes, mha: Mha, tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("the cat sat")
    (tmp_path / "o.mha").mkdir()
    (tmp_path / "o.mha" / "manifest.json").write_bytes(content)
    mha("show", "o.mha", "--json", code=1)
    words = ["scan", "c.txt", "--model", checkpoints.folder("gpt2"), "--out", "o.mha"]
    assert "manifest.json" in mha(*words, "--json", code=1).said
