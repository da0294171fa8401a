"""Files to look at, of any record: a page, a picture as SVG or PNG. What `run`, `trace`, `heads` and `show` share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from mhacli.cli.options import ColourOptions, MachineOptions, SaveOptions, option, option_group
from mhacli.cli.shared.output import output, require_self_check, tell_notes
from mhacli.cli.streams import life
from mhacli.errors import UsageError
from mhacli.io.files import check_target, format_size, write_whole
from mhacli.render.base.options import Figure, Scale, ViewOptions

if TYPE_CHECKING:
    from mhacli.results.record.record import Record

_PICTURES = "Pictures"


@option_group
class PictureOptions:
    """Files to draw into, and how."""

    html: Annotated[
        str | None, option(_PICTURES, "One page that needs no network: every head, to explore.", metavar="FILE")
    ] = None
    svg: Annotated[
        str | None, option(_PICTURES, "A picture of a head, a grid of heads, or the walkthrough.", metavar="FILE")
    ] = None
    png: Annotated[str | None, option(_PICTURES, "The same as PNG (needs the extra png).", metavar="FILE")] = None
    figure: Annotated[
        Figure | None,
        option(_PICTURES, "What --svg and --png draw. (default: the head that was chosen, or all in a grid)"),
    ] = None
    map_scale: Annotated[
        Scale | None,
        option(_PICTURES, "How shades follow shares in pictures and maps. (default: linear, log for long texts)"),
    ] = None
    hide_sinks: Annotated[
        bool, option(_PICTURES, "Take sinks out, and renormalise the rest of each row.", "--hide-sinks")
    ] = False
    full: Annotated[bool, option(_PICTURES, "Put every cell into the page, whatever its size.", "--full")] = False

    @property
    def files(self) -> tuple[tuple[str, str], ...]:
        """The files that are asked for, each with its option."""
        return tuple((name, path) for name in ("html", "svg", "png") if (path := getattr(self, name)) is not None)


Files = Sequence[tuple[str, str | None]]
"""Options that name a file, each with the file."""


def with_pictures(
    options: ViewOptions,
    pictures: PictureOptions,
    *,
    others: Files,
    force: bool,
    keep: str | None = None,
    has_maps: bool = False,
) -> ViewOptions:
    """The view options with what pictures are asked for. Refuses before anything slow begins: raises `UsageError` for choices
    without a picture that they could be of, unless the terminal `has_maps`, and for a file that is also one of the `others` that
    the command reads or writes; `MhaError` for files that cannot be written. `keep` is what the record will hold, None: all."""
    _require_use(pictures, has_maps=has_maps)
    _require_kept(pictures, options, keep)
    _require_different((*others, *pictures.files))
    for _, path in pictures.files:
        check_target(path, force=force)
    if pictures.png is not None:
        from mhacli.render.png import require_png

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
            raise UsageError(f"{name} must come with {need}, got none")


def _require_kept(pictures: PictureOptions, options: ViewOptions, keep: str | None) -> None:
    """Raises `UsageError` for a figure of heads whose patterns will not be in the record."""
    figure = pictures.figure or options.figure
    is_of_heads = (pictures.svg is not None or pictures.png is not None) and figure != "walk"
    if is_of_heads and keep is not None and "pattern" not in [word.strip() for word in keep.split(",")]:
        raise UsageError(
            f"keep must name pattern for a picture of heads, got {keep!r}", hint=f"try --keep pattern,{keep}"
        )


def _require_different(files: Files) -> None:
    """Raises `UsageError` for two options that name one file, whatever way they name it."""
    known: dict[str, str] = {}
    for name, path in files:
        if path is None:
            continue
        other = known.setdefault(_place(path), name)
        if other != name:
            raise UsageError(f"{other} and {name} must be different files, got {path!r} for both")


def _place(path: str) -> str:
    """Where a path leads. In a working folder that was deleted nobody knows: whoever writes the file tells it."""
    try:
        return os.path.realpath(path)
    except OSError:
        return path


def tell(
    record: Record,
    notes: Sequence[str],
    *,
    options: ViewOptions,
    machine: MachineOptions,
    save: SaveOptions,
    pictures: PictureOptions,
    colour: ColourOptions,
) -> None:
    """A record that was computed: its pictures, then itself on stdout, whether it holds together, and the notes."""
    drawn = write_pictures(record, options, pictures, force=save.force)
    output(record, options, machine, colour)
    require_self_check(record)
    tell_notes(record, (*notes, *drawn))


def write_pictures(record: Record, options: ViewOptions, pictures: PictureOptions, *, force: bool) -> tuple[str, ...]:
    """Draws the files that were asked for, each whole; returns what is to be told of each: its size. Raises `MhaError` for what a
    record does not hold, and for files that cannot be written."""
    if not pictures.files:
        return ()
    with life("drawing"):
        drawn = [*_contents(record, options, pictures)]
    for path, content in drawn:
        write_whole(path, content, force=force)
    return tuple(f"{path}: {format_size(len(content))}" for path, content in drawn)


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
        from mhacli.render.png import png

        yield pictures.png, png(drawn)
