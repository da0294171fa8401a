"""`mha trace` and `mha decode` of a layer: it is observed site by site, with one cell in full or
the mask alone; or it runs token by token with a KV cache.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, linear

from mhacli.attention import masks
from mhacli.attention.axes import Axes
from mhacli.attention.core import Tap, no_tap
from mhacli.attention.devices import choose_device
from mhacli.attention.layer import KvCache, TokenVectors
from mhacli.attention.masks import both
from mhacli.attention.taps import Stopwatch, largest_difference, step_of
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.record.checks import SelfCheck
from mhacli.record.record import CacheStep, Cell, DecodeSummary, Record, ScorePart, Step
from mhacli.record.sites import CacheKind, alibi_slopes, moved_bytes, step_flops, token_bytes
from mhacli.run import CellIndex, Run
from mhacli.settings import ROPE, Config
from mhacli.text.tokens import Texts

from .run import Setup, make_axes, make_record, mask_of_run, record_run


@torch.no_grad()
def walk(
    request: Run,
    texts: Texts,
    *,
    route: str = "separate",
    values: bool = False,
    place: CellIndex | None = None,
) -> Record:
    """A record whose trace follows `route`; with `values`, a summary of each tensor's numbers, and
    with a `place`, which counts tokens, all numbers of one cell. Raises `MhaError` as `inspect`
    does.
    """
    setup = Setup(request, texts)
    record, tensors = record_run(setup, route=route, values=values)
    if place is None:
        return record
    rotated = {name: tensors.get(f"{name}_rot", tensors[name]) for name in ("q", "k")}
    cell = cell_of(
        setup.axes,
        place,
        {**tensors, **rotated},
        scale=setup.config.scale or 0.0,
        softcap=setup.config.softcap,
        parts=tuple(_parts(setup, tensors, place)),
    )
    return replace(record, cell=cell)


# ----------------------------------------------------------------------------------------- one cell


def cell_of(
    axes: Axes,
    place: CellIndex,
    tensors: Mapping[str, Tensor],
    **described: Any,
) -> Cell:
    """One cell. `tensors` has queries, keys and values, the matrices of each query head, and as
    `weights` the weights after any dropout. `described` are the other fields of `Cell`.
    """
    b, h, query, key = place
    i, j = axes.cell(place)
    first, allowed = axes.keys.first(b), tensors["allowed"]
    keys = slice(first, first + len(axes.keys.ids[b]))
    names = ("q", "k", "v", "qk", "scores", "pattern", "weights", "z")
    # query heads may share those of keys and values
    n_heads = tensors["qk"].shape[1]
    q, k, v, qk, scores, pattern, weights, z = (
        tensors[name][b, h * tensors[name].shape[1] // n_heads] for name in names
    )
    return Cell(
        sequence=b,
        head=h,
        query=query,
        key=key,
        q=_numbers(q[i]),
        k=_numbers(k[j]),
        v=_numbers(v[j]),
        qk=finite(qk[i, j].item()),
        allowed=bool(allowed[b, min(h, allowed.shape[1] - 1), i, j]),
        score=finite(scores[i, j].item()),  # None where it is masked
        scores_row=_numbers(scores[i, keys]),
        pattern_row=_numbers(pattern[i, keys]),
        share=finite(weights[i, j].item()),
        z=_numbers(z[i]),
        **described,
    )


def _parts(setup: Setup, tensors: Mapping[str, Tensor], place: CellIndex) -> Iterator[ScorePart]:
    """The terms of the score before the mask, in float64. Up to rounding they add up to the
    score.
    """
    b, h, query, key = place
    i, j = setup.axes.cell(place)
    config, scale, softcap = setup.config, setup.config.scale or 0.0, setup.config.softcap
    kv_head = h // config.heads_per_kv_head

    def scaled_product(q: Tensor, k: Tensor) -> float:
        return scale * float(q[b, h, i].double() @ k[b, kv_head, j].double())

    scaled = unrotated = scaled_product(tensors["q"], tensors["k"])
    if config.positions in ROPE:
        scaled = scaled_product(tensors["q_rot"], tensors["k_rot"])
        places = setup.axes.keys.places[b]  # those of the queries too
        yield ScorePart("scale · q · k, before the rotation", "content", finite(unrotated))
        name = f"change by the rotation, distance {abs(places[query] - places[key])}"
        yield ScorePart(name, "position", finite(scaled - unrotated))
    elif config.positions in ("sinusoidal", "learned"):
        yield from _products(setup, place, scale)
    else:
        yield ScorePart("scale · q · k", "content", finite(scaled))
    if softcap is not None:
        capped = softcap * math.tanh(scaled / softcap)
        yield ScorePart("what the softcap changes", "softcap", finite(capped - scaled))
    if "alibi" in tensors:
        slope = alibi_slopes(config.n_heads)[h]
        value = tensors["alibi"].expand(setup.dims.batch, -1, -1, -1)[b, h, i, j].item()
        name = f"−slope {slope:.4g} · distance {round(-value / slope)}"
        yield ScorePart(name, "position", finite(value), added=True)
    if "bias" in tensors:
        value = tensors["bias"][b, h, i, j].item()
        yield ScorePart("the bias of the file", "given", finite(value), added=True)


def _products(setup: Setup, place: CellIndex, scale: float) -> Iterator[ScorePart]:
    """The expansion of `q · k` with `q = W(content + position) + b`: four products, with biases
    counted as content.

    Source: Dai et al. 2019, "Transformer-XL", section 3.3, which names the four terms of absolute
    positions.
    """
    layer, sides = setup.layer.attention, []
    b, h, *_ = place
    i, j = setup.axes.cell(place)
    for tokens, projection, head, index in (
        (setup.queries, layer.q_proj, h, i),
        (setup.context or setup.queries, layer.k_proj, h // setup.config.heads_per_kv_head, j),
    ):
        rows, added = setup.content(tokens), setup.added(tokens.places)
        assert added is not None, "positions are added to the rows"
        columns = slice(head * layer.d_head, (head + 1) * layer.d_head)
        weight, bias = (
            None if p is None else p[columns].cpu().double()
            for p in (projection.weight, projection.bias)
        )
        content, position = (
            part[b, index].cpu().double() for part in (rows, added.expand(rows.shape))
        )
        sides.append(
            {"content": linear(content, weight, bias), "position": linear(position, weight)}
        )
    for (of_query, query), (of_key, key) in product(*(side.items() for side in sides)):
        name = f"{of_query} of the query · {of_key} of the key"
        kind = of_query if of_query == of_key else "both"
        yield ScorePart(name, kind, finite(scale * float(query @ key)))  # type: ignore[arg-type]


def _numbers(tensor: Tensor) -> tuple[float | None, ...]:
    return tuple(finite(x) for x in tensor.double().tolist())


# ----------------------------------------------------------------------------------- the mask alone


MAX_BLOCKS = 256
"""The most blocks along the longer side of the map."""
MAX_CELLS = 1 << 34
"""The most cells of a mask to evaluate, which takes minutes."""
_STRIP_CELLS = 1 << 20
"""The most cells to evaluate at a time."""


def masks_of(request: Run, texts: Texts) -> list[dict[str, Any]]:
    """The mask of each sequence, as in JSON: its visible cells, the number of keys that each query
    sees, padding included, and the visible cells per block of `block` × `block` queries and keys,
    of which the last may be smaller. Raises `MhaError` if the device is missing or there are too
    many cells.
    """
    dims, device = request.dims, choose_device(request.config.device)
    n_asked = dims.batch * dims.q_len * dims.k_len
    if n_asked > MAX_CELLS:
        raise MhaError(
            f"the mask has {n_asked:,} cells; at most {MAX_CELLS:,} are drawn",
            hint="--max-tokens takes a shorter text, --random a smaller shape",
            code="too-large",
        )

    allowed = mask_of_run(make_axes(request, texts, device), dims) or both()
    queries, keys = (
        torch.arange(n, dtype=torch.int32, device=device) for n in (dims.q_len, dims.k_len)
    )
    block = -(-max(dims.q_len, dims.k_len) // MAX_BLOCKS)
    height = block * max(1, _STRIP_CELLS // (dims.batch * dims.k_len * block))
    per_query, counts = [], []
    for q_idx in queries.split(height):
        cells = allowed(q_idx, keys)[:, 0].expand(dims.batch, len(q_idx), dims.k_len).float()
        per_query.append(cells.sum(dim=-1))
        # the sums of blocks
        counts.append(avg_pool2d(cells, block, ceil_mode=True, divisor_override=1))
    rows, blocks = (torch.cat(parts, dim=1).long().tolist() for parts in (per_query, counts))
    n_cells = dims.q_len * dims.k_len
    return [
        {
            "n_visible": sum(row),
            "density": sum(row) / n_cells,
            "visible_per_query": row,
            "n_cells": n_cells,
            "block": block,
            "block_counts": grid,
        }
        for row, grid in zip(rows, blocks, strict=True)
    ]


# ----------------------------------------------------------------------------------------- decoding

_ROWS: Mapping[str, float] = {"qk": 0.0, "scores": -torch.inf, "pattern": 0.0}
"""Sites with one row per query, and the value for keys that a step does not see yet."""


@torch.no_grad()
def decode(request: Run, texts: Texts, *, cache: CacheKind, prompt_len: int) -> Record:
    """A record whose trace has one entry per step: a prefill of `prompt_len` tokens if any, then
    one token at a time.

    Its arrays are the steps' results, row by row. Its self-check is the worse of two: of the output
    against the pattern, and of the steps against a full pass, where both sides round. Raises
    `MhaError` as `inspect` does.
    """
    setup = Setup(request, texts)
    config = setup.config
    x, full = setup.rows(setup.queries), setup.run()
    begun = [(setup.axes.queries.first(b), text.tokens) for b, text in enumerate(texts.sequences)]
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    steps: list[Step] = []

    def take(site: str, tensor: Tensor, **where: Any) -> None:
        (start, end), past = where["span"], where["past"]
        seen["out"] = tensor
        for name in ("qk", "scores", "pattern", "z", "out"):  # later keys keep their initial value
            rows, length = seen[name][..., start - end :, :], x.shape[1]
            shape = (*rows.shape[:-2], length, length if name in _ROWS else rows.shape[-1])
            into = whole.setdefault(name, rows.new_full(shape, _ROWS.get(name, 0.0)))
            into[..., start:end, : rows.shape[-1]] = rows
        whole["v"] = seen["v"] if past is None else past.v
        projection = ""
        if config.out_proj:
            projection = " W_oᵀ + b_o" if config.bias else " W_oᵀ"
        new, known = _span(start, end), _span(0, end)
        cached = () if past is None else (past.k, past.v)
        step = decode_step(
            config,
            (start, end),
            (tensor, full),
            cache=cache,
            scores=seen["scores"],
            cache_bytes=sum(each.untyped_storage().nbytes() for each in cached),
            prompt_len=prompt_len,
            tokens=tuple(
                tokens[max(0, start - begin) : max(0, end - begin)] for begin, tokens in begun
            ),
            site=f"step {len(steps)}",
            formula=f"out = softmax(scale · q[{new}] k[{known}]ᵀ) v[{known}]{projection}",
            flops=step_flops(config, batch=len(tensor), n_new=end - start, length=end, cache=cache),
        )
        steps.append(step)

    run = partial(_run_steps, setup, x, cache, prompt_len)
    watch = Stopwatch(setup.device, then=take)
    run(watch, inside=lambda site, tensor, **_: seen.update({site: tensor}))
    record, _ = make_record(setup, steps, whole, watch.seconds, again=run)
    of_steps = SelfCheck.of(largest_of(record.trace), 2 * record.self_check.tolerance)
    weights = sum(p.nbytes for p in setup.layer.attention.parameters())
    return replace(
        record,
        self_check=max(record.self_check, of_steps, key=lambda check: check.severity),
        decoding=decoding_of(weights, config, cache, prompt_len, batch=len(full)),
    )


def _run_steps(
    setup: Setup, x: TokenVectors, cache: CacheKind, prompt_len: int, tap: Tap, inside: Tap = no_tap
) -> None:
    """Runs all steps over the token vectors of a text. The tap receives each output as `step N`,
    and the tap `inside` the tensors of the layer.
    """
    layer, bias = setup.layer.attention, setup.bias
    past: KvCache | None = None
    batch, length, _ = x.shape
    if cache != "none":
        past = KvCache.empty(layer, batch, room=length if cache == "preallocated" else 0)
    if bias is not None:
        bias = bias.expand(*bias.shape[:-2], length, length)
    for number, (start, end) in enumerate(spans_of(prompt_len, length)):
        first = 0 if past is None else start
        keywords: dict[str, Any] = {
            "places": setup.queries.places[..., first:end],
            "bias": None if bias is None else bias[..., first:end, :end],
            "tap": inside,
        }
        if past is None:
            out = layer(x[:, :end], allowed=setup.allowed, **keywords)[0][:, start:]
        else:
            allowed = masks.shifted(setup.allowed or masks.causal(), start)
            out, _, past = layer.decode(x[:, start:end], past, allowed=allowed, **keywords)
        tap(f"step {number}", out, span=(start, end), past=past)


def _span(start: int, end: int) -> str:
    return str(start) if end == start + 1 else f"{start} … {end - 1}"


# ---------------------------------------------------------------------- steps, also for checkpoints


def spans_of(prompt_len: int, length: int) -> list[tuple[int, int]]:
    """The start and end of each step's new tokens: the prompt at once, then token by token."""
    after = [(t, t + 1) for t in range(prompt_len, length)]
    return [(0, prompt_len), *after] if prompt_len else after


def decode_step(
    config: Config,
    span: tuple[int, int],
    outputs: tuple[TokenVectors, TokenVectors],
    *,
    cache: CacheKind,
    scores: Tensor,
    cache_bytes: int,
    prompt_len: int,
    tokens: tuple[tuple[str, ...], ...],
    **described: Any,
) -> Step:
    """A step of the trace with its `scores`, −∞ at masked cells, and the `outputs` of the step and
    of a full pass. `described` are other fields of `Step`.
    """
    start, end = span
    n_keys = scores.shape[3]
    out, full = outputs
    batch, n_new = len(out), end - start
    n_heads, n_kv_heads = config.n_heads, config.n_kv_heads or config.n_heads
    n_rows, token = (end, 0) if cache == "none" else (n_new, batch * token_bytes(config))
    entry = CacheStep(
        phase="prefill" if start < prompt_len else "decode",
        start=start,
        tokens=tokens,
        q_shape=(batch, n_heads, n_rows, config.d_head or 0),
        k_shape=(batch, n_kv_heads, n_rows, config.d_head or 0),
        v_shape=(batch, n_kv_heads, n_rows, config.d_v or 0),
        n_past=n_keys - n_new,
        n_visible=tuple(scores[:, :, -1].isneginf().logical_not().any(dim=1).sum(dim=1).tolist()),
        read_bytes=n_keys * token,
        appended_bytes=n_new * token,
        moved_bytes=moved_bytes(config, batch=batch, n_new=n_new, length=n_keys, cache=cache),
        cache_bytes=cache_bytes,
        max_abs_difference=finite(largest_difference(out, full[:, start:end])),
    )
    new = "the prompt at once" if start < prompt_len else "one new token"
    return step_of(
        tensor=out,
        axes=("batch", "query", "d_model" if config.out_proj else "head·d_v"),
        meaning=f"{new} over {n_keys} keys and values",
        cache=entry,
        **described,
    )


def largest_of(steps: Sequence[Step]) -> float:
    """The largest difference of a step's output from the full recomputation; infinite if one is not
    finite.
    """
    differences = [step.cache.max_abs_difference for step in steps if step.cache is not None]
    return max((math.inf if error is None else error for error in differences), default=0.0)


def decoding_of(
    weights: int, config: Config, cache: str, prompt_len: int, *, batch: int, n_layers: int = 1
) -> DecodeSummary:
    """What each step reads: the bytes of `weights`, and the keys and values of the layers in a
    `cache`.
    """
    token, of_all = (n_layers * token_bytes(config, n) for n in (config.n_kv_heads, config.n_heads))
    return DecodeSummary(cache, prompt_len, weights, token, of_all, weights / (batch * token))
