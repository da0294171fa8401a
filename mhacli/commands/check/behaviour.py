"""What a callable does with sequences, whatever is inside it: whether an output depends on later tokens, on the length, on other
rows, on padding or on a cache.

Every behaviour is asked by passes over inputs that differ in one way. A difference counts beyond the noise floor: eight times
what one rounding step of every part of the model changes.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.commands.check.consistency_checks import CEILING
from mhacli.commands.check.result import Behaviour, Finding, Place, Tried
from mhacli.models.rounding import TIMES_SHAKEN, shaken_parts
from mhacli.usercode.call.signature import MASKS, call_role
from mhacli.usercode.call.user_attention import UserAttention, call_attention
from mhacli.usercode.inputs import seeded
from mhacli.usercode.process import Stage
from mhacli.usercode.types import Inputs

LENGTH = 256
"""The length of the texts, if the model has so many positions."""
CUTS = (1, 2, 3, 7, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)
_BATCH, _LEAST, _SHAKES, _DRAWS = 2, 4, 3, 8
_ALL = 0.9
"""The part of all outputs that counts as all: where attention is sharp, some change by less than their rounding."""
_STEPS = 16
"""Tokens that are read one by one behind a cache."""
_LOOSER = 100.0
"""How much more than the outputs a part inside may move by rounding alone."""

_BOTH_WAYS = re.compile(r"MaskedLM|Bert|BERT|Encoder|Bidirectional|Electra")
_CAUSAL = re.compile(r"CausalLM|LMHeadModel|GPT|(?<![a-z])Causal|Decoder|Llama|Autoregressive")
_PADDING = ("attention_mask", "key_padding_mask", "src_key_padding_mask", "padding_mask", "pad_mask")
_NONE: Mapping[str, Tensor] = {}
_DECODER = ("decoder_input_ids", "tgt", "trg", "target_ids", "tgt_ids", "tgt_seq", "trg_seq")
_TARGETS = ("targets", "target", "labels")


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """A callable as a function of sequences.

    `run(x, training=…, **keywords)` gives the outputs `[batch, token, width]` for ids `[batch, token]` or vectors `[batch, token,
    width]`; `draw(seed, batch, length)` makes them. `length` is the longest that is tried, `accepts` are the names of what a call
    takes besides, `n_ids` is the number of ids, 0 for vectors.
    """

    name: str
    run: Callable[..., Tensor]
    draw: Callable[[int, int, int], Tensor]
    length: int
    called: str
    module: nn.Module | None = None
    accepts: frozenset[str] = frozenset()
    n_ids: int = 0
    call: Callable[..., Any] | None = None
    is_decoder: bool = False


# ---------------------------------------------------------------------------------------------------- how it is called


@dataclass(frozen=True)
class _CallOfIds:
    """A call of a module that takes ids: by itself, or as the tokens of a `decoder` behind a source of other ids. `mask` is the
    argument that is given a causal mask, made by `make`."""

    module: nn.Module
    fixed: Mapping[str, Any]
    source: str
    decoder: str | None
    mask: str | None = None
    make: Callable[[int], Tensor] = torch.zeros

    def __call__(self, x: Tensor, **keywords: Any) -> Any:
        given = {**self.fixed, **keywords}
        if self.mask is not None:
            given[self.mask] = self.make(x.shape[1]).to(x.device)
        if self.decoder is None:
            return self.module(x, **given)
        source = x.new_tensor([1, 0, 1]).expand(len(x), -1)
        return self.module(**{self.source: source, self.decoder: x}, **given)


def sequences_of_ids(
    name: str, module: nn.Module, *, fixed: Mapping[str, Any], length: int | None, seed: int
) -> Sequences | None:
    """A module that takes token ids as a function of sequences, of an encoder with a decoder the decoder's; None if it has no
    embedding that reads them, or needs more than a mask."""
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    parameters = inspect.signature(module.forward).parameters
    if not tables or not parameters:
        return None
    accepts, first = frozenset(parameters), next(iter(parameters))
    decoder = next((word for word in _DECODER if word in accepts and word != first), None)
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    needed = [parameter for parameter in needed if parameter not in (*fixed, decoder)]
    if len(needed) > 1 or any(call_role(parameter) not in MASKS for parameter in needed):
        return None
    call, n_ids, how = _CallOfIds(module, fixed, first, decoder), None, ""
    masks = needed or [word for word in ("tgt_mask", "trg_mask") if decoder and word in accepts]
    for means, make in _CAUSAL_MASKS.items() if masks else ():
        masked = replace(call, mask=masks[0], make=make)
        if _hides_last(masked) or (not how and _ids_read(masked, tables, seed)):
            call, how = masked, f", {masks[0]}=a causal mask [token, token]: {means}"
    n_ids = _ids_read(call, tables, seed)
    if n_ids is None:
        return None
    special: set[int | None] = {
        part.padding_idx for part in tables if part.padding_idx is not None and part.num_embeddings == n_ids
    }
    config = getattr(module, "config", None)
    special |= {getattr(config, f"{of}_token_id", None) for of in ("pad", "bos", "eos", "mask")}
    allowed = torch.tensor([i for i in range(n_ids) if i not in special] or list(range(n_ids)))
    targets = next((word for word in _TARGETS if word in accepts and word not in fixed), None)
    device = next(module.parameters()).device

    def draw(seed: int, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return allowed[torch.randint(len(allowed), (batch, length), generator=generator)].to(device)

    def run(x: Tensor, *, training: bool = False, **keywords: Any) -> Tensor:
        with _watched(module) as last, _mode(module, training=training):
            found = outputs_in(call(x, **keywords), x.shape)
            if found is None and targets is not None:
                with suppress(Exception):  # labels may be of another kind
                    found = outputs_in(call(x, **{targets: x}, **keywords), x.shape)
        found = last.get(tuple(x.shape)) if found is None else found
        if found is None:
            raise ValueError(f"no output has the shape [batch, token, …] of the ids, {list(x.shape)}")
        return found.detach().flatten(2) if found.ndim > 2 else found.detach()[..., None]

    longest = _longest(run, draw, length)
    if longest is None:
        return None
    whose = "ids" if decoder is None else f"{decoder}="
    return Sequences(
        name=name,
        run=run,
        draw=draw,
        length=longest,
        called=f"{name.rpartition(':')[2]}({whose} [{_BATCH}, {longest}]{how})",
        module=module,
        accepts=accepts if decoder is None else frozenset(),
        n_ids=n_ids,
        call=module,
        is_decoder=decoder is not None,
    )


def sequences_of_vectors(attention: UserAttention, length: int | None) -> Sequences | None:
    """An attention over vectors as a function of sequences; None for a function of heads, and where no long text works."""
    if attention.is_function:
        return None

    def draw(seed: int, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.randn(batch, length, attention.sizes.d_in, generator=generator)
        return vectors.to(attention.device, attention.dtype)

    def run(x: Tensor, *, training: bool = False) -> Tensor:
        return call_attention(attention, Inputs(x), training=training).out.flatten(2)

    longest = _longest(run, draw, length)
    if longest is None:
        return None
    called = f"{attention.built.name}([{_BATCH}, {longest}, {attention.sizes.d_in}])"
    return Sequences(
        name=attention.built.name, run=run, draw=draw, length=longest, called=called, module=attention.built.module
    )


_CAUSAL_MASKS: Mapping[str, Callable[[int], Tensor]] = {
    "True hides": lambda n: ~torch.ones(n, n, dtype=torch.bool).tril(),
    "True keeps": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "−∞ hides": lambda n: torch.full((n, n), -torch.inf).triu(1),
}
"""The causal masks that a call which needs one is given: the last that hides the future, else the first that works."""


def _hides_last(call: _CallOfIds) -> bool:
    """Whether the outputs of a short text stay when its last token changes, which its mask hides."""
    ids = torch.zeros(2, _LEAST, dtype=torch.int64, device=next(call.module.parameters()).device)
    ids[1, -1] = 1
    try:
        with torch.no_grad(), seeded(0, ids.device), _mode(call.module, training=False):
            out = outputs_in(call(ids), ids.shape)
    except Exception:  # a mask of another form
        return False
    return out is not None and bool(out.isfinite().all()) and torch.allclose(out[0, :-1], out[1, :-1], atol=1e-5)


def _ids_read(call: _CallOfIds, tables: Sequence[nn.Embedding], seed: int) -> int | None:
    """The number of rows of the table that reads the ids of a call; None if none does, or the call raises."""
    least = min(table.num_embeddings for table in tables)
    ids = torch.randint(least, (_BATCH, _LEAST), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(next(call.module.parameters()).device)
    found: list[int] = []

    def note(table: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].shape == ids.shape and bool((inputs[0] == ids).all()):
            found.append(table.num_embeddings)  # type: ignore[arg-type]

    handles = [table.register_forward_pre_hook(note) for table in tables]
    try:
        with torch.no_grad(), seeded(seed, ids.device):
            call(ids)
    except Exception:  # the user's code may raise anything, and what it takes is not known
        return None
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _longest(run: Callable[..., Tensor], draw: Callable[[int, int, int], Tensor], length: int | None) -> int | None:
    """The longest text that works: the requested one, or half as long again and again."""
    tried = LENGTH if length is None else length
    while tried >= _LEAST:
        try:
            with torch.no_grad():
                run(draw(0, _BATCH, tried))
        except Exception:  # beyond the model's positions its code may raise anything
            if length is not None:
                raise
            tried //= 2
        else:
            return tried
    return None


def outputs_in(result: Any, shape: Sequence[int]) -> Tensor | None:
    """The first floating tensor `[batch, token, …]` in what a call returned, the logits first."""
    if isinstance(result, Tensor):
        fits = result.is_floating_point() and result.ndim >= 2 and result.shape[:2] == tuple(shape[:2])
        return result if fits else None
    if isinstance(result, Mapping):
        parts = [result[name] for name in sorted(result, key=lambda name: name != "logits")]
    elif isinstance(result, tuple | list):
        parts = list(result)
    else:
        parts = [getattr(result, name, None) for name in ("logits", "last_hidden_state")]
    found = (outputs_in(part, shape) for part in parts if part is not None)
    return next((tensor for tensor in found if tensor is not None), None)


@contextmanager
def _watched(module: nn.Module) -> Iterator[dict[tuple[int, ...], Tensor]]:
    """The last output of a part, by batch and length: what the output layer reads where a call returns less."""
    last: dict[tuple[int, ...], Tensor] = {}

    def note(_part: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 3 and output.is_floating_point():
            last[tuple(output.shape[:2])] = output

    handles = [part.register_forward_hook(note) for part in module.modules() if part is not module]
    try:
        yield last
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Puts all parts in one mode, and each back in its own."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


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
        dtype = str(self.y.dtype).removeprefix("torch.")
        self.tolerance = CEILING.get(dtype, CEILING["float32"])
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

    def _behaviour(self, name: str, ok: bool | None, reason: str, **fields: Any) -> Behaviour:
        tried = Tried(self.of.length, fields.pop("draws", 1)) if ok is not None else None
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
        if not {"past_key_values", "use_cache"} <= self.of.accepts or self.of.call is None:
            return self._behaviour("cache", None, "not asked: it takes no cache by a known name")
        if not is_causal:
            return self._behaviour("cache", None, "not asked: only where no output depends on a later token")
        n = self.of.length - min(_STEPS, self.of.length // 2)
        past, parts = None, []
        for start, end in [(0, n), *((i, i + 1) for i in range(n, self.of.length))]:
            x = self.x[:, start:end]
            with torch.no_grad():
                result = self.of.call(x, past_key_values=past, use_cache=True)
            past = getattr(result, "past_key_values", None)
            out = outputs_in(result, x.shape)
            if past is None or out is None:
                return self._behaviour("cache", None, "not asked: the call returns no cache")
            parts.append(out.float())
        apart = self._apart(torch.cat(parts, dim=1), self.y)
        if apart.max() <= self.tolerance:
            return self._behaviour(
                "cache", True, f"{_STEPS} steps behind a cache give the same as one call", largest=apart.max().item()
            )
        return self._failed(
            "cache", "tokens that are read behind a cache give other outputs than in one call", apart, cut=n
        )

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


def with_zeros_drawn(module: nn.Module, seed: int) -> nn.Module:
    """The module, or a copy in which weights that are all zero, such as fresh output layers and gates, are small random numbers:
    what they hide would not be seen."""
    weights = ((name, weight) for name, weight in module.named_parameters() if not name.endswith("bias"))
    zero = [name for name, weight in weights if not bool(weight.any())]
    if not zero:
        return module
    drawn = copy.deepcopy(module)
    with torch.no_grad(), seeded(seed, torch.device("cpu")):
        for name in zero:
            drawn.get_parameter(name).normal_(std=0.02)
    return drawn
