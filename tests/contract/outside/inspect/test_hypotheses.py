"""Texts that beams or drafts make: the record has what the model computed for the accepted one, or
says why it leaves attentions out.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from support.small_models import filled, llama
from torch import Tensor

import mhacli

pytestmark = pytest.mark.real


def marian() -> Any:
    import transformers

    sides = ("encoder", "decoder")
    sizes = {f"{side}_{name}": n for side in sides for name, n in SIZES.items()}
    ids = {"pad_token_id": 99, "eos_token_id": 0, "decoder_start_token_id": 99}
    more = {"bos_token_id": None, "forced_eos_token_id": None, "max_position_embeddings": 32}
    config = transformers.MarianConfig(vocab_size=100, d_model=32, **sizes, **ids, **more)
    return filled(transformers.MarianMTModel(config), scale=0.25)


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def test_cross_attention_of_reordered_beams_is_left_out() -> None:
    model, ids = marian(), torch.tensor([[5, 6, 7, 8, 0]])
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model.generate(input_ids=ids, max_new_tokens=6, num_beams=3)
    assert {layer.kind for layer in seen.record.layers} == {"encoder"}
    assert any("beam search" in note for note in seen.notes)


def test_no_layer_of_reordered_beams_is_shown() -> None:
    ids = torch.tensor([[3, 20, 30, 40]])
    with mhacli.inspecting(llama(), layers=[0]) as seen:
        seen._model.generate(ids, max_new_tokens=8, num_beams=4, pad_token_id=2)
    with pytest.raises(mhacli.MhaError, match="beam search"):
        _ = seen.record


REPEATING = torch.tensor([[0, 5, 6, 7, 5, 6, 9, 5, 6]])
GREEDY = {"do_sample": False, "pad_token_id": 2, "eos_token_id": None}


def assert_one_record_of(seen: Any, text: Tensor) -> None:
    """The last record has each token that was read of a text of a Llama, with the weights of
    eager attention over that text.
    """
    record, n = seen.record, text.shape[1] - 1
    assert [int(token) for token in record.sequences[0].tokens] == text[0, :n].tolist()
    with torch.no_grad():
        weights = llama(attention="eager")(text[:, :n], output_attentions=True).attentions
    for layer, right in enumerate(weights):
        shown = torch.as_tensor(record.pattern(layer=layer).values)
        torch.testing.assert_close(shown, right[0], atol=2e-5, rtol=0.0)
    assert record.self_check.ok


@pytest.mark.parametrize("n_drafts", [1, 3, 10])
@pytest.mark.parametrize("n_new", [1, 2, 12])
def test_a_record_has_no_drafts_that_were_rejected(n_drafts: int, n_new: int) -> None:
    model, more = llama(), {"max_new_tokens": n_new, **GREEDY}
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        made = model.generate(REPEATING, prompt_lookup_num_tokens=n_drafts, **more)
    assert torch.equal(made, model.generate(REPEATING, **more))
    assert len(seen.passes) == 1
    assert_one_record_of(seen, made)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_record_has_the_drafts_of_an_assistant_that_were_accepted(sampled: bool) -> None:
    model, assistant = llama(), llama()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    more = GREEDY | {"do_sample": sampled, "max_new_tokens": 16, "assistant_model": assistant}
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model.generate(REPEATING[:, :5], **more)
        made = model.generate(REPEATING, **more)
    assert len(seen.passes) == 2
    assert_one_record_of(seen, made)


def test_the_halves_of_a_text_have_no_drafts_that_were_rejected() -> None:
    model, ids = marian(), torch.tensor([[5, 6, 7, 5, 6, 0]])
    start = torch.tensor([[99, 5, 6, 7, 5, 6]])
    more = {"decoder_input_ids": start, "max_new_tokens": 8, "num_beams": 1, "eos_token_id": None}
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        made = model.generate(input_ids=ids, prompt_lookup_num_tokens=4, **more)
    read = made[:, :-1]
    with mhacli.inspecting(model, keep=["pattern"]) as plain, torch.no_grad():
        model(input_ids=ids, decoder_input_ids=read)
    assert len(seen.passes) == 1
    assert seen.record.sequences == plain.record.sequences
    assert [layer.label for layer in seen.record.layers] == [
        layer.label for layer in plain.record.layers
    ]
    patterns = [name for name in plain.record.arrays if name.endswith("pattern")]
    for name in patterns:
        shown, right = (torch.as_tensor(each.record.arrays[name]) for each in (seen, plain))
        torch.testing.assert_close(shown, right, atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("n_prompt", [7, 9])
def test_a_loop_that_crops_its_cache_keeps_what_it_accepted(n_prompt: int) -> None:
    import transformers

    model, cache = llama(), transformers.DynamicCache()
    drafts = torch.tensor([[10, 11, 12, 13]])
    freed = weakref.ref(cache)
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        if n_prompt < 9:
            model(REPEATING[:, :n_prompt], past_key_values=cache)
        rest = torch.cat([REPEATING[:, n_prompt % 9 :], drafts], dim=1)
        model(rest, past_key_values=cache)
        cache.crop(-2)
        model(torch.tensor([[20, 21]]), past_key_values=cache)
        cache.crop(-1)
    assert len(seen.passes) == 1
    assert any("rejected" in note for note in seen.notes)
    assert_one_record_of(seen, torch.cat([REPEATING, torch.tensor([[10, 11, 20, 0]])], dim=1))
    del cache
    assert freed() is None


def test_continuations_of_one_prompt_are_texts_of_their_own() -> None:
    import transformers

    model, cache = llama(), transformers.DynamicCache()
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(REPEATING, past_key_values=cache)
        for choice in ([20, 21], [30, 31]):
            model(torch.tensor([choice]), past_key_values=cache)
            cache.crop(-2)
    ends = [record.sequences[0].tokens[-2:] for record in seen.passes]
    assert ends == [("20", "21"), ("30", "31")]


def test_a_cache_that_keeps_few_keys_rejects_no_token() -> None:
    import transformers

    class Few(transformers.DynamicCache):
        def get_seq_length(self, layer_idx: int = 0) -> int:
            return min(4, int(super().get_seq_length(layer_idx)))

    with mhacli.inspecting(llama(), keep=["pattern"]) as seen, torch.no_grad():
        seen._model(REPEATING, past_key_values=Few())
    assert len(seen.record.sequences[0].tokens) == 9
