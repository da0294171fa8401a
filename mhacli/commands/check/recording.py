"""A recorded call of a user's attention: which operation makes the numbers of a site of a layer, on which line and in which
variable, and the tensors in it that do not depend on the inputs."""

from __future__ import annotations

import ast
import contextlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from mhacli.attention.stages import Inputs, Mistake, ReferenceLayer, run_stages, stages_with
from mhacli.commands.check.probes import HIDDEN, InputCase, as_float64
from mhacli.commands.check.result import FirstDifference
from mhacli.usercode.build import Built
from mhacli.usercode.graph import Graph, Operation, recorded
from mhacli.usercode.names import assigned_names, is_within
from mhacli.usercode.process import SourceLine
from mhacli.usercode.projections import read_name
from mhacli.usercode.user_attention import UserAttention

SITES = ("q_proj", "k_proj", "v_proj", "q", "k", "v", "qk", "scaled", "scores", "pattern", "z", "concat", "out")
NO_NUMBER = 1e30
"""What stands for hidden scores, infinity and NaN where numbers are compared."""


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A recorded call, its inputs, and a layer's tensors at each `site` for the same inputs."""

    graph: Graph
    inputs: Inputs
    sites: Mapping[str, Tensor] = field(default_factory=dict)

    # --------------------------------------------------------------------------------------------- what the call computes

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations in order; none if the call cannot be recorded."""
        return self.graph.operations

    def combined(self, *names: str) -> Iterator[tuple[Operation, Operation]]:
        """The operations of these names that combine what depends on the inputs with one tensor that does not, and its source."""
        for operation in self.operations:
            fixed = [source for source in operation.sources if not source.live]
            if operation.name.rstrip("_") in names and operation.live and len(fixed) == 1:
                yield operation, fixed[0]

    @property
    def behind(self) -> Sequence[Operation]:
        """The operations after the first weighted values."""
        z = next(iter(self.graph.attentions), {}).get("z")
        return [] if z is None else self.operations[self.operations.index(z) + 1 :]

    def path(self, role: str) -> list[Operation]:
        """The operations from a projection to the queries or keys of the first product; `role` is q or k."""
        first = next(iter(self.graph.attentions), {})
        path = first[role].upstream() if role in first else []
        return [operation for operation in self.operations if operation in path]

    def vectors(self, role: str) -> Iterator[tuple[Operation, Tensor]]:
        """What is made on the way to the queries or keys, `[batch, head, length, d]` or without heads, and by which operation."""
        for operation in self.path(role):
            tensor = operation.output
            axes = [axis for axis in range(tensor.ndim - 1) if tensor.shape[axis] in self.inputs.lengths[1:]]
            if tensor.is_floating_point() and tensor.ndim in (3, 4) and axes:
                yield operation, as_float64(tensor).movedim(axes[-1], -2)

    def as_scores(self, tensor: Tensor, shape: Sequence[int]) -> Tensor | None:
        """A tensor broadcast to scores as `[batch, head, query, key]`; None if the shape does not fit scores."""
        batch, *lengths = self.inputs.lengths
        if [*shape[-2:]] != lengths or tensor.ndim > len(shape) or math.prod(shape) % math.prod(self.inputs.lengths):
            return None
        return as_float64(tensor).expand(shape).reshape(batch, -1, *lengths)

    def unpacks_in_order(self, order: str) -> bool | None:
        """Whether the line that splits a fused projection names its parts in order; None without such a line."""
        for op in self.operations:
            if op.name in ("chunk", "split", "unbind", "tensor_split", "getitem"):
                letters = "".join(name.lower().lstrip("x_")[:1] for name in assigned_names(op.at.source))
                if sorted(letters) == sorted(order):
                    return letters == order
        return None

    def numbers_below(self, bound: float) -> list[float]:
        """Distinct finite numbers up to a bound in operations, such as the value for masked scores."""
        numbers = [value for op in self.operations for value in op.arguments.values() if isinstance(value, int | float)]
        made = [source.output for op in self.operations for source in op.sources]
        numbers += [tensor.item() for tensor in made if tensor.numel() == 1 and tensor.is_floating_point()]
        return list(dict.fromkeys(float(value) for value in numbers if -1e7 < value <= bound))

    # ------------------------------------------------------------------------------------------ the sites of a layer in it

    def at_sites(self, layer: ReferenceLayer, mistakes: Sequence[Mistake] = ()) -> RecordedCall:
        """The same run with the sites of a layer with these mistakes, none if they are not possible in it."""
        made, sites = dict[str, Tensor](), dict[str, Tensor]()
        with contextlib.suppress(Exception), torch.no_grad():  # the mistake is not possible here, or a norm fails
            run_stages(
                stages_with(mistakes), layer, self.inputs, tap=lambda site, tensor, **_: made.update({site: tensor})
            )
            sites = made
        located = RecordedCall(self.graph, self.inputs, sites)
        vars(located)["_numbers"] = self._numbers
        return located

    @cached_property
    def _numbers(self) -> dict[int, tuple[list[Operation], Tensor]]:
        """The operations by the size of their output, with the sorted numbers of each, `[operation, number]`."""
        by_size: dict[int, list[Operation]] = {}
        for op in self.operations:
            if op.output.is_floating_point():
                by_size.setdefault(op.output.numel(), []).append(op)
        return {
            size: (ops, torch.stack([sorted_numbers(op.output)[:, 0] for op in ops])) for size, ops in by_size.items()
        }

    def producers(self, site: str) -> list[Operation]:
        """The operations that produce the numbers of a site, in any order, or those of its first head."""
        if site not in self.sites:
            return []
        expected = self.sites[site]
        heads = [expected, *([expected[:, 0]] if expected.ndim == 4 and expected.shape[1] > 1 else [])]
        producers = []
        for head in [head for head in heads if head.numel() in self._numbers]:
            operations, made = self._numbers[head.numel()]
            right = sorted_numbers(head)[:, 0]
            largest = right.abs().masked_fill(right.abs() >= NO_NUMBER, 0.0).max()
            is_close = ((made - right).abs() <= 1e-5 * largest).all(dim=1)
            producers += [operation for operation, is_one in zip(operations, is_close.tolist(), strict=True) if is_one]
        return producers

    @cached_property
    def n_produced(self) -> int:
        """The number of sites that the run produces."""
        return sum(bool(self.producers(site)) for site in SITES)

    def _producer(self, site: str) -> Operation | None:
        """The first operation on a line of user code that produces a site: where heads are split, the first that shapes them, and
        where they are joined, one with as many axes; a projection by the name of a variable, as shapes may be the same."""
        producers = [op for op in self.producers(site) if op.at.line is not None]
        preferred = []
        if site in ("q", "k", "v", "concat"):
            preferred = [op for op in producers if not (op.projects or op.is_product)]
            joined = [op for op in preferred if site == "concat" and op.output.ndim == self.sites[site].ndim]
            preferred = joined or preferred
        elif site.endswith("_proj"):
            preferred = [op for op in producers if site[0] in {read_name(n)[0] for n in assigned_names(op.at.source)}]
        return next(iter(preferred or producers), None)

    def line_of(self, site: str) -> SourceLine:
        """The line that produces a site's numbers, or those of the first later site that is found."""
        producer = self._first_producer(site)
        return SourceLine() if producer is None else producer.at

    def _first_producer(self, site: str) -> Operation | None:
        """The operation that produces a site, or the first later one that is found."""
        later = (self._producer(later) for later in SITES[SITES.index(site) :])
        return next((operation for operation in later if operation is not None), None)

    def line_for(self, patterns: Sequence[str], site: str, built: Built) -> SourceLine:
        """The line of a mistake: the first that matches a pattern, before others one that leads to a site, else the one that
        computes the site, else the first line of `forward` or of a function."""
        source = list[SourceLine]()  # that of `forward` first; empty if it cannot be read
        for part in (getattr(built.thing, "forward", None), built.thing):
            with contextlib.suppress(OSError, TypeError):
                lines, first = inspect.getsourcelines(part)  # type: ignore[arg-type]
                source += [SourceLine(built.file, number, line.strip()) for number, line in enumerate(lines, first)]
        code = [line for line in source if not line.source.startswith(("def ", "class ", '"'))]
        producer = self._first_producer(site) if site else None
        leading = [] if producer is None else producer.upstream()
        made = ([op.at for op in operations if op.at.line is not None] for operations in (leading, self.operations))
        for places in (*made, code):
            for pattern, line in product(patterns, places):
                if re.search(pattern, line.source.split("#")[0]):
                    return line
        return self.line_of(site) if site else next(iter(source), SourceLine())

    def names_in(self, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
        """Sites with the variable of a function that holds their numbers."""
        for site in ("q", "k", "v", "scaled", "scores", "pattern", "z"):
            producer = self._producer(site)
            if producer is None or not is_within(producer.at, function):
                continue
            names = assigned_names(producer.at.source)
            fitting = [name for name in names if read_name(name)[0] == site]
            if not fitting:
                last = next(op for op in reversed(self.operations) if op.at == producer.at)
                fitting = names if len(names) == 1 and last in self.producers(site) else []
            if len(fitting) == 1:
                yield site, fitting[0]

    def first_difference(self) -> FirstDifference | None:
        """The first site that the run does not produce, and the last one before it. The scaled products are scores too. None if
        there is nothing to compare."""
        if not (self.sites and self.operations):
            return None
        made = {site for site in SITES if self.producers(site)}
        made |= {"qk"} if "scaled" in made else set()  # queries may be scaled before the products
        made |= set("qkv") if "q_proj" not in self.sites else set()  # a function is given them
        missing = next((site for site in SITES if site in self.sites and site not in made), "out")
        before = [site for site in SITES[: SITES.index(missing)] if site in self.sites]
        last_shared = next((site for site in reversed(before) if site != "scaled"), None)
        producer = self._producer(before[-1]) if before else None
        later = [] if producer is None else self.operations[self.operations.index(producer) + 1 :]
        shared = [op for site in before for op in self.producers(site)]
        operation = next((op for op in later if op.at.line is not None and op not in shared), producer)
        line = SourceLine() if operation is None else operation.at
        return FirstDifference("scores" if missing == "scaled" else missing, last_shared, *line)


def sorted_numbers(tensor: Tensor, width: int = 1) -> Tensor:
    """The numbers of a tensor, sorted in each column of rows of this width."""
    rows = as_float64(tensor).reshape(-1, width)
    rows = rows.masked_fill(rows < HIDDEN, -NO_NUMBER).nan_to_num(NO_NUMBER, NO_NUMBER)
    return rows.sort(dim=0).values


def recorded_case(subject: UserAttention, case: InputCase) -> RecordedCall:
    """The recorded call of a case, without operations if it cannot be recorded."""
    try:
        return RecordedCall(recorded(subject, case.inputs, 0, case.form), case.inputs)
    except Exception:  # user code may raise anything
        return RecordedCall(Graph(case.output, {}), case.inputs)
