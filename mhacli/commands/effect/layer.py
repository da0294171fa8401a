"""The change of the output of a layer of mha when heads or single weights are removed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mhacli.attention import masks
from mhacli.attention.core import no_tap
from mhacli.attention.layer import MultiHeadAttention
from mhacli.commands.effect.metric import Changes, Reading, changes
from mhacli.commands.effect.removal import Removal, softmax_without, stand_in
from mhacli.commands.effect.run import floor_of, largest_and_others, row_of
from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import effect_of
from mhacli.errors import UsageError, out_of_range
from mhacli.layer.run import Observed, prepare, record_run
from mhacli.layer.setup import Setup
from mhacli.models.layer_names import LayerKey
from mhacli.record.checks import TOLERANCES, SelfCheck
from mhacli.record.effect import EffectSummary
from mhacli.record.record import Record
from mhacli.record.tables import EffectTable
from mhacli.run import Run

_ROWS_AT_ONCE = 1024
"""The number of removals that go through the output projection together."""


@torch.no_grad()
def layer_effects(run: Run, settings: EffectSettings) -> Record:
    """The record of a run of the layer, with the effects of removals on its output at one position.

    Raises `UsageError` for positions that do not exist, and for a layer with dropout, whose runs differ.
    """
    return _LayerStudy(run, settings).record()


class _LayerStudy:
    def __init__(self, run: Run, settings: EffectSettings) -> None:
        facts, config = run.facts, run.config
        if facts.batch != 1:
            raise UsageError(
                f"mha effect takes one text, and {facts.batch} are given", hint="give each text in a run of its own"
            )
        if config.train and config.dropout:
            raise UsageError("mha effect measures a layer without dropout", hint="leave out --train")
        self.run, self.settings, self.setup = run, settings, prepare(run)
        self.key: LayerKey = ("self" if self.setup.context is None else "cross", 0)
        position = settings.position
        if position is not None and not -facts.q_len <= position < facts.q_len:
            raise UsageError(out_of_range("--position", position, facts.q_len))
        if settings.at is not None and settings.at >= facts.q_len:
            raise UsageError(out_of_range("--at", settings.at, facts.q_len))
        self.position = facts.q_len - 1 if position is None else position % facts.q_len

    def record(self) -> Record:
        """The record with the effects of all removals, some of them verified."""
        record, observed = record_run(self.setup, self.run, also=("z", "pattern", "v"))
        plan = [*self._plan()]
        untouched = self._reading(self.setup)
        measured = self._measured(plan, observed, untouched)
        verified = self._verify(plan, measured, observed, untouched)
        floor = floor_of(measured.floors, untouched, self.setup.layer.embedding.dtype)
        effects = EffectTable(
            effect_of(item, change, floor, is_masked=self._is_masked(item))
            for item, change in zip(plan, measured.changes, strict=True)
        )
        summary = EffectSummary(
            metric="d_output", position=self.position, target=None, target_id=None, versus=None, versus_id=None,
            logit=None, logprob=None, rank=None, floor=floor("d_output"), n_passes=1, verified=verified,
        )  # fmt: skip
        check = record.self_check.and_holds(verified.ok)
        return replace(record, self_check=check, effects=effects, effect=summary)

    def _plan(self) -> Iterator[tuple[Removal, ...]]:
        settings = self.settings
        heads: Sequence[int] = range(self.setup.config.n_heads)
        if settings.heads is not None:
            heads = sorted({head for _, _, head in settings.heads})
        if settings.edges:
            together = [tuple(heads)] if settings.heads is None else [(head,) for head in heads]
            for group in together:
                for key in range(self.setup.facts.k_len):
                    yield (Removal(self.key, group, (self.position,), (key,), "renormalise"),)
            return
        made = [Removal(self.key, (head,), replace=settings.replace or "zero", at=settings.at) for head in heads]
        yield from ((removal,) for removal in made)
        if settings.heads is not None and len(made) > 1:
            yield tuple(made)

    def _reading(self, setup: Setup) -> Reading:
        return Reading(setup.run()[:, self.position].double(), None)

    # ------------------------------------------------------------------------------------------------- the removals

    def _measured(self, plan: list[tuple[Removal, ...]], observed: Observed, untouched: Reading) -> _Measured:
        """The output with each removal. As for a checkpoint, the first and last row of every batch are without removals."""
        measured, z = _Measured([], [], []), observed.tensors["z"][0].to(self.setup.device)
        for begin in range(0, len(plan), _ROWS_AT_ONCE):
            rows = [self._z_without(item, z, observed) for item in [(), *plan[begin : begin + _ROWS_AT_ONCE], ()]]
            outputs = self.setup.layer.attention.joined(torch.stack(rows)[:, :, None], no_tap)[:, 0].double()
            first = Reading(outputs[:1], None)
            each = changes(Reading(outputs, None), first, None)
            measured.changes.extend(row_of(each, row) for row in range(1, len(rows) - 1))
            measured.outputs.extend(outputs[1:-1])
            measured.floors.extend((row_of(each, -1), row_of(changes(first, untouched, None), 0)))
        return measured

    def _z_without(
        self, item: tuple[Removal, ...], z: Float[Tensor, "head query d_v"], observed: Observed
    ) -> Float[Tensor, "head d_v"]:
        here = z[:, self.position].clone()
        for removal in item:
            for head in removal.heads:
                if removal.keys is not None:
                    here[head] = self._z_of_rest(removal, head, observed)
                elif removal.at in (None, self.position):
                    here[head] = stand_in(removal, {self.key: z[None]}, head)[self.position]
        return here

    def _z_of_rest(self, removal: Removal, head: int, observed: Observed) -> Float[Tensor, " d_v"]:
        """z of a head without its weights on some keys, the others renormalised."""
        row, values = observed.tensors["pattern"][0, head, self.position], observed.tensors["v"][0]
        is_cut = torch.zeros(len(row), dtype=torch.bool)
        is_cut[list(removal.keys or ())] = True
        weights = softmax_without(row.log()[None, None], is_cut, None)[0, 0]
        v = values[head // (self.setup.config.n_heads // len(values))]
        return (weights.to(v.dtype) @ v).to(self.setup.device)

    def _is_masked(self, item: tuple[Removal, ...]) -> bool:
        keys = item[0].keys
        return keys is not None and not bool(self.setup.visible()[0, :, self.position, list(keys)].any())

    # ---------------------------------------------------------------------------------------------------- the proof

    def _verify(
        self,
        plan: list[tuple[Removal, ...]],
        measured: _Measured,
        observed: Observed,
        untouched: Reading,
    ) -> SelfCheck:
        """Repeats some removals, from the text to the output, by a layer with other weights or another mask."""
        sizes = {item: float(change.d_output) for item, change in enumerate(measured.changes)}
        errors = []
        for item in largest_and_others(sizes, self.settings.verify):
            other = self._other_setup(plan[item], observed)
            if other is not None:
                errors.append(float((self._reading(other).hidden[0] - measured.outputs[item]).abs().max()))
        z = observed.tensors["z"].to(self.setup.device)
        is_same = torch.equal(self.setup.layer.attention.joined(z, no_tap)[:, self.position].double(), untouched.hidden)
        worst = max(errors, default=0.0)
        tolerance = float(untouched.hidden.abs().max()) * TOLERANCES[self.setup.config.dtype].runs
        return SelfCheck.of(worst, tolerance, holds=is_same, n=len(errors), identical=is_same)

    def _other_setup(self, item: tuple[Removal, ...], observed: Observed) -> Setup | None:
        """The run without the removed part, by other weights or another mask. None if neither can express that."""
        first, facts = item[0], self.setup.facts
        has_projection = self.setup.layer.attention.o_proj is not None
        if first.keys is None and has_projection and first.at is None:
            return replace(self.setup, layer=self.setup.layer._replace(attention=self._edited(item, observed)))
        if first.replace == "mean":
            return None
        left = torch.ones(1, self.setup.config.n_heads, facts.q_len, facts.k_len, dtype=torch.bool)
        for removal in item:
            queries = removal.queries or (range(facts.q_len) if removal.at is None else (removal.at,))
            keys = range(facts.k_len) if removal.keys is None else removal.keys
            for head, query in product(removal.heads, queries):
                left[0, head, query, list(keys)] = False
        mask = masks.from_tensor(left.to(self.setup.device))
        return replace(self.setup, allowed=mask if self.setup.allowed is None else masks.both(self.setup.allowed, mask))

    def _edited(self, item: tuple[Removal, ...], observed: Observed) -> MultiHeadAttention:
        """The layer with zeros for the removed heads in the output projection, and with their mean in its bias."""
        attention = copy.deepcopy(self.setup.layer.attention)
        projection, width = attention.o_proj, attention.d_v
        assert projection is not None
        for removal in item:
            head = removal.heads[0]
            columns = projection.weight[:, head * width : (head + 1) * width]
            if removal.replace == "mean":
                added = columns @ observed.tensors["z"][0, head].mean(dim=0).to(self.setup.device)
                projection.bias = nn.Parameter(added if projection.bias is None else projection.bias + added)
            columns.zero_()
        return attention


class _Measured(NamedTuple):
    """The output with each removal, its changes, and those of rows without one."""

    outputs: list[Tensor]
    changes: list[Changes]
    floors: list[Changes]
