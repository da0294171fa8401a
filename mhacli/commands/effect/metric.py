"""What is measured: the output of a pass, which is a vector, and the scores of the outcomes that a
model chooses from, if it has any; the position; and the token, class or other outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, assert_never

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.errors import UsageError, out_of_range
from mhacli.models.load import ModelTokenizer
from mhacli.models.run import first_tensor, run_model
from mhacli.record.effect import Measured
from mhacli.usercode.door import ours

from .foreign import config_value
from .settings import EffectSettings


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
    logits, cache = (
        named.get("logits", named.get("prediction_logits")),
        named.get("past_key_values"),
    )
    if hidden and isinstance(logits, Tensor):
        vector = hidden[-1].flatten(0, 1).double()
        scores = logits.flatten(0, 1).double()
        return RowOutputs("token", vector, scores, cache)
    if "start_logits" in named:
        return _of_span(named["start_logits"].double(), named["end_logits"].double())
    if not isinstance(logits, Tensor):
        first = None if hidden else first_tensor(outputs)
        if first is None or not 2 <= first.ndim <= 3:
            message = f"no vector or logits are found in the output, a {type(outputs).__name__}"
            raise UsageError(message, hint="give a metric")
        return RowOutputs("vector", _vectors(first, at, n_rows).double(), cache=cache)
    if logits.ndim > 2:
        scores = logits[:, at].flatten(0, 1).double()
        return RowOutputs("tag", scores, scores, cache)
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


def _vectors(x: Tensor, at: Sequence[int], n_rows: int) -> Float[Tensor, "row d"]:
    """The vectors of a tensor that a model returns, at some positions if it has several."""
    if x.shape[0] != n_rows:
        # a single sequence without an axis of its own, or with it behind that of tokens
        x = x[None] if x.ndim == 2 else x.transpose(0, 1)
    return x if x.ndim == 2 else x[:, at].flatten(0, 1)


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


# --------------------------------------------------------------------------- where it is measured


_MASK_TOKENS = ("[MASK]", "<mask>")


def measured_position(settings: EffectSettings, tokens: Sequence[str]) -> int:
    """The measured position of a text: the one of the settings, else that of the first mask token,
    else the last. Raises `UsageError` for one that does not exist.
    """
    n = len(tokens)
    if settings.position is None:
        return next((i for i, token in enumerate(tokens) if token.strip() in _MASK_TOKENS), n - 1)
    if not -n <= settings.position < n:
        raise UsageError(out_of_range("--position", settings.position, n))
    return settings.position % n


@dataclass(frozen=True)
class Outcomes:
    """What a model chooses from, by its output for a text of these tokens."""

    model: Any
    settings: EffectSettings
    outputs: RowOutputs
    tokens: Sequence[str]
    tokenizer: ModelTokenizer | None

    def target(self) -> Target | None:
        """The measured outcome, the likeliest unless the settings name one; None for a model that
        gives a vector. Raises `UsageError` for outcomes that do not exist, and for settings that
        mean nothing to this model.
        """
        settings, measured = self.settings, self.outputs.measured
        is_of_text = measured in ("class", "score", "span", "metric")
        if is_of_text and settings.position is not None and not settings.edges:
            raise UsageError(
                f"--position changes nothing: the {measured} is that of the whole text",
                hint="leave --position out",
            )
        if self.outputs.scores is None:
            self._require_no_outcome()
            return None
        if settings.target is None:
            outcome = int(self.outputs.scores[0].argmax())
        else:
            outcome = self._number("target", settings.target)
        if settings.versus is None:
            return Target(outcome, None)
        return Target(outcome, self._number("versus", settings.versus))

    def _require_no_outcome(self) -> None:
        for name in ("screen", "target", "versus"):
            if getattr(self.settings, name) is not None:
                raise UsageError(
                    f"--{name} needs logits, which this model does not give",
                    hint="without it, the change of the output vector is measured",
                )

    def _number(self, parameter: str, word: str | int) -> int:
        """The number of a token, class or tag."""
        assert self.outputs.scores is not None
        option, measured = f"--{parameter}", self.outputs.measured
        if isinstance(word, str) and measured == "token" and self.tokenizer is not None:
            return self._token(option, word, self.tokenizer)
        n_outcomes = self.outputs.scores.shape[1]
        numbers: dict[str, str] = {}
        if measured != "token":
            numbers = {self.name(i): str(i) for i in range(n_outcomes)}
        number = numbers.get(str(word), str(word))
        if number.isdecimal() and int(number) < n_outcomes:
            return int(number)
        hint = f"give an id up to {n_outcomes - 1}"
        if numbers:
            hint = f"it is one of: {', '.join([*numbers][:20])}"
        raise UsageError(f"{option} {word!r} is not a {measured} of the model", hint=hint)

    def _token(self, option: str, word: str, tokenizer: ModelTokenizer) -> int:
        """The id of a token."""
        sequence = tokenizer.sequence(word, special=False)
        n_tokens = len(sequence.ids)
        if n_tokens == 0 or (n_tokens > 1 and not self.settings.target_first):
            pieces = " ".join(repr(token) for token in sequence.tokens)
            raise UsageError(
                f"{option} {word!r} is {n_tokens} tokens: {pieces}",
                hint="--target-first takes the first of them",
            )
        if sequence.unknown(0) is not None:
            raise UsageError(f"{option} {word!r} is not in the vocabulary of the tokenizer")
        return sequence.ids[0]

    def name(self, number: int) -> str:
        """The name of a token, class, tag or answer."""
        measured = self.outputs.measured
        match measured:
            case "span":
                start, end = divmod(number, len(self.tokens))
                return " ".join(self.tokens[start : end + 1]) or f"{start} to {end}"
            case "score" | "metric":
                return measured
            case "token":
                if self.tokenizer is None:
                    return str(number)
                return self.tokenizer.of_ids([number]).tokens[0]
            case "class" | "tag" | "vector":
                return str((config_value(self.model, "id2label") or {}).get(number, number))
            case _:
                assert_never(measured)
