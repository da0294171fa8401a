"""How large pages are and how fast they open, how long pictures take, and when the viewer shows its
first screen.

    python benchmarks/pictures.py

Records are made by `mha run` first: 144 heads over 512 random rows, causal and not, and a short
one. Limits: a page of 144 heads of 512 tokens takes at most 1 MiB and is ready within 1 s of being
opened; the viewer shows its first screen within 0.6 s of its process's start. Opening needs
playwright and a Chromium, the viewer textual.
"""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

MHA = str(Path(sys.executable).with_name("mha"))
BIG = [
    "--random",
    "1,512",
    "--heads",
    "144",
    "--d-model",
    "1152",
    "--keep",
    "pattern",
    "--keep-limit",
    "1GiB",
]
RECORDS = {
    "144 heads × 512, causal": [*BIG, "--causal"],
    "144 heads × 512": BIG,
    "4 heads × 6": ["the cat sat on the mat", "--heads", "4", "--causal"],
}
BASELINE = [sys.executable, "-c", "import textual.app, textual.screen, numpy, safetensors.numpy"]
ROUNDS, PATIENCE_S = 11, 30.0
LAST_LINE, SMALL_PICTURE = b"help", b"48;5;"
"""What the last line of the first screen says, and the background colours with which small pictures
are drawn."""


def seconds(command: list[str]) -> float:
    """Wall time of one run of a process."""
    began = perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return perf_counter() - began


def viewer_s(record: Path, *awaited: bytes) -> list[float]:
    """From the start of `mha view` to what is awaited on its first screen, one after the other, on
    a terminal of 80 × 24.
    """
    began = perf_counter()
    process, terminal = pty.fork()
    if not process:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        os.execv(MHA, [MHA, "view", str(record)])
    shown, took = b"", list[float]()
    for words in awaited:
        while words not in shown:
            if not select.select([terminal], [], [], PATIENCE_S)[0]:
                raise TimeoutError(f"no {words.decode()} after {PATIENCE_S} s")
            shown += os.read(terminal, 65536)
        took.append(perf_counter() - began)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(terminal)
    return took


def ready_ms(page: Path) -> list[float]:
    """When the page said that its first matrix was drawn, after the start of its navigation, in a
    fresh window each time.
    """
    from playwright.sync_api import sync_playwright

    browser = next(
        path for name in ("chromium-headless-shell", "chromium") if (path := shutil.which(name))
    )
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        window = playwright.chromium.launch(executable_path=browser, args=sandbox)
        times = []
        for _ in range(ROUNDS):
            tab = window.new_page()
            tab.goto(f"file://{page}")
            tab.wait_for_selector("html[data-ready=true]", state="attached")
            times.append(
                float(tab.evaluate("performance.getEntriesByName('mha-ready')[0].startTime"))
            )
            tab.close()
        window.close()
    return times


def main() -> None:
    """Prints a line per record, then the viewer's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(
            f"{'record':<26}{'page KiB':>9}{'drawn s':>9}{'ready ms':>10}"
            f"{'svg KiB':>9}{'drawn s':>9}"
        )
        for number, (said, words) in enumerate(RECORDS.items()):
            record, page, svg = (
                folder / f"{number}{ending}" for ending in (".safetensors", ".html", ".svg")
            )
            command = [MHA, "run", *words, "--repeat", "1", "--view", "none", "--save", str(record)]
            subprocess.run(command, check=True, capture_output=True)
            show = [MHA, "show", str(record), "--view", "none", "--force"]
            drawn = [
                seconds([*show, f"--{kind}", str(path)])
                for kind, path in (("html", page), ("svg", svg))
            ]
            sizes = [path.stat().st_size / 1024 for path in (page, svg)]
            ready = statistics.median(ready_ms(page))
            print(
                f"{said:<26}{sizes[0]:>9.1f}{drawn[0]:>9.2f}{ready:>10.0f}"
                f"{sizes[1]:>9.1f}{drawn[1]:>9.2f}",
                flush=True,
            )
        print(f"\n{'mha view':<26}{'last line s':>12}{'pictures s':>12}{'imports alone s':>17}")
        for number, said in enumerate(RECORDS):
            record = folder / f"{number}.safetensors"
            awaited = (
                (LAST_LINE,) if "144" in said else (LAST_LINE, SMALL_PICTURE)
            )  # 144 do not fit as pictures
            rounds = [(*viewer_s(record, *awaited), seconds(BASELINE)) for _ in range(ROUNDS + 1)][
                1:
            ]
            *shown, alone = (statistics.median(column) for column in zip(*rounds, strict=True))
            pictured = f"{shown[1]:.3f}" if len(shown) > 1 else "none"
            print(f"{said:<26}{shown[0]:>12.3f}{pictured:>12}{alone:>17.3f}", flush=True)


if __name__ == "__main__":
    main()
