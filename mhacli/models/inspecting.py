"""`mhacli.inspecting`: inspects the attention of a model in memory while its user runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from time import perf_counter
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import nn

from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.models.calls import Call
from mhacli.models.inputs import ModelInputs
from mhacli.models.layer_names import LayerKey, config_of, is_attention
from mhacli.models.layers import KEPT, PassInspection, entry_of
from mhacli.models.load import device_of
from mhacli.models.passes import ModelPass, followed, noted, require_open
from mhacli.models.runs.cached_passes import CachedPasses
from mhacli.models.runs.pass_texts import PassTexts
from mhacli.models.tokenizer import ModelTokenizer, own_tokenizer
from mhacli.record.record import Record
from mhacli.record.tables import HeadTable
from mhacli.record.totals import WINDOWS, HeadTotals
from mhacli.run import Run
from mhacli.settings import DEFAULT_KEEP_LIMIT, ModelSettings, Statistics
from mhacli.text.tokens import AttentionKind, LayerChoice

_NAME = "mhacli.inspecting"
T = TypeVar("T")


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
    """A context in which every call of `model` is inspected: `with inspecting(model) as seen: model(**inputs)`.

    You call the model as usual, with or without gradients, in any dtype, on any devices, in training or evaluation. Outputs,
    gradients and random numbers are the same, bit for bit, as without inspection. `seen.record` is the record of the last pass,
    `seen.passes` has the records of all passes (only the last without `keep_passes`), and `seen.statistics()` the means over
    them.

    A record has the statistics of every head. `keep` names matrices to store as well, among `pattern`, `z`, `scores` and `qk`,
    for each layer while they take less than `keep_limit` bytes in all. The same limit holds for the tensors that are copied
    while a text is generated. `layers` are numbers, or pairs such as `("cross", 2)`; None for `layers` or `heads` means all.
    `tokenizer` is a tokenizer of transformers; without one, tokens are shown as their ids.

    Contexts can be nested, also for one model; a second thread waits until the first has closed its context. Raises `MhaError`
    for a model that hides its parts (compiled, scripted, DataParallel), and in a call from another thread.
    """
    require_open(model, _NAME)
    wanted = Run(
        model=ModelSettings(layers=None if layers is None else _argument("layers", layers, _layers)),
        statistics=Statistics(heads=None if heads is None else _argument("heads", heads, _heads)),
        keep=_argument("keep", keep, _kept),
        keep_limit=_argument("keep_limit", keep_limit, _natural),
        allow_nonfinite=True,
    )
    seen = Seen(model, None if tokenizer is None else own_tokenizer(tokenizer), wanted, keep_passes=keep_passes)
    try:
        with followed(model, seen, by=_NAME) as watch:
            seen.silent = watch.silent
            yield seen
    finally:
        seen.close()


_FORMS = {
    "layers": 'numbers, or pairs such as ("cross", 2) of a kind and a number, one at least; kinds: '
    + ", ".join(get_args(AttentionKind)),
    "heads": "numbers from 0 on, one at least",
    "keep": f"names of matrices among {', '.join(KEPT)}",
    "keep_limit": "a number of bytes, 0 or more",
}
"""What the arguments of `inspecting` must be."""


def _argument(name: str, value: Any, read: Callable[[Any], T]) -> T:
    """What `read` makes of an argument. Raises `UsageError` for one of another form."""
    try:
        return read(value)
    except (TypeError, ValueError):
        raise noted(UsageError(f"{name} {value!r} must be {_FORMS[name]}")) from None


def _natural(value: Any) -> int:
    if index(value) < 0:
        raise ValueError(value)
    return index(value)


def _heads(values: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_natural, _some(values))))


def _kept(values: Any) -> tuple[str, ...]:
    return tuple(KEPT[KEPT.index(name)] for name in ([values] if isinstance(values, str) else values))


def _layers(values: Any) -> tuple[LayerChoice, ...]:
    kinds = (None, *get_args(AttentionKind))
    pairs = [own if isinstance(own, (tuple, list)) else (None, own) for own in _some(values)]
    return tuple((kinds[kinds.index(kind)], index(number)) for kind, number in pairs)


def _some(values: Any) -> list[Any]:
    if not list(values):
        raise ValueError(values)
    return list(values)


class Seen:
    """The results of a context of `inspecting`: a record for each pass, and `notes` about them.

    `silent` are modules, with their classes, that are named like attentions but in which no attention was captured.
    """

    def __init__(self, model: nn.Module, tokenizer: ModelTokenizer | None, wanted: Run, *, keep_passes: bool) -> None:
        self._model: Any = model
        self._tokenizer, self._wanted = tokenizer, wanted
        self._entry, self._device = entry_of(model), device_of(model)
        self._parts = _classes(model.named_modules())
        self._attentions = _classes(own for own in model.named_modules() if is_attention(*own))
        self._lists_layers = config_of(model) is not None
        self._keeps_passes, self._totals = keep_passes, HeadTotals()
        self._passes: list[Record] = []
        self._notes: dict[str, None] = {}
        self._unfit: dict[LayerKey, str] = {}
        self._met: set[LayerKey] = set()
        self._strays: dict[str, None] = {}
        self.silent: Mapping[str, str] = {}
        self._n_passes = 0
        self._chain: _TextPasses | None = None

    def __repr__(self) -> str:
        """The number of passes, and the notes."""
        n, notes = len(self._passes), "".join(f"; {note}" for note in self.notes)
        return f"<Seen: {n} pass{'' if n == 1 else 'es'} of {self._entry.architecture}{notes}>"

    @property
    def passes(self) -> tuple[Record, ...]:
        """The records, in order, of all finished passes with at least one requested attention."""
        return tuple(self._passes)

    @property
    def record(self) -> Record:
        """The record of the last pass. Raises `MhaError`, with the calls that were made, if there is none."""
        if not self._passes:
            raise noted(self._nothing())
        return self._passes[-1]

    def statistics(self) -> HeadTable:
        """The heads with means over the queries of all finished passes, like `Record.heads` for one pass.

        `max_score` is the largest of all passes. Statistics that are no means over queries have no value: quantiles of the
        distance, the strongest distance, sinks and strong cells.
        """
        return HeadTable(map(self._totals.head, range(len(self._totals.keys))))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on unknown tokens, and on calls and layers without a record."""
        strays = [
            f"{name} was called by itself, outside of a call of the model, and is in no record" for name in self._strays
        ]
        missing = [
            f"layer {_words([(kind, layer)])} was not seen"
            for kind, layer in self._wanted.model.layers or ()
            if self._passes and not any(layer == n and kind in (None, own) for own, n in self._met)
        ]
        unseen = [
            f"no attention was seen in {name} ({kind}), which is in no record"
            for name, kind in self.silent.items()
            if self._passes and not self._lists_layers  # otherwise the record lists the layers without attention
        ]
        return (*self._notes, *strays, *missing, *unseen)

    # ------------------------------------------------------------------------------------------ what is heard of passes

    def begin(self, began: ModelPass) -> None:
        """A pass begins."""
        self._n_passes += 1
        if self._chain is not None and self._chain.goes_on(began):
            self._chain.go_on(began)
            return
        self.finish()
        inspection = PassInspection(self._model, ModelInputs(), self._wanted, any_length=True)
        cached = CachedPasses(self._wanted.keep_limit, began.n_past)
        self._chain = _TextPasses(PassTexts(began, self._tokenizer), inspection, cached, began)

    def take(self, call: Call) -> None:
        """Inspects an attention of the pass."""
        chain, place = self._chain, (call.kind, call.layer)
        assert chain is not None
        largest = max(self._wanted.statistics.heads or (0,))
        is_wanted = self._wanted.model.includes(call.layer, call.kind)
        if 0 in call.shape:
            chain.inspection.unfit[place] = "attention without a token"
        elif is_wanted and largest >= call.shape[1]:
            chain.inspection.unfit[place] = "attention in which " + out_of_range("head", largest, call.shape[1])
        elif call.kind == "encoder" or not chain.last.is_cached:
            chain.inspect(call)
        elif is_wanted:
            chain.cached.add(call, chain.last.n_past)
        else:
            chain.inspection.found.append(place)

    def end(self, *, is_whole: bool) -> None:
        """A pass is over. With a cache, another pass may continue its text; after an encoder, a decoder may follow."""
        if not is_whole:
            self._chain = None
            self._notes["a pass that raised is in no record"] = None
        elif self._chain is not None and not self._chain.may_go_on:
            self.finish()

    def finish(self) -> None:
        """Makes the record of a pass, or of several with a cache, that no other pass can continue."""
        chain, self._chain = self._chain, None
        if chain is None:
            return
        inspection = chain.inspection
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            for call in chain.cached.whole():
                chain.inspect(call)
        inspection.unfit |= chain.cached.unfit
        inspection.release()
        self._notes |= dict.fromkeys(chain.texts.notes)
        self._unfit |= inspection.unfit
        self._met |= {*inspection.found, *inspection.unfit}
        if inspection.results:
            record = inspection.record(self._entry, {"pass and statistics": perf_counter() - chain.began})
            _add_pass(self._totals, record)
            self._passes = [*(self._passes if self._keeps_passes else ()), record]
        elif inspection.unfit:
            self._notes[f"a pass is in no record: {_unfit_words(inspection.unfit)}"] = None

    def stray(self, name: str) -> None:
        """Notes an attention outside any pass."""
        self._strays[name] = None

    def close(self) -> None:
        """Ends the last pass, and frees the model."""
        self.finish()
        self._model = None

    # ----------------------------------------------------------------------------------------- where there is no record

    def _nothing(self) -> MhaError:
        """The error that says why there is no record."""
        name, hint, code = self._entry.architecture, None, "no-attention"
        chosen = self._wanted.model.layers
        if self._strays:
            message, code = (
                f"only parts of {name} were called by themselves: {', '.join([*self._strays][:4])}",
                "not-called",
            )
            hint = f"give {_NAME} the module that is called"
        elif not self._n_passes:
            message, code = f"{name} was not called within {_NAME}", "not-called"
            hint = "call this object inside the with block; copies and wrappers are different objects"
        elif self._unfit:
            message, code = f"no attention of {name} could be shown: {_unfit_words(self._unfit)}", "not-tokens"
            words = " ".join(self._unfit.values())
            if "mask is of type" in words:
                hint = 'model.set_attn_implementation("sdpa") computes the same with a tensor for a mask'
            elif "cache" in words:
                hint = "make a pass of each step with use_cache=False"
        elif chosen is not None and self._met:
            message, code = f"none of the layers {_words(chosen)} was seen in {name}", "no-layer"
            hint = "layers with attention: " + ", ".join(map(str, sorted({layer for _, layer in self._met})))
        else:
            message = f"no attention was seen in {name}, which has {', '.join((self._attentions or self._parts)[:8])}"
            hint = (
                "mha captures scaled_dot_product_attention everywhere, and softmax(q kᵀ) v of torch's functions in modules whose "
                "class or name contains attn or atten, but not flex_attention, compiled functions or kernels of other libraries"
            )
        return MhaError(message, hint=hint, code=code)


def _add_pass(totals: HeadTotals, record: Record) -> None:
    """Adds the heads of a pass. A mean counts by its number of queries: those that see a key, or, for the entropy as a fraction,
    more than one. Quantiles of the distance are no means over queries."""
    least = {"entropy_share": 1, **dict.fromkeys(WINDOWS, np.inf)}
    for number in range(len(record.layers)):
        layer = record.of_layer(number)
        n_keys = np.asarray(layer.arrays["visible"])
        n_queries = [(n_keys > least.get(name, 0)).sum(axis=(0, 2)) for name in totals.names]
        totals.add(layer.heads, np.stack(n_queries))


@dataclass
class _TextPasses:
    """The passes over one text: a single one, or those that fill a cache, including the encoder's."""

    texts: PassTexts
    inspection: PassInspection
    cached: CachedPasses
    last: ModelPass
    began: float = field(default_factory=perf_counter)

    @property
    def may_go_on(self) -> bool:
        """Whether another pass may belong to the same text."""
        return self.last.is_cached or self.last.halves.keys() == {"encoder"}

    def goes_on(self, began: ModelPass) -> bool:
        """Whether a new pass continues this text: it reads the cache as filled so far, or the output of the encoder."""
        is_answer = self.last.halves.keys() == {"encoder"} and "encoder" not in began.halves
        is_next = began.n_past > 0 and began.n_past == self.cached.n_tokens
        return began.batch == self.last.batch and (is_answer or is_next)

    def go_on(self, began: ModelPass) -> None:
        """Adds a pass that reads the next tokens."""
        self.texts.go_on(began)
        self.last = began

    def inspect(self, call: Call) -> None:
        """Reduces an attention. Errors are recorded, not raised, because the pass belongs to the caller and continues."""
        self.inspection.inputs = self.texts.inputs(call)
        try:
            self.inspection.take(self.texts.without_padding(call))
        except (MhaError, torch.OutOfMemoryError) as fault:
            self.inspection.unfit[call.kind, call.layer] = f"attention that could not be inspected: {fault}"


def _classes(modules: Iterable[tuple[str, nn.Module]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(type(module).__name__ for _, module in modules))


def _unfit_words(unfit: Mapping[LayerKey, str]) -> str:
    (kind, layer), reason = next(iter(unfit.items()))
    return f"layer {layer} ({kind}) has {reason}"


def _words(layers: Sequence[LayerChoice]) -> str:
    return ", ".join(f"{kind}.{n}" if kind else str(n) for kind, n in layers)
