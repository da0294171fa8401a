"""Messages and notes of people's everyday mistakes: each says what is so."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.small_models import bert_config, filled, llama
from torch import nn

import mhacli

WEIGHTS = np.full((1, 2, 3, 3), 1 / 3, dtype=np.float32)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "three words here")


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a.npz": (lambda path: np.savez(path, attn=WEIGHTS), "numpy"),
    "a.npy": (lambda path: np.save(path, WEIGHTS), "numpy"),
    "a.zip": (zipped, "a zip archive"),
    "a.pt": (lambda path: torch.save({"a": torch.ones(2)}, path), "opens no pickles"),
    "renamed": (lambda path: torch.save({"a": torch.ones(2)}, path), "opens no pickles"),
}


@pytest.mark.parametrize("words", ["show", "diff", "weights info", "run the --weights"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_is_named_as_what_it_is(
    name: str, words: str, mha: Any, tmp_path: Path
) -> None:
    make, kind = FILES[name]
    make(tmp_path / name)
    more = [name] if words == "diff" else []
    said = mha(*words.split(), name, *more, code=(1, 2)).said
    assert kind in " ".join(said.split())


class TakesOneDict(nn.Module):
    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.bert = filled(transformers.BertModel(bert_config()))
        self.repeats = repeats

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The vectors of each text, several times."""
        inputs = {name: rows.repeat(self.repeats, 1) for name, rows in batch.items()}
        return self.bert(**inputs).last_hidden_state


@pytest.mark.real
@pytest.mark.parametrize("n_texts", [1, 2, 3])
@pytest.mark.parametrize("repeats", [1, 2])
def test_tokens_that_are_shown_are_not_said_to_be_hidden(n_texts: int, repeats: int) -> None:
    ids = torch.tensor([[2, 20, 21, 22, 3], [2, 30, 3, 0, 0], [2, 7, 8, 3, 0]][:n_texts])
    model = TakesOneDict(repeats).eval()
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model({"input_ids": ids, "attention_mask": (ids != 0).long()})
    tokens = [list(text.tokens) for text in seen.record.sequences]
    rows = [[str(i) for i in row if i] for row in ids.tolist()] * repeats
    is_said = any("shown as positions" in note for note in seen.notes)
    assert tokens == rows if not is_said else tokens != rows


def called_in_thread(call: Callable[[], object]) -> None:
    """Calls a model in a thread, whose exception nobody sees."""

    def quiet() -> None:
        with pytest.raises(mhacli.MhaError):
            call()

    thread = threading.Thread(target=quiet)
    thread.start()
    thread.join()


@pytest.mark.real
def test_a_call_that_was_refused_is_not_said_to_be_missing() -> None:
    model, ids = llama(), torch.tensor([[0, 45, 17, 99]])
    with mhacli.inspecting(model, threads=False) as seen:
        called_in_thread(lambda: model.generate(ids, max_new_tokens=2, pad_token_id=2))
    with pytest.raises(mhacli.MhaError, match="thread"):
        _ = seen.record
    removing = mhacli.removed(model, heads=[(0, 1)], threads=False)
    with pytest.raises(mhacli.MhaError, match="thread"), removing:
        called_in_thread(lambda: model(ids))


@pytest.mark.real
def test_a_call_whose_tensors_cannot_be_read_is_named_afterwards() -> None:
    model = llama()
    with mhacli.inspecting(model) as seen, pytest.raises(mhacli.MhaError):
        model.to("meta")(torch.zeros(1, 4, dtype=torch.long, device="meta"))
    with pytest.raises(mhacli.MhaError, match="cannot be read"):
        _ = seen.record


@pytest.mark.real
def test_effects_do_not_deny_a_keyword_of_the_model() -> None:
    model, ids = llama(), torch.tensor([[0, 45, 17, 99]])
    plain = mhacli.effects(model, {"input_ids": ids})
    asked = mhacli.effects(model, {"input_ids": ids, "output_attentions": True})
    assert [e.d_logit for e in plain.effects] == [e.d_logit for e in asked.effects]
    with pytest.raises(mhacli.MhaError, match="may ignore typo"):
        mhacli.effects(model, {"input_ids": ids, "typo": 1})
