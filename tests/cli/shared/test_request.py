"""The choices of a command line, and which words a run makes of its text."""

from __future__ import annotations

import json

import pytest

from mhacli.cli.options import DeviceOptions, LayerOptions, SaveOptions, SourceOptions, TextOptions
from mhacli.cli.shared.request import given_choices, make_request
from mhacli.compute.layer.run import weights_content


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        ({}, {}),
        ({"window": "2"}, {"window": (2, 0)}),
        ({"window": "2,0", "prefix": 3, "sink": 1}, {"window": (2, 0), "prefix": 3, "sink": 1}),
        ({"window": "none", "prefix": 0, "sink": 0}, {"window": None, "prefix": None, "sink": None}),
    ],
)
def test_a_window_a_prefix_and_sinks_are_left_open_named_or_taken_off(layer, found):
    made = given_choices(SourceOptions(), LayerOptions(**layer), DeviceOptions(), TextOptions())
    assert {name: made[name] for name in ("window", "prefix", "sink") if name in made} == found


TEXT = "Don't pay 3.14!"
WHOLE, PLAIN = ("don't", "pay", "3.14"), ("dont", "pay", "314")


def requested(*, vocab=None, weights=None):
    return make_request(
        SourceOptions(typed=[TEXT]),
        TextOptions(vocab=vocab),
        LayerOptions(weights=weights, d_model=None if weights else 8, heads=None if weights else 2),
        DeviceOptions(),
        SaveOptions(),
    )


def words_of(request):
    (sequence,) = request.encoded.sequences
    assert [TEXT[start:end].lower() for start, end in sequence.offsets] == list(WHOLE)
    return sequence.tokens, request.config.inner_marks


def test_a_new_run_keeps_the_marks_inside_words():
    assert words_of(requested()) == (WHOLE, True)


@pytest.mark.parametrize(
    ("rule", "words", "is_new"), [({"inner_marks": True}, WHOLE, True), ({}, PLAIN, False)], ids=["new", "earlier"]
)
def test_a_vocabulary_is_used_by_the_rule_that_it_was_made_by(tmp_path, rule, words, is_new):
    tokens = [{"token": token, "id": i, "count": 1, "bytes": 1} for i, token in enumerate(words)]
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"schema": "mha.vocab/1", "tokenizer": "word", **rule, "tokens": tokens}))
    request = requested(vocab=str(path))
    assert words_of(request) == (words, is_new)
    assert request.encoded.sequences[0].ids == (0, 1, 2)


@pytest.mark.parametrize(("field", "is_new"), [(b"inner_marks", True), (b"other_marks", False)], ids=["new", "earlier"])
def test_weights_are_used_by_the_rule_that_they_were_made_by(tmp_path, field, is_new):
    old = tmp_path / "old.json"
    old.write_text(json.dumps(sorted({*WHOLE, *PLAIN})))
    content = weights_content(requested(vocab=str(old)))
    assert content.count(b"inner_marks") == 1
    path = tmp_path / "layer.safetensors"
    path.write_bytes(content.replace(b"inner_marks", field))
    assert words_of(requested(weights=str(path))) == (WHOLE if is_new else PLAIN, is_new)
