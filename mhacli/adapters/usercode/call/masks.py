"""The masks that a user's attention accepts, in each of its modes: over its own rows, and over a context that may be left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.usercode.asker import map_rows
from mhacli.adapters.usercode.call.convention import PATTERN_AXES, CallMasks
from mhacli.adapters.usercode.call.signature import MASKS, AxisNames, CallParameter, documented_meaning
from mhacli.adapters.usercode.call.trials import LENGTHS, CallFacts, Trial, TrialRunner, close, required_forms
from mhacli.adapters.usercode.types import AttentionOutput, Inputs, MaskForm, MaskKind, MaskMeaning
from mhacli.results.check import Mode

_GENERIC = """mask masks msk attention attn att key padding pad hidden hiddens state states seq sequence input inputs output
    outputs out embeds layer extended valid bool is non"""
"""Words that do not say to which rows a mask or an argument belongs."""
_OF_CONTEXT = "context ctx encoder enc memory mem cross source src xa cond other kv"
_OF_OWN = "x q query queries self own tgt trg target decoder dec"
_QUERIES_BY_KEYS: tuple[tuple[str, ...], ...] = (("batch", "query"), ("batch", "key"), PATTERN_AXES, ("query", "key"))


@dataclass(frozen=True)
class MaskedTrial:
    """A way to call it, with the forms of masks and of padding masks that it accepts; `acting` are the parameters that were seen
    to change the output."""

    trial: Trial
    masks: tuple[MaskForm, ...]
    paddings: tuple[MaskForm, ...]
    acting: frozenset[str]

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters that have a form."""
        return frozenset(form.parameter for form in (*self.masks, *self.paddings))

    def only(self, names: frozenset[str]) -> MaskedTrial:
        """The same with the masks of these parameters alone."""
        masks, paddings = (
            tuple(form for form in forms if form.parameter in names) for forms in (self.masks, self.paddings)
        )
        return replace(self, masks=masks, paddings=paddings)


# ------------------------------------------------------------------------------------------------------------ the modes


def modes_of(runner: TrialRunner, trial: Trial) -> tuple[tuple[Mode | None, Trial], ...]:
    """The ways to call it that differ in whose rows the keys are: one, None, where a context is not both taken and optional."""
    others = [slot for slot in trial.convention.slots if slot.part != "queries"]
    if not others or any(slot.required for slot in others):
        return ((None, trial),)
    always = tuple(slot._replace(required=True) for slot in trial.convention.slots)
    crossed = trial.changed(slots=always)
    alone = trial.changed(slots=tuple(slot for slot in trial.convention.slots if slot not in others))
    found = runner.with_output(replace(alone, lengths=alone.lengths._replace(k_len=alone.lengths.q_len)))
    if found is None or not _looks_at_others(runner, found):
        return ((None, crossed),)
    return (("self", found), ("cross", crossed))


def _looks_at_others(runner: TrialRunner, trial: Trial) -> bool:
    """Whether a row influences the output of another."""
    rows = runner.rows(trial)
    before = runner.answer(trial, rows)
    for place in (0, trial.lengths.q_len - 1):
        queries = rows.queries.clone()
        queries[..., place, :] = queries[..., place, :].flip(-1) + 0.5
        after = runner.answer(trial, rows._replace(queries=queries))
        if before is None or after is None:
            return False
        others = [row for row in range(trial.lengths.q_len) if row != place]
        if not close(before.out[..., others, :], after.out[..., others, :]):
            return True
    return False


# ------------------------------------------------------------------------------------------------------------ the masks


def with_masks(call: CallFacts, runner: TrialRunner, trial: Trial) -> MaskedTrial:
    """The accepted forms of masks and of padding masks; and the trial with the likeliest form of each mask that it requires."""
    search = MaskSearch(runner, trial, call.built.documentation)
    masks, paddings = _forms(call, search, padding=False), _forms(call, search, padding=True)
    any_masks = call.free(*call.signature.of_role(*MASKS))
    if not masks and not paddings and any_masks and trial.convention.causal_by is not None:
        search = MaskSearch(runner, trial.changed(causal_yields=True), call.built.documentation)
        masks, paddings = _forms(call, search, padding=False), _forms(call, search, padding=True)
    trial = search.trial
    best = {form.parameter: form for form in reversed((*masks, *paddings))} | {
        form.parameter: form for form in reversed(masks)
    }
    idle = tuple((name, form if form is None else best.get(name, form)) for name, form in trial.convention.idle)
    trial = trial.changed(idle=idle)
    return MaskedTrial(trial, masks, paddings, frozenset(search.acting))


def _forms(call: CallFacts, search: MaskSearch, *, padding: bool) -> tuple[MaskForm, ...]:
    def of(parameter: CallParameter) -> tuple[MaskForm, ...]:
        return search.paddings(parameter) if padding else search.masks(parameter)

    roles = (("padding", "lengths"), ("mask",)) if padding else (("mask",), ("bias",))
    parameters = [parameter for some in roles for parameter in call.free(*call.signature.of_role(*some))]
    return tuple(form for parameter in parameters for form in of(parameter))


def masks_by_mode(
    call: CallFacts, found: Mapping[Mode | None, MaskedTrial], runners: Mapping[Mode | None, TrialRunner]
) -> dict[Mode | None, MaskedTrial]:
    """The masks of each mode: those that act in it, and those that act in no mode and are of its rows.

    A mask that changes nothing may want another argument beside it, so it is tried with the other masks given, open, and with
    the switches on that speak of masks, before it counts as idle.
    """
    found = dict(found)
    acting = frozenset().union(*(one.acting for one in found.values()))
    for name in sorted(frozenset().union(*(one.parameters for one in found.values())) - acting):
        helped = {mode: one for mode in found if (one := _helped(call, runners[mode], found[mode], name)) is not None}
        found |= helped
        acting |= {name} if helped else frozenset()
    whose = _whose(call)
    result = {}
    for mode, one in found.items():
        own = mode or ("cross" if one.trial.takes_keys else "self")
        beside = {kind for name, kind in whose.items() if name in one.parameters}
        idle = {name for name in one.parameters - acting if whose[name] in (None, own) or not {own, *found} & beside}
        result[mode] = one.only(frozenset(one.acting | idle) - _biases(call, idle))
    return result


def _biases(call: CallFacts, names: set[str]) -> set[str]:
    """Those of some parameters that hold a bias, which need not hide anything."""
    return names & {parameter.name for parameter in call.signature.of_role("bias")}


def _whose(call: CallFacts) -> dict[str, Mode | None]:
    """Whose rows each mask is of, by its name and those of the arguments for rows; None where its name does not say it. Beside
    a mask of the context, a mask whose name says nothing is of its own rows."""
    context, own = frozenset(_OF_CONTEXT.split()), frozenset(_OF_OWN.split())
    for parameter in call.signature.of_role("x", "query"):
        own = own | _words(parameter.name)
    for parameter in call.signature.of_role("key", "value", "kv", "context"):
        context = context | _words(parameter.name)
    context = context - own
    whose: dict[str, Mode | None] = {}
    for parameter in call.signature.of_role(*MASKS):
        words = _words(parameter.name)
        whose[parameter.name] = "cross" if words & context else "self" if words & own else None
    if "cross" in whose.values():
        whose = {name: kind or "self" for name, kind in whose.items()}
    return whose


def _words(name: str) -> frozenset[str]:
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return frozenset(re.split(r"_+", plain)).difference(_GENERIC.split(), [""])


def _helped(call: CallFacts, runner: TrialRunner, one: MaskedTrial, name: str) -> MaskedTrial | None:
    """The same in a way of calling in which that mask acts, None where none was found."""
    parameter = next((p for p in call.signature.of_role(*MASKS) if p.name == name), None)
    if parameter is None or runner.is_slow:
        return None
    for trial in _with_companions(call, runner, one.trial, name):
        other = with_masks(call, runner, trial)
        if name in other.acting:
            return replace(other, acting=other.acting | one.acting)
    return None


def _with_companions(call: CallFacts, runner: TrialRunner, trial: Trial, name: str) -> Iterator[Trial]:
    """The trial with each other mask given, open, and with each switch of masks on, as far as it bears that."""
    switches = [p for p in call.free(*call.signature.of_role("off", "causal")) if "mask" in p.name.lower()]
    for switch in switches:
        found = runner.with_output(trial.with_values({switch.name: True}))
        if found is not None:
            yield found
    for other in call.free(*call.signature.of_role("mask", "padding")):
        for form in _open_forms(other, batched=trial.convention.batched) if other.name != name else ():
            idle = (*(pair for pair in trial.convention.idle if pair[0] != other.name), (other.name, form))
            found = runner.with_output(trial.changed(idle=idle))
            if found is not None:
                yield found
                break


def _open_forms(parameter: CallParameter, *, batched: bool) -> Sequence[MaskForm]:
    """The forms in which a mask that hides nothing is tried."""
    if not batched:
        return [form for form in required_forms(parameter, batched=False) if form is not None]
    return [MaskForm(parameter.name, axes, "bool") for axes in _QUERIES_BY_KEYS]


# ----------------------------------------------------------------------------------------------- experiments with masks


SEEN_KEY, HIDDEN_KEY = 0, 1


class MaskSearch:
    """The forms of the masks of one call. `acting` are the parameters whose mask has changed the output so far."""

    def __init__(self, runner: TrialRunner, trial: Trial, documentation: str) -> None:
        self.runner, self.trial, self.documentation = runner, trial, documentation
        self.acting: set[str] = set()
        self._open: dict[int, Tensor | None] = {}
        self.batch_second = trial.convention.axes[:2] == ("row", "batch")

    def masks(self, parameter: CallParameter) -> tuple[MaskForm, ...]:
        """The accepted forms of a mask of queries by keys, the likeliest first."""
        convention = self.trial.convention
        axes = mask_axes(
            batched=convention.batched,
            is_function=convention.is_function,
            n_axes=len(convention.axes),
            batch_second=self.batch_second,
        )
        kinds: tuple[MaskKind, ...] = ("additive",) if parameter.role == "bias" else KINDS
        return self._ordered(parameter, axes, kinds, padding=False)

    def paddings(self, parameter: CallParameter) -> tuple[MaskForm, ...]:
        """The accepted forms of a mask of keys, or of lengths, the likeliest first."""
        convention = self.trial.convention
        found: tuple[MaskForm, ...] = ()
        if parameter.role == "lengths" and convention.batched:
            found = self._ordered(parameter, (LENGTHS,), ("lengths",), padding=True)
        if found or parameter.role == "bias":
            return found
        axes = padding_axes(batched=convention.batched, batch_second=self.batch_second)
        return self._ordered(parameter, axes, KINDS, padding=True)

    def _ordered(
        self, parameter: CallParameter, axes: Iterable[AxisNames], kinds: tuple[MaskKind, ...], *, padding: bool
    ) -> tuple[MaskForm, ...]:
        tried = self._tried(parameter.name, axes, kinds, padding=padding)
        return rank_forms(tried, parameter, self.documentation) if tried else ()

    def _tried(
        self, name: str, axes: Iterable[AxisNames], kinds: tuple[MaskKind, ...], *, padding: bool
    ) -> list[TriedForm]:
        """Every form that is accepted. Once some kinds are known to be accepted, others are not tried any more; both meanings of
        True are tried with the first axes alone."""
        tried: list[TriedForm] = []
        for some in axes:
            accepted = list(
                dict.fromkeys(one.form.kind for one in tried if one.form.kind != "additive" or "additive" in kinds)
            )
            here = accepted or list(kinds)
            if accepted and self.runner.is_slow:
                break
            first = not accepted
            for kind in here:
                one = self._experiment(MaskForm(name, some, kind), padding=padding)
                if one is None:
                    if not first and kind == here[0]:
                        break
                    continue
                tried.append(one)
                if first and kind in ("bool", "01", "whole") and not self.runner.is_slow:
                    other = self._experiment(MaskForm(name, some, kind, "hide"), padding=padding)
                    tried += [other] if other is not None else []
                if kind == "01":
                    added = self._experiment(MaskForm(name, some, "additive"), padding=padding) if first else None
                    tried.append(added or TriedForm(MaskForm(name, some, "additive"), False, False))
        return tried

    def _experiment(self, form: MaskForm, *, padding: bool) -> TriedForm | None:
        """One call: all sequences are the same but for one key in two of them, hidden in the one and seen in the other."""
        hidden = self.trial.lengths.k_len - 2 if form.kind == "lengths" else HIDDEN_KEY
        inputs = self._inputs(hidden, form, padding=padding)
        forms = CallMasks(None, form) if padding else CallMasks(form, None)
        answer = self.runner.answer(self.trial, inputs, forms)
        if (
            answer is None
            and padding
            and form.kind != "lengths"
            and "query" in form.axes
            and self.trial.convention.batched
        ):
            answer = self._spread_answer(form, inputs, forms)
        if answer is None:
            return None
        self._note(form.parameter, inputs, hidden, answer.out)
        rows = self._rows_that_tell(answer.out, hidden)
        base, without_hidden, without_seen = rows[0], rows[1], rows[2]
        finite = bool(torch.isfinite(rows).all())
        hides = finite and close(base, without_hidden) and not close(base, without_seen)
        return TriedForm(form, hides, finite)

    def _note(self, name: str, inputs: Inputs, hidden: int, out: Tensor) -> None:
        """Records a mask that changes the output."""
        if name in self.acting:
            return
        if hidden not in self._open:
            answer = self.runner.answer(self.trial, inputs._replace(allowed=None, real=None))
            self._open[hidden] = None if answer is None else answer.out
        bare = self._open[hidden]
        if bare is None or bare.shape != out.shape or not close(bare, out):
            self.acting.add(name)

    def _spread_answer(self, form: MaskForm, inputs: Inputs, forms: CallMasks) -> AttentionOutput | None:
        """The answer with the mask of keys written for each query; the convention keeps it where that is accepted."""
        convention = self.trial.convention
        spread = replace(
            self.trial, convention=replace(convention, spread=convention.spread | {(form.parameter, form.axes)})
        )
        answer = self.runner.answer(spread, inputs, forms)
        if answer is not None:
            self.trial = spread
        return answer

    def _rows_that_tell(self, out: Tensor, hidden: int) -> Tensor:
        """The outputs of queries that are not themselves the changed tokens."""
        mine = [n for n in range(out.shape[-2]) if self.trial.takes_keys or n not in (SEEN_KEY, hidden)]
        return out[..., mine, :]

    def _inputs(self, hidden: int, form: MaskForm, *, padding: bool) -> Inputs:
        rows = self.runner.rows(self.trial)
        keys = rows.queries if rows.keys is None else rows.keys
        batch, k_len, q_len = self.trial.lengths.batch, keys.shape[-2], rows.queries.shape[-2]
        same = map_rows(rows, lambda tensor: tensor[:1].expand_as(tensor).clone())
        changed = [
            tensor for tensor in (same.queries if rows.keys is None else same.keys, same.values) if tensor is not None
        ]
        for tensor in changed:
            tensor[1, ..., hidden, :] = tensor[1, ..., hidden, :].flip(-1) + 0.5
            tensor[2, ..., SEEN_KEY, :] = tensor[2, ..., SEEN_KEY, :].flip(-1) + 0.5
        real = torch.ones(batch, k_len, dtype=torch.bool)
        real[:, hidden : k_len if form.kind == "lengths" else hidden + 1] = False
        if padding:
            return same._replace(real=real)
        return same._replace(allowed=real[:1, None, None, :].expand(1, 1, q_len, k_len))


# ------------------------------------------------------------------------------------------------------- forms of masks


KINDS: tuple[MaskKind, ...] = ("bool", "01", "whole")
"""The kinds that are tried for each choice of axes; additive is accepted where 01 is, for both are numbers of the dtype."""
_BATCH_LAST: AxisNames = ("query", "key", "batch")
_LIKELY: tuple[MaskKind, ...] = ("lengths", "bool", "01", "whole", "additive")


class TriedForm(NamedTuple):
    """What an experiment showed of a form: whether it was accepted, whether what it hides had no influence while the rest had
    (`hides`), and whether the output was finite."""

    form: MaskForm
    hides: bool
    finite: bool


def mask_axes(*, batched: bool, is_function: bool, n_axes: int, batch_second: bool) -> tuple[AxisNames, ...]:
    """The axes that are tried for a mask of queries by keys, the most telling first."""
    if not batched:
        return (("query", "key"), ("head", "query", "key"))
    if is_function and n_axes == 3:
        return (("batch", "query", "key"), ("query", "key"))
    usual: tuple[AxisNames, ...] = (PATTERN_AXES, ("batch", "query", "key"), ("query", "key"))
    return (*usual, _BATCH_LAST) if batch_second else usual


def padding_axes(*, batched: bool, batch_second: bool) -> tuple[AxisNames, ...]:
    """The axes that are tried for a mask of keys; axes that a padding mask does not need are of one."""
    if not batched:
        return (("key",), ("query", "key"))
    plain: tuple[AxisNames, ...] = (("batch", "key"), PATTERN_AXES, ("batch", "query", "key"))
    return (*plain, ("key", "batch"), _BATCH_LAST) if batch_second else plain


def usual_meaning(parameter: str, role: str) -> MaskMeaning:
    """What True most often stands for in a mask of that name, unless stated: torch's padding masks hide, others keep."""
    name = parameter.lower()
    hides = role == "padding" and "pad" in name and "non" not in name
    return "hide" if hides or "ignore" in name or "is_masked" in name or name.startswith("block") else "keep"


def rank_forms(tried: list[TriedForm], parameter: CallParameter, documentation: str) -> tuple[MaskForm, ...]:
    """The accepted forms with both meanings of True, the likeliest first: what the documentation states, then what was seen to
    hide what it should, then what is the custom; and of equals the most telling axes first."""
    stated = documented_meaning(documentation, parameter.name)
    seen = {(one.form.kind, one.form.true_means) for one in tried if one.hides}
    finite = {(one.form.kind, one.form.true_means) for one in tried if one.finite}
    axes_found = list(dict.fromkeys(one.form.axes for one in tried))
    pairs = dict.fromkeys((one.form.axes, one.form.kind) for one in tried)
    stated_fails = stated is not None and not any(kind in KINDS for kind, _ in seen)
    custom = usual_meaning(parameter.name, parameter.role)

    def rank(form: MaskForm) -> tuple[object, ...]:
        written_so = (form.kind, form.true_means)
        agrees = form.true_means == stated if stated else written_so in seen
        return (
            form.kind not in KINDS if stated_fails else not any(kind == form.kind for kind, _ in seen),
            axes_found.index(form.axes),
            _LIKELY.index(form.kind),
            not agrees,
            written_so not in finite,
            form.true_means != custom,
        )

    forms = [MaskForm(parameter.name, axes, kind, means) for axes, kind in pairs for means in _meanings_of(kind)]
    return tuple(sorted(forms, key=rank))


def _meanings_of(kind: MaskKind) -> tuple[MaskMeaning, ...]:
    return ("keep",) if kind in ("additive", "lengths") else ("keep", "hide")
