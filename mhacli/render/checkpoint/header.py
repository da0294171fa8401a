"""The header of a checkpoint's view: the model, how attention was captured, and which layers are
unverified.
"""

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mhacli.numbers import shown
from mhacli.record.record import CheckpointRecord, InspectedLayer, Record
from mhacli.render.base.format import (
    agreement,
    checks_in_brief,
    count_of,
    escaped,
    flowing,
    lengths_in_words,
    self_check_verdict,
)
from mhacli.render.base.options import Screen
from mhacli.render.base.selection import by_layers, grouped, names_of
from mhacli.text.escape import visible

_CAPTURES = {
    "registry": "captured in transformers' attention registry",
    "module": "captured in the model's own eager_attention_forward",
    "sdpa": "captured in torch's scaled_dot_product_attention",
    "softmax": "captured at its softmax: weights and values, but no queries and keys",
}
_SINKS = "sink logits (s_aux), which entropy counts as one more key"


def model_header(
    record: CheckpointRecord, screen: Screen, *, in_brief: bool = False
) -> RenderableType:
    """The model, what was read, how its attention differs from plain attention, whether inspection
    changed anything, and the unverified layers; unless `in_brief` also how its layers were
    captured.
    """
    model = record.model
    path = escaped(model.title, "bold")
    words = [_layers(record), *by_layers(record.layers, _heads)]
    if model.revision:
        words.append(f"revision {model.revision}")
    words += [
        model.dtype,
        record.environment.device,
        *texts_read(record),
        *_masks_and_scores(record),
    ]
    lines: list[RenderableType] = [
        flowing([path, *map(visible, words), *_proof(record)], screen.width)
    ]
    if not in_brief:
        lines.append(flowing(map(visible, _details(record)), screen.width, style="dim"))
    return Group(*lines, *_generated(record, screen), *_unverified(record))


def _layers(record: CheckpointRecord) -> str:
    """The number of layers, and which were inspected if not all."""
    model = record.model
    inspected = {(layer.kind, layer.layer) for layer in record.layers}
    n_stacks = len({kind for kind, _ in inspected})
    words = count_of(model.n_layers, "layer")
    if len(inspected) + len(model.without) < model.n_layers * n_stacks:
        words += f", {names_of(record.layers)} inspected"
    return words


def texts_read(record: Record) -> list[str]:
    """The input files with token counts: `["poem.txt", "812 tokens"]`, `["2 sequences of 4 to 9
    tokens"]`, of several texts with random weights their vocabulary; for a corpus the number of
    documents, the devices if there are several, and the example.
    """
    corpus = record.scan
    lengths = lengths_in_words(record.sequences)
    if corpus is None:
        parts = [*record.files, lengths]
        if record.context is not None:
            parts.append(f"context of {lengths_in_words(record.context)}")
        n_texts = len(record.sequences) + len(record.context or ())
        if record.model is None and record.words_of_random and record.vocabulary and n_texts > 1:
            parts.append(f"one vocabulary of {count_of(len(record.vocabulary), 'token')}")
        return parts
    n_tokens = f"{corpus.n_tokens:,} tokens, {corpus.longest:,} at most"
    parts = [f"{count_of(corpus.n_documents, 'document')} with {n_tokens}"]
    if corpus.n_bad:
        parts.append(f"{count_of(corpus.n_bad, 'bad document')} left out")
    if len(corpus.devices) > 1:
        parts.append(f"on different devices: {', '.join(corpus.devices)}")
    parts += [
        "means over documents",
        f"patterns of one document, {corpus.example_named}: {lengths}",
    ]
    return parts


def _generated(record: CheckpointRecord, screen: Screen) -> Iterator[Text]:
    """The text that the model generated, and how much of it one pass over the whole text
    reproduces.
    """
    generated = record.model.generated
    if generated is None:
        return
    summary = f"{count_of(generated.n_tokens, 'token')} generated greedily"
    repeated = (
        f"one pass over the whole text reproduces {generated.repeated} of {generated.n_tokens}"
    )
    style = "green" if generated.repeated == generated.n_tokens else "yellow"
    yield flowing([summary, Text(repeated, style)], screen.width)
    text = record.sequences[0]
    n = generated.prompt_lens[0]
    begin = text.offsets[n][0] if n < len(text.offsets) else len(text.text)
    yield escaped(f"generated: “{text.text[begin:]}”", "bold")


def _heads(layer: InspectedLayer) -> str:
    """The heads of a layer with their widths, as far as they are known."""
    heads = count_of(layer.n_heads, "head")
    if not any(check.is_of_outputs for check in layer.survey.checks):
        return heads
    if layer.captured_by == "softmax":
        return f"{heads} × d_v {layer.d_v}"
    heads += f" × d_head {layer.d_head}"
    if layer.d_v != layer.d_head:
        heads += f" and d_v {layer.d_v}"
    if layer.n_kv_heads != layer.n_heads:
        heads += f", {count_of(layer.n_kv_heads, 'kv head')}"
    return heads


def _proof(record: CheckpointRecord) -> Iterator[Text]:
    """The inspected path, and whether its outputs equal those without inspection."""
    model = record.model
    yield escaped(f"attention: {model.path_inspected}", "bold")
    families = (record.sequences, record.context or ())
    longest = max(len(sequence.tokens) for family in families for sequence in family)
    part = f" (first {model.compared_len} tokens)" if model.compared_len < longest else ""
    if model.identical_outputs:
        yield Text(f"inspecting changed no bit of the outputs{part}", "green")
    elif model.identical_outputs is False:
        yield Text(f"inspecting CHANGED the outputs{part}", "bold red")


def _details(record: CheckpointRecord) -> Iterator[str]:
    """The model and the libraries, how layers were captured, each text with its layers, and what
    that cost.
    """
    model = record.model
    yield model.family
    yield model.architecture
    yield f"{shown(model.n_parameters, 'count')} parameters"
    limit = "" if model.max_positions is None else f", up to {model.max_positions:,}"
    yield f"positions {model.positions}{limit}"
    yield f"torch {record.environment.torch}"
    yield f"mha {record.environment.mha}"
    yield from by_layers(
        record.layers, lambda layer: _CAPTURES.get(layer.captured_by, layer.captured_by)
    )
    yield from by_layers(
        record.layers,
        lambda layer: "" if layer.captured_by == "softmax" else f"kernel {layer.kernel}",
    )
    total = record.timings.get("total")
    loading = record.timings.get("loading")
    if total is not None:
        words = f"took {shown(total.median_s, 'seconds')}"
        if loading is not None:
            words += f", including {shown(loading.median_s, 'seconds')} to load"
        yield words


def _masks_and_scores(record: Record) -> Iterator[str]:
    """The masks, and what else the scores have beside those of plain attention."""

    def mask(layer: InspectedLayer) -> str:
        return "no mask" if layer.mask == "all keys" else f"mask: {layer.mask}"

    def scale(layer: InspectedLayer) -> str:
        is_usual = layer.scale is None or f"{layer.scale * layer.d_head**0.5:.4g}" == "1"
        return "" if is_usual else f"scale {layer.scale:.4g}"

    parts: Sequence[Callable[[InspectedLayer], str]] = (
        mask,
        scale,
        lambda layer: "" if layer.softcap is None else f"softcap {layer.softcap:g}",
        lambda layer: "a bias on the scores" if layer.bias else "",
        lambda layer: _SINKS if layer.sinks else "",
        lambda layer: " · ".join(layer.extras.values()),
    )
    for describe in parts:
        yield from by_layers(record.layers, describe)


# ------------------------------------------------------------------------------------------- checks


def _unverified(record: Record) -> Iterator[Text]:
    """The failed checks of layers, or what else makes them doubtful."""
    for layer in record.layers:
        if not layer.verified and layer.self_check.ok is not None:
            failures = [check for check in layer.survey.checks if not check.ok]
            names = tuple(f"the check '{check.name}'" for check in failures)
            reasons = [
                *map(agreement, failures),
                *(visible(why) for why in layer.unverified if not why.startswith(names)),
            ]
            yield Text(f"! {layer.label} NOT verified: {'; '.join(reasons)}", "bold red")


def checks_view(record: Record, screen: Screen, *, in_detail: bool) -> Text:
    """One line if all checks of statistics pass; otherwise, or `in_detail`, each check with its
    largest error in any layer.
    """
    ok = record.self_check.ok
    if ok is None:
        return Text(record.self_check.words, "bold yellow")
    checks = [check for view in record.attentions for check in view.inspected.survey.checks]
    if ok and not in_detail:
        return self_check_verdict(ok=True, numbers=checks_in_brief(checks))
    numbers = count_of(len(checks), "check") if ok else visible(record.self_check.note)
    verdict = self_check_verdict(ok=ok, numbers=numbers if ok is not False else "")
    parts = []
    if record.model is not None and record.model.identical_outputs is False:
        parts.append(Text("outputs differ from those without inspection", "bold red"))
    for same in grouped(checks, lambda check: check.name).values():
        worst = max(same, key=lambda check: check.severity)
        parts.append(Text(agreement(worst), "dim" if worst.ok else "bold red"))
    return Text("\n").join([verdict, flowing(parts, screen.width)])
