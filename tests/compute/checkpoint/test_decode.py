"""A checkpoint decodes with its own cache: what its steps read, and that they say what one pass over all says."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from support.model_families import (
    N_LAYERS,
    Q_LEN,
    WINDOW,
    eager_patterns,
    inputs_of,
    keywords_of,
    loaded_of,
    run_plain,
    sequence_of,
    tiny,
)

from mhacli.adapters.hf.inputs import make_inputs
from mhacli.compute.checkpoint import decode as modeldecode
from mhacli.compute.checkpoint.decode import decode_checkpoint
from mhacli.compute.checkpoint.layers import CheckpointRunRequest
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError, UsageError
from mhacli.results.record import storage
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.results.record.record import CacheStep, Record

LAYER, BATCH, ITEM = 1, 2, 4
FAMILIES = ("gpt2", "llama", "mistral", "t5")
OF_LAYER = {"gpt2": (1, 4), "llama": (1, 2), "mistral": (1, 2), "t5": (4, 4)}
"""Where the layer stands among all attentions of a pass, and its kv heads."""
TOLERANCE = 5e-5


def run_of(name: str, **wanted: Any) -> CheckpointRun:
    choices = {"layers": ((None, LAYER),), "keep": None, **wanted}
    return CheckpointRun(loaded_of(tiny(name)), inputs_of(name), CheckpointRunRequest(HeadsRequest(), **choices))


@functools.cache
def decoded(name: str, prompt_len: int = 0) -> Record:
    return decode_checkpoint(run_of(name), prompt_len)


def caches(record: Record) -> list[CacheStep]:
    return [step.cache for step in record.trace if step.cache is not None]


def n_keys(cache: CacheStep) -> int:
    return int(cache.n_past + cache.k_shape[2])


def lengths(name: str, prompt_len: int = 0) -> list[int]:
    return [n_keys(cache) for cache in caches(decoded(name, prompt_len))]


# --------------------------------------------------------------------------------------------------------------- the steps


@pytest.mark.parametrize("prompt_len", [0, 4, 8, Q_LEN])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_rows_of_the_steps_are_those_of_one_pass_over_all(name: str, prompt_len: int) -> None:
    record = decoded(name, prompt_len)
    pattern = eager_patterns(name, keywords_of(name))[OF_LAYER[name][0]].numpy()
    found = record.of_layer(0).arrays["pattern"]
    assert found.shape == (BATCH, 4, Q_LEN, Q_LEN)
    np.testing.assert_allclose(found, pattern, atol=TOLERANCE, rtol=0)
    assert np.array_equal(found == 0, pattern == 0)


@pytest.mark.parametrize("prompt_len", [0, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_self_check_is_the_largest_difference_of_any_step(name: str, prompt_len: int) -> None:
    record = decoded(name, prompt_len)
    found = [cache.max_abs_difference for cache in caches(record)]
    assert record.self_check.ok
    assert record.self_check.max_abs_error == max(found)
    assert 0 < record.self_check.max_abs_error < TOLERANCE
    outputs = run_plain(tiny(name), keywords_of(name))
    n_layers = N_LAYERS if name != "t5" else 2
    largest = outputs.last_hidden_state.abs().max().item()
    assert record.self_check.tolerance == pytest.approx(2e-6 * n_layers * largest, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_every_step_meets_one_key_more(name: str) -> None:
    assert lengths(name) == list(range(1, Q_LEN + 1))
    assert lengths(name, 4) == list(range(4, Q_LEN + 1))


def test_the_keys_of_a_window_stay_as_many_as_it_holds() -> None:
    assert WINDOW < Q_LEN
    assert lengths("mistral") == [min(i + 1, WINDOW) for i in range(Q_LEN)]
    assert lengths("mistral", 4) == [4, *[WINDOW] * 7]
    assert lengths("mistral", 8) == [8, *[WINDOW] * 3]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_one_step_and_every_other_token_one(name: str) -> None:
    record, text = decoded(name, 4), decoded(name, 4).sequences
    assert [cache.phase for cache in caches(record)] == ["prefill", *["decode"] * 7]
    assert {cache.phase for cache in caches(decoded(name))} == {"decode"}
    assert [cache.start for cache in caches(record)] == [0, *range(4, Q_LEN)]
    assert [cache.tokens for cache in caches(record)] == [
        tuple(one.tokens[0:4] for one in text), *(tuple(one.tokens[i : i + 1] for one in text) for i in range(4, Q_LEN))
    ]  # fmt: skip
    assert [step.shape for step in record.trace] == [(BATCH, 4, 48), *[(BATCH, 1, 48)] * 7]
    assert record.decoding is not None
    assert record.decoding.prompt_len == 4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_counts_what_it_reads_and_appends(name: str) -> None:
    kv_heads = OF_LAYER[name][1]
    token = BATCH * kv_heads * (12 + 12) * ITEM
    for cache in caches(decoded(name, 4)):
        new = cache.q_shape[2]
        assert cache.q_shape == (BATCH, 4, new, 12)
        assert cache.k_shape == cache.v_shape == (BATCH, kv_heads, new, 12)
        assert cache.appended_bytes == new * token
        assert cache.read_bytes == cache.cache_bytes == n_keys(cache) * token


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_of_all_layers_is_counted_token_by_token(name: str) -> None:
    summary = decoded(name).decoding
    assert summary is not None
    n_layers, model = (2 if name == "t5" else N_LAYERS), tiny(name)
    weights = sum(p.numel() * ITEM for p in model.parameters())
    token = n_layers * OF_LAYER[name][1] * 24 * ITEM
    assert (summary.token_bytes, summary.full_token_bytes) == (token, n_layers * 4 * 24 * ITEM)
    assert summary.weight_bytes == weights
    assert summary.crossing_len == pytest.approx(weights / token)
    own = run_plain_cached(name)
    assert summary.cache == type(own).__name__


def run_plain_cached(name: str) -> Any:
    with torch.no_grad():
        return tiny(name)(**keywords_of(name), use_cache=True).past_key_values


def test_a_record_of_steps_survives_its_file(tmp_path: Any) -> None:
    record = decoded("mistral", 4)
    record.save(str(tmp_path / "r"))
    again = storage.load(str(tmp_path / "r"))
    assert again.trace == record.trace
    assert np.array_equal(again.of_layer(0).arrays["pattern"], record.of_layer(0).arrays["pattern"])


def test_a_step_that_says_something_else_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    last = modeldecode._last
    calls: list[int] = []

    def other(outputs: Any) -> Any:
        calls.append(1)
        return last(outputs) + (1e-2 if len(calls) == 6 else 0)

    monkeypatch.setattr(modeldecode, "_last", other)
    record = decode_checkpoint(run_of("gpt2"), 0)
    assert not record.self_check.ok
    assert record.self_check.max_abs_error == pytest.approx(1e-2, abs=1e-4)
    assert [c.max_abs_difference is not None and c.max_abs_difference > 5e-3 for c in caches(record)].index(True) == 4


# ------------------------------------------------------------------------------------------------------------- what it refuses


def refusal(run: CheckpointRun, prompt_len: int = 0) -> MhaError:
    with pytest.raises(MhaError) as caught:
        decode_checkpoint(run, prompt_len)
    return caught.value


def test_attention_that_sees_later_tokens_is_refused() -> None:
    run = run_of("bert")
    fault = refusal(run)
    path = run.loaded.source
    assert fault.message == f"{path} is an encoder: its tokens see later ones, so it has no cache"
    assert fault.hint == f"mha run TEXT --model {path} shows its attention"
    assert fault.code == "not-causal"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("encoder", "encoder.block.1.layer.0.SelfAttention"), ("cross", "decoder.block.1.layer.1.EncDecAttention")],
)
def test_of_a_pair_only_the_decoder_decodes(kind: Any, name: str) -> None:
    fault = refusal(run_of("t5", layers=((kind, LAYER),)))
    assert fault.code == "not-causal"
    assert name in fault.message


def test_texts_of_different_lengths_are_refused() -> None:
    model = tiny("gpt2")
    inputs = make_inputs(model, [sequence_of([5, 6, 7]), sequence_of([8, 9])], None, "right", 0)
    fault = refusal(CheckpointRun(loaded_of(model), inputs, CheckpointRunRequest(HeadsRequest(), keep=None)))
    assert isinstance(fault, UsageError)
    assert fault.message == "mha decode --model needs texts of one length"
    assert fault.hint == "decode each text in a run of its own"


@pytest.mark.parametrize("prompt_len", [-1, Q_LEN + 1])
def test_a_prompt_longer_than_the_text_is_refused(prompt_len: int) -> None:
    fault = refusal(run_of("gpt2"), prompt_len)
    assert fault.message == f"--prompt-len {prompt_len} is out of range: the text has {Q_LEN} tokens"


def test_the_pattern_alone_is_kept_and_must_fit() -> None:
    chosen = refusal(run_of("gpt2", keep=("pattern", "z")))
    assert chosen.message == "--keep does not work with mha decode --model, which keeps the pattern"
    small = refusal(run_of("gpt2", keep_limit=1000))
    assert small.message == f"the pattern of {Q_LEN} × {Q_LEN} tokens takes more than --keep-limit, 1000 B"
    assert small.hint == f"--max-tokens {Q_LEN // 2} takes a shorter text, a larger --keep-limit makes room"


def test_a_layer_that_is_not_there_is_refused() -> None:
    fault = refusal(run_of("llama", layers=((None, 7),)))
    assert fault.code == "no-layer"
