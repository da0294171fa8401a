"""`mha check` as a command: its options, its document, its exit codes; most of it without torch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import typer
from support import processes
from support.examinations import ALIKE, RIGHT, STATE, UNKNOWN, WRONG
from support.processes import NO_TORCH, WITH_TORCH, Launch, forms, state_of

from mhacli.adapters.usercode import process
from mhacli.cli.commands import check as command
from mhacli.cli.values import pairs
from mhacli.errors import MhaError, UsageError

MINE = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        z = torch.softmax(scores, dim=-1) @ v
        return self.o(z.transpose(1, 2).flatten(2))
"""


def mha(folder, *words, code=0, form=(), says=(), torch_free=True):
    """`mha check` with the invariants of every process; by default on a machine where torch would end it."""
    before = state_of(folder)
    launch = Launch(
        modules=NO_TORCH if torch_free else WITH_TORCH, env={"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    )
    outcome = processes._run(folder, ["check", *words, *form], form, launch)
    processes.require_invariants(outcome, {code})
    assert state_of(folder) == before
    for piece in says:
        assert piece in (outcome.told if code in (1, 2) else outcome.stdout)
    return outcome


def told(monkeypatch, capsys, examination, *, printed="", **given):
    """The command run here, with an examination that no process had to make: stdout, stderr, and how it ended."""
    asked = {}

    def instead(job, request, *, time_limit_s, on_stage):
        on_stage("calling Attention")
        asked.update(request=request, job=job, limit=time_limit_s)
        return process.ChildResult(json.dumps(examination.to_dict()).encode(), printed)

    monkeypatch.setattr(process, "run_in_child", instead)
    options = {
        command.SubjectOptions: {"target": "mine:Attention"}, command.MeaningOptions: {}, command.RunOptions: {},
        command.CheckFormats: {}, command.ColourOptions: {"color": "never"},
    }  # fmt: skip
    for kind, values in options.items():
        values.update({name: value for name, value in given.items() if name in kind.__dataclass_fields__})
    fault = None
    try:
        command.check.__wrapped__(*(kind(**values) for kind, values in options.items()))
    except (MhaError, typer.Exit) as raised:
        fault = raised
    return *capsys.readouterr(), fault, asked


# ------------------------------------------------------------------------------------------------------------------ verdicts


def test_what_is_right_ends_with_0_and_nothing_on_stderr(monkeypatch, capsys):
    out, err, fault, _ = told(monkeypatch, capsys, RIGHT)
    assert out.startswith("✓ right  mine.py:MultiHeadAttention\n")
    assert (err, fault) == ("", None)


@pytest.mark.parametrize("form", [{}, {"json": True}], ids=["plain", "json"])
@pytest.mark.parametrize("examination", [WRONG, replace(ALIKE, verdict="wrong", findings=(STATE,))])
def test_what_is_wrong_ends_with_3_and_nothing_on_stderr(monkeypatch, capsys, examination, form):
    out, err, fault, _ = told(monkeypatch, capsys, examination, **form)
    assert out.startswith("{" if form else "✗ wrong")
    assert (err, type(fault), fault.exit_code) == ("", typer.Exit, 3)


@pytest.mark.parametrize("form", [{}, {"json": True}], ids=["plain", "json"])
def test_what_is_unknown_ends_with_1_and_says_why_once_on_stdout_alone(monkeypatch, capsys, form):
    examination = replace(UNKNOWN, reason="it is not clear how it computes z", next_steps=("try this",))
    out, err, fault, _ = told(monkeypatch, capsys, examination, **form)
    assert (err, type(fault), fault.exit_code) == ("", typer.Exit, 1)
    assert "try this" in out
    if form:
        assert json.loads(out)["next_steps"] == ["try this"]
    else:
        assert out.startswith("? unknown")
        assert out.count("it is not clear how it computes z") == 1


@pytest.mark.parametrize("examination", [RIGHT, WRONG, UNKNOWN, ALIKE], ids=["right", "wrong", "unknown", "alike"])
def test_json_is_the_examination_with_what_was_printed_and_the_command(monkeypatch, capsys, examination):
    monkeypatch.setattr("sys.argv", ["mha", "check", "mine:Attention", "--json"])
    out, err, _, _ = told(monkeypatch, capsys, examination, printed="\x1b[31mhi\n", json=True)
    document = json.loads(out)
    assert document["schema"] == "mha.check/1"
    expected = examination.to_dict() | {
        "printed": "\x1b[31mhi\n",
        "command": ["mha", "check", "mine:Attention", "--json"],
    }
    assert document == json.loads(json.dumps(expected))
    guessed = "mha: n_heads=8 is guessed: the number of heads; --arg n_heads=… sets it\n"
    assert err == (guessed if examination.verdict == "right" else "")


def test_what_is_asked_is_what_the_options_say(monkeypatch, capsys):
    *_, asked = told(
        monkeypatch, capsys, RIGHT, arg=["d_model=64", "config.n_head=4", "name=a=b", "empty="], call_arg=["start_pos=0"],
        causal=True, mask_means="hide", rope="half", scale=0.5, heads=4, device="cuda", seed=7, time_limit=2.5,
        against="theirs:Attention",
    )  # fmt: skip
    of = {
        "target": "mine:Attention", "causal": True, "device": "cuda", "seed": 7, "call_arguments": (("start_pos", "0"),),
        "arguments": (("d_model", "64"), ("config.n_head", "4"), ("name", "a=b"), ("empty", "")),
    }  # fmt: skip
    assert asked == {
        "job": "mhacli.compute.check.examine:examine_request",
        "limit": 2.5,
        "request": {
            "of": of, "against": of | {"target": "theirs:Attention", "arguments": ()}, "mask_means": "hide", "rope": "half",
            "scale": 0.5, "n_heads": 4, "time_limit_s": 2.5,
        },
    }  # fmt: skip


def test_the_defaults_ask_for_nothing_in_particular(monkeypatch, capsys):
    *_, asked = told(monkeypatch, capsys, RIGHT)
    request = asked["request"]
    assert asked["limit"] == 5.0
    assert {name: request[name] for name in request if name != "of"} == {
        "against": None, "mask_means": None, "rope": None, "scale": None, "n_heads": None, "time_limit_s": 5.0,
    }  # fmt: skip
    assert request["of"]["device"] == "cpu"


def test_a_document_of_the_process_that_is_none_is_refused(monkeypatch, capsys):
    class Odd:
        def to_dict(self):
            return RIGHT.to_dict() | {"verdict": "splendid"}

    *_, fault, _ = told(monkeypatch, capsys, Odd())
    assert "the examination.verdict" in fault.message
    assert "splendid" in fault.message


# --------------------------------------------------------------------------------------------------------------------- words


def test_pairs_keep_what_stands_behind_the_first_equals_sign():
    assert pairs(["a=1", " b =x=y", "c.d="], "arg") == (("a", "1"), ("b", "x=y"), ("c.d", ""))
    assert pairs(None, "arg") == ()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("d_model", "--arg 'd_model' is not NAME=VALUE such as d_model=64"),
        ("=64", "--arg '=64' is not NAME=VALUE such as d_model=64"),
        ("d-model=64", "--arg 'd-model=64' is not NAME=VALUE such as d_model=64"),
        ("a..b=1", "--arg 'a..b=1' is not NAME=VALUE such as d_model=64"),
    ],
)
def test_a_pair_of_another_form_is_refused(word, message):
    with pytest.raises(UsageError) as caught:
        pairs([word], "arg")
    assert caught.value.message == message


@forms
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "name what to check: FILE.py:NAME or package.module:NAME"),
        (["mine.py"], 2, "mine.py:Attention"),
        (["mine.py:"], 2, "''"),
        (["mine.py:a b"], 2, "'a b'"),
        (["nowhere.py:Attention"], 1, "nowhere.py"),
        (["mine.py:Attention", "--against", "nowhere.py:Attention"], 1, "nowhere.py"),
        (["mine.py:Attention", "--arg", "d_model"], 2, "'d_model'"),
        (["mine.py:Attention", "--arg", "a=1", "--arg", "a=2"], 2, "twice"),
        (["mine.py:Attention", "--call-arg", "x"], 2, "call-arg"),
        (["mine.py:Attention", "--time-limit", "0"], 2, "--time-limit 0 is out of range"),
        (["mine.py:Attention", "--time-limit", "soon"], 2, "time-limit"),
        (["mine.py:Attention", "--seed", "-1"], 2, "seed"),
        (["mine.py:Attention", "--heads", "0"], 2, "heads"),
        (["mine.py:Attention", "--scale", "nan"], 2, "scale"),
        (["mine.py:Attention", "--device", "gpu"], 2, "device"),
        (["mine.py:Attention", "--mask-means", "drop"], 2, "keep"),
        (["mine.py:Attention", "--rope", "both"], 2, "interleaved"),
    ],
)  # fmt: skip
def test_a_usage_error_or_a_missing_file_needs_no_torch(tmp_path, words, code, says, form):
    (tmp_path / "mine.py").write_text(MINE)
    assert mha(tmp_path, *words, code=code, form=form, says=(says,)).stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model"], "'model' is a folder, not a class or function"),
        (["notes.txt"], "'notes.txt' is not a Python file"),
        (["mine.py:Attention", "--against-arg", "a=1"], "--against-arg works only with --against"),
    ],
)
def test_what_is_no_target_is_refused_with_what_it_is(tmp_path, words, message):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "notes.txt").write_text("a text")
    (tmp_path / "model").mkdir()
    assert mha(tmp_path, *words, code=2, form=("--json",)).error["message"] == message


def test_help_needs_no_torch(tmp_path):
    assert "mha check my_attention.py" in mha(tmp_path, "--help").stdout


# ----------------------------------------------------------------------------------------------------------------- processes


@pytest.mark.sampled(1)
@forms
def test_a_right_attention_is_right(tmp_path, form):
    (tmp_path / "mine.py").write_text(MINE)
    shown = mha(tmp_path, "mine.py:Attention", "--arg", "d_model=24", "--arg", "n_heads=3", form=form, torch_free=False)
    if form:
        document = json.loads(shown.stdout)
        assert (document["verdict"], document["findings"]) == ("right", [])
        assert [(one["name"], one["value"], one["origin"]) for one in document["arguments"]] == [
            ("d_model", "24", "given"), ("n_heads", "3", "given"),
        ]  # fmt: skip
    else:
        assert shown.stdout.startswith("✓ right  mine.py:Attention\n")


@pytest.mark.sampled(1)
@forms
def test_a_wrong_attention_is_named_with_its_line(tmp_path, form):
    (tmp_path / "mine.py").write_text(MINE.replace("dim=-1", "dim=-2"))
    shown = mha(tmp_path, "mine.py:Attention", form=form, code=3, torch_free=False)
    if form:
        (finding,) = json.loads(shown.stdout)["findings"]
        assert (finding["code"], finding["proven"], finding["line"]) == ("softmax-axis", True, 15)
        assert finding["source"].strip() == "z = torch.softmax(scores, dim=-2) @ v"
    else:
        assert (
            "softmax-axis  proven\nfound    z = torch.softmax(scores, dim=-2) @ v\n         mine.py:15\n"
            in shown.stdout
        )


@pytest.mark.sampled(1)
@forms
def test_an_attention_that_raises_on_import_is_told_with_its_line(tmp_path, form):
    (tmp_path / "mine.py").write_text(MINE.replace("import torch\n", "import torch\nprint(1 / 0)\n", 1))
    says = ("division by zero", "mine.py:3")
    assert mha(tmp_path, "mine.py:Attention", form=form, code=1, says=says, torch_free=False).stdout == ""
