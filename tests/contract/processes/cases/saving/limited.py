# expect: the old file after each save over a limit of the size; how many there were
import itertools
import json
import os
import resource

from saving import contents, kept, prepare, records

import mhacli

counts = {"limit": 0}
for exists, limit in itertools.product((True, False), (1, 4097, min(map(len, contents)) - 1)):
    prepare(exists)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    message = ""
    try:
        records["new"].save("file", force=exists)
    except mhacli.MhaError as fault:
        message = fault.message
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if message:
        counts["limit"] += 1
        assert "file" in message
        assert "too large" in message
    assert kept(exists) == ("old" if exists else None)
    assert set(os.listdir(".")) <= {"file"}
print(json.dumps(counts))
