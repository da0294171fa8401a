"""The configuration of an attention layer and its run, with the rules for its values."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mhacli.errors import UsageError

Positions = Literal["sinusoidal", "learned", "rope", "rope-interleaved", "alibi", "none"]
LayerPositions = Literal["none", "rope", "rope-interleaved", "alibi"]
Distribution = Literal["normal", "uniform"]
PaddingSide = Literal["right", "left"]
Init = Literal["xavier", "normal", "uniform"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Reducer = Literal["auto", "torch", "triton"]
"""The implementation of head statistics: torch in tiles, a Triton kernel, or (`auto`) the kernel on GPUs that support
it."""
Punctuation = Literal["drop", "keep"]
OnBadBytes = Literal["strict", "replace", "escape"]

MAX_HEADS = 1024
MAX_WIDTH = 65_536
MAX_SEED = 2**64 - 1
MAX_THREADS = 1024
MAX_LENGTH = 10**9
"""The most tokens that an option may state. The real limit is memory."""
MAX_RANDOM = 1 << 20
"""The most random sequences, and the most vectors in one."""
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
_SHOWN = 60
"""The most characters of a value quoted in a message."""


@dataclass(frozen=True)
class Config:
    """The choices for one attention layer and its run.

    Widths are counts of numbers. `None` means "derive it": `n_kv_heads` from `n_heads`, `d_head` from
    `d_model / n_heads`, `d_v` from `d_head`, `d_input` from `d_model`, `scale` as `d_head ** -0.5`, `threads` as torch
    chooses. `resolved()` fills these in and checks every rule; code that computes takes a resolved config.

    `window` is the number of keys (left, right) around the query. The first `prefix` tokens are visible to all queries,
    whatever the window; the rest is causal. The first `sink` tokens stay visible outside the window. `documents` is the
    separator of documents that cannot see each other. `softcap` is the bound `c` of `c · tanh(score / c)`, `score_bias`
    the file of an additive bias, `dropout` a probability that applies only with `train`. `random` (batch, length) takes
    random vectors of `distribution` instead of text. `max_positions` is the length of the table of learned positions,
    and `padding` the side on which shorter sequences are padded.
    """

    d_model: int = 64
    n_heads: int = 4
    n_kv_heads: int | None = None
    d_head: int | None = None
    d_v: int | None = None
    d_input: int | None = None
    bias: bool = True
    out_proj: bool = True
    positions: Positions = "sinusoidal"
    rope_theta: float = 10_000.0
    max_positions: int = 1024
    causal: bool = False
    window: tuple[int, int] | None = None
    prefix: int | None = None
    sink: int | None = None
    documents: str | None = None
    padding: PaddingSide = "right"
    scale: float | None = None
    softcap: float | None = None
    score_bias: str | None = None
    dropout: float = 0.0
    train: bool = False
    init: Init = "xavier"
    dtype: Dtype = "float32"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    tokenizer: str = "word"
    keep_case: bool = False
    punctuation: Punctuation = "drop"
    inner_marks: bool = True
    random: tuple[int, int] | None = None
    distribution: Distribution = "normal"

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
        return self.scale is not None and self.d_head is not None and abs(self.scale - self.d_head**-0.5) > 1e-12

    @property
    def layer_positions(self) -> LayerPositions:
        """The position scheme inside the layer; `none` for positions that are added before the layer."""
        return "none" if self.positions == "sinusoidal" or self.positions == "learned" else self.positions

    def first_column(self, n_tokens: int, length: int) -> int:
        """The index of the first token of `n_tokens` on an axis of `length`: after the padding, if padding is on the
        left."""
        return length - n_tokens if self.padding == "left" else 0

    def resolved(self) -> Config:
        """This config with all derived widths filled in. Raises `UsageError` that names the broken rule."""
        _check_choices(self)
        _check_choice(self, "d_model", 1, MAX_WIDTH)
        _check_choice(self, "n_heads", 1, MAX_HEADS, _nearest_heads_hint(self))
        d_head = self.d_head if self.d_head is not None else _split_evenly(self)
        n_kv_heads = self.n_kv_heads if self.n_kv_heads is not None else self.n_heads
        full = replace(
            self,
            d_head=d_head,
            d_v=self.d_v if self.d_v is not None else d_head,
            d_input=self.d_input if self.d_input is not None else self.d_model,
            n_kv_heads=n_kv_heads,
            scale=float(self.scale) if self.scale is not None else d_head**-0.5 if d_head > 0 else None,
        )
        _check_numbers(full)
        _check_positions(full)
        _check_mask(full)
        return full


def _check_choices(config: Config) -> None:
    hints = get_type_hints(Config)
    for f in fields(Config):
        hint, value = hints[f.name], getattr(config, f.name)
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        if choices and value not in choices:
            raise UsageError(f"{typed(f.name, value)} is not one of {', '.join(choices)}")


_OPTIONS = {f.name: "--" + f.name.replace("_", "-") for f in fields(Config)} | {
    "n_heads": "--heads",
    "n_kv_heads": "--kv-heads",
    "sink": "--sink-window",
}


def typed(name: str, value: object) -> str:
    """An option as the user types it: `--heads 5`, `--no-bias`."""
    if isinstance(value, bool):
        return _OPTIONS[name] if value else f"--no-{_OPTIONS[name][2:]}"
    return f"{_OPTIONS[name]} {shlex.quote(str(value)[:_SHOWN])}"


def about_file(message: str) -> str:
    """A message of `Config.resolved` about a file: `config.n_heads 5` instead of `--heads 5`."""
    names = {option: f"config.{name}" for name, option in _OPTIONS.items()}
    return re.sub(r"--[a-z-]+", lambda match: names.get(match[0], match[0]), message)


def with_earlier_config(document: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a file with a config. A file that says nothing of marks inside words is of a version that dropped
    them."""
    config = document.get("config")
    return document | {"config": {"inner_marks": False} | config} if isinstance(config, dict) else document


def _check_range(subject: str, value: int, low: int, high: int, hint: str | None = None) -> None:
    """Raises `UsageError`, which names `subject`, for a count out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{subject} is not a whole number", hint=hint)
    if value < low:
        raise UsageError(f"{subject} is too small: at least {low}", hint=hint)
    if value > high:
        raise UsageError(f"{subject} is too large: at most {high}", hint=hint)


def _check_numbers(full: Config) -> None:
    for name in ("d_head", "d_v", "d_input"):
        _check_choice(full, name, 1, MAX_WIDTH)
    _check_kv_heads(full)
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?|mps", full.device):
        raise UsageError(f"{typed('device', full.device)} is not one of auto, cpu, cuda, cuda:N, mps")
    _check_choice(full, "seed", 0, MAX_SEED)
    _check_choice(full, "threads", 1, MAX_THREADS)
    for name in ("scale", "softcap"):
        value = getattr(full, name)
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{typed(name, value)} is not a finite number")
    if full.softcap is not None and full.softcap <= 0:
        raise UsageError(f"{typed('softcap', full.softcap)} is not above 0")
    if not 0 <= full.dropout < 1:
        raise UsageError(f"{typed('dropout', full.dropout)} is out of range: from 0 to below 1")
    if full.train and full.dropout == 0:
        raise UsageError("--train changes nothing without dropout", hint="try --train --dropout 0.1")


def _check_choice(config: Config, name: str, low: int, high: int, hint: str | None = None) -> None:
    """Raises `UsageError` for a field that is set and out of range."""
    value = getattr(config, name)
    if value is not None:
        _check_range(typed(name, value), value, low, high, hint)


def _check_kv_heads(full: Config) -> None:
    n_kv_heads = full.n_kv_heads or 0
    shown, nearest = typed("n_kv_heads", n_kv_heads), f"try --kv-heads {_nearest_divisor(full.n_heads, n_kv_heads)}"
    if n_kv_heads > full.n_heads:
        raise UsageError(f"{shown} is more than the {full.n_heads} query heads", hint=nearest)
    _check_choice(full, "n_kv_heads", 1, full.n_heads, nearest)
    if full.n_heads % n_kv_heads:
        raise UsageError(f"{shown} does not divide the {full.n_heads} query heads", hint=nearest)


def _check_positions(full: Config) -> None:
    d_head = full.d_head or 0
    if full.positions in ROPE and d_head % 2:
        raise UsageError(
            f"--positions {full.positions} rotates pairs of columns, but d_head {d_head} is odd",
            hint=f"try --d-head {d_head + 1}",
        )
    if not (math.isfinite(full.rope_theta) and full.rope_theta > 0):
        raise UsageError(
            f"{typed('rope_theta', full.rope_theta)} is not a finite number above 0", hint="try --rope-theta 10000"
        )
    _check_choice(full, "max_positions", 1, MAX_WIDTH * 16)


def _check_mask(full: Config) -> None:
    if full.window is not None and (len(full.window) != 2 or min(full.window) < 0):
        counts = ",".join(map(str, full.window))
        raise UsageError(f"{typed('window', counts)} is not two counts of keys, left and right, such as 4,0")
    for name in ("prefix", "sink"):
        _check_choice(full, name, 1, MAX_LENGTH)
    if full.sink is not None and full.window is None:
        raise UsageError(
            f"{typed('sink', full.sink)} exempts tokens from a window, and there is none",
            hint=f"try --window 8 --sink-window {full.sink}",
        )
    if full.documents == "":
        raise UsageError("--documents '' is empty", hint="try --documents '|'")
    if full.documents is not None and full.random is not None:
        raise UsageError(
            f"{typed('documents', full.documents)} separates texts, but --random takes random vectors in place of text",
            hint="leave out --documents or --random",
        )
    if full.random is not None:
        shown = typed("random", ",".join(map(str, full.random)))
        for name, value in zip(("batch", "length"), full.random, strict=True):
            _check_range(
                f"{shown}: {name} {value}", value, 1, MAX_RANDOM, "try --random 2,5, a batch of 2 with 5 tokens each"
            )


def _split_evenly(config: Config) -> int:
    d_model, n_heads = config.d_model, config.n_heads
    if d_model % n_heads:
        width = _nearest_multiple(d_model, n_heads * (2 if config.positions in ROPE else 1))
        heads = _nearest_heads(config)
        more_heads = "" if heads is None else f"--heads {heads} or "
        raise UsageError(
            f"{typed('n_heads', n_heads)} does not divide d_model {d_model}",
            hint=f"try {more_heads}--d-model {width}, or set --d-head",
        )
    return d_model // n_heads


def _nearest_heads_hint(config: Config) -> str | None:
    heads = _nearest_heads(config) if 1 <= config.d_model <= MAX_WIDTH else None
    return None if heads is None else f"try --heads {heads}"


def _nearest_heads(config: Config) -> int | None:
    """The head count nearest to the requested one that divides d_model, into even parts for rotary positions."""
    if config.positions not in ROPE:
        return _nearest_divisor(config.d_model, config.n_heads)
    return None if config.d_model % 2 else _nearest_divisor(config.d_model // 2, config.n_heads)


def _nearest_divisor(of: int, to: int) -> int:
    """The divisor of `of` nearest to `to`, at most MAX_HEADS. The larger of two equally near ones."""
    return min((n for n in range(1, min(of, MAX_HEADS) + 1) if of % n == 0), key=lambda n: (abs(n - to), -n))


def _nearest_multiple(near: int, of: int) -> int:
    """The positive multiple of `of` nearest to `near`, at most MAX_WIDTH. The larger of two equally near ones."""
    low = near // of * of
    return low if low > 0 and (near - low < low + of - near or low + of > MAX_WIDTH) else low + of
