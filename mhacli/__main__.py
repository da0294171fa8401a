"""The entry of `mha` and of `python -m mhacli`: signals first, for the imports take long enough to
be interrupted.
"""

import gc
import os
import signal
from typing import NoReturn

from mhacli.errors import missing_library
from mhacli.io import long_work
from mhacli.io.files import remove_temporary_folders
from mhacli.io.memory import gc_paused


def main() -> NoReturn:
    """Runs the command line and ends the process: 0 done, 1 could not, 2 usage, 3 the check says
    no, 130/143 interrupted.
    """
    code = 0
    try:
        long_work.install()
        gc.freeze()  # what is loaded stays
        code = _run()
    except (KeyboardInterrupt, long_work.Terminated) as end:
        code = 128 + (signal.SIGTERM if isinstance(end, long_work.Terminated) else signal.SIGINT)
        long_work.say_interrupted()
    remove_temporary_folders()
    os._exit(code)  # nothing is left to flush, and torch takes its time to leave


def _run() -> int:
    """Runs the command line and returns its exit code, also where a library is missing that its
    modules import."""
    try:
        with gc_paused():
            from mhacli.cli import app as cli
    except ModuleNotFoundError as fault:
        from mhacli.cli.console import print_error

        missing = missing_library(fault)
        if missing is None:
            raise
        return print_error(missing)
    return cli.main()


if __name__ == "__main__":
    main()
