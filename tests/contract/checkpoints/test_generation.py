"""Passes with a cache: `generate` within `inspecting` and `mha decode --model` show the rows of one
pass over the whole text.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
from support import checkpoints, some
from support.checkpoints import (
    CAUSAL,
    FAMILIES,
    N_HALF,
    N_HEADS,
    N_LAYERS,
    PAD_ID,
    PAIR,
    PAIRS,
    TEXT,
    WINDOW,
)
from torch import Tensor

import mhacli

Q_LEN, N_NEW = 11, 4
KEPT = ("pattern",)
TOLERANCE = 2e-5


@functools.cache
def speaking(name: str) -> Any:
    """A model with its language head, which never ends by itself."""
    model = checkpoints.from_config(
        FAMILIES[name].kind, FAMILIES[name].config, automatic=PAIR if name in PAIRS else CAUSAL
    )
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD_ID
    return model


def ids(n_texts: int, n: int) -> Tensor:
    return torch.randint(3, 40, (n_texts, n), generator=torch.Generator().manual_seed(1))


def generated(model: Any, rows: Tensor, **choices: Any) -> Tensor:
    return model.generate(rows, max_new_tokens=N_NEW, do_sample=False, **choices)


def whole_pass(model: Any, name: str, rows: Tensor, made: Tensor) -> Any:
    """The record of one pass over all that was generated."""
    texts = (
        {"input_ids": rows, "decoder_input_ids": made[:, :-1]}
        if name in PAIRS
        else {"input_ids": made[:, :-1]}
    )
    with mhacli.inspecting(model, keep=("pattern",)) as seen, torch.no_grad():
        model(**texts, use_cache=False)
    return seen.record


def require_near(record: Any, expected: Any) -> None:
    """The patterns of two records are the same within rounding."""
    names = [name for name in expected.arrays if name.endswith(".pattern")]
    assert names
    for name in names:
        assert np.abs(record.arrays[name] - expected.arrays[name]).max() < TOLERANCE, name


# ------------------------------------------------------------------------- within the caller's code


@pytest.mark.parametrize(
    "name",
    some(
        ("gpt2", "t5", "llama", "mistral", "gpt_oss", "bloom", "gemma2", "falcon"),
        default=("gpt2", "t5", "gpt_oss"),
    ),
)
def test_generation_is_one_record_with_the_rows_of_one_whole_pass(name: str) -> None:
    model, rows = speaking(name), ids(2, Q_LEN)
    plain = generated(model, rows)
    with mhacli.inspecting(model, keep=("pattern",)) as seen:
        assert torch.equal(generated(model, rows), plain)
    (record,), expected = seen.passes, whole_pass(model, name, rows, plain)
    assert record.sequences == expected.sequences
    assert [layer.mask for layer in record.layers] == [layer.mask for layer in expected.layers]
    assert all(layer.verified for layer in record.layers)
    require_near(record, expected)


@pytest.mark.parametrize("name", some(("llama", "gemma2", "bloom", "t5"), default=["llama"]))
def test_a_cache_of_a_fixed_length_gives_the_same_record(name: str) -> None:
    model, rows = speaking(name), ids(2, Q_LEN)
    with mhacli.inspecting(model, keep=("pattern",)) as seen:
        made = generated(model, rows, cache_implementation="static")
    assert all(layer.verified for layer in seen.record.layers)
    require_near(seen.record, whole_pass(model, name, rows, made))


@pytest.mark.parametrize(
    "choices", [{}, {"cache_implementation": "static"}], ids=["growing", "fixed"]
)
def test_texts_with_padding_on_the_left_go_on_at_their_ends(choices: dict[str, Any]) -> None:
    model, rows = speaking("llama"), ids(2, Q_LEN)
    mask = torch.ones_like(rows)
    mask[1, :3] = 0
    with mhacli.inspecting(model, keep=("pattern",)) as seen:
        made = generated(model, rows, attention_mask=mask, **choices)
    record = seen.record
    assert [list(text.ids) for text in record.sequences] == [
        made[0, :-1].tolist(),
        made[1, 3:-1].tolist(),
    ]
    assert record.config.padding == "left"
    assert all(layer.verified for layer in record.layers)
    alone = whole_pass(model, "llama", rows[1:, 3:], made[1:, 3:])
    for layer in range(N_LAYERS):
        pattern = record.arrays[f"layers.{layer}.pattern"][1]
        assert (
            np.abs(pattern[:, 3:, 3:] - alone.arrays[f"layers.{layer}.pattern"][0]).max()
            < TOLERANCE
        )
        assert (pattern[:, :, :3] == 0).all()


def test_a_text_that_goes_on_by_hand_is_one_record_and_the_next_text_another() -> None:
    model, rows = speaking("gpt2"), ids(1, 9)
    with mhacli.inspecting(model, keep=("pattern",)) as seen, torch.no_grad():
        for _ in range(2):
            past = model(rows[:, :4], use_cache=True).past_key_values
            past = model(rows[:, 4:6], past_key_values=past).past_key_values
            model(rows[:, 6:], past_key_values=past)
    assert [record.sequences[0].ids for record in seen.passes] == [tuple(rows[0].tolist())] * 2
    expected = whole_pass(model, "gpt2", rows, torch.cat([rows, rows[:, :1]], dim=1))
    for record in seen.passes:
        require_near(record, expected)


@pytest.mark.parametrize("name", some(("gpt2", "llama", "gemma2", "bloom"), default=["gpt2"]))
@pytest.mark.parametrize("cache", ["growing", "fixed"])
def test_of_a_cache_that_was_filled_before_the_keys_are_positions(name: str, cache: str) -> None:
    """All that is counted from the first key, too, is that of the last queries of one whole
    pass.
    """
    from transformers import StaticCache

    model, rows, n = speaking(name), ids(2, Q_LEN), 4
    past = StaticCache(model.config, max_cache_len=32) if cache == "fixed" else None
    past = model(rows[:, :n], use_cache=True, past_key_values=past).past_key_values
    with mhacli.inspecting(model, keep=KEPT) as seen, torch.no_grad():
        past = model(rows[:, n:8], past_key_values=past).past_key_values
        model(rows[:, 8:], past_key_values=past)
    (record,), expected = (
        seen.passes,
        whole_pass(model, name, rows, torch.cat([rows, rows[:, :1]], dim=1)),
    )
    assert record.sequences[1].ids == tuple(rows[1, n:].tolist())
    pattern = record.pattern(layer=1, batch=1)
    assert pattern.query_tokens == tuple(map(str, rows[1, n:].tolist()))
    assert pattern.key_tokens == ("x0", "x1", "x2", "x3", *pattern.query_tokens)
    for index, layer in enumerate(record.layers):
        assert layer.verified
        actual, whole = (each.arrays for each in (record.of_layer(index), expected.of_layer(index)))
        assert np.abs(actual["pattern"] - whole["pattern"][:, :, n:]).max() < TOLERANCE
        for site in ("entropy", "distance", "sink", "participation"):
            assert np.abs(actual[site] - whole[site][:, :, n:]).max() < 10 * TOLERANCE, site
        distances = np.arange(Q_LEN) - np.arange(n, Q_LEN)[:, None]
        for head in record.of_layer(index).heads:
            weights = whole["pattern"][:, head.head, n:]
            for statistic, kept in (("diagonal", 0), ("previous", -1)):
                assert getattr(head, statistic) == pytest.approx(
                    weights[:, distances == kept].mean(), abs=TOLERANCE
                )
            assert head.near == pytest.approx(
                (weights * (abs(distances) <= 8)).sum(axis=-1).mean(), abs=TOLERANCE
            )


def test_a_sink_of_each_head_is_none_of_as_many_queries_behind_a_cache() -> None:
    model, rows = speaking("gpt_oss"), ids(1, 4 + N_HEADS)
    past = model(rows[:, :4], use_cache=True).past_key_values
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(rows[:, 4:], past_key_values=past)
    expected = whole_pass(model, "gpt_oss", rows, torch.cat([rows, rows[:, :1]], dim=1))
    for index in range(N_LAYERS):
        actual, whole = (
            each.of_layer(index).arrays["distance"] for each in (seen.record, expected)
        )
        assert np.abs(actual - whole[:, :, 4:]).max() < 10 * TOLERANCE


def test_a_text_that_goes_on_from_a_cache_is_another_than_the_one_before() -> None:
    model, rows = speaking("gpt2"), ids(1, 9)
    past = model(rows[:, :4], use_cache=True).past_key_values
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(rows)
        model(rows[:, 4:], past_key_values=past)
    assert [len(record.sequences[0].ids) for record in seen.passes] == [9, 5]
    assert seen.notes == ()


@pytest.mark.real
def test_a_cache_with_a_window_that_has_lost_its_first_keys_is_named() -> None:
    model, rows = speaking("mistral"), ids(1, 9)
    past = model(rows[:, :7], use_cache=True).past_key_values
    with mhacli.inspecting(model) as seen, torch.no_grad():
        model(rows[:, 7:], past_key_values=past)
    with pytest.raises(mhacli.MhaError, match="window"):
        _ = seen.record


@pytest.mark.real
def test_a_cache_that_beam_search_reorders_is_named_with_the_way_out() -> None:
    model = speaking("llama")
    with mhacli.inspecting(model) as seen:
        generated(model, ids(2, Q_LEN), num_beams=3)
    with pytest.raises(mhacli.MhaError, match="beam") as caught:
        _ = seen.record
    assert "use_cache=False" in str(caught.value.hint)
    with mhacli.inspecting(model) as seen:
        generated(model, ids(2, Q_LEN), num_beams=3, use_cache=False)
    assert len(seen.passes) == N_NEW


def test_a_layer_by_itself_reads_its_own_part_of_the_cache() -> None:
    model, rows = speaking("llama"), ids(1, Q_LEN)
    with mhacli.inspecting(model.model.layers[1], keep=("pattern",)) as seen:
        made = generated(model, rows)
    expected = whole_pass(model, "llama", rows, made)
    actual = seen.record.pattern(layer=0)
    assert np.abs(actual.values - expected.pattern(layer=1).values).max() < TOLERANCE
    assert actual.query_tokens == tuple(f"x{i}" for i in range(Q_LEN + N_NEW - 1))


def test_what_is_copied_of_a_generated_text_stays_within_the_limit() -> None:
    model, layer = speaking("gpt2"), 4 * 4 * (Q_LEN + N_NEW) * 48  # q, k, v and z in float32
    with mhacli.inspecting(model, keep_limit=2 * layer) as seen:
        generated(model, ids(1, Q_LEN))
    record = seen.record
    assert 1 <= len(record.layers) <= 2
    assert len(record.layers) + len(record.model.without) == N_LAYERS


# ------------------------------------------------------------------------------------- `mha decode`

DECODED = ("gpt2", "llama", "mistral", "t5")


def decode(mha: Any, name: str, *words: str, **choices: Any) -> Any:
    """`mha decode` of layer 1 of a checkpoint."""
    context = ("--context", "a dog on the mat") if name == "t5" else ()
    folder = checkpoints.folder(name)
    layer = ("--layer", "1")
    return mha("decode", "--model", folder, TEXT, *context, *layer, *words, "--json", **choices)


def row(name: str) -> list[int]:
    """The ids that are decoded."""
    own = checkpoints.tokenizer_of(name)(TEXT, add_special_tokens=name != "t5")["input_ids"]
    return [PAD_ID, *own] if name == "t5" else list(own)


@pytest.mark.parametrize(
    ("name", "prompt_len"),
    [
        ("gpt2", 0),
        ("mistral", 4),
        *(pytest.param(name, 23, marks=pytest.mark.real) for name in DECODED),
        *(pytest.param(name, 4, marks=pytest.mark.real) for name in DECODED if name != "mistral"),
    ],
)
def test_the_rows_of_the_steps_are_those_of_one_pass_over_all(
    name: str, prompt_len: int, mha: Any
) -> None:
    document = decode(mha, name, "--prompt-len", str(prompt_len)).json
    n, steps = len(row(name)), [step["cache"] for step in document["trace"]]
    assert document["sequences"][0]["ids"] == row(name)
    context, ids = (
        checkpoints.tokenizer_of("t5")("a dog on the mat")["input_ids"],
        torch.tensor([row(name)]),
    )
    given = (
        {"input_ids": torch.tensor([context]), "decoder_input_ids": ids}
        if name == "t5"
        else {"input_ids": ids}
    )
    with torch.no_grad():
        outputs = checkpoints.model(name, attn_implementation="eager")(
            **given, use_cache=False, output_attentions=True
        )
    pattern = (outputs.decoder_attentions if name == "t5" else outputs.attentions)[1].numpy()
    (layer,) = document["layers"]
    assert (layer["layer"], layer["kind"]) == (1, "decoder" if name == "t5" else "self")
    actual = np.array(layer["pattern"])
    assert np.abs(actual - pattern).max() < 5e-5
    assert ((actual == 0) == (pattern == 0)).all()
    assert [step["phase"] for step in steps] == ["prefill"] * bool(prompt_len) + ["decode"] * (
        n - prompt_len
    )
    assert [step["start"] for step in steps] == [0] * bool(prompt_len) + [*range(prompt_len, n)]
    lengths = [step["n_past"] + step["k_shape"][2] for step in steps]
    window = WINDOW if name == "mistral" else n
    assert lengths == [prompt_len] * bool(prompt_len) + [
        min(i + 1, window) for i in range(prompt_len, n)
    ]
    assert document["self_check"]["ok"]
    assert (
        document["self_check"]["max_abs_error"]
        == max(step["max_abs_difference"] for step in steps)
        < 5e-5
    )
    names = [name for step in steps for name in step["tokens"][0]]
    assert names == document["sequences"][0]["tokens"]


@pytest.mark.parametrize("name", DECODED)
def test_a_step_counts_what_it_reads_and_appends(name: str, mha: Any) -> None:
    document = decode(mha, name, "--prompt-len", "4").json
    n_kv_heads = FAMILIES[name].n_kv_heads
    d_head = 12 if name == "mistral" else 8
    token = n_kv_heads * 2 * d_head * 4
    for step in (step["cache"] for step in document["trace"]):
        n_new = step["q_shape"][2]
        assert step["q_shape"] == [1, N_HEADS, n_new, d_head]
        assert step["k_shape"] == step["v_shape"] == [1, n_kv_heads, n_new, d_head]
        assert step["n_visible"] == [step["n_past"] + n_new]
        assert step["appended_bytes"] == n_new * token
        assert step["read_bytes"] == step["cache_bytes"] == (step["n_past"] + n_new) * token
    summary, n_layers = document["decoding"], N_HALF if name == "t5" else N_LAYERS
    weights = 0
    for part, numbers in checkpoints.model(name, "AutoModel").named_parameters():
        if not part.startswith("encoder."):
            weights += 4 * (numbers[0] if re.search("wpe|position", part) else numbers).numel()
    assert (summary["token_bytes"], summary["weight_bytes"]) == (n_layers * token, weights)
    assert summary["full_token_bytes"] == n_layers * N_HEADS * 2 * d_head * 4
    assert summary["crossing_len"] == pytest.approx(weights / (n_layers * token))
    assert summary["prompt_len"] == 4


@pytest.mark.parametrize(("name", "is_named"), [("gpt2", False), ("llama", True)])
def test_no_length_is_named_that_has_more_tokens_than_the_model_has_positions(
    name: str, is_named: bool, mha: Any
) -> None:
    crossing = decode(mha, name).json["decoding"]["crossing_len"]
    assert (crossing < FAMILIES[name].config.get("n_positions", 2048)) == is_named
    screen = mha("decode", "--model", checkpoints.folder(name), TEXT, "--layer", "1").stdout
    assert (f" {crossing:,.0f} " in screen) == is_named


@pytest.mark.real
def test_the_cache_of_two_texts_outweighs_the_weights_at_half_the_length(mha: Any) -> None:
    alone, both = (decode(mha, "gpt2", *more).json["decoding"] for more in ((), ("--text", TEXT)))
    assert both["crossing_len"] == pytest.approx(alone["crossing_len"] / 2)
    assert both["token_bytes"] == alone["token_bytes"]


@pytest.mark.parametrize(
    ("name", "words", "code", "mentions"),
    [
        ("bert", ("decode",), "not-causal", ("encoder",)),
        ("t5", ("decode", "--layer", "encoder.1"), "not-causal", ("encoder",)),
        ("t5", ("decode", "--layer", "cross.1"), "not-causal", ("EncDecAttention",)),
        ("gpt2", ("decode", "a dog"), "usage", ("length",)),
        ("gpt2", ("decode", "--keep-limit", "1000"), None, ("--keep-limit", "1000")),
    ],
    ids=["encoder", "encoder of a pair", "cross", "two lengths", "limit"],
)
def test_what_has_no_steps_is_refused(
    name: str, words: tuple[str, ...], code: str | None, mentions: Any, mha: Any
) -> None:
    ended = mha(*words, TEXT, "--model", checkpoints.folder(name), "--json", code=(1, 2))
    assert code is None or ended.error["code"] == code
    assert ended.missing(*mentions) == []
