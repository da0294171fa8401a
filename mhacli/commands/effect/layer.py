"""The layer of a text as a model of one layer, from which heads and single weights are removed as from a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import EffectStudy
from mhacli.errors import UsageError
from mhacli.layer.run import prepare, record_run
from mhacli.layer.setup import Setup
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
def layer_study(run: Run, settings: EffectSettings) -> tuple[EffectStudy, tuple[str, ...]]:
    """The study of a layer whose run is recorded here, and notes for the user. Raises `UsageError` for a layer with dropout,
    whose runs differ."""
    if run.facts.batch != 1:
        raise UsageError(
            f"mha effect takes one text, and {run.facts.batch} are given", hint="give each text in a run of its own"
        )
    if run.config.train and run.config.dropout:
        raise UsageError("mha effect measures a layer without dropout", hint="leave out --train")
    setup = prepare(run)
    record, _ = record_run(setup, run)
    return EffectStudy(LayerModel(setup).eval(), {"ids": setup.queries.ids}, settings, run, record), run.notes
