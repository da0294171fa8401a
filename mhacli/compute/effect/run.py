"""How much the output of a checkpoint changes when parts of its attention are removed: many removals in a batch, each checked.

Every batch begins and ends with an untouched row. What these rows differ by is the noise floor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mhacli.adapters.hf.capture import captured
from mhacli.adapters.hf.load import Loaded
from mhacli.compute.effect.entry import Entries, find_entries
from mhacli.compute.effect.metric import Changes, Reading, changes, read_position
from mhacli.compute.effect.proof import find_parts, removed_otherwise
from mhacli.compute.effect.removal import Removal, Remover
from mhacli.errors import MhaError
from mhacli.io.progress import Progress, no_progress
from mhacli.results.record.effect import Verification
from mhacli.spec.tolerances import TOLERANCES

TOKENS_AT_ONCE = 4096
"""How many tokens a batch has at most, all rows together."""
_SEED = 0


class Target(NamedTuple):
    """The tokens whose logits are compared: `id` alone, or less that of `versus`."""

    id: int
    versus: int | None = None


@dataclass
class EffectRun:
    """Removals from one text: each item of `plan` is a set of parts that are removed together. `run` computes `results`, the
    changes that each item makes at `position`."""

    loaded: Loaded
    keywords: Mapping[str, Tensor]
    plan: Sequence[tuple[Removal, ...]]
    position: int
    target: Target | None = None
    n_verified: int = 4
    results: dict[int, Changes] = field(default_factory=dict)
    n_batches: int = 0
    verified: Verification | None = None
    _floors: list[Changes] = field(default_factory=list)
    _hidden: dict[int, Tensor] = field(default_factory=dict)
    _emptied: set[int] = field(default_factory=set)
    _departed: float = 0.0

    @cached_property
    def untouched(self) -> Reading:
        """The plain pass, that nobody watches."""
        return read_position(self.loaded.model, self.keywords, self.position)

    @property
    def metric(self) -> Literal["d_logit", "d_output"]:
        """The change by which removals are ranked."""
        return "d_output" if self.target is None else "d_logit"

    @torch.no_grad()
    def run(self, tell: Progress = no_progress) -> None:
        """All removals, and the proof of some. Raises `MhaError` for an attention that removals cannot reach."""
        tell(0.0, "the untouched pass")
        entries = find_entries(self.loaded.model, self.keywords)
        for batch in self._batches():
            self._run_batch(batch, entries)
            tell(min(1.0, len(self.results) / len(self.plan)), "removing")
        self._verify()

    def _batches(self) -> Iterator[list[int]]:
        """The items of the plan that run together: those that begin at the same layer."""
        length = max(tensor.shape[1] for tensor in self.keywords.values())
        n_rows = max(1, TOKENS_AT_ONCE // length - 2)
        by_entry = groupby(range(len(self.plan)), key=lambda item: self.plan[item][0].layer)
        for _, items in by_entry:
            while batch := list(islice(items, n_rows)):
                yield batch

    def _run_batch(self, items: Sequence[int], entries: Entries) -> None:
        rows = [(), *(self.plan[item] for item in items), ()]
        remover = Remover(rows)
        keywords = {name: tensor.repeat(len(rows), 1) for name, tensor in self.keywords.items()}
        model = self.loaded.model
        with captured(model, remover, batch=len(rows)), entries.entered(self.plan[items[0]][0].layer, len(rows)):
            seen = read_position(model, keywords, self.position)
        if remover.n_removed != sum(map(len, rows)):
            raise MhaError(
                "an attention gives no head outputs that could be replaced",
                hint="mha run --model DIR lists the attentions that are inspected",
                code="no-attention",
            )
        first = Reading(seen.hidden[:1], None if seen.logits is None else seen.logits[:1])
        all_rows = changes(seen, first, *(self.target or (None, None)))
        for row, item in enumerate(items, 1):
            self.results[item] = row_of(all_rows, row)
            self._hidden[item] = seen.hidden[row].float()
        self._emptied |= {items[row - 1] for row in remover.emptied}
        self._floors += [
            row_of(all_rows, -1),
            row_of(changes(first, self.untouched, *(self.target or (None, None))), 0),
        ]
        self._departed = max(self._departed, float((first.hidden - self.untouched.hidden).abs().max()))
        self.n_batches += 1

    def floor(self, name: str) -> float:
        """A change below this is none: twice the largest that an untouched row showed, and no less than one rounding."""
        spread = max(abs(float(getattr(floor, name))) for floor in self._floors)
        logits = self.untouched.logits
        scale = 1.0 if name == "d_output" or logits is None else float(logits.abs().max())
        return max(2 * spread, torch.finfo(self.loaded.model.dtype).eps * scale)

    def _verify(self) -> None:
        """Computes the items with the largest changes, and as many others, a second time, and alone."""
        model = self.loaded.model
        parts = find_parts(model, self.keywords)
        errors = []
        is_same = torch.equal(self._unchanged(), self.untouched.hidden)
        for item in self._chosen():
            with removed_otherwise(model, self.plan[item], parts) as is_done:
                if is_done:
                    again = read_position(model, self.keywords, self.position).hidden[0]
                    errors.append(float((again - self._hidden[item]).abs().max()))
        scale = float(self.untouched.hidden.abs().max())
        tolerance = scale * TOLERANCES[self.loaded.dtype].runs
        worst = max([self._departed, *errors])  # a row that should be untouched is one more that must be right
        self.verified = Verification(len(errors), worst, tolerance, is_same, is_same and worst <= tolerance)

    def _unchanged(self) -> Tensor:
        """The hidden state of a pass in which the output of every attention is replaced by its own numbers."""
        with captured(self.loaded.model, lambda call: None if call.z is None else call.z.clone(), batch=1):
            return read_position(self.loaded.model, self.keywords, self.position).hidden

    def _chosen(self) -> list[int]:
        """The items to compute a second time."""
        able = [item for item in self.results if item not in self._emptied]
        ranked = sorted(able, key=lambda item: -abs(float(getattr(self.results[item], self.metric))))
        n_top = min(len(ranked), -(-self.n_verified // 2))
        rest = random.Random(_SEED).sample(ranked[n_top:], min(len(ranked) - n_top, self.n_verified - n_top))
        return [*ranked[:n_top], *rest]


def row_of(rows: Changes, row: int) -> Changes:
    """The changes of one row."""
    d_output, *of_tokens = rows
    return Changes(d_output[row], *(None if part is None else part[row] for part in of_tokens))
