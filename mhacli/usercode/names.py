"""Translates the names in corrected expressions into the names that the user's code uses."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import nn

from .faults import SourceLine
from .projections import read_name
from .roles import called_function, role_of, signature_of

_UNPACKED = re.compile(r"^\s*\(?(\w+), (\w+), (\w+)\)? = .*\.(?:shape|size\(\))$", re.MULTILINE)


def function_around(line: SourceLine) -> ast.FunctionDef | None:
    """The innermost function around a line; None outside functions and for unreadable files."""
    try:
        tree = ast.parse(Path(line.file or "").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and is_within(line, node)
    ]
    return max(functions, key=lambda node: node.lineno, default=None)


def is_within(line: SourceLine, function: ast.FunctionDef) -> bool:
    """Whether a line of the same file is inside a function."""
    return line.line is not None and function.lineno <= line.line <= (function.end_lineno or 0)


def names_within(
    function: ast.FunctionDef,
    module: nn.Module | None,
    *,
    parts: Sequence[str],
    sizes: Mapping[str, int | None],
) -> dict[str, str]:
    """Maps each name in corrected expressions, such as `n_heads`, to the user's name in a function,
    such as `self.n_head`: by its role, or where an attribute without a role that the function uses
    has the value. `parts` are the names of the projections, `sizes` the sizes of the layer by their
    roles.
    """
    text = ast.unparse(function)
    shape = _UNPACKED.search(text)
    axes = zip(("batch", "length", "d_model"), shape.groups() if shape else (), strict=False)
    names = {plain: name for plain, name in axes if name != "_"}
    arguments = [argument.arg for argument in function.args.args]
    is_forward = function.name in ("forward", "__call__")
    if not is_forward:
        letters = {read_name(name)[0]: name for name in arguments}
        names |= {letter: letters[letter] for letter in "qkv" if letter in letters}
    if module is None or arguments[:1] != ["self"]:
        return names
    if is_forward and len(arguments) > 1:
        names["x"] = arguments[1]
    return names | _names_of_sizes(text, module, sizes) | _names_of_projections(text, parts)


def _names_of_sizes(
    text: str, module: nn.Module, sizes: Mapping[str, int | None]
) -> dict[str, str]:
    """The attribute that holds the size of each role. One whose name has the role comes first; else
    the size is in the only attribute without a role that has this value, if the function uses it:
    of two, none is known to be meant.
    """
    numbers = {name: value for name, value in vars(module).items() if type(value) is int}  # no bool
    roles = {name: role_of(name) for name in numbers}
    used = re.findall(r"\bself\.(\w+)", text)
    names = {}
    for role, size in sizes.items():
        holding = [
            name
            for name, value in numbers.items()
            if value == size and roles[name] is None and name in used
        ]
        if len(holding) == 1:
            names[role] = f"self.{holding[0]}"
    return names | {role: f"self.{name}" for name, role in roles.items() if role is not None}


_PLAIN = {"qkv": "self.qkv", "o": "self.out_proj"}
"""The names in corrected expressions of projections that are not called `self.q_proj`."""


def _names_of_projections(text: str, parts: Sequence[str]) -> dict[str, str]:
    """The attribute of each projection, by its name in corrected expressions. The path starts at
    the part that the function belongs to, if it calls a projection of that name.
    """
    steps = {part: part.rpartition(".") for part in parts}
    owners = {owner for owner, _, name in steps.values() if f"self.{name}(" in text}
    names = {}
    for part, (owner, _, name) in steps.items():
        path = name if owner in owners else re.sub(r"\.(\d+)", r"[\1]", part)
        letters = read_name(part)[0]
        names[_PLAIN.get(letters, f"self.{letters}_proj")] = f"self.{path}"
    return names


def in_user_names(expression: str, names: Mapping[str, str]) -> str:
    """A corrected expression with the user's names. Comments stay as they are.

    >>> in_user_names("z.reshape(batch, n_heads * d_head) # z is whole", {"z": "y", "n_heads":
    "self.h"}) 'y.reshape(batch, self.h * d_head) # z is whole'
    """
    code, sign, comment = expression.partition("#")
    words = re.compile(r"(?<![\w.'\"])(?:self\.)?[A-Za-z_]\w*")
    return words.sub(lambda match: names.get(match[0], match[0]), code) + sign + comment


def assigned_names(source: str) -> list[str]:
    """The names that a line of code assigns.

    >>> assigned_names("q, k, v = self.qkv(x).chunk(3)"), assigned_names("return q == k")
    (['q', 'k', 'v'], [])
    """
    assigned = re.match(r"(\w+(?:, *\w+)*) *=(?!=| *lambda)", source)
    return re.split(", *", assigned[1]) if assigned else []


def source_of(thing: object) -> str:
    """The source of a class or a function; empty if it cannot be read or parsed."""
    with suppress(OSError, TypeError, SyntaxError):
        source = textwrap.dedent(inspect.getsource(thing))  # type: ignore[arg-type]
        ast.parse(source)
        return source
    return ""


_SEES = "real|actual|valid|visible|keep|kept|token|attend|may|not? ?-?pad|non"
_HIDES = "pad|mask|hid|ignor"
_MEANS = r"\s*(?:=+|:|is|are|means?|for|marks?|where|->|→)\s*(?:an? |the )?"
_BEFORE = r"(?:(?m:^)[\s#]*(?:[-*] )?|[(\[,;:]\s*|\b(?:is|are|has|with|where|of|and) )"
"""What stands before such a number: a word as in `axis 1 is tokens`, a sign or a digit does not."""
_MARKS = (
    rf"{_BEFORE}(?:(?:1s?|ones|True|False){_MEANS}(?:{_SEES}|{_HIDES})|"
    rf"(?:0s?|zeros){_MEANS}(?:{_HIDES}))"
)
_WHOLE = r"(?:bool\w*|longtensor|torch\.long|inttensor|int\d*|integers?|byte\w*)"
"""Words that say which tokens 1 or True marks; 0 that is kept may be added to scores."""


def are_marks_stated(thing: object, name: str, *, is_only_mask: bool) -> bool:
    """Whether the annotation or the words of a class or a function say that a mask of this name is
    boolean or whole, or what 1 marks: behind its name in a line, or behind the word mask if it
    `is_only_mask`. Those of its file count where nothing else in this takes the mask. Masks that
    are added state nothing.
    """
    code = source_of(thing)
    annotation = rf"\b{name}\b(?:\s?:|\s\()(?:(?!float|not )[^,=)\n]){{0,40}}\b{_WHOLE}\b"
    if re.search(annotation, code, re.I):
        return True
    words = "\n".join(re.findall(r'#.*|"""(?s:.*?)"""', code))
    module = inspect.getmodule(thing)
    if len(re.findall(rf"def \w+\([^)]*\b{name}\b", source_of(module))) == 1:
        words = f"{inspect.getdoc(module)}\n{words}"
    about = rf"\b{name}\b.{{0,80}}?"
    if is_only_mask:
        about = rf"(?i:mask|{name})\b(?s:.{{0,80}}?)"
    return bool(re.search(about + _MARKS, words)) and not re.search("(?i)additiv|added", words)


def never_read(call: Callable[..., object]) -> set[str]:
    """The parameters that the code of a call never names; none if it cannot be read or uses
    `locals()`.
    """
    names = {
        node.id
        for node in ast.walk(ast.parse(source_of(called_function(call))))
        if isinstance(node, ast.Name)
    }
    if not names or "locals" in names:
        return set()
    return {parameter.name for parameter in signature_of(call)} - names


def is_switched_off(function: Callable[..., object], parameter: str, others: Sequence[str]) -> bool:
    """Whether the numbers of a mask are read only under a condition that asks for one of the other
    arguments, for a switch of the constructor such as `self.masked`, or for the number of its axes;
    or whether it only says if there is a causal mask. `if mask is not None` is no such condition.
    """
    given = rf"\b{parameter} is (not )?None\b|\bexists\({parameter}\)"
    source = re.sub(given, "_given_", source_of(function))
    tree = ast.parse(source)
    switches = [r"self\.\w*(mask|causal)", rf"{parameter}\.(n?dim|shape|size)"]
    switches += [rf"{other}\b" for other in others]
    asked = re.compile(rf"(\b|_)({'|'.join(switches)})")
    spans = list[range]()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp) and asked.search(ast.unparse(node.test)):
            leaves = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return)
            last = tree.body[0] if leaves else node  # what follows is under the condition too
            spans.append(range(node.lineno, last.end_lineno or 0))
    read = [each for each in ast.walk(tree) if isinstance(each, ast.Name) and each.id == parameter]
    if not read:
        return "_given_" in source and re.search(r"causal\w* *=[^=]", source) is not None
    return all(any(span.start <= each.lineno <= span.stop for span in spans) for each in read)
