"""Several documents in one row: how a call tells them apart, and whether one sees another.

`ways_of` gives the ways in which a model takes packed documents. `packing` is the behaviour.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice, pairwise, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.models.layer_names import config_of
from mhacli.usercode.accepted import accepted_forms
from mhacli.usercode.axes import PATTERN_AXES, CallSizes
from mhacli.usercode.door import Attempt, Unreadable, those_that_work
from mhacli.usercode.example_call import arguments_of_example
from mhacli.usercode.masks import MaskForm, forms_of, mask_in
from mhacli.usercode.roles import CallParameter, signature_of
from mhacli.usercode.text_model import PartCalls, TextModel
from mhacli.usercode.user_attention import UserAttention

from .behaviour import Answers, Intent, Observed, Test, compared, not_tried, reason_of, seen
from .passes import PassDifference, Passes, PassOutput, difference_of
from .result import Tried

LENGTH = 48
"""The tokens of a row of documents."""
_FEWEST = 6
"""The fewest tokens that can be three documents."""

WithMask = Literal["none", "ones", "block"]
_MASKS: Mapping[WithMask, str] = {
    "none": "without a mask",
    "ones": "with a mask of ones",
    "block": "with a mask in four dimensions",
}
_OFTEN_UNTOLD = ("positions", "segments")
"""The roles of arguments that are also given where documents may see each other."""
_CONFIGURED = " as configured"
Arguments = Callable[[Sequence[int], int], Mapping[str, Any]]


class Way(NamedTuple):
    """A way to give a model several documents in one row. `name` is what tells them apart, as in
    the call. `arguments` gives the arguments for the lengths of the documents and the number of
    rows, which is 1 where it is `of_one_row`. `promises`: no document should see another one.
    `restarts`: positions start again at each document. `cache` is how caching is switched, empty
    where nothing switches it.
    """

    name: str
    arguments: Arguments
    promises: bool
    restarts: bool
    mask: WithMask = "none"
    cache: str = ""
    of_one_row: bool = False


def document_lengths(length: int) -> tuple[int, int, int]:
    """The lengths of three documents that fill a row; none is a usual size."""
    first, second = length * 17 // 48, length * 22 // 48
    return first, second, length - first - second


# ----------------------------------------------------------------------------- the ways of a call


def ways_of(model: TextModel, *, causal: bool, packed: bool = False) -> list[Way]:
    """The ways in which a model takes packed documents, the likeliest first; none if it takes none.
    `causal`: a mask also hides later tokens. Segments, and in bidirectional models positions, tell
    documents apart only where it is stated that they are `packed`.

    Several ways of one name, mask and cache differ in the form of their arguments: the first that
    isolates documents is meant.
    """
    if model.has_source:
        return []
    parameters = [p for p in signature_of(model.attention.built.call) if not p.positional_only]
    of_role = {
        role: [p for p in parameters if p.role == role and not p.name.startswith("cache")]
        for role in ("documents", "segments", "positions", "starts", "longest")
    }
    restarting = _restarting(model, of_role["positions"])
    told = [*_told_by_ids(of_role["documents"]), *_told_by_starts(model, of_role)]
    if not told and packed and config_of(model.attention.built.module) is None:
        told = [*_told_by_ids(of_role["segments"], promises=False)]
    if restarting is not None:
        told = [_both(way, restarting) for way in told]
        if not told and (packed or (causal and model.n_ids)):
            told = [restarting, restarting._replace(arguments=_first_row(restarting.arguments))]
    ways = [*told, *_blocks(model, restarting, causal=causal, told=told)]
    if model.mask is not None and model.attention.others.get(model.mask.parameter) is None:
        ways += [_with_ones(way, model.mask) for way in told]
    return [*_with_cache(model, ways)]


def _restarting(model: TextModel, parameters: Sequence[CallParameter]) -> Way | None:
    """Positions that start again at each document; None for a call that takes none."""

    def arguments(lengths: Sequence[int], n_rows: int) -> Mapping[str, Any]:
        places = torch.cat([torch.arange(n) for n in lengths]) + model.first_position
        return {parameters[0].name: places.expand(n_rows, -1)}

    return Way(parameters[0].name, arguments, False, True) if parameters else None


def _told_by_ids(parameters: Sequence[CallParameter], *, promises: bool = True) -> Iterator[Way]:
    """A number for each token's document: from 1 on, because 0 may stand for padding, or from 0;
    in each row, or once for all.
    """

    def arguments(name: str, first: int, lengths: Sequence[int], n_rows: int) -> Mapping[str, Any]:
        numbers = torch.arange(first, first + len(lengths))
        return {name: numbers.repeat_interleave(torch.tensor(lengths)).expand(n_rows, -1)}

    for parameter, first in product(parameters, (1, 0)):
        made = partial(arguments, parameter.name, first)
        for each in (made, _first_row(made)):
            yield Way(parameter.name, each, promises, False)


def _first_row(arguments: Arguments) -> Arguments:
    """The arguments without an axis of rows."""
    return lambda lengths, _: {name: each[0] for name, each in arguments(lengths, 1).items()}


def _told_by_starts(
    model: TextModel, of_role: Mapping[str, Sequence[CallParameter]]
) -> Iterator[Way]:
    """Where the documents of one row start, and the last one ends. Vectors of texts that stand one
    behind another begin with a text of one token.
    """
    starts, longest = of_role["starts"], of_role["longest"]
    before = (1,) if "token" in model.attention.axes else ()

    def arguments(lengths: Sequence[int], _: int) -> Mapping[str, Any]:
        ends = torch.tensor([0, *accumulate([*before, *lengths])], dtype=torch.int32)
        return {p.name: ends for p in starts} | {p.name: max(lengths) for p in longest}

    if starts:
        yield Way(starts[0].name, arguments, True, False, of_one_row=True)


def _both(way: Way, restarting: Way) -> Way:
    """A way with positions that start again."""
    return way._replace(
        arguments=lambda *of: {**restarting.arguments(*of), **way.arguments(*of)}, restarts=True
    )


def _with_ones(way: Way, form: MaskForm) -> Way:
    """A way with a mask that hides no token."""

    def arguments(lengths: Sequence[int], n_rows: int) -> Mapping[str, Any]:
        real = torch.ones(n_rows, sum(lengths), dtype=torch.bool)
        sizes = CallSizes(n_rows, sum(lengths), sum(lengths))
        return {**way.arguments(lengths, n_rows), form.parameter: mask_in(form, None, real, sizes)}

    return way._replace(arguments=arguments, mask="ones")


def _blocks(
    model: TextModel, restarting: Way | None, *, causal: bool, told: Sequence[Way]
) -> Iterator[Way]:
    """A mask in four dimensions under which tokens see their own document alone; of a model of
    token ids, because those of an attention are compared cell by cell.
    """

    def arguments(form: MaskForm, lengths: Sequence[int], n_rows: int) -> Mapping[str, Any]:
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        allowed = (numbers[:, None] == numbers)[None, None]
        sizes = CallSizes(n_rows, sum(lengths), sum(lengths))
        return {form.parameter: mask_in(form, allowed.tril() if causal else allowed, None, sizes)}

    for form in _block_forms(model.attention) if model.n_ids else ():
        name = f"{form.parameter} in four dimensions"
        way = Way(name, partial(arguments, form), True, False, "block")
        if restarting is not None:
            way = _both(way, restarting)
            if any(each.name == restarting.name for each in told):
                way = way._replace(name=restarting.name)
        yield way


def _block_forms(attention: UserAttention) -> list[MaskForm]:
    """The forms in which a mask in four dimensions hides a key, and nothing passes it elsewhere;
    of a model of transformers those that it says it takes.
    """
    every = [form for p in signature_of(attention.built.call, "mask") for form in forms_of(p)]
    forms = [form for form in every if form.axes == PATTERN_AXES and not form.is_padding]
    if config_of(attention.built.module) is None:
        return [*islice((form for form in accepted_forms(attention, forms) if form.hides), 1)]
    kept = [form for form in forms if form.kind in ("additive", "bool")]
    return [form for form in reversed(kept) if form.true_means == "keep"]


def _with_cache(model: TextModel, ways: Sequence[Way]) -> Iterator[Way]:
    """The ways with caching as it is by default, and without it."""
    switches = signature_of(model.attention.built.call, "caching")
    switch = next((p for p in switches if not p.required and p.default is not False), None)
    if switch is None or model.attention.example is not None:
        yield from ways
        return

    def given(way: Way, value: object) -> Arguments:
        return lambda *of: {**way.arguments(*of), switch.name: value}

    for way in ways:
        for value, words in ((switch.default, _CONFIGURED), (False, "=False")):
            yield way._replace(arguments=given(way, value), cache=f"{switch.name}{words}")


# ------------------------------------------------------------------------- the way of an example


def way_of_example(attention: UserAttention, length: int) -> tuple[Way, Sequence[int]]:
    """The way in which an example packs documents at a length, and their lengths. Raises
    `Unreadable` if it gives one document.
    """
    roles = {p.name: p.role for p in signature_of(attention.built.call)}
    inputs = {slot.name for slot in attention.slots}
    found = list[tuple[bool, str, list[int]]]()
    for name, value in arguments_of_example(attention, length).items():
        starts = _starts_in(value, length) if isinstance(value, Tensor) else []
        if len(starts) > 1 and name not in inputs:
            found.append((roles.get(name) in _OFTEN_UNTOLD, name, starts))
    if not found:
        raise Unreadable("in the example nothing tells documents apart")
    is_weak, name, starts = min(found, key=lambda each: each[0])
    lengths = [end - start for start, end in pairwise([*starts, length])]
    return Way(name, lambda *_: {}, not is_weak, False, of_one_row=True), lengths


def _starts_in(value: Tensor, length: int) -> list[int]:
    """Where documents start, as an argument of a call for a text of this length shows it: by its
    starts, a number for each token, positions, or a mask; empty for any other tensor.
    """
    if value.ndim > 1 and value.shape[-2:] == (length, length):
        cells = value.reshape(-1, length, length)[0]
        visible = cells == 0 if (cells < 0).any() else cells.bool()
        return _starts_of_blocks(visible) or _starts_of_blocks(~visible)
    if value.is_floating_point() or value.dtype == torch.bool or not value.numel():
        return []
    steps = value.reshape(-1, value.shape[-1])[0].diff() if value.ndim else value
    if value.ndim == 1 and value[[0, -1]].tolist() == [0, length] and (steps > 0).all():
        return list(map(int, value[:-1]))
    if value.shape[-1:] != (length,):
        return []
    usual = 0 if (steps == 0).double().mean() > 0.5 else 1  # positions grow
    return [0, *((steps != usual).nonzero().flatten() + 1).tolist()]


def _starts_of_blocks(visible: Tensor) -> list[int]:
    """Where blocks start that do not see each other; empty for one block."""
    starts = [
        n for n in range(1, len(visible)) if not (visible[n:, :n].any() or visible[:n, n:].any())
    ]
    return [0, *starts] if starts else []


# ------------------------------------------------------------------------------------ the behaviour


class _Measured(NamedTuple):
    """What a way gives, by document: the difference when all others change, and, where it was
    asked, from the document alone.
    """

    way: Way
    moved: Sequence[PassDifference]
    alone: Sequence[PassDifference] = ()

    def fault(self, tolerance: float) -> tuple[int, PassDifference, str] | None:
        """The number of the first document that is wrong, its difference, and what is wrong; None
        if all are right.
        """
        asked = self.alone if self.way.restarts else self.alone[:1]
        wrong = ((self.moved, "changes with the others"), (asked, "is not as it is alone"))
        for differences, words in wrong:
            for n, each in enumerate(differences, start=1):
                if each.largest > tolerance:
                    return n, each, words
        return None


def packing(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether each of several documents in one row stays as it is when all others change, and is
    as it is alone. What nobody promises or states is a note.
    """
    model, attention = passes.model, passes.model.attention
    if attention.is_pooled:
        return not_tried(passes, "its output is of a whole text, not of each token")
    length = min(LENGTH, passes.length) if attention.is_resizable else passes.length
    if length < _FEWEST:
        return not_tried(passes, f"needs a text of {_FEWEST} tokens or more")
    if attention.example is None:
        is_causal = answers["causality"].ok is True
        lengths: Sequence[int] = document_lengths(length)
        ways = ways_of(model, causal=is_causal, packed=intent.packed)
    else:
        way, lengths = way_of_example(attention, length)
        ways = [way]
    if not ways:
        return not_tried(passes, _untold(model))
    tried = list[Attempt]()
    measured = _measured(passes, ways, lengths, tried)
    if not measured:
        is_refused = any(way.mask != "block" for way in ways)
        return not_tried(passes, reason_of(tried[0].failure) if is_refused else _untold(model))
    observed = _judged(passes, measured, lengths, packed=intent.packed)
    return replace(observed, tried=Tried(length, len(lengths) + 1))


def _untold(model: TextModel) -> str:
    """Why nothing tells documents apart."""
    if model.has_source:
        return "an encoder-decoder model"
    built = model.attention.built
    weak = signature_of(built.call, *_OFTEN_UNTOLD) if config_of(built.module) is None else ()
    if weak:
        return f"--packed states that {weak[0].name} tells documents apart"
    return "it takes nothing by a known name that tells documents apart"


def _measured(
    passes: Passes, ways: Sequence[Way], lengths: Sequence[int], tried: list[Attempt]
) -> list[_Measured]:
    """What each way gives: of several forms of its arguments the first that isolates documents,
    else the first that works.
    """
    forms: dict[tuple[str, WithMask, str], list[Way]] = {}
    for way in ways:
        forms.setdefault((way.name, way.mask, way.cache), []).append(way)
    alone: dict[str, list[PassOutput]] = {}
    found = list[_Measured]()
    for same in forms.values():
        works = list[_Measured]()
        for each in those_that_work(same, partial(_of_way, passes, lengths, alone), tried):
            works.append(each)
            if _isolates(passes, each):
                break
        best = works[-1:] if works and _isolates(passes, works[-1]) else works[:1]
        found += best
    return found


def _isolates(passes: Passes, measured: _Measured) -> bool:
    """Whether no document sees another one."""
    return all(each.largest <= passes.tolerance for each in measured.moved)


def _of_way(
    passes: Passes, lengths: Sequence[int], alone: dict[str, list[PassOutput]], way: Way
) -> _Measured:
    """What a way gives; `alone` keeps what documents alone give."""
    n = sum(lengths)
    text, other = passes.text[:n], passes.changed(0, passes.length, 1)[:n]
    ends = [*accumulate(lengths)]
    spans = [slice(end - size, end) for end, size in zip(ends, lengths, strict=True)]
    rows = [text]
    for span in spans:
        rows.append(other.clone())
        rows[-1][span] = text[span]
    if way.of_one_row:
        given = way.arguments(lengths, 1)
        together, *changed = [passes.run_pass(row, given=given)[0] for row in rows]
    else:
        together, *changed = passes.run_pass(*rows, given=way.arguments(lengths, len(rows)))
    parts = [_part(together, span) for span in spans]
    moved = [
        difference_of(_part(row, span), part)
        for row, span, part in zip(changed, spans, parts, strict=True)
    ]
    measured = _Measured(way, moved)
    if passes.model.attention.example is not None or not _isolates(passes, measured):
        return measured
    kept = way.name if way.mask == "block" else ""  # such a mask may replace one of the model's
    if kept not in alone:
        alone[kept] = [
            passes.run_pass(text[span], given=way.arguments((len(text[span]),), 1) if kept else {})[
                0
            ]
            for span in spans
        ]
    return measured._replace(alone=[*map(difference_of, parts, alone[kept])])


def _part(output: PassOutput, span: slice) -> PassOutput:
    """What a pass gives for a part of its text."""

    def parts() -> PartCalls:
        return {
            name: tuple(None if each is None else each[span] for each in both)  # type: ignore[misc]
            for name, both in output.parts().items()
        }

    return PassOutput(output.output[span], parts)


def _judged(
    passes: Passes, measured: Sequence[_Measured], lengths: Sequence[int], *, packed: bool
) -> Observed:
    """What was seen in all ways: wrong where documents must not see each other and do."""
    is_family = config_of(passes.module) is not None
    asked = [each for each in measured if _is_asked(each.way, packed=packed, is_family=is_family)]
    if packed and not asked:
        asked = [each for each in measured if each.way.mask != "ones"]
    reason = _reason(passes, measured)
    for each in asked:
        fault = each.fault(passes.tolerance)
        if fault is not None:
            n, difference, words = fault
            reason = f"{reason}: document {n} of {len(lengths)} {words}"
            return compared(passes, [difference], "", reason, sum(lengths[: n - 1]))
    if asked or all(each.fault(passes.tolerance) is None for each in measured):
        moved = [each for one in measured if _isolates(passes, one) for each in one.moved]
        return compared(passes, moved, reason, reason)
    largest = max(each.largest for one in measured for each in one.moved)
    return seen(passes, None, reason, largest)


def _is_asked(way: Way, *, packed: bool, is_family: bool) -> bool:
    """Whether documents must not see each other in this way."""
    if is_family:
        return packed and way.mask == "none" and not way.cache.endswith(_CONFIGURED)
    return packed or (way.promises and way.mask != "ones")


def _reason(passes: Passes, measured: Sequence[_Measured]) -> str:
    """What isolates documents, by what tells them apart."""
    by_name: dict[str, list[_Measured]] = {}
    for each in measured:
        by_name.setdefault(each.way.name, []).append(each)
    said = list[str]()
    for name, every in by_name.items():
        isolating = [each.way for each in every if _isolates(passes, each)]
        where = ", or ".join(_places([each.way for each in every], isolating))
        if len(isolating) == len(every):
            said.append(f"{name} isolates documents")
        else:
            said.append(f"{name} isolates only {where}" if where else f"{name} does not isolate")
    if any(each.largest > passes.tolerance for one in measured for each in one.alone):
        said.append("a document is not as it is alone, as where positions run on")
    return "; ".join(said)


def _places(ways: Sequence[Way], isolating: Sequence[Way]) -> Iterator[str]:
    """The masks and the caching with which documents are isolated."""
    for mask, words in _MASKS.items():
        caches = [way.cache for way in isolating if way.mask == mask]
        if len(caches) == sum(way.mask == mask for way in ways):
            caches = caches and [""]
        yield from (f"with {cache} and {words}" if cache else words for cache in caches)


PACKING: Mapping[str, Test] = {"packing": packing}
"""The test by the name of its behaviour."""
