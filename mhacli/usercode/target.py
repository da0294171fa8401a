"""Finds the class or function that a user names, in a file or module. Only the user's own imports
load torch.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from mhacli.errors import MhaError, UsageError, first_names
from mhacli.io.files import read_whole

from .door import UserRaised, call_user
from .faults import user_code_error

MAX_SOURCE_BYTES = 16 << 20
_MOST_LISTED = 12
_FORM = "FILE.py:NAME or package.module:NAME"

INTERPRET = "TRITON_INTERPRET"
"""The variable that triton reads when it is imported."""
DEFAULT_TIME_LIMIT_S = 5.0
"""Seconds for one call, and for importing: half of the ten seconds within which a command must
refuse bad input."""

Mode = Literal["self", "cross", "causal", "full"]
"""Self-attention or cross-attention, for attention with an optional context."""


@dataclass(frozen=True)
class Choice:
    """A valid design choice of user code; `name` is stable."""

    name: str
    message: str


@dataclass(frozen=True)
class TargetRequest:
    """One class or function, `FILE.py:NAME` or `package.module:NAME`, and how to build and call it.

    `arguments` and `call_arguments` are `(name, value as typed)` for the constructor and for each
    call; `example` is a call of it, as a function of the target and a length. With `keeps_sizes`
    default widths stay, however large.
    """

    target: str
    arguments: tuple[tuple[str, str], ...] = ()
    call_arguments: tuple[tuple[str, str], ...] = ()
    causal: bool = False
    device: str = "cpu"
    seed: int = 0
    example: str | None = None
    keeps_sizes: bool = False


def split_target(target: str) -> tuple[str, str]:
    """The file or module, and the dotted name in it. Raises `UsageError` for a malformed target."""
    location, colon, name = target.rpartition(":")
    if not colon:
        beside = targets_beside(target) if target.endswith(".py") else []
        hint = first_names(beside, _MOST_LISTED) or _FORM
        raise UsageError(f"{target[:200]!r} is not of the form {_FORM}", hint=hint)
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(
            f"{name[:200]!r}, after the last colon, is not the name of a class or function",
            hint=_FORM,
        )
    if not _is_file(location) and not all(part.isidentifier() for part in location.split(".")):
        raise UsageError(
            f"{location[:200]!r}, before the last colon, is neither a file nor a module", hint=_FORM
        )
    return location, name


def targets_beside(location: str, name: str = "") -> list[str]:
    """Targets for the other classes, or functions, of the same file. The file is parsed, not
    run.
    """
    body = _parsed(location).body
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return [f"{location}:{other}" for other in classes or functions if other != name]


def _parsed(location: str) -> ast.Module:
    """A file as a syntax tree, empty if it cannot be read or parsed."""
    try:
        return ast.parse(read_whole(location, MAX_SOURCE_BYTES))
    except (MhaError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def main_part(location: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements of a script below `if __name__ == "__main__":`, and the others."""
    of_main = list[ast.stmt]()
    others = list[ast.stmt]()
    for node in _parsed(location).body:
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            of_main += node.body
        else:
            others.append(node)
    return of_main, others


def imports_triton(file: str) -> bool:
    """Whether a file imports triton, or another file of its folder that does. They are parsed, not
    run.
    """
    files = [Path(file)]
    names = set[str]()
    for path in files:
        for node in ast.walk(_parsed(str(path))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                names |= {module.partition(".")[0] for module in modules if module}
        beside = [path.with_name(f"{name}.py") for name in names]
        files += [other for other in beside if other not in files and other.is_file()]
    return "triton" in names


def require_readable(target: str) -> None:
    """Validates a target without importing it. Raises `UsageError` for a malformed target and
    `MhaError` for an unreadable file.
    """
    location, _ = split_target(target)
    if _is_file(location):
        _source_of(location)


def _is_file(location: str) -> bool:
    return location.endswith(".py") or "/" in location or os.sep in location


def _source_of(location: str) -> bytes:
    """The content of a Python file."""
    if not os.path.lexists(location):
        beside = first_names(sorted(map(str, Path(location).parent.glob("*.py"))), _MOST_LISTED)
        hint = f"there is {beside}" if beside else None
        raise MhaError(f"{location} does not exist", hint=hint, code="unreadable", path=location)
    source = read_whole(location, MAX_SOURCE_BYTES)
    if not location.endswith(".py"):
        message = f"{location} is not a Python file: its name does not end in .py"
        raise MhaError(message, code="unreadable", path=location)
    return source


# --------------------------------------------------------------------------------------- the object


_objects: dict[str, Any] = {}
"""Objects registered by `naming`, by name."""


@contextlib.contextmanager
def naming(thing: Any) -> Iterator[str]:
    """A target `module:NAME` that resolves to this very object inside the context."""
    definition = _definition(thing)
    name = f"{definition.__module__}:{definition.__qualname__.rpartition('>.')[2]}"
    while name in _objects:
        name += "_"
    _objects[name] = thing
    try:
        yield name
    finally:
        del _objects[name]


def named_object(name: str) -> Any:
    """The object that `naming` gives this name; None without one."""
    return _objects.get(name)


def find_target(target: str) -> Any:
    """The class, function or instance that `target` names. Importing its file runs the file's code.

    Raises `UsageError` for a malformed target, and `MhaError` for a missing name or an exception in
    the user's code.
    """
    if target in _objects:
        return _objects[target]
    location, name = split_target(target)
    module = _import(location)
    problem = ""
    try:
        thing = call_user(attrgetter(name), module)
    except UserRaised as raised:
        if not isinstance(raised.fault, AttributeError):
            raise
        problem = f"{location} has no {name}"
    else:
        if not may_be_examined(thing):
            problem = (
                f"{name} of {location} is a value of type {type(thing).__name__}, not a class or"
                " function"
            )
    if problem:
        path = getattr(module, "__file__", None)
        beside = targets_beside(location if _is_file(location) else path or "")
        raise MhaError(
            problem, hint=first_names(beside, _MOST_LISTED) or None, code="no-target", path=path
        )
    return thing


def may_be_examined(thing: object) -> bool:
    """Whether an object can be called, or is a mask: a tensor, or that of FlexAttention."""
    names = ("forward", "mask_mod", "is_floating_point")
    return callable(thing) or any(hasattr(thing, name) for name in names)


def source_file(thing: Any) -> str | None:
    """The absolute path of the Python file of a class, a function, or an instance's class."""
    try:
        path = inspect.getsourcefile(_definition(thing))
    except (TypeError, OSError):
        return None
    return os.path.abspath(path) if path and os.path.isfile(path) else None


def _definition(thing: Any) -> Any:
    """The class or function with the source code: a partial's function, an instance's class."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return type(thing)
    return inspect.unwrap(getattr(thing, "__func__", thing))


# --------------------------------------------------------------------------------------- the import


def _import(location: str) -> ModuleType:
    """The module of a file, or the module of this name."""
    sys.path.insert(0, "")  # the working directory, if it still exists
    try:
        if _is_file(location):
            return _import_file(location, _source_of(location))
        return call_user(importlib.import_module, location)
    except UserRaised as raised:
        fault = raised.fault
        missing = (fault.name or "") if isinstance(fault, ModuleNotFoundError) else ""
        code = "import"
        advice = None
        if f"{location}.".startswith(f"{missing}."):
            code = "no-target"
            advice = "a file is named by its path, such as folder/file.py:NAME"
        elif missing:
            install = f"{sys.executable} -m pip install {missing.partition('.')[0]}"
            advice = (
                f"{install} may install it for mha; for your own module set PYTHONPATH to the"
                " folder that holds it"
            )
        path = os.path.abspath(location) if _is_file(location) else None
        raise user_code_error(
            f"{location} could not be imported", fault, path, code=code, advice=advice
        ) from fault


def _import_file(location: str, source: bytes) -> ModuleType:
    """A file as a module, in its package if it is in one, under a name that no other file has."""
    import torch  # the process of the user's code has loaded it

    if imports_triton(location) and not torch.cuda.is_available():
        os.environ.setdefault(INTERPRET, "1")
    path = Path(os.path.abspath(location))
    packages = itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), path.parents)
    names = [*reversed([folder.name for folder in packages]), path.stem.replace(".", "_")]
    sys.path.insert(0, str(path.parents[len(names) - 1]))
    # a file of a package may import its siblings as top-level modules
    sys.path.append(str(path.parent))
    if len(names) > 1:
        call_user(importlib.import_module, ".".join(names[:-1]))
    name = ".".join(names)
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name += "_"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need their module while it runs
    # bytecode on disk may be out of date
    code = call_user(compile, source, path, "exec", dont_inherit=True)
    call_user(exec, code, vars(module))
    return module
