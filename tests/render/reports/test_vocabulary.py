import re

import pytest
from support.records import drawn

from mhacli.render.base.options import Screen
from mhacli.render.reports.weights import vocabulary_table
from mhacli.text.vocabulary import Entry


def entries(count):
    return [Entry(f"w{i}", i, 1000 * (i + 1), 2) for i in range(count)]


def lines_of(rows, width=80, *, n_distinct=None, n_tokens=None, everything=False):
    n_tokens = sum(row.count for row in rows) if n_tokens is None else n_tokens
    table = vocabulary_table(
        rows, len(rows) if n_distinct is None else n_distinct, n_tokens, everything=everything, on=Screen(width, False)
    )
    return drawn(table, width)


def test_a_small_vocabulary_is_shown_whole():
    rows = [Entry("cat", 0, 1, 3), Entry("é ", 1, 1234567, 3)]
    assert [line.split() for line in lines_of(rows)] == [
        ["1234568", "tokens,", "2", "distinct"],
        ["id", "token", "count", "bytes"],
        ["0", "cat", "1", "3"],
        ["1", "é␣", "1,234,567", "3"],
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_middle_of_a_long_one_is_counted(width):
    caption, _, *rows = lines_of(entries(1000), width)
    gap = next(i for i, line in enumerate(rows) if "⋮" in line)
    assert rows[gap].split()[:3] == ["⋮", "976", "more"]
    assert [int(line.split()[0]) for line in rows[:gap] + rows[gap + 1 :]] == [*range(12), *range(988, 1000)]
    assert caption == f"{1000 * 1001 // 2 * 1000} tokens, 1000 distinct"


def test_everything_hides_nothing():
    assert len(lines_of(entries(100), everything=True)) == 102


def test_the_caption_counts_the_whole_vocabulary_where_a_part_is_shown():
    assert lines_of(entries(2), n_distinct=70, n_tokens=1, everything=True)[0] == "1 token, 70 distinct"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_numbers_stay_whole_beside_any_token(width):
    tokens = ["x" * 300, "漢字" * 40, "\x1b[2J", "\u202e", "[bold]b[/bold]", "a\u0301", "\n", " "]
    rows = [Entry(token, 10**6 + i, 10**9 + i, 10**5 + i) for i, token in enumerate(tokens)]
    lines = lines_of(rows, width)[2:]
    for i, line in enumerate(lines):
        assert re.fullmatch(rf"{10**6 + i}  \S+ +1,000,000,00{i} +10000{i}", line)
    text = "\n".join(lines)
    assert "[bold]" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
