"""Text formats: numbers, times, tokens, titles, tables, steps of a walkthrough, and a record's
provenance.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from mhacli.numbers import Unit, shown
from mhacli.record.checks import Check
from mhacli.record.heads import UNTYPED, HeadStatistics, nearest_type, words_of_type
from mhacli.record.record import Record, Step, Timing
from mhacli.record.sites import Dims, mask_words, positions_name
from mhacli.settings import Config
from mhacli.text.escape import token_label, visible
from mhacli.text.tokens import TokenSequence

PADDING = "‹pad›"
UNITS: Mapping[str, Unit] = {
    "weight": "weight",
    "fraction": "fraction",
    "nats": "nats",
    "change": "size",
}
"""By the unit of a statistic, how its values are shown; those of others are short."""
_SPARKS = "▁▂▃▄▅▆▇█"


ROUGH_S = 1e-3
"""A shorter time is mostly overhead of calls and clocks."""
ROUGH_SPREAD = 0.2
"""A larger relative spread of runs shows a disturbance."""


def rough_note(timings: Iterable[Timing]) -> str:
    """Why some medians are rough; empty if none is."""
    timed = [timing for timing in timings if timing.median_s]
    if any(timing.median_s < ROUGH_S for timing in timed):
        return "rough: less than 1 ms"
    spread = max(
        (timing.iqr_s / timing.median_s for timing in timed if len(timing.samples_s) > 1),
        default=0.0,
    )
    if spread > ROUGH_SPREAD:
        return f"rough: the runs vary by {shown(spread, 'percent')}, as on a busy machine"
    return ""


def type_text(head: HeadStatistics) -> str:
    """A head's type with its excess over uniform attention, or the nearest type: `previous token
    .62`, `mixed (prev .21)`, `induction (also: one distance, −24) .96`.
    """
    name, nearest = words_of_type(head.kind).name, nearest_type(head)
    if nearest is not None:
        return f"{name} ({words_of_type(nearest[0]).short} {shown(nearest[1], 'weight')})"
    if head.certainty is None or head.kind in UNTYPED:
        return name
    also = (
        "" if head.also_at is None else f" (also: one distance, {head.also_at})".replace("-", "−")
    )
    return f"{name}{also} {shown(head.certainty, 'weight')}"


def sparkline(counts: Sequence[float]) -> str:
    """One character per count, with a height relative to the largest; a space for 0.

    >>> sparkline((0, 1, 8))
    ' ▁█'
    """
    largest = max(counts, default=0)
    return "".join(
        " " if not n else _SPARKS[max(0, math.ceil(8 * n / largest) - 1)] for n in counts
    )


def fitted(text: str, width: int) -> str:
    """`text`, cut to `width` cells with an ellipsis if it is longer; never padded."""
    return (
        text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"
    )


def token_text(tokens: Sequence[str], index: int) -> str:
    """A token as tables show it, or the sign for padding if the index is out of range."""
    return token_label(tokens[index]) if 0 <= index < len(tokens) else PADDING


def token_at(token: str, position: int | str, width: int = 40) -> str:
    """A position and its token, as in sentences: `25 “for”`. The token is cut to `width` cells.

    >>> token_at("for", 25)
    '25 “for”'
    """
    return f"{position} “{fitted(token, width)}”"


def token_of(text: TokenSequence, position: int) -> str:
    """A position in a text and its token, as in sentences."""
    return token_at(token_text(text.tokens, position), position)


def count_of(n: int, noun: str) -> str:
    """`1 token`, `4,834 tokens`."""
    return f"{n:,} {plural(n, noun)}"


def plural(n: int, noun: str) -> str:
    """The noun for a number of things: `token`, `tokens`."""
    return noun if n == 1 else f"{noun}s"


def configuration(record: Record, width: int, *more: str) -> Text:
    """The configuration, the device, and `more`: in one line, or broken between parts if `width` is
    too small.
    """
    dims, e = record.dims, record.environment
    parts = [
        f"mha {e.mha}",
        *_sizes(dims.config),
        *_input_and_mask(dims),
        *_scores_and_output(dims),
    ]
    if record.weights is not None:
        parts.append(f"weights {record.weights}")
    elif dims.config.init != "xavier":
        parts.append(f"init {dims.config.init}")
    parts += [record.words_of_random] if record.words_of_random else []
    device = f"{e.device} (auto)" if e.device_asked == "auto" else e.device
    parts += [dims.config.dtype, device, count_of(e.threads, "thread"), f"torch {e.torch}"]
    return flowing(map(visible, [*parts, *more]), width, style="bold")


def random_line(record: Record) -> list[Text]:
    """A line on random weights where the configuration does not stand; none for those of a file."""
    return [Text(words, "bold yellow") for words in [record.words_of_random] if words]


def _sizes(c: Config) -> Iterator[str]:
    """The width of the model and its heads, and what differs from it."""
    yield f"d_model {c.d_model}"
    yield f"{count_of(c.n_heads, 'head')} × d_head {c.d_head}"
    if c.n_kv_heads != c.n_heads:
        yield count_of(c.n_kv_heads or 0, "kv head")
    if c.d_v != c.d_head:
        yield f"d_v {c.d_v}"
    if c.d_input != c.d_model:
        yield f"d_input {c.d_input}"


def _input_and_mask(dims: Dims) -> Iterator[str]:
    """What differs from a text with sinusoidal positions in which every token sees every other."""
    c = dims.config
    if c.random is not None:
        yield f"random {c.distribution} rows"
    if c.positions != "sinusoidal":
        yield f"positions {positions_name(c)}"
    yield from mask_words(dims)


def _scores_and_output(dims: Dims) -> Iterator[str]:
    """What differs from the plain scores and projections of self-attention."""
    c = dims.config
    if c.softcap is not None:
        yield f"softcap {c.softcap:g}"
    if c.score_bias is not None:
        yield f"score bias {c.score_bias}"
    if dims.cross:
        yield "cross-attention"
    if not c.bias:
        yield "no bias"
    if not c.out_proj:
        yield "no output projection"
    if c.train:
        yield f"dropout {c.dropout:g}, training"
    if c.has_custom_scale:
        yield f"scale {c.scale:g}"


def lengths_in_words(texts: Sequence[TokenSequence]) -> str:
    """The lengths of texts: `812 tokens`, `2 sequences of 4 to 9 tokens`."""
    lengths = [len(text.tokens) for text in texts]
    least = min(lengths)
    size = count_of(max(lengths), "token")
    if least < max(lengths):
        size = f"{least:,} to {size}"
    return size if len(lengths) == 1 else f"{count_of(len(lengths), 'sequence')} of {size}"


def escaped(words: str, style: str = "") -> Text:
    """A title or a sentence with data in it. It is escaped before its width is measured."""
    return Text(visible(words), style)


def flowing(parts: Iterable[str | Text], width: int, between: str = " · ", style: str = "") -> Text:
    """The parts in a row, words in one `style`, with line breaks between them. Only parts wider
    than `width` are broken.
    """
    text = Text()
    used = 0
    texts = [Text(part, style) if isinstance(part, str) else part for part in parts]
    for number, part in enumerate(texts):
        if number and used + cell_len(between) + part.cell_len <= width:
            text.append(between, style="dim")
            used += cell_len(between)
        elif number:
            text.append("\n")
            used = 0
        text.append_text(part)
        used += part.cell_len
    return text


def memory_text(step: Step) -> str:
    """Whose memory a tensor shares: `view of q_proj`, or `a new tensor`."""
    if not step.built:
        return "computed only for display: the kernel never makes it"
    if step.view_of:
        return f"view of {visible(step.view_of)}"
    return "a view that repeats its rows" if step.layout == "view" else "a new tensor"


# --------------------------------------------------------------------------------------- provenance


def provenance(record: Record) -> tuple[tuple[str, str], ...]:
    """Pairs of label and line, safe for every surface's escaper: `("record by", "mha run 'the cat'
    --heads 4")`.

    The command is that of the record; another command may have drawn the picture.
    """
    e = record.environment
    versions = f"mha {e.mha} · torch {e.torch} · numpy {e.numpy} · python {e.python}"
    device = (
        f"{e.device} ({e.device_name}) · {record.config.dtype} · {count_of(e.threads, 'thread')} ·"
        f" {e.platform}"
    )
    pairs = (
        ("record by", shlex.join(record.command)),
        ("versions", versions),
        _origin(record),
        ("machine", device),
        (
            "self-check",
            record.self_check.words
            if record.self_check.ok is None
            else f"{'ok' if record.self_check.ok else 'FAILED'}: {agreement(record.self_check)}",
        ),
    )
    return tuple((word, visible(line)) for word, line in pairs)


def agreement(check: Check, compared: str = "") -> str:
    """A check, or what else it `compared`, with its numbers: `every query's weights sum to 1 within
    1.2e-7 (tolerance 4e-6)`.
    """
    words = compared or visible(check.name) or "largest difference"
    if check.error is None:
        return f"{words}: some numbers are NaN or infinite"
    return (
        f"{words} within {shown(check.error, 'error')} (tolerance"
        f" {shown(check.tolerance, 'error')})"
    )


def checks_in_brief(checks: Sequence[Check]) -> str:
    """Passed checks in brief: `24 checks, errors at most 4 % of their tolerances (--verbose)`."""
    parts = [
        check.error / check.tolerance
        for check in checks
        if check.error is not None and check.tolerance
    ]
    most = f", errors at most {shown(max(parts), 'percent')} of their tolerances" if parts else ""
    return f"{count_of(len(checks), 'check')}{most} (--verbose)"


def _origin(record: Record) -> tuple[str, str]:
    """The origin of the weights: a checkpoint, the user's module, a file, or a seed."""
    if record.model is not None:
        m = record.model
        revision = f" · revision {m.revision}" if m.revision else ""
        return (
            "model",
            f"{m.title}{revision} · {m.architecture} · {m.dtype} · inspected: {m.path_inspected}",
        )
    if record.module is not None:
        return "module", f"{record.module.target} · seed {record.config.seed}"
    if record.weights is not None:
        return "weights", record.weights
    return "seed", f"{record.config.seed} · init {record.config.init}"


def self_check_verdict(*, ok: bool | None, numbers: str = "") -> Text:
    """Whether a self-check passes, with its numbers."""
    words = {True: "self-check ok", False: "self-check FAILED", None: "not verified"}
    colour = {True: "green", False: "red", None: "yellow"}
    verdict = Text(words[ok], f"bold {colour[ok]}")
    return verdict.append(f": {numbers}", style="not bold default") if numbers else verdict
