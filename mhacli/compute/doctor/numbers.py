"""The numbers of a checkpoint under examination: what is not finite in weights and outputs, and whether shares add up to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from mhacli.adapters.hf.inputs import make_inputs
from mhacli.adapters.hf.load import Loaded
from mhacli.compute.checkpoint.run import CheckpointRun, ModelWanted, SeenLayer
from mhacli.compute.doctor.passes import Row, Seen
from mhacli.errors import MhaError, UsageError
from mhacli.results.doctor import HealthCheck
from mhacli.results.record.tiled import Check, Wanted
from mhacli.spec.config import Side


def check_finite(model: nn.Module, seen: Seen) -> HealthCheck:
    """How many numbers of weights, attentions and outputs are NaN or infinite, and the first attention that gives one."""
    weights = {name: int((~p.isfinite()).sum()) for name, p in model.named_parameters() if p.is_floating_point()}
    bad = {name: n for name, n in weights.items() if n}
    outputs = sum(int((~row.isfinite()).sum()) for row in seen.rows)
    layers = [one for one in seen.attentions if any(not bool(row.isfinite().all()) for row in one.rows)]
    said = [f"{sum(bad.values())} NaN or Inf in weights, the first in {next(iter(bad))}"] if bad else []
    said += [f"{outputs} in the outputs"] if outputs else []
    said += [f"first in {layers[0].label} ({layers[0].name})"] if layers else []
    if said:
        layer = layers[0].label if layers else None
        return HealthCheck("finite", False, "; ".join(said), float(sum(bad.values()) + outputs), 0.0, layer)
    return HealthCheck("finite", True, f"{len(weights)} weights and all outputs hold numbers", 0.0, 0.0)


def check_row_sums(loaded: Loaded, rows: Sequence[Row], side: Side, pad_id: int) -> HealthCheck:
    """Whether each query's shares add up to 1, a learned sink's among them: by the log-sum-exp that the kernel used, where it
    tells it, and by the shares themselves where attention is written out."""
    base = replace(loaded, model=loaded.model.base_model)
    context = [row.context for row in rows if row.context is not None] or None
    inputs = make_inputs(base.model, [row.tokens for row in rows], context, side, pad_id)
    run = CheckpointRun(base, inputs, ModelWanted(Wanted(allow_nonfinite=True)), str(base.model.device))
    try:
        run.run()
    except UsageError:
        raise
    except MhaError as fault:
        if fault.code == "out-of-memory":
            raise
        return HealthCheck("row-sums", None, fault.message)
    known = [done for done in run.seen if not any("is not understood" in reason for reason in done.said.unverified)]
    if not known:
        return HealthCheck("row-sums", None, "the attentions get keywords that are not understood here")
    worst = max((check for done in known for check in _checks(done)), key=lambda check: check.strain)
    bad = [(done.said, check) for done in known for check in _checks(done) if not check.ok]
    if not bad:
        said = f"the shares of {len(known)} attentions add up to 1, and give the results"
        return HealthCheck("row-sums", True, said, worst.error, worst.tolerance)
    first, check = bad[0]
    wrong = (
        "the shares of a query do not add up to 1"
        if check.name == _SUM
        else "the result is not the shares times the values"
    )
    message = f"{'sums are NaN or Inf' if check.error is None else wrong}; first in {first.label} ({first.name})"
    return HealthCheck("row-sums", False, message, check.error, check.tolerance, first.label)


_SUM = "each query gives 1"


def _checks(done: SeenLayer) -> list[Check]:
    """The checks of a layer that count here: that each query gives 1, and that its shares give its result."""
    return [check for check in done.said.survey.checks if check.name == _SUM or check.name.startswith("z of")]
