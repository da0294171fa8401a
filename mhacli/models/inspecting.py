"""`mhacli.inspecting`: inspects the attention of a model in memory while its user runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from time import perf_counter
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from mhacli.compute.checkpoint.cached_passes import CachedPasses
from mhacli.compute.checkpoint.pass_texts import PassTexts
from mhacli.compute.checkpoint.run import facts_of
from mhacli.errors import MhaError, UsageError, out_of_range
from mhacli.models.calls import Call
from mhacli.models.device_map import device_of
from mhacli.models.inputs import ModelInputs
from mhacli.models.layer_names import LayerKey, is_attention
from mhacli.models.layers import KEPT, ROUNDED, ModelFacts, PassInspection
from mhacli.models.passes import ModelPass, followed, noted, require_open
from mhacli.models.tokenizer import ModelTokenizer, own_tokenizer
from mhacli.record.record import Model, Record, layer_prefix
from mhacli.record.tables import HeadTable
from mhacli.record.totals import MEANS, WINDOWS, HeadTotals
from mhacli.run import Run
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
        model=ModelSettings(layers=_layers(layers)),
        statistics=Statistics(heads=_heads(heads)),
        keep=_kept(keep),
        keep_limit=_limit(keep_limit),
        allow_nonfinite=True,
    )
    seen = Seen(model, None if tokenizer is None else own_tokenizer(tokenizer), wanted, keep_passes=keep_passes)
    try:
        with followed(model, seen, by=_NAME) as watch:
            seen.silent = watch.silent
            yield seen
    finally:
        seen.finish()


class Seen:
    """The results of a context of `inspecting`: a record for each pass, and `notes` about them.

    `silent` are modules, with their classes, that are named like attentions but in which no attention was captured.
    """

    def __init__(self, model: nn.Module, tokenizer: ModelTokenizer | None, wanted: Run, *, keep_passes: bool) -> None:
        self._tokenizer, self._wanted = tokenizer, wanted
        self._name = type(model).__name__
        self._parts = _classes(model.named_modules())
        self._attentions = _classes(own for own in model.named_modules() if is_attention(*own))
        self._keeps_passes, self._totals = keep_passes, HeadTotals(MEANS)
        self._facts = _facts_of(model)
        self._passes: list[Record] = []
        self._notes: dict[str, None] = {}
        self._unfit: dict[LayerKey, str] = {}
        self._met: set[LayerKey] = set()
        self._has_cache = False
        self._strays: dict[str, None] = {}
        self.silent: Mapping[str, str] = {}
        self._n_passes = 0
        self._chain: _TextPasses | None = None

    def __repr__(self) -> str:
        """The number of passes, and the notes."""
        n, notes = len(self._passes), "".join(f"; {note}" for note in self.notes)
        return f"<Seen: {n} pass{'' if n == 1 else 'es'} of {self._name}{notes}>"

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
        return HeadTable(map(self._totals.head, self._totals.of_head))

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
            if self._passes and self._facts.config is None  # otherwise the record lists the layers without attention
        ]
        return (*self._notes, *strays, *missing, *unseen)

    # ------------------------------------------------------------------------------------------ what is heard of passes

    def begin(self, began: ModelPass) -> None:
        """A pass begins."""
        self._n_passes += 1
        if self._chain is not None and self._chain.goes_on(began):
            self._chain.go_on(began)
        else:
            self.finish()
            inspection = PassInspection(_NO_INPUTS, self._wanted, (), self._facts.model.dtype, 1, any_length=True)
            self._chain = _TextPasses(
                PassTexts(began, self._tokenizer), inspection, CachedPasses(self._wanted.keep_limit), began
            )

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
        with torch.no_grad(), torch.autocast(self._facts.device.type, enabled=False):
            for call in chain.cached.whole():
                chain.inspect(call)
        chain.inspection.unfit |= chain.cached.unfit
        chain.inspection.release()
        self._notes |= dict.fromkeys(chain.texts.notes)
        self._unfit |= chain.inspection.unfit
        self._met |= {*chain.inspection.found, *chain.inspection.unfit}
        self._has_cache |= bool(chain.cached.unfit)
        if chain.inspection.results:
            record = chain.inspection.record(self._facts, {"pass and statistics": perf_counter() - chain.began})
            _add_pass(self._totals, record)
            self._passes = [*(self._passes if self._keeps_passes else ()), record]
        elif chain.inspection.unfit:
            self._notes[f"a pass is in no record: {_unfit_words(chain.inspection.unfit)}"] = None

    def stray(self, name: str) -> None:
        """Notes an attention outside any pass."""
        self._strays[name] = None

    # ----------------------------------------------------------------------------------------- where there is no record

    def _nothing(self) -> MhaError:
        name = self._name
        if self._strays:
            return MhaError(
                f"only parts of {name} were called by themselves: {', '.join(list(self._strays)[:4])}",
                hint="give mhacli.inspecting the module that is called",
                code="not-called",
            )
        if not self._n_passes:
            return MhaError(
                f"{name} was not called within mhacli.inspecting",
                hint="call this object inside the with block; copies and wrappers are different objects",
                code="not-called",
            )
        if self._unfit:
            return MhaError(
                f"no attention of {name} could be shown: {_unfit_words(self._unfit)}",
                hint=self._remedy(),
                code="not-tokens",
            )
        if self._wanted.model.layers is not None and self._met:
            return MhaError(
                f"none of the layers {_words(self._wanted.model.layers)} was seen in {name}",
                hint="layers with attention: " + ", ".join(map(str, sorted({layer for _, layer in self._met}))),
                code="no-layer",
            )
        return self._no_attention(name)

    def _remedy(self) -> str | None:
        if any("mask is of type" in reason for reason in self._unfit.values()):
            return 'model.set_attn_implementation("sdpa") computes the same with a tensor for a mask'
        way = f"fill the cache within {_NAME}, or make a pass of each step with use_cache=False"
        return way if self._has_cache else None

    def _no_attention(self, name: str) -> MhaError:
        if not self._attentions:
            return MhaError(
                f"no attention was seen in {name}, which is made of {', '.join(self._parts[:8])}",
                hint="mha captures scaled_dot_product_attention everywhere, but a softmax of q kᵀ only in modules whose class or "
                "name contains attn or atten",
                code="no-attention",
            )
        return MhaError(
            f"no attention was seen in {name}, though it has {', '.join(self._attentions[:8])}",
            hint="mha captures scaled_dot_product_attention, and softmax(q kᵀ) v written with torch's softmax and matmul, but "
            "not flex_attention, compiled functions or kernels of other libraries",
            code="no-attention",
        )


def _add_pass(totals: HeadTotals, record: Record) -> None:
    """Adds the heads of a pass. A mean counts by its number of queries: those that see a key, or, for the entropy as a fraction,
    more than one. Quantiles of the distance are no means over queries."""
    for number, layer in enumerate(record.layers):
        visible = np.asarray(record.arrays[f"{layer_prefix(number)}visible"])
        heads = [head for head in record.heads if (head.layer, head.attention) == (layer.layer, layer.name)]
        for row, head in enumerate(heads):
            n_keys = visible[:, row if visible.shape[1] > 1 else 0]
            least = {"entropy_share": 1, **dict.fromkeys(WINDOWS, np.inf)}
            totals.add(head, np.array([(n_keys > least.get(name, 0)).sum() for name in totals.names]))


_NO_INPUTS = ModelInputs((), None, "right", {})


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


# ---------------------------------------------------------------------------------------------------- what is asked for


def _kept(keep: Sequence[str]) -> tuple[str, ...]:
    names = tuple(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else (keep,)
    for name in names:
        if name not in KEPT:
            raise noted(UsageError(f"keep: {name!r} is no matrix of a layer", hint=f"choose among {', '.join(KEPT)}"))
    return names


def _limit(keep_limit: int) -> int:
    try:
        limit = index(keep_limit)
    except TypeError:
        limit = -1
    if limit < 0:
        raise noted(UsageError(f"keep_limit {keep_limit!r} must be a number of bytes, 0 or more"))
    return limit


def _layers(layers: Sequence[int | LayerChoice] | None) -> tuple[LayerChoice, ...] | None:
    if layers is None:
        return None
    try:
        chosen = tuple(map(_layer, layers))
    except (TypeError, ValueError):
        chosen = ()
    if not chosen:
        message = f"layers {layers!r} must be numbers, or pairs of a kind and a number, one at least"
        raise noted(UsageError(message, hint='[4, 5], or [("cross", 2)]; kinds: ' + ", ".join(get_args(AttentionKind))))
    return chosen


def _layer(given: Any) -> LayerChoice:
    kind, number = given if isinstance(given, (tuple, list)) else (None, given)
    if kind not in (None, *get_args(AttentionKind)):
        raise ValueError(kind)
    return kind, index(number)


def _heads(heads: Sequence[int] | None) -> tuple[int, ...] | None:
    if heads is None:
        return None
    try:
        chosen = tuple(dict.fromkeys(map(index, heads)))
    except TypeError:
        chosen = ()
    if not chosen or min(chosen) < 0:
        raise noted(UsageError(f"heads {heads!r} must be numbers from 0 on, one at least"))
    return chosen


# ---------------------------------------------------------------------------------------------- what a record says of it


def _facts_of(model: Any) -> ModelFacts:
    """The facts of a model in memory, of transformers or not, for the record."""
    name = type(model).__name__
    if hasattr(model, "main_input_name") and hasattr(getattr(model, "config", None), "get_text_config"):
        return facts_of(model, path=getattr(model, "name_or_path", "") or name)
    parameters = [*model.parameters()]
    dtypes = [own.dtype for own in parameters if own.dtype in ROUNDED]
    device = device_of(model)
    found = Model(
        path=name,
        revision=None,
        family="torch.nn.Module",
        architecture=name,
        implementation="torch's own functions",
        path_inspected="",
        identical_outputs=None,
        compared_len=0,
        n_layers=0,
        n_parameters=sum(own.numel() for own in parameters),
        n_vocabulary=0,
        positions="unknown",
        max_positions=None,
        dtype=str(dtypes[0] if dtypes else torch.float32).removeprefix("torch."),
    )
    return ModelFacts(found, config=None, d_model=0, device=device, device_asked=str(device))
