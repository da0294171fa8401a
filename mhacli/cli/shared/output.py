"""The output of a command: a format on stdout, files, pictures, notes on stderr, and the result of the checks.

`FORMATS` is the table of the formats of a record. Each is an option of the commands that print records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar

from mhacli.cli.console import draw, note, screen, show_activity, write_pieces
from mhacli.cli.options import (
    HIDE_SINKS,
    HTML,
    MAP_SCALE,
    OUTPUT,
    PNG,
    SVG,
    ColourOptions,
    DrawingOptions,
    Force,
    HeadsViewOptions,
    SaveOptions,
    SectionOptions,
    option,
    option_group,
)
from mhacli.cli.values import index_list
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.files import check_target, format_size, write_whole
from mhacli.record.heads import require_order
from mhacli.render.base.options import Figure, Scale, Screen, ViewOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.record.record import Record

_PICTURES = "Pictures"
JSON = "Print the result as one JSON document."


# ------------------------------------------------------------------------------------------------------------ formats


class Format(NamedTuple):
    """A format of a record: its help and its renderer. `has_steps` says whether it supports traces and decoding."""

    help: str
    render: Callable[[Record, ViewOptions], Iterator[str]]
    has_steps: bool = False


def _json(record: Record, options: ViewOptions) -> Iterator[str]:
    from mhacli.render import json

    return json.pieces(record)


def _csv(record: Record, options: ViewOptions) -> Iterator[str]:
    from mhacli.render import csv

    return csv.pieces(record)


FORMATS: Mapping[str, Format] = {
    "json": Format(JSON, _json, has_steps=True),
    "csv": Format("Print CSV: a line per sequence, head, query and key.", _csv),
}
"""The formats of a record, by their options."""


class Formats:
    """Options that choose a format of stdout. `format_options` creates the groups."""

    def chosen(self) -> str | None:
        """The name of the format, None for the view of the terminal. Raises `UsageError` for two formats."""
        names = [f.name for f in fields(self) if getattr(self, f.name)]  # type: ignore[arg-type]
        if len(names) > 1:
            raise UsageError(f"--{names[0]} and --{names[1]} exclude each other: stdout takes one of them")
        return names[0] if names else None


G = TypeVar("G", bound=Formats)


def format_options(**texts: str) -> Callable[[type[G]], type[G]]:
    """A decorator that makes a class the group of options of these names, each with its help."""

    def made(group: type[G]) -> type[G]:
        group.__annotations__ = {
            name: Annotated[bool, option(OUTPUT, text, f"--{name}", common=name == "json")]
            for name, text in texts.items()
        }
        for name in texts:
            setattr(group, name, False)
        return option_group(group)

    return made


_HELP = {name: entry.help for name, entry in FORMATS.items()}


@format_options(**_HELP)
class RecordFormats(Formats):
    """Formats of a record of patterns."""


@format_options(**_HELP | {"csv": "Print CSV: a line per head."})
class HeadsFormats(Formats):
    """Formats of a record of statistics."""


@format_options(**{name: entry.help for name, entry in FORMATS.items() if entry.has_steps})
class StepsFormats(Formats):
    """Formats of a trace or of decoding."""


# ------------------------------------------------------------------------------------------------- the output group


@option_group
class PictureOptions:
    """The pictures to write, and their appearance."""

    html: Annotated[
        str | None,
        option(_PICTURES, HTML, metavar="FILE", common=True),
    ] = None
    svg: Annotated[str | None, option(_PICTURES, SVG, metavar="FILE")] = None
    png: Annotated[str | None, option(_PICTURES, PNG, metavar="FILE")] = None
    figure: Annotated[
        Figure | None,
        option(_PICTURES, "What --svg and --png show. (default: the head chosen by --head, or all in a grid)"),
    ] = None
    map_scale: Annotated[Scale | None, option(_PICTURES, MAP_SCALE)] = None
    hide_sinks: Annotated[bool, option(_PICTURES, HIDE_SINKS, "--hide-sinks")] = False
    full: Annotated[
        bool, option(_PICTURES, "Store every attention weight in the page, whatever its size.", "--full")
    ] = False

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """The files to write, each with its option."""
        return tuple((name, path) for name in ("html", "svg", "png") if (path := getattr(self, name)) is not None)

    @property
    def written(self) -> tuple[str | None, ...]:
        """The files to write; None for one that was not requested."""
        return self.html, self.svg, self.png


class Output(Protocol):
    """The output group of a command that prints a record."""

    @property
    def formats(self) -> Formats:
        """The format of stdout."""

    @property
    def pictures(self) -> PictureOptions:
        """The pictures to write."""

    @property
    def colour(self) -> ColourOptions:
        """Whether the terminal's view has colours."""

    @property
    def overwrites(self) -> bool:
        """Whether files that exist may be replaced."""

    @property
    def written(self) -> tuple[str | None, ...]:
        """The files to write; None for one that was not requested."""


@option_group
class SavedOutput:
    """The output of a computed record."""

    formats: Formats
    save: SaveOptions
    pictures: PictureOptions
    colour: ColourOptions

    @property
    def overwrites(self) -> bool:
        """Whether files that exist may be replaced."""
        return self.save.force

    @property
    def written(self) -> tuple[str | None, ...]:
        """The files to write; None for one that was not requested."""
        return self.save.save, self.save.save_weights, *self.pictures.written


@option_group
class RecordOutput(SavedOutput):
    """The output of a record of patterns."""

    formats: RecordFormats


@option_group
class StepsOutput(SavedOutput):
    """The output of a trace or of decoding."""

    formats: StepsFormats


@option_group
class ShownOutput:
    """The output of a saved record."""

    formats: RecordFormats
    pictures: PictureOptions
    force: Force = False
    colour: ColourOptions

    @property
    def overwrites(self) -> bool:
        """Whether files that exist may be replaced."""
        return self.force

    @property
    def written(self) -> tuple[str | None, ...]:
        """The files to write; None for one that was not requested."""
        return self.pictures.written


def view_options(drawing: DrawingOptions, ranking: HeadsViewOptions, sections: SectionOptions) -> ViewOptions:
    """The view options of the option groups. Raises `UsageError` for an unreadable list, an unknown order, and tables with
    `--brief`."""
    require_order(ranking.sort)
    if sections.brief:
        added = next((name for name, is_given in vars(sections).items() if is_given and name != "brief"), None)
        if added is not None:
            raise UsageError(f"--brief and --{added} exclude each other", hint=f"leave --{added} out")
    return ViewOptions(
        view=drawing.view,
        heads=index_list(drawing.head, "head"),
        sequences=index_list(drawing.sequence, "sequence"),
        top=drawing.top,
        precision=drawing.precision,
        everything=drawing.all,
        maps=index_list(ranking.map, "map") or (),
        sort=ranking.sort,
        **vars(sections),
    )


def require_own_steps(sections: SectionOptions) -> None:
    """Raises `UsageError` for shapes or timings, which only a layer of mha has."""
    for name, is_given in (("shapes", sections.shapes), ("timings", sections.timings)):
        if is_given:
            raise UsageError(
                f"--{name} is for runs of mha's own layer", hint="mha trace prints the steps of a checkpoint"
            )


Files = Sequence[tuple[str, str | None]]
"""Options that name a file, each with the file."""


def with_output(
    options: ViewOptions, output: Output, *, others: Files, keep: str | None = None, has_maps: bool = False
) -> ViewOptions:
    """The view options with the settings of the pictures, checked before anything slow begins. `keep` names the arrays that the
    record will hold, None for all; `has_maps` says whether the terminal shows maps.

    Raises `UsageError` for two formats, for settings of pictures without a picture, and for a file that is among the `others`
    that the command reads or writes. Raises `MhaError` for files that cannot be written.
    """
    output.formats.chosen()
    pictures = output.pictures
    _require_use(pictures, has_maps=has_maps or options.view == "heatmap")
    _require_kept(pictures, options, keep)
    _require_different((*others, *pictures.files))
    for _, path in pictures.files:
        check_target(path, force=output.overwrites)
    if pictures.png is not None:
        from mhacli.render.figures.document import require_png

        require_png()
    return replace(
        options,
        map_scale=pictures.map_scale,
        figure=pictures.figure or options.figure,
        hide_sinks=pictures.hide_sinks,
        full=pictures.full,
    )


def _require_use(pictures: PictureOptions, *, has_maps: bool) -> None:
    """Raises `UsageError` for a setting that no output uses."""
    has_figure = pictures.svg is not None or pictures.png is not None
    lost = {
        "full": ("--html FILE", pictures.full and pictures.html is None),
        "figure": ("--svg or --png FILE", pictures.figure is not None and not has_figure),
        "hide-sinks": ("--html, --svg or --png FILE", pictures.hide_sinks and not pictures.files),
        "map-scale": (
            "--html, --svg or --png FILE",
            pictures.map_scale is not None and not pictures.files and not has_maps,
        ),
    }
    for name, (needed, is_lost) in lost.items():
        if is_lost:
            raise UsageError(f"--{name} changes nothing without {needed}")


def _require_kept(pictures: PictureOptions, options: ViewOptions, keep: str | None) -> None:
    """Raises `UsageError` for a figure of heads whose patterns will not be in the record."""
    figure = pictures.figure or options.figure
    is_of_heads = (pictures.svg is not None or pictures.png is not None) and figure not in ("walk", "effects")
    if is_of_heads and keep is not None and "pattern" not in [word.strip() for word in keep.split(",")]:
        raise UsageError(
            f"--keep {keep} lacks the pattern, which a picture of heads needs", hint=f"try --keep pattern,{keep}"
        )


def _require_different(files: Files) -> None:
    """Raises `UsageError` for two options that name the same file, also by different paths."""
    options_by_path: dict[str, str] = {}
    for name, path in files:
        if path is None:
            continue
        other = options_by_path.setdefault(_resolved(path), name)
        if other != name:
            raise UsageError(f"--{other} and --{name} name the same file, {path}")


def _resolved(path: str) -> str:
    """The resolved path. In a deleted working folder it cannot be resolved, and writing the file raises the error."""
    try:
        return os.path.realpath(path)
    except OSError:
        return path


# ------------------------------------------------------------------------------------------------------------ printing


def print_result(record: Record, notes: Sequence[str], *, options: ViewOptions, output: Output) -> None:
    """Writes the pictures of a computed record, prints it, checks it, and prints the notes."""
    write_pictures(record, options, output)
    print_record(record, options, output.formats.chosen(), output.colour)
    require_self_check(record)
    print_notes(record, notes)
    note_written(output)


def print_record(record: Record, options: ViewOptions, name: str | None, colour: ColourOptions) -> None:
    """Prints a record in the format `name`, or the view of the terminal for None. Raises `UsageError` for a table of a record
    without patterns."""
    if name is not None:
        if record.module is not None and not FORMATS[name].has_steps:
            raise UsageError(
                f"--{name} needs attention weights, which the trace of a module does not have", hint="try --json"
            )
        write_pieces(FORMATS[name].render(record, options))
        return
    from mhacli.render.display.terminal import record_views

    on = screen(colour.color, colour.width)
    for view in record_views(record, options, on):
        draw(view, on)


def print_report(
    name: str | None,
    colour: ColourOptions,
    *,
    formats: Mapping[str, Callable[[], Iterable[str]]],
    view: Callable[[Screen], RenderableType],
) -> None:
    """Prints a report that is no record, in the format `name` or as the view of the terminal."""
    if name is not None:
        write_pieces(formats[name]())
        return
    on = screen(colour.color, colour.width)
    draw(view(on), on)


def note_written(output: Output) -> None:
    """Prints the names of the written files on stderr, unless stdout is a format for programs."""
    if output.formats.chosen() is None:
        note_saved(*output.written)


def note_saved(*paths: str | None) -> None:
    """Prints the names and sizes of the written files on stderr."""
    for path in filter(None, paths):
        with suppress(OSError):
            note(f"saved {path}, {format_size(os.path.getsize(path))}")


def json_document(value: Any) -> list[str]:
    """The pieces of a JSON document."""
    import json

    return [json.dumps(value, indent=1, allow_nan=False) + "\n"]


def save_record(record: Record, save: SaveOptions) -> None:
    """Saves the record if a file is given. Raises `MhaError` if it cannot be written."""
    if save.save is not None:
        record.save(save.save, force=save.force)


def print_notes(record: Record, notes: Sequence[str]) -> None:
    """Prints the notes of a successful run on stderr. It follows the checks, so that an error is printed alone."""
    from mhacli.record.record import NOT_SEEN
    from mhacli.render.json import nonfinite

    for text in notes:
        note(text)
    for name, n_bad in nonfinite(record).items():
        note(f"{n_bad} numbers of {name} are NaN or Inf; the self-check compares the others")
    unseen = [name.removesuffix(NOT_SEEN) for name in record.not_kept if name.endswith(NOT_SEEN)]
    beyond = [name for name in record.not_kept if not name.endswith(NOT_SEEN)]
    if beyond:
        note(f"not kept, beyond --keep-limit: {', '.join(beyond)}")
    if unseen:
        note(f"not kept, because the model does not expose it: {', '.join(unseen)}")


def _excess(difference: float | None, tolerance: float) -> str:
    if difference is None:
        return "it has numbers that are not finite"
    return f"a difference of {difference:.3g} is above the tolerance of {tolerance:.3g}"


def require_self_check(record: Record) -> None:
    """Raises `MhaError` with exit code 3 if a check of the record failed."""
    for check_result in () if record.survey is None else record.survey.checks:
        if not check_result.ok:
            raise MhaError(
                f"the check '{check_result.name}' fails: {_excess(check_result.error, check_result.tolerance)}",
                code="self-check",
                exit_code=EXIT_CHECK,
            )
    if record.model is not None and record.model.identical_outputs is False:
        raise MhaError(
            "the model's outputs with inspection differ from those without",
            hint="a model whose outputs change from pass to pass cannot be compared",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    if record.effect is not None and not record.effect.verified.ok:
        raise MhaError(
            "a second computation of the removals disagrees with the first: "
            + _excess(record.effect.verified.max_abs_error, record.effect.verified.tolerance),
            hint="in 16 bits rounding can hide such changes; --dtype float32 shows whether it does"
            if record.config.dtype in ("bfloat16", "float16")
            else None,
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    check = record.self_check
    if not check.ok:
        fault = (
            "does not follow from the pattern shown"
            if record.decoding is None
            else "does not follow from the pattern shown, or is not that of a full recomputation"
        )
        raise MhaError(
            f"the output {fault}: {_excess(check.max_abs_error, check.tolerance)}",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    for route in record.routes:
        if not route.ok:
            raise MhaError(
                f"the route {route.route} disagrees with the separate one: "
                f"{_excess(route.max_abs_difference, route.tolerance)}",
                code="self-check",
                exit_code=EXIT_CHECK,
            )


# ------------------------------------------------------------------------------------------------------------ pictures


def write_pictures(record: Record, options: ViewOptions, output: Output) -> None:
    """Writes the requested pictures. Raises `MhaError` if the record lacks the data, or a file cannot be written."""
    if not output.pictures.files:
        return
    with show_activity("drawing"):
        contents = [*_contents(record, options, output.pictures)]
    for path, content in contents:
        write_whole(path, content, force=output.overwrites)


def _contents(record: Record, options: ViewOptions, pictures: PictureOptions) -> Iterator[tuple[str, bytes]]:
    """The paths and contents of the pictures."""
    if pictures.html is not None:
        from mhacli.render.page.document import page

        yield pictures.html, page(record, options).encode()
    if pictures.svg is None and pictures.png is None:
        return
    from mhacli.render.figures.document import figure

    svg = figure(record, options)
    if pictures.svg is not None:
        yield pictures.svg, svg.encode()
    if pictures.png is not None:
        from mhacli.render.figures.document import png

        yield pictures.png, png(svg)
