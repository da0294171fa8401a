"""What to type next: whole commands about what is on the screen, which a terminal prints below it
as lines `next:`.

Of the heads on the screen a command names the first of the table if that is in the order of a
statistic; else the one that exceeds uniform attention most, by its type or its nearest type. Where
queries of one text read keys of another, it names one of these heads.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mhacli.numbers import shown
from mhacli.record.heads import UNTYPED, HeadStatistics, nearest_type
from mhacli.record.record import LayerView, Record, texts_of
from mhacli.render.base.format import flowing, token_of
from mhacli.render.base.options import ViewOptions
from mhacli.render.base.selection import chosen_heads
from mhacli.render.checkpoint.effect import removal_name
from mhacli.render.checkpoint.view import listed_heads, sort_of
from mhacli.settings import AttentionKind, Computation, Reading

from .console import stdout_width, write
from .parameters import declarations, running_command, typed_names
from .source import record_command


class NextStep(NamedTuple):
    """The words of a command, and what it shows."""

    words: tuple[str, ...]
    about: str


def print_next_steps(record: Record, options: ViewOptions) -> None:
    """Prints what to type next about a record."""
    name = record_command()[1]
    if name == "run" and record.model is None and not options.verbose:
        more = "more: --tokens, --shapes, --timings or --verbose;"
        _write_filled([*more.split(), "every word:", "mha explain"])
    print_steps(_steps(name, record, options))


def print_steps(steps: Iterable[NextStep]) -> None:
    """Prints commands to type next, each in one line that can be copied, with what it shows as a
    comment.
    """
    for step in steps:
        write(f"next: mha {shlex.join(step.words)}\n")
        _write_filled(["  #", *step.about.split()], "\n  # ")


def _write_filled(words: Iterable[str], between: str = "\n") -> None:
    """Prints words in lines as wide as stdout."""
    text = flowing(words, stdout_width() - 4, " ").plain
    write(text.replace("\n", between) + "\n")


def _steps(name: str, record: Record, options: ViewOptions) -> Iterator[NextStep]:
    match name:
        case "run" | "trace" if record.cell is None and not options.is_mean:
            yield from _trace_of_a_cell(record, options)
        case "heads" if not options.maps:
            yield from _map_of_a_head(record, options)
        case "effect":
            yield from _edges_of_a_head(record)
        case "decode":
            causal = () if record.model or record.config.prefix else ("--causal",)
            if (words := again("run", without=("causal",))) is not None:
                yield NextStep((*words, *causal), "shows all heads over the same text")
        case "show" if options.heads is None and not (options.maps or options.is_mean):
            _, _, *typed = record_command()
            if len(typed) == 1:
                yield from head_of_saved(record, options, typed[0])


_INPUTS = (Computation, Reading)
"""What decides what is computed."""


def again(
    name: str,
    *,
    takes: Iterable[type] = _INPUTS,
    without: Iterable[str] = (),
    inputs: Iterable[type] = _INPUTS,
) -> tuple[str, ...] | None:
    """The words that make `mha NAME`, which `takes` these groups of settings, read and compute the
    same as this command, whose `inputs` decide that, `without` the options of some fields.
    None if it lacks an option of these, if stdin was read, and where a word may be read in two ways
    or cannot be printed.
    """
    _, _, *words = record_command()
    named = {name: each for each in running_command().settings for name in typed_names(each)}
    deciding, known = _fields_of(inputs), _fields_of(takes)
    kept, rest = [name], iter(words)
    for word in rest:
        declared = named.get(word.partition("=")[0]) if word.startswith("-") else None
        field = "typed" if declared is None else declared.field
        whole = [word]
        if declared is not None and "=" not in word and not declared.is_switch:
            whole.append(next(rest))
        # a text such as `my.py:GPT` is code for other commands
        is_clear = declared is not None or not (word.startswith("-") or ".py" in word)
        is_safe = "-" not in whole and all(map(str.isprintable, whole))
        if not (is_clear and is_safe) or (field in deciding and field not in known):
            return None
        if field in deciding and field not in without:
            kept += whole
    return tuple(kept)


def _fields_of(groups: Iterable[type]) -> set[str]:
    """The fields of some groups of settings."""
    return {each.field for group in groups for each in declarations(group)}


def _trace_of_a_cell(record: Record, options: ViewOptions) -> Iterator[NextStep]:
    """The trace of the largest of the weights between tokens that stand out. The first token of a
    checkpoint's text is often a sink.
    """
    cells = [
        (cell, head)
        for head in _on_screen(record, options)
        for cell in head.largest
        if (options.sequences is None or cell.sequence in options.sequences)
        and (_kind(record, head) == "cross" or cell.key != cell.query)
        and (record.model is None or cell.key > 0)
    ]
    words = again("trace", takes=(Computation,), without=("layers",))
    if not cells or words is None:
        return
    cell, head = max(cells, key=lambda each: each[0].share)
    words += (*_layer(record, head), "--cell", f"{head.head},{cell.query},{cell.key}")
    if len(record.sequences) > 1:
        words += ("--sequence", str(cell.sequence))
    texts, contexts = texts_of(_kind(record, head), record.sequences, record.context)
    query = token_of(texts[cell.sequence], cell.query)
    key = token_of(contexts[cell.sequence], cell.key)
    weight = shown(cell.share, "weight", options.precision)
    yield NextStep(
        words, f"computes the weight {weight} of head {head.head}, query {query}, key {key}"
    )


def _layer(record: Record, head: HeadStatistics) -> tuple[str, ...]:
    kind = _kind(record, head)
    name = str(head.layer) if kind == "self" else f"{kind}.{head.layer}"
    return () if record.model is None else ("--layer", name)


def _kind(record: Record, head: HeadStatistics) -> AttentionKind:
    """The kind of attention of a head."""
    kinds: dict[str, AttentionKind] = {layer.name: layer.kind for layer in record.layers}
    return kinds.get(head.attention, "self" if record.context is None else "cross")


def _on_screen(record: Record, options: ViewOptions) -> Sequence[HeadStatistics]:
    """The chosen heads, of cross-attention if there is some."""
    heads = chosen_heads(record, options)
    return [head for head in heads if _kind(record, head) == "cross"] or heads


def _head_to_draw(record: Record, options: ViewOptions) -> HeadStatistics | None:
    """The first head in the order of a statistic, or else that with the largest excess."""
    heads, _ = listed_heads(record, _on_screen(record, options), options)
    if sort_of(record, heads, options) != "head":
        return next(iter(heads), None)

    def excess(head: HeadStatistics) -> float:
        nearest = nearest_type(head)
        if nearest is not None:
            return nearest[1]
        return 0.0 if head.kind in UNTYPED else head.certainty or 0.0

    return max(heads, key=excess, default=None)


def _map_of_a_head(record: Record, options: ViewOptions) -> Iterator[NextStep]:
    words, head = again("heads", without=("layers",)), _head_to_draw(record, options)
    if words is not None and head is not None:
        words += (*_layer(record, head), "--map", str(head.head))
        yield NextStep(words, f"draws head {head.head}")


def head_of_saved(record: Record, options: ViewOptions, path: str) -> Iterator[NextStep]:
    """The head of a record that is saved in a file."""
    head = _head_to_draw(record, options)
    views = {view.name: view for view in record.attentions}
    if head is not None:
        view = views.get(head.attention, next(iter(views.values())))
        yield from show_head(path, view, head.head)


def show_head(path: str, view: LayerView, head: int) -> Iterator[NextStep]:
    """The command that draws a head of an attention of a record, if the record has it and its path
    can be typed.
    """
    is_other = view.record.effect is not None or view.record.decoding is not None
    if is_other or not view.is_drawable or view.inspected.call > 1 or not is_plain(path):
        return
    layer = ("--layer", view.name.replace(" ", ".")) if view.name else ()
    option = "--head" if view.has_pattern else "--map"
    yield NextStep(("show", path, *layer, option, str(head)), f"draws head {head}")


def is_plain(word: str) -> bool:
    """Whether a word can be printed, and is read as no option."""
    return word.isprintable() and not word.startswith("-")


def _edges_of_a_head(record: Record) -> Iterator[NextStep]:
    """The weights of the head whose removal changes most, one by one."""
    summary, words = record.effect, again("effect")
    heads = [each for each in record.effects if each.removed == "head"]
    if summary is None or words is None or not heads:
        return
    strongest = max(heads, key=lambda each: abs(summary.change_of(each) or 0.0))
    name = str(strongest.head)
    if record.model is not None:  # such as `cross 5.1`
        name = removal_name(strongest, record).replace(" ", ".")
    yield NextStep((*words, "--edges", "--head", name), f"removes each weight of head {name}")
