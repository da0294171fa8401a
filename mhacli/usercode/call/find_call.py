"""Finds out how to call a user's attention: from its signature, names and documentation, and by trial calls."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from mhacli.errors import MhaError
from mhacli.usercode.arguments import parse_value, role_of
from mhacli.usercode.call.convention import (
    CallConvention,
    CallSetting,
    path_text,
    rotation_text,
    tensor_at,
)
from mhacli.usercode.call.masks import MaskedTrial, masks_by_mode, modes_of, with_masks
from mhacli.usercode.call.signature import (
    AxisNames,
    CallParameter,
    CallRole,
    Signature,
    known_sizes,
    never_read,
    signature_of,
)
from mhacli.usercode.call.trials import (
    CallFacts,
    FailedTrial,
    Trial,
    TrialRunner,
    close,
    find_trial,
    is_lazy,
    stated_rows,
)
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.inputs import float64_copy, map_rows
from mhacli.usercode.process import is_on_cuda, lacks_cuda, shortened
from mhacli.usercode.target import Mode, TargetRequest
from mhacli.usercode.types import Built, Inputs, MaskForm

_MOST_GUESSES, _MOST_CHARACTERS, _MOST_SOURCE = 4, 110, 50
_NUDGE, _ROUGH = 1e-9, 1e-11


def find_user_attention(built: Built, request: TargetRequest) -> UserAttention:
    """The target with its call convention, with a context if it takes one. Takes a few dozen calls of copies of the target.

    Raises MhaError if no convention works.
    """
    call, runner, trial = _first_call(built, request)
    trial = _with_pattern(call, runner, _with_causal(call, runner, trial))
    return _user_attention(call, runner, with_masks(call, runner, trial), None)


def find_modes(built: Built, request: TargetRequest) -> tuple[UserAttention, ...]:
    """The target with the convention and the masks of each mode: self-attention, cross-attention, or both. Raises MhaError if
    no convention works."""
    call, runner, trial = _first_call(built, request)
    runners, trials = {}, {}
    for mode, mode_trial in modes_of(runner, trial):
        runners[mode] = TrialRunner(built, runner.device, runner.seed)
        trials[mode] = with_masks(
            call, runners[mode], _with_pattern(call, runners[mode], _with_causal(call, runners[mode], mode_trial))
        )
    return tuple(
        _user_attention(call, runners[mode], mode_trial, mode)
        for mode, mode_trial in masks_by_mode(call, trials, runners).items()
    )


def _first_call(built: Built, request: TargetRequest) -> tuple[CallFacts, TrialRunner, Trial]:
    """The facts about the call, the runner of its trials, and a first trial that works."""
    device = torch.device(request.device)
    fixed = {name: parse_value(value) for name, value in request.call_arguments}
    call = CallFacts(built, signature_of(built.call), known_sizes(built), fixed, request.causal, request.seed)
    call = replace(call, sizes=call.sizes._replace(taken=call.sizes.taken | {call.n_heads}))
    runner = TrialRunner(built, device, request.seed)
    refuse_unknown(call)
    trial = find_trial(call, runner)
    if trial is None:
        raise _call_error(call, device, runner.failures)
    trial = _verified_axes(call, runner, trial)
    return call, TrialRunner(built, device, request.seed) if is_lazy(built.module) else runner, trial


def _user_attention(call: CallFacts, runner: TrialRunner, masked: MaskedTrial, mode: Mode | None) -> UserAttention:
    trial, device = masked.trial, runner.device
    built, dtype = _in_float64(runner, trial)
    convention, lengths = trial.convention, trial.lengths
    tensors = {name: tensor.to(device, dtype) for name, tensor in trial.tensors.items()}
    setting = CallSetting(trial.axis_sizes, dtype, device, False, tensors)
    return UserAttention(
        built=built,
        sizes=trial.sizes,
        is_function=convention.is_function,
        n_heads=convention.n_heads if convention.is_function else 1,
        takes_context=trial.takes_keys and lengths.q_len != lengths.k_len,
        n_rows=len({slot.part for slot in convention.slots}),
        causal_by=convention.causal_by,
        mask_forms=masked.masks,
        padding_forms=masked.paddings,
        dtype=dtype,
        device=device,
        described=_described(call, masked, setting),
        convention=convention,
        tensors=tensors,
        untried=untried(call.signature, runner, trial, (*masked.masks, *masked.paddings)),
        unread=_unread(call),
        mode=mode,
    )


def _verified_axes(call: CallFacts, runner: TrialRunner, trial: Trial) -> Trial:
    """The trial, corrected by experiment: the sequence axis may come first, and a context may have no influence."""
    if trial.convention.is_function:
        return trial
    batch_first: AxisNames = ("batch", "row", "width")
    if (
        trial.convention.axes == batch_first
        and stated_rows(call) != batch_first
        and not runner.is_slow
        and not keeps_sequences_apart(runner, trial)
    ):
        transposed = trial.changed(axes=("row", "batch", "width"))
        working = runner.with_output(transposed)
        if working is not None and keeps_sequences_apart(runner, working):
            trial = working
    optional = [slot for slot in trial.convention.slots if slot.part != "queries" and not slot.required]
    if optional and not runner.is_slow and not context_matters(runner, trial):
        self_trial = trial.changed(slots=tuple(slot for slot in trial.convention.slots if slot not in optional))
        lengths = self_trial.lengths._replace(k_len=self_trial.lengths.q_len)
        trial = runner.with_output(replace(self_trial, lengths=lengths)) or trial
    return trial


def keeps_sequences_apart(runner: TrialRunner, trial: Trial) -> bool:
    """Whether changing one sequence changes only its own output."""
    inputs = runner.rows(trial)
    changed_inputs = map_rows(inputs, _first_changed)
    before, after = runner.output(trial, inputs), runner.output(trial, changed_inputs)
    if before is None or after is None:
        return False
    return [close(x, y) for x, y in zip(before.out, after.out, strict=True)] == [False] + [True] * (
        trial.lengths.batch - 1
    )


def _first_changed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[0] = tensor[0].flip(-1) + 0.5
    return tensor


def context_matters(runner: TrialRunner, trial: Trial) -> bool:
    """Whether the context influences the output."""
    inputs = runner.rows(trial)
    assert inputs.keys is not None
    other = inputs._replace(keys=inputs.keys + 1.0, values=None if inputs.values is None else inputs.values.flip(-1))
    before, after = runner.output(trial, inputs), runner.output(trial, other)
    return before is not None and after is not None and not close(before.out, after.out)


def _with_causal(call: CallFacts, runner: TrialRunner, trial: Trial) -> Trial:
    """The trial with its causal switch on, if requested and accepted."""
    if not call.causal:
        return trial
    for parameter in call.free(*call.signature.of_role("causal")):
        switched = trial.with_values({parameter.name: True})
        working = runner.with_output(switched.changed(causal_by=parameter.name))
        if working is not None:
            return working
    return trial


def _with_pattern(call: CallFacts, runner: TrialRunner, trial: Trial) -> Trial:
    """The trial with switches that return the pattern, preferably of each head, if the output stays the same."""
    switches = {parameter.name: True for parameter in call.free(*call.signature.of_role("pattern"))}
    means = {parameter.name: False for parameter in call.free(*call.signature.of_role("mean"))}
    before = runner.output(trial, runner.rows(trial)) if switches or means else None
    for values in filter(None, ({**switches, **means}, switches, means)):
        working = None if before is None else runner.with_output(trial.with_values(values))
        after = (
            None
            if working is None or working.convention.pattern is None
            else runner.output(working, runner.rows(working))
        )
        if working is not None and before is not None and after is not None and close(before.out, after.out):
            return working
    return trial


def _in_float64(runner: TrialRunner, trial: Trial) -> tuple[Built, torch.dtype]:
    """A float64 copy, if it computes in float64 throughout; else the original and its dtype."""
    built = runner.built
    if is_lazy(built.module):
        return built, runner.dtype
    try:
        call = float64_copy(built.call)
    except Exception:
        return built, runner.dtype
    float64_built = replace(built, call=call, module=call if isinstance(call, nn.Module) else None)
    float64_runner = TrialRunner(float64_built, runner.device, runner.seed)
    float64_runner.dtype = torch.float64
    inputs = float64_runner.rows(trial)
    result = float64_runner.call(trial, inputs)
    out = None if result is None else tensor_at(result.results[0], trial.convention.output.path)
    if out is None or out.dtype != torch.float64 or _rounds_inside(float64_runner, trial, inputs):
        return built, runner.dtype
    return float64_built, torch.float64


def _rounds_inside(runner: TrialRunner, trial: Trial, inputs: Inputs) -> bool:
    """Whether the output is rounded somewhere inside, such as to float32. If not, a perturbation twice as large changes it
    twice as much."""
    if runner.is_slow:
        return False
    outputs = [runner.output(trial, map_rows(inputs, functools.partial(torch.mul, 1 + n * _NUDGE))) for n in range(3)]
    if any(output is None for output in outputs):
        return False
    base, once, twice = (output.out.nan_to_num() for output in outputs if output is not None)
    deviation = (twice - 2 * once + base).abs().max()
    return bool(deviation > _ROUGH * base.abs().max())


def _described(call: CallFacts, masked: MaskedTrial, setting: CallSetting) -> str:
    """The call as one line of Python, with a comment on layouts."""
    convention = masked.trial.convention
    arguments = [slot.parameter if not slot.parameter.startswith("args[") else slot.part for slot in convention.slots]
    arguments += [f"{name}={value!r}" for name, value in convention.fixed.items()]
    arguments += [
        f"{recipe.parameter}={recipe.value!r}" if recipe.kind == "literal" else f"{recipe.parameter}=…"
        for recipe in convention.extras
    ]  # fmt: skip
    named = [*(name for name, _ in convention.idle), *(form.parameter for form in (*masked.masks, *masked.paddings))]
    arguments += [f"{name}=…" for name in dict.fromkeys(named)]
    name = "forward" if call.built.module is not None else getattr(call.built.call, "__name__", "__call__")
    axis_words = {"row": "seq", "width": "d", "head": "1" if not convention.is_function else "head"}
    notes = [rotation_text(recipe, setting) for recipe in convention.extras if recipe.kind == "rope"]
    usual = convention.axes in (
        ("batch", "row", "width"),
        ("batch", "head", "row", "width"),
    ) and convention.is_function == ("head" in convention.axes)
    if not usual:
        notes.insert(0, f"rows [{', '.join(axis_words.get(axis, axis) for axis in convention.axes)}]")
    if masked.trial.fails_with is not None:
        others = ", ".join(axis_words.get(axis, axis) for axis in masked.trial.fails_with)
        notes.append(f"with [{others}] it is no attention")
    if convention.output.axes != convention.axes:
        notes.append(f"result [{', '.join(axis_words.get(axis, axis) for axis in convention.output.axes)}]")
    return f"{name}({', '.join(arguments)}){path_text(convention.output.path)}" + (
        f"  # {'; '.join(notes)}" if notes else ""
    )


_SHAPES = re.compile(r"shape|size|dimension|unpack|divisible|must match|mat1|einops|reduced? over", re.I)


def refuse_unknown(call: CallFacts) -> None:
    """Raises MhaError for required parameters of unknown role, and for a given parameter that does not exist."""
    names = [parameter.name for parameter in call.signature.parameters]
    for name in call.fixed:
        if name not in names and not call.signature.takes_any and call.signature.known:
            raise MhaError(
                f"--call-arg {name}: {call.built.name} has no such parameter",
                hint=f"it has {', '.join(names) or 'none'}", code="cannot-examine", path=call.built.file,
            )  # fmt: skip
    free = call.free(*call.signature.parameters)
    unknown = [parameter.name for parameter in free if parameter.required and parameter.role == "unknown"]
    if unknown:
        pronoun = "it" if len(unknown) == 1 else "them"
        raise MhaError(
            f"{call.built.name} needs a value for {' and '.join(unknown)}, which mha cannot guess from the name",
            hint=f"give {pronoun}, for example {' '.join(f'--call-arg {name}=1' for name in unknown)}",
            code="cannot-examine", path=call.built.file,
        )  # fmt: skip


def _call_error(call: CallFacts, device: torch.device, failures: list[FailedTrial]) -> MhaError:
    """The error if no trial works: a known cause, or the most frequent exception."""
    built, failures = call.built, failures or [FailedTrial("no rows", "no rows of a size that fits")]
    for failure in failures:
        if lacks_cuda(failure.message):
            message = f"{built.name} needs a CUDA device, which this machine does not have: {_short(failure)}"
            return MhaError(message, code="no-device", path=built.file)
        if device.type == "cpu" and is_on_cuda(failure.message):
            message = f"{built.name} puts some tensors on another device than its input, cpu: {_short(failure)}"
            return MhaError(message, hint="--device cuda", code="cannot-examine", path=built.file)
    message, hint = _exit_cause(built, failures) or _size_cause(built, failures) or _common_cause(built, failures)
    return MhaError(message, hint=hint, code="cannot-examine", path=built.file)


def _short(failure: FailedTrial) -> str:
    """The exception and its line, cut to about two terminal lines."""
    where = f" (line {failure.at.line}: {shortened(failure.at.source, _MOST_SOURCE)})" if failure.at else ""
    return shortened(failure.message, _MOST_CHARACTERS) + where


def _exit_cause(built: Built, failures: list[FailedTrial]) -> tuple[str, str | None] | None:
    """The message if the likeliest call exits the program or reads the keyboard."""
    causes = {"SystemExit": "ends the program when it is called", "EOFError": "waits for input from the keyboard"}
    cause = causes.get(failures[0].message.partition(":")[0])
    return None if cause is None else (f"{built.name} {cause}: {_short(failures[0])}", None)


def _size_cause(built: Built, failures: list[FailedTrial]) -> tuple[str, str | None] | None:
    """The message if every call fails on shapes and the constructor's sizes do not divide each other."""
    sized: dict[str | None, tuple[str, int]] = {}
    for name, value in built.arguments.items():
        if type(value) is int and value > 0:
            sized.setdefault(role_of(name.rpartition(".")[2]), (name, value))
    width = "d_out" if "d_out" in sized else "d_model"
    pairs = [("n_heads", "n_kv_heads"), *([(width, "n_heads")] if "d_head" not in sized else [])]
    if not all(_SHAPES.search(failure.message) for failure in failures):
        return None
    for large, small in pairs:
        if large in sized and small in sized and sized[large][1] % sized[small][1]:
            (name, size), (divisor_name, part) = sized[large], sized[small]
            suggestions = [f"--arg {name}={n}" for n in (size // part * part, size // part * part + part) if n]
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            smaller = [n for n in divisors if n < part][-1:]
            suggestions += [f"--arg {divisor_name}={n}" for n in (*smaller, *[n for n in divisors if n > part][:1])]
            rule = f"{built.name}: {name} {size} is not a multiple of {divisor_name} {part}"
            return f"{rule}: {_short(failures[0])}", f"{' or '.join(suggestions)} would fit"
    return None


def _common_cause(built: Built, failures: list[FailedTrial]) -> tuple[str, str | None]:
    """The message for the most frequent error, with numbers ignored."""
    groups: dict[object, list[FailedTrial]] = {}
    for failure in failures:
        groups.setdefault((re.sub(r"\d+", "0", failure.message)[:_MOST_CHARACTERS], failure.at), []).append(failure)
    largest = max(groups.values(), key=len)
    calls = shortened(largest[0].described, _MOST_SOURCE) + (
        f" and {len(largest) - 1} more" if len(largest) > 1 else ""
    )
    rule = f"{built.name} could not be called in any of {len(failures)} usual ways"
    others = f"; and {len(groups) - 1} other error{'s' * (len(groups) > 2)}" if len(groups) > 1 else ""
    message = f"{rule}: {calls}: {_short(largest[0])}{others}"
    guessed = [f"{guess.name}={guess.value!r:.20}" for guess in built.guesses[:_MOST_GUESSES]]
    options = " ".join(f"--arg {guess}" for guess in guessed)
    hints = [f"mha guessed {', '.join(guessed)}; give others, in the form {options}"] if guessed else []
    if any("scalar types: Long" in failure.message for failure in failures):
        hints.append("it takes token ids: set what else it needs with --call-arg, or name the attention inside it")
    return message, "; ".join(hints) or None


# ------------------------------------------------------------------------------------------------- untried arguments

_WITHOUT_EFFECT: tuple[CallRole, ...] = (
    "rest", "training", "pattern", "mean", "batch", "q_len", "k_len", "heads", "d_head", "d_model",
)  # fmt: skip
"""Arguments for sizes and extra results, which never change the output."""
_RESULT_SWITCH = re.compile(r"(return|output|use_return|need|get|ret)_.*|return|verbose|debug|is_?debug|logger")
"""Switches that change the returned or printed results, not the computation."""
_EMPTY_WITHOUT_PAST: tuple[CallRole, ...] = ("offset", "cache", "other mask")
"""Arguments that are 0 or None in a call without a past."""


def _unread(call: CallFacts) -> tuple[str, ...]:
    names = never_read(call.built.call)
    return tuple(p.name for p in call.signature.parameters if p.name in names and _may_change_output(p))


def _may_change_output(parameter: CallParameter) -> bool:
    return parameter.role not in _WITHOUT_EFFECT and not _RESULT_SWITCH.fullmatch(parameter.name.lower())


def untried(signature: Signature, runner: TrialRunner, trial: Trial, forms: tuple[MaskForm, ...]) -> tuple[str, ...]:
    """The names of untried arguments, in order. A switch that never changes the output does not count."""
    used = _used(trial.convention, forms)
    return tuple(
        parameter.name
        for parameter in signature.parameters
        if _may_change_output(parameter)
        and (parameter.name not in used or _has_no_effect(parameter, trial.convention))
        and not _is_idle_switch(parameter, runner, trial)
    )


def _used(convention: CallConvention, forms: tuple[MaskForm, ...]) -> set[str]:
    """The arguments that some call sets."""
    extras = {recipe.parameter for recipe in convention.extras}
    return (
        {slot.parameter for slot in convention.slots}
        | {form.parameter for form in forms}
        | extras
        | set(convention.fixed)
    )


def _has_no_effect(parameter: CallParameter, convention: CallConvention) -> bool:
    """Whether the argument's value means "none" or is the default."""
    recipe = next((recipe for recipe in convention.extras if recipe.parameter == parameter.name), None)
    if recipe is None:
        return False
    return parameter.role in _EMPTY_WITHOUT_PAST or (recipe.kind == "literal" and recipe.value is parameter.default)


def _is_idle_switch(parameter: CallParameter, runner: TrialRunner, trial: Trial) -> bool:
    """Whether the argument is a switch without influence on the output."""
    if not isinstance(parameter.default, bool) or runner.is_slow:
        return False
    working = runner.with_output(trial.with_values({parameter.name: not parameter.default}))
    if working is None:
        return False
    rows = runner.rows(trial)
    before, after = runner.output(trial, rows), runner.output(working, rows)
    return before is not None and after is not None and close(before.out, after.out)
