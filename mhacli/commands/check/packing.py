"""Several documents in one row: how a call tells them apart, and whether one sees another.

`ways_of` gives the ways in which a model takes packed documents. `packing` is the behaviour.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.io.data import finite
from mhacli.usercode.accepted import accepted_forms
from mhacli.usercode.axes import PATTERN_AXES, CallSizes
from mhacli.usercode.door import Attempt, Unreadable, those_that_work
from mhacli.usercode.example_call import arguments_of_example
from mhacli.usercode.masks import MaskForm, forms_of, mask_in
from mhacli.usercode.roles import signature_of
from mhacli.usercode.text_model import NO_ROWS, PartCalls, PartRows, TextModel
from mhacli.usercode.user_attention import UserAttention

from .observed import Answers, Intent, Observed, compared, not_tried, reason_of, seen
from .passes import PassDifference, Passes, PassOutput, difference_of, is_family, largest_of
from .probes import differing
from .result import LEAKS_AS_USUAL, Behaviour, Tried

_LENGTH = 48
"""The tokens of a row of documents of a model of transformers."""
_FEWEST = 6
"""The fewest tokens that can be three documents."""
_TELLING = ("documents", "starts", "mask", "bias")
"""The roles of arguments under which documents should not see each other."""
_WEAK = ("positions", "segments")
"""The roles of arguments that are also given where they may."""
CONFIGURED = " as configured"
"""The end of the words for caching as it is by default."""
WithMask = Literal["none", "ones", "block"]
_MASKS: Mapping[WithMask, str] = {
    "none": "without a mask",
    "ones": "with a mask of ones",
    "block": "with a mask in four dimensions",
}
Maker = Callable[[Sequence[int], int], Any]
"""An argument for documents of these lengths, in a number of equal rows."""


class Way(NamedTuple):
    """A way to give a model several documents in one row: the `made` arguments by name. `name` is
    what tells documents apart. `promises`: none should see another one. `restarts`: positions start
    again at each. `cache` says how caching is switched, empty where nothing switches it.
    `of_one_row`: the arguments fit one row alone.
    """

    name: str
    made: Mapping[str, Maker]
    promises: bool
    restarts: bool
    mask: WithMask = "none"
    cache: str = ""
    of_one_row: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether the call has no mask, and caching as it is by default."""
        return self.mask == "none" and not self.cache.endswith("=False")

    def arguments(self, lengths: Sequence[int], n_rows: int = 1) -> dict[str, Any]:
        """The arguments for documents of these lengths, in a number of equal rows."""
        return {name: make(lengths, n_rows) for name, make in self.made.items()}


def document_lengths(length: int) -> tuple[int, ...]:
    """The lengths of three documents that fill a row; none is a usual size."""
    first = length * 17 // 48
    second = length * 22 // 48
    return first, second, length - first - second


# ----------------------------------------------------------------------------- the ways of a call


def ways_of(model: TextModel, *, causal: bool, packed: bool) -> list[Way]:
    """The ways in which a model takes packed documents, the likeliest first; none if it takes none.
    `causal`: a mask also hides later tokens. Segments, and in bidirectional models positions, tell
    documents apart only where it is stated that they are `packed`. Of several ways with one name,
    mask and cache, which differ in the form of an argument, the one that isolates is meant.
    """
    if model.has_source:
        return []
    attention = model.attention
    named = dict[str, list[str]]()
    for p in attention.parameters():
        if not (p.role in _WEAK and (p.name.startswith("cache") or p.name in attention.unread)):
            named.setdefault(p.role, []).append(p.name)
    places: Maker = partial(_places, model.first_position)
    positions = {name: places for name in named.get("positions", [])[:1]}
    ways = [*_telling(model, named, positions, packed=packed)]
    if not ways and (packed or (causal and model.n_ids)):
        ways = [Way(name, positions, False, True) for name in positions]
    has_positions_alone = [way.made for way in ways] == [positions]
    form = _block_form(model) if model.n_ids else None
    if form is not None:
        name = f"{form.parameter} in four dimensions"
        made: dict[str, Maker] = {form.parameter: partial(_block, form, causal), **positions}
        name = ways[0].name if has_positions_alone else name
        ways.append(Way(name, made, True, bool(positions), "block"))
    return [*_with_cache(model, [*ways, *_with_ones(model, ways)])]


def _telling(
    model: TextModel,
    named: Mapping[str, Sequence[str]],
    positions: Mapping[str, Maker],
    *,
    packed: bool,
) -> Iterator[Way]:
    """The ways of a call that takes a number for each token's document, or where documents start.
    Numbers are from 1 on, because 0 may stand for padding, or from 0.
    """
    role = "documents"
    restarts = bool(positions)
    if packed and not is_family(model) and named.keys().isdisjoint(("documents", "starts")):
        role = "segments"
        restarts = False
    for name, first in product(named.get(role, ()), (1, 0)):
        promises = role == "documents"
        yield Way(name, {name: partial(_numbers, first), **positions}, promises, restarts)
    if "starts" in named:
        is_behind = "token" in model.attention.axes  # another text of one token
        ends: Maker = partial(_ends, is_behind)
        made = dict.fromkeys(named["starts"], ends)
        made |= dict.fromkeys(named.get("longest", ()), lambda lengths, _: max(lengths))
        name = named["starts"][0]
        yield Way(name, {**made, **positions}, True, restarts, of_one_row=True)


def _block_form(model: TextModel) -> MaskForm | None:
    """The form in which a mask in four dimensions hides a key, and nothing passes it elsewhere;
    of a model of transformers the one that each implementation of attention takes.
    """
    call = model.attention.built.call
    every = [form for p in signature_of(call, "mask") for form in forms_of(p)]
    forms = [form for form in every if form.axes == PATTERN_AXES and not form.is_padding]
    hiding = (form for form in accepted_forms(model.attention, forms) if form.hides)
    if is_family(model):
        hiding = (form for form in forms if form.kind == "additive")
    return next(hiding, None)


def _with_ones(model: TextModel, ways: Sequence[Way]) -> Iterator[Way]:
    """The ways without a mask, with one that hides no token."""
    form = model.mask
    if form is not None and model.attention.others.get(form.parameter) is None:
        made = {form.parameter: partial(_ones, form)}
        for way in ways:
            if way.mask == "none":
                yield way._replace(made={**way.made, **made}, mask="ones")


def _with_cache(model: TextModel, ways: Sequence[Way]) -> Iterator[Way]:
    """The ways with caching as it is by default, and without it."""
    switches = model.attention.parameters("caching")
    switch = next((p for p in switches if not p.required and p.default is not False), None)
    if switch is None:
        yield from ways
        return
    for way, (value, words) in product(ways, ((switch.default, CONFIGURED), (False, "=False"))):
        made: dict[str, Maker] = {**way.made, switch.name: lambda *_, value=value: value}
        yield way._replace(made=made, cache=f"{switch.name}{words}")


# What tells documents apart: each function makes an argument for documents of these `lengths`, one
# behind another in a row, and for `n_rows` equal rows. What stands before these two is fixed by
# `partial`, so that the rest is a `Maker`.


def _numbers(first: int, lengths: Sequence[int], n_rows: int) -> Tensor:
    """The number of each token's document, counted from `first`: from 1, `1 1 1 2 2`."""
    numbers = torch.arange(first, first + len(lengths))
    return numbers.repeat_interleave(torch.tensor(lengths)).expand(n_rows, -1)


def _places(first: int, lengths: Sequence[int], n_rows: int) -> Tensor:
    """The position of each token in its document, counted from `first`: from 0, `0 1 2 0 1`."""
    return torch.cat([torch.arange(first, first + n) for n in lengths]).expand(n_rows, -1)


def _ends(is_behind: bool, lengths: Sequence[int], _: int) -> Tensor:
    """Where documents start in a row, and the last one ends: `0 3 5`; if it `is_behind` another
    text of one token, `0 1 4 6`.
    """
    return torch.tensor(
        [0, *accumulate([1, *lengths] if is_behind else lengths)], dtype=torch.int32
    )


def _ones(form: MaskForm, lengths: Sequence[int], n_rows: int) -> Tensor:
    """A mask of a form that hides no token."""
    n = sum(lengths)
    return mask_in(form, None, torch.ones(n_rows, n).bool(), CallSizes(n_rows, n, n))


def _block(form: MaskForm, causal: bool, lengths: Sequence[int], n_rows: int) -> Tensor:
    """A mask of a form in which a query sees the keys of its document, if `causal` up to itself."""
    numbers = _numbers(0, lengths, 1)
    n = sum(lengths)
    allowed = (numbers.mT == numbers)[None, None]
    if causal:
        allowed = allowed.tril()
    return mask_in(form, allowed, None, CallSizes(n_rows, n, n))


# ------------------------------------------------------------------------- the way of an example


def way_of_example(
    attention: UserAttention, length: int, *, packed: bool
) -> tuple[Way, Sequence[int]]:
    """The way in which an example packs documents at a length, and their lengths. Arguments without
    a known name tell documents apart only where it is stated that they are `packed`. Raises
    `Unreadable` if the example gives one document.
    """
    roles = {p.name: p.role for p in attention.parameters()}
    telling = (*_TELLING, *(("unknown",) if packed else ()), *_WEAK)
    found = list[tuple[str, list[int]]]()
    for name, value in arguments_of_example(attention, length).items():
        if roles.get(name) in telling and isinstance(value, Tensor):
            found += [(name, starts) for starts in [_starts_in(value, length)] if starts]
    if not found:
        raise Unreadable("in the example nothing tells documents apart")
    name, starts = min(found, key=lambda each: telling.index(roles[each[0]]))
    lengths = [end - start for start, end in pairwise([0, *starts, length])]
    return Way(name, {}, roles[name] not in _WEAK, False, of_one_row=True), lengths


def _starts_in(value: Tensor, length: int) -> list[int]:
    """Where documents behind the first start, as an argument of a call for a text of this length
    shows it: by a mask, their starts, or a number or a position for each token.
    """
    shape = value.shape
    if shape[-2:] == (length, length):
        cells = value.reshape(-1, length, length)[0]
        hidden = cells != 0 if (cells < 0).any() else ~cells.bool()
        return _cuts(~hidden) or _cuts(hidden)
    if value.is_floating_point() or not value.ndim:
        return []
    row = value.reshape(-1, shape[-1])[0]
    steps = row.diff()
    if shape[-1] != length:
        is_whole = row[[0, -1]].tolist() == [0, length] and bool((steps > 0).all())
        return row[1:-1].tolist() if is_whole else []
    usual = int((steps == 0).sum() * 2 <= length)  # positions grow
    return ((steps != usual).nonzero().flatten() + 1).tolist()


def _cuts(visible: Tensor) -> list[int]:
    """Where no token sees one of the other side."""
    cuts = range(1, len(visible))
    return [n for n in cuts if not (visible[n:, :n].any() or visible[:n, n:].any())]


# ------------------------------------------------------------------------------------ the behaviour


class _Measured(NamedTuple):
    """What a way gives, by document: the difference when all others change, and, where it was
    asked, from the document alone.
    """

    way: Way
    tolerance: float
    moved: Sequence[PassDifference]
    alone: Sequence[PassDifference] = ()

    @property
    def isolates(self) -> bool:
        """Whether no document sees another one."""
        return all(each.largest <= self.tolerance for each in self.moved)

    def fault(self) -> tuple[int, PassDifference] | None:
        """The number of the first document that is wrong, and its difference; None if all are
        right. Where positions run on, only the first must be as it is alone.
        """
        asked = self.alone if self.way.restarts else self.alone[:1]
        differences = [*enumerate(self.moved), *enumerate(asked)]
        wrong = (each for each in differences if each[1].largest > self.tolerance)
        return next(wrong, None)


def isolation(attention: UserAttention, seed: int) -> Behaviour | None:
    """Whether each document in the rows of a short call stays as it is when all others change; None
    where the call does not tell several apart. Raises `Unreadable`, and what the code raises.
    """
    length = attention.sizes.q_len
    drawer = attention.drawer(seed)
    is_one_behind_another = "token" in attention.axes
    if is_one_behind_another:  # a text is a document
        name = attention.parameters("starts")[0].name
        lengths: Sequence[int] = [length] * attention.sizes.batch
        numbers = torch.arange(len(lengths))[:, None]
    elif attention.parameters("starts", "documents") and attention.example is not None:
        way, lengths = way_of_example(attention, length, packed=False)
        name = way.name
        numbers = _numbers(0, lengths, 1)
    else:
        return None
    inputs = drawer.inputs(with_context=is_one_behind_another and attention.takes_context)
    before = attention(inputs, seed=0)
    for n in range(len(lengths)):
        kept = (numbers == n).reshape(len(numbers), *[1] * (before.ndim - 3), -1, 1)

        def other(rows: Tensor, kept: Tensor = kept) -> Tensor:
            """The rows with other numbers in all other documents."""
            return rows.where(kept, torch.randn(rows.shape, generator=drawer.generator).to(rows))

        after = attention(inputs.map(other), seed=0).where(kept.to(before.device), before)
        if differing(before, after).any():
            what = f"document {n + 1} of {len(lengths)} changes with the others"
            largest = finite(((after - before).abs().max() / before.abs().max()).item())
            reason = f"{name} does not isolate: {what}"
            return Behaviour(name="packing", ok=False, reason=reason, largest=largest)
    tried = Tried(length, len(lengths) + 1)
    return Behaviour(name="packing", ok=True, reason=f"{name} isolates documents", tried=tried)


def packing(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether each of several documents in one row stays as it is when all others change, and is
    as it is alone. What nobody promises or states is a note.
    """
    model = passes.model
    attention = passes.attention
    if attention.is_pooled:
        return not_tried(passes, "its output is of a whole text, not of each token")
    length = passes.length
    if is_family(model) and attention.is_resizable:  # which has many ways
        length = min(_LENGTH, length)
    if length < _FEWEST:
        return not_tried(passes, f"needs a text of {_FEWEST} tokens or more")
    lengths: Sequence[int] = document_lengths(length)
    if attention.example is None:
        ways = ways_of(model, causal=answers["causality"].ok is True, packed=intent.packed)
    else:
        way, lengths = way_of_example(attention, length, packed=intent.packed)
        ways = [way]
    found = dict[tuple[str, WithMask, str], _Measured]()
    tried = list[Attempt]()
    for each in those_that_work(ways, partial(_measured, passes, lengths, []), tried.append):
        key = (each.way.name, each.way.mask, each.way.cache)
        if key not in found or (each.fault() is None and found[key].fault() is not None):
            found[key] = each
    if not found:
        is_refused = any(way.mask != "block" for way in ways)
        return not_tried(passes, reason_of(tried[0].failure) if is_refused else _untold(model))
    observed = _judged(passes, [*found.values()], lengths, packed=intent.packed)
    return replace(observed, tried=Tried(length, len(lengths) + 1))


def _untold(model: TextModel) -> str:
    """Why nothing tells documents apart."""
    if model.has_source:
        return "an encoder-decoder model"
    weak = [each.name for each in model.attention.parameters(*_WEAK)]
    if weak and not is_family(model):
        return f"{weak[0]} tells documents apart only with --packed"
    return "it takes no documents by a known name"


def _measured(
    passes: Passes, lengths: Sequence[int], alone: list[PassOutput], way: Way
) -> _Measured:
    """What a way gives. `alone` is the list in which the first way that needs it keeps what
    documents alone give in a plain call, which is the same for all ways. Other documents are alone
    only where those in the row are isolated, else the answer is known.
    """
    n = sum(lengths)
    ends = [*accumulate(lengths)]
    spans = [slice(end - size, end) for end, size in zip(ends, lengths, strict=True)]
    text = passes.text[:n]
    rows = [passes.text[:n]]
    for span in spans:
        row = passes.changed(0, passes.length, 1)[:n]
        row[span] = text[span]
        rows.append(row)
    outputs = list[PassOutput]()
    for batch in [[row] for row in rows] if way.of_one_row else [rows]:
        outputs += passes.run_pass(*batch, given=way.arguments(lengths, len(batch)))
    together, *changed = outputs
    parts = [_part(together, span) for span in spans]
    others = [_part(row, span) for row, span in zip(changed, spans, strict=True)]
    measured = _Measured(way, passes.tolerance, [*map(difference_of, others, parts)])
    if passes.attention.example is not None or not measured.isolates:
        return measured
    if way.mask == "block":  # it may replace one of the model's
        alone = [passes.run_pass(text[s], given=way.arguments([len(text[s])]))[0] for s in spans]
    elif not alone:
        alone += [passes.run_pass(text[span])[0] for span in spans]
    return measured._replace(alone=[*map(difference_of, parts, alone)])


def _part(output: PassOutput, span: slice) -> PassOutput:
    """What a pass gives for a part of its text."""

    def parts(_pinned: PartRows = NO_ROWS) -> PartCalls:
        def cut(each: Tensor | None) -> Tensor | None:
            return None if each is None else each[span]

        return {call: (cut(read), cut(gave)) for call, (read, gave) in output.parts().items()}

    return PassOutput(output.output[span], parts)


def _judged(
    passes: Passes, measured: Sequence[_Measured], lengths: Sequence[int], *, packed: bool
) -> Observed:
    """What was seen in all ways: wrong where documents must not see each other and do."""
    asked = [e for e in measured if _must_isolate(passes.model, e.way, packed=packed)]
    asked = asked or [each for each in measured if packed and each.way.mask == "block"]
    reason = _reason(measured)
    for each in asked:
        fault = each.fault()
        if fault is not None:
            n, difference = fault
            words = "is not as it is alone" if each.isolates else "changes with the others"
            reason += f": document {n + 1} of {len(lengths)} {words}"
            return compared(passes, [difference], "", reason, sum(lengths[:n]))
    reason += _cautions(measured, is_asked=bool(asked))
    if asked or all(each.fault() is None for each in measured):
        moved = [difference for each in asked or measured for difference in each.moved]
        return compared(passes, moved, reason, reason)
    return seen(passes, None, reason, largest_of(e for each in measured for e in each.moved))


def _cautions(measured: Sequence[_Measured], *, is_asked: bool) -> str:
    """What an answer that is no failure must not hide: a leak that is not asked about, and
    documents that are not as they are alone.
    """
    said = ""
    if is_asked and any(each.way.is_usual and not each.isolates for each in measured):
        said += f"; {LEAKS_AS_USUAL}"
    if any(each.largest > ways.tolerance for ways in measured for each in ways.alone):
        said += "; a document is not as it is alone, as where positions run on"
    return said


def _must_isolate(model: TextModel, way: Way, *, packed: bool) -> bool:
    """Whether a leak is wrong. A model of transformers promises nothing, and isolates documents in
    one way alone.
    """
    if is_family(model):
        return packed and way.mask == "none" and not way.cache.endswith(CONFIGURED)
    return packed or (way.promises and way.mask != "ones")


def _reason(measured: Sequence[_Measured]) -> str:
    """What isolates documents, by what tells them apart."""
    said = list[str]()
    for name in dict.fromkeys(each.way.name for each in measured):
        every = [each for each in measured if each.way.name == name]
        where = list[str]()
        for mask, words in _MASKS.items():
            of_mask = [each for each in every if each.way.mask == mask]
            caches = [each.way.cache for each in of_mask if each.isolates]
            if caches:
                is_all = len(caches) == len(of_mask)
                where.append(words if is_all else f"with {caches[0]} and {words}")
        only = f" isolates only {', or '.join(where)}" if where else " does not isolate"
        is_everywhere = all(each.isolates for each in every)
        said.append(name + (" isolates documents" if is_everywhere else only))
    return "; ".join(said)
