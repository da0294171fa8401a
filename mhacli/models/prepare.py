"""Prepares a run of a checkpoint: its tokenizer, the texts, the model, and the tokens that it generates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

import torch

from mhacli.attention.devices import choose_device
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import MhaError, UsageError
from mhacli.io.libraries import guarded
from mhacli.models.folder import Checkpoint
from mhacli.models.inputs import ModelInputs, make_inputs, n_vocabulary_of, run_model
from mhacli.models.layer_names import most_positions
from mhacli.models.load import LanguageHead, Loaded, find_checkpoint, load_config, load_model
from mhacli.models.tokenizer import ModelTokenizer, joined, load_tokenizer, require_ids, require_texts
from mhacli.record.record import Generated, SpanTokens
from mhacli.run import Run
from mhacli.settings import DEFAULT_MAX_TOKENS
from mhacli.text.encode import of_each
from mhacli.text.spans import Ranges, find_spans, tokens_of
from mhacli.text.tokens import TokenSequence


class Texts(NamedTuple):
    """The texts as tokens, those of an encoder, the tokens of named spans, and notes."""

    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    spans: tuple[SpanTokens, ...]
    notes: tuple[str, ...]


class ReadCheckpoint(NamedTuple):
    """A loaded checkpoint with the texts and the inputs of a pass."""

    loaded: Loaded
    inputs: ModelInputs
    texts: Texts
    tokenizer: ModelTokenizer


@torch.no_grad()
def prepare_checkpoint(request: Run) -> tuple[CheckpointRun, tuple[str, ...]]:
    """The run, and notes for the user. Raises `MhaError` as `read` does."""
    began = perf_counter()
    loaded, inputs, texts, tokenizer = read(request, "generate" if request.n_generated else None)
    generated = None
    if request.n_generated:
        inputs, generated = _generate(loaded, inputs, tokenizer, request.n_generated)
        loaded = replace(loaded, model=loaded.model.base_model)
    run = CheckpointRun(loaded, inputs, request, texts.spans, generated)
    run.foresee()
    run.seconds["loading"] = perf_counter() - began
    return run, (*loaded.notes, *texts.notes)


def read(request: Run, head: LanguageHead | None) -> ReadCheckpoint:
    """The model, with a language `head` if requested, and the texts as its inputs. Raises `MhaError` for requests that cannot
    work, if possible before the weights are loaded."""
    unloaded = find(request)
    texts = make_texts(request, unloaded.tokenizer, unloaded.config)
    loaded = unloaded.load(request, head)
    return ReadCheckpoint(loaded, inputs_of(loaded, texts, unloaded.tokenizer, request), texts, unloaded.tokenizer)


class UnloadedCheckpoint(NamedTuple):
    """A checkpoint whose weights are not loaded: folder, revision, config, tokenizer and device."""

    checkpoint: Checkpoint
    revision: str | None
    config: Any
    tokenizer: ModelTokenizer
    device: torch.device

    def load(self, request: Run, head: LanguageHead | None) -> Loaded:
        """The loaded model, with a language `head` if requested."""
        return load_model(
            request.path,
            self.checkpoint,
            self.config,
            revision=self.revision,
            device=self.device,
            device_map=request.model.device_map,
            dtype=request.model.dtype,
            head=head,
            allow_nonfinite=request.allow_nonfinite,
        )


def find(request: Run) -> UnloadedCheckpoint:
    """The checkpoint of a request, after setting the number of torch threads. Raises `MhaError`."""
    device = _device_of(request)
    if request.model.threads is not None:
        torch.set_num_threads(request.model.threads)
    checkpoint, revision = (
        (request.checkpoint, None) if request.checkpoint else find_checkpoint(request.path, request.model.revision)
    )
    config = load_config(checkpoint)
    _require_kinds(request, config)
    n_vocabulary_of(config)  # without one, a tokenizer would be asked for in vain
    return UnloadedCheckpoint(checkpoint, revision, config, load_tokenizer(checkpoint, request.model.tokenizer), device)


def _device_of(request: Run) -> torch.device:
    """The device that computes; in a map, the first except CPU and disk, to which their weights are moved. Raises `MhaError`
    for a missing device."""
    if not isinstance(request.model.device_map, Mapping):
        return choose_device(request.model.device)
    found = {name: choose_device(name, "--device-map") for name in request.model.device_map.values() if name != "disk"}
    return next((device for name, device in found.items() if name != "cpu"), torch.device("cpu"))


def _require_kinds(request: Run, config: Any) -> None:
    """Raises `UsageError` for a kind of attention that the model does not have."""
    kinds = ("encoder", "decoder", "cross") if config.is_encoder_decoder else ("self",)
    for kind, n in request.model.layers or ():
        if kind is not None and kind not in kinds:
            raise UsageError(
                f"--layer {kind}.{n}: {config.model_type} has no {kind} layers, only {', '.join(kinds)}",
                hint=f"try --layer {n}",
            )


def make_texts(request: Run, tokenizer: ModelTokenizer, config: Any) -> Texts:
    """The tokens of all texts, as many as the model has positions for. Raises `MhaError` and `UsageError`."""
    most, path, n_vocabulary = most_positions(config), request.path, n_vocabulary_of(config)
    is_pair = bool(config.is_encoder_decoder)
    given, special = list(request.texts), True
    chat: Mapping[str, Ranges] = {}
    if request.chat:
        rendered, chat = tokenizer.chat(request.chat)
        given, special = [rendered], False
    limit = request.max_tokens
    is_answer = is_pair and bool(
        request.context
    )  # the text of a decoder begins with its start token and has no end token
    pair: list[str | None] = [*of_each(request.pair, len(given), "--pair")] or [None] * len(given)
    begun = [
        tokenizer.beginning(text, limit, special=special and not is_answer, pair=second)
        for text, second in zip(given, pair, strict=True)
    ]
    sequences = [sequence for sequence, _ in begun]
    sequences = [_started(tokenizer, config, text) for text in sequences] if is_answer else sequences
    notes = [note for s in sequences for note in tokenizer.begin_warnings(s)]
    if (getattr(config, "type_vocab_size", 0) or 0) > 1 and not (request.pair or request.chat):
        notes += [note for s in sequences for note in tokenizer.pair_warnings(s)]
    notes += [
        f"only the first {limit:,} of the {len(s.ids) + n_more:,} tokens of text {i} are used (--max-tokens)"
        for i, (s, (_, n_more)) in enumerate(zip(sequences, begun, strict=True))
        if limit is not None and len(s.ids) + n_more > limit
    ]
    sequences = require_texts(sequences, limit, most, path)
    context = [tokenizer.beginning(text, limit)[0] for text in request.context]
    context = require_texts(context, limit, most, path) if context else []
    notes += _start_notes(config) if is_pair else []
    if is_pair and not context:  # the encoder reads the text; the decoder has only its start token
        context, sequences = sequences, [_started(tokenizer, config)] * len(sequences)
    context = of_each(context, len(sequences), "--context")
    require_ids([*sequences, *context], n_vocabulary, path)
    _require_lengths([*sequences, *context], limit)
    return Texts(tuple(sequences), tuple(context) or None, _spans(request, sequences, context, chat), tuple(notes))


def _started(tokenizer: ModelTokenizer, config: Any, text: TokenSequence | None = None) -> TokenSequence:
    """A decoder's text after its start token, which is added unless it is there."""
    name = _start_name(config)
    if name is None:
        raise UsageError(
            f"{config.model_type} needs --context: its config names no token for the decoder to start with",
            hint="--context is the input of the encoder, TEXT that of the decoder",
        )
    begin = tokenizer.continued(TokenSequence("", (), (), ()), [int(getattr(config, name))])
    if text is None:
        return begin
    return text if text.ids[:1] == begin.ids else joined(begin, text)


_STARTS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
"""The settings for the start token of a decoder, of which the first in its config counts. transformers' `generate` uses the
first two; T5 was trained with the third."""


def _start_name(config: Any) -> str | None:
    return next((name for name in _STARTS if getattr(config, name, None) is not None), None)


def _start_notes(config: Any) -> list[str]:
    """Notes about a decoder whose config does not name its start token."""
    name = _start_name(config)
    if name is None or name == _STARTS[0]:
        return []
    return [f"the decoder starts with {name}, {getattr(config, name)}, for the config names no {_STARTS[0]}"]


def _require_lengths(sequences: list[TokenSequence], limit: int | None) -> None:
    longest = max(len(sequence.ids) for sequence in sequences)
    if limit is None and longest > DEFAULT_MAX_TOKENS:
        raise MhaError(
            f"the text has {longest} tokens, above the limit of {DEFAULT_MAX_TOKENS}",
            hint=f"--max-tokens {DEFAULT_MAX_TOKENS} takes the first {DEFAULT_MAX_TOKENS}; --max-tokens {longest} takes all",
            code="too-large",
        )


def _spans(
    request: Run, sequences: list[TokenSequence], context: list[TokenSequence], chat: Mapping[str, Ranges]
) -> tuple[SpanTokens, ...]:
    """The tokens of each named span in every text."""
    if not request.spans:
        return ()
    if context:
        raise spans_of_pair()
    spans_of_texts = [find_spans(request.spans, sequence.text, chat) for sequence in sequences]
    spans_of_tokens = []
    for name in spans_of_texts[0]:
        tokens = tuple(tokens_of(spans[name], each) for spans, each in zip(spans_of_texts, sequences, strict=True))
        if not any(tokens):
            raise UsageError(f"span {name!r} has no token of the text", hint="--max-tokens may have cut it off")
        spans_of_tokens.append(SpanTokens(name, tokens))
    return tuple(spans_of_tokens)


def spans_of_pair() -> UsageError:
    """The error for spans of a model that reads two texts."""
    return UsageError(
        "--span does not work with a pair of encoder and decoder, which read two texts", hint="leave out --span"
    )


def inputs_of(loaded: Loaded, texts: Texts, tokenizer: ModelTokenizer, request: Run) -> ModelInputs:
    """The inputs of the model; padding is on the side of the tokenizer, unless the request names another."""
    if request.model.padding == "left" and loaded.config.is_encoder_decoder:
        raise UsageError("--padding left does not work with a pair of encoder and decoder", hint="leave out --padding")
    side, pad_id = request.model.padding or tokenizer.side, tokenizer.pad_id or 0
    n_vocabulary = n_vocabulary_of(loaded.config)  # padding is masked, so any valid id will do
    return make_inputs(loaded.model, texts.sequences, texts.context, side, pad_id if pad_id < n_vocabulary else 0)


def _generate(loaded: Loaded, inputs: ModelInputs, tokenizer: ModelTokenizer, n: int) -> tuple[ModelInputs, Generated]:
    """The inputs with the generated tokens, and whether one pass over the whole text reproduces them."""
    if len(inputs.sequences) != 1:
        raise UsageError(
            f"--generate continues one text, and {len(inputs.sequences)} are given",
            hint="give each text in a run of its own",
        )
    model, sequence = loaded.model, inputs.sequences[0]
    most = most_positions(loaded.config)
    if most is not None and len(sequence.ids) + n > most:
        raise MhaError(
            f"{len(sequence.ids)} tokens and {n} generated ones are more than the {most} positions of {loaded.source}",
            hint=f"--generate {most - len(sequence.ids)} fits" if most > len(sequence.ids) else None,
            code="too-large",
        )
    first = sequence.ids[0] if inputs.context else None
    made = guarded("generation", loaded.source, lambda: _go_on(model, inputs.keywords, n, tokenizer.pad_id or 0, first))
    new = made[len(sequence.ids) :]
    if not new:
        raise MhaError(
            "the model ends the text at once and generates no token",
            hint="try another text",
            code="no-tokens",
        )
    whole = tokenizer.continued(sequence, new)
    later = make_inputs(model, (whole,), inputs.context, inputs.side, tokenizer.pad_id or 0)
    whole_pass = run_model(model, lambda: model(**later.keywords, use_cache=False))
    predicted = whole_pass.logits[0, len(sequence.ids) - 1 : -1].argmax(dim=-1).tolist()
    repeated = sum(a == b for a, b in zip(predicted, new, strict=True))
    return later, Generated((len(sequence.ids),), len(new), repeated)


def _go_on(model: Any, keywords: dict[str, Any], n: int, pad_id: int, first: int | None) -> list[int]:
    """The ids of a text and of its greedy continuation. The checkpoint's settings for generation, such as penalties and forced
    tokens, are ignored. `first` is the start token of a decoder."""
    original = model.generation_config
    model.generation_config = type(original)(
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=pad_id,
        eos_token_id=original.eos_token_id,
        decoder_start_token_id=first,
    )
    try:
        made: list[int] = model.generate(**keywords)[0].tolist()
    finally:
        model.generation_config = original
    return made
