"""The counts and widths of a checkpoint's heads under mha's names, from the names of its family in `config.json`.

Nothing is guessed from shapes: sizes that the config lacks are None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from mhacli.errors import MhaError
from mhacli.settings import MAX_HEADS, MAX_WIDTH


class _Size(NamedTuple):
    """The largest value of a size, and its names in configs: the common ones, and those of an encoder and a decoder, which
    precede them in a model that has both."""

    largest: int
    names: tuple[str, ...]
    encoder: tuple[str, ...] = ()
    decoder: tuple[str, ...] = ()


_SIZES: Mapping[str, _Size] = {
    "n_layers": _Size(10_000, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), ("encoder_layers",),
                      ("decoder_layers", "num_decoder_layers")),
    "n_heads": _Size(MAX_HEADS, ("num_attention_heads", "n_head", "n_heads", "num_heads"), ("encoder_attention_heads",),
                     ("decoder_attention_heads",)),
    "n_kv_heads": _Size(MAX_HEADS, ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")),
    "d_head": _Size(MAX_WIDTH, ("head_dim", "d_kv", "d_head")),
    "d_v": _Size(MAX_WIDTH, ("v_head_dim", "d_v")),
    "d_model": _Size(MAX_WIDTH, ("hidden_size", "n_embd", "d_model", "dim")),
    "vocabulary": _Size(1 << 31, ("vocab_size",)),
    "positions": _Size(1 << 53, ("max_position_embeddings", "n_positions", "max_seq_len"), ("max_source_positions",),
                       ("max_target_positions",)),
}  # fmt: skip
_NESTED = ("text_config", "vision_config", "audio_config", "attn_config", "encoder", "decoder")


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


def head_counts(config: Mapping[str, Any], stack: str | None = None) -> HeadCounts:
    """The sizes of a checkpoint's attention by its config, for one `stack` (encoder, decoder, cross, text, vision) or
    in general: those of the language model, and of an encoder before a decoder.

    Defaults: `n_kv_heads` is `n_heads`, `d_head` is `d_model / n_heads`, and `d_v` is `d_head`.
    """
    nested = config.get(f"{stack or 'text'}_config")
    if isinstance(nested, Mapping) and (stack or not any(config.get(name) for name in _SIZES["n_heads"].names)):
        config = nested
    sizes: dict[str, int | None] = {}
    for ours, (_, names, encoder, decoder) in _SIZES.items():
        first = {"encoder": encoder, "decoder": decoder, "cross": decoder}.get(stack or "", ())
        every = (*first, *names, *(() if stack else (*encoder, *decoder)))
        value = next((config[name] for name in every if config.get(name) is not None), None)
        sizes[ours] = value if isinstance(value, int) else None
    n_heads, d_model = sizes["n_heads"], sizes["d_model"]
    sizes["n_kv_heads"] = _kv_heads(config, sizes["n_kv_heads"], n_heads)
    if sizes["d_head"] is None and n_heads and d_model and d_model % n_heads == 0:
        sizes["d_head"] = d_model // n_heads
    return HeadCounts(**sizes | {"d_v": sizes["d_v"] or sizes["d_head"]})


def _kv_heads(config: Mapping[str, Any], stated: int | None, n_heads: int | None) -> int | None:
    """The number of kv heads. In Falcon and GPT-BigCode flags decide whether the count in the config applies.

    Source: transformers, FalconAttention and GPTBigCodeAttention.
    """
    is_falcon = (
        config.get("model_type") in ("falcon", "RefinedWeb", "RefinedWebModel") or "new_decoder_architecture" in config
    )
    if (is_falcon and not config.get("new_decoder_architecture")) or config.get("model_type") == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else n_heads
    return n_heads if stated is None else stated


def check_sizes(config: Mapping[str, Any], path: str) -> None:
    """Raises `MhaError` for an impossible size in the config, with mha's name and the config's."""
    parts = {"": config} | {f"{name}.": config[name] for name in _NESTED if isinstance(config.get(name), Mapping)}
    for ours, size in _SIZES.items():
        for (where, part), theirs in product(parts.items(), (*size.names, *size.encoder, *size.decoder)):
            value = part.get(theirs)
            counts = (
                [] if value is None or isinstance(value, Mapping) else value if isinstance(value, list) else [value]
            )
            for count in counts:
                if type(count) is not int or not 1 <= count <= size.largest:
                    both = where + theirs if ours == theirs else f"{ours} ({where}{theirs})"
                    message = f"{path}: {both} {count!r:.80} is not a whole number from 1 to {size.largest}"
                    raise MhaError(message, code="bad-file", path=path)
