"""The settings of `mha effect`: what is removed, and where the effect is measured."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from mhacli.errors import UsageError
from mhacli.record.effect import HeadReplacement
from mhacli.settings import MAX_LENGTH, AttentionKind, index_list, setting

_ONLY_WHOLE_HEADS = ("at", "replace", "screen")
"""Settings that apply to the removal of whole heads only."""
_NOT_WITH_CUT = ("edges", "heads", *_ONLY_WHOLE_HEADS)
"""Settings that apply to every removal except a cut."""
_REMOVAL = "Removal"
_MEASUREMENT = "Measurement"


class HeadChoice(NamedTuple):
    """A head that a user names. The kind None means the only kind, or the decoder of an
    encoder-decoder model; the layer is None in a layer of mha.
    """

    kind: AttentionKind | None
    layer: int | None
    head: int


def head_choices(word: str) -> tuple[HeadChoice, ...]:
    """Heads from `5.1,6.3`, `cross.0.2`, or `0,2-3` in a layer of mha. Raises `ValueError` with the
    form.
    """
    choices: list[HeadChoice] = []
    for part in word.split(","):
        match = re.fullmatch(
            r"(?:(?:(encoder|decoder|cross)[. ])?(\d{1,6})\.)?([0-9-]+)", part.strip()
        )
        if match is None:
            form = "LAYER.HEAD, such as 5.1 or 5.1,cross.6.3, or of heads, such as 0,2"
            raise ValueError(f"{word[:80]!r} is not a list of {form}")
        kind: Any = match[1]
        choices += [
            HeadChoice(kind, None if match[2] is None else int(match[2]), head)
            for head in index_list(match[3])
        ]
    return tuple(choices)


def given_head(given: Any) -> HeadChoice:
    """A head that a user of Python named: `(5, 1)`, or `("cross", 5, 1)`. Raises `UsageError` with
    the form.
    """
    kind, numbers = kind_and_numbers(given)
    match numbers:
        case (int(layer), int(head)) if min(layer, head) >= 0:
            return HeadChoice(kind, layer, head)
    raise UsageError(f"heads: {given!r} is not (layer, head)", hint='(5, 1), or ("cross", 5, 1)')


def kind_and_numbers(given: Any) -> tuple[AttentionKind | None, tuple[Any, ...]]:
    """The kind in front of a place, None without one, and what follows. A bool is no number."""
    numbers = tuple(given) if isinstance(given, (tuple, list)) else ()
    kind = None
    if numbers and numbers[0] in get_args(AttentionKind):
        kind, numbers = numbers[0], numbers[1:]
    are_numbers = all(number is None or type(number) is int for number in numbers)
    return kind, numbers if are_numbers else ()


def require_replacement(replace: str) -> None:
    """Raises `UsageError` for an unknown replacement."""
    known = get_args(HeadReplacement)
    if replace not in known:
        raise UsageError(f"replace {replace!r} is not known", hint=", ".join(known))


def _spans(word: str) -> tuple[str, str]:
    first, _, second = word.partition(":")
    if not (first and second):
        raise ValueError(f"{word[:80]!r} is not two spans, such as doc:question")
    return first, second


@dataclass(frozen=True, kw_only=True)
class EffectSettings:
    """What is removed, and where the effect is measured.

    `heads` None means all heads of the inspected layers. With `edges`, each attention weight of the
    query at the position is removed instead: in each of `heads`, or in all heads of a layer at
    once. With `cut`, the queries of the second span cannot see the keys of the first, in all of
    these layers together. `at` is the only position at which a head is replaced; None means all
    positions. `position` None is the last token, or the masked one. `target` None is the model's
    prediction; a number is an id; `target_first` takes the first token of a target of several
    tokens. `verify` removals are computed a second time. With `screen`, that many heads with the
    largest estimates are removed, and as many others.
    """

    heads: tuple[HeadChoice, ...] | None = setting(
        None,
        _REMOVAL,
        "Heads to remove, such as 5.1,6.3: each alone, then all together. 5.1 is head 1 of layer 5;"
        " without --model, 0,2 are heads. (default: each head alone)",
        "--head",
        parse=head_choices,
        metavar="LIST",
        common=True,
    )
    edges: bool = setting(
        False,
        _REMOVAL,
        "Remove single attention weights instead, of the query at --position, in each --head or"
        " layer.",
        common=True,
        excludes=_ONLY_WHOLE_HEADS,
    )
    cut: tuple[str, str] | None = setting(
        None,
        _REMOVAL,
        "Hide span A from span B: no token of B sees a token of A, in all chosen layers at once."
        " --span names the spans.",
        parse=_spans,
        metavar="A:B",
        modes=("model",),
        excludes=_NOT_WITH_CUT,
    )
    replace: HeadReplacement | None = setting(
        None,
        _REMOVAL,
        "Replace the output of a removed head by zeros, or by its mean over the text. (default:"
        " zero)",
        common=True,
    )
    screen: int | None = setting(
        None,
        _REMOVAL,
        "Estimate all heads by one backward pass, then remove only the K with the largest"
        " estimates and K random others. (default: remove all)",
        low=1,
        high=100_000,
        metavar="K",
        modes=("model",),
        excludes=("heads",),
    )
    at: int | None = setting(
        None,
        _REMOVAL,
        "Remove heads only at this position. (default: at all positions)",
        low=0,
        high=MAX_LENGTH,
    )
    target: str | int | None = setting(
        None,
        _MEASUREMENT,
        "Measure the logit of this token. (default: the one that the model predicts)",
        parse=str,
        metavar="TOKEN",
        common=True,
        modes=("model",),
    )
    versus: str | int | None = setting(
        None,
        _MEASUREMENT,
        "Measure the logit of the target minus that of this token.",
        parse=str,
        metavar="TOKEN",
        modes=("model",),
    )
    position: int | None = setting(
        None,
        _MEASUREMENT,
        "Measure at this token. (default: the first [MASK], else the last token)",
        low=-MAX_LENGTH,
        high=MAX_LENGTH,
        common=True,
    )
    target_first: bool = setting(
        False, _MEASUREMENT, "If the target has several tokens, take the first.", modes=("model",)
    )
    verify: int = setting(
        4,
        _MEASUREMENT,
        "Number of removals to verify by a second, different computation.",
        low=1,
        high=10_000,
    )
