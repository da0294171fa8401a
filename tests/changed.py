"""Reads changed files of every kind, each in a fork with 10 s of processor time, and prints what is
neither read nor refused in a sentence, the most processor time and memory, and the exit codes. With
`--cold` the installed script reads them.

    python tests/changed.py --seeds 1000:1180
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "contract" / "refusals")]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
CPU_S = 10


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", default="1000:1200")
    options.add_argument("--kinds", default=".")
    options.add_argument("--cold", action="store_true")
    given = options.parse_args()
    low, high = map(int, given.seeds.split(":"))
    with tempfile.TemporaryDirectory(prefix="mha-changed-") as name:
        os.environ["MHA_TESTS_SHARED"] = name
        from test_changed_files import KINDS

        totals = Counter[str]()
        for kind, parts in KINDS.items():
            if given.kinds not in (".", kind):
                continue
            whole = Path(name, "whole", kind)
            whole.mkdir(parents=True)
            parts.make(whole)
            codes, most_s, most_mib = Counter[str](), 0.0, 0.0
            for seed in range(low, high):
                code, used = in_fork(kind, whole, Path(name, "place"), seed, given.cold)
                codes[code] += 1
                most_s = max(most_s, used.ru_utime + used.ru_stime)
                most_mib = max(most_mib, used.ru_maxrss / 1024)
            totals += codes
            print(f"{kind}: {dict(codes)}, {most_s:.1f} s, {most_mib:.0f} MiB", flush=True)
        print(dict(totals))


def in_fork(
    kind: str, whole: Path, place: Path, seed: int, cold: bool
) -> tuple[str, resource.struct_rusage]:
    """How a fork ended that reads one changed file: the exit code of mha, or `failed`."""

    from test_changed_files import KINDS, read_changed

    shutil.rmtree(place, ignore_errors=True)
    pid = os.fork()
    if not pid:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        try:
            ended = read_changed(KINDS[kind], whole, place, seed, cold=cold)
            os._exit(ended.code)
        except BaseException:
            print(f"--- {kind}, seed {seed}", flush=True)
            text = traceback.format_exc()
            print(text[-2500:], flush=True)
        os._exit(99)
    _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"--- {kind}, seed {seed}: signal {-code}", flush=True)
    return ("failed" if code < 0 or code == 99 else str(code)), used


if __name__ == "__main__":
    main()
