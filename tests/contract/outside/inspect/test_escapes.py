"""Texts of others on every surface: records whose every text holds characters that a terminal obeys
or hides, found by walking the published schema. Each is shown as an escape, and escaped once.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support import checkpoints
from support.html import Html
from support.mha import obeyed_or_hidden, run
from support.terminal import viewing

import mhacli

ROOT = Path(__file__).parents[4]
SCHEMA = json.loads((ROOT / "docs" / "schemas" / "mha.record-1.json").read_text())
FILES = ROOT / "tests" / "contract" / "old" / "files"
RECORDS = sorted(
    path.stem for path in FILES.glob("*.safetensors") if not path.stem.startswith("weights")
)
QUICK = ("model-edges", "model-generated", "run-cross", "trace-code")
"""Records that are tested by default."""
MARK = "«\\»\x1b]52;c;aGk=\x07"
TEXT = f"{MARK}\x7f\x9b2J\u202e\u2066\u061c\u200b\ufeff\u2060\u00ad\U000e0041\u2028\r\n\tmha: error"
"""What stands behind every text: what is obeyed, hidden, or begins a line of another's."""
SHOWN = r"\\»\x1b]52;c;aGk=\x07"
"""The mark as a reader must see it, behind its first letter."""
CHECKED = {"device": "d_model", "kinds": "kinds"}
"""Fields that their reader checks, and fields that stand beside them."""


def alternatives(schema: Any) -> Iterator[dict[str, Any]]:
    """What a schema allows, without references."""
    if "$ref" in schema:
        yield from alternatives(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    elif "anyOf" in schema:
        for each in schema["anyOf"]:
            yield from alternatives(each)
    else:
        yield schema


def hostile(value: Any, *schemas: Any) -> Any:
    """The value with `TEXT` behind every text that may be any text, and with each entry of a
    mapping under such a name too.
    """
    allowed = [each for schema in schemas for each in alternatives(schema)]
    if isinstance(value, str):
        is_free = any(
            each.get("type") == "string" and not each.keys() & {"enum", "const"} for each in allowed
        )
        return value + TEXT if is_free else value
    if isinstance(value, list):
        every = [each["items"] for each in allowed if each.get("items")]
        tuples = [each["prefixItems"] for each in allowed if "prefixItems" in each]
        return [
            hostile(part, *every, *(each[place] for each in tuples))
            for place, part in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    changed = {}
    for name, part in value.items():
        fields = [each.get("properties", {}) for each in allowed]
        named = [each[name] for each in fields if name in each]
        more = [each.get("additionalProperties") for each in allowed if "propertyNames" not in each]
        if CHECKED.get(name) not in value:
            part = hostile(part, *(named or filter(None, more)))
        changed[name] = part
        if not named and any(more):
            changed[name + TEXT] = part
    return changed


def forged(name: str, path: Path, only: str | None = None) -> Path:
    """A record of an earlier version with hostile texts, or with such a field of its steps only."""
    source = FILES / f"{name}.safetensors"
    with safe_open(source, "np") as file:
        document = json.loads(file.metadata()["mha"])
    if only is None:
        document = hostile(document, SCHEMA)
    else:
        for step in document["trace"]:
            step[only] = [part + TEXT for part in step[only]]
    for sums in ("checksum", "array_checksums"):
        document.pop(sums, None)
    save_file(load_file(source), path, {"mha": json.dumps(document)})
    return path


def require_escaped(*texts: str, may_lack: bool = False) -> None:
    """Nothing is obeyed or hidden, no text begins a line, and the mark is escaped once wherever it
    is not cut.
    """
    n_marks = 0
    for text in texts:
        assert not obeyed_or_hidden(text), ascii(text)
        assert not re.search("^mha: error", text, re.MULTILINE)
        for mark in re.findall("«([^«… \n]*)", text):
            n_marks += 1
            assert SHOWN.startswith(mark[: len(SHOWN)]), ascii(mark)
    assert n_marks or may_lack


def strings(value: Any) -> Iterator[str]:
    """All texts of a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value, *value.values()])
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.real) for name in RECORDS],
)
def test_texts_of_a_record_are_escaped_once_on_every_surface(name: str, tmp_path: Path) -> None:
    """That nothing obeyed or hidden is printed is required of every run."""
    path = forged(name, tmp_path / "a.safetensors")

    def shown(*words: str, code: int = 0) -> str:
        return run(tmp_path, *words, code=code, env={"COLUMNS": "400"}).stdout

    every = ("--verbose", "--all", "--tokens", "--html", "a.html", "--svg", "a.svg")
    require_escaped(
        shown("show", path.name),
        shown("show", path.name, *every),
        (tmp_path / "a.svg").read_text().partition("<metadata>")[0],
    )
    page = (tmp_path / "a.html").read_text()
    assert not obeyed_or_hidden(page)
    require_escaped(Html(page).text, *strings(Html(page).data), may_lack=True)
    shutil.copyfile(FILES / f"{name}.safetensors", tmp_path / "b.safetensors")
    require_escaped(shown("diff", path.name, "b.safetensors", "--all", code=3))
    assert any(MARK in text for text in strings(json.loads(shown("show", path.name, "--json"))))
    if name != "trace-code":
        assert not obeyed_or_hidden(shown("show", path.name, "--csv"))
    record = mhacli.load(str(path))
    console = Console(file=io.StringIO(), width=400)
    console.print(record)
    require_escaped(repr(record), record._repr_html_(), console.file.getvalue())


def test_axes_of_two_traces_are_escaped(tmp_path: Path) -> None:
    forged("trace-code", tmp_path / "a.safetensors", "axes")
    shutil.copyfile(FILES / "trace-code.safetensors", tmp_path / "b.safetensors")
    words = ("diff", "b.safetensors", "a.safetensors", "--all")
    require_escaped(run(tmp_path, *words, code=3, env={"COLUMNS": "500"}).stdout)


def test_a_scan_whose_texts_are_hostile_is_shown_as_text(tmp_path: Path) -> None:
    shutil.copytree(FILES / "scan.mha", tmp_path / "scan.mha")
    forged("scan.mha/summary", tmp_path / "scan.mha" / "summary.safetensors")
    require_escaped(run(tmp_path, "show", "scan.mha", "--verbose", "--all").stdout)


def test_a_tokenizer_and_the_names_of_a_checkpoint_are_shown_as_text(tmp_path: Path) -> None:
    name = f"m{TEXT}".replace("\n", "")
    shutil.copytree(checkpoints.folder("gpt2"), tmp_path / name)
    config = tmp_path / name / "config.json"
    named = {"architectures": [TEXT], "summary_type": TEXT}
    config.write_text(json.dumps(json.loads(config.read_text()) | named))
    words = TEXT.split()
    tokenizer = checkpoints.words_tokenizer(*words)
    (tmp_path / name / "tokenizer.json").write_text(tokenizer)
    command = ("run", " ".join(words), "--model", name, "--tokens", "--verbose")
    require_escaped(run(tmp_path, *command, env={"COLUMNS": "500"}).stdout)


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
@pytest.mark.parametrize("when", ["import", "call"])
def test_a_target_and_its_messages_are_shown_as_text(
    when: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    name = f"{TEXT}.py".replace("\n", "").replace(":", "")
    raises = f"raise type({TEXT!r}, (Exception,), {{}})({TEXT!r})"
    lines = [
        "import sys, torch, warnings",
        *(f"{printed}({TEXT!r})" for printed in ("print", "sys.stderr.write", "warnings.warn")),
        "class A(torch.nn.Module):",
        "    def __init__(self, d_model=8, n_heads=2):",
        "        super().__init__()",
        "    def forward(self, x):",
        f"        {raises}",
    ]
    lines += [raises] if when == "import" else []
    (tmp_path / name).write_text("\n".join(lines))
    ended = run(tmp_path, "check", f"{name}:A", *options, code=(1, 3))
    require_escaped(ended.stdout, may_lack=True)


@pytest.mark.real
def test_the_viewer_shows_the_texts_of_a_record_as_escapes(tmp_path: Path) -> None:
    path = forged("model-effect", tmp_path / "a.safetensors")
    with viewing(tmp_path, path.name, size=(300, 50), NO_COLOR="1") as screen:
        screen.until("«")
        for key in ("w", "q", "i", "q", "e"):
            screen.press(key)
        screen.press("Q")
        written = screen.end().written.decode()
    assert "\x1b]52;c;aGk=" not in written
    # a bell ends the sequences that textual itself writes
    others = re.sub("\x1b\\][^\x07\x1b]*\x07", "", written)
    assert not re.search("[\u202e\u200b\x07\x9b]", others)
