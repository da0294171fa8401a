"""A model that takes token ids is examined by its behaviour: what sees the future, its batch or its
length is wrong, at the part that does it; what holds is called right or consistent, with what was
tried and what was not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from support import checkpoints, some, user_code
from support.mha import run
from torch import Tensor, nn

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

KEYS = "z = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)"
ADD = "x = x + self.attention(self.before(x))"


class Wrong(NamedTuple):
    """A model with one piece replaced, the code of its mistake, and the part that is named."""

    layer: str
    old: str
    new: str
    code: str
    part: str


WRONG = (
    Wrong(
        "GPT",
        "is_causal=self.causal",
        "is_causal=False",
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "GPT",
        KEYS,
        "k = k.cumsum(2) + 0 * k.flip(2) + F.pad(k[:, :, 1:], (0, 0, 0, 1)) / 8; " + KEYS,
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "GPT",
        KEYS,
        "n = -(-k.shape[2] // 16) * 16; m = F.pad(k, (0, 0, 0, n - k.shape[2])).unflatten(2, (-1,"
        " 16)).mean(3).repeat_interleave(16, 2)[:, :, :k.shape[2]]; "
        + KEYS.replace("q, k, v", "q, k + m, v"),
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "GPT",
        KEYS,
        "allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1); "
        + KEYS.replace("is_causal=self.causal", "attn_mask=allowed"),
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "GPT",
        "is_causal=self.causal",
        "is_causal=not self.training",
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "LastOnly",
        "is_causal=self.causal",
        "is_causal=False",
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "ZeroHead",
        "is_causal=self.causal",
        "is_causal=False",
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "GPT", ADD, "x = x - x.mean(1, keepdim=True); " + ADD, "sees-the-future", "blocks.0 (Block)"
    ),
    Wrong(
        "GPT", ADD, "x = x - x.mean(0, keepdim=True) / 2; " + ADD, "batch-leak", "blocks.0 (Block)"
    ),
    Wrong(
        "GPT",
        ADD,
        "x = x / (1 + x.abs().amax((0, 2), keepdim=True)); " + ADD,
        "batch-leak",
        "blocks.0 (Block)",
    ),
    Wrong(
        "GPT",
        KEYS,
        "k[1:, :, 0] = k[:1, :, 0]; " + KEYS,
        "batch-leak",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "GPT",
        ADD,
        "x = x + F.conv1d(F.pad(x.mT, (0, 1)), x.new_ones(24, 1, 2) / 8, groups=24).mT; " + ADD,
        "sees-the-future",
        "blocks.0 (Block)",
    ),
    Wrong(
        "GPT",
        KEYS,
        "c = torch.arange(x.shape[1]) // 16; "
        + KEYS.replace("is_causal=self.causal", "attn_mask=c[:, None] >= c"),
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "Cached",
        "n_past, n_past + ids.shape[1])",
        "n_past, n_past + ids.shape[1]) + int(n_past > 0)",
        "cache-differs",
        "",
    ),
    Wrong(
        "Cached", "attn_mask=mask", "attn_mask=mask if past is None else None", "cache-differs", ""
    ),
    Wrong(
        "GPT",
        "torch.arange(ids.shape[1])",
        "torch.arange(ids.shape[1]).flip(0)",
        "prefix-differs",
        "",
    ),
    Wrong("GPT", "return self.dropout(", "return F.dropout(", "not-repeatable", "the model (GPT)"),
    Wrong(
        "Masked",
        "scores = (",
        "v = v - v.mean(2, keepdim=True); scores = (",
        "sees-the-future",
        "the model (Masked)",
    ),
    Wrong(
        "Net",
        "x = self.embedded(ids)",
        "e = self.embedded(ids); x = getattr(self, 'last', e); "
        "x = e + x / 999 if x is not e and x.shape == e.shape else e; self.last = e",
        "not-repeatable",
        "",
    ),
    Wrong("Padded", "attn_mask=mask", "attn_mask=None", "padding-leak", ""),
    Wrong("Padded", "attn_mask=mask", "attn_mask=mask, is_causal=mask is None", "padding-leak", ""),
    Wrong("Pooled", "else ~padding_mask", "else padding_mask < 2", "padding-leak", ""),
    Wrong(
        "Pooled",
        "return (answers * real[..., None]).sum(1) / real.sum(1, keepdim=True)",
        "return answers.mean(1)[:, 0]",
        "padding-leak",
        "",
    ),
    Wrong("Pooled", "return (answers", "return (answers.roll(1, 0)", "batch-leak", ""),
    Wrong(
        "Demanding",
        "is_causal=self.causal",
        "is_causal=False",
        "sees-the-future",
        "blocks.0.attention (Attention)",
    ),
    Wrong(
        "GPT",
        KEYS,
        "n = k.shape[2]; allowed = torch.zeros_like(k[..., 0]).scatter(2, k.norm(dim=-1).topk(n //"
        " 2).indices, 1)[:, :, None].bool() & torch.ones(n, n, dtype=torch.bool).tril(); "
        + KEYS.replace("is_causal=self.causal", "attn_mask=allowed"),
        "sees-the-future",
        "",
    ),
    Wrong(
        "Net",
        "self.tokens(ids) +",
        "self.tokens(ids).mean(1, True) + self.tokens(ids) +",
        "sees-the-future",
        "the model (Net)",
    ),
    Wrong(
        "Net",
        "self.tokens(ids) +",
        "self.tokens(ids.roll(-1, 1)) + self.tokens(ids) +",
        "sees-the-future",
        "the model (Net)",
    ),
    Wrong(
        "GPT",
        KEYS,
        "n = torch.arange(x.shape[1]); c = n // 16 * 16 if self.training else n; c = c.where(n >"
        " 31, n); " + KEYS.replace("is_causal=self.causal", "attn_mask=c[:, None] >= c"),
        "sees-the-future",
        "",
    ),
    Wrong(
        "Net",
        "x = self.embedded(ids)",
        "e = F.one_hot(ids.flatten() // 17, 4); n = (e.cumsum(0) * e).sum(1).view_as(ids); "
        "x = self.embedded(ids) * (n <= 64)[..., None]",
        "batch-leak",
        "",
    ),
    Wrong(
        "ZeroHead",
        "nn.init.zeros_(layer.weight)",
        "layer.weight.data *= 1e-7; self.blocks[1].attention.causal = False",
        "sees-the-future",
        "blocks.1.attention (Attention)",
    ),
)


OF_A_KIND = (
    "k = k.cumsum",
    "n = -(-k",
    "is_causal=not",
    "x = x - x.mean(1",
    "x = x / (1",
    "x = x + F.conv1d",
    "c = torch.arange",
    "attn_mask=mask if past",
    "k[1:, :, 0]",
    "allowed = torch.ones(x",
    "n = k.shape[2]; a",
    "n = torch",
    "self.tokens(ids.roll",
)
LIKE_GPT = ("LastOnly", "ZeroHead", "Demanding", "Shifted", "LossOnly", "Compared", "Tableless")
"""Pieces and layers that are of a kind with others: what a piece begins with, and the names of
layers."""
CASES = [
    pytest.param(
        case, marks=[pytest.mark.real] * (case.new.startswith(OF_A_KIND) or case.layer in LIKE_GPT)
    )
    for case in WRONG
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.new[:24]}")
def test_a_leak_is_a_mistake_at_the_part_that_leaks(case: Wrong, tmp_path: Path) -> None:
    path, _ = user_code.write(tmp_path, f"models:{case.layer}", (case.old, case.new))
    torch.manual_seed(3)
    model = getattr(user_code.load(path), case.layer)
    report = mhacli.check(model, causal=True if case.layer in ("LastOnly", "Masked") else None)
    assert report.verdict == "wrong"
    assert not report.ok
    *mistakes, finding = report.findings
    assert all(mistake.proven for mistake in mistakes)
    assert finding.code == case.code
    assert case.part in finding.message
    failed = {behaviour.name: behaviour for behaviour in report.behaviour if behaviour.ok is False}
    (behaviour,) = failed.values()
    assert behaviour.largest > behaviour.tolerance
    assert behaviour.tried.length == 64
    assert case.part == "" or finding.file == str(path)


@pytest.mark.parametrize(
    ("layer", "old", "new"),
    [
        ("GPT", ADD, ADD + "; h = x[..., 0] > 0; x[h] = F.dropout(x[h], 0.1, self.training)"),
        ("GPT", "x = self.embedded(ids)", "x = self.embedded(ids[:, -16:])"),
        (
            "GPT",
            "x = self.embedded(ids)",
            (
                "x = self.embedded(ids) - self.positions.mean;"
                " self.positions.register_buffer('mean', self.positions.mean + self.training *"
                " x.mean((0, 1)))"
            ),
        ),
        ("PrefixGPT", "PrefixModel", "PrefixGPT"),
    ],
)
def test_what_resembles_a_leak_is_right(layer: str, old: str, new: str, tmp_path: Path) -> None:
    path, _ = user_code.write(tmp_path, "models:Net", (old, new))
    model = getattr(user_code.load(path), layer)()
    model.positions.register_buffer("mean", torch.zeros(24))
    assert mhacli.check(model).verdict == "right"


OWN_WAY = ("Masked", "Cached", "Padded")
"""Models that compute attention with the weights of modules that they never call: nothing inside
can be compared."""


@pytest.mark.parametrize(
    "layer", some(("GPT", "Masked", "Cached", *LIKE_GPT), default=("GPT", "Masked", "Cached"))
)
def test_a_model_that_sees_no_later_token_is_right(layer: str) -> None:
    model = getattr(user_code.load(user_code.ZOO / "models.py"), layer)
    report = mhacli.check(model, causal=True)
    asked = {behaviour.name: behaviour.ok for behaviour in report.behaviour}
    compared = [] if layer in OWN_WAY else [("Attention", "right")]
    assert (report.verdict, report.ok, report.findings) == (
        "right" if compared else "consistent",
        True,
        (),
    )
    assert [(each.type, each.verdict) for each in report.inside] == compared
    assert [asked[name] for name in ("causality", "prefix", "batch", "repeat")] == [True] * 4
    assert asked["cache"] is (True if layer == "Cached" else None)


@pytest.mark.real
def test_a_decoder_gets_the_causal_mask_that_it_needs_and_is_called_with_the_length_first(
    tmp_path: Path,
) -> None:
    for mask in ("torch.full((T, T), True).triu(1)", "torch.full((2, T, T), True).triu(1)"):
        each = (
            ("tgt_mask, None", "tgt_mask[0] if tgt_mask.ndim > 2 else 1 / 0, None")
            if "2" in mask
            else ("x", "x")
        )
        path, _ = user_code.write(tmp_path, "models:Translation", each)
        report = mhacli.check(user_code.load(path).Translation(), length=32)
        assert (report.verdict, f"tgt_mask={mask}" in report.called) == ("right", True)
    path, _ = user_code.write(
        tmp_path, "models:Translation", ("src_mask, tgt_mask, None", "src_mask, None, None")
    )
    (finding,) = mhacli.check(user_code.load(path).Translation(), length=32).findings
    assert finding.code == "sees-the-future"


NEEDED = {
    "attention_mask": ("attention_mask == 0", "torch.full((2, T), 1)"),
    "lengths": ("torch.arange(ids.shape[1]) >= lengths[:, None]", "…"),
}


@pytest.mark.parametrize(
    "needed", ["attention_mask", pytest.param("lengths", marks=pytest.mark.real)]
)
def test_a_mask_of_padding_or_lengths_that_a_call_needs_are_given(
    needed: str, tmp_path: Path
) -> None:
    given = "padding_mask=None):", f"{needed}):\n        padding_mask = {NEEDED[needed][0]}"
    for faults, verdict in (
        ((), "consistent"),
        ((("else ~padding_mask", "else padding_mask < 2"),), "wrong"),
    ):
        path, _ = user_code.write(tmp_path, "models:Pooled", given, *faults)
        report = mhacli.check(user_code.load(path).Pooled(), length=32)
        assert report.verdict == verdict
        assert report.called.startswith(f"forward(ids, {needed}={NEEDED[needed][1]})")


@pytest.mark.real
@pytest.mark.parametrize(
    ("read", "given"),
    [
        ("t[:, None, None]", "torch.ones(2, dtype=torch.long)"),
        ("t.mean(1, keepdim=True)", "torch.randn(2, 9, 24)"),
    ],
)
def test_a_refusal_gives_an_example_that_is_the_same_in_each_call(
    read: str, given: str, tmp_path: Path
) -> None:
    pairs = (
        ("ids, targets=None", "ids, t, *, targets=None"),
        ("embedded(ids)\n", f"embedded(ids) + {read}\n"),
    )
    path, _ = user_code.write(tmp_path, "models:Net", *pairs)
    with pytest.raises(mhacli.MhaError) as raised:
        mhacli.check(user_code.load(path).Net())
    example = raised.value.hint.split("'")[1]
    assert example == f"lambda m, T: m(torch.randint(64, (2, T)), {given})"
    assert mhacli.check(user_code.load(path).Net(), example=example).verdict == "right"


@pytest.mark.real
def test_a_refusal_of_a_model_that_takes_few_lengths_gives_one_of_them(tmp_path: Path) -> None:
    read = "x = self.embedded(ids)"
    path, _ = user_code.write(
        tmp_path, "models:Net", (read, f"assert ids.shape[1] % 16 == 0; {read}")
    )
    with pytest.raises(mhacli.MhaError) as raised:
        mhacli.check(user_code.load(path).Net())
    example = raised.value.hint.split("'")[1]
    assert example == "lambda m: m(torch.randint(64, (2, 64)))"
    assert mhacli.check(user_code.load(path).Net(), example=example).verdict == "right"


def test_a_mistake_that_no_behaviour_shows_is_found_in_the_attention_inside(tmp_path: Path) -> None:
    path, line = user_code.write(
        tmp_path,
        "models:GPT",
        ("is_causal=self.causal", "is_causal=self.causal, scale=self.scale"),
        (
            "self.n_heads, self.causal = n_heads",
            "self.scale = None; self.n_heads, self.causal = n_heads",
        ),
    )
    model = user_code.load(path).GPT()
    model.blocks[1].attention.scale = 1.0
    report = mhacli.check(model)
    assert report.verdict == "wrong"
    assert [(each.code, each.proven, each.line) for each in report.findings] == [
        ("scale-missing", True, line)
    ]
    assert False not in {behaviour.ok for behaviour in report.behaviour}


@pytest.mark.real
def test_a_block_is_right_if_its_attention_is_whatever_its_name(tmp_path: Path) -> None:
    renamed = [
        (f"{before}Attention{after}", f"{before}Mixer{after}")
        for before, after in (("class ", "(nn"), (" ", "(w"), ("(", ")"))
    ]
    path, _ = user_code.write(tmp_path, "models:GPT", *renamed)
    block = user_code.load(path).Block(24, 3, True)
    report = mhacli.check(block, length=64)
    (inside,) = report.inside
    assert (report.verdict, inside.type, inside.names) == ("right", "Mixer", ("attention",))
    block.attention.forward = lambda x: (
        type(block.attention).forward(block.attention, x.flip(1)).flip(1)
    )
    report = mhacli.check(block, length=64, causal=True)
    assert report.verdict == "wrong"


class Translator(nn.Module):
    """An encoder with a decoder, and a mask for the decoder's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, 24), nn.Linear(24, 40)
        self.layers = nn.Transformer(24, 3, 1, 1, 32, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor, tgt_mask: Tensor | None = None) -> Tensor:
        return self.head(self.layers(self.tokens(src), self.tokens(tgt), tgt_mask=tgt_mask))


class Forgetful(Translator):
    """The mask is not passed on."""

    def forward(self, src: Tensor, tgt: Tensor, tgt_mask: Tensor | None = None) -> Tensor:
        return self.head(self.layers(self.tokens(src), self.tokens(tgt)))


def test_the_tokens_of_a_decoder_are_asked() -> None:
    right, wrong = mhacli.check(Translator()), mhacli.check(Forgetful())
    assert (right.verdict, right.behaviour[0].ok) == ("right", True)
    assert "tgt_mask" in right.called
    assert (wrong.verdict, wrong.findings[0].code) == ("wrong", "sees-the-future")


class LengthFirst(nn.Module):
    """The tokens of several texts are beside each other, as in torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers, self.head = (
            nn.Embedding(40, 24),
            nn.LSTM(24, 24),
            nn.Linear(24, 40),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(ids))[0])


class Timed(LengthFirst):
    """Beside each token stands another, and its number."""

    def forward(self, ids: Tensor, durations: Tensor, places: Tensor) -> Tensor:
        return super().forward((ids + durations + 0 * places).T % 40).transpose(0, 1)


def test_what_an_example_draws_beside_a_text_begins_alike_at_each_length() -> None:
    drawn, places = "torch.randint(20, (2, T))", "torch.arange(64)[:T].expand(2, T)"
    report = mhacli.check(Timed(), example=f"lambda m, T: m({drawn}, {drawn}, {places})", length=32)
    assert (report.verdict, report.called) == ("consistent", "forward(ids, durations=…)")


class Sideways(LengthFirst):
    """The text is read across the batch, each text behind those before it."""

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        return super().forward(ids).view(batch, length, -1)


class Summary(LengthFirst):
    """It gives an output for each pair of tokens."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids).unflatten(1, (-1, 2)).sum(2))


class Running(Summary):
    """One answer for a text, and no part of it reads the tokens but the embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids).cumsum(1)[:, -1]


def test_an_embedding_does_not_stand_for_what_follows_it() -> None:
    with pytest.raises(mhacli.MhaError):
        mhacli.check(Summary(), causal=True)
    assert mhacli.check(Running(), causal=True).verdict == "unknown"


class Around(nn.Module):
    """Attention over vectors whose first axis is the length."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_a_text_that_depends_on_others_is_wrong_unless_another_axis_may_be_that_of_the_texts() -> (
    None
):
    assert [(finding.code, finding.file) for finding in mhacli.check(Sideways()).findings] == [
        ("batch-leak", __file__)
    ]
    example = "lambda m, T: m(torch.randint(m.tokens.num_embeddings, (T, 3)))"
    around = mhacli.check(Around())
    for right in (mhacli.check(LengthFirst()), mhacli.check(LengthFirst(), example=example)):
        assert (right.verdict, right.called) == ("consistent", "forward(ids)  # rows [seq, batch]")
    assert (around.verdict, around.example) == ("right", "lambda m, T: m(torch.randn(T, 2, 24))")


class Neighbours(Around):
    """A token that is hidden reaches the one before it, but padding, whose vector is zero, reaches
    none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 24, padding_idx=0)

    def forward(self, ids: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids.T)
        x = x + nn.functional.pad(x, (0, 0, 0, 0, 0, 1))[1:]
        return self.attention(x, x, x, key_padding_mask=key_padding_mask)[0].transpose(0, 1)


def test_padding_is_a_leak_only_if_it_is_with_each_meaning_of_a_mask() -> None:
    asked = {behaviour.name: behaviour.ok for behaviour in mhacli.check(Neighbours()).behaviour}
    assert asked["right-padding"]


class Recurrent(Around):
    """Attention behind a recurrence with biases, which are not those of the projection before it;
    or beside it.
    """

    def __init__(self, beside: float) -> None:
        super().__init__()
        self.wide, self.narrow, self.lstm = (
            nn.Linear(24, 36),
            nn.Linear(36, 24, bias=False),
            nn.LSTM(24, 24),
        )
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        behind = self.lstm(self.narrow(self.wide(x)))[0]
        return super().forward(torch.lerp(behind, x, self.beside))


@pytest.mark.parametrize("beside", some((1.0, 0.0), default=[1.0]))
def test_attention_behind_a_recurrence_is_compared(beside: float) -> None:
    report = mhacli.check(Recurrent(beside))
    assert (report.verdict, [inside.verdict for inside in report.inside]) == (
        "right",
        ["right"] * (not beside),
    )


@pytest.mark.real
def test_padding_beside_a_memory_is_no_fault_of_a_mask_of_the_memory() -> None:
    report = mhacli.check(nn.TransformerDecoderLayer(24, 3, 32, batch_first=True), length=32)
    assert (report.verdict, report.findings) == ("right", ())


class Chunked(Around):
    """Each chunk of 16 tokens sees itself as a whole, and those before it."""

    def forward(self, x: Tensor) -> Tensor:
        chunk = torch.arange(len(x)) // 16
        return self.attention(x, x, x, attn_mask=chunk[:, None] < chunk)[0]


class Triangular(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.attention(
            x, x, x, attn_mask=torch.full((len(x), len(x)), -torch.inf).triu(1), need_weights=False
        )[0]


def test_a_leak_that_only_long_texts_show_is_found_and_none_where_a_mask_has_32_bits() -> None:
    assert [finding.code for finding in mhacli.check(Chunked()).findings] == ["sees-the-future"]
    assert mhacli.check(Triangular(), causal=True).verdict == "right"


@pytest.mark.parametrize(
    ("layer", "side"), [("Padded", "hide"), ("Padded", None), ("Leading", None)]
)
def test_padding_is_tried_on_both_sides_and_is_a_note_where_positions_cannot_be_given(
    layer: str, side: Literal["hide"] | None
) -> None:
    model = getattr(user_code.load(user_code.ZOO / "models.py"), layer)
    asked = {
        behaviour.name: behaviour for behaviour in mhacli.check(model, mask_means=side).behaviour
    }
    assert asked["right-padding"].ok
    left = asked["left-padding"]
    assert (left.ok, left.tried is not None, left.largest > left.tolerance) == (None, True, True)


@pytest.mark.parametrize(
    ("example", "mask", "verdict"),
    [
        ("lambda m, T: m(torch.randint(65, (2, T)), {})", "torch.ones(T, T).tril()", "consistent"),
        ("lambda m, T: m(torch.randint(65, (2, T)), mask={})", "torch.ones(T, T).tril(1)", "wrong"),
        (
            "lambda m: m(torch.randint(65, (2, 9)), mask={})",
            "torch.ones(9, 9).tril()",
            "consistent",
        ),
    ],
)
def test_a_model_is_called_as_the_example_shows(example: str, mask: str, verdict: str) -> None:
    model, random = user_code.load(user_code.ZOO / "models.py").Masked, torch.get_rng_state()
    report = mhacli.check(
        model, example=example.format(mask), causal=True, length=None if "m:" in example else 32
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert report.verdict == verdict
    asked = {behaviour.name: behaviour for behaviour in report.behaviour}
    assert asked["causality"].tried.length == (9 if "m:" in example else 32)
    assert asked["prefix"].ok is (True if verdict == "consistent" and "T:" in example else None)


@pytest.mark.real
def test_a_compiled_module_and_a_function_are_examined_and_a_scripted_module_is_refused() -> None:
    model = user_code.load(user_code.ZOO / "models.py").GPT()
    assert mhacli.check(torch.compile(model, backend="eager"), length=32).verdict == "right"
    assert (
        mhacli.check(lambda ids: model.eval()(ids)[0], length=32, causal=True).verdict
        == "consistent"
    )
    alone = (lambda ids: model(ids)[0].squeeze(0)), r"\[1, 6\] give \[6, 65\]"
    for thing, word in ((torch.jit.script(nn.Linear(2, 2)), "scripted"), (3, "got int"), alone):
        with pytest.raises(mhacli.MhaError, match=word):
            mhacli.check(thing)


@pytest.mark.real
def test_a_checkpoint_is_asked_the_same_and_what_doctor_examines(tmp_path: Path) -> None:
    words = ("check", "--model", checkpoints.folder("gpt2"), "--length", "16", "--json")
    document = run(tmp_path, *words, writes=("torchinductor_root",)).json
    assert document["verdict"] == "right"
    (inside,) = document["inside"]
    assert (inside["type"], inside["verdict"], len(inside["names"])) == (
        "GPT2Attention",
        "right",
        3,
    )
    held = {behaviour["name"] for behaviour in document["behaviour"] if behaviour["ok"]}
    both_sides = {"left-padding", "right-padding"}
    assert (
        held
        >= {
            "causality",
            "prefix",
            "batch",
            "repeat",
            "cache",
            "finite",
            "eager",
            "row-sums",
        }
        | both_sides
    )
    assert run(tmp_path, "check", "--json", code=2).error["code"] == "usage"


class Selecting(nn.Module):
    """Of all keys of the text the longer half is seen: as small a change as rounding selects
    others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(65, 48), nn.Linear(48, 65)
        self.layers = nn.ModuleList(nn.Linear(48, 144) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.tokens(ids), ids.shape[1]
        for layer in self.layers:
            q, k, v = (
                part.unflatten(-1, (4, 12)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1)
            )
            best = k.norm(dim=-1).topk(max(1, n // 2)).indices
            seen = torch.zeros_like(k[..., 0], dtype=torch.bool).scatter(2, best, True)[:, :, None]
            seen = (seen | torch.eye(n, dtype=torch.bool)) & torch.ones(
                n, n, dtype=torch.bool
            ).tril()
            z = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + z.transpose(1, 2).flatten(2)
        return self.head(x)


def test_what_rounding_hides_is_not_called_consistent() -> None:
    report = mhacli.check(Selecting)
    assert (report.verdict, report.behaviour[0].ok) == ("unknown", None)


@pytest.mark.parametrize(
    ("layer", "states", "verdict"),
    [
        ("Encoder", {}, "right"),
        ("Padded", {}, "consistent"),
        ("PrefixModel", {}, "right"),
        ("Open", {}, "unknown"),
        ("Open", {"causal": False}, "right"),
        ("Open", {"causal": True}, "wrong"),
        pytest.param("PrefixModel", {"causal": True}, "wrong", marks=pytest.mark.real),
    ],
)
def test_whether_later_tokens_may_be_seen_is_stated_or_known(
    layer: str, states: dict[str, bool], verdict: str
) -> None:
    model = getattr(user_code.load(user_code.ZOO / "models.py"), layer)
    report = mhacli.check(model, **states)
    assert report.verdict == verdict
    causality = next(behaviour for behaviour in report.behaviour if behaviour.name == "causality")
    assert causality.ok is (False if verdict == "wrong" else None)


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = user_code.load(user_code.ZOO / "models.py").GPT()
    nn.utils.parametrizations.weight_norm(model.blocks[0].attention.out)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random, training = torch.get_rng_state(), [part.training for part in model.modules()]
    assert mhacli.check(model).verdict == "right"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [part.training for part in model.modules()] == training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert model(torch.zeros(1, 4, dtype=torch.long))[0].isfinite().all()
    model.kept = (n for n in ())
    with pytest.raises(mhacli.MhaError, match="cannot be copied"):
        mhacli.check(model)

    def build() -> nn.Module:
        return model

    assert mhacli.check(build).verdict == "right"
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_the_command_answers_with_its_exit_code_and_json(tmp_path: Path) -> None:
    path, _ = user_code.write(tmp_path, "models:GPT", ("is_causal=self.causal", "is_causal=False"))
    document = run(tmp_path, "check", f"{path.name}:GPT", "--length", "32", "--json", code=3).json
    assert (document["schema"], document["verdict"]) == ("mha.check/1", "wrong")
    causality = document["behaviour"][0]
    assert (causality["name"], causality["ok"], causality["tried"]["length"]) == (
        "causality",
        False,
        32,
    )
    assert causality["at"]["position"] < causality["at"]["cut"]
