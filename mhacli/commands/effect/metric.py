"""The measured output of a pass: a vector, and the scores of the outcomes that a model chooses
from, if it has any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.errors import UsageError
from mhacli.models.run import first_tensor, run_model
from mhacli.record.effect import Measured
from mhacli.usercode.door import ours


class Target(NamedTuple):
    """The number of the measured outcome; with a second one, the measure is the difference of both
    scores.
    """

    outcome: int
    versus: int | None


GivenMetric = Callable[[Any], Tensor]
"""What a user measures: a function of the output of the model for one text that gives a number."""


class RowOutputs(NamedTuple):
    """The output of each row, in float64: the vector that is compared, and the scores of all
    outcomes; and the keys and values of the tokens, if the model keeps them.

    A language head scores `token`s at one position, and the vector is the hidden state before it.
    The others' vectors are their scores: those of a `class` of the text, of a `tag` at one
    position, or of its start and end (a `span`, with the sum of both as its score), or a single
    `score`, or the value of a user's `metric`. A `vector` has no scores.
    """

    measured: Measured
    vector: Float[Tensor, "row d"]
    scores: Float[Tensor, "row outcome"] | None = None
    cache: Any = None

    def row(self, n: int) -> RowOutputs:
        """The output of one row."""
        return RowOutputs(
            self.measured,
            self.vector[n, None],
            None if self.scores is None else self.scores[n, None],
        )


def read(
    model: Any,
    inputs: Mapping[str, Any],
    at: Sequence[int],
    metric: GivenMetric | None = None,
    *,
    n_rows: int = 1,
) -> RowOutputs:
    """The output of one pass over `n_rows` sequences, one of each row, or one with all rows, at the
    positions `at`. Logits of tokens are computed only there.
    """
    language_head = None
    if metric is None and hasattr(model, "get_output_embeddings"):
        language_head = model.get_output_embeddings()
    hidden: list[Tensor] = []

    @ours()
    def crop(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden.append(args[0][:, at])
        return (hidden[-1], *args[1:])

    keywords = dict(inputs)
    if hasattr(getattr(model, "config", None), "use_cache"):
        keywords.setdefault("use_cache", False)
    with ExitStack() as stack:
        if language_head is not None:
            stack.callback(language_head.register_forward_pre_hook(crop).remove)
        outputs = run_model(model, lambda: model(**keywords))
    if metric is not None:
        return _of_metric(metric(outputs))
    named = outputs if isinstance(outputs, Mapping) else {}
    logits = named.get("logits", named.get("prediction_logits"))
    if hidden and isinstance(logits, Tensor):
        vector = hidden[-1].flatten(0, 1).double()
        scores = logits.flatten(0, 1).double()
        return RowOutputs("token", vector, scores, named.get("past_key_values"))
    if "start_logits" in named:
        return _of_span(named["start_logits"].double(), named["end_logits"].double())
    if not isinstance(logits, Tensor):
        return _of_vector(None if hidden else first_tensor(outputs), outputs, at, n_rows)
    if logits.ndim > 2:
        scores = logits[:, at].flatten(0, 1).double()
        return RowOutputs("tag", scores, scores, named.get("past_key_values"))
    scores = logits.double()
    return RowOutputs("class" if logits.shape[1] > 1 else "score", scores, scores)


def _of_metric(value: Any) -> RowOutputs:
    """The output by a user's metric. Raises `UsageError` for more than one number."""
    number = torch.as_tensor(value).double()
    if number.numel() != 1:
        shape, hint = tuple(number.shape), "such as lambda out: out.logits[0, 3]"
        raise UsageError(f"metric gives {shape}, not a number", hint=hint)
    return RowOutputs("metric", number.reshape(1, 1), number.reshape(1, 1))


def _of_span(start: Tensor, end: Tensor) -> RowOutputs:
    """The output by the logits of the start and the end of an answer, `[row, token]`."""
    sums = start[:, :, None] + end[:, None]
    return RowOutputs("span", torch.cat([start, end], dim=1), sums.flatten(1))


def _of_vector(first: Tensor | None, outputs: Any, at: Sequence[int], n_rows: int) -> RowOutputs:
    """The output by the first tensor that the model returns, at some positions if it has several.
    Raises `UsageError` if there is none.
    """
    if first is None or not 2 <= first.ndim <= 3:
        kind = type(outputs).__name__
        message = f"no vector or logits are found in the output, a {kind}"
        raise UsageError(message, hint="give a metric")
    if first.shape[0] != n_rows:
        # a single sequence without an axis of its own, or with it behind that of tokens
        first = first[None] if first.ndim == 2 else first.transpose(0, 1)
    vector = first if first.ndim == 2 else first[:, at].flatten(0, 1)
    cache = outputs.get("past_key_values") if isinstance(outputs, Mapping) else None
    return RowOutputs("vector", vector.double(), cache=cache)


def values(outputs: RowOutputs, target: Target | None) -> dict[str, Tensor]:
    """Of each row the score of the target, minus that of the outcome it is compared with, and if
    there are several outcomes its log probability, and the number of outcomes that are likelier.
    """
    scores = outputs.scores
    if scores is None or target is None:
        return {}
    of_target = scores[:, target.outcome]
    logit = of_target if target.versus is None else of_target - scores[:, target.versus]
    if scores.shape[1] == 1:
        return {"logit": logit}
    return {
        "logit": logit,
        "logprob": scores.log_softmax(dim=-1)[:, target.outcome],
        "rank": (scores > of_target[:, None]).sum(dim=-1),
    }


def changes(
    rows: RowOutputs, untouched: RowOutputs, target: Target | None
) -> dict[str, Float[Tensor, " row"]]:
    """The changes of rows from one without removals, by their fields in `Effect`: of the vector, of
    the target's score, and of all scores if there are several. `rank` is that of the row.
    """
    after = values(rows, target)
    before = values(untouched, target)
    length = untouched.vector.norm(dim=-1)
    by_name = {"d_output": (rows.vector - untouched.vector).norm(dim=-1) / length}
    for name in after.keys() - {"rank"}:
        by_name[f"d_{name}"] = after[name] - before[name]
    if "rank" in after and rows.scores is not None and untouched.scores is not None:
        log_p = rows.scores.log_softmax(dim=-1)
        log_q = untouched.scores.log_softmax(dim=-1)
        by_name["kl"] = (log_q.exp() * (log_q - log_p)).sum(dim=-1)
        by_name["rank"] = after["rank"]
    return by_name
