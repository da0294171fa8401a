"""What a callable does with texts, whatever is inside it: whether an output depends on later tokens, on the length, on other
texts, on padding or on a cache.

Every behaviour is asked by passes that must agree. A difference counts beyond the noise floor: a multiple of what one rounding
step of every part of the model changes.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.commands.check.result import Behaviour, Finding, Place, Tried
from mhacli.errors import MhaError
from mhacli.io.data import finite
from mhacli.models.inputs import TIMES_SHAKEN, shaken_parts
from mhacli.models.layer_names import dtype_of, is_attention
from mhacli.record.checks import TOLERANCES
from mhacli.settings import PaddingSide
from mhacli.usercode.call.sequences import Noted, Sequences, Text
from mhacli.usercode.inputs import seeded
from mhacli.usercode.process import Stage

CUTS = (1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)
CEILING: Mapping[str, float] = {name: max(TOLERANCES["float32"].output, t.output) for name, t in TOLERANCES.items()}
"""The least tolerance between two ways to compute the same, relative to the size of an output. float64 has that of
float32, because models compute rotations and norms in float32 in any dtype."""
_SHAKES, _DRAWS = 3, 8
_ALL = 0.9
"""The part of all outputs that counts as all: where attention is sharp, some change by less than their rounding."""
_COARSE = 1e-2
"""The noise floor of a model in 32 bits beyond which a difference below it may be a fault, as where a selection flips."""
_STEPS, _CHUNK = 16, 4
"""Tokens that are read behind a cache, the last of them together."""
_LOOSER = 100.0
"""How much more than the outputs a part inside may move by rounding alone."""
_LARGE = 1e3

_IMPLIED_BY = {
    "left-padding": ("causality", "batch"),
    "right-padding": ("causality", "batch"),
    "cache": ("causality", "prefix"),
}
"""The failures, besides that of `repeat`, that imply that of a behaviour."""


# ----------------------------------------------------------------------------------------------------- what is claimed


class Claim(NamedTuple):
    """Whether a token is claimed to see only earlier ones, None if nothing says; and why it may see later ones."""

    is_causal: bool | None
    why_not: str = "tokens may see later ones"


_BOTH_WAYS = re.compile(r"MaskedLM|Bert|BERT|Encoder|Bidirectional|Electra")
_CAUSAL = re.compile(r"CausalLM|LMHeadModel|GPT|(?<![a-z])Causal|Decoder|Llama|Autoregressive")
_CAUSAL_HEAD = re.compile(r"(ForCausalLM|[a-z0-9]LMHeadModel|DoubleHeadsModel)$")


def claim_of(module: object, *, causal: bool | None = None) -> Claim:
    """What a model claims: by the statement, its config, its family in transformers, or the name of its class or of the nearest
    class that it is made from."""
    if causal is not None:
        return Claim(causal)
    config = getattr(module, "config", None)
    if is_of_transformers(module) and (claim := _claim_of_family(module, config)) is not None:
        return claim
    for owner in (module, config):
        for name in ("causal", "is_causal"):
            stated = getattr(owner, name, None)
            if isinstance(stated, bool):
                return Claim(stated)
    for name in [*architectures_of(config), *(cls.__name__ for cls in type(module).__mro__)]:
        if _BOTH_WAYS.search(name):
            return Claim(False)
        if _CAUSAL.search(name):
            return Claim(True)
    return Claim(None)


def is_of_transformers(model: Any) -> bool:
    """Whether a module is a model of transformers."""
    return hasattr(getattr(model, "config", None), "get_text_config")


def architectures_of(config: Any) -> tuple[str, ...]:
    """The class names in a config; tolerates any content."""
    names = getattr(config, "architectures", None)
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, (list, tuple)) else ()


def _claim_of_family(module: Any, config: Any) -> Claim | None:
    """What a model of transformers claims; None for a family that the library does not know.

    In most families `is_decoder` does not decide this. The language head that a checkpoint names does, and a family
    that transformers knows only for generation.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    text = config.get_text_config(decoder=True)
    families = {config.model_type, text.model_type}
    if not families & set(CONFIG_MAPPING):
        return None
    if config.is_encoder_decoder:
        return Claim(True)
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        return Claim(False, "its config says that tokens see later ones")
    if getattr(text, "attn_type", None) == "bi" or getattr(text, "causal", None) is False:
        return Claim(False, f"{text.model_type} sees all tokens")
    if any(_CAUSAL_HEAD.search(name) for name in architectures_of(config)):
        return Claim(True)
    generates = families & set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    fills = families & set(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    flags = [
        part.is_causal for n, part in module.named_modules() if is_attention(n, part) and hasattr(part, "is_causal")
    ]
    is_bidirectional = bool(flags) and not any(flags)
    if generates and (getattr(text, "is_decoder", False) or not (fills or is_bidirectional)):
        return Claim(True)
    return Claim(False, "an encoder, whose tokens see later ones")


# ----------------------------------------------------------------------------------------------------------- the passes


@dataclass(eq=False)
class Pass:
    """One pass over texts, which runs when its outputs are first read."""

    run: Callable[..., list[Tensor]]

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The outputs `[token, width]` of each text."""
        return self.run()

    def parts(self, row: int) -> Noted:
        """What the parts of the model compute for one of the texts."""
        found: Noted = {}
        self.run(note=(row, found))
        return found


class Pair(NamedTuple):
    """The outputs of a text in two passes, as its row in each. They must agree up to `end`, or as long as both are."""

    ours: Pass
    theirs: Pass
    rows: tuple[int, int] = (0, 0)
    end: int | None = None


class Asked(NamedTuple):
    """The behaviours, a finding for each that fails, and whether those that decide were tried and hold."""

    behaviours: tuple[Behaviour, ...]
    findings: tuple[Finding, ...]
    holds: bool


@dataclass
class Asker:
    """The behaviours of a callable with texts, of which the first is the longest; `findings` are those that failed."""

    of: Sequences
    texts: Sequence[Text]
    claim: Claim
    seed: int
    stage: Stage
    findings: list[Finding] = field(default_factory=list)
    sees_both_ways: bool = False
    n_passes: int = 0
    answers: dict[str, Behaviour] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)
    pads_left: bool | None = None
    """Whether padding on the left must change nothing; None: where positions are given with the mask."""

    def __post_init__(self) -> None:
        """Runs each text alone, and measures the noise floor."""
        self.text, self.length = self.texts[0], len(self.texts[0].tokens)
        self._masked: dict[str, list[Pass]] = {}
        self._trained = self.passing(self.text, training=True)
        self.alone = [self.passing(text) for text in self.texts]
        y = self.alone[0].outputs[0]
        self.usual = y.norm(dim=-1).square().mean().sqrt().item()
        dtype = y.dtype if self.of.module is None else dtype_of(self.of.module)
        self.dtype = str(dtype).removeprefix("torch.")
        self.tolerance = self.least = CEILING.get(self.dtype, CEILING["float32"])
        for seed in range(_SHAKES if self.of.module is not None else 0):
            shaken = self.passing(self.text, within=partial(shaken_parts, self.of.module, seed))
            moved = self.apart(Pair(shaken, self.alone[0])).max().item()
            moved = moved if math.isfinite(moved) else 0.0
            self.tolerance = max(self.tolerance, TIMES_SHAKEN.get(self.dtype, 8) * moved)

    def passing(
        self,
        *texts: Text,
        seed: int | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **how: Any,
    ) -> Pass:
        """A pass over texts, with a seed, inside a context."""

        def run(**note: Any) -> list[Tensor]:
            self.stage(f"calling {self.of.name}")
            self.n_passes += 1
            device = texts[0].tokens.device
            with torch.no_grad(), seeded(self.seed if seed is None else seed, device), within():
                return self.of.run(texts, **how, **note)

        return Pass(run)

    def apart(self, pair: Pair) -> Tensor:
        """How far apart the outputs of each token are, relative to their usual size."""
        ours, theirs = pair.ours.outputs[pair.rows[0]], pair.theirs.outputs[pair.rows[1]]
        n = min(len(ours), len(theirs), pair.end or len(ours))
        apart: Tensor = (ours[:n] - theirs[:n]).norm(dim=-1) / max(self.usual, torch.finfo(torch.float32).tiny)
        return apart.nan_to_num(nan=torch.inf)

    def changed(self, start: int, end: int, seed: int, *, alike: bool = False) -> Text:
        """The text with other tokens from `start` to `end`, which may be all `alike`."""
        tokens, other = self.text.tokens.clone(), self.of.draw(self.seed + seed, self.length).tokens
        if (
            alike
        ):  # which moves what is computed of the whole text, such as a selection, further than tokens of one kind
            other = other[:1].expand_as(other)
        if self.of.n_ids:
            other = torch.where(other == tokens, (other + 1) % self.of.n_ids, other)
        tokens[start:end] = other[start:end]
        return self.text._replace(tokens=tokens)

    # ------------------------------------------------------------------------------------------------------ the answers

    def all(self, names: Sequence[str] = (), **more: Callable[[], Behaviour]) -> dict[str, Behaviour]:
        """The named behaviours, or all, and more, in the order in which they are shown."""
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
        asked = {name: ask for name, ask in asked.items() if not names or name in names} | more
        for name in asked:
            reason = self._reason_to_skip(name)
            self.answers[name] = self.unasked(name, reason) if reason is not None else self._answer(name, asked[name])
        first = ("causality", "prefix", "batch", "repeat")
        self.answers = {name: self.answers[name] for name in (*first, *self.answers) if name in self.answers}
        return self.answers

    @property
    def asked(self) -> Asked:
        """The answers, and what follows from them."""
        ok = {name: answer.ok for name, answer in self.answers.items()}
        is_tried = ok["repeat"] is True and ok["batch"] is True
        holds = is_tried and (ok["causality"] is True or self.sees_both_ways) and False not in ok.values()
        return Asked(tuple(self.answers.values()), tuple(self.findings), holds)

    def _reason_to_skip(self, name: str) -> str | None:
        failed = [earlier for earlier, answer in self.answers.items() if answer.ok is False]
        causes = [cause for cause in ("finite", "repeat", *_IMPLIED_BY.get(name, ())) if cause in failed]
        return f"{causes[0]} fails, which implies this" if causes else None

    def _answer(self, name: str, ask: Callable[[], Behaviour]) -> Behaviour:
        """The answer, or that the code raised an exception, which none of the passes before did."""
        try:
            return ask()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as fault:
            text = " ".join(str(fault).split())[:200]
            said = text if isinstance(fault, MhaError) else f"{type(fault).__name__}: {text}"
            self.raised.add(name)
            return self.unasked(name, f"the code raised {said}")

    def unasked(self, name: str, reason: str, **fields: Any) -> Behaviour:
        """A behaviour that was not asked, for a reason."""
        return Behaviour(name=name, ok=None, reason=f"not asked: {reason}", tolerance=self.tolerance, **fields)

    def noted(self, name: str, reason: str, largest: float | None = None) -> Behaviour:
        """A behaviour that was tried and is no matter of right and wrong."""
        tried = Tried(self.length, 1)
        return Behaviour(name=name, ok=None, reason=reason, largest=largest, tolerance=self.tolerance, tried=tried)

    def compare(
        self,
        name: str,
        pairs: Sequence[Pair],
        agrees: str,
        differs: str,
        *,
        cut: int | None = None,
        decides: bool = True,
    ) -> Behaviour:
        """The verdict on outputs that must agree; where they differ, a finding with the first place, or only a note."""
        aparts = [self.apart(pair) for pair in pairs]
        largest = max(apart.max().item() for apart in aparts)
        if largest <= self.tolerance:
            if largest > 0 and self.tolerance > max(_COARSE, 2 * self.least):
                reason = f"rounding alone changes outputs by {self.tolerance:.2g}: a fault could not be told apart"
                return Behaviour(name=name, ok=None, reason=reason, largest=largest, tolerance=self.tolerance)
            tried = Tried(self.length, len(pairs))
            return Behaviour(name=name, ok=True, reason=agrees, largest=largest, tolerance=self.tolerance, tried=tried)
        if not decides:
            return self.noted(name, differs, finite(largest))
        place = next(i for i, apart in enumerate(aparts) if not apart.max() <= self.tolerance)
        return self._failed(name, pairs[place], differs, largest, cut)

    def _failed(self, name: str, pair: Pair, message: str, largest: float, cut: int | None) -> Behaviour:
        """The failed behaviour, and its finding: with the first position, and the first part whose outputs differ while its
        inputs agree."""
        position = int((~(self.apart(pair) <= self.tolerance)).nonzero()[0])
        part, attention = self._first_parts(pair) if self.of.module is not None else (None, None)
        module = None if part is None or self.of.module is None else self.of.module.get_submodule(part)
        label = None if module is None else f"{part or 'the model'} ({type(module).__name__})"
        file, line = _source_of(module)
        where = "" if label is None else f", first in {label}"
        sizes = f"by {largest:.2g} of an output's size, where rounding explains {self.tolerance:.2g}"
        after = f"; everything from position {cut} on was changed" if name == "causality" else ""
        self.findings.append(
            Finding(
                code=CODES[name],
                message=message + where,
                evidence=f"the output at position {position} differs {sizes}{after}",
                fix="",
                effect=EFFECTS[name],
                file=file,
                line=line,
            )
        )
        at = Place(cut=cut, position=position, module=label, attention=attention)
        tried = Tried(self.length, 1)
        return Behaviour(
            name=name, ok=False, reason=message, largest=finite(largest), at=at, tolerance=self.tolerance, tried=tried
        )

    def _first_parts(self, pair: Pair) -> tuple[str | None, str | None]:
        """The first part, in the order in which parts end, whose outputs differ while its inputs agree, and the first attention
        whose outputs differ."""
        part = attention = None
        ours, theirs = pair.ours.parts(pair.rows[0]), pair.theirs.parts(pair.rows[1])
        for (name, call), (given, output) in ours.items():
            others = theirs.get((name, call))
            if others is None or not _differ(output, others[1], pair.end):
                continue
            if part is None and not _differ(given, others[0], pair.end):
                part = name
            if (
                attention is None
                and self.of.module is not None
                and is_attention(name, self.of.module.get_submodule(name))
            ):
                attention = name
        return part, attention

    # ------------------------------------------------------------------------------------------------------- behaviours

    def finite(self) -> Behaviour:
        """Whether outputs are finite: of the texts, of large vectors, and of a text whose tokens are all masked."""
        bad = sum(int((~row.isfinite()).sum()) for alone in self.alone for row in alone.outputs)
        if bad:
            message = f"{bad} numbers in the outputs are NaN or infinite"
            return self._failed("finite", Pair(self.alone[0], self.alone[0]), message, float("nan"), None)
        notes = []
        if not self.of.n_ids:
            large = self.passing(self.text._replace(tokens=self.text.tokens * _LARGE))
            notes += (
                [] if bool(large.outputs[0].isfinite().all()) else [f"inputs × {_LARGE:g} give NaN or infinite numbers"]
            )
        for mask in list(self.of.masks)[:1]:
            x, real = self.of.padded([self.text.tokens, self.text.tokens[:0]], "right")
            with seeded(self.seed, x.device):
                _, out = self.of.call(x, real=real, mask=mask)
            is_nan = out is not None and not bool(out.isfinite().all())
            notes += ["a text whose tokens are all masked gives NaN"] if is_nan else []
        if notes:
            return self.noted("finite", "; ".join(notes))
        return self.compare("finite", [Pair(self.alone[0], self.alone[0])], "all outputs are finite", "")

    def repeat(self) -> Behaviour:
        """Whether two passes over one text agree, in evaluation mode and with other random numbers."""
        again = [Pair(self.passing(self.text, seed=self.seed + 1), self.alone[0])]
        return self.compare(
            "repeat", again, "two passes over one text agree", "two passes over one text differ in evaluation mode"
        )

    @cached_property
    def cuts(self) -> list[int]:
        """The positions from which a text is changed."""
        return sorted({cut for cut in (*CUTS, self.length - 1) if 0 < cut < self.length})

    @property
    def _middle(self) -> int:
        """The cut nearest to the middle."""
        return min(self.cuts, key=lambda cut: abs(cut - self.length // 2))

    def causality(self) -> Behaviour:
        """Whether outputs before a cut stay when everything after it changes."""
        if self.claim.is_causal is False:
            self.sees_both_ways = True
            return self.unasked("causality", self.claim.why_not)
        if not self.cuts:
            return self.unasked("causality", "needs a text of two tokens or more")
        pairs: list[Pair] = []
        moves, reached = False, dict[int, float]()
        for cut in self.cuts:
            after = [Pair(self.passing(self.changed(cut, self.length, cut)), self.alone[0])]
            for seed in range(_SHAKES) if cut == self._middle else ():
                alike = self.changed(cut, self.length, seed + 1, alike=True)
                after.append(Pair(self.passing(alike), self.alone[0]))
            aparts = torch.stack([self.apart(pair) for pair in after])
            moves = moves or bool(aparts[:, cut].max() > self.tolerance)
            reached[cut] = (aparts[:, :cut].amax(dim=0) > 0).double().mean().item()
            pairs += [pair._replace(end=cut) for pair in after]
        if not moves:
            return self.unasked("causality", "the output does not depend on it")
        leaks = [pair for pair in pairs if self.apart(pair).max() > self.tolerance]
        if leaks and self.claim.is_causal is None:
            seen, is_meant = self._both_ways(reached)
            self.sees_both_ways = seen is not None and is_meant
            whether = "" if is_meant else ", and nothing says whether it may: state --causal or --no-causal"
            if seen is not None:
                return self.unasked("causality", f"{seen}{whether}")
        agrees, differs = "no output depends on a later token", "an output depends on later tokens"
        if leaks:
            return self.compare("causality", leaks, agrees, differs, cut=leaks[0].end)
        return self._in_training() or self.compare("causality", pairs, agrees, differs)

    def _both_ways(self, reached: Mapping[int, float]) -> tuple[str | None, bool]:
        """How tokens see later ones, by the part of the outputs before each cut that what is after it reaches, however little,
        and whether that is surely meant. None if it is a leak: later tokens reach some positions or distances and not others, as
        in nothing that is meant to see both ways."""
        width = self.alone[0].outputs[0].shape[-1]
        is_meant = not (self.of.n_ids and width == self.of.n_ids)  # a language model may see them by mistake
        if min(reached.values()) >= _ALL:
            return "every output depends on later tokens", is_meant
        within = [cut for cut, part in reached.items() if part >= _ALL]
        if within and not any(part for cut, part in reached.items() if cut > within[-1]):
            return f"the first tokens, at least {within[-1]}, see each other, and later ones what is before them", True
        before = self.apart(Pair(self.passing(self.changed(0, self._middle, 1)), self.alone[0]))[self._middle :]
        onwards = (before > 0).double().mean().item()
        if onwards < _ALL and reached[self._middle] >= onwards / 2:
            return "outputs depend on later tokens as far as on earlier ones", is_meant
        if all(self._is_reached(int(part * self.length)) for part in (0.37, 0.63)):
            return "outputs depend on some later tokens", False
        return None, False

    def _is_reached(self, cut: int) -> bool:
        """Whether one of several changes after a cut reaches each output before it, where attention is so sharp that one alone
        reaches few."""
        changes = [self.changed(cut, self.length, _DRAWS + seed) for seed in range(_DRAWS)]
        aparts = [self.apart(Pair(self.passing(changed), self.alone[0], end=cut)) for changed in changes]
        return (torch.stack(aparts).amax(dim=0) > 0).double().mean().item() >= _ALL

    def _in_training(self) -> Behaviour | None:
        """The failure of causality in training mode, where dropout is on; None where there is none."""
        parts = () if self.of.module is None else tuple(self.of.module.modules())
        names = ("p", "dropout", "dropout_p", "attn_dropout", "p_dropout", "dropout_rate")
        rates = [value for part in parts for name in names if isinstance(value := getattr(part, name, None), float)]
        if not any(0 < rate < 1 for rate in rates):
            return None
        cut = self._middle
        changed = self.passing(self.changed(cut, self.length, cut), training=True)
        pair = Pair(changed, self._trained, end=cut)
        failed = self.compare("causality", [pair], "", "in training mode an output depends on later tokens", cut=cut)
        return failed if failed.ok is False else None

    def prefix(self) -> Behaviour:
        """Whether a shorter text gives the start of a longer one's outputs."""
        if not self._is_causal:
            return self.unasked("prefix", "only where no output depends on a later token")
        lengths = sorted({max(1, self.length // 3), self.length - 1})
        pairs = [Pair(self.passing(self.text.first(length)), self.alone[0]) for length in lengths]
        agrees, differs = "a shorter text gives the start of a longer one's", "a shorter text gives other outputs"
        for length, pair in zip(lengths, pairs, strict=True):
            if self.apart(pair).max() > self.tolerance:
                differs = f"the first {length} tokens alone give other outputs than in a text of {self.length}"
                return self.compare("prefix", [pair], agrees, differs, cut=length)
        return self.compare("prefix", pairs, agrees, differs)

    @property
    def _is_causal(self) -> bool:
        causality = self.answers.get("causality")
        return causality is not None and causality.ok is True

    def batch(self) -> Behaviour:
        """Whether a text gives the same outputs alone and among others of its length."""
        other = self.text._replace(tokens=self.of.draw(self.seed + 1, self.length).tokens)
        pairs = [Pair(self.passing(other, self.text), self.alone[0], (1, 0))]
        differs = "the outputs of a text depend on the other texts in its batch"
        return self.compare("batch", pairs, "a text alone gives the same as in a batch", differs)

    def padding(self, side: PaddingSide) -> Behaviour:
        """Whether texts padded on a side give the same outputs as each alone, with a mask in which True means what hides most."""
        name, lengths = f"{side}-padding", [len(text.tokens) for text in self.texts]
        if not self.of.masks:
            return self.unasked(name, "it takes no mask of padding by a known name")
        if side == "left" and self.of.has_source:
            return self.unasked(name, "an encoder-decoder model, whose texts are padded on the right")
        if min(lengths) == max(lengths):
            return self.unasked(name, "needs texts of different lengths")
        tried, raised = [], ""
        for mask in self.of.masks:
            padded = self.passing(*self.texts, mask=mask, side=side)
            alone = self._masked.setdefault(mask, [self.passing(text, mask=mask) for text in self.texts])
            pairs = [Pair(padded, of_text, (row, 0)) for row, of_text in enumerate(alone)]
            try:
                tried.append((max(self.apart(pair).max().item() for pair in pairs), mask, pairs))
            except Exception as fault:  # a mask of another form
                raised = f"{mask.partition(',')[0]} raises {type(fault).__name__}"
            if tried and tried[-1][0] <= self.tolerance:
                break
        if not tried:
            return self.unasked(name, raised)
        _, mask, pairs = min(tried, key=lambda of_mask: of_mask[0])
        subject = f"with up to {max(lengths) - min(lengths)} padding tokens on the {side}, a text gives"
        knows_start = side == "right" or (self.of.positions is not None if self.pads_left is None else self.pads_left)
        by = "" if knows_start else ", as where positions count from the first token of a batch"
        agrees, differs = f"{subject} the same outputs as alone ({mask})", f"{subject} other outputs than alone{by}"
        return self.compare(name, pairs, agrees, differs, decides=knows_start and self.of.hides_padding)

    def cache(self) -> Behaviour:
        """Whether tokens that are read behind a cache, one by one and together, give the outputs of one call."""
        if self.of.cache is None and self.of.offset is None:
            return self.unasked("cache", "it takes no cache by a known name")
        if not self._is_causal:
            return self.unasked("cache", "only where no output depends on a later token")
        n_steps = min(_STEPS, self.length - 1)
        n, chunk = self.length - n_steps, _CHUNK if n_steps > 2 * _CHUNK else 1
        cuts = (*range(n, self.length - chunk + 1),)

        def run(**_: Any) -> list[Tensor]:
            with torch.no_grad(), seeded(self.seed, self.text.tokens.device):
                parts = self.of.steps(self.text, cuts)
            return [] if parts is None else [torch.cat(parts)]

        self.n_passes += len(cuts) + 1
        steps = Pass(run)
        if not steps.outputs:
            return self.unasked("cache", "the call returns no cache")
        agrees = f"{n} tokens, then {n_steps} behind a cache, give the same as one call"
        differs = "tokens that are read behind a cache give other outputs than in one call"
        return self.compare("cache", [Pair(steps, self.alone[0])], agrees, differs, cut=n)

    def in_16_bits(self) -> Behaviour:
        """How far bfloat16 moves outputs of a model in float32."""
        if self.dtype != "float32":
            return self.unasked("dtype", f"it computes in {self.dtype}")
        cast = self.passing(self.text, within=partial(torch.autocast, self.text.tokens.device.type, torch.bfloat16))
        moved = self.apart(Pair(cast, self.alone[0])).max().item()
        return self.noted(
            "dtype", f"under autocast to bfloat16 outputs change by up to {moved:.2g} of their size", finite(moved)
        )

    def training(self) -> Behaviour:
        """Whether training mode changes outputs, without or with random numbers."""
        again = self.passing(self.text, training=True, seed=self.seed + 1)
        if self.apart(Pair(again, self._trained)).max() > self.tolerance:
            return self.noted("training", "outputs are random in training mode, and not in evaluation")
        moved = self.apart(Pair(again, self.alone[0])).max().item()
        same = "training and evaluation give the same outputs"
        text = same if moved <= self.tolerance else "training mode gives other outputs, which are not random"
        return self.noted("training", text, finite(moved))


def _differ(ours: Tensor | None, theirs: Tensor | None, end: int | None) -> bool:
    """Whether two tensors differ, up to `end` or as long as both are, by more than rounding inside a model explains."""
    if ours is None or theirs is None or ours.shape[1:] != theirs.shape[1:]:
        return False
    n = min(len(ours), len(theirs), end or len(ours))
    usual = theirs[:n].double().square().mean().sqrt().clamp(min=1e-30)
    eps = max(torch.finfo(theirs.dtype).eps, torch.finfo(torch.float32).eps)
    return not bool((ours[:n].double() - theirs[:n].double()).abs().max() / usual <= _LOOSER * eps)


def _source_of(part: nn.Module | None) -> tuple[str | None, int | None]:
    """The file and line of a part's `forward`."""
    if part is None:
        return None, None
    try:
        return inspect.getsourcefile(type(part)), inspect.getsourcelines(type(part).forward)[1]
    except (OSError, TypeError):
        return None, None


CODES = {
    "finite": "outputs-not-finite",
    "repeat": "not-repeatable",
    "causality": "sees-the-future",
    "prefix": "prefix-differs",
    "batch": "batch-leak",
    "left-padding": "padding-leak",
    "right-padding": "padding-leak",
    "cache": "cache-differs",
    "eager": "implementations-differ",
    "row-sums": "row-sums-not-one",
    "bos": "beginning-doubled",
}
EFFECTS = {
    "finite": "whatever reads these numbers is NaN or infinite as well",
    "repeat": "no result of this model can be repeated, so nothing can be compared",
    "causality": "the model sees the tokens that it should predict: its loss is too low, and what it generates does not match it",
    "prefix": "text that is generated token by token differs from what the model computes for the whole text",
    "batch": "the answer to a text depends on what else is in its batch",
    "left-padding": "a prompt gets another answer in a padded batch than alone",
    "right-padding": "the answer to a text depends on how long the others in its batch are",
    "cache": "text that is generated token by token differs from what the model computes for the whole text",
    "eager": "the same weights give other numbers with another attn_implementation: one of the two is wrong",
    "row-sums": "the outputs are scaled by the sum of the attention weights",
    "bos": "a second token at the beginning, which the model never saw in training, changes every output",
}


def asker_of(sequences: Sequences, claim: Claim, seed: int, stage: Stage) -> Asker:
    """The behaviours of a callable with random texts."""
    texts = [sequences.draw(seed, sequences.length), sequences.draw(seed + 1, max(1, sequences.length // 2))]
    return Asker(sequences, texts, claim, seed, stage)
