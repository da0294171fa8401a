"""What to type after a comparison: whole commands that show more of what it names first."""

from collections.abc import Iterator, Sequence

from mhacli.cli.next_steps import NextStep, show_head
from mhacli.cli.source import record_command
from mhacli.render.base.options import ViewOptions
from mhacli.settings import Source

from .request import DiffRequest, Side
from .result import ModelDiff, ModelDocument, RecordDiff
from .sites import labels_of
from .view import by_size, shown_layers
from .words import times_rounding


def steps_of_records(d: RecordDiff, options: ViewOptions) -> Iterator[NextStep]:
    """The head of the table that changed most in both records, or that of the first site with heads
    that differs.
    """
    layers = shown_layers(d, options)
    heads = [(head.layer, head.head) for head in by_size(h for each in layers for h in each.heads)]
    for layer in layers:
        for site in layer.sites:
            if site.departs and site.heads and layer.layer in labels_of(d.records[0]):
                largest = max(site.heads, key=lambda gap: gap.largest or 0.0)
                heads.append((layer.layer, largest.head))
    if not heads:
        yield from _all_of(d, options)
        return
    label, head = heads[0]
    for letter, path, record in zip("AB", (d.document.a, d.document.b), d.records, strict=True):
        if record.effect is not None or record.decoding is not None:
            continue
        view = record.attentions[labels_of(record).index(label)]
        for step in show_head(path, view, head):
            yield step._replace(about=f"{step.about} of {letter}")


def steps_of_models(
    d: ModelDiff, request: DiffRequest, source: Source, options: ViewOptions
) -> Iterator[NextStep]:
    """The attention of the first layer that differs in each checkpoint, or the ids where the
    embedding differs.
    """
    first, text = d.document.first, _text(source)
    if first is None:
        yield from _in_float32(d.document, request)
        yield from _all_of(d, options)
    elif text and request.tokenizer is None:
        shown: tuple[str, ...] = ("--tokens", "--view", "none")
        about = "lists the ids"
        if first.layer is not None:
            captured = {place.of_layer for place in d.document.places if place.site == "pattern"}
            if first.of_layer not in captured:
                return
            shown = ("--layer", ".".join(map(str, filter(None, (first.stack, str(first.layer))))))
            about = f"draws the attention of layer {first.layer}"
            if first.head is not None and not first.site.startswith(("k", "v")):
                shown += ("--head", str(first.head))
                about = f"draws head {first.head} of layer {first.layer}"
        elif first.part != "embedding":
            return
        steps = [
            NextStep(
                ("run", *text, "--model", side.word, *_settings(side, request), *shown),
                f"{about} of {letter}",
            )
            for letter, side in zip("AB", request.sides, strict=True)
            if side.kind == "checkpoint" and _is_plain((side.word,))
        ]
        yield from steps[: None if first.layer is not None else 1]  # both read the same ids


def _in_float32(d: ModelDocument, request: DiffRequest) -> Iterator[NextStep]:
    """The same in float32, where one rounding step of 16 bits is less than the difference."""
    words, has_16_bits = [*_repeatable()], {"float16", "bfloat16"} & {*d.dtypes}
    if "--dtype" in words:
        at = words.index("--dtype")
        del words[at : at + 2]
    elif request.dtype is not None:
        return
    is_loaded = all(side.kind in ("checkpoint", "code") for side in request.sides)
    is_near = any(times_rounding(place) > 1 for place in d.places)
    if words and has_16_bits and is_loaded and is_near and request.dtype_b is None:
        yield NextStep((*words, "--dtype", "float32"), "compares with less rounding")


def _repeatable() -> Sequence[str]:
    """The words of this command, none if they cannot be typed again with others behind them."""
    words = record_command()[1:]
    is_clear = all(map(str.isprintable, words)) and not {"-", "--"} & {*words}
    return words if is_clear else ()


def _all_of(d: RecordDiff | ModelDiff, options: ViewOptions) -> Iterator[NextStep]:
    """All that was compared, if the two agree."""
    words = _repeatable()
    if words and d.verdict == "agree" and not options.everything:
        yield NextStep((*words, "--all"), "lists all that is compared")


def _text(source: Source) -> tuple[str, ...]:
    """The words of the one text that was read, none where it cannot be read again."""
    is_usual = Source(typed=source.typed, text=source.text, file=source.file) == source
    words = (
        *source.typed,
        *(word for text in source.text for word in ("--text", text)),
        *(word for path in source.file for word in ("--file", path)),
    )
    n = len(source.typed) + len(source.text) + len(source.file)
    texts = (*source.typed, *source.text, *source.file)
    return words if is_usual and n == 1 and _is_plain(texts) else ()


def _is_plain(words: Sequence[str]) -> bool:
    """Whether words can be printed, and are read as no options."""
    return all(word.isprintable() and not word.startswith("-") for word in words)


def _settings(side: Side, request: DiffRequest) -> Iterator[str]:
    """The options with which a side was loaded and read."""
    settings = {"dtype": side.dtype, "device": side.device, "revision": side.revision}
    for name, value in settings.items():
        if value not in (None, "auto"):
            yield from (f"--{name}", str(value))
    if request.max_tokens is not None:
        yield from ("--max-tokens", str(request.max_tokens))
