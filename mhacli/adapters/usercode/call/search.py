"""The search for a way of calling somebody's attention: candidates, the cheapest first, until one gives an output."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.adapters.usercode.asker import InputDrawer, copied, map_rows, seeded
from mhacli.adapters.usercode.call.convention import Asked, Slot, Way, Written, answer_of, raw, sides_of
from mhacli.adapters.usercode.call.extras import Setting
from mhacli.adapters.usercode.call.results import MERGED, Axes, leaves, output_in, pattern_in
from mhacli.adapters.usercode.call.sizes import Lengths
from mhacli.adapters.usercode.errors import place_of, said_by
from mhacli.adapters.usercode.user_attention import Answer, Built, Inputs, Sizes

SLOW_S = 0.5
"""A call that takes longer is not repeated for what can be guessed."""
MAX_CALLS = 90
_SMALL = 0.3
"""The size of random rows: small enough for a softmax without a scale to see more than one key."""
_MAX_COPIED = 4_000_000
"""Numbers in a module up to which each experiment has a copy of its own: what a call leaves behind does not reach the next."""


class Failure(NamedTuple):
    """A way that did not work: how it was called, what was said, and at which line of the author's, `(15, "z = q @ k")`."""

    described: str
    said: str
    line: tuple[int, str] | None = None

    @property
    def fault(self) -> str:
        """What was said, with the line."""
        return self.said + (f" (line {self.line[0]}: {self.line[1]})" if self.line else "")


@dataclass(frozen=True)
class Trial:
    """A way with the sizes to try it with, and the weights that it is given by name. `fails_with` are axes of rows, more than
    those of the way, that it accepts too, and with which it is no attention."""

    way: Way
    lengths: Lengths
    d_in: int
    d_context: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    fails_with: Axes | None = None

    @property
    def sizes(self) -> Sizes:
        """The sizes of its calls."""
        return Sizes(*self.lengths, self.d_in, self.d_context)

    @property
    def takes_keys(self) -> bool:
        """Whether keys are given to it at all."""
        return any(slot.part != "queries" for slot in self.way.slots)


class Laboratory:
    """Where trials are run. It counts calls, keeps the failures, and knows the time of the fastest call."""

    def __init__(self, built: Built, device: torch.device, seed: int) -> None:
        self.built, self.device, self.seed = built, device, seed
        self.dtype = native_dtype(built.module)
        self.n_calls, self.fastest_s = 0, 0.0
        self.failures: list[Failure] = []
        self._copies = _is_small(built.module) and not is_lazy(built.module)

    @property
    def is_slow(self) -> bool:
        """Whether the calls are so slow that only few can be made."""
        return self.fastest_s > SLOW_S or self.n_calls >= MAX_CALLS

    def rows(self, trial: Trial) -> Inputs:
        """Random rows for a trial, the same in each call."""
        n_heads = trial.way.n_heads if trial.way.is_function else None
        values = any(slot.part == "values" for slot in trial.way.slots)
        draw = InputDrawer(trial.sizes, seed=self.seed, n_heads=n_heads, separate_values=values)
        inputs = draw.with_context() if trial.takes_keys else Inputs(draw.rows(trial.lengths.q_len))
        return map_rows(inputs, lambda rows: _SMALL * rows)

    def setting(self, trial: Trial, dtype: torch.dtype | None = None, training: bool = False) -> Setting:
        """What the arguments of a trial's calls are made for."""
        dtype = dtype or self.dtype
        tensors = {name: tensor.to(self.device, dtype) for name, tensor in trial.tensors.items()}
        return Setting(sides_of(self.rows(trial), trial.way), dtype, self.device, training, tensors)

    def ask(self, trial: Trial, inputs: Inputs, forms: Written = Written()) -> Asked | None:  # noqa: B008
        """What one call returns, None where it raises."""
        self.n_calls += 1
        call = copied(self.built.call) if self._copies else self.built.call
        began = time.perf_counter()
        asked: Asked | None
        try:
            with seeded(self.seed, self.device):
                asked = raw(call, trial.way, inputs, self.setting(trial), forms)
        except (Exception, SystemExit) as fault:
            self._failed(trial, fault)
            asked = None
        taken = time.perf_counter() - began
        self.fastest_s = min(taken, self.fastest_s or taken)
        return asked

    def answer(self, trial: Trial, inputs: Inputs, forms: Written = Written()) -> Answer | None:  # noqa: B008
        """The output of one call in our order of axes, in float64, None where there is none of the right shape."""
        asked = self.ask(trial, inputs, forms)
        if asked is None or not all(_has_output(result, trial.way, asked) for result in asked.results):
            return None
        answer = answer_of(asked, trial.way)
        return Answer(answer.out.double().cpu(), None if answer.pattern is None else answer.pattern.double().cpu())

    def located(self, trial: Trial) -> Trial | None:
        """The trial with the places of output and pattern in what it returns, None where it raises or returns no output."""
        asked = self.ask(trial, self.rows(trial))
        if asked is None:
            return None
        way, first = trial.way, asked.results[0]
        output = output_in(first, _axes_of_output(way), asked.sides)
        if output is None:
            self.failures.append(Failure(described(trial), _misfit(first, way, asked)))
            return None
        pattern = pattern_in(first, output.path, asked.sides, batched=way.batched)
        return replace(trial, way=replace(way, output=output, pattern=pattern))

    def _failed(self, trial: Trial, fault: BaseException) -> None:
        place = place_of(fault, self.built.file)
        line = None if place is None else (place.line, place.source)
        self.failures.append(Failure(described(trial), said_by(fault), line))


def native_dtype(module: nn.Module | None) -> torch.dtype:
    """The dtype of a module's parameters, the default one where it has none."""
    found = [] if module is None else [p.dtype for p in module.parameters() if p.is_floating_point()]
    return found[0] if found else torch.get_default_dtype()


def is_lazy(module: nn.Module | None) -> bool:
    """Whether parameters get their shape by the first call only."""
    return module is not None and any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())


def _is_small(module: nn.Module | None) -> bool:
    if module is None or is_lazy(module):
        return True
    return sum(tensor.numel() for tensor in itertools.chain(module.parameters(), module.buffers())) <= _MAX_COPIED


def _axes_of_output(way: Way) -> list[Axes]:
    """The axes that an output may have: those of the rows; of heads cut already also their other order, or side by side."""
    if way.is_function and "head" in way.axes and way.batched:
        others: list[Axes] = [
            ("batch", "head", "row", "width"),
            ("batch", "row", "head", "width"),
            ("batch", "row", MERGED),
        ]
        return [way.axes, *(axes for axes in others if axes != way.axes)]
    return [way.axes]


def _has_output(result: Any, way: Way, asked: Asked) -> bool:
    found = output_in(result, [way.output.axes], asked.sides)
    return found is not None


def _misfit(result: Any, way: Way, asked: Asked) -> str:
    shapes = [str(list(tensor.shape)) for _, tensor in leaves(result) if tensor.is_floating_point()]
    wanted = ", ".join("·" if (size := asked.sides.of(axis)) is None else str(size) for axis in way.axes)
    return f"returned {', '.join(shapes[:4]) or type(result).__name__}, where [{wanted}] was to come"


def described(trial: Trial) -> str:
    """The trial as a call, with the shapes of its rows as they were passed."""
    sizes = {"batch": trial.lengths.batch, "head": trial.way.n_heads if trial.way.is_function else 1}
    shown = []
    for slot in trial.way.slots:
        own = slot.part == "queries"
        length, width = (trial.lengths.q_len, trial.d_in) if own else (trial.lengths.k_len, trial.d_context)
        shape = [sizes.get(axis, length if axis == "row" else width) for axis in trial.way.axes]
        shown.append(f"{slot.parameter} {shape}")
    masks = [f"{name} {form.kind} [{', '.join(form.axes)}]" for name, form in trial.way.idle if form is not None]
    return ", ".join([*shown, *masks])


def cheapest(*options: Iterable[tuple[float, Any]]) -> Iterator[tuple[Any, ...]]:
    """Every combination of one of each of the options, `(cost, option)`, in the order of the sum of the costs."""
    lists = [list(option) for option in options]
    scored = [
        (sum(cost for cost, _ in combination), n, combination)
        for n, combination in enumerate(itertools.product(*lists))
    ]
    heapq.heapify(scored)
    while scored:
        _, _, combination = heapq.heappop(scored)
        yield tuple(option for _, option in combination)


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are the same but for rounding in float32; a NaN is the same as a NaN."""
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True))


def is_apart(lab: Laboratory, trial: Trial) -> bool:
    """Whether changing one sequence changes its own output and no other."""
    inputs = lab.rows(trial)
    changed = map_rows(inputs, _first_changed)
    before, after = lab.answer(trial, inputs), lab.answer(trial, changed)
    if before is None or after is None:
        return False
    return [close(x, y) for x, y in zip(before.out, after.out, strict=True)] == [False] + [True] * (
        trial.lengths.batch - 1
    )


def _first_changed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[0] = tensor[0].flip(-1) + 0.5
    return tensor


def goodness(lab: Laboratory, trial: Trial) -> int:
    """Of queries, keys and values cut into heads: whether one key moves several queries of its own head and nothing else, which
    the right axes make it do; and whether values that are all the same come out as they are, which any softmax over the keys
    does. 0, 1 or 2."""
    inputs = lab.rows(trial)
    assert inputs.keys is not None
    keys = inputs.keys.clone()
    keys[0, 0, 0] = keys[0, 0, 0].flip(-1) + 1.0
    before, after = lab.answer(trial, inputs), lab.answer(trial, inputs._replace(keys=keys))
    if before is None or after is None:
        return 0
    moved = ~torch.isclose(before.out, after.out, rtol=1e-4, atol=1e-6, equal_nan=True).all(-1)
    own = int(moved[0, 0].sum())
    if int(moved.sum()) != own or own < min(2, trial.lengths.q_len):
        return 0
    even = lab.answer(
        trial, inputs._replace(values=torch.ones_like(inputs.keys if inputs.values is None else inputs.values))
    )
    return 2 if even is not None and close(even.out, torch.ones_like(even.out)) else 1


def context_matters(lab: Laboratory, trial: Trial) -> bool:
    """Whether the rows of the context have any influence."""
    inputs = lab.rows(trial)
    assert inputs.keys is not None
    other = inputs._replace(keys=inputs.keys + 1.0, values=None if inputs.values is None else inputs.values.flip(-1))
    before, after = lab.answer(trial, inputs), lab.answer(trial, other)
    return before is not None and after is not None and not close(before.out, after.out)


def without(trial: Trial, slots: Iterable[Slot]) -> Trial:
    """The trial with these slots only."""
    return replace(trial, way=replace(trial.way, slots=tuple(slots)))
