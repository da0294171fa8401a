"""What the author of a class or function says of it: docstrings and comments."""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
import textwrap
import tokenize
from typing import Any, Final

_METHODS: Final = ("__init__", "forward", "__call__")
_NOT_THEIRS: Final = ("torch.nn.modules.module", "builtins", "typing", "abc")


def source_file(thing: Any) -> str | None:
    """The absolute path of the Python file that a class or function, or an instance's class, is written in."""
    try:
        found = inspect.getsourcefile(_written(thing))
    except (TypeError, OSError):
        return None
    return os.path.abspath(found) if found and os.path.isfile(found) else None


def documentation_of(thing: Any) -> str:
    """Docstrings of the class, its constructor and its call, or of the function; its comments; the docstring of its module."""
    written = _written(thing)
    pieces = [vars(written).get("__doc__") if inspect.isclass(written) else getattr(written, "__doc__", None)]
    if inspect.isclass(written):
        pieces += [_docstring_of_method(written, name) for name in _METHODS]
    pieces += [inspect.getcomments(written) if source_file(thing) else None, _comments_in(written)]
    pieces.append(getattr(sys.modules.get(getattr(written, "__module__", None) or ""), "__doc__", None))
    return "\n\n".join(inspect.cleandoc(piece) for piece in pieces if isinstance(piece, str) and piece.strip())


def _written(thing: Any) -> Any:
    """The class or function whose source is meant: of a partial its function, of an instance its class."""
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
        except ValueError:  # wrapped in a circle
            return thing
    return type(thing)


def _docstring_of_method(cls: type, name: str) -> str | None:
    """What the class says of a method, or what a class says that it has the method from; nothing of `nn.Module`'s own."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    if owner is None or owner.__module__ in _NOT_THEIRS:
        return None
    return getattr(vars(owner)[name], "__doc__", None)


def _comments_in(written: Any) -> str | None:
    """The comments within the source of a class or function, a line each."""
    try:
        source = textwrap.dedent(inspect.getsource(written))
    except (TypeError, OSError, SyntaxError, IndexError, tokenize.TokenError):
        return None
    comments = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments.append(token.string.lstrip("#").strip())
    except (tokenize.TokenError, SyntaxError):  # the source of a lambda need not be whole
        pass
    return "\n".join(comments)
