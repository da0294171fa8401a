"""What a run of our own layer is asked for, and what it will keep and take of memory: all known before the first tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from mhacli.checkpoints.mha_weights import LayerFile, expected_shapes
from mhacli.errors import MhaError, UsageError
from mhacli.io import memory
from mhacli.io.files import format_size
from mhacli.results.record.heads import Wanted
from mhacli.spec.config import DEFAULT_KEEP_LIMIT, ITEM_BYTES, ROPE, Config
from mhacli.spec.facts import Facts
from mhacli.spec.sites import SITES, WAVES_AT_ONCE
from mhacli.text.encode import Encoded

DEFAULT_KEEP = ("pattern", "out", "z", "scores", "qk")
"""What a record keeps where nothing else is said, the most wanted first."""
BASE_BYTES = 300 << 20
"""What python and torch take before the first tensor, with room."""
VECTORS, TILE_BYTES, _TILE_CELLS = 16, 48 << 20, 1 << 19
"""Numbers per query and key that a look at a head keeps at most, and its buffers; the cells of a tile."""
FLOAT32_BYTES, _FLOAT64_BYTES, _INT64_BYTES = 4, 8, 8


@dataclass(frozen=True)
class Options:
    """What to record of a run, beyond the config: arrays to keep, their limit in bytes, and how often to time it."""

    keep: Sequence[str] | None = None
    keep_limit: int = DEFAULT_KEEP_LIMIT
    repeat: int | None = None
    allow_nonfinite: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The arrays to keep, those left out because they do not fit the limit, and the predicted peak in bytes."""

    keep: tuple[str, ...]
    not_kept: tuple[str, ...]
    peak_bytes: int


@dataclass(frozen=True)
class CellIndex:
    """A cell of the pattern: which sequence, head, query and key."""

    sequence: int
    head: int
    query: int
    key: int


@dataclass(frozen=True)
class LayerRequest:
    """A text, a resolved config, and what follows from them: the sizes (`facts`) and the `plan`, computed once for all that
    compute with it. `source` gives weights from a file, else they come from the config's seed. `notes` are for the reader.

    `layer_request` makes it.
    """

    encoded: Encoded
    config: Config
    facts: Facts
    plan: Plan
    source: LayerFile | None
    options: Options
    notes: tuple[str, ...]


def layer_request(
    encoded: Encoded,
    config: Config | None = None,
    *,
    source: LayerFile | None = None,
    options: Options = Options(),
    notes: tuple[str, ...] = (),
) -> LayerRequest:
    """The request of a run, with its sizes and its plan. The config of a weights file takes the place of `config`.

    Raises `MhaError` as `make_plan` does. Whether the run fits in memory is asked by `require_room`.
    """
    resolved = (config or Config()).resolved() if source is None else source.config
    facts = facts_of(encoded, resolved)
    plan = make_plan(facts, options.keep, options.keep_limit)
    return LayerRequest(encoded, resolved, facts, plan, source, options, notes)


def facts_of(encoded: Encoded, config: Config) -> Facts:
    """The sizes of a run, from its text and its resolved config."""
    return Facts.of(config, encoded.sequences, encoded.context, n_tokens=len(encoded.vocabulary.tokens))


def make_plan(facts: Facts, keep: Sequence[str] | None, keep_limit: int = DEFAULT_KEEP_LIMIT) -> Plan:
    """Which arrays fit into `keep_limit` bytes: all that were asked for, or else those of `DEFAULT_KEEP` that do.

    Raises `UsageError` for a name that is no site, and `MhaError` when what was asked for does not fit.
    """
    if keep is None:
        return _plan_default(facts, keep_limit)
    for name in keep:
        if name not in SITES:
            raise UsageError(f"keep must name sites, got {name!r}", hint=f"sites: {' '.join(SITES)}")
    keep = tuple(dict.fromkeys(keep))
    total = sum(array_bytes(facts, name) for name in keep)
    if total > keep_limit:
        raise MhaError(
            f"the arrays to keep ({', '.join(keep)}) must fit in {format_size(keep_limit)}, got {format_size(total)}",
            hint=f"--keep-limit {-(-total >> 20)}M raises the limit; --keep pattern keeps less",
            code="too-large",
        )
    return Plan(keep, (), _peak_bytes(facts, total))


def require_room(request: LayerRequest, available: int | None = None) -> None:
    """Raises `MhaError` where the plan does not fit in what is available, by default the memory of this machine; as `foresee`."""
    have = memory.available_bytes() if available is None else available
    if not memory.fits(request.plan.peak_bytes, have):
        foresee(request.facts, request.options.keep, request.options.keep_limit, have)


def foresee(facts: Facts, keep: Sequence[str] | None, keep_limit: int, available: int) -> Plan:
    """The plan of a run that fits in memory.

    Raises `MhaError` where the predicted peak is more than 80 % of what is available, with both numbers and with the
    largest lengths and heads that do fit; otherwise as `make_plan`.
    """
    _require_room(facts, lambda other: make_plan(other, keep, keep_limit).peak_bytes, available)
    return make_plan(facts, keep, keep_limit)


def foresee_heads(facts: Facts, wanted: Wanted, available: int | None = None) -> int:
    """The predicted peak in bytes of a look at heads without their matrices. Raises `MhaError` as `foresee`."""
    have = memory.available_bytes() if available is None else available
    _require_room(facts, lambda other: _heads_bytes(other, wanted), have)
    return _heads_bytes(facts, wanted)


def require_no_dropout(config: Config) -> None:
    """Raises `UsageError` in training: what dropout leaves of a pattern is never built by a look at heads."""
    if config.train:
        raise UsageError(
            "train must be off in heads: dropout acts on patterns, which are never built", hint="leave it out"
        )


def _require_room(facts: Facts, needed: Callable[[Facts], int], have: int) -> None:
    """Raises `MhaError` where more than 80 % of what is available is needed, with what does fit."""
    if not memory.fits(needed(facts), have):
        raise MhaError(
            f"attention of {facts.q_len} × {facts.k_len} tokens, {facts.config.n_heads} heads, batch {facts.batch}, must "
            f"fit in memory: it needs {format_size(needed(facts))}, and {format_size(have)} is available",
            hint=_ways_out(facts, lambda other: memory.fits(needed(other), have)),
            code="out-of-memory",
        )


def _ways_out(facts: Facts, fits: Callable[[Facts], bool]) -> str:
    """The longest text and the most heads that fit, as options."""
    longest, too_long = 0, max(facts.q_len, facts.k_len)
    while too_long - longest > 1:
        middle = (longest + too_long) // 2
        if fits(replace(facts, q_len=min(middle, facts.q_len), k_len=min(middle, facts.k_len))):
            longest = middle
        else:
            too_long = middle
    shorter = f"--max-tokens {longest}" if facts.config.random is None else f"--random {facts.batch},{longest}"
    ways = [f"{shorter} fits"] if longest else []
    for n_heads in range(facts.config.n_heads - 1, 0, -1):
        d_head, rest = divmod(facts.config.d_model, n_heads)
        fewer = replace(facts.config, n_heads=n_heads, n_kv_heads=n_heads, d_head=d_head, d_v=d_head)
        is_odd = facts.config.positions in ROPE and d_head % 2
        if not rest and not is_odd and fits(replace(facts, config=fewer)):
            return ", ".join([*ways, f"so does --heads {n_heads}" if ways else f"--heads {n_heads} fits"])
    return ways[0] if ways else "use a shorter text or a smaller --d-model"


def require_inside(cell: CellIndex, request: LayerRequest) -> None:
    """Raises `UsageError` for a cell that the text and the heads do not have."""
    encoded, config = request.encoded, request.config
    if not 0 <= cell.sequence < len(encoded.sequences):
        raise UsageError(f"sequence must be from 0 to {len(encoded.sequences) - 1}, got {cell.sequence}")
    keys = encoded.context or encoded.sequences
    for name, value, count in (
        ("head", cell.head, config.n_heads),
        ("query", cell.query, len(encoded.sequences[cell.sequence].tokens)),
        ("key", cell.key, len(keys[cell.sequence].tokens)),
    ):
        if not 0 <= value < count:
            raise UsageError(f"cell must name a {name} from 0 to {count - 1}, got {value}")


def decodable(request: LayerRequest, prompt_len: int) -> LayerRequest:
    """The request with the causal mask that decoding means. Raises `UsageError` for what contradicts it."""
    encoded, config, longest = request.encoded, request.config, request.encoded.q_len
    if not 0 <= prompt_len <= longest:
        raise UsageError(f"prompt_len must be from 0 to the {longest} tokens of the text, got {prompt_len}")
    if encoded.context is not None:
        raise UsageError("context must be left out of decode, which follows one text", hint="mha run shows it")
    if config.train:
        raise UsageError(
            "train must be off in decode: dropout would differ from the recomputation", hint="leave it out"
        )
    needed = _prefix_end(config, encoded)
    if needed > prompt_len:
        raise UsageError(
            f"prompt_len must hold the prefix, whose tokens see each other at once, got {prompt_len} of {needed} tokens",
            hint=f"--prompt-len {needed} works",
        )
    if config.prefix is not None:
        return request
    causal = replace(config, causal=True)
    return replace(request, config=causal, facts=replace(request.facts, config=causal))


def _prefix_end(config: Config, encoded: Encoded) -> int:
    """Behind which column no token of a prefix comes that an earlier one sees: 0 where there is none."""
    end = 0
    for sequence in encoded.sequences:
        first = config.first_column(len(sequence.tokens), encoded.q_len)
        seen = [index for index, place in enumerate(sequence.places) if 1 <= place < (config.prefix or 0)]
        end = max(end, first + seen[-1] + 1) if seen else end
    return end


def array_bytes(facts: Facts, site: str) -> int:
    """Bytes of a site's array in the record, where 16-bit numbers are widened to float32."""
    n = 1
    for size in SITES[site].shape_for(facts):
        n *= size
    return n * max(FLOAT32_BYTES, ITEM_BYTES[facts.config.dtype])


def _plan_default(facts: Facts, keep_limit: int) -> Plan:
    kept: list[str] = []
    total = 0
    wanted = (*DEFAULT_KEEP, "dropped") if facts.config.train else DEFAULT_KEEP
    for name in wanted:
        if total + array_bytes(facts, name) <= keep_limit:
            kept.append(name)
            total += array_bytes(facts, name)
    return Plan(tuple(kept), tuple(name for name in wanted if name not in kept), _peak_bytes(facts, total))


def _peak_bytes(facts: Facts, kept_bytes: int) -> int:
    """Kept arrays, the matrices that `attend` holds at once, and the rows around them."""
    item = ITEM_BYTES[facts.config.dtype]
    matrices = facts.cells() * (item + 4 * max(FLOAT32_BYTES, item)) + facts.batch * facts.q_len * facts.k_len
    around = _added_bytes(facts) + _row_bytes(facts) + _drawn_bytes(facts) + _weight_bytes(facts)
    return BASE_BYTES + kept_bytes + matrices + around


def _row_bytes(facts: Facts) -> int:
    """Rows on their way through the layer: what is read (content, sum, padding masked), projected, and put together."""
    widths = facts.size("d_model") * 4 + facts.size("head·d_head") * 4 + facts.size("head·d_v") * 6
    read = (facts.q_len + (facts.k_len if facts.cross else 0)) * facts.size("d_input") * 3
    return facts.batch * ((facts.q_len + facts.k_len) * widths + read) * ITEM_BYTES[facts.config.dtype]


def _heads_bytes(facts: Facts, wanted: Wanted) -> int:
    """A look at heads, at the fullest of its stages: rows are made, projected, and reduced to vectors.

    Rotation holds a few wide copies of the queries. A given bias is kept whole, beside a copy without −∞. What is kept cell
    by cell is held as tensors, arrays, and while it is put together.
    """
    item, batch = ITEM_BYTES[facts.config.dtype], facts.batch
    wide = max(FLOAT32_BYTES, item)
    rows = batch * (facts.q_len + (facts.k_len if facts.cross else 0)) * facts.size("d_input") * item
    queries = batch * facts.q_len * facts.size("head·d_head")
    z = batch * facts.q_len * facts.size("head·d_v") * item
    heads = queries * item + batch * facts.k_len * facts.size("kv_head·d_head+kv_head·d_v") * item
    turned = 3 * queries * wide + queries * item if facts.config.positions in ROPE else 0
    n_heads, kept = facts.config.n_heads if wanted.heads is None else len(wanted.heads), wanted.kept
    cells = 0 if kept.corner is None else min(kept.corner.n_queries, facts.q_len) * min(kept.corner.n_keys, facts.k_len)
    cells = batch * n_heads * (4 * cells + 8 * len(kept.queries) * min(kept.top, facts.k_len)) * wide
    vectors = batch * (n_heads + 1) * (facts.q_len + facts.k_len) * VECTORS * wide
    bias = 2 * facts.cells() * wide if facts.config.score_bias is not None else 0
    masks = batch * _TILE_CELLS * (3 * wide if facts.padded else 0)
    z *= 3 if kept.z else 1
    fullest = max(3 * rows + _drawn_bytes(facts), 3 * rows + heads + turned, heads + z + vectors + masks + TILE_BYTES)
    return BASE_BYTES + fullest + cells + bias + _weight_bytes(facts)


def _added_bytes(facts: Facts) -> int:
    """What is added to scores: a bias, and distances with the whole numbers that they are made of."""
    wide, has_bias = max(FLOAT32_BYTES, ITEM_BYTES[facts.config.dtype]), facts.config.score_bias is not None
    added = 2 * facts.cells() * wide if has_bias else 0
    if facts.config.positions == "alibi":
        planes = (facts.batch if facts.own_places else 1) * facts.q_len * facts.k_len
        added += planes * (facts.config.n_heads * wide + 2 * _INT64_BYTES)
    return added


def _drawn_bytes(facts: Facts) -> int:
    """What is made in float64 and rounded, one after the other: random rows; waves with angles, sines and cosines."""
    d_input, item = facts.size("d_input"), ITEM_BYTES[facts.config.dtype]
    random = facts.batch * facts.q_len * d_input * _FLOAT64_BYTES if facts.config.random is not None else 0
    if facts.config.positions != "sinusoidal":
        return random
    longest = max(facts.q_len, facts.k_len) if facts.cross else facts.q_len
    waves = (facts.batch if facts.own_places else 1) * longest * d_input
    return max(random, 2 * waves * item + min(waves, WAVES_AT_ONCE) * 5 * _FLOAT64_BYTES)


def _weight_bytes(facts: Facts) -> int:
    """The weights as float32 and in their dtype, and the float64 numbers that the largest of them is drawn from."""
    counts = [prod(shape) for shape in expected_shapes(facts.config, facts.n_tokens).values()]
    item = ITEM_BYTES[facts.config.dtype]
    return sum(counts) * (FLOAT32_BYTES + (0 if item == FLOAT32_BYTES else item)) + 2 * 8 * max(counts)
