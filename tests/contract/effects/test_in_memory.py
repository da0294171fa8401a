"""`mhacli.effects` of a model in memory: the measurements of the command, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import checkpoints

import mhacli

TEXT = "the cat sat on the mat"


def ids_of(n_texts: int, n: int) -> torch.Tensor:
    return torch.randint(5, 99, (n_texts, n), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("family", "words", "options"),
    [
        ("gpt2", (), {}),
        (
            "llama",
            ("--head", "1.2,0.3", "--replace", "mean", "--target", "a"),
            {"heads": [(1, 2), (0, 3)], "replace": "mean", "target": "a"},
        ),
        (
            "gpt2",
            ("--edges", "--layer", "1", "--position", "7"),
            {"edges": True, "layers": [1], "position": 7},
        ),
        pytest.param(
            "gpt2",
            ("--screen", "2", "--at", "3", "--verify", "2"),
            {"screen": 2, "at": 3, "n_verified": 2},
            marks=pytest.mark.real,
        ),
        pytest.param(
            "bert",
            ("--head", "1.2", "--versus", "b", "--target", " cat", "--target-first"),
            {"heads": [(1, 2)], "versus": "b", "target": " cat", "target_first": True},
            marks=pytest.mark.real,
        ),
    ],
    ids=["all heads", "some heads", "edges", "screen", "targets"],
)
def test_the_effects_are_those_of_the_command(
    mha: Any, family: str, words: tuple[str, ...], options: Any
) -> None:
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


def test_a_head_that_is_gone_behind_the_measured_token_changes_nothing() -> None:
    record = mhacli.effects(checkpoints.model("gpt2"), ids_of(1, 9), at=7, position=5)
    assert {effect.d_output for effect in record.effects} == {0.0}
    assert not any(effect.masked for effect in record.effects)


class Written(torch.nn.Module):
    """Attention over scaled_dot_product_attention, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(12, 36), torch.nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (9, 4)).transpose(1, 2).split(3, dim=1)
        z = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(z.transpose(1, 2).flatten(2))


def test_any_module_has_the_effects_of_its_heads_on_its_output_or_a_metric(
    mha: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Written().eval(), torch.randn(1, 5, 12)
    keep = torch.ones(12)
    keep[4:8] = 0  # the output projection does not read head 1
    with torch.no_grad():
        before = model(x)
        hook = model.out.register_forward_pre_hook(lambda _, args: (args[0] * keep,))
        after = model(x)
    hook.remove()
    vector = mhacli.effects(model, x).effects[1]
    expected = (after - before)[0, -1].norm() / before[0, -1].norm()
    assert vector.d_output == pytest.approx(float(expected), abs=1e-5)
    given = mhacli.effects(model, {"x": x}, metric=lambda output: output[0, 2, 3])
    assert given.effects[1].d_logit == pytest.approx(float((after - before)[0, 2, 3]), abs=1e-5)
    assert (given.effect.measured, given.effect.verified.n) == ("metric", 3)
    given.save(str(tmp_path / "metric.safetensors"))
    shown = mha("show", "metric.safetensors").stdout
    assert "Δmetric" in shown
    assert not {"Δlogit", "Δoutput"} & {*shown.split()}  # a number has no length


class OfTorch(torch.nn.Module):
    """torch's own multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.fixture
def slow_path() -> Iterator[None]:
    """Attention of torch as it can be inspected in evaluation."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("slow_path")
def test_torchs_own_attention_has_its_weights_after_the_verification() -> None:
    torch.manual_seed(0)
    model, x = OfTorch().eval(), torch.randn(1, 5, 12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    record = mhacli.effects(model, x)
    assert record.effect.verified.n == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForQuestionAnswering"])
def test_a_score_and_an_answer_change_as_their_logits(kind: str) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=99,
        num_labels=1,
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
    )
    torch.manual_seed(3)  # an answer of three tokens
    model = getattr(transformers, kind)(
        config
        if "Answering" not in kind
        else transformers.BertConfig.from_dict({**config.to_dict(), "num_labels": 2})
    ).eval()
    record, ids = mhacli.effects(model, ids_of(1, 5)), ids_of(1, 5)

    def value() -> torch.Tensor:
        output = model(input_ids=ids)
        if "Answering" not in kind:
            return output.logits[0, 0]
        start, end = divmod(record.effect.target_id, 5)
        return output.start_logits[0, start] + output.end_logits[0, end]

    with torch.no_grad():
        before, keep = value(), torch.ones(24)
        keep[8:16] = 0
        projection = model.bert.encoder.layer[0].attention.output.dense
        hook = projection.register_forward_pre_hook(lambda _, args: (args[0] * keep,))
        after = value()
        hook.remove()
    assert record.effects[1].d_logit == pytest.approx(float(after - before), abs=1e-6)
    assert record.effect.measured == ("span" if "Answering" in kind else "score")
    if "Answering" in kind:
        start, end = divmod(record.effect.target_id, 5)
        assert record.effect.target == " ".join(record.sequences[0].tokens[start : end + 1])
        assert end == start + 2


def test_a_classifier_without_an_id_for_padding_is_measured_text_by_text() -> None:
    config = {**checkpoints.GPT, "pad_token_id": None, "num_labels": 4}
    model = checkpoints.from_config("gpt2", config, automatic="AutoModelForSequenceClassification")
    record = mhacli.effects(model, ids_of(1, 5))
    with torch.no_grad():
        before = model(ids_of(1, 5)).logits[0]
        with mhacli.removed(model, heads=[(0, 1)]):
            expected = (model(ids_of(1, 5)).logits[0] - before)[before.argmax()]
    assert record.effects[1].d_logit == pytest.approx(float(expected), abs=1e-6)


def test_a_head_that_a_layer_computes_twice_is_removed_from_both() -> None:
    config = {**checkpoints.GROUPED, "num_hidden_layers": 1}
    model, ids = (
        checkpoints.from_config("diffllama", config, automatic=checkpoints.CAUSAL),
        ids_of(1, 5),
    )
    effect, dropout, keep = (
        mhacli.effects(model, ids).effects[1],
        torch.nn.functional.dropout,
        torch.ones(1, 6, 1, 1),
    )
    with torch.no_grad():
        before = model(ids).logits[0, -1]
        with mhacli.removed(model, heads=[(0, 1)]):
            removed = model(ids).logits[0, -1]
        model.set_attn_implementation("eager")  # it passes its weights through dropout
        keep[:, 1] = 0
        with patch.object(
            torch.nn.functional, "dropout", lambda weights, **_: dropout(weights, 0.0) * keep
        ):
            after = model(ids).logits[0, -1]
    assert torch.allclose(removed, after, atol=1e-5)
    assert effect.d_logit == pytest.approx(float((after - before)[before.argmax()]), abs=1e-5)


class InGroups(torch.nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.in_proj_weight.matmul(x.mT).unflatten(1, (3, 4, 3)).mT.unbind(1)
        groups = [
            torch.nn.functional.scaled_dot_product_attention(q[:, g], k[:, g], v[:, g])
            for g in ([0, 1], [2, 3])
        ]
        return torch.cat(groups, 1)


def test_heads_of_another_group_stay() -> None:
    model, x = InGroups(12, 4), torch.randn(1, 5, 12)
    with torch.no_grad():
        before = model(x)
        with mhacli.removed(model, heads=[(0, 1)]):
            assert (model(x) - before).abs().amax((0, 2, 3)).gt(0).tolist() == [
                False,
                True,
                False,
                False,
            ]


IDS = ids_of(1, 5)


@pytest.mark.parametrize(
    ("inputs", "options", "mentions"),
    [
        ("a text", {}, "tokenizer"),
        (ids_of(2, 5), {}, "(2, 5)"),
        ({}, {}, "input_ids"),
        ({"input_ids": None}, {}, "input_ids"),
        ({"pixel_values": torch.ones(1)}, {}, "pixel_values"),
        (["a text", "another"], {}, "input_ids"),
        (
            {"input_ids": ids_of(1, 3), "attention_mask": torch.tensor([[0, 1, 1]])},
            {},
            "attention_mask",
        ),
        (IDS, {"heads": 3}, "heads: 3"),
        (IDS, {"layers": 3}, "layers 3"),
        (IDS, {"at": [3]}, "at cannot be [3]"),
        (IDS, {"position": "a"}, "position"),
        (IDS, {"n_verified": None}, "n_verified cannot be None"),
        (IDS, {"heads": [3]}, "3"),
        (IDS, {"heads": [(9, 0)]}, "9"),
        (IDS, {"heads": []}, "heads"),
        (IDS, {"layers": [("corss", 1)]}, "corss"),
        (IDS, {"target": 500}, "500"),
        (IDS, {"position": 5}, "position"),
        (IDS, {"at": 5}, "at=5"),
        (IDS, {"versus": "1 2"}, "versus"),
        (IDS, {"screen": 2, "edges": True}, "screen"),
        (IDS, {"replace": "noise"}, "noise"),
        (IDS, {"edges": True, "replace": "mean"}, "replace"),
    ],
    ids=str,
)
def test_inputs_and_options_that_cannot_work_are_refused_without_names_of_the_command(
    inputs: Any, options: Any, mentions: str
) -> None:
    with pytest.raises(mhacli.MhaError) as fault:
        mhacli.effects(checkpoints.model("gpt2"), inputs, **options)
    said = f"{fault.value}\n{fault.value.hint or ''}"
    assert mentions in said
    assert "--" not in said, "options belong to the command"


@pytest.mark.parametrize(
    ("make", "options", "mentions"),
    [
        (lambda: torch.nn.Linear(2, 2), {}, "Linear"),
        (lambda: checkpoints.model("gpt2").base_model, {"screen": 2}, "screen"),
        (
            lambda: checkpoints.from_config(
                "gpt2", checkpoints.GPT, automatic="AutoModelForCausalLM"
            ).train(),
            {},
            "training",
        ),
    ],
    ids=["no transformer", "no language head", "training"],
)
def test_models_that_cannot_be_measured_are_refused(make: Any, options: Any, mentions: str) -> None:
    with pytest.raises(mhacli.MhaError, match=mentions):
        mhacli.effects(make(), IDS, **options)
