"""The effects of removing each head in a document, as in `mha effect`."""

from __future__ import annotations

from mhacli.commands.effect.run import rows_at_once
from mhacli.commands.effect.settings import EffectSettings
from mhacli.commands.effect.study import study_of
from mhacli.compute.checkpoint.prepare import ReadCheckpoint
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.record.effect import Effect
from mhacli.run import Run

N_VERIFIED = 4
"""The number of removals of a document that are repeated by a second method."""


def effects_of_heads(
    request: Run, checkpoint: ReadCheckpoint, run: CheckpointRun, *, n_verified: int
) -> tuple[Effect, ...]:
    """The effect of removing each head at all positions, in the order of the heads that `run` inspects. `run` is run here.

    The size of batches does not depend on the free memory, because it decides the rounding of sums. Raises `MhaError` if a batch
    does not fit, and if repeated removals give different effects.
    """
    run.run()
    study = study_of(checkpoint, run, request, EffectSettings(verify=n_verified))
    study.foresee()
    if study.effects.most_rows < rows_at_once(checkpoint.inputs.keywords):
        raise MhaError(
            "the removals of its heads need more memory than is free",
            hint="--max-tokens shortens documents, and fewer workers leave more memory to each",
            code="out-of-memory",
        )
    study.effects.run()
    if not study.effects.verified.ok:
        raise MhaError(
            "a second computation of its removals gives different effects",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    return study.table()
