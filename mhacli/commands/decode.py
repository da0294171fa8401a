"""`mha decode`: autoregressive decoding with a KV cache, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from mhacli.commands.output import output, require_self_check, tell_notes
from mhacli.costs import CacheKind
from mhacli.errors import UsageError
from mhacli.options import (
    ColourOptions,
    DeviceOptions,
    LayerOptions,
    MachineOptions,
    SaveOptions,
    SourceOptions,
    TextOptions,
    command,
)
from mhacli.render.options import ViewOptions, require_choices
from mhacli.streams import life
from mhacli.values import counts, index_list, whole

_DECODING = "Decoding"


@dataclass(frozen=True)
class DecodeOptions:
    """What to decode with, and what to show."""

    prompt_len: Annotated[
        int,
        typer.Option(
            parser=whole("prompt-len", 0, 10**9),
            metavar="N",
            help="Read the first N tokens at once (prefill), then decode. (default: 0)",
            rich_help_panel=_DECODING,
            show_default=False,
        ),
    ] = 0
    cache: Annotated[
        CacheKind,
        typer.Option(help="How the steps keep the past; all three are compared.", rich_help_panel=_DECODING),
    ] = "preallocated"
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Lengths at which the three are compared, such as 64,256,1024. (default: that of the text)",
            rich_help_panel=_DECODING,
        ),
    ] = None
    head: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Heads to draw, such as 0,2. (default: all that fit)", rich_help_panel="View"
        ),
    ] = None
    sequence: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Sequences to draw. (default: all that fit)", rich_help_panel="View"),
    ] = None
    precision: Annotated[
        int,
        typer.Option(
            parser=whole("precision", 1, 9),
            metavar="N",
            help="Decimals of a share. (default: 2)",
            rich_help_panel="View",
            show_default=False,
        ),
    ] = 2
    all: Annotated[bool, typer.Option("--all", help="Draw every step and every key.", rich_help_panel="View")] = False
    json: Annotated[
        bool, typer.Option("--json", help="Print the record as one JSON document.", rich_help_panel="Output")
    ] = False


@command
def decode(
    source: SourceOptions,
    text: TextOptions,
    layer: LayerOptions,
    device: DeviceOptions,
    decoding: DecodeOptions,
    save: SaveOptions,
    colour: ColourOptions,
) -> None:
    """Options in, the study `decode`, its steps out."""
    compared = counts(decoding.lengths, "lengths")
    options = ViewOptions(
        heads=index_list(decoding.head, "head"),
        sequences=index_list(decoding.sequence, "sequence"),
        precision=decoding.precision,
        everything=decoding.all,
    )
    if layer.causal is False:
        raise UsageError("decode must be causal, got --no-causal: a token cannot read what is not there yet")
    from mhacli.commands.sources import make_request, require_memory, save_files, study_options
    from mhacli.plan import decodable

    request = make_request(source, text, layer, device, save)
    require_memory(request, save)
    decodable(request.config, request.encoded, decoding.prompt_len)
    require_choices(request.config.n_heads, len(request.encoded.sequences), options)
    with life("loading torch"):
        from mhacli.studies import decode as study
    with life("computing"):
        record = study.decode(
            request.encoded,
            request.config,
            cache=decoding.cache,
            prompt_len=decoding.prompt_len,
            lengths=compared,
            source=request.source,
            options=study_options(request, layer, device, save),
        )
        save_files(record, request, save)
    output(record, options, MachineOptions(json=decoding.json), colour)
    require_self_check(record)
    tell_notes(record, request.notes)
