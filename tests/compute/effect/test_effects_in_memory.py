"""`mhacli.effects` of a model in memory against `mha effect` of the same checkpoint."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from support.checkpoints_saved import TEXT, Checkpoints, tokenizer_of
from support.model_families import FAMILIES, ids_of, made

import mhacli
from mhacli.cli.app import main
from mhacli.render.json import pieces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints")).of("gpt2")


def loaded(folder: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def small() -> Any:
    family = FAMILIES["gpt2"]
    return made(family.kind, family.choices, automatic="AutoModelForCausalLM")


@pytest.mark.parametrize(("words", "options"), [
    ((), {}),
    (("--head", "1.2,0.3", "--replace", "mean", "--target", "a"), {"heads": [(1, 2), (0, 3)], "replace": "mean", "target": "a"}),
    (("--edges", "--layer", "1", "--judge"), {"edges": True, "layers": [1], "judge": True}),
    (("--screen", "2", "--at", "3"), {"screen": 2, "at": 3}),
], ids=["all heads", "some heads", "edges", "screen"])  # fmt: skip
def test_the_effects_are_those_of_the_command(
    folder: str,
    words: tuple[str, ...],
    options: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, tokenizer = loaded(folder), tokenizer_of("gpt2")
    record = mhacli.effects(model, tokenizer(TEXT, return_tensors="pt"), tokenizer, **options)
    monkeypatch.setattr(sys, "argv", ["mha", "effect", TEXT, "--model", folder, "--json", *words])
    assert main() == 0
    document = json.loads(capsys.readouterr().out)
    mine = json.loads("".join(pieces(record)))
    assert mine["effects"] == document["effects"]
    assert mine["effect"] == document["effect"]
    assert mine["sequences"][0]["tokens"] == document["sequences"][0]["tokens"]


def test_tokens_are_their_ids_without_a_tokenizer_and_the_model_stays_as_it_was() -> None:
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = ids_of(1, 7)
    record = mhacli.effects(model, ids, heads=[(1, 2)], target=torch.tensor(5), versus="7")
    assert record.effect is not None
    assert (record.effect.target, record.effect.target_id, record.effect.versus_id) == ("5", 5, 7)
    assert list(record.sequences[0].tokens) == [str(i) for i in ids[0].tolist()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [*mhacli.effects(model, ids[0].tolist(), heads=[(1, 2)], target=5, versus="7").effects] == [*record.effects]


def test_another_text_is_resampled_from() -> None:
    record = mhacli.effects(small(), ids_of(1, 7), heads=[(1, 2)], replace="resample", other=ids_of(1, 7))
    assert [effect.d_output for effect in record.effects] == [0], "the same text"


@pytest.mark.parametrize(("change", "message"), [
    (lambda model: (model.train(), ids_of(1, 5), {}), "GPT2LMHeadModel is in training mode"),
    (lambda model: (torch.nn.Linear(2, 2), ids_of(1, 5), {}), "mhacli.effects needs a model of transformers, not a Linear"),
    (lambda model: (model, "a text", {}), "'a text' is a text, and no tokenizer is given"),
    (lambda model: (model, ids_of(2, 5), {}), "mhacli.effects takes the ids of one text, not torch.int64 of shape (2, 5)"),
    (lambda model: (model, {"input_ids": ids_of(1, 3), "attention_mask": torch.tensor([[0, 1, 1]])}, {}),
     "mhacli.effects cannot take attention_mask as it is given"),
    (lambda model: (model, {"pixel_values": torch.ones(1)}, {}), "mhacli.effects cannot take pixel_values as it is given"),
    (lambda model: (model, {}, {}), "mhacli.effects needs input_ids"),
    (lambda model: (model, ids_of(1, 5), {"heads": [3]}), "heads: 3 is not (layer, head)"),
    (lambda model: (model, ids_of(1, 5), {"heads": [(0, 1.5)]}), "heads: (0, 1.5) is not (layer, head)"),
    (lambda model: (model, ids_of(1, 5), {"heads": [(9, 0)]}), "heads 9.0: there is no layer 9 with attention"),
    (lambda model: (model, ids_of(1, 5), {"heads": [("cross", 1, 0)]}), "heads cross.1.0: there is no layer cross.1"),
    (lambda model: (model, ids_of(1, 5), {"heads": []}), "heads [] is not a list of heads"),
    (lambda model: (model, ids_of(1, 5), {"layers": [9]}), "layers 9 has no attention"),
    (lambda model: (model, ids_of(1, 5), {"layers": "1"}), "layers '1' is not a list of layers"),
    (lambda model: (model, ids_of(1, 5), {"layers": [("corss", 1)]}), "layers: ('corss', 1) is not a layer"),
    (lambda model: (model, ids_of(1, 5), {"position": 1.5}), "position 1.5 is not a whole number"),
    (lambda model: (model, ids_of(1, 5), {"target": 500}), "target 500 is out of range: 0 to 98"),
    (lambda model: (model, ids_of(1, 5), {"position": 5}), "position 5 is out of range: 0 to 4"),
    (lambda model: (model, ids_of(1, 5), {"at": 5}), "at 5 is out of range: 0 to 4"),
    (lambda model: (model, ids_of(1, 5), {"at": -1}), "at -1 is below 0"),
    (lambda model: (model, ids_of(1, 5), {"versus": "1 2"}), "versus '1 2' is 2 tokens: '1' '2'"),
    (lambda model: (model.base_model, ids_of(1, 5), {"screen": 2}), "screen needs a language head, which this model does not"),
    (lambda model: (model, ids_of(1, 5), {"screen": 2, "edges": True}), "edges and screen exclude each other"),
    (lambda model: (model, ids_of(1, 5), {"replace": "noise"}), "replace 'noise' is not known"),
    (lambda model: (model, ids_of(1, 5), {"replace": "resample"}), "replace resample needs other"),
    (lambda model: (model, ids_of(1, 5), {"replace": "resample", "other": ids_of(1, 4)}), "other cannot be aligned"),
])  # fmt: skip
def test_what_cannot_work_is_an_error(change: Any, message: str) -> None:
    model, inputs, options = change(small())
    with pytest.raises(mhacli.MhaError) as fault:
        mhacli.effects(model, inputs, **options)
    assert str(fault.value).startswith(message)
    assert "--" not in f"{fault.value} {fault.value.hint}", "options belong to the command"
    assert getattr(fault.value, "__notes__", []) == [f"hint: {fault.value.hint}"] * bool(fault.value.hint)


def test_removals_that_are_not_verified_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    from mhacli.compute.effect.removal import Remover

    monkeypatch.setattr(Remover, "_replace_heads", lambda remover, z, removal, row: z[row].zero_())
    with pytest.raises(mhacli.MhaError) as fault:
        mhacli.effects(small(), ids_of(1, 7))
    assert fault.value.code == "not-verified"
