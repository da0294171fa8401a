"""The terminal view of a record."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from mhacli.record.record import Record
from mhacli.render.base.options import Screen, ViewOptions


def record_views(record: Record, options: ViewOptions, on: Screen) -> Iterator[RenderableType]:
    """The parts of a record's terminal view in order."""
    if record.module is not None:
        from mhacli.render.run.trace import closing, step_blocks, step_lines

        yield from step_blocks(record, on) if options.verbose else [step_lines(record, on)]
        yield closing(record, on)
    elif record.decoding is not None and options.view in ("auto", "matrix"):
        from mhacli.render.run.decode import decode_view

        yield decode_view(record, options, on)
    elif record.effect is not None:
        from mhacli.render.checkpoint.effect import effect_view

        yield from effect_view(record, options, on)
    elif record.model is not None:
        from mhacli.render.checkpoint.view import layers_view

        yield layers_view(record, options, on)
    elif record.survey is not None:
        from mhacli.render.heads.view import heads_view

        yield heads_view(record, options, on)
    else:
        from mhacli.render.run.view import run_view

        yield run_view(record, options, on)
