"""Conditions on a query position `q` and a key position `k`, which select cells of the pattern (`--where`).

A condition is written in a part of Python's notation:

- `q` and `k` are positions, counted from 0 in their own texts; whole numbers; `a + b`, `a - b`, `a * b`, `a // b`, `a % b`
  (rounded down, as in Python), `-a`, `abs(a)`;
- `tok[k]`, `tok[q - 1]`, `tok[0]` are tokens: of the queries' text if the position depends on `q`, else of the keys' text;
  `"the"` is the token with that text;
- `== != < <= > >=` compare numbers, and may be chained; `==` and `!=` compare tokens; `tok[k] in ("a", "b")`, `not in`;
- `and`, `or`, `not` and parentheses.

The text is parsed, never executed. A token outside the text and a division by zero have no value, and every comparison
with them is false.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final, Literal

from mhacli.errors import UsageError

INDUCTION: Final = "tok[k - 1] == tok[q] and k - 1 != q"
"""The token after the same token elsewhere. Source: Olsson et al. 2022, "In-context Learning and Induction Heads"."""

MAX_CHARACTERS: Final = 500
MAX_DEPTH: Final = 50
LITERALS_BELOW: Final = 10**9
PLACES_BELOW: Final = 2**31
NUMBERS_BELOW: Final = 2**63
"""The bound of int64. A condition that could exceed it at any position is refused, so that no number overflows."""

Kind = Literal["condition", "whole number", "token", "list of words"]
Operation = Callable[[Any, Any], Any]
OPERATIONS: Final[dict[str, Operation]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod
}  # fmt: skip
RELATIONS: Final[dict[str, Operation]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_COMPARABLE: dict[tuple[Kind, Kind], Collection[str]] = {
    ("whole number", "whole number"): RELATIONS, ("token", "token"): ("==", "!="), ("token", "list of words"): ("in", "not in")
}  # fmt: skip
_COMPARISONS = "numbers compare by == != < <= > >=, tokens by == and !=, a token with a list of words by in and not in"
_HINT = (
    'q and k are positions, tok[k] is the token at k, "the" is a token by its text; operators are + - * // % abs, '
    "== != < <= > >= in, and or not; for example: tok[k] == tok[q] and k < q"
)


@dataclass(frozen=True)
class Condition:
    """A condition: its source text and its syntax tree, which has been checked."""

    text: str
    body: ast.expr = field(compare=False, repr=False)

    @property
    def words(self) -> frozenset[str]:
        """The tokens that the condition names."""
        parts = ast.walk(self.body)
        return frozenset(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))

    def holds(self, cells: Any) -> Any:
        """Where the condition holds. `cells` calculates with its own types of values, as
        `mhacli.attention.conditions.ValuesOfBlock` does."""
        return _evaluated(self.body, cells)

    def largest(self, position: int) -> int:
        """A bound of the magnitude of all numbers if no position exceeds `position`."""
        parts = [
            part for part in ast.walk(self.body) if isinstance(part, ast.BinOp | ast.Constant) and not _is_token(part)
        ]
        most: int = max([position, *(_evaluated(part, _bounds(position)) for part in parts)])
        return most


def parse_condition(text: str) -> Condition:
    """The condition in `text`, stripped of outer spaces. Raises `UsageError` that quotes the faulty part."""
    if len(text) > MAX_CHARACTERS:
        raise _refused(f"the condition has {len(text)} characters, at most {MAX_CHARACTERS} are read")
    text = text.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # about "\d" and "1or 2", which later versions of Python forbid
            body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _refused(f"{text[:80]!r} is not one expression in Python's notation") from None
    depth, level = 0, [body]
    while level:
        depth += 1
        level = [child for parent in level for child in ast.iter_child_nodes(parent) if isinstance(child, ast.expr)]
    if depth > MAX_DEPTH:
        raise _refused(f"the condition is nested {depth} deep, at most {MAX_DEPTH} are read")
    _require([body], "condition")
    return Condition(text, body)


def _refused(fault: str, node: ast.expr | None = None) -> UsageError:
    part = "" if node is None else f"{ast.unparse(node)[:80]!r} "
    return UsageError(f"--where: {part}{fault}", hint=_HINT)


def _kind(node: ast.expr) -> Kind:
    """What a part is. Raises `UsageError` unless it and all parts within it are correct."""
    match node:
        case ast.BoolOp(values=parts):
            return _require(parts, "condition")
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return _require([part], "condition")
        case ast.Compare():
            operands = [(part, _kind(part)) for part in (node.left, *node.comparators)]
            for op, ((left, kind), (_, other)) in zip(node.ops, pairwise(operands), strict=True):
                if _SIGNS.get(type(op)) not in _COMPARABLE.get((kind, other), ()):
                    raise _refused(f"compares {ast.unparse(left)!r} wrongly: {_COMPARISONS}", node)
            return "condition"
        case ast.Tuple(elts=words) | ast.List(elts=words) if all(isinstance(word, ast.Constant) for word in words):
            _require(words, "token")
            return "list of words"
        case ast.Constant(value=str()):
            return "token"
        case ast.Subscript(value=ast.Name(id="tok"), slice=position):
            _require([position], "whole number")
            if _axes(position) == {"q", "k"}:
                raise _refused("depends on both q and k: a position in tok[…] depends on one of them", node)
            return "token"
        case ast.BinOp(left, op, right) if type(op) in _SIGNS:
            _require([left, right], "whole number")
            if isinstance(op, ast.FloorDiv | ast.Mod) and not _axes(right) and _evaluated(right, _NUMBERS) == 0:
                raise _refused("divides by 0", node)
            if _evaluated(node, _bounds(PLACES_BELOW - 1)) >= NUMBERS_BELOW:
                raise _refused("can exceed 2^63", node)
            return "whole number"
        case ast.UnaryOp(op=ast.USub(), operand=part) | ast.Call(ast.Name(id="abs"), [part], []):
            return _require([part], "whole number")
        case ast.Name(id="q" | "k"):
            return "whole number"
        case ast.Constant(value=value) if type(value) is int and value < LITERALS_BELOW:
            return "whole number"
    raise _refused(f"is no position, no whole number below {LITERALS_BELOW}, no token and no comparison", node)


def _require(parts: Iterable[ast.expr], kind: Kind) -> Kind:
    """The kind. Raises `UsageError` unless all parts are of it."""
    for part in parts:
        if _kind(part) != kind:
            raise _refused(f"is not a {kind}", part)
    return kind


def _is_token(node: ast.expr) -> bool:
    """Whether a correct part is a token."""
    return isinstance(node, ast.Subscript) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _axes(node: ast.AST) -> set[str]:
    """The axes on whose positions a part depends."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & {"q", "k"}


def _evaluated(node: ast.expr, cells: Any) -> Any:
    """The value of a part in the cells."""
    match node:
        case ast.BoolOp():
            join = cells.all_of if isinstance(node.op, ast.And) else cells.any_of
            return join(_evaluated(part, cells) for part in node.values)
        case ast.UnaryOp(op=ast.Not()):
            return cells.negate(_evaluated(node.operand, cells))
        case ast.Compare():
            return cells.all_of(_compared(node, cells))
        case ast.Constant(value=str(text)):
            return cells.word(text)
        case ast.Tuple() | ast.List():
            return [part.value for part in node.elts if isinstance(part, ast.Constant)]
        case ast.Subscript():
            return cells.token("q" if "q" in _axes(node) else "k", _evaluated(node.slice, cells))
        case ast.Name(id=axis):
            return cells.position(axis)
        case ast.Constant(value=number):
            return cells.number(number)
        case ast.Call(args=[inner]):
            return cells.absolute(_evaluated(inner, cells))
        case ast.UnaryOp(operand=inner):
            return cells.calculate("-", cells.number(0), _evaluated(inner, cells), may_divide_by_0=False)
        case ast.BinOp(left, op, right):
            may_divide_by_0 = isinstance(op, ast.FloorDiv | ast.Mod) and bool(_axes(right))
            sides = _evaluated(left, cells), _evaluated(right, cells)
            return cells.calculate(_SIGNS[type(op)], *sides, may_divide_by_0=may_divide_by_0)
    raise AssertionError(ast.dump(node))


def _compared(node: ast.Compare, cells: Any) -> Iterator[Any]:
    """Where each comparison of a chain holds."""
    compare = cells.compare_tokens if _is_token(node.left) else cells.compare_numbers
    values = pairwise([_evaluated(part, cells) for part in (node.left, *node.comparators)])
    for op, (left, right) in zip(node.ops, values, strict=True):
        relation = _SIGNS[type(op)]
        yield (cells.is_listed if relation in ("in", "not in") else compare)(relation, left, right)


_NUMBERS = SimpleNamespace(number=int, absolute=abs, calculate=lambda sign, a, b, **_: OPERATIONS[sign](a, b))
"""Cells of a number that depends on no position: it is its value."""


def _bounds(position: int) -> SimpleNamespace:
    """Cells in which a number is the bound of its magnitude if no position exceeds `position`."""

    def calculate(sign: str, a: int, b: int, **_: bool) -> int:
        return {"+": a + b, "-": a + b, "*": a * b, "//": a, "%": b}[sign]

    return SimpleNamespace(position=lambda _: position, number=int, absolute=int, calculate=calculate)
