"""The output of a command: a format on stdout, files, pictures, notes on stderr, and the result of
the checks.

A command that takes `output: Annotated[Output, offers("json", "save")]` has these options of it,
and colour.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from json import dumps
from typing import TYPE_CHECKING, Any, Literal, assert_never

from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.files import check_target, write_whole
from mhacli.numbers import shown
from mhacli.record.heads import OF_REMOVAL, require_order
from mhacli.render.base.options import Screen, ViewOptions
from mhacli.settings import (
    DEFAULT_KEEP_LIMIT,
    OUTPUT,
    PICTURES,
    Mode,
    parse_bytes,
    setting,
    word_list,
)

from .console import (
    SCREEN_WIDTHS,
    ColourChoice,
    draw,
    note,
    show_activity,
    stdout_width,
    wants_colour,
    write,
)
from .source import record_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.record.record import Record
    from mhacli.render.figures.svg import Piece
    from mhacli.run import Run

_RUN: tuple[Mode, ...] = ("layer", "model")


@dataclass(frozen=True, kw_only=True)
class Output:
    """The format of stdout, the files to write, the colour and the width. A command offers some of
    these options.
    """

    json: bool = setting(
        False, OUTPUT, "Print the result as one JSON document.", common=True, excludes=("csv",)
    )
    csv: bool = setting(False, OUTPUT, "Print CSV: a line per sequence, head, query and key.")
    save: str | None = setting(
        None,
        OUTPUT,
        "Save the record in this file, for mha show, view and diff.",
        metavar="FILE",
        common=True,
    )
    save_weights: str | None = setting(
        None,
        OUTPUT,
        "Save the weights in this file, for --weights.",
        metavar="FILE",
        modes=("layer",),
    )
    force: bool = setting(False, OUTPUT, "Overwrite existing files.")
    no_annotations: bool = setting(
        False, OUTPUT, "Print no annotations, which stderr has where GITHUB_ACTIONS is set."
    )
    keep: tuple[str, ...] | None = setting(
        None,
        OUTPUT,
        "Arrays in the saved record and in --json, such as pattern,z.",
        parse=word_list(),
        metavar="SITES",
        default="qk,scores,pattern,z,out, as far as they fit",
        modes=_RUN,
    )
    keep_limit: int = setting(
        DEFAULT_KEEP_LIMIT,
        OUTPUT,
        "Limit the size of these arrays.",
        parse=parse_bytes,
        metavar="SIZE",
        default=shown(DEFAULT_KEEP_LIMIT, "bytes"),
        modes=_RUN,
    )
    html: str | None = setting(
        None,
        PICTURES,
        "Write an interactive HTML page that works offline.",
        metavar="FILE",
        common=True,
    )
    svg: str | None = setting(None, PICTURES, "Write an SVG picture.", metavar="FILE")
    png: str | None = setting(
        None, PICTURES, "Write the same picture as PNG (needs the extra png).", metavar="FILE"
    )
    color: ColourChoice = setting(
        "auto",
        OUTPUT,
        "When to use colour; auto: on a terminal, unless NO_COLOR or FORCE_COLOR decides.",
        "--color --colour",
    )
    width: int | None = setting(
        None,
        OUTPUT,
        "Columns of the output, in place of COLUMNS.",
        low=SCREEN_WIDTHS[0],
        high=SCREEN_WIDTHS[1],
        hidden=True,
    )

    @property
    def format(self) -> Literal["json", "csv"] | None:
        """The format of stdout; None for the view of the terminal."""
        if self.json:
            return "json"
        return "csv" if self.csv else None

    @property
    def files(self) -> dict[str, str]:
        """The files to write by their options."""
        named = {name: getattr(self, name) for name in ("save", "save_weights", *DRAWN)}
        return {name.replace("_", "-"): path for name, path in named.items() if path is not None}

    @property
    def suggests(self) -> bool:
        """Whether what to type next follows: below a view on a terminal."""
        return self.format is None and sys.stdout.isatty()

    @property
    def has_pictures(self) -> bool:
        """Whether a page or a picture is to be written."""
        return not self.files.keys().isdisjoint(DRAWN)

    @property
    def screen(self) -> Screen:
        """The width and the colour of the terminal's view."""
        return Screen(self.width or stdout_width(), wants_colour(self.color, sys.stdout))


SAVED = ("save", "save_weights", "force", "keep", "keep_limit")
"""Options of `Output` that commands offer together, as `DRAWN`."""
DRAWN = ("html", "svg", "png")
OF_RECORDS = ("json", "csv", *DRAWN)
"""The formats and pictures that every command with a table of heads offers."""
REPORT = {"html": "Write what is printed as an HTML page."}
"""The option of `Output` that reports have, with its help there."""
PATTERNS = ("view", "heads", "sequences", "top", "precision", "everything")
"""Options of `ViewOptions` that commands offer together, as `TABLES` and `DRAWING`."""
TABLES = ("tokens", "shapes", "timings", "verbose", "brief")
DRAWING = ("figure", "map_scale", "hide_sinks", "full")


# ------------------------------------------------------------------------------- before the command


def require_output(
    options: ViewOptions, output: Output, *, read: str | None = None, has_effects: bool = True
) -> None:
    """Checks the output before anything slow begins. `read` is the file that the command reads;
    `has_effects` says whether it may have measured effects of heads.

    Raises `UsageError` for a sort by effects that it has not, for pictures that cannot be drawn,
    and for a file that is read or written twice. Raises `MhaError` for files that cannot be
    written.
    """
    if not has_effects and require_order(options.sort)[0] in {row.field for row in OF_REMOVAL}:
        raise UsageError(
            f"--sort {options.sort} needs --effect of mha heads or mha scan, which measures it"
        )
    draws_map = output.has_pictures or options.maps or options.view == "heatmap"
    if options.map_scale and not draws_map:
        raise UsageError("--map-scale changes nothing without --html, --svg or --png FILE")
    shows_heads = (output.svg or output.png) and options.figure != "walk"
    if shows_heads and output.keep is not None and "pattern" not in output.keep:
        raise UsageError(
            f"--keep {','.join(output.keep)} lacks the pattern, which a picture of heads needs"
        )
    require_writable(output.files, force=output.force, read=read)
    if output.png is not None:
        from mhacli.render.figures.document import require_png

        require_png()


def require_writable(files: Mapping[str, str], *, force: bool, read: str | None = None) -> None:
    """Raises `UsageError` for stdout, for two options that name the same file, also by different
    paths, and for the file that is read. Raises `MhaError` for a file that cannot be written.
    """
    options_by_path = {} if read is None else {os.path.realpath(read): "record"}
    for name, path in files.items():
        if path == "-":
            raise UsageError(
                f"--{name} writes a file, and - names none", hint=f"try --{name} ./-, or a name"
            )
        other = options_by_path.setdefault(check_target(path, force=force), name)
        if other != name:
            raise UsageError(f"--{other} and --{name} name the same file, {path}")


# ----------------------------------------------------------------------------------------- printing


def print_result(
    record: Record,
    notes: Sequence[str],
    *,
    options: ViewOptions,
    output: Output,
    run: Run | None = None,
    view: Callable[[], None] | None = None,
    is_saved: bool = False,
) -> None:
    """Saves a record and its pictures, prints it, checks it, and prints the notes and the names of
    the files. `run` has the weights to save, `view` prints in place of the usual view of the
    terminal, and a record that `is_saved` was checked when it was made. A terminal gets what to
    type next. Raises `MhaError` for a file that cannot be written.
    """
    from mhacli.record.record import NOT_SEEN
    from mhacli.render.data import nonfinite

    if output.save_weights is not None and run is not None:
        from mhacli.layer.run import weights_content

        write_whole(output.save_weights, weights_content(run), force=output.force)
    if output.save is not None:
        record.save(output.save, force=output.force)
    if output.has_pictures:
        from mhacli.render.figures.document import figure
        from mhacli.render.page.document import page

        write_pictures(output, lambda: page(record, options), lambda: figure(record, options))
    if view is not None and output.format is None:
        view()
    else:
        print_record(record, options, output)
    if not is_saved:
        require_self_check(record)
    for text in notes:  # after the checks, so that an error is printed alone
        note(text)
    for name, n_bad in nonfinite(record.arrays, len(record.layers)).items():
        note(f"{n_bad} numbers of {name} are NaN or Inf; the self-check compares the others")
    unseen = [name.removesuffix(NOT_SEEN) for name in record.not_kept if name.endswith(NOT_SEEN)]
    beyond = [name for name in record.not_kept if not name.endswith(NOT_SEEN)]
    if beyond:
        note(f"not kept, beyond --keep-limit: {', '.join(beyond)}")
    if unseen:
        note(f"not kept, because the model does not expose it: {', '.join(unseen)}")
    note_written(output)
    if output.suggests and not options.brief:
        from .next_steps import print_next_steps

        print_next_steps(record, options)


def print_record(record: Record, options: ViewOptions, output: Output) -> None:
    """Prints a record in the chosen format, or the view of the terminal. Raises `UsageError` for a
    table of a record without patterns.
    """
    if output.csv and record.module is not None:
        raise UsageError("--csv needs attention weights, which the trace of a module does not have")
    from mhacli.render.data import csv_pieces, json_pieces

    match output.format:
        case "json":
            sys.stdout.writelines(json_pieces(record))
        case "csv":
            sys.stdout.writelines(csv_pieces(record, options))
        case None:
            from mhacli.render.run.view import record_views

            for view in record_views(record, options, output.screen):
                draw(view, output.screen)
        case _:
            assert_never(output.format)
    if output.format is not None and options.view != "auto":
        note(f"--view changes nothing with --{output.format}")


def print_report(
    output: Output,
    *,
    view: Callable[[Screen], RenderableType],
    json: Callable[[], Any],
    csv: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
    figures: Callable[[], Sequence[Piece]] = tuple,
) -> None:
    """Writes the page and the pictures that are requested, which show `figures` below what is
    printed, and prints a report that is no record: its document, which may be text, the rows of its
    table, or the view of the terminal; and the names of the files.
    """
    if output.has_pictures:
        from mhacli.render.notebook import report_figure, report_page

        command = record_command()
        name, pictures = " ".join(command[:2]), figures()
        write_pictures(
            output,
            lambda: report_page(view, name, command, pictures),
            lambda: report_figure(view, name, command, pictures),
        )
    match output.format:
        case "json":
            document = json()
            if not isinstance(document, str):
                document = dumps(document, indent=1, allow_nan=False) + "\n"
            write(document)
        case "csv":
            from mhacli.render.data import rows_csv

            sys.stdout.writelines(rows_csv(csv()))
        case None:
            draw(view(output.screen), output.screen)
        case _:
            assert_never(output.format)
    note_written(output)


def write_pictures(output: Output, page: Callable[[], str], figure: Callable[[], str]) -> None:
    """Writes the page, and the figure as SVG and as PNG, as far as they are requested."""
    contents: dict[str, bytes] = {}
    with show_activity("drawing"):
        if output.html is not None:
            contents[output.html] = page().encode()
        if output.svg is not None or output.png is not None:
            from mhacli.render.figures.document import png

            svg = figure()
            if output.svg is not None:
                contents[output.svg] = svg.encode()
            if output.png is not None:
                contents[output.png] = png(svg)
    for path, content in contents.items():
        write_whole(path, content, force=output.force)


def note_written(output: Output) -> None:
    """Prints the names and sizes of the written files on stderr, unless stdout is a format for
    programs.
    """
    if output.format is None:
        for path in output.files.values():
            with suppress(OSError):
                note(f"saved {path}, {shown(os.path.getsize(path), 'bytes')}")


# ------------------------------------------------------------------------------------------- checks


def require_self_check(record: Record) -> None:
    """Raises `MhaError` with exit code 3 if a check of the record failed. Errors in a user's
    attention are not errors of its trace, which has no checks.
    """
    from mhacli.render.base.format import agreement

    checks = [] if record.survey is None else [*record.survey.checks]
    if record.effect is not None:
        checks.append(record.effect.verified)
    if record.self_check.ok is not None:  # there was nothing to compare
        checks.append(record.self_check)
    failed = [check for check in checks if not check.ok]
    if failed and record.module is None:
        message = f"self-check FAILED: {agreement(failed[0])}"
        if record.model is not None and record.model.identical_outputs is False:
            message = "the model's outputs with inspection differ from those without"
        raise MhaError(message, code="self-check", exit_code=EXIT_CHECK)
