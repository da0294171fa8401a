"""`mha doctor --model`, and what `mha check` asks of checkpoints besides their behaviour: finite weights, eager attention against
the default, sums of attention weights, and the token at the beginning of a text."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mhacli.attention.devices import free_bytes
from mhacli.commands.check.behaviour import (
    CEILING,
    CODES,
    EFFECTS,
    Asked,
    Asker,
    Pair,
    Pass,
    architectures_of,
    asker_of,
    claim_of,
    is_of_transformers,
)
from mhacli.commands.check.result import Behaviour, CheckRequest, ExaminedModel, Finding, HealthCheck, Tried
from mhacli.errors import MhaError, UsageError
from mhacli.io import memory
from mhacli.io.libraries import guarded
from mhacli.io.progress import Progress, no_progress
from mhacli.models.folder import Checkpoint
from mhacli.models.inputs import TIMES_SHAKEN, ModelInputs, make_inputs, outputs_of
from mhacli.models.layer_names import LayerNumbers, most_positions, n_vocabulary_of
from mhacli.models.load import Loaded, ModelTokenizer, device_of, find, load_model, own_tokenizer, require_ids
from mhacli.models.runs.run import CheckpointRun
from mhacli.record.checks import ROW_SUMS
from mhacli.run import Run
from mhacli.settings import ModelSettings, PaddingSide
from mhacli.text.spans import Message
from mhacli.text.tokens import TokenSequence
from mhacli.usercode.call.sequences import Sequences, Text, sequences_of_ids
from mhacli.usercode.process import Stage

ORDER = (
    "finite", "repeat", "causality", "left-padding", "right-padding", "batch", "cache", "eager", "row-sums", "bos",
)  # fmt: skip
ADVICE: Mapping[str, str] = {
    "finite": "compare the files with their source; if only outputs overflow, use --dtype float32 or bfloat16",
    "repeat": "look for dropout that acts in evaluation, and for random numbers in the model's code",
    "causality": "check the mask that reaches this attention; a bidirectional model states it in its config (is_causal)",
    "left-padding": "generate from prompts of one length, until positions and masks count from the first real token",
    "right-padding": "run texts of one length together, until the mask for padding reaches this attention",
    "batch": "run texts alone; look for a reshape or a transpose that mixes rows, and for statistics over the batch",
    "cache": "generate with use_cache=False; check the positions of new tokens behind the cache, and the order of the cache",
    "eager": "mha run --model compares each layer with the definition and shows which: use the other implementation",
    "row-sums": "check what this attention does to its weights after the softmax: a mask, dropout or a cast",
    "bos": "remove it from the tokenizer's post-processor or from the chat template: one of them is enough",
}
"""For each check, what to do about a failure."""
EAGER = "eager"


@dataclass(frozen=True)
class _Admitted:
    """A loaded checkpoint with its texts, and in an encoder-decoder those that its encoder reads."""

    loaded: Loaded
    texts: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    notes: tuple[str, ...]


Examined = tuple[ExaminedModel, tuple[HealthCheck, ...], tuple[str, ...]]
"""What was examined, its checks in the order of `ORDER`, and notes."""


@torch.no_grad()
def examine_checkpoint(
    settings: ModelSettings, texts: Sequence[str], *, seed: int, report_progress: Progress
) -> Examined:
    """The examination of a checkpoint. Raises `MhaError` if it cannot be loaded, or if the model reads no text."""
    report_progress(0.0, "loading")
    return _examined(_admit(settings, texts, seed), settings, seed, report_progress)


@torch.no_grad()
def examine_model(model: nn.Module, tokenizer: Any, texts: Sequence[str], *, seed: int) -> Examined:
    """The examination of a copy of a transformers model in memory. Raises `MhaError` for other modules and models that
    read no text."""
    name = type(model).__name__
    if not is_of_transformers(model):
        raise UsageError(f"{name} is not a model of transformers", hint="mhacli.check examines other modules")
    admitted = _admit_model(copy.deepcopy(model).eval(), tokenizer, texts, seed)
    return _examined(admitted, ModelSettings(path=name), seed, no_progress)


_NO_TOKENIZER = "{} tokenizer: the texts are random token ids"


def _examined(admitted: _Admitted, settings: ModelSettings, seed: int, report_progress: Progress) -> Examined:
    loaded, path = admitted.loaded, settings.path or ""
    dtype, stored_dtypes = loaded.dtype, Counter(tensor.dtype for tensor in loaded.checkpoint.tensors.values())
    sequences = _sequences_of(admitted, len(admitted.texts[0].ids), seed)
    asker, checks = _asked(
        admitted, sequences, path, seed, lambda part, doing: report_progress(0.1 + 0.4 * part, doing)
    )
    n_passes, is_finite = asker.n_passes, checks["finite"].ok is not False
    report_progress(0.55, "row-sums")
    checks |= _of_files(admitted, asker)
    if is_finite and _can_widen(loaded, settings.device):
        report_progress(0.6, "float32")
        loaded.model.float()
        asker, wide = _asked(
            admitted, sequences, path, seed, lambda part, doing: report_progress(0.6 + 0.4 * part, doing)
        )
        n_passes += asker.n_passes
        checks = {name: widened(check, wide.get(name), dtype) for name, check in checks.items()}
    report_progress(1.0, "done")
    checks = _without_consequences(checks)
    rule = (
        f"{TIMES_SHAKEN[loaded.dtype]:g} × the change of the outputs when each part of the model is changed by one rounding step "
        f"of {'float32' if loaded.dtype == 'float64' else loaded.dtype}, at least {CEILING[loaded.dtype]:g}"
    )
    judged = "" if loaded.dtype == dtype else f"; {dtype} is judged in {loaded.dtype}, where faults stand out"
    model = ExaminedModel(
        path=path,
        revision=loaded.revision,
        family=loaded.config.model_type,
        architecture=type(loaded.model).__name__,
        n_parameters=sum(p.numel() for p in loaded.model.parameters()),
        dtype=dtype,
        stored=tuple(name for name, _ in stored_dtypes.most_common()),
        implementation=implementation_of(loaded.model),
        device=str(loaded.model.device),
        lengths=tuple(len(text.ids) for text in admitted.texts),
        n_passes=n_passes,
        tolerance=rule + judged,
    )
    return model, tuple(_with_meaning(checks[name]) for name in ORDER), (*loaded.notes, *admitted.notes)


@torch.no_grad()
def ask_checkpoint(model: str | nn.Module, request: CheckRequest, stage: Stage) -> tuple[Asked, Sequences]:
    """What a checkpoint, or a model of transformers, does with random texts, and its other checks as behaviours. A model in 16
    bits is asked in float32, where rounding is no excuse, if memory allows. Raises `MhaError` as `examine_checkpoint`."""
    stage("loading the model", limited=False)
    if isinstance(model, str):
        admitted = _admit(ModelSettings(path=model, device=request.device), (), request.seed)
    else:
        admitted = _admit_model(model.eval(), None, (), request.seed)
    loaded, dtype = admitted.loaded, admitted.loaded.dtype
    sequences = _sequences_of(admitted, request.length, request.seed)
    in_own = sequences.run([sequences.draw(request.seed, sequences.length)])
    if _can_widen(loaded, request.device):
        loaded.model.float()
    asker = asker_of(sequences, claim_of(loaded.model, causal=request.states_causal), request.seed, stage)
    answers = asker.all(eager=partial(eager, asker, loaded.model))
    if loaded.dtype != dtype:
        moved = asker.apart(Pair(Pass(lambda **_: in_own), asker.alone[0])).max().item()
        answers["dtype"] = asker.noted(
            "dtype", f"in {dtype}, its own, outputs change by {moved:.2g} of their size", moved
        )
    checks = {name: _health(asker, answer) for name, answer in answers.items()} | _of_files(admitted, asker)
    for name in ("finite", "row-sums", "bos"):
        check = _without_consequences(checks)[name]
        if check.ok is False and (name not in answers or answers[name].ok is not False):
            evidence = f"{check.value} was found, where at most {check.tolerance} is right"
            asker.findings.append(Finding(CODES[name], check.message, evidence, ADVICE[name], EFFECTS[name]))
        tried = None if check.ok is None else Tried(max(len(text.ids) for text in admitted.texts), 1)
        reason = f"{'not asked: ' * (check.ok is None)}{check.message}"
        answers[name] = Behaviour(
            name=name, ok=check.ok, reason=reason, largest=check.value, tolerance=check.tolerance, tried=tried
        )
    return asker.asked, sequences


# ---------------------------------------------------------------------------------------------------------------- loading


def _admit(settings: ModelSettings, texts: Sequence[str], seed: int) -> _Admitted:
    found = find(settings, needs_tokenizer=bool(texts))
    tokenizer, config = found.tokenizer, found.config
    notes = [] if tokenizer else [_NO_TOKENIZER.format("the checkpoint has no")]
    rows, context, cut = _rows(found.source, texts, tokenizer, config, seed)

    def load(*, head: bool) -> Loaded:
        return load_model(found, settings, "generate" if head else None, allow_nonfinite=True)

    wants_head = any(_GENERATING.search(name) for name in architectures_of(config))
    try:
        loaded = load(head=wants_head)
    except MhaError as fault:
        if fault.code != "bad-file" or not wants_head:
            raise
        loaded = load(head=False)
        notes.append(
            "loaded without its language head, whose weights are incomplete: the outputs are those of the last layer"
        )
    return _Admitted(loaded, rows, context, (*notes, *cut))


def _admit_model(model: Any, tokenizer: Any, texts: Sequence[str], seed: int) -> _Admitted:
    name, own = type(model).__name__, None if tokenizer is None else own_tokenizer(tokenizer)
    notes = () if own else (_NO_TOKENIZER.format("the model came without a"),)
    rows, context, cut = _rows(name, texts, own, model.config, seed)
    loaded = Loaded(
        source=name,
        checkpoint=Checkpoint(name),
        config=model.config,
        target=device_of(model),
        tokenizer=own,
        model=model,
    )
    return _Admitted(loaded, rows, context, (*notes, *cut))


def _rows(
    path: str, texts: Sequence[str], tokenizer: ModelTokenizer | None, config: Any, seed: int
) -> tuple[tuple[TokenSequence, ...], tuple[TokenSequence, ...] | None, tuple[str, ...]]:
    """The texts, the longest first, those for an encoder beside them, and notes on texts that were truncated."""
    most, text = most_positions(config), config.get_text_config(decoder=True)
    n_vocabulary = n_vocabulary_of(config)
    notes: tuple[str, ...] = ()
    if tokenizer is None:
        special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")}
        avoid = {i for i in special if isinstance(i, int)}
        candidates = [i for i in range(min(n_vocabulary, _MOST_IDS)) if i not in avoid] or [0]
        lengths = [min(n, most or n) for n in RANDOM_LENGTHS]
        sequences = [_numbered(random.Random(seed + n).choices(candidates, k=n)) for n in lengths]
    else:
        limit = min(MOST_TOKENS if texts else MOST_OF_OURS, most or MOST_TOKENS)
        begun = [tokenizer.beginning(words, limit) for words in texts or TEXTS]
        sequences = [sequence for sequence, _ in begun]
        if any(not sequence.ids for sequence in sequences):
            raise MhaError("the text has no tokens", code="no-tokens")
        if texts and any(n_more for _, n_more in begun):
            notes = (f"texts are cut to their first {limit} tokens",)
        require_ids(list(sequences), n_vocabulary, path)
    rows = _of_lengths(sequences)
    context = _of_lengths(sequences)
    return rows, (*context[1:], *context[:1]) if config.is_encoder_decoder else None, notes


def _of_lengths(sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
    """Texts of at least two lengths if possible, the longest first: beginnings of the longest are added if there are too few."""
    ordered = sorted(sequences, key=lambda text: -len(text.ids))
    n, lengths = len(ordered[0].ids), {len(text.ids) for text in ordered}
    if len(ordered) < 3 or len(lengths) < 2:
        cuts = [cut for cut in (2 * n // 3, n // 3) if cut and cut not in lengths]
        ordered += [ordered[0].first(cut) for cut in cuts]
    return tuple(sorted(ordered, key=lambda text: -len(text.ids)))


def _numbered(ids: Sequence[int]) -> TokenSequence:
    """Tokens named by their ids."""
    tokens = tuple(f"<{i}>" for i in ids)
    return TokenSequence("", tokens, tuple(ids), tuple((0, 0) for _ in tokens))


def _sequences_of(admitted: _Admitted, length: int | None, seed: int) -> Sequences:
    """The model as a function of texts. Raises `MhaError` where it reads none, or its pass raises."""
    loaded = admitted.loaded
    first = ModelInputs(admitted.texts[:1], admitted.context and admitted.context[:1])
    inputs = make_inputs(loaded.model, first, "right", loaded.pad_id)
    guarded("the model", loaded.source, lambda: outputs_of(loaded.model, inputs.keywords))
    found = sequences_of_ids(loaded.source, loaded.model, fixed={}, length=length)
    if found is None:
        raise UsageError(f"it is not known how {type(loaded.model).__name__} reads text")
    return replace(found, pad=loaded.pad_id)


# --------------------------------------------------------------------------------------------------------------- examining


def _asked(
    admitted: _Admitted, sequences: Sequences, path: str, seed: int, report_progress: Progress
) -> tuple[Asker, dict[str, HealthCheck]]:
    """What the model does with the texts, in its current dtype."""
    loaded, device = admitted.loaded, device_of(admitted.loaded.model)
    claim = claim_of(loaded.model)
    sources = [None] * len(admitted.texts) if admitted.context is None else admitted.context
    texts = [
        Text(torch.tensor(text.ids, device=device), None if read is None else torch.tensor(read.ids, device=device))
        for text, read in zip(admitted.texts, sources, strict=True)
    ]
    n_steps = iter(range(10**6))

    def stage(stage: str, *, limited: bool = True) -> None:
        report_progress(1 - 0.97 ** next(n_steps), stage)

    asker = guarded("the model", path, lambda: Asker(sequences, texts, claim, seed, stage))
    side = loaded.tokenizer.side if loaded.tokenizer else "right"
    asker.pads_left = claim.is_causal is not False or side == "left"
    names = [name for name in ORDER if name not in ("eager", "row-sums", "bos")]
    answers = asker.all([*names, "prefix"], eager=partial(eager, asker, loaded.model))
    return asker, {name: _health(asker, answer) for name, answer in answers.items() if name in ORDER}


def _health(asker: Asker, answer: Behaviour) -> HealthCheck:
    """A behaviour as a check, with the layer of the first attention whose outputs differ."""
    message, layer = answer.reason.removeprefix("not asked: "), None
    if answer.at is not None and answer.at.attention is not None and asker.of.module is not None:
        name, numbers = answer.at.attention, re.findall(r"\.(\d+)(?=\.|$)", answer.at.attention)
        kind = LayerNumbers(asker.of.module).kind_of(name)
        layer = " ".join([*([] if kind == "self" else [kind]), "layer", *numbers[:1]])
        message += f"; first in {layer} ({name})"
    elif answer.at is not None and answer.at.module is not None:
        message += f"; first in {answer.at.module}"
    is_caution = answer.name in asker.raised
    advice = f"test {answer.name} in a script of your own" if is_caution else ""
    tolerance = None if answer.largest is None else answer.tolerance
    return HealthCheck(answer.name, answer.ok, message, answer.largest, tolerance, layer, is_caution, "", advice)


def _of_files(admitted: _Admitted, asker: Asker) -> dict[str, HealthCheck]:
    """The checks besides behaviour."""
    loaded, claim = admitted.loaded, asker.claim
    is_padded_left = not loaded.config.is_encoder_decoder and claim.is_causal is not False
    side: PaddingSide = "left" if is_padded_left else "right"
    finite = check_finite(loaded.model, _health(asker, asker.answers["finite"]))
    sums = guarded("the model", loaded.source, lambda: check_row_sums(admitted, side))
    return {check.name: check for check in (finite, sums, check_begin(loaded.tokenizer))}


def eager(asker: Asker, model: Any) -> Behaviour:
    """Whether the default implementation of attention gives what eager attention gives."""
    name, within = implementation_of(model), partial(eager_in_place, model)
    if name == EAGER:
        return asker.unasked("eager", "eager is what runs by default")
    with eager_in_place(model) as is_eager:
        if not is_eager:
            return asker.unasked("eager", f"this family cannot switch from {name} to eager")
    pairs = [
        Pair(alone, asker.passing(text, within=within)) for text, alone in zip(asker.texts, asker.alone, strict=True)
    ]
    if len({len(text.tokens) for text in asker.texts}) > 1:
        mask = next(iter(asker.of.masks), "")
        ours = asker.passing(*asker.texts, mask=mask)
        theirs = asker.passing(*asker.texts, mask=mask, within=within)
        pairs += [Pair(ours, theirs, (row, row)) for row in range(len(asker.texts))]
    agrees, differs = f"{name}, the default, and eager agree", f"{name}, the default, and eager give different outputs"
    return asker.compare("eager", pairs, agrees, differs)


def implementation_of(model: Any) -> str:
    """The name in transformers of the model's attention implementation."""
    return str(getattr(model.config, "_attn_implementation", None) or EAGER)


@contextmanager
def eager_in_place(model: Any) -> Iterator[bool]:
    """Switches the model to `eager` attention within the context; yields whether that worked."""
    before = implementation_of(model)
    model.set_attn_implementation(EAGER)
    try:
        yield implementation_of(model) == EAGER
    finally:
        model.set_attn_implementation(before)


def _without_consequences(checks: dict[str, HealthCheck]) -> dict[str, HealthCheck]:
    """The checks, where failed row sums do not count if they follow from non-finite numbers or from a faulty default
    implementation."""
    finite, default, sums = checks["finite"], checks["eager"], checks["row-sums"]
    if finite.ok is False and sums.ok is not None:
        sums = replace(sums, ok=None, message="not all numbers are finite, see finite", layer=None)
    elif sums.ok is False and default.ok is False:
        message = f"{default.message}; the default's output is not what its own scores and values give"
        default = replace(default, message=message)
        sums = replace(sums, ok=None, message="the default implementation differs from eager, see eager", layer=None)
    return checks | {"eager": default, "row-sums": sums}


def _can_widen(loaded: Loaded, device: str) -> bool:
    """Whether a model is in 16 bits, and memory allows 32."""
    n_parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    return loaded.dtype in ("float16", "bfloat16") and memory.fits(4 * n_parameters, free_bytes(device))


def widened(original: HealthCheck, in_float32: HealthCheck | None, dtype: str) -> HealthCheck:
    """The verdict on a comparison in 16 bits and in float32: that of float32, where rounding is no excuse.

    Only the check of finite numbers keeps its 16-bit verdict.
    """
    is_own = original.name in ("repeat", "finite") or (original.ok is False and original.value is None)
    if in_float32 is None or is_own or in_float32.ok is None:
        return original
    beyond = ", more than rounding to it changes them" if original.ok is False and in_float32.ok else ""
    in_own = "" if original.value is None else f"; in {dtype} by {original.value:.2g}{beyond}"
    return replace(in_float32, message=f"{in_float32.message} (float32{in_own})")


def _with_meaning(check: HealthCheck) -> HealthCheck:
    if check.ok is not False:
        return check
    effect = EFFECTS[check.name]
    meaning = f"{effect[0].upper()}{effect[1:]}."
    return replace(check, meaning=meaning, advice=check.advice or ADVICE[check.name])


# ---------------------------------------------------------------------------------------------------------- input texts


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
_GENERATING = re.compile(r"(ForCausalLM|LMHeadModel|DoubleHeadsModel|ForConditionalGeneration)$")


# ------------------------------------------------------------------------------------------ finite numbers and row sums


def check_finite(model: nn.Module, outputs: HealthCheck) -> HealthCheck:
    """The number of NaN and infinite values in weights and outputs, and the first attention with one."""
    weights = {name: int((~p.isfinite()).sum()) for name, p in model.named_parameters() if p.is_floating_point()}
    bad = {name: n for name, n in weights.items() if n}
    problems = [f"{sum(bad.values())} NaN or Inf in weights, the first in {next(iter(bad))}"] if bad else []
    problems += [outputs.message] if outputs.ok is False else []
    if problems:
        return HealthCheck("finite", False, "; ".join(problems), float(sum(bad.values())), 0.0, outputs.layer)
    return HealthCheck("finite", True, f"{len(weights)} weights and all outputs are finite", 0.0, 0.0)


def check_row_sums(admitted: _Admitted, side: PaddingSide) -> HealthCheck:
    """Whether each query's weights, including that of a sink logit, sum to 1.

    Uses the kernel's log-sum-exp if it returns one, and the weights themselves if attention is computed explicitly.
    """
    base = replace(admitted.loaded, model=admitted.loaded.model.base_model)
    inputs = make_inputs(base.model, ModelInputs(admitted.texts, admitted.context), side, base.pad_id)
    run = CheckpointRun(
        base, inputs, Run(model=ModelSettings(device=str(base.model.device)), keep=(), allow_nonfinite=True)
    )
    try:
        run.run()
    except UsageError:
        raise
    except MhaError as fault:
        if fault.code == "out-of-memory":
            raise
        return HealthCheck("row-sums", None, fault.message)
    layers = [layer for layer, _ in run.layers.results]
    layers = [layer for layer in layers if not any("is not understood" in reason for reason in layer.unverified)]
    if not layers:
        return HealthCheck("row-sums", None, "mha does not know some keywords of these attention calls")
    checks = [(layer, check) for layer in layers for check in layer.survey.checks]
    checks = [(layer, check) for layer, check in checks if check.name == ROW_SUMS or check.is_of_outputs]
    bad = [(layer, check) for layer, check in checks if not check.ok]
    if not bad:
        worst = max((check for _, check in checks if check.name == ROW_SUMS), key=lambda check: check.severity)
        text = f"the attention weights of {len(layers)} attentions sum to 1, and give the outputs"
        return HealthCheck("row-sums", True, text, worst.error, worst.tolerance)
    first, check = bad[0]
    message = "the attention weights of a query do not sum to 1"
    if check.name != ROW_SUMS:
        message = "the output is not the attention weights times the values"
    if check.error is None:
        message += ": NaN or Inf"
    message += f"; first in {first.label} ({first.name})"
    return HealthCheck("row-sums", False, message, check.error, check.tolerance, first.label)


# ---------------------------------------------------------------------------------------------- beginning-of-text token


_WORD = "word"
_CHAT = (Message("user", _WORD),)


def check_begin(tokenizer: ModelTokenizer | None) -> HealthCheck:
    """Whether the beginning-of-text token is doubled in a text, a chat, or text that was decoded and encoded again.

    It is common, and no fault, that both the template and the tokenizer add it: chats must then be encoded without
    special tokens, as transformers does. The result is a warning.
    """
    if tokenizer is None:
        return HealthCheck("bos", None, "there is no tokenizer")
    begin = _begin_id(tokenizer)
    if begin is None:
        return HealthCheck("bos", None, "the tokenizer has no token for the beginning of a text")
    name = tokenizer.library.id_to_token(begin) or f"<{begin}>"
    chat = _chat(tokenizer)
    plain = tokenizer.sequence(_WORD)
    decoded = guarded("the tokenizer", tokenizer.path, lambda: tokenizer.library.decode(list(plain.ids)))
    counts = {
        "an encoded text": _times(plain.ids, begin),
        "a text that was decoded and is encoded again": _times(tokenizer.sequence(decoded).ids, begin),
    }
    if chat is not None:
        counts["a chat in its template"] = _times(tokenizer.sequence(chat, special=False).ids, begin)
    worst = max(counts, key=lambda case: counts[case])
    if counts[worst] > 1:
        return HealthCheck("bos", False, f"{worst} begins with {name!r} {_often(counts[worst])}", counts[worst], 1)
    if chat is not None:
        both = _times(tokenizer.sequence(chat).ids, begin)
        if both > 1:
            message = (
                f"the chat template writes {name!r} and the tokenizer adds it: a chat that is encoded as any text begins "
                "with it twice"
            )
            advice = "encode a rendered chat with add_special_tokens=False, or let apply_chat_template make the ids"
            return HealthCheck("bos", None, message, both, 1, is_caution=True, advice=advice)
    if counts[worst] == 0:
        message = f"no text{' or chat' * (chat is not None)} begins with {name!r}"
    else:
        message = f"a text{' and a chat begin' if chat is not None else ' begins'} with {name!r} at most once"
    return HealthCheck("bos", True, message, counts[worst], 1)


def _often(n: int) -> str:
    return "twice" if n == 2 else f"{n} times"


def _times(ids: Sequence[int], begin: int) -> int:
    return next((place for place, i in enumerate(ids) if i != begin), len(ids))


def _begin_id(tokenizer: ModelTokenizer) -> int | None:
    """The beginning-of-text token, else the first token that the tokenizer puts before a text, such as [CLS]."""
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    framed, bare = tokenizer.sequence(_WORD).ids, tokenizer.sequence(_WORD, special=False).ids
    starts = [place for place in range(len(framed)) if framed[place : place + len(bare)] == bare]
    return framed[0] if starts and starts[0] > 0 else None


def _chat(tokenizer: ModelTokenizer) -> str | None:
    """A message in the checkpoint's chat template; None if there is no template, or it refuses the message."""
    try:
        return tokenizer.chat(_CHAT)[0]
    except MhaError:
        return None
