import json
from itertools import pairwise

import pytest

from mhacli.errors import MhaError
from mhacli.text.spans import MAX_FILE_BYTES, Message, Turn, read_chat, turns_of

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Where is it?\n"}]
CHAT = (Message("system", "Be brief."), Message("user", " Where is it?\n"))


def chat_ml(messages):
    body = "".join(f"<|im_start|>{m.role}\n{m.content.strip()}<|im_end|>\n" for m in messages)
    return body + "<|im_start|>assistant\n"


def gemma(messages):
    names = {"assistant": "model"}
    return "<bos>" + "".join(
        f"<start_of_turn>{names.get(m.role, m.role)}\n{m.content.strip()}<end_of_turn>\n" for m in messages
    )


def inst(messages):
    return "<s>" + "".join(
        f"[INST] {m.content.strip()} [/INST]" if m.role == "user" else f" {m.content.strip()}</s>" for m in messages
    )


def deepseek(messages):
    names = {"user": "<｜User｜>", "assistant": "<｜Assistant｜>"}
    return "".join(names.get(m.role, "") + m.content.strip() for m in messages)


def spoken(*pairs):
    return tuple(Message(role, content) for role, content in pairs)


def texts_of(turns, rendered):
    return [(turn.name, rendered[turn.start : turn.end]) for turn in turns]


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("document", [MESSAGES, {"messages": MESSAGES}])
def test_a_list_of_messages_is_read_by_itself_and_in_an_object(tmp_path, document):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(document))
    assert read_chat(str(path)) == CHAT


LIST = "not a list of messages"
ONLY = "not with messages only"
BOTH = "instead of role and content"
ROLE = "not a name of at most 40 letters, _ and - such as user"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[]", "PATH has no message"),
        ('{"messages": []}', "PATH has no message"),
        ('"hello"', f"PATH holds text, {LIST}"),
        ("3", f"PATH holds a number, {LIST}"),
        ("null", f"PATH holds null, {LIST}"),
        ('{"messages": {}}', f"PATH holds an object, {LIST}"),
        ("{}", f"PATH holds an object with no fields, {ONLY}"),
        ('{"messages": [], "tools": []}', f"PATH holds an object with the fields 'messages', 'tools', {ONLY}"),
        ('[{"role": "user", "content": "a"}, "b"]', "PATH: messages[1] is text, not an object with role and content"),
        ('[{"role": "user"}]', "PATH: messages[0] has the fields 'role' instead of role and content"),
        ("[{}]", "PATH: messages[0] has no fields instead of role and content"),
        ('[{"role": "user", "content": "a", "name": "b"}]', f"PATH: messages[0] has the fields 'content', 'name', 'role' {BOTH}"),
        ('[{"role": 3, "content": "a"}]', f"PATH: messages[0].role is a number, {ROLE}"),
        ('[{"role": "user2", "content": "a"}]', f"PATH: messages[0].role is 'user2', {ROLE}"),
        ('[{"role": "\\u001b[2J", "content": "a"}]', f"PATH: messages[0].role is '\\x1b[2J', {ROLE}"),
        ('[{"role": "", "content": "a"}]', f"PATH: messages[0].role is '', {ROLE}"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "PATH: messages[0].content is a list, not text"),
        ('[{"role": "user", "content": true}]', "PATH: messages[0].content is true or false, not text"),
        ('[{"role": "user", "content": "a\\ud800"}]', "PATH: messages[0].content has the lone surrogate "
         "'\\ud800' at character 1, which no tokenizer reads"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_its_place(tmp_path, document, message):
    path = tmp_path / "chat.json"
    path.write_text(document)
    with pytest.raises(MhaError) as caught:
        read_chat(str(path))
    assert caught.value.message == message.replace("PATH", str(path))
    assert caught.value.code == "bad-file"
    assert caught.value.exit_code == 1


def test_a_file_that_is_too_large_is_refused(tmp_path):
    path = tmp_path / "chat.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(MhaError) as caught:
        read_chat(str(path))
    assert (caught.value.code, caught.value.path) == ("too-large", str(path))


# -------------------------------------------------------------------------------------------------------------- turns

DIALOGUE = spoken(
    ("system", "Be brief."),
    ("user", "  Where is the Eiffel Tower?\n"),
    ("assistant", "Paris"),
    ("user", "Paris"),
    ("assistant", "Yes."),
)


@pytest.mark.parametrize("template", [chat_ml, gemma, inst, deepseek])
def test_turns_stand_where_the_template_put_the_contents(template):
    messages = DIALOGUE if template in (chat_ml, gemma) else DIALOGUE[1:]
    rendered = template(messages)
    turns = turns_of(messages, rendered)
    expected = [("system", "Be brief.")] if template in (chat_ml, gemma) else []
    assert texts_of(turns, rendered) == [
        *expected,
        ("user1", "Where is the Eiffel Tower?"),
        ("assistant1", "Paris"),
        ("user2", "Paris"),
        ("assistant2", "Yes."),
    ]
    assert [turn.role for turn in turns] == [message.role for message in messages]


def test_a_turn_has_the_numbers_of_its_first_and_last_character():
    assert turns_of(CHAT, "<sys>Be brief.</sys> Where is it?") == (
        Turn("system", "system", 5, 14), Turn("user", "user", 21, 33)
    )  # fmt: skip


@pytest.mark.parametrize("content", ["user", "im", "start", "im_start", "<", "|", "s", "u", "user\nuser", "e"])
def test_a_content_that_the_header_holds_too_is_found_behind_it(content):
    messages = spoken(("system", "s"), ("user", content), ("assistant", "assistant"), ("user", content))
    rendered = chat_ml(messages)
    header, end = "<|im_start|>{}\n", "<|im_end|>\n"
    expected = [len(header.format("system"))]
    for before, after in pairwise(messages):
        expected.append(expected[-1] + len(before.content) + len(end) + len(header.format(after.role)))
    assert [turn.start for turn in turns_of(messages, rendered)] == expected


def test_a_template_that_calls_a_role_otherwise_is_known():
    messages = spoken(("user", "user"), ("assistant", "model"))
    rendered = gemma(messages)
    assert [turn.start for turn in turns_of(messages, rendered)] == [
        rendered.index("\nuser<") + 1, rendered.index("\nmodel<") + 1
    ]  # fmt: skip


def test_a_content_in_brackets_of_the_same_word_is_found_inside():
    messages = spoken(("user", "INST"), ("assistant", "INST"))
    assert [turn.start for turn in turns_of(messages, inst(messages))] == [10, 23]


def test_the_name_of_a_role_may_be_written_large():
    assert turns_of(spoken(("user", "User")), "### User\nUser\n### Assistant\n")[0].start == 9


def test_a_content_that_is_repeated_later_stays_where_the_others_have_room():
    messages = spoken(("user", "hi"), ("assistant", "the user says hi"))
    assert [turn.start for turn in turns_of(messages, inst(messages))] == [10, 21]


def test_two_messages_do_not_share_a_place():
    with pytest.raises(MhaError) as caught:
        turns_of(spoken(("user", "Paris"), ("assistant", "Paris")), "[INST] Paris [/INST]")
    assert caught.value.message.startswith("messages[1] (assistant) ")


def test_an_empty_content_is_a_turn_without_characters_behind_its_header():
    messages = spoken(("user", "hi"), ("assistant", " "))
    rendered = chat_ml(messages)
    place = rendered.index("assistant\n") + len("assistant\n")
    assert turns_of(messages, rendered)[1] == Turn("assistant", "assistant", place, place)


def test_a_message_that_the_template_left_out_is_named():
    with pytest.raises(MhaError) as caught:
        turns_of(DIALOGUE, chat_ml(DIALOGUE[:2]))
    assert caught.value.message == (
        "messages[2] (assistant) is missing from the text that the chat template makes: 'Paris'"
    )
    assert caught.value.hint == (
        "the template changes or leaves out this message; --span NAME=START:END marks it by characters"
    )
    assert caught.value.code == "no-turn"


def test_messages_out_of_order_are_not_taken_for_found():
    with pytest.raises(MhaError) as caught:
        turns_of(spoken(("user", "one"), ("assistant", "two")), "two, one")
    assert caught.value.message.startswith("messages[1] (assistant) ")
    assert turns_of((), "text") == ()


def test_a_long_chat_of_short_messages_is_found_quickly():
    messages = spoken(*[("user", "a"), ("assistant", "e")] * 2000)
    rendered = chat_ml(messages)
    turns = turns_of(messages, rendered)
    assert all(rendered[turn.start - 1] == "\n" and rendered[turn.end] == "<" for turn in turns)
    assert [turn.name for turn in turns[-2:]] == ["user2000", "assistant2000"]
