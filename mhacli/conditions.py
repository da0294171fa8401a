"""Conditions on a query position `q` and a key position `k`, which select cells of the pattern
(`--where`), or state them (`--sees`).

A condition is written in a part of Python's notation:

- `q` and `k` are positions, counted from 0 in their own texts; whole numbers; `a + b`, `a - b`, `a
  * b`, `a // b`, `a % b` (rounded down, as in Python), `-a`, `abs(a)`;
- `tok[k]`, `tok[q - 1]`, `tok[0]` are tokens: of the queries' text if the position depends on `q`,
  else of the keys' text; `"the"` is the token with that text;
- `== != < <= > >=` compare numbers, and may be chained; `==` and `!=` compare tokens; `tok[k] in
  ("a", "b")`, `not in`;
- `and`, `or`, `not` and parentheses.

A statement (`--sees`) has no tokens, but further numbers: `head`, `layer`, and `n`, the number of
keys; and `doc[q]`, the document at a position, which is compared with that at another one.

The text is parsed, never executed. A token outside the text and a division by zero have no value,
and every comparison with them is false. `mhacli.attention.axes` finds the cells of a condition.
"""

import ast
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from mhacli.errors import UsageError

INDUCTION: Final = "tok[k - 1] == tok[q] and k - 1 != q"
"""The token after the same token elsewhere. Source: Olsson et al. 2022, "In-context Learning and
Induction Heads"."""

MAX_CHARACTERS: Final = 500
MAX_DEPTH: Final = 50
LITERALS_BELOW: Final = 10**9
PLACES_BELOW: Final = 2**31
NUMBERS_BELOW: Final = 2**63
"""The bound of int64. A condition that could exceed it at any position is refused, so that no
number overflows."""

Kind = Literal["condition", "whole number", "token", "list of words"]
Operations = Mapping[type[ast.AST], Callable[[Any, Any], Any]]
OPERATIONS: Final[Operations] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_BOUNDS: Operations = {
    **OPERATIONS,
    ast.Sub: operator.add,
    ast.FloorDiv: lambda a, b: a,
    ast.Mod: lambda a, b: b,
}
"""The bounds of the magnitudes of results, by those of their operands."""
_COMPARABLE: Mapping[tuple[Kind, Kind], Collection[type[ast.AST]]] = {
    ("whole number", "whole number"): (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    ("token", "token"): (ast.Eq, ast.NotEq),
    ("token", "list of words"): (ast.In, ast.NotIn),
}
_COMPARISONS = (
    "numbers compare by == != < <= > >=, tokens by == and !=, a token with a list of words by in"
    " and not in"
)
_OPERATORS = "operators are + - * // % abs, == != < <= > >="


@dataclass(frozen=True)
class Language:
    """The names of a condition: its option, what it may call numbers, and `rows`, the name of what
    stands at each position. It `has_words` where that are tokens, which have a text.
    """

    option: str
    numbers: tuple[str, ...]
    rows: str
    has_words: bool
    hint: str

    def refused(self, fault: str, node: ast.expr | None = None) -> UsageError:
        """The error that quotes the faulty part, and says how a condition is written."""
        part = "" if node is None else f"{ast.unparse(node)[:80]!r} "
        return UsageError(f"{self.option}: {part}{fault}", hint=self.hint)

    @property
    def nothing(self) -> str:
        """What a part is not that has no place in a condition."""
        number = f"is no position, no whole number below {LITERALS_BELOW}"
        what = "no token" if self.has_words else f"none of {', '.join(self.numbers[2:])}"
        return f"{number}, {what} and no comparison"


WHERE: Final = Language(
    "--where",
    ("q", "k"),
    "tok",
    True,
    'q and k are positions, tok[k] is the token at k, "the" is a token by its text;'
    f" {_OPERATORS} in, and or not; for example: tok[k] == tok[q] and k < q",
)
SEES: Final = Language(
    "--sees",
    ("q", "k", "head", "layer", "n"),
    "doc",
    False,
    "q and k are positions in the whole text, n is the number of keys, head and layer are numbers"
    f" from 0 on, doc[k] is the document at k; {_OPERATORS}, and or not; for example: q >= k and q"
    " - k < 8",
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
        return frozenset(
            part.value
            for part in parts
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )

    def largest(self, position: int) -> int:
        """A bound of the magnitude of all numbers if no position exceeds `position`."""
        places, numbers = dict.fromkeys(names_in(self.body), position), [position]
        for part in ast.walk(self.body):
            if isinstance(part, ast.BinOp) or type(getattr(part, "value", None)) is int:
                numbers.append(int(number_of(part, _BOUNDS, places)))
        return max(numbers)


def parse_condition(text: str, language: Language = WHERE) -> Condition:
    """The condition in `text`, stripped of outer spaces. Raises `UsageError` that names the option
    and quotes the faulty part.
    """
    if len(text) > MAX_CHARACTERS:
        raise language.refused(
            f"the condition has {len(text)} characters, at most {MAX_CHARACTERS} are read"
        )
    text = text.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # about "\d" and "1or 2", which later versions of Python forbid
            body = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise language.refused(
            f"{text[:80]!r} is not one expression in Python's notation"
        ) from None
    depth, level = 0, [body]
    while level:
        depth += 1
        level = [
            child
            for parent in level
            for child in ast.iter_child_nodes(parent)
            if isinstance(child, ast.expr)
        ]
    if depth > MAX_DEPTH:
        raise language.refused(
            f"the condition is nested {depth} deep, at most {MAX_DEPTH} are read"
        )
    _require([body], "condition", language)
    return Condition(text, body)


def _kind(node: ast.expr, language: Language) -> Kind:
    """What a part is. Raises `UsageError` unless it and all parts within it are correct."""
    match node:
        case ast.BoolOp(values=parts):
            return _require(parts, "condition", language)
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return _require([part], "condition", language)
        case ast.Compare():
            operands = [(part, _kind(part, language)) for part in (node.left, *node.comparators)]
            for op, ((left, kind), (_, other)) in zip(node.ops, pairwise(operands), strict=True):
                if type(op) not in _COMPARABLE.get((kind, other), ()):
                    raise language.refused(
                        f"compares {ast.unparse(left)!r} wrongly: {_COMPARISONS}", node
                    )
            return "condition"
        case ast.Tuple(elts=words) | ast.List(elts=words) if all(
            isinstance(word, ast.Constant) for word in words
        ):
            _require(words, "token", language)
            return "list of words"
        case ast.Constant(value=str()) if language.has_words:
            return "token"
        case ast.Subscript(value=ast.Name(id=name), slice=position) if name == language.rows:
            _require([position], "whole number", language)
            if axes_of(position) == {"q", "k"}:
                raise language.refused(
                    f"depends on both q and k: a position in {name}[…] depends on one of them",
                    node,
                )
            return "token"
        case ast.BinOp(left, op, right) if type(op) in OPERATIONS:
            _require([left, right], "whole number", language)
            if (
                isinstance(op, ast.FloorDiv | ast.Mod)
                and not names_in(right)
                and number_of(right, OPERATIONS, {}) == 0
            ):
                raise language.refused("divides by 0", node)
            largest = dict.fromkeys(language.numbers, PLACES_BELOW - 1)
            if number_of(node, _BOUNDS, largest) >= NUMBERS_BELOW:
                raise language.refused("can exceed 2^63", node)
            return "whole number"
        case ast.UnaryOp(op=ast.USub(), operand=part) | ast.Call(ast.Name(id="abs"), [part], []):
            return _require([part], "whole number", language)
        case ast.Name(id=name) if name in language.numbers:
            return "whole number"
        case ast.Constant(value=value) if type(value) is int and value < LITERALS_BELOW:
            return "whole number"
    raise language.refused(language.nothing, node)


def _require(parts: Iterable[ast.expr], kind: Kind, language: Language) -> Kind:
    """The kind. Raises `UsageError` unless all parts are of it."""
    for part in parts:
        if _kind(part, language) != kind:
            raise language.refused(f"is not a {kind}", part)
    return kind


def axes_of(node: ast.AST) -> set[str]:
    """The axes on whose positions a part depends: `q`, `k`."""
    return names_in(node) & {"q", "k"}


def names_in(node: ast.AST) -> set[str]:
    """The names in a part, but that of `abs`."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - {"abs"}


def number_of(node: ast.AST, operations: Operations, places: Mapping[str, Any]) -> Any:
    """A number by these operations, of positions and other names at these places."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Call(args=[inner]):
            return abs(number_of(inner, operations, places))
        case ast.UnaryOp(operand=inner):
            return operations[ast.Sub](0, number_of(inner, operations, places))
        case ast.BinOp(left, op, right):
            sides = (number_of(side, operations, places) for side in (left, right))
            return operations[type(op)](*sides)
    return places[ast.unparse(node)]
