"""Hypotheses about a user's attention, and their evidence: numbers, source lines, and the smallest input."""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mhacli.attention.mistakes import Mistake
from mhacli.attention.mistakes.masks import MASKING
from mhacli.attention.mistakes.stages import ReferenceLayer, run, stages_with
from mhacli.commands.check.inputs import HIDDEN, InputCase, make_case, max_error, output_for
from mhacli.commands.check.result import FirstDifference
from mhacli.usercode.build import Built
from mhacli.usercode.graph import Operation, watch
from mhacli.usercode.names import assigned_names, is_within
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import read_name
from mhacli.usercode.user_attention import Inputs, UserAttention


def error_of(layer: ReferenceLayer, mistakes: Sequence[Mistake], cases: Sequence[InputCase]) -> float:
    """The largest difference from the outputs, relative to each case's tolerance: up to 1 is a match, and the first larger one
    ends the comparison. Infinite if shapes or NaN positions differ, if a mistake does not apply to this layer, or if everything
    is NaN and none of the mistakes leaves only that.

    Rows that are not counted and queries without visible keys have no right output and are left out.
    """
    stages, worst = stages_with(mistakes), 0.0
    may_be_nan = any(mistake.may_be_nan for mistake in mistakes)
    for case in cases:
        try:
            with torch.no_grad():
                out, keep = run(stages, layer, case.rows)
            if out.shape != case.output.shape:
                return math.inf
            counted = _counted(case, keep, out)
        except Exception:  # the mistake is not possible here, or a norm of the module fails
            return math.inf
        compared = out[counted]
        if not compared.numel() or (not may_be_nan and bool(compared.isnan().all())):
            return math.inf
        worst = max(worst, max_error(compared, case.output[counted]) / case.tolerance)
        if worst > 1.0:
            break
    return worst


def _counted(case: InputCase, keep: Tensor | None, out: Tensor) -> Tensor:
    """The compared rows of the output, `[batch, query]`, or with heads for a function."""
    counted = torch.ones(out.shape[:-1], dtype=torch.bool)
    if case.counted is not None:
        counted &= case.counted if out.ndim == 3 else case.counted[:, None]
    if keep is not None:
        has_key = keep.any(dim=-1)  # [batch, head, query]
        counted &= has_key.all(dim=1) if out.ndim == 3 else has_key
    return counted


# --------------------------------------------------------------------------------------------------------- the run by site


SITES = ("q_proj", "k_proj", "v_proj", "q", "k", "v", "qk", "scaled", "scores", "pattern", "z", "concat", "out")
_SPLITTING = ("view", "reshape", "unflatten")
_SHAPING = (
    *_SPLITTING, "flatten", "transpose", "permute", "swapaxes", "cat", "stack", "contiguous", "einsum",
)  # fmt: skip
_PREFERRED: Mapping[str, tuple[str, ...]] = {
    "q": _SPLITTING, "k": _SPLITTING, "v": _SPLITTING, "concat": (*_SPLITTING, "flatten", "cat", "mean", "sum"),
}  # fmt: skip


@dataclass(frozen=True)
class SourceLocator:
    """The recorded operations of a user's attention, and a layer's tensors at each site for the same input."""

    operations: tuple[Operation, ...]
    sites: Mapping[str, Tensor]

    @cached_property
    def numbers(self) -> dict[int, tuple[list[Operation], Tensor]]:
        """The operations by the size of their output, with the sorted numbers of each, `[operation, number]`."""
        by_size: dict[int, list[Operation]] = {}
        for op in self.operations:
            if op.output.is_floating_point():
                by_size.setdefault(op.output.numel(), []).append(op)
        return {size: (ops, torch.stack([_sorted(op.output) for op in ops])) for size, ops in by_size.items()}

    def at_sites(self, layer: ReferenceLayer, mistakes: Sequence[Mistake], case: InputCase) -> SourceLocator:
        """The same run with the sites of another layer. Raises if a mistake is not possible in it."""
        located = SourceLocator(self.operations, sites_of(layer, mistakes, case))
        vars(located)["numbers"] = self.numbers
        return located

    def producers(self, site: str) -> list[Operation]:
        """The operations that produce the numbers of a site, in any order, or those of its first head."""
        if site not in self.sites:
            return []
        expected = self.sites[site]
        heads = [expected, *([expected[:, 0]] if expected.ndim == 4 and expected.shape[1] > 1 else [])]
        producers = []
        for head in [head for head in heads if head.numel() in self.numbers]:
            operations, made = self.numbers[head.numel()]
            right = _sorted(head)
            largest = right[right.abs() < _NO_NUMBER].abs().amax() if bool((right.abs() < _NO_NUMBER).any()) else 0.0
            is_close = ((made - right).abs() <= 1e-5 * largest).all(dim=1)
            producers += [operation for operation, is_one in zip(operations, is_close.tolist(), strict=True) if is_one]
        return producers

    @cached_property
    def n_produced(self) -> int:
        """The number of sites that the run produces."""
        return sum(bool(self.producers(site)) for site in SITES)

    def line_of(self, site: str) -> SourceLine:
        """The line that produces a site's numbers, or those of the first later site that is found."""
        for later in SITES[SITES.index(site) :] if site in SITES else ():
            operation = self._producer(later)
            if operation is not None:
                return operation.at
        return SourceLine()

    def lines_for(self, patterns: Sequence[str], sites: Sequence[str], built: Built) -> list[SourceLine]:
        """The lines of a mistake, at least one: the first that matches a pattern, else those that compute sites, else the first
        line of `forward`."""
        recorded_lines = [op.at for op in self.operations if op.at.line is not None]
        matching = (at for pattern in patterns for at in recorded_lines if re.search(pattern, at.source))
        found = next(matching, None) or line_in_source(built, patterns)
        if found is not None:
            return [found]
        lines = list(dict.fromkeys(self.line_of(site) for site in sites))
        return lines or [first_line(built)]

    def names_in(self, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
        """Sites with the variable of a function that holds their numbers."""
        for site in ("q", "k", "v", "scaled", "scores", "pattern", "z"):
            producer = self._producer(site)
            if producer is None or not is_within(producer.at, function):
                continue
            names = assigned_names(producer.at.source)
            fitting = [name for name in names if read_name(name)[0] in (site, "" if len(names) == 1 else site)]
            if site not in "qkv":
                last = next(op for op in reversed(self.operations) if op.at == producer.at)
                fitting = names if len(names) == 1 and last in self.producers(site) else []
            if len(fitting) == 1:
                yield site, fitting[0]

    def unpacks_in_order(self, order: str) -> bool | None:
        """Whether the line that splits a fused projection names its parts in order; None without such a line."""
        for op in self.operations:
            if op.name in ("chunk", "split", "unbind", "tensor_split", "getitem"):
                letters = "".join(name.lower().lstrip("x_")[:1] for name in assigned_names(op.at.source))
                if sorted(letters) == sorted(order):
                    return letters == order
        return None

    def numbers_below(self, bound: float) -> list[float]:
        """Distinct finite numbers below a bound in masking operations, such as the value for masked scores."""
        masking = [op for op in self.operations if op.name.rstrip("_") in MASKING]
        numbers = [value for op in masking for value in op.arguments.values() if isinstance(value, int | float)]
        numbers += [t.item() for op in masking for t in op.inputs if t.numel() == 1 and t.is_floating_point()]
        return list(dict.fromkeys(float(value) for value in numbers if -1e7 < value < bound))

    def _producer(self, site: str) -> Operation | None:
        producers = [op for op in self.producers(site) if op.at.line is not None]
        preferred = [op for op in producers if op.name in _PREFERRED.get(site, ())]
        if site in _PREFERRED and not preferred:
            preferred = [op for op in producers if op.name in _SHAPING]
        if site.endswith("_proj"):  # by variable name, because the shapes may be the same
            preferred = [
                op for op in producers if site[0] in (read_name(name)[0] for name in assigned_names(op.at.source))
            ]
        return next(iter(preferred or producers), None)

    def departure(self) -> FirstDifference:
        """The first site that the run does not produce, and the last one before it. The scaled products are scores too."""
        missing = next((site for site in SITES if site in self.sites and not self.producers(site)), "out")
        before = [site for site in SITES[: SITES.index(missing)] if site in self.sites]
        shared = next((site for site in reversed(before) if site != "scaled"), None)
        producer = self._producer(before[-1]) if before else None
        later = [] if producer is None else self.operations[self.operations.index(producer) + 1 :]
        operation = next((op for op in later if op.at.line is not None and op.name not in _SHAPING), producer)
        line = SourceLine() if operation is None else operation.at
        return FirstDifference("scores" if missing == "scaled" else missing, shared, *line)


_NO_NUMBER = 1e30
"""What stands for hidden scores, infinity and NaN where numbers are compared."""


def _sorted(tensor: Tensor) -> Tensor:
    """The sorted numbers of a tensor."""
    numbers = tensor.detach().to("cpu", torch.float64).flatten()
    numbers = numbers.masked_fill(numbers < HIDDEN, -_NO_NUMBER).nan_to_num(_NO_NUMBER, _NO_NUMBER)
    return numbers.sort().values


def sites_of(layer: ReferenceLayer, mistakes: Sequence[Mistake], case: InputCase) -> Mapping[str, Tensor]:
    """The tensors of a layer with these mistakes at each site. Raises if a mistake is not possible in it."""
    sites: dict[str, Tensor] = {}

    def keep(site: str, tensor: Tensor, **where: Any) -> None:
        sites[site] = tensor.detach()

    with torch.no_grad():
        run(stages_with(mistakes), layer, case.rows, tap=keep)
    return sites


def recorded(subject: UserAttention, case: InputCase) -> SourceLocator:
    """The operations of a case, without sites; none if the call cannot be recorded."""
    try:
        _, operations = watch(lambda: output_for(subject, case.inputs, case.form, case.padding), subject.built.file)
    except Exception:  # user code may raise anything
        operations = ()
    return SourceLocator(operations, {})


def line_in_source(built: Built, patterns: Sequence[str]) -> SourceLine | None:
    """The first source line that matches one of these patterns, `forward` first."""
    code = [
        (number, line)
        for lines, first in _sources(built)
        for number, line in enumerate(lines, first)
        if not line.lstrip().startswith(("def ", "class ", '"'))
    ]
    matching = (each for pattern in patterns for each in code if re.search(pattern, each[1].split("#")[0]))
    number, line = next(matching, (None, ""))
    return None if number is None else SourceLine(built.file, number, line.strip())


def first_line(built: Built) -> SourceLine:
    """The first line of `forward`, or of a function; empty if the source cannot be read."""
    lines, number = next(_sources(built), ([], None))
    return SourceLine() if number is None else SourceLine(built.file, number, lines[0].strip())


def _sources(built: Built) -> Iterator[tuple[list[str], int]]:
    """The lines of `forward`, and those of the whole, with the number of the first."""
    for part in (getattr(built.thing, "forward", None), built.thing):
        with contextlib.suppress(OSError, TypeError):
            yield inspect.getsourcelines(part)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ the smallest input


_SMALL = ((1, 1, 1), (1, 2, 2), (1, 1, 2), (2, 1, 1), (2, 2, 2), (1, 3, 3), (1, 2, 3), (2, 3, 3))


def smallest(
    subject: UserAttention, layer: ReferenceLayer, mistakes: Sequence[Mistake], like: InputCase, seed: int
) -> str | None:
    """The smallest input, of the kind of a case, whose output differs from the layer with these mistakes, in words; None if none
    of a few small ones differs. Inputs on which the subject raises are skipped."""
    has_separate_keys = like.rows.queries.shape[-2] != like.rows.keys.shape[-2]
    for sizes in _SMALL:
        if sizes[1] != sizes[2] and not has_separate_keys:
            continue
        try:
            case = _small(subject, like, seed, *sizes)
            if layer.bias is not None:
                layer.bias(case.rows)  # raises if the bias cannot be read at this size
            error = error_of(layer, mistakes, [case]) * case.tolerance
        except Exception:  # an input too small for the module
            continue
        if error > case.tolerance:
            return _in_words(sizes, error, case.output)
    return None


def _small(subject: UserAttention, like: InputCase, seed: int, batch: int, q_len: int, k_len: int) -> InputCase:
    has_keys = like.inputs.keys is not None
    inputs = subject.drawer(seed).inputs(with_context=has_keys, batch=batch, q_len=q_len, k_len=k_len)
    if like.form is not None:
        inputs = inputs._replace(allowed=torch.ones(1, 1, q_len, k_len, dtype=torch.bool).tril(k_len - q_len))
    if like.padding is not None:
        real = torch.arange(k_len)[None] < torch.tensor([[max(1, k_len - 1)]] * batch)
        inputs = inputs._replace(real=real)
    return make_case(like.kind, like.name, subject, Inputs(*inputs), like.form, like.padding)


def _in_words(sizes: tuple[int, int, int], error: float, output: Tensor) -> str:
    batch, q_len, k_len = sizes
    inputs = f"{batch} sequence{'s' if batch > 1 else ''} of "
    inputs += f"{q_len} token{'s' if q_len > 1 else ''}" if q_len == k_len else f"{q_len} queries and {k_len} keys"
    if not math.isfinite(error):
        kind = "NaN" if bool(output.isnan().any()) else "infinite or of another shape"
        return f"smallest example, {inputs}: the output is {kind}"
    finite = output[output.isfinite()].abs()
    size = f" (its largest number is {finite.max().item():.3g})" if finite.numel() else ""
    return f"smallest example, {inputs}: the output is off by {error:.3g}{size}"
