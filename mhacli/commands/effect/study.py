"""The study of effects: from a request to the record, with the removals, the target, and the statistics of the heads."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from mhacli.attention.devices import free_bytes
from mhacli.attention.memory import CheckpointFacts
from mhacli.commands.effect.metric import Changes, Target, compared, makes_single_logits, rank_correlation, rank_of
from mhacli.commands.effect.removal import Removal
from mhacli.commands.effect.run import Cost, EffectRun, Floor
from mhacli.commands.effect.settings import EffectSettings
from mhacli.compute.checkpoint.prepare import ReadCheckpoint, read
from mhacli.compute.checkpoint.run import CheckpointRun
from mhacli.errors import UsageError, out_of_range
from mhacli.io.progress import Progress, no_progress
from mhacli.models.layer_names import LayerKey
from mhacli.record.effect import Effect, EffectSummary, Screening
from mhacli.record.record import InspectedLayer, Record
from mhacli.record.tables import EffectTable
from mhacli.run import Run

_MASKS = ("[MASK]", "<mask>")


@torch.no_grad()
def prepare_effect(request: Run, settings: EffectSettings) -> tuple[EffectStudy, tuple[str, ...]]:
    """The study, and notes for the user. Raises `MhaError` for a request that cannot work."""
    began = perf_counter()
    checkpoint = read(request, "predict")
    loaded, texts = checkpoint.loaded, checkpoint.texts
    if len(checkpoint.inputs.sequences) != 1:
        raise UsageError(
            f"mha effect takes one text, and {len(checkpoint.inputs.sequences)} are given",
            hint="give each text in a run of its own",
        )
    base = replace(loaded, model=loaded.model.base_model)
    run = CheckpointRun(base, checkpoint.inputs, of_all_layers(request), texts.spans)
    run.foresee()
    run.seconds["loading"] = perf_counter() - began
    return EffectStudy(request, settings, checkpoint, run), (*loaded.notes, *texts.notes)


def of_all_layers(request: Run) -> Run:
    """The run that inspects the heads of all layers and keeps no matrix, in which removals are chosen."""
    return replace(request, model=replace(request.model, layers=None), keep=())


@dataclass
class EffectStudy:
    """The statistics of all heads and the effects of removals: call `inspect`, then `run`; `record` has the results."""

    request: Run
    settings: EffectSettings
    checkpoint: ReadCheckpoint
    inspected: CheckpointRun
    effects: EffectRun = field(init=False)

    def inspect(self) -> Cost:
        """Runs the inspected pass and returns the cost of the removals. Raises `MhaError` for heads and tokens that do not
        exist, and for removals that do not fit in memory."""
        self.inspected.run()
        position = self._position()
        self.effects = EffectRun(
            self.checkpoint.loaded,
            self.checkpoint.inputs.keywords,
            self._plan(position),
            position,
            n_verified=self.settings.verify,
            n_screened=self.settings.screen,
        )
        cost = self.effects.foresee(self._facts(), free_bytes(self.request.model.device))
        self.effects.target = self._target()
        return cost

    def run(self, report_progress: Progress = no_progress) -> None:
        """Computes the removals, after `inspect`."""
        self.effects.run(report_progress)

    def _facts(self) -> CheckpointFacts:
        model, facts = self.checkpoint.loaded.model, self.inspected.facts()
        n_vocabulary = model.get_output_embeddings().weight.shape[0] if self._has_head else 0
        n_logits = 1 if makes_single_logits(model) else facts.length
        return replace(facts, n_vocabulary=n_vocabulary, n_logits=n_logits)

    # ------------------------------------------------------------------------------------------------ what is removed

    def _plan(self, position: int) -> list[tuple[Removal, ...]]:
        layers = self._layers()
        if self.settings.cut is not None:
            return [self._cut(layers, *self.settings.cut)]
        heads = self._heads(layers)
        if self.settings.edges:
            return self._edges(layers, heads, position)
        made = [self._head(key, head) for key, head in heads]
        joint = [tuple(made)] if self.settings.heads is not None and len(made) > 1 else []
        return [*((removal,) for removal in made), *joint]

    def _head(self, key: LayerKey, head: int) -> Removal:
        if self.settings.at is not None and self.settings.at >= (n := self.inspected.axes(key[0]).q_len):
            raise UsageError(out_of_range(self._named("at"), self.settings.at, n))
        return Removal(key, (head,), replace=(self.settings.replace or "zero"), at=self.settings.at)

    def _edges(
        self, layers: dict[LayerKey, InspectedLayer], heads: list[tuple[LayerKey, int]], query: int
    ) -> list[tuple[Removal, ...]]:
        """The removals of the weights from one query to each key, in each named head or in all heads of a layer together."""
        named: list[tuple[LayerKey, tuple[int, ...]]] = [(key, (head,)) for key, head in heads]
        if self.settings.heads is None:
            named = [(key, tuple(range(layer.n_heads))) for key, layer in layers.items() if key[0] != "encoder"]
        if not named or any(key[0] == "encoder" for key, _ in named):
            raise UsageError(
                f"{self._named('edges')} removes weights of a query of the decoder, and the encoder has queries of its own",
                hint=f"{self._named('heads')} decoder.5.1 and cross.5.1, and {self._named('layers')} decoder.5 have such queries",
            )
        return [
            (Removal(key, own, (query,), (k,), "renormalise"),)
            for key, own in named
            for k in range(self.inspected.axes(key[0]).k_len)
        ]

    def _cut(self, layers: dict[LayerKey, InspectedLayer], source: str, reader: str) -> tuple[Removal, ...]:
        spans = {span.name: span.tokens[0] for span in self.checkpoint.texts.spans}
        for name in (source, reader):
            if not spans.get(name):
                raise UsageError(
                    f"--cut names the span {name!r}, which " + ("has no token" if name in spans else "is not given"),
                    hint=f"--span '{name}=/…/' names a part of the text",
                )
        return tuple(
            Removal(key, tuple(range(layer.n_heads)), spans[reader], spans[source], "renormalise")
            for key, layer in layers.items()
        )

    def _layers(self) -> dict[LayerKey, InspectedLayer]:
        """The layers with removals, in the order in which they run."""
        layers = {(done.layer.kind, done.layer.layer): done.layer for done in self.inspected.results}
        asked = self.request.model.layers
        for kind, n in asked or ():
            if not any(number == n and kind in (None, own) for own, number in layers):
                raise UsageError(
                    f"{self._named('layers')} {n} has no attention", hint=f"layers with attention: {_listed(layers)}"
                )
        return {key: layer for key, layer in layers.items() if self.request.model.includes(key[1], key[0])}

    def _heads(self, layers: dict[LayerKey, InspectedLayer]) -> list[tuple[LayerKey, int]]:
        if self.settings.heads is None:
            shown = self.request.statistics.heads
            return [(key, head) for key, layer in layers.items() for head in shown or range(layer.n_heads)]
        own = "decoder" if self.checkpoint.inputs.context else "self"
        chosen = []
        for kind, n, head in self.settings.heads:
            place = str(n) if kind is None else f"{kind}.{n}"
            layer, name = layers.get((kind or own, n)), f"{self._named('heads')} {place}.{head}"  # type: ignore[arg-type]
            if layer is None:
                raise UsageError(
                    f"{name}: there is no layer {place} with attention",
                    hint=f"layers with attention: {_listed(layers)}",
                )
            if head >= layer.n_heads:
                raise UsageError(out_of_range(f"{name}: head", head, layer.n_heads))
            chosen.append(((layer.kind, layer.layer), head))
        return sorted(set(chosen), key=lambda item: (list(layers).index(item[0]), item[1]))

    # --------------------------------------------------------------------------------------------- where it is measured

    @property
    def _has_head(self) -> bool:
        model = self.checkpoint.loaded.model
        return hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None

    def _position(self) -> int:
        sequence, asked = self.checkpoint.inputs.sequences[0], self.settings.position
        n = len(sequence.ids)
        if asked is not None:
            if not -n <= asked < n:
                raise UsageError(out_of_range(self._named("position"), asked, n))
            return asked % n
        return next((i for i, token in enumerate(sequence.tokens) if token.strip() in _MASKS), n - 1)

    def _target(self) -> Target | None:
        asked = self.settings
        if not self._has_head:
            needing = {"screen": asked.screen, "target": asked.target, "versus": asked.versus}
            given = next((name for name, value in needing.items() if value is not None), None)
            if given is not None:
                raise UsageError(
                    f"{self._named(given)} needs a language head, which this model does not have",
                    hint="without it, the change of the output vector is measured",
                )
            return None
        versus = None if asked.versus is None else self._id("versus", asked.versus)
        if asked.target is not None:
            return Target(self._id("target", asked.target), versus)
        logits = self.effects.untouched.logits
        assert logits is not None
        return Target(int(logits[0].argmax()), versus)

    def _id(self, parameter: str, word: str | int) -> int:
        name = self._named(parameter)
        if isinstance(word, int):
            n = self._facts().n_vocabulary
            if not 0 <= word < n:
                raise UsageError(out_of_range(name, word, n))
            return word
        sequence = self.checkpoint.tokenizer.sequence(word, special=False)
        if not sequence.ids:
            raise UsageError(f"{name} {word!r} has no token")
        if len(sequence.ids) > 1 and not self.settings.target_first:
            pieces = " ".join(repr(token) for token in sequence.tokens)
            raise UsageError(
                f"{name} {word!r} is {len(sequence.ids)} tokens: {pieces}",
                hint=f"{self._named('target_first')} takes the first of them",
            )
        if sequence.unknown(0) is not None:
            raise UsageError(
                f"{name} {word!r} is not in the vocabulary of the tokenizer",
                hint=f"{name} {shlex.quote(sequence.tokens[0])} measures the token that stands for every such word",
            )
        return sequence.ids[0]

    def _named(self, parameter: str) -> str:
        """A parameter as the user names it: an option or an argument."""
        return self.settings.name_of(parameter)

    # ------------------------------------------------------------------------------------------------------- the record

    def table(self) -> EffectTable:
        """The effects of all finished removals."""
        done = self.effects
        return EffectTable(
            effect_of(
                done.plan[item],
                changes,
                done.floor,
                first_order=done.estimates.get(item),
                spans=self.settings.cut or (),
                is_masked=item in done.masked,
            )
            for item, changes in sorted(dict(done.results).items())
        )

    def record(self) -> Record:
        """The record of the inspected pass with the effects."""
        record, summary = self.inspected.record(), self._summary()
        check = record.self_check.and_holds(summary.verified.ok)
        return replace(record, self_check=check, effects=self.table(), effect=summary)

    def _summary(self) -> EffectSummary:
        done, target = self.effects, self.effects.target
        logits = done.untouched.logits
        logit = logprob = rank = None
        if target is not None and logits is not None:
            logit = float(compared(logits, target)[0])
            logprob, rank = float(logits.log_softmax(dim=-1)[0, target.id]), int(rank_of(logits, target.id)[0])
        return EffectSummary(
            metric=done.metric,
            position=done.position,
            target=None if target is None else self._token(target.id),
            target_id=None if target is None else target.id,
            versus=None if target is None or target.versus is None else self._token(target.versus),
            versus_id=None if target is None else target.versus,
            logit=logit,
            logprob=logprob,
            rank=rank,
            floor=done.floor(done.metric),
            n_passes=done.n_batches,
            verified=done.verified,
            screening=self._screening(),
        )

    def _screening(self) -> Screening | None:
        """The rank correlation of the estimates with the computed effects."""
        done, n = self.effects, self.settings.screen
        if n is None:
            return None
        floor = done.floor(done.metric)
        pairs = [(abs(done.estimates[item]), abs(done.size(item))) for item in done.results]
        estimated, found = zip(*((size if size > floor else 0.0, change) for size, change in pairs), strict=True)
        n_largest = min(n, len(done.estimates))
        return Screening(
            len(done.estimates), n_largest, len(done.results) - n_largest, rank_correlation(estimated, found)
        )

    def _token(self, token: int) -> str:
        empty = self.checkpoint.tokenizer.sequence("", special=False)
        return self.checkpoint.tokenizer.continued(empty, [token]).tokens[0]


def _listed(layers: dict[LayerKey, InspectedLayer]) -> str:
    kinds = {kind for kind, _ in layers}
    return ", ".join(str(n) if len(kinds) == 1 else f"{kind}.{n}" for kind, n in layers)


def effect_of(
    removals: tuple[Removal, ...],
    found: Changes,
    floor: Floor,
    *,
    first_order: float | None = None,
    spans: tuple[str, ...] = (),
    is_masked: bool = False,
) -> Effect:
    """The effect of removals that were made together, for the record."""
    first = removals[0]
    is_edge, is_alone = first.keys is not None, len(removals) == 1
    kinds = tuple(removal.layer[0] for removal in removals)

    def above(name: str, value: Tensor | float | None) -> float | None:
        return None if value is None else float(value) if abs(float(value)) > floor(name) else 0.0

    return Effect(
        layer=first.layer[1] if is_alone else None,
        kind=first.layer[0],
        head=first.heads[0] if is_alone and len(first.heads) == 1 else None,
        query=first.queries[0] if is_edge and is_alone else None,
        key=first.keys[0] if first.keys and is_alone else None,
        removed="spans" if spans else "edge" if is_edge else "head" if is_alone else "heads",
        replace=first.replace,
        at=first.at,
        d_logit=above("d_logit", found.d_logit),
        d_logprob=above("d_logprob", found.d_logprob),
        kl=above("kl", found.kl),
        rank=None if found.rank is None else int(found.rank),
        d_output=above("d_output", found.d_output) or 0.0,
        heads=() if is_alone or is_edge else tuple((r.layer[1], r.heads[0]) for r in removals),
        spans=spans,
        layers=tuple(r.layer[1] for r in removals) if spans else (),
        first_order=above("d_logit", first_order),
        masked=is_masked,
        kinds=kinds if len(set(kinds)) > 1 else (),
    )
