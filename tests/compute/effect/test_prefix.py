"""What of a text runs: what goes on from the model's cache, or leaves out tokens that nothing reads, against whole passes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.model_families import FAMILIES, ids_of, loaded_of, made

from mhacli.compute.effect import run as effect_run
from mhacli.compute.effect.parts import Entries
from mhacli.compute.effect.prefix import Segment
from mhacli.compute.effect.removal import Removal, StandIns
from mhacli.compute.effect.run import EffectRun, Target
from mhacli.requests.memory import CheckpointFacts, EffectFacts

N, HEADS, LAYERS, TARGET = 11, 4, 3, 5
CACHED = ("gpt2", "llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "bloom", "falcon-alibi")
FLOAT32_SOFTMAX = ("gemma2", "gpt_oss", "gemma3_text", "gpt_neox", "bloom")
"""Families that compute parts in float32 whatever the model is in."""


def model_of(name: str, dtype: torch.dtype) -> Any:
    family = FAMILIES[name]
    automatic = "AutoModelForMaskedLM" if name == "bert" else "AutoModelForCausalLM"
    return made(family.kind, family.choices, automatic=automatic).to(dtype)


def run_of(model: Any, plan: list[tuple[Removal, ...]], position: int) -> tuple[EffectRun, list[Segment]]:
    """The run, and the segments that its batches ran."""
    segments: list[Segment] = []
    run = EffectRun(loaded_of(model), {"input_ids": ids_of(1, N)}, plan, position, Target(TARGET))
    batch = run._run_batch

    def watched(items: Any, stand_ins: Any) -> None:
        segments.append(run.segment)
        batch(items, stand_ins)

    run._run_batch = watched  # type: ignore[method-assign]
    run.run()
    return run, segments


def plan_at(position: int) -> list[tuple[Removal, ...]]:
    """Heads at one position, by zeros and means, edges from it, and two edges of heads of two layers together."""
    heads = [(Removal(("self", n), (h,), at=position),) for n in range(LAYERS) for h in range(HEADS)]
    mean = [(Removal(("self", n), (2,), replace="mean", at=position),) for n in range(LAYERS)]
    edges = [
        (Removal(("self", n), heads, (position,), (key,), "renormalise"),)
        for n, heads in ((0, (1,)), (1, tuple(range(HEADS))), (2, (3,)))
        for key in range(N)
    ]
    both = (
        Removal(("self", 0), (0,), (position,), (1, 4), "renormalise"),
        Removal(("self", 2), (1,), (position,), (position - 1,), "renormalise"),
    )
    return [*heads, *mean, *edges, both]


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("position", [N - 1, N - 4])
def test_one_token_after_a_cache_changes_as_the_whole_text_does(
    name: str, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(name, torch.float32 if name in FLOAT32_SOFTMAX else torch.float64)
    plan = plan_at(position)
    quick, segments = run_of(model, plan, position)
    monkeypatch.setattr(effect_run, "later_segment", lambda model, whole, start: None)
    whole, all_of_it = run_of(model, plan, position)
    assert {segment.start for segment in segments} == {position}
    assert {segment.start for segment in all_of_it} == {0}
    tolerance = 2e-5 if name in FLOAT32_SOFTMAX else 1e-9
    assert quick.verified.ok
    for item, removals in enumerate(plan):
        assert float(quick.results[item].d_logit) == pytest.approx(
            float(whole.results[item].d_logit), abs=tolerance * float(quick.untouched.logits.abs().max())
        ), removals


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_text_runs_from_the_first_position_that_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name, torch.float64)
    plan = [
        (Removal(("self", 1), (0, 2), (6, 8, N - 1), (2, 4, 7), "renormalise"),),
        (Removal(("self", 0), (3,), at=7),),
    ]
    quick, segments = run_of(model, plan, N - 2)
    monkeypatch.setattr(effect_run, "later_segment", lambda model, whole, start: None)
    whole, _ = run_of(model, plan, N - 2)
    assert {segment.keywords["input_ids"].shape for segment in segments} == {(1, 4)}
    for item in range(2):
        assert float(quick.results[item].d_logit) == pytest.approx(float(whole.results[item].d_logit), abs=1e-9)
        assert float(quick.results[item].d_output) > 1e-6


def test_a_cache_stays_as_it_is_from_batch_to_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = model_of("gemma3_text", torch.float32), plan_at(N - 1)
    one, _ = run_of(model, plan, N - 1)
    monkeypatch.setattr(effect_run, "TOKENS_AT_ONCE", 3 * N)
    many, segments = run_of(model, plan, N - 1)
    assert len(segments) == len(plan)
    assert {layer.keys.shape[0] for layer in segments[-1].past.layers} == {1}
    for item in range(len(plan)):
        assert float(many.results[item].d_logit) == pytest.approx(float(one.results[item].d_logit), abs=1e-4)


def test_a_model_without_a_cache_runs_over_the_whole_text() -> None:
    _, segments = run_of(model_of("bert", torch.float64), [(Removal(("self", 1), (0,), at=N - 1),)], N - 1)
    assert [segment.start for segment in segments] == [0]


def test_a_model_that_does_not_go_on_from_its_cache_runs_over_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", torch.float32)
    base = type(model.base_model).forward

    def forgetful(self: Any, input_ids: Any, past_key_values: Any = None, **more: Any) -> Any:
        return base(self, input_ids=input_ids, **more)

    monkeypatch.setattr(type(model.base_model), "forward", forgetful)
    run, segments = run_of(model, [(Removal(("self", 1), (0,), at=N - 1),)], N - 1)
    assert [segment.start for segment in segments] == [0]
    assert run.verified.ok


def test_what_is_foreseen_counts_the_tokens_and_blocks_that_run() -> None:
    model, places = model_of("llama", torch.float64), {"last": N - 1, "all": None}
    one = CheckpointFacts(1, N, 48, 192, HEADS, 8, holds_matrices=False, kept_matrices=0, keep_limit=0)
    facts, parts = EffectFacts(one, LAYERS, 99, 1), {}
    for name, at in places.items():
        plan = [(Removal(("self", layer), (0,), at=at),) for layer in range(LAYERS)]
        run = EffectRun(loaded_of(model), {"input_ids": ids_of(1, N)}, plan, N - 1, Target(TARGET))
        cost = run.foresee(facts, 1 << 40)
        parts[name] = [run._part_of_pass([item]) for item in range(LAYERS)]
        assert cost.peak_bytes == replace(facts, n_run=1 if at else None).peak_bytes(5 if at else 3)
    assert parts["all"] == pytest.approx([1, 2 / 3, 1 / 3])
    assert parts["last"] == pytest.approx([1 / N, 2 / 3 / N, 1 / 3 / N])


def test_heads_at_every_position_run_over_the_whole_text() -> None:
    _, segments = run_of(model_of("gpt2", torch.float32), [(Removal(("self", 1), (0,)),)], N - 1)
    assert [segment.start for segment in segments] == [0]


def shapes_in(model: Any, monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, set[tuple[int, ...]]]:
    """The rows and tokens that modules compute within the batches of removals, as they come."""
    shapes: dict[str, set[tuple[int, ...]]] = {name: set() for name in names}
    batch = EffectRun._run_batch

    def watched(run: EffectRun, items: Any, stand_ins: Any) -> None:
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda _, args, name=name: shapes[name].add(tuple(args[0].shape[:2]))
            )
            for name in names
        ]
        batch(run, items, stand_ins)
        for handle in handles:
            handle.remove()

    monkeypatch.setattr(EffectRun, "_run_batch", watched)
    return shapes


def test_behind_the_last_attention_the_measured_token_runs_alone_and_before_the_first_one_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, mlp = model_of("gpt2", torch.float64), "transformer.h.{}.mlp.c_fc"
    whole, last = (mlp.format(n) for n in (1, 2))
    # the activation is a module that runs inside of the whole mlp, and sees what that really computes
    within = {name: f"{name.removesuffix('c_fc')}act" for name in (whole, last)}
    shapes = shapes_in(model, monkeypatch, *within.values())
    rows: set[int] = set()
    project = type(model.transformer.h[1].attn.c_attn).forward

    def counted(self: Any, x: Any) -> Any:
        rows.update({len(x)} if self is model.transformer.h[1].attn.c_attn else set())
        return project(self, x)

    run = EffectRun(
        loaded_of(model), {"input_ids": ids_of(1, N)}, [(Removal(("self", 1), (h,)),) for h in range(HEADS)], 7
    )
    _ = run.segment
    monkeypatch.setattr(type(model.transformer.h[1].attn.c_attn), "forward", counted)
    run._run_batch([*range(HEADS)], StandIns(run.parts.attention.z))
    assert shapes == {within[whole]: {(HEADS + 2, N)}, within[last]: {(HEADS + 2, 1)}}
    assert rows == {1}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_text", "gpt_neox", "mixtral", "bert", "falcon"])
@pytest.mark.parametrize("position", [N - 1, 4])
def test_what_leaves_out_tokens_and_rows_changes_as_whole_passes_do(
    name: str, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, tolerance = (
        (torch.float32, 2e-5) if name == "mixtral" else (torch.float64, 1e-6)
    )  # its experts take no float64
    model = model_of(name, dtype)
    plan = [(Removal(("self", layer), (head,)),) for layer in range(LAYERS) for head in range(HEADS)]
    quick, segments = run_of(model, plan, position)
    monkeypatch.setattr(Entries, "entered", lambda entries, layer, n_rows: nullcontext())
    monkeypatch.setattr(effect_run, "one_token_behind", lambda model, whole: None)
    whole, all_of_it = run_of(model, plan, position)
    assert all(
        bool(segment.alone) == (name != "falcon") for segment in segments
    )  # which adds to the output of its MLP in place
    assert not any(segment.alone for segment in all_of_it)
    for item, removals in enumerate(plan):
        expected = float(whole.results[item].d_output)
        assert float(quick.results[item].d_output) == pytest.approx(expected, abs=tolerance), removals


def test_where_more_than_attention_reads_other_tokens_all_of_them_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", torch.float64)
    mlp = model.model.layers[-1].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x + x.roll(1, dims=1))  # each token reads the one before
    run, segments = run_of(model, [(Removal(("self", 1), (0,)),)], N - 1)
    assert [[*segment.alone] for segment in segments] == [[]]
    assert run.verified.ok
