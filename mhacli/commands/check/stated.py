"""The comparison with a statement as a part of an examination: of a model as a behaviour, and in
rows of several documents where the statement tells them apart.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mhacli.errors import UsageError
from mhacli.models.layer_names import config_of
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.text_model import TextModel
from mhacli.usercode.user_attention import UserAttention

from .observed import Answers, Intent, Observed, Test, not_tried, seen
from .packing import Way, document_lengths, way_of_example, ways_of
from .passes import Passes
from .result import CheckRequest, Tried
from .sees import Documents, Seeing, Statement, who_sees


def as_stated(request: CheckRequest, statement: Statement) -> Test:
    """The test of whether the tokens of a model see whom they are stated to see."""

    def test(passes: Passes, intent: Intent, answers: Answers) -> Observed:
        model, longest = passes.model, min(passes.length, request.length or statement.length)
        if model.attention.is_pooled:
            return not_tried(passes, "its output is of a whole text, not of each token")
        found = seeing_in(
            model.attention, model, statement, request, longest=longest, tolerance=passes.tolerance
        )
        if found is None:
            return not_tried(passes, "no token can be replaced alone")
        tried = Tried(found.length, 1)
        return seen(passes, not found.findings, found.words, tried=tried, seeing=found)

    return test


def seeing_in(
    attention: UserAttention,
    model: TextModel | None,
    statement: Statement,
    request: CheckRequest,
    *,
    longest: int | None = None,
    tolerance: float | None = None,
) -> Seeing | None:
    """The comparison of an attention, which is that of a `model` of texts if it reads them, with a
    statement; None where nothing can be measured. Of several ways to tell documents apart that one
    counts which is right, because an argument may have several forms. Raises `OutOfTime`, and
    `UsageError` where a statement has documents and nothing tells them apart.
    """
    compare = partial(who_sees, attention, request=request, longest=longest, tolerance=tolerance)
    if not statement.has_documents:
        return compare(statement)
    found = list[Seeing]()
    for documents in _documents(attention, model, statement, longest):
        with suppress(*NO_ANSWER):
            seeing = compare(statement.with_documents(documents))
            if seeing is not None:
                found.append(seeing)
                if not seeing.findings:
                    return seeing
    if not found:
        message = "--sees: doc[…] has no meaning here: the call takes nothing by a known name"
        raise UsageError(f"{message} that tells documents apart")
    return found[0]


def _documents(
    attention: UserAttention, model: TextModel | None, statement: Statement, longest: int | None
) -> Iterator[Documents]:
    """The ways to give a call several documents in one row."""
    if model is None:
        return
    if attention.example is not None:
        with suppress(*NO_ANSWER):
            way, lengths = way_of_example(attention, longest or attention.sizes.q_len, packed=True)
            yield Documents(lambda _: _numbers(lengths), lambda *_: {}, way.of_one_row)
        return
    ways = [
        way
        for way in ways_of(model, causal=statement.hides_later, packed=True)
        if not _is_left_out(way, model)
    ]
    for way in ways:
        if way.name == ways[0].name:
            yield Documents(_numbers_at, partial(_arguments_at, way), way.of_one_row)


def _is_left_out(way: Way, model: TextModel) -> bool:
    """Whether a family of transformers need not isolate documents in this way: with a mask of ones,
    or with a cache.
    """
    is_family = config_of(model.attention.built.module) is not None
    return way.mask == "ones" or (is_family and bool(way.cache) and "False" not in way.cache)


def _numbers_at(length: int) -> Tensor:
    """The numbers of documents in a text of a length."""
    return _numbers(document_lengths(length))


def _arguments_at(way: Way, length: int, n_rows: int) -> dict[str, Any]:
    """The arguments that tell them apart."""
    return way.arguments(document_lengths(length), n_rows)


def _numbers(lengths: Sequence[int]) -> Tensor:
    """The number of the document at each place."""
    ends = torch.tensor([*accumulate(lengths)])
    return torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)
