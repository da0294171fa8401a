"""The mask alone: counts and density against loops, and block by block for long texts."""

from __future__ import annotations

import json

import pytest
import torch
from support.variant_cases import (
    CONTEXT_DOCUMENTS,
    CONTEXTS,
    DOCUMENTS,
    MASKS,
    TEXTS,
    Where,
    side_of,
)

from mhacli.compute.layer import trace as study
from mhacli.compute.layer.trace import MAX_BLOCKS, MAX_CELLS, summarise_mask
from mhacli.errors import MhaError
from mhacli.render.run.mask import mask_document
from mhacli.requests.layer import layer_request
from mhacli.spec.config import Config
from mhacli.text.encode import Encoded, encode


def surveyed(texts=TEXTS, context=(), **choices):
    config = Config(**{"device": "cpu"} | choices).resolved()
    return summarise_mask(layer_request(encode(texts, config, context=context), config))


def long_text(*lengths, **choices):
    """Texts of so many tokens, without a tokenizer."""
    config = Config(**{"device": "cpu", "random": (1, max(lengths))} | choices).resolved()
    one = encode((), config)
    sequences = tuple(
        type(one.sequences[0])("", s.tokens[:n], s.ids[:n], s.offsets[:n])
        for n, s in ((n, one.sequences[0]) for n in lengths)
    )
    return Encoded(sequences, None, one.vocabulary), config


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_every_count_agrees_with_loops_over_the_cells(name, packed, padding):
    choices, rule = MASKS[name]
    found = surveyed(documents="|" if packed else None, padding=padding, **choices)
    side = side_of([s.ids for s in found.sequences], DOCUMENTS, padding, packed)
    for b, of_sequence in enumerate(found.masks):
        cells = [
            [
                side.real[b][i]
                and side.real[b][j]
                and side.documents[b][i] == side.documents[b][j]
                and rule(Where(i, j, side.places[b][j]))
                for j in range(5)
            ]
            for i in range(5)
        ]
        assert of_sequence.visible_per_query == tuple(map(sum, cells))
        assert of_sequence.block_counts == tuple(tuple(map(int, row)) for row in cells)
        assert (of_sequence.n_cells, of_sequence.block) == (25, 1)
        assert of_sequence.n_visible == sum(map(sum, cells))
        assert of_sequence.density == sum(map(sum, cells)) / 25


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_context_has_its_own_axis(packed, padding):
    found = surveyed(context=CONTEXTS, documents="|" if packed else None, padding=padding)
    sides = [
        side_of([s.ids for s in family], of_family, padding, packed)
        for family, of_family in ((found.sequences, DOCUMENTS), (found.context, CONTEXT_DOCUMENTS))
    ]
    for b, of_sequence in enumerate(found.masks):
        queries, keys = ([*zip(side.real[b], side.documents[b], strict=True)] for side in sides)
        cells = tuple(tuple(int(q[0] and k[0] and q[1] == k[1]) for k in keys) for q in queries)
        assert of_sequence.block_counts == cells
        assert of_sequence.n_cells == 5 * 7


def test_by_hand_the_density_of_causal_masks_and_windows():
    encoded, config = long_text(100, causal=True)
    assert summarise_mask(layer_request(encoded, config)).masks[0].density == 0.505  # 5050 of 10,000
    encoded, config = long_text(100, window=(3, 0))
    assert summarise_mask(layer_request(encoded, config)).masks[0].n_visible == 1 + 2 + 3 + 97 * 4
    encoded, config = long_text(100, window=(0, 0), sink=2)
    assert summarise_mask(layer_request(encoded, config)).masks[0].n_visible == 100 * 3 - 2


def test_the_rules_are_reported_in_words():
    assert surveyed(window=(2, 1), sink=1, prefix=3, documents="|").rules == (
        "no token sees a later one",
        "keys from 2 left to 1 right of the query, and the first token",
        "except that all see the first 3 tokens",
        "no token sees another document",
        "padding is never seen",
    )
    assert surveyed(("the cat",)).rules == ()


@pytest.mark.parametrize(("length", "block"), [(256, 1), (257, 2), (512, 2), (513, 3), (1000, 4)])
def test_blocks_of_a_long_text_add_up_to_the_counts_of_its_queries(length, block):
    window = (37, 0)
    encoded, config = long_text(length, length - 5, window=window, causal=True, padding="left")
    for own, of_sequence in zip(
        (length, length - 5), summarise_mask(layer_request(encoded, config)).masks, strict=True
    ):
        first, n_blocks = length - own, -(-length // block)
        cells = [[int(first <= j and i - 37 <= j <= i and i >= first) for j in range(length)] for i in range(length)]
        assert of_sequence.block == block
        assert n_blocks <= MAX_BLOCKS
        assert of_sequence.visible_per_query == tuple(map(sum, cells))
        assert len(of_sequence.block_counts) == n_blocks
        for r in (0, 1, n_blocks // 2, n_blocks - 1):
            rows = cells[r * block : (r + 1) * block]
            expected = tuple(sum(sum(row[c * block : (c + 1) * block]) for row in rows) for c in range(n_blocks))
            assert of_sequence.block_counts[r] == expected
        assert sum(map(sum, of_sequence.block_counts)) == of_sequence.n_visible


def asked(monkeypatch, encoded, config):
    """The survey, and how many cells the mask was asked for at each time."""
    sizes = []
    make = study.make_mask

    def spied(*given):
        allowed = make(*given)

        def answer(q_idx, k_idx):
            sizes.append(len(encoded.sequences) * len(q_idx) * len(k_idx))
            return allowed(q_idx, k_idx)

        return answer

    monkeypatch.setattr(study, "make_mask", spied)
    return summarise_mask(layer_request(encoded, config)), sizes


@pytest.mark.parametrize(("lengths", "choices"), [((4_500,), {}), ((2_500, 2_000, 1_500), {"sink": 4})])
def test_the_mask_of_a_long_text_is_never_evaluated_all_at_once(monkeypatch, lengths, choices):
    encoded, config = long_text(*lengths, window=(512, 0), causal=True, **choices)
    found, sizes = asked(monkeypatch, encoded, config)
    assert sum(sizes) == len(lengths) * lengths[0] ** 2
    assert max(sizes) <= 1 << 22
    n = lengths[0]
    of_window = 513 * (n - 512) + 512 * 513 // 2
    of_sinks = sum(max(0, min(4, i - 512)) for i in range(n)) if choices else 0
    assert found.masks[0].n_visible == of_window + of_sinks


@pytest.mark.parametrize("lengths", [(100_000,), (20_000,) * 40])
def test_longer_texts_and_larger_batches_are_evaluated_by_one_row_of_blocks_at_a_time(monkeypatch, lengths):
    encoded, config = long_text(*lengths, window=(8, 0))

    class Enough(Exception):
        pass

    def answer(q_idx, k_idx):
        assert len(q_idx) <= -(-lengths[0] // MAX_BLOCKS)
        raise Enough

    monkeypatch.setattr(study, "make_mask", lambda *_: answer)
    with pytest.raises(Enough):
        summarise_mask(layer_request(encoded, config))


def test_more_cells_than_anyone_waits_for_are_refused_before_the_first():
    encoded, config = long_text(*(20_000,) * 43, window=(8, 0))
    with pytest.raises(MhaError) as caught:
        summarise_mask(layer_request(encoded, config))
    n_cells = 43 * 20_000**2
    assert n_cells > MAX_CELLS == 2**34
    assert caught.value.message == f"the mask has {n_cells:,} cells; at most 17,179,869,184 are drawn"
    assert caught.value.hint == "--max-tokens takes a shorter text, --random a smaller shape"


def test_the_document_is_json_with_every_number_of_the_survey():
    found = surveyed(window=(1, 0), documents="|", context=())
    document = json.loads(mask_document(found, ("mha", "trace", "--mask")))
    assert document["schema"] == "mha.mask/1"
    assert document["command"] == ["mha", "trace", "--mask"]
    assert document["config"]["window"] == [1, 0]
    assert document["context"] is None
    assert document["rules"] == list(found.rules)
    assert [s["tokens"] for s in document["sequences"]] == [list(s.tokens) for s in found.sequences]
    for told, of_sequence in zip(document["masks"], found.masks, strict=True):
        assert told == {
            "n_visible": of_sequence.n_visible,
            "density": of_sequence.density,
            "visible_per_query": list(of_sequence.visible_per_query),
            "n_cells": 25,
            "block": 1,
            "block_counts": [list(row) for row in of_sequence.block_counts],
        }


def test_the_document_of_a_context_names_its_tokens():
    document = json.loads(mask_document(surveyed(context=CONTEXTS), ()))
    assert [s["tokens"] for s in document["context"]][1] == ["the", "mat"]


def test_a_device_that_is_not_there_is_reported():
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(MhaError) as caught:
        surveyed(device="cuda")
    assert caught.value.message.startswith("--device cuda is not available: ")
