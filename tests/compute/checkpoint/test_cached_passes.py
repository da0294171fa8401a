"""Generation within `inspecting`: one record with the rows of all passes, and what cannot be put together is named."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from support.model_families import FAMILIES, PAIRS, Q_LEN, ids_of, made, tiny
from torch import Tensor

import mhacli
from mhacli.errors import MhaError

N_NEW = 4


@functools.cache
def speaking(name: str) -> Any:
    """A model with its language head, which never ends by itself."""
    family = FAMILIES[name]
    kind = "AutoModelForSeq2SeqLM" if name in PAIRS else "AutoModelForCausalLM"
    model = made(family.kind, family.choices, automatic=kind)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def generated(model: Any, ids: Tensor, **choices: Any) -> Tensor:
    made: Tensor = model.generate(ids, max_new_tokens=N_NEW, do_sample=False, **choices)
    return made


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gpt_oss", "bloom", "t5"])
def test_generation_is_one_record_with_the_rows_of_one_whole_pass(name: str) -> None:
    model, ids = speaking(name), ids_of(2, Q_LEN)
    plain = generated(model, ids)
    with mhacli.inspecting(model, keep=("pattern",)) as seen:
        assert torch.equal(generated(model, ids), plain)
    read = {"input_ids": ids, "decoder_input_ids": plain[:, :-1]} if name in PAIRS else {"input_ids": plain[:, :-1]}
    with mhacli.inspecting(model, keep=("pattern",)) as whole, torch.no_grad():
        model(**read, use_cache=False)
    (record,), expected = seen.passes, whole.record
    assert record.sequences == expected.sequences
    assert [layer.mask for layer in record.layers] == [layer.mask for layer in expected.layers]
    assert all(layer.verified for layer in record.layers)
    for own, array in expected.arrays.items():
        if own.endswith(".pattern"):
            assert np.abs(record.arrays[own] - array).max() < 2e-5


def test_texts_with_padding_on_the_left_go_on_at_their_ends() -> None:
    model, ids = speaking("llama"), ids_of(2, Q_LEN)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with mhacli.inspecting(model, keep=("pattern",)) as seen:
        whole = generated(model, ids, attention_mask=mask)
    record = seen.record
    assert [list(text.ids) for text in record.sequences] == [whole[0, :-1].tolist(), whole[1, 3:-1].tolist()]
    assert record.config.padding == "left"
    assert all(layer.verified for layer in record.layers)
    assert (record.arrays["layers.1.pattern"][1, :, :, :3] == 0).all()


def test_a_text_that_goes_on_by_hand_is_one_record_and_the_next_text_another() -> None:
    model, ids = tiny("gpt2"), ids_of(1, 9)
    with mhacli.inspecting(model) as seen, torch.no_grad():
        for _ in range(2):
            past = model(ids[:, :4], use_cache=True).past_key_values
            past = model(ids[:, 4:6], past_key_values=past).past_key_values
            model(ids[:, 6:], past_key_values=past)
    assert [record.sequences[0].ids for record in seen.passes] == [tuple(ids[0].tolist())] * 2


def test_a_cache_that_was_filled_before_is_named() -> None:
    model, ids = tiny("gpt2"), ids_of(1, 9)
    past = model(ids[:, :4], use_cache=True).past_key_values
    with mhacli.inspecting(model) as seen:
        model(ids[:, 4:], past_key_values=past)
    with pytest.raises(MhaError, match="did not see being filled"):
        _ = seen.record


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "t5"])
def test_a_cache_of_a_fixed_length_gives_the_same_record(name: str) -> None:
    model, ids = speaking(name), ids_of(2, Q_LEN)
    with mhacli.inspecting(model, keep=("pattern",)) as seen:
        generated(model, ids, cache_implementation="static")
    with mhacli.inspecting(model, keep=("pattern",)) as grown:
        generated(model, ids)
    (record,), expected = seen.passes, grown.record
    assert record.sequences == expected.sequences
    assert all(layer.verified for layer in record.layers)
    for own, array in expected.arrays.items():
        if own.endswith(".pattern"):
            assert np.abs(record.arrays[own] - array).max() < 2e-5


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_padding_on_the_left_of_a_cache_of_a_fixed_length_is_no_token(name: str) -> None:
    model, ids = speaking(name), ids_of(2, Q_LEN)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with mhacli.inspecting(model, keep=("pattern",)) as seen:
        generated(model, ids, attention_mask=mask, cache_implementation="static")
    with mhacli.inspecting(model, keep=("pattern",)) as alone:
        generated(model, ids[1:, 3:])
    found, expected = seen.record, alone.record
    assert found.sequences[1].ids[: Q_LEN - 3] == tuple(ids[1, 3:].tolist())
    assert [len(text.ids) for text in found.sequences] == [Q_LEN + N_NEW - 1, Q_LEN - 3 + N_NEW - 1]
    for layer in range(3):
        pattern = found.arrays[f"layers.{layer}.pattern"][1, :, 3:, 3:]
        assert np.abs(pattern - expected.arrays[f"layers.{layer}.pattern"][0]).max() < 2e-5


def test_a_mask_that_hides_tokens_from_themselves_is_no_padding() -> None:
    model, ids = speaking("llama"), ids_of(2, Q_LEN)
    earlier = torch.ones(1, 1, Q_LEN, Q_LEN, dtype=torch.bool).tril(-1)
    earlier[..., 0, 0] = True
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(ids, attention_mask=earlier.expand(2, -1, -1, -1), use_cache=False)
    assert [len(text.ids) for text in seen.record.sequences] == [Q_LEN, Q_LEN]


def test_a_cache_that_beam_search_reorders_is_named_with_the_way_out() -> None:
    model = speaking("llama")
    with mhacli.inspecting(model) as seen:
        generated(model, ids_of(2, Q_LEN), num_beams=3)
    with pytest.raises(MhaError, match="beam search") as caught:
        _ = seen.record
    assert caught.value.hint == "use_cache=False makes a pass of each step, which needs no cache"


def test_a_pass_without_a_record_is_named_beside_others() -> None:
    model, ids = tiny("gpt2"), ids_of(1, 9)
    past = model(ids[:, :4], use_cache=True).past_key_values
    with mhacli.inspecting(model) as seen:
        model(ids)
        model(ids[:, 4:], past_key_values=past)
    assert len(seen.passes) == 1
    (note,) = seen.notes
    assert note.startswith(
        "a pass is in no record: layer 0 (self) has attention with a cache that mha did not see being filled"
    )


def test_a_layer_by_itself_reads_its_own_part_of_the_cache() -> None:
    model, ids = speaking("llama"), ids_of(1, Q_LEN)
    with mhacli.inspecting(model.model.layers[1], keep=("pattern",)) as seen:
        whole = generated(model, ids)
    with mhacli.inspecting(model, keep=("pattern",), layers=[1]) as expected, torch.no_grad():
        model(whole[:, :-1], use_cache=False)
    found = seen.record.pattern(layer=0)
    assert np.abs(found.values - expected.record.pattern(layer=1).values).max() < 2e-5
    assert found.query_tokens == tuple(f"x{i}" for i in range(Q_LEN + N_NEW - 1))


def test_what_is_copied_of_a_generated_text_stays_within_the_limit() -> None:
    model, layer = speaking("gpt2"), 4 * 4 * (Q_LEN + N_NEW) * 48  # q, k, v and z in float32
    with mhacli.inspecting(model, keep_limit=2 * layer) as seen:
        generated(model, ids_of(1, Q_LEN))
    record = seen.record
    assert record.model is not None
    assert 1 <= len(record.layers) <= 2
    assert len(record.layers) + len(record.model.without) == 3
    assert "more than the limit" in record.model.without[0].type
