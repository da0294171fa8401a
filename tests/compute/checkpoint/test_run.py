"""Every family that is watched: the same bits come out, and what is shown is what the family itself says it computed."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from support.heads_made import Texts, means, require_means, row_numbers, uniform_of
from support.model_families import (
    BASE,
    FAMILIES,
    GROUPED,
    HALVES,
    K_LEN,
    N_HEADS,
    PAIRS,
    PLAIN,
    Q_LEN,
    calls_of,
    eager_patterns,
    ids_of,
    inputs_of,
    keywords_of,
    loaded_of,
    made,
    matrices_of,
    product,
    run_plain,
    sequences_of,
    sights_of,
    tensors_in,
    tiny,
    visible,
)
from torch import Tensor

from mhacli.adapters.hf.calls import ScoredCall, SoftmaxCall
from mhacli.adapters.hf.inputs import make_inputs
from mhacli.cli.shared.output import print_notes
from mhacli.compute.checkpoint.layers import CheckpointRunRequest
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError
from mhacli.results.record import storage
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.results.record.record import NonAttentionLayer, Record

TOLERANCE, OF_T5 = 2e-6, 5e-5  # T5 does not scale its scores, which are larger
Z_TOLERANCE = 2e-5  # z is a sum of a dozen values of size 10
ALL = tuple(FAMILIES)


@functools.cache
def watched(name: str) -> tuple[list[Any], list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """The calls of a pass, what was made of each, and the outputs."""
    calls, outputs = calls_of(tiny(name), keywords_of(name), 2)
    return calls, [matrices_of(call) for call in calls], outputs


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    """The patterns that a family returns itself, or those that its published definition gives."""
    if name == "falcon-alibi":
        return falcon_alibi_patterns()
    if name == "granite_swa":
        return patterns_that_make_z(name)
    return [pattern.numpy() for pattern in eager_patterns(name, keywords_of(name))]


def falcon_alibi_patterns() -> list[np.ndarray]:
    """softmax((q kᵀ + slope · j) / √d) from the projections of each layer, for `eager` of this family adds ALiBi twice."""
    model, rows = tiny("falcon-alibi"), []
    hooks = [
        layer.self_attention.query_key_value.register_forward_hook(lambda *given: rows.append(given[2]))
        for layer in model.h
    ]
    run_plain(model, keywords_of("falcon-alibi"))
    for hook in hooks:
        hook.remove()
    patterns = []
    for projected in rows:
        q, k, _ = projected.double().numpy().reshape(2, Q_LEN, N_HEADS, 3, 12).transpose(3, 0, 2, 1, 4)
        slopes = np.array([2.0 ** (-8 * (head + 1) / N_HEADS) for head in range(N_HEADS)])
        scores = (q @ k.swapaxes(-1, -2) + slopes[:, None, None] * np.arange(Q_LEN)) / math.sqrt(12)
        scores = np.where(visible("causal", None, Q_LEN, Q_LEN), scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        patterns.append(shares / shares.sum(axis=-1, keepdims=True))
    return patterns


def patterns_that_make_z(name: str) -> list[np.ndarray]:
    """Of a family that scales z behind its softmax: the patterns that it returns, times the factor by which each row of z is
    shorter than what they give, from what goes into its output projections and comes out of those of its values."""
    family, values, results = FAMILIES[name], [], []
    twin = made(family.kind, family.choices, attn_implementation="eager")
    for layer in twin.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda *given: values.append(given[2]))
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: results.append(given[0]))
    shares = run_plain(twin, keywords_of(name), output_attentions=True).attentions
    patterns = []
    for own, v, z in zip(shares, values, results, strict=True):
        v = v.unflatten(-1, (family.n_kv_heads, -1)).transpose(1, 2).double().numpy()
        z = z.unflatten(-1, (N_HEADS, -1)).transpose(1, 2).double().numpy()
        unscaled = product(own.numpy(), v)
        factor = (z * unscaled).sum(axis=-1, keepdims=True) / (unscaled**2).sum(axis=-1, keepdims=True)
        assert np.abs(factor * unscaled - z).max() < Z_TOLERANCE
        assert factor.max() < 1
        patterns.append(own.numpy() * factor)
    return patterns


@functools.cache
def record(name: str) -> Record:
    """What the study finds of a family."""
    run = CheckpointRun(
        loaded_of(tiny(name)), inputs_of(name), CheckpointRunRequest(HeadsRequest(), keep=("pattern", "z"))
    )
    run.run()
    return run.record()


# ------------------------------------------------------------------------------------------------------------- capture


@pytest.mark.parametrize("name", ALL)
def test_the_same_bits_come_out_of_a_model_that_is_watched(name: str) -> None:
    before = tensors_in(run_plain(tiny(name), keywords_of(name)))
    outputs = watched(name)[2]
    assert len(before) == len(outputs) > 0
    assert all(torch.equal(one, other) for one, other in zip(before, outputs, strict=True))
    assert all(bool(tensor.isfinite().all()) for tensor in before)


@pytest.mark.parametrize("name", ALL)
def test_every_attention_is_seen_by_the_path_that_the_family_runs(name: str) -> None:
    family, (calls, _, _) = FAMILIES[name], watched(name)
    assert len(calls) == len(sights_of(name))
    assert {call.level for call in calls} == {family.level}
    assert {call.implementation for call in calls} == {family.implementation}
    assert {getattr(call, "kernel", "softmax") for call in calls} == {family.kernel}
    assert {call.v.shape[1] for call in calls} == {family.n_kv_heads}
    assert {call.unknown for call in calls} == {()}
    assert {call.part for call in calls} == {0}
    assert {type(call) for call in calls} == {SoftmaxCall if family.level == "softmax" else ScoredCall}


@pytest.mark.parametrize("name", ALL)
def test_the_pattern_times_the_values_is_what_the_layer_returned(name: str) -> None:
    for call, matrices in zip(*watched(name)[:2], strict=True):
        z = product(matrices["pattern"].numpy(), call.v.numpy())
        assert np.abs(z - call.z.numpy()).max() < Z_TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_the_pattern_is_the_one_that_the_family_returns_with_eager(name: str) -> None:
    found = [matrices["pattern"].numpy() for matrices in watched(name)[1]]
    assert len(found) == len(expected(name))
    for own, theirs in zip(found, expected(name), strict=True):
        assert own.shape == theirs.shape
        assert np.abs(own - theirs).max() < (OF_T5 if name == "t5" else TOLERANCE)


@pytest.mark.parametrize("name", ALL)
def test_a_query_sees_the_keys_that_its_family_says_and_no_other_gets_a_share(name: str) -> None:
    for matrices, (sees, window) in zip(watched(name)[1], sights_of(name), strict=True):
        cells = visible(sees, window, *matrices["pattern"].shape[2:])
        assert (matrices["allowed"].numpy() == cells).all()
        assert (matrices["pattern"].numpy()[..., ~cells] == 0).all()
        assert (matrices["pattern"].numpy()[..., cells] > 0).all()
        assert (np.isneginf(matrices["scores"].numpy()) == ~cells).all()


@pytest.mark.parametrize("name", [name for name in ALL if FAMILIES[name].level != "softmax"])
def test_scores_are_those_whose_softmax_is_the_pattern_and_qk_is_the_plain_product(name: str) -> None:
    for call, matrices in zip(*watched(name)[:2], strict=True):
        k = call.k.double().repeat_interleave(N_HEADS // call.k.shape[1], dim=1)
        qk = torch.einsum("bhid,bhjd->bhij", call.q.double(), k)
        assert (matrices["qk"] - qk).abs().max() < 1e-4 * qk.abs().max()
        scores = matrices["scores"].double()
        if call.sinks is not None:
            sinks = call.sinks.double() if call.sinks.ndim == 3 else call.sinks.double()[:, None]
            scores = torch.cat([scores, sinks.expand(2, -1, Q_LEN)[..., None]], dim=-1)
        again = scores.softmax(dim=-1)[..., : matrices["pattern"].shape[3]]
        assert (matrices["pattern"] - again).abs().max() < 1e-5


# --------------------------------------------------------------------------------------------------------------- study


STUDIED = [name for name in ALL if name != "clip"]  # whose two towers read different tokens


def looked_at(name: str) -> list[int]:
    """The last layer, and of models of two halves the last of each kind."""
    return [1, 4, 5] if name in PAIRS else [2]


@pytest.mark.parametrize("name", STUDIED)
def test_the_statistics_are_those_of_loops_over_the_familys_own_pattern(name: str) -> None:
    for index in looked_at(name):
        view = record(name).of_layer(index)
        pattern = expected(name)[index].astype(np.float64)
        cells = np.broadcast_to(visible(*sights_of(name)[index], *pattern.shape[2:]), pattern.shape)
        texts, tolerance = Texts.of(view), 2e-4 if name == "t5" else 2e-5
        assert len(view.heads) == N_HEADS
        for head, said in enumerate(view.heads):
            own, allowed = pattern[:, head], cells[:, head]
            wanted = means(own, allowed, texts, said.offset)
            if head == 0:
                assert said.uniform is not None
                require_means(said.uniform, means(uniform_of(allowed), allowed, texts, said.offset), 1e-6)
            if view.survey is not None and said.learned_sink is not None:
                wanted |= with_learned_sink(own, allowed)
                assert abs(said.learned_sink - (1 - own.sum(axis=-1)).mean()) < tolerance
            require_means(said, wanted, tolerance)
            received = view.arrays["received"][:, head]
            assert np.abs(received - own.sum(axis=1)).max() < tolerance * pattern.shape[2]
            for sink in said.sinks:
                assert abs(sink.share - own[sink.sequence, :, sink.key].sum() / own[sink.sequence].sum()) < tolerance
        if all(head.learned_sink is None for head in view.heads):
            rows = row_numbers(pattern, cells, texts)
            for array in ("entropy", "participation", "distance", "sink", "visible"):
                assert np.abs(view.arrays[array] - rows[array]).max() < tolerance * pattern.shape[3]


def with_learned_sink(pattern: np.ndarray, allowed: np.ndarray) -> dict[str, float]:
    """The means that a learned sink has a part in, for it is one more outcome: one head, by loops."""
    rows: dict[str, list[float]] = {
        name: [] for name in ("entropy", "entropy_share", "effective_keys", "participation", "distance")
    }
    for b, i in np.ndindex(*pattern.shape[:2]):
        shares = [float(p) for p in pattern[b, i][allowed[b, i]]]
        outcomes = [*shares, 1 - sum(shares)]
        entropy = -sum(p * math.log(p) for p in outcomes if p > 0)
        rows["entropy"].append(entropy)
        rows["effective_keys"].append(math.exp(entropy))
        rows["participation"].append(1 / sum(p * p for p in outcomes))
        keys = np.flatnonzero(allowed[b, i])
        rows["distance"].append(sum(p * abs(i - j) for p, j in zip(shares, keys, strict=True)) / sum(shares))
        rows["entropy_share"].append(entropy / math.log(len(outcomes)))
    return {name: sum(row) / len(row) for name, row in rows.items()}


@pytest.mark.parametrize("name", STUDIED)
def test_the_study_verifies_every_layer_and_numbers_it(name: str) -> None:
    found = record(name)
    assert found.model is not None
    assert found.model.identical_outputs is True
    assert found.self_check.ok
    assert [layer.unverified for layer in found.layers] == [()] * len(found.layers)
    assert all(layer.verified and layer.self_check.ok for layer in found.layers)
    kinds = [("self", n) for n in range(3)]
    if name in PAIRS:
        kinds = [("encoder", 0), ("encoder", 1), ("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)]
    assert [(layer.kind, layer.layer) for layer in found.layers] == kinds
    assert found.model.without == ()
    for layer, pattern in zip(found.layers, expected(name), strict=True):
        assert (layer.n_heads, layer.n_kv_heads) == (N_HEADS, FAMILIES[name].n_kv_heads)
        assert layer.captured_by == FAMILIES[name].level
        assert pattern.shape[1] == N_HEADS


@pytest.mark.parametrize("name", STUDIED)
def test_the_record_keeps_the_pattern_and_survives_its_file(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "record.safetensors")
    record(name).save(path)
    loaded = storage.load(path)
    assert loaded.heads == record(name).heads
    assert loaded.layers == record(name).layers
    for index, pattern in enumerate(expected(name)):
        kept = loaded.of_layer(index).arrays["pattern"]
        assert np.abs(kept - pattern).max() < (OF_T5 if name == "t5" else TOLERANCE)


@pytest.mark.parametrize(("name", "mask", "softcap", "bias", "sinks"), [
    ("gpt2", "causal", None, False, False),
    ("mistral", "causal, window 5", None, False, False),
    ("gemma2", "causal, window 5", 2.0, False, False),
    ("gpt_oss", "causal, window 5", None, False, True),
    ("granite_swa", "causal, window 5", None, False, True),
    ("inkling2_text", "causal, window 5", None, True, True),
    ("bert", "all keys", None, False, False),
    ("modernbert", "at most 9 keys", None, False, False),
    ("falcon-alibi", "causal", None, True, False),
    ("bloom", "causal", None, False, False),
])  # fmt: skip
def test_a_layer_says_its_mask_softcap_bias_and_sinks(
    name: str, mask: str, softcap: float | None, bias: bool, sinks: bool
) -> None:
    layer = record(name).layers[2]
    assert (layer.mask, layer.softcap, layer.bias, layer.sinks) == (mask, softcap, bias, sinks)


def test_every_rung_is_used_by_some_family() -> None:
    assert {family.level for family in FAMILIES.values()} == {"registry", "module", "sdpa", "softmax"}


@pytest.mark.parametrize(("name", "positions"), [
    ("gpt2", "learned"), ("llama", "rope"), ("gptj", "rope-interleaved"), ("bloom", "alibi"), ("mpt", "alibi"),
    ("falcon", "rope"), ("falcon-alibi", "alibi"), ("t5", "relative"), ("deberta-v2", "relative"), ("bert", "learned"),
    ("opt", "learned"), ("modernbert", "rope"), ("bart", "learned"),
])  # fmt: skip
def test_the_model_says_how_its_tokens_know_their_place(name: str, positions: str) -> None:
    model = record(name).model
    assert model is not None
    assert model.positions == positions


# ------------------------------------------------------------------------------------------ layers of other kinds


def found_in(model: Any, **wanted: Any) -> Record:
    inputs = make_inputs(model, sequences_of(ids_of(2, Q_LEN)), None, "right", 0)
    run = CheckpointRun(loaded_of(model), inputs, CheckpointRunRequest(HeadsRequest(), **wanted))
    run.run()
    return run.record()


MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
HYBRIDS = {
    "lfm2": ({**GROUPED, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"]},
             (1,), ((0, "conv"), (2, "conv"))),
    "bamba": ({**GROUPED, **MAMBA, "attn_layer_indices": [1]}, (1,), ((0, "linear_attention"), (2, "linear_attention"))),
    "granitemoehybrid": ({**GROUPED, **MAMBA, "shared_intermediate_size": 32, "num_local_experts": 2,
                          "num_experts_per_tok": 1,
                          "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
                         (2,), ((0, "linear_attention"), (1, "linear_attention"))),
    "recurrent_gemma": ({**BASE, **PLAIN, "intermediate_size": 96, "lru_width": 48, "attention_window_size": 5,
                         "head_dim": 12}, (2,), ((0, "linear_attention"), (1, "linear_attention"))),
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_without_attention_are_told_by_their_type(kind: str) -> None:
    choices, layers, without = HYBRIDS[kind]
    found = found_in(made(kind, choices))
    assert found.model is not None
    assert tuple(layer.layer for layer in found.layers) == layers
    assert found.model.n_layers == 3
    assert found.model.without == tuple(NonAttentionLayer(*one) for one in without)
    assert all(layer.verified for layer in found.layers)


def test_a_model_without_any_attention_is_refused() -> None:
    model = made("mamba", {**BASE, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 4})
    with pytest.raises(MhaError) as caught:
        found_in(model)
    assert caught.value.message == "no attention was found in mamba"
    assert (
        caught.value.hint
        == "layers without a matrix of queries × keys, such as state-space layers, cannot be inspected"
    )
    assert caught.value.code == "no-attention"


WINDOWED = {**PLAIN, **BASE, "attention_window": 4, "max_position_embeddings": 64}


def test_attention_over_blocks_that_no_token_names_is_refused_with_its_sizes() -> None:
    with pytest.raises(MhaError) as caught:
        found_in(made("longformer", WINDOWED))
    n = f"{Q_LEN} to {Q_LEN} tokens"
    assert caught.value.message == (
        f"the attention of longformer is not laid out by tokens: attention from {n} laid out as {N_HEADS} × 5"
    )
    assert caught.value.code == "not-tokens"


def test_such_layers_are_told_beside_those_that_can_be_shown() -> None:
    sizes = {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
    model, sequences = made("led", {**HALVES, **sizes}), sequences_of(ids_of(2, Q_LEN))
    inputs = make_inputs(model, sequences, sequences_of(ids_of(2, K_LEN)), "right", 0)
    run = CheckpointRun(loaded_of(model), inputs, CheckpointRunRequest(HeadsRequest()))
    run.run()
    found = run.record()
    assert found.model is not None
    assert [(layer.kind, layer.layer) for layer in found.layers] == [
        ("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1),
    ]  # fmt: skip
    assert all(layer.verified for layer in found.layers)
    said = f"encoder attention from {K_LEN} to {K_LEN} tokens laid out as {N_HEADS} × 5"
    assert found.model.without == (NonAttentionLayer(0, said), NonAttentionLayer(1, said))


def test_a_size_may_differ_from_layer_to_layer() -> None:
    sizes = {"intermediate_size": [32, 64, 48], "head_dim": 12, "vocab_size_per_layer_input": 99, "laurel_rank": 4,
             "hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "num_kv_shared_layers": 0,
             "activation_sparsity_pattern": [0.0] * 3}  # fmt: skip
    found = found_in(made("gemma3n_text", {**GROUPED, **sizes}))
    assert [layer.layer for layer in found.layers] == [0, 1, 2]
    assert all(layer.verified for layer in found.layers)


def test_a_module_that_is_called_for_every_layer_gives_as_many_layers() -> None:
    model = made("albert", {**BASE, **PLAIN, "embedding_size": 16})
    found = found_in(model, keep=("pattern",))
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert [(layer.layer, layer.name) for layer in found.layers] == [(n, name) for n in range(3)]
    twin = made("albert", {**BASE, **PLAIN, "embedding_size": 16}, attn_implementation="eager")
    theirs = run_plain(twin, {"input_ids": ids_of(2, Q_LEN)}, output_attentions=True).attentions
    for index, pattern in enumerate(theirs):
        own = found.of_layer(index).arrays["pattern"]
        assert np.abs(own - pattern.numpy()).max() < 1e-5  # its scores reach 100, of which float32 keeps 8e-6
        assert [head.layer for head in found.of_layer(index).heads] == [index] * N_HEADS


def attentions_of(kind: str, choices: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """What the family itself returns, with eager."""
    twin = made(kind, choices, attn_implementation="eager")
    return tuple(run_plain(twin, {"input_ids": ids_of(2, Q_LEN)}, output_attentions=True).attentions)


@pytest.mark.parametrize(("kind", "choices", "theirs_is"), [
    ("diffllama", GROUPED, 0),
    ("lilt", {**BASE, **PLAIN, "channel_shrink_ratio": 4, "max_2d_position_embeddings": 64}, 1),
])  # fmt: skip
def test_two_attentions_of_one_module_belong_to_one_layer_and_are_told_apart(
    kind: str, choices: dict[str, Any], theirs_is: int
) -> None:
    found = found_in(made(kind, choices), keep=("pattern",))
    assert [layer.label for layer in found.layers] == [
        "layer 0", "layer 0, call 2", "layer 1", "layer 1, call 2", "layer 2", "layer 2, call 2",
    ]  # fmt: skip
    assert len({layer.name for layer in found.layers}) == 6
    assert found.model is not None
    assert found.model.without == ()
    for index, layer in enumerate(found.layers):
        own = found.of_layer(index)
        assert layer.layer == index // 2
        assert [head.head for head in own.heads] == list(range(N_HEADS))
    for index, pattern in enumerate(attentions_of(kind, choices)):
        own = found.of_layer(2 * index + theirs_is).arrays["pattern"]
        assert np.abs(own - pattern.numpy()).max() < 1e-5  # of scores that reach 100


LOOPED = {
    "albert": ({**BASE, **PLAIN, "embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2}, 4),
    "hrm_text": ({**GROUPED, "num_layers_per_stack": 2, "L_cycles": 2, "H_cycles": 2}, 12),
}


@pytest.mark.parametrize("kind", LOOPED)
def test_lists_of_layers_that_are_run_again_count_on(kind: str) -> None:
    choices, n = LOOPED[kind]
    found, theirs = found_in(made(kind, choices), keep=("pattern",)), attentions_of(kind, choices)
    assert [layer.layer for layer in found.layers] == list(range(n))
    assert len(theirs) == n
    for index, pattern in enumerate(theirs):
        assert np.abs(found.of_layer(index).arrays["pattern"] - pattern.numpy()).max() < 2e-5


def test_values_that_a_family_does_not_show_are_not_put_down_to_the_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"d_model": 48, "n_layer": 1, "n_head": N_HEADS, "d_inner": 64, "vocab_size": 99}
    einsum = torch.einsum

    def summed(equation: str, *tensors: torch.Tensor) -> torch.Tensor:
        if equation != "bnij,jbnd->ibnd":
            return einsum(equation, *tensors)
        pattern, values = tensors
        return (pattern[..., None] * values.permute(1, 2, 0, 3)[:, :, None]).sum(dim=3).permute(2, 0, 1, 3)

    monkeypatch.setattr(torch, "einsum", summed)
    found = found_in(made("xlnet", sizes), keep=("pattern", "z"))
    assert "pattern" in found.of_layer(0).arrays
    print_notes(found, ())
    said = capsys.readouterr().err
    assert "z of layer.0.rel_attn" in said
    assert "--keep-limit" not in said


# ------------------------------------------------------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "gemma2", "bert", "bloom", "deberta-v2", "falcon"])
def test_a_model_of_16_bits_is_verified_within_their_rounding(name: str, dtype: torch.dtype) -> None:
    family = FAMILIES[name]
    found = found_in(made(family.kind, family.choices).to(dtype), keep=("pattern", "z"))
    assert found.model is not None
    assert found.model.dtype == str(dtype).removeprefix("torch.")
    assert found.model.identical_outputs is True
    assert [layer.unverified for layer in found.layers] == [()] * 3
    twin = made(family.kind, family.choices, attn_implementation="eager").to(dtype)
    theirs = run_plain(twin, {"input_ids": ids_of(2, Q_LEN)}, output_attentions=True).attentions
    first = found.of_layer(0).arrays["pattern"]  # later layers read what the twin rounded otherwise
    assert first.dtype == np.float32
    assert np.abs(first - theirs[0].float().numpy()).max() < (0.02 if dtype == torch.bfloat16 else 0.003)


# -------------------------------------------------------------------------------------------------------- what is asked


def test_one_kind_of_layer_can_be_asked_for() -> None:
    run = CheckpointRun(
        loaded_of(tiny("t5")), inputs_of("t5"), CheckpointRunRequest(HeadsRequest(), layers=(("cross", 1), (None, 0)))
    )
    run.run()
    assert [(layer.kind, layer.layer) for layer in run.record().layers] == [
        ("encoder", 0), ("decoder", 0), ("cross", 0), ("cross", 1),
    ]  # fmt: skip


def test_a_layer_that_is_not_there_is_refused_with_those_that_are() -> None:
    run = CheckpointRun(
        loaded_of(tiny("llama")), inputs_of("llama"), CheckpointRunRequest(HeadsRequest(), layers=((None, 7),))
    )
    with pytest.raises(MhaError) as caught:
        run.run()
    assert caught.value.message == "--layer 7 has no attention; layers with attention: 0, 1, 2"
    assert caught.value.code == "no-layer"


def test_one_head_alone_is_said_to_be_the_same_as_among_all() -> None:
    run = CheckpointRun(
        loaded_of(tiny("gpt_oss")), inputs_of("gpt_oss"), CheckpointRunRequest(HeadsRequest(heads=(2,)))
    )
    run.run()
    assert all(layer.verified for layer in run.record().layers)  # with the values of its own group
    whole = record("gpt_oss")
    for index in range(3):
        (alone,), among = run.record().of_layer(index).heads, whole.of_layer(index).heads[2]
        require_means(alone, {name: getattr(among, name) for name in vars(among)}, 1e-6)


def test_a_text_of_an_encoder_has_its_own_length() -> None:
    shapes = [layer.survey.full_bytes for layer in record("bart").layers]
    cells = [K_LEN * K_LEN] * 2 + [Q_LEN * Q_LEN, Q_LEN * K_LEN] * 2
    assert shapes == [2 * N_HEADS * n * 4 for n in cells]


@pytest.mark.parametrize(("name", "message"), [
    ("vit", "the model reads pixel_values, not text (family vit)"),
    ("clip", "the model needs pixel_values besides text (family clip)"),
    ("whisper", "the model reads input_features, not text (family whisper)"),
])  # fmt: skip
def test_a_model_that_does_not_read_text_is_refused_by_the_study(name: str, message: str) -> None:
    model = tiny(name)
    with pytest.raises(MhaError) as caught:
        make_inputs(model, sequences_of(ids_of(1, 3)), None, "right", 0)
    assert caught.value.message == message
    assert caught.value.hint == "mhacli.adapters.hf.capture watches any model from Python"


def test_a_model_that_may_see_pictures_reads_text_alone() -> None:
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**GROUPED, "model_type": "llama"}
    choices = {"vision_config": {**tower, "image_size": 16, "patch_size": 8}, "text_config": text, "image_token_id": 98}
    found, theirs = found_in(made("idefics3", choices), keep=("pattern",)), attentions_of("idefics3", choices)
    assert [layer.layer for layer in found.layers] == list(range(len(theirs)))
    for index, pattern in enumerate(theirs):
        assert np.abs(found.of_layer(index).arrays["pattern"] - pattern.numpy()).max() < 1e-5


def test_a_model_whose_config_counts_layers_by_part_says_what_else_it_needs() -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": N_HEADS, "intermediate_size": 64, "vocab_size": 99,
             "l_layers": 1, "x_layers": 1, "r_layers": 1}  # fmt: skip
    with pytest.raises(MhaError, match="`visual_feats` cannot be `None`") as caught:
        found_in(made("lxmert", sizes))
    assert caught.value.code == "model-failed"


def test_a_context_is_refused_where_there_is_no_encoder() -> None:
    text = sequences_of(ids_of(1, 3))
    with pytest.raises(MhaError) as caught:
        make_inputs(tiny("llama"), text, text, "right", 0)
    assert caught.value.message == "--context does not work with llama, which has no encoder"
    assert caught.value.hint == "put it into the text"
