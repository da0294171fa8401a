"""The layers that a user's attention may be meant to be: every reading of its weights, with what its author may choose."""

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

from mhacli.adapters.usercode.arguments import Role, role_of
from mhacli.adapters.usercode.asker import cast
from mhacli.adapters.usercode.call.user_attention import UserAttention
from mhacli.adapters.usercode.process import SourceLine
from mhacli.adapters.usercode.projections import (
    ProjectionReading,
    Widths,
    is_norm,
    parts_of,
    projection_readings,
    read_name,
)
from mhacli.adapters.usercode.types import Built
from mhacli.attention.mistakes.stages import Pairing, ReferenceInputs, ReferenceLayer, split
from mhacli.compute.check.inputs import TOLERANCE, InputCase, ask
from mhacli.compute.check.observed_properties import NO_PROPERTIES, Norm, ObservedProperties, unlike
from mhacli.requests.user_code import CheckRequest
from mhacli.results.check import Choice

_READ = "read from the run"
"""How a choice ends that is no guess."""
_ROTARY = re.compile(r"(?i)\b(rope|rotary|rotate_half|freqs?_cis|polar)|\.cos\(|\bcos\b")


@dataclass(frozen=True)
class Candidate:
    """A layer that it may be meant to be, and what another author would have done otherwise. `reading` is where its weights come
    from, None for a function."""

    layer: ReferenceLayer
    choices: tuple[Choice, ...] = ()
    reading: ProjectionReading | None = None


@dataclass(frozen=True)
class IntendedLayer:
    """What the author says that it is, and what runs show besides, `properties`. `causal` are the answers to whether it masks the
    future itself that are left open."""

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
    """Every layer that it may be, with the fewest choices first. Empty where its projections cannot be told."""
    told = next(iter(stated_heads(subject.built, module, request)), None)
    turnings = list(_rotation_choices(intended))
    found = [
        _with(base, intended, causal, turning, scale)
        for base in _with_traits(_bases(subject, module, tensors, request), intended.properties)
        for causal, turning, scale in product(intended.causal, turnings, _scales_of(base, told, intended))
    ]
    return sorted(found, key=_n_open)


def _n_open(candidate: Candidate) -> int:
    """How many choices it takes to be that layer, besides those that a run has shown."""
    return sum(_READ not in choice.message for choice in candidate.choices)


def _with_traits(bases: Iterable[Candidate], properties: ObservedProperties) -> Iterator[Candidate]:
    """Layers with the biases and sinks that runs show."""
    said = []
    if properties.bias is not None:
        said.append(Choice("score-bias", f"score bias [head, query, key], {_READ}{_at(properties.bias.at)}"))
    if properties.sinks is not None:
        said.append(Choice("sinks", f"each head has a sink logit, {_READ}{_at(properties.sinks.at)}"))
    logits = None if properties.sinks is None else properties.sinks.logits
    for base in bases:
        layer = replace(base.layer, bias=properties.bias, sinks=logits)
        yield from _with_norms(replace(base, layer=layer, choices=(*base.choices, *said)), properties)


def _at(line: SourceLine) -> str:
    """Where a line stands, at the end of a sentence; empty where it is not known."""
    return "" if line.file is None else f" at {Path(line.file).name}:{line.line}"


def _with_norms(base: Candidate, properties: ObservedProperties) -> Iterator[Candidate]:
    """The same with queries and keys normed as runs show, and, where these are not seen to be what is normed, without."""
    layer = base.layer
    fitting = [norm for norm in properties.norms if norm.gain.shape[-1] == layer.d_head]
    if not fitting or layer.q_norm is not None or layer.k_norm is not None:
        yield base
        return
    said = Choice("qk-norm", f"queries and keys of each head are normalised, as {_READ}")
    seen = _normed_in_run(layer, fitting, properties.rows)
    if seen is None:
        yield base
    for q_norm, k_norm in product(unlike(fitting), repeat=2) if seen is None else [seen]:
        is_one_for_both = q_norm.is_like(k_norm)
        n_gains = (q_norm.gain.shape[0], k_norm.gain.shape[0])
        if (properties.uses_all or not is_one_for_both) and n_gains in product(
            (1, layer.n_heads), (1, layer.n_kv_heads)
        ):
            normed = replace(layer, q_norm=q_norm, k_norm=k_norm)
            yield replace(base, layer=normed, choices=(*base.choices, said))


def _normed_in_run(
    layer: ReferenceLayer, fitting: Sequence[Norm], rows: ReferenceInputs | None
) -> tuple[Norm, Norm] | None:
    """The last norm that was seen of this layer's queries, and of its keys; None where one of them was seen of neither."""
    if layer.weights is None or rows is None:
        return None
    q_rows, k_rows = (t if layer.before is None else layer.before(t) for t in (rows.queries, rows.keys))
    q = split(layer, layer.weights.q(q_rows), layer.n_heads, "q")
    k = split(layer, layer.weights.k(k_rows), layer.n_kv_heads, "k")
    of_q, of_k = ([norm for norm in fitting if norm.is_of(heads)] for heads in (q, k))
    return (of_q[-1], of_k[-1]) if of_q and of_k else None


def _scales_of(
    base: Candidate, told: int | None, intended: IntendedLayer
) -> tuple[tuple[float | Tensor | None, Choice | None], ...]:
    """The scales that are open; of heads that are cut otherwise than told, also that of the heads that are told."""
    weights, d_head = base.layer.weights, base.layer.d_head
    if weights is None or d_head is None or intended.is_scale_known:
        return intended.scales
    if isinstance(base.layer.q_norm, Norm) and base.layer.q_norm.is_unit:
        cosine = Choice("scale", "scores are cosines, times √d_head")
        return ((d_head**0.5, cosine), *(scale for scale in intended.scales if scale[0] is not None))
    widths = {"1 / d_head": 1 / d_head, "1 / √d_model": float(weights.q.weight.shape[1] ** -0.5)}
    documented = [
        (widths[said], Choice("scale", f"the scale is {said}, as its documentation says"))
        for said in intended.scale_words
    ]
    told_scale = (
        [] if told in (None, base.layer.n_heads) else [((weights.q.weight.shape[0] / (told or 1)) ** -0.5, None)]
    )
    return (*intended.scales, *documented, *told_scale)


def _with(
    base: Candidate,
    intended: IntendedLayer,
    causal: bool,
    turning: RotationChoice,
    scale: tuple[float | Tensor | None, Choice | None],
) -> Candidate:
    said = list(base.choices)
    if turning.pairing is not None:
        said.append(Choice("rope", turning.said(base.layer.d_head)))
    if scale[1] is not None:
        said.append(scale[1])
    if intended.softcap is not None:
        said.append(Choice("softcap", f"scores are soft-capped at {intended.softcap:g}"))
    layer = replace(base.layer, causal=causal, pairing=turning.pairing, rates=turning.rates)
    layer = replace(layer, theta=turning.base or 10000.0, scale=scale[0], softcap=intended.softcap)
    return replace(base, layer=layer, choices=tuple(said))


class RotationChoice(NamedTuple):
    """How positions may turn queries and keys; pairing is None where they do not. `base` is None for rates of no base."""

    pairing: Pairing | None
    base: float | None
    rates: Tensor | None = None

    def said(self, d_head: int | None) -> str:
        """In words, of heads of a width."""
        assert self.pairing is not None
        n_turned = d_head if self.rates is None else 2 * len(self.rates)
        part = "" if d_head in (None, n_turned) else f"the first {n_turned} of {d_head} columns, "
        angles = "angles of its own" if self.base is None else f"base {self.base:g}"
        backwards = ", backwards" if self.rates is not None and self.rates[0] < 0 else ""
        return f"rotary positions rotate {part}{_PAIRS[self.pairing]}, {angles}{backwards}"


def _rotation_choices(intended: IntendedLayer) -> Iterator[RotationChoice]:
    """The rotations that runs show; where rows are multiplied by something else of their places, or where only words speak of a
    rotation, the usual ones."""
    told = intended.pairings[0] if intended.is_pairing_known else None
    for turn in intended.properties.rotations:
        yield RotationChoice(told or turn.pairing, turn.base, turn.rates)
    if intended.properties.rotations:
        return
    is_open = intended.properties.has_tables and intended.pairings == (None,)
    pairings: tuple[Pairing | None, ...] = (None, *_PAIRS) if is_open else intended.pairings
    for pairing in pairings:
        for theta in intended.thetas:
            yield RotationChoice(pairing, theta)


_PAIRS: Mapping[Pairing, str] = {"half": "column j with column j + d/2", "interleaved": "neighbouring columns"}


def _bases(
    subject: UserAttention, module: nn.Module | None, tensors: Mapping[str, Tensor], request: CheckRequest
) -> Iterator[Candidate]:
    if subject.is_function:
        yield Candidate(ReferenceLayer(subject.n_heads, subject.n_heads))
        return
    parts = parts_of(module, tensors)
    sizes = subject.sizes
    for n_heads, n_kv_heads in head_counts(subject.built, module, request, parts_width=_widest(parts)):
        for reading in projection_readings(parts, Widths(sizes.d_in, sizes.d_context, n_heads, n_kv_heads)):
            yield from _around(_of(reading), module)


def _of(reading: ProjectionReading) -> list[Candidate]:
    """A reading with heads cut in one way and joined in either."""
    layer = ReferenceLayer(reading.n_heads, reading.n_kv_heads, weights=reading.weights)
    said = reading.choices + (
        () if reading.weights.out is not None else (Choice("no-out-proj", "there is no output projection"),)
    )
    made = []
    for cut, joined in ((False, False), (True, True), (True, False), (False, True)):
        if reading.n_heads == 1 and (cut or joined):
            continue
        columns = Choice(
            "interleaved-heads",
            f"a head has every {reading.n_heads}th column" + ("" if cut == joined else " on one side"),
        )
        variant = replace(layer, interleaved_split=cut, interleaved_merge=joined)
        made.append(Candidate(variant, (*said, columns) if cut or joined else said, reading))
    return made


def _around(made: list[Candidate], module: nn.Module | None) -> Iterator[Candidate]:
    """The same with the norms of the module, before or behind, and with its input added."""
    children = [] if module is None else list(module.named_modules())
    norms = [(name, child) for name, child in children if is_norm(child) or _is_called_norm(name, child)]
    of_heads = {read_name(name)[0]: child for name, child in norms if read_name(name)[0] in ("q", "k")}
    others = [child for name, child in norms if read_name(name)[0] not in ("q", "k")]
    for candidate in made:
        layer = replace(candidate.layer, q_norm=of_heads.get("q"), k_norm=of_heads.get("k"))
        said = (
            *candidate.choices,
            *((Choice("qk-norm", "queries and keys of each head are normalised"),) if of_heads else ()),
        )
        for before, after, more in _surroundings(others):
            yield replace(candidate, layer=replace(layer, before=before, after=after), choices=(*said, *more))


def _surroundings(
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


def _widest(parts: Sequence[Any]) -> int:
    return max((max(part.weight.shape) for part in parts), default=1)


def head_counts(
    built: Built, module: nn.Module | None, request: CheckRequest, *, parts_width: int
) -> list[tuple[int, int | None]]:
    """How many heads of queries and of keys there may be: what is told, else what arguments and attributes are called, else
    what divides the width."""
    n_kv = counts_of(built, module, "n_kv_heads")
    known = stated_heads(built, module, request)
    counts = [n for n in range(1, 65) if parts_width % n == 0]
    if known:
        counts = known if request.n_heads else [*known, 1, *(parts_width // n for n in known)]
    return [(n, next((m for m in n_kv if n % m == 0), None)) for n in dict.fromkeys(counts) if n]


def stated_heads(built: Built, module: nn.Module | None, request: CheckRequest) -> list[int]:
    """How many heads of queries there are to be, as options, arguments or attributes say; empty where nothing says it."""
    return [request.n_heads] if request.n_heads else counts_of(built, module, "n_heads")


def counts_of(built: Built, module: nn.Module | None, role: Role) -> list[int]:
    """Whole numbers that are called what a role is called, in the arguments and the attributes of the module."""
    places: list[Mapping[str, Any]] = [{str(name).rpartition(".")[2]: v for name, v in built.arguments.items()}]
    places += [vars(child) for child in ([] if module is None else module.modules()) if not _is_of_torch(child)]
    found = [
        value for place in places for name, value in place.items() if role_of(str(name)) == role and _is_count(value)
    ]
    return list(dict.fromkeys(found))


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module is one of torch's own that counts other things than heads, such as the groups of a norm."""
    return type(module).__module__.startswith("torch.") and not isinstance(module, nn.MultiheadAttention)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1024


# ------------------------------------------------------------------------------------------------------------ what is meant


def intended_layer(
    built: Built,
    module: nn.Module | None,
    request: CheckRequest,
    causal: tuple[bool, ...],
    properties: ObservedProperties = NO_PROPERTIES,
) -> IntendedLayer:
    """What options, arguments and documentation say."""
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
    """Arguments of a role that are numbers."""
    names = {
        str(name): value for name, value in built.arguments.items() if role_of(str(name).rpartition(".")[2]) == role
    }
    return [(n, float(v)) for n, v in names.items() if isinstance(v, int | float) and not isinstance(v, bool)]


def _is_called_norm(name: str, child: nn.Module) -> bool:
    """Whether its author calls a module the norm of queries or keys, and it has a gain of its own."""
    return (
        "norm" in name.rpartition(".")[2].lower() and read_name(name)[0] in ("q", "k") and bool([*child.parameters()])
    )


def source_of(built: Built) -> str:
    """What its author wrote, empty where there is nothing to read."""
    try:
        return inspect.getsource(built.thing)
    except (OSError, TypeError):
        return ""


def _scales(
    built: Built, module: nn.Module | None, request: CheckRequest, properties: ObservedProperties
) -> Iterator[tuple[float | Tensor | None, Choice | None]]:
    """The scale that the option says; else the usual one, None, and those of arguments, words, T5, parameters and runs."""
    if request.scale is not None:
        yield request.scale, Choice("scale", f"the scale is {request.scale:g}, from --scale")
        return
    yield None, None
    for name, value in _numbers(built, "scale"):
        yield value, Choice("scale", f"the scale is {value:g}, given as {name}")
    for value, words in documented_scales(built.documentation):
        yield value, Choice("scale", f"the scale is {value:.6g}, as its documentation says: {words}")
    if _is_of_t5(built, module, properties):
        yield 1.0, Choice("scale", "the scores are not scaled, as in T5, which starts from smaller weights")
    for name, parameter in [] if module is None else list(module.named_parameters()):
        if parameter.numel() == 1:
            value = float(parameter.detach())
            for read, said in (
                (value, ""),
                (math.exp(min(value, 50.0)), "exp "),
                (1 / value if value else 1.0, "1 / "),
            ):
                yield read, Choice("scale", f"the scale is learned: {said}{name} = {read:.6g}")
    if properties.temperature is not None:
        scale, line = properties.temperature
        yield scale, Choice("scale", f"the scale of each head is learned, {_READ}{_at(line)}")


_BUCKETS = re.compile(r"(?i)bucket")


def _is_of_t5(built: Built, module: nn.Module | None, properties: ObservedProperties) -> bool:
    """Whether it is T5's attention: by its own name, by that of T5's table of biases, or by a learned bias beside words of
    buckets. T5 divides its weights at the start by √d_head, not its scores. Source: `T5PreTrainedModel._init_weights` of
    transformers, after Mesh TensorFlow's attention."""
    names = () if module is None else (name for name, _ in module.named_modules())
    is_named = re.search(r"T5(?![0-9])", getattr(built.thing, "__name__", "")) is not None
    is_learned = properties.bias is not None and properties.bias.is_learned
    return (
        is_named
        or any(name.rpartition(".")[2] == "relative_attention_bias" for name in names)
        or (is_learned and _BUCKETS.search(built.documentation + source_of(built)) is not None)
    )


def _docstrings(built: Built) -> str:
    """What its author says in docstrings alone: a comment beside a mistake may describe it."""
    places = (
        built.thing,
        getattr(built.thing, "forward", None),
        sys.modules.get(getattr(built.thing, "__module__", "")),
    )
    return "\n".join(text for place in places if (text := getattr(place, "__doc__", None)))


# ---------------------------------------------------------------------------------- norms and residuals around attention


def with_fitting_surroundings(
    found: Sequence[Candidate], subject: UserAttention, module: nn.Module | None, case: InputCase
) -> Sequence[Candidate]:
    """The candidates that add the input and norm the output as the module does, whatever mistake it makes before; all of them
    where none does.

    With projections of zero the heads and what is made of them are zero, so that only a residual and a norm are left.
    """
    if module is None:
        return found
    try:
        silent = subject.of(cast(zeroed_parameters(module), subject.dtype, subject.device), subject.dtype)
        with torch.no_grad():
            answer = ask(silent, case.inputs, case.form, case.padding)
        fitting = [one for one in found if _answers(one, case, answer)]
    except Exception:  # a module that divides by what is zero now, or a norm that wants something else
        return found
    return fitting or found


def zeroed_parameters(module: nn.Module) -> nn.Module:
    """A copy whose parameters are zero, except for those of norms and single numbers."""
    made = copy.deepcopy(module)
    kept = {id(own) for child in made.modules() if is_norm(child) for own in child.parameters()}
    for parameter in made.parameters():
        if id(parameter) not in kept and parameter.numel() > 1:
            parameter.data.zero_()
    return made


def _answers(candidate: Candidate, case: InputCase, answer: Tensor) -> bool:
    """Whether a candidate whose heads are zero answers this."""
    silent = torch.zeros_like(answer)
    expected = silent if candidate.layer.after is None else candidate.layer.after(silent, case.rows.queries)
    return expected.shape == answer.shape and torch.allclose(expected, answer, rtol=TOLERANCE, atol=TOLERANCE)


# ------------------------------------------------------------------- what the documentation says of scales and rotations


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
    """Scales that a documentation states: none at all, or a number, each once."""
    said: dict[float, str] = {}
    unscaled = _UNSCALED.search(documentation)
    if unscaled:
        said[1.0] = unscaled[0]
    for match in _GIVEN.finditer(documentation):
        divided, *numbers = match.groups()
        over, under = (float(n) if n else 1.0 for n in (numbers[:2] if numbers[0] else numbers[2:]))
        value = over / under if under else 0.0
        if value:
            said.setdefault(1 / value if divided else value, match[0])
    yield from said.items()


_BY_HEAD = re.compile(r"(?i)1\s*/\s*d(?:_?head|_?k)?\b(?!\s*(?:\*\*|\^))|(?:divided|scaled)\s+by\s+d_?(?:head|k)\b")
_BY_MODEL = re.compile(
    r"(?i)(?:√|sqrt\s*\(?|root of\s+(?:the\s+)?)\s*\(?(?:d_?model|embed_dim|model(?:'s)? width)\b"
    r"|d_?model\s*(?:\*\*|\^)\s*\(?-?(?:0?\.5|1/2)"
)


def documented_widths(documentation: str) -> tuple[str, ...]:
    """Scales of the layer's own widths that a documentation states, other than the usual one."""
    found = {"1 / d_head": _BY_HEAD, "1 / √d_model": _BY_MODEL}
    return tuple(said for said, pattern in found.items() if pattern.search(documentation))


_HALVES = re.compile(
    r"(?i)(rotate[_ -]half|half[_ -]rotation|(?:by|of|into|two|as|for) halves|first half|neox|j and j \+ d/2)"
)
_NEIGHBOURS = re.compile(
    r"(?i)(interleaved|neighbou?r(?:s|ing)|adjacent|consecutive|gpt-?j\b|every[_ ]two|(?:even|odd)[ -]and[ -](?:even|odd)"
    r"|2j and 2j \+ 1)"
)


def documented_pairing(documentation: str) -> Pairing | None:
    """How a documentation says that rotary positions pair columns; None where it says nothing, or both."""
    if not re.search(r"(?i)\b(rope|rotary|rotat\w+)", documentation):
        return None
    half, neighbours = _HALVES.search(documentation), _NEIGHBOURS.search(documentation)
    if (half is None) == (neighbours is None):
        return None
    return "half" if half else "interleaved"
