"""The walkthrough of an attention of a checkpoint: its tensors in their order, with their real shapes and numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from support import model_families
from support.model_families import (
    BASE,
    GROUPED,
    K_LEN,
    N_HEADS,
    PLAIN,
    Q_LEN,
    eager_patterns,
    ids_of,
    inputs_of,
    keywords_of,
    loaded_of,
    made,
    run_plain,
    sequence_of,
    sequences_of,
    tiny,
)
from torch import Tensor, nn

from mhacli.adapters.hf.inputs import make_inputs
from mhacli.compute.checkpoint.layers import CheckpointRunRequest
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.compute.checkpoint.trace import walk_checkpoint
from mhacli.errors import MhaError, UsageError
from mhacli.requests.layer import CellIndex
from mhacli.results.record import storage
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.results.record.record import Record
from mhacli.spec.tokens import AttentionKind

BATCH, LAYER = 2, 1
TOLERANCE = 5e-5
SCORED = ("q", "k", "v", "qk", "scores", "pattern", "z")
WITH_MASK = ("q", "k", "v", "qk", "mask", "scores", "pattern", "z")
WITH_SINKS = ("q", "k", "v", "qk", "mask", "sinks", "scores", "pattern", "z")
SPLIT = ("q_proj", "k_proj", "v_proj")
OF_T5 = ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v")
ALBERT = {**BASE, **PLAIN, "embedding_size": 24}


@dataclass(frozen=True)
class Walked:
    """Where the attention is, and what it makes before, inside and after. `index` counts all attentions of a pass."""

    root: str
    before: tuple[str, ...]
    inside: tuple[str, ...]
    after: tuple[str, ...]
    index: int = LAYER
    kind: AttentionKind | None = None


CASES = {
    "gpt2": Walked("h.1.attn", ("c_attn",), SCORED, ("c_proj",)),
    "llama": Walked("layers.1.self_attn", SPLIT, SCORED, ("o_proj",)),
    "gpt_neox": Walked("layers.1.attention", ("query_key_value",), SCORED, ("dense",)),
    "modernbert": Walked("layers.1.attn", ("Wqkv",), WITH_MASK, ("Wo",)),
    "bert": Walked("encoder.layer.1.attention", ("self.query", "self.key", "self.value"), SCORED,
                   ("output.dense", "output.LayerNorm")),
    "t5-encoder": Walked("encoder.block.1.layer.0", ("layer_norm", *OF_T5), SCORED, ("SelfAttention.o",), 1, "encoder"),
    "t5-decoder": Walked("decoder.block.1.layer.0", ("layer_norm", *OF_T5), SCORED, ("SelfAttention.o",), 4, "decoder"),
    "t5-cross": Walked("decoder.block.1.layer.1.EncDecAttention", ("q", "k", "v"), SCORED, ("o",), 5, "cross"),
    "gpt_oss": Walked("layers.1.self_attn", SPLIT, WITH_SINKS, ("o_proj",)),
    "bloom": Walked("h.1.self_attention", ("query_key_value",), ("scores", "pattern", "z"), ("dense",)),
    "albert": Walked("encoder.albert_layer_groups.0.albert_layers.0.attention", ("query", "key", "value"), SCORED,
                     ("dense", "LayerNorm")),
}  # fmt: skip
SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "gpt2": (4, 4, Q_LEN, Q_LEN, 12),
    "llama": (4, 2, Q_LEN, Q_LEN, 12),
    "gpt_neox": (4, 4, Q_LEN, Q_LEN, 12),
    "modernbert": (4, 4, Q_LEN, Q_LEN, 12),
    "bert": (4, 4, Q_LEN, Q_LEN, 12),
    "t5-encoder": (4, 4, K_LEN, K_LEN, 12),
    "t5-decoder": (4, 4, Q_LEN, Q_LEN, 12),
    "t5-cross": (4, 4, Q_LEN, K_LEN, 12),
    "gpt_oss": (4, 2, Q_LEN, Q_LEN, 16),
    "bloom": (4, 4, Q_LEN, Q_LEN, 12),
    "albert": (4, 4, Q_LEN, Q_LEN, 12),
}
"""Heads, kv heads, queries, keys and the width of a head, by the configs of the families."""


@pytest.fixture(scope="module", autouse=True)
def albert() -> Any:
    """One more family, of which one module stands for every layer."""
    families = model_families.FAMILIES
    families["albert"] = model_families.Family("albert", ALBERT, "registry", "sdpa", "flash", causal=False)
    yield
    del families["albert"]


def run_of(name: str, kind: AttentionKind | None = None, layer: int = LAYER) -> CheckpointRun:
    return CheckpointRun(loaded_of(tiny(name)), inputs_of(name), CheckpointRunRequest(HeadsRequest(), ((kind, layer),)))


@functools.cache
def walked(case: str) -> Record:
    return walk_checkpoint(run_of(case.partition("-")[0], CASES[case].kind), values=True)


@functools.cache
def heard(case: str) -> list[tuple[str, nn.Module, Tensor]]:
    """What the parts of the attention give in a pass that nobody else watches, in the order of execution."""
    name = case.partition("-")[0]
    model, found = tiny(name), []
    top, counted = model.get_submodule(CASES[case].root), [0]

    def begin(*_: Any) -> None:
        counted[0] += 1

    def told(part: str, module: nn.Module) -> Any:
        return lambda _m, _i, out: found.append((counted[0], part, module, out)) if isinstance(out, Tensor) else None

    handles = [top.register_forward_pre_hook(begin)]
    for part, module in top.named_modules():
        if not list(module.children()) and not isinstance(module, (nn.Dropout, nn.Identity)):
            handles.append(module.register_forward_hook(told(part, module)))
    run_plain(model, keywords_of(name))
    for handle in handles:
        handle.remove()
    time = LAYER + 1 if case == "albert" else 1  # one module is called for every layer
    return [(part, module, out) for call, part, module, out in found if call == time]


@pytest.mark.parametrize("case", CASES)
def test_tensors_come_in_the_order_in_which_they_are_made(case: str) -> None:
    own = CASES[case]
    assert [step.site for step in walked(case).trace] == ["x", *own.before, *own.inside, *own.after]
    assert [part for part, _, _ in heard(case)] == [*own.before, *own.after]


@pytest.mark.parametrize("case", CASES)
def test_every_part_has_the_shape_and_the_numbers_that_it_gives_to_others(case: str) -> None:
    own, record = CASES[case], walked(case)
    steps = [*record.trace[1 : 1 + len(own.before)], *record.trace[len(record.trace) - len(own.after) :]]
    for step, (part, module, out) in zip(steps, heard(case), strict=True):
        assert (step.site, step.shape, step.dtype) == (part, tuple(out.shape), "float32")
        assert step.bytes == 4 * out.numel()
        assert step.strides == out.stride()
        assert step.values is not None
        told = (step.values.min, step.values.max, step.values.mean)
        assert told == pytest.approx((out.min().item(), out.max().item(), out.mean().item()), abs=TOLERANCE)
        assert [(p.name, p.shape) for p in step.parameters] == [
            (f"{part}.{name}", tuple(p.shape)) for name, p in module.named_parameters()
        ]


@pytest.mark.parametrize("case", CASES)
def test_every_axis_of_a_tensor_has_a_word(case: str) -> None:
    sizes = {"batch": BATCH, "query": SHAPES[case][2], "key": SHAPES[case][3], "d_model": 48}
    for step in walked(case).trace:
        assert len(step.axes) == len(step.shape), step.site
        for word, size in zip(step.axes, step.shape, strict=True):
            if word in sizes and step.site != "mask":
                assert sizes[word] == size, step.site


@pytest.mark.parametrize("case", CASES)
def test_what_attention_reads_and_gives_has_the_sizes_of_the_config(case: str) -> None:
    n_heads, n_kv_heads, n_queries, n_keys, d_head = SHAPES[case]
    square = (BATCH, n_heads, n_queries, n_keys)
    expected = {
        "q": (BATCH, n_heads, n_queries, d_head), "k": (BATCH, n_kv_heads, n_keys, d_head),
        "v": (BATCH, n_kv_heads, n_keys, d_head), "qk": square, "scores": square, "pattern": square,
        "z": (BATCH, n_heads, n_queries, d_head), "sinks": (n_heads,), "mask": (BATCH, 1, n_queries, n_keys),
    }  # fmt: skip
    own = CASES[case]
    inside = walked(case).trace[1 + len(own.before) :][: len(own.inside)]
    assert {step.site: step.shape for step in inside} == {site: expected[site] for site in own.inside}


@pytest.mark.parametrize("case", CASES)
def test_the_last_product_is_the_output_projection_of_z(case: str) -> None:
    """What it gives is its weights times the heads of z side by side, which stand in the values that z sums up."""
    own = CASES[case]
    name, module, out = heard(case)[len(own.before)]
    assert name == own.after[0]
    record = walked(case)
    products = [step for step in record.trace if any(len(p.shape) == 2 for p in step.parameters)]
    assert products[-1].site == name
    weights = next(p for p in module.parameters() if p.ndim == 2)
    n_heads, _, n_queries, _, d_head = SHAPES[case]
    assert {*weights.shape} == {48, n_heads * d_head}
    n_biases = len(list(module.parameters())) - 1
    assert products[-1].flops == 2 * BATCH * n_queries * weights.numel() + n_biases * out.numel()


@pytest.mark.parametrize("case", [case for case in CASES if case != "albert"])
def test_the_pattern_is_the_one_that_the_family_returns(case: str) -> None:
    name = case.partition("-")[0]
    pattern = eager_patterns(name, keywords_of(name))[CASES[case].index]
    values = next(step.values for step in walked(case).trace if step.site == "pattern")
    assert values is not None
    told = (values.max, values.mean, values.std)
    expected = (pattern.max().item(), pattern.mean().item(), pattern.double().std(correction=0).item())
    assert told == pytest.approx(expected, abs=TOLERANCE)


def test_a_record_of_a_walk_is_of_that_layer_alone_and_survives_its_file(tmp_path: Any) -> None:
    record = walked("llama")
    assert [layer.layer for layer in record.layers] == [LAYER]
    assert {head.layer for head in record.heads} == {LAYER}
    record.save(str(tmp_path / "r"))
    assert storage.load(str(tmp_path / "r")).trace == record.trace


def test_without_a_choice_the_first_layer_is_walked_and_without_values_no_numbers_are_told() -> None:
    run = CheckpointRun(loaded_of(tiny("gpt2")), inputs_of("gpt2"), CheckpointRunRequest(HeadsRequest()))
    record = walk_checkpoint(run)
    assert record.layers[0].name == "h.0.attn"
    assert {step.values for step in record.trace} == {None}
    assert record.cell is None


@pytest.mark.parametrize(("name", "layer"), [("gpt2", 3), ("llama", 7)])
def test_a_layer_that_is_not_there_is_refused_with_those_that_are(name: str, layer: int) -> None:
    with pytest.raises(MhaError) as caught:
        walk_checkpoint(run_of(name, layer=layer))
    assert caught.value.code == "no-layer"


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_a_walk_leaves_no_hook_behind(name: str) -> None:
    model = tiny(name)
    walk_checkpoint(run_of(name))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ------------------------------------------------------------------------------------------------------------- the rotation


@pytest.mark.parametrize("name", ["gemma3_text", "modernbert", "llama"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_base_of_the_rotation_is_that_of_the_layers_type(name: str, layer: int) -> None:
    """The second angle of a type is base^(−2/d), so its inverse frequency tells the base."""
    model = tiny(name)
    types = getattr(model.config, "layer_types", None)
    buffers = dict(model.rotary_emb.named_buffers())
    inverse = buffers["inv_freq" if types is None or "inv_freq" in buffers else f"{types[layer]}_inv_freq"]
    d_head = 2 * len(inverse)
    base = inverse[1].item() ** (-d_head / 2)
    steps = {step.site: step for step in walk_checkpoint(run_of(name, layer=layer)).trace}
    for site in ("q", "k"):
        normed = ", normed" if name == "gemma3_text" else ""
        told = steps[site].formula
        assert told.startswith(
            f"{site} = its projection{normed}, split into heads, rotated by its position (RoPE, base "
        )
        assert float(told.rpartition(" ")[2].rstrip(")")) == pytest.approx(base, rel=1e-4)
    assert "turned" not in steps["v"].formula


def test_the_bases_of_two_types_differ() -> None:
    for name in ("gemma3_text", "modernbert"):
        told = {
            next(step.formula for step in walk_checkpoint(run_of(name, layer=layer)).trace if step.site == "q")
            for layer in (0, 1)
        }
        assert len(told) == 2


# ----------------------------------------------------------------------------------------------------------------- the cell

PLACE = CellIndex(1, 2, 8, 5)


def entering(model: Any, root: str, keywords: Mapping[str, Tensor]) -> np.ndarray:
    """The rows that enter an attention."""
    found: list[Tensor] = []
    module = model.get_submodule(root)
    handle = module.register_forward_pre_hook(
        lambda _m, args, kwargs: found.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    run_plain(model, keywords)
    handle.remove()
    rows: np.ndarray = found[0].double().numpy()
    return rows


def turned(rows: np.ndarray, base: float) -> np.ndarray:
    """Rows `[token, d]` rotated by their places: halves are the two sides of each plane (GPT-NeoX' way)."""
    half = rows.shape[-1] // 2
    angles = np.arange(len(rows))[:, None] * base ** (-np.arange(half) / half)
    one, two = rows[:, :half], rows[:, half:]
    return np.concatenate([one * np.cos(angles) - two * np.sin(angles), two * np.cos(angles) + one * np.sin(angles)], 1)


def of_gpt2(model: Any, x: np.ndarray, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    part = model.h[LAYER].attn.c_attn
    made_ = x @ part.weight.double().numpy() + part.bias.double().numpy()
    q, k, v = (made_[:, 48 * n + 12 * head : 48 * n + 12 * (head + 1)] for n in range(3))
    return q, k, v


def of_llama(model: Any, x: np.ndarray, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    part, base = model.layers[LAYER].self_attn, model.config.rope_parameters["rope_theta"]

    def rows(name: str, own: int) -> np.ndarray:
        return x @ getattr(part, name).weight.double().numpy()[12 * own : 12 * (own + 1)].T

    shared = head // 2
    return turned(rows("q_proj", head), base), turned(rows("k_proj", shared), base), rows("v_proj", shared)


@pytest.mark.parametrize(("case", "make"), [("gpt2", of_gpt2), ("llama", of_llama)])
def test_a_cell_is_followed_from_the_rows_that_enter_to_the_result(case: str, make: Any) -> None:
    model = tiny(case)
    x = entering(model, CASES[case].root, keywords_of(case))
    cell = walk_checkpoint(run_of(case), place=PLACE).cell
    assert cell is not None
    q, k, v = make(model, x[PLACE.sequence], PLACE.head)
    i, j = PLACE.query, PLACE.key
    scores = (k[: i + 1] @ q[i]) / math.sqrt(12)
    shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    assert (cell.sequence, cell.head, cell.query, cell.key) == (1, 2, 8, 5)
    assert cell.q == pytest.approx(q[i], abs=TOLERANCE)
    assert cell.k == pytest.approx(k[j], abs=TOLERANCE)
    assert cell.v == pytest.approx(v[j], abs=TOLERANCE)
    assert cell.qk == pytest.approx(q[i] @ k[j], abs=TOLERANCE)
    assert cell.scale == pytest.approx(12**-0.5)
    assert (cell.softcap, cell.allowed, cell.parts) == (None, True, ())
    assert cell.score == pytest.approx(scores[j], abs=TOLERANCE)
    assert cell.scores_row[: i + 1] == pytest.approx(scores, abs=TOLERANCE)
    assert cell.scores_row[i + 1 :] == (None, None)
    assert cell.pattern_row == pytest.approx([*shares, 0, 0], abs=TOLERANCE)
    assert cell.share == pytest.approx(shares[j], abs=TOLERANCE)
    assert cell.z == pytest.approx(shares @ v[: i + 1], abs=TOLERANCE)


def test_a_cell_that_is_not_allowed_has_no_score_and_no_share() -> None:
    cell = walk_checkpoint(run_of("gpt2"), place=CellIndex(0, 0, 3, 9)).cell
    assert cell is not None
    assert (cell.allowed, cell.score, cell.share) == (False, None, 0.0)


@pytest.mark.parametrize("case", ["gpt_oss", "t5-decoder", "t5-cross", "modernbert"])
def test_a_cell_of_any_family_adds_up_and_is_the_familys_own(case: str) -> None:
    name = case.partition("-")[0]
    cell = walk_checkpoint(run_of(name, CASES[case].kind), place=PLACE).cell
    assert cell is not None
    row = eager_patterns(name, keywords_of(name))[CASES[case].index][PLACE.sequence, PLACE.head, PLACE.query]
    assert cell.pattern_row == pytest.approx(row.tolist(), abs=TOLERANCE)
    assert cell.share == cell.pattern_row[PLACE.key]
    assert cell.score == cell.scores_row[PLACE.key]
    dot = sum(a * b for a, b in zip(cell.q, cell.k, strict=True))
    assert cell.qk == pytest.approx(dot, abs=TOLERANCE)
    added = sum(part.value for part in cell.parts)
    assert cell.score == pytest.approx(cell.scale * dot + added, abs=TOLERANCE)
    assert bool(cell.parts) == (case == "t5-decoder")
    others = [j for j, score in enumerate(cell.scores_row) if score is not None and j != PLACE.key]
    for j in others:  # a sink takes its part of all of them
        ratio = math.exp(cell.scores_row[j] - cell.score)
        assert cell.pattern_row[j] == pytest.approx(cell.share * ratio, abs=TOLERANCE)


def test_places_of_a_text_padded_on_the_left_count_its_own_tokens() -> None:
    model = tiny("llama")
    long, short = sequence_of([5, 6, 7, 8, 9, 10]), sequence_of([11, 12, 13])
    both = make_inputs(model, (long, short), None, "left", 0)
    alone = make_inputs(model, (short,), None, "left", 0)
    wanted = CheckpointRunRequest(HeadsRequest(), ((None, LAYER),))
    padded = walk_checkpoint(CheckpointRun(loaded_of(model), both, wanted), place=CellIndex(1, 2, 2, 1)).cell
    single = walk_checkpoint(CheckpointRun(loaded_of(model), alone, wanted), place=CellIndex(0, 2, 2, 1)).cell
    assert padded is not None
    assert single is not None
    assert padded.pattern_row == pytest.approx(single.pattern_row, abs=TOLERANCE)
    assert padded.v == pytest.approx(single.v, abs=TOLERANCE)
    assert padded.z == pytest.approx(single.z, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "place", "message"),
    [
        ("gpt2", CellIndex(2, 0, 0, 0), "--sequence 2 is out of range: 0 to 1"),
        ("gpt2", CellIndex(0, N_HEADS, 0, 0), "--cell 4,0,0: head 4 is out of range: 0 to 3"),
        ("gpt2", CellIndex(0, 0, Q_LEN, 0), "--cell 0,11,0: query 11 is out of range: 0 to 10"),
        ("gpt2", CellIndex(0, 0, 0, Q_LEN), "--cell 0,0,11: key 11 is out of range: 0 to 10"),
        ("t5-cross", CellIndex(0, 0, Q_LEN, 0), "--cell 0,11,0: query 11 is out of range: 0 to 10"),
        ("t5-cross", CellIndex(0, 0, 0, K_LEN), "--cell 0,0,13: key 13 is out of range: 0 to 12"),
        ("bloom", CellIndex(0, 0, 0, 0),
         "--cell needs the layer's queries and keys, and only its softmax could be captured"),
    ],
)  # fmt: skip
def test_a_cell_that_does_not_exist_or_cannot_be_followed_is_refused(case: str, place: CellIndex, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        walk_checkpoint(run_of(case.partition("-")[0], CASES[case].kind), place=place)
    assert caught.value.message == message


def test_one_module_that_stands_for_every_layer_is_heard_each_time_anew() -> None:
    """The rows that enter differ from layer to layer, and the last of them come out of the last."""
    model = made("albert", ALBERT)
    steps = [walk_checkpoint(run_of("albert", layer=layer), values=True).trace for layer in range(3)]
    entered: list[Tensor] = []
    part = model.get_submodule(CASES["albert"].root)
    part.register_forward_pre_hook(lambda _m, args: entered.append(args[0]))
    run_plain(model, keywords_of("albert"))
    for trace, x in zip(steps, entered, strict=True):
        assert trace[0].values is not None
        assert trace[0].values.mean == pytest.approx(x.mean().item(), abs=TOLERANCE)
        assert trace[0].values.max == pytest.approx(x.max().item(), abs=TOLERANCE)


def test_a_layer_of_a_list_that_is_run_again_is_walked() -> None:
    """Its rows are those of that run of its module, which computes two layers."""
    choices = {"num_layers_per_stack": 2, "L_cycles": 2, "H_cycles": 1}
    model = made("hrm_text", {**GROUPED, **choices})
    entered: list[Tensor] = []
    model.get_submodule("L_module.layers.1.self_attn").register_forward_pre_hook(
        lambda _m, _args, keywords: entered.append(keywords["hidden_states"]), with_kwargs=True
    )
    run_plain(model, {"input_ids": ids_of(2, Q_LEN)})
    inputs = make_inputs(model, sequences_of(ids_of(2, Q_LEN)), None, "right", 0)
    run = CheckpointRun(loaded_of(model), inputs, CheckpointRunRequest(HeadsRequest(), layers=(("self", 3),)))
    record = walk_checkpoint(run, values=True)
    assert (record.layers[0].layer, record.layers[0].name) == (3, "L_module.layers.1.self_attn")
    assert record.trace[0].values is not None
    assert record.trace[0].values.max == pytest.approx(entered[1].max().item(), abs=TOLERANCE)
    assert record.trace[0].values.max != pytest.approx(entered[0].max().item(), abs=TOLERANCE)
