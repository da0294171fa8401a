"""`mhacli.removed` against edited copies of the weights, and against masks that the model itself reads."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from support.model_families import FAMILIES, ids_of, keywords_of, made, run_plain, tiny
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhacli

N, HEADS = 11, 4
PROJECTIONS = {
    "gpt2": "transformer.h.{}.attn.c_proj",
    "llama": "model.layers.{}.self_attn.o_proj",
    "gemma2": "model.layers.{}.self_attn.o_proj",
    "gpt_oss": "model.layers.{}.self_attn.o_proj",
    "bloom": "transformer.h.{}.self_attention.dense",
}


def model_of(name: str, **how: Any) -> Any:
    family = FAMILIES[name]
    model = made(family.kind, family.choices, automatic="AutoModelForCausalLM", **how)
    return model if name == "gpt_oss" else model.double()


def without_heads(name: str, model: Any, *heads: tuple[int, int]) -> Any:
    """A copy whose output projections ignore heads."""
    edited = copy.deepcopy(model)
    for layer, head in heads:
        projection = edited.get_submodule(PROJECTIONS[name].format(layer))
        weight = projection.weight.data if type(projection).__name__ == "Conv1D" else projection.weight.data.T
        width = weight.shape[0] // HEADS
        weight[head * width : (head + 1) * width] = 0
    return edited


def logits(model: Any, ids: Tensor) -> Tensor:
    return run_plain(model, {"input_ids": ids}).logits


def masked_edge(model: Any, ids: Tensor, layer: int, edges: list[tuple[int, int, int]]) -> Tensor:
    """The logits where the mask of one layer's attention of llama forbids edges of single heads."""

    def forbid(_: Any, args: Any, kwargs: Any) -> Any:
        mask = torch.zeros(len(ids), HEADS, N, N, dtype=torch.float64)
        mask = mask.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
        for head, query, key in edges:
            mask[:, head, query, key] = -torch.inf
        return args, kwargs | {"attention_mask": mask}

    handle = model.model.layers[layer].self_attn.register_forward_pre_hook(forbid, with_kwargs=True)
    found = logits(model, ids)
    handle.remove()
    return found


@pytest.mark.parametrize("name", PROJECTIONS)
def test_heads_are_gone_from_every_sequence_of_a_batch(name: str) -> None:
    model, ids = model_of(name), ids_of(2, N)
    plain = logits(model, ids)
    with mhacli.removed(model, heads=[(1, 2), (2, 0)]):
        found = logits(model, ids)
    torch.testing.assert_close(found, logits(without_heads(name, model, (1, 2), (2, 0)), ids), rtol=0, atol=2e-5)
    assert (found - plain).abs().max() > 1e-3
    assert torch.equal(logits(model, ids), plain), "as it was"


def test_edges_of_one_query_are_masked_together() -> None:
    model, ids = model_of("llama"), ids_of(2, N)
    edges = [(1, 8, 2), (1, 8, 5), (3, 6, 0)]
    with mhacli.removed(model, edges=[(1, *edge) for edge in edges]):
        found = logits(model, ids)
    torch.testing.assert_close(found, masked_edge(model, ids, 1, edges), rtol=0, atol=1e-9)


def test_an_edge_of_all_heads_and_nested_contexts_add_up() -> None:
    model, ids = model_of("llama"), ids_of(1, N)
    of_all = [(head, 8, 2) for head in range(HEADS)]
    with mhacli.removed(model, edges=[(1, None, 8, 2)]):
        outer = logits(model, ids)
        with mhacli.removed(model, edges=[(1, 0, 8, 4)]), mhacli.removed(model, heads=[(2, 1)]):
            inner = logits(model, ids)
        again = logits(model, ids)
    torch.testing.assert_close(outer, masked_edge(model, ids, 1, of_all), rtol=0, atol=1e-9)
    both = masked_edge(without_heads("llama", model, (2, 1)), ids, 1, [*of_all, (0, 8, 4)])
    torch.testing.assert_close(inner, both, rtol=0, atol=1e-9)
    assert torch.equal(again, outer)


def test_contexts_may_end_in_the_order_in_which_they_began() -> None:
    model, ids = model_of("llama"), ids_of(1, N)
    plain = logits(model, ids)
    first, second = mhacli.removed(model, heads=[(1, 2)]), mhacli.removed(model, heads=[(2, 1)])
    first.__enter__()
    second.__enter__()
    logits(model, ids)
    first.__exit__(None, None, None)
    left = logits(model, ids)
    second.__exit__(None, None, None)
    torch.testing.assert_close(left, logits(without_heads("llama", model, (2, 1)), ids), rtol=0, atol=1e-9)
    assert torch.equal(logits(model, ids), plain)


def test_an_edge_of_a_head_that_is_gone_does_not_bring_it_back() -> None:
    model, ids = model_of("gpt2"), ids_of(1, N)
    with mhacli.removed(model, heads=[(0, 3)], edges=[(0, 3, 8, 2)]):
        found = logits(model, ids)
    torch.testing.assert_close(found, logits(without_heads("gpt2", model, (0, 3)), ids), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation_with_a_cache_runs_without_the_head_and_the_edge(name: str) -> None:
    model, ids = model_of(name), ids_of(1, N)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    query = N + 1
    with mhacli.removed(model, heads=[(1, 2)], edges=[(2, 1, query, query - 1)]):
        steps = model.generate(ids, **how, output_logits=True, return_dict_in_generate=True)
        whole = logits(model, steps.sequences)
    made_of = torch.stack(steps.logits, dim=1)
    torch.testing.assert_close(made_of.double(), whole[:, N - 1 : -1].double(), rtol=0, atol=2e-5)


def test_gradients_are_those_of_the_model_without_the_head() -> None:
    model, ids = model_of("gpt2").requires_grad_(True), ids_of(1, N)
    edited = without_heads("gpt2", model, (1, 2))
    with mhacli.removed(model, heads=[(1, 2)]):
        model(ids, use_cache=False).logits[0, -1, 5].backward()
    edited(ids, use_cache=False).logits[0, -1, 5].backward()
    for (name, one), other in zip(model.named_parameters(), edited.parameters(), strict=True):
        if name != "transformer.h.1.attn.c_proj.weight":  # of the head that is not there
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-9, msg=name)


def test_gradients_flow_through_what_is_left_of_a_row() -> None:
    model, ids = model_of("llama").requires_grad_(True), ids_of(1, N)
    other = copy.deepcopy(model)
    with mhacli.removed(model, edges=[(1, 2, N - 1, 3)]):
        model(ids, use_cache=False).logits[0, -1, 5].backward()

    def forbid(_: Any, args: Any, kwargs: Any) -> Any:
        mask = torch.zeros(1, HEADS, N, N, dtype=torch.float64)
        mask = mask.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
        mask[:, 2, N - 1, 3] = -torch.inf
        return args, kwargs | {"attention_mask": mask}

    other.model.layers[1].self_attn.register_forward_pre_hook(forbid, with_kwargs=True)
    other(ids, use_cache=False).logits[0, -1, 5].backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-6, msg=name)


LEFT = torch.tensor([[0] * 4 + [1] * (N - 4), [1] * N])
"""Of two sequences the first is shorter, and stands behind padding."""


def padded() -> dict[str, Tensor]:
    return {"input_ids": ids_of(2, N) * LEFT, "attention_mask": LEFT}


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_behind_padding_on_the_left_heads_and_edges_are_those_of_the_text_alone(name: str) -> None:
    model, inputs = model_of(name), padded()
    places = (LEFT.cumsum(dim=1) - 1).clamp(min=0)
    alone = inputs["input_ids"][:1, 4:]
    for replace in ("zero", "mean"):
        with mhacli.removed(model, heads=[(1, 2)], replace=replace):
            both = run_plain(model, inputs | {"position_ids": places}).logits
            single = logits(model, alone)
        torch.testing.assert_close(both[:1, 4:], single, rtol=0, atol=1e-6)
        assert not torch.allclose(single, logits(model, alone), atol=1e-4)
    with mhacli.removed(model, edges=[(1, 2, N - 1, N - 3)]):
        both = run_plain(model, inputs | {"position_ids": places}).logits
    with mhacli.removed(model, edges=[(1, 2, N - 5, N - 7)]):
        single = logits(model, alone)
    torch.testing.assert_close(both[:1, 4:], single, rtol=0, atol=1e-6)


def hooked_logits(model: Any, inputs: dict[str, Tensor], layer: int, edit: Any) -> Tensor:
    """The logits where the columns of head 2 in the input of llama's output projection are edited."""

    def hook(_: Any, args: Any) -> Any:
        x = args[0].clone()
        columns = slice(2 * x.shape[-1] // HEADS, 3 * x.shape[-1] // HEADS)
        x[..., columns] = edit(x[..., columns])
        return (x,)

    handle = model.get_submodule(PROJECTIONS["llama"].format(layer)).register_forward_pre_hook(hook)
    found = run_plain(model, inputs).logits
    handle.remove()
    return found


def test_a_mean_is_that_of_each_sequence_without_its_padding() -> None:
    model, inputs = model_of("llama"), padded()
    real = LEFT[..., None].double()
    expected = hooked_logits(model, inputs, 1, lambda x: (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True))
    with mhacli.removed(model, heads=[(1, 2)], replace="mean"):
        found = run_plain(model, inputs).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("n_others", [1, 2])
def test_a_head_gives_what_it_gives_in_another_input_of_the_whole_model(n_others: int) -> None:
    model, ids, other = model_of("llama"), ids_of(2, N), ids_of(n_others, N, seed=7)
    seen: list[Tensor] = []
    hooked_logits(model, {"input_ids": other}, 1, lambda x: seen.append(x.clone()) or x)
    expected = hooked_logits(without_heads("llama", model, (0, 3)), {"input_ids": ids}, 1, lambda x: seen[0])
    with (
        mhacli.removed(model, heads=[(0, 3)]),
        mhacli.removed(model, heads=[(1, 2)], replace="resample", other={"input_ids": other}),
    ):
        found = logits(model, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_generation_takes_from_another_input_what_stands_at_the_same_positions() -> None:
    model, ids, other = model_of("llama"), ids_of(1, N), ids_of(1, N + 4, seed=7)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with mhacli.removed(model, heads=[(1, 2)], replace="resample", other=other):
        steps = model.generate(ids, **how, output_logits=True, return_dict_in_generate=True)
        whole = logits(model, steps.sequences)
    made_of = torch.stack(steps.logits, dim=1)
    torch.testing.assert_close(made_of.double(), whole[:, N - 1 : -1].double(), rtol=0, atol=2e-5)


def test_the_inner_of_two_contexts_says_what_a_head_gives() -> None:
    model, ids = model_of("llama"), ids_of(1, N)
    mean = hooked_logits(model, {"input_ids": ids}, 1, lambda x: x.mean(1, keepdim=True))
    with mhacli.removed(model, heads=[(1, 2)]):
        outer = logits(model, ids)
        with mhacli.removed(model, heads=[(1, 2)], replace="mean"):
            torch.testing.assert_close(logits(model, ids), mean, rtol=0, atol=1e-9)
        assert torch.equal(logits(model, ids), outer)


@pytest.mark.parametrize("kind", ["encoder", "cross"])
def test_heads_of_a_pair_give_their_mean_over_the_text_of_their_queries(kind: str) -> None:
    family = FAMILIES["t5"]
    model = made(family.kind, family.choices, automatic="AutoModelForSeq2SeqLM").double()
    real = LEFT.flip(1)
    inputs = {"input_ids": ids_of(2, N) * real, "attention_mask": real, "decoder_input_ids": ids_of(2, 5, seed=3)}
    half, part = ("encoder", "0.SelfAttention") if kind == "encoder" else ("decoder", "1.EncDecAttention")
    projection = model.get_submodule(f"{half}.block.1.layer.{part}.o")
    weight = (real if kind == "encoder" else torch.ones(2, 5))[..., None].double()

    def hook(_: Any, args: Any) -> Any:
        x = args[0].clone()
        x[..., 24:36] = (x[..., 24:36] * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        return (x,)

    handle = projection.register_forward_pre_hook(hook)
    expected = run_plain(model, inputs).logits
    handle.remove()
    with mhacli.removed(model, heads=[(kind, 1, 2)], replace="mean"):
        found = run_plain(model, inputs).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_context_that_raises_leaves_the_model_as_it_was() -> None:
    model, ids = model_of("gpt2"), ids_of(1, N)
    plain = logits(model, ids)
    with pytest.raises(ZeroDivisionError), mhacli.removed(model, heads=[(0, 0)]):
        raise ZeroDivisionError
    assert torch.equal(logits(model, ids), plain)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class Written(nn.Module):
    """Attention over scaled_dot_product_attention, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = WrittenAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


class WrittenAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (9, 4)).transpose(1, 2).split(3, dim=1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_module_of_ones_own_loses_a_head() -> None:
    model, x = Written(), torch.randn(2, 5, 12)
    edited = copy.deepcopy(model)
    edited.attn.out.weight.data[:, 4:8] = 0
    with mhacli.removed(model, heads=[(0, 1)]):
        found = model(x)
    torch.testing.assert_close(found, edited(x))


def test_another_model_of_the_same_class_is_left_alone() -> None:
    model, other, ids = model_of("llama"), model_of("llama"), ids_of(1, N)
    plain = logits(other, ids)
    with mhacli.removed(model, heads=[(1, 2)]):
        logits(model, ids)
        assert torch.equal(logits(other, ids), plain)


# ------------------------------------------------------------------------------------------------------- what is refused


def test_a_call_in_another_thread_is_refused() -> None:
    model, ids, faults = model_of("gpt2"), ids_of(1, N), list[Exception]()

    def call() -> None:
        try:
            logits(model, ids)
        except mhacli.MhaError as fault:
            faults.append(fault)

    with mhacli.removed(model, heads=[(0, 0)]):
        logits(model, ids)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert [fault.code for fault in faults] == ["other-thread"]


@pytest.mark.parametrize(("what", "message"), [
    ({"heads": [(9, 0)]}, "layer 9 did not occur in the calls of GPT2LMHeadModel: not all was removed"),
    ({"edges": [(0, 1, 40, 2)]}, "query 40 and key 2 of layer 0 did not occur in the calls of GPT2LMHeadModel"),
    ({"heads": [(0, 7)]}, "layer 0: head 7 is out of range"),
    ({"heads": [(0,)]}, "heads: (0,) is not (layer, head)"),
    ({"heads": [5]}, "heads: 5 is not (layer, head)"),
    ({"edges": [(0, 1, 2)]}, "edges: (0, 1, 2) is not (layer, head, query, key)"),
    ({}, "mhacli.removed is given nothing to remove"),
    ({"heads": [(0, 1)], "replace": "noise"}, "replace 'noise' is not known"),
    ({"edges": [(0, 1, 2, 1)], "replace": "mean"}, "replace applies to heads only: an edge is masked"),
    ({"heads": [(0, 1)], "replace": "resample"}, "replace='resample' and other go together"),
    ({"heads": [(0, 1)], "replace": "resample", "other": ids_of(1, N - 1)},
     "transformer.h.0.attn runs 1 × 11 positions, and other has 1 × 10"),
    ({"heads": [(0, 1)], "replace": "resample", "other": ids_of(2, N)},
     "transformer.h.0.attn runs 1 × 11 positions, and other has 2 × 11"),
])  # fmt: skip
def test_what_cannot_be_removed_is_an_error(what: Any, message: str) -> None:
    model = model_of("gpt2")
    with pytest.raises(mhacli.MhaError) as fault, mhacli.removed(model, **what):
        logits(model, ids_of(1, N))
    assert str(fault.value).startswith(message)


def test_a_mean_over_positions_that_a_call_does_not_have_is_refused() -> None:
    model = model_of("llama")
    with (
        pytest.raises(mhacli.MhaError, match="behind 11 tokens in a cache"),
        mhacli.removed(model, heads=[(1, 2)], replace="mean"),
    ):
        model.generate(ids_of(1, N), max_new_tokens=3, pad_token_id=0, eos_token_id=None)


def test_a_mean_over_what_may_be_padding_is_refused() -> None:
    model = tiny("vit")
    with pytest.raises(mhacli.MhaError, match="reads no ids"), mhacli.removed(model, heads=[(1, 2)], replace="mean"):
        model(**keywords_of("vit"))


def test_a_mean_over_vectors_is_that_over_their_ids() -> None:
    model, ids = model_of("llama"), ids_of(2, N)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with mhacli.removed(model, heads=[(1, 2)], replace="mean"), torch.no_grad():
        of_ids = model(ids, attention_mask=mask).logits
        of_vectors = model(inputs_embeds=model.model.embed_tokens(ids), attention_mask=mask).logits
    assert torch.equal(of_vectors, of_ids)


def test_a_model_that_is_not_called_is_an_error() -> None:
    with pytest.raises(mhacli.MhaError, match="was not called within"), mhacli.removed(model_of("gpt2"), [(0, 0)]):
        pass


def test_the_pass_over_another_input_does_not_count_as_a_call() -> None:
    model, ids = model_of("gpt2"), ids_of(1, N)
    outer = mhacli.removed(model, [(0, 0)])
    outer.__enter__()
    with pytest.raises(mhacli.MhaError), mhacli.removed(model, [(0, 1)], replace="resample", other=ids):
        pass
    with pytest.raises(mhacli.MhaError, match="was not called within"):
        outer.__exit__(None, None, None)


def test_models_that_share_modules_are_not_opened_together() -> None:
    model = model_of("gpt2")
    with mhacli.removed(model, heads=[(0, 0)]):
        logits(model, ids_of(1, N))
        with pytest.raises(mhacli.MhaError, match="share modules"), mhacli.removed(model.base_model, heads=[(0, 1)]):
            pass


def test_a_compiled_model_is_refused() -> None:
    model = model_of("gpt2")
    model.compile(backend="eager")
    with pytest.raises(mhacli.MhaError, match="it is compiled"), mhacli.removed(model, heads=[(0, 0)]):
        pass


def test_activations_that_are_computed_again_are_refused() -> None:
    model = model_of("llama").requires_grad_(True).train()
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    with mhacli.removed(model, heads=[(1, 0)]):
        loss = model(ids_of(1, N), use_cache=False).logits.sum()
        with pytest.raises(mhacli.MhaError, match="activation checkpointing"):
            loss.backward()
