"""`mha doctor --model` and `mhacli.doctor`: healthy checkpoints pass every check, and each fault
fails its own.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import checkpoints, some
from support.checkpoints import BEGIN, BEGIN_ID, FAMILIES, OF_TEXT, TEXT
from torch import nn

import mhacli

PADDING = ("right-padding", "left-padding")
CHECKS = ("finite", "repeat", "causality", "cache", *PADDING, "batch", "eager", "row-sums", "bos")
ALWAYS = {"finite", "repeat", "right-padding", "batch", "row-sums"}
AT_PUSH = ("gpt2",)
ALIKE = "qwen2 olmo2 phi granite gpt_bigcode electra codegen falcon-groups roberta gptj".split()
"""Families whose passes are those of another one here."""
EXAMINED = tuple(name for name in (*OF_TEXT, "t5", "bart") if name not in ALIKE)


def doctor(mha: Any, place: Path | str, *words: str, code: int = 0) -> Any:
    """The report on a checkpoint."""
    return mha("doctor", "--model", place, *words, "--json", code=code).json


def status(report: Any) -> dict[str, str]:
    return {check["name"]: check["status"] for check in report["checks"]}


def failed(report: Any) -> list[str]:
    return [check["name"] for check in report["checks"] if check["status"] == "fail"]


def named(report: Any, name: str) -> Any:
    return next(check for check in report["checks"] if check["name"] == name)


# ------------------------------------------------------------------------------------------ healthy


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, None, marks=() if name in AT_PUSH else pytest.mark.real)
            for name in EXAMINED
        ),
        pytest.param("t5", "bfloat16", marks=pytest.mark.real),
        pytest.param("gemma3_text", "float16", marks=pytest.mark.real),
    ],
)
def test_no_family_is_accused_of_anything(name: str, dtype: str | None, mha: Any) -> None:
    report = doctor(mha, checkpoints.folder(name), *([] if dtype is None else ["--dtype", dtype]))
    words, family = status(report), FAMILIES[name]
    assert report["verdict"] == "healthy"
    assert sorted(words) == sorted(CHECKS)
    assert set(words.values()) <= {"pass", "n/a"}
    expected = (
        ALWAYS
        | ({"causality", "cache"} if family.causal else set())
        | ({"bos"} if name == "llama" else set())
    )
    expected |= set() if name in ("t5", "bart") else {"left-padding"}
    expected |= (
        {"eager"} if family.implementation == "sdpa" and not name.startswith("falcon") else set()
    )
    assert {check for check, word in words.items() if word == "pass"} == expected
    assert (report["model"]["family"], report["model"]["dtype"]) == (
        family.kind,
        dtype or "float32",
    )
    for check in report["checks"]:
        if check["status"] == "pass" and check["value"] is not None:
            assert check["value"] <= check["tolerance"]


@pytest.mark.real
def test_a_model_that_was_really_trained_is_healthy_and_in_memory_gets_the_same_report(
    mha: Any,
) -> None:
    import transformers

    place = checkpoints.minilm()
    report = doctor(mha, place)
    assert report["verdict"] == "healthy"
    assert status(report)["bos"] == "pass"
    model, tokenizer = (
        transformers.AutoModel.from_pretrained(place).train(),
        transformers.AutoTokenizer.from_pretrained(place),
    )
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    actual = mhacli.doctor(model, tokenizer)
    assert [(check.name, check.status, check.value) for check in actual.checks] == [
        (check["name"], check["status"], check["value"]) for check in report["checks"]
    ]
    assert actual.model.path == "BertModel"
    assert model.training
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "choices",
    [
        {"tokenizer": "byte"},
        {"texts": ["a text"]},
        {"model": nn.Linear(2, 2)},
        {"model": nn.Linear(2, 2), "device": "cpu"},
    ],
    ids=["tokenizer", "texts", "no model of transformers", "device"],
)
def test_what_does_not_go_together_is_refused_in_python(choices: dict[str, Any]) -> None:
    with pytest.raises(mhacli.MhaError) as caught:
        mhacli.doctor(**choices)
    assert caught.value.exit_code == 2


@pytest.mark.gpu
def test_a_model_of_few_positions_is_examined_on_a_gpu() -> None:
    model = copy.deepcopy(checkpoints.model("gpt2"))
    assert model.config.n_positions < 256
    assert mhacli.doctor(model.to("cuda")).verdict == "healthy"


def test_a_checkpoint_without_tokenizer_reads_random_ids(mha: Any, tmp_path: Path) -> None:
    place = checkpoints.copy_of("gpt2", tmp_path / "m")
    for path in place.glob("tokenizer*"):
        path.unlink()
    report = doctor(mha, "m")
    assert report["verdict"] == "healthy"
    assert "tokenizer" in " ".join(report["notes"])
    assert (
        mha("doctor", "--model", "m", "the cat", "--json", code=1).error["code"] == "no-tokenizer"
    )


def test_a_classifier_that_reads_its_answer_at_the_end_of_a_text_is_examined() -> None:
    automatic = "AutoModelForSequenceClassification"
    model = checkpoints.from_config("bart", FAMILIES["bart"].config, automatic=automatic)
    answers = {check.name: check.status for check in mhacli.doctor(model).checks}
    assert answers["batch"] == "pass"


@pytest.mark.real
def test_a_checkpoint_that_names_a_head_and_has_none_is_examined_without(
    mha: Any, tmp_path: Path
) -> None:
    checkpoints.change(
        checkpoints.copy_of("gpt_neox", tmp_path / "m"),
        lambda tensors: [tensors.pop(n) for n in [*tensors] if "embed_out" in n],
    )
    report = doctor(mha, "m")
    assert report["verdict"] == "healthy"
    assert report["model"]["architecture"] == "GPTNeoXModel"
    assert report["notes"]


@pytest.mark.real
def test_an_encoder_made_of_a_family_that_generates_may_see_all_tokens(
    mha: Any, tmp_path: Path
) -> None:
    place = checkpoints.copy_of("llama", tmp_path / "m")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(
        json.dumps(config | {"is_causal": False, "architectures": ["LlamaModel"]})
    )
    report = doctor(mha, "m")
    assert report["verdict"] == "healthy"
    assert status(report)["causality"] == "n/a"


@pytest.mark.real
def test_texts_can_be_given_and_one_token_leaves_questions_open(mha: Any) -> None:
    report = doctor(mha, checkpoints.folder("gpt2"), "a")
    assert report["verdict"] == "healthy"
    assert {name for name, word in status(report).items() if word == "n/a"} >= {
        "causality",
        "left-padding",
    }
    assert failed(doctor(mha, checkpoints.folder("gpt2"), TEXT, "one two", "--seed", "2")) == []


# ------------------------------------------------------------------------------------------- faults


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`wrap(owner, name, change)` puts `change(original, *args, **kwargs)` in the place of a
    function of transformers.
    """

    def put(owner: Any, name: str, change: Callable[..., Any]) -> None:
        original = owner[name] if isinstance(owner, dict) else getattr(owner, name)

        @functools.wraps(original)
        def changed(*args: Any, **kwargs: Any) -> Any:
            return change(original, *args, **kwargs)

        if isinstance(owner, dict):
            monkeypatch.setitem(owner, name, changed)
        else:
            monkeypatch.setattr(owner, name, changed)

    return put


def mask_dropped(wrap: Any) -> None:
    """All tokens see all others, in the mask and in the kernel."""
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.models.gpt2 import modeling_gpt2

    def no_mask(
        original: Any, config: Any, inputs_embeds: Any, attention_mask: Any, *_: Any, **__: Any
    ) -> Any:
        return create_bidirectional_mask(
            config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )

    def not_causal(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.is_causal = False

    wrap(modeling_gpt2, "create_causal_mask", no_mask)
    wrap(modeling_gpt2.GPT2Attention, "__init__", not_causal)


def attention(wrap: Any, change: Callable[..., Any]) -> None:
    from transformers import AttentionInterface

    wrap(AttentionInterface._global_mapping, "sdpa", change)


def padding_counted(wrap: Any) -> None:
    """Positions count padding on the left."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model

    wrap(
        GPT2Model,
        "forward",
        lambda original, self, *args, position_ids=None, **kwargs: original(self, *args, **kwargs),
    )


def positions_shifted(wrap: Any) -> None:
    """Positions behind a cache are too large by one."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Model

    def later(
        original: Any, self: Any, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if past:
            kwargs["position_ids"] = torch.arange(past, past + input_ids.shape[1])[None] + 1
        return original(self, input_ids=input_ids, past_key_values=past_key_values, **kwargs)

    wrap(GPT2Model, "forward", later)


def rows_mixed(wrap: Any) -> None:
    """Texts of a batch leak into each other."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    def mix(original: Any, self: Any, rows: Any) -> Any:
        out = original(self, rows)
        return out + 0.01 * (out.mean(dim=0, keepdim=True) - out)

    wrap(GPT2MLP, "forward", mix)


def padding_mask_lost(wrap: Any) -> None:
    """The mask for padding never arrives."""
    from transformers.models.bert import modeling_bert

    def lose(original: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return original(*args, attention_mask=None, **kwargs)

    wrap(modeling_bert, "create_bidirectional_mask", lose)


def larger_from_layer_1(wrap: Any) -> None:
    """The default implementation differs from eager from layer 1 on."""

    def larger(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        z, pattern = original(module, *args, **kwargs)
        return (z * 1.001 if module.layer_idx >= 1 else z), pattern

    attention(wrap, larger)


def dropout_left_on(wrap: Any) -> None:
    """Dropout acts in evaluation."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    wrap(
        GPT2MLP,
        "forward",
        lambda original, self, rows: nn.functional.dropout(
            original(self, rows), 0.1, training=True
        ),
    )


def weights_lost(wrap: Any) -> None:
    """Attention weights lose a tenth of their sum."""
    from transformers.models.bloom.modeling_bloom import BloomAttention

    class Less(nn.Dropout):
        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            return weights.mul_(0.9)

    def lossy(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.attention_dropout = Less()

    wrap(BloomAttention, "__init__", lossy)


FAULTS: dict[str, tuple[Callable[[Any], None], str, str | None]] = {
    "causality": (mask_dropped, "gpt2", "0"),
    "left-padding": (padding_counted, "gpt2", "0"),
    "cache": (positions_shifted, "gpt2", None),
    "batch": (rows_mixed, "gpt2", "1"),
    "right-padding": (padding_mask_lost, "bert", None),
    "eager": (larger_from_layer_1, "gpt2", "1"),
    "repeat": (dropout_left_on, "gpt2", None),
    "row-sums": (weights_lost, "bloom", "0"),
}
"""For each check a fault, a family with it, and the layer that is named."""


@pytest.mark.parametrize("check", some(FAULTS, default=("causality", "left-padding")))
def test_a_fault_of_the_model_fails_its_own_check(check: str, mha: Any, wrap: Any) -> None:
    fault, family, layer = FAULTS[check]
    fault(wrap)
    report = doctor(mha, checkpoints.folder(family), code=3)
    assert report["verdict"] == "unhealthy"
    assert failed(report) == [check]
    actual = named(report, check)
    assert actual["value"] is None or actual["value"] > 10 * actual["tolerance"]
    assert layer is None or layer in actual["layer"]
    assert actual["meaning"]
    assert actual["advice"]


@pytest.mark.parametrize("number", [math.nan, pytest.param(math.inf, marks=pytest.mark.real)])
def test_a_weight_that_is_no_number_is_named(number: float, mha: Any, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        next(each for name, each in tensors.items() if "h.1.attn.c_attn.weight" in name).view(-1)[
            5
        ] = number

    checkpoints.change(checkpoints.copy_of("gpt2", tmp_path / "m"), spoil)
    report = doctor(mha, "m", code=3)
    assert failed(report) == ["finite"]
    assert "h.1.attn.c_attn.weight" in named(report, "finite")["message"]
    assert "1" in named(report, "finite")["layer"]


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_fault_is_seen_in_16_bits_too(dtype: str, mha: Any, wrap: Any) -> None:
    positions_shifted(wrap)
    report = doctor(mha, checkpoints.folder("gpt2"), "--dtype", dtype, code=3)
    assert "cache" in failed(report)


SAID = "{% for m in messages %}{{m['content']}}{% endfor %}"


BEGINNINGS = {
    "tokenizer": (f"{BEGIN} {BEGIN} $A", None, "fail", 2),
    "template": (None, f"{BEGIN}{BEGIN}{BEGIN}{SAID}", "fail", 3),
    "both": (None, f"{BEGIN}{SAID}", "care", 2),
    "never": ("$A", SAID, "pass", 0),
    "once": (None, None, "pass", 1),
}
"""What the tokenizer puts around a text, the chat template, and what the check says of them."""


@pytest.mark.parametrize("name", some(BEGINNINGS, default=["once"]))
def test_a_beginning_that_is_doubled_fails(name: str, mha: Any, tmp_path: Path) -> None:
    from tokenizers import processors

    around, template, word, value = BEGINNINGS[name]
    place, tokenizer = (
        checkpoints.copy_of("llama", tmp_path / "m"),
        checkpoints.tokenizer_of("llama"),
    )
    if around is not None:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[(BEGIN, BEGIN_ID)]
        )
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(place)
    report = doctor(mha, "m", code=3 if word == "fail" else 0)
    actual = named(report, "bos")
    assert (actual["status"], actual["value"]) == (word, value)
    assert failed(report) == (["bos"] if word == "fail" else [])


def test_a_model_that_reads_no_text_is_refused(mha: Any) -> None:
    assert "vit" in mha("doctor", "--model", checkpoints.folder("vit"), "--json", code=(1, 2)).said
