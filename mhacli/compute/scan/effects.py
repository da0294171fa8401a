"""What removing each head changes in a document, as `mha effect` finds it."""

from __future__ import annotations

from mhacli.compute.checkpoint.prepare import ReadCheckpoint
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.compute.effect.run import rows_at_once
from mhacli.compute.effect.study import EffectStudy
from mhacli.errors import EXIT_CHECK, MhaError
from mhacli.requests.checkpoint import ModelRequest
from mhacli.requests.effect import EffectRequest
from mhacli.results.record.effect import Effect

N_VERIFIED = 4
"""The removals of a document that are computed a second time in another way, where some are."""


def effects_of_heads(
    request: ModelRequest, checkpoint: ReadCheckpoint, run: CheckpointRun, *, n_verified: int
) -> tuple[Effect, ...]:
    """The effect of removing each head at all positions, in the order of the heads that `run` inspects, which is run for it.

    Batches have the same size whatever memory is free, for it decides how sums are rounded. Raises `MhaError` where they do not
    fit, and where removals that are computed in another way give something else.
    """
    study = EffectStudy(EffectRequest(request, n_verified=n_verified), checkpoint, run, None)
    study.inspect()
    if study.effects.most_rows < rows_at_once(checkpoint.inputs.keywords):
        raise MhaError(
            "the removals of its heads need more memory than is free",
            hint="--max-tokens shortens documents, and fewer workers leave more memory to each",
            code="out-of-memory",
        )
    study.run()
    if not study.effects.verified.ok:
        raise MhaError(
            "a second computation of its removals gives different effects",
            code="self-check",
            exit_code=EXIT_CHECK,
        )
    return study.table()
