"""Where an effect is measured: the position, and the token, class or other outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from mhacli.commands.effect.foreign import config_value
from mhacli.commands.effect.metric import RowOutputs, Target
from mhacli.commands.effect.settings import EffectSettings
from mhacli.errors import UsageError, out_of_range
from mhacli.models.load import ModelTokenizer

_MASK_TOKENS = ("[MASK]", "<mask>")


def measured_position(settings: EffectSettings, tokens: Sequence[str]) -> int:
    """The measured position of a text: the one of the settings, else that of the first mask token,
    else the last. Raises `UsageError` for one that does not exist.
    """
    n = len(tokens)
    if settings.position is None:
        return next((i for i, token in enumerate(tokens) if token.strip() in _MASK_TOKENS), n - 1)
    if not -n <= settings.position < n:
        raise UsageError(out_of_range(settings.name_of("position"), settings.position, n))
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
            name = settings.name_of("position")
            message = f"{name} changes nothing: the {measured} is that of the whole text"
            raise UsageError(message, hint=f"leave {name} out")
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
                option = self.settings.name_of(name)
                message = f"{option} needs logits, which this model does not give"
                hint = "without it, the change of the output vector is measured"
                raise UsageError(message, hint=hint)

    def _number(self, parameter: str, word: str | int) -> int:
        """The number of a token, class or tag."""
        assert self.outputs.scores is not None
        option, measured = self.settings.name_of(parameter), self.outputs.measured
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
            hint = f"{self.settings.name_of('target_first')} takes the first of them"
            raise UsageError(f"{option} {word!r} is {n_tokens} tokens: {pieces}", hint=hint)
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
