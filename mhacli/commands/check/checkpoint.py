"""`mha doctor --model`: examines a checkpoint in a few forward passes, with one check per question."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mhacli.attention.devices import free_bytes
from mhacli.commands.check.consistency_checks import (
    CEILING,
    ConsistencyChecks,
    ModelText,
    Passes,
    PassOutputs,
    implementation_of,
    numbered,
)
from mhacli.commands.check.result import ExaminedModel, HealthCheck
from mhacli.errors import MhaError, UsageError
from mhacli.io import memory
from mhacli.io.libraries import guarded
from mhacli.io.progress import Progress, no_progress
from mhacli.models.folder import Checkpoint
from mhacli.models.inputs import ModelInputs, make_inputs, n_vocabulary_of
from mhacli.models.layer_names import is_attention, most_positions
from mhacli.models.load import Loaded, ModelTokenizer, device_of, load_model, own_tokenizer, require_ids
from mhacli.models.prepare import find
from mhacli.models.rounding import TIMES_SHAKEN
from mhacli.models.runs.run import CheckpointRun
from mhacli.record.checks import ROW_SUMS, Check
from mhacli.record.record import InspectedLayer
from mhacli.run import Run
from mhacli.settings import ModelSettings, PaddingSide
from mhacli.text.spans import Message
from mhacli.text.tokens import TokenSequence

ORDER = (
    "finite", "repeat", "causality", "left-padding", "right-padding", "batch", "cache", "eager", "row-sums", "bos",
)  # fmt: skip
MEANINGS: Mapping[str, tuple[str, str]] = {
    "finite": (
        "Whatever reads these numbers is NaN or Inf as well.",
        "compare the files with their source; if only outputs overflow, use --dtype float32 or bfloat16",
    ),
    "repeat": (
        "No result of this model can be repeated, so nothing can be compared.",
        "look for dropout that acts in evaluation, and for random numbers in the model's code",
    ),
    "causality": (
        "The model sees the tokens that it should predict: its loss is too low, and what it generates does not match it.",
        "check the mask that reaches this attention; a bidirectional model states it in its config (is_causal)",
    ),
    "left-padding": (
        "A prompt gets other outputs in a padded batch than alone.",
        "generate from prompts of one length, until positions and masks count from the first real token",
    ),
    "right-padding": (
        "The outputs of a text depend on how long the others in its batch are.",
        "run texts of one length together, until the mask for padding reaches this attention",
    ),
    "batch": (
        "The outputs of a text depend on the other texts in its batch.",
        "run texts alone; look for a reshape or a transpose that mixes rows, and for statistics over the batch",
    ),
    "cache": (
        "Text that is generated token by token differs from what the model computes for the whole text.",
        "generate with use_cache=False; check the positions of new tokens behind the cache, and the order of the cache",
    ),
    "eager": (
        "The same weights give other numbers with another attn_implementation: one of the two is wrong.",
        "mha run --model compares each layer with the definition and shows which: use the other implementation",
    ),
    "row-sums": (
        "The outputs are scaled by the sum of the attention weights.",
        "check what this attention does to its weights after the softmax: a mask, dropout or a cast",
    ),
    "bos": (
        "A second token at the beginning, which the model never saw in training, changes every output.",
        "remove it from the tokenizer's post-processor or from the chat template: one of them is enough",
    ),
}
"""For each check, what a failure means and what to do."""


@dataclass(frozen=True)
class _ModelToExamine:
    """A loaded checkpoint with its input."""

    loaded: Loaded
    tokenizer: ModelTokenizer | None
    rows: tuple[ModelText, ...]
    pad_id: int
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
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if not hasattr(config, "get_text_config"):
        raise UsageError(f"{name} is not a model of transformers", hint="mhacli.check examines other modules")
    adapted_tokenizer = None if tokenizer is None else own_tokenizer(tokenizer)
    notes = () if adapted_tokenizer else (_NO_TOKENIZER.format("the model came without a"),)
    rows, cut = _rows(name, texts, adapted_tokenizer, config, seed)
    loaded = Loaded(
        source=name,
        checkpoint=Checkpoint(name),
        config=config,
        target=device_of(model),
        tokenizer=adapted_tokenizer,
        model=copy.deepcopy(model).eval(),
    )
    admitted = _ModelToExamine(loaded, adapted_tokenizer, rows, loaded.pad_id, (*notes, *cut))
    return _examined(admitted, ModelSettings(path=name), seed, no_progress)


_NO_TOKENIZER = "{} tokenizer: the texts are random token ids"


def _examined(admitted: _ModelToExamine, settings: ModelSettings, seed: int, report_progress: Progress) -> Examined:
    loaded, path = admitted.loaded, settings.path or ""
    dtype, stored_dtypes = loaded.dtype, Counter(tensor.dtype for tensor in loaded.checkpoint.tensors.values())
    passes = Passes(loaded, admitted.pad_id)
    checks = _run_checks(admitted, passes, settings, seed, report_progress)
    check_named = {check.name: check for check in checks}
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
        lengths=tuple(len(row.tokens.ids) for row in admitted.rows),
        n_passes=passes.n_passes,
        tolerance=tolerance_rule(dtype, loaded.dtype),
    )
    return model, tuple(_with_meaning(check_named[name]) for name in ORDER), (*loaded.notes, *admitted.notes)


def tolerance_rule(dtype: str, judged: str) -> str:
    """A sentence on how the tolerances of comparisons are chosen. `judged` is the dtype of the last comparison."""
    rule = (
        f"{TIMES_SHAKEN[judged]:g} × the change of the outputs when each part of the model is changed by one rounding step of "
        f"{'float32' if judged == 'float64' else judged}, at least {CEILING[judged]:g}"
    )
    return rule if judged == dtype else f"{rule}; {dtype} is judged in {judged}, where faults stand out"


# ---------------------------------------------------------------------------------------------------------------- loading


def _admit(settings: ModelSettings, texts: Sequence[str], seed: int) -> _ModelToExamine:
    found = find(settings, needs_tokenizer=bool(texts))
    tokenizer, config = found.tokenizer, found.config
    notes = [] if tokenizer else [_NO_TOKENIZER.format("the checkpoint has no")]
    rows, cut = _rows(found.source, texts, tokenizer, config, seed)

    def load(*, head: bool) -> Loaded:
        return load_model(found, settings, "generate" if head else None, allow_nonfinite=True)

    try:
        loaded = load(head=wants_head(config))
    except MhaError as fault:
        if fault.code != "bad-file" or not wants_head(config):
            raise
        loaded = load(head=False)
        notes.append(
            "loaded without its language head, whose weights are incomplete: the outputs are those of the last layer"
        )
    return _ModelToExamine(loaded, tokenizer, rows, loaded.pad_id, (*notes, *cut))


def _rows(
    path: str, texts: Sequence[str], tokenizer: ModelTokenizer | None, config: Any, seed: int
) -> tuple[tuple[ModelText, ...], tuple[str, ...]]:
    """The input texts, and notes on texts that were truncated."""
    most, text = most_positions(config), config.get_text_config(decoder=True)
    n_vocabulary = n_vocabulary_of(config)
    notes: tuple[str, ...] = ()
    if tokenizer is None:
        special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")}
        avoid = {i for i in special if isinstance(i, int)}
        sequences: Sequence[TokenSequence] = random_sequences(n_vocabulary, most, avoid, seed)
    else:
        limit = min(MOST_TOKENS if texts else MOST_OF_OURS, most or MOST_TOKENS)
        begun = [tokenizer.beginning(words, limit) for words in texts or TEXTS]
        sequences = [sequence for sequence, _ in begun]
        if any(not sequence.ids for sequence in sequences):
            raise MhaError("the text has no tokens", code="no-tokens")
        if texts and any(n_more for _, n_more in begun):
            notes = (f"texts are cut to their first {limit} tokens",)
        require_ids(list(sequences), n_vocabulary, path)
    if not config.is_encoder_decoder:
        return rows_of(sequences), notes
    return rows_of(sequences[::-1], sequences), notes


# --------------------------------------------------------------------------------------------------------------- examining


def _run_checks(
    admitted: _ModelToExamine, passes: Passes, settings: ModelSettings, seed: int, report_progress: Progress
) -> list[HealthCheck]:
    """The results of every check in the model's dtype. Comparisons in 16 bits are repeated in float32 if memory allows."""
    loaded, rows, path = admitted.loaded, admitted.rows, settings.path or ""
    reason = why_not_causal(loaded)
    side = admitted.tokenizer.side if admitted.tokenizer else "right"

    def make_checks() -> ConsistencyChecks:
        return ConsistencyChecks(passes, rows, why_not_causal=reason, side=side, seed=seed)

    dtype = loaded.dtype
    report_progress(0.1, "each text alone")
    first = guarded("the model", path, make_checks)
    checks = first.checks(lambda part, doing: report_progress(0.1 + 0.4 * part, doing))
    checks.append(check_finite(loaded.model, first.reference.alone))
    report_progress(0.55, "row-sums")
    padded: Any = "right" if loaded.config.is_encoder_decoder or reason is not None else "left"
    checks.append(guarded("the model", path, lambda: check_row_sums(loaded, rows, padded, admitted.pad_id)))
    checks.append(check_begin(admitted.tokenizer))
    if dtype in ("float16", "bfloat16") and first.reference.alone.is_finite and _has_room(loaded, settings.device):
        report_progress(0.6, "float32")
        loaded.model.float()
        in_float32 = {check.name: check for check in guarded("the model", path, make_checks).checks(
            lambda part, doing: report_progress(0.6 + 0.4 * part, doing))}  # fmt: skip
        checks = [widened(check, in_float32.get(check.name), dtype) for check in checks]
    report_progress(1.0, "done")
    return _without_consequences(checks)


def _without_consequences(checks: list[HealthCheck]) -> list[HealthCheck]:
    """The checks, where failed row sums do not count if they follow from non-finite numbers or from a faulty default
    implementation."""
    check_named = {check.name: check for check in checks}
    finite, eager, sums = check_named["finite"], check_named["eager"], check_named["row-sums"]
    if finite.ok is False and sums.ok is not None:
        not_applicable = replace(sums, ok=None, message="not all numbers are finite, see finite", layer=None)
        return list((check_named | {"row-sums": not_applicable}).values())
    if sums.ok is not False or eager.ok is not False:
        return checks
    explained = replace(
        eager, message=f"{eager.message}; the default's output is not what its own scores and values give"
    )
    not_applicable = replace(
        sums, ok=None, message="the default implementation differs from eager, see eager", layer=None
    )
    return list((check_named | {"eager": explained, "row-sums": not_applicable}).values())


def _has_room(loaded: Loaded, device: str) -> bool:
    return memory.fits(4 * sum(p.numel() for p in loaded.model.parameters()), free_bytes(device))


def widened(original: HealthCheck, in_float32: HealthCheck | None, dtype: str) -> HealthCheck:
    """The verdict on a comparison in 16 bits and in float32: that of float32, where rounding is no excuse.

    Only the check of finite numbers keeps its 16-bit verdict.
    """
    if (
        in_float32 is None
        or original.name == "repeat"
        or in_float32.ok is None
        or (original.ok is False and original.value is None)
    ):
        return original
    beyond = ", more than rounding to it changes them" if original.ok is False and in_float32.ok else ""
    in_own = "" if original.value is None else f"; in {dtype} by {original.value:.2g}{beyond}"
    return replace(in_float32, message=f"{in_float32.message} (float32{in_own})")


def _with_meaning(check: HealthCheck) -> HealthCheck:
    if check.ok is not False:
        return check
    meaning, advice = MEANINGS[check.name]
    return replace(check, meaning=meaning, advice=check.advice or advice)


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
RANDOM_LENGTHS = (29, 13, 6)
"""The lengths of random id sequences, for checkpoints without a tokenizer."""
_GENERATING = re.compile(r"(ForCausalLM|LMHeadModel|DoubleHeadsModel|ForConditionalGeneration)$")
_CAUSAL_HEAD = re.compile(r"(ForCausalLM|[a-z0-9]LMHeadModel|DoubleHeadsModel)$")


def architectures_of(config: Any) -> tuple[str, ...]:
    """The class names in a config; tolerates any content."""
    names = getattr(config, "architectures", None)
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, (list, tuple)) else ()


def wants_head(config: Any) -> bool:
    """Whether the checkpoint names a language head, so that its logits can be compared."""
    return any(_GENERATING.search(name) for name in architectures_of(config))


def rows_of(sequences: Sequence[TokenSequence], context: Sequence[TokenSequence] = ()) -> tuple[ModelText, ...]:
    """Rows of at least two lengths if possible, the longest first: the texts, and beginnings of the longest if they are
    too few.

    With a `context`, its texts are the encoder's input.
    """
    texts, read = _of_lengths(sequences), _of_lengths(context) if context else ()
    return tuple(ModelText(text, read[(place + 1) % len(read)] if read else None) for place, text in enumerate(texts))


def _of_lengths(sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
    ordered = sorted(sequences, key=lambda text: -len(text.ids))
    n, lengths = len(ordered[0].ids), {len(text.ids) for text in ordered}
    if len(ordered) < 3 or len(lengths) < 2:
        cuts = [cut for cut in (2 * n // 3, n // 3) if cut and cut not in lengths]
        ordered += [ordered[0].first(cut) for cut in cuts]
    return tuple(sorted(ordered, key=lambda text: -len(text.ids)))


def random_sequences(n_vocabulary: int, most: int | None, avoid: set[int], seed: int) -> tuple[TokenSequence, ...]:
    """Random ids, for a checkpoint without a tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    candidates = [i for i in range(min(n_vocabulary, 4096)) if i not in avoid] or [0]
    lengths = [min(n, most or n) for n in RANDOM_LENGTHS]
    indices = [torch.randint(len(candidates), (n,), generator=generator).tolist() for n in lengths]
    return tuple(numbered([candidates[i] for i in places]) for places in indices)


def why_not_causal(loaded: Loaded) -> str | None:
    """Why tokens of this model may see later ones; None if each token must see only earlier ones.

    In most families `is_decoder` does not decide this. The language head that a checkpoint names does, and a family
    that transformers knows only for generation.
    """
    from transformers.models.auto import modeling_auto

    config, text = loaded.config, loaded.text_config
    if config.is_encoder_decoder:
        return None
    family = text.model_type
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        return "its config says that tokens see later ones"
    if getattr(text, "attn_type", None) == "bi" or getattr(text, "causal", None) is False:
        return f"{family} sees all tokens"
    if any(_CAUSAL_HEAD.search(name) for name in architectures_of(config)):
        return None
    generates = {config.model_type, family} & set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    fills = {config.model_type, family} & set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    is_decoder = bool(getattr(text, "is_decoder", False))
    if generates and (is_decoder or not (fills or _is_declared_bidirectional(loaded.model))):
        return None
    return "an encoder, whose tokens see later ones"


def _is_declared_bidirectional(model: nn.Module) -> bool:
    parts = [module for name, module in model.named_modules() if is_attention(name, module)]
    flags = [module.is_causal for module in parts if hasattr(module, "is_causal")]
    return bool(flags) and not any(flags)


# ------------------------------------------------------------------------------------------ finite numbers and row sums


def check_finite(model: nn.Module, seen: PassOutputs) -> HealthCheck:
    """The number of NaN and infinite values in weights, attentions and outputs, and the first attention with one."""
    weights = {name: int((~p.isfinite()).sum()) for name, p in model.named_parameters() if p.is_floating_point()}
    bad = {name: n for name, n in weights.items() if n}
    outputs = sum(int((~row.isfinite()).sum()) for row in seen.rows)
    layers = [
        attention for attention in seen.attentions if any(not bool(row.isfinite().all()) for row in attention.rows)
    ]
    problems = [f"{sum(bad.values())} NaN or Inf in weights, the first in {next(iter(bad))}"] if bad else []
    problems += [f"{outputs} in the outputs"] if outputs else []
    problems += [f"first in {layers[0].label} ({layers[0].name})"] if layers else []
    if problems:
        layer = layers[0].label if layers else None
        return HealthCheck("finite", False, "; ".join(problems), float(sum(bad.values()) + outputs), 0.0, layer)
    return HealthCheck("finite", True, f"{len(weights)} weights and all outputs are finite", 0.0, 0.0)


def check_row_sums(loaded: Loaded, rows: Sequence[ModelText], side: PaddingSide, pad_id: int) -> HealthCheck:
    """Whether each query's weights, including that of a sink logit, sum to 1.

    Uses the kernel's log-sum-exp if it returns one, and the weights themselves if attention is computed explicitly.
    """
    base = replace(loaded, model=loaded.model.base_model)
    context = tuple(row.context for row in rows if row.context is not None) or None
    inputs = make_inputs(base.model, ModelInputs(tuple(row.tokens for row in rows), context), side, pad_id)
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
    verifiable = [
        layer
        for layer, _ in run.layers.results
        if not any("is not understood" in reason for reason in layer.unverified)
    ]
    if not verifiable:
        return HealthCheck("row-sums", None, "mha does not know some keywords of these attention calls")
    bad = [(layer, check) for layer in verifiable for check in _checks(layer) if not check.ok]
    if not bad:
        sums = [check for layer in verifiable for check in _checks(layer) if check.name == ROW_SUMS]
        worst = max(sums, key=lambda check: check.severity)
        text = f"the attention weights of {len(verifiable)} attentions sum to 1, and give the outputs"
        return HealthCheck("row-sums", True, text, worst.error, worst.tolerance)
    first, check = bad[0]
    of_sums, of_outputs = (
        ("sums of attention weights are NaN or Inf", "outputs are NaN or Inf")
        if check.error is None
        else (
            "the attention weights of a query do not sum to 1",
            "the output is not the attention weights times the values",
        )
    )
    message = f"{of_sums if check.name == ROW_SUMS else of_outputs}; first in {first.label} ({first.name})"
    return HealthCheck("row-sums", False, message, check.error, check.tolerance, first.label)


def _checks(layer: InspectedLayer) -> list[Check]:
    """The checks of a layer that apply here: row sums, and outputs from weights."""
    return [check for check in layer.survey.checks if check.name == ROW_SUMS or check.is_of_outputs]


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
