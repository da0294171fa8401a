"""The grammar of conditions, their evaluation, and the refusal of everything else, without executing any text."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhacli.errors import UsageError
from mhacli.spec.conditions import DUPLICATE, INDUCTION, Pattern, parse_pattern

HINT = (
    'q and k are positions, tok[k] is the token at k, "the" is a token by its text; operators are + - * // % abs, '
    "== != < <= > >= in, and or not; for example: tok[k] == tok[q] and k < q"
)


class Written:
    """Cells that write down how a pattern is evaluated."""

    def position(self, axis):
        return axis

    def number(self, value):
        return str(value)

    def absolute(self, number):
        return f"|{number}|"

    def calculate(self, sign, left, right, *, may_divide_by_0):
        return f"({left} {sign}{'?' if may_divide_by_0 else ''} {right})"

    def token(self, axis, position):
        return f"token({axis}: {position})"

    def word(self, text):
        return repr(text)

    def compare_numbers(self, relation, left, right):
        return f"{left} {relation} {right}"

    def compare_tokens(self, relation, left, right):
        return f"{left} {relation} {right}"

    def is_listed(self, relation, token, words):
        return f"{token} {relation} {words}"

    def negate(self, condition):
        return f"not {condition}"

    def all_of(self, conditions):
        return f"all[{', '.join(conditions)}]"

    def any_of(self, conditions):
        return f"any[{', '.join(conditions)}]"


def written(text: str) -> str:
    return parse_pattern(text).holds(Written())


MEANINGS = {
    "k < q": "all[k < q]",
    "(k) <= (q)": "all[k <= q]",
    "0 < q - k <= 8": "all[0 < (q - k), (q - k) <= 8]",
    "q > k >= 1_000": "all[q > k, k >= 1000]",
    "q + k * 2 != 0x10": "all[(q + (k * 2)) != 16]",
    "q // 3 == k % 4": "all[(q // 3) == (k % 4)]",
    "q // k == 1 % (k - 4)": "all[(q //? k) == (1 %? (k - 4))]",
    "abs(q - k) < 3": "all[|(q - k)| < 3]",
    "-k < -5": "all[(0 - k) < -5]",
    "k < abs(3 - 7) * 2 + 9 // 2 + 9 % 4": "all[k < 13]",
    "tok[k] == tok[q]": "all[token(k: k) == token(q: q)]",
    "tok[q - 1] != tok[0]": "all[token(q: (q - 1)) != token(k: 0)]",
    "tok[abs(k - 2)] == 'the'": "all[token(k: |(k - 2)|) == 'the']",
    'tok[k] in ("a", "b")': "all[token(k: k) in ('a', 'b')]",
    'tok[k] not in ["a"]': "all[token(k: k) not in ('a',)]",
    'tok[q] == tok[k] in ("a",)': "all[token(q: q) == token(k: k), token(k: k) in ('a',)]",
    '"\\n" == tok[k]': "all['\\n' == token(k: k)]",
    "k < q and not k < 3 or q == 0": "any[all[all[k < q], not all[k < 3]], all[q == 0]]",
    "k < q and (k < 3 or q == 0)": "all[all[k < q], any[all[k < 3], all[q == 0]]]",
}

NOTATION = "is not one expression in Python's notation"
CONDITIONS = "is not a condition such as k < q"
KINDS = "compares a token with a number"
OPERATORS = "uses another operator than a + b, a - b, a * b, a // b, a % b, -a and abs(a)"
NUMBERS = "is not a whole number, q, k or a calculation with them"
LITERALS = "is not a whole number below 1000000000"
RELATIONS = "uses another comparison than == != < <= > >= in and not in"
NAMES = "is not one of the names q, k, tok and abs"
LISTS = 'is not a list of words such as ("a", "b")'
BY_BOTH = "depends on both q and k: a position in tok[…] depends on one of them"
NOTHING_BUT_ABS = "calls a function other than abs"
DIVISOR = "divides by 0"
BELOW = "can exceed 2^63"
ORDER = "orders tokens, which compare with == != in and not in only"
INNER = "is a condition, where a number or a token is compared"
WORD = 'is not a word in quotes such as "the"'
TOKENS = "is not a token: in and not in are for tokens"
LONE_LIST = "has a list of words without in or not in before it"
ONLY_TOK = "is no token: only tok has some, as in tok[k]"
ALONE = "cannot stand alone: write tok[k] or abs(q - k)"
ARGUMENTS = "does not give abs exactly one number"

REFUSALS = [
    ("", NOTATION, "''"),
    ("  ", NOTATION, "''"),
    ("k <", NOTATION, "'k <'"),
    ("k = q", NOTATION, "'k = q'"),
    ("k < q; q < k", NOTATION, "'k < q; q < k'"),
    ("k < q && q < 3", NOTATION, "'k < q && q < 3'"),
    ("k < q\0", NOTATION, r"'k < q\x00'"),
    ("tok[k] == '\ud800'", NOTATION, r'''"tok[k] == '\ud800'"'''),
    ("tok[k] == '\\d'", NOTATION, r'''"tok[k] == '\\d'"'''),
    ("k < 1or q < 1", NOTATION, "'k < 1or q < 1'"),
    ("(" * 300, NOTATION, repr("(" * 80)),
    ("k", CONDITIONS, "'k'"),
    ("tok[k]", CONDITIONS, "'tok[k]'"),
    ("True", CONDITIONS, "'True'"),
    ('"the"', CONDITIONS, "'\"the\"'"),
    ("k < q and q - 1", CONDITIONS, "'q - 1'"),
    ("not k", CONDITIONS, "'k'"),
    ("(k < q) & (q < 3)", CONDITIONS, "'(k < q) & (q < 3)'"),
    ("k < q if q < 3 else q < k", CONDITIONS, "'k < q if q < 3 else q < k'"),
    ("tok[k] == 3", KINDS, "'tok[k] == 3'"),
    ("q != 'the'", KINDS, "\"q != 'the'\""),
    ("k < q and tok[k] == k", KINDS, "'tok[k] == k'"),
    ("tok[q] == tok[k] == k", KINDS, "'tok[q] == tok[k] == k'"),
    ("tok[k] < tok[q]", ORDER, "'tok[k] < tok[q]'"),
    ("'a' >= tok[q]", ORDER, "\"'a' >= tok[q]\""),
    ("q is k", RELATIONS, "'q is k'"),
    ("q is not k", RELATIONS, "'q is not k'"),
    ("(q < k) == (k < q)", INNER, "'q < k'"),
    ("(not q < k) == 1", INNER, "'not q < k'"),
    ("(q < k or k < q) == 1", INNER, "'q < k or k < q'"),
    ("k in (1, 2)", WORD, "'1'"),
    ("tok[k] in ('a', tok[q])", WORD, "'tok[q]'"),
    ("tok[k] in ('a', *'b')", WORD, "\"*'b'\""),
    ("k in ('a', 'b')", TOKENS, "'k'"),
    ("tok[k] in ('a')", LISTS, "\"'a'\""),
    ("tok[k] not in tok[q]", LISTS, "'tok[q]'"),
    ("tok[k] == ('a', 'b')", LONE_LIST, "\"tok[k] == ('a', 'b')\""),
    ("['a'] < q", LONE_LIST, "\"['a'] < q\""),
    ("tok[k] in ('a',) in ('b',)", TOKENS, "\"('a',)\""),
    ("tok[q - k] == 'a'", BY_BOTH, "'tok[q - k]'"),
    ("tok[k:] == 'a'", NUMBERS, "'k:'"),
    ("tok[k, q] == 'a'", NUMBERS, "'k, q'"),
    ("tok[tok[k]] == 'a'", NUMBERS, "'tok[k]'"),
    ("tok['a'] == 'a'", LITERALS, "\"'a'\""),
    ("word[k] == 'a'", ONLY_TOK, "'word[k]'"),
    ("tok[k][0] == 'a'", ONLY_TOK, "'tok[k][0]'"),
    ("tok == 'a'", ALONE, "'tok'"),
    ("abs < q", ALONE, "'abs'"),
    ("x < q", NAMES, "'x'"),
    ("Q < k", NAMES, "'Q'"),
    ("0 < q and len < 3", NAMES, "'len'"),
    ("tok[k] + 1 < q", NUMBERS, "'tok[k]'"),
    ("abs(tok[k]) < q", NUMBERS, "'tok[k]'"),
    ("abs(q < k) < q", NUMBERS, "'q < k'"),
    ("q - 'a' < k", LITERALS, "\"'a'\""),
    ("k < 1.5", LITERALS, "'1.5'"),
    ("k < True", LITERALS, "'True'"),
    ("k == None", LITERALS, "'None'"),
    ("k < 2j", LITERALS, "'2j'"),
    ("tok[k] == b'a'", LITERALS, "\"b'a'\""),
    ("k < ...", LITERALS, "'...'"),
    ("k < 1000000000", LITERALS, "'1000000000'"),
    ("q / 2 < k", OPERATORS, "'q / 2'"),
    ("q ** 2 < k", OPERATORS, "'q ** 2'"),
    ("q << 2 < k", OPERATORS, "'q << 2'"),
    ("~q < k", OPERATORS, "'~q'"),
    ("+q < k", OPERATORS, "'+q'"),
    ("q // 0 < k", DIVISOR, "'q // 0'"),
    ("1 < q % -0", DIVISOR, "'q % -0'"),
    ("q % (2 - 2) < k", DIVISOR, "'q % (2 - 2)'"),
    ("tok[3 // 0] == 'a'", DIVISOR, "'3 // 0'"),
    ("1 < k * k * k", BELOW, "'k * k * k'"),
    ("1 < k * k * k % 7", BELOW, "'k * k * k'"),
    ("k < 999999999 * 999999999 * 99", BELOW, "'999999999 * 999999999 * 99'"),
    ("min(q, k) < 3", NOTHING_BUT_ABS, "'min(q, k)'"),
    ("abs(q, k) < 3", ARGUMENTS, "'abs(q, k)'"),
    ("abs(q, x=k) < 3", ARGUMENTS, "'abs(q, x=k)'"),
    ("abs() < 3", ARGUMENTS, "'abs()'"),
    ("abs(x=q) < 3", ARGUMENTS, "'abs(x=q)'"),
    ("k < q and é == 'a'", NAMES, "'é'"),
    ("'é' == tok[k] and x < q", NAMES, "'x'"),
]


def outcome(text: str) -> Pattern | str:
    """The pattern, or the message of its refusal; any other exception is a fault."""
    try:
        return parse_pattern(text)
    except UsageError as error:
        return error.message


@pytest.mark.parametrize("text", MEANINGS)
def test_a_pattern_becomes_what_it_says(text: str) -> None:
    assert parse_pattern(text).text == text
    assert written(text) == MEANINGS[text]


def test_the_text_is_kept_without_the_spaces_around_it() -> None:
    assert parse_pattern("\t k < q \n").text == "k < q"


def test_the_named_patterns_are_patterns() -> None:
    assert written(DUPLICATE) == "all[all[token(k: k) == token(q: q)], all[k != q]]"
    assert written(INDUCTION) == "all[all[token(k: (k - 1)) == token(q: q)], all[(k - 1) != q]]"


@pytest.mark.parametrize(("text", "rule", "shown"), REFUSALS)
def test_what_cannot_be_is_refused_with_the_part_and_the_rule(text: str, rule: str, shown: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_pattern(text)
    assert caught.value.message == f"--where: {shown} {rule}"
    assert caught.value.hint == HINT


def test_the_example_of_the_hint_is_a_pattern() -> None:
    assert isinstance(parse_pattern(HINT.rpartition(": ")[2]), Pattern)


def test_a_long_text_is_refused_by_its_length() -> None:
    assert parse_pattern("k < q" + " " * 495).text == "k < q"
    with pytest.raises(UsageError) as caught:
        parse_pattern("k < q" + " " * 496)
    assert caught.value.message == "--where: the condition has 501 characters, at most 500 are read"


def test_deep_nesting_is_refused_by_its_depth() -> None:
    def nested(n: int) -> str:
        return "not " * n + "k < q"

    assert written(nested(48)) == "not " * 48 + "all[k < q]"
    for text, depth in ((nested(49), 51), ("-" * 490 + "k < q", 492), ("+".join("k" * 100) + "<q", 101)):
        with pytest.raises(UsageError) as caught:
            parse_pattern(text)
        assert caught.value.message == f"--where: the condition is nested {depth} deep, at most 50 are read"


def test_a_part_that_is_long_is_shown_in_part() -> None:
    with pytest.raises(UsageError) as caught:
        parse_pattern(f"k < q and {'x' * 300} < 3")
    assert caught.value.message == f"--where: {'x' * 80!r} {NAMES}"


@pytest.mark.parametrize(
    ("text", "rule", "shown"),
    [
        ("__import__('os').system('touch executed') == 0", NOTHING_BUT_ABS, None),
        ("abs(__import__('pathlib').Path('executed').touch()) < 1", NOTHING_BUT_ABS, None),
        ("open('executed', 'w') == 'a'", NOTHING_BUT_ABS, "open('executed', 'w')"),
        ("().__class__ == 'a'", NUMBERS, "().__class__"),
        ("tok.__class__[k] == 'a'", ONLY_TOK, "tok.__class__[k]"),
        ("q.real < k", NUMBERS, "q.real"),
        ("[q for q in (1, 2)] == 'a'", NUMBERS, "[q for q in (1, 2)]"),
        ("{k: q} == 'a'", NUMBERS, "{k: q}"),
        ("{k} == 'a'", NUMBERS, "{k}"),
        ("(n := q) < k", NUMBERS, "n := q"),
        ("tok[k] == f'{q}'", NUMBERS, "f'{q}'"),
        ("abs(*q) < k", NUMBERS, "*q"),
        ("(lambda: q) == 'a'", NUMBERS, "lambda: q"),
        ("(lambda: k < q)()", CONDITIONS, "(lambda: k < q)()"),
        ("(yield q) == 1", NUMBERS, "yield q"),
        ("(await q) == 1", NUMBERS, "await q"),
        ("(q if k < 3 else k) == 1", NUMBERS, "q if k < 3 else k"),
    ],
)
def test_nothing_is_executed(tmp_path, monkeypatch, text: str, rule: str, shown: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    ast.parse(text, mode="eval")
    with pytest.raises(UsageError) as caught:
        parse_pattern(text)
    if shown is None:
        shown = text.removeprefix("abs(").removesuffix(" == 0").removesuffix(") < 1")
    assert caught.value.message == f"--where: {shown!r} {rule}"
    assert list(tmp_path.iterdir()) == []


PIECES = [
    "q", "k", "tok", "tok[", "tok[k]", "[", "]", "(", ")", "abs", "abs(", "0", "7", "1_0", "1e3", "1j", "1or", "'a'", "b'a'",
    "('a','b')", "['a']", "==", "!=", "<", "<=", "in", "not", "and", "or", "+", "-", "*", "//", "%", "/", "**", "@", "~",
    "lambda", "for", "if", "else", "yield", "await", "None", "True", "f'", "'", '"', "'\\d'", "\\", "#", ",", ":", ":=", ".",
    "...", "{", "}", "\0", "\n", "\r", "\x0c", "\\\n", "\ufeff", "é", "𝓆", "\ud800", "\u2028", " ", " ", " ",
]  # fmt: skip
texts = st.one_of(st.text(max_size=600), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))


@given(texts)
@settings(max_examples=300)
def test_any_text_is_a_pattern_or_is_refused(text: str) -> None:
    found = outcome(text)
    if isinstance(found, Pattern):
        assert found.text == text.strip()
    else:
        assert found.startswith("--where: ")
        assert len(found) < 1000  # of 80 characters each may take ten, as in \\U0001d4c6


def numbers(of: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.recursive(
        of | st.integers(0, 99).map(str),
        lambda inner: (
            st.tuples(inner, st.sampled_from(["+", "-", "*", "// 3 +", "% 7 -"]), inner).map("({0[0]} {0[1]} {0[2]})".format)
            | inner.map("abs({})".format)
            | inner.map("-{}".format)
        ),
        max_leaves=3,
    )  # fmt: skip


places = numbers(st.sampled_from(["q", "k"]))
tokens = st.sampled_from(["q", "k"]).flatmap(lambda axis: numbers(st.just(axis))).map("tok[{}]".format)
comparisons = (
    st.tuples(places, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), places).map(" ".join)
    | st.tuples(tokens, st.sampled_from(["==", "!="]), tokens | st.just("'the'")).map(" ".join)
    | st.tuples(tokens, st.sampled_from(["in ('a', 'b')", "not in ['a']"])).map(" ".join)
)
conditions = st.recursive(
    comparisons,
    lambda inner: inner.map("not ({})".format) | st.lists(inner, min_size=2, max_size=3).map(lambda a: f"({' or '.join(a)})")
    | st.tuples(inner, inner).map(" and ".join),
    max_leaves=4,
)  # fmt: skip


@given(conditions.filter(lambda text: len(text) <= 500))
@settings(max_examples=100)
def test_what_the_grammar_makes_is_a_pattern(text: str) -> None:
    found = outcome(text)
    if isinstance(found, str):  # three factors each up to 2^31
        assert found.endswith(BELOW)


@pytest.mark.parametrize(
    "text",
    ["(" * 500, "[" * 250 + "]" * 250, "not " * 124 + "q", "-" * 499 + "q", "q<" * 249 + "q", "lambda:" * 70 + "q",
     "tok[" * 100 + "k" + "]" * 100, "9" * 500, "*".join(["9" * 9] * 49) + "<1", "q" + ".a" * 249, "{" * 500],
)  # fmt: skip
def test_the_worst_texts_take_a_number_of_calls_that_is_linear_in_their_length(text: str) -> None:
    n_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        outcome(text)
    finally:
        sys.setprofile(None)
    assert n_calls < 100 * len(text)


@pytest.mark.parametrize("fault", [MemoryError, RecursionError, ValueError, SyntaxError])
def test_whatever_the_parser_gives_up_with_is_a_usage_error(monkeypatch, fault: type[Exception]) -> None:
    def parse(*_: object, **__: object) -> None:
        raise fault("s_push: parser stack overflow")

    monkeypatch.setattr(ast, "parse", parse)
    with pytest.raises(UsageError) as caught:
        parse_pattern("k < q")
    assert caught.value.message.endswith(NOTATION)


def test_no_warning_of_python_reaches_the_user() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for text in (r"tok[k] == '\d'", "k < 1or q < 1", "q is 3"):
            with pytest.raises(UsageError):
                parse_pattern(text)
    assert said == []


def test_the_words_are_all_that_are_named() -> None:
    assert parse_pattern('not tok[k] == "a" or tok[q] in ("b", "c") and q == k').words == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("text", "bound"),
    [("q - k", 20), ("q + k * k", 110), ("abs(3 - q)", 13), ("q // k", 10), ("k * k % 7", 100), ("-k", 10), ("5", 5), ("-5", 5)],
)  # fmt: skip
def test_by_hand_how_large_the_numbers_of_a_pattern_can_be(text: str, bound: int) -> None:
    assert parse_pattern(f"{text} == 0").largest(10) == bound
    assert parse_pattern(f"1 < 0 or tok[{text.replace('q', 'k')}] == 'a'").largest(10) >= bound


@given(places.filter(lambda text: len(text) < 200), st.integers(0, 12), st.integers(0, 12))
@settings(max_examples=100)
def test_no_number_is_larger_than_it_can_be(text: str, q: int, k: int) -> None:
    """Python itself says the number: the text is of our own making."""
    try:
        pattern = parse_pattern(f"{text} == 0")
    except UsageError:
        return
    assert abs(eval(text, {"q": q, "k": k, "abs": abs})) <= pattern.largest(12)


def test_patterns_are_read_without_torch() -> None:
    code = (
        "import sys; from mhacli.spec.conditions import *; parse_pattern(INDUCTION); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
