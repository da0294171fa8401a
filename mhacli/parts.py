"""What a record is made of: tokens, steps, timings, checks, the story of a cell, the steps of decoding. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mhacli.config import Config


@dataclass(frozen=True)
class Piece:
    """What the tokenizer of a checkpoint says of a token besides its id: its own `name` for it, the `bytes` that it stands
    for in hex, whether it is `special`, and the number of the `word` that it is part of (None for special tokens).

    Where a character is cut into several tokens, the token is its `part` of `parts`, 1 first.
    """

    name: str
    bytes: str
    special: bool = False
    word: int | None = None
    part: int = 1
    parts: int = 1


@dataclass(frozen=True)
class TokenSequence:
    """One text as tokens. `offsets` are characters of `text`, end exclusive; `documents` says which document of the text
    each token belongs to, 0 first, and is empty where texts are not cut into documents. `pieces` are those of a tokenizer
    that has its own names for tokens, else empty; then `tokens` are what they stand for, and parts of a character are
    marked, `日⟨1/3⟩`."""

    text: str
    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    documents: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each token in its own document, 0 first."""
        begins: dict[int, int] = {}
        for index, document in enumerate(self.documents):
            begins.setdefault(document, index)
        return tuple(index - begins[document] for index, document in enumerate(self.documents)) or tuple(
            range(len(self.tokens))
        )


@dataclass(frozen=True)
class Values:
    """A tensor's numbers in one line: finite extremes and moments, a histogram of equal bins, and what is not finite.

    `numbers` holds the tensor itself, flat in row-major order, when it is small; None where a number is not finite.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    histogram: tuple[int, ...]
    n_nan: int
    n_inf: int
    numbers: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class Step:
    """What was seen at one site. `layout` says whether the tensor shares memory with `view_of`; strides count numbers.

    `parameters` maps weight names to shapes; `bytes` is the tensor's size; `time_s` is None where nothing was timed. What is
    not `built` was made to be looked at: the kernel that ran never makes it.
    Of somebody's own attention `operation` is what torch calls it, `file`, `line` and `source` say where it stands in their code,
    `remark` what is odd about it. A
    line that ran `repeats` times is one step: flops and bytes are those of all times, the rest of the first; `repeats_of` is
    the word for what it was repeated.
    """

    site: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    formula: str
    meaning: str
    layout: Literal["view", "copy"]
    strides: tuple[int, ...]
    flops: int
    bytes: int
    time_s: float | None = None
    view_of: str | None = None
    parameters: tuple[Parameter, ...] = ()
    values: Values | None = None
    cache: CacheStep | None = None
    built: bool = True
    operation: str = ""
    file: str | None = None
    line: int | None = None
    source: str = ""
    remark: str = ""
    repeats: int = 1
    repeats_of: str = ""


@dataclass(frozen=True)
class Argument:
    """An argument that the class or function was given: `origin` says by whom: given, default, or guessed."""

    name: str
    value: str
    origin: Literal["given", "default", "guessed"]
    why: str = ""


@dataclass(frozen=True)
class OwnModule:
    """Somebody's own attention that was walked: the `target` that names it, the `arguments` it was built with, how it was
    `called`, and the `sizes` that it was asked with, as `(word, size)`. `n_runs` with other sizes told the axes apart. The
    `result` has a shape, and `expected` is the one that attention must give; what it `printed` is kept."""

    target: str
    arguments: tuple[Argument, ...]
    called: str
    sizes: tuple[tuple[str, int], ...]
    n_runs: int
    result: tuple[int, ...]
    expected: tuple[int, ...]
    printed: str = ""


@dataclass(frozen=True)
class Parameter:
    """A weight that a site uses, by its name on disk."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class CacheStep:
    """One step of decoding: new tokens come in, read what is kept of the past, and are kept themselves.

    `start` is the position of the first new token, `tokens` names the new ones of each sequence (empty for padding).
    Shapes are those of the new queries, keys and values. `read_bytes` are keys and values that attention reads,
    `appended_bytes` those that this step adds, `moved_bytes` all that this way of keeping the past reads and writes of it,
    `cache_bytes` the storage that it holds. `max_abs_difference` is the distance of the output from the rows of a full
    recomputation; None where not finite.
    """

    phase: Literal["prefill", "decode"]
    start: int
    tokens: tuple[tuple[str, ...], ...]
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    n_past: int
    read_bytes: int
    appended_bytes: int
    moved_bytes: int
    cache_bytes: int
    max_abs_difference: float | None


@dataclass(frozen=True)
class Way:
    """One way of keeping the past, at one length: time and bytes of its last step, and of the whole sequence.

    `total_s` is the sum over all steps, of which `n_timed` were timed and the rest interpolated between them.
    """

    cache: str
    length: int
    step: Timing
    total_s: float
    n_timed: int
    step_bytes: int
    total_bytes: int
    step_flops: int
    cache_bytes: int


@dataclass(frozen=True)
class DecodeSummary:
    """A decoded sequence: how the past was kept, how long the prompt was, and how the ways of keeping it compare.

    `weight_bytes` are read at every step whatever the length, `token_bytes` per token and sequence that is kept; they are
    equal at `crossing_len` tokens. `full_token_bytes` is what a token would take with a kv head for every query head.
    """

    cache: str
    prompt_len: int
    ways: tuple[Way, ...]
    weight_bytes: int
    token_bytes: int
    full_token_bytes: int
    crossing_len: float


@dataclass(frozen=True)
class Timing:
    """Seconds of one stage: the first run apart, then the samples with their median and interquartile range."""

    first_s: float
    samples_s: tuple[float, ...]
    median_s: float
    iqr_s: float


@dataclass(frozen=True)
class SelfCheck:
    """The output recomputed in float64 from the pattern that is shown, against the output that was computed; of decoding
    also against a full recomputation, whichever is further."""

    max_abs_error: float | None
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class RouteCheck:
    """One way of writing the computation: how far its output is from that of the separate projections."""

    route: str
    sites: tuple[str, ...]
    max_abs_difference: float | None
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class ScorePart:
    """One of the terms that add up to a score, and whether it comes from what the tokens are, where they stand, or both.

    `value` is None where it is not finite; of a bias that is `given`, −∞: the cell is not allowed. What is `added` comes
    after scale and softcap.
    """

    name: str
    kind: Literal["content", "position", "both", "given", "softcap"]
    value: float | None
    added: bool = False


@dataclass(frozen=True)
class Cell:
    """One number followed all the way: how a query of a head came to give a key its share.

    `q`, `k`, `v` are the vectors, `scores_row` and `pattern_row` the query's whole rows (None where not allowed),
    `share` the weight that multiplies `v` (after dropout, in training), `z` the head's result for the query. `qk` is the
    dot product as it was scaled, after any rotation; `parts` are the terms of the score.
    """

    sequence: int
    head: int
    query: int
    key: int
    q: tuple[float | None, ...]
    k: tuple[float | None, ...]
    v: tuple[float | None, ...]
    qk: float | None
    scale: float
    softcap: float | None
    allowed: bool
    score: float | None
    scores_row: tuple[float | None, ...]
    pattern_row: tuple[float | None, ...]
    share: float | None
    z: tuple[float | None, ...]
    parts: tuple[ScorePart, ...] = ()


@dataclass(frozen=True)
class Environment:
    """Where it ran. `device_asked` is what the user said, `device` what that came to."""

    mha: str
    torch: str
    numpy: str
    python: str
    platform: str
    device: str
    device_name: str
    device_asked: str
    threads: int


@dataclass(frozen=True)
class SequenceMask:
    """What the mask allows in one sequence: how many keys each query sees, padding included, and a map of blocks.

    `block_counts` are visible cells per block of `block` × `block` queries and keys; blocks at the end may be smaller.
    """

    visible_per_query: tuple[int, ...]
    n_cells: int
    block: int
    block_counts: tuple[tuple[int, ...], ...]

    @property
    def n_visible(self) -> int:
        """How many cells are allowed."""
        return sum(self.visible_per_query)

    @property
    def density(self) -> float:
        """The share of cells that are allowed."""
        return self.n_visible / self.n_cells


@dataclass(frozen=True)
class MaskSurvey:
    """A mask looked at alone: its rules, and what they come to in each sequence."""

    config: Config
    sequences: tuple[TokenSequence, ...]
    context: tuple[TokenSequence, ...] | None
    rules: tuple[str, ...]
    masks: tuple[SequenceMask, ...]
