"""The header of a checkpoint's view: the model, how attention was captured, and which layers are
unverified.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.record.record import InspectedLayer, Model, Record
from mhacli.render.base.format import (
    agreement,
    checks_in_brief,
    count_of,
    flowing,
    lengths_in_words,
    self_check_verdict,
    texts_in_words,
)
from mhacli.render.base.options import Screen
from mhacli.render.base.selection import by_layers, names_of
from mhacli.text.escape import visible
from mhacli.text.numbers import shown

_CAPTURES = {
    "registry": "captured in transformers' attention registry",
    "module": "captured in the model's own eager_attention_forward",
    "sdpa": "captured in torch's scaled_dot_product_attention",
    "softmax": "captured at its softmax: weights and values, but no queries and keys",
}
_SINKS = "sink logits (s_aux), which entropy counts as one more key"


def model_header(
    record: Record, model: Model, screen: Screen, *, in_brief: bool = False
) -> RenderableType:
    """The model, what was read, how its attention differs from plain attention, whether inspection
    changed anything, and the unverified layers; unless `in_brief` also how its layers were
    captured.
    """
    path = Text(visible(model.path), style="bold")
    inspected = {(layer.kind, layer.layer) for layer in record.layers}
    has_all = len(inspected) + len(model.without) >= model.n_layers * len(
        {kind for kind, _ in inspected}
    )
    layers = count_of(model.n_layers, "layer") + (
        "" if has_all else f", {names_of(record.layers)} inspected"
    )
    words = [layers, *by_layers(record.layers, _heads)]
    words += [f"revision {visible(model.revision)}"] if model.revision else []
    words += [
        visible(model.dtype),
        visible(record.environment.device),
        *texts_read(record),
        *_masks_and_scores(record),
    ]
    lines: list[RenderableType] = [flowing([path, *words, *_proof(record, model)], screen.width)]
    if not in_brief:
        lines.append(flowing(_details(record, model), screen.width, style="dim"))
    return Group(*lines, *_generated(record, model, screen), *_unverified(record))


def texts_read(record: Record) -> list[str]:
    """The texts in words; for a corpus the number of documents, the devices if there are several,
    and the example.
    """
    corpus = record.corpus
    if corpus is None:
        return texts_in_words(record.files, *record.lengths)
    n_tokens = f"{corpus.n_tokens:,} tokens, {corpus.longest:,} at most"
    parts = [f"{count_of(corpus.n_documents, 'document')} with {n_tokens}"]
    parts += [f"{count_of(corpus.n_bad, 'bad document')} left out"] if corpus.n_bad else []
    parts += (
        [f"on different devices: {', '.join(corpus.devices)}"] if len(corpus.devices) > 1 else []
    )
    of_example = (
        f"patterns of one document, {corpus.example_named}: {lengths_in_words(record.lengths[0])}"
    )
    return [*map(visible, parts), "means over documents", visible(of_example)]


def _generated(record: Record, model: Model, screen: Screen) -> Iterator[Text]:
    """The text that the model generated, and how much of it one pass over the whole text
    reproduces.
    """
    generated = model.generated
    if generated is None:
        return
    summary = f"{count_of(generated.n_tokens, 'token')} generated greedily"
    repeated = (
        f"one pass over the whole text reproduces {generated.repeated} of {generated.n_tokens}"
    )
    style = "green" if generated.repeated == generated.n_tokens else "yellow"
    yield flowing([summary, Text(repeated, style=style)], screen.width)
    text, n = record.sequences[0], generated.prompt_lens[0]
    begin = text.offsets[n][0] if n < len(text.offsets) else len(text.text)
    yield Text(f"generated: “{visible(text.text[begin:])}”", style="bold")


def _heads(layer: InspectedLayer) -> str:
    heads = count_of(layer.n_heads, "head")
    if not any(check.is_of_outputs for check in layer.survey.checks):
        return heads
    if layer.captured_by == "softmax":
        return f"{heads} × d_v {layer.d_v}"
    sizes = f"{heads} × d_head {layer.d_head}" + (
        f" and d_v {layer.d_v}" if layer.d_v != layer.d_head else ""
    )
    return sizes + (
        f", {count_of(layer.n_kv_heads, 'kv head')}" if layer.n_kv_heads != layer.n_heads else ""
    )


def _proof(record: Record, model: Model) -> Iterator[Text]:
    """The inspected path, and whether its outputs equal those without inspection."""
    yield Text(f"attention: {visible(model.path_inspected)}", style="bold")
    families = (record.sequences, record.context or ())
    longest = max(len(sequence.tokens) for family in families for sequence in family)
    part = f" (first {model.compared_len} tokens)" if model.compared_len < longest else ""
    if model.identical_outputs:
        yield Text(f"inspecting changed no bit of the outputs{part}", style="green")
    elif model.identical_outputs is False:
        yield Text(f"inspecting CHANGED the outputs{part}", style="bold red")


def _details(record: Record, model: Model) -> Iterator[str]:
    """The model and the libraries, how layers were captured, each text with its layers, and what
    that cost.
    """
    layers, environment = record.layers, record.environment
    yield from (
        visible(model.family),
        visible(model.architecture),
        f"{shown(model.n_parameters, 'count')} parameters",
    )
    limit = "" if model.max_positions is None else f", up to {model.max_positions:,}"
    yield f"positions {visible(model.positions)}{limit}"
    yield from (f"torch {visible(environment.torch)}", f"mha {visible(environment.mha)}")
    yield from by_layers(
        layers, lambda layer: _CAPTURES.get(layer.captured_by, visible(layer.captured_by))
    )
    yield from by_layers(
        layers,
        lambda layer: "" if layer.captured_by == "softmax" else f"kernel {visible(layer.kernel)}",
    )
    total, loading = record.timings.get("total"), record.timings.get("loading")
    if total is not None:
        loading_part = (
            "" if loading is None else f", including {shown(loading.median_s, 'seconds')} to load"
        )
        yield f"took {shown(total.median_s, 'seconds')}{loading_part}"


def _masks_and_scores(record: Record) -> Iterator[str]:
    """The masks, and what else the scores have beside those of plain attention."""

    def mask(layer: InspectedLayer) -> str:
        return "no mask" if layer.mask == "all keys" else f"mask: {visible(layer.mask)}"

    def scale(layer: InspectedLayer) -> str:
        is_usual = layer.scale is None or f"{layer.scale * layer.d_head**0.5:.4g}" == "1"
        return "" if is_usual else f"scale {layer.scale:.4g}"

    layers = record.layers
    yield from (*by_layers(layers, mask), *by_layers(layers, scale))
    yield from by_layers(
        layers, lambda layer: "" if layer.softcap is None else f"softcap {layer.softcap:g}"
    )
    yield from by_layers(layers, lambda layer: "a bias on the scores" * layer.bias)
    yield from by_layers(layers, lambda layer: _SINKS * layer.sinks)
    yield from by_layers(layers, lambda layer: " · ".join(map(visible, layer.extras.values())))


# ------------------------------------------------------------------------------------------- checks


def _unverified(record: Record) -> Iterator[Text]:
    """The failed checks of layers, or what else makes them doubtful."""
    for layer in record.layers:
        if not layer.verified:
            failed = [check for check in layer.survey.checks if not check.ok]
            listed = tuple(f"the check '{check.name}'" for check in failed)
            reasons = [
                *map(agreement, failed),
                *(visible(why) for why in layer.unverified if not why.startswith(listed)),
            ]
            yield Text(f"! {layer.label} NOT verified: {'; '.join(reasons)}", style="bold red")


def checks_view(record: Record, screen: Screen, *, in_detail: bool) -> Text:
    """One line if all checks of statistics pass; otherwise, or `in_detail`, each check with its
    largest error in any layer.
    """
    surveys = (
        [layer.survey for layer in record.layers] if record.survey is None else [record.survey]
    )
    checks, ok = [check for survey in surveys for check in survey.checks], record.self_check.ok
    if ok and not in_detail:
        return self_check_verdict(ok=True, numbers=checks_in_brief(checks))
    verdict = self_check_verdict(ok=ok, numbers=count_of(len(checks), "check") if ok else "")
    is_changed = record.model is not None and record.model.identical_outputs is False
    parts = (
        [Text("outputs differ from those without inspection", style="bold red")]
        if is_changed
        else []
    )
    for name in dict.fromkeys(check.name for check in checks):
        worst = max(
            (check for check in checks if check.name == name), key=lambda check: check.severity
        )
        parts.append(Text(agreement(worst), style="dim" if worst.ok else "bold red"))
    return Text("\n").join([verdict, flowing(parts, screen.width)])
