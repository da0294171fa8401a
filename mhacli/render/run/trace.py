"""A layer or user code step by step: the walkthrough, how a single attention weight is computed,
decoding, and a mask alone.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import exp, nan, prod
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from mhacli.numbers import shown
from mhacli.record.record import (
    CacheStep,
    Cell,
    CheckpointRecord,
    CodeRecord,
    DecodingRecord,
    Record,
    ScorePart,
    Step,
    UserModule,
    is_a,
)
from mhacli.record.sites import Dims, mask_rules, step_flops, variants
from mhacli.render.base.doc import Column, Grid, Table, column, fields
from mhacli.render.base.format import (
    configuration,
    count_of,
    escaped,
    fitted,
    flowing,
    memory_text,
    rough_note,
    token_of,
    token_text,
)
from mhacli.render.base.grids import grids
from mhacli.render.base.options import Screen, ViewOptions, sequences_to_draw
from mhacli.render.base.terminal import bare, spaced, table
from mhacli.render.checkpoint.header import model_header
from mhacli.render.heads.head_map import sums
from mhacli.settings import ROPE, Config
from mhacli.text.escape import token_label, visible
from mhacli.text.tokens import Texts

from .steps import (
    axes_text,
    kv_heads_line,
    lines_table,
    number_row,
    self_check_line,
    sources_of,
    step_name,
    value_lines,
    weights_of,
)

_INDENT = (0, 0, 0, 3)
_MOST_KEYS = 16
"""The top keys of a row that are listed."""
_TERMS = 4
"""The first terms of a product that are written out."""


def walk(record: Record, screen: Screen, *, in_detail: bool = False) -> Iterator[RenderableType]:
    """The parts of a walkthrough: the configuration, the steps, in detail each as a part of its
    own, and the end. Of a cell only its computation, unless in detail.
    """
    head = header(record, screen, in_brief=not in_detail)
    if record.cell is not None and not in_detail:
        yield Group(head, Text(""), *_cell_story(record, record.cell, screen))
        yield Text("--verbose prints the steps of the whole layer before it\n", "dim")
        yield self_check_line(record.self_check)
        return
    yield Group(head, *_notes(record, in_detail=in_detail))
    if in_detail:
        last = ""
        for n, (step, source) in enumerate(
            zip(record.trace, sources_of(record.trace), strict=True)
        ):
            yield _step_block(n, step, "" if source == last else source, screen)
            last = source
    else:
        yield Group(Text(""), bare(lines_table(record, screen.width), screen.width))
        yield Text("--verbose prints memory, FLOPs, bytes, weights and time of each step", "dim")
    yield closing(record, screen)


def header(record: Record, screen: Screen, *, in_brief: bool = False) -> RenderableType:
    """The configuration and the environment."""
    if is_a(record, CodeRecord):
        return _module_header(record)
    if is_a(record, CheckpointRecord):
        return model_header(record, screen, in_brief=in_brief)
    return configuration(record, screen.width)


def _notes(record: Record, *, in_detail: bool) -> Iterator[RenderableType]:
    """What a layer has beside plain attention, in detail with the reason and the source."""
    if is_a(record, CodeRecord):
        return
    if not is_a(record, CheckpointRecord):
        for name, variant in variants(record.dims).items():
            yield Text(f"{name}: ", "bold").append(visible(variant.explanation), style="not bold")
            if in_detail:
                yield Padding(Text(f"why: {variant.why}\nsource: {variant.source}", "dim"), _INDENT)
    yield from kv_heads_line(record.of_layer(0))


def _step_block(n: int, step: Step, source: str, screen: Screen) -> RenderableType:
    """A step with its formula, what it means, its costs and its values."""
    title = Text(f"{n + 1:2d} {step_name(step)}", "bold cyan")
    title.append(f"  {axes_text(step)}", style="not cyan")
    costs = [
        memory_text(step),
        f"strides ({', '.join(map(str, step.strides))})",
        f"{shown(step.flops, 'count')} FLOPs",
        f"{shown(step.bytes, 'bytes')} {visible(step.dtype)}",
    ]
    if step.time_s is not None:
        costs.append(shown(step.time_s, "seconds"))
    width = screen.width - _INDENT[3]
    parts = [
        Text(source, "green"),
        escaped(step.formula),
        escaped(step.meaning, "italic"),
        escaped(f"! {step.remark}" if step.remark else "", "bold yellow"),
        flowing([*costs, *weights_of(step)], width, style="dim"),
        *map(Text, value_lines(step, width)),
    ]
    return Group(Text(""), title, Padding(Group(*filter(len, parts)), _INDENT))


def closing(record: Record, screen: Screen) -> RenderableType:
    """The end of the walkthrough: totals, the cell, and the self-check."""
    flops = sum(step.flops for step in record.trace)
    n_bytes = sum(step.bytes for step in record.trace if step.built and step.layout == "copy")
    shapes = {
        parameter.name: parameter.shape for step in record.trace for parameter in step.parameters
    }
    parts = [
        f"total {shown(flops, 'count')} FLOPs",
        f"{shown(n_bytes, 'bytes')} in new tensors",
        f"{sum(map(prod, shapes.values())):,} parameters",
    ]
    lines: list[RenderableType] = [Text(""), flowing(parts, screen.width, style="bold")]
    total = record.timings.get("total")
    if total is not None:
        notes = [f"median of {len(total.samples_s)}", rough_note([total])]
        words = f"{shown(total.median_s, 'seconds')} ({', '.join(filter(None, notes))})"
        lines.append(Text(words, "bold"))
    if is_a(record, CodeRecord):
        lines += [Text(""), _result(record.module)]
        check = self_check_line(record.self_check, "an untraced call gives the same")
    else:
        if record.cell is not None:
            lines += [Text(""), *_cell_story(record, record.cell, screen)]
        check = self_check_line(record.self_check)
    return Group(*lines, Text(""), check)


# --------------------------------------------------------------------------------------------- cell


def _cell_story(record: Record, cell: Cell, screen: Screen) -> Iterator[RenderableType]:
    """The computation of one attention weight, number by number."""
    record = record.of_layer(0)
    query = token_of(record.sequences[cell.sequence], cell.query)
    key = token_of(record.keys[cell.sequence], cell.key)

    def vector(name: str, numbers: Sequence[float | None]) -> Text:
        return Text(f"{name:<8}{number_row(numbers, screen.width - 8)}")

    title = Text(f"cell: head {cell.head}, query {query}, key {key}", "bold")
    yield Rule(title, align="left", style="dim")
    has_rotated = record.config.positions in ROPE and not is_a(record, CheckpointRecord)
    suffix = "_rot" if has_rotated else ""
    yield vector(f"q{suffix}[{cell.query}]", cell.q)
    yield vector(f"k{suffix}[{cell.key}]", cell.k)
    products = [
        a * b for a, b in zip(cell.q, cell.k, strict=False) if a is not None and b is not None
    ]
    terms = [f"({_text(x)})" if x < 0 else _text(x) for x in products[:_TERMS]]
    if len(products) > _TERMS:
        terms.append(f"… {len(products) - _TERMS} more")
    yield Text(f"q · k = {' + '.join(terms)} = {_text(cell.qk)}")
    yield _score(cell)
    if len(cell.parts) > 1:
        parts = [
            {"part of the score": visible(part.name), "": _part_text(part)} for part in cell.parts
        ]
        yield bare(Table(fields({"part of the score": "word", "": "id"}), parts), screen.width)
    softmax = _softmax_table(record, cell)
    yield Text(f"\n{softmax.title}".rstrip())
    yield Group(bare(softmax, screen.width), Text(""))
    yield vector(f"v[{cell.key}]", cell.v)
    weight = cell.share
    before = cell.pattern_row[cell.key]
    note = "" if weight == before else f" (after dropout; before it {_text(before)})"
    term = f"{_text(weight)}{note} × v[{cell.key}]"
    yield Text(f"z[{cell.query}] = Σ attention weight × v over the keys; {key} adds {term}:")
    yield vector("added", [None if x is None or weight is None else weight * x for x in cell.v])
    yield vector(f"z[{cell.query}]", cell.z)


def _score(cell: Cell) -> Text:
    """The score in a sentence."""
    if not cell.allowed:
        is_given = any(part.kind == "given" and part.value is None for part in cell.parts)
        why = ": the score bias is −∞ here" if is_given else ""
        return Text(f"this cell is masked{why}; its score is −∞, its attention weight exactly 0")
    words = f"score = {_text(cell.qk)} × scale {_text(cell.scale)}"
    if cell.softcap is not None:
        words += f", then {cell.softcap:g} · tanh(score / {cell.softcap:g})"
    for part in cell.parts:
        if part.added:
            words += f", plus {visible(part.name)} = {_text(part.value)}"
    return Text(f"{words} = {_text(cell.score)}, not masked")


def _part_text(part: ScorePart) -> str:
    return "−∞" if part.value is None and part.kind == "given" else _text(part.value)


def _softmax_table(record: Record, cell: Cell) -> Table[Sequence[int]]:
    """The softmax over the query's row: exp of each score minus the largest, divided by their sum,
    and the sums over all keys. The cell's own key is marked. Of a long row the top keys are listed.
    """
    scores = cell.scores_row
    weights = [nan if weight is None else weight for weight in cell.pattern_row]
    largest = max((score for score in scores if score is not None), default=0.0)
    exps = [
        0.0 * weight if score is None else exp(score - largest)
        for score, weight in zip(scores, weights, strict=True)
    ]
    total = range(len(weights))

    def is_masked(key: int) -> bool:
        return scores[key] is None and weights[key] == 0

    n_visible = sum(not is_masked(key) for key in total)
    top = sorted(total, key=lambda key: -(cell.pattern_row[key] or 0.0))[:_MOST_KEYS]
    rows = sorted({cell.key, *top})

    def token(keys: Sequence[int]) -> str:
        if keys is total:
            return "" if len(rows) == len(total) else f"of all {count_of(n_visible, 'visible key')}"
        return f"“{token_text(record.keys[cell.sequence].tokens, keys[0])}”"

    def score(keys: Sequence[int]) -> str:
        if keys is total:
            return ""  # a score is masked, or no number, and then its weight is none either
        return "−∞" if is_masked(keys[0]) else _text(scores[keys[0]])

    def sum_of(numbers: Sequence[float]) -> Callable[[Sequence[int]], float]:
        return lambda keys: sum(numbers[key] for key in keys)

    def style(keys: Sequence[int]) -> str:
        return "bold" if keys == [cell.key] else ""

    columns: list[Column[Sequence[int]]] = [
        Column("", lambda keys: "→" if keys == [cell.key] else ""),
        Column("key", lambda keys: "sum" if keys is total else keys[0], unit="id"),
        Column("", token, least=1),
        Column("score", score, unit="id"),
        Column("exp(score − max)", sum_of(exps), unit="number", drop=1),
        Column("weight", sum_of(weights), unit="number"),
    ]
    columns = [replace(column, style=style) for column in columns]
    title = "" if len(rows) == len(total) else _title_of_some(cell, top, n_visible)
    return Table(columns, [[key] for key in rows], foot=[total], title=title)


def _title_of_some(cell: Cell, top: Sequence[int], n_visible: int) -> str:
    """What the rows of the `top` keys and of the traced one are."""
    words = f"the {count_of(min(len(top), n_visible), 'largest weight')} of the row"
    return words if cell.key in top else f"{words}, and key {cell.key}"


def _text(number: float | None) -> str:
    """A number of the record, in which null is not a number."""
    return "nan" if number is None else shown(number, "number")


# ---------------------------------------------------------------------------------------- user code

_MAX_PRINTED = 3
"""The most lines of what a module printed."""


def _module_header(record: CodeRecord) -> RenderableType:
    """The target, its arguments with guesses marked, the call, the sizes of the trace, and the
    first lines that were printed.
    """
    module = record.module
    names = [argument.name for argument in module.arguments]
    whole = [
        a for a in module.arguments if not any(name.startswith(f"{a.name}.") for name in names)
    ]
    lines = [(module.target, "bold")]
    for label, origin in (("given", "given"), ("by default", "default"), ("guessed", "guessed")):
        words = [
            f"{a.name}={a.value} ({a.why})" if a.why else f"{a.name}={a.value}"
            for a in whole
            if a.origin == origin
        ]
        if words:
            lines.append((f"{label}: {', '.join(words)}", ""))
    environment = record.environment
    versions = [
        "in eval",
        record.config.dtype,
        environment.device,
        f"torch {environment.torch}",
        f"mha {environment.mha}",
    ]
    lines += [
        (f"called: {module.called}", ""),
        (f"sizes: {' · '.join(f'{word} {size}' for word, size in module.sizes)}", "bold"),
        ("axes are named by their sizes", "dim"),
        (" · ".join(versions), "dim"),
    ]
    printed = [text.strip() for text in module.printed.splitlines() if text.strip()]
    if printed:
        first = " / ".join(printed[:_MAX_PRINTED])
        if len(printed) > _MAX_PRINTED:
            first += f" … {len(printed) - _MAX_PRINTED} more"
        lines.append((f"it printed: {first}", "dim"))
    return Text("\n").join(escaped(*line) for line in lines if line[0])


def _result(module: UserModule) -> Text:
    """Whether the result has the shape of attention's output."""
    has_heads = len(module.expected) == 4
    shape = "[batch, head, query, width]" if has_heads else "[batch, query, width]"
    result = f"result: {list(module.result)}"
    if module.result == module.expected:
        return Text(f"{result} = {shape}, the shape that attention gives", "bold")
    expected = f"{list(module.expected)} = {shape}"
    return Text(f"! {result}, where attention gives {expected}", "bold yellow")


# ----------------------------------------------------------------------------------------- decoding

MAX_STEPS = 16
"""The most steps of decoding in a table."""
_LEAST_TOKENS = 12
"""The least width of the column of new tokens."""


def decode_view(record: DecodingRecord, options: ViewOptions, screen: Screen) -> RenderableType:
    """The output of `mha decode`: a line for each step. Raises `UsageError` for a sequence out of
    range.
    """
    head = header(record, screen, in_brief=True)
    compared = "the steps equal a full pass"
    if not is_a(record, CheckpointRecord):
        compared += " and the pattern gives the output"
    cache = escaped(f"cache: {record.decoding.cache}", "bold")
    sequences = sequences_to_draw(options, len(record.sequences)).shown
    most = None if options.everything else MAX_STEPS
    return spaced(
        [
            Group(head, cache, *kv_heads_line(record.of_layer(0))),
            Group(*table(step_table(record, sequences, most), screen.width)),
            _costs(record, screen),
            self_check_line(record.self_check, compared),
        ]
    )


def step_table(
    record: DecodingRecord, sequences: Sequence[int], most: int | None = None
) -> Table[int]:
    """A row for each step that has a cache: the new tokens of some sequences, the number of keys,
    and the bytes read and added, by one layer of a checkpoint.
    """
    steps = record.trace
    of_layer = f" of {record.layers[0].label}" if is_a(record, CheckpointRecord) else ""
    caches = [step.cache for step in steps if step.cache is not None]

    def cached(value: Callable[[CacheStep], int]) -> Callable[[int], int | None]:
        return lambda n: value(caches[n]) if caches[n].cache_bytes else None

    def new_tokens(n: int) -> str:
        texts = [caches[n].tokens[b] for b in sequences if b < len(caches[n].tokens)]
        return " | ".join(" ".join(map(token_label, tokens)) or "padding" for tokens in texts)

    def n_keys(n: int) -> int | str | None:
        counts = [caches[n].n_visible[b] for b in sequences if b < len(caches[n].n_visible)]
        return counts[0] if len({*counts}) == 1 else " | ".join(map(str, counts)) or None

    has_words = any(isinstance(n_keys(n), str) for n in range(len(caches)))
    columns: list[Column[int]] = [
        column("decode", "number", lambda n: n, "integer"),
        column("decode", "phase", lambda n: caches[n].phase, drop=2),
        column("decode", "tokens", new_tokens, least=_LEAST_TOKENS),
        column("decode", "sees", n_keys, "id" if has_words else "integer"),
        column(
            "decode",
            "appends",
            cached(lambda step: step.appended_bytes),
            "bytes",
            drop=1,
            meaning=f"bytes into the cache{of_layer}",
        ),
        column(
            "decode",
            "reads",
            cached(lambda step: step.read_bytes),
            "bytes",
            meaning=f"bytes from the cache{of_layer}",
        ),
        column("decode", "difference", lambda n: caches[n].max_abs_difference, "number", drop=3),
    ]
    return Table(columns, range(len(caches)), most=most, has_ends=True)


def _costs(record: DecodingRecord, screen: Screen) -> Text:
    """The size of the cache, and the length at which reading it exceeds reading the weights; or
    what is computed again without a cache.
    """
    decoding, length = record.decoding, record.decoding.crossing_len
    layers = "" if record.model is None else f" of all {count_of(record.model.n_layers, 'layer')}"
    weights = f"weights: {shown(decoding.weight_bytes, 'bytes')}, which every step reads"
    if decoding.cache == "none":
        return flowing([*_without_cache(record), weights], screen.width)
    beyond = f"{length:,.0f}" if length >= 10 else f"{length:.1f}"
    crossing = f"beyond {beyond} tokens a step reads more cache than weights"
    most = None if record.model is None else record.model.max_positions
    if most is not None and length > most:
        crossing = f"up to the last of {most:,} positions a step reads more weights than cache"
    parts = [
        f"cache{layers}: {shown(decoding.token_bytes, 'bytes')} for every token of every sequence",
        weights,
        crossing,
    ]
    return flowing(parts, screen.width)


def _without_cache(record: DecodingRecord) -> Iterator[str]:
    """The tokens whose keys and values are computed, and the operations, without and with a
    cache.
    """
    config, steps, n_rows, flops = record.of_layer(0).config, record.trace, list[int](), 0
    for step in steps:
        if step.cache is not None:
            batch, _, length, _ = step.cache.q_shape
            n_new = length - step.cache.n_past
            n_rows.append(length)
            flops += step_flops(
                config, batch=batch, n_new=n_new, length=length, cache="preallocated"
            )
    tokens = count_of(sum(n_rows), "token")
    yield f"keys and values computed: {tokens} per sequence, with a cache {n_rows[-1]:,}"
    total = shown(sum(step.flops for step in steps), "count")
    yield f"operations: {total}, with a cache {shown(flops, 'count')}"


# ----------------------------------------------------------------------------------------- the mask

Mask = Mapping[str, Any]
"""The mask of a sequence, as in JSON."""


def mask_view(dims: Dims, texts: Texts, masks: Sequence[Mask], screen: Screen) -> RenderableType:
    """The rules, then a picture and the density for each sequence. Long texts are pooled to
    blocks.
    """
    rules = [*map(visible, mask_rules(dims))] or ["every key is visible"]
    parts: list[RenderableType] = [flowing(["mask", *rules], screen.width, style="bold")]
    for index, mask in enumerate(masks):
        counts = mask["visible_per_query"]
        n_cells = mask["n_cells"]
        n_visible = mask["n_visible"]
        title = f"{len(counts)} queries × {n_cells // len(counts)} keys"
        if len(masks) > 1:
            title = f"sequence {index}: {title}"
        density = (
            f"density {100 * mask['density']:.3g} %: {n_visible:,} of {n_cells:,} cells are visible"
        )
        if min(counts) == max(counts):
            keys = f"every query sees {count_of(counts[0], 'key')}"
        else:
            mean = shown(n_visible / len(counts), "short")
            keys = f"a query sees {min(counts):,} to {max(counts):,} keys, mean {mean}"
        picture = grids([_grid(dims.config, texts, mask, index, title)], screen, form="shades")
        parts += [Text(""), *picture, flowing([density, keys], screen.width, style="bold")]
    return Group(*parts)


def mask_document(dims: Dims, texts: Texts, masks: Sequence[Mask], command: tuple[str, ...]) -> str:
    """The masks as one JSON document, schema `mha.mask/1`."""
    sequences, context = texts
    content = {
        "schema": "mha.mask/1",
        "command": command,
        "config": asdict(dims.config),
        "sequences": [asdict(sequence) for sequence in sequences],
        "context": None if context is None else [asdict(sequence) for sequence in context],
        "rules": mask_rules(dims),
        "masks": masks,
    }
    return json.dumps(content, allow_nan=False) + "\n"


def _grid(config: Config, texts: Texts, mask: Mask, index: int, title: str, merge: int = 1) -> Grid:
    """The visible part of each cell, or of blocks of `merge` cells. Keys are numbered as tokens of
    their text.
    """
    n_visible = mask["visible_per_query"]
    side = mask["block"] * merge
    q_len = len(n_visible)
    k_len = mask["n_cells"] // q_len
    queries = texts[0][index].tokens
    keys = (texts[1] or texts[0])[index].tokens
    first_key = config.first_column(len(keys), k_len)
    heights, widths = (np.minimum(side, n - np.arange(0, n, side)) for n in (q_len, k_len))
    counts = sums(sums(np.array(mask["block_counts"]), merge), merge, axis=1)
    places = [key - first_key for key in range(0, k_len, side)]
    if side == 1:
        first_query = config.first_column(len(queries), q_len)
        rows = [fitted(token_text(queries, row - first_query), 12) for row in range(q_len)]
        beside = [Column[int]("sees", n_visible.__getitem__, unit="integer")]
        meaning = "each row: the keys that a query sees"
    else:
        rows = [*map(str, range(0, q_len, side))]
        beside = []
        meaning = f"each cell {side} × {side} tokens"

    def smaller(n_rows: int, n_columns: int) -> Grid:
        factor = max(1, -(-len(counts) // n_rows), -(-counts.shape[1] // n_columns))
        return _grid(config, texts, mask, index, title, factor * merge)

    return Grid(
        title=title,
        values=counts / (heights[:, None] * widths),
        allowed=counts > 0,
        rows=rows,
        columns=[str(place) if 0 <= place < len(keys) else "–" for place in places],
        top=1.0,
        corner="query",
        meaning=meaning,
        places=places,
        beside=beside,
        has_all_rows=True,
        smaller=smaller,
    )
