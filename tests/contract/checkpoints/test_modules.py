"""`mhacli.inspecting` of modules that people write: torch's own attention and softmax in any
layout, and what nobody can see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints, oracle
from support.checkpoints import FAMILIES, TEXT, VOCABULARY
from torch import Tensor, nn

import mhacli

sdpa = nn.functional.scaled_dot_product_attention


class Mixing(nn.Module):
    """A module whose name says nothing, with attention of three heads that lays out its axes as it
    likes.
    """

    def __init__(self, attend: Callable[..., Tensor] = sdpa) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.attend = attend

    def by_head(self, x: Tensor) -> list[Tensor]:
        return [
            part(x).unflatten(-1, (3, -1)).transpose(-3, -2) for part in (self.q, self.k, self.v)
        ]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.by_head(x)).transpose(-3, -2).flatten(-2)


class MixingAttention(Mixing):
    """The same, of which the name says that it is attention: a softmax in it counts."""


LAYOUTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "batch and heads": (sdpa, (2, 5)),
    "in one axis": (
        lambda *qkv: sdpa(*(t.flatten(0, 1) for t in qkv)).unflatten(0, (2, -1)),
        (2, 5),
    ),
    "no batch": (sdpa, (5,)),
    "no batch, as many tokens as heads": (sdpa, (3,)),
    "windows": (sdpa, (2, 4, 5)),
    "windows of one": (sdpa, (1, 4, 5)),
    "a batch of one": (lambda *qkv: sdpa(*(t[None] for t in qkv))[0], (5,)),
    "written out": (lambda q, k, v: (q @ k.mT / 2).softmax(dim=-1) @ v, (2, 5)),
    "written out, no batch": (lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v, (5,)),
    "written out, in float32": (
        lambda q, k, v: (
            nn.functional.dropout(
                nn.functional.softmax(q @ k.mT / 2, dim=-1, dtype=torch.float32), 0.1, False
            )
            @ v
        ),
        (2, 5),
    ),
    "written out, copied": (
        lambda q, k, v: torch.matmul(
            torch.softmax(input=q @ k.mT / 2, dim=-1).to(torch.float64).to(v).contiguous(), v
        ),
        (2, 5),
    ),
    "bmm": (
        lambda *qkv: torch.bmm(
            (qkv[0].flatten(0, 1) @ qkv[1].flatten(0, 1).mT / 2).softmax(-1), qkv[2].flatten(0, 1)
        ).unflatten(0, (2, -1)),
        (2, 5),
    ),
    "einsum": (
        lambda q, k, v: torch.einsum(
            "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).div(2).softmax(-1), v
        ),
        (2, 5),
    ),
    "einsum, values first": (
        lambda q, k, v: torch.einsum("bhkd, bhqk -> bhqd", v, (q @ k.mT / 2).softmax(-1)),
        (2, 5),
    ),
}
"""How attention lays out its axes, and the sizes of its input before the width."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_is_seen_in_any_layout(layout: str) -> None:
    attend, sizes = LAYOUTS[layout]
    is_written = layout.startswith(("written", "bmm", "einsum"))
    model: Any = (MixingAttention if is_written else Mixing)(attend)
    x = torch.randn(*sizes, 12, generator=torch.Generator().manual_seed(1))
    q, k, v = (part.flatten(0, -4) if x.ndim > 2 else part[None] for part in model.by_head(x))
    expected = oracle.attention(q.detach(), k.detach(), v.detach(), scale=0.5)
    plain = model(x)
    with mhacli.inspecting(model, keep=["pattern", "z"]) as seen:
        assert torch.equal(model(x), plain)
    (layer,) = seen.record.layers
    assert layer.verified
    assert (layer.captured_by, layer.n_heads) == ("softmax" if is_written else "sdpa", 3)
    for site, array in (("pattern", expected.pattern), ("z", expected.z)):
        actual = seen.record.arrays[f"layers.0.{site}"]
        assert actual.shape == array.shape
        assert np.abs(actual - array).max() < 1e-6


MASKS: dict[str, Any] = {
    "none": {},
    "causal": {"is_causal": True},
    "a scale": {"scale": 0.3},
    "kv heads": {"enable_gqa": True},
    "a mask": {"attn_mask": torch.ones(5, 5).tril().bool()},
    "a mask of each head": {
        "attn_mask": torch.rand(2, 6, 5, 5, generator=torch.Generator().manual_seed(4)) > 0.4
    },
    "a bias": {"attn_mask": torch.arange(25.0).reshape(5, 5) / 9},
    "-inf": {"attn_mask": torch.ones(5, 5).tril().log()},
    "the lowest number": {
        "attn_mask": torch.where(
            torch.ones(5, 5).tril().bool(), 0.0, torch.finfo(torch.float32).min
        )
    },
    "−10,000": {"attn_mask": torch.where(torch.ones(5, 5).tril().bool(), 0.0, -1e4)},
    "a bias and a mask in one": {
        "attn_mask": torch.where(torch.ones(5, 5).tril().bool(), torch.arange(5.0) / 3, -torch.inf)
    },
    "a steep bias": {"attn_mask": torch.linspace(0, -8000, 5).expand(5, 5).contiguous()},
}
"""What `scaled_dot_product_attention` may be given."""


@pytest.mark.parametrize("name", MASKS)
def test_attention_of_torch_is_shown_with_all_that_it_was_given(name: str) -> None:
    """A score that is put far down is forbidden: its weight is exactly 0. A low bias forbids
    nothing.
    """
    choices, generator = MASKS[name], torch.Generator().manual_seed(3)
    n_kv_heads = 2 if "enable_gqa" in choices else 6
    q, k, v = (torch.randn(2, n, 5, 4, generator=generator) for n in (6, n_kv_heads, n_kv_heads))

    class Fused(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, value=v, **choices)

    model, mask = Fused(), choices.get("attn_mask")
    with mhacli.inspecting(model, keep=["pattern", "scores", "z"]) as seen:
        plain = model(q, k, v)
    allowed, bias = None, None
    if choices.get("is_causal"):
        allowed = np.tri(5, dtype=bool)
    elif mask is not None and mask.dtype == torch.bool:
        allowed = mask.numpy()
    elif mask is not None:
        bias, allowed = np.where(mask > -9000, mask, 0), mask.numpy() > -9000
    expected = oracle.attention(q, k, v, scale=choices.get("scale"), allowed=allowed, bias=bias)
    arrays = seen.record.arrays
    assert np.abs(arrays["layers.0.pattern"] - expected.pattern).max() < 2e-6
    assert np.abs(arrays["layers.0.z"] - plain.numpy()).max() < 1e-5
    assert (np.isneginf(arrays["layers.0.scores"]) == np.isneginf(expected.scores)).all()
    if allowed is not None:
        assert (
            arrays["layers.0.pattern"][~np.broadcast_to(allowed, expected.pattern.shape)] == 0
        ).all()
        assert (
            np.broadcast_to(arrays["layers.0.allowed"], expected.pattern.shape) == allowed
        ).all()
    (layer,) = seen.record.layers
    assert layer.verified
    assert layer.bias == ("bias" in name)
    assert layer.n_kv_heads == n_kv_heads


def emptied(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    pattern = (q @ k.mT / 2).masked_fill(~attn_mask, -torch.inf).softmax(dim=-1)
    pattern.masked_fill(torch.ones(7, 1, 1, 5, 1).bool(), 0.0)  # which nothing reads
    pattern.masked_fill(torch.ones(5, 1).bool(), 0.0)
    return pattern.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0) @ v


@pytest.mark.parametrize("attend", [sdpa, emptied])
def test_a_query_without_an_allowed_key_is_a_row_of_zeros(attend: Callable[..., Tensor]) -> None:
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(-1)
    model = MixingAttention(functools.partial(attend, attn_mask=allowed))
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model(torch.randn(2, 5, 12))
    pattern = seen.record.arrays["layers.0.pattern"]
    assert (pattern[:, :, 0] == 0).all()
    assert np.abs(pattern[:, :, 1:].sum(axis=-1) - 1).max() < 1e-6


class Encoder(nn.Module):
    """torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.attn, self.weights = nn.MultiheadAttention(12, 3, batch_first=True), True

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.embed(tokens)
        outputs: tuple[Tensor, Tensor | None] = self.attn(
            x, x, x, need_weights=self.weights, average_attn_weights=False
        )
        return outputs


def ids(n_texts: int, n: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 40, (n_texts, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weights", [True, False])
def test_the_attention_module_of_torch_is_what_it_returns_itself(weights: bool) -> None:
    model = Encoder()
    expected = model(ids(2, 7))[1]
    assert expected is not None
    model.weights = weights
    plain = model(ids(2, 7))[0]
    with mhacli.inspecting(model, keep=("pattern", "z")) as seen:
        assert torch.equal(model(ids(2, 7))[0], plain)
    assert np.abs(seen.record.arrays["layers.0.pattern"] - expected.detach().numpy()).max() < 1e-6
    assert seen.record.layers[0].verified


def test_a_fast_path_that_inspection_would_turn_off_is_refused() -> None:
    model = Encoder().eval()
    model.weights = False
    with pytest.raises(mhacli.MhaError, match="attn"), mhacli.inspecting(model):
        pass
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mhacli.inspecting(model) as seen:
            model(ids(2, 7))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert seen.record.layers[0].verified


class Stacked(nn.Module):
    """A model of torch's layers, for texts in rows or in columns."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=batch_first)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.stack(self.embed(tokens))
        return made


def test_texts_may_stand_in_columns() -> None:
    rows, columns = Stacked(batch_first=True), Stacked(batch_first=False)
    with (
        mhacli.inspecting(rows, keep=["pattern"]) as expected,
        mhacli.inspecting(columns, keep=["pattern"]) as actual,
    ):
        rows(ids(2, 7))
        columns(ids(2, 7).T)
    assert [list(text.ids) for text in actual.record.sequences] == ids(2, 7).tolist()
    assert actual.record.sequences == expected.record.sequences
    for layer in range(2):
        one, other = (seen.record.arrays[f"layers.{layer}.pattern"] for seen in (expected, actual))
        assert np.abs(one - other).max() < 1e-6
    with mhacli.inspecting(columns) as actual:
        columns(ids(2, 2))
    assert actual.record.sequences[0].tokens == (
        "x0",
        "x1",
    )  # either axis may be that of the tokens
    assert len(actual.notes) == 1


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_transformer_of_torch_has_two_texts(batch_first: bool) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.embed = nn.Embedding(VOCABULARY, 12)
            self.pair = nn.Transformer(12, 3, 2, 2, 24, dropout=0.0, batch_first=batch_first)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            made: Tensor = self.pair(self.embed(source), self.embed(target))
            return made

    model, source, target, given = Pair(), ids(2, 7), ids(2, 5), list[Tensor]()
    cross: Any = model.pair.decoder.layers[1].multihead_attn
    handle = cross.register_forward_pre_hook(lambda _, args: given.extend(args))
    with mhacli.inspecting(model, keep=["pattern"]) as seen:
        model(*((source, target) if batch_first else (source.T, target.T)))
    handle.remove()
    record = seen.record
    assert [list(text.ids) for text in (*record.sequences, *record.context)] == [
        *target.tolist(),
        *source.tolist(),
    ]
    assert [(layer.kind, layer.layer) for layer in record.layers] == [
        ("encoder", 0),
        ("encoder", 1),
        ("decoder", 0),
        ("cross", 0),
        ("decoder", 1),
        ("cross", 1),
    ]
    assert all(layer.verified for layer in record.layers)
    _, expected = cross(*given, need_weights=True, average_attn_weights=False)
    assert np.abs(record.arrays["layers.5.pattern"] - expected.detach().numpy()).max() < 1e-6


def test_modules_beside_attention_are_layers_too_and_one_that_is_not_seen_is_named() -> None:
    class LinearAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            scores = (x @ self.k(x).mT).exp()
            return scores / scores.sum(dim=-1, keepdim=True) @ x

    model = nn.Sequential()
    for name, part in (
        ("attn", Mixing()),
        ("attn_norm", nn.LayerNorm(12)),
        ("mixer", Mixing()),
        ("other", LinearAttention()),
    ):
        model.add_module(name, part)
    with mhacli.inspecting(model) as seen:
        model(torch.randn(2, 5, 12))
    assert [(layer.layer, layer.name) for layer in seen.record.layers] == [
        (0, "attn"),
        (1, "mixer"),
    ]
    assert ["other" in note and "LinearAttention" in note for note in seen.notes] == [True]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_model_without_attention_names_its_classes(is_named: bool) -> None:
    class Unnamed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(dim=-1) @ x

    class WithoutSoftmaxAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).exp() @ x

    model = WithoutSoftmaxAttention() if is_named else Unnamed()
    with mhacli.inspecting(model) as seen:
        model(torch.randn(2, 5, 8))
    assert seen.passes == ()
    with pytest.raises(mhacli.MhaError, match=type(model).__name__) as caught:
        _ = seen.record
    assert caught.value.code == "no-attention"


@pytest.mark.filterwarnings("ignore")
def test_attention_in_a_compiled_function_is_refused() -> None:
    attend = torch.compile(sdpa, backend="eager")
    model = Mixing(lambda q, k, v: attend(q, k, v))
    with mhacli.inspecting(model), pytest.raises(mhacli.MhaError, match=r"torch\.compile"):
        model(torch.randn(2, 5, 12))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.to("meta")(torch.ones(2, 5, 12, device="meta")),
        lambda model: model(
            torch.nested.nested_tensor([torch.ones(3, 12), torch.ones(5, 12)], layout=torch.jagged)
        ),
        lambda model: torch.func.vmap(model)(torch.ones(2, 5, 12)),
        lambda model: torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 5, 12)),
    ],
    ids=["meta", "nested", "vmap", "grad"],
)
def test_tensors_whose_numbers_cannot_be_read_are_refused(call: Callable[[nn.Module], Any]) -> None:
    model = Mixing()
    with mhacli.inspecting(model) as seen, pytest.raises(mhacli.MhaError, match="Mixing"):
        call(model)
    assert seen.passes == ()


# ----------------------------------------------------------------------- masks that change in place


class InPlace(nn.Module):
    """Two layers that share one mask, which is narrowed in place between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, 12), nn.ModuleList([Mixing(), Mixing()])

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.embed(tokens), torch.ones(6, 6, dtype=torch.bool).tril()
        for layer in self.layers:
            layer.attend = functools.partial(sdpa, attn_mask=mask)
            x = layer(x)
            mask &= torch.ones(6, 6, dtype=torch.bool).triu(-1)
        return x


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_mask_that_was_written_to_is_read_again(mode: str) -> None:
    model = InPlace()
    with mhacli.inspecting(model, keep=["pattern"]) as seen, getattr(torch, mode)():
        model(ids(1, 6))
    for layer, cells in enumerate(
        (np.tri(6, dtype=bool), np.tri(6, dtype=bool) & ~np.tri(6, k=-2, dtype=bool))
    ):
        assert ((seen.record.arrays[f"layers.{layer}.pattern"] > 0) == cells).all()
        assert seen.record.layers[layer].verified


# ----------------------------------------------------------------------------- what is not verified


@contextmanager
def registered(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> Iterator[None]:
    """transformers' `sdpa` replaced by `change(original, module, q, k, v, mask, **keywords)`."""
    from transformers import AttentionInterface

    original = AttentionInterface._global_mapping["sdpa"]

    @functools.wraps(original)
    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **keywords: Any
    ) -> Any:
        return change(original, module, query, key, value, attention_mask, **keywords)

    with monkeypatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "sdpa", attend)
        yield


@pytest.mark.parametrize(("factor", "is_right"), [(1 + 1e-7, True), (1.001, False)])
def test_a_z_that_the_pattern_does_not_give_fails_the_check_of_its_layer(
    factor: float, is_right: bool, monkeypatch: pytest.MonkeyPatch, mha: Any
) -> None:
    def larger(original: Any, *given: Any, **keywords: Any) -> Any:
        z, pattern = original(*given, **keywords)
        return z * factor, pattern

    with registered(monkeypatch, larger):
        document = mha(
            "run", TEXT, "--model", checkpoints.folder("llama"), "--json", code=0 if is_right else 3
        ).json
    assert document["self_check"]["ok"] == is_right
    for layer in document["layers"]:
        assert layer["verified"] == layer["self_check"]["ok"] == is_right
        assert bool(layer["unverified"]) != is_right
        assert (layer["self_check"]["max_abs_error"] > layer["self_check"]["tolerance"]) != is_right


def test_the_self_check_has_the_error_of_the_layer_that_fails(
    monkeypatch: pytest.MonkeyPatch, mha: Any
) -> None:
    def larger(original: Any, module: Any, *given: Any, **keywords: Any) -> Any:
        z, pattern = original(module, *given, **keywords)
        return z * (1.001 if module.layer_idx == 1 else 1), pattern

    with registered(monkeypatch, larger):
        words = ("run", TEXT, "--model", checkpoints.folder("llama"), "--json")
        document = mha(*words, code=3).json
    check = document["layers"][1]["self_check"]
    assert document["self_check"]["max_abs_error"] == check["max_abs_error"] > check["tolerance"]


class HalvedAttention(nn.Module):
    """Its weights are halved in place before they meet the values."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(x @ x.mT, dim=-1)
        weights.mul_(0.5)
        return weights @ x


def test_weights_that_do_not_sum_to_1_fail_the_self_check_though_z_is_theirs() -> None:
    model = HalvedAttention()
    with mhacli.inspecting(model) as seen:
        model(torch.randn(1, 3, 5, 4))
    check = seen.record.self_check
    assert check.error < check.tolerance  # of z
    assert not check.ok


def test_a_keyword_that_nobody_knows_is_named_and_its_layer_is_not_verified() -> None:
    model = checkpoints.model("llama")
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(ids(2, 7), attention_temperature=torch.ones(2, 7))
    for layer in seen.record.layers:
        assert not layer.verified
        assert ["attention_temperature" in reason for reason in layer.unverified] == [True]
        assert layer.self_check.ok


def test_outputs_that_differ_without_inspection_end_with_3(
    mha: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def moody(original: Any, module: Any, *given: Any, **keywords: Any) -> Any:
        calls.append(1)
        z, pattern = original(module, *given, **keywords)
        return (z + 1e-3 if len(calls) > 3 else z), pattern

    with registered(monkeypatch, moody):
        words = ("run", TEXT, "--model", checkpoints.folder("llama"))
        ended = mha(*words, "--verify-outputs", "--json", code=3)
    assert ended.json["model"]["identical_outputs"] is False


# ---------------------------------------------------------------------------- models of other kinds

GROUPED, PLAIN, BASE = checkpoints.GROUPED, checkpoints.PLAIN, checkpoints.BASE
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
HYBRIDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "lfm2": (
        {
            **GROUPED,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        [1],
    ),
    "bamba": ({**GROUPED, **MAMBA, "attn_layer_indices": [1]}, [1]),
    "recurrent_gemma": (
        {
            **BASE,
            **PLAIN,
            "intermediate_size": 96,
            "lru_width": 48,
            "attention_window_size": 5,
            "head_dim": 8,
        },
        [2],
    ),
}


@pytest.mark.real
@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_without_attention_are_listed_by_their_type(kind: str) -> None:
    config, layers = HYBRIDS[kind]
    model = checkpoints.from_config(kind, config)
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(ids(2, 11), use_cache=False)
    record = seen.record
    assert [layer.layer for layer in record.layers] == layers
    assert [without.layer for without in record.model.without] == [
        layer for layer in range(3) if layer not in layers
    ]
    assert all(without.type for without in record.model.without)
    assert all(layer.verified for layer in record.layers)


OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "albert": (
        {**BASE, **PLAIN, "embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2},
        4,
    ),
    "hrm_text": ({**GROUPED, "num_layers_per_stack": 2, "L_cycles": 2, "H_cycles": 2}, 12),
    "diffllama": (GROUPED, 6),
}
"""Models that run a list of layers again, or compute two attentions in a layer, and how many
attentions their pass has."""


@pytest.mark.real
@pytest.mark.parametrize("kind", OTHERS)
def test_attentions_of_a_module_that_runs_again_are_separate_layers(kind: str) -> None:
    config, n = OTHERS[kind]
    model, once = (
        checkpoints.from_config(kind, config),
        {} if kind == "albert" else {"use_cache": False},
    )
    with mhacli.inspecting(model, keep=["pattern"]) as seen, torch.no_grad():
        model(ids(2, 11), **once)
    twin = checkpoints.from_config(kind, config, attn_implementation="eager")
    theirs = twin(ids(2, 11), **once, output_attentions=True).attentions
    layers = seen.record.layers
    assert [(layer.layer, layer.call) for layer in layers] == (
        [(i // 2, i % 2 + 1) for i in range(n)]
        if kind == "diffllama"
        else [(i, 1) for i in range(n)]
    )
    for index, pattern in enumerate(theirs):
        recorded = seen.record.arrays[f"layers.{index * (2 if kind == 'diffllama' else 1)}.pattern"]
        assert np.abs(recorded - pattern.numpy()).max() < 2e-5


@pytest.mark.real
@pytest.mark.parametrize(
    ("kind", "config", "code"),
    [
        (
            "mamba",
            {**BASE, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 4},
            "no-attention",
        ),
        (
            "longformer",
            {**BASE, **PLAIN, "attention_window": 4, "max_position_embeddings": 64},
            "not-tokens",
        ),
    ],
)
def test_a_model_without_a_matrix_of_queries_and_keys_is_refused(
    kind: str, config: Any, code: str, mha: Any, tmp_path: Any
) -> None:
    model, tokenizer = checkpoints.from_config(kind, config), checkpoints.tokenizer_of("gpt2")
    with checkpoints.quiet():
        model.save_pretrained(tmp_path / "m")
        tokenizer.save_pretrained(tmp_path / "m")
    ended = mha("run", TEXT, "--model", "m", "--json", code=1)
    assert ended.error["code"] == code
    assert kind in ended.said
    with torch.no_grad(), mhacli.inspecting(model.eval()) as seen:
        model(ids(1, 11))
    with pytest.raises(mhacli.MhaError):
        seen.record  # noqa: B018


@pytest.mark.parametrize(
    ("name", "names"), [("vit", "text"), ("whisper", "input_features"), ("clip", "pixel_values")]
)
def test_a_model_that_does_not_read_text_alone_is_refused_by_the_commands(
    name: str, names: str, mha: Any, tmp_path: Any
) -> None:
    place = checkpoints.copy_of(name, tmp_path / "m")
    if name == "vit":
        checkpoints.tokenizer_of(name).save_pretrained(place)
    ended = mha("run", TEXT, "--model", "m", "--json", code=(1, 2))
    assert ended.missing(names, FAMILIES[name].kind) == []
