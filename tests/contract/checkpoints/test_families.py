"""Every family: inspection changes no bit of the outputs, and a record shows what the model itself
computed.

The pattern is compared with transformers' eager implementation, and z with what the output
projection reads.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import checkpoints, oracle, some
from support.checkpoints import FAMILIES, N_HEADS, PAIRS

import mhacli

Q_LEN, K_LEN = 11, 13
KEEP = ("pattern", "z", "scores", "qk")
TOLERANCE, Z_TOLERANCE = {"t5": 5e-5}, 2e-5
"""The scores of T5 are not scaled, and larger."""
OUTPUT_PROJECTION = re.compile(
    r"(att.*(c_proj|o_proj|out_proj|out_lin|output\.dense|Wo)|att\w*\.dense|Attention\.o)$"
)
"""Modules that read the heads' outputs side by side. Their parents are attentions."""
AT_PUSH = """
    gpt2 llama gemma2 gpt_oss falcon-alibi bloom bert modernbert deberta-v2 t5 whisper clip
""".split()
EVERY = some(FAMILIES, default=AT_PUSH)
SOFTCAPS, WITH_SINKS = {"gemma2": 2.0}, ("gpt_oss", "granite_swa", "inkling2_text")
POSITIONS = {
    "gpt2": "learned",
    "llama": "rope",
    "gptj": "rope-interleaved",
    "bloom": "alibi",
    "mpt": "alibi",
    "falcon": "rope",
    "falcon-alibi": "alibi",
    "t5": "relative",
    "deberta-v2": "relative",
    "bert": "learned",
    "opt": "learned",
    "modernbert": "rope",
    "bart": "learned",
}
STATISTICS = """
    entropy entropy_share effective_keys participation distance window_50 window_90 window_99
    sink leading diagonal previous duplicate induction near at_offset
""".split()


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Two texts of 11 tokens for a model of the family, and what else it reads."""
    generator = torch.Generator().manual_seed(2)
    ids, context = (torch.randint(3, 40, (2, n), generator=generator) for n in (Q_LEN, K_LEN))
    picture = torch.randn(2, 3, checkpoints.IMAGE, checkpoints.IMAGE, generator=generator)
    sound = torch.randn(2, 8, 2 * checkpoints.FRAMES, generator=generator)
    special = {
        "vit": {"pixel_values": picture},
        "clip": {"input_ids": ids, "pixel_values": picture},
        "whisper": {"input_features": sound, "decoder_input_ids": ids},
    }
    return special.get(
        name,
        {"input_ids": context, "decoder_input_ids": ids} if name in PAIRS else {"input_ids": ids},
    )


@torch.no_grad()
def run(model: Any, keywords: dict[str, torch.Tensor], **more: Any) -> Any:
    """The outputs of a pass without a cache."""
    return model(
        **keywords, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}), **more
    )


def tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """All tensors of an output, one after another."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (dict, tuple, list)):
        for part in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from tensors(part)


class Inspected(NamedTuple):
    """A record of a pass with its outputs, and of the same pass without inspection the outputs and
    z of each layer.
    """

    record: Any
    outputs: list[torch.Tensor]
    plain: list[torch.Tensor]
    z: list[np.ndarray]


@functools.cache
def inspected(name: str) -> Inspected:
    """A pass of the model of a family with its own implementation of attention."""
    model, merged = checkpoints.model(name), []
    handles = [
        module.register_forward_pre_hook(lambda _, given: merged.append(given[0].double().numpy()))
        for path, module in model.named_modules()
        if OUTPUT_PROJECTION.search(path)
    ]
    plain = list(tensors(run(model, inputs(name))))
    for handle in handles:
        handle.remove()
    with mhacli.inspecting(model, keep=KEEP) as seen:
        outputs = list(tensors(run(model, inputs(name))))
    rows = [each.reshape(2, each.size // each.shape[-1] // 2, n_heads(name), -1) for each in merged]
    return Inspected(seen.record, outputs, plain, [each.transpose(0, 2, 1, 3) for each in rows])


def n_heads(name: str) -> int:
    return int(FAMILIES[name].config.get("n_head", N_HEADS))


def kinds(name: str) -> list[tuple[str, int, int | None]]:
    """Kind, number and window of each attention of a family, in the order of execution."""
    if name == "clip":
        return [("encoder", layer, None) for layer in range(3)] + [
            ("self", layer, None) for layer in range(3)
        ]
    if name in PAIRS:
        decoder = [
            ("decoder", 0, None),
            ("cross", 0, None),
            ("decoder", 1, None),
            ("cross", 1, None),
        ]
        return [("encoder", 0, None), ("encoder", 1, None), *decoder]
    return [("self", layer, window) for layer, window in enumerate(FAMILIES[name].windows)]


def allowed(name: str, kind: str, window: int | None, n_queries: int, n_keys: int) -> np.ndarray:
    """The keys that a query may see. A window of a causal family counts the query itself, of
    another each side.
    """
    i, j = np.arange(n_queries)[:, None], np.arange(n_keys)
    if kind in ("encoder", "cross") or not (FAMILIES[name].causal or name == "clip"):
        return abs(i - j) <= (n_keys if window is None else window)
    return (j <= i) & (i - j < (n_keys if window is None else window))


@functools.cache
def expected(name: str) -> list[np.ndarray]:
    """The pattern of each layer as the family returns it, or by its formula where its `eager` is
    wrong.
    """
    if name == "falcon-alibi":
        return falcon_alibi()
    twin = checkpoints.model(name, attn_implementation="eager")
    outputs = run(twin, inputs(name), output_attentions=True)
    if name in PAIRS:
        both = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
        patterns = [*outputs.encoder_attentions, *(pattern for pair in both for pattern in pair)]
    elif name == "clip":
        patterns = [*outputs.vision_model_output.attentions, *outputs.text_model_output.attentions]
    else:
        patterns = [*outputs.attentions]
    arrays = [pattern.double().numpy() for pattern in patterns]
    return (
        arrays
        if FAMILIES[name].eager_is_right
        else [with_sink(name, i, array) for i, array in enumerate(arrays)]
    )


def with_sink(name: str, layer: int, pattern: np.ndarray) -> np.ndarray:
    """Of a family whose `eager` returns weights before the sink takes its part: the softmax with
    the sink's logit.

    A row of weights p is shorter by 1 − 1 / (1 + exp(sink − logsumexp)), which the scores of the
    record give.
    """
    (sinks,) = (
        p
        for path, p in checkpoints.model(name).named_parameters()
        if path.endswith(f"layers.{layer}.self_attn.sinks")
    )
    scores = inspected(name).record.arrays[f"layers.{layer}.scores"].astype(np.float64)
    assert np.abs(oracle.softmax(scores) - pattern).max() < 2e-6
    return oracle.softmax(scores, sinks.double().numpy())


def falcon_alibi() -> list[np.ndarray]:
    """softmax((q kᵀ + slope · key) / √d), masked: `eager` of this family adds ALiBi twice."""
    rows: list[np.ndarray] = []
    model = checkpoints.model("falcon-alibi")
    handles = [
        layer.self_attention.query_key_value.register_forward_hook(
            lambda *given: rows.append(given[2].double().numpy())
        )
        for layer in model.transformer.h
    ]
    run(model, inputs("falcon-alibi"))
    for handle in handles:
        handle.remove()
    patterns = []
    for projected in rows:
        q, k, v = projected.reshape(2, Q_LEN, N_HEADS, 3, 8).transpose(3, 0, 2, 1, 4)
        bias = np.array(oracle.slopes(N_HEADS))[:, None, None] * np.arange(Q_LEN) / math.sqrt(8)
        mask = np.tri(Q_LEN, dtype=bool)
        patterns.append(oracle.attention(q, k, v, bias=bias, allowed=mask).pattern)
    return patterns


# ----------------------------------------------------------------------------------- through Python


@pytest.mark.parametrize("name", EVERY)
def test_inspection_changes_no_bit_of_the_outputs_and_every_layer_is_verified(name: str) -> None:
    family, (record, outputs, plain, _) = FAMILIES[name], inspected(name)
    assert len(outputs) == len(plain) > 0
    assert all(torch.equal(one, other) for one, other in zip(outputs, plain, strict=True))
    assert record.self_check.ok
    assert [(layer.verified, layer.unverified) for layer in record.layers] == [(True, ())] * len(
        kinds(name)
    )
    assert [(layer.kind, layer.layer) for layer in record.layers] == [
        (kind, number) for kind, number, _ in kinds(name)
    ]
    assert record.model.without == ()
    for layer in record.layers:
        assert layer.n_heads == n_heads(name)
        assert layer.n_kv_heads == min(family.n_kv_heads, n_heads(name))
        assert (layer.softcap, layer.sinks) == (SOFTCAPS.get(name), name in WITH_SINKS)
    assert record.model.implementation == family.implementation
    assert record.model.positions == POSITIONS.get(name, record.model.positions)


@pytest.mark.parametrize("name", EVERY)
def test_pattern_visible_keys_and_z_are_those_of_the_family(name: str) -> None:
    """z is what the output projection reads, except that Inkling has a gate between them."""
    record, _, _, z = inspected(name)
    assert len(expected(name)) == len(kinds(name))
    for index, (pattern, (kind, _, window)) in enumerate(
        zip(expected(name), kinds(name), strict=True)
    ):
        arrays = record.of_layer(index).arrays
        cells = allowed(name, kind, window, *pattern.shape[2:])
        assert arrays["pattern"].shape == pattern.shape
        assert np.abs(arrays["pattern"] - pattern).max() < TOLERANCE.get(name, 5e-6)
        assert (arrays["allowed"] == cells).all()
        assert (arrays["pattern"][..., ~cells] == 0).all()
        assert (arrays["pattern"][..., cells] > 0).all()
        assert (np.isneginf(arrays["scores"]) == ~cells).all()
        assert name == "inkling2_text" or np.abs(arrays["z"] - z[index]).max() < Z_TOLERANCE
        if FAMILIES[name].implementation == "sdpa":
            qk, scores = (arrays[site].astype(np.float64) for site in ("qk", "scores"))
            assert np.abs(oracle.softmax(scores) - pattern).max() < TOLERANCE.get(name, 1e-5)
            is_plain = not record.layers[index].bias
            assert (
                not is_plain
                or np.abs((qk * record.layers[index].scale - scores)[..., cells]).max() < 1e-4
            )


def sides(record: Any, kind: str) -> tuple[oracle.Side, oracle.Side]:
    """The tokens of the queries and of the keys of an attention."""
    texts, context = (
        None
        if side is None
        else oracle.side([{"ids": text.ids} for text in side], record.config.padding)
        for side in (record.sequences, record.context)
    )
    queries = context if kind == "encoder" else texts
    keys = context if kind in ("encoder", "cross") else texts
    assert queries is not None
    assert keys is not None
    return queries, keys


def require_near(head: Any, means: dict[str, Any], tolerance: float) -> None:
    """Every mean of a head is the one that the definitions give."""
    for statistic in STATISTICS:
        mean = means[statistic]
        near = None if mean is None else pytest.approx(mean, rel=tolerance, abs=tolerance)
        assert getattr(head, statistic) == near, statistic


@pytest.mark.parametrize("name", EVERY)
def test_the_statistics_of_each_head_are_those_of_the_pattern_of_the_family(name: str) -> None:
    record, tolerance = inspected(name).record, 2e-4 if name == "t5" else 2e-5
    for index, (kind, _, window) in enumerate(kinds(name)):
        pattern, heads = expected(name)[index], record.of_layer(index).heads
        cells = np.broadcast_to(
            allowed(name, kind, window, *pattern.shape[2:]), pattern[:, 0].shape
        )
        marks = oracle.marked(*sides(record, kind), is_self=kind != "cross")
        assert [head.head for head in heads] == list(range(pattern.shape[1]))
        for head in heads:
            weights = pattern[:, head.head]
            has_sink = head.learned_sink is not None
            means = oracle.head_statistics(weights, cells, marks, head.offset, has_sink=has_sink)
            if has_sink:
                assert head.learned_sink == pytest.approx(
                    1 - weights.sum(axis=-1).mean(), abs=tolerance
                )
            require_near(head, means, tolerance)
        uniform = oracle.head_statistics(oracle.uniform(cells), cells, marks, heads[0].offset)
        require_near(heads[0].uniform, uniform, 1e-5)
        means = oracle.head_statistics(pattern[:, 0], cells, marks, heads[0].offset)
        means |= {"positional": heads[0].positional, "also_at": heads[0].also_at}
        kind_of_head, certainty = oracle.head_type(means, uniform)
        assert heads[0].kind == kind_of_head
        assert heads[0].certainty == pytest.approx(certainty, abs=2e-3)


def test_a_layer_with_a_softcap_bends_its_scores() -> None:
    record = inspected("gemma2").record
    qk, scores = (record.arrays[f"layers.1.{site}"].astype(np.float64) for site in ("qk", "scores"))
    cells = np.broadcast_to(np.tri(Q_LEN, dtype=bool), qk.shape)
    assert np.abs((2 * np.tanh(qk * 16**-0.5 / 2) - scores)[cells]).max() < 1e-5
    assert np.abs(scores[cells]).max() > 1.9


def test_each_tower_of_clip_can_be_inspected_alone() -> None:
    model = checkpoints.model("clip")
    with mhacli.inspecting(model.text_model, keep=["pattern"]) as seen:
        run(model, inputs("clip"))
    theirs = run(
        checkpoints.model("clip", attn_implementation="eager"),
        inputs("clip"),
        output_attentions=True,
    )
    for index, pattern in enumerate(theirs.text_model_output.attentions):
        assert np.abs(seen.record.arrays[f"layers.{index}.pattern"] - pattern.numpy()).max() < 5e-6
