"""What `assert mhacli.check(model).ok` takes in pytest with the plugin, beside the same run without
it, and without any rewriting of modules.

    python benchmarks/in_pytest.py [ROUNDS]

The runs alternate, as whole processes: with the plugin, with `-p no:mha`, and with
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1, each with and without PYTHONDONTWRITEBYTECODE. Times are those of
the processors, which other work on the machine changes less; ratios are medians of the ratios round
by round. Limit: 1.1 × `-p no:mha`. mhacli must not be installed as editable: of such a package some
versions of pytest rewrite nothing. Last comes the import of the plugin in a run that does not use
it, what pytest does meanwhile included. Limit: 5 ms.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLE = Path(__file__).parents[1] / "sample_texts" / "my_gpt.py"
TEST = (
    "import mhacli\nfrom my_gpt import GPT\n\ndef test_gpt():\n    assert mhacli.check(GPT()).ok\n"
)
IMPORT = """
import importlib.metadata, sys, time
load = importlib.metadata.EntryPoint.load
def timed(self):
    began = time.process_time()
    loaded = load(self)
    if self.name == "mha":
        print("ms", 1000 * (time.process_time() - began), "torch" in sys.modules, file=sys.stderr)
    return loaded
importlib.metadata.EntryPoint.load = timed
import pytest
pytest.main(["--collect-only", "-q"])
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_gpt.py"]
RUNS = {
    "plugin": (PYTEST, {}),
    "-p no:mha": ([*PYTEST, "-p", "no:mha"], {}),
    "no plugins": (PYTEST, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
}


def run(command: list[str], variables: dict[str, str], folder: str) -> tuple[float, str]:
    """The processor time of a process that must pass, with its children, and what it printed on
    stderr.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | variables
    before = os.times()
    ended = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode in (0, 5), ended.stdout  # 5: no test was collected
    return sum(os.times()[2:4]) - sum(before[2:4]), ended.stderr


def main() -> None:
    """Prints a line per run."""
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "my_gpt.py").write_text(SAMPLE.read_text().replace("=1)", "=0)"))
        Path(folder, "test_gpt.py").write_text(TEST)
        for extra in ({}, {"PYTHONDONTWRITEBYTECODE": "1"}):
            rounds = [
                {
                    name: run(command, env | extra, folder)[0]
                    for name, (command, env) in RUNS.items()
                }
                for _ in range(n_rounds + 1)
            ][1:]
            for name in RUNS:
                median = statistics.median(each[name] for each in rounds)
                ratio = statistics.median(each["plugin"] / each[name] for each in rounds)
                print(f"{name:<12}{' '.join(extra):<26}{median:>8.2f} s{ratio:>8.2f}", flush=True)
        Path(folder, "test_gpt.py").unlink()
        for extra in ({}, {"PYTHONDONTWRITEBYTECODE": "1"}):
            words = [run([sys.executable, "-c", IMPORT], extra, folder)[1] for _ in range(n_rounds)]
            times = [float(line.split()[1]) for line in words]
            print(f"import      {' '.join(extra):<26}{statistics.median(times):>8.2f} ms")
            assert not any("True" in line for line in words), "torch was imported"


if __name__ == "__main__":
    main()
