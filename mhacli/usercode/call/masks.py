"""The masks that a user's attention accepts in each mode: self-attention, and attention to an optional context."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mhacli.usercode.call.convention import PATTERN_AXES, CallMasks
from mhacli.usercode.call.signature import MASKS, AxisNames, CallParameter, documented_meaning
from mhacli.usercode.call.trials import LENGTHS, CallFacts, Trial, TrialRunner, close, required_forms
from mhacli.usercode.inputs import map_rows
from mhacli.usercode.target import Mode
from mhacli.usercode.types import AttentionOutput, Inputs, MaskForm, MaskKind, MaskMeaning

_GENERIC = """mask masks msk attention attn att key padding pad hidden hiddens state states seq sequence input inputs output
    outputs out embeds layer extended valid bool is non"""
"""Words that do not identify queries or context."""
_CONTEXT_WORDS = "context ctx encoder enc memory mem cross source src xa cond other kv"
_SELF_WORDS = "x q query queries self own tgt trg target decoder dec"
_QUERIES_BY_KEYS: tuple[tuple[str, ...], ...] = (("batch", "query"), ("batch", "key"), PATTERN_AXES, ("query", "key"))


@dataclass(frozen=True)
class MaskedTrial:
    """A trial with the mask and padding forms that it accepts. `acting` are the parameters observed to change the output."""

    trial: Trial
    masks: tuple[MaskForm, ...]
    paddings: tuple[MaskForm, ...]
    acting: frozenset[str]

    @property
    def parameters(self) -> frozenset[str]:
        """The parameters with an accepted form."""
        return frozenset(form.parameter for form in (*self.masks, *self.paddings))

    def only(self, names: frozenset[str]) -> MaskedTrial:
        """The trial with the masks of these parameters only."""
        masks, paddings = (
            tuple(form for form in forms if form.parameter in names) for forms in (self.masks, self.paddings)
        )
        return replace(self, masks=masks, paddings=paddings)


# ------------------------------------------------------------------------------------------------------------ the modes


def modes_of(runner: TrialRunner, trial: Trial) -> tuple[tuple[Mode | None, Trial], ...]:
    """The trials of each mode: self and cross if a context is optional and used, else one with mode None."""
    key_slots = [slot for slot in trial.convention.slots if slot.part != "queries"]
    if not key_slots or any(slot.required for slot in key_slots):
        return ((None, trial),)
    required = tuple(slot._replace(required=True) for slot in trial.convention.slots)
    crossed = trial.changed(slots=required)
    self_trial = trial.changed(slots=tuple(slot for slot in trial.convention.slots if slot not in key_slots))
    working = runner.with_output(
        replace(self_trial, lengths=self_trial.lengths._replace(k_len=self_trial.lengths.q_len))
    )
    if working is None or not _mixes_positions(runner, working):
        return ((None, crossed),)
    return (("self", working), ("cross", crossed))


def _mixes_positions(runner: TrialRunner, trial: Trial) -> bool:
    """Whether a position influences the output at another one."""
    rows = runner.rows(trial)
    before = runner.output(trial, rows)
    for position in (0, trial.lengths.q_len - 1):
        queries = rows.queries.clone()
        queries[..., position, :] = queries[..., position, :].flip(-1) + 0.5
        after = runner.output(trial, rows._replace(queries=queries))
        if before is None or after is None:
            return False
        others = [other for other in range(trial.lengths.q_len) if other != position]
        if not close(before.out[..., others, :], after.out[..., others, :]):
            return True
    return False


# ------------------------------------------------------------------------------------------------------------ the masks


def with_masks(call: CallFacts, runner: TrialRunner, trial: Trial) -> MaskedTrial:
    """The trial with its accepted mask and padding forms, and with the likeliest form of each required mask."""
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
    def accepted(parameter: CallParameter) -> tuple[MaskForm, ...]:
        return search.paddings(parameter) if padding else search.masks(parameter)

    roles = (("padding", "lengths"), ("mask",)) if padding else (("mask",), ("bias",))
    parameters = [parameter for group in roles for parameter in call.free(*call.signature.of_role(*group))]
    return tuple(form for parameter in parameters for form in accepted(parameter))


def masks_by_mode(
    call: CallFacts, trials: Mapping[Mode | None, MaskedTrial], runners: Mapping[Mode | None, TrialRunner]
) -> dict[Mode | None, MaskedTrial]:
    """The masks of each mode: those that act in it, and idle ones that belong to its inputs.

    A mask may act only together with another argument. Before it counts as idle, it is tried together with the other masks
    (open) and with mask switches on.
    """
    trials = dict(trials)
    acting = frozenset().union(*(masked.acting for masked in trials.values()))
    for name in sorted(frozenset().union(*(masked.parameters for masked in trials.values())) - acting):
        now_acting = {
            mode: masked
            for mode in trials
            if (masked := _acting_with_companions(call, runners[mode], trials[mode], name)) is not None
        }
        trials |= now_acting
        acting |= {name} if now_acting else frozenset()
    modes = _mask_modes(call)
    result = {}
    for mode, masked in trials.items():
        own_mode = mode or ("cross" if masked.trial.takes_keys else "self")
        kinds = {kind for name, kind in modes.items() if name in masked.parameters}
        idle = {
            name
            for name in masked.parameters - acting
            if modes[name] in (None, own_mode) or not {own_mode, *trials} & kinds
        }
        result[mode] = masked.only(frozenset(masked.acting | idle) - _biases(call, idle))
    return result


def _biases(call: CallFacts, names: set[str]) -> set[str]:
    """The biases among the named parameters; they need not hide anything."""
    return names & {parameter.name for parameter in call.signature.of_role("bias")}


def _mask_modes(call: CallFacts) -> dict[str, Mode | None]:
    """The mode of each mask, by its name and the names of the inputs; None if the name does not show it. Beside a context mask,
    an unspecific mask belongs to self-attention."""
    context_words, self_words = frozenset(_CONTEXT_WORDS.split()), frozenset(_SELF_WORDS.split())
    for parameter in call.signature.of_role("x", "query"):
        self_words = self_words | _words(parameter.name)
    for parameter in call.signature.of_role("key", "value", "kv", "context"):
        context_words = context_words | _words(parameter.name)
    context_words = context_words - self_words
    modes: dict[str, Mode | None] = {}
    for parameter in call.signature.of_role(*MASKS):
        words = _words(parameter.name)
        modes[parameter.name] = "cross" if words & context_words else "self" if words & self_words else None
    if "cross" in modes.values():
        modes = {name: kind or "self" for name, kind in modes.items()}
    return modes


def _words(name: str) -> frozenset[str]:
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return frozenset(re.split(r"_+", plain)).difference(_GENERIC.split(), [""])


def _acting_with_companions(call: CallFacts, runner: TrialRunner, masked: MaskedTrial, name: str) -> MaskedTrial | None:
    """The trial with a companion argument that makes this mask act, None if there is none."""
    parameter = next((p for p in call.signature.of_role(*MASKS) if p.name == name), None)
    if parameter is None or runner.is_slow:
        return None
    for trial in _with_companions(call, runner, masked.trial, name):
        other = with_masks(call, runner, trial)
        if name in other.acting:
            return replace(other, acting=other.acting | masked.acting)
    return None


def _with_companions(call: CallFacts, runner: TrialRunner, trial: Trial, name: str) -> Iterator[Trial]:
    """The trial with each other mask, open, and with each mask switch on, as far as it accepts them."""
    switches = [p for p in call.free(*call.signature.of_role("off", "causal")) if "mask" in p.name.lower()]
    for switch in switches:
        working = runner.with_output(trial.with_values({switch.name: True}))
        if working is not None:
            yield working
    for other in call.free(*call.signature.of_role("mask", "padding")):
        for form in _open_forms(other, batched=trial.convention.batched) if other.name != name else ():
            idle = (*(pair for pair in trial.convention.idle if pair[0] != other.name), (other.name, form))
            working = runner.with_output(trial.changed(idle=idle))
            if working is not None:
                yield working
                break


def _open_forms(parameter: CallParameter, *, batched: bool) -> Sequence[MaskForm]:
    if not batched:
        return [form for form in required_forms(parameter, batched=False) if form is not None]
    return [MaskForm(parameter.name, axes, "bool") for axes in _QUERIES_BY_KEYS]


# ----------------------------------------------------------------------------------------------- experiments with masks


SEEN_KEY, HIDDEN_KEY = 0, 1


class MaskSearch:
    """Finds the mask forms of a call. `acting` are the parameters whose mask has changed the output so far."""

    def __init__(self, runner: TrialRunner, trial: Trial, documentation: str) -> None:
        self.runner, self.trial, self.documentation = runner, trial, documentation
        self.acting: set[str] = set()
        self._open: dict[int, Tensor | None] = {}
        self.batch_second = trial.convention.axes[:2] == ("row", "batch")

    def masks(self, parameter: CallParameter) -> tuple[MaskForm, ...]:
        """The accepted forms of a query-by-key mask, the likeliest first."""
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
        """The accepted forms of a padding mask or of lengths, the likeliest first."""
        convention = self.trial.convention
        forms: tuple[MaskForm, ...] = ()
        if parameter.role == "lengths" and convention.batched:
            forms = self._ordered(parameter, (LENGTHS,), ("lengths",), padding=True)
        if forms or parameter.role == "bias":
            return forms
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
        """Every accepted form. Kinds that the first axes reject are not tried with further axes, and both meanings of True are
        tried only with the first axes."""
        tried: list[TriedForm] = []
        for axis_names in axes:
            accepted = list(
                dict.fromkeys(
                    result.form.kind for result in tried if result.form.kind != "additive" or "additive" in kinds
                )
            )
            kinds_to_try = accepted or list(kinds)
            if accepted and self.runner.is_slow:
                break
            first = not accepted
            for kind in kinds_to_try:
                result = self._experiment(MaskForm(name, axis_names, kind), padding=padding)
                if result is None:
                    if not first and kind == kinds_to_try[0]:
                        break
                    continue
                tried.append(result)
                if first and kind in ("bool", "01", "whole") and not self.runner.is_slow:
                    hiding = self._experiment(MaskForm(name, axis_names, kind, "hide"), padding=padding)
                    tried += [hiding] if hiding is not None else []
                if kind == "01":
                    additive = (
                        self._experiment(MaskForm(name, axis_names, "additive"), padding=padding) if first else None
                    )
                    tried.append(additive or TriedForm(MaskForm(name, axis_names, "additive"), False, False))
        return tried

    def _experiment(self, form: MaskForm, *, padding: bool) -> TriedForm | None:
        """One trial call. All sequences are equal, except that two have one changed key: one at the hidden position, one at a
        visible one."""
        hidden = self.trial.lengths.k_len - 2 if form.kind == "lengths" else HIDDEN_KEY
        inputs = self._inputs(hidden, form, padding=padding)
        forms = CallMasks(None, form) if padding else CallMasks(form, None)
        output = self.runner.output(self.trial, inputs, forms)
        if (
            output is None
            and padding
            and form.kind != "lengths"
            and "query" in form.axes
            and self.trial.convention.batched
        ):
            output = self._spread_output(form, inputs, forms)
        if output is None:
            return None
        self._note(form.parameter, inputs, hidden, output.out)
        rows = self._unchanged_queries(output.out, hidden)
        base, without_hidden, without_seen = rows[0], rows[1], rows[2]
        finite = bool(torch.isfinite(rows).all())
        hides = finite and close(base, without_hidden) and not close(base, without_seen)
        return TriedForm(form, hides, finite)

    def _note(self, name: str, inputs: Inputs, hidden: int, out: Tensor) -> None:
        """Records the parameter if its mask changes the output."""
        if name in self.acting:
            return
        if hidden not in self._open:
            output = self.runner.output(self.trial, inputs._replace(allowed=None, real=None))
            self._open[hidden] = None if output is None else output.out
        unmasked = self._open[hidden]
        if unmasked is None or unmasked.shape != out.shape or not close(unmasked, out):
            self.acting.add(name)

    def _spread_output(self, form: MaskForm, inputs: Inputs, forms: CallMasks) -> AttentionOutput | None:
        """The output with a padding mask repeated for each query. The convention keeps this if it is accepted."""
        convention = self.trial.convention
        spread = replace(
            self.trial, convention=replace(convention, spread=convention.spread | {(form.parameter, form.axes)})
        )
        output = self.runner.output(spread, inputs, forms)
        if output is not None:
            self.trial = spread
        return output

    def _unchanged_queries(self, out: Tensor, hidden: int) -> Tensor:
        """The outputs of the queries that are not changed tokens themselves."""
        unchanged = [n for n in range(out.shape[-2]) if self.trial.takes_keys or n not in (SEEN_KEY, hidden)]
        return out[..., unchanged, :]

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
"""The kinds to try for each choice of axes. Additive needs no trial: it is accepted if 01 is."""
_BATCH_LAST: AxisNames = ("query", "key", "batch")
_LIKELY: tuple[MaskKind, ...] = ("lengths", "bool", "01", "whole", "additive")


class TriedForm(NamedTuple):
    """The result of a trial with a mask form: `hides` if only the hidden key had no influence, `finite` if the output was
    finite."""

    form: MaskForm
    hides: bool
    finite: bool


def mask_axes(*, batched: bool, is_function: bool, n_axes: int, batch_second: bool) -> tuple[AxisNames, ...]:
    """The axes to try for a query-by-key mask, the most specific first."""
    if not batched:
        return (("query", "key"), ("head", "query", "key"))
    if is_function and n_axes == 3:
        return (("batch", "query", "key"), ("query", "key"))
    usual: tuple[AxisNames, ...] = (PATTERN_AXES, ("batch", "query", "key"), ("query", "key"))
    return (*usual, _BATCH_LAST) if batch_second else usual


def padding_axes(*, batched: bool, batch_second: bool) -> tuple[AxisNames, ...]:
    """The axes to try for a padding mask; axes that it does not need have size 1."""
    if not batched:
        return (("key",), ("query", "key"))
    plain: tuple[AxisNames, ...] = (("batch", "key"), PATTERN_AXES, ("batch", "query", "key"))
    return (*plain, ("key", "batch"), _BATCH_LAST) if batch_second else plain


def usual_meaning(parameter: str, role: str) -> MaskMeaning:
    """The usual meaning of True in an undocumented mask: torch's padding masks hide, others keep."""
    name = parameter.lower()
    hides = role == "padding" and "pad" in name and "non" not in name
    return "hide" if hides or "ignore" in name or "is_masked" in name or name.startswith("block") else "keep"


def rank_forms(tried: list[TriedForm], parameter: CallParameter, documentation: str) -> tuple[MaskForm, ...]:
    """The accepted forms with both meanings of True, the likeliest first: by documentation, then by experiment, then by custom;
    ties go to the most specific axes."""
    stated = documented_meaning(documentation, parameter.name)
    hiding = {(result.form.kind, result.form.true_means) for result in tried if result.hides}
    finite = {(result.form.kind, result.form.true_means) for result in tried if result.finite}
    axes_order = list(dict.fromkeys(result.form.axes for result in tried))
    pairs = dict.fromkeys((result.form.axes, result.form.kind) for result in tried)
    stated_fails = stated is not None and not any(kind in KINDS for kind, _ in hiding)
    custom = usual_meaning(parameter.name, parameter.role)

    def rank(form: MaskForm) -> tuple[object, ...]:
        kind_and_meaning = (form.kind, form.true_means)
        agrees = form.true_means == stated if stated else kind_and_meaning in hiding
        return (
            form.kind not in KINDS if stated_fails else not any(kind == form.kind for kind, _ in hiding),
            axes_order.index(form.axes),
            _LIKELY.index(form.kind),
            not agrees,
            kind_and_meaning not in finite,
            form.true_means != custom,
        )

    forms = [MaskForm(parameter.name, axes, kind, means) for axes, kind in pairs for means in _meanings_of(kind)]
    return tuple(sorted(forms, key=rank))


def _meanings_of(kind: MaskKind) -> tuple[MaskMeaning, ...]:
    return ("keep",) if kind in ("additive", "lengths") else ("keep", "hide")
