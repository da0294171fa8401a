"""The result of examining user code, as plain data with schema `mha.check/1`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any, Literal

from msgspec import Struct

from mhacli.cli.console import drawn_lines
from mhacli.conditions import SEES, Condition, names_in, parse_condition
from mhacli.errors import EXIT_CHECK, EXIT_FAILED, UsageError, in_python
from mhacli.io.data import plain
from mhacli.record.glossary import Word, words_of
from mhacli.record.record import Argument
from mhacli.record.shown import Shown
from mhacli.render.base.options import Screen
from mhacli.settings import (
    MAX_SECONDS,
    MODEL,
    Config,
    ModelSettings,
    OwnCode,
    like,
    pairs,
    setting,
)
from mhacli.text.escape import visible
from mhacli.usercode.door import FailedAttempt
from mhacli.usercode.faults import SourceLine, shown_path
from mhacli.usercode.limits import DEFAULT_MAX_TIME_S
from mhacli.usercode.target import Choice, Mode, TargetRequest, named_object

Verdict = Literal["right", "consistent", "wrong", "unknown"]


_CODE, _MEANT = "Code", "Intended behaviour"
RUN = "Run"
"""The panel of the options that say how an examination runs, not what is examined."""
_ACCEPTS = "CODE[@PART]=REASON"
HELD = "accepted-but-right"
"""The code of what is accepted although the code does not have it."""
_NOWHERE = SourceLine()
CODES: Mapping[str, str] = {
    "sees": "sees-unstated",
    "causality": "sees-the-future",
    "prefix": "prefix-differs",
    "batch": "batch-leak",
    "repeat": "not-repeatable",
    "finite": "outputs-not-finite",
    "right-padding": "padding-leak",
    "left-padding": "padding-leak",
    "padding-content": "padding-leak",
    "memory": "memory-misread",
    "cache": "cache-differs",
    "packing": "documents-leak",
    "dtype": "",
    "training": "",
    "eager": "implementations-differ",
    "row-sums": "row-sums-not-one",
    "bos": "beginning-doubled",
}
"""The behaviours in the order in which they are shown, and the code of a failure, whose words stand
in record/glossary.toml; none where all is a matter of choice. The last three are asked of
checkpoints."""
NOT_TRIED = "not tried: "
"""What `reason` begins with in the document of a behaviour for which no pass was made."""
IMPLIED = "fails, which implies this"
"""What it ends with where the failure of another one implies its own, whose name is before it."""
LEAKS_AS_USUAL = "in its usual call documents see each other"
"""What it has of documents that another call isolates."""
_pairs: Any = partial(setting, metavar="NAME=VALUE", many=True)


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """The attention to check, another one to compare it with, their arguments as `NAME=VALUE`, and
    intentions that the code does not show. `time_limit_s` is per call, `max_time_s` for all that
    follows the first one. The process of the code runs in `folder`, None for the working directory,
    and imports from the folders of `import_path` before others.
    """

    target: str | None = setting(
        None,
        "",
        (
            "FILE.py:NAME or package.module:NAME: a class, a function that returns a module, or a"
            " function of q, k and v. mha imports and runs it."
        ),
        argument=True,
        metavar="FILE.py:NAME",
        default="the targets of the nearest pyproject.toml that states some",
    )
    model: str | None = setting(
        None,
        _CODE,
        MODEL,
        "--model --checkpoint",
        metavar="DIR|ID",
        common=True,
        excludes=("target", "arg", "other"),
    )
    tiny: bool = like(ModelSettings, "tiny", _CODE, needs=("model",), modes=("layer",))
    arg: tuple[str, ...] = like(OwnCode, "arg", _CODE)
    call_arg: tuple[str, ...] = like(OwnCode, "call_arg", _CODE)
    example: str | None = like(OwnCode, "example", _CODE)
    other: str | None = setting(
        None,
        _CODE,
        "Compare with this implementation instead of the reference.",
        "--against",
        metavar="TARGET",
        common=True,
    )
    other_arg: tuple[str, ...] = _pairs(
        (),
        _CODE,
        "Argument of the constructor of --against; repeatable.",
        "--against-arg",
        default="the values of --arg, under the names that it uses",
        needs=("other",),
    )
    other_call_arg: tuple[str, ...] | None = _pairs(
        None,
        _CODE,
        "Argument of every call of --against; repeatable.",
        "--against-call-arg",
        default="as --call-arg",
        needs=("other",),
    )
    causal: bool = like(
        Config,
        "causal",
        _MEANT,
        names=("--causal", "--is-causal"),
        help="State that tokens must not see later ones.",
    )
    not_causal: bool = setting(
        False,
        _MEANT,
        "Tokens may see later ones: an encoder, or a masked language model.",
        "--no-causal",
        excludes=("causal",),
    )
    sees: str | None = setting(
        None,
        _MEANT,
        "State who may see whom, in place of --causal, such as 'q >= k and q - k < 8'.",
        metavar="CONDITION",
        excludes=("causal", "not_causal", "other"),
    )
    packed: bool = setting(
        False,
        _MEANT,
        "State that rows hold several documents, which must not see each other.",
        excludes=("other",),
    )
    mask_means: Literal["keep", "hide"] | None = setting(
        None, _MEANT, "What True in a mask means.", default="either"
    )
    rope: Literal["half", "interleaved"] | None = setting(
        None,
        _MEANT,
        "Layout of rotary positions: half (GPT-NeoX) or interleaved (GPT-J).",
        default="either",
    )
    scale: float | None = like(Config, "scale", _MEANT, default="")
    n_heads: int | None = like(Config, "n_heads", _MEANT, value=None, default="from its arguments")
    backward: bool = setting(
        False,
        _MEANT,
        "Code that gives no gradients is wrong.",
        "--backward",
        excludes=("other", "model"),
    )
    no_backward: bool = setting(
        False,
        _MEANT,
        "Compare no gradients: the code is for inference alone.",
        excludes=("backward", "other", "model"),
    )
    accept: tuple[str, ...] = setting(
        (),
        _MEANT,
        (
            "Accept this mistake, in a part of the model where one is named, for a reason;"
            " repeatable. Once it is mended, the check fails."
        ),
        metavar=_ACCEPTS,
    )
    device: str = like(Config, "device", RUN, value="cpu", default="")
    seed: int = like(Config, "seed", RUN)
    length: int | None = setting(
        None,
        RUN,
        "Tokens of the longest text: of a model, or of an attention.",
        low=4,
        high=4096,
        default="256 or the model's positions, 257 of an attention",
    )
    time_limit_s: float = like(OwnCode, "time_limit", RUN, names=("--time-limit",))
    max_time_s: float = setting(
        DEFAULT_MAX_TIME_S,
        RUN,
        "Seconds for all that follows the first call. What is not tried by then is named.",
        "--max-time",
        above=0,
        high=MAX_SECONDS,
        metavar="SECONDS",
        default=f"{DEFAULT_MAX_TIME_S:g}",
        excludes=("model",),
    )
    folder: str | None = None
    import_path: tuple[str, ...] = ()

    @property
    def model_settings(self) -> ModelSettings:
        """The checkpoint to check."""
        return ModelSettings(path=self.model, device=self.device, tiny=self.tiny, seed=self.seed)

    @cached_property
    def target_request(self) -> TargetRequest:
        """The attention to check. Raises `UsageError` if there is none, and for an argument that is
        not `NAME=VALUE`.
        """
        if self.target is None:
            raise UsageError(
                "there is nothing to check",
                hint="add FILE.py:NAME, the name of code, or --model DIR",
            )
        device = "cpu" if self.device == "auto" else self.device
        arguments = pairs(self.arg, "arg")
        calls = pairs(self.call_arg, "call-arg")
        return TargetRequest(
            self.target, arguments, calls, self.causal, device, self.seed, self.example
        )

    @cached_property
    def condition(self) -> Condition | None:
        """Who may see whom, as a text states it; None where nothing does, or a predicate. Raises
        `UsageError` that quotes the faulty part.
        """
        if self.sees is None or named_object(self.sees) is not None:
            return None
        condition = parse_condition(self.sees, SEES)
        if SEES.rows in names_in(condition.body) and not self.packed:
            message = "--sees: doc[…] needs documents in one row, and nothing says which there are"
            raise UsageError(message, hint="add --packed")
        return condition

    @cached_property
    def targets(self) -> tuple[TargetRequest, ...]:
        """The code to import, none of a checkpoint. Raises `UsageError` as `target_request`."""
        if self.model is not None:
            return ()
        return tuple(each for each in (self.target_request, self.against) if each is not None)

    @cached_property
    def acceptances(self) -> tuple["Accepted", ...]:
        """What is accepted, as stated. Raises `UsageError` for an unknown code, with the nearest
        one, and without a reason.
        """
        stated = dict[str, Accepted]()
        for word in self.accept:
            name, _, reason = word.partition("=")
            code, at, part = name.partition("@")
            option = f"--accept {word[:200]!r}"
            if code not in (known := acceptable_codes()):
                near = get_close_matches(code, known, n=1)
                hint = f"the nearest is {near[0]}" if near else "mha explain mistakes lists them"
                raise UsageError(f"{option}: there is no code {code[:80]!r}", hint=hint)
            if not reason.strip() or (at and not part):
                raise UsageError(f"{option} is not {_ACCEPTS}", hint="say why it is accepted")
            if name in stated:
                raise UsageError(f"--accept gives {name} twice")
            stated[name] = Accepted(code, part or None, reason.strip())
        return tuple(stated.values())

    @cached_property
    def against(self) -> TargetRequest | None:
        """The attention to compare it with; None for the reference. Raises `UsageError` as
        `target_request` does.
        """
        if self.other is None:
            return None
        given = self.other_call_arg
        arguments = pairs(self.other_arg, "against-arg")
        calls = (
            self.target_request.call_arguments
            if given is None
            else pairs(given, "against-call-arg")
        )
        return replace(
            self.target_request, target=self.other, arguments=arguments, call_arguments=calls
        )


class Accepted(Struct, frozen=True):
    """A mistake that is accepted for a reason, in a part of the code if one is known."""

    code: str
    part: str | None
    reason: str


@dataclass(frozen=True)
class Finding:
    """A mistake. `code` is stable; `message` is one sentence, `evidence` lines of numbers, `effect`
    the consequence, `fix` the corrected code, or what to do in words. `fix_tried`: with this code
    in place of what `source` has most like it the comparison that found the mistake finds none;
    False where no code that was tried does so, None where none was tried. `proven`: the reference
    with this mistake and those of `together_with` gives the module's output within `tolerance`;
    `error` is the largest difference. `file`, `line` and `source` locate the operation if known.
    `modes` are the affected modes, empty for attention with one mode. `where` says in which calls
    the code differs, and `beyond` up to which length it does not. `reproduce` is a script in plain
    torch that prints `error`, to be run in the folder of the code; None where there is none.
    `parts` are the modules of a model in which it was found. `accepted`: it is, in all of them.
    """

    code: str
    message: str
    evidence: str
    fix: str
    effect: str = ""
    proven: bool = False
    error: float | None = None
    tolerance: float | None = None
    together_with: tuple[str, ...] = ()
    file: str | None = None
    line: int | None = None
    source: str = ""
    modes: tuple[Mode, ...] = ()
    beyond: int | None = None
    where: str = ""
    reproduce: str | None = None
    fix_tried: bool | None = None
    parts: tuple[str, ...] = ()
    accepted: bool = False

    @property
    def at(self) -> str:
        """Its line, in brackets behind a blank; nothing where none is known."""
        return "" if self.file is None else f" ({line_in_words(self.file, self.line)})"

    @property
    def in_words(self) -> str:
        """The mistake with its line and its fix."""
        fix = self.fix.strip().partition("\n")[0]
        return f"{self.message}{self.at}" + (f"; fix: {fix}" if fix else "")


def words_of_code(name: str) -> Word:
    """The words of a mistake, or of the failure of a behaviour."""
    return {**words_of("mistakes", "mistake"), **words_of("glossary", "behaviour")}[name]


def acceptable_codes() -> set[str]:
    """The codes of all mistakes and failures."""
    every = (*words_of("mistakes", "mistake"), *words_of("glossary", "behaviour"))
    return {name.partition(",")[0] for name in every} - {HELD}


def finding_of(name: str, evidence: str, line: SourceLine = _NOWHERE, **more: Any) -> Finding:
    """The finding for a mistake of this name, or for a failure of this code, with its words, or
    with `more` in place of them.
    """
    words = words_of_code(name)
    fix = f"{words.advice} (not tried)" if words.right else ""
    said = words.explanation  # a sentence in the glossary, a clause behind a verdict
    message = said[0].lower() + said[1:].removesuffix(".")
    fields = {"message": message, "fix": fix, "effect": words.effect, **line._asdict()}
    return Finding(code=name.partition(",")[0], evidence=evidence, **{**fields, **more})


@dataclass(frozen=True)
class Tried:
    """How a behaviour was tried: the length of the texts, and how many were drawn."""

    length: int
    draws: int


@dataclass(frozen=True)
class Place:
    """Where a behaviour fails: the position from which the input was changed, the first output that
    differs, the first part of the model whose outputs differ while its inputs agree, the first
    attention whose outputs differ, and, of outputs that depend on later tokens, how far ahead they
    do at most, in tokens.
    """

    cut: int | None = None
    position: int | None = None
    module: str | None = None
    attention: str | None = None
    ahead: int | None = None


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """A behaviour of a model as a whole. `ok` is None where it was not tried, or where what was
    seen is no matter of right and wrong. `reason` says what was seen, or behind `NOT_TRIED` why it
    was not tried: the document has no other field for it, and only the properties below read it.
    `largest` is the largest difference, relative to the usual size of an output, and
    `tolerance` what rounding explains.
    """

    name: str
    ok: bool | None
    reason: str
    largest: float | None = None
    at: Place | None = None
    tolerance: float | None = None
    tried: Tried | None = None

    @property
    def was_omitted(self) -> bool:
        """Whether no pass was made for it."""
        return self.ok is None and self.reason.startswith(NOT_TRIED)

    @property
    def why_untried(self) -> str:
        """Why no pass was made for it; empty where one was."""
        return self.reason.removeprefix(NOT_TRIED) if self.was_omitted else ""

    @property
    def is_implied(self) -> bool:
        """Whether it was not tried because the failure of another one implies its own."""
        return self.why_untried.endswith(IMPLIED)

    @property
    def sign(self) -> bool | None:
        """Whether it holds as a reader takes it: None also where it does in an unusual call."""
        return None if self.ok and LEAKS_AS_USUAL in self.reason else self.ok


class SeenCells(Struct, frozen=True):
    """Who may see whom and who does: a word of 0 and 1 for each query, with a sign for each key.
    `layer` and `head` are None for a whole model and for all heads.
    """

    layer: int | None
    head: int | None
    stated: tuple[str, ...]
    measured: tuple[str, ...]

    @property
    def words(self) -> str:
        """The layer and the head."""
        numbers = (("layer", self.layer), ("head", self.head))
        return ", ".join(f"{name} {number}" for name, number in numbers if number is not None)


@dataclass(frozen=True)
class ProbeResult:
    """What was measured without the reference, in words and as a number; `ok` is None, because it
    is a matter of choice.
    """

    name: str
    message: str
    value: float | None = None
    ok: bool | None = None


@dataclass(frozen=True)
class OutputComparison:
    """The largest difference between the outputs of module and reference with the same weights,
    over `n_inputs` inputs.
    """

    against: str
    dtype: str
    n_inputs: int
    max_abs_difference: float | None
    tolerance: float


class Backward(Struct, frozen=True):
    """Whether gradients were compared, and why not."""

    compared: bool
    reason: str | None = None


class Compared(Struct, frozen=True):
    """What a verdict covers: the lengths, the shapes and the dtypes in which attention was compared
    with the reference, `attention`: whether it was in any, the arguments that some calls were given
    besides, such as `causal=True`, and whether Triton's interpreter ran it.
    """

    lengths: tuple[int, ...]
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    attention: bool
    backward: Backward
    arguments: tuple[str, ...] = ()
    interpreted: bool = False

    @staticmethod
    def of_all(parts: Sequence["Compared | None"]) -> "Compared":
        """What each of several parts was compared in."""
        first = parts[0] if parts else None
        if first is None or None in parts:
            reason = "the attention inside was not compared"
            return Compared((), (), (), False, Backward(compared=False, reason=reason))
        every = [part for part in parts if part is not None]

        def common(name: str) -> tuple[Any, ...]:
            values = getattr(first, name)
            return tuple(each for each in values if all(each in getattr(p, name) for p in every))

        return Compared(
            common("lengths"),
            common("shapes"),
            common("dtypes"),
            all(part.attention for part in every) and bool(common("lengths")),
            next((p.backward for p in every if not p.backward.compared), first.backward),
            tuple(dict.fromkeys(name for part in every for name in part.arguments)),
            any(part.interpreted for part in every),
        )

    def words(self, other: str) -> str:
        """What was compared with another implementation, in a sentence."""
        what = "outputs and gradients" if self.backward.compared else "outputs"
        n = len(self.shapes)
        why = self.backward.reason
        return (
            f"{what} are those of {other} with the same weights, up to {max(self.lengths)} tokens,"
            f" {', '.join(self.dtypes)} ({n} shape{'s' * (n != 1)})"
            + (f", also with {', '.join(self.arguments)}" if self.arguments else "")
            + (", in Triton's interpreter" if self.interpreted else "")
            + (f"; no gradients: {why}" if why else "")
        )


class AttentionInside(Struct, frozen=True):
    """A class of attention inside a model, with the names of its modules that hold the same
    numbers, and the verdict of the comparison with the reference; `reason` says why there is none.
    """

    type: str
    names: tuple[str, ...]
    verdict: Verdict
    reason: str = ""


class FirstDifference(Struct, frozen=True):
    """The first difference from the reference: `site` is the first site that differs, `last_shared`
    the last equal site before it. For two implementations, `other_file`, `other_line` and
    `other_source` locate the site in the other one.
    """

    site: str
    last_shared: str | None
    file: str | None = None
    line: int | None = None
    source: str = ""
    other_file: str | None = None
    other_line: int | None = None
    other_source: str = ""


@dataclass(frozen=True, repr=False)
class Examination(Shown):
    """The examination of an attention in user code. `not_examined` are arguments that always kept
    their defaults, so that the verdict does not cover them. `notes` are facts that may surprise a
    caller but are no mistakes, such as arguments without effect. `example` is the call that was
    assumed, empty where one was given. `next_steps` are suggestions for an undecided verdict. Of
    attention with two modes it is the report on the worse one, with the findings of both. `modes`
    is always empty. `inside` are the classes of attention inside a whole model. `attempts` are the
    calls, masks and other variants that were tried and did not work. `compared` is what the
    comparison with the reference covers beyond its first calls. `sees` are the cells that were
    compared with what is stated. `mask` says what was compared of a target that is a mask itself.
    `n_passes` counts the passes of the behaviours. `random_weights` is the seed of the weights of a
    config without any, None for all else, and `tiny` whether that config was shrunk.
    """

    verdict: Verdict
    target: str
    called: str
    arguments: tuple[Argument, ...] = ()
    findings: tuple[Finding, ...] = ()
    choices: tuple[Choice, ...] = ()
    probes: tuple[ProbeResult, ...] = ()
    comparison: OutputComparison | None = None
    reason: str | None = None
    closest: str | None = None
    departure: FirstDifference | None = None
    modes: tuple[()] = ()
    n_parameters: int = 0
    n_hypotheses: int = 0
    printed: str = ""
    against: str | None = None
    time_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    command: tuple[str, ...] = ()
    not_examined: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    example: str = ""
    behaviour: tuple[Behaviour, ...] = ()
    inside: tuple[AttentionInside, ...] = ()
    attempts: tuple[FailedAttempt, ...] = ()
    compared: Compared | None = None
    sees: tuple[SeenCells, ...] = ()
    mask: str = ""
    n_passes: int = 0
    random_weights: int | None = None
    tiny: bool = False
    accepted: tuple[Accepted, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it is right or consistent, or every mistake is accepted."""
        return self.verdict in ("right", "consistent") or self.is_accepted

    @property
    def is_accepted(self) -> bool:
        """Whether it is wrong, and every mistake is accepted."""
        is_all = bool(self.accepted) and all(finding.accepted for finding in self.findings)
        return is_all and self.verdict == "wrong"

    @property
    def reports(self) -> tuple["Examination"]:
        """It alone."""
        return (self,)

    @property
    def answer(self) -> str:
        """The verdict, and whether every mistake is accepted."""
        return "wrong, accepted" if self.is_accepted else self.verdict

    @property
    def exit_code(self) -> int:
        """The exit code of `mha check`."""
        if self.ok:
            return 0
        return EXIT_CHECK if self.verdict == "wrong" else EXIT_FAILED

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `--csv`: each finding, what is accepted, each behaviour and probe, under the
        names of the document.
        """
        document = self.to_dict()
        findings = [
            {"name": finding["code"], "ok": False} | finding for finding in document["findings"]
        ]
        accepted = [{"name": each["code"]} | each for each in document["accepted"]]
        parts = {
            "finding": findings,
            "accepted": accepted,
            "behaviour": document["behaviour"],
            "probe": document["probes"],
        }
        return [{"of": kind} | row for kind, rows in parts.items() for row in rows]

    in_python = staticmethod(in_python)

    def __repr__(self) -> str:
        """The target, the verdict, and the first finding with its line, in 200 characters."""
        message, at = self._first
        at = at if len(at) <= 50 else f" (…{at[-47:]}"
        about = f"<Examination of {_cut(visible(self.target), 40)}: {self.verdict}: "
        return f"{about}{_cut(self.in_python(message), 199 - len(about) - len(at))}{at}>"

    def __str__(self) -> str:
        """The report, as `mha check --verbose` prints it in 80 columns, for Python."""
        screen = Screen(80, colour=False, verbose=True)
        return self.in_python("\n".join(drawn_lines(self.view(screen), screen)))

    @property
    def headline(self) -> str:
        """The line of the first finding and the finding, or the sentence, in one line."""
        message, at = self._first
        return f"{at[2:-1]}: {message}" if at else message

    @property
    def _first(self) -> tuple[str, str]:
        """The first finding and its line; the sentence and nothing where there is none."""
        first = [(finding.message, finding.at) for finding in self.findings[:1]]
        message, at = first[0] if first else (self.sentence, "")
        return visible(" ".join(message.split())), visible(at)

    @property
    def sentence(self) -> str:
        """What was found, in a sentence: the mistakes, the agreement, or why nothing is decided."""
        if self.verdict == "wrong":
            return "; ".join(dict.fromkeys(finding.message for finding in self.findings[:3]))
        if self.mask:
            return self.mask
        if self.verdict == "unknown":
            return f"not decided: {self.reason or 'what was measured does not suffice'}"
        if self.verdict == "consistent":
            return f"{self._held}; {self.attention_inside}"
        other = self.against or "the reference"
        covered = ""
        if self.compared is not None and self.compared.attention:
            covered = self.compared.words(other)
        if self.comparison is None:
            inside = f"{self.attention_inside}: {covered}" if covered else self.attention_inside
            return f"{inside}; the rest by behaviour: {self._held}"
        n = self.comparison.n_inputs
        covered = covered or (
            f"on {n} input{'s' * (n != 1)} it gives the same output as {other} with the same"
            " weights"
        )
        return "; ".join([covered, *self._missing])

    @property
    def _held(self) -> str:
        """Which behaviours hold, in texts of which length, and what isolates documents."""
        holding = [each for each in self.behaviour if each.ok]
        held = f"{', '.join(each.name for each in holding)} hold"
        if lengths := {each.name: each.tried.length for each in holding if each.tried}:
            most = max(lengths.values())
            shorter = ", ".join(f"{name} {n}" for name, n in lengths.items() if n < most)
            held += f" in texts of up to {most} tokens" + (f" ({shorter})" if shorter else "")
        return "; ".join([held, *(each.reason for each in holding if each.name == "packing")])

    @property
    def _missing(self) -> tuple[str, ...]:
        return (f"not examined: {', '.join(self.not_examined)}",) if self.not_examined else ()

    @property
    def limits(self) -> tuple[str, ...]:
        """What the verdict does not cover, where its sentence does not say it, and facts that may
        surprise.
        """
        is_said = self.verdict == "right" and self.comparison is not None
        missing = () if is_said else self._missing
        return (*missing, *(f"note: {note}" for note in self.notes))

    @property
    def summary(self) -> str:
        """The verdict in a sentence, with the mistakes and fixes, or with the agreement and its
        limits.
        """
        if self.verdict == "unknown":
            return self.sentence
        parts = [finding.in_words for finding in self.findings] or [self.sentence]
        is_alone = self.verdict == "right" and not self.inside
        parts += self.limits if is_alone or self.is_accepted else ()
        return f"{self.answer}: {'; '.join(parts)}"

    @property
    def attention_inside(self) -> str:
        """In how many attention modules of a model the attention was compared with the reference,
        and why not in the others.
        """
        n_right = sum(len(each.names) for each in self.inside if each.verdict == "right")
        compared = "the attention inside was not compared with the reference"
        if any(each.verdict != "unknown" for each in self.inside):
            n_in_all = sum(len(each.names) for each in self.inside)
            compared = f"attention right in {n_right} of {n_in_all}"
        others = [
            f"{each.type}: {each.reason}" for each in self.inside if each.verdict == "unknown"
        ]
        return "; ".join([compared, *others])

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `--json`."""
        fields: dict[str, Any] = plain(self)
        return {"schema": "mha.check/1", "summary": self.summary} | fields


def _cut(text: str, most: int) -> str:
    """A text, cut to so many characters with an ellipsis if it is longer."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


@dataclass(frozen=True, repr=False)
class Examinations(Shown):
    """The examinations of the targets that the pyproject.toml at `path` states."""

    path: str
    reports: tuple[Examination, ...]

    @property
    def exit_code(self) -> int:
        """The largest of their exit codes: a mistake counts more than what is not decided."""
        return max(report.exit_code for report in self.reports)

    @property
    def summary(self) -> str:
        """How many have which verdict."""
        n = len(self.reports)
        counts = Counter(report.answer for report in self.reports)
        each = "; ".join(f"{count} {answer}" for answer, count in counts.items())
        return f"{n} target{'' if n == 1 else 's'}: {each}"

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `--csv`: the verdict on each target, then the rows of its report."""
        rows = list[dict[str, Any]]()
        for report in self.reports:
            name = report.verdict
            ok = report.ok
            message = report.summary
            verdict = {"of": "verdict", "name": name, "ok": ok, "message": message}
            rows += [{"target": report.target} | row for row in (verdict, *report.rows())]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `--json`."""
        reports = [report.to_dict() for report in self.reports]
        named = {"schema": "mha.checks/1", "summary": self.summary, "table": self.path}
        return {**named, "reports": reports}


def line_in_words(file: str, line: int | None) -> str:
    """A line of a file, by its path from the working directory."""
    return shown_path(file) if line is None else f"{shown_path(file)}:{line}"
