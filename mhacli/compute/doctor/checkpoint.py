"""`mha doctor --model`: a checkpoint examined in a few forward passes, each question on its own line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from mhacli.adapters.hf.inputs import n_vocabulary_of
from mhacli.adapters.hf.layer_names import most_positions
from mhacli.adapters.hf.library import guarded
from mhacli.adapters.hf.load import Loaded, find_checkpoint, load_config, load_model
from mhacli.adapters.hf.tokenizer import ModelTokenizer, first_tokens, load_tokenizer, require_ids
from mhacli.compute.base.devices import choose_device, environment, free_bytes
from mhacli.compute.doctor.bos import check_begin
from mhacli.compute.doctor.comparisons import Battery, implementation_of
from mhacli.compute.doctor.inputs import (
    MOST_OF_OURS,
    MOST_TOKENS,
    TEXTS,
    random_sequences,
    rows_of,
    wants_head,
    why_not_causal,
)
from mhacli.compute.doctor.libraries import libraries
from mhacli.compute.doctor.numbers import check_finite, check_row_sums
from mhacli.compute.doctor.passes import CEILING, TIMES_SHAKEN, Passes, Row
from mhacli.errors import MhaError
from mhacli.io import memory
from mhacli.results.doctor import DoctorRequest, HealthCheck, Patient, Report
from mhacli.spec.tokens import TokenSequence

Told = Callable[[float, str], None]
ORDER = (
    "finite", "repeat", "causality", "left-padding", "right-padding", "batch", "cache", "eager", "row-sums", "bos",
)  # fmt: skip
MEANINGS: Mapping[str, tuple[str, str]] = {
    "finite": (
        "Whatever reads these numbers is NaN or Inf as well.",
        "compare the files with their source; where only outputs overflow, load it with --dtype float32 or bfloat16",
    ),
    "repeat": (
        "No result of this model can be repeated, so nothing can be compared.",
        "look for dropout that acts in evaluation, and for random numbers in the model's code",
    ),
    "causality": (
        "The model sees the tokens that it is to predict: its losses are too good, and what it generates does not match them.",
        "look at the mask that reaches this attention; a model that is to see both ways says so in its config (is_causal)",
    ),
    "left-padding": (
        "A prompt gets other answers in a padded batch than alone.",
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
        "What is generated token by token is not what the model says of the text.",
        "generate with use_cache=False; look at the positions of new tokens behind the cache, and at the cache's order",
    ),
    "eager": (
        "The same weights give other numbers with another attn_implementation: one of the two is wrong.",
        "find out which by mha run --model, whose self-check compares each layer with the definition, and load it with the other",
    ),
    "row-sums": (
        "Results are scaled by what the shares add up to.",
        "look at what this attention does to its shares after the softmax: a mask, dropout or a cast",
    ),
    "bos": (
        "A second token of beginning, which the model never saw in training, moves every output.",
        "take it out of the tokenizer's post-processor or of the chat template: one of them is enough",
    ),
}
"""For each question what a failure means, and what to do."""


@dataclass(frozen=True)
class _Admitted:
    """A checkpoint that is loaded, with what it reads."""

    loaded: Loaded
    tokenizer: ModelTokenizer | None
    rows: tuple[Row, ...]
    pad_id: int
    notes: tuple[str, ...]


@torch.no_grad()
def examine_checkpoint(request: DoctorRequest, tell: Told = lambda share, doing: None) -> Report:
    """The report. Raises `MhaError` for a checkpoint that cannot be loaded, and for a model that reads no text."""
    began = perf_counter()
    tell(0.0, "loading")
    admitted = _admit(request)
    loaded = admitted.loaded
    dtype, stored = loaded.dtype, Counter(tensor.dtype for tensor in loaded.checkpoint.tensors.values())
    passes = Passes(loaded, admitted.pad_id)
    found = _found(admitted, passes, request, tell)
    known = {check.name: check for check in found}
    patient = Patient(
        path=request.source,
        revision=loaded.revision,
        family=loaded.config.model_type,
        architecture=type(loaded.model).__name__,
        n_parameters=sum(p.numel() for p in loaded.model.parameters()),
        dtype=dtype,
        stored=tuple(name for name, _ in stored.most_common()),
        implementation=implementation_of(loaded.model),
        device=str(loaded.model.device),
        lengths=tuple(len(row.tokens.ids) for row in admitted.rows),
        n_passes=passes.n_passes,
        tolerance=told_tolerance(dtype, loaded.dtype),
    )
    about = environment(loaded.model.device, request.device)
    return Report(
        checks=tuple(_with_meaning(known[name]) for name in ORDER),
        libraries=libraries(),
        environment=tuple((name, str(value)) for name, value in vars(about).items()),
        model=patient,
        notes=(*loaded.notes, *admitted.notes),
        command=request.command,
        seed=request.seed,
        time_s=perf_counter() - began,
    )


def told_tolerance(dtype: str, judged: str) -> str:
    """How the tolerances of comparisons come about, in a sentence; `judged` is the dtype of the last of them."""
    said = (
        f"{TIMES_SHAKEN[judged]:g} × what outputs move when each part of the model is shaken by one step of rounding to "
        f"{'float32' if judged == 'float64' else judged}, at least {CEILING[judged]:g}"
    )
    return said if judged == dtype else f"{said}; {dtype} is widened to {judged}, in which faults stand out"


# ---------------------------------------------------------------------------------------------------------------- loading


def _admit(request: DoctorRequest) -> _Admitted:
    device = choose_device(request.device)
    checkpoint, revision = (
        (request.checkpoint, None) if request.checkpoint else find_checkpoint(request.source, request.revision)
    )
    config, notes = load_config(checkpoint), []
    tokenizer = None
    try:
        tokenizer = load_tokenizer(checkpoint, request.tokenizer)
    except MhaError as fault:
        if fault.code != "no-tokenizer" or request.texts:
            raise
        notes.append("there is no tokenizer: the texts are ids drawn at random")
    rows, cut = _rows(request, tokenizer, config)

    def load(*, head: bool) -> Loaded:
        return load_model(
            request.source, checkpoint, config, revision=revision, device=device, dtype=request.dtype, head=head,
            allow_nonfinite=True,
        )  # fmt: skip

    try:
        loaded = load(head=wants_head(config))
    except MhaError as fault:
        if fault.code != "bad-file" or not wants_head(config):
            raise
        loaded = load(head=False)
        notes.append("it was loaded without its language head, which is not whole: outputs are those of the last layer")
    n_vocabulary = n_vocabulary_of(loaded.config)
    pad_id = (tokenizer.pad_id if tokenizer else getattr(loaded.text_config, "pad_token_id", None)) or 0
    return _Admitted(loaded, tokenizer, rows, pad_id if pad_id < n_vocabulary else 0, (*notes, *cut))


def _rows(
    request: DoctorRequest, tokenizer: ModelTokenizer | None, config: Any
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """What is read, and what to tell of texts that were cut."""
    most, text = most_positions(config), config.get_text_config(decoder=True)
    n_vocabulary = n_vocabulary_of(config)
    notes: tuple[str, ...] = ()
    if tokenizer is None:
        special = {getattr(text, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start")}
        avoid = {i for i in special if isinstance(i, int)}
        sequences: Sequence[TokenSequence] = random_sequences(n_vocabulary, most, avoid, request.seed)
    else:
        limit = min(MOST_TOKENS if request.texts else MOST_OF_OURS, most or MOST_TOKENS)
        known = [tokenizer.sequence(words) for words in request.texts or TEXTS]
        if any(not one.ids for one in known):
            raise MhaError("the text must have at least one token, got none", code="no-tokens")
        sequences = [first_tokens(one, limit) for one in known]
        if request.texts and any(len(one.ids) > limit for one in known):
            notes = (f"texts are cut to their first {limit} tokens",)
        require_ids(list(sequences), n_vocabulary, request.source)
    if not config.is_encoder_decoder:
        return rows_of(sequences), notes
    return rows_of(sequences[::-1], sequences), notes


# --------------------------------------------------------------------------------------------------------------- examining


def _found(admitted: _Admitted, passes: Passes, request: DoctorRequest, tell: Told) -> list[HealthCheck]:
    """Every check, in the model's dtype; comparisons of 16-bit numbers in float32 too, where memory takes it."""
    loaded, rows, path = admitted.loaded, admitted.rows, request.source
    reason = why_not_causal(loaded)
    side = admitted.tokenizer.side if admitted.tokenizer else "right"

    def battery() -> Battery:
        return Battery(passes, rows, why_not_causal=reason, side=side, seed=request.seed)

    dtype = loaded.dtype
    tell(0.1, "each text alone")
    first = guarded("the model", path, battery)
    found = first.checks(lambda share, doing: tell(0.1 + 0.4 * share, doing))
    found.append(check_finite(loaded.model, first.reference.alone))
    tell(0.55, "row-sums")
    padded: Any = "right" if loaded.config.is_encoder_decoder or reason is not None else "left"
    found.append(guarded("the model", path, lambda: check_row_sums(loaded, rows, padded, admitted.pad_id)))
    found.append(check_begin(admitted.tokenizer))
    if dtype in ("float16", "bfloat16") and first.reference.alone.is_finite and _has_room(loaded, request.device):
        tell(0.6, "float32")
        loaded.model.float()
        wide = {check.name: check for check in guarded("the model", path, battery).checks(
            lambda share, doing: tell(0.6 + 0.4 * share, doing))}  # fmt: skip
        found = [widened(check, wide.get(check.name), dtype) for check in found]
    tell(1.0, "done")
    return _told_apart(found)


def _told_apart(found: list[HealthCheck]) -> list[HealthCheck]:
    """Shares that do not give the results are no fault of their own where something is not finite, or where the default differs
    from eager: then they say which of the two is wrong."""
    known = {check.name: check for check in found}
    finite, eager, sums = known["finite"], known["eager"], known["row-sums"]
    if finite.ok is False and sums.ok is not None:
        not_asked = replace(sums, ok=None, message="not all numbers are finite, see finite", layer=None)
        return list((known | {"row-sums": not_asked}).values())
    if sums.ok is not False or eager.ok is not False:
        return found
    told = replace(eager, message=f"{eager.message}; the default does not give what its own scores and values come to")
    not_asked = replace(sums, ok=None, message="the default implementation differs from eager, see eager", layer=None)
    return list((known | {"eager": told, "row-sums": not_asked}).values())


def _has_room(loaded: Loaded, device: str) -> bool:
    """Whether the weights fit in float32 too, beside those that are there."""
    return memory.fits(4 * sum(p.numel() for p in loaded.model.parameters()), free_bytes(device))


def widened(own: HealthCheck, wide: HealthCheck | None, dtype: str) -> HealthCheck:
    """The verdict on a comparison that was made in 16 bits and again in float32: the latter's, for a fault is one in any
    dtype, and rounding is not. Only what is not finite in 16 bits stays as it is."""
    if wide is None or own.name == "repeat" or wide.ok is None or (own.ok is False and own.value is None):
        return own
    beyond = ", more than rounding to it moves them" if own.ok is False and wide.ok else ""
    in_own = "" if own.value is None else f"; in {dtype} by {own.value:.2g}{beyond}"
    return replace(wide, message=f"{wide.message} (float32{in_own})")


def _with_meaning(check: HealthCheck) -> HealthCheck:
    """The check, with what its failure means and what to do."""
    if check.ok is not False:
        return check
    meaning, advice = MEANINGS[check.name]
    return replace(check, meaning=meaning, advice=check.advice or advice)
