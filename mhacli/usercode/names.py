"""Translates the names in corrected expressions into the names that the user's code uses."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from mhacli.usercode.arguments import role_of
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import read_name

_PARTS: Mapping[str, str] = {
    "q": "self.q_proj", "k": "self.k_proj", "v": "self.v_proj", "qkv": "self.qkv", "o": "self.out_proj",
}  # fmt: skip
"""The projection of each role in corrected expressions."""
_NO_SIZES: Mapping[str, int | None] = {}
_SHAPE = ("batch", "length", "d_model")
_CALLS = ("forward", "__call__")


def function_around(line: SourceLine) -> ast.FunctionDef | None:
    """The innermost function around a line; None outside functions and for unreadable files."""
    if line.file is None or line.line is None:
        return None
    try:
        tree = ast.parse(Path(line.file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and is_within(line, node)]
    return max(functions, key=lambda node: node.lineno, default=None)


def is_within(line: SourceLine, function: ast.FunctionDef) -> bool:
    """Whether a line of the same file is inside a function."""
    return line.line is not None and function.lineno <= line.line <= (function.end_lineno or 0)


def names_within(
    function: ast.FunctionDef,
    module: nn.Module | None,
    parts: Sequence[str],
    sizes: Mapping[str, int | None] = _NO_SIZES,
) -> dict[str, str]:
    """Maps each name in corrected expressions, such as `n_heads`, to the user's name in a function, such as `self.n_head`.
    `parts` are the names of the projections, `sizes` the sizes of the layer by their roles."""
    shapes = (shape for node in ast.walk(function) if isinstance(node, ast.Assign) and (shape := _unpacked_shape(node)))
    names = {plain: name for plain, name in zip(_SHAPE, next(shapes, ()), strict=False) if name != "_"}
    first, *others = [argument.arg for argument in function.args.args] or [""]
    if first != "self" or module is None:
        return names
    rows = {"x": others[0]} if others and function.name in _CALLS else {}
    by_value = dict(_sizes_by_value(function, module, sizes))
    return names | rows | by_value | dict(_sizes(module)) | dict(_projections(parts))


def _sizes_by_value(
    function: ast.FunctionDef, module: nn.Module, sizes: Mapping[str, int | None]
) -> Iterator[tuple[str, str]]:
    """Attributes without a role by their name that a function uses, if only one of them has the value of a size."""
    used = {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    values = {name: value for name, value in vars(module).items() if name in used and role_of(name) is None}
    for role, size in sizes.items():
        same = [name for name, value in values.items() if type(value) is int and value == size]
        if len(same) == 1:
            yield role, f"self.{same[0]}"


def mentions(function: ast.FunctionDef, word: str) -> bool:
    """Whether a name or an attribute in a function contains a word."""
    nodes = ast.walk(function)
    names = [node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in nodes]
    return any(word in name.lower() for name in names)


def _sizes(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in vars(module).items():
        role = role_of(name)
        if role in ("n_heads", "n_kv_heads", "d_head", "d_model") and isinstance(value, int):
            yield role, f"self.{name}"


def _projections(parts: Sequence[str]) -> Iterator[tuple[str, str]]:
    for part in parts:
        name = re.sub(r"\.(weight|bias)$", "", part)
        plain = _PARTS.get(read_name(name)[0])
        if plain is not None and all(piece.isidentifier() for piece in name.split(".")):
            yield plain, f"self.{name}"


def _unpacked_shape(node: ast.Assign) -> tuple[str, ...]:
    """The three names of `b, t, d = x.shape` or `x.size()`; empty for anything else."""
    value = node.value.func if isinstance(node.value, ast.Call) and not node.value.args else node.value
    is_shape = isinstance(value, ast.Attribute) and value.attr in ("shape", "size")
    names = [target.id for target in getattr(node.targets[0], "elts", ()) if isinstance(target, ast.Name)]
    return tuple(names) if is_shape and len(names) == len(_SHAPE) else ()


def in_user_names(expression: str, names: Mapping[str, str]) -> str:
    """A corrected expression with the user's names. Comments stay as they are.

    >>> in_user_names("z.reshape(batch, n_heads * d_head)  # z is whole", {"z": "y", "n_heads": "self.h"})
    'y.reshape(batch, self.h * d_head)  # z is whole'
    """
    code, sign, comment = expression.partition("#")
    return (
        re.sub(r"(?<![\w.'\"])(?:self\.)?[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), code)
        + sign
        + comment
    )


def assigned_names(source: str) -> list[str]:
    """The names that a line of code assigns."""
    try:
        parsed = ast.parse(source.strip())
    except SyntaxError:
        return []
    statement = parsed.body[0] if parsed.body else None
    if not isinstance(statement, ast.Assign):
        return []
    target = statement.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return [name.id for name in names if isinstance(name, ast.Name)]


def names_on(line: SourceLine, letter: str) -> dict[str, str]:
    """The names on a line that projects rows, such as `value = self.k_proj(value)`: the variable of a letter, and `x`, the rows.
    Empty for any other line."""
    try:
        statement = ast.parse(line.source.strip()).body[0]
    except (SyntaxError, IndexError):
        return {}
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and node.args]
    rows = [call.args[0] for call in calls if re.fullmatch(r"self(\.\w+)+", ast.unparse(call.func))]
    if not isinstance(target, ast.Name) or not rows or not isinstance(rows[0], ast.Name):
        return {}
    return {letter: target.id, "x": rows[0].id}


def is_read_only_with(function: Callable[..., object], parameter: str, others: Sequence[str]) -> bool:
    """Whether a function reads a parameter only where a condition names one of the others, such as `if others is not None:`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _names(node.test) & {*others}]
    inside = {id(part) for node in conditions for statement in node.body for part in ast.walk(statement)}
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == parameter]
    return bool(reads) and all(id(node) in inside for node in reads)


def _names(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
