"""`mhacli.removed`: within it calls of a model run without heads and edges, as copies of the
weights and masks by hand do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import checkpoints, some
from support.checkpoints import N_HEADS
from support.removal import PROJECTIONS, Removal, edited
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mhacli

N = 11
GENERATION = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def ids_of(n_texts: int, n: int = N, seed: int = 1) -> Tensor:
    return torch.randint(5, 99, (n_texts, n), generator=torch.Generator().manual_seed(seed))


def model_of(family: str) -> Any:
    return checkpoints.model(family, **({} if family == "gpt_oss" else {"dtype": "float64"}))


def fresh(family: str) -> Any:
    """A model of the test alone, which can be trained."""
    kind = checkpoints.FAMILIES[family]
    model = checkpoints.from_config(kind.kind, kind.config, automatic=kind.automatic)
    return model.double().requires_grad_(True)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **more).logits


@torch.no_grad()
def by_hand(family: str, model: Any, ids: Tensor, *removals: Removal) -> Tensor:
    """The logits without these parts."""
    with edited(family, model, removals, {}):
        return logits(model, ids)


def zeroed(family: str, model: Any, *heads: tuple[int, int]) -> Any:
    """A copy whose output projections ignore heads."""
    twin = copy.deepcopy(model)
    for layer, head in heads:
        projection = twin.get_submodule(PROJECTIONS[family, "self"].format(layer))
        weight = (
            projection.weight.data
            if type(projection).__name__ == "Conv1D"
            else projection.weight.data.T
        )
        width = weight.shape[0] // N_HEADS
        weight[head * width : (head + 1) * width] = 0
    return twin


def edge(layer: int, heads: int | Sequence[int], query: int, key: int) -> Removal:
    return Removal("self", layer, [heads] if isinstance(heads, int) else heads, [query], [key])


# ---------------------------------------------------------------------------------- what is removed


@pytest.mark.parametrize(
    "family",
    some(
        ("gpt2", "llama", "mistral", "gpt_oss", "bert", "gemma2", "bloom"),
        default=("gpt2", "gpt_oss", "bert"),
    ),
)
def test_heads_are_gone_from_every_text_of_a_batch(family: str) -> None:
    model, ids = model_of(family), ids_of(2)
    plain = logits(model, ids)
    with mhacli.removed(model, heads=[(1, 2), (2, 0)]):
        without = logits(model, ids)
    expected = logits(zeroed(family, model, (1, 2), (2, 0)), ids)
    torch.testing.assert_close(
        without, expected, rtol=0, atol=2e-5 if family == "gpt_oss" else 1e-9
    )
    assert (without - plain).abs().max() > 1e-3
    assert torch.equal(logits(model, ids), plain), "as it was"


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gpt_oss", "bert"])
def test_edges_are_gone_as_a_mask_of_their_layer_removes_them(family: str) -> None:
    model, ids = model_of(family), ids_of(2)
    edges = [(1, 1, 8, 5), (1, 1, 8, 7), (1, 3, 6, 4), (2, None, 9, 8)]
    with mhacli.removed(model, edges=edges):
        without = logits(model, ids)
    first = Removal("self", 1, [1], [8], [5, 7])
    with edited(family, model, [edge(2, range(N_HEADS), 9, 8)], {}):
        mask_of_two_heads = _two(family, model, ids, first, edge(1, 3, 6, 4))
    torch.testing.assert_close(
        without, mask_of_two_heads, rtol=0, atol=2e-5 if family == "gpt_oss" else 1e-9
    )


def _two(family: str, model: Any, ids: Tensor, first: Removal, other: Removal) -> Tensor:
    """The logits where two masks of one layer are taken together: what either forbids is
    forbidden.
    """
    masks: list[Tensor] = []
    name = (
        PROJECTIONS[family, "self"]
        .format(first.layer)
        .rpartition(".")[0]
        .replace(".output", ".self")
    )

    def add(_: Any, args: Any, kwargs: Any) -> Any:
        masks.append(kwargs["attention_mask"])
        return args, {**kwargs, "attention_mask": sum(masks)}

    module = model.get_submodule(name)
    with edited(family, model, [first], {}):
        seen = module.register_forward_pre_hook(
            lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        logits(model, ids)
        seen.remove()
    with edited(family, model, [other], {}):
        joined = module.register_forward_pre_hook(add, with_kwargs=True)
        result = logits(model, ids)
        joined.remove()
    return result


def test_nested_contexts_add_up() -> None:
    model, ids = model_of("llama"), ids_of(1)
    everywhere = edge(1, range(N_HEADS), 8, 2)
    with mhacli.removed(model, edges=[(1, None, 8, 2)]):
        outer = logits(model, ids)
        with mhacli.removed(model, edges=[(2, 0, 8, 4)]), mhacli.removed(model, heads=[(2, 1)]):
            inner = logits(model, ids)
        again = logits(model, ids)
    torch.testing.assert_close(outer, by_hand("llama", model, ids, everywhere), rtol=0, atol=1e-9)
    expected = by_hand("llama", zeroed("llama", model, (2, 1)), ids, everywhere, edge(2, 0, 8, 4))
    torch.testing.assert_close(inner, expected, rtol=0, atol=1e-9)
    assert torch.equal(again, outer)


def test_contexts_may_end_in_the_order_in_which_they_began() -> None:
    model, ids = model_of("llama"), ids_of(1)
    plain = logits(model, ids)
    first, second = mhacli.removed(model, heads=[(1, 2)]), mhacli.removed(model, heads=[(2, 1)])
    first.__enter__()
    second.__enter__()
    logits(model, ids)
    first.__exit__(None, None, None)
    left = logits(model, ids)
    second.__exit__(None, None, None)
    torch.testing.assert_close(left, logits(zeroed("llama", model, (2, 1)), ids), rtol=0, atol=1e-9)
    assert torch.equal(logits(model, ids), plain)


def test_an_edge_of_a_head_that_is_gone_does_not_bring_it_back() -> None:
    model, ids = model_of("gpt2"), ids_of(1)
    with mhacli.removed(model, heads=[(0, 3)], edges=[(0, 3, 8, 2)]):
        without = logits(model, ids)
    torch.testing.assert_close(
        without, logits(zeroed("gpt2", model, (0, 3)), ids), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(
    "family", ["llama", "mistral", pytest.param("gemma2", marks=pytest.mark.real)]
)
def test_generation_with_a_cache_runs_without_the_head_and_the_edge(family: str) -> None:
    model, ids = model_of(family), ids_of(1)
    with mhacli.removed(model, heads=[(1, 2)], edges=[(2, 1, N + 1, N)]):
        steps = model.generate(ids, **GENERATION, output_logits=True, return_dict_in_generate=True)
        whole = logits(model, steps.sequences)
    by_steps = torch.stack(steps.logits, dim=1).double()
    torch.testing.assert_close(by_steps, whole[:, N - 1 : -1].double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_are_those_of_the_model_without_the_head(family: str) -> None:
    model, ids = fresh(family), ids_of(1)
    twin = zeroed(family, model, (1, 2))
    with mhacli.removed(model, heads=[(1, 2)]):
        model(ids, use_cache=False).logits[0, -1, 5].backward()
    twin(ids, use_cache=False).logits[0, -1, 5].backward()
    of_the_head = PROJECTIONS[family, "self"].format(1) + ".weight"
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if name != of_the_head:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-6, msg=name)


def test_gradients_flow_through_what_is_left_of_a_row() -> None:
    model, ids = fresh("llama"), ids_of(1)
    twin = copy.deepcopy(model)
    with mhacli.removed(model, edges=[(1, 2, N - 1, 3)]):
        model(ids, use_cache=False).logits[0, -1, 5].backward()
    with edited("llama", twin, [edge(1, 2, N - 1, 3)], {}):
        twin(ids, use_cache=False).logits[0, -1, 5].backward()
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-6, msg=name)


# -------------------------------------------------------------------------------- padding and means

LEFT = torch.tensor([[0] * 4 + [1] * (N - 4), [1] * N])
"""Of two texts the first is shorter, and stands behind padding."""


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_behind_padding_removals_are_those_of_the_text_alone(family: str) -> None:
    model, ids = model_of(family), ids_of(2) * LEFT
    padded = {"attention_mask": LEFT, "position_ids": (LEFT.cumsum(dim=1) - 1).clamp(min=0)}
    alone = ids[:1, 4:]
    for where, shifted in (
        ({"heads": [(1, 2)]},) * 2,
        ({"heads": [(1, 2)], "replace": "mean"},) * 2,
        ({"edges": [(1, 2, N - 1, N - 3)]}, {"edges": [(1, 2, N - 5, N - 7)]}),
    ):
        with mhacli.removed(model, **where):
            both = logits(model, ids, **padded)
        with mhacli.removed(model, **shifted):
            single = logits(model, alone)
        torch.testing.assert_close(both[:1, 4:], single, rtol=0, atol=1e-6)
        assert not torch.allclose(single, logits(model, alone), atol=1e-4)


@contextmanager
def columns_replaced(
    projection: Any, columns: slice, edit: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """The model with other numbers in columns of what a projection reads."""

    def hook(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = args[0].clone()
        x[..., columns] = edit(x[..., columns])
        return (x,)

    handle = projection.register_forward_pre_hook(hook)
    yield
    handle.remove()


def test_a_mean_is_that_of_each_text_without_its_padding() -> None:
    model, ids, real = model_of("llama"), ids_of(2) * LEFT, LEFT[..., None].double()
    projection = model.get_submodule(PROJECTIONS["llama", "self"].format(1))
    with columns_replaced(
        projection,
        slice(16, 24),
        lambda x: (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True),
    ):
        expected = logits(model, ids, attention_mask=LEFT)
    with mhacli.removed(model, heads=[(1, 2)], replace="mean"):
        without = logits(model, ids, attention_mask=LEFT)
    torch.testing.assert_close(without, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["encoder", "cross"])
def test_heads_of_a_pair_give_their_mean_over_the_text_of_their_queries(kind: str) -> None:
    model, real = model_of("t5"), LEFT.flip(1)
    inputs = {"attention_mask": real, "decoder_input_ids": ids_of(2, 5, seed=3)}
    weight = (real if kind == "encoder" else torch.ones(2, 5))[..., None].double()
    projection = model.get_submodule(PROJECTIONS["t5", kind].format(1))
    with columns_replaced(
        projection,
        slice(16, 24),
        lambda x: (x * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True),
    ):
        expected = logits(model, ids_of(2) * real, **inputs)
    with mhacli.removed(model, heads=[(kind, 1, 2)], replace="mean"):
        without = logits(model, ids_of(2) * real, **inputs)
    torch.testing.assert_close(without, expected, rtol=0, atol=1e-9)


def test_the_inner_of_two_contexts_decides_what_a_head_gives() -> None:
    model, ids = model_of("llama"), ids_of(1)
    projection = model.get_submodule(PROJECTIONS["llama", "self"].format(1))
    with columns_replaced(projection, slice(16, 24), lambda x: x.mean(1, keepdim=True)):
        mean = logits(model, ids)
    with mhacli.removed(model, heads=[(1, 2)]):
        outer = logits(model, ids)
        with mhacli.removed(model, heads=[(1, 2)], replace="mean"):
            torch.testing.assert_close(logits(model, ids), mean, rtol=0, atol=1e-9)
        assert torch.equal(logits(model, ids), outer)


def test_a_mean_over_vectors_is_that_over_their_ids() -> None:
    model, ids, mask = model_of("llama"), ids_of(2), LEFT.flip(1)
    with mhacli.removed(model, heads=[(1, 2)], replace="mean"), torch.no_grad():
        of_ids = model(ids, attention_mask=mask).logits
        of_vectors = model(inputs_embeds=model.model.embed_tokens(ids), attention_mask=mask).logits
    assert torch.equal(of_vectors, of_ids)


# ------------------------------------------------------------------------- other modules, restoring


class Written(nn.Module):
    """Attention over scaled_dot_product_attention, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (9, 4)).transpose(1, 2).split(3, dim=1)
        return self.out(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class OfTorch(nn.Module):
    """torch's own multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.out = self.attention.out_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("make", [Written, OfTorch])
def test_a_module_without_transformers_loses_a_head(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(make()), torch.randn(2, 5, 12)
    twin = copy.deepcopy(model)
    twin[0].out.weight.data[:, 4:8] = 0
    with mhacli.removed(model, heads=[(0, 1)]):
        without = model(x)
    torch.testing.assert_close(without, twin(x))
    assert not torch.allclose(model(x), without)


def test_another_model_of_the_same_class_is_left_alone() -> None:
    model, other, ids = model_of("gpt2"), copy.deepcopy(model_of("gpt2")), ids_of(1)
    plain = logits(other, ids)
    with mhacli.removed(model, heads=[(1, 2)]):
        logits(model, ids)
        assert torch.equal(logits(other, ids), plain)


def test_a_context_that_raises_leaves_the_model_as_it_was() -> None:
    model, ids = model_of("gpt2"), ids_of(1)
    plain = logits(model, ids)
    with pytest.raises(ZeroDivisionError), mhacli.removed(model, heads=[(0, 0)]):
        raise ZeroDivisionError
    assert torch.equal(logits(model, ids), plain)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("what", "mentions"),
    [
        ({"heads": [(9, 0)]}, "layer 9"),
        ({"edges": [(0, 1, 40, 2)]}, "40"),
        ({"heads": [(0, 7)]}, "head 7"),
        ({"heads": [(0,)]}, "(0,)"),
        ({"heads": [5]}, "5"),
        ({"edges": [(0, 1, 2)]}, "(0, 1, 2)"),
        ({}, "removed"),
        ({"heads": [(0, 1)], "replace": "noise"}, "noise"),
        ({"edges": [(0, 1, 2, 1)], "replace": "mean"}, "replace"),
    ],
    ids=str,
)
def test_what_cannot_be_removed_is_an_error(what: Any, mentions: str) -> None:
    model = model_of("gpt2")
    with pytest.raises(mhacli.MhaError) as fault, mhacli.removed(model, **what):
        logits(model, ids_of(1))
    assert mentions in str(fault.value)


def test_a_call_in_another_thread_can_be_refused() -> None:
    model, ids = model_of("gpt2"), ids_of(1)
    with mhacli.removed(model, heads=[(0, 0)], threads=False), ThreadPoolExecutor(1) as pool:
        logits(model, ids)
        fault = pool.submit(logits, model, ids).exception()
    assert isinstance(fault, mhacli.MhaError)
    assert fault.code == "other-thread"


def test_a_mean_over_positions_that_a_call_does_not_have_is_refused() -> None:
    model = model_of("llama")
    with (
        pytest.raises(mhacli.MhaError, match="cache"),
        mhacli.removed(model, heads=[(1, 2)], replace="mean"),
    ):
        model.generate(ids_of(1), **GENERATION)


def test_a_mean_over_what_may_be_padding_is_refused() -> None:
    model = checkpoints.model("vit")
    with (
        pytest.raises(mhacli.MhaError, match="ids"),
        mhacli.removed(model, heads=[(1, 2)], replace="mean"),
    ):
        model(pixel_values=torch.randn(1, 3, 32, 32))


def test_a_model_that_is_not_called_is_an_error() -> None:
    with pytest.raises(mhacli.MhaError, match="called"), mhacli.removed(model_of("gpt2"), [(0, 0)]):
        pass


def test_models_that_share_modules_are_not_opened_together() -> None:
    model = model_of("gpt2")
    with mhacli.removed(model, heads=[(0, 0)]):
        logits(model, ids_of(1))
        with (
            pytest.raises(mhacli.MhaError, match="share"),
            mhacli.removed(model.base_model, heads=[(0, 1)]),
        ):
            pass


def test_a_compiled_model_is_refused() -> None:
    model = fresh("gpt2")
    model.compile(backend="eager")
    with pytest.raises(mhacli.MhaError, match="compiled"), mhacli.removed(model, heads=[(0, 0)]):
        pass


def test_activations_that_are_computed_again_are_refused() -> None:
    model = fresh("llama").train()
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    with mhacli.removed(model, heads=[(1, 0)]):
        loss = model(ids_of(1), use_cache=False).logits.sum()
        with pytest.raises(mhacli.MhaError, match="checkpointing"):
            loss.backward()
