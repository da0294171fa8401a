"""Direct effects against the same sums by hand, in numpy, from the numbers of a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.model_families import FAMILIES, ids_of, loaded_of, made
from torch import nn

from mhacli.compute.effect import direct
from mhacli.compute.effect.direct import frozen_norm
from mhacli.compute.effect.metric import Target
from mhacli.compute.effect.parts import find_parts
from mhacli.compute.effect.removal import Removal
from mhacli.compute.effect.run import EffectRun

N, HEADS, LAYERS, WIDTH, TARGET, VERSUS = 11, 4, 3, 12, 5, 9
EVERY = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


class ByHand(NamedTuple):
    """What the parts add to the stream at the last position: vectors of the embedding, of projections' biases and of MLPs, and of
    `heads` [layer, head, position, d_model]; and what the final norm and the language head make of a vector."""

    embedding: np.ndarray
    heads: np.ndarray
    biases: np.ndarray
    mlps: np.ndarray
    weight: np.ndarray
    constant: float

    def logit(self, part: np.ndarray) -> Any:
        """What a part of the stream adds."""
        return part @ self.weight


def softmax(scores: np.ndarray) -> np.ndarray:
    allowed = np.tril(np.ones(scores.shape[-2:], dtype=bool))
    e = np.exp(np.where(allowed, scores, -np.inf) - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gpt2_by_hand(model: Any, ids: np.ndarray, *, versus: bool) -> ByHand:
    w = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: len(ids)]
    embedding, heads, biases, mlps = x[-1], [], [], []
    for layer in range(LAYERS):
        of = f"transformer.h.{layer}"
        qkv = norm(x, f"{of}.ln_1") @ w[f"{of}.attn.c_attn.weight"] + w[f"{of}.attn.c_attn.bias"]
        q, k, v = qkv.reshape(len(ids), 3, HEADS, WIDTH).transpose(1, 2, 0, 3)
        z = softmax(q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH)) @ v
        out = z @ w[f"{of}.attn.c_proj.weight"].reshape(HEADS, WIDTH, -1)
        x = x + out.sum(0) + w[f"{of}.attn.c_proj.bias"]
        inner = norm(x, f"{of}.ln_2") @ w[f"{of}.mlp.c_fc.weight"] + w[f"{of}.mlp.c_fc.bias"]
        inner = inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))) / 2
        mlp = inner @ w[f"{of}.mlp.c_proj.weight"] + w[f"{of}.mlp.c_proj.bias"]
        x = x + mlp
        heads, biases, mlps = [*heads, out], [*biases, w[f"{of}.attn.c_proj.bias"]], [*mlps, mlp[-1]]
    row = w["lm_head.weight"][TARGET] - (w["lm_head.weight"][VERSUS] if versus else 0)
    gain = row * w["transformer.ln_f.weight"] / np.sqrt(x[-1].var() + 1e-5)
    constant = row @ w["transformer.ln_f.bias"]
    return ByHand(embedding, np.array(heads), np.array(biases), np.array(mlps), gain - gain.mean(), constant)


def llama_by_hand(model: Any, ids: np.ndarray, *, versus: bool) -> ByHand:
    w = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        angles = np.arange(len(ids))[:, None] * 10_000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)
        cos, sin = (np.tile(f(angles), 2) for f in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1) * sin

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(ids), -1, WIDTH).transpose(1, 0, 2)

    x = w["model.embed_tokens.weight"][ids]
    embedding, heads, mlps = x[-1], [], []
    for layer in range(LAYERS):
        of = f"model.layers.{layer}"
        normed = norm(x, f"{of}.input_layernorm")
        q, k, v = (split(normed @ w[f"{of}.self_attn.{name}_proj.weight"].T) for name in "qkv")
        k, v = (np.repeat(part, HEADS // 2, 0) for part in (rotated(k), v))
        z = softmax(rotated(q) @ k.transpose(0, 2, 1) / np.sqrt(WIDTH)) @ v
        out = z @ w[f"{of}.self_attn.o_proj.weight"].T.reshape(HEADS, WIDTH, -1)
        x = x + out.sum(0)
        normed = norm(x, f"{of}.post_attention_layernorm")
        gate, up = (normed @ w[f"{of}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        mlp = (gate / (1 + np.exp(-gate)) * up) @ w[f"{of}.mlp.down_proj.weight"].T
        x = x + mlp
        heads, mlps = [*heads, out], [*mlps, mlp[-1]]
    row = w["lm_head.weight"][TARGET] - (w["lm_head.weight"][VERSUS] if versus else 0)
    weight = row * w["model.norm.weight"] / np.sqrt((x[-1] ** 2).mean() + 1e-6)
    return ByHand(embedding, np.array(heads), np.zeros((LAYERS, len(weight))), np.array(mlps), weight, 0.0)


def model_of(name: str, dtype: torch.dtype = torch.float64, **choices: Any) -> Any:
    family = FAMILIES[name]
    return made(family.kind, {**family.choices, **choices}, automatic="AutoModelForCausalLM").to(dtype)


def run_of(model: Any, *plan: tuple[Removal, ...], versus: bool = False) -> EffectRun:
    target = Target(TARGET, VERSUS if versus else None)
    run = EffectRun(loaded_of(model), {"input_ids": ids_of(1, N)}, plan, N - 1, target)
    run.run()
    return run


@pytest.mark.parametrize(("name", "by_hand", "close"), [
    ("gpt2", gpt2_by_hand, 1e-11),
    ("llama", llama_by_hand, 1e-5),  # its norms and rotations are in float32 whatever the model is in
])  # fmt: skip
@pytest.mark.parametrize("versus", [False, True])
def test_direct_effects_are_what_parts_add_by_hand(name: str, by_hand: Any, close: float, versus: bool) -> None:
    model = model_of(name)
    hand: ByHand = by_hand(model, ids_of(1, N)[0].numpy(), versus=versus)
    zeros = [(Removal(("self", layer), (head,)),) for layer, head in EVERY]
    means = [(Removal(("self", layer), (head,), replace="mean"),) for layer, head in EVERY]
    run = run_of(model, *zeros, *means, versus=versus)
    added = np.array([hand.logit(hand.heads[layer, head]) for layer, head in EVERY])  # [head, position]
    assert [run.direct[item] for item in range(len(zeros))] == pytest.approx(list(-added[:, -1]), abs=close)
    assert [run.direct[item] for item in range(len(zeros), 2 * len(zeros))] == pytest.approx(
        list(added.mean(1) - added[:, -1]), abs=close
    )
    found = run.direct_paths.sum
    assert found.embedding == pytest.approx(hand.logit(hand.embedding), abs=close)
    assert found.heads == pytest.approx(added[:, -1].sum(), abs=close)
    assert found.mlps == pytest.approx(hand.logit(hand.mlps).sum(), abs=close)
    assert found.biases == pytest.approx(hand.logit(hand.biases).sum() + hand.constant, abs=close)
    assert found.ok
    assert abs(found.residue) < close
    assert run.verified.ok


def test_what_another_text_adds_comes_in_place_of_what_a_head_added() -> None:
    model, other = model_of("gpt2"), ids_of(1, N, seed=7)
    mine, theirs = (gpt2_by_hand(model, ids[0].numpy(), versus=False) for ids in (ids_of(1, N), other))
    z = find_parts(model, {"input_ids": other}, 0).attention.z
    plan = [(Removal(("self", layer), (head,), replace="resample"),) for layer, head in EVERY]
    run = EffectRun(loaded_of(model), {"input_ids": ids_of(1, N)}, plan, N - 1, Target(TARGET), resampled=z)
    run.run()
    expected = [mine.logit(theirs.heads[layer, head, -1] - mine.heads[layer, head, -1]) for layer, head in EVERY]
    assert [run.direct[item] for item in range(len(plan))] == pytest.approx(expected, abs=1e-11)


def test_the_direct_effect_of_heads_is_that_of_each_and_at_another_position_it_is_none() -> None:
    one, other = Removal(("self", 0), (1,)), Removal(("self", 2), (3,))
    here, elsewhere = (Removal(("self", 0), (1,), at=at) for at in (N - 1, N - 2))
    edge = Removal(("self", 0), (1,), (N - 1,), (2,), "renormalise")
    direct = run_of(model_of("gpt2"), (one,), (other,), (one, other), (here,), (elsewhere,), (edge,)).direct
    assert direct[2] == pytest.approx(direct[0] + direct[1], abs=1e-12)
    assert direct[3] == direct[0]
    assert direct[4] == 0
    assert 5 not in direct


@pytest.mark.every_row
@pytest.mark.parametrize(("name", "is_sum"), [
    ("gpt_neox", True), ("gptj", True), ("falcon", True), ("opt", True), ("olmo2", True), ("gemma3_text", True),
    ("gpt_oss", True), ("mixtral", True), ("gemma2", False), ("bloom", False),
])  # fmt: skip
def test_the_parts_of_a_family_give_the_logit_or_say_that_they_do_not(name: str, is_sum: bool) -> None:
    found = run_of(model_of(name, torch.float32), (Removal(("self", 1), (2,)),)).direct_paths.sum
    assert found.ok == is_sum
    assert (abs(found.residue) <= found.tolerance) == is_sum


@pytest.mark.parametrize("part", ["embedding", "other_parts", "final_norm", "norm_behind"])
def test_a_part_that_is_left_out_is_noticed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3_text")
    assert run_of(model, (Removal(("self", 1), (2,)),)).direct_paths.sum.ok
    nothing: dict[str, Any] = {"embedding": lambda _, like: torch.zeros_like(like), "other_parts": lambda *_: ()}
    monkeypatch.setattr(direct._Stream, part, nothing.get(part, lambda *_: None))
    assert not run_of(model, (Removal(("self", 1), (2,)),)).direct_paths.sum.ok


def test_where_the_language_head_is_narrower_than_the_stream_no_direct_effect_is_told() -> None:
    run = run_of(model_of("opt", torch.float32, word_embed_proj_dim=24), (Removal(("self", 1), (2,)),))
    assert run.direct == {}
    assert run.direct_paths is None
    assert run.verified.ok


def test_a_head_that_divides_its_logits_is_measured() -> None:
    found = run_of(model_of("granite_swa", torch.float32, logits_scaling=4.0), (Removal(("self", 1), (2,)),))
    assert found.direct_paths.sum.ok
    assert found.direct_paths.sum.heads == pytest.approx(
        run_of(model_of("granite_swa", torch.float32), (Removal(("self", 1), (2,)),)).direct_paths.sum.heads / 4,
        rel=1e-4,
    )


class Offset(nn.Module):
    """A norm of root mean squares that adds 1 to its weights, as Gemma's."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


@pytest.mark.parametrize("d_model", [5, 6])
@pytest.mark.parametrize("is_centred", [True, False])
@torch.no_grad()
def test_the_map_of_a_norm_is_known_from_what_it_answers(d_model: int, is_centred: bool) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(3, d_model, dtype=torch.float64)
    weight[1] = 0.0
    norm: nn.Module = Offset(weight)
    if is_centred:
        norm = nn.LayerNorm(d_model, dtype=torch.float64)
        norm.weight.data, norm.bias.data = weight, bias
    found = frozen_norm(norm, x, norm(x), weight)
    spread = x.std(correction=0) if is_centred else x.square().mean().sqrt()
    expected = weight / spread if is_centred else (1 + weight) / spread
    assert found.is_centred == is_centred
    assert found.gain.tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert found.bias.tolist() == pytest.approx(bias.tolist() if is_centred else [0.0] * d_model)
    direction = torch.randn(d_model, dtype=torch.float64)
    assert float(found.before(direction) @ x + found.bias @ direction) == pytest.approx(
        float(direction @ norm(x)), abs=1e-12
    )
