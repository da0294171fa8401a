"""Targets that are masks themselves: functions of FlexAttention, its block masks, and functions
that make a mask. Their cells are compared with what is stated, or drawn.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.core import dtype_name, four_axes
from mhacli.errors import UsageError
from mhacli.models.capture import FORBIDDING
from mhacli.usercode.build import parse_value
from mhacli.usercode.door import NO_ANSWER, Attempt, Unreadable, call_user, first_that_works
from mhacli.usercode.process import Stage
from mhacli.usercode.roles import signature
from mhacli.usercode.target import Choice, find_target

from .result import CheckRequest, Examination, Finding, Verdict, finding_of
from .sees import Cells, Compared, Statement, seeing_of, statement_of, words_of_cells

_DRAWN = 16
"""The length of a mask that is drawn, where nothing is stated."""
_SHORTER = (32, 16, 8, 4)
"""The lengths at which a mask is tried that is made of fewer tokens, such as documents."""
_N_HEADS, _WIDTH, _ID = 4, 16, 7
_USUAL: Mapping[str, Any] = {"device": "cpu", "dtype": torch.float32}
"""The usual arguments by these names."""
_MOST_CELLS = 1 << 26
_LENGTH = re.compile(r"_*(t|n|l|s|size|sz|tq|tk|.*(len|length|seq|tokens|size_?[qk]v?).*)")
"""The names of lengths."""
_TEXT = re.compile(r"_*(x|ids|.*(src|tgt|trg|seq|_ids|tok|inp|text|hidden|emb).*)")
"""The names of a text."""
_BATCH, _HEAD = re.compile(r"_*(b|bs|bsz|batch\w*|b_idx|n)"), re.compile(r"_*(h|nh|head\w*|h_idx)")


class MaskCells(NamedTuple):
    """The cells of a mask, how they were made, and a mistake in its blocks; `is_bool` if True may
    mean that a cell is hidden.
    """

    cells: Cells
    described: str
    findings: tuple[Finding, ...] = ()
    is_bool: bool = False


def is_mask(thing: object) -> bool:
    """Whether an object is a mask by itself: a block mask, or a function of FlexAttention."""
    return _is_block_mask(thing) or _n_of_function(thing) > 0


def mask_of_target(request: CheckRequest, stage: Stage) -> object:
    """The target if it is a mask, or a function that may make one; else None."""
    name = request.target_request.target
    stage(f"importing {name}")
    thing = find_target(name)
    return thing if is_mask(thing) or inspect.isroutine(thing) else None


def examine_mask(thing: Any, request: CheckRequest, stage: Stage) -> Examination:
    """The report on a mask, or on what a function makes. Raises `UserRaised`, and `MhaError` if it
    is none.
    """
    statement = statement_of(request)
    if statement is not None and statement.has_documents:
        message = "--sees: doc[…] has no meaning for a mask, whose documents are its own"
        raise UsageError(message, hint="state them by places, such as q // 16 == k // 16")
    stage(f"calling {request.target_request.target}")
    tried = list[Attempt]()
    length = request.length or (_DRAWN if statement is None else statement.length)
    if statement is not None:
        statement.require_shown_at(length)
    lengths = (length, *(each for each in _SHORTER if each < length))
    calls = ((n, values) for n in lengths for values in _arguments(thing, request, n))

    def at(call: tuple[int, dict[str, Any] | None]) -> MaskCells:
        n, values = call
        return _read(thing if values is None else call_user(thing, **values), request, n)

    found = first_that_works(calls, at, tried)
    if found is None:
        raise tried[0].failure if tried else Unreadable("it makes no mask")
    return _report(found, request, statement)


# ---------------------------------------------------------------------------- the cells of a mask


def _is_block_mask(thing: object) -> bool:
    return hasattr(thing, "mask_mod") and hasattr(thing, "kv_num_blocks")


def _n_of_function(thing: Any) -> int:
    """How many arguments a function of FlexAttention takes: 4 of a mask, 5 of scores; else 0."""
    if not inspect.isroutine(thing) and not hasattr(thing, "func"):
        return 0
    parameters = signature(thing).parameters.values()
    names = [each.name for each in parameters if each.default is each.empty]
    of_places = names[-4:]
    is_known = len(names) in (4, 5) and _BATCH.fullmatch(of_places[0])
    return len(names) if is_known and _HEAD.fullmatch(of_places[1]) else 0


def _arguments(thing: Any, request: CheckRequest, length: int) -> Iterator[dict[str, Any] | None]:
    """The arguments of a function that makes a mask: lengths, or in the first place token ids, or
    vectors; None for a mask itself.
    """
    if is_mask(thing):
        yield None
        return
    target = request.target_request
    given = {
        name: parse_value(text, thing) for name, text in target.arguments + target.call_arguments
    }
    values, names = dict(given), list[str]()
    for each in signature(thing).parameters.values():
        is_open = each.default is each.empty and each.name not in given
        if not is_open or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        name = each.name.lower()
        values[each.name] = _USUAL.get(each.name, length)
        if _BATCH.fullmatch(name) and "batch" in name:
            values[each.name] = 1
        elif "head" in name:
            values[each.name] = request.n_heads or _N_HEADS
        elif each.name not in _USUAL:
            names.append(each.name)
    is_length = [_LENGTH.fullmatch(name.lower()) for name in names]
    if all(is_length):
        yield values
    if names and _TEXT.fullmatch(names[0].lower()) and all(is_length[1:]):
        yield {**values, names[0]: torch.full((1, length), _ID)}
        yield {**values, names[0]: torch.ones(1, length, _WIDTH)}


def _read(made: Any, request: CheckRequest, length: int) -> MaskCells:
    """The cells of a mask. Raises `Unreadable` if it is none."""
    n_heads = request.n_heads or _N_HEADS
    if _is_block_mask(made):
        return _of_blocks(made)
    if n := _n_of_function(made):
        kind = "mask_mod" if n == 4 else "score_mod"
        cells = _of_function(made, n_heads, length, length)
        heads = f"h = 0 to {len(cells) - 1}" if cells[1:].any() else "h = 0"
        words = f"{kind}(b, h, q_idx, kv_idx) at {length} tokens, b = 0, {heads}"
        return MaskCells(cells, words)
    if not isinstance(made, Tensor) or not 2 <= made.ndim <= 4 or 1 in made.shape[-2:]:
        raise Unreadable("it makes no mask")
    if made.numel() > _MOST_CELLS:
        raise Unreadable(f"it makes {made.numel():,} cells")
    mask = four_axes(made.detach().cpu())[0]
    is_bool = not mask.is_floating_point() or set(mask.unique().tolist()) == {0.0, 1.0}
    cells = mask != 0 if is_bool else mask > FORBIDDING
    if bool(cells.all()) and bool(mask.any()) and not is_bool:  # such as logits
        raise Unreadable("it makes numbers, none of which hides a cell")
    if is_bool and request.mask_means == "hide":
        cells = ~cells
    of_first = ", that of the first text" if made.ndim == 4 and len(made) > 1 else ""
    words = f"a mask {[*made.shape]} of {dtype_name(made.dtype)}{of_first}"
    return MaskCells(cells, words, is_bool=is_bool)


def _of_function(function: Callable[..., Any], n_heads: int, q_len: int, k_len: int) -> Cells:
    """The cells of a function of FlexAttention, for one head if it takes no more."""
    n = _n_of_function(function) or 4

    def cells(n_heads: int) -> Cells:
        places = [torch.arange(size) for size in (1, n_heads, q_len, k_len)]
        batch, head, query, key = torch.meshgrid(*places, indexing="ij")
        if n == 4:
            seen = call_user(function, batch, head, query, key)
        else:
            scores = torch.zeros(batch.shape)
            seen = call_user(function, scores, batch, head, query, key) > FORBIDDING
        seen = torch.as_tensor(seen)
        if seen.dtype != torch.bool:
            raise Unreadable(f"it gives {seen.dtype}, not True or False")
        return seen.expand(batch.shape)[0]

    try:
        return cells(n_heads)
    except NO_ANSWER:
        return cells(1)


def _of_blocks(mask: Any) -> MaskCells:
    """The cells that a block mask lets through, and the mistake in blocks that do not agree with
    its function: a full block is not looked into, and a block that is left out is not computed.
    """
    (q_len, k_len), sizes = mask.seq_lengths, mask.BLOCK_SIZE
    n_heads = mask.kv_num_blocks.shape[1]
    if n_heads * q_len * k_len > _MOST_CELLS:
        raise Unreadable(f"it has {n_heads * q_len * k_len:,} cells")
    of_function = _of_function(mask.mask_mod, n_heads, q_len, k_len)
    lengths = mask.seq_lengths
    cells = of_function & _in_blocks(mask.kv_num_blocks, mask.kv_indices, sizes, lengths)
    if mask.full_kv_num_blocks is not None:
        cells |= _in_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, sizes, lengths)
    apart = Compared("", None, of_function, cells, counts_all=True)
    words = (
        (apart.unstated, "sees, in a full block where mask_mod hides it,"),
        (apart.missing, "does not see, because its block is left out,"),
    )
    evidence = "; ".join(words_of_cells(apart, each, verb) for each, verb in words if each.any())
    findings = (finding_of("blocks-differ", evidence),) if evidence else ()
    return MaskCells(cells, f"a BlockMask of {q_len} × {k_len} cells", findings)


def _in_blocks(
    counts: Tensor, indices: Tensor, sizes: tuple[int, int], lengths: tuple[int, int]
) -> Cells:
    """The cells of the blocks of a list, of the first text."""
    _, n_heads, n_rows, n_columns = indices.shape
    blocks = torch.zeros(n_heads, n_rows, n_columns, dtype=torch.bool)
    for head, row in product(range(n_heads), range(n_rows)):
        blocks[head, row, indices[0, head, row, : counts[0, head, row]].long()] = True
    cells = blocks.repeat_interleave(sizes[0], -2).repeat_interleave(sizes[1], -1)
    return cells[:, : lengths[0], : lengths[1]]


# ------------------------------------------------------------------------------------- the report


def _report(found: MaskCells, request: CheckRequest, statement: Statement | None) -> Examination:
    """The report on a mask: beside what is stated, or drawn."""
    cells, choices = found.cells, list[Choice]()
    *_, q_len, k_len = cells.shape
    size = f"{q_len} × {k_len} cells"
    if statement is None:
        compared, words = Compared("", None, cells[:, :0], cells), f"{size}; nothing is stated"
        findings = found.findings
    else:
        stated = statement.cells(q_len, k_len, n_heads=len(cells))
        compared = Compared("", None, stated, cells, k_len - q_len, counts_all=True)
        turned = replace(compared, measured=~cells)
        if found.is_bool and request.mask_means is None and not turned.differs:
            compared = turned
            choices.append(Choice("mask-means-hide", "True hides a cell"))
        seeing = seeing_of([compared], "")
        words, findings = f"{size}: {seeing.words}", (*found.findings, *seeing.findings)
    verdict: Verdict = "wrong" if findings else "consistent" if statement is None else "right"
    return Examination(
        verdict=verdict,
        target=request.target_request.target,
        called=found.described,
        findings=findings,
        choices=tuple(choices),
        mask=words,
        sees=tuple(compared.documents()),
    )
