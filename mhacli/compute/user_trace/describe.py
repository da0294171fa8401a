"""What an operation of somebody's attention does, in words: its formula, what it means, what it costs, what is odd about it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from mhacli.adapters.usercode.user_attention import Operation
from mhacli.compute.user_trace.axes import einsum_letters
from mhacli.compute.user_trace.dataflow import KERNEL, PRODUCTS, SOFTMAXES, Flow
from mhacli.spec.sites import SITES

_SIGNS: Mapping[str, str] = {
    "add": "+", "sub": "−", "mul": "·", "div": "/", "pow": "^", "matmul": "", "bmm": "", "mm": "",
    "eq": "==", "ne": "≠", "lt": "<", "le": "≤", "gt": ">", "ge": "≥", "logical_and": "and", "logical_or": "or",
}  # fmt: skip
_PER_NUMBER: Mapping[str, int] = {
    "softmax": 5, "log_softmax": 5, "add": 1, "sub": 1, "mul": 1, "div": 1, "exp": 1, "tanh": 1, "neg": 1, "pow": 1,
    "sqrt": 1, "rsqrt": 1, "sigmoid": 1, "cos": 1, "sin": 1, "relu": 1, "gelu": 1, "dropout": 2,
}  # fmt: skip
"""Operations on each number of the result, counted as the walkthrough of our own layer does."""
_CUTS = ("view", "reshape", "flatten", "unflatten")
_MEANINGS: Mapping[str, str] = {
    "qkv": "one large product makes queries, keys and values side by side",
    "kv": "one product makes keys and values side by side",
    "kᵀ": "the keys turned, so that a product with them is a dot product for each query and key",
    "scaled": "large products would leave the softmax no choice but one key",
    "masked": "what a query must not see is hidden from the softmax, or a number is added",
    "scores": "what the softmax reads: products, scaled and masked as the lines above say",
    "q": "the queries as attention reads them",
    "k": "the keys as attention reads them",
    "v": "the values as attention reads them",
    "dropped": "dropout in training: some shares become 0, the rest grow",
    "out": "the heads mixed: what the layer says",
}
_UNORDERED = ("single", "part")
_HOUSE = ("q_proj", "k_proj", "v_proj", "qk", "pattern", "z", "concat")
"""Sites whose meaning is the one of our own walkthrough."""


def formula_of(flow: Flow, index: int, sites: Mapping[int, str], axes: Mapping[int, tuple[str, ...]]) -> str:
    """How the operation makes its tensor, its inputs by their names."""
    operation = flow.operations[index]
    names = [flow.name_of(index, place, sites) for place in range(len(operation.inputs))]
    said, bare = operation.arguments, operation.name.rstrip("_")
    if operation.name == "linear":
        return f"{names[0]} Wᵀ" + (" + b" if len(names) > 2 else "")
    if operation.name == "addmm":
        return f"{names[1]} W + b"
    if operation.name == "einsum":
        return f"einsum {said.get('equation', '')} of {', '.join(names)}"
    if operation.name in SOFTMAXES:
        return f"{bare}({names[0]}) over {softmax_axis(operation, axes[index])}"
    if operation.name == KERNEL:
        return _kernel_formula(names, said)
    if bare == "masked_fill":
        value = said["value"] if "value" in said else names[-1]
        return f"{names[0]}; {_number(value)} where {names[1]} is True"
    if bare == "where":
        choices = [_number(said[key]) if key in said else None for key in ("input", "other")]
        rest = iter(names[1:])
        kept, other = (choice or next(rest, "a tensor") for choice in choices)
        return f"{kept} where {names[0] if names else 'the condition'}, else {other}"
    if operation.name in PRODUCTS and flow.reads_parameter(index):
        return f"{names[0]} W" if flow.is_live(index, 0) else f"W {names[-1]}"
    if operation.name in ("bmm", "matmul", "mm", "baddbmm"):
        added = f"{names[0]} + " if operation.name == "baddbmm" else ""
        return added + " ".join("kᵀ" if name == "kᵀ" else name for name in names[-2:])
    if bare in _SIGNS:
        return _with_sign(bare, names, said)
    return _shape_formula(operation, names, axes[index])


def _kernel_formula(names: Sequence[str], said: Mapping[str, Any]) -> str:
    scale = said.get("scale")
    scaled = "/ √d_head" if scale is None else f"· {_number(scale)}"
    mask = " + causal mask" if said.get("is_causal") else f" + {names[3]}" if len(names) > 3 else ""
    return f"softmax({names[0]} {names[1]}ᵀ {scaled}{mask}) {names[2]}, in one kernel"


def _with_sign(bare: str, names: Sequence[str], said: Mapping[str, Any]) -> str:
    """An operator between its two sides, of which one may be a number."""
    if len(names) >= 2:
        return f"{names[0]} {_SIGNS[bare]} {names[1]}"
    name = names[0] if names else "a number"
    if "input" in said:  # a number on the left
        return f"{_number(said['input'])} {_SIGNS[bare]} {name}"
    number = next((said[key] for key in ("other", "exponent", "1") if key in said), "")
    return f"{name} {_SIGNS[bare]} {_number(number)}"


def _shape_formula(operation: Operation, names: Sequence[str], axes: Sequence[str]) -> str:
    said, name = operation.arguments, operation.name
    source = ", ".join(names[:3]) + (f", … {len(names) - 3} more" if len(names) > 3 else "")
    if name == "transpose" and len(axes) > 1:
        exchanged = [_axis(said.get(key, place), axes) for key, place in (("dim0", -2), ("dim1", -1))]
        return f"{source}, {' ↔ '.join(exchanged)} exchanged"
    if name in ("permute", "movedim", *_CUTS, "expand", "squeeze", "unsqueeze"):
        return f"{source} as [{', '.join(axes)}]"
    if name == "contiguous":
        return f"{source}, copied into the order of its axes"
    if name in ("cat", "stack"):
        return f"{name} of {len(names)} tensors along {_axis(said.get('dim', 0), axes)}"
    if name in ("chunk", "split", "unbind", "tensor_split"):
        return f"part {int(said.get('output', 0)) + 1} of {source}, by {name}"
    if name == "getitem":
        return f"{source}[{_index(said.get('index', '…'))}]"
    if name == "setitem":
        value = _number(said["value"]) if "value" in said else names[-1]
        return f"{names[0]}[{_index(said.get('index', '…'))}] = {value}"
    told = {key: _number(value) for key, value in said.items() if key not in ("output", "dtype") and value is not None}
    numbers = [value if key.isdigit() else f"{key} {value}" for key, value in told.items()]
    return f"{name}({', '.join([*names[:3], *numbers[:3]])})"


def _axis(dim: object, axes: Sequence[str]) -> str:
    return axes[dim] if isinstance(dim, int) and -len(axes) <= dim < len(axes) else str(dim)


def _index(index: object) -> str:
    parts = index if isinstance(index, tuple) else (index,)
    return ", ".join(_one_index(part) for part in parts)


def _one_index(part: object) -> str:
    if isinstance(part, slice):
        return ":".join("" if end is None else str(end) for end in (part.start, part.stop))
    return "…" if part is Ellipsis else str(part)[:40]


def _number(value: object) -> str:
    if isinstance(value, float):
        return {float("inf"): "∞", float("-inf"): "−∞"}.get(value, f"{value:.6g}".replace("-", "−"))
    return str(value)[:40]


def softmax_axis(operation: Operation, axes: Sequence[str]) -> str:
    """The axis that a softmax runs over."""
    dim = operation.arguments.get("dim")
    if dim is None:  # torch's own old rule
        dim = 0 if operation.output.ndim in (0, 1, 3) else 1
    return _axis(dim, axes)


# ------------------------------------------------------------------------------------------------------ meaning and cost


def meaning_of(site: str, axes: Sequence[str]) -> str:
    """One sentence of what a site is for; nothing for what is no site of the house."""
    if site in ("q_proj", "k_proj", "v_proj") and not any("head·" in axis for axis in axes):
        site = f"{site[0]}_per_head"
    if site in _MEANINGS:
        return _MEANINGS[site]
    meaning = SITES[site].meaning if site in _HOUSE or site.endswith("_per_head") else ""
    return meaning if isinstance(meaning, str) else ""


def remark_of(operation: Operation, before: Sequence[str], axes: Sequence[str], *, is_attention: bool) -> str:
    """What is odd about a step: a softmax over something else than the keys; a view that would have to move numbers."""
    if is_attention and operation.name in SOFTMAXES:
        axis = softmax_axis(operation, axes)
        odd = f"the softmax runs over {axis}, not over key: the shares of a query do not sum to 1"
        return "" if "key" in axis.replace("kv_head", "") else odd
    if operation.name in _CUTS and before:
        moved = _moved(_spelled(before), _spelled(axes))
        if moved is not None:
            n, words = operation.name, " and ".join(moved)
            return f"a {n} keeps the numbers in their order, and cannot exchange {words}: they are mixed"
    return ""


def _spelled(axes: Sequence[str]) -> list[set[str]]:
    """The words of each axis; what has size 1, and the three of q, k and v, which may stand anywhere, left out."""
    parts = [set(axis.split("·")) for axis in axes if axis not in _UNORDERED]
    plain = [{word for word in part if not word.isdigit()} for part in parts]
    return [({"head", "d_head"} | part - {"d_model"}) if "d_model" in part else part for part in plain]


def _moved(old: list[set[str]], new: list[set[str]]) -> tuple[str, str] | None:
    """Two words that would have to exchange their places in memory, None where nothing has to. How the words of one axis lie
    is not known, and no reason to object."""
    if sorted(word for part in old for word in part) != sorted(word for part in new for word in part):
        return None
    before, after = iter(old), iter(new)
    left: set[str] = set()
    right: set[str] = set()
    while True:
        left, right = left or next(before, set()), right or next(after, set())
        if not left or not right:
            return None
        shared = left & right
        if not shared or (left - shared and right - shared):
            return min(left - shared), min(right - shared)
        left, right = left - shared, right - shared


def flops_of(flow: Flow, index: int) -> int:
    """Operations, a multiply-add counting 2, others 1 per number; 0 where that is not clear."""
    operation = flow.operations[index]
    n_out, bare = operation.output.numel(), operation.name.rstrip("_")
    if operation.name == "linear":
        return n_out * (2 * operation.inputs[1].shape[-1] + (len(operation.inputs) > 2))
    if operation.name == "einsum":
        letters = einsum_letters(operation.arguments.get("equation"), [t.ndim for t in operation.inputs])
        sizes = {x: n for term, t in zip(letters or (), operation.inputs, strict=False)
                 for x, n in zip(term, t.shape, strict=True)}  # fmt: skip
        return 2 * prod(sizes.values()) if letters else 0
    if operation.name in ("matmul", "bmm", "mm"):
        return 2 * n_out * operation.inputs[0].shape[-1]
    if operation.name in ("addmm", "baddbmm"):
        return n_out * (2 * operation.inputs[1].shape[-1] + 1)
    if operation.name == KERNEL:
        queries, keys, values = operation.inputs[:3]
        n_cells = queries.numel() // max(1, queries.shape[-1]) * keys.shape[-2]
        return n_cells * (2 * queries.shape[-1] + 6 + 2 * values.shape[-1])
    return _PER_NUMBER.get(bare, 0) * n_out


# ---------------------------------------------------------------------------------------------------------- the source


def variable_of(operation: Operation) -> str | None:
    """The variable on the left of the line that asked for it, where it is one alone; of several, that of its part."""
    if operation.file is None or operation.line is None:
        return None
    targets = _targets(operation.file).get(operation.line, ())
    part = operation.arguments.get("output")
    if isinstance(part, int) and part < len(targets):
        return targets[part]
    return targets[0] if len(targets) == 1 and part is None else None


@lru_cache(maxsize=64)
def _targets(file: str) -> Mapping[int, tuple[str, ...]]:
    """For each line of a file, the names that the assignment there gives."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[int, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            target = node.target
        else:
            continue
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        names = tuple(ast.unparse(part) for part in parts if isinstance(part, (ast.Name, ast.Attribute)))
        if len(names) == len(parts):
            found |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), names)
    return found
