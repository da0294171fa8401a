"""`mha doctor --model`, and what `mha check` asks of checkpoints besides their behaviour: finite weights, eager attention against
the default, sums of attention weights, and the token at the beginning of a text."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from typing import Any

import torch
from torch import nn

from mhacli.attention.devices import free_bytes
from mhacli.commands.check.behaviour import (
    CODES,
    LEAST,
    Asker,
    architectures_of,
    asker_of,
    failure_of,
    is_claimed_causal,
    is_of_transformers,
    pair_of,
    words_of_failure,
)
from mhacli.commands.check.result import (
    AttentionInside,
    Behaviour,
    CheckRequest,
    ExaminedModel,
    HealthCheck,
    Place,
    Tried,
)
from mhacli.errors import MhaError, UsageError, guarded
from mhacli.io import memory
from mhacli.io.long_work import Progress
from mhacli.models.layer_names import LayerNumbers, entry_of, most_positions, n_vocabulary_of
from mhacli.models.layers import ModelInputs
from mhacli.models.load import Loaded, ModelTokenizer, device_of, find, load_model, require_ids
from mhacli.models.run import TIMES_SHAKEN, CheckpointRun, make_inputs, outputs_of
from mhacli.record.checks import ROW_SUMS
from mhacli.record.record import InspectedLayer
from mhacli.run import Run
from mhacli.settings import ModelSettings, PaddingSide
from mhacli.text.spans import Message
from mhacli.text.tokens import TokenSequence
from mhacli.usercode.build import Built
from mhacli.usercode.process import Stage
from mhacli.usercode.sequences import Sequences, sequences_of_ids
from mhacli.usercode.target import TargetRequest

CHECKS = (
    "finite", "repeat", "causality", "left-padding", "right-padding", "batch", "cache", "eager", "row-sums", "bos",
)  # fmt: skip
"""The checks of `mha doctor`, in its order."""
EAGER, _NARROW = "eager", ("float16", "bfloat16")
Examined = tuple[ExaminedModel, tuple[HealthCheck, ...], tuple[str, ...]]
"""What was examined, its checks in the order of `CHECKS`, and notes."""


@torch.no_grad()
def examine_checkpoint(
    model: ModelSettings | nn.Module, tokenizer: Any, texts: Sequence[str], *, seed: int, report_progress: Progress
) -> Examined:
    """The examination of a checkpoint, or of a model of transformers. Raises `MhaError` if it cannot be loaded, for other
    modules, and if it reads no text."""
    report_progress(0.0, "loading")
    loaded, inputs = _admit(model, tokenizer, texts, seed)
    dtype, stored = loaded.dtype, Counter(tensor.dtype for tensor in loaded.checkpoint.tensors.values())
    steps = count()

    def stage(stage: str, *, limited: bool = True) -> None:
        report_progress(1 - 0.97 ** next(steps), stage)

    tokens = [torch.tensor(text.ids, device=device_of(loaded.model))[:, None] for text in inputs.sequences]
    sequences = _sequences_of(loaded, inputs, len(tokens[0]))
    asker = Asker(sequences, tokens, is_claimed_causal(loaded.model), seed, stage)
    asker = _asked(asker, loaded, inputs, CHECKS)
    report_progress(1.0, "done")
    step = "float32" if loaded.dtype == "float64" else loaded.dtype
    rule = (
        f"{TIMES_SHAKEN[loaded.dtype]:g} × the change of the outputs when each part of the model is changed by one rounding step "
        f"of {step}, at least {LEAST[loaded.dtype]:g}"
    )
    notes = (*loaded.notes, *inputs.notes)
    if (in_own := asker.answers.get("dtype")) is not None:
        rule += f"; {dtype} is judged in {loaded.dtype}, where faults stand out"
        notes = (*notes, in_own.reason)
    entry = entry_of(loaded.model, loaded.source, loaded.revision)
    shared = ("path", "revision", "family", "architecture", "n_parameters", "implementation")
    examined = ExaminedModel(
        **{name: getattr(entry, name) for name in shared},
        dtype=dtype,
        stored=tuple(name for name, _ in stored.most_common()),
        device=str(loaded.model.device),
        lengths=tuple(map(len, tokens)),
        n_passes=asker.n_passes,
        tolerance=rule,
    )
    return examined, tuple(_health(asker, asker.answers[name]) for name in CHECKS), notes


@torch.no_grad()
def ask_checkpoint(model: str | nn.Module, request: CheckRequest, stage: Stage) -> Asker:
    """What a checkpoint, or a model of transformers, does with random texts, and its other checks. Raises `MhaError` as
    `examine_checkpoint`."""
    stage("loading the model", limited=False)
    settings = ModelSettings(path=model, device=request.device) if isinstance(model, str) else model
    loaded, inputs = _admit(settings, None, (), request.seed)
    sequences = _sequences_of(loaded, inputs, request.length)
    claim = is_claimed_causal(loaded.model) if request.states_causal is None else request.states_causal
    return _asked(asker_of(sequences, request.seed, stage, is_causal=claim), loaded, inputs, tuple(CODES))


def _asked(asker: Asker, loaded: Loaded, inputs: ModelInputs, names: Sequence[str]) -> Asker:
    """The answers of a checkpoint. In 16 bits it must be finite; all else is asked in float32, where rounding is no excuse, if
    memory allows."""
    model, own = loaded.model, asker
    asker.all((), finite=partial(finite, asker, model))
    n_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    is_narrow = loaded.dtype in _NARROW and own.answers["finite"].ok is not False
    if is_narrow and memory.fits(n_bytes, free_bytes(str(device_of(model)))):
        dtype = loaded.dtype
        model.float()
        asker = replace(own)
        moved = max(pair_of(*readings).largest for readings in zip(own.alone(), asker.alone(), strict=True))
        reason = f"in {dtype}, its own, outputs change by up to {moved:.2g} of their size"
        asker.answers["dtype"] = asker.answer("dtype", None, reason, moved)
    asker.all(names, eager=partial(eager, asker, model))
    asker.all((), **{"row-sums": partial(row_sums, asker, loaded, inputs)})
    asker.answers["bos"] = doubled_beginning(asker, loaded.tokenizer)
    return asker


def _health(asker: Asker, answer: Behaviour) -> HealthCheck:
    """A behaviour as a check, with the layer of the first attention whose outputs differ."""
    at, layer, words = answer.at, None, words_of_failure(answer.name)
    first = None if at is None else at.module
    if at is not None and at.attention is not None and asker.module is not None:
        kind, numbers = LayerNumbers(asker.module).kind_of(at.attention), re.findall(r"\.(\d+)(?=\.|$)", at.attention)
        layer = " ".join([*([] if kind == "self" else [kind]), "layer", *numbers[:1]])
        first = f"{layer} ({at.attention})"
    check = HealthCheck(
        name=answer.name,
        ok=answer.ok,
        message=answer.reason.removeprefix("not tried: ") + ("" if first is None else f"; first in {first}"),
        value=answer.largest,
        tolerance=None if answer.largest is None else answer.tolerance,
        layer=layer,
        is_caution=answer.name in asker.cautions,
        advice=asker.cautions.get(answer.name, ""),
    )
    if answer.ok is not False:
        return check
    return replace(check, meaning=f"{words.effect[0].upper()}{words.effect[1:]}.", advice=words.advice)


# ---------------------------------------------------------------------------------------------------------------- loading


def _admit(
    model: ModelSettings | nn.Module, tokenizer: Any, texts: Sequence[str], seed: int
) -> tuple[Loaded, ModelInputs]:
    """A loaded checkpoint, or a model in memory, with its texts, the longest first. Raises `MhaError`."""
    if not isinstance(model, ModelSettings):
        if not is_of_transformers(model):
            message = f"{type(model).__name__} is not a model of transformers"
            raise UsageError(message, hint="mhacli.check examines other modules")
        loaded = Loaded.in_memory(model.eval(), tokenizer)
        return loaded, _texts(loaded, texts, seed)
    found = find(model, needs_tokenizer=bool(texts))
    inputs = _texts(found, texts, seed)
    has_head = any(_GENERATING.search(name) for name in architectures_of(found.config))
    try:
        return load_model(found, model, "generate" if has_head else None, allow_nonfinite=True), inputs
    except MhaError as fault:
        if fault.code != "bad-file" or not has_head:
            raise
    note = "loaded without its language head, whose weights are incomplete: the outputs are those of the last layer"
    return load_model(found, model, allow_nonfinite=True), replace(inputs, notes=(*inputs.notes, note))


def _texts(loaded: Loaded, texts: Sequence[str], seed: int) -> ModelInputs:
    """The texts, or others for want of them, the longest first, with those for an encoder beside them."""
    config, most, n_vocabulary = loaded.config, most_positions(loaded.config), n_vocabulary_of(loaded.config)
    notes: list[str] = []
    if loaded.tokenizer is None:
        notes.append("there is no tokenizer: the texts are random token ids")
        special = {getattr(loaded.text_config, f"{name}_token_id", None) for name in _SPECIAL}
        ordinary = [i for i in range(min(n_vocabulary, _MOST_IDS)) if i not in special] or [0]
        draws = [random.Random(seed + n).choices(ordinary, k=min(n, most or n)) for n in RANDOM_LENGTHS]
        rows = [TokenSequence("", tuple(f"<{i}>" for i in ids), tuple(ids), ((0, 0),) * len(ids)) for ids in draws]
    else:
        limit = min(MOST_TOKENS if texts else MOST_OF_OURS, most or MOST_TOKENS)
        begun = [loaded.tokenizer.beginning(words, limit) for words in texts or TEXTS]
        rows = [row for row, _ in begun]
        if not all(row.ids for row in rows):
            raise MhaError("the text has no tokens", code="no-tokens")
        if texts and any(n_more for _, n_more in begun):
            notes.append(f"texts are cut to their first {limit} tokens")
        require_ids(rows, n_vocabulary, loaded.source)
    longest = max(rows, key=lambda row: len(row.ids))
    n, lengths = len(longest.ids), {len(row.ids) for row in rows}
    if len(rows) < 3 or len(lengths) < 2:  # beginnings of the longest, for texts of two lengths
        rows += [longest.first(cut) for cut in (2 * n // 3, n // 3) if cut and cut not in lengths]
    ordered = tuple(sorted(rows, key=lambda row: -len(row.ids)))
    context = (*ordered[1:], ordered[0]) if config.is_encoder_decoder else None
    return ModelInputs(ordered, context, notes=tuple(notes))


def _sequences_of(loaded: Loaded, inputs: ModelInputs, length: int | None) -> Sequences:
    """The model as a function of texts. Raises `MhaError` where it reads none, or its pass raises."""
    first = replace(inputs, sequences=inputs.sequences[:1], context=inputs.context and inputs.context[:1])
    made = make_inputs(loaded.model, first, "right", loaded.pad_id)
    guarded("the model", loaded.source, lambda: outputs_of(loaded.model, made.keywords))
    built = Built(loaded.source, type(loaded.model), loaded.model, loaded.model)
    found = sequences_of_ids(built, TargetRequest(loaded.source, device=str(device_of(loaded.model))), length)
    if found is None:
        raise UsageError(f"it is not known how {type(loaded.model).__name__} reads text")
    return replace(found, pad=loaded.pad_id)


TEXTS = (
    "The bell rang twice before anyone in the old house woke up, and by then the snow had covered the road, the garden and "
    "the gate.",
    "In 1969 they carried 21 kilograms of stones home, didn't they?",
    "Read it again.",
)
"""The default texts: sentences of several lengths, with numbers and punctuation."""
MOST_TOKENS, MOST_OF_OURS = 512, 48
"""The most tokens read of a text: of the user's, and of the default ones."""
RANDOM_LENGTHS, _MOST_IDS = (29, 13, 6), 4096
"""The lengths of random id sequences, for checkpoints without a tokenizer."""
_SPECIAL = ("pad", "bos", "eos", "decoder_start")
_GENERATING = re.compile(r"(ForCausalLM|LMHeadModel|DoubleHeadsModel|ForConditionalGeneration)$")


# ---------------------------------------------------------------------------------------------------- checks of checkpoints


def finite(asker: Asker, model: nn.Module) -> Behaviour:
    """Whether all numbers in weights and outputs are finite, in 16 bits also where texts are padded."""
    answer, masks = asker.finite(), [*asker.of.masks]
    weights = {name: int((~p.isfinite()).sum()) for name, p in model.named_parameters() if p.is_floating_point()}
    bad = {name: n for name, n in weights.items() if n}
    problems = [f"{sum(bad.values())} NaN or Inf in weights, the first in {next(iter(bad))}"] if bad else []
    problems += [answer.reason] if answer.ok is False else []
    sides: tuple[PaddingSide, ...] = ("right",) if asker.of.has_source else ("right", "left")
    for side in sides if asker.dtype in _NARROW and masks and not problems else ():
        padded = asker.read(*asker.texts, mask=masks[0], side=side)
        if not all(reading.output.isfinite().all() for reading in padded):
            problems.append(f"padding on the {side} gives NaN or Inf in the outputs of {asker.dtype}")
    if not problems:
        return asker.answer("finite", True, f"{len(weights)} weights and all outputs are finite", 0.0, tolerance=0.0)
    n_bad = float(sum(bad.values())) or None
    return _failed(asker, asker.answer("finite", False, "; ".join(problems), n_bad, tolerance=0.0, at=answer.at))


def _failed(asker: Asker, answer: Behaviour) -> Behaviour:
    """A failed check, with its finding unless there is one."""
    if CODES[answer.name] not in [finding.code for finding in asker.findings]:
        seen = "numbers that are not finite" if answer.largest is None else f"{answer.largest:g}"
        evidence = f"{seen} in a check where at most {answer.tolerance:g} is right"
        finding = failure_of(answer.name, answer.reason, evidence)
        asker.findings.append(replace(finding, fix=words_of_failure(answer.name).advice))
    return answer


def eager(asker: Asker, model: Any) -> Behaviour:
    """Whether the default implementation of attention gives what eager attention gives."""
    name, within = implementation_of(model), partial(eager_in_place, model)
    if name == EAGER:
        return asker.unasked("eager", "eager is what runs by default")
    with within():
        if implementation_of(model) != EAGER:
            return asker.unasked("eager", f"this family cannot switch from {name} to eager")
    ours, theirs = [*asker.alone()], [asker.read(text, within=within)[0] for text in asker.texts]
    if len({len(text) for text in asker.texts}) > 1:
        mask = next(iter(asker.of.masks), "")
        ours += asker.read(*asker.texts, mask=mask)
        theirs += asker.read(*asker.texts, mask=mask, within=within)
    agrees, differs = f"{name}, the default, and eager agree", f"{name}, the default, and eager give different outputs"
    return asker.compare("eager", [*map(pair_of, ours, theirs)], agrees, differs)


def implementation_of(model: Any) -> str:
    """The name in transformers of the model's attention implementation."""
    return str(getattr(model.config, "_attn_implementation", None) or EAGER)


@contextmanager
def eager_in_place(model: Any) -> Iterator[None]:
    """Switches the model to `eager` attention within the context, if it can."""
    before = implementation_of(model)
    model.set_attn_implementation(EAGER)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def row_sums(asker: Asker, loaded: Loaded, inputs: ModelInputs) -> Behaviour:
    """Whether each query's weights, including that of a sink logit, sum to 1, and give the outputs.

    Uses the kernel's log-sum-exp if it returns one, and the weights themselves if attention is computed explicitly.
    """
    model = loaded.model.base_model
    is_left = not loaded.config.is_encoder_decoder and asker.is_causal is not False
    made = make_inputs(model, inputs, "left" if is_left else "right", loaded.pad_id)
    settings = Run(model=ModelSettings(device=str(model.device)), keep=(), allow_nonfinite=True)
    run = CheckpointRun(model, made, settings, loaded=loaded)
    asker.stage("row-sums")
    guarded("the model", loaded.source, run.run)
    layers = [layer for layer, *_ in run.results]
    asker.inside = _attention_inside(model, layers)
    layers = [layer for layer in layers if not any("is not understood" in reason for reason in layer.unverified)]
    checks = [(check, layer) for layer in layers for check in layer.survey.checks]
    sums = [check for check, _ in checks if check.name == ROW_SUMS]
    if not sums:
        return asker.unasked("row-sums", "mha does not know some keywords of these attention calls")
    answer = partial(asker.answer, "row-sums", tried=Tried(max(len(text.ids) for text in inputs.sequences), 1))
    bad = [
        (check, layer) for check, layer in checks if not check.ok and (check.name == ROW_SUMS or check.is_of_outputs)
    ]
    if not bad:
        worst = max(sums, key=lambda check: check.severity)
        reason = f"the attention weights of {len(layers)} attentions sum to 1, and give the outputs"
        return answer(True, reason, worst.error, tolerance=worst.tolerance)
    check, layer = bad[0]
    message = "the output is not the attention weights times the values"
    if check.name == ROW_SUMS:
        message = "the attention weights of a query do not sum to 1"
    message += ": NaN or Inf" if check.error is None else ""
    before = "" if model is loaded.model else f"{loaded.model.base_model_prefix}."
    at = Place(None, None, None, f"{before}{layer.name}")
    return _failed(asker, answer(False, message, check.error, tolerance=check.tolerance, at=at))


def _attention_inside(model: nn.Module, layers: Sequence[InspectedLayer]) -> tuple[AttentionInside, ...]:
    """The attentions of a pass by class and by whether their weights times their values were verified to be their output."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for layer in layers:
        kind = type(model.get_submodule(layer.name)).__name__
        found.setdefault((kind, "; ".join(layer.unverified[:1])), {})[layer.name] = None
    return tuple(
        AttentionInside(kind, tuple(names), "unknown" if reason else "right", reason)
        for (kind, reason), names in found.items()
    )


_WORD = "word"


def doubled_beginning(asker: Asker, tokenizer: ModelTokenizer | None) -> Behaviour:
    """Whether the beginning-of-text token is doubled in a text, a chat, or text that was decoded and encoded again.

    It is common, and no fault, that both the template and the tokenizer add it: chats must then be encoded without
    special tokens, as transformers does. The result is a warning.
    """
    if tokenizer is None:
        return asker.unasked("bos", "there is no tokenizer")
    encoded, bare = tokenizer.sequence(_WORD).ids, tokenizer.sequence(_WORD, special=False).ids
    first = tokenizer.bos_id
    if first is None and encoded[1 : 1 + len(bare)] == bare:
        first = encoded[0]  # what the tokenizer puts before a text, such as [CLS]
    if first is None:
        return asker.unasked("bos", "the tokenizer has no token for the beginning of a text")

    def times(text: str, *, special: bool = True) -> int:
        return len(list(takewhile(lambda i: i == first, tokenizer.sequence(text, special=special).ids)))

    name = tokenizer.library.id_to_token(first) or f"<{first}>"
    decoded = guarded("the tokenizer", tokenizer.path, lambda: tokenizer.library.decode(encoded))
    counts = {times(decoded): "a text that was decoded and is encoded again", times(_WORD): "an encoded text"}
    chat = None
    with suppress(MhaError):  # there is no template, or it refuses the message
        chat, _ = tokenizer.chat((Message("user", _WORD),))
        counts.setdefault(times(chat, special=False), "a chat in its template")
    most = max(counts)
    answer = partial(asker.answer, "bos", tolerance=1, tried=Tried(len(encoded), 1))
    if most > 1:
        often = "twice" if most == 2 else f"{most} times"
        return _failed(asker, answer(False, f"{counts[most]} begins with {name!r} {often}", most))
    if chat is not None and times(chat) > 1:
        advice = "encode a rendered chat with add_special_tokens=False, or let apply_chat_template make the ids"
        asker.cautions["bos"] = advice
        both = f"the chat template writes {name!r} and the tokenizer adds it"
        return answer(None, f"{both}: a chat that is encoded as any text begins with it twice", times(chat))
    texts = "a text begins" if chat is None else "a text and a chat begin"
    return answer(True, f"{texts} with {name!r} at most once" if most else f"no text begins with {name!r}", most)
