"""People's layouts of attention weights: to ours and back bit for bit, and what the family's own module computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mhacli.attention.convert import agreement, from_ours, to_ours, with_all_biases
from mhacli.checkpoints.conversion import choices_of
from mhacli.checkpoints.families import (
    FAMILIES,
    LAYOUTS,
    expected_shapes,
    layout_named,
    layout_of,
    require_fitting_heads,
)
from mhacli.checkpoints.folder import Checkpoint, StoredTensor
from mhacli.checkpoints.head_counts import ProjectionSizes, sizes_of
from mhacli.checkpoints.tensor_names import (
    chosen_stack,
    find_layer,
    find_table,
    layers_in,
    require_shapes,
    sizes_from_shapes,
    stacks_in,
)
from mhacli.errors import MhaError, UsageError

GROUPED = ProjectionSizes(n_heads=6, n_kv_heads=2, d_head=5, d_v=7, d_model=11, d_input=13)
FUSED_GROUPED = ProjectionSizes(n_heads=6, n_kv_heads=2, d_head=5, d_v=5, d_model=11, d_input=13)
SAME = ProjectionSizes(n_heads=8, n_kv_heads=8, d_head=5, d_v=5, d_model=11, d_input=13)
ONE = ProjectionSizes(n_heads=6, n_kv_heads=1, d_head=5, d_v=5, d_model=11, d_input=13)


def sizes_for(layout):
    if layout.kv_heads == "any":
        return GROUPED if len(layout.qkv) == 3 or layout.order == "stack" else FUSED_GROUPED
    return SAME if layout.kv_heads == "same" else ONE


def tensors_of(layout, sizes, *, biases=True):
    """Different numbers in every place, by the layout's own names and shapes."""
    shapes = expected_shapes(layout, sizes)
    generator = torch.Generator().manual_seed(4)
    wanted = {**shapes.weights, **(shapes.biases if biases else {})}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in wanted.items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].is_contiguous()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "none"])
def test_every_bit_comes_back_from_ours(name, biases):
    layout = LAYOUTS[name]
    sizes = sizes_for(layout)
    tensors = tensors_of(layout, sizes, biases=biases)
    ours = to_ours(tensors, layout, sizes)
    same(from_ours(ours, layout, sizes), tensors)
    assert {n: tuple(t.shape) for n, t in ours.items() if n.endswith("weight")} == {
        "q_proj.weight": (sizes.n_heads * sizes.d_head, sizes.d_input),
        "k_proj.weight": (sizes.n_kv_heads * sizes.d_head, sizes.d_input),
        "v_proj.weight": (sizes.n_kv_heads * sizes.d_v, sizes.d_input),
        "o_proj.weight": (sizes.d_model, sizes.n_heads * sizes.d_v),
    }


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("biases", [True, False], ids=["biases", "none"])
def test_ours_computes_what_the_layout_computes_by_its_own_formula(name, biases):
    layout = LAYOUTS[name]
    sizes = sizes_for(layout)
    tensors = tensors_of(layout, sizes, biases=biases)
    ours = to_ours(tensors, layout, sizes)
    found = agreement(tensors, ours, layout, sizes)
    assert found.ok
    assert found.max_abs_error < 1e-12 * found.largest
    for part in "qkvo":  # two rows of any projection exchanged are noticed
        wrong = dict(ours)
        wrong[f"{part}_proj.weight"] = ours[f"{part}_proj.weight"].roll(1, dims=0)
        assert not agreement(tensors, wrong, layout, sizes).ok


@pytest.mark.parametrize(
    ("order", "rows"),
    [
        # two heads of width 2; the fused rows are numbered from 0, and each line says whose they are
        ("gpt2", ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])),
        ("modernbert", ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])),
        ("gpt_neox", ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])),
        ("bloom", ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])),
        ("falcon-new-decoder", ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])),
    ],
)
def test_by_hand_two_heads_are_cut_out_of_a_fused_matrix(order, rows):
    layout, sizes = LAYOUTS[order], ProjectionSizes(2, 2, 2, 2, 4, 3)
    tensors = tensors_of(layout, sizes)
    fused, bias = tensors[layout.qkv[0]], tensors[layout.qkv_bias[0]]
    matrix = fused.T if layout.transposed else fused
    ours = to_ours(tensors, layout, sizes)
    for part, places in zip("qkv", rows, strict=True):
        assert torch.equal(ours[f"{part}_proj.weight"], matrix[places]), part
        assert torch.equal(ours[f"{part}_proj.bias"], bias[places]), part


def test_by_hand_groups_and_blocks_are_cut_out_of_a_fused_matrix():
    grouped = ProjectionSizes(4, 2, 1, 1, 4, 3)  # each of two kv heads: two queries, a key, a value
    tensors = {"query_key_value.weight": torch.arange(8.0)[:, None].expand(8, 3), "dense.weight": torch.zeros(4, 4)}
    ours = to_ours(tensors, LAYOUTS["falcon-new-decoder"], grouped)
    assert [ours[f"{part}_proj.weight"][:, 0].tolist() for part in "qkv"] == [[0, 1, 4, 5], [2, 6], [3, 7]]
    blocks = ProjectionSizes(4, 4, 2, 2, 8, 3)  # four blocks of one head each: q, v, k
    tensors = {"qkv_proj.weight": torch.arange(24.0)[:, None].expand(24, 3), "out_proj.weight": torch.zeros(8, 8)}
    ours = to_ours(tensors, LAYOUTS["codegen"], blocks)
    assert ours["q_proj.weight"][:, 0].tolist() == [0, 1, 6, 7, 12, 13, 18, 19]
    assert ours["v_proj.weight"][:, 0].tolist() == [2, 3, 8, 9, 14, 15, 20, 21]
    assert ours["k_proj.weight"][:, 0].tolist() == [4, 5, 10, 11, 16, 17, 22, 23]
    one = ProjectionSizes(3, 1, 1, 1, 3, 2)  # multi-query: the queries, one key, one value
    tensors = {"query_key_value.weight": torch.arange(5.0)[:, None].expand(5, 2), "dense.weight": torch.zeros(3, 3)}
    ours = to_ours(tensors, LAYOUTS["falcon-multi-query"], one)
    assert [ours[f"{part}_proj.weight"][:, 0].tolist() for part in "qkv"] == [[0, 1, 2], [3], [4]]


@pytest.mark.parametrize("name", ["keras", "flax"])
def test_kernels_are_what_their_einsum_computes(name, normal):
    layout, sizes = LAYOUTS[name], GROUPED
    tensors = tensors_of(layout, sizes)
    ours, rows = to_ours(tensors, layout, sizes), normal(4, sizes.d_input)
    for part, full, n in (("q", "query", 6), ("k", "key", 2), ("v", "value", 2)):
        expected = torch.einsum("rm,mhd->rhd", rows, tensors[f"{full}/kernel"]) + tensors[f"{full}/bias"]
        found = nn.functional.linear(rows, ours[f"{part}_proj.weight"], ours[f"{part}_proj.bias"])
        torch.testing.assert_close(found.view(4, n, -1), expected)
    z, out = normal(4, 6, 7), layout.out
    expected = torch.einsum("rhd,hdm->rm", z, tensors[out])
    torch.testing.assert_close(nn.functional.linear(z.flatten(1), ours["o_proj.weight"]), expected)


@pytest.mark.parametrize("separate", [False, True])
def test_torch_s_own_module_gives_the_same_output(separate, normal):
    module = nn.MultiheadAttention(12, 3, batch_first=True).double()
    state = {name: normal(*tensor.shape) for name, tensor in module.state_dict().items()}
    module.load_state_dict(state)
    if separate:  # as the module stores keys of another width
        state |= dict(
            zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), state.pop("in_proj_weight").chunk(3), strict=True)
        )
    layout, sizes = LAYOUTS["torch-separate" if separate else "torch"], ProjectionSizes(3, 3, 4, 4, 12, 12)
    ours = to_ours(state, layout, sizes)
    rows = normal(1, 5, 12)
    expected, pattern = module(rows, rows, rows, average_attn_weights=False)
    q, k, v = (
        nn.functional.linear(rows, ours[f"{part}_proj.weight"], ours[f"{part}_proj.bias"]).view(5, 3, 4).transpose(0, 1)
        for part in "qkv"
    )
    shares = torch.softmax(q @ k.mT / 2, dim=-1)
    torch.testing.assert_close(shares[None], pattern)
    out = nn.functional.linear((shares @ v).transpose(0, 1).flatten(1), ours["o_proj.weight"], ours["o_proj.bias"])
    torch.testing.assert_close(out[None], expected)


def test_a_bias_without_a_place_is_dropped_as_zeros_and_refused_as_numbers():
    layout = LAYOUTS["qwen2"]
    tensors = tensors_of(layout, GROUPED)
    ours = to_ours(tensors, layout, GROUPED)
    assert "o_proj.bias" not in ours
    full = with_all_biases(ours)
    assert full["o_proj.bias"].tolist() == [0.0] * 11
    same(from_ours(full, layout, GROUPED), tensors)
    full["o_proj.bias"][3] = 1e-30
    with pytest.raises(MhaError) as caught:
        from_ours(full, layout, GROUPED)
    assert caught.value.message == "layout qwen2 has no o_proj.bias, and 1 of its numbers are not 0"
    with pytest.raises(MhaError, match=r"layout whisper has no k_proj\.bias"):
        from_ours({**full, "k_proj.bias": torch.ones(10)}, LAYOUTS["whisper"], GROUPED)


def test_a_layer_without_any_bias_stays_without():
    layout = LAYOUTS["llama"]
    ours = to_ours(tensors_of(layout, GROUPED, biases=False), layout, GROUPED)
    assert with_all_biases(ours).keys() == ours.keys()


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gpt2", GROUPED, "layout gpt2 has as many kv heads as heads, not 2 for 6"),
        ("gpt_bigcode", GROUPED, "layout gpt_bigcode has one kv head, not 2"),
        ("llama", ProjectionSizes(6, 4, 5, 5, 11, 11),
         "layout llama needs a multiple of its 4 kv heads, not 6 heads"),
        ("codegen", ProjectionSizes(6, 6, 5, 5, 11, 11), "layout codegen needs a multiple of 4 heads, not 6"),
        (
            "falcon-new-decoder", GROUPED,
            "layout falcon-new-decoder has values as wide as keys, not d_v 7 for d_head 5",
        ),
    ],
)  # fmt: skip
def test_heads_that_a_layout_cannot_hold_are_refused(name, sizes, message):
    with pytest.raises(MhaError) as caught:
        require_fitting_heads(LAYOUTS[name], sizes)
    assert caught.value.message == message
    with pytest.raises(MhaError, match="layout"):
        from_ours({}, LAYOUTS[name], sizes)


def test_missing_tensors_and_other_shapes_are_all_named():
    layout = LAYOUTS["phi3"]
    tensors = tensors_of(layout, GROUPED)
    tensors["o_proj.bias"] = torch.zeros(2)
    del tensors["qkv_proj.weight"]
    with pytest.raises(MhaError) as caught:
        to_ours(tensors, layout, GROUPED)
    assert caught.value.message == (
        "the tensors do not fit layout phi3: qkv_proj.weight [54, 13] is missing; o_proj.bias is [2], not [11]"
    )


# ------------------------------------------------------------------------------------------------ by name, never by shape


def checkpoint_with(*names, config=None, shapes=None):
    tensors = {name: StoredTensor(name, "f", "F32", (shapes or {}).get(name, (2, 2)), 0, 16) for name in names}
    return Checkpoint("m", config or {}, tensors, ())


def test_flags_decide_where_names_and_shapes_are_the_same():
    def name(**config):
        return layout_of(config, "m").name

    assert name(model_type="gpt_bigcode") == "gpt_bigcode"
    assert name(model_type="gpt_bigcode", multi_query=False) == "gpt_bigcode-per-head"
    assert name(model_type="falcon") == "falcon-multi-query"
    assert name(model_type="falcon", multi_query=False) == "falcon-per-head"
    assert name(model_type="falcon", multi_query=True, new_decoder_architecture=True) == "falcon-new-decoder"
    assert name(model_type="llava", text_config={"model_type": "llama"}) == "llama"


@pytest.mark.parametrize(
    ("config", "pieces"),
    [
        ({"model_type": "deepseek_v3"}, ["m: model_type deepseek_v3 is not supported: ", "kv_a_proj_with_mqa"]),
        ({"model_type": "xlnet"}, ["model_type xlnet", "r_w_bias"]),
        ({"model_type": "mamba"}, ["m: model_type 'mamba' is not known; known: gpt2, "]),
        ({"model_type": ["x"]}, ["model_type ['x'] is not known"]),
        ({}, ["the config has no model_type"]),
        ({"model_type": "albert", "num_hidden_groups": 2}, ["m: num_hidden_groups is 2; only 1 is supported"]),
    ],
)  # fmt: skip
def test_what_is_no_layout_of_ours_is_refused(config, pieces):
    with pytest.raises(MhaError) as caught:
        layout_of(config, "m")
    assert all(piece in caught.value.message for piece in pieces)


def test_a_layout_of_another_name_is_a_usage_error_with_the_names():
    with pytest.raises(UsageError) as caught:
        layout_named("gpt5")
    assert all(name in str(caught.value.hint) for name in LAYOUTS)
    assert {family.layout for family in FAMILIES.values()} <= set(LAYOUTS)


def test_a_layer_is_found_behind_any_prefix():
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "q_norm.weight", "rotary_emb.inv_freq")
    for prefix in ("", "model.", "model.language_model."):
        checkpoint = checkpoint_with(*(f"{prefix}layers.{i}.self_attn.{name}" for i in (0, 1, 11) for name in names))
        found = find_layer(checkpoint, LAYOUTS["llama"], 1)
        assert found.prefix == f"{prefix}layers.1.self_attn."
        assert found.tensors["q_proj.weight"].name == f"{prefix}layers.1.self_attn.q_proj.weight"
        assert found.unused == ("q_norm.weight",)
        assert found.notes == ("q_norm.weight is not part of the layer: it normalises queries before the dot product",)
        assert layers_in(checkpoint, LAYOUTS["llama"], "self") == (0, 1, 11)


def test_of_two_towers_that_of_words_is_meant_and_other_pairs_need_a_prefix():
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    both = checkpoint_with(*(f"{t}.layers.0.self_attn.{n}" for t in ("vision_model", "language_model") for n in names))
    assert find_layer(both, LAYOUTS["llama"], 0).prefix == "language_model.layers.0.self_attn."
    other = checkpoint_with(*(f"{t}.layers.0.self_attn.{n}" for t in ("left", "right") for n in names))
    with pytest.raises(UsageError) as caught:
        find_layer(other, LAYOUTS["llama"], 0)
    assert caught.value.message == "m has several prefixes: 'left.layers.0.self_attn.', 'right.layers.0.self_attn.'"
    assert find_layer(other, LAYOUTS["llama"], 0, prefix="right.layers.0.self_attn.").prefix.startswith("right")


def test_names_of_keras_come_with_slashes_or_dots_and_blocks_are_told_by_number():
    parts = ("query/kernel", "key/kernel", "value/kernel", "attention_output/kernel", "query/bias")
    names = [f"block_{i}/mha/{part}" for i in (0, 1, 10) for part in parts]
    for wanted in (names, [name.replace("/", ".") for name in names]):
        found = find_layer(checkpoint_with(*wanted), LAYOUTS["keras"], 1)
        assert found.tensors.keys() == set(parts)
        assert found.tensors["query/bias"].name == wanted[9]


def test_torch_modules_are_found_by_role():
    parts = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    names = [f"layers.{i}.{role}.{part}" for i in (0, 1) for role in ("self_attn", "multihead_attn") for part in parts]
    layout = LAYOUTS["torch"]
    assert find_layer(checkpoint_with(*names), layout, 1, stack="cross").prefix == "layers.1.multihead_attn."
    assert find_layer(checkpoint_with(*names), layout, 1, stack="self").prefix == "layers.1.self_attn."
    assert find_layer(checkpoint_with(*parts), layout, 0).prefix == ""


def test_a_stack_must_be_named_where_there_are_several():
    names = [f"{place}.{part}" for part in ("q.weight", "k.weight", "v.weight", "o.weight") for place in (
        "encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.1.EncDecAttention")]  # fmt: skip
    checkpoint, layout = checkpoint_with(*names), LAYOUTS["t5"]
    assert stacks_in(checkpoint, layout) == ("encoder", "cross")
    with pytest.raises(UsageError) as caught:
        chosen_stack(checkpoint, layout, None)
    assert caught.value.message == "m has several stacks: encoder, cross"
    with pytest.raises(UsageError, match="--stack self is not in layout t5, which has encoder, decoder, cross"):
        chosen_stack(checkpoint, layout, "self")


def test_a_layer_that_is_not_there_and_tensors_that_are_missing_are_told():
    names = [f"h.{i}.attn.{part}" for i in (0, 1) for part in ("c_attn.weight", "c_proj.weight")]
    with pytest.raises(UsageError, match="--layer 2 is not in m, which has 0 to 1"):
        find_layer(checkpoint_with(*names), LAYOUTS["gpt2"], 2)
    with pytest.raises(MhaError) as caught:
        find_layer(checkpoint_with(names[0]), LAYOUTS["gpt2"], 0)
    assert caught.value.message == "m lacks tensors of layout gpt2 under 'h.0.attn.': 'h.0.attn.c_proj.weight'"
    with pytest.raises(MhaError) as caught:
        find_layer(checkpoint_with("x\x1b"), LAYOUTS["gpt2"], 0)
    assert caught.value.message == (
        "m has no tensors of layout gpt2 such as transformer.h.0.attn.c_attn.weight: it has 'x\\x1b'"
    )


def test_a_name_that_only_ends_alike_is_another_place():
    names = [f"{place}.0.attn.{part}" for place in ("h", "path") for part in ("c_attn.weight", "c_proj.weight")]
    assert find_layer(checkpoint_with(*names), LAYOUTS["gpt2"], 0).prefix == "h.0.attn."
    assert layers_in(checkpoint_with(*names[2:]), LAYOUTS["gpt2"], "self") == ()


def test_shapes_and_heads_are_those_of_the_sizes():
    checkpoint = checkpoint_with("h.0.attn.c_attn.weight", "h.0.attn.c_proj.weight")
    found = find_layer(checkpoint, LAYOUTS["gpt2"], 0)
    with pytest.raises(MhaError) as caught:
        require_shapes(found, LAYOUTS["gpt2"], ProjectionSizes(2, 2, 3, 3, 6, 6), "m")
    assert caught.value.message == (
        "m has tensors of other sizes than its config gives (2 heads, 2 kv heads, d_head 3, d_model 6): "
        "h.0.attn.c_attn.weight is [2, 2], not [6, 18]; h.0.attn.c_proj.weight is [2, 2], not [6, 6]"
    )
    with pytest.raises(MhaError, match="as many kv heads as heads"):
        require_shapes(found, LAYOUTS["gpt2"], ProjectionSizes(2, 1, 3, 3, 6, 6), "m")


def test_a_table_is_the_only_tensor_of_its_name():
    names = ["transformer.wte.weight", "a.embed_tokens.weight", "language_model.embed_tokens.weight", "x.wpe.weight",
             "y.wpe.weight", "decoder.embed_positions.weight", "encoder.embed_positions.weight"]  # fmt: skip
    assert find_table(names, ("wte.weight",), "self") == "transformer.wte.weight"
    assert find_table(names, ("embed_tokens.weight",), "self") == "language_model.embed_tokens.weight"
    assert find_table(names, ("wpe.weight",), "self") is None
    assert find_table(names, ("shared.weight", "{tower}.embed_positions.weight"), "cross") == names[5]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].order != "kernels"])
def test_without_a_config_heads_and_shapes_give_the_sizes(name):
    layout = LAYOUTS[name]
    sizes = sizes_for(layout) if layout.order != "stack" or layout.kv_heads != "any" else FUSED_GROUPED
    shapes = {**expected_shapes(layout, sizes).weights}
    stack = next(iter(layout.stacks))
    prefix = layout.stacks[stack].stems[0].format(layer=0)
    checkpoint = checkpoint_with(*(prefix + n for n in shapes), shapes={prefix + n: s for n, s in shapes.items()})
    found = find_layer(checkpoint, layout, 0, stack=stack)
    assert sizes_from_shapes(found, layout, {"n_heads": sizes.n_heads}) == sizes
    with pytest.raises(UsageError, match="the number of heads is not known"):
        sizes_from_shapes(found, layout, {})


def test_heads_of_one_column_are_counted_from_the_shapes_of_a_fused_matrix():
    shapes = {"h.0.attn.c_attn.weight": (4, 6), "h.0.attn.c_proj.weight": (2, 4)}
    found = find_layer(checkpoint_with(*shapes, shapes=shapes), LAYOUTS["gpt2"], 0)
    assert sizes_from_shapes(found, LAYOUTS["gpt2"], {"n_heads": 2}) == ProjectionSizes(2, 2, 1, 1, 4, 4)


@pytest.mark.parametrize("odd", ["c_attn", "c_proj"])
def test_a_projection_that_is_no_matrix_is_refused(odd):
    shapes = {"h.0.attn.c_attn.weight": (4, 6), "h.0.attn.c_proj.weight": (2, 4), f"h.0.attn.{odd}.weight": (2, 2, 2)}
    found = find_layer(checkpoint_with(*shapes, shapes=shapes), LAYOUTS["gpt2"], 0)
    with pytest.raises(MhaError) as caught:
        sizes_from_shapes(found, LAYOUTS["gpt2"], {"n_heads": 2})
    assert caught.value.code == "bad-file"


# -------------------------------------------------------------------------------------------------- what a config says


EIGHT = ProjectionSizes(4, 4, 8, 8, 32, 32)


def said(config, stack="self", layer=0, sizes=EIGHT):
    return choices_of(config, stack, layer, sizes)


@pytest.mark.every_row
@pytest.mark.parametrize(
    ("config", "layer", "fields"),
    [
        ({"model_type": "gpt2"}, 0, {"positions": "learned", "causal": True}),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, 3,
         {"positions": "learned", "causal": True, "scale": 8**-0.5 / 4}),
        ({"model_type": "gpt2", "scale_attn_weights": False}, 3, {"positions": "learned", "causal": True, "scale": 1.0}),
        ({"model_type": "bert"}, 0, {"positions": "learned"}),
        ({"model_type": "bert", "is_decoder": True}, 0, {"positions": "learned", "causal": True}),
        ({"model_type": "llama", "rope_theta": 5e5}, 0, {"positions": "rope", "rope_theta": 5e5, "causal": True}),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}}, 0,
         {"positions": "rope", "rope_theta": 3e4, "causal": True}),
        ({"model_type": "mistral", "sliding_window": 16}, 1,
         {"positions": "rope", "rope_theta": 1e4, "causal": True, "window": (15, 0)}),
        ({"model_type": "mistral", "sliding_window": None}, 1, {"positions": "rope", "rope_theta": 1e4, "causal": True}),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 0,
         {"positions": "rope", "rope_theta": 1e4, "causal": True}),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 1,
         {"positions": "rope", "rope_theta": 1e4, "causal": True, "window": (15, 0)}),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16}, 1,
         {"positions": "rope", "rope_theta": 1e4, "causal": True}),
        ({"model_type": "gemma2", "sliding_window": 16, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0}, 0,
         {"positions": "rope", "rope_theta": 1e4, "causal": True, "window": (15, 0), "scale": 0.0625, "softcap": 50.0}),
        ({"model_type": "gemma2", "sliding_window": 16}, 1, {"positions": "rope", "rope_theta": 1e4, "causal": True}),
        ({"model_type": "gemma3_text", "sliding_window": 16, "rope_local_base_freq": 1e4, "rope_theta": 1e6}, 4,
         {"positions": "rope", "rope_theta": 1e4, "causal": True, "window": (15, 0)}),
        ({"model_type": "gemma3_text", "sliding_window": 16, "rope_local_base_freq": 1e4, "rope_theta": 1e6}, 5,
         {"positions": "rope", "rope_theta": 1e6, "causal": True}),
        ({"model_type": "gpt_oss", "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, 1,
         {"positions": "rope", "rope_theta": 1e4, "causal": True, "window": (15, 0)}),
        ({"model_type": "modernbert", "local_attention": 16, "local_rope_theta": 1e3, "global_rope_theta": 1e5}, 1,
         {"positions": "rope", "rope_theta": 1e3, "window": (8, 8)}),
        ({"model_type": "modernbert", "local_attention": 16, "local_rope_theta": 1e3, "global_rope_theta": 1e5}, 3,
         {"positions": "rope", "rope_theta": 1e5}),
        ({"model_type": "gptj", "rotary_dim": 8}, 0,
         {"positions": "rope-interleaved", "rope_theta": 1e4, "causal": True}),
        ({"model_type": "gpt_neox", "rotary_pct": 1.0, "rotary_emb_base": 2e4}, 0,
         {"positions": "rope", "rope_theta": 2e4, "causal": True}),
        ({"model_type": "gpt_neo", "attention_layers": ["global", "local"], "window_size": 16}, 1,
         {"positions": "learned", "causal": True, "window": (15, 0), "scale": 1.0}),
        ({"model_type": "bloom"}, 0, {"positions": "alibi", "causal": True}),
        ({"model_type": "mpt", "attn_config": {"alibi": True, "softmax_scale": 0.5}}, 0,
         {"positions": "alibi", "causal": True, "scale": 0.5}),
        ({"model_type": "granite", "attention_multiplier": 0.125}, 0,
         {"positions": "rope", "rope_theta": 1e4, "causal": True, "scale": 0.125}),
    ],
)  # fmt: skip
def test_positions_mask_and_scale_are_those_of_the_config(config, layer, fields):
    assert said(config, layer=layer) == (fields, ())


def test_by_stack_only_a_decoder_is_causal_and_cross_attention_has_no_places():
    assert said({"model_type": "t5"}, "encoder").fields == {"positions": "none", "scale": 1.0}
    assert said({"model_type": "t5"}, "decoder").fields == {"positions": "none", "causal": True, "scale": 1.0}
    assert said({"model_type": "bart"}, "decoder").fields == {"positions": "learned", "causal": True}
    assert said({"model_type": "bart"}, "cross") == ({"positions": "none"}, ())
    assert said({"model_type": "clip"}, "text").fields["causal"]
    assert "causal" not in said({"model_type": "clip"}, "vision").fields


@pytest.mark.parametrize(
    ("config", "positions", "note"),
    [
        ({"model_type": "phi", "partial_rotary_factor": 0.5}, "none",
         "positions are none: the model rotates 4 of 8 columns, and a layer of mha all of them"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2}}, "rope",
         "rope_type linear is not part of the layer: its angles are those of rope_theta alone"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope",
         "rope_type llama3 is not part of the layer: its angles are those of rope_theta alone"),
        ({"model_type": "t5"}, "none", "positions are none: learned scores of distances are not part of the layer"),
        ({"model_type": "falcon", "alibi": True}, "none",
         "positions are none: Falcon scales ALiBi by 1/√d_head, in bfloat16"),
        ({"model_type": "mpt", "attn_config": {"alibi_bias_max": 4}}, "none",
         "positions are none: MPT orders the slopes of ALiBi differently"),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "none",
         "positions are none: learned positions of MPT are not converted"),
        ({"model_type": "olmo", "clip_qkv": 8.0}, "rope",
         "clip_qkv 8.0 is not part of the layer: it bounds queries, keys and values"),
        ({"model_type": "unknown"}, "none",
         "positions and mask are not known: set them in the run (--positions, --causal)"),
    ],
)  # fmt: skip
def test_what_a_layer_cannot_say_becomes_a_note(config, positions, note):
    found = said(config)
    assert (found.fields["positions"], found.notes) == (positions, (note,))


LOOKED_AT = (
    "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_pct", "layer_types", "attention_layers",
    "sliding_window", "window_size", "attn_config", "pos_att_type", "query_pre_attn_scalar", "attn_logit_softcapping",
    "local_attention", "max_window_layers", "use_sliding_window", "attention_multiplier", "alibi", "text_config", "clip_qkv",
)  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_value_in_a_config_is_a_bug_of_ours(family):
    for value in [None, "x", [], {}, -3, 1e40, True, [1, "x"]]:
        config = {"model_type": family, "relative_attention": True, **dict.fromkeys(LOOKED_AT, value)}
        for stack in LAYOUTS[FAMILIES[family].layout].stacks:
            choices_of(config, stack, 0, EIGHT)
        with pytest.raises((MhaError, UsageError)):
            sizes_of({**config, "num_attention_heads": value, "n_head": value, "hidden_size": None}, None, {})
