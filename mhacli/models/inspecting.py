"""`mhacli.inspecting`: inspects the attention of a model in memory while its user runs it. The
attention over one text is that of a single pass, or is put together from the passes that fill a
cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from operator import index
from time import perf_counter
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mhacli.attention.core import four_axes
from mhacli.attention.devices import without_autocast
from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.numbers import shown
from mhacli.record.exports import HeadTable
from mhacli.record.record import Positions, Record
from mhacli.run import KEPT, Run
from mhacli.settings import (
    DEFAULT_KEEP_LIMIT,
    AttentionKind,
    LayerChoice,
    ModelSettings,
    PaddingSide,
    Statistics,
)
from mhacli.text.tokens import TokenSequence, named_by_ids, places

from .capture import Call, CallKey
from .foreign import state_of
from .layer_names import LayerKey, config_of, entry_of
from .layers import (
    ModelInputs,
    PassInspection,
    layer_words,
    nothing_seen,
    unfit_words,
)
from .load import ModelTokenizer, device_of, tokenizer_in_memory
from .masking import as_attention
from .means import HeadSums
from .passes import Half, ModelPass, ReadIds, followed, require_open

_NAME = "mhacli.inspecting"


@contextmanager
def inspecting(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    keep: Sequence[str] = (),
    keep_limit: int = DEFAULT_KEEP_LIMIT,
    layers: Sequence[int | LayerChoice] | None = None,
    heads: Sequence[int] | None = None,
    keep_passes: bool = True,
    threads: bool = True,
) -> Iterator[Seen]:
    """A context in which every call of `model` is inspected: `with inspecting(model) as seen:
    model(**inputs)`.

    You call the model as usual, with or without gradients, in any dtype, on any devices, in
    training or evaluation. Outputs, gradients and random numbers are the same, bit for bit, as
    without chain. `seen.record` is the record of the last pass, `seen.passes` has the records
    of all passes (only the last without `keep_passes`), and `seen.statistics()` the means over
    them.

    A record has the statistics of every head. `keep` names matrices to store as well, among
    `pattern`, `z`, `scores` and `qk`, for each layer while they take less than `keep_limit` bytes
    in all. The same limit holds for the tensors that are copied while a text is generated. `layers`
    are numbers, or pairs such as `("cross", 2)`; None for `layers` or `heads` means all.
    `tokenizer` is a tokenizer of transformers; without one, tokens are shown as their ids.

    Calls in other threads are inspected too, each thread's as texts of their own. A call while
    another thread is within the model runs without being inspected, and so do those that read its
    cache; `seen.notes` says it. Without `threads` a call from another thread raises `MhaError`.

    Contexts can be nested, also for one model; a second thread waits until the first has closed its
    context. Raises `MhaError` for a model that hides its parts (compiled, scripted, DataParallel).
    """
    require_open(model, _NAME)
    try:
        names = [keep] if isinstance(keep, str) else keep
        request = Run(
            model=ModelSettings(layers=None if layers is None else layer_choices(layers)),
            statistics=Statistics(heads=None if heads is None else _numbers(heads)),
            keep=tuple(KEPT[KEPT.index(name)] for name in names),
            keep_limit=_numbers([keep_limit])[0],
            allow_nonfinite=True,
        )
    except (TypeError, ValueError):
        given = f"layers={layers!r}, heads={heads!r}, keep={keep!r}, keep_limit={keep_limit!r}"
        raise UsageError(f"{_NAME} cannot take {given}", hint=_FORMS) from None
    known = None if tokenizer is None else tokenizer_in_memory(tokenizer)
    seen = Seen(model, known, request, keep_passes=keep_passes)
    with closing(seen), followed(model, seen, by=_NAME, threads=threads) as watch:
        seen.silent = watch.silent
        yield seen


_FORMS = (
    'layers are numbers, or pairs such as ("cross", 2) of a kind and a number, one at least; heads'
    " are numbers from 0 on, one at "
    f"least; keep names matrices among {', '.join(KEPT)}; keep_limit is a number of bytes"
)


def _numbers(values: Iterable[Any]) -> tuple[int, ...]:
    numbers = tuple(dict.fromkeys(map(index, values)))
    if min(numbers) < 0:
        raise ValueError(values)
    return numbers


def layer_choices(values: Iterable[Any]) -> tuple[LayerChoice, ...]:
    """Layers that a caller in Python names. Raises `TypeError` or `ValueError` for other than
    numbers, or pairs with a kind.
    """
    kinds = (None, *get_args(AttentionKind))
    pairs = [layer if isinstance(layer, (tuple, list)) else (None, layer) for layer in values]
    _numbers(number for _, number in pairs)
    return tuple((kinds[kinds.index(kind)], index(number)) for kind, number in pairs)


class Seen:
    """The results of a context of `inspecting`: a record for each pass, and `notes` about them.

    `silent` are modules, with their classes, that are named like attentions but in which no
    attention was captured.
    """

    def __init__(
        self, model: nn.Module, tokenizer: ModelTokenizer | None, request: Run, *, keep_passes: bool
    ) -> None:
        self._model: Any = model
        self._tokenizer = tokenizer
        self._request = request
        self._entry = entry_of(model)
        self._device = device_of(model)
        self._lists_layers = config_of(model) is not None
        self._keeps_passes = keep_passes
        self._sums = HeadSums()
        self.passes: tuple[Record, ...] = ()
        """The records, in order, of all finished passes with at least one requested attention."""
        self._notes: dict[str, None] = {}
        self._unfit: dict[LayerKey, str] = {}
        self._met: set[LayerKey] = set()
        self._strays: dict[str, None] = {}
        self.silent: Mapping[str, str] = {}
        self._n_passes = 0
        self.refused: MhaError | None = None
        self._chains: dict[int, TextPasses] = {}  # by thread
        self._thread = 0
        self._began = ModelPass(1)

    def __repr__(self) -> str:
        """The number of passes, and the notes."""
        n, notes = len(self.passes), "".join(f"; {note}" for note in self.notes)
        return f"<Seen: {n} pass{'' if n == 1 else 'es'} of {self._entry.architecture}{notes}>"

    @property
    def record(self) -> Record:
        """The record of the last pass. Raises `MhaError`, with the calls that were made, if there
        is none.
        """
        if self.passes:
            return self.passes[-1]
        name = self._entry.architecture
        if self._strays:
            names = ", ".join([*self._strays][:4])
            raise MhaError(
                f"only parts of {name} were called by themselves: {names}",
                hint=f"give {_NAME} the module that is called",
                code="not-called",
            )
        if not self._n_passes:
            if self.refused is not None:
                raise self.refused
            raise MhaError(
                f"{name} was not called within {_NAME}",
                hint=(
                    "call this object inside the with block; copies and wrappers are different"
                    " objects"
                ),
                code="not-called",
            )
        raise nothing_seen(name, self._request.model.layers, self._met, self._unfit)

    def statistics(self) -> HeadTable:
        """The heads with means over the queries of all finished passes, like `Record.heads` for one
        pass.

        `max_score` is the largest of all passes. Statistics that are no means over queries have no
        value: quantiles of the distance, the strongest distance, sinks and strong cells.
        """
        return self._sums.table()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on unknown tokens, and on calls and layers without a record."""
        outside = "was called by itself, outside of a call of the model, and is in no record"
        notes = [*self._notes, *(f"{name} {outside}" for name in self._strays)]
        if not self.passes:
            return tuple(notes)
        for kind, layer in self._request.model.layers or ():
            if not any(layer == n and kind in (None, met_kind) for met_kind, n in self._met):
                notes.append(f"layer {layer_words([(kind, layer)])} was not seen")
        if not self._lists_layers:  # otherwise the record lists the layers without attention
            for name, class_name in self.silent.items():
                where = f"{name} ({class_name}), which is in no record"
                notes.append(f"no attention was seen in {where}")
        return tuple(notes)

    # ------------------------------------------------------------------------- the events of passes

    def begin(self, began: ModelPass) -> None:
        """A pass begins."""
        self._n_passes += 1
        self._began, self._thread = began, threading.get_ident()
        alive = {each.ident for each in threading.enumerate()} | {self._thread}
        for thread in {*self._chains} - alive:
            self.finish(thread)
        if self._chain is not None:
            self._chain.leave_out_rejected()
            if self._chain.goes_on(began):
                self._chain.passes.append(began)
                return
        self._begin_text(began)

    @property
    def _chain(self) -> TextPasses | None:
        """The text of the pass that runs."""
        return self._chains.get(self._thread)

    def skip(self) -> None:
        """Notes a call that is not followed."""
        busy = f"a call of {self._entry.architecture} while another thread was within it"
        self._notes[f"{busy} is in no record, nor are those that read its cache"] = None

    def _begin_text(self, began: ModelPass) -> TextPasses:
        """Begins another text, with a pass."""
        self.finish(self._thread)
        chain = self._chains[self._thread] = TextPasses(
            self._model,
            ModelInputs(),
            self._request,
            any_length=True,
            passes=[began],
            tokenizer=self._tokenizer,
            n_tokens=began.n_past,
        )
        return chain

    def take(self, call: Call) -> None:
        """Inspects an attention of the pass. What reads another text is in another record."""
        chain = self._chain
        if chain is None:  # the context was closed meanwhile
            return
        reads = {half: self._began.halves.get(half) for half in _halves_of(call)}
        used = chain.last.used
        others = [half for half, read in reads.items() if used.setdefault(half, read) is not read]
        if any(reads[half] is not None for half in others):
            chain = self._begin_text(replace(self._began, used=reads))
        elif others:
            chain.unknown.add(call.key)
        if any(read is None and half in self._began.halves for half, read in reads.items()):
            why = "a call reads several texts, and which of them an attention reads is not known"
            self._notes[f"{why}: tokens are shown as positions"] = None
        last_head = max(self._request.statistics.heads or (0,))
        is_requested = self._request.model.includes(call.layer, call.kind)
        if 0 in call.shape:
            chain.unfit[call.place] = "attention without a token"
        elif is_requested and last_head >= call.shape[1]:
            words = out_of_range("head", last_head, call.shape[1])
            chain.unfit[call.place] = f"attention in which {words}"
        elif call.kind == "encoder" or not chain.last.is_cached:
            chain.inspect(call)
        else:
            chain.compare_cache(call)
            if is_requested:
                chain.keep_part(call)
            else:
                chain.found.append(call.place)

    def end(self, *, is_whole: bool) -> None:
        """A pass is over. With a cache, another pass may continue its text; after an encoder, a
        decoder may follow.
        """
        if not is_whole:
            self._chains.pop(self._thread, None)
            self._notes["a pass that did not end is in no record"] = None
        elif self._chain is not None:
            last = self._chain.last
            if last.n_cached != self._chain.n_tokens:  # such as one that is compressed
                last.cache = None
            if not (last.is_cached or self._chain.is_encoded):
                self.finish(self._thread)

    def finish(self, thread: int) -> None:
        """Makes the record of a pass of a thread, or of several with a cache, that no other pass
        can continue.
        """
        chain = self._chains.pop(thread, None)
        if chain is None:
            return
        record = None
        chain.leave_out_rejected()
        for each in chain.passes:
            each.cache = None  # its memory is the user's
        with torch.no_grad(), without_autocast(self._device):
            is_reordered, masks = chain.is_reordered, dict[object, Tensor]()
            for name in [*chain.parts]:
                parts = chain.parts.pop(name)
                if is_reordered:  # the passes of a row may belong to several texts
                    chain.unfit[parts[0].call.place] = _REORDERED
                else:
                    chain.inspect(joined(parts, masks))
            if chain.measured:
                chain.wait()
                seconds = {"pass and statistics": perf_counter() - chain.began}
                record = chain.record_of(self._entry, seconds)
        self._notes |= dict.fromkeys(chain.notes)
        self._unfit |= chain.unfit
        self._met |= {*chain.found, *chain.unfit}
        if record is not None:
            self._sums.add(record)
            self.passes = (*self.passes, record) if self._keeps_passes else (record,)
        elif chain.unfit:
            self._notes[f"a pass is in no record: {unfit_words(chain.unfit)}"] = None

    def stray(self, name: str) -> None:
        """Notes an attention outside any pass."""
        self._strays[name] = None

    def close(self) -> None:
        """Ends the last passes, and frees the model."""
        for thread in [*self._chains]:
            self.finish(thread)
        self._model, self._began = None, ModelPass(1)


# ----------------------------------------------------------------------------- passes over one text


def _halves_of(call: Call) -> tuple[Half, Half]:
    """The halves of a model that queries and keys come from."""
    of_query: Half = "encoder" if call.kind == "encoder" else "decoder"
    of_key: Half = "encoder" if call.kind in ("encoder", "cross") else "decoder"
    return of_query, of_key


def _columns(n_real: int, n: int, side: PaddingSide) -> slice:
    """The columns of the tokens of a text in a row of `n`, with padding on a side."""
    return slice(0, n_real) if side == "right" else slice(n - n_real, n)


@dataclass
class TextPasses(PassInspection):
    """The inspection of the passes over one text: a single one, or those that fill a cache,
    including the encoder's. `notes` explains the substitutes for unknown tokens.

    The texts of each half become known with the first attention that reads them; of the attentions
    `unknown` it is not known which ids they read. `n_tokens` are in the cache now. `parts` are
    copies of each attention, pass by pass, together not above the limit for kept matrices.
    """

    passes: list[ModelPass] = field(kw_only=True)
    tokenizer: ModelTokenizer | None = None
    n_tokens: int = 0
    parts: dict[CallKey, list[PassPart]] = field(default_factory=dict)
    unknown: set[CallKey] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=perf_counter)
    _read: dict[Half, ReadIds] = field(default_factory=dict)
    _texts: dict[Half, tuple[TokenSequence, ...]] = field(default_factory=dict)
    _last_keys: dict[CallKey, Tensor] = field(default_factory=dict)
    _own_masks: dict[object, tuple[int, Tensor | None]] = field(default_factory=dict)
    _changes: dict[torch.device, Tensor] = field(default_factory=dict)
    _n_bytes: int = 0

    @property
    def is_reordered(self) -> bool:
        """Whether some cache did not hold the last key that went into it."""
        return any(map(bool, self._changes.values()))

    @property
    def last(self) -> ModelPass:
        """The last pass."""
        return self.passes[-1]

    @property
    def is_encoded(self) -> bool:
        """Whether the last pass was that of an encoder alone, whose decoder may follow."""
        return {half for half, read in self.last.halves.items() if read} == {"encoder"}

    def goes_on(self, began: ModelPass) -> bool:
        """Whether a new pass continues this text: it reads the cache as filled so far, or the
        output of the encoder.
        """
        is_answer = self.is_encoded and "encoder" not in began.halves
        is_next = began.n_past > 0 and began.n_past == self.n_tokens
        return began.batch == self.last.batch and (is_answer or is_next)

    def leave_out_rejected(self) -> None:
        """Leaves out the last tokens of the last pass that its cache lost after it, as it loses the
        drafts that a model rejected.
        """
        n = self.n_tokens - self.last.n_cached
        if self.last.cache is None or not 0 < n < self.n_tokens - self.last.n_past:
            return
        self.notes.append("tokens that a cache lost after a pass, as rejected drafts, are left out")
        self.n_tokens -= n
        read = self.last.used.get("decoder")
        if read is not None:
            ids, real = read.ids[:, :-n], read.real[:, :-n]
            self.last.used["decoder"] = read._replace(ids=ids, real=real)
        self._last_keys.clear()
        for name, parts in self.parts.items():
            self._n_bytes -= parts[-1].n_bytes
            parts[-1] = parts[-1].without_last(n)
            self._n_bytes += parts[-1].n_bytes
            keys = _keys_of(parts[-1].call)
            if keys is not None:
                self._last_keys[name] = keys[:, :, -1]

    def compare_cache(self, call: Call) -> None:
        """Compares the last key of the earlier pass with that in the cache, in any attention of
        texts to themselves: the others belong to the same texts.
        """
        keys = _keys_of(call)
        if keys is None or call.unreadable is not None:
            return
        end = min(call.shape[3], self.last.n_past + call.shape[2])
        before = self._last_keys.get(call.key)
        at = end - call.shape[2] - 1
        if before is not None and at >= 0:  # read at the end, as each read waits for a device
            is_changed = (before != keys[:, :, at]).any()
            known = self._changes.get(call.device, is_changed)
            self._changes[call.device] = known | is_changed
        self._last_keys[call.key] = keys[:, :, end - 1].clone()

    def keep_part(self, call: Call) -> None:
        """Copies a part of an attention in the last pass; later passes may add more parts."""
        n_past = self.last.n_past
        n_tokens = n_past + call.shape[2]
        if call.kind != "cross":
            self.n_tokens = n_tokens
        if call.place in self.unfit:
            return
        parts = self.parts.setdefault(call.key, [])
        limit = self.request.keep_limit
        reason = call.unreadable
        if reason is None:
            call = self._with_own_mask(call, n_tokens)
            reason = _misfit(call, parts, n_past, self.passes[0].n_past)
        if reason is None:
            parts.append(_copied(call, n_past, is_first=not parts))
            self._n_bytes += parts[-1].n_bytes
            if self._n_bytes > limit:
                size = shown(limit, "bytes")
                reason = f"attention whose queries and keys take more than the limit of {size}"
        if reason is not None:
            self._n_bytes -= sum(part.n_bytes for part in self.parts.pop(call.key))
            self.unfit[call.place] = reason

    def _with_own_mask(self, call: Call, n_tokens: int) -> Call:
        """A call without the free places of its cache, and with a copy of its mask, made once for
        the layers that share it.
        """
        key = (state_of(call.mask), call.causal, call.kind, *call.shape[2:], n_tokens)
        if key not in self._own_masks:
            cut = _without_free_places(call, n_tokens)
            self._own_masks[key] = cut.shape[3], None if cut.mask is None else cut.mask.clone()
        n_keys, mask = self._own_masks[key]
        if n_keys < call.shape[3]:
            call = call.cropped(slice(None), slice(n_keys))
        return replace(call, mask=mask)

    def positions_of(self, call: Call) -> Positions | None:
        """All sizes of axes where it is not known which ids an attention read."""
        n_texts, _, q_len, k_len = call.shape
        is_unknown = call.key in self.unknown
        return (n_texts, q_len, k_len) if is_unknown else super().positions_of(call)

    def inspect(self, call: Call) -> None:
        """Reduces an attention. Errors are recorded, not raised, because the pass belongs to the
        caller and continues.
        """
        columns = list[slice]()
        side = self._side
        for half, n in zip(_halves_of(call), call.shape[2:], strict=True):
            if half not in self._texts:
                self._texts[half] = self._texts_of(half, n, call)
            read = self._read.get(half)
            n_real = n
            if call.key in self.unknown:
                read = None
            if read is not None and read.ids.shape[1] == n:  # padded beyond the longest text
                n_real = max(len(text.ids) for text in self._texts[half])
            columns.append(_columns(n_real, n, side))
        context = self._texts.get("encoder")
        sequences = self._texts.get("decoder", context or ())
        before = self.inputs
        if (before.sequences, before.context, before.side) != (sequences, context, side):
            self.inputs = ModelInputs(sequences, context, side)
        try:
            is_whole = columns == [slice(0, n) for n in call.shape[2:]]
            self.take(call if is_whole else call.cropped(*columns))
        except (MhaError, torch.OutOfMemoryError) as fault:
            reason = f"attention that could not be inspected: {fault}"
            self.unfit[call.place] = reason

    @property
    def _side(self) -> PaddingSide:
        """The side of the padding; that of the tokenizer if there is none."""
        padded = [
            read.real
            for each in self.passes
            for read in each.used.values()
            if read is not None and not bool(read.real.all())
        ]
        if padded:
            return "right" if all(bool(real[:, 0].all()) for real in padded) else "left"
        return "right" if self.tokenizer is None else self.tokenizer.side

    def _texts_of(self, half: Half, n: int, call: Call) -> tuple[TokenSequence, ...]:
        """The texts on an axis of `n` positions: the ids of all passes, or positions if there are
        none.
        """
        parts = [read for each in self.passes if (read := each.used.get(half)) is not None]
        n_texts, batch = call.shape[0], self.last.batch
        if not parts:
            is_read = any(each.halves for each in self.passes)
            return (places(n),) * (batch if is_read else n_texts)
        ids = torch.cat([each.ids for each in parts], dim=1)
        real = torch.cat([each.real for each in parts], dim=1)
        why_positions = None
        size = tuple(ids.shape)
        if size == (n, n_texts) and n != n_texts:
            ids, real = ids.T, real.T
        elif size == (n, n) and n > 1 and call.is_token_first:
            why_positions = f"ids are {n} × {n}, and either axis may be that of the tokens"
        elif size[1] != n:
            why = f"attention has {n} positions for {size[1]} ids"
            self.notes.append(f"{why}: tokens are shown as positions")
        elif size[0] not in (batch, n_texts):
            why_positions = f"attention has {n_texts} texts for ids of {size[0]}"
        if why_positions is None and any(each.are_places for each in parts):
            why_positions = "the model was given vectors, not ids"
        self._read[half] = ReadIds(ids, real)
        rows = self._rows(ids.tolist(), real.tolist())
        if why_positions is None:
            return self._named(rows)
        self.notes.append(f"{why_positions}: tokens are shown as positions")
        return tuple(places(len(row)) for row in rows)

    def _named(self, rows: list[list[int]]) -> tuple[TokenSequence, ...]:
        """The texts of rows of ids, named by the tokenizer, or by the ids that it lacks."""
        if self.tokenizer is None:
            return tuple(map(named_by_ids, rows))
        texts = [self.tokenizer.spelled(row) for row in rows]
        if None in texts:
            self.notes.append(
                "the tokenizer has no token for some ids: it is another model's, and tokens are"
                " shown as ids"
            )
        return tuple(text or named_by_ids(row) for text, row in zip(texts, rows, strict=True))

    def _rows(self, ids: list[list[int]], real: list[list[bool]]) -> list[list[int]]:
        """The ids without padding, which must be on one side."""
        n = len(ids[0])
        of_rows = list[list[int]]()
        for row, mask in zip(ids, real, strict=True):
            n_real = mask.count(True)
            columns = _columns(n_real, n, self._side)
            if not n_real or not all(mask[columns]):
                self.notes.append(
                    "the mask hides tokens within a text, or all of them: padding is shown as"
                    " tokens"
                )
                return ids
            of_rows.append(row[columns])
        return of_rows


# ---------------------------------------------------------------------------------- texts that grow


_REORDERED = (
    "attention whose cache does not hold the keys that went into it: beam search reorders them,"
    " some caches round them"
)


class PassPart(NamedTuple):
    """The copied call of one pass, with only the keys and values of its new tokens, and the columns
    of the joined matrix that its queries read.
    """

    call: Call
    columns: slice

    @property
    def n_bytes(self) -> int:
        """The size of its tensors."""
        return sum(each.numel() * each.element_size() for each in self.call.tensors.values())

    def without_last(self, n: int) -> PassPart:
        """A copy without the last `n` tokens."""
        is_cross = self.call.kind == "cross"
        left = self.call.cropped(slice(-n), slice(None if is_cross else -n))
        left = left.holding({name: tensor.clone() for name, tensor in left.tensors.items()})
        stop = self.columns.stop - (0 if is_cross else n)
        return PassPart(left, slice(self.columns.start, stop))


def _keys_of(call: Call) -> Tensor | None:
    """The keys of an attention of texts to themselves, or the values in their order."""
    if call.kind == "cross":
        return None
    return call.v if call.k is None else call.k


def _without_free_places(call: Call, n_tokens: int) -> Call:
    """A call without the places of a cache of fixed length that have no token yet, if its mask
    hides them.
    """
    if call.kind == "cross" or call.shape[3] <= n_tokens:
        return call
    q_idx, k_idx = (torch.arange(n, device=call.device) for n in call.shape[2:])
    sees_free_places = as_attention(call).visible(q_idx, k_idx[n_tokens:]).any()
    return call if sees_free_places else call.cropped(slice(None), slice(n_tokens))


def _copied(call: Call, n_past: int, *, is_first: bool) -> PassPart:
    """A part of an attention, whose mask is a copy. The first has all keys; later ones add none to
    cross-attention.
    """
    q_len, k_len = call.shape[2:]
    is_cross = call.kind == "cross"
    end = k_len if is_cross else n_past + q_len
    n_known = k_len if is_cross else k_len - q_len
    copies = dict[str, Any]()
    for name, tensor in call.tensors.items():
        is_new = name in ("k", "v") and not is_first
        if name != "mask":
            copies[name] = (tensor[:, :, n_known:] if is_new else tensor).clone()
    return PassPart(replace(call, **copies), slice(end - k_len, end))


def _misfit(call: Call, before: Sequence[PassPart], n_past: int, n_prefix: int) -> str | None:
    """The reason why a pass cannot be joined to the earlier ones, None if it can."""
    q_len, k_len = call.shape[2:]
    if call.kind == "cross":
        return None if not before or before[0].columns.stop == k_len else _REORDERED
    if k_len > n_past + q_len:
        return "attention over more keys than there are tokens, and no mask hides the others"
    if n_prefix + sum(earlier.shape[2] for earlier, _ in before) != n_past:
        return (
            "attention with a cache that mha did not see being filled: by a call without"
            " use_cache=True"
        )
    if n_prefix and not before and k_len < n_past + q_len:
        return "attention with a window, whose cache has lost the first keys"
    return None


def joined(parts: Sequence[PassPart], masks: dict[object, Tensor]) -> Call:
    """One attention over all tokens. Its mask is added to `masks`, from which layers share it."""
    first = parts[0].call
    if len(parts) == 1:
        return first
    fields = dict[str, Any]()
    for name, tensor in first.tensors.items():
        tensors = [getattr(part.call, name) for part in parts]
        if name in ("q", "k", "v", "z") or (name == "sinks" and tensor.ndim == 3):
            fields[name] = torch.cat(tensors, dim=2)
        elif name in ("scores", "pattern", "bias"):
            fields[name] = _stacked(tensors, parts, -torch.inf if name == "scores" else 0.0)
    if first.pattern is None:
        of_parts = [
            (id(call.mask), call.causal, call.shape[2], columns.start, columns.stop)
            for call, columns in parts
        ]
        key = (first.device, *of_parts)
        if key not in masks:
            masks[key] = _stacked([_mask_of(part) for part in parts], parts, -torch.inf)
        fields |= {"mask": masks[key], "causal": False}
    return replace(first, **fields)


def _stacked(blocks: Sequence[Tensor], parts: Sequence[PassPart], fill: float) -> Tensor:
    """The cells of all passes in one matrix, `fill` where a pass has none."""
    batch, heads = (max(block.shape[axis] for block in blocks) for axis in (0, 1))
    n_keys = parts[-1].columns.stop
    rows = list[Tensor]()
    for block, (call, columns) in zip(blocks, parts, strict=True):
        cells = block.expand(batch, heads, call.shape[2], -1)
        rows.append(pad(cells, (columns.start, n_keys - columns.stop), value=fill))
    return torch.cat(rows, dim=2)


def _mask_of(part: PassPart) -> Tensor:
    """The mask of a pass as numbers added to its scores, −∞ at masked cells."""
    call, columns = part
    added = torch.zeros(1, 1, call.shape[2], columns.stop - columns.start, device=call.device)
    if call.causal:
        added = torch.full_like(added, -torch.inf).triu(1)
    if call.mask is None:
        return added
    mask = four_axes(call.mask)
    return torch.where(mask, added, -torch.inf) if mask.dtype == torch.bool else added + mask
