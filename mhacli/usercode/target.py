"""Finds the class or function that a user names, in a file or module. Only the user's own imports load torch."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import io
import os
import pkgutil
import shlex
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, Literal, NamedTuple

from mhacli.errors import MhaError, UsageError, first_names
from mhacli.io.files import read_whole
from mhacli.usercode.process import shown_path, user_code_error

MAX_SOURCE_BYTES: Final = 16 << 20
_MOST_LISTED: Final = 12
_FORM: Final = "FILE.py:NAME or package.module:NAME"

DEFAULT_TIME_LIMIT_S: Final = 5.0
"""Seconds for one call, and for importing: half of the ten seconds within which a command must refuse bad input."""

Mode = Literal["self", "cross"]
"""Self-attention or cross-attention, for attention with an optional context."""


@dataclass(frozen=True)
class Choice:
    """A valid design choice of user code; `name` is stable."""

    name: str
    message: str


@dataclass(frozen=True)
class TargetRequest:
    """One class or function, `FILE.py:NAME` or `package.module:NAME`, and how to build and call it.

    `arguments` and `call_arguments` are `(name, value as typed)` for the constructor and for each call; `example`
    is a call of it, as a function of the target and a length.
    """

    target: str
    arguments: tuple[tuple[str, str], ...] = ()
    call_arguments: tuple[tuple[str, str], ...] = ()
    causal: bool = False
    device: str = "cpu"
    seed: int = 0
    example: str | None = None


class Target(NamedTuple):
    """A target: its name as the user typed it, the class, function or instance, the absolute path of its Python file (None if
    there is none), and its docstrings and comments."""

    name: str
    thing: Any
    file: str | None
    documentation: str


def split_target(target: str) -> tuple[str, str]:
    """The file or module, and the dotted name in it. Raises `UsageError` for a malformed target."""
    location, colon, name = target.rpartition(":")
    if not colon:
        raise UsageError(f"{target[:200]!r} is not of the form {_FORM}", hint=_without_colon(target))
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{name[:200]!r}, after the last colon, is not the name of a class or function", hint=_FORM)
    if not is_file(location) and not all(part.isidentifier() for part in location.split(".")):
        raise UsageError(f"{location[:200]!r}, before the last colon, is neither a file nor a module", hint=_FORM)
    return location, name


def is_file(location: str) -> bool:
    """Whether the part before the colon is a file rather than a module."""
    return location.endswith(".py") or "/" in location or os.sep in location


def require_readable(target: str) -> None:
    """Validates a target without importing it. Raises `UsageError` for a malformed target and `MhaError` for an unreadable
    file."""
    location, _ = split_target(target)
    if is_file(location):
        _require_source(location)


def find_target(target: str) -> Target:
    """The class, function or instance that `target` names. Importing its file runs the file's code.

    Raises `UsageError` for a malformed target, and `MhaError` for a missing name or an exception in the user's code.
    """
    if target in _objects:
        return Target(target, _objects[target], source_file(_objects[target]), documentation_of(_objects[target]))
    location, name = split_target(target)
    module = _import_file(location) if is_file(location) else _import_module(location)
    thing = _thing_named(module, location, name)
    if inspect.ismodule(thing):
        raise MhaError(
            f"{name} of {location} is a module, not a class or function",
            hint=_listed(module, location) if is_file(location) else f"{thing.__name__}:NAME",
            code="no-target",
        )
    if not (callable(thing) or hasattr(thing, "forward")):
        raise MhaError(
            f"{name} of {location} is a value of type {type(thing).__name__}, not a class or function",
            hint=_listed(module, location),
            code="no-target",
        )
    return Target(target, thing, source_file(thing), documentation_of(thing))


_objects: dict[str, Any] = {}
"""Objects registered by `naming`, by name."""


@contextlib.contextmanager
def naming(thing: Any) -> Iterator[str]:
    """A target `module:NAME` that resolves to this very object inside the context."""
    definition = _defining_object(thing)
    name = f"{definition.__module__}:{definition.__qualname__.rpartition('>.')[2]}"
    while name in _objects:
        name += "_"
    _objects[name] = thing
    try:
        yield name
    finally:
        del _objects[name]


def is_module_instance(thing: object) -> bool:
    """Whether the object is an instance of `nn.Module`."""
    base = _module_class()
    return base is not None and isinstance(thing, base)


# ---------------------------------------------------------------------------------------------------------- the form


def _without_colon(target: str) -> str:
    """A suggestion for a target without a colon."""
    names = _classes_of(target) if target.endswith(".py") else []
    if names:
        more = [f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
        return "; ".join([*(f"{target}:{name}" for name in names[:_MOST_LISTED]), *more])
    module, dot, last = target.rpartition(".")
    is_name = dot and last.isidentifier() and last != "py" and not os.path.exists(target)
    return f"{module}:{last}" if is_name else _FORM


def _classes_of(path: str) -> list[str]:
    """The classes of a file, or its functions if it has none. The file is parsed, not run."""
    try:
        body = ast.parse(read_whole(path, MAX_SOURCE_BYTES)).body
    except (MhaError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return classes or [node.name for node in body if isinstance(node, ast.FunctionDef)]


def targets_beside(location: str, name: str) -> list[str]:
    """Targets for the other classes, or functions, of the same file. The file is parsed, not run."""
    return [f"{location}:{other}" for other in _classes_of(location) if other != name]


# --------------------------------------------------------------------------------------------------------- the import


class _Source(SourceFileLoader):
    """Compiles the current file and ignores cached bytecode, which may be up to a second out of date."""

    def get_code(self, fullname: str) -> CodeType:
        """The code object, compiled now."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _import_file(location: str) -> ModuleType:
    _require_source(location)
    path = os.path.abspath(location)
    root, names = _package_of(Path(path))
    _put_first(_here(), root)
    sys.path.append(os.path.dirname(path))  # a file of a package may import its siblings as top-level modules
    name = ".".join(names)
    try:
        if len(names) > 1 or Path(path).name == "__init__.py":
            module = importlib.import_module(name)
        else:
            module = _run_file(name, path)
    except KeyboardInterrupt:
        raise
    except BaseException as fault:
        advice = None
        if isinstance(fault, ModuleNotFoundError) and fault.name:
            advice = _to_install(fault.name.partition(".")[0])
        elif isinstance(fault, ImportError) and "relative import" in str(fault):
            advice = "name it as PACKAGE.MODULE:NAME from the folder that holds its package"
        raise user_code_error(f"{location} could not be imported", fault, path, code="import", advice=advice) from fault
    loaded = getattr(module, "__file__", None)
    if loaded is None or not os.path.samefile(loaded, path):
        raise MhaError(
            f"{location} cannot be imported as {name}: {shown_path(str(loaded))} has that name already",
            hint="rename its folder",
            code="import",
            path=location,
        )
    return module


_PACKAGES: Final = {
    "cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "skimage": "scikit-image", "yaml": "pyyaml",
    "flash_attn": "flash-attn", "hydra": "hydra-core",
}  # fmt: skip
"""Packages whose name differs from their module's name."""


def _to_install(module: str) -> str:
    """Advice on a missing module: install a package, or set PYTHONPATH."""
    install = f"{shlex.quote(sys.executable)} -m pip install {_PACKAGES.get(module, module)}"
    return f"{install} installs it for mha; for a module of your own set PYTHONPATH to the folder that holds it"


def _run_file(name: str, path: str) -> ModuleType:
    """Runs a file as a module, registered under its name, or under a numbered name if that is taken."""
    base, number = name, 1
    while name in sys.modules:
        if getattr(sys.modules[name], "__file__", None) == path:
            return sys.modules[name]
        number += 1
        name = f"{base}_{number}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need their module while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _import_module(location: str) -> ModuleType:
    _put_first(_here())
    try:
        return importlib.import_module(location)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as fault:
        missing = fault.name or ""
        if location != missing and not location.startswith(f"{missing}."):
            raise user_code_error(f"{location} could not be imported", fault, None, code="import") from fault
        near = difflib.get_close_matches(missing, _modules_beside(missing), n=3)
        raise MhaError(
            f"module {location} does not exist" + (f": there is no module {missing}" if missing != location else ""),
            hint=f"did you mean {' or '.join(near)}?"
            if near
            else "a file is named by its path, such as folder/file.py:NAME",
            code="no-target",
        ) from fault
    except BaseException as fault:
        raise user_code_error(f"{location} could not be imported", fault, None, code="import") from fault


def _modules_beside(missing: str) -> list[str]:
    """Modules next to a missing module, as candidates for a suggestion."""
    parent, _, _ = missing.rpartition(".")
    folders: Iterable[str] | None = getattr(sys.modules.get(parent), "__path__", None) if parent else [_here()]
    names = [name for _, name, _ in pkgutil.iter_modules(list(folders or ()))]
    return [f"{parent}.{name}" for name in names] if parent else [*names, "torch"]


def _require_source(location: str) -> None:
    if not os.path.lexists(location):
        folder, name = os.path.split(location)
        near = difflib.get_close_matches(name, [path.name for path in _python_files(folder)], n=3)
        hint = f"did you mean {' or '.join(os.path.join(folder, other) for other in near)}?" if near else None
        raise MhaError(f"{location} does not exist", hint=hint, code="unreadable", path=location)
    source = read_whole(location, MAX_SOURCE_BYTES)
    if not location.endswith(".py"):
        raise MhaError(
            f"{location} is not a Python file: its name does not end in .py", code="unreadable", path=location
        )
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        source.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as fault:
        raise MhaError(
            f"{location} cannot be decoded: {fault}",
            hint="save it as UTF-8, or name its encoding in the first line",
            code="encoding",
            path=location,
        ) from fault


def _python_files(folder: str) -> list[Path]:
    try:
        return sorted(Path(folder or ".").glob("*.py"))[:1000]
    except OSError:
        return []


def _package_of(path: Path) -> tuple[str, list[str]]:
    """The import root of a file and its dotted name from there."""
    names = [] if path.stem == "__init__" else [path.stem.replace(".", "_")]
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        names.insert(0, folder.name)
        folder = folder.parent
    return str(folder), names or [path.stem]


def _put_first(*folders: str) -> None:
    """Inserts folders at the front of the import path; the last one ends up first."""
    for folder in filter(None, folders):
        if sys.path[:1] != [folder]:
            sys.path.insert(0, folder)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # the working directory is deleted
        return ""


# ----------------------------------------------------------------------------------------------------------- the name


def _thing_named(module: ModuleType, location: str, name: str) -> Any:
    thing: Any = module
    for depth, part in enumerate(name.split(".")):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            raise _missing(module, thing, location, name.split(".")[: depth + 1]) from None
        except Exception as fault:
            raise user_code_error(f"{part} of {location} could not be read", fault, None, code="import") from fault
    return thing


def _missing(module: ModuleType, owner: Any, location: str, parts: list[str]) -> MhaError:
    names = _offered(owner)
    public = [name for name in _public(owner) if not inspect.ismodule(vars(owner)[name])]
    near = difflib.get_close_matches(parts[-1], list(dict.fromkeys([*names, *public])), n=3)
    holder = location if owner is module else f"{'.'.join(parts[:-1])} of {location}"
    listed = first_names(names, _MOST_LISTED)
    before = "".join(f"{part}." for part in parts[:-1])
    return MhaError(
        f"{holder} has no {parts[-1]}, only {listed}"
        if listed
        else f"{holder} has no {parts[-1]}, and no class or function",
        hint=f"did you mean {' or '.join(f'{location}:{before}{other}' for other in near)}?" if near else None,
        code="no-target",
        path=getattr(module, "__file__", None),
    )


def _listed(module: ModuleType, location: str) -> str | None:
    names = _offered(module)[:_MOST_LISTED]
    return "; ".join(f"{location}:{name}" for name in names) or None


def _public(owner: Any) -> list[str]:
    return [name for name in vars(owner) if not name.startswith("_")] if hasattr(owner, "__dict__") else []


def _offered(owner: Any) -> list[str]:
    """Candidate names: modules, then classes, then functions. Names defined in the file itself come first if there are any."""
    home = owner.__name__ if inspect.ismodule(owner) else getattr(owner, "__module__", None)
    things = {name: vars(owner)[name] for name in _public(owner)}
    ranked = {name: _rank(thing) for name, thing in things.items()}
    candidates = [name for name, rank in ranked.items() if rank < len(_RANKS)]
    local = [name for name in candidates if _is_of(things[name], str(home)) or is_module_instance(things[name])]
    return sorted(local or candidates, key=lambda name: ranked[name])


def _is_of(thing: object, home: str) -> bool:
    module = str(getattr(thing, "__module__", None))
    return module == home or module.startswith(f"{home}.")


def _module_class() -> Any:
    """`torch.nn.Module`, if torch is loaded."""
    return getattr(sys.modules.get("torch.nn"), "Module", None)


def _is_module(thing: object) -> bool:
    base = _module_class()
    return base is not None and (isinstance(thing, base) or (inspect.isclass(thing) and issubclass(thing, base)))


_RANKS: Final[tuple[Callable[[object], bool], ...]] = (
    _is_module,
    inspect.isclass,
    lambda thing: inspect.isroutine(thing) or isinstance(thing, functools.partial | staticmethod),
)


def _rank(thing: object) -> int:
    return next((rank for rank, is_such in enumerate(_RANKS) if is_such(thing)), len(_RANKS))


# ------------------------------------------------------------------------------------------------------- documentation


_METHODS: Final = ("__init__", "forward", "__call__")
_LIBRARY_MODULES: Final = ("torch.nn.modules.module", "builtins", "typing", "abc")


def source_file(thing: Any) -> str | None:
    """The absolute path of the Python file of a class, a function, or an instance's class."""
    try:
        path = inspect.getsourcefile(_defining_object(thing))
    except (TypeError, OSError):
        return None
    return os.path.abspath(path) if path and os.path.isfile(path) else None


def documentation_of(thing: Any) -> str:
    """The docstrings of a class, its constructor and its call, or of a function, with its comments and its module's
    docstring."""
    definition = _defining_object(thing)
    pieces = [vars(definition).get("__doc__") if inspect.isclass(definition) else getattr(definition, "__doc__", None)]
    if inspect.isclass(definition):
        pieces += [_docstring_of_method(definition, name) for name in _METHODS]
    pieces += [inspect.getcomments(definition) if source_file(thing) else None, _comments_in(definition)]
    pieces.append(getattr(sys.modules.get(getattr(definition, "__module__", None) or ""), "__doc__", None))
    return "\n\n".join(inspect.cleandoc(piece) for piece in pieces if isinstance(piece, str) and piece.strip())


def _defining_object(thing: Any) -> Any:
    """The class or function with the source code: a partial's function, an instance's class."""
    for _ in range(100):
        if isinstance(thing, functools.partial):
            thing = thing.func
        elif inspect.ismethod(thing):
            thing = thing.__func__
        else:
            break
    if inspect.isclass(thing) or inspect.isroutine(thing):
        try:
            return inspect.unwrap(thing)
        except ValueError:  # circular __wrapped__
            return thing
    return type(thing)


def _docstring_of_method(cls: type, name: str) -> str | None:
    """The docstring of a method, inherited or not, except that of `nn.Module`."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is None or owner.__module__ in _LIBRARY_MODULES:
        return None
    return getattr(vars(owner)[name], "__doc__", None)


def _comments_in(definition: Any) -> str | None:
    try:
        source = textwrap.dedent(inspect.getsource(definition))
    except (TypeError, OSError, SyntaxError, IndexError, tokenize.TokenError):
        return None
    comments = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments.append(token.string.lstrip("#").strip())
    except (tokenize.TokenError, SyntaxError):  # the source of a lambda may be incomplete
        pass
    return "\n".join(comments)
