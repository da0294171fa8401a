"""The roles of parameters by name, and the matrices of a module with their biases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mhacli.adapters.usercode.projections import parts_of, read_name

NAMES = {
    "q": """q Q wq Wq w_q W_q W_Q WQ q_w q_mat q_proj proj_q Q_proj q_proj_weight q_linear linear_q linears_q lin_q q_lin q_dense
        q_layer q_net q_conv q_map q_transform w_qs q_kernel kernel_q q_weight wq_weight w_q_weight W_Q.weight wq.weight fc_q q_fc
        attn_q query queries query_proj query_projection q_projection query_layer query_linear lin_query linear_query
        linearq qlinear wqs Wquery query_dense
        query_fc query_mlp query_transform query_weights query_matrix query_embed W_query w_query proj_query project_query
        project_queries project_q to_q to_query to_queries toqueries dense_q fc_query queries_linear qProj queryProj QueryProj
        queryLayer attn.q_proj self_attn.q_proj self.query attention.self.query query.weight queries.0 q_heads.2 q_projs.0
        heads.0.q heads.1.query""",
    "k": """k K wk W_k W_K k_proj proj_k k_linear lin_k k_net k_weight w_ks key keys key_proj key_projection key_layer key_linear
        keys_linear linear_key key_transform W_key to_k to_keys tokeys fc_k attn_k project_k kProj keyProj attention.self.key
        heads.3.k""",
    "v": """v V wv W_v W_V v_proj proj_v v_linear lin_v v_net v_weight w_vs value values val vals value_proj value_projection
        value_layer value_linear linear_value W_value to_v to_values tovalues fc_v project_v vProj
        attention.self.value heads.3.v""",
    "o": """o wo Wo W_o W_O wo.weight o_proj o_linear lin_o out out_proj out_layer out_linear linear_out out_projection proj_out
        outProj output output_proj output_projection output_layer output_linear outputProj output.dense self.output.dense
        to_out to_out.0 toout fc fc_o fc_out dense unify unifyheads unify_heads final final_linear c_proj resid_proj proj
        projection merge last_linear combine concat concat_linear attn_out head_mix mix w0 W_0""",
    "qkv": """qkv QKV qkvs qkv_proj qkvproj proj_qkv to_qkv w_qkv Wqkv W_qkv qkv_w c_qkv fc_qkv qkv_net qkv_layer qkv_dense
        qkv_linear linear_qkv lin_qkv fused_qkv qkv_projection qkv_weight q_k_v query_key_value query_key_value_proj
        queries_keys_values in_proj in_projection in_proj_weight attn.qkv""",
    "kqv": "kqv to_kqv kqv_proj key_query_value",
    "kv": "kv kv_proj to_kv w_kv wkv c_kv kv_net kv_linear key_value",
    "vk": "vk value_key",
    "qk": "qk qk_proj to_qk query_key",
    "qv": "qv",
    "": """tok_emb
        c_attn attn attention layer layer1 lin1 ln norm temperature scale logit_scale dropout linears.0 linears.3 weight W
        weights w1 w2 mlp ffn up gate embed embedding pos_embed position rel_pos relative_position_bias cls_token head heads.0 dec
        enc conv conv1 attn_weights gamma beta alpha quick vocab quantizer keep kernel variance valid checkpoint inner block mask
        bias x""",
}  # fmt: skip


@pytest.mark.parametrize("letters", NAMES)
def test_common_names_show_the_role_of_a_parameter(letters):
    read = {name: read_name(name)[0] for name in NAMES[letters].split()}
    assert read == dict.fromkeys(NAMES[letters].split(), letters)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("queries.0", 0),
        ("q_heads.12", 12),
        ("heads.3.k", 3),
        ("layers.2.heads.1.v", 1),
        ("linears.3", 3),
        ("q_proj", None),
    ],
)
def test_a_part_of_a_list_has_its_number(name, number):
    assert read_name(name)[1] == number


class Separate(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4, bias=False)
        self.v = nn.Conv1d(6, 4, 1)
        self.out_proj = nn.Linear(4, 6)


def test_layers_are_matrices_with_their_biases_in_the_order_in_which_they_were_made():
    module = Separate()
    parts = parts_of(module, {})
    assert [(p.name, p.letters, p.orientation, p.number) for p in parts] == [
        ("query", "q", "out-in", None),
        ("key", "k", "out-in", None),
        ("v", "v", "out-in", None),
        ("out_proj", "o", "out-in", None),
    ]
    assert parts[0].weight is module.query.weight
    assert parts[0].bias is module.query.bias
    assert parts[1].bias is None
    assert torch.equal(parts[2].weight, module.v.weight[..., 0])
    assert parts[2].bias is module.v.bias


class Conv1D(nn.Module):
    """GPT-2's, which holds its weight [in, out]."""

    def __init__(self, d_out, d_in):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d_in, d_out)), nn.Parameter(torch.randn(d_out))


def test_a_conv1d_of_gpt2_is_applied_the_other_way_round():
    module = nn.Module()
    module.c_attn, module.c_proj = Conv1D(12, 4), Conv1D(4, 4)
    assert [(p.name, p.letters, p.orientation) for p in parts_of(module, {})] == [
        ("c_attn", "", "in-out"),
        ("c_proj", "o", "in-out"),
    ]
    assert parts_of(module, {})[0].bias is module.c_attn.bias


def test_a_list_of_layers_is_recognised_by_its_numbers():
    module = nn.Module()
    module.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    assert [(p.name, p.letters, p.number) for p in parts_of(module, {})] == [(f"linears.{i}", "", i) for i in range(4)]


def raw(**shapes):
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return module


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        ("W_q", "b_q"),
        ("wq", "bq"),
        ("q_weight", "q_bias"),
        ("weight_q", "bias_q"),
        ("query_kernel", "query_bias"),
        ("w_qkv", "b_qkv"),
        ("W_o", "b_o"),
        ("wo", "bo"),
        ("out_weight", "out_bias"),
    ],
)
def test_a_bare_vector_is_the_bias_of_the_matrix_that_claims_the_same(weight, bias):
    module = raw(**{weight: (4, 4), bias: (4,)})
    (part,) = parts_of(module, {})
    assert (part.name, part.orientation) == (weight, "free")
    assert part.bias is getattr(module, bias)


def test_bare_biases_find_their_matrix_among_several():
    module = raw(W_q=(4, 4), W_k=(4, 4), W_v=(4, 4), W_o=(4, 4), b_q=(4,), b_v=(4,), b_o=(4,))
    assert [(p.letters, p.bias) for p in parts_of(module, {})] == [
        ("q", module.b_q), ("k", None), ("v", module.b_v), ("o", module.b_o),
    ]  # fmt: skip


def test_a_bias_may_have_an_axis_for_heads():
    module = raw(W_q=(3, 8, 4), b_q=(3, 4))
    (part,) = parts_of(module, {})
    assert part.weight.shape == (3, 8, 4)
    assert part.bias is module.b_q


def test_what_torchs_own_layer_holds_is_applied_as_torch_does():
    (fused, out) = sorted(parts_of(nn.MultiheadAttention(6, 2), {}), key=lambda part: part.letters, reverse=True)
    assert (fused.name, fused.letters, fused.orientation) == ("in_proj_weight", "qkv", "out-in")
    assert fused.bias is not None
    assert (out.name, out.letters, out.orientation) == ("out_proj", "o", "out-in")


def test_torchs_separate_weights_share_one_bias_of_which_each_has_a_third():
    module = nn.MultiheadAttention(6, 2, kdim=5, vdim=4)
    nn.init.normal_(module.in_proj_bias)
    parts = {part.letters: part for part in parts_of(module, {})}
    assert [parts[letter].orientation for letter in "qkv"] == ["out-in"] * 3
    for letter, third in zip("qkv", module.in_proj_bias.chunk(3), strict=True):
        assert torch.equal(parts[letter].bias, third)


def test_norms_and_scalars_are_no_matrices():
    module = Separate()
    module.temperature, module.q_norm = nn.Parameter(torch.ones(())), nn.LayerNorm(4)
    assert [part.name for part in parts_of(module, {})] == ["query", "key", "v", "out_proj"]


def test_tensors_that_a_function_is_given_are_read_by_their_names():
    given = {name: torch.randn(4, 4) for name in ("wq", "wk", "wv", "wo")} | {"bq": torch.randn(4)}
    parts = parts_of(None, given)
    assert [(p.name, p.letters, p.orientation) for p in parts] == [
        ("wq", "q", "free"), ("wk", "k", "free"), ("wv", "v", "free"), ("wo", "o", "free"),
    ]  # fmt: skip
    assert parts[0].bias is given["bq"]
    assert parts[1].bias is None
