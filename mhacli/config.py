"""What is to be computed: one frozen set of choices, with the rules that they must keep."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_type_hints

from mhacli.errors import UsageError

Positions = Literal["sinusoidal", "none"]
Init = Literal["xavier", "normal", "uniform"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Punctuation = Literal["drop", "keep"]
OnBadBytes = Literal["strict", "replace", "escape"]

MAX_HEADS = 1024
MAX_WIDTH = 65_536
MAX_SEED = 2**64 - 1
MAX_THREADS = 1024
DEFAULT_MAX_BYTES = 64 << 20
"""Most bytes of text from one source."""
DEFAULT_MAX_TOKENS = 32_768
"""Most tokens in a sequence, where a run does not name its own number."""
DEFAULT_MAX_TOKEN_LEN = 1000
"""Most characters in a word."""
DEFAULT_KEEP_LIMIT = 512 << 20
"""Most bytes of arrays in a record."""
ITEM_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Config:
    """The choices behind one attention layer and its run.

    Widths are counts of numbers. `None` means "derive it": `n_kv_heads` from `n_heads`, `d_head` from
    `d_model / n_heads`, `d_v` from `d_head`, `scale` as `d_head ** -0.5`, `threads` as torch chooses. `resolved()` fills
    those in and checks every rule; code that computes takes a resolved config. `window` is (left, right) keys around
    the query, `softcap` the bound `c` of `c · tanh(score / c)`, `dropout` a probability that acts only with `train`.
    """

    d_model: int = 64
    n_heads: int = 4
    n_kv_heads: int | None = None
    d_head: int | None = None
    d_v: int | None = None
    bias: bool = True
    out_proj: bool = True
    positions: Positions = "sinusoidal"
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float | None = None
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

    @property
    def d_input(self) -> int:
        """Width of the rows that the projections read: for text, the width of the embedding."""
        return self.d_model

    def resolved(self) -> Config:
        """This config with every derived width filled in. Raises `UsageError` naming the rule that is broken."""
        _check_choices(self)
        _check_range("d_model", self.d_model, 1, MAX_WIDTH)
        _check_range("n_heads", self.n_heads, 1, MAX_HEADS, _nearest_heads_hint(self))
        d_head = self.d_head if self.d_head is not None else _split_evenly(self.d_model, self.n_heads)
        n_kv_heads = self.n_kv_heads if self.n_kv_heads is not None else self.n_heads
        full = replace(
            self,
            d_head=d_head,
            d_v=self.d_v if self.d_v is not None else d_head,
            n_kv_heads=n_kv_heads,
            scale=float(self.scale) if self.scale is not None else d_head**-0.5 if d_head > 0 else None,
        )
        _check_numbers(full)
        return full


def _check_choices(config: Config) -> None:
    hints = get_type_hints(Config)
    for field in fields(Config):
        choices = get_args(hints[field.name]) if field.type in ("Positions", "Init", "Dtype", "Punctuation") else ()
        value = getattr(config, field.name)
        if choices and value not in choices:
            raise UsageError(f"{field.name} must be one of {', '.join(choices)}, got {value!r}")
    if config.window is not None and (len(config.window) != 2 or min(config.window) < 0):
        raise UsageError(f"window must be two counts of keys, left and right, from 0 up, got {config.window!r}")


def _check_range(name: str, value: int, low: int, high: int, hint: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}", hint=hint)


def _check_numbers(full: Config) -> None:
    for name in ("d_head", "d_v"):
        _check_range(name, getattr(full, name), 1, MAX_WIDTH)
    _check_range("n_kv_heads", full.n_kv_heads or 0, 1, full.n_heads)
    if full.n_heads % (full.n_kv_heads or 1):
        raise UsageError(
            f"n_heads ({full.n_heads}) must be a multiple of n_kv_heads ({full.n_kv_heads})",
            hint=f"n_kv_heads {_nearest_divisor(full.n_heads, full.n_kv_heads or 1)} works",
        )
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?|mps", full.device):
        raise UsageError(f"device must be auto, cpu, cuda, cuda:N or mps, got {full.device!r}")
    _check_range("seed", full.seed, 0, MAX_SEED)
    if full.threads is not None:
        _check_range("threads", full.threads, 1, MAX_THREADS)
    for name in ("scale", "softcap"):
        value = getattr(full, name)
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{name} must be a finite number, got {value}")
    if full.softcap is not None and full.softcap <= 0:
        raise UsageError(f"softcap must be above 0, got {full.softcap}")
    if not 0 <= full.dropout < 1:
        raise UsageError(f"dropout must be a probability from 0 to below 1, got {full.dropout}")
    if full.train and full.dropout == 0:
        raise UsageError("train must come with a dropout above 0, got dropout 0", hint="try --train --dropout 0.1")


def _split_evenly(d_model: int, n_heads: int) -> int:
    if d_model % n_heads:
        heads, width = _nearest_divisor(d_model, n_heads), _nearest_multiple(d_model, n_heads)
        raise UsageError(
            f"d_model ({d_model}) must be a multiple of n_heads ({n_heads})",
            hint=f"try --heads {heads} or --d-model {width}, or set --d-head",
        )
    return d_model // n_heads


def _nearest_heads_hint(config: Config) -> str | None:
    if not 1 <= config.d_model <= MAX_WIDTH:
        return None
    return f"try --heads {_nearest_divisor(config.d_model, config.n_heads)}"


def _nearest_divisor(of: int, to: int) -> int:
    """The divisor of `of` nearest to `to`, at most MAX_HEADS; the larger of two equally near."""
    return min((n for n in range(1, min(of, MAX_HEADS) + 1) if of % n == 0), key=lambda n: (abs(n - to), -n))


def _nearest_multiple(near: int, of: int) -> int:
    """The positive multiple of `of` nearest to `near`, at most MAX_WIDTH; the larger of two equally near."""
    low = near // of * of
    return low if low > 0 and (near - low < low + of - near or low + of > MAX_WIDTH) else low + of
