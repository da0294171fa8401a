"""A mask alone: its rules, a picture of the visible keys of each query, and JSON of schema `mha.mask/1`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.render.base.colours import EMPTY
from mhacli.render.base.format import count_of, filled, fitted, title_rule, token_text
from mhacli.render.base.options import Screen, balanced
from mhacli.render.run.view import MAX_SEQUENCES
from mhacli.sites import mask_rules
from mhacli.text.escape import visible
from mhacli.text.tokens import TokenSequence

if TYPE_CHECKING:
    from mhacli.run import Run

MASK_SCHEMA = "mha.mask/1"
Mask = Mapping[str, Any]
"""The mask of a sequence, as in JSON."""
_LABEL_WIDTH, _COUNT_WIDTH, _MAX_NAMED, _MAX_LINES = 12, 6, 32, 64
_SEEN, _UNSEEN = "■", "·"
_VISIBLE = "cyan"
_PARTLY = "░▒▓"


def mask_view(run: Run, masks: Sequence[Mask], screen: Screen) -> RenderableType:
    """The rules, then a picture and the density for each sequence. Long texts are pooled to blocks."""
    rules = [visible(rule) for rule in mask_rules(run.facts)] or ["every key is visible"]
    parts: list[RenderableType] = [Text("\n".join(filled(["mask", *rules], screen.width)), style="bold")]
    shown = balanced(len(masks), MAX_SEQUENCES)
    for place, index in enumerate(shown.shown):
        if shown.hidden and place == shown.before:
            parts.append(Text(f"⋮ {count_of(shown.hidden, 'sequence')} not drawn", style="dim"))
        parts += [Text(""), *_sequence_parts(run, masks[index], index, screen)]
    return Group(*parts)


def mask_document(run: Run, masks: Sequence[Mask], command: tuple[str, ...]) -> str:
    """The masks as one JSON document, schema `mha.mask/1`."""
    texts = run.encoded
    content = {
        "schema": MASK_SCHEMA,
        "command": command,
        "config": asdict(run.config),
        "sequences": [asdict(sequence) for sequence in texts.sequences],
        "context": None if texts.context is None else [asdict(sequence) for sequence in texts.context],
        "rules": mask_rules(run.facts),
        "masks": masks,
    }
    return json.dumps(content, allow_nan=False) + "\n"


def _sequence_parts(run: Run, mask: Mask, index: int, screen: Screen) -> Iterator[RenderableType]:
    texts, q_len = run.encoded, len(mask["visible_per_query"])
    k_len = mask["n_cells"] // q_len
    n_real = len(texts.sequences[index].tokens) * len((texts.context or texts.sequences)[index].tokens)
    yield title_rule(f"sequence {index}: {q_len} queries × {k_len} keys")
    room = screen.width - _LABEL_WIDTH - 1 - _COUNT_WIDTH
    cell_width = 2 if 2 * k_len <= room else 1
    if mask["block"] == 1 and q_len <= _MAX_NAMED and k_len * cell_width <= room:
        yield _named_cells(run, mask, index, cell_width)
    else:
        yield _blocks(mask, k_len, max(1, room))
    counts = mask["visible_per_query"]
    padded = ", padding counted" if q_len * k_len > n_real else ""
    yield Text(
        f"density {100 * mask['density']:.3g} %: {mask['n_visible']:,} of {mask['n_cells']:,} cells are visible{padded} · "
        f"a query sees {min(counts):,} to {max(counts):,} keys, mean {_mean(mask['n_visible'] / q_len)}",
        style="bold",
    )


def _named_cells(run: Run, mask: Mask, index: int, cell_width: int) -> Text:
    """Every cell with token names. Keys are numbered as tokens of their text; – is padding."""
    sequence, k_len = run.encoded.sequences[index], run.facts.k_len
    first = run.config.first_column(len(sequence.tokens), len(mask["visible_per_query"]))
    keys = (run.encoded.context or run.encoded.sequences)[index]
    indices = [key - run.config.first_column(len(keys.tokens), k_len) for key in range(k_len)]
    digits = [str(i % 10) if 0 <= i < len(keys.tokens) else "–" for i in indices]
    picture = Text()
    if len(keys.tokens) > 10:
        tens = [str(i // 10) if i % 10 == 0 and 0 < i < len(keys.tokens) else "" for i in indices]
        picture.append(
            " " * (_LABEL_WIDTH + 1) + "".join(f"{ten:<{cell_width}}" for ten in tens).rstrip() + "\n", style="dim"
        )
    picture.append(
        " " * (_LABEL_WIDTH + 1) + "".join(f"{digit:<{cell_width}}" for digit in digits) + "  sees", style="dim"
    )
    for row, blocks in enumerate(mask["block_counts"]):
        picture.append("\n").append_text(_label(sequence, row - first)).append(" ")
        for seen in blocks:
            picture.append(f"{_SEEN if seen else _UNSEEN:<{cell_width}}", style=_VISIBLE if seen else EMPTY)
        picture.append(f"  {mask['visible_per_query'][row]:,}", style="dim")
    return picture.append(f"\n{_SEEN} visible, {_UNSEEN} masked", style="dim")


def _label(sequence: TokenSequence, index: int) -> Text:
    name = fitted(token_text(sequence, index), _LABEL_WIDTH)
    is_real = 0 <= index < len(sequence.tokens)
    return Text(name + " " * (_LABEL_WIDTH - cell_len(name)), style="bold" if is_real else "dim")


def _blocks(mask: Mask, k_len: int, room: int) -> Text:
    """Marks for blocks of cells, fuller with more visible cells."""
    q_len = len(mask["visible_per_query"])
    n_rows, n_columns = len(mask["block_counts"]), len(mask["block_counts"][0])
    merge = max(1, -(-n_columns // room), -(-n_rows // _MAX_LINES))
    side = mask["block"] * merge
    lines = [Text(f"{'':{_LABEL_WIDTH}} keys from left to right, each mark {side} × {side} cells", style="dim")]
    for top in range(0, n_rows, merge):
        line = Text().append(f"{top * mask['block']:>{_LABEL_WIDTH}} ", style="dim")
        height = min(side, q_len - top * mask["block"])
        for left in range(0, n_columns, merge):
            seen = sum(sum(row[left : left + merge]) for row in mask["block_counts"][top : top + merge])
            part = seen / (height * min(side, k_len - left * mask["block"]))
            line.append(_mark(part), style=_VISIBLE if part else EMPTY)
        lines.append(line)
    lines.append(Text(f"{_SEEN} all of a block is visible, {_PARTLY} part of it, {_UNSEEN} nothing", style="dim"))
    return Text("\n").join(lines)


def _mean(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _mark(part: float) -> str:
    if part in (0, 1):
        return _SEEN if part else _UNSEEN
    return _PARTLY[min(2, int(3 * part))]
