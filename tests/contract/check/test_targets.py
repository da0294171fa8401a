"""How somebody's attention is named, built and called, and how it is reported when that fails."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from support import cases, rows, some, user_code
from support.cases import Case
from support.mha import NO_TORCH
from torch import nn

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = Path(__file__).parent / "cases"
MUST_NOT_RUN = (CASES / "must_not_run.py").read_text()
TARGETS = user_code.ZOO / "targets.py"
SIZES = {"d_model": 24, "n_heads": 3}


class Call(NamedTuple):
    """A target, the arguments of its call in their order, and words that the report of its call
    must have.
    """

    name: str
    arguments: str
    says: str = ""
    sizes: Mapping[str, object] = MappingProxyType(SIZES)
    states: Mapping[str, object] = MappingProxyType({})
    choices: str = ""
    common: bool = False
    """Whether the case is run by default: others are of the same kind."""


CALLS = (
    Call("OddName", "melody", common=True),
    Call("BatchSecond", "query key value", "seq, batch, d", common=True),
    Call("LengthUnpacked", "query key value", "seq, batch, d", common=True),
    Call("OptionalMemory", "hidden_states encoder_hidden_states", common=True),
    Call("SourceAndTarget", "src tgt", common=True),
    Call("QueryAndKv", "q kv"),
    Call("CapitalLetters", "V K Q"),
    Call("OptionalKeys", "query key value"),
    Call("KeywordOnly", "value query key"),
    Call("Rotations", "hidden_states position_embeddings", choices="rope", common=True),
    Call("Phases", "x start_pos freqs_cis mask", choices="rope"),
    Call("Switch", "x", common=True),
    Call("Switch", "x is_causal", states={"causal": True}, common=True),
    Call("NeedsNumber", "x fudge", "1.0", states={"call_arguments": {"fudge": 1.0}}, common=True),
    Call("RequiredMask", "x mask", choices="mask-form", common=True),
    Call("AddedMask", "hidden_states attention_mask", choices="mask-form"),
    Call("TwoMasks", "query key value attn_mask key_padding_mask", choices="mask-form"),
    Call("TokenMask", "x attention_mask", choices="mask-form"),
    Call("ReturnsNamed", "x", ".context", common=True),
    Call("ReturnsDict", "x", "output"),
    Call("ReturnsDataclass", "x", "last_hidden_state"),
    Call("ReturnsScoresToo", "x", "[0]"),
    Call("ThirdsInnermost", "x", choices="fused-layout", common=True),
    Call("NamedOrder", "x"),
    Call("Transposed", "x"),
    Call("ListPerProjection", "x", choices="per-head", common=True),
    Call("KeysAndValues", "x", choices="fused-per-head"),
    Call("OfDataclass", "x", sizes={"args.n_embd": 24}),
    Call(
        "OfConfig",
        "x",
        sizes={"config.hidden_size": 24, "config.num_attention_heads": 3},
        common=True,
    ),
    Call("OfMapping", "x", sizes={"cfg.emb_dim": 24, "cfg.n_heads": 3}),
    Call("build", "melody", common=True),
    Call("ready", "melody", sizes={}),
    Call("attend_heads_third", "q k v", "batch, seq, head, d", sizes={}, common=True),
)


def names_in(called: str) -> list[str]:
    """The names of the arguments of a reported call, of the last if there are two modes."""
    inside = re.search(r"\w+\(([^()]*)\)", called.split("; ")[-1])
    assert inside is not None
    return [part.partition("=")[0].strip() for part in inside[1].split(",") if part.strip()]


@pytest.mark.parametrize("call", rows(CALLS, lambda call: call.name))
def test_the_call_the_layout_and_the_masks_follow_from_names(call: Call) -> None:
    thing = getattr(user_code.load(TARGETS), call.name)
    examination = user_code.check(thing, arguments=call.sizes, **call.states)
    assert examination.verdict == "right"
    assert names_in(examination.called) == call.arguments.split()
    assert call.says in examination.called
    assert {choice.name for choice in examination.choices} >= set(call.choices.split())
    values = {argument.name: argument.value for argument in examination.arguments}
    assert values.items() >= {name: str(size) for name, size in call.sizes.items()}.items()


EXAMPLES = {
    "Unbatched": ("lambda m, T: m(torch.randn(T, 24))", "[seq, d]"),
    "ChannelsFirst": ("lambda m, T: m(torch.randn(2, 24, T))", "[batch, d, seq]"),
    "ChannelsLast": ("lambda m, T: m(torch.randn(2, T, T, 24))", "[batch, height, width, d]"),
    "Prompted": ("lambda m, T: m(torch.randn(2, T, 24), {'length': T})['z']", "forward"),
    "RequiredMask": (
        "lambda m: m(torch.randn(2, 9, 24), torch.ones(9, 9).tril().bool())",
        "only at length 9",
    ),
    "OddMask": (
        "lambda m, T: m(torch.randn(2, T, 24), torch.full((T, T), -1e9).triu(1))",
        "forward",
    ),
    "OfTwoWidths": ("lambda m, T: m(torch.randn(2, T, 5), torch.randn(2, T, 3))", "forward"),
}


@pytest.mark.parametrize("name", some(EXAMPLES, default=EXAMPLES.keys() - {"OfTwoWidths"}))
def test_an_example_shows_a_call_that_names_do_not_tell(name: str) -> None:
    thing, (example, says) = getattr(user_code.load(TARGETS), name), EXAMPLES[name]
    if name != "RequiredMask":
        with pytest.raises(mhacli.MhaError, match=r"could not be called|needs a value") as raised:
            user_code.check(thing, arguments=SIZES)
        assert name in ("OddMask", "Prompted") or example in raised.value.hint
    examination = user_code.check(thing, arguments=SIZES, example=example)
    assert (examination.verdict, examination.example) == ("right", "")
    assert says in examination.called


@pytest.mark.parametrize(
    ("example", "pooled", "verdict"),
    [
        ("lambda m, T: m(torch.randn(2, T, 24))", "[0].mean(1)", "consistent"),
        ("lambda m: m(torch.randn(2, 9, 24))", "[0][:, 0] + melody.mean()", "wrong"),
    ],
)
def test_an_example_may_give_one_output_for_each_text(tmp_path, example, pooled, verdict) -> None:
    path, _ = user_code.write(tmp_path, "targets:OddName", ("melody)[0]", f"melody){pooled}"))
    examination = user_code.check(user_code.load(path).OddName, arguments=SIZES, example=example)
    asked = {behaviour.name: behaviour.ok for behaviour in examination.behaviour}
    assert (examination.verdict, asked["causality"], asked["batch"]) == (
        verdict,
        None,
        verdict == "consistent",
    )


@pytest.mark.parametrize(
    ("name", "given", "guessed"),
    [
        ("OddName", {}, {"d_model", "n_heads"}),
        ("OddName", {"n_heads": 3}, {"d_model"}),
        pytest.param(
            "OfConfig",
            {"config.hidden_size": 60},
            {"config.num_attention_heads"},
            marks=pytest.mark.real,
        ),
        pytest.param("OfMapping", {}, {"cfg.emb_dim", "cfg.n_heads"}, marks=pytest.mark.real),
        ("OfDataclass", {}, {"args.n_embd"}),
        ("build", {}, set()),
    ],
)
def test_sizes_that_are_not_given_are_guessed_to_fit_and_reported(
    name: str, given: dict[str, int], guessed: set[str]
) -> None:
    examination = user_code.check(getattr(user_code.load(TARGETS), name), arguments=given)
    assert examination.verdict == "right"
    origins = {argument.name: argument.origin for argument in examination.arguments}
    assert {name for name, origin in origins.items() if origin == "guessed"} == guessed
    assert {name for name, origin in origins.items() if origin == "given"} == set(given)


def test_arguments_that_were_never_given_or_never_read_are_reported() -> None:
    examination = user_code.check(user_code.load(TARGETS).Gated, arguments=SIZES)
    assert examination.verdict == "right"
    assert set(examination.not_examined) == {"gate", "sharpen"}
    (note,) = examination.notes
    assert "positions" in note
    assert all(name in examination.summary for name in ("gate", "sharpen", "positions"))


@pytest.mark.parametrize(
    ("name", "meaning", "codes"),
    [
        ("KeepMask", "keep", []),
        ("KeepMask", "hide", ["mask-inverted"]),
        pytest.param("HideMask", "hide", [], marks=pytest.mark.real),
        pytest.param("HideMask", "keep", ["mask-inverted"], marks=pytest.mark.real),
    ],
)
def test_what_true_means_in_a_mask_can_be_stated(name: str, meaning: str, codes: list[str]) -> None:
    layer = getattr(user_code.load(TARGETS), name)
    examination = user_code.check(layer, arguments=SIZES, mask_means=meaning)
    assert [finding.code for finding in examination.findings] == codes


# ------------------------------------------------------------------------------ through the command


class Ends(NamedTuple):
    """A command about `attention.py` that fails: its words after the file, the code of the error,
    and what the error mentions.
    """

    words: str
    code: str
    mentions: str


FAILURES = (
    Ends("WIDTH", "no-target", "WIDTH int"),
    Ends("Atention", "no-target", "Atention Attention"),
    Ends("Attention --arg d_modle=24", "argument", "d_modle d_model"),
    Ends("Attention --call-arg y=1", "cannot-examine", "--call-arg y"),
    Ends("Attention --device cuda:9", "no-device", "cuda:9"),
)


@pytest.fixture
def attention(tmp_path: Path) -> None:
    """`attention.py` in the folder of the test."""
    shutil.copy(CASES / "attention.py", tmp_path)


@pytest.mark.real
@pytest.mark.parametrize("row", [pytest.param(row, id=row.words) for row in FAILURES])
@pytest.mark.usefixtures("attention")
def test_words_that_do_not_fit_the_code_are_reported(mha, row: Ends) -> None:
    name, *options = row.words.split()
    ended = mha("check", f"attention.py:{name}", *options, "--json", code=1)
    assert ended.error["code"] == row.code
    assert ended.missing(*row.mentions.split()) == []


@pytest.mark.parametrize("case", cases.parameters(CASES / "failing"))
@pytest.mark.usefixtures("attention")
def test_code_that_cannot_be_built_or_called_is_reported(mha, tmp_path, case: Case) -> None:
    shutil.copy(case.path, tmp_path)
    name, *options = case.comments["words"].split()
    ended = mha("check", f"{case.path.name}:{name}", *options, "--json", code=1)
    assert [ended.error["code"]] == case.expect
    assert ended.missing(*case.comments["mentions"].split("|")) == []
    assert not str(ended.error["hint"]).endswith(" "), "an empty list ends it"


@pytest.mark.real
@pytest.mark.parametrize(
    ("returned", "arguments", "verdict"),
    [("{}.mean(dim=1)", "x", "consistent"), ("{}", "x, *, temperature_schedule", "unknown")],
)
@pytest.mark.usefixtures("attention")
def test_code_that_was_called_but_not_understood_is_not_called_right(
    mha, returned: str, arguments: str, verdict: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from attention import Attention\n\n\nclass Mine(Attention):\n"
        f"    def forward(self, {arguments}):\n"
        f"        return {returned.format('super().forward(x)')}\n"
    )
    report = mha("check", "mine.py:Mine", "--json", code=(0, 1)).json
    assert (report["verdict"], report["findings"]) == (verdict, [])


INHERITED = {
    "softmax-axis": [("energy.softmax(dim=-1)", "energy.softmax(dim=-2)")],
    "outputs-not-finite": [
        ("def forward", "def forward"),
        ("self.dense(out)", "self.dense(out) / torch.arange(t)[:, None]"),
    ],
}


@pytest.mark.parametrize("code", INHERITED)
def test_a_line_of_an_inherited_forward_is_named_with_its_file(tmp_path, code: str) -> None:
    path, line = user_code.write(tmp_path, "separate:SelfAttention", *INHERITED[code])
    user_code.load(path)
    mine = tmp_path / "mine.py"
    mine.write_text("from separate import SelfAttention\nclass Mine(SelfAttention): pass\n")
    sizes = {"embed_dim": 24, "num_heads": 3}
    (finding,) = user_code.check(user_code.load(mine).Mine, arguments=sizes).findings
    assert (finding.code, finding.file, finding.line) == (code, str(path), line)


class Broken(NamedTuple):
    """A file that cannot be imported, and what the error mentions. Two are no Python: they are no
    files here, because every tool would refuse them.
    """

    text: str
    mentions: str
    common: bool = False


IMPORTS = (
    Broken(
        "raise RuntimeError('the table holds infinities')",
        "RuntimeError|the table holds infinities|mine.py:1",
        common=True,
    ),
    Broken(
        "import einops_of_the_future",
        "einops_of_the_future|pip install|mine.py:1",
    ),
    Broken(
        "import sys\nsys.exit('usage: mine.py FILE')",
        "SystemExit|usage: mine.py FILE|mine.py:2",
    ),
    Broken(
        "class Attention:\n    def forward(self, x)\n        pass",
        "SyntaxError|mine.py:2",
    ),
    Broken(
        "if True:\nx = 1",
        "IndentationError|mine.py:2",
    ),
)


@pytest.mark.parametrize("broken", rows(IMPORTS, lambda one: one.mentions.partition("|")[0]))
def test_a_file_that_cannot_be_imported_is_reported_with_its_line(
    mha, tmp_path, broken: Broken
) -> None:
    (tmp_path / "mine.py").write_text(broken.text)
    ended = mha("check", "mine.py:Attention", "--json", code=1)
    assert (ended.error["code"], ended.error["path"]) == ("import", str(tmp_path / "mine.py"))
    assert ended.missing(*broken.mentions.split("|")) == []


@pytest.mark.real
@pytest.mark.usefixtures("attention")
def test_what_the_code_prints_is_kept_apart_from_the_result(mha, tmp_path) -> None:
    shutil.copy(CASES / "shouts.py", tmp_path)
    ended = mha("check", "shouts.py:Shouts", "--json")
    assert ended.json["verdict"] == "right"
    assert "mha.check/1" in ended.json["printed"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "FILE.py:NAME"),
        (("mine.py",), "mine.py:Attention"),
        (("mine.py:",), "''"),
        (("my-module:A",), "my-module"),
        (("folder",), "folder"),
        (("notes.txt",), "notes.txt"),
        (("mine.py:Attention", "--arg", "d_model"), "d_model"),
        (("mine.py:Attention", "--arg", "a=1", "--arg", "a=2"), "twice"),
        (("mine.py:Attention", "--call-arg", "x"), "--call-arg"),
        (("mine.py:Attention", "--against-arg", "a=1"), "--against"),
        (("mine.py:Attention", "--time-limit", "0"), "--time-limit"),
        (("mine.py:Attention", "--heads", "0"), "heads"),
        (("mine.py:Attention", "--device", "gpu"), "device"),
        (("mine.py:Attention", "--mask-means", "drop"), "keep"),
        (("mine.py:Attention", "--rope", "both"), "interleaved"),
        (("mine.py:Attention", "--example", "m(3)"), "lambda m, T"),
    ],
)
def test_words_that_name_no_code_are_a_usage_error_and_nothing_runs(
    mha, tmp_path, words, says
) -> None:
    (tmp_path / "mine.py").write_text(MUST_NOT_RUN)
    (tmp_path / "notes.txt").write_text("a text")
    (tmp_path / "folder").mkdir()
    ended = mha("check", *words, "--json", code=2)
    assert ended.error["code"] == "usage"
    assert says in ended.said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("my_atention.py:A",), "my_attention.py"),
        (("my_attention.py:A", "--against", "nowhere.py:A"), "nowhere.py"),
        (("notes.txt:A",), "notes.txt"),
        (("folder.py:A",), "folder.py"),
    ],
)
def test_a_file_that_is_none_is_reported_without_loading_torch(mha, tmp_path, words, says) -> None:
    (tmp_path / "my_attention.py").write_text(MUST_NOT_RUN)
    (tmp_path / "notes.txt").write_text("a text")
    (tmp_path / "folder.py").mkdir()
    assert says in mha("check", *words, code=1).said


@pytest.mark.real
def test_usage_errors_load_no_torch(mha, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MUST_NOT_RUN)
    assert "mine.py:Attention" in mha("check", "mine.py", code=2, modules=NO_TORCH).said
    assert "mha check" in mha("check", "--help", modules=NO_TORCH).stdout


RIGHT = (CASES / "attention.py").read_text()
FILES = {
    "deep/mine.py:Attention": {
        "deep/mine.py": "from sibling import *\n",
        "deep/sibling.py": RIGHT,
    },
    "pack/inner/mine.py:Attention": {
        "pack/__init__.py": "",
        "pack/base.py": RIGHT,
        "pack/inner/__init__.py": "",
        "pack/inner/mine.py": "from ..base import Attention\n",
    },
    "pack.base:Attention": {
        "pack/__init__.py": "",
        "pack/base.py": RIGHT,
    },
    "odd:folder/mine.py:Attention": {
        "odd:folder/mine.py": RIGHT,
    },
    "inspect.py:Attention": {
        "inspect.py": RIGHT,
    },
    "mine.py:Outer.Inner": {
        "mine.py": RIGHT + "class Outer:\n    class Inner(Attention): pass\n",
    },
    "mine.py:make": {
        "mine.py": RIGHT + "import functools\nmake = functools.partial(Attention, 20, 2)\n",
    },
    "mine.py:Attention": {
        "mine.py": "# coding: latin-1\n" + RIGHT,
    },
}
"""Targets, and the files in which they are found."""


@pytest.mark.real
@pytest.mark.parametrize("target", FILES)
def test_a_target_is_found_in_a_file_a_package_or_a_class(mha, tmp_path, target: str) -> None:
    for name, text in FILES[target].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    document = mha("check", target, "--json", cold=target.startswith("inspect.py")).json
    assert (document["verdict"], document["target"]) == ("right", target)


FIELDS = """
    findings summary choices probes comparison arguments closest departure modes reason
    not_examined next_steps notes printed called n_parameters environment against time_s
""".split()


@pytest.mark.real
@pytest.mark.parametrize(
    ("change", "code", "verdict"),
    [
        (("dim=-1", "dim=-2"), 3, "wrong"),
        (("dim=-1", "dim=-1"), 0, "right"),
        ((".softmax(dim=-1)", ".relu()"), 1, "unknown"),
    ],
)
def test_the_exit_code_and_the_document_give_the_verdict(
    mha, tmp_path, change, code: int, verdict: str
) -> None:
    (tmp_path / "mine.py").write_text(RIGHT.replace(*change))
    words = ("check", "mine.py:Attention", "--arg", "d_model=24", "--arg", "n_heads=3")
    ended = mha(*words, "--json", code=code)
    document = ended.json
    assert (document["schema"], document["verdict"], ended.stderr) == ("mha.check/1", verdict, "")
    assert document["command"] == ["mha", *ended.words]
    assert document.keys() >= set(FIELDS)
    assert document["n_parameters"] == 24 * 72 + 72 + 24 * 24 + 24
    if verdict == "wrong":
        (finding,) = document["findings"]
        assert (finding["code"], finding["proven"]) == ("softmax-axis", True)
        assert finding["file"] == str(tmp_path / "mine.py")
        assert (
            finding["source"]
            in (tmp_path / "mine.py").read_text().splitlines()[finding["line"] - 1]
        )
        assert 0 <= finding["error"] <= finding["tolerance"] < 1e-3
    if verdict == "unknown":
        assert document["reason"] or document["closest"]
        assert document["next_steps"]
        return  # its screen is among the golden ones
    assert verdict in mha(*words, code=code).stdout


# ------------------------------------------------------------------------------------ as a function


def test_a_module_in_memory_is_not_changed() -> None:
    module = user_code.load(TARGETS).OddName(24, 3).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    examination = user_code.check(module)
    assert (examination.verdict, examination.findings) == ("right", ())
    assert module.training
    assert not module._forward_hooks
    assert all((tensor == before[name]).all() for name, tensor in module.state_dict().items())


def test_a_function_call_reports_errors_as_the_command_does() -> None:
    with pytest.raises(mhacli.MhaError, match="config") as raised:
        user_code.check(user_code.load(TARGETS).OfConfig, arguments={"config": nn.Identity()})
    assert raised.value.exit_code == 2
    with pytest.raises(mhacli.MhaError) as raised:
        user_code.check(user_code.load(TARGETS).NeedsNumber)
    assert (raised.value.code, raised.value.exit_code) == ("cannot-examine", 1)


def test_an_examination_shows_itself_in_a_notebook() -> None:
    examination = user_code.check(user_code.load(TARGETS).OddName, arguments=SIZES)
    assert "right" in repr(examination)
    assert "\n" not in repr(examination)
    page = examination._repr_html_()
    assert "OddName" in page
    assert "<script" not in page
    assert examination.to_dict()["schema"] == "mha.check/1"


def test_a_check_leaves_the_random_numbers_of_its_caller_as_they_were() -> None:
    target = user_code.load(TARGETS).OddName
    before = random.getstate(), torch.get_rng_state()
    user_code.check(target, arguments=SIZES)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_file_imports_the_module_beside_it_not_one_of_the_working_folder(mha, tmp_path) -> None:
    (tmp_path / "parts.py").write_text("raise ImportError('in the working folder')")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "parts.py").write_text(user_code.text_of("functions:attend"))
    (tmp_path / "layers" / "mine.py").write_text("from parts import attend\n")
    assert mha("check", "layers/mine.py:attend", "--json").json["verdict"] == "right"


BROKEN = """
from torch import nn


class Broken(nn.Module):
    def __init__(self, d_model=24, n_heads=3):
        super().__init__()
        self.h = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return {}
"""


@pytest.mark.parametrize(
    ("code", "mends"),
    [
        ("self.heads(q)", True),
        ("qq @ k.mT", True),
        ("late + (late := q)", False),  # a branch may set it
        ("q.view(2, 5, 5, 5)", False),
    ],
    ids=["no-attribute", "no-name", "no-value", "no-shape"],
)
def test_an_error_of_the_code_itself_names_the_line_to_mend_and_no_call(
    tmp_path: Path, code: str, mends: bool
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(code))
    with pytest.raises(mhacli.MhaError) as raised:
        mhacli.check(f"{path}:Broken")
    assert "line 13" in raised.value.hint
    assert ("example" in raised.value.hint) is not mends
