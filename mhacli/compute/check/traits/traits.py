"""What runs of somebody's attention show that no name tells: biases of the scores, learned scales, sinks, rotations, norms."""

from __future__ import annotations

from dataclasses import dataclass

from mhacli.adapters.usercode.user_attention import UserAttention
from mhacli.attention.mistakes.stages import Rows
from mhacli.compute.check.traits.norms import Norm, norms, uses_all_parameters
from mhacli.compute.check.traits.rotations import Turn, has_tables, turns
from mhacli.compute.check.traits.runs import Runs, runs_of
from mhacli.compute.check.traits.scores import ScoreBias, Sinks, Temperature, score_bias, sinks, temperature


@dataclass(frozen=True)
class Traits:
    """What was read; None is what it has not. `has_tables`: rows are multiplied by numbers of their places; `turns` are the
    rotations among that. `norms` are those of heads; `uses_all`: no parameter of the module stays unused. `rows` are what
    was asked."""

    bias: ScoreBias | None = None
    temperature: Temperature | None = None
    sinks: Sinks | None = None
    turns: tuple[Turn, ...] = ()
    has_tables: bool = False
    norms: tuple[Norm, ...] = ()
    uses_all: bool = True
    rows: Rows | None = None


NOTHING_READ = Traits()


def traits_of(subject: UserAttention, seed: int) -> Traits:
    """The traits of a subject that is asked about its own rows, and where these cannot be watched, about others."""
    for other in (False, True) if subject.takes_context else (False,):
        try:
            runs = runs_of(subject, seed, other=other)
            return _read(subject, seed, runs, is_own=not other)
        except Exception:  # what cannot be watched, or does other things with other rows
            continue
    return NOTHING_READ


def _read(subject: UserAttention, seed: int, runs: Runs, *, is_own: bool) -> Traits:
    module = subject.built.module
    return Traits(
        score_bias(subject, seed, runs, is_own=is_own),
        temperature(runs),
        sinks(runs),
        tuple(turns(runs)),
        has_tables(runs),
        tuple(norms(runs)),
        module is None or uses_all_parameters(runs, len(list(module.parameters()))),
        runs.rows,
    )
