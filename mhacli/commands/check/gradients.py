"""The backward pass where no reference gives gradients: of parameters that the reference does not
have, in training mode, and of attention that is not understood.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from mhacli.attention.stages import Inputs
from mhacli.errors import first_names
from mhacli.usercode.door import first_that_works
from mhacli.usercode.steps import StepConvention
from mhacli.usercode.user_attention import UserAttention

from .derivatives import Derivative, derivatives
from .probes import RAISED_DROPOUT, ProbedAttention, differing, with_dropout
from .result import Finding, finding_of

_LENGTH = 65
"""The tokens of a text whose gradients are taken: one more than a tile of 64."""
MOST_NAMED = 4
"""The most tensors that a sentence names."""
_TRAINING = "only in training mode"


@dataclass
class OwnGradients:
    """The mistakes that derivatives of the code's own outputs show, and what was not examined."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take_training(self, subject: UserAttention, inputs: Inputs, seed: int) -> None:
        """Adds what training mode shows: without dropout the outputs of evaluation, and with it,
        where the same seed drops the same, gradients that fit the outputs.
        """
        module = subject.module
        if module is None or any(map(parametrize.is_parametrized, module.modules())):
            return  # a spectral norm goes on with its estimate
        plain = replace(with_dropout(subject, 0.0) or subject, is_without_dropout=True)
        usual = plain(inputs, seed=0)
        drawn = list[bool]()
        first, second = (
            plain(inputs, seed=0, training=True, within=_noting_draws(drawn)) for _ in range(2)
        )
        if any(drawn) or differing(first, second).any():
            self.notes.append("not compared: training mode, in which it draws random numbers")
        elif differing(usual, first).any():
            evidence = "in training mode, without dropout, outputs are not those of evaluation"
            self.findings.append(finding_of("differs-beyond", evidence, where=_TRAINING))
        elif (dropped := with_dropout(subject, RAISED_DROPOUT)) is not None:
            run = partial(replace(dropped, has_graph=True), inputs, seed=0, training=True)
            if differing(run(), run()).any():
                self.notes.append("not compared: gradients with dropout, which no seed repeats")
                return
            where = f"in training mode with dropout {RAISED_DROPOUT:g}"
            wanted = leaves_of(subject, inputs, {})
            self.take(derivatives(run, dropped.computing, wanted, seed), where)

    def take_steps(self, convention: StepConvention, seed: int, longest: int | None) -> None:
        """Adds what the last step behind a cache shows, of several tokens where it takes them, in a
        text no longer than the `longest`. What the cache holds counts as given: many caches keep no
        gradients.
        """
        attention = replace(convention.attention, has_graph=True)
        own = attention.sizes.q_len
        convention = replace(convention, attention=attention)

        def of_steps(start: int, length: int) -> list[Derivative]:
            rows = attention.drawer(seed).rows(length).to(attention.dtype)
            last = rows[:, start:].clone().requires_grad_()

            def run() -> Tensor:
                return convention(torch.cat([rows[:, :start], last], dim=1), (start, length))

            wanted = {"d x of the last step": last}
            return derivatives(run, attention.computing, wanted, seed)

        ends = product((3, 1), dict.fromkeys([min(_LENGTH, longest or _LENGTH), own]))
        attempts = (partial(of_steps, length - n, length) for n, length in ends)
        measured = first_that_works(attempts, lambda attempt: attempt())
        self.take(measured or (), "behind a cache")

    def leave(self, tensors: Sequence[str]) -> None:
        """Notes the gradients that nothing was compared with."""
        if tensors:
            names = first_names(tensors, MOST_NAMED)
            self.notes.append(f"not compared: the gradients {names}")

    def take(self, found: Iterable[Derivative], where: str) -> None:
        """Adds the mistakes of some derivatives: of what is cut off all others are wrong too."""
        every = [*found]
        self.leave([each.tensor for each in every if each.limit == torch.inf])
        cut = [each for each in every if each.is_cut]
        differing = [each for each in every if each.differs]
        for code, wrong in (("gradient-cut", cut), ("gradient-differs", differing)):
            if not wrong:
                continue
            names = first_names([each.tensor for each in wrong], MOST_NAMED)
            first = wrong[0]
            self.findings.append(
                finding_of(
                    code,
                    f"{names} {'is' if len(wrong) == 1 else 'are'} wrong {where}: {first.words}",
                    where=where,
                    error=first.error,
                    tolerance=first.limit,
                )
            )
            return


@contextmanager
def _noting_draws(drawn: list[bool]) -> Iterator[None]:
    """Notes whether anything inside draws random numbers of torch."""
    before = torch.get_rng_state()
    yield
    drawn.append(not torch.equal(before, torch.get_rng_state()))


def leaves_of(
    subject: UserAttention, inputs: Inputs, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors whose gradients are wanted, by their names: `dq` or `d x`, and `d NAME` of a
    parameter.
    """
    given = {"q": inputs.queries, "k": inputs.keys, "v": inputs.values}
    slots = {slot.part: f" {slot.name}" for slot in reversed(subject.slots)}
    names = {} if subject.is_function else slots
    leaves = {f"d{names.get(part, part)}": rows for part, rows in given.items()}
    leaves |= {f"d {name}": each for name, each in parameters.items()}
    return {name: each for name, each in leaves.items() if each is not None}


def without_reference(probed: ProbedAttention) -> OwnGradients:
    """What the gradients of an attention show that no reference explains, of its inputs and its
    trainable parameters. Raises `OutOfTime`.
    """
    found = OwnGradients()
    subject = replace(probed.subject, has_graph=True)
    is_left = subject.built.is_interpreted or probed.visible == "itself only"
    if is_left or subject.computed != torch.float64 or subject.ids is not None:
        return found
    parameters = {}
    if probed.subject.module is not None and not subject.is_copied:
        named = probed.subject.module.named_parameters()
        parameters = {name: each for name, each in named if each.requires_grad}
    own = subject.sizes.q_len
    lengths = dict.fromkeys([_LENGTH, own] if subject.is_resizable else [own])

    def of_length(length: int) -> list[Derivative]:
        inputs = subject.drawer(probed.request.seed).inputs(
            with_context=subject.takes_context, q_len=length, k_len=length
        )
        inputs = inputs.map(lambda rows: rows.requires_grad_())
        wanted = leaves_of(subject, inputs, parameters)
        run = partial(subject, inputs, seed=0)
        return derivatives(run, subject.computing, wanted, probed.request.seed)

    measured = first_that_works(lengths, of_length)
    if measured:
        found.take(measured, "at every tried call")
        known = [each.tensor for each in measured if each.limit < torch.inf]
        names = first_names(known, MOST_NAMED)
        if known and not found.findings:
            found.notes.append(f"the gradients {names} are those of its own outputs")
    return found
