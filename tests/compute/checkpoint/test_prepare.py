"""A look at a checkpoint is prepared: its texts, its chat, its spans, and what it says itself when it is to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from support.checkpoints_saved import (
    ANSWER,
    BEGIN_ID,
    END_ID,
    N_POSITIONS,
    N_VOCABULARY,
    PAD_ID,
    STORY,
    TEMPLATE,
    TEXT,
    Checkpoints,
    attentions,
    likeliest,
    reference,
    request_of,
    tokenizer_of,
)

from mhacli.attention import masks
from mhacli.attention.tiled.scores import ComputedPattern
from mhacli.attention.tiled.statistics import Between, StatisticsRequest, summarise, with_sink
from mhacli.attention.tiled.tiles import reduce_tiles
from mhacli.compute.checkpoint import prepare
from mhacli.compute.checkpoint.prepare import prepare_checkpoint
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError, UsageError
from mhacli.results.record.record import Generated
from mhacli.spec.config import DEFAULT_MAX_TOKENS
from mhacli.text.spans import Message

HINT_SPAN = "--max-tokens may have cut it off"
PENALTIES: dict[str, dict[str, Any]] = {
    "a penalty": {"repetition_penalty": 9.0},
    "several answers": {"num_return_sequences": 2, "num_beams": 4, "length_penalty": -2.0},
    "samples": {"do_sample": True, "temperature": 5.0, "top_k": 0},
    "forced tokens": {"forced_bos_token_id": 77, "forced_eos_token_id": 78, "suppress_tokens": list(range(100, 200))},
    "lengths": {"min_new_tokens": 9, "max_length": 3, "no_repeat_ngram_size": 1},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights may be read."""

    def never(*given: Any, **named: Any) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(prepare, "load_model", never)


def prepared(folder: str, *texts: str, **choices: Any) -> CheckpointRun:
    return prepare_checkpoint(request_of(folder, *texts, **choices))[0]


def notes_of(folder: str, *texts: str, **choices: Any) -> tuple[str, ...]:
    return tuple(prepare_checkpoint(request_of(folder, *texts, **choices))[1])


def refusal(folder: str, *texts: str, **choices: Any) -> MhaError:
    with pytest.raises(MhaError) as caught:
        prepare_checkpoint(request_of(folder, *texts, **choices))
    return caught.value


def ids_of(name: str, text: str) -> list[int]:
    return list(tokenizer_of(name)(text)["input_ids"])


# ---------------------------------------------------------------------------------------------------------- what it goes on with


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_what_is_generated_is_the_likeliest_token_of_a_full_pass_each_time(name: str, checkpoints: Checkpoints) -> None:
    folder, ids = checkpoints.of(name), ids_of(name, TEXT)
    run = prepared(folder, TEXT, n_generated=7)
    expected = likeliest(folder, ids, 7)
    sequence = run.inputs.sequences[0]
    assert list(sequence.ids) == ids + expected
    assert run.inputs.keywords["input_ids"].tolist() == [ids + expected]
    assert run.generated == Generated((len(ids),), 7, 7)
    assert sequence.text.startswith(TEXT)
    assert sequence.offsets[len(ids)][0] == len(TEXT)
    assert type(run.loaded.model).__name__ == type(reference(folder, "AutoModel")).__name__


@pytest.mark.parametrize("settings", PENALTIES)
def test_the_settings_that_a_checkpoint_brings_for_generation_change_nothing(
    settings: str, checkpoints: Checkpoints
) -> None:
    folder = checkpoints.of("llama", generation=PENALTIES[settings])
    ids = ids_of("llama", TEXT)
    expected = likeliest(folder, ids, 6)
    model = reference(folder)
    given = model.generation_config.to_dict()
    assert given.items() >= PENALTIES[settings].items()
    run = prepared(folder, TEXT, n_generated=6)
    assert list(run.inputs.sequences[0].ids) == ids + expected
    assert run.generated == Generated((len(ids),), 6, 6)


@pytest.mark.parametrize("settings", ["a penalty", "forced tokens"])
def test_such_settings_would_have_changed_it(settings: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints.of("llama", generation=PENALTIES[settings])
    ids = ids_of("llama", TEXT)
    other = reference(folder).generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=PAD_ID)
    assert other[0, len(ids) :].tolist() != likeliest(folder, ids, 6)


def test_the_token_that_ends_a_text_is_the_last(checkpoints: Checkpoints) -> None:
    ids = ids_of("llama", ANSWER)
    free = likeliest(checkpoints.of("llama"), ids, 6)
    assert free[2] not in free[:2]
    folder = checkpoints.of("llama", generation={"eos_token_id": free[2]})
    run = prepared(folder, ANSWER, n_generated=6)
    assert list(run.inputs.sequences[0].ids) == ids + free[:3]
    assert run.generated == Generated((len(ids),), 3, 3)


def test_a_pair_goes_on_where_the_decoder_is(checkpoints: Checkpoints) -> None:
    folder, encoder = checkpoints.of("t5"), ids_of("t5", TEXT)
    run = prepared(folder, TEXT, n_generated=5)
    assert list(run.inputs.sequences[0].ids) == [PAD_ID, *likeliest(folder, [PAD_ID], 5, encoder=encoder)]
    assert run.inputs.context is not None
    assert list(run.inputs.context[0].ids) == encoder
    answer = [PAD_ID, *ids_of("gpt2", ANSWER)]
    later = prepared(folder, ANSWER, context=(TEXT,), n_generated=3)
    assert list(later.inputs.sequences[0].ids) == [*answer, *likeliest(folder, answer, 3, encoder=encoder)]
    assert later.generated == Generated((len(answer),), 3, 3)


def test_generation_takes_one_text_that_leaves_room(checkpoints: Checkpoints) -> None:
    folder = checkpoints.of("gpt2")
    several = refusal(folder, TEXT, ANSWER, n_generated=3)
    assert (several.message, several.hint) == (
        "--generate continues one text, and 2 are given",
        "give each text in a run of its own",
    )
    n = len(ids_of("gpt2", TEXT))
    long = refusal(folder, TEXT, n_generated=N_POSITIONS)
    assert long.message == (
        f"{n} tokens and {N_POSITIONS} generated ones are more than the {N_POSITIONS} positions of {folder}"
    )
    assert long.hint == f"--generate {N_POSITIONS - n} fits"
    assert prepared(folder, TEXT, n_generated=N_POSITIONS - n).generated is not None


# ---------------------------------------------------------------------------------------------------------------- the texts


def test_a_text_alone_is_the_encoders_and_the_decoder_begins_with_its_own_token(checkpoints: Checkpoints) -> None:
    run = prepared(checkpoints.of("t5"), TEXT, ANSWER)
    assert run.inputs.context is not None
    assert [list(text.ids) for text in run.inputs.context] == [ids_of("t5", TEXT), ids_of("t5", ANSWER)]
    assert [text.ids[-1] for text in run.inputs.context] == [END_ID, END_ID]
    assert [text.ids for text in run.inputs.sequences] == [(PAD_ID,), (PAD_ID,)]


@pytest.mark.parametrize(("begin", "named"), [(None, "pad_token_id, 0"), (BEGIN_ID, f"bos_token_id, {BEGIN_ID}")])
def test_a_decoder_whose_config_names_no_token_to_start_with_starts_as_the_family_does_and_says_so(
    checkpoints: Checkpoints, begin: int | None, named: str
) -> None:
    folder = checkpoints.of("t5", decoder_start_token_id=None, bos_token_id=begin)
    run = prepared(folder, TEXT, n_generated=2)
    first = PAD_ID if begin is None else begin
    assert run.inputs.sequences[0].ids[0] == first
    encoder = ids_of("t5", TEXT)
    assert list(run.inputs.sequences[0].ids) == [first, *likeliest(folder, [first], 2, encoder=encoder)]
    said = f"the decoder starts with {named}, for the config names no decoder_start_token_id"
    assert notes_of(folder, TEXT) == notes_of(folder, ANSWER, context=(TEXT,)) == (said,)
    assert notes_of(checkpoints.of("t5"), TEXT) == ()


def test_a_model_that_reads_no_vocabulary_is_refused_before_its_weights_are_read(
    checkpoints: Checkpoints, unloaded: None, tmp_path: Path
) -> None:
    config = {"model_type": "canine", "hidden_size": 48, "num_attention_heads": 4}
    made = Path(checkpoints.of("llama"))
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    fault = refusal(str(tmp_path), TEXT)
    assert fault.message == "the model has no vocabulary and reads no text (family canine)"
    assert (fault.exit_code, fault.code) == (2, "usage")


def test_what_a_decoder_has_said_begins_with_that_token_and_does_not_end(checkpoints: Checkpoints) -> None:
    folder, own = checkpoints.of("t5"), ids_of("gpt2", ANSWER)
    run = prepared(folder, ANSWER, "the dog", context=(TEXT,))
    assert run.inputs.context is not None
    assert [list(text.ids) for text in run.inputs.context] == [ids_of("t5", TEXT)] * 2
    assert list(run.inputs.sequences[0].ids) == [PAD_ID, *own]
    assert END_ID not in run.inputs.sequences[0].ids
    begun = prepared(folder, "<pad>" + ANSWER, context=(TEXT,))
    assert list(begun.inputs.sequences[0].ids) == [PAD_ID, *own]


def test_a_context_is_given_once_or_for_each_text_and_not_without_an_encoder(checkpoints: Checkpoints) -> None:
    fault = refusal(checkpoints.of("t5"), ANSWER, ANSWER, ANSWER, context=(TEXT, TEXT))
    assert isinstance(fault, UsageError)
    assert "--context" in fault.message
    alone = refusal(checkpoints.of("gpt2"), ANSWER, context=(TEXT,))
    assert "--context" in alone.message


def test_a_text_beyond_the_positions_is_refused_before_the_weights_are_read(
    checkpoints: Checkpoints, unloaded: None
) -> None:
    folder, text = checkpoints.of("gpt2"), STORY.read_text()[:400]
    n = len(ids_of("gpt2", text))
    fault = refusal(folder, TEXT, text)
    assert fault.message == f"text 1 has {n} tokens, more than the {N_POSITIONS} positions of {folder}"
    assert fault.hint == f"--max-tokens {N_POSITIONS} takes the first {N_POSITIONS}"
    assert fault.code == "too-large"


def test_a_text_beyond_what_is_looked_at_unasked_is_refused(checkpoints: Checkpoints, unloaded: None) -> None:
    fault = refusal(checkpoints.of("t5"), "a" * (DEFAULT_MAX_TOKENS + 5), tokenizer="byte")
    assert fault.message == f"the text has {DEFAULT_MAX_TOKENS + 5} tokens, above the limit of {DEFAULT_MAX_TOKENS}"
    n = DEFAULT_MAX_TOKENS
    assert fault.hint == f"--max-tokens {n} takes the first {n}; --max-tokens {n + 5} takes all"


def test_a_limit_takes_the_first_tokens_and_says_so(checkpoints: Checkpoints) -> None:
    folder, long = checkpoints.of("gpt2"), STORY.read_text()[:400]
    run, notes = prepare_checkpoint(request_of(folder, long, ANSWER, max_tokens=N_POSITIONS))
    ids = ids_of("gpt2", long)
    assert list(run.inputs.sequences[0].ids) == ids[:N_POSITIONS]
    assert list(run.inputs.sequences[1].ids) == ids_of("gpt2", ANSWER)
    assert notes == (f"only the first {N_POSITIONS} of the {len(ids)} tokens of text 0 are used (--max-tokens)",)


def test_an_id_beyond_the_vocabulary_is_refused_before_the_weights_are_read(
    checkpoints: Checkpoints, unloaded: None
) -> None:
    folder = checkpoints.of("gpt2", vocab_size=280)
    largest = max(ids_of("gpt2", TEXT))
    assert 280 <= largest < N_VOCABULARY
    fault = refusal(folder, TEXT)
    assert fault.message == f"token id {largest} is outside of the vocabulary of {folder}, which has 280 entries"
    assert fault.hint == "use the tokenizer of the model: leave out --tokenizer"
    assert prepare.make_texts(request_of(folder, "e"), *parts_of(folder)).sequences[0].ids < (280,)


def parts_of(folder: str) -> tuple[Any, Any]:
    checkpoint = request_of(folder).checkpoint
    assert checkpoint is not None
    return prepare.load_tokenizer(checkpoint, None), prepare.load_config(checkpoint)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_beyond_the_vocabulary_is_another_token_that_nobody_sees(side: Any, checkpoints: Checkpoints) -> None:
    folder = checkpoints.of("gpt2", tokenizer={"pad_token": "<beyond>"})
    run = prepared(folder, TEXT, ANSWER, padding=side)
    n, own = len(ids_of("gpt2", TEXT)), ids_of("gpt2", ANSWER)
    padding = [0] * (n - len(own))
    assert run.inputs.side == side
    assert run.inputs.keywords["input_ids"][1].tolist() == ([*padding, *own] if side == "left" else [*own, *padding])
    run.run()
    assert run.record().self_check.ok
    assert prepared(folder, TEXT, n_generated=2).generated == Generated((n,), 2, 2)


def test_the_beginning_of_a_text_is_told_where_it_is_not_what_the_tokenizer_makes(checkpoints: Checkpoints) -> None:
    folder = checkpoints.of("llama")
    assert notes_of(folder, TEXT) == ()
    assert notes_of(folder, "<s>" + TEXT) == (
        "the text begins with '<s>' twice: the text or chat template brings one and the tokenizer adds another",
    )
    assert notes_of(folder, chat=(Message("user", "hi"),)) == (
        f"the text begins without the beginning-of-text token (id {BEGIN_ID}), which the model's tokenizer defines and "
        "usually begins with: heads that usually attend to it will attend elsewhere",
    )
    assert notes_of(checkpoints.of("gpt2"), TEXT) == ()


# ---------------------------------------------------------------------------------------------------------- chats and spans

CHAT = (Message("system", "be the cat"), Message("user", "is it on the mat?"), Message("assistant", "yes, the cat sat"),
        Message("user", "the user is on it"))  # fmt: skip


def overlapping(text: str, *ranges: tuple[int, int]) -> tuple[int, ...]:
    """The tokens of a text that share a character with a range, by the offsets of transformers' tokenizer."""
    offsets = tokenizer_of("gpt2")(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return tuple(i for i, (a, b) in enumerate(offsets) if any(a < end and start < b for start, end in ranges))


def test_a_chat_is_what_its_template_makes_of_it_and_roles_are_their_tokens(checkpoints: Checkpoints) -> None:
    rendered = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in CHAT)
    assert "m['content']" in TEMPLATE
    run = prepared(checkpoints.of("gpt2", n_positions=128), chat=CHAT, spans=("system,user", "user2", "assistant"))
    sequence = run.inputs.sequences[0]
    assert sequence.text == rendered
    assert list(sequence.ids) == tokenizer_of("gpt2")(rendered, add_special_tokens=False)["input_ids"]
    places = [rendered.index("\n" + m.content) + 1 for m in CHAT]
    own = [(place, place + len(m.content)) for place, m in zip(places, CHAT, strict=True)]
    expected = {"system": [own[0]], "user": [own[1], own[3]], "user2": [own[3]], "assistant": [own[2]]}
    assert {span.name: span.tokens for span in run.wanted.spans} == {
        name: (overlapping(rendered, *ranges),) for name, ranges in expected.items()
    }


def test_spans_of_characters_and_expressions_are_the_tokens_that_they_touch(checkpoints: Checkpoints) -> None:
    spans = ("begin=:6", "middle=9:17", "the=/the/", "end=20:")
    run = prepared(checkpoints.of("gpt2"), TEXT, TEXT[4:], spans=spans)

    def ranges(text: str) -> dict[str, list[tuple[int, int]]]:
        each = [(i, i + 3) for i in range(len(text)) if text.startswith("the", i)]
        return {"begin": [(0, 6)], "middle": [(9, 17)], "the": each, "end": [(20, len(text))]}

    expected = [{name: overlapping(text, *r) for name, r in ranges(text).items()} for text in (TEXT, TEXT[4:])]
    assert {s.name: s.tokens for s in run.wanted.spans} == {
        name: tuple(one[name] for one in expected) for name in ("begin", "middle", "the", "end")
    }


def test_a_span_that_has_no_token_or_whose_model_reads_two_texts_is_refused(
    checkpoints: Checkpoints, unloaded: None
) -> None:
    cut = refusal(checkpoints.of("gpt2"), TEXT, spans=("end=/too/",), max_tokens=4)
    assert (cut.message, cut.hint) == ("span 'end' has no token of the text", HINT_SPAN)
    pair = refusal(checkpoints.of("t5"), TEXT, spans=("a=0:3",))
    assert pair.message == "--span does not work with a pair of encoder and decoder, which read two texts"
    assert isinstance(pair, UsageError)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_mass_between_spans_is_the_sum_over_the_pattern_that_the_family_returns(
    name: str, side: Any, checkpoints: Checkpoints
) -> None:
    folder = checkpoints.of(name)
    texts = (TEXT, ANSWER + " and the cat")
    run = prepared(folder, *texts, spans=("a=0:7", "b=/the/", "c=5:14"), padding=side)
    run.run()
    record = run.record()
    mask = run.inputs.keywords["attention_mask"]
    eager = attentions(folder, **run.inputs.keywords).attentions
    spans = [span.tokens for span in record.spans]
    for layer, pattern in enumerate(eager):
        shares, found = pattern.double().numpy(), record.of_layer(layer).arrays
        for b in range(2):
            real = mask[b].nonzero()[:, 0].numpy()
            visible = shares[b][:, real][:, :, real] > 0
            uniform = visible / visible.sum(axis=-1, keepdims=True)
            for i, j in np.ndindex(3, 3):
                rows, columns = list(spans[i][b]), list(spans[j][b])
                own = shares[b][:, real][:, :, real][:, rows][:, :, columns].sum(axis=2).mean(axis=1)
                assert found["span_mass"][b, :, i, j] == pytest.approx(own, abs=3e-6)
                flat = uniform[:, rows][:, :, columns].sum(axis=2).mean(axis=1)
                assert found["uniform_span_mass"][b, :, i, j] == pytest.approx(flat[:1], abs=3e-6)


# ------------------------------------------------------------------------------------------------------------- the reducers

BATCH, HEADS, QUERIES, KEYS, SPANS = 2, 3, 700, 530, 4
"""More queries and keys than a tile has."""


@pytest.fixture(scope="module")
def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pattern whose queries leave something to a sink, and the marks of spans that overlap, one of them empty."""
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, HEADS, QUERIES, KEYS)
    shares = torch.rand(shape, generator=generator, dtype=torch.float64).pow(4)
    shares = shares * (torch.rand(shape, generator=generator) < 0.3)
    pattern = shares / (shares.sum(dim=-1, keepdim=True) + 20 * torch.rand(shape[:3], generator=generator)[..., None])
    pattern[1, 2, 5] = 0
    q_spans, k_spans = (torch.rand(BATCH, SPANS, n, generator=generator) < 0.2 for n in (QUERIES, KEYS))
    q_spans[0, 1] = False
    return pattern, q_spans, k_spans, pattern > 0


def test_between_is_the_sum_over_the_queries_of_one_span_and_the_keys_of_another(drawn: Any) -> None:
    pattern, q_spans, k_spans, allowed = drawn
    seen = ComputedPattern(pattern, masks.from_tensor(allowed))
    between = Between(seen, q_spans, k_spans)
    reduce_tiles(seen, [between])
    for b, h, i, j in np.ndindex(BATCH, HEADS, SPANS, SPANS):
        own = pattern[b, h].numpy()[q_spans[b, i].numpy()][:, k_spans[b, j].numpy()]
        assert between.mass[b, h, i, j].item() == pytest.approx(own.sum(), abs=1e-10)
    assert between.mass[0, :, 1].abs().sum() == 0


def test_a_sink_is_one_more_outcome_and_no_distance(drawn: Any) -> None:
    pattern, _, _, allowed = drawn
    seen = ComputedPattern(pattern, masks.from_tensor(allowed))
    ids = torch.arange(KEYS).expand(BATCH, KEYS)
    leading = ids < 4
    asked = StatisticsRequest(8, torch.arange(QUERIES).expand(BATCH, QUERIES), ids, ids - 1, ids == 0, leading)
    taken = 1 - pattern.sum(dim=-1)
    told = with_sink(summarise(seen, asked), taken)
    p = np.concatenate([pattern.numpy(), taken.numpy()[..., None]], axis=-1)
    logs = np.log(np.where(p > 0, p, 1))
    assert told.entropy.numpy() == pytest.approx(-(p * logs).sum(axis=-1), abs=1e-10)
    assert told.squares.numpy() == pytest.approx((p**2).sum(axis=-1), abs=1e-12)
    steps = np.abs(np.arange(QUERIES)[:, None] - np.arange(KEYS))
    mass = pattern.numpy().sum(axis=-1)
    distance = (pattern.numpy() * steps).sum(axis=-1) / np.where(mass > 0, mass, 1)
    assert told.distance.numpy() == pytest.approx(distance, abs=1e-9)
    assert told.mass.numpy() == pytest.approx(mass, abs=1e-12)
    assert told.leading.numpy() == pytest.approx(pattern.numpy()[..., :4].sum(axis=-1), abs=1e-12)
