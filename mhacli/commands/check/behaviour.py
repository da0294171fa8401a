"""What a callable does with texts, whatever is inside it: whether an output depends on later
tokens, on the length, on other texts, on padding or on a cache.

Each behaviour is a function of passes, of what is known of the model, and of earlier answers, which
returns what it observed. `BehaviourTester` asks them in turn, and makes the findings.
"""

import inspect
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.attention.stages import Inputs
from mhacli.models.layer_names import config_of, is_attention
from mhacli.usercode.build import WithoutDropout, is_of_torch
from mhacli.usercode.door import NO_ANSWER, UserRaised, ours
from mhacli.usercode.faults import SourceLine, source_line
from mhacli.usercode.graph import user_lines
from mhacli.usercode.limits import OutOfTime
from mhacli.usercode.roles import signature
from mhacli.usercode.target import source_file
from mhacli.usercode.text_model import PartCalls

from . import padding
from .memory import memory
from .observed import Answers, Intent, Observed, Test, compared, not_tried, reason_of, seen
from .packing import packing
from .passes import (
    PassDifference,
    Passes,
    PassOutput,
    difference_of,
    is_family,
    relative_distance,
)
from .result import (
    CODES,
    IMPLIED,
    AttentionInside,
    Behaviour,
    Compared,
    Finding,
    Place,
    Tried,
    finding_of,
    words_of_code,
)
from .sees import Seeing

_DRAWS = 8
"""Other texts that are drawn where attention is so sharp that one reaches few outputs."""
_ALL = 0.9
"""The share of all outputs that counts as all: where attention is sharp, some change by less than
their rounding."""
_STEPS = 16
"""Tokens that are read behind a cache."""
_CHUNK = 4
"""The last of them, which are read together."""
_LARGE = 1e3
"""Vectors times this are large, and their outputs should still be finite."""
NARROW = ("float16", "bfloat16")
"""The dtypes in which rounding hides faults."""

_IMPLIED_BY = {
    "left-padding": ("causality", "batch", "right-padding"),
    "right-padding": ("causality", "batch"),
    "padding-content": ("causality", "batch", "right-padding", "left-padding"),
    "memory": ("batch",),
    "causality": ("sees",),
    "prefix": ("causality",),
    "cache": ("causality", "prefix"),
    "packing": ("batch",),
    "row-sums": ("eager",),
}
"""The failures, besides those of `finite` and `repeat`, that imply that of a behaviour."""


# ---------------------------------------------------------------------------------- what is claimed


_CLAIMS: Mapping[str, bool | None] = {
    "Prefix": None,
    r"(Non|Not|Un|Anti)_?([cC]ausal|[aA]utoregressive)|Acausal": False,
    r"MaskedLM|Bidirectional|(?<![lL]i)Bi(?![a-z])": False,  # not ALiBi
    r"CausalLM|LMHeadModel|(?<![a-z])Causal|Autoregressive": True,
    "Encoder": False,
    "Decoder": True,
    "Bert|BERT|Electra": False,
    "GPT|Llama": True,
}
"""What words in the name of a class claim: whether a token sees only earlier ones. The first that
is found counts: what is said of the model, then its role, then the family that it is named after.
"""
_CAUSAL_HEAD = re.compile(r"(ForCausalLM|[a-z0-9]LMHeadModel|DoubleHeadsModel)$")


def is_claimed_causal(module: Any) -> bool | None:
    """Whether a token is claimed to see only earlier ones: by a model or its config, or by the name
    of its class or of the nearest class that it is made from. None if nothing says it.
    """
    config: Any = getattr(module, "config", None)
    text = config if config_of(module) is None else config.get_text_config(decoder=True)
    forward: Any = getattr(module, "forward", None)
    taken = signature(forward).parameters
    # where each call says whether it decodes, the config does not
    is_decoder = getattr(config, "is_decoder", False) is True and "is_decoder" not in taken
    has_decoder = "decoder_input_ids" in taken
    if is_decoder or (has_decoder and getattr(config, "is_encoder_decoder", False)):
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
    claims = (claim for name in names for word, claim in _CLAIMS.items() if re.search(word, name))
    return next(claims, None)


# ---------------------------------------------------------------------------------- the questions


@dataclass
class BehaviourTester:
    """Asks for the behaviours of a model in turn, and keeps what was observed, and the findings for
    what failed. `more` are further tests by the name of their behaviour, `inside` the attentions
    that were `compared`. `omitted` are the behaviours that were not tried because time was `over`.
    """

    passes: Passes
    intent: Intent
    more: Mapping[str, Test] = field(default_factory=dict)
    results: dict[str, Behaviour] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    cautions: dict[str, str] = field(default_factory=dict)
    is_bidirectional: bool = False
    inside: tuple[AttentionInside, ...] = ()
    compared: Compared | None = None
    seeing: Seeing | None = None
    omitted: list[str] = field(default_factory=list)
    over: OutOfTime | None = None

    def __post_init__(self) -> None:
        """Measures rounding, after what a model remembers, which is none."""
        self.test(("finite", "repeat"))
        with suppress(OutOfTime):  # then nothing more is compared
            self.passes.measure_rounding()

    def test(self, names: Sequence[str] = tuple(CODES)) -> None:
        """Tests the named behaviours that have no result yet: an earlier failure may imply one, or
        the code may raise an exception.
        """
        tests = {**TESTS, **self.more}
        # the failure of one of the first two implies that of others
        for name in ("finite", "repeat", *CODES):
            if name in tests and name in names and name not in self.results:
                self._keep(name, self._observed(name, tests[name]))

    def _observed(self, name: str, test: Test) -> Observed:
        """What a test observes, or why it could not."""
        causes = ("finite", "repeat", *_IMPLIED_BY.get(name, ()))
        failed = {other for other, answer in self.results.items() if answer.ok is False}
        cause = next((each for each in causes if each in failed), None)
        if cause is not None:
            return not_tried(self.passes, f"{cause} {IMPLIED}")
        try:
            return test(self.passes, self.intent, self.results)
        except OutOfTime as over:
            return not_tried(self.passes, str(over), over=over)
        except NO_ANSWER as failure:
            is_raised = isinstance(failure, UserRaised)  # and the code raised nothing before
            caution = f"test {name} in a script of your own" if is_raised else ""
            return not_tried(self.passes, reason_of(failure), caution=caution)

    def _keep(self, name: str, observed: Observed) -> None:
        """Keeps what was observed, with a finding if it failed."""
        behaviour = observed.named(name)
        if observed.seeing is not None:
            self.seeing = observed.seeing
            self.findings += observed.seeing.findings
        elif behaviour.ok is False:
            behaviour, finding = located(self.passes, behaviour, observed)
            self.findings.append(finding)
        self.results[name] = behaviour
        self.is_bidirectional = self.is_bidirectional or observed.is_bidirectional
        self.inside = observed.inside or self.inside
        if observed.over is not None:
            self.over = observed.over
            self.omitted.append(name)
        if observed.caution:
            self.cautions[name] = observed.caution

    @property
    def behaviours(self) -> tuple[Behaviour, ...]:
        """The results in the order in which they are shown."""
        return tuple(self.results[name] for name in CODES if name in self.results)

    @property
    def holds(self) -> bool:
        """Whether the behaviours that decide were tried, and all hold."""
        decide = ["repeat", "batch"]
        if not self.is_bidirectional:
            decide.append("causality")
        if self.intent.packed:
            decide.append("packing")
        if "sees" in self.results:  # it is stated
            decide.append("sees")
        fails = any(answer.ok is False for answer in self.results.values())
        return not fails and all(self.results[name].ok for name in decide)


# ------------------------------------------------------------------------- the place of a failure


def located(passes: Passes, behaviour: Behaviour, observed: Observed) -> tuple[Behaviour, Finding]:
    """A behaviour that fails and its finding: where passes differ with the first position, and with
    the first part whose outputs differ while its inputs agree.
    """
    if not observed.differences:
        return behaviour, _finding_of_numbers(behaviour, observed)
    differences = observed.differences
    at = behaviour.at or Place()
    positions = (differences[0].by_token > passes.tolerance).nonzero().flatten().tolist()
    at = replace(at, position=positions[0] if positions else None)
    evidence = _words_of_difference(passes, behaviour.name, at, differences[0])
    part, attention = _first_parts(passes, differences[0])
    if part == "" and behaviour.name == "causality":  # maybe patches hold more tokens
        later = passes.changed(passes.middle, passes.length, 1)
        differences = (passes.difference(later).first(passes.middle),)
        part, attention = _first_parts(passes, differences[0])
    label = None
    line = SourceLine()
    message = behaviour.reason
    fix = ""
    module = passes.module
    if module is not None:
        label, line = _described(passes, module, part)
    if module is not None and label is not None:
        message = f"{message}, first in {label}"
        if lacks_batch_first(module.get_submodule(part or "")):
            fix = "build it with batch_first=True, without which it reads [length, batch, width]"
    parts = _all_parts(passes, differences)
    code = CODES[behaviour.name]
    finding = finding_of(code, evidence, line, message=message, fix=fix, parts=parts)
    return replace(behaviour, at=replace(at, module=label, attention=attention)), finding


def _finding_of_numbers(behaviour: Behaviour, observed: Observed) -> Finding:
    """The finding for a behaviour that fails by its numbers alone."""
    code = CODES[behaviour.name]
    evidence = observed.evidence
    if not evidence:
        largest = behaviour.largest
        found = "numbers that are not finite" if largest is None else f"{largest:g}"
        evidence = f"{found} in a check where at most {behaviour.tolerance:g} is right"
    advice = words_of_code(code).advice
    return finding_of(code, evidence, message=behaviour.reason, fix=advice)


def _words_of_difference(passes: Passes, name: str, at: Place, difference: PassDifference) -> str:
    """Where the outputs of passes differ, by how much, and how far ahead they look."""
    befores = {
        "causality": f"with other tokens from position {at.cut} on, ",
        "packing": f"in the document that starts at position {at.cut}, ",
    }
    where = "for the whole text" if at.position is None else f"at position {at.position}"
    size = f"{difference.largest:.2g} × the usual size of an output"
    words = f"{befores.get(name, '')}the output {where} differs by {size}"
    words += f" (rounding: {passes.tolerance:.2g})"
    if at.ahead is not None:
        farthest = "the end" if at.ahead == passes.length - 1 else f"{at.ahead} ahead"
        words += f"; outputs depend on tokens up to {farthest}"
    return words


def _described(
    passes: Passes, module: nn.Module, part: str | None
) -> tuple[str | None, SourceLine]:
    """A part of a module in words, None without one, and the line of `forward` of its class, or
    where it is torch's, the line that calls it in the first class around it that is not.
    """
    around = [part.rsplit(".", n)[0] for n in range(part.count(".") + 1)] if part else []
    parts = [module.get_submodule(name) for name in (*around, "")]
    cls = next((type(each) for each in parts if not is_of_torch(each)), type(parts[0]))
    label = None if part is None else f"{part or 'the model'} ({type(parts[0]).__name__})"
    lines = list[SourceLine]()
    file = source_file(cls)

    @ours()
    def note(*_: object) -> None:
        lines.extend(line for line, _ in user_lines(file)[:1])

    if is_of_torch(parts[0]):
        with parts[0].register_forward_pre_hook(note):
            passes.run_pass(passes.text)
    with suppress(OSError, TypeError):  # its source cannot be read
        lines.append(SourceLine(source_file(cls.forward), inspect.getsourcelines(cls.forward)[1]))
        if lacks_batch_first(parts[0]):
            source, first = inspect.getsourcelines(cls)
            made = re.compile(rf"\b{str(part).rpartition('.')[2]} *=[^=]")
            numbers = [n for n, text in enumerate(source, first) if made.search(text)]
            lines[:0] = [source_line(file or "", n) for n in numbers]
    return label, next((line for line in lines if line.line is not None), SourceLine())


def lacks_batch_first(module: nn.Module) -> bool:
    """Whether it is a layer of torch that reads `[length, batch, width]`."""
    return is_of_torch(module) and getattr(module, "batch_first", True) is False


def _all_parts(passes: Passes, differences: Sequence[PassDifference]) -> tuple[str, ...]:
    """Each part whose outputs differ while its inputs agree, also where those before it give what
    they give in the other pass. The last one is "", the whole model, where others may be left.
    """
    found = list[str]()
    other_pass = lru_cache(operator.call)
    with suppress(OutOfTime, *NO_ANSWER):
        for difference in differences:
            theirs = other_pass(difference.parts[1])
            while (part := _first_parts(passes, difference, theirs, found)[0]) is not None:
                if part in found:  # what it gives cannot be changed
                    return (*found, "")
                found.append(part)
        return tuple(found) or ("",)
    return (*found, "")


def _first_parts(
    passes: Passes,
    difference: PassDifference,
    theirs: PartCalls | None = None,
    pinned: Collection[str] = (),
) -> tuple[str | None, str | None]:
    """The first part, in the order in which parts end, whose outputs differ while its inputs agree,
    and the first attention whose outputs differ. `theirs` is what parts compute in the other pass,
    if that is known; `pinned` ones give the same here.
    """
    n = len(difference.by_token)
    module = passes.module
    run_ours, run_theirs = difference.parts
    theirs = run_theirs() if theirs is None else theirs
    ours = run_ours(
        {
            call: output[: n * len(output) // passes.length]
            for call, (_, output) in theirs.items()
            if call[0] in pinned and output is not None
        }
    )

    def differ(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None or one.shape[1:] != other.shape[1:]:
            return False
        n_rows = n * max(len(one), len(other)) // passes.length  # of patches fewer than tokens
        if n_rows == 0:
            return False
        a, b = (each[:n_rows].double() for each in (one, other))
        a, b = (each.reshape(len(each), -1) for each in (a, b))
        return bool((relative_distance(a, b) > passes.tolerance).any())

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


# --------------------------------------------------------------------------------- the behaviours


def finite_outputs(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether outputs are finite, with the weights of a model of transformers, and in 16 bits also
    where texts are padded; for large vectors, and texts whose tokens are all masked, it is noted.
    """
    module = passes.module if is_family(passes.model) else None
    weights = {} if module is None else dict(module.named_parameters())
    bad = {name: n for name, weight in weights.items() if (n := int((~weight.isfinite()).sum()))}
    infinite = [each for each in _passes_to_be_finite(passes) if not each.output.isfinite().all()]
    problems = list[str]()
    if bad:
        problems.append(
            f"{sum(bad.values())} NaN or Inf in weights, the first in {next(iter(bad))}"
        )
    if infinite:
        n_bad = sum(int((~each.output.isfinite()).sum()) for each in infinite)
        problems.append(f"{n_bad} numbers in the outputs are NaN or infinite")
    if problems:
        n_weights = float(sum(bad.values())) if bad else None
        # a number that is not finite differs from itself, which shows the first part that has one
        differences = tuple(difference_of(each, each) for each in infinite[:1])
        reason = "; ".join(problems)
        return seen(passes, False, reason, n_weights, tolerance=0.0, differences=differences)
    if notes := _notes_on_large_and_masked(passes):
        return seen(passes, None, "; ".join(notes))
    finite_ones = f"{len(weights)} weights and all outputs" if weights else "all outputs"
    return seen(passes, True, f"{finite_ones} are finite", 0.0, tolerance=0.0)


def _passes_to_be_finite(passes: Passes) -> list[PassOutput]:
    """The first pass; of a model with a mask of padding one over each text, and in 16 bits over all
    of them padded.
    """
    mask = passes.model.mask
    if mask is None:
        return [passes.first_pass]
    every = [*passes.single_passes]
    if passes.precision in NARROW:
        for side in passes.model.sides:
            every += passes.run_pass(*passes.texts, mask=mask, side=side)
    return every


def _notes_on_large_and_masked(passes: Passes) -> list[str]:
    """What gives numbers that are not finite: large vectors, and masks that hide everything."""
    model = passes.model
    notes = list[str]()
    if not model.n_ids:
        large = passes.run_pass(passes.text * _LARGE)[0].output
        if not large.isfinite().all():
            notes.append(f"inputs × {_LARGE:g} give NaN or infinite numbers")
    rows, real = model.padded([passes.text, passes.text[:0]], "right")
    hides_all = torch.ones(1, 1, passes.length, passes.length, dtype=torch.bool).tril(-1)
    masked = [("a text whose tokens", Inputs(rows, real=real), form) for form in model.masks[:1]]
    forms = model.attention.mask_forms[:1]
    masked += [("a query whose keys", Inputs(rows, allowed=hides_all), form) for form in forms]
    for what, inputs, form in masked:
        with suppress(*NO_ANSWER):  # a mask of another form
            out = model.attention(inputs, mask=form, seed=passes.seed)
            if not out.isfinite().all():
                notes.append(f"{what} are all masked gives NaN")
    return notes


def repeat(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether two passes over one text agree, in evaluation mode and with other random numbers."""
    differs = "two passes over one text differ in evaluation mode"
    differences = [passes.difference(seed=1)]
    return compared(passes, differences, "two passes over one text agree", differs)


_LEAK = "an output depends on later tokens"


def causality(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether outputs before a cut stay when everything after it changes."""
    omitted = partial(not_tried, passes)
    attention = passes.attention
    if attention.is_pooled:
        reason = "its output is of a whole text, not of each token"
        return omitted(reason, is_bidirectional=True)
    if intent.is_causal is False and not intent.hides_later:
        return omitted("tokens may see later ones", is_bidirectional=True)
    if not passes.cuts:
        return omitted("needs a text of two tokens or more")
    differences = list[PassDifference]()
    reached = dict[int, float]()
    moves = False
    for number, cut in enumerate(passes.cuts):
        moved = passes.difference(passes.changed(cut, passes.length, cut, alike=number % 2 == 0))
        moves = moves or bool((moved.by_token[cut:] > passes.tolerance).any())
        reached[cut] = (moved.by_token[:cut] > 0).double().mean().item()
        differences.append(moved.first(cut))
    if not moves:
        return omitted(passes.too_coarse or "the output does not depend on it")
    leaks = [difference for difference in differences if difference.largest > passes.tolerance]
    if not leaks:
        if attention.is_inside and not _reach_onwards(passes):
            return omitted("what was read depends on no other token, as behind an embedding alone")
        agrees = "no output depends on a later token"
        in_training = _leak_in_training(passes)
        return in_training or compared(passes, differences, agrees, _LEAK)
    if intent.is_causal is not True:
        backwards = _backwards(passes, intent, reached)
        if backwards.reason is not None and backwards.is_meant:
            return omitted(backwards.reason, is_bidirectional=True)
        if backwards.reason is not None:
            unknown = ", and nothing says whether it may: state --causal or --no-causal"
            return omitted(backwards.reason + unknown)
    return _leak(passes, leaks, _LEAK)


def _leak(passes: Passes, leaks: Sequence[PassDifference], reason: str) -> Observed:
    """The failure of outputs that depend on later tokens, with how far ahead they do: each of the
    `leaks` is that of the outputs before a cut.
    """
    first = [int((each.by_token > passes.tolerance).nonzero()[0]) for each in leaks]
    ahead = max(len(each.by_token) - at for each, at in zip(leaks, first, strict=True))
    cut = len(leaks[0].by_token)
    return replace(compared(passes, leaks, "", reason), at=Place(cut, ahead=ahead))


def _leak_in_training(passes: Passes) -> Observed | None:
    """The leak of a model that gives other outputs in training mode; None without one."""
    if difference_of(passes.training_pass, passes.first_pass).largest <= passes.tolerance:
        return None
    # no usual chunk ends there, and the rest moves a selection
    cut = max(1, passes.length * 3 // 4 - 1)
    changed = passes.changed(cut, passes.length, cut, alike=True)
    trained = passes.run_pass(changed, training=True)[0]
    difference = difference_of(trained, passes.training_pass).first(cut)
    if difference.largest > passes.tolerance:  # maybe other tokens alone are dropped, as in experts
        ours, theirs = (
            passes.run_pass(text, training=True, within=WithoutDropout)[0]
            for text in (changed, passes.text)
        )
        difference = difference_of(ours, theirs).first(cut)
    again = difference_of(passes.run_pass(passes.text, training=True)[0], passes.training_pass)
    # random numbers of others than torch have no seed here
    if difference.largest <= passes.tolerance or again.largest > passes.tolerance:
        return None
    return _leak(passes, [difference], f"in training mode {_LEAK}")


class Backwards(NamedTuple):
    """How tokens see later ones, None if it is a leak, and whether that is surely meant."""

    reason: str | None
    is_meant: bool = False


def _backwards(passes: Passes, intent: Intent, reached: Mapping[int, float]) -> Backwards:
    """How tokens see later ones, by the share of the outputs before each cut that what is after it
    reaches, however little. It is surely meant but where a language model may do so by mistake. It
    is a leak if later tokens reach some positions or distances and not others, as in nothing that
    is meant to be bidirectional.
    """
    is_language_model = passes.first_pass.output.shape[-1] == passes.model.n_ids
    if min(reached.values()) >= _ALL and not (is_language_model and intent.hides_later):
        # other layers may read backwards
        is_allowed = intent.is_causal is False or not intent.hides_later
        return Backwards(
            "every output depends on later tokens", not is_language_model and is_allowed
        )
    if intent.hides_later:
        return Backwards(None)
    within = [cut for cut, share in reached.items() if share >= _ALL]
    seen = [cut for cut, share in reached.items() if share]
    if within and passes.middle not in seen and seen == within == [*reached][: len(within)]:
        reason = (
            f"the first tokens, at least {within[-1]}, see each other, and later ones what is"
            " before them"
        )
        return Backwards(reason, is_meant=True)
    onwards = _reach_onwards(passes)
    if onwards < _ALL and reached[passes.middle] >= onwards / 2:
        reason = "outputs depend on later tokens as far as on earlier ones"
        return Backwards(reason, not is_language_model)
    for cut in (int(0.37 * passes.length), int(0.63 * passes.length)):
        changes = [passes.changed(cut, passes.length, _DRAWS + seed) for seed in range(_DRAWS)]
        if _reach(passes, changes, start=0, end=cut) < _ALL:
            return Backwards(None)
    return Backwards("outputs depend on some later tokens")


def _reach_onwards(passes: Passes) -> float:
    """The share of the outputs from the middle on that a change of what is before it reaches,
    however little.
    """
    changed = passes.changed(0, passes.middle, 1)
    return _reach(passes, [changed], start=passes.middle, end=passes.length)


def _reach(passes: Passes, changed: Sequence[Tensor], *, start: int, end: int) -> float:
    """The share of the outputs from `start` to `end` that one of several changes of the text
    reaches, however little: where attention is sharp, one alone reaches few.
    """
    by_token = torch.stack([passes.difference(text).by_token for text in changed])
    return (by_token.amax(dim=0)[start:end] > 0).double().mean().item()


def prefix(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether a shorter text gives the start of a longer one's outputs."""
    if answers["causality"].ok is not True:
        return not_tried(passes, "only where no output depends on a later token")
    if passes.model.has_source and passes.attention.example is not None:
        reason = "in the example the text of the encoder may change with the length"
        return not_tried(passes, reason)
    if intent.packed and passes.attention.example is not None:
        return not_tried(passes, "in the example documents may change with the length")
    n = max(1, passes.length // 3)
    agrees = "a shorter text gives the start of a longer one's"
    differs = f"the first {n} tokens alone give other outputs than in a text of {passes.length}"
    difference = passes.difference(passes.text[:n]).first(n)
    return compared(passes, [difference], agrees, differs, n)


def batch(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether two texts of one length give the same outputs alone and together."""
    # beside a text of equal tokens experts may have room for the first
    other = passes.changed(0, passes.length, 1, alike=True)
    together = passes.run_pass(other, passes.text)
    alone = (*passes.run_pass(other), passes.first_pass)
    differences = [*map(difference_of, together, alone)]
    agrees = "a text alone gives the same as in a batch"
    differs = "the outputs of a text depend on the other texts in its batch"
    return compared(passes, differences, agrees, differs)


def cache(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """Whether tokens that are read behind a cache, one by one and together, give the outputs of one
    call.
    """
    if passes.model.cached is None:
        return not_tried(passes, "it takes no cache by a known name")
    if answers["causality"].ok is not True:
        return not_tried(passes, "only where no output depends on a later token")
    length = max(1, passes.length * 7 // 8)  # a position too far must be one that the model has
    n_steps = min(_STEPS, length - 1)
    n = length - n_steps
    chunk = _CHUNK if n_steps > 2 * _CHUNK else 1
    difference = difference_of(
        passes.run_steps((*range(n, length - chunk + 1), length)), passes.first_pass
    )
    agrees = f"{n} tokens, then {n_steps} behind a cache, give the same as one call"
    differs = "tokens that are read behind a cache give other outputs than in one call"
    if chunk > 1 and not (difference.by_token[: length - chunk] > passes.tolerance).any():
        differs = (
            f"{chunk} tokens that are read together behind a cache give other outputs than in"
            " one call"
        )
    return compared(passes, [difference], agrees, differs, n)


def dtype(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """How far bfloat16 changes outputs of a model in float32."""
    if passes.precision != "float32":
        return not_tried(passes, f"it computes in {passes.precision}")
    if passes.attention.built.is_interpreted:
        return not_tried(passes, "Triton's interpreter computes wrongly in bfloat16")
    text = passes.texts[-1]
    autocast = partial(torch.autocast, text.device.type, torch.bfloat16)
    moved = difference_of(
        passes.run_pass(text, within=autocast)[0], passes.single_passes[-1]
    ).largest
    reason = f"under autocast to bfloat16 outputs change by up to {moved:.2g} of their size"
    tried = Tried(len(text), 1)
    return seen(passes, None, reason, moved, tried=tried)


def training(passes: Passes, intent: Intent, answers: Answers) -> Observed:
    """How far training mode changes outputs."""
    moved = difference_of(passes.training_pass, passes.first_pass).largest
    what = f"outputs by up to {moved:.2g} of their size" if moved else "no output"
    return seen(passes, None, f"training mode changes {what}", moved)


TESTS: Mapping[str, Test] = {
    "finite": finite_outputs,
    "repeat": repeat,
    "causality": causality,
    "prefix": prefix,
    "batch": batch,
    "right-padding": partial(padding.padding, "right"),
    "left-padding": partial(padding.padding, "left"),
    "padding-content": padding.content,
    "memory": memory,
    "cache": cache,
    "packing": packing,
    "dtype": dtype,
    "training": training,
}
"""The tests that every model gets, by the name of their behaviour."""
