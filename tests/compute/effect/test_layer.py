"""Effects in a layer of our own against the same sums in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mhacli.compute.base.setup import make_setup
from mhacli.compute.effect import layer as effect_layer
from mhacli.compute.effect.layer import layer_effects
from mhacli.compute.effect.removal import StandIns
from mhacli.errors import UsageError
from mhacli.requests.effect import LayerEffectRequest
from mhacli.requests.layer import layer_request
from mhacli.results.record.record import Record
from mhacli.spec.config import Config
from mhacli.text.encode import encode

TEXT, CONTEXT = "the cat sat on the mat", "a dog"
N, HEADS, KV_HEADS, WIDTH, POSITION = 6, 4, 2, 6, 3


def request_of(config: Config, context: str = "", **asked: Any) -> LayerEffectRequest:
    encoded = encode([TEXT], config, context=[context] if context else [])
    return LayerEffectRequest(layer_request(encoded, config), position=POSITION, **asked)


def config_of(**choices: Any) -> Config:
    sizes = {"d_model": HEADS * WIDTH, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "dtype": "float64"}
    return Config(**{**sizes, **choices}).resolved()


def by_hand(request: LayerEffectRequest) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The weights, the scores [head, query, key] with −∞ where the mask forbids, and the values by query head."""
    setup = make_setup(request.layer)
    w = {name: tensor.numpy() for name, tensor in setup.layer.tensors().items()}
    x = setup.rows()[0].numpy()
    source = x if setup.context is None else w["embed.weight"][setup.context.ids[0].numpy()]
    source = source if setup.context is None else source + setup.added(setup.context.places).numpy()
    q, k, v = (
        (rows @ w[f"{name}_proj.weight"].T + w[f"{name}_proj.bias"]).reshape(len(rows), -1, WIDTH).transpose(1, 0, 2)
        for name, rows in (("q", x), ("k", source), ("v", source))
    )
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=0) for part in (k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH)
    if request.layer.config.causal:
        scores = np.where(np.tril(np.ones(scores.shape[1:], dtype=bool)), scores, -np.inf)
    return w, scores, v


def output(w: dict[str, np.ndarray], z: np.ndarray) -> np.ndarray:
    """The output at the position, of the heads' z there."""
    side_by_side = z.reshape(-1)
    return side_by_side if "o_proj.weight" not in w else w["o_proj.weight"] @ side_by_side + w["o_proj.bias"]


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def relative(changed: np.ndarray, plain: np.ndarray) -> float:
    return float(np.linalg.norm(changed - plain) / np.linalg.norm(plain))


def effects_of(record: Record) -> list[float]:
    return [effect.d_output for effect in record.effects]


@pytest.mark.parametrize("replace", ["zero", "mean"])
@pytest.mark.parametrize("choices", [{}, {"causal": True}, {"out_proj": False}], ids=str)
def test_every_head_changes_what_it_adds_by_hand(choices: dict[str, Any], replace: Any) -> None:
    request = request_of(config_of(**choices), replace=replace)
    w, scores, v = by_hand(request)
    z = softmax(scores) @ v
    expected = []
    for head in range(HEADS):
        without = z[:, POSITION].copy()
        without[head] = z[head].mean(0) if replace == "mean" else 0
        expected.append(relative(output(w, without), output(w, z[:, POSITION])))
    record = layer_effects(request)
    assert effects_of(record) == pytest.approx(expected, abs=1e-12)
    assert record.effect.verified.ok
    assert record.effect.verified.n == (0 if replace == "mean" and "out_proj" in choices else HEADS)


@pytest.mark.parametrize(("choices", "context"), [({}, ""), ({"causal": True}, ""), ({}, CONTEXT)], ids=str)
@pytest.mark.parametrize("heads", [None, (2,), (1, 3)])
def test_every_edge_changes_what_a_lower_score_changes_by_hand(
    choices: dict[str, Any], context: str, heads: tuple[int, ...] | None
) -> None:
    request = request_of(config_of(**choices), context, edges=True, heads=heads)
    w, scores, v = by_hand(request)
    row = scores[:, POSITION]
    plain = output(w, (softmax(row)[:, None] @ v)[:, 0])
    expected = []
    for own in [range(HEADS)] if heads is None else [[head] for head in heads]:
        for key in range(v.shape[1]):
            cut = row.copy()
            cut[list(own), key] = -np.inf
            expected.append(relative(output(w, (softmax(cut)[:, None] @ v)[:, 0]), plain))
    record = layer_effects(request)
    assert effects_of(record) == pytest.approx(expected, abs=1e-12)
    assert record.effect.verified.ok
    assert [effect.masked for effect in record.effects] == [
        bool(choices) and key > POSITION for _ in heads or (0,) for key in range(v.shape[1])
    ]


def test_heads_are_removed_alone_and_together() -> None:
    request = request_of(config_of(), heads=(3, 1))
    w, scores, v = by_hand(request)
    z = (softmax(scores) @ v)[:, POSITION]
    without = z.copy()
    without[[1, 3]] = 0
    record = layer_effects(request)
    assert [(effect.head, effect.heads) for effect in record.effects] == [(1, ()), (3, ()), (None, ((0, 1), (0, 3)))]
    assert record.effects[2].d_output == pytest.approx(relative(output(w, without), output(w, z)), abs=1e-12)


def test_another_position_changes_nothing() -> None:
    assert effects_of(layer_effects(request_of(config_of(), at=POSITION + 1))) == [0.0] * HEADS
    here = layer_effects(request_of(config_of(), at=POSITION))
    assert effects_of(here) == pytest.approx(effects_of(layer_effects(request_of(config_of()))), abs=1e-12)
    assert here.effect.verified.n == HEADS


def test_many_batches_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(config_of(), edges=True, heads=(0, 2))
    one = effects_of(layer_effects(request))
    monkeypatch.setattr(effect_layer, "_ROWS_AT_ONCE", 5)
    assert effects_of(layer_effects(request)) == pytest.approx(one, abs=1e-12)


@pytest.mark.parametrize("edges", [True, False])
def test_a_removal_of_something_else_is_not_verified(edges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIns, "of", lambda given, removal, head: given.untouched[removal.layer][0, head] / 2)
    monkeypatch.setattr(effect_layer, "softmax_without", lambda row, is_cut, _: row.exp().masked_fill(is_cut, 0.0))
    assert not layer_effects(request_of(config_of(), edges=edges)).effect.verified.ok


def test_dropout_and_several_texts_are_refused() -> None:
    with pytest.raises(UsageError):
        layer_effects(request_of(config_of(dropout=0.1, train=True)))
    several = encode([TEXT, CONTEXT], config_of())
    with pytest.raises(UsageError):
        layer_effects(LayerEffectRequest(layer_request(several, config_of())))
