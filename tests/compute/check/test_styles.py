"""`mha check` on twenty published styles of attention, each also with one realistic mistake. A numpy implementation proves that
each style is attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.attentions import styles
from support.examined import examination_of, no_stage
from torch import Tensor, nn

from mhacli.cli.values import pairs
from mhacli.compute.base.user_module import load_user_attention
from mhacli.compute.check.examine import is_meant_causal
from mhacli.requests.user_code import CheckRequest, TargetRequest
from mhacli.results.check import Examination

SOURCE = Path(styles.__file__)
D, H, T, BATCH = 32, 4, 6, 3
Array = np.ndarray[Any, np.dtype[np.float64]]
Part = tuple[Array, Array | float]


@dataclass(frozen=True)
class Style:
    """A style, how it is made and called, what numpy makes of it, and one mistake: old text, new text, codes that name it.

    `unknown` is said of a style that the examination does not understand."""

    name: str
    make: Callable[[Any], Any]
    call: Callable[[Any, Tensor, Tensor], Tensor]
    expected: Callable[[Any, Array, Array], Array]
    old: str
    new: str
    codes: tuple[str, ...]
    unknown: bool = False


# ------------------------------------------------------------------------------------------------------------- the oracle


def part(layer: nn.Linear, rows: slice = slice(None)) -> Part:
    """The weight and bias of a projection, or of some rows of a fused one."""
    weight = layer.weight.detach().double().numpy()[rows]
    return weight, 0.0 if layer.bias is None else layer.bias.detach().double().numpy()[rows]


def thirds(layer: nn.Linear) -> tuple[Part, Part, Part]:
    n = layer.weight.shape[0] // 3
    return part(layer, slice(0, n)), part(layer, slice(n, 2 * n)), part(layer, slice(2 * n, 3 * n))


def projected(rows: Array, one: Part, n_heads: int) -> Array:
    """[batch, head, row, d_head]: head h has the h-th run of columns."""
    out = rows @ one[0].T + one[1]
    return np.stack(np.split(out, n_heads, axis=-1), axis=1)


def attention(
    q: Array, k: Array, v: Array, out: Part | None, *, scale: float | None = None, bias: Array | float = 0.0,
    causal: bool = False, mixes: tuple[Part, Part] | None = None,
) -> Array:  # fmt: skip
    """Softmax of scores, times values, head beside head, through the output projection. Source: Vaswani et al. 2017, eq. 1."""
    k, v = (np.repeat(y, q.shape[1] // y.shape[1], axis=1) for y in (k, v))
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if causal:
        scores = np.where(np.tri(q.shape[2], k.shape[2], dtype=bool), scores, -np.inf)
    if mixes:
        scores = mixed(scores, mixes[0])
    pattern = np.exp(scores - scores.max(axis=-1, keepdims=True))
    pattern = pattern / pattern.sum(axis=-1, keepdims=True)
    if mixes:
        pattern = mixed(pattern, mixes[1])
    z = np.concatenate(list(np.einsum("bhqk,bhkd->hbqd", pattern, v)), axis=-1)
    return z if out is None else z @ out[0].T + out[1]


def mixed(heads: Array, by: Part) -> Array:
    return np.moveaxis(np.moveaxis(heads, 1, -1) @ by[0].T + by[1], -1, 1)


def rotated(heads: Array) -> Array:
    """Pairs of neighbours turn by position × 10000^(−2j/d). Source: Su et al. 2021, RoFormer, eq. 15."""
    d, turned = heads.shape[-1], heads.copy()
    for t in range(heads.shape[2]):
        for j in range(d // 2):
            angle = t * 10000.0 ** (-2 * j / d)
            a, b = heads[:, :, t, 2 * j], heads[:, :, t, 2 * j + 1]
            turned[:, :, t, 2 * j] = a * np.cos(angle) - b * np.sin(angle)
            turned[:, :, t, 2 * j + 1] = a * np.sin(angle) + b * np.cos(angle)
    return turned


def of_parts(rows: Array, parts: tuple[Part, Part, Part], out: Part | None, **how: Any) -> Array:
    return attention(*(projected(rows, one, H) for one in parts), out, **how)


def gpt(m: Any, x: Array, _: Array) -> Array:
    return of_parts(x, thirds(m.c_attn), part(m.c_proj), causal=True)


def llama(m: Any, x: Array, _: Array) -> Array:
    q, k = rotated(projected(x, part(m.wq), H)), rotated(projected(x, part(m.wk), 2))
    return attention(q, k, projected(x, part(m.wv), 2), part(m.wo), causal=True)


def vit(m: Any, x: Array, _: Array) -> Array:
    return of_parts(x, thirds(m.qkv), part(m.proj))


def bucket(distance: int, n: int = 16, furthest: int = 128) -> int:
    """Half of the buckets are single distances, the others grow by powers. Source: Raffel et al. 2020, section 2.1."""
    far = abs(distance)
    if far >= n // 2:
        far = min(n - 1, n // 2 + int(np.log(far / (n / 2)) / np.log(furthest / (n / 2)) * (n / 2)))
    return far + (n if distance > 0 else 0)


def t5(m: Any, x: Array, source: Array) -> Array:
    table = m.relative_attention_bias.weight.detach().double().numpy()
    bias = np.array([[table[bucket(k - q)] for k in range(source.shape[1])] for q in range(x.shape[1])])
    q, k, v = projected(x, part(m.q), H), projected(source, part(m.k), H), projected(source, part(m.v), H)
    return attention(q, k, v, part(m.o), scale=1.0, bias=np.moveaxis(bias, -1, 0))


def swin(m: Any, x: Array, _: Array) -> Array:
    table, places = (
        m.relative_position_bias_table.detach().double().numpy(),
        [(i, j) for i in range(2) for j in range(3)],
    )
    bias = np.array([[table[(a - c + 1) * 5 + (b - d + 2)] for c, d in places] for a, b in places])
    return of_parts(x, thirds(m.qkv), part(m.proj), bias=np.moveaxis(bias, -1, 0))


def alibi(m: Any, x: Array, _: Array) -> Array:
    apart = np.abs(np.arange(T)[:, None] - np.arange(T))
    slopes = np.array([2.0 ** (-8 * (h + 1) / H) for h in range(H)])
    return of_parts(x, thirds(m.qkv), part(m.out), bias=-slopes[:, None, None] * apart, causal=True)


def separate(query: str, key: str, value: str, out: str | None, **how: Any) -> Callable[[Any, Array, Array], Array]:
    def expected(m: Any, x: Array, _: Array) -> Array:
        q, k, v = (part(m.get_submodule(name)) for name in (query, key, value))
        return of_parts(x, (q, k, v), part(m.get_submodule(out)) if out else None, **how)

    return expected


def multi_query(m: Any, x: Array, _: Array) -> Array:
    q, k, v = projected(x, part(m.w_q), H), projected(x, part(m.w_k), 1), projected(x, part(m.w_v), 1)
    return attention(q, k, v, part(m.w_o))


def perceiver(m: Any, x: Array, context: Array) -> Array:
    k, v = (projected(context, part(m.to_kv, rows), H) for rows in (slice(0, D), slice(D, 2 * D)))
    return attention(projected(x, part(m.to_q), H), k, v, part(m.to_out))


def talking(m: Any, x: Array, _: Array) -> Array:
    return of_parts(x, thirds(m.qkv), part(m.proj), mixes=(part(m.proj_l), part(m.proj_w)))


def of_function(_: Any, x: Array, y: Array) -> Array:
    q, k, v = x[:, None], y[:, None], y[:, None] ** 2
    return attention(q, k, v, None)[:, None]


# --------------------------------------------------------------------------------------------------------------- the styles


def own(m: Any, x: Tensor, _: Tensor) -> Tensor:
    answer = m(x)
    return answer[0] if isinstance(answer, tuple) else answer


def same(m: Any, x: Tensor, _: Tensor) -> Tensor:
    answer = m(x, x, x)
    return answer[0] if isinstance(answer, tuple) else answer


def other(m: Any, x: Tensor, context: Tensor) -> Tensor:
    return m(x, context)


MERGE = ".transpose(1, 2).contiguous().view(B, T, C)"
STYLES = (
    Style("NanoAttention", lambda s: s.NanoAttention(s.GPTConfig()), own, gpt,
          f"y = y{MERGE}", "y = y.contiguous().view(B, T, C)", ("merge-without-transpose",)),
    Style("FlashAttention", lambda s: s.FlashAttention(s.GPTConfig()), own, gpt,
          "is_causal=True\n        )", "is_causal=False\n        )", ("causal-missing",)),
    Style("MinAttention", lambda s: s.MinAttention(D, H), own,
          separate("query", "key", "value", "proj", causal=True),
          "att = F.softmax(att, dim=-1)\n        y = self.attn_drop", "att = F.softmax(att, dim=-2)\n        y = self.attn_drop",
          ("softmax-axis",)),
    Style("LlamaCached", lambda s: s.LlamaCached(s.ModelArgs()), own, llama,
          "self.freqs_cis[start_pos : start_pos + seqlen]", "self.freqs_cis[:seqlen]", ("cache-position",)),
    Style("LlamaPlain", lambda s: s.LlamaPlain(D, H, 2), own, llama,
          "k, v = (repeat_kv(y, self.n_heads // self.n_kv_heads) for y in (k, v))",
          "k, v = (y.repeat(1, 1, self.n_heads // self.n_kv_heads, 1) for y in (k, v))", ("gqa-tiled",)),
    Style("GPT2Attention", lambda s: s.GPT2Attention(D, H), own, gpt,
          "torch.cat((past_value, value), dim=-2)", "torch.cat((value, past_value), dim=-2)", ("cache-order",)),
    Style("T5Attention", lambda s: s.T5Attention(D, D // H, H), lambda m, x, y: m(x, key_value_states=y), t5,
          "attn_output.transpose(1, 2).contiguous().view(", "attn_output.contiguous().view(", ("merge-without-transpose",)),
    Style("SwinAttention", lambda s: s.SwinAttention(), own, swin,
          "q = q * self.scale\n        attn = q @", "attn = q @", ("scale-missing",)),
    Style("VitAttention", lambda s: s.VitAttention(D, H), own, vit,
          "attn = (q @ k.transpose(-2, -1)) * self.scale", "attn = (q @ k.transpose(-2, -1)) * self.scale * self.scale",
          ("scale-twice", "scale-not-root")),
    Style("SimpleVitAttention", lambda s: s.SimpleVitAttention(D, H, D // H), own,
          lambda m, x, _: of_parts(x, thirds(m.to_qkv), part(m.to_out)),
          "self.heads, self.scale = heads, dim_head**-0.5", "self.heads, self.scale = heads, dim**-0.5", ("scale-d-model",)),
    Style("BertAttention", lambda s: s.BertAttention(s.bert_config()), own, separate("query", "key", "value", None),
          "            attention_mask = encoder_attention_mask\n", "            attention_mask = None\n",
          ("mask-ignored", "padding-ignored")),
    Style("BertEncoderAttention", lambda s: s.BertEncoderAttention(D, H), own, separate("query", "key", "value", "dense"),
          "probs = scores.softmax(dim=-1)", "probs = F.dropout(scores.softmax(dim=-1), 0.1)", ("dropout-in-eval",)),
    Style("DetrAttention", lambda s: s.DetrAttention(D, H), same, separate("q_proj", "k_proj", "v_proj", "out_proj"),
          "self._shape(self.v_proj(value))", "self._shape(self.v_proj(key))", ("values-from-keys", "values-of-keys")),
    Style("PerceiverAttention", lambda s: s.PerceiverAttention(D, heads=H, dim_head=D // H), other, perceiver,
          "sim.masked_fill_(~mask,", "sim.masked_fill_(mask,", ("mask-inverted", "padding-inverted")),
    Style("AlibiAttention", lambda s: s.AlibiAttention(D, H), own, alibi,
          "device=x.device).tril()\n        weights", "device=x.device).tril(1)\n        weights", ("causal-off-by-one",)),
    Style("MultiQueryAttention", lambda s: s.MultiQueryAttention(D, H), own, multi_query,
          "self.w_k(x).unsqueeze(1), self.w_v(x).unsqueeze(1)", "self.w_k(x).unsqueeze(1), self.w_k(x).unsqueeze(1)",
          ("values-from-keys", "values-of-keys")),
    Style("TalkingHeads", lambda s: s.TalkingHeads(D, H), own, talking,
          "attn = (q * self.scale) @", "attn = (q * self.scale**2) @", (), unknown=True),
    Style("attention", lambda s: s.attention, lambda m, x, y: m(x[:, None], y[:, None], y[:, None] ** 2)[0], of_function,
          "p_attn = scores.softmax(dim=-1)", "p_attn = scores.softmax(dim=1)", ("softmax-axis",)),
    Style("MultiHeadedAttention", lambda s: s.MultiHeadedAttention(H, D), same,
          separate("linears.0", "linears.1", "linears.2", "linears.3"),
          "d_k = query.size(-1)", "d_k = query.size(-2)", ("scale-length",)),
    Style("NestedAttention", lambda s: s.NestedAttention(H, D, D // H, D // H), same,
          separate("w_qs", "w_ks", "w_vs", "fc"),
          "temperature=d_k**0.5", "temperature=d_model**0.5", ("scale-d-model",)),
)  # fmt: skip

STYLE = pytest.mark.parametrize("style", STYLES, ids=[style.name for style in STYLES])
EXAMINED_STYLE = pytest.mark.parametrize(
    "style",
    # what is not understood is compared with thousands of layers
    [pytest.param(style, id=style.name, marks=[pytest.mark.full] * style.unknown) for style in STYLES],
)


def changed(style: Style) -> str:
    """The source with the mistake."""
    source = SOURCE.read_text()
    start = source.index(f"def {style.name}(" if style.name == "attention" else f"class {style.name}(")
    helper = {"MultiHeadedAttention": "def attention("}.get(style.name)
    start = source.index(helper) if helper else start
    at = source.index(style.old, start)
    return source[:at] + style.new + source[at + len(style.old) :]


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Style], Path]:
    """A file with the mistaken style."""
    folder = tmp_path_factory.mktemp("styles")

    def write(style: Style) -> Path:
        path = folder / f"{style.name.lower()}_mistaken.py"
        path.write_text(changed(style), encoding="utf-8")
        return path

    return write


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(style: Style, of: Any) -> Any:
    torch.manual_seed(11)
    made = style.make(of)
    return made.double().eval() if isinstance(made, nn.Module) and not style.name.startswith("Llama") else made


def rows(style: Style) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if style.name.startswith("Llama") else torch.float64
    drawn = torch.randn(2, BATCH, T, D, generator=torch.Generator().manual_seed(5), dtype=dtype)
    return drawn[0], drawn[1]


def checked(path: Path, name: str) -> Examination:
    """The examination without options."""
    return examination_of(CheckRequest(TargetRequest(f"{path}:{name}")))


@STYLE
def test_numpy_confirms_that_each_style_is_attention(style: Style) -> None:
    x, y = rows(style)
    with torch.no_grad():
        module = made(style, styles)
        found = style.call(module, x, y)
    expected = style.expected(module, x.double().numpy(), y.double().numpy())
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-5, atol=1e-5)


@EXAMINED_STYLE
def test_a_right_style_is_never_called_wrong(style: Style) -> None:
    found = checked(SOURCE, style.name)
    assert found.verdict == ("unknown" if style.unknown else "right"), [one.message for one in found.findings]
    assert found.findings == ()


def test_the_reason_for_not_knowing_names_the_parameters_that_no_attention_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LAYERS_FOR_ONE", "_LAYERS_FOR_TWO", "_MOST_PAIRS"):
        monkeypatch.setattr(f"mhacli.compute.check.diagnose.{name}", 1)
    found = checked(SOURCE, "TalkingHeads")
    assert found.verdict == "unknown"
    assert found.reason
    assert "\n" not in found.reason
    assert "--against TARGET" in found.next_steps[0]
    assert "proj_l, proj_w" in found.reason


@EXAMINED_STYLE
def test_a_mistaken_style_is_never_called_right(style: Style, mistaken: Callable[[Style], Path]) -> None:
    found = checked(mistaken(style), style.name)
    assert found.verdict == ("unknown" if style.unknown else "wrong"), found.reason
    assert not style.codes or found.findings[0].code in style.codes


@pytest.mark.parametrize(
    ("title", "is_causal"),
    [
        ("Causal self-attention.", True),
        ("A vanilla multi-head masked self-attention layer", True),
        ("Autoregressive grouped-query attention with rotary positions", True),
        ("Non-causal self-attention", False),
        ("Attention, optionally causal", False),
        ("Bidirectional or causal attention", False),
        ("Attention over a causal language model's states", False),
        ("Masked attention: takes a mask", False),
    ],
)
def test_the_first_line_of_a_docstring_shows_whether_causality_is_meant(
    title: str, is_causal: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"titled_{abs(hash(title))}.py"
    path.write_text(
        f"from support.attentions.styles import VitAttention\nclass Attention(VitAttention):\n    {title!r}\n"
    )
    request = TargetRequest(f"{path}:Attention", pairs([f"dim={D}", f"num_heads={H}"], "arg"))
    assert is_meant_causal(load_user_attention(request, no_stage), request) == is_causal
