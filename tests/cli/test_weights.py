"""`mha weights` as real processes: what folders hold, a layer out of them and back, and what bad folders get."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from support import processes
from support.processes import NO_TORCH, WITH_TORCH, Launch, forms, state_of
from support.tensor_files import tensors

from mhacli.attention import convert
from mhacli.checkpoints.contents import contents_of
from mhacli.checkpoints.families import LAYOUTS
from mhacli.checkpoints.folder import read_checkpoint
from mhacli.checkpoints.head_counts import ProjectionSizes
from mhacli.cli.shared.next_steps import suggest_after_contents
from mhacli.errors import MhaError

WORDS = ("the", "cat", "sat", "on", "a", "mat", "<unk>")
D, HEADS = 24, 3
GPT2 = {"model_type": "gpt2", "n_embd": D, "n_head": HEADS, "n_layer": 2, "n_positions": 16, "vocab_size": 9}


def gpt2(folder, *, dtype=torch.float32, words=WORDS, **config):
    """A GPT-2 of two layers, tiny and random, with a tokenizer of a few words and two rows that no word names."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    shapes = {"wte.weight": (9, D), "wpe.weight": (16, D)}
    for i in (0, 1):
        shapes |= {f"h.{i}.attn.c_attn.weight": (D, 3 * D), f"h.{i}.attn.c_attn.bias": (3 * D,),
                   f"h.{i}.attn.c_proj.weight": (D, D), f"h.{i}.attn.c_proj.bias": (D,), f"h.{i}.ln_1.weight": (D,)}  # fmt: skip
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    safetensors.torch.save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(GPT2 | config))
    if words:
        tokenizer(folder / "tokenizer.json", words)
    return made


def tokenizer(path, words):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))


def mha(folder, *words, code=0, form=(), says=(), writes=(), torch_free=True):
    """`mha weights` with the invariants of every process; by default on a machine where torch would end it."""
    before = state_of(folder)
    launch = Launch(modules=NO_TORCH if torch_free else WITH_TORCH)
    outcome = processes._run(folder, ["weights", *words, *form], form, launch)
    processes.require_invariants(outcome, {code})
    after = state_of(folder)
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} <= set(writes)
    for piece in says:
        assert piece in (outcome.told if code else outcome.stdout + outcome.stderr)
    return outcome


def run(folder, *words, code=0):
    outcome = processes._run(folder, ["run", *words], (), Launch(modules=WITH_TORCH))
    assert outcome.code == code, outcome
    return outcome


def test_info_tells_what_a_folder_holds_without_torch(tmp_path):
    gpt2(tmp_path / "m")
    shown = mha(tmp_path, "info", "m").stdout
    for piece in (
        "family gpt2 · 5,448 parameters · 12 tensors · 21.3 KiB · 1 file",
        "vocabulary 9 · positions 16",
        "self            2      3         3       8       24    qkvo               384 B",
        "F32         12       5,448  21.3 KiB",
    ):
        assert piece in shown
    assert "h.0.attn" not in shown
    assert "h.0.attn.c_attn.weight  F32    24 × 72" in mha(tmp_path, "info", "m", "--tensors").stdout


def test_a_run_of_what_the_headers_describe_is_suggested_next(tmp_path, capsys):
    gpt2(tmp_path / "m")
    contents = contents_of(read_checkpoint(str(tmp_path / "m")))
    suggest_after_contents(replace(contents, path="m"))
    suggest_after_contents(replace(contents, path="layer.safetensors", kind="layer"))
    suggest_after_contents(replace(contents, attentions=()))
    assert capsys.readouterr().out.splitlines() == [
        'next: mha run "the cat sat on the mat" --model m',
        'next: mha run "the cat sat on the mat" --weights layer.safetensors',
    ]


def test_info_is_one_document_of_its_schema(tmp_path):
    gpt2(tmp_path / "m", dtype=torch.bfloat16)
    found = json.loads(mha(tmp_path, "info", "m", form=("--json",)).stdout)
    assert {name: found[name] for name in ("schema", "kind", "family", "layout", "n_tensors", "n_parameters", "n_bytes")} == {
        "schema": "mha.weights-info/1", "kind": "checkpoint", "family": "gpt2", "layout": "gpt2", "n_tensors": 12,
        "n_parameters": 5448, "n_bytes": 10896,
    }  # fmt: skip
    assert found["attentions"] == [
        {"stack": "self", "n_layers": 2, "n_heads": 3, "n_kv_heads": 3, "d_head": 8, "d_v": 8, "d_model": 24,
         "biases": "qkvo", "cache_bytes": 2 * 3 * (8 + 8) * 2}
    ]  # fmt: skip
    assert found["dtypes"] == [{"dtype": "BF16", "n_tensors": 12, "n_parameters": 5448, "n_bytes": 10896}]
    assert found["files"][0]["name"] == "model.safetensors"
    assert "tensors" not in found
    listed = json.loads(mha(tmp_path, "info", "m", "--tensors", form=("--json",)).stdout)["tensors"]
    assert {"name": "wpe.weight", "dtype": "BF16", "shape": [16, 24], "n_bytes": 768} in listed


def test_the_cache_of_shared_keys_is_as_small_as_their_heads(tmp_path):
    (tmp_path / "m").mkdir()
    names = [f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1, 2) for p in "qkvo"]
    shapes = {"q": (24, 24), "k": (8, 24), "v": (8, 24), "o": (24, 24)}
    made = {name: torch.zeros(shapes[name[-13]], dtype=torch.float16) for name in names}
    safetensors.torch.save_file(made, tmp_path / "m" / "model.safetensors")
    config = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2,
              "num_hidden_layers": 5}  # fmt: skip
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    found = json.loads(mha(tmp_path, "info", "m", form=("--json",)).stdout)
    assert found["attentions"][0]["cache_bytes"] == 3 * 2 * (4 + 4) * 2
    assert found["attentions"][0]["biases"] == ""
    assert found["notes"] == ["config.json gives 5 layers of self, but the tensors make 3"]


def test_names_of_tensors_and_files_reach_the_screen_as_escapes(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "x\\u001b[2J"}')
    safetensors.torch.save_file({"w\x1b]52;\u202e": torch.zeros(2)}, tmp_path / "m" / "model.safetensors")
    shown = mha(tmp_path, "info", "m", "--tensors", says=("x\\x1b[2J", "w\\x1b]52;\\u202e"))
    assert "no attention that is known" in shown.stdout


@forms
def test_a_layer_of_a_folder_becomes_a_file_that_runs(tmp_path, form):
    made = gpt2(tmp_path / "m")
    done = mha(tmp_path, "convert", "m", "--layer", "1", "-o", "l.safetensors", form=form, writes=["l.safetensors"],
               torch_free=False)  # fmt: skip
    assert "2 rows of the embedding have no token and are left out" in done.stderr
    if form:
        document = json.loads(done.stdout)
        assert (document["schema"], document["layout"], document["prefix"]) == (
            "mha.weights-convert/1", "gpt2", "h.1.attn.")  # fmt: skip
        assert document["check"]["ok"]
        assert document["check"]["max_abs_error"] < 1e-11
        assert document["embedding"] == {"rows": 7, "vocabulary": 7}
    else:
        assert "check: q, k, v and out in float64, source against result, differ by" in done.stdout
    written = safetensors.torch.load_file(tmp_path / "l.safetensors")
    assert torch.equal(written["embed.weight"], made["wte.weight"][:7])
    assert torch.equal(written["embed_positions.weight"], made["wpe.weight"])
    assert torch.equal(written["k_proj.weight"], made["h.1.attn.c_attn.weight"][:, D : 2 * D].T)
    shown = run(tmp_path, "the cat sat", "--weights", "l.safetensors", "--view", "none", "--tokens")
    for piece in ("positions learned · causal", "vocabulary of 7", "self-check ok"):
        assert piece in " ".join(shown.stdout.split())
    assert "l.safetensors is layer 1 of a model and reads token embeddings here" in " ".join(shown.stderr.split())


def test_the_pattern_of_a_run_is_that_of_the_formula(tmp_path):
    made = gpt2(tmp_path / "m", dtype=torch.float64)
    mha(tmp_path, "convert", "m", "-o", "l.safetensors", torch_free=False, writes=["l.safetensors"])
    shown = run(tmp_path, "the cat sat", "--weights", "l.safetensors", "--json")
    rows = made["wte.weight"][:3] + made["wpe.weight"][:3]
    q, k, v = (rows @ made["h.0.attn.c_attn.weight"] + made["h.0.attn.c_attn.bias"]).split(D, dim=1)
    q, k, v = (each.view(3, HEADS, 8).transpose(0, 1) for each in (q, k, v))
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -torch.inf)
    z = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    out = z @ made["h.0.attn.c_proj.weight"] + made["h.0.attn.c_proj.bias"]
    document = json.loads(shown.stdout)
    torch.testing.assert_close(torch.tensor(document["out"][0], dtype=torch.float64), out)
    torch.testing.assert_close(torch.tensor(document["pattern"][0], dtype=torch.float64), scores.softmax(-1))


def test_a_layer_goes_back_under_the_names_of_its_family_and_of_another(tmp_path):
    made = gpt2(tmp_path / "m", dtype=torch.bfloat16)
    mha(tmp_path, "convert", "m", "--layer", "1", "-o", "l.safetensors", torch_free=False, writes=["l.safetensors"])
    mha(tmp_path, "convert", "l.safetensors", "--to", "gpt2", "--layer", "1", "-o", "b.safetensors", torch_free=False,
        writes=["b.safetensors"])  # fmt: skip
    back = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert back.keys() == {
        f"transformer.h.1.attn.{n}" for n in ("c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias")
    }
    assert all(torch.equal(tensor, made[name.removeprefix("transformer.")]) for name, tensor in back.items())
    mha(tmp_path, "convert", "l.safetensors", "--to", "torch", "-o", "t.safetensors", torch_free=False,
        writes=["t.safetensors"])  # fmt: skip
    torch.nn.MultiheadAttention(D, HEADS).load_state_dict(safetensors.torch.load_file(tmp_path / "t.safetensors"))


def test_a_file_without_config_is_read_by_layout_and_heads(tmp_path):
    module = torch.nn.MultiheadAttention(D, HEADS)
    safetensors.torch.save_file(
        {f"layers.4.self_attn.{n}": t for n, t in module.state_dict().items()}, tmp_path / "t.safetensors"
    )
    mha(
        tmp_path,
        "convert",
        "t.safetensors",
        "-o",
        "l.safetensors",
        code=1,
        says=("--layout NAME", "the config has no model_type"),
    )
    mha(tmp_path, "convert", "t.safetensors", "--layout", "torch", "-o", "l.safetensors", code=2,
        says=("the number of heads is not known",))  # fmt: skip
    shown = mha(tmp_path, "convert", "t.safetensors", "--layout", "torch", "--heads", "3", "-o", "l.safetensors",
                torch_free=False, writes=["l.safetensors"])  # fmt: skip
    assert "positions and mask are not known" in shown.stderr
    run(tmp_path, "--random", "2,5", "--weights", "l.safetensors", "--view", "none")
    assert "a layer of mha" in mha(tmp_path, "info", "l.safetensors").stdout


def test_without_the_embedding_a_layer_runs_on_random_rows(tmp_path):
    gpt2(tmp_path / "m")
    done = mha(
        tmp_path, "convert", "m", "--no-embedding", "-o", "l.safetensors", torch_free=False, writes=["l.safetensors"]
    )
    assert "positions are none: the table of learned positions is not converted" in done.stderr
    assert "embedding of" not in done.stdout
    shown = run(tmp_path, "--random", "1,4", "--weights", "l.safetensors", "--view", "none")
    assert "token embeddings" not in shown.stderr


def test_without_a_tokenizer_the_words_come_from_a_vocabulary(tmp_path):
    gpt2(tmp_path / "m", words=())
    done = mha(tmp_path, "convert", "m", "-o", "l.safetensors", torch_free=False, writes=["l.safetensors"])
    assert "with --vocab FILE" in done.stderr
    (tmp_path / "v.json").write_text(json.dumps([*WORDS, "x", "y"]))
    run(tmp_path, "the mat", "--weights", "l.safetensors", "--vocab", "v.json", "--view", "none")


def test_more_words_than_rows_are_left_out_with_a_note(tmp_path):
    gpt2(tmp_path / "m", words=(*WORDS, "a1", "a2", "a3"))
    done = mha(tmp_path, "convert", "m", "-o", "l.safetensors", torch_free=False, writes=["l.safetensors"])
    assert "the vocabulary is left out: tokenizer.json has 10 tokens, the embedding 9 rows" in done.stderr


def test_a_wrong_conversion_is_noticed_with_exit_3_and_nothing_is_written():
    layout, sizes = LAYOUTS["llama"], ProjectionSizes(3, 3, 4, 4, 12, 12)
    original = {
        f"{p}_proj.weight": torch.randn(12, 12, generator=torch.Generator().manual_seed(i))
        for i, p in enumerate("qkvo")
    }
    ours = dict(original)
    assert convert._agreed(original, ours, layout, sizes).ok
    for part in "qkvo":
        with pytest.raises(MhaError) as caught:
            convert._agreed(
                original, ours | {f"{part}_proj.weight": ours[f"{part}_proj.weight"].T.contiguous()}, layout, sizes
            )
        assert (caught.value.exit_code, caught.value.code) == (3, "self-check")
        assert caught.value.message.startswith("the converted layer does not compute what its source does: ")


def test_a_file_that_exists_is_kept_unless_forced(tmp_path):
    gpt2(tmp_path / "m")
    (tmp_path / "l.safetensors").write_bytes(b"kept")
    mha(tmp_path, "convert", "m", "-o", "l.safetensors", code=1, says=("l.safetensors exists",))
    mha(tmp_path, "convert", "m", "-o", "l.safetensors", "--force", torch_free=False, writes=["l.safetensors"])
    assert (tmp_path / "l.safetensors").stat().st_size > 4


@forms
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["info"], 2, "no checkpoint is given"),
        (["info", "nowhere"], 1, "nowhere does not exist"),
        (["info", "m", "--layout", "gpt5"], 2, "gpt5"),
        (["convert", "m"], 2, "no file to write is given"),
        (["convert", "m", "-o", "x/y.safetensors"], 1, "x"),
        (["convert", "m", "-o", "l.safetensors", "--layer", "2"], 2, "--layer 2 "),
        (["convert", "m", "-o", "l.safetensors", "--layer", "-1"], 2, "-1"),
        (
            ["convert", "m", "-o", "l.safetensors", "--stack", "up"],
            2,
            "--stack up ",
        ),
        (["convert", "m", "-o", "l.safetensors", "--layout", "llama"], 1, "layout llama"),
        (
            ["convert", "m", "-o", "l.safetensors", "--layout", "gpt_bigcode"],
            1,
            "layout gpt_bigcode",
        ),
        (["convert", "m", "-o", "l.safetensors", "--heads", "5"], 1, "[24, 72]"),
        (["convert", "m", "-o", "l.safetensors", "--prefix", "h.7."], 1, "'h.7.c_attn.weight'"),
        (["convert", "m", "-o", "l.safetensors", "--to", "t5000"], 2, "t5000"),
        (
            ["convert", "m/model.safetensors", "-o", "l.safetensors", "--to", "gpt2"],
            1,
            "lacks the matrices embed.weight",
        ),
        (["convert", "m", "-o", "l.safetensors", "--to", "gpt2"], 1, "m is a directory, not a file"),
        (["burn"], 2, "no such command: burn"),
    ],
)
def test_a_usage_or_name_that_cannot_be_is_told_without_torch(tmp_path, words, code, says, form):
    gpt2(tmp_path / "m")
    mha(tmp_path, *words, code=code, form=form, says=(says,))


def broken(place, kind):
    """A checkpoint with one fault."""
    gpt2(place)
    whole, index = place / "model.safetensors", place / "model.safetensors.index.json"

    def only_index(named):
        whole.unlink()
        index.write_text(json.dumps({"weight_map": named}))

    if kind == "shard":
        only_index({"w": "../../etc/passwd"})
    elif kind == "absolute":
        only_index({"w": "/etc/x.safetensors"})
    elif kind == "missing":
        only_index({"w": "one.safetensors"})
    elif kind == "link":
        whole.unlink()
        (place.parent / "outside").write_bytes(tensors(a=3))
        whole.symlink_to("../outside")
    elif kind == "pickles":
        whole.rename(place / "pytorch_model.bin")
    elif kind == "empty":
        whole.write_bytes(b"")
    elif kind == "header":
        whole.write_bytes(struct.pack("<Q", 1 << 63))
    elif kind == "deep header":
        whole.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000)
    elif kind == "huge config":
        (place / "config.json").write_bytes(b" ")
        os.truncate(place / "config.json", 200 << 20)
    elif kind == "deep config":
        (place / "config.json").write_text('{"a":' * 10_000 + "1" + "}" * 10_000)
    elif kind == "heads":
        (place / "config.json").write_text(json.dumps(GPT2 | {"n_head": 10**9}))
    elif kind == "pipe":
        whole.unlink()
        os.mkfifo(whole)


@forms
@pytest.mark.parametrize("command", ["info", "convert"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "shard",
            "'../../etc/passwd'",
        ),
        ("absolute", "'/etc/x.safetensors'"),
        ("missing", "'one.safetensors'"),
        ("link", "leads out of its folder"),
        ("pickles", "safetensors.torch.save_file"),
        ("empty", "0 bytes"),
        ("header", "9223372036854775808 bytes"),
        ("deep header", "nested"),
        ("huge config", "1.0 MiB"),
        ("deep config", "nested"),
        ("heads", "n_heads (n_head) 1000000000 is not a whole number from 1 to 1024"),
        ("pipe", "FIFO"),
    ],
)
def test_a_hostile_folder_is_refused_by_name_without_torch(tmp_path, kind, says, command, form):
    broken(tmp_path / "m", kind)
    mha(
        tmp_path,
        command,
        "m",
        *(["-o", "l.safetensors"] if command == "convert" else []),
        code=1,
        form=form,
        says=(says,),
    )


def test_code_in_a_folder_is_never_run(tmp_path):
    gpt2(tmp_path / "m", auto_map={"AutoModel": "evil.M"}, trust_remote_code=True)
    (tmp_path / "m" / "evil.py").write_text("import os; os.mkdir('/tmp/evil')")
    told = ("auto_map of config.json is ignored: no code of the checkpoint is run", "'evil.py' is not run")
    mha(tmp_path, "info", "m", says=told)


@pytest.mark.parametrize(
    ("name", "change", "code", "says"),
    [
        ("h.0.attn.c_attn.weight", lambda t: t.index_fill(0, torch.tensor([3]), torch.nan), 1,
         "c_attn.weight has 72 NaN or Inf, the first at [3, 0]"),
        ("h.0.attn.c_attn.weight", lambda t: t.to(torch.int32), 1, "I32"),
        ("h.0.attn.c_attn.weight", lambda t: t.to(torch.float8_e4m3fn), 1, "dequantise the weights first"),
        ("h.0.attn.c_attn.weight", lambda t: t.T.contiguous(), 1, "h.0.attn.c_attn.weight is [72, 24], not [24, 72]"),
        ("wte.weight", lambda t: t[:, :8].contiguous(), 0, "'wte.weight' [9, 8] is left out"),
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_be_taken_over_is_named(tmp_path, name, change, code, says):
    made = gpt2(tmp_path / "m")
    made[name] = change(made[name])
    safetensors.torch.save_file(made, tmp_path / "m" / "model.safetensors")
    writes = ["l.safetensors"] if not code else []
    mha(tmp_path, "convert", "m", "-o", "l.safetensors", code=code, says=(says,), torch_free=False, writes=writes)


def test_what_does_not_fit_in_memory_is_foreseen(tmp_path):
    (tmp_path / "m").mkdir()
    header, at = {}, 0
    for name, shape in {
        "wte.weight": (1 << 31, D),
        "h.0.attn.c_attn.weight": (D, 3 * D),
        "h.0.attn.c_proj.weight": (D, D),
    }.items():
        n = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    (tmp_path / "m" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(tmp_path / "m" / "model.safetensors", 8 + len(text) + at)
    (tmp_path / "m" / "config.json").write_text(json.dumps(GPT2))
    mha(tmp_path, "convert", "m", "-o", "l.safetensors", code=1,
        says=("needed for the conversion", "--no-embedding"))  # fmt: skip


def test_help_of_the_group_and_its_commands_needs_no_torch(tmp_path):
    assert mha(tmp_path).stdout == mha(tmp_path, "--help").stdout
    group = mha(tmp_path).stdout
    assert "info" in group
    assert "convert" in group
    for command in ("info", "convert"):
        assert f"Usage: mha weights {command}" in mha(tmp_path, command, "--help").stdout
