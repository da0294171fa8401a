"""Options shared by commands, as frozen groups: one group, one panel of the help.

A command takes groups as parameters (`def run(text: TextOptions, layer: LayerOptions)`), and `command` spreads their
fields into the signature that Typer reads. None means "not given", so that a weights file can decide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from mhacli.config import (
    DEFAULT_KEEP_LIMIT,
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_TOKEN_LEN,
    DEFAULT_MAX_TOKENS,
    MAX_HEADS,
    MAX_SEED,
    MAX_THREADS,
    MAX_WIDTH,
    Dtype,
    Init,
    OnBadBytes,
    Positions,
    Punctuation,
)
from mhacli.files import format_size
from mhacli.render.options import View
from mhacli.streams import ColourChoice
from mhacli.values import integer, real, size, whole


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the fields of its option groups as parameters of their own, for Typer to read."""
    groups = {name: kind for name, kind in get_type_hints(function).items() if name != "return"}

    @wraps(function)
    def spread(**values: Any) -> None:
        taken = {name: kind(**{f.name: values[f.name] for f in fields(kind)}) for name, kind in groups.items()}
        function(**taken)

    parameters = [parameter for kind in groups.values() for parameter in _parameters(kind)]
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    found = []
    for f in fields(group):
        found.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        )
    return found


_TEXT, _LAYER, _DEVICE, _VIEW, _OUTPUT = "Text", "Attention", "Device", "View", "Output"


@dataclass(frozen=True)
class SourceOptions:
    """Where text comes from, how it is decoded, and how it is cut into tokens."""

    text: Annotated[
        list[str] | None,
        typer.Argument(help="Text, one sequence each; several make a batch. - reads stdin.", show_default=False),
    ] = None
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", "-f", help="A text file, one sequence; repeatable. - reads stdin.", rich_help_panel=_TEXT
        ),
    ] = None
    lines: Annotated[
        bool, typer.Option("--lines", help="Each non-empty line of a file is a sequence.", rich_help_panel=_TEXT)
    ] = False
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="word, char, byte, or the path of a tokenizer.json (needs the extra hf). (default: word)",
            rich_help_panel=_TEXT,
            autocompletion=lambda: ["word", "char", "byte"],
        ),
    ] = None
    keep_case: Annotated[
        bool | None,
        typer.Option(
            "--keep-case/--lower-case", help="Do not lower-case words.", rich_help_panel=_TEXT, show_default=False
        ),
    ] = None
    punctuation: Annotated[
        Punctuation | None,
        typer.Option(help="drop marks, or keep each as a token. (default: drop)", rich_help_panel=_TEXT),
    ] = None
    encoding: Annotated[str, typer.Option(help="Encoding of files and stdin.", rich_help_panel=_TEXT)] = "utf-8"
    errors: Annotated[
        OnBadBytes, typer.Option(help="What to do with bytes that the encoding does not have.", rich_help_panel=_TEXT)
    ] = "strict"
    max_bytes: Annotated[
        int | None,
        typer.Option(
            parser=size("max-bytes"),
            metavar="SIZE",
            help=f"Most bytes from one source. (default: {format_size(DEFAULT_MAX_BYTES)}; vocab: 100 MiB)",
            rich_help_panel=_TEXT,
        ),
    ] = None
    max_token_len: Annotated[
        int,
        typer.Option(
            parser=whole("max-token-len", 1, 10**9),
            metavar="N",
            help="Most characters in a word.",
            rich_help_panel=_TEXT,
        ),
    ] = DEFAULT_MAX_TOKEN_LEN


@dataclass(frozen=True)
class TextOptions:
    """What else a run takes from text: a context, a vocabulary, a length."""

    context: Annotated[
        list[str] | None,
        typer.Option(
            help="Cross-attention: keys and values come from this text; once, or once per sequence.",
            rich_help_panel=_TEXT,
        ),
    ] = None
    vocab: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A vocabulary file; other words become <unk>.", rich_help_panel=_TEXT),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            parser=whole("max-tokens", 1, 10**9),
            metavar="N",
            help=f"Take the first N tokens of each sequence. Without it, more than {DEFAULT_MAX_TOKENS} are refused.",
            rich_help_panel=_TEXT,
        ),
    ] = None


@dataclass(frozen=True)
class LayerOptions:
    """The attention layer: its sizes, its variants, its weights."""

    d_model: Annotated[
        int | None,
        typer.Option(
            parser=integer("d_model", 1, MAX_WIDTH),
            metavar="N",
            help="Width of the model. (default: 64)",
            rich_help_panel=_LAYER,
        ),
    ] = None
    heads: Annotated[
        int | None,
        typer.Option(
            parser=integer("n_heads", 1, MAX_HEADS),
            metavar="N",
            help="Query heads. (default: 4)",
            rich_help_panel=_LAYER,
        ),
    ] = None
    d_head: Annotated[
        int | None,
        typer.Option(
            parser=integer("d_head", 1, MAX_WIDTH),
            metavar="N",
            help="Width of queries and keys per head. (default: d_model / heads)",
            rich_help_panel=_LAYER,
        ),
    ] = None
    d_v: Annotated[
        int | None,
        typer.Option(
            parser=integer("d_v", 1, MAX_WIDTH),
            metavar="N",
            help="Width of values per head. (default: d_head)",
            rich_help_panel=_LAYER,
        ),
    ] = None
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--no-causal", help="No token sees a later one.", rich_help_panel=_LAYER, show_default=False
        ),
    ] = None
    positions: Annotated[
        Positions | None,
        typer.Option(help="How tokens know their place. (default: sinusoidal)", rich_help_panel=_LAYER),
    ] = None
    bias: Annotated[
        bool | None,
        typer.Option(
            "--bias/--no-bias",
            help="Projections add a bias. (default: bias)",
            rich_help_panel=_LAYER,
            show_default=False,
        ),
    ] = None
    no_out_proj: Annotated[
        bool,
        typer.Option("--no-out-proj", help="No output projection: the heads side by side.", rich_help_panel=_LAYER),
    ] = False
    scale: Annotated[
        float | None,
        typer.Option(
            parser=real("scale"),
            metavar="X",
            help="Factor on the dot products. (default: 1/√d_head)",
            rich_help_panel=_LAYER,
        ),
    ] = None
    dropout: Annotated[
        float | None,
        typer.Option(
            parser=real("dropout"),
            metavar="P",
            help="Dropout on the pattern; acts only with --train. (default: 0)",
            rich_help_panel=_LAYER,
        ),
    ] = None
    train: Annotated[
        bool,
        typer.Option("--train", help="Apply dropout, and show the pattern before and after.", rich_help_panel=_LAYER),
    ] = False
    init: Annotated[
        Init | None, typer.Option(help="How random weights are drawn. (default: xavier)", rich_help_panel=_LAYER)
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            parser=integer("seed", 0, MAX_SEED),
            metavar="N",
            help="Seed of the random weights. (default: 0)",
            rich_help_panel=_LAYER,
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Weights from a safetensors file instead.", rich_help_panel=_LAYER),
    ] = None
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Look at NaN and Inf instead of stopping.", rich_help_panel=_LAYER)
    ] = False


@dataclass(frozen=True)
class DeviceOptions:
    """Where and how it is computed, and how often it is timed."""

    device: Annotated[
        str | None,
        typer.Option(
            help="auto, cpu, cuda, cuda:N or mps. (default: auto)",
            rich_help_panel=_DEVICE,
            autocompletion=lambda: ["auto", "cpu", "cuda", "mps"],
        ),
    ] = None
    dtype: Annotated[Dtype | None, typer.Option(help="Number format. (default: float32)", rich_help_panel=_DEVICE)] = (
        None
    )
    threads: Annotated[
        int | None,
        typer.Option(
            parser=integer("threads", 1, MAX_THREADS),
            metavar="N",
            help="CPU threads. (default: torch's choice)",
            rich_help_panel=_DEVICE,
        ),
    ] = None
    repeat: Annotated[
        int | None,
        typer.Option(
            parser=whole("repeat", 1, 100_000),
            metavar="N",
            help="Timed runs after the first. (default: 5, fewer if slow)",
            rich_help_panel=_DEVICE,
        ),
    ] = None


@dataclass(frozen=True)
class DrawingOptions:
    """What is drawn of a record."""

    view: Annotated[View, typer.Option(help="How each head is drawn.", rich_help_panel=_VIEW)] = "matrix"
    head: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Heads to draw, such as 0,2 or 0-3. (default: all that fit)", rich_help_panel=_VIEW
        ),
    ] = None
    sequence: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Sequences to draw, such as 0,2. (default: all that fit)", rich_help_panel=_VIEW
        ),
    ] = None
    top: Annotated[
        int,
        typer.Option(
            parser=whole("top", 1, 1000), metavar="K", help="Keys per query in --view top.", rich_help_panel=_VIEW
        ),
    ] = 3
    precision: Annotated[
        int,
        typer.Option(parser=whole("precision", 1, 9), metavar="N", help="Decimals of a share.", rich_help_panel=_VIEW),
    ] = 2
    all: Annotated[
        bool, typer.Option("--all", help="Hide nothing: every row, column, head and sequence.", rich_help_panel=_VIEW)
    ] = False


@dataclass(frozen=True)
class ColourOptions:
    """Colour."""

    color: Annotated[
        ColourChoice,
        typer.Option(
            help="Colour; auto obeys NO_COLOR, FORCE_COLOR and whether stdout is a terminal.", rich_help_panel=_OUTPUT
        ),
    ] = "auto"


@dataclass(frozen=True)
class MachineOptions:
    """Output for programs."""

    json: Annotated[
        bool, typer.Option("--json", help="Print the record as one JSON document.", rich_help_panel=_OUTPUT)
    ] = False
    csv: Annotated[
        bool,
        typer.Option(
            "--csv",
            help="Print one line per sequence, head, query and key; tokens as JSON strings.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False


@dataclass(frozen=True)
class SaveOptions:
    """Files to write, and what to keep in them."""

    save: Annotated[str | None, typer.Option(metavar="FILE", help="Save the record.", rich_help_panel=_OUTPUT)] = None
    save_weights: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save the weights.", rich_help_panel=_OUTPUT)
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.", rich_help_panel=_OUTPUT)] = False
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="SITES",
            help="Arrays to keep in the record, such as pattern,z. (default: qk,scores,pattern,z,out as far as they fit)",
            rich_help_panel=_OUTPUT,
        ),
    ] = None
    keep_limit: Annotated[
        int,
        typer.Option(
            parser=size("keep-limit"),
            metavar="SIZE",
            help=f"Most bytes of arrays to keep. (default: {format_size(DEFAULT_KEEP_LIMIT)})",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = DEFAULT_KEEP_LIMIT
