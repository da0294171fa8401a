"""Passes of a callable over texts, and the differences of those that must agree.

A difference counts beyond the noise floor: a multiple of what one rounding step of every part of
the model changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.attention.core import dtype_name
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.models.layer_names import config_of, dtype_of
from mhacli.models.run import TIMES_SHAKEN, shaken_parts
from mhacli.record.checks import TOLERANCES
from mhacli.usercode.build import seeded
from mhacli.usercode.door import (
    Attempt,
    Unreadable,
    first_that_works,
    for_user,
    on_behalf,
)
from mhacli.usercode.foreign import FunctionMode
from mhacli.usercode.text_model import NO_ROWS, NotedSteps, PartCalls, PartRows, TextModel
from mhacli.usercode.user_attention import NO_CONTEXT

CUTS = (1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)
LEAST: Mapping[str, float] = {
    name: max(TOLERANCES["float32"].output, t.output) for name, t in TOLERANCES.items()
}
"""The least tolerance between two ways to compute the same, relative to the size of an output.
float64 has that of float32, because models compute rotations and norms in float32 in any dtype."""
LENGTH = 256
"""The length of the texts, if the model has so many positions."""
_LENGTH_INTERPRETED = 64
"""The same in Triton's interpreter, which is slow."""
_TIMES_SHORTER = 4
"""How many times shorter another text is."""
_SHAKES = 3
"""Passes with every part of the model changed by one rounding step."""
_COARSE = 1e-2
"""The noise floor of a model in 32 bits beyond which a difference below it may be a fault, as where
a selection flips."""
_ROWS = 16
"""Outputs whose distances are computed together: of all logits at once is slower."""


def is_family(model: TextModel) -> bool:
    """Whether it is a model of transformers."""
    return config_of(model.attention.module) is not None


class PassOutput(NamedTuple):
    """What a pass gives for one of its texts: the output `[token, width]`, on demand what the parts
    of the model compute, also where some give other first rows, if that can be, and what a model
    that returns nothing for each token gives for the `whole` text.
    """

    output: Tensor
    parts: Callable[..., PartCalls]
    whole: Tensor | None = None


class PassDifference(NamedTuple):
    """The difference of two passes that must agree, relative to the usual size of an output:
    `by_token`, and of the outputs for the `whole` text; and what the parts of the model compute in
    each.
    """

    by_token: Tensor
    parts: tuple[Callable[..., PartCalls], Callable[..., PartCalls]]
    whole: float = 0.0

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.by_token.max().item(), self.whole)

    def first(self, n: int) -> PassDifference:
        """That of the first tokens alone."""
        return self._replace(by_token=self.by_token[:n], whole=0.0)


def difference_of(ours: PassOutput, theirs: PassOutput) -> PassDifference:
    """The difference of two passes, over the tokens that both have. Raises `Unreadable` if their
    outputs have other widths.
    """
    widths = [each.output.shape[1:] for each in (ours, theirs)]
    if widths[0] != widths[1]:
        both = " and ".join(str(list(each.output.shape)) for each in (ours, theirs))
        raise Unreadable(f"its outputs {both} cannot be compared")
    whole = 0.0
    if ours.whole is not None and theirs.whole is not None and len(ours.whole) == len(theirs.whole):
        whole = relative_distance(ours.whole[None], theirs.whole[None]).item()
    return PassDifference(
        relative_distance(ours.output, theirs.output), (ours.parts, theirs.parts), whole
    )


def largest_of(differences: Iterable[PassDifference]) -> float:
    """The largest of some differences."""
    return max(each.largest for each in differences)


def relative_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """The distance of what is computed for each token of the shorter text, relative to its usual
    size.
    """
    n = min(len(ours), len(theirs))
    size = theirs.norm(dim=-1).square().mean().sqrt()
    parts = zip(ours[:n].split(_ROWS), theirs[:n].split(_ROWS), strict=True)
    distances: Tensor = torch.cat([(a - b).norm(dim=-1) for a, b in parts])
    distances /= size.clamp(min=torch.finfo(torch.float32).tiny)
    return distances.nan_to_num(nan=torch.inf)


_Context = Callable[[], AbstractContextManager[Any]]


class _KnownRows(FunctionMode):
    """Raises where a position or id is beyond its table: behind such a call a GPU computes nothing
    more.
    """

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function returns that reads a table."""
        if (
            func is torch.nn.functional.embedding
            and len(args) > 1
            and args[0].numel()
            and int(args[0].max()) >= len(args[1])
        ):
            raise for_user(IndexError("index out of range"))
        return on_behalf(func, *args, **kwargs)


class TooLong(MhaError):
    """A model reads no text of the stated length, and reads shorter ones."""


class Passes:
    """Passes of a model over texts, of which the first is the longest; random ones unless some are
    given, of the `requested` length or the longest that works.

    `first_pass` is over the first text. `tolerance` is the noise floor, relative to the usual size
    of an output: at first the least one of the `precision`, then what `measure_rounding` finds.
    """

    def __init__(
        self,
        model: TextModel,
        seed: int,
        texts: Sequence[Tensor] = (),
        requested: int | None = None,
    ) -> None:
        """Reads the longest text. Raises `UserRaised` or `MhaError` if none works."""
        self.model = model
        self.seed = seed
        self.n_passes = 0
        self.attention = model.attention
        self.module = model.attention.module
        if texts:
            self.texts = texts
            self.first_pass = self.run_pass(texts[0])[0]
        else:
            self.texts, self.first_pass = self._longest_texts(requested)
        self.n_passes = 1  # lengths that do not work are not counted
        self.text = self.texts[0]
        self.length = len(self.text)
        self.cuts = sorted({cut for cut in (*CUTS, self.length - 1) if 0 < cut < self.length})
        self.middle = min(self.cuts, key=lambda cut: abs(cut - self.length // 2), default=0)
        dtype = self.first_pass.output.dtype if self.module is None else dtype_of(self.module)
        self.precision = dtype_name(dtype)
        self.tolerance = self.least = LEAST.get(self.precision, LEAST["float32"])

    def measure_rounding(self) -> None:
        """Raises the tolerance to a multiple of what one rounding step of every part changes."""
        if self.module is None:
            return
        for seed in range(_SHAKES):
            shaken = self.difference(within=partial(shaken_parts, self.module, seed))
            moved = finite(shaken.largest) or 0.0
            self.tolerance = max(self.tolerance, TIMES_SHAKEN.get(self.precision, 8) * moved)

    def _longest_texts(self, requested: int | None) -> tuple[list[Tensor], PassOutput]:
        """Random texts, of which the first is as long as possible and the second shorter, and what
        a pass over the first gives. Raises `TooLong` for a requested length that is too long, and
        else what the last length raised if none works.
        """
        lengths = self._lengths_to_try(requested)
        tried = list[Attempt]()  # beyond the model's positions its code may raise anything
        read = first_that_works(lengths, self._read, tried.append)
        if read is None:
            failure = tried[-1].failure
            raise failure if requested is None else self._too_long(lengths[0], failure)
        text, output = read
        length = len(text)
        shorter = max(1, length // _TIMES_SHORTER) if self.attention.is_resizable else length
        return [text, self.model.draw(self.seed + 1, shorter)], output

    def _lengths_to_try(self, requested: int | None) -> list[int]:
        """The lengths of the first text, in the order in which they are tried: the only one that
        the call takes, or the requested one alone; else the usual one, half of it again and again
        for models of fewer positions, and last the length at which the call was found.
        """
        attention = self.attention
        own = attention.sizes.q_len
        if not attention.is_resizable:
            return [own]
        if requested is not None:
            return [requested]
        usual = _LENGTH_INTERPRETED if attention.built.is_interpreted else LENGTH
        return [*(usual >> n for n in range(6)), own]

    def _read(self, length: int) -> tuple[Tensor, PassOutput]:
        """A random text of a length, and what a pass over it gives. Raises where it is too long,
        also on a GPU, on which a read beyond a table would end the process.
        """
        text = self.model.draw(self.seed, length)
        if text.device.type != "cpu":
            self.run_pass(text, within=_KnownRows)
        return text, self.run_pass(text)[0]

    def _too_long(self, requested: int, failure: Exception) -> Exception:
        """The error for a length that cannot be read: it names the longest that can, or is the
        failure itself if none can.
        """

        def fails(length: int) -> bool:
            return first_that_works([length], self._read) is None

        # the lengths that work come first, so that the place of the first that fails counts them
        longest = bisect_left(range(1, requested), True, key=fails)
        if not longest:
            return failure
        return TooLong(
            f"{self.attention.built.name} reads no text of {requested} tokens: {failure}",
            hint=f"--length {longest} is the longest that it reads",
        )

    def run_pass(
        self, *texts: Tensor, seed: int = 0, within: _Context = nullcontext, **how: Any
    ) -> list[PassOutput]:
        """What one pass gives for each of the texts, with a seed, inside a context."""

        def run(**note: Any) -> list[tuple[Tensor, Tensor | None]]:
            self.n_passes += 1
            with torch.no_grad(), seeded(self.seed + seed, texts[0].device), within():
                return self.model.run(texts, **how, **note)

        def parts(row: int, pinned: PartRows = NO_ROWS) -> PartCalls:
            found: PartCalls = {}
            run(note=(row, found, pinned))
            return found

        return [
            PassOutput(output, partial(parts, row), whole)
            for row, (output, whole) in enumerate(run())
        ]

    def run_steps(self, ends: Sequence[int]) -> PassOutput:
        """What the text gives in steps that end there, behind a cache."""
        assert self.model.cached is not None
        self.n_passes += len(ends)
        cached = self.model.cached

        def run(within: AbstractContextManager[Any] = NO_CONTEXT) -> Tensor:
            with torch.no_grad(), seeded(self.seed, self.text.device):
                return cached(self.text[None], ends, within=within)[0]

        def parts(_pinned: PartRows = NO_ROWS) -> PartCalls:
            noted = NotedSteps(self.model, ends)
            run(noted)
            return noted.joined()

        return PassOutput(run(), parts)

    @cached_property
    def training_pass(self) -> PassOutput:
        """A pass over the text in training mode."""
        return self.run_pass(self.text, training=True)[0]

    @cached_property
    def single_passes(self) -> list[PassOutput]:
        """A pass over each text alone."""
        return [self.first_pass, *(self.run_pass(text)[0] for text in self.texts[1:])]

    def difference(self, text: Tensor | None = None, **how: Any) -> PassDifference:
        """Another pass over the text, or over a changed one, against the first."""
        return difference_of(
            self.run_pass(self.text if text is None else text, **how)[0], self.first_pass
        )

    def changed(self, start: int, end: int, seed: int, *, alike: bool = False) -> Tensor:
        """The text with other tokens from `start` to `end`. If all are `alike`, what is computed of
        the whole text, such as a selection, moves further.
        """
        tokens = self.text.clone()
        other = self.model.draw(self.seed + seed, self.length)
        other = other[:1].expand_as(other) if alike else other
        if self.model.n_ids:
            other = torch.where(other == tokens, (other + 1) % self.model.n_ids, other)
        tokens[start:end] = other[start:end]
        if self.attention.end is not None:
            tokens[-1] = self.attention.end
        return tokens

    @property
    def too_coarse(self) -> str:
        """Why agreement says nothing, where the noise floor is high; empty where it is low."""
        if self.tolerance <= max(_COARSE, 2 * self.least):
            return ""
        return (
            f"rounding alone changes outputs by {self.tolerance:.2g}: a fault could not be"
            " distinguished"
        )
