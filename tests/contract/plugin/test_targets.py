"""Targets of `mha check` as tests of pytest: `pytest --mha FILE.py:NAME`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.mha import run_pytest, run_python

CASES = Path(__file__).parent / "cases"
SAMPLES = Path(__file__).parents[3] / "sample_texts"
MENDED = {
    "my_gpt.py": ("diagonal=1", "diagonal=0"),
    "my_attention.py": ("z.reshape(", "z.transpose(1, 2).reshape("),
}
"""What is wrong in the samples, and what it must be."""
SIZES = ("--mha-arg", "d_model=64", "--mha-arg", "n_heads=8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(CASES / "attention.py", tmp_path)
    return tmp_path


def failed(output: str) -> dict[str, str]:
    """The sentence of each failed test, by its id, from the short summary."""
    return dict(re.findall(r"^FAILED (\S.*?) - (.+)$", output, flags=re.MULTILINE))


def annotations(errors: str) -> list[tuple[str, dict[str, str], str]]:
    """The level, the properties and the message of each annotation, as GitHub's runner reads it."""

    def plain(text: str, codes: str) -> str:
        return re.sub(f"%({codes})", lambda match: chr(int(match[1], 16)), text)

    found = []
    for level, words, message in re.findall(r"^::(\w+) (.*?)::(.*)$", errors, flags=re.MULTILINE):
        pairs = (word.split("=", 1) for word in words.split(","))
        properties = {name: plain(value, "25|0D|0A|3A|2C") for name, value in pairs}
        found.append((level, properties, plain(message, "25|0D|0A")))
    return found


@pytest.mark.real
def test_the_samples_are_red_with_their_line_and_mended_ones_green(tmp_path: Path) -> None:
    lines, words = {}, []
    for name, (wrong, right) in MENDED.items():
        text = (SAMPLES / name).read_text()
        assert text.count(wrong) == 1
        lines[name] = text[: text.index(wrong)].count("\n") + 1
        (tmp_path / name).write_text(text)
        (tmp_path / f"mended_{name}").write_text(text.replace(wrong, right))
    for prefix in ("", "mended_"):
        words += ["--mha", f"{prefix}my_gpt.py:GPT"]
        words += ["--mha", f"{prefix}my_attention.py:MultiHeadAttention", *SIZES]
    ended = run_pytest(
        tmp_path, *words, "--junitxml=out.xml", GITHUB_ACTIONS="true", GITHUB_WORKSPACE=".."
    )
    assert ended.returncode == 1
    sentences = failed(ended.stdout)
    assert set(sentences) == {"mha::my_gpt.py:GPT", "mha::my_attention.py:MultiHeadAttention"}
    for name, line in lines.items():
        assert any(words.startswith(f"{name}:{line}") for words in sentences.values()), sentences
        assert f"{name}:{line}\n" in ended.stdout  # in the report
    shown = annotations(ended.stderr)
    assert {level for level, _, _ in shown} == {"error"}
    places = {(each["file"], int(each["line"])) for _, each, _ in shown}
    assert {(f"{tmp_path.name}/{name}", line) for name, line in lines.items()} <= places
    assert not any("mended" in file for file, _ in places)
    cases = {
        case.get("name"): {each.get("name"): each.get("value") for each in case.iter("property")}
        for case in ElementTree.parse(tmp_path / "out.xml").iter("testcase")
    }
    assert cases["my_gpt.py:GPT"]["verdict"] == "wrong"
    assert "causal-off-by-one" in str(cases["my_gpt.py:GPT"]["mistakes"])
    assert "causality fails" in str(cases["my_gpt.py:GPT"]["behaviours"])
    assert cases["mended_my_gpt.py:GPT"]["verdict"] == "right"
    assert "cache" in str(cases["mended_my_gpt.py:GPT"]["not tried"])
    for case in ElementTree.parse(tmp_path / "out.xml").iter("failure"):
        assert case.get("message") in sentences.values()


def test_targets_are_found_by_id_name_and_mark_without_running_them(folder: Path) -> None:
    (folder / "test_other.py").write_text("def test_other():\n    pass\n")
    both = ("--mha", "attention.py:right", "--mha", "attention.py:linear", "--collect-only", "-q")
    right, linear, other = (
        "mha::attention.py:right",
        "mha::attention.py:linear",
        "test_other.py::test_other",
    )
    for words, ids in (
        ((), [right, linear]),
        ((".",), [right, linear, other]),
        ((linear,), [linear]),
        ((linear, "test_other.py"), [linear, other]),
        (("-k", "linear"), [linear]),
        ((".", "-m", "mha"), [right, linear]),
        ((".", "-m", "not mha"), [other]),
    ):
        ended = run_pytest(folder, *both, *words)
        assert ended.stdout.split("\n\n")[0].splitlines() == ids, ended.stdout
    assert not (folder / "imports.txt").exists()
    assert run_pytest(folder, *both, "mha::attention.py:wrong").returncode == 4


def test_an_id_of_a_subfolder_can_be_typed_back(folder: Path) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "below").mkdir()
    words = ("--mha", "../attention.py:right", "--mha", "../attention.py:linear")
    ended = run_pytest(folder / "below", *words, "-v", "-k", "right")
    (ident,) = re.findall(r"^(\S+) PASSED", ended.stdout, flags=re.MULTILINE)
    again = run_pytest(folder / "below", ident, *words, "--collect-only", "-q")
    assert again.stdout.splitlines()[:2] == ["mha::../attention.py:right", ""]


def test_code_is_imported_from_where_pytest_imports(folder: Path) -> None:
    (folder / "code").mkdir()
    (folder / "attention.py").rename(folder / "code" / "own_attention.py")
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = code\n")
    (folder / "test_named.py").write_text(
        "import mhacli\n\ndef test_named():\n    assert mhacli.check('own_attention:right').ok\n"
    )
    ended = run_pytest(folder, "--mha", "own_attention:right", ".", cold=True)
    assert "2 passed" in ended.stdout, ended.stdout


def test_what_is_not_right_fails_with_its_sentence(folder: Path) -> None:
    """A refusal, an empty folder and a verdict that is not decided; the right one passes."""
    (folder / "empty").mkdir()
    targets = ["attention.py:right", "attention.py:linear", "empty", "missing.py:GPT"]
    words = [word for target in targets for word in ("--mha", target)]
    ended = run_pytest(folder, *words, "-v", GITHUB_ACTIONS="true")
    sentences = failed(ended.stdout)
    assert list(sentences) == [f"mha::{target}" for target in targets[1:]]
    for target, said in zip(
        targets[1:], ("not decided", "config.json", "missing.py does"), strict=True
    ):
        assert said in sentences[f"mha::{target}"]
    assert "Traceback" not in ended.stdout
    assert re.search(r"^mha::attention.py:right PASSED", ended.stdout, flags=re.MULTILINE)
    shown = annotations(ended.stderr)
    assert [(level, each.get("file")) for level, each, _ in shown] == [
        ("warning", None),
        ("warning", None),
        ("warning", None),
    ]
    assert shown[0][2].startswith("attention.py:linear: ")
    words = ["--mha", "missing.py:GPT", "--no-annotations"]
    assert not annotations(run_pytest(folder, *words, GITHUB_ACTIONS="true").stderr)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--mha", ""), "empty"),
        (("--mha", "attention.py"), "'attention.py'"),
        (("--mha", "attention.py:Averaged", "--mha-arg", "d_model"), "'d_model'"),
        (("--mha", "empty", "--mha-arg", "d_model=8"), "empty"),
    ],
)
def test_an_option_that_cannot_mean_anything_is_refused(
    folder: Path, words: tuple[str, ...], says: str
) -> None:
    (folder / "empty").mkdir()
    ended = run_pytest(folder, *words)
    assert (ended.returncode, ended.stdout) == (4, "")
    assert says in ended.stderr


def test_no_target_replaces_one_that_has_its_id(folder: Path) -> None:
    for name in ("a", "a[2]"):
        (folder / name).mkdir()
    targets = ("a[2]", "a", "a")
    for order in (targets, targets[::-1]):
        words = [word for target in order for word in ("--mha", target)]
        ids = (
            run_pytest(folder, *words, "--collect-only", "-q").stdout.split("\n\n")[0].splitlines()
        )
        assert len(set(ids)) == 3, ids


def test_a_failure_has_the_script_that_shows_it(folder: Path) -> None:
    ended = run_pytest(folder, "--mha", "attention.py:without_scale_beyond_100_tokens")
    script = re.search(r"^(import torch.*?)\n\n", ended.stdout, flags=re.MULTILINE | re.DOTALL)
    assert script, ended.stdout
    assert "without_scale_beyond_100_tokens" in script[1]
    ended = run_python(folder, f"import sys\nsys.path.insert(0, '')\n{script[1]}")
    assert float(ended.stdout) > 1, ended


def test_an_argument_belongs_to_the_target_before_it(folder: Path) -> None:
    """One head is right, and two are averaged."""
    target = "attention.py:Averaged"
    one, two = (
        ("--mha", target, "--mha-arg", f"n_heads={n}", "--mha-arg", "d_model=8") for n in (1, 2)
    )
    ended = run_pytest(folder, *one, *two)
    assert set(failed(ended.stdout)) == {f"mha::{target}[2]"}, ended.stdout
    assert "built    Averaged(d_model=8, n_heads=2)" in ended.stdout
    assert run_pytest(folder, "--mha-arg", "n_heads=1", "--mha", target).returncode == 4


TABLE = """
[[tool.mha.check.targets]]
target = "attention.py:right"
{key} = 40

[[tool.mha.check.targets]]
target = "attention.py:without_scale"
accept = {{ scale-missing = "as in T5" }}
"""


def test_a_table_states_targets_and_what_is_meant(folder: Path) -> None:
    (folder / "below").mkdir()
    table = folder / "pyproject.toml"
    table.write_text(TABLE.format(key="length"))
    words = ("--mha", "../pyproject.toml", f"--junitxml={folder / 'out.xml'}")
    ended = run_pytest(folder / "below", *words, GITHUB_ACTIONS="true")
    assert "2 passed" in ended.stdout
    properties = ElementTree.parse(folder / "out.xml").iter("property")
    untried = [each.get("value") for each in properties if each.get("name") == "not tried"]
    assert "behaviours" in str(untried[-1])
    assert "up to 257 tokens" not in ended.stdout
    assert "as in T5" in ended.stdout
    assert "not tried because of what is accepted: " in ended.stdout
    assert [level for level, _, _ in annotations(ended.stderr)] == ["notice"]
    table.write_text(TABLE.format(key="lenght"))
    ended = run_pytest(folder, "--mha", "pyproject.toml")
    assert ended.returncode == 4
    assert "length" in ended.stderr


def test_names_with_line_breaks_and_colons_are_shown_in_one_line(folder: Path) -> None:
    name = "a\nb::c.py"
    shutil.copy(folder / "attention.py", folder / name)
    ended = run_pytest(folder, "--mha", f"{name}:without_scale", GITHUB_ACTIONS="true")
    (ident,) = failed(ended.stdout)
    assert ident == r"mha::a\nb::c.py:without_scale"
    ((_, properties, message),) = annotations(ended.stderr)
    assert properties["file"] == r"a\nb::c.py"
    assert message.startswith(r"a\nb::c.py:without_scale: ")
    words = ("--mha", f"{name}:right", "--mha", f"{name}:without_scale")
    again = run_pytest(folder, ident, *words)
    assert list(failed(again.stdout)) == [ident]
    counts = again.stdout.splitlines()[-1]
    assert "1 failed" in counts
    assert "passed" not in counts


@pytest.mark.real
def test_workers_of_xdist_run_each_target_once(folder: Path) -> None:
    pytest.importorskip("xdist")
    words = ("--mha", "attention.py:right", "--mha", "attention.py:without_scale")
    ended = run_pytest(folder, *words, "-n", "2", cold=True, GITHUB_ACTIONS="true")
    assert list(failed(ended.stdout)) == ["mha::attention.py:without_scale"], ended.stdout
    assert "1 failed, 1 passed" in ended.stdout
    assert [level for level, _, _ in annotations(ended.stderr)] == ["error"]
    assert len((folder / "imports.txt").read_text().splitlines()) == 2


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_targets_run_beside_tests(folder: Path, mode: str) -> None:
    (folder / "test_other.py").write_text("def test_other():\n    pass\n")
    words = (".", "--mha", "attention.py:right", f"--import-mode={mode}")
    assert "2 passed" in run_pytest(folder, *words).stdout


@pytest.mark.real
def test_targets_run_beside_pytest_torch(folder: Path) -> None:
    pytest.importorskip("pytest_torch")
    words = ("--mha", "attention.py:right", "--torch-model=attention.py:Averaged")
    assert "mha::attention.py:right" in run_pytest(folder, *words, "-v", cold=True).stdout
