"""The reports of `mha weights` and `mha vocab`: the contents of a checkpoint or a vocabulary, and of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mhacli.io.files import format_size
from mhacli.render.base.format import count_of, filled, fitted, left_out, plain_table
from mhacli.render.base.options import Screen, balanced
from mhacli.settings import ROPE, Config
from mhacli.text.escape import token_label, visible
from mhacli.text.vocabulary import Entry

if TYPE_CHECKING:  # a vocabulary needs no checkpoint code
    from mhacli.commands.weights.contents import Contents, StackAttention

MAX_FILES = 8
_NAME_ROOM = 24


def contents_view(contents: Contents, on: Screen, *, with_tensors: bool) -> RenderableType:
    """A headline, a line per attention, dtypes and files; `with_tensors` adds every tensor."""
    kind = "a layer of mha" if contents.kind == "layer" else f"family {contents.family or 'unknown'}"
    kind += f" · layout {contents.layout}" if contents.layout not in (None, "mha", contents.family) else ""
    parts = [
        kind,
        count_of(contents.n_parameters, "parameter", grouped=True),
        count_of(contents.n_tensors, "tensor", grouped=True),
        format_size(contents.n_bytes),
        count_of(len(contents.files), "file"),
    ]
    lines: list[RenderableType] = [
        Text(visible(contents.path), style="bold"),
        Text("\n".join(filled([visible(part) for part in parts], on.width))),
        _facts(contents),
        _attentions(contents.attentions),
        _table(
            [("dtype", False), ("tensors", True), ("parameters", True), ("bytes", True)],
            [(d.dtype, f"{d.n_tensors:,}", f"{d.n_parameters:,}", format_size(d.n_bytes)) for d in contents.dtypes],
        ),
        _files(contents, on),
    ]
    if with_tensors:
        lines.append(_tensors(contents, on))
    return Group(*lines)


def _facts(contents: Contents) -> RenderableType:
    facts = [] if contents.vocabulary is None else [f"vocabulary {contents.vocabulary:,}"]
    facts += [] if contents.positions is None else [f"positions {contents.positions:,}"]
    return Text(" · ".join(facts)) if facts else Text("vocabulary and positions: not given", style="dim")


def _attentions(kinds: Sequence[StackAttention]) -> RenderableType:
    if not kinds:
        return Text("no attention that is known", style="dim")
    columns = ["layers", "heads", "kv heads", "d_head", "d_model", "biases", "KV cache per token"]
    rows = [
        (
            kind.stack,
            *("–" if n is None else str(n) for n in (kind.n_layers, kind.n_heads, kind.n_kv_heads, kind.d_head)),
            "–" if kind.d_model is None else str(kind.d_model),
            kind.biases or "none",
            "–" if kind.cache_bytes is None else format_size(kind.cache_bytes),
        )
        for kind in kinds
    ]
    return _table([("attention", False), *((name, True) for name in columns)], rows)


def _files(contents: Contents, on: Screen) -> RenderableType:
    """Name and size of each file; the first and last of many."""
    width = max(_NAME_ROOM, on.width - 12)
    shown = balanced(len(contents.files), MAX_FILES)
    rows = []
    for place, index in enumerate(shown.shown):
        if shown.hidden and place == shown.before:
            rows.append((f"⋮ {shown.hidden} more", ""))
        name, n_bytes = contents.files[index]
        rows.append((fitted(visible(name), width), format_size(n_bytes)))
    return _table([("file", False), ("bytes", True)], rows)


def _tensors(contents: Contents, on: Screen) -> RenderableType:
    room = max(_NAME_ROOM, on.width - 38)
    rows = [
        (fitted(visible(t.name), room), t.dtype, " × ".join(map(str, t.shape)) or "scalar", format_size(t.n_bytes))
        for t in contents.tensors
    ]
    return _table([("tensor", False), ("dtype", False), ("shape", False), ("bytes", True)], rows)


def _table(columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> Table:
    table = plain_table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def converted_view(document: Mapping[str, Any]) -> RenderableType:
    """Three or four lines: source and target, config, vocabulary, and the check."""
    c, check = document["config"], document["check"]
    stack = "" if document["stack"] == "self" else f" of the {document['stack']}"
    head = f"layer {document['layer']}{stack} · layout {document['layout']} · {document['prefix'] or 'no prefix'}"
    if document["to"] != "mha":
        head = f"layout {document['layout']} · {document['prefix'] or 'no prefix'}"
    lines = [
        Text(visible(f"{document['output']}: {head}"), style="bold"),
        Text(" · ".join(_sizes(c))),
    ]
    words = document["embedding"]
    if words is not None:
        named = f"vocabulary of {words['vocabulary']:,}" if words["vocabulary"] else "no vocabulary"
        lines.append(Text(f"embedding of {words['rows']:,} tokens · {named}"))
    lines.append(
        Text(
            f"check: q, k, v and out in float64, source against result, differ by {check['max_abs_error']:.2g} at most "
            f"(tolerance {check['tolerance']:.2g})"
        )
    )
    return Group(*lines, Text(f"{format_size(document['n_bytes'])} written"))


def _sizes(c: Mapping[str, Any]) -> list[str]:
    parts = [f"d_model {c['d_model']}", f"{count_of(c['n_heads'], 'head')} × d_head {c['d_head']}"]
    parts += [count_of(c["n_kv_heads"], "kv head")] if c["n_kv_heads"] != c["n_heads"] else []
    parts += [f"d_v {c['d_v']}"] if c["d_v"] != c["d_head"] else []
    parts += [] if c["bias"] else ["no bias"]
    theta = f" (theta {c['rope_theta']:g})" if c["positions"] in ROPE else ""
    rows = f" ({c['max_positions']:,})" if c["positions"] == "learned" else ""
    parts += [f"positions {c['positions']}{theta}{rows}"]
    parts += ["causal"] if c["causal"] else []
    parts += [] if c["window"] is None else [f"window {c['window'][0]} left, {c['window'][1]} right"]
    parts += [] if c["softcap"] is None else [f"softcap {c['softcap']:g}"]
    has_custom_scale = Config(scale=c["scale"], d_head=c["d_head"]).has_custom_scale
    return parts + ([f"scale {c['scale']:g}"] if has_custom_scale else []) + [c["dtype"]]


# -------------------------------------------------------------------------------------------------------- vocabularies


MAX_ROWS = 24
_LEAST_ROOM = 5


def vocabulary_table(
    rows: Sequence[Entry], n_distinct: int, n_tokens: int, *, everything: bool, on: Screen
) -> RenderableType:
    """Token, id, count and bytes; the first and last rows of a long vocabulary. The caption counts all tokens."""
    table = plain_table()
    table.add_column("id", justify="right")
    table.add_column("token", no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("bytes", justify="right")
    room = max(_LEAST_ROOM, on.width - _numbers_width(rows))
    shown = balanced(len(rows), len(rows) if everything else MAX_ROWS)
    for place, index in enumerate(shown.shown):
        if shown.hidden and place == shown.before:
            table.add_row("⋮", left_out(shown.hidden))
        row = rows[index]
        name = fitted(token_label(row.token), room)
        table.add_row(str(row.id), Text(name, style="bold"), f"{row.count:,}", str(row.bytes))
    caption = f"{count_of(n_tokens, 'token')}, {n_distinct} distinct"
    return Group(Text(caption, style="bold"), table)


def _numbers_width(rows: Sequence[Entry]) -> int:
    ids = max(len("id"), *(len(str(row.id)) for row in rows))
    counts = max(len("count"), *(len(f"{row.count:,}") for row in rows))
    sizes = max(len("bytes"), *(len(str(row.bytes)) for row in rows))
    return ids + counts + sizes + 3 * 2
