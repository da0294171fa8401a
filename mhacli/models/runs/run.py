"""Inspects the attention of a checkpoint in one unchanged pass, each layer as it is computed.

Each layer is reduced to statistics, or its matrices are kept, before the next one runs: memory holds one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import torch

from mhacli.attention.axes import Axes
from mhacli.attention.devices import free_bytes
from mhacli.attention.memory import FLOAT32_BYTES, require_room, statistics_bytes
from mhacli.attention.scores import Attention
from mhacli.io.progress import Progress, no_progress
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.inputs import ModelInputs, are_identical, outputs_of
from mhacli.models.layer_names import entry_of, places_of
from mhacli.models.layers import KEPT, PassInspection, axes_of, nothing_seen
from mhacli.models.load import Loaded, device_of
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
    layers: PassInspection = field(init=False)

    @property
    def length(self) -> int:
        """The number of tokens of the longest text."""
        return max(len(text.ids) for text in (*self.inputs.sequences, *(self.inputs.context or ())))

    @property
    def n_layers(self) -> int:
        """The expected number of attentions, according to the config."""
        chosen = self.wanted.model
        return max(1, sum(chosen.includes(layer, kind) for kind, layer in places_of(self.loaded.config)))

    # ------------------------------------------------------------------------------------------------------- its memory

    def _size(self, name: str) -> int:
        """A size in the config, the largest if it has one per layer; 1 if it is missing."""
        value = getattr(self.loaded.text_config, name, None) or 1
        return max(value) if isinstance(value, (list, tuple)) else int(value)

    def pass_bytes(self, batch: int, length: int) -> int:
        """The peak of a pass over `batch` texts in bytes, without the weights. A kept matrix exists once more while it is
        assembled."""
        n_heads, d_model, d_inner = map(self._size, ("num_attention_heads", "hidden_size", "intermediate_size"))
        item, cells, keep = int(self.loaded.model.dtype.itemsize), batch * length * length, self.wanted.keep
        n_kept = self.n_layers * len(KEPT if keep is None else keep)
        kept_bytes = min(self.wanted.keep_limit, n_kept * cells * n_heads * FLOAT32_BYTES)
        builds_matrices = getattr(self.loaded.config, "_attn_implementation", None) != "sdpa"
        matrices = 4 * (builds_matrices + (kept_bytes > 0)) * cells * n_heads * max(FLOAT32_BYTES, item)
        rows = batch * length * (8 * d_model + 3 * max(d_inner, 4 * d_model)) * item
        on_gpu = device_of(self.loaded.model).type != "cpu"
        statistics = statistics_bytes(batch, n_heads, (length, length), wide=FLOAT32_BYTES, on_gpu=on_gpu)
        return rows + matrices + 3 * cells + kept_bytes + statistics

    def require_room(self, batch: int) -> int:
        """The peak of a pass over `batch` texts in bytes. Raises `MhaError`, with the longest text that fits, if it does not fit
        in memory."""
        available, n_heads = free_bytes(str(device_of(self.loaded.model))), self._size("num_attention_heads")
        what = f"{self.length} tokens, {n_heads} heads, batch {batch}"
        return require_room(partial(self.pass_bytes, batch), self.length, available, what=what)

    # --------------------------------------------------------------------------------------------------------- the pass

    @torch.no_grad()
    def run(
        self,
        report_progress: Progress = no_progress,
        *,
        verify: bool = False,
        on_layer: Callable[[Call, Attention], None] | None = None,
    ) -> None:
        """Runs an inspected pass, and if requested a pass without inspection, whose outputs must be the same bits. `on_layer`
        gets each requested attention before it is reduced. Raises `MhaError` if it does not fit into memory."""
        began, model, keywords = perf_counter(), self.loaded.model, self.inputs.keywords
        batch = len(self.inputs.sequences)
        peak_bytes = self.require_room(batch)
        self.layers = PassInspection(
            model,
            self.inputs,
            self.wanted,
            self.n_layers,
            on_layer=on_layer,
            report_progress=report_progress,
            peak_bytes=peak_bytes,
        )
        report_progress(0.0, "the first layer")
        with captured(model, self.layers.take, batch=batch):
            outputs = outputs_of(model, keywords)
        self.seconds["pass and statistics"] = perf_counter() - began
        if not self.layers.results:
            chosen, unfit = self.wanted.model, self.layers.unfit
            of_chosen = {(kind, n): reason for (kind, n), reason in unfit.items() if chosen.includes(n, kind)}
            raise nothing_seen(self.loaded.config.model_type, chosen.layers, self.layers.found, of_chosen)
        if verify or self.wanted.model.verify_outputs:
            began = perf_counter()
            self.compared_len = max(tensor.shape[1] for tensor in keywords.values())
            self.identical = are_identical(outputs, outputs_of(model, keywords))
            self.seconds["comparison"] = perf_counter() - began

    def axes(self, kind: AttentionKind) -> Axes:
        """The texts on the query and key axes of an attention of this kind."""
        return axes_of(self.inputs, kind, self.loaded.dtype, device_of(self.loaded.model))

    def record(self) -> Record:
        """The record of the finished layers, at least one."""
        loaded, checkpoint = self.loaded, self.loaded.checkpoint
        model = replace(
            entry_of(loaded.model, loaded.source, loaded.revision),
            identical_outputs=self.identical,
            compared_len=self.compared_len,
            generated=self.generated,
        )
        record = self.layers.record(model, self.seconds, device=self.wanted.model.device)
        config = replace(record.config, tokenizer=checkpoint.tokenizer or "word")
        return replace(record, config=config, weights=checkpoint.path)
