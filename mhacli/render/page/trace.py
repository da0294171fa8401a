"""The steps of a run or of decoding as tables, and the end of the walkthrough."""

from __future__ import annotations

from collections.abc import Iterator

from mhacli.record.record import CacheStep, Record, Step, TensorSummary
from mhacli.render.base.format import (
    bytes_text,
    count_text,
    is_masked,
    memory_text,
    new_tokens,
    number_text,
    seconds_text,
    trace_totals,
    values_text,
)
from mhacli.render.base.options import Screen
from mhacli.render.page.elements import Html, joined, preformatted, table, tag, text
from mhacli.render.run.trace import closing, repeats_text, source_line
from mhacli.render.run.view import axes_text, self_check_line
from mhacli.sites import SITES
from mhacli.text.escape import visible

_STORY = Screen(width=100, colour=False)
_MOST_TOKENS = 12


def walkthrough(record: Record) -> Html:
    """A section with the steps of a run or of decoding, in the order of execution; empty without steps."""
    if not record.trace:
        return Html("")
    if record.decoding is not None:
        body = [_decoding(record)]
    else:
        body = [_steps(record), *_closing(record)]
    return tag("section", tag("h2", text("shapes, step by step")), *body, id="walk")


def _closing(record: Record) -> Iterator[Html]:
    """The end of the walkthrough; for head statistics, which keep no tensors, their cost."""
    if record.survey is None:
        yield preformatted(closing(record, _STORY), _STORY.width)
        return
    flops, n_bytes, _ = trace_totals(record.trace)
    cost = f"{count_text(flops)} FLOPs, {bytes_text(n_bytes)} in new tensors"
    yield tag("p", text(f"these steps alone: {cost}"), class_="bold")
    left_out = "attention itself and what follows are not counted: mha heads computes them part by part"
    total = record.timings.get("total")
    timed = "" if total is None else f". All of it, attention too, took {seconds_text(total.median_s)}"
    yield tag("p", text(left_out + timed))
    yield preformatted(self_check_line(record.self_check), _STORY.width)


def _steps(record: Record) -> Html:
    has_values = any(step.values is not None for step in record.trace)
    is_timed = any(step.time_s is not None for step in record.trace)
    headings = ["step", "axes", "what", "memory", "FLOPs", "size"]
    headings += (["time"] if is_timed else []) + (["values"] if has_values else [])
    rows = []
    for number, step in enumerate(record.trace, 1):
        row = [_site(number, step), _axes(step), _what(step), text(memory_text(step))]
        row += [
            _unbroken(count_text(step.flops)),
            joined([_unbroken(bytes_text(step.bytes)), text(visible(step.dtype))], " "),
        ]
        row += [_unbroken(seconds_text(step.time_s))] if is_timed else []
        row += [_values(step, step.values)] if has_values else []
        rows.append(row)
    return table("steps in the order of execution, a tensor each", headings, rows)


def _site(number: int, step: Step) -> Html:
    """The number and name of a step, with the site's explanation as tooltip, if any."""
    name = text(f"{number} {visible(step.site)}")
    return tag("span", name, title=" ".join(SITES[step.site].in_general())) if step.site in SITES else name


def _unbroken(number: str) -> Html:
    """A number that stays on one line with its unit."""
    return text(number.replace(" ", "\u00a0"))


def _axes(step: Step) -> Html:
    return text(axes_text(step.axes, step.shape) + repeats_text(step))


def _what(step: Step) -> Html:
    """The line of user code, formula, meaning, remarks and weights of a step."""
    lines = [tag("code", text(line.plain)) for line in source_line(step)]
    lines += [tag("code", text(visible(step.formula)))] if step.formula else []
    lines += [tag("span", text(visible(step.meaning)))] if step.meaning else []
    lines += [tag("span", text(f"! {visible(step.remark)}"), class_="warning")] if step.remark else []
    named = ", ".join(f"{visible(weight.name)} {list(weight.shape)}" for weight in step.parameters)
    lines += [tag("span", text(f"weights: {named}"), class_="dim")] if named else []
    return joined(lines, "<br>")


def _values(step: Step, values: TensorSummary | None) -> Html:
    """Range, distribution, non-finite counts, and the numbers themselves if kept."""
    if values is None:
        return Html("")
    cells = values_text(step, values)
    if values.numbers is None:
        return text(cells)
    width = max(1, step.shape[-1] if step.shape else 1)
    missing = "−∞" if is_masked(step) else "not finite"
    shown = [missing if number is None else f"{number:.4g}" for number in values.numbers]
    lines = (" ".join(f"{number:>10}" for number in shown[i : i + width]) for i in range(0, len(shown), width))
    numbers = tag("details", tag("summary", text("numbers")), tag("pre", text("\n".join(lines))))
    return joined([text(cells), numbers], "")


# ---------------------------------------------------------------------------------------------------------- decoding


def _decoding(record: Record) -> Html:
    headings = (
        "step",
        "new tokens",
        "q",
        "k",
        "v",
        "kept before",
        "appends",
        "reads",
        "cache",
        "FLOPs",
        "time",
        "difference",
    )
    rows = [_decoded(step, step.cache) for step in record.trace if step.cache is not None]
    return table(
        "one token at a time: what each step reads of the past; difference: from a full recomputation", headings, rows
    )


def _decoded(step: Step, cache: CacheStep) -> list[Html]:
    shapes = [str(list(shape)) for shape in (cache.q_shape, cache.k_shape, cache.v_shape)]
    sizes = [bytes_text(n) for n in (cache.appended_bytes, cache.read_bytes, cache.cache_bytes)]
    cells = [*shapes, str(cache.n_past), *sizes, count_text(step.flops), seconds_text(step.time_s)]
    name = text(f"{visible(step.site)}, {cache.phase}")
    return [name, _new_tokens(cache), *map(_unbroken, cells), text(number_text(cache.max_abs_difference))]


def _new_tokens(cache: CacheStep) -> Html:
    """The new tokens of each sequence, the first few of many."""
    families = []
    for tokens in cache.tokens:
        labels, rest = new_tokens(tokens, _MOST_TOKENS)
        shown = [tag("bdi", text(label), class_="token") for label in labels]
        families.append(joined([*shown, *([text(rest)] if rest else [])], " "))
    return joined(families, " | ")
