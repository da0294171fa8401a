"""What `run` suggests on a terminal can be typed, and follows the cell that it says."""

import shlex
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from support.layers_made import layered
from support.records import make_record

from mhacli.cli.options import ColourOptions, DeviceOptions, LayerOptions, SaveOptions, SourceOptions, TextOptions
from mhacli.cli.shared.checkpoint import ComputeRequest, ModelOptions, ModelTextOptions
from mhacli.cli.shared.next_steps import (
    cell_text,
    next_commands,
    strongest_cell,
    suggest_after_code,
    suggest_after_heads,
    suggest_after_trace,
    typed_words,
)
from mhacli.cli.shared.output import PictureOptions, RecordFormats, RecordOutput
from mhacli.render.base.options import ViewOptions


def typed(*texts, layer=None, text=None, source=None, save=None, reading=None):
    return ComputeRequest(
        source or SourceOptions(typed=list(texts)), text or TextOptions(), layer or LayerOptions(), DeviceOptions(),
        ModelOptions(), reading or ModelTextOptions(), save or SaveOptions(),
    )  # fmt: skip


def commands(given, record=None, **pictures):
    output = RecordOutput(
        formats=RecordFormats(), save=given.save, pictures=PictureOptions(**pictures), colour=ColourOptions()
    )
    return [words for words, _ in next_commands(record or RECORD, given, ViewOptions(), output)]


def with_weights(record, **cells):
    """The record with a pattern of zeros but for these weights, each at `bBhHqQkK`."""
    pattern = np.zeros_like(record.arrays["pattern"])
    for place, weight in cells.items():
        b, h, q, k = (int(digit) for digit in place if digit.isdigit())
        pattern[b, h, q, k] = weight
    return replace(record, arrays={**record.arrays, "pattern": pattern})


RECORD = with_weights(make_record(), b0h1q2k0=0.7)


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        ({"b0h1q2k1": 0.4, "b0h0q1k0": 0.3}, (0, 0, (1, 2, 1))),
        ({"b0h0q0k0": 1.0, "b0h1q1k0": 0.1}, (0, 0, (1, 1, 0))),  # a query without a choice, and itself
        ({"b0h0q2k2": 0.9, "b1h0q1k0": 0.2}, (0, 1, (0, 1, 0))),
    ],
)
def test_the_cell_is_the_largest_that_a_query_with_a_choice_gives_to_another_token(cells, found):
    record = with_weights(make_record(("the", "cat", "sat"), ("a", "dog"), causal=True), **cells)
    assert strongest_cell(record, ViewOptions()) == found


def test_the_cell_is_of_a_head_and_a_text_that_are_drawn():
    record = with_weights(make_record(("the", "cat", "sat"), ("a", "dog")), b0h1q2k1=0.9, b0h0q2k0=0.5, b1h1q0k1=0.3)
    assert strongest_cell(record, ViewOptions(heads=(0,))) == (0, 0, (0, 2, 0))
    assert strongest_cell(record, ViewOptions(sequences=(1,))) == (0, 1, (1, 0, 1))


def test_of_a_checkpoint_the_first_token_counts_only_where_nothing_else_does():
    record = layered()
    layer, b, (head, query, key) = strongest_cell(record, ViewOptions(layers=((None, 1),)))
    cells = record.of_layer(1).arrays["pattern"][b].copy()
    cells[:, range(cells.shape[1]), range(cells.shape[1])] = 0
    assert (layer, key) != (0, 0)
    assert cells[head, query, key] == cells[:, :, 1:].max()


def test_the_cell_is_named_by_its_tokens_with_its_weight():
    record = with_weights(make_record(("the", "cat", "sat"), ("a", "dog")), b1h1q1k0=0.77)
    assert (
        cell_text(record, (0, 1, (1, 1, 0)), ViewOptions())
        == "sequence 1, head 1, query 1 “dog”, key 0 “a”: weight .77"
    )
    assert cell_text(layered(), (1, 0, (0, 1, 2)), ViewOptions()).startswith("layer 1, ")


def test_the_weight_of_a_named_cell_is_that_of_its_own_text_where_padding_stands_on_the_left():
    record = make_record(("the", "cat", "sat"), ("a", "dog"))
    record = replace(record, config=replace(record.config, padding="left"))
    weight = record.arrays["pattern"][1, 1, 1 + 1, 0 + 1]
    assert cell_text(record, (0, 1, (1, 1, 0)), ViewOptions(precision=4)).endswith(f" {weight:.4f}"[2:])


def test_the_options_of_the_run_are_typed_again():
    layer = LayerOptions(heads=4, bias=False, causal=True, scale=0.5)
    given = typed("the cat", "it's", layer=layer, text=TextOptions(context=None))
    first, second = commands(given)
    options = ["--heads", "4", "--no-bias", "--causal", "--scale", "0.5"]
    assert first == ["mha", "trace", "the cat", "it's", *options, "--cell", "1,2,0"]
    assert second == ["mha", "run", "the cat", "it's", *options, "--html", "attention.html"]


def after_heads(capsys, record, given, **options):
    suggest_after_heads(record, given, ViewOptions(**options))
    return capsys.readouterr().out.splitlines()


def with_excess(record, place, excess):
    """The record whose head at that place has this excess, and the others none."""
    heads = [replace(head, kind="mixed", certainty=0.9) for head in record.heads]
    heads[place] = replace(heads[place], kind="local", certainty=excess)
    return replace(record, heads=tuple(heads))


def test_after_heads_the_map_of_the_one_with_the_largest_excess_and_the_page_are_suggested(capsys):
    given = typed(source=SourceOptions(file=["book.txt"]), layer=LayerOptions(causal=True))
    assert after_heads(capsys, with_excess(make_record(), 1, 0.6), given) == [
        "next: mha heads --file book.txt --causal --map 1",
        "      head 1: local .60",
        "next: mha heads --file book.txt --causal --html attention.html",
    ]


def test_after_heads_of_a_checkpoint_the_map_is_of_its_layer(capsys):
    given = replace(typed("a b"), model=ModelOptions(model="DIR"))
    record = layered(n_heads=4)
    assert record.heads[6].layer == 1
    assert after_heads(capsys, with_excess(record, 6, 0.6), given)[:2] == [
        'next: mha heads "a b" --layer 1 --model DIR --map 2',
        "      layer 1, head 2: local .60",
    ]


def test_a_command_that_the_terminal_has_no_room_for_breaks_between_options_and_is_still_one_for_a_shell(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "50")
    text = "one two three four five six"
    given = typed(text, layer=LayerOptions(heads=2, causal=True))
    lines = after_heads(capsys, make_record(), given)
    assert max(map(len, lines)) <= 50
    page = "\n".join(lines).split("next: ")[-1]
    typed_by_hand = ["mha", "heads", text, "--heads", "2", "--causal", "--html", "attention.html"]
    shell = ["sh", "-c", f"""printf '%s\\n' {page}"""]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines() == typed_by_hand


def test_after_saved_heads_the_viewer_is_suggested_also_of_a_text_from_stdin(capsys):
    given = typed("-", save=SaveOptions(save="h.safetensors"))
    assert after_heads(capsys, make_record(), given) == ["next: mha view h.safetensors"]


def test_after_the_steps_of_a_layer_the_cell_with_the_largest_weight_is_suggested(capsys):
    suggest_after_trace(RECORD, (SourceOptions(typed=["a b"]), LayerOptions(heads=2)))
    command, about = capsys.readouterr().out.splitlines()
    assert command == 'next: mha trace "a b" --heads 2 --cell 1,2,0'
    assert about.endswith(" .70")


def test_after_the_steps_of_code_the_check_with_the_same_arguments_is_suggested(capsys):
    suggest_after_code("my.py:Mine", ["d_model=8", "n=2"])
    command, _ = capsys.readouterr().out.splitlines()
    assert command == "next: mha check my.py:Mine --arg d_model=8 --arg n=2"


def test_texts_that_look_like_options_stand_behind_two_dashes():
    first, _ = commands(typed("-a b", "c"))
    assert first[-3:] == ["--", "-a b", "c"]


def test_a_saved_record_is_shown_and_what_has_a_page_is_viewed():
    saved = typed("the cat", save=SaveOptions(save="my run.safetensors"))
    assert commands(saved)[1] == ["mha", "show", "my run.safetensors", "--html", "attention.html"]
    assert commands(saved, html="x.html")[1] == ["mha", "view", "my run.safetensors"]
    assert commands(typed("the cat"), html="x.html")[1] == ["mha", "view", "the cat"]


def test_what_was_read_from_stdin_or_generated_is_not_suggested_again():
    assert commands(typed("-")) == []
    assert commands(typed("a", reading=ModelTextOptions(generate=3))) == []


@pytest.mark.parametrize("text", ["the cat", "it's", 'say "no"', "5 $ `x` !", "*", "a;b", ""])
def test_a_shell_reads_the_words_that_were_meant(text):
    assert shlex.split(typed_words(["mha", "run", text])) == ["mha", "run", text]


@pytest.mark.parametrize("text", ["\x1b[31mred", "a \\ b", "two\nlines", "\u202eevil", "x" * 200])
def test_what_a_terminal_would_not_show_as_it_is_or_is_long_is_left_out(text):
    assert typed_words(["mha", "run", text]) == ""
