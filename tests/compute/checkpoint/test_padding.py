"""Texts of unequal lengths: padding on either side changes nothing of any text, gets nothing, and counts for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from support.heads_made import Texts, means, require_means
from support.model_families import N_HEADS, PAIRS, calls_of, ids_of, loaded_of, matrices_of, sequence_of, tiny

from mhacli.adapters.hf.inputs import ModelInputs, make_inputs
from mhacli.compute.checkpoint.layers import CheckpointRunRequest
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.results.record.head_statistics import HeadsRequest

LENGTHS, CONTEXTS = (4, 9, 1), (7, 9, 3)
TOLERANCE, OF_T5 = 5e-6, 5e-5
PADDED = ("gpt2", "llama", "mistral", "bert", "bloom", "gemma2", "gpt_oss", "opt", "falcon", "falcon-alibi", "roberta")
CASES = [(name, side) for name in PADDED for side in ("left", "right")] + [(name, "right") for name in ("t5", "bart")]


def texts(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    """Ids that differ from text to text, some of which occur more than once in theirs."""
    return [ids_of(1, n, seed=seed + number)[0].tolist() for number, n in enumerate(lengths)]


def inputs_of_some(name: str, side: Any, *chosen: int) -> ModelInputs:
    """The inputs of some of the texts."""
    own, context = (texts(lengths, seed) for lengths, seed in ((LENGTHS, 10), (CONTEXTS, 20)))
    return make_inputs(
        tiny(name),
        [sequence_of(own[i]) for i in chosen],
        [sequence_of(context[i]) for i in chosen] if name in PAIRS else None,
        side,
        tiny(name).config.pad_token_id or 0,
    )


def columns(side: Any, length: int, longest: int) -> slice:
    """Where a text stands among those of a batch."""
    return slice(longest - length, longest) if side == "left" else slice(length)


@pytest.mark.parametrize(("name", "side"), CASES)
def test_a_text_in_a_batch_has_the_rows_that_it_has_alone(name: str, side: Any) -> None:
    model, tolerance = tiny(name), OF_T5 if name == "t5" else TOLERANCE
    together, _ = calls_of(model, inputs_of_some(name, side, 0, 1, 2).keywords, 3)
    for number in range(3):
        alone, _ = calls_of(model, inputs_of_some(name, side, number).keywords, 1)
        for one, single in zip(together, alone, strict=True):
            own = matrices_of(single)["pattern"][0]
            n_queries, n_keys = own.shape[1:]
            is_encoder = one.name.startswith("encoder.") and name in PAIRS
            real = torch.zeros(3, one.z.shape[2], dtype=torch.bool)
            for row, lengths in zip(real, zip(LENGTHS, CONTEXTS, strict=True), strict=True):
                row[columns(side, lengths[is_encoder], 9)] = True
            pattern = matrices_of(one, real)["pattern"][number].clone()
            rows, keys = columns(side, n_queries, 9), columns(side, n_keys, 9)
            assert (pattern[:, rows, keys] - own).abs().max() < tolerance
            assert (one.z[number][:, rows] - single.z[0]).abs().max() < 10 * tolerance
            pattern[:, rows, keys] = 0
            assert (pattern == 0).all()


@pytest.mark.parametrize(("name", "side"), CASES)
def test_padding_counts_for_no_mean(name: str, side: Any) -> None:
    wanted = CheckpointRunRequest(HeadsRequest(), keep=("pattern",), layers=((None, 1),))
    run = CheckpointRun(loaded_of(tiny(name)), inputs_of_some(name, side, 0, 1, 2), wanted)
    run.run()
    together = run.record()
    assert together.self_check.ok
    assert together.model is not None
    assert together.model.identical_outputs is True
    assert [layer.unverified for layer in together.layers] == [()] * len(together.layers)
    for index in range(len(together.layers)):
        view = together.of_layer(index)
        pattern, allowed = view.arrays["pattern"], np.broadcast_to(view.arrays["allowed"], view.arrays["pattern"].shape)
        n_real = sum(len(text.ids) for text in view.sequences)
        assert allowed.any(axis=-1)[:, 0].sum() == n_real
        if name == "gpt_oss":
            mass = [1 - pattern[:, h].sum() / n_real for h in range(N_HEADS)]
            assert np.abs(np.array(mass) - [head.learned_sink or 0.0 for head in view.heads]).max() < 1e-5
            continue
        for head in (0, N_HEADS - 1):
            said = view.heads[head]
            require_means(said, means(pattern[:, head], allowed[:, head], Texts.of(view), said.offset), 2e-5)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_each_kind_of_layer_leaves_out_the_padding_of_its_own_texts(name: str) -> None:
    """The contexts are of one length here, and as long as the longest text: only the decoder's queries are padded."""
    contexts = [sequence_of(row) for row in texts((9, 9), 30)]
    inputs = make_inputs(tiny(name), [sequence_of(row) for row in texts((4, 9), 40)], contexts, "right", 0)
    run = CheckpointRun(loaded_of(tiny(name)), inputs, CheckpointRunRequest(HeadsRequest(), keep=("pattern",)))
    run.run()
    queries = {"encoder": 18, "decoder": 13, "cross": 13}
    for index, layer in enumerate(run.record().layers):
        pattern = run.record().of_layer(index).arrays["pattern"]
        assert (pattern.sum(axis=-1) > 0.5)[:, 0].sum() == queries[layer.kind]


def test_tokens_on_the_left_of_which_is_padding_have_the_places_of_their_text() -> None:
    own = [sequence_of([5, 6, 7]), sequence_of([8])]
    shifted = make_inputs(tiny("gpt2"), own, None, "left", 0).keywords
    assert {name: tensor.tolist() for name, tensor in shifted.items()} == {
        "input_ids": [[5, 6, 7], [0, 0, 8]],
        "attention_mask": [[1, 1, 1], [0, 0, 1]],
        "position_ids": [[0, 1, 2], [0, 0, 0]],
    }
    behind_padding = make_inputs(tiny("roberta"), own, None, "left", 1).keywords
    assert behind_padding["position_ids"][:, -1].tolist() == [4, 2]  # its table has a row for padding, number 1
    plain = make_inputs(tiny("gpt2"), own, None, "right", 0).keywords
    assert {name: tensor.tolist() for name, tensor in plain.items()} == {
        "input_ids": [[5, 6, 7], [8, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert list(make_inputs(tiny("gpt2"), own[:1], None, "left", 0).keywords) == ["input_ids"]
