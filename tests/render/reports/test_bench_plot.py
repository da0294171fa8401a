"""Benchmarks as plots and pages: contents, reproducible bytes, and no scripts."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from support.benchmarks_made import CEILING, made_benchmark, made_control, made_row, size
from support.processes import obeyed_or_hidden

from mhacli.errors import MhaError
from mhacli.render.reports import bench as plot
from mhacli.render.reports.bench import about, page, require_plots, svg
from mhacli.results.bench.result import Benchmark, MachinePeak, read_benchmark
from mhacli.results.bench.workload import BACKENDS, Workload

LENGTHS = (8, 16, 64)
HOSTILE = '<script>alert("1")</script>]]>--><image href="http://e/x.png"/>&lt;\x1b[2J\u202e'
NAMESPACE = "{http://www.w3.org/2000/svg}"
EVENTS = re.compile(r"\son[a-z]+\s*=", re.IGNORECASE)


def works(**changes: Any) -> list[Workload]:
    return [size(batch=64 // length, q_len=length, k_len=length, **changes) for length in LENGTHS]


def run_of(*sizes: Workload, environment: dict[str, Any] | None = None, **changes: Any) -> Benchmark:
    """Two backends at each size, one of which breaks at the last, and one that nowhere runs."""
    rows = []
    for place, work in enumerate(sizes):
        rows += [
            made_row("sdpa", [0.001 * 2**place, 0.00125 * 2**place], workload=work, ran="flash", is_fastest=True),
            made_row("explicit", [0.004 * 2**place], workload=work, ratio=4.0, ratio_low=3.5, ratio_high=4.25)
            if place < len(sizes) - 1
            else made_row("explicit", workload=work, status="out-of-memory", reason="it <b>is</b> too much"),
            made_row("cudnn", workload=work),
        ]
    return replace(made_benchmark(*rows, controls=[made_control()], environment=environment), **changes)


def texts(picture: str) -> list[str]:
    """What stands in the picture to read."""
    return ["".join(node.itertext()) for node in ElementTree.fromstring(picture).iter(f"{NAMESPACE}text")]


def as_page(run: Benchmark) -> str:
    return page(run, svg(run))


class Page(HTMLParser):
    """The tags of a page with their attributes, the rows of its tables, and its text, read as a browser would."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def run() -> Benchmark:
    return run_of(*works(), command=("mha", "bench", "--lengths", "8,16,64"))


@pytest.fixture(scope="module")
def picture(run: Benchmark) -> str:
    return svg(run)


# ------------------------------------------------------------------------------------------------------------- picture


def test_the_picture_names_its_family_its_backends_its_sizes_and_its_ceiling(run: Benchmark, picture: str) -> None:
    assert ElementTree.fromstring(picture).tag == f"{NAMESPACE}svg"
    shown = texts(picture)
    assert shown.count(run.rows[0].family) == 1
    for word in ("sdpa", "explicit", "this machine's ceiling"):
        assert shown.count(word) == 1
    assert "cudnn" not in shown, "it has no times"
    for label in ("8 × 8", "4 × 16", "64"):
        assert shown.count(label) == 2
    assert shown.count("tokens") == 2
    assert {"time of a call (ms), p25–p75 shaded", "TFLOP/s"} <= set(shown)


def test_the_picture_shows_what_made_it_to_readers_and_to_programs(run: Benchmark, picture: str) -> None:
    told = "mha bench --lengths 8,16,64 · Some CPU · 3 threads · torch 2.9.1 · mha 0.1.0 · seed 0"
    assert about(run) == told
    assert told in " ".join(texts(picture))
    assert f">{told}<" in picture


def test_what_made_it_names_the_driver_and_quotes_the_words_of_the_command() -> None:
    run = run_of(*works(), environment={"driver": "550.1"}, command=("mha", "bench", "--svg", "a b.svg"), seed=7)
    assert about(run) == (
        "mha bench --svg 'a b.svg' · Some CPU · 3 threads · torch 2.9.1 · mha 0.1.0 · driver 550.1 · seed 7"
    )


def test_the_same_benchmark_gives_the_same_bytes(run: Benchmark, picture: str) -> None:
    assert svg(run) == picture
    assert as_page(run) == page(run, picture)
    assert not re.search(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", picture), "a date"


def test_drawing_leaves_no_style_behind(run: Benchmark) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    svg(run)
    assert dict(matplotlib.rcParams) == before


def test_nothing_in_a_picture_runs_or_comes_from_elsewhere(picture: str) -> None:
    require_nothing_runs(picture)


def require_nothing_runs(picture: str) -> None:
    allowed = ("http://www.w3.org/", "http://purl.org/", "http://creativecommons.org/", "https://matplotlib.org/")
    for node in ElementTree.fromstring(picture).iter():
        assert node.tag.split("}")[-1] not in ("script", "image", "foreignObject", "iframe", "a", "animate", "set")
        for name, value in node.attrib.items():
            plain = name.split("}")[-1]
            assert not plain.lower().startswith("on")
            if plain == "href":
                assert value.startswith("#")
            assert "url(" not in value or re.search(r"url\(#[A-Za-z0-9]+\)", value)
            assert "://" not in value or value.startswith(allowed)
    assert "@import" not in picture
    assert "<!ENTITY" not in picture


class Axes:
    """Axes that note what is drawn on them."""

    def __init__(self) -> None:
        self.lines: list[tuple[list[float], list[float], dict[str, Any]]] = []
        self.bands: list[tuple[list[float], list[float], list[float]]] = []
        self.ticks: tuple[list[float], list[str]] = ([], [])
        self.title = ""
        self.settings: dict[str, Any] = {}
        self.yaxis = MagicMock()

    def plot(self, x: list[float], y: list[float], **look: Any) -> None:
        self.lines.append((list(x), list(y), look))

    def fill_between(self, x: list[float], low: list[float], high: list[float], **look: Any) -> None:
        self.bands.append((list(x), list(low), list(high)))

    def set_xticks(self, places: list[float], labels: list[str]) -> None:
        self.ticks = (list(places), list(labels))

    def set(self, **settings: Any) -> None:
        self.settings = settings

    def set_title(self, title: str, **look: Any) -> None:
        self.title = title

    def minorticks_off(self) -> None: ...

    def legend(self, **look: Any) -> None: ...


def drawn(run: Benchmark) -> list[tuple[Axes, Axes]]:
    """What would be drawn, family by family."""
    found = []
    timed = [row for row in run.rows if row.median_s is not None]
    for family, rows in plot._series(timed):
        left, right = Axes(), Axes()
        plot._plot_family(run, family, rows, list(dict.fromkeys(row.backend for row in run.rows)), left, right)
        found.append((left, right))
    return found


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    ((x, y, _),) = [one for one in axes.lines if one[2]["label"] == label]
    return x, y


def test_by_hand_times_in_milliseconds_rates_and_quartiles(run: Benchmark) -> None:
    ((left, right),) = drawn(run)
    assert line(left, "sdpa") == ([8, 16, 64], pytest.approx([1.125, 2.25, 4.5]))
    assert line(left, "explicit") == ([8, 16], [4.0, 8.0])
    flops = [4 * 9 * 11 * (64 // length) * length**2 for length in LENGTHS]
    assert line(right, "sdpa")[1] == pytest.approx(
        [n / s / 1e9 for n, s in zip(flops, (1.125, 2.25, 4.5), strict=True)]
    )
    x, low, high = left.bands[0]
    assert x == [8, 16, 64]
    assert low == pytest.approx([1.0625, 2.125, 4.25])
    assert high == pytest.approx([1.1875, 2.375, 4.75])
    assert left.settings["xscale"] == left.settings["yscale"] == right.settings["yscale"] == "log"


def test_the_ceiling_is_the_slower_of_the_product_and_the_copy_at_every_length(run: Benchmark) -> None:
    ((left, right),) = drawn(run)
    least = []
    for work in works():
        compute = 4 * work.batch * 9 * work.q_len * work.k_len * 11 / (CEILING.matmul_tflops * 1e12)
        moved = 2 * work.batch * (9 * work.q_len + 3 * work.k_len) * 11 * 4 / (CEILING.copy_gb_per_s * 1e9)
        least.append(max(compute, moved))
    assert line(left, "this machine's ceiling") == ([8, 16, 64], pytest.approx([one * 1e3 for one in least]))
    rates = [4 * w.batch * 9 * w.q_len * w.k_len * 11 / s / 1e12 for w, s in zip(works(), least, strict=True)]
    assert line(right, "this machine's ceiling")[1] == pytest.approx(rates)
    assert max(rates) <= CEILING.matmul_tflops


def test_each_dtype_has_its_own_ceiling() -> None:
    sizes = [*works(), *works(dtype="float64")]
    run = replace(run_of(*sizes), ceilings=(CEILING, MachinePeak("float64", CEILING.matmul_tflops, 1.0)))
    single, double = (line(left, "this machine's ceiling")[1] for left, _ in drawn(run))
    assert [b / a for a, b in zip(single, double, strict=True)] == pytest.approx([40.0] * 3)


def test_a_backend_has_the_same_colour_and_mark_in_every_family_and_no_two_share_both() -> None:
    names = list(BACKENDS)
    rows = [made_row(name, [0.001], workload=work) for work in (works()[0], works(causal=True)[0]) for name in names]
    looks = [
        [(look["color"], look["marker"]) for _, _, look in left.lines if look["label"] in names]
        for left, _ in drawn(made_benchmark(*rows))
    ]
    assert looks[0] == looks[1]
    assert len(set(looks[0])) == len(names)


def test_lines_run_from_short_to_long_whatever_the_order_of_measuring() -> None:
    ((left, _),) = drawn(run_of(*reversed(works())))
    assert line(left, "sdpa")[0] == [8, 16, 64]
    assert sorted(left.ticks[0]) == [8, 16, 64]


# ------------------------------------------------------------------------------------------------------------ families


def test_families_stand_below_each_other_under_their_names() -> None:
    run = run_of(*works(), *works(causal=True), *works(direction="both"))
    shown = texts(svg(run))
    names = [work[0].family for work in (works(), works(causal=True), works(direction="both"))]
    assert [text for text in shown if text in names] == names
    assert shown.count("sdpa") == 3


def test_a_family_that_crosses_lengths_and_batches_comes_apart_by_batch() -> None:
    crossed = [size(batch=batch, q_len=length, k_len=length) for batch in (1, 4) for length in (8, 16)]
    run = made_benchmark(*(made_row("sdpa", [0.001 * work.batch], workload=work) for work in crossed))
    name = crossed[0].family
    assert [left.title for left, _ in drawn(run)] == [f"batch 1 · {name}", f"batch 4 · {name}"]
    assert [line(left, "sdpa") for left, _ in drawn(run)] == [([8, 16], [1.0, 1.0]), ([8, 16], [4.0, 4.0])]
    assert {f"batch 1 · {name}", f"batch 4 · {name}"} <= set(texts(svg(run)))


def test_one_length_with_several_batches_comes_apart_too() -> None:
    run = made_benchmark(*(made_row("sdpa", [0.5], workload=size(batch=batch)) for batch in (1, 2, 4)))
    assert [left.title.split(" · ")[0] for left, _ in drawn(run)] == ["batch 1", "batch 2", "batch 4"]


def test_a_single_point_is_drawn() -> None:
    shown = texts(svg(made_benchmark(made_row("sdpa", [0.5]))))
    assert shown.count("sdpa") == 1
    assert shown.count("2 × 5") == 2


def test_where_nothing_ran_there_is_nothing_to_plot() -> None:
    with pytest.raises(MhaError) as caught:
        svg(made_benchmark(made_row("cudnn")))
    assert caught.value.message == "there is nothing to plot: no backend was timed"
    assert (caught.value.hint, caught.value.code, caught.value.exit_code) == (None, "nothing-to-plot", 1)


def test_more_families_than_fit_a_picture_are_refused_with_an_alternative() -> None:
    run = made_benchmark(*(made_row("sdpa", [0.5], workload=size(d_head=d_head)) for d_head in range(1, 26)))
    with pytest.raises(MhaError) as caught:
        svg(run)
    assert caught.value.message == "a plot has room for 24 families of sizes, and this run has 25"
    assert caught.value.hint == "name fewer heads, widths, dtypes or directions"


def test_without_matplotlib_a_picture_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch, run: Benchmark) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    for step in (require_plots, lambda: svg(run)):
        with pytest.raises(MhaError) as caught:
            step()
        assert caught.value.message == "--svg and --html need matplotlib, which is not installed"
        assert (caught.value.hint, caught.value.code) == (
            'pip install "matplotlib<4,>=3.9" installs it',
            "missing-extra",
        )


# ---------------------------------------------------------------------------------------------------------------- page


def test_a_page_allows_no_script_and_nothing_from_elsewhere(run: Benchmark) -> None:
    text = as_page(run)
    policies = [a["content"] for tag, a in Page(text).tags if tag == "meta" and a.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    require_harmless(text)


def require_harmless(text: str) -> None:
    for tag, attributes in Page(text).tags:
        assert tag not in ("script", "img", "image", "link", "iframe", "object", "embed", "base", "form", "a", "video")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "xlink:href", "src"):
                assert (value or "").startswith("#")


def test_a_page_holds_the_picture_as_it_is(run: Benchmark, picture: str) -> None:
    whole = as_page(run)
    assert picture[picture.index("<svg") :] in whole
    assert "<!DOCTYPE svg" not in whole
    assert "<?xml" not in whole
    assert f"<p>{about(run)}</p>" in whole


def test_a_page_has_every_row_size_by_size_the_fastest_first(run: Benchmark) -> None:
    header, *rows = Page(as_page(run)).rows
    slowest_first = replace(run, rows=tuple(sorted(run.rows, key=lambda row: (row.k_len, -(row.median_s or 0.0)))))
    assert Page(as_page(slowest_first)).rows == [header, *rows]
    assert header[:6] == ["tokens", "backend", "median", "p25", "p75", "ratio"]
    assert [row[:2] for row in rows] == [
        [tokens, backend]
        for tokens, ran in (("8 × 8", "explicit"), ("4 × 16", "explicit"), ("64", "explicit"))
        for backend in ("sdpa → flash", ran, "cudnn")
    ]
    assert rows[0][2:7] == ["1.13 ms", "1.06 ms", "1.19 ms", "1.00", "1.00–1.00"]
    assert rows[1][5:7] == ["4.00", "3.50–4.25"]
    assert rows[2][2:] == ["unsupported: there is no such kernel"]
    assert rows[7][2:] == ["out-of-memory: it <b>is</b> too much"]
    assert {len(row) for row in rows if len(row) > 3} == {len(header)}


def test_a_page_has_a_table_for_each_family_under_its_name() -> None:
    sizes = [*works(), *works(causal=True)]
    text = as_page(run_of(*sizes))
    names = [sizes[0].family, sizes[-1].family]
    assert re.findall(r"<h2>(.*?)</h2>", text) == names
    assert len(Page(text).rows) == 2 + 3 * len(sizes)


# ---------------------------------------------------------------------------------------------------- texts from outside


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    """A run that somebody else wrote, read from its file."""
    made = run_of(*works(), environment={name: HOSTILE for name in ("mha", "torch", "device_name", "driver")})
    document = json.loads(made.to_json()) | {"command": ["mha", "bench", HOSTILE]}
    for row in document["rows"]:
        if row["reason"]:
            row["reason"] = HOSTILE
    path: Path = tmp_path_factory.mktemp("hostile") / "b.json"
    path.write_text(json.dumps(document))
    return read_benchmark(str(path))


def test_a_hostile_command_or_device_is_text_in_the_picture(hostile: Benchmark) -> None:
    picture = svg(hostile)
    require_nothing_runs(picture)
    assert not obeyed_or_hidden(picture)
    assert "<script>alert" in about(hostile)
    (described,) = [n for n in ElementTree.fromstring(picture).iter() if n.tag.endswith("}description")]
    assert "".join(described.itertext()) == about(hostile)


def test_a_hostile_text_is_text_in_the_page(hostile: Benchmark) -> None:
    text = as_page(hostile)
    require_harmless(text)
    assert not obeyed_or_hidden(text)
    assert not EVENTS.search(re.sub(r"<[^>]*>", "", text))
    parsed = Page(text)
    assert about(hostile) in parsed.text
    reasons = [row[-1] for row in parsed.rows if len(row) == 3]
    assert len(reasons) == 4
    assert all("<script>alert" in reason and "\\x1b[2J\\u202e" in reason for reason in reasons)


def test_dollar_signs_of_a_command_are_no_formula() -> None:
    run = run_of(*works(), command=("mha", "bench", "--svg", r"$\frac{1}{0}$ $x_"))
    assert about(run).split(" · ")[0] in " ".join(texts(svg(run)))


def test_numbers_at_the_ends_of_what_a_file_may_hold_are_drawn() -> None:
    rows = [made_row("sdpa", [time], workload=work) for time, work in zip((1e-12, 1e12, 1.0), works(), strict=True)]
    assert math.isfinite(rows[0].tflops or math.nan)
    assert texts(svg(made_benchmark(*rows))).count("sdpa") == 1
