"""Sums over units, added in the order of their names, so that the result does not depend on the workers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mhacli.commands.scan.units import UnitFacts, add_sum, strongest
from mhacli.errors import MhaError
from mhacli.record.arrays import Array
from mhacli.record.checks import SelfCheck, worst_check
from mhacli.record.corpus import MAX_LISTED_BAD, BadEntry, CorpusCell, CorpusHead, TokenSink
from mhacli.record.heads import HEAD_TYPES
from mhacli.record.record import InspectedLayer

MAX_SINKS = 10
"""The largest number of sink tokens of a head."""


@dataclass
class Folded:
    """Sums over the documents of the units added so far; their size does not grow with the corpus.

    `heads` are those of the first unit. For each of them, `sinks` has the number of documents and the sum of weights of a token,
    and `cells` the strongest cells.
    """

    n_documents: int = 0
    n_tokens: int = 0
    n_bad: int = 0
    longest: int = 0
    bad: list[BadEntry] = field(default_factory=list)
    heads: tuple[CorpusHead, ...] = ()
    sinks: list[dict[str, tuple[int, float]]] = field(default_factory=list)
    cells: list[list[CorpusCell]] = field(default_factory=list)
    statistics: tuple[str, ...] = ()
    layers: tuple[InspectedLayer, ...] = ()
    devices: set[str] = field(default_factory=set)
    identical: bool = True
    sums: dict[str, Array] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, facts: UnitFacts, arrays: Mapping[str, Array]) -> None:
        """Adds a unit, with the arrays of its file."""
        self.n_bad += len(facts.bad)
        self.bad += facts.bad[: MAX_LISTED_BAD - len(self.bad)]
        if not facts.documents:
            return
        self.n_documents += len(facts.documents)
        self.n_tokens += facts.n_tokens
        self.devices.add(facts.device)
        self.identical &= facts.identical
        self.digest.update("".join(document.digest for document in facts.documents).encode())
        self._add_heads(facts)
        longest = max(document.n_tokens for document in facts.documents)
        others = [self.layers, facts.layers] if self.layers else [facts.layers]
        self.layers = worst_layers(facts.layers if longest > self.longest else self.layers, others)
        self.longest = max(self.longest, longest)
        counted = np.stack([(arrays["kinds"] == number).sum(axis=0) for number in range(len(HEAD_TYPES))])
        for name, array in {**arrays, "kinds": counted}.items():
            if name != "statistics":
                add_sum(self.sums, name, array)

    def _add_heads(self, facts: UnitFacts) -> None:
        keys = [(head.layer, head.attention, head.head) for head in facts.heads]
        if not self.heads:
            self.heads, self.statistics = facts.heads, facts.statistics
            self.sinks, self.cells = [{} for _ in keys], [[] for _ in keys]
        are_alike = [(head.layer, head.attention, head.head) for head in self.heads] == keys
        if not are_alike or facts.statistics != self.statistics:
            raise MhaError(f"unit {facts.number} has other heads or statistics than those before it", code="bad-file")
        for number, head in enumerate(facts.heads):
            sinks = self.sinks[number]
            for sink in head.sinks:
                n, total = sinks.get(sink.token, (0, 0.0))
                sinks[sink.token] = n + sink.documents, total + sink.share * sink.documents
            self.cells[number] = strongest([*self.cells[number], *head.cells])

    def sinks_in_order(self, number: int) -> tuple[TokenSink, ...]:
        """The tokens that are sinks of a head in most documents."""
        ordered = sorted(self.sinks[number].items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
        return tuple(TokenSink(token, n, total / n) for token, (n, total) in ordered[:MAX_SINKS])

    def manifest(self, names: Sequence[str]) -> dict[str, Any]:
        """The fields of the manifest about the corpus."""
        numbers = {"n_documents": self.n_documents, "n_tokens": self.n_tokens, "n_bad": self.n_bad}
        return {**numbers, "documents": self.digest.hexdigest(), "devices": sorted(self.devices), "units": list(names)}

    def mean(self, name: str, heads: slice) -> Array:
        """The mean over the documents of a sum, for some heads."""
        mean: Array = self.sums[name][heads] / self.n_documents
        return mean


Layers = tuple[InspectedLayer, ...]


def worst_layers(longest: Layers, others: Sequence[Layers]) -> Layers:
    """The layers of the longest document with the worst check results among `others`, which include its own."""
    return tuple(_worst(layer, same) for layer, *same in zip(longest, *others, strict=True))


def _worst(layer: InspectedLayer, same: Sequence[InspectedLayer]) -> InspectedLayer:
    checks = tuple(worst_check(of_name) for of_name in zip(*(other.survey.checks for other in same), strict=True))
    return replace(
        layer,
        verified=all(other.verified for other in same),
        unverified=tuple(dict.fromkeys(reason for other in same for reason in other.unverified)),
        self_check=SelfCheck.of_layers([checks]),
        survey=replace(layer.survey, checks=checks),
    )
