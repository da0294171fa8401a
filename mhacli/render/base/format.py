"""Small things to read: numbers, times, tokens, the line of configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from mhacli.io.files import format_size
from mhacli.results.record.record import Record
from mhacli.spec.config import Config
from mhacli.spec.tokens import TokenSequence
from mhacli.spec.variants import positions_name
from mhacli.text.escape import token_label, visible

PADDING = "‹pad›"
_SPARKS = "▁▂▃▄▅▆▇█"


def share_text(share: float, precision: int) -> str:
    """A share of attention without its leading zero: `.17`, `1.00`, `nan`.

    >>> share_text(0.171, 2)
    '.17'
    """
    return "nan" if math.isnan(share) else f"{share:.{precision}f}".removeprefix("0") or "0"


def number_text(number: float | None) -> str:
    """A number in about seven columns, `nan` for one that is not finite."""
    if number is None or math.isnan(number):
        return "nan"
    return f"{number:.4g}" if number == 0 or 1e-4 <= abs(number) < 1e5 else f"{number:.2e}"


def seconds_text(seconds: float | None) -> str:
    """A duration to read: `850 ns`, `12.3 µs`, `4.56 ms`, `7.89 s`."""
    if seconds is None:
        return "–"
    factor, unit = seconds_unit(seconds)
    return f"{seconds * factor:.3g} {unit}" if seconds < 999.5 else f"{seconds:,.0f} s"


def seconds_unit(seconds: float) -> tuple[float, str]:
    """How many of its units make a second, and the unit that a duration reads best in."""
    for factor, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return factor, unit
    return 1.0, "s"


def count_text(count: int) -> str:
    """A count of operations: `0`, `4608`, `49.5 k`, `2.1 G`."""
    if count < 10_000:
        return str(count)
    for factor, unit in ((10**3, "k"), (10**6, "M"), (10**9, "G")):
        if count < 999.5 * factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 10**12:.3g} T"


def percent_text(share: float) -> str:
    """A share in percent, two digits of it: `12 %`, `0.034 %`."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.2g} %"


def told(number: float | None, tell: Callable[[float], str]) -> str:
    """A number in words, or a dash where there is none."""
    return "–" if number is None else tell(number)


def short_text(number: float) -> str:
    """A number in five columns or so: `3.21`, `48.2`, `1,204`; a whole one as it is."""
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:.2f}" if abs(number) < 9.995 else f"{number:.1f}" if abs(number) < 999.5 else f"{number:,.0f}"


def bytes_text(n_bytes: int) -> str:
    """A size: `1.5 KiB`."""
    return format_size(n_bytes)


def sparkline(counts: Sequence[float]) -> str:
    """One character per count, its height the count relative to the largest; a space for none.

    >>> sparkline((0, 1, 8))
    ' ▁█'
    """
    largest = max(counts, default=0)
    return "".join(" " if not n else _SPARKS[max(0, math.ceil(8 * n / largest) - 1)] for n in counts)


def fitted(text: str, width: int) -> str:
    """`text` cut to `width` cells with an ellipsis where it is longer; never padded."""
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def token_text(sequence: TokenSequence, index: int) -> str:
    """The token at an index of the sequence as tables show it, or the sign for padding, outside of it."""
    return token_label(sequence.tokens[index]) if 0 <= index < len(sequence.tokens) else PADDING


def count_of(n: int, noun: str, *, grouped: bool = False) -> str:
    """`1 token`, `2 tokens`; thousands apart where they are `grouped`, `4,834 tokens`."""
    number = f"{n:,}" if grouped else str(n)
    return f"{number} {noun}" if n == 1 else f"{number} {noun}s"


def configuration(record: Record, width: int) -> Text:
    """What was computed, and where: one line, or broken between its parts where `width` is too small."""
    c, e = record.config, record.environment
    parts = [f"mha {e.mha}", *_sizes(c), *_choices(record)]
    parts += [f"init {c.init}"] if c.init != "xavier" and record.weights is None else []
    parts += [f"seed {c.seed}" if record.weights is None else f"weights {record.weights}", c.dtype]
    parts += [f"{e.device} (auto)" if e.device_asked == "auto" else e.device]
    parts += [count_of(e.threads, "thread"), f"torch {e.torch}"]
    return Text("\n".join(filled([visible(part) for part in parts], width)), style="bold")


def _sizes(c: Config) -> list[str]:
    parts = [f"d_model {c.d_model}", f"{count_of(c.n_heads, 'head')} × d_head {c.d_head}"]
    parts += [count_of(c.n_kv_heads or 0, "kv head")] if c.n_kv_heads != c.n_heads else []
    parts += [f"d_v {c.d_v}"] if c.d_v != c.d_head else []
    return parts + ([f"d_input {c.d_input}"] if c.d_input != c.d_model else [])


def _choices(record: Record) -> list[str]:
    """What departs from plain attention."""
    c = record.config
    parts = [] if c.random is None else [f"random {c.distribution} rows"]
    parts += [] if c.positions == "sinusoidal" else [f"positions {positions_name(c)}"]
    parts += [f"prefix {c.prefix}"] if c.prefix is not None else ["causal"] if c.causal else []
    parts += [] if c.window is None else [f"window {c.window[0]} left, {c.window[1]} right"]
    parts += [] if c.sink is None else [f"sink {c.sink}"]
    parts += [] if c.documents is None else [f"documents split at {c.documents}"]
    parts += ["padding left"] if record.facts.padded and c.padding == "left" else []
    parts += [] if c.softcap is None else [f"softcap {c.softcap:g}"]
    parts += [] if c.score_bias is None else [f"score bias {c.score_bias}"]
    parts += ["cross-attention"] if record.context is not None else []
    parts += [] if c.bias else ["no bias"]
    parts += [] if c.out_proj else ["no output projection"]
    parts += [f"dropout {c.dropout:g}, training"] if c.train else []
    return parts + ([f"scale {c.scale:g}"] if c.has_own_scale else [])


def filled(parts: list[str], width: int, between: str = " · ") -> list[str]:
    """Lines of at most `width` cells that hold the parts in order, `between` them, none broken."""
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(lines[-1]) + cell_len(between) + cell_len(part) <= width:
            lines[-1] += f"{between}{part}"
        else:
            lines.append(part)
    return lines


def flowing(parts: Sequence[Text], width: int, between: str = " · ") -> Text:
    """The parts one after the other, each in its own style, on lines that break between them; only a part that is wider
    than `width` is broken itself."""
    text, used = Text(), 0
    for number, part in enumerate(parts):
        if number and used + cell_len(between) + part.cell_len <= width:
            text.append(between, style="dim")
            used += cell_len(between)
        elif number:
            text.append("\n")
            used = 0
        text.append_text(part)
        used += part.cell_len
    return text
