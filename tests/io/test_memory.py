import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mhacli.io import memory

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch):
    """A machine of which only these files exist; `RLIMIT_AS` is as given."""

    def describe(files, soft=resource.RLIM_INFINITY):
        def read(path):
            if str(path) not in files:
                raise FileNotFoundError(str(path))
            return files[str(path)]

        monkeypatch.setattr(Path, "read_text", read)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))

    return describe


MEMINFO = {"/proc/meminfo": "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"}
V2 = "/sys/fs/cgroup/memory"
V1 = "/sys/fs/cgroup/memory/memory"


def test_free_memory_is_what_the_kernel_says(machine):
    machine(MEMINFO)
    assert memory.available_bytes() == 8 * GIB


def test_without_meminfo_it_is_the_memory_of_the_machine_where_that_is_known(machine, monkeypatch):
    machine({})
    pages = {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 1 << 30}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert memory.available_bytes() == 3 * GIB
    monkeypatch.setattr(os, "sysconf_names", {})
    assert memory.available_bytes() == 1 << 62


def test_a_control_group_leaves_its_limit_less_what_is_used(machine):
    machine({**MEMINFO, f"{V2}.max": f"{4 * GIB}\n", f"{V2}.current": f"{GIB}\n"})
    assert memory.available_bytes() == 3 * GIB


def test_a_control_group_without_limit_does_not_count(machine):
    machine({**MEMINFO, f"{V2}.max": "max\n", f"{V2}.current": f"{GIB}\n"})
    assert memory.available_bytes() == 8 * GIB


def test_an_old_control_group_counts_too(machine):
    machine({**MEMINFO, f"{V1}.limit_in_bytes": str(2 * GIB), f"{V1}.usage_in_bytes": str(GIB // 2)})
    assert memory.available_bytes() == 3 * GIB // 2


def test_a_limit_on_the_address_space_leaves_what_is_not_yet_mapped(machine):
    machine({**MEMINFO, "/proc/self/statm": "1000 500 1 1 1 1 1\n"}, soft=GIB)
    assert memory.available_bytes() == GIB - 1000 * resource.getpagesize()


def test_a_limit_that_is_passed_already_leaves_nothing(machine):
    machine({**MEMINFO, f"{V2}.max": str(GIB), f"{V2}.current": str(2 * GIB)})
    assert memory.available_bytes() == 0


def test_this_machine_has_some_memory():
    assert 1 << 20 < memory.available_bytes() < 1 << 50


def test_what_fits_in_four_fifths_is_granted_and_one_byte_more_is_not():
    assert memory.fits(800, available=1000)
    assert not memory.fits(801, available=1000)


def test_no_garbage_is_collected_while_modules_are_loaded():
    assert gc.isenabled()
    with memory.uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_garbage_is_collected_again_when_loading_fails():
    with pytest.raises(ImportError), memory.uncollected():
        raise ImportError
    assert gc.isenabled()


KEPT = """
import gc
from mhacli.io import memory
{first}
with memory.uncollected():
    kept = [[] for _ in range(10_000)]
print(gc.get_freeze_count() >= 10_000)
"""


@pytest.mark.parametrize(("first", "is_kept"), [("memory.keep_what_is_loaded()", "True"), ("", "False")])
def test_what_was_loaded_is_left_alone_in_mhas_own_process_only(first, is_kept):
    words = [sys.executable, "-c", KEPT.format(first=first)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == is_kept


COUNT = """
import gc, os, sys
found, real_exit = [], os._exit
gc.callbacks.append(lambda phase, _: found.append(phase))
def end(code):
    print(len(found), file=sys.stderr, flush=True)
    real_exit(code)
os._exit = end
sys.argv[0] = "mha"
{what}
end(0)
"""


@pytest.mark.full
def test_a_run_collects_garbage_less_often_than_loading_torch_alone_would():
    def n_collections(what, *words):
        done = subprocess.run([sys.executable, "-c", COUNT.format(what=what), *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stderr.split()[-1])

    ours = n_collections("from mhacli.__main__ import main; main()", "run", "the cat", "--view", "none")
    assert 0 < ours < n_collections("import torch")
