"""The largest memory of a command, as the system accounts for it.

    python benchmarks/peak.py COMMAND [ARG …]

A process of its own, because a child's figure begins with the size of the process that started it.
"""

from __future__ import annotations

import os
import subprocess
import sys


def peak_mib(command: list[str]) -> float:
    """The largest resident memory of a run of the command, measured from a small process. Fails if
    the command does.
    """
    done = subprocess.run(
        [sys.executable, __file__, *command], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


if __name__ == "__main__":
    process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    print(usage.ru_maxrss / 1024)
    sys.exit(os.waitstatus_to_exitcode(status))
