"""Right attention of many styles is called right, with its choices; attention that cannot be judged
is never called wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support import rows, some, user_code
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")

KEEP, HIDE, CAUSAL = {"mask_means": "keep"}, {"mask_means": "hide"}, {"causal": True}


class Right(NamedTuple):
    """A layer, its arguments, what the user states, and the names of choices that must be
    listed.
    """

    layer: str
    arguments: str = ""
    states: Mapping[str, object] = MappingProxyType({})
    choices: str = ""
    common: bool = False

    @property
    def given(self) -> dict[str, float]:
        pairs = (pair.split("=") for pair in self.arguments.split())
        return {name: float(value) if "." in value else int(value) for name, value in pairs}


SIZES, DIM, DIMN = "d_model=24 n_heads=3", "dim=24 heads=3", "dim=24 num_heads=3"
GROUPS = "n_heads=6 n_kv_heads=2"
GPT, BOOK = "n_embd=24 n_head=3", "d_in=20 d_out=24 context_length=32 dropout=0.1 num_heads=3"
ROWS = (
    Right("separate:PaperAttention", SIZES, KEEP, "mask-form", True),
    Right("separate:SelfAttention", "embed_dim=24 num_heads=3"),
    Right("separate:StoryAttention", GPT, CAUSAL, common=True),
    Right("separate:NewestAttention", SIZES, CAUSAL),
    Right("separate:PaddedAttention", "embed_dim=24 num_heads=3", HIDE, "mask-form"),
    Right("separate:ChatAttention", SIZES, HIDE | CAUSAL),
    Right("separate:GroupedAttention", f"d_model=24 {GROUPS}", CAUSAL, "gqa no-bias", True),
    Right("fused:VisionAttention", DIMN),
    Right("fused:ChunkedAttention", DIM, HIDE),
    Right("fused:KernelAttention", DIM, KEEP, "mask-form", True),
    Right("fused:CausalAttention", GPT, CAUSAL, common=True),
    Right("fused:TriangleAttention", "emb_size=24 n_heads=3", CAUSAL),
    Right("fused:LengthsAttention", DIM),
    Right("fused:FlatAttention", "units=24 num_heads=3", HIDE),
    Right(
        "fused:PerHeadAttention", "input_dim=20 embed_dim=24 num_heads=3", KEEP, "fused-per-head"
    ),
    Right("fused:ContextAttention", "query_dim=24 context_dim=20 heads=3 dim_head=7", common=True),
    Right("fused:FusedGroups", f"dim=24 {GROUPS}", choices="gqa"),
    Right("functions:attend", common=True),
    Right("known:attention", states=KEEP),
    Right("functions:attend_causally", states=CAUSAL),
    Right("functions:attend_in_loops"),
    Right("functions:attend_with_three_axes"),
    Right("functions:attend_with_weights"),
    Right("functions:attend_with_weights_that_are_masked", common=True),
    Right("known:MultiHeadedAttention", "h=4 d_model=32", KEEP),
    Right("known:ValuesKeysQuery", states=KEEP, common=True),
    Right("known:BookAttention", BOOK, CAUSAL, "no-bias"),
    Right("known:InnerAttention", "dim=24 heads=3 dim_head=5"),
    Right("known:TransformerAttention", "n_head=3 d_model=24 d_k=8 d_v=7", KEEP, "d-v"),
    Right("known:DiveAttention", "num_hiddens=24 num_heads=3", choices="mask-form"),
    Right("right:Einsum", SIZES),
    Right("right:NarrowHead", "dim=24 head=6"),
    Right("right:LoopOverHeads", "n_embd=24 num_heads=3", CAUSAL, "per-head"),
    Right("right:Wrapped", "hidden=24 heads=3", HIDE),
    Right("right:MultiQuery", DIMN, choices="gqa"),
    Right("right:Unscaled", "d_model=24 d_kv=7 num_heads=3", {"scale": 1.0}, "scale"),
    Right("right:RawParameters", SIZES, choices="orientation no-bias"),
    Right("right:Kernels", "d_model=24 n_heads=3 d_head=8", CAUSAL, "kernel"),
    Right("right:OtherValueWidth", "d_model=24 n_heads=3 d_k=8 d_v=5", KEEP, "d-v"),
    Right("right:OwnScale", "d_model=24 n_heads=3 scale=0.5", choices="scale"),
    Right("right:SingleSoftmax", "hidden_size=24 num_heads=3"),
    Right("right:StridedHeads", SIZES, choices="interleaved-heads"),
    Right("right:Functional", "width=24 n_heads=3"),
    Right("right:AttentionWithoutModule", SIZES),
    Right("right:ContextAttention", "dim=24 heads=3", KEEP, "pre-norm"),
    Right("right:CausalOverOwnRows", "dim=24 heads=3", KEEP),
    Right("right:UnlessMasked", SIZES, CAUSAL, "mask-replaces-causal", True),
    Right("right:Latent", SIZES, common=True),
    Right("right:GatedMap", choices="pre-norm residual gate", common=True),
    Right("right:Wide", states=KEEP, choices="mask-form"),
    Right("right:TenThousand", SIZES, KEEP, "mask-value"),
    Right("positions:T5Attention", states={"scale": 1.0}, choices="score-bias", common=True),
    Right("positions:AlibiAttention", DIM, CAUSAL, "score-bias"),
    Right("positions:BloomAttention", "hidden_size=24 n_head=3", CAUSAL),
    Right("positions:SwinWindow", choices="score-bias"),
    Right("positions:ShiftedWindow"),
    Right("positions:SwinCosine"),
    Right("positions:WithSinks", states=CAUSAL, choices="sinks gqa", common=True),
    Right("positions:PartialNeoX", states=CAUSAL, choices="rope"),
    Right("positions:ComplexLlama", states=CAUSAL, choices="rope gqa"),
    Right("positions:NanoChat", states=CAUSAL, choices="qk-norm rope"),
    Right("positions:Qwen3", states=CAUSAL, choices="qk-norm rope gqa"),
    Right("positions:ViT22B", choices="qk-norm"),
    Right("positions:HandNormed", choices="qk-norm rope"),
    Right("positions:NormedGpt", states=CAUSAL, choices="qk-norm scale"),
    Right("positions:CappedAttention", SIZES, CAUSAL, "softcap"),
    Right(
        "positions:CappedAttention", f"{SIZES} query_pre_attn_scalar=12", CAUSAL, "softcap scale"
    ),
    Right("positions:RotaryAttention", "dim=24 n_heads=3", choices="rope", common=True),
    Right("odd:LearnedTemperature", DIM),
    Right("odd:CosineAttention", DIM, {"scale": 10.0}, "scale qk-norm"),
    Right("odd:FixedScale", DIM, CAUSAL, "scale qk-norm v-factor"),
    Right("odd:NormedValues", DIM, {}, "qk-norm v-norm"),
    Right("odd:SlidingWindow", DIM, CAUSAL, "own-pattern"),
    Right("odd:SharedHeadProjections", "embed_size=24 heads=3", KEEP, "shared-projections"),
    Right("odd:Counts", common=True),
    Right("odd:FloatOnly"),
    Right("odd:Normalizes"),
    Right("odd:PixelBlock", choices="pre-norm residual softcap"),
)
CACHED = """
    LlamaAttention OwnRotations PastAttention RotaryPast OneTokenAtATime HubAttention
    GrowingCacheAttention SeparateCaches PositionIds OwnGrowingCache
""".split()
UNJUDGED = {
    "TalkingHeads": (DIM, ""),
    "LinearAttention": (DIM, ""),
    "InterpretableAttention": (SIZES, ""),
    "GatedAttention": (DIM, ""),
    "NoAttention": ("d_model=24", ""),
    "UnplacedQueries": (SIZES, "causal-top-left"),
    "UnseenKeyBias": (SIZES, "bias-missing"),
}
"""Layers that nobody can judge from outside, and the mistake that may be named all the same."""


def load(layer: str) -> object:
    file, _, name = layer.partition(":")
    return getattr(user_code.load(user_code.ZOO / f"{file}.py"), name)


@pytest.mark.parametrize("row", rows(ROWS, lambda row: row.layer))
def test_right_attention_is_called_right_with_its_choices(row: Right) -> None:
    examination = user_code.check(load(row.layer), arguments=row.given, **row.states)
    assert [finding.code for finding in examination.findings] == []
    assert examination.verdict == "right"
    assert examination.comparison.max_abs_difference <= examination.comparison.tolerance
    assert {choice.name for choice in examination.choices} >= set(row.choices.split())


@pytest.mark.parametrize(
    ("scale", "code"),
    [
        (1.0, "scale-missing"),
        (1 / 8, "scale-not-root"),
        (24**-0.5, "scale-d-model"),
        (8**-0.25, "scale-one-side"),
        (3**-0.5, "scale-heads"),
        (8**0.5, "scale-multiplied"),
    ],
)
def test_a_usual_mistake_in_the_scale_of_normed_queries_is_no_choice(
    scale: float, code: str
) -> None:
    arguments = {"dim": 24, "heads": 3, "tau": scale}
    examination = user_code.check(load("odd:FixedScale"), arguments=arguments, causal=True)
    assert [finding.code for finding in examination.findings] == [code]


@pytest.mark.parametrize("name", some(CACHED, default=("OwnRotations", "PastAttention")))
def test_attention_with_a_cache_is_right_and_its_cache_is_examined(name: str) -> None:
    examination = user_code.check(load(f"cached:{name}"))
    assert examination.verdict == "right"
    assert (examination.findings, examination.not_examined) == ((), ())
    has_note = "cache" in " ".join(examination.notes)
    assert has_note == (name == "OneTokenAtATime")  # its later steps take one token


@pytest.mark.real
@pytest.mark.parametrize("name", UNJUDGED)
def test_attention_that_nobody_can_judge_is_not_called_wrong(name: str) -> None:
    pairs, code = UNJUDGED[name]
    examination = user_code.check(
        load(f"odd:{name}"), arguments=Right("", pairs).given, time_limit_s=0.5
    )
    assert {finding.code for finding in examination.findings} <= {code}
    assert code or examination.verdict != "wrong"
    if examination.verdict != "right":
        assert examination.findings or examination.reason or examination.next_steps


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("Drifts", {"state-kept-between-calls"}),
        pytest.param("Random", {"not-repeatable"}, marks=pytest.mark.real),
        pytest.param("ChangesItsInput", set(), marks=pytest.mark.real),
    ],
)
def test_attention_that_does_not_compute_the_same_twice_is_not_called_right(
    name: str, codes: set[str]
) -> None:
    examination = user_code.check(load(f"odd:{name}"), time_limit_s=0.5)
    assert examination.verdict != "right"
    assert {finding.code for finding in examination.findings} == codes


def test_attention_that_refuses_some_inputs_keeps_no_state() -> None:
    examination = user_code.check(load("odd:RefusesInputs"))
    assert (examination.verdict, examination.findings) == ("right", ())


@pytest.mark.real
def test_heads_that_share_projections_and_divide_by_the_root_of_d_model_are_wrong(
    tmp_path: Path,
) -> None:
    pair = ("self.head_dim**0.5", "(self.heads * self.head_dim) ** 0.5")
    path, line = user_code.write(tmp_path, "odd:SharedHeadProjections", pair)
    layer = user_code.load(path).SharedHeadProjections
    (finding,) = user_code.check(
        layer, arguments={"embed_size": 24, "heads": 3}, mask_means="keep"
    ).findings
    assert (finding.code, finding.line) == ("scale-d-model", line)


@pytest.mark.parametrize("batch_first", [True, pytest.param(False, marks=pytest.mark.real)])
def test_the_layer_of_torch_is_right(batch_first: bool) -> None:
    arguments = {"embed_dim": 24, "num_heads": 3, "batch_first": batch_first}
    assert user_code.check(nn.MultiheadAttention, arguments=arguments).verdict == "right"


@pytest.mark.real
def test_a_list_of_three_layers_named_qkv_is_read(tmp_path: Path) -> None:
    pairs = (
        (
            "self.query = nn.Linear(embed_dim, embed_dim)",
            "self.qkv = nn.ModuleList(nn.Linear(embed_dim, embed_dim) for _ in range(3))",
        ),
        (
            "        self.key = nn.Linear(embed_dim, embed_dim)\n"
            "        self.value = nn.Linear(embed_dim, embed_dim)\n",
            "",
        ),
        ("self.query(x)", "self.qkv[0](x)"),
        ("self.key(x)", "self.qkv[1](x)"),
        ("self.value(x)", "self.qkv[2](x)"),
    )
    path, _ = user_code.write(tmp_path, "separate:SelfAttention", *pairs)
    layer, sizes = user_code.load(path).SelfAttention, {"embed_dim": 24, "num_heads": 3}
    assert user_code.check(layer, arguments=sizes, time_limit_s=0.5).verdict == "right"


# ------------------------------------------------------------------------ that the layers are right

PLAIN = {
    "separate:PaperAttention": "w_q w_k w_v w_o",
    "separate:SelfAttention": "query key value dense",
    "separate:StoryAttention": "query key value proj",
    "separate:NewestAttention": "q_proj k_proj v_proj o_proj",
    "separate:PaddedAttention": "q_proj k_proj v_proj out_proj",
    "separate:ChatAttention": "wq wk wv out_proj",
    "separate:GroupedAttention": "q_proj k_proj v_proj o_proj",
    "fused:VisionAttention": "qkv proj",
    "fused:ChunkedAttention": "to_qkv to_out",
    "fused:KernelAttention": "qkv proj",
    "fused:CausalAttention": "c_attn c_proj",
    "fused:TriangleAttention": "qkv out",
    "fused:LengthsAttention": "qkv proj",
    "fused:FlatAttention": "in_proj out_proj",
}
"""Layers that most mistakes are made in, with the names of their weights."""
CAUSAL_ONES = """
    StoryAttention NewestAttention ChatAttention GroupedAttention CausalAttention TriangleAttention
""".split()


def formula(
    layer: nn.Module, names: str, n_heads: int, x: Tensor, context: Tensor, *, causal: bool
) -> Tensor:
    """softmax(q kᵀ / √d_head) v of each head, side by side, through the output projection. Source:
    Vaswani et al. 2017, eq. 1.
    """
    *inputs, out = (layer.get_submodule(name) for name in names.split())
    if len(inputs) == 1:
        weights, biases = (
            inputs[0].weight.chunk(3),
            (None,) * 3 if inputs[0].bias is None else inputs[0].bias.chunk(3),
        )
    else:
        weights, biases = [one.weight for one in inputs], [one.bias for one in inputs]
    q, k, v = (
        F.linear(rows, w, b)
        for rows, w, b in zip((x, context, context), weights, biases, strict=True)
    )
    d_head = q.shape[-1] // n_heads
    group = q.shape[-1] // k.shape[-1]
    z = []
    for head in range(n_heads):
        columns, shared = (slice(h * d_head, (h + 1) * d_head) for h in (head, head // group))
        scores = torch.einsum("bqd,bkd->bqk", q[..., columns], k[..., shared]) / d_head**0.5
        if causal:
            q_idx = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
            scores = torch.where(torch.arange(k.shape[1]) <= q_idx, scores, -torch.inf)
        weight = scores.exp() / scores.exp().sum(-1, keepdim=True)
        z.append(torch.einsum("bqk,bkd->bqd", weight, v[..., shared]))
    return out(torch.cat(z, dim=-1))


def test_the_layers_that_most_mistakes_are_made_in_compute_the_formula(normal) -> None:
    for layer, names in PLAIN.items():
        row = next(row for row in ROWS if row.layer == layer)
        module = load(layer)(**row.given).double().eval()
        x, context = normal(2, 5, 24), normal(2, 7, 24)
        is_cross = layer.endswith((":PaperAttention", ":NewestAttention"))
        n_heads = next(
            size
            for name, size in row.given.items()
            if name in ("n_heads", "num_heads", "n_head", "heads")
        )
        with torch.no_grad():
            causal = layer.partition(":")[2] in CAUSAL_ONES
            expected = formula(module, names, n_heads, x, context if is_cross else x, causal=causal)
            out = module(x, context, context) if is_cross else module(x)
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11, msg=layer)
