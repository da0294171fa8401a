"""The settings of mha, each declared once: name, type, default, range, help, other names, and the
modes that have it.

`setting` declares a field of a dataclass. The command line, the checks of ranges and the messages
read the declaration, so that a new option is one line. A mode is what a command inspects: a `layer`
of mha, a checkpoint (`model`), `code` of the user's own, or a saved `record`.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import ge, gt, le, lt
from typing import Annotated, Any, Literal, get_args, get_type_hints

from mhacli.conditions import INDUCTION, Condition, parse_condition
from mhacli.errors import UsageError
from mhacli.io.data import DeviceMap, read_device_map

Positions = Literal["sinusoidal", "learned", "rope", "rope-interleaved", "alibi", "none"]
LayerPositions = Literal["none", "rope", "rope-interleaved", "alibi"]
PaddingSide = Literal["left", "right"]
Init = Literal["xavier", "normal", "uniform"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Mode = Literal["layer", "model", "code", "record"]

MAX_HEADS = 1024
MAX_WIDTH = 65_536
MAX_SECONDS = 86_400
"""The longest time that an option takes: a day."""
MAX_LENGTH = 10**9
"""The most tokens that an option may state. The real limit is memory."""
MAX_RANDOM = 1 << 20
"""The most random sequences, and the most vectors in one."""
ARRAYS = "Arrays of other programs"
AXES = "Names of the axes of weights, such as layer,head,query,key."
"""The group and the help of an option of two commands."""
ROPE = ("rope", "rope-interleaved")
DEFAULT_MAX_BYTES = 64 << 20
"""The most bytes of text from one source."""
DEFAULT_MAX_TOKENS = 32_768
"""The most tokens in a sequence by default."""
DEFAULT_MAX_TOKEN_LEN = 1000
"""The most characters in a word."""
DEFAULT_KEEP_LIMIT = 512 << 20
"""The most bytes of arrays in a record."""
ITEM_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


# -------------------------------------------------------------------------------------- declaration


@dataclass(frozen=True, slots=True)
class Option:
    """How a setting stands on the command line.

    `names` are all its names; none means `--` and the name of the field. Numbers lie from `low` to
    `high`; `above` and `below` are bounds that are not included. `parse` makes the value of the
    word, or raises `ValueError` with what is wrong. `modes` are those that have the option. It
    changes nothing without one of the settings that it `needs`, and `excludes` others; both are
    names of fields. It is `idle` without one of these fields, or fields with a value (`view=top`):
    a line says so, and the command goes on. A `common` option is in the short help too. `default`
    is the text about the default, None for the value itself. `words` complete a value. An
    `argument` has no name. `many` can be repeated.
    """

    panel: str
    help: str
    names: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    modes: tuple[Mode, ...] = get_args(Mode)
    needs: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    common: bool = False
    hidden: bool = False
    default: str | None = None
    words: tuple[str, ...] = ()
    argument: bool = False
    many: bool = False

    @property
    def is_number(self) -> bool:
        """Whether the value is a number in a range."""
        return self.low is not None or self.above is not None

    @property
    def range_text(self) -> str:
        """The range as Typer writes it: `1<=x<=1024`, `0<x`."""
        if self.low == -math.inf:
            return "of finite numbers"
        lower = f"{self.low}<=" if self.above is None else f"{self.above:g}<"
        upper = "" if self.high is None else f"<={self.high}"
        return f"{lower}x{upper}" if self.below is None else f"{lower}x<{self.below}"

    def contains(self, value: float) -> bool:
        """Whether a number is finite and in the range."""
        bounds = (self.low, ge), (self.high, le), (self.above, gt), (self.below, lt)
        return math.isfinite(value) and all(
            bound is None or holds(value, bound) for bound, holds in bounds
        )

    def name(self, field_name: str, *, is_off: bool = False) -> str:
        """The first name, such as `--heads`, or the one that switches off, such as `--no-bias`."""
        if self.argument and self.metavar is not None:
            return self.metavar.strip("[].")
        first = next(
            (name for name in self.names if name.startswith("--")),
            "--" + field_name.replace("_", "-"),
        )
        on, _, off = first.partition("/")
        return (off or f"--no-{on[2:]}") if is_off else on


def setting(value: Any, panel: str, text: str, *names: str, **how: Any) -> Any:
    """A field with the default `value` that is an option of the command line; see `Option` for
    `how`. One with the default `()` and without `parse` can be repeated.
    """
    how.setdefault("many", value == () and "parse" not in how)
    return field(
        default=value,
        metadata={"option": Option(panel, text, tuple(" ".join(names).split()), **how)},
    )


def options_of(group: type) -> Iterator[tuple[str, Option]]:
    """The options that the fields of a dataclass declare, by the name of the field."""
    return ((f.name, f.metadata["option"]) for f in fields(group) if "option" in f.metadata)


def like(group: type, name: str, panel: str, **changes: Any) -> Any:
    """A field of another group that is declared as the field `name` of a group, in a panel, with
    changes of its default (`value`) and of `Option`.
    """
    declared = next(f for f in fields(group) if f.name == name)
    value = changes.pop("value", declared.default)
    return field(
        default=value,
        metadata={"option": replace(declared.metadata["option"], panel=panel, **changes)},
    )


def as_option(name: str, value: object, group: type | None = None) -> str:
    """A setting, of the layer or another group, as the user types it: `--heads 5`, `--no-bias`."""
    option = dict(options_of(group or Config))[name].name(name, is_off=value is False)
    word = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return option if isinstance(value, bool) else f"{option} {shlex.quote(word[:60])}"


def index_list(word: str) -> tuple[int, ...]:
    """Positions from `0,2` or `0,4-6`. Raises `ValueError` with the form."""
    indices: list[int] = []
    for part in word.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not low <= high < low + _MAX_LISTED - len(indices):
            raise ValueError(f"{word[:80]!r} is not a list such as 0,2 or 0,4-6")
        indices.extend(range(low, high + 1))
    return tuple(indices)


_MAX_LISTED = 100_000


def head_list(word: str) -> tuple[int, ...]:
    """Heads of chosen layers from `0,2-3`. Raises `ValueError` with the form, and for a head with
    its layer, as screens name it, with the options of both.
    """
    match = re.fullmatch(r"(?:(encoder|decoder|cross)[. ])?([0-9]+)\.([0-9]+)", word.strip())
    if match:
        layer = f"{match[1]}.{match[2]}" if match[1] else match[2]
        raise ValueError(f"{word[:80]!r} names a layer too: --layer {layer} --head {match[3]}")
    return index_list(word)


def query_list(word: str) -> tuple[int, ...]:
    """Queries from `0,4-6`, or -1 for the last one, `last`. Raises `ValueError` with the form."""
    return (-1,) if word in ("last", "-1") else index_list(word)


def example_call(word: str) -> str:
    """The word, if it is a `lambda` of a target, or of a target and a length. Raises `ValueError`
    with the form.
    """
    try:
        body = ast.parse(word.strip(), mode="eval").body
    except SyntaxError as fault:
        raise ValueError(f"{word[:80]!r} is no Python: {fault.msg}") from None
    if not isinstance(body, ast.Lambda) or len(body.args.args) not in (1, 2):
        raise ValueError(f"{word[:80]!r} is not of the form lambda m, T: m(torch.randn(2, T, 64))")
    return word


def numbers(form: str, example: str) -> Callable[[str], tuple[int, ...]]:
    """A function that takes as many whole numbers as a form such as `BATCH,LENGTH` names; `example`
    is such a word. One in brackets, as in `LEFT[,RIGHT]`, may be left out, and is 0 then.
    """
    pattern = re.sub("[A-Z]+", "([0-9]{1,9})", form.replace("[", "(?:").replace("]", ")?"))

    def parse(word: str) -> tuple[int, ...]:
        match = re.fullmatch(pattern, word.replace(" ", ""))
        if match is None:
            raise ValueError(f"{word[:80]!r} is not {form} such as {example}")
        return tuple(int(digits or 0) for digits in match.groups())

    return parse


def _reach(word: str) -> tuple[int, ...] | None:
    """Numbers of keys from `LEFT[,RIGHT]`. `none` is no window."""
    return None if word == "none" else numbers("LEFT[,RIGHT]", "4 or 2,2")(word)


# ---------------------------------------------------------------------------------------- the layer

TEXT = "Text"
LAYER = "Attention"
POSITIONS = "Positions"
MASK = "Mask and scores"
DEVICE = "Device"
TOP = "--top --top-k"
"""Names of an option; the help shows the first."""
TOKENIZER = "word, char, byte, or the path of a tokenizer.json (needs the extra hf)."
TOKENIZERS = ("word", "char", "byte")
_TEXT_ONLY = (
    "typed",
    "text",
    "file",
    "tokenizer",
    "vocab",
    "max_tokens",
    "lines",
    "context",
    "documents",
)
_VECTORS = numbers("BATCH,LENGTH", "2,5")
_layer = partial(setting, modes=("layer",))
_run = partial(setting, modes=("layer", "model"))


@dataclass(frozen=True)
class Config:
    """The choices for one attention layer and its run.

    Widths are counts of numbers. `None` means "derive it": `n_kv_heads` from `n_heads`, `d_head`
    from `d_model / n_heads`, `d_v` from `d_head`, `d_input` from `d_model`, `scale` as `d_head **
    -0.5`, `threads` as torch chooses. `resolved()` fills these in and checks every rule; code that
    computes takes a resolved config.

    `window` is the number of keys (left, right) around the query. The first `prefix` tokens are
    visible to all queries, whatever the window; the rest is causal. The first `sink` tokens stay
    visible outside the window. `documents` is the separator of documents that cannot see each
    other. `softcap` is the bound `c` of `c · tanh(score / c)`, `score_bias` the file of an additive
    bias, `dropout` a probability that applies only with `train`. `random` (batch, length) takes
    random vectors of `distribution` instead of text. `max_positions` is the length of the table of
    learned positions, and `padding` the side on which shorter sequences are padded.
    """

    d_model: int = _layer(
        64,
        LAYER,
        "Width of the model.",
        "--d-model --hidden-size --embed-dim --n-embd",
        low=1,
        high=MAX_WIDTH,
        common=True,
    )
    n_heads: int = _layer(
        4,
        LAYER,
        "Number of query heads.",
        "--heads --n-heads --num-heads --num-attention-heads",
        low=1,
        high=MAX_HEADS,
        common=True,
    )
    n_kv_heads: int | None = _layer(
        None,
        LAYER,
        "Number of key/value heads; query heads share them in groups.",
        "--kv-heads --n-kv-heads --num-kv-heads --num-key-value-heads",
        low=1,
        high=MAX_HEADS,
        default="heads",
    )
    d_head: int | None = _layer(
        None,
        LAYER,
        "Width of the queries and keys of a head.",
        "--d-head --head-dim --d-k",
        low=1,
        high=MAX_WIDTH,
        default="d_model / heads",
    )
    d_v: int | None = _layer(
        None, LAYER, "Width of the values of a head.", low=1, high=MAX_WIDTH, default="d_head"
    )
    d_input: int | None = _layer(
        None,
        LAYER,
        "Width of the token vectors before projection.",
        low=1,
        high=MAX_WIDTH,
        default="d_model",
    )
    bias: bool = _layer(
        True, LAYER, "Add a bias in the projections.", "--bias/--no-bias", default="--bias"
    )
    out_proj: bool = _layer(
        True,
        LAYER,
        "Apply the output projection, or only concatenate the heads.",
        "--out-proj/--no-out-proj",
        default="--out-proj",
    )
    positions: Positions = _layer(
        "sinusoidal",
        POSITIONS,
        "Position encoding.",
        default="sinusoidal; with --random, none",
        common=True,
    )
    rope_theta: float = _layer(
        1e4, POSITIONS, "Base of the RoPE angles.", above=0, metavar="X", default="10000"
    )
    max_positions: int = _layer(
        1024, POSITIONS, "Number of learned positions.", low=1, high=16 * MAX_WIDTH
    )
    causal: bool = setting(
        False,
        MASK,
        "Mask later tokens: no token attends to a later one.",
        "--causal/--no-causal --is-causal/--bidirectional",
        default="",
        common=True,
        modes=("layer", "code"),
    )
    window: tuple[int, int] | None = _layer(
        None,
        MASK,
        "Attend only to LEFT keys before and RIGHT after the query; none removes a saved window."
        " (default of RIGHT: 0)",
        "--window --sliding-window",
        parse=_reach,
        metavar="LEFT[,RIGHT]",
    )
    prefix: int | None = _layer(
        None,
        MASK,
        "Causal, but every token attends to the first N; 0 for none.",
        low=0,
        high=MAX_LENGTH,
    )
    sink: int | None = _layer(
        None,
        MASK,
        "The first N tokens stay visible outside --window; 0 for none.",
        "--sink-window --sink",
        low=0,
        high=MAX_LENGTH,
    )
    documents: str | None = _layer(
        None,
        TEXT,
        "Split each text at SEPARATOR into documents that do not attend to each other.",
        metavar="SEPARATOR",
    )
    padding: PaddingSide = _run("right", MASK, "Side on which shorter sequences are padded.")
    scale: float | None = _layer(
        None, MASK, "Factor on the dot products.", low=-math.inf, metavar="X", default="1/√d_head"
    )
    softcap: float | None = _layer(
        None, MASK, "Limit scores to ±X with a tanh.", above=0, metavar="X"
    )
    score_bias: str | None = _layer(
        None, MASK, "Add a tensor from a safetensors file to the scores.", metavar="FILE[:TENSOR]"
    )
    dropout: float = _layer(
        0.0,
        LAYER,
        "Dropout probability of attention weights, with --train.",
        low=0,
        below=1,
        metavar="P",
        default="0",
        idle=("train",),
    )
    train: bool = _layer(
        False, LAYER, "Apply dropout; show the pattern before and after.", "--train", default=""
    )
    init: Init = _layer(
        "xavier", LAYER, "Initialisation of the random weights.", excludes=("weights",)
    )
    dtype: Dtype = _run(
        "float32",
        DEVICE,
        "Number format of the computation.",
        default="float32; with --model, its own",
    )
    device: str = setting(
        "auto",
        DEVICE,
        "Device: auto, cpu, cuda, cuda:N or mps.",
        words=("auto", "cpu", "cuda", "mps"),
        modes=("layer", "model", "code"),
    )
    threads: int | None = _run(
        None, DEVICE, "Number of CPU threads.", low=1, high=1024, default="chosen by torch"
    )
    seed: int = setting(
        0, LAYER, "Seed of random numbers.", low=0, high=2**64 - 1, modes=("layer", "model", "code")
    )
    tokenizer: str = _run(
        "word",
        TEXT,
        TOKENIZER,
        words=TOKENIZERS,
        default="word; with --model, its own",
        common=True,
    )
    keep_case: bool = _layer(
        False, TEXT, "Keep capital letters.", "--keep-case/--lower-case", default="--lower-case"
    )
    punctuation: Literal["drop", "keep"] = _layer(
        "drop", TEXT, "Drop punctuation, or keep each mark as a token."
    )
    inner_marks: bool = True
    random: tuple[int, int] | None = _layer(
        None,
        TEXT,
        "Use random token vectors instead of a text.",
        parse=_VECTORS,
        metavar="BATCH,LENGTH",
        excludes=_TEXT_ONLY,
    )
    distribution: Literal["normal", "uniform"] = _layer(
        "normal",
        TEXT,
        "Distribution of --random: N(0, 1), or uniform from 0 to 1.",
        needs=("random",),
    )

    @property
    def needs_order(self) -> str | None:
        """The first option that compares the positions of a query and a key, or None."""
        for name in ("causal", "window", "prefix"):
            if getattr(self, name):
                return name
        return f"positions {self.positions}" if self.positions in (*ROPE, "alibi") else None

    @property
    def heads_per_kv_head(self) -> int:
        """The number of query heads per kv head."""
        return self.n_heads // (self.n_kv_heads or self.n_heads)

    @property
    def has_custom_scale(self) -> bool:
        """Whether the scale differs from `d_head ** -0.5`."""
        return (
            self.scale is not None
            and self.d_head is not None
            and abs(self.scale - self.d_head**-0.5) > 1e-12
        )

    @property
    def layer_positions(self) -> LayerPositions:
        """The position scheme inside the layer; `none` for positions that are added before the
        layer.
        """
        return (
            "none"
            if self.positions == "sinusoidal" or self.positions == "learned"
            else self.positions
        )

    def first_column(self, n_tokens: int, length: int) -> int:
        """The index of the first token of `n_tokens` on an axis of `length`: after the padding, if
        padding is on the left.
        """
        return length - n_tokens if self.padding == "left" else 0

    def resolved(self) -> Config:
        """This config with all derived widths filled in. Raises `UsageError` with the broken
        rule.
        """
        require_ranges(self)
        d_head, rest = (
            divmod(self.d_model, self.n_heads) if self.d_head is None else (self.d_head, 0)
        )
        if rest:
            width = min(
                max(1, (self.d_model + self.n_heads // 2) // self.n_heads),
                MAX_WIDTH // self.n_heads,
            )
            nearest = as_option("n_heads", _nearest_divisor(self.d_model, self.n_heads))
            raise UsageError(
                f"{as_option('n_heads', self.n_heads)} does not divide d_model {self.d_model}",
                hint=(
                    f"try {nearest} or {as_option('d_model', width * self.n_heads)}, or set"
                    " --d-head"
                ),
            )
        derived = {
            "d_v": d_head,
            "d_input": self.d_model,
            "n_kv_heads": self.n_heads,
            "scale": d_head**-0.5,
        }
        missing: dict[str, Any] = {
            name: value for name, value in derived.items() if getattr(self, name) is None
        }
        full = replace(
            self, d_head=d_head, prefix=self.prefix or None, sink=self.sink or None, **missing
        )
        _require_rules(full)
        return full


# ---------------------------------------------------------------------------------- rules of values


def require_ranges(settings: Any) -> None:
    """Raises `UsageError` for a field of a group of settings that has another type, is out of its
    range, or not among its choices.
    """
    import msgspec  # not for a help text

    group = type(settings)
    hints = get_type_hints(group, include_extras=True)
    for name, option in options_of(group):
        value, hint = getattr(settings, name), hints[name]
        typed = as_option(name, value, group)
        if value == "":
            raise UsageError(f"{typed} is empty")
        try:
            msgspec.convert(
                float(value) if isinstance(value, float) else value, hint
            )  # a float64 of numpy is a float
        except msgspec.ValidationError as fault:
            raise UsageError(f"{typed}: {fault}") from None
        if option.is_number and value is not None and not option.contains(value):
            raise UsageError(f"{typed} is not in the range {option.range_text}")


def _require_rules(full: Config) -> None:
    """Raises `UsageError` for choices that contradict each other, or that change nothing."""
    n_kv_heads, d_head = full.n_kv_heads or 0, full.d_head or 0
    if full.n_heads % n_kv_heads:
        typed = as_option("n_kv_heads", n_kv_heads)
        nearest = as_option("n_kv_heads", _nearest_divisor(full.n_heads, n_kv_heads))
        raise UsageError(
            f"{typed} does not divide the {full.n_heads} query heads", hint=f"try {nearest}"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?|mps", full.device):
        raise UsageError(
            f"{as_option('device', full.device)} is not one of auto, cpu, cuda, cuda:N, mps"
        )
    if full.train and full.dropout == 0:
        raise UsageError(
            "--train changes nothing without dropout", hint="try --train --dropout 0.1"
        )
    if full.positions in ROPE and d_head % 2:
        raise UsageError(
            (
                f"{as_option('positions', full.positions)} rotates pairs of columns, but d_head"
                f" {d_head} is odd"
            ),
            hint=f"try {as_option('d_head', d_head + 1)}",
        )
    if min(full.window or (0,)) < 0:
        raise UsageError(f"{as_option('window', full.window)} counts fewer than 0 keys")
    if full.sink is not None and full.window is None:
        sink = as_option("sink", full.sink)
        raise UsageError(
            f"{sink} exempts tokens from a window, and there is none", hint=f"try --window 8 {sink}"
        )
    if full.random is not None and not all(1 <= n <= MAX_RANDOM for n in full.random):
        raise UsageError(
            f"{as_option('random', full.random)} is no batch and length in the range"
            f" 1<=x<={MAX_RANDOM}"
        )


def _nearest_divisor(of: int, to: int) -> int:
    """The divisor of `of` nearest to `to`, at most MAX_HEADS. The larger of two equally near
    ones.
    """
    return min(
        (n for n in range(1, min(of, MAX_HEADS) + 1) if of % n == 0),
        key=lambda n: (abs(n - to), -n),
    )


# ----------------------------------------------------------------------- texts, weights, checkpoint

CHECKPOINT = "Checkpoint"
HEADS = "Heads"
OUTPUT = "Output"
OWN_CODE = "Your own attention"
SINK_TOKENS = 4
"""The number of first tokens that `leading` counts together. Source: Xiao et al. 2023,
"StreamingLLM", section 3.2."""
SINK_SHARE = 0.1
"""The least fraction of all attention of a sink, by default."""
FILE = "Read a text file; repeatable, and - reads stdin."
LAYERS = (
    "Inspect only these layers, such as 5 or 0,8-10; in an encoder-decoder also decoder.5 or"
    " cross.5."
)
MODEL = "Use this checkpoint: a folder, or a Hugging Face id such as org/name (needs the extra hf)."
_model = partial(setting, modes=("model",))


_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(word: str) -> int:
    """The number of bytes in a size such as `65536`, `64M` or `1.5GiB`, with powers of 1024. Raises
    `ValueError`.
    """
    match = re.fullmatch(
        r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(?:i?b)?",
        word.strip(),
        re.IGNORECASE | re.ASCII,
    )
    size = int(float(match[1]) * _SIZE_UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise ValueError(
            f"{shlex.quote(word[:40])} is not a size above 0 such as 65536, 64M or 1.5G"
        )
    return size


def encoding_name(word: str) -> str:
    """The name of an encoding of text. Raises `ValueError` for one that Python does not have."""
    try:
        "".encode(word)
    except (LookupError, ValueError):
        raise ValueError(f"{word[:40]!r} is not an encoding of text that Python has") from None
    return word


AttentionKind = Literal["self", "encoder", "decoder", "cross"]
"""The tokens that an attention reads. In an encoder-decoder model: the encoder's, the decoder's
own, or the encoder's from the decoder."""
LayerChoice = tuple[AttentionKind | None, int]
"""The kind (None: any) and number of a layer to inspect."""
LayerChoices = tuple[LayerChoice, ...] | None
"""Layers to inspect; None for all."""


def word_list(*choices: str) -> Callable[[str], tuple[str, ...]]:
    """A function that takes words such as `forward,both`, each among the choices if there are
    any, in letters of any case.
    """

    def parse(word: str) -> tuple[str, ...]:
        chosen = [part.strip() for part in (word.lower() if choices else word).split(",")]
        for part in chosen:
            if choices and part not in choices:
                raise ValueError(f"{part[:40]!r} is not among {', '.join(choices)}")
        return tuple(dict.fromkeys(chosen))

    return parse


def counts(word: str) -> tuple[int, ...]:
    """Positive numbers from `64,256,1k` or `512..4k`, where k is 1024 and `..` doubles. Raises
    `ValueError` with the form.
    """
    numbers: list[int] = []
    for part in word.split(","):
        match = re.fullmatch(r"([0-9]{1,7}k?)(?:\.\.([0-9]{1,7}k?))?", part.strip())
        number, last = map(parse_bytes, (match[1], match[2] or match[1])) if match else (1, 0)
        if number > last:
            raise ValueError(
                f"{word[:80]!r} is not a list such as 512,1k, or a doubling range such as 1..8"
            )
        while number <= last:
            numbers.append(number)
            number *= 2
    return tuple(dict.fromkeys(numbers))


def pairs(words: Sequence[str], name: str) -> tuple[tuple[str, str], ...]:
    """Names and values from words such as `d_model=64`. Raises `UsageError` for any other form and
    for a repeated name.

    >>> pairs(["d_model=64", "config.name=a=b"], "arg")
    (('d_model', '64'), ('config.name', 'a=b'))
    """
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.strip()
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise UsageError(f"--{name} {word[:200]!r} is not NAME=VALUE such as d_model=64")
        if key in values:
            raise UsageError(f"--{name} gives {key} twice")
        values[key] = value
    return tuple(values.items())


ALL_LAYERS, LAST_LAYER = -2, -1
"""In place of numbers of layers, of all or of the last."""
_NAMED_LAYERS = {"all": ALL_LAYERS, "last": LAST_LAYER, "-1": LAST_LAYER}


def layer_list(word: str) -> tuple[LayerChoice, ...]:
    """Layers from `5`, `0,8-10`, `decoder.0-3,cross.5`, `all` or `last`, all of a kind from
    `cross`. Raises `ValueError` with the form.
    """
    layers: list[LayerChoice] = []
    for part in word.split(","):
        part = part.strip()
        if part in get_args(AttentionKind):
            part += ".all"
        match = re.fullmatch(
            rf"(?:({'|'.join(get_args(AttentionKind))})\.)?([0-9-]+|all|last)", part
        )
        if match is None:
            raise ValueError(f"{word[:80]!r} is not a list such as 5, 0,8-10 or decoder.5,cross.5")
        kind: Any = match[1]
        named = _NAMED_LAYERS.get(match[2])
        layers += [(kind, n) for n in (index_list(match[2]) if named is None else (named,))]
    return tuple(layers)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of the text and its decoding."""

    typed: tuple[str, ...] = setting(
        (),
        TEXT,
        "The text to inspect, or - for stdin; several texts form a batch.",
        metavar="[TEXT]...",
        argument=True,
    )
    text: tuple[str, ...] = _run(
        (),
        TEXT,
        "Inspect this text, even if a file has that name; repeatable. Arguments after -- are also"
        " texts.",
    )
    file: tuple[str, ...] = _run((), TEXT, FILE, "--file", "-f", metavar="FILE", common=True)
    lines: bool = _run(False, TEXT, "Treat each line of a file as a sequence.")
    encoding: str = _run(
        "utf-8",
        TEXT,
        "Encoding of files and stdin.",
        parse=encoding_name,
        metavar="NAME",
        default="utf-8",
    )
    errors: Literal["strict", "replace", "escape"] = _run(
        "strict", TEXT, "How to treat bytes that are invalid in the encoding."
    )
    max_bytes: int | None = _run(
        None,
        TEXT,
        "Refuse larger texts.",
        parse=parse_bytes,
        metavar="SIZE",
        default="64.0 MiB; vocab: 100 MiB",
    )
    max_token_len: int = _layer(
        1000, TEXT, "Refuse words of more than N characters.", low=1, high=MAX_LENGTH
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A checkpoint, its layers to inspect (None: all), and its placement. `path` None is no
    checkpoint.

    The last five are settings that a layer of mha has too: `dtype` None is that of the weights,
    `padding` and `tokenizer` None are the checkpoint's own. A `device_map` replaces `device`. The
    `seed` draws the weights of a config without any.
    """

    layers: LayerChoices = setting(
        None,
        CHECKPOINT,
        LAYERS,
        "--layer --layers",
        parse=layer_list,
        metavar="LIST",
        common=True,
        modes=("model", "record"),
    )
    path: str | None = _model(
        None, CHECKPOINT, MODEL, "--model --checkpoint", metavar="DIR|ID", common=True
    )
    revision: str | None = _model(
        None, CHECKPOINT, "Branch, tag or commit of a Hugging Face checkpoint.", metavar="NAME"
    )
    device_map: DeviceMap | None = _model(
        None,
        CHECKPOINT,
        "Spread the layers: auto (GPUs, CPU, disk), or a JSON file of devices. (needs the extra"
        " device-map)",
        parse=read_device_map,
        metavar="MAP",
        excludes=("device",),
    )
    tiny: bool = _model(
        False,
        CHECKPOINT,
        "Shrink a config without weights: few layers, narrow, its ratios kept; random weights.",
    )
    verify_outputs: bool = _model(
        False, CHECKPOINT, "Run again without inspection, and compare the outputs bit by bit."
    )

    device: str = "auto"
    dtype: Dtype | None = None
    threads: int | None = None
    padding: PaddingSide | None = None
    tokenizer: str | None = None
    seed: int = 0

    def includes(self, layer: int, kind: AttentionKind) -> bool:
        """Whether a layer is inspected."""
        return self.layers is None or any(n == layer and k in (None, kind) for k, n in self.layers)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What else a checkpoint reads: tokens that it generates, named parts of the text, a chat, the
    second text of a pair.
    """

    generate: int | None = _model(
        None,
        CHECKPOINT,
        "Generate N tokens greedily, then inspect prompt and continuation together.",
        "--generate --max-new-tokens",
        low=1,
        high=100_000,
    )
    span: tuple[str, ...] = _model(
        (),
        CHECKPOINT,
        "Report attention between spans: name=START:END, name=/REGEX/, or roles of a chat, a,b;"
        " repeatable.",
        metavar="SPAN",
    )
    chat: str | None = _model(
        None,
        CHECKPOINT,
        "Read the messages of a chat instead of a text: a JSON list of role and content.",
        metavar="FILE",
        excludes=("typed", "text", "file"),
    )
    pair: tuple[str, ...] = _model(
        (),
        CHECKPOINT,
        "Second text of a pair, read with the token types of a pair: one for all texts, or one for"
        " each.",
        metavar="TEXT",
        excludes=("chat", "context", "generate"),
    )


@dataclass(frozen=True, kw_only=True)
class Computation(Source):
    """What every command that computes attention takes: the text and its context, and the layer or
    the checkpoint that reads them. `given` are the fields of `Config` that the command line sets:
    what a weights file says about the others stays.
    """

    context: tuple[str, ...] = _run(
        (),
        TEXT,
        "Text for the keys and values (cross-attention): one for all sequences, or one for each.",
    )
    vocab: str | None = _layer(None, TEXT, "Read the vocabulary from a file.", metavar="FILE")
    max_tokens: int | None = _run(
        None,
        TEXT,
        "Use only the first N tokens of each sequence.",
        "--max-tokens --max-length",
        low=1,
        high=MAX_LENGTH,
        default=f"all, at most {DEFAULT_MAX_TOKENS:,}",
    )
    given: Annotated[Mapping[str, Any], Config]
    weights: str | None = _layer(
        None, LAYER, "Load the weights from a safetensors file.", metavar="FILE"
    )
    allow_nonfinite: bool = _run(False, LAYER, "Continue even if numbers are NaN or Inf.")
    repeat: int | None = _layer(
        None, DEVICE, "Number of timed runs.", low=1, high=100_000, default="5, fewer if slow"
    )
    model: ModelSettings


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """The statistics of heads: the conditions of the user, and the limits of first tokens and
    sinks. `heads` None are all.
    """

    conditions: tuple[Condition, ...] = setting(
        (),
        HEADS,
        f"Report the attention where a condition holds, such as '{INDUCTION}'; repeatable.",
        "--where --pattern",
        parse=parse_condition,
        metavar="CONDITION",
        many=True,
        common=True,
    )
    first_tokens: int = setting(
        SINK_TOKENS,
        HEADS,
        "Number of first tokens whose attention is reported together.",
        "--first-tokens --sink-tokens",
        low=1,
        high=MAX_LENGTH,
    )
    sink_weight: float = setting(
        SINK_SHARE,
        HEADS,
        "Smallest fraction of all attention that makes a key a sink.",
        "--sink-weight --sink-share",
        above=0,
        high=1,
        metavar="P",
    )

    heads: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class OwnCode:
    """How code of the user's own is built and called, and for how many seconds at most."""

    arg: tuple[str, ...] = setting(
        (),
        OWN_CODE,
        "Argument of the constructor, such as d_model=64 or config.n_head=4; repeatable. (default:"
        " guessed)",
        metavar="NAME=VALUE",
        common=True,
        modes=("code",),
    )
    call_arg: tuple[str, ...] = setting(
        (),
        OWN_CODE,
        "Argument of every call, such as start_pos=0; repeatable.",
        metavar="NAME=VALUE",
        modes=("code",),
    )
    example: str | None = setting(
        None,
        OWN_CODE,
        "A call that works, at every length T, such as 'lambda m, T: m(torch.randn(2, T, 64))'."
        " (default: guessed)",
        parse=example_call,
        metavar="LAMBDA",
        default="",
        modes=("code",),
        excludes=("call_arg",),
    )
    time_limit: float = setting(
        5,
        OWN_CODE,
        "Seconds that a call may take; an import and the first call have 60.",
        above=0,
        high=MAX_SECONDS,
        metavar="SECONDS",
        modes=("code",),
    )


# -------------------------------------------------------------------------------------------- views

VIEW = "View"
PICTURES = "Pictures"
