"""What a callable does with texts, whatever is inside it: whether an output depends on later tokens, on the length, on other
texts, on padding or on a cache.

Every behaviour is asked by readings of texts that must agree. A difference counts beyond the noise floor: a multiple of what one
rounding step of every part of the model changes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhacli.commands.check.result import AttentionInside, Behaviour, Finding, Place, Tried
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.models.layer_names import dtype_of, is_attention
from mhacli.models.run import TIMES_SHAKEN, shaken_parts
from mhacli.record.checks import TOLERANCES
from mhacli.record.glossary import Word, words_of
from mhacli.settings import PaddingSide
from mhacli.usercode.build import seeded
from mhacli.usercode.process import Stage, exception_text
from mhacli.usercode.sequences import Noted, Sequences

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


def words_of_failure(name: str) -> Word:
    """The effect of a behaviour that fails, and what to do about it."""
    code = CODES[name]
    return words_of("glossary", "behaviour").get(code) or words_of("mistakes", "mistake")[code]


def failure_of(name: str, message: str, evidence: str) -> Finding:
    """The finding for a behaviour that fails, without a place."""
    return Finding(CODES[name], message, evidence, fix="", effect=words_of_failure(name).effect)


# ----------------------------------------------------------------------------------------------------- what is claimed


_BOTH_WAYS = re.compile(r"MaskedLM|Bert|BERT|Encoder|Bidirectional|Electra")
_CAUSAL = re.compile(r"CausalLM|LMHeadModel|GPT|(?<![a-z])Causal|Decoder|Llama|Autoregressive")
_CAUSAL_HEAD = re.compile(r"(ForCausalLM|[a-z0-9]LMHeadModel|DoubleHeadsModel)$")


def is_claimed_causal(module: object) -> bool | None:
    """Whether a token is claimed to see only earlier ones: by a model or its config, or by the name of its class or of the
    nearest class that it is made from. None if nothing says it."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config(decoder=True) if is_of_transformers(module) else config
    if getattr(config, "is_encoder_decoder", False):
        return True
    if getattr(text, "attn_type", "") == "bi" or getattr(text, "use_bidirectional_attention", False) is True:
        return False
    for claim in (getattr(owner, name, None) for name in ("causal", "is_causal") for owner in (module, text)):
        if isinstance(claim, bool):
            return claim
    names = [*architectures_of(config), *(cls.__name__ for cls in type(module).__mro__)]
    if any(_CAUSAL_HEAD.search(name) for name in names):
        return True
    for name in names:
        if _BOTH_WAYS.search(name) or _CAUSAL.search(name):
            return not _BOTH_WAYS.search(name)
    return None


def is_of_transformers(model: Any) -> bool:
    """Whether a module is a model of transformers."""
    return hasattr(getattr(model, "config", None), "get_text_config")


def architectures_of(config: Any) -> tuple[str, ...]:
    """The class names in a config; tolerates any content."""
    names = getattr(config, "architectures", None)
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, (list, tuple)) else ()


# ------------------------------------------------------------------------------------------------------------- readings


@dataclass(frozen=True, eq=False)
class Reading:
    """What a pass gives for one of its texts: the output `[token, width]`, and on demand what the parts of the model compute."""

    output: Tensor
    parts: Callable[[], Noted]

    @cached_property
    def size(self) -> Tensor:
        """The usual size of the output of a token."""
        return _size(self.output)


class Pair(NamedTuple):
    """Two readings that must agree: how far apart the outputs for each token are, and what their parts compute."""

    apart: Tensor
    parts: tuple[Callable[[], Noted], Callable[[], Noted]]

    @property
    def largest(self) -> float:
        """The largest difference of the outputs."""
        return self.apart.max().item()

    def first(self, n: int) -> Pair:
        """The pair for the first tokens alone."""
        return self._replace(apart=self.apart[:n])


def pair_of(ours: Reading, theirs: Reading) -> Pair:
    """Two readings as long as both are."""
    return Pair(_apart(ours.output, theirs.output, theirs.size), (ours.parts, theirs.parts))


def _size(rows: Tensor) -> Tensor:
    size: Tensor = rows.norm(dim=-1).square().mean().sqrt()
    return size.clamp(min=torch.finfo(torch.float32).tiny)


def _apart(ours: Tensor, theirs: Tensor, size: Tensor) -> Tensor:
    """How far apart what is computed for each token is, as long as both are, relative to its usual size."""
    n = min(len(ours), len(theirs))
    relative: Tensor = (ours[:n] - theirs[:n]).norm(dim=-1) / size
    return relative.nan_to_num(nan=torch.inf)


_Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class Asker:
    """The behaviours of a callable with texts, of which the first is the longest. `is_causal` is what it claims. `findings` are
    the behaviours that failed, `cautions` what to do where the code raised an exception. `inside` are the attentions of a
    checkpoint."""

    of: Sequences
    texts: Sequence[Tensor]
    is_causal: bool | None
    seed: int
    stage: Stage
    n_passes: int = 0
    answers: dict[str, Behaviour] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cautions: dict[str, str] = field(default_factory=dict)
    sees_both_ways: bool = False
    inside: tuple[AttentionInside, ...] = ()

    def __post_init__(self) -> None:
        """Reads each text alone, and measures the noise floor."""
        self.text, self.length, self.module = self.texts[0], len(self.texts[0]), self.of.module
        self.cuts = sorted({cut for cut in (*CUTS, self.length - 1) if 0 < cut < self.length})
        self.middle = min(self.cuts, key=lambda cut: abs(cut - self.length // 2), default=0)
        self.plain = self.read(self.text)[0]
        self._alone: dict[str, list[Reading]] = {}
        dtype = self.plain.output.dtype if self.module is None else dtype_of(self.module)
        self.dtype = str(dtype).removeprefix("torch.")
        self.tolerance = self.least = LEAST.get(self.dtype, LEAST["float32"])
        for seed in range(_SHAKES if self.module is not None else 0):
            moved = finite(self.moved(within=partial(shaken_parts, self.module, seed)).largest) or 0.0
            self.tolerance = max(self.tolerance, TIMES_SHAKEN.get(self.dtype, 8) * moved)

    def read(self, *texts: Tensor, seed: int = 0, within: _Context = nullcontext, **how: Any) -> list[Reading]:
        """What one pass gives for each of the texts, with a seed, inside a context."""

        def run(**note: Any) -> list[Tensor]:
            self.stage(f"calling {self.of.attention.built.name}")
            self.n_passes += 1
            with torch.no_grad(), seeded(self.seed + seed, texts[0].device), within():
                return self.of.run(texts, **how, **note)

        def parts(row: int) -> Noted:
            found: Noted = {}
            run(note=(row, found))
            return found

        return [Reading(output, partial(parts, row)) for row, output in enumerate(run())]

    def alone(self, mask: str = "") -> list[Reading]:
        """The reading of each text alone, with a mask of padding in which all its tokens are real."""
        if mask not in self._alone:
            first = self.read(self.text, mask=mask)[0] if mask else self.plain
            self._alone[mask] = [first, *(self.read(text, mask=mask)[0] for text in self.texts[1:])]
        return self._alone[mask]

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

    def all(self, names: Sequence[str] = tuple(CODES), **more: Callable[[], Behaviour]) -> None:
        """Asks the named behaviours, and more, that have no answer yet."""
        asked: dict[str, Callable[[], Behaviour]] = {
            "finite": self.finite,
            "repeat": self.repeat,
            "causality": self.causality,
            "prefix": self.prefix,
            "batch": self.batch,
            "right-padding": partial(self.padding, "right"),
            "left-padding": partial(self.padding, "left"),
            "cache": self.cache,
            "dtype": self.in_16_bits,
            "training": self.training,
        }
        for name, ask in (asked | more).items():
            if name in (*names, *more) and name not in self.answers:
                self.answers[name] = self._asked(name, ask)

    def _asked(self, name: str, ask: Callable[[], Behaviour]) -> Behaviour:
        """The answer, or why there is none: an earlier failure implies it, or the code raised what it did not raise before."""
        for cause in ("finite", "repeat", *_IMPLIED_BY.get(name, ())):
            if cause in self.answers and self.answers[cause].ok is False:
                return self.unasked(name, f"{cause} fails, which implies this")
        try:
            return ask()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as fault:
            if isinstance(fault, MhaError) and fault.code == "out-of-memory":
                raise
            if isinstance(fault, MhaError):
                return self.unasked(name, fault.message)
            self.cautions[name] = f"test {name} in a script of your own"
            return self.unasked(name, f"the code raised {exception_text(fault):.200}")

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

    def compare(self, name: str, pairs: Sequence[Pair], agrees: str, differs: str, cut: int | None = None) -> Behaviour:
        """The verdict on outputs that must agree; where they differ, with a finding at the first place."""
        largest = max(pair.largest for pair in pairs)
        if largest > self.tolerance:
            first = next(pair for pair in pairs if pair.largest > self.tolerance)
            return self._failed(name, first, differs, largest, cut)
        if largest > 0 and self.tolerance > max(_COARSE, 2 * self.least):
            reason = f"rounding alone changes outputs by {self.tolerance:.2g}: a fault could not be distinguished"
            return self.answer(name, None, reason, largest, draws=0)
        return self.answer(name, True, agrees, largest, draws=len(pairs))

    def _failed(self, name: str, pair: Pair, message: str, largest: float, cut: int | None) -> Behaviour:
        """The failed behaviour, and its finding: with the first position, and the first part whose outputs differ while its
        inputs agree."""
        position = int((pair.apart > self.tolerance).nonzero()[0])
        sizes = f"by {largest:.2g} of an output's size, where rounding explains {self.tolerance:.2g}"
        after = f"; everything from position {cut} on was changed" if name == "causality" else ""
        finding = failure_of(name, message, f"the output at position {position} differs {sizes}{after}")
        part, attention = self._first_parts(pair)
        label = None
        if part is not None and self.module is not None:
            around = [part.rsplit(".", n)[0] for n in range(part.count(".") + 1)] + [""] * bool(part)
            classes = [type(self.module.get_submodule(name)) for name in around]
            label = f"{part or 'the model'} ({classes[0].__name__})"
            own = (cls for cls in classes if not cls.__module__.startswith("torch."))
            code = next(own, classes[0])
            finding = replace(finding, message=f"{message}, first in {label}")
            with suppress(OSError, TypeError):  # its source cannot be read
                file, line = inspect.getsourcefile(code), inspect.getsourcelines(code.forward)[1]
                finding = replace(finding, file=file, line=line)
        self.findings.append(finding)
        return self.answer(name, False, message, largest, at=Place(cut, position, label, attention))

    def _first_parts(self, pair: Pair) -> tuple[str | None, str | None]:
        """The first part, in the order in which parts end, whose outputs differ while its inputs agree, and the first attention
        whose outputs differ."""
        n, module, (ours, theirs) = len(pair.apart), self.module, (parts() for parts in pair.parts)

        def differ(one: Tensor | None, other: Tensor | None) -> bool:
            if one is None or other is None or one.shape[1:] != other.shape[1:]:
                return False
            a, b = (each[:n].reshape(n, -1).double() for each in (one, other))
            return bool((_apart(a, b, _size(b)) > self.tolerance).any())

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
        """Whether outputs are finite: of the texts, of large vectors, and of a text whose tokens are all masked."""
        bad = [alone for alone in self.alone() if not alone.output.isfinite().all()]
        if bad:
            n_bad = sum(int((~alone.output.isfinite()).sum()) for alone in bad)
            message = f"{n_bad} numbers in the outputs are NaN or infinite"
            return self._failed("finite", pair_of(bad[0], bad[0]), message, torch.nan, None)
        notes = []
        if not self.of.n_ids:
            large = self.read(self.text * _LARGE)[0].output
            notes += [] if bool(large.isfinite().all()) else [f"inputs × {_LARGE:g} give NaN or infinite numbers"]
        for mask in list(self.of.masks)[:1]:
            rows, real = self.of.padded([self.text, self.text[:0]], "right")
            with seeded(self.seed, rows.device):
                is_nan = not bool(self.of.call(rows, real, mask=mask).isfinite().all())
            notes += ["a text whose tokens are all masked gives NaN"] if is_nan else []
        if notes:
            return self.answer("finite", None, "; ".join(notes))
        return self.answer("finite", True, "all outputs are finite", 0.0)

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
            texts = [self.changed(cut, self.length, cut)] if cut > 1 else []
            if cut == self.middle:
                texts += [self.changed(cut, self.length, seed + 1, alike=True) for seed in range(_ALIKE)]
            moved = [self.moved(text) for text in texts] or [pair_of(self.uniform, self.plain)]
            differences = torch.stack([pair.apart for pair in moved]).amax(dim=0)
            moves = moves or bool(differences[cut] > self.tolerance)
            reached[cut] = _part_of(differences[:cut])
            pairs += [pair.first(cut) for pair in moved]
        if not moves:
            return self.unasked("causality", "the output does not depend on it")
        agrees, differs = "no output depends on a later token", "an output depends on later tokens"
        leaks = [pair for pair in pairs if pair.largest > self.tolerance]
        if not leaks:
            return self._in_training() or self.compare("causality", pairs, agrees, differs)
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
        return _part_of(differences.amax(dim=0)[start:end])

    @cached_property
    def uniform(self) -> Reading:
        """The reading of a text whose tokens from the second on are all alike."""
        return self.read(self.changed(1, self.length, 1, alike=True))[0]

    @cached_property
    def trained(self) -> Reading:
        """The reading of the text in training mode."""
        return self.read(self.text, training=True)[0]

    def _in_training(self) -> Behaviour | None:
        """The failure of causality in training mode, where that gives other outputs; None where there is none."""
        if pair_of(self.trained, self.plain).largest <= self.tolerance:
            return None
        changed = self.read(self.changed(self.middle, self.length, self.middle), training=True)[0]
        pair = pair_of(changed, self.trained).first(self.middle)
        differs = "in training mode an output depends on later tokens"
        failed = self.compare("causality", [pair], "", differs, self.middle)
        return failed if failed.ok is False else None

    def prefix(self) -> Behaviour:
        """Whether a shorter text gives the start of a longer one's outputs."""
        if self.answers["causality"].ok is not True:
            return self.unasked("prefix", "only where no output depends on a later token")
        n = max(1, self.length // 3)
        agrees = "a shorter text gives the start of a longer one's"
        differs = f"the first {n} tokens alone give other outputs than in a text of {self.length}"
        return self.compare("prefix", [self.moved(self.text[:n])], agrees, differs, n)

    def batch(self) -> Behaviour:
        """Whether a text gives the same outputs alone and among others of its length."""
        among = self.read(self.changed(1, self.length, 1, alike=True), self.text)
        pairs = [pair_of(among[1], self.plain), pair_of(among[0], self.uniform)]
        differs = "the outputs of a text depend on the other texts in its batch"
        return self.compare("batch", pairs, "a text alone gives the same as in a batch", differs)

    def padding(self, side: PaddingSide) -> Behaviour:
        """Whether texts padded on a side give the same outputs as each alone, with a mask in which True means what hides most.
        Padding on the left must change nothing where positions are given, and in causal models of transformers."""
        name, lengths = f"{side}-padding", [len(text) for text in self.texts]
        if not self.of.masks:
            return self.unasked(name, "it takes no mask of padding by a known name")
        if side == "left" and self.of.has_source:
            return self.unasked(name, "an encoder-decoder model, whose texts are padded on the right")
        if min(lengths) == max(lengths):
            return self.unasked(name, "needs texts of different lengths")
        tried, raised = dict[str, list[Pair]](), ""
        for mask in self.of.masks:
            try:
                alone, padded = self.alone(mask), self.read(*self.texts, mask=mask, side=side)
                tried[mask] = [pair_of(*readings) for readings in zip(padded, alone, strict=True)]
            except Exception as fault:  # a mask of another form
                raised = f"{mask.partition(',')[0]} raises {type(fault).__name__}"
        if not tried:
            return self.unasked(name, raised)
        mask = min(tried, key=lambda mask: max(pair.largest for pair in tried[mask]))
        knows_start = side == "right" or self.of.positions is not None
        knows_start = knows_start or (self.is_causal is True and is_of_transformers(self.module))
        by = "" if knows_start else ", as where positions count from the first token of a batch"
        subject = f"with up to {max(lengths) - min(lengths)} padding tokens on the {side}, a text gives"
        agrees, differs = f"{subject} the same outputs as alone ({mask})", f"{subject} other outputs than alone{by}"
        answer = self.compare(name, tried[mask], agrees, differs)
        if answer.ok is False and not (knows_start and self.of.hides_padding):
            self.findings.pop()
            return replace(answer, ok=None, at=None)
        return answer

    def cache(self) -> Behaviour:
        """Whether tokens that are read behind a cache, one by one and together, give the outputs of one call."""
        if self.of.cached is None:
            return self.unasked("cache", "it takes no cache by a known name")
        if self.answers["causality"].ok is not True:
            return self.unasked("cache", "only where no output depends on a later token")
        n_steps = min(_STEPS, self.length - 1)
        n, chunk = self.length - n_steps, _CHUNK if n_steps > 2 * _CHUNK else 1
        cuts = range(n, self.length - chunk + 1)
        self.n_passes += len(cuts) + 1
        with torch.no_grad(), seeded(self.seed, self.text.device):
            (output,) = self.of.cached(self.text[None], (*cuts, self.length))
        agrees = f"{n} tokens, then {n_steps} behind a cache, give the same as one call"
        differs = "tokens that are read behind a cache give other outputs than in one call"
        return self.compare("cache", [pair_of(Reading(output, dict), self.plain)], agrees, differs, n)

    def in_16_bits(self) -> Behaviour:
        """How far bfloat16 moves outputs of a model in float32."""
        if self.dtype != "float32":
            return self.unasked("dtype", f"it computes in {self.dtype}")
        device = self.text.device.type
        moved = self.moved(within=partial(torch.autocast, device, torch.bfloat16)).largest
        reason = f"under autocast to bfloat16 outputs change by up to {moved:.2g} of their size"
        return self.answer("dtype", None, reason, moved)

    def training(self) -> Behaviour:
        """Whether training mode changes outputs, without or with random numbers."""
        moved = pair_of(self.trained, self.plain).largest
        if moved <= self.tolerance:
            return self.answer("training", None, "training and evaluation give the same outputs", moved)
        again = self.read(self.text, training=True, seed=1)[0]
        if pair_of(again, self.trained).largest > self.tolerance:
            return self.answer("training", None, "outputs are random in training mode, and not in evaluation")
        return self.answer("training", None, "training mode gives other outputs, which are not random", moved)


def _part_of(differences: Tensor) -> float:
    """The part of the outputs that differ at all."""
    return (differences > 0).double().mean().item()


def asker_of(sequences: Sequences, seed: int, stage: Stage, *, is_causal: bool | None) -> Asker:
    """The behaviours of a callable with random texts."""
    shorter = max(1, sequences.length // 2) if sequences.attention.is_resizable else sequences.length
    texts = [sequences.draw(seed, sequences.length), sequences.draw(seed + 1, shorter)]
    return Asker(sequences, texts, is_causal, seed, stage)
