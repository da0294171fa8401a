"""The layer of a text as a model of one layer, from which heads and single weights are removed as from a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import EffectStudy
from mhacli.errors import UsageError
from mhacli.layer.run import prepare, record_run
from mhacli.layer.setup import Setup
from mhacli.models.layer_names import LayerKey
from mhacli.record.record import Record
from mhacli.run import Run


class LayerModel(nn.Module):
    """A model that gives the output of a layer for each row of ids, which are copies of the text."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup, self._name = setup, "attention" if setup.context is None else "cross_attention"
        self.add_module(self._name, setup.layer.attention)

    def forward(self, ids: Tensor) -> Tensor:
        """The output at each position."""
        setup, n_rows = self._setup, len(ids)
        x, context, places = setup.inputs()
        out: Tensor = self.get_submodule(self._name)(
            x.expand(n_rows, -1, -1),
            None if context is None else context.expand(n_rows, -1, -1),
            allowed=setup.allowed,
            bias=setup.bias,
            places=places,
        )[0]
        return out


@torch.no_grad()
def layer_effects(run: Run, settings: EffectSettings) -> Record:
    """The record of a run of the layer, with the effects of removals on its output at one position.

    Raises `UsageError` for positions that do not exist, and for a layer with dropout, whose runs differ.
    """
    facts, config = run.facts, run.config
    if facts.batch != 1:
        raise UsageError(
            f"mha effect takes one text, and {facts.batch} are given", hint="give each text in a run of its own"
        )
    if config.train and config.dropout:
        raise UsageError("mha effect measures a layer without dropout", hint="leave out --train")
    setup = prepare(run)
    record, _ = record_run(setup, run)
    context = None if setup.context is None else record.context
    key: LayerKey = ("self" if context is None else "cross", 0)
    study = EffectStudy(
        LayerModel(setup).eval(),
        {"ids": setup.queries.ids},
        settings,
        run,
        {key: config.n_heads},
        record.sequences[0],
        context[0] if context else None,
    )
    return study.completed(record)
