"""The search for a way to call a user's attention: candidates, the cheapest first, tried until one gives an output."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.asker import InputDrawer, copied, map_rows, seeded
from mhacli.adapters.usercode.call.convention import (
    MERGED,
    N_VARIANTS,
    PATTERN_AXES,
    ArgumentRecipe,
    AxisSizes,
    CallConvention,
    CallMasks,
    CallResult,
    CallSetting,
    RowArgument,
    call_with,
    leaves,
    output_in,
    pattern_in,
    read_answer,
    recipe_for,
    weights_for,
)
from mhacli.adapters.usercode.call.signature import (
    FREE_HEAD_WIDTH,
    FREE_HEADS,
    FREE_WIDTH,
    MASKS,
    AxisNames,
    CallParameter,
    KnownSizes,
    Signature,
    TrialLengths,
    called_function,
    lengths_in_errors,
    lengths_to_try,
    source_of,
    stated_axes,
    widths_in_errors,
)
from mhacli.adapters.usercode.process import SourceLine, exception_text, source_line_of
from mhacli.adapters.usercode.types import AttentionOutput, Built, Inputs, InputSizes, MaskForm, MaskKind
from mhacli.errors import MhaError

MAX_TRIALS = 40
"""Calls in the search for a first way that works, before hints of errors are followed."""
_ROW_LAYOUTS: tuple[AxisNames, ...] = (
    ("batch", "row", "width"), ("row", "batch", "width"), ("row", "width"), ("batch", "head", "row", "width"),
    ("batch", "width", "row"),
)  # fmt: skip
_HEAD_LAYOUTS: tuple[AxisNames, ...] = (
    ("batch", "head", "row", "width"), ("batch", "row", "head", "width"), ("batch", "row", "width"), ("row", "width"),
    ("head", "row", "width"),
)  # fmt: skip
_PART = {"x": "queries", "query": "queries", "key": "keys", "value": "values", "kv": "keys", "context": "keys"}
_OPTIONAL_EXTRAS = ("rope", "positions", "offset")


@dataclass(frozen=True)
class CallFacts:
    """The facts about a call that need no experiment."""

    built: Built
    signature: Signature
    known: KnownSizes
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

    def free(self, *parameters: CallParameter) -> tuple[CallParameter, ...]:
        """The parameters for which the user gave no value."""
        return tuple(parameter for parameter in parameters if parameter.name not in self.fixed)

    @property
    def n_heads(self) -> int:
        """The number of heads: given, known from the module, a default, or a free choice."""
        named = [self.fixed[p.name] for p in self.signature.of_role("heads") if isinstance(self.fixed.get(p.name), int)]
        defaults = [p.default for p in self.signature.of_role("heads") if isinstance(p.default, int)]
        return int([*named, *([self.known.n_heads] if self.known.n_heads else []), *defaults, FREE_HEADS][0])


def find_trial(call: CallFacts, runner: TrialRunner) -> Trial | None:
    """A trial that works, with the places of its output and pattern; None where none does: the runner has the failures."""
    arities = _arities(call)
    three = len(arities[0]) == 3 and {slot.part for slot in arities[0]} == {"queries", "keys", "values"}
    may_be_cut = three and not call.has_weights
    cuts_itself = bool(call.free(*call.signature.of_role("heads"))) and "head" not in (stated_rows(call) or ())
    trial = _of_heads(call, runner, arities[0]) if may_be_cut and not cuts_itself else None
    if trial is not None:
        return trial
    trial = _of_rows(call, runner, arities, ErrorHints())
    if trial is None and may_be_cut and cuts_itself:
        return _of_heads(call, runner, arities[0])
    if trial is None:
        errors = list(dict.fromkeys(failure.fault for failure in runner.failures))
        hints = ErrorHints(tuple(widths_in_errors(errors)), tuple(lengths_in_errors(errors)))
        trial = _of_rows(call, runner, arities, hints) if hints != ErrorHints() else None
    return trial


@dataclass(frozen=True)
class ErrorHints:
    """Widths and lengths that errors name."""

    widths: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


def _arities(call: CallFacts) -> list[tuple[RowArgument, ...]]:
    """Which rows may be passed in which arguments, the likeliest first."""
    rows = call.free(*call.signature.of_role("x", "query", "key", "value", "kv", "context"))
    if not rows:
        if any(parameter.role == "rest" for parameter in call.signature.parameters):
            parts = (("queries",), ("queries", "keys", "values"), ("queries", "keys"))
            return [tuple(RowArgument(f"args[{n}]", part, True, True) for n, part in enumerate(some)) for some in parts]  # type: ignore[arg-type]
        raise MhaError(
            f"{call.built.name} has no parameter for token vectors, such as x, or query, key and value",
            hint="name a class or function that computes attention", code="cannot-examine", path=call.built.file,
        )  # fmt: skip
    if any(parameter.role == "query" for parameter in rows) and any(parameter.role == "key" for parameter in rows):
        rows = tuple(parameter for parameter in rows if parameter.role != "context" or parameter.required)
    slots = [_slot(parameter) for parameter in rows]
    own = [slot for slot in slots if slot.part == "queries" or slot.required]
    found = [tuple(slots), tuple(own)] if len(own) < len(slots) else [tuple(slots)]
    if len(slots) == 2 and all(slot.required for slot in slots) and all(p.role in ("x", "context") for p in rows):
        found.append((slots[0]._replace(part=slots[1].part), slots[1]._replace(part=slots[0].part)))
    return found


def _slot(parameter: CallParameter) -> RowArgument:
    part = _PART[parameter.role]
    return RowArgument(parameter.name, part, parameter.required, parameter.by_place)  # type: ignore[arg-type]


def _extras(
    call: CallFacts, slots: Iterable[RowArgument], width: int, variant: int, *, optional: bool, is_function: bool
) -> tuple[ArgumentRecipe, ...]:
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


def _variants(call: CallFacts) -> list[tuple[float, tuple[int, bool]]]:
    """Which shapes of extra arguments to try, `(cost, (variant, with optional ones))`."""
    parameters = call.free(*call.signature.parameters)
    shaped = [
        p for p in parameters if p.required and p.role in ("rope", "positions", "offset", "weight", "weight bias")
    ]
    optional = [p for p in parameters if not p.required and p.role in _OPTIONAL_EXTRAS]
    found = [(1.5 * n, (n, False)) for n in range(N_VARIANTS if shaped else 1)]
    return [*found, *((3 + 1.5 * n, (n, True)) for n in range(N_VARIANTS if optional else 0))]


def _idles(call: CallFacts, *, batched: bool) -> list[tuple[float, tuple[tuple[str, MaskForm | None], ...]]]:
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
    call: CallFacts,
    arities: list[tuple[RowArgument, ...]],
    layouts: list[tuple[float, AxisNames]],
    widths: list[int],
    lengths: list[TrialLengths],
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
        convention = CallConvention(slots, axes, is_function, extras, idles[n][1], n_heads=n_heads, fixed=call.fixed)
        for context in _context_widths(call, width, keys=keys, is_function=is_function):
            yield Trial(convention, some, width, context, tensors)


def _cost_of(slots: tuple[RowArgument, ...], first: tuple[RowArgument, ...]) -> float:
    """The likeliest choice of rows costs nothing; the same parameters the other way round less than other sizes."""
    if slots == first:
        return 0.0
    return 2.0 if len(slots) == len(first) else 5.0


def _context_widths(call: CallFacts, width: int, *, keys: bool, is_function: bool) -> list[int]:
    if not keys or is_function or not call.known.context_widths:
        return [width]
    return list(dict.fromkeys([call.known.context_widths[0], width]))


def _weights(call: CallFacts, width: int, variant: int) -> dict[str, Tensor]:
    wanted = call.free(*call.signature.of_role("weight", "weight bias"))
    wanted = tuple(parameter for parameter in wanted if parameter.required)
    return weights_for(wanted, n_heads=call.n_heads, d_model=width, variant=variant, seed=call.seed) if wanted else {}


def stated_rows(call: CallFacts) -> AxisNames | None:
    """The axes of rows that the author states, with words of rows."""
    names = [parameter.name for parameter in call.signature.of_role("x", "query", "key")]
    return stated_axes(source_of(called_function(call.built.call)), call.built.documentation, names)


def _layouts(call: CallFacts, choices: tuple[AxisNames, ...]) -> list[tuple[float, AxisNames]]:
    """The orders of axes with their costs: one that is stated comes first."""
    stated = stated_rows(call)
    first = stated if stated in choices and (choices != _ROW_LAYOUTS or "head" not in (stated or ())) else None
    if first is None and choices == _ROW_LAYOUTS and getattr(call.built.module, "batch_first", None) is False:
        first = ("row", "batch", "width")
    ordered = [first, *(axes for axes in choices if axes != first)] if first else list(choices)
    return [(0.0 if n == 0 else 6.5 + n, axes) for n, axes in enumerate(ordered)]


def _of_heads(call: CallFacts, runner: TrialRunner, slots: tuple[RowArgument, ...]) -> Trial | None:
    """Queries, keys and values that come split into heads: the order of axes that is stated, or else the one in which one key
    moves its own head alone and equal values come out as they are. One sequence of one head is asked only where nothing else is
    accepted: a softmax over axis 1 runs over the keys there by chance."""
    layouts = [axes for _, axes in _layouts(call, _HEAD_LAYOUTS)]
    cuts_itself = (call.known.n_heads or 1) > 1
    if cuts_itself:
        layouts = [axes for axes in layouts if "head" in axes and "batch" in axes]
    widths = [call.known.d_head, *(call.known.widths[:1] if not cuts_itself else ()), FREE_HEAD_WIDTH]
    stated = stated_rows(call)
    groups = (
        [axes for axes in layouts if axes == stated],
        [axes for axes in layouts if len(axes) > 2],
        [axes for axes in layouts if len(axes) == 2],
    )
    for group in groups:
        best: tuple[tuple[int, bool], Trial] | None = None
        for axes in group:
            trial = _in_layout(call, runner, slots, axes, widths)
            if trial is None:
                continue
            score = layout_score(runner, trial)
            if axes == stated and (score or not cuts_itself):
                return trial
            if score == 2:
                fuller = None if best is None else best[1].convention.axes
                return replace(trial, fails_with=fuller if len(fuller or ()) > len(axes) else None)
            rank = (score, trial.lengths.q_len != trial.lengths.k_len)
            if (score or not cuts_itself) and (best is None or rank > best[0]):
                best = (rank, trial)
        if best is not None:
            return best[1]
    return None


def _in_layout(
    call: CallFacts, runner: TrialRunner, slots: tuple[RowArgument, ...], axes: AxisNames, widths: list[int | None]
) -> Trial | None:
    """The first trial with rows in that order of axes that gives an output."""
    lengths = lengths_to_try(call.known, separate_keys=True)[:2]
    wide = list(dict.fromkeys(width for width in widths if width))
    trials = _trials(call, [slots], [(0.0, axes)], wide, lengths, is_function=True)
    return _first(runner, trials, 6 if not _has_required_mask(call) else 24)


def _has_required_mask(call: CallFacts) -> bool:
    return any(parameter.required for parameter in call.free(*call.signature.of_role(*MASKS)))


def _of_rows(
    call: CallFacts, runner: TrialRunner, arities: list[tuple[RowArgument, ...]], hints: ErrorHints
) -> Trial | None:
    widths = list(dict.fromkeys([*hints.widths, *call.known.widths])) or [_free_width(call)]
    separate_keys = any(len(slots) > 1 for slots in arities)
    lengths = lengths_to_try(call.known, separate_keys=separate_keys, hinted=hints.lengths)
    trials = _trials(call, arities, _layouts(call, _ROW_LAYOUTS), widths[:4], lengths, is_function=False)
    return _first(runner, trials, MAX_TRIALS if hints == ErrorHints() else MAX_TRIALS // 2)


def _free_width(call: CallFacts) -> int:
    return call.n_heads * FREE_HEAD_WIDTH if call.known.n_heads or call.n_heads != FREE_HEADS else FREE_WIDTH


def _first(runner: TrialRunner, trials: Iterable[Trial], most: int) -> Trial | None:
    """The first trial that gives an output; slow ones are given up earlier."""
    for n, trial in enumerate(trials):
        if n >= most or (runner.is_slow and n >= 12):
            return None
        found = runner.with_output(trial)
        if found is not None:
            return found
    return None


# ------------------------------------------------------------------------------------------------------- required masks


LENGTHS: AxisNames = ("batch",)


def required_forms(parameter: CallParameter, *, batched: bool) -> tuple[MaskForm | None, ...]:
    """What is tried for a mask that is required while its form is unknown: nothing at all, then masks that allow everything."""
    name = parameter.name
    wide: list[tuple[AxisNames, MaskKind]] = [
        (PATTERN_AXES, "bool"), (("query", "key"), "bool"), (PATTERN_AXES, "additive"), (("batch", "query", "key"), "bool"),
        (("query", "key"), "additive"), (("batch", "key"), "bool"), (("batch", "query", "key"), "additive"),
        (("batch", "key"), "additive"), (PATTERN_AXES, "whole"), (("batch", "key"), "whole"), (("query", "key"), "whole"),
    ]  # fmt: skip
    narrow: list[tuple[AxisNames, MaskKind]] = [
        (("batch", "key"), "bool"), (("batch", "key"), "01"), (PATTERN_AXES, "bool"), (PATTERN_AXES, "additive"),
        (("batch", "query", "key"), "bool"), (("batch", "key"), "whole"), (LENGTHS, "lengths"),
    ]  # fmt: skip
    chosen = wide if parameter.role in ("mask", "bias") else narrow
    if parameter.role == "lengths":
        chosen = [(LENGTHS, "lengths"), *narrow[:2]]
    if not batched:
        chosen = [(("query", "key"), "bool"), (("query", "key"), "additive"), (("key",), "bool"), (("key",), "01")]
    kinds_of_bias = ("additive",)
    chosen = [pair for pair in chosen if parameter.role != "bias" or pair[1] in kinds_of_bias]
    return (None, *(MaskForm(name, axes, kind) for axes, kind in chosen))


# --------------------------------------------------------------------------------------------------------------- trials


SLOW_S = 0.5
"""Calls that take longer are repeated only where nothing can be guessed."""
MAX_CALLS = 90
_SMALL = 0.3
"""The size of random rows: small enough for a softmax without a scale to see more than one key."""
_MAX_COPIED = 4_000_000
"""Numbers in a module up to which each experiment has a copy of its own: what a call leaves behind does not reach the next."""


class FailedTrial(NamedTuple):
    """A failed trial: how it was called, the exception, and the line of the author's."""

    described: str
    message: str
    at: SourceLine | None = None

    @property
    def fault(self) -> str:
        """The exception with its line."""
        return self.message + (f" (line {self.at.line}: {self.at.source})" if self.at else "")


@dataclass(frozen=True)
class Trial:
    """A convention with the sizes to try it with, and the weights that it is given by name. `fails_with` are axes of rows, more
    than those of the convention, that it accepts too, and with which it is no attention."""

    convention: CallConvention
    lengths: TrialLengths
    d_in: int
    d_context: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    fails_with: AxisNames | None = None

    @property
    def sizes(self) -> InputSizes:
        """The sizes of its calls."""
        return InputSizes(*self.lengths, self.d_in, self.d_context)

    @property
    def axis_sizes(self) -> AxisSizes:
        """The sizes of one call, with its heads."""
        return AxisSizes(self.lengths.batch, self.convention.n_heads, self.lengths.q_len, self.lengths.k_len)

    def changed(self, **fields: Any) -> Trial:
        """The same with other fields of its convention."""
        return replace(self, convention=replace(self.convention, **fields))

    def with_values(self, values: Mapping[str, object]) -> Trial:
        """The same with these values for arguments that are neither rows nor masks."""
        others = tuple(recipe for recipe in self.convention.extras if recipe.parameter not in values)
        return self.changed(
            extras=(*others, *(ArgumentRecipe(name, "literal", value) for name, value in values.items()))
        )

    @property
    def takes_keys(self) -> bool:
        """Whether keys are given to it at all."""
        return any(slot.part != "queries" for slot in self.convention.slots)


class TrialRunner:
    """Runs trials: counts the calls, keeps the failures, and knows the time of the fastest call."""

    def __init__(self, built: Built, device: torch.device, seed: int) -> None:
        self.built, self.device, self.seed = built, device, seed
        self.dtype = native_dtype(built.module)
        self.n_calls, self.fastest_s = 0, 0.0
        self.failures: list[FailedTrial] = []
        self._copies = _is_small(built.module) and not is_lazy(built.module)

    @property
    def is_slow(self) -> bool:
        """Whether the calls are so slow that only few can be made."""
        return self.fastest_s > SLOW_S or self.n_calls >= MAX_CALLS

    def rows(self, trial: Trial) -> Inputs:
        """Random rows for a trial, the same in each call."""
        n_heads = trial.convention.n_heads if trial.convention.is_function else None
        values = any(slot.part == "values" for slot in trial.convention.slots)
        draw = InputDrawer(trial.sizes, seed=self.seed, n_heads=n_heads, separate_values=values)
        inputs = draw.inputs(with_context=True) if trial.takes_keys else Inputs(draw.rows(trial.lengths.q_len))
        return map_rows(inputs, lambda rows: _SMALL * rows)

    def setting(self, trial: Trial, dtype: torch.dtype | None = None, training: bool = False) -> CallSetting:
        """What the arguments of a trial's calls are made for."""
        dtype = dtype or self.dtype
        tensors = {name: tensor.to(self.device, dtype) for name, tensor in trial.tensors.items()}
        return CallSetting(trial.axis_sizes, dtype, self.device, training, tensors)

    def ask(self, trial: Trial, inputs: Inputs, forms: CallMasks = CallMasks()) -> CallResult | None:  # noqa: B008
        """What one call returns, None where it raises."""
        self.n_calls += 1
        call = copied(self.built.call) if self._copies else self.built.call
        began = time.perf_counter()
        call_result: CallResult | None
        try:
            with seeded(self.seed, self.device):
                call_result = call_with(call, trial.convention, inputs, self.setting(trial), forms)
        except (Exception, SystemExit) as fault:
            self._failed(trial, fault)
            call_result = None
        taken = time.perf_counter() - began
        self.fastest_s = min(taken, self.fastest_s or taken)
        return call_result

    def answer(self, trial: Trial, inputs: Inputs, forms: CallMasks = CallMasks()) -> AttentionOutput | None:  # noqa: B008
        """The output of one call in our order of axes, in float64, None where there is none of the right shape."""
        call_result = self.ask(trial, inputs, forms)
        if call_result is None or not all(
            _has_output(result, trial.convention, call_result) for result in call_result.results
        ):
            return None
        answer = read_answer(call_result, trial.convention)
        return AttentionOutput(
            answer.out.double().cpu(), None if answer.pattern is None else answer.pattern.double().cpu()
        )

    def with_output(self, trial: Trial) -> Trial | None:
        """The trial with the places of output and pattern in what it returns, None where it raises or returns no output."""
        call_result = self.ask(trial, self.rows(trial))
        if call_result is None:
            return None
        convention, first = trial.convention, call_result.results[0]
        output = output_in(first, _axes_of_output(convention), call_result.sides)
        if output is None:
            self.failures.append(FailedTrial(describe_trial(trial), _misfit(first, convention, call_result)))
            return None
        pattern = pattern_in(first, output.path, call_result.sides, batched=convention.batched)
        return trial.changed(output=output, pattern=pattern)

    def _failed(self, trial: Trial, fault: BaseException) -> None:
        line = source_line_of(fault, self.built.file)
        self.failures.append(FailedTrial(describe_trial(trial), exception_text(fault), line))


def native_dtype(module: nn.Module | None) -> torch.dtype:
    """The dtype of a module's parameters, the default one where it has none."""
    found = [] if module is None else [p.dtype for p in module.parameters() if p.is_floating_point()]
    return found[0] if found else torch.get_default_dtype()


def is_lazy(module: nn.Module | None) -> bool:
    """Whether parameters get their shape by the first call only."""
    return module is not None and any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())


def _is_small(module: nn.Module | None) -> bool:
    if module is None or is_lazy(module):
        return True
    return sum(tensor.numel() for tensor in itertools.chain(module.parameters(), module.buffers())) <= _MAX_COPIED


def _axes_of_output(convention: CallConvention) -> list[AxisNames]:
    """The axes that an output may have: those of the rows; of heads cut already also their other order, or side by side."""
    if convention.is_function and "head" in convention.axes and convention.batched:
        others: list[AxisNames] = [
            ("batch", "head", "row", "width"),
            ("batch", "row", "head", "width"),
            ("batch", "row", MERGED),
        ]
        return [convention.axes, *(axes for axes in others if axes != convention.axes)]
    return [convention.axes]


def _has_output(result: Any, convention: CallConvention, call_result: CallResult) -> bool:
    found = output_in(result, [convention.output.axes], call_result.sides)
    return found is not None


def _misfit(result: Any, convention: CallConvention, call_result: CallResult) -> str:
    shapes = [str(list(tensor.shape)) for _, tensor in leaves(result) if tensor.is_floating_point()]
    wanted = ", ".join("·" if (size := call_result.sides.of(axis)) is None else str(size) for axis in convention.axes)
    return f"returned {', '.join(shapes[:4]) or type(result).__name__}, where [{wanted}] was to come"


def describe_trial(trial: Trial) -> str:
    """The trial as a call, with the shapes of its rows as they were passed."""
    sizes = {"batch": trial.lengths.batch, "head": trial.convention.n_heads if trial.convention.is_function else 1}
    shown = []
    for slot in trial.convention.slots:
        own = slot.part == "queries"
        length, width = (trial.lengths.q_len, trial.d_in) if own else (trial.lengths.k_len, trial.d_context)
        shape = [sizes.get(axis, length if axis == "row" else width) for axis in trial.convention.axes]
        shown.append(f"{slot.parameter} {shape}")
    masks = [f"{name} {form.kind} [{', '.join(form.axes)}]" for name, form in trial.convention.idle if form is not None]
    return ", ".join([*shown, *masks])


def cheapest(*options: Iterable[tuple[float, Any]]) -> Iterator[tuple[Any, ...]]:
    """Every combination of one of each of the options, `(cost, option)`, in the order of the sum of the costs."""
    lists = [list(option) for option in options]
    scored = [
        (sum(cost for cost, _ in combination), n, combination)
        for n, combination in enumerate(itertools.product(*lists))
    ]
    heapq.heapify(scored)
    while scored:
        _, _, combination = heapq.heappop(scored)
        yield tuple(option for _, option in combination)


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are the same but for rounding in float32; a NaN is the same as a NaN."""
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True))


def layout_score(runner: TrialRunner, trial: Trial) -> int:
    """Of queries, keys and values split into heads: whether one key moves several queries of its own head and nothing else, which
    the right axes make it do; and whether values that are all the same come out as they are, which any softmax over the keys
    does. 0, 1 or 2."""
    inputs = runner.rows(trial)
    assert inputs.keys is not None
    keys = inputs.keys.clone()
    keys[0, 0, 0] = keys[0, 0, 0].flip(-1) + 1.0
    before, after = runner.answer(trial, inputs), runner.answer(trial, inputs._replace(keys=keys))
    if before is None or after is None:
        return 0
    moved = ~torch.isclose(before.out, after.out, rtol=1e-4, atol=1e-6, equal_nan=True).all(-1)
    own = int(moved[0, 0].sum())
    if int(moved.sum()) != own or own < min(2, trial.lengths.q_len):
        return 0
    even = runner.answer(
        trial, inputs._replace(values=torch.ones_like(inputs.keys if inputs.values is None else inputs.values))
    )
    return 2 if even is not None and close(even.out, torch.ones_like(even.out)) else 1
