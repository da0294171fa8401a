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
from mhacli.io import memory
from mhacli.io.progress import Progress, no_progress
from mhacli.models.calls import Call
from mhacli.models.capture import captured
from mhacli.models.inputs import ModelInputs, are_identical, outputs_of
from mhacli.models.layer_names import n_attentions_of, size_of
from mhacli.models.layers import KEPT, PassInspection, axes_of, entry_of, nothing_seen
from mhacli.models.load import Loaded
from mhacli.record.record import Generated, Record
from mhacli.run import Run
from mhacli.text.tokens import AttentionKind

LEAST_ROWS = 2
"""The rows of the smallest batch of removals: one removal and an untouched row."""


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
        config = self.loaded.config
        if self.wanted.model.layers is None:
            return max(1, n_attentions_of(config))
        return sum(3 if kind is None and config.is_encoder_decoder else 1 for kind, _ in self.wanted.model.layers)

    # ------------------------------------------------------------------------------------------------------- its memory

    def _size(self, name: str) -> int:
        return size_of(self.loaded.text_config, name) or 1

    @property
    def _item(self) -> int:
        return int(self.loaded.model.dtype.itemsize)

    def pass_bytes(self, batch: int, length: int) -> int:
        """The peak of a pass over `batch` texts in bytes, without the weights. A kept matrix exists once more while it is
        assembled."""
        n_heads, d_model, item = self._size("num_attention_heads"), self._size("hidden_size"), self._item
        d_inner, cells, keep = self._size("intermediate_size"), batch * length * length, self.wanted.keep
        n_kept = self.n_layers * len(KEPT if keep is None else keep)
        kept_bytes = min(self.wanted.keep_limit, n_kept * cells * n_heads * FLOAT32_BYTES)
        builds_matrices = getattr(self.loaded.config, "_attn_implementation", None) != "sdpa"
        matrices = 4 * (builds_matrices + (kept_bytes > 0)) * cells * n_heads * max(FLOAT32_BYTES, item)
        rows = batch * length * (8 * d_model + 3 * max(d_inner, 4 * d_model)) * item
        on_gpu = self.loaded.device.type != "cpu"
        statistics = statistics_bytes(batch, n_heads, (length, length), wide=FLOAT32_BYTES, on_gpu=on_gpu)
        return rows + matrices + 3 * cells + kept_bytes + statistics

    def removal_bytes(self, n_rows: int, *, n_run: int, n_logits: int, length: int) -> int:
        """The larger peak, without the weights, of the pass over `length` tokens and of a batch of `n_rows` removals from it.

        A row runs `n_run` tokens and gives `n_logits`. Outputs of blocks and heads are kept twice, and keys and values once."""
        item, n_run = self._item, min(n_run, length)
        row_bytes, logit_bytes = length * self._size("hidden_size") * item, max(FLOAT32_BYTES, item) + 32
        removals = self.pass_bytes(n_rows, length) * n_run // length + 2 * n_rows * row_bytes
        kept = 5 * self.n_layers * row_bytes + n_rows * n_logits * logit_bytes
        return max(self.pass_bytes(len(self.inputs.sequences), length), removals) + kept

    def rows_that_fit(self, most: int, available: int, *, n_run: int, n_logits: int) -> int:
        """The number of rows, at most `most`, that a batch of removals may have. Raises `MhaError` as `require_room` does if
        `LEAST_ROWS` do not fit."""
        needed = partial(self.removal_bytes, n_run=n_run, n_logits=n_logits)
        require_room(
            lambda n: needed(LEAST_ROWS, length=n),
            self.length,
            available,
            what=f"{LEAST_ROWS} copies of {self._words}, {n_logits} logits",
        )
        rows = range(max(most, LEAST_ROWS), LEAST_ROWS, -1)
        return next((n for n in rows if memory.fits(needed(n, length=self.length), available)), LEAST_ROWS)

    @property
    def _words(self) -> str:
        return f"{self.length} tokens, {self._size('num_attention_heads')} heads"

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
        peak_bytes = require_room(
            partial(self.pass_bytes, batch),
            self.length,
            free_bytes(str(self.loaded.device)),
            what=f"{self._words}, batch {batch}",
        )
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
        return axes_of(self.inputs, kind, self.loaded.dtype, self.loaded.device)

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
