"""What a callable does with texts, whatever is inside it: whether an output depends on later
tokens, on the length, on other texts, on padding or on a cache.

Every behaviour is tested by passes over texts that must agree. A difference counts beyond the noise
floor: a multiple of what one rounding step of every part of the model changes.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, partialmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mhacli.attention.stages import Inputs
from mhacli.commands.check.result import (
    AttentionInside,
    Behaviour,
    Finding,
    Place,
    Tried,
    finding_of,
    words_of_code,
)
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.models.layer_names import config_of, dtype_of, is_attention
from mhacli.models.run import TIMES_SHAKEN, shaken_parts
from mhacli.record.checks import TOLERANCES
from mhacli.settings import PaddingSide
from mhacli.usercode.build import WithoutDropout, seeded
from mhacli.usercode.door import (
    NO_ANSWER,
    Unreadable,
    UserRaised,
    for_user,
    on_behalf,
    ours,
    plainly,
)
from mhacli.usercode.faults import SourceLine
from mhacli.usercode.text_model import PartCalls, TextModel
from mhacli.usercode.user_attention import MaskForm

CUTS = (1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)
LEAST: Mapping[str, float] = {
    name: max(TOLERANCES["float32"].output, t.output) for name, t in TOLERANCES.items()
}
"""The least tolerance between two ways to compute the same, relative to the size of an output.
float64 has that of float32, because models compute rotations and norms in float32 in any dtype."""
LENGTH, _SHORTER = 256, 4
"""The length of the texts, if the model has so many positions, and how many times shorter another
is."""
_SHAKES, _DRAWS = 3, 8
_ALL = 0.9
"""The part of all outputs that counts as all: where attention is sharp, some change by less than
their rounding."""
_COARSE = 1e-2
"""The noise floor of a model in 32 bits beyond which a difference below it may be a fault, as where
a selection flips."""
_STEPS, _CHUNK = 16, 4
"""Tokens that are read behind a cache, the last of them together."""
_LARGE, _ROWS = 1e3, 16
NARROW = ("float16", "bfloat16")
"""The dtypes in which rounding hides faults."""

CODES: Mapping[str, str] = {
    "causality": "sees-the-future",
    "prefix": "prefix-differs",
    "batch": "batch-leak",
    "repeat": "not-repeatable",
    "finite": "outputs-not-finite",
    "right-padding": "padding-leak",
    "left-padding": "padding-leak",
    "cache": "cache-differs",
    "dtype": "",
    "training": "",
    "eager": "implementations-differ",
    "row-sums": "row-sums-not-one",
    "bos": "beginning-doubled",
}
"""The behaviours in the order in which they are shown, and the code of a failure, whose words stand
in record/glossary.toml; none where all is a matter of choice. The last three are asked of
checkpoints."""
_IMPLIED_BY = {
    "left-padding": ("causality", "batch", "right-padding"),
    "right-padding": ("causality", "batch"),
    "cache": ("causality", "prefix"),
    "row-sums": ("eager",),
}
"""The failures, besides those of `finite` and `repeat`, that imply that of a behaviour."""


# ---------------------------------------------------------------------------------- what is claimed


_BIDIRECTIONAL = re.compile(r"MaskedLM|Bert|BERT|Encoder|Bidirectional|Electra")
_CAUSAL = re.compile(
    r"^(?!.*Prefix).*(CausalLM|LMHeadModel|GPT|(?<![a-z])Causal|Decoder|Llama|Autoregressive)"
)
_CAUSAL_HEAD = re.compile(r"(ForCausalLM|[a-z0-9]LMHeadModel|DoubleHeadsModel)$")


def is_claimed_causal(module: object) -> bool | None:
    """Whether a token is claimed to see only earlier ones: by a model or its config, or by the name
    of its class or of the nearest class that it is made from. None if nothing says it.
    """
    config: Any = getattr(module, "config", None)
    text = config if config_of(module) is None else config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return True
    if (
        getattr(text, "attn_type", "") == "bi"
        or getattr(text, "use_bidirectional_attention", False) is True
    ):
        return False
    for claim in (
        getattr(owner, name, None) for name in ("causal", "is_causal") for owner in (module, text)
    ):
        if isinstance(claim, bool):
            return claim
    architectures = re.findall(r"\w+", str(getattr(config, "architectures", "")))
    names = [*architectures, *(cls.__name__ for cls in type(module).__mro__)]
    if any(_CAUSAL_HEAD.search(name) for name in names):
        return True
    telling = next(
        (name for name in names if _BIDIRECTIONAL.search(name) or _CAUSAL.search(name)), None
    )
    return None if telling is None else not _BIDIRECTIONAL.search(telling)


# -------------------------------------------------------------------------------- passes over texts


class PassOutput(NamedTuple):
    """What a pass gives for one of its texts: the output `[token, width]`, on demand what the parts
    of the model compute, and what a model that returns nothing for each token gives for the `whole`
    text.
    """

    output: Tensor
    parts: Callable[[], PartCalls]
    whole: Tensor | None = None


class PassDifference(NamedTuple):
    """The difference of two passes that must agree, relative to the usual size of an output:
    `by_token`, and of the outputs for the `whole` text; and what the parts of the model compute in
    each.
    """

    by_token: Tensor
    parts: tuple[Callable[[], PartCalls], Callable[[], PartCalls]]
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
        whole = _relative_distance(ours.whole[None], theirs.whole[None]).item()
    return PassDifference(
        _relative_distance(ours.output, theirs.output), (ours.parts, theirs.parts), whole
    )


def _relative_distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """The distance of what is computed for each token of the shorter text, relative to its usual
    size.
    """
    n, size = min(len(ours), len(theirs)), theirs.norm(dim=-1).square().mean().sqrt()
    parts = zip(
        ours[:n].split(_ROWS), theirs[:n].split(_ROWS), strict=True
    )  # of all logits at once is slower
    distances: Tensor = torch.cat([(a - b).norm(dim=-1) for a, b in parts])
    distances /= size.clamp(min=torch.finfo(torch.float32).tiny)
    return distances.nan_to_num(nan=torch.inf)


_Context = Callable[[], AbstractContextManager[Any]]


class _KnownRows(TorchFunctionMode):
    """Raises where a position or id is beyond its table: behind such a call a GPU computes nothing
    more.
    """

    @ours(instead=plainly)
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.nn.functional.embedding
            and len(args) > 1
            and args[0].numel()
            and int(args[0].max()) >= len(args[1])
        ):
            raise for_user(IndexError("index out of range"))
        return on_behalf(func, *args, **(kwargs or {}))


def reason_of(failure: UserRaised | MhaError) -> str:
    """Why a failure left something untried; one for lack of memory is raised again."""
    if isinstance(failure, MhaError):
        if failure.code == "out-of-memory":
            raise failure
        return failure.message
    if isinstance(failure.fault, MemoryError | torch.OutOfMemoryError):
        raise failure
    return f"the code raised {failure!s:.200}"


@dataclass
class BehaviourTester:
    """Tests the behaviours of a model with texts, of which the first is the longest; random ones
    unless some are given, of the `requested` length or the longest that works.

    `is_causal` is what it claims, and `more` are further tests by the name of their behaviour.
    `hides_later`: nothing is stated, but its attention hides later tokens. `findings` are of
    behaviours that failed, `cautions` say what to do where it raised an exception.
    `is_bidirectional`: tokens see later ones, and are meant to. `inside` are the attentions that
    were compared.
    """

    model: TextModel
    is_causal: bool | None
    seed: int
    texts: Sequence[Tensor] = ()
    requested: int | None = None
    more: dict[str, Callable[[BehaviourTester], Behaviour]] = field(default_factory=dict)
    n_passes: int = 0
    results: dict[str, Behaviour] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cautions: dict[str, str] = field(default_factory=dict)
    hides_later: bool = False
    is_bidirectional: bool = False
    inside: tuple[AttentionInside, ...] = ()

    def __post_init__(self) -> None:
        """Reads the longest text, and measures the noise floor."""
        if self.texts:
            self.first_pass = self.run_pass(self.texts[0])[0]
        else:
            self._read_longest()
        self.text, self.length, self.module = (
            self.texts[0],
            len(self.texts[0]),
            self.model.attention.built.module,
        )
        self.cuts = sorted({cut for cut in (*CUTS, self.length - 1) if 0 < cut < self.length})
        self.middle = min(self.cuts, key=lambda cut: abs(cut - self.length // 2), default=0)
        dtype = self.first_pass.output.dtype if self.module is None else dtype_of(self.module)
        self.precision = str(dtype).removeprefix("torch.")
        self.tolerance = self.least = LEAST.get(self.precision, LEAST["float32"])
        self.test(("finite", "repeat"))  # what a model remembers is no rounding
        for seed in range(_SHAKES if self.module is not None else 0):
            moved = (
                finite(self.difference(within=partial(shaken_parts, self.module, seed)).largest)
                or 0.0
            )
            self.tolerance = max(self.tolerance, TIMES_SHAKEN.get(self.precision, 8) * moved)

    def _read_longest(self) -> None:
        """Draws the texts, and reads the first, half as long again and again until one works where
        no length is requested.
        """
        attention = self.model.attention
        fixed = self.requested if attention.is_resizable else attention.sizes.q_len
        lengths = [fixed] if fixed else [*(LENGTH >> n for n in range(6)), attention.sizes.q_len]
        for length in lengths:
            text = self.model.draw(self.seed, length)
            try:
                if text.device.type != "cpu":
                    self.run_pass(text, within=_KnownRows)
                self.first_pass = self.run_pass(text)[0]
                break
            except NO_ANSWER:  # beyond the model's positions its code may raise anything
                if length == lengths[-1]:
                    raise
        self.n_passes = 1  # of those that tell something
        shorter = max(1, length // _SHORTER) if attention.is_resizable else length
        self.texts = [text, self.model.draw(self.seed + 1, shorter)]

    def run_pass(
        self, *texts: Tensor, seed: int = 0, within: _Context = nullcontext, **how: Any
    ) -> list[PassOutput]:
        """What one pass gives for each of the texts, with a seed, inside a context."""

        def run(**note: Any) -> list[tuple[Tensor, Tensor | None]]:
            self.n_passes += 1
            with torch.no_grad(), seeded(self.seed + seed, texts[0].device), within():
                return self.model.run(texts, **how, **note)

        def parts(row: int) -> PartCalls:
            found: PartCalls = {}
            run(note=(row, found))
            return found

        return [
            PassOutput(output, partial(parts, row), whole)
            for row, (output, whole) in enumerate(run())
        ]

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
        tokens, other = self.text.clone(), self.model.draw(self.seed + seed, self.length)
        other = other[:1].expand_as(other) if alike else other
        if self.model.n_ids:
            other = torch.where(other == tokens, (other + 1) % self.model.n_ids, other)
        tokens[start:end] = other[start:end]
        return tokens

    # ------------------------------------------------------------------------------------ the tests

    def test(self, names: Sequence[str] = tuple(CODES)) -> None:
        """Tests the named behaviours that have no result yet, each by the method of its name: an
        earlier failure may imply it, or the code may raise an exception.
        """
        for name in (
            "finite",
            "repeat",
            *CODES,
        ):  # the failure of one of the first two implies that of others
            test = self.more.get(name) or getattr(BehaviourTester, name.replace("-", "_"), None)
            if test is None or name not in names or name in self.results:
                continue
            failed = {cause for cause, answer in self.results.items() if answer.ok is False}
            cause = next(
                (
                    each
                    for each in ("finite", "repeat", *_IMPLIED_BY.get(name, ()))
                    if each in failed
                ),
                None,
            )
            try:
                answer = (
                    test(self)
                    if cause is None
                    else self.not_tried(name, f"{cause} fails, which implies this")
                )
            except NO_ANSWER as failure:
                answer = self.not_tried(name, reason_of(failure))
                if isinstance(failure, UserRaised):  # and the code raised nothing before
                    self.cautions[name] = f"test {name} in a script of your own"
            self.results[name] = answer

    @property
    def behaviours(self) -> tuple[Behaviour, ...]:
        """The results in the order in which they are shown."""
        return tuple(self.results[name] for name in CODES if name in self.results)

    @property
    def holds(self) -> bool:
        """Whether the behaviours that decide were tried, and all hold."""
        ok = {name: answer.ok for name, answer in self.results.items()}
        is_right = ok["repeat"] is True and ok["batch"] is True and False not in ok.values()
        return is_right and (ok["causality"] is True or self.is_bidirectional)

    def result(
        self,
        name: str,
        ok: bool | None,
        reason: str,
        largest: float | None = None,
        *,
        draws: int = 1,
        **fields: Any,
    ) -> Behaviour:
        """What was seen in texts; `ok` is None where it is no matter of right and wrong."""
        fields = {
            "tolerance": self.tolerance,
            "tried": Tried(self.length, draws) if draws else None,
            **fields,
        }
        return Behaviour(name=name, ok=ok, reason=reason, largest=finite(largest), **fields)

    def not_tried(self, name: str, reason: str) -> Behaviour:
        """A behaviour that was not tried, for a reason."""
        return self.result(name, None, f"not tried: {reason}", draws=0)

    @property
    def too_coarse(self) -> str:
        """Why agreement says nothing, where the noise floor is high; empty where it is low."""
        if self.tolerance <= max(_COARSE, 2 * self.least):
            return ""
        return (
            f"rounding alone changes outputs by {self.tolerance:.2g}: a fault could not be"
            " distinguished"
        )

    def compare(
        self,
        name: str,
        differences: Sequence[PassDifference],
        agrees: str,
        differs: str,
        cut: int | None = None,
    ) -> Behaviour:
        """The verdict on outputs that must agree; where they differ, with a finding at the first
        place.
        """
        largest = max(difference.largest for difference in differences)
        if largest > self.tolerance:
            first = next(
                difference for difference in differences if difference.largest > self.tolerance
            )
            return self.failed(self.result(name, False, differs, largest, at=Place(cut)), first)
        if largest > 0 and self.too_coarse:
            return self.result(name, None, self.too_coarse, largest, draws=0)
        return self.result(name, True, agrees, largest, draws=len(differences))

    def failed(self, answer: Behaviour, difference: PassDifference | None = None) -> Behaviour:
        """A behaviour that fails, with its finding: where passes differ with the first position,
        and with the first part whose outputs differ while its inputs agree.
        """
        code, message, label, line = CODES[answer.name], answer.reason, None, SourceLine()
        if difference is None:
            seen = (
                "numbers that are not finite" if answer.largest is None else f"{answer.largest:g}"
            )
            evidence = f"{seen} in a check where at most {answer.tolerance:g} is right"
            self.findings.append(
                finding_of(code, evidence, message=message, fix=words_of_code(code).advice)
            )
            return answer
        cut = None if answer.at is None else answer.at.cut
        positions = (difference.by_token > self.tolerance).nonzero().flatten()
        position = next(iter(positions.tolist()), None)
        before = f"with other tokens from position {cut} on, " if answer.name == "causality" else ""
        sizes = (
            f"{difference.largest:.2g} × the usual size of an output (rounding:"
            f" {self.tolerance:.2g})"
        )
        where = "for the whole text" if position is None else f"at position {position}"
        part, attention = self._first_parts(difference)
        if self.module is not None:
            around = [part.rsplit(".", n)[0] for n in range(part.count(".") + 1)] if part else []
            classes = [type(self.module.get_submodule(name)) for name in (*around, "")]
            cls = next(
                (cls for cls in classes if not cls.__module__.startswith("torch.")), classes[0]
            )
            if part is not None:
                label = f"{part or 'the model'} ({classes[0].__name__})"
                message = f"{message}, first in {label}"
            with suppress(OSError, TypeError):  # its source cannot be read
                line = SourceLine(
                    inspect.getsourcefile(cls), inspect.getsourcelines(cls.forward)[1]
                )
        evidence = f"{before}the output {where} differs by {sizes}"
        self.findings.append(finding_of(code, evidence, line, message=message, fix=""))
        return replace(answer, at=Place(cut, position, label, attention))

    def _first_parts(self, difference: PassDifference) -> tuple[str | None, str | None]:
        """The first part, in the order in which parts end, whose outputs differ while its inputs
        agree, and the first attention whose outputs differ.
        """
        n, module, (ours, theirs) = (
            len(difference.by_token),
            self.module,
            (parts() for parts in difference.parts),
        )

        def differ(one: Tensor | None, other: Tensor | None) -> bool:
            if one is None or other is None or one.shape[1:] != other.shape[1:]:
                return False
            a, b = (each[:n].reshape(n, -1).double() for each in (one, other))
            return bool((_relative_distance(a, b) > self.tolerance).any())

        part = attention = None
        for (name, call), (given, output) in ours.items():
            others = theirs.get((name, call))
            if others is None or module is None or not differ(output, others[1]):
                continue
            if part is None and not differ(given, others[0]):
                part = name
            if attention is None and is_attention(name, module.get_submodule(name)):
                attention = name
        return part, attention

    # ----------------------------------------------------------------------------------- behaviours

    def finite(self) -> Behaviour:
        """Whether outputs are finite, with the weights of a model of transformers, and in 16 bits
        also where texts are padded; of large vectors, and of a text whose tokens are all masked, it
        is noted.
        """
        model = None if config_of(self.module) is None else self.module
        weights = {} if model is None else dict(model.named_parameters())
        bad = {
            name: n for name, weight in weights.items() if (n := int((~weight.isfinite()).sum()))
        }
        problems = (
            [f"{sum(bad.values())} NaN or Inf in weights, the first in {next(iter(bad))}"]
            if bad
            else []
        )
        mask, notes = self.model.mask, list[str]()
        passes = [self.first_pass] if mask is None else [*self.single_passes]
        sides: tuple[PaddingSide, ...] = ("right",) if self.model.has_source else ("right", "left")
        for side in sides if self.precision in NARROW and mask is not None else ():
            passes += self.run_pass(*self.texts, mask=mask, side=side)
        infinite = [each for each in passes if not each.output.isfinite().all()]
        if infinite:
            n_bad = sum(int((~each.output.isfinite()).sum()) for each in infinite)
            problems.append(f"{n_bad} numbers in the outputs are NaN or infinite")
        if problems:
            difference = difference_of(infinite[0], infinite[0]) if infinite else None
            n_weights = float(sum(bad.values())) or math.nan
            return self.failed(
                self.result("finite", False, "; ".join(problems), n_weights, tolerance=0.0),
                difference,
            )
        if not self.model.n_ids:
            large = self.run_pass(self.text * _LARGE)[0].output
            notes += (
                []
                if bool(large.isfinite().all())
                else [f"inputs × {_LARGE:g} give NaN or infinite numbers"]
            )
        rows, real = self.model.padded([self.text, self.text[:0]], "right")
        hides_all = torch.ones(1, 1, self.length, self.length, dtype=torch.bool).tril(-1)
        masked = [] if mask is None else [("a text whose tokens", Inputs(rows, real=real), mask)]
        forms = self.model.attention.mask_forms[:1]
        masked += [("a query whose keys", Inputs(rows, allowed=hides_all), form) for form in forms]
        for what, inputs, form in masked:
            with suppress(*NO_ANSWER):  # a mask of another form
                out = self.model.attention(inputs, mask=form, seed=self.seed)
                notes += [] if bool(out.isfinite().all()) else [f"{what} are all masked gives NaN"]
        if notes:
            return self.result("finite", None, "; ".join(notes))
        finite_ones = f"{len(weights)} weights and all outputs" if weights else "all outputs"
        return self.result("finite", True, f"{finite_ones} are finite", 0.0, tolerance=0.0)

    def repeat(self) -> Behaviour:
        """Whether two passes over one text agree, in evaluation mode and with other random
        numbers.
        """
        agrees, differs = (
            "two passes over one text agree",
            "two passes over one text differ in evaluation mode",
        )
        return self.compare("repeat", [self.difference(seed=1)], agrees, differs)

    def causality(self) -> Behaviour:
        """Whether outputs before a cut stay when everything after it changes."""
        if self.model.attention.is_pooled or (self.is_causal is False and not self.hides_later):
            self.is_bidirectional = True
            of_text = "its output is of a whole text, not of each token"
            return self.not_tried(
                "causality",
                of_text if self.model.attention.is_pooled else "tokens may see later ones",
            )
        if not self.cuts:
            return self.not_tried("causality", "needs a text of two tokens or more")
        differences, reached, moves = list[PassDifference](), dict[int, float](), False
        for number, cut in enumerate(self.cuts):
            moved = self.difference(self.changed(cut, self.length, cut, alike=number % 2 == 0))
            moves = moves or bool((moved.by_token[cut:] > self.tolerance).any())
            reached[cut] = (moved.by_token[:cut] > 0).double().mean().item()
            differences.append(moved.first(cut))
        if not moves:
            return self.not_tried(
                "causality", self.too_coarse or "the output does not depend on it"
            )
        agrees, differs = "no output depends on a later token", "an output depends on later tokens"
        leaks = [difference for difference in differences if difference.largest > self.tolerance]
        if not leaks and self.model.attention.is_inside and not self._reach_onwards():
            return self.not_tried(
                "causality", "what was read depends on no other token, as behind an embedding alone"
            )
        if (
            not leaks
            and difference_of(self.training_pass, self.first_pass).largest > self.tolerance
        ):
            cut = max(
                1, self.length * 3 // 4 - 1
            )  # no usual chunk ends there, and the rest moves a selection
            changed = self.changed(cut, self.length, cut, alike=True)
            difference = difference_of(
                self.run_pass(changed, training=True)[0], self.training_pass
            ).first(cut)
            if (
                difference.largest > self.tolerance
            ):  # maybe other tokens alone are dropped, as in experts
                kept = [
                    self.run_pass(text, training=True, within=WithoutDropout)[0]
                    for text in (changed, self.text)
                ]
                difference = difference_of(*kept).first(cut)
            if difference.largest > self.tolerance:
                return self.compare(
                    "causality", [difference], "", f"in training mode {differs}", cut
                )
        if not leaks:
            return self.compare("causality", differences, agrees, differs)
        if self.is_causal is not True and (how := self._bidirectional_reason(reached)) is not None:
            if not self.is_bidirectional:
                how += ", and nothing says whether it may: state --causal or --no-causal"
            return self.not_tried("causality", how)
        return self.compare("causality", leaks, agrees, differs, len(leaks[0].by_token))

    def _bidirectional_reason(self, reached: Mapping[int, float]) -> str | None:
        """How tokens see later ones, by the part of the outputs before each cut that what is after
        it reaches, however little. It is surely meant (`is_bidirectional`) but where a language
        model may do so by mistake. None if it is a leak: later tokens reach some positions or
        distances and not others, as in nothing that is meant to be bidirectional.
        """
        self.is_bidirectional = self.first_pass.output.shape[-1] != self.model.n_ids
        if min(reached.values()) >= _ALL and (self.is_bidirectional or not self.hides_later):
            self.is_bidirectional &= (
                self.is_causal is False or not self.hides_later
            )  # other layers may read backwards
            return "every output depends on later tokens"
        if self.hides_later:
            return None
        within = [cut for cut, part in reached.items() if part >= _ALL]
        seen = [cut for cut, part in reached.items() if part]
        if within and self.middle not in seen and seen == within == [*reached][: len(within)]:
            self.is_bidirectional = True
            return (
                f"the first tokens, at least {within[-1]}, see each other, and later ones what is"
                " before them"
            )
        onwards = self._reach_onwards()
        if onwards < _ALL and reached[self.middle] >= onwards / 2:
            return "outputs depend on later tokens as far as on earlier ones"
        self.is_bidirectional = False
        for cut in (int(0.37 * self.length), int(0.63 * self.length)):
            changes = [self.changed(cut, self.length, _DRAWS + seed) for seed in range(_DRAWS)]
            if self._reach(*changes, start=0, end=cut) < _ALL:
                return None
        return "outputs depend on some later tokens"

    def _reach_onwards(self) -> float:
        """The part of the outputs from the middle on that a change of what is before it reaches,
        however little.
        """
        return self._reach(self.changed(0, self.middle, 1), start=self.middle, end=self.length)

    def _reach(self, *changed: Tensor, start: int, end: int) -> float:
        """The part of the outputs from `start` to `end` that one of several changes of the text
        reaches, however little: where attention is sharp, one alone reaches few.
        """
        by_token = torch.stack([self.difference(text).by_token for text in changed])
        return (by_token.amax(dim=0)[start:end] > 0).double().mean().item()

    @cached_property
    def training_pass(self) -> PassOutput:
        """A pass over the text in training mode."""
        return self.run_pass(self.text, training=True)[0]

    def prefix(self) -> Behaviour:
        """Whether a shorter text gives the start of a longer one's outputs."""
        if self.results["causality"].ok is not True:
            return self.not_tried("prefix", "only where no output depends on a later token")
        if self.model.has_source and self.model.attention.example is not None:
            return self.not_tried(
                "prefix", "in the example the text of the encoder may change with the length"
            )
        n = max(1, self.length // 3)
        agrees = "a shorter text gives the start of a longer one's"
        differs = f"the first {n} tokens alone give other outputs than in a text of {self.length}"
        return self.compare("prefix", [self.difference(self.text[:n]).first(n)], agrees, differs, n)

    def batch(self) -> Behaviour:
        """Whether two texts of one length give the same outputs alone and together."""
        # beside a text of equal tokens experts may have room for the first
        other = self.changed(0, self.length, 1, alike=True)
        differences = [
            *map(
                difference_of,
                self.run_pass(other, self.text),
                (*self.run_pass(other), self.first_pass),
            )
        ]
        differs = "the outputs of a text depend on the other texts in its batch"
        return self.compare(
            "batch", differences, "a text alone gives the same as in a batch", differs
        )

    def padding(self, side: PaddingSide) -> Behaviour:
        """Whether texts padded on a side give the same outputs as each alone, with a mask of the
        real tokens. Padding on the left must change nothing where positions are given, and in
        causal models of transformers.
        """
        name, mask, lengths = f"{side}-padding", self.model.mask, [len(text) for text in self.texts]
        if mask is None:
            return self.not_tried(name, "it takes no mask of padding by a known name")
        if side == "left" and (self.model.has_source or mask.kind == "lengths"):
            kind = "an encoder-decoder model" if self.model.has_source else "lengths"
            return self.not_tried(name, f"{kind}, for texts that are padded on the right")
        if min(lengths) == max(lengths):
            return self.not_tried(name, "needs texts of different lengths")
        tried = [(self._padded(form, side), form) for form in self.model.masks]
        differences, mask = min(
            tried, key=lambda each: max(difference.largest for difference in each[0])
        )
        tokens = max(each.by_token.max().item() for each in differences)
        whole = max(each.whole for each in differences)
        other: PaddingSide = "left" if side == "right" else "right"
        differs_as_a_whole = tokens <= self.tolerance < whole and mask.kind != "lengths"
        if (
            differs_as_a_whole
            and max(difference.whole for difference in self._padded(mask, other)) <= self.tolerance
        ):
            end = "last" if side == "right" else "first"
            reason = f"the answer for a text is read at its {end} token: pad texts on the {other}"
            return self.result(name, None, reason, whole)
        knows_start = side == "right" or self.model.positions is not None
        knows_start = knows_start or (self.is_causal is True and config_of(self.module) is not None)
        by = "" if knows_start else ", as where positions count from the first token of a batch"
        subject = (
            f"with up to {max(lengths) - min(lengths)} padding tokens on the {side}, a text gives"
        )
        meaning = "" if mask.kind == "lengths" else f", in which True {mask.true_means}s"
        agrees = f"{subject} the same outputs as alone ({mask.parameter}{meaning})"
        answer = self.compare(name, differences, agrees, f"{subject} other outputs than alone{by}")
        if answer.ok is False and not (knows_start and self.model.hides_padding):
            self.findings.pop()
            return replace(answer, ok=None, at=None)
        return answer

    right_padding, left_padding = partialmethod(padding, "right"), partialmethod(padding, "left")

    def _padded(self, mask: MaskForm, side: PaddingSide) -> list[PassDifference]:
        """The texts padded on a side, each against the text alone."""
        padded = self.run_pass(*self.texts, mask=mask, side=side)
        return [*map(difference_of, padded, self.single_passes)]

    def cache(self) -> Behaviour:
        """Whether tokens that are read behind a cache, one by one and together, give the outputs of
        one call.
        """
        if self.model.cached is None:
            return self.not_tried("cache", "it takes no cache by a known name")
        if self.results["causality"].ok is not True:
            return self.not_tried("cache", "only where no output depends on a later token")
        length = max(1, self.length * 7 // 8)  # a position too far must be one that the model has
        n_steps = min(_STEPS, length - 1)
        n, chunk = length - n_steps, _CHUNK if n_steps > 2 * _CHUNK else 1
        cuts = range(n, length - chunk + 1)
        self.n_passes += len(cuts) + 1
        with torch.no_grad(), seeded(self.seed, self.text.device):
            (output,) = self.model.cached(self.text[None], (*cuts, length))
        difference = difference_of(PassOutput(output, dict), self.first_pass)
        agrees = f"{n} tokens, then {n_steps} behind a cache, give the same as one call"
        differs = "tokens that are read behind a cache give other outputs than in one call"
        if chunk > 1 and not (difference.by_token[: length - chunk] > self.tolerance).any():
            differs = (
                f"{chunk} tokens that are read together behind a cache give other outputs than in"
                " one call"
            )
        return self.compare("cache", [difference], agrees, differs, n)

    def dtype(self) -> Behaviour:
        """How far bfloat16 changes outputs of a model in float32."""
        if self.precision != "float32":
            return self.not_tried("dtype", f"it computes in {self.precision}")
        text, autocast = (
            self.texts[-1],
            partial(torch.autocast, self.text.device.type, torch.bfloat16),
        )
        moved = difference_of(
            self.run_pass(text, within=autocast)[0], self.single_passes[-1]
        ).largest
        reason = f"under autocast to bfloat16 outputs change by up to {moved:.2g} of their size"
        return self.result("dtype", None, reason, moved, tried=Tried(len(text), 1))

    def training(self) -> Behaviour:
        """How far training mode changes outputs."""
        moved = difference_of(self.training_pass, self.first_pass).largest
        what = f"outputs by up to {moved:.2g} of their size" if moved else "no output"
        return self.result("training", None, f"training mode changes {what}", moved)
