# expect: one whole file of all writers on one path; their exit codes
import json
import os
import pathlib

from saving import contents, prepare, records

import mhacli


def ends(n_writers, n_saves, force):
    """The exit codes of processes that begin to save to one path at once."""
    prepare(False)
    reading, writing = os.pipe()
    pids = []
    for number in range(n_writers):
        pids.append(os.fork())
        if not pids[-1]:
            os.close(writing)
            os.read(reading, 1)
            try:
                for _ in range(n_saves):
                    records["old" if number % 2 else "new"].save("file", force=force)
            except mhacli.MhaError as fault:
                os._exit(fault.exit_code if fault.code == "exists" else 9)
            os._exit(0)
    os.close(reading)
    os.close(writing)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert os.listdir(".") == ["file"]
    assert pathlib.Path("file").read_bytes() in contents
    return codes


print(json.dumps({"forced": ends(5, 20, True), "first": ends(5, 1, False)}))
