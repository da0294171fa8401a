"""One head's pattern in the view that was chosen, with what its scale and signs mean."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.render.base.format import PADDING, fitted, share_text
from mhacli.render.base.options import Screen, ViewOptions, balanced
from mhacli.render.base.tokens import MAX_TOKEN_ROWS
from mhacli.render.heads.head_map import HeadPattern
from mhacli.render.heads.heatmap import heatmap
from mhacli.render.heads.matrix import matrix
from mhacli.results.record.record import Record

_NAME, _NAME_WITH_NEXT = 16, 28


def drawing(head: HeadPattern, largest: float, options: ViewOptions, screen: Screen) -> RenderableType:
    """The pattern as a matrix, a heatmap, or each query's strongest keys."""
    if not len(head.shares):
        return Text("none of the rows that were asked for is in this text", style="yellow")
    if options.view == "heatmap":
        return heatmap(head, largest, options, screen)
    if options.view == "top":
        return _top_keys(head, options)
    return matrix(head, largest, options, screen)


def kv_head_of(record: Record, head: int) -> str:
    """Which kv head the query head reads, where it shares it."""
    group = record.config.heads_per_kv_head
    return f" · kv head {head // group}" if group > 1 else ""


def _top_keys(head: HeadPattern, options: ViewOptions) -> RenderableType:
    """For each query its strongest keys with their shares, the strongest first; behind them what a learned sink took."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    width = _NAME if head.produced is None else _NAME_WITH_NEXT
    is_whole = options.everything or head.rows is not None
    rows = balanced(len(head.shares), len(head.shares) if is_whole else MAX_TOKEN_ROWS)
    for place, query in enumerate(rows.shown):
        if rows.hidden and place == rows.before:
            table.add_row("", Text(f"⋮ {rows.hidden} rows (--all)", style="dim"))
        order = sorted(range(head.shares.shape[1]), key=lambda key: (-float(head.shares[query, key]), key))
        keys = [key for key in order if head.allowed[query, key]][: options.top]
        said = ", ".join(
            f"{head.key_name(k)} {head.key_index(k)} {share_text(float(head.shares[query, k]), options.precision)}"
            for k in keys
        )
        sink = (
            f" · σ {share_text(head.learned_weight(query), options.precision)}"
            if head.has_learned_sink and keys
            else ""
        )
        name = f"{fitted(head.query_name(query), width)} {head.query_index(query)} →"
        table.add_row(name, Text((said or "no key allowed") + sink))
    return table


def matrix_caption(heads: Sequence[HeadPattern], largest: float, options: ViewOptions) -> Text:
    """The scale of matrices, and what their signs mean."""
    small = share_text(0.0, options.precision)
    has_padding = any(len({len(s.tokens) for s in head.record.keys}) > 1 for head in heads)
    sums = "Σ sum of the row"
    if any(head.has_learned_sink for head in heads):
        sums += ", less than 1 where a learned sink, which is no key, takes the rest: σ"
    return Text(
        f"shade linear, 0 … {share_text(largest, options.precision)}, the same for all heads · * the row's maximum · "
        f"0 not allowed, {small} small · {sums} · H its entropy in nats"
        + (f" · {PADDING} padding, masked" if has_padding else ""),
        style="dim",
    )
