"""The request for scanning a corpus, before the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from mhacli.commands.scan.settings import RowFormat
from mhacli.record.heads import SINK_SHARE, SINK_TOKENS, HeadsRequest
from mhacli.record.record import LayerChoice
from mhacli.requests.checkpoint import ModelRequest
from mhacli.requests.device_map import DeviceMap
from mhacli.settings import Reducer
from mhacli.text.conditions import parse_pattern


@dataclass(frozen=True)
class ScanRequest:
    """The checkpoint by path or id, and the head statistics to compute for every document.

    `conditions` are values of `--where`, `spans` of `--span`. `tokenizer` None is the checkpoint's own; `dtype` None is
    that of its weights. A `device_map` replaces `device`. `max_tokens` truncates documents. `threads` are torch's
    threads in each worker. With `effect`, each head is also removed in each document. The request can be pickled: each
    worker loads the model by it.
    """

    source: str
    revision: str | None = None
    tokenizer: str | None = None
    device: str = "auto"
    device_map: DeviceMap | None = None
    dtype: str | None = None
    threads: int = 1
    max_tokens: int | None = None
    layers: tuple[LayerChoice, ...] | None = None
    heads: tuple[int, ...] | None = None
    conditions: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()
    sink_tokens: int = SINK_TOKENS
    sink_share: float = SINK_SHARE
    allow_nonfinite: bool = False
    reducer: Reducer = "auto"
    effect: bool = False
    rows: RowFormat = "jsonl"

    def of_document(self, text: str, spans: tuple[str, ...] = ()) -> ModelRequest:
        """The request that `mha heads` would make for one document, with these words of `spans`."""
        return ModelRequest(
            source=self.source,
            checkpoint=None,
            texts=(text,),
            wanted=HeadsRequest(
                heads=self.heads,
                patterns=tuple(map(parse_pattern, self.conditions)),
                sink_tokens=self.sink_tokens,
                sink_share=self.sink_share,
                allow_nonfinite=self.allow_nonfinite,
                reducer=self.reducer,
            ),
            revision=self.revision,
            spans=spans,
            layers=self.layers,
            tokenizer=self.tokenizer,
            device=self.device,
            device_map=self.device_map,
            dtype=self.dtype,
            threads=self.threads,
            max_tokens=self.max_tokens,
            keep=(),
        )
