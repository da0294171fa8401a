"""A model that takes token ids is examined by its behaviour: what sees the future, its batch or its
length is wrong, at the part that does it; what holds is called right or consistent, with what was
tried and what was not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from support import cases, checkpoints, edits, some, user_code
from support.cases import Case
from support.edits import Edit
from support.mha import run
from torch import nn

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = Path(__file__).parent / "cases"
KERNEL = "z = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)"
"""The line of a model's attention that calls the kernel."""
ADDS = "x = x + self.attention(self.before(x))"
"""The line of a block that adds the output of its attention."""
ATTENTION, BLOCK = "blocks.0.attention (Attention)", "blocks.0 (Block)"
"""Parts of the models."""

WRONG = (
    Edit(
        layer="models:GPT",
        old="is_causal=self.causal",
        new="is_causal=False",
        expect="sees-the-future",
        part=ATTENTION,
        common=True,
    ),
    Edit(
        layer="models:GPT",
        old=KERNEL,
        new="k = k.cumsum(2) + 0 * k.flip(2) + F.pad(k[:, :, 1:], (0, 0, 0, 1)) / 8; " + KERNEL,
        expect="sees-the-future",
        part=ATTENTION,
    ),
    Edit(
        layer="models:GPT",
        old=KERNEL,
        new=(
            "n = -(-k.shape[2] // 16) * 16; "
            "m = F.pad(k, (0, 0, 0, n - k.shape[2])).unflatten(2, (-1, 16)); "
            "m = m.mean(3).repeat_interleave(16, 2)[:, :, :k.shape[2]]; "
            "z = F.scaled_dot_product_attention(q, k + m, v, is_causal=self.causal)"
        ),
        expect="sees-the-future",
        part=ATTENTION,
    ),
    Edit(
        layer="models:GPT",
        old=KERNEL,
        new=(
            "allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1); "
            "z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)"
        ),
        expect="sees-the-future",
        part=ATTENTION,
    ),
    Edit(
        layer="models:GPT",
        old="is_causal=self.causal",
        new="is_causal=not self.training",
        expect="sees-the-future",
        part=ATTENTION,
    ),
    Edit(
        layer="models:LastOnly",
        old="is_causal=self.causal",
        new="is_causal=False",
        expect="sees-the-future",
        states={"causal": True},
        part=ATTENTION,
    ),
    Edit(
        layer="models:ZeroHead",
        old="is_causal=self.causal",
        new="is_causal=False",
        expect="sees-the-future",
        part=ATTENTION,
    ),
    Edit(
        layer="models:GPT",
        old=ADDS,
        new="x = x - x.mean(1, keepdim=True); " + ADDS,
        expect="sees-the-future",
        part=BLOCK,
    ),
    Edit(
        layer="models:GPT",
        old=ADDS,
        new="x = x - x.mean(0, keepdim=True) / 2; " + ADDS,
        expect="batch-leak",
        part=BLOCK,
        common=True,
    ),
    Edit(
        layer="models:GPT",
        old=ADDS,
        new="x = x / (1 + x.abs().amax((0, 2), keepdim=True)); " + ADDS,
        expect="batch-leak",
        part=BLOCK,
    ),
    Edit(
        layer="models:GPT",
        old=KERNEL,
        new="k[1:, :, 0] = k[:1, :, 0]; " + KERNEL,
        expect="batch-leak",
        part=ATTENTION,
    ),
    Edit(
        layer="models:GPT",
        old=ADDS,
        new=(
            "x = x + F.conv1d(F.pad(x.mT, (0, 1)), x.new_ones(24, 1, 2) / 8, groups=24).mT; " + ADDS
        ),
        expect="sees-the-future",
        part=BLOCK,
    ),
    Edit(
        layer="models:GPT",
        old=KERNEL,
        new=(
            "c = torch.arange(x.shape[1]) // 16; "
            "z = F.scaled_dot_product_attention(q, k, v, attn_mask=c[:, None] >= c)"
        ),
        expect="sees-the-future",
        part=ATTENTION,
    ),
    Edit(
        layer="models:Cached",
        old="n_past, n_past + ids.shape[1])",
        new="n_past, n_past + ids.shape[1]) + int(n_past > 0)",
        expect="cache-differs",
        common=True,
    ),
    Edit(
        layer="models:Cached",
        old="attn_mask=mask",
        new="attn_mask=mask if past is None else None",
        expect="cache-differs",
    ),
    Edit(
        layer="models:GPT",
        old="torch.arange(ids.shape[1])",
        new="torch.arange(ids.shape[1]).flip(0)",
        expect="prefix-differs",
        common=True,
    ),
    Edit(
        layer="models:GPT",
        old="return self.dropout(",
        new="return F.dropout(",
        expect="not-repeatable",
        part="the model (GPT)",
        common=True,
    ),
    Edit(
        layer="models:Masked",
        old="scores = (",
        new="v = v - v.mean(2, keepdim=True); scores = (",
        expect="sees-the-future",
        states={"causal": True},
        part="the model (Masked)",
        common=True,
    ),
    Edit(
        layer="models:Net",
        old="x = self.embedded(ids)",
        new=(
            "e = self.embedded(ids); "
            "x = getattr(self, 'last', e); "
            "x = e + x / 999 if x is not e and x.shape == e.shape else e; "
            "self.last = e"
        ),
        expect="not-repeatable",
        common=True,
    ),
    Edit(
        layer="models:Padded",
        old="attn_mask=mask",
        new="attn_mask=None",
        expect="padding-leak",
        common=True,
    ),
    Edit(
        layer="models:Padded",
        old="attn_mask=mask",
        new="attn_mask=mask, is_causal=mask is None",
        expect="padding-leak",
        common=True,
    ),
    Edit(
        layer="models:Pooled",
        old="else ~padding_mask",
        new="else padding_mask < 2",
        expect="padding-leak",
        common=True,
    ),
    Edit(
        layer="models:Pooled",
        old="return (answers * real[..., None]).sum(1) / real.sum(1, keepdim=True)",
        new="return answers.mean(1)[:, 0]",
        expect="padding-leak",
        common=True,
    ),
    Edit(
        layer="models:Pooled",
        old="return (answers",
        new="return (answers.roll(1, 0)",
        expect="batch-leak",
        common=True,
    ),
    Edit(
        layer="models:Demanding",
        old="is_causal=self.causal",
        new="is_causal=False",
        expect="sees-the-future",
        part=ATTENTION,
    ),
    Edit(
        layer="models:GPT",
        old=KERNEL,
        new=(
            "n = k.shape[2]; "
            "best = k.norm(dim=-1).topk(n // 2).indices; "
            "best = torch.zeros_like(k[..., 0]).scatter(2, best, 1)[:, :, None].bool(); "
            "allowed = best & torch.ones(n, n, dtype=torch.bool).tril(); "
            "z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)"
        ),
        expect="sees-the-future",
    ),
    Edit(
        layer="models:Net",
        old="self.tokens(ids) +",
        new="self.tokens(ids).mean(1, True) + self.tokens(ids) +",
        expect="sees-the-future",
        part="the model (Net)",
        common=True,
    ),
    Edit(
        layer="models:Net",
        old="self.tokens(ids) +",
        new="self.tokens(ids.roll(-1, 1)) + self.tokens(ids) +",
        expect="sees-the-future",
        part="the model (Net)",
    ),
    Edit(
        layer="models:GPT",
        old=KERNEL,
        new=(
            "n = torch.arange(x.shape[1]); "
            "c = n // 16 * 16 if self.training else n; "
            "c = c.where(n > 31, n); "
            "z = F.scaled_dot_product_attention(q, k, v, attn_mask=c[:, None] >= c)"
        ),
        expect="sees-the-future",
    ),
    Edit(
        layer="models:Net",
        old="x = self.embedded(ids)",
        new=(
            "e = F.one_hot(ids.flatten() // 17, 4); "
            "n = (e.cumsum(0) * e).sum(1).view_as(ids); "
            "x = self.embedded(ids) * (n <= 64)[..., None]"
        ),
        expect="batch-leak",
        common=True,
    ),
    Edit(
        layer="models:ZeroHead",
        old="nn.init.zeros_(layer.weight)",
        new="layer.weight.data *= 1e-7; self.blocks[1].attention.causal = False",
        expect="sees-the-future",
        part="blocks.1.attention (Attention)",
    ),
)


@pytest.mark.parametrize("edit", edits.parameters(WRONG))
def test_a_leak_is_a_mistake_at_the_part_that_leaks(edit: Edit, tmp_path: Path) -> None:
    path, _ = edit.write(tmp_path)
    torch.manual_seed(3)
    model = getattr(user_code.load(path), edit.name)
    report = user_code.check(model, **edit.states)
    assert report.verdict == "wrong"
    assert not report.ok
    *mistakes, finding = report.findings
    assert all(mistake.proven or mistake.code == "differs-beyond" for mistake in mistakes)
    assert finding.code == edit.expect
    assert edit.part in finding.message
    failed = {behaviour.name: behaviour for behaviour in report.behaviour if behaviour.ok is False}
    (behaviour,) = failed.values()
    assert behaviour.largest > behaviour.tolerance
    assert behaviour.tried.length == 64
    assert edit.part == "" or finding.file == str(path)


RIGHT = (
    Edit(
        layer="models:Net",
        old=ADDS,
        new=ADDS + "; h = x[..., 0] > 0; x[h] = F.dropout(x[h], 0.1, self.training)",
        expect="right",
        common=True,
    ),
    Edit(
        layer="models:Net",
        old="x = self.embedded(ids)",
        new="x = self.embedded(ids[:, -16:])",
        expect="right",
        common=True,
    ),
    Edit(
        layer="models:Net",
        old="x = self.embedded(ids)",
        new=(
            "x = self.embedded(ids) - self.positions.mean; "
            "mean = self.positions.mean + self.training * x.mean((0, 1)); "
            "self.positions.register_buffer('mean', mean)"
        ),
        expect="right",
        common=True,
    ),
)
"""`GPT` inherits what these change."""


@pytest.mark.parametrize("edit", edits.parameters(RIGHT))
def test_what_resembles_a_leak_is_right(edit: Edit, tmp_path: Path) -> None:
    path, _ = edit.write(tmp_path)
    model = user_code.load(path).GPT()
    model.positions.register_buffer("mean", torch.zeros(24))
    assert user_code.check(model).verdict == edit.expect


def test_a_prefix_may_see_itself_in_a_model_that_is_called_a_decoder(tmp_path: Path) -> None:
    path, _ = user_code.write(tmp_path, "models:PrefixModel", ("PrefixModel", "PrefixGPT"))
    assert user_code.check(user_code.load(path).PrefixGPT()).verdict == "right"


LIKE_GPT = ("LastOnly", "ZeroHead", "Demanding", "Shifted", "LossOnly", "Compared", "Tableless")
OWN_WAY = ("Masked", "Cached", "Padded")
"""Models that compute attention with the weights of modules that they never call: nothing inside
can be compared."""


@pytest.mark.parametrize(
    "layer", some(("GPT", "Masked", "Cached", *LIKE_GPT), default=("GPT", "Masked", "Cached"))
)
def test_a_model_that_sees_no_later_token_is_right(layer: str) -> None:
    model = getattr(user_code.load(user_code.ZOO / "models.py"), layer)
    report = user_code.check(model, causal=True)
    asked = {behaviour.name: behaviour.ok for behaviour in report.behaviour}
    compared = [] if layer in OWN_WAY else [("Attention", "right")]
    assert report.verdict == ("right" if compared else "consistent")
    assert (report.ok, report.findings) == (True, ())
    assert [(each.type, each.verdict) for each in report.inside] == compared
    assert [asked[name] for name in ("causality", "prefix", "batch", "repeat")] == [True] * 4
    assert asked["cache"] is (True if layer == "Cached" else None)


@pytest.mark.real
@pytest.mark.parametrize(
    ("pairs", "mask"),
    [
        ((), "torch.full((T, T), True).triu(1)"),
        (
            [("tgt_mask, None", "tgt_mask[0] if tgt_mask.ndim > 2 else 1 / 0, None")],
            "torch.full((2, T, T), True).triu(1)",
        ),
    ],
    ids=["for all texts", "for each text"],
)
def test_a_decoder_gets_the_causal_mask_that_it_needs_and_is_called_with_the_length_first(
    pairs: list[tuple[str, str]], mask: str, tmp_path: Path
) -> None:
    path, _ = user_code.write(tmp_path, "models:Translation", *pairs)
    report = user_code.check(user_code.load(path).Translation(), length=32)
    assert report.verdict == "right"
    assert f"tgt_mask={mask}" in report.called


@pytest.mark.real
def test_a_decoder_that_does_not_use_its_mask_is_wrong(tmp_path: Path) -> None:
    pair = ("src_mask, tgt_mask, None", "src_mask, None, None")
    path, _ = user_code.write(tmp_path, "models:Translation", pair)
    (finding,) = user_code.check(user_code.load(path).Translation(), length=32).findings
    assert finding.code == "sees-the-future"


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [((), "consistent"), ([("else ~padding_mask", "else padding_mask < 2")], "wrong")],
    ids=["right", "leaks"],
)
@pytest.mark.parametrize(
    ("needed", "as_mask", "given"),
    [
        ("attention_mask", "attention_mask == 0", "torch.full((2, T), 1)"),
        pytest.param(
            "lengths",
            "torch.arange(ids.shape[1]) >= lengths[:, None]",
            "…",
            marks=pytest.mark.real,
        ),
    ],
    ids=["attention_mask", "lengths"],
)
def test_a_mask_of_padding_or_lengths_that_a_call_needs_are_given(
    needed: str,
    as_mask: str,
    given: str,
    pairs: list[tuple[str, str]],
    verdict: str,
    tmp_path: Path,
) -> None:
    needs = ("padding_mask=None):", f"{needed}):\n        padding_mask = {as_mask}")
    path, _ = user_code.write(tmp_path, "models:Pooled", needs, *pairs)
    report = user_code.check(user_code.load(path).Pooled(), length=32)
    assert report.verdict == verdict
    assert report.called.startswith(f"forward(ids, {needed}={given})")


@pytest.mark.real
@pytest.mark.parametrize(
    ("read", "given"),
    [
        ("t[:, None, None]", "torch.ones(2, dtype=torch.long)"),
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
        user_code.check(user_code.load(path).Net())
    example = raised.value.hint.split("'")[1]
    assert example == f"lambda m, T: m(torch.randint(64, (2, T)), {given})"
    assert user_code.check(user_code.load(path).Net(), example=example).verdict == "right"


@pytest.mark.real
@pytest.mark.parametrize(
    ("read", "verdict"), [("t.mean(1, keepdim=True)", "right"), ("t.mean((0, 1))", "wrong")]
)
def test_vectors_beside_ids_are_a_memory_that_each_text_has_alone(
    read: str, verdict: str, tmp_path: Path
) -> None:
    pairs = (
        ("ids, targets=None", "ids, t, *, targets=None"),
        ("embedded(ids)\n", f"embedded(ids) + {read}\n"),
    )
    path, _ = user_code.write(tmp_path, "models:Net", *pairs)
    report = user_code.check(user_code.load(path).Net())
    assert report.verdict == verdict
    (memory,) = [each for each in report.behaviour if each.name == "memory"]
    assert memory.ok is True or verdict == "wrong"


@pytest.mark.real
@pytest.mark.parametrize("leaks", [False, True])
def test_a_model_that_takes_few_lengths_is_examined_at_one_of_them(
    leaks: bool, tmp_path: Path
) -> None:
    read = "x = self.embedded(ids)"
    more = "; x = x + x.mean(1, keepdim=True)" if leaks else ""
    path, _ = user_code.write(
        tmp_path, "models:Net", (read, f"assert ids.shape[1] % 16 == 0; {read}{more}")
    )
    report = user_code.check(user_code.load(path).Net(), causal=True)
    assert report.verdict == ("wrong" if leaks else "right")
    assert {finding.code for finding in report.findings} == (
        {"sees-the-future"} if leaks else set()
    )


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
    report = user_code.check(model)
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
    report = user_code.check(block, length=64)
    (inside,) = report.inside
    assert (report.verdict, inside.type, inside.names) == ("right", "Mixer", ("attention",))
    block.attention.forward = lambda x: (
        type(block.attention).forward(block.attention, x.flip(1)).flip(1)
    )
    report = user_code.check(block, length=64, causal=True)
    assert report.verdict == "wrong"


@pytest.mark.parametrize("case", cases.parameters(CASES / "behaviour"))
def test_a_model_gets_the_verdict_that_its_file_states(case: Case) -> None:
    report = user_code.check(case.load().Model(), **case.options)
    verdict, *codes = case.expect
    assert (report.verdict, [finding.code for finding in report.findings]) == (verdict, codes)
    assert {finding.file for finding in report.findings} <= {str(case.path)}
    asked = {behaviour.name: behaviour.ok for behaviour in report.behaviour}
    assert all(asked[name] for name in case.comments.get("holds", "").split())
    assert report.called == case.comments.get("called", report.called)
    assert report.example == case.comments.get("example", report.example)
    inside = [inside.verdict for inside in report.inside]
    assert inside == case.comments.get("inside", " ".join(inside)).split()


def test_an_embedding_does_not_stand_for_what_follows_it() -> None:
    case = cases.read(CASES / "one_output_per_pair.py")
    report = user_code.check(case.load().Model(), **case.options)
    assert (report.verdict, report.findings) == ("unknown", ())


@pytest.mark.real
def test_padding_beside_a_memory_is_no_fault_of_a_mask_of_the_memory() -> None:
    report = user_code.check(nn.TransformerDecoderLayer(24, 3, 32, batch_first=True), length=32)
    assert (report.verdict, report.findings) == ("right", ())


@pytest.mark.parametrize(
    ("layer", "side"), [("Padded", "hide"), ("Padded", None), ("Leading", None)]
)
def test_padding_is_tried_on_both_sides_and_is_a_note_where_positions_cannot_be_given(
    layer: str, side: Literal["hide"] | None
) -> None:
    model = getattr(user_code.load(user_code.ZOO / "models.py"), layer)
    asked = {
        behaviour.name: behaviour for behaviour in user_code.check(model, mask_means=side).behaviour
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
    report = user_code.check(
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
    assert user_code.check(torch.compile(model, backend="eager"), length=32).verdict == "right"
    assert (
        user_code.check(lambda ids: model.eval()(ids)[0], length=32, causal=True).verdict
        == "consistent"
    )
    alone = (lambda ids: model(ids)[0].squeeze(0)), r"\[1, 6\] give \[6, 65\]"
    for thing, word in ((torch.jit.script(nn.Linear(2, 2)), "scripted"), (3, "got int"), alone):
        with pytest.raises(mhacli.MhaError, match=word):
            user_code.check(thing)


@pytest.mark.real
def test_a_checkpoint_is_asked_the_same_and_what_doctor_examines(tmp_path: Path) -> None:
    words = ("check", "--model", checkpoints.folder("gpt2"), "--length", "16", "--json")
    document = run(tmp_path, *words).json
    assert document["verdict"] == "right"
    (inside,) = document["inside"]
    assert (inside["type"], inside["verdict"], len(inside["names"])) == (
        "GPT2Attention",
        "right",
        3,
    )
    held = {behaviour["name"] for behaviour in document["behaviour"] if behaviour["ok"]}
    expected = (
        "causality prefix batch repeat cache finite eager row-sums left-padding right-padding"
    )
    assert held >= set(expected.split())
    assert run(tmp_path, "check", "--json", code=2).error["code"] == "usage"


def test_what_rounding_hides_is_not_called_consistent() -> None:
    case = cases.read(CASES / "rounding_selects.py")
    report = user_code.check(case.load().Model)
    assert ([report.verdict], report.behaviour[0].ok) == (case.expect, None)


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
    report = user_code.check(model, **states)
    assert report.verdict == verdict
    causality = next(behaviour for behaviour in report.behaviour if behaviour.name == "causality")
    assert causality.ok is (False if verdict == "wrong" else None)


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = user_code.load(user_code.ZOO / "models.py").GPT()
    nn.utils.parametrizations.weight_norm(model.blocks[0].attention.out)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random, training = torch.get_rng_state(), [part.training for part in model.modules()]
    assert user_code.check(model).verdict == "right"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [part.training for part in model.modules()] == training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert model(torch.zeros(1, 4, dtype=torch.long))[0].isfinite().all()

    def build() -> nn.Module:
        return model

    assert user_code.check(build).verdict == "right"
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("length", [65, 256, 257])
def test_a_length_beyond_the_positions_is_refused_with_the_longest(length: int) -> None:
    model = user_code.load(user_code.ZOO / "models.py").GPT()  # of 64 positions
    with pytest.raises(mhacli.MhaError, match=f" {length} tokens") as refused:
        user_code.check(model, length=length)
    assert "length=64 " in str(refused.value.hint)


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


LEAKS = """
import torch
from torch import nn


class Part(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(z.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, vocab_size=29, d=24):
        super().__init__()
        self.tokens, self.answers = nn.Embedding(vocab_size, d), nn.Linear(d, vocab_size)
        self.first, self.second = Part(d), Part(d)

    def forward(self, ids):
        x = self.tokens(ids)
        x = x + self.first(x)
        x = x + self.second(x) + x.mean(1, True)
        return self.answers(x)
"""


@pytest.mark.parametrize(
    ("mask", "verdict", "says"),
    [
        ("is_causal=True", "right", "2 of 2"),
        ("attn_mask=torch.ones(x.shape[1], x.shape[1]).tril(1) > 0", "wrong", "0 of 2"),
    ],
)
def test_a_model_that_fails_says_whether_its_attention_was_compared(
    tmp_path: Path, mask: str, verdict: str, says: str
) -> None:
    path = tmp_path / "leaks.py"
    path.write_text(LEAKS.replace("is_causal=True", mask))
    examination = user_code.check(f"{path}:GPT")
    assert examination.findings[-1].code == "sees-the-future"
    assert [(each.verdict, len(each.names)) for each in examination.inside] == [(verdict, 2)]
    assert any(says in note for note in examination.notes)


MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(61, 32), nn.Embedding(300, 32)
        self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, 61)

    def forward(self, ids):
        x = self.tokens(ids)READ
        before = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(x + self.mix(before))
"""
PLACES = " + self.places(torch.arange(ids.shape[1]))"


@pytest.mark.parametrize(
    ("reads", "is_unread"),
    [("", True), (PLACES, False), (PLACES + ".detach()", False)],
)
def test_parameters_without_effect_are_a_note(tmp_path: Path, reads: str, is_unread: bool) -> None:
    path = tmp_path / "unread.py"
    path.write_text(MODEL.replace("READ", reads))
    report = user_code.check(f"{path}:Model")
    assert report.ok
    assert ["places" in note for note in report.notes] == [True] * is_unread
