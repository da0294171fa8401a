"""Effects in models with another head than that of a language model: its logits are measured, or
the reason is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_models import (
    TEXT,
    bert_config,
    filled,
    llama,
    llama_folder,
    saved,
    without_head,
    word_tokenizer,
)

import mhacli

pytestmark = pytest.mark.real
IDS = torch.tensor([[2, 20, 30, 40, 50, 3]])
WIDE = {"COLUMNS": "1000"}


def measured(model: Any, **options: Any) -> Any:
    """The record of effects, or None where they are refused in words that name the head of the
    model.
    """
    try:
        return mhacli.effects(model, IDS, **options)
    except mhacli.MhaError as fault:
        refusal = f"{fault} {fault.hint or ''}"
    assert re.search("class|head|label|logit", refusal, re.IGNORECASE)
    return None


@torch.no_grad()
def change_by_hand(
    model: Any, layer: int, head: int, logit: Callable[[Any], torch.Tensor]
) -> float:
    """How much a logit changes where the output projection of a layer does not see a head."""
    before = logit(model(input_ids=IDS))
    hook = without_head(model.bert.encoder.layer[layer].attention.output.dense, head)
    after = logit(model(input_ids=IDS))
    hook.remove()
    return float(after.double() - before.double())


def test_heads_of_a_classifier_of_texts_change_the_logit_of_the_class() -> None:
    import transformers

    model = filled(transformers.BertForSequenceClassification(bert_config(num_labels=3)))
    record = measured(model)
    if record is not None:
        with torch.no_grad():
            label = int(model(input_ids=IDS).logits[0].argmax())
        (effect,) = [effect for effect in record.effects if (effect.layer, effect.head) == (1, 2)]
        expected = change_by_hand(model, 1, 2, lambda outputs: outputs.logits[0, label])
        assert effect.d_logit == pytest.approx(expected, abs=1e-4)


def test_heads_of_a_classifier_of_tokens_change_the_logit_of_the_label() -> None:
    import transformers

    model = filled(transformers.BertForTokenClassification(bert_config(num_labels=5)))
    record = measured(model, position=2)
    if record is not None:
        with torch.no_grad():
            label = int(model(input_ids=IDS).logits[0, 2].argmax())
        (effect,) = [effect for effect in record.effects if (effect.layer, effect.head) == (0, 1)]
        expected = change_by_hand(model, 0, 1, lambda outputs: outputs.logits[0, 2, label])
        assert effect.d_logit == pytest.approx(expected, abs=1e-4)


def test_effects_in_a_model_that_answers_questions_are_measured_or_refused() -> None:
    import transformers

    record = measured(filled(transformers.BertForQuestionAnswering(bert_config())))
    assert record is None or len(record.effects) == len(record.layers) * record.config.n_heads


def test_the_command_says_that_a_folder_holds_a_classifier(mha: Any, tmp_path: Path) -> None:
    import transformers

    classifier = transformers.BertForSequenceClassification(bert_config(num_labels=3))
    word_tokenizer(saved(filled(classifier), tmp_path / "folder"))
    ended = mha("effect", TEXT, "--model", "folder", code=(0, 1, 2), env=WIDE)
    assert ended.code != 0 or re.search(
        "classif|class logit|label|LABEL_", f"{ended.stdout} {ended.stderr}"
    )


def test_a_config_without_architectures_still_has_its_language_head_or_a_reason(
    mha: Any, tmp_path: Path
) -> None:
    path = llama_folder(tmp_path / "folder") / "config.json"
    config = json.loads(path.read_text())
    del config["architectures"]
    path.write_text(json.dumps(config))
    ended = mha("effect", TEXT, "--model", "folder", "--layer", "1", code=(0, 1, 2), env=WIDE)
    words = f"{ended.stdout} {ended.stderr}"
    assert ended.code != 0 or "logit of" in words or re.search("architectures|language head", words)


def changes_of(model: Any, inputs: dict[str, Any], **options: Any) -> list[float]:
    """The measured change by each head."""
    effects = mhacli.effects(model, inputs, **options).effects
    return [each.d_output if each.d_logit is None else each.d_logit for each in effects]


COLLATED: dict[str, tuple[str, dict[str, Any]]] = {
    "words that are hidden": ("BertForMaskedLM", {"labels": IDS.masked_fill(IDS > 25, -100)}),
    "class": ("BertForSequenceClassification", {"labels": torch.tensor([1])}),
    "tags": ("BertForTokenClassification", {"labels": IDS.clamp(max=1)}),
    "answer": (
        "BertForQuestionAnswering",
        {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([3])},
    ),
    "two heads": ("BertForPreTraining", {"labels": IDS, "next_sentence_label": torch.tensor([0])}),
    "what is returned": (
        "BertForMaskedLM",
        {"return_dict": False, "output_attentions": True, "output_hidden_states": True},
    ),
}


@pytest.mark.parametrize(("name", "more"), COLLATED.values(), ids=COLLATED)
def test_effects_with_what_only_training_needs_are_those_without(
    name: str, more: dict[str, Any]
) -> None:
    import transformers

    model = filled(getattr(transformers, name)(bert_config()))
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    assert changes_of(model, {**inputs, **more}) == changes_of(model, inputs)


def test_effects_with_labels_in_a_decoder_measure_its_last_token() -> None:
    model, inputs = llama(), {"input_ids": IDS}
    more = {"labels": IDS, "use_cache": True, "logits_to_keep": 1}
    assert changes_of(model, {**inputs, **more}) == changes_of(model, inputs)


def test_a_metric_may_measure_the_loss() -> None:
    model, inputs = llama(), {"input_ids": IDS, "labels": IDS}
    changes = changes_of(model, inputs, metric=lambda output: output.loss)
    with torch.no_grad():
        before = model(**inputs).loss
        with mhacli.removed(model, heads=[(0, 0)]):
            after = model(**inputs).loss
    assert changes[0] == pytest.approx(float(after - before), abs=1e-5)


SIZES_OF_PAIR = {
    "vocab_size": 180,
    "d_model": 32,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
}


@pytest.mark.parametrize("family", ["Bart", "M2M100"])
def test_effects_with_labels_alone_measure_the_decoder_that_reads_them(family: str) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES_OF_PAIR)
    model = filled(getattr(transformers, f"{family}ForConditionalGeneration")(config))
    with_labels = changes_of(model, {"input_ids": IDS, "labels": torch.tensor([[20, 30, 40]])})
    decoder = {"decoder_input_ids": torch.tensor([[2, 20, 30]])}
    assert with_labels == changes_of(model, {"input_ids": IDS, **decoder})
