"""The layers that a user's attention may implement: every reading of its weights, with every possible design choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mhacli.attention.mistakes.stages import ReferenceLayer
from mhacli.commands.check.inputs import Examined
from mhacli.commands.check.observed_properties import (
    PAIRS,
    Norm,
    Rotation,
    Run,
    around,
    cap_of,
    has_tables,
    learned_scales,
    norm_of,
    rotations,
    run_of,
    score_bias,
    sinks,
)
from mhacli.commands.check.result import CheckRequest
from mhacli.usercode.build import Built
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import (
    ProjectionReading,
    WeightMatrix,
    Widths,
    parts_of,
    projection_readings,
    read_name,
)
from mhacli.usercode.roles import Role, role_of
from mhacli.usercode.target import Choice

_READ = "read from the run"
"""The ending of a choice that a run showed."""
Scale = tuple[float | Tensor | None, Choice | None]


@dataclass(frozen=True)
class Candidate:
    """A layer that it may implement, with its design choices. `reading` is the source of its weights, None for a function.
    `contradicts` are the statements of the request, `n_heads` or `scale`, that it does not follow."""

    layer: ReferenceLayer
    choices: tuple[Choice, ...] = ()
    reading: ProjectionReading | None = None
    contradicts: tuple[str, ...] = ()


def candidates(examined: Examined) -> list[Candidate]:
    """Every possible layer, those that contradict a statement last, with the fewest choices first. Empty if its projections
    cannot be identified."""
    runs = recorded_runs(examined)
    bases = list(_base_layers(examined))
    if runs is not None:
        shown = norm_of(runs, "q"), norm_of(runs, "k")
        observed = _with_observed(bases, examined, runs)
        bases = [layer for base in observed for layer in _with_norms(base, examined, runs, shown)]
    learned = [] if runs is None else list(learned_scales(runs))
    named_cap = next((value for _, value in _numbers(examined.subject.built, "softcap")), None)
    softcap = cap_of(runs) if named_cap is None and runs is not None else named_cap
    causalities = [examined.expects_causal, not examined.expects_causal]
    if examined.expects_causal and examined.probed.visible == "full":
        causalities = [not examined.subject.mask_forms]  # its behaviour shows that it does not mask the future
    turned = list(product(causalities, _rotations(examined, runs)))
    layers = [
        _with(base, examined, causal, rotation, scale, softcap)
        for base in bases
        for scale in _scales(base, examined, learned)
        for causal, rotation in turned
    ]
    n_not_shown = [sum(_READ not in choice.message for choice in layer.choices) for layer in layers]
    order = sorted(range(len(layers)), key=lambda i: (len(layers[i].contradicts), n_not_shown[i]))
    return [layers[i] for i in order]


def recorded_runs(examined: Examined) -> Run | None:
    """Two recorded runs, of self-attention if possible; None if the call cannot be recorded, or depends on the numbers."""
    subject = examined.subject
    for other in (False, True) if subject.takes_context else (False,):
        try:
            return run_of(subject, examined.request.of.seed, other=other)
        except Exception:  # user code may raise anything
            continue
    return None


# ------------------------------------------------------------------------------------------------------ weights and heads


def _base_layers(examined: Examined) -> Iterator[Candidate]:
    subject, module, request = examined.subject, examined.module, examined.request
    if subject.is_function:
        yield Candidate(ReferenceLayer(subject.sizes.n_heads, subject.sizes.n_heads))
        return
    parts, sizes = parts_of(module, examined.tensors), subject.sizes
    for n_heads, n_kv_heads in head_counts(subject.built, module, request, parts=parts):
        contradicts = () if request.n_heads in (None, n_heads) else ("n_heads",)
        for reading in projection_readings(parts, Widths(sizes.d_in, sizes.d_context, n_heads, n_kv_heads)):
            for base in _with_head_orders(reading):
                yield replace(base, contradicts=contradicts)


def _with_head_orders(reading: ProjectionReading) -> Iterator[Candidate]:
    """A reading with each way to split and join heads."""
    layer = ReferenceLayer(reading.n_heads, reading.n_kv_heads, weights=reading.weights)
    without_out = Choice("no-out-proj", "there is no output projection")
    choices = reading.choices if reading.weights.out is not None else (*reading.choices, without_out)
    yield Candidate(layer, choices, reading)
    for splits, merges in ((True, True), (True, False), (False, True)) if reading.n_heads > 1 else ():
        side = "" if splits == merges else " on one side"
        columns = Choice("interleaved-heads", f"a head has every {reading.n_heads}th column{side}")
        variant = replace(layer, interleaved_split=splits, interleaved_merge=merges)
        yield Candidate(variant, (*choices, columns), reading)


def head_counts(
    built: Built, module: nn.Module | None, request: CheckRequest, *, parts: Sequence[WeightMatrix]
) -> list[tuple[int, int | None]]:
    """Possible numbers of query and kv heads: stated, else from arguments and attributes, else divisors of the widest weight."""
    n_kv = counts_of(built, module, "n_kv_heads")
    named = counts_of(built, module, "n_heads")
    width = max((max(part.weight.shape) for part in parts), default=1)
    counts = [n for n in range(1, 65) if width % n == 0]
    if named:
        counts = [*named, 1, *(width // n for n in named)]
    counts = [request.n_heads or counts[0], *counts]
    return [(n, next((m for m in n_kv if n % m == 0), None)) for n in dict.fromkeys(counts) if n]


def stated_heads(examined: Examined) -> int | None:
    """The number of query heads in options, arguments or attributes; None if there is none."""
    named = counts_of(examined.subject.built, examined.module, "n_heads")
    return examined.request.n_heads or next(iter(named), None)


def counts_of(built: Built, module: nn.Module | None, role: Role) -> list[int]:
    """Integers with names of this role, among arguments and module attributes."""
    namespaces: list[Mapping[str, Any]] = [{str(name).rpartition(".")[2]: v for name, v in built.arguments.items()}]
    for child in [] if module is None else module.modules():
        is_of_torch = type(child).__module__.startswith(
            "torch."
        )  # whose numbers are not heads, such as the groups of a norm
        if not is_of_torch or isinstance(child, nn.MultiheadAttention):
            namespaces.append(vars(child))
    counts = [
        value
        for namespace in namespaces
        for name, value in namespace.items()
        if type(value) is int and 0 < value <= 1024 and role_of(str(name)) == role
    ]
    return list(dict.fromkeys(counts))


# ------------------------------------------------------------------------------------------------------ what runs show


def _with_observed(bases: Sequence[Candidate], examined: Examined, runs: Run) -> Iterator[Candidate]:
    """Layers with the biases, sinks, norms around and residual connections that runs show."""
    choices: list[Choice] = []
    bias, sink = score_bias(examined.subject, examined.request.of.seed, runs), sinks(runs)
    before, after, around_it = around(runs, examined.module) if not examined.subject.is_function else (None, None, ())
    if bias is not None:
        choices.append(Choice("score-bias", f"score bias [head, query, key], {_READ}{_at(bias[1])}"))
    if sink is not None:
        choices.append(Choice("sinks", f"each head has a sink logit, {_READ}{_at(sink[1])}"))
    for base in bases:
        layer = replace(base.layer, before=before, after=after)
        layer = replace(layer, bias=None if bias is None else bias[0], sinks=None if sink is None else sink[0])
        yield replace(base, layer=layer, choices=(*base.choices, *choices, *around_it))


def _at(line: SourceLine) -> str:
    """A source location as the end of a sentence; empty if unknown."""
    return "" if line.file is None else f" at {Path(line.file).name}:{line.line}"


def _with_norms(
    base: Candidate, examined: Examined, runs: Run, shown: tuple[Norm | None, Norm | None]
) -> Iterator[Candidate]:
    """Layers with queries and keys normalised, by the norms that their names give to queries and keys, else as runs show; with
    and without norms if a run shows one of them."""
    layer, module = base.layer, examined.module
    named = {
        read_name(name)[0]: child
        for name, child in ([] if module is None else module.named_modules())
        if "norm" in name.rpartition(".")[2].lower() and [*child.parameters()] and read_name(name)[0] in ("q", "k")
    }
    if named:
        choice = Choice("qk-norm", "queries and keys of each head are normalised")
        normed = replace(layer, q_norm=named.get("q"), k_norm=named.get("k"))
        yield replace(base, layer=normed, choices=(*base.choices, choice))
        return
    q_norm, k_norm = shown[0] or shown[1], shown[1] or shown[0]
    if None in shown:
        yield base
    if q_norm is None or k_norm is None:
        return
    is_as_wide = q_norm.gain.shape[-1] == k_norm.gain.shape[-1] == layer.d_head
    fits = q_norm.gain.shape[0] in (1, layer.n_heads) and k_norm.gain.shape[0] in (1, layer.n_kv_heads)
    read = {leaf.site for operation in runs.graph.operations for leaf in operation.sources}
    unused = {name for name, _ in ([] if module is None else module.named_parameters())} - read
    if is_as_wide and fits and not unused:  # an unused gain is one that the queries or keys should have
        choice = Choice("qk-norm", f"queries and keys of each head are normalised, as {_READ}")
        normed = replace(layer, q_norm=q_norm, k_norm=k_norm)
        yield replace(base, layer=normed, choices=(*base.choices, choice))


# ---------------------------------------------------------------------------------------------------- rotation and scale


def _rotations(examined: Examined, runs: Run | None) -> list[Rotation]:
    """The rotations that runs show, with the stated pairing; every usual one if a run only shows position tables."""
    stated = examined.request.rope
    shown = [] if runs is None else rotations(runs)
    if shown:
        return [rotation._replace(pairing=stated or rotation.pairing) for rotation in shown]
    if stated is None and (runs is None or not has_tables(runs)):
        return [Rotation(None, None)]
    thetas = dict.fromkeys((*(value for _, value in _numbers(examined.subject.built, "theta")), 10000.0))
    usual = [Rotation(pairing, theta) for pairing in ([stated] if stated else PAIRS) for theta in thetas]
    return usual if stated else [Rotation(None, None), *usual]


def _scales(
    base: Candidate, examined: Examined, learned: Sequence[tuple[float | Tensor, SourceLine]]
) -> Iterator[Scale]:
    """The possible scales: of the option, the usual one (None), of arguments, and learned ones that a run shows. If the number
    of heads differs from the stated one, the stated one's scale is possible too."""
    request, layer = examined.request, base.layer
    if request.scale is not None:
        yield request.scale, Choice("scale", f"the scale is {request.scale:g}, from --scale")
    d_head = layer.d_head
    if d_head is not None and isinstance(layer.q_norm, Norm) and layer.q_norm.is_unit:
        yield d_head**0.5, Choice("scale", "scores are cosines, times √d_head")
    else:
        yield None, None
    for name, value in _numbers(examined.subject.built, "scale"):
        yield value, Choice("scale", f"the scale is {value:g}, given as {name}")
    for scale, line in learned:
        of = "the scale" if isinstance(scale, float) else "the scale of each head"
        yield scale, Choice("scale", f"{of} is learned, {_READ}{_at(line)}")
    n_stated = stated_heads(examined)
    if layer.weights is not None and n_stated not in (None, layer.n_heads):
        yield (layer.weights.q.weight.shape[0] / n_stated) ** -0.5, None


def _numbers(built: Built, role: Role) -> list[tuple[str, float]]:
    """The numeric arguments of a role."""
    names = {
        str(name): value for name, value in built.arguments.items() if role_of(str(name).rpartition(".")[2]) == role
    }
    return [(n, float(v)) for n, v in names.items() if isinstance(v, int | float) and not isinstance(v, bool)]


def _with(
    base: Candidate, examined: Examined, causal: bool, rotation: Rotation, scale: Scale, softcap: float | None
) -> Candidate:
    """A layer with these choices."""
    choices = list(base.choices)
    if rotation.pairing is not None:
        choices.append(Choice("rope", rotation.description(base.layer.d_head)))
    if scale[1] is not None:
        choices.append(scale[1])
    if softcap is not None:
        choices.append(Choice("softcap", f"scores are soft-capped at {softcap:g}"))
    layer = replace(base.layer, causal=causal, pairing=rotation.pairing, rates=rotation.rates)
    layer = replace(layer, theta=rotation.base or 10000.0, scale=scale[0], softcap=softcap)
    is_as_stated = examined.request.scale is None or layer.scale is examined.request.scale
    contradicts = base.contradicts if is_as_stated else (*base.contradicts, "scale")
    return replace(base, layer=layer, choices=tuple(choices), contradicts=contradicts)
