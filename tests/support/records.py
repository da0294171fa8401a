"""Hand-made records: their numbers come from plain numpy, so that files and views are tested without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import numpy as np
from rich.cells import cell_len
from rich.console import Console, RenderableType

from mhacli.results.record.head_statistics import HeadStatistics, Sink
from mhacli.results.record.record import (
    CacheStep,
    CacheTiming,
    Cell,
    DecodeSummary,
    Environment,
    Record,
    RouteCheck,
    SelfCheck,
    Step,
    TensorSummary,
    Timing,
    WeightShape,
)
from mhacli.spec.config import Config
from mhacli.spec.tokens import TokenSequence

D_HEAD = 3
CAT = ("the", "cat", "sat")


def make_sequence(tokens: Sequence[str], vocabulary: Sequence[str]) -> TokenSequence:
    """The tokens as a text with one space between them."""
    offsets, position = [], 0
    for token in tokens:
        offsets.append((position, position + len(token)))
        position += len(token) + 1
    return TokenSequence(" ".join(tokens), tuple(tokens), tuple(map(vocabulary.index, tokens)), tuple(offsets))


def make_record(
    *texts: Sequence[str],
    context: Sequence[Sequence[str]] | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    n_heads: int = 2,
    seed: int = 0,
) -> Record:
    """A record of these sequences of tokens; dropout above 0 means training, and drops every other key."""
    texts = texts or (CAT,)
    vocabulary = sorted({token for text in (*texts, *(context or ())) for token in text})
    sequences = tuple(make_sequence(text, vocabulary) for text in texts)
    keys = None if context is None else tuple(make_sequence(text, vocabulary) for text in context)
    config = Config(
        d_model=n_heads * D_HEAD,
        n_heads=n_heads,
        causal=causal,
        dropout=dropout,
        train=dropout > 0,
        device="cpu",
        out_proj=False,
    ).resolved()
    arrays = _arrays(sequences, keys or sequences, config, seed)
    return Record(
        command=("mha", "run", sequences[0].text),
        config=config,
        sequences=sequences,
        context=keys,
        vocabulary=tuple(vocabulary),
        trace=_trace(arrays),
        heads=tuple(
            HeadStatistics(head=head, entropy=float(arrays["entropy"][:, head].mean()), entropy_share=0.75 - head / 64)
            for head in range(n_heads)
        ),
        timings={
            "qk": Timing(0.5, (0.0041, 0.0042, 0.0043), 0.0042, 0.0001),
            "pattern": Timing(0.004, (0.001, 0.002, 0.003), 0.002, 0.001),
            "total": Timing(0.016, (0.007, 0.008, 0.009), 0.008, 0.001),
        },
        self_check=SelfCheck(1.5e-7, 2e-6, True),
        environment=Environment("0.1.0", "2.6.0", "2.1.0", "3.11.7", "Linux x86_64", "cpu", "a CPU", "auto", 2),
        arrays=arrays,
    )


def _arrays(
    sequences: Sequence[TokenSequence], keys: Sequence[TokenSequence], config: Config, seed: int
) -> dict[str, np.ndarray]:
    batch, n_heads = len(sequences), config.n_heads
    q_len, k_len = (max(len(s.tokens) for s in family) for family in (sequences, keys))
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(batch, n_heads, length, D_HEAD)) for length in (q_len, k_len, k_len))
    allowed = np.zeros((batch, 1, q_len, k_len), bool)
    for b in range(batch):
        allowed[b, 0, : len(sequences[b].tokens), : len(keys[b].tokens)] = True
    allowed &= np.tri(q_len, k_len, dtype=bool) if config.causal else True
    qk = np.einsum("bhqd,bhkd->bhqk", q, k)
    scores = np.where(allowed, qk / D_HEAD**0.5, -np.inf)
    exponentials = np.where(allowed, np.exp(qk / D_HEAD**0.5), 0.0)
    pattern = exponentials / np.where(allowed.any(-1), exponentials.sum(-1), 1.0)[..., None]
    shares = pattern * (np.arange(k_len) % 2 == 0) / (1 - config.dropout) if config.train else pattern
    z = shares @ v
    logarithms = np.log(pattern, out=np.zeros_like(pattern), where=pattern > 0)
    floats = {"qk": qk, "scores": scores, "pattern": pattern, "z": z}
    floats |= {"dropped": shares} if config.train else {}
    floats["out"] = z.transpose(0, 2, 1, 3).reshape(batch, q_len, n_heads * D_HEAD)
    return {
        **{name: array.astype(np.float32) for name, array in floats.items()},
        "allowed": allowed,
        "entropy": np.abs((pattern * logarithms).sum(-1)),
        "strongest_key": np.where(allowed.any(-1), pattern.argmax(-1), -1),
    }


_AXES = {
    "qk": ("batch", "head", "query", "key"),
    "scores": ("batch", "head", "query", "key"),
    "pattern": ("batch", "head", "query", "key"),
    "dropped": ("batch", "head", "query", "key"),
    "z": ("batch", "head", "query", "d_v"),
    "out": ("batch", "query", "head·d_v"),
}


def _trace(arrays: dict[str, np.ndarray]) -> tuple[Step, ...]:
    return tuple(
        Step(
            site=name,
            axes=axes,
            shape=arrays[name].shape,
            dtype="float32",
            formula=f"{name} = the formula of {name}",
            meaning=f"what {name} means",
            layout="copy",
            strides=tuple(n // 4 for n in arrays[name].strides),
            flops=arrays[name].size,
            bytes=arrays[name].nbytes,
            time_s=0.002,
        )
        for name, axes in _AXES.items()
        if name in arrays
    )


def walked(record: Record) -> Record:
    """The record with what only a walkthrough holds: values of tensors, parameters, routes, and the cell (0, 0, 1, 0)."""
    numbers = tuple(float(x) for x in record.arrays["out"].flatten()[:6])
    values = TensorSummary(min(numbers), max(numbers), 0.25, 1.5, (0, 1, 2, 3), 2, 1, numbers)
    last = replace(record.trace[-1], values=values, parameters=(WeightShape("o_proj.weight", (6, 7)),))
    row = slice(0, len(record.keys[0].tokens))
    scores = record.arrays["scores"][0, 0, 1, row].tolist()
    cell = Cell(
        sequence=0,
        head=0,
        query=1,
        key=0,
        q=(1.0, -2.0, 0.5),
        k=(3.0, 1.0, 4.0),
        v=(0.5, 0.25, -1.0),
        qk=3.0,
        scale=D_HEAD**-0.5,
        softcap=None,
        allowed=True,
        score=scores[0],
        scores_row=tuple(score if np.isfinite(score) else None for score in scores),
        pattern_row=tuple(record.arrays["pattern"][0, 0, 1, row].tolist()),
        share=float(record.arrays.get("dropped", record.arrays["pattern"])[0, 0, 1, 0]),
        z=tuple(record.arrays["z"][0, 0, 1].tolist()),
    )
    routes = (
        RouteCheck("separate", ("q_proj", "z", "out"), 0.0, 4e-6, True),
        RouteCheck("fused", ("qkv", "z", "out"), 2.5e-7, 4e-6, True),
    )
    return replace(record, trace=(*record.trace[:-1], last), cell=cell, routes=routes)


def decoded(
    record: Record, *, cache: str = "preallocated", prompt_len: int = 0, ways: tuple[CacheTiming, ...] = ()
) -> Record:
    """The record as if its tokens had come one by one, behind a prompt that came at once.

    Its numbers are easy to follow: step n takes n + 1 ms and 1000 · (n + 1) operations, and differs by (n + 1) · 1e-7.
    """
    c, batch, length = record.config, len(record.sequences), record.facts.q_len
    n_kv_heads, is_kept = c.n_kv_heads or c.n_heads, cache != "none"
    numbers = n_kv_heads * 2 * D_HEAD
    token = batch * numbers * 4
    ends = [*([prompt_len] if prompt_len else []), *range(prompt_len + 1, length + 1)]
    steps = []
    for number, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        n_new = end - start
        begins = [record.first_query(b) for b in range(batch)]
        cached = CacheStep(
            phase="prefill" if number == 0 < prompt_len else "decode",
            start=start,
            tokens=tuple(
                sequence.tokens[max(0, start - first) : max(0, end - first)]
                for sequence, first in zip(record.sequences, begins, strict=True)
            ),
            q_shape=(batch, c.n_heads, n_new if is_kept else end, D_HEAD),
            k_shape=(batch, n_kv_heads, n_new if is_kept else end, D_HEAD),
            v_shape=(batch, n_kv_heads, n_new if is_kept else end, D_HEAD),
            n_past=start,
            read_bytes=end * token if is_kept else 0,
            appended_bytes=n_new * token if is_kept else 0,
            moved_bytes=(end + n_new) * token,
            cache_bytes={"none": 0, "concat": end * token, "preallocated": length * token}[cache],
            max_abs_difference=(number + 1) * 1e-7,
        )
        steps.append(
            Step(
                site=f"step {number}",
                axes=("batch", "query", "head·d_v"),
                shape=(batch, n_new, c.n_heads * D_HEAD),
                dtype="float32",
                formula="out = the formula of a step",
                meaning="what a step means",
                layout="copy",
                strides=(1, 1, 1),
                flops=1000 * (number + 1),
                bytes=batch * n_new * c.n_heads * D_HEAD * 4,
                time_s=(number + 1) / 1000,
                cache=cached,
            )
        )
    summary = DecodeSummary(
        cache=cache,
        prompt_len=prompt_len,
        ways=ways,
        weight_bytes=4 * 1234,
        token_bytes=4 * numbers,
        full_token_bytes=4 * c.n_heads * 2 * D_HEAD,
        crossing_len=1234 / (batch * numbers),
    )
    return replace(record, trace=tuple(steps), decoding=summary)


def with_sinks(record: Record, *places: int) -> Record:
    """The record with heads that say so of the keys at these places of every text: of half of all attention, 5 × uniform."""
    found = tuple(Sink(b, key, 0.5, 0.1) for b in range(len(record.keys)) for key in places)
    return replace(record, heads=tuple(replace(head, sinks=found) for head in record.heads))


def drawn(renderable: RenderableType, width: int) -> list[str]:
    """The lines of a view on a screen without colour. No line may be wider than the screen."""
    paper = StringIO()
    Console(width=width, file=paper, color_system=None, legacy_windows=False).print(renderable)
    lines = [line.rstrip() for line in paper.getvalue().split("\n")]
    assert max(map(cell_len, lines)) <= width
    return lines[:-1]
