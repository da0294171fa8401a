"""The layers that a user's attention may implement: every reading of its weights, with every design
choice that a call or a statement allows.

Of scores and scales only tensors that do not depend on the inputs are read, so that mistakes that
depend on inputs stay visible.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhacli.attention.mistakes import scales_of_mistakes
from mhacli.attention.stages import Inputs, Pairing, ReferenceLayer, do_broadcast, require
from mhacli.usercode.build import Built, as_float64, is_of_torch
from mhacli.usercode.door import NO_ANSWER, Unreadable, call_user
from mhacli.usercode.faults import SourceLine
from mhacli.usercode.graph import HIDDEN, KERNEL, Operation, RecordedCall
from mhacli.usercode.projections import (
    ProjectionReading,
    Widths,
    is_norm,
    parts_of,
    projection_readings,
)
from mhacli.usercode.roles import role_of
from mhacli.usercode.target import Choice
from mhacli.usercode.user_attention import UserAttention

from .patterns import Pattern, pattern_of
from .probes import (
    TOLERANCE,
    InputCase,
    ProbedAttention,
    influence_in,
    make_case,
    recorded_case,
)
from .result import CheckRequest
from .sees import LENGTHS, statement_of

_READ = "read from the run"
"""The ending of a choice that a call showed."""
Norm = Callable[[Tensor], Tensor]
"""A norm."""


class DesignChoice(NamedTuple):
    """A possible design: the fields of the layer that it changes, and the choices that it is."""

    changes: Mapping[str, Any]
    choices: tuple[Choice, ...] = ()


_PLAIN = DesignChoice({})


def _chosen(name: str, message: str, **changes: Any) -> DesignChoice:
    """A design that is one choice."""
    return DesignChoice(changes, (Choice(name, message),))


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layer that it may implement, whose `design` has no weights, with the choices that it is.
    `reading` is the source of the weights, None for a function.
    """

    design: ReferenceLayer
    choices: tuple[Choice, ...] = ()
    reading: ProjectionReading | None = None

    @cached_property
    def layer(self) -> ReferenceLayer:
        """The design with its weights."""
        if self.reading is None:
            return self.design
        return replace(self.design, weights=self.reading.weights)

    def with_designs(self, *options: DesignChoice) -> Candidate:
        """The same with further designs."""
        fields = {name: value for option in options for name, value in option.changes.items()}
        choices = [*self.choices, *(choice for option in options for choice in option.choices)]
        return replace(self, design=replace(self.design, **fields), choices=tuple(choices))

    def contradicts(self, request: CheckRequest) -> tuple[str, ...]:
        """The statements, `heads` or `scale`, that it does not follow."""
        contradicted = []
        if self.reading is not None and request.n_heads not in (None, self.design.n_heads):
            contradicted.append("heads")
        # the number that `scales` took from the option, not one of the code that is as large
        if request.scale is not None and self.design.scale is not request.scale:
            contradicted.append("scale")
        return tuple(contradicted)


def candidates(probed: ProbedAttention, call: RecordedCall) -> list[Candidate]:
    """Every possible layer, those that contradict a statement last, with the fewest choices first.
    Empty if its projections cannot be identified.
    """
    read = (
        norms,
        scales,
        causality,
        rotations,
        softcaps,
        score_biases,
        sinks,
        input_norms,
        after_attention,
    )
    layers = list[Candidate]()
    for subject, own, known in _with_queries(probed, call):
        designs = list(product(*(list(options(subject, known)) for options in read)))
        bases = _base_layers(subject)
        layers += [base.with_designs(own, *design) for base in bases for design in designs]

    def doubts(candidate: Candidate) -> tuple[int, int]:
        """How many statements it contradicts, then how many of its choices no call has shown."""
        not_shown = {choice.name for choice in candidate.choices if _READ not in choice.message}
        return len(candidate.contradicts(probed.request)), len(not_shown)

    return sorted(layers, key=doubts)


def _at(line: SourceLine) -> str:
    """A source location as the end of a sentence; empty if unknown."""
    return "" if line.file is None else f" at {Path(line.file).name}:{line.line}"


# -------------------------------------------------------------------------------- weights and heads


def _with_queries(
    probed: ProbedAttention, call: RecordedCall
) -> Iterator[tuple[ProbedAttention, DesignChoice, RecordedCall]]:
    """The attention and a call, with each of the queries that it may make itself: a parameter, or
    the first or the last rows of what it reads, or their mean.
    """
    subject = probed.subject
    module = probed.module
    n = subject.sizes.q_len
    if not subject.has_own_queries or module is None:
        yield probed, _PLAIN, call
        return
    own: dict[str, Callable[[Inputs], Tensor]] = {
        "its first rows": lambda inputs: inputs.rows_of("k")[:, :n],
        "its last rows": lambda inputs: inputs.rows_of("k")[:, -n:],
        "the mean of its rows": lambda inputs: (
            inputs.rows_of("k").mean(1)[:, None].expand(-1, n, -1)
        ),
    }
    own = {name: rows for name, rows in own.items() if call.producers_of(rows(call.inputs))}
    for path, part in module.named_modules():
        is_of_user = not is_of_torch(part) and not is_norm(part)
        for name, each in part.named_parameters(path, recurse=False):
            if each.numel() % n == 0 and (is_of_user or isinstance(part, nn.Embedding)):
                own[name] = partial(_repeated, each.reshape(n, -1))
    for name, queries in own.items():
        design = _chosen("own-queries", f"the queries are {name}", queries=queries)
        inputs = call.inputs.with_queries(queries(call.inputs).detach())
        known = recorded_case(subject, InputCase(name, inputs, call.out))
        sizes = subject.sizes._replace(d_in=inputs.queries.shape[-1])
        yield replace(probed, subject=replace(subject, sizes=sizes)), design, known


def _repeated(rows: Tensor, inputs: Inputs) -> Tensor:
    """The same rows for each text."""
    return rows.repeat(len(inputs.queries), 1, 1)


def _base_layers(probed: ProbedAttention) -> Iterator[Candidate]:
    """The layers that the weights allow, with each way to split and join heads."""
    subject = probed.subject
    module = probed.module
    request = probed.request
    if subject.is_function:
        yield Candidate(ReferenceLayer(subject.sizes.n_heads, subject.sizes.n_heads))
        return
    for reading in readings_of(subject, module, probed.tensors, request.n_heads):
        choices = list(reading.choices)
        if not reading.out:
            choices.append(Choice("no-out-proj", "there is no output projection"))
        design = ReferenceLayer(reading.n_heads, reading.n_kv_heads)
        base = Candidate(design, tuple(choices), reading)
        yield base
        if reading.n_heads == 1:
            continue
        words = f"a head has every {reading.n_heads}th column"
        for splits, merges in ((True, True), (True, False), (False, True)):
            yield base.with_designs(
                _chosen(
                    "interleaved-heads",
                    words if splits == merges else f"{words} on one side",
                    interleaved_split=splits,
                    interleaved_merge=merges,
                )
            )


def readings_of(
    subject: UserAttention,
    module: nn.Module | None,
    tensors: Mapping[str, Tensor],
    stated: int | None,
) -> Iterator[ProjectionReading]:
    """Every reading of the weights, with each possible number of heads: stated, else from arguments
    and attributes, else divisors of the widest weight.
    """
    named = counts_of(subject.built, "n_heads")
    n_kv = counts_of(subject.built, "n_kv_heads")
    parts = parts_of(module, tensors)
    sizes = subject.sizes
    width = max((max(part.weight.shape) for part in parts), default=1)
    counts = [*named, 1, *(width // n for n in named)]
    if not named:
        counts = [n for n in range(1, 65) if width % n == 0]
    for n_heads in dict.fromkeys(n for n in (stated, *counts) if n):
        n_kv_heads = next((n for n in n_kv if n_heads % n == 0), None)
        yield from projection_readings(
            parts, Widths(sizes.d_in, sizes.d_context, n_heads, n_kv_heads)
        )


def counts_of(built: Built, role: str) -> list[int]:
    """Integers with names of this role, among arguments and attributes of modules. Those of torch's
    modules are not heads, as the groups of a norm are not.
    """
    named = list(built.arguments.items())
    for part in built.parts.values():
        if isinstance(part, nn.MultiheadAttention) or not is_of_torch(part):
            named += vars(part).items()
    numbers = [number for _, number in numbers_of(named, role) if isinstance(number, int)]
    return [number for number in dict.fromkeys(numbers) if 0 < number <= 1024]


def numbers_of(named: Iterable[tuple[str, Any]], role: str) -> list[tuple[str, float]]:
    """The named values of a role that are numbers."""
    numbers = [(name, value) for name, value in named if type(value) in (int, float)]
    return [(name, value) for name, value in numbers if role_of(name.rpartition(".")[2]) == role]


# --------------------------------------------------------------------- causality, scale and softcap


FROM_FIRST_KEY = Choice(
    "causal-top-left",
    "where queries and keys differ in number, the first query stands at the first key",
)
"""The corner in which the mask of some kernels begins."""


def causality(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """With its own causal mask and without, the expected one first; only one where its behaviour
    shows which; what is stated alone, where the probes show it. Then with a rule of its own
    that the probes show; where it is meant to be causal, one that shows the future does not count.
    """
    expected = probed.expects_causal
    influence = probed.influence
    if influence is not None and (statement := statement_of(probed.request)) is not None:
        n_heads = next(iter(counts_of(probed.subject.built, "n_heads")), 1)
        n_heads = probed.subject.sizes.n_heads or n_heads
        stated = [*statement.that_give(influence, n_heads)]
        if len(stated) > 1:  # layers that differ further away
            further = influence_in(probed, LENGTHS[0])
            stated = stated if further is None else [*statement.that_give(further, n_heads)]
        for cells in stated:
            yield _chosen("as-stated", "tokens see others as --sees states", visible_cells=cells)
        if stated:
            return
    if expected and probed.visible == "full":
        yield DesignChoice({"causal": not probed.subject.mask_forms})
        return
    yield DesignChoice({"causal": expected})
    yield DesignChoice({"causal": not expected})
    if probed.subject.is_function:
        yield DesignChoice({"causal": True, "top_left": True}, (FROM_FIRST_KEY,))
    is_finite = bool(call.out.isfinite().all())  # NaN would count as seeing nothing
    if influence is None or not is_finite or (expected and bool(influence.triu(1).any())):
        return
    pattern = pattern_of(influence)
    is_window = probed.visible == "causal" and not pattern.is_of_length
    if is_window or probed.visible in ("other", "itself only"):
        yield own_pattern(pattern)


def own_pattern(pattern: Pattern) -> DesignChoice:
    """The design of a layer that hides cells by a pattern of its own."""
    return _chosen("own-pattern", pattern.words, causal=False, visible_cells=pattern.cells)


def softcaps(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """The stated softcap, else the number that scores are divided by before a tanh."""
    caps = [value for _, value in numbers_of(probed.subject.built.arguments.items(), "softcap")]
    if not caps:
        for op in call.operations:
            factor = _factor_of(op.sources[0]) if op.name == "tanh" else None
            if factor and call.as_scores(op.output, op.output.shape) is not None:
                caps.append(1 / factor)
    if caps:
        yield _chosen("softcap", f"scores are soft-capped at {caps[0]:g}", softcap=caps[0])
    else:
        yield _PLAIN


def _factor_of(operation: Operation) -> float | None:
    """The number that an operation multiplies by, None if it does not."""
    number = operation.arguments.get("other", operation.arguments.get("1"))
    if operation.name.rstrip("_") not in ("mul", "div") or not isinstance(number, int | float):
        return None
    return number if operation.name.startswith("mul") else 1 / number


def scales(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """The possible scales: of the option, the usual one, of arguments, and the learned factors of
    vectors or scores that the call shows, a number or one for each head, `[head, 1, 1]`.
    """
    stated = probed.request.scale
    if stated is not None:
        yield _chosen("scale", f"the scale is {stated:g}, from --scale", scale=stated)
    yield _PLAIN
    arguments = probed.subject.built.arguments.items()
    for name, value in numbers_of(arguments, "scale"):
        yield _chosen("scale", f"the scale is {value:g}, given as {name}", scale=value)
    for name, value in arguments:
        if name.rpartition(".")[2] == "query_pre_attn_scalar" and type(value) in (int, float):
            words = f"the scale is 1/√{value:g}, given as {name}"
            yield _chosen("scale", words, scale=value**-0.5)
    yield from _scales_of_normed(probed, call)
    elsewhere = {*call.behind, *call.path("v")} - {*call.path("q"), *call.path("k")}
    for op, source in call.combined("mul", "div"):
        if not _is_learned(source) or op in elsewhere:
            continue
        factor = 1 / source.output if op.name.startswith("div") else source.output
        scores = call.as_scores(factor, op.output.shape)
        read = f"is learned, {_READ}{_at(op.at)}"
        if scores is not None and (scores == scores[:1, :, :1, :1]).all():
            yield _chosen("scale", f"the scale of each head {read}", scale=scores[0, :, :1, :1])
        elif factor.numel() == 1:
            yield _chosen("scale", f"the scale {read}", scale=factor.item())


def _scales_of_normed(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """The scales of the scores of queries and keys which all have one length: of units any number
    of the call, of others (an RMS norm without a gain) none that a mistake explains.
    """
    d_head = 1
    for role in "qk":
        widths = [rows.shape[-1] for _, rows in call.vectors(role) if _have_one_length(rows)]
        if not widths:
            return
        d_head = widths[-1]
    numbers = [op.arguments.get("scale", _factor_of(op)) for op in call.operations]
    factors = {float(x) for x in numbers if isinstance(x, int | float) and x}
    if all(any(_have_one_length(rows, 1) for _, rows in call.vectors(role)) for role in "qk"):
        for factor in factors | {1.0}:
            yield _chosen("scale", f"the scale of cosines is {factor:g}, {_READ}", scale=factor)
        return
    base = next(_base_layers(probed), None)
    if base is None:
        return
    batch, *lengths = call.inputs.lengths
    shape = batch, base.layer.n_heads, *lengths
    mistaken = [*scales_of_mistakes(base.layer, shape, d_head)]
    for factor in factors:
        if not any(math.isclose(factor, each, rel_tol=1e-6) for each in mistaken):
            yield _chosen("scale", f"the scale is {factor:g}, {_READ}", scale=factor)


def _have_one_length(rows: Tensor, length: float | None = None) -> bool:
    """Whether all vectors have the same length, or the given one."""
    lengths = rows.norm(dim=-1)
    given = lengths.max() if length is None else length
    return rows.shape[-1] > 1 and bool(((lengths - given).abs() <= TOLERANCE * given).all())


def _is_learned(source: Operation) -> bool:
    """Whether a tensor that does not depend on the inputs is a parameter, or computed from
    parameters.
    """
    used = [source, *(leaf for operation in source.upstream() for leaf in operation.sources)]
    return any(isinstance(each.output, nn.Parameter) for each in used)


# --------------------------------------------------------------------------------- biases and sinks


class ScoreBias(NamedTuple):
    """A bias added to scores in a call, `[1 or batch, head, query, key]`, scaled as it reaches the
    softmax, and its line; with the name of the mistake that it is, if it is one.
    """

    values: Tensor
    at: SourceLine
    mistake: str | None = None


def score_biases(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """The score bias that a call shows, for inputs of any length; it raises what the subject
    raises.
    """
    subject = probed.subject
    seed = probed.request.seed
    shown = [*score_biases_in(call)]

    @functools.cache
    def at_lengths(with_context: bool, batch: int, q_len: int, k_len: int) -> Tensor | None:
        """The sum of the biases that another call of these lengths shows, None for none."""
        inputs = subject.drawer(seed).inputs(
            with_context=with_context, q_len=q_len, k_len=k_len, batch=batch
        )
        other = recorded_case(subject, make_case("other lengths", subject, inputs))
        biases = [each.values for each in score_biases_in(other)]
        return sum(biases, torch.zeros(())) if biases else None

    def bias(inputs: Inputs) -> Tensor | None:
        return at_lengths(inputs.keys is not None, *inputs.lengths)

    if shown:
        words = f"score bias [head, query, key], {_READ}{_at(shown[0].at)}"
        yield _chosen("score-bias", words, bias=bias)
    else:
        yield _PLAIN


def score_biases_in(call: RecordedCall) -> Iterator[ScoreBias]:
    """Every bias added to scores in a call; masks are left out."""
    for op, source in call.combined("add", "sub", "baddbmm", KERNEL):
        shape = op.output.shape
        added = source.output
        is_operand = op.name == KERNEL and source in op.sources[:3]  # such as a learned query
        if is_operand or not added.is_floating_point() or op.arguments.get("beta") == 0:
            continue
        if op.name == KERNEL:
            shape = torch.Size((*op.sources[0].output.shape[:-1], op.sources[1].output.shape[-2]))
        bias = call.as_scores(added, shape)
        if bias is None or bias[bias >= HIDDEN].unique().numel() <= 2:
            continue
        visible = bias[0, 0, -1] >= HIDDEN
        factor = next(filter(None, map(_factor_of, op.readers)), 1.0)
        if op.name.startswith("sub"):
            factor = -factor
        bias = bias.masked_fill(bias < HIDDEN, 0.0) * factor
        if (bias == bias[:1]).all():
            yield _bias_of_all_sequences(bias[:1], visible, op, source)
            continue
        # read as if sequences vary faster than heads, it may be one for all sequences
        by_head = bias.reshape(bias.shape[1], len(bias), *bias.shape[2:])
        is_moved = (by_head == by_head[:, :1]).all()
        yield ScoreBias(bias, op.at, "bias-head-order, batched" if is_moved else None)


def _bias_of_all_sequences(
    bias: Tensor, visible: Tensor, op: Operation, source: Operation
) -> ScoreBias:
    """A bias `[1, head, query, key]` that an operation adds, with its mistake; `visible` are the
    keys of the last query.
    """
    reshaped = next((each for each in source.upstream() if _moves_heads(each, bias.shape)), None)
    if reshaped is not None:
        return ScoreBias(bias, reshaped.at, "bias-head-order")
    # a penalty grows with the distance to earlier keys: along the keys, it must not fall
    slopes = bias[0, :, -1, visible].diff(dim=-1)
    is_line = torch.allclose(slopes, slopes[:, :1].expand_as(slopes))
    falls = slopes.shape[-1] > 1 and is_line and bool(slopes.max() < 0)
    is_bonus = falls and not _is_learned(source)
    return ScoreBias(bias, op.at, "bias-reversed" if is_bonus else None)


def _moves_heads(operation: Operation, shape: Sequence[int]) -> bool:
    """Whether it reshapes a learned table, heads last, to a bias `[…, head, query, key]` without a
    transpose.
    """
    if operation.name not in ("view", "reshape") or not _is_learned(operation):
        return False
    table = operation.sources[0].output.shape
    reshaped = operation.output.shape
    return table[-1] == shape[1] > 1 and table != reshaped and reshaped[-3:] == tuple(shape[1:])


def sinks(_: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """The sink logit of each head, `[head]`, an extra score column that is equal for all
    queries.
    """
    k_len = call.inputs.lengths[2]
    for op, source in call.combined("cat"):
        column = source.output
        if column.shape[-1] != 1 or op.output.shape[-1] != k_len + 1:
            continue
        logits = call.as_scores(column, torch.Size((*op.output.shape[:-1], k_len)))
        if logits is not None and (logits == logits[:1, :, :1]).all():
            words = f"each head has a sink logit, {_READ}{_at(op.at)}"
            yield _chosen("sinks", words, sinks=logits[0, :, 0, 0])
            return
    yield _PLAIN


# ---------------------------------------------------------------------------------------- rotations


PAIRS: dict[Pairing, str] = {
    "half": "column j with column j + d/2",
    "interleaved": "neighbouring columns",
}


class Rotation(NamedTuple):
    """A rotation that a call shows: the radians per position of each pair of columns, in a width
    of `d` columns.
    """

    pairing: Pairing
    rates: Tensor
    d: int

    @property
    def words(self) -> str:
        """Which columns it turns, and by which angles."""
        base = base_of(self.rates)
        n_turned = 2 * int((self.rates.abs() > 1e-6).sum())
        words = (
            f"{PAIRS[self.pairing]}, {'angles of its own' if base is None else f'base {base:g}'}"
        )
        if n_turned != self.d:
            words = f"{n_turned} of {self.d} columns, {words}"
        return f"{words}, backwards" if self.rates[0] < 0 else words


def rotations(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """Every distinct rotation of queries or keys in a call, by position or by head, backward ones
    last, with the stated pairing; none and the usual ones if it only shows tables of numbers that
    multiply queries or keys.
    """
    shown = _rotations_in(call, probed.request.rope)
    for each in sorted(shown, key=lambda rotation: bool(rotation.rates[0] < 0)):
        words = f"rotary positions rotate {each.words}"
        yield _chosen("rope", words, pairing=each.pairing, rates=each.rates)
    if not shown:
        yield from _usual_rotations(probed, call)


def _rotations_in(call: RecordedCall, stated: Pairing | None) -> list[Rotation]:
    """Every distinct rotation of queries or keys in a call."""
    distinct: dict[tuple[Pairing, tuple[float, ...]], Rotation] = {}
    vectors = [[rows for _, rows in call.vectors(role)] for role in "qk"]
    pairs = [pair for rows in vectors for pair in combinations(rows, 2)]
    for (x, y), pairing, axis in product(pairs, PAIRS, (-2, -3)):
        if x.shape != y.shape or x.shape[-1] % 2:
            continue
        rates = _rates(x.movedim(axis, 0), y.movedim(axis, 0), pairing)
        if rates is not None:
            rotation = Rotation(stated or pairing, rates, x.shape[-1])
            angles = tuple(rates.round(decimals=4).tolist())
            distinct.setdefault((rotation.pairing, angles), rotation)
    return [*distinct.values()]


def _usual_rotations(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """None, unless a pairing is stated, and those by the usual angles."""
    stated = probed.request.rope
    pairings = list[Pairing]()
    if stated:
        pairings = [stated]
    else:
        yield _PLAIN
        path = {*call.path("q"), *call.path("k")}
        products = call.combined("mul", "addcmul", "matmul", "bmm", "einsum")
        if any(
            source.output.ndim > 1 and op in path and not op.projects for op, source in products
        ):
            pairings = [*PAIRS]
    given = numbers_of(probed.subject.built.arguments.items(), "theta")
    thetas = dict.fromkeys([value for _, value in given] + [10000.0])
    for pairing, theta in product(pairings, thetas):
        words = f"rotary positions rotate {PAIRS[pairing]}, base {theta:g}"
        yield _chosen("rope", words, pairing=pairing, theta=theta)


def _rates(x: Tensor, y: Tensor, pairing: Pairing) -> Tensor | None:
    """The angle per position by which each rotated pair of columns is turned from x to y,
    `[position, …, d]`; None if y is no such rotation, or its angles do not look like positions: of
    one sign, and falling from pair to pair.
    """
    a = _pairs(x, pairing)
    b = _pairs(y, pairing)
    others = tuple(range(1, a.ndim - 1))
    products = b * a.conj()
    squares = a.abs().square()
    rotor = products.sum(others, keepdim=True) / squares.sum(others, keepdim=True)
    steps = rotor[1:] / rotor[:-1]
    is_rotation = (rotor.abs() - 1).abs().max() <= 1e-4
    is_rotation &= (b - rotor * a).abs().max() <= TOLERANCE * x.abs().max()
    if len(steps) < 2 or not is_rotation or (steps - steps[:1]).abs().max() > 1e-4:
        return None
    rates = steps.mean(dim=0).angle().flatten()
    turned = rates.abs() > 1e-6
    sizes = rates * rates[:1].sign()
    if not turned.any() or sizes.min() < -1e-6 or bool((sizes.diff() > 1e-6).any()):
        return None
    # of halves, pairs that stand still have places among the others
    return rates if pairing == "half" else rates[turned]


def _pairs(rows: Tensor, pairing: Pairing) -> Tensor:
    if pairing == "half":
        return torch.complex(*rows.chunk(2, dim=-1))
    return torch.complex(rows[..., 0::2], rows[..., 1::2])


def base_of(rates: Tensor) -> float | None:
    """Theta if the rates are theta^(−2j/d)."""
    exponents = torch.arange(len(rates), dtype=torch.float64) / len(rates)
    base = 10000.0 if len(rates) == 1 else float(rates[1].abs()) ** -len(rates)
    is_base = torch.allclose(rates.abs(), base**-exponents, rtol=1e-3, atol=1e-7)
    return base if is_base else None


# -------------------------------------------------------------------------------------------- norms


_NORMS: tuple[Callable[..., Tensor], ...] = (F.rms_norm, F.layer_norm)
_EPS = (0.0, torch.finfo(torch.float32).eps, 1e-6, 1e-5)


def norm_of(call: RecordedCall, role: str) -> Norm | None:
    """The norm of the heads of queries or keys in a call, with all that follows it, such as a gain,
    but without a number below 1, which scales the scores; None without one.
    """
    rows = list[Tensor]()
    scale = 1.0
    for operation, tensor in call.vectors(role):
        scale *= min(_factor_of(operation) or 1.0, 1.0) if tensor.shape[-1] > 1 else 1.0
        rows.append((tensor if tensor.ndim == 4 else tensor[:, None]) / scale)
    pairs = ((x, y) for n, x in enumerate(rows) for y in reversed(rows[n + 1 :]))
    for x, y in pairs:
        if x.shape != y.shape:
            continue
        fits = [_fitted(x, y, function, eps) for function, eps in product(_NORMS, _EPS)]
        gaps = [float((norm(x) - y).abs().max()) for norm in fits]
        least = min(gaps)
        if least <= TOLERANCE * y.abs().max():  # not if the rows are 0, and the norm NaN
            return fits[gaps.index(least)]
    return None


def _fitted(x: Tensor, y: Tensor, function: Callable[..., Tensor], eps: float) -> Norm:
    """The norm of heads `[batch, head, length, d]`, each by itself or all together, with the best
    gain and shift for each head and column, or for all heads if these are equal.
    """
    normed = function(x, x.shape[-1:], eps=eps)
    u, y = (rows.movedim(1, 0).flatten(1, -2) for rows in (normed, y))
    mean_u = u.mean(dim=1, keepdim=True)
    mean_y = y.mean(dim=1, keepdim=True)
    covariance = ((u - mean_u) * (y - mean_y)).mean(dim=1, keepdim=True)
    variance = (u - mean_u).square().mean(dim=1, keepdim=True)
    gain = covariance / variance.clamp(min=1e-30)
    shift = mean_y - gain * mean_u
    if torch.allclose(gain, gain[:1].expand_as(gain), rtol=1e-4, atol=1e-7):
        gain = gain.mean(dim=0, keepdim=True)
        shift = shift.mean(dim=0, keepdim=True)

    def norm(heads: Tensor) -> Tensor:
        """The fitted norm; one of all heads together takes them as one row."""
        if heads.shape[-1] != gain.shape[-1] and heads.shape[1] > 1:
            joined = norm(heads.transpose(1, 2).flatten(2)[:, None])
            return joined.reshape(heads.transpose(1, 2).shape).transpose(1, 2)
        require(do_broadcast(heads.shape[1:], (len(gain), 1, gain.shape[-1])))
        return function(heads, heads.shape[-1:], eps=eps) * gain + shift

    return norm


def norms(_: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """The norms of queries and keys that a call shows, the same for both and none where it shows
    one, beside what it does to values: a norm, or a learned number times them.
    """
    q_norm = norm_of(call, "q")
    k_norm = norm_of(call, "k")
    of_values = list[Choice]()
    v_norm = norm_of(call, "v")
    if v_norm:
        of_values = [Choice("v-norm", f"values are normalised, as {_READ}")]
    elif (factor := _factor_of_values(call)) is not None:
        words = f"values are multiplied by a learned number, {factor.item():g}, {_READ}"
        of_values = [Choice("v-factor", words)]
        v_norm = factor.mul
    if q_norm is None or k_norm is None:
        yield DesignChoice({"v_norm": v_norm}, tuple(of_values))
    if q_norm or k_norm:
        chosen = Choice("qk-norm", f"queries and keys are normalised, as {_READ}")
        changes = {"q_norm": q_norm or k_norm, "k_norm": k_norm or q_norm, "v_norm": v_norm}
        yield DesignChoice(changes, (chosen, *of_values))


def _factor_of_values(call: RecordedCall) -> Tensor | None:
    """The learned number that a call multiplies values by, and neither queries nor keys."""
    others = {*call.path("q"), *call.path("k")}
    for op, source in call.combined("mul"):
        is_of_values = op in call.path("v") and op not in others
        if is_of_values and source.output.numel() == 1 and _is_learned(source):
            return as_float64(source.output).flatten()
    return None


# ----------------------------------------------------------------------------- around the attention


_ACTIVATIONS = ("relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu")


def input_norms(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """The norms of the module that the inputs of queries and of keys pass first, the same for both
    in self-attention; none where the call shows none.
    """
    norms = _norms_in(probed)
    of_q, of_k = (
        [norm for norm in norms if _is_made(rows, norm, _made_rows(call, rows.shape))]
        for rows in map(call.inputs.rows_of, "qk")
    )
    if not (of_q or of_k):
        yield _PLAIN
        return
    for q_norm, k_norm in product((*of_q, _unchanged), (*of_k, _unchanged)):
        words = "the input is normalised first"
        if k_norm is _unchanged:
            words = "the input of the queries is normalised first"
        is_possible = q_norm is k_norm or probed.subject.takes_context
        if is_possible and (q_norm, k_norm) != (_unchanged, _unchanged):
            yield _chosen("pre-norm", words, before=partial(_normalised, q_norm, k_norm))


def _unchanged(rows: Tensor) -> Tensor:
    """The rows as they are, without a norm."""
    return rows


def _normalised(of_q: Norm, of_k: Norm, inputs: Inputs) -> Inputs:
    """The inputs, of which queries pass one norm, keys and values another."""
    k, v = (of_k(inputs.rows_of(role)) for role in "kv")
    return inputs._replace(queries=of_q(inputs.queries), keys=k, values=v)


@dataclass(frozen=True)
class AfterAttention:
    """What follows the output projection: learned numbers times the output, then the input added,
    then a norm, then an activation, each if there is one. As a function it is `after` of a layer.
    """

    has_residual: bool = False
    norm: Norm | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    gate: Tensor | None = None

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """What is made of an output, and the input."""
        if self.gate is not None:
            require(do_broadcast(out.shape, self.gate.shape))
            out = out * self.gate
        if self.has_residual:
            require(do_broadcast(out.shape, x.shape))
            out = out + x
        normed = out if self.norm is None else self.norm(out)
        return normed if self.activation is None else self.activation(normed)


def after_attention(probed: ProbedAttention, call: RecordedCall) -> Iterator[DesignChoice]:
    """What the call does with the output: learned numbers times it, a residual connection, a norm
    of the module, and an activation at the end.
    """
    if probed.subject.is_function or not call.operations:
        yield _PLAIN
        return
    out = as_float64(call.out)
    last = call.operations[-1]
    choices = list[Choice]()
    activation = None
    name = last.name.rstrip("_")
    if name in _ACTIVATIONS:
        out = _as_rows(last.sources[0].output)
        activation = getattr(F, name)
        choices.append(Choice("activation", f"the output passes through {name}"))
    after = replace(_summed(probed, call, out), activation=activation)
    if after.norm is not None:
        choices.append(Choice("post-norm", "the output is normalised"))
    if after.has_residual:
        choices.append(Choice("residual", "the input is added to the output"))
    gated = Choice("gate", "the output is multiplied by learned numbers")
    for op, source in call.combined("mul"):
        is_of_width = source.output.numel() in (1, out.shape[-1])
        if op in call.behind and is_of_width and _is_learned(source):
            gate = as_float64(source.output).flatten()
            yield DesignChoice({"after": replace(after, gate=gate)}, (*choices, gated))
    yield DesignChoice({"after": after}, tuple(choices))


def _summed(probed: ProbedAttention, call: RecordedCall, out: Tensor) -> AfterAttention:
    """The residual connection and the norm that make an output of what the call makes before."""
    inputs = call.inputs.queries
    made = _made_rows(call, call.out.shape)
    for norm, has_residual in product((*_norms_in(probed), None), (True, False)):
        if has_residual and inputs.shape != out.shape:
            continue
        if any(_is_made(rows + inputs if has_residual else rows, norm, [out]) for rows in made):
            return AfterAttention(has_residual, norm)
    return AfterAttention()


def _norms_in(probed: ProbedAttention) -> list[Norm]:
    """The norms of a module, as functions of rows `[batch, length, width]`."""
    if probed.module is None or probed.subject.is_function:
        return []
    return [_of_rows(part) for part in [*probed.module.modules()][1:] if is_norm(part)]


def _made_rows(call: RecordedCall, shape: Sequence[int]) -> list[Tensor]:
    """What a call makes in a shape, with the first or the last two axes exchanged too."""
    made = [_as_rows(op.output) for op in call.operations if op.output.ndim > 2]
    turned = (rows for each in made for rows in (each, each.transpose(0, 1), each.mT))
    return [rows for rows in turned if rows.shape == shape]


def _as_rows(tensor: Tensor) -> Tensor:
    """The tensor in float64, a map of channels as rows."""
    rows = as_float64(tensor)
    return rows.flatten(2).mT if rows.ndim == 4 else rows


def _of_rows(norm: nn.Module) -> Norm:
    """A norm of the module as a function of rows `[batch, length, width]`, which it is compared in.
    `nn.GroupNorm` takes `[batch, width, length]`. The module may be code of the user's under the
    name of a norm: the function raises `UserRaised` for what it raises, such as for another width,
    and `Unreadable` if it gives no tensor.
    """
    is_of_channels = isinstance(norm, nn.GroupNorm)

    def normed(rows: Tensor) -> Tensor:
        out = call_user(norm, rows.mT if is_of_channels else rows)
        if not isinstance(out, Tensor):
            raise Unreadable(f"{type(norm).__name__} gives no tensor")
        return out.mT if is_of_channels else out

    return normed


def _is_made(rows: Tensor, norm: Norm | None, made: Sequence[Tensor]) -> bool:
    """Whether a call makes these rows, normalised."""
    try:
        normed = rows if norm is None else norm(rows).detach()
    except NO_ANSWER:  # a norm of heads
        return False
    others = [other for other in made if other.shape == normed.shape]
    return any(
        bool((normed - other).abs().max() <= TOLERANCE * normed.abs().max()) for other in others
    )
