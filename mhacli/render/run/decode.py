"""Decoding step by step: what each new token reads from the cache and adds to it, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mhacli.record.checks import error_text
from mhacli.record.record import CacheStep, DecodeSummary, Record, Step
from mhacli.render.base.doc import Table, column
from mhacli.render.base.format import (
    bytes_text,
    configuration,
    count_of,
    count_text,
    filled,
    new_tokens_text,
    number_text,
    seconds_text,
    title_rule,
    token_text,
    weight_text,
)
from mhacli.render.base.options import Screen, ViewOptions, balanced, chosen
from mhacli.render.base.terminal import table
from mhacli.render.checkpoint.header import model_header
from mhacli.render.heads.head_map import HeadPattern
from mhacli.render.run.view import MAX_HEADS, MAX_SEQUENCES, Comparison, groups_table, self_check_line
from mhacli.sites import row_flops, variants
from mhacli.text.escape import visible

MAX_STEPS = 16
_OF_STEPS = Comparison(
    "the steps equal a full pass", "the outputs of the steps, or of the full pass, have NaN or infinite numbers"
)
_OF_STEPS_AND_PATTERN = _OF_STEPS._replace(agrees="the steps equal a full pass and the pattern gives the output")
_INDENT, _KEYS_SHOWN = 3, 8
_LEAST_TOKENS = 12
_MORE = "--verbose prints shapes, weights, FLOPs and time of each step"
_KEPT = {
    "none": "no cache: every step recomputes all keys and values",
    "concat": "each step copies the cached keys and values into new tensors and appends its own",
    "preallocated": "each step writes its keys and values into memory that was allocated at the beginning",
}


def _of_steps_and_pattern(record: Record) -> Comparison:
    """Both comparisons; if the largest difference is not of the steps, also that of the steps, which their table shows."""
    differences = [step.cache.max_abs_difference for step in record.trace if step.cache is not None]
    of_steps = max((difference for difference in differences if difference is not None), default=0.0)
    worst = record.self_check.error
    if worst is None or not record.self_check.ok or of_steps >= worst:
        return _OF_STEPS_AND_PATTERN
    return _OF_STEPS._replace(
        agrees=f"the steps equal a full pass within {error_text(of_steps)}, the pattern gives the output"
    )


def decode_view(record: Record, options: ViewOptions, screen: Screen) -> RenderableType:
    """The complete output of `mha decode`.

    A step is a line; in the verbose view, and if heads, sequences or decimals are chosen, a block. Raises `UsageError`
    for a head or sequence out of range.
    """
    decoding = record.decoding
    if decoding is None:
        return Text("this record holds no decoding")
    check = record.self_check
    head: RenderableType = configuration(record, screen.width)
    costs_of, compared = _formulas, _of_steps_and_pattern(record)
    if record.model is not None:
        head, costs_of = model_header(record, record.model, screen), _formulas_of_model
        compared = _OF_STEPS
        record = record.of_layer(0)
    sequences = chosen(options.sequences, len(record.sequences), MAX_SEQUENCES, options.everything, "sequence").shown
    heads = chosen(options.heads, record.config.n_heads, MAX_HEADS, options.everything, "head").shown
    has_blocks = options.verbose or options.everything or options.precision != ViewOptions.precision
    has_blocks = has_blocks or options.heads is not None or options.sequences is not None
    sections: list[RenderableType] = [
        head,
        _introduction(record, decoding, has_rows=has_blocks),
        *groups_table(record, screen),
    ]
    steps = [(step, step.cache) for step in record.trace if step.cache is not None]
    shown = balanced(len(steps), len(steps) if options.everything else MAX_STEPS)
    if has_blocks:
        for place, number in enumerate(shown.shown):
            if shown.hidden and place == shown.before:
                sections.append(Text(f"⋮ {count_of(shown.hidden, 'step')} not drawn (--all)", style="dim"))
            sections.append(_step(record, *steps[number], sequences, heads, options, screen))
    else:
        most = None if options.everything else MAX_STEPS
        of_steps = step_table([cache for _, cache in steps], sequences, most)
        sections.append(Group(*table(of_steps, screen.width, _MORE)))
    sections += [costs_of(record, decoding), self_check_line(check, compared)]
    return Group(sections[0], *(part for section in sections[1:] for part in (Text(""), section)))


_OF_CACHE = ("multi-query attention", "grouped-query attention")
"""The variants that make a cache smaller."""


def _introduction(record: Record, decoding: DecodeSummary, *, has_rows: bool) -> Text:
    prompt = f"prefill of {count_of(decoding.prompt_len, 'token')}, then " if decoding.prompt_len else ""
    text = Text(f"cache {visible(decoding.cache)}: ", style="bold").append(
        "the model's own" if record.model is not None else _KEPT.get(decoding.cache, ""), style="not bold"
    )
    text.append(f"\n{prompt}one token at a time: its query meets the keys of all tokens so far", style="not bold")
    if has_rows:
        text.append(
            "\nper head, the newest query's row: key, position, weight; * the largest; long rows show the largest weights only",
            style="not bold dim",
        )
    for name, words in variants(record.facts).items():
        if name in _OF_CACHE:
            text.append(f"\n{name}: {words.why}", style="not bold italic")
    return text


def step_table(steps: Sequence[CacheStep], sequences: Sequence[int], most: int | None = None) -> Table[int]:
    """A row for each step: the new tokens of some sequences, the number of keys, and the bytes read and added."""

    def cached(of: Callable[[CacheStep], int]) -> Callable[[int], int | None]:
        return lambda n: of(steps[n]) if steps[n].cache_bytes else None

    return Table(
        columns=(
            column("decode", "number", lambda n: n, "integer"),
            column("decode", "phase", lambda n: steps[n].phase, drop=2),
            column("decode", "tokens", lambda n: _new_tokens(steps[n], sequences), least=_LEAST_TOKENS),
            column("decode", "sees", lambda n: steps[n].start + steps[n].q_shape[2], "integer"),
            column("decode", "appends", cached(lambda step: step.appended_bytes), "bytes", drop=1),
            column("decode", "reads", cached(lambda step: step.read_bytes), "bytes"),
            column("decode", "difference", lambda n: steps[n].max_abs_difference, "number", drop=3),
        ),
        rows=range(len(steps)),
        most=most,
        has_ends=True,
    )


def _new_tokens(cache: CacheStep, sequences: Sequence[int]) -> str:
    return " | ".join(new_tokens_text(cache.tokens[b], _KEYS_SHOWN) for b in sequences if b < len(cache.tokens))


def _step(
    record: Record,
    step: Step,
    cache: CacheStep,
    sequences: tuple[int, ...],
    heads: tuple[int, ...],
    options: ViewOptions,
    screen: Screen,
) -> Group:
    n_new = step.shape[1]
    names = _new_tokens(cache, sequences)
    title = Text(f"{visible(step.site)} · {cache.phase} · ", style="bold").append(names, style="bold cyan")
    room = screen.width - _INDENT
    lines: list[RenderableType] = [
        Text("\n".join(filled(parts, room))) for parts in (_shapes(cache), _traffic(cache, n_new))
    ]
    lines += _pattern_rows(record, (cache.start, cache.start + n_new), sequences, heads, options, room)
    check = [
        f"largest difference from the full recomputation: {number_text(cache.max_abs_difference)}",
        f"{count_text(step.flops)} FLOPs",
        seconds_text(step.time_s),
    ]
    lines.append(Text("\n".join(filled(check, room)), style="dim"))
    return Group(title_rule(title), Padding(Group(*lines), (0, 0, 0, _INDENT)))


def _shapes(cache: CacheStep) -> list[str]:
    """The shapes of the new tensors, and of all keys so far."""
    new = [
        f"{name} {list(shape)}" for name, shape in (("q", cache.q_shape), ("k", cache.k_shape), ("v", cache.v_shape))
    ]
    if not cache.cache_bytes:
        return ["computes " + new[0], *new[1:]]
    length = cache.start + cache.k_shape[2]
    met = [list((*shape[:2], length, *shape[3:])) for shape in (cache.k_shape, cache.v_shape)]
    return ["new " + new[0], *new[1:], f"attends to k {met[0]}", f"v {met[1]}"]


def _traffic(cache: CacheStep, n_new: int) -> list[str]:
    if not cache.cache_bytes:
        return [f"keys and values of all {count_of(cache.start + n_new, 'token')} recomputed, nothing is stored"]
    room_made = f" in room for {bytes_text(cache.cache_bytes)}" if cache.cache_bytes > cache.read_bytes else ""
    return [
        f"appends {bytes_text(cache.appended_bytes)} to {count_of(cache.n_past, 'token')} before",
        f"reads {bytes_text(cache.read_bytes)}",
        f"cache {bytes_text(cache.read_bytes)}{room_made}",
    ]


def _pattern_rows(
    record: Record,
    span: tuple[int, int],
    sequences: tuple[int, ...],
    heads: tuple[int, ...],
    options: ViewOptions,
    room: int,
) -> Iterator[RenderableType]:
    """The newest query's row in each head and sequence: all keys in order, or the top ones of many."""
    if "pattern" not in record.arrays:
        return
    for b in sequences:
        first = record.first_query(b)
        query = min(span[1], first + len(record.sequences[b].tokens)) - 1 - first
        if query < max(0, span[0] - first):  # only padding in this step
            continue
        for h in heads:
            label = (f"sequence {b} · " if len(sequences) > 1 else "") + f"head {h}  "
            words = _row_words(HeadPattern(record, b, h, "pattern"), query, options)
            lines = filled(words, max(20, room - len(label)), ", ")
            yield Text(label, style="dim").append(("\n" + " " * len(label)).join(lines), style="not dim")


def _row_words(head: HeadPattern, query: int, options: ViewOptions) -> list[str]:
    weights, allowed = head.weights[query], head.allowed[query]
    keys = [key for key in range(len(weights)) if allowed[key]]
    is_whole = not any(math.isnan(weights[key]) for key in keys)
    strongest = sorted(keys, key=lambda key: (-float(weights[key]), key)) if is_whole else keys
    is_long = len(keys) > _KEYS_SHOWN and not options.everything
    listed = strongest[:_KEYS_SHOWN] if is_long else keys
    words = [
        f"{token_text(head.record.keys[head.sequence], head.key_index(key))} {head.key_index(key)} "
        f"{weight_text(float(weights[key]), options.precision)}{'*' if is_whole and key == strongest[0] else ''}"
        for key in listed
    ]
    if is_long:
        rest = float(sum(weights[key] for key in strongest[_KEYS_SHOWN:]))
        words.append(f"{count_of(len(keys) - len(listed), 'key')} more {weight_text(rest, options.precision)}")
    return words or ["no visible key"]


def _formulas(record: Record, decoding: DecodeSummary) -> RenderableType:
    """FLOPs and bytes by formula with this layer's numbers, and the length at which cache traffic exceeds weight
    traffic."""
    c, batch = record.config, len(record.sequences)
    n_kv, widths = c.n_kv_heads or c.n_heads, (c.d_head or 0) + (c.d_v or 0)
    item = decoding.token_bytes // (n_kv * widths) if n_kv * widths else 0
    lines = [
        f"FLOPs of a cached step (products and biases): batch · ({row_flops(c):,} to project + "
        f"2 · {c.n_heads} heads · (d_head + d_v) · T); without a cache T times as many",
        f"cache: batch · T · n_kv_heads · (d_head + d_v) · {item} B = {batch} · T · {bytes_text(decoding.token_bytes)}; "
        "a step reads all of it once",
        "moved per step: preallocated T + 1 tokens, concat 3T − 1, none 2T",
        _weights_line(decoding),
    ]
    if c.window is not None:
        lines.append(
            f"all keys and values are kept and read here; the window needs only the last {c.window[0] + 1:,}"
            + (f" and the first {c.sink:,}" if c.sink else "")
        )
    if c.heads_per_kv_head > 1:
        lines.append(
            f"{count_of(n_kv, 'kv head')} instead of {c.n_heads}: {bytes_text(decoding.token_bytes)} per token instead of "
            f"{bytes_text(decoding.full_token_bytes)}, {c.heads_per_kv_head} × less to keep and to read"
        )
    elif c.n_heads > 1:
        lines.append(f"with --kv-heads 1 the cache would be {c.n_heads} × smaller per token")
    return Group(Text("what it costs", style="bold"), *(Text(line) for line in lines))


def _formulas_of_model(record: Record, decoding: DecodeSummary) -> RenderableType:
    """The size of a model's cache, and the length at which reading it exceeds reading the weights."""
    n_layers = 0 if record.model is None else record.model.n_layers
    lines = [
        f"cache of all {count_of(n_layers, 'layer')}: {bytes_text(decoding.token_bytes)} for every token of every sequence",
        _weights_line(decoding, None if record.model is None else record.model.max_positions),
    ]
    if decoding.full_token_bytes != decoding.token_bytes:
        lines.append(
            f"with one kv head per query head the cache would take {bytes_text(decoding.full_token_bytes)} per token"
        )
    return Group(Text("what it costs", style="bold"), *(Text(line) for line in lines))


def _weights_line(decoding: DecodeSummary, max_positions: int | None = None) -> str:
    """The length from which the cache is larger than the weights, and whether the model has that many positions."""
    is_beyond = max_positions is not None and decoding.crossing_len > max_positions
    return (
        f"weights: every step reads all {bytes_text(decoding.weight_bytes)}; beyond T = {_tokens(decoding.crossing_len)} tokens "
        + (f"(this model ends at {max_positions:,}) " if is_beyond else "")
        + "it reads more cache than weights"
    )


def _tokens(length: float) -> str:
    return f"{length:,.0f}" if length >= 10 else f"{length:.1f}"
