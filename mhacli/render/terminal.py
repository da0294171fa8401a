"""The terminal view of a run: configuration, tokens, shapes, every head, timings, and the self-check."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

import numpy as np
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mhacli import costs
from mhacli.parts import SelfCheck, TokenSequence
from mhacli.record import Record
from mhacli.render.heatmap import heatmap, scale_caption
from mhacli.render.matrix import Head, largest_share, matrix
from mhacli.render.options import Screen, Selection, ViewOptions, balanced, chosen
from mhacli.render.overview import overview
from mhacli.render.words import (
    PADDING,
    bytes_text,
    configuration,
    count_of,
    filled,
    fitted,
    number_text,
    seconds_text,
    share_text,
    token_text,
)
from mhacli.text.escape import visible
from mhacli.text.vocabulary import UNKNOWN

MAX_TOKEN_ROWS, MAX_HEADS, MAX_SEQUENCES, MAX_GROUPS = 16, 8, 4, 8
_FORMULA_ROOM, _BAR_WIDTH, _WIDE = 24, 20, 60
_BETWEEN_AXES = " · "


def run_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """Everything that `mha run` and `mha show` print. Raises `UsageError` for a head or sequence that does not exist."""
    sequences = chosen(options.sequences, len(record.sequences), MAX_SEQUENCES, options.everything, "sequence")
    heads = chosen(options.heads, record.config.n_heads, MAX_HEADS, options.everything, "head")
    sections = [
        configuration(record, screen.width),
        *([] if record.config.random else _token_tables(record, sequences, options, screen)),
        *_random_rows(record),
        shape_trace(record, screen),
        *groups_table(record),
    ]
    sections += _heads(record, sequences, heads, options, screen)
    known = {head.head: head for head in record.heads}
    listed = [known[head] for head in heads.shown if head in known]
    sections.append(overview(record, listed, options, screen, gap=(heads.before, heads.hidden)))
    sections += [timing_table(record, screen), self_check_line(record.self_check)]
    return Group(*_spaced(sections))


def self_check_line(check: SelfCheck, compared: str = "the output recomputed from the pattern differs") -> Text:
    """One line: whether the output follows from the pattern that is shown, or from what else it was `compared` with."""
    verdict = Text("self-check ok" if check.ok else "self-check FAILED", style="bold green" if check.ok else "bold red")
    return verdict.append(
        f": {compared} by at most {number_text(check.max_abs_error)} (tolerance {number_text(check.tolerance)})",
        style="not bold default",
    )


def _spaced(sections: list[RenderableType]) -> Iterator[RenderableType]:
    for place, section in enumerate(sections):
        if place:
            yield Text("")
        yield section


# ------------------------------------------------------------------------------------------------------------ tokens


def _token_tables(
    record: Record, sequences: Selection, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    for place, index in enumerate(sequences.shown):
        if sequences.hidden and place == sequences.before:
            yield _hidden(sequences.hidden, "sequence", "--all or --sequence")
        yield token_table(record, index, options, screen)
        if record.context is not None:
            yield token_table(record, index, options, screen, of_context=True)


def token_table(
    record: Record, index: int, options: ViewOptions, screen: Screen, *, of_context: bool = False
) -> RenderableType:
    """The tokens of a sequence with index, id and the characters they come from; padding shown as padding."""
    family = record.keys if of_context else record.sequences
    sequence, longest = family[index], max(len(other.tokens) for other in family)
    n_padding = longest - len(sequence.tokens)
    padding = f" + {n_padding} padding" if n_padding else ""
    name = "context" if of_context else "sequence"
    title = Text(f"{name} {index}: {count_of(len(sequence.tokens), 'token')}{padding}, ", style="bold")
    title.append(f"vocabulary of {len(record.vocabulary)}", style="not bold")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("index", justify="right")
    table.add_column("token", no_wrap=True)
    table.add_column("id", justify="right")
    table.add_column("offsets", no_wrap=True)
    if _has_documents(record):
        table.add_column("document", justify="right")
    rows = balanced(longest, longest if options.everything else MAX_TOKEN_ROWS)
    room = max(len(PADDING), screen.width - _numbers_width(sequence) - len(f" {UNKNOWN}"))
    first = record.first_key(index) if of_context else record.first_query(index)
    for place, row in enumerate(rows.shown):
        if rows.hidden and place == rows.before:
            table.add_row("⋮", Text(f"{rows.hidden} more (--all)", style="dim"))
        table.add_row(*_token_row(record, sequence, row - first, room))
    return Group(title, table)


def _token_row(record: Record, sequence: TokenSequence, index: int, room: int) -> list[Text]:
    if not 0 <= index < len(sequence.tokens):
        return [Text(word, style="dim") for word in (str(index) if index >= 0 else "–", PADDING, "–", "–")]
    start, end = sequence.offsets[index]
    token = Text(fitted(token_text(sequence, index), room), style="bold")
    if _is_unknown(record, sequence.ids[index], sequence.tokens[index]):
        token.append(f" {UNKNOWN}", style="not bold yellow")
    row = [Text(str(index)), token, Text(str(sequence.ids[index])), Text(f"{start}–{end}")]
    return [*row, Text(str(sequence.documents[index]))] if _has_documents(record) else row


def _has_documents(record: Record) -> bool:
    return any(sequence.documents for sequence in record.sequences)


def _random_rows(record: Record) -> Iterator[RenderableType]:
    c = record.config
    if c.random is not None:
        shape = [*c.random, c.d_input]
        yield Text(
            f"random input: {c.distribution} numbers {shape}, rows x0 … x{c.random[1] - 1}, seed {c.seed}", style="bold"
        )


def _numbers_width(sequence: TokenSequence) -> int:
    """What index, id and offsets of a token table take, with the gaps between the four columns."""
    ids = max(len("id"), *(len(str(number)) for number in sequence.ids))
    offsets = max(len("offsets"), *(len(f"{start}–{end}") for start, end in sequence.offsets))
    documents = len("document") + 2 if sequence.documents else 0
    return max(len("index"), len(str(len(sequence.tokens)))) + ids + offsets + 3 * 2 + documents


def _is_unknown(record: Record, token_id: int, token: str) -> bool:
    """Whether the vocabulary calls the token `<unk>` instead of by its name."""
    known = 0 <= token_id < len(record.vocabulary)
    return known and record.vocabulary[token_id] == UNKNOWN != token


# ------------------------------------------------------------------------------------------------------------ shapes


def shape_trace(record: Record, screen: Screen) -> Text:
    """Each site that was passed: its axes by name and size, and its formula where there is room beside them."""
    rows = [(visible(step.site), axes_text(step.axes, step.shape), visible(step.formula)) for step in record.trace]
    name_width = max((cell_len(name) for name, _, _ in rows), default=0)
    axes_width = max((cell_len(axes) for _, axes, _ in rows), default=0)
    room = screen.width - name_width - axes_width - 4
    trace = Text()
    for number, (name, axes, formula) in enumerate(rows):
        trace.append("\n" if number else "").append(f"{name:<{name_width}}  ", style="bold")
        if room >= _FORMULA_ROOM:
            lines = wrap(formula, room, break_long_words=False, break_on_hyphens=False) or [""]
            trace.append(axes).append(" " * (axes_width - cell_len(axes) + 2), style="dim")
            trace.append(("\n" + " " * (screen.width - room)).join(lines), style="dim")
        else:
            lines = filled(axes.split(_BETWEEN_AXES), screen.width - name_width - 2)
            trace.append(("\n" + " " * (name_width + 2)).join(lines))
    return trace


def groups_table(record: Record) -> Iterator[RenderableType]:
    """Which query heads share a kv head, and what sharing saves; nothing where every query head has its own."""
    c = record.config
    n_kv_heads, group = c.n_kv_heads or c.n_heads, c.heads_per_kv_head
    if group == 1:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("kv head", justify="right")
    table.add_column("read by query heads")
    for kv_head in range(min(n_kv_heads, MAX_GROUPS)):
        heads = range(kv_head * group, (kv_head + 1) * group)
        listed = ", ".join(map(str, heads)) if group <= 8 else f"{heads[0]} … {heads[-1]}"
        table.add_row(str(kv_head), listed)
    if n_kv_heads > MAX_GROUPS:
        table.add_row("⋮", Text(f"{n_kv_heads - MAX_GROUPS} more, {group} query heads each", style="dim"))
    own, shared = bytes_text(costs.token_bytes(c, c.n_heads)), bytes_text(costs.token_bytes(c))
    one = f"keys and values of one token take {shared} instead of {own}"
    yield Group(
        Text("shared keys and values", style="bold"), table, Text(f"{one}: 1/{group} of the cache", style="dim")
    )


def axes_text(axes: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """`batch 1 · head 4 · query 6 · d_head 16`."""
    return visible(_BETWEEN_AXES.join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=False)))


# ------------------------------------------------------------------------------------------------------------- heads


def _heads(
    record: Record, sequences: Selection, heads: Selection, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    """Every chosen head of every chosen sequence in the chosen view; in training before and after dropout."""
    if options.view == "none":
        return
    if "pattern" not in record.arrays:
        yield Text(
            "the pattern is not in this record, so no head is drawn; --keep pattern keeps it, --keep-limit makes room",
            style="yellow",
        )
        return
    largest = largest_share(record, "pattern")
    for index in sequences.shown:
        for place, head in enumerate(heads.shown):
            if heads.hidden and place == heads.before:
                yield _hidden(heads.hidden, "head", "--all or --head")
            yield from _one_head(record, index, head, largest, options, screen)
    if "dropped" in record.arrays:
        yield _dropout_caption(record, sequences)
    if options.view == "matrix":
        yield _matrix_caption(record, largest, options)
    if options.view == "heatmap":
        yield scale_caption(record, largest, screen, options.precision)


def _one_head(
    record: Record, index: int, head: int, largest: float, options: ViewOptions, screen: Screen
) -> Iterator[RenderableType]:
    sites = {"pattern": ""}
    if "dropped" in record.arrays:
        sites = {
            "pattern": ", before dropout",
            "dropped": ", after dropout: what is left grew, rows no longer sum to 1",
        }
    for site, note in sites.items():
        drawn = Head(record, index, head, site)
        name = f"sequence {index} · head {head}{_kv_head_of(record, head)}{note}"
        title = Rule(Text(name, style="bold"), align="left", style="dim")
        yield Group(title, _drawing(drawn, largest, options, screen))


def _kv_head_of(record: Record, head: int) -> str:
    """Which kv head the query head reads, where it shares it."""
    group = record.config.heads_per_kv_head
    return f" · kv head {head // group}" if group > 1 else ""


def _drawing(head: Head, largest: float, options: ViewOptions, screen: Screen) -> RenderableType:
    if options.view == "heatmap":
        return heatmap(head, largest, options, screen)
    if options.view == "top":
        return _top_keys(head, options)
    return matrix(head, largest, options, screen)


def _top_keys(head: Head, options: ViewOptions) -> RenderableType:
    """For each query its strongest keys with their shares, the strongest first."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rows = balanced(len(head.shares), len(head.shares) if options.everything else MAX_TOKEN_ROWS)
    for place, query in enumerate(rows.shown):
        if rows.hidden and place == rows.before:
            table.add_row("", Text(f"⋮ {rows.hidden} rows (--all)", style="dim"))
        order = sorted(range(head.shares.shape[1]), key=lambda key: (-float(head.shares[query, key]), key))
        keys = [key for key in order if head.allowed[query, key]][: options.top]
        said = ", ".join(
            f"{head.key_name(k)} {head.key_index(k)} {share_text(float(head.shares[query, k]), options.precision)}"
            for k in keys
        )
        table.add_row(f"{fitted(head.query_name(query), 16)} {query} →", Text(said or "no key allowed"))
    return table


def _matrix_caption(record: Record, largest: float, options: ViewOptions) -> Text:
    small = share_text(0.0, options.precision)
    return Text(
        f"shade linear, 0 … {share_text(largest, options.precision)}, the same for all heads · * the row's maximum · "
        f"0 not allowed, {small} small · Σ sum of the row · H its entropy in nats"
        + (f" · {PADDING} padding, masked" if len({len(s.tokens) for s in record.keys}) > 1 else ""),
        style="dim",
    )


def _dropout_caption(record: Record, sequences: Selection) -> Text:
    """What dropout did to the rows that are drawn: why they no longer sum to 1, and by how much."""
    p = record.config.dropout
    allowed, before, after = (record.arrays[name] for name in ("allowed", "pattern", "dropped"))
    rows = np.concatenate(
        [after[b, :, Head(record, b, 0, "dropped").queries].sum(axis=-1).ravel() for b in sequences.shown]
    )
    cells = np.broadcast_to(allowed, before.shape) & (before > 0)
    share = float((after[cells] == 0).mean()) if cells.any() else 0.0
    return Text(
        f"dropout {p:g}: every share became 0 with probability {p:g} (here {100 * share:.0f} % of them did), and the rest "
        f"were multiplied by 1/(1 − {p:g}) = {1 / (1 - p):.4g}, so that a row sums to 1 only on average: over all heads from "
        f"{rows.min():.2f} to {rows.max():.2f}, mean {rows.mean():.2f}. Without --train nothing is dropped.",
        style="dim",
    )


def _hidden(count: int, noun: str, option: str) -> Text:
    return Text(f"⋮ {count_of(count, noun)} not drawn ({option})", style="dim")


# ------------------------------------------------------------------------------------------------------------ timing


def timing_table(record: Record, screen: Screen) -> Table:
    """Median, spread and share of every stage; the first run apart; tokens per second in total."""
    total = record.timings.get("total")
    is_wide = screen.width >= _WIDE
    table = Table(box=None, padding=(0, 2 if is_wide else 1, 0, 0), pad_edge=False, header_style="dim")
    for name in ("stage", "first run" if is_wide else "first", "median", "IQR", "share"):
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    if total is None:
        return table
    for site, timing in record.timings.items():
        share = "" if site == "total" else f"{100 * timing.median_s / total.median_s:.0f} %" if total.median_s else "–"
        style = "bold" if site == "total" else ""
        times = [seconds_text(s) for s in (timing.first_s, timing.median_s, timing.iqr_s)]
        table.add_row(visible(site), *times, share, style=style)
    n_tokens = sum(len(sequence.tokens) for sequence in record.sequences)
    rate = f"{n_tokens / total.median_s:,.0f} tokens/s" if total.median_s else ""
    table.caption = Text(f"{rate} over {count_of(len(total.samples_s), 'run')} after the first", style="dim")
    table.caption_justify = "left"
    return table
