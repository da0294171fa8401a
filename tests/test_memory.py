import resource
from pathlib import Path

import pytest

from mhacli import memory

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
