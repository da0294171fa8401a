"""Decoding step by step: what each new token reads from the cache and adds to it, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.record import CacheStep, DecodeSummary, Record, Step
from mhacli.render.base.doc import Column, Table, column
from mhacli.render.base.format import count_of, flowing
from mhacli.render.base.options import Screen, ViewOptions, chosen, sequences_to_draw
from mhacli.render.base.terminal import spaced, table
from mhacli.render.heads.grids import patterns
from mhacli.render.heads.head_map import largest_weight
from mhacli.render.run.trace import header
from mhacli.render.run.view import MAX_HEADS, kv_heads_line, maps_of_head, self_check_line
from mhacli.text.escape import token_label, visible
from mhacli.text.numbers import shown

MAX_STEPS = 16
_LEAST_TOKENS, _TOKENS_SHOWN = 12, 8
_MORE = "--verbose adds shapes, FLOPs and time of each step, and the pattern"
_KEPT = {
    "none": "every step recomputes all keys and values",
    "concat": "each step copies the cached keys and values into new tensors and appends its own",
    "preallocated": "each step writes its keys and values into memory that was allocated at the beginning",
}


def decode_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete output of `mha decode`: a line for each step; in the verbose view, and if heads, sequences or decimals are
    chosen, also the shapes and costs of the steps and the pattern. Raises `UsageError` for a head or sequence out of range."""
    decoding, check = record.decoding, record.self_check
    assert decoding is not None, "a record of decoding has its summary"
    in_detail = options.verbose or options.everything or options.precision != ViewOptions.precision
    in_detail = in_detail or options.heads is not None or options.sequences is not None
    head = header(record, screen, in_brief=not options.verbose)
    compared = "the steps equal a full pass"
    kept = _KEPT.get(decoding.cache, "")
    if record.model is None:
        compared += " and the pattern gives the output"
    else:
        kept, record = "the model's own", record.of_layer(0)
    cache = Text(f"cache {visible(decoding.cache)}: ", style="bold").append(kept, style="not bold")
    sequences = sequences_to_draw(options, len(record.sequences)).shown
    heads = chosen(options.heads, record.config.n_heads, MAX_HEADS, options.everything, "head").shown
    most = None if options.everything else MAX_STEPS
    steps = step_table(record.trace, sequences, most, in_detail=in_detail)
    sections: list[RenderableType] = [
        Group(head, cache, *kv_heads_line(record)),
        Group(*table(steps, screen.width, *([] if in_detail else [_MORE]))),
    ]
    if in_detail and "pattern" in record.arrays:
        drawn = [each for b in sequences for h in heads for each in maps_of_head(record, b, h)]
        sections.append(Group(*patterns(drawn, largest_weight(record), options, screen)))
    sections += [_costs(record, decoding, screen), self_check_line(check, compared)]
    return spaced(sections)


def step_table(
    steps: Sequence[Step], sequences: Sequence[int], most: int | None = None, *, in_detail: bool = False
) -> Table[int]:
    """A row for each step that has a cache: the new tokens of some sequences, the number of keys, and the bytes read and added;
    in detail also the shapes of the new tensors `[batch, head, token, width]`, the operations and the time."""
    caches = [step.cache for step in steps if step.cache is not None]

    def cached(of: Callable[[CacheStep], int]) -> Callable[[int], int | None]:
        return lambda n: of(caches[n]) if caches[n].cache_bytes else None

    def new_tokens(n: int) -> str:
        words = []
        for tokens in (caches[n].tokens[b] for b in sequences if b < len(caches[n].tokens)):
            listed = tokens if len(tokens) <= _TOKENS_SHOWN else tokens[: _TOKENS_SHOWN - 1]
            more = [f"… {len(tokens) - len(listed)} more"] if len(listed) < len(tokens) else []
            words.append(" ".join([*map(token_label, listed), *more]) or "padding")
        return " | ".join(words)

    columns: list[Column[int]] = [
        column("decode", "number", lambda n: n, "integer"),
        column("decode", "phase", lambda n: caches[n].phase, drop=2),
        column("decode", "tokens", new_tokens, least=_LEAST_TOKENS),
        column("decode", "sees", lambda n: caches[n].start + caches[n].q_shape[2], "integer"),
        column("decode", "appends", cached(lambda step: step.appended_bytes), "bytes", drop=1),
        column("decode", "reads", cached(lambda step: step.read_bytes), "bytes"),
        column("decode", "difference", lambda n: caches[n].max_abs_difference, "number", drop=3),
    ]
    if in_detail:
        columns += [
            Column(heading="FLOPs", value=lambda n: steps[n].flops, unit="count"),
            Column(heading="time", value=lambda n: steps[n].time_s, unit="seconds", drop=4),
            Column(heading="q shape", value=lambda n: list(caches[n].q_shape), drop=5),
            Column(heading="k shape", value=lambda n: list(caches[n].k_shape), drop=6),
            Column(heading="v shape", value=lambda n: list(caches[n].v_shape), drop=6),
        ]
    return Table(columns=columns, rows=range(len(caches)), most=most, has_ends=True, elsewhere="with --json")


def _costs(record: Record, decoding: DecodeSummary, screen: Screen) -> Text:
    """The size of the cache, and the length at which reading it exceeds reading the weights."""
    layers = "" if record.model is None else f" of all {count_of(record.model.n_layers, 'layer')}"
    length = decoding.crossing_len
    beyond = f"{length:,.0f}" if length >= 10 else f"{length:.1f}"
    parts = [
        f"cache{layers}: {shown(decoding.token_bytes, 'bytes')} for every token of every sequence",
        f"weights: {shown(decoding.weight_bytes, 'bytes')}, which every step reads",
        f"beyond {beyond} tokens a step reads more cache than weights",
    ]
    return flowing(parts, screen.width)
