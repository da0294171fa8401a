"""The study of effects: many removals in a pass, each in a row of its own, some a second time by
other means, and the record.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mhacli.commands.effect.command import EffectSettings
from mhacli.commands.effect.metric import GivenMetric, RowOutputs, Target, changes, read, values
from mhacli.commands.effect.removal import (
    Parts,
    Removal,
    finding,
    removed_otherwise,
    repeated,
    stand_in,
    without,
)
from mhacli.errors import EXIT_CHECK, MhaError, UsageError, out_of_range
from mhacli.io.data import finite
from mhacli.io.long_work import Progress, no_progress
from mhacli.layer.run import Setup, record_run
from mhacli.models.capture import Call, captured
from mhacli.models.layer_names import LayerKey, config_of, dtype_of
from mhacli.models.load import ModelTokenizer
from mhacli.models.run import TIMES_SHAKEN, CheckpointRun, prepare_checkpoint, shaken_parts
from mhacli.record.checks import TOLERANCES, SelfCheck
from mhacli.record.effect import EFFECT_NUMBERS, Effect, EffectSummary, Screening
from mhacli.record.exports import EffectTable
from mhacli.record.record import Record
from mhacli.run import Run
from mhacli.text.tokens import Texts

LEAST_ROWS = 2
"""The rows of the smallest batch: one removal and an untouched row."""
TOKENS_AT_ONCE = 4096
"""The largest number of tokens in a batch, all rows together."""
PACKED_TOKENS = 512
"""The largest number of tokens in a sequence that holds many rows; attention computes all pairs of
them."""
_MOST_LOGITS = 1 << 24
"""The largest number of logits of a pass with such a sequence: in float64 they take 128 MiB, a few
times."""
_N_SHAKEN = 2
"""The number of passes that measure rounding."""
_PART_OF_CHANGE = 0.5
"""The fraction of the largest change by a removal above which rounding hides it, so that rounding
is no excuse for errors."""
_MASKS = ("[MASK]", "<mask>")


def study_of(run: CheckpointRun, settings: EffectSettings, record: Record) -> EffectStudy:
    """The study of one text of a checkpoint with its head, whose layers a run has inspected."""
    loaded, inputs = run.loaded, run.inputs.keywords
    return EffectStudy(loaded.model, inputs, settings, run.request, record, loaded.tokenizer, run)


@torch.no_grad()
def checkpoint_study(request: Run, settings: EffectSettings) -> tuple[EffectStudy, tuple[str, ...]]:
    """The study of a checkpoint that is loaded and whose layers are inspected here, and notes for
    the user.
    """
    run, notes = prepare_checkpoint(request, "predict")
    run.request = replace(request, model=replace(request.model, layers=None), keep=())
    record = run.run()
    run.request = request
    return study_of(run, settings, record), notes


@torch.no_grad()
def layer_study(
    run: Run, texts: Texts, settings: EffectSettings
) -> tuple[EffectStudy, tuple[str, ...]]:
    """The study of a layer whose run is recorded here, as a model of one layer, and notes for the
    user. Raises `UsageError` for a layer with dropout, whose runs differ.
    """
    if run.config.train and run.config.dropout:
        raise UsageError("mha effect measures a layer without dropout", hint="leave out --train")
    setup = Setup(run, texts)
    record, _ = record_run(setup)
    x, context = setup.inputs()
    model: Any = nn.Module()
    model.add_module("attention" if context is None else "cross_attention", setup.layer.attention)
    model.out_proj = nn.Identity()  # its input is z in a layer without a projection
    more = {"allowed": setup.allowed, "bias": setup.bias, "places": setup.queries.places}
    model.forward = lambda query, key: model.out_proj(setup.layer.attention(query, key, **more)[0])
    return EffectStudy(model.eval(), {"query": x, "key": context}, settings, run, record), run.notes


def effects_of_heads(record: Record) -> list[Effect | None]:
    """What the removal of each head of a record changes; None where it was not measured, as of a
    second call for its heads.
    """
    kinds = {(layer.layer, layer.name): layer.kind for layer in record.layers if layer.call == 1}
    effects: dict[Any, Effect] = {
        (effect.kind, effect.layer, effect.head): effect for effect in record.effects
    }
    return [
        effects.get((kinds.get((head.layer, head.attention)), head.layer, head.head))
        for head in record.heads
    ]


def verified(record: Record, code: str = "self-check") -> Record:
    """A record of effects. Raises `MhaError` if the second computation of removals disagrees."""
    if record.effect is not None and not record.effect.verified.ok:
        message = "a second computation of the removals disagrees with the first"
        raise MhaError(message, code=code, exit_code=EXIT_CHECK)
    return record


class _Result(NamedTuple):
    """The changes by parts that were removed together, and the output without them. Edges may have
    been masked already, or have left a query without any key.
    """

    changes: Mapping[str, float]
    vector: Tensor
    was_masked: bool
    is_emptied: bool


@dataclass
class EffectStudy:
    """The removals from one text that settings ask for, and the record of their effects, which
    `run` computes.

    `record` is that of the inspected pass, with all layers; `request` chooses layers and heads
    among them. `inspected` is the run of a checkpoint, which foresees memory. Each item of `plan`
    is a set of parts that are removed together.

    Each pass has a row for each of several items, and a last row without removals. The rows are
    whole texts in a batch; or, if nothing before position `start` changes and the model can
    continue from its cache of keys and values, they are tokens of one sequence, which see those
    before `start` and themselves. A model without batches has a pass for each item.
    """

    model: Any
    inputs: Mapping[str, Any]
    settings: EffectSettings
    request: Run
    record: Record
    tokenizer: ModelTokenizer | None = None
    inspected: CheckpointRun | None = None
    metric: GivenMetric | None = None
    plan: Sequence[tuple[Removal, ...]] = ()
    target: Target | None = None
    estimates: dict[int, float] = field(default_factory=dict)
    results: dict[int, _Result] = field(default_factory=dict)
    n_passes: int = 0
    _floors: dict[str, float] = field(default_factory=dict)
    _errors: list[float] = field(default_factory=list)

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress) -> Record:
        """The record of the inspected pass with the effects, of which some are verified. Raises
        `MhaError` for heads and tokens that do not exist, for an attention that removals cannot
        reach, and for removals that do not fit in memory.
        """
        self.target, self.plan = self._target(), self._plan()
        if self.inspected is not None and not self.start:  # otherwise a batch is a single short row
            self.inspected.require_room(max(LEAST_ROWS, self.most_rows))
        report_progress(0.0, "the untouched pass")
        items: Sequence[int] = range(len(self.plan))
        if self.settings.screen is not None:
            self._estimate()
            items = sorted(_largest_and_others(self.estimates, 2 * self.settings.screen))
        n_items = max(1, self.most_rows - 1 - (self.start > 0)) if self.has_batches else 1
        for _, alike in groupby(items, key=lambda item: self.start > 0 or self.plan[item][0].layer):
            while batch := list(islice(alike, n_items)):  # all begin at the same layer
                self._run_batch(batch)
                report_progress(min(1.0, len(self.results) / len(items)), "removing")
        summary = self._summary(self._verified())
        check = self.record.self_check.and_holds(summary.verified.ok)
        table = EffectTable(self._effect(item) for item in sorted(self.results))
        return replace(self.record, self_check=check, effects=table, effect=summary)

    # ------------------------------------------------------------------------------ what is removed

    def _plan(self) -> list[tuple[Removal, ...]]:
        settings, at, known = self.settings, self.settings.at, [*self.parts.z]
        for kind, n in self.request.model.layers or ():
            if not any(number == n and kind in (None, known_kind) for known_kind, number in known):
                raise self._unknown("layers", (kind, n))
        layers = [key for key in known if self.request.model.includes(key[1], key[0])]
        if settings.cut is not None:
            spans = {span.name: span.tokens[0] for span in self.record.spans}
            for name in settings.cut:
                if not spans.get(name):
                    hint = f"--span '{name}=/…/' names a part of the text"
                    raise UsageError(
                        f"--cut names the span {name!r}, which has no token", hint=hint
                    )
            keys, queries = (spans[name] for name in settings.cut)
            return [tuple(Removal(key, (), queries, keys, "renormalise") for key in layers)]
        heads = self._heads(layers)
        if not heads:
            raise UsageError(
                f"{settings.name_of('heads')} and {settings.name_of('layers')} name nothing to"
                " remove"
            )
        if settings.edges and settings.heads is None:
            return self._edges([(key, ()) for key in layers])
        if settings.edges:
            return self._edges([(key, (head,)) for key, head in heads])
        n_places = min(self.parts.z[key].shape[2] for key in layers)
        if at is not None and at >= n_places:
            raise UsageError(out_of_range(settings.name_of("at"), at, n_places))
        places, replacement = () if at is None else (at,), settings.replace or "zero"
        made = [Removal(key, (head,), places, replace=replacement) for key, head in heads]
        joint = [tuple(made)] if settings.heads is not None and len(made) > 1 else []
        return [*((removal,) for removal in made), *joint]

    def _heads(self, layers: Sequence[LayerKey]) -> list[tuple[LayerKey, int]]:
        """The heads to remove, in the order of the layers."""
        every = [(key, head) for key in layers for head in range(self.parts.z[key].shape[1])]
        if self.settings.heads is None:
            shown = self.request.statistics.heads
            return [(key, head) for key, head in every if shown is None or head in shown]
        kinds = {kind for kind, _ in self.parts.z}
        usual = next(kind for kind in ("self", "decoder", "cross", "encoder") if kind in kinds)
        chosen = [((kind or usual, n or 0), head) for kind, n, head in self.settings.heads]
        for place, given in zip(chosen, self.settings.heads, strict=True):
            if place not in every or (given[1] is None and len(self.parts.z) > 1):
                raise self._unknown("heads", given)
        return [place for place in every if place in chosen]

    def _unknown(self, parameter: str, place: Sequence[str | int | None]) -> UsageError:
        has_kinds = len({kind for kind, _ in self.parts.z}) > 1
        layers = ", ".join(f"{kind}.{n}" if has_kinds else str(n) for kind, n in self.parts.z)
        n_heads = max(z.shape[1] for z in self.parts.z.values())
        word = ".".join(str(part) for part in place if part is not None)
        message = f"{self.settings.name_of(parameter)} {word} does not exist"
        return UsageError(
            message, hint=f"there is attention in the layers {layers}, with {n_heads} heads from 0"
        )

    def _edges(
        self, heads: Sequence[tuple[LayerKey, tuple[int, ...]]]
    ) -> list[tuple[Removal, ...]]:
        """The removals of the weights from the measured position to each key."""
        is_pair, query = self.record.context is not None, (self.position,)
        of_query = [(key, of) for key, of in heads if key[0] != "encoder" or not is_pair]
        if not of_query or (self.settings.heads is not None and of_query != heads):
            message = (
                f"{self.settings.name_of('edges')} removes weights of the decoder, not of the"
                " encoder"
            )
            raise UsageError(
                message,
                hint="decoder.5.1 and cross.5.1 are heads of the decoder, decoder.5 is a layer",
            )
        return [
            (Removal(layer, of, query, (key,), "renormalise"),)
            for layer, of in of_query
            for key in range(self.parts.visible[layer].shape[1])
        ]

    # ------------------------------------------------------------------------- where it is measured

    @cached_property
    def position(self) -> int:
        """The measured position of the text; of a pair, of that of the decoder."""
        position, tokens = self.settings.position, self.record.sequences[0].tokens
        n = len(tokens)
        if position is None:
            return next((i for i, token in enumerate(tokens) if token.strip() in _MASKS), n - 1)
        if not -n <= position < n:
            raise UsageError(out_of_range(self.settings.name_of("position"), position, n))
        return position % n

    def _target(self) -> Target | None:
        settings, (measured, _, scores, _) = self.settings, self.untouched
        if (
            measured in ("class", "score", "span", "metric")
            and settings.position is not None
            and not settings.edges
        ):
            message = (
                f"{settings.name_of('position')} changes nothing: the {measured} is that of the"
                " whole text"
            )
            raise UsageError(message, hint=f"leave {settings.name_of('position')} out")
        if scores is not None:
            target = (
                int(scores[0].argmax())
                if settings.target is None
                else self._id("target", settings.target)
            )
            return target, None if settings.versus is None else self._id("versus", settings.versus)
        for name in ("screen", "target", "versus"):
            if getattr(settings, name) is not None:
                message = f"{settings.name_of(name)} needs logits, which this model does not give"
                raise UsageError(
                    message, hint="without it, the change of the output vector is measured"
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
                raise UsageError(
                    f"{name} {word!r} is {len(sequence.ids)} tokens: {pieces}", hint=hint
                )
            if sequence.unknown(0) is not None:
                raise UsageError(f"{name} {word!r} is not in the vocabulary of the tokenizer")
            return sequence.ids[0]
        n = scores.shape[1]
        names = {} if measured == "token" else {self._outcome(i): str(i) for i in range(n)}
        number = names.get(str(word), str(word))
        if not number.isdecimal() or int(number) >= n:
            hint = (
                f"it is one of: {', '.join([*names][:20])}"
                if names
                else f"give an id up to {n - 1}"
            )
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
            return str(
                (getattr(getattr(self.model, "config", None), "id2label", None) or {}).get(n, n)
            )
        return str(n) if self.tokenizer is None else self.tokenizer.of_ids([n]).tokens[0]

    # ----------------------------------------------------------------------------------- the passes

    @cached_property
    def has_batches(self) -> bool:
        """Whether a pass can have several rows. A classifier of texts without an id for padding
        takes one.
        """
        if (
            self.untouched.measured in ("class", "score")
            and (config := config_of(self.model)) is not None
        ):
            return getattr(config.get_text_config(), "pad_token_id", None) is not None
        return self.metric is None and (hasattr(self.model, "config") or not self.record.layers)

    @cached_property
    def untouched(self) -> RowOutputs:
        """The output of a plain pass without capture."""
        return self._read()

    @cached_property
    def parts(self) -> Parts:
        """The parts of the model, found in one pass in which every z was replaced by itself. Its
        output has keys and values if later passes may begin behind them.
        """
        parts, settings, config = Parts(), self.settings, getattr(self.model, "config", None)
        begins_later = settings.at is not None or settings.edges or settings.cut is not None
        can_cache = (
            self.has_batches
            and set(self.inputs) == {"input_ids"}
            and getattr(config, "use_cache", False)
        )
        with finding(self.model, parts):
            parts.output = (
                self._read(use_cache=True) if can_cache and begins_later else self._read()
            )
        if not parts.z:
            hint = "its z is not seen where a model computes attention in a way of its own"
            raise MhaError(
                "no attention gives head outputs that could be replaced",
                hint=hint,
                code="no-attention",
            )
        return parts

    @cached_property
    def start(self) -> int:
        """The position at which passes begin, 0 if rows cannot continue from the keys and values
        before it.
        """
        cache, queries = (
            self.parts.output.cache,
            [removal.queries for item in self.plan for removal in item],
        )
        start = min(self.position, *(min(of_removal, default=0) for of_removal in queries))
        if cache is None or not start or (self.position + 1 - start) * LEAST_ROWS > PACKED_TOKENS:
            return 0
        try:
            cache.crop(start - self.inputs["input_ids"].shape[1])
            outputs = self._read_packed(start, LEAST_ROWS)
        except (
            MhaError,
            RuntimeError,
            ValueError,
            AttributeError,
        ):  # it needs other positions, or cannot be cut
            return 0
        is_same = (
            len(outputs.vector) == LEAST_ROWS
            and _difference(outputs, self.untouched) <= self._usual_tolerance
        )
        return start if is_same else 0

    @cached_property
    def most_rows(self) -> int:
        """The largest number of rows of a pass."""
        if not self.start:
            tensors = [
                value
                for value in self.inputs.values()
                if isinstance(value, Tensor) and value.ndim > 1
            ]
            return max(1, TOKENS_AT_ONCE // max([1, *(tensor.shape[1] for tensor in tensors)]))
        width, scores = self.position + 1 - self.start, self.untouched.scores
        return min(
            PACKED_TOKENS // width, _MOST_LOGITS // (1 if scores is None else scores.shape[1])
        )

    def _read(self, **more: Any) -> RowOutputs:
        """The output of a pass over the text."""
        return read(self.model, {**self.inputs, **more}, [self.position], self.metric)

    def _read_packed(self, start: int, n_rows: int) -> RowOutputs:
        """The output of one sequence in which the tokens from `start` to the position stand
        `n_rows` times.
        """
        ids = self.inputs["input_ids"][:, start : self.position + 1]
        width = ids.shape[1]
        is_causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        seen = torch.nn.functional.pad(
            torch.block_diag(*[is_causal] * n_rows), (start, 0), value=True
        )
        dtype, cache = dtype_of(self.model), copy.copy(self.parts.output.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        inputs = {
            "input_ids": ids.repeat(1, n_rows),
            "position_ids": (
                torch.arange(start, self.position + 1, device=ids.device).repeat(n_rows)[None]
            ),
            "attention_mask": torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None],
            "past_key_values": cache,
        }
        return read(self.model, inputs, range(width - 1, n_rows * width, width))

    def _run_batch(self, items: Sequence[int]) -> None:
        """The changes by some items, from the last row of the same pass, or from the plain pass of
        a model without batches.
        """
        layers = {removal.layer for item in items for removal in self.plan[item]}
        visible, emptied, is_packed = set[int](), set[int](), self.start > 0
        rows, n_rows = dict(enumerate(items, is_packed)), len(items) + is_packed + self.has_batches
        removals = {row: self.plan[item] for row, item in rows.items()}
        width = self.position + 1 - self.start if is_packed else 0

        def take(call: Call) -> Tensor | None:
            key = (call.kind, call.layer)
            of_text = self.parts.z_of(call)
            if key not in layers or of_text is None:
                return None
            z, *found = without(call, removals, start=self.start, width=width, of_text=of_text)
            visible.update(found[0])
            emptied.update(found[1])
            return z

        with captured(self.model, take, batch=1 if is_packed else n_rows):
            if is_packed:
                outputs = self._read_packed(self.start, n_rows)
            else:
                with self.parts.skipped(layers, n_rows):
                    inputs = {name: repeated(value, n_rows) for name, value in self.inputs.items()}
                    outputs = read(self.model, inputs, [self.position], self.metric, n_rows=n_rows)
        last = outputs.row(-1) if self.has_batches else self.untouched
        moved = changes(outputs, last, self.target)
        for name, noise in changes(last, self.untouched, self.target).items():
            of_first = moved[name][0].abs() if is_packed else 0
            self._floors[name] = max(self._floors.get(name, 0.0), float(noise.abs() + of_first))
        self._errors.append(
            _difference(last, self.untouched)
        )  # rows without removals must be right too
        self.n_passes += 1
        for row, item in rows.items():
            of_row = {name: change[row].item() for name, change in moved.items()}
            of_row |= {"first_order": self.estimates[item]} if item in self.estimates else {}
            self.results[item] = _Result(
                of_row, outputs.vector[row], row not in visible, row in emptied
            )

    def _estimate(self) -> None:
        """Estimates the change by removing each head to first order, by the gradient of the measure
        by the z of each attention. Source: Nanda 2023, Attribution Patching.
        """
        added = list[tuple[LayerKey, Tensor, Tensor]]()

        def take(call: Call) -> Tensor | None:
            z = self.parts.z_of(call)
            if z is None or call.z is None:
                return None
            change = torch.zeros_like(z, requires_grad=True)
            added.append(((call.kind, call.layer), z, change))
            return call.z + change

        with torch.enable_grad(), captured(self.model, take, batch=1):
            measure = values(self._read(), self.target)["logit"][0]
            gradients = torch.autograd.grad(
                measure, [change for *_, change in added], allow_unused=True
            )
        for item, (removal,) in enumerate(self.plan):
            (head,), places = removal.heads, [*removal.queries] or slice(None)
            for (layer, of_layer, _), gradient in zip(added, gradients, strict=True):
                if layer == removal.layer and gradient is not None:
                    z = of_layer[0, head].double()
                    moved = (stand_in(z, removal.replace) - z) * gradient[0, head].double()
                    self.estimates[item] = self.estimates.get(item, 0.0) + float(
                        moved[places].sum()
                    )

    # ----------------------------------------------------------------------------- the verification

    def _verified(self) -> SelfCheck:
        """The check of the items with the largest changes, and of as many others: each is repeated
        with a second method.

        The tolerance is known before. It is that of two runs in the dtype, or, if it is more, what
        rounding does to this model, as long as it hides no change by the removals."""
        tolerance, errors = self._usual_tolerance, list[float]()
        dtype, moved = str(dtype_of(self.model)).removeprefix("torch."), 0.0
        if self.settings.verify and dtype != "float64":  # in which models compute only some parts
            for seed in range(_N_SHAKEN):
                with shaken_parts(self.model, seed):
                    moved = max(
                        moved, TIMES_SHAKEN[dtype] * _difference(self._read(), self.untouched)
                    )
            largest = max(
                _largest(result.vector - self.untouched.vector[0])
                for result in self.results.values()
            )
            tolerance = moved if tolerance < moved <= largest * _PART_OF_CHANGE else tolerance
        is_same = torch.equal(self.parts.output.vector, self.untouched.vector)
        sizes = {
            item: result.changes[self._measure]
            for item, result in self.results.items()
            if not result.is_emptied
        }
        for item in _largest_and_others(sizes, self.settings.verify):
            with removed_otherwise(self.plan[item], self.parts) as is_done:
                if is_done:
                    errors.append(_largest(self._read().vector[0] - self.results[item].vector))
        worst = max([*self._errors, *errors])
        return SelfCheck.of(worst, tolerance, holds=is_same, n=len(errors), identical=is_same)

    @property
    def _usual_tolerance(self) -> float:
        """The permitted difference of outputs in any model. Edges need a new softmax, which models
        without fused kernels compute in float32, whatever their dtype.
        """
        has_edges = self.settings.edges or self.settings.cut is not None
        is_single = (
            has_edges
            and getattr(getattr(self.model, "config", None), "_attn_implementation", None)
            == "eager"
        )
        names = [str(dtype_of(self.model)).removeprefix("torch."), *["float32"] * is_single]
        return _largest(self.untouched.vector) * max(TOLERANCES[name].runs for name in names)

    # ----------------------------------------------------------------------------------- the record

    @property
    def _measure(self) -> Literal["d_logit", "d_output"]:
        """The change by which removals are ranked."""
        return "d_output" if self.target is None else "d_logit"

    def _floor(self, name: str) -> float:
        """The noise floor of a change: twice the largest of a row without removals, and at least
        one rounding step.
        """
        scores = self.untouched.scores
        scale = 1.0 if name == "d_output" or scores is None else _largest(scores)
        return max(2 * self._floors.get(name, 0.0), torch.finfo(dtype_of(self.model)).eps * scale)

    def _change(self, item: int, name: str) -> float | None:
        """A change by a removal, 0 if it is noise, or its estimate; None if it was not measured."""
        value = self.results[item].changes.get(name)
        if value is None or name == "rank":
            return value
        return (
            value
            if abs(value) > self._floor(self._measure if name == "first_order" else name)
            else 0.0
        )

    def _effect(self, item: int) -> Effect:
        removals, spans = self.plan[item], self.settings.cut or ()
        first, is_alone, kinds = (
            removals[0],
            len(removals) == 1,
            tuple(removal.layer[0] for removal in removals),
        )
        is_edge = first.keys != ()
        numbers: dict[str, Any] = {name: self._change(item, name) for name in EFFECT_NUMBERS}
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
            masked=self.results[item].was_masked,
            kinds=kinds if len(set(kinds)) > 1 else (),
            **numbers,
        )

    def _summary(self, check: SelfCheck) -> EffectSummary:
        target, versus = self.target or (None, None)
        numbers: dict[str, Any] = dict.fromkeys(("logit", "logprob", "rank"))
        numbers |= {
            name: value[0].item() for name, value in values(self.untouched, self.target).items()
        }
        return EffectSummary(
            metric=self._measure,
            position=self.position,
            target=None if target is None else self._outcome(target),
            target_id=target,
            versus=None if versus is None else self._outcome(versus),
            versus_id=versus,
            **numbers,
            floor=self._floor(self._measure),
            n_passes=self.n_passes,
            verified=check,
            screening=(
                None if self.settings.screen is None else self._screening(self.settings.screen)
            ),
            measured=self.untouched.measured,
        )

    def _screening(self, n: int) -> Screening:
        """The rank correlation of the sizes of estimates and computed effects, None if either are
        all equal.
        """
        names = "first_order", self._measure
        rows = [[abs(self._change(item, name) or 0.0) for item in self.results] for name in names]
        sizes = torch.tensor(rows, dtype=torch.float64)
        ranks = torch.sign(sizes[:, :, None] - sizes[:, None]).sum(dim=2)
        correlation = finite(round(float(torch.corrcoef(ranks)[0, 1]), 12))
        n_all, n_largest = len(self.estimates), min(n, len(self.estimates))
        return Screening(n_all, n_largest, len(self.results) - n_largest, correlation)


def _largest(x: Tensor) -> float:
    """The largest size of a number."""
    return float(x.abs().max())


def _difference(one: RowOutputs, other: RowOutputs) -> float:
    """The largest difference of two outputs."""
    return _largest(one.vector - other.vector)


def _largest_and_others(sizes: Mapping[int, float], n: int) -> list[int]:
    """`n` items: half of them with the largest sizes, the others at random."""
    ranked = sorted(sizes, key=lambda item: -abs(sizes[item]))
    n_top = min(len(ranked), -(-n // 2))
    return ranked[:n_top] + random.Random(0).sample(
        ranked[n_top:], min(len(ranked) - n_top, n - n_top)
    )
