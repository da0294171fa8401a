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
