"""Decoding step by step: what each new token reads from the cache and adds to it, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.record import CacheStep, DecodeSummary, Record, Step
from mhacli.render.base.doc import Column, Table, column
from mhacli.render.base.format import count_of, new_tokens_text
from mhacli.render.base.options import Screen, ViewOptions, chosen, sequences_to_draw
from mhacli.render.base.terminal import table
from mhacli.render.heads.drawable import DrawableHead
from mhacli.render.heads.grids import patterns
from mhacli.render.heads.head_map import kv_head_of, largest_weight, pattern_map
from mhacli.render.run.trace import header
from mhacli.render.run.view import MAX_HEADS, groups_table, self_check_line
from mhacli.sites import variants
from mhacli.text.escape import visible
from mhacli.text.numbers import shown

MAX_STEPS = 16
_LEAST_TOKENS, _TOKENS_SHOWN = 12, 8
_MORE = "--verbose prints shapes, FLOPs and time of each step, and the pattern"
_KEPT = {
    "none": "no cache: every step recomputes all keys and values",
    "concat": "each step copies the cached keys and values into new tensors and appends its own",
    "preallocated": "each step writes its keys and values into memory that was allocated at the beginning",
}
_OF_CACHE = ("multi-query attention", "grouped-query attention")
"""The variants that make a cache smaller."""


def decode_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete output of `mha decode`: a line for each step; in the verbose view, and if heads, sequences or decimals are
    chosen, also the shapes and costs of the steps and the pattern. Raises `UsageError` for a head or sequence out of range."""
    decoding, check = record.decoding, record.self_check
    if decoding is None:
        return Text("this record holds no decoding")
    head, compared = header(record, screen), "the steps equal a full pass"
    if record.model is None:
        compared += " and the pattern gives the output"
    else:
        record = record.of_layer(0)
    sequences = sequences_to_draw(options, len(record.sequences)).shown
    heads = chosen(options.heads, record.config.n_heads, MAX_HEADS, options.everything, "head").shown
    is_whole = options.verbose or options.everything or options.precision != ViewOptions.precision
    is_whole = is_whole or options.heads is not None or options.sequences is not None
    steps = [step for step in record.trace if step.cache is not None]
    most = None if options.everything else MAX_STEPS
    of_steps = step_table([step.cache for step in steps if step.cache is not None], sequences, most)
    sections: list[RenderableType] = [
        Group(head, _introduction(record, decoding)),
        *groups_table(record, screen),
        Group(*table(of_steps, screen.width, *([] if is_whole else [_MORE]))),
    ]
    if is_whole:
        sections.append(Group(*table(_cost_table(steps, most), screen.width)))
    if is_whole and "pattern" in record.arrays:
        named = {b: f"sequence {b} · " if len(record.sequences) > 1 else "" for b in sequences}
        drawn = [
            (f"{named[b]}head {h}{kv_head_of(record, h)}", pattern_map(DrawableHead(record, h, h), b))
            for b in sequences
            for h in heads
        ]
        sections.append(Group(*patterns(drawn, largest_weight(record), options, screen)))
    sections += [Group(*_costs(record, decoding)), self_check_line(check, compared)]
    return Group(*[part for section in sections for part in (section, Text(""))][:-1])


def _introduction(record: Record, decoding: DecodeSummary) -> Text:
    prompt = f"prefill of {count_of(decoding.prompt_len, 'token')}, then " if decoding.prompt_len else ""
    kept = "the model's own" if record.model is not None else _KEPT.get(decoding.cache, "")
    text = Text(f"cache {visible(decoding.cache)}: ", style="bold").append(kept, style="not bold")
    text.append(f"\n{prompt}one token at a time: its query meets the keys of all tokens so far", style="not bold")
    for name, words in variants(record.facts).items():
        if name in _OF_CACHE:
            text.append(f"\n{name}: {words.why}", style="not bold italic")
    return text


def step_table(steps: Sequence[CacheStep], sequences: Sequence[int], most: int | None = None) -> Table[int]:
    """A row for each step: the new tokens of some sequences, the number of keys, and the bytes read and added."""

    def cached(of: Callable[[CacheStep], int]) -> Callable[[int], int | None]:
        return lambda n: of(steps[n]) if steps[n].cache_bytes else None

    def new_tokens(n: int) -> str:
        tokens = steps[n].tokens
        return " | ".join(new_tokens_text(tokens[b], _TOKENS_SHOWN) for b in sequences if b < len(tokens))

    return Table(
        columns=(
            column("decode", "number", lambda n: n, "integer"),
            column("decode", "phase", lambda n: steps[n].phase, drop=2),
            column("decode", "tokens", new_tokens, least=_LEAST_TOKENS),
            column("decode", "sees", lambda n: steps[n].start + steps[n].q_shape[2], "integer"),
            column("decode", "appends", cached(lambda step: step.appended_bytes), "bytes", drop=1),
            column("decode", "reads", cached(lambda step: step.read_bytes), "bytes"),
            column("decode", "difference", lambda n: steps[n].max_abs_difference, "number", drop=3),
        ),
        rows=range(len(steps)),
        most=most,
        has_ends=True,
    )


def _cost_table(steps: Sequence[Step], most: int | None) -> Table[int]:
    """A row for each step: the shapes of its new tensors, its FLOPs and its time."""

    def shape(name: str) -> Column[int]:
        return Column(heading=name, value=lambda n: list(getattr(steps[n].cache, f"{name}_shape")))

    return Table(
        columns=(
            column("decode", "number", lambda n: n, "integer"),
            *map(shape, "qkv"),
            Column(heading="FLOPs", value=lambda n: steps[n].flops, unit="count"),
            Column(heading="time", value=lambda n: steps[n].time_s, unit="seconds", drop=1),
        ),
        rows=range(len(steps)),
        title="new queries, keys and values: batch, head, token, width",
        most=most,
        has_ends=True,
    )


def _costs(record: Record, decoding: DecodeSummary) -> Iterator[Text]:
    """The size of the cache, and the length at which reading it exceeds reading the weights."""
    layers = "" if record.model is None else f" of all {count_of(record.model.n_layers, 'layer')}"
    yield Text("what it costs", style="bold")
    yield Text(f"cache{layers}: {shown(decoding.token_bytes, 'bytes')} for every token of every sequence")
    length = decoding.crossing_len
    beyond = f"{length:,.0f}" if length >= 10 else f"{length:.1f}"
    weights = shown(decoding.weight_bytes, "bytes")
    yield Text(f"weights: every step reads all {weights}; beyond T = {beyond} tokens it reads more cache than weights")
