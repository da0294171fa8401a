"""Patterns: conditions on a query's place `q` and a key's place `k` that say which cells a head may be looked for in.

A pattern is written in the notation of Python, of which this is all:

- `q` and `k` are places, counted from 0 in their own texts; whole numbers; `a + b`, `a - b`, `a * b`, `a // b`, `a % b`
  (rounded down, as in Python), `-a`, `abs(a)`;
- `tok[k]`, `tok[q - 1]`, `tok[0]` are tokens: of the keys' text, or of the queries' where the place is said by `q`;
  `"the"` is the token with that text;
- `== != < <= > >=` compare numbers, and may be chained; `==` and `!=` compare tokens; `tok[k] in ("a", "b")`, `not in`;
- `and`, `or`, `not` and parentheses.

The text is parsed, never executed. A token outside the text has no answer, nor has a division by zero: what is compared with
it is false, whatever the comparison (`mhacli.attention.tiled.conditions` evaluates).
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from mhacli.errors import UsageError

DUPLICATE: Final = "tok[k] == tok[q] and k != q"
"""The same token elsewhere in the text. Source: Wang et al. 2022, "Interpretability in the Wild", duplicate-token heads."""
INDUCTION: Final = "tok[k - 1] == tok[q] and k - 1 != q"
"""What followed the same token elsewhere. Source: Olsson et al. 2022, "In-context Learning and Induction Heads"."""

MAX_CHARACTERS: Final = 500
MAX_DEPTH: Final = 50
LITERALS_BELOW: Final = 10**9
PLACES_BELOW: Final = 2**31
NUMBERS_BELOW: Final = 2**63
"""What int64 can hold: a pattern that could exceed it at any place is refused, so that nothing wraps round."""

Axis = Literal["q", "k"]
OPERATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
RELATIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Number:
    """A whole number, of either sign where it was calculated."""

    value: int


@dataclass(frozen=True)
class Place:
    """The place of the query or of the key in its own text."""

    axis: Axis


@dataclass(frozen=True)
class Arithmetic:
    """Two numbers and one of `OPERATIONS`; at least one of them depends on a place."""

    operator: str
    left: Numeric
    right: Numeric


@dataclass(frozen=True)
class Absolute:
    """A number without its sign."""

    number: Numeric


@dataclass(frozen=True)
class Token:
    """The token at a place of the text of `axis`."""

    index: Numeric
    axis: Axis


@dataclass(frozen=True)
class Word:
    """The token with this text."""

    text: str


@dataclass(frozen=True)
class Words:
    """Tokens by their texts: what `in` and `not in` look into."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """A chain of operands with a relation between each two: of `RELATIONS`, `in` or `not in`."""

    operands: tuple[Operand | Words, ...]
    relations: tuple[str, ...]


@dataclass(frozen=True)
class Not:
    """True where the condition is false."""

    condition: Condition


@dataclass(frozen=True)
class AllOf:
    """True where all conditions are."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True)
class AnyOf:
    """True where at least one condition is."""

    conditions: tuple[Condition, ...]


Numeric = Number | Place | Arithmetic | Absolute
Operand = Numeric | Token | Word
Condition = Comparison | Not | AllOf | AnyOf
Expression = Operand | Words | Condition


@dataclass(frozen=True)
class Pattern:
    """A condition, and the text that says it."""

    text: str
    expression: Condition


def parse_pattern(text: str) -> Pattern:
    """The pattern that the text says, without spaces around it. Raises `UsageError` that shows the part that cannot be.

    >>> parse_pattern("k < q").expression
    Comparison(operands=(Place(axis='k'), Place(axis='q')), relations=('<',))
    """
    if len(text) > MAX_CHARACTERS:
        raise _refused(f"have at most {MAX_CHARACTERS} characters", str(len(text)))
    text = text.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of "\d" and "1or 2", which Python is about to forbid
            body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _refused("be one expression in Python's notation", _quoted(text)) from None
    depth = _depth(body)
    if depth > MAX_DEPTH:
        raise _refused(f"be nested at most {MAX_DEPTH} deep", str(depth))
    try:
        return Pattern(text, _condition(body))
    except _RefusedError as error:
        source = ast.get_source_segment(text, error.node)
        raise _refused(error.rule, _quoted(text if source is None else source)) from None


def parts(expression: Expression) -> Iterator[Expression]:
    """The expression and everything that it is made of."""
    yield expression
    match expression:
        case Arithmetic(_, left, right):
            inner: tuple[Expression, ...] = (left, right)
        case Absolute(one) | Token(one, _) | Not(one):
            inner = (one,)
        case Comparison(several, _) | AllOf(several) | AnyOf(several):
            inner = several
        case _:
            inner = ()
    for part in inner:
        yield from parts(part)


def largest(number: Numeric, place: int = PLACES_BELOW - 1) -> int:
    """A magnitude that the number never exceeds while no place exceeds `place`; its parts may exceed it.

    >>> largest(Arithmetic("-", Place("q"), Number(3)), 10)
    13
    """
    match number:
        case Number(value):
            return abs(value)
        case Place():
            return place
        case Absolute(inner):
            return largest(inner, place)
    left, right = largest(number.left, place), largest(number.right, place)
    return {"+": left + right, "-": left + right, "*": left * right, "//": left, "%": right}[number.operator]


_HINT = (
    'q and k are places, tok[k] is a token and "the" one by its text; there are + - * // % abs, == != < <= > >= in, '
    "and or not; for example: tok[k] == tok[q] and k < q"
)
_SHOWN = 80
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_RELATIONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}


class _RefusedError(Exception):
    """A part that breaks a rule; `parse_pattern` knows the text to show."""

    def __init__(self, rule: str, node: ast.expr) -> None:
        super().__init__(rule)
        self.rule, self.node = rule, node


def _refused(rule: str, value: str) -> UsageError:
    return UsageError(f"pattern must {rule}, got {value}", hint=_HINT)


def _quoted(source: str) -> str:
    return repr(source[:_SHOWN])


def _depth(node: ast.expr) -> int:
    """Level by level: a recursion would itself need to be guarded against depth."""
    depth, level = 0, [node]
    while level:
        depth += 1
        level = [child for parent in level for child in ast.iter_child_nodes(parent) if isinstance(child, ast.expr)]
    return depth


def _condition(node: ast.expr) -> Condition:
    match node:
        case ast.BoolOp(op=ast.And()):
            return AllOf(tuple(map(_condition, node.values)))
        case ast.BoolOp():
            return AnyOf(tuple(map(_condition, node.values)))
        case ast.UnaryOp(op=ast.Not()):
            return Not(_condition(node.operand))
        case ast.Compare():
            return _comparison(node)
    raise _RefusedError("be made of conditions such as k < q", node)


def _comparison(node: ast.Compare) -> Comparison:
    nodes = (node.left, *node.comparators)
    operands = tuple(map(_operand, nodes))
    relations = tuple(_RELATIONS.get(type(op), "") for op in node.ops)
    for place, relation in enumerate(relations):
        left, right = operands[place : place + 2]
        if not relation:
            raise _RefusedError("compare with == != < <= > >= in or not in", node)
        if relation in ("in", "not in"):
            if not isinstance(left, Token | Word):
                raise _RefusedError("look for tokens in a list of words", nodes[place])
            if not isinstance(right, Words):
                raise _RefusedError('look for tokens in a list of words such as ("a", "b")', nodes[place + 1])
        elif isinstance(left, Words) or isinstance(right, Words):
            raise _RefusedError("use a list of words after in or not in", node)
        elif isinstance(left, Token | Word) != isinstance(right, Token | Word):
            raise _RefusedError("compare tokens with tokens and numbers with numbers", node)
        elif isinstance(left, Token | Word) and relation not in ("==", "!="):
            raise _RefusedError("compare tokens with == != in or not in", node)
    return Comparison(operands, relations)


def _operand(node: ast.expr) -> Operand | Words:
    match node:
        case ast.Constant(value=str(text)):
            return Word(text)
        case ast.Tuple() | ast.List():
            return Words(tuple(map(_word, node.elts)))
        case ast.Subscript():
            return _token(node)
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            raise _RefusedError("compare numbers or tokens", node)
    return _number(node)


def _word(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _RefusedError('list words such as "the"', node)


def _token(node: ast.Subscript) -> Token:
    if not (isinstance(node.value, ast.Name) and node.value.id == "tok"):
        raise _RefusedError("take tokens from tok", node)
    index = _number(node.slice)
    axes = {part.axis for part in parts(index) if isinstance(part, Place)}
    if len(axes) > 1:
        raise _RefusedError("say the place in tok[…] by q or by k, not by both", node)
    return Token(index, axes.pop() if axes else "k")


def _number(node: ast.expr) -> Numeric:
    match node:
        case ast.Name(id="q"):
            return Place("q")
        case ast.Name(id="k"):
            return Place("k")
        case ast.Name(id="tok" | "abs"):
            raise _RefusedError("use tok and abs as in tok[k] and abs(q - k)", node)
        case ast.Name():
            raise _RefusedError("use no names but q, k, tok and abs", node)
        case ast.Constant():
            return _literal(node)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _calculated(_OPERATORS[type(node.op)], _number(node.left), _number(node.right), node)
        case ast.UnaryOp(op=ast.USub()):
            return _calculated("-", Number(0), _number(node.operand), node)
        case ast.BinOp() | ast.UnaryOp(op=ast.UAdd() | ast.Invert()):
            raise _RefusedError("calculate with a + b, a - b, a * b, a // b, a % b, -a and abs(a)", node)
        case ast.Call():
            return _absolute(node)
    raise _RefusedError("calculate with whole numbers, q and k", node)


def _literal(node: ast.Constant) -> Number:
    if type(node.value) is not int or node.value >= LITERALS_BELOW:
        raise _RefusedError("write numbers as whole numbers below 1000000000", node)
    return Number(node.value)


def _absolute(node: ast.Call) -> Numeric:
    if not (isinstance(node.func, ast.Name) and node.func.id == "abs"):
        raise _RefusedError("call nothing but abs", node)
    if len(node.args) != 1 or node.keywords:
        raise _RefusedError("give abs one number", node)
    number = _number(node.args[0])
    return Number(abs(number.value)) if isinstance(number, Number) else Absolute(number)


def _calculated(sign: str, left: Numeric, right: Numeric, node: ast.expr) -> Numeric:
    """Numbers without a place are calculated here, so that a divisor which is always 0 is seen."""
    if sign in ("//", "%") and right == Number(0):
        raise _RefusedError("divide by something other than 0", node)
    number = Arithmetic(sign, left, right)
    if largest(number) >= NUMBERS_BELOW:
        raise _RefusedError("calculate with numbers below 2^63", node)
    if isinstance(left, Number) and isinstance(right, Number):
        return Number(OPERATIONS[sign](left.value, right.value))
    return number
