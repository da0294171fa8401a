"""Watching is safe: what is process-wide is put back on any exit, models do not mix, and a wrong layer is told as wrong."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from support.model_families import (
    BASE,
    FAMILIES,
    PLAIN,
    Q_LEN,
    calls_of,
    ids_of,
    keywords_of,
    loaded_of,
    made,
    matrices_of,
    run_plain,
    sequences_of,
    tensors_in,
    tiny,
)
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from mhacli.adapters.hf import capture
from mhacli.adapters.hf.calls import Call, ScoredCall, SoftmaxCall, unknown_keywords
from mhacli.adapters.hf.capture import captured
from mhacli.adapters.hf.inputs import ModelInputs, make_inputs
from mhacli.adapters.hf.kernels import KernelWatch
from mhacli.compute.checkpoint.layers import CheckpointRunRequest
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.results.record.head_statistics import HEAD_OUTPUTS, ROW_SUMS, HeadsRequest
from mhacli.results.record.record import Record

OF_EACH_RUNG = {
    "gpt2": "h.2.attn",
    "gemma2": "layers.2.self_attn",
    "falcon": "h.2.self_attention",
    "bloom": "h.2.self_attention",
}
"""A family for each way of seeing an attention, and its last one."""


# ---------------------------------------------------------------------------------------------------------- generation


@functools.cache
def generating(name: str) -> Any:
    """A model of the family with its language head, which stops only where it is told to."""
    family = FAMILIES[name]
    kind = "AutoModelForSeq2SeqLM" if name == "t5" else "AutoModelForCausalLM"
    model = made(family.kind, family.choices, automatic=kind)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


N_NEW = 4


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_each_step_of_generation_shows_the_row_of_one_whole_pass(name: str) -> None:
    model, ids, calls = generating(name), ids_of(1, Q_LEN), []
    plain = model.generate(ids, max_new_tokens=N_NEW, do_sample=False)
    with captured(model, calls.append, batch=1):
        watched = model.generate(ids, max_new_tokens=N_NEW, do_sample=False)
    assert torch.equal(plain, watched)
    whole, _ = calls_of(model, {"input_ids": watched[:, :-1]}, 1)
    n_layers = len(whole)
    assert [call.name for call in calls] == [call.name for call in whole] * N_NEW
    assert {call.part for call in calls} == {0}
    window = 5 if name == "mistral" else Q_LEN + N_NEW
    lengths = [(Q_LEN, Q_LEN)] + [(1, min(window, Q_LEN + step)) for step in range(1, N_NEW)]
    assert [(c.q.shape[2], c.k.shape[2]) for c in calls] == [pair for pair in lengths for _ in range(n_layers)]
    for layer, full in enumerate(matrices_of(call)["pattern"] for call in whole):
        for step in range(N_NEW):
            call = calls[step * n_layers + layer]
            own, n_keys, query = matrices_of(call)["pattern"], call.k.shape[2], Q_LEN - 1 + step
            assert (own[:, :, -1] - full[:, :, query, query + 1 - n_keys : query + 1]).abs().max() < 2e-6


def test_generation_of_two_halves_shows_the_encoder_once_and_a_row_of_the_decoder_at_each_step() -> None:
    model, ids, calls = generating("t5"), ids_of(1, Q_LEN), []
    plain = model.generate(ids, max_new_tokens=N_NEW, do_sample=False)
    with captured(model, calls.append, batch=1):
        watched = model.generate(ids, max_new_tokens=N_NEW, do_sample=False)
    assert torch.equal(plain, watched)
    whole, _ = calls_of(model, {"input_ids": ids, "decoder_input_ids": watched[:, :-1]}, 1)
    encoder, decoder = [call for call in whole if "encoder." in call.name], whole[2:]
    names = [call.name for call in decoder]
    assert [call.name for call in calls] == [call.name for call in encoder] + names * N_NEW
    for own, full in zip(calls, encoder, strict=False):
        assert (matrices_of(own)["pattern"] - matrices_of(full)["pattern"]).abs().max() < 1e-5
    for step in range(N_NEW):
        for own, full in zip(calls[2 + step * len(names) :], decoder, strict=False):
            n_keys = Q_LEN if "EncDec" in own.name else step + 1
            assert (own.q.shape[2], own.k.shape[2]) == (1, n_keys)
            row = matrices_of(full)["pattern"][:, :, step, :n_keys]
            assert (matrices_of(own)["pattern"][:, :, 0] - row).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "bloom", "falcon", "gptj", "opt"])
def test_several_tokens_behind_a_cache_have_the_rows_of_one_whole_pass(name: str) -> None:
    model, ids, calls = tiny(name), ids_of(2, Q_LEN), []
    past = model(ids[:, :7], use_cache=True).past_key_values
    with captured(model, calls.append, batch=2):
        model(ids[:, 7:], past_key_values=past, use_cache=True)
    whole, _ = calls_of(model, {"input_ids": ids}, 2)
    assert [call.name for call in calls] == [call.name for call in whole]
    for call, full in zip(calls, whole, strict=True):
        own, rows = matrices_of(call)["pattern"], matrices_of(full)["pattern"][:, :, 7:]
        n_keys = own.shape[3]  # a window keeps no more keys than its first query sees
        assert own.shape == (2, 4, 4, n_keys)
        assert (own - rows[..., Q_LEN - n_keys :]).abs().max() < 2e-6
        assert (rows[..., : Q_LEN - n_keys] == 0).all()


# ------------------------------------------------------------------------------------------------- what is process-wide


def state(*names: str) -> list[Any]:
    """Everything that a capture changes: registries, files, hooks, and torch's modes."""
    registries = [AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping]
    files = [sys.modules[type(tiny(name)).__module__] for name in names]
    locals_ = [getattr(getattr(file, "ALL_ATTENTION_FUNCTIONS", None), "_local_mapping", None) for file in files]
    return [
        *(dict(registry) for registry in registries),
        *(None if own is None else dict(own) for own in locals_),
        *(getattr(file, "eager_attention_forward", None) for file in files),
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for name in names for m in tiny(name).modules()],
        list(_get_current_function_mode_stack()),
        list(_get_current_dispatch_mode_stack()),
    ]


@pytest.mark.parametrize("name", OF_EACH_RUNG)
def test_a_capture_puts_everything_back_and_registers_no_name(name: str) -> None:
    before, tiny_one = state(name), tiny(name)
    with captured(tiny_one, lambda call: None, batch=2):
        during = state(name)
        run_plain(tiny_one, keywords_of(name))
    assert during != before
    assert [set(registry) for registry in during[:2]] == [set(registry) for registry in before[:2]]
    assert state(name) == before


def run_and_raise(model: Any, take: Callable[[Call], None], keywords: dict[str, Tensor], fault: BaseException) -> None:
    with captured(model, take, batch=2):
        run_plain(model, keywords)
        raise fault


@pytest.mark.parametrize("fault", [ValueError("broken"), KeyboardInterrupt()], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("place", ["model", "take", "body"])
@pytest.mark.parametrize("name", OF_EACH_RUNG)
def test_whatever_is_raised_everything_is_put_back(name: str, place: str, fault: BaseException) -> None:
    model, calls = tiny(name), []
    before = state(name)

    def take(call: Call) -> None:
        calls.append(call)
        if place == "take":
            raise fault

    def stop(*_: Any) -> None:
        if place == "model":
            raise fault

    hook = model.get_submodule(OF_EACH_RUNG[name]).register_forward_pre_hook(stop)
    try:
        with pytest.raises(type(fault)) as caught:
            run_and_raise(model, take, keywords_of(name), fault)
    finally:
        hook.remove()
    assert caught.value is fault
    assert len(calls) == {"take": 1, "body": 3, "model": 2}[place]
    assert state(name) == before
    again, _ = calls_of(model, keywords_of(name), 2)
    assert [(call.layer, call.part) for call in again] == [(0, 0), (1, 0), (2, 0)]


# ------------------------------------------------------------------------------------------------- models side by side


@pytest.mark.parametrize(
    ("outer", "inner"), [("llama", "gpt2"), ("bloom", "mpt"), ("falcon", "bloom"), ("gemma2", "gpt_oss")]
)
def test_two_captures_do_not_mix_their_models(outer: str, inner: str) -> None:
    first: list[Call] = []
    second: list[Call] = []
    before = state(outer, inner)
    with captured(tiny(outer), first.append, batch=2):
        run_plain(tiny(inner), keywords_of(inner))
        with captured(tiny(inner), second.append, batch=2):
            run_plain(tiny(outer), keywords_of(outer))
            run_plain(tiny(inner), keywords_of(inner))
        run_plain(tiny(inner), keywords_of(inner))
    for name, calls in ((outer, first), (inner, second)):
        alone, _ = calls_of(tiny(name), keywords_of(name), 2)
        assert [call.name for call in calls] == [call.name for call in alone]
        for one, other in zip(calls, alone, strict=True):
            assert torch.equal(matrices_of(one)["pattern"], matrices_of(other)["pattern"])
    assert state(outer, inner) == before


def test_two_models_of_one_family_are_told_apart_by_their_modules() -> None:
    family, calls = FAMILIES["llama"], []
    other = made(family.kind, family.choices, seed=1)
    with captured(other, calls.append, batch=2):
        run_plain(tiny("llama"), keywords_of("llama"))
        assert calls == []
        run_plain(other, keywords_of("llama"))
    assert len(calls) == 3


def test_a_capture_in_another_thread_waits_for_the_first_to_end() -> None:
    began, entered, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        began.set()
        with captured(tiny("gpt2"), seen.append, batch=2):
            entered.set()
            run_plain(tiny("gpt2"), keywords_of("gpt2"))

    thread = threading.Thread(target=other)
    own: list[Call] = []
    with captured(tiny("llama"), own.append, batch=2):
        thread.start()
        assert began.wait(10)
        assert not entered.wait(0.2)
        run_plain(tiny("llama"), keywords_of("llama"))
    thread.join(20)
    assert entered.is_set()
    assert [call.name for call in own] == [f"layers.{n}.self_attn" for n in range(3)]
    assert [call.name for call in seen] == [f"h.{n}.attn" for n in range(3)]


def test_a_capture_that_fails_lets_the_next_one_in() -> None:
    with pytest.raises(ZeroDivisionError), captured(tiny("llama"), lambda call: None, batch=2):
        raise ZeroDivisionError
    done = threading.Thread(target=lambda: calls_of(tiny("llama"), keywords_of("llama"), 2))
    done.start()
    done.join(10)
    assert not done.is_alive()


class Both(nn.Module):
    """A model with an attention of the registry, and another that is written out, so that torch's functions are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = tiny("llama"), tiny("bloom")

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(run_plain(part, {"input_ids": input_ids})[0] for part in (self.one, self.other))  # type: ignore[return-value]


def test_what_is_computed_of_a_call_is_no_attention_of_the_model() -> None:
    calls: list[Call] = []

    def take(call: Call) -> None:
        calls.append(call)
        pattern = torch.softmax(torch.ones(2, 4, 5, 5), dim=-1)
        nn.functional.scaled_dot_product_attention(pattern, pattern, pattern)
        _ = pattern @ pattern

    model = Both()
    with captured(model, take, batch=2):
        model(ids_of(2, Q_LEN))
    names = [f"one.layers.{n}.self_attn" for n in range(3)] + [f"other.h.{n}.self_attention" for n in range(3)]
    assert [(call.name, call.level) for call in calls] == [
        (name, "registry" if name.startswith("one") else "softmax") for name in names
    ]


def test_a_second_pass_counts_its_calls_anew() -> None:
    calls: list[Call] = []
    with captured(tiny("llama"), calls.append, batch=2):
        run_plain(tiny("llama"), keywords_of("llama"))
        run_plain(tiny("llama"), keywords_of("llama"))
    assert [(call.layer, call.part) for call in calls] == [(0, 0), (1, 0), (2, 0)] * 2


# ------------------------------------------------------------------------------------------------------ what goes wrong


def found_in(model: Any, *layers: int, **more: Tensor) -> Record:
    """What the study finds of a model that reads two texts: of some layers, or of all."""
    inputs = make_inputs(model, sequences_of(ids_of(2, Q_LEN)), None, "right", 0)
    inputs = ModelInputs(inputs.sequences, inputs.context, inputs.side, inputs.keywords | more)
    wanted = CheckpointRunRequest(HeadsRequest(), layers=tuple((None, layer) for layer in layers) or None)
    run = CheckpointRun(loaded_of(model), inputs, wanted)
    run.run()
    return run.record()


def test_a_keyword_that_is_not_understood_is_named_and_the_layer_is_not_verified() -> None:
    found = found_in(tiny("llama"), attention_temperature=torch.ones(2, Q_LEN))
    reason = ("the keyword attention_temperature is not understood",)
    assert [layer.unverified for layer in found.layers] == [reason] * 3
    assert not any(layer.verified for layer in found.layers)
    assert all(layer.self_check.ok for layer in found.layers)  # the numbers themselves do agree


def test_keywords_that_are_off_or_known_are_not_told() -> None:
    off = {"logit_gain": None, "is_streamed": False, "softcap": 3.0, "s_aux": 1, "sliding_window": 5, "position_ids": 7}
    assert unknown_keywords(off) == ()
    assert unknown_keywords(off | {"zeta": 0.0, "alpha": 1}) == ("alpha", "zeta")


@pytest.fixture
def falsified(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """`falsified(name, factor)`: the registry's function of a name gives z times the factor."""

    def falsify(name: str, factor: float) -> None:
        original = AttentionInterface._global_mapping[name]

        def wrong(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
            z, pattern = original(module, query, key, value, attention_mask, **kwargs)
            return z * factor, pattern

        monkeypatch.setitem(AttentionInterface._global_mapping, name, wrong)

    return falsify


def test_a_layer_that_returns_another_z_than_its_pattern_gives_is_told_with_the_number(
    falsified: Callable[[str, float], None],
) -> None:
    falsified("sdpa", 1.001)
    found = found_in(tiny("llama"))
    assert not found.self_check.ok
    for layer in found.layers:
        check = layer.survey.checks[-1]
        assert check.name == HEAD_OUTPUTS
        assert check.error is not None
        assert 100 * check.tolerance > check.error > 10 * check.tolerance
        assert layer.self_check.max_abs_error == check.error
        assert layer.unverified == (f"the check '{check.name}' differs by {check.error}",)
        assert not layer.verified
        assert [one.ok for one in layer.survey.checks] == [True, True, True, False]


def test_a_layer_within_rounding_is_verified(falsified: Callable[[str, float], None]) -> None:
    falsified("sdpa", 1 + 1e-7)
    assert all(layer.verified for layer in found_in(tiny("llama")).layers)


def with_large_scores(size: float) -> Any:
    """A model whose scores are about so large, one of float32's steps at which may be more than 1."""
    model = made("bert", {**BASE, **PLAIN})
    for layer in model.encoder.layer:
        for part in (layer.attention.self.query, layer.attention.self.key):
            part.weight.mul_(size**0.5)
            part.bias.mul_(size**0.5)
    return model


@pytest.mark.every_row
@pytest.mark.parametrize("size", [2e1, 1e2, 3e2, 1e4, 1e6])
def test_shares_of_scores_that_float32_rounds_away_are_those_of_float64(size: float) -> None:
    model, seen = with_large_scores(size), []
    inputs = make_inputs(model, sequences_of(ids_of(2, Q_LEN)), None, "right", 0)
    run = CheckpointRun(loaded_of(model), inputs, CheckpointRunRequest(HeadsRequest(), keep=("pattern",)))
    run.on_layer = lambda call, sight: seen.append((call.q.clone(), call.k.clone(), call.scale))
    run.run()
    found = run.record()
    assert found.self_check.ok
    for index, (q, k, scale) in enumerate(seen):
        shares = (q.double() @ k.double().mT * scale).softmax(dim=-1).numpy()
        assert np.abs(found.of_layer(index).arrays["pattern"] - shares).max() < 1e-6
        entropy = -np.where(shares > 0, shares * np.log(np.where(shares > 0, shares, 1)), 0).sum(axis=-1)
        assert np.abs(found.of_layer(index).arrays["entropy"] - entropy).max() < 1e-5


@pytest.mark.parametrize("size", [3e2, 1e6])
def test_a_wrong_z_of_large_scores_is_told_all_the_same(falsified: Callable[[str, float], None], size: float) -> None:
    falsified("sdpa", 1.1)
    found = found_in(with_large_scores(size))
    assert not found.self_check.ok
    assert not any(layer.verified for layer in found.layers)


@pytest.mark.parametrize("shift", [1e-3, float("nan"), float("inf")])
def test_a_wrong_log_sum_exp_of_a_kernel_is_told(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    original = KernelWatch.lse_of
    monkeypatch.setattr(KernelWatch, "lse_of", lambda self, q: original(self, q) + shift)
    found = found_in(tiny("llama"))
    assert not found.self_check.ok
    for layer in found.layers:
        assert layer.unverified[0].startswith(f"the check '{ROW_SUMS}' differs by ")
        error = layer.survey.checks[0].error
        assert error is not None
        assert abs(error - 1e-3) < 1e-5 if shift == 1e-3 else error > 0.1


def test_values_that_were_not_seen_leave_the_layer_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_PRODUCTS", set())
    found = found_in(tiny("bloom"))
    reason = ("only the pattern was captured, not the values",)
    assert [layer.unverified for layer in found.layers] == [reason] * 3
    assert [head.entropy for head in found.heads] == [head.entropy for head in shown("bloom").heads]


@functools.cache
def shown(name: str) -> Record:
    return found_in(tiny(name))


DROPPING = {
    "gpt2": {"attn_pdrop": 0.1},
    "llama": {"attention_dropout": 0.1},
    "gemma2": {"attention_dropout": 0.1},
    "falcon-alibi": {"attention_dropout": 0.1},
    "bloom": {"attention_dropout": 0.1},
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_of_a_model_in_training_is_told(name: str) -> None:
    choices = DROPPING[name]
    family = FAMILIES[name]
    model = made(family.kind, {**family.choices, **choices})
    assert all(layer.verified for layer in found_in(model, 1).layers)
    (layer,) = found_in(model.train(), 1).layers
    assert [reason[:7] for reason in layer.unverified] == ["dropout"]
    assert not layer.verified
    assert layer.self_check.ok


# ------------------------------------------------------------------------------- attention that is written out by hand


class HandMadeAttention(nn.Module):
    """An attention whose softmax and product are called in one of the ways of calling them."""

    def __init__(self, softmax: str, product: str, flat: bool, share: str = "none") -> None:
        super().__init__()
        self.softmax, self.product, self.flat, self.share = softmax, product, flat, share

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.flat:
            q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        scores = q @ k.mT
        pattern = {
            "torch": lambda: torch.softmax(scores, -1),
            "method": lambda: scores.softmax(dim=-1),
            "function": lambda: nn.functional.softmax(scores, dim=scores.ndim - 1, dtype=torch.float32),
            "keyword": lambda: torch.softmax(input=scores, dim=-1),
        }[self.softmax]()
        pattern = {
            "none": lambda: pattern,
            "cast": lambda: pattern.to(torch.float64).to(torch.float32),
            "dropped": lambda: nn.functional.dropout(pattern, 0.3, training=False),
            "copied": lambda: pattern.reshape(pattern.shape).contiguous().type_as(v),
        }[self.share]()
        return {
            "torch": lambda: torch.matmul(pattern, v),
            "operator": lambda: pattern @ v,
            "bmm": lambda: torch.bmm(pattern, v),
            "method": lambda: pattern.matmul(v),
            "einsum": lambda: torch.einsum("...ij,...jd->...id", pattern, v),
            "none": lambda: pattern,
        }[self.product]()


class HandMade(nn.Module):
    """A model of one such attention. Outside of it, softmax is no attention."""

    def __init__(self, *choices: Any) -> None:
        super().__init__()
        self.attention = HandMadeAttention(*choices)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.softmax(q, -1) @ v.mT
        return self.attention(q, k, v)


@pytest.fixture
def rows(normal: Callable[..., Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of 2 texts, 3 heads, 5 queries and 7 keys."""
    return tuple(normal(2, 3, n, 4, dtype=torch.float32) for n in (5, 7, 7))  # type: ignore[return-value]


@pytest.mark.parametrize(("choices", "has_values"), [
    (("torch", "torch", False), True),
    (("method", "operator", False, "cast"), True),
    (("function", "method", False, "dropped"), True),
    (("keyword", "operator", False, "copied"), True),
    (("torch", "bmm", True), True),
    (("method", "bmm", True, "cast"), True),
    (("torch", "einsum", False), True),
    (("torch", "none", False), False),
])  # fmt: skip
def test_a_softmax_is_seen_however_it_is_called(
    choices: tuple[Any, ...], has_values: bool, rows: tuple[Tensor, Tensor, Tensor]
) -> None:
    model, calls = HandMade(*choices).eval(), []
    plain = model(*rows)
    with captured(model, calls.append, batch=2):
        assert torch.equal(model(*rows), plain)
    (call,) = calls
    assert isinstance(call, SoftmaxCall)
    assert (call.name, call.level, call.implementation, call.unknown) == ("attention", "softmax", "eager", ())
    q, k, v = (tensor.double().numpy() for tensor in rows)
    scores = q @ k.swapaxes(-1, -2)
    shares = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    assert call.pattern.shape == call.scores.shape == (2, 3, 5, 7)
    assert np.abs(call.pattern.numpy() - shares).max() < 1e-6
    assert (call.v is not None) == (call.z is not None) == has_values
    if call.v is not None and call.z is not None:
        assert torch.equal(call.v, rows[2])
        assert np.abs(call.z.numpy() - shares @ v).max() < 1e-5


class FusedAttention(nn.Module):
    """An attention that calls torch's own."""

    def __init__(self, choices: dict[str, Any]) -> None:
        super().__init__()
        self.choices = choices

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, value=v, **self.choices)


@pytest.mark.parametrize("choices", [
    {}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}, {"attn_mask": torch.ones(5, 5).tril().bool()},
    {"attn_mask": torch.arange(25.0).reshape(5, 5) / 9},
], ids=str)  # fmt: skip
def test_torchs_own_attention_is_seen_with_all_that_it_was_given(
    choices: dict[str, Any], normal: Callable[..., Tensor]
) -> None:
    n_kv_heads = 2 if choices.get("enable_gqa") else 6
    q, k, v = (normal(2, n, 5, 4, dtype=torch.float32) for n in (6, n_kv_heads, n_kv_heads))
    model, calls = FusedAttention(choices), []
    with captured(model, calls.append, batch=2):
        out = model(q, k, v)
    (call,) = calls
    assert isinstance(call, ScoredCall)
    assert (call.level, call.unknown, call.causal) == ("sdpa", (), bool(choices.get("is_causal")))
    assert call.scale == choices.get("scale", 0.5)
    assert torch.equal(call.z, out)
    pattern = matrices_of(call)["pattern"].numpy()
    values = np.repeat(v.numpy(), 6 // n_kv_heads, axis=1)
    assert np.abs(pattern @ values - out.numpy()).max() < 1e-5
    if choices.get("is_causal") or (choices.get("attn_mask") is not None and choices["attn_mask"].dtype == torch.bool):
        assert (pattern[..., ~np.tri(5, dtype=bool)] == 0).all()


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gptj", "t5"])
def test_what_is_given_back_for_z_takes_its_place(name):
    model, keywords = tiny(name), keywords_of(name)
    plain = tensors_in(run_plain(model, keywords))
    seen = []

    def same(call):
        seen.append(call.z)
        return None if call.z is None else call.z.clone()

    with captured(model, same, batch=2):
        kept = tensors_in(run_plain(model, keywords))
    with captured(model, lambda call: torch.zeros_like(call.z), batch=2):
        zeros = tensors_in(run_plain(model, keywords))
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    assert seen
    assert not torch.equal(plain[0], zeros[0])
