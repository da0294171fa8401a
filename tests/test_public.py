"""The public interface: every name of `mhacli.__all__` is there, documented, and costs nothing until it is used."""

import subprocess
import sys

import mhacli

HEAVY = ("torch", "numpy", "rich", "transformers", "polars", "pandas")


def test_every_public_name_exists_and_says_what_it_is() -> None:
    assert list(mhacli.__all__) == sorted(mhacli.__all__)
    assert dir(mhacli) == list(mhacli.__all__)
    for name in set(mhacli.__all__) - {"__version__"}:
        assert getattr(mhacli, name).__doc__, name


def test_importing_the_package_loads_none_of_its_libraries() -> None:
    code = f"import sys, mhacli; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
