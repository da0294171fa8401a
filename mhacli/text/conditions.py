"""Conditions on a query position `q` and a key position `k`, which select cells of the pattern (`--where`).

A condition is written in a part of Python's notation:

- `q` and `k` are positions, counted from 0 in their own texts; whole numbers; `a + b`, `a - b`, `a * b`, `a // b`, `a % b`
  (rounded down, as in Python), `-a`, `abs(a)`;
- `tok[k]`, `tok[q - 1]`, `tok[0]` are tokens: of the queries' text if the position depends on `q`, else of the keys' text;
  `"the"` is the token with that text;
- `== != < <= > >=` compare numbers, and may be chained; `==` and `!=` compare tokens; `tok[k] in ("a", "b")`, `not in`;
- `and`, `or`, `not` and parentheses.

The text is parsed, never executed. A token outside the text and a division by zero have no value, and every comparison
with them is false (`mhacli.attention.tiled.conditions` evaluates conditions by implementing `Cells`).
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Literal, Protocol

from mhacli.errors import UsageError

INDUCTION: Final = "tok[k - 1] == tok[q] and k - 1 != q"
"""The token after the same token elsewhere. Source: Olsson et al. 2022, "In-context Learning and Induction Heads"."""

MAX_CHARACTERS: Final = 500
MAX_DEPTH: Final = 50
LITERALS_BELOW: Final = 10**9
PLACES_BELOW: Final = 2**31
NUMBERS_BELOW: Final = 2**63
"""The bound of int64. A condition that could exceed it at any position is refused, so that no number overflows."""

Axis = Literal["q", "k"]
Operation = Callable[[Any, Any], Any]
OPERATIONS: Final[dict[str, Operation]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod
}  # fmt: skip
RELATIONS: Final[dict[str, Operation]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge
}  # fmt: skip


class Cells(Protocol):
    """The queries and keys for which a condition is evaluated.

    The types of the values are up to the implementation; a condition only passes them on.
    """

    def position(self, axis: Axis) -> Any:
        """The positions of the queries or of the keys."""

    def number(self, value: int) -> Any:
        """A whole number."""

    def absolute(self, number: Any) -> Any:
        """The absolute value of a number."""

    def calculate(self, sign: str, left: Any, right: Any, *, may_divide_by_0: bool) -> Any:
        """The result of one of `OPERATIONS`."""

    def token(self, axis: Axis, position: Any) -> Any:
        """The tokens at positions in the queries' or the keys' text."""

    def word(self, text: str) -> Any:
        """The token with this text."""

    def compare_numbers(self, relation: str, left: Any, right: Any) -> Any:
        """Where one of `RELATIONS` holds."""

    def compare_tokens(self, relation: str, left: Any, right: Any) -> Any:
        """Where tokens are equal (`==`), or both exist and differ (`!=`)."""

    def is_listed(self, relation: str, token: Any, words: Sequence[str]) -> Any:
        """Where a token is among the words (`in`), or exists and is not among them (`not in`)."""

    def negate(self, condition: Any) -> Any:
        """Where the condition does not hold."""

    def all_of(self, conditions: Iterable[Any]) -> Any:
        """Where all conditions hold."""

    def any_of(self, conditions: Iterable[Any]) -> Any:
        """Where at least one condition holds."""


Evaluation = Callable[[Cells], Any]


@dataclass(frozen=True)
class Condition:
    """A condition and its source text.

    `holds` evaluates the condition for some cells, and `words` are the tokens that it names. `largest(position)` bounds
    the magnitude of all its numbers if no position exceeds `position`.
    """

    text: str
    holds: Evaluation = field(compare=False)
    words: frozenset[str] = field(compare=False)
    largest: Callable[[int], int] = field(compare=False)

    def __reduce__(self) -> tuple[Callable[[str], Condition], tuple[str]]:
        """How pickle makes it again in another process."""
        return parse_condition, (self.text,)


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
        raise _refused(f"{_quoted(text)} is not one expression in Python's notation") from None
    depth = _depth(body)
    if depth > MAX_DEPTH:
        raise _refused(f"the condition is nested {depth} deep, at most {MAX_DEPTH} are read")
    parser = _Parser()
    try:
        holds = parser.condition(body)
    except _RefusedError as error:
        source = ast.get_source_segment(text, error.node)
        raise _refused(f"{_quoted(text if source is None else source)} {error.fault}") from None
    numbers = tuple(parser.numbers)
    return Condition(
        text, holds, frozenset(parser.words), lambda position: max((n.largest(position) for n in numbers), default=0)
    )


_HINT = (
    'q and k are positions, tok[k] is the token at k, "the" is a token by its text; operators are + - * // % abs, '
    "== != < <= > >= in, and or not; for example: tok[k] == tok[q] and k < q"
)
_SHOWN = 80
_OPERATORS: dict[type[ast.operator], str] = dict(
    zip((ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod), OPERATIONS, strict=True)
)
_RELATIONS: dict[type[ast.cmpop], str] = dict(
    zip((ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE), RELATIONS, strict=True)
)
_LISTED: dict[type[ast.cmpop], str] = {ast.In: "in", ast.NotIn: "not in"}


class _RefusedError(Exception):
    """A faulty part of a condition. `fault` completes a sentence that begins with the part."""

    def __init__(self, fault: str, node: ast.expr) -> None:
        super().__init__(fault)
        self.fault, self.node = fault, node


def _refused(fault: str) -> UsageError:
    return UsageError(f"--where: {fault}", hint=_HINT)


def _quoted(source: str) -> str:
    return repr(source[:_SHOWN])


def _depth(node: ast.expr) -> int:
    """The depth of the syntax tree. Iterative, because recursion would itself need a limit."""
    depth, level = 0, [node]
    while level:
        depth += 1
        level = [child for parent in level for child in ast.iter_child_nodes(parent) if isinstance(child, ast.expr)]
    return depth


@dataclass(frozen=True)
class _Number:
    """A number in a condition.

    `largest(position)` bounds its magnitude if no position exceeds `position`. `axes` are the axes whose positions it
    depends on, and `value` is its constant value, if it has one.
    """

    evaluate: Evaluation
    largest: Callable[[int], int]
    axes: frozenset[Axis] = frozenset()
    value: int | None = None


@dataclass(frozen=True)
class _Tokens:
    """Tokens to compare: those at positions of a text, or one word."""

    evaluate: Evaluation


Words = tuple[str, ...]
_COMPARABLE: dict[tuple[type, ...], Iterable[str]] = {
    (_Number, _Number): RELATIONS,
    (_Tokens, _Tokens): ("==", "!="),
    (_Tokens, tuple): _LISTED.values(),
}


def _constant(value: int) -> _Number:
    return _Number(lambda cells: cells.number(value), lambda _: abs(value), value=value)


class _Parser:
    """Compiles the syntax tree of a condition into functions that evaluate it. Collects its words and numbers."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.numbers: list[_Number] = []

    def condition(self, node: ast.expr) -> Evaluation:
        match node:
            case ast.BoolOp():
                parts = [self.condition(value) for value in node.values]
                if isinstance(node.op, ast.And):
                    return lambda cells: cells.all_of(part(cells) for part in parts)
                return lambda cells: cells.any_of(part(cells) for part in parts)
            case ast.UnaryOp(op=ast.Not()):
                inner = self.condition(node.operand)
                return lambda cells: cells.negate(inner(cells))
            case ast.Compare():
                return self.comparison(node)
        raise _RefusedError("is not a condition such as k < q", node)

    def comparison(self, node: ast.Compare) -> Evaluation:
        nodes = (node.left, *node.comparators)
        operands = [self.operand(part) for part in nodes]
        relations = [(_RELATIONS | _LISTED).get(type(op), "") for op in node.ops]
        for n, relation in enumerate(relations):
            _require_comparable(relation, operands[n : n + 2], nodes[n : n + 2], node)

        def planes(cells: Cells) -> Iterator[Any]:
            compare = cells.compare_numbers if isinstance(operands[0], _Number) else cells.compare_tokens
            values = [part if isinstance(part, tuple) else part.evaluate(cells) for part in operands]
            for relation, (left, right) in zip(relations, pairwise(values), strict=True):
                yield (cells.is_listed if relation in _LISTED.values() else compare)(relation, left, right)

        return lambda cells: cells.all_of(planes(cells))

    def operand(self, node: ast.expr) -> _Number | _Tokens | Words:
        match node:
            case ast.Constant(value=str(text)):
                self.words.add(text)
                return _Tokens(lambda cells: cells.word(text))
            case ast.Tuple() | ast.List():
                texts = tuple(map(_word, node.elts))
                self.words.update(texts)
                return texts
            case ast.Subscript():
                return self.token(node)
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                raise _RefusedError("is a condition, where a number or a token is compared", node)
        return self.number(node)

    def token(self, node: ast.Subscript) -> _Tokens:
        if not (isinstance(node.value, ast.Name) and node.value.id == "tok"):
            raise _RefusedError("is no token: only tok has some, as in tok[k]", node)
        index = self.number(node.slice)
        if len(index.axes) > 1:
            raise _RefusedError("depends on both q and k: a position in tok[…] depends on one of them", node)
        axis: Axis = next(iter(index.axes), "k")
        return _Tokens(lambda cells: cells.token(axis, index.evaluate(cells)))

    def number(self, node: ast.expr) -> _Number:
        number = self._number(node)
        self.numbers.append(number)
        return number

    def _number(self, node: ast.expr) -> _Number:
        match node:
            case ast.Name(id="q" | "k"):
                axis: Axis = "q" if node.id == "q" else "k"
                return _Number(lambda cells: cells.position(axis), lambda position: position, frozenset((axis,)))
            case ast.Constant(value=value):
                if type(value) is not int or value >= LITERALS_BELOW:
                    raise _RefusedError("is not a whole number below 1000000000", node)
                return _constant(value)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _calculated(_OPERATORS[type(node.op)], self.number(node.left), self.number(node.right), node)
            case ast.UnaryOp(op=ast.USub()):
                return _calculated("-", _constant(0), self.number(node.operand), node)
            case ast.Call(func=ast.Name(id="abs"), args=[inner], keywords=[]):
                number = self.number(inner)
                if number.value is not None:
                    return _constant(abs(number.value))
                return replace(number, evaluate=lambda cells: cells.absolute(number.evaluate(cells)))
        raise _RefusedError(
            "is not a whole number, q, k or one of a + b, a - b, a * b, a // b, a % b, -a and abs(a) of such", node
        )


def _require_comparable(relation: str, operands: Sequence[Any], nodes: Sequence[ast.expr], whole: ast.expr) -> None:
    """Raises `_RefusedError` unless the relation compares two numbers, two tokens, or a token with a list of words."""
    kinds = tuple(map(type, operands))
    if relation in _COMPARABLE.get(kinds, ()):
        return
    wrong = whole if relation not in _LISTED.values() else nodes[0] if kinds[0] is not _Tokens else nodes[1]
    raise _RefusedError(
        "is compared wrongly: numbers compare by == != < <= > >=, tokens by == and !=, a token with a list of words such as "
        '("a", "b") by in and not in',
        wrong,
    )


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _RefusedError('is not a word in quotes such as "the"', node)


def _calculated(sign: str, left: _Number, right: _Number, node: ast.expr) -> _Number:
    """The result of an operation. Constants are folded, so that a divisor that is always 0 is refused."""
    if sign in ("//", "%") and right.value == 0:
        raise _RefusedError("divides by 0", node)

    def largest(position: int) -> int:
        a, b = left.largest(position), right.largest(position)
        return {"+": a + b, "-": a + b, "*": a * b, "//": a, "%": b}[sign]

    if largest(PLACES_BELOW - 1) >= NUMBERS_BELOW:
        raise _RefusedError("can exceed 2^63", node)
    if left.value is not None and right.value is not None:
        return _constant(OPERATIONS[sign](left.value, right.value))
    may_divide_by_0 = sign in ("//", "%") and right.value is None

    def evaluate(cells: Cells) -> Any:
        return cells.calculate(sign, left.evaluate(cells), right.evaluate(cells), may_divide_by_0=may_divide_by_0)

    return _Number(evaluate, largest, left.axes | right.axes)
