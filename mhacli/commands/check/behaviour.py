"""What a callable does with texts, whatever is inside it: whether an output depends on later tokens, on the length, on other
texts, on padding or on a cache.

Every behaviour is asked by readings of texts that must agree. A difference counts beyond the noise floor: a multiple of what one
rounding step of every part of the model changes.
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

from mhacli.attention.stages import Inputs
from mhacli.commands.check.result import AttentionInside, Behaviour, Finding, Place, Tried, finding_of, words_of_code
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.models.layer_names import config_of, dtype_of, is_attention
from mhacli.models.run import TIMES_SHAKEN, shaken_parts
from mhacli.record.checks import TOLERANCES
from mhacli.settings import PaddingSide
from mhacli.usercode.build import seeded
from mhacli.usercode.process import SourceLine, Stage, exception_text
from mhacli.usercode.sequences import Noted, Sequences
from mhacli.usercode.user_attention import MaskForm

CUTS = (1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)
LEAST: Mapping[str, float] = {name: max(TOLERANCES["float32"].output, t.output) for name, t in TOLERANCES.items()}
"""The least tolerance between two ways to compute the same, relative to the size of an output. float64 has that of
float32, because models compute rotations and norms in float32 in any dtype."""
_SHAKES, _ALIKE, _DRAWS = 3, 2, 8
_ALL = 0.9
"""The part of all outputs that counts as all: where attention is sharp, some change by less than their rounding."""
_COARSE = 1e-2
"""The noise floor of a model in 32 bits beyond which a difference below it may be a fault, as where a selection flips."""
_STEPS, _CHUNK = 16, 4
"""Tokens that are read behind a cache, the last of them together."""
_LARGE = 1e3
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
"""The behaviours in the order in which they are shown, and the code of a failure, whose words stand in record/glossary.toml;
none where all is a matter of choice. The last three are asked of checkpoints."""
_IMPLIED_BY = {
    "left-padding": ("causality", "batch", "right-padding"),
    "right-padding": ("causality", "batch"),
    "cache": ("causality", "prefix"),
    "row-sums": ("eager",),
}
"""The failures, besides those of `finite` and `repeat`, that imply that of a behaviour."""


# ----------------------------------------------------------------------------------------------------- what is claimed


_BOTH_WAYS = re.compile(r"MaskedLM|Bert|BERT|Encoder|Bidirectional|Electra")
_CAUSAL = re.compile(r"CausalLM|LMHeadModel|GPT|(?<![a-z])Causal|Decoder|Llama|Autoregressive")
_CAUSAL_HEAD = re.compile(r"(ForCausalLM|[a-z0-9]LMHeadModel|DoubleHeadsModel)$")


def is_claimed_causal(module: object) -> bool | None:
    """Whether a token is claimed to see only earlier ones: by a model or its config, or by the name of its class or of the
    nearest class that it is made from. None if nothing says it."""
    config: Any = getattr(module, "config", None)
    text = config if config_of(module) is None else config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return True
    if getattr(text, "attn_type", "") == "bi" or getattr(text, "use_bidirectional_attention", False) is True:
        return False
    for claim in (getattr(owner, name, None) for name in ("causal", "is_causal") for owner in (module, text)):
        if isinstance(claim, bool):
            return claim
    architectures = re.findall(r"\w+", str(getattr(config, "architectures", "")))
    names = [*architectures, *(cls.__name__ for cls in type(module).__mro__)]
    if any(_CAUSAL_HEAD.search(name) for name in names):
        return True
    for name in names:
        if _BOTH_WAYS.search(name) or _CAUSAL.search(name):
            return not _BOTH_WAYS.search(name)
    return None


# ------------------------------------------------------------------------------------------------------------- readings


class Reading(NamedTuple):
    """What a pass gives for one of its texts: the output `[token, width]`, on demand what the parts of the model compute, and
    what a model that returns nothing for each token gives for the `whole` text."""

    output: Tensor
    parts: Callable[[], Noted]
    whole: Tensor | None = None


class Pair(NamedTuple):
    """Two readings that must agree: how far apart the outputs for each token are, and those for the `whole` text, and what their
    parts compute."""

    apart: Tensor
    parts: tuple[Callable[[], Noted], Callable[[], Noted]]
    whole: float = 0.0

    @property
    def largest(self) -> float:
        """The largest difference of the outputs."""
        return max(self.apart.max().item(), self.whole)

    def first(self, n: int) -> Pair:
        """The pair for the first tokens alone."""
        return self._replace(apart=self.apart[:n], whole=0.0)


def pair_of(ours: Reading, theirs: Reading) -> Pair:
    """Two readings as long as both are."""
    whole = 0.0
    if ours.whole is not None and theirs.whole is not None and len(ours.whole) == len(theirs.whole):
        whole = _apart(ours.whole[None], theirs.whole[None]).item()
    return Pair(_apart(ours.output, theirs.output), (ours.parts, theirs.parts), whole)


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """How far apart what is computed for each token is, as long as both are, relative to its usual size."""
    n, size = min(len(ours), len(theirs)), theirs.norm(dim=-1).square().mean().sqrt()
    relative: Tensor = (ours[:n] - theirs[:n]).norm(dim=-1) / size.clamp(min=torch.finfo(torch.float32).tiny)
    return relative.nan_to_num(nan=torch.inf)


_Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class Asker:
    """The behaviours of a callable with texts, of which the first is the longest; random ones unless some are given. `is_causal`
    is what it claims, and `more` are other questions. `findings` are the behaviours that failed, `cautions` what to do where the
    code raised an exception. `inside` are the attentions that were compared."""

    of: Sequences
    is_causal: bool | None
    seed: int
    stage: Stage
    texts: Sequence[Tensor] = ()
    more: dict[str, Callable[[Asker], Behaviour]] = field(default_factory=dict)
    n_passes: int = 0
    answers: dict[str, Behaviour] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cautions: dict[str, str] = field(default_factory=dict)
    sees_both_ways: bool = False
    inside: tuple[AttentionInside, ...] = ()

    def __post_init__(self) -> None:
        """Reads the longest text, and measures the noise floor."""
        shorter = max(1, self.of.length // 2) if self.of.attention.is_resizable else self.of.length
        self.texts = self.texts or [self.of.draw(self.seed, self.of.length), self.of.draw(self.seed + 1, shorter)]
        self.text, self.length, self.module = self.texts[0], len(self.texts[0]), self.of.attention.built.module
        self.cuts = sorted({cut for cut in (*CUTS, self.length - 1) if 0 < cut < self.length})
        self.middle = min(self.cuts, key=lambda cut: abs(cut - self.length // 2), default=0)
        self.plain = self.read(self.text)[0]
        dtype = self.plain.output.dtype if self.module is None else dtype_of(self.module)
        self.precision = str(dtype).removeprefix("torch.")
        self.tolerance = self.least = LEAST.get(self.precision, LEAST["float32"])
        self.all(("finite", "repeat"))  # what a model remembers is no rounding
        for seed in range(_SHAKES if self.module is not None else 0):
            moved = finite(self.moved(within=partial(shaken_parts, self.module, seed)).largest) or 0.0
            self.tolerance = max(self.tolerance, TIMES_SHAKEN.get(self.precision, 8) * moved)

    def read(self, *texts: Tensor, seed: int = 0, within: _Context = nullcontext, **how: Any) -> list[Reading]:
        """What one pass gives for each of the texts, with a seed, inside a context."""

        def run(**note: Any) -> list[tuple[Tensor, Tensor | None]]:
            self.stage(f"calling {self.of.attention.built.name}")
            self.n_passes += 1
            with torch.no_grad(), seeded(self.seed + seed, texts[0].device), within():
                return self.of.run(texts, **how, **note)

        def parts(row: int) -> Noted:
            found: Noted = {}
            run(note=(row, found))
            return found

        return [Reading(output, partial(parts, row), whole) for row, (output, whole) in enumerate(run())]

    @cached_property
    def alone(self) -> list[Reading]:
        """The reading of each text alone."""
        return [self.plain, *(self.read(text)[0] for text in self.texts[1:])]

    def moved(self, text: Tensor | None = None, **how: Any) -> Pair:
        """Another pass over the text, or over a changed one, against the first."""
        return pair_of(self.read(self.text if text is None else text, **how)[0], self.plain)

    def changed(self, start: int, end: int, seed: int, *, alike: bool = False) -> Tensor:
        """The text with other tokens from `start` to `end`. If all are `alike`, what is computed of the whole text, such as a
        selection, moves further."""
        tokens, other = self.text.clone(), self.of.draw(self.seed + seed, self.length)
        other = other[:1].expand_as(other) if alike else other
        if self.of.n_ids:
            other = torch.where(other == tokens, (other + 1) % self.of.n_ids, other)
        tokens[start:end] = other[start:end]
        return tokens

    # ------------------------------------------------------------------------------------------------------ the answers

    def all(self, names: Sequence[str] = tuple(CODES)) -> None:
        """Asks the named behaviours that have no answer yet, each by the method of its name: an earlier failure may imply it, or
        the code may raise an exception."""
        for name in ("finite", "repeat", *CODES):  # what the first two ask implies the others
            ask = self.more.get(name) or getattr(Asker, name.replace("-", "_"), None)
            if ask is None or name not in names or name in self.answers:
                continue
            failed = {cause for cause, answer in self.answers.items() if answer.ok is False}
            cause = next((each for each in ("finite", "repeat", *_IMPLIED_BY.get(name, ())) if each in failed), None)
            try:
                answer = ask(self) if cause is None else self.unasked(name, f"{cause} fails, which implies this")
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except MhaError as fault:
                if fault.code == "out-of-memory":
                    raise
                answer = self.unasked(name, fault.message)
            except Exception as fault:  # which it did not raise before
                self.cautions[name] = f"test {name} in a script of your own"
                answer = self.unasked(name, f"the code raised {exception_text(fault):.200}")
            self.answers[name] = answer

    @property
    def behaviours(self) -> tuple[Behaviour, ...]:
        """The answers in the order in which they are shown."""
        return tuple(self.answers[name] for name in CODES if name in self.answers)

    @property
    def holds(self) -> bool:
        """Whether the behaviours that decide were tried, and all hold."""
        ok = {name: answer.ok for name, answer in self.answers.items()}
        is_right = ok["repeat"] is True and ok["batch"] is True and False not in ok.values()
        return is_right and (ok["causality"] is True or self.sees_both_ways)

    def answer(
        self, name: str, ok: bool | None, reason: str, largest: float | None = None, *, draws: int = 1, **fields: Any
    ) -> Behaviour:
        """What was seen in texts; `ok` is None where it is no matter of right and wrong."""
        tried, number = Tried(self.length, draws) if draws else None, finite(largest)
        seen = Behaviour(name=name, ok=ok, reason=reason, largest=number, tolerance=self.tolerance, tried=tried)
        return replace(seen, **fields)

    def unasked(self, name: str, reason: str) -> Behaviour:
        """A behaviour that was not tried, for a reason."""
        return self.answer(name, None, f"not tried: {reason}", draws=0)

    @property
    def too_coarse(self) -> str:
        """Why agreement says nothing, where the noise floor is high; empty where it is low."""
        if self.tolerance <= max(_COARSE, 2 * self.least):
            return ""
        return f"rounding alone changes outputs by {self.tolerance:.2g}: a fault could not be distinguished"

    def compare(self, name: str, pairs: Sequence[Pair], agrees: str, differs: str, cut: int | None = None) -> Behaviour:
        """The verdict on outputs that must agree; where they differ, with a finding at the first place."""
        largest = max(pair.largest for pair in pairs)
        if largest > self.tolerance:
            first = next(pair for pair in pairs if pair.largest > self.tolerance)
            return self.failed(self.answer(name, False, differs, largest, at=Place(cut)), first)
        if largest > 0 and self.too_coarse:
            return self.answer(name, None, self.too_coarse, largest, draws=0)
        return self.answer(name, True, agrees, largest, draws=len(pairs))

    def failed(self, answer: Behaviour, pair: Pair | None = None) -> Behaviour:
        """A behaviour that fails, with its finding: where a pair of readings differs with the first position, and with the first
        part whose outputs differ while its inputs agree."""
        code, message, label, line = CODES[answer.name], answer.reason, None, SourceLine()
        if pair is None:
            seen = "numbers that are not finite" if answer.largest is None else f"{answer.largest:g}"
            evidence = f"{seen} in a check where at most {answer.tolerance:g} is right"
            self.findings.append(finding_of(code, evidence, message=message, fix=words_of_code(code).advice))
            return answer
        cut, positions = None if answer.at is None else answer.at.cut, (pair.apart > self.tolerance).nonzero().flatten()
        position = next(iter(positions.tolist()), None)
        before = f"with other tokens from position {cut} on, " if answer.name == "causality" else ""
        sizes = f"{pair.largest:.2g} × the usual size of an output (rounding: {self.tolerance:.2g})"
        where = "for the whole text" if position is None else f"at position {position}"
        part, attention = self._first_parts(pair)
        if self.module is not None:
            around = [part.rsplit(".", n)[0] for n in range(part.count(".") + 1)] if part else []
            classes = [type(self.module.get_submodule(name)) for name in (*around, "")]
            own = (cls for cls in classes if not cls.__module__.startswith("torch."))
            cls = next(own, classes[0])
            if part is not None:
                label = f"{part or 'the model'} ({classes[0].__name__})"
                message = f"{message}, first in {label}"
            with suppress(OSError, TypeError):  # its source cannot be read
                line = SourceLine(inspect.getsourcefile(cls), inspect.getsourcelines(cls.forward)[1])
        evidence = f"{before}the output {where} differs by {sizes}"
        self.findings.append(finding_of(code, evidence, line, message=message, fix=""))
        return replace(answer, at=Place(cut, position, label, attention))

    def _first_parts(self, pair: Pair) -> tuple[str | None, str | None]:
        """The first part, in the order in which parts end, whose outputs differ while its inputs agree, and the first attention
        whose outputs differ."""
        n, module, (ours, theirs) = len(pair.apart), self.module, (parts() for parts in pair.parts)

        def differ(one: Tensor | None, other: Tensor | None) -> bool:
            if one is None or other is None or one.shape[1:] != other.shape[1:]:
                return False
            a, b = (each[:n].reshape(n, -1).double() for each in (one, other))
            return bool((_apart(a, b) > self.tolerance).any())

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

    # ------------------------------------------------------------------------------------------------------- behaviours

    def finite(self) -> Behaviour:
        """Whether outputs are finite, with the weights of a model of transformers, and in 16 bits also where texts are padded; of
        large vectors, and of a text whose tokens are all masked, it is noted."""
        model = None if config_of(self.module) is None else self.module
        weights = {} if model is None else dict(model.named_parameters())
        bad = {name: n for name, weight in weights.items() if (n := int((~weight.isfinite()).sum()))}
        problems = [f"{sum(bad.values())} NaN or Inf in weights, the first in {next(iter(bad))}"] if bad else []
        mask, notes, readings = self.of.mask, list[str](), [*self.alone]
        sides: tuple[PaddingSide, ...] = ("right",) if self.of.has_source else ("right", "left")
        for side in sides if self.precision in NARROW and mask is not None else ():
            readings += self.read(*self.texts, mask=mask, side=side)
        infinite = [reading for reading in readings if not reading.output.isfinite().all()]
        if infinite:
            n_bad = sum(int((~reading.output.isfinite()).sum()) for reading in infinite)
            problems.append(f"{n_bad} numbers in the outputs are NaN or infinite")
        if problems:
            pair = pair_of(infinite[0], infinite[0]) if infinite else None
            n_weights = float(sum(bad.values())) or math.nan
            return self.failed(self.answer("finite", False, "; ".join(problems), n_weights, tolerance=0.0), pair)
        if not self.of.n_ids:
            large = self.read(self.text * _LARGE)[0].output
            notes += [] if bool(large.isfinite().all()) else [f"inputs × {_LARGE:g} give NaN or infinite numbers"]
        rows, real = self.of.padded([self.text, self.text[:0]], "right")
        hides_all = torch.ones(1, 1, self.length, self.length, dtype=torch.bool).tril(-1)
        masked = [] if mask is None else [("a text whose tokens", Inputs(rows, real=real), mask)]
        masked += [
            ("a query whose keys", Inputs(rows, allowed=hides_all), form) for form in self.of.attention.mask_forms
        ][:1]
        for what, inputs, form in masked:
            with suppress(Exception):  # a mask of another form
                out = self.of.attention(inputs, mask=form, seed=self.seed)
                notes += [] if bool(out.isfinite().all()) else [f"{what} are all masked gives NaN"]
        if notes:
            return self.answer("finite", None, "; ".join(notes))
        finite_ones = f"{len(weights)} weights and all outputs" if weights else "all outputs"
        return self.answer("finite", True, f"{finite_ones} are finite", 0.0, tolerance=0.0)

    def repeat(self) -> Behaviour:
        """Whether two passes over one text agree, in evaluation mode and with other random numbers."""
        agrees, differs = "two passes over one text agree", "two passes over one text differ in evaluation mode"
        return self.compare("repeat", [self.moved(seed=1)], agrees, differs)

    def causality(self) -> Behaviour:
        """Whether outputs before a cut stay when everything after it changes."""
        if self.is_causal is False:
            self.sees_both_ways = True
            return self.unasked("causality", "tokens may see later ones")
        if self.of.attention.is_pooled:
            self.sees_both_ways = True
            return self.unasked("causality", "its output is of a whole text, not of each token")
        if not self.cuts:
            return self.unasked("causality", "needs a text of two tokens or more")
        pairs, reached, moves = list[Pair](), dict[int, float](), False
        for cut in self.cuts:
            texts = [self.changed(cut, self.length, cut, alike=cut == 1)]
            if cut == self.middle:
                texts += [self.changed(cut, self.length, seed + 1, alike=True) for seed in range(_ALIKE)]
            moved = [self.moved(text) for text in texts]
            differences = torch.stack([pair.apart for pair in moved]).amax(dim=0)
            moves = moves or bool((differences[cut:] > self.tolerance).any())
            reached[cut] = (differences[:cut] > 0).double().mean().item()
            pairs += [pair.first(cut) for pair in moved]
        if not moves:
            return self.unasked("causality", self.too_coarse or "the output does not depend on it")
        agrees, differs = "no output depends on a later token", "an output depends on later tokens"
        leaks = [pair for pair in pairs if pair.largest > self.tolerance]
        if not leaks and pair_of(self.trained, self.plain).largest > self.tolerance:
            changed = self.read(self.changed(self.middle, self.length, self.middle), training=True)[0]
            pair = pair_of(changed, self.trained).first(self.middle)
            if pair.largest > self.tolerance:
                return self.compare("causality", [pair], "", f"in training mode {differs}", self.middle)
        if not leaks:
            return self.compare("causality", pairs, agrees, differs)
        if self.is_causal is None and (how := self._both_ways(reached)) is not None:
            whether = "" if self.sees_both_ways else ", and nothing says whether it may: state --causal or --no-causal"
            return self.unasked("causality", f"{how}{whether}")
        return self.compare("causality", leaks, agrees, differs, len(leaks[0].apart))

    def _both_ways(self, reached: Mapping[int, float]) -> str | None:
        """How tokens see later ones, by the part of the outputs before each cut that what is after it reaches, however little. It
        is surely meant (`sees_both_ways`) but where a language model may do so by mistake. None if it is a leak: later tokens
        reach some positions or distances and not others, as in nothing that is meant to see both ways."""
        width = self.plain.output.shape[-1]
        self.sees_both_ways = not (self.of.n_ids and width == self.of.n_ids)
        if min(reached.values()) >= _ALL:
            return "every output depends on later tokens"
        within = [cut for cut, part in reached.items() if part >= _ALL]
        seen = [cut for cut, part in reached.items() if part]
        if 0 < len(within) < len(reached) and seen == within == [*reached][: len(within)]:
            self.sees_both_ways = True
            return f"the first tokens, at least {within[-1]}, see each other, and later ones what is before them"
        onwards = self._reach(self.changed(0, self.middle, 1), start=self.middle, end=self.length)
        if onwards < _ALL and reached[self.middle] >= onwards / 2:
            return "outputs depend on later tokens as far as on earlier ones"
        self.sees_both_ways = False
        for cut in (int(0.37 * self.length), int(0.63 * self.length)):
            changes = [self.changed(cut, self.length, _DRAWS + seed) for seed in range(_DRAWS)]
            if self._reach(*changes, start=0, end=cut) < _ALL:
                return None
        return "outputs depend on some later tokens"

    def _reach(self, *changed: Tensor, start: int, end: int) -> float:
        """The part of the outputs from `start` to `end` that one of several changes of the text reaches, however little: where
        attention is sharp, one alone reaches few."""
        differences = torch.stack([self.moved(text).apart for text in changed])
        return (differences.amax(dim=0)[start:end] > 0).double().mean().item()

    @cached_property
    def trained(self) -> Reading:
        """The reading of the text in training mode."""
        return self.read(self.text, training=True)[0]

    def prefix(self) -> Behaviour:
        """Whether a shorter text gives the start of a longer one's outputs."""
        if self.answers["causality"].ok is not True:
            return self.unasked("prefix", "only where no output depends on a later token")
        if self.of.has_source and self.of.attention.example is not None:
            return self.unasked("prefix", "in the example the text of the encoder may change with the length")
        n = max(1, self.length // 3)
        agrees = "a shorter text gives the start of a longer one's"
        differs = f"the first {n} tokens alone give other outputs than in a text of {self.length}"
        return self.compare("prefix", [self.moved(self.text[:n]).first(n)], agrees, differs, n)

    def batch(self) -> Behaviour:
        """Whether a text gives the same outputs alone and before, between and behind others of its length."""
        before, behind = (self.changed(0, self.length, seed, alike=True) for seed in (1, 2))
        first, _, last = self.read(self.text, behind, self.text)
        pairs = [pair_of(each, self.plain) for each in (self.read(before, self.text, behind)[1], first, last)]
        differs = "the outputs of a text depend on the other texts in its batch"
        return self.compare("batch", pairs, "a text alone gives the same as in a batch", differs)

    def padding(self, side: PaddingSide) -> Behaviour:
        """Whether texts padded on a side give the same outputs as each alone, with a mask of the real tokens.
        Padding on the left must change nothing where positions are given, and in causal models of transformers."""
        name, mask, lengths = f"{side}-padding", self.of.mask, [len(text) for text in self.texts]
        if mask is None:
            return self.unasked(name, "it takes no mask of padding by a known name")
        if side == "left" and (self.of.has_source or mask.kind == "lengths"):
            kind = "an encoder-decoder model" if self.of.has_source else "lengths"
            return self.unasked(name, f"{kind}, for texts that are padded on the right")
        if min(lengths) == max(lengths):
            return self.unasked(name, "needs texts of different lengths")
        pairs = self._padded(mask, side)
        tokens, whole = max(pair.apart.max().item() for pair in pairs), max(pair.whole for pair in pairs)
        other: PaddingSide = "left" if side == "right" else "right"
        differs_as_a_whole = tokens <= self.tolerance < whole and mask.kind != "lengths"
        if differs_as_a_whole and max(pair.whole for pair in self._padded(mask, other)) <= self.tolerance:
            end = "last" if side == "right" else "first"
            reason = f"the answer for a text is read at its {end} token: pad texts on the {other}"
            return self.answer(name, None, reason, whole)
        knows_start = side == "right" or self.of.positions is not None
        knows_start = knows_start or (self.is_causal is True and config_of(self.module) is not None)
        by = "" if knows_start else ", as where positions count from the first token of a batch"
        subject = f"with up to {max(lengths) - min(lengths)} padding tokens on the {side}, a text gives"
        meaning = "" if mask.kind == "lengths" else f", in which True {mask.true_means}s"
        agrees = f"{subject} the same outputs as alone ({mask.parameter}{meaning})"
        answer = self.compare(name, pairs, agrees, f"{subject} other outputs than alone{by}")
        if answer.ok is False and not (knows_start and self.of.hides_padding):
            self.findings.pop()
            return replace(answer, ok=None, at=None)
        return answer

    right_padding, left_padding = partialmethod(padding, "right"), partialmethod(padding, "left")

    def _padded(self, mask: MaskForm, side: PaddingSide) -> list[Pair]:
        """The texts padded on a side, each against the text alone."""
        padded = self.read(*self.texts, mask=mask, side=side)
        return [pair_of(*readings) for readings in zip(padded, self.alone, strict=True)]

    def cache(self) -> Behaviour:
        """Whether tokens that are read behind a cache, one by one and together, give the outputs of one call."""
        if self.of.cached is None:
            return self.unasked("cache", "it takes no cache by a known name")
        if self.answers["causality"].ok is not True:
            return self.unasked("cache", "only where no output depends on a later token")
        length = max(1, self.length * 7 // 8)  # a position too far must be one that the model has
        n_steps = min(_STEPS, length - 1)
        n, chunk = length - n_steps, _CHUNK if n_steps > 2 * _CHUNK else 1
        cuts = range(n, length - chunk + 1)
        self.n_passes += len(cuts) + 1
        with torch.no_grad(), seeded(self.seed, self.text.device):
            (output,) = self.of.cached(self.text[None], (*cuts, length))
        agrees = f"{n} tokens, then {n_steps} behind a cache, give the same as one call"
        differs = "tokens that are read behind a cache give other outputs than in one call"
        return self.compare("cache", [pair_of(Reading(output, dict), self.plain)], agrees, differs, n)

    def dtype(self) -> Behaviour:
        """How far bfloat16 changes outputs of a model in float32."""
        if self.precision != "float32":
            return self.unasked("dtype", f"it computes in {self.precision}")
        device = self.text.device.type
        moved = self.moved(within=partial(torch.autocast, device, torch.bfloat16)).largest
        reason = f"under autocast to bfloat16 outputs change by up to {moved:.2g} of their size"
        return self.answer("dtype", None, reason, moved)

    def training(self) -> Behaviour:
        """How far training mode changes outputs."""
        moved = pair_of(self.trained, self.plain).largest
        reason = f"training mode changes outputs by up to {moved:.2g} of their size"
        return self.answer("training", None, reason if moved else "training mode changes no output", moved)
