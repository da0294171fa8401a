"""The counts and widths of a checkpoint's heads under mha's names, from the names of its family.

The names are those of `config.json` in Hugging Face checkpoints. Nothing is guessed from shapes: sizes that the config
lacks are None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mhacli.errors import MhaError, UsageError
from mhacli.settings import MAX_HEADS, MAX_WIDTH

MAX_LAYERS = 10_000
MAX_TABLE_ROWS = 1 << 31
"""The most vocabulary entries or positions that a config may state."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "d_head": ("head_dim", "d_kv", "d_head"),
    "d_v": ("v_head_dim", "d_v"),
    "d_model": ("hidden_size", "n_embd", "d_model", "dim"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
_ENCODER = {
    "n_layers": ("encoder_layers",),
    "n_heads": ("encoder_attention_heads",),
    "positions": ("max_source_positions",),
}
_DECODER = {
    "n_layers": ("decoder_layers", "num_decoder_layers"),
    "n_heads": ("decoder_attention_heads",),
    "positions": ("max_target_positions",),
}
_OF_STACK: Mapping[str, Mapping[str, tuple[str, ...]]] = {"encoder": _ENCODER, "decoder": _DECODER, "cross": _DECODER}
"""Names that an encoder-decoder model has for one stack. They take precedence over the common names."""
_LIMITS = {"n_layers": MAX_LAYERS, "n_heads": MAX_HEADS, "n_kv_heads": MAX_HEADS, "d_head": MAX_WIDTH, "d_v": MAX_WIDTH,
           "d_model": MAX_WIDTH, "vocabulary": MAX_TABLE_ROWS, "positions": 1 << 53}  # fmt: skip
_NESTED = ("text_config", "vision_config", "audio_config", "attn_config", "encoder", "decoder")
_MAX_INT = 1 << 63


@dataclass(frozen=True)
class HeadCounts:
    """Counts and widths of a checkpoint's attention; None where the config lacks them.

    `vocabulary` and `positions` are the numbers of rows of its tables.
    """

    n_layers: int | None = None
    n_heads: int | None = None
    n_kv_heads: int | None = None
    d_head: int | None = None
    d_v: int | None = None
    d_model: int | None = None
    vocabulary: int | None = None
    positions: int | None = None


@dataclass(frozen=True)
class ProjectionSizes:
    """The sizes that determine how rows of projections split into heads. `d_input` is the width of the projections'
    input."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    d_v: int
    d_model: int
    d_input: int


def part_of(config: Mapping[str, Any], stack: str | None) -> Mapping[str, Any]:
    """The config of one tower (`text`, `vision`), else that of the language model, else the whole config."""
    tower = config.get(f"{stack}_config") if stack in ("text", "vision") else None
    nested = config.get("text_config")
    if isinstance(tower, Mapping):
        return tower
    if stack is None and isinstance(nested, Mapping) and name_in(config, "n_heads", None) is None:
        return nested
    return config


def head_counts(config: Mapping[str, Any], stack: str | None = None) -> HeadCounts:
    """The sizes of a checkpoint's attention by its config, for one `stack` (encoder, decoder, cross, text, vision) or
    in general.

    Defaults: `n_kv_heads` is `n_heads`, `d_head` is `d_model / n_heads`, and `d_v` is `d_head`.
    """
    config = part_of(config, stack)
    sizes: dict[str, int | None] = {}
    for ours in _NAMES:
        name = name_in(config, ours, stack)
        sizes[ours] = None if name is None or not isinstance(config[name], int) else config[name]
    n_heads, d_model = sizes["n_heads"], sizes["d_model"]
    sizes["n_kv_heads"] = _kv_heads(config, sizes["n_kv_heads"], n_heads)
    if sizes["d_head"] is None and n_heads and d_model and d_model % n_heads == 0:
        sizes["d_head"] = d_model // n_heads
    if sizes["d_v"] is None:
        sizes["d_v"] = sizes["d_head"]
    return HeadCounts(**sizes)


def _kv_heads(config: Mapping[str, Any], stated: int | None, n_heads: int | None) -> int | None:
    """The number of kv heads. In Falcon and GPT-BigCode flags decide whether the count in the config applies.

    Source: transformers, FalconAttention and GPTBigCodeAttention.
    """
    if config.get("model_type") in ("falcon", "RefinedWeb", "RefinedWebModel") or "new_decoder_architecture" in config:
        if config.get("new_decoder_architecture"):
            return stated if stated is not None else n_heads
        return 1 if config.get("multi_query", True) else n_heads
    if config.get("model_type") == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else n_heads
    return stated if stated is not None else n_heads


def name_in(config: Mapping[str, Any], ours: str, stack: str | None) -> str | None:
    """The config's name for one of mha's sizes; None if the config lacks the size."""
    names = (*_OF_STACK.get(stack or "", {}).get(ours, ()), *_NAMES[ours])
    if stack is None:  # in an encoder-decoder model the encoder's sizes stand for the model
        names += (*_ENCODER.get(ours, ()), *_DECODER.get(ours, ()))
    return next((name for name in names if config.get(name) is not None), None)


def sizes_of(config: Mapping[str, Any], stack: str | None, given: Mapping[str, int]) -> ProjectionSizes:
    """The sizes of a layer by config, overridden by those of the command line (`n_heads`, `n_kv_heads`, `d_head`).

    Raises `UsageError` for a missing size, with mha's name and the family's names.
    """
    counts = head_counts(config, stack)
    n_heads = given.get("n_heads", counts.n_heads)
    n_kv_heads = given.get("n_kv_heads", n_heads if "n_heads" in given else counts.n_kv_heads)
    d_head = given.get("d_head", counts.d_head)
    if "n_heads" in given and "d_head" not in given and counts.d_model and counts.d_model % given["n_heads"] == 0:
        d_head = counts.d_model // given["n_heads"]
    values = {"n_heads": n_heads, "d_head": d_head, "d_model": counts.d_model}
    for ours, value in values.items():
        if value is None:
            raise UsageError(
                f"config.json does not have {ours} ({' or '.join(_NAMES[ours])}), without which rows cannot be split into heads",
                hint="add --heads N or --d-head N",
            )
    width = counts.d_model or 0
    d_v = (d_head if "d_head" in given or "n_heads" in given else counts.d_v) or d_head
    return ProjectionSizes(n_heads or 0, n_kv_heads or n_heads or 0, d_head or 0, d_v or 0, width, width)


def check_numbers(config: Mapping[str, Any], path: str) -> None:
    """Raises `MhaError` for an impossible size in the config, with both names, and for integers beyond 64 bits."""
    ours_of = {
        theirs: ours for table in (_NAMES, _ENCODER, _DECODER) for ours, names in table.items() for theirs in names
    }
    for where, part in [("", config)] + [(f"{name}.", config[name]) for name in _NESTED if name in config]:
        for name, value in part.items() if isinstance(part, Mapping) else ():
            if name in ours_of and not isinstance(value, (Mapping, type(None))):
                for count in value if isinstance(value, list) else [value]:
                    _require_count(count, f"{where}{name}", ours_of[name], path)
    for where, value in _numbers(config):
        if isinstance(value, int) and abs(value) >= _MAX_INT:
            raise MhaError(f"{path}: {where} does not fit in 64 bits", code="bad-file", path=path)


def _require_count(value: Any, theirs: str, ours: str, path: str) -> None:
    if type(value) is not int or not 1 <= value <= _LIMITS[ours]:
        both = ours if ours == theirs else f"{ours} ({theirs})"
        raise MhaError(
            f"{path}: {both} {value!r:.80} is not a whole number from 1 to {_LIMITS[ours]}",
            code="bad-file",
            path=path,
        )


def _numbers(value: Any) -> Iterator[tuple[str, Any]]:
    """Every number with its path, such as `a.b[3]`. The search is iterative, so that deep nesting is harmless."""
    waiting = [("", value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, Mapping):
            waiting += [(f"{where}.{name:.80}".lstrip("."), child) for name, child in item.items()]
        elif isinstance(item, list):
            waiting += [(f"{where}[{i}]", child) for i, child in enumerate(item)]
        else:
            yield where, item
