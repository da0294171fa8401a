"""What is said of a step of a walk, the same on every surface: its memory, values and weights, and the tokens that came in."""

from __future__ import annotations

from collections.abc import Sequence

from mhacli.render.base.format import number_text, sparkline
from mhacli.results.record.record import Parameter, Step, Values
from mhacli.text.escape import token_label, visible

_MASKED = ("scores", "bias", "masked")


def is_masked(step: Step) -> bool:
    """Whether −∞ is no accident at its site: it says that a cell may not be attended."""
    return step.site in _MASKED


def memory_text(step: Step, *, in_brief: bool = False) -> str:
    """Whose memory it is, or why there is none: `view of q_proj: the same memory`, `a new tensor`. `in_brief` does not say what a
    view is."""
    if not step.built:
        return "made to be seen here, never by the kernel that ran"
    if step.view_of:
        return f"view of {visible(step.view_of)}{'' if in_brief else ': the same memory'}"
    return (
        f"a view that repeats its rows{'' if in_brief else ' (strides of 0)'}"
        if step.layout == "view"
        else "a new tensor"
    )


def values_text(step: Step, values: Values, *, in_brief: bool = False) -> str:
    """Range and distribution, moments, and what is not finite: `-1.5 ▁ █ 2 · mean 0.25 · std 0.5 · 3 NaN`. `in_brief` leaves std
    out."""
    spread = f"{number_text(values.min)} {sparkline(values.histogram)} {number_text(values.max)}"
    moments = [f"mean {number_text(values.mean)}"] + [f"std {number_text(values.std)}"] * (not in_brief)
    return " · ".join([spread, *moments, *odd_numbers(step, values)])


def odd_numbers(step: Step, values: Values) -> list[str]:
    """How many numbers are not finite, a text for each kind: `3 NaN`, `2 Inf`, `6 × −∞, not allowed`."""
    infinite = f"{values.n_inf} × −∞, not allowed" if is_masked(step) else f"{values.n_inf} Inf"
    return [f"{values.n_nan} NaN"] * bool(values.n_nan) + [infinite] * bool(values.n_inf)


def own_parameters(step: Step) -> tuple[Parameter, ...]:
    """The weights of a step; of one that was repeated, those of a single time."""
    return step.parameters[: len(step.parameters) // step.repeats or 1] if step.repeats > 1 else step.parameters


def new_tokens(tokens: Sequence[str], most: int) -> tuple[list[str], str]:
    """Of the tokens of a sequence that came in with a step, at most so many words: the labels of the first, and what is said of
    the others, `… 3 more`; of none, `padding`."""
    labels = [token_label(token) for token in (tokens if len(tokens) <= most else tokens[: most - 1])]
    return labels, f"… {len(tokens) - len(labels)} more" if len(labels) < len(tokens) else "" if labels else "padding"


def new_tokens_text(tokens: Sequence[str], most: int) -> str:
    """`new_tokens` as one line: `the cat sat … 3 more`."""
    labels, rest = new_tokens(tokens, most)
    return " ".join([*labels, *([rest] if rest else [])])
