"""The door to foreign code: the one place that calls the user's functions, classes and modules.

What they raise leaves as `UserRaised`, and nothing else about a call may be caught elsewhere. What
mha itself runs inside such a call (a mode of torch, a hook, an object that it passes) is wrapped by
`ours`: its first fault is kept, the call goes on as if mha did not watch, and `call_user` raises
the fault when the call ends, whatever the user's code did meanwhile. Where users call their own
code, `calls_of_user` is the context that keeps it. Nothing here loads torch.
"""

import functools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from mhacli.errors import MhaError, lacks_memory

from .faults import SourceLine, exception_text, source_line_of

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")


class UserRaised(Exception):
    """An exception of the user's code, `fault`; as text its class and its first line."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__(exception_text(fault))
        self.fault = fault

    def line(self, file: str | None = None) -> SourceLine | None:
        """The innermost line of user code, or of `file`, that raised it; None if there is none."""
        return source_line_of(self.fault, file)


class InternalError(Exception):
    """A fault of mha that happened inside a call of the user's code."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__(f"{exception_text(fault)} (this is a bug of mha)")
        self.fault = fault


class Unreadable(MhaError):
    """What the user's code holds or returns does not have the form that a step needs: it has no
    source, no output of each token, or another shape in another call.
    """

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message, **{"code": "cannot-examine", **more})


NO_ANSWER = (UserRaised, MhaError)
"""What ends an attempt with foreign code: anything else is a bug of mha."""


class Attempt(NamedTuple):
    """A candidate that did not work, and why."""

    candidate: Any
    failure: UserRaised | MhaError


@dataclass(frozen=True)
class FailedAttempt:
    """What was tried with the user's code and did not work, and why, in words."""

    what: str
    error: str


class AttemptsInWords(list[FailedAttempt]):
    """Attempts that failed, in words: it holds nothing of the calls, such as their tensors."""

    def note(self, attempt: Attempt) -> None:
        """Adds an attempt. A candidate describes itself, or is a text or a number."""
        what = getattr(attempt.candidate, "described", attempt.candidate)
        self.append(FailedAttempt(str(what), str(attempt.failure)))


Log = Callable[[Attempt], None]
"""Takes an attempt that failed."""


def those_that_work(
    candidates: Iterable[C], attempt: Callable[[C], T | None], log: Log | None = None
) -> Iterator[T]:
    """What the attempts give that neither fail nor give None. The log, if there is one, gets the
    candidates that failed, in order.
    """
    for candidate in candidates:
        try:
            found = attempt(candidate)
        except NO_ANSWER as failure:
            if log is not None:
                log(Attempt(candidate, failure))
        else:
            if found is not None:
                yield found


def first_that_works(
    candidates: Iterable[C], attempt: Callable[[C], T | None], log: Log | None = None
) -> T | None:
    """What the first attempt gives that neither fails nor gives None; None without one. The log, if
    there is one, gets the candidates before it that failed, in order.
    """
    return next(those_that_work(candidates, attempt, log), None)


# ----------------------------------------------------------------------------------------- the call


class UserCall:
    """A running call of the user's code, with the first fault of mha inside it."""

    fault: BaseException | None = None

    def end(self) -> None:
        """Raises the fault, if there is one: what users can mend, and missing memory, as it is, and
        any other as `InternalError`.
        """
        fault = self.fault
        self.fault = None
        try:
            if fault is None:
                return
            if isinstance(fault, (*NO_ANSWER, InternalError)) or lacks_memory(fault):
                raise fault
            raise InternalError(fault) from fault
        finally:
            del fault  # it holds this frame


_running: list[UserCall] = []
"""The running calls, the innermost last. One list for all threads: hooks may run in the user's."""


def call_user(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """What a function of the user's code returns.

    Raises `UserRaised` for what it raises, except for an interrupt, and `InternalError` for the
    first fault of mha inside the call; what mha refuses there is raised as `MhaError`.
    """
    call = UserCall()
    raised = None
    _running.append(call)
    try:
        result = function(*args, **kwargs)
    except InternalError:
        raise
    except (Exception, SystemExit) as fault:
        raised = fault
    finally:
        _running.remove(call)
    if call.fault is None and raised is not None and _is_of_mha(raised):
        call.fault = raised
    try:
        call.end()
        if raised is not None:
            raise UserRaised(raised) from raised
        return result
    finally:
        del call, raised  # they hold this frame, and with it the tensors of the call


@contextmanager
def calls_of_user() -> Iterator[UserCall]:
    """A context in which users call their own code, while mha watches. It raises the first fault of
    mha, as `call_user` does, at its end, or before by `UserCall.end`.
    """
    call = UserCall()
    _running.append(call)
    try:
        yield call
    finally:
        _running.remove(call)
        call.end()


_ROOMS = tuple(
    os.path.join(str(Path(__file__).parents[1] / room), "")
    for room in ("usercode", "models", "commands")
)


def _is_of_mha(fault: BaseException) -> bool:
    """Whether code of mha raised an exception by itself, where `ours` does not wrap it."""
    file = ""
    for frame, _ in traceback.walk_tb(fault.__traceback__):
        file = frame.f_code.co_filename
    return file.startswith(_ROOMS) and file != __file__


# ------------------------------------------------------------------------------- inside of the call


class _ForUser(BaseException):
    """Carries an exception past `ours` to the user's code."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__()
        self.fault = fault


def for_user(fault: BaseException) -> BaseException:
    """An exception that a function of `ours` raises on purpose, for the user's code to see."""
    return _ForUser(fault)


def on_behalf(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """What a function returns that the user's code called, or that mha calls in its place inside of
    `ours`: what it raises is the user's.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as fault:
        raise _ForUser(fault) from None


def ours(instead: Callable[..., Any] | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Wraps a function of mha that the user's code, or torch inside it, calls: what it raises is
    kept for `call_user`, and the user's code gets what `instead` returns, or None, as in every
    later call. An exception `for_user` goes on to the user's code. Outside of a call of the user's
    code, as in mha's own passes, there is nobody to keep a fault for: it is raised.
    """

    def wrapped(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> Any:
            call = _running[-1] if _running else None
            if call is None or call.fault is None:
                try:
                    return function(*args, **kwargs)
                except _ForUser as passed:
                    raised = passed.fault
                except Exception as fault:
                    if call is None:
                        raise
                    call.fault = fault
                    raised = None
                if raised is not None:
                    try:
                        raise raised
                    finally:
                        del raised  # it holds this frame
            return None if instead is None else instead(*args, **kwargs)

        return guarded

    return wrapped


def plainly(_mode: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What a function of torch returns without the mode that watches it."""
    return func(*args, **(kwargs or {}))
