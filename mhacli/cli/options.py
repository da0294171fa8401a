"""Options shared by commands, in groups: one group, one panel of the help.

A command takes groups as parameters (`def run(text: TextOptions, layer: LayerOptions)`), and `command` spreads their
fields, and those of groups in them, into the signature that Typer reads. None means "not given", so that a weights file can
decide. The groups of output options are in `mhacli.cli.output`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import typer

from mhacli.cli.numbers import Integer, Real
from mhacli.cli.values import size
from mhacli.io.files import format_size
from mhacli.record.heads import SORTS
from mhacli.render.base.options import Scale, View
from mhacli.settings import (
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
    """A dataclass of options, frozen for type checkers only: generating the methods of a frozen dataclass slows every start."""
    return dataclass(repr=False, kw_only=True)(group)


def offers(*names: str, **texts: str) -> Mapping[str, str | None]:
    """The options of a group that a command has, by the names of its fields: `Annotated[Group, offers("save", csv="Print …")]`.
    Those with a text have it as help."""
    return dict.fromkeys(names) | texts


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the fields of its option groups as separate parameters, for Typer to read."""
    groups = {name: kind for name, kind in get_type_hints(function, include_extras=True).items() if name != "return"}

    @wraps(function)
    def spread(**values: Any) -> None:
        function(**{name: _filled(kind, values) for name, kind in groups.items()})

    parameters = [parameter for kind in groups.values() for parameter in _parameters(kind)]
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread.common_options = frozenset(filter(None, map(_common_name, parameters)))  # type: ignore[attr-defined]
    return spread


def _common_name(parameter: inspect.Parameter) -> str | None:
    """The parameter's name if the short help lists it, otherwise None."""
    declared = getattr(parameter.annotation, "__metadata__", ())
    return parameter.name if any(getattr(info, "common", False) for info in declared) else None


def _group_of(hint: Any) -> tuple[Any, Mapping[str, str | None] | None]:
    """A group, and the options of it that a command has; None for all."""
    return (get_args(hint)[0], get_args(hint)[1]) if get_origin(hint) is Annotated else (hint, None)


def _parameters(hint: Any) -> Iterator[inspect.Parameter]:
    group, offered = _group_of(hint)
    hints = get_type_hints(group, include_extras=True)
    for f in fields(group):
        if is_dataclass(hints[f.name]):
            yield from _parameters(hints[f.name])
        elif offered is None or f.name in offered:
            annotation = hints[f.name]
            if offered is not None and offered[f.name] is not None:
                kind, declared = get_args(annotation)
                declared = copy(declared)
                declared.help, annotation = offered[f.name], Annotated[kind, declared]
            yield inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=annotation)


def _filled(hint: Any, values: Mapping[str, Any]) -> Any:
    group, offered = _group_of(hint)
    hints = get_type_hints(group)
    given: dict[str, Any] = {}
    for f in fields(group):
        if is_dataclass(hints[f.name]):
            given[f.name] = _filled(hints[f.name], values)
        elif offered is None or f.name in offered:
            given[f.name] = values[f.name]
    return group(**given)


_TEXT, _LAYER, _POSITIONS, _MASK = "Text", "Attention", "Positions", "Mask and scores"
DEVICE, VIEW, OUTPUT = "Device", "View", "Output"


def option(panel: str, text: str, *names: str, common: bool = False, **how: Any) -> Any:
    """An option in a panel of the help; a `common` one is in the short help too."""
    declared = typer.Option(*names, help=text, rich_help_panel=panel, **how)
    declared.common = common
    return declared


def number(panel: str, kind: Integer | Real, text: str, *names: str, metavar: str = "N", **how: Any) -> Any:
    """An option whose value is a number."""
    return option(panel, text, *names, click_type=kind, metavar=metavar, **how)


# ----------------------------------------------------------------------------------------- options of several commands

MASKED_LATER = "Mask later tokens: no token attends to a later one."
HEADS = ("--heads", "--n-heads", "--num-heads", "--num-attention-heads")
QUERY_HEADS = "Number of query heads."
KV_HEADS = ("--kv-heads", "--n-kv-heads", "--num-kv-heads", "--num-key-value-heads")
GROUPS = "Number of key/value heads; query heads share them in groups."
D_HEAD = ("--d-head", "--head-dim", "--d-k")
HEAD_WIDTH = "Width of the queries and keys of a head."
CAUSAL = ("--causal/--no-causal", "--is-causal/--bidirectional")
MAX_TOKENS, TOP = ("--max-tokens", "--max-length"), ("--top", "--top-k")
"""Names of options; the help shows the first."""
SCALE = "Factor on the dot products. (default: 1/√d_head)"
ARG = "Argument of the constructor, such as d_model=64 or config.n_head=4; repeatable. (default: guessed)"
CALL_ARG = "Argument of every call, such as start_pos=0; repeatable."
TIME_LIMIT = "Seconds that an import or a call may take; with more, check tries more pairs of mistakes."
NUMBER_FORMAT = "Number format of the computation."
LITERAL_TEXT = "Inspect this text, even if a file has that name; repeatable. Arguments after -- are also texts."
HIDE_SINKS = "Leave out sinks, and rescale each row to sum to 1."
_ONLY_HEADS, _ONLY_SEQUENCES = "Show only these heads, such as 0,2 or 0-3.", "Show only these sequences, such as 0,2."


def head_list(default: str = "all that fit") -> Any:
    """`--head` of commands that take several heads; `default` describes those shown without it."""
    return option(VIEW, f"{_ONLY_HEADS} (default: {default})", metavar="LIST", common=True)


def sequence_list(default: str = "all that fit") -> Any:
    """`--sequence` of commands that take several sequences; `default` describes those shown without it."""
    return option(VIEW, f"{_ONLY_SEQUENCES} (default: {default})", metavar="LIST")


def seed_option(panel: str, default: str = "") -> Any:
    """`--seed`; `default` is the text about its default if the command does not set one."""
    return number(panel, Integer(0, MAX_SEED), f"Seed of random numbers.{default}")


def device_option(panel: str, default: str = "", **how: Any) -> Any:
    """`--device`, with completion; `default` is the text about a default that depends on other options."""
    text = f"Device: auto, cpu, cuda, cuda:N or mps.{default}"
    return option(panel, text, autocompletion=lambda: ["auto", "cpu", "cuda", "mps"], **how)


def threads_option(panel: str) -> Any:
    """`--threads`."""
    return number(panel, Integer(1, MAX_THREADS), "Number of CPU threads. (default: chosen by torch)")


def repeat_option(panel: str, default: str) -> Any:
    """`--repeat`."""
    return number(panel, Integer(1, 100_000), f"Number of timed runs. (default: {default})")


HeadList = Annotated[str | None, head_list()]
Everything = Annotated[bool, option(VIEW, "Show everything; leave out no row, column, head or layer.", "--all")]
Precision = Annotated[int, number(VIEW, Integer(1, 9), "Decimals of attention weights.", "--precision", "--decimals")]
Revision = Annotated[
    str | None, option("Checkpoint", "Branch, tag or commit of a Hugging Face checkpoint.", metavar="NAME")
]
MAP_SCALE = "Colour scale of attention weights. (default: linear, log for long texts)"
MapScale = Annotated[Scale | None, option(VIEW, MAP_SCALE)]
ModelPath = Annotated[
    str | None,
    option(
        "Checkpoint",
        "Use this checkpoint: a folder, or a Hugging Face id such as org/name (needs the extra hf).",
        "--model",
        "--checkpoint",
        metavar="DIR",
        common=True,
    ),
]


# ------------------------------------------------------------------------------------------------ what is computed


@option_group
class SourceOptions:
    """The source of the text, its decoding and its tokenizer."""

    typed: Annotated[
        list[str] | None,
        typer.Argument(
            help="The text to inspect, or - for stdin; several texts form a batch.",
            metavar="[TEXT]...",
            show_default=False,
        ),
    ] = None
    text: Annotated[
        list[str] | None,
        option(_TEXT, LITERAL_TEXT, "--text"),
    ] = None
    file: Annotated[
        list[str] | None,
        option(_TEXT, "Read a text file; repeatable, and - reads stdin.", "--file", "-f", metavar="FILE", common=True),
    ] = None
    lines: Annotated[bool, option(_TEXT, "Treat each line of a file as a sequence.", "--lines")] = False
    tokenizer: Annotated[
        str | None,
        option(
            _TEXT,
            "word, char, byte, or the path of a tokenizer.json (needs the extra hf). (default: word; with --model, its own)",
            autocompletion=lambda: ["word", "char", "byte"],
            common=True,
        ),
    ] = None
    keep_case: Annotated[
        bool | None,
        option(_TEXT, "Keep capital letters. (default: --lower-case)", "--keep-case/--lower-case"),
    ] = None
    punctuation: Annotated[
        Punctuation | None, option(_TEXT, "Drop punctuation, or keep each mark as a token. (default: drop)")
    ] = None
    encoding: Annotated[str, option(_TEXT, "Encoding of files and stdin.", metavar="NAME")] = "utf-8"
    errors: Annotated[OnBadBytes, option(_TEXT, "How to treat bytes that are invalid in the encoding.")] = "strict"
    max_bytes: Annotated[
        int | None,
        option(
            _TEXT,
            f"Refuse larger texts. (default: {format_size(DEFAULT_MAX_BYTES)}; vocab: 100 MiB)",
            parser=size("max-bytes"),
            metavar="SIZE",
        ),
    ] = None
    max_token_len: Annotated[
        int,
        number(_TEXT, Integer(1, 10**9), "Refuse words of more than N characters."),
    ] = DEFAULT_MAX_TOKEN_LEN


ContextTexts = Annotated[
    list[str] | None,
    option(_TEXT, "Text for the keys and values (cross-attention): one for all sequences, or one for each."),
]
MaxTokens = Annotated[
    int | None,
    number(
        _TEXT,
        Integer(1, MAX_LENGTH),
        f"Use only the first N tokens of each sequence. (default: all, at most {DEFAULT_MAX_TOKENS:,})",
        *MAX_TOKENS,
    ),
]


@option_group
class TextOptions:
    """Further inputs of a run: a context, documents, a vocabulary, a limit of tokens; or random vectors instead of text."""

    context: ContextTexts = None
    documents: Annotated[
        str | None,
        option(
            _TEXT, "Split each text at SEPARATOR into documents that do not attend to each other.", metavar="SEPARATOR"
        ),
    ] = None
    vocab: Annotated[str | None, option(_TEXT, "Read the vocabulary from a file.", metavar="FILE")] = None
    max_tokens: MaxTokens = None
    random: Annotated[
        str | None, option(_TEXT, "Use random token vectors instead of a text.", metavar="BATCH,LENGTH")
    ] = None
    distribution: Annotated[
        Distribution | None,
        option(_TEXT, "Distribution of --random: N(0, 1), or uniform from 0 to 1. (default: normal)"),
    ] = None


@option_group
class LayerOptions:
    """The attention layer: its sizes, positions, mask and scores, and its weights."""

    d_model: Annotated[
        int | None,
        number(
            _LAYER,
            Integer(1, MAX_WIDTH),
            "Width of the model. (default: 64)",
            "--d-model",
            "--hidden-size",
            "--embed-dim",
            "--n-embd",
            common=True,
        ),
    ] = None
    heads: Annotated[
        int | None, number(_LAYER, Integer(1, MAX_HEADS), f"{QUERY_HEADS} (default: 4)", *HEADS, common=True)
    ] = None
    kv_heads: Annotated[
        int | None,
        number(
            _LAYER,
            Integer(1, MAX_HEADS),
            f"{GROUPS} (default: heads)",
            *KV_HEADS,
        ),
    ] = None
    d_head: Annotated[
        int | None,
        number(
            _LAYER,
            Integer(1, MAX_WIDTH),
            f"{HEAD_WIDTH} (default: d_model / heads)",
            *D_HEAD,
        ),
    ] = None
    d_v: Annotated[
        int | None, number(_LAYER, Integer(1, MAX_WIDTH), "Width of the values of a head. (default: d_head)")
    ] = None
    d_input: Annotated[
        int | None,
        number(_LAYER, Integer(1, MAX_WIDTH), "Width of the token vectors before projection. (default: d_model)"),
    ] = None
    bias: Annotated[
        bool | None, option(_LAYER, "Add a bias in the projections. (default: --bias)", "--bias/--no-bias")
    ] = None
    no_out_proj: Annotated[
        bool, option(_LAYER, "Leave out the output projection: concatenate the heads.", "--no-out-proj")
    ] = False
    dropout: Annotated[
        float | None,
        number(
            _LAYER,
            Real(0, below=1),
            "Dropout probability of attention weights, with --train. (default: 0)",
            metavar="P",
        ),
    ] = None
    train: Annotated[bool, option(_LAYER, "Apply dropout; show the pattern before and after.", "--train")] = False
    init: Annotated[Init | None, option(_LAYER, "Initialisation of the random weights. (default: xavier)")] = None
    seed: Annotated[int | None, seed_option(_LAYER, " (default: 0)")] = None
    weights: Annotated[str | None, option(_LAYER, "Load the weights from a safetensors file.", metavar="FILE")] = None
    allow_nonfinite: Annotated[
        bool, option(_LAYER, "Continue even if numbers are NaN or Inf.", "--allow-nonfinite")
    ] = False
    positions: Annotated[
        Positions | None,
        option(_POSITIONS, "Position encoding. (default: sinusoidal; with --random, none)", common=True),
    ] = None
    rope_theta: Annotated[
        float | None,
        number(_POSITIONS, Real(above=0), "Base of the RoPE angles. (default: 10000)", metavar="X"),
    ] = None
    max_positions: Annotated[
        int | None,
        number(
            _POSITIONS,
            Integer(1, 16 * MAX_WIDTH),
            "Number of learned positions. (default: 1024)",
        ),
    ] = None
    causal: Annotated[bool | None, option(_MASK, MASKED_LATER, *CAUSAL, common=True)] = None
    window: Annotated[
        str | None,
        option(
            _MASK,
            "Attend only to LEFT keys before and RIGHT keys after the query; none removes a saved window. (default of RIGHT: 0)",
            "--window",
            "--sliding-window",
            metavar="LEFT[,RIGHT]",
        ),
    ] = None
    prefix: Annotated[
        int | None,
        number(
            _MASK,
            Integer(0, MAX_LENGTH),
            "Causal, but every token attends to the first N; 0 for none.",
        ),
    ] = None
    sink: Annotated[
        int | None,
        number(
            _MASK,
            Integer(0, MAX_LENGTH),
            "The first N tokens stay visible outside --window; 0 for none.",
            "--sink-window",
            "--sink",
        ),
    ] = None
    padding: Annotated[
        PaddingSide | None, option(_MASK, "Side on which shorter sequences are padded. (default: right)")
    ] = None
    scale: Annotated[float | None, number(_MASK, Real(), SCALE, metavar="X")] = None
    softcap: Annotated[float | None, number(_MASK, Real(above=0), "Limit scores to ±X with a tanh.", metavar="X")] = (
        None
    )
    score_bias: Annotated[
        str | None,
        option(_MASK, "Add a tensor from a safetensors file to the scores.", metavar="FILE[:TENSOR]"),
    ] = None


@option_group
class DeviceOptions:
    """Device, dtype and threads of the computation, and the number of timed runs."""

    device: Annotated[
        str | None,
        device_option(DEVICE, " (default: auto)"),
    ] = None
    dtype: Annotated[Dtype | None, option(DEVICE, f"{NUMBER_FORMAT} (default: float32; with --model, its own)")] = None
    threads: Annotated[int | None, threads_option(DEVICE)] = None
    repeat: Annotated[int | None, repeat_option(DEVICE, "5, fewer if slow")] = None


# --------------------------------------------------------------------------------------------------- what is shown


@option_group
class DrawingOptions:
    """How a record is drawn."""

    view: Annotated[View, option(VIEW, "How to draw each head.", common=True)] = "auto"
    head: HeadList = None
    sequence: Annotated[str | None, sequence_list()] = None
    top: Annotated[int, number(VIEW, Integer(1, 1000), "Keys per query, with --view top.", *TOP, metavar="K")] = 3
    precision: Precision = 2
    all: Everything = False


VERBOSE = "Print every table, column and detail."
ShowTokens = Annotated[bool, option(VIEW, "Print the tokens with their ids.", "--tokens")]
Brief = Annotated[bool, option(VIEW, "Print one line per head.", "--brief")]


@option_group
class SectionOptions:
    """Which tables are printed beside the patterns."""

    tokens: ShowTokens = False
    shapes: Annotated[bool, option(VIEW, "Print the shape of every step.", "--shapes")] = False
    timings: Annotated[bool, option(VIEW, "Print the time of every step.", "--timings")] = False
    verbose: Annotated[bool, option(VIEW, VERBOSE, "--verbose")] = False
    brief: Brief = False


@option_group
class HeadsViewOptions:
    """The order of the overview of heads, and the maps below it."""

    map: Annotated[
        str | None, option(VIEW, "Draw a map of these heads, such as 3 or 0-3.", metavar="LIST", common=True)
    ] = None
    sort: Annotated[
        str,
        option(
            VIEW,
            "Order the heads by a statistic, such as entropy: largest first, or with :up smallest first.",
            metavar="NAME[:up]",
            autocompletion=lambda: list(SORTS),
        ),
    ] = "head"
