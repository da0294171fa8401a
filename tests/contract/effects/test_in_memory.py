"""`mhacli.effects` of a model in memory: the measurements of the command, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import checkpoints

import mhacli

TEXT = "the cat sat on the mat"


def ids_of(n_texts: int, n: int) -> torch.Tensor:
    return torch.randint(5, 99, (n_texts, n), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("family", "words", "options"), [
    ("gpt2", (), {}),
    ("llama", ("--head", "1.2,0.3", "--replace", "mean", "--target", "a"),
     {"heads": [(1, 2), (0, 3)], "replace": "mean", "target": "a"}),
    ("gpt2", ("--edges", "--layer", "1", "--position", "7"), {"edges": True, "layers": [1], "position": 7}),
    pytest.param("gpt2", ("--screen", "2", "--at", "3", "--verify", "2"), {"screen": 2, "at": 3, "n_verified": 2},
                 marks=pytest.mark.real),
    pytest.param("bert", ("--head", "1.2", "--versus", "b", "--target", " cat", "--target-first"),
                 {"heads": [(1, 2)], "versus": "b", "target": " cat", "target_first": True}, marks=pytest.mark.real),
], ids=["all heads", "some heads", "edges", "screen", "targets"])  # fmt: skip
def test_the_effects_are_those_of_the_command(mha: Any, family: str, words: tuple[str, ...], options: Any) -> None:
    model, tokenizer = checkpoints.model(family), checkpoints.tokenizer_of(family)
    record = mhacli.effects(model, tokenizer(TEXT, return_tensors="pt"), tokenizer, **options)
    document = mha("effect", TEXT, "--model", checkpoints.folder(family), "--json", *words).json
    assert list(record.sequences[0].tokens) == document["sequences"][0]["tokens"]
    for effect, row in zip(record.effects, document["effects"], strict=True):
        names = ("layer", "kind", "head", "query", "key", "removed", "replace", "at", "rank")
        assert [getattr(effect, name) for name in names] == [row[name] for name in names]
        for name in ("d_logit", "d_logprob", "kl", "d_output", "first_order"):
            assert getattr(effect, name) == pytest.approx(row[name], abs=1e-5), name
    for name in ("position", "target", "target_id", "versus_id", "metric"):
        assert getattr(record.effect, name) == document["effect"][name]
    assert record.effect.verified.n == document["effect"]["verified"]["n"]


def test_a_pair_in_memory_is_measured_for_the_text_of_its_decoder() -> None:
    model = checkpoints.model("t5")
    inputs = {"input_ids": ids_of(1, 7), "decoder_input_ids": ids_of(1, 5)}
    record = mhacli.effects(model, inputs, heads=[("cross", 1, 2)], target=9)
    (effect,) = record.effects
    with torch.no_grad():
        before = model(**inputs).logits[0, -1, 9]
        keep = torch.ones(48)
        keep[16:24] = 0
        projection = model.decoder.block[1].layer[1].EncDecAttention.o
        hook = projection.register_forward_pre_hook(lambda _, args: (args[0] * keep,))
        after = model(**inputs).logits[0, -1, 9]
        hook.remove()
    assert (effect.kind, record.effect.position) == ("cross", 4)
    assert effect.d_logit == pytest.approx(float(after - before), abs=2e-5)


def test_ids_name_the_tokens_without_a_tokenizer_and_the_model_stays_as_it_was() -> None:
    model, ids = checkpoints.model("gpt2"), ids_of(1, 7)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record = mhacli.effects(model, ids, heads=[(1, 2)], target=torch.tensor(5), versus="7")
    assert (record.effect.target, record.effect.target_id, record.effect.versus_id) == ("5", 5, 7)
    assert list(record.sequences[0].tokens) == [str(i) for i in ids[0].tolist()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    as_list = mhacli.effects(model, ids[0].tolist(), heads=[(1, 2)], target=5, versus="7")
    assert [*as_list.effects] == [*record.effects]


IDS = ids_of(1, 5)


@pytest.mark.parametrize(("inputs", "options", "mentions"), [
    ("a text", {}, "tokenizer"),
    (ids_of(2, 5), {}, "(2, 5)"),
    ({"input_ids": ids_of(1, 3), "attention_mask": torch.tensor([[0, 1, 1]])}, {}, "attention_mask"),
    ({"pixel_values": torch.ones(1)}, {}, "pixel_values"),
    ({}, {}, "input_ids"),
    (IDS, {"heads": [3]}, "3"),
    (IDS, {"heads": [(9, 0)]}, "9"),
    (IDS, {"heads": []}, "heads"),
    (IDS, {"layers": [("corss", 1)]}, "corss"),
    (IDS, {"target": 500}, "500"),
    (IDS, {"position": 5}, "position"),
    (IDS, {"at": 5}, "at 5"),
    (IDS, {"versus": "1 2"}, "versus"),
    (IDS, {"screen": 2, "edges": True}, "screen"),
    (IDS, {"replace": "noise"}, "noise"),
    (IDS, {"edges": True, "replace": "mean"}, "replace"),
], ids=str)  # fmt: skip
def test_inputs_and_options_that_cannot_work_are_refused_without_names_of_the_command(
    inputs: Any, options: Any, mentions: str
) -> None:
    with pytest.raises(mhacli.MhaError) as fault:
        mhacli.effects(checkpoints.model("gpt2"), inputs, **options)
    said = f"{fault.value}\n{fault.value.hint or ''}"
    assert mentions in said
    assert "--" not in said, "options belong to the command"


@pytest.mark.parametrize(("make", "options", "mentions"), [
    (lambda: torch.nn.Linear(2, 2), {}, "Linear"),
    (lambda: checkpoints.model("gpt2").base_model, {"screen": 2}, "screen"),
    (lambda: checkpoints.from_config("gpt2", checkpoints.GPT, automatic="AutoModelForCausalLM").train(), {}, "training"),
], ids=["no transformer", "no language head", "training"])  # fmt: skip
def test_models_that_cannot_be_measured_are_refused(make: Any, options: Any, mentions: str) -> None:
    with pytest.raises(mhacli.MhaError, match=mentions):
        mhacli.effects(make(), IDS, **options)
