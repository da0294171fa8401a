"""The top keys of rows over all heads, against plain means of the arrays."""

import re

import numpy as np
import pytest
from support.checkpoint_views import RECORDS, view
from support.layers_made import layered

from mhacli.results.record.record import Generated

KEPT = layered(causal=True, generated=Generated((9,), 6, 5))


def means_of(record, query):
    """The mean share that a query gives each key, over every head of every layer."""
    rows = [
        record.arrays[f"layers.{i}.pattern"][0, h, query]
        for i, said in enumerate(record.layers)
        for h in range(said.n_heads)
    ]
    return np.mean(rows, axis=0)


def rows_of(lines):
    """The lines of the table, those between its heading and its note."""
    begin = next(i for i, line in enumerate(lines) if line.startswith("query") and "and besides" in line)
    end = next(i for i, line in enumerate(lines) if line.startswith("a mean hides"))
    return lines[begin + 1 : end]


def percents(line):
    return [
        float(word) / 100 for word, sign in zip(line.split(), line.split()[1:], strict=False) if sign.startswith("%")
    ]


def test_rows_without_a_layer_show_what_all_heads_attend_to():
    table = rows_of(view(KEPT, 200, rows="generated"))
    tokens = KEPT.sequences[0].tokens
    assert [line.split()[0] for line in table] == [str(query) for query in range(8, len(tokens) - 1)]
    for query, line in enumerate(table, 8):
        means = means_of(KEPT, query)
        first, *others = percents(line)
        assert first == pytest.approx(means[0], abs=0.006)
        assert others == pytest.approx(sorted(means[1:], reverse=True)[:3], abs=0.006)
        strongest = 1 + int(np.argmax(means[1:]))
        assert re.search(rf" {strongest} “[^”]+” {others[0] * 100:.2g}", line)


def test_a_row_of_the_prompt_made_nothing_and_the_last_one_neither():
    lines = view(KEPT, 200, rows=(2,))
    (line,) = rows_of(lines)
    assert len(percents(line)) == 3  # the first token, and the two others that it sees
    assert "layer N --head H draws one" in " ".join(lines)


def test_with_a_layer_patterns_are_drawn_and_no_means():
    lines = view(KEPT, 200, rows="generated", layers=((None, 0),), heads=(0,))
    assert not any("mean over all heads" in line for line in lines)


def test_what_the_model_generated_is_reported_as_text():
    text = KEPT.sequences[0]
    said = text.text[text.offsets[9][0] :]
    assert said
    assert any(line.startswith("generated: “") and line.endswith("”") and said[-3:] in line for line in view(KEPT, 200))


def test_layers_chosen_for_their_spans_are_not_drawn_without_a_head():
    record = RECORDS["run"]
    assert record.spans
    lines = view(record, 200, layers=((None, 0),))
    assert not any(line.startswith("layer 0 · head") for line in lines)
    drawn = view(record, 200, layers=((None, 0),), heads=(0,))
    assert any(line.startswith("layer 0 · head 0") for line in drawn)
