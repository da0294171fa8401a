"""What to type next, for a terminal: the attention weight that stands out, as the option of `mha trace` that explains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mhacli.cli.console import stdout_width, write
from mhacli.text.numbers import shown

if TYPE_CHECKING:
    from mhacli.record.record import Record
    from mhacli.render.base.options import ViewOptions


def after_run(record: Record, options: ViewOptions) -> None:
    """Names the tables that can be added, and suggests what `after_trace` does."""
    if record.model is None and not options.verbose:
        _write_filled("more:", "--tokens,", "--shapes,", "--timings,", "or", "--verbose", "for", "all")
    after_trace(record, options)


def after_trace(record: Record, options: ViewOptions) -> None:
    """Suggests to trace the largest of the weights between tokens that stand out, if none is traced yet, and says where it is on
    the screen. The first token of a checkpoint's text is often a sink."""
    from mhacli.render.base.format import token_at, token_text

    kinds = {layer.name: layer.kind for layer in record.layers}
    cells = [
        (cell, head)
        for head in record.heads
        if kinds.get(head.attention, "self") == "self" and (options.heads is None or head.head in options.heads)
        for cell in head.largest
        if (options.sequences is None or cell.sequence in options.sequences)
        and (record.context is not None or cell.key != cell.query)
        and (record.model is None or cell.key > 0)
    ]
    if not cells or record.cell is not None:
        return
    cell, head = max(cells, key=lambda each: each[0].share)
    query = token_at(token_text(record.sequences[cell.sequence], cell.query), cell.query)
    key = token_at(token_text(record.keys[cell.sequence], cell.key), cell.key)
    words = "next: mha trace" if record.model is None else f"next: mha trace --layer {head.layer}"
    words += f" --cell {head.head},{cell.query},{cell.key}"
    words += f" --sequence {cell.sequence}" if len(record.sequences) > 1 else ""
    weight = shown(cell.share, "weight", options.precision)
    about = f"with the same text and layer computes the weight {weight} of head {head.head}, query {query}, key {key}"
    _write_filled(words, *about.split())


def _write_filled(*parts: str) -> None:
    """Prints parts of a sentence in lines as wide as stdout."""
    from mhacli.render.base.format import filled

    write("\n".join(filled([*parts], stdout_width(), " ")) + "\n")
