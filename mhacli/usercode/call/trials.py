"""Searches for a convention to call a user's attention: tries candidates, the cheapest first, until one gives an output."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.errors import MhaError
from mhacli.usercode.call.convention import (
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
    read_output,
    recipe_for,
    weights_for,
)
from mhacli.usercode.call.signature import (
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
from mhacli.usercode.inputs import InputDrawer, copied, map_rows, seeded
from mhacli.usercode.process import SourceLine, exception_text, source_line_of
from mhacli.usercode.types import AttentionOutput, Built, Inputs, InputSizes, MaskForm, MaskKind

MAX_TRIALS = 40
"""The most calls in the first search, before hints from errors are followed."""
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
    """The facts about a call that need no trial."""

    built: Built
    signature: Signature
    sizes: KnownSizes
    fixed: Mapping[str, Any]
    causal: bool
    seed: int

    @property
    def has_weights(self) -> bool:
        """Whether the target projects, with parameters of its own or with weights passed to it."""
        module = self.built.module
        attributes: list[Any] = list(getattr(self.built.call, "__dict__", {}).values())
        candidates = [*attributes, *([] if module is None else module.parameters())]
        matrices = any(
            isinstance(part, Tensor) and (nn.parameter.is_lazy(part) or part.ndim in (2, 3)) for part in candidates
        )
        modules = module is None and any(isinstance(part, nn.Module) for part in attributes)
        return matrices or modules or bool(self.free(*self.signature.of_role("weight")))

    def free(self, *parameters: CallParameter) -> tuple[CallParameter, ...]:
        """The parameters without a value from the user."""
        return tuple(parameter for parameter in parameters if parameter.name not in self.fixed)

    @property
    def n_heads(self) -> int:
        """The number of heads: given, known from the module, a default, or a free choice."""
        named = [self.fixed[p.name] for p in self.signature.of_role("heads") if isinstance(self.fixed.get(p.name), int)]
        defaults = [p.default for p in self.signature.of_role("heads") if isinstance(p.default, int)]
        return int([*named, *([self.sizes.n_heads] if self.sizes.n_heads else []), *defaults, FREE_HEADS][0])


def find_trial(call: CallFacts, runner: TrialRunner) -> Trial | None:
    """A trial that works, with the paths of output and pattern; None if there is none. The runner holds the failures."""
    arities = _input_slots(call)
    takes_qkv = len(arities[0]) == 3 and {slot.part for slot in arities[0]} == {"queries", "keys", "values"}
    may_take_heads = takes_qkv and not call.has_weights
    splits_heads = bool(call.free(*call.signature.of_role("heads"))) and "head" not in (stated_rows(call) or ())
    trial = _trial_with_heads(call, runner, arities[0]) if may_take_heads and not splits_heads else None
    if trial is not None:
        return trial
    trial = _trial_with_rows(call, runner, arities, ErrorHints())
    if trial is None and may_take_heads and splits_heads:
        return _trial_with_heads(call, runner, arities[0])
    if trial is None:
        errors = list(dict.fromkeys(failure.fault for failure in runner.failures))
        hints = ErrorHints(tuple(widths_in_errors(errors)), tuple(lengths_in_errors(errors)))
        trial = _trial_with_rows(call, runner, arities, hints) if hints != ErrorHints() else None
    return trial


@dataclass(frozen=True)
class ErrorHints:
    """Widths and lengths from error messages."""

    widths: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


def _input_slots(call: CallFacts) -> list[tuple[RowArgument, ...]]:
    """The candidate assignments of queries, keys and values to parameters, the likeliest first."""
    rows = call.free(*call.signature.of_role("x", "query", "key", "value", "kv", "context"))
    if not rows:
        if any(parameter.role == "rest" for parameter in call.signature.parameters):
            parts = (("queries",), ("queries", "keys", "values"), ("queries", "keys"))
            return [tuple(RowArgument(f"args[{n}]", part, True, True) for n, part in enumerate(row)) for row in parts]  # type: ignore[arg-type]
        raise MhaError(
            f"{call.built.name} has no parameter for token vectors, such as x, or query, key and value",
            hint="name a class or function that computes attention", code="cannot-examine", path=call.built.file,
        )  # fmt: skip
    if any(parameter.role == "query" for parameter in rows) and any(parameter.role == "key" for parameter in rows):
        rows = tuple(parameter for parameter in rows if parameter.role != "context" or parameter.required)
    slots = [_slot(parameter) for parameter in rows]
    needed = [slot for slot in slots if slot.part == "queries" or slot.required]
    choices = [tuple(slots), tuple(needed)] if len(needed) < len(slots) else [tuple(slots)]
    if len(slots) == 2 and all(slot.required for slot in slots) and all(p.role in ("x", "context") for p in rows):
        choices.append((slots[0]._replace(part=slots[1].part), slots[1]._replace(part=slots[0].part)))
    return choices


def _slot(parameter: CallParameter) -> RowArgument:
    part = _PART[parameter.role]
    return RowArgument(parameter.name, part, parameter.required, parameter.by_place)  # type: ignore[arg-type]


def _extras(
    call: CallFacts, slots: Iterable[RowArgument], width: int, variant: int, *, optional: bool, is_function: bool
) -> tuple[ArgumentRecipe, ...]:
    """Recipes for the arguments besides inputs and masks: the required ones, and optional positions with `optional`."""
    taken = {slot.parameter for slot in slots}
    n_heads = call.n_heads
    d_head = width if is_function else call.sizes.d_head or max(1, width // n_heads)
    d_model = n_heads * width if is_function else width
    recipes = []
    for parameter in call.free(*call.signature.parameters):
        is_wanted = (
            parameter.required or parameter.role == "training" or (optional and parameter.role in _OPTIONAL_EXTRAS)
        )
        if is_wanted and parameter.name not in taken and parameter.role not in (*MASKS, "rest"):
            recipe = recipe_for(
                parameter, n_heads=n_heads, d_head=d_head, d_model=d_model, causal=call.causal, variant=variant
            )  # fmt: skip
            recipes += [recipe] if recipe is not None else []
    return tuple(recipes)


def _variants(call: CallFacts) -> list[tuple[float, tuple[int, bool]]]:
    """The shape variants of extra arguments, as `(cost, (variant, with optional ones))`."""
    parameters = call.free(*call.signature.parameters)
    shaped = [
        p for p in parameters if p.required and p.role in ("rope", "positions", "offset", "weight", "weight bias")
    ]
    optional = [p for p in parameters if not p.required and p.role in _OPTIONAL_EXTRAS]
    required = [(1.5 * n, (n, False)) for n in range(N_VARIANTS if shaped else 1)]
    return [*required, *((3 + 1.5 * n, (n, True)) for n in range(N_VARIANTS if optional else 0))]


def _required_masks(call: CallFacts, *, batched: bool) -> list[tuple[float, tuple[tuple[str, MaskForm | None], ...]]]:
    """Values for the required masks, as `(cost, (name, form) of each)`: all masks take their next form together, or one mask
    alone."""
    required = [parameter for parameter in call.free(*call.signature.of_role(*MASKS)) if parameter.required]
    forms = {parameter.name: required_forms(parameter, batched=batched) for parameter in required}
    if not required:
        return [(0.0, ())]
    n_steps = max(len(candidates) for candidates in forms.values())
    together = [
        tuple((name, candidates[min(n, len(candidates) - 1)]) for name, candidates in forms.items())
        for n in range(n_steps)
    ]
    one_by_one = [
        tuple((other, form if other == name else None) for other in forms)
        for name, candidates in forms.items() if len(forms) > 1 for form in candidates[1:5]
    ]  # fmt: skip
    return [(float(n), choice) for n, choice in enumerate(dict.fromkeys([*together, *one_by_one]))]


def _trials(
    call: CallFacts,
    arities: list[tuple[RowArgument, ...]],
    layouts: list[tuple[float, AxisNames]],
    widths: list[int],
    lengths: list[TrialLengths],
    *,
    is_function: bool,
) -> Iterator[Trial]:
    """Every candidate, the likeliest first. Calls with one sequence have their own mask forms."""
    costed_slots = [(_cost_of(slots, arities[0]), slots) for slots in arities]
    costed_lengths = [(4.0 + 0.5 * n if n else 0.0, trial_lengths) for n, trial_lengths in enumerate(lengths)]
    costed_widths = [(4.0 * n, width) for n, width in enumerate(widths)]
    single_masks, batched_masks = _required_masks(call, batched=False), _required_masks(call, batched=True)
    costed_masks = [(cost, n) for n, (cost, _) in enumerate(batched_masks)]
    for slots, axes, width, trial_lengths, (variant, optional), mask_idx in cheapest(
        costed_slots, layouts, costed_widths, costed_lengths, _variants(call), costed_masks
    ):
        mask_choices = batched_masks if "batch" in axes else single_masks
        has_keys = any(slot.part != "queries" for slot in slots)
        if mask_idx >= len(mask_choices) or (trial_lengths.q_len != trial_lengths.k_len and not has_keys):
            continue
        tensors = _weights(call, width, variant)
        extras = _extras(call, slots, width, variant, optional=optional, is_function=is_function)
        n_heads = call.n_heads if is_function and "head" in axes else 1
        convention = CallConvention(
            slots, axes, is_function, extras, mask_choices[mask_idx][1], n_heads=n_heads, fixed=call.fixed
        )
        for context in _context_widths(call, width, keys=has_keys, is_function=is_function):
            yield Trial(convention, trial_lengths, width, context, tensors)


def _cost_of(slots: tuple[RowArgument, ...], first: tuple[RowArgument, ...]) -> float:
    """The cost of an assignment: none for the likeliest, less for swapped parameters than for others."""
    if slots == first:
        return 0.0
    return 2.0 if len(slots) == len(first) else 5.0


def _context_widths(call: CallFacts, width: int, *, keys: bool, is_function: bool) -> list[int]:
    if not keys or is_function or not call.sizes.context_widths:
        return [width]
    return list(dict.fromkeys([call.sizes.context_widths[0], width]))


def _weights(call: CallFacts, width: int, variant: int) -> dict[str, Tensor]:
    parameters = call.free(*call.signature.of_role("weight", "weight bias"))
    parameters = tuple(parameter for parameter in parameters if parameter.required)
    return weights_for(parameters, n_heads=call.n_heads, d_model=width, variant=variant, seed=call.seed)


def stated_rows(call: CallFacts) -> AxisNames | None:
    """The axes of the inputs that the user's code states."""
    names = [parameter.name for parameter in call.signature.of_role("x", "query", "key")]
    return stated_axes(source_of(called_function(call.built.call)), call.built.documentation, names)


def _layouts(call: CallFacts, choices: tuple[AxisNames, ...]) -> list[tuple[float, AxisNames]]:
    """The orders of axes with their costs; a stated order comes first."""
    stated = stated_rows(call)
    first = stated if stated in choices and (choices != _ROW_LAYOUTS or "head" not in (stated or ())) else None
    if first is None and choices == _ROW_LAYOUTS and getattr(call.built.module, "batch_first", None) is False:
        first = ("row", "batch", "width")
    ordered = [first, *(axes for axes in choices if axes != first)] if first else list(choices)
    return [(0.0 if n == 0 else 6.5 + n, axes) for n, axes in enumerate(ordered)]


def _trial_with_heads(call: CallFacts, runner: TrialRunner, slots: tuple[RowArgument, ...]) -> Trial | None:
    """A trial with q, k and v split into heads, in the stated order of axes, or in the order that passes `layout_score`. A
    single sequence of a single head comes last, because there a wrong softmax over axis 1 happens to run over the keys."""
    layouts = [axes for _, axes in _layouts(call, _HEAD_LAYOUTS)]
    splits_heads = (call.sizes.n_heads or 1) > 1
    if splits_heads:
        layouts = [axes for axes in layouts if "head" in axes and "batch" in axes]
    widths = [call.sizes.d_head, *(call.sizes.widths[:1] if not splits_heads else ()), FREE_HEAD_WIDTH]
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
            if axes == stated and (score or not splits_heads):
                return trial
            if score == 2:
                more_axes = None if best is None else best[1].convention.axes
                return replace(trial, fails_with=more_axes if len(more_axes or ()) > len(axes) else None)
            rank = (score, trial.lengths.q_len != trial.lengths.k_len)
            if (score or not splits_heads) and (best is None or rank > best[0]):
                best = (rank, trial)
        if best is not None:
            return best[1]
    return None


def _in_layout(
    call: CallFacts, runner: TrialRunner, slots: tuple[RowArgument, ...], axes: AxisNames, widths: list[int | None]
) -> Trial | None:
    """The first trial with this order of axes that gives an output."""
    lengths = lengths_to_try(call.sizes, separate_keys=True)[:2]
    known_widths = list(dict.fromkeys(width for width in widths if width))
    trials = _trials(call, [slots], [(0.0, axes)], known_widths, lengths, is_function=True)
    return _first(runner, trials, 6 if not _has_required_mask(call) else 24)


def _has_required_mask(call: CallFacts) -> bool:
    return any(parameter.required for parameter in call.free(*call.signature.of_role(*MASKS)))


def _trial_with_rows(
    call: CallFacts, runner: TrialRunner, arities: list[tuple[RowArgument, ...]], hints: ErrorHints
) -> Trial | None:
    widths = list(dict.fromkeys([*hints.widths, *call.sizes.widths])) or [_free_width(call)]
    separate_keys = any(len(slots) > 1 for slots in arities)
    lengths = lengths_to_try(call.sizes, separate_keys=separate_keys, hinted=hints.lengths)
    trials = _trials(call, arities, _layouts(call, _ROW_LAYOUTS), widths[:4], lengths, is_function=False)
    return _first(runner, trials, MAX_TRIALS if hints == ErrorHints() else MAX_TRIALS // 2)


def _free_width(call: CallFacts) -> int:
    return call.n_heads * FREE_HEAD_WIDTH if call.sizes.n_heads or call.n_heads != FREE_HEADS else FREE_WIDTH


def _first(runner: TrialRunner, trials: Iterable[Trial], limit: int) -> Trial | None:
    """The first trial that gives an output; slow targets get fewer trials."""
    for n, trial in enumerate(trials):
        if n >= limit or (runner.is_slow and n >= 12):
            return None
        working = runner.with_output(trial)
        if working is not None:
            return working
    return None


# ------------------------------------------------------------------------------------------------------- required masks


LENGTHS: AxisNames = ("batch",)


def required_forms(parameter: CallParameter, *, batched: bool) -> tuple[MaskForm | None, ...]:
    """The forms to try for a required mask of unknown form: None, then masks that hide nothing."""
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
"""The duration in seconds from which calls are repeated only if necessary."""
MAX_CALLS = 90
_INPUT_SCALE = 0.3
"""The scale of random inputs, small enough that a softmax without scaling sees more than one key."""
_MAX_COPIED = 4_000_000
"""The most elements in a module that is copied for each trial, so that no state passes to the next call."""


class FailedTrial(NamedTuple):
    """A failed trial: a description of the call, the exception, and the line of user code."""

    described: str
    message: str
    at: SourceLine | None = None

    @property
    def fault(self) -> str:
        """The exception with its line."""
        return self.message + (f" (line {self.at.line}: {self.at.source})" if self.at else "")


@dataclass(frozen=True)
class Trial:
    """A convention, with trial sizes and weights by name. `fails_with` are larger axes that the call also accepts, but with
    which it does not compute attention."""

    convention: CallConvention
    lengths: TrialLengths
    d_in: int
    d_context: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    fails_with: AxisNames | None = None

    @property
    def sizes(self) -> InputSizes:
        """The sizes of the inputs."""
        return InputSizes(*self.lengths, self.d_in, self.d_context)

    @property
    def axis_sizes(self) -> AxisSizes:
        """The axis sizes of one call."""
        return AxisSizes(self.lengths.batch, self.convention.n_heads, self.lengths.q_len, self.lengths.k_len)

    def changed(self, **fields: Any) -> Trial:
        """The trial with changed fields of its convention."""
        return replace(self, convention=replace(self.convention, **fields))

    def with_values(self, values: Mapping[str, object]) -> Trial:
        """The trial with other values for some arguments besides inputs and masks."""
        others = tuple(recipe for recipe in self.convention.extras if recipe.parameter not in values)
        return self.changed(
            extras=(*others, *(ArgumentRecipe(name, "literal", value) for name, value in values.items()))
        )

    @property
    def takes_keys(self) -> bool:
        """Whether the call takes keys at all."""
        return any(slot.part != "queries" for slot in self.convention.slots)


class TrialRunner:
    """Runs trials, counts calls, records failures, and measures the fastest call."""

    def __init__(self, built: Built, device: torch.device, seed: int) -> None:
        self.built, self.device, self.seed = built, device, seed
        self.dtype = native_dtype(built.module)
        self.n_calls, self.fastest_s = 0, 0.0
        self.failures: list[FailedTrial] = []
        self._copies = _is_small(built.module) and not is_lazy(built.module)

    @property
    def is_slow(self) -> bool:
        """Whether only few further calls are affordable."""
        return self.fastest_s > SLOW_S or self.n_calls >= MAX_CALLS

    def rows(self, trial: Trial) -> Inputs:
        """Random inputs for a trial, the same in each call."""
        n_heads = trial.convention.n_heads if trial.convention.is_function else None
        has_values = any(slot.part == "values" for slot in trial.convention.slots)
        generator = InputDrawer(trial.sizes, seed=self.seed, n_heads=n_heads, separate_values=has_values)
        inputs = (
            generator.inputs(with_context=True) if trial.takes_keys else Inputs(generator.rows(trial.lengths.q_len))
        )
        return map_rows(inputs, lambda rows: _INPUT_SCALE * rows)

    def setting(self, trial: Trial, dtype: torch.dtype | None = None, training: bool = False) -> CallSetting:
        """The call setting of a trial."""
        dtype = dtype or self.dtype
        tensors = {name: tensor.to(self.device, dtype) for name, tensor in trial.tensors.items()}
        return CallSetting(trial.axis_sizes, dtype, self.device, training, tensors)

    def call(self, trial: Trial, inputs: Inputs, forms: CallMasks = CallMasks()) -> CallResult | None:  # noqa: B008
        """The raw results of one call, None if it raises."""
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

    def output(self, trial: Trial, inputs: Inputs, forms: CallMasks = CallMasks()) -> AttentionOutput | None:  # noqa: B008
        """The output of one call, in our order of axes and in float64; None if it has no output of the right shape."""
        call_result = self.call(trial, inputs, forms)
        axes = [trial.convention.output.axes]
        if call_result is None or any(output_in(r, axes, call_result.sides) is None for r in call_result.results):
            return None
        output = read_output(call_result, trial.convention)
        return AttentionOutput(
            output.out.double().cpu(), None if output.pattern is None else output.pattern.double().cpu()
        )

    def with_output(self, trial: Trial) -> Trial | None:
        """The trial with the paths of output and pattern, None if it raises or returns no output."""
        call_result = self.call(trial, self.rows(trial))
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
    """The dtype of a module's floating parameters, or torch's default."""
    dtypes = [] if module is None else [p.dtype for p in module.parameters() if p.is_floating_point()]
    return dtypes[0] if dtypes else torch.get_default_dtype()


def is_lazy(module: nn.Module | None) -> bool:
    """Whether parameters get their shape in the first call."""
    return module is not None and any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())


def _is_small(module: nn.Module | None) -> bool:
    if module is None or is_lazy(module):
        return True
    return sum(tensor.numel() for tensor in itertools.chain(module.parameters(), module.buffers())) <= _MAX_COPIED


def _axes_of_output(convention: CallConvention) -> list[AxisNames]:
    """The possible axes of the output: those of the inputs; for split heads also the other order and merged heads."""
    if convention.is_function and "head" in convention.axes and convention.batched:
        others: list[AxisNames] = [
            ("batch", "head", "row", "width"),
            ("batch", "row", "head", "width"),
            ("batch", "row", MERGED),
        ]
        return [convention.axes, *(axes for axes in others if axes != convention.axes)]
    return [convention.axes]


def _misfit(result: Any, convention: CallConvention, call_result: CallResult) -> str:
    shapes = [str(list(tensor.shape)) for _, tensor in leaves(result) if tensor.is_floating_point()]
    expected = ", ".join("·" if (size := call_result.sides.of(axis)) is None else str(size) for axis in convention.axes)
    return f"returned {', '.join(shapes[:4]) or type(result).__name__}, where [{expected}] was to come"


def describe_trial(trial: Trial) -> str:
    """The trial as a call, with the shapes of its inputs."""
    sizes = {"batch": trial.lengths.batch, "head": trial.convention.n_heads if trial.convention.is_function else 1}
    shown = []
    for slot in trial.convention.slots:
        is_query = slot.part == "queries"
        length, width = (trial.lengths.q_len, trial.d_in) if is_query else (trial.lengths.k_len, trial.d_context)
        shape = [sizes.get(axis, length if axis == "row" else width) for axis in trial.convention.axes]
        shown.append(f"{slot.parameter} {shape}")
    masks = [f"{name} {form.kind} [{', '.join(form.axes)}]" for name, form in trial.convention.idle if form is not None]
    return ", ".join([*shown, *masks])


def cheapest(*options: Iterable[tuple[float, Any]]) -> Iterator[tuple[Any, ...]]:
    """Every combination of the options, each `(cost, option)`, in order of total cost."""
    lists = [list(option) for option in options]
    scored = [
        (sum(cost for cost, _ in combination), n, combination)
        for n, combination in enumerate(itertools.product(*lists))
    ]
    heapq.heapify(scored)
    while scored:
        _, _, combination = heapq.heappop(scored)
        yield tuple(option for _, option in combination)


def close(left: Tensor, right: Tensor) -> bool:
    """Whether two outputs are equal within float32 rounding; NaN equals NaN."""
    return bool(torch.allclose(left, right, rtol=1e-4, atol=1e-6, equal_nan=True))


def layout_score(runner: TrialRunner, trial: Trial) -> int:
    """A score from 0 to 2 for a layout with heads: 1 if a changed key moves several queries of its own head only; 2 if moreover
    equal values pass through unchanged, as any softmax over the keys ensures."""
    inputs = runner.rows(trial)
    assert inputs.keys is not None
    keys = inputs.keys.clone()
    keys[0, 0, 0] = keys[0, 0, 0].flip(-1) + 1.0
    before, after = runner.output(trial, inputs), runner.output(trial, inputs._replace(keys=keys))
    if before is None or after is None:
        return 0
    moved = ~torch.isclose(before.out, after.out, rtol=1e-4, atol=1e-6, equal_nan=True).all(-1)
    own_head = int(moved[0, 0].sum())
    if int(moved.sum()) != own_head or own_head < min(2, trial.lengths.q_len):
        return 0
    constant = runner.output(
        trial, inputs._replace(values=torch.ones_like(inputs.keys if inputs.values is None else inputs.values))
    )
    return 2 if constant is not None and close(constant.out, torch.ones_like(constant.out)) else 1
