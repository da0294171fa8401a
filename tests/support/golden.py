"""The golden corpus: the commands of tests/golden/commands.txt, what they print now, and what
approved.txt beside it holds.
"""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import functools
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from support import checkpoints, rounding
from support.mha import run

FOLDER = Path(__file__).parents[1] / "golden"
APPROVED = FOLDER / "approved.txt"
SAMPLES = Path(__file__).parents[2] / "sample_texts"
READABLE = (".html", ".svg")
"""Written files whose content is approved; of others the name is."""
ON_TERMINAL = {"TERM": "dumb", "COLUMNS": None}
"""Without progress, and as wide as it is."""


@dataclass(frozen=True)
class Command:
    """A line of commands.txt. `terminal` has columns and rows."""

    section: str
    line: str
    words: tuple[str, ...]
    env: dict[str, str]
    terminal: tuple[int, int] | None
    stdin: str | None
    marks: str

    @property
    def is_real(self) -> bool:
        """Whether it belongs to the slow tests."""
        return "real" in self.marks

    @property
    def is_measured(self) -> bool:
        """Whether all numbers that it prints depend on the machine."""
        return "measured" in self.marks

    @property
    def columns(self) -> int:
        """The width of the screen."""
        return self.terminal[0] if self.terminal else int(self.env.get("COLUMNS", "80"))

    @property
    def may_colour(self) -> bool:
        """Whether codes of colours may be printed."""
        return "always" in self.words or "FORCE_COLOR" in self.env


@dataclass(frozen=True)
class Printed:
    """What a command printed and wrote, as it is. `files` has the content of readable ones, `fault`
    a broken invariant.
    """

    code: int
    stdout: str
    stderr: str
    files: dict[str, str]
    fault: str = ""


@functools.cache
def commands() -> tuple[Command, ...]:
    """All commands, in the order of the file."""
    rows, section, marks = [], "", ""
    for line in (FOLDER / "commands.txt").read_text().splitlines():
        if line.startswith("== "):
            section, _, marks = line[3:].partition(" · ")
        elif line and not line.startswith("#"):
            rows.append(_command(section, line, marks))
    return tuple(rows)


def _command(section: str, line: str, marks: str) -> Command:
    words = shlex.split(line)
    begin = words.index("mha")
    given = dict(word.split("=", 1) for word in words[:begin])
    size = given.pop("terminal", None)
    stdin = given.pop("stdin", None)
    terminal = tuple(map(int, size.split("x"))) if size else None
    command = tuple(words[begin + 1 :])
    return Command(section, line, command, given, terminal, stdin, marks)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------- running a section


@functools.cache
def printed(section: str) -> dict[str, Printed]:
    """What each command of a section prints, by its line. They run once per test run, in a folder
    that nobody else uses.
    """
    shared = Path(os.environ["MHA_TESTS_SHARED"], "golden")
    shared.mkdir(exist_ok=True)
    name = re.sub(r"\W+", "-", section)
    kept = shared / f"{name}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            results = {line: dataclasses.asdict(one) for line, one in _run(section, shared / name)}
            kept.write_text(json.dumps(results))
    return {line: Printed(**one) for line, one in json.loads(kept.read_text()).items()}


def _run(section: str, folder: Path) -> Iterator[tuple[str, Printed]]:
    shutil.copytree(FOLDER / "files", folder, copy_function=shutil.copyfile)
    shutil.copytree(SAMPLES, folder / "sample_texts")
    for command in commands():
        if command.section == section:
            _link_checkpoints(command, folder)
            yield command.line, _ended(command, folder)


def _link_checkpoints(command: Command, folder: Path) -> None:
    for word in command.words:
        place = folder / word
        if word == "MiniLM" and not place.exists():
            place.symlink_to(checkpoints.minilm())
        elif word in checkpoints.FAMILIES and not place.exists():
            place.symlink_to(checkpoints.folder(word))


def _ended(command: Command, folder: Path) -> Printed:
    before = _files(folder)
    env = {
        "CUDA_VISIBLE_DEVICES": "",
        "MHA_BLOCK": "torch",
        **(ON_TERMINAL if command.terminal else {}),
        **command.env,
    }
    try:
        ended = run(
            folder,
            *command.words,
            code=range(4),
            stdin=command.stdin,
            env=env,
            terminal=command.terminal,
            colour=command.may_colour,
        )
    except AssertionError as error:
        return Printed(-1, "", "", {}, str(error))
    changed = {path for path, stamp in _files(folder).items() if before.get(path) != stamp}
    written = {
        path: (folder / path).read_text() if path.endswith(READABLE) else ""
        for path in sorted(changed)
    }
    stdout, stderr = (text.replace(str(folder), "FOLDER") for text in (ended.stdout, ended.stderr))
    return Printed(ended.code, stdout, stderr, written)


def _files(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


# ------------------------------------------------------------------------- as it stands in the file


def text_of(command: Command, one: Printed) -> str:
    """What a command printed, as approved.txt shows it: without what differs between runs and
    machines.
    """
    parts = [("stdout", one.stdout), ("stderr", one.stderr)]
    parts += [(f"file {name}", content) for name, content in one.files.items()]
    lines = [f"exit {one.code}"] * (one.code != 0)
    parts = [
        (re.sub(r"[0-9a-f]{16}(?:\.parquet|\.jsonl)?", "HASH", title), content)
        for title, content in parts
    ]
    for title, content in parts:
        if content or title.startswith("file"):
            shown = [f"    {line}".rstrip() for line in _shown(command, title, content)]
            lines += [title] * (
                title.startswith("file") or (title == "stderr" and bool(shown))
            ) + shown
    return "\n".join(lines) + "\n"


def _shown(command: Command, title: str, content: str) -> list[str]:
    content = content.replace("\x1b", "␛")
    if "--json" in command.words and (title == "stdout" or content.startswith('{"error"')):
        document = _masked_json(json.loads(content))
        return _laid_out(_without_numbers(document) if command.is_measured else document)
    if title.endswith(".html"):
        return _without_varying(Page(content).text).split("\n")
    if title.endswith(".svg"):
        return _without_varying("\n".join(texts_of_picture(content))).split("\n")
    if title == "stdout" and "--csv" in command.words:
        content = re.sub(
            r"-?\d*\.\d{6,}(?:e[-+]\d+)?", lambda match: _short(float(match[0])), content
        )
    if command.is_measured:  # where lines break depends on the machine
        content = " ".join(content.split())
    content = _masked(content.rstrip("\n"))
    if command.is_measured:
        content = re.sub(r"\d[\d.,]*(?:e[-+]\d+)?", "#", content)
    return content.split("\n") if content else []


TIME = r"\d[\d,.]*(?:e[-+]\d+)?\s?(?:ns|µs|ms|s|min|h)\b"
VERSIONED = (
    "mha|torch|python|numpy|safetensors|msgspec|typer|rich|jaxtyping|transformers|tokenizers"
    "|textual|regex|accelerate"
)
MASKS = (
    (r"mha: \d+ (?:of \d+ documents|removals: about).*(?:\n|$)", ""),
    (rf"{TIME} \(median\s+of\s+\d+[^)]*\)", "TIME"),
    (r"\S+ tokens/s over \d+ runs after the first", "TOKENS/S"),
    (r"(?:\s·)?\s+rough:\s+(?:the[^,]*,\s+as\s+on\s+a\s+busy\s+machine|less\s+than\s+1\s+ms)", ""),
    (TIME, "TIME"),
    rounding.TINY_AT_THE_END,
    (r"(?<=within)\s+(?:0|\d[\d.]*e-\d+)(?![\d.])", " ERROR"),
    (r"(?<=errors at most) \S+ %", " N %"),
    (r"(?<=residue )-?\d\S*e-\d\d|(?<=residue )0|(?<=difference )0(?=,)", "TINY"),
    (r"(?:(?<=\S)(  ) *)?\b\d(?:\.\d+)?e-(?:0[5-9]|[1-9]\d)", r"\1TINY"),  # in columns too
    (r"(?:\b|(?<=\dm))\d+ threads?(?: of \d+ cores)?|(?:\b|(?<=\dm))threads \d+", "THREADS"),
    (rf"(?:\b|(?<=\dm))({VERSIONED}) \d+\.\d\S*", r"\1 VERSION"),
    (r"(?<=mha: saved )(\S+), \d[\d.]* \w+", r"\1, SIZE"),
    (r"\S+ GiB (?=available|free)", "N GiB "),
    (r"--random 1,\d+ fits", "--random 1,N fits"),
    (r"(?<=torch \()[^)]*", "VERSION"),
    (
        (
            r"(?<=\bcpu: )[^,\n]*(?=, )|(?<=device name ).*?(?= · |\n|$)|(?<=cpu"
            r" \()(?!auto).*?(?=\) · \w+\d\d)"
        ),
        "NAME",
    ),
)


def _masked(text: str) -> str:
    """A text on a screen. Where the lines of its short head break depends on what is masked, so
    they are joined.
    """
    head, blank, rest = _without_varying(text).partition("\n\n")
    if "VERSION" in head and head.count("\n") < 4:
        head = " · ".join(line.strip() for line in head.split("\n"))
    return head + blank + rest


def _without_varying(text: str) -> str:
    for pattern, placeholder in MASKS:
        text = re.sub(pattern, placeholder, text)
    lines = text.split("\n")
    return "\n".join(
        re.sub(r"\d+ %", "N %", re.sub(r"(?<=\S)  +", " ", line)) if "TIME" in line else line
        for line in lines
    )


def _masked_json(value: Any, key: str = "") -> Any:
    if key == "environment":
        return dict.fromkeys(value, "…")
    if key.endswith("_s") or key in ("threads", "max_abs_error", "timings"):
        return "…" if value or (key == "max_abs_error" and value is not None) else value
    if isinstance(value, dict):
        return {name: _masked_json(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_masked_json(one, key) for one in value]
    return _masked(value) if isinstance(value, str) else value


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_without_numbers(one) for one in value]
    return "#" if isinstance(value, (int, float)) else value


def _laid_out(value: Any) -> list[str]:
    """JSON in lines: what is short and not nested is filled into lines, the rest begins a line of
    its own.
    """
    pairs = value.items() if isinstance(value, dict) else ((None, one) for one in value)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    lines, may_fill = [begin], True
    for name, one in pairs:
        title = "" if name is None else f"{json.dumps(name)}: "
        whole = title + _flat(one)
        if not isinstance(one, (dict, list)) or (_is_flat(one) and len(whole) < 116):
            if may_fill and len(lines[-1]) + len(whole) < 116:
                lines[-1] += f"{' ' * (lines[-1] != begin)}{whole},"
            else:
                lines.append(f" {whole},")
            may_fill = not isinstance(one, list) or name is not None
        else:
            first, *rest = _laid_out(one)
            lines += [f" {title}{first}", *(f" {line}" for line in rest)]
            lines[-1] += ","
            may_fill = False
    lines[-1] = lines[-1].removesuffix(",") + end
    return lines


def _is_flat(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not any(isinstance(one, (dict, list)) for one in inner)


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{json.dumps(name)}: {_flat(one)}' for name, one in value.items())}}}"
        )
    if isinstance(value, list):
        return f"[{', '.join(map(_flat, value))}]"
    return _short(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _short(number: float) -> str:
    return format(number, "#.6g") if abs(number) >= 1e-6 else "0.0"


class Page(HTMLParser):
    """The text of a page: a line for each block, `|` between the cells of a row. Scripts and styles
    are left out.
    """

    BLOCKS = "p div section header h1 h2 h3 tr caption title li summary main pre".split()

    def __init__(self, source: str) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._silent = False
        self.feed(source)
        self.close()

    @property
    def text(self) -> str:
        """Its lines."""
        lines = (" ".join(line.split()) for line in "".join(self._pieces).split("\n"))
        return "\n".join(line.removesuffix(" |") for line in lines if line)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._silent = tag in ("script", "style")
        self._pieces.append("\n" if tag in self.BLOCKS else " " * (tag == "br"))

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        self._pieces.append("\n" if tag in self.BLOCKS else " | " if tag in ("td", "th") else "")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._pieces.append(data.replace("\n", " "))


def texts_of_picture(svg: str) -> list[str]:
    """The texts of a picture, and the colours of what has a title, in the order of the file."""
    lines = []
    for element in ElementTree.fromstring(svg).iter():
        tag = element.tag.rpartition("}")[2]
        titles = [child.text or "" for child in element if child.tag.endswith("}title")]
        if tag in ("text", "desc"):
            lines.append("".join(element.itertext()))
        elif titles and tag != "svg":
            lines.append(f"{tag} {element.get('fill', '')} {titles[0]}".replace("  ", " "))
    return lines


# -------------------------------------------------------------------------- comparing with approved


def with_near_numbers_of_old(new: str, old: str) -> str:
    """The new text with the numbers of the old one where they differ by rounding alone. What still
    differs is a change.
    """
    if new == old:
        return old
    ours, theirs = new.split("\n"), old.split("\n")
    skeletons = [[rounding.NUMBER.sub("\0", line) for line in lines] for lines in (ours, theirs)]
    matcher = difflib.SequenceMatcher(None, *skeletons, autojunk=False)
    for at, of, size in matcher.get_matching_blocks():
        for i in range(size):
            ours[at + i] = rounding.with_near_numbers_of_old(ours[at + i], theirs[of + i])
    return "\n".join(ours)


@functools.cache
def approved() -> dict[str, str]:
    """The approved text of each command, by its section and line."""
    texts: dict[str, str] = {}
    section = ""
    for chunk in re.split(
        r"^(?=== |\$ )", APPROVED.read_text() if APPROVED.exists() else "", flags=re.MULTILINE
    ):
        title, _, text = chunk.partition("\n")
        if title.startswith("== "):
            section = title[3:]
        elif title.startswith("$ "):
            texts[f"{section}: {title[2:]}"] = text.rstrip("\n") + "\n"
    return texts


def write_approved(new: dict[str, str]) -> None:
    """Writes the file anew: for each command its new text, or the one that it had."""
    lines = [
        "What the commands of commands.txt print. `pytest tests/golden --approve` writes this"
        " file.\n"
    ]
    section = ""
    texts = approved() | new
    for command in commands():
        if command.section != section:
            section = command.section
            lines.append(f"== {section}\n")
        if (text := texts.get(key(command))) is not None:
            lines.append(f"$ {command.line}\n{text}")
    APPROVED.write_text("\n".join(lines))


def key(command: Command) -> str:
    """The name of a command among the approved."""
    return f"{command.section}: {command.line}"
