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
from mhacli.models.places import first_tensor
from mhacli.models.run import run_model
from mhacli.record.effect import Measured

Target = tuple[int, int | None]
"""The number of the measured outcome; with a second one, the measure is the difference of both
scores."""
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
    head = (
        model.get_output_embeddings()
        if hasattr(model, "get_output_embeddings") and metric is None
        else None
    )
    hidden = list[Tensor]()
    more: dict[str, Any] = (
        {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}
    )

    def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden.append(args[0][:, at])
        return (hidden[-1], *args[1:])

    with ExitStack() as stack:
        if head is not None:
            stack.callback(head.register_forward_pre_hook(take).remove)
        outputs = run_model(model, lambda: model(**more | dict(inputs)))
    if metric is not None:
        value = torch.as_tensor(metric(outputs)).double()
        if value.numel() != 1:
            shape, hint = tuple(value.shape), "such as lambda out: out.logits[0, 3]"
            raise UsageError(f"metric gives {shape}, not a number", hint=hint)
        return RowOutputs("metric", value.reshape(1, 1), value.reshape(1, 1))
    named = outputs if isinstance(outputs, Mapping) else {}
    cache, logits = (
        named.get("past_key_values"),
        named.get("logits", named.get("prediction_logits")),
    )
    if hidden and isinstance(logits, Tensor):
        return RowOutputs(
            "token", hidden[-1].flatten(0, 1).double(), logits.flatten(0, 1).double(), cache
        )
    if "start_logits" in named:
        start, end = named["start_logits"].double(), named["end_logits"].double()
        return RowOutputs(
            "span", torch.cat([start, end], dim=1), (start[:, :, None] + end[:, None]).flatten(1)
        )
    if not isinstance(logits, Tensor):  # the first tensor, at some positions if it has several
        first = first_tensor(outputs)
        if hidden or first is None or not 2 <= first.ndim <= 3:
            kind = type(outputs).__name__
            raise UsageError(
                f"no vector or logits are found in the output, a {kind}", hint="give a metric"
            )
        if (
            first.shape[0] != n_rows
        ):  # a single sequence without an axis of its own, or with it behind that of tokens
            first = first[None] if first.ndim == 2 else first.transpose(0, 1)
        return RowOutputs(
            "vector",
            (first if first.ndim == 2 else first[:, at].flatten(0, 1)).double(),
            cache=cache,
        )
    if logits.ndim > 2:
        scores = logits[:, at].flatten(0, 1).double()
        return RowOutputs("tag", scores, scores, cache)
    return RowOutputs("class" if logits.shape[1] > 1 else "score", logits.double(), logits.double())


def values(outputs: RowOutputs, target: Target | None) -> dict[str, Tensor]:
    """Of each row the score of the target, minus that of the outcome it is compared with, and if
    there are several outcomes its log probability, and the number of outcomes that are likelier.
    """
    scores = outputs.scores
    if scores is None or target is None:
        return {}
    of_target, other = scores[:, target[0]], 0.0 if target[1] is None else scores[:, target[1]]
    if scores.shape[1] == 1:
        return {"logit": of_target - other}
    rank = (scores > of_target[:, None]).sum(dim=-1)
    return {
        "logit": of_target - other,
        "logprob": scores.log_softmax(dim=-1)[:, target[0]],
        "rank": rank,
    }


def changes(
    rows: RowOutputs, untouched: RowOutputs, target: Target | None
) -> dict[str, Float[Tensor, " row"]]:
    """The changes of rows from one without removals, by their fields in `Effect`: of the vector, of
    the target's score, and of all scores if there are several. `rank` is that of the row.
    """
    after, before = values(rows, target), values(untouched, target)
    found = {
        "d_output": (rows.vector - untouched.vector).norm(dim=-1) / untouched.vector.norm(dim=-1)
    }
    found |= {f"d_{name}": after[name] - before[name] for name in after.keys() - {"rank"}}
    if "rank" in after and rows.scores is not None and untouched.scores is not None:
        log_p, log_q = rows.scores.log_softmax(dim=-1), untouched.scores.log_softmax(dim=-1)
        found |= {"kl": (log_q.exp() * (log_q - log_p)).sum(dim=-1), "rank": after["rank"]}
    return found
