"""`mhacli.inspecting`: nothing of the caller's passes changes, on any exit, and each call has a
record or a note.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints
from support.checkpoints import FAMILIES, N_HEADS, TEXT, VOCABULARY
from torch import Tensor, nn

import mhacli

KEEP = ("pattern", "z", "scores", "qk")
Q_LEN = 11


class Attention(nn.Module):
    """Attention by torch's own function, as people write it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (3, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(z.transpose(1, 2).flatten(2))


class Written(nn.Module):
    """A model of two layers that only its author knows. `again` computes each layer anew in the
    backward pass.
    """

    def __init__(self, dropout: float = 0.0, *, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.again = nn.Embedding(VOCABULARY, 24), again
        self.layers = nn.ModuleList([Attention(dropout) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + (
                torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                if self.again
                else layer(x)
            )
        return x


def ids(n_texts: int, n: int, seed: int = 1) -> Tensor:
    """Random ids, some more than once."""
    return torch.randint(3, 40, (n_texts, n), generator=torch.Generator().manual_seed(seed))


def family(name: str, *, train: bool = False, **config: Any) -> nn.Module:
    """A model of a family of its own, with gradients."""
    made = checkpoints.from_config(FAMILIES[name].kind, {**FAMILIES[name].config, **config})
    return made.requires_grad_(True).train(train)


def with_activation_checkpointing() -> nn.Module:
    model: Any = family("llama", train=True)
    model.activation_checkpointing_enable()
    return model


def digest(tensors: Any) -> str:
    """A hash of all bits."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def hooks(model: nn.Module) -> int:
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


# ------------------------------------------------------------------------------- nothing is changed

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: family("gpt2"),
    "bloom": lambda: family("bloom"),
    "gemma2": lambda: family("gemma2"),
    "falcon": lambda: family("falcon"),
    "bert": lambda: family("bert"),
    "written": Written,
    "written, computed anew": lambda: Written(again=True),
    "written, with dropout": lambda: Written(0.3).train(),
    "llama, computed anew": with_activation_checkpointing,
    "gpt2, with dropout": lambda: family("gpt2", train=True, attn_pdrop=0.2),
    "bloom, with dropout": lambda: family("bloom", train=True, attention_dropout=0.2),
}
AUTOCAST = "autocast"


def bits(name: str, mode: str, *, inspected: bool) -> tuple[str, str, str]:
    """Hashes of outputs, of gradients, and of the random numbers that follow."""
    model = MODELS[name]()
    mode_of = torch.autocast("cpu", torch.bfloat16) if mode == AUTOCAST else getattr(torch, mode)()
    torch.manual_seed(3)
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(mhacli.inspecting(model, keep=KEEP)) if inspected else None
        with mode_of:
            made = model(ids(2, Q_LEN))
        outputs = (
            [made]
            if isinstance(made, Tensor)
            else [each for each in made.values() if isinstance(each, Tensor)]
        )
        if outputs[0].requires_grad:
            sum(each.float().square().mean() for each in outputs).backward()
    if seen is not None:
        assert len(seen.passes) == 1
        assert seen.record.self_check.ok is not False
        assert seen.notes == ()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert bool(gradients) == (mode in ("enable_grad", AUTOCAST))
    return digest(outputs), digest(gradients), digest([torch.get_rng_state()])


AT_PUSH = (
    "gpt2",
    "bloom",
    "written",
    "written, computed anew",
    "gpt2, with dropout",
    "written, with dropout",
)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(
            pytest.param(name, "enable_grad", marks=() if name in AT_PUSH else pytest.mark.real)
            for name in MODELS
        ),
        *(
            (name, mode)
            for name in ("gpt2", "written")
            for mode in ("no_grad", "inference_mode", AUTOCAST)
        ),
        *(
            pytest.param("bloom", mode, marks=pytest.mark.real)
            for mode in ("no_grad", "inference_mode", AUTOCAST)
        ),
    ],
)
def test_outputs_gradients_and_random_numbers_have_the_same_bits(name: str, mode: str) -> None:
    assert bits(name, mode, inspected=True) == bits(name, mode, inspected=False)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["written", "gemma2"])
def test_every_dtype_is_verified(name: str, dtype: str) -> None:
    """Gemma 2 has a softmax in float32 in any dtype."""
    model = MODELS[name]().to(getattr(torch, dtype))
    with mhacli.inspecting(model) as seen:
        model(ids(2, Q_LEN))
    assert seen.record.config.dtype == dtype
    assert seen.record.self_check.ok is not False


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_the_pattern_of_scores_that_float32_rounds_away_is_that_of_float64(size: float) -> None:
    """Also where a step between two neighbouring numbers is larger than 1."""
    model = family("bert")
    with torch.no_grad():
        for layer in model.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key):
                part.weight.mul_(size**0.5)
                part.bias.mul_(size**0.5)
    rows: dict[str, Tensor] = {}
    attention = model.encoder.layer[1].attention.self
    for part in ("query", "key"):
        getattr(attention, part).register_forward_hook(
            lambda _m, _i, out, part=part: rows.update({part: out})
        )
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(ids(2, Q_LEN))
    q, k = (
        rows[part].double().unflatten(-1, (N_HEADS, -1)).transpose(1, 2)
        for part in ("query", "key")
    )
    weights = (q @ k.mT * 8**-0.5).softmax(dim=-1).numpy()
    assert np.abs(seen.record.arrays["layers.1.pattern"] - weights).max() < 1e-6
    assert seen.record.self_check.ok


@pytest.mark.parametrize(
    "name", ["written, with dropout", "gpt2, with dropout", "bloom, with dropout"]
)
def test_dropout_is_named_and_is_no_failure(name: str) -> None:
    model = MODELS[name]()
    with mhacli.inspecting(model) as seen:
        model(ids(2, Q_LEN))
    assert seen.record.self_check.ok is None
    for layer in seen.record.layers:
        assert not layer.verified
        assert any("dropout" in reason for reason in layer.unverified)


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "written"])
def test_everything_is_put_back_on_any_exit(name: str, fault: type[BaseException]) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    model = MODELS[name]().requires_grad_(False)
    registries = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = (
        hooks(model),
        *map(dict, registries),
        nn.functional.scaled_dot_product_attention,
        torch.softmax,
    )
    plain = digest([first(model(ids(2, Q_LEN)))])
    with pytest.raises(fault):
        inspect_and_raise(model, fault)
    assert (
        hooks(model),
        *map(dict, registries),
        nn.functional.scaled_dot_product_attention,
        torch.softmax,
    ) == before
    assert torch.overrides._get_current_function_mode_stack() == []
    assert digest([first(model(ids(2, Q_LEN)))]) == plain


def inspect_and_raise(model: nn.Module, fault: type[BaseException]) -> None:
    with mhacli.inspecting(model):
        assert hooks(model) > 0
        model(ids(2, Q_LEN))
        raise fault


def first(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def test_no_tensor_of_the_model_is_held_after_its_layer() -> None:
    model, held, alive = Written(), list[weakref.ref[Tensor]](), list[int]()

    def count(*_: Any) -> None:
        gc.collect()
        alive.append(sum(each() is not None for each in held))
        held.clear()

    for layer in model.layers:
        layer.qkv.register_forward_hook(lambda _m, _i, out: held.append(weakref.ref(out)))
        layer.register_forward_hook(count)
    with mhacli.inspecting(model, keep=KEEP) as seen, torch.no_grad():
        model(ids(2, Q_LEN))
    assert alive == [0, 0]
    assert seen.record.layers


# ------------------------------------------------------------------------------------- what is seen


def test_chosen_layers_and_heads_alone_are_in_the_record_and_numbers_of_numpy_will_do() -> None:
    model = checkpoints.model("llama")
    with mhacli.inspecting(model, layers=np.arange(1, 2), heads=[np.int64(3), 0, 3]) as seen:
        model(ids(1, Q_LEN))
    assert [(head.layer, head.head) for head in seen.record.heads] == [(1, 3), (1, 0)]
    assert not any("pattern" in name for name in seen.record.arrays)


def test_a_record_gives_the_pattern_of_a_head_with_its_tokens_and_survives_its_file(
    tmp_path: Path,
) -> None:
    model, tokenizer = checkpoints.model("llama"), checkpoints.tokenizer_of("llama")
    with mhacli.inspecting(model, tokenizer, keep=["pattern"]) as seen, torch.no_grad():
        model(**tokenizer(TEXT, return_tensors="pt"))
    seen.record.save(str(tmp_path / "r"))
    again = mhacli.load(str(tmp_path / "r"))
    assert again.layers == seen.record.layers
    assert again.heads == seen.record.heads
    pattern = again.pattern(layer=1, head=2)
    assert np.array_equal(pattern.values, seen.record.arrays["layers.1.pattern"][0, 2])
    assert pattern.query_tokens == pattern.key_tokens == seen.record.sequences[0].tokens
    assert pattern.query_tokens[:2] == ("<s>", "t")
    assert again.pattern(head=2).values.shape == (3, *pattern.values.shape)
    assert again.pattern(layer=1).values.shape == (N_HEADS, *pattern.values.shape)
    for choice in ({"layer": 3}, {"head": 6}, {"batch": 1}, {"kind": "cross"}):
        with pytest.raises(mhacli.MhaError, match=r"[36]|batch|cross"):
            again.pattern(**{"layer": 1, "head": 2, **choice})


def test_each_call_is_a_pass_and_the_record_is_that_of_the_last() -> None:
    model = Written()
    with mhacli.inspecting(model) as seen:
        for n in (5, 7):
            model(ids(1, n))
    assert [len(record.sequences[0].ids) for record in seen.passes] == [5, 7]
    assert seen.record is seen.passes[-1]


AVERAGED = """
    entropy entropy_share effective_keys participation distance sink leading diagonal previous
    duplicate induction near max_score
""".split()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_statistics_over_passes_are_those_of_a_batch_of_all_texts(name: str) -> None:
    lengths, rows, model = (3, 11, 7), ids(3, 11), checkpoints.model(name)
    mask = torch.tensor([[int(i < n) for i in range(11)] for n in lengths])
    with mhacli.inspecting(model, heads=[1, 2], keep_passes=False) as seen, torch.no_grad():
        for row, n in zip(rows, lengths, strict=True):
            model(row[None, :n])
    with mhacli.inspecting(model, heads=[1, 2]) as batch, torch.no_grad():
        model(rows, attention_mask=mask)
    assert [len(record.sequences[0].ids) for record in seen.passes] == [7]
    assert len(seen.statistics()) == len(batch.record.heads) == 6
    for actual, expected in zip(seen.statistics(), batch.record.heads, strict=True):
        assert (actual.layer, actual.head) == (expected.layer, expected.head)
        for field in AVERAGED:
            assert getattr(actual, field) == pytest.approx(
                getattr(expected, field), rel=2e-5, abs=2e-6
            ), field
            if field != "max_score":
                assert getattr(actual.uniform, field) == pytest.approx(
                    getattr(expected.uniform, field), rel=2e-5, abs=2e-6
                ), field


def test_without_a_pass_there_are_no_statistics_and_the_record_says_why() -> None:
    with mhacli.inspecting(Written()) as seen:
        pass
    assert list(seen.statistics()) == []
    assert seen.passes == ()
    with pytest.raises(mhacli.MhaError, match="Written") as caught:
        _ = seen.record
    assert caught.value.code == "not-called"


@pytest.mark.parametrize("name", ["gpt2", "written"])
def test_contexts_nest_for_one_model_and_end_in_any_order(name: str) -> None:
    model = MODELS[name]()
    first, second = mhacli.inspecting(model, keep=KEEP), mhacli.inspecting(model, keep=KEEP)
    early, late = first.__enter__(), second.__enter__()
    model(ids(1, 5))
    first.__exit__(None, None, None)
    model(ids(1, 7))
    second.__exit__(None, None, None)
    model(ids(1, 9))
    assert [[len(record.sequences[0].ids) for record in seen.passes] for seen in (early, late)] == [
        [5],
        [5, 7],
    ]
    assert early.record.heads == late.passes[0].heads
    for site, array in early.record.arrays.items():
        assert np.array_equal(array, late.passes[0].arrays[site], equal_nan=True)
    assert hooks(model) == 0
    assert (early.notes, late.notes) == ((), ())


@pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
def test_a_pass_that_raises_is_in_no_record_and_the_next_one_is(fault: type[BaseException]) -> None:
    model: Any = family("gpt2").requires_grad_(False)

    def stop(*_: Any) -> None:
        raise fault

    with mhacli.inspecting(model) as seen:
        handle = model.h[1].register_forward_pre_hook(stop)
        with pytest.raises(fault):
            model(ids(2, Q_LEN))
        handle.remove()
        model(ids(2, 13))
    assert [[layer.layer for layer in record.layers] for record in seen.passes] == [[0, 1, 2]]
    assert len(seen.notes) == 1
    model.h[1].register_forward_pre_hook(stop)
    with pytest.raises(fault), mhacli.inspecting(model) as seen:
        model(ids(2, Q_LEN))
    assert seen.passes == ()
    assert len(seen.notes) == 1


def test_a_call_from_another_thread_can_be_refused() -> None:
    model = Written()
    with mhacli.inspecting(model, threads=False) as seen, ThreadPoolExecutor(1) as pool:
        fault = pool.submit(model, ids(1, 5)).exception()
        model(ids(1, 7))
    assert isinstance(fault, mhacli.MhaError)
    assert "thread" in str(fault)
    assert [len(record.sequences[0].ids) for record in seen.passes] == [7]


def test_a_context_in_another_thread_waits_for_the_first_to_end() -> None:
    began, order = threading.Event(), list[str]()

    def other() -> None:
        began.set()
        model = Written()
        with mhacli.inspecting(model) as seen:
            order.append("second")
            model(ids(1, 7))
        order.append(str(len(seen.passes)))

    thread, model = threading.Thread(target=other), Written()
    with mhacli.inspecting(model) as seen:
        thread.start()
        assert began.wait(120)
        model(ids(1, 5))
        order.append("first")
    thread.join(120)
    assert order == ["first", "second", "1"]
    assert len(seen.passes) == 1


def test_a_model_may_return_nothing_and_a_batch_may_be_empty() -> None:
    class Storing(Written):
        def forward(self, tokens: Tensor) -> None:  # type: ignore[override]
            self.made = super().forward(tokens)

    model = Storing()
    with mhacli.inspecting(model) as seen:
        model(ids(1, 5))
        model(ids(2, 5)[:0])
    assert len(seen.passes) == 1
    assert len(seen.notes) == 1


# --------------------------------------------------------------------------------------- the tokens


@pytest.mark.parametrize(
    ("name", "side"), [("llama", "right"), ("llama", "left"), ("bert", "right")]
)
def test_padding_is_no_token_even_beyond_the_longest_text(name: str, side: str) -> None:
    model, tokenizer = checkpoints.model(name), checkpoints.tokenizer_of(name, padding_side=side)
    near = tokenizer([TEXT, "the cat"], padding=True, return_tensors="pt")
    far = tokenizer([TEXT, "the cat"], padding="max_length", max_length=31, return_tensors="pt")
    with mhacli.inspecting(model, tokenizer, keep=("pattern",)) as seen, torch.no_grad():
        for given in (near, far):
            model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
    one, other = seen.passes
    assert one.sequences == other.sequences
    assert [len(text.ids) for text in other.sequences] == near["attention_mask"].sum(dim=1).tolist()
    assert other.config.padding == side
    assert all(layer.verified for layer in other.layers)
    for layer in range(3):
        patterns = [record.arrays[f"layers.{layer}.pattern"] for record in seen.passes]
        assert np.abs(patterns[0] - patterns[1]).max() < 1e-5
    # so few cells that those of padding were among the largest
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(
            ids(2, 3),
            attention_mask=torch.tensor([[1, 1, 1], [1, 1, 0] if side == "right" else [0, 1, 1]]),
        )
    assert all(layer.verified for layer in seen.record.layers)


@pytest.mark.parametrize("side", ["left", "right"])
def test_vectors_without_ids_have_places_for_tokens_and_padding_is_none_of_them(side: str) -> None:
    model, rows = checkpoints.model("llama"), ids(2, 7)
    mask = torch.ones_like(rows)
    mask[1, slice(0, 3) if side == "left" else slice(4, 7)] = 0
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(position_ids=torch.arange(7)[None], input_ids=rows, attention_mask=mask)
        model(
            attention_mask=mask,
            inputs_embeds=model.get_input_embeddings()(rows),
            position_ids=torch.arange(7)[None],
        )
    of_ids, of_vectors = seen.passes
    assert [list(text.ids) for text in of_ids.sequences] == [
        rows[0].tolist(),
        rows[1][mask[1] > 0].tolist(),
    ]
    assert [head.entropy for head in of_vectors.heads] == [head.entropy for head in of_ids.heads]
    assert [text.tokens for text in of_vectors.sequences] == [
        tuple(f"x{i}" for i in range(n)) for n in (7, 4)
    ]
    assert len(seen.notes) == 1


def test_a_tokenizer_of_another_model_gives_way_to_the_ids_and_a_note() -> None:
    model = Written()
    model.embed = nn.Embedding(9999, 24)
    with mhacli.inspecting(model, checkpoints.tokenizer_of("gpt2")) as seen:
        model(torch.tensor([[3, 9998, 5]]))
    assert seen.record.sequences[0].tokens == ("3", "9998", "5")
    assert "tokenizer" in " ".join(seen.notes)


def test_a_mask_that_hides_tokens_from_themselves_is_no_padding() -> None:
    model, earlier = (
        checkpoints.model("llama"),
        torch.ones(1, 1, Q_LEN, Q_LEN, dtype=torch.bool).tril(-1),
    )
    earlier[..., 0, 0] = True
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(ids(2, Q_LEN), attention_mask=earlier.expand(2, -1, -1, -1), use_cache=False)
    assert [len(text.ids) for text in seen.record.sequences] == [Q_LEN, Q_LEN]
    assert (
        np.broadcast_to(earlier, (2, N_HEADS, Q_LEN, Q_LEN))
        == (seen.record.arrays["layers.0.pattern"] > 0)
    ).all()


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "choices",
    [
        {"layers": 4},
        {"layers": []},
        {"layers": [1.0]},
        {"layers": [("crss", 1)]},
        {"keep": None},
        {"keep": ["weights"]},
        {"keep_limit": "1 GB"},
        {"keep_limit": -1},
        {"heads": 2},
        {"heads": ["1"]},
        {"heads": [-1]},
    ],
    ids=str,
)
def test_a_choice_of_another_form_is_refused_by_its_name_and_value(
    choices: Mapping[str, Any],
) -> None:
    ((name, value),) = choices.items()
    with pytest.raises(mhacli.MhaError) as caught, mhacli.inspecting(Written(), **choices):
        pass
    assert name in caught.value.message or str(value[0]) in caught.value.message
    assert caught.value.exit_code == 2


def test_layers_and_heads_that_the_model_does_not_have_are_named() -> None:
    model = Written()
    with mhacli.inspecting(model, layers=[1, 7]) as seen:
        model(ids(1, 5))
    assert "7" in seen.notes[0]
    for choice in ({"layers": [7]}, {"heads": [7]}):
        with mhacli.inspecting(model, **choice) as seen:
            model(ids(1, 5))
        with pytest.raises(mhacli.MhaError, match="7"):
            _ = seen.record


def test_a_part_that_was_called_by_itself_is_named() -> None:
    model = Written()
    with mhacli.inspecting(model) as seen:
        model.layers[1](torch.randn(1, 5, 24))
    with pytest.raises(mhacli.MhaError, match=r"layers\.1"):
        _ = seen.record
    assert "layers.1" in seen.notes[0]


def compiled_part() -> nn.Module:
    model = Written()
    model.layers[0].compile(backend="eager")
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: "MiniLM",
        lambda: (Written(), Written()),
        lambda: nn.DataParallel(Written()),
        lambda: torch.compile(Written(), backend="eager"),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2))),
        compiled_part,
    ],
    ids=["a path", "two models", "copies", "compiled", "scripted", "a compiled part"],
)
def test_what_hides_its_parts_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(mhacli.MhaError), mhacli.inspecting(make()):
        pass


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
def test_a_call_through_a_wrapper_that_compiles_is_refused() -> None:
    model = Written()
    compiled = torch.compile(model, backend="eager")
    with mhacli.inspecting(model), pytest.raises(mhacli.MhaError, match=r"torch\.compile"):
        compiled(ids(1, 5))


@pytest.mark.real
def test_a_long_text_of_few_tokens_rounds_more_than_a_short_one_and_passes() -> None:
    model = Written()
    with torch.no_grad(), mhacli.inspecting(model) as seen:
        model(ids(1, 8192))
    assert seen.record.self_check.ok
