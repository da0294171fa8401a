"""What goes out of a command: a format on stdout, files, pictures, notes on stderr, and the verdict.

`FORMATS` is the table of the formats of a record. Each is an option of the commands that print records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar

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
from mhacli.cli.streams import draw, note, screen, show_activity, write_pieces
from mhacli.cli.values import index_list
from mhacli.errors import EXIT_CHECK, MhaError, UsageError
from mhacli.io.files import check_target, format_size, write_whole
from mhacli.render.base.options import Figure, Scale, Screen, ViewOptions
from mhacli.results.record.head_statistics import require_order

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mhacli.results.record.record import Record

_PICTURES = "Pictures"
JSON = "Print the result as one JSON document."


# ------------------------------------------------------------------------------------------------------------ formats


class Format(NamedTuple):
    """A way to print a record: what the help says, and the pieces of text. `has_steps`: it can print walks and decoding too."""

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
    """Options that choose a format of stdout. `format_options` makes the groups."""

    def chosen(self) -> str | None:
        """The name of the format, None where the terminal's view is wanted. Raises `UsageError` for two formats."""
        names = [f.name for f in fields(self) if getattr(self, f.name)]  # type: ignore[arg-type]
        if len(names) > 1:
            raise UsageError(f"--{names[0]} and --{names[1]} exclude each other: stdout takes one of them")
        return names[0] if names else None


G = TypeVar("G", bound=Formats)


def format_options(**texts: str) -> Callable[[type[G]], type[G]]:
    """Makes a class the group of options of these names, each with its text in the help."""

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
    """Formats of a walk, or of decoding."""


# ------------------------------------------------------------------------------------------------- the output group


@option_group
class PictureOptions:
    """Files to draw into, and how."""

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
        """The files that are asked for, each with its option."""
        return tuple((name, path) for name in ("html", "svg", "png") if (path := getattr(self, name)) is not None)

    @property
    def written(self) -> tuple[str | None, ...]:
        """The files that are written, None for one that was not asked for."""
        return self.html, self.svg, self.png


class Output(Protocol):
    """The output group of a command that prints a record."""

    @property
    def formats(self) -> Formats:
        """The format of stdout."""

    @property
    def pictures(self) -> PictureOptions:
        """The files that are drawn."""

    @property
    def colour(self) -> ColourOptions:
        """Whether the terminal's view has colours."""

    @property
    def overwrites(self) -> bool:
        """Whether files that exist may be replaced."""

    @property
    def written(self) -> tuple[str | None, ...]:
        """The files that are written, None for one that was not asked for."""


@option_group
class SavedOutput:
    """Where a record goes that was computed."""

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
        """The files that are written, None for one that was not asked for."""
        return self.save.save, self.save.save_weights, *self.pictures.written


@option_group
class RecordOutput(SavedOutput):
    """Where a record of patterns goes."""

    formats: RecordFormats


@option_group
class StepsOutput(SavedOutput):
    """Where a walk goes, or what was decoded."""

    formats: StepsFormats


@option_group
class ShownOutput:
    """Where a saved record goes."""

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
        """The files that are written, None for one that was not asked for."""
        return self.pictures.written


def view_options(drawing: DrawingOptions, ranking: HeadsViewOptions, sections: SectionOptions) -> ViewOptions:
    """The drawing options as a renderer takes them. Raises `UsageError` for a list that is none, for no order, and for more
    tables in a brief view."""
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
    """Raises `UsageError` for the shapes or timings of anything but a run of our own layer."""
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
    """The view options with what pictures are asked for. Refuses before anything slow begins: raises `UsageError` for two
    formats, for choices without a picture that they could be of, unless the terminal `has_maps` or a heatmap, and for a file that
    is also one of the `others` that the command reads or writes; `MhaError` for files that cannot be written. `keep` is what the
    record will hold, None: all."""
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
    """Raises `UsageError` for a choice that nothing is drawn by."""
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
    for name, (need, is_lost) in lost.items():
        if is_lost:
            raise UsageError(f"--{name} changes nothing without {need}")


def _require_kept(pictures: PictureOptions, options: ViewOptions, keep: str | None) -> None:
    """Raises `UsageError` for a figure of heads whose patterns will not be in the record."""
    figure = pictures.figure or options.figure
    is_of_heads = (pictures.svg is not None or pictures.png is not None) and figure not in ("walk", "effects")
    if is_of_heads and keep is not None and "pattern" not in [word.strip() for word in keep.split(",")]:
        raise UsageError(
            f"--keep {keep} lacks the pattern, which a picture of heads needs", hint=f"try --keep pattern,{keep}"
        )


def _require_different(files: Files) -> None:
    """Raises `UsageError` for two options that name one file, whatever way they name it."""
    known: dict[str, str] = {}
    for name, path in files:
        if path is None:
            continue
        other = known.setdefault(_place(path), name)
        if other != name:
            raise UsageError(f"--{other} and --{name} name the same file, {path}")


def _place(path: str) -> str:
    """Where a path leads. In a working folder that was deleted nobody knows: whoever writes the file tells it."""
    try:
        return os.path.realpath(path)
    except OSError:
        return path


# ------------------------------------------------------------------------------------------------------------ printing


def print_result(record: Record, notes: Sequence[str], *, options: ViewOptions, output: Output) -> None:
    """A record that was computed: its pictures, then itself on stdout, whether it holds together, and the notes."""
    write_pictures(record, options, output)
    print_record(record, options, output.formats.chosen(), output.colour)
    require_self_check(record)
    tell_notes(record, notes)
    note_written(output)


def print_record(record: Record, options: ViewOptions, name: str | None, colour: ColourOptions) -> None:
    """The record on stdout, in the format of that name or as the terminal shows it. Raises `UsageError` for a table of a record
    that has no patterns."""
    if name is not None:
        if record.module is not None and not FORMATS[name].has_steps:
            raise UsageError(
                f"--{name} needs attention weights, which the trace of a module does not have", hint="try --json"
            )
        write_pieces(FORMATS[name].render(record, options))
        return
    from mhacli.render.display.terminal import record_views

    on = screen(colour.color)
    for view in record_views(record, options, on):
        draw(view, on)


def print_report(
    name: str | None,
    colour: ColourOptions,
    *,
    formats: Mapping[str, Callable[[], Iterable[str]]],
    view: Callable[[Screen], RenderableType],
) -> None:
    """What is no record, on stdout: in the format of that name, or as the terminal shows it."""
    if name is not None:
        write_pieces(formats[name]())
        return
    on = screen(colour.color)
    draw(view(on), on)


def note_written(output: Output) -> None:
    """Names the files that were written, unless stdout holds data for a program."""
    if output.formats.chosen() is None:
        note_saved(*output.written)


def note_saved(*paths: str | None) -> None:
    """Names on stderr the files that were written, with their sizes."""
    for path in filter(None, paths):
        with suppress(OSError):
            note(f"saved {path}, {format_size(os.path.getsize(path))}")


def json_document(value: Any) -> list[str]:
    """The pieces of a JSON document."""
    import json

    return [json.dumps(value, indent=1, allow_nan=False) + "\n"]


def save_record(record: Record, save: SaveOptions) -> None:
    """The record in the file that was asked for, if any. Raises `MhaError` when it cannot be written."""
    if save.save is not None:
        record.save(save.save, force=save.force)


def tell_notes(record: Record, notes: Sequence[str]) -> None:
    """What a reader should know of a run that worked, on stderr: after the output, so that an error stands alone."""
    from mhacli.render.json import nonfinite
    from mhacli.results.record.record import NOT_SEEN

    for said in notes:
        note(said)
    for name, n_bad in nonfinite(record).items():
        note(f"{n_bad} numbers of {name} are NaN or Inf; the self-check compares the others")
    unseen = [name.removesuffix(NOT_SEEN) for name in record.not_kept if name.endswith(NOT_SEEN)]
    beyond = [name for name in record.not_kept if not name.endswith(NOT_SEEN)]
    if beyond:
        note(f"not kept, beyond --keep-limit: {', '.join(beyond)}")
    if unseen:
        note(f"not kept, because the model does not expose it: {', '.join(unseen)}")


def _excess(found: float | None, tolerance: float) -> str:
    if found is None:
        return "it has numbers that are not finite"
    return f"a difference of {found:.3g} is above the tolerance of {tolerance:.3g}"


def require_self_check(record: Record) -> None:
    """Raises `MhaError` with exit code 3 when the output does not follow from the pattern shown, or routes disagree."""
    for one in () if record.survey is None else record.survey.checks:
        if not one.ok:
            raise MhaError(
                f"the check '{one.name}' fails: {_excess(one.error, one.tolerance)}",
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
    """Draws the files that were asked for, each whole. Raises `MhaError` for what a record does not hold, or no file can hold."""
    if not output.pictures.files:
        return
    with show_activity("drawing"):
        drawn = [*_contents(record, options, output.pictures)]
    for path, content in drawn:
        write_whole(path, content, force=output.overwrites)


def _contents(record: Record, options: ViewOptions, pictures: PictureOptions) -> Iterator[tuple[str, bytes]]:
    """The files with what goes into them."""
    if pictures.html is not None:
        from mhacli.render.page.document import page

        yield pictures.html, page(record, options).encode()
    if pictures.svg is None and pictures.png is None:
        return
    from mhacli.render.figures.document import figure

    drawn = figure(record, options)
    if pictures.svg is not None:
        yield pictures.svg, drawn.encode()
    if pictures.png is not None:
        from mhacli.render.figures.document import png

        yield pictures.png, png(drawn)
