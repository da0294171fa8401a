"""The sites of a layer in a recorded call: which operation makes the numbers of each, on which line
and in which variable.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from mhacli.attention.stages import (
    Mistake,
    NotPossible,
    ReferenceLayer,
    run_stages,
    stages_with,
)
from mhacli.usercode.build import Built
from mhacli.usercode.door import NO_ANSWER
from mhacli.usercode.faults import SourceLine
from mhacli.usercode.graph import Operation, RecordedCall
from mhacli.usercode.names import assigned_names, is_within
from mhacli.usercode.projections import read_name
from mhacli.usercode.target import source_file

from .result import FirstDifference

SITES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "q",
    "k",
    "v",
    "qk",
    "scaled",
    "scores",
    "pattern",
    "z",
    "concat",
    "out",
)
"""The sites of a layer in the order in which they are computed."""


@dataclass(frozen=True, eq=False)
class LayerSites:
    """A layer's tensor at each of its sites for the inputs of a recorded call, and the operations
    of the call that produce it.
    """

    call: RecordedCall
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def producers(self, site: str) -> list[Operation]:
        """The operations that produce the numbers of a site, in any order, or those of its first
        head.
        """
        if site not in self.tensors:
            return []
        expected = self.tensors[site]
        width = self.tensors.get(site[0], expected).shape[-1] if site.endswith("_proj") else 0
        first = expected[:, 0] if expected.ndim == 4 else expected[..., : width or None]
        heads = [expected] if first.numel() == expected.numel() else [expected, first]
        return [operation for head in heads for operation in self.call.producers_of(head)]

    @cached_property
    def n_produced(self) -> int:
        """The number of sites that the call produces."""
        return len([*filter(self.producers, SITES)])

    def _producer(self, site: str) -> Operation | None:
        """The first operation on a line of user code that produces a site: where heads are split or
        joined, the first that shapes them; a projection by the name of a variable, as shapes may be
        the same.
        """
        producers = [op for op in self.producers(site) if op.at.line is not None]
        preferred = []
        if site.removesuffix("_split") in ("q", "k", "v", "concat"):
            preferred = [op for op in producers if not (op.projects or op.is_product)]
        elif site.endswith("_proj"):
            preferred = [
                op
                for op in producers
                if site[0] in {read_name(n)[0] for n in assigned_names(op.at.source)}
            ]
        return next(iter(preferred or producers), None)

    def line_of(self, site: str) -> SourceLine:
        """The line that produces a site's numbers, or those of the first later site that is
        found.
        """
        producer = self._first_producer(site)
        return SourceLine() if producer is None else producer.at

    def _first_producer(self, site: str) -> Operation | None:
        """The operation that produces a site, or the first later one that is found."""
        later = (
            self._producer(each)
            for each in (site, *SITES[SITES.index(site.removesuffix("_split")) :])
        )
        return next(filter(None, later), None)

    def line_for_roles(self, line: SourceLine, letters: str) -> SourceLine:
        """A line that is wrong for these of q, k and v; where it is in a function that serves
        others of them as well, the line that calls this function for them.
        """
        found = {
            letter: [op.calls for op in self.producers(letter) if op.at == line] for letter in "qkv"
        }
        for letter, other in product(letters, set("qkv") - {*letters}):
            for calls, others in product(found[letter], found[other]):
                if calls[0] == others[0]:
                    pairs = zip(calls, others, strict=False)
                    return next((mine[0] for mine, its in pairs if mine != its), line)
        return line

    def line_for(self, patterns: Sequence[str], site: str, built: Built) -> SourceLine:
        """The line of a mistake: the first that matches a pattern, before others one that leads to
        a site, else the one that computes the site, else the first line of `forward` or of a
        function.
        """
        source = list[SourceLine]()  # that of `forward` first; empty if it cannot be read
        parts = (getattr(built.thing, "forward", None), built.thing)
        for part in parts:
            with suppress(OSError, TypeError):
                lines, first = inspect.getsourcelines(part)  # type: ignore[arg-type]
                file = source_file(part)
                source += [SourceLine(file, n, line.strip()) for n, line in enumerate(lines, first)]
        texts = "".join(str(part.__doc__) for part in parts)
        code = [
            each
            for each in source
            if not each.source.startswith(("def ", "class ", '"')) and each.source not in texts
        ]
        producer = self._first_producer(site) if site else None
        leading = [] if producer is None else producer.upstream()
        fixed = (each for op in leading for each in op.sources if each.name and not each.live)
        leading += [each for source in dict.fromkeys(fixed) for each in source.upstream()]
        # what leads to the site comes before the rest of the call, and that before code that no
        # operation shows
        for places in (_lines_of(leading), _lines_of(self.call.operations), code):
            for pattern, line in product(patterns, places):
                if re.search(pattern, line.source.split("#")[0]):
                    return line
        return self.line_of(site) if site else next(iter(source), SourceLine())

    def names_in(self, function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
        """Sites with the variable of a function that holds their numbers."""
        for site in SITES[SITES.index("q") : -1]:
            producer = self._producer(site)
            if producer is None or not is_within(producer.at, function):
                continue
            names = assigned_names(producer.at.source)
            fitting = [name for name in names if read_name(name)[0] == site]
            if not fitting:
                last = next(op for op in reversed(self.call.operations) if op.at == producer.at)
                may_be = len(names) == 1 and read_name(names[0])[0] in ("", "o", site)
                fitting = names if may_be and last in self.producers(site) else []
            if len(fitting) == 1:
                yield site, fitting[0]

    def first_difference(self) -> FirstDifference | None:
        """The first site that the call does not produce, and the last one before it. The scaled
        products are scores too. None if there is nothing to compare.
        """
        if not (self.tensors and self.call.operations):
            return None
        made = {site for site in SITES if self.producers(site)}
        if "scaled" in made:
            made.add("qk")  # queries may be scaled before the products
        if "q_proj" not in self.tensors:
            made.update("qkv")  # a function is given them
        sites = [site for site in SITES if site in self.tensors]
        missing = next((site for site in sites if site not in made), "out")
        before = [site for site in sites if SITES.index(site) < SITES.index(missing)]
        last_shared = next((site for site in reversed(before) if site != "scaled"), None)
        line = self._line_behind(before)
        return FirstDifference("scores" if missing == "scaled" else missing, last_shared, *line)

    def _line_behind(self, sites: Sequence[str]) -> SourceLine:
        """The first line of user code behind the last of some sites, but none that produces one of
        them; else that of the last site.
        """
        producer = self._producer(sites[-1]) if sites else None
        later = self.call.operations
        if producer is not None:  # and no input
            later = later[later.index(producer) + 1 :]
        shared = [op for site in sites for op in self.producers(site)]
        of_user = (op.at for op in later if op.at.line is not None and op not in shared)
        return next(of_user, SourceLine() if producer is None else producer.at)


def _lines_of(operations: Sequence[Operation]) -> list[SourceLine]:
    return [operation.at for operation in operations if operation.at.line is not None]


def sites_in(
    call: RecordedCall, layer: ReferenceLayer, mistakes: Sequence[Mistake] = ()
) -> LayerSites:
    """The sites of a layer with these mistakes in a call, none if they are not possible in it."""
    tensors = dict[str, Tensor]()
    # the mistake may not be possible here, or a norm of the module fail
    with suppress(NotPossible, *NO_ANSWER), torch.no_grad():
        stages = stages_with(mistakes)
        run_stages(
            stages, layer, call.inputs, lambda site, tensor, **_: tensors.update({site: tensor})
        )
        return LayerSites(call, tensors)
    return LayerSites(call)
