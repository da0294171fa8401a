# expect: the old or the new file whole, whichever call of a save fails; how often each failed
import errno
import itertools
import json
import os

from saving import CALLS, kept, patch, plain, prepare, records

import mhacli


def fail():
    raise OSError(errno.EIO, "injected")


def save(exists):
    """The error of a save, or None."""
    try:
        records["new"].save("file", force=exists)
    except mhacli.MhaError as error:
        return error


counts = {}
for has_unnamed, exists, name in itertools.product((True, False), (True, False), CALLS):
    for n in itertools.count(1):
        prepare(exists)
        patch(name, n, fail, has_unnamed)
        fault = save(exists)
        for call in CALLS:
            setattr(os, call, plain[call])
        there = kept(exists)
        assert set(os.listdir(".")) <= {"file"}, (name, n, os.listdir("."))
        if fault is None:
            break
        if name == "fsync" and n == 1:
            # the bytes are synced before they have the name
            assert there == ("old" if exists else None), (name, n)
        assert "file" in fault.message, fault
        assert "injected" in fault.message, fault
        assert fault.exit_code == 1, fault
        counts[name] = counts.get(name, 0) + 1
    assert there == "new", (name, n)
print(json.dumps(counts))
