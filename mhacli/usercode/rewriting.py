"""A user's source with other code in one place, in memory alone: inside a context the functions of
its file run it. The file is never written nor imported again, and lines keep their numbers.
"""

import ast
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from .graph import KERNEL
from .names import in_user_names

_SHAPING = re.compile(
    r"view|reshape|transpose|permute|contiguous|(un)?flatten|swapaxes|expand(_as)?|mean|sum|tri[lu]"
    r"|repeat(_interleave)?"
)
"""Methods that lay out what they act on, or reduce it."""


class _Exchange(ast.NodeTransformer):
    """Puts a node in place of another, on its line."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old = old
        self.new = new
        for node in ast.walk(new):
            ast.copy_location(node, old)

    def visit(self, node: ast.AST) -> Any:
        """What stands in place of a node."""
        return self.new if node is self.old else self.generic_visit(node)


def put(tree: ast.Module, line: int, code: str, place: int) -> str:
    """Puts code into the statement around a line of a tree, and returns what stands there then: an
    assignment in place of another, or of a statement whose result is not kept; or an expression in
    place of the one that it is likeliest to correct. A further `place` is the next in this order.

    In the code `this` stands for the value of the statement, and `it` for what its methods act on
    that lay out a tensor; they are replaced with it. Raises `SyntaxError` for what is no code or in
    no function that runs again, and `IndexError` without a place.
    """
    statement = _statement_at(tree, line)
    value = getattr(statement, "value", statement)
    laid_out = next((node for node in ast.walk(value) if _laid_out(node) is not node), value)
    known = {"this": f"({ast.unparse(value)})", "it": f"({ast.unparse(_laid_out(laid_out))})"}
    new: ast.AST = ast.parse(in_user_names(code, known)).body[0]
    new = getattr(new, "body", [new])[0]  # of a function on one line
    right = getattr(new, "value", None)
    if not isinstance(right, ast.expr):
        raise SyntaxError("this is no expression")
    places: list[ast.AST] = []
    if isinstance(new, ast.Assign) and isinstance(statement, ast.Assign | ast.Expr):
        places = [statement]
    places += [laid_out] if re.search(r"\bit\b", code) else _by_likeness(statement, right)
    if places[0] is not value:
        places.insert(1, value)
    old = places[place]
    put_in = new if old is statement else right
    if isinstance(put_in, ast.Call) and isinstance(old, ast.Call) and KERNEL in ast.dump(put_in):
        given = {each.arg for each in put_in.keywords}
        given |= {"attn_mask", "is_causal"} if given & {"attn_mask", "is_causal"} else {"scale"}
        put_in.keywords += [each for each in old.keywords if each.arg not in given]
    _Exchange(old, put_in).visit(tree)
    return ast.unparse(put_in)


def _statement_at(tree: ast.Module, line: int) -> ast.stmt:
    """The innermost statement around a line. Raises `SyntaxError` where no function runs again."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    functions = [node.name for node in around if isinstance(node, ast.FunctionDef)]
    if functions[-1:] in ([], ["__init__"]):
        raise SyntaxError("no function runs this line again")
    return max(around, key=lambda node: (node.lineno, node.col_offset))


def _laid_out(node: ast.AST) -> ast.AST:
    """What the methods act on that lay out an expression, or add axes to it."""
    while True:
        if isinstance(node, ast.Subscript) and "None" in ast.unparse(node.slice):
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and _SHAPING.fullmatch(node.func.attr)
        ):
            node = node.func.value
        else:
            return node


def _by_likeness(statement: ast.stmt, new: ast.AST) -> list[ast.expr]:
    """The expressions of a statement but for another one: first those with the most of its
    variables and the fewest others, of its kind, and then those that read most like it.
    """
    text = ast.unparse(new)
    wanted = _variables(new) & _variables(statement)

    def unlikeness(node: ast.expr) -> tuple[int, bool, float]:
        likeness = SequenceMatcher(None, ast.unparse(node), text).ratio()
        n_wrong = len(_variables(node) ^ wanted) if wanted else 0
        return n_wrong, type(node) is not type(new), -likeness

    nodes = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store)
    ]
    return sorted((node for node in nodes if ast.unparse(node) != text), key=unlikeness)


def _variables(node: ast.AST) -> set[str]:
    """The names in code, but for those of modules and of the object."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names - {"self", "torch", "F", "nn", "math"}


@contextmanager
def running(tree: ast.Module, file: str) -> Iterator[None]:
    """A context in which the functions of a file run the code of a tree. Raises `SyntaxError`."""
    every = [compile(tree, file, "exec", dont_inherit=True)]
    for code in every:
        every += [each for each in code.co_consts if isinstance(each, CodeType)]
    changed = {_key(code): code for code in every}
    path = os.path.realpath(file)
    is_of_file = cache(lambda name: os.path.realpath(name) == path)
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # what is frozen is not listed
    before = {
        thing: thing.__code__
        for thing in gc.get_objects()
        if type(thing) is FunctionType and is_of_file(thing.__code__.co_filename)
    }
    if is_frozen:
        gc.freeze()
    try:
        for function, code in before.items():
            function.__code__ = changed.get(_key(code), code)
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def _key(code: CodeType) -> tuple[object, ...]:
    """What tells a function of a file from its others."""
    return code.co_qualname, code.co_firstlineno, code.co_freevars
