"""What is asked of a checkpoint, before anything of it is loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from mhacli.checkpoints.folder import Checkpoint
from mhacli.requests.device_map import DeviceMap
from mhacli.results.record.head_statistics import HeadsRequest
from mhacli.results.record.record import LayerChoice
from mhacli.spec.config import DEFAULT_KEEP_LIMIT, PaddingSide
from mhacli.text.spans import Message


@dataclass(frozen=True)
class ModelRequest:
    """The checkpoint by its path or id, its folder where that is already read, the texts, and what to find out.

    `context` is what the encoder of a model of two halves reads, `chat` the messages that take the place of a text. `spans`
    are words of `--span`. `n_generated` tokens are made by the model itself, greedily. `tokenizer` None is the checkpoint's
    own; `dtype` None is that of its weights. A `device_map` spreads the model, and takes the place of `device`. `max_tokens`
    cuts texts; without it longer ones are refused. `keep` are matrices of each layer, None for as many as fit, within
    `keep_limit` bytes.
    """

    source: str
    checkpoint: Checkpoint | None
    texts: tuple[str, ...]
    wanted: HeadsRequest
    revision: str | None = None
    context: tuple[str, ...] = ()
    chat: tuple[Message, ...] = ()
    spans: tuple[str, ...] = ()
    layers: tuple[LayerChoice, ...] | None = None
    n_generated: int = 0
    tokenizer: str | None = None
    device: str = "auto"
    device_map: DeviceMap | None = None
    dtype: str | None = None
    threads: int | None = None
    padding: PaddingSide | None = None
    max_tokens: int | None = None
    keep: tuple[str, ...] | None = None
    keep_limit: int = DEFAULT_KEEP_LIMIT


_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


def is_hub_id(source: str) -> bool:
    """Whether it can only be the id of a checkpoint on a hub: nothing of that name is here, it is not written as a path, and
    what would be its first folder is not here either."""
    first = source.partition("/")[0]
    is_path = source.startswith((".", "/", "~")) or (first != source and os.path.isdir(first))
    return not os.path.lexists(source) and not is_path and bool(_HUB_ID.fullmatch(source))
