"""`mha check` as a Python function. Targets given by name run in a child process; nothing here
loads torch.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial, wraps
from typing import Any, Literal, ParamSpec

from msgspec import ValidationError, convert

from mhacli.commands.check import view  # noqa: F401 - it registers what draws an examination
from mhacli.errors import MhaError, UsageError, in_python
from mhacli.io.data import decode
from mhacli.usercode import process
from mhacli.usercode.door import UserRaised
from mhacli.usercode.limits import DEFAULT_MAX_TIME_S
from mhacli.usercode.target import DEFAULT_TIME_LIMIT_S, may_be_examined, naming

from .acceptance import with_accepted
from .result import CheckRequest, Examination, finding_of

_JOB = "mhacli.commands.check.examine:examine_request"
_NONE: Mapping[str, object] = {}
P = ParamSpec("P")
_NO_REASONS: Mapping[str, str] = {}


def check(
    target: object,
    *,
    arguments: Mapping[str, object] = _NONE,
    call_arguments: Mapping[str, object] = _NONE,
    example: str | Callable[..., object] | None = None,
    against: object = None,
    against_arguments: Mapping[str, object] = _NONE,
    against_call_arguments: Mapping[str, object] | None = None,
    causal: bool | None = None,
    sees: str | Callable[..., object] | None = None,
    packed: bool = False,
    accept: Mapping[str, str] = _NO_REASONS,
    mask_means: Literal["keep", "hide"] | None = None,
    rope: Literal["half", "interleaved"] | None = None,
    scale: float | None = None,
    n_heads: int | None = None,
    backward: bool | None = None,
    device: str = "cpu",
    seed: int = 0,
    length: int | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    max_time_s: float = DEFAULT_MAX_TIME_S,
) -> Examination:
    """Checks an implementation of attention and names its mistakes, as `mha check` does.

    `target` is a class, a function, a module instance, `FILE.py:NAME` or `package.module:NAME`. A
    name is imported and run in a child process, with `time_limit_s` for each call; an object is
    examined in a copy of this process, or, on a GPU and if it is large, in this process, a module
    as a copy; there a call has no limit. After `max_time_s`, counted from the end of the first call
    and looked at between calls, the verdict is `wrong` if a mistake is shown, and never `right`. A
    model that takes token ids, of transformers or not, is examined by its behaviour over texts of
    `length` tokens: 256, or the model's positions. Attention is compared over up to `length`
    tokens: 257. `arguments` go to the constructor, `call_arguments` to each call; or `example`
    makes the call, as a function of the target and a length. `against` is another implementation to
    compare with, instead of the reference. `sees` states who may see whom: a text such as
    `"q >= k and q - k < 8"`, or a predicate `allowed(q_idx, k_idx)` that gives a bool tensor
    `[query, key]`. `causal`, `mask_means`, `rope`, `scale` and `n_heads` state the intention where
    the code does not show it; with `packed=True`, rows hold several documents, which must not see
    each other. Gradients are compared where there are any: with `backward=True` there must be some,
    with `backward=False` none are compared. `accept` has the reasons why mistakes are accepted, as
    `{"padding-leak@decoder": "texts are never padded"}`; once one is mended, `.ok` is False. Raises
    `MhaError` if the target cannot be imported, built or called.
    """
    if sees is not None and causal is not None:
        raise UsageError("sees and causal exclude each other")
    with (
        _named(target) as name,
        _named(against) as other,
        _named(example) as call,
        _named(sees) as seen,
    ):
        request = CheckRequest(
            target=name,
            arg=argument_words(arguments),
            call_arg=argument_words(call_arguments),
            example=call,
            other=other,
            other_arg=argument_words(against_arguments),
            other_call_arg=None
            if against_call_arguments is None
            else argument_words(against_call_arguments),
            causal=causal is True,
            not_causal=causal is False,
            sees=seen,
            packed=packed,
            accept=accept_words(accept),
            mask_means=mask_means,
            rope=rope,
            scale=scale,
            n_heads=n_heads,
            backward=backward is True,
            no_backward=backward is False,
            device=device,
            seed=seed,
            length=length,
            time_limit_s=time_limit_s,
            max_time_s=max_time_s,
            import_path=tuple(sys.path),
        )
        stated = request.acceptances  # which raise before anything runs
        if all(
            isinstance(name_or_object, str | None)
            for name_or_object in (target, against, example, sees)
        ):
            return _for_python(examine_in_child(request))
        from .examine import examination_of, examine_request, suits_a_fork

        if suits_a_fork(target, device):
            job = partial(examine_request, asdict(request))
            run = partial(process.run_in_fork, job, time_limit_s=time_limit_s)
            return _for_python(with_accepted(_examination(run), stated))
        try:
            report = with_accepted(examination_of(request, process.no_stage), stated)
            return _for_python(report)
        except UserRaised as raised:
            raise raised.fault from None


def _for_python(report: Examination) -> Examination:
    """The report whose advice names parameters, and no command."""
    steps = tuple(in_python(step) for step in report.next_steps if "mha " not in step)
    return replace(report, reason=report.reason and in_python(report.reason), next_steps=steps)


def _asserting(examine: Callable[P, Examination]) -> Callable[P, None]:
    """`examine` as an assertion: its failure is the report."""

    @wraps(examine, assigned=("__module__",))
    def assert_right(*target: P.args, **options: P.kwargs) -> None:
        """Asserts that `check`, with the same arguments, finds the target right or consistent.

        Raises `AssertionError`, whose text is the report, for any other verdict, and `MhaError` as
        `check` does.
        """
        __tracebackhide__ = True
        report = examine(*target, **options)
        if not report.ok:
            raise AssertionError(str(report))

    return assert_right


assert_right = _asserting(check)


def examine_in_child(
    request: CheckRequest, *, on_stage: Callable[[str], None] | None = None
) -> Examination:
    """The examination of named targets in a child process; `on_stage` is called at each stage."""
    run = partial(
        process.run_in_child,
        _JOB,
        asdict(request),
        time_limit_s=request.time_limit_s,
        on_stage=on_stage,
        folder=request.folder,
    )
    return with_accepted(_examination(run), request.acceptances)


def examined_or_refused(
    request: CheckRequest, *, on_stage: Callable[[str], None] | None = None
) -> Examination:
    """The same; undecided where the target is refused. Raises `MhaError` for a fault of
    mha, which is no answer about the target.
    """
    try:
        return examine_in_child(request, on_stage=on_stage)
    except MhaError as refusal:
        if refusal.code == "internal":
            raise
        return refused(request, refusal)


def refused(request: CheckRequest, refusal: MhaError) -> Examination:
    """The report on a target that is refused."""
    target = request.model or request.target or ""
    steps = (refusal.typed_hint,) if refusal.typed_hint else ()
    return Examination(
        "unknown", target, "", reason=f"refused: {refusal.typed_message}", next_steps=steps
    )


def _examination(run: Callable[[], tuple[Any, str]]) -> Examination:
    """The examination that a child process gives. If a fault of the code ends the process in a
    call, it is the report up to there, with this finding.
    """
    try:
        document, printed = run()
    except process.EndedEarly as end:
        if end.report is None or not end.is_crash:
            raise
        report = decode(Examination, end.report, "the report")
        where = f"first at {end.call}"
        evidence = f"{end.message}; its last call: {end.call}"
        crash = finding_of("crashes", evidence, end.line, where=where)
        found = (*report.findings, crash)
        return replace(report, verdict="wrong", reason=None, findings=found, printed=end.printed)
    return replace(decode(Examination, document, "the examination"), printed=printed)


@contextlib.contextmanager
def _named(thing: object) -> Iterator[str | None]:
    """A target name that resolves to the object inside the context."""
    if thing is None or isinstance(thing, str):
        yield thing
        return
    if not may_be_examined(thing):
        raise UsageError(f"check needs a module, a class or a function, got {type(thing).__name__}")
    with contextlib.ExitStack() as after:
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            from mhacli.usercode.copies import copied, unchanged

            original = thing
            thing = copied(thing)
            after.enter_context(unchanged(original if thing is original else None))
        yield after.enter_context(naming(thing))


def argument_words(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments as command-line words. Raises `UsageError` for a value without a literal."""
    words = []
    for name, value in arguments.items():
        is_of_torch = type(value).__module__ == "torch"  # a dtype or a device
        if not (
            is_of_torch
            or value is None
            or isinstance(value, str | int | float | bool | tuple | list | dict)
        ):
            problem = f"{name}={value!r:.80} is neither a number, a text, a list nor a dict"
            raise UsageError(problem, hint="give a module that is built already")
        words.append(f"{name}={value}" if is_of_torch else f"{name}={value!r}")
    return tuple(words)


def accept_words(accept: Mapping[str, str]) -> tuple[str, ...]:
    """Codes with their reasons as command-line words. Raises `UsageError` for what is no text."""
    try:
        return tuple(f"{code}={why}" for code, why in convert(accept, dict[str, str]).items())
    except ValidationError as fault:
        raise UsageError(f"accept: {fault}", hint="say why each is accepted") from None
