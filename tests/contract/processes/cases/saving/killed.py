# expect: the old or the new file whole, wherever a save is killed; how often at each call
import itertools
import json
import os
import random
import signal
import time

from saving import CALLS, kept, patch, prepare, records


def end():
    os.kill(os.getpid(), signal.SIGKILL)


counts = {}
for has_unnamed, exists, name in itertools.product((True, False), (True, False), CALLS):
    for n in itertools.count(1):
        prepare(exists)
        pid = os.fork()
        if not pid:
            patch(name, n, end, has_unnamed)
            records["new"].save("file", force=exists)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        there = kept(exists)
        if status == 0:
            break
        assert status == signal.SIGKILL, status
        counts[name] = counts.get(name, 0) + 1
    assert there == "new", (name, n)

random.seed(20)
for _ in range(60):
    prepare(True)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        for number in itertools.count():
            records["new" if number % 2 else "old"].save("file", force=True)
            os.write(writing, b"!")
    os.read(reading, 1)
    time.sleep(random.uniform(0, 0.005))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert kept(True) in records
    os.close(reading)
    os.close(writing)
print(json.dumps(counts))
