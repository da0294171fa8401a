"""`mha check` as a function. What is named by a file or module is examined in a process of its own; nothing here loads torch."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from mhacli.adapters.usercode import process
from mhacli.adapters.usercode.target import naming
from mhacli.errors import UsageError
from mhacli.io.json_schema import decode, load_json
from mhacli.requests.user_code import DEFAULT_TIME_LIMIT_S, CheckRequest, TargetRequest
from mhacli.results.check import Examination

_JOB = "mhacli.compute.check.examine:examine_request"
_NONE: Mapping[str, object] = {}


def check(
    target: object,
    *,
    arguments: Mapping[str, object] = _NONE,
    call_arguments: Mapping[str, object] = _NONE,
    against: object = None,
    against_arguments: Mapping[str, object] = _NONE,
    against_call_arguments: Mapping[str, object] | None = None,
    causal: bool = False,
    mask_means: Literal["keep", "hide"] | None = None,
    rope: Literal["half", "interleaved"] | None = None,
    scale: float | None = None,
    n_heads: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
) -> Examination:
    """Whether an implementation of attention is right, and if not, which mistake it makes: what `mha check` prints.

    `target` is a class, a function, a module that is built already, or `FILE.py:NAME` or `package.module:NAME`. A name is
    imported and run in a process of its own, within `time_limit_s` for each call; an object is examined in this process, a
    module by a copy. `arguments` are those of the constructor, `call_arguments` those of each call; `against` is another
    implementation to compare with in place of the reference. `causal`, `mask_means`, `rope`, `scale` and `n_heads` say what the
    author meant where the code does not show it. Raises `MhaError` for what cannot be imported, built or called.
    """
    with _named(target) as name, _named(against) as other:
        of = TargetRequest(name or "", _words(arguments), _words(call_arguments), causal, device, seed)
        calls = of.call_arguments if against_call_arguments is None else _words(against_call_arguments)
        compared = None
        if other is not None:
            compared = replace(of, target=other, arguments=_words(against_arguments), call_arguments=calls)
        request = CheckRequest(of, compared, mask_means, rope, scale, n_heads, time_limit_s)
        if all(isinstance(one, str | None) for one in (target, against)):
            return examine_in_child(request)
        return _examined_here(request)


def examine_in_child(request: CheckRequest, *, on_stage: Callable[[str], None] | None = None) -> Examination:
    """The examination of what names of files or modules mean, made in a process of its own; `on_stage` hears of each stage."""
    outcome = process.run_in_child(_JOB, asdict(request), time_limit_s=request.time_limit_s, on_stage=on_stage)
    examination = decode(Examination, load_json(outcome.result, "the examination"), "the examination")
    return replace(examination, printed=outcome.printed)


def _examined_here(request: CheckRequest) -> Examination:
    from mhacli.compute.base.devices import one_thread
    from mhacli.compute.check.examine import examined

    with one_thread():
        return examined(request, _no_stage)


def _no_stage(stage: str, *, limited: bool = True) -> None:
    """Ignores the stages."""


@contextlib.contextmanager
def _named(thing: object) -> Iterator[str | None]:
    """The name of a target, by which an object can be found meanwhile."""
    if thing is None or isinstance(thing, str):
        yield thing
        return
    is_written = inspect.isclass(thing) or inspect.isroutine(thing)
    with naming(thing if is_written else copy.deepcopy(thing)) as name:
        yield name


def _words(arguments: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Arguments as the command line has them. Raises `UsageError` for a value that has no literal."""
    return tuple((name, _word(name, value)) for name, value in arguments.items())


def _word(name: str, value: Any) -> str:
    if value is None or isinstance(value, str | int | float | bool | tuple | list | dict):
        return repr(value)
    if type(value).__module__ == "torch":  # a dtype or a device
        return str(value)
    raise UsageError(
        f"{name}={value!r:.80} is neither a number, a text, a list nor a dict",
        hint="give a module that is built already",
    )
