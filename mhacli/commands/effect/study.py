"""The study of effects: from settings and the layers of an inspected pass to the removals, the target, and the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mhacli.commands.effect.metric import Target, values
from mhacli.commands.effect.removal import Removal
from mhacli.commands.effect.run import LEAST_ROWS, EffectRun
from mhacli.commands.effect.settings import EffectSettings
from mhacli.errors import EXIT_CHECK, MhaError, UsageError, out_of_range
from mhacli.io.progress import Progress, no_progress
from mhacli.layer.run import prepare, record_run
from mhacli.models.inputs import ModelInputs
from mhacli.models.layer_names import LayerKey
from mhacli.models.load import Loaded, ModelTokenizer
from mhacli.models.prepare import inputs_of, prepare_checkpoint
from mhacli.models.runs.run import CheckpointRun
from mhacli.record.effect import EFFECT_NUMBERS, Effect, EffectSummary, Screening
from mhacli.record.record import Record
from mhacli.record.tables import EffectTable
from mhacli.run import Run

_MASKS = ("[MASK]", "<mask>")


def run_of(loaded: Loaded, texts: ModelInputs, request: Run) -> CheckpointRun:
    """The run of texts by a checkpoint without its head."""
    base = replace(loaded, model=loaded.model.base_model)
    return CheckpointRun(base, inputs_of(loaded, texts, request.model), request)


def study_of(loaded: Loaded, run: CheckpointRun, settings: EffectSettings, record: Record, request: Run) -> EffectStudy:
    """The study of one text of a checkpoint with its head, whose layers a run has inspected."""
    study = EffectStudy(loaded.model, run.inputs.keywords, settings, request=request, record=record)
    study.tokenizer, study.inspected = loaded.tokenizer, run
    return study


@torch.no_grad()
def checkpoint_study(request: Run, settings: EffectSettings) -> tuple[EffectStudy, tuple[str, ...]]:
    """The study of a checkpoint that is loaded and whose layers are inspected here, and notes for the user."""
    loaded, run, notes = prepare_checkpoint(request, "predict")
    _require_one_text(len(run.inputs.sequences))
    run.wanted = replace(request, model=replace(request.model, layers=None), keep=())
    run.run()
    return study_of(loaded, run, settings, run.record(), request), notes


@torch.no_grad()
def layer_study(run: Run, settings: EffectSettings) -> tuple[EffectStudy, tuple[str, ...]]:
    """The study of a layer whose run is recorded here, as a model of one layer, and notes for the user. Raises `UsageError` for
    a layer with dropout, whose runs differ."""
    _require_one_text(run.facts.batch)
    if run.config.train and run.config.dropout:
        raise UsageError("mha effect measures a layer without dropout", hint="leave out --train")
    setup = prepare(run)
    record, _ = record_run(setup, run)
    x, context, places = setup.inputs()
    model: Any = nn.Module()
    model.add_module("attention" if context is None else "cross_attention", setup.layer.attention)
    model.out_proj = nn.Identity()  # its input is z in a layer without a projection
    more = {"allowed": setup.allowed, "bias": setup.bias, "places": places}
    model.forward = lambda query, key: model.out_proj(setup.layer.attention(query, key, **more)[0])
    return EffectStudy(model.eval(), {"query": x, "key": context}, settings, request=run, record=record), run.notes


def _require_one_text(n: int) -> None:
    if n != 1:
        raise UsageError(f"mha effect takes one text, and {n} are given", hint="give each text in a run of its own")


def verified(record: Record, code: str = "self-check") -> Record:
    """A record of effects. Raises `MhaError` if the second computation of removals disagrees."""
    if record.effect is not None and not record.effect.verified.ok:
        message = "a second computation of the removals disagrees with the first"
        raise MhaError(message, code=code, exit_code=EXIT_CHECK)
    return record


@dataclass(kw_only=True)
class EffectStudy(EffectRun):
    """The removals that settings ask for, and the record of their effects, which `run` computes.

    `record` is that of the inspected pass, with all layers; `request` chooses layers and heads among them. `inspected` is the run
    of a checkpoint, which foresees memory.
    """

    request: Run
    record: Record
    tokenizer: ModelTokenizer | None = None
    inspected: CheckpointRun | None = None

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress) -> Record:
        """The record of the inspected pass with the effects. Raises `MhaError` for heads and tokens that do not exist, and for
        removals that do not fit in memory."""
        self.has_batches = self.metric is None and (hasattr(self.model, "config") or not self.record.layers)
        self.position = self._position()
        self.target = self._target()
        self.plan = self._plan()
        if self.inspected is not None and not self.start:  # otherwise a batch is a single short row
            self.inspected.require_room(max(LEAST_ROWS, self._rows_at_once))
        self.compute(report_progress)
        check = self.record.self_check.and_holds(self.verified.ok)
        table = EffectTable(self._effect(item) for item in sorted(self.results))
        return replace(self.record, self_check=check, effects=table, effect=self._summary())

    # ------------------------------------------------------------------------------------------------ what is removed

    def _plan(self) -> list[tuple[Removal, ...]]:
        settings, at = self.settings, self.settings.at
        n_heads = {key: z.shape[1] for key, z in self.parts.z.items()}
        for kind, n in self.request.model.layers or ():
            if not any(number == n and kind in (None, own) for own, number in n_heads):
                raise self._no_layer("layers", str(n) if kind is None else f"{kind}.{n}")
        layers = [key for key in n_heads if self.request.model.includes(key[1], key[0])]
        if settings.cut is not None:
            return [self._cut(layers, *settings.cut)]
        heads = self._heads(layers, n_heads)
        if not heads:
            raise UsageError(
                f"{self.settings.name_of('heads')} and {self.settings.name_of('layers')} name nothing to remove"
            )
        if settings.edges:
            every = [(key, tuple(range(n_heads[key]))) for key in layers]
            return self._edges(every if settings.heads is None else [(key, (head,)) for key, head in heads])
        n_places = min(z.shape[2] for key, z in self.parts.z.items() if key in layers)
        if at is not None and at >= n_places:
            raise UsageError(out_of_range(self.settings.name_of("at"), at, n_places))
        places, replacement = () if at is None else (at,), settings.replace or "zero"
        made = [Removal(key, (head,), places, replace=replacement) for key, head in heads]
        joint = [tuple(made)] if settings.heads is not None and len(made) > 1 else []
        return [*((removal,) for removal in made), *joint]

    def _heads(self, layers: Sequence[LayerKey], n_heads: Mapping[LayerKey, int]) -> list[tuple[LayerKey, int]]:
        """The heads to remove, in the order of the layers."""
        if self.settings.heads is None:
            shown = self.request.statistics.heads
            return [(key, head) for key in layers for head in shown or range(n_heads[key])]
        kinds, chosen = {kind for kind, _ in n_heads}, set[tuple[int, int]]()
        own = next(kind for kind in ("self", "decoder", "cross", "encoder") if kind in kinds)
        for kind, n, head in self.settings.heads:
            key: LayerKey = (kind or own, n or 0)
            place = ".".join(str(part) for part in (kind, n, head) if part is not None)
            if key not in layers or (n is None and len(n_heads) > 1):
                raise self._no_layer("heads", place)
            if head >= n_heads[key]:
                raise UsageError(out_of_range(f"{self.settings.name_of('heads')} {place}: head", head, n_heads[key]))
            chosen.add((layers.index(key), head))
        return [(layers[place], head) for place, head in sorted(chosen)]

    def _no_layer(self, parameter: str, place: str) -> UsageError:
        known = [*self.parts.z]
        are_alike = len({kind for kind, _ in known}) == 1
        listed = ", ".join(str(n) if are_alike else f"{kind}.{n}" for kind, n in known)
        message = f"{self.settings.name_of(parameter)} {place} names no layer with attention"
        return UsageError(message, hint=f"layers with attention: {listed}")

    def _edges(self, heads: Sequence[tuple[LayerKey, tuple[int, ...]]]) -> list[tuple[Removal, ...]]:
        """The removals of the weights from the measured position to each key."""
        is_pair, query = self.record.context is not None, self.position
        own = [(key, of) for key, of in heads if key[0] != "encoder" or not is_pair]
        if not own or (self.settings.heads is not None and own != heads):
            message = f"{self.settings.name_of('edges')} removes weights of the decoder, not of the encoder"
            raise UsageError(message, hint="decoder.5.1 and cross.5.1 are heads of the decoder, decoder.5 is a layer")
        n_keys = {key: cells.shape[1] for key, cells in self.parts.visible.items()}
        return [(Removal(key, of, (query,), (k,), "renormalise"),) for key, of in own for k in range(n_keys[key])]

    def _cut(self, layers: Sequence[LayerKey], source: str, reader: str) -> tuple[Removal, ...]:
        spans = {span.name: span.tokens[0] for span in self.record.spans}
        for name in (source, reader):
            if not spans.get(name):
                hint = f"--span '{name}=/…/' names a part of the text"
                raise UsageError(f"--cut names the span {name!r}, which has no token", hint=hint)
        return tuple(Removal(key, (), spans[reader], spans[source], "renormalise") for key in layers)

    # --------------------------------------------------------------------------------------------- where it is measured

    def _position(self) -> int:
        asked, tokens = self.settings.position, self.record.sequences[0].tokens  # of a pair, those of the decoder
        n = len(tokens)
        if asked is None:
            return next((i for i, token in enumerate(tokens) if token.strip() in _MASKS), n - 1)
        if not -n <= asked < n:
            raise UsageError(out_of_range(self.settings.name_of("position"), asked, n))
        return asked % n

    def _target(self) -> Target | None:
        asked, scores = self.settings, self.untouched.scores
        if scores is not None:
            target = int(scores[0].argmax()) if asked.target is None else self._id("target", asked.target)
            return target, None if asked.versus is None else self._id("versus", asked.versus)
        for name in ("screen", "target", "versus"):
            if getattr(asked, name) is not None:
                hint = "without it, the change of the output vector is measured"
                raise UsageError(
                    f"{self.settings.name_of(name)} needs logits, which this model does not give", hint=hint
                )
        return None

    def _id(self, parameter: str, word: str | int) -> int:
        """The number of a token, class or tag."""
        name, (measured, _, scores, _) = self.settings.name_of(parameter), self.untouched
        assert scores is not None
        if isinstance(word, str) and measured == "token" and self.tokenizer is not None:
            sequence = self.tokenizer.sequence(word, special=False)
            if not sequence.ids or (len(sequence.ids) > 1 and not self.settings.target_first):
                pieces = " ".join(repr(token) for token in sequence.tokens)
                hint = f"{self.settings.name_of('target_first')} takes the first of them"
                raise UsageError(f"{name} {word!r} is {len(sequence.ids)} tokens: {pieces}", hint=hint)
            if sequence.unknown(0) is not None:
                raise UsageError(f"{name} {word!r} is not in the vocabulary of the tokenizer")
            return sequence.ids[0]
        n = scores.shape[1]
        names = {} if measured == "token" else {self._outcome(i): str(i) for i in range(n)}
        number = names.get(str(word), str(word))
        if not number.isdecimal() or int(number) >= n:
            hint = f"it is one of: {', '.join([*names][:20])}" if names else f"give an id up to {n - 1}"
            raise UsageError(f"{name} {word!r} is not a {measured} of the model", hint=hint)
        return int(number)

    def _outcome(self, n: int) -> str:
        """The name of a token, class, tag or answer."""
        measured = self.untouched.measured
        if measured == "span":
            tokens = self.record.sequences[0].tokens
            start, end = divmod(n, len(tokens))
            return " ".join(tokens[start : end + 1]) or f"{start} to {end}"
        if measured in ("score", "metric"):
            return measured
        if measured != "token":
            return str((getattr(getattr(self.model, "config", None), "id2label", None) or {}).get(n, n))
        return str(n) if self.tokenizer is None else self.tokenizer.of_ids([n]).tokens[0]

    # ------------------------------------------------------------------------------------------------------- the record

    def _effect(self, item: int) -> Effect:
        removals, spans = self.plan[item], self.settings.cut or ()
        first, is_alone, kinds = removals[0], len(removals) == 1, tuple(removal.layer[0] for removal in removals)
        is_edge = first.keys is not None
        numbers: dict[str, Any] = {name: self.change(item, name) for name in EFFECT_NUMBERS}
        several: Any = "spans" if spans else "heads"
        return Effect(
            layer=first.layer[1] if is_alone else None,
            kind=first.layer[0],
            head=first.heads[0] if is_alone and len(first.heads) == 1 else None,
            query=first.queries[0] if is_edge and is_alone else None,
            key=first.keys[0] if first.keys and is_alone else None,
            removed=several if spans or not is_alone else "edge" if is_edge else "head",
            replace=first.replace,
            at=first.queries[0] if first.queries and not is_edge else None,
            heads=() if is_alone or is_edge else tuple((r.layer[1], r.heads[0]) for r in removals),
            spans=spans,
            layers=tuple(r.layer[1] for r in removals) if spans else (),
            masked=item in self.masked,
            kinds=kinds if len(set(kinds)) > 1 else (),
            **numbers,
        )

    def _summary(self) -> EffectSummary:
        target, versus = self.target or (None, None)
        numbers: dict[str, Any] = dict.fromkeys(("logit", "logprob", "rank"))
        numbers |= {name: value[0].item() for name, value in values(self.untouched, self.target).items()}
        return EffectSummary(
            metric=self.measure,
            position=self.position,
            target=None if target is None else self._outcome(target),
            target_id=target,
            versus=None if versus is None else self._outcome(versus),
            versus_id=versus,
            **numbers,
            floor=self.floor(self.measure),
            n_passes=self.n_batches,
            verified=self.verified,
            screening=None if self.settings.screen is None else self._screening(self.settings.screen),
            measured=self.untouched.measured,
        )

    def _screening(self, n: int) -> Screening:
        """The rank correlation of the sizes of estimates and computed effects, None if either are all equal."""
        sizes = [
            [abs(self.change(item, name) or 0.0) for item in self.results] for name in ("first_order", self.measure)
        ]
        ranks = [torch.sign(one[:, None] - one).sum(dim=1) for one in torch.tensor(sizes, dtype=torch.float64)]
        length = float(ranks[0].norm() * ranks[1].norm())
        correlation = round(float(ranks[0] @ ranks[1]) / length, 12) if length else None
        n_all, n_largest = len(self.estimates), min(n, len(self.estimates))
        return Screening(n_all, n_largest, len(self.results) - n_largest, correlation)
