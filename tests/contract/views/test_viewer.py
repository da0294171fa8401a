"""`mha view` on a real terminal: what the keys and the mouse do, and that every number on the
screen is the record's.
"""

from __future__ import annotations

import base64
import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import checkpoints
from support.records import EXAMPLE, SHOWN, document, pattern, saved, scanned, short, tokens
from support.terminal import COPIED, Session, Terminal, viewing

pytest.importorskip("textual")
WIDE = (110, 40)
"""A screen on which every cell of thirteen tokens has a number."""
COLOUR_CODES = rb"\x1b\[(?:[0-9;]*;)?[34][0-8](?:;[0-9;]+)?m"


def require_weight(screen: Terminal, weights: np.ndarray) -> None:
    """The weight below the matrix is that of the record for the cell that is named."""
    cell = screen.cell()
    assert cell.weight == pytest.approx(weights[cell.place], rel=6e-6)


def require_clean(session: Session, code: int = 0) -> None:
    """The program ended with this code, and gave the terminal back."""
    assert (session.code, session.is_restored) == (code, True)
    assert b"Traceback" not in session.written
    assert session.written.count(b"\x1b[?1049h") == session.written.count(b"\x1b[?1049l") == 1


def rows_of(screen: Terminal, n: int, width: int) -> list[list[str]]:
    """The cells of the matrix: what stands in each row of `n` cells behind the token."""
    text = "\n".join(line[:width] for line in screen.lines)
    parsed = re.findall(r"^\d+ [^ ]+ +([▸ ].*)$", text, re.MULTILINE)
    rows = [re.findall(r"\d?\.\d+|\b0\b|–|\?", row) for row in parsed]
    return [row for row in rows if len(row) == n]


def copied(screen: Terminal, times: int = 1) -> dict[str, Any]:
    """The row that was copied last."""
    return dict(json.loads(base64.b64decode(screen.until_written(COPIED, times)[-1])))


# ----------------------------------------------------------------------------------------- one head


@pytest.mark.real
def test_the_cursor_moves_over_the_cells_and_each_has_the_weight_of_the_record(
    tmp_path: Path,
) -> None:
    weights = pattern("sinks")[0, 0]
    steps = [
        (("ctrl+home", "home"), (0, 0)),
        (("down", "down"), (2, 0)),
        (("right",), (2, 1)),
        (("left", "left"), (2, 0)),
        (("up", "up", "up", "down"), (1, 0)),
        (("end",), (1, 1)),
        (("ctrl+end",), (12, 1)),
        (("end",), (12, 12)),
        (("right", "down", "left"), (12, 11)),
        (("pageup",), (0, 11)),
        (("shift+pageup",), (0, 0)),
        (("pagedown", "shift+pagedown"), (12, 12)),
    ]
    with viewing(tmp_path, saved("sinks"), "--head", "0", size=WIDE) as screen:
        begin = screen.cell()
        assert begin.place == (12, int(weights[12].argmax())), (
            "the last query and its strongest key"
        )
        for keys, place in steps:
            screen.press(*keys)
            cell = screen.until_at(*place)
            assert (cell.query_token, cell.key_token) == (
                tokens("sinks")[place[0]],
                tokens("sinks")[place[1]],
            )
            if place[1] > place[0]:
                assert cell.weight == "masked"
            else:
                require_weight(screen, weights)
        screen.press("q", "q")
        require_clean(screen.end())


def test_the_matrix_has_the_pattern_and_the_list_the_strongest_keys_of_the_row(
    tmp_path: Path,
) -> None:
    weights = pattern("sinks")[0, 0]
    with viewing(tmp_path, saved("sinks"), "--head", "0", size=(180, 40)) as screen:
        screen.until("row sum 1.0000")
        (entropy,) = screen.until(r"entropy ([\d.]+) nats").groups()
        assert float(entropy) == pytest.approx(-(weights[12] * np.log(weights[12])).sum(), rel=1e-3)
        printed = [
            [short(weight) if key <= query else "0" for key, weight in enumerate(row)]
            for query, row in enumerate(weights)
        ]
        screen.until_holds(lambda: rows_of(screen, 13, 100) == printed, "the whole pattern")
        screen.press("+")
        screen.until(rf"\[ ?{re.escape(short(weights[12].max(), 4))}\]")
        screen.press("0", "T", "T")
        (rest,) = screen.until(r"8 more get (\.\d+)").groups()
        order = np.argsort(-weights[12])
        assert float(rest) == pytest.approx(weights[12][order[5:]].sum(), abs=6e-6)
        listed = re.findall(r" (\d+) (\w+) +(\.\d{5})", "\n".join(screen.lines))[:5]
        assert [(int(place), token) for place, token, _ in listed] == [
            (key, tokens("sinks")[key]) for key in order[:5]
        ]
        assert [float(weight) for *_, weight in listed] == pytest.approx(
            weights[12][order[:5]], abs=6e-6
        )
        screen.press("t")
        screen.until("top 8 of 13 keys")


@pytest.mark.real
def test_a_focus_moves_the_arrows_to_the_list_and_the_texts(tmp_path: Path) -> None:
    weights = pattern("sinks")[0, 0]
    order = [int(key) for key in np.argsort(-weights[12])]
    with viewing(tmp_path, saved("sinks"), "--head", "0") as screen:
        screen.cell()
        screen.press("tab", "down", "down")
        screen.until_at(12, order[2])
        screen.press("tab", "left")
        screen.until_at(12, order[2] - 1)
        screen.press("tab", "left", "left")
        screen.until_at(10, order[2] - 1)
        screen.press("shift+tab", "right")
        screen.until_at(10, order[2])
        require_weight(screen, weights)


def find(screen: Terminal, typed: str, *, axis: str = "query") -> None:
    """Types a search, and waits until its line has closed."""
    screen.press("/")
    begun = screen.until("to a (query|key): ")[1]
    screen.press(*["tab"] * (begun != axis), typed)
    screen.until(f"to a {axis}: {typed} ")
    screen.press("enter")
    screen.until(r"\A(?![^§]*to a (query|key): )")


@pytest.mark.real
def test_a_search_jumps_to_tokens_and_places(tmp_path: Path) -> None:
    names = tokens("sinks")
    assert [place for place, token in enumerate(names) if "the" in token] == [0, 7, 8]
    with viewing(tmp_path, saved("sinks"), "--head", "0", size=WIDE) as screen:
        screen.press("home")
        screen.until_at(12, 0)
        find(screen, "the")
        for key, place in (("", 0), ("n", 7), ("n", 8), ("n", 0), ("N", 8)):
            screen.press(key)
            screen.until_at(place, 0)
        find(screen, "5")
        screen.until_at(5, 0)
        find(screen, "dog", axis="key")
        screen.until_at(5, 9)
        screen.press("/", "tab", "qs", "backspace", "backspace", "ra")
        screen.until_at(10, 9)
        screen.press("escape")
        screen.until_at(5, 9)
        find(screen, "zzz")
        screen.until("zzz")
        screen.until_at(5, 9)
        require_clean_quit(screen)


def require_clean_quit(screen: Terminal, code: int = 0) -> None:
    screen.press("Q")
    require_clean(screen.end(), code)


@pytest.mark.real
def test_cells_grow_and_shrink_and_small_ones_are_means_of_blocks(tmp_path: Path) -> None:
    weights = pattern("long")[0, 0]
    block = r"(\d+) × \d+ tokens a cell, here (\d?\.\d+)"
    with viewing(tmp_path, saved("long"), "--head", "0", NO_COLOR="1") as screen:
        factor, mean = screen.until(block).groups()
        row, column = (place // int(factor) * int(factor) for place in screen.cell().place)
        mean_of_block = (
            weights[row : row + int(factor), column : column + int(factor)].sum(axis=1).mean()
        )
        assert int(factor) > 1
        assert float(mean) == pytest.approx(mean_of_block, abs=6e-5)
        screen.press("-", "+")
        screen.until(rf"(?!{factor} ×)" + block)
        screen.press(*"+" * 9)
        find(screen, "41")
        find(screen, "23", axis="key")
        screen.until_at(41, 23)
        screen.until(rf"\[.?{re.escape(short(weights[41, 23], 4))}[\] ]")
        require_weight(screen, weights)
        screen.press("0")
        screen.until(rf"{factor} × {factor} tokens a cell")


@pytest.mark.real
def test_the_scale_changes_with_a_key_and_begins_as_it_is_given(tmp_path: Path) -> None:
    weights = pattern("plain")  # all heads share a scale
    with viewing(tmp_path, saved("plain"), "--head", "0", "--map-scale", "log") as screen:
        screen.until(rf"scale log, ≤ \S+ … {weights.max():.4g}")
        while (scale := screen.until(r"^scale (\w+)")[1]) != "linear":
            screen.press("s")
            screen.until(rf"^scale (?!{scale})\w+")
        screen.until(rf"scale linear, 0 … {weights.max():.4g}")


# --------------------------------------------------------------------------------- sinks and copies


@pytest.mark.real
def test_sinks_are_taken_out_and_put_back_and_a_copied_row_says_which(tmp_path: Path) -> None:
    weights = pattern("sinks")[0, 2]
    assert [sink["key"] for sink in document("sinks")["heads"][2]["sinks"]] == [2, 4]
    left = 1 - weights[12, 2] - weights[12, 4]
    with viewing(tmp_path, saved("sinks"), "--head", "2", "--hide-sinks", size=WIDE) as screen:
        find(screen, "7", axis="key")
        assert screen.until_at(12, 7).weight == pytest.approx(weights[12, 7] / left, rel=1e-4)
        screen.press("y")
        row = copied(screen)
        assert row["sinks"] == {
            "places": [2, 4],
            "share": pytest.approx(1 - left, rel=1e-4),
            "removed": True,
        }
        assert [key["place"] for key in row["keys"]] == [
            key for key in range(13) if key not in (2, 4)
        ]
        expected = np.delete(weights[12], [2, 4]) / left
        assert [key["share"] for key in row["keys"]] == pytest.approx(expected, rel=1e-4)
        find(screen, "4", axis="key")
        assert screen.until_at(12, 4).weight == "taken out"
        screen.press("x")
        screen.until(r"weight \S+ \(0")
        require_weight(screen, weights)
        screen.press("y")
        row = copied(screen, 2)
        assert (row["schema"], row["head"], row["sequence"]) == ("mha.row/1", 2, 0)
        assert row["query"] == {"place": 12, "token": "home"}
        assert [key["token"] for key in row["keys"]] == tokens("sinks")
        assert [np.float32(key["share"]) for key in row["keys"]] == [
            np.float32(weight) for weight in weights[12]
        ]
        screen.press("x")
        screen.until("weight taken out")


def test_without_sinks_nothing_is_taken_out(tmp_path: Path) -> None:
    with viewing(tmp_path, saved("plain"), "--head", "1") as screen:
        before = screen.cell()
        screen.press("x")
        screen.until(r"^no .*sink")
        assert screen.cell() == before
        screen.press("e")
        screen.until("no effects")


# ------------------------------------------------------------------------- heads, layers, sequences


@pytest.mark.real
def test_heads_and_layers_are_walked_and_each_shows_its_pattern(tmp_path: Path) -> None:
    steps = [
        ("h", (1, 3)),
        ("]", (1, 4)),
        ("H", (1, 3)),
        ("[", (1, 2)),
        ("l", (2, 2)),
        ("l", (2, 2)),
        ("L", (1, 2)),
        ("{", (0, 2)),
        ("L", (0, 2)),
        ("}", (1, 2)),
        ("hhhh", (2, 0)),
        ("HHHHHHH", (0, 5)),
    ]
    with viewing(tmp_path, saved("gpt2"), size=(120, 40)) as screen:
        screen.until("18 heads|Enter")
        screen.press("down", "right", "right", "enter")
        screen.until(r"^layer 1 · head 2\b")
        for keys, (layer, head) in steps:
            screen.press(keys)
            screen.until(rf"^layer {layer} · head {head}\b")
            weights = pattern("gpt2", layer)[0, head]
            screen.until(re.escape(f"({weights[screen.cell().place]:.6g})"))
        screen.press("q")
        screen.until("Enter")
        screen.press("pagedown", "enter")
        screen.until(r"^layer 2 · head 5\b")
        require_clean_quit(screen)


@pytest.mark.real
def test_the_keys_of_heads_and_layers_walk_over_the_overview(tmp_path: Path) -> None:
    with viewing(tmp_path, saved("gpt2"), size=(120, 40)) as screen:
        screen.until("18 heads|Enter")
        for keys, place in (("l", (1, 0)), ("h", (1, 1)), ("}", (2, 1)), ("]L", (1, 2))):
            screen.press(*keys)
            screen.until(rf"layer {place[0]} · head {place[1]} · numbers")
        screen.press("enter")
        screen.until(r"^layer 1 · head 2\b")
        require_clean_quit(screen)


@pytest.mark.real
def test_the_overview_has_a_number_in_each_cell_and_moves_from_head_to_head(tmp_path: Path) -> None:
    weights = pattern("plain")[0]
    with viewing(tmp_path, saved("plain"), size=(170, 40)) as screen:
        for query in range(7):
            screen.until(
                " +".join(re.escape(short(weight)) for head in weights for weight in head[query])
            )
        heads = document("plain")["heads"]
        for head, key in ((0, "right"), (1, "right"), (2, "left")):
            entropy, uniform = (
                f"{held['entropy']:.2f}" for held in (heads[head], heads[head]["uniform"])
            )
            screen.until(rf"head {head} .*[^§]*entropy +{entropy} nats.*{uniform}")
            screen.press(key)
        screen.press("enter")
        screen.until(r"^head 1\b")


@pytest.mark.real
def test_each_sequence_has_its_tokens_and_its_weights_whatever_the_padding(tmp_path: Path) -> None:
    weights = pattern("pair")[1, 1, 4:, 4:]
    with viewing(tmp_path, saved("pair"), "--head", "1", "--sequence", "1") as screen:
        assert screen.cell().query_token == "ran"
        screen.press("home", "right")
        assert screen.until_at(2, 1).key_token == "dog"
        require_weight(screen, weights)
        screen.press(".", "ctrl+end", "home")
        screen.until_at(6, 0)
        require_weight(screen, pattern("pair")[0, 1])
        screen.press(",")
        screen.until_at(2, 0)
        require_weight(screen, weights)


def test_keys_of_another_text_have_its_tokens(tmp_path: Path) -> None:
    with viewing(tmp_path, saved("cross"), "--head", "1") as screen:
        screen.press("home", "right")
        assert screen.until_at(1, 1).key_token == "w"
        require_weight(screen, pattern("cross")[0, 1])
        screen.press("end")
        assert screen.until_at(1, 4).key_token == "z"


@pytest.mark.real
def test_a_scan_of_a_corpus_is_explored(mha: Any, tmp_path: Path) -> None:
    shown = mha("run", EXAMPLE, "--model", checkpoints.folder("gpt2"), "--json").json["layers"][1]
    with viewing(
        tmp_path, scanned() / "summary.safetensors", "--layer", "1", "--head", "3"
    ) as screen:
        screen.until(r"^layer 1 · head 3\b")
        require_weight(screen, np.array(shown["pattern"])[0, 3])


# ------------------------------------------------------------------------------------------ effects


@pytest.mark.real
def test_effects_of_heads_are_chosen_and_have_the_numbers_of_the_record(tmp_path: Path) -> None:
    held = {(effect["layer"], effect["head"]): effect for effect in document("effects")["effects"]}
    order = sorted(held, key=lambda place: -abs(held[place]["d_logit"]))
    by_keys = [((), order[0]), (("end",), order[-1]), (("home",), order[0])]

    def require_effect(screen: Terminal, place: tuple[int, int]) -> None:
        screen.until(
            rf"^─ {place[0]}\.{place[1]} [^§]*Δlogit {held[place]['d_logit']:+.4f}".replace(
                "+", r"\+"
            )
        )

    with viewing(tmp_path, saved("effects")) as screen:
        screen.until("e effects")
        screen.press("e")
        for keys, place in by_keys:
            screen.press(*keys)
            require_effect(screen, place)
        grid = [
            re.findall(r"-?\d?\.\d\d", line)
            for line in screen.lines
            if re.match(r" +\d  .*\.\d\d", line)
        ]
        expected = [[held[layer, head]["d_logit"] for head in range(6)] for layer in range(3)]
        assert np.array(grid, float) == pytest.approx(np.array(expected), abs=0.0051)
        row = screen.row_of(r"^ +2  ")
        screen.click(screen.lines[row].index(grid[2][4]) + 1, row)
        require_effect(screen, (2, 4))
        screen.press("right", "up")
        require_effect(screen, (1, 5))
        screen.press("enter")
        screen.until(r"^layer 1 · head 5\b")
        require_weight(screen, pattern("gpt2", 1)[0, 5])
        screen.press("q", "q", "q")
        require_clean(screen.end())


def test_effects_of_weights_stand_on_the_tokens(tmp_path: Path) -> None:
    held = {effect["key"]: effect["d_logit"] for effect in document("edges")["effects"]}
    with viewing(tmp_path, saved("edges")) as screen:
        screen.until("e effects")
        screen.press("e")
        row = screen.row_of(r"^ +0\.1  ")
        screen.click(screen.lines[row].index("sa"), row)
        screen.until(rf"→ 5 .*\nΔlogit {held[5]:+.4f}".replace("+", r"\+"))
        screen.press("left")
        screen.until(rf"→ 4 .*\nΔlogit {held[4]:+.4f}".replace("+", r"\+"))


# ------------------------------------------------------------------------------ texts of the viewer


@pytest.mark.real
def test_the_walkthrough_the_origin_and_the_help_open_scroll_and_close(tmp_path: Path) -> None:
    sites = [step["site"] for step in document("plain")["trace"]]
    with viewing(tmp_path, saved("plain"), size=(80, 30)) as screen:
        screen.until("Enter")
        screen.press("w")
        screen.until(rf"^ 1 {sites[0]}\b")
        screen.press("end")
        screen.until(rf"^ ?{len(sites)} {sites[-1]}\b")
        screen.press("home", "pagedown", "up", "down", "G", "g")
        screen.until(rf"^ 1 {sites[0]}\b")
        screen.press("q")
        screen.until("Enter")
        screen.press("i")
        screen.until("seed")
        screen.until(f"torch {re.escape(document('plain')['environment']['torch'])}")
        screen.press("escape")
        screen.until("Enter")
        screen.press("?")
        screen.until("PgUp PgDn")
        screen.press("end", "q")
        screen.until("Enter")
        require_clean_quit(screen)


@pytest.mark.real
def test_a_record_without_its_pattern_says_how_to_keep_it(tmp_path: Path) -> None:
    with viewing(tmp_path, saved("bare")) as screen:
        screen.until("Enter")
        screen.press("enter")
        screen.until("--keep pattern")
        screen.press("q")
        require_clean(screen.end())


# ---------------------------------------------------------------------------------- special numbers


def test_what_is_no_number_is_marked_and_null_and_a_row_without_keys_says_so(
    tmp_path: Path,
) -> None:
    with viewing(tmp_path, saved("nan"), "--head", "0") as screen:
        screen.press("up", "up", "home")
        screen.until(r"query 4 .*weight nan")
        screen.press("y")
        assert [key["share"] for key in copied(screen)["keys"]] == [None] * 7
        screen.press("h", "up", "up")
        screen.until(r"query 2 .*weight masked")
        screen.press("y")
        assert copied(screen, 2)["keys"] == []


@pytest.mark.real
def test_a_learned_sink_takes_its_part_of_the_row(tmp_path: Path) -> None:
    totals = np.stack([pattern("gpt_oss", layer)[0, :, -1].sum(-1) for layer in range(3)])
    layer, head = np.unravel_index(totals.argmin(), totals.shape)
    with viewing(
        tmp_path, saved("gpt_oss"), "--layer", str(layer), "--head", str(head), size=WIDE
    ) as screen:
        sink, total = map(float, screen.until(r"sink logit (\S+)  row sum (\S+)").groups())
        assert total == pytest.approx(totals.min(), abs=6e-5)
        assert sink == pytest.approx(1 - totals.min(), abs=2e-4)
        assert total < 0.99


def test_a_record_of_blocks_shows_and_copies_blocks(tmp_path: Path) -> None:
    survey = document("blocks")["survey"]
    block = survey["block"]
    with viewing(tmp_path, saved("blocks"), "--head", "0") as screen:
        screen.press("ctrl+end", "home")
        screen.until(rf"query \d+–699 .*key 0–{block - 1} ")
        screen.press("y")
        row = copied(screen)
        assert row["query"] == {"first": 699 // block * block, "last": 699}
        assert sum(key["share"] for key in row["keys"]) == pytest.approx(1, abs=1e-4)


@pytest.mark.real
def test_hostile_tokens_are_shown_as_escapes(tmp_path: Path) -> None:
    with viewing(tmp_path, saved("hostile"), "--head", "0", size=(140, 40), NO_COLOR="1") as screen:
        screen.press("ctrl+home")
        for place, token in enumerate(tokens("hostile")):
            cell = screen.until_at(place, screen.cell().key)
            named = SHOWN.get(token, token)
            assert (
                cell.query_token.rstrip("…").replace(" ", "")
                == named[: len(cell.query_token.rstrip("…"))]
            )
            screen.press("down")
        screen.press("ctrl+home", "Q")
        written = screen.end().written
    assert not re.search("[\u202e\u200b]", written.decode())
    assert b"\x1b[31m" not in written


# ---------------------------------------------------------------------------------- mouse and sizes


@pytest.mark.real
def test_clicks_choose_heads_cells_tokens_and_keys_and_the_wheel_moves(tmp_path: Path) -> None:
    weights = pattern("plain")[0, 1]
    with viewing(tmp_path, saved("plain"), size=(170, 40)) as screen:
        screen.until("2 heads|3 heads")
        column = re.search(r" 1 \S+ \w", screen.lines[2]).start()
        screen.click(column + 3, 4)
        screen.until(r"─ head 1 ")
        screen.click(column + 3, 4)
        screen.until(r"^head 1\b")
        screen.press("0")
        row = screen.row_of("^2 sat ")
        screen.click(
            next(line for line in screen.lines if line.startswith("query")).index(" on ") + 2, row
        )
        screen.until_at(2, 3)
        require_weight(screen, weights)
        listed = screen.row_of(r"top \d+ of 7 keys") + 2
        screen.click(screen.lines[listed - 1].rindex("."), listed)
        screen.until_at(2, int(np.argsort(-weights[2])[1]))
        texts = [
            number
            for number, line in enumerate(screen.lines)
            if "the cat sat" in line.replace("▸", " ")
        ]
        place = screen.lines[texts[0]].rindex("mat") + 1
        screen.click(place, texts[0])
        assert 5 in screen.until_at(2, 5).place
        screen.click(screen.lines[row].index(".") + 1, row, button=65)
        screen.until_at(5, 5)
        screen.click(screen.lines[row].index(".") + 1, row, button=64)
        screen.until_at(2, 5)


@pytest.mark.real
def test_the_cursor_stays_on_its_tokens_while_the_terminal_changes_its_size(tmp_path: Path) -> None:
    weights = pattern("sinks")[0, 1]
    with viewing(tmp_path, saved("sinks"), "--head", "0") as screen:
        screen.press("up", "up", "home", "right", "h")
        screen.until(r"^head 1\b")
        for size in ((170, 50), (60, 20), (40, 10)):
            screen.resize(*size)
            screen.until(r"query 10 ran *▸?|^10 ran")
            assert screen.until_at(10, 1).weight == pytest.approx(weights[10, 1], rel=1e-2)


@pytest.mark.real
@pytest.mark.parametrize("size", [(24, 6), pytest.param((250, 70), marks=pytest.mark.real)])
def test_any_size_shows_the_heads_and_the_row_of_the_cursor(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    with viewing(tmp_path, saved("plain"), size=size, NO_COLOR="1") as screen:
        screen.until(r"0.*1.*2")
        screen.press("enter")
        screen.until(r"^6(–6| and) *▸ ?[^ ]")
        screen.press("up")
        screen.until(r"query (?!6)\d .* key 5 mat")
        require_clean_quit(screen)


# -------------------------------------------------------------------------- colours, beginning, end


@pytest.mark.real
@pytest.mark.parametrize(
    ("words", "env", "has_colours"),
    [
        ((), {}, True),
        ((), {"NO_COLOR": "1"}, False),
        pytest.param(("--color", "never"), {}, False, marks=pytest.mark.real),
        pytest.param((), {"TERM": "vt100", "COLORTERM": None}, False, marks=pytest.mark.real),
    ],
    ids=["colours", "NO_COLOR", "--color never", "vt100"],
)
def test_without_colours_no_code_of_a_colour_is_written(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], has_colours: bool
) -> None:
    with viewing(tmp_path, saved("sinks"), "--head", "1", *words, **env) as screen:
        screen.until("row sum 1.0000")
        screen.press("-")
        screen.press("Q")
        session = screen.end()
    require_clean(session)
    assert bool(re.search(rb"[34]8;[25];", session.written)) is has_colours
    assert bool(re.search(COLOUR_CODES, session.written)) is has_colours or "TERM" in env


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (0, 0),
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.real),
    ],
    ids=["Ctrl-C", "SIGINT", "SIGTERM"],
)
def test_the_terminal_is_given_back_however_the_viewer_ends(
    tmp_path: Path, number: int, code: int
) -> None:
    with viewing(tmp_path, saved("plain"), "--head", "0") as screen:
        screen.until("row sum")
        screen.signal(number) if number else screen.press("ctrl+c")
        require_clean(screen.end(), code)


def test_a_terminal_that_goes_away_ends_the_viewer(tmp_path: Path) -> None:
    with viewing(tmp_path, saved("plain")) as screen:
        screen.until("Enter")
        screen.close()
        screen.process.join(120)
        assert screen.process.exitcode == 129


@pytest.mark.real
def test_bytes_that_are_no_text_end_the_viewer(tmp_path: Path) -> None:
    with viewing(tmp_path, saved("plain")) as screen:
        screen.until("Enter")
        screen.send(bytes(range(128, 256)) + b"\xf0\x9f\x98")
        require_clean(screen.end(), 1)


@pytest.mark.real
def test_keys_that_arrive_in_one_piece_act_in_their_order(tmp_path: Path) -> None:
    with viewing(tmp_path, saved("plain")) as screen:
        screen.until("Enter")
        screen.press("\x1b[C\r\x1b[A")
        screen.until(r"^head \d\b")
        screen.until(r"query 5 mat")
        require_clean_quit(screen)


@pytest.mark.parametrize(
    ("words", "env", "code", "says"),
    [
        (("--heads", "3"), {}, 2, "--heads"),
        (("--head", "7"), {}, 2, "7"),
        ((), {"TERM": "dumb"}, 1, "dumb"),
        pytest.param(("--layer", "3"), {}, 2, "3", marks=pytest.mark.real),
        pytest.param(("--sequence", "2"), {}, 2, "2", marks=pytest.mark.real),
        pytest.param(("a text",), {}, 2, "record", marks=pytest.mark.real),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_refused_before_the_screen_is_taken(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], code: int, says: str
) -> None:
    require_refusal(tmp_path, (saved("plain"), *words), env, code, says)


@pytest.mark.parametrize(("name", "code"), [("weights.safetensors", 1), ("poem.txt", 2), (".", 2)])
def test_files_that_are_no_records_are_refused(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "poem.txt").write_text("the cat sat\n")
    require_refusal(tmp_path, (name,), {}, code, name)


def require_refusal(
    folder: Path, words: tuple[str | Path, ...], env: dict[str, str], code: int, says: str
) -> None:
    with viewing(folder, *words, **env) as screen:
        session = screen.end()
    assert session.code == code
    assert says in session.written.decode()
    assert b"\x1b[?1049h" not in session.written


@pytest.mark.real
def test_a_text_and_a_checkpoint_are_computed_explored_and_saved(tmp_path: Path) -> None:
    words = ("the cat sat on", "--heads", "2", "--head", "1", "--save", "cat.safetensors")
    with viewing(tmp_path, *words) as screen:
        screen.until(r"^head 1\b")
        screen.until("row sum 1.0000")
        require_clean_quit(screen)
    assert (tmp_path / "cat.safetensors").is_file()
    pair = ("the cat", "--model", checkpoints.folder("t5"), "--context", "on the mat")
    with viewing(tmp_path, *pair, "--head", "3") as screen:
        screen.until(r"\bhead 3\b")
        require_clean_quit(screen)
