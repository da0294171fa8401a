import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors, trainers

from mhacli.errors import MhaError, UsageError
from mhacli.spec.tokens import TokenSequence
from mhacli.text import spans as searching
from mhacli.text.pieces import Spelling, pieces_of
from mhacli.text.spans import Expression, Span, Turn, find_spans, search, tokens_of

TEXT = "The Eiffel Tower is in Paris."
CHAT_TEXT = "<sys>Be brief.<user>Where?<bot>Paris<user>Sure?<bot>"
TURNS = (
    Turn("system", "system", 5, 14),
    Turn("user1", "user", 20, 26),
    Turn("assistant1", "assistant", 31, 36),
    Turn("user2", "user", 42, 47),
    Turn("assistant2", "assistant", 52, 52),
)


def told(call, *arguments):
    with pytest.raises(MhaError) as caught:
        call(*arguments)
    return caught.value


# --------------------------------------------------------------------------------------------------------- find_spans


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("subject=4:16", Span("subject", ((4, 16),))),
        ("all=:", Span("all", ((0, 29),))),
        ("end=23:", Span("end", ((23, 29),))),
        (" begin = :3 ", Span("begin", ((0, 3),))),
        ("i=/i/", Span("i", ((5, 6), (17, 18), (20, 21), (26, 27)))),
        ("either=/Eiffel|Paris/", Span("either", ((4, 10), (23, 28)))),
        ("case=/(?i)the|paris/", Span("case", ((0, 3), (23, 28)))),
        ("equals=/[=/]?Tower/", Span("equals", ((11, 16),))),
        ("some=/x*E?/", Span("some", ((4, 5),))),
        ("été.1-b=0:1", Span("été.1-b", ((0, 1),))),
    ],
)
def test_a_word_names_a_span_by_characters_or_by_what_matches(word, expected):
    assert find_spans([word], TEXT, ()) == (expected,)


def test_roles_name_all_their_turns_and_turns_themselves():
    assert find_spans(["system,user", "user2", "mark=/<bot>/"], CHAT_TEXT, TURNS) == (
        Span("system", ((5, 14),)),
        Span("user", ((20, 26), (42, 47))),
        Span("user2", ((42, 47),)),
        Span("mark", ((26 + 0, 31), (47, 52))),
    )
    assert find_spans(["assistant"], CHAT_TEXT, TURNS) == (Span("assistant", ((31, 36),)),)


def test_spans_keep_the_order_of_the_words_and_characters_count_not_bytes():
    found = find_spans(["b=/語/", "a=0:1", "c=/日/"], "日本語 🙂 日", ())
    assert found == (Span("b", ((2, 3),)), Span("a", ((0, 1),)), Span("c", ((0, 1), (6, 7))))
    assert find_spans([], TEXT, ()) == ()


OUTSIDE = "is outside of the text, which has the characters 0:29"
NAME = "is not a name: a letter, then letters, digits, _, - and ., at most 40 in all"
FORM = "is neither START:END such as a=4:17 nor /REGEX/"
ROLES = "is not a role or turn of the chat: system, user, user1, assistant, assistant1, user2, assistant2"
NO_CHAT = "has no range, which a text that is not a chat needs"
EXPRESSION = "is not a regular expression of Python's re"


@pytest.mark.parametrize(
    ("words", "turns", "message"),
    [
        (["a=5:30"], (), f"--span a=5:30 {OUTSIDE}"),
        (["a=29:"], (), "--span a=29: is empty"),
        (["a=5:5"], (), "--span a=5:5 is empty"),
        (["a=6:5"], (), "--span a=6:5 is empty"),
        (["a=-1:5"], (), f"--span a=-1:5 {FORM}"),
        (["a="], (), f"--span a= {FORM}"),
        (["a=/"], (), f"--span a=/ {FORM}"),
        (["a=/x"], (), f"--span a=/x {FORM}"),
        (["a=٣:5"], (), f"--span a=٣:5 {FORM}"),
        (["1a=0:5"], (), f"--span: '1a' {NAME}"),
        (["=0:5"], (), f"--span: '' {NAME}"),
        ([f"{'a' * 41}=0:5"], (), f"--span: '{'a' * 41}' {NAME}"),
        (["\x1b=0:5"], (), f"--span: '\\x1b' {NAME}"),
        (["user"], (), f"--span user {NO_CHAT}"),
        ([""], (), f"--span  {NO_CHAT}"),
        (["usr"], TURNS, f"--span usr {ROLES}"),
        (["user,"], TURNS, f"--span  {ROLES}"),
        (["user3"], TURNS, f"--span user3 {ROLES}"),
        (["a=0:5", "a=5:6"], (), "--span a is given twice"),
        (["user", "user=0:5"], TURNS, "--span user is given twice"),
        (["user,user"], TURNS, "--span user is given twice"),
        (["a=/(/"], (), f"--span a=/(/ {EXPRESSION}: missing ), unterminated subpattern at position 0"),
        (["a=/x{99999999999}/"], (), f"--span a=/x{{99999999999}}/ {EXPRESSION}: the repetition number is too large"),
        (["a=/" + "x" * 501 + "/"], (), "--span a: the expression has 501 characters, more than 500"),
    ],
)  # fmt: skip
def test_what_names_no_span_is_a_usage_error(words, turns, message):
    fault = told(find_spans, words, TEXT, turns)
    assert fault.message == message
    assert isinstance(fault, UsageError)


def test_a_range_is_explained_and_a_missing_chat_hinted_at():
    assert (
        told(find_spans, ["a=b"], TEXT, ()).hint
        == "START and END count the characters of the text from 0; END is excluded"
    )
    assert told(find_spans, ["user"], TEXT, ()).hint == (
        "try --span user=0:10 or --span user=/REGEX/; with --chat the roles are spans"
    )


@pytest.mark.parametrize("pattern", ["London", "x*", "$", ""])
def test_an_expression_that_finds_nothing_is_reported(pattern):
    if not pattern:
        assert told(find_spans, ["a=//"], TEXT, ()).code == "no-span"
        return
    fault = told(find_spans, ["b=/Paris/", f"a=/{pattern}/"], TEXT, ())
    assert fault.message == f"--span a=/{pattern}/ matches no characters of the text"
    assert (fault.code, fault.exit_code) == ("no-span", 2)


def test_turns_that_say_nothing_are_reported():
    fault = told(find_spans, ["assistant2"], CHAT_TEXT, TURNS)
    assert fault.message == "span 'assistant2' is empty: every matching chat turn has no text"
    assert (fault.code, fault.exit_code) == ("no-span", 2)


def test_a_long_chat_is_not_listed_whole():
    turns = [Turn(f"user{i}", "user", 0, 1) for i in range(1, 60)]
    message = told(find_spans, ["usr"], TEXT, turns).message
    assert message.endswith("user18, user19, …")


# -------------------------------------------------------------------------------------------------------------- search


def test_an_expression_that_never_ends_is_stopped_and_named():
    fault = told(search, [Expression("b", "a"), Expression("c", "(a|aa)+$")], "a" * 3000 + "!", 0.5)
    assert fault.message == "--span c=/(a|aa)+$/ takes longer than 0.5 seconds to search"
    assert fault.hint == "nested repetitions such as (a+)+ can take forever; NAME=START:END needs no search"
    assert (fault.code, fault.exit_code) == ("too-slow", 1)


def test_the_limit_of_a_command_leaves_it_time_to_answer():
    assert 0 < searching.LIMIT_S <= 5


def test_too_many_matches_are_refused():
    fault = told(search, [Expression("a", ".")], "x" * (searching.MAX_MATCHES + 1))
    assert fault.message == "--span a=/./ matches more than 100000 times"
    assert fault.code == "too-large"
    assert len(search([Expression("a", ".")], "x" * searching.MAX_MATCHES)[0]) == searching.MAX_MATCHES


def test_all_expressions_share_the_limit(monkeypatch):
    clock = iter([10.0, 10.25, 10.5])
    monkeypatch.setattr(searching, "process_time", lambda: next(clock))
    limits = []

    class Spy:
        def finditer(self, text, timeout):
            limits.append(timeout)
            return re.finditer("a", text)

    monkeypatch.setattr(searching, "_compiled", lambda expression: Spy())
    search([Expression("a", "a"), Expression("b", "a")], "a", 1.0)
    assert limits == [0.75, 0.5]


def test_hostile_text_and_patterns_reach_the_search_as_they_are():
    text = "a\x00b\r\n\u2028\ud800\U0001f642\x1b"
    assert search([Expression("a", "\x1b"), Expression("b", "\\ud800"), Expression("c", "\n")], text) == [
        ((8, 9),), ((6, 7),), ((4, 5),)
    ]  # fmt: skip


def test_an_expression_that_later_versions_read_otherwise_gives_no_warning():
    assert search([Expression("a", "[[a]")], "a[") == [((0, 1), (1, 2))]


# ----------------------------------------------------------------------------------------------------------- tokens_of


def sequence(offsets):
    count = len(offsets)
    return TokenSequence("", ("x",) * count, tuple(range(count)), tuple(offsets))


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        (((0, 3),), (1,)),
        (((0, 4),), (1, 2)),
        (((4, 5),), (2,)),
        (((3, 4),), (2,)),
        (((10, 11),), (3, 4, 5)),
        (((0, 1), (11, 12)), (1, 6)),
        (((11, 12), (0, 1), (0, 2)), (1, 6)),
        (((0, 9), (2, 3)), (1, 2)),
        (((12, 20),), ()),
    ],
)
def test_tokens_that_overlap_are_found_and_empty_ones_never(ranges, expected):
    offsets = [(0, 0), (0, 3), (3, 10), (10, 11), (10, 11), (10, 11), (11, 12), (12, 12), (0, 0), (5, 5)]
    assert tokens_of(Span("a", ranges), sequence(offsets)) == expected


pairs = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: tuple(sorted(pair)))


@given(st.lists(pairs, max_size=8), st.lists(pairs.filter(lambda pair: pair[0] < pair[1]), min_size=1, max_size=5))
def test_tokens_are_those_that_share_a_character(offsets, ranges):
    span_characters = {i for start, end in ranges for i in range(start, end)}
    expected = tuple(i for i, (a, b) in enumerate(offsets) if span_characters & set(range(a, b)))
    assert tokens_of(Span("a", tuple(ranges)), sequence(offsets)) == expected


@pytest.fixture(scope="module")
def chat_tokenizer():
    """Byte-level BPE with chat markers, and a token in front of every text."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "<sys>", "<user>", "<bot>"]
    made.train_from_iterator(
        [CHAT_TEXT] * 9,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=specials,
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return made


def test_the_markers_of_a_chat_count_inside_a_span_and_what_the_tokenizer_added_does_not(chat_tokenizer):
    spelling = Spelling(byte_level=True, added=frozenset(range(4)), special=frozenset(range(4)))
    found = pieces_of(CHAT_TEXT, chat_tokenizer.encode(CHAT_TEXT), spelling)
    every, brief, bot = find_spans(["every=:", "system", "bot=/<bot>/"], CHAT_TEXT, TURNS)
    assert tokens_of(every, found) == tuple(range(1, len(found.tokens)))
    assert "".join(found.tokens[i] for i in tokens_of(brief, found)) == "Be brief."
    assert [found.tokens[i] for i in tokens_of(bot, found)] == ["<bot>", "<bot>"]


def test_all_parts_of_a_character_belong_to_its_span(chat_tokenizer):
    found = pieces_of("a日b", chat_tokenizer.encode("a日b"), Spelling(byte_level=True))
    (span,) = find_spans(["a=/日/"], "a日b", ())
    assert [found.tokens[i] for i in tokens_of(span, found)] == ["日⟨1/3⟩", "日⟨2/3⟩", "日⟨3/3⟩"]
