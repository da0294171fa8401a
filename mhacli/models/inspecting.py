"""`mhacli.inspecting`: inspects the attention of a model in memory while its user runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from operator import index
from time import perf_counter
from typing import Any, get_args

import torch
from torch import nn

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.models.capture import Call
from mhacli.models.layer_names import LayerKey, config_of, entry_of
from mhacli.models.layers import (
    ModelInputs,
    layer_words,
    nothing_seen,
    unfit_words,
)
from mhacli.models.load import ModelTokenizer, device_of, tokenizer_in_memory
from mhacli.models.means import HeadSums
from mhacli.models.passes import ModelPass, followed, require_open
from mhacli.models.text_passes import TextPasses, joined
from mhacli.record.exports import HeadTable
from mhacli.record.record import Record
from mhacli.run import KEPT, Run
from mhacli.settings import DEFAULT_KEEP_LIMIT, ModelSettings, Statistics
from mhacli.text.tokens import AttentionKind, LayerChoice

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
    without chain. `seen.record` is the record of the last pass, `seen.passes` has the records
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
            names = ", ".join([*self._strays][:4])
            message = f"only parts of {name} were called by themselves: {names}"
            hint = f"give {_NAME} the module that is called"
            raise MhaError(message, hint=hint, code="not-called")
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
        if self._chain is not None and self._chain.goes_on(began):
            self._chain.passes.append(began)
            return
        self.finish()
        self._chain = TextPasses(
            self._model,
            ModelInputs(),
            self._request,
            any_length=True,
            passes=[began],
            tokenizer=self._tokenizer,
            n_tokens=began.n_past,
        )

    def take(self, call: Call) -> None:
        """Inspects an attention of the pass."""
        chain = self._chain
        assert chain is not None
        last_head = max(self._request.statistics.heads or (0,))
        is_requested = self._request.model.includes(call.layer, call.kind)
        if 0 in call.shape:
            chain.unfit[call.place] = "attention without a token"
        elif is_requested and last_head >= call.shape[1]:
            words = out_of_range("head", last_head, call.shape[1])
            chain.unfit[call.place] = f"attention in which {words}"
        elif call.kind == "encoder" or not chain.last.is_cached:
            chain.inspect(call)
        elif is_requested:
            chain.keep_part(call)
        else:
            chain.found.append(call.place)

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
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            for name in [*chain.parts]:
                chain.inspect(joined(chain.parts.pop(name)))
        self._notes |= dict.fromkeys(chain.notes)
        self._unfit |= chain.unfit
        self._met |= {*chain.found, *chain.unfit}
        if chain.results:
            seconds = {"pass and statistics": perf_counter() - chain.began}
            record = chain.record_of(self._entry, seconds)
            self._sums.add(record)
            self.passes = (*self.passes, record) if self._keeps_passes else (record,)
        elif chain.unfit:
            self._notes[f"a pass is in no record: {unfit_words(chain.unfit)}"] = None

    def stray(self, name: str) -> None:
        """Notes an attention outside any pass."""
        self._strays[name] = None

    def close(self) -> None:
        """Ends the last pass, and frees the model."""
        self.finish()
        self._model = None
