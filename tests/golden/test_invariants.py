"""What holds for every command of the corpus: width, colours, and one number in the text, JSON, CSV, pages and pictures."""

from __future__ import annotations

import csv
import functools
import io
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints, golden
from support.mha import run

SGR = re.compile(r"\x1b\[[0-9;]*m")
REAL = {command.section for command in golden.commands() if command.is_real}
SECTIONS = [
    pytest.param(name, marks=[pytest.mark.real] if name in REAL else [])
    for name in dict.fromkeys(command.section for command in golden.commands())
]


def width(line: str) -> int:
    """The columns that a line takes on a screen."""
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in line
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_no_line_is_wider_than_the_screen(section: str) -> None:
    for command in golden.commands():
        if command.section == section and not {"--json", "--csv"} & {*command.words}:
            text = SGR.sub("", golden.printed(section)[command.line].stdout)
            assert [line for line in text.split("\n") if width(line) > command.columns] == [], command.line


def test_what_is_suggested_is_no_wider_than_a_narrow_terminal(tmp_path: Path) -> None:
    words = ("run", "one two three four", "--heads", "2", "--d-model", "8", "--view", "none")
    ended = run(tmp_path, *words, terminal=(50, 24), env={"COLUMNS": None, "TERM": "dumb"})
    assert [line for line in ended.stdout.split("\n") if width(line) > 50] == []


@pytest.mark.parametrize("section", SECTIONS)
def test_only_what_is_coloured_has_codes_and_these_end_with_their_line(section: str) -> None:
    for command in golden.commands():
        if command.section == section:
            one = golden.printed(section)[command.line]
            assert ("\x1b" in one.stdout) == command.may_colour, command.line
            assert "\x1b" not in SGR.sub("", one.stdout + one.stderr)
            for line in one.stdout.split("\n") if command.may_colour else ():
                assert not (codes := SGR.findall(line)) or codes[-1] == "\x1b[0m", line


@pytest.mark.parametrize("section", SECTIONS)
def test_pages_and_pictures_need_no_network(section: str) -> None:
    for command in golden.commands():
        if command.section == section:
            for name, content in golden.printed(section)[command.line].files.items():
                assert not re.search(r"(?:src|href)=\"(?!data:|#)|url\(\s*['\"]?https?:|@import", content), name


# -------------------------------------------------------------------------------------------------------- one number everywhere


def forms(kind: str, folder: Path) -> dict[str, Any]:
    """The same record as text, JSON and CSV, as a page and as a picture: of a layer of mha, or of a layer of a checkpoint."""
    words = ["--heads", "3", "--d-model", "12", "--causal"]
    if kind == "checkpoint":
        (folder / "gpt2").symlink_to(checkpoints.folder("gpt2"))
        words = ["--model", "gpt2", "--layer", "1"]
    picture = ["--html", "r.html", "--svg", "r.svg", "--head", "1", "--figure", "grid"]
    run(folder, "run", "the cat sat on it", *words, "--view", "none", "--save", "r.safetensors")
    run(folder, "show", "r.safetensors", "--view", "none", *picture)
    show = functools.partial(run, folder, "show", "r.safetensors")
    document = show("--json").json
    layer = document["layers"][0] if document.get("layers") else document
    return {
        "tokens": document["sequences"][0]["tokens"],
        "pattern": np.array([[[cell or 0 for cell in row] for row in head] for head in layer["pattern"][0]]),
        "heads": document["heads"],
        "text": show("--head", "1", "--view", "matrix", "--precision", "4", "--all", env={"COLUMNS": "180"}).stdout,
        "csv": list(csv.DictReader(io.StringIO(show("--csv").stdout))),
        "page": golden.Page((folder / "r.html").read_text()).text,
        "svg": golden.texts_of_picture((folder / "r.svg").read_text()),
    }


@pytest.fixture(scope="module", params=["layer", "checkpoint"])
def record(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return forms(request.param, tmp_path_factory.mktemp("forms"))


def test_the_weights_of_the_text_are_those_of_the_json(record: dict[str, Any]) -> None:
    n = len(record["tokens"])
    _, _, table = record["text"].partition("\nquery ")
    for query, line in enumerate(table.split("\n")[1 : n + 1]):
        printed = [float(cell.rstrip("*")) for cell in re.findall(r"(?<=\s)(?:\d?\.\d{3,4}|0)(?:\*|(?=\s|$))", line)][
            :n
        ]
        np.testing.assert_allclose(printed, record["pattern"][1, query], rtol=0, atol=0.5001e-4)


def test_the_weights_of_the_csv_are_those_of_the_json(record: dict[str, Any]) -> None:
    n = len(record["tokens"])
    rows = {(int(r["head"]), int(r["query"]), int(r["key"])): r for r in record["csv"]}
    assert len(rows) == len(record["csv"]) == len(record["pattern"]) * n * n
    for (head, query, key), row in rows.items():
        assert float(row["pattern"]) == pytest.approx(record["pattern"][head, query, key], rel=1e-6, abs=1e-9)
        assert (row["query_token"], row["key_token"]) == (record["tokens"][query], record["tokens"][key])


def test_the_weights_of_the_picture_are_those_of_the_json(record: dict[str, Any]) -> None:
    cells = [re.fullmatch(r"rect (#\w+) .+ → .+: (\S+)", line) for line in record["svg"]]
    colours = [(cell[1], float(cell[2])) for cell in cells if cell and cell[2] != "masked"]
    lower = np.tril_indices(len(record["tokens"]))
    np.testing.assert_allclose([weight for _, weight in colours], record["pattern"][1][lower], rtol=1e-5, atol=1e-7)
    by_weight = sorted(colours, key=lambda cell: cell[1])
    green = [int(colour[3:5], 16) for colour, _ in by_weight]
    assert green == sorted(green), "viridis grows greener"


@pytest.mark.parametrize(("field", "heading", "decimals"), [("entropy", "H", 2), ("effective_keys", "eff.keys", 2),
                                                            ("distance", "|i−j|", 2), ("previous", "prev", 2)])  # fmt: skip
def test_the_statistics_of_the_text_and_the_page_are_those_of_the_json(
    record: dict[str, Any], field: str, heading: str, decimals: int
) -> None:
    *_, of_text = (line for line in record["text"].split("\n") if heading in line and re.search(r"head +type", line))
    row = next(line for line in record["text"].split("\n") if re.match(r" +1 \S+ \w+ ", line))
    end = re.search(rf"(?<= ){re.escape(heading)}(?= )", of_text).end()
    titles, cells = (
        next(line for line in record["page"].split("\n") if re.match(begin, line)).split(" | ")
        for begin in (r"(?:layer \| )?head \| type", r"(?:1 \| )?1 \| \S")
    )
    for cell in (row[:end].split()[-1], cells[titles.index(heading)]):
        assert float(cell) == pytest.approx(record["heads"][1][field], abs=0.501 * 10**-decimals), (heading, cell)
