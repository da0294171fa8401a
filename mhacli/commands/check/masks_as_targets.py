"""Targets that are masks themselves: functions of FlexAttention, its block masks, and functions
that make a mask. Their cells are compared with what is stated, or drawn.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.core import dtype_name, four_axes
from mhacli.errors import UsageError
from mhacli.models.capture import FORBIDDING
from mhacli.usercode.build import parse_value
from mhacli.usercode.door import Attempt, Unreadable, call_user, first_that_works
from mhacli.usercode.process import Stage
from mhacli.usercode.roles import signature
from mhacli.usercode.target import Choice, find_target

from .result import CheckRequest, Examination, Finding, Verdict, finding_of
from .sees import Compared, Statement, seeing_of, statement_of, words_of_cells

_DRAWN = 16
"""The length of a mask that is drawn, where nothing is stated."""
_SHORTER = (32, 16, 8, 4)
"""The lengths at which a mask is tried that is made of fewer tokens, such as documents."""
_N_HEADS = 4
_WIDTH = 16
_ID = 7
"""The heads, the width of a vector and the id of a token that a function is given."""
_TEXTS_AND_HEADS = (*product((3, 2, 1), (16, 8, 4, 2)), (1, 1))
"""The texts and heads of a function of FlexAttention, the first that it takes."""
_USUAL: Mapping[str, Any] = {"device": "cpu", "dtype": torch.float32}
"""The usual arguments by these names."""
_MOST_CELLS = 1 << 26
_LENGTH = re.compile(r"_*(t|n|l|s|size|sz|tq|tk|.*(len|length|seq|tokens|size_?[qk]v?).*)")
"""The names of lengths."""
_TEXT = re.compile(r"_*(x|ids|.*(src|tgt|trg|seq|_ids|tok|inp|text|hidden|emb).*)")
"""The names of a text."""
_BATCH = re.compile(r"_*(b|bs|bsz|batch\w*|b_idx|n)")
_HEAD = re.compile(r"_*(h|nh|head\w*|h_idx)")
"""The names of the number of a text, and of a head."""


class MaskCells(NamedTuple):
    """The cells of a mask for each text, how they were made, and a mistake in its blocks; `is_bool`
    if True may mean that a cell is hidden.
    """

    cells: Tensor
    described: str
    findings: tuple[Finding, ...] = ()
    is_bool: bool = False


def is_mask(thing: object) -> bool:
    """Whether an object is a mask by itself: a tensor, a block mask, or a function of
    FlexAttention.
    """
    return isinstance(thing, Tensor) or _is_block_mask(thing) or _n_of_function(thing) > 0


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
    if isinstance(thing, Tensor):
        length = thing.shape[-1] if thing.ndim else 0
    if statement is not None:
        statement.require_shown_at(length)
    lengths = (length, *(each for each in _SHORTER if each < length))
    calls = ((n, values) for n in lengths for values in _arguments(thing, request, n))

    def at(call: tuple[int, dict[str, Any] | None]) -> MaskCells:
        n, values = call
        return _read(thing if values is None else call_user(thing, **values), request, n)

    found = first_that_works(calls, at, tried.append)
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
    values = dict(given)
    names = list[str]()
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
    if _is_block_mask(made):
        return _of_blocks(made)
    if n := _n_of_function(made):
        kind = "mask_mod" if n == 4 else "score_mod"
        heads = request.n_heads
        sizes = [(b, heads or h) for b, h in _TEXTS_AND_HEADS]
        cells = first_that_works(sizes, lambda each: _of_function(made, *each, length, length))
        cells = _of_function(made, 1, 1, length, length) if cells is None else cells
        last = ", ".join(
            f"{name} = 0 to {n - 1}" for name, n in zip("bh", cells.shape, strict=False)
        )
        return MaskCells(cells, f"{kind}(b, h, q_idx, kv_idx) at {length} tokens, {last}")
    if not isinstance(made, Tensor) or not 2 <= made.ndim <= 4 or 1 in made.shape[-2:]:
        raise Unreadable("it makes no mask")
    if made.numel() > _MOST_CELLS:
        raise Unreadable(f"it makes {made.numel():,} cells")
    mask = four_axes(made.detach().cpu())
    is_bool = not mask.is_floating_point() or set(mask.unique().tolist()) == {0.0, 1.0}
    cells = mask != 0 if is_bool else mask > FORBIDDING
    if bool(cells.all()) and bool(mask.any()) and not is_bool:  # such as logits
        raise Unreadable("it makes numbers, none of which hides a cell")
    if is_bool and request.mask_means == "hide":
        cells = ~cells
    words = f"a mask {[*made.shape]} of {dtype_name(made.dtype)}"
    return MaskCells(cells, words, is_bool=is_bool)


def _of_function(function: Callable[..., Any], *sizes: int) -> Tensor:
    """The cells of a function of FlexAttention for texts, heads, queries and keys."""
    places = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    if _n_of_function(function) == 5:
        seen = call_user(function, torch.zeros(sizes), *places) > FORBIDDING
    else:
        seen = torch.as_tensor(call_user(function, *places))
    if seen.dtype != torch.bool:
        raise Unreadable(f"it gives {seen.dtype}, not True or False")
    cells: Tensor = seen.expand(sizes)
    return cells


def _of_blocks(mask: Any) -> MaskCells:
    """The cells that a block mask lets through, and the mistake in blocks that do not agree with
    its function: a full block is not looked into, and a block that is left out is not computed.
    """
    q_len, k_len = mask.seq_lengths
    sizes = mask.BLOCK_SIZE
    shape = (*mask.kv_num_blocks.shape[:2], q_len, k_len)
    if math.prod(shape) > _MOST_CELLS:
        raise Unreadable(f"it has {math.prod(shape):,} cells")
    of_function = _of_function(mask.mask_mod, *shape)
    lengths = mask.seq_lengths
    cells = of_function & _in_blocks(mask.kv_num_blocks, mask.kv_indices, sizes, lengths)
    if mask.full_kv_num_blocks is not None:
        cells |= _in_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, sizes, lengths)
    evidence = "; ".join(
        apart.where + words_of_cells(apart, each, verb)
        for apart in _compared_by_text(of_function, cells)
        for each, verb in (
            (apart.unstated, "sees, in a full block where mask_mod hides it,"),
            (apart.missing, "does not see, because its block is left out,"),
        )
        if each.any()
    )
    findings = (finding_of("blocks-differ", evidence),) if evidence else ()
    return MaskCells(cells, f"a BlockMask of {q_len} × {k_len} cells", findings)


def _in_blocks(
    counts: Tensor, indices: Tensor, sizes: tuple[int, int], lengths: tuple[int, int]
) -> Tensor:
    """The cells of the blocks of a list, for each text."""
    blocks = torch.zeros(indices.shape, dtype=torch.bool)
    for at in product(*map(range, counts.shape)):
        blocks[at][indices[at][: counts[at]].long()] = True
    cells = blocks.repeat_interleave(sizes[0], -2).repeat_interleave(sizes[1], -1)
    return cells[..., : lengths[0], : lengths[1]]


def _compared_by_text(stated: Tensor, measured: Tensor) -> list[Compared]:
    """The comparison for each text, or for all where they are alike."""
    is_alike = all((each == each[:1]).all() for each in (stated, measured))
    first = measured.shape[-1] - measured.shape[-2]
    return [
        Compared("" if is_alike else f"text {n}: ", None, *pair, first, counts_all=True)
        for n, pair in enumerate(zip(stated, measured, strict=True))
    ][: 1 if is_alike else None]


# ------------------------------------------------------------------------------------- the report


def _report(found: MaskCells, request: CheckRequest, statement: Statement | None) -> Examination:
    """The report on a mask: beside what is stated, or drawn."""
    cells = found.cells
    choices = list[Choice]()
    *_, q_len, k_len = cells.shape
    size = f"{q_len} × {k_len} cells"
    if statement is None:
        compared = _compared_by_text(cells[..., :0, :], cells)
        words = f"{size}; nothing is stated"
        findings = found.findings
    else:
        stated = statement.cells(q_len, k_len, n_heads=cells.shape[1]).expand_as(cells)
        compared = _compared_by_text(stated, cells)
        turned = _compared_by_text(stated, ~cells)
        is_open = found.is_bool and request.mask_means is None
        if is_open and not any(each.differs for each in turned):
            compared = turned
            choices.append(Choice("mask-means-hide", "True hides a cell"))
        seeing = seeing_of(compared, "")
        words = f"{size}: {seeing.words}"
        findings = (*found.findings, *seeing.findings)
    verdict: Verdict = "consistent" if statement is None else "right"
    if findings:
        verdict = "wrong"
    return Examination(
        verdict=verdict,
        target=request.target_request.target,
        called=found.described,
        findings=findings,
        choices=tuple(choices),
        mask=words,
        sees=tuple(document for each in compared for document in each.documents()),
    )
