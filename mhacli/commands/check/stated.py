"""The comparison with a statement as a part of an examination: of a model as a behaviour, and in
rows of several documents where the statement tells them apart.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mhacli.errors import UsageError
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.text_model import TextModel
from mhacli.usercode.user_attention import UserAttention

from .observed import Answers, Intent, Observed, Test, not_tried, seen
from .packing import CONFIGURED, document_lengths, way_of_example, ways_of
from .passes import Passes, is_family
from .result import CheckRequest, Tried
from .sees import Documents, Seeing, Statement, statement_of, who_sees


def stated_causal(request: CheckRequest) -> bool | None:
    """Whether tokens see only earlier ones, as stated; None where nothing is."""
    statement = statement_of(request)
    if statement is not None:
        return statement.hides_later
    is_stated = request.causal or request.not_causal
    return request.causal if is_stated else None


def tests_stated(request: CheckRequest) -> dict[str, Test]:
    """The further test of a model: whether its tokens see whom they are stated to see; none where
    nothing is.
    """
    statement = statement_of(request)
    if statement is None:
        return {}

    def test(passes: Passes, intent: Intent, answers: Answers) -> Observed:
        model = passes.model
        longest = min(passes.length, request.length or statement.length)
        if model.attention.is_pooled:
            return not_tried(passes, "its output is of a whole text, not of each token")
        found = seeing_in(
            model.attention, model, statement, request, longest=longest, tolerance=passes.tolerance
        )
        if found is None:
            return not_tried(passes, "no token can be replaced alone")
        tried = Tried(found.length, 1)
        return seen(passes, not found.findings, found.words, tried=tried, seeing=found)

    return {"sees": test}


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
            seeing = compare(replace(statement, documents=documents))
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
            yield Documents(lambda _: lengths, way.arguments, way.of_one_row)
        return
    ways = ways_of(model, causal=statement.hides_later, packed=True)
    for way in ways:
        # with these a family of transformers need not isolate documents
        is_left_out = way.mask == "ones" or (is_family(model) and way.cache.endswith(CONFIGURED))
        if way.name == ways[0].name and not is_left_out:
            yield Documents(document_lengths, way.arguments, way.of_one_row)
