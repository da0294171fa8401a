"""The layers that a user's attention may implement: every reading of its weights, with every possible design choice."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.mistakes.stages import Pairing, ReferenceInputs, ReferenceLayer, split
from mhacli.commands.check.inputs import TOLERANCE, InputCase, output_for
from mhacli.commands.check.observed_properties import NO_PROPERTIES, Norm, ObservedProperties, distinct_norms
from mhacli.commands.check.result import CheckRequest
from mhacli.usercode.arguments import Role, role_of
from mhacli.usercode.call.user_attention import UserAttention
from mhacli.usercode.inputs import cast
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import (
    ProjectionReading,
    WeightMatrix,
    Widths,
    is_norm,
    parts_of,
    projection_readings,
    read_name,
)
from mhacli.usercode.target import Choice
from mhacli.usercode.types import Built

_READ = "read from the run"
"""The ending of a choice that a run showed."""
_ROTARY = re.compile(r"(?i)\b(rope|rotary|rotate_half|freqs?_cis|polar)|\.cos\(|\bcos\b")


@dataclass(frozen=True)
class Candidate:
    """A layer that it may implement, with its design choices. `reading` is the source of its weights, None for a function."""

    layer: ReferenceLayer
    choices: tuple[Choice, ...] = ()
    reading: ProjectionReading | None = None


@dataclass(frozen=True)
class IntendedLayer:
    """The layer that options, arguments, documentation and recorded runs (`properties`) describe. `causal` are the open answers
    to whether it masks the future itself."""

    causal: tuple[bool, ...] = (False, True)
    pairings: tuple[Pairing | None, ...] = (None,)
    is_pairing_known: bool = False
    scales: tuple[tuple[float | Tensor | None, Choice | None], ...] = ((None, None),)
    is_scale_known: bool = False
    thetas: tuple[float, ...] = (10000.0,)
    softcap: float | None = None
    scale_words: tuple[str, ...] = ()
    properties: ObservedProperties = NO_PROPERTIES


def candidates(
    subject: UserAttention,
    module: nn.Module | None,
    tensors: Mapping[str, Tensor],
    intended: IntendedLayer,
    request: CheckRequest,
) -> list[Candidate]:
    """Every possible layer, with the fewest choices first. Empty if its projections cannot be identified."""
    n_heads = next(iter(stated_heads(subject.built, module, request)), None)
    rotations = list(_rotation_choices(intended))
    layers = [
        _with(base, intended, causal, rotation, scale)
        for base in _with_observed(_base_layers(subject, module, tensors, request), intended.properties)
        for causal, rotation, scale in product(intended.causal, rotations, _scales_of(base, n_heads, intended))
    ]
    return sorted(layers, key=_n_open)


def _n_open(candidate: Candidate) -> int:
    """The number of choices that no run showed."""
    return sum(_READ not in choice.message for choice in candidate.choices)


def _with_observed(bases: Iterable[Candidate], properties: ObservedProperties) -> Iterator[Candidate]:
    """Layers with the biases and sinks that runs show."""
    choices = []
    if properties.bias is not None:
        choices.append(Choice("score-bias", f"score bias [head, query, key], {_READ}{_at(properties.bias.at)}"))
    if properties.sinks is not None:
        choices.append(Choice("sinks", f"each head has a sink logit, {_READ}{_at(properties.sinks.at)}"))
    logits = None if properties.sinks is None else properties.sinks.logits
    for base in bases:
        layer = replace(base.layer, bias=properties.bias, sinks=logits)
        yield from _with_norms(replace(base, layer=layer, choices=(*base.choices, *choices)), properties)


def _at(line: SourceLine) -> str:
    """A source location as the end of a sentence; empty if unknown."""
    return "" if line.file is None else f" at {Path(line.file).name}:{line.line}"


def _with_norms(base: Candidate, properties: ObservedProperties) -> Iterator[Candidate]:
    """Layers with queries and keys normalised as runs show; without norms too if a run does not show what they apply to."""
    layer = base.layer
    fitting = [norm for norm in properties.norms if norm.gain.shape[-1] == layer.d_head]
    if not fitting or layer.q_norm is not None or layer.k_norm is not None:
        yield base
        return
    choice = Choice("qk-norm", f"queries and keys of each head are normalised, as {_READ}")
    observed = _normed_in_run(layer, fitting, properties.rows)
    if observed is None:
        yield base
    for q_norm, k_norm in product(distinct_norms(fitting), repeat=2) if observed is None else [observed]:
        is_shared = q_norm.is_like(k_norm)
        n_gains = (q_norm.gain.shape[0], k_norm.gain.shape[0])
        if (properties.uses_all or not is_shared) and n_gains in product((1, layer.n_heads), (1, layer.n_kv_heads)):
            normed = replace(layer, q_norm=q_norm, k_norm=k_norm)
            yield replace(base, layer=normed, choices=(*base.choices, choice))


def _normed_in_run(
    layer: ReferenceLayer, fitting: Sequence[Norm], rows: ReferenceInputs | None
) -> tuple[Norm, Norm] | None:
    """The last norms observed on this layer's queries and keys; None unless both were observed."""
    if layer.weights is None or rows is None:
        return None
    q_rows, k_rows = (t if layer.before is None else layer.before(t) for t in (rows.queries, rows.keys))
    q = split(layer, layer.weights.q(q_rows), layer.n_heads, "q")
    k = split(layer, layer.weights.k(k_rows), layer.n_kv_heads, "k")
    q_norms, k_norms = ([norm for norm in fitting if norm.is_of(heads)] for heads in (q, k))
    return (q_norms[-1], k_norms[-1]) if q_norms and k_norms else None


def _scales_of(
    base: Candidate, stated_heads_count: int | None, intended: IntendedLayer
) -> tuple[tuple[float | Tensor | None, Choice | None], ...]:
    """The possible scales. If the number of heads differs from the stated one, the stated one's scale is possible too."""
    weights, d_head = base.layer.weights, base.layer.d_head
    if weights is None or d_head is None or intended.is_scale_known:
        return intended.scales
    if isinstance(base.layer.q_norm, Norm) and base.layer.q_norm.is_unit:
        cosine = Choice("scale", "scores are cosines, times √d_head")
        return ((d_head**0.5, cosine), *(scale for scale in intended.scales if scale[0] is not None))
    widths = {"1 / d_head": 1 / d_head, "1 / √d_model": float(weights.q.weight.shape[1] ** -0.5)}
    documented = [
        (widths[text], Choice("scale", f"the scale is {text}, as its documentation says"))
        for text in intended.scale_words
    ]
    stated_scale = (
        []
        if stated_heads_count in (None, base.layer.n_heads)
        else [((weights.q.weight.shape[0] / (stated_heads_count or 1)) ** -0.5, None)]
    )
    return (*intended.scales, *documented, *stated_scale)


def _with(
    base: Candidate,
    intended: IntendedLayer,
    causal: bool,
    rotation: RotationChoice,
    scale: tuple[float | Tensor | None, Choice | None],
) -> Candidate:
    choices = list(base.choices)
    if rotation.pairing is not None:
        choices.append(Choice("rope", rotation.description(base.layer.d_head)))
    if scale[1] is not None:
        choices.append(scale[1])
    if intended.softcap is not None:
        choices.append(Choice("softcap", f"scores are soft-capped at {intended.softcap:g}"))
    layer = replace(base.layer, causal=causal, pairing=rotation.pairing, rates=rotation.rates)
    layer = replace(layer, theta=rotation.base or 10000.0, scale=scale[0], softcap=intended.softcap)
    return replace(base, layer=layer, choices=tuple(choices))


class RotationChoice(NamedTuple):
    """A rotation of queries and keys; `pairing` is None without rotation, `base` None for rates without a base."""

    pairing: Pairing | None
    base: float | None
    rates: Tensor | None = None

    def description(self, d_head: int | None) -> str:
        """A description, for heads of this width."""
        assert self.pairing is not None
        n_turned = d_head if self.rates is None else 2 * len(self.rates)
        columns = "" if d_head in (None, n_turned) else f"the first {n_turned} of {d_head} columns, "
        angles = "angles of its own" if self.base is None else f"base {self.base:g}"
        backwards = ", backwards" if self.rates is not None and self.rates[0] < 0 else ""
        return f"rotary positions rotate {columns}{_PAIRS[self.pairing]}, {angles}{backwards}"


def _rotation_choices(intended: IntendedLayer) -> Iterator[RotationChoice]:
    """The rotations that runs show, or the usual ones if only words or unrecognised position tables suggest a rotation."""
    stated_pairing = intended.pairings[0] if intended.is_pairing_known else None
    for rotation in intended.properties.rotations:
        yield RotationChoice(stated_pairing or rotation.pairing, rotation.base, rotation.rates)
    if intended.properties.rotations:
        return
    is_open = intended.properties.has_tables and intended.pairings == (None,)
    pairings: tuple[Pairing | None, ...] = (None, *_PAIRS) if is_open else intended.pairings
    for pairing in pairings:
        for theta in intended.thetas:
            yield RotationChoice(pairing, theta)


_PAIRS: Mapping[Pairing, str] = {"half": "column j with column j + d/2", "interleaved": "neighbouring columns"}


def _base_layers(
    subject: UserAttention, module: nn.Module | None, tensors: Mapping[str, Tensor], request: CheckRequest
) -> Iterator[Candidate]:
    if subject.is_function:
        yield Candidate(ReferenceLayer(subject.n_heads, subject.n_heads))
        return
    parts = parts_of(module, tensors)
    sizes = subject.sizes
    for n_heads, n_kv_heads in head_counts(subject.built, module, request, parts_width=widest(parts)):
        for reading in projection_readings(parts, Widths(sizes.d_in, sizes.d_context, n_heads, n_kv_heads)):
            yield from _with_norms_around(_with_head_orders(reading), module)


def _with_head_orders(reading: ProjectionReading) -> list[Candidate]:
    """A reading with each way to split and join heads."""
    layer = ReferenceLayer(reading.n_heads, reading.n_kv_heads, weights=reading.weights)
    choices = reading.choices + (
        () if reading.weights.out is not None else (Choice("no-out-proj", "there is no output projection"),)
    )
    layers = []
    for is_split_interleaved, is_merge_interleaved in ((False, False), (True, True), (True, False), (False, True)):
        if reading.n_heads == 1 and (is_split_interleaved or is_merge_interleaved):
            continue
        columns = Choice(
            "interleaved-heads",
            f"a head has every {reading.n_heads}th column"
            + ("" if is_split_interleaved == is_merge_interleaved else " on one side"),
        )
        variant = replace(layer, interleaved_split=is_split_interleaved, interleaved_merge=is_merge_interleaved)
        layers.append(
            Candidate(
                variant, (*choices, columns) if is_split_interleaved or is_merge_interleaved else choices, reading
            )
        )
    return layers


def _with_norms_around(layers: list[Candidate], module: nn.Module | None) -> Iterator[Candidate]:
    """The layers with norms of the module before or after, and with a residual connection."""
    children = [] if module is None else list(module.named_modules())
    norms = [(name, child) for name, child in children if is_norm(child) or _is_head_norm(name, child)]
    head_norms = {read_name(name)[0]: child for name, child in norms if read_name(name)[0] in ("q", "k")}
    others = [child for name, child in norms if read_name(name)[0] not in ("q", "k")]
    for candidate in layers:
        layer = replace(candidate.layer, q_norm=head_norms.get("q"), k_norm=head_norms.get("k"))
        choices = (
            *candidate.choices,
            *((Choice("qk-norm", "queries and keys of each head are normalised"),) if head_norms else ()),
        )
        for before, after, extra in _norms_and_residuals(others):
            yield replace(candidate, layer=replace(layer, before=before, after=after), choices=(*choices, *extra))


def _norms_and_residuals(
    norms: Sequence[nn.Module],
) -> Iterator[tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor, Tensor], Tensor] | None, tuple[Choice, ...]]]:
    residual = Choice("residual", "the input is added to the output")
    yield None, None, ()
    for norm in norms:
        first, last = (
            Choice("pre-norm", "the input is normalised first"),
            Choice("post-norm", "the output is normalised"),
        )
        yield norm, None, (first,)
        yield norm, lambda out, x: out + x, (first, residual)
        yield None, lambda out, x, norm=norm: norm(out + x), (last, residual)  # type: ignore[misc]
        yield None, lambda out, x, norm=norm: norm(out), (last,)  # type: ignore[misc]
    yield None, lambda out, x: out + x, (residual,)


def widest(parts: Sequence[WeightMatrix]) -> int:
    """The largest size of an axis in these matrices, at least 1."""
    return max((max(part.weight.shape) for part in parts), default=1)


def head_counts(
    built: Built, module: nn.Module | None, request: CheckRequest, *, parts_width: int
) -> list[tuple[int, int | None]]:
    """Possible numbers of query and kv heads: stated, else from arguments and attributes, else divisors of the width."""
    n_kv = counts_of(built, module, "n_kv_heads")
    stated = stated_heads(built, module, request)
    counts = [n for n in range(1, 65) if parts_width % n == 0]
    if stated:
        counts = stated if request.n_heads else [*stated, 1, *(parts_width // n for n in stated)]
    return [(n, next((m for m in n_kv if n % m == 0), None)) for n in dict.fromkeys(counts) if n]


def stated_heads(built: Built, module: nn.Module | None, request: CheckRequest) -> list[int]:
    """The numbers of query heads in options, arguments or attributes; empty if there is none."""
    return [request.n_heads] if request.n_heads else counts_of(built, module, "n_heads")


def counts_of(built: Built, module: nn.Module | None, role: Role) -> list[int]:
    """Integers with names of this role, among arguments and module attributes."""
    namespaces: list[Mapping[str, Any]] = [{str(name).rpartition(".")[2]: v for name, v in built.arguments.items()}]
    namespaces += [vars(child) for child in ([] if module is None else module.modules()) if not _is_of_torch(child)]
    counts = [
        value
        for namespace in namespaces
        for name, value in namespace.items()
        if role_of(str(name)) == role and _is_count(value)
    ]
    return list(dict.fromkeys(counts))


def _is_of_torch(module: nn.Module) -> bool:
    """Whether it is a torch module whose numbers are not heads, such as the groups of a norm."""
    return type(module).__module__.startswith("torch.") and not isinstance(module, nn.MultiheadAttention)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1024


# -------------------------------------------------------------------------------------------------------------- intentions


def intended_layer(
    built: Built,
    module: nn.Module | None,
    request: CheckRequest,
    causal: tuple[bool, ...],
    properties: ObservedProperties = NO_PROPERTIES,
) -> IntendedLayer:
    """The layer that options, arguments and documentation describe."""
    pairing = request.rope or documented_pairing(built.documentation)
    rotary = _ROTARY.search(built.documentation + source_of(built)) is not None
    pairings: tuple[Pairing | None, ...] = (None,) if not rotary else (None, "half", "interleaved")
    thetas = [value for _, value in _numbers(built, "theta")]
    return IntendedLayer(
        causal,
        pairings if pairing is None else (pairing,),
        pairing is not None,
        tuple(_scales(built, module, request, properties)),
        request.scale is not None,
        (*dict.fromkeys((*thetas, 10000.0)),),
        next((value for _, value in _numbers(built, "softcap")), None),
        documented_widths(_docstrings(built)),
        properties,
    )


def _numbers(built: Built, role: Role) -> list[tuple[str, float]]:
    """The numeric arguments of a role."""
    names = {
        str(name): value for name, value in built.arguments.items() if role_of(str(name).rpartition(".")[2]) == role
    }
    return [(n, float(v)) for n, v in names.items() if isinstance(v, int | float) and not isinstance(v, bool)]


def _is_head_norm(name: str, child: nn.Module) -> bool:
    """Whether a module with parameters is named as a norm of queries or keys."""
    return (
        "norm" in name.rpartition(".")[2].lower() and read_name(name)[0] in ("q", "k") and bool([*child.parameters()])
    )


def source_of(built: Built) -> str:
    """The source of the target, empty if unavailable."""
    try:
        return inspect.getsource(built.thing)
    except (OSError, TypeError):
        return ""


def _scales(
    built: Built, module: nn.Module | None, request: CheckRequest, properties: ObservedProperties
) -> Iterator[tuple[float | Tensor | None, Choice | None]]:
    """The scale of the option; else the usual scale (None), and scales from arguments, documentation, T5, parameters and
    runs."""
    if request.scale is not None:
        yield request.scale, Choice("scale", f"the scale is {request.scale:g}, from --scale")
        return
    yield None, None
    for name, value in _numbers(built, "scale"):
        yield value, Choice("scale", f"the scale is {value:g}, given as {name}")
    for value, quote in documented_scales(built.documentation):
        yield value, Choice("scale", f"the scale is {value:.6g}, as its documentation says: {quote}")
    if _is_t5(built, module, properties):
        yield 1.0, Choice("scale", "the scores are not scaled, as in T5, which starts from smaller weights")
    for name, parameter in [] if module is None else list(module.named_parameters()):
        if parameter.numel() == 1:
            value = float(parameter.detach())
            for scale_read, prefix in (
                (value, ""),
                (math.exp(min(value, 50.0)), "exp "),
                (1 / value if value else 1.0, "1 / "),
            ):
                yield scale_read, Choice("scale", f"the scale is learned: {prefix}{name} = {scale_read:.6g}")
    if properties.temperature is not None:
        scale, line = properties.temperature
        yield scale, Choice("scale", f"the scale of each head is learned, {_READ}{_at(line)}")


_BUCKETS = re.compile(r"(?i)bucket")


def _is_t5(built: Built, module: nn.Module | None, properties: ObservedProperties) -> bool:
    """Whether it is T5's attention: by its name, by the name of T5's bias table, or by a learned bias with the word bucket. T5
    includes 1/√d_head in its initial weights instead of the scores. Source: `T5PreTrainedModel._init_weights` of transformers,
    after Mesh TensorFlow's attention."""
    names = () if module is None else (name for name, _ in module.named_modules())
    is_named = re.search(r"T5(?![0-9])", getattr(built.thing, "__name__", "")) is not None
    is_learned = properties.bias is not None and properties.bias.is_learned
    return (
        is_named
        or any(name.rpartition(".")[2] == "relative_attention_bias" for name in names)
        or (is_learned and _BUCKETS.search(built.documentation + source_of(built)) is not None)
    )


def _docstrings(built: Built) -> str:
    """The docstrings only, because a comment may describe a mistake."""
    objects = (
        built.thing,
        getattr(built.thing, "forward", None),
        sys.modules.get(getattr(built.thing, "__module__", "")),
    )
    return "\n".join(text for obj in objects if (text := getattr(obj, "__doc__", None)))


# ------------------------------------------------------------------------------------------------- norms and residuals


def with_matching_norms(
    layers: Sequence[Candidate], subject: UserAttention, module: nn.Module | None, case: InputCase
) -> Sequence[Candidate]:
    """The candidates whose residual connection and norms match the module, despite any mistake inside; all candidates if none
    matches.

    With zero projections the heads are zero, so that only residual connections and norms remain.
    """
    if module is None:
        return layers
    try:
        silent = subject.of(cast(zeroed_parameters(module), subject.dtype, subject.device), subject.dtype)
        with torch.no_grad():
            output = output_for(silent, case.inputs, case.form, case.padding)
        matching = [candidate for candidate in layers if _matches_zeroed(candidate, case, output)]
    except Exception:  # the module may divide by a zero projection, or a norm may fail
        return layers
    return matching or layers


def zeroed_parameters(module: nn.Module) -> nn.Module:
    """A copy with all parameters zero, except norms and single numbers."""
    zeroed = copy.deepcopy(module)
    kept_ids = {id(parameter) for child in zeroed.modules() if is_norm(child) for parameter in child.parameters()}
    for parameter in zeroed.parameters():
        if id(parameter) not in kept_ids and parameter.numel() > 1:
            parameter.data.zero_()
    return zeroed


def _matches_zeroed(candidate: Candidate, case: InputCase, output: Tensor) -> bool:
    """Whether the candidate with zero heads gives this output."""
    zeros = torch.zeros_like(output)
    expected = zeros if candidate.layer.after is None else candidate.layer.after(zeros, case.rows.queries)
    return expected.shape == output.shape and torch.allclose(expected, output, rtol=TOLERANCE, atol=TOLERANCE)


# ------------------------------------------------------------------------------------- documented scales and rotations


_SCORES = r"(?:dot[- ]products?|scores?|logits?|q\s*[·@]?\s*k\S*|attention|softmax|they|it)"
_UNSCALED = re.compile(
    rf"(?i)(\bunscaled\b|\b{_SCORES}\s+(?:is|are)\s*(?:not|n[o']t|never)\s+(?:being\s+)?(?:scaled|divided)"
    rf"|\b{_SCORES}\s+(?:isn[’']t|aren[’']t)\s+(?:scaled|divided)"
    r"|(?:without|no)\s+(?:any\s+)?(?:1\s*/\s*√\w+\s+|softmax\s+|score\s+)?scal(?:e|ing)\b(?!\s+(?:of|to|rate))"
    rf"|(?:does|do|did) not\s+(?:scale|divide)\s+(?:by|the\s+{_SCORES}|{_SCORES})|(?:does|do) not apply (?:any )?scaling"
    r"|(?:without|not)\s+dividing|without\s+(?:the\s+)?1\s*/\s*(?:√|sqrt)|scaling\s+is\s+not\s+(?:applied|used|done)"
    r"|(?:scale|scaling|√\S+|sqrt\S*)\s+is\s+(?:folded|absorbed)\s+into)"
)
_NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?(?![\d\w^]|\.\d|\s*(?:\*\*|\^|/))"
_GIVEN = re.compile(
    rf"(?i)\b(?:scal(?:e|es|ed|ing)(?:\s+factor)?(?:\s*(?:by|of|is|:|=))?|(divided)\s+by)\s+{_NUMBER}|\bscale\s*[=:]\s*{_NUMBER}"
)


def documented_scales(documentation: str) -> Iterator[tuple[float, str]]:
    """Each scale that the documentation states: none (1), or a number, with the quoted words."""
    scales: dict[float, str] = {}
    unscaled = _UNSCALED.search(documentation)
    if unscaled:
        scales[1.0] = unscaled[0]
    for match in _GIVEN.finditer(documentation):
        divided, *numbers = match.groups()
        numerator, denominator = (float(n) if n else 1.0 for n in (numbers[:2] if numbers[0] else numbers[2:]))
        value = numerator / denominator if denominator else 0.0
        if value:
            scales.setdefault(1 / value if divided else value, match[0])
    yield from scales.items()


_BY_HEAD = re.compile(r"(?i)1\s*/\s*d(?:_?head|_?k)?\b(?!\s*(?:\*\*|\^))|(?:divided|scaled)\s+by\s+d_?(?:head|k)\b")
_BY_MODEL = re.compile(
    r"(?i)(?:√|sqrt\s*\(?|root of\s+(?:the\s+)?)\s*\(?(?:d_?model|embed_dim|model(?:'s)? width)\b"
    r"|d_?model\s*(?:\*\*|\^)\s*\(?-?(?:0?\.5|1/2)"
)


def documented_widths(documentation: str) -> tuple[str, ...]:
    """The documented scales by a width of the layer, other than the usual one."""
    patterns = {"1 / d_head": _BY_HEAD, "1 / √d_model": _BY_MODEL}
    return tuple(text for text, pattern in patterns.items() if pattern.search(documentation))


_HALVES = re.compile(
    r"(?i)(rotate[_ -]half|half[_ -]rotation|(?:by|of|into|two|as|for) halves|first half|neox|j and j \+ d/2)"
)
_NEIGHBOURS = re.compile(
    r"(?i)(interleaved|neighbou?r(?:s|ing)|adjacent|consecutive|gpt-?j\b|every[_ ]two|(?:even|odd)[ -]and[ -](?:even|odd)"
    r"|2j and 2j \+ 1)"
)


def documented_pairing(documentation: str) -> Pairing | None:
    """The documented pairing of rotary columns; None if it states neither or both."""
    if not re.search(r"(?i)\b(rope|rotary|rotat\w+)", documentation):
        return None
    half, neighbours = _HALVES.search(documentation), _NEIGHBOURS.search(documentation)
    if (half is None) == (neighbours is None):
        return None
    return "half" if half else "interleaved"
