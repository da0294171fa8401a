"""`inspecting`: the caller's own calls, unchanged to the bit, and the record that the command line makes of them."""

from __future__ import annotations

import contextlib
import fractions
import gc
import hashlib
import io
import threading
import weakref
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from support.checkpoints_saved import TEXT, Checkpoints, reference, request_of, tokenizer_of
from support.model_families import (
    FAMILIES,
    K_LEN,
    PAIRS,
    Q_LEN,
    VOCABULARY,
    ids_of,
    keywords_of,
    made,
    tensors_in,
    tiny,
)
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from transformers import AttentionInterface, AttentionMaskInterface

import mhacli
from mhacli.compute.checkpoint.prepare import prepare_checkpoint
from mhacli.errors import MhaError, UsageError
from mhacli.results.record.record import InspectedLayer, Record

KEEP = ("pattern", "z", "scores", "qk")


class Attention(nn.Module):
    """Attention by torch's own function, as people write it."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(z.transpose(1, 2).flatten(2))


class Written(nn.Module):
    """A model of two layers that nobody but its author knows."""

    def __init__(self, dropout: float = 0.0, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.layers = nn.ModuleList([Attention(24, 3, dropout) for _ in range(2)])
        self.is_checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            again = (
                torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
            )
            x = x + again
        return x


def written(dropout: float = 0.0, **choices: Any) -> Written:
    torch.manual_seed(5)
    return Written(dropout, **choices)


def digest(tensors: list[Tensor]) -> str:
    """A hash of all bits."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


# ------------------------------------------------------------------------------------------------- the command's record


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def commanded(folder: str, **choices: Any) -> tuple[Record, Mapping[str, Tensor]]:
    """The record of the command line, and the keywords that it gave the model."""
    run, _ = prepare_checkpoint(request_of(folder, TEXT, keep=KEEP, **choices))
    run.run()
    return run.record(), run.inputs.keywords


def foreseen_alike(layer: InspectedLayer) -> InspectedLayer:
    """The layer without the memory that the command foresees, for it knows the text before."""
    return replace(layer, survey=replace(layer.survey, peak_bytes=0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_the_record_is_that_of_the_command_line_bit_for_bit(checkpoints: Checkpoints, name: str) -> None:
    folder = checkpoints.of(name)
    expected, keywords = commanded(folder)
    model = reference(folder, "AutoModel")
    with mhacli.inspecting(model, tokenizer_of(name), keep=KEEP) as seen, torch.no_grad():
        model(**keywords)
    found = seen.record
    assert found.arrays.keys() == expected.arrays.keys()
    for own, array in expected.arrays.items():
        assert np.array_equal(found.arrays[own], array, equal_nan=True), own
        assert found.arrays[own].dtype == array.dtype
    assert found.heads == expected.heads
    assert [foreseen_alike(layer) for layer in found.layers] == [foreseen_alike(layer) for layer in expected.layers]
    assert found.sequences == expected.sequences
    assert found.context == expected.context
    assert seen.notes == ()


def test_a_record_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = written()
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model(ids_of(2, Q_LEN))
    seen.record.save(str(tmp_path / "x.safetensors"))
    again = mhacli.load(str(tmp_path / "x.safetensors"))
    assert again.layers == seen.record.layers
    assert again.pattern(layer=1, head=2).values.shape == (Q_LEN, Q_LEN)


def test_chosen_layers_and_heads_alone_are_in_the_record() -> None:
    model = tiny("llama")
    with mhacli.inspecting(model, layers=[1], heads=[0, 3]) as seen:
        model(ids_of(1, Q_LEN))
    assert [(head.layer, head.head) for head in seen.record.heads] == [(1, 0), (1, 3)]
    assert all("pattern" not in name for name in seen.record.arrays)


# ---------------------------------------------------------------------------------------------------- nothing is changed


def of_family(name: str) -> Callable[[], tuple[nn.Module, Mapping[str, Any]]]:
    def make() -> tuple[nn.Module, Mapping[str, Any]]:
        family = FAMILIES[name]
        return made(family.kind, family.choices).requires_grad_(True), keywords_of(name)

    return make


def trained(name: str, choices: Mapping[str, Any]) -> Callable[[], tuple[nn.Module, Mapping[str, Any]]]:
    def make() -> tuple[nn.Module, Mapping[str, Any]]:
        family = FAMILIES[name]
        model = made(family.kind, {**family.choices, **choices}).requires_grad_(True)
        return model.train(), keywords_of(name)

    return make


def checkpointing(name: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """A model of transformers whose backward pass computes its layers anew."""
    model, keywords = of_family(name)()
    model.activation_checkpointing_enable()  # type: ignore[operator]
    return model.train(), {**keywords, "use_cache": False}


MODELS: dict[str, Callable[[], tuple[nn.Module, Mapping[str, Any]]]] = {
    **{name: of_family(name) for name in ("gpt2", "llama", "bert", "t5", "vit", "bloom", "gemma2", "falcon")},
    "written": lambda: (written(), {"tokens": ids_of(2, Q_LEN)}),
    "checkpointed": lambda: (written(checkpointed=True), {"tokens": ids_of(2, Q_LEN)}),
    "llama checkpointed": lambda: checkpointing("llama"),
    "dropping": lambda: (written(0.3).train(), {"tokens": ids_of(2, Q_LEN)}),
    "gpt2 in training": trained("gpt2", {"attn_pdrop": 0.2}),
    "bloom in training": trained("bloom", {"attention_dropout": 0.2}),
}


def bits(name: str, how: Callable[[], Any], *, inspected: bool) -> tuple[str, str, str]:
    """Hashes of outputs, of gradients, and of the random numbers that follow; `how` makes what the call is made in."""
    model, keywords = MODELS[name]()
    torch.manual_seed(3)

    def run() -> tuple[str, str, str]:
        with how():
            outputs = [tensor for tensor in tensors_in(model(**keywords)) if tensor.is_floating_point()]
        of_outputs = digest(outputs)
        if outputs[0].requires_grad:
            sum(tensor.float().square().mean() for tensor in outputs).backward()  # type: ignore[union-attr]
        gradients = [own.grad for own in model.parameters() if own.grad is not None]
        return of_outputs, digest(gradients), digest([torch.get_rng_state()])

    if not inspected:
        return run()
    with mhacli.inspecting(model, keep=KEEP) as seen:
        found = run()
    assert len(seen.passes) == 1
    assert seen.record.layers
    assert seen.notes == ()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_random_numbers_are_the_same_bits(name: str) -> None:
    assert bits(name, torch.enable_grad, inspected=True) == bits(name, torch.enable_grad, inspected=False)


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "written"])
def test_so_they_are_without_gradients(name: str, how: Callable[[], Any]) -> None:
    assert bits(name, how, inspected=True) == bits(name, how, inspected=False)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "written"])
def test_so_they_are_under_autocast_and_each_layer_is_verified(name: str) -> None:
    def how() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    assert bits(name, how, inspected=True) == bits(name, how, inspected=False)
    model, keywords = MODELS[name]()
    with mhacli.inspecting(model) as seen, how():
        model(**keywords)
    assert [check.name for layer in seen.record.layers for check in layer.survey.checks if not check.ok] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_verified(dtype: torch.dtype) -> None:
    model = written().to(dtype)
    with mhacli.inspecting(model) as seen:
        model(ids_of(2, Q_LEN))
    assert seen.record.model is not None
    assert (seen.record.model.n_layers, seen.record.model.n_vocabulary) == (2, 0)
    assert seen.record.config.dtype == str(dtype).removeprefix("torch.")
    assert [check.name for layer in seen.record.layers for check in layer.survey.checks if not check.ok] == []


def test_a_softmax_in_float32_is_verified_in_a_model_in_float64() -> None:
    family = FAMILIES["gemma2"]
    model = made(family.kind, family.choices).double()
    with mhacli.inspecting(model) as seen:
        model(ids_of(2, Q_LEN))
    assert [check.name for layer in seen.record.layers for check in layer.survey.checks if not check.ok] == []


def test_dropout_is_named_and_is_no_failure() -> None:
    model = written(0.3).train()
    with mhacli.inspecting(model) as seen:
        model(ids_of(2, Q_LEN))
    assert seen.record.self_check.ok
    assert {layer.verified for layer in seen.record.layers} == {False}


def test_hooks_and_wrappers_are_gone_after_any_exit() -> None:
    model, registry = tiny("bloom"), dict(AttentionInterface._global_mapping)

    before = hooks_of(model)
    with contextlib.suppress(ZeroDivisionError), mhacli.inspecting(model):
        assert hooks_of(model) > before
        raise ZeroDivisionError
    assert hooks_of(model) == before
    assert dict(AttentionInterface._global_mapping) == registry
    assert _get_current_function_mode_stack() == []


def hooks_of(model: nn.Module) -> int:
    return sum(len(own._forward_hooks) + len(own._forward_pre_hooks) for own in model.modules())


@pytest.mark.parametrize("make", [lambda: tiny("llama"), written])
def test_contexts_may_end_in_the_order_in_which_they_began(make: Callable[[], nn.Module]) -> None:
    model, registry = deepcopy(make()), dict(AttentionInterface._global_mapping)
    first, second = mhacli.inspecting(model), mhacli.inspecting(model)
    early, late = first.__enter__(), second.__enter__()
    model(ids_of(1, 5))
    first.__exit__(None, None, None)
    model(ids_of(1, 7))
    second.__exit__(None, None, None)
    model(ids_of(1, 9))
    assert dict(AttentionInterface._global_mapping) == registry
    assert _get_current_function_mode_stack() == []
    assert hooks_of(model) == 0
    assert [[len(record.sequences[0].ids) for record in seen.passes] for seen in (early, late)] == [[5], [5, 7]]
    assert (early.notes, late.notes) == ((), ())


@pytest.mark.parametrize("make", [lambda: tiny("llama"), written])
def test_a_copy_of_the_model_is_another_model(make: Callable[[], nn.Module]) -> None:
    model, file = deepcopy(make()), io.BytesIO()
    with mhacli.inspecting(model) as seen:
        copied = deepcopy(model)
        torch.save(model, file)
        copied(ids_of(1, 7))
        model(ids_of(1, 5))
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with mhacli.inspecting(copied) as of_copy, mhacli.inspecting(loaded) as of_file:
        copied(ids_of(1, 7))
        loaded(ids_of(1, 9))
    assert [len(own.record.sequences[0].ids) for own in (seen, of_copy, of_file)] == [5, 7, 9]
    assert [len(own.passes) for own in (seen, of_copy, of_file)] == [1, 1, 1]


def test_no_tensor_of_the_model_is_held_after_its_layer() -> None:
    model, held = written(), list[weakref.ref[Tensor]]()
    alive: list[int] = []

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        gc.collect()
        alive.append(sum(own() is not None for own in held))
        held.clear()

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        held.append(weakref.ref(output))

    for layer in model.layers:
        layer.qkv.register_forward_hook(note)  # type: ignore[union-attr]
        layer.register_forward_hook(watch)
    with mhacli.inspecting(model, keep=KEEP) as seen, torch.no_grad():
        model(ids_of(2, Q_LEN))
    assert alive == [0, 0]
    assert seen.record.layers


class Masked(Attention):
    """Attention with a mask of its own, which is a tensor of bools, or of numbers that are added."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(24, 3)
        self.dtype, self.mask = dtype, list[StorageWeakRef]()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mask = torch.ones(1, 1, x.shape[1], x.shape[1]).tril()
        mask = mask.bool() if self.dtype is torch.bool else mask.log().to(self.dtype)
        self.mask.append(StorageWeakRef(mask.untyped_storage()))
        z = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(z.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_no_mask_of_the_model_is_held_after_its_layer(dtype: torch.dtype) -> None:
    model = nn.Sequential(Masked(dtype), Masked(dtype))
    alive = list[bool]()
    for layer in model:
        layer.register_forward_hook(lambda layer, *_: alive.append(not layer.mask[0].expired()))
    with mhacli.inspecting(model, keep=KEEP) as seen, torch.no_grad():
        model(torch.randn(2, Q_LEN, 24))
    assert alive == [False, False]
    assert [layer.mask for layer in seen.record.layers] == ["causal", "causal"]


def test_what_was_seen_does_not_keep_the_model() -> None:
    model = written()
    held = weakref.ref(model)
    with mhacli.inspecting(model) as seen:
        model(ids_of(1, 5))
    del model
    gc.collect()
    assert held() is None
    assert repr(seen) == "<Seen: 1 pass of Written>"


# --------------------------------------------------------------------------------------------------------- several calls


def test_each_call_is_a_pass_and_the_record_is_that_of_the_last() -> None:
    model = written()
    with mhacli.inspecting(model) as seen:
        for n in (5, 7):
            model(ids_of(1, n))
    assert [len(record.sequences[0].ids) for record in seen.passes] == [5, 7]
    assert seen.record is seen.passes[-1]


def test_nested_contexts_of_one_model_see_the_same() -> None:
    model = tiny("gpt2")
    with mhacli.inspecting(model, keep=KEEP) as outer, mhacli.inspecting(model, keep=KEEP) as inner:
        model(ids_of(2, Q_LEN))
    assert outer.record.heads == inner.record.heads
    assert outer.record.layers == inner.record.layers
    for name, array in outer.record.arrays.items():
        assert np.array_equal(array, inner.record.arrays[name], equal_nan=True)


def test_nested_contexts_of_two_models_each_see_their_own() -> None:
    gpt2, own = tiny("gpt2"), written()
    with mhacli.inspecting(gpt2) as outer, mhacli.inspecting(own) as inner:
        gpt2(ids_of(2, Q_LEN))
        own(ids_of(1, K_LEN))
    assert [record.model.architecture for record in outer.passes if record.model] == ["GPT2Model"]
    assert [record.model.architecture for record in inner.passes if record.model] == ["Written"]


def test_a_pass_that_raises_is_in_no_record_and_the_next_one_is() -> None:
    model = tiny("gpt2")
    with mhacli.inspecting(model) as seen:
        handle = model.h[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids_of(2, Q_LEN))
        handle.remove()
        model(ids_of(2, K_LEN))
    assert [len(record.layers) for record in seen.passes] == [3]
    assert seen.notes == ("a pass that raised is in no record",)
    assert repr(seen) == "<Seen: 1 pass of GPT2Model; a pass that raised is in no record>"


def test_so_is_one_that_was_interrupted() -> None:
    """Of which torch tells no hook."""
    model, fault = deepcopy(tiny("gpt2")), KeyboardInterrupt()

    def interrupt(*_: Any) -> None:
        raise fault

    handle = model.h[1].register_forward_pre_hook(interrupt)
    with mhacli.inspecting(model) as seen:
        with pytest.raises(KeyboardInterrupt):
            model(ids_of(2, Q_LEN))
        handle.remove()
        model(ids_of(2, K_LEN))
    assert [[layer.layer for layer in record.layers] for record in seen.passes] == [[0, 1, 2]]
    assert seen.notes == ("a pass that raised is in no record",)
    model.h[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), mhacli.inspecting(model) as seen:
        model(ids_of(2, Q_LEN))
    assert seen.passes == ()
    assert seen.notes == ("a pass that raised is in no record",)


def test_a_model_may_return_nothing() -> None:
    class Storing(Written):
        def forward(self, tokens: Tensor) -> None:  # type: ignore[override]
            self.made = super().forward(tokens)

    model = Storing()
    with mhacli.inspecting(model) as seen:
        model(ids_of(1, 5))
    assert (len(seen.passes), seen.notes) == (1, ())


def test_a_batch_without_a_sequence_is_no_fault_and_has_no_record() -> None:
    model = written()
    with mhacli.inspecting(model) as seen:
        assert model(ids_of(2, 5)[:0]).shape == (0, 5, 24)
        model(ids_of(2, 5))
    assert len(seen.passes) == 1
    assert seen.notes == ("a pass is in no record: layer 0 (self) has attention without a token",)


def test_a_call_from_another_thread_is_refused() -> None:
    model, faults = written(), list[BaseException]()

    def call() -> None:
        try:
            model(ids_of(1, 5))
        except MhaError as fault:
            faults.append(fault)

    with mhacli.inspecting(model) as seen:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        model(ids_of(1, 7))
    assert [str(fault) for fault in faults] == [
        "Written is called in a different thread from the one that opened mhacli.inspecting"
    ]
    assert len(seen.passes) == 1


class Laid(nn.Module):
    """A model whose name says nothing, and whose attention lays out its axes as it likes."""

    def __init__(self, attend: Callable[..., Tensor], n_heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.attend, self.n_heads = attend, n_heads

    def by_head(self, x: Tensor) -> list[Tensor]:
        return [part(x).unflatten(-1, (self.n_heads, -1)).transpose(-3, -2) for part in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.by_head(x)).transpose(-3, -2).flatten(-2)


def sdpa(*tensors: Tensor, **choices: Any) -> Tensor:
    return nn.functional.scaled_dot_product_attention(*tensors, **choices)


LAYOUTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "batch and heads": (sdpa, (2, 5)),
    "in one axis": (lambda *qkv: sdpa(*(t.flatten(0, 1) for t in qkv)).unflatten(0, (2, -1)), (2, 5)),
    "no batch": (sdpa, (5,)),
    "no batch, as many tokens as heads": (sdpa, (3,)),
    "windows": (sdpa, (2, 4, 5)),
    "windows of one": (sdpa, (1, 4, 5)),
    "a batch of one": (lambda *qkv: sdpa(*(t[None] for t in qkv))[0], (5,)),
}
"""How attention lays out its axes, and the sizes of its input before the width."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_of_torch_is_seen_in_any_module_and_layout(layout: str) -> None:
    attend, sizes = LAYOUTS[layout]
    model = Laid(attend)
    x = torch.randn(*sizes, 12)
    q, k, _ = model.by_head(x)
    expected = (q @ k.mT / 2).softmax(dim=-1).flatten(0, -4) if x.ndim > 2 else (q @ k.mT / 2).softmax(dim=-1)[None]
    plain = model(x)
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        assert digest([model(x)]) == digest([plain])
    found = seen.record.arrays["layers.0.pattern"]
    assert found.shape == expected.shape
    assert np.abs(found - expected.detach().numpy()).max() < 1e-6
    assert seen.record.layers[0].verified


def test_attention_written_out_without_a_batch_is_seen() -> None:
    class Attention(Laid):
        pass

    model, x = Attention(lambda q, k, v: (q @ k.mT).softmax(dim=-1) @ v), torch.randn(3, 12)
    q, k, _ = model.by_head(x)
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model(x)
    expected = (q @ k.mT).softmax(dim=-1)[None].detach().numpy()
    assert np.abs(seen.record.arrays["layers.0.pattern"] - expected).max() < 1e-6
    assert seen.record.layers[0].verified


@pytest.mark.parametrize("values_first", [True, False])
def test_attention_written_as_einsum_is_verified(values_first: bool) -> None:
    class Attention(Laid):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part(x).unflatten(-1, (self.n_heads, -1)) for part in (self.q, self.k, self.v))
            pattern = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(dim=-1)
            if values_first:
                return torch.einsum("bkhd, bhqk -> bqhd", v, pattern).flatten(-2)
            return torch.einsum("bhqk,bkhd->bqhd", pattern, v).flatten(-2)

    model, x = Attention(sdpa), torch.randn(2, 5, 12)
    q, k, v = model.by_head(x)
    with mhacli.inspecting(model, keep=["pattern", "z"]) as seen:
        made = model(x)
    expected = (q @ k.mT).softmax(dim=-1)
    (layer,) = seen.record.layers
    assert (layer.verified, layer.captured_by) == (True, "softmax")
    assert np.abs(seen.record.arrays["layers.0.pattern"] - expected.detach().numpy()).max() < 1e-6
    assert np.abs(seen.record.arrays["layers.0.z"] - (expected @ v).detach().numpy()).max() < 1e-6
    with mhacli.removed(model, heads=[(0, 1)]):
        without = model(x).unflatten(-1, (3, -1))
    assert (without[:, :, 1] == 0).all()
    assert torch.equal(without[:, :, [0, 2]], made.unflatten(-1, (3, -1))[:, :, [0, 2]])


def test_modules_with_other_names_beside_attention_are_layers_too() -> None:
    model = nn.Sequential()
    model.add_module("attn", Laid(sdpa))
    model.add_module("mixer", Laid(sdpa))
    model.add_module("other", Laid(sdpa))
    with mhacli.inspecting(model) as seen:
        model(torch.randn(2, 5, 12))
    assert [(layer.layer, layer.name) for layer in seen.record.layers] == [(0, "attn"), (1, "mixer"), (2, "other")]


class Encoder(nn.Module):
    """torch's own attention."""

    def __init__(self, *, weights: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.attn, self.weights = nn.MultiheadAttention(12, 3, batch_first=True), weights

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.embed(tokens)
        made: tuple[Tensor, Tensor | None] = self.attn(x, x, x, need_weights=self.weights, average_attn_weights=False)
        return made


@pytest.mark.parametrize("weights", [True, False])
def test_the_attention_of_torch_is_seen_and_is_what_it_returns_itself(weights: bool) -> None:
    torch.manual_seed(5)
    model, ids = Encoder(weights=True), ids_of(2, 7)
    outputs, expected = model(ids)
    model.weights = weights
    plain = model(ids)[0]
    with mhacli.inspecting(model, keep=("pattern", "z")) as seen:
        again = model(ids)[0]
    assert digest([again]) == digest([plain])
    assert np.abs(seen.record.arrays["layers.0.pattern"] - expected.detach().numpy()).max() < 1e-6
    assert seen.record.layers[0].verified
    assert torch.allclose(outputs, again, atol=1e-6)


def test_a_fast_path_that_inspection_would_turn_off_is_refused() -> None:
    model = Encoder(weights=False).eval()
    with pytest.raises(MhaError, match=r"^attn \(MultiheadAttention\) cannot be inspected"), mhacli.inspecting(model):
        pass
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mhacli.inspecting(model) as seen:
            model(ids_of(2, 7))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert seen.record.layers


# ------------------------------------------------------------------------------------------------------------ the tokens


@pytest.mark.parametrize(("name", "side"), [("llama", "right"), ("llama", "left"), ("bert", "right")])
def test_padding_is_no_token_even_beyond_the_longest_text(name: str, side: str) -> None:
    model, tokenizer = reference_of(name), tokenizer_of(name, padding_side=side)
    texts = [TEXT, "the cat"]
    near = tokenizer(texts, padding=True, return_tensors="pt")
    far = tokenizer(texts, padding="max_length", max_length=31, return_tensors="pt")
    with mhacli.inspecting(model, tokenizer, keep=("pattern",)) as seen, torch.no_grad():
        for given in (near, far):
            model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
    first, second = seen.passes
    assert first.sequences == second.sequences
    assert [len(text.ids) for text in second.sequences] == near["attention_mask"].sum(dim=1).tolist()
    assert second.config.padding == side
    for layer in range(3):
        own, other = (record.arrays[f"layers.{layer}.pattern"] for record in seen.passes)
        assert own.shape == other.shape
        assert np.abs(own - other).max() < 1e-5
    assert all(layer.verified for layer in second.layers)


def reference_of(name: str) -> Any:
    from support.checkpoints_saved import KINDS, N_VOCABULARY

    return made(name, {**KINDS[name], "vocab_size": N_VOCABULARY})


def test_a_tokenizer_of_another_model_gives_way_to_the_ids_and_a_note() -> None:
    model = written()
    with mhacli.inspecting(model, tokenizer_of("gpt2")) as seen:
        model(torch.tensor([[3, 90, 5]]))
    assert seen.notes == ()
    model.embed = nn.Embedding(9999, 24)
    with mhacli.inspecting(model, tokenizer_of("gpt2")) as seen:
        model(torch.tensor([[3, 9998, 5]]))
    assert seen.record.sequences[0].tokens == ("3", "9998", "5")
    assert seen.notes == (
        "the tokenizer has no token for some ids: it is another model's, and tokens are shown as ids",
    )


def test_vectors_without_ids_have_places_for_tokens() -> None:
    model = tiny("llama")
    with mhacli.inspecting(model) as seen:
        model(inputs_embeds=torch.randn(2, 7, 48))
    assert [text.tokens[-1] for text in seen.record.sequences] == ["x6", "x6"]
    assert seen.notes == ("the model was given vectors, not ids: tokens are shown as positions",)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_token_among_vectors_either(side: str) -> None:
    model, ids = tiny("llama"), ids_of(2, 7)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 3) if side == "left" else slice(4, 7)] = 0
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(ids, attention_mask=mask)
        model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
    of_ids, of_vectors = seen.passes
    assert [head.entropy for head in of_vectors.heads] == [head.entropy for head in of_ids.heads]
    assert [text.tokens for text in of_vectors.sequences] == [tuple(f"x{i}" for i in range(n)) for n in (7, 4)]


def test_numbers_that_are_no_first_argument_are_no_ids() -> None:
    """Such as places, or a mask."""
    model = tiny("llama")
    with mhacli.inspecting(model.layers[0]) as seen, torch.no_grad():
        model(ids_of(1, 7), use_cache=False)
    assert seen.record.sequences[0].tokens[0] == "x0"


def test_arguments_may_come_in_any_order() -> None:
    model, ids = tiny("llama"), ids_of(2, 7)
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(position_ids=torch.arange(7)[None], input_ids=ids)
        model(position_ids=torch.arange(7)[None], inputs_embeds=model.get_input_embeddings()(ids))
    of_ids, of_vectors = seen.passes
    assert [list(text.ids) for text in of_ids.sequences] == ids.tolist()
    assert len(of_vectors.sequences) == 2


class Stacked(nn.Module):
    """A model of torch's layers, for texts in rows or in columns."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=batch_first)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.stack(self.embed(ids))
        return made


def test_texts_may_stand_in_columns() -> None:
    rows, columns, ids = Stacked(batch_first=True), Stacked(batch_first=False), ids_of(2, 7)
    with mhacli.inspecting(rows, keep=["pattern"]) as expected, mhacli.inspecting(columns, keep=["pattern"]) as found:
        rows(ids)
        columns(ids.T)
    assert [list(text.ids) for text in found.record.sequences] == ids.tolist()
    assert found.record.sequences == expected.record.sequences
    assert len(found.record.layers) == 2
    for name, array in expected.record.arrays.items():
        if name.endswith("pattern"):
            assert np.abs(found.record.arrays[name] - array).max() < 1e-6
    with mhacli.inspecting(columns) as found:
        columns(ids_of(2, 5)[:, :2])
    assert found.record.sequences[0].tokens == ("x0", "x1")
    assert found.notes == ("ids are 2 × 2, and either axis may be that of the tokens: tokens are shown as positions",)


class Translating(nn.Module):
    """A model of torch's own two halves."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.pair = (
            nn.Embedding(VOCABULARY, 12),
            nn.Transformer(12, 3, 2, 2, 24, dropout=0.0, batch_first=batch_first),
        )

    def forward(self, read: Tensor, written: Tensor) -> Tensor:
        made: Tensor = self.pair(self.embed(read), self.embed(written))
        return made


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_transformer_of_torch_has_two_texts(batch_first: bool) -> None:
    model, read, written = Translating(batch_first=batch_first), ids_of(2, 7), ids_of(2, 5)
    cross, given = model.pair.decoder.layers[1].multihead_attn, list[Tensor]()  # type: ignore[union-attr]
    handle = cross.register_forward_pre_hook(lambda _, args: given.extend(args))  # type: ignore[union-attr]
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model(*((read, written) if batch_first else (read.T, written.T)))
    handle.remove()
    record = seen.record
    assert record.context is not None
    assert [list(text.ids) for text in (*record.sequences, *record.context)] == [*written.tolist(), *read.tolist()]
    assert [(layer.kind, layer.layer) for layer in record.layers] == [
        ("encoder", 0), ("encoder", 1), ("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1),
    ]  # fmt: skip
    assert all(layer.verified for layer in record.layers)
    _, expected = cross(*given, need_weights=True, average_attn_weights=False)  # type: ignore[operator]
    assert np.abs(record.arrays["layers.5.pattern"] - expected.detach().numpy()).max() < 1e-6


# -------------------------------------------------------------------------------------------------------------- bad input


class Unnamed(nn.Module):
    """Attention that its class does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.mix(x).mT).softmax(dim=-1) @ x


class Hidden(nn.Module):
    """Attention without a softmax of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.attn(x).mT).exp()
        return scores / scores.sum(dim=-1, keepdim=True) @ x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Unnamed, "no attention was seen in Unnamed, which is made of Unnamed, Linear"),
        (Hidden, "no attention was seen in Hidden, though it has Linear"),
    ],
)
def test_a_model_without_attention_names_its_classes_and_what_would_be_seen(
    make: Callable[[], nn.Module], message: str
) -> None:
    model = make()
    with mhacli.inspecting(model) as seen:
        model(torch.randn(2, 5, 8))
    assert seen.passes == ()
    with pytest.raises(MhaError) as caught:
        _ = seen.record
    assert caught.value.message == message
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]


def test_an_attention_that_is_not_seen_beside_others_is_named() -> None:
    class LinearAttention(Hidden):
        pass

    model = nn.Sequential()
    model.add_module("attn", Laid(sdpa))
    model.add_module("attn_norm", nn.LayerNorm(12))
    model.add_module("mixer", LinearAttention())
    model.mixer.attn = nn.Linear(12, 12)
    with mhacli.inspecting(model) as seen:
        model(torch.randn(2, 5, 12))
    assert [layer.name for layer in seen.record.layers] == ["attn"]
    assert seen.notes == ("no attention was seen in mixer (LinearAttention), which is in no record",)


def test_a_context_without_a_call_says_so() -> None:
    with mhacli.inspecting(written()) as seen:
        pass
    with pytest.raises(MhaError, match=r"^Written was not called within mhacli\.inspecting\n"):
        _ = seen.record


def test_a_part_that_was_called_by_itself_is_named() -> None:
    model = written()
    with mhacli.inspecting(model) as seen:
        model.layers[1](torch.randn(1, 5, 24))
    with pytest.raises(MhaError, match=r"^only parts of Written were called by themselves: layers\.1\n"):
        _ = seen.record
    assert seen.notes == ("layers.1 was called by itself, outside of a call of the model, and is in no record",)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"layers": 4}, "layers 4 must be numbers, or pairs of a kind and a number, one at least"),
        ({"layers": []}, "layers [] must be numbers, or pairs of a kind and a number, one at least"),
        ({"layers": [1.0]}, "layers [1.0] must be numbers, or pairs of a kind and a number, one at least"),
        (
            {"layers": [("crss", 1)]},
            "layers [('crss', 1)] must be numbers, or pairs of a kind and a number, one at least",
        ),
        ({"keep": None}, "keep: None is no matrix of a layer"),
        ({"keep_limit": "1 GB"}, "keep_limit '1 GB' must be a number of bytes, 0 or more"),
        ({"keep_limit": -1}, "keep_limit -1 must be a number of bytes, 0 or more"),
        ({"heads": 2}, "heads 2 must be numbers from 0 on, one at least"),
        ({"heads": ["1"]}, "heads ['1'] must be numbers from 0 on, one at least"),
        ({"heads": [-1]}, "heads [-1] must be numbers from 0 on, one at least"),
    ],
)
def test_choices_that_are_no_numbers_are_refused(choices: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught, mhacli.inspecting(written(), **choices):
        pass
    assert caught.value.message == message


def test_choices_may_be_numbers_of_numpy_and_count_once() -> None:
    model = written()
    with mhacli.inspecting(model, layers=np.arange(1, 2), heads=[np.int64(2), 0, 2]) as seen:
        model(ids_of(1, 5))
    assert [(head.layer, head.head) for head in seen.record.heads] == [(1, 2), (1, 0)]


def test_layers_that_were_not_seen_are_named() -> None:
    model = written()
    with mhacli.inspecting(model, layers=[1, 7]) as seen:
        model(ids_of(1, 5))
    assert seen.notes == ("layer 7 was not seen",)
    with mhacli.inspecting(model, layers=[7]) as seen:
        model(ids_of(1, 5))
    with pytest.raises(MhaError, match=r"^none of the layers 7 was seen in Written\n") as caught:
        _ = seen.record
    assert caught.value.hint == "layers with attention: 0, 1"


def test_a_head_that_no_layer_has_is_named() -> None:
    model = written()
    with mhacli.inspecting(model, heads=[7]) as seen:
        model(ids_of(1, 5))
    with pytest.raises(MhaError, match=r"head 7 is out of range: 0 to 2$"):
        _ = seen.record


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "MiniLM", "mhacli.inspecting needs one torch.nn.Module, not a str"),
        (lambda: (written(), written()), "mhacli.inspecting needs one torch.nn.Module, not a tuple"),
        (lambda: nn.DataParallel(written()),
         "DataParallel cannot be inspected: it is run in copies, each in a thread of its own"),
        (lambda: torch.compile(written(), backend="eager"),
         "OptimizedModule cannot be inspected: it is compiled, and its attention runs within kernels"),
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
         "TopLevelTracedModule cannot be inspected: it is scripted: torch.jit runs it without Python"),
    ],
    ids=["a path", "two models", "copies", "compiled", "scripted"],
)  # fmt: skip
def test_a_model_that_hides_its_parts_is_refused(make: Callable[[], Any], message: str) -> None:
    model = make()
    with pytest.raises(MhaError) as caught, mhacli.inspecting(model):
        pass
    assert caught.value.message == message


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_module_is_inspected_while_its_wrapper_of_several_processes_is_called(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(written())
        plain = model(ids_of(1, 5))
        with pytest.raises(MhaError, match="one of several processes"), mhacli.inspecting(model):
            pass
        with mhacli.inspecting(model.module) as seen:
            assert torch.equal(model(ids_of(1, 5)), plain)
        assert len(seen.record.layers) == len(model.module.layers)
    finally:
        distributed.destroy_process_group()


def test_so_is_one_with_a_compiled_part_and_one_in_shards() -> None:
    model = written()
    model.layers[0].compile(backend="eager")
    with pytest.raises(MhaError, match=r"^layers\.0 \(Attention\) cannot be inspected"), mhacli.inspecting(model):
        pass
    sharded = type("FSDPModule", (Written,), {})()
    with pytest.raises(MhaError, match="sharded"), mhacli.inspecting(sharded):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_so_is_a_call_through_a_wrapper_that_compiles() -> None:
    model = written()
    compiled = torch.compile(model, backend="eager")
    with mhacli.inspecting(model), pytest.raises(MhaError, match=r"^Written is called through torch\.compile"):
        compiled(ids_of(1, 5))


@pytest.mark.filterwarnings("ignore")
def test_so_is_an_attention_in_a_compiled_function() -> None:
    attend = torch.compile(nn.functional.scaled_dot_product_attention, backend="eager")
    model = Laid(lambda q, k, v: attend(q, k, v))
    with mhacli.inspecting(model), pytest.raises(MhaError, match=r"^a function made by torch\.compile hides"):
        model(torch.randn(2, 5, 12))


def ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(3, 12), torch.ones(5, 12)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.to("meta")(torch.ones(2, 5, 12, device="meta")),
        lambda model: model(ragged()),
        lambda model: torch.func.vmap(model)(torch.ones(2, 5, 12)),
        lambda model: torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 5, 12)),
        lambda model: torch.func.grad(lambda own: torch.func.functional_call(model, own, torch.ones(2, 5, 12)).sum())(
            dict(model.named_parameters())
        ),
    ],
    ids=["meta", "nested", "vmap", "grad", "grad of parameters"],
)
def test_tensors_whose_numbers_cannot_be_read_are_refused(call: Callable[[nn.Module], Any]) -> None:
    model = Laid(sdpa)
    with mhacli.inspecting(model) as seen, pytest.raises(MhaError) as caught:
        call(model)
    assert caught.value.message == (
        "Laid is called with tensors whose numbers cannot be read: on the device meta, nested, or in a transform of torch.func"
    )
    assert seen.passes == ()


def test_an_implementation_that_is_compiled_is_left_alone_and_named() -> None:
    model = deepcopy(tiny("llama"))
    model.config._attn_implementation = "flex_attention"
    modes = list[int]()

    def flex(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        modes.append(_len_torch_dispatch_stack())
        return query.transpose(1, 2), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "flex_attention", flex)
        patch.setitem(AttentionMaskInterface._global_mapping, "flex_attention", lambda *_, **__: fractions.Fraction())
        with mhacli.inspecting(model) as seen, torch.no_grad():
            model(ids_of(1, 5))
    assert set(modes) == {0}
    with pytest.raises(MhaError, match="whose mask is of type Fraction") as caught:
        _ = seen.record
    assert caught.value.hint is not None
    assert "set_attn_implementation" in caught.value.hint


def test_a_matrix_that_does_not_exist_is_refused() -> None:
    with pytest.raises(MhaError, match="'weights' is no matrix"), mhacli.inspecting(written(), keep=["weights"]):
        pass


def test_what_goes_beyond_the_limit_is_left_out_and_said() -> None:
    model = written()
    with mhacli.inspecting(model, keep=["pattern"], keep_limit=4 * 2 * 3 * Q_LEN * Q_LEN) as seen:
        model(ids_of(2, Q_LEN))
    assert seen.record.not_kept == ("matrices of layers.1",)


def test_layers_whose_attention_is_not_of_the_tokens_are_listed() -> None:
    model = tiny("clip")
    with mhacli.inspecting(model) as seen:
        model(**keywords_of("clip"))
    assert seen.record.model is not None
    assert [own.layer for own in seen.record.model.without] == [3, 4, 5]


def test_pairs_have_their_two_texts() -> None:
    assert set(PAIRS) >= {"t5"}
    model = tiny("t5")
    with mhacli.inspecting(model) as seen:
        model(**keywords_of("t5"))
    assert seen.record.context is not None
    assert [len(text.ids) for text in (*seen.record.sequences, *seen.record.context)] == [Q_LEN] * 2 + [K_LEN] * 2


@pytest.mark.full
def test_a_long_text_of_few_tokens_rounds_more_than_a_short_one_and_passes() -> None:
    torch.manual_seed(0)
    model = Written()
    with torch.no_grad(), mhacli.inspecting(model) as seen:
        model(torch.randint(3, 40, (1, 16_384)))
    assert [check.name for layer in seen.record.layers for check in layer.survey.checks if not check.ok] == []
