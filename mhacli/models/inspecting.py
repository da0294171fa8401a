"""`mhacli.inspecting`: inspects the attention of a model in memory while its user runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from operator import index
from time import perf_counter
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.io.data import Array
from mhacli.models.capture import Call
from mhacli.models.layer_names import LayerKey, config_of, entry_of
from mhacli.models.layers import (
    ModelInputs,
    PassInspection,
    layer_words,
    nothing_seen,
    unfit_words,
)
from mhacli.models.load import ModelTokenizer, device_of, tokenizer_in_memory
from mhacli.models.masking import as_attention
from mhacli.models.passes import Half, ModelPass, ReadIds, followed, require_open
from mhacli.record.exports import HeadTable
from mhacli.record.heads import Averages, HeadKey, HeadStatistics, with_kind
from mhacli.record.record import Record
from mhacli.run import KEPT, Run
from mhacli.settings import DEFAULT_KEEP_LIMIT, ModelSettings, PaddingSide, Statistics
from mhacli.text.numbers import shown
from mhacli.text.tokens import AttentionKind, LayerChoice, TokenSequence, named_by_ids, places

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
) -> Iterator[Seen]:
    """A context in which every call of `model` is inspected: `with inspecting(model) as seen:
    model(**inputs)`.

    You call the model as usual, with or without gradients, in any dtype, on any devices, in
    training or evaluation. Outputs, gradients and random numbers are the same, bit for bit, as
    without inspection. `seen.record` is the record of the last pass, `seen.passes` has the records
    of all passes (only the last without `keep_passes`), and `seen.statistics()` the means over
    them.

    A record has the statistics of every head. `keep` names matrices to store as well, among
    `pattern`, `z`, `scores` and `qk`, for each layer while they take less than `keep_limit` bytes
    in all. The same limit holds for the tensors that are copied while a text is generated. `layers`
    are numbers, or pairs such as `("cross", 2)`; None for `layers` or `heads` means all.
    `tokenizer` is a tokenizer of transformers; without one, tokens are shown as their ids.

    Contexts can be nested, also for one model; a second thread waits until the first has closed its
    context. Raises `MhaError` for a model that hides its parts (compiled, scripted, DataParallel),
    and in a call from another thread.
    """
    require_open(model, _NAME)
    try:
        request = Run(
            model=ModelSettings(layers=None if layers is None else layer_choices(layers)),
            statistics=Statistics(heads=None if heads is None else _numbers(heads)),
            keep=tuple(
                KEPT[KEPT.index(name)] for name in ([keep] if isinstance(keep, str) else keep)
            ),
            keep_limit=_numbers([keep_limit])[0],
            allow_nonfinite=True,
        )
    except (TypeError, ValueError):
        given = f"layers={layers!r}, heads={heads!r}, keep={keep!r}, keep_limit={keep_limit!r}"
        raise UsageError(f"{_NAME} cannot take {given}", hint=_FORMS) from None
    seen = Seen(
        model,
        None if tokenizer is None else tokenizer_in_memory(tokenizer),
        request,
        keep_passes=keep_passes,
    )
    with closing(seen), followed(model, seen, by=_NAME) as watch:
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
        self._tokenizer, self._request = tokenizer, request
        self._entry, self._device = entry_of(model), device_of(model)
        self._lists_layers = config_of(model) is not None
        self._keeps_passes = keep_passes
        self._sums = dict[HeadKey, Array]()
        self._largest = dict[HeadKey, Array]()
        self.passes: tuple[Record, ...] = ()
        """The records, in order, of all finished passes with at least one requested attention."""
        self._notes: dict[str, None] = {}
        self._unfit: dict[LayerKey, str] = {}
        self._met: set[LayerKey] = set()
        self._strays: dict[str, None] = {}
        self.silent: Mapping[str, str] = {}
        self._n_passes = 0
        self._chain: TextPasses | None = None

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
            message = (
                f"only parts of {name} were called by themselves: {', '.join([*self._strays][:4])}"
            )
            raise MhaError(
                message, hint=f"give {_NAME} the module that is called", code="not-called"
            )
        if not self._n_passes:
            hint = (
                "call this object inside the with block; copies and wrappers are different objects"
            )
            raise MhaError(f"{name} was not called within {_NAME}", hint=hint, code="not-called")
        raise nothing_seen(name, self._request.model.layers, self._met, self._unfit)

    def statistics(self) -> HeadTable:
        """The heads with means over the queries of all finished passes, like `Record.heads` for one
        pass.

        `max_score` is the largest of all passes. Statistics that are no means over queries have no
        value: quantiles of the distance, the strongest distance, sinks and strong cells.
        """
        heads = []
        for key, (weighted, n) in self._sums.items():
            of_head, uniform = (
                dict(zip(MEANS, each, strict=True)) for each in weighted / np.where(n, n, np.nan)
            )
            heads.append(
                mean_head(key, {**of_head, "max_score": float(self._largest[key])}, uniform)
            )
        return HeadTable(heads)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on unknown tokens, and on calls and layers without a record."""
        outside = "was called by itself, outside of a call of the model, and is in no record"
        strays = [f"{name} {outside}" for name in self._strays]
        missing = [
            f"layer {layer_words([(kind, layer)])} was not seen"
            for kind, layer in self._request.model.layers or ()
            if self.passes
            and not any(layer == n and kind in (None, known_kind) for known_kind, n in self._met)
        ]
        unseen = [
            f"no attention was seen in {name} ({kind}), which is in no record"
            for name, kind in self.silent.items()
            if self.passes
            and not self._lists_layers  # otherwise the record lists the layers without attention
        ]
        return (*self._notes, *strays, *missing, *unseen)

    # ------------------------------------------------------------------------- the events of passes

    def begin(self, began: ModelPass) -> None:
        """A pass begins."""
        self._n_passes += 1
        if self._chain is not None and self._chain.goes_on(began):
            self._chain.passes.append(began)
            return
        self.finish()
        inspection = PassInspection(self._model, ModelInputs(), self._request, any_length=True)
        self._chain = TextPasses([began], self._tokenizer, inspection, began.n_past)

    def take(self, call: Call) -> None:
        """Inspects an attention of the pass."""
        chain, place = self._chain, (call.kind, call.layer)
        assert chain is not None
        largest = max(self._request.statistics.heads or (0,))
        is_wanted = self._request.model.includes(call.layer, call.kind)
        if 0 in call.shape:
            chain.inspection.unfit[place] = "attention without a token"
        elif is_wanted and largest >= call.shape[1]:
            chain.inspection.unfit[place] = "attention in which " + out_of_range(
                "head", largest, call.shape[1]
            )
        elif call.kind == "encoder" or not chain.last.is_cached:
            chain.inspect(call)
        elif is_wanted:
            chain.keep_part(call)
        else:
            chain.inspection.found.append(place)

    def end(self, *, is_whole: bool) -> None:
        """A pass is over. With a cache, another pass may continue its text; after an encoder, a
        decoder may follow.
        """
        if not is_whole:
            self._chain = None
            self._notes["a pass that raised is in no record"] = None
        elif self._chain is not None and not (self._chain.last.is_cached or self._chain.is_encoded):
            self.finish()

    def finish(self) -> None:
        """Makes the record of a pass, or of several with a cache, that no other pass can
        continue.
        """
        chain, self._chain = self._chain, None
        if chain is None:
            return
        inspection = chain.inspection
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            for name in [*chain.parts]:
                chain.inspect(_joined(chain.parts.pop(name)))
        self._notes |= dict.fromkeys(chain.notes)
        self._unfit |= inspection.unfit
        self._met |= {*inspection.found, *inspection.unfit}
        if inspection.results:
            record = inspection.record_of(
                self._entry, {"pass and statistics": perf_counter() - chain.began}
            )
            for number in range(
                len(record.layers)
            ):  # a mean counts by the queries that see a key, or more than one
                layer = record.of_layer(number)
                n_keys = np.asarray(layer.arrays["visible"])
                n_queries = np.array(
                    [(n_keys > _LEAST_KEYS.get(name, 0)).sum(axis=(0, 2)) for name in MEANS]
                )
                for place, head in enumerate(layer.heads):
                    key, both = (
                        (head.layer, head.attention, head.head),
                        (head, head.uniform or Averages()),
                    )
                    numbers = np.array(
                        [[getattr(means, name) for name in MEANS] for means in both], np.float64
                    )
                    weights = np.isfinite(numbers) * n_queries[:, place % n_queries.shape[1]]
                    self._sums[key] = self._sums.get(key, 0) + np.stack(
                        [np.nan_to_num(numbers) * weights, weights]
                    )
                    score = np.array(head.max_score, np.float64)
                    self._largest[key] = np.fmax(self._largest.get(key, score), score)
            self.passes = (*(self.passes if self._keeps_passes else ()), record)
        elif inspection.unfit:
            self._notes[f"a pass is in no record: {unfit_words(inspection.unfit)}"] = None

    def stray(self, name: str) -> None:
        """Notes an attention outside any pass."""
        self._strays[name] = None

    def close(self) -> None:
        """Ends the last pass, and frees the model."""
        self.finish()
        self._model = None


# ------------------------------------------------------------------------- the passes over one text


@dataclass
class TextPasses:
    """The passes over one text: a single one, or those that fill a cache, including the encoder's.
    `notes` explains the substitutes for unknown tokens.

    The texts of each half become known with the first attention that reads them. `n_tokens` are in
    the cache now. `parts` are copies of each attention, pass by pass, together not above the limit
    for kept matrices.
    """

    passes: list[ModelPass]
    tokenizer: ModelTokenizer | None
    inspection: PassInspection
    n_tokens: int
    parts: dict[tuple[str, int], list[_Part]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=perf_counter)
    _read: dict[Half, ReadIds] = field(default_factory=dict)
    _texts: dict[Half, tuple[TokenSequence, ...]] = field(default_factory=dict)
    _n_bytes: int = 0

    @property
    def last(self) -> ModelPass:
        """The last pass."""
        return self.passes[-1]

    @property
    def is_encoded(self) -> bool:
        """Whether the last pass was that of an encoder alone, whose decoder may follow."""
        return self.last.halves.keys() == {"encoder"}

    def goes_on(self, began: ModelPass) -> bool:
        """Whether a new pass continues this text: it reads the cache as filled so far, or the
        output of the encoder.
        """
        is_answer = self.is_encoded and "encoder" not in began.halves
        is_next = began.n_past > 0 and began.n_past == self.n_tokens
        return began.batch == self.last.batch and (is_answer or is_next)

    def keep_part(self, call: Call) -> None:
        """Copies an attention of the last pass, of which more may follow."""
        place, name, n_past = (call.kind, call.layer), (call.title, call.layer), self.last.n_past
        n_tokens, limit = n_past + call.shape[2], self.inspection.request.keep_limit
        if call.kind != "cross":
            self.n_tokens = n_tokens
        if place in self.inspection.unfit:
            return
        parts, reason = self.parts.setdefault(name, []), call.unread_mask
        if reason is None:
            if (
                call.kind != "cross" and call.shape[3] > n_tokens
            ):  # a cache of a fixed length has unfilled places
                q_idx, k_idx = (torch.arange(n, device=call.device) for n in call.shape[2:])
                is_seen = as_attention(call).visible(q_idx, k_idx[n_tokens:]).any()
                call = call if is_seen else call.cropped(slice(None), slice(n_tokens))
            reason = _misfit(call, parts, n_past, self.passes[0].n_past)
        if reason is None:
            q_len, k_len = call.shape[
                2:
            ]  # the first part has all keys; later ones add none to cross-attention
            end, n_known = (
                (k_len, k_len) if call.kind == "cross" else (n_past + q_len, k_len - q_len)
            )
            new, copies = slice(n_known if parts else 0, None), dict[str, Any]()
            for key, tensor in call.tensors.items():
                copies[key] = (tensor[:, :, new] if key in ("k", "v") else tensor).clone()
            parts.append((replace(call, **copies), slice(end - k_len, end)))
            self._n_bytes += _size(parts[-1])
            if self._n_bytes > limit:
                reason = (
                    "attention whose queries and keys take more than the limit of"
                    f" {shown(limit, 'bytes')}"
                )
        if reason is not None:
            self._n_bytes -= sum(map(_size, self.parts.pop(name)))
            self.inspection.unfit[place] = reason

    def inspect(self, call: Call) -> None:
        """Reduces an attention. Errors are recorded, not raised, because the pass belongs to the
        caller and continues.
        """
        parts = []
        # the query comes from one half of the model, and the key from one; a batch may be padded
        # beyond its longest text
        of_key: Half = "encoder" if call.kind in ("encoder", "cross") else "decoder"
        of_query: Half = "encoder" if call.kind == "encoder" else "decoder"
        for half, n in zip((of_query, of_key), call.shape[2:], strict=True):
            if half not in self._texts:
                self._texts[half] = self._of_half(half, n, call)
            read, longest = self._read.get(half), max(len(text.ids) for text in self._texts[half])
            n_real = longest if read is not None and read.ids.shape[1] == n else n
            parts.append(slice(0, n_real) if self._side == "right" else slice(n - n_real, n))
        context = self._texts.get("encoder")
        sequences = self._texts.get("decoder", context or ())
        self.inspection.inputs = ModelInputs(sequences, context, self._side)
        try:
            is_whole = parts == [slice(0, n) for n in call.shape[2:]]
            self.inspection.take(call if is_whole else call.cropped(*parts))
        except (MhaError, torch.OutOfMemoryError) as fault:
            self.inspection.unfit[call.kind, call.layer] = (
                f"attention that could not be inspected: {fault}"
            )

    @property
    def _side(self) -> PaddingSide:
        """The side of the padding; that of the tokenizer if there is none."""
        padded = [
            read.real
            for each in self.passes
            for read in each.halves.values()
            if not bool(read.real.all())
        ]
        if not padded:
            return self.tokenizer.side if self.tokenizer is not None else "right"
        return "right" if all(bool(real[:, 0].all()) for real in padded) else "left"

    def _of_half(self, half: Half, n: int, call: Call) -> tuple[TokenSequence, ...]:
        """The texts on an axis of `n` positions: the ids of all passes, or positions if there are
        none.
        """
        parts = [each.halves[half] for each in self.passes if half in each.halves]
        n_texts, batch = call.shape[0], self.last.batch
        if not parts:
            return (places(n),) * (batch if any(each.halves for each in self.passes) else n_texts)
        ids, real = (
            torch.cat([each.ids for each in parts], dim=1),
            torch.cat([each.real for each in parts], dim=1),
        )
        size, note = tuple(ids.shape), None
        if size == (n, n_texts) and n != n_texts:
            ids, real = ids.T, real.T
        elif size == (n, n) and n > 1 and call.is_token_first:
            note = (
                f"ids are {n} × {n}, and either axis may be that of the tokens: tokens are shown as"
                " positions"
            )
        elif size != (batch, n):
            self.notes.append(
                f"attention has {n} positions for {size[1]} ids: tokens are shown as positions"
            )
        if note is None and any(each.are_places for each in parts):
            note = "the model was given vectors, not ids: tokens are shown as positions"
        self._read[half] = ReadIds(ids, real)
        rows = self._rows(ids.tolist(), real.tolist())
        if note is None:
            spelled = [
                None if self.tokenizer is None else self.tokenizer.spelled(row) for row in rows
            ]
            if self.tokenizer is not None and None in spelled:
                self.notes.append(
                    "the tokenizer has no token for some ids: it is another model's, and tokens are"
                    " shown as ids"
                )
            return tuple(text or named_by_ids(row) for text, row in zip(spelled, rows, strict=True))
        self.notes.append(note)
        return tuple(places(len(row)) for row in rows)

    def _rows(self, ids: list[list[int]], real: list[list[bool]]) -> list[list[int]]:
        """The ids without padding, which must be on one side."""
        n, counts = len(ids[0]), [sum(row) for row in real]
        columns = [slice(0, c) if self._side == "right" else slice(n - c, n) for c in counts]
        if not all(
            c and all(row[real_columns])
            for row, real_columns, c in zip(real, columns, counts, strict=True)
        ):
            self.notes.append(
                "the mask hides tokens within a text, or all of them: padding is shown as tokens"
            )
            return ids
        return [row[real_columns] for row, real_columns in zip(ids, columns, strict=True)]


# ---------------------------------------------------------------------------------- texts that grow


_REORDERED = (
    "attention whose cache does not hold the keys that went into it: beam search reorders them,"
    " some caches round them"
)
_Part = tuple[Call, slice]
"""The copied call of one pass, with only the keys and values of its new tokens, and the columns of
the joined matrix that its queries read."""


def _misfit(call: Call, before: Sequence[_Part], n_past: int, n_prefix: int) -> str | None:
    """The reason why a pass cannot be joined to the earlier ones, None if it can."""
    q_len, k_len = call.shape[2:]
    if call.kind == "cross":
        return None if not before or before[0][1].stop == k_len else _REORDERED
    if k_len > n_past + q_len:
        return "attention over more keys than there are tokens, and no mask hides the others"
    if n_prefix + sum(earlier.shape[2] for earlier, _ in before) != n_past:
        return (
            "attention with a cache that mha did not see being filled: by a call without"
            " use_cache=True"
        )
    if n_prefix and not before and k_len < n_past + q_len:
        return "attention with a window, whose cache has lost the first keys"
    if not before or k_len == q_len:
        return None
    known, cached = (
        earlier.v if earlier.k is None else earlier.k for earlier in (before[-1][0], call)
    )
    is_continued = (
        known is None or cached is None or torch.equal(known[:, :, -1], cached[:, :, -q_len - 1])
    )
    return None if is_continued else _REORDERED


def _size(part: _Part) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in part[0].tensors.values())


def _joined(parts: Sequence[_Part]) -> Call:
    """One attention over all tokens."""
    calls, first = [call for call, _ in parts], parts[0][0]
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {}
    for name, tensor in first.tensors.items():
        tensors = [getattr(call, name) for call in calls]
        if name in ("q", "k", "v", "z") or (name == "sinks" and tensor.ndim == 3):
            joined[name] = torch.cat(tensors, dim=2)
        elif name in ("scores", "pattern", "bias"):
            joined[name] = _stacked(tensors, parts, -torch.inf if name == "scores" else 0.0)
    if first.pattern is None:
        joined |= {
            "mask": _stacked([_mask_of(*part) for part in parts], parts, -torch.inf),
            "causal": False,
        }
    return replace(first, **joined)


def _stacked(blocks: Sequence[Tensor], parts: Sequence[_Part], fill: float) -> Tensor:
    """The cells of all passes in one matrix, `fill` where a pass has none."""
    batch, heads = (max(block.shape[axis] for block in blocks) for axis in (0, 1))
    n_keys = parts[-1][1].stop
    rows = [
        pad(
            block.expand(batch, heads, call.shape[2], -1),
            (columns.start, n_keys - columns.stop),
            value=fill,
        )
        for block, (call, columns) in zip(blocks, parts, strict=True)
    ]
    return torch.cat(rows, dim=2)


def _mask_of(call: Call, columns: slice) -> Tensor:
    """The mask of a pass as numbers added to its scores, −∞ at masked cells."""
    added = torch.zeros(1, 1, call.shape[2], columns.stop - columns.start, device=call.device)
    if call.causal:
        added = torch.full_like(added, -torch.inf).triu(1)
    if call.mask is None:
        return added
    mask = call.mask.reshape((1,) * (4 - call.mask.ndim) + tuple(call.mask.shape))
    return torch.where(mask, added, -torch.inf) if mask.dtype == torch.bool else added + mask


# ------------------------------------------------------------------- means over passes or documents


CONDITION = "pattern_"
"""The prefix of the names of conditions, as in tables."""
WINDOWS = ("window_50", "window_90", "window_99")
_LEAST_KEYS = {"entropy_share": 1, **dict.fromkeys(WINDOWS, np.inf)}
"""The number of keys that a query must exceed to count in a mean, if it is not 0; quantiles of the
distance have no mean."""
MEANS = tuple(
    each.name for each in fields(Averages) if each.name not in ("offset", "at_offset", "patterns")
)
"""The statistics that have a mean, besides conditions. The strongest distance has none."""


def mean_head(
    key: HeadKey, numbers: Mapping[str, float], uniform: Mapping[str, float]
) -> HeadStatistics:
    """A head with these means and its largest score, by statistic, the means of uniform attention,
    and the type that follows. NaN is no number.
    """

    def averages(numbers: Mapping[str, float]) -> dict[str, Any]:
        """Numbers as fields: distances are whole, and conditions are one field."""
        known = {
            name: float(number) if np.isfinite(number) else None for name, number in numbers.items()
        }
        whole = {
            name: round(known[name] or 0)
            for name in (*WINDOWS, "offset")
            if known.get(name) is not None
        }
        conditions = tuple(known.pop(name) for name in numbers if name.startswith(CONDITION))
        return {**known, **whole, "patterns": conditions}

    place: dict[str, Any] = dict(zip(("layer", "attention", "head"), key, strict=True))
    return with_kind(
        HeadStatistics(**place, uniform=Averages(**averages(uniform)), **averages(numbers))
    )
