"""Options shared by commands, in groups: one group, one panel of the help.

A command takes groups as parameters (`def run(text: TextOptions, layer: LayerOptions)`), and `command` spreads their
fields, and those of groups in them, into the signature that Typer reads. None means "not given", so that a weights file can
decide. `mhacli.cli.shared.output` has the groups of what goes out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer

from mhacli.cli.streams import ColourChoice
from mhacli.cli.values import integer, real, size, whole
from mhacli.io.files import format_size
from mhacli.render.base.options import Scale, View
from mhacli.results.record.head_statistics import SORTS
from mhacli.spec.config import (
    DEFAULT_KEEP_LIMIT,
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_TOKEN_LEN,
    DEFAULT_MAX_TOKENS,
    MAX_HEADS,
    MAX_LENGTH,
    MAX_SEED,
    MAX_THREADS,
    MAX_WIDTH,
    Distribution,
    Dtype,
    Init,
    OnBadBytes,
    PaddingSide,
    Positions,
    Punctuation,
)

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def option_group(group: type[T]) -> type[T]:
    """A dataclass of options, frozen for type checkers. Methods that nobody calls would take time at every start."""
    return dataclass(repr=False, kw_only=True)(group)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the fields of its option groups as parameters of their own, for Typer to read."""
    groups = {name: kind for name, kind in get_type_hints(function).items() if name != "return"}

    @wraps(function)
    def spread(**values: Any) -> None:
        function(**{name: _filled(kind, values) for name, kind in groups.items()})

    parameters = [parameter for kind in groups.values() for parameter in _parameters(kind)]
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread.common_options = frozenset(filter(None, map(_common_name, parameters)))  # type: ignore[attr-defined]
    return spread


def _common_name(parameter: inspect.Parameter) -> str | None:
    """The name of an option of the short help, None for any other parameter."""
    declared = getattr(parameter.annotation, "__metadata__", ())
    return parameter.name if any(getattr(info, "common", False) for info in declared) else None


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for f in fields(group):
        if is_dataclass(hints[f.name]):
            yield from _parameters(hints[f.name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name])


def _filled(group: Any, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(group)
    return group(
        **{
            f.name: _filled(hints[f.name], values) if is_dataclass(hints[f.name]) else values[f.name]
            for f in fields(group)
        }
    )


_TEXT, _LAYER, _POSITIONS, _MASK = "Text", "Attention", "Positions", "Mask and scores"
_DEVICE, VIEW, OUTPUT = "Device", "View", "Output"


def option(panel: str, text: str, *names: str, common: bool = False, **how: Any) -> Any:
    """An option in a panel of the help; a `common` one is in the short help too."""
    made = typer.Option(*names, help=text, rich_help_panel=panel, **how)
    made.common = common
    return made


def number(panel: str, parser: Callable[[object], Any], text: str, *names: str, metavar: str = "N", **how: Any) -> Any:
    """An option whose word a parser of ours reads."""
    return option(panel, text, *names, parser=parser, metavar=metavar, **how)


# ----------------------------------------------------------------------------------------- options of several commands

Force = Annotated[bool, option(OUTPUT, "Overwrite files that exist.", "--force")]
ForceOne = Annotated[bool, option(OUTPUT, "Overwrite a file that exists.", "--force")]
SaveRecord = Annotated[str | None, option(OUTPUT, "Save the record.", metavar="FILE", common=True)]
HeadList = Annotated[
    str | None, option(VIEW, "Heads to draw, such as 0,2 or 0-3. (default: all that fit)", metavar="LIST", common=True)
]
Precision = Annotated[int, number(VIEW, whole("precision", 1, 9), "Decimals of attention weights.")]
Revision = Annotated[str | None, option("Checkpoint", "Branch, tag or commit of a hub's checkpoint.", metavar="NAME")]
MapScale = Annotated[
    Scale | None, option(VIEW, "Colour scale of attention weights. (default: linear, log for long texts)")
]
_DEVICES = ["auto", "cpu", "cuda", "mps"]


def seed_option(panel: str, text: str) -> Any:
    """`--seed`, of what the text says."""
    return number(panel, integer("seed", 0, MAX_SEED), text)


def device_option(panel: str, text: str, **how: Any) -> Any:
    """`--device`, with completion."""
    return option(panel, text, autocompletion=lambda: _DEVICES, **how)


# ------------------------------------------------------------------------------------------------ what is computed


@option_group
class SourceOptions:
    """Where text comes from, how it is decoded, and how it is cut into tokens."""

    typed: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text, one sequence each; several make a batch. - reads stdin.",
            metavar="[TEXT]...",
            show_default=False,
        ),
    ] = None
    text: Annotated[
        list[str] | None,
        option(_TEXT, "A text as it is, even - or the name of a file; repeatable. So are all behind --.", "--text"),
    ] = None
    file: Annotated[
        list[str] | None,
        option(_TEXT, "A text file, one sequence; repeatable. - reads stdin.", "--file", "-f", common=True),
    ] = None
    lines: Annotated[bool, option(_TEXT, "Each non-empty line of a file is a sequence.", "--lines")] = False
    tokenizer: Annotated[
        str | None,
        option(
            _TEXT,
            "word, char, byte, or the path of a tokenizer.json (needs the extra hf). (default: word)",
            autocompletion=lambda: ["word", "char", "byte"],
            common=True,
        ),
    ] = None
    keep_case: Annotated[bool | None, option(_TEXT, "Do not lower-case words.", "--keep-case/--lower-case")] = None
    punctuation: Annotated[
        Punctuation | None, option(_TEXT, "drop marks, or keep each as a token. (default: drop)")
    ] = None
    encoding: Annotated[str, option(_TEXT, "Encoding of files and stdin.")] = "utf-8"
    errors: Annotated[OnBadBytes, option(_TEXT, "What to do with bytes that the encoding does not have.")] = "strict"
    max_bytes: Annotated[
        int | None,
        number(
            _TEXT,
            size("max-bytes"),
            f"Most bytes from one source. (default: {format_size(DEFAULT_MAX_BYTES)}; vocab: 100 MiB)",
            metavar="SIZE",
        ),
    ] = None
    max_token_len: Annotated[
        int,
        number(_TEXT, whole("max-token-len", 1, 10**9), "Most characters in a word."),
    ] = DEFAULT_MAX_TOKEN_LEN


@option_group
class TextOptions:
    """What else a run takes from text: a context, documents, a vocabulary, a length; or random rows instead."""

    context: Annotated[
        list[str] | None,
        option(_TEXT, "Cross-attention: keys and values come from this text; once, or once per sequence."),
    ] = None
    documents: Annotated[
        str | None,
        option(_TEXT, "Cut each text here into documents that see only themselves.", metavar="SEPARATOR"),
    ] = None
    vocab: Annotated[str | None, option(_TEXT, "A vocabulary file; other words become <unk>.", metavar="FILE")] = None
    max_tokens: Annotated[
        int | None,
        number(
            _TEXT,
            whole("max-tokens", 1, MAX_LENGTH),
            f"Take the first N tokens of each sequence. Without it, more than {DEFAULT_MAX_TOKENS} are refused.",
        ),
    ] = None
    random: Annotated[
        str | None, option(_TEXT, "Random rows of this shape instead of text.", metavar="BATCH,LENGTH")
    ] = None
    distribution: Annotated[
        Distribution | None, option(_TEXT, "Of random rows: N(0, 1), or from 0 to 1. (default: normal)")
    ] = None


@option_group
class LayerOptions:
    """The attention layer: its sizes, positions, mask and scores, and its weights."""

    d_model: Annotated[
        int | None, number(_LAYER, integer("d_model", 1, MAX_WIDTH), "Width of the model. (default: 64)", common=True)
    ] = None
    heads: Annotated[
        int | None, number(_LAYER, integer("n_heads", 1, MAX_HEADS), "Query heads. (default: 4)", common=True)
    ] = None
    kv_heads: Annotated[
        int | None,
        number(
            _LAYER,
            integer("n_kv_heads", 1, MAX_HEADS),
            "Key and value heads, shared by groups of query heads. (default: heads)",
        ),
    ] = None
    d_head: Annotated[
        int | None,
        number(
            _LAYER,
            integer("d_head", 1, MAX_WIDTH),
            "Width of queries and keys per head. (default: d_model / heads)",
        ),
    ] = None
    d_v: Annotated[
        int | None, number(_LAYER, integer("d_v", 1, MAX_WIDTH), "Width of values per head. (default: d_head)")
    ] = None
    d_input: Annotated[
        int | None,
        number(_LAYER, integer("d_input", 1, MAX_WIDTH), "Width of the rows that are projected. (default: d_model)"),
    ] = None
    bias: Annotated[bool | None, option(_LAYER, "Projections add a bias. (default: bias)", "--bias/--no-bias")] = None
    no_out_proj: Annotated[bool, option(_LAYER, "No output projection: the heads side by side.", "--no-out-proj")] = (
        False
    )
    dropout: Annotated[
        float | None,
        number(_LAYER, real("dropout"), "Dropout on the pattern; acts only with --train. (default: 0)", metavar="P"),
    ] = None
    train: Annotated[bool, option(_LAYER, "Apply dropout, and show the pattern before and after.", "--train")] = False
    init: Annotated[Init | None, option(_LAYER, "How random weights are drawn. (default: xavier)")] = None
    seed: Annotated[int | None, seed_option(_LAYER, "Seed of everything random. (default: 0)")] = None
    weights: Annotated[str | None, option(_LAYER, "Weights from a safetensors file instead.", metavar="FILE")] = None
    allow_nonfinite: Annotated[
        bool, option(_LAYER, "Look at NaN and Inf instead of stopping.", "--allow-nonfinite")
    ] = False
    positions: Annotated[
        Positions | None,
        option(_POSITIONS, "How tokens know their place. (default: sinusoidal; with --random: none)", common=True),
    ] = None
    rope_theta: Annotated[
        float | None,
        number(_POSITIONS, real("rope_theta"), "Base of the rotary angles. (default: 10000)", metavar="X"),
    ] = None
    max_positions: Annotated[
        int | None,
        number(
            _POSITIONS,
            integer("max_positions", 1, 16 * MAX_WIDTH),
            "Rows in the table of learned positions. (default: 1024)",
        ),
    ] = None
    causal: Annotated[bool | None, option(_MASK, "No token sees a later one.", "--causal/--no-causal", common=True)] = (
        None
    )
    window: Annotated[
        str | None,
        option(
            _MASK,
            "Only keys so far left and right of the query; none takes a saved one off. (default of RIGHT: 0)",
            metavar="LEFT[,RIGHT]",
        ),
    ] = None
    prefix: Annotated[
        int | None,
        number(_MASK, integer("prefix", 1, MAX_LENGTH), "All see the first N tokens, the others causally; 0 for none."),
    ] = None
    sink: Annotated[
        int | None,
        number(_MASK, integer("sink", 1, MAX_LENGTH), "The first N tokens stay visible outside --window; 0 for none."),
    ] = None
    padding: Annotated[
        PaddingSide | None, option(_MASK, "The side on which shorter sequences are filled up. (default: right)")
    ] = None
    scale: Annotated[
        float | None, number(_MASK, real("scale"), "Factor on the dot products. (default: 1/√d_head)", metavar="X")
    ] = None
    softcap: Annotated[
        float | None, number(_MASK, real("softcap"), "Bend scores into ±X with a tanh.", metavar="X")
    ] = None
    score_bias: Annotated[
        str | None,
        option(_MASK, "Add a tensor of a safetensors file to the scores.", metavar="FILE[:TENSOR]"),
    ] = None


@option_group
class DeviceOptions:
    """Where and how it is computed, and how often it is timed."""

    device: Annotated[
        str | None,
        device_option(_DEVICE, "auto, cpu, cuda, cuda:N or mps. (default: auto)"),
    ] = None
    dtype: Annotated[Dtype | None, option(_DEVICE, "Number format. (default: float32)")] = None
    threads: Annotated[
        int | None, number(_DEVICE, integer("threads", 1, MAX_THREADS), "CPU threads. (default: torch's choice)")
    ] = None
    repeat: Annotated[
        int | None,
        number(_DEVICE, whole("repeat", 1, 100_000), "Timed runs after the first. (default: 5, fewer if slow)"),
    ] = None


# --------------------------------------------------------------------------------------------------- what is shown


@option_group
class DrawingOptions:
    """What is drawn of a record."""

    view: Annotated[View, option(VIEW, "How each head is drawn.", common=True)] = "matrix"
    head: HeadList = None
    sequence: Annotated[
        str | None, option(VIEW, "Sequences to draw, such as 0,2. (default: all that fit)", metavar="LIST")
    ] = None
    top: Annotated[int, number(VIEW, whole("top", 1, 1000), "Keys per query in --view top.", metavar="K")] = 3
    precision: Precision = 2
    all: Annotated[bool, option(VIEW, "Hide nothing: every row, column, head and sequence.", "--all")] = False


@option_group
class HeadsViewOptions:
    """How the overview of many heads is ordered, and which maps stand below it."""

    map: Annotated[
        str | None, option(VIEW, "Draw the pooled map of these heads, such as 3 or 0-3.", metavar="LIST", common=True)
    ] = None
    sort: Annotated[
        str,
        option(
            VIEW,
            "Order of heads, such as entropy or sink: the largest first, with :up the smallest.",
            metavar="NAME[:up]",
            autocompletion=lambda: list(SORTS),
        ),
    ] = "head"


@option_group
class ColourOptions:
    """Colour."""

    color: Annotated[
        ColourChoice,
        option(OUTPUT, "Colour; auto obeys NO_COLOR, FORCE_COLOR and whether stdout is a terminal."),
    ] = "auto"


@option_group
class SaveOptions:
    """Files to write, and what to keep in them."""

    save: SaveRecord = None
    save_weights: Annotated[str | None, option(OUTPUT, "Save the weights.", metavar="FILE")] = None
    force: Force = False
    keep: Annotated[
        str | None,
        option(
            OUTPUT,
            "Arrays to keep in the record, such as pattern,z. (default: qk,scores,pattern,z,out as far as they fit)",
            metavar="SITES",
        ),
    ] = None
    keep_limit: Annotated[
        int,
        number(
            OUTPUT,
            size("keep-limit"),
            f"Most bytes of arrays to keep. (default: {format_size(DEFAULT_KEEP_LIMIT)})",
            metavar="SIZE",
            show_default=False,
        ),
    ] = DEFAULT_KEEP_LIMIT

    @property
    def files(self) -> tuple[tuple[str, str | None], ...]:
        """The files that are written, each with its option."""
        return ("save", self.save), ("save-weights", self.save_weights)
