"""Inspects the attention of a checkpoint in one unchanged pass, each layer as it is computed.

Each layer is reduced to statistics, or its matrices are kept, before the next one runs: memory holds one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from mhacli.attention.devices import free_bytes
from mhacli.attention.head_statistics import Axes
from mhacli.attention.scores import Attention
from mhacli.errors import MhaError
from mhacli.io.progress import Progress, no_progress
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.inputs import ModelInputs, are_identical, outputs_of
from mhacli.models.layer_names import (
    LayerKey,
    n_attentions_of,
    size_of,
)
from mhacli.models.layers import (
    KEPT,
    LayerResults,
    PassInspection,
    axes_of,
    entry_of,
)
from mhacli.models.load import Loaded
from mhacli.models.runs.memory import CheckpointFacts
from mhacli.record.record import Generated, Record
from mhacli.run import Run
from mhacli.text.tokens import AttentionKind, LayerChoice


@dataclass
class CheckpointRun:
    """A run of a checkpoint with inspection, started by `run`. `record` has the finished layers."""

    loaded: Loaded
    inputs: ModelInputs
    wanted: Run
    generated: Generated | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None
    compared_len: int = 0
    peak_bytes: int = 0
    on_layer: Callable[[Call, Attention], None] | None = None
    layers: PassInspection = field(init=False)

    def __post_init__(self) -> None:
        """Sets `layers`, without any finished one."""
        self.layers = self._inspection(no_progress)

    def _inspection(self, report_progress: Progress) -> PassInspection:
        return PassInspection(
            self.loaded.model,
            self.inputs,
            self.wanted,
            self.n_layers,
            on_layer=self.on_layer,
            report_progress=report_progress,
            peak_bytes=self.peak_bytes,
        )

    @property
    def results(self) -> list[LayerResults]:
        """The finished layers."""
        return self.layers.results

    @property
    def n_layers(self) -> int:
        """The expected number of attentions, according to the config."""
        config = self.loaded.config
        if self.wanted.model.layers is None:
            return max(1, n_attentions_of(config))
        return sum(3 if kind is None and config.is_encoder_decoder else 1 for kind, _ in self.wanted.model.layers)

    def facts(self) -> CheckpointFacts:
        """The sizes that determine the memory of a pass."""
        config, families = self.loaded.text_config, (self.inputs.sequences, self.inputs.context or ())
        name = getattr(self.loaded.config, "_attn_implementation", None)
        d_model = size_of(config, "hidden_size") or 1
        kept, keep = self.wanted.kept, KEPT if self.wanted.keep is None else self.wanted.keep
        corner = 0 if kept.corner is None else kept.corner.n_queries * kept.corner.n_keys
        return CheckpointFacts(
            batch=len(self.inputs.sequences),
            length=max(len(text.ids) for family in families for text in family),
            d_model=d_model,
            d_inner=size_of(config, "intermediate_size") or 4 * d_model,
            n_layers=self.n_layers,
            n_heads=size_of(config, "num_attention_heads") or 1,
            item_bytes=torch.empty(0, dtype=self.loaded.model.dtype).element_size(),
            holds_matrices=name != "sdpa",
            kept_matrices=len(keep) * self.n_layers,
            kept_cells=self.n_layers * (corner + 2 * len(kept.queries) * kept.top),
            keep_limit=self.wanted.keep_limit,
            on_gpu=self.loaded.device.type != "cpu",
        )

    def foresee(self) -> None:
        """Predicts the memory of the pass. Raises `MhaError` if it does not fit."""
        self.peak_bytes = self.facts().require(free_bytes(str(self.loaded.device)))

    @torch.no_grad()
    def run(self, report_progress: Progress = no_progress, *, verify: bool = False) -> None:
        """Runs an inspected pass, and if requested a pass without inspection, whose outputs must be the same bits."""
        self.foresee()  # the cells to keep may have changed since the last prediction
        began = perf_counter()
        self.layers = self._inspection(report_progress)
        report_progress(0.0, "the first layer")
        model, keywords = self.loaded.model, self.inputs.keywords
        with captured(model, self.layers.take, batch=len(self.inputs.sequences)):
            outputs = outputs_of(model, keywords)
        self.seconds["pass and statistics"] = perf_counter() - began
        if not self.results:
            raise self._nothing_seen()
        if verify or self.wanted.model.verify_outputs:
            began = perf_counter()
            self.compared_len = max(tensor.shape[1] for tensor in keywords.values())
            self.identical = are_identical(outputs, outputs_of(model, keywords))
            self.seconds["comparison"] = perf_counter() - began

    def _nothing_seen(self) -> MhaError:
        layers = self.layers
        unfit = [reason for (kind, layer), reason in layers.unfit.items() if self.wanted.model.includes(layer, kind)]
        return nothing_seen(self.loaded.config.model_type, self.wanted.model.layers, layers.found, unfit)

    def axes(self, kind: AttentionKind) -> Axes:
        """The texts on the query and key axes of an attention of this kind."""
        return axes_of(self.inputs, kind, self.loaded.dtype, self.loaded.device)

    def record(self) -> Record:
        """The record of the finished layers, at least one."""
        loaded = self.loaded
        model = replace(
            entry_of(loaded.model, loaded.source, loaded.revision),
            identical_outputs=self.identical,
            compared_len=self.compared_len,
            generated=self.generated,
        )
        record = self.layers.record(model, self.seconds, device=self.wanted.model.device)
        checkpoint = loaded.checkpoint
        config = replace(record.config, tokenizer=checkpoint.tokenizer or "word")
        return replace(record, config=config, weights=checkpoint.path)


def nothing_seen(
    family: str, chosen: tuple[LayerChoice, ...] | None, found: Sequence[LayerKey], unfit: Sequence[str]
) -> MhaError:
    """The error if no requested attention can be shown: some were `found` but not requested, others `unfit`."""
    if unfit:
        return MhaError(
            f"the attention of {family} is not laid out by tokens: {unfit[0]}",
            hint="its queries and keys are not tokens of the text, so mha cannot label them",
            code="not-tokens",
        )
    if found and chosen is not None:
        numbers = ", ".join(str(n) for n in sorted({layer for _, layer in found}))
        return MhaError(
            f"--layer {','.join(str(n) for _, n in chosen)} has no attention; layers with attention: {numbers}",
            code="no-layer",
        )
    return MhaError(
        f"no attention was found in {family}",
        hint="layers without a matrix of queries × keys, such as state-space layers, cannot be inspected",
        code="no-attention",
    )
