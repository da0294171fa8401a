"""The modes of a call: over its own rows, and over a context that may be left out; and which mask belongs to which of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mhacli.adapters.usercode.call.choice import Call
from mhacli.adapters.usercode.call.extras import Recipe
from mhacli.adapters.usercode.call.mask_forms import required_forms
from mhacli.adapters.usercode.call.mask_search import MaskSearch
from mhacli.adapters.usercode.call.results import PATTERN_AXES
from mhacli.adapters.usercode.call.search import Laboratory, Trial, close, without
from mhacli.adapters.usercode.call.signature import MASKS, Parameter
from mhacli.adapters.usercode.user_attention import MaskForm
from mhacli.results.check import Mode

_GENERIC = """mask masks msk attention attn att key padding pad hidden hiddens state states seq sequence input inputs output
    outputs out embeds layer extended valid bool is non"""
"""Words that say nothing of whose rows a mask or an argument is."""
_OF_CONTEXT = "context ctx encoder enc memory mem cross source src xa cond other kv"
_OF_OWN = "x q query queries self own tgt trg target decoder dec"
_QUERIES_BY_KEYS: tuple[tuple[str, ...], ...] = (("batch", "query"), ("batch", "key"), PATTERN_AXES, ("query", "key"))


@dataclass(frozen=True)
class Masked:
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

    def only(self, names: frozenset[str]) -> Masked:
        """The same with the masks of these parameters alone."""
        masks, paddings = (
            tuple(form for form in forms if form.parameter in names) for forms in (self.masks, self.paddings)
        )
        return replace(self, masks=masks, paddings=paddings)


# ------------------------------------------------------------------------------------------------------------ the modes


def modes_of(lab: Laboratory, trial: Trial) -> tuple[tuple[Mode | None, Trial], ...]:
    """The ways to call it that differ in whose rows the keys are: one, None, where a context is not both taken and optional."""
    others = [slot for slot in trial.way.slots if slot.part != "queries"]
    if not others or any(slot.required for slot in others):
        return ((None, trial),)
    always = tuple(slot._replace(required=True) for slot in trial.way.slots)
    crossed = replace(trial, way=replace(trial.way, slots=always))
    alone = without(trial, (slot for slot in trial.way.slots if slot not in others))
    found = lab.located(replace(alone, lengths=alone.lengths._replace(k_len=alone.lengths.q_len)))
    if found is None or not _looks_at_others(lab, found):
        return ((None, crossed),)
    return (("self", found), ("cross", crossed))


def _looks_at_others(lab: Laboratory, trial: Trial) -> bool:
    """Whether a row moves the output of another."""
    rows = lab.rows(trial)
    before = lab.answer(trial, rows)
    for place in (0, trial.lengths.q_len - 1):
        queries = rows.queries.clone()
        queries[..., place, :] = queries[..., place, :].flip(-1) + 0.5
        after = lab.answer(trial, rows._replace(queries=queries))
        if before is None or after is None:
            return False
        others = [row for row in range(trial.lengths.q_len) if row != place]
        if not close(before.out[..., others, :], after.out[..., others, :]):
            return True
    return False


# ------------------------------------------------------------------------------------------------------------ the masks


def masked(call: Call, lab: Laboratory, trial: Trial) -> Masked:
    """The accepted forms of masks and of padding masks; and the trial with the likeliest form of each mask that it requires."""
    search = MaskSearch(lab, trial, call.built.documentation)
    masks, paddings = _forms(call, search, padding=False), _forms(call, search, padding=True)
    any_masks = call.free(*call.signature.of_role(*MASKS))
    if not masks and not paddings and any_masks and trial.way.causal_by is not None:
        search = MaskSearch(lab, replace(trial, way=replace(trial.way, causal_yields=True)), call.built.documentation)
        masks, paddings = _forms(call, search, padding=False), _forms(call, search, padding=True)
    trial = search.trial
    best = {form.parameter: form for form in reversed((*masks, *paddings))} | {
        form.parameter: form for form in reversed(masks)
    }
    idle = tuple((name, form if form is None else best.get(name, form)) for name, form in trial.way.idle)
    trial = replace(trial, way=replace(trial.way, idle=idle))
    return Masked(trial, masks, paddings, frozenset(search.acting))


def _forms(call: Call, search: MaskSearch, *, padding: bool) -> tuple[MaskForm, ...]:
    def of(parameter: Parameter) -> tuple[MaskForm, ...]:
        return search.paddings(parameter) if padding else search.masks(parameter)

    roles = (("padding", "lengths"), ("mask",)) if padding else (("mask",), ("bias",))
    parameters = [parameter for some in roles for parameter in call.free(*call.signature.of_role(*some))]
    return tuple(form for parameter in parameters for form in of(parameter))


def paired(
    call: Call, found: Mapping[Mode | None, Masked], labs: Mapping[Mode | None, Laboratory]
) -> dict[Mode | None, Masked]:
    """The masks of each mode: those that act in it, and those that act in no mode and are of its rows.

    A mask that changes nothing may want another argument beside it, so it is tried with the other masks given, open, and with
    the switches on that speak of masks, before it is said to be idle.
    """
    found = dict(found)
    acting = frozenset().union(*(one.acting for one in found.values()))
    for name in sorted(frozenset().union(*(one.parameters for one in found.values())) - acting):
        helped = {mode: one for mode in found if (one := _helped(call, labs[mode], found[mode], name)) is not None}
        found |= helped
        acting |= {name} if helped else frozenset()
    whose = _whose(call, next(iter(found.values())))
    result = {}
    for mode, one in found.items():
        own = mode or ("cross" if one.trial.takes_keys else "self")
        beside = {kind for name, kind in whose.items() if name in one.parameters}
        idle = {name for name in one.parameters - acting if whose[name] in (None, own) or not {own, *found} & beside}
        result[mode] = one.only(frozenset(one.acting | idle) - _biases(call, idle))
    return result


def _biases(call: Call, names: set[str]) -> set[str]:
    """Those of some parameters that hold a bias, which need not hide anything."""
    return names & {parameter.name for parameter in call.signature.of_role("bias")}


def _whose(call: Call, one: Masked) -> dict[str, Mode | None]:
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


def _helped(call: Call, lab: Laboratory, one: Masked, name: str) -> Masked | None:
    """The same in a way of calling in which that mask acts, None where none was found."""
    parameter = next((p for p in call.signature.of_role(*MASKS) if p.name == name), None)
    if parameter is None or lab.is_slow:
        return None
    for trial in _with_companions(call, lab, one.trial, name):
        other = masked(call, lab, trial)
        if name in other.acting:
            return replace(other, acting=other.acting | one.acting)
    return None


def _with_companions(call: Call, lab: Laboratory, trial: Trial, name: str) -> Iterator[Trial]:
    """The trial with each other mask given, open, and with each switch of masks on, as far as it bears that."""
    switches = [p for p in call.free(*call.signature.of_role("off", "causal")) if "mask" in p.name.lower()]
    for switch in switches:
        others = tuple(recipe for recipe in trial.way.extras if recipe.parameter != switch.name)
        extras = (*others, Recipe(switch.name, "literal", True))
        found = lab.located(replace(trial, way=replace(trial.way, extras=extras)))
        if found is not None:
            yield found
    for other in call.free(*call.signature.of_role("mask", "padding")):
        for form in _open_forms(other, batched=trial.way.batched) if other.name != name else ():
            idle = (*(pair for pair in trial.way.idle if pair[0] != other.name), (other.name, form))
            found = lab.located(replace(trial, way=replace(trial.way, idle=idle)))
            if found is not None:
                yield found
                break


def _open_forms(parameter: Parameter, *, batched: bool) -> Sequence[MaskForm]:
    """The forms in which a mask that hides nothing is tried."""
    if not batched:
        return [form for form in required_forms(parameter, batched=False) if form is not None]
    return [MaskForm(parameter.name, axes, "bool") for axes in _QUERIES_BY_KEYS]
