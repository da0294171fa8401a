"""Who may see whom, as the user states it: what is right stays right, and every cell that is wrong
is named, by query, key, head and layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import user_code
from support.mha import run

import mhacli

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = Path(__file__).parent / "cases" / "sees"
MASKED = user_code.load(CASES / "masked.py")
WINDOW = "q >= k and q - k < 8"
ABOVE = [f"k + 1 == (q + 1) // {2**n}" for n in range(9)]
STATED = {
    "causal": "q >= k",
    "window": WINDOW,
    "prefix": "k < 6 or q >= k",
    "documents": "q // 16 == k // 16 and k <= q",
    "dilated": "q >= k and (q - k) % 3 == 0",
    "sinks": "k <= q and (q - k < 8 or k < 2)",
    "tree": " or ".join(ABOVE),
    "staircase": "k // 8 <= q // 8",
    "strided": "q >= k and (q - k < 4 or k % 4 == 3)",
    "block": "q // 8 == k // 8",
    "holes": "(q // 8 + k // 8) % 2 == 0",
    "own head": "q >= k and (head != 1 or q - k < 4)",
}
"""Each mask as people write it."""
WRONG = [(name, part) for name in STATED for part in MASKED.PARTS]


def rows(table: torch.Tensor, length: int) -> tuple[str, ...]:
    return tuple("".join(str(int(cell)) for cell in row[:length]) for row in table[:length])


def require_cells(seen: Any, name: str, part: str, wrong: Any = None) -> None:
    """The matrices are those of plain loops, of each head where heads differ."""
    assert seen
    length = len(seen[0].measured)
    stated, measured = (MASKED.table(name, each, length) for each in ("", part))
    for cells in seen:
        assert cells.stated == rows(stated[cells.head or 0], length)
        assert cells.measured == rows(measured[cells.head or 0], length)
    heads = [cells.head for cells in seen]
    assert heads in ([None], list(range(MASKED.N_HEADS)))
    if heads == [None]:
        assert all(torch.equal(each, each[:1].expand_as(each)) for each in (stated, measured))


def codes_of(name: str, part: str, length: int) -> set[str]:
    stated, measured = (MASKED.table(name, each, length) for each in ("", part))
    found = {"sees-unstated": measured & ~stated, "misses-stated": stated & ~measured}
    return {code for code, cells in found.items() if cells.any()}


def codes(examination: Any) -> set[str]:
    return {finding.code for finding in examination.findings}


# ------------------------------------------------------------------------------------- twelve masks


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, "") for name in STATED),
        *WRONG[:4],
        *(pytest.param(*each, marks=pytest.mark.real) for each in WRONG[4:]),
    ],
)
def test_every_wrong_cell_of_a_mask_is_named_and_no_right_one(name: str, part: str) -> None:
    table = MASKED.table(name, part, 64)

    def mask_mod(b: object, h: object, q_idx: object, kv_idx: object) -> object:
        return table[h, q_idx, kv_idx]

    examination = user_code.check(mask_mod, sees=STATED[name])
    length = len(examination.sees[0].measured)
    assert codes(examination) == codes_of(name, part, length)
    assert examination.verdict == ("wrong" if part else "right")
    require_cells(examination.sees, name, part)


@pytest.mark.parametrize(
    "name",
    [
        "window",
        *(pytest.param(name, marks=pytest.mark.real) for name in STATED if name != "window"),
    ],
)
def test_attention_is_right_under_the_mask_that_is_stated(name: str) -> None:
    examination = user_code.check(MASKED.Masked(MASKED.table(name)), sees=STATED[name])
    assert examination.verdict == "right", examination
    assert "as-stated" in [choice.name for choice in examination.choices]
    assert max(examination.compared.lengths) == 257
    require_cells(examination.sees, name, "")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("sinks", "cell"),
        *(pytest.param(*each, marks=pytest.mark.real) for each in WRONG if each[0] != "sinks"),
        *(pytest.param("sinks", part, marks=pytest.mark.real) for part in ("row", "block", "head")),
    ],
)
def test_attention_names_the_wrong_cells(name: str, part: str) -> None:
    examination = user_code.check(MASKED.Masked(MASKED.table(name, part)), sees=STATED[name])
    length = len(examination.sees[0].measured)
    assert examination.verdict == "wrong"
    assert codes_of(name, part, length) <= codes(examination)
    assert not codes(examination) - codes_of(name, part, length)
    require_cells(examination.sees, name, part)


HEADS_TOLD_APART = ("window", "tree", "own head")
"""The masks with which a wrong head is tried in a model: the others are tried in attention."""
IN_A_MODEL = [each for each in WRONG if each[1] != "head" or each[0] in HEADS_TOLD_APART]


@pytest.mark.real
@pytest.mark.parametrize(("name", "part"), [*((name, "") for name in STATED), *IN_A_MODEL])
def test_the_second_layer_of_a_model_names_its_wrong_cells(name: str, part: str) -> None:
    model = MASKED.Model(MASKED.table(name), MASKED.table(name, part))
    examination = user_code.check(model, sees=STATED[name], length=64)
    length = len(examination.sees[0].measured)
    by_layer = {n: [cells for cells in examination.sees if cells.layer == n] for n in (None, 0, 1)}
    require_cells(by_layer[0], name, "")
    require_cells(by_layer[1], name, part)
    assert codes(examination) == codes_of(name, part, length)
    assert examination.verdict == ("wrong" if part else "right")


# ------------------------------------------------------------------------------------ what is named


def test_a_finding_names_query_key_and_head() -> None:
    examination = user_code.check(
        MASKED.Masked(MASKED.table("sinks", "head")), sees=STATED["sinks"]
    )
    unstated, missing = examination.findings
    assert (unstated.code, missing.code) == ("sees-unstated", "misses-stated")
    # head 2 is turned round where the key is half the query: near the beginning it should be seen
    assert unstated.evidence.startswith("query 15 of head 2 sees key 7 (")
    assert missing.evidence.startswith("query 1 of head 2 does not see key 0 (")


def test_cells_that_are_wrong_in_several_layers_are_named_once() -> None:
    causal = MASKED.table("causal")
    (finding,) = user_code.check(MASKED.Model(causal, causal), sees=WINDOW).findings
    of_layers, _, of_all = finding.evidence.partition("; ")
    assert "layer 0 and in layer 1" in of_layers
    assert "as a whole" in of_all


@pytest.mark.real
def test_windows_in_two_layers_reach_14_back() -> None:
    window = MASKED.table("window")
    right = user_code.check(MASKED.Model(window, window), sees=WINDOW)
    assert right.verdict == "right", right
    whole = next(cells for cells in right.sees if cells.layer is None)
    reach = [row.rindex("1") - row.index("1") for row in whole.stated]
    assert reach == [min(query, 14) for query in range(len(reach))]


def test_layers_are_stated_apart() -> None:
    model = MASKED.Model(MASKED.table("window"), MASKED.table("causal"))
    stated = f"layer == 0 and {WINDOW} or layer == 1 and q >= k"
    assert user_code.check(model, sees=stated).verdict == "right"
    wrong = user_code.check(model, sees=stated.replace("layer == 1", "layer == 2"))
    assert "sees-unstated" in codes(wrong)


@pytest.mark.real
def test_a_predicate_states_what_a_text_does() -> None:
    attention = MASKED.Masked(MASKED.table("sinks"))

    def allowed(q_idx: torch.Tensor, k_idx: torch.Tensor) -> torch.Tensor:
        q, k = q_idx[:, None], k_idx
        return (k <= q) & ((q - k < 8) | (k < 2))

    assert user_code.check(attention, sees=allowed).verdict == "right"
    wrong = user_code.check(attention, sees=lambda q, k: k <= q[:, None])
    assert codes(wrong) == {"misses-stated"}


@pytest.mark.real
def test_a_statement_takes_the_place_of_a_name() -> None:
    guessed = user_code.check(MASKED.CausalBlocks)
    assert guessed.verdict == "wrong"
    assert user_code.check(MASKED.CausalBlocks, sees=STATED["staircase"]).verdict == "right"


# ----------------------------------------------------------------------------- functions and caches


def test_queries_are_the_last_of_the_keys() -> None:
    assert user_code.check(MASKED.from_the_last, sees="q >= k").verdict == "right"
    wrong = user_code.check(MASKED.from_the_first, sees="q >= k")
    assert codes(wrong) == {"misses-stated"}
    assert "behind" in wrong.findings[0].evidence


def test_a_query_that_may_see_no_key_has_no_wrong_cell() -> None:
    assert user_code.check(MASKED.before_each, sees="q > k").verdict == "right"


@pytest.mark.real
def test_what_is_stated_is_given_as_the_mask() -> None:
    assert user_code.check(MASKED.with_a_mask, sees=WINDOW).verdict == "right"


@pytest.mark.real
def test_queries_behind_a_cache_begin_at_its_length() -> None:
    right = user_code.check(MASKED.WithCache(), sees=WINDOW)
    assert right.ok, right
    assert {one.name: one.ok for one in right.behaviour}["cache"] is True
    wrong = user_code.check(MASKED.WithCache(begin="start"), sees=WINDOW)
    assert wrong.verdict == "wrong"


# --------------------------------------------------------------------------------- masks as targets


@pytest.mark.parametrize(
    ("target", "stated"),
    [
        ("mask_mod", WINDOW),
        ("every_other_head", "q >= k and (head % 2 == 0 or q - k < 4)"),
        ("of_documents", "q // 10 == k // 10"),
        ("score_mod", "q >= k"),
        ("blocks", WINDOW),
        ("BLOCKS", WINDOW),
        ("triangle", "q >= k"),
        ("hidden", "q >= k"),
        ("added", "q >= k"),
        ("of_ids", "q >= k"),
        ("TRIANGLE", "q >= k"),
    ],
)
def test_a_mask_is_compared_with_what_is_stated(target: str, stated: str) -> None:
    thing = getattr(user_code.load(CASES / "masks.py"), target)
    assert user_code.check(thing, sees=stated).verdict == "right"
    wrong = user_code.check(thing, sees="q % 2 == k % 2")
    assert codes(wrong) == {"sees-unstated", "misses-stated"}


@pytest.mark.parametrize(
    ("target", "cell"),
    [
        ("WRONG_CELL", "text 1: query 2 of head 5 sees key 3"),
        ("of_later_texts", "text 1: query 3 of head 9 sees key 7"),
    ],
)
def test_a_wrong_cell_of_a_mask_is_named_with_its_text_and_head(target: str, cell: str) -> None:
    (finding,) = user_code.check(f"{CASES}/masks.py:{target}", sees="q >= k").findings
    assert cell in finding.evidence


def test_blocks_are_compared_with_their_function() -> None:
    made = user_code.check(user_code.load(CASES / "masks.py").blocks_of_another, sees="q >= k")
    assert codes(made) == {"blocks-differ", "misses-stated"}
    assert "query 128 does not see" in made.findings[0].evidence


def test_a_mask_is_drawn_where_nothing_is_stated(tmp_path: Path) -> None:
    shown = run(tmp_path, "check", f"{CASES}/masks.py:mask_mod")
    assert "1111111100000000" in shown.stdout
    assert "0111111110000000" in shown.stdout


@pytest.mark.real
def test_a_function_that_makes_a_mask_takes_arguments() -> None:
    made = user_code.check(
        f"{CASES}/masks.py:sliding", arguments={"window": 5}, sees="0 <= q - k < 5"
    )
    assert made.verdict == "right"


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "stated",
    [
        "q >",
        "q + k",
        "z <= q",
        "tok[q] == tok[k]",
        'q >= "a"',
        "doc[q] == doc[k]",
        "",
        "q // 0 == k",
    ],
)
def test_a_statement_that_cannot_be_read_names_its_option(tmp_path: Path, stated: str) -> None:
    refused = run(tmp_path, "check", f"{CASES}/masks.py:mask_mod", "--sees", stated, code=2)
    assert refused.error["message"].startswith("--sees")
    assert "--where" not in refused.said


def test_statements_exclude_each_other(tmp_path: Path) -> None:
    for option in ("--causal", "--no-causal"):
        words = ("check", f"{CASES}/masks.py:mask_mod", "--sees", "q >= k", option)
        assert not run(tmp_path, *words, code=2).missing("--sees", option, "exclude each other")
    with pytest.raises(mhacli.MhaError, match="exclude each other"):
        mhacli.check(MASKED.from_the_last, sees="q >= k", causal=True)


@pytest.mark.parametrize(
    "allowed", [lambda q, k: q[:, None] - k, lambda q, k: torch.ones(3, 3).bool(), lambda q: q]
)
def test_a_predicate_that_gives_no_cells_is_refused(allowed: object) -> None:
    with pytest.raises(mhacli.MhaError, match="sees: the predicate"):
        mhacli.check(MASKED.from_the_last, sees=allowed)


def test_a_statement_that_no_compared_text_shows_gets_no_tick() -> None:
    with pytest.raises(mhacli.MhaError, match="sees: in 64 tokens"):
        user_code.check(MASKED.from_the_last, sees="q >= k and q - k < 200", length=64)


def test_a_predicate_of_single_places_is_refused() -> None:
    with pytest.raises(mhacli.MhaError, match="sees: the predicate"):
        mhacli.check(MASKED.from_the_last, sees=lambda q, k: q.new_ones(64, dtype=torch.bool))


def test_a_page_draws_what_is_stated_and_what_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("--sees", "q >= k", "--html", "page.html")
    run(tmp_path, "check", f"{CASES}/masks.py:mask_mod", *words, code=3, writes={"page.html"})
    text = page.read_text(encoding="utf-8")
    assert all(f">{word}<" in text for word in ("stated", "measured", "difference"))
    assert "<script" not in text
    # without the policy a browser shows none of the pictures
    assert "data:image" in text
    assert "img-src data:" in text
