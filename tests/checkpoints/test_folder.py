"""Untrusted checkpoint folders: every name is checked before the file is opened, only headers are read, and no code
runs."""

from __future__ import annotations

import json
import os
import struct

import pytest
from support.tensor_files import tensors

from mhacli.checkpoints.folder import StoredFile, read_bytes, read_checkpoint
from mhacli.checkpoints.head_counts import HeadCounts, head_counts, sizes_of
from mhacli.errors import MhaError
from mhacli.io.safetensors import read_tensor_header

CONFIG = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 2}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of one file, and `write(name, content)` for more."""
    place = tmp_path / "model"
    place.mkdir()

    def write(name, content):
        content = json.dumps(content).encode() if isinstance(content, (dict, list)) else content
        (place / name).write_bytes(content)

    write("config.json", CONFIG)
    write("model.safetensors", tensors(a=3, b=5))
    place_and_write = type("Folder", (), {"path": place, "write": staticmethod(write), "__str__": lambda _: str(place)})
    return place_and_write()


def refused(path):
    with pytest.raises(MhaError) as caught:
        read_checkpoint(str(path))
    return caught.value


def sharded(folder, named=None, **shards):
    (folder.path / "model.safetensors").unlink()
    for name, sizes in shards.items():
        folder.write(f"{name}.safetensors", tensors(**sizes))
    named = named or {key: f"{name}.safetensors" for name, sizes in shards.items() for key in sizes}
    folder.write("model.safetensors.index.json", {"weight_map": named})


def test_a_folder_of_one_file_gives_config_and_tensors_with_their_places(folder):
    found = read_checkpoint(str(folder))
    path = str(folder.path / "model.safetensors")
    size = os.path.getsize(path)
    assert (found.path, found.family, found.config["num_attention_heads"], found.notes) == (str(folder), "llama", 6, ())
    assert found.files == (StoredFile("model.safetensors", path, size),)
    assert (found.tensors["b"].dtype, found.tensors["b"].shape, found.tensors["b"].n_bytes) == ("F32", (5,), 20)
    assert found.tensors["b"].end == size
    assert read_bytes(found.tensors["a"]) == b"a" * 12
    assert read_bytes(found.tensors["b"]) == b"b" * 20
    assert found.tokenizer is None


def test_shards_are_found_through_the_index(folder):
    sharded(folder, one={"a": 3}, two={"b": 5, "c": 0})
    found = read_checkpoint(str(folder))
    assert [file.name for file in found.files] == ["one.safetensors", "two.safetensors"]
    assert read_bytes(found.tensors["b"]) == b"b" * 20
    assert found.tensors["c"].shape == (0,)
    assert found.notes == ()


def test_a_whole_file_comes_before_an_index(folder):
    folder.write("model.safetensors.index.json", {"weight_map": {"x": "../x.safetensors"}})
    assert set(read_checkpoint(str(folder)).tensors) == {"a", "b"}


def test_one_other_file_with_tensors_is_taken_and_of_two_none(folder):
    (folder.path / "model.safetensors").rename(folder.path / "adapter.safetensors")
    assert [file.name for file in read_checkpoint(str(folder)).files] == ["adapter.safetensors"]
    folder.write("other.safetensors", tensors(a=1))
    fault = refused(folder)
    assert fault.message == (
        f"{folder} has neither model.safetensors nor model.safetensors.index.json nor one other .safetensors file: it holds "
        "'adapter.safetensors', 'other.safetensors'"
    )
    assert fault.hint == "name the one to read"


def test_a_file_is_read_with_the_config_beside_it_or_without(folder):
    path = folder.path / "model.safetensors"
    assert read_checkpoint(str(path)).family == "llama"
    (folder.path / "config.json").unlink()
    alone = read_checkpoint(str(path))
    assert (alone.family, dict(alone.config), set(alone.tensors)) == (None, {}, {"a", "b"})


def test_a_file_of_mha_needs_nothing_that_lies_beside_it(folder):
    text = json.dumps({"__metadata__": {"mha": '{"format":"mha.weights/1"}'}}).encode()
    folder.write("layer.safetensors", struct.pack("<Q", len(text)) + text)
    folder.write("config.json", b"{broken")
    found = read_checkpoint(str(folder.path / "layer.safetensors"))
    assert (found.metadata, dict(found.config)) == ({"format": "mha.weights/1"}, {})


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("../../etc/passwd", "'../../etc/passwd'"),
        ("../other.safetensors", "'../other.safetensors'"),
        ("/etc/x.safetensors", "'/etc/x.safetensors'"),
        ("sub/x.safetensors", "'sub/x.safetensors'"),
        ("x.bin", "'x.bin'"),
        ("x.safetensors\n", "'x.safetensors\\n'"),
        ("x\x1b.safetensors", "'x\\x1b.safetensors'"),
        ("ä.safetensors", "'ä.safetensors'"),
        ("", "''"),
    ],
)
def test_a_shard_outside_of_the_folder_is_refused_by_name_and_never_opened(folder, name, shown, monkeypatch):
    sharded(folder, {"a": "one.safetensors", "b": name}, one={"a": 3})
    monkeypatch.setattr("mhacli.checkpoints.folder.read_tensor_header", lambda path: pytest.fail(f"{path} was opened"))
    assert refused(folder).message == (
        f"{folder}/model.safetensors.index.json names the shard {shown}, which is not a file in its own folder "
        "such as model-00001-of-00002.safetensors"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_that_leaves_the_folder_is_refused_before_it_is_opened(folder, tmp_path, name, monkeypatch):
    (tmp_path / "outside").write_bytes(b"{}")
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to("../outside")
    if name == "model.safetensors":
        monkeypatch.setattr(
            "mhacli.checkpoints.folder.read_tensor_header", lambda path: pytest.fail(f"{path} was opened")
        )
    assert refused(folder).message == f"{folder}/{name} leads out of its folder, to {tmp_path}/outside"


def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(folder, tmp_path):
    sharded(folder, {"a": "one.safetensors"})
    (tmp_path / "one").write_bytes(tensors(a=3))
    (folder.path / "one.safetensors").symlink_to(tmp_path / "one")
    assert "one.safetensors leads out of its folder" in refused(folder).message


def test_links_into_the_blobs_of_the_same_cache_are_followed_and_into_another_refused(tmp_path):
    for model in ("models--x", "models--y"):
        (tmp_path / model / "blobs").mkdir(parents=True)
        (tmp_path / model / "blobs" / "11aa").write_bytes(tensors(a=3))
        (tmp_path / model / "blobs" / "22bb").write_text(json.dumps(CONFIG))
        place = tmp_path / model / "snapshots" / "rev"
        place.mkdir(parents=True)
        (place / "config.json").symlink_to("../../blobs/22bb")
        (place / "one.safetensors").symlink_to("../../../models--x/blobs/11aa")
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    found = read_checkpoint(str(tmp_path / "models--x" / "snapshots" / "rev"))
    assert (found.family, read_bytes(found.tensors["a"])) == ("llama", b"a" * 12)
    assert "leads out of its folder" in refused(tmp_path / "models--y" / "snapshots" / "rev").message
    (tmp_path / "named").symlink_to(tmp_path / "models--x" / "snapshots" / "rev")
    assert set(read_checkpoint(str(tmp_path / "named")).tensors) == {"a"}


def test_missing_shards_are_listed(folder):
    sharded(folder, {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}, one={"a": 3})
    fault = refused(folder)
    assert fault.message == (
        f"{folder} lacks 2 of the 3 shards that model.safetensors.index.json names: "
        "'three.safetensors', 'two.safetensors'"
    )
    assert fault.hint == "the download may be incomplete"


def test_tensors_missing_in_their_shard_are_listed_even_if_another_has_them(folder):
    sharded(
        folder, {"a": "two.safetensors", "b": "two.safetensors", "c": "one.safetensors"}, one={"a": 3}, two={"b": 1}
    )
    assert refused(folder).message == (
        f"{folder} lacks 2 of the 3 tensors in the shards that model.safetensors.index.json names: "
        "'a in two.safetensors', 'c in one.safetensors'"
    )


def test_a_tensor_in_two_shards_is_refused_and_one_that_no_index_names_is_reported(folder):
    sharded(folder, {"a": "one.safetensors", "b": "two.safetensors"}, one={"a": 3}, two={"b": 1, "more": 2})
    assert read_checkpoint(str(folder)).notes == ("model.safetensors.index.json does not name 'more'",)
    folder.write("two.safetensors", tensors(a=1, b=1))
    assert refused(folder).message == "tensor 'a' is in two files, one.safetensors and two.safetensors"


@pytest.mark.parametrize("content", [[], {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 3}}, {}])
def test_an_index_without_a_map_is_refused(folder, content):
    sharded(folder)
    folder.write("model.safetensors.index.json", content)
    assert "model.safetensors.index.json: weight_map does not map tensors to files: " in refused(folder).message


def test_a_folder_without_config_says_what_it_has(folder):
    (folder.path / "config.json").unlink()
    assert refused(folder).message == f"{folder} has no config.json: it holds 'model.safetensors'"
    (folder.path / "model.safetensors").unlink()
    assert refused(folder).message == f"{folder} has no config.json: it holds nothing"


def test_a_folder_without_config_suggests_the_checkpoint_or_the_file_in_it(folder):
    (folder.path / "config.json").unlink()
    assert refused(folder).hint == f"try {folder}/model.safetensors"
    (folder.path / "inner").mkdir()
    folder.write("inner/config.json", {})
    assert refused(folder).hint == f"try {folder}/inner"
    (folder.path / "inner" / "config.json").unlink()
    (folder.path / "model.safetensors").unlink()
    assert "config.json and .safetensors files" in refused(folder).hint


def test_a_folder_without_weights_says_what_it_has(folder):
    (folder.path / "model.safetensors").unlink()
    assert refused(folder).message.endswith(": it holds 'config.json'")


def test_pickles_alone_are_refused_with_advice_to_convert(folder):
    (folder.path / "model.safetensors").unlink()
    folder.write("pytorch_model.bin", b"\x80\x02}q.")
    fault = refused(folder)
    assert fault.message == (
        f"{folder} has its weights as pickles ('pytorch_model.bin'), not as safetensors, and mha opens no pickles, "
        "which can run code"
    )
    assert fault.hint == (
        "if you trust it, convert it with torch.load(…, weights_only=True) and safetensors.torch.save_file"
    )
    assert refused(folder.path / "pytorch_model.bin").hint == fault.hint
    folder.write("model.safetensors", b"\x80\x02}q." + b"x" * 20)
    assert "its first bytes are those of a pickle" in refused(folder).message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" " * ((1 << 20) + 1), "1.0 MiB"),
        (b"[" * 10_000 + b"]" * 10_000, " is JSON that is nested too deeply"),
        (b'{"a":' * 20 + b"1" + b"}" * 20, None),
        (b'{"a":' * 21 + b"1" + b"}" * 21, " is nested more than 20 deep"),
        (b"[]", " is not a JSON object but []"),
        (b"{", " is not JSON: "),
        (b'{"a": NaN}', " is not JSON: NaN"),
        (b'{"n_heads": 1000000000}', ": n_heads 1000000000 is not a whole number from 1 to 1024"),
        (b'{"n_heads": 1e9}', ": n_heads 1000000000.0 is not a whole number from 1 to 1024"),
        (
            b'{"num_attention_heads": 0}',
            ": n_heads (num_attention_heads) 0 is not a whole number from 1 to 1024",
        ),
        (b'{"num_heads": true}', ": n_heads (num_heads) True is not a whole number from 1 to 1024"),
        (b'{"hidden_size": "64"}', ": d_model (hidden_size) '64' is not a whole number from 1 to 65536"),
        (
            b'{"text_config": {"num_hidden_layers": -1}}',
            ": n_layers (text_config.num_hidden_layers) -1 is not a whole number from 1 to 10000",
        ),
        (b'{"num_heads": [2, 4, 99999]}', ": n_heads (num_heads) 99999 is not a whole number from 1 to 1024"),
        (b'{"a": {"b": [1, 9223372036854775808]}}', ": a.b[1] does not fit in 64 bits"),
        (b'{"num_heads": null, "n_layers": [2, 3]}', None),
    ],
)
def test_a_config_of_another_size_depth_or_range_is_refused_by_name(folder, content, message):
    folder.write("config.json", content)
    if message is None:
        assert read_checkpoint(str(folder)).family is None
    else:
        assert message in refused(folder).message
        assert f"{folder}/config.json" in refused(folder).message


def test_code_of_the_folder_is_ignored_with_a_note(folder):
    folder.write("config.json", {**CONFIG, "auto_map": {"AutoModel": "m.M"}, "trust_remote_code": True})
    folder.write("tokenizer_config.json", {"auto_map": {}})
    folder.write("modeling_x.py", b"raise SystemExit(9)")
    assert read_checkpoint(str(folder)).notes == (
        "auto_map of config.json is ignored: no code of the checkpoint is run",
        "trust_remote_code of config.json is ignored: no code of the checkpoint is run",
        "auto_map of tokenizer_config.json is ignored: no code of the checkpoint is run",
        "'modeling_x.py' is not run",
    )


def test_a_broken_tokenizer_config_is_reported_and_does_not_stop(folder):
    folder.write("tokenizer_config.json", b"[1]")
    folder.write("tokenizer.json", b"{}")
    found = read_checkpoint(str(folder))
    assert found.notes == ("tokenizer_config.json is ignored: tokenizer_config.json is not a JSON object but [1]",)
    assert found.tokenizer == f"{folder}/tokenizer.json"


def test_what_is_no_regular_file_is_refused_without_hanging(folder):
    path = folder.path / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    assert refused(folder).path == str(path)
    writer = os.open(path, os.O_RDWR)
    try:
        assert refused(folder).path == str(path)
    finally:
        os.close(writer)
    path.unlink()
    path.mkdir()
    assert refused(folder).message == f"{path} is a directory, not a file"


def test_a_path_that_is_nothing_is_reported(tmp_path, folder):
    fault = refused(tmp_path / "nowhere")
    assert fault.message == f"{tmp_path}/nowhere does not exist"
    assert fault.hint == "a checkpoint is read from this machine; nothing is downloaded"
    (tmp_path / "x.safetensors").symlink_to("gone")
    assert refused(tmp_path / "x.safetensors").message == f"{tmp_path}/x.safetensors is a broken link to gone"
    assert refused(folder.path / "config.json").message == (
        f"{folder}/config.json is neither a folder with config.json nor a .safetensors file"
    )


@pytest.mark.parametrize(("cut", "message"), [(-1, "1 B before the end of tensor 'b'"),
                                              (None, "bytes after its last tensor, 'b'")])  # fmt: skip
def test_a_file_of_another_length_is_refused_by_its_size(folder, cut, message):
    content = tensors(a=3, b=5)
    folder.write("model.safetensors", content[:cut] if cut else content + b"x")
    assert message in refused(folder).message


def test_a_file_that_is_cut_while_in_use_is_reported(folder):
    found = read_checkpoint(str(folder)).tensors["b"]
    path = folder.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(MhaError) as caught:
        read_bytes(found)
    assert caught.value.message == f"{path} was truncated while it was read: tensor 'b' has 16 of its 20 bytes"
    path.unlink()
    with pytest.raises(MhaError, match="cannot be read: No such file"):
        read_bytes(found)


def test_a_header_is_read_without_the_body(tmp_path):
    path, n = tmp_path / "large.safetensors", 1 << 40
    text = json.dumps({"w": {"dtype": "F32", "shape": [n // 4], "data_offsets": [0, n]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + n)  # a hole: a terabyte that takes no room
    header = read_tensor_header(str(path))
    assert (header.n_bytes, header.body_start, header.metadata) == (8 + len(text) + n, 8 + len(text), None)
    assert header.tensors["w"].shape == (n // 4,)


COUNTS = {
    "llama": ({**CONFIG, "num_key_value_heads": 2}, None, HeadCounts(2, 6, 2, 4, 4, 24)),
    "own width of heads": ({**CONFIG, "head_dim": 8}, None, HeadCounts(2, 6, 6, 8, 8, 24)),
    "gpt2": ({"n_embd": 24, "n_head": 3, "n_layer": 5, "vocab_size": 40, "n_positions": 16}, None,
             HeadCounts(5, 3, 3, 8, 8, 24, 40, 16)),
    "t5": ({"d_model": 24, "d_kv": 6, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 5}, "decoder",
           HeadCounts(5, 3, 3, 6, 6, 24)),
    "distilbert": ({"dim": 24, "n_heads": 3, "n_layers": 2}, None, HeadCounts(2, 3, 3, 8, 8, 24)),
    "whisper": ({"d_model": 24, "encoder_layers": 2, "decoder_layers": 5, "encoder_attention_heads": 3,
                 "decoder_attention_heads": 4, "num_hidden_layers": 2}, "cross", HeadCounts(5, 4, 4, 6, 6, 24)),
    "whisper's first half": ({"d_model": 24, "encoder_layers": 2, "decoder_layers": 5, "encoder_attention_heads": 3,
                              "decoder_attention_heads": 4}, None, HeadCounts(2, 3, 3, 8, 8, 24)),
    "nested": ({"text_config": CONFIG}, None, HeadCounts(2, 6, 6, 4, 4, 24)),
    "towers": ({"text_config": CONFIG, "vision_config": {"hidden_size": 32, "num_attention_heads": 4}}, "vision",
               HeadCounts(None, 4, 4, 8, 8, 32)),
    "falcon 7b": ({**CONFIG, "model_type": "falcon", "num_kv_heads": 6, "multi_query": True}, None,
                  HeadCounts(2, 6, 1, 4, 4, 24)),
    "falcon 40b": ({**CONFIG, "model_type": "falcon", "num_kv_heads": 2, "new_decoder_architecture": True}, None,
                   HeadCounts(2, 6, 2, 4, 4, 24)),
    "falcon rw": ({**CONFIG, "model_type": "falcon", "num_kv_heads": 2, "multi_query": False}, None,
                  HeadCounts(2, 6, 6, 4, 4, 24)),
    "gpt_bigcode": ({"model_type": "gpt_bigcode", "n_head": 6, "n_embd": 24, "num_key_value_heads": 6}, None,
                    HeadCounts(None, 6, 1, 4, 4, 24)),
    "gpt_bigcode, all heads": ({"model_type": "gpt_bigcode", "n_head": 6, "multi_query": False}, None,
                               HeadCounts(None, 6, 6)),
    "nothing": ({}, None, HeadCounts()),
    "uneven": ({"hidden_size": 25, "n_head": 6}, None, HeadCounts(None, 6, 6, None, None, 25)),
    "a list": ({"num_heads": [2, 4], "hidden_size": 24}, None, HeadCounts(d_model=24)),
}  # fmt: skip


@pytest.mark.parametrize("case", COUNTS)
def test_heads_are_counted_under_the_names_of_any_family(case):
    config, stack, counts = COUNTS[case]
    assert head_counts(config, stack) == counts


def test_a_size_that_is_missing_is_requested_under_both_names():
    with pytest.raises(MhaError) as caught:
        sizes_of({"hidden_size": 24}, None, {})
    assert caught.value.message == (
        "config.json does not have n_heads (num_attention_heads or n_head or n_heads or num_heads), without which rows cannot be "
        "split into heads"
    )
    assert sizes_of({"hidden_size": 24}, None, {"n_heads": 3}).d_head == 8
