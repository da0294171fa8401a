"""What a callable does with sequences, whatever is inside it: whether an output depends on later tokens, on the length, on other
rows, on padding or on a cache.

Every behaviour is asked by passes over inputs that differ in one way. A difference counts beyond the noise floor: eight times
what one rounding step of every part of the model changes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.commands.check.consistency_checks import CEILING
from mhacli.commands.check.result import Behaviour, Finding, Place, Tried
from mhacli.models.rounding import TIMES_SHAKEN, dtype_of, shaken_parts
from mhacli.usercode.call.sequences import Sequences, in_mode, outputs_in
from mhacli.usercode.inputs import seeded
from mhacli.usercode.process import Stage

CUTS = (1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)
_SHAKES, _DRAWS = 3, 8
_ALL = 0.9
"""The part of all outputs that counts as all: where attention is sharp, some change by less than their rounding."""
_COARSE = 1e-2
"""The noise floor of a model in 32 bits beyond which a difference below it may be a fault, as where a selection flips."""
_STEPS = 16
"""Tokens that are read one by one behind a cache."""
_LOOSER = 100.0
"""How much more than the outputs a part inside may move by rounding alone."""

_BOTH_WAYS = re.compile(r"MaskedLM|Bert|BERT|Encoder|Bidirectional|Electra")
_CAUSAL = re.compile(r"CausalLM|LMHeadModel|GPT|(?<![a-z])Causal|Decoder|Llama|Autoregressive")
_PADDING = ("attention_mask", "key_padding_mask", "src_key_padding_mask", "padding_mask", "pad_mask")
_NONE: Mapping[str, Tensor] = {}


# ------------------------------------------------------------------------------------------------------- what is asked


def claim_of(module: object, *, causal: bool | None) -> bool | None:
    """Whether a model claims that a token sees only earlier ones: by the statement, its config, or the name of its class or of
    the nearest class that it is made from; None if nothing says."""
    if causal is not None:
        return causal
    config = getattr(module, "config", None)
    for owner in (module, config):
        for name in ("causal", "is_causal"):
            stated = getattr(owner, name, None)
            if isinstance(stated, bool):
                return stated
    for name in [*(getattr(config, "architectures", None) or ()), *(cls.__name__ for cls in type(module).__mro__)]:
        if _BOTH_WAYS.search(name):
            return False
        if _CAUSAL.search(name):
            return True
    return None


@dataclass
class _Asker:
    """The behaviours of a callable, asked one by one; `findings` are the failed ones."""

    of: Sequences
    claim: bool | None
    seed: int
    stage: Stage
    findings: list[Finding] = field(default_factory=list)
    sees_both_ways: bool = False

    def __post_init__(self) -> None:
        self.x = self.of.draw(self.seed, 1, self.of.length)
        self.y = self._run(self.x)
        norms = self.y.norm(dim=-1)
        self.usual = norms.square().mean().sqrt().item()
        own = self.y.dtype if self.of.module is None else dtype_of(self.of.module)
        dtype = str(own).removeprefix("torch.")
        self.tolerance = self.least = CEILING.get(dtype, CEILING["float32"])
        if self.of.module is not None:
            for seed in range(_SHAKES):
                with shaken_parts(self.of.module, seed):
                    moved = self._apart(self._run(self.x), self.y).max().item()
                self.tolerance = max(self.tolerance, TIMES_SHAKEN.get(dtype, 8) * moved)

    def _run(
        self, x: Tensor, *, seed: int | None = None, training: bool = False, given: Mapping[str, Tensor] = _NONE
    ) -> Tensor:
        self.stage(f"calling {self.of.name}")
        with torch.no_grad(), seeded(self.seed if seed is None else seed, x.device):
            y = self.of.run(x, training=training, **given)
        return y.to(torch.promote_types(y.dtype, torch.float32))

    def _apart(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """How far apart the outputs of each token are, relative to their usual size."""
        apart: Tensor = (ours - theirs).norm(dim=-1) / max(self.usual, torch.finfo(torch.float32).tiny)
        return apart.nan_to_num(nan=torch.inf).amax(dim=0)

    def _behaviour(self, name: str, ok: bool | None, reason: str, *, draws: int = 1, **fields: Any) -> Behaviour:
        if ok and self.tolerance > max(_COARSE, 2 * self.least) and fields.get("largest"):
            ok, reason = (
                None,
                f"rounding alone changes outputs by {self.tolerance:.2g}: a fault could not be told apart",
            )
        tried = Tried(self.of.length, draws) if ok is not None else None
        return Behaviour(name=name, ok=ok, reason=reason, tolerance=self.tolerance, tried=tried, **fields)

    def _changed(self, start: int, end: int, seed: int, *, alike: bool = False) -> Tensor:
        """The text with other tokens from `start` to `end`, which may be all `alike`."""
        other, changed = self.of.draw(self.seed + seed, 1, self.of.length), self.x.clone()
        if (
            alike
        ):  # which moves what is computed of the whole text, such as a selection, further than tokens of one kind
            other = other[:, :1].expand_as(other)
        if self.of.n_ids:
            other = torch.where(other == self.x, (other + 1) % self.of.n_ids, other)
        changed[:, start:end] = other[:, start:end]
        return changed

    def all(self) -> tuple[Behaviour, ...]:
        """Every behaviour. Those that follow from another one that fails are not asked."""
        if not bool(self.y.isfinite().all()):
            return (self._behaviour("finite", False, "some outputs are NaN or infinite"),)
        repeat = self.repeat()
        causality = self.causality()
        is_causal = causality.ok is True
        asked = [causality, self.prefix(is_causal=is_causal), self.batch(), repeat]
        return (*asked, self.padding(), self.cache(is_causal=is_causal))

    def repeat(self) -> Behaviour:
        """Whether two passes over one text agree, in evaluation mode and with other random numbers."""
        apart = self._apart(self._run(self.x, seed=self.seed + 1), self.y)
        if apart.max() <= self.tolerance:
            return self._behaviour("repeat", True, "two passes over one text agree", largest=apart.max().item())
        return self._failed(
            "repeat", "two passes over one text differ in evaluation mode", apart, [self.x] * 2, {"seed": self.seed + 1}
        )

    # -------------------------------------------------------------------------------------------------------- causality

    def causality(self) -> Behaviour:
        """Whether outputs before a cut stay when everything after it changes."""
        name, cuts = "causality", sorted({cut for cut in (*CUTS, self.of.length - 1) if cut < self.of.length})
        earlier: dict[int, Tensor] = {}
        moves = False
        for cut in cuts:
            apart = self._apart(self._run(self._changed(cut, self.of.length, cut)), self.y)
            for seed in range(_SHAKES) if cut == self._middle else ():
                alike = self._changed(cut, self.of.length, seed + 1, alike=True)
                apart = torch.maximum(apart, self._apart(self._run(alike), self.y))
            earlier[cut] = apart[:cut]
            moves = moves or bool(apart[cut] > self.tolerance)
        if not moves:
            return self._behaviour(name, None, "not asked: the output does not depend on it")
        changed = {cut: (apart > self.tolerance).double().mean().item() for cut, apart in earlier.items()}
        largest = max(apart.max().item() for apart in earlier.values())
        if not any(changed.values()):
            return self._in_training() or self._behaviour(
                name, True, "no output depends on a later token", largest=largest, draws=len(cuts)
            )
        reached = {cut: (apart > 0).double().mean().item() for cut, apart in earlier.items()}
        seen, is_meant = None, True
        if self.claim is False:
            seen = "tokens may see later ones"
        elif self.claim is None:
            seen, is_meant = self._both_ways(reached)
        if seen is not None:
            self.sees_both_ways = is_meant
            whether = "" if is_meant else ", and nothing says whether it may: state --causal or --no-causal"
            return self._behaviour(name, None, f"not asked: {seen}{whether}")
        cut = next(cut for cut in cuts if changed[cut])
        apart = torch.cat([earlier[cut], torch.zeros(self.of.length - cut)])
        return self._failed(
            name, "an output depends on later tokens", apart, [self.x, self._changed(cut, self.of.length, cut)], cut=cut
        )

    def _both_ways(self, reached: Mapping[int, float]) -> tuple[str | None, bool]:
        """How tokens see later ones, by the part of the outputs before each cut that what is after it reaches, however little,
        and whether that is surely meant. None if it is a leak: later tokens reach some positions or distances and not others, as
        in nothing that is meant to see both ways."""
        is_meant = not (self.of.n_ids and self.y.shape[-1] == self.of.n_ids)  # a language model may see them by mistake
        if min(reached.values()) >= _ALL:
            return "every output depends on later tokens", is_meant
        within = [cut for cut, part in reached.items() if part >= _ALL]
        if within and not any(part for cut, part in reached.items() if cut > within[-1]):
            return f"the first tokens, at least {within[-1]}, see each other, and later ones what is before them", True
        forwards = self._apart(self._run(self._changed(0, self._middle, 1)), self.y)[self._middle :]
        onwards = (forwards > 0).double().mean().item()
        if onwards < _ALL and reached[self._middle] >= onwards / 2:
            return "outputs depend on later tokens as far as on earlier ones", is_meant
        if all(self._is_reached(int(part * self.of.length)) for part in (0.37, 0.63)):
            return "outputs depend on some later tokens", False
        return None, False

    def _is_reached(self, cut: int) -> bool:
        """Whether one of several changes after a cut reaches each output before it, where attention is so sharp that one alone
        reaches few."""
        reached = torch.zeros(cut, dtype=torch.bool, device=self.x.device)
        for seed in range(_DRAWS):
            changed = self._changed(cut, self.of.length, _DRAWS + seed)
            reached |= self._apart(self._run(changed), self.y)[:cut] > 0
        return reached.double().mean().item() >= _ALL

    @property
    def _middle(self) -> int:
        """The cut nearest to the middle."""
        cuts = [cut for cut in (*CUTS, self.of.length - 1) if cut < self.of.length]
        return min(cuts, key=lambda cut: abs(cut - self.of.length // 2))

    def _in_training(self) -> Behaviour | None:
        """The failure of causality in training mode, where dropout is on; None where there is none."""
        module = self.of.module
        parts = () if module is None else module.modules()
        has_dropout = any(isinstance(part, nn.Dropout) and part.p > 0 for part in parts)
        rates = {name: getattr(part, name, 0) for part in parts for name in ("dropout", "dropout_p", "attn_dropout")}
        if not has_dropout and not any(isinstance(rate, float) and rate > 0 for rate in rates.values()):
            return None
        cut = self._middle
        changed = self._changed(cut, self.of.length, cut)
        try:
            apart = self._apart(self._run(changed, training=True), self._run(self.x, training=True))
        except TypeError:
            return None
        apart[cut:] = 0
        if apart.max() <= self.tolerance:
            return None
        message = "in training mode an output depends on later tokens"
        return self._failed("causality", message, apart, [self.x, changed], {"training": True}, cut=cut)

    # ------------------------------------------------------------------------------------------------------- the others

    def prefix(self, *, is_causal: bool) -> Behaviour:
        """Whether a shorter text gives the start of a longer one's outputs."""
        if not is_causal:
            return self._behaviour("prefix", None, "not asked: only where no output depends on a later token")
        largest = 0.0
        for length in (self.of.length // 3, self.of.length - 1):
            try:
                apart = self._apart(self._run(self.x[:, :length]), self.y[:, :length])
            except Exception as fault:  # a model may need another length
                return self._behaviour(
                    "prefix", None, f"not asked: a text of {length} tokens raises {type(fault).__name__}"
                )
            largest = max(largest, apart.max().item())
            if apart.max() > self.tolerance:
                message = f"the first {length} tokens alone give other outputs than in a text of {self.of.length}"
                return self._failed("prefix", message, apart, cut=length)
        return self._behaviour("prefix", True, "a shorter text gives the start of a longer one's", largest=largest)

    def batch(self) -> Behaviour:
        """Whether a text gives the same outputs alone and in a batch."""
        texts = [torch.cat([self.x, self.of.draw(self.seed + seed, 1, self.of.length)]) for seed in (1, 2)]
        apart = self._apart(self._run(texts[0])[:1], self.y)
        if apart.max() <= self.tolerance:
            return self._behaviour(
                "batch", True, "a text alone gives the same as in a batch", largest=apart.max().item()
            )
        return self._failed("batch", "the outputs of a text depend on the other texts in its batch", apart, texts)

    def padding(self) -> Behaviour:
        """Whether real tokens give the same outputs beside masked ones on the right."""
        name = next((word for word in _PADDING if word in self.of.accepts), None)
        if name is None:
            return self._behaviour("padding", None, "not asked: it takes no mask of padding by a known name")
        n_real = self.of.length // 2
        real = torch.arange(self.of.length, device=self.x.device).expand(1, -1) < n_real
        apart = {}
        for means, mask in (("keep", real), ("hide", ~real)):
            given = mask.long() if name == "attention_mask" else mask
            try:
                masked = self._run(self.x, given={name: given})
                other = self._run(self._changed(n_real, self.of.length, 3), given={name: given})
            except Exception:  # a mask of another form
                continue
            apart[means] = self._apart(other, masked)[:n_real]
        if not apart:
            return self._behaviour("padding", None, f"not asked: {name} takes no mask [batch, token]")
        best = min(apart.values(), key=lambda of_tokens: of_tokens.max().item())
        if best.max() <= self.tolerance:
            reason = f"no real token depends on padding on the right ({name})"
            return self._behaviour("padding", True, reason, largest=best.max().item())
        message = f"a real token depends on padding on the right, whatever True means in {name}"
        return self._failed("padding", message, best)

    def cache(self, *, is_causal: bool) -> Behaviour:
        """Whether tokens that are read one by one behind a cache give the outputs of one call."""
        if not {"past_key_values", "use_cache"} <= self.of.accepts or self.of.module is None:
            return self._behaviour("cache", None, "not asked: it takes no cache by a known name")
        if not is_causal:
            return self._behaviour("cache", None, "not asked: only where no output depends on a later token")
        n = self.of.length - min(_STEPS, self.of.length // 2)
        try:
            parts = self._steps(self.of.module, n)
        except Exception as fault:  # a cache may be of a kind that must be given
            return self._behaviour("cache", None, f"not asked: a call with a cache raises {type(fault).__name__}")
        if parts is None:
            return self._behaviour("cache", None, "not asked: the call returns no cache")
        apart = self._apart(torch.cat(parts, dim=1), self.y)
        if apart.max() <= self.tolerance:
            return self._behaviour(
                "cache", True, f"{_STEPS} steps behind a cache give the same as one call", largest=apart.max().item()
            )
        return self._failed(
            "cache", "tokens that are read behind a cache give other outputs than in one call", apart, cut=n
        )

    def _steps(self, module: nn.Module, n_first: int) -> list[Tensor] | None:
        """The outputs of the first tokens in one call, and of each further one behind the cache; None if there is none."""
        past, parts = None, []
        for start, end in [(0, n_first), *((i, i + 1) for i in range(n_first, self.of.length))]:
            x = self.x[:, start:end]
            with torch.no_grad(), seeded(self.seed, x.device), in_mode(module, training=False):
                result = module(x, past_key_values=past, use_cache=True)
            past, out = getattr(result, "past_key_values", None), outputs_in(result, x.shape)
            if past is None or out is None:
                return None
            parts.append(out.float())
        return parts

    # --------------------------------------------------------------------------------------------------------- failures

    def _failed(
        self,
        name: str,
        message: str,
        apart: Tensor,
        texts: Sequence[Tensor] = (),
        keywords: Mapping[str, Any] = _NONE,
        *,
        cut: int | None = None,
    ) -> Behaviour:
        """The failed behaviour, and its finding: with the first position, and the first part whose outputs differ while its
        inputs agree, where two passes over texts of one length show it."""
        position = int((apart > self.tolerance).nonzero()[0])
        part = None
        if texts and self.of.module is not None:
            part = self._first_part(texts, keywords, cut)
        label = None if part is None else part[0]
        file, line = (None, None) if part is None else _source_of(part[1])
        where = "" if label is None else f", first in {label}"
        sizes = f"by {apart.max().item():.2g} of an output's size, where rounding explains {self.tolerance:.2g}"
        after = "" if cut is None else f"; everything from position {cut} on was changed" if name == "causality" else ""
        self.findings.append(
            Finding(
                code=_CODES[name],
                message=message + where,
                evidence=f"the output at position {position} differs {sizes}{after}",
                fix="",
                effect=_EFFECTS[name],
                file=file,
                line=line,
            )
        )
        at = Place(cut=cut, position=position, module=label)
        return self._behaviour(name, False, message, largest=apart.max().item(), at=at)

    def _first_part(
        self, texts: Sequence[Tensor], keywords: Mapping[str, Any], cut: int | None
    ) -> tuple[str, nn.Module] | None:
        """The first part, in the order in which parts end, whose outputs before a cut differ while its inputs agree."""
        module = self.of.module
        assert module is not None
        seen = self._parts_of(module, texts[0], {"training": keywords.get("training", False)}, cut)
        other = self._parts_of(module, texts[1], keywords, cut)
        for key, (inputs, output) in other.items():
            if key in seen and _differ(seen[key][1], output) and not _differ(seen[key][0], inputs):
                part = module.get_submodule(key[0])
                return f"{key[0] or 'the model'} ({type(part).__name__})", part
        return None

    def _parts_of(
        self, module: nn.Module, x: Tensor, keywords: Mapping[str, Any], cut: int | None
    ) -> dict[tuple[str, int], tuple[Tensor | None, Tensor | None]]:
        """The first input and output of each call of each part, in the order in which they end, before a cut."""
        found: dict[tuple[str, int], tuple[Tensor | None, Tensor | None]] = {}

        def start(tensors: Any) -> Tensor | None:
            tensor = outputs_in(tensors, x.shape)
            return None if tensor is None else tensor[:1, :cut].detach().clone()

        def note(name: str) -> Callable[..., None]:
            def hook(_part: nn.Module, inputs: Any, named: Any, output: Any) -> None:
                given = start((*inputs, *named.values()))
                count = sum(1 for key in found if key[0] == name)
                found[name, count] = (given, start(output))

            return hook

        parts = [(name, part) for name, part in module.named_modules()]
        handles = [part.register_forward_hook(note(name), with_kwargs=True) for name, part in parts]
        try:
            self._run(x, **keywords)
        finally:
            for handle in handles:
                handle.remove()
        return found


def _differ(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether two tensors differ by more than rounding inside a model explains."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return False
    usual = theirs.double().square().mean().sqrt().clamp(min=1e-30)
    return bool((ours.double() - theirs.double()).abs().max() / usual > _LOOSER * torch.finfo(torch.float32).eps)


def _source_of(part: nn.Module) -> tuple[str | None, int | None]:
    """The file and line of a part's `forward`."""
    try:
        return inspect.getsourcefile(type(part)), inspect.getsourcelines(type(part).forward)[1]
    except (OSError, TypeError):
        return None, None


_CODES = {
    "finite": "outputs-not-finite",
    "repeat": "not-repeatable",
    "causality": "sees-the-future",
    "prefix": "prefix-differs",
    "batch": "batch-leak",
    "padding": "padding-leak",
    "cache": "cache-differs",
}
_EFFECTS = {
    "repeat": "no result of this model can be repeated, so nothing can be compared",
    "causality": "the model sees the tokens that it should predict: its loss is too low, and what it generates does not match it",
    "prefix": "text that is generated token by token differs from what the model computes for the whole text",
    "batch": "the answer to a text depends on what else is in its batch",
    "padding": "the answer to a text depends on how long the others in its batch are",
    "cache": "text that is generated token by token differs from what the model computes for the whole text",
}


class Asked(NamedTuple):
    """The behaviours, a finding for each that fails, and whether those that decide were tried and hold."""

    behaviours: tuple[Behaviour, ...]
    findings: tuple[Finding, ...]
    holds: bool


def ask(sequences: Sequences, *, claim: bool | None, seed: int, stage: Stage) -> Asked:
    """The behaviours of a callable."""
    asker = _Asker(sequences, claim, seed, stage)
    behaviours = asker.all()
    ok = {behaviour.name: behaviour.ok for behaviour in behaviours}
    tried = ok.get("repeat") is True and ok.get("batch") is True
    return Asked(
        behaviours,
        tuple(asker.findings),
        tried and (ok["causality"] is True or asker.sees_both_ways) and False not in ok.values(),
    )
