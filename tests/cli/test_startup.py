"""What answers without computing anything must not pay for torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import forks

MHA = str(Path(sys.executable).with_name("mha"))
REPORT = """
import os, sys
real_exit = os._exit
def report(code):
    sys.stderr.write("LOADED " + " ".join(name for name in ("torch", "numpy", "rich", "tokenizers") if name in sys.modules))
    sys.stderr.flush()
    real_exit(code)
os._exit = report
sys.argv[0] = "mha"
from mhacli.__main__ import main
main()
"""


def loaded_by(*words: str, cwd: Path | None = None) -> tuple[int, set[str]]:
    """The exit code of a fresh process that runs the command, and which heavy libraries it had loaded at its end."""
    done = subprocess.run([sys.executable, "-c", REPORT, *words], capture_output=True, text=True, cwd=cwd, check=False)
    assert "LOADED" in done.stderr, done.stderr
    return done.returncode, set(done.stderr.rpartition("LOADED")[2].split())


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run.safetensors"
    subprocess.run(
        [forks.program(), "run", "the cat sat", "--save", str(path), "--view", "none"], check=True, capture_output=True
    )
    return path


def test_a_run_loads_torch_so_that_the_report_can_be_trusted() -> None:
    code, loaded = loaded_by("run", "the cat", "--view", "none")
    assert code == 0
    assert {"torch", "numpy", "rich"} <= loaded


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["--version"], 0),
        (["rum"], 2),
        (["run", "the cat", "--heads", "5"], 2),
        (["run", "the cat", "--view", "cubist"], 2),
        (["run"], 2),
        (["run", "--file", "/no/such/file"], 1),
        (["run", "the cat", "--weights", "/no/such/file"], 1),
        (["decode", "--help"], 0),
        (["decode", "the cat", "--heads", "5"], 2),
        (["run", "the cat", "--sink-window", "2"], 2),
        (["run", "the cat", "--d-head", "5", "--positions", "rope"], 2),
        (["run", "the cat", "--random", "2,5"], 2),
        (["run", "the cat", "--random", "two"], 2),
    ],
    ids=str,
)
def test_help_version_and_errors_load_neither_torch_nor_numpy(words: list[str], code: int) -> None:
    assert_light(loaded_by(*words), code)


def assert_light(result: tuple[int, set[str]], code: int) -> None:
    assert result[0] == code
    assert not {"torch", "numpy", "tokenizers"} & result[1]


@pytest.mark.parametrize("words", [(), ("sink",), ("scale-missing",)])
def test_explain_loads_neither_torch_nor_numpy(words: tuple[str, ...]) -> None:
    assert_light(loaded_by("explain", *words), 0)


def test_vocab_loads_neither_torch_nor_numpy() -> None:
    assert_light(loaded_by("vocab", "the cat sat on the mat"), 0)


@pytest.mark.parametrize("words", [[], ["--view", "heatmap", "--head", "1"], ["--json"], ["--csv"]], ids=str)
def test_show_does_not_load_torch(record: Path, words: list[str]) -> None:
    code, loaded = loaded_by("show", str(record), *words)
    assert code == 0
    assert "torch" not in loaded


def test_pictures_and_a_comparison_do_not_load_torch(record: Path, tmp_path: Path) -> None:
    pictures = ["--html", "p.html", "--svg", "p.svg", "--png", "p.png"]
    for words in (["show", str(record), *pictures], ["diff", str(record), str(record)]):
        code, loaded = loaded_by(*words, cwd=tmp_path)
        assert code == 0
        assert "torch" not in loaded
    assert {path.name for path in tmp_path.iterdir()} == {"p.html", "p.svg", "p.png"}


def test_the_viewer_says_without_torch_or_textual_that_it_needs_a_terminal(record: Path) -> None:
    assert_light(loaded_by("view", str(record)), 1)


FIRST_SCREEN = """
import asyncio, sys
from mhacli.results.record import storage
from mhacli.results.record.record import Record
from mhacli.viewer.app import Viewer
from mhacli.viewer.panes.heads import HeadGrid
from mhacli.viewer.session import ViewerOptions
first = []
draw = HeadGrid._draw_more
def draw_more(heads):
    shown = "".join(piece.text for strip in heads.screen._compositor.render_strips() for piece in strip)
    first.extend(name for name in ("numpy", "safetensors", "torch") if name in sys.modules)
    first.append("help" if "? help" in shown and "entropy" in shown else shown)
    draw(heads)
HeadGrid._draw_more = draw_more
async def run():
    async with Viewer(storage.load_late(sys.argv[1]), ViewerOptions()).run_test(size=(80, 24)) as pilot:
        while "numpy" not in sys.modules:
            await pilot.pause(0.01)
asyncio.run(run())
print(*first)
"""


def test_the_first_screen_of_the_viewer_is_there_before_numpy_is_loaded(record: Path) -> None:
    pytest.importorskip("textual")
    words = [sys.executable, "-c", FIRST_SCREEN, str(record)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["help"]


def test_a_file_that_is_no_record_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\x00" * 7)
    code, loaded = loaded_by("run", "the cat", "--weights", "w.safetensors", cwd=tmp_path)
    assert code == 1
    assert "torch" not in loaded


def test_importing_the_package_does_not_load_torch() -> None:
    script = "import sys, mhacli; assert 'torch' not in sys.modules; mhacli.Config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_public_names_are_there() -> None:
    from mhacli import Config, MhaError, MultiHeadAttention, Record, __version__, inspect

    assert all((Config, MhaError, MultiHeadAttention, Record, __version__, inspect))


def test_python_m_mhacli_is_mha() -> None:
    done = subprocess.run([sys.executable, "-m", "mhacli", "--version"], capture_output=True, text=True, check=True)
    script = subprocess.run([MHA, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == script.stdout == f"mha {version()}\n"


def version() -> str:
    import mhacli

    return mhacli.__version__


@pytest.mark.parametrize(
    ("words", "expected"), [("mha t", {"trace"}), ("mha d", {"decode", "diff", "doctor"}), ("mha run --vi", {"--view"})]
)
def test_the_shell_completes_commands_and_options(words: str, expected: set[str]) -> None:
    asked = {"_MHA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([MHA], env=os.environ | asked, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == expected
