"""The request for inspecting a checkpoint, before the model is loaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from mhacli.models.folder import Checkpoint
from mhacli.record.heads import HeadsRequest
from mhacli.record.record import LayerChoice
from mhacli.requests.device_map import DeviceMap
from mhacli.settings import DEFAULT_KEEP_LIMIT, PaddingSide
from mhacli.text.spans import Message


@dataclass(frozen=True)
class ModelRequest:
    """The checkpoint by path or id, its folder if already read, the texts, and the requested head statistics.

    `context` is the input of an encoder, `chat` a conversation in place of a text. `spans` are arguments of `--span`.
    `n_generated` tokens are generated greedily. `tokenizer` None is the checkpoint's own; `dtype` None is that of its
    weights. A `device_map` spreads the model and replaces `device`. `max_tokens` truncates texts; without it, longer
    texts are refused. `keep` are the matrices to keep of each layer, within `keep_limit` bytes; None keeps as many as
    fit.
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
    """Whether `source` can only be the id of a checkpoint on a hub: neither it nor its first folder exists here, and it
    is not written as a path."""
    first = source.partition("/")[0]
    is_path = source.startswith((".", "/", "~")) or (first != source and os.path.isdir(first))
    return not os.path.lexists(source) and not is_path and bool(_HUB_ID.fullmatch(source))
