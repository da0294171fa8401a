"""Inspects the attention of a checkpoint in one unchanged pass, each layer as it is computed.

Each layer is reduced to statistics, or its matrices are kept, before the next one runs: memory holds one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
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
from mhacli.models.layer_names import n_attentions_of, size_of
from mhacli.models.layers import KEPT, PassInspection, axes_of, entry_of
from mhacli.models.load import Loaded
from mhacli.models.runs.memory import CheckpointFacts
from mhacli.record.record import Generated, Record
from mhacli.run import Run
from mhacli.text.tokens import AttentionKind


@dataclass
class CheckpointRun:
    """A run of a checkpoint with inspection, started by `run`, after which `layers` and `record` have the finished layers."""

    loaded: Loaded
    inputs: ModelInputs
    wanted: Run
    generated: Generated | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None
    compared_len: int = 0
    peak_bytes: int = 0
    layers: PassInspection = field(init=False)

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
    def run(
        self,
        report_progress: Progress = no_progress,
        *,
        verify: bool = False,
        on_layer: Callable[[Call, Attention], None] | None = None,
    ) -> None:
        """Runs an inspected pass, and if requested a pass without inspection, whose outputs must be the same bits. `on_layer`
        gets each requested attention before it is reduced."""
        self.foresee()  # the cells to keep may have changed since the last prediction
        began, model, keywords = perf_counter(), self.loaded.model, self.inputs.keywords
        self.layers = PassInspection(
            model,
            self.inputs,
            self.wanted,
            self.n_layers,
            on_layer=on_layer,
            report_progress=report_progress,
            peak_bytes=self.peak_bytes,
        )
        report_progress(0.0, "the first layer")
        with captured(model, self.layers.take, batch=len(self.inputs.sequences)):
            outputs = outputs_of(model, keywords)
        self.seconds["pass and statistics"] = perf_counter() - began
        if not self.layers.results:
            raise self._nothing_seen()
        if verify or self.wanted.model.verify_outputs:
            began = perf_counter()
            self.compared_len = max(tensor.shape[1] for tensor in keywords.values())
            self.identical = are_identical(outputs, outputs_of(model, keywords))
            self.seconds["comparison"] = perf_counter() - began

    def _nothing_seen(self) -> MhaError:
        """The error if no requested attention can be shown: some were found but not requested, others are unfit."""
        family, chosen, layers = self.loaded.config.model_type, self.wanted.model, self.layers
        unfit = [reason for (kind, layer), reason in layers.unfit.items() if chosen.includes(layer, kind)]
        if unfit:
            return MhaError(
                f"the attention of {family} is not laid out by tokens: {unfit[0]}",
                hint="its queries and keys are not tokens of the text, so mha cannot label them",
                code="not-tokens",
            )
        if layers.found and chosen.layers is not None:
            numbers = ", ".join(str(n) for n in sorted({layer for _, layer in layers.found}))
            asked = ",".join(str(n) for _, n in chosen.layers)
            return MhaError(f"--layer {asked} has no attention; layers with attention: {numbers}", code="no-layer")
        return MhaError(
            f"no attention was found in {family}",
            hint="layers without a matrix of queries × keys, such as state-space layers, cannot be inspected",
            code="no-attention",
        )

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
