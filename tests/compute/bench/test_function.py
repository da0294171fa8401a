"""`mhacli.bench` passes sizes and limits on as the command's options do."""

import pytest
from support.benchmarks_made import made_benchmark

import mhacli
from mhacli.compute.bench import sizes
from mhacli.compute.bench.run import BenchOptions
from mhacli.errors import UsageError
from mhacli.results.bench.workload import Sweep


def test_sizes_and_limits_reach_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    made = made_benchmark()
    monkeypatch.setattr(sizes, "measured", lambda *words: asked.append(words) or made)
    found = mhacli.bench([64, 128], backends=["sdpa"], n_heads=[8], n_kv_heads=[2], causal=True, repeat=4, seed=5)
    sweep = Sweep(backends=("sdpa",), n_heads=(8,), n_kv_heads=(2,), lengths=(64, 128), causal=True)
    assert asked == [(sweep, "auto", BenchOptions(repeat=4, seed=5))]
    assert found is made
    assert "\n" not in repr(found)
    assert found.summary[0].split(";")[0][:20] in found._repr_html_().replace("&#x27;", "'")


def test_sizes_that_cannot_be_are_refused_before_anything_is_measured() -> None:
    with pytest.raises(UsageError):
        mhacli.bench([64], backends=["none"])
