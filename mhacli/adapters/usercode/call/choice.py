"""The candidates for a way of calling somebody's attention, and the choice among those that work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from mhacli.adapters.usercode.call.convention import Slot, Way
from mhacli.adapters.usercode.call.docs import stated_axes
from mhacli.adapters.usercode.call.extras import N_VARIANTS, Recipe, recipe_for, weights_for
from mhacli.adapters.usercode.call.mask_forms import required_forms
from mhacli.adapters.usercode.call.results import Axes
from mhacli.adapters.usercode.call.search import (
    Laboratory,
    Trial,
    cheapest,
    context_matters,
    goodness,
    is_apart,
    without,
)
from mhacli.adapters.usercode.call.signature import MASKS, Parameter, Signature, called_function, source_of
from mhacli.adapters.usercode.call.sizes import (
    FREE_HEAD_WIDTH,
    FREE_HEADS,
    FREE_WIDTH,
    Known,
    Lengths,
    lengths_to_try,
    lengths_told,
    widths_told,
)
from mhacli.adapters.usercode.user_attention import Built, MaskForm
from mhacli.errors import MhaError

MAX_TRIALS = 40
"""Calls in the search for a first way that works, before hints of errors are followed."""
_ROW_LAYOUTS: tuple[Axes, ...] = (
    ("batch", "row", "width"), ("row", "batch", "width"), ("row", "width"), ("batch", "head", "row", "width"),
    ("batch", "width", "row"),
)  # fmt: skip
_HEAD_LAYOUTS: tuple[Axes, ...] = (
    ("batch", "head", "row", "width"), ("batch", "row", "head", "width"), ("batch", "row", "width"), ("row", "width"),
    ("head", "row", "width"),
)  # fmt: skip
_PART = {"x": "queries", "query": "queries", "key": "keys", "value": "values", "kv": "keys", "context": "keys"}
_OPTIONAL_EXTRAS = ("rope", "positions", "offset")


@dataclass(frozen=True)
class Call:
    """What is known of a call before any experiment."""

    built: Built
    signature: Signature
    known: Known
    fixed: Mapping[str, Any]
    causal: bool
    seed: int

    @property
    def has_weights(self) -> bool:
        """Whether it projects: by parameters of its own, or by weights that are passed."""
        module = self.built.module
        held: list[Any] = list(getattr(self.built.call, "__dict__", {}).values())
        own = [*held, *([] if module is None else module.parameters())]
        matrices = any(isinstance(part, Tensor) and (nn.parameter.is_lazy(part) or part.ndim in (2, 3)) for part in own)
        modules = module is None and any(isinstance(part, nn.Module) for part in held)
        return matrices or modules or bool(self.free(*self.signature.of_role("weight")))

    def free(self, *parameters: Parameter) -> tuple[Parameter, ...]:
        """Those that the user did not give a value for."""
        return tuple(parameter for parameter in parameters if parameter.name not in self.fixed)

    @property
    def n_heads(self) -> int:
        """How many heads it is asked with, where it says or asks."""
        named = [self.fixed[p.name] for p in self.signature.of_role("heads") if isinstance(self.fixed.get(p.name), int)]
        defaults = [p.default for p in self.signature.of_role("heads") if isinstance(p.default, int)]
        return int([*named, *([self.known.n_heads] if self.known.n_heads else []), *defaults, FREE_HEADS][0])


def found_trial(call: Call, lab: Laboratory) -> Trial | None:
    """A trial that works, with the places of its output and pattern; None where none does: the laboratory has the failures."""
    refuse_unknown(call)
    arities = _arities(call)
    three = len(arities[0]) == 3 and {slot.part for slot in arities[0]} == {"queries", "keys", "values"}
    may_be_cut = three and not call.has_weights
    cuts_itself = bool(call.free(*call.signature.of_role("heads"))) and "head" not in (_stated(call) or ())
    trial = _of_heads(call, lab, arities[0]) if may_be_cut and not cuts_itself else None
    if trial is not None:
        return trial
    trial = _of_rows(call, lab, arities, Hints())
    if trial is None and may_be_cut and cuts_itself:
        return _of_heads(call, lab, arities[0])
    if trial is None:
        errors = list(dict.fromkeys(failure.fault for failure in lab.failures))
        hints = Hints(tuple(widths_told(errors)), tuple(lengths_told(errors)))
        trial = _of_rows(call, lab, arities, hints) if hints != Hints() else None
    return None if trial is None else _settled(call, lab, trial)


@dataclass(frozen=True)
class Hints:
    """Widths and lengths that errors told."""

    widths: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


def refuse_unknown(call: Call) -> None:
    """Raises MhaError for required parameters whose meaning nobody knows, and for a given one that there is none of."""
    names = [parameter.name for parameter in call.signature.parameters]
    for name in call.fixed:
        if name not in names and not call.signature.takes_any and call.signature.known:
            raise MhaError(
                f"--call-arg must name a parameter of {call.built.name}, got {name}",
                hint=f"it has {', '.join(names) or 'none'}", code="cannot-examine", path=call.built.file,
            )  # fmt: skip
    free = call.free(*call.signature.parameters)
    unknown = [parameter.name for parameter in free if parameter.required and parameter.role == "unknown"]
    if unknown:
        subject, it = ("parameter", "it") if len(unknown) == 1 else ("parameters", "them")
        raise MhaError(
            f"{subject} {' and '.join(unknown)} of {call.built.name} must be given, "
            "got nothing and no usual name to guess from",
            hint=f"give {it} with {' '.join(f'--call-arg {name}=VALUE' for name in unknown)}",
            code="cannot-examine", path=call.built.file,
        )  # fmt: skip


def _arities(call: Call) -> list[tuple[Slot, ...]]:
    """The choices of what rows to pass, the likeliest first."""
    rows = call.free(*call.signature.of_role("x", "query", "key", "value", "kv", "context"))
    if not rows:
        if any(parameter.role == "rest" for parameter in call.signature.parameters):
            parts = (("queries",), ("queries", "keys", "values"), ("queries", "keys"))
            return [tuple(Slot(f"args[{n}]", part, True, True) for n, part in enumerate(some)) for some in parts]  # type: ignore[arg-type]
        raise MhaError(
            f"{call.built.name} must take rows as a parameter, such as x, or query, key and value, got none",
            hint="name a class or function that attends", code="cannot-examine", path=call.built.file,
        )  # fmt: skip
    if any(parameter.role == "query" for parameter in rows) and any(parameter.role == "key" for parameter in rows):
        rows = tuple(parameter for parameter in rows if parameter.role != "context" or parameter.required)
    slots = [_slot(parameter) for parameter in rows]
    own = [slot for slot in slots if slot.part == "queries" or slot.required]
    found = [tuple(slots), tuple(own)] if len(own) < len(slots) else [tuple(slots)]
    if len(slots) == 2 and all(slot.required for slot in slots) and all(p.role in ("x", "context") for p in rows):
        found.append((slots[0]._replace(part=slots[1].part), slots[1]._replace(part=slots[0].part)))
    return found


def _slot(parameter: Parameter) -> Slot:
    part = _PART[parameter.role]
    return Slot(parameter.name, part, parameter.required, parameter.by_place)  # type: ignore[arg-type]


def _extras(
    call: Call, slots: Iterable[Slot], width: int, variant: int, *, optional: bool, is_function: bool
) -> tuple[Recipe, ...]:
    """How the arguments are made that are neither rows nor masks: those that are required, and with `optional` positions too."""
    taken = {slot.parameter for slot in slots}
    n_heads = call.n_heads
    d_head = width if is_function else call.known.d_head or max(1, width // n_heads)
    d_model = n_heads * width if is_function else width
    found = []
    for parameter in call.free(*call.signature.parameters):
        wanted = parameter.required or parameter.role == "training" or (optional and parameter.role in _OPTIONAL_EXTRAS)
        if wanted and parameter.name not in taken and parameter.role not in (*MASKS, "rest"):
            recipe = recipe_for(
                parameter, n_heads=n_heads, d_head=d_head, d_model=d_model, causal=call.causal, variant=variant
            )  # fmt: skip
            found += [recipe] if recipe is not None else []
    return tuple(found)


def _variants(call: Call) -> list[tuple[float, tuple[int, bool]]]:
    """Which shapes of extra arguments to try, `(cost, (variant, with optional ones))`."""
    parameters = call.free(*call.signature.parameters)
    shaped = [
        p for p in parameters if p.required and p.role in ("rope", "positions", "offset", "weight", "weight bias")
    ]
    optional = [p for p in parameters if not p.required and p.role in _OPTIONAL_EXTRAS]
    found = [(1.5 * n, (n, False)) for n in range(N_VARIANTS if shaped else 1)]
    return [*found, *((3 + 1.5 * n, (n, True)) for n in range(N_VARIANTS if optional else 0))]


def _idles(call: Call, *, batched: bool) -> list[tuple[float, tuple[tuple[str, MaskForm | None], ...]]]:
    """What is given for masks that are required, `(cost, (name, form) of each)`: all of them advance together, or one alone."""
    required = [parameter for parameter in call.free(*call.signature.of_role(*MASKS)) if parameter.required]
    forms = {parameter.name: required_forms(parameter, batched=batched) for parameter in required}
    if not required:
        return [(0.0, ())]
    most = max(len(some) for some in forms.values())
    together = [tuple((name, some[min(n, len(some) - 1)]) for name, some in forms.items()) for n in range(most)]
    alone = [
        tuple((other, form if other == name else None) for other in forms)
        for name, some in forms.items() if len(forms) > 1 for form in some[1:5]
    ]  # fmt: skip
    return [(float(n), idle) for n, idle in enumerate(dict.fromkeys([*together, *alone]))]


def _trials(
    call: Call,
    arities: list[tuple[Slot, ...]],
    layouts: list[tuple[float, Axes]],
    widths: list[int],
    lengths: list[Lengths],
    *,
    is_function: bool,
) -> Iterator[Trial]:
    """Every candidate, the likeliest first. Those of one sequence at a time have masks of their own, which come with them."""
    numbered = [(_cost_of(slots, arities[0]), slots) for slots in arities]
    sized = [(4.0 + 0.5 * n if n else 0.0, some) for n, some in enumerate(lengths)]
    wide = [(4.0 * n, width) for n, width in enumerate(widths)]
    masks = [(cost, n) for n, (cost, _) in enumerate(_idles(call, batched=True))]
    single = _idles(call, batched=False)
    whole = _idles(call, batched=True)
    for slots, axes, width, some, (variant, optional), n in cheapest(
        numbered, layouts, wide, sized, _variants(call), masks
    ):
        idles = whole if "batch" in axes else single
        keys = any(slot.part != "queries" for slot in slots)
        if n >= len(idles) or (some.q_len != some.k_len and not keys):
            continue
        tensors = _weights(call, width, variant)
        extras = _extras(call, slots, width, variant, optional=optional, is_function=is_function)
        n_heads = call.n_heads if is_function and "head" in axes else 1
        way = Way(slots, axes, is_function, extras, idles[n][1], n_heads=n_heads, fixed=call.fixed)
        for context in _context_widths(call, width, keys=keys, is_function=is_function):
            yield Trial(way, some, width, context, tensors)


def _cost_of(slots: tuple[Slot, ...], first: tuple[Slot, ...]) -> float:
    """The likeliest choice of rows costs nothing; the same parameters the other way round less than other sizes."""
    if slots == first:
        return 0.0
    return 2.0 if len(slots) == len(first) else 5.0


def _context_widths(call: Call, width: int, *, keys: bool, is_function: bool) -> list[int]:
    if not keys or is_function or not call.known.context_widths:
        return [width]
    return list(dict.fromkeys([call.known.context_widths[0], width]))


def _weights(call: Call, width: int, variant: int) -> dict[str, Tensor]:
    wanted = call.free(*call.signature.of_role("weight", "weight bias"))
    wanted = tuple(parameter for parameter in wanted if parameter.required)
    return weights_for(wanted, n_heads=call.n_heads, d_model=width, variant=variant, seed=call.seed) if wanted else {}


def _stated(call: Call) -> Axes | None:
    """The axes of rows that the author states, with words of rows."""
    names = [parameter.name for parameter in call.signature.of_role("x", "query", "key")]
    return stated_axes(source_of(called_function(call.built.call)), call.built.documentation, names)


def _layouts(call: Call, choices: tuple[Axes, ...]) -> list[tuple[float, Axes]]:
    """The orders of axes with their costs: one that is stated comes first."""
    stated = _stated(call)
    first = stated if stated in choices and (choices != _ROW_LAYOUTS or "head" not in (stated or ())) else None
    if first is None and choices == _ROW_LAYOUTS and getattr(call.built.module, "batch_first", None) is False:
        first = ("row", "batch", "width")
    ordered = [first, *(axes for axes in choices if axes != first)] if first else list(choices)
    return [(0.0 if n == 0 else 6.5 + n, axes) for n, axes in enumerate(ordered)]


def _of_heads(call: Call, lab: Laboratory, slots: tuple[Slot, ...]) -> Trial | None:
    """Queries, keys and values that come cut into heads: the order of axes that is stated, or else the one in which one key
    moves its own head alone and equal values come out as they are. One sequence of one head is asked only where nothing else is
    accepted: a softmax over axis 1 runs over the keys there by chance."""
    layouts = [axes for _, axes in _layouts(call, _HEAD_LAYOUTS)]
    cuts_itself = (call.known.n_heads or 1) > 1
    if cuts_itself:
        layouts = [axes for axes in layouts if "head" in axes and "batch" in axes]
    widths = [call.known.d_head, *(call.known.widths[:1] if not cuts_itself else ()), FREE_HEAD_WIDTH]
    stated = _stated(call)
    groups = (
        [axes for axes in layouts if axes == stated],
        [axes for axes in layouts if len(axes) > 2],
        [axes for axes in layouts if len(axes) == 2],
    )
    for group in groups:
        best: tuple[tuple[int, bool], Trial] | None = None
        for axes in group:
            trial = _in_layout(call, lab, slots, axes, widths)
            if trial is None:
                continue
            score = goodness(lab, trial)
            if axes == stated and (score or not cuts_itself):
                return trial
            if score == 2:
                fuller = None if best is None else best[1].way.axes
                return replace(trial, fails_with=fuller if len(fuller or ()) > len(axes) else None)
            rank = (score, trial.lengths.q_len != trial.lengths.k_len)
            if (score or not cuts_itself) and (best is None or rank > best[0]):
                best = (rank, trial)
        if best is not None:
            return best[1]
    return None


def _in_layout(
    call: Call, lab: Laboratory, slots: tuple[Slot, ...], axes: Axes, widths: list[int | None]
) -> Trial | None:
    """The first trial with rows in that order of axes that gives an output."""
    lengths = lengths_to_try(call.known, apart=True)[:2]
    wide = list(dict.fromkeys(width for width in widths if width))
    trials = _trials(call, [slots], [(0.0, axes)], wide, lengths, is_function=True)
    return _first(lab, trials, 6 if not _has_required_mask(call) else 24)


def _has_required_mask(call: Call) -> bool:
    return any(parameter.required for parameter in call.free(*call.signature.of_role(*MASKS)))


def _of_rows(call: Call, lab: Laboratory, arities: list[tuple[Slot, ...]], hints: Hints) -> Trial | None:
    widths = list(dict.fromkeys([*hints.widths, *call.known.widths])) or [_free_width(call)]
    apart = any(len(slots) > 1 for slots in arities)
    lengths = lengths_to_try(call.known, apart=apart, hinted=hints.lengths)
    trials = _trials(call, arities, _layouts(call, _ROW_LAYOUTS), widths[:4], lengths, is_function=False)
    return _first(lab, trials, MAX_TRIALS if hints == Hints() else MAX_TRIALS // 2)


def _free_width(call: Call) -> int:
    return call.n_heads * FREE_HEAD_WIDTH if call.known.n_heads or call.n_heads != FREE_HEADS else FREE_WIDTH


def _first(lab: Laboratory, trials: Iterable[Trial], most: int) -> Trial | None:
    """The first trial that gives an output; slow ones are given up earlier."""
    for n, trial in enumerate(trials):
        if n >= most or (lab.is_slow and n >= 12):
            return None
        found = lab.located(trial)
        if found is not None:
            return found
    return None


def _settled(call: Call, lab: Laboratory, trial: Trial) -> Trial:
    """The trial, after what experiment tells of it: whether sequences come second, and whether a context has any influence."""
    batch_first: Axes = ("batch", "row", "width")
    if trial.way.axes == batch_first and _stated(call) != batch_first and not lab.is_slow and not is_apart(lab, trial):
        turned = replace(trial, way=replace(trial.way, axes=("row", "batch", "width")))
        found = lab.located(turned)
        if found is not None and is_apart(lab, found):
            trial = found
    optional = [slot for slot in trial.way.slots if slot.part != "queries" and not slot.required]
    if optional and not lab.is_slow and not context_matters(lab, trial):
        alone = without(trial, (slot for slot in trial.way.slots if slot not in optional))
        same = alone.lengths._replace(k_len=alone.lengths.q_len)
        trial = lab.located(replace(alone, lengths=same)) or trial
    return trial
