"""A run of a checkpoint: its tokenizer, the texts, the model and the tokens that it generates are
prepared; then its attention is inspected in one unchanged pass, each layer as it is computed.

Each layer is reduced to statistics, or its matrices are kept, before the next one runs: memory
holds one layer at a time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from mhacli.attention.axes import Axes
from mhacli.attention.devices import free_bytes
from mhacli.errors import MhaError, UsageError, bad_file, guarded, lacks_memory
from mhacli.io.long_work import Progress, no_progress
from mhacli.models import foreign
from mhacli.record.record import Generated, Record, SpanTokens
from mhacli.run import FLOAT32_BYTES, KEPT, MAX_ALIVE, Run, require_room, statistics_bytes
from mhacli.settings import DEFAULT_MAX_TOKENS, AttentionKind, PaddingSide
from mhacli.text.spans import Ranges, find_spans, tokens_of
from mhacli.text.tokenizers import of_each
from mhacli.text.tokens import TokenSequence
from mhacli.usercode.door import UserRaised, call_user, ours

from .capture import captured
from .layer_names import (
    FROM_PYTHON,
    dtype_of,
    entry_of,
    first_position_of,
    most_positions,
    n_vocabulary_of,
    places_of,
)
from .layers import ModelInputs, PassInspection, axes_of, nothing_seen
from .load import (
    LanguageHead,
    Loaded,
    ModelTokenizer,
    device_of,
    find,
    joined,
    load_model,
    require_ids,
)


@torch.no_grad()
def prepare_checkpoint(
    request: Run, head: LanguageHead | None = None
) -> tuple[CheckpointRun, tuple[str, ...]]:
    """The run of a checkpoint, whose model has a language `head` if requested and runs without it;
    and notes for the user. Raises `MhaError` for requests that cannot work, if possible before the
    weights are loaded.
    """
    began, head = perf_counter(), "generate" if request.n_generated else head
    loaded = find(request.model, request.checkpoint)
    texts = make_texts(request, loaded)
    run = run_of(
        load_model(loaded, request.model, head, allow_nonfinite=request.allow_nonfinite),
        texts,
        request,
    )
    if request.n_generated:
        run.inputs, run.generated = _generate(run.loaded, run.inputs, request.n_generated)
    run.seconds["loading"] = perf_counter() - began
    return run, (*run.loaded.notes, *run.inputs.notes)


def run_of(loaded: Loaded, texts: ModelInputs, request: Run) -> CheckpointRun:
    """The run of texts by a checkpoint without its head; padding is on the side of the tokenizer,
    unless another is named.
    """
    if request.model.padding == "left" and loaded.config.is_encoder_decoder:
        raise UsageError(
            "--padding left does not work with a pair of encoder and decoder",
            hint="leave out --padding",
        )
    side = request.model.padding or loaded.reader.side
    inputs = make_inputs(loaded.model, texts, side, loaded.pad_id)
    return CheckpointRun(loaded.model.base_model, inputs, request, loaded=loaded)


# ---------------------------------------------------------------------------------------- the texts


def make_texts(request: Run, loaded: Loaded, *, may_lack: bool = False) -> ModelInputs:
    """The tokens of all texts, as many as the model has positions for, without keywords. Raises
    `MhaError` and `UsageError`, also for a span that no text has, unless they `may_lack` it.
    """
    config, tokenizer, limit = loaded.config, loaded.reader, request.max_tokens
    is_pair = bool(config.is_encoder_decoder)
    # a decoder's text begins with its start token and has no end token
    is_answer = is_pair and bool(request.context)
    texts, chat = request.texts, dict[str, Ranges]()
    if request.chat:
        rendered, chat = tokenizer.chat(request.chat)
        texts = (rendered,)
    special = not request.chat and not is_answer
    seconds: Sequence[str | None] = of_each(request.pair, len(texts), "--pair")
    begun = [
        tokenizer.beginning(text, limit, special=special, pair=pair)
        for text, pair in zip(texts, seconds or [None] * len(texts), strict=True)
    ]
    sequences = [_started(tokenizer, config, text) if is_answer else text for text, _ in begun]
    notes = [*_notes(request, loaded, sequences, [n_more for _, n_more in begun])]
    sequences = _required(sequences, config, limit, request.path)
    context = [tokenizer.beginning(text, limit)[0] for text in request.context]
    context = _required(context, config, limit, request.path)
    if is_pair and not context:  # the encoder reads the text; the decoder has only its start token
        context = sequences
        sequences = [_started(tokenizer, config)] * len(context)
    context = of_each(context, len(sequences), "--context")
    require_ids([*sequences, *context], n_vocabulary_of(config), request.path)
    spans: tuple[SpanTokens, ...] = ()
    if request.spans:
        spans = _spans(request, sequences, chat, is_pair=bool(context), may_lack=may_lack)
    return ModelInputs(tuple(sequences), tuple(context) or None, spans=spans, notes=tuple(notes))


def _notes(
    request: Run, loaded: Loaded, sequences: Sequence[TokenSequence], n_more: Sequence[int]
) -> Iterator[str]:
    """Notes on texts without their usual first token, on texts that may be pairs, and on texts of
    which `n_more` tokens are left out.
    """
    limit, tokenizer = request.max_tokens, loaded.reader
    for text in sequences:
        yield from tokenizer.begin_warnings(text)
    n_types = getattr(loaded.config, "type_vocab_size", 0) or 0
    if n_types > 1 and not request.pair and not request.chat:
        for text in sequences:
            yield from tokenizer.pair_warnings(text)
    for i, (text, n) in enumerate(zip(sequences, n_more, strict=True)):
        n_all = len(text.ids) + n
        if limit is not None and n_all > limit:
            words = f"only the first {limit:,} of the {n_all:,} tokens of text {i} are used"
            yield f"{words} (--max-tokens)"


def _required(
    sequences: Sequence[TokenSequence], config: Any, limit: int | None, path: str
) -> list[TokenSequence]:
    """The sequences, each cut to `limit` tokens. Raises `MhaError` for one without tokens, or with
    more tokens than the model has positions, or than the default limit.
    """
    most = most_positions(config) or sys.maxsize
    allowed = most if limit is not None else min(most, DEFAULT_MAX_TOKENS)
    kept = [sequence.first(limit) for sequence in sequences]
    for number, n in enumerate(len(sequence.ids) for sequence in kept):
        if not n:
            raise MhaError(f"text {number} has no tokens", code="no-tokens")
        if n > allowed:
            what, takes_all = f"the {most} positions of {path}", ""
            if n <= most:
                what = f"the {DEFAULT_MAX_TOKENS} of the default limit"
                takes_all = f"; --max-tokens {n} takes all"
            raise MhaError(
                f"text {number} has {n} tokens, more than {what}",
                hint=f"--max-tokens {allowed} takes the first {allowed}{takes_all}",
                code="too-large",
            )
    return kept


_STARTS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
"""The settings for the start token of a decoder; the first that its config has counts.
transformers' `generate` uses the first two; T5 was trained with the third."""


def _started(
    tokenizer: ModelTokenizer, config: Any, text: TokenSequence | None = None
) -> TokenSequence:
    """A decoder's text after its start token, which is added unless it is there."""
    ids = {name: getattr(config, name, None) for name in _STARTS}
    name = next((name for name, token_id in ids.items() if token_id is not None), None)
    if name is None:
        raise UsageError(
            f"{config.model_type} needs --context: its config names no token for the decoder to"
            " start with",
            hint="--context is the input of the encoder, TEXT that of the decoder",
        )
    start = ids[name]
    if not isinstance(start, int) or not 0 <= start < n_vocabulary_of(config):
        raise bad_file(tokenizer.path, f"{name} of its config is {start!r:.40}: no token id")
    begin = tokenizer.of_ids([start])
    if text is None:
        return begin
    return text if text.ids[:1] == begin.ids else joined(begin, text)


def _spans(
    request: Run,
    sequences: list[TokenSequence],
    chat: Mapping[str, Ranges],
    *,
    is_pair: bool,
    may_lack: bool,
) -> tuple[SpanTokens, ...]:
    """The tokens of each named span in every text, without spans that all texts lack."""
    if is_pair:
        raise spans_of_pair()
    spans_of_texts = [
        find_spans(request.spans, sequence.text, chat, may_lack=may_lack) for sequence in sequences
    ]
    spans_of_tokens = []
    for name in spans_of_texts[0]:
        tokens = tuple(
            tokens_of(spans[name], each)
            for spans, each in zip(spans_of_texts, sequences, strict=True)
        )
        if any(tokens):
            spans_of_tokens.append(SpanTokens(name, tokens))
        elif not may_lack:
            raise UsageError(
                f"span {name!r} has no token of the text", hint="--max-tokens may have cut it off"
            )
    return tuple(spans_of_tokens)


def spans_of_pair() -> UsageError:
    """The error for spans of a model that reads two texts."""
    return UsageError(
        "--span does not work with a pair of encoder and decoder, which read two texts",
        hint="leave out --span",
    )


# ----------------------------------------------------------------------------- the inputs of a pass


def make_inputs(model: Any, texts: ModelInputs, side: PaddingSide, pad_id: int) -> ModelInputs:
    """The texts with the keywords of one pass. Raises `UsageError` for a model that does not read
    text.
    """
    family, accepted = model.config.model_type, inspect.signature(model.forward).parameters
    if "input_ids" not in accepted or model.main_input_name != "input_ids":
        raise UsageError(
            f"the model reads {model.main_input_name}, not text (family {family})", hint=FROM_PYTHON
        )
    if hasattr(model, "vision_model") and hasattr(
        model, "logit_scale"
    ):  # it compares texts and images
        raise UsageError(
            f"the model needs pixel_values besides text (family {family})", hint=FROM_PYTHON
        )
    is_pair, device = bool(model.config.is_encoder_decoder), device_of(model)
    if texts.context is not None and not is_pair:
        raise UsageError(
            f"--context does not work with {family}, which has no encoder",
            hint="put it into the text, or give the second text of a pair by --pair",
        )
    if is_pair:
        encoder = _as_read_by(model.get_encoder(), texts.context or ())
        keywords = _padded("", encoder, "right", pad_id, device)
        keywords |= _padded("decoder_", texts.sequences, "right", pad_id, device)
        return replace(texts, context=encoder, side="right", keywords=keywords)
    sequences = _as_read_by(model, texts.sequences)
    keywords = _padded("", sequences, side, pad_id, device)
    if side == "left" and "attention_mask" in keywords and "position_ids" in accepted:
        # tables of positions begin where the text does, as they do when the model generates
        places = (keywords["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        keywords["position_ids"] = places + first_position_of(model.config)
    return replace(texts, sequences=sequences, side=side, keywords=keywords)


def _as_read_by(model: Any, sequences: Sequence[TokenSequence]) -> tuple[TokenSequence, ...]:
    """The texts, without token types if the model takes none."""
    takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
    return tuple(text if takes_types else replace(text, token_type_ids=()) for text in sequences)


def _padded(
    prefix: str,
    sequences: Sequence[TokenSequence],
    side: PaddingSide,
    pad_id: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """The ids; a mask if there is padding, because without one a model takes its fastest path; and
    the token types of pairs.
    """
    lengths = [len(sequence.ids) for sequence in sequences]

    def filled(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
        numbers = [torch.tensor(row, dtype=torch.long) for row in rows]
        made = nn.utils.rnn.pad_sequence(
            numbers, batch_first=True, padding_value=fill, padding_side=side
        )
        return made.to(device)

    keywords = {f"{prefix}input_ids": filled((text.ids for text in sequences), pad_id)}
    if min(lengths) < max(lengths):
        keywords["decoder_attention_mask" if prefix else "attention_mask"] = filled(
            ([1] * n for n in lengths), 0
        )
    if any(text.token_type_ids for text in sequences):
        types = (text.token_type_ids or [0] * n for text, n in zip(sequences, lengths, strict=True))
        keywords["token_type_ids"] = filled(types, 0)
    return keywords


# --------------------------------------------------------------------------------------- generation


def _generate(loaded: Loaded, inputs: ModelInputs, n: int) -> tuple[ModelInputs, Generated]:
    """The inputs with the tokens of the greedy continuation, and whether one pass over the whole
    text reproduces them.
    """
    if len(inputs.sequences) != 1:
        raise UsageError(
            f"--generate continues one text, and {len(inputs.sequences)} are given",
            hint="give each text in a run of its own",
        )
    model, tokenizer = loaded.model, loaded.reader
    sequence = inputs.sequences[0]
    length, most = len(sequence.ids), most_positions(loaded.config)
    if most is not None and length + n > most:
        raise MhaError(
            f"{length} tokens and {n} generated ones are more than the {most} positions of"
            f" {loaded.source}",
            hint=f"--generate {most - length} fits" if most > length else None,
            code="too-large",
        )
    # the checkpoint's settings for generation, such as penalties and forced tokens, are ignored
    model.generation_config = type(model.generation_config)(
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=loaded.pad_id,
        eos_token_id=model.generation_config.eos_token_id,
        decoder_start_token_id=sequence.ids[0] if inputs.context else None,
    )
    ids = guarded("generation", loaded.source, lambda: model.generate(**inputs.keywords))
    new = ids[0, length:].tolist()
    if not new:
        raise MhaError(
            "the model ends the text at once and generates no token",
            hint="try another text",
            code="no-tokens",
        )
    whole = replace(inputs, sequences=(joined(sequence, tokenizer.of_ids(new)),))
    whole = make_inputs(model, whole, inputs.side, loaded.pad_id)
    outputs = run_model(model, lambda: model(**whole.keywords, use_cache=False))
    predicted = outputs.logits[0, length - 1 : -1].argmax(dim=-1).tolist()
    repeated = len([a for a, b in zip(predicted, new, strict=True) if a == b])
    return whole, Generated((length,), len(new), repeated)


# ------------------------------------------------------------------------------- the inspected pass


@dataclass
class CheckpointRun(PassInspection):
    """The inspection of one pass of a checkpoint, which `run` makes. The `model` is that of
    `loaded`, or what is below its language head.
    """

    loaded: Loaded = field(kw_only=True)
    generated: Generated | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    # ----------------------------------------------------------------------------------- its memory

    def _size(self, name: str) -> int:
        """A size in the config, the largest if it has one per layer; 1 if it is missing."""
        value = getattr(self.loaded.text_config, name, None) or 1
        return max(value) if isinstance(value, (list, tuple)) else int(value)

    def require_room(self, batch: int) -> int:
        """The peak of a pass over `batch` texts in bytes, without the weights; a kept matrix exists
        once more while it is assembled. Raises `MhaError`, with the longest text that fits, if it
        does not fit in memory.
        """
        settings, device = self.request.model, device_of(self.model)
        places = places_of(self.loaded.config)
        self.n_layers = max(1, len([n for kind, n in places if settings.includes(n, kind)]))
        n_heads = self._size("num_attention_heads")
        d_model, d_inner = self._size("hidden_size"), self._size("intermediate_size")
        item = int(self.model.dtype.itemsize)
        keep = KEPT if self.request.keep is None else self.request.keep
        n_kept = self.n_layers * len(keep)
        builds_matrices = foreign.attn_implementation(self.loaded.config) != "sdpa"
        statistics = partial(
            statistics_bytes, batch, n_heads, wide=FLOAT32_BYTES, on_gpu=device.type != "cpu"
        )

        def needed(length: int) -> int:
            cells = batch * length * length
            kept_bytes = min(self.request.keep_limit, n_kept * cells * n_heads * FLOAT32_BYTES)
            holders = [*filter(None, (builds_matrices, kept_bytes))]
            matrices = 4 * len(holders) * cells * n_heads * max(FLOAT32_BYTES, item)
            rows = batch * length * (8 * d_model + 3 * max(d_inner, 4 * d_model)) * item
            if device.type != "cpu":
                rows += min(MAX_ALIVE, self.n_layers * batch * length * 4 * d_model * item)
            return rows + matrices + 3 * cells + kept_bytes + statistics((length, length))

        texts = (*self.inputs.sequences, *(self.inputs.context or ()))
        length = max(len(text.ids) for text in texts)
        what = f"{length} tokens, {n_heads} heads, batch {batch}"
        return require_room(needed, length, free_bytes(device), what=what)

    # ------------------------------------------------------------------------------------- the pass

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress, *, verify: bool = False) -> Record:
        """The record of an inspected pass; if requested also of a pass without inspection, whose
        outputs must be the same bits. Raises `MhaError` if it does not fit into memory.
        """
        began = perf_counter()
        settings, keywords = self.request.model, self.inputs.keywords
        batch = len(self.inputs.sequences)
        self.peak_bytes = 0 if self.has_shapes_alone else self.require_room(batch)
        self.report_progress = report_progress
        report_progress("the first layer", 0.0)
        with captured(self.model, self.take, batch=batch, heads="joined"):
            outputs = outputs_of(self.model, keywords)
        self.wait()
        self.seconds["pass and statistics"] = perf_counter() - began
        if not self.measured:
            unfit = {
                (kind, n): reason
                for (kind, n), reason in self.unfit.items()
                if settings.includes(n, kind)
            }
            raise nothing_seen(self.loaded.config.model_type, settings.layers, self.found, unfit)
        entry = entry_of(self.model, self.loaded.source, self.loaded.revision)
        entry = replace(
            entry,
            generated=self.generated,
            random_weights=self.loaded.random_weights,
            tiny=self.loaded.is_tiny,
        )
        if verify or settings.verify_outputs:
            began = perf_counter()
            n = max(tensor.shape[1] for tensor in keywords.values())
            is_same = self._repeats(outputs)
            entry = replace(entry, identical_outputs=is_same, compared_len=n)
            self.seconds["comparison"] = perf_counter() - began
        record = self.record_of(entry, self.seconds, device=settings.device)
        checkpoint = self.loaded.checkpoint
        config = replace(record.config, tokenizer=checkpoint.tokenizer or "word")
        return replace(record, config=config, weights=checkpoint.path)

    def _repeats(self, outputs: Mapping[str, Any]) -> bool:
        """Whether a pass without inspection gives the same bits."""
        again = outputs_of(self.model, self.inputs.keywords)
        same = [
            torch.allclose(tensor, again[name], rtol=0, atol=0, equal_nan=True)
            for name, tensor in outputs.items()
            if isinstance(tensor, Tensor)
        ]
        return bool(same) and all(same)

    def axes(self, kind: AttentionKind) -> Axes:
        """The texts on the query and key axes of an attention of this kind."""
        return axes_of(self.inputs, kind, self.loaded.dtype, device_of(self.model))


# ------------------------------------------------------------------------------------------- a pass


def outputs_of(model: Any, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
    """The outputs of one pass of a model without a KV cache. Raises `MhaError` as `run_model`
    does.
    """
    return dict(forward_of(model, keywords)())


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor of real numbers in an output, the logits if it names them."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if getattr(value, "logits", None) is not None:
        return first_tensor(value.logits)
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        return None
    return next((tensor for each in value if (tensor := first_tensor(each)) is not None), None)


def forward_of(model: Any, inputs: Any) -> Callable[[], Any]:
    """A call of a model without a KV cache, on its device, with keywords, positional arguments or
    one tensor. A model that takes other keywords than those of transformers gets the ids alone.
    Raises `UsageError` if it cannot take the inputs, and the call raises `MhaError` as `run_model`
    does.
    """
    device, dtype = device_of(model), dtype_of(model)
    taken = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    args, keywords = _arguments(inputs)
    needed = [name for name, value in keywords.items() if _matters(name, value)]
    unknown = [name for name in keywords if name not in taken and not takes_any]
    if needed == ["input_ids"] and unknown[:1] == needed:
        args, keywords = (keywords["input_ids"],), {}
    elif any(name in needed for name in unknown):
        raise UsageError(
            f"{type(model).__name__} does not take {', '.join(unknown)}",
            hint=f"it takes {', '.join(taken)}",
        )
    keywords = {name: value for name, value in keywords.items() if name not in unknown}
    has_cache = hasattr(getattr(model, "config", None), "use_cache")
    if has_cache and ("use_cache" in taken or takes_any):
        keywords.setdefault("use_cache", False)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    args = tuple(map(moved, args))
    keywords = {name: moved(value) for name, value in keywords.items()}
    return lambda: run_model(model, lambda: model(*args, **keywords))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as positional arguments and keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}


def _matters(name: str, value: Any) -> bool:
    """Whether a keyword changes what is computed: not a mask without padding, nor a choice of what
    is returned.
    """
    if isinstance(value, Tensor):
        return not (name == "attention_mask" and bool(value.all()))
    return name not in ("use_cache", "return_dict") and value is not None


def run_model(model: Any, run: Callable[[], Any]) -> Any:
    """The result of `run`, which calls the model. Raises `MhaError` for an exception in the pass,
    such as that of inconsistent sizes in the config, with its message and the innermost module that
    raised it.
    """
    try:
        return call_user(run)
    except UserRaised as raised:
        fault = raised.fault
        if isinstance(fault, MhaError) or lacks_memory(fault):
            raise fault from None
        names = {id(module): name for name, module in model.named_modules() if name}
        where, has_config = "", getattr(model, "config", None) is not None
        of_config = "sizes in its config.json may contradict each other"
        hint = f"{of_config}, or it needs an input other than text" if has_config else None
        for frame, _ in walk_tb(fault.__traceback__):  # the innermost module comes last
            module = frame.f_locals.get("self")
            if id(module) in names:
                where = f"{names[id(module)]} ({type(module).__name__}) of "
                if not has_config and isinstance(module, nn.Embedding):
                    hint = f"{names[id(module)]} has rows 0 to {module.num_embeddings - 1}"
        text = next((line for line in str(fault).splitlines() if line.strip()), "no message")
        raise MhaError(
            f"the forward pass of the model raised {type(fault).__name__} in"
            f" {where}{type(model).__name__}: {text:.300}",
            hint=hint,
            code="model-failed",
            path=getattr(model, "name_or_path", None) or None,
        ) from fault


# ----------------------------------------------------------------------------------------- rounding


TIMES_SHAKEN: Mapping[str, float] = {"float64": 8, "float32": 8, "float16": 3, "bfloat16": 3}
"""The tolerance as a multiple of the change of outputs when each part rounds differently. Of 26
families none exceeded 0.7 in float32 and 0.5 in 16 bits, whose parts are moved by twice their
rounding; faults reach thousands."""


@contextmanager
def shaken_parts(model: Any, seed: int) -> Iterator[None]:
    """Moves every output of the model's parts by one rounding step, up or down at random, within
    the context.

    The results then differ by as much as with another order of summation.
    """
    generator = torch.Generator().manual_seed(seed)
    eps = max(torch.finfo(dtype_of(model)).eps, torch.finfo(torch.float32).eps)

    @ours()
    def shake(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.is_nested:
            return None
        n = output.numel()
        bits = torch.empty(-(-n // 8), dtype=torch.int64).random_(generator=generator)
        signs = bits.view(torch.int8)[:n].bitwise_and_(2).sub_(1)
        step = signs.view(output.shape).to(output.device).to(output.dtype)
        # in place: the logits of a long text are large
        return step.mul_(output).mul_(eps).add_(output)

    with ExitStack() as hooks:
        for module in model.modules():
            if not any(module.children()):
                hooks.callback(module.register_forward_hook(shake).remove)
        yield
