"""The behaviour of checkpoints, and further tests of them: eager attention against the default,
sums of attention weights, and the token at the beginning of a text.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.attention.devices import free_bytes
from mhacli.errors import MhaError, UsageError, guarded
from mhacli.io import memory
from mhacli.models.capture import captured
from mhacli.models.layer_names import config_of, entry_of, is_pair, most_positions, n_vocabulary_of
from mhacli.models.layers import ModelInputs, PassInspection
from mhacli.models.load import Loaded, ModelTokenizer, device_of, find, load_model, require_ids
from mhacli.models.run import make_inputs, outputs_of
from mhacli.record.checks import ROW_SUMS
from mhacli.record.record import InspectedLayer
from mhacli.run import Run
from mhacli.settings import ModelSettings, PaddingSide
from mhacli.text.spans import Message
from mhacli.text.tokens import named_by_ids
from mhacli.usercode.build import Built
from mhacli.usercode.door import call_user
from mhacli.usercode.process import Stage
from mhacli.usercode.target import TargetRequest
from mhacli.usercode.text_model import TextModel, text_model_of_ids

from .behaviour import NARROW, BehaviourTester, is_claimed_causal
from .observed import Answers, Intent, Observed, Test, compared, not_tried, seen
from .passes import Passes, difference_of, largest_of
from .result import (
    CODES,
    AttentionInside,
    CheckRequest,
    Place,
    Tried,
)
from .stated import stated_causal, tests_stated


@torch.no_grad()
def checkpoint_behaviour(
    loaded: Loaded,
    request: CheckRequest,
    stage: Stage,
    texts: Sequence[str] = (),
    names: Sequence[str] = tuple(CODES),
) -> tuple[BehaviourTester, tuple[str, ...]]:
    """What a checkpoint does with texts, else with random ones, and notes. In 16 bits it must be
    finite; all else is asked in float32, where rounding is no excuse, if memory allows. Raises
    `MhaError` where it reads none, or its pass raises.
    """
    model = loaded.model
    notes = list[str]()
    text_model = replace(_text_model(loaded, stage, notes), pad=loaded.pad_id)
    read = list[Tensor]()
    if texts and loaded.tokenizer is None:
        notes.append("there is no tokenizer: the texts are random token ids")
    elif texts:
        read = _texts(loaded, texts, notes)
    claim = stated_causal(request)
    if claim is None:
        claim = is_claimed_causal(model)
    passes = Passes(text_model, request.seed, read, request.length)
    more: dict[str, Test] = {
        "eager": eager,
        "row-sums": row_sums,
        "bos": partial(doubled_beginning, loaded.tokenizer),
        **tests_stated(request),
    }
    tester = BehaviourTester(passes, Intent(claim, packed=request.packed), more)
    n_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    is_narrow = loaded.dtype in NARROW and tester.results["finite"].ok is not False
    if is_narrow and memory.fits(n_bytes, free_bytes(device_of(model))):
        tester = _widened(tester, loaded, request)
    tester.test(names)
    return tester, (*loaded.notes, *notes)


def _widened(tester: BehaviourTester, loaded: Loaded, request: CheckRequest) -> BehaviourTester:
    """The tester of a model that computes in float32 from now on, with how far its own dtype
    changes outputs.
    """
    narrow = tester.passes
    call_user(loaded.model.float)
    wide = Passes(narrow.model, request.seed, narrow.texts, request.length)
    wide.n_passes += narrow.n_passes
    moved = largest_of(map(difference_of, narrow.single_passes, wide.single_passes))
    reason = f"in {loaded.dtype}, its own, outputs change by up to {moved:.2g} of their size"
    tester.results["dtype"] = seen(wide, None, reason, moved).named("dtype")
    return replace(tester, passes=wide)


def _text_model(loaded: Loaded, stage: Stage, notes: list[str]) -> TextModel:
    """A checkpoint as a function of texts. Where it refuses those of ordinary ids, its config gets
    an id of padding, if it has none, or they end with its end token. Raises `MhaError`.
    """
    model = loaded.model
    config = loaded.text_config
    target = TargetRequest(loaded.source, device=str(device_of(model)))
    of_ids = partial(
        text_model_of_ids, Built(loaded.source, type(model), model, stage=stage), target
    )
    found = of_ids() or of_ids(has_table=False)
    end = getattr(config, "eos_token_id", None)
    if found is None and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = loaded.pad_id
        notes.append(f"config.pad_token_id is not set: {loaded.pad_id} was taken")
        found = of_ids()
    if found is None and isinstance(end, int):
        found = of_ids(end=end)
        notes.append(f"each text ends with the end token, {end}")
    if found is None:
        row = (named_by_ids((0, 1)),)
        texts = ModelInputs(row, row if is_pair(model) else None)
        outputs_of(model, make_inputs(model, texts, "right", loaded.pad_id).keywords)  # may raise
        raise UsageError(f"it is not known how {type(model).__name__} reads text")
    return found


# ------------------------------------------------------------------------------------------ loading


def admitted(
    model: ModelSettings | nn.Module, tokenizer: Any = None, *, needs_tokenizer: bool = False
) -> Loaded:
    """A loaded checkpoint, or a model of transformers in memory. Raises `MhaError`."""
    if not isinstance(model, ModelSettings):
        if config_of(model) is None:
            message = f"{type(model).__name__} is not a model of transformers"
            raise UsageError(message, hint="mhacli.check examines other modules")
        return Loaded.in_memory(model.eval(), tokenizer)
    found = find(model, needs_tokenizer=needs_tokenizer)
    has_head = _GENERATING.search(str(getattr(found.config, "architectures", "")))
    try:
        return load_model(found, model, "generate" if has_head else None, allow_nonfinite=True)
    except MhaError as fault:
        if fault.code != "bad-file" or not has_head:
            raise
    note = (
        "loaded without its language head, whose weights are incomplete: the outputs are those of"
        " the last layer"
    )
    loaded = load_model(found, model, allow_nonfinite=True)
    return replace(loaded, notes=(*loaded.notes, note))


def _texts(loaded: Loaded, texts: Sequence[str], notes: list[str]) -> list[Tensor]:
    """The texts as tokens, the longest first: of two lengths and more than two, or with beginnings
    of the longest.
    """
    assert loaded.tokenizer is not None
    limit = min(
        most_positions(loaded.config) or MOST_TOKENS,
        MOST_OF_OURS if texts is TEXTS else MOST_TOKENS,
    )
    begun = [loaded.tokenizer.beginning(words, limit) for words in texts]
    rows = [row.ids for row, _ in begun]
    if not all(rows):
        raise MhaError("the text has no tokens", code="no-tokens")
    if texts is not TEXTS and any(n_more for _, n_more in begun):
        notes.append(f"texts are cut to their first {limit} tokens")
    require_ids([row for row, _ in begun], n_vocabulary_of(loaded.config), loaded.source)
    longest = max(rows, key=len)
    lengths = {len(ids) for ids in rows}
    n = len(longest)
    if len(rows) < 3 or len(lengths) < 2:
        rows += [longest[:cut] for cut in (2 * n // 3, n // 3) if cut and cut not in lengths]
    device = device_of(loaded.model)
    return [
        torch.tensor(ids, device=device)[:, None] for ids in sorted(rows, key=len, reverse=True)
    ]


TEXTS = (
    (
        "The bell rang twice before anyone in the old house woke up, and by then the snow had"
        " covered the road, the garden and the gate."
    ),
    "In 1969 they carried 21 kilograms of stones home, didn't they?",
    "Read it again.",
)
"""The default texts: sentences of several lengths, with numbers and punctuation."""
MOST_TOKENS = 512
"""The most tokens read of a text of the user's."""
MOST_OF_OURS = 48
"""The most tokens read of a default text."""
_GENERATING = re.compile(r"(ForCausalLM|LMHeadModel|DoubleHeadsModel|ForConditionalGeneration)\b")


# ---------------------------------------------------------------------------- checks of checkpoints


def eager(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether the default implementation of attention gives what eager attention gives."""
    model = passes.module
    within = partial(eager_in_place, passes.module)
    name = entry_of(model).implementation
    if name == "eager":
        return not_tried(passes, "eager is what runs by default")
    with within():
        if entry_of(model).implementation != "eager":
            return not_tried(passes, f"this family cannot switch from {name} to eager")
    default = [*passes.single_passes]
    in_eager = [passes.run_pass(text, within=within)[0] for text in passes.texts]
    if len({len(text) for text in passes.texts}) > 1:
        default += passes.run_pass(*passes.texts, mask=passes.model.mask)
        in_eager += passes.run_pass(*passes.texts, mask=passes.model.mask, within=within)
    both = f"{name}, the default, and eager"
    differences = [*map(difference_of, default, in_eager)]
    return compared(passes, differences, f"{both} agree", f"{both} give different outputs")


@contextmanager
def eager_in_place(model: Any) -> Iterator[None]:
    """Switches the model to `eager` attention within the context, if it can."""
    before = entry_of(model).implementation
    call_user(model.set_attn_implementation, "eager")
    try:
        yield
    finally:
        call_user(model.set_attn_implementation, before)


def row_sums(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether each query's weights, including that of a sink logit, sum to 1, and give the outputs.

    Uses the kernel's log-sum-exp if it returns one, and the weights themselves if attention is
    computed explicitly.
    """
    texts = [text[:MOST_TOKENS] for text in passes.texts]
    layers = _inspected(passes, texts if passes.model.mask is not None else texts[:1], intent)
    module: Any = passes.module
    inside = _inside(module, layers)
    understood = [
        layer
        for layer in layers
        if not any("is not understood" in reason for reason in layer.unverified)
    ]
    checks = [
        (check, layer)
        for layer in understood
        for check in layer.survey.checks
        if check.name == ROW_SUMS or check.is_of_outputs
    ]
    sums = [check for check, _ in checks if check.name == ROW_SUMS]
    if not sums:
        why = "no attention was captured"
        if layers:
            why = "mha does not know some keywords of these attention calls"
        return not_tried(passes, why, inside=inside)
    answer = partial(seen, passes, tried=Tried(len(texts[0]), 1), inside=inside)
    failing = next(((check, layer) for check, layer in checks if not check.ok), None)
    if failing is not None:
        check, layer = failing
        message = "the output is not the attention weights times the values"
        if check.name == ROW_SUMS:
            message = "the attention weights of a query do not sum to 1"
        if check.error is None:
            message += ": NaN or Inf"
        at = Place(attention=layer.name)
        return answer(False, message, check.error, tolerance=check.tolerance, at=at)
    worst = max(sums, key=lambda check: check.severity)
    reason = f"the attention weights of {len(understood)} attentions sum to 1, and give the outputs"
    return answer(True, reason, worst.error, tolerance=worst.tolerance)


def _inspected(passes: Passes, texts: Sequence[Tensor], intent: Intent) -> list[InspectedLayer]:
    """The attentions of a pass over some texts, each with its checks."""
    model: Any = passes.module
    reads_backwards = passes.model.has_source or intent.is_causal is False
    side: PaddingSide = "right" if reads_backwards else "left"
    inputs = ModelInputs(tuple(named_by_ids(text[:, 0].tolist()) for text in texts), side=side)
    settings = Run(model=ModelSettings(device=str(model.device)), keep=(), allow_nonfinite=True)
    inspection = PassInspection(model, inputs, settings, any_length=passes.model.has_source)
    with captured(model, inspection.take, batch=len(texts), heads="joined"):
        passes.run_pass(*texts, mask=passes.model.mask, side=side)
    return [result.layer for result in inspection.results()]


def _inside(model: nn.Module, layers: Sequence[InspectedLayer]) -> tuple[AttentionInside, ...]:
    """The attentions of a model by class, and whether their weights times their values were
    verified to be their output, or why not.
    """
    names: dict[tuple[str, str], dict[str, None]] = {}
    for layer in layers:
        kind = type(model.get_submodule(layer.name)).__name__
        reason = next(iter(layer.unverified), "")
        names.setdefault((kind, reason), {})[layer.name] = None
    return tuple(
        AttentionInside(kind, tuple(named), "unknown" if reason else "right", reason)
        for (kind, reason), named in names.items()
    )


_WORD = "word"


def doubled_beginning(
    tokenizer: ModelTokenizer | None, passes: Passes, intent: Intent, answers: Answers
) -> Observed:
    """Whether the beginning-of-text token is doubled in a text, a chat, or text that was decoded
    and encoded again.

    It is common, and no fault, that both the template and the tokenizer add it: chats must then be
    encoded without special tokens, as transformers does. The result is a warning.
    """
    if tokenizer is None:
        return not_tried(passes, "there is no tokenizer")
    encoded = tokenizer.sequence(_WORD).ids
    bare = tokenizer.sequence(_WORD, special=False).ids
    first = tokenizer.bos_id
    if first is None and encoded[1 : 1 + len(bare)] == bare:
        first = encoded[0]  # what the tokenizer puts before a text, such as [CLS]
    if first is None:
        reason = "the tokenizer has no token for the beginning of a text"
        return not_tried(passes, reason)

    def times(text: str, *, special: bool = True) -> int:
        return len(
            list(takewhile(lambda i: i == first, tokenizer.sequence(text, special=special).ids))
        )

    name = tokenizer.library.id_to_token(first) or f"<{first}>"
    decoded = guarded("the tokenizer", tokenizer.path, lambda: tokenizer.library.decode(encoded))
    counts = {
        times(decoded): "a text that was decoded and is encoded again",
        times(_WORD): "an encoded text",
    }
    chat = None
    with suppress(MhaError):  # there is no template, or it refuses the message
        chat, _ = tokenizer.chat((Message("user", _WORD),))
        counts.setdefault(times(chat, special=False), "a chat in its template")
    most = max(counts)
    answer = partial(seen, passes, tolerance=1, tried=Tried(len(encoded), 1))
    if most > 1:
        reason = f"{counts[most]} begins with {name!r} {most} times"
        return answer(False, reason, most)
    if chat is not None and times(chat) > 1:
        advice = (
            "encode a rendered chat with add_special_tokens=False, or let apply_chat_template make"
            " the ids"
        )
        both = f"the chat template writes {name!r} and the tokenizer adds it"
        reason = f"{both}: a chat that is encoded as any text begins with it twice"
        return answer(None, reason, times(chat), caution=advice)
    texts = "text" if chat is None else "text or chat"
    return answer(True, f"no {texts} begins with {name!r} twice", most)
